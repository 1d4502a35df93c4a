"""Training reward and the evaluations over the budget, one panel per arm and level: the first figure of a sweep."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.divergence.measures import RUN, TOO_FEW
from grpo_lab.analysis.figures.palette import BLACK, BLUE, FAINT, GREEN, PURPLE, VERMILLION, Entry, Look
from grpo_lab.analysis.figures.panels import (
    CROSS,
    arm_panels,
    arm_rows,
    at_level,
    draw_line,
    drawn_conditions,
    seeds_text,
)
from grpo_lab.analysis.figures.style import Drawn, FigureKind, budget_label, drawing, sentences
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, REWARD, FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval
from grpo_lab.analysis.stats.mean_line import SMOOTHING
from grpo_lab.analysis.table_rows import groups_of, rows_of
from grpo_lab.analysis.tables.curves import (
    LINE,
    curves_of,
    line_numbers,
    numbers_table,
    shortfalls,
    thinned_steps,
    without_equal,
)
from grpo_lab.analysis.tables.gap import FALLS, OPENS, divergence_of, gap_changes

CORRECT = "reward/outcome"
SERIES = {
    CORRECT: (Look(VERMILLION, "--"), "training reward, correctness of all responses"),
    REWARD: (Look(PURPLE, ":"), "training reward as the loss sees it"),
    HELDOUT: (Look(BLUE, "-", "o"), "held-out accuracy, training protocol"),
    DOWNSTREAM: (Look(GREEN, "-", "s"), "downstream accuracy, harder problems"),
}
# Where both begin at one evaluation, the dashes of one fill the gaps of the other.
_ONSETS: dict[str, tuple[dict[str, Any], str]] = {
    OPENS: ({"color": BLACK, "linestyle": (0, (4, 4)), "linewidth": 1.0}, "the gap opens (onset)"),
    FALLS: ({"color": GREEN, "linestyle": (4, (4, 4)), "linewidth": 1.0}, "downstream accuracy falls (onset)"),
}
_PEAK: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 8, "markerfacecolor": "none"}
_PEAK |= {"markeredgecolor": GREEN}


def curve_numbers(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "seed" (a run's own points, of long runs only the lowest and highest of every segment), "stop" (the last
    point of a run that collapsed), "mean" (over seeds, with the t interval in low and high, of n seeds), "end" (of a
    mean that ends before X), "peak" (the highest mean), "onset" (x, with the range of it in low and high) or "final"
    (the gap change at X, in percentage points, written over a panel).
    """
    curves = _curves(data, finals)
    if curves.empty:
        return curves
    lines = line_numbers(curves, finals, thinned_steps(curves))
    means = lines[lines["part"] == "mean"]
    ends = means.groupby(LINE).tail(1)
    ends = ends[ends["x"] < 0.98 * finals.budget].assign(part="end")
    downstream = means[means["series"] == DOWNSTREAM].reset_index(drop=True)
    peaks = downstream.loc[downstream.groupby(LINE)["value"].idxmax()].assign(part="peak")
    marks = [own.drop(columns=["low", "high"]) for own in (ends, peaks)]
    divergence = divergence_of(data, finals, drawn_conditions(data, curves))
    return numbers_table([lines, *marks, divergence[divergence["x"].notna()]]).round(6)


def _curves(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """The curves of all series; reward as the loss sees it only of arms where it is another number."""
    return without_equal(curves_of(data, finals, list(SERIES)), data, REWARD, CORRECT)


def draw_curves(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>`: arms as columns, levels as rows, many arms in several rows; or why there is none."""
    numbers = curve_numbers(data, finals)
    if numbers.empty:
        return f"no run logged any of {', '.join(SERIES)}"
    places, over = drawn_conditions(data, numbers), _over(data, finals)
    rows, seeds = len(arm_rows(data, places)), numbers[numbers["part"] == "seed"]
    bands = "bold: mean over runs; band: its 95% t interval; thin: single seeds"
    if numbers["n"].max() < FOR_INTERVAL:
        bands = "bold: mean over runs, too few for an interval; thin: single seeds"
    label, formatter = budget_label(finals.axis, finals.budget)
    heading = data.design.question if data.design else data.record.name
    height = 1.7 + rows * (2.7 if rows <= 2 else 2.0)
    with drawing(data.record.name, heading, height, bands, _legend(numbers)) as figure:
        panels = arm_panels(figure, data, places, over, (label, "share of responses, reward"))
        for (level, arm), axes in panels.items():
            if seeds["x"].max() > 1.02 * finals.budget:
                axes.axvline(finals.budget, color=FAINT, linewidth=0.8, label="equal budget")
            _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)])
        # Bands of few seeds are wider than anything measured: the axes are those of the runs.
        some = next(iter(panels.values()))
        some.set_ylim(min(0.0, seeds["value"].min()) - 0.02, max(1.0, seeds["value"].max()) + 0.02)
        some.set_xlim(0, 1.02 * seeds["x"].max())
        some.xaxis.set_major_formatter(formatter)
        some.xaxis.set_major_locator(MaxNLocator(4))
    return Drawn(data.record.name, figure, numbers, bands, caption=_caption(data, finals, numbers))


def _over(data: SweepData, finals: FinalValues) -> dict[Condition, str]:
    """What is written over a panel: the number of seeds, and the gap change."""
    curves = _curves(data, finals)
    seeds = curves[curves["reached"]].groupby(["level", "arm"])["seed"].nunique()
    texts = {}
    for condition, change in gap_changes(data, finals, drawn_conditions(data, curves)).items():
        n = int(seeds.get(condition, 0))
        texts[condition] = (
            f"{seeds_text(n, data.seeds_planned(*condition), finals.stopped(*condition))}\n{gap_text(change)}"
        )
        texts[condition] += f" (n = {change.n})" if change.n not in (0, n) else ""
    return texts


def gap_text(change: Interval) -> str:
    """`gap +21.5 pp [17.8, 25.2]`, of percentage points."""
    return f"gap {change.mean:+.1f} pp{change.ends('{:.1f}'.format)}" if change.n else "gap -"


def _panel(axes: Axes, numbers: pd.DataFrame) -> None:
    parts = dict(groups_of(numbers, "part"))
    for row in rows_of(parts.get("onset", numbers.head(0))):
        axes.axvline(row.x, label=row.series, **_ONSETS[row.series][0])
    for metric, (look, _) in SERIES.items():
        own = numbers[numbers["series"] == metric]
        draw_line(axes, own, look, metric, 0.4 / max(own["seed"].nunique(), 1) ** 0.5)
        end = own[own["part"] == "end"]
        axes.plot(end["x"], end["value"], "|", color=look.colour, markersize=11)
    if "peak" in parts:  # constrained layout counts an empty line that is not clipped as one at the figure's corner
        axes.plot(parts["peak"]["x"], parts["peak"]["value"], **_PEAK, label="peak", clip_on=False)


def _legend(numbers: pd.DataFrame) -> list[Entry]:
    drawn, parts = set(numbers["series"]), set(numbers["part"])
    entries = [look.entry(words) for metric, (look, words) in SERIES.items() if metric in drawn]
    if "peak" in parts:
        entries.append((Line2D([], [], **_PEAK), "highest mean downstream accuracy"))
    entries += [(Line2D([], [], **look), words) for name, (look, words) in _ONSETS.items() if name in drawn]
    if "stop" in parts:
        entries.append((Line2D([], [], color=BLACK, **CROSS), "a run collapsed"))
    return entries


def _caption(data: SweepData, finals: FinalValues, numbers: pd.DataFrame) -> str:
    places, drawn = drawn_conditions(data, numbers), set(numbers["part"])
    absent = [arm for arm in data.arms if arm not in {arm for _, arm in places}]
    absent += [at_level(data, level).strip() for level in data.levels if level not in {level for level, _ in places}]
    curves = _curves(data, finals)
    beyond = numbers.loc[numbers["part"] == "seed", "x"].max() > 1.02 * finals.budget
    return sentences({
        f"Means of metrics of every step are running means over {SMOOTHING:.0%} of the budget.": True,
        "Single seeds of long runs: the lowest and highest value of every segment.":
            len(thinned_steps(curves)) < len(curves),
        "Gap: how much more training reward (correctness of all responses) than downstream accuracy was gained from "
        f"step 0 to {finals.at}, in percentage points.{finals.over_bases}": True,
        "Ring: picked on these data, so a little too high.": "peak" in drawn,
        _onset_text(divergence_of(data, finals, places)): True,
        "Bar: a mean ends with the shortest of its seeds.": "end" in drawn,
        "Means leave out runs that collapsed before that.": any(finals.stopped(*condition) for condition in places),
        f"Grey line: {finals.at}, beyond which not every run goes.": beyond,
        **dict.fromkeys(shortfalls(data, finals, list(SERIES)), True),
        f"Not run: {', '.join(absent)}.": absent,
    })  # fmt: skip


def _onset_text(divergence: pd.DataFrame) -> str:
    """What an onset is, and where none could be looked for."""
    opens = divergence[(divergence["series"] == OPENS) & ~divergence["note"].isin(["too few seeds", TOO_FEW])]
    tested = set(zip(opens["level"], opens["arm"]))
    places = dict.fromkeys(zip(divergence["level"], divergence["arm"]))
    untested = dict.fromkeys(arm for level, arm in places if (level, arm) not in tested)
    if not tested:
        return f"Onsets need training reward and downstream accuracy of 3 seeds at {RUN} evaluations after step 0."
    text = (
        f"Onset: the first of {RUN} evaluations or more in a row at which the gap, or the loss of downstream accuracy "
        "since its best, is significantly above 0 over seeds (one-sided 95%); no line: not detected."
    )
    found = divergence.loc[divergence["part"] == "onset", "x"].notna().any()
    text = text if found else "No onset was detected, of a gap or of a fall."
    return f"{text} Not tested: {', '.join(untested)}." if untested else text


FIGURE = FigureKind(
    "",
    draw_curves,
    title="Training reward against evaluations",
    order=2,
    how_to_read=(
        "One panel per arm, over the budget. Lines that run apart after the mark of the onset are divergence; "
        "a downstream line that falls beside a rising reward is harm."
    ),
)
