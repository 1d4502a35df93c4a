"""What an experiment declares: a question, arms, and predictions that its own runs can contradict.

`experiments/<name>.yaml` holds one such declaration under `design:`. Nothing here composes a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_lab.metrics import is_known


class Direction(Enum):
    """On which side of its control an arm is predicted to end."""

    above = "above"
    below = "below"


@dataclass(frozen=True)
class Prediction:
    """`arm` will end above or below the control on `metric`, at `level` of the factor.

    With `against`, another level, it is compared with itself there instead of with the control.
    """

    arm: str
    metric: str
    direction: Direction
    level: str = ""
    against: str = ""


@dataclass(frozen=True)
class Part:
    """A named share of a design, such as the one a demonstration runs; what is left out means all."""

    arms: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Design:
    """A declared experiment: every arm at every level of the factor, for every seed.

    `base`, `arms` and `levels` hold Hydra overrides; an arm's win over the level's, the level's over the base's.
    Without a factor there is one level, named "". `columns` are the metrics of its table, where the usual ones do
    not answer its question; they decide nothing, so the fingerprint leaves them out.
    """

    name: str
    question: str
    prediction: str
    control: str
    primary: str  # the metric that decides
    axis: str  # the budget axis on which arms are compared, an entry of budget/*
    base: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    factor: str
    levels: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    predictions: tuple[Prediction, ...]
    parts: Mapping[str, Part]
    part: str | None
    columns: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of everything that was declared; running a part of it declares the same."""
        declared = {name: value for name, value in asdict(self).items() if name not in ("part", "parts", "columns")}
        text = json.dumps(declared, sort_keys=True, default=lambda value: value.value)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def chosen(self) -> Part:
        """The arms, levels and seeds to run now."""
        part = self.parts[self.part] if self.part else Part()
        return Part(part.arms or tuple(self.arms), part.levels or tuple(self.levels), part.seeds or self.seeds)


def read_design(node: Mapping[str, Any]) -> Design:
    """A Design from the `design` node of an experiment. Raises ValueError that names the key and a remedy."""
    node = {name: value for name, value in node.items() if value is not None}
    known = {field.name for field in fields(Design)}
    if unknown := sorted(set(node) - known):
        raise ValueError(f"design.{unknown[0]} is no part of a design: choose from {', '.join(sorted(known))}")
    for name in ("name", "question", "prediction", "control", "primary", "axis", "arms", "seeds"):
        if not node.get(name):
            raise ValueError(f"design.{name} is missing: an experiment states it before its first run")
    arms = _override_lists("arms", node["arms"])
    levels = _override_lists("levels", node.get("levels") or {"": []})
    if ("factor" in node) != ("levels" in node):
        raise ValueError("design.factor names what design.levels vary: give both or neither")
    parts = {name: _part(name, part) for name, part in (node.get("parts") or {}).items()}
    design = Design(
        name=str(node["name"]),
        question=_text(node["question"]),
        prediction=_text(node["prediction"]),
        control=str(node["control"]),
        primary=str(node["primary"]),
        axis=str(node["axis"]),
        base=_override_lists("base", {"": node.get("base") or []})[""],
        arms=arms,
        factor=str(node.get("factor", "")),
        levels=levels,
        seeds=_seeds("seeds", node["seeds"]),
        predictions=tuple(_prediction(entry) for entry in node.get("predictions") or ()),
        parts=parts,
        part=node.get("part"),
        columns=tuple(map(str, node.get("columns") or ())),
    )
    _check_names(design)
    return design


def _check_names(design: Design) -> None:
    def require_known(what: str, name: str, known: Sequence[str]) -> None:
        if name not in known:
            raise ValueError(f"design.{what}: there is no {name!r}; choose from {', '.join(map(repr, known))}")

    arms, levels = list(design.arms), list(design.levels)
    require_known("control", design.control, arms)
    if design.part is not None:
        require_known("part", design.part, list(design.parts))
    for name, part in design.parts.items():
        for arm in part.arms:
            require_known(f"parts.{name}.arms", arm, arms)
        for level in part.levels:
            require_known(f"parts.{name}.levels", level, levels)
    for prediction in design.predictions:
        require_known("predictions", prediction.arm, [arm for arm in arms if arm != design.control])
        require_known("predictions", prediction.level, levels)
        if prediction.against:
            require_known("predictions", prediction.against, [name for name in levels if name != prediction.level])


def require_known_metrics(design: Design) -> None:
    """Raise ValueError for a metric, or a budget axis, that no run will ever log; before the first one starts."""
    predicted = [prediction.metric for prediction in design.predictions]
    named = (design.primary, f"budget/{design.axis}", *predicted, *design.columns)
    for metric in named:
        if not is_known(metric):
            raise ValueError(f"design: no run has the metric {metric!r}; `grpo-lab metrics` lists what there is")


def _text(value: Any) -> str:
    return " ".join(str(value).split())


def _override_lists(name: str, value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping) or not all(isinstance(overrides, list | tuple) for overrides in value.values()):
        raise ValueError(f"design.{name} must map each name to a list of overrides, such as [truncation=mask_after]")
    return {str(key): tuple(map(str, overrides)) for key, overrides in value.items()}


def _seeds(name: str, value: Any) -> tuple[int, ...]:
    seeds = tuple(value) if isinstance(value, list | tuple) else ()
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"design.{name} must be a list of different whole numbers, got {value!r}")
    return seeds


def _part(name: str, value: Any) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError(f"design.parts.{name}: a part chooses arms, levels and seeds, each a list")
    if unknown := sorted(set(value) - {"arms", "levels", "seeds"}):
        raise ValueError(f"design.parts.{name}.{unknown[0]}: a part chooses arms, levels and seeds")
    return Part(
        arms=tuple(map(str, value.get("arms", ()))),
        levels=tuple(map(str, value.get("levels", ()))),
        seeds=_seeds(f"parts.{name}.seeds", value["seeds"]) if "seeds" in value else (),
    )


def _prediction(entry: Any) -> Prediction:
    try:
        return Prediction(**{**entry, "direction": Direction(entry["direction"])})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"design.predictions: {entry} must give arm, metric, direction (above or below the control) "
            "and, where there is a factor, level (and against, another level)"
        ) from error


def load_design(path: Path) -> Design:
    """The declaration in an experiment's YAML file, read without Hydra. Raises ValueError."""
    if not path.exists():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise ValueError(f"there is no experiment {path.stem!r}: choose from {', '.join(known)}")
    declared = OmegaConf.load(path).get("design")
    if declared is None:
        raise ValueError(f"{path} declares nothing: it has no entry `design`")
    return read_design(OmegaConf.to_container(declared, resolve=True))
