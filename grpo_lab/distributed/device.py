"""The run's device, transfers to and from it, and the torch settings that exact results depend on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from grpo_lab.distributed import ranks
from grpo_lab.types import Tensor

T = TypeVar("T")
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
    """True if the runs that are composed now are going to be on other machines."""
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


def on_device(record: T, device: torch.device) -> T:
    """A copy of `record` with all its tensors on `device`, in one transfer; the record itself if they are there.

    A record is a tensor, or a dataclass, mapping, list or tuple of records; its tensors are on one device and carry no
    graph. The CPU does not wait for a transfer to a GPU, and waits once for all that a GPU has to compute for one back.
    """
    tensors: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _swapped(record, noted)
    if all(tensor.device.type == device.type for tensor in tensors):
        return record
    arrived = iter(_transferred(tensors, device))
    return _swapped(record, lambda _: next(arrived))


def on_cpu(record: T) -> T:
    """`on_device` for the CPU."""
    return on_device(record, torch.device("cpu"))


def _swapped(value: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """A record with each tensor replaced, in a fixed order. Sequences of numbers, such as prompts, stay as they are."""
    if isinstance(value, torch.Tensor):
        return swap(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _swapped(getattr(value, one.name), swap) for one in fields(value)})
    if isinstance(value, Mapping):
        return {name: _swapped(one, swap) for name, one in value.items()}
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
        return type(value)(_swapped(one, swap) for one in value)
    return value


def _transferred(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors as parts of one buffer, which is copied whole."""
    # Wide types first: each then begins at a multiple of its own size, as a view of bytes has to.
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)
    parts = [tensors[place].reshape(-1).view(torch.uint8) for place in order]
    sizes = [len(part) for part in parts]
    source, to_gpu = tensors[0].device, device.type == "cuda"
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=source, pin_memory=to_gpu)
    torch.cat(parts, out=buffer)
    found = dict(zip(order, buffer.to(device, non_blocking=to_gpu).split(sizes)))
    return [found[place].view(tensor.dtype).view(tensor.shape) for place, tensor in enumerate(tensors)]
