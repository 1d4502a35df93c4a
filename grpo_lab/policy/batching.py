"""Rollouts and advantages -> the microbatches of one optimiser step.

Counts are taken over the whole optimiser step before it is split, so microbatches change memory and speed
but never the gradient. Rows are packed in their order (packing.py), or sorted by length and split where padding
would cost more than another forward pass. Rows with no token in the loss are not forwarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import on_cpu, on_device
from grpo_lab.policy.logprobs import forward_inputs, logprobs_of, mask_lengths
from grpo_lab.policy.packing import microbatch_rows, packed_rows
from grpo_lab.tracking.activity import doing
from grpo_lab.tricks.denominator import Denominator
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Batch, Bool, Float, Microbatching, Rollouts, Tensor, Totals


@dataclass(frozen=True)
class StepInputs:
    """Everything the loss reads of a rollout batch, before the batch is split into optimiser steps."""

    rollouts: Rollouts
    loss_mask: Bool[Tensor, "N T"]
    advantages: Float[Tensor, "N T"]
    old_logprobs: Float[Tensor, "N T"] | None
    ref_logprobs: Float[Tensor, "N T"] | None
    correction_weights: Float[Tensor, "N T"] | None
    entropy_coef: float = 0.0
    right: Bool[Tensor, "N"] | None = None  # rows whose correctness is 1
    learner_share: Float[Tensor, "N T"] | None = None  # in the old log-probs, where they are interpolated


def totals_of(
    counted: Bool[Tensor, "N T"],
    group_size: int,
    rows: Sequence[int],
    advantages: Float[Tensor, "N T"],
    microbatches: int = 1,
) -> Totals:
    """Counts over one optimiser step from its mask of counted tokens; per-row counts are those of `rows`.

    A row's side is that of the sign of its `advantages`, which are 0 outside the loss.
    """
    row_tokens = counted.sum(dim=1)
    by_group = row_tokens.reshape(-1, group_size)
    problem_tokens = by_group.sum(dim=1)
    signs = ((advantages > 0).any(dim=1).long() - (advantages < 0).any(dim=1).long()).reshape(-1, group_size)
    same_side = signs[:, :, None] == signs[:, None, :]
    index = torch.tensor(rows)
    return Totals(
        num_tokens=int(row_tokens.sum()),
        num_rows=int((row_tokens > 0).sum()),
        num_problems=int((problem_tokens > 0).sum()),
        num_microbatches=microbatches,
        row_tokens=row_tokens[index],
        problem_tokens=problem_tokens[index // group_size],
        problem_rows=(by_group > 0).sum(dim=1)[index // group_size],
        side_tokens=(same_side * by_group[:, None]).sum(dim=2).flatten()[index],
        side_rows=(same_side & (by_group[:, None] > 0)).sum(dim=2).flatten()[index],
    )


def tokens_in_loss(inputs: StepInputs, problems: range) -> int:
    """How many tokens are in the loss of the optimiser step over `problems`."""
    size = inputs.rollouts.group_size
    return int(inputs.loss_mask[problems.start * size : problems.stop * size].sum())


def make_minibatch(
    inputs: StepInputs,
    problems: range,
    denominator: Denominator,
    microbatching: Microbatching,
    only_signal: bool = False,
    divisible: bool = True,
) -> list[Batch]:
    """The microbatches of the optimiser step over `problems`; [] if no token is in the loss.

    `only_signal` leaves out rows whose advantages are all 0; every count still includes them. If all rows are such,
    the shortest one stays: with a zero gradient Adam still makes an update, from its momentum. `divisible`: no trick
    reads how rows are divided into microbatches, so there may be more of them, for several ranks.
    """
    rollouts, size = inputs.rollouts, inputs.rollouts.group_size
    step = slice(problems.start * size, problems.stop * size)
    loss_mask = inputs.loss_mask[step]
    counted = denominator.counted_tokens(rollouts.sampled_mask[step], loss_mask)
    right = None if inputs.right is None else inputs.right[step]
    live, ends = loss_mask.any(dim=1).nonzero().squeeze(1).tolist(), mask_lengths(loss_mask)
    if only_signal and live:
        pulls = (loss_mask & (inputs.advantages[step] != 0)).any(dim=1).tolist()
        live = [row for row in live if pulls[row]] or [min(live, key=ends.__getitem__)]
    prompts = [rollouts.prompt_of_row(step.start + row) for row in live]
    batches, groups = [], _microbatches(prompts, [ends[row] for row in live], microbatching)
    if divisible:
        groups = spread(groups, [len(prompt) + ends[row] for prompt, row in zip(prompts, live)])
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
                totals=totals_of(counted, size, rows, inputs.advantages[step], len(groups)),
                original_totals=totals_of(
                    rollouts.sampled_mask[step], size, rows, inputs.advantages[step], len(groups)
                ),
                right=None if right is None else right[rows],
                right_tokens=0 if right is None else int(loss_mask[right].sum()),
                learner_share=_cut(inputs.learner_share, step, rows, width),
            )
        )
    return batches


def _microbatches(
    prompts: Sequence[tuple[int, ...]], ends: Sequence[int], microbatching: Microbatching
) -> list[list[int]]:
    """Split rows into microbatches; a microbatch is a list of indices into `prompts`. `ends` are response lengths."""
    if microbatching.packs:
        return packed_rows(prompts, ends, microbatching)
    return microbatch_rows([len(prompt) + end for prompt, end in zip(prompts, ends)], microbatching)


def spread(groups: list[list[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Halve the largest microbatches until all ranks have equally many, longest first; unchanged with one rank.

    `sizes` are the tokens of each row. Single rows are not divided, so some ranks may have one microbatch less.
    """
    if ranks.number() == 1:
        return groups

    def tokens(group: list[int]) -> int:
        return sum(sizes[row] for row in group)

    groups = list(groups)
    while len(groups) % ranks.number():
        largest = max(groups, key=lambda group: (len(group) > 1, tokens(group)))
        if len(largest) == 1:
            break
        # Where the first half has half of the tokens; rows with one prompt stay neighbours.
        halves = min(range(1, len(largest)), key=lambda end: abs(2 * tokens(largest[:end]) - tokens(largest)))
        place = groups.index(largest)
        groups[place : place + 1] = [largest[:halves], largest[halves:]]
    return sorted(groups, key=tokens, reverse=True)


def _cut(values: Tensor | None, step: slice, rows: list[int], width: int) -> Tensor | None:
    return None if values is None else values[step][rows, :width]


@torch.no_grad()
def rollout_logprobs(
    model: nn.Module,
    rollouts: Rollouts,
    temperature: float,
    precision: Precision,
    microbatching: Microbatching,
    device: torch.device,
    with_entropy: bool = True,
    collision: bool = False,
) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"] | None]:
    """Log-prob and (`with_entropy`) entropy of every sampled token under `model`; 0 elsewhere.

    With `collision` the second is not the entropy but the sum over the vocabulary of the squared probabilities.
    Computed without gradient, each rank a part of the rows; the results are on the CPU, whole on every rank.
    """
    found = torch.zeros_like(rollouts.sampler_logprobs)
    entropies = torch.zeros_like(found) if with_entropy or collision else None
    prompts = [rollouts.prompt_of_row(row) for row in range(rollouts.num_rows)]
    ends = mask_lengths(rollouts.sampled_mask)
    groups = spread(_microbatches(prompts, ends, microbatching), [len(one) + end for one, end in zip(prompts, ends)])
    dealt, read = ranks.dealt(len(groups)), []
    with doing("", len(dealt), "microbatches") as shown:
        for place, _ in shown.each(dealt):
            rows = groups[place]
            part = slice(0, max(ends[row] for row in rows))
            laid_out = forward_inputs(
                model, [prompts[row] for row in rows], rollouts.tokens[rows, part], rollouts.sampled_mask[rows, part],
                microbatching, precision,
            )  # fmt: skip
            inputs = on_device(laid_out, device)
            read.append(
                logprobs_of(model, inputs, temperature, precision, with_entropy, False, microbatching, collision)
            )
    for (place, counts), (logprobs, entropy) in zip(dealt, on_cpu(read)):
        if not counts:
            continue
        where = (groups[place], slice(0, logprobs.shape[1]))
        found[where] = logprobs.to(found.dtype)
        if entropies is not None:
            assert entropy is not None, "logprobs_of gives the entropy that it is asked for"
            entropies[where] = entropy.to(entropies.dtype)
    return ranks.added_up(found), None if entropies is None else ranks.added_up(entropies)


def expand(advantages: Tensor, mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Advantages per response [P, G] or per token [N, T] -> per token, in the loss's dtype; 0 outside `mask`."""
    own = advantages if advantages.shape == mask.shape and mask.shape[1] > 1 else advantages.reshape(-1, 1)
    return torch.where(mask, own, 0.0).to(torch.float32)
