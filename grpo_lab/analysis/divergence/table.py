"""Every measure of divergence of a sweep in one table, with the reason in words where there is no number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.divergence.leading import INDICATORS, LEADING, announced
from grpo_lab.analysis.divergence.measures import (
    DECOMPOSITION,
    change,
    coverage,
    crossover,
    decomposition,
    gap,
    gap_of_sampler,
    kl_frontier,
    kl_peak,
    onsets,
    transfer_slopes,
)
from grpo_lab.analysis.divergence.rank_agreement import RankedArms, arm_agreement, rankable
from grpo_lab.analysis.divergence.selection import (
    SelectedDifference,
    post_peak_drop,
    question_halves,
    selection_optimism,
    selection_regret,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.resampling import crossed_bootstrap
from grpo_lab.analysis.tracks import (
    EVALUATED,
    KL,
    TRAINING,
    Answers,
    Track,
    answers_of,
    by_condition,
    mean_of_tracks,
    shared,
    tracks,
)

PREFIX = "divergence/"
NOT_SAVED = "answers were not saved"
RESAMPLES = 2000  # of seeds and questions
_LOGGED = TRAINING | EVALUATED | {"kl": KL}
_SUITE = "downstream"
_REGRETS = ("last", "train_reward", "heldout")


@dataclass(frozen=True)
class Row:
    """One measure of one arm; NaN where it cannot be had, with the reason in `note`."""

    metric: str
    unit: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    note: str = ""
    crossed_low: float = math.nan
    crossed_high: float = math.nan


def divergence_table(
    data: SweepData, finals: FinalValues, rng: np.random.Generator, null: Sequence[Track] | None = None
) -> pd.DataFrame:
    """One row per level, arm and measure; what ranks the arms of a level has the arm "", and what announces a loss,
    over all runs, the level "" too. `null` are the runs that set its alarms, the control's if none are given.

    Columns: level, arm, metric, unit, value, low, high, n, note, crossed_low and crossed_high. `low` and `high` are a
    95% t interval over n seeds; for an onset and a crossover the range over leaving out each seed. arm_tau has none.
    The crossed ones are percentiles over resampled seeds and questions, for what is
    measured by question. Differences of accuracies are in percentage points (pp).

    Coverage where questions are new too, simulated for the drop after the peak (200 questions, 2 samples, 12
    evaluations): the t interval 90% to 93% for 3 seeds, 88% to 94% for 5, 78% to 93% for 10, since more seeds sharpen
    what knows nothing of questions; the crossed one 94% to 98%, 96% to 99% and 96% to 99%.
    """
    conditions = by_condition(tracks(data, finals))
    rankings, reasons = rankable(data, finals)
    halves: dict[int, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    for level in dict.fromkeys(level for level, _ in conditions):
        arms = {arm: runs for (at, arm), runs in conditions.items() if at == level}
        for arm, runs in arms.items():
            answers = answers_of(data, runs, _SUITE)
            if answers is not None and len(answers.question) not in halves and len(answers.question) > 1:
                halves[len(answers.question)] = question_halves(len(answers.question), rng)
            measured = [
                *_curve_rows(runs, finals),
                *_choice_rows(runs, answers, halves, rng),
                *_kl_rows(runs),
                *_part_rows(runs),
                *_coverage_rows(runs, answers_of(data, runs, _SUITE, ends=True), rng),
            ]
            rows += [{"level": level, "arm": arm} | asdict(row) for row in measured]
        if len(arms) > 1:
            ranked = _arm_rows(rankings.get(level), reasons.get(level, ""))
            rows += [{"level": level, "arm": ""} | asdict(row) for row in ranked]
    control = [track for (_, arm), runs in conditions.items() for track in runs if arm == data.control]
    every = [track for runs in conditions.values() for track in runs]
    rows += [{"level": "", "arm": ""} | asdict(row) for row in _leading_rows(every, null or control, rng)]
    names = ["level", "arm", "metric", "unit", "value", "low", "high", "n", "note", "crossed_low", "crossed_high"]
    return pd.DataFrame(rows, columns=names)


def _over_runs(runs: Sequence[Track], name: str, values: Sequence[float], unit: str = "pp", note: str = "") -> Row:
    """Mean and interval of one number per run of an arm, those that are NaN left out; pp are shares times 100."""
    scale = 100 if unit.startswith("pp") and unit != "pp/pp" else 1
    own = mean_of_tracks(runs, [scale * value for value in values])
    return Row(PREFIX + name, unit, own.mean, own.low, own.high, own.n, note)


def _absent(runs: Sequence[Track], *names: str) -> str:
    """Which of these metrics no run of the arm logged, in words."""
    missing = [_LOGGED[name] for name in names if all(np.isnan(getattr(track, name)).all() for track in runs)]
    return ", ".join(f"{metric} was not logged" for metric in missing)


def _curve_rows(runs: Sequence[Track], finals: FinalValues) -> Iterator[Row]:
    """The gap, the transfer slopes and the onsets."""
    absent = _absent(runs, "reward", "downstream")
    stopped = finals.stopped(runs[0].level, runs[0].arm)
    note = absent or (f"{stopped} collapsed before the common budget, left out" if stopped else "")
    yield _over_runs(runs, "gap_change", [gap(track)[-1] for track in runs], note=note)
    if any(np.isfinite(track.sampled).any() for track in runs):
        yield _over_runs(runs, "gap_change_sampler", [gap_of_sampler(track)[-1] for track in runs], note=note)
    slopes = [transfer_slopes(track) for track in runs]
    for part in slopes[0]:
        row = _over_runs(runs, f"transfer_slope{part}", [slope[part] for slope in slopes], "pp/pp")
        why = absent or "fewer than three evaluations with different reward"
        yield row if row.n else replace(row, note=why)
    axis = finals.axis.replace("_", " ")
    found = onsets(runs)
    for name in ("onset", "onset_after_peak"):
        if name not in found:
            yield Row(PREFIX + name, axis, note=absent or "every run lacks an evaluation")
            continue
        at = found[name]
        without = sum(not np.isfinite(gap(track)).all() for track in runs)
        lacking = f"; {without} runs that lack an evaluation left out" if without else ""
        yield Row(PREFIX + name, axis, at.x, at.low, at.high, at.n, at.note + lacking)


def _choice_rows(
    runs: Sequence[Track], answers: Answers | None, halves: dict[int, np.ndarray], rng: np.random.Generator
) -> Iterator[Row]:
    """The regret of stopping at the end, or at the checkpoint that a rule picks, instead of at the best one."""
    if answers is None or len(answers.question) < 2:
        for name in ("post_peak_drop", *(f"selection_regret_{rule}" for rule in _REGRETS), "selection_optimism"):
            why = NOT_SAVED if answers is None else "one question has no halves"
            yield Row(PREFIX + name, "pp", note=why)
        return
    accuracies, split = answers.accuracy, halves[len(answers.question)]
    own = [(track.reward[where], track.heldout[where]) for track, where in zip(runs, shared(runs))]
    drops = [post_peak_drop(accuracy, reward, split) for accuracy, (reward, _) in zip(accuracies, own)]
    held = np.mean([drop.held for drop in drops])
    absent = {"train_reward": _absent(runs, "reward"), "heldout": _absent(runs, "heldout")}
    note = absent["train_reward"] or f"reward had not fallen since the peak in {held:.0%} of splits"
    yield _by_question(runs, "post_peak_drop", drops, rng, note)
    picks = {
        "last": [len(reward) - 1 for reward, _ in own],
        "train_reward": [int(np.argmax(reward)) for reward, _ in own],
        "heldout": [int(np.argmax(heldout)) for _, heldout in own],
    }
    for rule, chosen in picks.items():
        if why := absent.get(rule):
            yield Row(f"{PREFIX}selection_regret_{rule}", "pp", note=why)
            continue
        regrets = [selection_regret(accuracy, pick, split) for accuracy, pick in zip(accuracies, chosen)]
        yield _by_question(runs, f"selection_regret_{rule}", regrets, rng)
    yield _over_runs(runs, "selection_optimism", [selection_optimism(accuracy, split) for accuracy in accuracies])


def _by_question(
    runs: Sequence[Track],
    name: str,
    differences: Sequence[SelectedDifference],
    rng: np.random.Generator,
    note: str = "",
) -> Row:
    row = _over_runs(runs, name, [one.value for one in differences], note=note)
    by_question = np.array([one.contributions for one in differences if one.held])
    return row if len(by_question) < 2 else _with_crossed(row, 100 * by_question, rng)


def _with_crossed(row: Row, by_question: np.ndarray, rng: np.random.Generator) -> Row:
    crossed = crossed_bootstrap(by_question, rng, RESAMPLES)
    return replace(row, crossed_low=crossed.low, crossed_high=crossed.high)


def _kl_rows(runs: Sequence[Track]) -> Iterator[Row]:
    """The frontier of downstream gain over distance from the initial policy, and its top."""
    names = {"kl_a": "pp/sqrt(nat)", "kl_b": "pp/sqrt(nat)", "kl_peak": "sqrt(nat)", "kl_peak_gain": "pp"}
    if _absent(runs, "kl"):
        yield from (Row(PREFIX + name, unit, note="KL was not logged") for name, unit in names.items())
        return
    fits = [kl_frontier(track.kl, change(track.downstream)) for track in runs]
    a, b = (_over_runs(runs, name, values, "pp/sqrt(nat)") for name, values in zip(("kl_a", "kl_b"), zip(*fits)))
    if not a.n:
        yield from (Row(PREFIX + name, unit, note="too few evaluations") for name, unit in names.items())
        return
    yield a
    yield b if b.low > 0 else replace(b, note=_flat_note(runs))
    tops = [_seen_top(track, *fit) for fit, track in zip(fits, runs)]
    found = sum(not math.isnan(top) for top, _ in tops)
    for name, values in zip(("kl_peak", "kl_peak_gain"), zip(*tops)):
        if found == len(runs):
            yield _over_runs(runs, name, values, names[name])
        else:  # the seeds that turned are no sample of all
            note = f"the peak lies outside the evaluated range in {len(runs) - found} of {len(runs)} runs"
            yield Row(PREFIX + name, names[name], note=note)


def _seen_top(track: Track, a: float, b: float) -> tuple[float, float]:
    """Distance and gain at the top of a fit; NaN where no evaluation lies on both of its sides."""
    distances = np.sqrt(np.maximum(track.kl, 0.0))
    top, gain = kl_peak(a, b, float(distances.max()))
    return (top, gain) if top >= distances[1:].min(initial=math.inf) else (math.nan, math.nan)


def _flat_note(runs: Sequence[Track]) -> str:
    """Note on a curve that does not turn: one that only fell has lost accuracy all the same."""
    end = mean_of_tracks(runs, [change(track.downstream)[-1] for track in runs])
    return "no peak; accuracy ends below its start" if end.high < 0 else "no over-optimisation seen"


def _part_rows(runs: Sequence[Track]) -> Iterator[Row]:
    """Decomposition of the gap."""
    parts = [decomposition(track) for track in runs]
    for name, ends in DECOMPOSITION.items():
        yield _over_runs(runs, f"waterfall_{name}", [part[name][-1] for part in parts], note=_absent(runs, *ends))


def _coverage_rows(runs: Sequence[Track], answers: Answers | None, rng: np.random.Generator) -> Iterator[Row]:
    """The change of pass@k at the largest k, and the k from which the base model is as good."""
    crossing = Row(PREFIX + "coverage_crossover", "samples", note=NOT_SAVED)
    if answers is None:
        yield crossing
        return
    by_question = coverage(answers)
    seeds, number, _ = by_question.shape
    changes = by_question.mean(axis=-1)
    single = "coverage needs at least two samples per question" if number == 1 else ""
    row = _over_runs(runs, f"coverage_at_{number}", changes[:, -1].tolist(), note=single)
    alone = seeds < 2 or len(answers.question) < 2
    yield row if alone else _with_crossed(row, 100 * by_question[:, -1], rng)
    found = crossover(changes)
    if single or found is None:
        yield replace(crossing, n=seeds, note=single or f"none up to {number}")
        return
    if seeds < 4:
        yield replace(crossing, value=float(found), n=seeds, note="")
        return
    again = [crossover(np.delete(changes, seed, axis=0)) for seed in range(seeds)]
    known = [k for k in again if k is not None]
    low, high = float(min([found, *known])), float(max([found, *known]))
    note = f"found in {len(known)} of {seeds} with a seed left out"
    yield replace(crossing, value=float(found), low=low, high=high, n=seeds, note=note)


def _arm_rows(here: RankedArms | None, why_not: str) -> Iterator[Row]:
    """Rank agreement of training reward and downstream accuracy over the arms of a level."""
    names = {"arm_regret": "pp", "arm_tau": "1"}
    if here is None or len(here.seeds) < 2:
        why = why_not or "fewer than two seeds have every arm"
        yield from (Row(PREFIX + name, unit, note=why) for name, unit in names.items())
        return
    found = arm_agreement(here.reward, here.downstream, here.bases)
    one = found.regret
    same = "one arm is best by both, whichever seed is left out" if found.same else ""
    note = "; ".join(filter(None, (same, here.note)))
    yield Row(PREFIX + "arm_regret", "pp", 100 * one.mean, 100 * one.low, 100 * one.high, one.n, note)
    note = "; ".join(filter(None, (f"{len(here.arms)} arms", here.note)))
    yield Row(PREFIX + "arm_tau", "1", found.tau, n=one.n, note=note)


def _leading_rows(runs: Sequence[Track], null: Sequence[Track], rng: np.random.Generator) -> Iterator[Row]:
    """How well, how early and how often in vain each indicator announces a downstream loss."""
    for name, indicator in INDICATORS.items() if runs else ():
        found = announced(runs, null, indicator, rng)
        caught, false = found.caught.interval, found.false.interval
        lead = float(np.median(found.lead)) if found.lead else math.nan
        alarm = "" if math.isnan(found.threshold) else f"alarm above {found.threshold:.3g}"
        why = alarm or found.note
        yield Row(f"{LEADING}auc_{name}", "1", found.auc.mean, found.auc.low, found.auc.high, found.auc.n, found.note)
        yield Row(f"{LEADING}caught_{name}", "share", caught.mean, caught.low, caught.high, caught.n, why)
        yield Row(f"{LEADING}time_{name}", "share of X", lead, n=len(found.lead), note="" if found.lead else "no alarm")
        yield Row(f"{LEADING}false_{name}", "share", false.mean, false.low, false.high, false.n, why)
