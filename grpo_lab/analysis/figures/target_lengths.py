"""Where prompts ask for a target length: how long responses are, and how often right, over that length.

One pair of panels per level and one line per arm: at the last evaluation up to X and, dashed, before training. A policy
that follows its prompts lies on the diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import NO_TRACKS, collapse_note
from grpo_lab.analysis.figures.panels import Cell, level_label, seeds_text
from grpo_lab.analysis.figures.style import (
    BLACK,
    GREY,
    SMALL,
    Dashes,
    Drawn,
    Entry,
    house_style,
    in_lines,
    looks,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, bounds
from grpo_lab.analysis.table_rows import row_at
from grpo_lab.analysis.tables.rows import as_columns, table_of
from grpo_lab.analysis.tracks import Track, cells, tracks

SUITE = "heldout_training"
BINS = 6  # of equal width, where more lengths than `SINGLE` are asked for
SINGLE = 8
WHENS = ("start", "end")
QUANTITIES = {"length": "response length (tokens)", "accuracy": "right answers (%)"}
_APART = 0.012  # of the range of lengths asked for, between the bars of two arms
_BANDS = "line: mean over runs at the last evaluation; bars: its 95% t interval, arms moved apart; thin: single seeds"
_NO_BANDS = "line: mean over runs at the last evaluation, too few for an interval; thin: single seeds"


@dataclass(frozen=True)
class Asked:
    """What one run answered to questions that ask for a length: one row per question, with its length and its share
    of right answers, before training and at the last evaluation."""

    seed: int
    base: int
    answers: Mapping[str, pd.DataFrame]


def asked_lengths(data: SweepData, finals: FinalValues) -> dict[Cell, list[Asked]]:
    """What can be drawn, by (level, arm)."""
    answers = data.answers[(data.answers["suite"] == SUITE) & (data.answers["wanted"] > 0)]
    found: dict[Cell, list[Asked]] = {}
    for cell, runs in cells(tracks(data, finals)).items():
        own = answers[(answers["level"] == cell[0]) & (answers["arm"] == cell[1])]
        asked = [run for run in (_asked(own, track) for track in runs) if run is not None]
        if asked:
            found[cell] = asked
    return found


def _asked(answers: pd.DataFrame, track: Track) -> Asked | None:
    """One run's answers; None where it was not evaluated after its start, or where its answers were not saved."""
    last = track.around[0]
    own = answers[answers["seed"] == track.seed]
    tables = {when: own[own["step"] == step] for when, step in zip(WHENS, (0, last))}
    if last == 0 or any(table.empty for table in tables.values()):
        return None
    return Asked(
        track.seed,
        track.base,
        {
            when: pd.DataFrame(
                {
                    "wanted": table["wanted"].astype(float),
                    "length": table["tokens"] / table["n"],
                    "accuracy": 100 * table["correct"] / table["n"],
                }
            )
            for when, table in tables.items()
        },
    )


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence; empty where it can."""
    if asked_lengths(data, finals):
        return ""
    if not tracks(data, finals):
        return NO_TRACKS
    answers = data.answers[data.answers["suite"] == SUITE]
    if answers.empty:
        return "the answers to the held-out questions of the training protocol were not saved"
    if not (answers["wanted"] > 0).any():
        return "no arm asks for a length in its prompts"
    return "no run that asks for a length was evaluated after its start"


def slope_of(answers: pd.DataFrame) -> float:
    """Tokens of response for each token asked for, by least squares over questions; NaN where all ask for the same."""
    spread = answers["wanted"] - answers["wanted"].mean()
    squares = float((spread**2).sum())
    return float((spread * answers["length"]).sum()) / squares if squares else float("nan")


def target_length_numbers(found: Mapping[Cell, Sequence[Asked]]) -> pd.DataFrame:
    """Every number the figure shows, six decimals; lengths in tokens, accuracy in percent of answers.

    `when` is "start" (step 0) or "end" (the last evaluation up to X), `series` is "length", "accuracy" or "slope" (of
    length over the length asked for, over single questions). `part` is "seed" (a run's mean over the questions around
    x) or "mean" (over the n seeds that have some, with the t interval in low and high).
    """
    edges = _edges(found)
    bases = {run.seed: run.base for runs in found.values() for run in runs}
    rows: list[dict[str, Any]] = []
    for (level, arm), runs in found.items():
        for when in WHENS:
            labels = {"level": level, "arm": arm, "when": when}
            binned = {run.seed: _binned(run.answers[when], edges) for run in runs}
            for place in range(len(edges) - 1):
                here = {seed: row_at(table, place) for seed, table in binned.items() if place in table.index}
                x = {"x": np.mean([row["wanted"] for row in here.values()])} if here else {}
                for series in QUANTITIES if here else ():
                    values = {seed: float(row[series]) for seed, row in here.items()}
                    rows += _of_seeds(labels | {"series": series} | x, values, bases)
            slopes = {run.seed: slope_of(run.answers[when]) for run in runs}
            rows += _of_seeds(labels | {"series": "slope"}, slopes, bases)
    return table_of(rows, ["level", "arm", "when", "series", "part", "x", "seed", "value", "low", "high", "n"])


def _of_seeds(
    labels: dict[str, Any], values: Mapping[int, float], bases: Mapping[int, int]
) -> Iterator[dict[str, Any]]:
    for seed, value in values.items():
        yield labels | {"part": "seed", "seed": seed, "value": value}
    yield labels | {"part": "mean"} | as_columns(mean_of_runs(list(values.values()), [bases[seed] for seed in values]))


def _edges(found: Mapping[Cell, Sequence[Asked]]) -> np.ndarray:
    """Where the bins of lengths asked for begin and end; one bin a length where there are few."""
    tables = [table for runs in found.values() for run in runs for table in run.answers.values()]
    asked = np.unique(np.concatenate([table["wanted"].to_numpy() for table in tables]))
    if len(asked) <= SINGLE:
        return np.append(asked, asked[-1] + 1)
    return np.linspace(asked[0], asked[-1] + 1, BINS + 1)


def _binned(answers: pd.DataFrame, edges: np.ndarray) -> pd.DataFrame:
    """Means over the questions of each bin that has some, by the bin's place."""
    return answers.groupby(np.searchsorted(edges, answers["wanted"].to_numpy(), side="right") - 1).mean()


def draw_target_lengths(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_target_lengths`; None where `missing` says why: no prompt asks for a length."""
    found = asked_lengths(data, finals)
    if not found:
        return None
    numbers = target_length_numbers(found)
    name = f"{data.record.name}_target_lengths"
    bands = _BANDS if max(map(len, found.values())) >= FOR_INTERVAL else _NO_BANDS
    levels = [level for level in data.levels if any(level == other for other, _ in found)]
    arms = [arm for arm in data.arms if any(arm == other for _, other in found)]
    look = looks(arms, data.control if data.control in arms else arms[0])
    with house_style(name):
        heading = f"{data.record.name}: are responses as long as they are asked to be?"
        figure = new_figure(heading, 1.3 + len(levels) * (2.4 + 0.14 * len(arms)))
        panels = figure.subplots(len(levels), 2, sharex=True, sharey="col", squeeze=False)
        for level, row in zip(levels, panels):
            for axes, series in zip(row, QUANTITIES):
                own = numbers[(numbers["level"] == level) & (numbers["series"] == series)]
                _panel(axes, own, look)
                axes.set_ylabel(level_label(data, level if series == "length" else "", QUANTITIES[series]))
            here = [(level, arm) for arm in arms if (level, arm) in found]
            row[0].set_title("\n".join(_over(data, finals, numbers, here)), fontsize=SMALL)
        for axes in panels[-1]:
            axes.set_xlabel("target length (tokens)")
        panels[0, 0].set_ylim(bottom=0)
        panels[0, 1].set_ylim(bottom=0)
        panels[0, 0].xaxis.set_major_locator(MaxNLocator(7, integer=True))
        write_legend(figure, _legend(arms, look), 3)
        write_footer(figure, bands)
    return Drawn(name, figure, numbers, bands, caption=_caption(data, finals))


def _panel(axes: Axes, numbers: pd.DataFrame, look: Mapping[str, tuple[str, Dashes]]) -> None:
    seeds = numbers[numbers["part"] == "seed"]
    if str(numbers["series"].iloc[0]) == "length":
        ends = [seeds["x"].min(), seeds["x"].max()]
        axes.plot(ends, ends, ":", color=BLACK, linewidth=1.0, label="as asked")
    arms = list(dict.fromkeys(numbers["arm"]))
    apart = _APART * (numbers["x"].max() - numbers["x"].min())
    for place, arm in enumerate(arms):
        own, colour = numbers[numbers["arm"] == arm], look[arm][0]
        end, start = (own[own["when"] == when] for when in reversed(WHENS))
        for _, run in end[end["part"] == "seed"].groupby("seed"):
            axes.plot(run["x"], run["value"], color=colour, linewidth=0.5, alpha=0.35, label="seed")
        mean = end[end["part"] == "mean"]
        axes.plot(mean["x"], mean["value"], "-o", color=colour, linewidth=1.7, markersize=3.6, label=arm)
        bars = mean[mean["low"].notna()]
        at = bars["x"] + apart * (place - (len(arms) - 1) / 2)
        axes.vlines(at, bars["low"], bars["high"], color=colour, linewidth=1.3, alpha=0.7, label="interval")
        before = start[start["part"] == "mean"]
        axes.plot(before["x"], before["value"], "--", color=colour, linewidth=1.1, alpha=0.8, label="step 0")


def _over(data: SweepData, finals: FinalValues, numbers: pd.DataFrame, row: Sequence[Cell]) -> list[str]:
    """The lines over a level's panels: every arm's slope before training and at the end, and its seeds."""
    lines = []
    for level, arm in row:
        own = numbers[(numbers["level"] == level) & (numbers["arm"] == arm) & (numbers["series"] == "slope")]
        own = own[own["part"] == "mean"].set_index("when")
        end = row_at(own, "end")
        ends = bounds(end["low"], end["high"], ".2f")
        seeds = seeds_text(int(end["n"]), data.seeds_planned(level, arm), finals.collapsed(level, arm))
        before, after = (round(float(row_at(own, when)["value"]), 2) + 0.0 for when in WHENS)  # no -0.00
        lines.append(f"{in_lines(arm, 48)}: slope {before:.2f} at step 0,\n{after:.2f}{ends} at the end; {seeds}")
    return lines


def _legend(arms: Sequence[str], look: Mapping[str, tuple[str, Dashes]]) -> list[Entry]:
    return [
        *(
            (Line2D([], [], color=look[arm][0], marker="o", markersize=3.6, linewidth=1.7), in_lines(arm, 36))
            for arm in arms
        ),
        (Line2D([], [], color=GREY, linestyle="--", linewidth=1.1), "untrained, step 0"),
        (Line2D([], [], color=BLACK, linestyle=":", linewidth=1.0), "as asked"),
    ]


def _caption(data: SweepData, finals: FinalValues) -> str:
    parts = [
        "Held-out questions under the training protocol, grouped by the length that they ask for. Slope: tokens of "
        "response for each token asked for, by least squares over single questions; 1 does as it is asked, 0 takes no "
        f"notice. The last evaluation is that at or before {finals.at}.{finals.over_bases}",
        collapse_note(data, finals),
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "target_lengths",
    draw_target_lengths,
    missing,
    title="Target lengths",
    how_to_read=(
        "Mean response length and share of right answers over the length that the prompt asked for, before "
        "and after training. On the diagonal a response is as long as it was asked to be."
    ),
)
