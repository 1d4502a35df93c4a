"""Responses as a section of the report: filters, tokens coloured by advantage, two arms side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.report.page_words import embedded_json
from grpo_lab.analysis.report.reader import LEGEND, components, read_rollouts, rollout_steps, tokens_of
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import records_of, rows_of

PROBLEMS = 6  # of a step, whole groups
STEPS = 4  # saved steps of a run: the first, the last and those between at equal distances
TOKENS = 600  # of a response; what lies between its first and last tokens beyond that is left out and said
_ASSETS = Path(__file__).parent / "assets"


def rollouts_section(data: SweepData, runs_dir: Path | None) -> str:
    """HTML of the section: its controls, its data and its script. Says so where no responses are at hand.

    Every arm is shown by the same seed, so that any two share prompts and noise.
    """
    responses = [] if runs_dir is None else _collect(data, Path(runs_dir))
    if not responses:
        return (
            "<p>No training responses are at hand: they stay in the run folders and are not saved with the numbers. "
            "Where those folders are, <code>grpo-lab rollouts RUN</code> shows them.</p>"
        )
    embedded = embedded_json({"responses": responses, "legend": LEGEND})
    script = (_ASSETS / "reader.js").read_text()
    controls = (_ASSETS / "reader.html").read_text()
    return f'{controls}<script type="application/json" id="rollout-data">{embedded}</script><script>{script}</script>'


def _collect(data: SweepData, runs_dir: Path) -> list[dict[str, Any]]:
    seeds = data.finished["seed"]
    if seeds.empty:
        return []
    counts = seeds.value_counts()
    seed = int(counts.index[counts == counts.max()].min())  # the seed most arms have, the smallest of equals
    runs = list(rows_of(data.finished[data.finished["seed"] == seed]))
    saved = {row.folder: rollout_steps(runs_dir / row.folder) for row in runs}
    # The same steps of every arm, so that any two can stand side by side, and the last of each.
    common = _spread(sorted(set.intersection(*map(set, filter(None, saved.values()))))) if any(saved.values()) else []
    responses = []
    for row in runs:
        folder = runs_dir / row.folder
        for step in sorted({*common, *saved[row.folder][-1:]} & set(saved[row.folder])):
            table = read_rollouts(folder, step)
            shown = table[table["problem_id"].isin(table["problem_id"].unique()[:PROBLEMS])]
            responses += [_response(row.level, row.arm, seed, entry) for entry in records_of(shown)]
    return responses


def _spread(steps: Sequence[int]) -> list[int]:
    if len(steps) <= STEPS:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (STEPS - 1))] for index in range(STEPS)]


def _response(level: str, arm: str, seed: int, row: dict[str, Any]) -> dict[str, Any]:
    tokens = tokens_of(row)
    left_out = max(0, len(tokens) - TOKENS)
    shown = tokens if not left_out else [*tokens[: TOKENS * 3 // 4], *tokens[-TOKENS // 4 :]]
    flags = ["".join("1" if getattr(token, name) else "0" for token in shown) for name in _FLAGS]
    return {
        "level": level,
        "arm": arm,
        "seed": seed,
        "step": int(row["step"]),
        "problem": str(row["problem_id"]),
        "response": int(row["response"]),
        "question": str(row["question"]),
        "answer": str(row["answer"]),
        "outcome": None if math.isnan(row["outcome"]) else float(row["outcome"]),
        "reward": _short(row["reward"]),
        "parts": {name: _short(value) for name, value in components(row).items()},
        "advantage": _short(row["advantage"]),
        "length": int(row["length"]),
        "truncated": bool(row["truncated"]),
        "trained": bool(row["trained"]),
        "counted": bool(row["counted"]),
        "tokens": [token.text for token in shown],
        "advantages": _runs([_short(token.advantage) for token in shown]),
        "flags": dict(zip(_FLAGS, flags)),
        "left_out": left_out,
        "whole": "tokens" not in row,
    }


_FLAGS = ("in_loss", "clipped", "sampled")


def _short(value: float) -> float:
    return float(f"{value:.4g}") if pd.notna(value) else 0.0


def _runs(values: Sequence[float]) -> list[list[float | int]]:
    """Equal neighbours as [value, how many]: most responses have one advantage for all their tokens."""
    runs: list[list[float | int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs
