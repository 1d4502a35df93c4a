"""Training reward beside the evaluations: every run as arrays at its evaluations, and its answers by question.

A training metric at an evaluation is its mean over the steps of the last 5% of the budget X before it. While reward
rises, that mean is a little low, since it lags by half of its window. At step 0 it is the value of the first step,
whose rollouts come from the initial weights. That is one batch. So the correctness of training responses starts from
the probe instead, training questions under the training protocol, where it has at least as many answers as the batch:
as many with evaluation=standard and dense, four times as many with thorough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import FinalValues, evaluated_at
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.table_rows import groups_of

TRAILING = 0.05  # share of X, before an evaluation, over which training metrics are averaged
TRAINING = {"reward": "reward/outcome", "shaped": "reward/mean"}
EVALUATED = {
    "probe": "eval/probe/accuracy",
    "heldout_training": "eval/heldout_training/accuracy",
    "heldout": "eval/heldout/accuracy",
    "downstream": "eval/downstream/accuracy",
}
SAMPLED = "eval/sampler_downstream/accuracy"
KL = "eval/heldout_training/kl_initial"
# Beside reward and KL, what may announce a loss: read as the training metrics are.
ANNOUNCING = {"entropy": "train/entropy", "truncated": "rollout/truncated", "ess": "mismatch/ess_responses"}


@dataclass(frozen=True)
class Track:
    """One run at its K evaluations up to X; every array is [K], NaN where a metric was not logged.

    The last point is X itself. Where no evaluation lies exactly there, its values are on the straight line between the
    two evaluations around X: `around` holds their steps, `lean` the weight of the second. Where only the last step
    went beyond X, the last evaluation is the one there (`final_values.evaluated_at`).
    """

    level: str
    arm: str
    seed: int
    base: int  # of the initial policies; -1 in a sweep of one
    step: np.ndarray  # the evaluation's; at X the last one trained by then
    x: np.ndarray  # budget, on the axis of the final values
    reward: np.ndarray  # Pc: share of all responses that the training verifier called right; at step 0 the probe
    shaped: np.ndarray  # P: the whole training reward, before any filter
    probe: np.ndarray  # T': training questions, training protocol
    heldout_training: np.ndarray  # V': held-out questions, training protocol
    heldout: np.ndarray  # V: the same, evaluation protocol
    downstream: np.ndarray  # E: harder questions, evaluation protocol
    sampled: np.ndarray  # E of the weights that sampled the step's batch, where they lag behind; at step 0 E itself
    kl: np.ndarray  # of the policy from the initial one, nats a response
    entropy: np.ndarray  # nats
    truncated: np.ndarray  # share of training responses
    ess: np.ndarray  # effective sample size of the responses' weights, share
    around: tuple[int, int]
    lean: float

    @property
    def disagreement(self) -> np.ndarray:
        """[K], share: by how much more held-out questions are right to the training protocol and its grader.

        heldout_training less heldout. Of the protocol too, where the grader is the same: temperature and budget.
        """
        return self.heldout_training - self.heldout


@lru_cache(maxsize=4)  # nine figures and tables of a sweep ask for the same
def tracks(data: SweepData, finals: FinalValues) -> tuple[Track, ...]:
    """Every run that reached X = `finals.budget`, in declared order, up to there; nothing is extrapolated.

    Runs that collapsed before X, or were never evaluated, are left out: they have no evaluation to compare.
    """
    x = f"budget/{finals.axis}"
    logged = data.counted_points.sort_values("step")
    runs = {labels: run[run[x].notna()] for labels, run in groups_of(logged, LABELS, sort=False)}
    found = []
    for level, arm in data.run_arms:
        for seed in sorted(seed for at, name, seed in runs if (at, name) == (level, arm)):
            run = runs[level, arm, seed]
            suites = [name for name in EVALUATED.values() if name in run]
            evaluated = run[run[suites].notna().any(axis=1)] if suites else run.iloc[:0]
            if len(evaluated) and run[x].max() >= finals.budget:
                base = finals.bases.get(int(seed), -1)
                found.append(_track((level, arm, int(seed), base), run, evaluated, x, finals.budget))
    return tuple(found)


def by_condition(found: Sequence[Track]) -> dict[tuple[str, str], list[Track]]:
    """The tracks of every (level, arm), in the order they come."""
    grouped: dict[tuple[str, str], list[Track]] = {}
    for track in found:
        grouped.setdefault((track.level, track.arm), []).append(track)
    return grouped


def mean_of_tracks(runs: Sequence[Track], values: Sequence[float]) -> Interval:
    """The mean over the runs of an arm of one number each, for a new base model where these are of several."""
    return mean_of_runs(values, [track.base for track in runs])


def change(values: np.ndarray) -> np.ndarray:
    """A metric's change from step 0, [K]."""
    return values - values[0]


def gap(track: Track) -> np.ndarray:
    """How much more Pc gained than E since step 0, [K], share: G_k = (Pc_k - Pc_0) - (E_k - E_0).

    Pc_0 is the probe's accuracy at step 0: the first batch has about a tenth of a share of noise for 16 prompts of 8
    responses. What noise the probe has is in every G_k of a run. A gap is no harm yet, since harder questions gain less
    from the same learning; `divergence.measures.decomposition` splits it into its parts.
    """
    return change(track.reward) - change(track.downstream)


def _track(
    labels: tuple[str, str, int, int], run: pd.DataFrame, evaluated: pd.DataFrame, x: str, budget: float
) -> Track:
    at, steps = evaluated[x].to_numpy(float), evaluated["step"].to_numpy(int)
    here = int(np.searchsorted(at, budget, side="right"))  # how many lie at or before X
    points, last = at[:here], here - 1
    lean, after = 0.0, last
    if at[last] < budget and here < len(at):
        after, read = here, evaluated_at(run, x, budget)
        lean = float((read - at[last]) / (at[after] - at[last]))
        last, lean = (after, 0.0) if lean == 1 else (last, lean)
        points = np.append(points, budget)
    reached = run["step"].to_numpy(int)[np.searchsorted(run[x].to_numpy(float), points, side="right") - 1]
    values: dict[str, np.ndarray] = {}
    for name, metric in (TRAINING | ANNOUNCING).items():
        values[name] = _trailing(run, metric, x, points, TRAILING * budget)
    for name, metric in (EVALUATED | {"sampled": SAMPLED, "kl": KL}).items():
        logged = evaluated[metric].to_numpy(float) if metric in evaluated else np.full(len(at), math.nan)
        ends = (1 - lean) * logged[last] + lean * logged[after] if lean else logged[last]
        values[name] = np.append(logged[:here], ends)[: len(points)]
    around = (int(steps[last]), int(steps[after]))
    trained = run[run["step"] > 0]
    known = "budget/completions" in run and len(trained) > 0
    _start(values, evaluated, float(trained["budget/completions"].iloc[0]) if known else 0.0)
    return Track(*labels, step=reached, x=points, around=around, lean=lean, **values)


def _start(values: dict[str, np.ndarray], evaluated: pd.DataFrame, batch: float) -> None:
    """Take at step 0 what the evaluation there measured: Pc from the probe, E of the weights that sample from E.

    The probe must have as many answers as the first `batch`, where it logged how many it has.
    """
    if evaluated["step"].iloc[0] != 0:
        return
    responses = evaluated["eval/probe/responses"].iloc[0] if "eval/probe/responses" in evaluated else math.inf
    if math.isfinite(values["probe"][0]) and responses >= batch:
        values["reward"][0] = values["probe"][0]
    if np.isfinite(values["sampled"]).any():
        values["sampled"][0] = values["downstream"][0]


def _trailing(run: pd.DataFrame, metric: str, x: str, points: np.ndarray, width: float) -> np.ndarray:
    """[K] means over the steps with x in (point - width, point], at least the last of them."""
    every = run[metric].to_numpy(float) if metric in run else np.full(len(run), math.nan)
    logged = np.isfinite(every)
    if not logged.any():
        return np.full(len(points), math.nan)
    xs, values = run[x].to_numpy(float)[logged], every[logged]
    end = np.maximum(np.searchsorted(xs, points, side="right"), 1)
    start = np.minimum(np.searchsorted(xs, points - width, side="right"), end - 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[start]) / (end - start)


def shared(runs: Sequence[Track]) -> list[np.ndarray]:
    """For each run of an arm, the places in its arrays of the evaluations that all runs have, and of its last point.

    Two evaluations are the same where their steps are.
    """
    common = set.intersection(*(set(track.step[:-1].tolist()) for track in runs))
    return [np.array([*np.flatnonzero(np.isin(t.step[:-1], list(common))), len(t.step) - 1]) for t in runs]


def on_grid(runs: Sequence[Track], values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One grid [K] for an arm, and on it the values of its runs [S, K], interpolated between their own evaluations.

    The grid is the mean budget of every shared evaluation; `values` holds an array [own K] for each track.
    """
    grid = np.mean([track.x[where] for track, where in zip(runs, shared(runs))], axis=0)
    return grid, np.array([np.interp(grid, track.x, own) for track, own in zip(runs, values)])


@dataclass(frozen=True)
class Answers:
    """The answers of an arm's runs to the Q questions of a suite that all K evaluations share.

    `samples` and `correct` are [S, K + 1, Q]: the shared evaluations before X, then the two around X, of which the
    second has the weight `lean` [S].
    """

    step: np.ndarray  # [S, K]
    question: np.ndarray  # [Q]
    samples: np.ndarray
    correct: np.ndarray
    lean: np.ndarray

    @property
    def accuracy(self) -> np.ndarray:
        """[S, K, Q]: the share of a question's samples that were right; its mean over Q is the suite's accuracy."""
        return self.at_evaluations(self.correct / self.samples)

    def at_evaluations(self, values: np.ndarray) -> np.ndarray:
        """[S, K, ...] from [S, K + 1, ...]: the two around X become one, weighted."""
        lean = self.lean.reshape(-1, *[1] * (values.ndim - 2))
        ends = (1 - lean) * values[:, -2] + lean * values[:, -1]
        return np.concatenate([values[:, :-2], ends[:, None]], axis=1)


@lru_cache(maxsize=1)
def _answers_by_place(data: SweepData, suite: str) -> dict[tuple[str, str], pd.DataFrame]:
    """(level, arm) -> the answers of its runs to a suite."""
    of_suite = data.answers[data.answers["suite"] == suite]
    return dict(groups_of(of_suite, ["level", "arm"], sort=False))


def answers_of(data: SweepData, runs: Sequence[Track], suite: str, ends: bool = False) -> Answers | None:
    """The answers of an arm's runs to a suite, at their shared evaluations or only at the first of them and at X.

    The ends of a run may ask more questions than lie between, so `ends` may give more of them. None where the answers
    of a needed evaluation were not saved. Raises ValueError where the runs were not asked the same questions.
    """
    level, arm = runs[0].level, runs[0].arm
    own = _answers_by_place(data, suite).get((level, arm), data.answers.head(0))
    by_step = {labels: rows.sort_values("question") for labels, rows in own.groupby(["seed", "step"])}
    tables = []
    places = [where[[0, -1]] if ends and len(where) > 1 else where for where in shared(runs)]
    for track, where in zip(runs, places):
        steps = [*track.step[where][:-1].tolist(), *track.around]
        if any((track.seed, step) not in by_step for step in steps):
            return None
        tables += [by_step[track.seed, step] for step in steps]
    firsts = tables[:: len(tables) // len(runs)]
    if not all(np.array_equal(table["question"], firsts[0]["question"]) for table in firsts):
        raise ValueError(
            f"runs of {arm!r} have different questions in {suite}: compare runs with the same evaluation and task"
        )
    evaluated = [table["question"].to_numpy() for table in tables]
    questions = evaluated[0]
    if not all(np.array_equal(own, questions) for own in evaluated):
        questions = np.array(sorted(set.intersection(*map(set, evaluated))))
        tables = [table[np.isin(own, questions)] for own, table in zip(evaluated, tables)]
    shape = (len(runs), -1, len(questions))
    step = np.array([track.step[where] for track, where in zip(runs, places)])
    lean = np.array([track.lean for track in runs])
    samples, correct = (np.array([table[name] for table in tables]).reshape(shape) for name in ("n", "correct"))
    return Answers(step, questions, samples, correct, lean)
