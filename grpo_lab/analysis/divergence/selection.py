"""The cost of choosing a checkpoint, chosen on one half of the questions and measured on the other.

The best of several noisy numbers looks better than it is: the best of 5, 10, 20 or 40 equal checkpoints by 1.16, 1.54,
1.87 or 2.16 standard errors of sampling. So the best checkpoint is picked on a random half A of the questions and
measured on the other half B, averaged over many halves and over A and B swapped. A difference measured like this is 0
on average where there is nothing to choose. It is cautious, since half of the questions pick worse than all of them.

Everything is computed for each seed, with a t interval over seeds, which speaks of other seeds and these questions.
Beside it stands `stats.resampling.crossed_bootstrap` of `contributions`, which resamples questions too and keeps the
picks. `halves` are [R, Q], true where a question is in A; `accuracy` is [K, Q], one run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

HALVES = 200  # each used twice, with A and B swapped
RESAMPLES = 2000
ROUNDING = 12  # decimals: equal shares may differ by the rounding of sums, and are ties


@dataclass(frozen=True)
class SelectedDifference:
    """One run's difference, measured on questions that did not choose.

    `contributions` [Q] have `value` as their mean; `held` is the share of splits that counted. Both are NaN where no
    split counted.
    """

    value: float
    contributions: np.ndarray
    held: float


def question_halves(questions: int, rng: np.random.Generator, number: int = HALVES) -> np.ndarray:
    """[number, Q]: random halves of the questions, the smaller one where their number is odd.

    Raises ValueError for fewer than two questions, which have no halves.
    """
    if questions < 2:
        raise ValueError(f"a suite of {questions} question cannot be halved: evaluate at least two")
    order = rng.permuted(np.tile(np.arange(questions), (number, 1)), axis=1)
    return order < questions // 2


def post_peak_drop(accuracy: np.ndarray, reward: np.ndarray, halves: np.ndarray) -> SelectedDifference:
    """How far the run fell from its best checkpoint to its end, over splits where reward did not fall with it.

    E^B at the k that is best on A, less E^B at the end, over splits with reward[end] >= reward[k]. Where reward and
    accuracy fall together the run does not diverge. `reward` is [K].
    """
    sides = _sides(halves)
    best = _best(accuracy, sides)
    return _measure(accuracy, sides, best, len(reward) - 1, reward[-1] >= reward[best])


def selection_regret(accuracy: np.ndarray, chosen: int, halves: np.ndarray) -> SelectedDifference:
    """The regret of a rule that picked checkpoint `chosen`: E^B at the k that is best on A, less E^B at `chosen`.

    Negative where the rule picked better than half of the questions did.
    """
    sides = _sides(halves)
    return _measure(accuracy, sides, _best(accuracy, sides), chosen, np.ones(len(sides), dtype=bool))


def best_shares(accuracy: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """[K]: in which share of the splits each checkpoint is the best on A, the earliest of equals."""
    best = _best(accuracy, _sides(halves))
    return np.bincount(best, minlength=len(accuracy)) / len(best)


def selection_optimism(accuracy: np.ndarray, halves: np.ndarray) -> float:
    """How much too good the best checkpoint looks on the questions that chose it: E^A less E^B at the k best on A.

    It holds for half of the questions; a choice on all of them flatters by about 1 / sqrt(2) of it.
    """
    sides = _sides(halves)
    best = _best(accuracy, sides)
    on_a, on_b = _means(accuracy, sides), _means(accuracy, ~sides)
    splits = np.arange(len(sides))
    return float(np.mean(on_a[splits, best] - on_b[splits, best]))


def _sides(halves: np.ndarray) -> np.ndarray:
    return np.concatenate([halves, ~halves])


def _means(accuracy: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """[2R, K]: accuracy of every checkpoint on one side of every split."""
    return (sides @ accuracy.T) / sides.sum(axis=1, keepdims=True)


def _best(accuracy: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """[2R]: the checkpoint that is best on A, the earliest of equals."""
    return np.argmax(np.round(_means(accuracy, sides), ROUNDING), axis=1)


def _measure(
    accuracy: np.ndarray, sides: np.ndarray, best: np.ndarray, other: int, counts: np.ndarray
) -> SelectedDifference:
    """Accuracy on B of `best` less `other`, over the splits that count, with what each question adds to it."""
    questions = accuracy.shape[1]
    if not counts.any():
        return SelectedDifference(math.nan, np.full(questions, math.nan), 0.0)
    on_b = ~sides[counts]
    picked = best[counts][:, None] == np.arange(len(accuracy))  # [splits, K]
    weights = picked.T.astype(float) @ (on_b / on_b.sum(axis=1, keepdims=True))  # of a question at a checkpoint
    contributions = questions * (weights * (accuracy - accuracy[other])).sum(axis=0) / counts.sum()
    return SelectedDifference(float(contributions.mean()), contributions, float(counts.mean()))
