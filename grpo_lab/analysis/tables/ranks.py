"""Arms ranked by training reward, by downstream accuracy and by sharpness, as tidy tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from grpo_lab.analysis.divergence.rank_agreement import RankedArms, arm_agreement
from grpo_lab.analysis.divergence.reward_ranks import RankedLevel
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.tables.rows import as_columns, table_of

QUANTITIES = ("reward", "downstream")
_NAMES = ["level", "arm", "part", "seed", *(f"{q}{end}" for q in QUANTITIES for end in ("", "_low", "_high", "_rank"))]


def rank_table(found: Mapping[str, RankedArms]) -> pd.DataFrame:
    """Final training reward and downstream accuracy of arms, in percent, six decimals.

    `part` is "seed" (of an arm), "mean" (over n seeds, with t intervals and the arm's ranks, 1 the highest), and, for a
    level, "regret" and "tau" (in `value`; the regret in percentage points, with `low` and `high`), as
    `rank_agreement.arm_agreement` gives them.
    """
    rows = [{"level": level, **row} for level, here in found.items() for row in _rows(here)]
    table = pd.DataFrame(rows, columns=[*_NAMES, "value", "low", "high", "n"])
    whole = ("seed", "n", *(f"{name}_rank" for name in QUANTITIES))
    return table.astype(dict.fromkeys(whole, "Int64")).round(6)


def _rows(here: RankedArms) -> Iterator[dict[str, Any]]:
    ranks = {name: here.ranks(name) for name in QUANTITIES}
    for index, arm in enumerate(here.arms):
        own = {name: 100 * getattr(here, name)[:, index] for name in QUANTITIES}
        for at, seed in enumerate(here.seeds):
            yield {"arm": arm, "part": "seed", "seed": seed, **{name: values[at] for name, values in own.items()}}
        mean: dict[str, Any] = {"arm": arm, "part": "mean", "n": len(here.seeds)}
        for name, values in own.items():
            interval = mean_of_runs(values.tolist(), here.bases)
            mean |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            mean |= {f"{name}_rank": ranks[name][index]}
        yield mean
    both = arm_agreement(here.reward, here.downstream, here.bases)
    regret, every = both.regret.scaled(100), {"arm": "", "n": both.regret.n}
    yield every | {"part": "regret", "value": regret.mean, "low": regret.low, "high": regret.high}
    yield every | {"part": "tau", "value": both.tau}


def sharpness_table(levels: Mapping[str, RankedLevel]) -> pd.DataFrame:
    """Level, arm, metric, value, low, high, n: what arms deviate from the mean of all on their base model, by metric.

    Without an arm, `metric` is "rank correlation with ..." training reward, with its 95% interval over n base models.
    """
    rows: list[dict[str, Any]] = []
    for level, here in levels.items():
        for arm, values in here.values.iterrows():
            rows += [{"level": level, "arm": arm, "metric": name, "value": value} for name, value in values.items()]
        for metric, found in here.correlations.items():
            row = {"level": level, "arm": "", "metric": f"rank correlation with {metric}"}
            rows.append(row | as_columns(found.within(-1.0, 1.0)))
    return table_of(rows, ["level", "arm", "metric", "value", "low", "high", "n"])
