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
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.figures.direct_labels import looks
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import NO_TRACKS, collapse_note
from grpo_lab.analysis.figures.seed_lines import Cell, as_columns, as_table
from grpo_lab.analysis.figures.small_multiples import WIDTH, legend_height, seeds_text, write_legend
from grpo_lab.analysis.figures.style import (
    BLACK,
    BODY,
    GREY,
    LINE,
    SMALL,
    TINY,
    Drawn,
    heading_height,
    house_style,
    wrapped,
    write_footer,
    write_heading,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, bounds
from grpo_lab.analysis.table_rows import row_at
from grpo_lab.analysis.tracks import Track, cells, tracks

SUITE = "heldout_training"
BINS = 6  # of equal width, where more lengths than `SINGLE` are asked for
SINGLE = 8
WHENS = ("start", "end")
QUANTITIES = {"length": "response length (tokens)", "accuracy": "right answers (%)"}
_APART = 0.012  # of the range of lengths asked for, between the bars of two arms
_LEFT, _RIGHT, _BETWEEN, _PANEL = 0.62, 0.1, 0.68, 2.3  # inches
_BANDS = "line: mean over runs at the last evaluation; bars: its 95% t interval, arms moved apart"
_NO_BANDS = "line: mean over runs at the last evaluation, too few for an interval"


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
    return as_table(rows, ["level", "arm", "when", "series", "part", "x", "seed", "value", "low", "high", "n"])


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
    name, heading = (
        f"{data.record.name}_target_lengths",
        f"{data.record.name}: are responses as long as they are asked to be?",
    )
    bands = _BANDS if max(map(len, found.values())) >= FOR_INTERVAL else _NO_BANDS
    levels = [level for level in data.levels if any(level == other for other, _ in found)]
    arms = [arm for arm in data.arms if any(arm == other for _, other in found)]
    look = looks(arms, data.control if data.control in arms else arms[0])
    over = {
        level: _over(data, finals, numbers, [(level, arm) for arm in arms if (level, arm) in found]) for level in levels
    }
    footer = wrapped(_footer(data, finals, bands), WIDTH - 0.2, TINY)
    entries = _legend()
    # In inches, from the top: heading, legend, then lines and panels for every level, then label and footer.
    lines = max(map(len, over.values())) * SMALL * LINE + 0.08
    top = heading_height(heading, WIDTH) + legend_height(len(entries), len(entries)) + lines
    bottom, between = 0.6 + len(footer) * TINY * LINE, lines + 0.2
    height = top + bottom + _PANEL * len(levels) + between * (len(levels) - 1)
    with house_style(name):
        figure = Figure(figsize=(WIDTH, height))
        write_heading(figure, heading)
        write_legend(figure, heading, entries, len(entries))
        write_footer(figure, footer)
        place = {"left": _LEFT / WIDTH, "right": 1 - _RIGHT / WIDTH, "top": 1 - top / height, "bottom": bottom / height}
        place |= {"wspace": 2 * _BETWEEN / (WIDTH - _LEFT - _RIGHT - _BETWEEN), "hspace": between / _PANEL}
        panels = figure.subplots(len(levels), 2, sharex=True, sharey="col", squeeze=False, gridspec_kw=place)
        for level, row in zip(levels, panels):
            for axes, series in zip(row, QUANTITIES):
                own = numbers[(numbers["level"] == level) & (numbers["series"] == series)]
                _panel(axes, own, look, data.design.factor if data.design else "", level)
            for index, (arm, line) in enumerate(reversed(over[level])):
                shift = {"xycoords": "axes fraction", "textcoords": "offset points"}
                colour = look[arm][0]
                at = (0, 5 + index * SMALL * LINE * 72)
                row[0].annotate(line, (0, 1), at, color=colour, fontsize=SMALL, fontweight="bold", **shift)
        _scale(panels[0].tolist(), numbers)
        label = "target length (tokens)"
        figure.text(0.5, (bottom - 0.36) / height, label, ha="center", va="center", fontsize=BODY)
    return Drawn(name, figure, numbers, bands)


def _panel(axes: Axes, numbers: pd.DataFrame, look: Mapping[str, tuple[str, str]], factor: str, level: str) -> None:
    series = str(numbers["series"].iloc[0])
    if series == "length":
        axes.axline((0, 0), slope=1, color=BLACK, linestyle=":", linewidth=1.0, label="as asked")
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
    title = QUANTITIES[series]
    axes.set_ylabel(f"{factor} = {level}\n{title}" if factor and series == "length" else title)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(row: Sequence[Axes], numbers: pd.DataFrame) -> None:
    """Limits of all panels, which share them: whole lengths from 0, and shares of the seeds' own range."""
    seeds = numbers[numbers["part"] == "seed"]
    first, last = seeds["x"].min(), seeds["x"].max()
    room = 0.04 * max(last - first, 1.0)
    row[0].set_xlim(first - room, last + room)
    row[0].xaxis.set_major_locator(MaxNLocator(7, integer=True))
    highest = {series: seeds.loc[seeds["series"] == series, "value"].max() for series in QUANTITIES}
    row[0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
    row[0].set_ylim(0, 1.05 * max(highest["length"], last))
    row[1].set_ylim(0, min(102.0, 1.08 * max(highest["accuracy"], 1.0)))


def _over(data: SweepData, finals: FinalValues, numbers: pd.DataFrame, row: Sequence[Cell]) -> list[tuple[str, str]]:
    """The lines over a level's panels: every arm's slope before training and at the end, and its seeds."""
    lines = []
    for level, arm in row:
        own = numbers[(numbers["level"] == level) & (numbers["arm"] == arm) & (numbers["series"] == "slope")]
        own = own[own["part"] == "mean"].set_index("when")
        end = row_at(own, "end")
        n = int(end["n"])
        ends = bounds(end["low"], end["high"], ".2f")
        seeds = seeds_text(n, data.seeds_planned(level, arm), finals.collapsed(level, arm))
        before, after = (round(float(row_at(own, when)["value"]), 2) + 0.0 for when in WHENS)  # no -0.00
        line = f"{arm}: slope {before:.2f} at step 0, {after:.2f}{ends} at the end; {seeds}"
        lines += [(arm, part) for part in wrapped(line, WIDTH - _LEFT - _RIGHT, SMALL, bold=True)]
    return lines


def _legend() -> list[tuple[Line2D, str]]:
    return [
        (Line2D([], [], color=GREY, marker="o", markersize=3.6, linewidth=1.7), "last evaluation"),
        (Line2D([], [], color=GREY, linestyle="--", linewidth=1.1), "untrained, step 0"),
        (Line2D([], [], color=BLACK, linestyle=":", linewidth=1.0), "as asked"),
    ]


def _footer(data: SweepData, finals: FinalValues, bands: str) -> str:
    parts = [
        f"{bands[0].upper()}{bands[1:]}; thin: single seeds.",
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
