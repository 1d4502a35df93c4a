"""From overrides to checked cells: expansion, composition, and all checks, before the sweep starts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.config.design import Design
from grpo_lab.config.overrides import misnamed
from grpo_lab.config.rules import IncompatibleRun, broken_warnings, check_compatible
from grpo_lab.config.run_config import AXES, VOLATILE, RunConfig, to_run
from grpo_lab.config.run_name import chosen_options, run_name, short
from grpo_lab.policy.device import choose_device
from grpo_lab.run.identity import check_folder, run_identity
from grpo_lab.tracking.sweep_record import CellRecord

Compose = Callable[[Sequence[str]], DictConfig]
# The fields that identify a run, without its seed.
_IDENTITY = tuple(name for name in RunConfig.__dataclass_fields__ if name not in VOLATILE | {"plugins", "seed"})


@dataclass(frozen=True)
class Plan:
    """A cell before composition: its labels, and its overrides, one per key."""

    arm: str
    level: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its name in tables and lists: arm, level and seed."""
        return " ".join(filter(None, (self.arm, self.level, f"seed={self.seed}")))


@dataclass(frozen=True)
class Cell:
    """One run of a sweep, composed and checked."""

    plan: Plan
    run: RunConfig
    folder: Path
    choices: Mapping[str, str] = field(default_factory=dict)  # slot -> option

    def record(self) -> CellRecord:
        """The cell's entry in its sweep's record."""
        folder = self.folder.relative_to(_runs_dir(self.run)).as_posix()
        return CellRecord(self.plan.arm, self.plan.level, self.plan.seed, folder)


def _runs_dir(run: RunConfig) -> Path:
    return Path(run.runs_dir).expanduser().absolute()


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def is_own(override: str) -> bool:
    """Whether an override is for the sweep alone and not passed to its runs: `+experiments=`, `design.*`."""
    return _key(override).split(".")[0].split("@")[0] in ("experiments", "design")


def plan_cells(design: Design | None, arguments: Sequence[str]) -> list[Plan]:
    """Every cell of a design, or of the lists on a command line, ordered by seed.

    With this order a sweep that is stopped early is still balanced. `arguments` are Hydra overrides. Those with
    several values multiply the design's levels, or without a design the arms. Seeds replace the design's, and all
    other overrides win over the design's. Raises ValueError for an override with a continuous range.
    """
    parsed = OverridesParser.create().parse_overrides([word for word in arguments if not is_own(word)])
    choices = {override.get_key_element(): _values(override) for override in parsed}
    seeds = [_seed(word) for word in choices.pop("seed", [])]
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
        for level, arm in itertools.product(levels, arms):
            for combination in itertools.product(*choices.values()):
                varied = [word for word in combination if _key(word) in map(_key, swept)]
                merged = {_key(word): word for word in (*base, *levels[level], *arms[arm], *combination)}
                if design is None:
                    arm_label, level_label = ",".join(varied) or "run", ""
                else:  # an arm keeps its name, by which it is compared with its control
                    arm_label, level_label = arm, ",".join(filter(None, (level, *varied)))
                plans.append(Plan(arm_label, level_label, seed, (*merged.values(), f"seed={seed}")))
    return plans


def _seed(word: str) -> int:
    try:
        return int(word.partition("=")[2])
    except ValueError as error:
        raise ValueError(f"{word}: a seed is a whole number") from error


def _values(override: Override) -> list[str]:
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
    hidden = VOLATILE | {"seed", "plugins", "hydra"}
    words = [word for word in arguments if not is_own(word) and _key(word).split(".")[0] not in hidden]
    # As in a run's name: recipe and tricks first, sizes and budgets last.
    words.sort(key=lambda word: (_key(word) != "recipe", _key(word).split(".")[0] not in AXES, word))
    return short(",".join([*([design.name] if design else []), *words])) or "seeds"


def folders_of(design: Design, arguments: Sequence[str]) -> frozenset[str]:
    """Folders, relative to runs_dir and without the seed, of every run of the whole design."""
    whole = plan_cells(replace(design, part=None), [word for word in arguments if _key(word) != "seed"])
    return frozenset(_name(plan) for plan in whole)


def _name(plan: Plan) -> str:
    recipe = next((word.partition("=")[2] for word in plan.overrides if _key(word) == "recipe"), "plain")
    return run_name(recipe, plan.overrides)


def compose_cells(plans: Sequence[Plan], sweep: str, compose: Compose) -> list[Cell]:
    """Compose every plan and check it: rules, identity of an existing folder, equal cells.

    Raises one ValueError with all that is wrong. Plans that differ only in the seed are composed once.
    """
    composed: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}
    cells, refusals = [], {}
    for plan in plans:
        shared = tuple(word for word in plan.overrides if _key(word) != "seed")
        try:
            if wrong := misnamed(shared):
                raise ValueError(wrong)
            if shared not in composed:
                config = compose(shared)
                choices = chosen_options(config.hydra.runtime.choices)
                with open_dict(config):
                    del config["hydra"]
                composed[shared] = config, choices
            config, choices = composed[shared]
            config = config.copy()
            with open_dict(config):
                config.seed = plan.seed
                for name, label in labels(plan, sweep).items():
                    config.cell[name] = label
            run = to_run(config)
            check_compatible(run, choices)
            folder = _runs_dir(run) / _name(plan) / f"seed={plan.seed}"
            check_folder(folder, run_identity(config, choose_device(run.device).type))
            cells.append(Cell(plan, run, folder, choices))
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            refusals.setdefault(str(error), plan.title)  # the same message for several seeds is reported once
    if refusals:
        listed = "\n".join(f"  {title}: {message}" for message, title in refusals.items())
        raise ValueError(f"no cell was started, because these cannot run:\n{listed}")
    _refuse_twins(cells)
    return cells


def _refuse_twins(cells: Sequence[Cell]) -> None:
    seen: dict[str, Plan] = {}
    for cell in cells:
        what_it_is = repr([cell.run.seed, *(getattr(cell.run, name) for name in _IDENTITY)])
        twin = seen.setdefault(what_it_is, cell.plan)
        if twin is not cell.plan:
            raise ValueError(f"{twin.title} and {cell.plan.title} are the same run: remove one of the two")


def refuse_idle_arms(design: Design, cells: Sequence[Cell]) -> None:
    """Raise IncompatibleRun for an arm that cannot differ from the control, because its changes have no effect.

    In a single run this is a warning, since published recipes contain such tricks; in an ablation it is an error.
    """
    controls = {cell.plan.level: cell for cell in cells if cell.plan.arm == design.control}
    for cell in cells:
        control = controls.get(cell.plan.level)
        if control is None or cell.plan.arm == design.control:
            continue
        changed = [axis for axis in _IDENTITY if getattr(cell.run, axis) != getattr(control.run, axis)]
        if changed and all(axis in AXES and _idle(axis, cell.run) and _idle(axis, control.run) for axis in changed):
            reasons = "\n".join(
                f"  - {rule.describe(one.run, one.choices)}"
                for one in (cell, control)
                for rule in broken_warnings(one.run)
                if rule.idles and rule.axes[0] in changed
            )
            raise IncompatibleRun(f"arm {cell.plan.arm} cannot differ from {design.control}:\n{reasons}")


def _idle(axis: str, run: RunConfig) -> bool:
    """Whether the option on this axis has no effect in this run: it is the off option, or a rule says so."""
    stopped = {rule.axes[0] for rule in broken_warnings(run) if rule.idles}
    return getattr(getattr(run, axis), "touches_nothing", False) or axis in stopped


def overrides_for(cell: Cell, sweep: str) -> list[str]:
    """The command line that runs this cell on its own, labels included."""
    said = {name: QuotedString(value, Quote.single) for name, value in labels(cell.plan, sweep).items()}
    quoted = [f"cell.{name}={value.with_quotes()}" for name, value in said.items()]
    return [*cell.plan.overrides, *quoted]


def labels(plan: Plan, sweep: str) -> dict[str, str]:
    """The fields of a cell's configuration that name its sweep, arm and level."""
    return {"sweep": sweep, "arm": plan.arm, "level": plan.level}
