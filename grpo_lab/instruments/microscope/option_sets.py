"""Sets of options, each a configuration of the run's own classes, and why a stored step cannot go through some."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.rules import IncompatibleRun, broken_rules
from grpo_lab.config.run_config import AXES, RunConfig, to_run
from grpo_lab.config.stages import CreditTricks, LogprobTricks, LossTricks
from grpo_lab.tricks.baseline import Baseline
from grpo_lab.tricks.denominator import Denominator
from grpo_lab.tricks.scale import Scale
from grpo_lab.tricks.teacher import Teacher
from grpo_lab.tricks.updates import Updates

# The axes that act between the stored rewards and the gradient, and what sets several of them at once.
APPLIED = (
    "old_policy", "correction", "rejection", "baseline", "scale", "token_credit", "importance", "surrogate",
    "update_mask", "aggregation", "denominator", "kl", "entropy",
)  # fmt: skip
_SWITCHES = ("recipe", "convention", "twin")
# The whole batch is one optimiser step. The second pass has no other effect than that the old policy's log-probs are
# read, so that a ratio is that of the stored policies.
_ONE_STEP = MappingProxyType(
    {
        "updates": Updates(minibatches=1, passes=2, fresh_optimizer=False),
        "skip_rows_without_signal": False,
    }
)
PLAIN, OWN = "plain", "run"


@dataclass(frozen=True)
class StepOptions:
    """The options that act between the stored rewards and the gradient, with the whole batch as one optimiser step."""

    logprobs: LogprobTricks
    baseline: Baseline
    scale: Scale
    credit: CreditTricks
    teacher: Teacher
    loss: LossTricks
    denominator: Denominator
    updates: Updates
    seed: int


@dataclass(frozen=True)
class OptionSet:
    """Named options; `notes` says what they leave out."""

    name: str
    run: RunConfig
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> StepOptions:
        """The options of one optimiser step on the whole batch."""
        run = replace(self.run, **_ONE_STEP)
        return StepOptions(
            run.logprob_tricks, run.baseline, run.scale, run.credit_tricks, run.teacher, run.loss_tricks,
            run.denominator, run.updates, run.seed,
        )  # fmt: skip

    @property
    def refusal(self) -> str:
        """Why a stored step cannot go through these options, with a remedy; "" if it can."""
        run, baseline = self.run, self.run.baseline
        reasons = (
            (baseline.needs_critic, "baseline", "reads a critic's values, which are not stored"),
            (baseline.generates, "baseline", "samples further responses"),
            (baseline.scores_past or baseline.first_memory({}), "baseline", "remembers earlier steps"),
            (run.old_policy.interpolates, "old_policy", "reads the age of each token's weights, which is not stored"),
            (run.teacher.needs_model, "teacher", "needs a teacher's log-probs, which are not stored"),
        )
        for holds, slot, why in reasons:
            if holds:
                return f"{slot}={type(getattr(run, slot)).__name__} {why}: choose another, or train a run with it"
        return ""

    def sized(self, problems: int, group_size: int) -> OptionSet:
        """The same options for a batch of another size."""
        return replace(self, run=replace(self.run, problems_per_step=problems, group_size=group_size))


def words_of(text: str) -> list[str]:
    """The overrides in `surrogate=cispo,aggregation=token_mean`: parts between commas outside brackets and quotes."""
    return [word.strip() for word in re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^,\[{'"])+""", text)]


def option_set(text: str, group_size: int, problems: int, seed: int) -> OptionSet:
    """The plain options with the overrides in `text`; "" for the plain options.

    Raises ValueError for an option that acts elsewhere, for one that does not exist, and for broken rules.
    """
    words = words_of(text)
    for word in words:
        slot = re.split(r"[.=@]", word.lstrip("+~"))[0]
        if slot not in (*APPLIED, *_SWITCHES):
            raise ValueError(
                f"--with {word}: {slot} does not act between stored rewards and the gradient; choose among "
                f"{', '.join((*APPLIED, *_SWITCHES))}, or train a run with it"
            )
    base = ["world=tiny", "tracking=none", f"group_size={group_size}", f"problems_per_step={problems}", f"seed={seed}"]
    config, choices = compose_with_choices([*base, *words])
    run = replace(to_run(config), **_ONE_STEP)
    notes = _left_out(choices, words, base)
    if errors := broken_rules(run).errors:
        raise IncompatibleRun("\n".join([f"--with {text}:", *(f"  - {one.describe(run, choices)}" for one in errors)]))
    return OptionSet(text or PLAIN, run, notes)


def _left_out(choices: dict[str, str], words: Sequence[str], base: Sequence[str]) -> tuple[str, ...]:
    """A note on options of a recipe that are not applied."""
    if not any(word.startswith("recipe=") for word in words):
        return ()
    plain = compose_with_choices(base)[1]
    outside = [axis for axis in AXES if axis not in (*APPLIED, "updates") and choices.get(axis) != plain.get(axis)]
    left = ", ".join(f"{axis}={choices[axis]}" for axis in outside)
    return (f"not applied, as it acts elsewhere: {left}",) if left else ()
