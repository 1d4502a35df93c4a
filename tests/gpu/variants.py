"""What a step of speed.py costs with ragged lengths, with top-p, and with a compiled learner, beside the plain one.

    python tests/gpu/variants.py --device cuda

A compiled learner becomes the default on a GPU once it is shown here to be faster.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from findings import Findings, run_part
from speed import Work, prepared, stages

MIX_OF_LENGTHS = 2  # ends of text that are drawn by chance within a full response, on average
RAGGED_LEAST, TOP_P_MOST = 0.7, 1.2  # share of the plain rate; times the plain seconds


def ragged(folder: Path, target: Path, work: Work) -> Path:
    """The model of `folder`, whose responses end by chance: many of its nearly equally likely tokens end a text."""
    shutil.copytree(folder, target)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    file = target / "generation_config.json"
    ends = list(range(vocabulary - MIX_OF_LENGTHS * vocabulary // work.budget, vocabulary))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    return target


def rate(result: dict[str, Any], stage: str) -> float:
    """Tokens of responses a second."""
    return median(row["tokens"] / row["stages"][stage] for row in result["rows"])


def seconds(result: dict[str, Any], stage: str) -> float:
    return median(row["stages"][stage] for row in result["rows"])


def measure(found: Findings) -> None:
    on_gpu = found.device == "cuda"
    graphs = ["engine.cuda_graphs=true"] if on_gpu else []
    with tempfile.TemporaryDirectory() as name:
        work = prepared(found, Path(name))
        plain = stages(work, "plain", 2, *graphs)

        def ragged_lengths() -> None:
            shorter = replace(work, folder=ragged(work.folder, Path(name) / "ragged", work))
            result = stages(shorter, "ragged", 2, *graphs, full=False)
            for stage in ("generate", "train"):
                least = {"at_least": RAGGED_LEAST} if on_gpu else {}
                found.add(f"ragged: {stage}, of the plain rate", rate(result, stage) / rate(plain, stage), **least)

        def top_p() -> None:
            result = stages(work, "top-p", 2, *graphs, "engine.top_p=0.95")
            most = {"at_most": TOP_P_MOST} if on_gpu else {}
            times = seconds(result, "generate") / seconds(plain, "generate")
            found.add("top-p: generate, by the plain one", times, "times", **most)

        def compiled() -> None:
            result = stages(work, "compiled", 2, *graphs, "model.compiled=true")
            found.add("compiled: train, by the plain one", seconds(result, "train") / seconds(plain, "train"), "times")

        variants: dict[str, Callable[[], None]] = {"ragged lengths": ragged_lengths, "top-p": top_p}
        if on_gpu:
            variants["a compiled learner"] = compiled
        else:
            found.leave_out("a compiled learner", "is measured on a GPU only")
        for what, run in variants.items():
            with found.guarded(what):
                run()


if __name__ == "__main__":
    run_part(measure)
