"""Training reward and the evaluations over the budget, one panel per arm and level: the first figure of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.divergence.measures import RUN, TOO_FEW, Onset, gap, onsets
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.panels import CROSS, Cell, arm_panels, arm_rows, at_level, seeds_text
from grpo_lab.analysis.figures.seed_lines import (
    Line,
    Lines,
    as_columns,
    as_table,
    mean_rows,
    points_each,
    seed_lines,
    seed_rows,
)
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    PURPLE,
    VERMILLION,
    Dashes,
    Drawn,
    Entry,
    budget_label,
    house_style,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, REWARD, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval
from grpo_lab.analysis.stats.mean_line import SMOOTHING
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tracks import Track, cells, mean_of_tracks, tracks

CORRECT = "reward/outcome"
GAP_CHANGE, OPENS, FALLS = "divergence/gap_change", "divergence/onset", "divergence/onset_after_peak"
# Where both begin at one evaluation, the dashes of one fill the gaps of the other.
_ONSETS = {
    OPENS: (BLACK, (0, (4, 4)), "the gap opens (onset)"),
    FALLS: (GREEN, (4, (4, 4)), "downstream accuracy falls (onset)"),
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
    Series(CORRECT, "training reward, correctness of all responses", VERMILLION, "--"),
    Series(REWARD, "training reward as the loss sees it", PURPLE, ":"),
    Series(HELDOUT, "held-out accuracy, training protocol", BLUE, "-", "o"),
    Series(DOWNSTREAM, "downstream accuracy, harder problems", GREEN, "-", "s"),
)


@dataclass(frozen=True)
class _Cell:
    """What is known of one arm at one level beside its lines."""

    series: Sequence[Series]  # that its panel shows
    gap: Interval  # gap change at the common budget, percentage points
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
        rows += seed_rows(labels, line, len(line.x) if series.marker else points)
    mean: list[dict[str, Any]] = mean_rows(labels, lines, budget, bool(series.marker))
    if mean and mean[-1]["x"] < 0.98 * budget:
        rows.append({**labels, "part": "end", **{name: mean[-1][name] for name in ("x", "value", "n")}})
    if series.metric == DOWNSTREAM and mean:
        best = max(mean, key=lambda row: row["value"])
        rows.append({**labels, "part": "peak", **{name: best[name] for name in ("x", "value", "n")}})
    return rows + mean


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
    bands = "bold: mean over runs; band: its 95% t interval; thin: single seeds"
    if max(here.n for here in known.values()) < FOR_INTERVAL:
        bands = "bold: mean over runs, too few for an interval; thin: single seeds"
    rows = len(arm_rows(data, list(known)))
    label, formatter = budget_label(finals.axis, finals.budget)
    drawn = numbers[numbers["part"] == "seed"]
    longest = drawn["x"].max()
    with house_style(data.record.name):
        heading = data.design.question if data.design else data.record.name
        figure = new_figure(heading, 1.7 + rows * (2.7 if rows <= 2 else 2.0))
        over = {cell: _over(data, cell, here) for cell, here in known.items()}
        panels = arm_panels(figure, data, list(known), over, (label, "share of responses, reward"))
        for (level, arm), axes in panels.items():
            _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)], finals.budget, longest)
        # Bands of few seeds are wider than anything measured: the axes are those of the runs.
        some = next(iter(panels.values()))
        some.set_ylim(min(0.0, drawn["value"].min()) - 0.02, max(1.0, drawn["value"].max()) + 0.02)
        some.set_xlim(0, 1.02 * longest)
        some.xaxis.set_major_formatter(formatter)
        some.xaxis.set_major_locator(MaxNLocator(4))
        write_legend(figure, _legend(numbers))
        write_footer(figure, bands)
    return Drawn(data.record.name, figure, numbers, bands, caption=_caption(data, finals, gathered, numbers))


def _over(data: SweepData, cell: Cell, here: _Cell) -> str:
    """What is written over a panel: the number of seeds, and the gap change."""
    seeds = seeds_text(here.n, data.seeds_planned(*cell), here.collapsed)
    return f"{seeds}\n{gap_text(here.gap)}" + (f" (n = {here.gap.n})" if here.gap.n not in (0, here.n) else "")


def gap_text(change: Interval) -> str:
    """`gap +21.5 pp [17.8, 25.2]`, of percentage points."""
    if change.n == 0:
        return "gap -"
    return f"gap {change.mean:+.1f} pp{change.ends('{:.1f}'.format)}"


def _panel(axes: Axes, numbers: pd.DataFrame, budget: float, longest: float) -> None:
    if longest > 1.02 * budget:
        axes.axvline(budget, color=FAINT, linewidth=0.8, label="equal budget")
    for row in rows_of(numbers[numbers["part"] == "onset"]):
        colour, dashes, _ = _ONSETS[row.series]
        axes.axvline(row.x, color=colour, linestyle=dashes, linewidth=1.0, label=row.series)
    for series in SERIES:
        own = numbers[numbers["series"] == series.metric]
        seeds, stops, end = (own[own["part"] == part] for part in ("seed", "stop", "end"))
        faint = 0.4 / max(seeds["seed"].nunique(), 1) ** 0.5
        for seed, run in seeds.groupby("seed"):
            alpha = 0.9 if seed in set(stops["seed"]) else faint
            axes.plot(run["x"], run["value"], color=series.colour, label="seed", linewidth=0.6, alpha=alpha)
        if len(stops):
            axes.plot(stops["x"], stops["value"], color=series.colour, zorder=4, clip_on=False, **CROSS)
        mean = own[own["part"] == "mean"]
        style: dict[str, Any] = {"color": series.colour, "linewidth": 1.7, "marker": series.marker}
        axes.plot(mean["x"], mean["value"], series.dashes, label=series.metric, markersize=2.6, **style)
        if mean["low"].notna().any():
            axes.fill_between(mean["x"], mean["low"], mean["high"], color=series.colour, alpha=0.15, linewidth=0)
        axes.plot(end["x"], end["value"], "|", color=series.colour, markersize=11)
    peak = numbers[numbers["part"] == "peak"]
    if len(peak):  # constrained layout counts an empty line that is not clipped as one at the figure's corner
        axes.plot(peak["x"], peak["value"], **_PEAK, label="peak", clip_on=False)


def _legend(numbers: pd.DataFrame) -> list[Entry]:
    drawn, parts = set(numbers["series"]), set(numbers["part"])
    style: dict[str, Any] = {"markersize": 4, "linewidth": 1.7}
    entries: list[Entry] = [
        (Line2D([], [], color=s.colour, linestyle=s.dashes, marker=s.marker, **style), s.title)
        for s in SERIES
        if s.metric in drawn
    ]
    if "peak" in parts:
        entries.append((Line2D([], [], **_PEAK), "highest mean downstream accuracy"))
    for name, (colour, dashes, words) in _ONSETS.items():
        if name in drawn:
            entries.append((Line2D([], [], color=colour, linestyle=dashes, linewidth=1.0), words))
    if "stop" in parts:
        entries.append((Line2D([], [], color=BLACK, **CROSS), "a run collapsed"))
    return entries


def _caption(data: SweepData, finals: FinalValues, gathered: _Gathered, numbers: pd.DataFrame) -> str:
    known = gathered.cells
    absent = [arm for arm in data.arms if arm not in {arm for _, arm in known}]
    drawn_levels = {level for level, _ in known}
    absent += [at_level(data, level).strip() for level in data.levels if level not in drawn_levels]
    parts_drawn, longest = set(numbers["part"]), numbers.loc[numbers["part"] == "seed", "x"].max()
    parts = [
        f"Means of metrics of every step are running means over {SMOOTHING:.0%} of the budget.",
        "Single seeds of long runs: the lowest and highest value of every segment." if gathered.thinned else "",
        "Gap: how much more training reward (correctness of all responses) than downstream accuracy was gained from "
        f"step 0 to {finals.at}, in percentage points.{finals.over_bases}",
        "Ring: picked on these data, so a little too high." if "peak" in parts_drawn else "",
        _onset_text(known, "onset" in parts_drawn),
        "Bar: a mean ends with the shortest of its seeds." if "end" in parts_drawn else "",
        "Means leave out runs that collapsed before that." if any(here.collapsed for here in known.values()) else "",
        f"Grey line: {finals.at}, beyond which not every run goes." if longest > 1.02 * finals.budget else "",
        *gathered.lines.shortfalls,
        f"Not run: {', '.join(absent)}." if absent else "",
    ]
    return " ".join(filter(None, parts))


def _onset_text(known: Mapping[Cell, _Cell], drawn: bool) -> str:
    """What an onset is, and where none could be looked for."""
    untested = [arm for (_, arm), here in known.items() if here.onsets.get(OPENS, _NONE).note in _TOO_FEW]
    if len(untested) == len(known):
        return f"Onsets need training reward and downstream accuracy of 3 seeds at {RUN} evaluations after step 0."
    text = (
        f"Onset: the first of {RUN} evaluations or more in a row at which the gap, or the loss of downstream accuracy "
        "since its best, is significantly above 0 over seeds (one-sided 95%); no line: not detected."
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
