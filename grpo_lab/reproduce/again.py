"""A recorded run in a fresh process: `python -m grpo_lab.reproduce.again RUN RUNS_DIR` starts or resumes it there."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import choose_device
from grpo_lab.reproduce.record import RunRecord, device_name, read_record
from grpo_lab.sweeps.child import errors_reported, follow_parent, hear_signals


def configured(record: RunRecord, runs_dir: Path) -> DictConfig:
    """The record's configuration, to run in another folder on the kind of device that it had."""
    config = record.config.copy()
    config.runs_dir, config.device = str(runs_dir), device_name(record)
    return config


def main() -> None:
    """Run it; errors as `grpo_lab.train` says them."""
    follow_parent()
    hear_signals()
    folder, runs_dir = map(Path, sys.argv[1:])
    with errors_reported():
        record = read_record(folder)
        with ranks.opened(lambda: choose_device(device_name(record))):
            from grpo_lab.loop import start

            start(configured(record, runs_dir), record.name, record.described["choices"], sys.argv)


if __name__ == "__main__":
    main()
