"""How much of an arm's reward gain its initial policy gets without learning, at a lower temperature.

Held-out questions, training protocol and training grader: R(H) is the accuracy of the initial policy at the
temperature at which its entropy is H nats per token, R_0 its accuracy at training's temperature, R_T and H_T accuracy
and entropy of the trained policy.

    sharpening share = (R(H_T) - R_0) / (R_T - R_0)

1 says that lowering the temperature of the initial policy gives as much reward as the training did; 0 that sharpness
gives none of it. R(H) is the line between the temperatures of `evaluation.sharpened`; nothing is extrapolated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.final_values import HELDOUT, FinalValues
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.stats.ratio import jackknife_ratio
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.tracking.metrics import SHARPENED

ENTROPY = "eval/heldout_training/entropy"


@dataclass(frozen=True)
class Sharpening:
    """The sharpening share of one arm at one level; `note` says why there is none, or no interval."""

    share: Interval
    sharpened: float  # mean of R(H_T) - R_0
    gained: float  # mean of R_T - R_0
    note: str = ""


def sharpening(data: SweepData, finals: FinalValues) -> dict[tuple[str, str], Sharpening]:
    """The sharpening share of every arm with finished runs, by level and arm."""
    gains = _all_gains(data, finals)
    return {condition: _share(list(by_seed.items()), finals.bases) for condition, by_seed in gains.items()}


def sharpening_of_level(data: SweepData, finals: FinalValues, level: str) -> Sharpening:
    """The sharpening share of all arms of a level together: the ratio of their mean gains over base models."""
    gains = {condition: by_seed for condition, by_seed in _all_gains(data, finals).items() if condition[0] == level}
    return _share([run for by_seed in gains.values() for run in by_seed.items()], finals.bases)


def _all_gains(data: SweepData, finals: FinalValues) -> dict[tuple[str, str], dict[int, tuple[float, float] | str]]:
    """(level, arm) -> seed -> the gains of `_gains`."""
    points = data.counted_points
    starts = points[points["step"] == 0]
    return {
        (level, arm): {
            int(seed): _gains(start.iloc[0], finals, (level, arm), int(seed))
            for (_, _, seed), start in groups_of(starts[(starts["level"] == level) & (starts["arm"] == arm)], LABELS)
        }
        for level, arm in data.run_arms
    }


def _gains(start: pd.Series, finals: FinalValues, condition: tuple[str, str], seed: int) -> tuple[float, float] | str:
    """R(H_T) - R_0 and R_T - R_0 of one run, or why they are unknown."""
    temperatures = [name for name in start.index if re.fullmatch(rf"eval/{SHARPENED}\d+/entropy", str(name))]
    temperatures = [name for name in temperatures if pd.notna(start[name])]
    if not temperatures:
        return "the initial policy was not sampled at lower temperatures (evaluation.sharpened)"
    curve = {float(start[ENTROPY]): float(start[HELDOUT])}
    curve |= {float(start[name]): float(start[f"{name.rpartition('/')[0]}/accuracy"]) for name in temperatures}
    entropy, accuracy = (finals.of(*condition, metric).get(seed, math.nan) for metric in (ENTROPY, HELDOUT))
    if math.isnan(entropy) or math.isnan(accuracy):
        return "the run has no evaluation at the common budget"
    return gains_of_curve(curve, float(start[HELDOUT]), entropy, accuracy)


def gains_of_curve(
    curve: Mapping[float, float], before: float, entropy: float, accuracy: float
) -> tuple[float, float] | str:
    """R(H_T) - R_0 and R_T - R_0 from R(H) as entropy -> accuracy, R_0, H_T and R_T; or why H_T is not on the curve."""
    if not min(curve) <= entropy <= max(curve):
        side = "above" if entropy > max(curve) else "below"
        return f"the entropy ends {side} that of the initial policy at every temperature that was tried"
    at = sorted(curve)
    return float(np.interp(entropy, at, [curve[one] for one in at])) - before, accuracy - before


def _share(gains: Sequence[tuple[int, tuple[float, float] | str]], bases: Mapping[int, int]) -> Sharpening:
    """The ratio of mean gains, with the jackknife over base models (over seeds, in a sweep of one base model).

    `gains` holds seed and gains of every run. Runs of one base model, also of several arms, are one observation.
    """
    known = [(seed, pair) for seed, pair in gains if not isinstance(pair, str)]
    notes = list(dict.fromkeys(pair for _, pair in gains if isinstance(pair, str)))
    lacking = f"{len(gains) - len(known)} of {len(gains)} runs: {'; '.join(notes)}" if notes else ""
    if not known:
        none = Interval(math.nan, math.nan, math.nan, 0)
        return Sharpening(none, math.nan, math.nan, "; ".join(notes) or "no finished run")
    several = len(set(bases.values())) > 1
    units = pd.Series([bases[seed] if several else seed for seed, _ in known])
    pairs = pd.DataFrame([pair for _, pair in known]).groupby(units).mean().to_numpy()
    n, (sharpened, gained) = len(pairs), map(float, pairs.mean(axis=0))
    if not gained > (2 * pairs[:, 1].std(ddof=1) / math.sqrt(n) if n > 1 else 0.0):
        none = Interval(math.nan, math.nan, math.nan, len(known), n if several else 0)
        return Sharpening(none, sharpened, gained, "the reward gain is less than twice its standard error")
    share = replace(jackknife_ratio(pairs), n=len(known), bases=n if several else 0)
    return Sharpening(share, sharpened, gained, lacking)


def sharpening_text(data: SweepData, finals: FinalValues) -> str:
    """The share of every arm's reward gain that the initial policy reaches at a lower temperature."""
    found = sharpening(data, finals)
    known = [one for one in found.values() if not math.isnan(one.share.mean)]
    if not known:
        notes: Sequence[str] = list(dict.fromkeys(one.note for one in found.values()))
        return f"Sharpening share of the reward gain: not available, {'; '.join(notes)}.\n" if notes else ""
    lines = [
        "How much of the reward gain does a lower temperature of the initial policy give? (sharpening share)",
        "  Held-out questions, training protocol; 1 means all of it, 0 none.",
    ]
    for condition, one in found.items():
        ends = "" if math.isnan(one.share.mean) else f"{one.share.text()}, {one.sharpened:+.3f} of {one.gained:+.3f}"
        note = one.note if math.isnan(one.share.mean) else f" ({one.note})" if one.note else ""
        lines.append(f"  {place(data, *condition)}: {ends}{note}")
    return "\n".join(lines) + "\n"
