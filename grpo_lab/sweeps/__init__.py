"""Sweeps: from an experiment's declaration to its runs, and the processes that run them."""
