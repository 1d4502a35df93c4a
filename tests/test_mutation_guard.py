"""On every axis of the loss, any two options differ on one batch: no option is another one by accident.

The batch has cut rows, tied and untied groups, an all-wrong group of unequal shaped reward, lengths from 1 to
6, and ratios and weights beyond every bound. Every other axis stands at an option that lets the axis in
question act.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from helpers import F64, Scene, make_graded, make_rollouts, run_scene

from grpo_lab.config import options, slot_types
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import GroupMean, LeaveOneOut, NoBaseline
from grpo_lab.tricks.convention import Scope, Singleton, Width
from grpo_lab.tricks.correction import NoCorrection, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.entropy import NoEntropy
from grpo_lab.tricks.group_filter import Drop, Keep, Signal
from grpo_lab.tricks.importance import Token
from grpo_lab.tricks.kl import K3Loss, NoKl
from grpo_lab.tricks.rejection import NoRejection
from grpo_lab.tricks.reward_shaping import NoShaping, SoftOverlong
from grpo_lab.tricks.scale import GroupStd, NoScale
from grpo_lab.tricks.surrogate import Ppo, Reinforce
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score

OPTIONS = {
    "truncation": (Score(), MaskAfter(), MaskBefore()),
    "reward_shaping": (NoShaping(), SoftOverlong(6, 4, 0.5), SoftOverlong(6, 4, 1.0), SoftOverlong(6, 2, 1.0)),
    "group_filter": (Keep(), Drop(signal=Signal.outcome), Drop(signal=Signal.reward)),
    "correction": (NoCorrection(), TisToken(cap=1.1, floor=0.0), TisToken(cap=2.0, floor=0.0)),
    "rejection": (NoRejection(),),
    "baseline": (GroupMean(Singleton.zero), LeaveOneOut(Singleton.zero), NoBaseline()),
    "scale": (
        NoScale(),
        GroupStd(0, 1e-6, False, Singleton.zero),
        GroupStd(1, 1e-6, False, Singleton.zero),
        GroupStd(0, 0.1, False, Singleton.zero),
    ),
    "importance": (Token(log_ratio_limit=20.0), Token(log_ratio_limit=0.1)),
    "surrogate": (Ppo(0.2, 0.2), Ppo(0.2, 0.28), Ppo(0.3, 0.2), Reinforce()),
    "aggregation": (SequenceMean(0.0), TokenMean(Scope.step), PromptMean(), Constant(7, Width.budget), SequenceSum()),
    "denominator": (Original(), Survivors()),
    "kl": (NoKl(), K3Loss(0.04, 20.0), K3Loss(0.1, 20.0), K3Loss(0.04, 0.2)),
    "entropy": (NoEntropy(),),
}
# Rows leave and groups are shaped, so that filters, masks and denominators have something to do.
BACKGROUND = {
    "truncation": MaskAfter(),
    "reward_shaping": SoftOverlong(6, 4, 0.5),
    "group_filter": Keep(),
    "correction": TisToken(cap=2.0, floor=0.0),
    "kl": K3Loss(0.04, 20.0),
    "aggregation": TokenMean(Scope.step),
    "denominator": Survivors(),
}


def golden_batch() -> Scene:
    lengths = [1, 3, 6, 2, 1, 5, 6, 4, 2, 2, 2, 2]
    # mixed; all wrong, told apart by length alone; all right and equal
    outcome = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
    truncated = [[False, False, True, False], [False, False, True, False], [False, True, False, False]]
    in_groups = [lengths[4 * group : 4 * group + 4] for group in range(3)]
    graded = make_graded(outcome, lengths=in_groups, truncated=truncated)
    steps = torch.arange(72, dtype=F64).reshape(12, 6)
    logprobs = -2.2 + 0.5 * torch.sin(steps)
    old = logprobs + 0.6 * torch.cos(1.9 * steps)  # ratios from .55 to 1.82
    sampler = old + 0.9 * torch.sin(2.3 * steps)  # weights from .41 to 2.46
    ref = logprobs + 0.8 * torch.cos(0.6 * steps)
    return Scene(make_rollouts(lengths, 4, sampler=sampler), graded, logprobs, old, ref)


def test_every_option_of_the_loss_is_compared() -> None:
    for axis, compared in OPTIONS.items():
        assert {type(option) for option in compared} == set(options(slot_types()[axis]).values()), axis


@pytest.mark.parametrize(
    ("axis", "first", "second"),
    [(axis, *pair) for axis, compared in OPTIONS.items() for pair in combinations(compared, 2)],
    ids=lambda part: part if isinstance(part, str) else repr(part),
)
def test_two_options_of_an_axis_are_two(axis, first, second) -> None:
    background = {slot: option for slot, option in BACKGROUND.items() if slot != axis}
    one, other = (run_scene(golden_batch(), **background, **{axis: option})[1] for option in (first, second))
    assert torch.isfinite(one).all() and torch.isfinite(other).all()
    assert (one - other).abs().max() > 1e-4
