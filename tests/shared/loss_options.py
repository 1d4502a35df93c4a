"""Options of the loss with numbers under which each acts on the random scenes of helpers.py."""

from __future__ import annotations

from grpo_lab.tricks.aggregation import Balanced, Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import (
    BatchMean,
    ForwardCorrection,
    GroupMean,
    LeaveOneOut,
    LengthWeighted,
    NoBaseline,
    PassAtK,
    Weights,
)
from grpo_lab.tricks.baseline_group import Asymmetric, Opmd
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import Icepop, Mis, NoCorrection, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.entropy import Bonus, HighEntropyTokens, PositiveNll
from grpo_lab.tricks.importance import Sequence, SequenceProduct, SequenceToken
from grpo_lab.tricks.kl import AdaptiveK3Loss, K1Reward, K2Loss, K3Unbiased, NoKl
from grpo_lab.tricks.rejection import (
    Direction,
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
from grpo_lab.tricks.token_credit import ClipB, EntropyAdvantage, GtpoWeight, ProbabilityWeight, Uncertainty
from grpo_lab.tricks.update_mask import Cppo, Opsm, Vaco


def label(option: object) -> str:
    """Class and numbers, short enough for the name of a test."""
    return f"{type(option).__name__}({', '.join(str(getattr(v, 'value', v)) for v in vars(option).values())})"


BASELINES = (
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
    ForwardCorrection(0.2, 1.0, 0.0),
    Asymmetric(-0.1, Singleton.zero),
    Opmd(0.5, Singleton.zero),
)
SCALES = (
    NoScale(),
    GroupStd(0, 1e-6, False, Singleton.zero),
    GroupStd(1, 1e-6, False, Singleton.zero),
    GroupStd(1, 1e-6, True, Singleton.zero),
    GroupStd(0, 1e-6, False, Singleton.raw),
    Focal(1, 1e-6, False, Singleton.zero, 2.0),
    BatchStd(Deviation.centred, Weights.rows, False, 0, 1e-6, Floor.added),
    BatchStd(Deviation.raw, Weights.rows, False, 1, 1e-4, Floor.added),
    BatchStd(Deviation.centred, Weights.tokens, True, 1, 1e-8, Floor.in_variance),
    Gdpo(1e-4),
    MaxRl(AllWrong.zero),
    MaxRl(AllWrong.minus_one),
    InformativeShare(AlphaForm.informative_groups),
    InformativeShare(AlphaForm.nonzero_rewards),
    SignWeighted(0.1, 1.0),
)
SURROGATES = (
    Ppo(0.2, 0.28),
    DualClip(0.2, 0.2, 1.3),
    Cispo(1.1, 1.0, CapForm.absolute),
    Cispo(0.2, 0.2, CapForm.one_plus),
    Reinforce(),
    Sapo(1.0, 1.05),
    Gmpo(0.2, 0.2),
    Dppo(Divergence.tv, 0.05, 1.3),
    Dppo(Divergence.kl, 0.01, 20.0),
    Kimi(0.1),
    Topr(),
    Delight(0.5),
    ClipCov(0.2, 0.2, 0.3, 0.02, 5.0, Scope.step),
    KlCov(0.3, 1.0, Scope.step),
    Ipo(0.05, 0.1),
    RatioMask(0.2, 0.28),
    KimiToken(0.2, 0.28, 0.1),
    Sppo(0.3),
    RecOneSide(0.2, TokenWeight.one),
    RecOneSide(0.2, TokenWeight.ratio),
    RecRing(0.2, 0.4, TokenWeight.one),
    Vespo(2.0, 3.0, 3.0, 2.0),
    Dro(0.1),
    Fipo(0.2, 0.28, 8.0, 0.1, 0.2, 1.5, 0.2),
    M2po(0.04, Scope.step),
)
IMPORTANCES = (Sequence(20.0), SequenceToken(20.0), SequenceProduct(20.0))
AGGREGATIONS = (
    SequenceMean(0.0),
    TokenMean(Scope.step),
    PromptMean(),
    Balanced(),
    Constant(6, Width.budget),
    SequenceSum(),
)
TOKEN_CREDITS = (
    GtpoWeight(0.5, Uncertainty.surprisal),
    GtpoWeight(1.5, Uncertainty.entropy),
    ProbabilityWeight(0.5),
    EntropyAdvantage(0.4, 2.0),
    ClipB(0.5),
)
DENOMINATORS = (Original(), Survivors())
REJECTIONS = (
    TokenK1(False, 0.7, 1.4, BoundForm.ratio),
    TokenK2(False, 0.05),
    TokenK3(False, 0.05),
    SequenceSumK1(False, 0.6, 1.6, BoundForm.inverse),
    SequenceSumK2(False, 0.15),
    SequenceSumK3(False, 0.15),
    SequenceMeanK1(False, 0.8, 1.2, BoundForm.ratio),
    SequenceMeanK2(False, 0.06),
    SequenceMeanK3(False, 0.06),
    SequenceMaxK2(False, 0.2),
    SequenceMaxK3(False, 0.2),
    SequenceOutlier(False, 0.5, 1.9, BoundForm.ratio),
    TokenTv(False, 0.15),
    SequenceMeanTv(False, 0.15),
    TokenBinaryKl(False, 0.05, Direction.sampler_to_old),
    TokenBinaryKl(False, 0.05, Direction.old_to_sampler),
    SequenceMeanBinaryKl(False, 0.08, Direction.sampler_to_old),
    SequenceMeanBinaryKl(False, 0.08, Direction.either),
)
CORRECTIONS = (
    NoCorrection(),
    TisToken(1.5, 0.7),
    TisSequence(1.5),
    TisGeometric(1.2),
    Mis(0.5, 1.5),
    Icepop(0.7, 1.4),
)
UPDATE_MASKS = (Opsm(0.02), Vaco(0.2), Cppo(0.1, 0.02, 0.04, 0.8))
KLS = (
    NoKl(),
    K1Reward(0.1, 0.0),
    K2Loss(0.1, 0.0),
    K3Unbiased(0.1, 20.0, 0.0),
    AdaptiveK3Loss(0.1, 20.0, 0.0, 0.1, 16),
)
ENTROPIES = (Bonus(0.05), HighEntropyTokens(0.5), PositiveNll(0.1))
