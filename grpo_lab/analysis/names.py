"""What to call a metric in a sentence, a table or a figure."""

from __future__ import annotations

from grpo_lab.analysis.outcome import AVERAGE, QUANTITIES, REWARD
from grpo_lab.tracking.metrics import SUITES, find, is_known

CORRECTNESS = "reward/outcome"
_NAMES = QUANTITIES | {
    CORRECTNESS: "training reward, correctness of all responses",
    REWARD: "training reward as the loss sees it",
    "train/entropy": "policy entropy in training",
    "rollout/frac_zero_std": "share of groups whose responses are all right or all wrong",
    "mismatch/absolute": "log-prob gap between sampler and learner",
    "mismatch/ess_responses": "effective sample size of the responses' weights",
    "mismatch/rejected_responses": "share of responses that the rejection takes out",
}


def title(metric: str) -> str:
    """What to call a metric: in words where there are some, otherwise its name."""
    if metric in _NAMES:
        return _NAMES[metric]
    if metric.startswith(AVERAGE):
        return f"{title(metric.removeprefix(AVERAGE))}, mean over the run"
    stage, _, rest = metric.partition("/")
    if stage == "eval":
        suite, _, quantity = rest.partition("/")
        return f"{SUITES.get(suite, suite.replace('_', ' '))}: {quantity.replace('_', ' ')}"
    return metric


def in_words(metric: str) -> str:
    """The title, and for a metric without one its name with what the registry says it means."""
    plain = metric.removeprefix(AVERAGE)
    bare = title(plain) == plain and is_known(plain)
    return f"{title(metric)} ({find(plain).meaning})" if bare else title(metric)
