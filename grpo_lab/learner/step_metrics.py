"""The metrics of one training step, computed from the records of its stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import transformers

from grpo_lab.learner.mismatch import mismatch_metrics
from grpo_lab.learner.response_metrics import group_means, response_metrics, unanswered
from grpo_lab.learner.update import Advantages, BeforeUpdates, UpdateAccumulator
from grpo_lab.policy.batching import StepInputs, expand, totals_of
from grpo_lab.rollout.grading import token_texts
from grpo_lab.rollout.queue import RolloutBatch, RolloutQueue
from grpo_lab.tasks.base import Grader, Task
from grpo_lab.tracking.metrics import fraction_metric
from grpo_lab.tricks.aggregation import Aggregation
from grpo_lab.tricks.base import NEGLIGIBLE, Trick
from grpo_lab.tricks.group_filter import Signal, without_signal
from grpo_lab.tricks.teacher import Teacher
from grpo_lab.types import Bool, Float, Graded, Groups, Int, Tensor

# The axes whose options may be no-ops in a run, and are then reported as such.
MEASURED_AXES = (
    "question_filter", "pass_rate", "sft", "curriculum", "truncation", "reward_shaping", "group_filter", "old_policy",
    "correction", "rejection", "baseline", "scale", "token_credit", "importance", "surrogate", "update_mask",
    "aggregation",
    "denominator", "kl", "entropy", "teacher",
)  # fmt: skip


REWEIGHTED = 0.01  # a token's weight that differs by more is another weight


@dataclass(frozen=True)
class FinishedStep:
    """The records of one step's stages, in the order of the loop."""

    batch: RolloutBatch
    before: BeforeUpdates
    advantages: Advantages
    rewarded: Float[Tensor, "N T"]  # advantages of single tokens after token credit
    inputs: StepInputs
    accumulator: UpdateAccumulator


def step_metrics(
    queue: RolloutQueue,
    step: FinishedStep,
    task: Task,
    reward: Grader,
    aggregation: Aggregation,
    teacher: Teacher,
) -> dict[str, float]:
    """All metrics of a step that follow from its stages, under their names in the registry."""
    batch, before, accumulator = step.batch, step.before, step.accumulator
    rollouts, made = batch.rollouts, batch.made
    metrics = (
        reward_metrics(made, before.graded) | advantage_metrics(step) | accumulator.metrics() | row_fractions(step)
    )
    metrics |= response_metrics(made, task.check_again, queue.memory.best) | before.metrics | queue.metrics()
    metrics |= unanswered(made.texts, reward)
    metrics |= mismatch_metrics(
        accumulator.logprobs, rollouts.sampler_logprobs, accumulator.logprob_mask, rollouts.group_size
    )
    metrics |= staleness_metrics((accumulator.version - rollouts.weight_version)[rollouts.sampled_mask])
    if made.graded.failed is not None:
        metrics["rollout/ungraded"] = _share(made.graded.failed)
    if reward.gathers:
        metrics["reward/evolving_rubrics"] = sum(len(one.rubrics) for one in made.rollouts.problems) / made.number
    return metrics | {
        "active_fraction/curriculum": batch.passed_over,
        "active_fraction/aggregation": reweighted_tokens(
            aggregation, step.inputs.loss_mask, rollouts.group_size, step.inputs.advantages
        ),
        "train/entropy_coef": step.inputs.entropy_coef,
    } | reweighed_advantages(teacher, step)  # fmt: skip


def reward_metrics(made: Groups, graded: Graded) -> dict[str, float]:
    """Rewards of all whole groups that were generated, and of the rows in the loss (`graded`)."""
    shaped = made.shaped
    judged = shaped.in_statistics  # a response that its grader failed on is neither right nor wrong
    metrics: dict[str, Tensor | float] = {
        "rollout/groups": made.number,
        "rollout/length": shaped.lengths.double().mean(),
        "rollout/longest": shaped.lengths.max(),
        "rollout/truncated": shaped.truncated.double().mean(),
        "rollout/frac_zero_std": without_signal(shaped, Signal.outcome).double().mean(),
        "rollout/trained": graded.in_loss.sum() / shaped.in_loss.numel(),
    }
    if judged.any():
        off_mean = torch.where(judged, shaped.reward - group_means(shaped), torch.nan)
        metrics["reward/mean"] = shaped.reward[judged].mean()
        metrics["reward/outcome"] = shaped.correctness[judged].mean()
        metrics["reward/group_std"] = off_mean.pow(2).nanmean(dim=1).sqrt().nanmean()
        for name, values in shaped.components.items():
            metrics[f"reward/component/{name}"] = values[judged].mean()
    sources = [problem.source for problem in made.rollouts.problems]
    for source in sorted(set(sources) - {""}):
        of_it = judged & torch.tensor([name == source for name in sources])[:, None]
        metrics[f"rollout/source/{source}"] = sources.count(source) / len(sources)
        if of_it.any():
            metrics[f"reward/source/{source}"] = shaped.reward[of_it].mean()
    for name, rows in (("correct", judged & (shaped.correctness == 1)), ("wrong", judged & (shaped.correctness == 0))):
        if rows.any():
            metrics[f"rollout/length_{name}"] = shaped.lengths[rows].double().mean()
    right = judged & (shaped.correctness == 1)
    if right.any():
        metrics["rollout/truncated_correct"] = shaped.truncated[right].double().mean()
    if graded.in_loss.any():
        # Without a KL penalty in the reward, which says nothing about how good the responses are.
        metrics["reward/in_loss_mean"] = sum(
            graded.components[name][graded.in_loss].mean() for name in shaped.components
        )
        metrics["reward/in_loss_outcome"] = graded.correctness[graded.in_loss].mean()
        for name, values in graded.components.items():
            metrics[f"reward/in_loss_component/{name}"] = values[graded.in_loss].mean()
    return {name: float(value) for name, value in metrics.items()}


_AGES = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3_4": (3, 4), "5_8": (5, 8), "9_16": (9, 16), "17_up": (17, None)}


def staleness_metrics(ages: Int[Tensor, "K"]) -> dict[str, float]:
    """Mean and maximum age of the sampled tokens, in updates, and the share of tokens in each age bin."""
    metrics: dict[str, Tensor | float] = {
        "rollout/staleness": ages.double().mean(),
        "rollout/staleness_max": ages.max(),
    }
    for name, (low, high) in _AGES.items():
        metrics[f"staleness/{name}"] = _share((ages >= low) & (ages <= (ages.max() if high is None else high)))
    return {name: float(value) for name, value in metrics.items()}


def advantage_metrics(step: FinishedStep) -> dict[str, float]:
    """Mean and mean magnitude of the advantages in the loss, and the factor by which the scale changed them."""
    rows, advantages = step.before.graded.in_loss, step.advantages
    in_loss = rows if advantages.scaled.shape == rows.shape else step.before.loss_mask
    chosen, centred = advantages.scaled[in_loss], advantages.centred[in_loss]
    if not chosen.numel():
        return {}
    metrics = {"advantage/mean": float(chosen.mean()), "advantage/absolute": float(chosen.abs().mean())}
    if float(centred.abs().sum()) > 0:
        metrics["factor/scale"] = float(chosen.abs().sum() / centred.abs().sum())
    return metrics


def _changed(before: Graded, after: Graded) -> Bool[Tensor, "P G"]:
    changed = (before.in_statistics != after.in_statistics) | (before.in_loss != after.in_loss)
    return changed | (before.reward != after.reward)


def _share(rows: Tensor) -> float:
    return float(rows.double().mean())


def _share_moved(before: Tensor, after: Tensor, entries: Tensor) -> float:
    """The share of `entries` whose value changed by more than eps and rounding explain."""
    if not entries.any():
        return 0.0
    gap = (after - before).abs()[entries]
    return float((gap > NEGLIGIBLE * before.abs()[entries].clamp(min=1e-12)).double().mean())


def row_fractions(step: FinishedStep) -> dict[str, float]:
    """The share of rows (of tokens, for per-token advantages) that tricks on rewards, masks and advantages changed."""
    batch, graded, centred = step.batch, step.before.graded, step.advantages.centred
    made = batch.made
    ended = (made.rollouts.interrupted | made.rollouts.looped).reshape(made.masked.in_loss.shape)
    went_on = batch.groups.number / batch.started
    reward, entries = graded.reward, graded.in_loss & graded.in_statistics
    if centred.shape != reward.shape:
        reward, entries = reward.reshape(-1, 1).expand_as(centred), step.before.loss_mask
    metrics = {
        "active_fraction/reward_shaping": _share(_changed(made.graded, made.shaped)),
        "active_fraction/truncation": _share(_changed(made.shaped, made.masked) | ended),
        "active_fraction/group_filter": 1 - went_on + went_on * _share(_changed(batch.groups.masked, batch.filtered)),
        "active_fraction/baseline": _share_moved(reward, centred, entries),
        "active_fraction/scale": _share_moved(centred, step.advantages.scaled, entries),
    }
    if graded is not step.before.rejected:  # a KL penalty in the reward; one in the loss is counted per token
        metrics["active_fraction/kl"] = _share(_changed(step.before.rejected, graded))
    return metrics


def reweighted_tokens(
    aggregation: Aggregation, loss_mask: Bool[Tensor, "N T"], group_size: int, advantages: Float[Tensor, "N T"]
) -> float:
    """The share of the loss's tokens whose weight, beside the mean weight, is not that of `sequence_mean`.

    A weight that differs by less than a hundredth counts as the same. The weights are those of one optimiser step over
    the whole batch.
    """
    totals = totals_of(loss_mask, group_size, range(len(loss_mask)), advantages)
    token_loss = torch.zeros(loss_mask.shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (weights,) = torch.autograd.grad(aggregation(token_loss, loss_mask, totals), token_loss)
    plain = (loss_mask / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)).double()
    ratio = (weights / weights.sum() * plain.sum() / plain)[loss_mask]
    return float(((ratio - 1).abs() > REWEIGHTED).double().mean()) if len(ratio) else 0.0


def reweighed_advantages(teacher: Teacher, step: FinishedStep) -> dict[str, float]:
    """The shares of the loss's tokens whose advantage token credit and the teacher changed; nothing without a teacher.

    A token of advantage 0, which token credit never changes, counts as unchanged.
    """
    mask, rewarded = step.before.loss_mask, step.rewarded
    metrics = {"active_fraction/token_credit": _share_moved(expand(step.advantages.scaled, mask), rewarded, mask)}
    if teacher.needs_model:
        metrics["active_fraction/teacher"] = _share_moved(rewarded, step.inputs.advantages, mask)
    return metrics


def no_op_axes(tricks: Mapping[str, Trick], known: Collection[str], active: Mapping[str, float]) -> list[str]:
    """Axes whose option is on but changed nothing in the whole run.

    `tricks` is the option of each axis and `active` the maximum of each active fraction over the steps. `known` are
    axes whose option a rule knows to be a no-op, such as a shaped reward that nothing reads.
    """
    on = [axis for axis in MEASURED_AXES if not tricks[axis].is_no_op]
    return [axis for axis in on if axis in known or active.get(fraction_metric(axis), 0.0) == 0.0]


def rollout_table(tokenizer: transformers.PreTrainedTokenizerBase, step: FinishedStep) -> pd.DataFrame:
    """One row per response: question, response, reward, advantage, and the values of its tokens.

    `token_clipped` are the tokens in the loss whose gradient the surrogate changed in any update of the step. With
    per-token advantages, a response's advantage is their mean. `kept_in_statistics` and `kept_in_loss` are the masks
    before rejection. The log-probs of the learner before the updates and of the reference are there if the step
    computed them.
    """
    graded, advantages = step.before.graded, step.advantages.scaled
    rollouts, pieces = step.batch.rollouts, token_texts(tokenizer, step.batch.rollouts)
    if advantages.shape != graded.reward.shape:
        advantages = advantages.sum(dim=1) / rollouts.sampled_mask.sum(dim=1).clamp(min=1)
    problems = [problem for problem in rollouts.problems for _ in range(rollouts.group_size)]
    columns = {
        "outcome": graded.verdict,
        "reward": graded.reward,
        "advantage": advantages,
        "length": graded.lengths,
        "truncated": graded.truncated,
        "in_statistics": graded.in_statistics,
        "in_loss": graded.in_loss,
        "kept_in_statistics": step.batch.filtered.in_statistics,
        "kept_in_loss": step.batch.filtered.in_loss,
    } | {f"component_{name}": values for name, values in graded.components.items()}
    policies = {"token_old_logprob": step.before.logprobs, "token_ref_logprob": step.before.ref_logprobs}
    return pd.DataFrame(
        {
            "problem_id": [problem.id for problem in problems],
            "response": list(range(rollouts.group_size)) * len(rollouts.problems),
            "question": [problem.question for problem in problems],
            "answer": [problem.answer for problem in problems],
            "difficulty": [problem.difficulty for problem in problems],
            "text": list(step.batch.groups.texts),
            "tokens": list(map(list, pieces)),
            "prompt_ids": [list(rollouts.prompt_of_row(row)) for row in range(rollouts.num_rows)],
            "token_ids": _ragged(rollouts.tokens, rollouts.lengths),
            "interrupted": rollouts.interrupted.numpy(),
            "stopped": rollouts.looped.numpy(),
            "wanted": [problem.target_length or 0 for problem in problems],
            "token_sampled": _ragged(rollouts.sampled_mask, rollouts.lengths),
            "token_advantage": _ragged(step.inputs.advantages.float(), rollouts.lengths),
            "token_in_loss": _ragged(step.before.loss_mask, rollouts.lengths),
            "token_clipped": _ragged(step.accumulator.affected, rollouts.lengths),
            "token_logprob": _ragged(rollouts.sampler_logprobs, rollouts.lengths),
            "sampler_logprob": torch.where(rollouts.sampled_mask, rollouts.sampler_logprobs, 0.0).sum(1).numpy(),
        }
        | {name: _ragged(values, rollouts.lengths) for name, values in policies.items() if values is not None}
        | {name: values.flatten().numpy() for name, values in columns.items()}
    )


def _ragged(values: Tensor, lengths: Int[Tensor, "N"]) -> list[np.ndarray]:
    """The values of each row without padding."""
    return [row[:length] for row, length in zip(values.cpu().numpy(), lengths.tolist())]
