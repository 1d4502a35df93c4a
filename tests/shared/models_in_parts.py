"""Models loaded in parts by each of two processes, and the same models loaded whole and then split.

    torchrun --nproc-per-node=2 models_in_parts.py <folder> <cases.json>

`cases.json` maps names to cases. Each process writes what it found to `<folder>/rank-<number>.json`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from several_ranks import TORCHRUN
from several_ranks import on_one as start_all
from torch import nn
from transformers import PreTrainedModel

from grpo_lab.distributed import ranks, tensors
from grpo_lab.policy import packing, sharding
from grpo_lab.policy.adapters import add_adapter, whole_weights
from grpo_lab.policy.loading import Loading, Lora
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.model_folder import fingerprint_of
from grpo_lab.policy.models import load_model
from grpo_lab.policy.output_head import linear_head
from grpo_lab.policy.packing import PLAIN
from grpo_lab.policy.parts import in_parts, layer_by_layer, own_weights, placed
from grpo_lab.policy.sharding import shard, within
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead
from grpo_lab.types import Microbatching, WeightType

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 2, 3, 0, 4], [3, 1, 1, 2, 0]])
Case = Mapping[str, Any]


def on_two(folder: Path, cases: Mapping[str, Case]) -> list[dict[str, Any]]:
    """What each of two processes found, by case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    # glibc would keep what is freed below 32 MB for the next that asks, and count it as the process's own.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [*TORCHRUN, __file__, str(folder), str(folder / "cases.json")],
        capture_output=True, text=True, timeout=280, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def opened(case: Case, parts: bool) -> tuple[nn.Module, str, bool]:
    """The model of a case, split over the ranks; the fingerprint of what this rank had of it; whether it packs rows."""
    lora = Lora(4, 8.0, ["all-linear"]) if case.get("lora") else None
    loading = Loading(frozen=WeightType[case.get("frozen", "fp32")], lora=lora)
    with in_parts() if parts else nullcontext():
        model = load_model(Path(case["folder"]), LmHead(case.get("head", "same")), loading)
        model = model.base_model if case.get("trunk") else model
    assert isinstance(model, PreTrainedModel)
    mark = fingerprint_of(own_weights(model))
    if lora:
        add_adapter(model, lora, 7)
    model = placed(model, CPU)
    with layer_by_layer(model):
        packs = packing.prepare(model)
    shard(model, Bf16(LmHead.same, 0.1) if case.get("bf16") else Fp32(LmHead.same, 0.1))
    return model, mark, packs


def facts(model: nn.Module, case: Case) -> dict[str, Any]:
    """All that must not depend on how a split model was loaded; tensors by the bits of what this rank holds."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bool(case.get("bf16"))):
        computed = within(model, lambda: model(input_ids=IDS, use_cache=False)[0])
    named = list(model.named_parameters(remove_duplicate=False))
    names = {id(one): name for name, one in reversed(named)}
    return {
        "computed": fingerprint_of([("", computed)]),
        "finite": bool(computed.isfinite().all()),
        "own": {name: fingerprint_of([("", tensors.local(one))]) for name, one in named},
        "whole": fingerprint_of(whole_weights(model)),
        "shapes": {name: [list(one.shape), list(tensors.local(one).shape)] for name, one in named},
        "buffers": {name: fingerprint_of([("", one)]) for name, one in model.named_buffers()},
        "tied": {name: names[id(one)] for name, one in named},
        "trains": [name for name, one in named if one.requires_grad],
        "linear": linear_head(model) is not None,
        "training": model.training,
    }


def compared(case: Case) -> dict[str, Any]:
    """The facts of both ways."""
    whole, whole_mark, whole_packs = opened(case, False)
    parts, mark, packs = opened(case, True)
    found = {"whole": facts(whole, case) | {"packs": whole_packs}, "parts": facts(parts, case) | {"packs": packs}}
    return found | {"marks": [whole_mark, mark]}


def trained(case: Case) -> dict[str, Any]:
    """Weights after an update, by either way."""
    found = {}
    for way in (False, True):
        model, _, _ = opened(case, way)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        model(input_ids=IDS, use_cache=False).logits.float().logsumexp(-1).sum().backward()
        optimizer.step()
        found["parts" if way else "whole"] = fingerprint_of((name, one.cpu()) for name, one in whole_weights(model))
    return found


def fused(case: Case) -> dict[str, Any]:
    """How far a fused output head moves a rank's part of the gradient at most, and the largest number there."""
    model, _, _ = opened(case, True)
    precision = Bf16(LmHead.same, 0.1) if case.get("bf16") else Fp32(LmHead.same, 0.1)
    mask, gradients = torch.ones(2, 3, dtype=torch.bool), []
    for cut in (PLAIN, Microbatching(10**6, 10**6, logits_per_chunk=2 * 13, fuses_head=True)):
        model.zero_grad()
        logprobs, entropy = token_logprobs(
            model, [(1, 2), (3,)], IDS[:, :3], mask, 0.7, precision, True, microbatching=cut
        )
        assert entropy is not None
        (logprobs * torch.arange(6).view(2, 3) + entropy).sum().backward()
        gradients.append(torch.cat([tensors.local(one.grad).flatten() for one in model.parameters()]))
    plain, other = gradients
    return {"difference": float((other - plain).abs().max()), "largest": float(plain.abs().max())}


def refused(case: Case) -> dict[str, Any]:
    """The message of a model that is not whole."""
    try:
        opened(case, True)
    except ValueError as error:
        return {"said": str(error)}
    return {"said": ""}


def _own_memory() -> int:
    """Bytes of memory that only this process has; pages of files, which the system can drop, do not count."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def peak(work: Callable[[], Any]) -> int:
    """The most memory that the process had beyond what it began with, while `work` ran."""
    gc.collect()
    seen, ended, before = [0], threading.Event(), _own_memory()

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(_own_memory() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        work()
    finally:
        ended.set()
        watching.join()
    return max(seen)


def measured(case: Case) -> dict[str, Any]:
    """Peaks of memory, in bytes: in parts, then whole; and the size of the model."""
    model, _, _ = opened(case, True)  # what the first of all keeps is no part of it
    size = sum(one.numel() * one.itemsize for one in model.parameters())
    del model
    return {"size": size} | {"parts": peak(lambda: opened(case, True)), "whole": peak(lambda: opened(case, False))}


def run(case: Case) -> dict[str, Any]:
    """A short run: for each model that it splits, its kind, and how many of its weights were in parts before."""
    models = list[list[Any]]()
    plain = sharding.taken

    def noted(model: nn.Module) -> dict[str, torch.Tensor]:
        rows = plain(model)
        models.append([type(model).__name__, len(rows), len(list(model.named_parameters(remove_duplicate=False)))])
        return rows

    sharding.taken = noted
    try:
        start_all(Path(case["folder"]), {"run": case["overrides"]})
    finally:
        sharding.taken = plain
    return {"models": models}


KINDS = {
    "run": run, "compared": compared, "trained": trained, "fused": fused, "refused": refused, "measured": measured
}  # fmt: skip


if __name__ == "__main__":
    with ranks.opened(lambda: CPU):
        cases: dict[str, Case] = json.loads(Path(sys.argv[2]).read_text())
        results = {name: KINDS[case["kind"]](case) for name, case in cases.items()}
        (Path(sys.argv[1]) / f"rank-{ranks.rank()}.json").write_text(json.dumps(results))
