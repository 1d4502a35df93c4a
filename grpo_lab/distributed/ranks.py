"""The processes of one run, as torchrun starts them: which of them this is, and the messages between them.

Every rank goes through the same steps with the same records. They differ in three things only: which requests they
sample, which microbatches they compute, and that only the first rank grades, writes and prints. Without torchrun there
is one rank, and every function here does nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpo_lab.distributed.watchdog import free_main
from grpo_lab.types import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

# A judge, a base model or a measurement may keep the first rank busy for hours. When a process dies, torchrun ends the
# others at once, so nothing waits for this long in vain.
_PATIENCE = timedelta(days=1)
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_BLAMED, _REASON = "grpo_lab/blamed", "grpo_lab/reason"
VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
)  # fmt: skip


class OtherRankFailed(RuntimeError):
    """Another process of the run failed first; the message is its reason."""


@dataclass
class _Group:
    """The open process group. `aside` is for threads that talk while the main one does; `blamed` is the first error."""

    rank: int
    number: int
    store: Store
    mesh: DeviceMesh
    aside: ProcessGroup
    blamed: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)  # it needs no other rank any more


_open: _Group | None = None
_planned = 1  # how many processes a sweep is going to start for each of its runs
_solo = threading.local()  # .alone: whether this thread is within a call of `alone`


def launched() -> int:
    """How many processes torchrun started for this run, or is going to (see `planned`). Needs no open group."""
    return int(os.environ["WORLD_SIZE"]) if _TORCHRUN in os.environ else _planned


@contextmanager
def planned(processes: int) -> Iterator[None]:
    """Check runs as they are checked where that number of processes shares each of them."""
    global _planned
    before, _planned = _planned, processes
    try:
        yield
    finally:
        _planned = before


def local_rank() -> int:
    """Which of the processes on this machine this is, from 0."""
    return int(os.environ["LOCAL_RANK"]) if _TORCHRUN in os.environ else 0


def local_number() -> int:
    """How many of the processes are on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if _TORCHRUN in os.environ else _planned


def number() -> int:
    """How many ranks work together in the calling code."""
    return 1 if _open is None or getattr(_solo, "alone", False) else _open.number


def rank() -> int:
    """Which of them this is, from 0."""
    return 0 if _open is None else _open.rank


def is_first() -> bool:
    """True if this rank writes and prints."""
    return rank() == 0


@contextmanager
def opened(choose: Callable[[], torch.device]) -> Iterator[None]:
    """The process group of the run: gloo for what is on the CPU, NCCL for what is on GPUs; none without torchrun.

    `choose` gives this rank's device, and is not asked without torchrun: it would load torch.
    """
    global _open
    if launched() == 1:
        yield
        return
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    device = choose()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, mine, ranks = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    within = PrefixStore("grpo_lab/group", store)
    dist.init_process_group(backend, store=within, rank=mine, world_size=ranks, timeout=_PATIENCE)
    aside = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(aside, dist.ProcessGroup), "every rank is a member"
    _open = group = _Group(mine, ranks, store, init_device_mesh(device.type, (ranks,)), aside)
    if device.type == "cuda":
        watch(lambda: group.mesh.get_group()._get_backend(device).abort())
    # After an error the process ends with its group open: to close it would wait for the others.
    yield
    group.ended.set()
    dist.barrier(group=aside)
    dist.destroy_process_group()
    _open = None


def watch(abort: Callable[[], None]) -> None:
    """End by `abort` what this rank's main thread waits for, if another rank has failed and the wait goes on."""
    assert _open is not None, "there is one rank"
    free_main(_open.store, _REASON, _open.ended, abort)


def mesh() -> DeviceMesh:
    """All ranks as one dimension, over which weights are sharded."""
    assert _open is not None, "there is one rank"
    return _open.mesh


def _channel() -> ProcessGroup | None:
    """The group of the calling thread: calls of two threads must not mix."""
    assert _open is not None, "there is one rank"
    return None if threading.current_thread() is threading.main_thread() else _open.aside


def gathered(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks."""
    if number() == 1:
        return [value]
    found: list[Any] = [None] * number()
    torch.distributed.all_gather_object(found, value, group=_channel())
    return found


def from_first(value: T) -> T:
    """The first rank's value."""
    if number() == 1:
        return value
    held = [value]
    torch.distributed.broadcast_object_list(held, src=0, group=_channel())
    return held[0]


def alone(make: Callable[[], T]) -> T:
    """Return what `make` returns, called as a single rank."""
    before = getattr(_solo, "alone", False)
    _solo.alone = True
    try:
        return make()
    finally:
        _solo.alone = before


def on_first(make: Callable[[], T]) -> T:
    """Return what `make` returns on the first rank; only that rank calls it, as a single rank."""
    if number() == 1:
        return make()
    made: Any = alone(make) if is_first() else None
    return from_first(made)


def added_up(values: Tensor) -> Tensor:
    """The sum over ranks of a tensor on the CPU; the tensor itself with one rank."""
    if number() == 1:
        return values
    total = values.contiguous().clone()
    torch.distributed.all_reduce(total, group=_channel())
    return total


def dealt(items: int) -> list[tuple[int, bool]]:
    """Which of `items` passes this rank computes, in turn, and whether each counts.

    Sharded weights are gathered in every pass, so all ranks make equally many: a rank with fewer repeats the last one,
    and its result does not count.
    """
    rounds = -(-items // number())
    places = [(turn * number() + rank() if number() > 1 else turn) for turn in range(rounds)]
    return [(min(place, items - 1), place < items) for place in places]


def in_order(items: int, own: Sequence[T]) -> list[T]:
    """The results of all passes in their order; `own` are those of this rank, as `dealt` gave them."""
    if number() == 1:
        return list(own)
    parts = gathered([one for one, (_, counts) in zip(own, dealt(items)) if counts])
    return [parts[place % number()][place // number()] for place in range(items)]


def agree(what: str, value: Callable[[], Any]) -> None:
    """Raise ValueError unless all ranks have the same value of `what`; with one rank it is not asked for."""
    found = [] if number() == 1 else gathered(value())
    for place, one in enumerate(found):
        if one != found[0]:
            here, there = _unlike(one, found[0])
            raise ValueError(
                f"rank {place} has {what} {here}, and rank 0 has {there}: start the same command on every machine of "
                "the run, with the same files and packages"
            )


def _unlike(one: Any, other: Any) -> tuple[Any, Any]:
    """Two values that differ; of mappings the first entries that do."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
        return f"{key}={one.get(key)}", f"{key}={other.get(key)}"
    return one, other


def cause_of(error: BaseException) -> BaseException:
    """The error that ended the run: this one, or that of the rank which failed first.

    When one rank fails, the others fail too, in a call that waits for it, by torchrun's signal, or as `watch` has it.
    """
    if _open is None or _open.blamed is error:
        return error
    _open.ended.set()
    try:
        if _open.blamed is None and _open.store.add(_BLAMED, 1) == 1:
            _open.blamed = error
            text = f"rank {_open.rank} of {_open.number}: {type(error).__name__}: {error}"
            _open.store.set(_REASON, "" if isinstance(error, KeyboardInterrupt) else text)
            return error
        reason = _open.store.get(_REASON).decode()
        return OtherRankFailed(reason) if reason else KeyboardInterrupt()
    except (RuntimeError, OSError):  # torchrun, which keeps the store, is gone
        return error
