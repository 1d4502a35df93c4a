"""Small run folders as the loop leaves them, for trackers to mirror, and questions to a store of MLflow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_log import RunLog


def log_steps(log: RunLog, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        log.write_step(
            step,
            {"train/loss": factor / (step + 1), "budget/sampled_tokens": 10**15 + step},
            {"generate": 0.25, "budget/device_seconds": float(step)},
        )


def write_run_json(folder: Path, uri: str | None, **changes: object) -> None:
    """What the loop writes into a run folder before its first step."""
    run = {
        "name": f"grpo-{folder.name}",
        "recipe": "grpo",
        "seed": 3,
        "choices": {"baseline": "group_mean", "kl": "none"},
        "config": {"optimizer.lr": 1e-3, "note": "x" * 900, **{f"numbers.n{i}": i for i in range(120)}},
        "tracking": {"uri": uri, "experiment": "grpo_lab"} if uri else None,
        "commit": "0" * 40,
        "dirty": False,
        "sweep_folder": None,
        "tags": {"sweep": "s1"},
        "run_key": f"key-{folder.name}",
    }
    write_json(folder / "run.json", {**run, **changes})


def query(database: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()
