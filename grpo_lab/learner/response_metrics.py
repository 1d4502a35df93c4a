"""What the responses of a step look like: loops, second thoughts, lengths that were asked for, and coverage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_lab.tracking.metrics import pass_at_k
from grpo_lab.types import Float, Graded, Groups, Tensor

NGRAM = 6  # tokens; a repetition is a run of this many that the response has written before


def response_metrics(made: Groups, check_again: Sequence[str], best: Float[Tensor, "S"]) -> dict[str, float]:
    """Signs of every whole group of a step; `best` is the highest reward each training problem ever had."""
    rollouts, shaped = made.rollouts, made.shaped
    tokens, lengths = rollouts.tokens.tolist(), rollouts.lengths.tolist()
    repeated = [repetition(row[:length]) for row, length in zip(tokens, lengths)]
    again = [any(mark in text for mark in check_again) for text in made.texts]
    metrics = {
        "rollout/repetition": sum(repeated) / len(repeated),
        "rollout/check_again": sum(again) / len(again),
        "rollout/interrupted": float(rollouts.interrupted.double().mean()),
        "rollout/stopped": float(rollouts.looped.double().mean()),
        "rollout/best_gap": float((best[list(made.indices)] - shaped.reward.mean(dim=1)).mean()),
    }
    size = rollouts.group_size
    right = shaped.outcome.sum(dim=1).round().int().tolist()
    for k in (k for k in (2, 4, 8, 16, 32, 64) if k <= size):
        metrics[f"rollout/pass_at_{k}"] = sum(pass_at_k(size, count, k) for count in right) / len(right)
    return metrics | target_length_metrics(shaped)


def repetition(tokens: Sequence[int]) -> float:
    """The share of a response's runs of 6 tokens that it had written before; 0 for one that is shorter."""
    number = len(tokens) - NGRAM + 1
    if number <= 0:
        return 0.0
    return 1 - len({tuple(tokens[start : start + NGRAM]) for start in range(number)}) / number


def target_length_metrics(graded: Graded) -> dict[str, float]:
    """How well lengths follow those that the prompts asked for; nothing where none was."""
    if graded.target_length is None:
        return {}
    wanted, lengths = graded.target_length.double().flatten(), graded.lengths.double().flatten()
    metrics = {
        "target_length/mean": float(wanted.mean()),
        "target_length/error": float((lengths - wanted).abs().mean()),
    }
    spread = wanted - wanted.mean()
    if float(spread.abs().sum()) > 0:
        metrics["target_length/slope"] = float((spread * lengths).sum() / torch.sum(spread**2))
    return metrics
