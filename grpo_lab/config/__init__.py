"""Configuration of a run: its slots, the rules between them, and their composition by Hydra."""
