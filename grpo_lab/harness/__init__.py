"""Evaluation of a run's checkpoints by code that is not ours."""
