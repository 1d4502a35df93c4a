# %% [markdown]
# # Where would the arms end, and how fast do they get there?
#
# A sigmoid in compute has a ceiling A, a midpoint C_mid and a steepness B. Few evaluations of a short run seldom say
# what A is, and then this says so and why, instead of printing a number. The area under the curve and the compute to
# reach a level need no sigmoid and can be compared all the same. `EXP` names the sweep, `RUNS` its runs.

# %%
from notebook_tables.show import chosen_sweep, introduction, show_lines, show_table

from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.scaling import compare, fit_sweep, scaling_table

SUITE = "heldout"  # ScaleRL fits held-out questions of the training distribution
data = chosen_sweep()
finals = final_values(data)
conditions = fit_sweep(data, finals, SUITE)
table = scaling_table(conditions)
show_lines(introduction(data, finals))

# %% [markdown]
# ## The asymptote, or why there is none
#
# It is called identified only where its interval stays below 1 and clear of the start, the budget goes beyond twice
# the midpoint and no fit ended at the edge of what was searched. With three seeds or more every seed is fitted on its
# own and the interval is over seeds; with fewer it is the profile of one curve, and says nothing of other seeds.

# %%
asymptotes = [f"{condition.level} {condition.arm}: {condition.text()}".strip() for condition in conditions]
show_lines("\n".join(asymptotes) or f"No finished run was evaluated on {SUITE}.")

# %% [markdown]
# ## The parameters
#
# C_mid is in the unit of the budget axis; its interval is of its logarithm. Where A is not identified, C_mid and B are
# not either: a higher ceiling that is reached later fits the same points.

# %%
fitted = table[table["kind"] != ""] if conditions else table
names = ["n", "evaluations", "identified", "asymptote", "midpoint", "exponent", "kind"]
show_table(fitted.filter(items=["level", "arm", *names]), 3, otherwise="No sigmoid was fitted.")

# %% [markdown]
# ## Does the first half foretell the second?
#
# Sigmoids of the first half of the compute, held against what came after: mean error (observed less predicted), mean
# absolute error, and the share of the later evaluations inside the band. Below 95%, bands are too narrow.

# %%
foretold = fitted.filter(regex="level|arm|extrapolation").dropna(how="any")
show_table(foretold, 3, otherwise="The first half of the compute has too few evaluations for a sigmoid.")

# %% [markdown]
# ## Without a sigmoid
#
# `area` is mean accuracy over the logarithm of compute, on a stretch that all arms share; `reach` the compute at which
# `target` is reached, which is the start and 90% of what the control gains. Every run must reach it, or there is none.

# %%
names = ["area", "area_low", "area_high", "target", "reached", "reach", "reach_low", "reach_high"]
show_table(table.filter(items=["level", "arm", "n", "n_collapsed", *names]), 3)

# %% [markdown]
# ## Against the control
#
# First A, and B only where A agrees: arms whose ceilings differ cannot be ranked by how steeply they rise. Ceilings
# agree where the interval of their difference holds 0; repeats of one arm differed by 0.02 in ScaleRL.

# %%
controls = {condition.level: condition for condition in conditions if condition.arm == data.control}
others = [condition for condition in conditions if condition.arm != data.control and condition.level in controls]
show_lines(
    "\n".join(
        f"{condition.level} {compare(condition, controls[condition.level]).text()}".strip() for condition in others
    )
)
