"""The declaration of an experiment's tuning: numbers that each arm chooses for itself before it is judged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from grpo_lab.config.design_keys import LISTED, METRIC, Key, require_keys
from grpo_lab.tracking.renames import metric_name

# What a trial may not choose: how much a run spends, what it is asked and how that is graded.
_NOT_CHOSEN = ("seed", "budget", "cost_model", "task", "evaluation", "verifier", "design", "hydra")
_DIGITS = 4
_EXAMPLE = "optimizer.learning_rate: {low: 1.0e-5, high: 1.0e-3, log: true}"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; `log`: equal factors are equally likely; `integer`: whole ones."""

    low: Annotated[float, Key("the low end, included", "a number")]
    high: Annotated[float, Key("the high end, included", "a number")]
    log: Annotated[bool, Key("equal factors are equally likely")] = False
    integer: Annotated[bool, Key("integers only")] = False

    def number(self, place: float) -> float | int:
        """The number at a place: 0 is the low end, 1 the high one, and 0.5 halfway on the scale that is searched."""
        if self.log:
            number = self.low ** (1 - place) * self.high**place
        else:
            number = (1 - place) * self.low + place * self.high
        return self.rounded(number)

    def rounded(self, number: float | int) -> float | int:
        """A number within the range, whole, or with digits that are enough for any choice and short in a run's name."""
        return round(number) if self.integer else min(max(float(f"{number:.{_DIGITS}g}"), self.low), self.high)

    def place(self, number: float | int) -> float:
        """Where a number lies: 0 at the low end, 1 at the high one."""
        low, high, at = (math.log(value) if self.log else value for value in (self.low, self.high, number))
        return (at - low) / (high - low)


@dataclass(frozen=True)
class Tuning:
    """Every arm, at every level, has `trials` settings of its numbers tried, each on all `seeds`, `batch` at a time.

    `metric` chooses, the more the better. `ranges` map keys of the configuration to what is tried, for every arm;
    `arms` give single arms further ranges, or others in their place.
    """

    trials: Annotated[int, Key("how many settings each arm has tried", "a whole number")]
    batch: Annotated[int, Key("trials run at a time; later ones use their results", "a whole number")]
    seeds: Annotated[tuple[int, ...], Key("the seeds of trials, which no arm is judged on", LISTED)]
    metric: Annotated[str, Key("the metric to maximise", METRIC, "`primary`")]
    ranges: Annotated[
        Mapping[str, Range], Key("the numbers that every arm chooses", "KEY: entries, below; a key of the run", "none")
    ] = field(default_factory=dict)
    arms: Annotated[
        Mapping[str, Mapping[str, Range]],
        Key("further ranges of single arms", "ARM: {KEY: entries as of ranges}", "none"),
    ] = field(default_factory=dict)

    def of(self, arm: str) -> dict[str, Range]:
        """Every number that this arm chooses, those of all arms first."""
        return {**self.ranges, **self.arms.get(arm, {})}


def read_tuning(
    node: Any,
    primary: str,
    judged: Sequence[int],
    arms: Mapping[str, Sequence[str]],
    others: Sequence[str],
) -> Tuning:
    """A Tuning from `design.tuning`. Raises ValueError with the key and a remedy.

    `judged` are the seeds on which arms are judged. `arms` map their names to their overrides, `others` are those of
    the base and the levels.
    """
    known = [entry.name for entry in fields(Tuning)]
    if not isinstance(node, Mapping):
        raise ValueError(f"design.tuning must hold entries ({', '.join(known)}), got {node!r}")
    require_keys("design.tuning", node, Tuning)
    further = node.get("arms") or {}
    if not isinstance(further, Mapping):
        raise ValueError(f"design.tuning.arms must map arms to ranges, such as mask: {{{_EXAMPLE}}}, got {further!r}")
    tuning = Tuning(
        trials=_count("trials", node.get("trials"), "how many settings each arm has tried"),
        batch=_count("batch", node.get("batch"), "how many run at a time; the next ones learn from them"),
        seeds=_seeds(node.get("seeds"), judged),
        metric=_metric(node.get("metric"), primary),
        ranges=_ranges("ranges", node.get("ranges") or {}),
        arms={str(arm): _ranges(f"arms.{arm}", own) for arm, own in further.items()},
    )
    for arm in tuning.arms:
        if arm not in arms:
            raise ValueError(f"design.tuning.arms: there is no {arm!r}; choose from {', '.join(map(repr, arms))}")
    for arm, words in arms.items():
        ranges = tuning.of(arm)
        if not ranges:
            raise ValueError(f"design.tuning: arm {arm} has nothing to tune: give design.tuning.ranges ({_EXAMPLE})")
        for word in (*others, *words):
            if (key := word.partition("=")[0].lstrip("+~")) in ranges:
                raise ValueError(f"design.tuning chooses {key}, and so does {word}: remove one of the two")
    return tuning


def _count(name: str, value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"design.tuning.{name} must be a whole number of at least 1, {what}, got {value!r}")
    return value


def _seeds(value: Any, judged: Sequence[int]) -> tuple[int, ...]:
    seeds = tuple(value) if isinstance(value, list | tuple) else ()
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(
            f"design.tuning.seeds must be a list of different whole numbers, on which trials run, got {value!r}"
        )
    refuse_judged(seeds, judged)
    return seeds


def refuse_judged(seeds: Sequence[int], judged: Sequence[int]) -> None:
    """Raise ValueError for seeds of a tuning on which its arms are judged."""
    if both := sorted(set(seeds) & set(judged)):
        raise ValueError(
            f"design.tuning.seeds: arms are judged on seed {both[0]}, so nothing may be chosen on it: "
            "take seeds that the design does not use, such as 100"
        )


def _metric(value: Any, primary: str) -> str:
    metric = metric_name(str(value)) if value is not None else primary
    if "downstream" in metric:
        raise ValueError(
            f"design.tuning.metric: {metric} is of the downstream test, on which nothing may be chosen: name another "
            "one, such as eval/heldout/accuracy"
        )
    return metric


def _ranges(name: str, value: Any) -> dict[str, Range]:
    if not isinstance(value, Mapping):
        raise ValueError(f"design.tuning.{name} must map keys to ranges, such as {_EXAMPLE}, got {value!r}")
    return {str(key): _range(f"design.tuning.{name}.{key}", str(key), own) for key, own in value.items()}


def _range(name: str, key: str, value: Any) -> Range:
    if not re.fullmatch(r"[a-z]\w*(\.\w+)*", key) or key.split(".")[0] in _NOT_CHOSEN:
        raise ValueError(f"{name} is no number that tuning may choose: name one of a trick or the optimiser")
    if isinstance(value, Mapping):
        require_keys(name, value, Range)
    if not isinstance(value, Mapping) or not {"low", "high"} <= set(value):
        raise ValueError(f"{name} must give low and high, and may give log and integer, such as {_EXAMPLE}")
    low, high, log, integer = value["low"], value["high"], value.get("log", False), value.get("integer", False)
    if not isinstance(log, bool) or not isinstance(integer, bool):
        raise ValueError(f"{name}: log and integer are true or false")
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
            raise ValueError(f"{name}: low and high are numbers, got {end!r}")
        if integer and end != int(end):
            raise ValueError(f"{name}: low and high of an integer range are whole numbers, got {end!r}")
    if low >= high:
        raise ValueError(f"{name}: low must be below high, got {low:g} and {high:g}")
    if log and low <= 0:
        raise ValueError(f"{name}: low must be above 0 on a log scale, got {low:g}")
    return Range(float(low), float(high), log, integer)
