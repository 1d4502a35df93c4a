"""Step metrics under the first figure: entropy, KL, length and the like over the same budget, a panel for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.panels import CROSS, Cell, level_label
from grpo_lab.analysis.figures.seed_lines import Line, Lines, mean_rows, points_each, seed_lines, seed_rows
from grpo_lab.analysis.figures.style import (
    FAINT,
    SMALL,
    Dashes,
    Drawn,
    Entry,
    budget_label,
    house_style,
    in_lines,
    looks,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import TRUNCATED, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import SMOOTHING
from grpo_lab.analysis.table_rows import groups_of, row_at
from grpo_lab.analysis.tracks import KL
from grpo_lab.tracking.metrics import fraction_metric, is_active_fraction

OWN = "active_fraction/own"  # the largest share that an arm's own tricks touch
ALL_COLOURED = 8  # with more arms, only the control and the furthest from it are
FURTHEST = 5
_POINTS, _FEWEST = 26, 12  # of a mean, and at least of a thin line
_LOGARITHMIC = " (log above {:g})"
_MOST = 6  # levels side by side: with more, names of arms have no room


@dataclass(frozen=True)
class StepMetric:
    """One panel: a metric, what it is called, and whether arms may differ by decades."""

    metric: str
    title: str
    decades: bool = False


STEP_METRICS = (
    StepMetric("train/entropy", "entropy, nats a token", True),
    StepMetric(KL, "KL from the initial policy, nats a response"),
    StepMetric("train/approx_kl", "KL from the old policy (k3), nats a token", True),
    StepMetric("rollout/length", "response length, tokens"),
    StepMetric(TRUNCATED, "truncated, share of responses"),
    StepMetric("rollout/frac_zero_std", "without signal, share of groups"),
    StepMetric("train/clip_fraction", "clipped, share of tokens"),
    StepMetric("mismatch/k3", "sampler mismatch (k3), nats a token", True),
    StepMetric(OWN, "active fraction of the arm's own tricks, the largest"),
)


def own_axes(data: SweepData) -> dict[str, list[str]]:
    """For every arm the active_fraction/* that belong to its own tricks.

    Those its overrides name; where they name none, as a recipe's name does, those that it touches and the control
    never does.
    """
    tricks = data.design.tricks if data.design else {}
    touched = [name for name in data.points.columns if is_active_fraction(name)]
    most = data.counted_points.groupby("arm")[touched].max().reindex(data.arms).fillna(0.0)
    found = {}
    for arm in data.arms:
        words = [word for trick in sorted(data.contents(arm)) for word in tricks.get(trick, (trick,))]
        named = {fraction_metric(word.lstrip("+").partition("=")[0].partition(".")[0]) for word in words}
        if words and not named & set(touched):
            here, plain = row_at(most, arm), row_at(most, data.control)
            named = {name for name in touched if here[name] > 0 and not plain[name] > 0}
        found[arm] = [name for name in touched if name in named]
    return found


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no figure; empty where there is one."""
    if (levels := len(dict.fromkeys(finals.values["level"]))) > _MOST:
        return f"{levels} levels do not fit side by side, {_MOST} do"
    return "" if _gather(data, finals).metrics else "no run logged a step metric that is not 0 throughout"


@dataclass(frozen=True)
class _Gathered:
    lines: Lines
    own: Lines
    metrics: Sequence[StepMetric]  # with a value other than 0
    zero: Sequence[StepMetric]
    cells: Sequence[Cell]  # in declared order

    def of(self, shown: StepMetric, cell: Cell) -> Sequence[Line]:
        return (self.own if shown.metric == OWN else self.lines).of(shown.metric, cell)


def _gather(data: SweepData, finals: FinalValues) -> _Gathered:
    # The KL of an update stands in for the one from the initial policy, which older runs did not log.
    left_out = "train/approx_kl" if KL in data.points else KL
    metrics = [shown for shown in STEP_METRICS if shown.metric != left_out]
    lines = seed_lines(data, finals, [shown.metric for shown in metrics if shown.metric != OWN])
    own = pd.Series(math.nan, index=data.points.index)
    for arm, names in own_axes(data).items():
        here = data.points["arm"] == arm
        own[here] = data.points.loc[here, names].max(axis=1) if names else math.nan
    with_own = replace(data, points=data.points.copy().assign(**{OWN: own}))  # in one piece, or pandas warns
    owns = seed_lines(with_own, finals, [OWN])  # its shortfalls are no news: some arms have no tricks
    found = {*lines.cells, *owns.cells}
    cells = [(level, arm) for level in data.levels for arm in data.arms if (level, arm) in found]
    gathered = _Gathered(lines, owns, metrics, (), cells)
    logged = [shown for shown in metrics if any(gathered.of(shown, cell) for cell in cells)]
    zero = [s for s in logged if not any(np.any(line.value) for cell in cells for line in gathered.of(s, cell))]
    return replace(gathered, metrics=[shown for shown in logged if shown not in zero], zero=zero)


def _numbers(gathered: _Gathered, control: str, budget: float) -> pd.DataFrame:
    """Every number the figure shows, values with six significant digits.

    `part` is "mean" (over n seeds, with the t interval in low and high). Arms in colour also have "seed" (a run's own
    points; of long runs only the lowest and highest of every stretch) and "stop" (where a run collapsed).
    """
    rows: list[dict[str, Any]] = []
    coloured: list[tuple[dict[str, Any], StepMetric, Sequence[Line]]] = []
    for shown in gathered.metrics:
        for level in dict.fromkeys(level for level, _ in gathered.cells):
            ends = {}
            for arm in (arm for at, arm in gathered.cells if at == level):
                labels = {"level": level, "arm": arm, "series": shown.metric}
                own = gathered.of(shown, (level, arm))
                mean: list[dict[str, Any]] = mean_rows(labels, own, budget, shown.metric.startswith("eval/"), _POINTS)
                rows += mean
                if own:
                    ends[arm] = mean[-1]["value"] if mean else math.nan
            for arm in _coloured(ends, control):
                labels = {"level": level, "arm": arm, "series": shown.metric}
                coloured.append((labels, shown, gathered.of(shown, (level, arm))))
    points = points_each(sum(len(lines) for *_, lines in coloured), fewest=_FEWEST)
    for labels, _, lines in coloured:
        for line in lines:
            rows += seed_rows(labels, line, points)
    names = ["level", "arm", "series", "part", "seed", "x", "value", "low", "high", "n"]
    table = pd.DataFrame(rows, columns=names).astype({"seed": "Int64", "n": "Int64"}).round({"x": 6})
    for name in ("value", "low", "high"):  # a mismatch of 1e-9 has no six decimals
        table[name] = [float(f"{value:.6g}") for value in table[name]]
    return table


def _coloured(ends: Mapping[str, float], control: str) -> list[str]:
    """Which of these arms get colours, by where their means end: all, or the control and the furthest from it.

    An arm of which every run collapsed has no mean (NaN), and is as far as can be.
    """
    if len(ends) <= ALL_COLOURED:
        return list(ends)
    middle = ends.get(control, math.nan)
    middle = float(np.nanmedian(list(ends.values()))) if math.isnan(middle) else middle
    distance = {arm: math.inf if math.isnan(end) else abs(end - middle) for arm, end in ends.items()}
    far = sorted((arm for arm in ends if arm != control), key=lambda arm: -distance[arm])
    return [arm for arm in ends if arm == control or arm in far[:FURTHEST]]


def draw_step_metrics(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_step_metrics`: a panel per metric and level, a line per arm; None as `missing` says."""
    if missing(data, finals):
        return None
    gathered = _gather(data, finals)
    numbers = _numbers(gathered, data.control, finals.budget)
    levels = list(dict.fromkeys(level for level, _ in gathered.cells))
    columns = len(levels) if len(levels) > 1 else 2
    rows = math.ceil(len(gathered.metrics) * len(levels) / columns)
    look, bands = looks(data.arms, data.control), _bands(numbers)
    label, formatter = budget_label(finals.axis, finals.budget)
    with house_style(f"{data.record.name}_step_metrics"):
        figure = new_figure(f"Step metrics of {data.record.name}: what may explain the curves", 1.2 + 1.55 * rows)
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False)
        drawn = [(axes, shown, level) for axes, (shown, level) in zip(panels.flat, _order(gathered, levels))]
        for axes, shown, level in drawn:
            _panel(axes, _of(numbers, shown, level), look)
        for shown in gathered.metrics:
            own = {level: axes for axes, of, level in drawn if of is shown}
            _scale(list(own.values()), numbers[numbers["series"] == shown.metric], shown, columns)
            for level, axes in own.items():
                axes.set_title(
                    "\n".join(filter(None, [level_label(data, level), axes.get_title("left")])), fontsize=SMALL
                )
        for axes in panels.flat[len(drawn) :]:
            axes.set_visible(False)
        for axes, _, _ in drawn[-columns:]:
            axes.set_xlabel(label)
            axes.tick_params(labelbottom=True)
        panels[0, 0].set_xlim(0, 1.02 * numbers["x"].max())
        panels[0, 0].xaxis.set_major_formatter(formatter)
        coloured = numbers.loc[numbers["part"] == "seed", "arm"].drop_duplicates()
        write_legend(figure, _legend([arm for arm in data.arms if arm in set(coloured)], look), 3)
        write_footer(figure, bands)
    caption = _caption(data, finals, gathered)
    return Drawn(f"{data.record.name}_step_metrics", figure, numbers, bands, caption=caption)


def _legend(arms: Sequence[str], look: Mapping[str, tuple[str, Dashes]]) -> list[Entry]:
    return [(Line2D([], [], color=look[arm][0], linestyle=look[arm][1], linewidth=1.5), arm) for arm in arms]


def _order(gathered: _Gathered, levels: Sequence[str]) -> list[tuple[StepMetric, str]]:
    return [(shown, level) for shown in gathered.metrics for level in levels]


def _of(numbers: pd.DataFrame, shown: StepMetric, level: str) -> pd.DataFrame:
    return numbers[(numbers["level"] == level) & (numbers["series"] == shown.metric)]


def _panel(axes: Axes, numbers: pd.DataFrame, look: Mapping[str, tuple[str, Dashes]]) -> None:
    coloured = set(numbers.loc[numbers["part"] == "seed", "arm"])
    cross: dict[str, Any] = CROSS | {"markersize": 5}
    for arm, own in sorted(groups_of(numbers, "arm"), key=lambda group: group[0] in coloured):
        colour, dashes = look[arm] if arm in coloured else (FAINT, "-")
        mean = own[own["part"] == "mean"]
        axes.plot(mean["x"], mean["value"], dashes, color=colour, linewidth=1.5 if arm in coloured else 0.8, label=arm)
        if arm in coloured and mean["low"].notna().any():
            axes.fill_between(mean["x"], mean["low"], mean["high"], color=colour, alpha=0.1, linewidth=0)
        stops = own[own["part"] == "stop"]
        for seed, run in own[own["part"] == "seed"].groupby("seed"):
            alpha = 0.9 if seed in set(stops["seed"]) else 0.2
            axes.plot(run["x"], run["value"], color=colour, linewidth=0.4, alpha=alpha, label="seed")
        axes.plot(stops["x"], stops["value"], color=colour, **cross)


def _scale(panels: Sequence[Axes], numbers: pd.DataFrame, shown: StepMetric, columns: int) -> None:
    """One y axis for all levels of a metric, as wide as the runs; bands of few seeds would be wider than that."""
    low, high = float(numbers["value"].min()), float(numbers["value"].max())
    means = numbers.loc[numbers["part"] == "mean", "value"]
    usual = float(f"{means[means > 0].median():.0e}")
    decades = shown.decades and means.max() > 30 * usual
    for axes in panels:
        title = shown.title
        if decades:
            # Linear around 0, since many arms may have none of it.
            axes.set_yscale("symlog", linthresh=usual, linscale=0.5)
            axes.set_ylim(min(0.0, low), 1.5 * high)
            first = math.ceil(math.log10(2 * usual))
            powers = [10.0**power for power in range(first, math.floor(math.log10(1.5 * high)) + 1)]
            axes.yaxis.set_major_locator(FixedLocator([0.0, *powers]))
            title += _LOGARITHMIC.format(usual)
        else:
            floor = low - 0.1 * (high - low) if high > low > 0.4 * high else min(0.0, 1.05 * low)
            axes.set_ylim(floor, high + 0.05 * (high - floor))
            axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.set_title(in_lines(title, 110 // columns), fontsize=SMALL)


def _bands(numbers: pd.DataFrame) -> str:
    smooth = f"metrics of every step as running means over {SMOOTHING:.0%} of the budget"
    thin = "single seeds as logged, of long runs the lowest and highest of every segment"
    if not numbers["low"].notna().any():
        return f"bold: mean over runs, too few for an interval, {smooth}; thin: {thin}"
    return f"bold: mean over runs, {smooth}; band: its 95% t interval; thin: {thin}"


def _caption(data: SweepData, finals: FinalValues, gathered: _Gathered) -> str:
    counts = {cell: data.seeds_finished(*cell) for cell in gathered.cells}
    if len(set(counts.values())) == 1:
        n = next(iter(counts.values()))
        seeds = f"n = {n} seed{'s' if n > 1 else ''} an arm."
    else:
        named = [f"{arm}{f' at {level}' if level else ''} {n}" for (level, arm), n in counts.items()]
        seeds = f"n: {', '.join(named)}."
    few = len({arm for _, arm in gathered.cells}) <= ALL_COLOURED
    parts = [
        seeds,
        ""
        if few
        else f"In colour: {data.control} and, for each metric, the {FURTHEST} arms that end furthest from it.",
        "Cross: a run collapsed; means leave it out." if any(finals.stopped(*cell) for cell in counts) else "",
        f"0 throughout: {', '.join(shown.title.partition(',')[0] for shown in gathered.zero)}."
        if gathered.zero
        else "",
        *gathered.lines.shortfalls,
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "step_metrics",
    draw_step_metrics,
    missing,
    title="Step metrics",
    how_to_read=(
        "Entropy, KL, length, truncation and the like over the budget, a panel for each: why an arm did what it did."
    ),
)
