"""From overrides to checked runs: expansion, composition, and all checks, before the sweep starts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.config.design import Design
from grpo_lab.config.overrides import in_one_line, misnamed
from grpo_lab.config.rules import IncompatibleRun, broken_rules, check_compatible
from grpo_lab.config.run_config import AXES, VOLATILE, RunConfig, is_volatile, to_run
from grpo_lab.config.run_name import chosen_options, run_name
from grpo_lab.distributed.device import device_kind
from grpo_lab.run.identity import check_folder, run_identity
from grpo_lab.tasks.base import Model
from grpo_lab.tracking import names
from grpo_lab.tracking.passwords import has_password
from grpo_lab.tracking.run_reader import run_status
from grpo_lab.tracking.sweep_record import RunEntry

BASE = "model.base"
STORE = "GRPO_LAB_TRACKING_URI"  # the environment variable in which runs get an address with a password
Compose = Callable[[Sequence[str]], DictConfig]
# Budgets that an option without effect still draws on: log-probs that nothing needs are computed all the same.
_COSTS = frozenset({"flops", "simulated_seconds", "device_seconds"})
# The fields that identify a run, without its seed.
_IDENTITY = tuple(name for name in RunConfig.__dataclass_fields__ if name not in VOLATILE | {"plugins", "seed"})


@dataclass(frozen=True)
class Plan:
    """A run before composition: its labels, and its overrides, one per key."""

    arm: str
    level: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its name in tables and lists: arm, level and seed."""
        return " ".join(filter(None, (self.arm, self.level, f"seed={self.seed}")))


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, composed and checked."""

    plan: Plan
    run: RunConfig
    folder: Path
    choices: Mapping[str, str] = field(default_factory=dict)  # slot -> option
    same_as: str = ""  # the title of the planned run that makes this one too

    def record(self) -> RunEntry:
        """The run's entry in its sweep's record."""
        folder = self.folder.relative_to(_absolute(self.run.runs_dir)).as_posix()
        return RunEntry(self.plan.arm, self.plan.level, self.plan.seed, folder, self.same_as)


def _absolute(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def key_of(override: str) -> str:
    """The key that a Hydra override sets."""
    return override.partition("=")[0].lstrip("+~")


def is_hidden(key: str) -> bool:
    """True if a key is in no sweep's name: it says where and how runs are computed, or which of several."""
    return is_volatile(key) or key.split(".")[0] in ("seed", "plugins", "hydra")


def is_own(override: str) -> bool:
    """True if an override is for the sweep alone and not passed to its runs: `+experiments=`, `design.*`."""
    return key_of(override).split(".")[0].split("@")[0] in ("experiments", "design")


def plan_runs(design: Design | None, arguments: Sequence[str]) -> list[Plan]:
    """Every run of a design, or of the lists on a command line, ordered by seed.

    With this order a sweep that is stopped early is still balanced, over base models too. `arguments` are Hydra
    overrides. Those with several values multiply the design's levels, or without a design the arms. Seeds replace the
    design's, and all other overrides win over the design's. Raises ValueError for an override with a continuous range.
    """
    parsed = OverridesParser.create().parse_overrides([word for word in arguments if not is_own(word)])
    choices = {override.get_key_element(): values_of(override) for override in parsed}
    seeds = [seed_of(word) for word in choices.pop("seed", [])]
    swept = [key for key, values in choices.items() if len(values) > 1]
    base: tuple[str, ...] = ()
    arms: Mapping[str, tuple[str, ...]] = {"": ()}
    levels: Mapping[str, tuple[str, ...]] = {"": ()}
    if design is not None:
        part = design.chosen()
        base, seeds = design.base, seeds or list(part.seeds)
        arms = {name: design.arms[name] for name in part.arms}
        levels = {name: design.levels[name] for name in part.levels}
    plans = []
    for seed in seeds or [0]:
        of_seed = None if design is None else design.base_of(seed)
        own = () if of_seed is None else (f"model.base={of_seed}",)
        for level, arm in itertools.product(levels, arms):
            for combination in itertools.product(*choices.values()):
                varied = [word for word in combination if key_of(word) in map(key_of, swept)]
                merged = {key_of(word): word for word in (*base, *own, *levels[level], *arms[arm], *combination)}
                if design is None:
                    arm_label, level_label = ",".join(varied) or "run", ""
                else:  # an arm keeps its name, by which it is compared with its control
                    arm_label, level_label = arm, ",".join(filter(None, (level, *varied)))
                plans.append(Plan(arm_label, level_label, seed, (*merged.values(), f"seed={seed}")))
    return plans


def seed_of(word: str) -> int:
    """The number of an override `seed=3`. Raises ValueError."""
    try:
        return int(word.partition("=")[2])
    except ValueError as error:
        raise ValueError(f"{word}: a seed is a whole number") from error


def values_of(override: Override) -> list[str]:
    """An override as Hydra writes it, or a list of values as one override for each. Raises ValueError for a range."""
    key = override.get_key_element()
    if override.is_delete():
        return [override.input_line or key]
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise ValueError(f"{override.input_line}: a sweep needs a list of values, such as {key}=1,2,3")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def sweep_name(design: Design | None, arguments: Sequence[str]) -> str:
    """The sweep's name: `overlong` as declared, `overlong,budget.amount=10` if changed; without seeds."""
    return names.folder_name([*([design.name] if design else []), *shown_words(arguments)]) or "seeds"


def shown_words(arguments: Sequence[str]) -> list[str]:
    """The overrides that a sweep's name shows; as in a run's name recipe and tricks first, sizes and budgets last."""
    words = [word for word in arguments if not (is_own(word) or is_hidden(key_of(word)))]
    return sorted(words, key=lambda word: (key_of(word) != "recipe", key_of(word).split(".")[0] not in AXES, word))


def with_overrides(plan: Plan, words: Sequence[str]) -> Plan:
    """The plan with these overrides in place of its own for the same keys, and of the options within `tracking`."""
    keys = {key_of(word) for word in words}
    own = [word for word in plan.overrides if key_of(word) not in keys]
    if "tracking" in keys:
        own = [word for word in own if not key_of(word).startswith("tracking.")]
    return replace(plan, overrides=(*own, *words))


def folders_of(
    design: Design, arguments: Sequence[str], settled: Callable[[Plan], Plan] = lambda plan: plan
) -> frozenset[str]:
    """Folders, relative to runs_dir and without the seed, of every run of the whole design.

    `settled` gives a plan the numbers that its arm is tuned to.
    """
    whole = plan_runs(replace(design, part=None), [word for word in arguments if key_of(word) != "seed"])
    return frozenset(folder_name(settled(plan)) for plan in whole)


def folder_name(plan: Plan) -> str:
    """The folder of its run, relative to runs_dir and without the seed."""
    recipe = next((word.partition("=")[2] for word in plan.overrides if key_of(word) == "recipe"), "plain")
    return run_name(recipe, plan.overrides)


def compose_runs(plans: Sequence[Plan], sweep: str, compose: Compose) -> list[PlannedRun]:
    """Compose every plan and check it: rules, identity of an existing folder, equal labels.

    Raises one ValueError with all that is wrong, two runs in one folder included. Plans that differ only in the seed or
    in the base model's number are composed once: composing costs more than everything else here.
    """
    composed: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}
    runs: dict[tuple[str, ...], RunConfig] = {}
    planned_runs, refusals = [], {}
    held: dict[Path, PlannedRun] = {}  # by each folder
    for plan in plans:
        words = tuple(word for word in plan.overrides if key_of(word) != "seed")
        base = next((word for word in words if re.fullmatch(rf"{BASE}=\d+", word)), None)
        # The first that is composed has its own base, so that Hydra says what is wrong with it.
        shared = tuple(BASE if word == base else word for word in words)
        try:
            if wrong := misnamed(words):
                raise ValueError(wrong)
            if shared not in composed:
                config = compose(words)
                choices = chosen_options(config.hydra.runtime.choices)
                with open_dict(config):
                    del config["hydra"]
                composed[shared] = config, choices
            config, choices = composed[shared]
            with open_dict(config):
                config.seed = plan.seed
                for name, label in labels(plan, sweep).items():
                    config.label[name] = label
            if base is not None:
                config.model.base = int(base.partition("=")[2])
            known_run = runs.get(shared)
            run = to_run(config) if known_run is None else replace(known_run, **_labelled(known_run.model, config))
            check_compatible(run, choices)
            if shared not in runs and not _refers_to_labels(config):
                runs[shared] = run
            folder = _absolute(run.runs_dir) / folder_name(plan) / f"seed={plan.seed}"
            device = device_kind(run.device)
            known = (folder / "run.json").exists()  # else nothing is there to be compared with
            check_folder(folder, run_identity(config, device) if known else {})
            planned_runs.append(PlannedRun(plan, run, folder, choices))
            other = held.setdefault(folder, planned_runs[-1])
            if _changed(planned_runs[-1], other):
                raise ValueError(
                    f"{other.plan.title} has the same folder, {folder}, and is another run: rename a value"
                )
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            refused = isinstance(error, (HydraException, OmegaConfBaseException))
            text = in_one_line(error, RunConfig.__dataclass_fields__) if refused else str(error)
            refusals.setdefault(text, plan.title)  # the same message for several seeds is reported once
    if refusals:
        listed = "\n".join(f"  {title}: {message}" for message, title in refusals.items())
        raise ValueError(f"no run was started, because these cannot run:\n{listed}")
    return planned_runs


def _refers_to_labels(config: DictConfig) -> bool:
    """True if another value of the configuration may follow from the seed, the base or the labels."""
    return re.search(r"\$\{[^}]*(seed|base|label|cell)", str(OmegaConf.to_container(config, resolve=False))) is not None


def _labelled(model: Model, config: DictConfig) -> dict[str, Any]:
    """The fields of a run that differ between plans composed once: seed, labels, and the model with its base."""
    model = replace(model, base=config.model.base) if hasattr(model, "base") else model
    return {"seed": config.seed, "label": OmegaConf.to_object(config.label), "model": model}


def share_runs(runs: Sequence[PlannedRun], axis: str = "") -> list[PlannedRun]:
    """The same runs; of those that are one run by construction the first keeps its folder and the others share it.

    Runs are one run if they are equal but for options without effect, by the rules, and for labels: they train the
    same weights, up to rounding. Their costs may differ, so on a budget of costs (of the run, or `axis`, on which arms
    are compared) only equal runs share. A run whose own folder holds a run already keeps it. Raises ValueError for
    two runs of one name.
    """
    titles = [planned.plan.title for planned in runs]
    if twice := [title for title in titles if titles.count(title) > 1]:
        raise ValueError(f"two runs are called {twice[0]}: remove one of them")
    known = [(planned, _what_it_is(planned, axis), run_status(planned.folder) != "new") for planned in runs]
    makers: dict[str, PlannedRun] = {}
    for planned, what, _ in sorted(known, key=lambda entry: not entry[2]):
        makers.setdefault(what, planned)
    shared = []
    for planned, what, begun in known:
        maker = makers[what]
        keeps = maker is planned or (begun and planned.folder != maker.folder)
        shared.append(planned if keeps else replace(planned, folder=maker.folder, same_as=maker.plan.title))
    return shared


def _what_it_is(planned: PlannedRun, axis: str) -> str:
    run = planned.run
    costs = _COSTS & {axis, run.budget.axis.value}
    no_ops = set() if costs else _no_op_axes(planned)
    fields = {name: "idle" if name in no_ops else getattr(run, name) for name in _IDENTITY}
    return repr((run.seed, fields))


def refuse_no_op_arms(design: Design, runs: Sequence[PlannedRun]) -> None:
    """Raise IncompatibleRun for an arm that at no level can differ from the control: its changes have no effect.

    In a single run this is a warning, since published recipes contain such tricks; in an ablation it is an error.
    """
    controls = {planned.plan.level: planned for planned in runs if planned.plan.arm == design.control}
    pairs: dict[str, dict[str, tuple[PlannedRun, PlannedRun]]] = {}  # arm -> level -> run and its control, of one seed
    for planned in runs:
        control = controls.get(planned.plan.level)
        if control is not None and planned.plan.arm != design.control:
            pairs.setdefault(planned.plan.arm, {})[planned.plan.level] = planned, control
    for arm, levels in pairs.items():
        changed = [_changed(planned, control) for planned, control in levels.values()]
        if any(_acts(axes, *pair) for axes, pair in zip(changed, levels.values())):
            continue
        if not any(changed):
            if design.exploratory:
                raise IncompatibleRun(f"{arm} changes nothing: its runs equal those of {design.control}; remove it")
            raise IncompatibleRun(f"arm {arm} and {design.control} are the same run: remove one of the two")
        reasons = [
            f"  - {rule.describe(one.run, one.choices)}"
            for axes, pair in zip(changed, levels.values())
            for one in pair
            for rule in broken_rules(one.run).warnings
            if rule.no_op and rule.axes[0] in axes
        ]
        raise IncompatibleRun(f"arm {arm} cannot differ from {design.control}:\n" + "\n".join(dict.fromkeys(reasons)))


def _changed(planned: PlannedRun, control: PlannedRun) -> list[str]:
    return [axis for axis in _IDENTITY if getattr(planned.run, axis) != getattr(control.run, axis)]


def _acts(changed: Sequence[str], planned: PlannedRun, control: PlannedRun) -> bool:
    """True if some of these slots has an effect in the run or in its control."""
    return not set(changed) <= _no_op_axes(planned) & _no_op_axes(control)


def _no_op_axes(planned: PlannedRun) -> set[str]:
    """Axes whose option has no effect in the run: it is the off option, or a rule says so."""
    off = {axis for axis in AXES if getattr(getattr(planned.run, axis), "is_no_op", False)}
    return off | broken_rules(planned.run).no_op_axes


def overrides_for(planned: PlannedRun, sweep: str) -> list[str]:
    """The command line that starts this run on its own, labels included."""
    quoted_labels = {name: QuotedString(value, Quote.single) for name, value in labels(planned.plan, sweep).items()}
    quoted = [f"label.{name}={value.with_quotes()}" for name, value in quoted_labels.items()]
    return [*(_without_password(word, planned) for word in planned.plan.overrides), *quoted]


def _without_password(word: str, planned: PlannedRun) -> str:
    """The override; an address of a store with a password is handed over in the environment.

    Command lines are shown to everyone on a machine, and kept in logs and jobs.
    """
    uri = getattr(planned.run.tracking, "uri", "")
    if key_of(word) != "tracking.uri" or not has_password(uri):
        return word
    if os.environ.setdefault(STORE, uri) != uri:
        raise ValueError(f"a sweep has one store: {STORE} is set to another, unset it or tracking.uri")
    return f"tracking.uri=${{oc.env:{STORE}}}"


def labels(plan: Plan, sweep: str) -> dict[str, str]:
    """The fields of a run's configuration that name its sweep, arm and level."""
    return {"sweep": sweep, "arm": plan.arm, "level": plan.level}
