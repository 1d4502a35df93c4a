"""The evaluation slot: when to evaluate, on how many questions, how to sample; run/evaluate.py does it.

The ends of a run are step 0 and its last step. Their evaluations may be larger than those between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tasks.tables import Table, suite_problems
from grpo_lab.tracking.metrics import FURTHER_SUITES, HARNESSES, harness_of
from grpo_lab.types import Problem

# Of further suites; others have their own.
SPLITS = {"downstream_short": "downstream", "other_wording": "heldout", "heldout_greedy": "heldout"}


@dataclass(frozen=True)
class Evaluation:
    """When to evaluate, on how many questions, and how to sample the responses.

    What is asked between the ends is a part of what is asked there. `suites` are further suites, by their names in
    `tracking.metrics.FURTHER_SUITES`, asked at the ends only.
    """

    every: int  # steps; step 0 and the last step are always evaluated
    samples: int  # responses per question
    ends_samples: int  # the same at the ends
    pass_at: list[int]  # the k of pass_at_k; logged where an evaluation has so many samples
    probe_problems: int
    heldout_problems: int
    downstream_problems: int
    ends_probe_problems: int
    ends_heldout_problems: int
    ends_downstream_problems: int
    suites: list[str]
    suite_problems: int  # of each of these suites, and at most of each of the tables
    # Further suites from data sets, asked with the downstream budget: name -> fields of a `tasks.tables.Table`.
    tables: dict[str, Any]
    unreadable_share: float  # of the rows of one of these tables, above which it is refused; fewer are left out
    other_wording: str  # the question in other words, with {question} for the question itself
    temperature: float
    top_p: float
    max_tokens: int
    downstream_max_tokens: int
    initial_kl: bool  # keeps the initial weights in memory beside the learner's
    # Evaluate also the weights that sampled the step's batch, where they lag behind the learner's: keeps the weights
    # of all steps that a batch may wait, in memory and in checkpoints.
    sampler_weights: bool
    # Fractions of the training temperature at which the initial policy is evaluated too, at step 0: how much reward a
    # sharper policy gets without learning.
    sharpened: list[float]

    def __post_init__(self) -> None:
        require_positive(
            self, "every", "samples", "probe_problems", "heldout_problems", "downstream_problems", "suite_problems",
            "max_tokens", "downstream_max_tokens",
        )  # fmt: skip
        require_not_negative(self, "temperature")
        require_field(0 < self.top_p <= 1, self, "top_p", "in (0, 1]")
        require_field(0 <= self.unreadable_share <= 1, self, "unreadable_share", "in [0, 1]")
        for name in ("samples", "probe_problems", "heldout_problems", "downstream_problems"):
            least = getattr(self, name)
            ends = f"ends_{name}"
            require_field(getattr(self, ends) >= least, self, ends, f"at least {name}={least}, which it contains")
        most = self.ends_samples
        named = "samples" if most == self.samples else "ends_samples"
        require_field(all(1 <= k <= most for k in self.pass_at), self, "pass_at", f"between 1 and {named}={most}")
        require_field(
            all(0 < share < 1 for share in self.sharpened), self, "sharpened", "a list of numbers above 0 and below 1"
        )
        known = ", ".join(FURTHER_SUITES)
        require_field(all(suite in FURTHER_SUITES for suite in self.suites), self, "suites", f"a list of {known}")
        require_field(len(set(self.suites)) == len(self.suites), self, "suites", "a list without repetition")
        taken = {*FURTHER_SUITES, "probe", "heldout_training", "heldout", "downstream"}
        named = all(re.fullmatch(r"[A-Za-z0-9_]+", name) and name not in taken for name in self.tables)
        require_field(named, self, "tables", f"named by letters, digits and _, and none of {', '.join(sorted(taken))}")
        own = all(harness_of(f"eval/{name}/accuracy") is None for name in self.tables)
        begin = " or ".join(f"{name}_" for name in HARNESSES)
        require_field(own, self, "tables", f"named without the prefix {begin} (reserved for `grpo-lab evaluate`)")
        require_field(
            self.other_wording.count("{question}") == 1, self, "other_wording", "a text with {question} in it once"
        )

    @property
    def splits(self) -> frozenset[str]:
        """The splits of the task that the further suites ask."""
        return frozenset(SPLITS.get(suite, suite) for suite in self.suites)

    @property
    def table_problems(self) -> dict[str, tuple[Problem, ...]]:
        """The problems of each of the tables. Raises ValueError with a remedy for one that cannot be read."""
        return suite_problems(self._tables, self.suite_problems, self.unreadable_share)

    def notes_on_tables(self) -> list[str]:
        """Notes on how the tables were read, for the run record."""
        return [note for table in self._tables.values() for note in table.notes_on_reading()]

    @property
    def _tables(self) -> dict[str, Table]:
        return {name: Table.of(fields, f"evaluation.tables.{name}") for name, fields in self.tables.items()}

    def in_other_words(self, question: str) -> str:
        """The question as the suite `other_wording` asks it."""
        return self.other_wording.replace("{question}", question)
