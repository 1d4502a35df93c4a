"""The arithmetic base model built on a GPU, for sizes that would take a CPU many minutes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_lab.checks import require
from grpo_lab.tasks.warm_start import ArithmeticBase


@dataclass(frozen=True)
class GpuBase(ArithmeticBase):
    """The recipe of ArithmeticBase on `device`. The device is part of the cache key, since results differ in bits."""

    device: str

    def __post_init__(self) -> None:
        super().__post_init__()
        known = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        require(known, "device", self.device, "cpu, cuda or cuda:<number>", "it is where the base is built")

    @property
    def place(self) -> str:
        return self.device
