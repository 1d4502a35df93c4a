"""From recorded runs to thresholds.json: what is healthy, what is harmed, and how often each rule is wrong.

A run is healthy if its held-out accuracy under the training protocol ends 10 points or more above its start, and
neither downstream accuracy nor held-out accuracy under the evaluation protocol ends below its own. It is harmed if it
collapsed, or if downstream accuracy ends 10 points or more below a start of 10 or more. All others, such as runs that
hardly move, are neither.

Experiments differ more than runs of one experiment do. So a threshold is the highest, over experiments, of the 95%
quantile of the readings of an experiment's healthy runs, of which it needs eight. False alarms and detections are
counted with the thresholds of all other experiments: each experiment is left out once, as a user's own is.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.sweep_data import LABELS
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.instruments.doctor.diagnosis import largest_clip_fraction, read_signal
from grpo_lab.instruments.doctor.rules import CLIP_NO_OP, RULES

QUANTILE = 0.95
FEWEST = 8
GAIN, LOSS = 0.1, 0.1
TRAINING, DOWNSTREAM = "eval/heldout_training/accuracy", "eval/downstream/accuracy"
ASKED = (TRAINING, DOWNSTREAM, "eval/heldout/accuracy")

_WORDS = {
    "level": "{metric}",
    "size": "{metric}",
    "shortfall": "1 - {metric}",
    "rise": "log({metric} / start)",
    "fall": "log(start / {metric})",
}


def readings(table: pd.DataFrame) -> dict[str, float]:
    """`Signal.key` -> reading of one run, the highest of its evaluations for the one derived from them."""
    found = {}
    for rule in RULES:
        for signal in rule.signals:
            values = [one.value for _, _, one in read_signal(signal, table)]
            if values:
                found[signal.key] = max(values)
    return found


def state_of(table: pd.DataFrame, collapsed: bool) -> tuple[str, float]:
    """healthy, harmed or neither, and the change of downstream accuracy in points, NaN where it was not evaluated."""
    change = {
        name: values.iloc[-1] - values.iloc[0]
        for name in ASKED
        if name in table and len(values := table[name].dropna()) > 1
    }
    downstream = change.get(DOWNSTREAM, math.nan)
    start = table[DOWNSTREAM].dropna().iloc[0] if DOWNSTREAM in change else 0.0
    if collapsed or (downstream <= -LOSS and start >= LOSS):
        return "harmed", 100 * downstream
    healthy = change.get(TRAINING, 0.0) >= GAIN and DOWNSTREAM in change and min(change.values()) >= 0
    return "healthy" if healthy else "neither", 100 * downstream


def runs_of(experiments: Path) -> pd.DataFrame:
    """One row per finished or collapsed run of every experiment with saved data: labels, state, change and readings."""
    rows = []
    for folder in sorted(experiments.glob("*/data")):
        name = folder.parent.name
        data = load_data(folder, name)
        counted = data.runs[(data.runs["status"] == "done") | data.runs["collapsed"].astype(bool)]
        collapsed = {tuple(row[label] for label in LABELS): bool(row["collapsed"]) for _, row in counted.iterrows()}
        for label, points in groups_of(data.points, LABELS):
            if label not in collapsed:
                continue
            table = points.drop(columns=LABELS).set_index("step").dropna(axis=1, how="all")
            state, change = state_of(table, collapsed[label])
            several = "train/updates" in table and table["train/updates"].dropna().median() > 1
            row = {"experiment": name, "state": state, "change": change, "several_updates": several}
            clip = largest_clip_fraction(table)
            row |= dict(zip(LABELS, label)) | ({} if clip is None else {CLIP_NO_OP: clip})
            rows.append(row | readings(table))
    return pd.DataFrame(rows)


def threshold(values: pd.Series, experiments: pd.Series) -> float:
    """The highest 95% quantile over experiments of the readings of their healthy runs; NaN without eight in one."""
    by_experiment = values.groupby(experiments)
    return float(by_experiment.quantile(QUANTILE)[by_experiment.count() >= FEWEST].max())


def thresholds_of(runs: pd.DataFrame) -> dict[str, Any]:
    """The content of thresholds.json."""
    experiments, healthy, harmed = runs["experiment"], runs["state"] == "healthy", runs["state"] == "harmed"
    signals: dict[str, Any] = {}
    fired = {}
    for rule in RULES:
        alarms = pd.Series(False, index=runs.index)
        for signal in rule.signals:
            values = runs[signal.key]
            own = values[healthy].dropna()
            others = {name: threshold(own[experiments != name], experiments) for name in experiments.unique()}
            above = values > experiments.map(others)
            known = values.notna()
            signals[signal.key] = {
                "threshold": _rounded(threshold(own, experiments)),
                "experiments": int(experiments[own.index].nunique()),
                **_counts(above, healthy & known, harmed & known),
            }
            alarms |= above
        if rule.signals:
            fired[rule.name] = alarms
    rules = {name: _counts(alarms, healthy, harmed) | _harm(alarms, runs) for name, alarms in fired.items()}
    clip = runs[healthy & runs["several_updates"]][CLIP_NO_OP].dropna()
    rules[CLIP_NO_OP] = {"false_alarms": int((clip <= 0).sum()), "healthy": len(clip), "harm_points": None}
    warned = pd.concat({name: fired[name] for name in fired if rules[name]["harm_points"] > 0}, axis=1).any(axis=1)
    states = {name: int(number) for name, number in runs["state"].value_counts().sort_index().items()}
    return {
        "quantile": QUANTILE,
        "experiments": sorted(experiments.unique()),
        "runs": states,
        "together": _counts(warned, healthy, harmed),
        "rules": rules,
        "signals": signals,
    }


def _counts(alarms: pd.Series, healthy: pd.Series, harmed: pd.Series) -> dict[str, int]:
    """Alarms on healthy runs, which are false, and on harmed runs, which are found."""
    return {
        "false_alarms": int((alarms & healthy).sum()),
        "healthy": int(healthy.sum()),
        "found": int((alarms & harmed).sum()),
        "harmed": int(harmed.sum()),
    }


def _harm(alarms: pd.Series, runs: pd.DataFrame) -> dict[str, Any]:
    """How many points lower in downstream accuracy runs with an alarm end, against the median of their experiment."""
    change = runs["change"] - runs.groupby("experiment")["change"].transform("median")
    with_it, without = change[alarms].dropna(), change[~alarms].dropna()
    points = float(without.mean() - with_it.mean()) if len(with_it) else 0.0
    return {"fired": int(alarms.sum()), "harm_points": _rounded(points)}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def text_of(content: dict[str, Any]) -> str:
    """The file as it is kept."""
    return json.dumps(content, indent=1) + "\n"


def rules_table(content: dict[str, Any]) -> str:
    """The rules with their thresholds and rates, as Markdown for the page."""
    lines = [
        "| rule | a high value of | threshold | false alarms, healthy runs | found, harmed runs | ends lower by |",
        "|---|---|---|---|---|---|",
    ]
    for rule in (rule for rule in RULES if rule.signals):
        for signal in rule.signals:
            counts = content["signals"][signal.key]
            shares = [
                f"{counts[number]} of {counts[n]} ({counts[number] / counts[n]:.1%})"
                for number, n in (("false_alarms", "healthy"), ("found", "harmed"))
            ]
            points = f"{content['rules'][rule.name]['harm_points']:.1f} points" if signal is rule.signals[0] else ""
            words = _WORDS[signal.transform].format(metric=f"`{signal.metric}`")
            lines.append(
                f"| {rule.title if signal is rule.signals[0] else ''} | {words} | {counts['threshold']:g} | "
                f"{shares[0]} | {shares[1]} | {points} |"
            )
    return "\n".join(lines)
