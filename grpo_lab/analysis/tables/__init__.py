"""The results of a sweep as five tidy tables, with the numbers of its figures and of its verdict.

    from grpo_lab.analysis.tables import load
    load("kl_penalty").effects

`level` is a value of the design's factor, "" for a design without one; `arm` a set of tricks; a final value is a
metric at X, the smallest final budget of the finished runs (`final_values`). Shares are fractions, not percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.effects.contrasts import effects_table
from grpo_lab.analysis.effects.verdict import Judgement, judge
from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.sources.read import RUNS, read_source
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.tables.curves import curves_of, means_of
from grpo_lab.config.folders import data_of


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a sweep, made from its data when they are first asked for."""

    data: SweepData
    finals: FinalValues

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row per run: level, arm, seed, base model, status, and the final value of every metric in its unit.

        `collapsed` runs lost their accuracy or diverged, `stopped` ones before X; `exhausted` ones ended before X with
        nothing left to train on. A run that is not finished has a status and no final values.
        """
        shown = [name for name in (*LABELS, "base", "status") if name in self.data.runs]
        return self.data.runs[shown].merge(self.finals.values, on=LABELS, how="left")

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row per run, metric and logged step, of every metric: see `curves_of`."""
        metrics = [name for name in map(str, self.data.points) if "/" in name and not name.startswith("budget/")]
        return curves_of(self.data, self.finals, metrics)

    @cached_property
    def means(self) -> pd.DataFrame:
        """A row per level, arm, metric and point of its mean over runs: see `means_of`."""
        return means_of(self.curves, self.finals)

    @cached_property
    def effects(self) -> pd.DataFrame:
        """A row per contrast and metric: level, trick, kind, context, metric, mean, low, high, n, p, p_adjusted.

        `mean` is what the trick adds, in the metric's unit, paired by seed over `n` pairs, with its 95% interval in
        low and high. p_adjusted accounts for the `family` of contrasts of one kind on one metric, by the `correction`
        named. `minimum_detectable` is the true effect found with 80% power, `harm` the chance to lose over 2 points on
        another base model. `not_reported` says why there is no interval; `alive` is then the effect in the `n_alive`
        pairs without a collapse, with its interval in alive_low and alive_high. `n_collapsed_with` and
        `n_collapsed_without` count collapsed runs with and without the trick.
        """
        return effects_table(self.data, self.finals).rename(columns={"effect": "mean", "n_pairs": "n"})

    @cached_property
    def verdict(self) -> pd.DataFrame:
        """A row per declared prediction; none where nothing was declared.

        level, arm, reference_level, reference_arm and metric say what is compared, `direction` what was predicted
        (above, below, within the `margin`). `estimate` is arm less reference, paired by seed over n pairs, in the
        metric's unit, with its 95% interval in low and high; `p` is two-sided, `p_holm` adjusted over `family`
        predictions. `verdict` is one of `VERDICTS`: supported, contradicted, equivalent within the margin, not
        significant, not run, or manipulation check failed.
        """
        names = ["level", "arm", "reference_level", "reference_arm", "metric", "direction", "margin", "estimate"]
        names += ["low", "high", "n", "p", "p_holm", "family", "verdict"]
        return pd.DataFrame([_judged(one) for one in judge(self.data, self.finals)], columns=names)


def load(name: str, runs: str = RUNS, saved: Path | None = None) -> Tables:
    """The tables of the sweep `name`, from a folder of runs or an MLflow URI, or from saved data where it holds more.

    `saved` is the folder of saved data (default: experiments/NAME/data). Raises ValueError where neither has the sweep,
    or none of its runs is finished.
    """
    data = read_source(runs, name, saved or data_of(name))
    return Tables(data, final_values(data))


def _judged(judgement: Judgement) -> dict[str, Any]:
    prediction, found = judgement.prediction, judgement.difference
    level, arm = judgement.reference
    row = {"level": prediction.level, "arm": prediction.arm, "reference_level": level, "reference_arm": arm}
    row |= {"metric": prediction.metric, "direction": prediction.direction.value, "margin": judgement.margin}
    row |= {"estimate": found.mean, "low": found.low, "high": found.high, "n": found.n, "p": judgement.p}
    return row | {"p_holm": judgement.holm, "family": judgement.family, "verdict": judgement.verdict}
