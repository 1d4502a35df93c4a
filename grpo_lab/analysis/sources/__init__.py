"""Where a sweep comes from: run folders, saved data or an MLflow store, all read into one `SweepData`."""
