"""grpo_lab: which GRPO tricks really help."""

from grpo_lab.deferred import defer

defer("torch", "transformers", "pandas")
