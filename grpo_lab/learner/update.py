"""Stages 7 to 10: log-probs of a rollout batch, its advantages, and its optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from grpo_lab.config.stages import CreditTricks, LogprobTricks, LossTricks, UpdateSettings
from grpo_lab.distributed import ranks, tensors
from grpo_lab.distributed.device import on_cpu, on_device
from grpo_lab.learner.loss import draw_twins, mark_tokens, policy_loss
from grpo_lab.learner.mismatch import bound_metrics, check_last_sync, member_metrics
from grpo_lab.policy.batching import StepInputs, expand, make_minibatch, tokens_in_loss
from grpo_lab.policy.logprobs import forward_inputs, logprobs_of
from grpo_lab.policy.optim import UpdateReport
from grpo_lab.run.state import RunState
from grpo_lab.run.teacher import PrivilegedPrompts
from grpo_lab.seeding import rollout_uniforms
from grpo_lab.tracking.activity import doing
from grpo_lab.tracking.metrics import CLIP_FRACTION, UNLIKE_PPO
from grpo_lab.tricks.base import NEGLIGIBLE
from grpo_lab.tricks.baseline import Baseline, Credit, Estimator, rewards_by_token
from grpo_lab.tricks.scale import Scale
from grpo_lab.tricks.selects import Selects
from grpo_lab.tricks.teacher import Teacher
from grpo_lab.tricks.updates import Updates
from grpo_lab.types import Batch, Bool, Float, Graded, Int, LossOutput, Rollouts, Tensor


@dataclass(frozen=True)
class BeforeUpdates:
    """Stage 7: log-probs, values and masks of a rollout batch before its updates.

    `logprobs`, `entropy` and `collision` are the learner's, `values` the critic's; each is None when nothing needs it.
    `collision` is the sum over the vocabulary of squared probabilities at each sampled token. `rejected` is the record
    after rejection. `graded` also has the KL penalty in its reward, and `kl_penalties` is that penalty per token.
    `learner_share` is as in `Batch`. `accepted_mask` are the tokens that rejection left in, `teacher_mask` those that a
    teacher scored (every sampled one without a teacher), `loss_mask` those in the loss. `metrics` describe what the
    tricks of this stage did.
    """

    logprobs: Float[Tensor, "N T"] | None
    entropy: Float[Tensor, "N T"] | None
    collision: Float[Tensor, "N T"] | None
    old_logprobs: Float[Tensor, "N T"] | None
    ref_logprobs: Float[Tensor, "N T"] | None
    teacher_logprobs: Float[Tensor, "N T"] | None
    correction_weights: Float[Tensor, "N T"] | None
    learner_share: Float[Tensor, "N T"] | None
    values: Float[Tensor, "N T"] | None
    kl_penalties: Float[Tensor, "N T"]
    rejected: Graded
    graded: Graded
    accepted_mask: Bool[Tensor, "N T"]
    teacher_mask: Bool[Tensor, "N T"]
    loss_mask: Bool[Tensor, "N T"]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Advantages:
    """Stage 8: rewards minus the baseline (`centred`), and the advantages after the scale (`scaled`).

    One number per response [P, G], or per token [N, T] if the baseline is per token. `targets` are what the critic
    learns, None without one.
    """

    centred: Tensor
    scaled: Tensor
    targets: Float[Tensor, "N T"] | None = None


@dataclass
class UpdateAccumulator:
    """Accumulator of the results of one step's updates.

    `version` is the number of updates before the step. `logprobs` are the learner's log-probs, in the first update, of
    the tokens in `logprob_mask`. `sums` are over tokens in the loss of all updates, `first` of the first update only.
    `in_loss` counts tokens in the losses, including rows that were skipped in the forward pass. `affected` are tokens
    that the surrogate changed in any update. `loss_scale` is the factor on the loss; None if the precision needs none.
    `kl_coef` is the coefficient of a KL penalty that adapts, else None.
    """

    version: int
    logprobs: Float[Tensor, "N T"]
    logprob_mask: Bool[Tensor, "N T"]
    affected: Bool[Tensor, "N T"]
    losses: list[float] = field(default_factory=list)
    reports: list[UpdateReport] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    critic: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    in_loss: int = 0
    overflowed: int = 0  # updates skipped because a gradient was not finite in the learner's half precision
    loss_scale: float | None = None
    kl_coef: float | None = None

    @classmethod
    def of(cls, inputs: StepInputs, version: int) -> UpdateAccumulator:
        """An empty accumulator for a step on `inputs`."""
        nothing = torch.zeros_like(inputs.loss_mask)
        logprobs = torch.zeros_like(inputs.rollouts.sampler_logprobs)
        return cls(version, logprobs, nothing, torch.zeros_like(nothing))

    def note_affected(self, rows: Int[Tensor, "M"], affected: Bool[Tensor, "M T"]) -> None:
        """Record which tokens in `rows` of the rollouts the surrogate changed."""
        self.affected[rows, : affected.shape[1]] |= affected

    def note_logprobs(self, rows: Int[Tensor, "M"], logprobs: Float[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> None:
        """Record the learner's log-probs in the first update, before its weights have changed."""
        where = (rows, slice(0, mask.shape[1]))
        self.logprobs[where], self.logprob_mask[where] = logprobs.to(self.logprobs.dtype), mask

    def add_outputs(self, outputs: Sequence[LossOutput], tokens: int) -> float:
        """Add the microbatches of one update with `tokens` tokens in its loss; returns the update's loss."""
        self.in_loss += tokens
        self.losses.append(sum(float(output.loss.detach()) for output in outputs))
        for output in outputs:
            for name, value in output.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + float(value)
        if len(self.losses) == 1:
            self.first = dict(self.sums)
        return self.losses[-1]

    def mean(self, name: str) -> float:
        """One of `sums`, per token in the loss that went through the learner."""
        return self.sums[name] / self.sums["tokens"]

    def metrics(self) -> dict[str, float]:
        """The step's learner metrics; only the counts if every update was skipped."""
        metrics = {
            "train/updates": float(len(self.reports)),
            "train/skipped_updates": float(self.skipped),
        } | self.critic
        metrics["train/overflowed_updates"] = float(self.overflowed)
        if self.loss_scale is not None:
            metrics["train/loss_scale"] = self.loss_scale
        if self.kl_coef is not None:
            metrics["train/kl_coef"] = self.kl_coef
        if not self.reports:
            return metrics
        number, reports = len(self.reports), on_cpu(self.reports)
        per_token = {
            "train/entropy": "entropy",
            "train/ratio": "ratio",
            "train/approx_kl": "k3_old",
            "train/k3_ref": "k3_ref",
            "train/kl_term": "kl_term",
            "train/entropy_term": "entropy_term",
            "active_fraction/importance": "importance_active",
            CLIP_FRACTION: "surrogate_active",
            UNLIKE_PPO: "unlike_ppo",
            "active_fraction/update_mask": "masked",
            "active_fraction/correction": "correction_active",
            "active_fraction/kl": "kl_active",
            "active_fraction/entropy": "entropy_active",
            "factor/surrogate": "surrogate_weight",
            "factor/correction": "correction_weight",
        }
        metrics |= {name: self.mean(key) for name, key in per_token.items() if key in self.sums}
        denominator = self.sums["weight"] / self.sums["weight_of_original"]
        # The learner has not changed yet, so any distance to the old policy comes from the old_policy axis.
        metrics["active_fraction/old_policy"] = self.first["drifted"] / self.first["tokens"]
        metrics["active_fraction/denominator"] = float(abs(denominator - 1) > NEGLIGIBLE)
        return metrics | {
            "train/scored_share": self.sums["tokens"] / self.in_loss,
            "factor/aggregation": self.sums["weight"] / number,
            "factor/denominator": denominator,
            "train/loss": sum(self.losses) / number,
            "train/gradient_norm": sum(r.gradient_norm for r in reports) / number,
            "train/update_norm": sum(r.update_norm for r in reports) / number,
            "train/learning_rate": reports[-1].learning_rate,
        }


def compute_logprobs(tricks: LogprobTricks, state: RunState, filtered: Graded, rollouts: Rollouts) -> BeforeUpdates:
    """Stage 7: run learner, reference and critic over the batch, then apply correction, rejection and reward KL.

    `filtered` is the batch's record after the group filter.
    """
    sampled, sampler = rollouts.sampled_mask, rollouts.sampler_logprobs
    logprobs = entropy = collision = reference = taught = weights = values = None
    accepted, scored, rejected, metrics, kl = sampled, sampled, filtered, {}, tricks.kl.at(state.kl_coef)
    noise = partial(rollout_uniforms, rollouts, tricks.seed, step=state.account.steps)
    if tricks.needs_collision:
        logprobs, collision = state.batch_logprobs(state.learner, rollouts, False, collision=True)
    if tricks.needs_logprobs and (logprobs is None or tricks.reads_entropy):
        logprobs, entropy = state.batch_logprobs(state.learner, rollouts, tricks.reads_entropy)
    old = tricks.old_policy(logprobs, sampler)
    share = tricks.old_policy.learner_share(rollouts.weight_version, state.updates, tricks.updates.number)
    share = None if share is None else share.to(sampler.dtype)
    if kl.needs_reference:
        with state.as_reference() as model:
            reference, _ = state.batch_logprobs(model, rollouts, with_entropy=False)
    if state.teacher is not None:
        taught = state.teacher.logprobs(
            rollouts, state.temperature, state.precision, state.microbatching, state.device, state.account
        )
    elif state.privileged is not None:
        taught, scored = _privileged_logprobs(state, state.privileged, rollouts, filtered.correctness)
    if logprobs is not None:
        weights = correction_weights(tricks, rollouts, logprobs, noise) if share is None else None
        accepted = accepted_tokens(tricks, rollouts, logprobs, filtered.in_loss.flatten(), noise)
        rejected = tricks.rejection.settle(filtered, accepted)
        metrics = bound_metrics(tricks.correction, logprobs, sampler, sampled, accepted)
        metrics |= member_metrics(tricks.rejection, logprobs, sampler, sampled)
    kl_penalties = kl.token_penalties(old, reference, sampled)
    graded = kl.shape(rejected, kl_penalties)
    in_loss = sampled & accepted & graded.in_loss.flatten()[:, None] & state.policy_learns
    chosen = in_loss
    if entropy is not None:
        chosen = in_loss & tricks.twin.redraw(Selects.entropy, tricks.entropy.keeps(entropy, sampled), in_loss, noise)
    if state.critic is not None:
        values = state.critic.values(rollouts, state.account)
    metrics |= token_fractions(sampled, weights, accepted, in_loss, chosen)
    if share is not None:  # the correction acts in the updates
        metrics.pop("active_fraction/correction")
        metrics.pop("mismatch/bounded", None)
    if taught is not None and scored.any():
        assert old is not None, "needs_logprobs has it computed"
        metrics["teacher/reverse_kl"] = float((old - taught)[scored].double().mean())
    return BeforeUpdates(
        logprobs,
        entropy,
        collision,
        old,
        reference,
        taught,
        weights,
        share,
        values,
        kl_penalties,
        rejected,
        graded,
        accepted,
        scored,
        chosen,
        metrics,
    )


def correction_weights(
    tricks: LogprobTricks, rollouts: Rollouts, logprobs: Float[Tensor, "N T"], noise: Callable[[str], Tensor]
) -> Float[Tensor, "N T"]:
    """The correction's weights, or those of its random twin; `noise` gives [N, T] uniform numbers for a stream."""
    sampled, twin = rollouts.sampled_mask, tricks.twin

    def redraw(factors: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        eligible = sampled if factors.shape == sampled.shape else sampled.any(dim=1, keepdim=True)
        return twin.redraw(Selects.correction, factors, eligible, lambda stream: noise(stream)[:, : factors.shape[1]])

    dealt = (redraw,) if twin.of_axis(Selects.correction) else ()
    return tricks.correction(logprobs, rollouts.sampler_logprobs, sampled, *dealt)


def accepted_tokens(
    tricks: LogprobTricks,
    rollouts: Rollouts,
    logprobs: Float[Tensor, "N T"],
    rows_in_loss: Bool[Tensor, "N"],
    noise: Callable[[str], Tensor],
) -> Bool[Tensor, "N T"]:
    """The tokens that rejection, or its random twin, leaves in; `noise` gives [N, T] uniform numbers for a stream."""
    sampled, twin = rollouts.sampled_mask, tricks.twin
    accepted = tricks.rejection(logprobs, rollouts.sampler_logprobs, sampled)
    eligible = sampled & rows_in_loss[:, None]
    if not twin.of_axis(Selects.rejection) or tricks.rejection.per_token:
        return twin.redraw(Selects.rejection, accepted, eligible, noise)
    rows = twin.redraw(Selects.rejection, accepted.any(dim=1), eligible.any(dim=1), lambda stream: noise(stream)[:, 0])
    return sampled & rows[:, None]


def token_fractions(
    sampled: Bool[Tensor, "N T"],
    weights: Float[Tensor, "N T"] | None,
    accepted: Bool[Tensor, "N T"],
    in_loss: Bool[Tensor, "N T"],
    loss_mask: Bool[Tensor, "N T"],
) -> dict[str, float]:
    """Active fractions of correction and rejection: shares of sampled tokens reweighted and removed.

    If the entropy trick removed tokens, also their share of the tokens that were in the loss before.
    """
    reweighted = 0.0 if weights is None else float(((weights[sampled] - 1).abs() > NEGLIGIBLE).double().mean())
    metrics = {
        "active_fraction/correction": reweighted,
        "active_fraction/rejection": float((~accepted[sampled]).double().mean()),
    }
    if not torch.equal(in_loss, loss_mask):
        metrics["active_fraction/entropy"] = float((~loss_mask[in_loss]).double().mean())
    return metrics


def estimate_advantages(
    baseline: Baseline,
    scale: Scale,
    state: RunState,
    before: BeforeUpdates,
    rollouts: Rollouts,
    continuations: Estimator,
) -> Advantages:
    """Stage 8: advantages by baseline and scale; baselines that generate use `continuations`.

    A baseline that remembers reads its part of `state.memories`, and changes it.
    """

    def learner_logprobs(past: Rollouts) -> Tensor:
        return state.batch_logprobs(state.learner, past, with_entropy=False)[0]

    earned = rewards_by_token(before.graded.reward, before.kl_penalties, rollouts.sampled_mask)
    memory = state.memories.setdefault("baseline", {})
    credit = Credit(
        rollouts, earned, before.values, continuations, before.logprobs, before.collision, before.correction_weights,
        memory, learner_logprobs,
    )  # fmt: skip
    centred = baseline.centre(before.graded, credit)
    accepted = rollouts.sampled_mask & before.accepted_mask
    targets = baseline.value_targets(before.graded, credit, centred) if baseline.needs_critic else None
    return Advantages(centred, scaled(baseline, scale, centred, before.graded, accepted), targets)


def scaled(baseline: Baseline, scale: Scale, centred: Tensor, graded: Graded, accepted: Bool[Tensor, "N T"]) -> Tensor:
    """Advantages from centred rewards, one per response [P, G] or per token [N, T], as the baseline is.

    `accepted` are the sampled tokens that rejection left in.
    """
    if not baseline.per_token:
        return scale(centred, graded)
    return scale.of_tokens(centred, accepted & graded.in_statistics.flatten()[:, None], graded)


def credited(
    tricks: CreditTricks, rollouts: Rollouts, before: BeforeUpdates, advantages: Advantages, step: int
) -> Float[Tensor, "N T"]:
    """Stage 9: the advantages of single tokens, 0 outside the loss, after token credit or its random twin."""
    each, twin = expand(advantages.scaled, before.loss_mask), tricks.twin
    own = tricks.token_credit(each, before.logprobs, before.entropy, before.loss_mask)
    if twin.of_axis(Selects.token_credit):
        eligible = before.loss_mask & (each != 0)
        noise = partial(rollout_uniforms, rollouts, tricks.seed, step=step)
        factors = torch.where(eligible, own / each, 1.0)
        own = each * twin.redraw(Selects.token_credit, factors, eligible, noise)
    return expand(own, before.loss_mask)


def make_inputs(
    teacher: Teacher,
    rollouts: Rollouts,
    before: BeforeUpdates,
    rewarded: Float[Tensor, "N T"],
    entropy_coef: float,
) -> StepInputs:
    """Stage 9: the inputs of the loss for all rows; a teacher changes the advantages `rewarded` of single tokens."""
    scored = before.accepted_mask & before.teacher_mask
    learnt = teacher(rewarded, before.teacher_logprobs, before.old_logprobs, scored)
    return StepInputs(
        rollouts, before.loss_mask, expand(learnt, before.loss_mask), before.old_logprobs, before.ref_logprobs,
        before.correction_weights, entropy_coef, before.graded.correctness.flatten() > 0.5, before.learner_share,
    )  # fmt: skip


def train_on(
    settings: UpdateSettings, state: RunState, inputs: StepInputs, before: BeforeUpdates, advantages: Advantages
) -> UpdateAccumulator:
    """Stage 10: all optimiser steps of policy and critic on one batch."""
    rollouts, step = inputs.rollouts, state.account.steps
    accumulator = UpdateAccumulator.of(inputs, state.updates)
    updates, loss = settings.updates, settings.loss
    if loss.kl.adapts:
        accumulator.kl_coef = state.kl_coef
        loss = replace(loss, kl=loss.kl.at(state.kl_coef))
        settings = replace(settings, loss=loss)
    updates.begin(state.optimizer)
    with doing("", updates.number, "updates") as shown:
        for number, part in enumerate(shown.each(updates.split(settings.problems_per_step))):
            batches = make_minibatch(
                inputs, part, settings.denominator, state.microbatching, settings.skips_rows,
                not settings.reads_microbatches,
            )  # fmt: skip
            noise = step_noise(loss, updates, rollouts, settings.seed, step, number)
            update(settings, state, marked(loss, state, batches, noise), tokens_in_loss(inputs, part), accumulator)
    if state.critic is not None:
        assert before.values is not None and advantages.targets is not None, "compute_logprobs asks the critic"
        learnt = rollouts.sampled_mask & before.graded.in_statistics.flatten()[:, None]
        accumulator.critic = state.critic.learn(rollouts, learnt, before.values, advantages.targets, state.account)
    if before.logprobs is not None:  # these cover all sampled tokens, the first update only some of them
        accumulator.logprobs, accumulator.logprob_mask = before.logprobs, rollouts.sampled_mask
    check_last_sync(
        state, rollouts, accumulator.logprobs, accumulator.logprob_mask, accumulator.version, settings.agreement
    )
    state.account.discarded_tokens += int((rollouts.sampled_mask & ~before.loss_mask).sum())
    state.account.steps += 1
    if accumulator.reports:
        state.entropy_coef = loss.entropy.next_coef(state.entropy_coef, accumulator.mean("entropy"))
        if loss.kl.adapts:
            state.kl_coef = loss.kl.next_coef(state.kl_coef, accumulator.mean("k3_ref"), rollouts.num_rows)
    if state.precision.scales_loss:
        accumulator.loss_scale = state.loss_scale.get_scale()
    return accumulator


def _privileged_logprobs(
    state: RunState, prompts: PrivilegedPrompts, rollouts: Rollouts, correctness: Float[Tensor, "P G"]
) -> tuple[Float[Tensor, "N T"], Bool[Tensor, "N T"]]:
    """The policy's log-probs of its own tokens behind the teacher's prompts, and which tokens have one; 0 elsewhere."""
    found, scored = torch.zeros_like(rollouts.sampler_logprobs), torch.zeros_like(rollouts.sampled_mask)
    rows, behind = prompts.behind(rollouts, correctness)
    if rows:
        with state.as_reference() if prompts.plan.reads_reference else nullcontext(state.learner) as model:
            found[rows], _ = state.batch_logprobs(model, behind, with_entropy=False)
        scored[rows] = behind.sampled_mask
    return found, scored


def step_noise(
    tricks: LossTricks, updates: Updates, rollouts: Rollouts, seed: int, step: int, number: int
) -> dict[str | Selects, Float[Tensor, "N T"]]:
    """One uniform number per token, new for each pass over the batch, for each choice over the optimiser step.

    The keys are "mark", if the surrogate marks tokens, and the axes of the loss that have a random twin. `number`
    counts the step's updates.
    """
    streams: dict[str | Selects, str] = {"mark": "mark"} if tricks.surrogate.mark_scope is not None else {}
    if not tricks.surrogate.is_no_op and tricks.twin.of_axis(Selects.surrogate):
        streams[Selects.surrogate] = Selects.surrogate.stream
    if not tricks.update_mask.is_no_op and tricks.twin.of_axis(Selects.update_mask):
        streams[Selects.update_mask] = Selects.update_mask.stream
    again = number // updates.minibatches
    return {
        name: rollout_uniforms(rollouts, seed, f"{stream}/{again}" if again else stream, step)
        for name, stream in streams.items()
    }


def marked(
    tricks: LossTricks, state: RunState, batches: list[Batch], noise: Mapping[str | Selects, Float[Tensor, "N T"]]
) -> list[Batch]:
    """The microbatches with all choices over the whole step, for one more forward pass; unchanged without `noise`."""
    if not noise:
        return batches
    with torch.no_grad():
        own = [_read(state, batches[place], False, False)[1] for place, _ in ranks.dealt(len(batches))]
    for batch in batches:
        state.account.forwarded(state.model_flops, *_sizes(batch))
    logprobs = ranks.in_order(len(batches), on_cpu(own))
    if "mark" in noise:
        batches = mark_tokens(tricks, batches, logprobs, noise["mark"])
    twins = {axis: numbers for axis, numbers in noise.items() if isinstance(axis, Selects)}
    return draw_twins(tricks, batches, logprobs, twins)


def update(
    settings: UpdateSettings, state: RunState, batches: list[Batch], tokens: int, accumulator: UpdateAccumulator
) -> None:
    """One optimiser step over its microbatches, with `tokens` tokens in the loss. Skipped without microbatches.

    `batches` are the step's, on the CPU; each rank computes some of them, and afterwards knows what all gave. A
    microbatch goes to the device in one transfer. What all of them gave comes back in one, after the last.

    Raises FloatingPointError if the loss is NaN or infinite, before the optimiser step.
    """
    if not batches:
        accumulator.skipped += 1
        return
    tricks, own, dealt = settings.loss, [], ranks.dealt(len(batches))
    with doing("", len(dealt), "microbatches") as shown:
        for place, counts in shown.each(dealt):
            through_entropy = tricks.entropy.needs_gradient and not tricks.entropy.imitates
            batch, logprobs, entropy = _read(state, batches[place], True, through_entropy)
            assert entropy is not None, "it was asked for"
            output = policy_loss(tricks, batch, logprobs, entropy)
            state.loss_scale.scale(output.loss if counts else 0 * output.loss).backward()
            own.append((replace(output, loss=output.loss.detach()), None if accumulator.losses else logprobs.detach()))
    passes = ranks.in_order(len(batches), on_cpu(own))
    for batch, (output, logprobs) in zip(batches, passes):
        if logprobs is not None:
            accumulator.note_logprobs(batch.rows, logprobs, batch.loss_mask)
        accumulator.note_affected(batch.rows, output.affected)
        state.account.trained(state.model_flops, *_sizes(batch), 0)
    outputs = [output for output, _ in passes]
    state.account.trained_tokens += tokens  # including rows that were skipped in the forward pass
    loss = accumulator.add_outputs(outputs, tokens)
    if not torch.isfinite(torch.tensor(loss)):
        raise FloatingPointError(f"the loss is {loss} at update {state.updates}")
    if state.precision.scales_loss and _overflows(state):
        accumulator.overflowed += 1
        return
    spent = state.account.spent(settings.budget)
    accumulator.reports.append(settings.optimizer.step(state.optimizer, state.updates, spent))
    state.updates += 1


def _overflows(state: RunState) -> bool:
    """Unscale the gradients and adapt the loss scale. Returns True and clears the gradients if one is not finite.

    Raises FloatingPointError if gradients still overflow at a loss scale below 1e-3: then the scale is not the cause.
    """
    state.loss_scale.unscale_(state.optimizer)
    gradients = [p.grad for group in state.optimizer.param_groups for p in group["params"] if p.grad is not None]
    finite = bool(torch.stack([torch.isfinite(tensors.local(one)).all() for one in gradients]).all())
    overflows = not all(ranks.gathered(finite))
    state.loss_scale.update()
    if overflows:
        state.optimizer.zero_grad(set_to_none=True)
        if state.loss_scale.get_scale() < 1e-3:
            raise FloatingPointError(f"the gradient is not finite at update {state.updates}, whatever the loss scale")
    return overflows


def _read(
    state: RunState, batch: Batch, with_entropy: bool, entropy_gradient: bool
) -> tuple[Batch, Float[Tensor, "M T"], Float[Tensor, "M T"] | None]:
    """A microbatch on the learner's device, with the learner's log-probs and, if asked, entropies of its tokens.

    `entropy_gradient`: whether the entropies carry a gradient.
    """
    laid_out = forward_inputs(
        state.learner, batch.prompts, batch.tokens, batch.loss_mask, state.microbatching, state.precision
    )
    there, inputs = on_device((batch, laid_out), state.device)
    logprobs, entropy = logprobs_of(
        state.learner, inputs, state.temperature, state.precision, with_entropy, entropy_gradient,
        state.microbatching,
    )  # fmt: skip
    return there, logprobs, entropy


def _sizes(batch: Batch) -> tuple[list[int], list[int]]:
    """Prompt and response lengths of a microbatch's rows, for the account."""
    return list(map(len, batch.prompts)), batch.response_mask.sum(dim=1).tolist()
