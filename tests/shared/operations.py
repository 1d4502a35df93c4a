"""What torch's dispatcher is asked for, on a CPU or the meta device: on a GPU each launch is a kernel or a few.

Autograd's own work is seen too: `with Operations() as seen` around forward and backward. In inference mode a composite
operation, such as `linear`, counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their result depends on numbers, so a CPU that wants it has to wait: item, tolist and bool end in the first.
READS = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "item",
}  # fmt: skip
COPIES = {"tolist", "numpy", "cpu"}  # to the host, past the dispatcher on a CPU
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class _Copies(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in COPIES:
            self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts by name what runs within: all operations, `launches`, which write to memory, and `reads` of numbers.

    `bytes` is what launches read and write, `elements` what they write, by type. `uploads` copy a number from the host,
    which a CUDA graph cannot record; not for use on a CPU. Nothing is counted in the forward of the model `without`.
    """

    def __init__(self, without: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.names, self.launches, self.uploads, self._reads = (Counter[str]() for _ in range(4))
        self.elements, self.bytes, self.paused, self._copies = Counter[torch.dtype](), 0, False, _Copies()
        self._without = without

    def __enter__(self) -> Operations:
        self._hooks = list[Any]()
        if self._without is not None:
            self._hooks += [self._without.register_forward_pre_hook(lambda *_: setattr(self, "paused", True))]
            self._hooks += [self._without.register_forward_hook(lambda *_: setattr(self, "paused", False))]
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._copies.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()

    @property
    def kernels(self) -> int:
        return self.launches.total()

    @property
    def reads(self) -> int:
        return self._reads.total()

    @property
    def syncs(self) -> Counter[str]:
        return self._reads + self._copies.names

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        if self.paused:
            return result
        schema, given, made = function._schema, _tensors((args, kwargs)), _tensors(result)
        name = schema.name.removeprefix("aten::")
        self.names[name] += 1
        # A boolean index is turned into positions first, whose number has to be known.
        masked = name.startswith("index") and any(one.dtype is torch.bool for one in _tensors(args[1:2]))
        self._reads[name] += name in READS or masked
        if (name == "where" and "Scalar" in schema.overload_name) or any(one.is_cpu for one in given):
            self.uploads[name] += 1
        held = {one.untyped_storage()._cdata for one in given}
        new = any(one.untyped_storage()._cdata not in held for one in made)  # no view
        if name not in NO_KERNEL and (schema.is_mutable or new):
            self.launches[name] += 1
            self.elements.update({one.dtype: one.numel() for one in made})
            self.bytes += sum(one.nbytes for one in (*given, *made))
        return result
