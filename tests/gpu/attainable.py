"""What the speed part could reach, by arithmetic: a roofline of one H100 for SmolLM2-135M's shape in bf16.

Floors are the larger of model FLOPs at 780 TFLOP/s and bytes at 3.35 TB/s, as if every kernel reached the peak. What is
attainable allows for kernels of this size, which do not: from shapes and launches counted, not measured. Targets are
what the code is to reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"
TOKENS = 131_072  # of a step: 64 problems x 8 responses x 256 tokens


@dataclass(frozen=True)
class Estimate:
    """A row: the check of `speed` that measures it, floor and attainable range in its unit, and the target."""

    name: str
    check: str
    unit: str
    floor: float | None
    attainable: tuple[float, float] | None
    target: float


ESTIMATES = (
    Estimate("generate", "graphs: generate", "s", 0.26, (0.5, 0.8), 1.3),
    Estimate("log-probs", "graphs: logprobs", "s", 0.05, (0.12, 0.20), 0.20),
    Estimate("train, 4 updates", "graphs: train", "s", 0.15, (0.4, 0.7), 0.7),
    Estimate("the whole step", "graphs: the whole step", "s", 0.46, (1.0, 1.7), 2.0),
    Estimate("peak memory", "graphs: peak memory", "GiB", None, None, 20.0),
)


def attainable_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a markdown table: measurements of `speed` against estimates of the attainable."""
    values = {row["check"]: row["value"] for row in rows}
    lines = [
        f"| {TOKENS:,} tokens a step | measured | attainable on an H100 (estimate) | floor (roofline) | target | met |",
        "|---|--:|--:|--:|--:|---|",
    ]
    return lines + [_line(one, values.get(one.check)) for one in ESTIMATES]


def _line(one: Estimate, value: object) -> str:
    measured = isinstance(value, (int, float))
    have = f"{value:.3g} {one.unit}" if measured else NOT_MEASURED
    between = "" if one.attainable is None else f"{one.attainable[0]:g} to {one.attainable[1]:g} {one.unit}"
    floor = "" if one.floor is None else f"{one.floor:g} {one.unit}"
    met = ("yes" if value <= one.target else "no") if measured else NOT_MEASURED
    return f"| {one.name} | {have} | {between} | {floor} | at most {one.target:g} {one.unit} | {met} |"
