"""Checkpoints of earlier versions are read under today's names."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import queue_of

from grpo_lab.run.checkpoint import load_state
from grpo_lab.run.state import open_state


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
