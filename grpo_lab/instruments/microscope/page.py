"""The microscope's page: one HTML file that works offline, with every token coloured by its weight under each set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from grpo_lab.analysis.report.reader import shade
from grpo_lab.analysis.report.templates import HtmlTable, render
from grpo_lab.instruments.microscope.exchange import StoredStep
from grpo_lab.instruments.microscope.measure import Measured, most_changed

GROUPS = 8  # shown with their tokens; the JSON has all
CHANGED = 12  # listed for each set
TOKENS = 400  # of a response


def page(found: Mapping[str, Any], measured: Sequence[Measured], step: StoredStep, lines: Sequence[str]) -> str:
    """The HTML of a result; `found` is its JSON and `lines` the terminal's output."""
    return str(render(
        "microscope.html",
        found=found,
        lines=lines,
        sets=_sets(measured),
        changed=[_changed(measured[0], one, step) for one in measured[1:] if bool(one.changed.any())],
        groups=_groups(measured, step),
        shown=min(GROUPS, len(step.rollouts.problems)),
        all_groups=len(step.rollouts.problems),
    ))  # fmt: skip


def _sets(measured: Sequence[Measured]) -> HtmlTable:
    kinds = ("affected", "removed", "reversed", "added", "clipped")
    head = ["options", "gradient norm", *kinds, *(f"cosine to {_wrapped(one.name)}" for one in measured)]
    rows = [
        [_wrapped(one.name), f"{one.norm:.4g}", *(f"{one.shares[kind]:.1%}" for kind in kinds),
         *(_cosine(one.cosines[other.name]) for other in measured)]
        for one in measured
    ]  # fmt: skip
    return HtmlTable("Gradients, and shares of tokens", head, rows)


def _wrapped(name: str) -> str:
    """The options with a blank after each comma, where a line may break."""
    return name.replace(",", ", ")


def _cosine(value: float) -> str:
    return "none: a gradient is 0" if math.isnan(value) else f"{value:.3f}"


def _changed(plain: Measured, other: Measured, step: StoredStep) -> HtmlTable:
    rows = []
    size = step.rollouts.group_size
    for row, column in most_changed(plain, other, CHANGED).tolist():
        problem = step.rollouts.problems[row // size]
        rows.append([
            f"{_word(step, row, column)!r}", f"{problem.question or problem.id}, response {row % size}", column + 1,
            *(f"{float(one.weights[row, column]) + 0.0:+.3g}" for one in (plain, other)),
        ])  # fmt: skip
    caption = f"Tokens that {_wrapped(other.name)} moves most, each weight beside the largest of its options"
    return HtmlTable(
        caption, ["token", "response", "position", f"weight, {plain.name}", f"weight, {_wrapped(other.name)}"], rows
    )


def _word(step: StoredStep, row: int, column: int) -> str:
    return step.texts[row][column] if step.texts else str(int(step.rollouts.tokens[row, column]))


def _groups(measured: Sequence[Measured], step: StoredStep) -> list[dict[str, Any]]:
    """The first groups, each response with a line of tokens for every set."""
    size, found = step.rollouts.group_size, []
    scales = [float(one.weights.abs().max()) or 1.0 for one in measured]
    for place, problem in enumerate(step.rollouts.problems[:GROUPS]):
        rows = range(place * size, (place + 1) * size)
        found.append({
            "title": problem.question or f"problem {problem.id}",
            "answer": problem.answer,
            "responses": [_response(measured, scales, step, row, row - rows.start) for row in rows],
        })  # fmt: skip
    return found


def _response(
    measured: Sequence[Measured], scales: Sequence[float], step: StoredStep, row: int, number: int
) -> dict[str, Any]:
    group, member = divmod(row, step.rollouts.group_size)
    reward, correctness = (float(values[group, member]) for values in (step.graded.reward, step.graded.verdict))
    judged = "not graded" if math.isnan(correctness) else "right" if correctness == 1 else "wrong"
    length = int(step.rollouts.lengths[row])
    return {
        "title": f"response {number}: {judged}, reward {reward:.3g}, {length} tokens",
        "lines": [
            {
                "name": _wrapped(one.name),
                "pieces": _pieces(one, scale, step, row),
                "sum": f"{float(one.weights[row].sum()):+.3g}",
            }
            for one, scale in zip(measured, scales)
        ],
    }


def _pieces(one: Measured, scale: float, step: StoredStep, row: int) -> list[dict[str, str]]:
    """Neighbours that look alike, as text, colour, title and CSS classes."""
    width = min(int(step.rollouts.lengths[row]), TOKENS)
    tokens = [
        (_word(step, row, column), float(one.weights[row, column]), bool(one.changed[row, column]),
         bool(one.token.in_loss[row, column]))
        for column in range(width)
    ]  # fmt: skip
    pieces = []
    for (weight, affected, in_loss), same in groupby(tokens, lambda token: (float(f"{token[1]:.3g}"), *token[2:])):
        classes = {"affected": affected, "masked": not in_loss, "negative": weight < 0}
        title = f"weight {weight:+.3g}" if in_loss else "not in the loss"
        pieces.append({
            "text": "".join(token[0] for token in same), "shade": shade(weight, scale) if weight else "transparent",
            "title": title + (", affected" if affected else ""),
            "classes": " ".join(name for name, holds in classes.items() if holds),
        })  # fmt: skip
    return pieces
