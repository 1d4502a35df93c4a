"""Compute accounting of a run: counters, and simulated time."""
