# %% [markdown]
# # When did training reward mislead?
#
# Over all saved sweeps whose experiments test claims of the literature. A run that several sweeps share counts once.
# Runs are compared only under the same conditions: world, regime, budget, evaluation and level. Intervals over several
# conditions take a base model of a world as one observation, since its runs are alike.

# %%
from notebook_tables.show import REPOSITORY, show_figure, show_lines, show_table
from pages.saved_sweeps import saved_sweeps

from gap_study import tables
from gap_study.across import announcements, saved_pool, spent_after
from gap_study.figure import draw_gap

pooled = saved_pool(saved_sweeps(REPOSITORY / "experiments"))
show_lines(
    f"{len(pooled.sweeps)} sweeps: {', '.join(pooled.sweeps)}.\n{len(pooled.runs)} runs on {len(set(pooled.units))} "
    f"base models, {pooled.shared} further entries are runs that another sweep has too."
)
show_figure(draw_gap(pooled) or "no sweep has an arm beside its control")

# %% [markdown]
# ## Did reward and downstream accuracy move apart?
#
# Every arm less its control at one level, on training reward (share of right responses) and on downstream accuracy.
# *Up* and *down* are sure: the 95% interval over base models excludes 0. An interval that is withheld, since some runs
# collapsed or fall into two groups, resolves nothing. So a count of no opposite pairs is no proof that there is none.

# %%
show_table(tables.signs_table(pooled))
show_table(tables.contrasts_table(pooled, apart=False), 3)

# %% [markdown]
# ## Arms that are kept apart
#
# Their training grader, questions or protocol are not those of the control, so training reward is of another thing. A
# grader that pays for the form alone raises "reward" by construction.

# %%
show_table(tables.contrasts_table(pooled, apart=True), 3)

# %% [markdown]
# ## In how many runs?
#
# Reward 5 points or more above step 0, downstream accuracy 10 or more below it, at the end. Controls are the null. The
# gap of a run counts as wide above the 95% bound for one more control under its conditions; controls are held against
# those of other bases. Intervals take runs as independent, which they are not: read the number of bases too.

# %%
show_table(tables.runs_table(pooled))
show_table(tables.misled_where(pooled), otherwise="no run was misled")

# %% [markdown]
# ## What announces a loss?
#
# As in `reward_against_eval`, over all sweeps: pairs of a run that loses 10 points later and one that never does, under
# the same conditions and at the same step. An area of 0.5 says nothing, one below it that the opposite announces. The
# second area has only pairs of one base model. The intervals are not corrected for the number of indicators. Graders
# disagree by more than protocol only in sweeps with a lenient, noisy or other grader; elsewhere it reads temperature.

# %%
show_table(tables.indicators_table(pooled))
one = announcements(pooled)["kl"]
show_lines(f"{one.note}. {one.at_once} runs lost before any reading, so that nothing could announce it.")

# %% [markdown]
# ## Which checkpoint to take
#
# Points of downstream accuracy given away against the best checkpoint, which is chosen on one half of the questions
# and measured on the other. Evaluations are few, mostly four a run, so a regret is that of a coarse choice.

# %%
show_table(tables.regrets_table(pooled))

# %% [markdown]
# ## What a point costs
#
# Sampled tokens for each point of downstream accuracy gained since step 0, to the end and to the best checkpoint. Where
# the gain is not surely above 0, there is no cost of a point. Where accuracy is flat, the best checkpoint is luck.

# %%
show_table(tables.costs_table(pooled))
after = spent_after(pooled.runs)
show_lines(f"Share of the budget after the best checkpoint, over base models: {after.text()}, n = {after.n}.")
