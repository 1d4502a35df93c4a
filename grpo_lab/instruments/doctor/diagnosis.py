"""The rules applied to a log: findings in order of harm, and what was not checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.divergence.sharpening import gains_of_curve
from grpo_lab.instruments.doctor.rules import (
    CLIP_NO_OP,
    LOST,
    NON_FINITE,
    RULES,
    SHARPENING,
    LogRule,
    Signal,
    severity,
    thresholds,
)
from grpo_lab.instruments.doctor.signals import (
    FEWEST,
    TRANSFORMS,
    OnsetSpan,
    PeakReading,
    evaluations,
    lost_accuracy,
    onset,
    reading,
    smoothed,
)
from grpo_lab.tracking.external_logs import read_log
from grpo_lab.tracking.metrics import SHARPENED

MATTER = ("train/loss", "train/gradient_norm", "train/entropy", "train/k3_ref", "reward/mean")
HALF = 0.5  # of the gain in reward: from there on most of it is sharpening


@dataclass(frozen=True)
class Finding:
    """One rule that fired; `series` holds its values (higher is worse) beside the threshold."""

    rule: LogRule
    severity: str
    evidence: str
    onset: OnsetSpan
    value: float
    threshold: float
    series: pd.Series = field(repr=False)


@dataclass(frozen=True)
class Diagnosis:
    """Findings of one log, the worst first; `unchecked` says per rule why it could not be applied."""

    source: Path
    format: str
    steps: tuple[int, int]
    metrics: tuple[str, ...]
    findings: tuple[Finding, ...]
    unchecked: Mapping[str, str]
    notes: tuple[str, ...]

    def worst(self) -> str | None:
        """The highest severity of a finding, None without findings."""
        return self.findings[0].severity if self.findings else None


def table_of(steps: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """One row per step, one float column per metric: NaN where it was not logged, infinite where it was NaN."""
    logged = {
        step: {name: math.inf if math.isnan(value) else value for name, value in numbers.items()}
        for step, numbers in steps.items()
    }
    return pd.DataFrame.from_dict(logged, orient="index", dtype=float).sort_index()


def diagnose(place: Path) -> Diagnosis:
    """Diagnose the log at `place`. Raises ValueError where it cannot be read."""
    source, form, log = read_log(place)
    table = table_of(log.steps)
    findings, unchecked = [], {}
    for rule in RULES:
        found = _apply(rule, table)
        if isinstance(found, Finding):
            findings.append(found)
        elif found:
            unchecked[rule.name] = found
    rank = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda one: (rank[one.severity], -harm(one.rule.name)))
    first, last = int(table.index[0]), int(table.index[-1])
    return Diagnosis(
        source, form, (first, last), tuple(sorted(table.columns)), tuple(findings), unchecked, tuple(log.notes)
    )


def harm(rule: str) -> float:
    """How many points lower in downstream accuracy recorded runs with this finding ended; infinite for non-finite."""
    points = thresholds()["rules"].get(rule, {}).get("harm_points")
    return math.inf if rule == NON_FINITE else -math.inf if points is None else points


def series_of(signal: Signal, table: pd.DataFrame) -> Iterator[tuple[str, pd.Series, bool]]:
    """Metric, series in which high is bad, and whether it is to be smoothed; none where the log lacks the metric."""
    if signal.metric == LOST:
        rewards = smoothed(table["reward/mean"]) if "reward/mean" in table else pd.Series(dtype=float)
        if len(rewards):
            for name in evaluations(table):
                yield name, lost_accuracy(table, name, rewards), False
    elif signal.metric in table:
        yield signal.metric, TRANSFORMS[signal.transform](table[signal.metric].dropna()), True


def read_signal(signal: Signal, table: pd.DataFrame) -> Iterator[tuple[str, pd.Series, PeakReading]]:
    """Metric, series and reading of a signal, for every series that has enough values."""
    for metric, series, smooth in series_of(signal, table):
        found = reading(series) if smooth else PeakReading(float(series.max()), _step(series.idxmax()))
        if found is not None:
            yield metric, series, found


def largest_clip_fraction(table: pd.DataFrame) -> float | None:
    """The largest clip fraction of a log; None where it was logged fewer than five times."""
    values = table["train/clip_fraction"].dropna() if "train/clip_fraction" in table else pd.Series(dtype=float)
    return float(values.max()) if len(values) >= FEWEST else None


def _apply(rule: LogRule, table: pd.DataFrame) -> Finding | str | None:
    """A finding; or why the rule could not be applied; or None where it found nothing."""
    special = {NON_FINITE: _non_finite, CLIP_NO_OP: _clip_no_op, SHARPENING: _sharpening}
    if rule.name in special:
        return special[rule.name](rule, table)
    worst, least, seen = None, 0.0, False
    for signal in rule.signals:
        known = thresholds()["signals"].get(signal.key)
        if known is None:
            continue
        for metric, series, found in read_signal(signal, table):
            seen = True
            threshold = known["threshold"]
            excess = found.value / max(threshold, 1e-12)
            if found.value > threshold and excess > least:
                least, worst = excess, (signal, metric, series, found, threshold)
    if worst is None:
        names = ", ".join(dict.fromkeys(one.metric for one in rule.signals))
        if seen:
            return None
        if LOST in names:
            return "it takes reward/mean and an accuracy at three or more steps"
        return f"the log has no {names}, or fewer than {FEWEST} values"
    signal, metric, series, found, threshold = worst
    if signal.metric == LOST:
        at = _first(series, threshold)
        logged_steps = [_step(step) for step in table[metric].dropna().index]
        since = OnsetSpan(at, logged_steps[max(0, logged_steps.index(at) - 2)], at)
    else:
        since = onset(series, threshold)
    described = signal.description.format(value=found.value, of_start=_of_start(signal, found.value))
    limit = signal.description.format(value=threshold, of_start=_of_start(signal, threshold))
    name = f" ({metric})" if signal.metric == LOST else ""
    text = f"{described}{name} at step {found.step}; the threshold from healthy recorded runs: {limit}."
    return Finding(rule, severity(rule.name), text + _more(rule, table, found), since, found.value, threshold, series)


def _step(label: Any) -> int:
    return int(label)


def _first(series: pd.Series, threshold: float) -> int:
    return int(series.index[int(np.argmax(series.to_numpy() > threshold))])


def _of_start(signal: Signal, value: float) -> float:
    """A relative reading as a factor of the start."""
    return (
        math.exp(-value if signal.transform == "fall" else value) if signal.transform in ("rise", "fall") else math.nan
    )


def _more(rule: LogRule, table: pd.DataFrame, found: PeakReading) -> str:
    """What correctness says of zero-variance groups: at least zero-variance share less correctness are all wrong."""
    if (
        rule.name != "zero_variance"
        or "reward/mean" not in table
        or not table["reward/mean"].dropna().between(0, 1).all()
    ):
        return ""
    right = table["reward/mean"].dropna()
    mean = float(right.loc[: found.step].tail(max(FEWEST, len(right) // 10)).mean())
    wrong = max(0.0, found.value - mean)
    if wrong > 0:
        return f" Reward is {mean:.2f} there; if it is correctness, at least {wrong:.0%} of groups are all wrong."
    return f" Reward is {mean:.2f} there: the groups may be all right, so the questions are solved."


def _non_finite(rule: LogRule, table: pd.DataFrame) -> Finding | None:
    """A metric that matters is NaN or infinite; of gradient norms a tenth, since a loss scaler skips single steps."""
    bad = {}
    for name in MATTER:
        if name in table:
            values = table[name].dropna()
            broken = np.isinf(values)
            least = len(values) / 10 if name == "train/gradient_norm" else 0
            if broken.sum() > least:
                bad[name] = broken.astype(float)
    if not bad:
        return None
    name, series = min(bad.items(), key=lambda pair: pair[1].idxmax())
    step, number = int(series.idxmax()), int(series.sum())
    text = f"{name} is not finite at {number} of {len(series)} logged steps, first at step {step}."
    return Finding(rule, "error", text, OnsetSpan(step, step, step), 1.0, 0.0, series)


def _clip_no_op(rule: LogRule, table: pd.DataFrame) -> Finding | str | None:
    largest = largest_clip_fraction(table)
    if largest is None:
        return f"the log has no train/clip_fraction, or fewer than {FEWEST} values"
    if largest > 0:
        return None
    values = table["train/clip_fraction"].dropna()
    first = int(values.index[0])
    of = thresholds()["rules"][CLIP_NO_OP]
    text = (
        f"the clip fraction is 0 at all {len(values)} logged steps. Of recorded runs with several updates per batch "
        f"{of['false_alarms']} of {of['healthy']} have that."
    )
    return Finding(rule, "note", text, OnsetSpan(first, first, first), 1.0, 0.0, 1.0 * (values <= 0))


def _sharpening(rule: LogRule, table: pd.DataFrame) -> Finding | str | None:
    """The sharpening share of `analysis/divergence/sharpening.py` for one run."""
    names = [name for name in table.columns if re.fullmatch(rf"eval/{SHARPENED}\d+/entropy", str(name))]
    entropy, accuracy = "eval/heldout_training/entropy", "eval/heldout_training/accuracy"
    if not names or entropy not in table or accuracy not in table:
        return "the log has no evaluations of the initial policy at other temperatures (evaluation.sharpened)"
    start, end = table.iloc[0], table[[entropy, accuracy]].dropna().iloc[-1]
    points = {float(start[name]): float(start[f"{str(name).rpartition('/')[0]}/accuracy"]) for name in names}
    gains = gains_of_curve(points | {float(start[entropy]): float(start[accuracy])}, float(start[accuracy]), *end)
    if isinstance(gains, str):
        return gains
    sharpened, gained = gains
    if not gained > 0 or sharpened / gained < HALF:
        return None
    last = int(table[[entropy, accuracy]].dropna().index[-1])
    text = (
        f"held-out accuracy rose by {gained:.3f}; the initial policy gains {sharpened:.3f} at a lower temperature "
        f"(sharpening share {sharpened / gained:.2f}). One run has no interval."
    )
    return Finding(
        rule,
        "note",
        text,
        OnsetSpan(last, int(table.index[0]), last),
        sharpened / gained,
        HALF,
        table[accuracy].dropna(),
    )


def sorted_unchecked(unchecked: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Title and reason of every rule that could not be applied."""
    titles = {rule.name: rule.title for rule in RULES}
    return [(titles[name], why) for name, why in unchecked.items()]
