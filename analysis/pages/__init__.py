"""The pages of README.md and experiments/, filled from the saved data: `PYTHONPATH=analysis python -m pages`."""
