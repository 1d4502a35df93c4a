"""How far runs of one arm differ by seed and by questions, and which effects are too small to be seen for it.

All accuracies are in percentage points here. Runs that collapsed are left out: they are a result, not noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import title
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.analysis.stats.power import minimum_detectable_effect
from grpo_lab.analysis.stats.resampling import crossed_bootstrap
from grpo_lab.analysis.tracks import EVALUATED, TRAINING, answers_of, by_condition, tracks
from notebook_tables.noise_statistics import (
    crossed_t_interval,
    questions_needed,
    sd_interval,
    seeds_needed,
    standard_error,
)

PP = 100  # percentage points in one
EFFECTS = (1, 2, 3)  # percentage points, whose cost is asked
SEEDS = (3, 5, 10, 20)
STILL = 0.01  # percentage points: where runs differ by less, nothing is noise
METRICS = (*EVALUATED.values(), TRAINING["reward"])


@dataclass(frozen=True)
class SeedNoise:
    """What the seed does to one metric at one level, percentage points.

    Three standard deviations over seeds, each with its chi-square interval, NaN for too few runs: `control` of the
    control's final values, `pooled` of all arms, `paired` of the difference of two arms paired by seed. `correlation`
    is that of two arms over seeds; the larger it is, the more pairing gains.
    """

    level: str
    metric: str
    control: Interval
    pooled: Interval
    paired: Interval
    correlation: float
    arms: int
    seeds: int

    @property
    def known(self) -> bool:
        """Whether seeds can be planned by it: two arms with two seeds each, that differ at all."""
        return self.paired.mean > STILL


def seed_noise(data: SweepData, finals: FinalValues, metrics: Sequence[str] = METRICS) -> list[SeedNoise]:
    """The noise of every level and logged metric, which must be a share, over the seeds that every arm has.

    With MS_seeds and MS_rest, the mean squares of a table of A arms by S seeds without replication,

        pooled^2 = (MS_seeds + (A - 1) MS_rest) / A          paired^2 = 2 MS_rest

    so that arms may differ in their means, and are taken to scatter alike.
    """
    ended = finals.values[~finals.values["collapsed"]]
    found = []
    for level in data.levels:
        here = ended[ended["level"] == level]
        for metric in (metric for metric in metrics if metric in here):
            table = PP * here.pivot(index="seed", columns="arm", values=metric).dropna(axis="columns", how="all")
            if not table.empty:
                found.append(_seed_noise(level, metric, table, data.control))
    return found


def _seed_noise(level: str, metric: str, table: pd.DataFrame, control: str) -> SeedNoise:
    own = table[control].dropna() if control in table else pd.Series(dtype=float)
    alone = sd_interval(float(own.std()), len(own))
    whole = table.dropna()
    seeds, arms = whole.shape
    if seeds < 2 or arms < 2:
        nothing = Interval(math.nan, math.nan, math.nan, 0)
        return SeedNoise(level, metric, alone, nothing, nothing, math.nan, arms, seeds)
    values = whole.to_numpy()
    of_seeds = values.mean(axis=1, keepdims=True)
    rest = values - of_seeds - values.mean(axis=0) + values.mean()
    between = arms * float(of_seeds.var(ddof=1))
    freedom = (seeds - 1) * (arms - 1)
    within = float((rest**2).sum()) / freedom
    pooled = (between + (arms - 1) * within) / arms
    correlation = (between - within) / (arms * pooled) if pooled else math.nan
    # Seeds are shared by the arms: the pooled deviation is known no better than the seeds allow.
    by_seed = sd_interval(math.sqrt(pooled), seeds)
    paired = sd_interval(math.sqrt(2 * within), freedom + 1)
    return SeedNoise(level, metric, alone, by_seed, paired, correlation, arms, seeds)


def seed_noise_table(found: Sequence[SeedNoise]) -> pd.DataFrame:
    """One row for each level and metric, deviations in percentage points with their 95% chi-square intervals."""
    return pd.DataFrame(
        {
            "level": noise.level,
            "metric": title(noise.metric),
            "control, sd": _text(noise.control),
            "all arms, sd": _text(noise.pooled),
            "paired difference, sd": _text(noise.paired),
            "correlation of arms": noise.correlation,
            "arms": noise.arms,
            "seeds": noise.seeds,
        }
        for noise in found
    )


def detectable(found: Sequence[SeedNoise], seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """The smallest true effect (pp) that so many seeds an arm find with 80% power, unpaired and paired by seed."""
    rows = []
    for noise in (noise for noise in found if noise.known):
        for n in seeds:
            row = {"level": noise.level, "metric": title(noise.metric), "seeds": n}
            row["unpaired"] = minimum_detectable_effect(noise.pooled.mean, n, paired=False)
            row["paired"] = minimum_detectable_effect(noise.paired.mean, n)
            row["paired, at the upper end of sd"] = minimum_detectable_effect(noise.paired.high, n)
            rows.append(row)
    return pd.DataFrame(rows)


def seeds_for(found: Sequence[SeedNoise], effects: Sequence[float | int] = EFFECTS) -> pd.DataFrame:
    """Seeds an arm that effects (pp) need for 80% power: unpaired and paired by seed."""
    rows = []
    for noise in (noise for noise in found if noise.known):
        for effect in effects:
            row = {"level": noise.level, "metric": title(noise.metric), "effect, pp": effect}
            row["unpaired"] = seeds_needed(effect, noise.pooled.mean, paired=False)
            row["paired"] = seeds_needed(effect, noise.paired.mean)
            row["paired, at the upper end of sd"] = seeds_needed(effect, noise.paired.high)
            rows.append(row)
    return pd.DataFrame(rows)


# --- questions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the runs of one condition answered to Q questions, seeds as rows.

    `at_budget` is the share of right samples at X, `last` that at the last evaluation up to X, which no interpolation
    smooths; `answer_variance` is the variance of one sample about its question's own chance there. It is
    NaN with one sample each.
    """

    at_budget: pd.DataFrame
    last: pd.DataFrame
    samples: int
    answer_variance: float


def asked(data: SweepData, finals: FinalValues, suite: str) -> dict[tuple[str, str], Asked]:
    """The answers to a suite by (level, arm), of the conditions whose answers were saved."""
    found = {}
    for labels, runs in by_condition(tracks(data, finals)).items():
        answers = answers_of(data, runs, suite, ends=True)
        if answers is None:
            continue
        seeds = [track.seed for track in runs]
        right, number = answers.correct[:, -2], answers.samples[:, -2]
        at_budget, last = (
            pd.DataFrame(shares, index=seeds, columns=answers.question)
            for shares in (answers.accuracy[:, -1], right / number)
        )
        # An unbiased estimate of p (1 - p) from n samples of a question.
        several = number.min() > 1
        answer_variance = float(np.mean(right * (number - right) / (number * (number - 1)))) if several else math.nan
        found[labels] = Asked(at_budget, last, int(number.min()), answer_variance)
    return found


def question_noise(
    data: SweepData, found: Mapping[tuple[str, str], Asked], effects: Sequence[float | int] = EFFECTS
) -> pd.DataFrame:
    """By level and arm: the error (pp) that the choice of questions leaves one run with, seeds averaged.

    `run` is the standard error of one run over questions. `sampling` is its part from sampling answers, which shrinks
    with more samples a question. `difference` is the standard error of the arm less the control on the same questions.
    The last columns are the questions that effects (pp) between two single checkpoints need for 80% power.
    """
    rows = []
    for (level, arm), own in found.items():
        count = own.last.shape[1]
        row = {"level": level, "arm": arm, "questions": count, "samples": own.samples}
        row["run"] = PP * float(np.mean([standard_error(shares) for shares in own.last.to_numpy()]))
        row["sampling"] = PP * math.sqrt(own.answer_variance / own.samples / count)
        control = found.get((level, data.control))
        pairs = [] if arm == data.control or control is None else (own.last - control.last).dropna().to_numpy()
        if len(pairs):
            variance = float(np.mean([standard_error(pair) ** 2 for pair in pairs])) * count
            row["difference"] = PP * math.sqrt(variance / count)
            row |= {f"questions for {size} pp": questions_needed(size / PP, variance) for size in effects}
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.astype({name: "Int64" for name in table.columns if name.startswith("questions for")})


def three_intervals(data: SweepData, found: Mapping[tuple[str, str], Asked], rng: np.random.Generator) -> pd.DataFrame:
    """Every arm less the control (pp) three ways: other seeds on these questions, and other seeds and questions.

    `t over seeds` speaks of other seeds and the questions that were asked; `crossed t` and `crossed bootstrap` of
    other questions too. `width` is that of the crossed t interval over that of the first. Arms with fewer than two
    pairs of runs have none.
    """
    rows = []
    for (level, arm), own in found.items():
        control = found.get((level, data.control))
        if arm == data.control or control is None:
            continue
        differences = PP * (own.at_budget - control.at_budget).dropna().to_numpy()
        if len(differences) < 2:
            continue
        seeds, crossed = t_interval(differences.mean(axis=1).tolist()), crossed_t_interval(differences)
        row = {"level": level, "arm": arm, "pairs": seeds.n, "t over seeds": _text(seeds, "+")}
        row |= {"crossed t": _text(crossed, "+")}
        row["crossed bootstrap"] = _text(crossed_bootstrap(differences, rng), "+")
        width = seeds.high - seeds.low
        rows.append(row | {"width": (crossed.high - crossed.low) / width if width else math.nan})
    return pd.DataFrame(rows)


def _text(interval: Interval, sign: str = "") -> str:
    if math.isnan(interval.mean):
        return "-"
    return interval.written(f"{{:{sign}.2f}}".format)
