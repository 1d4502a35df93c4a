"""Rewards by a language model as judge: fixed rubrics, rubrics of problems, and rubrics that evolve with the policy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from grpo_lab.checks import require
from grpo_lab.tasks.base import Grader, Grades
from grpo_lab.tasks.endpoint import Endpoint, warn_once
from grpo_lab.types import NoiseKey, Problem

OF_PROBLEM, EVOLVING = "problem", "evolving"  # the components that hold what such rubrics give together
SCORE = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["score"],
    "additionalProperties": False,
}
_HEADING = re.compile(r"^(?=Response \d)", re.MULTILINE)  # of a response as the proposer sees it
_FRAME = re.compile(r"</?(\w+)>")  # of a prompt's own text


def proposal_form(most: int) -> dict[str, Any]:
    """The JSON schema of a proposal: at most `most` rubrics of each kind."""
    texts = {"type": "array", "items": {"type": "string"}, "maxItems": most}
    properties = {"positive": texts, "negative": texts}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class Item(NamedTuple):
    """One rubric, its weight, and the component of the reward that it is part of."""

    component: str
    description: str
    weight: float


def read_score(answer: str | None) -> float:
    """The score in a judge's answer: `{"score": s}` or s alone, from 0 to 1. NaN for anything else."""
    value = _json(answer)
    score = _number(value.get("score") if isinstance(value, dict) else value)
    return score if 0 <= score <= 1 else math.nan


def _number(value: Any) -> float:
    """A JSON number; NaN for anything else."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def read_proposal(answer: str | None, most: int) -> list[tuple[str, float]]:
    """The rubrics that an answer proposes, weights 1 and -1, at most `most`; none if it cannot be read."""
    value = _json(answer)
    if not isinstance(value, dict):
        return []
    found: dict[str, float] = {}
    for name, weight in (("positive", 1.0), ("negative", -1.0)):
        texts = value.get(name, [])
        for text in texts if isinstance(texts, list) else []:
            if isinstance(text, str) and text.strip():
                found.setdefault(text.strip(), weight)
    return list(found.items())[:most]


def _json(answer: str | None) -> Any:
    """The one JSON value that an answer is, behind its thoughts and within a fence; None if it is none."""
    text = (answer or "").rpartition("</think>")[2].strip()
    if len(text) >= 6 and text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=100_000)
def rubrics_in(details: str) -> tuple[tuple[str, float], ...]:
    """The rubrics that a problem brings in `details`, with their weights. Raises ValueError with a remedy.

    JSON: a list, or an object with a list under `rubrics`. Of the list each is a text, of weight 1, or an object with
    `description` and perhaps `weight`.
    """
    remedy = 'write a JSON list such as [{"description": "names a source", "weight": 1}]'
    if not details.strip():
        return ()
    try:
        value = json.loads(details)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the rubrics {details[:80]!r} are no JSON ({error}): {remedy}") from error
    each = value.get("rubrics") if isinstance(value, dict) else value
    if not isinstance(each, list):
        raise ValueError(f"the rubrics {details[:80]!r} are no list: {remedy}")
    return tuple(_described({"description": one} if isinstance(one, str) else one, remedy) for one in each)


def _described(one: Any, remedy: str) -> tuple[str, float]:
    """Description and weight of a rubric that is written as a mapping."""
    fields = one if isinstance(one, Mapping) else {}
    text, given = fields.get("description"), fields.get("weight")
    weight = 1.0 if given is None else _number(given)
    if not isinstance(text, str) or not text.strip() or not math.isfinite(weight) or weight == 0:
        raise ValueError(f"a rubric must have a description, and a weight other than 0, got {one!r}: {remedy}")
    return text.strip(), weight


def filled(template: str, **texts: str) -> str:
    """The template with {name} replaced for each of `texts`, which cannot write into its structure.

    What stands in a text is never replaced itself. Where it has a tag of the template, as `</response>`, the tag's `<`
    becomes `&lt;`.
    """
    # The blanks that a tag may have are few, so that the time is linear in the text.
    names = "|".join(sorted({re.escape(name) for name in _FRAME.findall(template)}))
    frames = re.compile(rf"<(?=\s{{0,3}}/?\s{{0,3}}(?:{names})\b)", re.IGNORECASE) if names else None
    shown = {name: frames.sub("&lt;", text) if frames else text for name, text in texts.items()}
    return re.sub("{(" + "|".join(texts) + ")}", lambda name: shown[name[1]], template)


def weighted_score(weights: Sequence[float], scores: Sequence[float]) -> float:
    """sum_k w_k s_k / sum of positive weights (DR Tulu, arXiv:2511.19399); NaN if a score is."""
    return sum(w * s for w, s in zip(weights, scores)) / sum(w for w in weights if w > 0)


def still_active(
    rubrics: Sequence[tuple[str, float]], scores: Sequence[Sequence[float]], most: int
) -> tuple[tuple[str, float], ...]:
    """Which rubrics stay: those that tell responses apart, at most `most`, of largest standard deviation.

    `scores` [K][G] are those of each rubric over a group; NaN ones do not count. A rubric without any that counts is
    dropped, as it fails every response. With one that counts for some other, nothing is known and all others but those
    beyond `most` stay. Of equal deviations the older is first.
    """
    read = [[score for score in row if not math.isnan(score)] for row in scores]
    rubrics, known = [rubric for rubric, row in zip(rubrics, read) if row], [row for row in read if row]
    if any(len(row) < 2 for row in known):
        return tuple(rubrics[:most])
    # Equal scores have no deviation, whatever rounding says of their mean.
    spread = [_deviation(row) if max(row) > min(row) else 0.0 for row in known]
    best = sorted((place for place, one in enumerate(spread) if one > 0), key=lambda place: -spread[place])[:most]
    return tuple(rubrics[place] for place in sorted(best))


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


@dataclass(frozen=True)
class Rubric(Grader):
    """A judge scores each response by each rubric from 0 to 1; the reward is the weighted mean of the scores.

    S(x, y) = sum_k w_k Judge(rubric_k, x, y) / sum of positive weights     (DR Tulu, arXiv:2511.19399)
    reward  = wrong + (correct - wrong) S, which is S itself with rewards of 0 and 1

    Rubrics are those of `rubrics`, for every problem, and with `from_problem` those that a problem brings in `details`.
    A response is correct where S is at least `threshold`, so an accuracy is the share of such responses. Each fixed
    rubric is a component of the reward, those of problems are one together, and `wrong` is one where it is not 0. A
    response has failed (NaN) if one of its scores did not come or cannot be read.
    """

    may_fail: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    judge: Endpoint
    prompt: str  # with {rubric} and {response}, and perhaps {question} and {answer}
    rubrics: dict[str, Any]  # name -> description and weight; null leaves one out
    from_problem: bool
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("{rubric}", "{response}"):
            require(name in self.prompt, "prompt", repr(self.prompt[:60]), f"a text with {name} in it", "add it")
        for name in self.rubrics:
            named = re.fullmatch("[a-z0-9_]+", name) is not None and name not in (OF_PROBLEM, EVOLVING, "wrong")
            remedy = f"a metric will have it, and {OF_PROBLEM}, {EVOLVING} and wrong are taken"
            require(named, "rubrics", repr(name), "named by small letters, digits and _", remedy)
        fixed = [item.weight for item in self._fixed()]
        require(bool(fixed) or self.from_problem, "rubrics", "none", "one or more", "or set from_problem=true")
        some = self.from_problem or max(fixed) > 0
        require(some, "rubrics", "only negative weights", "of positive weight in part", "a mean needs a positive one")
        require(0 < self.threshold <= 1, "threshold", self.threshold, "above 0 and at most 1", "scores are in [0, 1]")

    def _fixed(self) -> list[Item]:
        given = {name: one for name, one in self.rubrics.items() if one is not None}
        return [Item(name, *_described(one, f"correct rubrics.{name}")) for name, one in given.items()]

    def items(self, problem: Problem) -> list[Item]:
        """The rubrics that a response to this problem is scored by."""
        own = rubrics_in(problem.details) if self.from_problem else ()
        return self._fixed() + [Item(OF_PROBLEM, *one) for one in own]

    @property
    def components(self) -> list[str]:
        """The components of the reward, the same for every problem."""
        return [*(item.component for item in self._fixed()), *([OF_PROBLEM] if self.from_problem else [])]

    @property
    def has_parts(self) -> bool:
        return len(self.components) > 1

    @property
    def part_weights(self) -> dict[str, float]:
        return {item.component: item.weight for item in self._fixed()}

    def check(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not any(item.weight > 0 for item in self.items(problem)):
                raise ValueError(
                    f"the problem {problem.question[:60]!r} brings no rubric of positive weight: name the column of "
                    "its rubrics, task.details=..., or give rubrics to all problems"
                )
        self.judge.check()

    def grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        rows = [self.items(problem) for problem in problems]
        scored = iter(self._scores([(p, t, item) for p, t, items in zip(problems, texts, rows) for item in items]))
        correctness: list[float] = []
        components: dict[str, list[float]] = {name: [] for name in self.components}
        width = self.correct - self.wrong
        for items in rows:
            scores = [next(scored) for _ in items]
            weights = [item.weight for item in items]
            # Without a rubric of positive weight, as in a set only for evaluation, there is no grade.
            score = weighted_score(weights, scores) if any(weight > 0 for weight in weights) else math.nan
            failed = math.isnan(score)
            correctness.append(math.nan if failed else float(score >= self.threshold))
            whole = sum(weight for weight in weights if weight > 0)
            for name, values in components.items():
                shares = [
                    one.weight * s / whole for one, s in zip(items, scores) if one.component == name and not failed
                ]
                values.append(math.nan if failed else width * sum(shares, 0.0))
        if self.wrong:
            components["wrong"] = [self.wrong] * len(rows)
        return Grades(correctness, components)

    def _answers(self, items: Sequence[tuple[Problem, str, Item]]) -> list[str | None]:
        """The judge's score of each response by a rubric; None where no answer came."""
        prompts = [
            filled(self.prompt, question=p.question, answer=p.answer, response=text, rubric=item.description)
            for p, text, item in items
        ]
        return self.judge.ask(prompts, SCORE)

    def _scores(self, items: Sequence[tuple[Problem, str, Item]]) -> list[float]:
        """The score of each response by a rubric. Raises ValueError with a remedy if none can be read."""
        answers = self._answers(items)
        scores = list(map(read_score, answers))
        if scores and all(map(math.isnan, scores)):
            text = next(answer for answer in answers if answer is not None)
            raise ValueError(
                f"{self.judge.model} gave no score in any of {len(scores)} answers, such as {text[:100]!r}: an answer "
                "must be a number from 0 to 1 or an object with such a score. Set judge.structured=true, let "
                "judge.settings.max_tokens be larger, correct the prompt, or choose another model"
            )
        for answer, score in zip(answers, scores):
            if answer is not None and math.isnan(score):
                reason = f"{self.judge.model} gave answers without a score from 0 to 1, which are not graded"
                warn_once(self.judge.model, "no score", f"{reason}, such as {answer[:100]!r}")
        return scores

    def bounds(self, right: bool) -> tuple[float, float]:
        weights = [item.weight for item in self._fixed()]
        below, above = (sum(weight for weight in weights if weight * sign > 0) for sign in (-1, 1))
        lowest = -math.inf if self.from_problem or self.gathers else below / above
        ends = (max(lowest, self.threshold), 1.0) if right else (lowest, self.threshold)
        least, most = (self.wrong + (self.correct - self.wrong) * end for end in ends)
        return least, most

    def written(self) -> str:
        score = f"sum(weight * score) / sum(positive weights) over rubrics, judged by {self.judge.model}"
        if (self.correct, self.wrong) == (1, 0):
            return score
        return f"{self.wrong:g} + {self.correct - self.wrong:g} * {score}"


@dataclass(frozen=True)
class RubricEvolving(Rubric):
    """Rubrics as in Rubric, and for each problem some that a model proposes from how its responses differ.

    Whenever a group is graded in training, the proposer sees its responses and the active rubrics of the problem. It
    proposes further ones: positive, weight 1, and negative, weight -1. All of them count for this group. Afterwards
    those without deviation over the group are dropped, and at most `max_active_rubrics` of the largest deviation stay
    for the next time (RLER of DR Tulu, arXiv:2511.19399). Evaluation asks by the rubrics that do not change.

    Differs: the proposer gets no search results, and rubrics belong to one problem for the whole run.
    """

    proposer: Endpoint
    proposal: str  # the proposer's prompt, with {question}, {rubrics} and {responses}
    max_new_rubrics: int  # of a group
    max_active_rubrics: int  # of a problem
    response_characters: int  # of each response that the proposer sees

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("{question}", "{rubrics}", "{responses}"):
            require(name in self.proposal, "proposal", repr(self.proposal[:60]), f"a text with {name} in it", "add it")
        for name in ("max_new_rubrics", "max_active_rubrics", "response_characters"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1", "or set reward=rubric")

    @property
    def gathers(self) -> bool:
        return True

    @property
    def components(self) -> list[str]:
        return [*super().components, EVOLVING]

    def items(self, problem: Problem) -> list[Item]:
        return super().items(problem) + [Item(EVOLVING, *one) for one in problem.rubrics]

    def check(self, problems: Sequence[Problem]) -> None:
        super().check(problems)
        self.proposer.check()

    def contrasted(self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> list[Problem]:
        prompts = [self._proposal(problem, texts) for problem, texts in zip(problems, groups)]
        answers = self.proposer.ask(prompts, proposal_form(self.max_new_rubrics))
        changed = []
        for problem, answer in zip(problems, answers):
            known = {item.description for item in self.items(problem)}
            new = [one for one in read_proposal(answer, self.max_new_rubrics) if one[0] not in known]
            changed.append(replace(problem, rubrics=(*problem.rubrics, *new)))
        return changed

    def _proposal(self, problem: Problem, texts: Sequence[str]) -> str:
        shown = "\n\n".join(
            f"Response {number}:\n{_HEADING.sub('> ', text[: self.response_characters])}"
            for number, text in enumerate(texts, start=1)
        )
        active = "\n".join(f"- ({item.weight:+g}) {item.description}" for item in self.items(problem))
        return filled(self.proposal, question=problem.question, rubrics=active, responses=shown)

    def learnt(
        self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]
    ) -> list[tuple[tuple[str, float], ...]]:
        items = [
            (problem, text, item)
            for problem, texts in zip(problems, groups)
            for item in self.items(problem)
            for text in texts
        ]
        # All of it was asked when the groups were graded, so the answers are kept. That none can be read of the
        # rubrics that evolve is no error here: those are dropped.
        answers = iter(self._answers(items))
        found = []
        for problem, texts in zip(problems, groups):
            rows = [(item.component, [read_score(next(answers)) for _ in texts]) for item in self.items(problem)]
            scores = [row for component, row in rows if component == EVOLVING]
            found.append(still_active(problem.rubrics, scores, self.max_active_rubrics))
        return found
