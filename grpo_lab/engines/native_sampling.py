"""Prefill texts into a KV cache, and sample one token per row: what waves and streams of the native engine share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from grpo_lab.engines.native_cache import cache_name
from grpo_lab.policy.models import widen
from grpo_lab.types import Float, Int, Tensor


def read_texts(
    model: PreTrainedModel, texts: Sequence[tuple[int, ...]], cache: DynamicCache
) -> tuple[Float[Tensor, "B V"], Int[Tensor, "B S"], Int[Tensor, "R"]]:
    """Prefill an empty cache with the distinct texts among `texts`, left-padded.

    Returns the logits after each distinct text, its attention mask (1 at tokens, 0 at padding), and the row of each of
    `texts` among them.
    """
    distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    longest = max(map(len, distinct))
    ids = torch.zeros(len(distinct), longest, dtype=torch.long)
    mask = torch.zeros(len(distinct), longest, dtype=torch.long)
    for text, place in distinct.items():
        ids[place, longest - len(text) :] = torch.tensor(text, dtype=torch.long)
        mask[place, longest - len(text) :] = 1
    padded = not mask.all()
    ids, mask = ids.to(model.device), mask.to(model.device)
    output = model(
        input_ids=ids,
        attention_mask=mask if padded else None,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
        **{cache_name(type(model)): cache},
    )
    return output.logits[:, -1], mask, torch.tensor([distinct[text] for text in texts], device=model.device)


def draw(
    logits: Float[Tensor, "R V"],
    uniforms: Float[Tensor, "R"],
    temperatures: Float[Tensor, "R"],
    top_ps: Float[Tensor, "R"] | None,
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """Sample one token per row by inverse CDF over token ids; return tokens and log-probs.

    The log-prob is that of the full softmax at the row's temperature. Top-p restricts the candidates but
    does not renormalise the log-prob, so that it means the same as the learner's. `top_ps` None: no top-p.
    Temperature 0 is greedy, with log-probs at temperature 1.
    """
    greedy = temperatures == 0
    safe = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    logprobs = torch.log_softmax(widen(logits) / safe[:, None], dim=-1)
    # The CDF is summed in float64: other rows of the batch may move an fp32 sum across a boundary.
    probabilities = logprobs.double().exp()
    if top_ps is not None:
        probabilities = _top_p(probabilities, top_ps)
    cdf = probabilities.cumsum(dim=-1)
    drawn = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True).squeeze(1)
    # A uniform just below 1 can round onto the end of the CDF; the last token with any mass is right then.
    last = probabilities.shape[1] - 1 - probabilities.flip(1).gt(0).int().argmax(dim=1)
    drawn = torch.where(greedy, logprobs.argmax(dim=1), torch.minimum(drawn, last))
    return drawn, logprobs.gather(1, drawn[:, None]).squeeze(1)


def _top_p(probabilities: Float[Tensor, "R V"], top_ps: Float[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """Set to zero all tokens outside the smallest set of most likely tokens whose mass reaches top_p."""
    ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
    outside = (ordered.cumsum(dim=1) - ordered >= top_ps[:, None]) & (top_ps[:, None] < 1)
    return probabilities.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), 0.0)
