# %% [markdown]
# # How often do the intervals hold?
#
# Every interval, p-value and chance that the verdicts and reports show is simulated here on sweeps whose truth is
# planted. The tables are those of the docstrings of `trials.py`, `all_pairs.py` and `outcome_trials.py` in
# `grpo_lab/analysis/stats`; this makes them again.
# `TRIALS` is the number of sweeps behind each number; a thousand take minutes on an idle core.

# %%
import os
from pathlib import Path

from grpo_lab.analysis.effects.skewness import observed_skewness, skewness_text
from grpo_lab.analysis.stats import all_pairs_trials, outcome_trials, trials

TRIALS = int(os.environ.get("TRIALS", "200"))

# %%
for table in (*trials.tables(TRIALS), *all_pairs_trials.tables(TRIALS), *outcome_trials.tables(TRIALS)):
    print(table.text, end="\n\n")

# %% [markdown]
# Skewed effects are the case in which they hold too rarely. What the saved sweeps found is as little lopsided as draws
# of a normal law:

# %%
print(skewness_text(observed_skewness(Path(__file__).parent / "data")))
