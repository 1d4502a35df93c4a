"""The four things that a run needs from outside the loop: problems, a prompt template, a verifier and a model.

Each class is its own configuration. A subclass is a frozen dataclass whose fields are simple types without defaults:
its numbers stand only in the YAML that selects it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import transformers

from grpo_lab.checks import require
from grpo_lab.policy.loading import Loading
from grpo_lab.renamed import renamed_facts, renamed_fields
from grpo_lab.tracking.activity import doing
from grpo_lab.types import NoiseKey, Problem

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

    response_tokens: int  # how long a response may be, in training and for held-out questions
    downstream_response_tokens: int  # the same for downstream questions

    # Whether the splits have the sizes that the configuration says; if not, evaluation asks as many as there are.
    exact_sizes: ClassVar[bool] = True
    step_end: ClassVar[str] = "\n"  # the text that ends a reasoning step
    # Texts that show that a response checks its own work.
    check_again: ClassVar[tuple[str, ...]] = ("Wait", "wait", "check again", "double-check", "Recheck", "recheck")

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of all splits of this task."""
        return SPLITS

    @property
    def mixture(self) -> dict[str, float]:
        """Share of the training problems drawn from each source, by `Problem.source`; {} where there are no sources."""
        return {}

    @abstractmethod
    def problems(self, split: str) -> tuple[Problem, ...]:
        """The problems of one split, in a fixed order. Raises ValueError for an unknown split."""

    @property
    def longest_prompt(self) -> int | None:
        """Maximum prompt length in tokens; None derives it from the context minus the longest response."""
        return None

    @property
    def at_hand(self) -> bool:
        """True if its questions are on this machine, so that nothing is downloaded to read them."""
        return True

    def needed_tokens(self, split: str) -> tuple[int, ...] | None:
        """For each problem, the tokens of a right answer without a detour; None where a task cannot know."""
        return None

    def solutions(self, split: str) -> tuple[str, ...] | None:
        """For each problem, the text of a right answer without a detour; None where a task writes none."""
        return None

    def notes(self) -> list[str]:
        """Warnings about the problems, such as an overlap of splits."""
        return []

    def fingerprint(self) -> dict[str, str] | None:
        """A hash of each split's problems; None where the configuration determines them."""
        return None

    def load(self, split: str) -> Dataset:
        """The same problems as a table: columns id, question, answer and difficulty."""
        from datasets import Dataset

        return Dataset.from_list([asdict(problem) for problem in self.problems(split)])

    def require_split(self, split: str) -> None:
        """Raise ValueError unless this task has that split."""
        require(split in self.splits, "split", repr(split), f"one of {self.splits}", "use one of them")


class AnswerForm(Enum):
    """How a response marks its answer.

    box     what the last `\\boxed{}` holds
    tag     what stands between the last `<answer>` and `</answer>`
    number  the digits after a `#` with which the response ends
    hashes  what follows the last `####`
    free    anything else: the question says how, or nobody does
    """

    box = "\\boxed{}"
    tag = "<answer></answer>"
    number = "#NUMBER"
    hashes = "####"
    free = "free"

    @classmethod
    def requested_by(cls, *texts: str) -> AnswerForm:
        """The form whose mark occurs last in the first of these texts of a template that has any."""
        for text in texts:
            last = {text.rfind(mark): form for mark, form in cls._marks().items()}
            if max(last) >= 0:
                return last[max(last)]
            if text.rstrip().endswith("#"):
                return cls.number
        return cls.free

    @classmethod
    def _marks(cls) -> dict[str, AnswerForm]:
        return {"\\boxed": cls.box, "<answer>": cls.tag, "####": cls.hashes}

    def occurs_in(self, text: str) -> bool:
        """True if a response marks an answer in this form; any text does where it is free."""
        if self is AnswerForm.number:
            return re.search(r"#[0-9]+\Z", text) is not None
        return self is AnswerForm.free or any(mark in text for mark, form in self._marks().items() if form is self)


@dataclass(frozen=True)
class ExternalTask(Task):
    """A task whose questions nobody made for the run's model, so that some may be too long for it."""

    max_prompt_tokens: (
        int | None
    )  # questions with a longer prompt are left out; None: with one too long for the context

    def __post_init__(self) -> None:
        most = self.max_prompt_tokens
        require(most is None or most >= 1, "max_prompt_tokens", most, "at least 1", "null leaves it to the context")

    @property
    def longest_prompt(self) -> int | None:
        return self.max_prompt_tokens


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

    @property
    def answer_form(self) -> AnswerForm:
        """The form in which it asks for answers: the one that `interruption` begins, unless its texts say more."""
        return AnswerForm.requested_by(self.interruption)

    @abstractmethod
    def render(self, question: str, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        """Render the prompt as text. The tokenizer's BOS is added later, unless the text already begins with it."""


@renamed_fields(outcomes="correctness")
@dataclass(frozen=True)
class Grades:
    """A grader's results for N responses.

    `correctness` is 0 or 1, and NaN for a response that the grader failed on. `components` are named parts, whose sum
    is a response's reward.
    """

    correctness: list[float]
    components: dict[str, list[float]]


@dataclass(frozen=True)
class Grader(ABC):
    """Judges responses: correctness, 0 or 1, whose mean is accuracy, and a reward in named parts.

    `correct` and `wrong` are what a right and a wrong response earn, so rewards of -1 and 1 are only a choice of
    numbers and change no accuracy. A recipe or a length penalty reads and sets them whatever the grader is.
    """

    correct: float
    wrong: float

    may_fail: ClassVar[bool] = False  # whether correctness may be NaN
    compares: ClassVar[bool] = True  # whether correctness depends on the right answer, and asking it costs nothing

    @property
    def has_parts(self) -> bool:
        """True if the reward has several components that can differ between the responses to a problem."""
        return False

    @property
    def part_weights(self) -> dict[str, float]:
        """Component -> the weight that it contains, for components that contain one."""
        return {}

    def __post_init__(self) -> None:
        require(
            self.correct > self.wrong,
            "correct",
            self.correct,
            f"larger than wrong ({self.wrong})",
            "a right answer has to earn more than a wrong one",
        )

    @abstractmethod
    def grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        """The grades of N responses.

        `texts` are decoded responses without their end-of-text token. `finished` is False for a truncated response.
        `keys` name the responses, for rewards by chance.
        """

    def checked_grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        """The grades of N responses; training, evaluation and other graders take them from here.

        Raises ValueError with a remedy for correctness other than 0, 1 or NaN, and for a reward that is not finite.
        """
        grades, name = self.grades(problems, texts, finished, keys), type(self).__name__
        for part, values in {"values of correctness": grades.correctness, **grades.components}.items():
            if len(values) != len(texts):
                raise ValueError(f"{name} gave {len(values)} {part} for {len(texts)} responses: give one for each")
        for row, correct in enumerate(grades.correctness):
            if correct not in (0, 1) and correct == correct:
                raise ValueError(
                    f"{name} gave correctness {correct!r} to the response {texts[row][:60]!r}: it is 0 "
                    "(wrong), 1 (right) or NaN (not graded). For a score return float(score >= threshold), with "
                    "`threshold` a field whose number stands in the YAML of the reward. To pay for a part of an "
                    "answer, add a component to the reward, as class Near in grpo_lab/tasks/verifiers.py does"
                )
            if correct != correct and not self.may_fail:
                raise ValueError(
                    f"{name} could not grade the response {texts[row][:60]!r} (NaN): if that may happen, write "
                    "`may_fail: ClassVar[bool] = True` in the class, so that such responses are counted as ungraded"
                )
            for part, values in grades.components.items():
                if correct == correct and not math.isfinite(values[row]):
                    raise ValueError(
                        f"{name} gave {values[row]} as {part} to the response {texts[row][:60]!r}: give a finite "
                        "number, or correctness NaN to a response that cannot be graded"
                    )
        return Grades([float(correct) for correct in grades.correctness], grades.components)

    @abstractmethod
    def bounds(self, right: bool) -> tuple[float, float]:
        """The lowest and the highest reward of a response whose correctness is 1 (`right`) or 0."""

    @abstractmethod
    def written(self) -> str:
        """The reward as a formula, for people."""

    def check(self, problems: Sequence[Problem]) -> None:  # noqa: B027 - most graders need nothing
        """Raise ValueError with a remedy if it could not grade responses to these problems."""

    @property
    def reads(self) -> frozenset[AnswerForm]:
        """The forms in which it finds the answer of a response. A template that asks for another one is refused."""
        return frozenset(AnswerForm)

    @property
    def compared(self) -> tuple[Grader, ...]:
        """The graders in it that compare a response with the right answer; they are tried on samples of the data."""
        return (self,) if self.compares else ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the user's that it runs: they are part of the code of a run."""
        return ()

    @property
    def gathers(self) -> bool:
        """True if it gathers rubrics of problems in training, by the two methods below."""
        return False

    def contrasted(self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> list[Problem]:
        """P problems as the G responses to each are to be graded: with rubrics that comparing them gave."""
        return list(problems)

    def learnt(
        self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]
    ) -> list[tuple[tuple[str, float], ...]]:
        """The rubrics of each problem that stay after its group was graded, with their weights."""
        return [problem.rubrics for problem in problems]


@dataclass(frozen=True)
class Reward(Grader):
    """A verifier, which finds a response right or wrong: correctness 0 or 1, reward `wrong` or `correct`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        renamed_facts(cls, outcomes="correctness")

    @abstractmethod
    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        """The correctness of one response, 0.0 or 1.0.

        `text` is the decoded response without its end-of-text token. `finished` is False for a truncated response.
        """

    def correctness(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        """The correctness of each response, from the arguments of `grades`; NaN for one that the grader failed on."""
        with doing("grading", len(texts), "responses") as shown:
            return [self(*response) for response in shown.each(zip(problems, texts, finished))]

    outcomes = correctness  # its name before, by which a subclass may call it

    def grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        correctness = self.correctness(problems, texts, finished, keys)
        return Grades(correctness, {"outcome": [self.correct if one == 1 else self.wrong for one in correctness]})

    def bounds(self, right: bool) -> tuple[float, float]:
        return (self.correct, self.correct) if right else (self.wrong, self.wrong)

    def written(self) -> str:
        return f"{self.correct:g} if right else {self.wrong:g}"


@dataclass(frozen=True)
class Model(ABC):
    """A causal language model with its tokenizer, as a folder for `from_pretrained`."""

    def known_context(self) -> int | None:
        """The context length in tokens if it is known before the model is built, else None."""
        return None

    @property
    def highest_rate(self) -> float:
        """The learning rate beyond which RL is likely to break the model; inf where nothing is known of it."""
        return math.inf

    def loading(self) -> Loading:
        """How the learner, the reference and the initial policy are loaded."""
        return Loading()

    def notes(self, learning_rate: float) -> list[str]:
        """Notes on how the model is trained at this rate, for the run record."""
        lora = self.loading().lora
        return [] if lora is None else [lora.note(learning_rate)]

    def at_hand(self) -> Path | None:
        """The folder if it takes no building, converting or downloading; None otherwise, or where that is not known."""
        return None

    @abstractmethod
    def resolve(self) -> Path:
        """The folder, built first if necessary. Raises ValueError for an unusable folder."""
