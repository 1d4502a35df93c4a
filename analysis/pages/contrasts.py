"""Which other sweeps measured the same contrast, so that its effect can be pooled over sweeps and environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.analysis.effects.speed import world_of
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.stats.intervals import seed_differences
from grpo_lab.config.design import Design
from pages.pooled import Effect

# Of a declaration: how long and how often is measured, which changes no run's policy.
NO_CONDITION = ("budget", "evaluation", "tracking", "rollouts_every", "checkpoint_every", "model.base", "threads")
POOLED_OVER = ("world", "regime", "recipe")  # beside these, settings must agree
LONGEST = 2.0  # times the budget of one sweep is that of another, at most


@dataclass(frozen=True)
class Contrast:
    """Two conditions of a sweep by their settings: what each sets that the other does not, and what both set."""

    treated: frozenset[str]
    reference: frozenset[str]
    conditions: frozenset[str]


def settings(design: Design, condition: Condition) -> dict[str, str]:
    """Key -> override of a condition; an arm's win over its level's, and these over the base's."""
    level, arm = condition
    words = (*design.base, *design.levels[level], *design.arms[arm])
    return {word.partition("=")[0]: word for word in words}


def shared_settings(design: Design, condition: Condition, reference: Condition) -> dict[str, str]:
    """Key -> override that both conditions set alike, without what changes no policy."""
    one, other = settings(design, condition), settings(design, reference)
    return {key: word for key, word in one.items() if other.get(key) == word and not key.startswith(NO_CONDITION)}


def contrast_of(design: Design, condition: Condition, reference: Condition) -> Contrast:
    """The contrast of two conditions."""
    one, other = settings(design, condition), settings(design, reference)
    alike = shared_settings(design, condition, reference)
    return Contrast(
        frozenset(word for key, word in one.items() if other.get(key) != word),
        frozenset(word for key, word in other.items() if one.get(key) != word),
        frozenset(word for key, word in alike.items() if key not in POOLED_OVER),
    )


def same_contrasts(design: Design, contrast: Contrast) -> list[tuple[Condition, Condition]]:
    """The pairs of conditions of a design with this contrast."""
    conditions = ((level, arm) for level in design.levels for arm in design.arms)
    words = {condition: set(settings(design, condition).values()) for condition in conditions}
    return [  # the two sets tell most pairs apart at a twentieth of the cost of their contrast
        (one, other)
        for one in words
        for other in words
        if words[one] - words[other] == contrast.treated
        and words[other] - words[one] == contrast.reference
        and contrast_of(design, one, other) == contrast
    ]


def comparable(design: Design, other: Design) -> bool:
    """Whether both give budgets of the same kind that differ by no more than a factor of LONGEST."""
    mine, theirs = (_budget(one) for one in (design, other))
    return design.axis == other.axis and 0 < max(mine, theirs) <= LONGEST * min(mine, theirs)


def _budget(design: Design) -> float:
    words = {word.partition("=")[0]: word.partition("=")[2] for word in design.base}
    return float(words.get("budget.amount", 0))


def effects_of(
    design: Design, finals: FinalValues, pairs: Sequence[tuple[Condition, Condition]], metric: str
) -> list[Effect]:
    """The mean difference on each base model, for every pair that has one."""
    found = []
    for condition, reference in pairs:
        differences = seed_differences(finals.of(*condition, metric), finals.of(*reference, metric))
        if len(differences):
            by_base = differences.groupby([finals.bases[int(str(seed))] for seed in differences.index]).mean()
            why = finals.compared(differences, metric, condition, reference).whole.why
            found.append(
                Effect(world_of(design, condition[0]), {int(str(base)): one for base, one in by_base.items()}, why)
            )
    return found
