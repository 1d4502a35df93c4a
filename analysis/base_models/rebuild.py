"""Makes the base models that come with grpo_lab again, and compares them with those that came."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from scipy import stats

from grpo_lab.policy.models import read_model
from grpo_lab.tasks import shipped as bases
from grpo_lab.tasks.base import Model
from grpo_lab.tasks.shipped import Shipped, shipped
from grpo_lab.tasks.warm_start import ArithmeticBase, build, measure, unpack
from grpo_lab.tracking.checksums import digest_of, with_checksum
from grpo_lab.tracking.files import locked, write_json

PROBLEMS = 1024  # asked of each of two models that are compared
CONFIDENCE = 0.95  # that no base differs by chance, of all that are compared


@dataclass(frozen=True)
class Compared:
    """Accuracies of the shipped and the rebuilt model on the same PROBLEMS problems, and their difference.

    `number` models are compared in all: the interval is wide enough for all of them to agree in 95% of calls, where
    sampling the answers is all that differs (Bonferroni).
    """

    file: str
    was: float
    now: float
    number: int = 1

    @property
    def half_width(self) -> float:
        """Of the interval of the difference, by normal approximation of two independent shares."""
        z = float(stats.norm.ppf(1 - (1 - CONFIDENCE) / (2 * self.number)))
        return z * math.sqrt(sum(share * (1 - share) for share in (self.was, self.now)) / PROBLEMS)

    @property
    def agrees(self) -> bool:
        return abs(self.now - self.was) <= self.half_width

    def text(self) -> str:
        difference = f"{self.now - self.was:+.3f} +- {self.half_width:.3f}"
        return (
            f"{self.file:<28} shipped {self.was:.3f}  rebuilt {self.now:.3f}  {difference}  "
            f"{'agrees' if self.agrees else 'DIFFERS'}"
        )


def recipes_of(model: Model, number: int) -> list[ArithmeticBase]:
    """The recipes of base models 0 to number - 1 like `model`. Raises ValueError for a model without a recipe."""
    if not isinstance(model, ArithmeticBase):
        raise ValueError(f"{type(model).__name__} has no recipe to build it from: choose a world, such as world=sums")
    return [replace(model, base=base) for base in range(number)]


def shipped_like(model: Model) -> list[ArithmeticBase]:
    """The recipes of the shipped base models that differ from `model` in their random numbers only, else its own."""
    first = recipes_of(model, 1)
    found = [recipe for recipe in every_recipe() if replace(recipe, base=0) == first[0]]
    return sorted(found, key=lambda recipe: recipe.base) or first


def every_recipe() -> list[ArithmeticBase]:
    """The recipes of all bases that came with grpo_lab."""
    return [ArithmeticBase.from_written(base.recipe) for base in shipped()]


def rebuilt(recipes: Sequence[ArithmeticBase]) -> Iterator[Compared]:
    """Build each recipe anew in a folder of its own and compare it with the base that came with grpo_lab.

    Raises ValueError for a recipe that did not come with it.
    """
    known = {base.key: base for base in shipped()}
    for recipe in recipes:
        if recipe.key() not in known:
            raise ValueError(f"the base {recipe.key()} did not come with grpo_lab: grpo-lab base builds it")
    for recipe in recipes:
        came = known[recipe.key()]
        with tempfile.TemporaryDirectory() as scratch:
            was, now = Path(scratch, "shipped"), Path(scratch, "rebuilt")
            unpack(recipe, came.weights, was)
            build(recipe, now)
            was_accuracy, now_accuracy = (accuracy_of(recipe, folder) for folder in (was, now))
            yield Compared(came.file, was_accuracy, now_accuracy, len(recipes))


def ship(name: str, recipe: ArithmeticBase) -> Shipped:
    """Build a recipe and add it to the bases that come with grpo_lab, in place of another of the same file."""
    file = f"{name}-{recipe.base}.safetensors"
    with tempfile.TemporaryDirectory() as scratch:
        build(recipe, Path(scratch, "built"))
        bases.FOLDER.mkdir(exist_ok=True)
        weights = load_file(Path(scratch, "built", "model.safetensors"))
        save_file({key: tensor.half() for key, tensor in weights.items()}, bases.FOLDER / file, {"format": "pt"})
        unpack(recipe, bases.FOLDER / file, Path(scratch, "rounded"))
        report = _report(recipe, Path(scratch, "rounded"))
    base = Shipped(recipe.key(), file, digest_of(bases.FOLDER / file), recipe.written(), report)
    with locked(bases.FOLDER / ".lock", wait_seconds=math.inf):
        others = [other for other in shipped() if other.file != file]
        write_index(sorted([*others, base], key=lambda one: one.file))
    return base


def write_index(found: list[Shipped]) -> None:
    """Replace the index."""
    write_json(bases.INDEX, with_checksum({"bases": [asdict(base) for base in found]}), sort=False, indent=1)


def accuracy_of(recipe: ArithmeticBase, folder: Path) -> float:
    """The share of PROBLEMS training problems, one sampled answer each, that the model in `folder` gets right."""
    return _report(recipe, folder)["accuracy"]


def _report(recipe: ArithmeticBase, folder: Path) -> dict[str, float]:
    model = read_model(folder, torch.float32)
    assert isinstance(model, transformers.LlamaForCausalLM), "what a recipe builds"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.base)
        return measure(replace(recipe, report_problems=PROBLEMS), model.eval(), recipe.tokenizer())
