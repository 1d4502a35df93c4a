"""The verdicts of a sweep in one line: predictions, quantities, counts, and the finding on the deciding metric."""

from __future__ import annotations

from collections import Counter

from grpo_lab.analysis.divergence.quantities import judge_quantities
from grpo_lab.analysis.effects.verdict import count_verdict, finding, judge
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData


def supported_text(data: SweepData, finals: FinalValues) -> str:
    """`3 of 4 predictions supported; 1 not significant`, predicted quantities included; "" without predictions."""
    words = _words(data, finals)
    if not words:
        return ""
    number, supported = words.total(), words.pop("supported", 0)
    others = [f"{times} {word}" for word, times in sorted(words.items())]
    return "; ".join([f"{supported} of {number} predictions supported", *others])


def headline(data: SweepData, finals: FinalValues) -> str:
    """The verdicts counted, and the finding on the metric that decides; "" where nothing was declared."""
    if data.declaration is None:
        return ""
    supported = supported_text(data, finals)
    if supported and set(_words(data, finals)) == {"not run"}:
        return "too few finished runs to judge a prediction"
    counts = [count_verdict(data, finals, one) for one in data.declaration.counts]
    decided = [word for word in counts if word in ("as predicted", "not as predicted")]
    counted = f"{counts.count('as predicted')} of {len(decided)} counts as predicted" if decided else ""
    return "; ".join(filter(None, [supported, counted, finding(data, finals)])) or "no predictions were declared"


def _words(data: SweepData, finals: FinalValues) -> Counter[str]:
    """Verdict -> how many predictions and quantities have it."""
    return Counter(one.verdict for one in (*judge(data, finals), *judge_quantities(data, finals)))
