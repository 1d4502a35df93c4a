"""The numbers that tuning chose for every arm, and the trials that it chose among, from the record of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lab.config.tuning import Range
from grpo_lab.tracking.sweep_record import SweepRecord

END = 0.1  # of a range, at each side: a choice there may have a better one beyond


@dataclass(frozen=True)
class Trial:
    """The numbers of one trial, by key, and the metric that chooses, mean over the tuning's seeds."""

    numbers: Mapping[str, float | int]
    value: float


@dataclass(frozen=True)
class ChosenNumbers:
    """Every trial of an arm at a level, in order, and the position of the one it is judged with."""

    level: str
    arm: str
    metric: str
    seeds: Sequence[int]
    ranges: Mapping[str, Range]
    trials: Sequence[Trial]
    trial: int

    @property
    def chosen(self) -> Trial:
        """The trial with the largest value, the first of equal ones."""
        return self.trials[self.trial]

    @property
    def ends(self) -> dict[str, str]:
        """Key -> low or high, of the numbers that lie in a tenth of their range at that end."""
        places = {key: self.ranges[key].place(number) for key, number in self.chosen.numbers.items()}
        return {key: "low" if at < END else "high" for key, at in places.items() if not END <= at <= 1 - END}


def chosen_numbers(record: SweepRecord) -> list[ChosenNumbers]:
    """The result of a sweep's tuning; [] for a sweep that was not tuned."""
    return [_from_record(entry) for entry in record.tuning]


def _from_record(entry: Mapping[str, Any]) -> ChosenNumbers:
    ranges = {key: Range(**own) for key, own in entry["ranges"].items()}
    return ChosenNumbers(**{**entry, "ranges": ranges, "trials": [Trial(**own) for own in entry["trials"]]})


def tuned_lines(found: Sequence[ChosenNumbers]) -> list[str]:
    """One sentence on the tuning, and one for each choice near an end of its range; none without a tuning."""
    if not found:
        return []
    counts = " or ".join(map(str, sorted({len(one.trials) for one in found})))
    seeds = ", ".join(map(str, found[0].seeds))
    what = "seed" if len(found[0].seeds) == 1 else "seeds"
    lines = [f"Tuned: {counts} trials each, on {what} {seeds}, by {found[0].metric}; judged on other seeds."]
    for one in found:
        where = " ".join(filter(None, (one.arm, one.level)))
        lines += [
            f"Tuned near an end of its range: {key}={one.chosen.numbers[key]:g} of {where} is near the {end} end, "
            f"{getattr(one.ranges[key], end):g}; the optimum may lie outside."
            for key, end in one.ends.items()
        ]
    return lines
