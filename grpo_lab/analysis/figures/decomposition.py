"""The parts of the gap between training reward and downstream accuracy, arm by arm.

Three probes lie between training responses and downstream answers, each one step further from training. The accuracy
that a step loses from step 0 to X is a part of the gap; the four parts add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from grpo_lab.analysis.figures.palette import BLACK, GREY, ORANGE, PURPLE, SKY, Entry
from grpo_lab.analysis.figures.panels import NO_TRACKS, collapse_note, level_rows, not_logged, rows_of_arms, seeds_text
from grpo_lab.analysis.figures.style import Drawn, FigureKind, drawing, in_lines
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tables.gap import PROBES, TOTAL, decomposition_of
from grpo_lab.analysis.tracks import tracks

# Colour of each part, on which black lines show, and what it is: the change on the first less that on the second.
PARTS = {
    "prompt_mix": ("#A0A0A0", "prompt mix and filter: training responses less a fixed set of training questions"),
    "memorisation": (ORANGE, "memorisation: training questions less unseen questions of the same kind"),
    "protocol": (PURPLE, "protocol and verifier: sampled and graded as in training less as in evaluation"),
    "shift": (SKY, "distribution shift: unseen questions of the same kind less downstream questions"),
}
BARS = "bar: a part of the gap, mean over runs, from where the one above it ended; line: its 95% t interval"
BARS_OF_FEW = "bar: a part of the gap, mean over runs, too few for an interval, from where the one above it ended"
_LANE = 0.16  # of the distance of two arms, that a part takes
_ROOM = 0.6  # of what the bars take, that intervals may take on either side


def draw_decomposition(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_decomposition`, or why there is none."""
    numbers, found = decomposition_of(data, finals), tracks(data, finals)
    if not found:
        return NO_TRACKS
    if numbers.empty:
        return not_logged(found, PROBES) or "no run logged all the probes that the parts need"
    name, rows = f"{data.record.name}_decomposition", groups_of(numbers, "level", sort=False)
    names = {level: list(dict.fromkeys(own["arm"])) for level, own in rows}
    limits, cut = _limits(numbers)
    bars = (BARS if numbers["low"].notna().any() else BARS_OF_FEW) + (", cut at the edge" if cut else "")
    heading = f"{data.record.name}: where was what training gained lost on the way downstream?"
    heights = {level: len(arms) for level, arms in names.items()}
    height = 2.2 + 0.48 * sum(heights.values()) + 0.2 * len(heights)
    with drawing(name, heading, height, bars, _legend(), 1) as figure:
        panels = level_rows(figure, data, heights, 1, sharex=True)[:, 0]
        for (level, arms), axes in zip(names.items(), panels):
            own = numbers[numbers["level"] == level]
            _panel(axes, own, arms)
            runs = own.groupby("arm")["n"].first()
            counts = [(runs[arm], data.seeds_planned(level, arm), finals.collapsed(level, arm)) for arm in arms]
            labels = [f"{in_lines(arm, 24)}\n{seeds_text(*count)}" for arm, count in zip(arms, counts)]
            axes.set_yticks(range(len(arms)), labels)
        panels[-1].set(xlim=limits, xlabel="gained in training but not downstream since step 0 (pp)")
    return Drawn(name, figure, numbers, bars, caption=_caption(data, finals))


def _limits(numbers: pd.DataFrame) -> tuple[tuple[float, float], bool]:
    """The ends of the axis, and whether they cut an interval: those of few seeds would leave no room for the bars."""
    ends = numbers["start"] + numbers["value"]
    low, high = min(0.0, ends.min()), max(0.0, ends.max())
    room = _ROOM * (high - low)
    whole = (min(low, (numbers["start"] + numbers["low"]).min()), max(high, (numbers["start"] + numbers["high"]).max()))
    shown = (max(low - room, whole[0]), min(high + room, whole[1]))
    margin = 0.03 * (shown[1] - shown[0])
    return (shown[0] - margin, shown[1] + margin), shown != whole


def _panel(axes: Axes, numbers: pd.DataFrame, arms: Sequence[str]) -> None:
    """Arms down the axis, one apart; each has a lane for every part and one for the total."""
    rows_of_arms(axes, len(arms))
    lanes = {part: _LANE * (index - len(PARTS) / 2) for index, part in enumerate([*PARTS, TOTAL])}
    rows = numbers.assign(y=numbers["arm"].map(arms.index) + numbers["part"].map(lanes))
    parts, total = rows[rows["part"] != TOTAL], rows[rows["part"] == TOTAL]
    ends = parts["start"] + parts["value"]
    colours = parts["part"].map({part: colour for part, (colour, _) in PARTS.items()})
    axes.barh(parts["y"], parts["value"], _LANE, parts["start"], color=colours, linewidth=0)
    axes.vlines(ends, parts["y"], parts["y"] + _LANE, color=GREY, linewidth=0.7)  # where the next begins
    axes.plot(total["value"], total["y"], "D", color=BLACK, markersize=3.6, label=TOTAL, zorder=3)
    axes.hlines(rows["y"], rows["start"] + rows["low"], rows["start"] + rows["high"], color=BLACK, linewidth=0.9)


def _legend() -> list[Entry]:
    entries: list[Entry] = [(Patch(color=colour, linewidth=0), words) for colour, words in PARTS.values()]
    total = Line2D([], [], color=BLACK, marker="D", markersize=3.6, linewidth=0.9)
    return [*entries, (total, "total, the gap: training reward less downstream accuracy")]


def _caption(data: SweepData, finals: FinalValues) -> str:
    parts = [
        f"Every part is a change from step 0 to {finals.at}; to the right, the first gained more than the second. "
        "Training reward: share of all responses that were right, before any filter; its step 0 is the probe of step "
        f"0.{finals.over_bases}",
        collapse_note(data, finals),
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "decomposition",
    draw_decomposition,
    title="Decomposition of the gap",
    order=10,
    how_to_read=(
        "One bar per arm, percentage points: which training prompts were drawn, memorisation, protocol, and "
        "the shift to harder questions add up to the gap change."
    ),
)
