"""What a run spends: counters, and simulated time."""
