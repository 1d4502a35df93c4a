"""The budget account: what a run has spent on each budget axis, and when its budget is used up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import torch
import transformers

from grpo_lab.checks import require_positive


class BudgetAxis(Enum):
    """The quantity that ends a run. Only device_seconds depends on the machine."""

    steps = "steps"
    prompts = "prompts"
    completions = "completions"
    sampled_tokens = "sampled_tokens"
    trained_tokens = "trained_tokens"
    flops = "flops"
    simulated_seconds = "simulated_seconds"
    device_seconds = "device_seconds"


@dataclass(frozen=True)
class Budget:
    """Stop at the first step whose counter on `axis` has reached `amount`."""

    axis: BudgetAxis
    amount: float

    def __post_init__(self) -> None:
        require_positive(self, "amount")

    @property
    def is_simulated(self) -> bool:
        return self.axis is BudgetAxis.simulated_seconds


@dataclass(frozen=True)
class ModelFlops:
    """Floating point operations of one model: 2 per weight and token, plus attention.

    `weights` counts weights in matrix products. The embedding table is looked up and not multiplied, so it does not
    count; the output head counts, even when it is tied to the table.
    """

    weights: int
    attention: int  # 4 * layers * width of the heads, per token and per token of its context

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> ModelFlops:
        """The counts of a transformers causal LM."""
        config = model.config.get_text_config(decoder=True)
        weights = ((module, getattr(module, "weight", None)) for module in model.modules())
        matrices = sum(
            weight.numel()
            for module, weight in weights
            if isinstance(weight, torch.Tensor) and weight.ndim == 2 and not isinstance(module, torch.nn.Embedding)
        )
        heads = getattr(config, "num_attention_heads", 0)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        return cls(matrices, 4 * config.num_hidden_layers * heads * head_dim)

    def forward(self, prompt_length: int, response_length: int) -> int:
        """One forward pass over a whole sequence."""
        return self.span(0, prompt_length + response_length)

    def span(self, start: int, stop: int) -> int:
        """Forward operations for the tokens at positions start..stop-1, each attending to all tokens before it."""
        contexts = (stop * (stop + 1) - start * (start + 1)) // 2
        return 2 * self.weights * (stop - start) + self.attention * contexts


@dataclass
class ComputeAccount:
    """Cumulative counters, checkpointed with the run.

    `sampled_tokens` are prompt tokens (once per group) plus all sampled tokens. `trained_tokens` are tokens in the
    loss, once per update. `discarded_tokens` are sampled tokens that never entered a loss. `estimation_tokens` are
    tokens generated only to estimate a value or a baseline. With one pass over a batch
    sampled = prompts + trained + discarded + estimation + partial responses that wait to be continued.
    `device_seconds` is wall time times devices, without evaluation and checkpoints. It is the only counter that is not
    a function of the run, so it is logged separately; `simulated_seconds` (cost_model.py) is one.
    `flops` count whole rows: savings by packing and recomputed layers depend on the machine and are ignored.
    """

    steps: int = 0
    prompts: int = 0
    completions: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    discarded_tokens: int = 0
    estimation_tokens: int = 0
    flops: int = 0
    simulated_seconds: float = 0.0
    device_seconds: float = 0.0

    def generated(
        self,
        cost: ModelFlops,
        prompt_lengths: Sequence[int],
        lengths: Sequence[Sequence[int]],
        before: Sequence[Sequence[int]],
        injected: int = 0,
    ) -> None:
        """Count one call of the sampler.

        `prompt_lengths` is [P]. `lengths` and `before` are each response's tokens added and tokens before the call
        [P][G]. A prompt and a response count once, when their first token is sampled. Each call prefills a prompt once
        for its group, and a continued response up to where it stopped. A response without new tokens was aborted
        before its turn and cost nothing. `injected` of the added tokens were injected and not sampled.
        """
        self.sampled_tokens -= injected
        for prompt, group, parts in zip(prompt_lengths, lengths, before):
            begins = any(group) and not any(parts)
            self.prompts += begins
            self.completions += sum(length > 0 and part == 0 for length, part in zip(group, parts))
            self.sampled_tokens += prompt * begins + sum(group)
            self.flops += cost.span(0, prompt) * any(group)
            self.flops += sum(cost.span(prompt, prompt + part + new) for new, part in zip(group, parts) if new)

    def estimated(self, cost: ModelFlops, contexts: Sequence[int], lengths: Sequence[Sequence[int]]) -> None:
        """Count continuations for an estimate: context lengths [K], each prefilled once, and new tokens [K][S]."""
        for context, ends in zip(contexts, lengths):
            self.completions += len(ends)
            self.sampled_tokens += sum(ends)
            self.estimation_tokens += sum(ends)
            self.flops += cost.span(0, context) + sum(cost.span(context, context + length) for length in ends)

    def forwarded(self, cost: ModelFlops, prompt_lengths: Sequence[int], lengths: Sequence[int]) -> None:
        """Count one forward pass without gradient over rows with these lengths."""
        self.flops += sum(cost.forward(p, n) for p, n in zip(prompt_lengths, lengths))

    def trained(self, cost: ModelFlops, prompt_lengths: Sequence[int], lengths: Sequence[int], tokens: int) -> None:
        """Count one forward and backward pass with `tokens` tokens in the loss. A backward pass costs two forwards."""
        self.trained_tokens += tokens
        self.flops += 3 * sum(cost.forward(p, n) for p, n in zip(prompt_lengths, lengths))

    def spent(self, budget: Budget) -> float:
        """The share of the budget that is spent; the run ends at 1 or more."""
        return getattr(self, budget.axis.value) / budget.amount

    def metrics(self) -> dict[str, int | float]:
        """All counters except device_seconds, under their metric names."""
        return {f"budget/{name}": value for name, value in asdict(self).items() if name != "device_seconds"}
