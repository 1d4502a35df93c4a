"""Training reward and the evaluations over the budget, one panel per arm and level: the first figure of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from grpo_lab.analysis.divergence.measures import RUN, TOO_FEW, Onset, gap, onsets
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.seed_lines import (
    Cell,
    Line,
    Lines,
    as_columns,
    as_table,
    points_each,
    seed_lines,
    thinned,
)
from grpo_lab.analysis.figures.small_multiples import (
    CROSS,
    arranged,
    legend_height,
    panel_width,
    seeds_text,
    small_multiples,
    write_legend,
)
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    SMALL,
    VERMILLION,
    Dashes,
    Drawn,
    budget_label,
    house_style,
    wrapped,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, REWARD, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval
from grpo_lab.analysis.stats.mean_line import SMOOTHING, mean_line, running_mean
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tracks import Track, cells, mean_of_tracks, tracks

__all__ = ["SERIES", "curve_numbers", "draw_curves", "mean_line", "running_mean"]

CORRECT = "reward/outcome"
GAP_CHANGE, OPENS, FALLS = "divergence/gap_change", "divergence/onset", "divergence/onset_after_peak"
PURPLE = "#CC79A7"  # of the same palette
# Where both begin at one evaluation, the dashes of one fill the gaps of the other.
_ONSETS = {
    OPENS: (BLACK, (0, (4, 4)), "G is above 0 (onset)"),
    FALLS: (GREEN, (4, (4, 4)), "E is below its best (onset)"),
}
_PEAK: dict[str, Any] = {
    "linestyle": "",
    "marker": "o",
    "markersize": 8,
    "markerfacecolor": "none",
    "markeredgecolor": GREEN,
}
_TOO_FEW = ("too few seeds", TOO_FEW)
_NONE = Onset(math.nan, math.nan, math.nan, 0, TOO_FEW)


@dataclass(frozen=True)
class Series:
    """One of the four lines of a panel."""

    metric: str
    title: str
    colour: str
    dashes: Dashes
    marker: str = ""  # evaluations have one, metrics of every step none


SERIES = (
    Series(CORRECT, "training reward, right of all responses (Pc)", VERMILLION, "--"),
    Series(REWARD, "training reward as the loss sees it", PURPLE, ":"),
    Series(HELDOUT, "held-out accuracy, training protocol", BLUE, "-", "o"),
    Series(DOWNSTREAM, "downstream accuracy, harder problems (E)", GREEN, "-", "s"),
)


@dataclass(frozen=True)
class _Cell:
    """What is known of one arm at one level beside its lines."""

    series: Sequence[Series]  # that its panel shows
    gap: Interval  # G at X, percentage points
    onsets: Mapping[str, Onset]  # none where no run has both metrics throughout
    n: int
    collapsed: int


@dataclass(frozen=True)
class _Gathered:
    """All that the figure is made of; thin lines keep `points` points."""

    lines: Lines
    cells: Mapping[Cell, _Cell]
    points: int
    thinned: bool


def curve_numbers(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "seed" (a run's own points, of long runs only the lowest and highest of every stretch), "stop" (the last
    point of a run that collapsed), "mean" (over seeds, with the t interval in low and high, of n seeds), "end" (of a
    mean that ends before X), "peak" (the highest mean), "onset" (x, with the range of it in low and high) or "final"
    (the gap change at X, in percentage points, written over a panel).
    """
    return _numbers(_gather(data, finals), finals)


def _gather(data: SweepData, finals: FinalValues) -> _Gathered:
    lines = seed_lines(data, finals, [series.metric for series in SERIES])
    by_cell = cells(tracks(data, finals))
    known = {}
    for level, arm in ((level, arm) for level in data.levels for arm in data.arms if (level, arm) in lines.cells):
        cell = by_cell.get((level, arm), [])
        reached = {line.seed for series in SERIES for line in lines.of(series.metric, (level, arm)) if line.reached}
        gaps = [float(100 * gap(track)[-1]) for track in cell]
        change = mean_of_tracks(cell, [value if math.isfinite(value) else math.nan for value in gaps])
        shown, collapsed = _shown(lines, (level, arm)), finals.stopped(level, arm)
        known[level, arm] = _Cell(shown, change, _onsets(cell), len(reached), collapsed)
    drawn = [(s, line) for cell, here in known.items() for s in here.series for line in lines.of(s.metric, cell)]
    lengths = [len(line.x) for series, line in drawn if not series.marker]
    points = points_each(len(lengths), sum(len(line.x) for series, line in drawn if series.marker))
    return _Gathered(lines, known, points, max(lengths, default=0) > points)


def _onsets(cell: Sequence[Track]) -> dict[str, Onset]:
    """Since when the gap is open and downstream accuracy below its best, under the names of their marks."""
    marks = {"onset": OPENS, "onset_after_peak": FALLS}
    return {marks[name]: found for name, found in onsets(cell).items()}


def _shown(lines: Lines, cell: Cell) -> list[Series]:
    """The series of a panel: reward as the loss sees it only where it is another one."""
    pairs = list(zip(lines.of(CORRECT, cell), lines.of(REWARD, cell)))
    same = len(pairs) == len(lines.of(REWARD, cell)) and all(_alike(*pair) for pair in pairs)
    return [series for series in SERIES if lines.of(series.metric, cell) and not (same and series.metric == REWARD)]


def _alike(one: Line, other: Line) -> bool:
    """Whether two metrics of one run are the same wherever both were logged."""
    common, here, there = np.intersect1d(one.x, other.x, return_indices=True)
    same = np.allclose(one.value[here], other.value[there], rtol=0, atol=1e-9)
    return bool(one.seed == other.seed and len(common) and same)


def _numbers(gathered: _Gathered, finals: FinalValues) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for (level, arm), here in gathered.cells.items():
        labels = {"level": level, "arm": arm}
        for series in here.series:
            own = gathered.lines.of(series.metric, (level, arm))
            rows += _series_rows(labels | {"series": series.metric}, series, own, finals.budget, gathered.points)
        for name, found in here.onsets.items():
            if np.isfinite(found.x):
                ends = {"x": found.x, "low": found.low, "high": found.high, "n": found.n}
                rows.append(labels | {"series": name, "part": "onset"} | ends)
        rows.append(labels | {"series": GAP_CHANGE, "part": "final", "x": finals.budget} | as_columns(here.gap))
    return as_table(rows, ["level", "arm", "series", "part", "seed", "x", "value", "low", "high", "n"])


def _series_rows(
    labels: Mapping[str, Any], series: Series, lines: Sequence[Line], budget: float, points: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in lines:
        xs, values = (line.x, line.value) if series.marker else thinned(line.x, line.value, points)
        rows += [{**labels, "part": "seed", "seed": line.seed, "x": x, "value": y} for x, y in zip(xs, values)]
        if line.stopped:
            rows.append({**labels, "part": "stop", "seed": line.seed, "x": xs[-1], "value": values[-1]})
    whole = [line for line in lines if line.reached]
    points_of = [(line.x, line.value) for line in whole]
    mean = mean_line(points_of, budget, bool(series.marker), bases=[line.base for line in whole])
    rows += [{**labels, "part": "mean", "x": x} | as_columns(interval) for x, interval in mean]
    if mean and mean[-1][0] < 0.98 * budget:
        rows.append({**labels, "part": "end", "x": mean[-1][0], "value": mean[-1][1].mean, "n": mean[-1][1].n})
    if series.metric == DOWNSTREAM and mean:
        x, best = max(mean, key=lambda point: point[1].mean)
        rows.append({**labels, "part": "peak", "x": x, "value": best.mean, "n": best.n})
    return rows


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no figure; empty where there is one."""
    named = ", ".join(series.metric for series in SERIES)
    return "" if _gather(data, finals).cells else f"no run logged any of {named}"


def draw_curves(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>`: arms as columns, levels as rows, many arms in several rows a level; axes shared.

    None where `missing` says why.
    """
    gathered = _gather(data, finals)
    known, numbers = gathered.cells, _numbers(gathered, finals)
    if not known:
        return None
    heading = data.design.question if data.design else data.record.name
    bands = _bands(known, gathered.thinned)
    arms = [arm for arm in data.arms if arm in set(numbers["arm"])]
    over = {cell: _over(data, cell, here, panel_width(arms)) for cell, here in known.items()}
    entries = _legend(numbers)
    rows = len(arranged(arms)) * len({level for level, _ in known})
    label, formatter = budget_label(finals.axis, finals.budget)
    with house_style(data.record.name):
        grid = small_multiples(
            data,
            list(known),
            heading,
            legend_height(len(entries)),
            over,
            panel=2.1 if rows <= 2 else 1.3,
            labels=(label, "share of responses, reward"),
            footer=_footer(data, finals, bands, gathered, numbers),
        )
        write_legend(grid.figure, heading, entries)
        drawn = numbers[numbers["part"] == "seed"]
        longest = drawn["x"].max()
        for (level, arm), axes in grid.panels.items():
            _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)], finals.budget, longest)
        # Bands of few seeds are wider than anything measured: the axes are those of the runs.
        some = next(iter(grid.panels.values()))
        some.set_ylim(min(0.0, drawn["value"].min()) - 0.02, max(1.0, drawn["value"].max()) + 0.02)
        some.set_xlim(0, 1.02 * longest)
        some.xaxis.set_major_formatter(formatter)
    return Drawn(data.record.name, grid.figure, numbers, bands)


def _over(data: SweepData, cell: Cell, here: _Cell, inches: float) -> list[str]:
    """What is written over a panel: the number of seeds, and the gap change."""
    return [
        *wrapped(seeds_text(here.n, data.seeds_planned(*cell), here.collapsed), inches, SMALL),
        gap_text(here.gap) + (f" (n = {here.gap.n})" if here.gap.n not in (0, here.n) else ""),
    ]


def gap_text(change: Interval) -> str:
    """`G +21.5 pp [17.8, 25.2]`, of percentage points."""
    if change.n == 0:
        return "G -"
    return f"G {change.mean:+.1f} pp{change.ends('{:.1f}'.format)}"


def _panel(axes: Axes, numbers: pd.DataFrame, budget: float, longest: float) -> None:
    if longest > 1.02 * budget:
        axes.axvline(budget, color="#C8C8C8", linewidth=0.8, label="X")
    for row in rows_of(numbers[numbers["part"] == "onset"]):
        colour, dashes, _ = _ONSETS[row.series]
        axes.axvline(row.x, color=colour, linestyle=dashes, linewidth=1.0, label=row.series)
    for series in SERIES:
        own = numbers[numbers["series"] == series.metric]
        seeds, stops = own["seed"].nunique(), own[own["part"] == "stop"]
        for seed, run in own[own["part"] == "seed"].groupby("seed"):
            look: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.4 / seeds**0.5}
            if seed in set(stops["seed"]):
                look = {"linewidth": 0.9, "alpha": 0.9}
            axes.plot(run["x"], run["value"], color=series.colour, label="seed", **look)
        axes.plot(stops["x"], stops["value"], color=series.colour, zorder=4, clip_on=False, **CROSS)
        mean = own[own["part"] == "mean"]
        style: dict[str, Any] = {"color": series.colour, "linewidth": 1.7, "marker": series.marker}
        style["markersize"] = 3.4 if len(mean) <= 10 else 2.2
        axes.plot(mean["x"], mean["value"], series.dashes, label=series.metric, **style)
        if mean["low"].notna().any():
            axes.fill_between(mean["x"], mean["low"], mean["high"], color=series.colour, alpha=0.15, linewidth=0)
        end = own[own["part"] == "end"]
        axes.plot(end["x"], end["value"], "|", color=series.colour, markersize=11)
    peak = numbers[numbers["part"] == "peak"]
    axes.plot(peak["x"], peak["value"], **_PEAK, label="peak", clip_on=False)


def _legend(numbers: pd.DataFrame) -> list[tuple[Artist, str]]:
    drawn, parts = set(numbers["series"]), set(numbers["part"])
    style: dict[str, Any] = {"markersize": 4, "linewidth": 1.7}
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=s.colour, linestyle=s.dashes, marker=s.marker, **style), s.title)
        for s in SERIES
        if s.metric in drawn
    ]
    marks: list[tuple[Artist, str]] = []
    if "peak" in parts:
        marks.append((Line2D([], [], **_PEAK), "highest mean E"))
    for name, (colour, dashes, words) in _ONSETS.items():
        if name in drawn:
            marks.append((Line2D([], [], color=colour, linestyle=dashes, linewidth=1.0), words))
    if "stop" in parts:
        marks.append((Line2D([], [], color=BLACK, **CROSS), "a run collapsed"))
    # The legend fills its first column first: with the lines.
    blank: tuple[Artist, str] = (Line2D([], [], linestyle=""), "")
    return [*entries, *[blank] * (len(marks) - len(entries)), *marks]


def _bands(known: Mapping[Cell, _Cell], thin: bool) -> str:
    logged = "as logged" + (", of long runs the lowest and highest of every stretch" if thin else "")
    smooth = f"metrics of every step as running means over {SMOOTHING:.0%} of the budget"
    if max(here.n for here in known.values()) < FOR_INTERVAL:
        return f"bold: mean over runs, too few for an interval, {smooth}; thin: single seeds {logged}"
    return f"bold: mean over runs, {smooth}; band: its 95% t interval; thin: single seeds {logged}"


def _footer(data: SweepData, finals: FinalValues, bands: str, gathered: _Gathered, numbers: pd.DataFrame) -> str:
    known = gathered.cells
    factor = data.design.factor if data.design else ""
    absent = [arm for arm in data.arms if arm not in {arm for _, arm in known}]
    absent += [f"{factor} = {level}" for level in data.levels if level not in {level for level, _ in known}]
    parts_drawn, longest = set(numbers["part"]), numbers.loc[numbers["part"] == "seed", "x"].max()
    parts = [
        f"{bands[0].upper()}{bands[1:]}.",
        f"G: how much more Pc than E was gained from step 0 to X = {finals.at}, percentage points.{finals.over_bases}",
        "Ring: picked on these data, so a little too high." if "peak" in parts_drawn else "",
        _onset_text(known, "onset" in parts_drawn),
        "Bar: a mean ends with the shortest of its seeds." if "end" in parts_drawn else "",
        "Means leave out the runs that collapsed before X." if any(here.collapsed for here in known.values()) else "",
        "Grey line: X, from where on not every run goes." if longest > 1.02 * finals.budget else "",
        *gathered.lines.shortfalls,
        f"Not run: {', '.join(absent)}." if absent else "",
    ]
    return " ".join(filter(None, parts))


def _onset_text(known: Mapping[Cell, _Cell], drawn: bool) -> str:
    """What an onset is, and where none could be looked for."""
    untested = [arm for (_, arm), here in known.items() if here.onsets.get(OPENS, _NONE).note in _TOO_FEW]
    if len(untested) == len(known):
        return f"Onsets need Pc and E of 3 seeds at {RUN} evaluations after step 0."
    text = (
        f"Onset: the first of {RUN} evaluations or more in a row at which G, or what E has lost since its best, is "
        "surely above 0 over seeds (one-sided 95%); no line: not detected."
    )
    text = text if drawn else "No onset was detected, of a gap or of a fall."
    return f"{text} Not tested: {', '.join(dict.fromkeys(untested))}." if untested else text


FIGURE = FigureKind(
    "",
    draw_curves,
    missing,
    title="Training reward against evaluations",
    how_to_read=(
        "One panel per arm, over the budget. Lines that run apart after the mark of the onset are divergence; "
        "a downstream line that falls beside a rising reward is harm."
    ),
)
