"""Where prompts ask for a target length: how long responses are, and how often right, over that length.

One pair of panels per level and one line per arm: at the last evaluation up to X and, dashed, before training. A policy
that follows its prompts lies on the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.caveats import levels_alike
from grpo_lab.analysis.figures.palette import BLACK, GREY, Entry, Look, looks
from grpo_lab.analysis.figures.panels import NO_TRACKS, collapse_note, draw_line, drawn_cells, level_label, seeds_text
from grpo_lab.analysis.figures.style import SMALL, Drawn, FigureKind, drawing, in_lines
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, bounds
from grpo_lab.analysis.table_rows import row_at
from grpo_lab.analysis.tables.target_lengths import SUITE, target_answers, target_lengths_of
from grpo_lab.analysis.tracks import tracks

QUANTITIES = {"length": "response length (tokens)", "accuracy": "right answers (%)"}
_APART = 0.012  # of the range of target lengths, between the bars of two arms
_BANDS = "line: mean over runs at the last evaluation; bars: its 95% t interval, arms moved apart; thin: single seeds"
_NO_BANDS = "line: mean over runs at the last evaluation, too few for an interval; thin: single seeds"


def _reason(data: SweepData, finals: FinalValues) -> str:
    """Why no run has answers to draw."""
    if not tracks(data, finals):
        return NO_TRACKS
    answers = data.answers[data.answers["suite"] == SUITE]
    if answers.empty:
        return "the answers to the held-out questions of the training protocol were not saved"
    if not (answers["wanted"] > 0).any():
        return "no arm asks for a length in its prompts"
    return "no run that asks for a length was evaluated after its start"


def draw_target_lengths(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_target_lengths`, or why there is none."""
    answers = target_answers(data, finals)
    if answers.empty:
        return _reason(data, finals)
    numbers, places = target_lengths_of(answers), drawn_cells(data, answers)
    name = f"{data.record.name}_target_lengths"
    bands = _BANDS if numbers["n"].max() >= FOR_INTERVAL else _NO_BANDS
    levels = list(dict.fromkeys(level for level, _ in places))
    arms = [arm for arm in data.arms if arm in {arm for _, arm in places}]
    found = looks(arms, data.control if data.control in arms else arms[0])
    look = {arm: Look(found[arm].colour, "-", "o") for arm in arms}
    heading = f"{data.record.name}: are responses as long as they are asked to be?"
    height = 1.3 + len(levels) * (2.4 + 0.14 * len(arms))
    with drawing(name, heading, height, bands, _legend(look), 3) as figure:
        shared = "col" if levels_alike(data) else "none"
        panels = figure.subplots(len(levels), 2, sharex=True, sharey=shared, squeeze=False)
        for level, row in zip(levels, panels):
            for axes, series in zip(row, QUANTITIES):
                own = numbers[(numbers["level"] == level) & (numbers["series"] == series)]
                _panel(axes, own, look)
                axes.set_ylabel(level_label(data, level if series == "length" else "", QUANTITIES[series]))
            slopes = numbers[(numbers["series"] == "slope") & (numbers["part"] == "mean")]
            over = [_over(data, finals, slopes, place) for place in places if place[0] == level]
            row[0].set_title("\n".join(over), fontsize=SMALL)
        for axes in panels[-1]:
            axes.set_xlabel("target length (tokens)")
        for axes in panels[:, 0]:
            axes.set_ylim(bottom=0)
        panels[0, 1].set_ylim(bottom=0)
        panels[0, 0].xaxis.set_major_locator(MaxNLocator(7, integer=True))
    return Drawn(name, figure, numbers, bands, caption=_caption(data, finals))


def _panel(axes: Axes, numbers: pd.DataFrame, look: Mapping[str, Look]) -> None:
    """One series at one level: each arm at the end with its runs and intervals and, dashed, before training."""
    seeds, means = (numbers[numbers["part"] == part] for part in ("seed", "mean"))
    if (numbers["series"] == "length").all():
        ends = [seeds["x"].min(), seeds["x"].max()]
        axes.plot(ends, ends, ":", color=BLACK, linewidth=1.0, label="as asked")
    arms = [arm for arm in look if (numbers["arm"] == arm).any()]
    apart = _APART * (numbers["x"].max() - numbers["x"].min())
    for place, arm in enumerate(arms):
        mean = means[(means["arm"] == arm) & (means["when"] == "end")]
        single = seeds[(seeds["arm"] == arm) & (seeds["when"] == "end")].assign(part="seed")
        draw_line(axes, pd.concat([single, mean.assign(low=math.nan)]), look[arm], arm, faint=0.35)
        bars = mean[mean["low"].notna()]
        at = bars["x"] + apart * (place - (len(arms) - 1) / 2)
        axes.vlines(at, bars["low"], bars["high"], color=look[arm].colour, linewidth=1.3, alpha=0.7, label="interval")
        before = means[(means["arm"] == arm) & (means["when"] == "start")]
        axes.plot(before["x"], before["value"], "--", color=look[arm].colour, linewidth=1.1, alpha=0.8, label="step 0")


def _over(data: SweepData, finals: FinalValues, slopes: pd.DataFrame, place: Condition) -> str:
    """Over a level's panels: an arm's slope before training and at the end, and its seeds."""
    own = slopes[(slopes["level"] == place[0]) & (slopes["arm"] == place[1])].set_index("when")
    end = row_at(own, "end")
    before, after = (round(float(row_at(own, when)["value"]), 2) + 0.0 for when in ("start", "end"))  # no -0.00
    seeds = seeds_text(int(end["n"]), data.seeds_planned(*place), finals.collapsed(*place))
    ends = bounds(end["low"], end["high"], ".2f")
    return f"{in_lines(place[1], 48)}: slope {before:.2f} at step 0,\n{after:.2f}{ends} at the end; {seeds}"


def _legend(look: Mapping[str, Look]) -> list[Entry]:
    return [
        *(own.entry(in_lines(arm, 36)) for arm, own in look.items()),
        Look(GREY, "--").entry("untrained, step 0"),
        Look(BLACK, ":").entry("as asked"),
    ]


def _caption(data: SweepData, finals: FinalValues) -> str:
    parts = [
        "Held-out questions under the training protocol, grouped by the length that they ask for. Slope: tokens of "
        "response for each token asked for, by least squares over single questions; 1 follows the request, 0 ignores "
        f"it. The last evaluation is that at or before {finals.at}.{finals.over_bases}",
        collapse_note(data, finals),
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "target_lengths",
    draw_target_lengths,
    title="Target lengths",
    order=12,
    how_to_read=(
        "Mean response length and share of right answers over the length that the prompt asked for, before "
        "and after training. On the diagonal a response is as long as it was asked to be."
    ),
)
