"""Completions are 1-D tensors, whatever they are made of, and stay so through pickles and checkpoints."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import shapes_unchecked

from grpo_lab.rollout.grading import to_rollouts
from grpo_lab.rollout.groups import GroupMaker, StartedGroup, completions_of, group_to_state
from grpo_lab.types import Completion, Problem, StopReason

DTYPES = {"tokens": torch.long, "logprobs": torch.float64, "weight_versions": torch.long, "injected": torch.bool}
PUT_IN = Completion.of((5, 6, 7), (-0.1, 0.0, -0.3), (1, 1, 2), StopReason.LENGTH, (False, True, False))


@pytest.mark.parametrize("kind", [tuple, list, np.array, torch.tensor])
def test_an_engine_may_return_any_sequence_of_numbers(kind: Any) -> None:
    with shapes_unchecked():  # a run checks none
        made = Completion(kind((5, 6)), kind((-0.1, -0.2)), kind((3, 3)), StopReason.EOS)
    single = kind is torch.tensor
    assert {name: getattr(made, name).dtype for name in DTYPES} == DTYPES | (
        {"logprobs": torch.float32} if single else {}
    )
    assert made.ids == (5, 6) and made.weight_versions.tolist() == [3, 3] and made.injected.tolist() == [False, False]
    assert made.logprobs.tolist() == (torch.tensor([-0.1, -0.2]).tolist() if single else [-0.1, -0.2])


def test_numbers_computed_with_a_gradient_leave_it_behind() -> None:
    made = Completion(torch.tensor([5]), torch.tensor([-0.1], requires_grad=True), torch.tensor([0]), StopReason.EOS)
    assert not made.logprobs.requires_grad


@pytest.mark.parametrize(
    "columns",
    [((5, 6), (-0.1,), (0, 0)), ((5, 6), (-0.1, -0.2), (0,)), (5, -0.1, 0), (((5, 6),), ((-0.1, -0.2),), ((0, 0),))],
)
def test_a_completion_with_a_value_missing_says_what_to_return(columns: tuple) -> None:
    with shapes_unchecked(), pytest.raises(ValueError, match=r"one value per token.*tokens \(.*return the log-prob"):
        Completion(*columns, StopReason.EOS)
    with pytest.raises(ValueError, match=r"injected \(1,\)"):
        Completion.of((5, 6), (-0.1, -0.2), (0, 0), StopReason.EOS, (True,))


def test_completions_are_equal_by_their_values() -> None:
    assert replace(PUT_IN, tokens=PUT_IN.tokens.clone()) == PUT_IN and replace(PUT_IN, stop=StopReason.EOS) != PUT_IN
    for name in DTYPES:
        other = getattr(PUT_IN, name).clone()
        other[0] = not other[0] if name == "injected" else 9
        assert replace(PUT_IN, **{name: other}) != PUT_IN, name
    assert Completion.of((5, 6), (-0.1, 0.0), (1, 1), StopReason.LENGTH, (False, True)) != PUT_IN


def test_one_continues_another() -> None:
    further = Completion.of((8,), (-0.4,), (3,), StopReason.EOS)
    wanted = Completion.of(
        (5, 6, 7, 8), (-0.1, 0.0, -0.3, -0.4), (1, 1, 2, 3), StopReason.EOS, (False, True, False, False)
    )
    assert PUT_IN.continued(further) == wanted
    empty = Completion.unsampled((), StopReason.ABORTED)
    assert empty.continued(PUT_IN) == PUT_IN == replace(PUT_IN.continued(empty), stop=StopReason.LENGTH)


def test_a_row_of_a_batch_is_pickled_without_the_batch() -> None:
    """Ranks send each other completions; each of 500 rows would take the storage of all along."""
    rows = torch.arange(500 * 200).reshape(500, 200)
    row = Completion(rows[7], -rows[7].float(), rows[8], StopReason.EOS)
    written = pickle.dumps(row)
    assert len(written) < 10_000 and pickle.loads(written) == row == copy.deepcopy(row)
    assert pickle.loads(written).logprobs.dtype is torch.float32


def test_rows_of_rollouts_are_the_completions_that_they_were_padded_from() -> None:
    problems = [Problem(0, "q", "a", 1)]
    completions = [PUT_IN, Completion.of((8,), (-1.0,), (2,), StopReason.REPETITION)]
    rollouts = to_rollouts(problems, [(1,)], 2, completions)
    single = [replace(one, logprobs=one.logprobs.float()) for one in completions]
    assert completions_of(rollouts) == single and rollouts.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    nothing = to_rollouts(problems, [(1,)], 1, [Completion.unsampled((), StopReason.LENGTH)])
    assert nothing.tokens.shape == (1, 1) and not nothing.response_mask.any()


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_checkpoint_of_completions_as_plain_numbers_is_read(kind: Any) -> None:
    """Versions before tensors wrote `injected` as [] where nothing was, and the earliest not at all."""
    state = group_to_state(3, 7, 0.5, [PUT_IN, replace(PUT_IN, injected=torch.zeros(3, dtype=torch.bool))])
    first, second = state["responses"]
    assert first["tokens"] == [5, 6, 7] and first["injected"] == [False, True, False]
    for response in (first, second):
        response |= {name: kind(response[name]) for name in ("tokens", "logprobs", "versions")}
    del second["injected"]
    started = StartedGroup(3, Problem(0, "q", "a", 1), (1,), 7, 0.5, ())
    maker = SimpleNamespace(start=lambda *given: replace(started, done=given[3]))
    read = GroupMaker.from_state(maker, state).done
    assert read[0] == PUT_IN and read[1] == replace(PUT_IN, injected=torch.zeros(3, dtype=torch.bool))
