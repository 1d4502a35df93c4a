"""Results of further suites of a sweep: those beside the four, evaluated by its runs or by a harness."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import title
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.tracking.metrics import FURTHER_SUITES, SAMPLER_SUITES, SUITES


def further_accuracies(finals: FinalValues) -> list[str]:
    """The accuracies of further suites of some run: those of grpo_lab, then tables and harnesses, by name."""
    known = [f"eval/{suite}/accuracy" for suite in SUITES | FURTHER_SUITES | SAMPLER_SUITES]
    others = [
        str(name) for name in finals.values if re.fullmatch(r"eval/\w+/accuracy", str(name)) and name not in known
    ]
    metrics = [*known[len(SUITES) :], *sorted(others)]
    return [metric for metric in metrics if metric in finals.values and finals.values[metric].notna().any()]


def suites_text(data: SweepData, finals: FinalValues) -> str:
    """For each further suite its accuracy at step 0 and at X by arm, and the difference to the control; "" for none."""
    blocks = []
    for metric in further_accuracies(finals):
        blocks += [f"  {title(metric)}", *_arms(data, finals, metric)]
    if not blocks:
        return ""
    head = f"Further suites: mean at step 0 -> at {finals.at} [95% interval], and the difference to {data.control}"
    return "\n".join([head, *blocks]) + "\n"


def _arms(data: SweepData, finals: FinalValues, metric: str) -> Iterator[str]:
    starts = data.counted_points.query("step == 0").groupby(["level", "arm"])[metric].mean()
    for level, arm in data.run_arms:
        own = finals.interval(level, arm, metric)
        if own.n == 0:
            continue
        start = starts.get((level, arm), float("nan"))
        before = "" if start != start else f"{start:.3f} -> "
        difference = finals.difference(level, arm, data.control, metric)
        against = f"; difference {difference.text('+')}, n = {difference.n}" if arm != data.control else ""
        yield f"    {place(data, level, arm)}: {before}{own.text()}{against}"
