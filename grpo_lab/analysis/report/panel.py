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
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, critical_t
from grpo_lab.analysis.stats.mean_line import SMOOTHING, over_bases, running_mean
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.config.design import Collapsed
from grpo_lab.tracking.metrics import find, harness_of, is_touched, logged_name

MAIN = (CORRECTNESS, REWARD, HELDOUT, DOWNSTREAM)
# What else can be chosen, where it was logged; `touched/*` that ever moved and what the design names come on top.
MORE = (
    "train/entropy", TRUNCATED, "eval/heldout_training/kl_initial", "rollout/length", "rollout/frac_zero_std",
    "reward/mean", "eval/probe/accuracy", "eval/heldout/accuracy", "eval/heldout_training/truncated",
    "eval/downstream/truncated", "eval/downstream/length", "rollout/trained", "train/clip_fraction",
    "touched/truncation",
    "train/gradient_norm", "train/update_norm", "train/approx_kl", "mismatch/absolute", "mismatch/k3",
)  # fmt: skip
AXES = (
    "sampled_tokens", "steps", "prompts", "completions", "trained_tokens", "flops", "simulated_seconds",
    "device_seconds",
)  # fmt: skip
POINTS, FEWER_POINTS = 101, 41  # of a curve on the declared budget axis, and on the others
DIGITS, THIN_DIGITS = 4, 3  # significant ones, of a mean and of a single seed of a metric of every step
_FOR_DERIVED = ("reward/in_loss_outcome", "eval/heldout_training/truncated", "touched/truncation")


def panel_data(data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues] | None = None) -> dict[str, Any]:
    """Everything the panel shows, as JSON values; `others` are `other_axes(data, finals)`, if they are known.

    `groups` holds the switches (one option) and choices (several options of one override key), `plain` the tricks of
    the control, `cells` the combinations that were run, with their curves by axis and metric, and `waiting` those that
    were declared and have no run that counts. Numbers have four digits; a missing one is null.
    """
    by_axis = {finals.axis: finals} | dict(other_axes(data, finals) if others is None else others)
    metrics = panel_metrics(data)
    places = [(level, arm) for level in data.levels for arm in data.arms]
    logged = _arrays(data, [*metrics, *(f"budget/{axis}" for axis in by_axis)])
    return {
        "sweep": data.record.name,
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
        "cells": [
            _cell(data, level, arm, logged[level, arm], by_axis, metrics)
            | {"final": {axis: _finals(at, level, arm, data.control, metrics) for axis, at in by_axis.items()}}
            for level, arm in places
            if (level, arm) in logged
        ],
        "waiting": [
            {"level": level, "arm": arm, "on": sorted(data.contents(arm))}
            for level, arm in places
            if (level, arm) not in logged
        ],
    }


def panel_metrics(data: SweepData) -> list[str]:
    """The metrics that can be drawn: the main ones, what harnesses measured, step metrics, and those of the design."""
    points = data.counted_points
    named = [data.design.primary, *(one.metric for one in data.design.predictions)] if data.design else []
    named += [*data.design.columns] if data.design else []
    touched = [name for name in points.columns if is_touched(name) and points[name].fillna(0).ne(0).any()]
    passes = sorted(name for name in points.columns if name.startswith("eval/downstream/pass_at_"))
    passes = [name for name in passes[-1:] if not name.endswith("pass_at_1")]
    measured = [name for name in points.columns if harness_of(name) and name.endswith("/accuracy")]
    wanted = [*MAIN, *measured, *(logged_name(name) for name in named), *MORE, *passes, *touched]
    return [name for name in dict.fromkeys(wanted) if name in points and points[name].notna().any()]


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
    named = [data.design.primary, *(one.metric for one in data.design.predictions)] if data.design else []
    wanted = {*panel_metrics(data), *_FOR_DERIVED, *(logged_name(name) for name in named)}
    chosen = [name for name in data.points.columns if name in wanted or name.startswith("budget/")]
    slim = replace(data, points=data.points[[*LABELS, "step", *chosen]])
    names = [name for name in AXES if name != finals.axis and name not in same and _complete(data.counted_points, name)]
    return {name: final_values(slim, name) for name in names}


def groups(data: SweepData) -> list[dict[str, Any]]:
    """The controls: a switch for a trick, one choice for tricks that set the same key.

    Each has `key`, `label`, `detail`, `plain` (what it is called when none of the options is on) and `options`, a
    list of trick and label.
    """
    if data.design and data.design.tricks:
        return [
            _group(trick, [(trick, "on")], detail=" ".join(words), plain="off")
            for trick, words in data.design.tricks.items()
        ]
    by_key: dict[str, list[str]] = {}
    for trick in data.tricks:
        by_key.setdefault(trick.partition("=")[0], []).append(trick)
    return [
        _group(key, [(trick, trick.partition("=")[2] or "on") for trick in tricks], detail="", plain=_plain(data, key))
        for key, tricks in by_key.items()
    ]


def _group(key: str, options: list[tuple[str, str]], detail: str, plain: str) -> dict[str, Any]:
    listed = [{"trick": trick, "label": label} for trick, label in options]
    return {"key": key, "label": key, "detail": detail, "plain": plain, "options": listed}


def _plain(data: SweepData, key: str) -> str:
    """What the control has for a key that no trick of it sets."""
    words = data.design.arms[data.control] if data.design else data.control.split(",")
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == key]
    return f"plain ({chosen[0]})" if chosen and f"{key}={chosen[0]}" not in data.contents(data.control) else "plain"


def _axis(name: str, finals: FinalValues) -> dict[str, Any]:
    words = name.replace("_", " ")
    inside = find(f"budget/{name}").unit
    label = words if inside in words else f"{words} ({inside})"
    return {"name": name, "label": label, "budget": rounded(finals.budget), "at": finals.at}


def _metric(name: str) -> dict[str, Any]:
    meaning = f"{find(name).meaning}; {find(name).reduction}"
    evaluation = name.startswith("eval/")
    described = {"name": name, "title": title(name), "unit": unit(name), "meaning": meaning}
    return described | {"main": name in MAIN, "evaluation": evaluation}


def _arrays(data: SweepData, names: list[str]) -> dict[tuple[str, str], dict[int, dict[str, np.ndarray]]]:
    """Cell -> seed -> metric -> its values at every logged step."""
    points = data.counted_points.sort_values("step")
    found: dict[tuple[str, str], dict[int, dict[str, np.ndarray]]] = {}
    for (level, arm, seed), run in groups_of(points[[*LABELS, *names]], LABELS, sort=False):
        found.setdefault((level, arm), {})[int(seed)] = {name: run[name].to_numpy(float) for name in names}
    return found


def _cell(
    data: SweepData,
    level: str,
    arm: str,
    logged: Mapping[int, Mapping[str, np.ndarray]],
    by_axis: Mapping[str, FinalValues],
    metrics: list[str],
) -> dict[str, Any]:
    here = data.counted[(data.counted["level"] == level) & (data.counted["arm"] == arm)]
    finished = here.loc[here["status"] == "done", "seed"].tolist()
    curves: dict[str, dict[str, Any]] = {}
    declared = next(iter(by_axis))
    for axis, finals in by_axis.items():
        points = POINTS if axis == declared else FEWER_POINTS
        drawn = {metric: _curve(logged, metric, axis, finals, finished, points) for metric in metrics}
        curves[axis] = {metric: curve for metric, curve in drawn.items() if curve is not None}
    return {
        "level": level,
        "arm": arm,
        "on": sorted(data.contents(arm)),
        "planned": data.seeds_planned(level, arm),
        "finished": len(finished),
        "collapsed": data.collapsed(level, arm),
        "curves": curves,
    }


def _finals(finals: FinalValues, level: str, arm: str, control: str, metrics: list[str]) -> dict[str, list[Any]]:
    """By metric: the value at X in words, the difference to the control in words, how many pairs of seeds that has."""
    found: dict[str, list[Any]] = {}
    for metric in metrics:
        value = level_text(finals.interval(level, arm, metric), metric)
        if arm == control or not finals.collapses(level, control).of:
            found[metric] = [value, "", 0]
            continue
        difference = finals.difference(level, arm, control, metric)
        found[metric] = [value, change_text(difference, metric), difference.n]
    return found


# --- curves -------------------------------------------------------------------------------------------------


def _curve(
    logged: Mapping[int, Mapping[str, np.ndarray]],
    metric: str,
    axis: str,
    finals: FinalValues,
    finished: list[int],
    points: int,
) -> dict[str, Any] | None:
    """One metric of one cell on one axis, or None where no run of it logged that metric."""
    here = {seed: np.isfinite(run[metric]) for seed, run in sorted(logged.items())}
    runs = {
        seed: (logged[seed][f"budget/{axis}"][known], logged[seed][metric][known])
        for seed, known in here.items()
        if known.any()
    }
    if not runs:
        return None
    if metric.startswith("eval/"):
        return evaluation_curve(runs, finals.budget, [seed for seed in finished if seed in runs], finals.bases)
    return step_curve(runs, finals.budget, points, finals.bases)


def step_curve(
    runs: Mapping[int, tuple[np.ndarray, np.ndarray]],
    budget: float,
    points: int = POINTS,
    bases: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """A metric of every step: `grid` (first, last, number), `mean`, `low`, `high`, `n` and `seeds` (their values)."""
    grid = np.linspace(min(budget, max(xs[0] for xs, _ in runs.values())), budget, points)
    spacing = (grid[-1] - grid[0]) / (points - 1)
    thin = {seed: _on(grid, xs, running_mean(xs, values, spacing)) for seed, (xs, values) in runs.items()}
    bold = [_on(grid, xs, running_mean(xs, values, SMOOTHING * budget)) for xs, values in runs.values()]
    seeds = {str(seed): numbers(values, THIN_DIGITS) for seed, values in thin.items()}
    mean = _over_seeds(np.array(bold), _bases(runs, bases))
    return {"grid": [rounded(grid[0]), rounded(grid[-1]), points], **mean, "seeds": seeds}


def evaluation_curve(
    runs: Mapping[int, tuple[np.ndarray, np.ndarray]],
    budget: float,
    finished: list[int],
    bases: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """A metric of evaluations: `x`, `mean`, `low`, `high`, `n` where evaluations lie on average, and each seed's own.

    The last `x` is the budget, or the last point that some run reached.
    """
    whole = [runs[seed][0] for seed in finished] or [xs for xs, _ in runs.values()]
    number = min(map(len, whole))
    centres = np.mean([xs[:number] for xs in whole], axis=0)
    last = min(budget, *(xs[-1] for xs in whole))
    first = max(xs[0] for xs in whole)
    inside = centres[(centres > first) & (centres < last)]
    grid = np.array([first, *inside, last] if last > first else [first])
    bold = np.array([_on(grid, xs, values) for xs, values in runs.values()])
    seeds = {str(seed): {"x": numbers(xs), "y": numbers(values)} for seed, (xs, values) in runs.items()}
    return {"x": numbers(grid), **_over_seeds(bold, _bases(runs, bases)), "seeds": seeds}


def _on(grid: np.ndarray, xs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values on the grid by straight lines, NaN before the first and after the last."""
    # The last point of a grid is the mean or the end of the same numbers, up to rounding.
    slack = 1e-9 * (abs(grid[-1]) + 1)
    outside = (grid < xs[0] - slack) | (grid > xs[-1] + slack)
    return np.where(outside, math.nan, np.interp(grid, xs, values))


def _bases(runs: Iterable[int], bases: Mapping[int, int] | None) -> list[int]:
    return [(bases or {}).get(seed, -1) for seed in runs]


def _over_seeds(values: np.ndarray, bases: Sequence[int]) -> dict[str, Any]:
    """Mean and t interval of every column [S, K], over the seeds that are not NaN there, or their bases.

    `n` counts the seeds; otherwise as `stats.comparison`.
    """
    runs = (~np.isnan(values)).sum(axis=0)
    values = over_bases(values, bases)
    here = ~np.isnan(values)
    n = here.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(here, values, 0.0).sum(axis=0) / n
        squares = np.where(here, (values - mean) ** 2, 0.0).sum(axis=0)
        critical = np.array([critical_t(int(number) - 1) if number > 1 else math.nan for number in n])
        half = critical * np.sqrt(squares / (n - 1) / n)
    low, high = (np.where(n >= FOR_INTERVAL, end, math.nan) for end in (mean - half, mean + half))
    same = len(set(runs.tolist())) == 1
    return {
        "mean": numbers(mean),
        "low": numbers(low),
        "high": numbers(high),
        "n": int(runs[0]) if same else runs.tolist(),
    }


def numbers(values: Iterable[float], digits: int = DIGITS) -> list[float | int | None]:
    """So many significant digits of each, None for what is not finite."""
    return [rounded(float(value), digits) for value in values]


def rounded(value: float | int, digits: int = DIGITS) -> float | int | None:
    """A number with so many significant digits, as an int where that is shorter; None for what is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
