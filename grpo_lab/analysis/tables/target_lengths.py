"""Where prompts ask for a target length: how long responses are, and how often right, as tidy tables."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tables.rows import seeds_and_mean, table_of
from grpo_lab.analysis.tracks import tracks

SUITE = "heldout_training"
BINS = 6  # of equal width, where more lengths than `SINGLE` are asked for
SINGLE = 8
_WHEN = ["level", "arm", "when"]


def target_answers(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Answers to questions that ask for a length: level, arm, seed, base, when, wanted, length, accuracy.

    A row per run, question and `when`: "start" (step 0) or "end" (the last evaluation up to X). Lengths are in tokens,
    `accuracy` is the percentage of its answers that were right. Runs that lack one of both have no row.
    """
    names = [*LABELS, "base", "last"]
    found = [(run.level, run.arm, run.seed, run.base, run.around[0]) for run in tracks(data, finals)]
    asked = data.answers[(data.answers["suite"] == SUITE) & (data.answers["wanted"] > 0)]
    own = asked.merge(pd.DataFrame(found, columns=names).astype({"seed": int, "last": int}), on=LABELS)
    own = own[(own["last"] > 0) & ((own["step"] == 0) | (own["step"] == own["last"]))]
    own = own.assign(when=np.where(own["step"] == 0, "start", "end"), wanted=own["wanted"].astype(float))
    own = own.assign(length=own["tokens"] / own["n"], accuracy=100 * own["correct"] / own["n"])
    both = own.groupby(LABELS)["when"].transform("nunique") == 2
    return own.loc[both, [*LABELS, "base", "when", "wanted", "length", "accuracy"]]


def target_lengths_of(answers: pd.DataFrame) -> pd.DataFrame:
    """Lengths and accuracy over the target length: level, arm, when, series, part, x, seed, value, low, high, n.

    `series` is "length", "accuracy" or "slope" (of length over the target length, over single questions). `part` is
    "seed" (a run's mean over the questions around x) or "mean" (over the n runs that have some, with the t interval in
    low and high).
    """
    place = np.searchsorted(_edges(answers), answers["wanted"].to_numpy(), side="right") - 1
    bases = answers.drop_duplicates("seed").set_index("seed")["base"]
    rows = []
    for (level, arm, when, _), here in groups_of(answers.assign(place=place), [*_WHEN, "place"]):
        by_seed = here.groupby("seed")[["wanted", "length", "accuracy"]].mean()
        labels = {"level": level, "arm": arm, "when": when, "x": by_seed["wanted"].mean()}
        for series in ("length", "accuracy"):
            mean = mean_of_runs(by_seed[series].tolist(), bases[by_seed.index].tolist())
            rows += seeds_and_mean(labels | {"series": series}, by_seed[series], mean)
    for (level, arm, when), here in groups_of(answers, _WHEN):
        slopes = pd.Series({seed: slope_of(own) for seed, own in groups_of(here, "seed")})
        labels = {"level": level, "arm": arm, "when": when, "series": "slope"}
        rows += seeds_and_mean(labels, slopes, mean_of_runs(slopes.tolist(), bases[slopes.index].tolist()))
    return table_of(rows, [*_WHEN, "series", "part", "x", "seed", "value", "low", "high", "n"])


def slope_of(answers: pd.DataFrame) -> float:
    """Tokens of response for each token asked for, by least squares over questions; NaN where all ask for the same."""
    spread = answers["wanted"] - answers["wanted"].mean()
    squares = float((spread**2).sum())
    return float((spread * answers["length"]).sum()) / squares if squares else float("nan")


def _edges(answers: pd.DataFrame) -> np.ndarray:
    """Where the bins of target lengths begin and end; one bin a length where there are few."""
    asked = np.unique(answers["wanted"])
    if len(asked) <= SINGLE:
        return np.append(asked, asked[-1] + 1)
    return np.linspace(asked[0], asked[-1] + 1, BINS + 1)
