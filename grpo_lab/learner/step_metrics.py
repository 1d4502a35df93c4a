"""The numbers of one training step, from the records its stages passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from grpo_lab.config.rules import broken_warnings
from grpo_lab.config.run_config import RunConfig
from grpo_lab.policy.optim import UpdateReport
from grpo_lab.tracking.metrics import CLIP_FRACTION, touched_metric
from grpo_lab.tricks.base import NEGLIGIBLE, Trick
from grpo_lab.tricks.group_filter import Signal, without_signal
from grpo_lab.types import Bool, Float, Graded, Groups, Int, LossOutput, Rollouts, Tensor

# The axes whose options can turn out to have touched nothing.
TOUCHING_AXES = (
    "curriculum", "truncation", "reward_shaping", "group_filter", "old_policy", "correction", "rejection", "baseline",
    "scale", "importance", "surrogate", "denominator", "kl", "entropy",
)  # fmt: skip


@dataclass(frozen=True)
class Stages:
    """One step's rows as each stage left them, in the order of the loop.

    `made` are all whole groups that were generated, `batch` those of them that went on, and `started` counts those
    that were cut off too; `charged` is what enters the loss: after rejection (`kept`) and after a KL penalty in the
    reward. `centred` and `advantages` are of responses [P, G], or of tokens [N, T] where the baseline gives those.
    """

    made: Groups
    batch: Groups
    filtered: Graded
    kept: Graded
    charged: Graded
    centred: Tensor
    advantages: Tensor
    loss_mask: Bool[Tensor, "N T"]
    started: int

    @property
    def in_loss(self) -> Tensor:
        """What of `advantages` enters the loss."""
        return self.charged.trained if self.advantages.shape == self.charged.trained.shape else self.loss_mask


def reward_metrics(made: Groups, charged: Graded) -> dict[str, float]:
    """Rewards of every whole group that was generated, and of what enters the loss (`charged`)."""
    shaped = made.shaped
    mean = shaped.reward.mean(dim=1, keepdim=True)
    metrics = {
        "reward/mean": shaped.reward.mean(),
        "reward/outcome": shaped.outcome.mean(),
        "reward/group_std": (shaped.reward - mean).pow(2).mean(dim=1).sqrt().mean(),
        "rollout/groups": made.number,
        "rollout/length": shaped.lengths.double().mean(),
        "rollout/longest": shaped.lengths.max(),
        "rollout/truncated": shaped.truncated.double().mean(),
        "rollout/frac_zero_std": without_signal(shaped, Signal.outcome).double().mean(),
        "rollout/trained": charged.trained.sum() / shaped.trained.numel(),
    }
    for name, values in shaped.components.items():
        metrics[f"reward/component/{name}"] = values.mean()
    for name, rows in (("correct", shaped.outcome == 1), ("wrong", shaped.outcome == 0)):
        if rows.any():
            metrics[f"rollout/length_{name}"] = shaped.lengths[rows].double().mean()
    if charged.trained.any():
        # A KL penalty is a part of what the loss sees and no part of how good the responses are.
        metrics["reward/in_loss_mean"] = sum(
            charged.components[name][charged.trained].mean() for name in shaped.components
        )
        metrics["reward/in_loss_outcome"] = charged.outcome[charged.trained].mean()
        for name, values in charged.components.items():
            metrics[f"reward/in_loss_component/{name}"] = values[charged.trained].mean()
    return {name: float(value) for name, value in metrics.items()}


_AGES = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3_4": (3, 4), "5_8": (5, 8), "9_16": (9, 16), "17_up": (17, None)}


def staleness_metrics(ages: Int[Tensor, "K"]) -> dict[str, float]:
    """Ages of the sampled tokens in updates: their mean, their maximum, and shares that are a histogram."""
    metrics = {"rollout/staleness": ages.double().mean(), "rollout/staleness_max": ages.max()}
    for name, (low, high) in _AGES.items():
        metrics[f"staleness/{name}"] = _share((ages >= low) & (ages <= (ages.max() if high is None else high)))
    return {name: float(value) for name, value in metrics.items()}


def advantage_metrics(stages: Stages) -> dict[str, float]:
    """Mean and mean magnitude of the advantages that enter the loss, and the factor the scale put on them."""
    chosen, centred = stages.advantages[stages.in_loss], stages.centred[stages.in_loss]
    if not chosen.numel():
        return {}
    metrics = {"advantage/mean": float(chosen.mean()), "advantage/absolute": float(chosen.abs().mean())}
    if float(centred.abs().sum()) > 0:
        metrics["factor/scale"] = float(chosen.abs().sum() / centred.abs().sum())
    return metrics


def _changed(before: Graded, after: Graded) -> Bool[Tensor, "P G"]:
    changed = (before.counted != after.counted) | (before.trained != after.trained)
    return changed | (before.reward != after.reward)


def _share(rows: Tensor) -> float:
    return float(rows.double().mean())


def _share_moved(before: Tensor, after: Tensor, entries: Tensor) -> float:
    """The share of `entries` whose value is another one than before, beyond what eps and rounding do."""
    if not entries.any():
        return 0.0
    gap = (after - before).abs()[entries]
    return float((gap > NEGLIGIBLE * before.abs()[entries].clamp(min=1e-12)).double().mean())


def touched_rows(stages: Stages) -> dict[str, float]:
    """The share of rows that the tricks on rewards, masks and advantages changed; of tokens where those are theirs."""
    made, charged = stages.made, stages.charged
    ended = (made.rollouts.interrupted | made.rollouts.looped).reshape(made.masked.trained.shape)
    went_on = stages.batch.number / stages.started
    reward, entries = charged.reward, charged.trained & charged.counted
    if stages.centred.shape != reward.shape:
        reward, entries = reward.reshape(-1, 1).expand_as(stages.centred), stages.loss_mask
    metrics = {
        "touched/reward_shaping": _share(_changed(made.graded, made.shaped)),
        "touched/truncation": _share(_changed(made.shaped, made.masked) | ended),
        "touched/group_filter": 1 - went_on + went_on * _share(_changed(stages.batch.masked, stages.filtered)),
        "touched/baseline": _share_moved(reward, stages.centred, entries),
        "touched/scale": _share_moved(stages.centred, stages.advantages, entries),
    }
    if charged is not stages.kept:  # a KL penalty in the reward; one in the loss is counted by its tokens
        metrics["touched/kl"] = _share(_changed(stages.kept, charged))
    return metrics


def touched_tokens(
    sampled: Bool[Tensor, "N T"],
    weights: Float[Tensor, "N T"] | None,
    stays: Bool[Tensor, "N T"],
    allowed: Bool[Tensor, "N T"],
    loss_mask: Bool[Tensor, "N T"],
) -> dict[str, float]:
    """The share of sampled tokens the correction reweighted and the rejection removed.

    And, where it did, the share of what was `allowed` into the loss that the entropy trick left out.
    """
    reweighted = 0.0 if weights is None else float(((weights[sampled] - 1).abs() > NEGLIGIBLE).double().mean())
    metrics = {"touched/correction": reweighted, "touched/rejection": float((~stays[sampled]).double().mean())}
    if not torch.equal(allowed, loss_mask):
        metrics["touched/entropy"] = float((~loss_mask[allowed]).double().mean())
    return metrics


@dataclass
class UpdateTally:
    """Adds up what the updates of one step report."""

    losses: list[float] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)  # the sums of the first update alone
    skipped: int = 0
    in_loss: int = 0  # tokens of the updates' losses, read or not
    overflowed: int = 0  # left out because a gradient was not finite in the learner's half precision
    logprobs: Float[Tensor, "N T"] | None = None  # of the learner before the updates, as the first of them read them
    read: Bool[Tensor, "N T"] | None = None  # for which tokens
    critic: dict[str, float] = field(default_factory=dict)  # what the critic reports of the step
    touched: Bool[Tensor, "N T"] | None = None  # tokens the surrogate changed in any update, where they are kept

    def keep_touched(self, rows: Int[Tensor, "M"], touched: Bool[Tensor, "M T"]) -> None:
        """Remember which tokens of these rows of the rollouts the surrogate changed, where they are kept."""
        if self.touched is not None:
            self.touched[rows.cpu(), : touched.shape[1]] |= touched.cpu()

    def keep_reading(self, rows: Int[Tensor, "M"], logprobs: Float[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> None:
        """Remember what the learner says of the tokens of the first update, before it has moved."""
        if self.read is not None:
            where = (rows.cpu(), slice(0, mask.shape[1]))
            self.logprobs[where], self.read[where] = logprobs.detach().cpu().to(self.logprobs.dtype), mask.cpu()

    def add_outputs(self, outputs: Sequence[LossOutput], tokens: int) -> float:
        """Count the microbatches of one update, whose loss is of that many tokens; returns the update's loss."""
        self.in_loss += tokens
        self.losses.append(sum(float(output.loss.detach()) for output in outputs))
        for output in outputs:
            for name, value in output.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(value)
        if len(self.losses) == 1:
            self.first = dict(self.sums)
        return self.losses[-1]

    def mean(self, name: str) -> float:
        """One of the sums, per token of the loss that was read."""
        return self.sums[name] / self.sums["tokens"]

    def metrics(self) -> dict[str, float]:
        """The step's learner metrics; only the counts are there when every update was skipped."""
        metrics = {
            "train/updates": float(len(self.reports)),
            "train/skipped_updates": float(self.skipped),
        } | self.critic
        metrics["train/overflowed_updates"] = float(self.overflowed)
        if not self.reports:
            return metrics
        number = len(self.reports)
        per_token = {
            "train/entropy": "entropy",
            "train/ratio": "ratio",
            "train/approx_kl": "k3_old",
            "train/k3_ref": "k3_ref",
            "train/kl_term": "kl_term",
            "train/entropy_term": "entropy_term",
            "touched/importance": "importance_touched",
            CLIP_FRACTION: "surrogate_touched",
            "touched/kl": "kl_touched",
            "touched/entropy": "entropy_touched",
            "factor/surrogate": "surrogate_weight",
            "factor/correction": "correction_weight",
        }
        metrics |= {name: self.mean(key) for name, key in per_token.items() if key in self.sums}
        denominator = self.sums["weight"] / self.sums["weight_of_original"]
        # Before the learner has moved, its distance to the old policy is what that axis chose.
        metrics["touched/old_policy"] = self.first["drifted"] / self.first["tokens"]
        metrics["touched/denominator"] = float(abs(denominator - 1) > NEGLIGIBLE)
        return metrics | {
            "train/read_share": self.sums["tokens"] / self.in_loss,
            "factor/aggregation": self.sums["weight"] / number,
            "factor/denominator": denominator,
            "train/loss": sum(self.losses) / number,
            "train/gradient_norm": sum(r.gradient_norm for r in self.reports) / number,
            "train/update_norm": sum(r.update_norm for r in self.reports) / number,
            "train/learning_rate": self.reports[-1].learning_rate,
        }


def inert_axes(run: RunConfig, touched: dict[str, float]) -> list[str]:
    """Axes whose option is switched on and touched nothing in the whole run; `touched` holds maxima.

    Among them those that a rule knows to be idle: a reward that is shaped and never read was touched in vain.
    """
    on = [axis for axis in TOUCHING_AXES if not _trick(run, axis).touches_nothing]
    idle = {rule.axes[0] for rule in broken_warnings(run) if rule.idles}
    return [axis for axis in on if axis in idle or touched.get(touched_metric(axis), 0.0) == 0.0]


def _trick(run: RunConfig, axis: str) -> Trick:
    return getattr(run, axis)


def rollout_table(
    rollouts: Rollouts,
    texts: Sequence[str],
    pieces: Sequence[Sequence[str]],
    kept: Graded,
    advantages: Tensor,
    token_advantages: Float[Tensor, "N T"],
    loss_mask: Bool[Tensor, "N T"],
    clipped: Bool[Tensor, "N T"],
) -> pd.DataFrame:
    """One table row per response: what was asked, what was said, what it and each of its tokens was worth.

    `pieces` [N][T] are the tokens as text. `clipped` are the tokens of the loss whose gradient the surrogate changed
    in any update of the step. The advantage of a response whose tokens have their own is their mean.
    """
    if advantages.shape != kept.reward.shape:
        advantages = advantages.sum(dim=1) / rollouts.sampled_mask.sum(dim=1).clamp(min=1)
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
            "tokens": list(map(list, pieces)),
            "interrupted": rollouts.interrupted.numpy(),
            "stopped": rollouts.looped.numpy(),
            "wanted": [problem.target_length or 0 for problem in asked],
            "token_sampled": _ragged(rollouts.sampled_mask, rollouts.lengths),
            "token_advantage": _ragged(token_advantages.float(), rollouts.lengths),
            "token_in_loss": _ragged(loss_mask, rollouts.lengths),
            "token_clipped": _ragged(clipped, rollouts.lengths),
            "token_logprob": _ragged(rollouts.sampler_logprobs, rollouts.lengths),
            "sampler_logprob": torch.where(rollouts.sampled_mask, rollouts.sampler_logprobs, 0.0).sum(1).numpy(),
        }
        | {name: values.flatten().numpy() for name, values in columns.items()}
    )


def _ragged(values: Tensor, lengths: Int[Tensor, "N"]) -> list[np.ndarray]:
    """The real tokens of each row."""
    return [row[:length] for row, length in zip(values.cpu().numpy(), lengths.tolist())]
