"""The objective of a run as checkable text: `grpo-lab explain`, and explanation.txt in each run's folder.

The formula is assembled from the formulas of the chosen classes. Differences are listed against the nearest recipe.
Rules, warnings and papers come from the sources that the run itself uses.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo_lab.config.catalogue import WRONG, option_text, plain_options, recipe_gaps, recipe_overrides
from grpo_lab.config.rules import broken_rules
from grpo_lab.config.run_config import AXES, TRICK_SLOTS, RunConfig
from grpo_lab.config.user_files import LOADER
from grpo_lab.tricks.critic import Critic
from grpo_lab.tricks.curriculum import Curriculum
from grpo_lab.tricks.group_filter import GroupFilter
from grpo_lab.tricks.pass_rate import PassRate
from grpo_lab.tricks.question_filter import QuestionFilter
from grpo_lab.tricks.sft import Sft
from grpo_lab.tricks.updates import Updates

_WIDTH = 112
_SYMBOLS = (
    "i rows, t tokens, p or g the group of a prompt; logp the learner's log-prob now, sampler and ref those of sampler "
    "and reference; H the entropy of the learner's next token; n tokens, n_i of a row, n_p of a group, N rows, "
    "P groups; V the value of the state before a token, where A and C are a token's own; sg() passes no gradient"
)


@dataclass(frozen=True)
class Departure:
    """A recipe and how a run differs from it, one phrase for each difference."""

    recipe: str
    differences: tuple[str, ...]


def formula(run: RunConfig) -> list[tuple[str, str]]:
    """The loss of one optimiser step as definitions, symbol and text, outermost first."""
    surrogate, kl, entropy = run.surrogate, run.kl, run.entropy
    reads_old = surrogate.uses_ratio or kl.reads_old or run.old_policy.interpolates
    reads_prox = run.correction.needs_old_logprobs or run.rejection.needs_old_logprobs
    factors = [("u", run.update_mask), ("w", run.correction)]
    terms = " * ".join([*(symbol for symbol, trick in factors if not trick.is_no_op), "S"])
    terms += " + K" if kl.needs_reference and not kl.shapes_reward else ""
    terms += " + E" if entropy.needs_gradient else ""
    lines = [("loss", run.aggregation.written()), ("L", terms), ("S", surrogate.written())]
    if surrogate.uses_ratio:
        lines.append(("r", run.importance.written()))
    if not run.update_mask.is_no_op:
        lines.append(("u", run.update_mask.written()))
    if not run.correction.is_no_op:
        lines.append(("w", f"sg({run.correction.written()})"))
    if kl.needs_reference and not kl.shapes_reward:
        lines.append(("K", kl.written()))
    if entropy.needs_gradient:
        lines.append(("E", entropy.written()))
    rewarded = "C" if run.baseline.scales_itself else run.scale.written()
    advantage = "A"
    if run.teacher.needs_model:
        lines.append((advantage, run.teacher.written()))
        advantage = "A_R"
    if not run.token_credit.is_no_op:
        lines.append((advantage, run.token_credit.written()))
        advantage = "A_S"
    lines += [(advantage, rewarded), ("C", run.baseline.written())]
    reward = run.reward.written()
    if not run.reward_shaping.is_no_op:
        reward = f"({reward}) + {run.reward_shaping.written()}"
    if kl.shapes_reward:
        reward = f"({reward}) - {kl.written()}"
    if run.baseline.reads_correctness:
        reward += " (not read: the baseline looks at right and wrong)"
    lines.append(("R", reward))
    if run.baseline.needs_critic or run.baseline.reward_to_go:
        penalised = ", and a token's share of the kl penalty at that token" if kl.shapes_reward else ""
        lines.append(("R_t", f"R at the last token{penalised}; 0 elsewhere"))
    if run.baseline.needs_critic:
        lines.append(("V", _critic(run.critic)))
    if (kl.needs_reference or run.teacher.reads_reference) and not run.reference.is_no_op:
        lines.append(("ref", run.reference.written()))
    if reads_old:
        lines.append(("old", run.old_policy.written()))
    if reads_prox:
        before = "the learner's log-probs before the first update on these rollouts"
        inside = run.old_policy.interpolates and not run.correction.is_no_op
        lines.append(("prox", f"old in w, elsewhere {before}" if inside else before))
    leaves = [run.truncation.written()] if run.truncation.removes_rows else []
    leaves += [run.group_filter.written()] if run.group_filter.removes_rows and not run.group_filter.refills else []
    if not run.rejection.is_no_op:
        still = "still" if getattr(run.rejection, "rejected_in_statistics", False) else "not"
        leaves.append(f"m = 0 unless {run.rejection.written()}, rows that left are {still} in the statistics")
    if entropy.selects_tokens:
        leaves.append(entropy.written())
    if run.baseline.group_relative:
        lone = "R" if run.baseline.handles_singletons else "0"
        lines.append(
            ("ties", f"C is exactly 0 where a group's rewards in the statistics are all equal, {lone} for a lone one")
        )
    lines += [
        ("m", "; ".join(["1 on tokens the policy sampled", *leaves])),
        *_chosen_questions(run.question_filter, run.pass_rate, run.sft, run.curriculum, run.group_filter),
        *([("ends", run.truncation.written())] if run.truncation.intervenes else []),
        ("counts", f"over one optimiser step: {run.denominator.written()}"),
        ("steps", _steps(run.updates, run.problems_per_step, run.group_size)),
        *([] if run.twin.is_no_op else [("twin", run.twin.written())]),
    ]
    return lines


def _chosen_questions(
    question_filter: QuestionFilter, pass_rate: PassRate, sft: Sft, curriculum: Curriculum, group_filter: GroupFilter
) -> list[tuple[str, str]]:
    """Lines on the data, the model that RL starts from, and how prompts are drawn; none for the plain options."""
    begins = [] if sft.is_no_op else [("start", sft.written())]
    data = [one.written() for one in (question_filter, pass_rate) if not one.is_no_op]
    prompts = [curriculum.written()] if not curriculum.is_no_op else []
    prompts += [group_filter.written()] if group_filter.refills else []
    lines = ([("data", "; then ".join(data))] if data else []) + begins
    return lines + ([("prompts", "; ".join(prompts))] if prompts else [])


def _critic(critic: Critic) -> str:
    clip = f", V held within {critic.value_clip:g} of its old value" if critic.value_clip else ""
    first = f", {critic.pretrain_steps} steps before the policy" if critic.pretrain_steps else ""
    weights = "a model of its own" if critic.owns_trunk else "a linear layer on the policy's hidden states"
    return f"{weights}, fitted to C + V by its square{clip}, {critic.updates.number} optimiser steps a batch{first}"


def _steps(updates: Updates, prompts: int, group_size: int) -> str:
    batch = f"{prompts} prompts x {group_size} responses"
    fresh = ", with the optimiser's state reset before each batch" if updates.fresh_optimizer else ""
    if updates.number == 1:
        return f"one optimiser step on each batch of {batch}{fresh}"
    times = f" in each of {updates.passes} passes" if updates.passes > 1 else ""
    cut = f"{updates.minibatches} optimiser steps" if updates.minibatches > 1 else "one optimiser step"
    return f"{cut}{times} on each batch of {batch}, {prompts // updates.minibatches} prompts a step{fresh}"


def recipe_choices() -> dict[str, dict[str, str]]:
    """Recipe -> slot -> option, for every axis and for whatever else any recipe sets.

    Of the optimiser, whose numbers suit a model, only those that the recipe itself sets.
    """
    recipes, plain = recipe_overrides(), plain_options() | {WRONG: "0"}
    groups = sorted({slot for chosen in recipes.values() for slot in chosen} - set(AXES))
    slots = ("question_filter", "pass_rate", *AXES, *groups)
    return {
        name: {slot: option for slot in slots if (option := (plain | chosen).get(slot)) is not None}
        for name, chosen in recipes.items()
    }


def nearest_recipe(choices: Mapping[str, str], config: DictConfig) -> Departure:
    """The recipe that differs from `choices` in the fewest options; ties: the run's own recipe, then alphabetical.

    Differences are options, and numbers that differ from the option's own file.
    """
    recipes, plain = recipe_choices(), plain_options()
    numbers = {slot for chosen in recipes.values() for slot in chosen if "." in slot}
    held = {slot: OmegaConf.select(config, slot) for slot in numbers}
    # An optimiser of the user's own may have no such number.
    choices = {**choices, **{slot: "none" if value is None else f"{value:g}" for slot, value in held.items()}}
    named = choices.get("recipe", "plain")

    def differing(recipe: str) -> list[str]:
        return [slot for slot, option in recipes[recipe].items() if choices.get(slot, plain.get(slot)) != option]

    nearest = min(recipes, key=lambda recipe: (len(differing(recipe)), recipe != named, recipe))
    departures = [f"{slot}={choices[slot]} for {recipes[nearest][slot]}" for slot in differing(nearest)]
    return Departure(nearest, tuple(departures + _numbers_changed(choices, config)))


def _written(slot: str, option: str) -> dict[str, Any]:
    """The fields in an option's file, and in those that it builds on."""
    text = option_text(slot, option)
    fields: dict[str, Any] = yaml.load(text, LOADER) if text else {}
    below: dict[str, Any] = {}
    for entry in fields.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_" and "/" not in entry:
            below |= _written(slot, entry)
    return below | fields


def _numbers_changed(choices: Mapping[str, str], config: DictConfig) -> list[str]:
    """Fields of the axes, the critic and the convention whose value differs from the chosen option's file."""
    found = []
    for slot in (*TRICK_SLOTS, "convention"):
        written = _written(slot, choices.get(slot, plain_options()[slot]))
        held = OmegaConf.to_container(config[slot], resolve=False, enum_to_str=True)
        assert isinstance(held, dict), "what stands on an axis has fields"
        for field, value in written.items():
            if field in held and held[field] != value:
                found.append(f"{slot}.{field}={held[field]} for {value}")
    if (convention := choices.get("convention", "house")) != "house":
        found.append(f"convention={convention} for house")
    return found


def papers(choices: Mapping[str, str], slots: Sequence[str] = AXES) -> dict[str, list[str]]:
    """arXiv id -> the options chosen for these slots whose files name it in a comment."""
    named: dict[str, list[str]] = {}
    for slot in ("recipe", *slots):
        option = choices.get(slot, "plain" if slot == "recipe" else plain_options()[slot])
        comments = [line for line in option_text(slot, option).splitlines() if line.startswith("# ")]
        for paper in re.findall(r"\b\d{4}\.\d{5}\b", " ".join(comments)):
            holders = named.setdefault(paper, [])
            if f"{slot}={option}" not in holders:
                holders.append(f"{slot}={option}")
    return named


def explain(run: RunConfig, config: DictConfig, choices: Mapping[str, str]) -> str:
    """The whole explanation as text. `choices` are Hydra's: slot -> option."""
    width = max(len(symbol) for symbol, _ in formula(run))
    parts = [_hang(f"{symbol:>{width}} = ", text) for symbol, text in formula(run)]
    parts += ["", textwrap.fill(_SYMBOLS, _WIDTH), ""]
    nearest = nearest_recipe(choices, config)
    same = "this is recipe" if not nearest.differences else "nearest recipe"
    parts += [f"{same} {nearest.recipe}", *(f"  {difference}" for difference in nearest.differences)]
    gaps = recipe_gaps(nearest.recipe)
    for title, items in (("left out of it", gaps.left_out), ("unverified in it", gaps.unverified)):
        parts += [title, *(_hang("  - ", item) for item in items)] if items else []
    off = plain_options()
    parts += ["", "options that are not the plain one"]
    read = [slot for slot in (*TRICK_SLOTS, "optimizer") if slot != "critic" or run.baseline.needs_critic]
    chosen = [(slot, choices.get(slot, off[slot])) for slot in read if choices.get(slot, off[slot]) != off[slot]]
    for axis, option in chosen:
        parts.append(_hang(f"  {axis}={option}: ", _option_text(axis, option, type(getattr(run, axis))), 6))
    if not chosen:
        parts.append("  none")
    broken = broken_rules(run)
    for title, rules in (("refused", broken.errors), ("warnings", broken.warnings)):
        if rules:
            parts += ["", title, *(_hang("  - ", rule.describe(run, choices)) for rule in rules)]
    parts += ["", "papers", *(f"  arXiv:{paper}  {', '.join(names)}" for paper, names in papers(choices, read).items())]
    return "\n".join(parts)


def _option_text(axis: str, option: str, kind: type) -> str:
    """The first comment line of an option's file, or of its class's docstring if no such file is found."""
    lines = option_text(axis, option).splitlines()
    if lines and lines[0].startswith("# "):
        return lines[0].removeprefix("# ")
    return (kind.__doc__ or "").partition("\n")[0]


def no_op_lines(no_ops: Sequence[str], choices: Mapping[str, str]) -> list[str]:
    """One sentence for each axis that was a no-op with an option other than the default.

    `no_ops` are the axes that changed nothing of the loss; `choices` is slot -> option.
    """
    plain, recipe = plain_options(), choices.get("recipe", "plain")
    brought = recipe_overrides().get(recipe, {})
    lines = []
    for axis in no_ops:
        option = choices.get(axis, plain[axis])
        if option != plain[axis]:
            setting = f"recipe={recipe} brings {axis}={option}" if brought.get(axis) == option else f"{axis}={option}"
            which = ", which" if setting.startswith("recipe=") else ""
            lines.append(f"{setting}{which} changed nothing of the loss in the whole run")
    return lines


def _hang(head: str, text: str, indent: int | None = None) -> str:
    """`head` and `text`, wrapped, with all lines after the first indented."""
    inner = " " * (len(head) if indent is None else indent)
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=inner, break_long_words=False)
