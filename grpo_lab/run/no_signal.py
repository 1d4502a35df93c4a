"""A warning for a run that cannot learn: for many steps all rewards within every group were equal."""

from __future__ import annotations

from collections.abc import Mapping

_MOST = 0.5  # a share of responses from which on something may be why
_ALWAYS = 0.9  # of right responses, from which on the questions are too easy; below 1 - _ALWAYS they are too hard

Metrics = Mapping[str, float | int]


def has_signal(metrics: Metrics) -> bool:
    """True if rewards, or a teacher, gave the loss of a step any gradient."""
    return metrics.get("advantage/absolute", 0.0) > 0 or metrics.get("active_fraction/teacher", 0.0) > 0


def no_signal_text(steps: int, metrics: Metrics, max_tokens: int) -> str:
    """The warning after `steps` steps without learning signal; `metrics` are those of the last one."""
    shares = {
        "correct": "reward/outcome",
        "truncated": "rollout/truncated",
        "without a parseable answer": "rollout/unanswered",
        "not graded": "rollout/ungraded",
    }
    seen = ", ".join(f"{metrics[name]:.0%} {words}" for words, name in shares.items() if name in metrics)
    likely, *others = _causes(metrics, max_tokens)
    return (
        f"no learning signal for {steps} consecutive steps: every group had zero reward variance, or no response "
        f"was in the loss. Of the last step's responses: {seen}. Likely cause: {likely}"
        + "".join(f". Otherwise: {other}" for other in others)
    )


def _causes(metrics: Metrics, max_tokens: int) -> list[str]:
    """Possible causes and their remedies, the likeliest first; at least one."""
    right, truncated, unanswered, ungraded = (
        metrics.get(name, 0.0)
        for name in ("reward/outcome", "rollout/truncated", "rollout/unanswered", "rollout/ungraded")
    )
    found = []
    if ungraded >= _MOST:
        found.append("the grader fails on most responses: fix the problem in its first warning")
    if right > _ALWAYS:
        return [*found, "the questions are too easy: choose harder ones, such as another task or pass_rate=band"]
    if right > 1 - _ALWAYS:
        found.append(
            "every question is always or never solved: choose questions of intermediate pass rate (pass_rate=band), "
            "or raise group_size"
        )
    if truncated >= _MOST:
        found.append(
            f"most responses reach the token limit before they answer: raise task.response_tokens (now {max_tokens})"
        )
    if unanswered >= _MOST:
        found.append(
            "the grader finds no answer in most responses: read some with `grpo-lab rollouts RUN`, and choose a "
            "template that this model follows, or a reward that reads what it writes"
        )
    if right <= 1 - _ALWAYS and ungraded < _MOST:
        found.append(
            "the questions are too hard: choose easier ones (another task, pass_rate=solvable), or begin with sft"
        )
    return found
