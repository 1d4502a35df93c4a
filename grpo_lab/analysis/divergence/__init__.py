"""Divergence of training reward and downstream accuracy: measures of runs, and what choosing by reward costs."""
