"""What a run leaves behind: its folder is the truth, MLflow a mirror that can be fed from it at any time.

`run_log` writes the folder and `run_reader` reads it, both on the files and locks of `files`; `provenance`
says what ran and where, `whole` whether the files still are what was written. `mlflow_mirror` copies the
folder to MLflow from a background thread, or later in the foreground with `grpo-lab sync`; `mlflow_sender`
does the sending and `mlflow_store` opens the store.
"""
