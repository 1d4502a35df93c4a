"""Sweeps: from an experiment's declaration to its cells, and the processes that run them."""
