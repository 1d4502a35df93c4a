"""The exact policy gradient by enumeration of every response, and bias and variance of each set of options against it.

The problem is that of a response limit of L tokens: J is the mean over prompts of the expected reward, over all
responses that end with a stop token within L tokens or are cut there. Only a model with a small vocabulary allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from grpo_lab.instruments.microscope.exchange import StoredStep
from grpo_lab.instruments.microscope.measure import Extras, Policy, token_gradient, weight_gradients
from grpo_lab.instruments.microscope.option_sets import StepOptions
from grpo_lab.rollout.grading import grade
from grpo_lab.tasks.base import Grader
from grpo_lab.types import Bool, Float, Graded, Int, NoiseKey, Problem, Rollouts, Tensor, to_groups

MOST_PREFIXES = 20_000  # rows of a forward pass of the enumeration
BLOCKS = 16  # of sampled steps, for the jackknife
ROUNDING = 1e-3  # a relative bias below this is not distinguishable from sums in single precision


@dataclass(frozen=True)
class Enumerated:
    """All responses to each of P prompts, R of them, in the same order for each; probabilities and rewards [P, R]."""

    rollouts: Rollouts  # groups of R
    graded: Graded
    logprobs: Float[Tensor, "P R"]
    token_logprobs: Float[Tensor, "N T"]


def vocabulary_of(policy: Policy) -> int:
    """How many tokens the model can emit."""
    return int(policy.model.config.vocab_size)


def longest_possible(vocabulary: int, most: int = MOST_PREFIXES) -> int:
    """The largest response limit, up to 8 tokens, whose prefixes can be enumerated; 0 if those of 2 cannot."""
    return max((limit for limit in range(2, 9) if vocabulary ** (limit - 1) <= most), default=0)


def all_responses(vocabulary: int, stops: frozenset[int], limit: int) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Every response of at most `limit` tokens, and whether it ended with a stop token."""
    going = [token for token in range(vocabulary) if token not in stops]
    found = [(*start, stop) for length in range(limit) for start in product(going, repeat=length) for stop in stops]
    cut = list(product(going, repeat=limit))
    return found + cut, [True] * len(found) + [False] * len(cut)


def enumerate_responses(
    policy: Policy,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    stops: frozenset[int],
    limit: int,
    reward: Grader,
    decode: Callable[[Rollouts], list[str]],
    seed: int,
) -> Enumerated:
    """All responses of at most `limit` tokens to each prompt. Raises ValueError where there are too many."""
    vocabulary = vocabulary_of(policy)
    if limit < 1 or vocabulary ** (limit - 1) > MOST_PREFIXES:
        most = longest_possible(vocabulary)
        remedy = f"choose 1 to {most} tokens" if most else "use a model with a smaller vocabulary"
        raise ValueError(
            f"--exact {limit}: responses of {limit} tokens out of {vocabulary} have {vocabulary}^{limit - 1} prefixes, "
            f"and at most {MOST_PREFIXES} can be enumerated: {remedy}"
        )
    responses, finished = all_responses(vocabulary, stops, limit)
    number, lengths = len(responses), torch.tensor([len(one) for one in responses]).repeat(len(prompts))
    tokens = torch.zeros(number, limit, dtype=torch.long)
    for row, ids in enumerate(responses):
        tokens[row, : len(ids)] = torch.tensor(ids)
    tokens = tokens.repeat(len(prompts), 1)
    mask = torch.arange(limit)[None, :] < lengths[:, None]
    rollouts = Rollouts(
        tuple(problems), tuple(prompts), number, tokens, mask, mask, torch.zeros(mask.shape),
        torch.zeros_like(tokens), torch.tensor(finished * len(prompts)), torch.zeros(len(tokens), dtype=torch.bool),
    )  # fmt: skip
    of_tokens = torch.cat([_looked_up(policy, prompt, tokens[:number], mask[:number], stops) for prompt in prompts])
    rollouts = replace(rollouts, sampler_logprobs=of_tokens)
    keys = [NoiseKey(seed, "microscope", 0, one.id, row) for one in problems for row in range(number)]
    graded = grade(rollouts, decode(rollouts), reward, keys)
    return Enumerated(rollouts, graded, to_groups(of_tokens.double().sum(dim=1), number), of_tokens)


@torch.no_grad()
def _looked_up(
    policy: Policy, prompt: tuple[int, ...], tokens: Int[Tensor, "R T"], mask: Tensor, stops: frozenset[int]
) -> Float[Tensor, "R T"]:
    """Log-prob of every token of all responses to one prompt, from one pass over the longest prefixes."""
    vocabulary, limit = vocabulary_of(policy), tokens.shape[1]
    going = [token for token in range(vocabulary) if token not in stops]
    rank = torch.full((vocabulary,), 0)
    rank[going] = torch.arange(len(going))
    prefixes = torch.tensor(list(product(going, repeat=limit - 1)), dtype=torch.long).reshape(-1, limit - 1)
    ids = torch.cat([torch.tensor([prompt]).expand(len(prefixes), -1), prefixes], dim=1)
    parts = [
        policy.model(input_ids=part.to(policy.device), use_cache=False).logits[:, len(prompt) - 1 :].float().cpu()
        for part in ids.split(2048)
    ]
    table = (torch.cat(parts) / policy.temperature).log_softmax(dim=2)  # [prefixes, T, V]
    found, row = torch.zeros(tokens.shape), torch.zeros(len(tokens), dtype=torch.long)
    for t in range(limit):
        found[:, t] = table[row.clamp(max=len(prefixes) - 1), t, tokens[:, t]]
        row = row + rank[tokens[:, t]] * len(going) ** max(limit - 2 - t, 0)
    return torch.where(mask, found, 0.0)


def exact_gradient(policy: Policy, every: Enumerated, without: Bool[Tensor, "N"] | None = None) -> Float[Tensor, " D"]:
    """The gradient of J in the weights: the sum over responses of probability, reward and gradient of the log-prob.

    `without`: responses that are left out of the sum.
    """
    weights = (every.logprobs.exp() * every.graded.reward).flatten()[:, None] / len(every.rollouts.problems)
    if without is not None:
        weights = torch.where(without[:, None], 0.0, weights)
    weights = torch.where(every.rollouts.sampled_mask, weights, 0.0).float()
    return weight_gradients(policy, every.rollouts, [(weights, torch.zeros_like(weights))])[0].double()


def sampled_step(
    every: Enumerated, group_size: int, generator: torch.Generator
) -> tuple[StoredStep, Int[Tensor, " rows"]]:
    """A step whose groups are drawn from the exact policy, which is also old policy and learner; and the rows drawn."""
    size = every.rollouts.group_size
    places = torch.multinomial(every.logprobs.exp(), group_size, replacement=True, generator=generator)
    rows = (places + size * torch.arange(len(places))[:, None]).flatten()
    tensors = ("tokens", "response_mask", "sampled_mask", "sampler_logprobs", "weight_version", "finished", "looped")
    chosen = {name: getattr(every.rollouts, name)[rows] for name in tensors}
    rollouts = replace(every.rollouts, group_size=group_size, **chosen)
    graded = every.graded

    def drawn(values: Tensor) -> Tensor:
        return values.gather(1, places)

    graded = replace(
        graded,
        components={name: drawn(values) for name, values in graded.components.items()},
        **{name: drawn(value) for name, value in vars(graded).items() if isinstance(value, torch.Tensor)},
    )
    logprobs = every.token_logprobs[rows]
    return StoredStep(1, rollouts, graded, [], {"old": logprobs, "current": logprobs}), rows


@dataclass(frozen=True)
class WithError:
    """A number with its standard error from the sampled steps."""

    value: float
    error: float


@dataclass(frozen=True)
class Bias:
    """A set of options as an estimator of the exact gradient, with jackknife standard errors over sampled steps.

    `scale` is the mean estimate's component along the exact gradient, over its norm; a learning rate absorbs it. The
    others are relative to that component. `squared_bias` is the squared length of the rest of the mean estimate,
    without the part that is only noise, so it may be below 0; `variance` the trace of the covariance of one step.
    `undrawn` is the length of the exact gradient's part from responses that no sampled step drew, which no standard
    error sees, over its norm.
    """

    scale: WithError
    squared_bias: WithError
    variance: WithError
    undrawn: float

    @property
    def floor(self) -> float:
        """A relative bias below this is explained by rounding, or by responses that were never drawn."""
        return max(ROUNDING, self.undrawn)

    @property
    def significant(self) -> bool:
        """True if the direction of the mean estimate differs from the exact one by more than two standard errors."""
        return self.squared_bias.value > max(2 * self.squared_bias.error, self.floor**2)

    @property
    def bound(self) -> float:
        """The relative bias two standard errors above what was found."""
        return max((max(self.squared_bias.value, 0.0) + 2 * self.squared_bias.error) ** 0.5, self.floor)


def biases(
    sets: Mapping[str, StepOptions],
    policy: Policy,
    every: Enumerated,
    exact: Float[Tensor, " D"],
    group_size: int,
    steps: int,
    seed: int,
) -> dict[str, Bias]:
    """Bias and variance of every set over `steps` sampled steps, the same ones for all."""
    generator, blocks = torch.Generator().manual_seed(seed), min(BLOCKS, steps)
    each = steps // blocks
    means = torch.zeros(len(sets), blocks, len(exact), dtype=torch.float64)
    squares, along, along_squares = (torch.zeros(len(sets), blocks, dtype=torch.float64) for _ in range(3))
    unit, drawn = exact / exact.norm(), torch.zeros(every.rollouts.num_rows, dtype=torch.bool)
    for block in range(blocks):
        for _ in range(each):
            step, rows = sampled_step(every, group_size, generator)
            drawn[rows] = True
            tokens = [token_gradient(options, step, Extras()) for options in sets.values()]
            found = -weight_gradients(policy, step.rollouts, [(one.logprob, one.entropy) for one in tokens]).double()
            means[:, block] += found / each
            part = found @ unit
            squares[:, block] += found.square().sum(dim=1) / each
            along[:, block] += part / each
            along_squares[:, block] += part.square() / each
    size = float(exact.norm())
    undrawn = float(exact_gradient(policy, every, drawn).norm()) / size
    found = {}
    for index, name in enumerate(sets):
        scale, rest, variance = _estimates(means[index], squares[index], along[index], along_squares[index], each, size)
        found[name] = Bias(scale, rest, variance, undrawn)
    return found


def _estimates(
    means: Tensor, squares: Tensor, along: Tensor, along_squares: Tensor, each: int, size: float
) -> list[WithError]:
    """Scale, squared bias and variance of one set from its blocks, with jackknife standard errors over blocks."""
    blocks = len(means)

    def numbers(kept: Tensor) -> Tensor:
        count = each * int(kept.sum())
        mean, first = means[kept].mean(dim=0), along[kept].mean()
        spread = count / (count - 1)
        variance = (squares[kept].mean() - mean.square().sum()) * spread
        aside = variance - (along_squares[kept].mean() - first**2) * spread
        rest = mean.square().sum() - first**2 - aside / count
        return torch.stack([first / size, rest / first**2, variance / first**2])

    whole = torch.ones(blocks, dtype=torch.bool)
    left = torch.stack([numbers(torch.arange(blocks) != block) for block in range(blocks)])
    errors = ((left - left.mean(dim=0)).square().sum(dim=0) * (blocks - 1) / blocks).sqrt()
    return [WithError(float(value), float(error)) for value, error in zip(numbers(whole), errors)]
