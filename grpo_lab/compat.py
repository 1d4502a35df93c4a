"""What cannot be combined, and what can be combined but cannot act: one table of rules.

A rule reads facts that the classes declare, never their names, so an option added later is judged by the
same table. `check_compatible` reports every broken rule at once, before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_lab.config import RunConfig, snake_case


@dataclass(frozen=True)
class Rule:
    """A combination to refuse or to warn of; `axes` are the slots its reason is about.

    `idles`: what stands on the first of them cannot act, so that an arm which changes nothing else is no arm.
    """

    name: str
    axes: tuple[str, ...]
    broken_when: Callable[[RunConfig], bool]
    reason: str
    remedy: str
    idles: bool = False

    def describe(self, run: RunConfig) -> str:
        """One line: the slots with what stands in them, the reason and the remedy."""
        held = {axis: getattr(run, axis) for axis in self.axes}
        parts = [f"{axis}={_label(value)}" for axis, value in held.items()]
        return f"{', '.join(parts)}: {self.reason}. Remedy: {self.remedy}."


def _label(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    numbers = ", ".join(f"{name}={getattr(value, name)}" for name in vars(value))
    return f"{snake_case(type(value).__name__)}({numbers})"


class IncompatibleRun(ValueError):
    """Every broken rule of a run, one per line."""


def _removes_rows(run: RunConfig) -> bool:
    return run.truncation.removes_rows or run.group_filter.removes_rows or run.rejection.removes_rows


def _on_policy(run: RunConfig) -> bool:
    return run.updates.minibatches == 1 and run.old_policy.recomputes


ERRORS: tuple[Rule, ...] = (
    Rule(
        "baseline_needs_a_group",
        ("baseline", "group_size"),
        lambda run: run.baseline.group_relative and run.group_size < 2,
        "a baseline over the group has nothing to compare a single response with, so every advantage is 0",
        "set group_size to at least 2, or baseline=none",
    ),
    Rule(
        "scale_needs_a_group",
        ("scale", "group_size"),
        lambda run: run.scale.group_relative and run.group_size < 2,
        "a single response has no deviation within its group, so every advantage is 0",
        "set group_size to at least 2, or scale=none",
    ),
    Rule(
        "filter_needs_a_group",
        ("group_filter", "group_size"),
        lambda run: run.group_filter.removes_rows and run.group_size < 2,
        "a group of one response never carries signal, so every group is filtered",
        "set group_size to at least 2, or group_filter=keep",
    ),
    Rule(
        "updates_divide_the_problems",
        ("updates", "problems_per_step"),
        lambda run: run.problems_per_step % run.updates.minibatches != 0,
        "groups stay whole within an optimiser step, so the problems must divide evenly among the updates",
        "make problems_per_step a multiple of the number of updates",
    ),
)

WARNINGS: tuple[Rule, ...] = (
    Rule(
        "clip_cannot_act",
        ("surrogate", "updates"),
        lambda run: run.surrogate.clips and _on_policy(run),
        "with one on-policy update every ratio is 1 and no clip can act",
        "choose updates=two or more where the clip is what is studied",
        idles=True,
    ),
    Rule(
        "survivors_are_everyone",
        ("denominator", "truncation", "group_filter", "rejection"),
        lambda run: run.denominator.survivors_only and not _removes_rows(run),
        "no trick removes rows here, so survivors and original counts are the same",
        "combine denominator=survivors with a mask, a filter or a rejection",
        idles=True,
    ),
    Rule(
        "ratio_is_ignored",
        ("surrogate", "updates"),
        lambda run: not run.surrogate.uses_ratio and run.updates.minibatches > 1,
        "later minibatches are off-policy and this surrogate neither reweights nor cuts their tokens",
        "choose updates=one, or a surrogate that reads the ratio",
    ),
    Rule(
        "nothing_to_correct",
        ("correction", "schedule", "learner_precision", "sampler_precision"),
        lambda run: (
            run.correction.needs_old_logprobs
            and run.schedule.keeps_sampler_current
            and not (run.learner_precision.rounds or run.sampler_precision.rounds)
        ),
        "sampler and learner hold the same weights in the same arithmetic, so every weight is about 1",
        "let them differ by schedule or precision, or set correction=none",
        idles=True,
    ),
    Rule(
        "filter_cannot_act",
        ("group_filter", "baseline", "denominator"),
        lambda run: (
            run.group_filter.removes_rows
            and run.baseline.group_relative
            and not run.denominator.survivors_only
            and not run.kl.needs_reference
            and not run.entropy.needs_gradient
        ),
        "groups without signal have advantage 0 anyway, and the original counts keep the step size as it was",
        "combine the filter with denominator=survivors",
        idles=True,
    ),
    Rule(
        "top_p_biases_the_ratio",
        ("engine",),
        lambda run: run.engine.top_p < 1,
        "log-probs are of the whole softmax, so what top-p cut off looks like sampler-learner mismatch",
        "train with engine.top_p=1 and use top-p in evaluation only",
    ),
)


def broken_errors(run: RunConfig) -> list[Rule]:
    """The rules that refuse this run."""
    return [rule for rule in ERRORS if rule.broken_when(run)]


def broken_warnings(run: RunConfig) -> list[Rule]:
    """The rules under which something in this run cannot act; recorded with the run."""
    return [rule for rule in WARNINGS if rule.broken_when(run)]


def check_compatible(run: RunConfig) -> list[str]:
    """Raise IncompatibleRun with every broken rule; otherwise return the warnings, one line each."""
    if errors := broken_errors(run):
        lines = "\n".join(f"  - {rule.describe(run)}" for rule in errors)
        raise IncompatibleRun(f"this combination cannot run:\n{lines}")
    return [rule.describe(run) for rule in broken_warnings(run)]
