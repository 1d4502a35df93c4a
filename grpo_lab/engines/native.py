"""The native engine's settings; native_session.py samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from grpo_lab.engines.base import Engine
from grpo_lab.tricks.precision import Precision

if TYPE_CHECKING:
    from grpo_lab.engines.native_session import NativeSession


@dataclass(frozen=True)
class Native(Engine):
    """torch and transformers in this process. At most `max_rows` responses decode together.

    `cuda_graphs`: record the decoding step and replay it (native_graphs.py); needs a GPU.
    """

    cuda_graphs: bool = False

    streams: ClassVar[bool] = True
    simulates_fp8: ClassVar[bool] = True

    def refusal(self, folder: Path, streams: bool) -> str | None:
        from grpo_lab.engines.native_cache import refusal

        return refusal(folder, streams)

    def open(self, folder: Path, precision: Precision, device: torch.device) -> NativeSession:
        from grpo_lab.engines.native_session import open_session

        return open_session(folder, precision, device, self.max_rows, self.cuda_graphs)
