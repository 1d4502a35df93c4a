# %% [markdown]
# # Does training reward say what the evaluations say?
#
# Training reward is what a run sees of itself, downstream accuracy what one wants of it. This asks how far the two
# part, since when, why, and what it costs to choose a checkpoint or an arm by reward. `EXP` names the sweep, `RUNS`
# its runs. Accuracies are in percentage points; brackets are 95% intervals over seeds, braces resample questions too.

# %%
import numpy as np
from notebook_tables.show import (
    chosen_sweep,
    introduction,
    null_runs,
    show_figure,
    show_lines,
    show_measures,
)

from grpo_lab.analysis.divergence.leading import INDICATORS, leading_text
from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.figures import decomposition, ranks
from grpo_lab.analysis.figures.curves import draw_curves
from grpo_lab.analysis.final_values import final_values

data = chosen_sweep()
finals = final_values(data)
null, null_words = null_runs()
divergence = divergence_table(data, finals, np.random.default_rng(0), null)
show_lines(introduction(data, finals))

# %% [markdown]
# ## How far, and since when
#
# The gap change is what the correctness part of training reward gained less what downstream accuracy gained. Above 0
# it is no harm yet: harder questions gain less from the same learning. The onset is the first of three evaluations in
# a row at which the gap is surely open; the onset after the peak asks the same of the fall from the best evaluation,
# and that is harm. At step 0 the probe stands for the reward: training questions, asked of the same weights.

# %%
show_measures(divergence, "gap_change", "gap_change_sampler", "onset", "onset_after_peak")
show_figure(draw_curves(data, finals))

# %% [markdown]
# ## How much of a gain in reward arrives downstream
#
# The transfer slope is the downstream gain for each point of reward, over the checkpoints of a run; *early* and *late*
# split the run in half. A slope near 1 says that both gain alike. A late slope below the early one says that reward
# came to buy less; a slope below 0 is reward that costs accuracy. Noise in reward flattens slopes a little.

# %%
show_measures(divergence, "transfer_slope", "transfer_slope_early", "transfer_slope_late")

# %% [markdown]
# ## Why
#
# Four steps lead from training reward to downstream accuracy, and the gap change is the sum of what is lost on each:
# which prompts were drawn, memorisation (training against held-out questions), protocol (training's temperature,
# length and verifier against the evaluation's) and the shift to harder questions.

# %%
parts = [f"waterfall_{part}" for part in ("prompt_mix", "memorisation", "protocol", "shift")]
show_measures(divergence, *parts)
show_figure(decomposition.draw_decomposition(data, finals))

# %% [markdown]
# ## What choosing a checkpoint costs
#
# The best checkpoint is found on one half of the questions and measured on the other, so a regret is 0 on average
# where there is nothing to choose, and not the luck of the best of many. `last` stops at the end, `train reward` and
# `heldout` pick by those. The optimism is how much too good the best checkpoint looks on the questions that chose it.

# %%
rules = [f"selection_regret_{rule}" for rule in ("last", "train_reward", "heldout")]
show_measures(divergence, "post_peak_drop", *rules, "selection_optimism")

# %% [markdown]
# ## What announces a loss
#
# Does anything that a run logs of itself move before downstream accuracy is 10 points below its start? Only readings
# before the loss count, and only against runs at the same step. An alarm is what one null run in twenty reaches; `NULL`
# names a sweep of null runs, otherwise they are those of the control.

# %%
show_measures(divergence, *(f"leading_{what}_{name}" for what in ("auc", "false") for name in INDICATORS))
show_lines(leading_text(divergence, null_words))

# %% [markdown]
# ## What choosing an arm costs
#
# Lead with the regret: downstream accuracy that is given away by picking the arm with the highest training reward, in
# a seed that had no say. Kendall's tau says whether reward ranks all arms as downstream accuracy does (1) or the other
# way round (-1); noise brings it towards 0.

# %%
show_measures(divergence, "arm_regret", "arm_tau")
show_figure(ranks.draw_ranks(data, finals))

# %% [markdown]
# ## Further from the base model, and more samples of it
#
# Gain over the distance from the initial policy turns over where reward is over-optimised (b above 0). A chance of one
# right answer among k below the base model's at large k is a policy that became sure of what the base could do
# already.

# %%
samples = [name.removeprefix("divergence/") for name in divergence["metric"].unique() if "coverage_at" in name]
show_measures(divergence, "kl_a", "kl_b", "kl_peak", *samples, "coverage_crossover")
