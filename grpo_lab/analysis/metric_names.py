"""Names of metrics in sentences, tables and figures, and the format of their numbers with units."""

from __future__ import annotations

import math

from grpo_lab.analysis.final_values import AVERAGE, QUANTITIES, REWARD
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.tracking.metrics import (
    BELOW_BEST,
    DERIVED,
    FURTHER_SUITES,
    HARNESSES,
    LOG_ODDS,
    SAMPLER_SUITES,
    START,
    SUITES,
    TO_HALF,
    TO_NINE_TENTHS,
    find,
    harness_of,
    is_known,
    logged_name,
)

CORRECTNESS = "reward/outcome"
_NAMES = QUANTITIES | {
    CORRECTNESS: "training reward, correctness of all responses",
    REWARD: "training reward as the loss sees it",
    "train/entropy": "policy entropy in training",
    "rollout/length_correct": "length of right answers",
    "rollout/length_wrong": "length of wrong answers",
    "rollout/frac_zero_std": "share of groups whose responses are all right or all wrong",
    "mismatch/absolute": "log-prob gap between sampler and learner",
    "mismatch/ess_responses": "effective sample size of the responses' weights",
    "mismatch/rejected_responses": "share of responses that the rejection takes out",
}

_OF_ANOTHER = {
    AVERAGE: "{}, mean over the run",
    START: "{}, before RL",
    BELOW_BEST: "{}, best less last of three evaluations in a row",
    LOG_ODDS: "{}, log-odds",
    TO_HALF: "sampled tokens to half of the control's gain in {}, log2",
    TO_NINE_TENTHS: "sampled tokens to 90% of the control's gain in {}, log2",
}
_SUITES = SUITES | FURTHER_SUITES | SAMPLER_SUITES


def title(metric: str) -> str:
    """The title of a metric; its logged name where it has none."""
    if metric in _NAMES:
        return _NAMES[metric]
    for prefix, words in _OF_ANOTHER.items():
        if metric.startswith(prefix):
            return words.format(title(metric.removeprefix(prefix)))
    stage, _, rest = metric.partition("/")
    if stage == "eval":
        suite, _, quantity = rest.partition("/")
        if (harness := harness_of(metric)) is not None:
            return f"{suite.removeprefix(f'{harness}_')}, by {HARNESSES[harness]}: {quantity.replace('_', ' ')}"
        return f"{_SUITES.get(suite, suite.replace('_', ' '))}: {quantity.replace('_', ' ')}"
    return metric


def metric_text(metric: str) -> str:
    """The title, and for a metric without one its name with what the registry says it means."""
    plain = logged_name(metric)
    bare = title(plain) == plain and is_known(plain)
    return f"{title(metric)} ({find(plain).meaning})" if bare else title(metric)


_DERIVED = {metric.name: metric.unit for metric in DERIVED}
_PLAIN = ("1", "loss", "advantage")  # units that say nothing beside a number


def unit(metric: str) -> str:
    """The unit of a metric, also of one that analysis derives."""
    if metric.startswith(LOG_ODDS):
        return "logits"
    if metric.startswith((TO_HALF, TO_NINE_TENTHS)):
        return "doublings"
    metric = logged_name(metric)
    return _DERIVED[metric] if metric in _DERIVED else find(metric).unit


def level_text(interval: Interval, metric: str) -> str:
    """A value with its interval, such as `0.693 [0.681, 0.705]` or `23.4 [22.9, 23.9] tokens`."""
    if unit(metric) in ("share", "reward"):
        return interval.text()
    return _written(interval, "", unit(metric))


def change_text(interval: Interval, metric: str) -> str:
    """A difference with its interval; shares in percentage points, such as `-3.4 pp [-5.2, -1.6]`."""
    if unit(metric) != "share":
        return _written(interval, "+", unit(metric))
    return _written(interval.scaled(100), "+", "pp", decimals=1)


def _written(interval: Interval, sign: str, name: str, decimals: int | None = None) -> str:
    if interval.n == 0 or math.isnan(interval.mean):
        return "-"
    numbers = [interval.mean, interval.low, interval.high]
    if decimals is None:
        decimals = _decimals(max(abs(number) for number in numbers if not math.isnan(number)))
    return interval.written(lambda number: number_text(number, decimals, sign), "" if name in _PLAIN else f" {name}")


def _decimals(largest: float) -> int:
    """So that the largest of some numbers shows three digits; -1 where that takes a power of ten."""
    if largest == 0:
        return 0
    places = 2 - math.floor(math.log10(largest))
    return max(places, 0) if -5 < places < 7 else -1


def number_text(number: float | int, decimals: int, sign: str = "") -> str:
    """A number with this number of decimals, thousands separated; with a power of ten for -1."""
    return f"{number:{sign}.2e}" if decimals < 0 else f"{number:{sign},.{decimals}f}"
