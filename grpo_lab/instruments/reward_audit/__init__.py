"""Audit of a reward: adversarial responses with known truths, judged in processes with limits of time and memory."""

SETTING = "GRPO_LAB_AUDITED"  # environment variable with the slot and overrides of an audited option, as JSON
