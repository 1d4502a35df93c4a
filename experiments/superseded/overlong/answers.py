# %% [markdown]
# # How the arms of `overlong` answer
#
# The truncated share falls or stays because the policy guesses, works the steps out, or rambles. This counts the three
# ways of answering in the rollout tables of the runs (`RUNS`, else `runs`; every tenth step is kept) and writes the
# shares, and held-out beside training accuracy by difficulty, to `data` beside this file.

# %%
import os
from pathlib import Path

import pandas as pd

from grpo_lab.analysis.stats.intervals import t_interval
from grpo_lab.tasks.arithmetic import answer_mode
from grpo_lab.tracking.sweep_record import read_sweep, sweep_folder

RUNS = Path(os.environ.get("RUNS", "runs"))
DATA = Path(__file__).parent / "data"
WINDOWS = {"1": (1, 1), "11-41": (11, 41), "51-81": (51, 81), "91-end": (91, 10_000)}
sweep = read_sweep(sweep_folder(RUNS, "overlong"))

# %%
rows = []
for entry in sweep.cells:
    tables = [
        pd.read_parquet(path).assign(step=int(path.stem[5:])) for path in (RUNS / entry.folder).glob("rollouts/*")
    ]
    answers = pd.concat(tables, ignore_index=True)
    answers["mode"] = answers["text"].map(answer_mode)
    for window, (first, last) in WINDOWS.items():
        here = answers[answers["step"].between(first, last)]
        six, finished = here["difficulty"] == 6, ~here["truncated"]
        values = {
            **{mode: (here["mode"] == mode).mean() for mode in ("guess", "ramble")},
            "guess, six addends": (here["mode"][six] == "guess").mean(),
            "truncated": here["truncated"].mean(),
            "truncated, six addends": here["truncated"][six].mean(),
            "truncated, three to five": here["truncated"][~six].mean(),
            "accuracy of finished": here["outcome"][finished].mean(),
            "length of right": here["length"][here["outcome"] == 1].mean(),
            "length of finished wrong": here["length"][finished & (here["outcome"] == 0)].mean(),
        }
        labels = {"level": entry.level, "arm": entry.arm, "steps": window, "seed": entry.seed}
        rows += [{**labels, "quantity": name, "value": value} for name, value in values.items()]

# %% [markdown]
# Means and 95% t intervals over seeds.

# %%
keys = ["level", "arm", "steps", "quantity"]
shares = []
for labels, group in pd.DataFrame(rows).groupby(keys, sort=False):
    interval = t_interval(group["value"].dropna().tolist())
    shares.append(dict(zip(keys, labels)) | {"mean": interval.mean, "low": interval.low, "high": interval.high})
pd.DataFrame(shares).round(4).to_csv(DATA / "overlong_answers.csv", index=False)

# %% [markdown]
# The same accuracy by difficulty: training responses of the last fifth of the steps, and held-out answers at the end.

# %%
rows = []
for entry in sweep.cells:
    evaluated = sorted((RUNS / entry.folder).glob("eval/*"))[-1]
    end = int(evaluated.stem[5:])
    heldout = pd.read_parquet(evaluated).query("suite == 'heldout_training'")
    late = [path for path in (RUNS / entry.folder).glob("rollouts/*") if int(path.stem[5:]) > 0.8 * end]
    trained = pd.concat([pd.read_parquet(path) for path in late], ignore_index=True)
    for side, answers in (("held-out", heldout), ("training", trained)):
        sums = answers["answer"].astype(int)
        for difficulty, group in answers.groupby("difficulty"):
            row = {"level": entry.level, "arm": entry.arm, "side": side, "addends": difficulty}
            rows.append(row | {"accuracy": group["outcome"].mean(), "mean sum": sums[group.index].mean()})
grouped = pd.DataFrame(rows).groupby(["level", "arm", "addends", "side"], sort=False).mean()
grouped.round(4).to_csv(DATA / "overlong_difficulty.csv")
print(grouped.unstack().round(3).to_string())
