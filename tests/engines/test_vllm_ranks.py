"""vLLM in a run that two processes share: an engine in each, one model over both, and an engine beside each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from several_ranks import TORCHRUN
from short_runs import metrics_of

WORDS = ["-m", "grpo_lab.train", "world=tiny", "device=cpu", "budget.amount=2", "evaluation=brief", "tracking=none"]


def ended(start: list[str], runs: Path, *words: str) -> Path:
    """The folder of the run that this command makes."""
    done = subprocess.run(
        [*start, *WORDS, f"runs_dir={runs}", *words],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-4000:]
    (folder,) = runs.glob("*/seed=0")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return ended([sys.executable], tmp_path_factory.mktemp("alone"), "engine=vllm")


@pytest.mark.vllm
@pytest.mark.parametrize(
    "words", [["engine=vllm"], ["engine=vllm", "engine.tensor_parallel=2"], ["engine=vllm_process"]], ids=" ".join
)
def test_two_processes_sample_what_one_does(words: list[str], alone: Path, tmp_path: Path) -> None:
    two = ended(TORCHRUN, tmp_path, *words)
    for ours, theirs in zip(metrics_of(alone), metrics_of(two), strict=True):
        here, there = ours["metrics"], theirs["metrics"]
        assert there.keys() == here.keys()
        for name in {"reward/mean", "rollout/length", "budget/sampled_tokens", "eval/heldout/accuracy"} & here.keys():
            assert there[name] == pytest.approx(here[name], rel=1e-6), (name, ours["step"])
