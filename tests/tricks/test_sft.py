"""Fine-tuning before RL: which answers are learnt, with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from grpo_lab.tricks.sft import Demonstrations, NoSft, RejectionSampling

FIT = {"problems": 2, "epochs": 1, "batch_size": 2, "learning_rate": 0.1, "warmup_updates": 0}


def sampling(keep: int) -> RejectionSampling:
    return RejectionSampling(**FIT, samples=4, keep=keep)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        # right in the first group: lengths 9, 5, 5; the shortest is the second response, before its equal, the fourth
        (1, [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]),
        (2, [[0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]),
        (4, [[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]),
    ],
)
def test_the_shortest_right_answers_are_kept(keep: int, expected: list[list[int]]) -> None:
    right = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
    lengths = torch.tensor([[9, 5, 2, 5], [1, 1, 1, 1], [3, 3, 8, 3]])
    assert sampling(keep).picks(right, lengths).int().tolist() == expected
    assert sampling(keep).draws == 4


def test_demonstrations_draw_nothing_and_none_trains_nothing() -> None:
    demonstrations, right = Demonstrations(**FIT), torch.tensor([[True, False]])
    assert demonstrations.draws == 0 and demonstrations.picks(right, right.long()).equal(right)
    assert NoSft().is_no_op and not demonstrations.is_no_op


def test_more_answers_than_are_drawn_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match=r"RejectionSampling.keep must be at most samples \(4\), got 5"):
        sampling(5)
    with pytest.raises(ValueError, match=r"Demonstrations.epochs must be greater than 0"):
        Demonstrations(**FIT | {"epochs": 0})
