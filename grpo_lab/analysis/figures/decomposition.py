"""The parts of the gap between training reward and downstream accuracy, arm by arm.

Three probes lie between training responses and downstream answers, each one step further from training. The accuracy
that a step loses from step 0 to X is a part of the gap; the four parts add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from grpo_lab.analysis.divergence.measures import WATERFALL, gap, waterfall
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import NO_TRACKS, collapse_note, not_logged
from grpo_lab.analysis.figures.panels import level_label, rows_of_arms, seeds_text
from grpo_lab.analysis.figures.style import (
    BLACK,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    Drawn,
    Entry,
    house_style,
    in_lines,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tracks import Track, cells, mean_of_tracks, tracks

# Colour of each part, on which black lines show, and what it is: the change on the first less that on the second.
PARTS = {
    "prompt_mix": ("#A0A0A0", "prompt mix and filter: training responses less a fixed set of training questions"),
    "memorisation": (ORANGE, "memorisation: training questions less unseen questions of the same kind"),
    "protocol": (PURPLE, "protocol and verifier: sampled and graded as in training less as in evaluation"),
    "shift": (SKY, "distribution shift: unseen questions of the same kind less downstream questions"),
}
TOTAL = "total"
BARS = "bar: a part of the gap, mean over runs, from where the one above it ended; line: its 95% t interval"
BARS_OF_FEW = "bar: a part of the gap, mean over runs, too few for an interval, from where the one above it ended"
_LANE = 0.16  # of the distance of two arms, that a part takes
_NEEDED = tuple(dict.fromkeys(name for ends in WATERFALL.values() for name in ends))
_ROOM = 0.6  # of what the bars take, that intervals may take on either side


def decomposition_numbers(found: Mapping[tuple[str, str], Sequence[Track]]) -> pd.DataFrame:
    """Every number the figure shows, six decimals, percentage points.

    One row per arm and part, and one for their total, the gap: `value` is its change from step 0 to X, mean over n
    seeds with the t interval in low and high; its bar goes from `start` to `start + value`.
    """
    rows = []
    for (level, arm), cell in found.items():
        parts = [waterfall(track) for track in cell]
        sizes = {name: [100 * float(part[name][-1]) for part in parts] for name in WATERFALL}
        start = 0.0
        for name, values in (sizes | {TOTAL: [100 * float(gap(track)[-1]) for track in cell]}).items():
            mean = mean_of_tracks(cell, values)
            row = {"level": level, "arm": arm, "part": name, "start": 0.0 if name == TOTAL else start}
            rows.append(row | {"value": mean.mean, "low": mean.low, "high": mean.high, "n": mean.n})
            start += mean.mean
    names = ["level", "arm", "part", "start", "value", "low", "high", "n"]
    return pd.DataFrame(rows, columns=names).round(6)


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence; empty where it can."""
    found = tracks(data, finals)
    if not found:
        return NO_TRACKS
    if decomposed(data, finals):
        return ""
    return not_logged(found, _NEEDED) or "no run logged all the probes that the parts need"


def decomposed(data: SweepData, finals: FinalValues) -> dict[tuple[str, str], list[Track]]:
    """The runs of each (level, arm) that have every probe at step 0 and at X."""
    return cells(
        [
            track
            for track in tracks(data, finals)
            if not any(pd.isna(getattr(track, name)[[0, -1]]).any() for name in _NEEDED)
        ]
    )


def draw_decomposition(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_decomposition`; None, for the reason that `missing` gives, where a probe was not logged."""
    found = decomposed(data, finals)
    if not found:
        return None
    numbers = decomposition_numbers(found)
    name = f"{data.record.name}_decomposition"
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    rows = {level: [arm for at, arm in found if at == level] for level, _ in found}
    limits, cut = _limits(numbers)
    bars += ", cut at the edge" if cut else ""
    with house_style(name):
        heading = f"{data.record.name}: where was what training gained lost on the way downstream?"
        figure = new_figure(heading, 2.2 + 0.48 * sum(map(len, rows.values())) + 0.2 * len(rows))
        heights = [len(arms) for arms in rows.values()]
        panels = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for (level, arms), axes in zip(rows.items(), panels):
            _panel(axes, numbers[numbers["level"] == level], arms)
            axes.set_yticks(range(len(arms)), [_name(data, finals, level, arm, found) for arm in arms])
            axes.set_ylabel(level_label(data, level))
        panels[-1].set_xlim(limits)
        panels[-1].set_xlabel("gained in training but not downstream since step 0 (pp)")
        write_legend(figure, _legend(), 1)
        write_footer(figure, bars)
    return Drawn(name, figure, numbers, bars, caption=_caption(data, finals))


def _name(
    data: SweepData, finals: FinalValues, level: str, arm: str, found: Mapping[tuple[str, str], Sequence[Track]]
) -> str:
    seeds = seeds_text(len(found[level, arm]), data.seeds_planned(level, arm), finals.collapsed(level, arm))
    return f"{in_lines(arm, 24)}\n{seeds}"


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
    rows_of_arms(axes, [""] * len(arms))
    lanes = {part: _LANE * (index - len(PARTS) / 2) for index, part in enumerate([*PARTS, TOTAL])}
    for row in rows_of(numbers):
        y, end = arms.index(row.arm) + lanes[row.part], row.start + row.value
        if row.part == TOTAL:
            axes.plot(end, y, "D", color=BLACK, markersize=3.6, label=TOTAL, zorder=3)
        else:
            axes.barh(y, row.value, _LANE, row.start, color=PARTS[row.part][0], linewidth=0)
            axes.plot([end, end], [y, y + _LANE], color=GREY, linewidth=0.7)  # where the next begins
        axes.plot([row.start + row.low, row.start + row.high], [y, y], color=BLACK, linewidth=0.9)


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
    missing,
    title="Decomposition of the gap",
    how_to_read=(
        "One bar per arm, percentage points: which training prompts were drawn, memorisation, protocol, and "
        "the shift to harder questions add up to the gap change."
    ),
)
