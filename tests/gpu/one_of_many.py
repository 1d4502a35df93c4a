"""One of the processes of many.py: trains until it is killed and writes down when each step ended.

python tests/gpu/one_of_many.py FOLDER INDEX OVERRIDE...
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from findings import ROOT
from lab_side import QUIET

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.distributed.device import prepare_torch
from grpo_lab.loop import open_run, train
from grpo_lab.run.recorder import Recorder
from grpo_lab.tracking.progress import RunProgress
from grpo_lab.tracking.run_log import RunLog


@dataclass
class Stamps(Recorder):
    """A recorder that also writes when each step ended."""

    folder: Path = ROOT
    index: int = 0

    def record(self, *step: Any) -> None:
        super().record(*step)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        with (self.folder / f"{self.index}.steps").open("a") as sink:
            sink.write(f"{time.monotonic()}\n")


def main() -> None:
    folder, index = Path(sys.argv[1]), int(sys.argv[2])
    overrides = [*sys.argv[3:], *QUIET, f"seed={index}", "budget=steps", "budget.amount=1000000"]
    run = to_run(compose_config(overrides))
    device = prepare_torch(run.device, run.threads)
    with RunLog(folder / f"run{index}") as log, RunProgress(f"run {index}") as progress:
        progress.show = lambda *_: None  # many.py counts the steps
        recorder = Stamps(run.record_settings, log, progress, "benchmark", folder=folder, index=index)
        with open_run(run, device) as (state, queue, _):
            train(run, state, queue, recorder)


if __name__ == "__main__":
    main()
