# pyright: reportMissingImports=false
# vLLM is an installation of its own, and not there where types are checked.
"""How the learner's weights reach an engine in another process: through a file, or from card to card by NCCL."""

from __future__ import annotations

import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_lab.types import Tensor

_LOCAL = "127.0.0.1"

# A method of vLLM's worker, its arguments by name; it returns when the worker is done.
Remote = Callable[[str, dict[str, Any]], None]


class Transfer(ABC):
    """Hands weights over while the engine is paused."""

    @abstractmethod
    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Return when the engine holds these weights, tied ones under each of their names."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what connects both sides."""


class FileTransfer(Transfer):
    """A file that the engine maps and that is gone when it has read it; in memory where the folder is."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self.remote, self.folder = remote, folder

    def send(self, weights: Mapping[str, Tensor]) -> None:
        path = self.folder / "weights.safetensors"
        write_weights(weights, path)
        try:
            self.remote("read_weights", {"path": str(path)})
        finally:
            path.unlink()

    def close(self) -> None:
        """A file connects nothing."""


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file with each storage once; its metadata says which name stands for which other."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    from safetensors.torch import save_file

    save_file({name: weights[name].contiguous() for name in first.values()}, path, metadata=aliases)


def roomy_folder(size: int, usual: Path, memory: Path = Path("/dev/shm")) -> Path:
    """Where files of `size` bytes pass from process to process: in memory, if twice as much is free there."""
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * size:
        return memory
    return usual


def taken_port(port: int) -> str | None:
    """What to say where another process holds this port of this machine; None where it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOCAL, port))
        except OSError as error:
            return (
                f"engine.port={port}, over which weights go from card to card, cannot be used ({error.strerror}): "
                "choose a free one, one for each run on this machine, or engine.port=null, which sends them by a file"
            )
    return None


class NcclTransfer(Transfer):
    """vLLM's own broadcast from the learner's card to the engine's. Written from vLLM 0.32's source, not yet measured.

    Both sides meet at `port` of this machine. Raises ValueError where the port is taken.
    """

    def __init__(self, remote: Remote, device: torch.device, port: int, workers: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        if said := taken_port(port):
            raise ValueError(said)
        self.device, self.source = device, weight_source()
        with torch.cuda.device(device):
            self.engine = NCCLTrainerWeightTransferEngine.trainer_init(
                NCCLTrainerInitInfo(rank=0, master_address=_LOCAL, master_port=port, world_size=1 + workers),
                client=SyncClient(remote),
                source=self.source,
            )

    def send(self, weights: Mapping[str, Tensor]) -> None:
        self.source.weights = weights
        with torch.cuda.device(self.device):
            self.engine.send_weights()
        self.source.weights = {}

    def close(self) -> None:
        self.engine.shutdown()


class SyncClient:
    """vLLM's `VLLMWeightSyncClient`: the trainer's side of the broadcast tells the workers what to expect."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.remote("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.remote("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self.remote("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.remote("finish_weight_update", {})


def weight_source() -> Any:
    """vLLM's `WeightSource` over named tensors, under each of their names: a tied head is sent as well."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Named(WeightSource):
        weights: Mapping[str, Tensor]

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.weights.items()]

        def __iter__(self):
            return iter(self.weights.items())

    return Named()
