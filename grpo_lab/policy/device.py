"""The run's device, and the torch settings that its exact results depend on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_lab.policy import ranks

_elsewhere = False  # whether the runs of a sweep are going to be on other machines than this one


@contextmanager
def planned_elsewhere(there: bool) -> Iterator[None]:
    """Within, this machine is not asked for the devices of runs that are going to be on others."""
    global _elsewhere
    before, _elsewhere = _elsewhere, there
    try:
        yield
    finally:
        _elsewhere = before


def is_elsewhere() -> bool:
    """Whether the runs that are composed now are going to be on other machines."""
    return _elsewhere


def device_kind(name: str) -> str | None:
    """`cpu` or `cuda`, which a run with this device will have; None for `auto` on another machine, which will tell.

    Raises ValueError for a device that this machine lacks, if the run is to be here.
    """
    if not _elsewhere:
        return choose_device(name).type
    return None if name == "auto" else name.partition(":")[0]


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is the first CUDA device, else the CPU. Raises ValueError if it is missing.

    Of several processes that torchrun started on a machine, each takes the CUDA device of its number there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.launched() > 1:
        if name not in ("cpu", "cuda"):
            raise ValueError(
                f"device={name} is one device, and torchrun started {ranks.launched()} processes: use cuda"
            )
        name = f"cuda:{ranks.local_rank()}" if name == "cuda" else name
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name} is not supported: use cpu, cuda, cuda:<number> or auto")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name}, but torch sees {torch.cuda.device_count()} CUDA devices: use device=cpu or device=auto"
        )
    return device


def prepare_torch(name: str, threads: int) -> torch.device:
    """Set the thread count and deterministic kernels, so that results are bitwise reproducible; return the device."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory with NaN finds kernels that read what nothing wrote, and costs up to a tenth of a step.
    deterministic = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] torch adds it late
    # cuDNN builds a plan for every new shape, and a decoding step brings one with every token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return choose_device(name)
