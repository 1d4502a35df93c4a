"""The records that pass from stage to stage, all frozen, and the legend of shapes.

Problem -> Rollouts -> Graded -> advantages -> Batch -> LossOutput -> gradient

Shape letters, used in every signature of the package:

    P  problems drawn for a step          G  responses per problem (the group)
    N  rows = P * G, problem-major        T  response tokens, padded on the right
    M  rows of one microbatch             V  vocabulary
    S  problems of the training split

Rows are problem-major everywhere, so [N] <-> [P, G] is a reshape and no record keeps a dictionary of
groups. Rows never leave a record: they are masked, and only `batching.py` gathers what is trained.
Column t of every [N, T] tensor is about `tokens[:, t]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

# Annotations say what a tensor's axes are. Tests check them, and load torch first; a run does not look at them, and so
# needs neither jaxtyping, nor torch before a model is loaded.
if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Unchecked:
            """Takes the place of a shape that nobody checks."""

            def __class_getitem__(cls, item: object) -> type:
                return cls

        Bool = Float = Int = _Unchecked

    if "torch._C" in sys.modules:
        from torch import Tensor
    else:

        class _OnlyInAnnotations(type):
            """Refuses to answer isinstance: it would say no of every tensor."""

            def __instancecheck__(cls, value: object) -> bool:
                raise TypeError("this Tensor stands for torch's in annotations alone; ask isinstance with torch.Tensor")

        class Tensor(metaclass=_OnlyInAnnotations):
            """Takes the place of torch.Tensor in annotations while torch is not loaded."""


@dataclass(frozen=True)
class Problem:
    """One question with its right answer.

    `id` is stable across runs and unique over all splits of a task: the sampling noise, the
    curriculum and the per-question results refer to it. `target_length` is the response length that the
    question asks for, None where it asks for none.
    """

    id: int
    question: str
    answer: str
    difficulty: int
    target_length: int | None = None


class Exhausted(ValueError):
    """There is nothing left to train on: a world that is solved, a curriculum run dry, a filter that never fills.

    The run ends with its state saved; the message says what ran out and what to change.
    """


class StopReason(str, Enum):
    """Why a response ended: its own end of text, the token budget, a loop, or an abort from outside."""

    EOS = "eos"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORTED = "aborted"


@dataclass(frozen=True)
class NoiseKey:
    """Names one response's noise; its token at position t reads uniform number t of this key."""

    seed: int
    stream: str
    step: int
    problem: int
    response: int


@dataclass(frozen=True)
class SureRun:
    """Stop a response after this many consecutive tokens that were each drawn with more than this probability."""

    tokens: int
    probability: float


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn. `max_tokens` counts response tokens, a given prefix included."""

    max_tokens: int
    temperature: float
    top_p: float
    stop_when_sure: SureRun | None = None


@dataclass(frozen=True)
class Request:
    """One response to generate: token ids in, never text, so nothing is tokenised twice.

    `prefix` holds response tokens that exist already (a partial response to continue, or injected
    text); noise positions count from the first token of the response, the prefix included.
    """

    prompt: tuple[int, ...]
    noise: NoiseKey
    params: SamplingParams
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What the engine drew after `prefix`: ids, log-probs under the sampling distribution's
    untruncated softmax at the request's temperature, and the weights that made each token.

    `injected` marks tokens that a trick put in and the policy did not choose, their log-prob being 0; empty
    where there are none."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    stop: StopReason
    injected: tuple[bool, ...] = ()

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Which tokens the policy chose."""
        return tuple(not put_in for put_in in self.injected) or (True,) * len(self.tokens)

    def continued(self, further: Completion) -> Completion:
        """This completion and what was drawn after it, as one."""
        injected = tuple(not chosen for chosen in self.sampled + further.sampled)
        return Completion(
            self.tokens + further.tokens,
            self.logprobs + further.logprobs,
            self.weight_versions + further.weight_versions,
            further.stop,
            injected if any(injected) else (),
        )


OnFinish = Callable[[int, Completion], Iterable[int]]


@dataclass(frozen=True)
class Tools:
    """What a trick that generates may use beside the sampler: token ids of a text, and one uniform number of a key."""

    encode: Callable[[str], tuple[int, ...]]
    uniform: Callable[[NoiseKey], float]


@runtime_checkable
class Sampler(Protocol):
    """What a trick that generates may ask of an engine."""

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """One completion per request, in order. `on_finish(i, completion)` is called when request i
        ends and returns indices of requests to abort; those come back partial, marked ABORTED."""
        ...


@dataclass(frozen=True)
class Rollouts:
    """G responses to each of P problems, as tokens.

    `response_mask` is True on every real response token, `sampled_mask` only where the policy chose
    the token (injected text is real but not sampled; padding is neither). `finished` is True where
    the response ended with its own end of text, `looped` where it was stopped for repeating itself.
    """

    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    group_size: int
    tokens: Int[Tensor, "N T"]
    response_mask: Bool[Tensor, "N T"]
    sampled_mask: Bool[Tensor, "N T"]
    sampler_logprobs: Float[Tensor, "N T"]
    weight_version: Int[Tensor, "N T"]
    finished: Bool[Tensor, "N"]
    looped: Bool[Tensor, "N"]

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Int[Tensor, "N"]:
        return self.response_mask.sum(dim=1)

    @property
    def interrupted(self) -> Bool[Tensor, "N"]:
        """Rows into which text was injected."""
        return (self.response_mask & ~self.sampled_mask).any(dim=1)

    def prompt_of_row(self, row: int) -> tuple[int, ...]:
        return self.prompts[row // self.group_size]

    def choose(self, places: Sequence[int]) -> Rollouts:
        """The groups at these places, in this order."""
        size = self.group_size
        rows = torch.tensor([place * size + member for place in places for member in range(size)], dtype=torch.long)
        return replace(
            self,
            problems=tuple(self.problems[place] for place in places),
            prompts=tuple(self.prompts[place] for place in places),
            **{name: getattr(self, name)[rows] for name in _tensor_fields(self)},
        )

    @staticmethod
    def join(parts: Sequence[Rollouts]) -> Rollouts:
        """Groups of the same size one after another, padded to the width of the widest."""
        width = max(part.tokens.shape[1] for part in parts)

        def widened(tensor: Tensor) -> Tensor:
            return tensor if tensor.ndim == 1 else torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

        return replace(
            parts[0],
            problems=tuple(problem for part in parts for problem in part.problems),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            **{name: torch.cat([widened(getattr(part, name)) for part in parts]) for name in _tensor_fields(parts[0])},
        )


def _tensor_fields(record: Rollouts | Graded) -> list[str]:
    return [field.name for field in fields(record) if isinstance(getattr(record, field.name), torch.Tensor)]


@dataclass(frozen=True)
class Graded:
    """What the verifier and the reward tricks say of each response.

    `outcome` is the verifier's word, 0 or 1, and is never shaped. `reward` is the sum of the named
    `components`. `counted` rows enter group and batch statistics, `trained` rows enter the loss: the
    two masks are separate so that "masked before" and "masked after" the statistics differ by one bit. `target_length`
    is the length that the prompt asked for, None where prompts ask for none. `lengths` are whole responses;
    `sampled_lengths` are the tokens of them that the policy chose and no rejection threw out. `progress` is the share
    of the budget that was spent when the group was drawn, None outside training.
    """

    outcome: Float[Tensor, "P G"]
    reward: Float[Tensor, "P G"]
    components: Mapping[str, Float[Tensor, "P G"]]
    lengths: Int[Tensor, "P G"]
    sampled_lengths: Int[Tensor, "P G"]
    truncated: Bool[Tensor, "P G"]
    counted: Bool[Tensor, "P G"]
    trained: Bool[Tensor, "P G"]
    target_length: Int[Tensor, "P G"] | None = None
    progress: Float[Tensor, "P G"] | None = None

    def choose(self, places: Sequence[int]) -> Graded:
        """The groups at these places, in this order."""
        index = torch.tensor(list(places), dtype=torch.long)
        named = {name: values[index] for name, values in self.components.items()}
        return replace(self, components=named, **{name: getattr(self, name)[index] for name in _tensor_fields(self)})

    @staticmethod
    def join(parts: Sequence[Graded]) -> Graded:
        """Groups of the same size and components one after another."""
        named = {name: torch.cat([part.components[name] for part in parts]) for name in parts[0].components}
        tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in _tensor_fields(parts[0])}
        return replace(parts[0], components=named, **tensors)

    def with_component(self, name: str, values: Float[Tensor, "P G"]) -> Graded:
        """A copy in which `values` is one more named part of the reward."""
        assert name not in self.components, f"component {name} was added twice"
        return replace(self, reward=self.reward + values, components={**self.components, name: values})


@dataclass(frozen=True)
class Groups:
    """Whole groups as they were generated, graded, shaped and masked: what a group filter chooses from."""

    indices: tuple[int, ...]  # of the problems in the training split
    rollouts: Rollouts
    texts: tuple[str, ...]  # [N]
    graded: Graded
    shaped: Graded
    masked: Graded

    @property
    def number(self) -> int:
        return len(self.indices)

    def choose(self, places: Sequence[int]) -> Groups:
        """The groups at these places, in this order."""
        size = self.rollouts.group_size
        return Groups(
            tuple(self.indices[place] for place in places),
            self.rollouts.choose(places),
            tuple(self.texts[place * size + member] for place in places for member in range(size)),
            self.graded.choose(places),
            self.shaped.choose(places),
            self.masked.choose(places),
        )

    @staticmethod
    def join(parts: Sequence[Groups]) -> Groups:
        """Groups of several rounds one after another."""
        if len(parts) == 1:
            return parts[0]
        return Groups(
            tuple(index for part in parts for index in part.indices),
            Rollouts.join([part.rollouts for part in parts]),
            tuple(text for part in parts for text in part.texts),
            Graded.join([part.graded for part in parts]),
            Graded.join([part.shaped for part in parts]),
            Graded.join([part.masked for part in parts]),
        )


@runtime_checkable
class GroupSource(Protocol):
    """What a filter that refills may ask for. No problem comes twice within a step."""

    def groups(self, number: int) -> Groups:
        """That many further problems with all their responses. Raises Exhausted where too few are left."""
        ...

    def race(self, number: int, wanted: int, accepts: Callable[[Graded], bool], keeps_partial: bool) -> Groups:
        """Start `number` problems and stop all generation once `wanted` finished groups were accepted.

        `accepts` sees each group [1, G] when its last response ends. Returns the groups that finished, in the order
        in which they did. What was cut off is kept for the next race, which takes it up first, or thrown away.
        """
        ...


@dataclass(frozen=True)
class Totals:
    """Global counts of one optimiser step, after the denominator trick chose which rows count.

    Every aggregation divides by these and never by a count of the microbatch, which is why the split
    into microbatches, padding and ranks cannot move a gradient. `row_tokens` and `problem_tokens` are
    laid out per row of the microbatch, but each entry is the count over the whole optimiser step.
    """

    num_tokens: int
    num_rows: int
    num_problems: int
    num_microbatches: int
    row_tokens: Int[Tensor, "M"]
    problem_tokens: Int[Tensor, "M"]


@dataclass(frozen=True)
class Batch:
    """The rows of one microbatch, as the loss may read them.

    `old_logprobs` is None where the old policy is the learner itself at this very update; the loss then
    takes the learner's own log-probs, detached, and every ratio is exactly 1. `rows` says which row of the
    rollouts each row is. `totals` are the counts the loss is divided by, `original_totals` those it would be
    divided by had nothing left it. `marked` are the tokens a surrogate chose over the whole optimiser step,
    None until it has.
    """

    rows: Int[Tensor, "M"]
    prompts: tuple[tuple[int, ...], ...]
    tokens: Int[Tensor, "M T"]
    response_mask: Bool[Tensor, "M T"]
    loss_mask: Bool[Tensor, "M T"]
    advantages: Float[Tensor, "M T"]
    sampler_logprobs: Float[Tensor, "M T"]
    old_logprobs: Float[Tensor, "M T"] | None
    ref_logprobs: Float[Tensor, "M T"] | None
    correction_weights: Float[Tensor, "M T"] | None
    entropy_coef: float
    totals: Totals
    original_totals: Totals
    marked: Bool[Tensor, "M T"] | None = None


@dataclass(frozen=True)
class LossOutput:
    """The differentiable share of the step's loss that this microbatch carries, and sums for the log.

    `sums` are over tokens of the loss and additive over microbatches: the loop adds them all and divides
    once, by their entry "tokens". `touched` are the tokens of the loss whose gradient the surrogate changed.
    """

    loss: Float[Tensor, ""]
    sums: Mapping[str, Float[Tensor, ""]]
    touched: Bool[Tensor, "M T"]


def to_groups(rows: Tensor, group_size: int) -> Tensor:
    """[N, ...] -> [P, G, ...]; rows are problem-major, so this is a reshape."""
    assert rows.shape[0] % group_size == 0, "rows were dropped before a group statistic"
    return rows.reshape(rows.shape[0] // group_size, group_size, *rows.shape[1:])


@dataclass(frozen=True)
class Microbatching:
    """How rows are cut into microbatches and laid out; it moves memory and time, never a gradient.

    `microbatch_tokens` bounds the tokens of one forward pass, `padding_tolerance_tokens` is how many tokens of padding
    cost as much as one more pass (one more block of attention where rows are packed): few on a CPU, more on a GPU.
    `logits_per_chunk` bounds how many logits, positions times vocabulary, exist at a time; None for no bound. `packs`:
    lay rows out without padding and their shared prompts once.
    """

    microbatch_tokens: int
    padding_tolerance_tokens: int
    logits_per_chunk: int | None = None
    packs: bool = False
