"""Gain over the distance from the initial policy, one panel per arm and level.

Distance is d = sqrt(KL), KL in nats per response; the gain of every run is fitted by d (a - b ln d) (arXiv:2210.10760).
Where b is above 0, each further step of distance gains less, and beyond d* = exp(a / b - 1) accuracy falls. The curve
ends with the largest observed distance. Below the first evaluation it is drawn thin, and a top there is not marked,
since no number supports its form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from grpo_lab.analysis.divergence.measures import change, kl_frontier, kl_peak
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import NO_TRACKS, collapse_note, not_logged
from grpo_lab.analysis.figures.small_multiples import (
    legend_height,
    panel_width,
    seeds_text,
    small_multiples,
    write_legend,
)
from grpo_lab.analysis.figures.style import BLACK, GREEN, GREY, SMALL, VERMILLION, Drawn, house_style, wrapped
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, bounds
from grpo_lab.analysis.table_rows import row_at, rows_of
from grpo_lab.analysis.tracks import Track, cells, mean_of_tracks, tracks

LEAD, GRID = 9, 21  # points of a fitted curve, before the first evaluation and after it
_NEEDED = ("kl", "downstream", "reward")
_LABELS = ("distance from the initial policy, sqrt(KL) (sqrt(nat) per response)", "change from step 0 (pp)")
_PANEL = 1.4  # inches
NOT_SEEN = "no over-optimisation seen"
LOSES = "loses where evaluated"
_COLOURS = {"downstream": (GREEN, "-", "s"), "reward": (VERMILLION, "--", "o")}


def frontier_numbers(found: Mapping[tuple[str, str], Sequence[Track]]) -> pd.DataFrame:
    """Every number the figure shows, six decimals; x is d in sqrt(nat), gains are in percentage points.

    `series` is "downstream" (E - E_0) or "reward" (Pc - Pc_0). `part` is "seed" (one evaluation of one run), "curve"
    (the mean over seeds of their fitted curves, with its t interval, where every seed was observed), "lead" (the same
    below the first evaluation of some seed), "a" and "b" (of the fits, pp per sqrt(nat)), or "top" (x and value of
    the fitted top, x_low and x_high its interval), which is there where every seed has its own among its evaluations.
    """
    rows = []
    for (level, arm), cell in found.items():
        for series in _COLOURS:
            named = {"level": level, "arm": arm, "series": series}
            gains = [100 * change(getattr(track, series)) for track in cell]
            for track, gain in zip(cell, gains):
                at = zip(_distance(track)[1:], gain[1:])  # at step 0 both are 0
                rows += [named | {"part": "seed", "seed": track.seed, "x": x, "value": y} for x, y in at]
            rows += [named | row for row in _fitted(cell, gains)]
    names = ["level", "arm", "series", "part", "seed", "x", "x_low", "x_high", "value", "low", "high", "n"]
    return pd.DataFrame(rows, columns=names).astype({"seed": "Int64", "n": "Int64"}).round(6)


def _distance(track: Track) -> np.ndarray:
    """[K]: sqrt(KL); an estimate of KL below 0 counts as 0."""
    return np.sqrt(np.maximum(track.kl, 0.0))


def _fitted(cell: Sequence[Track], gains: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
    """The rows of the fits of one series, those runs left out that have too few evaluations."""
    fits = [(track, *kl_frontier(track.kl, gain)) for track, gain in zip(cell, gains)]
    fits = [fit for fit in fits if not math.isnan(fit[1])]
    if not fits:
        return
    a, b = (np.array(values) for values in list(zip(*fits))[1:])
    fitted = [track for track, _, _ in fits]
    seen = [_distance(track)[1:] for track, _, _ in fits]
    first, last = max(float(d.min()) for d in seen), min(float(d.max()) for d in seen)
    grids = {"lead": np.linspace(0.0, min(first, last), LEAD), "curve": np.linspace(first, max(first, last), GRID)}
    for part, grid in grids.items():
        for d in grid:
            height = d * (a - b * math.log(d)) if d > 0 else 0.0 * a
            yield {"part": part, "x": float(d)} | _columns(mean_of_tracks(fitted, height.tolist()))
    for name, values in (("a", a), ("b", b)):
        yield {"part": name} | _columns(mean_of_tracks(fitted, values.tolist()))
    tops = [kl_peak(float(x), float(y), float(d.max())) for x, y, d in zip(a, b, seen)]
    if len(tops) == len(cell) and all(d.min() <= top <= d.max() for (top, _), d in zip(tops, seen)):
        x, gain = (mean_of_tracks(fitted, values) for values in zip(*tops))
        yield {"part": "top", "x": x.mean, "x_low": x.low, "x_high": x.high} | _columns(gain)


def _columns(interval: Interval) -> dict[str, float | int]:
    return {"value": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence; empty where it can."""
    found = tracks(data, finals)
    if not found:
        return NO_TRACKS
    if measured(data, finals):
        return ""
    return not_logged(found, _NEEDED) or "no run was evaluated after step 0 with all it needs"


def measured(data: SweepData, finals: FinalValues) -> dict[tuple[str, str], list[Track]]:
    """The runs of each cell that logged everything the figure needs."""
    found = [
        track
        for track in tracks(data, finals)
        if len(track.x) > 1 and not any(np.isnan(getattr(track, name)).any() for name in _NEEDED)
    ]
    return cells(found)


def draw_frontier(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_frontier`; None, for the reason that `missing` gives, where KL was not logged."""
    found = measured(data, finals)
    if not found:
        return None
    numbers = frontier_numbers(found)
    name = f"{data.record.name}_frontier"
    single = max(map(len, found.values())) < FOR_INTERVAL
    bands = "marks: evaluations of single seeds; line: mean of the seeds' own fitted curves, too few for an interval"
    if not single:
        bands = (
            "marks: evaluations of single seeds; line: mean of the seeds' own fitted curves; band: its 95% t interval"
        )
    heading = f"{data.record.name}: what does distance from the initial policy buy?"
    entries = _legend(bool(((numbers["part"] == "top") & (numbers["series"] == "downstream")).any()))
    by_cell = {cell: numbers[(numbers["level"] == cell[0]) & (numbers["arm"] == cell[1])] for cell in found}
    inches = panel_width(list(dict.fromkeys(numbers["arm"])))
    over = {
        cell: [part for line in _lines(data, finals, own, *cell) for part in wrapped(line, inches + 0.1, SMALL)]
        for cell, own in by_cell.items()
    }
    footer = _footer(data, finals, bands, single)
    with house_style(name):
        legend = legend_height(len(entries), len(entries))
        grid = small_multiples(data, list(found), heading, legend, over, _PANEL, _LABELS, footer)
        write_legend(grid.figure, heading, entries, len(entries))
        for cell, own in by_cell.items():
            _panel(grid.panels[cell], own)
        seen = numbers[numbers["part"] == "seed"]
        axes = next(iter(grid.panels.values()))
        axes.set_xlim(0, 1.04 * seen["x"].max())
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        room = 0.06 * (max(seen["value"].max(), 0.0) - min(seen["value"].min(), 0.0))
        axes.set_ylim(min(seen["value"].min(), 0.0) - room, max(seen["value"].max(), 0.0) + room)
    return Drawn(name, grid.figure, numbers, bands)


def _panel(axes: Axes, numbers: pd.DataFrame) -> None:
    axes.axhline(0, color=GREY, linewidth=0.8)
    for series, (colour, dashes, marker) in reversed(_COLOURS.items()):
        own = numbers[numbers["series"] == series]
        seeds, lead, curve = (own[own["part"] == part] for part in ("seed", "lead", "curve"))
        look = {"color": colour, "markersize": 2.6, "markeredgewidth": 0, "alpha": 0.45, "linestyle": ""}
        axes.plot(seeds["x"], seeds["value"], marker=marker, label=f"{series} of seeds", **look)
        axes.plot(lead["x"], lead["value"], dashes, color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(curve["x"], curve["value"], dashes, color=colour, linewidth=1.8, label=series)
        if curve["low"].notna().any():
            axes.fill_between(curve["x"], curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
    for top in rows_of(numbers[(numbers["series"] == "downstream") & (numbers["part"] == "top")]):
        axes.plot(top.x, top.value, "*", color=BLACK, markersize=7.0, label="top")
        if not math.isnan(top.x_low):
            axes.plot([top.x_low, top.x_high], [top.value] * 2, color=BLACK, linewidth=1.0)


def _lines(data: SweepData, finals: FinalValues, numbers: pd.DataFrame, level: str, arm: str) -> list[str]:
    """What stands over a panel: seeds, a, b, and whether the gain turned."""
    own = numbers[numbers["series"] == "downstream"].set_index("part")
    n = int(own.loc[["seed"], "seed"].nunique())
    lines = [seeds_text(n, data.seeds_planned(level, arm), finals.collapsed(level, arm))]
    if "a" not in own.index:
        return [*lines, "too few evaluations to fit"]
    for name in ("a", "b"):
        row = row_at(own, name)
        digits = "+.0f" if np.nanmax(np.abs(row[["value", "low", "high"]].astype(float))) >= 100 else "+.1f"
        ends = bounds(row["low"], row["high"], digits)
        lines.append(f"{name} = {row['value']:{digits}}{ends}" + (f" (n = {row['n']})" if row["n"] != n else ""))
    if (own.loc[["curve"], "high"] < 0).all():
        return [*lines, LOSES]
    b = row_at(own, "b")
    if b["n"] >= FOR_INTERVAL and not b["low"] > 0:
        return [*lines, NOT_SEEN]
    if "top" not in own.index:
        return [*lines, _where_top(own)]
    top = row_at(own, "top")
    return [*lines, f"d* = {top['x']:.2f}{bounds(top['x_low'], top['x_high'], '.2f')}"]


def _where_top(own: pd.DataFrame) -> str:
    """Why no top is marked, from the mean fit."""
    a, b, seen = row_at(own, "a")["value"], row_at(own, "b")["value"], own.loc[["curve"], "x"]
    if not b > 0:
        return "the fit has no top"
    top = math.exp(min(a / b - 1, 99.0))
    if seen.min() <= top <= seen.max():
        return "a top in some runs only"
    return f"top {'before' if top < seen.min() else 'beyond'} evaluations"


def _legend(top: bool) -> list[tuple[Artist, str]]:
    titles = {"downstream": "downstream accuracy, E - E₀", "reward": "training reward, Pc - Pc₀"}
    entries: list[tuple[Artist, str]] = []
    for series, (colour, dashes, marker) in _COLOURS.items():
        look = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 3.6, "linewidth": 1.8}
        entries.append((Line2D([], [], **look), titles[series]))
    if top:
        entries.append((Line2D([], [], color=BLACK, marker="*", linestyle="", markersize=7), "top of the fit, d*"))
    return entries


def _footer(data: SweepData, finals: FinalValues, bands: str, single: bool) -> str:
    parts = [
        f"{bands[0].upper()}{bands[1:]}.",
        "Pc: share of all training responses that were right, before any filter. "
        "Fitted: gain = d (a - b ln d), d = sqrt(KL), for each run by itself; thin before the first evaluation; "
        f"a and b in pp per sqrt(nat) of the downstream gain{'' if single else ', with 95% t intervals'}.",
        ""
        if single
        else f'"{NOT_SEEN}": the interval of b reaches 0, which does not rule it out. '
        f'"{LOSES}": the band of the downstream curve lies below 0.',
        f"Evaluations up to {finals.at}.{finals.over_bases}",
        collapse_note(data, finals),
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "frontier",
    draw_frontier,
    missing,
    title="Gain over the distance from the initial policy",
    how_to_read=(
        "x is the square root of the KL divergence (nats per response), y the gain in percentage points. "
        "Beyond the top of the fitted curve, going further costs."
    ),
)
