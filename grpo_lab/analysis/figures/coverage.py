"""pass@k at the end of training beside the base model's, one panel per arm and level.

pass@k is the chance that one of k samples of a question is right, estimated without bias from n >= k samples of which c
are right: 1 - C(n - c, k) / C(n, k). Training may raise it at k = 1 and lower it at large k: the policy is then sure of
what the base model could do already, and has lost the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from grpo_lab.analysis.divergence.measures import coverage, crossover, pass_chances
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import NO_TRACKS, collapse_note
from grpo_lab.analysis.figures.small_multiples import (
    legend_height,
    panel_width,
    seeds_text,
    small_multiples,
    write_legend,
)
from grpo_lab.analysis.figures.style import BLACK, GREEN, GREY, SMALL, Drawn, house_style, wrapped
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import bounds
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tracks import Answers, answers_of, cells, tracks

SUITE = "downstream"
_LABELS = ("k, samples of a question (logarithmic)", "pass@k (% of questions)")
_PANEL = 1.4  # inches


@dataclass(frozen=True)
class Sampled:
    """The finished runs of one cell, and what they answered; every question has two samples or more."""

    seeds: Sequence[int]
    bases: Sequence[int]
    answers: Answers

    @property
    def samples(self) -> int:
        """How many samples every question has, at least."""
        return int(self.answers.samples.min())

    def passes(self) -> dict[str, np.ndarray]:
        """pass@k of the base model and of the end of the run, and the change, each [S, n, Q] for k from 1 to n."""
        answers, ks = self.answers, range(1, self.samples + 1)
        base = np.stack([pass_chances(answers.samples[:, 0], answers.correct[:, 0], k) for k in ks], axis=1)
        changes = coverage(answers)
        return {"base": base, "final": base + changes, "change": changes}


def sampled(data: SweepData, finals: FinalValues) -> dict[tuple[str, str], Sampled]:
    """What can be drawn, by (level, arm)."""
    found = {}
    for labels, cell in cells(tracks(data, finals)).items():
        answers = answers_of(data, cell, SUITE, ends=True)
        if answers is not None and answers.samples.min() > 1:
            found[labels] = Sampled([track.seed for track in cell], [track.base for track in cell], answers)
    return found


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence; empty where it can."""
    if sampled(data, finals):
        return ""
    by_cell = cells(tracks(data, finals))
    if not by_cell:
        return NO_TRACKS
    if all(answers_of(data, cell, SUITE) is None for cell in by_cell.values()):
        return f"the answers to the {SUITE} questions were not saved"
    return f"the {SUITE} questions were answered once each, and pass@k needs two samples or more"


def coverage_numbers(found: Mapping[tuple[str, str], Sampled]) -> pd.DataFrame:
    """Every number the figure shows, six decimals; pass@k in percent of questions, its change in percentage points.

    `series` is "base" (step 0), "final" (at X), "change" (final less base) or "crossover" (in k, the first number of
    samples for which the mean change is not above 0). `part` is "seed" or "mean", the latter with the t interval over
    the n seeds in low and high.
    """
    rows = []
    for (level, arm), cell in found.items():
        labels = {"level": level, "arm": arm}
        for series, values in cell.passes().items():
            for k, by_question in enumerate(100 * values.swapaxes(0, 1), start=1):  # [S, Q]
                named = labels | {"series": series, "k": k}
                of_seeds = by_question.mean(axis=-1).tolist()
                rows += [
                    named | {"part": "seed", "seed": seed, "value": one} for seed, one in zip(cell.seeds, of_seeds)
                ]
                mean = mean_of_runs(of_seeds, cell.bases)
                ends = {"value": mean.mean, "low": mean.low, "high": mean.high, "n": len(of_seeds)}
                rows.append(named | {"part": "mean"} | ends)
        crossing = crossover(coverage(cell.answers).mean(axis=-1))
        if crossing is not None:
            rows.append(labels | {"series": "crossover", "part": "mean", "k": crossing, "n": len(cell.seeds)})
    names = ["level", "arm", "series", "part", "k", "seed", "value", "low", "high", "n"]
    return pd.DataFrame(rows, columns=names).astype({"seed": "Int64", "n": "Int64"}).round(6)


def draw_coverage(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_coverage`; None, for the reason that `missing` gives, where questions have one sample."""
    found = sampled(data, finals)
    if not found:
        return None
    numbers = coverage_numbers(found)
    name = f"{data.record.name}_coverage"
    bands = _bands(numbers)
    heading = f"{data.record.name}: are questions lost that more samples of the untrained model would solve?"
    entries = _legend(bool((numbers["series"] == "crossover").any()))
    over, footer = _over(data, finals, numbers), _footer(data, found, finals, bands)
    with house_style(name):
        legend = legend_height(len(entries), len(entries))
        grid = small_multiples(data, list(found), heading, legend, over, _PANEL, _LABELS, footer)
        write_legend(grid.figure, heading, entries, len(entries))
        for level, arm in found:
            _panel(grid.panels[level, arm], numbers[(numbers["level"] == level) & (numbers["arm"] == arm)])
        drawn = numbers[numbers["series"].isin(["base", "final"]) & (numbers["part"] == "seed")]
        _axes(next(iter(grid.panels.values())), int(drawn["k"].max()), drawn["value"])
    return Drawn(name, grid.figure, numbers, bands)


def _panel(axes: Axes, numbers: pd.DataFrame) -> None:
    for series, colour, dashes, marker in (("base", GREY, "--", "o"), ("final", GREEN, "-", "s")):
        own = numbers[numbers["series"] == series]
        seeds = own[own["part"] == "seed"]
        for _, run in seeds.groupby("seed"):
            axes.plot(run["k"], run["value"], dashes, color=colour, linewidth=0.5, alpha=0.35)
        mean = own[own["part"] == "mean"]
        marked = [index for index, k in enumerate(mean["k"]) if k in _powers(int(mean["k"].max()))]
        style = {"color": colour, "linewidth": 1.6, "marker": marker, "markersize": 3.4, "label": series}
        axes.plot(mean["k"], mean["value"], dashes, markevery=marked, **style)
        axes.fill_between(mean["k"], mean["low"], mean["high"], color=colour, alpha=0.15, linewidth=0)
    for k in numbers.loc[numbers["series"] == "crossover", "k"]:
        axes.axvline(k, color=BLACK, linestyle=":", linewidth=1.2, label="crossover")


def _axes(axes: Axes, most: int, values: pd.Series) -> None:
    """Shared by all panels: powers of two along k, and the seeds' own range, which a band of few seeds would leave."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_powers(most)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlim(2**-0.15, most * 2**0.15)
    room = 0.06 * max(values.max() - values.min(), 1.0)
    axes.set_ylim(max(-1.0, values.min() - room), min(101.0, values.max() + room))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(int(math.log2(most)) + 1)]


def _legend(crossed: bool) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=GREEN, marker="s", markersize=3.6, linewidth=1.6), "end of training"),
        (
            Line2D([], [], color=GREY, linestyle="--", marker="o", markersize=3.6, linewidth=1.6),
            "untrained, step 0",
        ),
    ]
    if crossed:
        entries.append((Line2D([], [], color=BLACK, linestyle=":", linewidth=1.2), "crossover"))
    return entries


def _over(data: SweepData, finals: FinalValues, numbers: pd.DataFrame) -> dict[tuple[str, str], list[str]]:
    """The lines over each panel: seeds, the change for one sample and for the most, and the crossover."""
    inches = panel_width(list(dict.fromkeys(numbers["arm"])))
    over = {}
    for (level, arm), own in groups_of(numbers, ["level", "arm"], sort=False):
        means = own[(own["series"] == "change") & (own["part"] == "mean")]
        n, most = int(means["n"].iloc[0]), int(means["k"].max())
        seeds = seeds_text(n, data.seeds_planned(level, arm), finals.collapsed(level, arm))
        lines = [seeds]
        for row in (means.iloc[0], means.iloc[-1]):
            lines.append(f"pass@{row['k']} {row['value']:+.1f} pp")
            lines += filter(None, [bounds(row["low"], row["high"], "+.1f").strip()])
        crossed = own.loc[own["series"] == "crossover", "k"].tolist()
        words = "untrained no worse at k = 1" if crossed == [1] else f"crossover at k = {crossed[0]}" if crossed else ""
        lines.append(words or f"no crossover to k = {most}")
        over[str(level), str(arm)] = [part for line in lines for part in wrapped(line, inches, SMALL)]
    return over


def _bands(numbers: pd.DataFrame) -> str:
    means = numbers[numbers["part"] == "mean"]
    band = "; band: its 95% t interval" if means["low"].notna().any() else ""
    return f"bold: mean over runs{band}; thin: single seeds"


def _footer(data: SweepData, found: Mapping[tuple[str, str], Sampled], finals: FinalValues, bands: str) -> str:
    questions = " or ".join(str(number) for number in sorted({len(cell.answers.question) for cell in found.values()}))
    samples = " or ".join(str(number) for number in sorted({cell.samples for cell in found.values()}))
    parts = [
        f"{bands[0].upper()}{bands[1:]}.",
        "Over a panel: the change from step 0, paired by seed, with an interval of the same kind from three seeds on. "
        "Crossover: the fewest samples with which the untrained model is as good, by the mean over runs alone. "
        f"{questions} {SUITE} questions with {samples} samples each; training ends at {finals.at}.{finals.over_bases}",
        collapse_note(data, finals),
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "coverage",
    draw_coverage,
    missing,
    title="pass@k against the base model",
    how_to_read=(
        "Chance that one of k samples is right, in percent, before and after training. Above the base model "
        "at k = 1 and below it at large k is a policy that became sure of what the base could do already."
    ),
)
