"""The parts of the gap between training reward and downstream accuracy, arm by arm.

Three probes lie between training responses and downstream answers, each one step further from training. The accuracy
that a step loses from step 0 to X is a part of the gap; the four parts add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.divergence.measures import WATERFALL, gap, waterfall
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import NO_TRACKS, collapse_note, not_logged
from grpo_lab.analysis.figures.small_multiples import WIDTH, legend_height, name_lines, seeds_text, write_legend
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
    text_width,
    wrapped,
    write_footer,
    write_heading,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tracks import Track, cells, mean_of_tracks, tracks

# Colour of each part, on which black lines show, and what it is: the change on the first less that on the second.
PARTS = {
    "prompt_mix": ("#A0A0A0", "prompt mix and filter: training responses less a fixed set of training questions"),
    "memorisation": ("#E69F00", "memorisation: training questions less unseen questions of the same kind"),
    "protocol": ("#CC79A7", "protocol and verifier: sampled and graded as in training less as in evaluation"),
    "shift": ("#56B4E9", "distribution shift: unseen questions of the same kind less downstream questions"),
}
TOTAL = "total"
BARS = "bar: a part of the gap, mean over runs, from where the one above it ended; line: its 95% t interval"
BARS_OF_FEW = "bar: a part of the gap, mean over runs, too few for an interval, from where the one above it ended"
_LANE, _APART, _BETWEEN, _RIGHT = 0.075, 0.1, 0.22, 0.15  # inches: a part, two arms, two levels, the margin
_NEEDED = tuple(dict.fromkeys(name for ends in WATERFALL.values() for name in ends))
_ROOM = 0.6  # of what the bars take, that intervals may take on either side
_NAME = 1.7  # inches, of a line of a name


def waterfall_numbers(found: Mapping[tuple[str, str], Sequence[Track]]) -> pd.DataFrame:
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


def draw_waterfall(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_waterfall`; None, for the reason that `missing` gives, where a probe was not logged."""
    found = decomposed(data, finals)
    if not found:
        return None
    numbers = waterfall_numbers(found)
    name = f"{data.record.name}_waterfall"
    heading = f"{data.record.name}: where was what training gained lost on the way downstream?"
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    rows = {level: [arm for at, arm in found if at == level] for level, _ in found}
    most = max(map(len, rows.values()))
    factor = data.design.factor if data.design else ""
    # In inches, from the top: heading, legend, a panel for every level, ticks, label and footer.
    names = _names(data, finals, found)
    longest = max((line for lines in names.values() for line in lines), key=len)
    left = 0.25 + text_width(longest, BODY) + (0.35 if factor else 0.0)
    row = max((len(PARTS) + 1) * _LANE + _APART, max(map(len, names.values())) * SMALL * LINE + 0.04)
    limits, cut = _limits(numbers)
    footer = wrapped(_footer(data, finals, f"{bars}{', cut at the edge' if cut else ''}"), WIDTH - 0.2, TINY)
    legend = _legend()
    legend_at = heading_height(heading, WIDTH)
    top = legend_at + legend_height(len(legend), 1) + 0.05
    bottom = 0.55 + len(footer) * TINY * LINE
    panel = most * row
    height = top + bottom + panel * len(rows) + _BETWEEN * (len(rows) - 1)
    with house_style(name):
        figure = Figure(figsize=(WIDTH, height))
        write_heading(figure, heading)
        write_legend(figure, heading, legend, 1)
        place = {"left": left / WIDTH, "right": 1 - _RIGHT / WIDTH, "top": 1 - top / height, "bottom": bottom / height}
        panels = figure.subplots(
            len(rows), 1, sharex=True, squeeze=False, gridspec_kw=place | {"hspace": _BETWEEN / panel}
        )
        for (level, arms), axes in zip(rows.items(), panels[:, 0]):
            here = numbers[numbers["level"] == level]
            _panel(axes, here, arms, most, _LANE / row)
            axes.set_yticks(range(len(arms)), ["\n".join(names[level, arm]) for arm in arms])
            if factor:
                axes.set_ylabel(f"{factor}\n{level}")
        panels[-1, 0].set_xlim(limits)
        panels[-1, 0].set_xlabel("gained in training but not downstream since step 0 (pp)")
        write_footer(figure, footer)
    return Drawn(name, figure, numbers, bars)


def _names(
    data: SweepData, finals: FinalValues, found: Mapping[tuple[str, str], Sequence[Track]]
) -> dict[tuple[str, str], list[str]]:
    """Each arm's name and its seeds, in the lines in which they stand beside its bars."""
    names = {}
    for (level, arm), cell in found.items():
        seeds = seeds_text(len(cell), data.seeds_planned(level, arm), finals.collapsed(level, arm))
        names[level, arm] = [*name_lines(arm, _NAME, SMALL), *wrapped(seeds, _NAME, SMALL)]
    return names


def _limits(numbers: pd.DataFrame) -> tuple[tuple[float, float], bool]:
    """The ends of the axis, and whether they cut an interval: those of few seeds would leave no room for the bars."""
    ends = numbers["start"] + numbers["value"]
    low, high = min(0.0, ends.min()), max(0.0, ends.max())
    room = _ROOM * (high - low)
    whole = (min(low, (numbers["start"] + numbers["low"]).min()), max(high, (numbers["start"] + numbers["high"]).max()))
    shown = (max(low - room, whole[0]), min(high + room, whole[1]))
    margin = 0.03 * (shown[1] - shown[0])
    return (shown[0] - margin, shown[1] + margin), shown != whole


def _panel(axes: Axes, numbers: pd.DataFrame, arms: Sequence[str], most: int, lane: float) -> None:
    """Arms down the axis, one apart; each has a lane for every part and one for the total."""
    axes.axvline(0, color=GREY, linewidth=1.0)
    lanes = {part: (index - len(PARTS) / 2) * lane for index, part in enumerate([*PARTS, TOTAL])}
    for row in rows_of(numbers):
        y = arms.index(row.arm) + lanes[row.part]
        end = row.start + row.value
        if row.part == TOTAL:
            axes.plot(end, y, "D", color=BLACK, markersize=3.6, label=TOTAL, zorder=3)
        else:
            axes.barh(y, row.value, lane, row.start, color=PARTS[row.part][0], linewidth=0)
            axes.plot([end, end], [y, y + lane], color=GREY, linewidth=0.7)  # where the next begins
        axes.plot([row.start + row.low, row.start + row.high], [y, y], color=BLACK, linewidth=0.9)
    for edge in range(1, len(arms)):
        axes.axhline(edge - 0.5, color="#E4E4E4", linewidth=0.5)
    axes.set_ylim(most - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    axes.grid(axis="y", visible=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend() -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [(Patch(color=colour, linewidth=0), words) for colour, words in PARTS.values()]
    total = Line2D([], [], color=BLACK, marker="D", markersize=3.6, linewidth=0.9)
    return [*entries, (total, "total, the gap: training reward less downstream accuracy")]


def _footer(data: SweepData, finals: FinalValues, bars: str) -> str:
    parts = [
        f"{bars[0].upper()}{bars[1:]}. Every part is a change from step 0 to {finals.at}; to the right, "
        "the first gained more than the second. Training reward: share of all responses that were right, before any "
        f"filter; its step 0 is the probe of step 0.{finals.over_bases}",
        collapse_note(data, finals),
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "waterfall",
    draw_waterfall,
    missing,
    title="What the gap consists of",
    how_to_read=(
        "One bar per arm, percentage points: which training prompts were drawn, memorisation, protocol, and "
        "the shift to harder questions add up to the gap change."
    ),
)
