"""grpo_lab from Python, in a script or a notebook: train a run, sweep tricks, load and compare what they left.

    from grpo_lab import api

    plain = [api.train("world=tiny", "budget.amount=10", seed=seed) for seed in (0, 1, 2)]
    higher = [api.train("world=tiny", "budget.amount=10", "surrogate=ppo_higher", seed=seed) for seed in (0, 1, 2)]
    plain[0].metrics[["step", "reward/outcome"]]
    api.compare({"plain": plain, "clip-higher": higher}, control="plain")
    api.sweep("recipe=plain", "world=tiny", seed=[0, 1], add=["surrogate=ppo_higher", "kl=k3_loss"]).effects

Overrides are those of the command line, as strings or by keyword. Runs go to `runs` in the working folder unless
`runs_dir` says otherwise. Bad input raises ValueError with a remedy.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from grpo_lab.tracking.files import atomic_write
from grpo_lab.tracking.terminal import say

if TYPE_CHECKING:
    import pandas as pd

    from grpo_lab.analysis.tables import Tables

# How a sweep's command names it: at its start, or where nothing is left to run.
_RECORDED = re.compile(r"(.+): (?:\d+ runs, \d+ finished before|all \d+ runs are finished)")

_NO_EFFECTS = ("average/", "budget/")  # final values that no trick is judged by
_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE")  # a notebook sets them, and a sweep would redraw its progress in a pipe

GraderLike = Callable[..., float] | str | None  # a function, FILE:NAME or an option

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


def train(*overrides: str, reward: GraderLike = None, verifier: GraderLike = None, **values: Any) -> Run:
    """Train a run in this process and return it; the same call again resumes it, or returns it once it is finished.

    `values` are overrides too, as Python objects: `seed=1`, or `**{"optimizer.learning_rate": 1e-4}`. `reward` grades
    training and `verifier` evaluation. Each is a function of any of `prompt`, `response`, `answer`, `finished` and
    columns, by name, or `FILE:NAME`, and becomes `reward=function`; any other string is an option, such as "strict". A
    run that stops on a non-finite loss, or with nothing left to train on, is returned with the status `failed` and a
    message. Raises ValueError for bad input, before a model is loaded.
    """
    from grpo_lab.config.hydra_setup import compose_with_choices
    from grpo_lab.config.run_name import run_name

    words = _words(overrides, values)
    if several := [word for word in words if _makes_several(word)]:
        raise ValueError(f"{several[0]} makes several runs: call api.sweep")
    words += [*_of_grader("reward", reward, words), *_of_grader("verifier", verifier, words)]
    config, choices = compose_with_choices(words)
    name = run_name(choices.get("recipe", "plain"), words)
    from grpo_lab.loop import start  # after Hydra is set up, which also quiets the libraries that this loads
    from grpo_lab.tasks.function_reward import pool_of
    from grpo_lab.tasks.grader_pool import close_all
    from grpo_lab.types import Exhausted

    pool_of.cache_clear()  # a function that was edited since the last call is loaded again
    try:
        return Run(start(config, name, choices, ["grpo_lab.api.train", *words]))
    except (FloatingPointError, Exhausted) as error:
        folder = Path(config.runs_dir).expanduser().absolute() / name / f"seed={config.seed}"
        if not (folder / "run.json").exists():
            raise
        say(f"the run failed: {error}", error=True)
        return Run(folder)
    finally:
        close_all()  # of every run of this process: a notebook's kernel would wait for them when it shuts down


def sweep(
    *overrides: str,
    experiment: str | None = None,
    add: Sequence[str | Sequence[str]] = (),
    leave_one_out: Sequence[str | Sequence[str]] = (),
    reward: GraderLike = None,
    verifier: GraderLike = None,
    **values: Any,
) -> Tables:
    """Run a sweep in processes of its own, and return the tables of its runs: runs, curves, means, effects, verdict.

    Either a declared `experiment`, or `add` or `leave_one_out`: a list of overrides, each an arm; a list within it is
    one arm. Lists in `values`, such as `seed=[0, 1]`, are swept over. The same call again runs what is missing. Raises
    ValueError with the sweep's message where it is refused or a run failed.
    """
    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.run_folders import load_sweep as read
    from grpo_lab.analysis.tables import Tables

    words = _words(overrides, values, swept=True)
    words += [f"+experiments={experiment}"] if experiment else []
    for key, additions in (("add", add), ("leave_one_out", leave_one_out)):
        arms = [additions] if isinstance(additions, str) else additions
        listed = ",".join(arm if isinstance(arm, str) else f"[{','.join(arm)}]" for arm in arms)
        words += [f"{key}=[{listed}]"] if listed else []
    words += [*_of_grader("reward", reward, words), *_of_grader("verifier", verifier, words)]
    lines = _printing([sys.executable, "-m", "grpo_lab.train", "-m", *words])
    names = [found[1] for line in lines if (found := _RECORDED.fullmatch(line))]
    if not names:
        raise ValueError("this command started no sweep, as a dry run does not, so it has no tables")
    data = read(_runs_dir(words), names[-1])
    return Tables(data, final_values(data))


def load(folder: str | Path) -> Run:
    """The run in `folder`, such as `runs/dr_grpo,world=tiny/seed=1`. Raises ValueError where there is none."""
    return Run(Path(folder).expanduser().absolute())


def load_sweep(name: str, runs_dir: str | Path = "runs") -> Tables:
    """The tables of a sweep, from its runs or, where they hold more, from the saved data in ./experiments.

    A sweep that is in neither is looked for in the data of the repository that this package is installed from. Prints
    which, where it is not the runs.
    """
    from grpo_lab.analysis.sources.run_folders import recorded_names
    from grpo_lab.analysis.tables import load as load_tables
    from grpo_lab.config.folders import data_of, experiments_folder

    runs = str(Path(runs_dir).expanduser()) if "://" not in str(runs_dir) else str(runs_dir)
    own = "://" in runs or (Path(runs).is_dir() and name in recorded_names(Path(runs))) or data_of(name).is_dir()
    tables = load_tables(name, runs, None if own else data_of(name, experiments_folder()))
    if tables.data.notice:
        say(tables.data.notice)
    return tables


def compare(runs: Sequence[Run] | Mapping[str, Sequence[Run]], control: str) -> pd.DataFrame:
    """Differences of every arm from `control`: a row per arm and metric with mean, low, high, n and not_reported.

    `runs` are arms by name, or a list in which runs of one name are an arm. Differences are of final values at the
    smallest final number of sampled tokens, paired by seed over n pairs, with 95% CIs; `not_reported` says why there is
    no interval. Runs that are not finished do not count. Raises ValueError for a control that is no arm, two runs of
    an arm with one seed, an arm without a finished run or a seed of the control, and runs evaluated differently.
    """
    import pandas as pd

    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.run_folders import read_runs
    from grpo_lab.analysis.sources.sweep_data import assemble
    from grpo_lab.tracking.sweep_record import RunEntry, SweepRecord

    arms = dict(runs) if isinstance(runs, Mapping) else _by_name(runs)
    if control not in arms:
        raise ValueError(f"control must be one of the arms, got {control!r}: there are {', '.join(map(repr, arms))}")
    ordered = [control, *(arm for arm in arms if arm != control)]
    entries = [RunEntry(arm, "", int(run.record["seed"]), str(run.folder)) for arm in ordered for run in arms[arm]]
    if len({(entry.arm, entry.seed) for entry in entries}) < len(entries):
        raise ValueError("an arm has two runs with one seed: give the arms names, as {name: runs}")
    record = SweepRecord("comparison", "", None, (), (), None, None, entries)
    data = assemble(record, read_runs(Path("/"), entries, None), "run folders")
    _require_comparable(data.finished, ordered, {arm: [run.status for run in arms[arm]] for arm in ordered})
    finals = final_values(data)
    rows = []
    for arm in ordered[1:]:
        for metric in (name for name in map(str, finals.values) if "/" in name and not name.startswith(_NO_EFFECTS)):
            found = finals.difference("", arm, control, metric)
            if found.n:
                rows.append([arm, metric, found.mean, found.low, found.high, found.n, found.why])
    return pd.DataFrame(rows, columns=["arm", "metric", "mean", "low", "high", "n", "not_reported"])


def _require_comparable(finished: pd.DataFrame, arms: Sequence[str], statuses: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError where an arm shares no finished seed with the control, or runs were evaluated differently."""
    seeds = {arm: set(finished.loc[finished["arm"] == arm, "seed"]) for arm in arms}
    for arm in arms:
        if not seeds[arm] & seeds[arms[0]]:
            raise ValueError(
                f"{arm} and the control {arms[0]} have no finished runs of one seed: {arm} has runs that are "
                f"{', '.join(statuses[arm]) or 'none'}, the control {', '.join(statuses[arms[0]]) or 'none'}"
            )
    remedy = "compare runs of one environment"
    if finished["protocol"].nunique() > 1:
        raise ValueError(f"some runs were evaluated with other questions or graders than others: {remedy}")
    if (finished.groupby("seed")["base"].nunique() > 1).any():
        raise ValueError(f"some runs of one seed start from different base models: {remedy} and base model")


def _by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.name, []).append(run)
    return arms


def _makes_several(word: str) -> bool:
    """True for an override that only a sweep can have."""
    if word.partition("=")[0].lstrip("+") in ("add", "leave_one_out", "experiments"):
        return True
    try:
        return OverridesParser.create().parse_override(word).is_sweep_override()
    except HydraException:  # composing says what is wrong with it
        return False


def _words(overrides: Sequence[str], values: Mapping[str, Any], swept: bool = False) -> list[str]:
    """Overrides as the command line has them; a list of `swept` values is swept over."""
    words = list(overrides)
    for key, value in values.items():
        several = swept and isinstance(value, (list, tuple))
        if several and not value:
            raise ValueError(f"{key} is an empty list: give the values to sweep over")
        words.append(f"{key}={','.join(map(_value, value)) if several else _value(value)}")
    return words


def _value(value: Any) -> str:
    """A Python object as Hydra parses it: a str stays a str, also "null" or "1e3"."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(one)}" for key, one in value.items()) + "}"
    text = str(value)
    if not isinstance(value, (str, Path)):
        return text
    with suppress(HydraException):
        if OverridesParser.create().parse_override(f"key={text}").value() == text:
            return text
    return QuotedString(text, Quote.single).with_quotes()


def _runs_dir(words: Sequence[str]) -> Path:
    """Where the run or sweep of these overrides goes."""
    from grpo_lab.config.hydra_setup import compose_config

    own = [word for word in words if word.startswith("runs_dir=")]
    return Path(compose_config(own)["runs_dir"]).expanduser().absolute()


def _of_grader(slot: str, grader: GraderLike, words: Sequence[str]) -> list[str]:
    """The overrides that make it the reward or the verifier."""
    if grader is None:
        return []
    if isinstance(grader, str) and ":" not in grader:
        return [f"{slot}={grader}"]
    place = grader if isinstance(grader, str) else _place_of(slot, grader, words)
    return [f"{slot}=function", f"{slot}.path={_value(place)}"]


def _place_of(slot: str, grader: Callable[..., float], words: Sequence[str]) -> str:
    """`FILE:NAME` or `package.module:NAME` of the function: its module where it can be imported, else a saved file.

    Raises ValueError with a remedy for what cannot be found by a name.
    """
    name = getattr(grader, "__qualname__", repr(grader))
    remedy = f"write it to a file and pass {slot}='my_{slot}s.py:NAME'"
    if not inspect.isfunction(grader) or not name.isidentifier():
        raise ValueError(f"{slot} must be a function defined with def at the top level, got {name}: {remedy}")
    if grader.__module__ == "__main__":
        return f"{_saved(grader, name, _runs_dir(words) / 'rewards', remedy)}:{name}"
    module = sys.modules[grader.__module__]
    if getattr(module, name, None) is not grader:
        raise ValueError(f"{grader.__module__} has no {name} that is this function, as after a decorator: {remedy}")
    if module.__package__:
        return f"{module.__name__}:{name}"
    return f"{Path(str(module.__file__)).absolute()}:{name}"


def _saved(reward: Callable[..., float], name: str, folder: Path, remedy: str) -> Path:
    """A file in `folder` with the source of a function of a notebook or script.

    Its name holds a hash of the source, so that a run is resumed with the function it began with.
    """
    try:
        source = textwrap.dedent(inspect.getsource(reward))
    except (OSError, TypeError) as error:
        raise ValueError(f"the source of {name} cannot be read ({error}): {remedy}") from error
    if outside := sorted(_names_outside(source) - {name}):
        raise ValueError(
            f"{name} uses {', '.join(outside)}, defined outside of it: import or define that within it, or {remedy}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    if not path.exists():
        atomic_write(path, source)
    return path


def _names_outside(source: str) -> set[str]:
    """Names that the code reads from its module and that are no builtins, in every function within it."""
    names: set[str] = set()
    codes = [compile(source, "reward", "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        read = (one for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        names |= {str(one.argval) for one in read}
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return names - set(vars(builtins))


def _printing(command: Sequence[str]) -> list[str]:
    """Run a command, print its lines as they come, in a notebook too, and return them.

    An interrupt goes to the command, which saves what it does. Raises ValueError with its error where it fails.
    """
    lines: list[str] = []
    interrupted = False
    environment = {name: value for name, value in os.environ.items() if name not in _COLOURS}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        while True:
            try:
                if not (line := process.stdout.readline()):
                    break
                lines.append(line.rstrip())
                say(lines[-1])
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
        process.wait()
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode:
        first = max((place for place, line in enumerate(lines) if line.startswith("error:")), default=len(lines) - 1)
        raise ValueError("\n".join(lines[first:]).removeprefix("error: ") or f"exit code {process.returncode}")
    return lines
