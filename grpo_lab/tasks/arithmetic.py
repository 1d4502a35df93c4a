"""The arithmetic world: sums of several addends, answered in a small written grammar.

    question   7+15+8+3?
    careful    7+15=22;22+8=30;30+3=33;#33
    guess      #31
    rambling   7+15=22;22+8=30;30+3=33;~7+15=22;22+8=30;30+3=33;#33

`#` marks the final number and `~` means "check again". A response ends with the end-of-text token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import transformers

from grpo_lab.tasks.base import Task, Template
from grpo_lab.tricks.base import require
from grpo_lab.types import Problem

FINAL = "#"
CHECK_AGAIN = "~"
PAD, EOS = "<pad>", "<eos>"
SYMBOLS = "0123456789+=;?" + FINAL + CHECK_AGAIN

# The first id of each split, so that a split can grow without changing the ids of another.
_FIRST_ID = {"train": 0, "heldout": 1_000_000, "downstream": 2_000_000}
_MAX_SIZE = 1_000_000
# Each of these splits gets one in eight multisets of addends; all others may be trained on.
_NUM_BUCKETS = 8
_SPLIT_OF_BUCKET = {0: "heldout", 1: "downstream"}
# After this many draws in a row without a new problem the split counts as exhausted.
_MAX_FRUITLESS_DRAWS = 20_000


def question_of(addends: Sequence[int]) -> str:
    """`[7, 15, 8]` -> `7+15+8?`."""
    return "+".join(map(str, addends)) + "?"


def split_of(addends: Sequence[int]) -> str:
    """The only split in which these addends, in any order, may appear: train, heldout or downstream.

    A hash of the sorted addends decides. So splits of any range and size are disjoint, and no held-out problem is a
    training problem with its addends in another order.
    """
    digest = hashlib.sha256(",".join(map(str, sorted(addends))).encode()).digest()
    return _SPLIT_OF_BUCKET.get(digest[0] % _NUM_BUCKETS, "train")


def draw_addends(
    rng: Random, split: str, addends_min: int, addends_max: int, number_min: int, number_max: int
) -> list[int]:
    """Random addends that belong to `split`; both ends of each range are included.

    Raises ValueError if no problem in these ranges belongs to `split`.
    """
    for _ in range(_MAX_FRUITLESS_DRAWS):
        count = rng.randint(addends_min, addends_max)
        addends = [rng.randint(number_min, number_max) for _ in range(count)]
        if split_of(addends) == split:
            return addends
    raise ValueError(
        f"no sum of {addends_min}-{addends_max} addends from {number_min}-{number_max} belongs to "
        f"{split}: widen one of the ranges"
    )


def careful_steps(rng: Random, addends: Sequence[int], slip_rate: float, slip_spread: int) -> tuple[str, int]:
    """`[7, 15, 8]` -> (`7+15=22;22+8=30;`, 30).

    Each sum is wrong with probability `slip_rate`, by at most `slip_spread`, and never below zero. Later steps
    continue from the wrong sum, as in a written calculation.
    """
    total, steps = addends[0], ""
    for addend in addends[1:]:
        written = right = total + addend
        if rng.random() < slip_rate:
            near = range(max(0, right - slip_spread), right + slip_spread + 1)
            written = rng.choice([number for number in near if number != right])
        steps += f"{total}+{addend}={written};"
        total = written
    return steps, total


def answer_mode(text: str) -> str:
    """The mode of a response: "guess" (no steps), "ramble" (checks again) or "careful"."""
    if CHECK_AGAIN in text:
        return "ramble"
    return "guess" if text.startswith(FINAL) else "careful"


def require_ranges(owner: object, prefix: str) -> None:
    """Raise ValueError unless the ranges of addends and numbers in `owner`'s fields with `prefix` are valid."""
    for quantity, least, reason in (
        ("addends", 2, "a sum needs two addends"),
        ("number", 0, "the grammar has no minus sign"),
    ):
        low_name, high_name = f"{prefix}{quantity}_min", f"{prefix}{quantity}_max"
        low, high = getattr(owner, low_name), getattr(owner, high_name)
        require(low >= least, low_name, low, f"at least {least}", reason)
        rule = f"at least {low_name} ({low})"
        require(high >= low, high_name, high, rule, "raise it or lower the minimum")


def build_tokenizer(max_length: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with one token per character, plus end of text and padding. It adds no special tokens to a text.

    `max_length` becomes its `model_max_length`, in tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *SYMBOLS])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class ArithmeticWorld(Task):
    """Sums of addends generated from a seed; no file is read.

    `train`, its subset `probe` and `heldout` share one range, `downstream` has its own. Difficulty is
    the number of addends. Every split has its own random stream, and a larger split begins with the
    rows of a smaller one, so ids keep their questions when a size changes.
    """

    step_end: ClassVar[str] = ";"
    check_again: ClassVar[tuple[str, ...]] = (CHECK_AGAIN,)

    seed: int
    addends_min: int
    addends_max: int
    number_min: int
    number_max: int
    train_size: int
    probe_size: int
    heldout_size: int
    downstream_addends_min: int
    downstream_addends_max: int
    downstream_number_min: int
    downstream_number_max: int
    downstream_size: int

    def __post_init__(self) -> None:
        require_ranges(self, "")
        require_ranges(self, "downstream_")
        for name in ("train_size", "probe_size", "heldout_size", "downstream_size"):
            size = getattr(self, name)
            rule = f"between 1 and {_MAX_SIZE}"
            require(1 <= size <= _MAX_SIZE, name, size, rule, "ids of a split have that much room")
        require(
            self.probe_size <= self.train_size,
            "probe_size",
            self.probe_size,
            f"at most train_size ({self.train_size})",
            "the probe is a part of the training split",
        )

    def problems(self, split: str) -> tuple[Problem, ...]:
        """See `Task.problems`. Raises ValueError if a split needs more questions than exist."""
        self.require_split(split)
        source = "train" if split == "probe" else split
        drawn = self._draw(source, getattr(self, f"{split}_size"))
        return tuple(
            Problem(id, question_of(addends), str(sum(addends)), len(addends))
            for id, addends in enumerate(drawn, start=_FIRST_ID[source])
        )

    def _draw(self, split: str, size: int) -> list[list[int]]:
        prefix = "downstream_" if split == "downstream" else ""
        names = ("addends_min", "addends_max", "number_min", "number_max")
        ranges = [getattr(self, prefix + name) for name in names]
        rng = Random(f"{self.seed}/{split}")
        drawn: dict[str, list[int]] = {}  # keeps the order of insertion
        fruitless = 0
        while len(drawn) < size:
            addends = draw_addends(rng, split, *ranges)
            fruitless = fruitless + 1 if question_of(addends) in drawn else 0
            drawn.setdefault(question_of(addends), addends)
            require(
                fruitless < _MAX_FRUITLESS_DRAWS,
                f"{split}_size",
                size,
                f"at most about {len(drawn)}",
                "these ranges hold no more questions, so widen them or ask for fewer",
            )
        return list(drawn.values())


@dataclass(frozen=True)
class Plain(Template):
    """The pattern with `{question}` replaced by the question."""

    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.pattern.count("{question}") == 1,
            "pattern",
            repr(self.pattern),
            "a text with {question} in it once",
            "write '{question}' to pass the question on as it is",
        )

    def render(self, question: str) -> str:
        return self.pattern.replace("{question}", question)
