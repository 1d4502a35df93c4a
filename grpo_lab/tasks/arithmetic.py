"""The arithmetic worlds: chains of sums, answered in a small written grammar.

    question     7+15+8+3?
    careful      7+15=22;22+8=30;30+3=33;#33
    guess        #31
    rambling     7+15=22;22+8=30;30+3=33;~7+15=22;22+8=30;30+3=33;#33
    difference   33-15-8-3?      33-15=18;18-8=10;10-3=7;#7
    remainder    7+15+8+3%2?     7+15=22;22+8=30;30+3=33;33%2=1;#1

`#` marks the final number and `~` means "check again". A response ends with the end-of-text token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from random import Random
from typing import ClassVar

import transformers

from grpo_lab.checks import require
from grpo_lab.tasks.base import SPLITS, Task
from grpo_lab.types import Problem

FINAL = "#"
CHECK_AGAIN = "~"
PAD, EOS = "<pad>", "<eos>"
SYMBOLS = "0123456789+=;?" + FINAL + CHECK_AGAIN

# The first id of each split, so that a split can grow without changing the ids of another.
_FIRST_ID = {
    name: index * 1_000_000
    for index, name in enumerate(("train", "heldout", "downstream", "heldout_rule", "other_numbers", "other_family"))
}
_MAX_SIZE = 1_000_000
# Each of these splits gets one in eight multisets of addends; all others may be trained on.
_NUM_BUCKETS = 8
_SPLIT_OF_BUCKET = {0: "heldout", 1: "downstream"}
# After this many draws in a row without a new problem the split counts as exhausted.
_MAX_FRUITLESS_DRAWS = 20_000


class Family(Enum):
    """A kind of problem: numbers added up, or taken away from their sum."""

    sums = "sums"
    differences = "differences"


@dataclass(frozen=True)
class Chain:
    """One question: its numbers, and what is done with them.

    A difference takes all numbers but the first away from their sum, so its answer is the first number and the same
    numbers make one question of each family. A modulus asks for the remainder; 0 asks for none.
    """

    numbers: tuple[int, ...]
    family: Family = Family.sums
    modulus: int = 0

    @property
    def start(self) -> int:
        """The number that stands first in the question."""
        return self.numbers[0] if self.family is Family.sums else sum(self.numbers)

    @property
    def sign(self) -> str:
        return "+" if self.family is Family.sums else "-"

    @property
    def question(self) -> str:
        """`7+15+8?`, `30-15-8?` or `7+15+8%2?`."""
        return self.sign.join(map(str, (self.start, *self.numbers[1:]))) + f"%{self.modulus}" * (self.modulus > 0) + "?"

    def after(self, total: int, number: int) -> int:
        """The total after one more number."""
        return total + number if self.family is Family.sums else total - number

    @property
    def answer(self) -> int:
        total = self.start
        for number in self.numbers[1:]:
            total = self.after(total, number)
        return total % self.modulus if self.modulus else total


@dataclass(frozen=True)
class Kinds:
    """Which questions to draw: how many numbers, how large, of which families, and for what remainders."""

    addends_min: int
    addends_max: int
    number_min: int
    number_max: int
    families: tuple[Family, ...] = (Family.sums,)
    modulus: int = 0
    modulus_share: float = 0.0  # of the questions that ask for a remainder
    withheld: frozenset[int] = frozenset()  # numbers only of the split heldout_rule


def split_of(numbers: Sequence[int], withheld: frozenset[int] = frozenset()) -> str:
    """The only split in which these numbers, in any order, may appear: train, heldout, downstream or heldout_rule.

    A withheld number decides, otherwise a hash of the sorted numbers. So splits of any range and size are disjoint, and
    no held-out problem is a training problem with its numbers in another order, or of another family.
    """
    if not withheld.isdisjoint(numbers):
        return "heldout_rule"
    digest = hashlib.sha256(",".join(map(str, sorted(numbers))).encode()).digest()
    return _SPLIT_OF_BUCKET.get(digest[0] % _NUM_BUCKETS, "train")


def draw_chain(rng: Random, split: str, kinds: Kinds) -> Chain:
    """A random question of `kinds` whose numbers belong to `split`; both ends of each range are included.

    Raises ValueError if no problem in these ranges belongs to `split`.
    """
    for _ in range(_MAX_FRUITLESS_DRAWS):
        count = rng.randint(kinds.addends_min, kinds.addends_max)
        numbers = tuple(rng.randint(kinds.number_min, kinds.number_max) for _ in range(count))
        if split_of(numbers, kinds.withheld) == split:
            family = kinds.families[rng.randrange(len(kinds.families)) if len(kinds.families) > 1 else 0]
            remainder = kinds.modulus_share > 0 and rng.random() < kinds.modulus_share
            return Chain(numbers, family, kinds.modulus if remainder else 0)
    raise ValueError(
        f"no question of {kinds.addends_min}-{kinds.addends_max} numbers from {kinds.number_min}-{kinds.number_max} "
        f"belongs to {split}: widen one of the ranges"
    )


def careful_steps(rng: Random, chain: Chain, slip_rate: float, slip_spread: int) -> tuple[str, int]:
    """The written steps of a question and the number they end with: `7+15+8?` -> (`7+15=22;22+8=30;`, 30).

    Each result is wrong with probability `slip_rate`, by at most `slip_spread`, and never below zero. Later steps
    continue from the wrong result, as in a written calculation.
    """

    def written(right: int) -> int:
        if rng.random() >= slip_rate:
            return right
        near = range(max(0, right - slip_spread), right + slip_spread + 1)
        return rng.choice([number for number in near if number != right])

    total, steps = chain.start, ""
    for number in chain.numbers[1:]:
        result = written(max(0, chain.after(total, number)))  # after a slip a difference could fall below zero
        steps += f"{total}{chain.sign}{number}={result};"
        total = result
    if chain.modulus:
        result = written(total % chain.modulus)
        steps += f"{total}%{chain.modulus}={result};"
        total = result
    return steps, total


def symbols_of(families: Sequence[Family], modulus: int) -> str:
    """The characters beyond `SYMBOLS` that questions of these kinds need."""
    return "-" * (Family.differences in families) + "%" * (modulus > 0)


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


def require_remainders(owner: object, prefix: str) -> None:
    """Raise ValueError unless the modulus of `owner`'s field with `prefix` and its share of questions are valid."""
    modulus, share = getattr(owner, f"{prefix}modulus"), getattr(owner, f"{prefix}modulus_share")
    require(modulus == 0 or modulus >= 2, f"{prefix}modulus", modulus, "0 or at least 2", "0 asks for no remainder")
    rule = "between 0 and 1, and 0 without a modulus"
    require(
        0 <= share <= (1 if modulus else 0), f"{prefix}modulus_share", share, rule, "it is a share of the questions"
    )


def build_tokenizer(max_length: int, more_symbols: str = "") -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with one token per character, plus end of text and padding. It adds no special tokens to a text.

    `max_length` becomes its `model_max_length`, in tokens. `more_symbols` follow those of every world.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *SYMBOLS, *more_symbols])}
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


@lru_cache(maxsize=16)  # a run asks for the same splits several times
def _drawn(kinds: Kinds, stream: str, bucket: str, size: int) -> tuple[Chain, ...]:
    """`size` different questions by the random stream of this name; fewer where the ranges hold no more."""
    rng = Random(stream)
    drawn: dict[str, Chain] = {}  # keeps the order of insertion
    fruitless = 0
    while len(drawn) < size and fruitless < _MAX_FRUITLESS_DRAWS:
        chain = draw_chain(rng, bucket, kinds)
        fruitless = fruitless + 1 if chain.question in drawn else 0
        drawn.setdefault(chain.question, chain)
    return tuple(drawn.values())


@dataclass(frozen=True)
class ArithmeticWorld(Task):
    """Chains of numbers drawn from a seed; no file is read.

    `train`, its subset `probe` and `heldout` share one range, `downstream` has its own. Difficulty is how many numbers
    a question has. Every split has its own random stream, and a larger split begins with the rows of a smaller one, so
    ids keep their questions when a size changes. Three more splits exist where their fields say so:

    heldout_rule    questions with a number that training never shows (`withheld_numbers`)
    other_numbers   as many numbers as in training, from another range (`other_number_max` above 0)
    other_family    as many numbers as in training, of other families (`other_families`)
    """

    step_end: ClassVar[str] = ";"
    check_again: ClassVar[tuple[str, ...]] = (CHECK_AGAIN,)

    seed: int
    addends_min: int
    addends_max: int
    number_min: int
    number_max: int
    families: list[Family]
    modulus: int  # some questions ask for the remainder by it; 0: none does
    modulus_share: float
    train_size: int
    probe_size: int
    heldout_size: int
    downstream_addends_min: int
    downstream_addends_max: int
    downstream_number_min: int
    downstream_number_max: int
    downstream_modulus: int
    downstream_modulus_share: float
    downstream_size: int
    withheld_numbers: list[int]
    other_number_min: int
    other_number_max: int
    other_families: list[Family]
    other_size: int  # of each of the three splits beside the usual four

    def __post_init__(self) -> None:
        require_ranges(self, "")
        require_ranges(self, "downstream_")
        for name in ("train_size", "probe_size", "heldout_size", "downstream_size", "other_size"):
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
        require(len(self.families) > 0, "families", "[]", "at least one family", "write families: [sums]")
        for prefix in ("", "downstream_"):
            require_remainders(self, prefix)
        low, high = self.other_number_min, self.other_number_max
        require(
            high == 0 or low <= high,
            "other_number_max",
            high,
            f"0 or at least other_number_min ({low})",
            "0 leaves the split other_numbers out",
        )

    @property
    def splits(self) -> tuple[str, ...]:
        present = {
            "heldout_rule": bool(self.withheld_numbers),
            "other_numbers": self.other_number_max > 0,
            "other_family": bool(self.other_families),
        }
        return (*SPLITS, *(name for name, here in present.items() if here))

    def problems(self, split: str) -> tuple[Problem, ...]:
        """See `Task.problems`. Raises ValueError if a split needs more questions than exist."""
        chains = self._draw(split)
        first = _FIRST_ID["train" if split == "probe" else split]
        return tuple(
            Problem(id, chain.question, str(chain.answer), len(chain.numbers), possible_answers=chain.modulus or None)
            for id, chain in enumerate(chains, start=first)
        )

    def solutions(self, split: str) -> tuple[str, ...]:
        """The steps and the final number of each problem, without a slip."""
        worked = [careful_steps(Random(0), chain, 0.0, 1) for chain in self._draw(split)]
        return tuple(f"{steps}{FINAL}{answer}" for steps, answer in worked)

    def needed_tokens(self, split: str) -> tuple[int, ...]:
        """The tokens of the solutions, one for each character, and of the end of text."""
        return tuple(len(solution) + 1 for solution in self.solutions(split))

    def _kinds(self, split: str) -> Kinds:
        prefix = "downstream_" if split == "downstream" else ""
        names = ("addends_min", "addends_max", "number_min", "number_max", "modulus", "modulus_share")
        numbers = {name: getattr(self, prefix + name) for name in names}
        if split == "other_numbers":
            numbers |= {"number_min": self.other_number_min, "number_max": self.other_number_max}
        families = self.other_families if split == "other_family" else self.families
        return Kinds(**numbers, families=tuple(families), withheld=frozenset(self.withheld_numbers))

    def _draw(self, split: str) -> tuple[Chain, ...]:
        """The questions of a split. Raises ValueError for an unknown split."""
        self.require_split(split)
        size_name = f"{split}_size" if split in SPLITS else "other_size"
        size = getattr(self, size_name)
        split = "train" if split == "probe" else split
        # Other families and numbers take the buckets of held-out questions: no base model has seen those either.
        bucket = "heldout" if split.startswith("other_") else split
        chains = _drawn(self._kinds(split), f"{self.seed}/{split}", bucket, size)
        require(
            len(chains) == size,
            size_name,
            size,
            f"at most about {len(chains)}",
            "these ranges hold no more questions, so widen them or ask for fewer",
        )
        return chains
