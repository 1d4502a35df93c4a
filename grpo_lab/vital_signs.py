"""The numbers of one training step, from the records its stages passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.config import RunConfig
from grpo_lab.optim import UpdateReport
from grpo_lab.tricks.base import Trick
from grpo_lab.tricks.group_filter import Signal, without_signal
from grpo_lab.types import Graded, LossOutput, Rollouts

# A correction weight this close to 1 is rounding between two ways to compute one number.
_UNTOUCHED_WEIGHT = 1e-4
# The axes whose options can turn out to have touched nothing.
TOUCHING_AXES = (
    "truncation", "reward_shaping", "group_filter", "correction", "rejection", "surrogate", "kl", "entropy",
)  # fmt: skip


def reward_signs(shaped: Graded, kept: Graded) -> dict[str, float]:
    """Rewards before any row left (`shaped`) and of what enters the loss (`kept`)."""
    mean = shaped.reward.mean(dim=1, keepdim=True)
    signs = {
        "reward/mean": shaped.reward.mean(),
        "reward/outcome": shaped.outcome.mean(),
        "reward/group_std": (shaped.reward - mean).pow(2).mean(dim=1).sqrt().mean(),
        "rollout/length": shaped.lengths.double().mean(),
        "rollout/truncated": shaped.truncated.double().mean(),
        "rollout/zero_signal": without_signal(shaped, Signal.outcome).double().mean(),
        "rollout/trained": kept.trained.double().mean(),
    }
    for name, values in shaped.components.items():
        signs[f"reward/component/{name}"] = values.mean()
    for name, rows in (("correct", shaped.outcome == 1), ("wrong", shaped.outcome == 0)):
        if rows.any():
            signs[f"rollout/length_{name}"] = shaped.lengths[rows].double().mean()
    if kept.trained.any():
        signs["reward/kept_mean"] = kept.reward[kept.trained].mean()
        signs["reward/kept_outcome"] = kept.outcome[kept.trained].mean()
        for name, values in kept.components.items():
            signs[f"reward/kept_component/{name}"] = values[kept.trained].mean()
    return {name: float(value) for name, value in signs.items()}


def advantage_signs(advantages: Float[Tensor, "P G"], kept: Graded) -> dict[str, float]:
    """Mean and mean magnitude of the advantages that enter the loss."""
    chosen = advantages[kept.trained]
    if not chosen.numel():
        return {}
    return {"advantage/mean": float(chosen.mean()), "advantage/absolute": float(chosen.abs().mean())}


def _share_of_rows(before: Graded, after: Graded) -> float:
    changed = (before.counted != after.counted) | (before.trained != after.trained)
    return float((changed | (before.reward != after.reward)).double().mean())


def touched_rows(graded: Graded, shaped: Graded, cut: Graded, kept: Graded) -> dict[str, float]:
    """The share of rows that reward shaping, truncation and the group filter changed."""
    return {
        "touched/reward_shaping": _share_of_rows(graded, shaped),
        "touched/truncation": _share_of_rows(shaped, cut),
        "touched/group_filter": _share_of_rows(cut, kept),
    }


def touched_tokens(
    rollouts: Rollouts, weights: Float[Tensor, "N T"] | None, stays: Bool[Tensor, "N T"] | None
) -> dict[str, float]:
    """The share of sampled tokens that the correction reweighted and the rejection removed."""
    mask = rollouts.sampled_mask
    reweighted = 0.0 if weights is None else float(((weights[mask] - 1).abs() > _UNTOUCHED_WEIGHT).double().mean())
    rejected = 0.0 if stays is None else float((~stays[mask]).double().mean())
    return {"touched/correction": reweighted, "touched/rejection": rejected}


@dataclass
class UpdateTally:
    """Adds up what the updates of one step report."""

    losses: list[float] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

    def add_outputs(self, outputs: Sequence[LossOutput]) -> float:
        """Count the microbatches of one update; returns the update's loss."""
        self.losses.append(sum(float(output.loss.detach()) for output in outputs))
        for output in outputs:
            for name, value in output.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(value)
            for name, value in output.maxima.items():
                self.maxima[name] = max(self.maxima.get(name, 0.0), float(value))
        return self.losses[-1]

    def signs(self) -> dict[str, float]:
        """The step's learner metrics; only the counts are there when every update was skipped."""
        signs = {"train/updates": float(len(self.reports)), "train/skipped_updates": float(self.skipped)}
        if not self.reports:
            return signs
        tokens, number = self.sums["tokens"], len(self.reports)
        per_token = {
            "train/entropy": "entropy",
            "train/ratio": "ratio",
            "train/k3_old": "k3_old",
            "train/k3_ref": "k3_ref",
            "train/kl_term": "kl_term",
            "mismatch/absolute": "mismatch_absolute",
            "mismatch/k3": "mismatch_k3",
            "touched/surrogate": "surrogate_touched",
            "touched/kl": "kl_touched",
            "touched/entropy": "entropy_touched",
        }
        signs |= {name: self.sums[key] / tokens for name, key in per_token.items() if key in self.sums}
        return signs | {
            "train/loss": sum(self.losses) / number,
            "train/gradient_norm": sum(r.gradient_norm for r in self.reports) / number,
            "train/update_norm": sum(r.update_norm for r in self.reports) / number,
            "train/learning_rate": self.reports[-1].learning_rate,
            "mismatch/max": self.maxima["mismatch_max"],
        }


def inert_axes(run: RunConfig, touched: dict[str, float]) -> list[str]:
    """Axes whose option is switched on and touched nothing in the whole run; `touched` holds maxima."""
    on = [axis for axis in TOUCHING_AXES if not _trick(run, axis).touches_nothing]
    return [axis for axis in on if touched.get(f"touched/{axis}", 0.0) == 0.0]


def _trick(run: RunConfig, axis: str) -> Trick:
    return getattr(run, axis)


def rollout_table(
    rollouts: Rollouts, texts: Sequence[str], kept: Graded, advantages: Float[Tensor, "P G"]
) -> pd.DataFrame:
    """One table row per response: what was asked, what was said and what it was worth."""
    asked = [problem for problem in rollouts.problems for _ in range(rollouts.group_size)]
    columns = {
        "outcome": kept.outcome,
        "reward": kept.reward,
        "advantage": advantages,
        "length": kept.lengths,
        "truncated": kept.truncated,
        "counted": kept.counted,
        "trained": kept.trained,
    } | {f"component_{name}": values for name, values in kept.components.items()}
    return pd.DataFrame(
        {
            "problem_id": [problem.id for problem in asked],
            "response": list(range(rollouts.group_size)) * len(rollouts.problems),
            "question": [problem.question for problem in asked],
            "answer": [problem.answer for problem in asked],
            "difficulty": [problem.difficulty for problem in asked],
            "text": list(texts),
            "sampler_logprob": torch.where(rollouts.sampled_mask, rollouts.sampler_logprobs, 0.0).sum(1).numpy(),
        }
        | {name: values.flatten().numpy() for name, values in columns.items()}
    )
