"""Sweeps: what an experiment declares, the cells it expands to, and the processes that run them.

`design` and `record` read and write files and import no torch, so that analysis can use them.
"""
