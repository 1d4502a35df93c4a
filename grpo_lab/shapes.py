"""Shapes in annotations: jaxtyping's names and torch's Tensor.

Annotations say what a tensor's axes are (the letters are explained in types.py). Tests check them, and load torch
first; a run does not look at them, and so needs neither jaxtyping, nor torch before a model is loaded.
"""

from __future__ import annotations

import sys

try:
    from jaxtyping import Bool, Float, Int
except ModuleNotFoundError:

    class _Unchecked:
        """Takes the place of a shape that nobody checks."""

        def __class_getitem__(cls, item: object) -> type:
            return cls

    Bool = Float = Int = _Unchecked

if "torch._C" in sys.modules:
    from torch import Tensor
else:

    class _OnlyInAnnotations(type):
        """Refuses to answer isinstance: it would say no of every tensor."""

        def __instancecheck__(cls, value: object) -> bool:
            raise TypeError("this Tensor stands for torch's in annotations alone; ask isinstance with torch.Tensor")

    class Tensor(metaclass=_OnlyInAnnotations):
        """Takes the place of torch.Tensor in annotations while torch is not loaded."""


__all__ = ["Bool", "Float", "Int", "Tensor"]
