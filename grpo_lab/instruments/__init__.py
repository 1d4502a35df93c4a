"""Instruments for trainers, batches, logs and rewards that need not be ours."""
