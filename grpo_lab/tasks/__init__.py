"""Tasks, prompt templates, verifiers and base models."""
