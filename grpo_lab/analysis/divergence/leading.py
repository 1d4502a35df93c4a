"""Early-warning indicators of a loss of downstream accuracy: how well, how early, and how often in vain.

A loss is an evaluation at which downstream accuracy E is at least 10 points below its value at step 0. An indicator is
read at every evaluation after step 0, before the loss and before the last evaluation, as its change since the start in
the direction that is feared. A loss that is there already is not announced: where KL from the start is read at the end
of a run, it tells lost runs from others far better than before the loss.

A run that starts below 10 points cannot lose them, so it counts neither as a loss nor as a run without one. A run that
collapsed before X has no loss here, since it has no evaluation at X to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from grpo_lab.analysis.stats.collapse import Count
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, bounds
from grpo_lab.analysis.stats.resampling import percentile_interval
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tracks import Track

LEADING = "divergence/leading_"
LOSS = 0.1  # of downstream accuracy, share
QUANTILE = 0.95  # of the highest reading of one more null run: what lies above is an alarm
RESAMPLES = 2000
FEWEST_NULL = 3  # null runs of a level, from which it has a threshold of its own
EVERY = "*"  # in place of a level: all of them
FEWEST = 10  # runs with a loss, and without, from which the area has an interval


@dataclass(frozen=True)
class Indicator:
    """A field of `Track`, and the direction of its change that is feared: 1 for a rise, -1 for a fall."""

    field: str
    sign: int
    description: str


INDICATORS = {
    "kl": Indicator("kl", 1, "KL from the start rises"),
    "entropy": Indicator("entropy", -1, "entropy falls"),
    "truncation": Indicator("truncated", -1, "truncated share falls"),
    "ess": Indicator("ess", -1, "effective sample size falls"),
    "correctness": Indicator("reward", 1, "training correctness rises"),
    "shaped": Indicator("shaped", 1, "shaped reward rises"),
}


@dataclass(frozen=True)
class Share:
    """`number` of `n` with a Clopper-Pearson interval, which fewer than FOR_INTERVAL have none of; NaN for n = 0."""

    number: int
    n: int

    @property
    def interval(self) -> Interval:
        if self.n == 0:
            return Interval(math.nan, math.nan, math.nan, 0)
        share = self.number / self.n
        if self.n < FOR_INTERVAL:
            return Interval(share, math.nan, math.nan, self.n)
        return Interval(share, *Count(self.number, self.n).bounds, self.n)


@dataclass(frozen=True)
class Announced:
    """How one indicator announces losses.

    `auc` is over pairs of a run that loses later and one that does not, at the same level and read at the same step.
    `threshold` is in the indicator's unit, of its change in the feared direction: where levels have thresholds of their
    own, the lowest of them; NaN without null runs. `caught` counts runs with an alarm
    before their loss, `lead` holds for each of these the budget between alarm and loss, as a share of X. `false` counts
    null runs that alarm when the other null runs set the threshold. `note` says what is missing.
    """

    auc: Interval
    threshold: float
    caught: Share
    lead: tuple[float, ...]
    false: Share
    note: str


def lost_at(track: Track) -> int | None:
    """The first evaluation with a loss, as a place in the track; None for a run without one."""
    lost = np.flatnonzero(track.downstream[1:] <= track.downstream[0] - LOSS + 1e-9)
    return int(lost[0]) + 1 if len(lost) else None


def can_lose(track: Track) -> bool:
    """True if the run was evaluated throughout and began with as much accuracy as a loss takes."""
    return bool(np.isfinite(track.downstream).all() and track.downstream[0] >= LOSS)


def readings(track: Track, indicator: Indicator) -> np.ndarray:
    """[K]: the indicator's change since the start in the feared direction; NaN where it was not logged."""
    values = getattr(track, indicator.field)
    return indicator.sign * (values - values[0])


def announced(
    runs: Sequence[Track], null: Sequence[Track], indicator: Indicator, rng: np.random.Generator
) -> Announced:
    """How the indicator announces losses in `runs`; null runs with a loss set no threshold.

    The area's interval resamples whole runs, and is not reported below 10 runs with a later loss or 10 without.
    Simulated with 4 and 10 evaluations, 25% to 50% of runs lost and areas of 0.5 to 0.72, it covers 91% to 97% with 40,
    80 and 160 runs. Runs that share a base or a seed are not as independent as those.

    The threshold is the 95% prediction bound for the highest reading of one more null run, m + t sqrt(1 + 1/n) s from
    mean and standard deviation of the highest readings of n of them. So one null run in twenty alarms at any time, if
    highest readings are normal; the count of false alarms says whether they are. It takes three null runs. Where every
    level of `runs` has three of its own, each has a threshold of its own; otherwise there is one of all null runs.
    """
    runs, null = (
        [run for run in some if can_lose(run) and np.isfinite(readings(run, indicator)[1:]).all()]
        for some in (runs, null)
    )
    highest = _highest_of(runs, [run for run in null if lost_at(run) is None and len(run.x) > 2], indicator)
    nothing = Interval(math.nan, math.nan, math.nan, len(runs))
    if not any(len(run.x) > 2 for run in runs):
        few = "needs an evaluation between the first and the last one"
        why = few if runs else f"no run that could lose {100 * LOSS:g} points logged it"
        return Announced(nothing, math.nan, Share(0, 0), (), Share(0, 0), why)
    auc, note = _area(runs, indicator, rng)
    number = sum(len(own) for own in highest.values())
    if number < FEWEST_NULL:
        short = f"{number} null runs without a loss are too few for a threshold"
        return Announced(auc, math.nan, Share(0, 0), (), Share(0, 0), f"{note}; {short}")
    thresholds = {level: prediction_bound(own) for level, own in highest.items()}
    lead = []
    losers = [run for run in runs if (lost_at(run) or 0) > 1]
    for run in losers:
        lost = lost_at(run)
        threshold = thresholds.get(run.level, thresholds.get(EVERY, math.nan))
        alarms = np.flatnonzero(readings(run, indicator)[1:lost] > threshold)
        if len(alarms):
            lead.append(float((run.x[lost] - run.x[alarms[0] + 1]) / run.x[-1]))
    alarmed = sum(
        bool(own[place] > prediction_bound(np.delete(own, place)))
        for own in highest.values()
        for place in range(len(own))
    )
    lowest = min(thresholds.values())
    return Announced(auc, lowest, Share(len(lead), len(losers)), tuple(lead), Share(alarmed, number), note)


def _highest_of(runs: Sequence[Track], quiet: Sequence[Track], indicator: Indicator) -> dict[str, np.ndarray]:
    """The highest reading of every null run by level, or of all under EVERY where some level has too few of its own."""
    by_level: dict[str, list[float]] = {}
    for run in quiet:
        by_level.setdefault(run.level, []).append(float(readings(run, indicator)[1:-1].max()))
    if all(len(by_level.get(run.level, ())) >= FEWEST_NULL for run in runs):
        return {level: np.array(own) for level, own in by_level.items()}
    return {EVERY: np.array([value for own in by_level.values() for value in own])}


def prediction_bound(highest: np.ndarray) -> float:
    """The 95% bound for one more of these n values, m + t sqrt(1 + 1/n) s; it takes two of them."""
    n = len(highest)
    bound = stats.t.ppf(QUANTILE, n - 1) * math.sqrt(1 + 1 / n) * highest.std(ddof=1)
    return float(highest.mean() + bound)


def _area(runs: Sequence[Track], indicator: Indicator, rng: np.random.Generator) -> tuple[Interval, str]:
    """The area under the curve, from whole runs resampled; and why it or its interval is not there."""
    above, pairs = pair_counts(runs, indicator)
    known = [lost_at(run) for run in runs if len(run.x) > 2]
    staying = known.count(None)
    losing = sum(lost is not None and lost > 1 for lost in known)
    counted = f"{losing} runs with a later loss, {staying} without"
    if not pairs.any():
        return Interval(math.nan, math.nan, math.nan, len(runs)), f"no two runs at one level to compare: {counted}"
    estimate = float(above.sum() / pairs.sum())
    if min(losing, staying) < FEWEST:
        return Interval(estimate, math.nan, math.nan, len(runs)), f"{counted}: too few for an interval"
    drawn = rng.multinomial(len(runs), np.full(len(runs), 1 / len(runs)), size=RESAMPLES).astype(float)
    of_pairs = np.einsum("ri,ij,rj->r", drawn, pairs, drawn, optimize=True)
    replicates = np.einsum("ri,ij,rj->r", drawn, above, drawn, optimize=True)[of_pairs > 0] / of_pairs[of_pairs > 0]
    return percentile_interval(estimate, replicates, len(runs)), counted


def pair_counts(runs: Sequence[Track], indicator: Indicator) -> tuple[np.ndarray, np.ndarray]:
    """Pairs [R, R] of readings at the same level and step, of run i before its loss and of run j that has none.

    The first counts those in which i's reading is the higher one, ties by half, the second all.
    """
    points: dict[tuple[str, int], list[tuple[int, float, bool]]] = {}
    for place, run in enumerate(runs):
        lost, values = lost_at(run), readings(run, indicator)
        for k in range(1, lost or len(run.x) - 1):
            points.setdefault((run.level, int(run.step[k])), []).append((place, float(values[k]), lost is not None))
    above, pairs = np.zeros((2, len(runs), len(runs)))
    for at_step in points.values():
        place, value, loses = (np.array(part) for part in zip(*at_step))
        for i, own in zip(place[loses], value[loses]):
            others, theirs = place[~loses], value[~loses]
            pairs[i, others] += 1
            above[i, others] += (own > theirs) + 0.5 * (own == theirs)
    return above, pairs


def leading_text(divergence: pd.DataFrame, null: str) -> str:
    """The announcements in the table of `divergence_table`, one indicator a line; `null` names the null runs."""
    rows = {row.metric.removeprefix(LEADING): row for row in rows_of(divergence) if row.metric.startswith(LEADING)}
    lines = []
    for name, indicator in INDICATORS.items() if rows else ():
        area, caught, lead, false = (rows[f"{what}_{name}"] for what in ("auc", "caught", "time", "false"))
        if area.n == 0:
            continue
        known = Interval(area.value, area.low, area.high, area.n)
        text = area.note if math.isnan(area.value) else f"AUC {known.text()}"
        if caught.n:
            text += f"; alarm before {round(caught.value * caught.n)} of {caught.n} losses"
            text += "" if math.isnan(lead.value) else f", median lead {lead.value:.0%} of the budget"
        if false.n:
            ends = bounds(false.low, false.high, ".2f")
            text += f"; false alarms in {round(false.value * false.n)} of {false.n} null runs{ends}"
        lines.append(f"  {indicator.description}: {text}")
    if not lines:
        return ""
    head = [
        f"Early-warning indicators of a {100 * LOSS:g}-point drop of downstream accuracy since step 0",
        "  AUC: probability that a run with a later loss reads higher than a run without one, at the same step before",
        f"  the loss; 0.5 is chance, below 0.5 the opposite change predicts the loss. Null runs: {null}.",
    ]
    return "\n".join([*head, *lines]) + "\n"
