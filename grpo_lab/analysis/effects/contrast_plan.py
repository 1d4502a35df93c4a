"""The contrasts of a sweep: one wherever two arms differ by exactly one trick, by the same rule for every design.

A contrast is a weighted sum of arms of one level. It is always the value with the trick less the value without it, also
for a trick that was left out of the whole. Kinds:

    added        control + t less control
    left_out     everything less everything but t
    given        S + t less S for any other S; all increments of a ladder
    main         the mean of t's effects over all combinations of the other tricks, where all 2^k arms are there
    interaction  what two tricks give together beyond the sum of both: the mean of (S+t+u) - (S+t) - (S+u) + (S) over
                 every S there is; in a two-sided design, t's left-out effect less its added one
    whole        an arm that differs from the control by more than one trick, less the control
    selection    an arm less its random twin: what choosing these tokens, rows or groups adds
    amount       the random twin less the control: what acting on as many adds, whichever they are
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import Kind

CONDITIONAL = ("added", "left_out", "given")
TWINS = ("selection", "amount")
KINDS = (*CONDITIONAL, "main", "interaction", "whole", *TWINS)


@dataclass(frozen=True)
class Contrast:
    """The weights of some arms of one level; `context` says in words with what the trick is combined.

    `having` are the arms that have the trick; in a contrast of a pair, both tricks.
    """

    level: str
    trick: str
    kind: str
    context: str
    weights: Mapping[str, float | int]
    having: frozenset[str]

    @property
    def name(self) -> str:
        """Trick and context in words."""
        return f"{self.trick} ({self.context})"


def planned_contrasts(data: SweepData) -> list[Contrast]:
    """Every contrast of the arms of a sweep, run or not: by level, then trick."""
    arms = _arms_by_tricks(data)
    made = _conditional(data, arms)
    made += _main(data, arms) + _interactions(data, arms, made) + _whole(data, arms, made) + _twins(data)
    return [replace(contrast, level=level) for level in data.levels for contrast in made]


def is_ladder(data: SweepData) -> bool:
    """True if every arm holds all tricks of the arm before it, so that each trick has one context only."""
    rungs = sorted(_arms_by_tricks(data), key=len)
    return len(rungs) > 2 and all(lower < upper for lower, upper in itertools.pairwise(rungs))


def order_warning(data: SweepData) -> str:
    """The warning beside the increments of a ladder; empty for other designs."""
    if not is_ladder(data):
        return ""
    rungs = sorted(_arms_by_tricks(data), key=len)
    order = ", ".join(trick for lower, upper in itertools.pairwise(rungs) for trick in sorted(upper - lower))
    return (
        f"Order matters: the tricks were switched on one after the other ({order}), and each increment is that of its "
        "place in this order; another order can give other increments."
    )


def not_run(data: SweepData, finals: FinalValues) -> list[Contrast]:
    """The contrasts without an effect, because no seed has a final value in all of their arms."""
    seeds = {place: set(rows["seed"]) for place, rows in finals.values.groupby(["level", "arm"])}
    return [
        contrast
        for contrast in planned_contrasts(data)
        if not set.intersection(*(seeds.get((contrast.level, arm), set()) for arm in contrast.weights))
    ]


def _arms_by_tricks(data: SweepData) -> dict[frozenset[str], str]:
    """The combinations of tricks that were declared, each with the first arm that has it."""
    known, arms = set(data.tricks), {}
    for arm in data.arms:
        if data.contents(arm) <= known:
            arms.setdefault(data.contents(arm), arm)
    return arms


def _conditional(data: SweepData, arms: Mapping[frozenset[str], str]) -> list[Contrast]:
    everything, ladder = frozenset(data.tricks), is_ladder(data)
    control = data.contents(data.control)
    start = frozenset[str]() if control == everything else control
    found = []
    for trick, (lower, arm) in itertools.product(data.tricks, arms.items()):
        upper = lower | {trick}
        if trick in lower or upper not in arms:
            continue
        if ladder:
            kind, context = "given", f"after {arm}"
        elif lower == start and upper != control:
            kind, context = "added", f"added to {arm}"
        elif upper == everything:
            kind, context = "left_out", f"inside {arms[upper]}"
        else:
            kind, context = "given", f"given {arm}"
        found.append(Contrast("", trick, kind, context, {arms[upper]: 1, arm: -1}, frozenset({arms[upper]})))
    return sorted(found, key=lambda contrast: (data.tricks.index(contrast.trick), KINDS.index(contrast.kind)))


def _main(data: SweepData, arms: Mapping[frozenset[str], str]) -> list[Contrast]:
    """Where all 2^k combinations are there."""
    if len(data.tricks) < 2 or len(arms) < 2 ** len(data.tricks):
        return []
    contexts = len(arms) // 2
    found = []
    for trick in data.tricks:
        weights = {arm: (1 if trick in on else -1) / contexts for on, arm in arms.items()}
        having = frozenset(arm for on, arm in arms.items() if trick in on)
        found.append(Contrast("", trick, "main", f"average over {contexts} contexts", weights, having))
    return found


def _interactions(
    data: SweepData, arms: Mapping[frozenset[str], str], conditional: Sequence[Contrast]
) -> list[Contrast]:
    """Of pairs of tricks where four arms show one; else, and in a two-sided design, of a trick with all others."""
    pairs = [found for pair in itertools.combinations(data.tricks, 2) if (found := _pair(pair, arms))]
    two_sided = data.design is not None and data.design.kind is Kind.two_sided and len(data.tricks) > 2
    if pairs and not two_sided:
        return pairs
    sides = {(contrast.kind, contrast.trick): contrast for contrast in conditional}
    found = []
    for trick in data.tricks:
        added, left_out = sides.get(("added", trick)), sides.get(("left_out", trick))
        if added and left_out:
            weights = dict(left_out.weights) | {arm: -weight for arm, weight in added.weights.items()}
            context = f"{left_out.context} less {added.context}"
            found.append(Contrast("", trick, "interaction", context, weights, left_out.having | added.having))
    return found


def _pair(pair: tuple[str, str], arms: Mapping[frozenset[str], str]) -> Contrast | None:
    first, second = ({trick} for trick in pair)
    squares = [
        [lower | first | second, lower | first, lower | second, lower] for lower in arms if not lower & set(pair)
    ]
    squares = [square for square in squares if all(corner in arms for corner in square)]
    if not squares:
        return None
    signs = (1, -1, -1, 1)
    weights = {arms[on]: sign / len(squares) for square in squares for on, sign in zip(square, signs)}
    context = f"beyond both added to {arms[squares[0][3]]}"
    context = context if len(squares) == 1 else f"average over {len(squares)} contexts"
    having = frozenset(arms[square[0]] for square in squares)
    return Contrast("", " with ".join(pair), "interaction", context, weights, having)


def _whole(data: SweepData, arms: Mapping[frozenset[str], str], conditional: Sequence[Contrast]) -> list[Contrast]:
    """The arm with everything, and any arm that no single trick tells from another, less the control."""
    paired = {arm for contrast in conditional for arm in contrast.weights}
    control, everything = data.contents(data.control), frozenset(data.tricks)
    found = []
    for on, arm in arms.items():
        if len(on ^ control) > 1 and (on == everything or arm not in paired):
            weights = {arm: 1, data.control: -1}
            found.append(Contrast("", arm, "whole", f"against {data.control}", weights, frozenset({arm})))
    return found


def _twins(data: SweepData) -> list[Contrast]:
    """The two parts of the effect of an arm that has a random twin."""
    found, control = [], data.control
    for arm, twin in (data.design.twins if data.design else {}).items():
        own = data.contents(arm) - data.contents(control)
        trick = next(iter(own)) if len(own) == 1 else arm
        found.append(
            Contrast("", trick, "selection", "its choice, against a random one", {arm: 1, twin: -1}, frozenset({arm}))
        )
        context = f"a random choice, against {control}"
        found.append(Contrast("", trick, "amount", context, {twin: 1, control: -1}, frozenset({twin})))
    return found
