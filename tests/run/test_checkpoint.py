"""Checkpoints of earlier versions are read under today's names, and errors while one is written keep theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import queue_of
from transformers import AutoTokenizer

from grpo_lab.policy.models import load_model
from grpo_lab.run import checkpoint
from grpo_lab.run.checkpoint import load_state
from grpo_lab.run.state import open_state
from grpo_lab.tracking.files import RunFolderError
from grpo_lab.tricks.precision import LmHead


@pytest.mark.extended
def test_a_checkpoint_of_before_the_queue_is_read(make_run, tiny_base: Path, tmp_path: Path) -> None:
    run = make_run("schedule=one_step_off", "problems_per_step=4", "group_size=2", "evaluation.initial_kl=false")
    state = open_state(run, torch.device("cpu"))
    queue = queue_of(run, state)
    queue.take()
    today = queue.to_state()
    before = {name: value for name, value in today.items() if name != "memory"}
    torch.save({"supply": before, "memory": today["memory"]}, tmp_path / "state.pt")
    again = queue_of(run, state)
    again.from_state(load_state(tmp_path)["queue"])
    assert torch.equal(again.memory.attempts, queue.memory.attempts) and int(queue.memory.attempts.sum()) > 0
    assert len(again.ready) == len(queue.ready) > 0
    assert torch.equal(again.ready[0].rollouts.tokens, queue.ready[0].rollouts.tokens)
    state.session.close()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.distributed.DistBackendError("NCCL"), OSError("disk full")],
)
def test_only_a_failed_write_is_laid_to_the_disk(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The weights are gathered while they are written, which fails for other reasons."""

    def fail(*given: object) -> None:
        raise error

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    monkeypatch.setattr(checkpoint, "save_whole", fail)
    with pytest.raises(RunFolderError if isinstance(error, OSError) else type(error)) as raised:
        checkpoint.save(tmp_path, 1, load_model(tiny_base, LmHead.same), tokenizer, {}, "key", {}, {})
    assert ("free space" in str(raised.value)) is isinstance(error, OSError)
    assert not checkpoint.complete(tmp_path)
