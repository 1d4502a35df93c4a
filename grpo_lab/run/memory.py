"""Running out of memory: which stage it was, and what needs less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_LEARNER = (
    "lower microbatch_tokens or logits_per_chunk, or set gradient_checkpointing=true; model.lora.rank=16 trains an "
    "adapter, with model.frozen=bf16 beside half the weights"
)
_SAMPLER = "lower engine.max_rows or engine.max_tokens (engine.cache_gib and engine.memory_share with vLLM)"
REMEDIES = {
    "open": "choose a smaller model, model.lora.rank=16 with model.frozen=bf16, or evaluation.initial_kl=false, which "
    "keeps no copy of the first weights",
    "pass_rate": _SAMPLER,
    "generate": _SAMPLER,
    "logprobs": _LEARNER,
    "train": _LEARNER,
    "evaluate": f"{_SAMPLER}, or evaluation.downstream_max_tokens",
}
_SAVED = "Re-run the same command to resume from the last checkpoint; other settings begin another run"


class OutOfMemory(ValueError):
    """Raised in place of the allocator's own error; the message says what was computed and what needs less."""


@contextlib.contextmanager
def remedied(stage: str) -> Iterator[None]:
    """Raise OutOfMemory with a remedy where torch finds no memory, on a GPU or on the CPU, in this stage."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        remedy = REMEDIES.get(stage, _LEARNER)
        first = str(error).strip().splitlines()[0]
        raise OutOfMemory(f"out of memory (stage: {stage}; {first}): {remedy}. {_SAVED}") from error
