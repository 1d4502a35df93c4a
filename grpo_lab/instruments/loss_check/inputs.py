"""The batches on which a loss is checked: plain ones, and those on which losses go wrong. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

PROMPT = 3  # columns before the first response token: the prompt, padded on its left
GROUP = 4  # rows of a group
MAX_TOKENS = 16  # the token limit of a response
SPLITS = {  # rows of each microbatch
    "plain": ((1,) * 8, (2,) * 4, (3, 3, 2), (4, 4)),
    "cut": ((4, 8),),
}
# Ratios of tokens and mean ratios of responses between all bounds of published options, in an order without meaning.
_RATIOS = (1.25, 0.76, 3.5, 0.9, 1.275, 0.65, 1.1, 12.0, 0.81, 1.45, 1.0015, 0.83, 1.24, 0.999, 2.0, 1.271, 0.3, 1.21)
_MEANS = (1.001, 1.24, 0.999, 1.276, 0.9, 1.271, 0.7, 1.1, 1.4)
_REWARDS = (1.0, 0.0, 0.7, -0.1)  # of a group, in some order: every group has the same standard deviation


@dataclass(frozen=True)
class LossInputs:
    """One call of the loss: what it may read, by the name of its argument.

    Log-probs [N, T] and the masks [N, T] have `PROMPT` prompt columns first, and a column holds the log-prob of its
    own token. Outside the masks log-probs are arbitrary finite numbers. `response_mask` is True on response tokens,
    `mask` on those that are in the loss, `attention_mask` on all but padding. `advantages` [N] are `rewards` less the
    mean of their group, divided by its standard deviation (n in its denominator). The counts, from `num_tokens` on,
    are of the whole optimiser step, of which this may be one microbatch.
    """

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    sampler_logprobs: np.ndarray
    ref_logprobs: np.ndarray
    mask: np.ndarray
    response_mask: np.ndarray
    attention_mask: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    group_ids: np.ndarray
    num_tokens: int  # tokens in the loss
    num_rows: int
    num_live_rows: int  # rows with a token in the loss
    num_microbatches: int
    max_tokens: int = MAX_TOKENS
    bf16: bool = False  # log-probs and advantages are given in bfloat16

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {one.name: value for one in fields(self) if isinstance(value := getattr(self, one.name), np.ndarray)}

    def arguments(self) -> dict[str, Any]:
        """Every argument of a loss by its name; `token_advantages` [N, T] repeats a row's advantage in each column."""
        counts = ("num_tokens", "num_rows", "num_live_rows", "num_microbatches", "max_tokens")
        spread = np.repeat(self.advantages[:, None], self.mask.shape[1], axis=1)
        return self.arrays | {"token_advantages": spread} | {name: getattr(self, name) for name in counts}

    def counted(self) -> LossInputs:
        """With the counts of these rows as those of the step."""
        live = int(self.mask.any(axis=1).sum())
        return replace(self, num_tokens=int(self.mask.sum()), num_rows=len(self.mask), num_live_rows=live)

    def rows(self, index: Any) -> LossInputs:
        """Some rows, as a microbatch: the counts stay those of the step."""
        return replace(self, **{name: value[index] for name, value in self.arrays.items()})

    def padded(self, left: int, right: int) -> LossInputs:
        """More columns that hold no token, with log-probs like those of tokens."""

        def wider(values: np.ndarray) -> np.ndarray:
            if values.ndim == 1:
                return values
            fill = np.zeros if values.dtype == bool else lambda shape: np.full(shape, values.mean())
            return np.concatenate([fill((len(values), left)), values, fill((len(values), right))], axis=1).astype(
                values.dtype
            )

        return replace(self, **{name: wider(value) for name, value in self.arrays.items()})

    def without(self, removed: np.ndarray) -> LossInputs:
        """Rows whose tokens are all out of the loss, and no response tokens either; the rows remain."""
        keep = ~removed[:, None]
        mask = self.mask & keep
        return replace(self, mask=mask, response_mask=self.response_mask & keep).counted()


def normalised(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Rewards less the mean of their group over its standard deviation, which must not be 0."""
    found = np.empty_like(rewards)
    for group in np.unique(group_ids):
        own = group_ids == group
        found[own] = (rewards[own] - rewards[own].mean()) / rewards[own].std()
    return found


def _batch(seed: int, lengths: Sequence[int], padding: int) -> LossInputs:
    """Random log-probs; ratios to old policy and sampler go through the lists above, for each sign of advantages."""
    drawn = random.Random(seed)
    rows, width = len(lengths), PROMPT + max(lengths) + padding

    def uniform(low: float, high: float) -> np.ndarray:
        return np.array([[drawn.uniform(low, high) for _ in range(width)] for _ in range(rows)])

    rewards = np.array([r + 0.25 * g for g in range(rows // GROUP) for r in drawn.sample(_REWARDS, GROUP)])
    groups = np.arange(rows) // GROUP
    advantages = normalised(rewards, groups)
    logprobs, ref = uniform(-3.0, -0.1), uniform(-0.6, 0.6)
    policies = []
    for policy in range(2):  # the old policy and the sampler
        log_ratio, used = uniform(-1.1, 1.1), {True: 9 * seed, False: 9 * seed + policy}
        for row, length in enumerate(lengths):
            sign = bool(advantages[row] > 0)
            own = slice(PROMPT, PROMPT + length)
            log_ratio[row, own] = np.log([_RATIOS[(used[sign] + place) % len(_RATIOS)] for place in range(length)])
            used[sign] += length
            if length >= 2 and row % 2 == policy:
                log_ratio[row, own.stop - 1] += (
                    length * np.log(_MEANS[(row + seed) % len(_MEANS)]) - log_ratio[row, own].sum()
                )
        policies.append(logprobs - log_ratio)
    above = np.maximum(np.maximum(policies[0], policies[1]).max(axis=1, keepdims=True), -0.05) + 0.05
    old, sampler, logprobs = policies[0] - above, policies[1] - above, logprobs - above
    columns = np.arange(width)[None, :]
    response = (columns >= PROMPT) & (columns < PROMPT + np.array(lengths)[:, None])
    prompts = np.array([PROMPT - row % PROMPT for row in range(rows)])[:, None]
    found = LossInputs(
        logprobs, old, sampler, np.minimum(logprobs + ref, -0.01), response, response,
        response | ((columns < PROMPT) & (columns >= PROMPT - prompts)), advantages, rewards, groups,
        int(response.sum()), rows, rows, 1,
    )  # fmt: skip
    digits = {name: value.round(5) for name, value in found.arrays.items() if name.endswith("logprobs")}
    return replace(found, **digits)


def _far_from_bounds(batch: LossInputs) -> LossInputs:
    """Ratios that rounding brings over no bound of a published option, in numbers that bfloat16 has."""
    rows, width = batch.mask.shape
    jitter = np.where(np.arange(width) % 2, 0.97, 1.03)[None, :]
    ratios = np.resize([0.5, 1.1, 1.6, 0.9], rows)[:, None] * jitter
    old, sampler = batch.logprobs - np.log(ratios), batch.logprobs - np.log(np.roll(ratios, 1, axis=0))
    found = replace(batch, old_logprobs=old, sampler_logprobs=sampler)
    return replace(found, **{name: _rounded(value) for name, value in found.arrays.items()})


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers rounded to bfloat16; masks and indices as they are."""
    if values.dtype != np.float64:
        return values
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def plain() -> LossInputs:
    """Two groups; the mask has every response token."""
    return _batch(1, [8, 5, 1, 3, 6, 7, 2, 4], 1)


def cut() -> LossInputs:
    """Three groups; one response and some tokens of two others are out of the loss."""
    found = _batch(2, [3, 6, 4, 2, 5, 7, 1, 4, 6, 2, 5, 3], 3)
    mask = found.mask.copy()
    mask[4] = False
    mask[1, PROMPT + 2] = mask[8, PROMPT + 1] = mask[8, PROMPT + 5] = False
    return replace(found, mask=mask).counted()


def extreme() -> LossInputs:
    """One group, with log-ratios to the old policy of 4, 15, -15 and 25 nats."""
    found = _batch(3, [6, 2, 4, 3], 1)
    logprobs, old = found.logprobs.copy(), found.old_logprobs.copy()
    for row, column, gap in ((0, 1, 4.0), (0, 4, -15.0), (1, 0, 15.0), (2, 3, -25.0), (2, 0, 25.0), (3, 1, 4.0)):
        place = row, PROMPT + column
        logprobs[place] = -0.4 if gap > 0 else -0.2 + gap
        old[place] = logprobs[place] - gap
    return replace(found, logprobs=logprobs, old_logprobs=old, ref_logprobs=np.minimum(logprobs + 0.3, -0.01))


IDENTIFIED_BY = ("plain", "cut")
TABLED = (*IDENTIFIED_BY, "extreme")


def tabled() -> dict[str, LossInputs]:
    """The batches of which the numbers of published losses are kept."""
    return {"plain": plain(), "cut": cut(), "extreme": extreme()}


def calls() -> dict[str, LossInputs]:
    """Every call of the check by its name; a microbatch is BATCH/ROWS:PLACE, such as plain/3-3-2:0."""
    found = tabled()
    one = found["plain"]
    for batch, sizes, index, part in microbatches(found):
        found[f"{split_name(batch, sizes)}:{index}"] = part
    found["padded right"] = one.padded(0, 3)
    found["padded left"] = one.padded(2, 0)
    nothing = np.zeros_like(one.mask)
    found["empty mask"] = replace(one, mask=nothing, response_mask=nothing)  # a microbatch of a step that has tokens
    found["empty step"] = found["empty mask"].counted()
    gone = np.arange(len(one.mask)) == 1
    found["masked row"] = one.without(gone)
    found["row removed"] = one.without(gone).rows(~gone).counted()
    tied = np.where(one.group_ids == 1, 0.1, one.rewards)
    zero = np.where(one.group_ids == 1, 0.0, one.advantages)
    found["tied group"] = replace(one, rewards=tied, advantages=zero)
    found["groups of one"] = replace(one, group_ids=np.arange(len(one.mask)))
    found["rounded"] = _far_from_bounds(one)
    found["bf16"] = replace(found["rounded"], bf16=True)
    return found


def microbatches(batches: Mapping[str, LossInputs]) -> Iterator[tuple[str, tuple[int, ...], int, LossInputs]]:
    """Batch, rows of each microbatch, place of this one, and its inputs."""
    for batch, splits in SPLITS.items():
        for sizes in splits:
            whole = replace(batches[batch], num_microbatches=len(sizes))
            for index in range(len(sizes)):
                start = sum(sizes[:index])
                yield batch, sizes, index, whole.rows(slice(start, start + sizes[index]))


def split_name(batch: str, sizes: Sequence[int]) -> str:
    return f"{batch}/{'-'.join(map(str, sizes))}"
