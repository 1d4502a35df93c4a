# %% [markdown]
# # What moves where nothing was changed
#
# Before an effect is believed: how far do runs of one arm differ by their seed, how far does one run depend on which
# questions it was asked, and which effects are too small for so many seeds and questions? `EXP` names the sweep,
# `RUNS` its runs. Everything is in percentage points.

# %%
import numpy as np
from notebook_tables import noise
from notebook_tables.show import chosen_sweep, introduction, show_lines, show_table

from grpo_lab.analysis.final_values import DOWNSTREAM, final_values

SUITE = "downstream"
data = chosen_sweep()
finals = final_values(data)
show_lines(introduction(data, finals))

# %% [markdown]
# ## Between seeds
#
# The deviation over the control's seeds, over the seeds of all arms (taken to scatter alike), and of a difference of
# two arms paired by seed, which is smaller the more the arms share their luck. From three or five seeds a deviation is
# itself known roughly: the brackets are its 95% intervals. Runs that collapsed are left out.

# %%
deviations = noise.seed_noise(data, finals)
show_table(noise.seed_noise_table(deviations))

# %% [markdown]
# ## What seeds can find
#
# The smallest true effect on downstream accuracy found with 80% power, and how many seeds an arm effects of 1, 2 and 3
# points need. The careful plan takes the upper end of the deviation's interval.

# %%
planned = [one for one in deviations if one.metric == DOWNSTREAM and one.known]
show_table(noise.detectable(planned), otherwise="Two arms with two seeds each, that differ, are needed to plan by.")
show_table(noise.seeds_for(planned), decimals=0)

# %% [markdown]
# ## Between questions
#
# `run` is the standard error of one checkpoint over questions, `sampling` what of it is the luck of drawing answers
# and goes away with more samples of a question (unknown where there is one); the rest goes away with more questions
# only. `difference` is the error of the arm less the control on the same questions, which is smaller the more
# questions both get right or wrong alike. More seeds do not make up for few questions.

# %%
answers = noise.asked(data, finals, SUITE)
nothing = f"Answers to single {SUITE} questions were not saved with these numbers: nothing is said of questions."
show_table(noise.question_noise(data, answers), otherwise=nothing)

# %% [markdown]
# ## Other seeds, or other seeds and other questions?
#
# The t interval over seeds holds for other seeds and the questions that were asked. A claim about questions like these
# needs one that counts both: the crossed t interval, or the bootstrap that resamples seeds and questions at once. With
# three to five seeds the bootstrap's share of seeds is too narrow by itself; read it beside the crossed t interval.
# `width` is how much wider the crossed t interval is than the one over seeds; below 1, few seeds gain more from
# knowing the scatter of questions than they lose.

# %%
show_table(noise.three_intervals(data, answers, np.random.default_rng(0)), otherwise=nothing)
