"""What the loop does with the learner: score rollouts, and take one optimiser step over its microbatches."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.batching import score_rollouts
from grpo_lab.config import RunConfig
from grpo_lab.loss import mark_tokens, policy_loss
from grpo_lab.policy import token_logprobs
from grpo_lab.seeding import rollout_uniforms
from grpo_lab.types import Batch, Graded, Rollouts
from grpo_lab.vital_signs import UpdateTally
from grpo_lab.workbench import Workbench


def needs_scores(run: RunConfig) -> bool:
    """Whether anything asks for the learner's log-probs of the rollouts from before the updates.

    With one on-policy update and nothing else that reads them, they are the learner's own and every ratio is 1.
    """
    below_the_ratio = run.old_policy.recomputes and (run.updates.number > 1 or run.kl.shapes_reward)
    of_the_sampler = run.correction.needs_old_logprobs or run.rejection.needs_old_logprobs
    return below_the_ratio or of_the_sampler or run.entropy.selects_tokens


def score(
    run: RunConfig, bench: Workbench, model: torch.nn.Module, rollouts: Rollouts
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
    """Log-probs and entropies of the sampled tokens under a model of the learner's precision, without gradient."""
    prompts = [len(rollouts.prompt_of_row(row)) for row in range(rollouts.num_rows)]
    bench.ledger.scored(bench.cost, prompts, rollouts.lengths.tolist())
    return score_rollouts(model, rollouts, run.engine.temperature, run.learner_precision, run.cut, bench.device)


def scaled(run: RunConfig, centred: Tensor, graded: Graded, sampled_mask: Bool[Tensor, "N T"]) -> Tensor:
    """Advantages of what the baseline left: one a response [P, G], or one a token [N, T] where it gives those."""
    if not run.baseline.per_token:
        return run.scale(centred, graded)
    return run.scale.of_tokens(centred, sampled_mask & graded.counted.flatten()[:, None], graded)


def mark_noise(run: RunConfig, rollouts: Rollouts, step: int, number: int) -> Float[Tensor, "N T"] | None:
    """One uniform number a token where the surrogate chooses among tokens, drawn anew for each pass over the batch."""
    if run.surrogate.mark_scope is None:
        return None
    again = number // run.updates.minibatches
    return rollout_uniforms(rollouts, run.seed, f"mark/{again}" if again else "mark", step)


def marked(run: RunConfig, bench: Workbench, batches: list[Batch], noise: Float[Tensor, "N T"] | None) -> list[Batch]:
    """The same microbatches; where the surrogate chooses among the step's tokens, after one more pass over them."""
    if noise is None:
        return batches
    with torch.no_grad():
        logprobs = [_read(run, bench, batch)[0] for batch in batches]
    for batch in batches:
        bench.ledger.scored(bench.cost, *_sizes(batch))
    return mark_tokens(run, batches, logprobs, noise)


def update(run: RunConfig, bench: Workbench, batches: list[Batch], tally: UpdateTally) -> None:
    """One optimiser step over its microbatches; left out when no token is in the loss.

    Raises FloatingPointError on a loss that is NaN or infinite, before the step that would have spread it.
    """
    if not batches:
        tally.skipped += 1
        return
    outputs = []
    for batch in batches:
        output = policy_loss(run, batch, *_read(run, bench, batch))
        output.loss.backward()
        outputs.append(output)
        tally.keep_touched(batch.rows, output.touched)
        bench.ledger.trained(bench.cost, *_sizes(batch), int(batch.loss_mask.sum()))
    loss = tally.add_outputs(outputs)
    if not torch.isfinite(torch.tensor(loss)):
        raise FloatingPointError(f"the loss is {loss} at update {bench.updates}")
    tally.reports.append(run.optimizer.step(bench.optimizer, bench.updates))
    bench.updates += 1


def _read(run: RunConfig, bench: Workbench, batch: Batch) -> tuple[Float[Tensor, "M T"], Float[Tensor, "M T"]]:
    """The learner's log-probs and entropies of a microbatch."""
    return token_logprobs(
        bench.learner,
        batch.prompts,
        batch.tokens,
        batch.loss_mask,
        run.engine.temperature,
        run.learner_precision,
        run.entropy.needs_gradient,
    )


def _sizes(batch: Batch) -> tuple[list[int], list[int]]:
    """Prompt and response lengths of a microbatch's rows, for the ledger."""
    return list(map(len, batch.prompts)), batch.response_mask.sum(dim=1).tolist()
