"""False positives and false negatives of graders, on pairs of a right answer and a response that come with grpo_lab."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from grpo_lab.tasks.base import Grader
from grpo_lab.types import NoiseKey, Problem

_CELL = "A cell: false positives / false negatives + answers without a verdict."
PAIRS = Path(__file__).with_name("grader_pairs.yaml")


@dataclass(frozen=True)
class Pair:
    """A right answer, a response to its question, and whether that response is right."""

    kind: str
    gold: str
    response: str
    right: bool


def pairs() -> list[Pair]:
    """The pairs that come with grpo_lab. An answer is boxed, as the shipped templates ask for it."""
    written = yaml.safe_load(PAIRS.read_text(encoding="utf-8"))
    boxed = (
        (kind, gold, rf"The answer is \boxed{{{answer}}}.", truth)
        for kind, gold, answer, truth in _rows(written["answers"])
    )
    return [
        Pair(kind, gold, response, truth == "right")
        for kind, gold, response, truth in [*boxed, *_rows(written["responses"])]
    ]


def _rows(kinds: Mapping[str, Sequence[Sequence[str]]]) -> list[tuple[str, str, str, str]]:
    return [(kind, gold, text, truth) for kind, rows in kinds.items() for gold, text, truth in rows]


def correctness_of(grader: Grader, judged: Sequence[Pair]) -> list[float]:
    """The correctness of each pair: 1, 0, or NaN where the grader failed. Raises ValueError if it cannot grade them."""
    # The details are those of a family of reasoning-gym that compares answers as texts.
    problems = [Problem(place, "", pair.gold, 1, details=details_of(pair.gold)) for place, pair in enumerate(judged)]
    grader.check(problems)
    keys = [NoiseKey(0, "graders", 0, place, 0) for place in range(len(judged))]
    return grader.checked_grades(problems, [pair.response for pair in judged], [True] * len(judged), keys).correctness


def details_of(gold: str) -> str:
    """The details of a problem with this answer, for graders of reasoning-gym."""
    entry = {"question": "", "answer": gold, "metadata": {}}
    return json.dumps({"family": "gsm_symbolic", "settings": {}, "entry": entry})


def errors_text(judged: Sequence[Pair], text: Mapping[str, Sequence[float]], listed: bool) -> str:
    """The errors of each grader by kind of pair, and with `listed` the pairs that it is wrong about."""
    right = sum(pair.right for pair in judged)
    lines = [f"{len(judged)} pairs, {right} right and {len(judged) - right} wrong.", _CELL, ""]
    width = max(len(pair.kind) for pair in judged)
    names = [f"{name:>{max(14, len(name))}}" for name in text]
    lines.append("  ".join([f"{'kind':<{width}}", "pairs", *names]))
    for kind in [*dict.fromkeys(pair.kind for pair in judged), ""]:
        places = [place for place, pair in enumerate(judged) if kind in (pair.kind, "")]
        cells = []
        for name, verdicts in zip(names, text.values()):
            wrong = [(judged[place].right, verdicts[place]) for place in places]
            positive = sum(truth is False and verdict == 1 for truth, verdict in wrong)
            negative = sum(truth and verdict == 0 for truth, verdict in wrong)
            failed = sum(math.isnan(verdict) for _, verdict in wrong)
            cells.append(f"{f'{positive} / {negative}' + (f' + {failed}' if failed else ''):>{len(name)}}")
        lines.append("  ".join([f"{kind or 'all':<{width}}", f"{len(places):>5}", *cells]))
    for name, verdicts in text.items() if listed else ():
        lines += ["", f"{name}:"]
        for pair, verdict in zip(judged, verdicts):
            if verdict != pair.right:
                what = "no verdict on" if math.isnan(verdict) else "takes" if verdict else "refuses"
                lines.append(f"  {what} {pair.response!r} for {pair.gold!r}")
    return "\n".join(lines)
