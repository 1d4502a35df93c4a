"""What the loop does with the learner: score rollouts, and take one optimiser step over its microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpo_lab.config.run_config import RunConfig
from grpo_lab.learner.loss import mark_tokens, policy_loss
from grpo_lab.learner.step_metrics import UpdateTally
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.seeding import rollout_uniforms
from grpo_lab.types import Batch, Bool, Float, Graded, Rollouts, Tensor

if TYPE_CHECKING:
    from grpo_lab.run.state import RunState


def needs_logprobs(run: RunConfig) -> bool:
    """Whether anything asks for the learner's log-probs of the rollouts from before the updates.

    With one on-policy update and nothing else that reads them, they are the learner's own and every ratio is 1.
    """
    below_the_ratio = run.old_policy.recomputes and (run.updates.number > 1 or run.kl.shapes_reward)
    of_the_sampler = run.correction.needs_old_logprobs or run.rejection.needs_old_logprobs
    return below_the_ratio or of_the_sampler or run.entropy.selects_tokens


def skips_rows(run: RunConfig) -> bool:
    """Whether rows whose advantages are all exactly 0 are left out of the training passes.

    Such a row moves neither loss nor gradient unless one of the tricks named here reads it. What changes are the
    log's means over tokens (entropy, ratio, touched shares): they are over the tokens that were read, whose share of
    the loss is `train/read_share`. No update decision and no budget counter but `flops` changes.
    """
    in_the_loss = run.kl.needs_reference and not run.kl.shapes_reward
    reads_them = in_the_loss or run.entropy.needs_gradient or run.surrogate.pulls_without_advantage
    of_the_step = run.surrogate.mark_scope is not None or not run.aggregation.invariant
    return run.skip_rows_without_signal and not (reads_them or of_the_step)


def score(
    run: RunConfig, bench: RunState, model: torch.nn.Module, rollouts: Rollouts, with_entropy: bool
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"] | None]:
    """Log-probs and, if asked, entropies of the sampled tokens, no gradient, in the learner's precision."""
    prompts = [len(rollouts.prompt_of_row(row)) for row in range(rollouts.num_rows)]
    bench.ledger.scored(bench.model_flops, prompts, rollouts.lengths.tolist())
    return rollout_logprobs(
        model, rollouts, run.engine.temperature, run.learner_precision, bench.microbatching, bench.device, with_entropy
    )


def scaled(run: RunConfig, centred: Tensor, graded: Graded, stays: Bool[Tensor, "N T"]) -> Tensor:
    """Advantages of what the baseline left: one a response [P, G], or one a token [N, T] where it gives those.

    `stays`: tokens that the policy chose and no rejection threw out.
    """
    if not run.baseline.per_token:
        return run.scale(centred, graded)
    return run.scale.of_tokens(centred, stays & graded.counted.flatten()[:, None], graded)


def mark_noise(run: RunConfig, rollouts: Rollouts, step: int, number: int) -> Float[Tensor, "N T"] | None:
    """One uniform number a token where the surrogate chooses among tokens, drawn anew for each pass over the batch."""
    if run.surrogate.mark_scope is None:
        return None
    again = number // run.updates.minibatches
    return rollout_uniforms(rollouts, run.seed, f"mark/{again}" if again else "mark", step)


def marked(run: RunConfig, bench: RunState, batches: list[Batch], noise: Float[Tensor, "N T"] | None) -> list[Batch]:
    """The same microbatches; where the surrogate chooses among the step's tokens, after one more pass over them."""
    if noise is None:
        return batches
    with torch.no_grad():
        logprobs = [_read(run, bench, batch, with_entropy=False)[0] for batch in batches]
    for batch in batches:
        bench.ledger.scored(bench.model_flops, *_sizes(batch))
    return mark_tokens(run, batches, logprobs, noise)


def update(run: RunConfig, bench: RunState, batches: list[Batch], tokens: int, tally: UpdateTally) -> None:
    """One optimiser step over its microbatches, whose loss is of that many tokens; left out when it is of none.

    Raises FloatingPointError on a loss that is NaN or infinite, before the step that would have spread it.
    """
    if not batches:
        tally.skipped += 1
        return
    outputs, first = [], not tally.losses
    for batch in batches:
        logprobs, entropy = _read(run, bench, batch, with_entropy=True)
        if first:
            tally.keep_reading(batch.rows, logprobs, batch.loss_mask)
        output = policy_loss(run, batch, logprobs, entropy)
        bench.loss_scale.scale(output.loss).backward()
        outputs.append(output)
        tally.keep_touched(batch.rows, output.touched)
        bench.ledger.trained(bench.model_flops, *_sizes(batch), 0)
    bench.ledger.trained_tokens += tokens  # of rows that were left out too
    loss = tally.add_outputs(outputs, tokens)
    if not torch.isfinite(torch.tensor(loss)):
        raise FloatingPointError(f"the loss is {loss} at update {bench.updates}")
    if run.learner_precision.scales_loss and _overflows(bench):
        tally.overflowed += 1
        return
    tally.reports.append(run.optimizer.step(bench.optimizer, bench.updates))
    bench.updates += 1


def _overflows(bench: RunState) -> bool:
    """Take the loss scale out of the gradients and adapt it; True, and no gradients, where one is not finite.

    Raises FloatingPointError where even a loss scaled down overflows: then it is not the scale.
    """
    bench.loss_scale.unscale_(bench.optimizer)
    gradients = [p.grad for group in bench.optimizer.param_groups for p in group["params"] if p.grad is not None]
    overflows = not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    bench.loss_scale.update()
    if overflows:
        bench.optimizer.zero_grad(set_to_none=True)
        if bench.loss_scale.get_scale() < 1e-3:
            raise FloatingPointError(f"the gradient is not finite at update {bench.updates}, whatever the loss scale")
    return overflows


def _read(
    run: RunConfig, bench: RunState, batch: Batch, with_entropy: bool
) -> tuple[Float[Tensor, "M T"], Float[Tensor, "M T"] | None]:
    """The learner's log-probs and, if asked, entropies of a microbatch."""
    return token_logprobs(
        bench.learner,
        batch.prompts,
        batch.tokens,
        batch.loss_mask,
        run.engine.temperature,
        run.learner_precision,
        run.entropy.needs_gradient,
        with_entropy=with_entropy,
        microbatching=bench.microbatching,
    )


def _sizes(batch: Batch) -> tuple[list[int], list[int]]:
    """Prompt and response lengths of a microbatch's rows, for the ledger."""
    return list(map(len, batch.prompts)), batch.response_mask.sum(dim=1).tolist()
