"""Metrics of a step's responses: repetition, self-checks, target lengths and pass@k."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_lab.tasks.base import AnswerForm, Grader
from grpo_lab.tracking.metrics import pass_at_k
from grpo_lab.types import Float, Graded, Groups, Tensor

NGRAM = 6  # tokens; an n-gram is a repetition if it occurred earlier in the response


def response_metrics(made: Groups, check_again: Sequence[str], best: Float[Tensor, "S"]) -> dict[str, float]:
    """Response metrics over all whole groups of a step. `best` is each training problem's highest reward so far."""
    rollouts, shaped = made.rollouts, made.shaped
    tokens, lengths = rollouts.tokens.tolist(), rollouts.lengths.tolist()
    repeated = [repetition(row[:length]) for row, length in zip(tokens, lengths)]
    again = [any(mark in text for mark in check_again) for text in made.texts]
    metrics = {
        "rollout/repetition": sum(repeated) / len(repeated),
        "rollout/check_again": sum(again) / len(again),
        "rollout/interrupted": float(rollouts.interrupted.double().mean()),
        "rollout/stopped": float(rollouts.looped.double().mean()),
        "rollout/length_std_within": float(shaped.lengths.double().std(dim=1, correction=0).mean()),
        "rollout/length_std_across": float(shaped.lengths.double().mean(dim=1).std(correction=0)),
    }
    if shaped.in_statistics.any():
        gap = best[list(made.indices)] - group_means(shaped).squeeze(1)
        metrics["rollout/best_gap"] = float(gap.nanmean())
    size = rollouts.group_size
    right = (shaped.correctness * shaped.in_statistics).sum(dim=1).round().int().tolist()
    graded = shaped.in_statistics.sum(dim=1).tolist()
    for k in (k for k in (2, 4, 8, 16, 32, 64) if k <= size):
        chances = [pass_at_k(number, count, k) for number, count in zip(graded, right) if k <= number]
        if chances:
            metrics[f"rollout/pass_at_{k}"] = sum(chances) / len(chances)
    return metrics | target_length_metrics(shaped)


def unanswered(texts: Sequence[str], reward: Grader) -> dict[str, float]:
    """The share of responses without an answer in a form that the reward reads; {} where it reads any text."""
    if AnswerForm.free in reward.reads:
        return {}
    without = [not any(form.occurs_in(text) for form in reward.reads) for text in texts]
    return {"rollout/unanswered": sum(without) / len(without)}


def group_means(graded: Graded) -> Float[Tensor, "P 1"]:
    """The mean reward of each group's responses in the statistics; NaN for a group without any."""
    return torch.where(graded.in_statistics, graded.reward, torch.nan).nanmean(dim=1, keepdim=True)


def repetition(tokens: Sequence[int]) -> float:
    """The share of a response's 6-grams that occurred earlier in it; 0 for a response shorter than 6 tokens."""
    number = len(tokens) - NGRAM + 1
    if number <= 0:
        return 0.0
    return 1 - len({tuple(tokens[start : start + NGRAM]) for start in range(number)}) / number


def target_length_metrics(graded: Graded) -> dict[str, float]:
    """How well response lengths follow the target lengths of the prompts; {} without target lengths."""
    if graded.target_length is None:
        return {}
    targets, lengths = graded.target_length.double().flatten(), graded.lengths.double().flatten()
    metrics = {
        "target_length/mean": float(targets.mean()),
        "target_length/error": float((lengths - targets).abs().mean()),
    }
    spread = targets - targets.mean()
    if float(spread.abs().sum()) > 0:
        metrics["target_length/slope"] = float((spread * lengths).sum() / torch.sum(spread**2))
    return metrics
