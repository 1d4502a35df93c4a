"""The verdicts of a sweep in one line: predictions, quantities, counts, and the finding on the deciding metric."""

from __future__ import annotations

from collections import Counter

from grpo_lab.analysis.divergence.quantities import judge_quantities
from grpo_lab.analysis.effects.verdict import count_verdict, finding, judge
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData


def supported_text(data: SweepData, finals: FinalValues) -> str:
    """`3 of 4 predictions supported; 1 not significant`, predicted quantities included; "" without predictions."""
    words = Counter(one.verdict for one in (*judge(data, finals), *judge_quantities(data, finals)))
    if not words:
        return ""
    number, supported = words.total(), words.pop("supported", 0)
    others = [f"{times} {word}" for word, times in sorted(words.items())]
    return "; ".join([f"{supported} of {number} predictions supported", *others])


def headline(data: SweepData, finals: FinalValues) -> str:
    """The verdicts counted, and the finding on the metric that decides; "" where nothing was declared."""
    if data.declaration is None:
        return ""
    counts = [count_verdict(data, finals, one) for one in data.declaration.counts]
    counted = f"{counts.count('as predicted')} of {len(counts)} counts as predicted" if counts else ""
    said = [supported_text(data, finals), counted, finding(data, finals)]
    return "; ".join(filter(None, said)) or "no predictions were declared"
