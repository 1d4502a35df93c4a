"""Responses as a section of the report: filters, tokens coloured by advantage, two arms side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from grpo_lab.analysis.report.reader import LEGEND, ShownToken, facts, read_rollouts, rollout_steps, tokens_of
from grpo_lab.analysis.report.templates import render
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import records_of, rows_of

PROBLEMS = 6  # of a step, whole groups
STEPS = 4  # saved steps of a run: the first, the last and those between at equal distances
TOKENS = 600  # of a response; beyond that, the tokens between its first and its last ones are left out


def rollouts_section(responses: Sequence[Mapping[str, Any]]) -> Markup:
    """The controls, the responses and the script; a sentence where no responses are at hand."""
    arms = list(dict.fromkeys(response["arm"] for response in responses))
    return render("reader.html", responses=responses, arms=arms, legend=LEGEND)


def collect_responses(data: SweepData, runs_dir: Path | None) -> list[dict[str, Any]]:
    """Responses of every arm by the same seed, so that any two share prompts and noise; none without run folders."""
    seeds = data.finished["seed"]
    if runs_dir is None or seeds.empty:
        return []
    seed = int(seeds.mode().min())  # the seed most arms have, the smallest of equals
    runs = list(rows_of(data.finished[data.finished["seed"] == seed]))
    saved = {row.folder: set(rollout_steps(runs_dir / row.folder)) for row in runs}
    # The same steps of every arm, so that any two can stand side by side, and the last of each.
    common = _spread(sorted(set.intersection(*filter(None, saved.values())))) if any(saved.values()) else set()
    return [
        _response(f"{row.level}: {row.arm}" if row.level else row.arm, seed, entry)
        for row in runs
        for step in sorted((common | {max(saved[row.folder], default=-1)}) & saved[row.folder])
        for entry in _first_problems(read_rollouts(runs_dir / row.folder, step))
    ]


def _spread(steps: Sequence[int]) -> set[int]:
    if len(steps) <= STEPS:
        return set(steps)
    return {steps[round(index * (len(steps) - 1) / (STEPS - 1))] for index in range(STEPS)}


def _first_problems(table: pd.DataFrame) -> list[dict[str, Any]]:
    return records_of(table[table["problem_id"].isin(table["problem_id"].unique()[:PROBLEMS])])


def _response(arm: str, seed: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "step": int(row["step"]),
        "problem": str(row["problem_id"]),
        "response": int(row["response"]),
        "question": str(row["question"]),
        "answer": str(row["answer"]),
        "outcome": "" if math.isnan(row["outcome"]) else str(int(row["outcome"] == 1)),
        "advantage": _short(row["advantage"]),
        "truncated": str(int(row["truncated"])),
        "in_loss": str(int(row["in_loss"])),
        "facts": facts(row),
        "pieces": _pieces(tokens_of(row)),
    }


def _pieces(tokens: Sequence[ShownToken]) -> list[tuple[str, float, str]]:
    """Neighbours that look alike as text, advantage and CSS classes; of a long response its start and its end."""
    left_out = len(tokens) - TOKENS
    if left_out <= 0:
        return _alike(tokens)
    gap = (f" [{left_out} tokens left out] ", 0.0, "masked")
    return [*_alike(tokens[: TOKENS * 3 // 4]), gap, *_alike(tokens[-TOKENS // 4 :])]


def _alike(tokens: Sequence[ShownToken]) -> list[tuple[str, float, str]]:
    pieces = groupby(tokens, lambda token: (_short(token.advantage), _classes(token)))
    return [("".join(token.text for token in same), advantage, classes) for (advantage, classes), same in pieces]


def _classes(token: ShownToken) -> str:
    named = {"masked": not token.in_loss, "clipped": token.clipped, "injected": not token.sampled}
    return " ".join(name for name, holds in named.items() if holds)


def _short(value: float) -> float:
    return float(f"{value:.4g}") if pd.notna(value) else 0.0
