"""Which setting each arm gets: from a sweep whose levels are settings, or by the trials of a design's tuning.

Levels may be settings, such as learning rates, in one place or several.

A level is labelled `<where>_<setting>`: `sums_low` and `sums_high` are two settings in the place `sums`. The overrides
that the levels of a place do not share are the setting's own.

The rule: an arm gets the setting with the largest primary metric at the end, mean over runs, and the one declared first
of two that are equal. A run that stops before its budget is spent counts as 0, because its loss is not finite or
nothing is left to train on. Nothing is chosen before every declared run has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import title
from grpo_lab.analysis.sources.chosen_numbers import ChosenNumbers, tuned_lines
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.table_rows import aligned, rows_of
from grpo_lab.config.design import Design


@dataclass(frozen=True)
class Setting:
    """One setting of an arm: the mean over `runs` of `planned` runs, NaN for none; `stopped` of them are 0."""

    mean: float
    runs: int
    planned: int
    stopped: int
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Tuned:
    """The settings of an arm in one place, in declared order, and the name of the one it gets; "" while runs lack."""

    arm: str
    where: str
    settings: Mapping[str, Setting]
    chosen: str

    @property
    def end(self) -> str:
        """`first` or `last` where the choice lies at an end of three settings or more, else empty."""
        names = list(self.settings)
        if len(names) < 3 or self.chosen not in (names[0], names[-1]):
            return ""
        return "first" if self.chosen == names[0] else "last"


def tuned(data: SweepData, finals: FinalValues) -> list[Tuned]:
    """The choice for every place and arm, in declared order. Raises ValueError for a sweep without such levels."""
    if data.design is None:
        raise ValueError(f"{data.record.name} declared no levels, so there is nothing to choose among")
    places = _places(data.design)
    ended: dict[tuple[str, str], list[int]] = {}
    for row in rows_of(data.counted):
        ended.setdefault((row.level, row.arm), []).append(int(row.seed))
    stopped = set(data.runs.loc[data.runs["collapsed"] | data.exhausted, LABELS].itertuples(index=False, name=None))
    found = []
    for where, levels in places.items():
        shared = set.intersection(*(set(data.design.levels[level]) for level in levels.values()))
        for arm in data.design.arms:
            settings = {}
            for setting, level in levels.items():
                own = finals.of(level, arm, data.design.primary)
                here = ended.get((level, arm), [])
                zero = [seed for seed in here if (level, arm, seed) in stopped]
                values = [0.0 if seed in zero else float(own.get(seed, math.nan)) for seed in here]
                known = [value for value in values if not math.isnan(value)]
                mean = sum(known) / len(known) if known else math.nan
                words = tuple(word for word in data.design.levels[level] if word not in shared)
                planned = data.seeds_planned(level, arm)
                settings[setting] = Setting(mean, len(known), planned, len(zero), words)
            whole = all(one.runs == one.planned for one in settings.values())
            chosen = max(settings, key=lambda name: settings[name].mean) if whole else ""
            found.append(Tuned(arm, where, settings, chosen))
    return found


def _places(design: Design) -> dict[str, dict[str, str]]:
    """Condition -> setting -> level."""
    places: dict[str, dict[str, str]] = {}
    for level in design.levels:
        where, _, setting = level.rpartition("_")
        places.setdefault(where, {})[setting] = level
    if alone := [where for where, levels in places.items() if len(levels) < 2]:
        raise ValueError(
            f"{design.name} has only one setting for {', '.join(map(repr, alone))}: "
            "name two levels or more <where>_<setting> for each"
        )
    return places


def tuned_text(data: SweepData, finals: FinalValues) -> str:
    """The choices as a table for each place, then as the arms of an experiment."""
    choices = tuned(data, finals)
    assert data.design is not None, "`tuned` refuses others"
    blocks = []
    for where in dict.fromkeys(choice.where for choice in choices):
        own = [choice for choice in choices if choice.where == where]
        blocks.append(_table(data.design, finals, where, own))
    return "\n\n".join(blocks)


def numbers_text(found: Sequence[ChosenNumbers]) -> str:
    """A table of the numbers that tuning chose for every arm, and what to know of it; empty without a tuning."""
    if not found:
        return ""
    heading, *ends = tuned_lines(found)
    return "\n".join([heading, *numbers_table(found), *ends])


def numbers_table(found: Sequence[ChosenNumbers]) -> list[str]:
    """The numbers of every arm as lines, `!` behind one near an end of its range. Of one choice or more."""
    keys = list(dict.fromkeys(key for one in found for key in one.ranges))
    rows = [["arm", *keys, title(found[0].metric), "trial"]]
    for one in found:
        numbers = [
            "-" if key not in one.ranges else f"{one.chosen.numbers[key]:g}{'!' if key in one.ends else ''}"
            for key in keys
        ]
        where = " at ".join(filter(None, (one.arm, one.level)))
        rows.append([where, *numbers, f"{one.chosen.value:.3f}", f"{one.trial + 1} of {len(one.trials)}"])
    return aligned(rows, "  ")


def trials_text(found: Sequence[ChosenNumbers]) -> str:
    """Every trial of every arm, in order; * marks the one that was chosen."""
    blocks = []
    for one in found:
        rows = [["trial", *one.ranges, title(one.metric)]]
        for number, trial in enumerate(one.trials):
            numbers = [f"{trial.numbers[key]:g}" for key in one.ranges]
            rows.append([str(number + 1), *numbers, f"{trial.value:.3f}{'*' if number == one.trial else ''}"])
        blocks.append("\n".join([f"{' at '.join(filter(None, (one.arm, one.level)))}:", *aligned(rows, "  ")]))
    return "\n\n".join(blocks)


def _table(design: Design, finals: FinalValues, where: str, choices: Sequence[Tuned]) -> str:
    names = list(choices[0].settings)
    wide = max(len(choice.arm) for choice in choices)
    column = max(8, *(len(name) + 2 for name in names))
    head = f"  {'':{wide}}" + "".join(f"{name:>{column}}" for name in names) + "   chosen"
    heading = f"{where}: {title(design.primary)} at {finals.at}, mean over runs; * chosen, ! a run stopped and is 0"
    lines = [heading, head]
    for choice in choices:
        cells = "".join(f"{_cell(name, choice):>{column}}" for name in names)
        lines.append(f"  {choice.arm:{wide}}{cells}   {_said(choice)}")
    ends = [choice for choice in choices if choice.end]
    lines.append(f"at an end of the range: {len(ends)} of {len(choices)}")
    arms = [
        f"    {choice.arm}: [{', '.join((*design.arms[choice.arm], *choice.settings[choice.chosen].overrides))}]"
        for choice in choices
        if choice.chosen
    ]
    return "\n".join([*lines, "", f"arms of {where}:", *(arms or ["    none is chosen yet"])])


def _cell(name: str, choice: Tuned) -> str:
    one = choice.settings[name]
    mean = "-" if math.isnan(one.mean) else f"{one.mean:.3f}"
    return f"{mean}{'!' if one.stopped else ''}{'*' if name == choice.chosen else ' '}"


def _said(choice: Tuned) -> str:
    if not choice.chosen:
        runs, planned = (sum(getattr(one, name) for one in choice.settings.values()) for name in ("runs", "planned"))
        return f"open: {runs} of {planned} runs have ended"
    beyond = ", an end of the range: the optimum may lie outside" if choice.end else ""
    return f"{choice.chosen}{beyond}"
