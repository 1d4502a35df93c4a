"""Token credit: advantages worked out by hand, statistics over the tokens in the loss only, and short runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers import F64, assert_close, composed, make_graded, make_rollouts
from short_runs import SMALL, metrics_of, run_in_process
from torch import Tensor

from grpo_lab.config.explain import formula
from grpo_lab.config.run_config import to_run
from grpo_lab.config.stages import CreditTricks
from grpo_lab.learner.update import Advantages, BeforeUpdates, make_inputs
from grpo_lab.learner.update import credited as credited_of
from grpo_lab.tricks.surrogate import Delight, SurrogateInputs
from grpo_lab.tricks.teacher import OnPolicyDistillation
from grpo_lab.tricks.token_credit import (
    ClipB,
    EntropyAdvantage,
    GtpoWeight,
    NoTokenCredit,
    ProbabilityWeight,
    TokenCredit,
    Uncertainty,
)
from grpo_lab.tricks.twin import NoTwin
from grpo_lab.types import WeightType

EXACT = 1e-12
MASK = torch.tensor([[True, True, True, False], [True, True, False, True]])
ADVANTAGES = torch.tensor([[2.0, 2.0, 2.0, 0.0], [-1.0, -1.0, 0.0, -1.0]], dtype=F64)
# Probabilities 1/2, 1/4, 1/8 and 1/2, 1/16, 1; outside the mask numbers that would decide every statistic.
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0, -900.0], [-1.0, -4.0, -900.0, 0.0]], dtype=F64) * math.log(2)
ENTROPY = torch.tensor([[1.0, 0.0, 2.0, 70.0], [0.5, 4.5, 70.0, 1.0]], dtype=F64)

GTPO, BY_ENTROPY = Uncertainty.surprisal, Uncertainty.entropy


def credited(credit: TokenCredit, advantages: Tensor = ADVANTAGES, mask: Tensor = MASK) -> Tensor:
    """What a token in the loss is left with; 0 elsewhere."""
    return torch.where(mask, credit(advantages, LOGPROBS, ENTROPY if credit.reads_entropy else None, mask), 0.0)


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (NoTokenCredit(), [[2, 2, 2, 0], [-1, -1, 0, -1]]),
        # surprisal in bits 1, 2, 3, mean 2: h/mean .5, 1, 1.5; and 1, 4, 0, mean 5/3: .6, 2.4, 0
        (GtpoWeight(0.1, GTPO), [[1.9, 2, 2.1, 0], [-0.96, -1.14, 0, -0.9]]),
        # 1 + 2 (h/mean - 1): 0, 1, 2 and .2, 3.8, -1, which is 0
        (GtpoWeight(2.0, GTPO), [[0, 2, 4, 0], [-0.2, -3.8, 0, 0]]),
        # entropies 1, 0, 2, mean 1; .5, 4.5, 1, mean 2: .25, 2.25, .5
        (GtpoWeight(0.4, BY_ENTROPY), [[2, 1.2, 2.8, 0], [-0.7, -1.5, 0, -0.8]]),
        # .2 p + .8
        (ProbabilityWeight(0.2), [[1.8, 1.7, 1.65, 0], [-0.9, -0.8125, 0, -1]]),
        (ProbabilityWeight(1.0), [[1, 0.5, 0.25, 0], [-0.5, -0.0625, 0, -1]]),
        # .4 H is .4, 0, .8, at most 2/2; .2, 1.8, .4, at most 1/2
        (EntropyAdvantage(0.4, 2.0), [[2.4, 2, 2.8, 0], [-0.8, -0.5, 0, -0.6]]),
        (EntropyAdvantage(4.0, 4.0), [[2.5, 2, 2.5, 0], [-0.75, -0.75, 0, -0.75]]),
    ],
    ids=repr,
)
def test_advantages_by_hand(credit: TokenCredit, expected: list[list[float]]) -> None:
    assert_close(credited(credit), expected, EXACT, "advantages")


def test_clip_b_by_hand() -> None:
    """D is .1534, -.3466, -.0099 and -.0966, .1080, 1: mean .1347, deviation .4195.

    The second token is 1.147 deviations below the mean, the fourth .551 and the third .345.
    """
    # Of the right response none leaves; of the wrong one the first does.
    assert credited(ClipB(0.5)).tolist() == [[2, 2, 2, 0], [0, -1, 0, -1]]
    assert credited(ClipB(0.6)).tolist() == ADVANTAGES.tolist()
    # With the signs exchanged it is the second token of the first response.
    assert credited(ClipB(1.1), -ADVANTAGES).tolist() == [[-2, 0, -2, 0], [1, 1, 0, 1]]
    assert credited(ClipB(1.2), -ADVANTAGES).tolist() == (-ADVANTAGES).tolist()


def test_clip_b_drops_no_token_where_all_are_alike_or_none_is_in_the_loss() -> None:
    certain = torch.zeros_like(LOGPROBS)
    assert ClipB(0.1)(-ADVANTAGES.abs(), certain, certain, MASK).tolist() == (-ADVANTAGES.abs()).tolist()
    assert credited(ClipB(0.1), mask=torch.zeros_like(MASK)).abs().sum() == 0


def test_a_response_of_one_token_or_of_certain_ones_keeps_its_advantage() -> None:
    first = MASK & (torch.arange(4) == 0)
    for by in Uncertainty:
        assert credited(GtpoWeight(0.7, by), mask=first).tolist() == torch.where(first, ADVANTAGES, 0.0).tolist()
        certain = torch.zeros_like(LOGPROBS)
        assert GtpoWeight(0.7, by)(ADVANTAGES, certain, certain, MASK).tolist() == ADVANTAGES.tolist()


EVERY = (
    GtpoWeight(0.3, GTPO),
    GtpoWeight(0.3, BY_ENTROPY),
    ProbabilityWeight(0.3),
    EntropyAdvantage(0.4, 2.0),
    ClipB(0.3),
)


@pytest.mark.parametrize("credit", EVERY, ids=repr)
def test_zero_stays_zero_and_no_advantage_changes_its_sign(credit: TokenCredit) -> None:
    none = credited(credit, torch.zeros_like(ADVANTAGES))
    assert (none == 0).all()
    for sign in (1, -1):
        assert (credited(credit, sign * ADVANTAGES) * sign * ADVANTAGES >= 0).all()


@pytest.mark.parametrize("credit", EVERY, ids=repr)
def test_a_gtpo_weight_keeps_a_responses_sum(credit: TokenCredit) -> None:
    keeps = torch.allclose(credited(credit).sum(dim=1), ADVANTAGES.sum(dim=1))
    assert keeps is isinstance(credit, GtpoWeight)


@pytest.mark.parametrize("credit", EVERY, ids=repr)
def test_tokens_outside_the_loss_decide_nothing(credit: TokenCredit) -> None:
    entropy = ENTROPY if credit.reads_entropy else None
    found = credit(ADVANTAGES, LOGPROBS, entropy, MASK)
    other = None if entropy is None else torch.where(MASK, entropy, -3.0)
    again = credit(ADVANTAGES, torch.where(MASK, LOGPROBS, -0.5), other, MASK)
    assert found[MASK].tolist() == again[MASK].tolist()


def test_wrong_numbers_are_refused() -> None:
    for kind, numbers, said in (
        (GtpoWeight, (0.0, GTPO), r"GtpoWeight\.beta must be greater than 0"),
        (ProbabilityWeight, (1.5,), r"ProbabilityWeight\.alpha must be in \(0, 1\]"),
        (ProbabilityWeight, (0.0,), r"ProbabilityWeight\.alpha must be in \(0, 1\]"),
        (EntropyAdvantage, (0.0, 2.0), r"EntropyAdvantage\.alpha must be greater than 0"),
        (EntropyAdvantage, (0.4, 1.0), r"EntropyAdvantage\.kappa must be greater than 1"),
        (ClipB, (0.0,), r"ClipB\.mu must be greater than 0"),
        (Delight, (0.0,), r"Delight\.eta must be greater than 0"),
    ):
        with pytest.raises(ValueError, match=said):
            kind(*numbers)


def test_delight_is_a_sigmoid_of_advantage_times_surprisal() -> None:
    """eta 1/2, A = 2: sigmoid(4 * surprisal); surprisal 0, ln 2 and ln 3 give 1/2, 16/17 and 81/82. A = -2 the rest."""
    for advantage, gates in ((2.0, [1 / 2, 16 / 17, 81 / 82]), (-2.0, [1 / 2, 1 / 17, 1 / 82]), (0.0, [1 / 2] * 3)):
        logprobs = -torch.tensor([[1.0, 2.0, 3.0]], dtype=F64).log()
        leaf, mask = logprobs.clone().requires_grad_(), torch.ones(1, 3, dtype=torch.bool)
        result = Delight(0.5)(SurrogateInputs(leaf, 0 * leaf, torch.full_like(logprobs, advantage), mask))
        result.token_loss.sum().backward()
        assert_close(result.weight[0], gates, EXACT, "gate")
        assert_close(leaf.grad[0], [-gate * advantage for gate in gates], EXACT, "no gradient through the gate")
        assert result.affected.tolist() == [[advantage != 0] * 3]


def taught(credit: TokenCredit, reward_weight: float) -> list[list[float]]:
    """The advantages of the loss under a teacher whose every log-prob is one nat higher."""
    graded = make_graded([[1.0, 0.0]])
    before = BeforeUpdates(
        logprobs=LOGPROBS, entropy=ENTROPY, old_logprobs=LOGPROBS, ref_logprobs=None, teacher_logprobs=LOGPROBS + 1,
        correction_weights=None, values=None, collision=None, learner_share=None, teacher_mask=MASK,
        kl_penalties=torch.zeros_like(LOGPROBS), rejected=graded, graded=graded,
        accepted_mask=MASK, loss_mask=MASK, metrics={},
    )  # fmt: skip
    teacher = OnPolicyDistillation("there", "", WeightType.fp32, 0.5, 0.0, reward_weight)
    rollouts = make_rollouts([4, 4], 2)
    rewarded = credited_of(
        CreditTricks(credit, NoTwin(), 0), rollouts, before, Advantages(ADVANTAGES, ADVANTAGES), step=0
    )
    inputs = make_inputs(teacher, rollouts, before, rewarded, 0.0)
    return inputs.advantages.tolist()


def test_a_teacher_adds_to_what_credit_has_left_and_replaces_it_where_it_replaces_the_reward() -> None:
    # half a nat on every token beside the advantages of (0.4, 2.0) above; a credit after it would have changed them
    expected = [[2.9, 2.5, 3.3, 0], [-0.3, 0, 0, -0.1]]
    assert_close(torch.tensor(taught(EntropyAdvantage(0.4, 2.0), 1.0)), expected, 1e-6, "credit first")
    for credit in EVERY:
        assert taught(credit, 0.0) == taught(NoTokenCredit(), 0.0)


def test_the_formula_names_the_advantage_before_and_after() -> None:
    def lines(*overrides: str) -> dict[str, str]:
        return dict(formula(to_run(composed(*overrides)[0])))

    plain, clipped = lines(), lines("token_credit=clip_b")
    assert clipped["A_S"] == plain["A"] and "A_S < 0" in clipped["A"] and "-2.5 * std(D)" in clipped["A"]
    both = lines("token_credit=gtpo_weight", "teacher=with_reward", "teacher.path=there")
    assert "A_R" in both["A"] and "h = -logp" in both["A_R"] and both["A_S"] == plain["A"]


# --- short runs ---------------------------------------------------------------------------------------------

# One on-policy update, where nothing else needs log-probs from before it.
SHORT = (*SMALL, "budget.amount=1", "updates=one")


def first_step(folder: Path, *overrides: str) -> tuple[float, float]:
    """The share of tokens whose advantage has changed, and the norm of the gradient."""
    name = "-".join(overrides) or "plain"
    metrics = metrics_of(run_in_process(folder, *SHORT, *overrides, name=name))[1]["metrics"]
    return metrics["active_fraction/token_credit"], metrics["train/gradient_norm"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    return first_step(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("option", "numbers"),
    [
        ("gtpo_weight", "beta=0.5"),
        pytest.param("gtpo_weight_entropy", "beta=0.5", marks=pytest.mark.extended),
        pytest.param("probability_weight", "alpha=0.5", marks=pytest.mark.extended),
        pytest.param("entropy_advantage", "alpha=0.4", marks=pytest.mark.extended),
        pytest.param("clip_b", "mu=1", marks=pytest.mark.extended),
    ],
)
def test_its_share_says_when_it_acts_and_microbatches_change_nothing(
    tmp_path: Path, plain: tuple[float, float], option: str, numbers: str
) -> None:
    words = [f"token_credit={option}", f"token_credit.{numbers}"]
    (share, norm), (again, cut) = (first_step(tmp_path, *words, *more) for more in ((), ("microbatch_tokens=100",)))
    assert share == again and share > 0 and plain[0] == 0
    assert cut == pytest.approx(norm, rel=1e-5) and norm != pytest.approx(plain[1], rel=0.01)
