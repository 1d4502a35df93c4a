"""From a stored step and a set of options to the gradient: of each token's log-prob, and of the weights.

Stages 7 to 10 are the loop's own functions. They read the policies from the table; only the last pass, from log-probs
to weights, needs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_lab.budget.compute_account import ComputeAccount
from grpo_lab.distributed.device import on_device
from grpo_lab.instruments.microscope.exchange import StoredStep
from grpo_lab.instruments.microscope.option_sets import StepOptions
from grpo_lab.learner.loss import draw_twins, mark_tokens, policy_loss
from grpo_lab.learner.update import compute_logprobs, credited, estimate_advantages, make_inputs, step_noise
from grpo_lab.policy.batching import StepInputs, make_minibatch, rollout_logprobs
from grpo_lab.policy.logprobs import forward_inputs, logprobs_of
from grpo_lab.policy.packing import microbatch_rows
from grpo_lab.run.state import RunState
from grpo_lab.tricks.baseline import State
from grpo_lab.tricks.precision import Precision
from grpo_lab.tricks.selects import Selects
from grpo_lab.types import Bool, Float, Int, Microbatching, Rollouts, Tensor

_ONE_MICROBATCH = Microbatching(10**12, 10**12)
SAME = 0.01  # a weight that differs by less than this share from its plain one counts as the same


@dataclass(frozen=True)
class Policy:
    """A model with the numbers under which a run computes log-probs; `name` says which weights these are."""

    model: PreTrainedModel
    name: str
    temperature: float
    precision: Precision
    microbatching: Microbatching
    device: torch.device

    def logprobs(
        self, rollouts: Rollouts, with_entropy: bool = True, collision: bool = False
    ) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"] | None]:
        """`rollout_logprobs` under this policy."""
        return rollout_logprobs(
            self.model, rollouts, self.temperature, self.precision, self.microbatching, self.device, with_entropy,
            collision,
        )  # fmt: skip


@dataclass
class Extras:
    """Values [N, T] that some options read, computed when one asks for them, and the run's state before the step.

    `entropy` and `collision` (sum of squared probabilities) are the learner's before the updates. What is None is not
    known; a coefficient is then the option's first.
    """

    entropy: Callable[[], Tensor] | None = None
    collision: Callable[[], Tensor] | None = None
    reference: Callable[[], Tensor] | None = None
    kl_coef: float | None = None
    entropy_coef: float | None = None
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)


class StoredState(RunState):
    """A run state whose policies are stored log-probs: what stages 7 to 9 read, without a model."""

    def __init__(self, step: StoredStep, options: StepOptions, extras: Extras) -> None:
        # Not RunState's own: nothing is loaded, and what else a run holds stays unset.
        self.device = torch.device("cpu")
        self.account = ComputeAccount(steps=step.step - 1)
        self.updates = 0
        self.learner = cast(PreTrainedModel, nn.Identity())
        self.reference = cast(PreTrainedModel, nn.Identity())
        self.critic = self.teacher = self.privileged = None
        self.kl_coef = options.logprobs.kl.start if extras.kl_coef is None else extras.kl_coef
        self.entropy_coef = options.logprobs.entropy.start if extras.entropy_coef is None else extras.entropy_coef
        self.memories = extras.memories
        self.step, self.extras = step, extras

    @contextmanager
    def as_reference(self) -> Iterator[PreTrainedModel]:
        assert self.reference is not None, "set above"
        yield self.reference

    def batch_logprobs(
        self, model: torch.nn.Module, rollouts: Rollouts, with_entropy: bool, collision: bool = False
    ) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"] | None]:
        """The stored log-probs of the learner before the updates, or of the reference."""
        if model is self.reference:
            held = self.step.policies.get("reference")
            return _known(self.extras.reference, "token_ref_logprob") if held is None else held, None
        second = None
        if collision or with_entropy:
            read, what = (self.extras.collision, "collision") if collision else (self.extras.entropy, "entropy")
            second = _known(read, f"{what} before the updates")
        return self.step.policies["old"], second


def _known(read: Callable[[], Tensor] | None, what: str) -> Tensor:
    if read is None:
        raise ValueError(f"these options read {what}, which is not there: give a run, or leave them out")
    return read()


@dataclass(frozen=True)
class TokenGradient:
    """The gradient of the step's loss in each token's log-prob, and in its entropy, [N, T] each.

    `in_loss` are the tokens in the loss, `clipped` those whose gradient the surrogate changed, `advantages` their
    advantages in the loss.
    """

    loss: float
    logprob: Float[Tensor, "N T"]
    entropy: Float[Tensor, "N T"]
    in_loss: Bool[Tensor, "N T"]
    clipped: Bool[Tensor, "N T"]
    advantages: Float[Tensor, "N T"]


class _NoSampler:
    """Stands for the sampler; options that ask it are refused before."""

    def rewards(self, states: Sequence[State], samples: int, greedy: bool = False) -> Float[Tensor, "K samples"]:
        raise ValueError("a stored step has no sampler, which this baseline asks: choose another baseline")

    def step_ends(self) -> Bool[Tensor, "N T"]:
        raise ValueError("a stored step has no sampler, which this baseline asks: choose another baseline")


def step_inputs(options: StepOptions, step: StoredStep, extras: Extras) -> tuple[StepInputs, StoredState]:
    """Stages 7 to 9 of the loop on a stored step."""
    state = StoredState(step, options, extras)
    before = compute_logprobs(options.logprobs, state, step.graded, step.rollouts)
    advantages = estimate_advantages(options.baseline, options.scale, state, before, step.rollouts, _NoSampler())
    rewarded = credited(options.credit, step.rollouts, before, advantages, state.account.steps)
    return make_inputs(options.teacher, step.rollouts, before, rewarded, state.entropy_coef), state


def token_gradient(options: StepOptions, step: StoredStep, extras: Extras) -> TokenGradient:
    """The gradient of the loss of the whole batch, at the step's current policy, in log-probs and entropies.

    Raises ValueError if the options read something that is not there.
    """
    inputs, state = step_inputs(options, step, extras)
    tricks, rollouts = options.loss, step.rollouts
    tricks = replace(tricks, kl=tricks.kl.at(state.kl_coef))
    through_entropy = tricks.entropy.needs_gradient and not tricks.entropy.imitates
    if through_entropy and "entropy" not in step.policies:
        raise ValueError("the entropy term reads token_entropy, which is missing: give a run, --weights or the column")
    current, entropies = step.policies["current"], step.policies.get("entropy", torch.zeros_like(inputs.advantages))
    leaf, spread = current.clone().requires_grad_(), entropies.clone().requires_grad_(through_entropy)
    size = len(rollouts.problems)
    batches = make_minibatch(inputs, range(size), options.denominator, _ONE_MICROBATCH)
    clipped, loss = torch.zeros_like(inputs.loss_mask), torch.zeros(())
    if batches:
        (batch,) = batches
        place = (batch.rows, slice(0, batch.tokens.shape[1]))
        noise = step_noise(tricks, options.updates, rollouts, options.seed, state.account.steps, 0)
        own = [current[place]]
        if "mark" in noise:
            (batch,) = mark_tokens(tricks, [batch], own, noise["mark"])
        twins = {axis: numbers for axis, numbers in noise.items() if isinstance(axis, Selects)}
        (batch,) = draw_twins(tricks, [batch], own, twins)
        output = policy_loss(tricks, batch, leaf[place], spread[place])
        output.loss.backward()
        clipped[place], loss = output.affected, output.loss.detach()
    zeros = torch.zeros_like(current)
    return TokenGradient(
        float(loss), zeros if leaf.grad is None else leaf.grad, zeros if spread.grad is None else spread.grad,
        inputs.loss_mask, clipped, inputs.advantages,
    )  # fmt: skip


def weight_gradients(
    policy: Policy, rollouts: Rollouts, gradients: Sequence[tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]]
) -> Float[Tensor, "K D"]:
    """From K gradients in log-probs and entropies to those in all D weights that train, on the CPU.

    One forward pass serves all; each has a backward pass of its own.
    """
    weights = [one for one in policy.model.parameters() if one.requires_grad]
    found = torch.zeros(len(gradients), sum(one.numel() for one in weights))
    stacked = torch.stack([torch.stack(pair) for pair in gradients])
    live = (stacked != 0).any(dim=(0, 1))
    chosen = [row for row in range(rollouts.num_rows) if live[row].any()]
    sizes = [len(rollouts.prompt_of_row(row)) + int(rollouts.lengths[row]) for row in chosen]
    through_entropy = bool((stacked[:, 1] != 0).any())
    for part in microbatch_rows(sizes, policy.microbatching):
        rows = [chosen[place] for place in part]
        width = int(rollouts.lengths[rows].max())
        laid_out = forward_inputs(
            policy.model, [rollouts.prompt_of_row(row) for row in rows], rollouts.tokens[rows, :width],
            live[rows, :width], policy.microbatching, policy.precision,
        )  # fmt: skip
        inputs = on_device(laid_out, policy.device)
        logprobs, entropy = logprobs_of(
            policy.model, inputs, policy.temperature, policy.precision, through_entropy, through_entropy,
            policy.microbatching,
        )  # fmt: skip
        for index, (of_logprob, of_entropy) in enumerate(stacked[:, :, rows, :width].to(policy.device)):
            total = (logprobs * of_logprob).sum()
            if entropy is not None:
                total = total + (entropy * of_entropy).sum()
            last = index == len(gradients) - 1
            parts = torch.autograd.grad(total, weights, retain_graph=not last, allow_unused=True)
            flat = [torch.zeros_like(one) if part is None else part for one, part in zip(weights, parts)]
            found[index] += torch.cat([one.flatten().float().cpu() for one in flat])
    return found


@dataclass(frozen=True)
class Measured:
    """What one set of options does to a stored step.

    `norm` is of the gradient before clipping, `cosines` to every set's by name, NaN where one is zero. Shares are of
    the tokens in the plain loss: `affected` have another weight than under the plain options, a factor common to all
    tokens aside; `removed` have weight 0, `reversed` the other sign; `added` have a weight and had none. `clipped` is
    the share whose gradient the surrogate changed. `weights` [N, T] are minus the gradient in each log-prob: positive
    where an update makes the token more likely. `changed` are the affected tokens.
    """

    name: str
    loss: float
    norm: float
    cosines: Mapping[str, float]
    shares: Mapping[str, float]
    weights: Float[Tensor, "N T"]
    changed: Bool[Tensor, "N T"]
    token: TokenGradient


def measure(sets: Mapping[str, StepOptions], step: StoredStep, extras: Extras, policy: Policy | None) -> list[Measured]:
    """Every set on the same step; affected tokens are relative to the first.

    Without a policy, gradients are those in the tokens' log-probs. Raises ValueError as `token_gradient` does.
    """
    tokens = [token_gradient(options, step, extras) for options in sets.values()]
    if policy is None:
        flat = torch.stack([one.logprob.flatten() for one in tokens])
    else:
        flat = weight_gradients(policy, step.rollouts, [(one.logprob, one.entropy) for one in tokens])
    flat = flat.double()
    norms = flat.norm(dim=1)
    cosines = (flat @ flat.T) / (norms[:, None] * norms[None, :])
    found = []
    for index, (name, one) in enumerate(zip(sets, tokens)):
        changed, shares = compared(tokens[0], one)
        own = dict(zip(sets, cosines[index].tolist()))
        found.append(Measured(name, one.loss, float(norms[index]), own, shares, -one.logprob, changed, one))
    return found


def compared(plain: TokenGradient, other: TokenGradient) -> tuple[Bool[Tensor, "N T"], dict[str, float]]:
    """The tokens whose weight differs from the plain one, and the shares of each kind.

    The common factor is the median ratio of weights over tokens that have one in both.
    """
    before, after = -plain.logprob.double(), -other.logprob.double()
    had, has = before != 0, after != 0
    both = had & has
    ratio = after[both] / before[both]
    factor = float(ratio.abs().median()) if ratio.numel() else 1.0
    changed = (after - factor * before).abs() > SAME * factor * before.abs()
    number = max(int((had | has).sum()), 1)
    kinds = {
        "affected": changed, "removed": had & ~has, "reversed": both & (before * after < 0), "added": has & ~had,
    }  # fmt: skip
    shares = {name: int(mask.sum()) / number for name, mask in kinds.items()}
    shares["clipped"] = int(other.clipped.sum()) / max(int(other.in_loss.sum()), 1)
    return changed, shares


def most_changed(plain: Measured, other: Measured, limit: int) -> Int[Tensor, "K 2"]:
    """Row and column of the affected tokens whose weight, over the largest of its set, moved most."""
    before, after = (one.weights / one.weights.abs().max().clamp(min=1e-30) for one in (plain, other))
    gap = torch.where(other.changed, (after - before).abs(), 0.0)
    order = gap.flatten().argsort(descending=True, stable=True)[: min(limit, int((gap > 0).sum()))]
    return torch.stack([order // gap.shape[1], order % gap.shape[1]], dim=1)
