"""grpo_lab: which GRPO tricks really help."""
