"""The records that pass from stage to stage, all frozen, and the legend of shapes.

Problem -> Rollouts -> Graded -> advantages -> Batch -> LossOutput -> gradient

Shape letters, used in every signature of the package:

    P  problems drawn for a step          G  responses per problem (the group)
    N  rows = P * G, problem-major        T  response tokens, padded on the right
    M  rows of one microbatch             V  vocabulary
    S  problems of the training split

Rows are problem-major everywhere, so [N] <-> [P, G] is a reshape and no record keeps a dictionary of
groups. Rows never leave a record: they are masked. Only `batching.py` gathers the rows that are trained on.
Column t of every [N, T] tensor describes the token `tokens[:, t]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from grpo_lab.renamed import renamed_fields

# Annotations name the axes of each tensor. Tests load torch first and check them. A run ignores them, so it does not
# need jaxtyping, and loads torch only when it loads a model.
if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Unchecked:
            """Stands in for a shape annotation when jaxtyping is not installed."""

            def __class_getitem__(cls, item: object) -> type:
                return cls

        Bool = Float = Int = _Unchecked

    if "torch._C" in sys.modules:
        from torch import Tensor
    else:

        class _OnlyInAnnotations(type):
            """Makes isinstance raise, because the answer would be False for every tensor."""

            def __instancecheck__(cls, value: object) -> bool:
                raise TypeError("this Tensor stands for torch's only in annotations; ask isinstance with torch.Tensor")

        class Tensor(metaclass=_OnlyInAnnotations):
            """Stands in for torch.Tensor in annotations while torch is not loaded."""


@dataclass(frozen=True)
class Problem:
    """One question with its right answer.

    `id` is stable across runs and unique over all splits of a task: the sampling noise, the
    curriculum and the per-question results refer to it. `target_length` is the response length in tokens
    that the question asks for, or None. `possible_answers` is how many answers the question can have, such as 2 if it
    asks for yes or no; None if there is no such number. `details` is what else a grader has to know, as text. `source`
    names the part of a mixture that it is from. `rubrics` are those that a reward has gathered for it in training, with
    their weights.
    """

    id: int
    question: str
    answer: str
    difficulty: int
    target_length: int | None = None
    possible_answers: int | None = None
    details: str = ""
    source: str = ""
    rubrics: tuple[tuple[str, float], ...] = ()


class Exhausted(ValueError):
    """Raised when nothing is left to train on.

    The task is solved, the curriculum has too few problems left, or the group filter never fills a batch. The run
    saves its state and ends. The message says what ran out and what to change.
    """


class StopReason(str, Enum):
    """Why a response ended: end-of-text token, token budget, repetition stop, or an abort by the caller."""

    EOS = "eos"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORTED = "aborted"


class WeightType(Enum):
    """The type of weights that do not train; trained ones are fp32 in every option."""

    fp32 = "float32"
    bf16 = "bfloat16"


@dataclass(frozen=True)
class NoiseKey:
    """Identifies the random numbers of one response: the token at position t uses uniform number t of this key."""

    seed: int
    stream: str
    step: int
    problem: int
    response: int


@dataclass(frozen=True)
class SureRun:
    """Stop a response after `tokens` consecutive sampled tokens, each of probability above `probability`."""

    tokens: int
    probability: float


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled. `max_tokens` counts response tokens, including a given prefix."""

    max_tokens: int
    temperature: float
    top_p: float
    stop_when_sure: SureRun | None = None


@dataclass(frozen=True)
class Request:
    """One response to generate, given as token ids and never as text, so nothing is tokenised twice.

    `prefix` holds response tokens that exist already: a partial response to continue, or injected text. Noise
    positions count from the first response token, so the prefix is included. Both are tuples, because caches are keyed
    by them.
    """

    prompt: tuple[int, ...]
    noise: NoiseKey
    params: SamplingParams
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Completion:
    """The tokens that the engine generated after `prefix`, as tensors on the CPU.

    `logprobs` are from the softmax at the request's temperature, before top-p truncation. `weight_versions` names the
    weights that sampled each token. `injected` is True on tokens that a trick injected; their log-prob is 0. Left
    out, it is False on all. `tokens.tolist()` gives Python ints, and `ids` a tuple of them.

    Sequences of numbers become tensors; a tensor is kept and not copied. Raises ValueError unless each field is 1-D
    with one value per token. Two completions are equal if all their values are."""

    tokens: Int[Tensor, "T"]  # int64
    logprobs: Float[Tensor, "T"]  # float32 from an engine that computes them so, else float64
    weight_versions: Int[Tensor, "T"]  # int64
    stop: StopReason
    injected: Bool[Tensor, "..."] = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    def __post_init__(self) -> None:
        single = getattr(self.logprobs, "dtype", None) is torch.float32
        dtypes = (torch.long, torch.float32 if single else torch.float64, torch.long, torch.bool)
        for name, values, dtype in zip(_COLUMNS, self._columns(), dtypes):
            object.__setattr__(self, name, torch.as_tensor(values, dtype=dtype, device="cpu").detach())
        size = self.tokens.shape
        if not self.injected.numel():
            object.__setattr__(self, "injected", torch.zeros(size, dtype=torch.bool))
        if len(size) != 1 or any(values.shape != size for values in self._columns()):
            found = ", ".join(f"{name} {tuple(values.shape)}" for name, values in zip(_COLUMNS, self._columns()))
            raise ValueError(
                f"a completion has 1-D fields with one value per token, and the engine gave the shapes {found}: return "
                "the log-prob and the weight version of each token that it sampled, and nothing for prompt and prefix"
            )

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        weight_versions: Sequence[int],
        stop: StopReason,
        injected: Sequence[bool] = (),
    ) -> Completion:
        """Build a completion from numbers that were collected one by one."""
        columns = torch.tensor(tokens, dtype=torch.long), torch.tensor(logprobs, dtype=torch.float64)
        versions = torch.tensor(weight_versions, dtype=torch.long)
        return cls(*columns, versions, stop, torch.tensor(injected, dtype=torch.bool))

    @classmethod
    def unsampled(cls, tokens: Sequence[int], stop: StopReason, version: int = 0, injected: bool = False) -> Completion:
        """Tokens that no policy sampled, with log-prob 0; without tokens, an empty completion."""
        number = len(tokens)
        return cls.of(tokens, (0.0,) * number, (version,) * number, stop, (injected,) * number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion) or self.stop is not other.stop:
            return False
        return all(mine.tolist() == theirs.tolist() for mine, theirs in zip(self._columns(), other._columns()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as arrays: each tensor would bring all of its storage, which the rows of a batch share."""
        return _from_arrays, (self.stop, *(values.numpy() for values in self._columns()))

    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.logprobs, self.weight_versions, self.injected

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens as Python ints: the prefix of a request that continues them."""
        return tuple(self.tokens.tolist())

    def continued(self, further: Completion) -> Completion:
        """This completion followed by `further`, as one completion."""
        tokens, logprobs, versions, injected = map(torch.cat, zip(self._columns(), further._columns()))
        return Completion(tokens, logprobs, versions, further.stop, injected)


_COLUMNS = ("tokens", "logprobs", "weight_versions", "injected")


def _from_arrays(stop: StopReason, *arrays: Any) -> Completion:
    tokens, logprobs, versions, injected = map(torch.from_numpy, arrays)
    return Completion(tokens, logprobs, versions, stop, injected)


OnFinish = Callable[[int, Completion], Iterable[int]]


@dataclass(frozen=True)
class Tools:
    """Functions for tricks that generate: text to token ids, and one uniform number in [0, 1) per key."""

    encode: Callable[[str], tuple[int, ...]]
    uniform: Callable[[NoiseKey], float]


@runtime_checkable
class Sampler(Protocol):
    """The part of an engine that a trick may call."""

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """One completion per request, in order.

        `on_finish(i, completion)` is called when request i ends, and returns indices of requests to abort. Aborted
        requests return their partial completion, marked ABORTED."""
        ...


@dataclass(frozen=True)
class Rollouts:
    """G responses to each of P problems, as tokens.

    `response_mask` is True on every response token, `sampled_mask` on sampled tokens only. Injected tokens are in
    the first and not in the second; padding is in neither. `finished` is True where the response ended with an
    end-of-text token, `looped` where it was stopped for repeating itself.
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
        """Rows that contain injected tokens."""
        return (self.response_mask & ~self.sampled_mask).any(dim=1)

    def prompt_of_row(self, row: int) -> tuple[int, ...]:
        return self.prompts[row // self.group_size]

    def choose(self, places: Sequence[int]) -> Rollouts:
        """The groups at positions `places`, in this order."""
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
        """Concatenate groups of the same size, padded to the widest T."""
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


@renamed_fields(counted="in_statistics", trained="in_loss", outcome="correctness")
@dataclass(frozen=True)
class Graded:
    """Correctness, reward and masks of each response.

    `correctness` is the verifier's verdict, 0 or 1, and is never shaped. `reward` is the sum of the named `components`.
    `in_statistics` are the rows of group and batch statistics, `in_loss` those of the loss. Two masks let a trick mask
    a row before or after the statistics. `target_length` is the length that the prompt asked for, or None. `lengths`
    count all response tokens; `sampled_lengths` count sampled tokens that rejection left in. `progress` is the share of
    the budget spent when the problem was drawn, None outside training. `logprob` is the log-probability of the sampled
    tokens under the policy that sampled them, in nats. `failed` are the responses that the grader failed on, None where
    none did: their correctness and reward are 0 and mean nothing. `part_weights` are the weights that some components
    contain; the others contain none.
    """

    correctness: Float[Tensor, "P G"]
    reward: Float[Tensor, "P G"]
    components: Mapping[str, Float[Tensor, "P G"]]
    lengths: Int[Tensor, "P G"]
    sampled_lengths: Int[Tensor, "P G"]
    truncated: Bool[Tensor, "P G"]
    in_statistics: Bool[Tensor, "P G"]
    in_loss: Bool[Tensor, "P G"]
    target_length: Int[Tensor, "P G"] | None = None
    progress: Float[Tensor, "P G"] | None = None
    failed: Bool[Tensor, "P G"] | None = None
    part_weights: Mapping[str, float] = field(default_factory=dict)
    logprob: Float[Tensor, "P G"] | None = None

    @property
    def verdict(self) -> Float[Tensor, "P G"]:
        """Correctness, NaN where the grader failed: what tables hold."""
        return self.correctness if self.failed is None else torch.where(self.failed, torch.nan, self.correctness)

    def choose(self, places: Sequence[int]) -> Graded:
        """The groups at positions `places`, in this order."""
        index = torch.tensor(list(places), dtype=torch.long)
        named = {name: values[index] for name, values in self.components.items()}
        return replace(self, components=named, **{name: getattr(self, name)[index] for name in _tensor_fields(self)})

    @staticmethod
    def join(parts: Sequence[Graded]) -> Graded:
        """Concatenate groups of the same size and with the same components."""
        named = {name: torch.cat([part.components[name] for part in parts]) for name in parts[0].components}
        tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in _tensor_fields(parts[0])}
        return replace(parts[0], components=named, **tensors)

    def with_component(self, name: str, values: Float[Tensor, "P G"]) -> Graded:
        """A copy with `values` added to the reward as component `name`. Raises ValueError if it has such a one."""
        if name in self.components:
            raise ValueError(f"two components of the reward are named {name}: rename the part in reward.parts")
        return replace(self, reward=self.reward + values, components={**self.components, name: values})


@dataclass(frozen=True)
class Groups:
    """Whole groups after each of stages 2 to 5: generated, graded, shaped, masked. A group filter chooses from them."""

    indices: tuple[int, ...]  # positions of the problems in the training split
    rollouts: Rollouts
    texts: tuple[str, ...]  # [N]
    graded: Graded
    shaped: Graded
    masked: Graded

    @property
    def number(self) -> int:
        return len(self.indices)

    def choose(self, places: Sequence[int]) -> Groups:
        """The groups at positions `places`, in this order."""
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
        """Concatenate the groups of several rounds."""
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
    """Where a filter that refills gets further groups. No problem comes twice within a step."""

    def groups(self, number: int) -> Groups:
        """`number` further problems with all their responses. Raises Exhausted when too few are left."""
        ...

    def race(self, number: int, target: int, accepts: Callable[[Graded], bool], keeps_partial: bool) -> Groups:
        """Start `number` problems and stop all generation once `target` finished groups were accepted.

        `accepts` gets each group [1, G] when its last response ends. Returns the finished groups in the order in
        which they finished. With `keeps_partial` the next race continues the unfinished groups first; otherwise they
        are thrown away.
        """
        ...


@dataclass(frozen=True)
class Totals:
    """Counts over one whole optimiser step, after the denominator trick chose which rows count.

    Aggregations divide by these and not by counts of the microbatch, so microbatching and padding cannot change a
    gradient. `row_tokens` and the counts after it have one entry per row of the microbatch, but each entry is a count
    over the whole optimiser step. A row's side are the rows of its group whose advantages have the same sign as its
    own, or are 0 as its own.
    """

    num_tokens: int
    num_rows: int
    num_problems: int
    num_microbatches: int
    row_tokens: Int[Tensor, "M"]
    problem_tokens: Int[Tensor, "M"]
    problem_rows: Int[Tensor, "M"]
    side_tokens: Int[Tensor, "M"]
    side_rows: Int[Tensor, "M"]


@dataclass(frozen=True)
class Batch:
    """The inputs of the loss for one microbatch.

    `old_logprobs` is None when the old policy is the learner at this same update. The loss then uses the
    learner's own detached log-probs, and every ratio is exactly 1. `rows` holds each row's index in the rollouts.
    `learner_share` is the learner's share in each token's old log-prob where that is interpolated at each update, else
    None. The loss is divided by `totals`; `original_totals` also count rows and tokens that left the loss. `marked` are
    the tokens that `Surrogate.mark` chose over the whole optimiser step, None before that. `twin_factors` multiply the
    weights of the surrogate's random twin, and `twin_stays` are the tokens that the update mask's leaves in; None
    without one. `right` are the rows whose correctness is 1, and `right_tokens` counts their tokens in the loss over
    the whole optimiser step.
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
    twin_factors: Float[Tensor, "M T"] | None = None
    twin_stays: Bool[Tensor, "M T"] | None = None
    right: Bool[Tensor, "M"] | None = None
    right_tokens: int = 0
    learner_share: Float[Tensor, "M T"] | None = None


@renamed_fields(touched="affected")
@dataclass(frozen=True)
class LossOutput:
    """One microbatch's share of the step's loss, with gradient, and sums for the log.

    `sums` are over tokens in the loss. They are added over all microbatches and then divided once, by their entry
    "tokens". `affected` are the tokens in the loss whose gradient the surrogate changed.
    """

    loss: Float[Tensor, ""]
    sums: Mapping[str, Float[Tensor, ""]]
    affected: Bool[Tensor, "M T"]


def to_groups(rows: Tensor, group_size: int) -> Tensor:
    """[N, ...] -> [P, G, ...]; rows are problem-major, so this is a reshape."""
    assert rows.shape[0] % group_size == 0, "rows were dropped before a group statistic"
    return rows.reshape(rows.shape[0] // group_size, group_size, *rows.shape[1:])


@dataclass(frozen=True)
class Microbatching:
    """How rows are split into microbatches and laid out. It changes memory and time, never a gradient.

    `microbatch_tokens` bounds the tokens of one forward pass. `padding_tolerance_tokens` is how many padding tokens
    cost as much as one more pass, or one more attention block where rows are packed: few on a CPU, more on a GPU.
    `logits_per_chunk` bounds how many logits (positions times vocabulary) exist at a time; None for no bound.
    `packs` lays rows out without padding and each shared prompt once. `balances` makes packed microbatches of about
    equal size: a small one takes almost as long on a GPU as a full one. `fuses_head` lets the output head write the
    gradient of its logits over them, as on GPUs.
    """

    microbatch_tokens: int
    padding_tolerance_tokens: int
    logits_per_chunk: int | None = None
    packs: bool = False
    balances: bool = False
    fuses_head: bool = False

    def on(self, device: str, packs: bool) -> Microbatching:
        """How a learner on this kind of device, which can pack or not, lays out its rows."""
        gpu = device == "cuda"
        return replace(self, packs=packs, balances=gpu, fuses_head=gpu)
