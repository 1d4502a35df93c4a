"""The records of a run: its folder is the truth, and MLflow a copy that can be filled from it at any time.

`run_log` writes the folder and `run_reader` reads it, both with the files and locks of `files`. `provenance`
records what ran and where; `checksums` checks whether files still are what was written. `mlflow_exporter` copies the
folder to MLflow from a background thread, or later in the foreground with `grpo-lab sync`. `mlflow_sender`
sends and `mlflow_store` opens the store; `trackers` does the same for TensorBoard, W&B and trackio. `external` makes
run folders of what other frameworks logged.
"""
