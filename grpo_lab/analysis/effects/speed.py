"""The two co-primary endpoints of a claim of gain: how fast an arm learns, and whether it had room to end higher.

Speed is the sampled tokens that an arm takes to reach a share of its control's gain, over those of the control. It is
read off the evaluations, by straight lines between them, for each pair of runs of one seed. The final value is judged
elsewhere (`verdict`). A claim of gain cannot be supported where the control ends within the margin of the ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache

import pandas as pd

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.final_values import TOKENS, FinalValues, is_rated, reached, share_of_gain, token_curves
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.config.design import Design, Direction
from grpo_lab.config.folders import conf_folder
from grpo_lab.tracking.checksums import read_json

SHARES = (0.5, 0.9)  # of the control's gain
FITTING = "problems that fit into it"  # the row of an environment profile that bounds held-out accuracy


def has_speed(metric: str) -> bool:
    """True if the metric is an accuracy of an evaluation, so that a run reaches shares of its gain."""
    return metric.startswith("eval/") and metric.endswith("accuracy") and is_rated(metric)


def token_ratio(
    data: SweepData, finals: FinalValues, condition: Condition, control: Condition, metric: str, share: float
) -> Interval:
    """Tokens to `share` of the control's gain, arm over control: the geometric mean over seeds with its interval.

    Seeds whose control gains less than LEAST_GAIN are left out. Without bounds, and with the reason, where some runs of
    the arm never reach it, or are there at step 0; the mean is then over the others.
    """
    points = _evaluated(data, metric)
    curves = {place: token_curves(points, place, metric) for place in (condition, control)}
    ratios: dict[int, float] = {}
    for seed in sorted(curves[condition].keys() & curves[control].keys()):
        target = share_of_gain(curves[control][seed], finals.of(*control, metric).get(seed, math.nan), share)
        if not math.isnan(target):
            ratios[seed] = reached(*curves[condition][seed], target) / reached(*curves[control][seed], target)
    known = {seed: math.log(ratio) for seed, ratio in ratios.items() if math.isfinite(ratio) and ratio > 0}
    found = compare(known, finals.bases, grouped=False).whole
    ends = (math.exp(value) for value in (found.mean, found.low, found.high))
    ratio = replace(found, **dict(zip(("mean", "low", "high"), ends)), points=tuple(map(math.exp, found.points)))
    never, at_once = (sum(one == end for one in ratios.values()) for end in (math.inf, 0.0))
    whys = [
        f"{word} in {number} of {len(ratios)}"
        for word, number in (("not reached", never), ("there at step 0", at_once))
        if number
    ]
    return replace(ratio, low=math.nan, high=math.nan, why="; ".join(whys)) if whys else ratio


@lru_cache(maxsize=1)
def _evaluated(data: SweepData, metric: str) -> pd.DataFrame:
    return data.counted_columns([metric, TOKENS])


def speed_text(data: SweepData, finals: FinalValues, condition: Condition, control: Condition, metric: str) -> str:
    """`1.94 [1.64, 2.29] to half, 1.50 [1.20, 1.90] to 90%`; "" where there is none."""
    parts = []
    for share in SHARES:
        ratio = token_ratio(data, finals, condition, control, metric, share)
        name = "half" if share == 0.5 else f"{share:.0%}"
        if not ratio.n:
            parts += [f"{name} {ratio.why}"] if ratio.why else []
            continue
        written = replace(ratio, why="").written("{:.2f}".format)
        parts.append(f"{written} to {name}{f' ({ratio.why})' if ratio.why else ''}")
    return ", ".join(parts)


def speeds_text(data: SweepData, finals: FinalValues) -> str:
    """How many sampled tokens every arm takes to shares of its control's gain, post hoc; "" where none gains.

    On the primary metric if that is an accuracy of an evaluation, else on held-out accuracy.
    """
    metric = data.design.primary if data.design and has_speed(data.design.primary) else "eval/heldout/accuracy"
    lines = []
    for level, arm in data.run_arms:
        if arm != data.control and (speed := speed_text(data, finals, (level, arm), (level, data.control), metric)):
            lines.append(f"  {place(data, level, arm)}: {speed}")
    if not lines:
        return ""
    head = [
        f"Speed, post hoc: sampled tokens to half and 90% of the gain of {data.control} in {metric_text(metric)}",
        "  As a ratio to the control, paired by seed, geometric mean and 95% CI; above 1 the arm is slower.",
    ]
    return "\n".join([*head, *lines]) + "\n"


def no_headroom(
    finals: FinalValues, control: Condition, metric: str, direction: Direction, margin: float | None, world: str
) -> str:
    """Why a gain as large as the margin is impossible; "" where it is possible, or no gain is claimed."""
    if direction is not Direction.above or margin is None or not has_speed(metric):
        return ""
    end, ceiling = finals.interval(*control, metric).mean, ceiling_of(metric, world)
    if not end + margin > ceiling:
        return ""
    return f"no headroom: the control ends at {end:.3f}, the ceiling is {ceiling:.3f}, the margin {margin:g}"


def world_of(design: Design, level: str) -> str:
    """The world that a level of a design runs in, by its overrides; "sums" is the default."""
    words = [*design.base, *design.levels[level]]
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith("world=")), "sums")


def impossible_gains(design: Design, finals: FinalValues) -> list[str]:
    """The predicted gains that a control leaves no headroom for, each in a sentence."""
    found = []
    for one in design.predictions:
        control, world = (one.level, one.reference or design.control), world_of(design, one.level)
        why = no_headroom(finals, control, one.metric, one.direction, design.margin_of(one), world)
        found += [f"{one.arm} above {control[1]} on {one.metric}: {why}"] if why and not one.against else []
    return found


def ceiling_of(metric: str, world: str) -> float:
    """The highest accuracy possible: 1, or for held-out questions the share whose steps fit into the token limit."""
    return _fitting().get(world, 1.0) if metric.startswith("eval/heldout") else 1.0


@cache
def _fitting() -> Mapping[str, float]:
    """The share of problems that fit into the token limit, by world, from the profiles that were measured."""
    folder, found = conf_folder().parent / "analysis" / "data" / "worlds", dict[str, float]()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        profile = read_json(path, "restore it with git, or measure it again: make worlds")
        found |= dict.fromkeys([profile["world"]], float(dict(profile["rows"])[FITTING]))
    return found
