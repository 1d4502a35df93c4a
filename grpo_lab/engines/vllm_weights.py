# pyright: reportMissingImports=false
# vLLM is an installation of its own, and not there where types are checked.
"""Sends the learner's weights to an engine in another process: through a file, or from GPU to GPU by NCCL."""

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

# Calls a method of vLLM's worker with arguments by name; returns when the worker is done.
Remote = Callable[[str, dict[str, Any]], None]


class Transfer(ABC):
    """Sends weights while the engine is paused."""

    @abstractmethod
    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send weights, tied ones under each of their names; return when the engine holds them."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection between both sides."""


class FileTransfer(Transfer):
    """Sends weights through a file that the engine maps and that is then deleted; `folder` may be in memory."""

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
        """Nothing to close."""


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file with each tensor once; its metadata maps other names of a tied tensor to that one."""
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    from safetensors.torch import save_file

    save_file({name: weights[name].contiguous() for name in first.values()}, path, metadata=aliases)


def roomy_folder(size: int, usual: Path, memory: Path = Path("/dev/shm")) -> Path:
    """The folder for transfer files of `size` bytes: `memory` if it has more than twice as much free, else `usual`."""
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * size:
        return memory
    return usual


def taken_port(port: int) -> str | None:
    """An error message if this local port cannot be used, else None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOCAL, port))
        except OSError as error:
            return (
                f"engine.port={port}, over which weights go from GPU to GPU, cannot be used ({error.strerror}): "
                "choose a free one, one for each run on this machine, or engine.port=null, which sends them by a file"
            )
    return None


class NcclTransfer(Transfer):
    """vLLM's own broadcast from the learner's GPU to the engine's. Written from vLLM 0.32's source, not yet measured.

    Both sides connect at the local `port`. Raises ValueError if the port cannot be used.
    """

    def __init__(self, remote: Remote, device: torch.device, port: int, workers: int) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        if problem := taken_port(port):
            raise ValueError(problem)
        self.device, self.source = device, weight_source(device)
        with torch.cuda.device(device):
            self.engine = NCCLTrainerWeightTransferEngine.trainer_init(
                NCCLTrainerInitInfo(rank=0, master_address=_LOCAL, master_port=port, world_size=1 + workers),
                client=SyncClient(remote),
                source=self.source,
            )

    def send(self, weights: Mapping[str, Tensor]) -> None:
        self.source.weights = weights
        with torch.cuda.device(self.device):
            # vLLM packs on streams of its own, which do not wait for the one that computed the weights.
            torch.cuda.current_stream(self.device).synchronize()
            self.engine.send_weights()
        self.source.weights = {}

    def close(self) -> None:
        self.engine.shutdown()


class SyncClient:
    """vLLM's `VLLMWeightSyncClient`, through which the trainer's side of the broadcast calls the workers."""

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


def weight_source(device: torch.device) -> Any:
    """vLLM's `WeightSource` over named tensors, which NCCL needs on `device`: those on the CPU are moved one by one.

    A tied head is sent under its own name as well.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Named(WeightSource):
        weights: Mapping[str, Tensor]

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.weights.items()]

        def __iter__(self):
            return ((name, one.to(device)) for name, one in self.weights.items())

    return Named()
