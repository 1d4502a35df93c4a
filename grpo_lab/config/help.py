"""The output of `python -m grpo_lab.train` with `--help` or `--cfg job`, which run nothing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from grpo_lab.config.catalogue import axes, plain_options
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import CONFIG_GROUPS, unresolved

_USAGE = """\
python -m grpo_lab.train [axis=option ...] [key=number ...] [-m] [--cfg job]

Runs, or resumes, one training run; with -m, add= or +experiments= a sweep. The command line wins over a recipe.

  recipe=dr_grpo seed=1                  a published method
  surrogate=ppo_higher                   one trick, here clip-higher; `grpo-lab tricks` says what each option is
  optimizer.learning_rate=1e-4           a number; --cfg job prints every key with its value
  world=tiny budget.amount=10            the smallest world, ten steps
  -m recipe=plain,dr_grpo seed=0,1       a sweep: each combination of values is an arm
  -m add='[surrogate=ppo_higher,kl=k3_loss]' seed=0,1        an ablation: a control, and an arm for each addition
  +experiments=overlong                  a declared experiment

  --cfg job       print the whole configuration and run nothing; --resolve fills in what refers to other keys
  --hydra-help    Hydra's own flags
"""


def answer(arguments: Sequence[str]) -> str | None:
    """The text these arguments ask for; None if they ask for a run, or for something only Hydra handles.

    Raises ValueError or a Hydra error if the overrides cannot be composed.
    """
    if {"--help", "-h"} & set(arguments):
        return help_text()
    rest = [word for word in arguments if word != "--resolve"]
    for flags in (["--cfg", "job"], ["-c", "job"], ["--cfg=job"]):
        for start in range(len(rest) - len(flags) + 1):
            if rest[start : start + len(flags)] == flags:
                overrides = rest[:start] + rest[start + len(flags) :]
                if any(word.startswith("-") for word in overrides):
                    return None
                return config_text(overrides, "--resolve" in arguments)
    return None


def help_text() -> str:
    """Usage, and the options of every slot, the plain one first."""
    lines = [_USAGE]
    groups = [(axis.name, [option.name for option in axis.options]) for axis in axes()]
    plain = plain_options()
    listed = {name for name, _ in groups}
    for group in ("recipe", "world", *(group for group in CONFIG_GROUPS if group not in listed)):
        names = [path.stem for path in (conf_folder() / group).glob("*.yaml")]
        groups.append((group, sorted(names, key=lambda name, plain=plain[group]: (name != plain, name))))
    width = max(len(name) for name, _ in groups)
    for name, options in groups:
        lines.append(
            textwrap.fill(
                ", ".join(options), 118, initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2)
            )
        )
    return "\n".join(lines)


def config_text(overrides: Sequence[str], resolve: bool) -> str:
    """The composed configuration as YAML, with each slot's option in a comment beside it."""
    config, choices = compose_with_choices(overrides)
    lines = [f"# {name}: {choices[name]}" for name in ("recipe", "world") if name in choices]
    try:
        text = OmegaConf.to_yaml(config, resolve=resolve)
    except InterpolationResolutionError as error:
        raise ValueError(unresolved(config, error)) from error
    for line in text.splitlines():
        slot = re.match(r"(\w+):", line)
        option = choices.get(slot.group(1)) if slot else None
        lines.append(f"{line}  # {option}" if option else line)
    return "\n".join(lines)
