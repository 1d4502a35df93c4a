"""grpo_lab from Python, in a script or a notebook: train a run, sweep tricks, load and compare what they left.

    from grpo_lab import api

    plain = [api.train("world=tiny", "budget.amount=10", seed=seed) for seed in (0, 1, 2)]
    higher = [api.train("world=tiny", "budget.amount=10", "surrogate=ppo_higher", seed=seed) for seed in (0, 1, 2)]
    plain[0].metrics[["step", "reward/outcome"]]
    api.compare({"plain": plain, "clip-higher": higher}, control="plain")
    api.sweep("recipe=plain", "world=tiny", seed=[0, 1], add=["surrogate=ppo_higher", "kl=k3_loss"]).effects

Overrides are those of the command line, as texts or by keyword. Runs go to `runs` in the working folder unless
`runs_dir` says otherwise. Bad input raises ValueError with a remedy.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from grpo_lab.tracking.files import atomic_write
from grpo_lab.tracking.terminal import say

if TYPE_CHECKING:
    import pandas as pd

    from grpo_lab.analysis.tables import Tables

__all__ = ["Run", "compare", "load", "load_sweep", "sweep", "train"]


@dataclass(frozen=True)
class Run:
    """A run, whatever its status, read from its folder; a table is read when it is first used."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "run.json").exists():
            raise ValueError(f"{self.folder} is no run folder: it has no run.json; a run's folder ends in seed=N")

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of run.json: name, chosen options, warnings, segments, data, prompts."""
        return json.loads((self.folder / "run.json").read_text())

    @property
    def name(self) -> str:
        """The run's name, such as `dr_grpo,world=tiny`, without its seed."""
        return self.folder.parent.name

    @property
    def status(self) -> str:
        """new, partial, failed or done."""
        from grpo_lab.tracking.run_reader import run_status

        return run_status(self.folder)

    @cached_property
    def config(self) -> DictConfig:
        """Every number of the run, resolved."""
        config = OmegaConf.load(self.folder / "config.yaml")
        assert isinstance(config, DictConfig)
        return config

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row per logged step and a column per metric; `grpo-lab metrics` explains the names.

        Raises ValueError, naming the file, where it is damaged.
        """
        from grpo_lab.analysis.sources.cache import read_tables

        return read_tables(self.folder).points

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """A row per evaluation, suite and question, of n samples `correct` were right: see `read_answers`."""
        from grpo_lab.analysis.sources.answers import read_answers

        return read_answers(self.folder)

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """A row per response of every saved step; `rollouts_every` says how often a run saves them. Empty if never."""
        import pandas as pd

        from grpo_lab.analysis.report.reader import read_rollouts, rollout_steps

        steps = rollout_steps(self.folder)
        return pd.concat([read_rollouts(self.folder, step) for step in steps]) if steps else pd.DataFrame()


def train(*overrides: str, reward: Callable[..., float] | str | None = None, **values: Any) -> Run:
    """Train a run in this process and return it; the same call again resumes it, or returns it once it is finished.

    `values` are overrides too: `seed=1`, or `**{"optimizer.learning_rate": 1e-4}`. `reward` is a function of any of
    `prompt`, `response`, `answer`, `finished` and columns, by name, or `FILE:NAME`; it becomes `reward=function`.
    Raises ValueError for bad input, before a model is loaded.
    """
    from grpo_lab.config.hydra_setup import compose_with_choices
    from grpo_lab.config.run_name import run_name

    words = _words(overrides, values)
    if sweeping := [word for word in words if word.partition("=")[0] in ("add", "leave_one_out", "+experiments")]:
        raise ValueError(f"{sweeping[0]} makes several runs: call api.sweep")
    words += _of_reward(reward, words)
    config, choices = compose_with_choices(words)
    name = run_name(choices.get("recipe", "plain"), words)
    from grpo_lab.loop import start  # after Hydra is set up, which also quiets the libraries that this loads

    return Run(start(config, name, choices, ["grpo_lab.api.train", *words]))


def sweep(
    *overrides: str,
    experiment: str | None = None,
    add: Sequence[str] = (),
    leave_one_out: Sequence[str] = (),
    reward: Callable[..., float] | str | None = None,
    **values: Any,
) -> Tables:
    """Run a sweep in processes of its own, and return its tables: runs, curves, means, effects, verdict.

    Either a declared `experiment`, or `add` or `leave_one_out`: a list of overrides, each an arm. Lists in `values`,
    such as `seed=[0, 1]`, are swept over. The same call again runs what is missing. Raises ValueError with the sweep's
    message where it is refused or a run failed.
    """
    from grpo_lab.config.hydra_setup import bootstrap
    from grpo_lab.tracking.sweep_record import FILE

    bootstrap()
    words = _words(overrides, values, swept=True)
    words += [f"+experiments={experiment}"] if experiment else []
    for key, additions in (("add", add), ("leave_one_out", leave_one_out)):
        words += [f"{key}=[{','.join(additions)}]"] if additions else []
    words += _of_reward(reward, words)
    runs_dir = next((word.partition("=")[2] for word in words if word.startswith("runs_dir=")), "runs")
    sweeps = Path(runs_dir).expanduser() / "sweeps"
    before = {path: path.stat().st_mtime_ns for path in sweeps.glob(f"*/{FILE}")}
    _printing([sys.executable, "-m", "grpo_lab.train", "-m", *words])
    written = [path for path in sweeps.glob(f"*/{FILE}") if before.get(path) != path.stat().st_mtime_ns]
    newest = max(written, key=lambda path: path.stat().st_mtime_ns)
    return load_sweep(newest.parent.name, runs_dir)


def load(folder: str | Path) -> Run:
    """The run in `folder`, such as `runs/dr_grpo,world=tiny/seed=1`. Raises ValueError where there is none."""
    return Run(Path(folder).expanduser().absolute())


def load_sweep(name: str, runs_dir: str | Path = "runs") -> Tables:
    """The tables of a sweep, from its runs or, where they hold more, from the saved data of an experiment."""
    from grpo_lab.analysis.tables import load as load_tables

    return load_tables(name, str(runs_dir))


def compare(runs: Sequence[Run] | Mapping[str, Sequence[Run]], control: str) -> pd.DataFrame:
    """What every arm adds to `control`: a row per arm and metric with mean, low, high, n and not_reported.

    `runs` are arms by name, or a list in which runs of one name are an arm. Differences are of final values at the
    smallest common budget, paired by seed over n pairs, with 95% CIs; `not_reported` says why there is no interval.
    Raises ValueError for a control that is no arm, and for two runs of an arm with one seed.
    """
    import pandas as pd

    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.run_folders import read_cells
    from grpo_lab.analysis.sources.sweep_data import assemble
    from grpo_lab.tracking.sweep_record import CellRecord, SweepRecord

    arms = dict(runs) if isinstance(runs, Mapping) else _by_name(runs)
    if control not in arms:
        raise ValueError(f"control must be one of the arms, got {control!r}: there are {', '.join(map(repr, arms))}")
    ordered = [control, *(arm for arm in arms if arm != control)]
    cells = [CellRecord(arm, "", int(run.config.seed), str(run.folder)) for arm in ordered for run in arms[arm]]
    if len({(cell.arm, cell.seed) for cell in cells}) < len(cells):
        raise ValueError("an arm has two runs with one seed: give the arms names, as {name: runs}")
    record = SweepRecord("comparison", "", None, (), (), None, None, cells)
    finals = final_values(assemble(record, read_cells(Path("/"), cells, None), "run folders"))
    rows = []
    for arm in ordered[1:]:
        for metric in (name for name in map(str, finals.values) if "/" in name and not name.startswith("average/")):
            found = finals.difference("", arm, control, metric)
            if found.n:
                rows.append({"arm": arm, "metric": metric, "mean": found.mean, "low": found.low, "high": found.high})
                rows[-1] |= {"n": found.n, "not_reported": found.why}
    return pd.DataFrame(rows)


def _by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.name, []).append(run)
    return arms


def _words(overrides: Sequence[str], values: Mapping[str, Any], swept: bool = False) -> list[str]:
    """Overrides as the command line has them; a list of `swept` values is swept over."""
    return [*overrides, *(f"{key}={_value(value, swept)}" for key, value in values.items())]


def _value(value: Any, swept: bool = False) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        inner = ",".join(map(_value, value))
        return inner if swept else f"[{inner}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (str, Path)) and not re.fullmatch(r"[\w./:@+*-]+|[\[{'\"].*", str(value)):
        return QuotedString(str(value), Quote.single).with_quotes()
    return str(value)


def _of_reward(reward: Callable[..., float] | str | None, words: Sequence[str]) -> list[str]:
    """The overrides that make it the reward."""
    if reward is None:
        return []
    runs_dir = next((word.partition("=")[2] for word in words if word.startswith("runs_dir=")), "runs")
    place = reward if isinstance(reward, str) else _saved(reward, Path(runs_dir).expanduser().absolute() / "rewards")
    return ["reward=function", f'reward.path="{place}"']


def _saved(reward: Callable[..., float], folder: Path) -> str:
    """`FILE:NAME` of the function: its own file where that can be imported, else one with its source in `folder`.

    The file's name holds a hash of the source, so that a run is resumed with the function it began with.
    """
    name = getattr(reward, "__qualname__", repr(reward))
    remedy = "write it to a file and pass reward='my_rewards.py:NAME'"
    if not inspect.isfunction(reward) or not name.isidentifier():
        raise ValueError(f"reward must be a function defined with def at the top level, got {name}: {remedy}")
    if reward.__module__ != "__main__" and (file := inspect.getsourcefile(reward)):
        return f"{Path(file).absolute()}:{name}"
    used = inspect.getclosurevars(reward)
    if outside := [one for one in (*used.globals, *used.nonlocals) if not hasattr(builtins, one)]:
        raise ValueError(
            f"{name} uses {', '.join(sorted(outside))}, defined outside of it: import or define that within it, or "
            f"{remedy}"
        )
    try:
        source = textwrap.dedent(inspect.getsource(reward))
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of {name} cannot be read ({error}): {remedy}") from error
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    if not path.exists():
        atomic_write(path, source)
    return f"{path}:{name}"


def _printing(command: Sequence[str]) -> None:
    """Run a command and print its lines as they come, in a notebook too. Raises ValueError where it fails."""
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            say(lines[-1])
    if process.returncode:
        raise ValueError(next((line for line in reversed(lines) if line), f"the sweep ended with {process.returncode}"))
