"""Running out of memory: the stage, a remedy, and what stays on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.policy.optim import Adamw
from grpo_lab.run.memory import OutOfMemory, remedied


def test_what_torch_says_on_the_cpu_is_understood() -> None:
    with (
        pytest.raises(
            OutOfMemory, match=r"stage: generate; .*can't allocate memory.*engine\.max_rows.*last checkpoint"
        ),
        remedied("generate"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match=r"stage: train; no room.*microbatch_tokens"), remedied("train"):
        raise torch.OutOfMemoryError("no room\nfor a long table")
    with pytest.raises(RuntimeError, match="another trouble"), remedied("train"):
        raise RuntimeError("another trouble")


@pytest.mark.extended
def test_a_run_that_runs_out_of_memory_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*SMALL, "budget.amount=4", "checkpoint_every=2")
    whole = metrics_of(run_in_process(tmp_path / "whole", *words, name="run"))
    step, calls = Adamw.step, []

    def full(self, *arguments, **named):
        calls.append(None)
        if len(calls) > 3 * 4:  # four updates a batch: in the fourth batch
            torch.empty(1 << 60, dtype=torch.uint8)
        return step(self, *arguments, **named)

    monkeypatch.setattr(Adamw, "step", full)
    with pytest.raises(OutOfMemory, match="stage: train"):
        run_in_process(tmp_path / "short", *words, name="run")
    (said,) = (tmp_path / "short").rglob("error.txt")
    assert "gradient_checkpointing=true" in said.read_text()
    monkeypatch.setattr(Adamw, "step", step)
    assert metrics_of(run_in_process(tmp_path / "short", *words, name="run")) == whole
