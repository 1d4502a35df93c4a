"""Counts of a decoding step: operations that a GPU would launch, and reads that make the host wait for it.

Counted at the dispatcher, on a meta device or a CPU, so that no GPU is needed. A composite operation, such as `linear`
or attention, counts once. Inside it a GPU may launch several kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or its shape, the host needs before it can go on.
DATA_DEPENDENT = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "item",
}  # fmt: skip
# Methods that copy to the host without the dispatcher on a CPU.
COPIES = {"tolist", "numpy", "cpu"}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias"}


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _on_cpu(inputs: Any) -> bool:
    return any(tensor.device.type == "cpu" for tensor in _tensors(inputs))


def _new(result: Any, inputs: Any) -> bool:
    """Whether a result has storage that no input had: views and casts to the same dtype do not."""
    held = {tensor.untyped_storage()._cdata for tensor in _tensors(inputs)}
    return any(tensor.untyped_storage()._cdata not in held for tensor in _tensors(result))


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches, self.syncs, self.elements = Counter[str](), Counter[str](), Counter[torch.dtype]()
        self.paused, self.uploads = False, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        name = func._schema.name.removeprefix("aten::")
        indexed = name.startswith("index") and any(one.dtype is torch.bool for one in _tensors(args[1:2]))
        if name in DATA_DEPENDENT or indexed:
            self.syncs[name] += 1
        if (name == "where" and "Scalar" in func._overloadname) or _on_cpu((args, kwargs)):
            self.uploads[name] += 1
        if name not in NO_KERNEL and (func._schema.is_mutable or _new(result, (args, kwargs))):
            self.launches[name] += 1
            self.elements.update({one.dtype: one.numel() for one in _tensors(result)})
        return result


class _Copies(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.copies = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in COPIES:
            self.copies[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Counts:
    """A context that counts what runs in it: `launches` and `syncs` by name, `elements` written by dtype.

    `uploads`: operations that copy a number from the host, which a CUDA graph cannot record; not for use on a CPU.
    """

    def __enter__(self) -> Counts:
        self._stack, self._below, self._above = ExitStack(), _Launches(), _Copies()
        self._stack.enter_context(self._above)
        self._stack.enter_context(self._below)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def leave_out(self, model: torch.nn.Module) -> None:
        """From here on, count nothing inside this model's forward."""

        def pause(*_: Any) -> None:
            self._below.paused = True

        def resume(*_: Any) -> None:
            self._below.paused = False

        self._stack.callback(model.register_forward_pre_hook(pause).remove)
        self._stack.callback(model.register_forward_hook(resume).remove)

    @property
    def launches(self) -> Counter[str]:
        return self._below.launches

    @property
    def elements(self) -> Counter[torch.dtype]:
        return self._below.elements

    @property
    def uploads(self) -> Counter[str]:
        return self._below.uploads

    @property
    def syncs(self) -> Counter[str]:
        return self._below.syncs + self._above.copies
