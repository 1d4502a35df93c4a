# pyright: reportMissingImports=false
# vLLM is an installation of its own, and not there where types are checked.
"""The vLLM engine in a process of its own: it draws while the learner trains, on another CPU core or another GPU.

vLLM's `AsyncLLM` connects the two: its front end runs in a thread of this process, its core and the model in the
other. As in vllm.py, vLLM is imported when a session opens, and its changes to this process are undone.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from grpo_lab.checks import require_field, require_positive
from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import is_elsewhere
from grpo_lab.engines.vllm_common import (
    FOLDER,
    SHOWN,
    TRAINER,
    VllmEngine,
    last_error,
    process_kept,
    remedy,
    set_defaults_of_vllm,
)
from grpo_lab.engines.vllm_session import VllmProcessSession
from grpo_lab.engines.vllm_weights import FileTransfer, NcclTransfer, roomy_folder, taken_port
from grpo_lab.policy.model_folder import stop_token_ids, weight_names
from grpo_lab.tricks.precision import Precision

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_WORKER = "grpo_lab.engines.vllm_worker"


@dataclass(frozen=True)
class VllmProcess(VllmEngine):
    """vLLM in its own process: on its own CPU cores, or on a GPU that is not the learner's.

    New weights are sent through a file, or through NCCL with a `port` if both sides are on GPUs. NCCL and everything
    else on GPUs is written from vLLM 0.32's source and not yet measured.
    """

    threads: int  # CPU threads of the engine, in addition to the run's `threads` for the learner
    device_index: int  # the engine's GPU among those that this process sees; ignored on the CPU
    port: int | None  # local port over which learner and engine connect for NCCL; null: weights go through a file

    option: ClassVar[str] = "vllm_process"
    streams: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "threads")
        require_field(self.device_index >= 0, self, "device_index", "0 or more")
        require_field(self.port is None or 1024 <= self.port < 65536, self, "port", "from 1024 to 65535, or null")

    def missing(self) -> str | None:
        if reason := super().missing():
            return reason
        if is_elsewhere() or not torch.cuda.is_available():
            return None
        if (last := self._gpus[-1]) >= (seen := torch.cuda.device_count()):
            return (
                f"engine.device_index={self.device_index} and engine.tensor_parallel={self.tensor_parallel} need CUDA "
                f"device {last}, but torch sees {seen} CUDA devices: lower them, or choose engine=vllm, which shares "
                "the learner's GPU"
            )
        if taken := set(self._gpus) & set(range(ranks.local_number())) - {ranks.local_rank()}:
            return (
                f"engine.device_index={self.device_index} puts an engine on CUDA device {min(taken)}, the learner's of "
                f"another process: set it to {ranks.local_number()}, or to 0 with engine.port=null, so that each "
                "engine shares its learner's GPU"
            )
        return None if self.port is None else taken_port(self.port + ranks.local_rank())

    @property
    def _gpus(self) -> list[int]:
        """This rank's GPUs for sampling: `tensor_parallel` of them, after those of the ranks before it here."""
        first = self.device_index + ranks.local_rank() * self.tensor_parallel
        return list(range(first, first + self.tensor_parallel))

    def open(self, folder: Path, precision: Precision, device: torch.device) -> VllmProcessSession:
        on_gpu = device.type == "cuda"
        port = None if self.port is None or not on_gpu else self.port + ranks.local_rank()  # NCCL: GPU to GPU
        if port is not None and (device.index or 0) in self._gpus:
            raise ValueError(
                f"engine.device_index={self.device_index} is the learner's GPU, and NCCL takes one side a GPU: give "
                "the engine another GPU, or engine.port=null, which sends weights by a file"
            )
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        # The learner's weights are fp32; those in the folder may be half that size. Every rank here writes a file.
        chosen = roomy_folder(2 * size * ranks.local_number(), Path(tempfile.gettempdir()))
        shared = Path(tempfile.mkdtemp(prefix="grpo_lab_", dir=chosen))
        arguments = self.engine_arguments(folder, precision, device) | {
            "worker_extension_cls": f"{_WORKER}.WeightReader",
            **({"device_ids": self._gpus} if on_gpu else {}),
        }
        try:
            with (
                interrupts_heard(),
                process_kept(),
                environment_of_the_engine(self.threads, shared),
                main_left_alone(),
                sigint_blocked(),
            ):
                session = VllmProcessSession(
                    _start(arguments, port is not None, shared), stop_token_ids(folder), weight_names(folder), shared
                )
        except BaseException:
            shutil.rmtree(shared, ignore_errors=True)
            raise
        try:
            if port is not None:
                workers = session.engine.vllm_config.parallel_config.world_size
                session.transfer = NcclTransfer(session.remote, device, port, workers)
            else:
                session.transfer = FileTransfer(session.remote, shared)
        except BaseException:
            session.close()
            raise
        return session


@contextmanager
def environment_of_the_engine(threads: int, shared: Path) -> Iterator[None]:
    """Set environment variables for a process started in this block; afterwards restore all, also those vLLM sets."""
    before = dict(os.environ)
    for name in ranks.VARIABLES:
        os.environ.pop(name, None)  # they are of the learner's processes
    if os.environ.get("VLLM_LOGGING_LEVEL") in ("INFO", "DEBUG"):
        os.environ[SHOWN] = "1"
    set_defaults_of_vllm()
    os.environ |= {
        # Keep the model in the engine's process itself: one more process would busy-wait on a core.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",  # vLLM's warnings about its own code
        TRAINER: str(os.getpid()),
        FOLDER: str(shared),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the opening; vLLM waits for its process in ZeroMQ calls, which swallow signals."""
    came = []

    def note(number: int, frame: FrameType | None) -> None:
        engines = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
        if not engines:
            before[number](number, frame)
        came.append(number)
        for engine in engines:
            engine.kill()

    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        handled = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in handled.items() if callable(handler)}
    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            before[came[0]](came[0], None)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT in processes started here: a terminal sends Ctrl-C to them too, and the run still needs them."""
    start = BaseProcess.start
    resource_tracker.ensure_running()  # `start` would start it, which unblocks the signal

    def start_blocked(self: BaseProcess) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a new process inherits
        try:
            start(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    BaseProcess.start = start_blocked
    try:
        yield
    finally:
        BaseProcess.start = start


@contextmanager
def main_left_alone() -> Iterator[None]:
    """Keep a process started in this block from importing this one's main module, which it does not need.

    The import would take seconds, and would run a script without a `__name__` guard a second time.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start(arguments: dict[str, Any], by_nccl: bool, shared: Path) -> AsyncLLM:
    """Start the engine's process. Raises ValueError with a remedy."""
    try:
        import vllm.envs as envs
        from vllm.config import WeightTransferConfig
        from vllm.config.logging import LoggingConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if by_nccl:
            arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
        envs.disable_envs_cache()  # filled by an engine that this process opened before
        level = os.environ["VLLM_LOGGING_LEVEL"]
        # The end of the engine is reported by our own error, which quotes its log.
        quiet = LoggingConfig(log_level="CRITICAL" if level == "ERROR" else level)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(logging_config=quiet, **arguments))
    except Exception as error:
        text = last_error(shared) or str(error)
        raise ValueError(f"vLLM cannot open {arguments['model']}: {text}\n{remedy(text)}") from error
