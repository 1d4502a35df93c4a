"""Several rejections at once: the joint mask, what it settles, and which lists are refused."""

from __future__ import annotations

import pytest
import torch
from compositions import run_of
from helpers import F64, make_graded
from test_golden import LEARNER_LOGS, SAMPLED, SAMPLER_LOGS

from grpo_lab.learner.mismatch import member_metrics
from grpo_lab.tricks.convention import BoundForm
from grpo_lab.tricks.rejection import AllOf, Bounded, NoRejection, SequenceMeanK1, TokenK1, TokenTv

LOW = TokenK1(False, 0.8, 100.0, BoundForm.ratio)  # of the ratios 1.2, 3, .5 it keeps the first two
HIGH = TokenK1(False, 0.0, 2.0, BoundForm.ratio)  # and this one the first and the last


def test_a_token_stays_if_every_member_keeps_it() -> None:
    found = AllOf({"low": LOW, "high": HIGH})(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)
    assert found.tolist() == [[True, False, False, False], [True, True, True, False]]
    turned = AllOf({"high": HIGH, "low": LOW})(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)
    assert torch.equal(turned, found), "whatever their order"


def test_a_member_judges_all_sampled_tokens_also_those_that_another_removes() -> None:
    # the geometric mean of 1.2, 3 and .5 is 1.216; of 1.2 alone, which LOW and HIGH leave, it is 1.2
    for high, kept in ((1.21, False), (1.22, True)):
        mean = SequenceMeanK1(False, 0.9, high, BoundForm.ratio)
        found = AllOf({"low": LOW, "high": HIGH, "mean": mean})(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)
        assert found[0].tolist() == [kept, False, False, False]


@pytest.mark.parametrize("counted", [False, True])
def test_a_row_leaves_when_no_token_is_kept_by_all(counted: bool) -> None:
    """Each member keeps one of the first row's two tokens, so that by either alone the row would stay."""
    learner, sampler = torch.tensor([[0.5, -0.9], [0.0, 0.0]], dtype=F64) - 2, torch.full((2, 2), -2.0, dtype=F64)
    sampled = torch.ones(2, 2, dtype=torch.bool)
    low, high = (TokenK1(counted, *bounds, BoundForm.ratio) for bounds in ((0.8, 100.0), (0.0, 1.2)))
    both, graded = AllOf({"low": low, "high": high}), make_graded([[1, 0]], lengths=[[2, 2]])
    stays = both(learner, sampler, sampled)
    assert all(one(learner, sampler, sampled)[0].any() for one in (low, high)) and not stays[0].any()
    settled = both.settle(graded, stays)
    assert settled.in_loss.tolist() == [[False, True]] and settled.sampled_lengths.tolist() == [[0, 2]]
    assert settled.in_statistics.tolist() == [[counted, True]]
    assert member_metrics(both, learner, sampler, sampled) == {
        "mismatch/removed_by/low": 0.25,
        "mismatch/removed_by/high": 0.25,
    }


def test_a_single_rejection_has_no_members() -> None:
    assert member_metrics(LOW, LEARNER_LOGS, SAMPLER_LOGS, SAMPLED) == {}
    assert member_metrics(AllOf({"low": LOW}), LEARNER_LOGS, SAMPLER_LOGS, torch.zeros_like(SAMPLED)) == {}


def test_the_formula_names_every_member() -> None:
    written = AllOf({"low": LOW, "tv": TokenTv(False, 0.2)}).written()
    assert written == "(exp(prox - sampler) in [0.8, 100]) and (|exp(prox) - exp(sampler)| <= 0.2)"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, r"rejection.members must be one rejection or more, got \{\}"),
        ({"none": NoRejection()}, "rejection.members.none must be a single rejection with a bound, got NoRejection"),
        ({"more": AllOf({"low": LOW})}, "rejection.members.more must be a single rejection with a bound, got AllOf"),
        ({"low": LOW, "again": TokenK1(False, 0.8, 100.0, BoundForm.ratio)}, "again must be another rejection than"),
        ({"low": LOW, "tv": TokenTv(True, 0.2)}, r"tv.rejected_in_statistics must be as in low \(False\), got True"),
        ({"Low": LOW}, "rejection.members must be named by small letters"),
    ],
)
def test_lists_that_are_refused(members: dict[str, Bounded], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllOf(members)


@pytest.mark.parametrize(
    ("overrides", "members"),
    [
        ("", {"outlier": "SequenceOutlier", "mean": "SequenceMeanK1"}),
        ("+rejection@rejection.members.tv=token_tv", {"outlier": "", "mean": "", "tv": "TokenTv"}),
        ("rejection@rejection.members.mean=token_kpop", {"outlier": "", "mean": "TokenBinaryKl"}),
        ("~rejection@rejection.members.mean", {"outlier": "SequenceOutlier"}),
    ],
)
def test_members_are_added_replaced_and_removed_on_the_command_line(overrides: str, members: dict[str, str]) -> None:
    found = run_of("rejection=all_of", "sampler_precision=bf16", *overrides.split()).rejection.parts
    assert found.keys() == members.keys()
    assert all(type(found[name]).__name__ == kind for name, kind in members.items() if kind)
