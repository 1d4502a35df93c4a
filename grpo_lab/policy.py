"""Models: loading them, and the log-probs of given tokens under the learner or the reference.

`token_logprobs` is the only place of the package that shifts by one: everywhere else column t of an
[N, T] tensor is about response token t.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_lab.tricks.precision import LmHead, Precision


class Fp32Head(nn.Linear):
    """An output head whose product is fp32 whatever the rest of the model computes in."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias)


def load_model(folder: Path, lm_head: LmHead) -> nn.Module:
    """The causal LM of `folder`: fp32 weights, on the CPU, in eval mode.

    It stays in eval mode for training too: dropout would make learner and sampler different policies.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    head = model.get_output_embeddings()
    if lm_head is LmHead.fp32 and type(head) is nn.Linear:
        # Changing the class keeps the parameter, its name and its tie to the embedding.
        head.__class__ = Fp32Head
    return model.eval()


def widen(scores: Tensor) -> Tensor:
    """At least fp32, so that a softmax never runs in half precision; float64 stays float64."""
    return scores if scores.dtype is torch.float64 else scores.float()


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a response: the tokenizer's EOS and those of the generation config."""
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    if generation.exists():
        listed = json.loads(generation.read_text()).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    eos = AutoTokenizer.from_pretrained(folder).eos_token_id
    if eos is None:
        raise ValueError(f"the tokenizer of {folder} has no end-of-text token: set tokenizer.eos_token and save it")
    return frozenset(ids | {eos})


def context_length(folder: Path) -> int | None:
    """The longest prompt plus response the model was built for, in tokens; None where it has no limit."""
    return getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", None)


def token_logprobs(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    tokens: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    temperature: float,
    precision: Precision,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, "M T"], Float[Tensor, "M T"]]:
    """Log-prob and entropy (nats) of each masked response token; 0 where the mask is False.

    Both are of the whole softmax at `temperature`, the distribution the sampler drew from. `mask` must
    cover response tokens only. Rows are padded on the right, where a causal model cannot see it, so no
    attention mask is needed and every row counts its positions from its own prompt.
    """
    device = tokens.device
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    widths = [len(prompt) + length for prompt, length in zip(prompts, mask_lengths(mask))]
    ids = torch.zeros(len(prompts), max(widths), dtype=torch.long)
    host_tokens = tokens.cpu()
    for row, (prompt, width) in enumerate(zip(prompts, widths)):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        ids[row, len(prompt) : width] = host_tokens[row, : width - len(prompt)]
    first = int(prompt_lengths.min()) - 1  # the first position whose logits any row needs
    autocast = (
        contextlib.nullcontext()
        if precision.dtype is torch.float32
        else torch.autocast(device.type, dtype=precision.dtype)
    )
    with autocast:
        logits = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=max(widths) - first).logits
    rows, columns = mask.nonzero(as_tuple=True)
    # The shift by one: token t of the response is predicted at position prompt + t - 1.
    predicted_at = prompt_lengths[rows] + columns - 1 - first
    scores = widen(logits[rows, predicted_at]) / temperature
    log_softmax = torch.log_softmax(scores, dim=-1)
    picked = log_softmax.gather(1, tokens[rows, columns][:, None]).squeeze(1)
    with contextlib.nullcontext() if entropy_gradient else torch.no_grad():
        spread = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    zeros = torch.zeros(tokens.shape, dtype=scores.dtype, device=device)
    return zeros.index_put((rows, columns), picked), zeros.index_put((rows, columns), spread)


def mask_lengths(mask: Bool[Tensor, "M T"]) -> list[int]:
    """One plus the last True column of each row; 0 for an empty row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(dim=1).tolist()
