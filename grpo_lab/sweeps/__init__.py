"""Sweeps: what an experiment declares, the cells it expands to, and the processes that run them.

`design` reads files and imports no torch, so that analysis can use it.
"""
