# %% [markdown]
# # One trick in depth
#
# What one trick does alone and inside the whole, on every evaluation and at every kind of equal budget, what it
# touched on the way, and what more seeds would resolve. `TRICK` names it (default: the sweep's first), `EXP` the
# sweep, `RUNS` its runs. Effects are with the trick less without it, paired by seed, in percentage points where they
# are shares.

# %%
import os

from notebook_tables import one_trick
from notebook_tables.show import chosen_sweep, introduction, show_figure, show_lines, show_table

from grpo_lab.analysis.figures import forest
from grpo_lab.analysis.final_values import DOWNSTREAM, final_values

data = chosen_sweep()
finals = final_values(data)
trick = one_trick.chosen_trick(data, os.environ.get("TRICK", ""))
primary = data.design.primary if data.design else DOWNSTREAM
show_lines(f"{introduction(data, finals)}\n\nThe trick: {trick}, one of {', '.join(data.tricks)}.")

# %% [markdown]
# ## Its effect, alone and inside the whole
#
# *Added* is the trick switched on alone, *left out* what the whole loses without it, *given* any other company. Where
# the two differ, the trick works with or against the others, and the *interaction* says by how much. p is adjusted for
# the number of contrasts of one kind on one metric, all tricks included.

# %%
effects = one_trick.effects_of(data, finals, trick)
show_table(one_trick.effect_rows(effects))
show_figure(forest.draw_forest(data, finals))

# %% [markdown]
# ## Seed by seed
#
# An effect that one seed carries alone is no effect of the trick yet.

# %%
show_table(one_trick.by_seed(effects))

# %% [markdown]
# ## At other equal budgets
#
# The primary metric again, with arms compared at equal steps, tokens, operations and seconds. A trick that shortens
# answers looks better at equal steps than at equal tokens.

# %%
budgets, flips = one_trick.on_axes(data, trick, primary)
show_table(budgets)
show_lines("\n".join(flips) or "The sign of no estimate depends on what is held equal.")

# %% [markdown]
# ## What it touched, and the step metrics
#
# A trick that touched nothing in a run cannot have done anything in it. The numbers show by which way an effect came:
# by entropy, by length, by truncation, by updates that clip.

# %%
show_table(one_trick.touched(data, finals, trick), otherwise=f"No metric counts what {trick} touches.")
show_table(one_trick.effect_rows(one_trick.effects_of(data, finals, trick, one_trick.logged_step_metrics(data))))
show_figure(one_trick.step_metrics_of(data, finals, trick))

# %% [markdown]
# ## What more seeds would resolve
#
# The smallest true effect that a number of seeds finds with 80% power, from how the differences scatter now. A
# measured effect smaller than what the sweep could find is no evidence of no effect.

# %%
show_table(one_trick.seeds_would_find(effect for effect in effects if effect.metric in (primary, DOWNSTREAM)))
