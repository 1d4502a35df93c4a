"""Call a loss on the batches of the check, with torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from grpo_lab import deferred
from grpo_lab.instruments.loss_check.inputs import LossInputs
from grpo_lab.instruments.loss_check.match import LossAnswer


def load(target: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names. Raises ValueError.

    A module is looked for in the current folder too.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not name:
        raise ValueError(f"{target}: write FILE.py:FUNCTION or MODULE:FUNCTION, such as my_trainer.losses:policy_loss")
    deferred.load()  # its module may import parts of torch
    file = Path(place)
    if place.endswith(".py") and not file.is_file():
        raise ValueError(f"{target}: there is no file {file.absolute()}")
    folder = str(file.parent.absolute()) if place.endswith(".py") else ""
    sys.path.insert(0, folder)
    try:
        found = _module_of(file) if folder else importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, SyntaxError, NameError) as error:
        remedy = "start in the folder of its module, or install it"
        raise ValueError(f"{target} cannot be imported ({error}): {remedy}") from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise ValueError(f"{target} is no function: give FILE.py:FUNCTION or MODULE:FUNCTION")
    return found


def _module_of(file: Path) -> ModuleType:
    """The module of a file, whatever module of its name is imported already."""
    spec = importlib.util.spec_from_file_location(f"checked_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def arguments_of(function: Callable[..., Any], known: Sequence[str]) -> list[str]:
    """The arguments by which the function is called: its parameters, or all of them for **kwargs.

    Raises ValueError for a parameter without a default that is none of the known ones.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return list(known)
    for one in parameters:
        if one.name not in known and one.default is one.empty:
            raise ValueError(
                f"the loss wants an argument `{one.name}`: give it a default, or rename it to one of "
                f"{', '.join(known)}, of which it gets those that it has"
            )
    return [one.name for one in parameters if one.name in known]


def ask(
    function: Callable[..., Any], calls: Mapping[str, LossInputs], reads: Sequence[str]
) -> tuple[dict[str, LossAnswer], dict[str, str]]:
    """The function's answer to each call, and the error of each call that it could not answer."""
    answers, errors = {}, {}
    for name, inputs in calls.items():
        try:
            answers[name] = answer(function, inputs, reads)
        except Exception as error:  # a user's code may raise anything
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return answers, errors


def answer(function: Callable[..., Any], inputs: LossInputs, reads: Sequence[str]) -> LossAnswer:
    """Loss and gradient of one call, in float64 unless the call is in bfloat16."""
    import torch

    given = inputs.arguments()
    leaf = torch.tensor(given["logprobs"], dtype=torch.bfloat16 if inputs.bf16 else torch.float64)
    tensors: dict[str, Any] = {}
    for name in reads:
        value = given[name]
        if isinstance(value, np.ndarray):
            value = torch.tensor(value)
            value = value.to(leaf.dtype) if value.is_floating_point() else value
        tensors[name] = value
    leaf.requires_grad_()
    if "logprobs" in tensors:
        tensors["logprobs"] = leaf
    loss = function(**tensors)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(f"the loss must be a tensor with one number, not {type(loss).__name__}")
    if not loss.requires_grad:
        return LossAnswer(float(loss.detach()), np.zeros(leaf.shape))
    gradient = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)[0]
    found = np.zeros(leaf.shape) if gradient is None else gradient.double().numpy()
    return LossAnswer(float(loss.detach()), found)
