"""The profile of a world: where runs begin, how long they learn, how far they differ, and what tricks can act on there.

Two sweeps measure it: `card` runs the plain recipe on every base, `card_updates` short runs of other updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from interval_coverage.detectable import smallest_effect

from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.components import components
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.config.catalogue import with_tables
from grpo_lab.tracking.checksums import read_json
from grpo_lab.tracking.metrics import CLIP_FRACTION

ROOT = Path(__file__).parents[2]
SAVED, PAGE = ROOT / "analysis" / "data" / "worlds", ROOT / "conf" / "world" / "README.md"
GAIN = 0.9  # of what a run gains; the profile says after how many steps it is reached
SMOOTHING = 5  # steps of the running mean in which that step is looked for
FIRST = 3  # steps: the base's own answers, before training changed them much
DESIGNS = ((4, 2), (4, 4))  # bases and seeds of each, for 8 and 16 runs
HELDOUT, DOWNSTREAM = "eval/heldout/accuracy", "eval/downstream/accuracy"
TRAINING = "eval/heldout_training/accuracy"


@dataclass(frozen=True)
class Fit:
    """How the training problems of a world fit into its budget, both in tokens of right steps without a detour."""

    budget: int
    share: float  # of the problems whose steps fit
    needed_95: float  # the 95th percentile of what problems need


def measure_profile(name: str, runs: SweepData, updates: SweepData, fit: Fit) -> dict[str, Any]:
    """The profile as plain values: rows of quantity and text, in the order in which they are read.

    Intervals are 95% t intervals over bases, of the means of a base's runs. Raises ValueError where a run is missing.
    """
    for data in (runs, updates):
        if len(data.finished) < len(data.runs) or data.runs.empty:
            raise ValueError(f"{data.record.name} has unfinished runs: give the same command again")
    rows = [*_learning(runs), *_signal(runs), *_lengths(runs, fit), *_clipped(updates), *_noise(runs)]
    return {"world": name, "bases": int(runs.runs["base"].nunique()), "runs": len(runs.runs), "rows": rows}


def _over_bases(data: SweepData, value: Callable[[pd.DataFrame], float], arm: str | None = None) -> Interval:
    """The mean over bases of what `value` says of a run's points, with its t interval."""
    numbers: dict[int, list[float]] = {}
    bases = data.runs.set_index(LABELS)["base"]
    for labels, points in groups_of(data.finished_points, LABELS, sort=False):
        if arm is None or labels[1] == arm:
            numbers.setdefault(int(bases[labels]), []).append(value(points.sort_values("step")))
    return t_interval([float(np.mean(own)) for own in numbers.values()])


def _end(metric: str) -> Callable[[pd.DataFrame], float]:
    return lambda points: float(points[metric].dropna().iloc[-1])


def _start(metric: str) -> Callable[[pd.DataFrame], float]:
    return lambda points: float(points[metric].dropna().iloc[0])


def _learning(data: SweepData) -> list[tuple[str, str]]:
    rows = []
    for metric, words in (
        (TRAINING, "held-out, training protocol"),
        (HELDOUT, "held-out"),
        (DOWNSTREAM, "downstream"),
    ):
        first, last = (_over_bases(data, read(metric)).within(0.0, 1.0) for read in (_start, _end))
        rows += [(f"{words}, step 0", first.text()), (f"{words}, last step", last.text())]
    headroom = _over_bases(data, lambda points: 1 - _start(HELDOUT)(points))
    steps = _over_bases(data, _steps_to_gain)
    last = int(data.finished_points["step"].max())
    rows += [("headroom, held-out", headroom.text()), (f"steps to {GAIN:.0%} of the gain, of {last}", _whole(steps))]
    return rows


def _steps_to_gain(points: pd.DataFrame) -> float:
    """The first step whose running mean of the training outcome has GAIN of what the run gains."""
    correctness = points.loc[points["step"] > 0, "reward/outcome"]
    smooth = correctness.rolling(SMOOTHING, center=True, min_periods=SMOOTHING).mean().dropna().to_numpy()
    goal = smooth[0] + GAIN * (smooth[-1] - smooth[0])
    return float(np.argmax(smooth >= goal)) + 1 + SMOOTHING // 2


def _whole(interval: Interval) -> str:
    return interval.written("{:.0f}".format)


def _signal(data: SweepData) -> list[tuple[str, str]]:
    rows = []
    for metric, words in (("rollout/frac_zero_std", "groups without signal"), ("train/entropy", "entropy, nats")):
        for share, when in ((0.0, "first"), (0.5, "middle"), (1.0, "last")):
            part = _over_bases(data, lambda points, metric=metric, share=share: _around(points, metric, share))
            most = 1.0 if metric == "rollout/frac_zero_std" else math.inf
            rows.append((f"{words}, {when} {SMOOTHING} steps", part.within(0.0, most).text()))
    return rows


def _around(points: pd.DataFrame, metric: str, share: float) -> float:
    """The mean of SMOOTHING steps at a share of the run."""
    values = points.loc[points["step"] > 0, metric].to_numpy(float)
    first = round(share * (len(values) - SMOOTHING))
    return float(np.nanmean(values[first : first + SMOOTHING]))


def _lengths(data: SweepData, fit: Fit) -> list[tuple[str, str]]:
    def early(metric: str) -> Interval:
        return _over_bases(data, lambda points: float(points.loc[points["step"] > 0, metric].head(FIRST).mean()))

    return [
        ("budget, tokens", str(fit.budget)),
        ("problems that fit into it", f"{fit.share:.3f}"),
        ("tokens that 95% of the problems need", f"{fit.needed_95:.0f}"),
        ("responses truncated, first steps", early("rollout/truncated").within(0.0, 1.0).text()),
        ("sd of length among answers to one problem, tokens", early("rollout/length_std_within").text()),
        ("sd of mean lengths of problems, tokens", early("rollout/length_std_across").text()),
    ]


def _clipped(data: SweepData) -> list[tuple[str, str]]:
    def mean(points: pd.DataFrame) -> float:
        return float(points.loc[points["step"] > 0, CLIP_FRACTION].mean())

    named = {"trust_region": "in regime=trust_region", "stale": "in regime=stale"}
    arms = [arm for arm in data.arms if arm in set(data.finished["arm"])]
    return [
        (f"tokens clipped, {named.get(arm, f'updates={arm}')}", _percent(_over_bases(data, mean, arm).within(0.0, 1.0)))
        for arm in arms
    ]


def _percent(interval: Interval) -> str:
    return interval.written("{:.2%}".format)


def _noise(data: SweepData) -> list[tuple[str, str]]:
    rows = []
    bases_of = data.runs.set_index(LABELS)["base"]
    for metric, words in ((HELDOUT, "held-out"), (DOWNSTREAM, "downstream")):
        ends = []
        for labels, points in groups_of(data.finished_points.sort_values("step"), LABELS, sort=False):
            ends.append({"base": bases_of[labels], "value": float(points[metric].dropna().iloc[-1])})
        of_bases, of_seeds = components(pd.DataFrame(ends))
        rows += [(f"{words}: sd between base models", of_bases.text()), (f"{words}: sd between seeds", of_seeds.text())]
        rows.append((f"{words}: sampling sd of the evaluation", _sampling_sd(data, metric.split("/")[1]).text()))
        for bases, seeds in DESIGNS:
            pairs = math.sqrt(2) * of_seeds.mean  # of a pair's difference, as arms hardly correlate over seeds
            least, most = (smallest_effect(sd, pairs, bases, seeds) for sd in (0.0, of_bases.mean))
            words_of_runs = (
                f"{words}: smallest effect of {bases * seeds} runs an arm ({bases} base models x {seeds} seeds)"
            )
            rows.append((words_of_runs, f"{least:.3f} to {most:.3f}"))
    return rows


def _sampling_sd(data: SweepData, suite: str) -> Interval:
    """The deviation of a run's final accuracy that sampling the answers alone makes, its questions given."""
    answers = data.answers[data.answers["suite"] == suite]
    last = answers[answers["step"] == answers["step"].max()]
    bases = data.runs.set_index(LABELS)["base"]
    variances: dict[int, list[float]] = {}
    for labels, run in groups_of(last, LABELS, sort=False):
        share, samples = run["correct"] / run["n"], run["n"]
        own = float((share * (1 - share) / (samples - 1)).sum() / len(run) ** 2)
        variances.setdefault(int(bases[labels]), []).append(own)
    found = t_interval([float(np.mean(own)) for own in variances.values()])
    mean, low, high = (math.sqrt(max(value, 0.0)) for value in (found.mean, found.low, found.high))
    return Interval(mean, low, high, found.n)


# --- the page ---------------------------------------------------------------------------------------------------


def profile_text(profile: Mapping[str, Any]) -> str:
    """The profile for a terminal."""
    width = max(len(quantity) for quantity, _ in profile["rows"])
    sizes = f"{profile['runs']} runs on {profile['bases']} base models"
    head = f"world={profile['world']}: {sizes}, 95% t intervals over base models"
    return "\n".join([head, *(f"  {quantity:<{width}}  {value}" for quantity, value in profile["rows"])])


def read_profiles(folder: Path) -> list[dict[str, Any]]:
    """The saved profiles, by the names of their worlds."""
    return [read_json(path, "measure it again by make worlds") for path in sorted(folder.glob("*.json"))]


def profiles_table(profiles: Sequence[Mapping[str, Any]]) -> str:
    """One row per quantity and one column per world, as a markdown table."""
    quantities = list(dict.fromkeys(quantity for profile in profiles for quantity, _ in profile["rows"]))
    values = [dict(map(tuple, profile["rows"])) for profile in profiles]
    lines = [f"| measured | {' | '.join(profile['world'] for profile in profiles)} |", f"|---{'|---' * len(profiles)}|"]
    lines += [f"| {name} | {' | '.join(own.get(name, '-') for own in values)} |" for name in quantities]
    return "\n".join(lines)


def documented_profiles() -> dict[Path, str]:
    """The page of worlds and its up-to-date text, from the saved profiles."""
    return {PAGE: with_tables(PAGE, {"| measured | ": lambda: profiles_table(read_profiles(SAVED))})}
