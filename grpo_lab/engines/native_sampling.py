"""Prefill texts into a KV cache, and sample one token per row: what waves and streams of the native engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from grpo_lab.engines.native_cache import cache_name
from grpo_lab.seeding import token_uniforms
from grpo_lab.types import Bool, Float, Int, Request, Tensor

_BLOCK = 128  # tokens; the vocabularies of most models are multiples of it
_ROUNDING = 1e-9  # far more than float64 sums of a vocabulary's probabilities are off: 2e-16 a token


def remaining(request: Request) -> int:
    """How many more tokens a request may get."""
    return request.params.max_tokens - len(request.prefix)


@dataclass
class Candidates:
    """How many tokens of each row top-p sorts, and whether that was ever too few: a flag on the device."""

    count: int
    too_few: Bool[Tensor, "1"]


@dataclass(frozen=True)
class BatchState:
    """What R rows are sampled with, and what was sampled: tensors of one row per request, T tokens wide."""

    noise: Float[Tensor, "R T"]  # float64
    budgets: Int[Tensor, "R"]
    temperatures: Float[Tensor, "R"]
    top_ps: Float[Tensor, "R"]
    patience: Int[Tensor, "R"]  # the run of sure tokens that ends a row
    sure: Float[Tensor, "R"]  # the log-prob above which a token is sure
    sure_for: Int[Tensor, "R"]
    lengths: Int[Tensor, "R"]  # 0 until the row has ended
    looped: Bool[Tensor, "R"]
    tokens: Int[Tensor, "R T"]
    logprobs: Float[Tensor, "R T"]

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device, dtype: torch.dtype) -> BatchState:
        """The state before the first token. `dtype`: of log-probs."""
        budgets = [remaining(request) for request in requests]
        rows, width = len(requests), max(budgets)
        noise = np.zeros((rows, width))
        for row, request in enumerate(requests):
            noise[row, : budgets[row]] = token_uniforms(request.noise, len(request.prefix), request.params.max_tokens)
        limits = [request.params.stop_when_sure for request in requests]
        patience = [width + 1 if one is None else one.tokens for one in limits]
        sure = [1.0 if one is None else one.probability for one in limits]
        return cls(
            noise=torch.from_numpy(noise).to(device),
            budgets=torch.tensor(budgets, device=device),
            temperatures=torch.tensor([request.params.temperature for request in requests], device=device),
            top_ps=torch.tensor([request.params.top_p for request in requests], device=device),
            patience=torch.tensor(patience, device=device),
            sure=torch.tensor(sure, dtype=torch.float64, device=device).log(),
            sure_for=torch.zeros(rows, dtype=torch.long, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            looped=torch.zeros(rows, dtype=torch.bool, device=device),
            tokens=torch.zeros(rows, width, dtype=torch.long, device=device),
            logprobs=torch.zeros(rows, width, dtype=dtype, device=device),
        )

    @property
    def width(self) -> int:
        """How many tokens a row has room for."""
        return self.tokens.shape[1]

    def first(self, rows: int) -> BatchState:
        """Views of the first rows."""
        return BatchState(**{name: tensor[:rows] for name, tensor in vars(self).items()})


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
    by_blocks: bool | None = None,
    candidates: Candidates | None = None,
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """Sample one token per row by inverse CDF over token ids; return tokens and log-probs.

    The log-prob is that of the full softmax at the row's temperature. Top-p restricts the candidates but
    does not renormalise the log-prob, so that it means the same as the learner's. `top_ps` None: no top-p.
    Temperature 0 is greedy, with log-probs at temperature 1. `by_blocks`: never wait for the device, except for top-p
    without `candidates`; None: unless it is a CPU.
    """
    greedy = temperatures == 0
    by_blocks = logits.device.type != "cpu" if by_blocks is None else by_blocks
    safe = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    logprobs = torch.log_softmax(logits / safe[:, None], dim=-1)  # temperatures are fp32: that widens half precision
    # The CDF is summed in float64: other rows of the batch may move an fp32 sum across a boundary.
    probabilities = (logprobs if by_blocks else logprobs.double()).exp()
    if top_ps is not None and candidates is None:
        probabilities = _top_p(probabilities, top_ps)
    drawn = (inverse_cdf_by_blocks if by_blocks else inverse_cdf)(probabilities, uniforms)
    if top_ps is not None and candidates is not None:
        cut = (top_ps < 1) & ~greedy
        drawn = torch.where(cut, _from_candidates(probabilities, uniforms, top_ps, candidates, cut), drawn)
    if by_blocks or greedy.any():
        drawn = torch.where(greedy, logprobs.argmax(dim=1), drawn)
    return drawn, logprobs.gather(1, drawn[:, None]).squeeze(1)


def inverse_cdf(probabilities: Float[Tensor, "R V"], uniforms: Float[Tensor, "R"]) -> Int[Tensor, "R"]:
    """The first token of each row whose cumulative probability exceeds the uniform number's share of the total."""
    cdf = probabilities.cumsum(dim=-1)
    drawn = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True).squeeze(1)
    vocabulary = probabilities.shape[1]
    if (drawn == vocabulary).any():
        # A uniform just below 1 can round onto the end of the CDF; the last token with any mass is right then.
        last = vocabulary - 1 - probabilities.flip(1).gt(0).int().argmax(dim=1)
        drawn = torch.minimum(drawn, last)
    return drawn


def inverse_cdf_by_blocks(probabilities: Float[Tensor, "R V"], uniforms: Float[Tensor, "R"]) -> Int[Tensor, "R"]:
    """`inverse_cdf` that never waits for a GPU and makes no float64 copy of `probabilities`.

    The sums of blocks of tokens say in which block the token lies; only that block is searched. Sums are float64, of
    any dtype of `probabilities`.
    """
    vocabulary = probabilities.shape[1]
    padding = -vocabulary % _BLOCK
    blocks = (F.pad(probabilities, (0, padding)) if padding else probabilities).unflatten(1, (-1, _BLOCK))
    ends = blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    targets = uniforms * ends[:, -1]
    block = _first_above(ends, targets)
    tokens = blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    before = F.pad(ends, (1, 0)).gather(1, block[:, None])
    place = _first_above(before + tokens.cumsum(dim=1, dtype=torch.float64), targets)
    return (block * _BLOCK + place).clamp(max=vocabulary - 1)  # only a row without a number reaches the padding


def _first_above(sums: Float[Tensor, "R K"], targets: Float[Tensor, "R"]) -> Int[Tensor, "R"]:
    """The first place of each ascending row whose sum exceeds its target, or else the first of its largest sum."""
    reachable = torch.minimum(targets, torch.nextafter(sums[:, -1], torch.zeros_like(targets)))
    return torch.searchsorted(sums, reachable[:, None], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)


def _top_p(probabilities: Float[Tensor, "R V"], top_ps: Float[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """Set to zero all tokens outside the smallest set of most likely tokens whose mass reaches top_p.

    Only tokens of probability (total - top_p) / V or more are sorted. That changes no result, ties included: a less
    likely token and all tokens sorted after it, V at most, have less than total - top_p together, so the tokens before
    it have more than top_p, and it lies outside. `_ROUNDING` keeps this true of sums in float64. Equal probabilities
    are either all sorted or all left out, so the sorted tokens are the beginning of the whole vocabulary's order.
    A GPU waits for the number of candidates.
    """
    cut, device = top_ps < 1, probabilities.device
    least = (probabilities.sum(dim=1, dtype=torch.float64) - top_ps - _ROUNDING) / probabilities.shape[1]
    outside = probabilities < torch.where(cut, least, -torch.inf)[:, None]
    rows, tokens = (~outside & cut[:, None]).nonzero(as_tuple=True)
    starts = torch.searchsorted(rows, torch.arange(len(cut) + 1, device=device))
    places = torch.arange(len(rows), device=device) - starts[rows]
    candidates = torch.full((len(cut), int(starts.diff().max())), -1.0, dtype=torch.float64, device=device)
    candidates[rows, places] = probabilities[rows, tokens].double()
    outside[rows, tokens] = _beyond(candidates, top_ps)[rows, places]
    return probabilities.masked_fill(outside, 0.0)


def _beyond(candidates: Float[Tensor, "R K"], top_ps: Float[Tensor, "R"]) -> Bool[Tensor, "R K"]:
    """Which candidates, in the order of their ids, come after the mass of likelier ones has reached top_p."""
    ordered, order = candidates.sort(dim=1, descending=True, stable=True)
    reached = ordered.cumsum(dim=1) - ordered >= top_ps[:, None]
    return torch.zeros_like(reached).scatter(1, order, reached)


def _from_candidates(
    probabilities: Float[Tensor, "R V"],
    uniforms: Float[Tensor, "R"],
    top_ps: Float[Tensor, "R"],
    candidates: Candidates,
    cut: Bool[Tensor, "R"],
) -> Int[Tensor, "R"]:
    """`_top_p` and `inverse_cdf` among the likeliest tokens of each row, without waiting for a GPU.

    What is left out is at most as likely as the least candidate. If that one, or its equal, lies inside, a token left
    out might too: `too_few` is set, of the rows of `cut`.
    """
    ids = probabilities.topk(candidates.count, dim=1, sorted=False).indices.sort(dim=1).values
    likely = probabilities.gather(1, ids).double()
    beyond = _beyond(likely, top_ps)
    if candidates.count < probabilities.shape[1]:
        candidates.too_few |= (~beyond & (likely == likely.amin(dim=1, keepdim=True)) & cut[:, None]).any()
    place = inverse_cdf_by_blocks(likely.masked_fill(beyond, 0.0), uniforms)
    return ids.gather(1, place[:, None]).squeeze(1)
