"""The numbers behind the switches of the report: every combination of tricks that was run, as curves and in words.

A metric of every step is drawn as in the first figure. The bold line is the mean over seeds of running means over 5% of
the budget, with its 95% t interval; thin lines are single seeds. A run that collapsed ends where it stopped. From there
on the mean is over fewer seeds, and `n` says so. Nothing is extrapolated, and a combination without runs is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, REWARD, TRUNCATED, FinalValues, final_values
from grpo_lab.analysis.metric_names import CORRECTNESS, change_text, level_text, title, unit
from grpo_lab.analysis.sources.sweep_data import LABELS, NO_BASE, SweepData
from grpo_lab.analysis.stats.mean_line import SMOOTHING, evaluation_grid, mean_on_grid, on_line, running_mean
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.config.design import Collapsed
from grpo_lab.tracking.metrics import find, harness_of, is_active_fraction, logged_name

MAIN = (CORRECTNESS, REWARD, HELDOUT, DOWNSTREAM)
# What else can be chosen, where it was logged; `active_fraction/*` that ever moved and what the design names come on
# top.
MORE = (
    "train/entropy", TRUNCATED, "eval/heldout_training/kl_initial", "rollout/length", "rollout/frac_zero_std",
    "reward/mean", "eval/probe/accuracy", "eval/heldout/accuracy", "eval/heldout_training/truncated",
    "eval/downstream/truncated", "eval/downstream/length", "rollout/trained", "train/clip_fraction",
    "active_fraction/truncation",
    "train/gradient_norm", "train/update_norm", "train/approx_kl", "mismatch/absolute", "mismatch/k3",
)  # fmt: skip
AXES = (
    "sampled_tokens", "steps", "prompts", "completions", "trained_tokens", "flops", "simulated_seconds",
    "device_seconds",
)  # fmt: skip
POINTS, FEWER_POINTS = 33, 21  # of a mean over steps on the declared budget axis, and on the others
FEWEST_POINTS = 8  # of a single run in a large sweep, and of a mean over steps on another axis than the declared
_THIN, _MEANS = 44_000, 20_000  # points of all single runs, and of all means over steps
DIGITS, THIN_DIGITS = 4, 3  # significant ones, of a mean or an evaluation, and of a single seed at every step
_FOR_DERIVED = ("reward/in_loss_outcome", "eval/heldout_training/truncated", "active_fraction/truncation")
Runs = Mapping[int, pd.DataFrame]  # seed -> the steps of its run, a column for each metric
Lines = Mapping[int, tuple[np.ndarray, np.ndarray]]  # seed -> spent budget and value of a metric


def panel_data(data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues] | None = None) -> dict[str, Any]:
    """Everything the panel shows, as JSON values; `others` are `other_axes(data, finals)`, if they are known.

    `groups` holds the switches (one option) and choices (several options of one override key), `plain` the tricks of
    the control, `conditions` the combinations that were run, with their curves, and `waiting` those that were declared
    and have no run that counts. Numbers have four digits; a missing one is null.
    """
    by_axis = {finals.axis: finals} | dict(other_axes(data, finals) if others is None else others)
    metrics = panel_metrics(data)
    runs = _runs(data, [*metrics, *(f"budget/{axis}" for axis in by_axis)])
    places = [(level, arm) for level in data.levels for arm in data.arms]
    return {
        "control": data.control,
        "factor": data.design.factor if data.design else "",
        "levels": data.levels,
        "brackets": finals.brackets,
        "collapsed_as": "accuracy and reward 0" if data.collapsed_as is Collapsed.zero else "their last values",
        "plain": sorted(data.contents(data.control)),
        "groups": groups(data),
        "axes": [_axis(name, result) for name, result in by_axis.items()],
        "alike": {name: alike for name, alike in proportional(data, finals.axis).items() if name not in by_axis},
        "metrics": [_metric(name) for name in metrics],
        "conditions": [_condition(data, *place, runs[place], by_axis, metrics) for place in places if place in runs],
        "waiting": [_named(data, *place) for place in places if place not in runs],
    }


def panel_metrics(data: SweepData) -> list[str]:
    """The metrics that can be drawn: the main ones, what harnesses measured, step metrics, and those of the design."""
    points = data.counted_points
    named = [*_declared(data), *data.design.columns] if data.design else []
    fractions = [name for name in points.columns if is_active_fraction(name) and points[name].fillna(0).ne(0).any()]
    passes = sorted(name for name in points.columns if name.startswith("eval/downstream/pass_at_"))
    passes = [name for name in passes[-1:] if not name.endswith("pass_at_1")]
    measured = [name for name in points.columns if harness_of(name) and name.endswith("/accuracy")]
    candidates = [*MAIN, *measured, *(logged_name(name) for name in named), *MORE, *passes, *fractions]
    return [name for name in dict.fromkeys(candidates) if name in points and points[name].notna().any()]


def _declared(data: SweepData) -> list[str]:
    """The metrics that the design predicts something of."""
    return [data.design.primary, *(one.metric for one in data.design.predictions)] if data.design else []


def proportional(data: SweepData, axis: str) -> dict[str, str]:
    """Budget axes that are a fixed multiple of another axis in every run, mapped to that axis: curves look alike."""
    points = data.counted_points
    known = [name for name in dict.fromkeys([axis, *AXES]) if _complete(points, name)]
    same: dict[str, str] = {}
    for place, name in enumerate(known):
        for earlier in (other for other in known[:place] if other not in same):
            one, other = points[f"budget/{name}"].to_numpy(), points[f"budget/{earlier}"].to_numpy()
            if np.allclose(one * other.max(), other * one.max(), rtol=1e-9, atol=0):
                same[name] = earlier
                break
    return same


def _complete(points: pd.DataFrame, axis: str) -> bool:
    name = f"budget/{axis}"
    return name in points and bool(np.isfinite(points[name]).all() and points[name].max() > 0)


def other_axes(data: SweepData, finals: FinalValues) -> dict[str, FinalValues]:
    """Final values on the other budget axes that every run logged, of the metrics that the report compares."""
    same = proportional(data, finals.axis)
    needed = {*panel_metrics(data), *_FOR_DERIVED, *map(logged_name, _declared(data))}
    chosen = [name for name in data.points.columns if name in needed or name.startswith("budget/")]
    slim = replace(data, points=data.points[[*LABELS, "step", *chosen]])
    names = [name for name in AXES if name != finals.axis and name not in same and _complete(data.counted_points, name)]
    return {name: final_values(slim, name) for name in names}


# --- controls -----------------------------------------------------------------------------------------------


def groups(data: SweepData) -> list[dict[str, Any]]:
    """The controls: a switch for a trick, one choice for tricks that set the same key.

    Each has `label`, `detail`, `plain` (what it is called when none of the options is on) and `options`: the trick, its
    label in the group, and its name elsewhere.
    """
    if data.design and data.design.tricks:
        return [
            _group(trick, [trick], detail=" ".join(words), plain="off") for trick, words in data.design.tricks.items()
        ]
    by_key: dict[str, list[str]] = {}
    for trick in data.tricks:
        by_key.setdefault(trick.partition("=")[0], []).append(trick)
    return [_group(key, tricks, detail="", plain=_plain(data, key)) for key, tricks in by_key.items()]


def _group(key: str, tricks: Sequence[str], detail: str, plain: str) -> dict[str, Any]:
    options = []
    for trick in tricks:
        value = "" if trick == key else trick.partition("=")[2]
        options.append({"trick": trick, "label": value or "on", "name": f"{key} = {value}" if value else key})
    return {"label": key, "detail": detail, "plain": plain, "options": options}


def _plain(data: SweepData, key: str) -> str:
    """The control's value of a key that no trick of it sets."""
    words = data.design.arms[data.control] if data.design else data.control.split(",")
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == key]
    return f"plain ({chosen[0]})" if chosen and f"{key}={chosen[0]}" not in data.contents(data.control) else "plain"


def _axis(name: str, finals: FinalValues) -> dict[str, Any]:
    words = name.replace("_", " ")
    inside = find(f"budget/{name}").unit
    label = words if inside in words else f"{words} ({inside})"
    return {"name": name, "label": label, "budget": rounded(finals.budget), "at": finals.at}


def _metric(name: str) -> dict[str, Any]:
    called, inside = title(name), unit(name)
    label = called if inside == "1" or inside in called else f"{called} ({inside})"
    meaning = f"{find(name).meaning}; {find(name).reduction}"
    described = {"name": name, "title": called, "label": label, "unit": inside, "meaning": meaning}
    return described | {"main": name in MAIN, "part": "evaluations" if _is_evaluation(name) else "steps"}


def _is_evaluation(metric: str) -> bool:
    return metric.startswith("eval/")


# --- combinations -------------------------------------------------------------------------------------------


def _runs(data: SweepData, names: list[str]) -> dict[tuple[str, str], dict[int, pd.DataFrame]]:
    """(level, arm) -> seed -> the steps of its run."""
    points = data.counted_points.sort_values("step")
    found: dict[tuple[str, str], dict[int, pd.DataFrame]] = {}
    for (level, arm, seed), run in groups_of(points[[*LABELS, *names]], LABELS, sort=False):
        found.setdefault((level, arm), {})[int(seed)] = run[names]
    return {place: dict(sorted(runs.items())) for place, runs in found.items()}


def _named(data: SweepData, level: str, arm: str) -> dict[str, Any]:
    return {"level": level, "arm": arm, "on": sorted(data.contents(arm))}


def bounded(most: int, points: int, lines: int) -> int:
    """The number of points of each of `lines` lines: at most `most`, and fewer where all would be over `points`."""
    return min(most, max(FEWEST_POINTS, points // max(lines, 1)))


def _condition(
    data: SweepData, level: str, arm: str, runs: Runs, by_axis: Mapping[str, FinalValues], metrics: Sequence[str]
) -> dict[str, Any]:
    steps = sum(not _is_evaluation(metric) for metric in metrics)
    thin = bounded(POINTS, _THIN, steps * len(data.counted))
    fewer = bounded(FEWER_POINTS, _MEANS, steps * len(data.levels) * len(data.arms) * len(by_axis))
    finished = data.finished.query("level == @level and arm == @arm")["seed"].tolist()
    points = {axis: fewer if place else POINTS for place, axis in enumerate(by_axis)}
    return {
        **_named(data, level, arm),
        "planned": data.seeds_planned(level, arm),
        "finished": len(finished),
        "collapsed": data.collapsed(level, arm),
        "runs": [_run(run, list(by_axis), metrics, thin) for run in runs.values()],
        "means": {axis: _means(runs, axis, at, metrics, finished, points[axis]) for axis, at in by_axis.items()},
        "final": {axis: _finals(at, level, arm, data.control, metrics) for axis, at in by_axis.items()},
    }


def _finals(
    finals: FinalValues, level: str, arm: str, control: str, metrics: Sequence[str]
) -> dict[str, tuple[str, str, int]]:
    """By metric: the value at X in words, the difference to the control in words, how many pairs of seeds that has."""
    compared = arm != control and finals.collapses(level, control).of
    found = {}
    for metric in metrics:
        value, change, pairs = level_text(finals.interval(level, arm, metric), metric), "", 0
        if compared:
            difference = finals.difference(level, arm, control, metric)
            change, pairs = change_text(difference, metric), difference.n
        found[metric] = (value, change, pairs)
    return found


# --- single runs --------------------------------------------------------------------------------------------


def _run(run: pd.DataFrame, axes: Sequence[str], metrics: Sequence[str], points: int) -> dict[str, Any]:
    """`steps` and `evaluations` of one run, each with `x` by axis and `y` by metric, for its thin lines."""
    evaluated = [metric for metric in metrics if _is_evaluation(metric)]
    every = [metric for metric in metrics if not _is_evaluation(metric)]
    at = run[run[evaluated].notna().any(axis=1)]
    return {
        "steps": _thinned(run[run[every].notna().any(axis=1)], axes, every, points),
        "evaluations": {
            "x": {axis: numbers(at[f"budget/{axis}"]) for axis in axes},
            "y": {metric: numbers(at[metric]) for metric in evaluated},
        },
    }


def _thinned(run: pd.DataFrame, axes: Sequence[str], metrics: Sequence[str], points: int) -> dict[str, Any]:
    """At most `points` steps at equal distances, and there the running mean from one of them to the next."""
    steps = np.arange(len(run), dtype=float)
    rows = np.linspace(0, max(len(run) - 1, 0), min(points, len(run)))
    width = len(run) / max(len(rows), 1)
    found: dict[str, list[float | int | None]] = {}
    for metric in metrics:
        known = run[metric].notna().to_numpy()
        if known.any():
            smooth = running_mean(steps[known], run[metric].to_numpy(float)[known], width)
            found[metric] = numbers(on_line(rows, steps[known], smooth), THIN_DIGITS)
    return {"x": {axis: numbers(np.interp(rows, steps, run[f"budget/{axis}"])) for axis in axes}, "y": found}


# --- means over seeds ---------------------------------------------------------------------------------------


def _means(
    runs: Runs, axis: str, finals: FinalValues, metrics: Sequence[str], finished: Sequence[int], points: int
) -> dict[str, dict[str, Any]]:
    """The mean curve of every metric that some run logged."""
    found = {}
    for metric in metrics:
        known = {seed: run[run[metric].notna()] for seed, run in runs.items() if run[metric].notna().any()}
        lines = {seed: (run[f"budget/{axis}"].to_numpy(), run[metric].to_numpy(float)) for seed, run in known.items()}
        if lines and _is_evaluation(metric):
            whole = [seed for seed in finished if seed in lines]
            found[metric] = evaluation_curve(lines, finals.budget, whole, finals.bases)
        elif lines:
            found[metric] = step_curve(lines, finals.budget, points, finals.bases)
    return found


def step_curve(
    runs: Lines, budget: float, points: int = POINTS, bases: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The mean of a metric of every step: `grid` (first, last, number), `mean`, `low`, `high` and `n`."""
    grid = np.linspace(min(budget, max(xs[0] for xs, _ in runs.values())), budget, points)
    smooth = {seed: (xs, running_mean(xs, values, SMOOTHING * budget)) for seed, (xs, values) in runs.items()}
    return {"grid": [rounded(grid[0]), rounded(grid[-1]), points], **_over_seeds(smooth, grid, bases)}


def evaluation_curve(
    runs: Lines, budget: float, finished: Sequence[int], bases: Mapping[int, int] | None = None
) -> dict[str, Any]:
    """The mean of a metric of evaluations: `x`, where they lie on average, `mean`, `low`, `high` and `n`.

    The last `x` is the budget, or the last point that some run reached.
    """
    grid = evaluation_grid([runs[seed][0] for seed in finished] or [xs for xs, _ in runs.values()], budget)
    return {"x": numbers(grid), **_over_seeds(runs, grid, bases)}


def _over_seeds(lines: Lines, grid: np.ndarray, bases: Mapping[int, int] | None) -> dict[str, Any]:
    """Mean and t interval at every grid point, over the seeds that reach it or their base models; `n` is of seeds."""
    bases = bases or {}
    mean, low, high, n = mean_on_grid(list(lines.values()), grid, [bases.get(seed, NO_BASE) for seed in lines])
    ends = {"mean": numbers(mean), "low": numbers(low), "high": numbers(high)}
    return ends | {"n": n.tolist() if len(set(n.tolist())) > 1 else int(n[0])}


def numbers(values: Iterable[float], digits: int = DIGITS) -> list[float | int | None]:
    """Numbers rounded to `digits` significant digits; None for values that are not finite."""
    return [rounded(float(value), digits) for value in values]


def rounded(value: float | int, digits: int = DIGITS) -> float | int | None:
    """A number rounded to `digits` significant digits, an int where that is shorter; None if it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
