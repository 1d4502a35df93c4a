"""Rollouts and advantages -> the microbatches of one optimiser step.

Counts are taken over the whole optimiser step before it is cut, so microbatches are a matter of memory
and speed and never of the gradient. Rows are sorted by length and cut where padding would cost more than
another forward pass; rows with no token in the loss are not forwarded at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from grpo_lab.policy import mask_lengths, token_logprobs
from grpo_lab.tricks.denominator import Denominator
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Batch, Rollouts, Totals


@dataclass(frozen=True)
class Cut:
    """How rows are cut into microbatches; it moves memory and time, never a gradient.

    `microbatch_tokens` bounds the padded tokens of one forward pass, `split_cost_tokens` is how many
    tokens of padding cost as much as one more pass: few on a CPU, more on a GPU.
    """

    microbatch_tokens: int
    split_cost_tokens: int


@dataclass(frozen=True)
class StepInputs:
    """What every row of a rollout batch brings to the loss, before it is cut into optimiser steps."""

    rollouts: Rollouts
    loss_mask: Bool[Tensor, "N T"]
    advantages: Float[Tensor, "N T"]
    old_logprobs: Float[Tensor, "N T"] | None
    ref_logprobs: Float[Tensor, "N T"] | None
    correction_weights: Float[Tensor, "N T"] | None
    entropy_coef: float = 0.0


def microbatch_rows(lengths: Sequence[int], cut: Cut) -> list[list[int]]:
    """Cut rows of these total lengths into microbatches of at most `microbatch_tokens` padded tokens.

    A row longer than the budget gets a microbatch of its own. The order is by length, ties by index.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    width = wasted = 0
    for row in order:
        padding = width - lengths[row]
        fits = bool(groups) and (len(groups[-1]) + 1) * width <= cut.microbatch_tokens
        if fits and wasted + padding <= cut.split_cost_tokens:
            groups[-1].append(row)
            wasted += padding
        else:
            groups.append([row])
            width, wasted = lengths[row], 0
    return groups


def totals_of(counted: Bool[Tensor, "N T"], group_size: int, rows: Sequence[int], microbatches: int = 1) -> Totals:
    """Counts over the optimiser step whose counted tokens are given, laid out for microbatch `rows`."""
    row_tokens = counted.sum(dim=1)
    problem_tokens = row_tokens.reshape(-1, group_size).sum(dim=1)
    index = torch.tensor(rows)
    return Totals(
        num_tokens=int(row_tokens.sum()),
        num_rows=int((row_tokens > 0).sum()),
        num_problems=int((problem_tokens > 0).sum()),
        num_microbatches=microbatches,
        row_tokens=row_tokens[index],
        problem_tokens=problem_tokens[index // group_size],
    )


def make_minibatch(inputs: StepInputs, problems: range, denominator: Denominator, cut: Cut) -> list[Batch]:
    """The microbatches of the optimiser step over `problems`, longest rows first; [] if no token is left."""
    rollouts, size = inputs.rollouts, inputs.rollouts.group_size
    step = slice(problems.start * size, problems.stop * size)
    loss_mask = inputs.loss_mask[step]
    counted = denominator.counted_tokens(rollouts.sampled_mask[step], loss_mask)
    live = loss_mask.any(dim=1).nonzero().squeeze(1).tolist()
    prompts = [rollouts.prompt_of_row(step.start + row) for row in live]
    ends = mask_lengths(loss_mask)
    lengths = [len(prompt) + ends[row] for prompt, row in zip(prompts, live)]
    batches, groups = [], microbatch_rows(lengths, cut)
    for group in groups:
        rows = [live[place] for place in group]
        width = max(ends[row] for row in rows)
        batches.append(
            Batch(
                rows=torch.tensor(rows) + step.start,
                prompts=tuple(prompts[place] for place in group),
                tokens=rollouts.tokens[step][rows, :width],
                response_mask=rollouts.response_mask[step][rows, :width],
                loss_mask=loss_mask[rows, :width],
                advantages=inputs.advantages[step][rows, :width],
                sampler_logprobs=rollouts.sampler_logprobs[step][rows, :width],
                old_logprobs=_cut(inputs.old_logprobs, step, rows, width),
                ref_logprobs=_cut(inputs.ref_logprobs, step, rows, width),
                correction_weights=_cut(inputs.correction_weights, step, rows, width),
                entropy_coef=inputs.entropy_coef,
                totals=totals_of(counted, size, rows, len(groups)),
                original_totals=totals_of(rollouts.sampled_mask[step], size, rows, len(groups)),
            )
        )
    return batches


def _cut(values: Tensor | None, step: slice, rows: list[int], width: int) -> Tensor | None:
    return None if values is None else values[step][rows, :width]


@torch.no_grad()
def score_rollouts(
    model: nn.Module,
    rollouts: Rollouts,
    temperature: float,
    precision: Precision,
    cut: Cut,
    device: torch.device,
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
    """Log-prob and entropy of every sampled token under `model`, without gradient, on the CPU; 0 elsewhere."""
    scored, spread = torch.zeros_like(rollouts.sampler_logprobs), torch.zeros_like(rollouts.sampler_logprobs)
    prompts = [rollouts.prompt_of_row(row) for row in range(rollouts.num_rows)]
    ends = mask_lengths(rollouts.sampled_mask)
    lengths = [len(prompt) + end for prompt, end in zip(prompts, ends)]
    for rows in microbatch_rows(lengths, cut):
        width = max(ends[row] for row in rows)
        logprobs, entropy = token_logprobs(
            model,
            [prompts[row] for row in rows],
            rollouts.tokens[rows, :width].to(device),
            rollouts.sampled_mask[rows, :width].to(device),
            temperature,
            precision,
        )
        scored[rows, :width] = logprobs.to("cpu", scored.dtype)
        spread[rows, :width] = entropy.to("cpu", spread.dtype)
    return scored, spread


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The same microbatch with its tensors on `device`."""
    if device.type == "cpu":
        return batch

    def move(value: object) -> object:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, Totals):
            return Totals(**{name: move(part) for name, part in vars(value).items()})
        return value

    return Batch(**{name: move(value) for name, value in vars(batch).items()})


def expand(advantages: Tensor, mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Advantages of responses [P, G] or of tokens [N, T] -> of tokens, in the loss's precision; 0 outside `mask`."""
    own = advantages if advantages.shape == mask.shape and mask.shape[1] > 1 else advantages.reshape(-1, 1)
    return torch.where(mask, own, 0.0).to(torch.float32)
