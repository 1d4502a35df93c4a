"""Engines: samplers that turn requests into completions, behind one protocol (see `base`)."""
