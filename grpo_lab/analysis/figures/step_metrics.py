"""Step metrics under the first figure: entropy, KL, length and the like over the same budget, a panel for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from grpo_lab.analysis.figures.palette import FAINT, Look, looks
from grpo_lab.analysis.figures.panels import draw_line, drawn_conditions, level_label
from grpo_lab.analysis.figures.style import SMALL, Drawn, FigureKind, budget_label, drawing, in_lines, sentences
from grpo_lab.analysis.final_values import TRUNCATED, FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import SMOOTHING
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tables.curves import line_numbers, numbers_table, points_each, shortfalls, thinned
from grpo_lab.analysis.tables.step_curves import OWN, step_curves, with_control
from grpo_lab.analysis.tracks import KL

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


def _metrics(data: SweepData) -> list[StepMetric]:
    """The KL of an update stands in for the one from the initial policy, which older runs did not log."""
    left_out = "train/approx_kl" if KL in data.points else KL
    return [shown for shown in STEP_METRICS if shown.metric != left_out]


def _moved(curves: pd.DataFrame) -> list[StepMetric]:
    """The metrics with a value other than 0."""
    moved = set(curves.loc[curves["value"] != 0, "metric"])
    return [shown for shown in STEP_METRICS if shown.metric in moved]


def _numbers(curves: pd.DataFrame, data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Every number the figure shows, values with six significant digits.

    `part` is "mean" (over n seeds, with the t interval in low and high). Arms in colour also have "seed" (a run's own
    points; of long runs only the lowest and highest of every segment) and "stop" (where a run collapsed).
    """
    curves = curves[curves["metric"].isin([shown.metric for shown in _moved(curves)])]
    coloured = pd.concat(
        [with_control(own, data, finals, ALL_COLOURED, FURTHEST) for _, own in groups_of(curves, ["level", "metric"])]
    )
    points = points_each(coloured.groupby(["level", "arm", "seed", "metric"]).ngroups, fewest=_FEWEST)
    rows = line_numbers(curves, finals, thinned(coloured, points), _POINTS)
    for name in ("value", "low", "high"):  # a mismatch of 1e-9 has no six decimals
        rows[name] = [float(f"{value:.6g}") for value in rows[name]]
    return numbers_table([rows])


def draw_step_metrics(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_step_metrics`: a panel per metric and level, a line per arm; or why there is none."""
    if (number := finals.values["level"].nunique()) > _MOST:
        return f"{number} levels do not fit side by side, {_MOST} do"
    curves = step_curves(data, finals, [shown.metric for shown in _metrics(data)])
    metrics = _moved(curves)
    if not metrics:
        return "no run logged a step metric that is not 0 throughout"
    numbers = _numbers(curves, data, finals)
    levels = list(dict.fromkeys(level for level, _ in drawn_conditions(data, curves)))
    columns = len(levels) if len(levels) > 1 else 2
    rows = math.ceil(len(metrics) * len(levels) / columns)
    look, bands = looks(data.arms, data.control), _bands(numbers)
    label, formatter = budget_label(finals.axis, finals.budget)
    coloured = set(numbers.loc[numbers["part"] == "seed", "arm"])
    entries = [look[arm].entry(arm) for arm in data.arms if arm in coloured]
    name = f"{data.record.name}_step_metrics"
    heading = f"Step metrics of {data.record.name}: what may explain the curves"
    with drawing(name, heading, 1.2 + 1.55 * rows, bands, entries, 3) as figure:
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
        shown = [(metric, level) for metric in metrics for level in levels]
        for axes, (metric, level) in zip(panels, shown):
            own = numbers[numbers["series"] == metric.metric]
            _panel(axes, own[own["level"] == level], look)
            title = in_lines(_scale(axes, own, metric), 110 // columns)
            axes.set_title(level_label(data, level, title), fontsize=SMALL)
        for axes in panels[len(shown) :]:
            axes.set_visible(False)
        for axes in panels[len(shown) - columns : len(shown)]:
            axes.set_xlabel(label)
            axes.tick_params(labelbottom=True)
        panels[0].set_xlim(0, 1.02 * numbers["x"].max())
        panels[0].xaxis.set_major_formatter(formatter)
    return Drawn(name, figure, numbers, bands, caption=_caption(data, finals, curves))


def _panel(axes: Axes, numbers: pd.DataFrame, look: Mapping[str, Look]) -> None:
    """One metric at one level; arms without colour lie below the others."""
    coloured = set(numbers.loc[numbers["part"] == "seed", "arm"])
    for arm, own in sorted(groups_of(numbers, "arm"), key=lambda group: group[0] in coloured):
        here = arm in coloured
        if not here:
            own = own.assign(low=math.nan)  # only lines in colour have a band
        draw_line(axes, own, look[arm] if here else Look(FAINT), arm, width=1.5 if here else 0.8)


def _scale(axes: Axes, numbers: pd.DataFrame, shown: StepMetric) -> str:
    """One y axis for all levels of a metric, as wide as the runs, since bands of few seeds are wider; its title."""
    low, high = float(numbers["value"].min()), float(numbers["value"].max())
    means = numbers.loc[numbers["part"] == "mean", "value"]
    usual = float(f"{means[means > 0].median():.0e}")
    decades = shown.decades and means.max() > 30 * usual
    if decades:
        # Linear around 0, since many arms may have none of it.
        axes.set_yscale("symlog", linthresh=usual, linscale=0.5)
        axes.set_ylim(min(0.0, low), 1.5 * high)
        first = math.ceil(math.log10(2 * usual))
        powers = [10.0**power for power in range(first, math.floor(math.log10(1.5 * high)) + 1)]
        axes.yaxis.set_major_locator(FixedLocator([0.0, *powers]))
    else:
        floor = low - 0.1 * (high - low) if high > low > 0.4 * high else min(0.0, 1.05 * low)
        axes.set_ylim(floor, high + 0.05 * (high - floor))
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    return shown.title + (_LOGARITHMIC.format(usual) if decades else "")


def _bands(numbers: pd.DataFrame) -> str:
    smooth = f"metrics of every step as running means over {SMOOTHING:.0%} of the budget"
    thin = "single seeds as logged, of long runs the lowest and highest of every segment"
    if not numbers["low"].notna().any():
        return f"bold: mean over runs, too few for an interval, {smooth}; thin: {thin}"
    return f"bold: mean over runs, {smooth}; band: its 95% t interval; thin: {thin}"


def _caption(data: SweepData, finals: FinalValues, curves: pd.DataFrame) -> str:
    places, logged, moved = drawn_conditions(data, curves), set(curves["metric"]), _moved(curves)
    zero = [shown for shown in STEP_METRICS if shown.metric in logged and shown not in moved]
    return sentences({
        _seeds(data, places): True,
        f"In colour: {data.control} and, for each metric, the {FURTHEST} arms that end furthest from it.":
            len({arm for _, arm in places}) > ALL_COLOURED,
        "Cross: a run collapsed; means leave it out.": any(finals.stopped(*place) for place in places),
        f"0 throughout: {', '.join(shown.title.partition(',')[0] for shown in zero)}.": zero,
        # Of its own tricks there is no news: some arms have none.
        **dict.fromkeys(shortfalls(data, finals, [s.metric for s in _metrics(data) if s.metric != OWN]), True),
    })  # fmt: skip


def _seeds(data: SweepData, places: Sequence[Condition]) -> str:
    counts = {place: data.seeds_finished(*place) for place in places}
    if len(set(counts.values())) == 1:
        n = next(iter(counts.values()))
        return f"n = {n} seed{'s' if n > 1 else ''} an arm."
    named = [f"{arm}{f' at {level}' if level else ''} {n}" for (level, arm), n in counts.items()]
    return f"n: {', '.join(named)}."


FIGURE = FigureKind(
    "step_metrics",
    draw_step_metrics,
    title="Step metrics",
    order=3,
    how_to_read=(
        "Entropy, KL, length, truncation and the like over the budget, a panel for each: why an arm did what it did."
    ),
)
