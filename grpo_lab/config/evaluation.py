"""The evaluation slot: when to evaluate, on how many questions, how to sample; run/evaluate.py does it."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.tricks.base import require_field, require_not_negative, require_positive


@dataclass(frozen=True)
class Evaluation:
    """When to evaluate, on how many questions, and how to sample the responses."""

    every: int  # steps; step 0 and the last step are always evaluated
    samples: int  # responses per question
    pass_at: list[int]  # the k of pass_at_k, each at most `samples`
    probe_problems: int
    heldout_problems: int
    downstream_problems: int
    temperature: float
    top_p: float
    max_tokens: int
    downstream_max_tokens: int
    initial_kl: bool  # keeps the initial weights in memory beside the learner's

    def __post_init__(self) -> None:
        require_positive(
            self, "every", "samples", "probe_problems", "heldout_problems", "downstream_problems",
            "max_tokens", "downstream_max_tokens",
        )  # fmt: skip
        require_not_negative(self, "temperature")
        require_field(0 < self.top_p <= 1, self, "top_p", "in (0, 1]")
        require_field(
            all(1 <= k <= self.samples for k in self.pass_at), self, "pass_at", f"between 1 and samples={self.samples}"
        )
