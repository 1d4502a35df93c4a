"""Checkpoints: everything a run needs to resume with identical bits, written atomically.

A checkpoint is a folder that transformers and vLLM load as a model, with `state.pt` beside the weights. `best/` keeps
the weights of the best evaluation without it: no run resumes there. Where several ranks train, the optimiser's state is
in `shards/`, a file for each rank. Any number of ranks resumes from either.
It is written under a temporary name and renamed when complete, so a folder with a checkpoint's name is
complete, even after a kill. `manifest.json`, written last, names its run and holds a digest of every other
file, so that later damage is noticed before anything is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.distributed import ranks
from grpo_lab.policy.adapters import save_whole
from grpo_lab.tracking.checksums import MANIFEST, with_checksum
from grpo_lab.tracking.files import RunFolderError, follow_umask, write_json

BEST = "best"  # a run's folder of the weights of its best evaluation
SHARDS = "shards"  # a folder in a checkpoint of several ranks, in the format of torch.distributed.checkpoint
_NAME = re.compile(r"step=(\d+)")


def save(
    root: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any] | None,
    run_key: str,
    log: Mapping[str, Any],
    shards: dict[str, Any],
) -> Path:
    """Write `root/step=<step>` and return its path; `log` is the stamp of the run log at this step.

    Without `state` it holds the model alone, and no run can resume from it.

    All ranks call it. The first writes, and each writes its part of `shards`, into one folder that all must see.
    Raises RunFolderError if the disk is full; older checkpoints stay.
    """
    final = root / named(step)
    temporary = ranks.from_first(root / f".{named(step)}.{os.getpid()}")
    try:
        if ranks.is_first():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        if shards:
            ranks.from_first(None)  # the folder is there
            _save_shards(temporary, shards)
        save_whole(model, temporary)
        if not ranks.is_first():
            return ranks.from_first(final)
        tokenizer.save_pretrained(temporary)
        if state is not None:
            torch.save(dict(state), temporary / "state.pt")
        follow_umask(temporary)
        digests = {}
        for path in sorted(found for found in temporary.rglob("*") if found.is_file()):
            with path.open("rb") as file:
                digests[path.relative_to(temporary).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
        manifest = {"run_key": run_key, "step": step, "log": log, "files": digests}
        write_json(temporary / MANIFEST, with_checksum(manifest))
    except (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError):
        raise  # from gathering the weights, which no free disk space mends
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch and safetensors each raise their own exception for a failed write.
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(root).free
        raise RunFolderError(
            f"the checkpoint of step {step} could not be written to {root}, which has {free / 1e6:.0f} MB free "
            f"({str(error).splitlines()[0]}): free space and start the same command again: "
            "it resumes from the last checkpoint"
        ) from error
    replaced = root / f"{temporary.name}.old"
    if final.exists():
        os.replace(final, replaced)
    os.replace(temporary, final)
    shutil.rmtree(replaced, ignore_errors=True)
    descriptor = os.open(root, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return ranks.from_first(final)


def named(step: int) -> str:
    """The folder's name of a checkpoint after this step."""
    return f"step={step:06d}"


def _save_shards(folder: Path, shards: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write_shards

    try:
        write_shards(shards, checkpoint_id=folder / SHARDS)
    except CheckpointException as error:  # derived from BaseException
        raise RuntimeError("; ".join(str(one[0]) for one in error.failures.values())) from error


def load_shards(folder: Path, held: dict[str, Any]) -> None:
    """Fill the tensors and values of `held` from a checkpoint that any number of ranks saved."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        load(held, checkpoint_id=folder / SHARDS, no_dist=ranks.number() == 1)


def latest(root: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = complete(root)
    return found[-1] if found else None


def load_state(folder: Path) -> dict[str, Any]:
    """The state saved beside the weights; tensors and plain values only.

    Several ranks map the file, which one process may have saved whole, and read their parts of it.
    """
    mapped = ranks.number() > 1
    state = torch.load(folder / "state.pt", weights_only=True, map_location="cpu", mmap=mapped)
    if "queue" not in state:  # earlier versions called it supply, and kept what is remembered of problems beside it
        state["queue"] = state.pop("supply") | {"memory": state.pop("memory")}
    return state


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and the leftovers of interrupted writes."""
    keep_only(root, complete(root)[-keep:])


def keep_only(root: Path, kept: Sequence[Path]) -> None:
    """Delete the checkpoints in `root` that are not `kept`, and the leftovers of interrupted writes."""
    for old in complete(root):
        if old not in kept:
            shutil.rmtree(old)
    for leftover in root.glob(".step=*"):
        shutil.rmtree(leftover, ignore_errors=True)


def complete(root: Path) -> list[Path]:
    """All complete checkpoints, the newest last; `tracking.checksums.check_manifest` finds a damaged one."""
    if not root.exists():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step after which the checkpoint in this folder was saved."""
    return int(folder.name.removeprefix("step="))
