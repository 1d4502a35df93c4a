"""Denominators and masks that losses get wrong: weights of tokens beside the published aggregations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from grpo_lab.instruments.loss_check.inputs import LossInputs, tabled
from grpo_lab.instruments.loss_check.published import Weights

# A row without a token in the loss is a row of the mean; not a fault, but not one of the two published denominators.
EMPTY_ROWS = "a row without a token in the loss still counts as a row"


def faulty_aggregations() -> Iterator[Weights]:
    """Aggregations with one fault, on the batches of the tables."""
    found = {name: dict(_of(batch)) for name, batch in tabled().items()}
    for aggregation, fault in found["plain"]:
        yield Weights(
            {"aggregation": aggregation}, fault, {name: one[aggregation, fault] for name, one in found.items()}
        )


def _of(batch: LossInputs) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """Aggregation and fault, and the weights [N, T]."""
    mask, attention = batch.mask, batch.attention_mask
    rows, width = mask.shape
    lengths, tokens = _lengths(mask), mask.sum()
    yield ("sequence_mean", EMPTY_ROWS), mask / lengths / rows
    everything = np.ones_like(mask)
    first, last = _ends(mask)
    for fault, wrong in {
        "the mask is one token too early: it has the last prompt token and lacks each last token": _shifted(mask, -1),
        "the mask is one token too late: it lacks each first token and has the one after the last": _shifted(mask, 1),
        "the first token of each response is left out": mask & ~first,
        "the last token of each response is left out": mask & ~last,
        "prompt tokens are in the loss": attention & (mask | ~batch.response_mask),
        "prompt tokens are in the loss, and response tokens that were taken out of it": attention,
        "response tokens that were taken out of the loss are in it": batch.response_mask,
        "the mask is not applied: prompts and padding are in the loss": everything,
    }.items():
        yield ("token_mean", fault), wrong / wrong.sum()
        yield ("sequence_mean", fault), wrong / _lengths(wrong) / rows
        yield ("sequence_sum", fault), wrong / rows
    yield (
        ("constant", "the mean is over all rows x columns: padding counts in the denominator"),
        mask / (rows * width),
    )
    yield ("token_mean", "the denominator also counts prompt tokens"), mask / attention.sum()
    yield ("token_mean", "there is no denominator: token losses are summed"), mask / 1.0
    yield ("token_mean", "the sum is divided by the tokens and by the rows"), mask / tokens / rows
    yield ("token_mean", "the denominator is one token too large"), mask / (tokens + 1)
    yield ("sequence_mean", "means of responses are summed over rows, not averaged"), mask / lengths
    yield ("sequence_mean", "the length of a response is counted one too large"), mask / (lengths + 1) / rows
    shorter = np.maximum(lengths - 1, 1)
    yield ("sequence_mean", "the length of a response is counted one too small"), mask / shorter / rows
    longest = mask.sum(axis=1).max()
    yield ("sequence_mean", "all responses are divided by the length of the longest"), mask / longest / rows
    prompt_too = _lengths(attention)
    yield ("sequence_mean", "the length of a response includes its prompt"), mask / prompt_too / rows
    yield ("sequence_mean", "sums of responses are divided by the padded width, not averaged over rows"), mask / width


def _lengths(mask: np.ndarray) -> np.ndarray:
    return np.maximum(mask.sum(axis=1, keepdims=True), 1)


def _shifted(mask: np.ndarray, by: int) -> np.ndarray:
    found = np.zeros_like(mask)
    if by < 0:
        found[:, :by] = mask[:, -by:]
    else:
        found[:, by:] = mask[:, :-by]
    return found


def _ends(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last token of each row."""
    order = mask.cumsum(axis=1)
    return mask & (order == 1), mask & (order == order[:, -1:])
