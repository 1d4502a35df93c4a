"""Measures of divergence: whether training reward and downstream accuracy part, when, and why.

E is downstream accuracy. Pc is the share of all training responses that are right, before any filter or mask. Both are
shares here, and percentage points in `table.divergence_table`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from grpo_lab.analysis.stats.intervals import CONFIDENCE
from grpo_lab.analysis.stats.mean_line import over_bases
from grpo_lab.analysis.tracks import Answers, Track, change, gap, on_grid
from grpo_lab.tracking.metrics import pass_at_k

RUN = 3  # evaluations in a row that make an onset
NOT_DETECTED, TOO_FEW = "not detected", "too few evaluations"
# What Pc - E consists of, from training to downstream: each term is the first less the second.
DECOMPOSITION = {
    "prompt_mix": ("reward", "probe"),
    "memorisation": ("probe", "heldout_training"),
    "protocol": ("heldout_training", "heldout"),
    "shift": ("heldout", "downstream"),
}


def gap_of_sampler(track: Track) -> np.ndarray:
    """The gap with E of the weights that sampled the responses of Pc, [K]; NaN where these were not evaluated.

    Where the sampler lags behind the learner, `gap` compares the reward of old weights with the accuracy of new ones.
    """
    return change(track.reward) - change(track.sampled)


def transfer_slope(reward: np.ndarray, downstream: np.ndarray) -> float:
    """Theil-Sen slope of E on Pc over one run's checkpoints, share per share.

    The median of the slopes of all pairs with different Pc; NaN with fewer than three distinct values of Pc. Noise in
    Pc flattens it: a slope of 0.5 is read as 0.42 to 0.48, where Pc rises by 0.4 with a noise of 0.04.
    """
    if len(np.unique(reward)) < 3:
        return math.nan
    first, second = np.triu_indices(len(reward), k=1)
    run, rise = reward[second] - reward[first], downstream[second] - downstream[first]
    return float(np.median(rise[run != 0] / run[run != 0]))


def transfer_slopes(track: Track) -> dict[str, float]:
    """The slope over the whole run (""), over the first half of the budget (_early) and over the second (_late)."""
    half = track.x[-1] / 2
    parts = {"": np.ones(len(track.x), bool), "_early": track.x <= half, "_late": track.x >= half}
    return {name: transfer_slope(track.reward[here], track.downstream[here]) for name, here in parts.items()}


@dataclass(frozen=True)
class Onset:
    """The budget `x` at which a rise began, or NaN and the reason in `note`.

    `low` and `high` are the range of the onsets found with all seeds and with each seed left out in turn; NaN for fewer
    than four seeds. That is no confidence interval. No onset is known better than the distance of two evaluations.
    """

    x: float
    low: float
    high: float
    n: int
    note: str


def sustained(values: np.ndarray, run: int = RUN) -> np.ndarray:
    """The first of `run` evaluations in a row, after step 0, at which the mean over seeds is significantly above 0.

    Significantly means that the one-sided 95% t interval over seeds lies above 0. `values` is [..., S, K]; returns the
    index of the evaluation, [...], and -1 for none.
    """
    seeds = values.shape[-2]
    error = values.std(axis=-2, ddof=1) / math.sqrt(seeds)
    sure = values.mean(axis=-2) - stats.t.ppf(CONFIDENCE, seeds - 1) * error > 0
    later = sure[..., 1:]
    number = later.shape[-1] - run + 1
    if number < 1:
        return np.full(sure.shape[:-1], -1)
    held = np.all([later[..., offset : offset + number] for offset in range(run)], axis=0)
    return np.where(held.any(axis=-1), held.argmax(axis=-1) + 1, -1)


def onset(x: np.ndarray, values: np.ndarray, run: int = RUN) -> Onset:
    """Onset: the budget x [K] from which `values` [S, K] are significantly above 0 for `run` evaluations in a row.

    False alarms, simulated for 5 seeds with 5, 10 and 40 evaluations after step 0 and noise of autocorrelation 0.5:
    0.5%, 1.4% and 5.8% where step 0 has no noise, 1.3%, 3.2% and 10% where it has as much as the others, 3.4%, 5.0%
    and 9.2% where it has 2.5 times as much, as with one batch for Pc_0. 3 seeds: 0.4% to 10%. With a run of a
    quarter of 40 evaluations, 10, they are 0%, 0.3% and 2.3%. From 4 seeds on, an onset must also be found when each
    seed is left out, but for one of them at most, which only lowers these rates.
    """
    seeds = len(values)
    if seeds < 3 or values.shape[1] - 1 < run:
        return Onset(math.nan, math.nan, math.nan, seeds, "too few seeds" if seeds < 3 else TOO_FEW)
    found = int(sustained(values, run))
    if found < 0:
        return Onset(math.nan, math.nan, math.nan, seeds, NOT_DETECTED)
    if seeds < 4:
        return Onset(float(x[found]), math.nan, math.nan, seeds, "")
    again = [int(sustained(np.delete(values, seed, axis=0), run)) for seed in range(seeds)]
    known = [index for index in again if index >= 0]
    if len(known) < seeds - 1:
        note = f"not stable: found in {len(known)} of {seeds} with a seed left out"
        return Onset(math.nan, math.nan, math.nan, seeds, note)
    first, last = min([found, *known]), max([found, *known])
    note = f"found in {len(known)} of {seeds} with a seed left out"
    return Onset(float(x[found]), float(x[first]), float(x[last]), seeds, note)


def onsets(runs: Sequence[Track]) -> dict[str, Onset]:
    """The onset of the gap ("onset"), and of the fall of downstream accuracy from its best ("onset_after_peak").

    Runs of one arm that lack a value are left out; empty where every run lacks one. Where runs are of several base
    models, a base counts as a seed does otherwise, with the mean of its runs. A peak is looked for at every evaluation,
    so with many evaluations the fall must last longer to keep false alarms at 5%.
    """
    whole = [track for track in runs if np.isfinite(gap(track)).all()]
    if not whole:
        return {}
    bases = [track.base for track in whole]
    grid, gaps = on_grid(whole, [gap(track) for track in whole])
    _, downstream = on_grid(whole, [track.downstream for track in whole])
    gaps, downstream = over_bases(gaps, bases), over_bases(downstream, bases)
    longer = max(RUN, (len(grid) - 1) // 4)
    return {"onset": onset(grid, gaps), "onset_after_peak": onset(grid, drop_after_peak(downstream), longer)}


def drop_after_peak(downstream: np.ndarray) -> np.ndarray:
    """[S, K]: E at the best checkpoint before, less E now; 0 at step 0.

    A seed's best checkpoint before is picked on the mean of the other seeds: the highest of its own noisy values
    is too high, so that `onset` would find a drop in 64% of flat curves with 10 evaluations and 5 seeds. With the
    others' peaks it finds one in 1.6%, 5.6% and, with a run of 10, 2.5% (5, 10 and 40 evaluations, as in `onset`).
    NaN for one seed, which has no others.
    """
    seeds, evaluations = downstream.shape
    if seeds < 2:
        return np.full(downstream.shape, math.nan)
    drops = np.zeros(downstream.shape)
    for seed in range(seeds):
        others = np.delete(downstream, seed, axis=0).mean(axis=0)
        for k in range(1, evaluations):
            drops[seed, k] = downstream[seed, np.argmax(others[:k])] - downstream[seed, k]
    return drops


def kl_frontier(kl: np.ndarray, gain: np.ndarray) -> tuple[float, float]:
    """a and b of gain = d (a - b ln d), d = sqrt(KL), by least squares over one run (arXiv:2210.10760).

    `gain` is E - E_0, `kl` nats per response; an estimate of KL below 0 counts as 0, where the curve is 0 whatever a
    and b. NaN with fewer than three checkpoints above it. The t interval of b over seeds covers 94% to 95% (3 seeds
    with 4 evaluations and 5 with 12, noise of 2 pp), and E_0's noise, which all checkpoints share, is in it.
    """
    distance = np.sqrt(np.maximum(kl, 0.0))
    here = (distance > 0) & (np.arange(len(distance)) > 0)  # at step 0 it is rounding
    if np.isnan([kl, gain]).any() or len(np.unique(distance[here])) < 3:
        return math.nan, math.nan
    d = distance[here]
    (a, b), *_ = np.linalg.lstsq(np.stack([d, -d * np.log(d)], axis=1), gain[here])
    return float(a), float(b)


def kl_peak(a: float, b: float, observed: float) -> tuple[float, float]:
    """Distance and gain at the top of the fitted curve, d = exp(a / b - 1) and b d, where the top was passed.

    NaN where the curve has no top (b <= 0) or has it beyond the largest distance `observed`.
    """
    if not b > 0 or a / b - 1 > math.log(observed):
        return math.nan, math.nan
    top = math.exp(a / b - 1)
    return top, b * top


def decomposition(track: Track) -> dict[str, np.ndarray]:
    """The gap in four parts, each a change from step 0, [K]: they add up to `gap`.

    prompt_mix (training responses less fixed training questions), memorisation (training less held-out questions),
    protocol (training less evaluation protocol and verifier), shift (held-out less downstream questions).
    """
    return {
        name: change(getattr(track, first)) - change(getattr(track, second))
        for name, (first, second) in DECOMPOSITION.items()
    }


def pass_chances(samples: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """`pass_at_k` for arrays of any shape: `correct` right answers in `samples`, each at least k."""
    pairs, place = np.unique(np.stack([samples.ravel(), correct.ravel()]), axis=1, return_inverse=True)
    chances = np.array([pass_at_k(int(number), int(right), k) for number, right in pairs.T])
    return chances[place.ravel()].reshape(samples.shape)


def coverage(answers: Answers) -> np.ndarray:
    """[S, n, Q]: the change of pass@k from the base model to the end of the run, for k from 1 to the n samples."""
    number = int(answers.samples.min())
    chances = [pass_chances(answers.samples, answers.correct, k) for k in range(1, number + 1)]
    evaluated = [answers.at_evaluations(chance) for chance in chances]  # n times [S, K, Q]
    return np.stack([chance[:, -1] - chance[:, 0] for chance in evaluated], axis=1)


def crossover(changes: np.ndarray) -> int | None:
    """The first k at which the run is no better than the base model, by the mean over seeds; None up to n.

    `changes` is [S, n]. Where the run is no better at k = 1 that is 1: it lost, it did not cross.
    """
    below = np.flatnonzero(changes.mean(axis=0) <= 0)
    return int(below[0]) + 1 if len(below) else None
