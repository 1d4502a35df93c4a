"""The thresholds of `grpo-lab doctor`, from the recorded runs of experiments/*/data."""
