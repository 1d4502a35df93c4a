"""What a reader must know before believing a sweep's numbers: what is missing, and what was not alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from grpo_lab.analysis.load import LABELS, SweepData
from grpo_lab.analysis.outcome import Outcome
from grpo_lab.sweeps.design import Collapsed

_UNEQUAL = 1.1  # a run that spent this many times X has a tail that no comparison sees


def caveats(data: SweepData, outcome: Outcome) -> list[str]:
    """Every sentence of this kind about a sweep, the declaration first; details of a sentence are indented."""
    parts = (_declaration(data), _cells(data), _collapsed(data, outcome), _lengths(data, outcome), _not_finite(data))
    return [*(line for part in parts for line in part), *_lacking(data), *_inert(data), *_code(data), *_protocols(data)]


def notes(data: SweepData, outcome: Outcome) -> list[str]:
    """What must stand on every figure: runs that are missing or collapsed, and runs that are not alike."""
    planned = sum(data.seeds_planned(level, arm) for level in data.levels for arm in data.arms)
    done = len(data.finished)
    lines = [f"{done} of {planned} planned runs are finished."] if done < planned else []
    infinite = [line for line in _not_finite(data) if line.startswith("Infinite") or "at their end" in line]
    lines += [*_collapsed(data, outcome)[:1], *_lengths(data, outcome), *infinite, *_lacking(data), *_code(data)]
    return [*lines, *_protocols(data)]


def place(data: SweepData, level: str, arm: str) -> str:
    """What to call an arm where a sweep has levels."""
    return f"{arm} at {data.design.factor}={level}" if data.design and data.design.factor else arm


def _declaration(data: SweepData) -> list[str]:
    if data.design is None:
        return []
    last = data.record.declared[-1]
    started = last["cells_started_before"]
    when = "before the first run" if started == 0 else f"after {started} of its cells had been started"
    number = len(data.record.declared)
    changed = "" if number == 1 else f"; it is declaration {number} of this sweep"
    return [f"Declared {when} ({last['at']}, fingerprint {last['fingerprint']}){changed}."]


def _cells(data: SweepData) -> list[str]:
    places = [(level, arm) for level in data.levels for arm in data.arms]
    planned = sum(data.seeds_planned(level, arm) for level, arm in places)
    lines = [f"Finished cells: {len(data.finished)} of {planned} planned."]
    for status, word in (("failed", "failed"), ("partial", "unfinished"), ("unreadable", "unreadable")):
        for row in data.runs[data.runs["status"] == status].itertuples():
            reason = f": {row.problem}" if row.problem else ""
            lines.append(f"  {word}: {place(data, row.level, row.arm)} seed {row.seed}{reason}")
    started = data.runs[data.runs["status"] != "new"].groupby(["level", "arm"]).size()
    for level in data.levels:
        missing = {arm: data.seeds_planned(level, arm) - int(started.get((level, arm), 0)) for arm in data.arms}
        if level not in started.index.get_level_values("level"):
            lines.append(f"  not started: all {sum(missing.values())} of {place(data, level, 'every arm')}")
        elif any(missing.values()):
            counts = _listed(f"{number} of {arm}" for arm, number in missing.items() if number)
            lines.append(f"  not started: {place(data, level, counts)}")
    return lines


def _inert(data: SweepData) -> list[str]:
    """Tricks that were switched on and touched nothing in a whole run, and in which arms."""
    lines = []
    done = data.finished.explode("inert").dropna(subset="inert")
    for axis, runs in done.groupby("inert"):
        if len(runs) == len(data.finished):
            where = "every finished run"
        else:
            counts = runs.groupby(["level", "arm"], sort=False).size()
            where = _listed(
                f"{number} of {data.seeds_finished(level, arm)} runs of {place(data, level, arm)}"
                for (level, arm), number in counts.items()
            )
        lines.append(f"Inert: {axis} was switched on and touched nothing in {where}.")
    return lines


def _code(data: SweepData) -> list[str]:
    commits = sorted({str(commit)[:10] for commit in data.finished["commit"]})
    lines = [] if len(commits) == 1 else [f"The finished runs are of {len(commits)} commits: {_listed(commits)}."]
    changed = int(data.finished["dirty"].eq(True).sum())
    if changed:
        lines.append(f"{changed} finished runs are of code that differs from its commit; source.diff in each says how.")
    return lines


def _collapsed(data: SweepData, outcome: Outcome) -> list[str]:
    """Runs that stopped on a loss that was not finite, and what they count for."""
    here = outcome.values[outcome.values["collapsed"]]
    if here.empty:
        return []
    as_what = "accuracy and reward 0 from there on" if outcome.collapsed_as is Collapsed.zero else "what they last had"
    lines = [f"Collapsed before X: {len(here)} of {len(outcome.values)} runs, counted with {as_what}."]
    for (level, arm), runs in here.groupby(["level", "arm"], sort=False):
        seeds = _listed(str(seed) for seed in runs["seed"])
        of = len(outcome.values[(outcome.values["level"] == level) & (outcome.values["arm"] == arm)])
        lines.append(f"  {place(data, level, arm)}: {len(runs)} of {of} (seed {seeds})")
    return lines


def _lengths(data: SweepData, outcome: Outcome) -> list[str]:
    """Runs that went on well beyond the budget up to which all are compared."""
    ends = data.finished_points.groupby(LABELS, sort=False)[f"budget/{outcome.axis}"].max()
    longer = ends[ends > _UNEQUAL * outcome.budget]
    if longer.empty:
        return []
    return [
        f"Unequal lengths: {len(longer)} of {len(ends)} finished runs went beyond {outcome.at}, the longest to "
        f"{float(longer.max() / outcome.budget):.2f} times that; what lies beyond is in no final value."
    ]


def _not_finite(data: SweepData) -> list[str]:
    """Infinities and logged NaN among the numbers that are averaged."""
    points = data.counted_points
    metrics = points.columns.difference([*LABELS, "step"])
    infinite = np.isinf(points[metrics]).sum()
    counts = infinite[infinite > 0]
    holes = _holes(points, metrics) | _unended(data, metrics)
    lines = []
    if len(counts):
        named = _listed(f"{name} ({number})" for name, number in counts.items())
        lines.append(f"Infinite values: {named}; a mean over them is infinite, and no interval is given.")
    if holes:
        named = _listed(
            f"{name} ({number} {'runs, at their end' if name.startswith('eval/') else 'steps'})"
            for name, number in holes.items()
        )
        lines.append(f"Missing or NaN at some steps of a run that has them at others, and left out there: {named}.")
    return lines


def _holes(points: pd.DataFrame, metrics: Iterable[str]) -> dict[str, int]:
    """Metrics of every step -> how many steps after the first lack them, over runs that have them at most steps."""
    trained = points[points["step"] > 0]
    stepwise = [name for name in metrics if not name.startswith(("eval/", "rollout/length_"))]
    present = trained[stepwise].notna().groupby([trained[name] for name in LABELS], sort=False)
    shares, sizes = present.mean(), present.size()
    holes = {}
    for name in stepwise:
        partly = shares[name][(shares[name] > 0.5) & (shares[name] < 1)]
        if len(partly):
            holes[name] = int(((1 - partly) * sizes[partly.index]).round().sum())
    return holes


def _unended(data: SweepData, metrics: Iterable[str]) -> dict[str, int]:
    """Accuracies -> how many finished runs lack them at their last evaluation, and so have no final value."""
    points = data.finished_points
    scores = [name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy")]
    if not scores:
        return {}
    evaluated = points[points[scores].notna().any(axis=1)]
    last = evaluated.loc[evaluated.groupby(LABELS, sort=False)["step"].idxmax(), scores]
    logged = points[scores].notna().groupby([points[name] for name in LABELS], sort=False).any().sum()
    without = logged - last.notna().sum()
    return {name: int(number) for name, number in without.items() if number > 0}


def _lacking(data: SweepData) -> list[str]:
    """Evaluations and rewards that some arms logged and others did not: those cannot be compared on them."""
    points = data.finished_points
    compared = [name for name in points.columns if name.startswith(("eval/", "reward/")) and "/component/" not in name]
    compared = [name for name in compared if "/kept_component/" not in name]
    has = points[compared].notna().groupby([points["level"], points["arm"]], sort=False).any()
    lines = []
    for name in compared:
        without = has.index[~has[name]]
        if len(without) and has[name].any():
            arms = _listed(place(data, level, arm) for level, arm in without)
            lines.append(f"No {name}: {arms}; not compared on it.")
    return lines


def _protocols(data: SweepData) -> list[str]:
    """Runs that were asked or graded differently."""
    known = data.counted.dropna(subset="protocol")
    counts = known["protocol"].value_counts()
    unknown = len(data.counted) - len(known)
    if 0 < unknown < len(data.counted):
        return [f"How {unknown} of {len(data.counted)} runs were evaluated is not known: they may not be alike."]
    if len(counts) < 2:
        return []
    others = known[known["protocol"] != counts.index[0]]
    named = _listed(f"{place(data, row.level, row.arm)} seed {row.seed}" for row in others.itertuples())
    return [
        f"Not evaluated alike: task, template, evaluation, verifier, wished lengths or (training protocol) how "
        f"responses are ended differ for {len(others)} of {len(known)} runs ({named}); differences to them are not of "
        "the arms alone."
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
