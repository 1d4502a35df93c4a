"""Our options against the loss functions of eight peers: golden/peers, made by their own code on the same batches.

Where a peer is right, loss and gradient agree to 1e-8. Where it differs from its paper or from its own description, a
test named after the defect has both numbers. golden/peers/README.md names peers and versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    F64,
    Endings,
    advantages_of,
    assert_close,
    batch_of_rows,
    make_graded,
    make_rollouts,
    make_run,
    noise_of,
)
from torch import Tensor

from grpo_lab.config.run_config import RunConfig
from grpo_lab.learner.loss import mark_tokens, policy_loss
from grpo_lab.policy.batching import StepInputs
from grpo_lab.tricks.aggregation import Constant, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import (
    Credit,
    GroupMean,
    LeaveOneOut,
    LengthWeighted,
    NoBaseline,
    OptimalToken,
    PassAtK,
    Weights,
    rewards_by_token,
)
from grpo_lab.tricks.baseline_group import Asymmetric, Opmd
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import Icepop, Mis, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.denominator import Survivors
from grpo_lab.tricks.entropy import Bonus
from grpo_lab.tricks.importance import Sequence, SequenceProduct, SequenceToken, Token
from grpo_lab.tricks.kl import K2Loss, K3Loss, K3Unbiased
from grpo_lab.tricks.old_policy import Sampler
from grpo_lab.tricks.rejection import (
    AllOf,
    Direction,
    SequenceMaxK2,
    SequenceMaxK3,
    SequenceMeanBinaryKl,
    SequenceMeanK1,
    SequenceMeanK2,
    SequenceMeanK3,
    SequenceMeanTv,
    SequenceSumK1,
    SequenceSumK2,
    SequenceSumK3,
    TokenBinaryKl,
    TokenK1,
    TokenK2,
    TokenK3,
    TokenTv,
)
from grpo_lab.tricks.scale import BatchStd, Deviation, Gdpo, GroupStd, InformativeShare, NoScale
from grpo_lab.tricks.surrogate import (
    Cispo,
    ClipCov,
    Divergence,
    Dppo,
    DualClip,
    Gmpo,
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
    M2po,
    RatioMask,
    RecOneSide,
    RecRing,
    Sppo,
    TokenWeight,
    Vespo,
)
from grpo_lab.tricks.token_credit import ClipB
from grpo_lab.tricks.update_mask import Opsm, Vaco
from grpo_lab.types import Graded

FOLDER = Path(__file__).parents[1] / "golden" / "peers"
PEERS = ("trl", "verl", "openrlhf", "areal", "trinity", "swift", "prime_rl", "open_instruct")
BATCHES = ("ordinary", "extreme")
# Relative to the size of a number where that is above 1. AReaL's weights, temperatures of SAPO in TRL and Trinity,
# and one factor of the advantages in TRL, verl and Trinity are fp32.
CLOSE = 1e-8
SINGLE = 1e-6
WIDEST = 16
UNBOUNDED = 1e9


@cache
def recorded(peer: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{peer}.json").read_text())


@dataclass(frozen=True)
class Tokens:
    """A batch of golden/peers: tensors [N, T], where what is outside `mask` is junk."""

    given: dict[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor(self.given[name], dtype=F64)

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.given["width"])[None, :] < torch.tensor(self.given["lengths"])[:, None]

    @property
    def rows(self) -> int:
        return len(self.given["lengths"])


@cache
def tokens(name: str) -> Tokens:
    return Tokens(json.loads((FOLDER / "inputs.json").read_text())[name])


def step(
    run: RunConfig, batch: Tokens, learner: str = "old", reference: str = "ref", sampler: str = "sampler"
) -> StepInputs:
    """The batch after old policy, rejection and correction. `learner`: its log-probs before the updates."""
    sampled, before, mask = batch[sampler], batch[learner], batch.mask
    rollouts = make_rollouts(batch.given["lengths"], batch.given["group_size"], width=mask.shape[1], sampler=sampled)
    loss_mask = mask & run.rejection(before, sampled, mask)
    advantages = torch.where(loss_mask, batch["advantages"][:, None], 0.0)
    weights = run.correction(before, sampled, mask)
    old = run.old_policy(before, sampled)
    return StepInputs(rollouts, loss_mask, advantages, old, batch[reference], weights, run.entropy.start)


def ours(run: RunConfig, batch: Tokens, *, halves: bool = False, **how: str) -> tuple[Tensor, Tensor]:
    """Loss and gradient [N, T], of all rows at once or of two microbatches."""
    inputs, leaf = step(run, batch, **how), batch["logprobs"].requires_grad_()
    middle = batch.rows // 2
    cuts = [list(range(middle)), list(range(middle, batch.rows))] if halves else [list(range(batch.rows))]
    parts = [batch_of_rows(run, inputs, rows) for rows in cuts]
    parts = [replace(part, totals=replace(part.totals, num_microbatches=len(parts))) for part in parts]
    logprobs = [leaf[rows] for rows in cuts]
    marked = mark_tokens(run.loss_tricks, parts, [part.detach() for part in logprobs], noise_of(inputs.rollouts))
    loss = sum(policy_loss(run.loss_tricks, part, values, -values).loss for part, values in zip(marked, logprobs))
    loss.backward()
    assert not leaf.grad[~batch.mask].any()
    return loss.detach(), leaf.grad


def theirs(peer: str, name: str, batch: str) -> tuple[Tensor, Tensor]:
    """Loss and gradient [N, T] of a peer."""
    entry, mask = recorded(peer)["losses"][name][batch], tokens(batch).mask
    assert "gradient_of_padding" not in entry
    gradient = torch.zeros(mask.shape, dtype=F64)
    gradient[mask] = torch.tensor(entry["gradient"], dtype=F64)
    return torch.tensor(entry["loss"], dtype=F64), gradient


def values_of(peer: str, kind: str, name: str, batch: str) -> Tensor:
    """Numbers or a mask of a peer, [N, T] if it has one for each token, else [N]."""
    found, mask = recorded(peer)[kind][name][batch], tokens(batch).mask
    flat = torch.tensor([float(value) for value in found], dtype=F64)
    if len(flat) == len(mask):
        return flat
    spread = torch.zeros(mask.shape, dtype=F64)
    spread[mask] = flat
    return spread


def assert_equal(got: Tensor, expected: Tensor, why: str, tolerance: float = CLOSE) -> None:
    size = expected.abs().clamp(min=1)
    assert_close(got / size, expected / size, tolerance, why)


def differs(got: Tensor, expected: Tensor) -> float:
    """The largest gap, relative to the largest entry."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


# --- options that are a peer's ------------------------------------------------------------------------------

STEP, MICROBATCH = TokenMean(Scope.step), TokenMean(Scope.microbatch)
FREE, LIMITED = Token(100.0), Token(20.0)
PER_ROW = Sequence(100.0)
HIGHER, NARROW = Ppo(0.2, 0.28), Ppo(0.03, 0.04)
DUAL = DualClip(0.2, 0.28, 3.0)
ROWS, ROWS_EPS = SequenceMean(0.0), SequenceMean(1e-8)
ANY_RATIO = TisToken(UNBOUNDED, 0.0)
ONE, RATIO = TokenWeight.one, TokenWeight.ratio
BY_SAMPLER = Sampler()
OFF_POLICY = {"update_mask": Opsm(0.1)}


def run_of(surrogate: Any = HIGHER, aggregation: Any = STEP, importance: Any = FREE, **more: Any) -> RunConfig:
    return make_run(surrogate=surrogate, aggregation=aggregation, importance=importance, **more)


@dataclass(frozen=True)
class Same:
    """Options that equal a peer's function, and the part of it that they equal."""

    run: RunConfig
    halves: bool = False
    learner: str = "old"
    reference: str = "ref"
    sampler: str = "sampler"
    value: bool = True  # the loss too; else only its gradient, because the value is written another way
    tolerance: float = CLOSE
    only: tuple[str, ...] = BATCHES  # but for those below the bound that the option lacks


def cispo(cap: float, clip_low: float = 1.0) -> Cispo:
    return Cispo(cap, clip_low, CapForm.absolute)


def same(surrogate: Any = HIGHER, aggregation: Any = STEP, importance: Any = FREE, **more: Any) -> Same:
    kept = {name: more.pop(name) for name in tuple(more) if name in Same.__dataclass_fields__}
    return Same(run_of(surrogate, aggregation, importance, **more), **kept)


def limited(surrogate: Any = DUAL, aggregation: Any = STEP, **more: Any) -> Same:
    """As `same`, of peers that limit a log-ratio to 20 nats."""
    return same(surrogate, aggregation, LIMITED, **more)


TRL = {
    "grpo": same(aggregation=ROWS),
    "bnpo": same(),
    "dr_grpo": same(aggregation=Constant(WIDEST, Width.budget)),
    "dapo": same(),
    "luspo": same(aggregation=SequenceSum()),
    "grpo sequence": same(aggregation=ROWS, importance=PER_ROW),
    "bnpo sequence": same(importance=PER_ROW),
    "dr_grpo sequence": same(aggregation=Constant(WIDEST, Width.budget), importance=PER_ROW),
    "dapo sequence": same(importance=PER_ROW),
    "luspo sequence": same(aggregation=SequenceSum(), importance=PER_ROW),
    "grpo in halves": same(aggregation=ROWS, halves=True),
    "bnpo in halves": same(aggregation=MICROBATCH, halves=True),
    "dapo in halves": same(halves=True),
    "luspo in halves": same(aggregation=SequenceSum(), halves=True),
    "dapo delta 3": same(DUAL),
    "cispo 5": same(cispo(5.0)),
    "cispo 0.2, the default": same(cispo(0.2)),
    "sapo": same(Sapo(1.0, 1.05), ROWS, tolerance=SINGLE),
    "vespo": same(Vespo(2.0, 3.0, 3.0, 2.0), importance=SequenceProduct(100.0)),
    "dapo token_truncate": same(correction=TisToken(3.0, 0.4)),
    "dapo token_mask": same(correction=Icepop(0.4, 3.0)),
    "dapo sequence_truncate": same(correction=TisSequence(3.0)),
    "dapo sequence_mask": same(correction=Mis(0.4, 3.0)),
    "dapo kl 0.1": same(kl=K3Loss(0.1, 100.0, 0.0)),
    "dapo kl 0.1 bias-corrected": same(kl=K3Unbiased(0.1, 100.0, 0.0)),
    "dapo entropy 0.05": same(entropy=Bonus(0.05)),
    "grpo off-policy mask 0.1": same(aggregation=ROWS, **OFF_POLICY),
    "bnpo off-policy mask 0.1": same(**OFF_POLICY),
    "dapo off-policy mask 0.1": same(**OFF_POLICY),
    "dapo kl 0.1 off-policy mask 0.1": same(kl=K3Loss(0.1, 100.0, 0.0), **OFF_POLICY),
}
OUTLIERS = {"ppo_clip": {}, "ppo_clip seq_mean_k3": {"rejection": SequenceMeanK3(True, 0.2)}}
WEIGHED = {
    "token": {"correction": TisToken(2.0, 0.0)},
    "sequence": {"correction": TisSequence(2.0)},
    "token token_k2": {"correction": TisToken(2.0, 0.0), "rejection": TokenK2(True, 0.3)},
}
# In verl's bypass mode the corrections compare the learner at each update with the sampler.
BYPASS = {
    f"bypass {name} token-mean{counts}": limited(old_policy=BY_SAMPLER, learner="logprobs", **options, **left)
    for name, options in (
        *OUTLIERS.items(),
        *((f"reinforce {name}", {"surrogate": Reinforce(), **options}) for name, options in WEIGHED.items()),
    )
    for counts, left in (("", {"denominator": Survivors()}), (", counts of the trainer", {}))
}
COVARIANCE = {
    "clip_cov": ClipCov(0.2, 0.28, 1.0, 0.05, 5.0, Scope.microbatch),
    "kl_cov": KlCov(0.2, 1.0, Scope.microbatch),
}
GSPO_VERL = {"surrogate": NARROW, "importance": SequenceToken(20.0)}
VERL = {
    "vanilla token-mean": limited(),
    "vanilla seq-mean-token-sum": limited(aggregation=SequenceSum()),
    "vanilla seq-mean-token-mean": limited(aggregation=ROWS_EPS),
    "vanilla scale 16 seq-mean-token-sum-norm": limited(aggregation=Constant(WIDEST, Width.budget)),
    "vanilla no scale seq-mean-token-sum-norm": limited(aggregation=Constant(WIDEST, Width.padded)),
    "vanilla token-mean in halves": limited(halves=True),
    "vanilla seq-mean-token-mean in halves": limited(aggregation=ROWS_EPS, halves=True),
    "gspo token-mean": same(**GSPO_VERL),
    "gspo seq-mean-token-mean": same(aggregation=ROWS_EPS, **GSPO_VERL),
    "gspo token-mean in halves": same(HIGHER, importance=SequenceToken(20.0), halves=True),
    "gspo seq-mean-token-mean in halves": same(HIGHER, ROWS_EPS, SequenceToken(20.0), halves=True),
    "sapo seq-mean-token-mean": limited(Sapo(1.0, 1.05), ROWS_EPS),
    "gpg token-mean": limited(Reinforce()),
    "gpg seq-mean-token-mean": limited(Reinforce(), ROWS_EPS),
    "geo_mean seq-mean-token-mean": same(Gmpo(0.4, 0.4), ROWS, tolerance=2e-8),
    "clip_cov token-mean": same(COVARIANCE["clip_cov"], value=False),
    "clip_cov in halves": same(COVARIANCE["clip_cov"], value=False, halves=True),
    "kl_cov token-mean": same(COVARIANCE["kl_cov"]),
    "kl_cov in halves": same(COVARIANCE["kl_cov"], halves=True),
    "cispo token-mean": limited(cispo(1.28, 0.2)),
    "dro token-mean": same(Dro(0.1)),
    "dppo_tv token-mean": limited(Dppo(Divergence.tv, 0.15, 20.0)),
    "dppo_kl token-mean": limited(Dppo(Divergence.kl, 0.05, 20.0)),
    "dppo_tv clip_ratio_c 3 token-mean": limited(Dppo(Divergence.tv, 0.15, 3.0)),
    "vanilla with weights token 2": limited(correction=TisToken(2.0, 0.0)),
    **BYPASS,
}
GATES = {
    "token mask ratio": {"correction": Icepop(0.5, 2.0)},
    "token clip ratio": {"correction": TisToken(2.0, 0.5)},
    "token mask binary_kl": {"rejection": TokenBinaryKl(True, 0.02, Direction.sampler_to_old), "correction": ANY_RATIO},
    "token mask tv": {"rejection": TokenTv(True, 0.1), "correction": ANY_RATIO},
    "seq mask ratio": {"rejection": SequenceMeanK1(True, 0.9, 1.1, BoundForm.ratio), "correction": ANY_RATIO},
    "seq mask binary_kl": {
        "rejection": SequenceMeanBinaryKl(True, 0.03, Direction.sampler_to_old),
        "correction": ANY_RATIO,
    },
    "seq mask tv": {"rejection": SequenceMeanTv(True, 0.08), "correction": ANY_RATIO},
}
OPENRLHF = {
    "ppo": limited(HIGHER),
    "ppo sequences": limited(HIGHER, ROWS_EPS),
    "ppo dual clip 3": limited(),
    "gspo": same(NARROW, ROWS_EPS, PER_ROW),
    **{f"ppo {name}": limited(HIGHER, **options) for name, options in GATES.items()},
}
AREAL = {
    "ppo": same(),
    "ppo dual clip 3": same(DUAL),
    "ppo sequence": same(NARROW, importance=PER_ROW),
    "ratio token mask": same(correction=Icepop(0.5, 2.0), tolerance=SINGLE),
    "ratio token clamp": same(correction=TisToken(2.0, 0.5), tolerance=SINGLE),
    "ratio sequence mask mean": same(
        rejection=SequenceMeanK1(True, 0.5, 2.0, BoundForm.ratio), correction=TisGeometric(UNBOUNDED), tolerance=SINGLE
    ),
    "ratio sequence mask sum": same(
        rejection=SequenceSumK1(True, 0.5, 2.0, BoundForm.ratio), correction=TisGeometric(UNBOUNDED), tolerance=SINGLE
    ),
    "ratio sequence clamp mean": same(correction=TisGeometric(2.0), tolerance=SINGLE, only=("ordinary",)),
    "sapo": same(Sapo(1.0, 1.05)),
    "sapo sequence": same(Sapo(1.0, 1.05), importance=PER_ROW),
}
TRINITY = {
    "rec none none": same(Reinforce()),
    "rec none importance_sampling": same(cispo(UNBOUNDED)),
    "rec one-side none": same(RecOneSide(0.2, ONE)),
    "rec one-side importance_sampling": same(RecOneSide(0.2, RATIO)),
    "rec two-side importance_sampling": same(RatioMask(0.2, 0.2)),
    "rec two-side none": same(RecRing(0.2, UNBOUNDED, ONE)),
    "rec ring none": same(RecRing(0.2, 0.4, ONE)),
    "rec ring importance_sampling": same(RecRing(0.2, 0.4, RATIO)),
    "rec gspo-one-side": same(RecOneSide(0.03, RATIO), ROWS, SequenceToken(100.0)),
    "rec none k2 0.05": same(Dro(0.1)),
    "sppo": same(Sppo(0.3)),
    "sppo token-mean": same(Sppo(0.3)),
    "sppo seq-mean-token-sum": same(Sppo(0.3), SequenceSum()),
    "sppo seq-mean-token-mean": same(Sppo(0.3), ROWS_EPS),
    "topr": same(Topr()),
    "cispo": same(cispo(1.28)),
    "gspo": same(NARROW, ROWS_EPS, SequenceToken(100.0)),
    "ppo": limited(),
    "importance sampling": limited(Ppo(UNBOUNDED, UNBOUNDED)),
    "ppo sequence masking 0.1": limited(update_mask=Opsm(0.1), sampler="old"),
    "ppo sequence masking 0.3": limited(update_mask=Opsm(0.3), sampler="old"),
}
SWIFT = {
    "grpo": same(aggregation=ROWS),
    "bnpo": same(),
    "dr_grpo": same(aggregation=Constant(WIDEST, Width.budget)),
    "dapo": same(),
    "sapo": same(Sapo(1.0, 1.05), ROWS),
    "fipo": same(Fipo(0.2, 0.28, 32.0, 0.0, 0.2, 4.0, 0.2)),
    "fipo two-sided, half-life 4, safe 1.5": same(Fipo(0.2, 0.28, 4.0, 0.2, 0.2, 1.5, 0.2)),
    "cispo 5": same(cispo(5.0)),
    "grpo sequence": same(aggregation=ROWS, importance=PER_ROW),
    "grpo sequence_token": same(aggregation=ROWS, importance=SequenceToken(100.0)),
    "dapo token_truncate": same(correction=TisToken(2.0, 0.0)),
    "dapo token_mask": same(correction=Icepop(0.0, 2.0)),
    "dapo sequence_truncate": same(correction=TisGeometric(1.1)),
    "dapo sequence_mask": same(rejection=SequenceMeanK1(True, 0.0, 1.1, BoundForm.ratio), correction=ANY_RATIO),
    "dapo kl 0.1": same(kl=K3Loss(0.1, 20.0, 10.0)),
    "grpo off-policy mask 0.1": same(aggregation=ROWS, **OFF_POLICY),
    "dapo off-policy mask 0.1": same(**OFF_POLICY),
}
PRIME_RL = {
    "ipo 0.1, 0.001": same(Ipo(0.1, 1e-3), old_policy=BY_SAMPLER),
    "ipo 0.3, 0": same(Ipo(0.3, 0.0), old_policy=BY_SAMPLER),
    # -r * A there, -sg(r) * A * logp here: one gradient
    "dppo 0.2, 0": same(Dppo(Divergence.tv, 0.2, UNBOUNDED), old_policy=BY_SAMPLER, value=False),
    "dppo 0.2, 0.001": same(
        Dppo(Divergence.tv, 0.2, UNBOUNDED), old_policy=BY_SAMPLER, value=False, kl=K2Loss(2e-3, 0.0),
        reference="sampler",
    ),
}  # fmt: skip
OPEN_INSTRUCT = {
    "dapo": same(),
    "cispo": same(cispo(1.28)),
    "dapo clamp to 2": same(correction=TisToken(2.0, 0.0)),
    "dapo mask 0.5 to 2": same(correction=Icepop(0.5, 2.0)),
    "dapo sequences mask 0.9 to 1.1": same(
        rejection=SequenceMeanK1(True, 0.9, 1.1, BoundForm.ratio), correction=TisGeometric(UNBOUNDED)
    ),
}
EQUAL = {
    "trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "areal": AREAL, "trinity": TRINITY, "swift": SWIFT,
    "prime_rl": PRIME_RL, "open_instruct": OPEN_INSTRUCT,
}  # fmt: skip
# Recorded for options that do not exist here yet, or that no option is meant to be.
NO_OPTION = {
    "trl": set(),
    "verl": {"vanilla token-sum", "geo_mean with weights token 2"},
    "openrlhf": set(),
    "areal": {"ratio sequence mask max"},
    "trinity": {"cispo with masks", "rec none advantage"},
    "swift": set(),
    "prime_rl": set(),
    "open_instruct": set(),
}  # fmt: skip
# Defects and other divisions of the work; each has a test below.
DEFECTS = {
    "trl": {"grpo entropy 0.05", "vespo token_truncate", "vespo token_mask"},
    "verl": {
        "sapo token-mean", "geo_mean token-mean", "geo_mean token-mean in halves",
        "geo_mean seq-mean-token-mean in halves",
    },
    "openrlhf": {"gspo seq mask ratio", "gspo seq mask binary_kl", "gspo seq mask tv"},
    "areal": {"m2po 0.04"},
    "trinity": {"sapo", "sppo seq-mean-token-sum-norm", "opmd"},
    "swift": {"dapo token_truncate kl 0.1", "bnpo off-policy mask 0.1", "dapo kl 0.1 off-policy mask 0.1"},
    "prime_rl": set(),
    "open_instruct": {"vaco 0.25", "vaco lower bound 0.25"},
}  # fmt: skip


@pytest.mark.parametrize("peer", PEERS)
def test_every_recorded_loss_is_compared_or_has_its_reason(peer: str) -> None:
    listed: ListLike[set[str]] = (set(EQUAL[peer]), NO_OPTION[peer], DEFECTS[peer])
    assert sum(map(len, listed)) == len(set.union(*listed)), "in one list only"
    assert set.union(*listed) == set(recorded(peer)["losses"])


@pytest.mark.parametrize(("peer", "name"), [(peer, name) for peer in PEERS for name in EQUAL[peer]])
def test_loss_and_gradient_are_those_of_the_peer(peer: str, name: str) -> None:
    option = EQUAL[peer][name]
    for batch in option.only:
        loss, gradient = theirs(peer, name, batch)
        got, slopes = ours(
            option.run, tokens(batch), halves=option.halves, learner=option.learner, reference=option.reference,
            sampler=option.sampler,
        )  # fmt: skip
        assert gradient.any(), "a loss without a gradient shows nothing"
        assert_equal(slopes, gradient, f"gradient of {peer} {name}, {batch} batch", option.tolerance)
        if option.value:
            assert_equal(got, loss, f"loss of {peer} {name}, {batch} batch", option.tolerance)


# --- weights, masks and advantages --------------------------------------------------------------------------

WEIGHTS = {
    "trl": {
        "token_truncate": TisToken(3.0, 0.4), "token_mask": Icepop(0.4, 3.0), "sequence_truncate": TisSequence(3.0),
        "sequence_mask": Mis(0.4, 3.0),
    },
    "verl": {
        "token 2": TisToken(2.0, 0.0), "sequence 2": TisSequence(2.0), "token 0.5 to 2": Icepop(0.5, 2.0),
        "sequence 0.5 to 2": Mis(0.5, 2.0),
    },
    "areal": {"ratio token mask": Icepop(0.5, 2.0), "ratio token clamp": TisToken(2.0, 0.5)},
    "open_instruct": {"dapo clamp to 2": TisToken(2.0, 0.0), "dapo mask 0.5 to 2": Icepop(0.5, 2.0)},
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("peer", "name"), [(peer, name) for peer, names in WEIGHTS.items() for name in names])
def test_weights_against_mismatch_are_those_of_the_peer(peer: str, name: str, batch: str) -> None:
    given = tokens(batch)
    found = WEIGHTS[peer][name](given["old"], given["sampler"], given.mask)
    expected = values_of(peer, "weights", name, batch)
    expected = expected if expected.ndim == 2 else expected[:, None].expand(given.mask.shape)
    tolerance = SINGLE if peer == "areal" else CLOSE
    assert_equal(found[given.mask], expected[given.mask], f"{peer} {name}", tolerance)
    assert (expected[given.mask] != expected[given.mask][0]).any()


REJECTIONS = {
    "token_k1 0.6_1.4": TokenK1(True, 0.6, 1.4, BoundForm.inverse),
    "token_k2 0.05": TokenK2(True, 0.05),
    "token_k3 0.05": TokenK3(True, 0.05),
    "seq_sum_k1 0.5_1.5": SequenceSumK1(True, 0.5, 1.5, BoundForm.inverse),
    "seq_sum_k2 0.2": SequenceSumK2(True, 0.2),
    "seq_sum_k3 0.2": SequenceSumK3(True, 0.2),
    "seq_mean_k1 0.8_1.1": SequenceMeanK1(True, 0.8, 1.1, BoundForm.inverse),
    "seq_mean_k2 0.06": SequenceMeanK2(True, 0.06),
    "seq_mean_k3 0.06": SequenceMeanK3(True, 0.06),
    "seq_max_k2 0.2": SequenceMaxK2(True, 0.2),
    "seq_max_k3 0.2": SequenceMaxK3(True, 0.2),
}


def kept_by(rejection: Any, batch: str, **swapped: str) -> Tensor:
    given = tokens(batch)
    old, sampler = given[swapped.get("old", "old")], given[swapped.get("sampler", "sampler")]
    return rejection(old, sampler, given.mask).to(F64)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", REJECTIONS)
def test_masks_are_those_of_verl(name: str, batch: str) -> None:
    assert_close(kept_by(REJECTIONS[name], batch), values_of("verl", "masks", name, batch), 0, name)


@pytest.mark.parametrize("batch", BATCHES)
def test_masks_in_a_row_are_those_of_verl(batch: str) -> None:
    each = {"token": TokenK2(True, 0.1), "response": SequenceMeanK3(True, 0.06)}
    both = kept_by(AllOf(each), batch)
    if batch == "ordinary":
        assert not any(torch.equal(both, kept_by(one, batch)) for one in each.values())
    assert_close(both, values_of("verl", "masks", "token_k2,seq_mean_k3 0.1,0.06", batch), 0, "both must keep a token")


NATS = (math.exp(-0.3), math.exp(0.3))
AREAL_MASKS = {
    "ratio token mask": TokenK1(True, 0.5, 2.0, BoundForm.ratio),
    "ratio sequence mask mean": SequenceMeanK1(True, 0.5, 2.0, BoundForm.ratio),
    "ratio sequence mask sum": SequenceSumK1(True, 0.5, 2.0, BoundForm.ratio),
    "kl_k1 token mask": TokenK1(True, *NATS, BoundForm.ratio),
    "kl_k1 sequence mask mean": SequenceMeanK1(True, *NATS, BoundForm.ratio),
    "kl_k1 sequence mask sum": SequenceSumK1(True, *NATS, BoundForm.ratio),
    "kl_k2 token mask": TokenK2(True, 0.05),
    "kl_k2 sequence mask mean": SequenceMeanK2(True, 0.05),
    "kl_k2 sequence mask sum": SequenceSumK2(True, 0.05),
    "kl_k2 sequence mask max": SequenceMaxK2(True, 0.05),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", AREAL_MASKS)
def test_masks_are_those_of_areal(name: str, batch: str) -> None:
    assert_close(kept_by(AREAL_MASKS[name], batch), values_of("areal", "masks", name, batch), 0, name)


ZERO = Singleton.zero
BY_TOKENS = BatchStd(Deviation.centred, Weights.tokens, True, 1, 1e-8, Floor.in_variance)
ADVANTAGES = {
    "trl": {
        "group": (GroupMean(ZERO), GroupStd(1, 1e-4, False, ZERO)),
        "batch": (GroupMean(ZERO), BatchStd(Deviation.raw, Weights.rows, False, 1, 1e-4, Floor.added)),
        "none": (GroupMean(ZERO), NoScale()),
    },
    "verl": {
        "grpo": (GroupMean(ZERO), GroupStd(1, 1e-6, False, ZERO)),
        "grpo without std": (GroupMean(ZERO), NoScale()),
        "rloo": (LeaveOneOut(ZERO), NoScale()),
        "rloo_vectorized": (LeaveOneOut(ZERO), NoScale()),
        "opo": (LengthWeighted(ZERO), NoScale()),
        "reinforce_plus_plus_baseline": (GroupMean(ZERO), BY_TOKENS),
        "reinforce_plus_plus": (NoBaseline(), BY_TOKENS),
        "gpg": (GroupMean(ZERO), InformativeShare(AlphaForm.nonzero_rewards)),
    },
    "trinity": {
        "rec": (GroupMean(ZERO), NoScale()),
        "opmd mean": (GroupMean(ZERO), NoScale()),
        "asymre": (Asymmetric(-0.1, ZERO), NoScale()),
    },
}


def graded(batch: str) -> Graded:
    given, size = tokens(batch).given, tokens(batch).given["group_size"]
    rewards, lengths = (
        [given[name][start : start + size] for start in range(0, len(given[name]), size)]
        for name in ("rewards", "lengths")
    )
    return make_graded(rewards, lengths=lengths)


def advantage_of_rows(peer: str, name: str, batch: str) -> Tensor:
    """[N]; every token of a row has its row's."""
    found = values_of(peer, "advantages", name, batch)
    if found.ndim == 1:
        return found
    first, mask = found[:, 0], tokens(batch).mask
    assert_close(found, torch.where(mask, first[:, None], 0.0), CLOSE, "one advantage for a row")
    return first


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("peer", "name"), [(peer, name) for peer, names in ADVANTAGES.items() for name in names])
def test_advantages_are_those_of_the_peer(peer: str, name: str, batch: str) -> None:
    got = advantages_of(graded(batch), *ADVANTAGES[peer][name]).flatten()
    expected = advantage_of_rows(peer, name, batch)
    assert expected.any()
    assert_equal(got, expected, f"{peer} {name}", 1e-7)


@pytest.mark.parametrize("batch", BATCHES)
def test_remax_is_that_of_verl(batch: str) -> None:
    got = torch.tensor(tokens(batch).given["rewards"], dtype=F64) - tokens(batch)["reward_of_the_greedy"]
    assert_equal(got, advantage_of_rows("verl", "remax", batch), "reward less the greedy response's")


def of_tokens(batch: str) -> Tensor:
    """The advantages [N, T]."""
    return tokens(batch)["advantages"][:, None].expand(tokens(batch).mask.shape)


@pytest.mark.parametrize("batch", BATCHES)
def test_update_mask_of_negative_responses_is_that_of_trl(batch: str) -> None:
    given = tokens(batch)
    stays = Opsm(0.1)(given["logprobs"], given["sampler"], of_tokens(batch), given.mask)
    expected = values_of("trl", "weights", "off-policy mask 0.1", batch)
    assert_close(torch.where(given.mask, stays.to(F64), 0.0), expected, 0, "0 for the whole response")
    assert expected.sum() < given.mask.sum()


def two_parts(batch: str) -> Graded:
    """Rewards and second rewards, of weights 1 and .5."""
    plain = graded(batch)
    parts = {"first": plain.reward, "second": tokens(batch)["second_rewards"].reshape(plain.reward.shape) / 2}
    weights = {"first": 1.0, "second": 0.5}
    return replace(plain, reward=sum(parts.values()), components=parts, part_weights=weights)


@pytest.mark.parametrize("batch", BATCHES)
def test_advantages_of_two_parts_are_those_of_trl(batch: str) -> None:
    got = advantages_of(two_parts(batch), GroupMean(ZERO), Gdpo(1e-4)).flatten()
    assert_equal(got, advantage_of_rows("trl", "gdpo, weights 1 and 0.5", batch), "GDPO", 1e-7)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "correction"), [("", None), (" with weights token 2", TisToken(2.0, 0.0))])
def test_baselines_of_tokens_are_those_of_verl(name: str, correction: TisToken | None, batch: str) -> None:
    """eps is 1e-8 beside weights of about 1, and verl's shrinks the whole mean; ours its gap to the largest reward."""
    given, rewards = tokens(batch), graded(batch)
    rollouts = make_rollouts(given.given["lengths"], given.given["group_size"], width=given.given["width"])
    earned = rewards_by_token(rewards.reward, torch.zeros(given.mask.shape, dtype=F64), given.mask)
    weights = None if correction is None else correction(given["old"], given["sampler"], given.mask)
    credit = Credit(
        rollouts, earned, None, Endings(rollouts), given["old"], given["sum_of_squares"], weights
    )  # fmt: skip
    expected = values_of("verl", "advantages", f"optimal_token_baseline{name}", batch)
    assert_equal(OptimalToken(True, 1e-8).centre(rewards, credit), expected, "G - B_t", 2e-7)
    assert not torch.equal(expected, values_of("verl", "advantages", "optimal_token_baseline", batch)) or not name


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_that_lower_the_entropy_are_those_of_trinity(batch: str) -> None:
    given = tokens(batch)
    spread = torch.where(given.mask, advantages_of(graded(batch)).flatten()[:, None], 0.0)
    kept = ClipB(0.5)(spread, given["sampler"], given["entropies"], given.mask) != 0
    expected = values_of("trinity", "masks", "clip_b mu 0.5, of the sampler", batch)
    assert_close(kept.to(F64), expected, 0, "clip_b")
    assert expected.sum() < given.mask.sum() or batch == "extreme"


@pytest.mark.parametrize("batch", BATCHES)
def test_soft_maximum_as_baseline_is_that_of_trinity(batch: str) -> None:
    """There the loss is divided by 1 + tau, tau 1, and here the advantage. The soft maximum is fp32 there."""
    found = advantages_of(graded(batch), Opmd(1.0, ZERO)).flatten()
    assert_equal(2 * found, advantage_of_rows("trinity", "opmd logavgexp", batch), "1 + tau times ours", SINGLE)
    loss, gradient = theirs("trinity", "opmd", batch)
    got, slopes = ours(run_of(Reinforce()), tokens(batch))
    assert_equal(2 * loss, got, "1 + tau times theirs")
    assert_equal(2 * gradient, slopes, "gradient")


# --- defects and differences --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
def test_trl_entropy_bonus_is_a_token_mean_whatever_the_loss(batch: str) -> None:
    loss, gradient = theirs("trl", "grpo entropy 0.05", batch)
    plain, slopes = ours(run_of(aggregation=ROWS), tokens(batch))
    mask, logprobs = tokens(batch).mask, tokens(batch)["logprobs"]
    share = 0.05 / int(mask.sum())  # of every token, whatever its row's length
    assert_equal(gradient, slopes + share * mask, "gradient")
    assert_equal(loss, plain + share * logprobs[mask].sum(), "loss; a token's entropy is minus its log-prob")
    _, averaged = ours(run_of(aggregation=ROWS, entropy=Bonus(0.05)), tokens(batch))
    share_of_rows = 0.05 / (tokens(batch).rows * mask.sum(dim=1, keepdim=True)) * mask
    assert_equal(averaged, slopes + share_of_rows, "ours: the bonus is averaged as the loss is")
    assert float((averaged - gradient).abs().max()) > 1e-3


VESPO = run_of(Vespo(2.0, 3.0, 3.0, 2.0), importance=SequenceProduct(100.0), old_policy=BY_SAMPLER)


@pytest.mark.parametrize("batch", BATCHES)
def test_trl_vespo_with_token_mask_drops_a_response_for_one_token(batch: str) -> None:
    """A masked token's weight of 0 enters the product as 1e-8; the paper has one weight, response against sampler."""
    given = tokens(batch)
    _, gradient = theirs("trl", "vespo token_mask", batch)
    _, of_paper = ours(VESPO, given)
    ratio = (given["old"] - given["sampler"]).exp()
    hit = (((ratio < 0.4) | (ratio > 3)) & given.mask).any(dim=1)
    assert_equal(gradient[~hit], of_paper[~hit], "responses without a masked token")
    assert hit.any() and gradient[hit].abs().max() < 1e-9
    if batch == "ordinary":
        assert of_paper[hit].abs().min() > 1e-5


def test_trl_vespo_truncates_the_tokens_and_not_the_response() -> None:
    given = tokens("ordinary")
    _, gradient = theirs("trl", "vespo token_truncate", "ordinary")
    _, of_paper = ours(VESPO, given)
    ratio = (given["old"] - given["sampler"]).exp()
    hit = (((ratio < 0.4) | (ratio > 3)) & given.mask).any(dim=1)
    assert_equal(gradient[~hit], of_paper[~hit], "responses within the bounds")
    assert hit.any() and differs(gradient[hit], of_paper[hit]) > 0.05


@pytest.mark.parametrize("batch", BATCHES)
def test_verl_sapo_ignores_the_aggregation_that_is_asked_for(batch: str) -> None:
    named = recorded("verl")["losses"]
    assert named["sapo token-mean"] == named["sapo seq-mean-token-mean"]
    _, asked = ours(run_of(Sapo(1.0, 1.05), STEP, LIMITED), tokens(batch))
    assert differs(asked, theirs("verl", "sapo token-mean", batch)[1]) > 0.05


@pytest.mark.parametrize("batch", BATCHES)
def test_verl_geo_mean_ignores_the_aggregation_and_grows_with_the_number_of_microbatches(batch: str) -> None:
    named = recorded("verl")["losses"]
    assert named["geo_mean token-mean"] == named["geo_mean seq-mean-token-mean"]
    assert named["geo_mean token-mean in halves"] == named["geo_mean seq-mean-token-mean in halves"]
    run = run_of(Gmpo(0.2, 0.28), ROWS)
    loss, gradient = theirs("verl", "geo_mean token-mean in halves", batch)
    got, slopes = ours(run, tokens(batch), halves=True)
    assert_equal(loss, 2 * got, "twice the loss in two microbatches", 2e-8)
    assert_equal(gradient, 2 * slopes, "twice the gradient", 4e-8)
    assert_equal(slopes, ours(run, tokens(batch))[1], "ours does not see the cut")


@pytest.mark.parametrize("batch", BATCHES)
def test_verl_clip_cov_takes_marked_tokens_out_of_the_value_of_the_loss(batch: str) -> None:
    given = tokens(batch)
    loss, gradient = theirs("verl", "clip_cov token-mean", batch)
    got, _ = ours(VERL["clip_cov token-mean"].run, given)
    clipped = ours(run_of(), given)[1]
    marked = (gradient == 0) & (clipped != 0)
    ratio = (given["logprobs"] - given["old"]).exp()
    value = -(ratio * given["advantages"][:, None])[marked].sum() / given.mask.sum()
    assert_equal(got - value, loss, "the value of tokens whose gradient is removed stays in ours")
    assert marked.any() or batch == "extreme"


@pytest.mark.parametrize("level", ["token_k1 0.6_1.4", "seq_mean_k1 0.8_1.1"])
def test_verl_k1_bounds_are_on_the_inverse_ratio(level: str) -> None:
    inverse = REJECTIONS[level]
    found = [(kept_by(replace(inverse, bounds=BoundForm.ratio), one), values_of("verl", "masks", level, one))
             for one in BATCHES]  # fmt: skip
    assert any(not torch.equal(ours_, verls) for ours_, verls in found), "bounds 1 / high to high would hide it"


def test_verl_gpg_alpha_counts_rewards_that_are_not_zero() -> None:
    # 5 of 8 rewards are not 0, and both groups have signal: alpha 8/5 and 1
    verls = advantage_of_rows("verl", "gpg", "ordinary")
    of_paper = advantages_of(graded("ordinary"), GroupMean(ZERO), InformativeShare(AlphaForm.informative_groups))
    assert_equal(verls, 8 / 5 * of_paper.flatten(), "alpha", 1e-7)


@pytest.mark.parametrize("batch", BATCHES)
def test_verl_gdpo_whitens_over_tokens_so_that_long_responses_move_the_mean(batch: str) -> None:
    """The paper and TRL whiten over responses. The parts are fp32 there."""
    both, verls = two_parts(batch), advantage_of_rows("verl", "gdpo, weights 1 and 0.5", batch)
    added = torch.zeros_like(both.reward)
    for name, weight in both.part_weights.items():
        part = replace(both, reward=both.components[name] / weight)
        added += weight * advantages_of(part, GroupMean(ZERO), GroupStd(1, 1e-6, False, ZERO))
    assert_equal(BY_TOKENS(added, both).flatten(), verls, "every token counts once", SINGLE)
    assert differs(advantages_of(both, GroupMean(ZERO), Gdpo(1e-6)).flatten(), verls) > 0.05


def test_verl_grpo_passk_learns_nothing_from_two_right_answers() -> None:
    rows = advantage_of_rows("verl", "grpo_passk", "ordinary")
    assert tokens("ordinary").given["rewards"][:4] == [1, 0, 1, 0]
    assert not rows[:4].any()
    of_paper = advantages_of(graded("ordinary"), PassAtK(2)).flatten()
    assert of_paper[:4].abs().min() > 0.1, "Pass@k training (arXiv:2508.10751) keeps a signal"


@pytest.mark.parametrize("batch", BATCHES)
def test_openrlhf_gspo_ignores_every_gate_and_divides_by_the_sampler(batch: str) -> None:
    named = recorded("openrlhf")["losses"]
    gated = [theirs("openrlhf", f"gspo seq mask {gate}", batch) for gate in ("ratio", "binary_kl", "tv")]
    loss, gradient = gated[0]
    assert all(torch.equal(gradient, other) for _, other in gated[1:])
    got, slopes = ours(run_of(NARROW, ROWS_EPS, PER_ROW, old_policy=BY_SAMPLER), tokens(batch))
    assert_equal(loss, got, "the sampler's log-probs in the ratio")
    assert_equal(gradient, slopes, "gradient")
    asked = run_of(NARROW, ROWS_EPS, PER_ROW, **GATES["seq mask ratio"])
    assert differs(ours(asked, tokens(batch))[1], gradient) > 0.05, "GSPO with the gate that was asked for"
    assert named["gspo"] != named["gspo seq mask ratio"]


@pytest.mark.parametrize("batch", BATCHES)
def test_areal_m2po_ignores_the_advantage_and_the_current_policy(batch: str) -> None:
    given = tokens(batch)
    dropped = given.mask & (values_of("areal", "masks", "m2po 0.04", batch) == 0)
    moved = (given["old"] - given["sampler"]).abs()
    left = moved[given.mask & ~dropped]
    assert left.max() < moved[dropped].min() and (left**2).mean() < 0.04, "the largest gaps of sampler and old policy"
    pushed = given["advantages"][:, None] * (given["logprobs"] - given["sampler"]) > 0
    assert (dropped & ~pushed).any(), "tokens that their advantage pulls back are dropped there"
    run = run_of(M2po(0.04, Scope.step), old_policy=BY_SAMPLER)
    _, slopes = ours(run, given)
    whole = ours(run_of(Ppo(UNBOUNDED, UNBOUNDED), old_policy=BY_SAMPLER), given)[1]
    ours_dropped = (slopes == 0) & (whole != 0)
    assert ours_dropped.any() and not (ours_dropped & ~pushed).any(), "Algorithm 1 chooses among those pushed further"
    # and its denominator is what is left
    rest = torch.where(dropped, 0.0, ours(run_of(), given)[1]) * given.mask.sum() / (given.mask & ~dropped).sum()
    assert_equal(theirs("areal", "m2po 0.04", batch)[1], rest, "PPO's gradient on the rest, over their number")


@pytest.mark.parametrize("batch", BATCHES)
def test_areal_k3_has_the_ratio_upside_down(batch: str) -> None:
    """Tokens are the sampler's, so k3 of KL(sampler || learner) is rho - 1 - log rho, rho = learner / sampler."""
    found = values_of("areal", "masks", "kl_k3 token mask", batch)
    swapped = kept_by(TokenK3(True, 0.05), batch, old="sampler", sampler="old")
    assert_close(found, swapped, 0, "1 / rho - 1 + log rho")
    mean = values_of("areal", "masks", "kl_k3 sequence mask mean", batch)
    assert_close(mean, kept_by(SequenceMeanK3(True, 0.05), batch, old="sampler", sampler="old"), 0, "rows")


def test_areal_k3_keeps_other_tokens_than_k3() -> None:
    # at a ratio of 1.38 k3 is .058 and the inverse's .047, so a bound of .05 tells them apart
    rho = torch.tensor([[math.log(1.38)]], dtype=F64)
    one, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=F64)
    assert not TokenK3(True, 0.05)(rho - 1, zero - 1, one) and TokenK3(True, 0.05)(zero - 1, rho - 1, one)


@pytest.mark.parametrize("batch", BATCHES)
def test_areal_gspo_weighs_responses_by_their_length(batch: str) -> None:
    _, of_paper = ours(run_of(NARROW, ROWS, PER_ROW), tokens(batch))
    _, gradient = theirs("areal", "ppo sequence", batch)
    lengths = tokens(batch).mask.sum(dim=1, keepdim=True)
    assert_equal(gradient, of_paper * tokens(batch).rows * lengths / lengths.sum(), "times n_i / mean n")
    assert differs(gradient, of_paper) > 0.1


@pytest.mark.parametrize("batch", BATCHES)
def test_trinity_sapo_weighs_by_the_gate_and_not_by_its_slope(batch: str) -> None:
    """The gate multiplies the log-prob: 2 / tau at ratio 1 instead of 1, and it grows where it should fade."""
    given = tokens(batch)
    _, gradient = theirs("trinity", "sapo", batch)
    _, of_paper = ours(run_of(Sapo(1.0, 1.05)), given)
    ratio, advantages = (given["logprobs"] - given["old"]).exp(), given["advantages"][:, None]
    tau = torch.where(advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    assert_equal(
        gradient, torch.where(given.mask, -gate * advantages / given.mask.sum(), 0.0), "gate * A * logp", SINGLE
    )
    unmoved = given.mask & (ratio == 1) & (advantages != 0)
    if unmoved.any():
        assert_equal((gradient / of_paper)[unmoved], (2 / tau).expand_as(ratio)[unmoved], "at ratio 1", SINGLE)
    far = given.mask & (ratio > 2) & (advantages != 0)
    assert far.any() and (gate.expand_as(ratio)[far] > 2.5).all(), "a token that moved far weighs more, not less"


@pytest.mark.parametrize("batch", BATCHES)
def test_trinity_sum_norm_is_not_divided_by_the_number_of_responses(batch: str) -> None:
    given = tokens(batch)
    run = run_of(Sppo(0.3), Constant(WIDEST, Width.padded))
    loss, gradient = theirs("trinity", "sppo seq-mean-token-sum-norm", batch)
    got, slopes = ours(run, given)
    assert_equal(loss, given.rows * got, "loss")
    assert_equal(gradient, given.rows * slopes, "gradient")


def test_trinity_masks_negative_responses_by_the_old_policy_and_not_the_sampler() -> None:
    """DeepSeek-V3.2 reads the sampler's log-probs. Of 3, 6 responses have drift .26, .30 there and .55, .35 here."""
    _, gradient = theirs("trinity", "ppo sequence masking 0.3", "ordinary")
    _, of_paper = ours(run_of(DUAL, STEP, LIMITED, update_mask=Opsm(0.3)), tokens("ordinary"))
    assert gradient[3].any() and not of_paper[3].any()
    assert not gradient[5].any() and not of_paper[5].any()


@pytest.mark.parametrize("batch", BATCHES)
def test_trinity_clip_b_reads_the_sampler_where_it_says_recomputed(batch: str) -> None:
    given = tokens(batch)
    spread = torch.where(given.mask, advantages_of(graded(batch)).flatten()[:, None], 0.0)
    kept = ClipB(0.5)(spread, given["old"], given["entropies"], given.mask) != 0
    trinitys = values_of("trinity", "masks", "clip_b mu 0.5, of the sampler", batch) != 0
    assert not torch.equal(kept, trinitys)


def test_trinity_topr_bounds_tokens_and_not_the_response() -> None:
    _, of_paper = ours(run_of(Topr(), importance=SequenceProduct(100.0)), tokens("ordinary"))
    _, gradient = theirs("trinity", "topr", "ordinary")
    wrong = tokens("ordinary")["advantages"] < 0
    assert_equal(gradient[~wrong], of_paper[~wrong], "right answers have weight 1 in both")
    assert differs(gradient[wrong], of_paper[wrong]) > 0.05


@pytest.mark.parametrize("batch", BATCHES)
def test_swift_multiplies_the_kl_term_by_the_mismatch_weights(batch: str) -> None:
    given = tokens(batch)
    run = run_of(correction=TisToken(2.0, 0.0), kl=K3Loss(0.1, 20.0, 10.0))
    _, slopes = ours(run, given)
    penalty = slopes - ours(run_of(correction=TisToken(2.0, 0.0)), given)[1]
    weights = TisToken(2.0, 0.0)(given["old"], given["sampler"], given.mask)
    _, gradient = theirs("swift", "dapo token_truncate kl 0.1", batch)
    assert_equal(gradient, slopes + (weights - 1) * penalty, "ours weighs the surrogate only")
    assert float((gradient - slopes).abs().max()) > 1e-4


@pytest.mark.parametrize("batch", BATCHES)
def test_swift_takes_masked_responses_out_of_the_number_of_tokens(batch: str) -> None:
    """The masked objective of DeepSeek-V3.2 divides by all tokens, as TRL and ours do; swift's grpo and dapo, too."""
    given = tokens(batch)
    loss, gradient = theirs("swift", "bnpo off-policy mask 0.1", batch)
    got, slopes = ours(run_of(**OFF_POLICY), given)
    stays = Opsm(0.1)(given["logprobs"], given["sampler"], of_tokens(batch), given.mask) & given.mask
    growth = int(given.mask.sum()) / int(stays.sum())
    assert growth > 1.1
    assert_equal(gradient, growth * slopes, "gradient")
    assert_equal(loss, growth * got, "loss")


@pytest.mark.parametrize("batch", BATCHES)
def test_swift_takes_the_kl_term_of_masked_responses_away(batch: str) -> None:
    """It would hold such a response near the reference; in DeepSeek-V3.2's objective and TRL it stays."""
    given, kl = tokens(batch), K3Loss(0.1, 20.0, 10.0)
    _, gradient = theirs("swift", "dapo kl 0.1 off-policy mask 0.1", batch)
    stays = Opsm(0.1)(given["logprobs"], given["sampler"], of_tokens(batch), given.mask)
    _, slopes = ours(run_of(kl=kl, **OFF_POLICY), given)
    assert_equal(gradient, torch.where(stays, slopes, 0.0), "no gradient of masked responses")
    dropped = ~stays & given.mask
    assert slopes[dropped].abs().max() > 1e-4 and not gradient[dropped].any()


def test_open_instruct_refuses_every_vaco_threshold_up_to_one() -> None:
    assert recorded("open_instruct")["vaco thresholds that are refused"] == [0.05, 0.25, 1.0]


@pytest.mark.parametrize("batch", BATCHES)
def test_open_instruct_vaco_judges_the_learner_before_the_updates(batch: str) -> None:
    """Its mask is part of the weights against mismatch, which no update changes; ours is of each update."""
    given, spread = tokens(batch), of_tokens(batch)
    stays = Vaco(0.25)(given["old"], given["sampler"], spread, given.mask) & given.mask
    weights = values_of("open_instruct", "weights", "vaco 0.25", batch)
    ratio = ANY_RATIO(given["old"], given["sampler"], given.mask)
    assert_equal(weights, torch.where(stays, ratio, 0.0), "ratio where the mask keeps a token")
    _, slopes = ours(run_of(correction=ANY_RATIO), given)
    _, gradient = theirs("open_instruct", "vaco 0.25", batch)
    assert_equal(gradient, torch.where(stays, slopes, 0.0), "over all tokens, masked ones too")
    _, of_update = ours(run_of(correction=ANY_RATIO, update_mask=Vaco(0.25)), given)
    if batch == "ordinary":
        assert differs(of_update, gradient) > 0.05


@pytest.mark.parametrize("batch", BATCHES)
def test_open_instruct_vaco_lower_bound_drops_the_rows_nearest_the_sampler(batch: str) -> None:
    given = tokens(batch)
    log_ratio = torch.where(given.mask, given["old"] - given["sampler"], 0.0).clamp(-10, 10)
    distance = torch.where(given.mask, log_ratio.exp() - 1, 0.0).abs().sum(1) / given.mask.sum(1)
    pushed = given.mask & (log_ratio.sign() * given["advantages"][:, None] > 0)
    for name, near in (("vaco 0.25", False), ("vaco lower bound 0.25", True)):
        weights = values_of("open_instruct", "weights", name, batch)
        rows = (distance < 0.25) if near else (distance > 0.25)
        dropped = pushed & rows[:, None]
        assert dropped.any()
        assert_equal(weights, torch.where(dropped, 0.0, log_ratio.exp() * given.mask), name)
