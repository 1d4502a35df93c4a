"""The four things that a run needs from outside the loop: problems, a prompt template, a verifier and a model.

Each class is its own configuration. A subclass is a frozen dataclass whose fields are simple types without defaults:
its numbers stand only in the YAML that selects it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from grpo_lab.tricks.base import require
from grpo_lab.types import Float, NoiseKey, Problem, Tensor

if TYPE_CHECKING:
    from datasets import Dataset


SPLITS = ("train", "probe", "heldout", "downstream")


@dataclass(frozen=True)
class Task(ABC):
    """A source of problems, divided into four splits; a task may have more, and says so in `splits`.

    train       the problems that the curriculum draws from
    probe       a fixed set of training problems, asked again at every evaluation
    heldout     the same kind of problem, never trained on
    downstream  harder problems, asked with a larger token budget

    The rows of `probe` are rows of `train` and keep their ids. No other two splits share a question,
    and an id never names two questions.
    """

    step_end: ClassVar[str] = "\n"  # the text that ends a reasoning step
    # Texts that show that a response checks its own work.
    check_again: ClassVar[tuple[str, ...]] = ("Wait", "wait", "check again", "double-check", "Recheck", "recheck")

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of all splits of this task."""
        return SPLITS

    @abstractmethod
    def problems(self, split: str) -> tuple[Problem, ...]:
        """The problems of one split, in a fixed order. Raises ValueError for an unknown split."""

    def needed_tokens(self, split: str) -> tuple[int, ...] | None:
        """For each problem, the tokens of a right answer without a detour; None where a task cannot know."""
        return None

    def solutions(self, split: str) -> tuple[str, ...] | None:
        """For each problem, the text of a right answer without a detour; None where a task writes none."""
        return None

    def load(self, split: str) -> Dataset:
        """The same problems as a table: columns id, question, answer and difficulty."""
        from datasets import Dataset

        return Dataset.from_list([asdict(problem) for problem in self.problems(split)])

    def require_split(self, split: str) -> None:
        """Raise ValueError unless this task has that split."""
        require(split in self.splits, "split", repr(split), f"one of {self.splits}", "use one of them")


@dataclass(frozen=True)
class Template(ABC):
    """How a question becomes a prompt, and the texts that tricks add.

    `interruption` is injected into a response to force its answer, and becomes part of the response. `target_length`
    is a question that asks for a length, and contains `{question}` and `{tokens}`. For a chat model that thinks
    between tags: "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    (ScaleRL, arXiv:2510.13786) and "{question} Think for {tokens} tokens." (L1, arXiv:2503.04697).
    """

    interruption: str
    target_length: str

    def __post_init__(self) -> None:
        remedy = "write both as they stand, braces included"
        for name in ("{question}", "{tokens}"):
            require(
                self.target_length.count(name) == 1,
                "target_length",
                repr(self.target_length),
                f"a text with {name} in it once",
                remedy,
            )

    def asking_for(self, question: str, tokens: int) -> str:
        """The question, asking for a response of `tokens` tokens."""
        return self.target_length.replace("{tokens}", str(tokens)).replace("{question}", question)

    @abstractmethod
    def render(self, question: str) -> str:
        """The prompt as text; the tokenizer adds no special tokens to it."""


@dataclass(frozen=True)
class Reward(ABC):
    """A verifier, and the training rewards for its two outcomes.

    The outcome is always 0 or 1. `correct` and `wrong` are the rewards for 1 and 0. So rewards of -1 and 1 are only a
    choice of numbers and do not change any accuracy.
    """

    gives_part: ClassVar[bool] = False  # whether `part` is ever above 0

    correct: float
    wrong: float

    def __post_init__(self) -> None:
        require(
            self.correct > self.wrong,
            "correct",
            self.correct,
            f"larger than wrong ({self.wrong})",
            "a right answer has to earn more than a wrong one",
        )

    @abstractmethod
    def __call__(self, answer: str, text: str, finished: bool) -> float:
        """The outcome of one response, 0.0 or 1.0.

        `answer` is the problem's right answer, `text` the decoded response without its end-of-text token. `finished`
        is False for a truncated response.
        """

    def outcomes(
        self, answers: Sequence[str], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        """The outcome of each response, from the same arguments; `keys` name the responses, for rewards by chance."""
        return [self(*response) for response in zip(answers, texts, finished)]

    def part(self, answer: str, text: str, finished: bool) -> float:
        """What a response earns beside its outcome, for what is right in part; arguments as in `__call__`."""
        return 0.0

    def values(self, outcome: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The rewards of 0/1 outcomes, of any shape: `correct` for 1 and `wrong` for 0, exactly."""
        return torch.where(outcome > 0.5, torch.full_like(outcome, self.correct), torch.full_like(outcome, self.wrong))


@dataclass(frozen=True)
class Model(ABC):
    """A causal language model with its tokenizer, as a folder for `from_pretrained`."""

    def known_context(self) -> int | None:
        """The context length in tokens if it is known before the model is built, else None."""
        return None

    @abstractmethod
    def resolve(self) -> Path:
        """The folder, built first if necessary. Raises ValueError for an unusable folder."""
