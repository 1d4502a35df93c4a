"""A critic's weights, optimiser and training on one batch; its settings are in tricks/critic.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import on_cpu, on_device
from grpo_lab.policy.batching import microbatch_rows, spread
from grpo_lab.policy.logprobs import PaddedRows, lay_out, mask_lengths, token_values
from grpo_lab.policy.models import load_model
from grpo_lab.policy.optim import Optimizer, UpdateReport
from grpo_lab.policy.parts import in_parts, placed
from grpo_lab.policy.sharding import load_optimizer, load_whole, shard, within
from grpo_lab.tricks.base import NEGLIGIBLE
from grpo_lab.tricks.critic import Critic
from grpo_lab.tricks.precision import LmHead, Precision
from grpo_lab.types import Bool, Float, Int, Microbatching, Rollouts, Tensor


def open_critic(
    plan: Critic,
    folder: Path,
    learner: PreTrainedModel,
    optimizer: Optimizer,
    precision: Precision,
    microbatching: Microbatching,
    device: torch.device,
    seed: int,
) -> LiveCritic:
    """A critic, ready to train, that starts from the base model in `folder` or reads the learner's hidden states."""
    with in_parts():
        trunk = (load_model(folder, LmHead.same) if plan.owns_trunk else learner).base_model
    assert isinstance(trunk, PreTrainedModel), "what a causal LM is without its head"
    trunk = placed(trunk, device)  # the learner's is there already
    if plan.owns_trunk:
        shard(trunk, precision)
    table = learner.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor), "an embedding's weight is its table"
    width = table.shape[1]
    head = nn.Linear(width, 1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        head.weight.copy_((2 * torch.rand(1, width, generator=generator) - 1) * plan.head_range)
        head.bias.zero_()
    own = replace(optimizer, learning_rate=plan.learning_rate, warmup_updates=plan.warmup_updates)
    head = head.to(device)
    shard(head, precision)
    return LiveCritic(plan, trunk, head, own, precision, microbatching, None if plan.owns_trunk else learner)


@dataclass
class Fit:
    """Statistics of the critic's training on one batch: sums over its tokens and updates."""

    loss: float = 0.0
    clipped: int = 0
    tokens: int = 0
    gradient_norm: float = 0.0
    updates: int = 0

    def add(self, report: UpdateReport) -> None:
        """Count one optimiser step."""
        self.gradient_norm += report.gradient_norm
        self.updates += 1


class LiveCritic:
    """A critic's weights and optimiser. `learner` is the model that its trunk is a part of, None for one of its own."""

    def __init__(
        self,
        plan: Critic,
        trunk: PreTrainedModel,
        head: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        microbatching: Microbatching,
        learner: PreTrainedModel | None = None,
    ) -> None:
        self.plan, self.trunk, self.head, self.precision, self.microbatching = (
            plan,
            trunk,
            head,
            precision,
            microbatching,
        )
        self.recipe, self.learner = optimizer, learner
        parameters = [*head.parameters(), *(trunk.parameters() if plan.owns_trunk else ())]
        self.optimizer = optimizer.build(parameters, trunk)
        self.updates = 0
        self.cost = ModelFlops.of(trunk)  # the head is one row of weights: negligible

    def to_state(self) -> dict[str, Any]:
        """Weights, optimiser and counter, for the checkpoint."""
        return {
            "head": self.head.state_dict(),
            "trunk": self.trunk.state_dict() if self.plan.owns_trunk else None,
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def from_state(self, state: dict[str, Any]) -> None:
        """Restore what `to_state` returned in one process."""
        load_whole(self.head, state["head"])
        if state["trunk"] is not None:
            load_whole(self.trunk, state["trunk"])
        load_optimizer(self.optimizer, self.trained, state["optimizer"])
        self.updates = state["updates"]

    @property
    def device(self) -> torch.device:
        return next(self.head.parameters()).device

    @property
    def trained(self) -> nn.ModuleDict:
        """The modules that it trains, as one."""
        return nn.ModuleDict({"head": self.head} | ({"trunk": self.trunk} if self.plan.owns_trunk else {}))

    @torch.no_grad()
    def values(self, rollouts: Rollouts, account: ComputeAccount) -> Float[Tensor, "N T"]:
        """The value of the state before each sampled token, on the CPU; 0 elsewhere."""
        found = torch.zeros_like(rollouts.sampler_logprobs)
        groups = self._microbatches(rollouts, rollouts.sampled_mask, range(rollouts.num_rows))
        dealt, read = ranks.dealt(len(groups)), []
        for place, _ in dealt:
            layout, mask = self._inputs(rollouts, rollouts.sampled_mask, groups[place])
            read.append(self._read(on_device(layout, self.device), mask))
        for (place, counts), part in zip(dealt, on_cpu(read)):
            if counts:
                found[groups[place], : part.shape[1]] = part.to(found.dtype)
        for rows in groups:
            account.forwarded(self.cost, *_sizes(rollouts, rows))
        return ranks.added_up(found)

    def learn(
        self,
        rollouts: Rollouts,
        mask: Bool[Tensor, "N T"],
        old_values: Float[Tensor, "N T"],
        targets: Float[Tensor, "N T"],
        account: ComputeAccount,
    ) -> dict[str, float]:
        """Fit the masked tokens' values to their targets and return the step's critic metrics.

        loss = mean over tokens of max((v - target)^2, (clip(v, old - value_clip, old + value_clip) - target)^2) / 2
        """
        fit, size = Fit(), rollouts.group_size
        for part in self.plan.updates.split(len(rollouts.problems)):
            rows = [row for row in range(part.start * size, part.stop * size) if bool(mask[row].any())]
            tokens = int(mask[rows].sum()) if rows else 0
            if not tokens:
                continue
            groups, own = self._microbatches(rollouts, mask, rows), []
            for place, counts in ranks.dealt(len(groups)):
                layout, own_mask = self._inputs(rollouts, mask, groups[place])
                old, target = (one[groups[place], : own_mask.shape[1]] for one in (old_values, targets))
                layout, own_mask, old, target = on_device((layout, own_mask, old, target), self.device)
                values = self._read(layout, own_mask)
                loss, clipped = self._loss(values, old.to(values.dtype), target.to(values.dtype), own_mask)
                (loss / tokens if counts else 0 * loss).backward()
                own.append((loss.detach(), clipped))
            for chosen, (loss, clipped) in zip(groups, ranks.in_order(len(groups), on_cpu(own))):
                fit.loss, fit.clipped = fit.loss + float(loss), fit.clipped + int(clipped)
                self._count(account, *_sizes(rollouts, chosen))
            fit.tokens += tokens
            if not math.isfinite(fit.loss):
                raise FloatingPointError(f"the critic's loss is {fit.loss} at its update {self.updates}")
            fit.add(self.recipe.step(self.optimizer, self.updates))
            self.updates += 1
        return self._metrics(fit, old_values[mask].double(), targets[mask].double())

    def _count(self, account: ComputeAccount, prompts: list[int], lengths: list[int]) -> None:
        """Count the FLOPs of one pass with gradient; a trunk that gets no gradient counts as a forward pass."""
        if self.plan.owns_trunk:
            account.trained(self.cost, prompts, lengths, 0)
        else:
            account.forwarded(self.cost, prompts, lengths)

    def _loss(
        self, values: Float[Tensor, "M T"], old: Tensor, targets: Tensor, mask: Bool[Tensor, "M T"]
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Summed loss of the masked tokens, and for how many of them the clipped term is the larger."""
        plain = (values - targets) ** 2
        if self.plan.value_clip == 0:
            return (plain * mask).sum() / 2, mask.new_zeros((), dtype=torch.long)
        limit = self.plan.value_clip
        held = (torch.clamp(values, old - limit, old + limit) - targets) ** 2
        return (torch.maximum(plain, held) * mask).sum() / 2, ((held > plain) & mask).sum()

    def _metrics(self, fit: Fit, old: Float[Tensor, "K"], targets: Float[Tensor, "K"]) -> dict[str, float]:
        if not fit.updates:
            return {}
        spread = float(((targets - targets.mean()) ** 2).mean())
        metrics = {
            "critic/loss": fit.loss / fit.tokens,
            "critic/clip_fraction": fit.clipped / fit.tokens,
            "critic/gradient_norm": fit.gradient_norm / fit.updates,
            "critic/value": float(old.mean()),
            "critic/target": float(targets.mean()),
        }
        if spread > NEGLIGIBLE**2:  # equal targets differ by the rounding of advantage + value
            metrics["critic/explained_variance"] = 1 - float(((targets - old) ** 2).mean()) / spread
        return metrics

    def _inputs(
        self, rollouts: Rollouts, mask: Bool[Tensor, "N T"], rows: list[int]
    ) -> tuple[PaddedRows, Bool[Tensor, "M _"]]:
        """The rows laid out for the model, and their mask up to the last token of any, on the CPU."""
        own = mask[rows, : max(mask_lengths(mask[rows]))]
        tokens = rollouts.tokens[rows, : own.shape[1]]
        return lay_out([rollouts.prompt_of_row(row) for row in rows], tokens, own), own

    def _read(self, layout: PaddedRows, mask: Bool[Tensor, "M _"]) -> Float[Tensor, "M _"]:
        return token_values(self._features, self.head, layout, (mask.shape[0], mask.shape[1]), self.precision)

    def _features(self, ids: Int[Tensor, "M W"]) -> Float[Tensor, "M W H"]:
        def read() -> Tensor:
            return self.trunk(input_ids=ids, use_cache=False).last_hidden_state

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.plan.owns_trunk):
            return read() if self.learner is None else within(self.learner, read)

    def _microbatches(self, rollouts: Rollouts, mask: Bool[Tensor, "N T"], rows: range | list[int]) -> list[list[int]]:
        rows = [row for row in rows if bool(mask[row].any())]
        ends = mask_lengths(mask)
        lengths = [len(rollouts.prompt_of_row(row)) + ends[row] for row in rows]
        groups = spread(microbatch_rows(lengths, self.microbatching), lengths)
        return [[rows[place] for place in group] for group in groups]


def _sizes(rollouts: Rollouts, rows: list[int]) -> tuple[list[int], list[int]]:
    return [len(rollouts.prompt_of_row(row)) for row in rows], rollouts.lengths[rows].tolist()
