"""Seeded damage to run folders, and what becomes of a run that is started again on them.

    python tests/shared/damage.py [number] [seed]      300 damages unless told otherwise, and a table of their ends

Every file of a run folder can be hit, at every stage of the run. A start then ends with the bits of a run that nothing
happened to, or refuses in words that name a file that was hit; a table that is gone for good is named as well.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

from grpo_lab import loop
from grpo_lab.config.hydra_setup import bootstrap, compose_with_choices
from grpo_lab.learner import update as learner
from grpo_lab.tracking.files import RunFolderError
from grpo_lab.tracking.run_log import RunLog

OVERRIDES = (
    "world=tiny", "tracking=none", "device=cpu", "budget.amount=6", "checkpoint_every=2", "evaluation.every=2",
    "rollouts_every=2", "problems_per_step=2", "group_size=4", "evaluation.samples=2", "evaluation.probe_problems=8",
    "evaluation.heldout_problems=8", "evaluation.downstream_problems=8", "optimizer.learning_rate=1e-3",
    "group_filter=resample", "updates=two",
)  # fmt: skip
KINDS = ("flip", "truncate", "delete", "swap", "empty", "other")
STAGES = ("before", "between", "failure", "done")


_composed = cache(lambda *overrides: compose_with_choices([*OVERRIDES, *overrides]))  # takes as long as a short run


def run(runs: Path, *overrides: str) -> str:
    """Start the run in `runs` or go on with it; returns what it said. Raises what it raises."""
    config, choices = _composed(*overrides)
    config = OmegaConf.merge(config, {"runs_dir": str(runs)})
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        loop.start(config, "run", choices, ["test"])
    return said.getvalue()


@contextlib.contextmanager
def cut_short(after: int) -> Iterator[None]:
    """Within, a run is interrupted once it has logged this step."""
    write = RunLog.write_step

    def stopping(log: RunLog, step: int, *arguments: Any) -> None:
        write(log, step, *arguments)
        if step == after:
            raise KeyboardInterrupt

    with mock.patch.object(RunLog, "write_step", stopping), contextlib.suppress(KeyboardInterrupt):
        yield


@contextlib.contextmanager
def not_finite(update: int) -> Iterator[None]:
    """Within, the loss of an update (the first is 1) is not finite."""
    real, done = learner.update, Counter[str]()

    def failing(*arguments: Any) -> None:
        done["updates"] += 1
        if done["updates"] == update:
            raise FloatingPointError("the loss is nan")
        real(*arguments)

    with mock.patch.object(learner, "update", failing), contextlib.suppress(FloatingPointError):
        yield


class Prepared(dict[str, Path]):
    """Stage -> the folder of a run at it, made when it is first asked for; `whole` is one that nothing happened to,
    `other` is of another seed."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, stage: str) -> Path:
        if stage == "whole":
            return self["done"]
        seed = "seed=1" if stage == "other" else "seed=0"
        ended = {"before": cut_short(1), "between": cut_short(5), "failure": not_finite(10)}
        with ended.get(stage, contextlib.nullcontext()):
            run(self.root / stage, seed)
        self[stage] = folder = self.root / stage / "run" / seed
        if stage == "between":
            (folder / "error.txt").unlink()  # as a kill leaves it
        assert stage != "before" or not (folder / "checkpoints").exists()
        assert stage != "failure" or (folder / "failure").exists()
        return folder


@dataclass(frozen=True)
class Damage:
    """What is done to a run: `files` are hit, by their paths in its folder."""

    stage: str
    kind: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.stage}: {self.kind} {' and '.join(self.files)}"


def files_in(folder: Path) -> list[str]:
    """Every file of a run folder but its lock, by their paths in it."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != ".lock")


def choose(folders: dict[str, Path], random_: random.Random, number: int) -> list[Damage]:
    """Damages spread evenly over stages and kinds, each to files drawn at random."""
    chosen = []
    for index in range(number):
        stage, kind = STAGES[index % len(STAGES)], KINDS[index // len(STAGES) % len(KINDS)]
        names = [name for name in files_in(folders[stage]) if (folders[stage] / name).stat().st_size]
        if kind == "other":
            there = [name for name in names if (folders["other"] / name).exists()]
            names = [n for n in there if (folders["other"] / n).read_bytes() != (folders[stage] / n).read_bytes()]
        chosen.append(Damage(stage, kind, tuple(random_.sample(names, 2 if kind == "swap" else 1))))
    return chosen


def inflict(damage: Damage, folder: Path, other: Path, random_: random.Random) -> None:
    """Do it to the run in `folder`."""
    path = folder / damage.files[0]
    content = bytearray(path.read_bytes())
    match damage.kind:
        case "flip":
            for _ in range(random_.choice([1, 1, 64])):
                content[random_.randrange(len(content))] ^= random_.randrange(1, 256)
            path.write_bytes(content)
        case "truncate":
            path.write_bytes(content[: random_.randrange(len(content))])
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes((folder / damage.files[1]).read_bytes())
            (folder / damage.files[1]).write_bytes(content)
        case "empty":
            path.write_bytes(b"")
        case "other":
            path.write_bytes((other / damage.files[0]).read_bytes())


def compare(folder: Path, whole: Path, said: str) -> str:
    """How a run that ended stands to one that nothing happened to: "same", "same but for a table", or what differs."""
    newest = max((whole / "checkpoints").iterdir()).name
    results = ["metrics.jsonl", f"checkpoints/{newest}/model.safetensors"]
    for name in results:
        if not (folder / name).exists() or (folder / name).read_bytes() != (whole / name).read_bytes():
            return f"other bytes in {name}"
    less = False
    for path in sorted([*whole.glob("eval/*"), *whole.glob("rollouts/*")]):
        name = path.relative_to(whole).as_posix()
        there = (folder / name).exists()
        if there and (folder / name).read_bytes() == path.read_bytes():
            continue
        if name not in said or (there and name.startswith("eval/")):
            return f"{name} is {'damaged' if there else 'lost'}, and nothing says so"
        less = True
    return "same but for a table" if less else "same"


def outcome(damage: Damage, folders: dict[str, Path], seed: int) -> str:
    """What comes of a start on a damaged copy: "same", "same but for a table", "refused", or what is wrong."""
    random_ = random.Random(f"{seed} {damage}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run" / "seed=0"
        shutil.copytree(folders[damage.stage], folder)
        inflict(damage, folder, folders["other"], random_)
        try:
            said = run(Path(place), "seed=0")
        except (ValueError, RunFolderError) as error:
            if not any(f"{folder}/{name}" in str(error) or f"its {name}" in str(error) for name in damage.files):
                return f"refused without a name: {error}"
            if random_.random() < 0.2:  # the remedy: the files as they were
                for name in damage.files:
                    shutil.copy(folders[damage.stage] / name, folder / name)
                again = compare(folder, folders["whole"], run(Path(place), "seed=0"))
                return "refused" if again == "same" else f"refused, and after the remedy {again}"
            return "refused"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return compare(folder, folders["whole"], said)


GOOD = ("same", "same but for a table", "refused")


def main(number: int, seed: int) -> int:
    """Inflict them, print what came of each kind at each stage, and return how many ended in none of GOOD."""
    counts: Counter[tuple[str, str, str]] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as root:
        folders = Prepared(Path(root))
        for damage in choose(folders, random.Random(seed), number):
            what = outcome(damage, folders, seed)
            counts[damage.stage, damage.kind, what if what in GOOD else "wrong"] += 1
            bad += what not in GOOD
            print(f"{what:<22} {damage}", flush=True)
    for (stage, kind, what), count in sorted(counts.items()):
        print(f"{stage:<8} {kind:<8} {what:<22} {count}")
    print({what: sum(n for key, n in counts.items() if key[2] == what) for what in (*GOOD, "wrong")})
    return bad


if __name__ == "__main__":
    bootstrap()
    words = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*(words + [300, 0][len(words) :])) > 0)
