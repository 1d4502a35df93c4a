# %% [markdown]
# # One sweep at a glance
#
# Which sweep this is, what of it finished, what a reader must know before believing it, what every arm came to, and
# what that says of the predictions. `EXP` names the sweep (default `overlong`), `RUNS` the folder of its runs or an
# MLflow store (default `runs`); the numbers saved with the experiment are used where they hold more.

# %%
from notebook_tables.show import (
    chosen_sweep,
    finished_table,
    introduction,
    show_figure,
    show_lines,
    show_table,
    show_text,
)

from grpo_lab.analysis.effects.contrasts import effects_markdown
from grpo_lab.analysis.effects.table import markdown
from grpo_lab.analysis.effects.verdict import verdict_text
from grpo_lab.analysis.figures.curves import draw_curves
from grpo_lab.analysis.figures.effects import draw_effects
from grpo_lab.analysis.final_values import final_values

data = chosen_sweep()
finals = final_values(data)
show_lines(introduction(data, finals))

# %% [markdown]
# ## What finished
#
# A collapsed run stopped on a loss that was not finite. It is a result: it counts by the rule that was declared, and
# is never dropped. Arms with fewer seeds than planned are compared on the seeds they share with the control.

# %%
show_table(finished_table(data, finals))

# %% [markdown]
# ## The verdict, and what to know beside it
#
# The word before a prediction follows from the sign of its difference and from its p after Holm: *supported* or
# *contradicted* where that is below 0.05, *not significant* where it is not. Caveats stand below.

# %%
show_lines(verdict_text(data, finals))

# %% [markdown]
# ## Final values
#
# All arms are read at one budget, the smallest that every finished run reached, so that none is ahead by its length.
# Read the second table first: a difference paired by seed leaves out the luck that arms share.

# %%
show_text(markdown(data, finals))

# %% [markdown]
# ## What every trick adds
#
# The same seeds with and without the trick, once for every context in which it was run. The p-values account for the
# number of contrasts of a kind; the brackets do not.

# %%
show_text(effects_markdown(data, finals))

# %% [markdown]
# ## Over the budget
#
# Where the dashed training reward rises and the evaluations do not follow, training rewards something else than what
# is evaluated; `reward_against_eval.py` takes that apart.

# %%
show_figure(draw_curves(data, finals))
show_figure(draw_effects(data, finals))
