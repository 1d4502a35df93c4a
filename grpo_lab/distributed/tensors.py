"""Tensors that may be split over the ranks of a run: whole, and the part that each rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpo_lab.distributed import ranks
from grpo_lab.types import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be split over the ranks; all of them must ask for it."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def local(tensor: Tensor) -> Tensor:
    """The local part of a tensor that may be sharded."""
    return getattr(tensor, "to_local", lambda: tensor)()


def own_rows(whole: Tensor) -> Tensor:
    """A view of this rank's rows, those that FSDP2 gives it."""
    size = -(-len(whole) // ranks.number())
    return whole[ranks.rank() * size :][:size]


def split(rows: Tensor, shape: torch.Size) -> DTensor:
    """A tensor of this shape, of which each rank has its `own_rows`."""
    from torch.distributed.tensor import DTensor, Shard  # not above: it would load torch at once

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, ranks.mesh(), [Shard(0)], run_check=False, shape=shape, stride=stride)


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, split as `target` is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(target, DTensor):
        return tensor
    return split(own_rows(tensor).to(target.device), tensor.shape)
