"""Tasks of reasoning-gym: questions of a hundred families that a program writes and grades, as hard as one asks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_lab.checks import require
from grpo_lab.tasks.base import SPLITS, AnswerForm, ExternalTask
from grpo_lab.tasks.grader_pool import Answer, GraderPool
from grpo_lab.tasks.math_answers import MARKED, JudgedApart, marked_answer
from grpo_lab.tasks.tables import fingerprint
from grpo_lab.types import NoiseKey, Problem

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_FIRST_ID = {name: index * 10_000_000 for index, name in enumerate(("train", "heldout", "downstream"))}
# reasoning-gym draws question i of seed s with the random numbers of s + i, so seeds lie a split apart.
_SEEDS_APART = 10_000_000
_MORE = 3  # times as many questions are drawn as are wanted, before a family counts as exhausted


@dataclass(frozen=True)
class ReasoningGym(ExternalTask):
    """One family of questions; `downstream` changes its settings, and should make it harder.

    No question is in two splits. Without settings of their own, downstream
    questions are some of the same draw as all others. A problem keeps what
    its family needs for grading in `details`, as JSON.
    """

    family: str  # a data set of reasoning_gym, such as chain_sum or gsm_symbolic
    settings: dict[str, Any]  # of the family, for training and held-out questions
    downstream: dict[str, Any]  # settings that are others downstream
    seed: int
    train_size: int
    probe_size: int
    heldout_size: int
    downstream_size: int

    exact_sizes: ClassVar[bool] = False  # a family may have fewer different questions than are asked for

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_size", "probe_size", "heldout_size", "downstream_size"):
            size, most = getattr(self, name), _SEEDS_APART // _MORE // 2
            require(1 <= size <= most, name, size, f"between 1 and {most}", "evaluation asks such questions")
        rule = f"at most train_size ({self.train_size})"
        require(self.probe_size <= self.train_size, "probe_size", self.probe_size, rule, "they are training problems")

    def problems(self, split: str) -> tuple[Problem, ...]:
        self.require_split(split)
        drawn = _drawn(json.dumps(vars(self), sort_keys=True, default=str))
        return drawn["train"][: self.probe_size] if split == "probe" else drawn[split]

    def notes(self) -> list[str]:
        few = [
            f"{len(self.problems(split))} of {number} {split} questions"
            for split in ("train", "heldout", "downstream")
            if len(self.problems(split)) < (number := getattr(self, f"{split}_size"))
        ]
        notes = [f"{self.family} with these settings has no more than {', '.join(few)}"] if few else []
        if _alike(self.settings, self.downstream):
            notes.append(
                "downstream questions have the settings of training questions, so they are not harder: set "
                "task.downstream to settings that make them so"
            )
        return notes

    def fingerprint(self) -> dict[str, str]:
        return {split: fingerprint(self.problems(split)) for split in SPLITS}


def _alike(settings: Mapping[str, Any], downstream: Mapping[str, Any]) -> bool:
    """True if downstream questions have the settings of all others."""
    return {**settings, **downstream} == settings


@cache
def _drawn(written: str) -> dict[str, tuple[Problem, ...]]:
    """The problems of each split of a task.

    Questions of the same settings are one draw, divided at random: those of training and held-out ones, and downstream
    ones where these have no others. Had one split chosen first, the other would lack the questions that a family writes
    most often, which are its easy ones.
    """
    task = json.loads(written)
    alike, downstream = _alike(task["settings"], task["downstream"]), task["settings"] | task["downstream"]
    sizes = {name: task[f"{name}_size"] for name in ("heldout", "downstream", "train")}
    parts: dict[str, dict[int, Mapping[str, Any]]] = {}
    seen: set[str] = set()
    if not alike:
        parts["downstream"] = _questions(task, 1, downstream, sizes.pop("downstream"), seen)
    parts |= _divided(_questions(task, 0, task["settings"], sum(sizes.values()), seen), sizes, task["seed"])
    if not all(parts.values()):
        raise ValueError(
            f"no questions are left for one of the splits: {task['family']} with these settings has too few different "
            "ones; widen task.settings"
        )
    problems = {
        split: tuple(
            # The numbers of one draw differ already, and may be more than a split has room for.
            _problem(
                number if alike else _FIRST_ID[split] + number,
                task["family"],
                downstream if split == "downstream" else task["settings"],
                entry,
            )
            for number, entry in entries.items()
        )
        for split, entries in parts.items()
    }
    first = problems["train"][0]
    if first.answer and score(first.details, first.answer) < 1:
        raise ValueError(f"{task['family']} cannot judge its own answer again: choose another family")
    return problems


def _divided(
    pool: Mapping[int, Mapping[str, Any]], sizes: Mapping[str, int], seed: int
) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The questions of one draw, by split: each has its share of them, by a hash; training has what is left."""
    order = sorted(pool, key=lambda number: hashlib.sha256(f"{seed} {pool[number]['question']}".encode()).digest())
    parts, begins = {}, 0
    for split, size in sizes.items():  # training is the last one
        ends = len(order) if split == "train" else begins + round(len(pool) * size / sum(sizes.values()))
        chosen = set(order[begins:ends])
        parts[split] = {number: entry for number, entry in pool.items() if number in chosen}
        begins = ends
    return parts


def _questions(
    task: Mapping[str, Any], stream: int, settings: Mapping[str, Any], size: int, seen: set[str]
) -> dict[int, Mapping[str, Any]]:
    """Number in its stream -> entry of a family, each question once and none that was `seen` before."""
    family = create(task["family"], settings, _SEEDS_APART * (2 * task["seed"] + stream), _MORE * size)
    found: dict[int, Mapping[str, Any]] = {}
    for number in range(_MORE * size):
        entry = family[number]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            found[number] = entry
        if len(found) == size:
            break
    return found


def _problem(id: int, family: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> Problem:
    details = json.dumps({"family": family, "settings": settings, "entry": entry}, default=str)
    answer = "" if entry["answer"] is None else str(entry["answer"])  # some families can judge and not answer
    return Problem(id, entry["question"], answer, 1, details=details)


def create(family: str, settings: Mapping[str, Any], seed: int, size: int) -> ProceduralDataset:
    """A data set of reasoning-gym. Raises ValueError for an unknown family or setting, saying what there is."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError("task=gym needs reasoning-gym: pip install reasoning-gym") from error
    if family not in DATASETS:
        alike = [name for name in sorted(DATASETS) if any(part in name for part in family.split("_"))]
        raise ValueError(
            f"reasoning-gym has no family {family!r}: set task.family to one of its {len(DATASETS)}, such as "
            f"{', '.join(alike or ['chain_sum', 'gsm_symbolic', 'countdown'])}"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some families print
            return reasoning_gym.create_dataset(family, seed=seed, size=size, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        _, config = DATASETS[family]
        known = [name for name in config.__dataclass_fields__ if name not in ("seed", "size")]
        raise ValueError(
            f"{family} of reasoning-gym does not take these settings ({error}): it has {', '.join(known)}"
        ) from error


def score(details: str, answer: str) -> float:
    """The family's score of an answer to a problem with these `details`: 1 for a right one, in part else."""
    known = json.loads(details)
    family = create(known["family"], known["settings"], 0, 1)
    return float(family.score_answer(answer, known["entry"]))


def _can_be_judged(details: str) -> bool:
    """True if `score` finds in the details of a problem what it needs."""
    try:
        known = json.loads(details)
    except (ValueError, RecursionError):
        return False
    kinds = {"family": str, "settings": dict, "entry": dict}
    return isinstance(known, dict) and all(isinstance(known.get(name), kind) for name, kind in kinds.items())


class AnswerPosition(Enum):
    """Where in a response its answer stands.

    marked       in the last `\\boxed{}`, or between the last `<answer>` and `</answer>`, whichever comes later
    last_line    the last line that is not empty
    last_number  the last number, without separators of thousands
    """

    marked = "marked"
    last_line = "last_line"
    last_number = "last_number"


_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


@dataclass(frozen=True)
class GymScore(JudgedApart):
    """1 if the response ended and its family scores the answer in it with `threshold` or more.

    Many families score an answer between 0 and 1: 0.01 for a wrong one in the right form, or the share that is right.
    """

    pool: ClassVar[GraderPool] = GraderPool(Path(__file__).with_name("gym_worker.py"))

    place: AnswerPosition
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.threshold <= 1, "threshold", self.threshold, "above 0 and at most 1", "scores are in [0, 1]")

    def correctness(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        scores = super().correctness(problems, texts, finished, keys)
        return [score if math.isnan(score) else float(score >= self.threshold) for score in scores]

    def known_or_pending(self, problem: Problem, text: str, finished: bool) -> float | Answer:
        answer = self.answer(text) if finished else ""
        if not answer or answer == problem.answer:
            return float(bool(answer))
        return Answer(problem.details, answer, anywhere=False)

    def check(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not _can_be_judged(problem.details):
                raise ValueError(
                    f"the problem {problem.question[:60]!r} is none of reasoning-gym: its details do not hold a "
                    "family, settings and an entry. Set reward=math and verifier=math in place of gym, or ask "
                    "only questions of task=gym"
                )

    @property
    def reads(self) -> frozenset[AnswerForm]:
        """The last line is judged as it stands, with any mark in it."""
        places = {AnswerPosition.marked: MARKED, AnswerPosition.last_line: frozenset({AnswerForm.free})}
        return places.get(self.place, super().reads)

    def answer(self, text: str) -> str:
        """The answer that a response states, "" for none."""
        if self.place is AnswerPosition.marked:
            return marked_answer(text) or ""
        if self.place is AnswerPosition.last_line:
            return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else ""
