"""Engines: what turns requests into completions, behind one protocol (see `base`)."""
