"""The state of a run, its records, checkpoints and evaluations."""
