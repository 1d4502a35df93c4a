"""Our options against the loss functions of eight peers: golden/peers, made by their own code on the same batches.

Where a peer is right, loss and gradient agree to 1e-8. Where it differs from its paper or from its own description, a
test named after the defect has both numbers. golden/peers/README.md names peers and versions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import F64, assert_close, batch_of_rows, make_rollouts, make_run, noise_of
from torch import Tensor

from grpo_lab.config.run_config import RunConfig
from grpo_lab.learner.loss import mark_tokens, policy_loss
from grpo_lab.policy.batching import StepInputs
from grpo_lab.tricks.aggregation import Constant, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.convention import BoundForm, CapForm, Scope, Width
from grpo_lab.tricks.correction import Icepop, Mis, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.denominator import Survivors
from grpo_lab.tricks.entropy import Bonus
from grpo_lab.tricks.importance import Sequence, SequenceProduct, SequenceToken, Token
from grpo_lab.tricks.kl import K2Loss, K3Loss, K3Unbiased
from grpo_lab.tricks.old_policy import Sampler
from grpo_lab.tricks.rejection import (
    SequenceMeanBinaryKl,
    SequenceMeanK1,
    SequenceMeanK3,
    SequenceMeanTv,
    SequenceSumK1,
    TokenBinaryKl,
    TokenK2,
    TokenTv,
)
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
    RatioMask,
    RecOneSide,
    RecRing,
    Sppo,
    TokenWeight,
    Vespo,
)

FOLDER = Path(__file__).parents[1] / "golden" / "peers"
PEERS = ("trl", "verl", "openrlhf", "areal", "trinity", "swift", "prime_rl", "open_instruct")
BATCHES = ("ordinary", "extreme")
# Relative to the size of a number where that is above 1. AReaL's weights and Trinity's advantages are fp32.
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


def step(run: RunConfig, batch: Tokens, learner: str = "old", reference: str = "ref") -> StepInputs:
    """The batch after old policy, rejection and correction. `learner`: its log-probs before the updates."""
    sampler, before, mask = batch["sampler"], batch[learner], batch.mask
    rollouts = make_rollouts(batch.given["lengths"], batch.given["group_size"], width=mask.shape[1], sampler=sampler)
    loss_mask = mask & run.rejection(before, sampler, mask)
    advantages = torch.where(loss_mask, batch["advantages"][:, None], 0.0)
    weights = run.correction(before, sampler, mask)
    old = run.old_policy(before, sampler)
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


def run_of(surrogate: Any = HIGHER, aggregation: Any = STEP, importance: Any = FREE, **more: Any) -> RunConfig:
    return make_run(surrogate=surrogate, aggregation=aggregation, importance=importance, **more)


@dataclass(frozen=True)
class Same:
    """Options that are a peer's function, and what of it they are."""

    run: RunConfig
    halves: bool = False
    learner: str = "old"
    reference: str = "ref"
    value: bool = True  # the loss too; else only its gradient, because the value is written another way
    tolerance: float = CLOSE
    only: tuple[str, ...] = BATCHES


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
    "sapo": same(Sapo(1.0, 1.05), ROWS),
    "vespo": same(Vespo(2.0, 3.0, 3.0, 2.0), importance=SequenceProduct(100.0)),
    "dapo token_truncate": same(correction=TisToken(3.0, 0.4)),
    "dapo token_mask": same(correction=Icepop(0.4, 3.0)),
    "dapo sequence_truncate": same(correction=TisSequence(3.0)),
    "dapo sequence_mask": same(correction=Mis(0.4, 3.0)),
    "dapo kl 0.1": same(kl=K3Loss(0.1, 100.0, 0.0)),
    "dapo kl 0.1 bias-corrected": same(kl=K3Unbiased(0.1, 100.0, 0.0)),
    "dapo entropy 0.05": same(entropy=Bonus(0.05)),
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
    "geo_mean seq-mean-token-mean": same(Gmpo(0.4, 0.4), ROWS),
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
    "token mask binary_kl": {"rejection": TokenBinaryKl(True, 0.02), "correction": ANY_RATIO},
    "token mask tv": {"rejection": TokenTv(True, 0.1), "correction": ANY_RATIO},
    "seq mask ratio": {"rejection": SequenceMeanK1(True, 0.9, 1.1, BoundForm.ratio), "correction": ANY_RATIO},
    "seq mask binary_kl": {"rejection": SequenceMeanBinaryKl(True, 0.03), "correction": ANY_RATIO},
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
    "trl": {"grpo off-policy mask 0.1", "dapo off-policy mask 0.1"},
    "verl": {"vanilla token-sum", "geo_mean with weights token 2"},
    "openrlhf": set(),
    "areal": {"ratio sequence mask max"},
    "trinity": {
        "opmd", "ppo sequence masking 0.1", "cispo with masks", "rec two-side none", "rec none advantage",
    },
    "swift": {"grpo off-policy mask 0.1", "dapo off-policy mask 0.1"},
    "prime_rl": set(),
    "open_instruct": {"vaco 0.25", "vaco lower bound 0.25"},
}  # fmt: skip
# Each has a test below.
DEFECTS = {
    "trl": {"grpo entropy 0.05", "vespo token_truncate", "vespo token_mask"},
    "verl": {
        "sapo token-mean", "geo_mean token-mean", "geo_mean token-mean in halves",
        "geo_mean seq-mean-token-mean in halves",
    },
    "openrlhf": {"gspo seq mask ratio", "gspo seq mask binary_kl", "gspo seq mask tv"},
    "areal": {"m2po 0.04"},
    "trinity": {"sapo", "sppo seq-mean-token-sum-norm"},
    "swift": {"dapo token_truncate kl 0.1"},
    "prime_rl": set(),
    "open_instruct": set(),
}  # fmt: skip


@pytest.mark.parametrize("peer", PEERS)
def test_every_recorded_loss_is_compared_or_has_its_reason(peer: str) -> None:
    listed: ListLike[set[str]] = (set(EQUAL[peer]), NO_OPTION[peer], DEFECTS[peer])
    assert sum(map(len, listed)) == len(set.union(*listed)), "in one list only"
    assert set.union(*listed) == set(recorded(peer)["losses"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("peer", "name"), [(peer, name) for peer in PEERS for name in EQUAL[peer]])
def test_loss_and_gradient_are_those_of_the_peer(peer: str, name: str, batch: str) -> None:
    option = EQUAL[peer][name]
    if batch not in option.only:
        pytest.skip("the option has no lower bound, and this batch is below it")
    loss, gradient = theirs(peer, name, batch)
    got, slopes = ours(
        option.run, tokens(batch), halves=option.halves, learner=option.learner, reference=option.reference
    )
    assert gradient.any(), "a loss without a gradient shows nothing"
    assert_equal(slopes, gradient, f"gradient of {peer} {name}", option.tolerance)
    if option.value:
        assert_equal(got, loss, f"loss of {peer} {name}", option.tolerance)
