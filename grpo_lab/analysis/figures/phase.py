"""Downstream accuracy against training reward: a path per arm, coloured by the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from grpo_lab.analysis.divergence.measures import transfer_slopes
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.seed_lines import Cell, as_table, named_runs
from grpo_lab.analysis.figures.small_multiples import (
    Grid,
    legend_height,
    panel_width,
    seeds_text,
    small_multiples,
    write_legend,
)
from grpo_lab.analysis.figures.style import BLACK, BODY, SMALL, Drawn, budget_label, house_style, wrapped
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval
from grpo_lab.analysis.stats.mean_line import over_bases
from grpo_lab.analysis.tracks import TRAINING, Track, cells, mean_of_tracks, on_grid, tracks

COLOURS = "viridis"  # which the colour-blind read as an order, as grey does
SLOPES = {"divergence/transfer_slope_early": "_early", "divergence/transfer_slope_late": "_late"}
BANDS = "cross: standard errors of both, at X, from three runs on; thin: single seeds"
_GHOST, _ARROWS = "#D0D0D0", 6
_POINTS = 3  # that `transfer_slope` needs
_FOOT = 0.42  # inches under the panels, for the colour bar


@dataclass(frozen=True)
class _Path:
    """One arm at one level: its mean over seeds at the evaluations they share, and every run's own."""

    x: np.ndarray  # [K] budget
    reward: np.ndarray  # [K]
    downstream: np.ndarray  # [K]
    errors: tuple[float, float]  # of both, at the end
    runs: Sequence[Track]
    slopes: Mapping[str, Interval]


def _paths(data: SweepData, finals: FinalValues) -> dict[Cell, _Path]:
    """Every arm with a run that has both metrics at two evaluations or more; runs that lack one somewhere are out."""
    found = {}
    for key, cell in cells(tracks(data, finals)).items():
        whole = [track for track in cell if _whole(track)]
        if not whole:
            continue
        x, reward = on_grid(whole, [track.reward for track in whole])
        _, downstream = on_grid(whole, [track.downstream for track in whole])
        if len(x) < 2:
            continue
        ends = [over_bases(values[:, -1:], [track.base for track in whole]) for values in (reward, downstream)]
        n = len(ends[0])
        first, second = (float(end.std(ddof=1)) / math.sqrt(n) if n >= FOR_INTERVAL else math.nan for end in ends)
        each = [transfer_slopes(track) for track in whole]
        slopes = {name: mean_of_tracks(whole, [slope[half] for slope in each]) for name, half in SLOPES.items()}
        found[key] = _Path(x, reward.mean(axis=0), downstream.mean(axis=0), (first, second), whole, slopes)
    return found


def _whole(run: Track) -> bool:
    return bool(np.isfinite(run.reward + run.downstream).all())


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no figure; empty where there is one."""
    if _paths(data, finals):
        return ""
    lacking = [name for name in (TRAINING["reward"], DOWNSTREAM) if name not in data.finished_points]
    if lacking:
        return f"{' and '.join(lacking)} not logged"
    return "no run has training reward and downstream accuracy at two evaluations up to X"


def _numbers(paths: Mapping[Cell, _Path]) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "path" (the mean over n seeds at an evaluation, `budget` in the unit of the axis), "seed" (a run's own),
    "final" (the standard errors at X, in reward and downstream) or the name of a transfer slope (in value, low, high).
    """
    rows: list[dict[str, Any]] = []
    for (level, arm), path in paths.items():
        labels = {"level": level, "arm": arm}
        n = len(path.runs)
        for x, reward, downstream in zip(path.x, path.reward, path.downstream):
            point = {"part": "path", "budget": x, "reward": reward, "downstream": downstream, "n": n}
            rows.append(labels | point)
        for run in path.runs:
            for x, reward, downstream in zip(run.x, run.reward, run.downstream):
                point = {"part": "seed", "seed": run.seed, "budget": x, "reward": reward, "downstream": downstream}
                rows.append(labels | point)
        errors = {"reward": path.errors[0], "downstream": path.errors[1]}
        rows.append(labels | {"part": "final", "budget": path.x[-1], "n": n} | errors)
        for name, slope in path.slopes.items():
            ends = {"value": slope.mean, "low": slope.low, "high": slope.high, "n": slope.n}
            rows.append(labels | {"part": name} | ends)
    names = ["level", "arm", "part", "seed", "budget", "reward", "downstream", "value", "low", "high", "n"]
    return as_table(rows, names)


def draw_phase(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_phase`: a panel per arm (and level), the other arms of the level in grey behind.

    None where `missing` says why.
    """
    paths = _paths(data, finals)
    if not paths:
        return None
    numbers, name = _numbers(paths), f"{data.record.name}_phase"
    arms = [arm for arm in data.arms if arm in {arm for _, arm in paths}]
    heading = "Does downstream accuracy rise with training reward?"
    inches = panel_width(arms)
    halves = _halves(paths)
    over = {cell: _over(data, finals, cell, path, halves, inches) for cell, path in paths.items()}
    entries = [
        (Line2D([], [], color=BLACK, linestyle=":", linewidth=1.0), "slope 1 from the start: E gains as much as Pc"),
        (Line2D([], [], color=_GHOST, linewidth=1.2), "the other arms"),
    ]
    with house_style(name):
        grid = small_multiples(
            data,
            list(paths),
            heading,
            legend_height(len(entries)),
            over,
            panel=min(inches, 2.1),
            labels=("training reward, right of all responses (Pc)", "downstream accuracy (E)"),
            footer=_footer(data, finals, paths),
            foot=_FOOT,
        )
        write_legend(grid.figure, heading, entries)
        colours = Normalize(0, finals.budget)
        for (level, arm), axes in grid.panels.items():
            others = numbers[(numbers["level"] == level) & (numbers["arm"] != arm) & (numbers["part"] == "path")]
            for _, path in others.groupby("arm"):
                axes.plot(path["reward"], path["downstream"], color=_GHOST, linewidth=0.8, zorder=1, label="ghost")
            _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)], colours)
        _limits(list(grid.panels.values()), numbers, min(inches, 2.1) / inches)
        _colour_bar(grid, colours, finals)
    return Drawn(name, grid.figure, numbers, BANDS)


def _halves(paths: Mapping[Cell, _Path]) -> list[str]:
    """The slopes that some arm has."""
    return [name for name in SLOPES if any(path.slopes[name].n for path in paths.values())]


def _over(
    data: SweepData, finals: FinalValues, cell: Cell, path: _Path, halves: Sequence[str], inches: float
) -> list[str]:
    """What is written over a panel: the number of seeds, and the slopes."""
    count = seeds_text(len(path.runs), data.seeds_planned(*cell), finals.collapsed(*cell))
    slopes = [slope_text(SLOPES[name].strip("_"), path.slopes[name], len(path.runs)) for name in halves]
    return [*wrapped(count, inches, SMALL), *slopes]


def slope_text(half: str, slope: Interval, runs: int) -> str:
    """`late -0.35 [-0.50, -0.20]`; `late* ...` where not all runs have a slope; no bounds without an interval."""
    if slope.n == 0:
        return f"{half} -"
    size = max(abs(value) for value in (slope.mean, slope.low, slope.high) if not math.isnan(value))
    digits = 2 if size < 10 else 0
    ends = replace(slope, why="").ends(f"{{:.{digits}f}}".format)
    of = "*" if slope.n < runs else ""
    return f"{half}{of} {slope.mean:+.{digits}f}{ends}"


def _panel(axes: Axes, numbers: pd.DataFrame, colours: Normalize) -> None:
    path = numbers[numbers["part"] == "path"]
    if path.empty:
        return
    palette = matplotlib.colormaps[COLOURS]
    for _, run in numbers[numbers["part"] == "seed"].groupby("seed"):
        axes.plot(run["reward"], run["downstream"], color=BLACK, linewidth=0.4, alpha=0.25, zorder=2, label="seed")
    x, y, at = path["reward"].to_numpy(), path["downstream"].to_numpy(), path["budget"].to_numpy()
    axes.axline((x[0], y[0]), slope=1, color=BLACK, linestyle=":", linewidth=1.0, zorder=1.5)
    # Arrow heads on every stretch, or of many on about six.
    heads = set(range(len(x) - 2, -1, -math.ceil((len(x) - 1) / _ARROWS)))
    for k in range(len(x) - 1):
        colour = palette(colours((at[k] + at[k + 1]) / 2))
        axes.plot(x[k : k + 2], y[k : k + 2], color=colour, linewidth=1.8, solid_capstyle="round", zorder=3)
        if k in heads:
            look = {
                "arrowstyle": "-|>",
                "color": colour,
                "linewidth": 0,
                "mutation_scale": 9,
                "shrinkA": 0,
                "shrinkB": 0,
            }
            axes.annotate("", (x[k + 1], y[k + 1]), (x[k], y[k]), arrowprops=look, zorder=4)
    axes.plot(x[0], y[0], "o", color=palette(0.0), markersize=4, zorder=4)
    final = numbers[numbers["part"] == "final"].iloc[0]
    axes.errorbar(
        x[-1],
        y[-1],
        xerr=final["reward"],
        yerr=final["downstream"],
        color=BLACK,
        linewidth=1.0,
        zorder=5,
        label="final",
    )


def _limits(panels: Sequence[Axes], numbers: pd.DataFrame, shape: float) -> None:
    """The same length for a share on both axes, so that slope 1 is a diagonal; `shape` is height over width."""
    drawn = numbers[numbers["part"].isin(["path", "seed"])]
    low, high = drawn[["reward", "downstream"]].min(), drawn[["reward", "downstream"]].max()
    middle, span = (
        (low + high) / 2,
        1.08 * max(high["reward"] - low["reward"], (high - low)["downstream"] / shape, 0.05),
    )
    for axes in panels[:1]:
        axes.set_xlim(middle["reward"] - span / 2, middle["reward"] + span / 2)
        axes.set_ylim(middle["downstream"] - shape * span / 2, middle["downstream"] + shape * span / 2)


def _colour_bar(grid: Grid, colours: Normalize, finals: FinalValues) -> None:
    height = grid.figure.get_size_inches()[1]
    place = (0.3, (grid.label - 0.32) / height, 0.4, 0.09 / height)
    bar = grid.figure.colorbar(
        ScalarMappable(colours, COLOURS), cax=grid.figure.add_axes(place), orientation="horizontal"
    )
    label, formatter = budget_label(finals.axis, finals.budget)
    bar.ax.xaxis.set_major_formatter(formatter)
    bar.ax.tick_params(labelsize=SMALL, length=2)
    bar.outline.set_visible(False)
    beside = {"xytext": (-8, 0), "xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
    bar.ax.annotate(label, (0, 0.5), va="center", fontsize=BODY, **beside)


def _footer(data: SweepData, finals: FinalValues, paths: Mapping[Cell, _Path]) -> str:
    few = any(path.slopes[name].n < len(path.runs) for path in paths.values() for name in SLOPES)
    lacking = [(run.level, run.arm, run.seed) for run in tracks(data, finals) if not _whole(run)]
    left_out = [arm for arm in data.arms if arm not in {arm for _, arm in paths}]
    parts = [
        f"Path: mean over runs from step 0 (dot) to X = {finals.at}; cross: standard errors at X, from three runs on; "
        "thin: single seeds. Pc is the mean over the last 5% of the budget before an evaluation, at step 0 that of the "
        "probe. Slopes of E on Pc over the first and the second half of the budget: Theil-Sen within a run, then mean "
        "and 95% t interval. Under the diagonal, less is gained downstream than in training; a path that "
        f"falls loses.{finals.over_bases}",
        f"No slope of a half with fewer than {_POINTS} evaluations of different reward; *: some of the runs have none."
        if few
        else "",
        f"Left out, since Pc or E is missing or not finite: {named_runs(lacking)}." if lacking else "",
        f"Not drawn: {', '.join(left_out)}." if left_out else "",
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "phase",
    draw_phase,
    missing,
    title="Reward against downstream accuracy",
    how_to_read=(
        "One path per arm, from the base model on; along the diagonal both gain alike, a path that bends down "
        "or to the right gains reward that downstream accuracy does not show."
    ),
)
