"""What torch's dispatcher is asked for: operations, and the reads that would make a CPU wait for its GPU.

A view makes no kernel, so `kernels` leaves views out. On a GPU each kernel is one launch or a few. Autograd's own work
is seen too: `with Operations() as seen` around forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their result depends on numbers, so a CPU that wants it has to wait: item, tolist and bool end in the first.
READS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.equal",
    "aten.is_nonzero",
)


class Operations(TorchDispatchMode):
    """Counts what runs within: `all` operations, `views`, `casts` from one type to another, and `reads` of numbers.

    `bytes` is what operations read and write, views left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.views = self.casts = self.reads = self.bytes = 0

    @property
    def all(self) -> int:
        return self.names.total()

    @property
    def kernels(self) -> int:
        return self.all - self.views

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        name = str(function.overloadpacket)
        self.names[name] += 1
        is_view = function.is_view or name in ("aten._unsafe_view", "aten.detach")
        self.views += is_view
        if not is_view:
            self.bytes += sum(one.nbytes for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor))
        self.casts += name == "aten._to_copy"
        self.reads += name in READS or _reads_a_mask(name, args)
        return result


def _reads_a_mask(name: str, args: tuple[Any, ...]) -> bool:
    """A boolean index is turned into positions first, whose number has to be known."""
    index = name in ("aten.index", "aten.index_put", "aten.index_put_")
    return index and any(isinstance(one, Tensor) and one.dtype is torch.bool for one in tree_leaves(args[1]))
