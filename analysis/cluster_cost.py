# %% [markdown]
# # What does one question cost on a cluster?
#
# On paper and by simulation: nothing here was run on these cards. All numbers start from `cluster_cost.yaml`; change
# them there and run this again. `grpo-lab cluster-cost` writes the figures and the tables of `cluster_cost.md`.

# %%
from grpo_lab.analysis.figures.cluster import draw_shares, draw_sync, draw_tails
from grpo_lab.analysis.notebooks.show import REPOSITORY, show_figure, show_table, show_text
from grpo_lab.analysis.scaling import cluster_page
from grpo_lab.analysis.scaling.cluster_study import Study

study = Study.load(REPOSITORY / "analysis" / "cluster_cost.yaml")
show_text(cluster_page.answers(study))

# %% [markdown]
# ## What the cards do
#
# A bar is a mean step of all cards. `stragglers` is what decoding takes beyond a batch whose slots stay full.

# %%
show_figure(draw_shares(study))
show_table(study.grid)

# %% [markdown]
# ## What long responses waste

# %%
show_figure(draw_tails(study))

# %% [markdown]
# ## How many cards weight sync tolerates

# %%
show_figure(draw_sync(study))
show_table(study.syncs, 3)

# %% [markdown]
# ## Predicted and reported

# %%
show_table(study.compared[["what", "unit", "reported", "predicted", "ratio"]])
show_text(cluster_page.misses(study))
