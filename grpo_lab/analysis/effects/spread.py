"""How far runs of each arm differ and on how many base models they lose, beside the mean effect."""

from __future__ import annotations

import math

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.final_values import FinalValues, is_rated
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.collapse import Count
from grpo_lab.analysis.stats.comparison import HARM, base_means
from grpo_lab.analysis.stats.intervals import bounds
from grpo_lab.analysis.stats.spread import spread_ratio
from grpo_lab.config.design import Design


def losing_bases(finals: FinalValues, level: str, arm: str, control: str, metric: str, margin: float) -> Count:
    """On how many base models (seeds, for a sweep of one) the arm ends more than the margin below its control."""
    differences = {int(str(seed)): value for seed, value in finals.differences(level, arm, control, metric).items()}
    several = len(set(finals.bases.values())) > 1
    means = base_means(differences, finals.bases) if several else list(differences.values())
    return Count(sum(one < -margin for one in means), len(means))


def spread_text(data: SweepData, finals: FinalValues) -> str:
    """For each arm on the primary metric: its deviation as a ratio to the control's, losses and collapses.

    "" for a sweep without a declaration, or whose primary metric is no accuracy.
    """
    design: Design | None = data.design
    if design is None or not is_rated(design.primary):
        return ""
    metric, margin, lines = design.primary, design.margin or HARM, []
    for level, arm in data.run_arms:
        if arm == data.control:
            continue
        ratio = spread_ratio(finals.of(level, arm, metric), finals.of(level, data.control, metric), finals.bases)
        lost = losing_bases(finals, level, arm, data.control, metric, margin)
        if not lost.of:
            continue
        text = f"{ratio.mean:.2f}" if not math.isnan(ratio.mean) else "-"
        text += bounds(ratio.low, ratio.high, ".2f")
        text += f" ({ratio.why})" if ratio.why else ""
        losses = f"loses more than {margin:g} in {lost.text}; collapsed {finals.collapses(level, arm).text}"
        lines.append(f"  {place(data, level, arm)}: {text}; {losses}")
    if not lines:
        return ""
    several = len(set(finals.bases.values())) > 1
    unit = "base models" if several else "seeds"
    of = "seeds within a base model" if several and len(finals.bases) > len(set(finals.bases.values())) else unit
    head = [
        f"How far runs differ and how many lose, on {metric_text(metric)}",
        f"  First the standard deviation of {of} over that of {data.control}, with its 95% CI.",
        f"  Then the {unit} that lose and the runs that collapse, with the exact 95% CI of their share; unadjusted.",
    ]
    return "\n".join([*head, *lines]) + "\n"
