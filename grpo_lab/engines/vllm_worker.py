"""Code inside vLLM's own process: it ends with the trainer, logs to a file, and reads new weights from a file.

vLLM imports this module there, as its worker extension, before it loads the model.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from safetensors import safe_open

from grpo_lab.engines.vllm_common import FOLDER, LOG, SHOWN, TRAINER
from grpo_lab.types import Tensor

_LOOK_SECONDS = 1.0


class WeightReader:
    """Methods added to vLLM's worker."""

    reload_weights: Callable[..., None]  # the worker's own

    def read_weights(self, path: str) -> None:
        """Load the weights from a file that `write_weights` wrote."""
        with safe_open(path, framework="pt") as opened:
            names, aliases = list(opened.keys()), opened.metadata() or {}

            def weights() -> Iterator[tuple[str, Tensor]]:
                for name in names:
                    yield name, opened.get_tensor(name)
                for name, source in aliases.items():
                    yield name, opened.get_tensor(source)

            self.reload_weights(weights_iterator=weights(), is_checkpoint_format=True)


def _alive(trainer: int) -> bool:
    """Whether that process runs; a zombie does not."""
    try:
        return psutil.Process(trainer).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _end_with(trainer: int, folder: Path) -> None:
    """End this process after the trainer's end: vLLM's engine does not notice a killed trainer and keeps its memory."""
    while _alive(trainer):
        time.sleep(_LOOK_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _begin(trainer: int, folder: Path) -> None:
    threading.Thread(target=_end_with, args=(trainer, folder), name="trainer-watch", daemon=True).start()
    if SHOWN not in os.environ:
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)


if TRAINER in os.environ:
    _begin(int(os.environ[TRAINER]), Path(os.environ[FOLDER]))
