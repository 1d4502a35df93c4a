"""On every axis any two options differ: no option is another one by accident.

Those of the loss differ on one batch, those that choose what is generated or remembered in a short run.

The batch has cut rows, tied and untied groups, an all-wrong group of unequal shaped reward, a group of which one
row is counted, lengths from 1 to 6, and ratios, weights and entropies on both sides of every bound. It is cut into
several microbatches, so that conventions of the microbatch differ from those of the step. Every other axis stands
at an option that lets the axis in question act.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from compositions import listed, option_names, samples, with_own_test
from helpers import F64, Scene, inputs_of, loss_and_gradient, make_graded, make_rollouts, make_run
from short_runs import final_weights, metrics_of, run_in_process
from torch import Tensor

from grpo_lab.policy.batching import make_minibatch
from grpo_lab.tricks.aggregation import Balanced, Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import (
    BatchMean,
    ForwardCorrection,
    Gae,
    Greedy,
    GroupMean,
    LeaveOneOut,
    LengthAdaptiveGae,
    LengthWeighted,
    MonteCarlo,
    NoBaseline,
    OptimalToken,
    PassAtK,
    ReturnToGo,
    Weights,
)
from grpo_lab.tricks.baseline_group import Asymmetric, Kalman, Opmd
from grpo_lab.tricks.baseline_stateful import Ema, ValueTracker
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import Icepop, Mis, NoCorrection, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.entropy import Adaptive, Bonus, HighEntropyTokens, NoEntropy, PositiveNll
from grpo_lab.tricks.group_filter import Drop, Keep, Signal
from grpo_lab.tricks.importance import Sequence, SequenceProduct, SequenceToken, Token
from grpo_lab.tricks.kl import AdaptiveK1Reward, AdaptiveK3Loss, K1Reward, K2Loss, K3Loss, K3Unbiased, NoKl
from grpo_lab.tricks.old_policy import LogLinear, Recomputed, Sampler
from grpo_lab.tricks.rejection import (
    Direction,
    NoRejection,
    SequenceMaxK2,
    SequenceMaxK3,
    SequenceMeanBinaryKl,
    SequenceMeanK1,
    SequenceMeanK2,
    SequenceMeanK3,
    SequenceMeanTv,
    SequenceOutlier,
    SequenceSumK1,
    SequenceSumK2,
    SequenceSumK3,
    TokenBinaryKl,
    TokenK1,
    TokenK2,
    TokenK3,
    TokenTv,
)
from grpo_lab.tricks.reward_shaping import (
    BackwardCorrection,
    KimiLength,
    L1Exact,
    L1Max,
    NoShaping,
    SoftOverlong,
    SoftOverlongCorrectOnly,
    Unlikeliness,
)
from grpo_lab.tricks.scale import (
    AllWrong,
    BatchStd,
    Deviation,
    Focal,
    Gdpo,
    GroupStd,
    InformativeShare,
    NoScale,
    SignWeighted,
)
from grpo_lab.tricks.scale import GroupMean as MaxRl
from grpo_lab.tricks.surrogate import (
    Cispo,
    ClipCov,
    Delight,
    Divergence,
    Dppo,
    DualClip,
    Gmpo,
    Kimi,
    KlCov,
    Ppo,
    Reinforce,
    Sapo,
    Topr,
)
from grpo_lab.tricks.surrogate_off_policy import (
    Dro,
    Fipo,
    Ipo,
    KimiToken,
    M2po,
    RatioMask,
    RecOneSide,
    RecRing,
    Sppo,
    TokenWeight,
    Vespo,
)
from grpo_lab.tricks.token_credit import (
    ClipB,
    EntropyAdvantage,
    GtpoWeight,
    NoTokenCredit,
    ProbabilityWeight,
    Uncertainty,
)
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score
from grpo_lab.tricks.update_mask import Cppo, NoUpdateMask, Opsm, Vaco
from grpo_lab.types import Microbatching

OPTIONS = {
    "truncation": (Score(), MaskAfter(), MaskBefore()),
    "reward_shaping": (
        NoShaping(),
        SoftOverlong(6, 4, 0.5, 1.0, -1.0),
        SoftOverlong(6, 4, 1.0, 1.0, -1.0),
        SoftOverlong(6, 4, 0.5, 1.0, 0.0),
        SoftOverlong(6, 2, 1.0, 1.0, -1.0),
        SoftOverlong(8, 4, 1.0, 1.0, -1.0),
        SoftOverlong(6, 6, 1.0, 1.0, -1.0),
        SoftOverlongCorrectOnly(6, 4, 0.5, 1.0, -1.0),
        SoftOverlongCorrectOnly(6, 4, 1.0, 1.0, -1.0),
        SoftOverlongCorrectOnly(6, 2, 1.0, 1.0, -1.0),
        Unlikeliness(0.25),
        Unlikeliness(0.5),
        KimiLength(0.5, 0.0),
        KimiLength(1.0, 0.0),
        KimiLength(0.5, 0.4),
        KimiLength(0.5, 0.8),
        L1Exact(0.1, 2, 6),
        L1Exact(0.2, 2, 6),
        L1Max(0.1, 2, 6, 0.5),
        L1Max(0.1, 2, 6, 0.9),
        L1Max(0.2, 2, 6, 0.5),
        BackwardCorrection(0.1, 0.2, 1.0, 0.0),
        BackwardCorrection(0.3, 0.2, 1.0, 0.0),
        BackwardCorrection(0.1, 0.2, 1.0, -1.0),
    ),
    "group_filter": (Keep(), Drop(signal=Signal.outcome), Drop(signal=Signal.reward)),
    "old_policy": (Recomputed(), Sampler(), LogLinear()),
    "correction": (
        NoCorrection(),
        TisToken(cap=1.1, floor=0.0),
        TisToken(cap=2.0, floor=0.0),
        TisToken(cap=2.0, floor=0.7),
        TisSequence(1.1),
        TisSequence(1.6),
        TisGeometric(1.02),
        TisGeometric(1.2),
        Mis(0.0, 1.7),
        Mis(0.0, 2.0),
        Mis(0.6, 2.0),
        Icepop(0.0, 1.5),
        Icepop(0.0, 2.0),
        Icepop(0.6, 2.0),
    ),
    "rejection": (
        NoRejection(),
        TokenK1(False, 0.5, 1.6, BoundForm.ratio),
        TokenK1(False, 0.5, 1.6, BoundForm.inverse),
        TokenK1(True, 0.5, 1.6, BoundForm.ratio),
        TokenK1(False, 0.7, 1.6, BoundForm.ratio),
        TokenK1(False, 0.5, 1.3, BoundForm.ratio),
        TokenK2(False, 0.05),
        TokenK2(False, 0.3),
        TokenK2(True, 0.05),
        TokenK3(False, 0.05),
        TokenK3(False, 0.3),
        TokenK3(True, 0.05),
        SequenceSumK1(False, 0.5, 1.6, BoundForm.ratio),
        SequenceSumK1(False, 0.5, 1.6, BoundForm.inverse),
        SequenceSumK1(True, 0.5, 1.6, BoundForm.ratio),
        SequenceMeanK1(False, 0.8, 1.6, BoundForm.ratio),
        SequenceMeanK1(False, 0.8, 1.6, BoundForm.inverse),
        SequenceMeanK1(True, 0.8, 1.6, BoundForm.ratio),
        SequenceSumK2(False, 0.3),
        SequenceSumK2(True, 0.3),
        SequenceSumK3(False, 0.3),
        SequenceSumK3(True, 0.3),
        SequenceMeanK2(False, 0.16),
        SequenceMeanK2(True, 0.16),
        SequenceMeanK3(False, 0.16),
        SequenceMeanK3(True, 0.16),
        SequenceMaxK2(False, 0.17),
        SequenceMaxK2(True, 0.17),
        SequenceMaxK3(False, 0.17),
        SequenceMaxK3(True, 0.17),
        SequenceOutlier(False, 0.3, 1.2, BoundForm.ratio),
        SequenceOutlier(False, 0.3, 1.3, BoundForm.ratio),
        SequenceOutlier(True, 0.3, 1.2, BoundForm.ratio),
        TokenTv(False, 0.002),
        TokenTv(False, 0.003),
        TokenTv(True, 0.002),
        SequenceMeanTv(False, 0.002),
        SequenceMeanTv(False, 0.015),
        SequenceMeanTv(True, 0.015),
        TokenBinaryKl(False, 0.002, Direction.sampler_to_old),
        TokenBinaryKl(False, 0.003, Direction.sampler_to_old),
        TokenBinaryKl(True, 0.002, Direction.sampler_to_old),
        TokenBinaryKl(False, 0.02, Direction.old_to_sampler),
        TokenBinaryKl(False, 0.02, Direction.either),
        SequenceMeanBinaryKl(False, 0.002, Direction.sampler_to_old),
        SequenceMeanBinaryKl(False, 0.003, Direction.sampler_to_old),
        SequenceMeanBinaryKl(True, 0.02, Direction.sampler_to_old),
    ),
    "baseline": (
        GroupMean(Singleton.zero),
        GroupMean(Singleton.raw),
        LeaveOneOut(Singleton.zero),
        LeaveOneOut(Singleton.raw),
        NoBaseline(),
        BatchMean(Weights.rows),
        BatchMean(Weights.tokens),
        LengthWeighted(Singleton.zero),
        PassAtK(1),
        PassAtK(2),
        PassAtK(3),
        Greedy(),
        MonteCarlo(3),
        MonteCarlo(4),
        Gae(1.0, 1.0),
        Gae(1.0, 0.95),
        Gae(0.95, 1.0),
        ReturnToGo(),
        OptimalToken(True, 1e-8),
        OptimalToken(False, 1e-8),
        LengthAdaptiveGae(1.0, 0.4, 1.0),
        LengthAdaptiveGae(1.0, 0.8, 1.0),
        LengthAdaptiveGae(0.9, 0.8, 1.0),
        ForwardCorrection(0.2, 1.0, 0.0),
        ForwardCorrection(0.4, 1.0, 0.0),
        ForwardCorrection(0.3, 1.0, -1.0),
        Kalman(1e-5, 1e-2, 0.0, 1.0, 1e-8),
        Kalman(0.1, 1e-2, 0.0, 1.0, 1e-8),
        Kalman(1e-5, 0.1, 0.0, 1.0, 1e-8),
        Kalman(1e-5, 1e-2, 0.5, 1.0, 1e-8),
        Kalman(1e-5, 1e-2, 0.0, 0.1, 1e-8),
        Kalman(1e-5, 1e-2, 0.0, 1.0, 0.1),
        Asymmetric(-0.1, Singleton.zero),
        Asymmetric(-0.1, Singleton.raw),
        Asymmetric(-0.2, Singleton.zero),
        Opmd(1.0, Singleton.zero),
        Opmd(1.0, Singleton.raw),
        Opmd(0.5, Singleton.zero),
        Ema(0.95),
        Ema(0.5),
        ValueTracker(0.06, 0.875, 0.96),
    ),
    "scale": (
        NoScale(),
        GroupStd(0, 1e-6, False, Singleton.zero),
        GroupStd(1, 1e-6, False, Singleton.zero),
        GroupStd(0, 0.1, False, Singleton.zero),
        GroupStd(0, 0.1, False, Singleton.raw),
        GroupStd(0, 0.1, True, Singleton.zero),
        GroupStd(1, 0.1, True, Singleton.zero),
        Focal(0, 1e-6, False, Singleton.zero, 1.0),
        Focal(0, 1e-6, False, Singleton.zero, 2.0),
        BatchStd(Deviation.centred, Weights.rows, False, 0, 0.1, Floor.added),
        BatchStd(Deviation.centred, Weights.rows, False, 1, 0.1, Floor.added),
        BatchStd(Deviation.centred, Weights.rows, False, 0, 1e-6, Floor.added),
        BatchStd(Deviation.centred, Weights.rows, False, 0, 0.1, Floor.in_variance),
        BatchStd(Deviation.centred, Weights.rows, True, 0, 0.1, Floor.added),
        BatchStd(Deviation.centred, Weights.tokens, False, 0, 0.1, Floor.added),
        BatchStd(Deviation.centred, Weights.tokens, True, 0, 0.1, Floor.added),
        BatchStd(Deviation.raw, Weights.rows, False, 0, 0.1, Floor.added),
        BatchStd(Deviation.raw, Weights.tokens, False, 0, 0.1, Floor.added),
        MaxRl(AllWrong.zero),
        MaxRl(AllWrong.minus_one),
        InformativeShare(AlphaForm.informative_groups),
        InformativeShare(AlphaForm.nonzero_rewards),
        SignWeighted(1.0, 0.0),
        SignWeighted(0.0, 1.0),
        SignWeighted(0.1, 1.0),
        Gdpo(1e-4),
        Gdpo(0.1),
    ),
    "token_credit": (
        NoTokenCredit(),
        GtpoWeight(0.1, Uncertainty.surprisal),
        GtpoWeight(1.5, Uncertainty.surprisal),
        GtpoWeight(0.1, Uncertainty.entropy),
        ProbabilityWeight(0.2),
        ProbabilityWeight(0.6),
        EntropyAdvantage(0.4, 2.0),
        EntropyAdvantage(0.1, 2.0),
        EntropyAdvantage(0.4, 4.0),
        ClipB(1.0),
        ClipB(0.5),
    ),
    "importance": (
        Token(log_ratio_limit=20.0),
        Token(log_ratio_limit=0.1),
        Sequence(20.0),
        Sequence(0.05),
        SequenceToken(20.0),
        SequenceToken(0.05),
        SequenceProduct(20.0),
        SequenceProduct(0.2),
    ),
    "surrogate": (
        Ppo(0.2, 0.2),
        Ppo(0.2, 0.28),
        Ppo(0.3, 0.2),
        DualClip(0.2, 0.2, 1.5),
        DualClip(0.2, 0.2, 1.3),
        Cispo(1.2, 1.0, CapForm.absolute),
        Cispo(1.2, 1.0, CapForm.one_plus),
        Cispo(1.5, 1.0, CapForm.absolute),
        Cispo(1.2, 0.2, CapForm.absolute),
        Reinforce(),
        Sapo(1.0, 1.05),
        Sapo(1.0, 2.0),
        Sapo(2.0, 1.05),
        Gmpo(0.2, 0.2),
        Gmpo(0.2, 0.4),
        Gmpo(0.4, 0.2),
        Dppo(Divergence.tv, 0.05, 20.0),
        Dppo(Divergence.tv, 0.02, 20.0),
        Dppo(Divergence.tv, 0.05, 1.2),
        Dppo(Divergence.kl, 0.05, 20.0),
        Dppo(Divergence.kl, 0.01, 20.0),
        Kimi(0.1),
        Kimi(0.3),
        Topr(),
        Delight(1.0),
        Delight(0.5),
        ClipCov(0.2, 0.2, 0.3, 0.02, 5.0, Scope.step),
        ClipCov(0.2, 0.2, 0.3, 0.02, 5.0, Scope.microbatch),
        ClipCov(0.2, 0.2, 0.1, 0.02, 5.0, Scope.step),
        ClipCov(0.2, 0.2, 0.3, 0.1, 5.0, Scope.step),
        ClipCov(0.2, 0.2, 0.3, 0.02, 0.1, Scope.step),
        KlCov(0.3, 1.0, Scope.step),
        KlCov(0.3, 1.0, Scope.microbatch),
        KlCov(0.1, 1.0, Scope.step),
        KlCov(0.3, 0.5, Scope.step),
        Ipo(0.05, 0.1),
        Ipo(0.05, 0.0),
        Ipo(0.02, 0.1),
        RatioMask(0.2, 0.2),
        RatioMask(0.2, 0.3),
        RatioMask(0.3, 0.2),
        KimiToken(0.2, 0.2, 0.1),
        KimiToken(0.2, 0.3, 0.1),
        KimiToken(0.3, 0.2, 0.1),
        KimiToken(0.2, 0.2, 0.2),
        Sppo(0.2),
        Sppo(0.3),
        RecOneSide(0.2, TokenWeight.one),
        RecOneSide(0.3, TokenWeight.one),
        RecRing(0.2, 0.4, TokenWeight.one),
        RecRing(0.2, 0.3, TokenWeight.one),
        RecRing(0.2, 0.4, TokenWeight.ratio),
        Vespo(2.0, 3.0, 3.0, 2.0),
        Vespo(1.0, 3.0, 3.0, 2.0),
        Vespo(2.0, 2.0, 3.0, 2.0),
        Vespo(2.0, 3.0, 2.0, 2.0),
        Vespo(2.0, 3.0, 3.0, 1.0),
        Dro(0.1),
        Dro(0.3),
        Fipo(0.2, 0.2, 2.0, 0.1, 0.2, 1.3, 0.2),
        Fipo(0.3, 0.2, 2.0, 0.1, 0.2, 1.3, 0.2),
        Fipo(0.2, 0.3, 2.0, 0.1, 0.2, 1.3, 0.2),
        Fipo(0.2, 0.2, 4.0, 0.1, 0.2, 1.3, 0.2),
        Fipo(0.2, 0.2, 2.0, 0.0, 0.2, 1.3, 0.2),
        Fipo(0.2, 0.2, 2.0, 0.1, 0.1, 1.3, 0.2),
        Fipo(0.2, 0.2, 2.0, 0.1, 0.2, 1.1, 0.2),
        M2po(0.025, Scope.step),
        M2po(0.06, Scope.microbatch),
        M2po(0.08, Scope.step),
    ),
    "update_mask": (
        NoUpdateMask(),
        Opsm(0.02),
        Opsm(0.1),
        Vaco(0.2),
        Vaco(0.5),
        Cppo(0.04, 0.04, 0.16, 0.8),
        Cppo(0.06, 0.04, 0.16, 0.8),
        Cppo(0.04, 0.04, 0.04, 0.8),
        Cppo(0.04, 0.01, 0.01, 0.8),
        Cppo(0.04, 0.04, 0.16, 0.5),
    ),
    "aggregation": (
        SequenceMean(0.0),
        SequenceMean(0.5),
        TokenMean(Scope.step),
        TokenMean(Scope.microbatch),
        PromptMean(),
        Balanced(),
        Constant(7, Width.budget),
        Constant(7, Width.padded),
        SequenceSum(),
    ),
    "denominator": (Original(), Survivors()),
    "kl": (
        NoKl(),
        K1Reward(0.03, 0.0),
        K1Reward(0.1, 0.0),
        K2Loss(0.04, 0.0),
        K2Loss(0.1, 0.0),
        K3Loss(0.04, 20.0, 0.0),
        K3Loss(0.1, 20.0, 0.0),
        K3Loss(0.1, 0.5, 0.0),
        K3Unbiased(0.04, 20.0, 0.0),
        K3Unbiased(0.1, 20.0, 0.0),
        K3Unbiased(0.1, 0.5, 0.0),
        AdaptiveK1Reward(0.1, 0.0, 0.1, 20),
        AdaptiveK1Reward(0.1, 0.0, 0.1, 60),
        AdaptiveK3Loss(0.1, 20.0, 0.0, 0.1, 20),
        AdaptiveK3Loss(0.1, 20.0, 0.0, 0.1, 60),
        AdaptiveK3Loss(0.1, 20.0, 0.0, 0.3, 20),
    ),
    "entropy": (
        NoEntropy(),
        Bonus(0.01),
        Bonus(0.04),
        Adaptive(target=3.0, delta=0.015, largest=1.0),
        Adaptive(target=3.0, delta=0.03, largest=1.0),
        Adaptive(target=3.0, delta=0.03, largest=0.05),
        Adaptive(target=1.0, delta=0.025, largest=1.0),
        HighEntropyTokens(0.2),
        HighEntropyTokens(0.5),
        PositiveNll(0.1),
        PositiveNll(0.3),
    ),
}
# Rows leave and groups are shaped, so that filters, masks and denominators have something to do.
BACKGROUND = {
    "truncation": MaskAfter(),
    "reward_shaping": SoftOverlong(6, 4, 0.5, 1.0, -1.0),
    "group_filter": Keep(),
    "correction": TisToken(cap=2.0, floor=0.0),
    "kl": K3Loss(0.04, 20.0, 0.0),
    "aggregation": TokenMean(Scope.step),
    "denominator": Survivors(),
}
# Where that hides an axis: a second scale, a lone row that was centred at 0, a reward below 0, a mismatch weighed too,
# tokens that the clip has dropped before.
INSTEAD = {
    "baseline": {"scale": NoScale(), "kl": K1Reward(0.1, 0.0)},
    "scale": {"baseline": GroupMean(Singleton.raw), "reward_shaping": SoftOverlongCorrectOnly(6, 4, 0.5, 1.0, -1.0)},
    "old_policy": {"correction": NoCorrection()},
    "reward_shaping": {"scale": NoScale()},  # a factor on all rewards acts
    "update_mask": {"surrogate": Reinforce()},
}
MICROBATCH_TOKENS = 24
ENTROPIES = (2.2, 0.9)  # mean nats of the two steps before this one
DIVERGENCES = (0.5, 0.2)  # the same from the reference, nats per token


def golden_batch() -> Scene:
    lengths = [1, 3, 6, 5, 1, 5, 6, 4, 2, 2, 2, 2, 4, 3, 5, 2, 6, 2, 3, 5]
    # mixed; all wrong, told apart by length alone; all right and equal; one right row counted; one right of four
    outcome = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]]
    truncated = [[place == cut for place in range(4)] for cut in (2, 2, 1, 1, 0)]
    counted = [[True] * 4, [True] * 4, [True] * 4, [True, False, False, False], [True] * 4]
    in_groups = [lengths[4 * group : 4 * group + 4] for group in range(5)]
    target_length = [[tokens] * 4 for tokens in (3, 5, 2, 4, 6)]
    graded = make_graded(
        outcome, lengths=in_groups, truncated=truncated, in_statistics=counted, in_loss=counted,
        target_length=target_length, progress=[0.1, 0.9, 0.3, 0.7, 0.5],
    )  # fmt: skip
    steps = torch.arange(120, dtype=F64).reshape(20, 6)
    logprobs = -2.2 + 0.5 * torch.sin(steps)
    old = logprobs + 0.6 * torch.cos(1.9 * steps)  # ratios from .55 to 1.82
    sampler = old + 1.2 * torch.sin(2.3 * steps) * torch.cos(0.7 * torch.arange(20))[:, None]  # rows near and far
    chosen = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    graded = replace(graded, logprob=torch.where(chosen, sampler, 0.0).sum(dim=1).reshape(5, 4))
    ref = logprobs + 0.8 * torch.cos(0.6 * steps)
    rollouts = make_rollouts(lengths, 4, sampler=sampler)
    rollouts = replace(rollouts, weight_version=torch.arange(120).reshape(20, 6) % 4)  # ages up to three updates
    return Scene(rollouts, graded, logprobs, old, ref)


@cache
def gradient(axis: str, option: object) -> Tensor:
    """[N, T]; of the batch under the option, as the third step of a run: an adaptive coefficient has moved by then."""
    run = make_run(**BACKGROUND | INSTEAD.get(axis, {}) | {axis: option})
    scene, coef = golden_batch(), run.entropy.start
    for entropy in ENTROPIES:
        coef = run.entropy.next_coef(coef, entropy)
    if run.kl.adapts:
        strength = run.kl.start
        for divergence in DIVERGENCES:
            strength = run.kl.next_coef(strength, divergence, 20)
        run = make_run(**BACKGROUND | INSTEAD.get(axis, {}) | {axis: run.kl.at(strength)})
    inputs = replace(inputs_of(run, scene), entropy_coef=coef)
    return loss_and_gradient(run, inputs, scene.logprobs, MICROBATCH_TOKENS)[1]


def acts_in_the_batch(kind: type) -> bool:
    """Whether what an option does is still to be done when there is a batch."""
    return not (getattr(kind, "intervenes", False) or getattr(kind, "refills", False))


def test_every_option_of_the_loss_is_compared() -> None:
    # A twin is on no axis: it deals out again what the option of one selects (test_twin.py).
    assert OPTIONS.keys() == vars(make_run()).keys() - {"twin"}, "the slots of the loss"
    for axis, compared in OPTIONS.items():
        assert {type(option) for option in compared} == set(filter(acts_in_the_batch, listed(axis))), axis


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("axis", OPTIONS)
def test_an_option_that_is_not_listed_is_none_of_these_either(axis: str) -> None:
    """With the numbers of its file; one that does nothing with them on this batch gets others in the list above."""
    for name, option in samples()[axis].items():
        if type(option) in with_own_test(axis) and acts_in_the_batch(type(option)):
            for other in OPTIONS[axis]:
                gap = (gradient(axis, option) - gradient(axis, other)).abs().max()
                assert gap > 1e-4 or type(other) is type(option), f"{name} is {other}"


def test_the_batch_is_cut_into_several_microbatches() -> None:
    run = make_run(**BACKGROUND)
    inputs = inputs_of(run, golden_batch())
    assert len(make_minibatch(inputs, range(5), run.denominator, Microbatching(MICROBATCH_TOKENS, 192))) > 2


def test_two_options_of_an_axis_are_two() -> None:
    """One test, in which the shapes of every option are checked."""
    for axis, compared in OPTIONS.items():
        for first, second in combinations(compared, 2):
            one, other = gradient(axis, first), gradient(axis, second)
            assert torch.isfinite(one).all() and torch.isfinite(other).all(), (first, second)
            assert (one - other).abs().max() > 1e-4, f"{axis}: {first} is {second}"


# --- what is generated and remembered -----------------------------------------------------------------------

FAST = (
    "optimizer.learning_rate=1e-3 optimizer.warmup_updates=1 evaluation=brief evaluation.probe_problems=2 "
    "evaluation.heldout_problems=2 evaluation.downstream_problems=2"
)
# Axis -> what every run of it is, and its options, with numbers under which each acts within a few steps.
IN_RUNS = {
    "curriculum": (  # four steps a pass, so that a problem comes back while its past is known
        f"{FAST} task.train_size=64 budget.amount=8",
        ("uniform", "easy_to_hard", "prioritized", "kimi", "no_positive_resampling",
         "no_positive_resampling_last_group"),
    ),
    "truncation": (
        f"{FAST} budget.amount=2",
        ("score", "mask_after", "mask_before", "interrupt",
         "repetition_stop truncation.share=0.2 truncation.probability=0.6"),
    ),
    # Responses of 10 tokens and more are fined: groups of one outcome carry signal by that. A group that leaves scales
    # the gradient of the others, which a clip of its norm would undo.
    "group_filter": (
        f"{FAST} reward_shaping=soft_overlong reward_shaping.cache_tokens=15 denominator=survivors budget.amount=5 "
        "optimizer.max_grad_norm=100",
        ("keep", "drop", "drop_reward", "resample", "resample_three", "resample_reward", "active", "oversample_abort",
         "oversample_abort_partial"),
    ),
    "reference": (
        f"{FAST} kl=k3_loss kl.kl_coef=1 budget.amount=4",
        ("frozen", "reset reference.every=2", "reset_r1 reference.every=3", "ema"),
    ),
    "schedule": (  # times under which training ends in the middle of responses
        f"{FAST} updates=two cost_model.decode_step=0.01 cost_model.train_token=2e-5 "
        "cost_model.update=0 budget.amount=6",
        ("sync", "one_step_off", "off_policy_k", "interruptible schedule.max_lag=2", "in_flight schedule.max_lag=2"),
    ),
    "critic": (
        f"{FAST} baseline=gae scale=none budget.amount=3",
        ("separate_model", "separate_model_orz", "value_head"),
    ),
}  # fmt: skip


# test_reference_loop.py and the tests of curricula, filters, schedules and credit see each option by itself.
@pytest.mark.extended
@pytest.mark.parametrize("axis", IN_RUNS)
def test_two_options_that_act_while_generating_train_two_policies(axis: str, tmp_path: Path, tiny_base: Path) -> None:
    background, choices = IN_RUNS[axis]
    names = {choice.split()[0] for choice in choices} | {"unguessable"}  # acts in another world; see test_curricula.py
    choices = (*choices, *(name for name in option_names(axis) if name not in names))
    ends = {}
    for place, choice in enumerate(choices):
        folder = run_in_process(tmp_path / str(place), *background.split(), *f"{axis}={choice}".split())
        ends[choice] = torch.cat([weight.flatten() for weight in final_weights(folder).values()])
        shares = [row["metrics"].get(f"active_fraction/{axis}", 0.0) for row in metrics_of(folder)[1:]]
        switched_on = place > 0 and axis in ("curriculum", "truncation", "group_filter")
        assert (max(shares) > 0) is switched_on, choice
    for one, other in combinations(choices, 2):
        assert (ends[one] - ends[other]).abs().max() > 1e-5, (one, other)


@pytest.mark.extended
def test_what_a_reference_becomes_moves_nothing_without_a_tie_to_it(tmp_path: Path, tiny_base: Path) -> None:
    """The rule `reference_is_not_read`: the same bytes of metrics, whatever the reference is."""
    logs = [
        (run_in_process(tmp_path / name, *FAST.split(), "budget.amount=3", f"reference={name}") / "metrics.jsonl")
        for name in ("frozen", "reset", "ema")
    ]
    assert len({log.read_bytes() for log in logs}) == 1
