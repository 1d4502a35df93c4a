"""How lopsided the differences are that the saved sweeps found: the condition under which t intervals hold.

The tables of `differences` say that intervals of effects with a long tail on one side hold too rarely, and that four
to eight values do not show such a tail. Hundreds of contrasts together do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from grpo_lab.analysis.effects.contrasts import trick_effects
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.saved_data import load_data, saved_names
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.config.folders import DATA, declared

METRICS = ("eval/downstream/accuracy", "eval/heldout/accuracy", "eval/heldout_training/accuracy", "reward/outcome")
FEWEST = 4  # values whose skewness says anything


@dataclass(frozen=True)
class Skewness:
    """Mean sample skewness of the independent differences of a contrast, on one metric.

    `interval` is a 95% t interval over sweeps, since contrasts of one sweep share their control. `normal` and
    `lognormal` are what samples of the same sizes have on average when drawn from such a law.
    """

    metric: str
    contrasts: int
    interval: Interval
    normal: float
    lognormal: float


def observed_skewness(experiments: Path) -> list[Skewness]:
    """For each of METRICS, over the contrasts of all saved sweeps whose interval is shown."""
    samples: dict[str, dict[str, list[Sequence[float]]]] = {}
    folders = {name: folder / DATA for name, folder in declared(experiments).items()}
    for name, folder in folders.items():
        if name not in saved_names(folder):
            continue
        data = load_data(folder, name)
        for effect in trick_effects(data, final_values(data), METRICS):
            values = effect.comparison.observed
            shown = not effect.comparison.mixed and not math.isnan(effect.comparison.whole.low)
            if shown and len(values) >= FEWEST and float(np.ptp(values)) > 0:
                samples.setdefault(effect.metric, {}).setdefault(name, []).append(values)
    found = []
    for metric, sweeps in samples.items():
        means = [float(np.mean([stats.skew(values) for values in own])) for own in sweeps.values()]
        sizes = [len(values) for own in sweeps.values() for values in own]
        rng = np.random.default_rng(0)
        normal = _mean_skewness([rng.standard_normal(size) for size in sizes for _ in range(200)])
        lognormal = _mean_skewness([np.exp(rng.standard_normal(size)) for size in sizes for _ in range(200)])
        found.append(Skewness(metric, len(sizes), t_interval(means), normal, lognormal))
    return found


def _mean_skewness(samples: Sequence[np.ndarray]) -> float:
    return float(np.mean([stats.skew(values) for values in samples]))


def skewness_text(found: Sequence[Skewness]) -> str:
    """A line per metric."""
    return "\n".join(
        f"{one.metric}: {one.contrasts} contrasts, mean skewness {one.interval.text('+')} over {one.interval.n} "
        f"sweeps; normal {one.normal:+.2f}, lognormal {one.lognormal:+.2f}"
        for one in found
    )
