"""The base models that come with grpo_lab: building new ones into the package, and building shipped ones again."""
