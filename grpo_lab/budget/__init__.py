"""What a run spends: counted, and in simulated time."""
