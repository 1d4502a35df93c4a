"""Runs of a few steps in the tiny world: how they are started, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxtyping
import pandas as pd
import torch
from safetensors.torch import load_file

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.loop import start
from grpo_lab.tracking.run_log import RunLog

WORLD = ["world=tiny", "tracking=none"]
SMALL = [
    "evaluation=brief", "evaluation.initial_kl=false", "evaluation.probe_problems=16", "evaluation.every=1000",
    "evaluation.heldout_problems=16", "evaluation.downstream_problems=16", "optimizer.learning_rate=1e-3",
]  # fmt: skip


@contextmanager
def shapes_checked_for(steps: int) -> Iterator[None]:
    """Shapes are checked during the first steps of a run; what comes later repeats them in half the time."""
    write, before = RunLog.write_step, jaxtyping.config.jaxtyping_disable

    def counted(log: RunLog, step: int, *arguments: Any, **named: Any) -> None:
        left.append(step)
        if len(left) > steps:
            jaxtyping.config.update("jaxtyping_disable", True)
        write(log, step, *arguments, **named)

    left: list[int] = []
    RunLog.write_step = counted
    if not steps:
        jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        RunLog.write_step = write
        jaxtyping.config.update("jaxtyping_disable", before)


_tried: set[str] = set()  # what runs of this process have chosen


def run_in_process(folder: Path, *overrides: str, name: str = "run", checked: int | None = None) -> Path:
    """One run through the real entry below Hydra's command line; returns the run folder.

    `checked`: after how many lines of the log, the first of them before any step, shapes are checked no more; two where
    an option runs for the first time in this process, else none.
    """
    chosen = {"", *(word for word in overrides if "." not in word.partition("=")[0])}
    if checked is None:
        checked = 0 if chosen <= _tried else 2
        _tried.update(chosen)
    config, choices = compose_with_choices([*WORLD, f"runs_dir={folder}", *overrides])
    with shapes_checked_for(checked):
        return start(config, name, choices, ["test"])


def train_command(folder: Path, *overrides: str) -> list[str]:
    """The command of such a run in a process of its own."""
    return [sys.executable, "-m", "grpo_lab.train", *WORLD, f"runs_dir={folder}", *overrides]


def command_line(*overrides: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """What the training command does with these overrides, wherever it stops."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_lab.train", *overrides],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **(env or {})},
    )


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics, that before the first step included."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of its last checkpoint."""
    newest = max((folder / "checkpoints").iterdir())
    return load_file(newest / "model.safetensors")


def same_ending(one: Path, other: Path) -> None:
    """Same bytes of metrics, same bits of weights, same answers."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    ours, theirs = final_weights(one), final_weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for table in (one / "eval").iterdir():
        pd.testing.assert_frame_equal(pd.read_parquet(table), pd.read_parquet(other / "eval" / table.name))
