"""Sweeps as tests start them, in a process of their own or in this one, and what they leave in their folders."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from processes import PATIENCE, alive, children_of, command_of, descendants_of

from grpo_lab.config.folders import conf_folder
from grpo_lab.sweeps.progress_display import ProgressDisplay
from grpo_lab.tracking.terminal import Terminal

WORLD = ["world=tiny", "tracking=none", "evaluation=brief"]


def multirun(*words: str, task: Callable[[DictConfig], Any] | None = None) -> Any:
    """Run the sweep of these overrides as `python -m grpo_lab.train` does below its argument parser.

    It works in this process, which spares an interpreter; its runs have theirs. Launchers of Hydra's own run `task`
    instead. Returns what the sweeper does.
    """
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return GlobalHydra.instance().hydra.multirun("config", task, list(words), with_log_configuration=False)


def command(runs: Path, *words: str, flag: str = "-m") -> list[str]:
    """The command of a sweep in the tiny world."""
    typed = [sys.executable, "-m", "grpo_lab.train", flag, *WORLD, f"runs_dir={runs}", *words]
    return [word for word in typed if word]


def sweep(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """It, run to its end."""
    return subprocess.run(command(runs, *words), capture_output=True, text=True, timeout=PATIENCE)


def sweep_from_here(runs: Path, *words: str) -> None:
    """The same from this process. Raises SystemExit."""
    multirun(*WORLD, f"runs_dir={runs}", *words)


@contextmanager
def started(runs: Path, *words: str, in_background: bool = False) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A sweep at work, and the ids of its runs, for the test to fill; what is left of them is killed at the end."""
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if in_background else []
    process = subprocess.Popen(
        [*shell, *command(runs, *words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    children: set[int] = set()
    try:
        yield process, children
    finally:
        for pid in (process.pid, *children, *runs_of(process.pid)):
            if alive(pid) and f"runs_dir={runs}" in command_of(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def runs_of(parent: int) -> dict[int, str]:
    """The processes that a sweep runs now: their commands by id.

    Just after the fork a child still is a copy of its parent, command and environment: of the sweep no run yet, of a
    run, which asks git and others, no further one.
    """
    commands = {pid: command_of(pid) for pid in descendants_of(parent)}
    own = command_of(parent)
    found = {pid: words for pid, words in commands.items() if "grpo_lab.train" in words and words != own}
    copies = {child for pid in found for child in children_of(pid)}
    return {pid: words for pid, words in found.items() if pid not in copies}


def lines_in(path: Path) -> int:
    """The complete lines of a file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def folder_of(runs: Path, truncation: str, seed: int, name: str = "evaluation=brief,world=tiny") -> Path:
    """The folder of a run of `truncation=...`."""
    (folder,) = runs.glob(f"plain,truncation={truncation},*{name}/seed={seed}")
    return folder


def finished(runs: Path) -> int:
    """How many runs have ended well."""
    return len(list(runs.glob("*/seed=*/DONE")))


def attempts(folder: Path) -> int:
    """How many processes have had the run in `folder`."""
    return (folder / "output.log").read_text().count("grpo_lab.train")


def quiet_board(total: int) -> ProgressDisplay:
    """A display of so many runs that shows nobody what it says."""
    return ProgressDisplay("probe", total, 0, Terminal(file=io.StringIO()))
