"""What a run leaves behind: its folder is the truth, MLflow a mirror that can be fed from it at any time.

`run_log` writes the folder, `provenance` says what ran and where, `mlflow_mirror` copies the folder to
MLflow from a background thread, or later in the foreground with `grpo-lab sync`.
"""
