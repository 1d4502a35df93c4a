"""Final values over the one number in which the arms differ.

A panel for training accuracy, held-out and downstream accuracy, a line for each level of the design's factor. The
values stand at equal distances, since what is swept is mostly doubled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from grpo_lab.analysis.figures.palette import Look, looks
from grpo_lab.analysis.figures.panels import at_level, collapse_note
from grpo_lab.analysis.figures.style import Drawn, FigureKind, drawing, in_lines
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.tables.dose_response import FEWEST, SweptSetting, swept_setting
from grpo_lab.analysis.tables.final import finals_of

CORRECTNESS = "reward/outcome"
PANELS = {
    CORRECTNESS: "right training responses (%)",
    HELDOUT: "held-out accuracy,\ntraining protocol (%)",
    DOWNSTREAM: "downstream accuracy (%)",
}
_APART = 0.07  # of the distance of two values, between the bars of two levels
_BANDS = "line: mean over runs; bars: its 95% t interval, levels moved apart; dots: single seeds"
_NO_BANDS = "line: mean over runs, too few for an interval; dots: single seeds"


def dose_response_numbers(data: SweepData, finals: FinalValues, found: SweptSetting) -> pd.DataFrame:
    """Every number the figure shows: `tables.final.finals_of` in percent; `x` is the arm's value of the number."""
    table = finals_of(data, finals, list(PANELS), scale=100)
    table = table[table["arm"].isin(list(found.values))]
    return table.assign(x=table["arm"].map(found.values))


def draw_dose_response(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_dose_response`, or why there is none."""
    found, counted = swept_setting(data), set(finals.values["arm"])
    if found is None:
        return f"the arms are not {FEWEST} or more values of one number"
    if sum(arm in counted for arm in found.values) < FEWEST:
        return f"fewer than {FEWEST} of its values have a finished run"
    if not any(metric in finals.values for metric in PANELS):
        return "no run logged an accuracy, of training or evaluation"
    numbers = dose_response_numbers(data, finals, found)
    name = f"{data.record.name}_dose_response"
    bands = _BANDS if numbers.loc[numbers["part"] == "mean", "low"].notna().any() else _NO_BANDS
    levels = [level for level in data.levels if (numbers["level"] == level).any()]
    look = {level: own._replace(marker="o") for level, own in looks(levels, levels[0]).items()}
    metrics = [metric for metric in PANELS if (numbers["metric"] == metric).any()]
    heading = f"{data.record.name}: how do reward and accuracy respond to {found.key}?"
    entries = [own.entry(at_level(data, level).removeprefix(" at ")) for level, own in look.items() if len(levels) > 1]
    with drawing(name, heading, 3.6, bands, entries, 4) as figure:
        for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics):
            _panel(axes, numbers[numbers["metric"] == metric], found, look)
            axes.set_title(PANELS[metric])
            axes.set_xlabel(in_lines(found.key, 30))
    caption = f"Final values at {finals.at}.{finals.over_bases} An interval may end below what is drawn."
    return Drawn(name, figure, numbers, bands, caption=" ".join([caption, collapse_note(data, finals)]).strip())


def _panel(axes: Axes, numbers: pd.DataFrame, found: SweptSetting, look: Mapping[str, Look]) -> None:
    """One metric, a line per level; the values stand at equal distances, bars of levels beside each other."""
    places = {arm: place for place, arm in enumerate(found.values)}
    for number, (level, own_look) in enumerate(look.items()):
        own = numbers[numbers["level"] == level]
        own = own.assign(at=own["arm"].map(places) + _APART * (number - (len(look) - 1) / 2)).sort_values("at")
        seeds, mean = (own[own["part"] == part] for part in ("seed", "mean"))
        axes.plot(seeds["at"], seeds["value"], ".", color=own_look.colour, markersize=3, alpha=0.4, label="seed")
        line: dict[str, Any] = own_look.line() | {"markersize": 4}
        axes.plot(mean["at"], mean["value"], label=level, **line)
        axes.vlines(mean["at"], mean["low"], mean["high"], color=own_look.colour, linewidth=1.3, alpha=0.7)
    axes.set_xticks(list(places.values()), [f"{value:g}" for value in found.values.values()])
    axes.tick_params(axis="x", labelrotation=0 if len(places) < 6 else 45)
    highest = float(numbers["value"].max())
    axes.set_ylim(-0.03 * highest, 1.08 * highest)  # a mark at 0 is whole


FIGURE = FigureKind(
    "dose_response",
    draw_dose_response,
    title="Dose-response",
    order=8,
    how_to_read=(
        "Training accuracy, held-out accuracy (training protocol) and downstream accuracy over the number in "
        "which the arms differ, a line for each level. Where the first stays up and the others fall, the run "
        "does not see what happens to it."
    ),
)
