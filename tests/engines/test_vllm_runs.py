"""Sessions of vLLM that are opened and closed, one at a time in a process: precision, failures, a whole run."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from sampler_contract import SMALL, engine
from sampling import CPU, FP32, learner_logprobs, requests_of
from short_runs import metrics_of, run_in_process, same_ending

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.engines.base import EngineFailure
from grpo_lab.engines.vllm import VllmSession
from grpo_lab.engines.vllm_process import VllmProcess
from grpo_lab.engines.vllm_session import VllmProcessSession
from grpo_lab.rollout.queue import RolloutBatch
from grpo_lab.rollout.rounds import Rounds
from grpo_lab.rollout.stream import LiveStream
from grpo_lab.run.checkpoint import latest, load_state
from grpo_lab.tricks.curriculum import Memory
from grpo_lab.tricks.precision import Bf16, LmHead

pytestmark = pytest.mark.vllm


def test_bf16_with_an_fp32_head(tiny_base: Path) -> None:
    gaps = {}
    for name, precision in {"head": Bf16(LmHead.fp32, 0.1), "all": Bf16(LmHead.same, 0.1)}.items():
        opened = engine(arguments=SMALL).open(tiny_base, precision, CPU)
        requests = requests_of(tiny_base, rows=64)
        scored, sampled = learner_logprobs(tiny_base, requests, opened.generate(requests))
        gaps[name] = float((scored - sampled).detach().abs().mean())
        opened.close()
    assert 1e-4 < gaps["head"] < 0.02 and 1e-4 < gaps["all"] < 0.02


def test_the_learner_keeps_its_threads_and_its_random_numbers(tiny_base: Path) -> None:
    torch.manual_seed(5)
    drawn = torch.rand(2)[1]
    torch.manual_seed(5)
    torch.rand(1)
    set_threads = torch.set_num_threads
    opened = engine().open(tiny_base, FP32, CPU)
    assert torch.equal(torch.rand(1)[0], drawn) and torch.set_num_threads is set_threads
    opened.close()


def test_what_vllm_cannot_open_comes_with_a_remedy(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.arguments takes the names"):
        engine(arguments={"no_such_argument": 1}).open(tiny_base, FP32, CPU)
    with pytest.raises(ValueError, match=r"lower engine\.context"):
        replace(engine(), context=1_000_000).open(tiny_base, FP32, CPU)


def dies(session: VllmSession) -> None:
    """vLLM raises in the middle of a call."""
    session.engine.step = lambda: 1 / 0


def is_killed(session: VllmProcessSession) -> None:
    """The operating system ends vLLM's process."""
    os.kill(session.process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "kind", "happens", "message"),
    [
        ("vllm", VllmSession, dies, "ZeroDivisionError"),
        ("vllm_process", VllmProcessSession, is_killed, "ended by signal 9"),
    ],
)
def test_a_run_whose_engine_fails_goes_on_as_if_it_had_not(
    name: str, kind, happens, message: str, tmp_path: Path, tiny_base: Path, monkeypatch
) -> None:
    """The same bits in a process of its own, too: a step begins in one batch, however fast its requests come."""
    common = [
        f"engine={name}", "engine.cache_gib=0.25", "engine.context=128", "checkpoint_every=2", "budget.amount=4",
        "optimizer.learning_rate=3e-4", "evaluation=brief",
    ]  # fmt: skip
    whole = run_in_process(tmp_path / "whole", *common)
    rows = [row["metrics"] for row in metrics_of(whole)[1:]]
    assert all(row["mismatch/absolute"] < 1e-5 and row["mismatch/pearson"] > 0.99999 for row in rows)
    assert len({row["rollout/length"] for row in rows}) > 1 and all(row["train/updates"] == 4 for row in rows)
    with monkeypatch.context() as patched:
        ask = kind.generate

        def fails(opened: VllmSession | VllmProcessSession, requests, on_finish=None):
            if opened.version == 12:  # the fourth step's weights
                happens(opened)
            return ask(opened, requests, on_finish)

        patched.setattr(kind, "generate", fails)
        with pytest.raises(EngineFailure, match=message):
            run_in_process(tmp_path / "fails", *common)
    (folder,) = (tmp_path / "fails").glob("run/seed=*")
    assert "resume from the last checkpoint" in (folder / "error.txt").read_text()
    run_in_process(tmp_path / "fails", *common)
    same_ending(folder, whole)


LIVE = [
    "engine=vllm_process", "engine.cache_gib=0.25", "engine.context=128", "evaluation=brief", "evaluation.every=100",
    "problems_per_step=8", "group_size=4", "updates=one", "correction=tis_token", "optimizer.learning_rate=3e-3",
]  # fmt: skip


def test_the_next_batch_is_drawn_while_the_learner_trains(tmp_path: Path, tiny_base: Path, monkeypatch) -> None:
    """For real, and with the tokens that the same schedule draws when nothing overlaps."""
    during = []
    remember = Rounds.remember

    def seen(self: Rounds, made) -> Memory:
        during.append((self.number, threading.current_thread().name))
        return remember(self, made)

    monkeypatch.setattr(Rounds, "remember", seen)
    schedule = ("schedule=one_step_off", "schedule.lag=2", "budget.amount=6")
    live = run_in_process(tmp_path / "live", *LIVE, *schedule)
    threads = dict(during)
    assert "MainThread" in threads[0] and all("MainThread" not in threads[number] for number in range(1, 8))
    rows = [row["metrics"] for row in metrics_of(live)[1:]]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 2, 2, 2, 2]
    monkeypatch.setattr(VllmProcess, "overlaps", False)
    waiting = run_in_process(tmp_path / "waiting", *LIVE, *schedule)
    for one, other in zip(rows, (row["metrics"] for row in metrics_of(waiting)[1:])):
        assert one["rollout/length"] == other["rollout/length"] and one["reward/mean"] == other["reward/mean"]


@pytest.mark.parametrize("schedule", ["in_flight", "interruptible"])
def test_weights_meet_responses_midway_for_real_and_what_grows_is_saved(
    schedule: str, tmp_path: Path, tiny_base: Path, monkeypatch
) -> None:
    """Stopped in its sixth step, it goes on from what had grown until the fourth: no response is drawn anew."""
    overrides = [
        *LIVE, f"schedule={schedule}", "schedule.max_lag=2", "truncation=interrupt", "budget.amount=8",
        "checkpoint_every=4", "engine.max_rows=16", "rollouts_every=1",
    ]  # fmt: skip
    take = LiveStream.take

    def dies_in_step_six(self: LiveStream) -> RolloutBatch:
        if self.account.steps == 5:
            os.kill(self.session.process.pid, signal.SIGKILL)
            self.session.process.join()
            self.session.check_alive()
        return take(self)

    monkeypatch.setattr(LiveStream, "take", dies_in_step_six)
    with pytest.raises(EngineFailure, match="ended by signal 9"):
        run_in_process(tmp_path, *overrides)
    (folder,) = tmp_path.glob("run/seed=*")
    saved = load_state(latest(folder / "checkpoints"))["queue"]
    grown = {
        (left["group"]["index"], place): part["logprobs"]
        for left in saved["growing"].values()
        for place, part in zip([p for p, begun in enumerate(left["begun"]) if begun], left["group"]["responses"])
    }
    assert len(grown) >= 4 and all(grown.values())
    monkeypatch.setattr(LiveStream, "take", take)
    run_in_process(tmp_path, *overrides)
    rows = [row["metrics"] for row in metrics_of(folder)[1:]]
    assert len(rows) == 8 and max(row["rollout/staleness_max"] for row in rows) >= 1
    assert all(row["mismatch/absolute"] < 0.2 for row in rows)
    tables = pd.concat([pd.read_parquet(folder / "rollouts" / f"step={step:06d}.parquet") for step in (5, 6, 7, 8)])
    whole = {(row.problem_id, row.response): list(row.token_logprob) for row in tables.itertuples()}
    problems = to_run(compose_with_choices(["world=tiny"])[0]).task.problems("train")
    taken = {key: whole[place] for key in grown if (place := (problems[key[0]].id, key[1])) in whole}
    assert len(taken) >= 4
    for key, logprobs in taken.items():
        assert logprobs[: len(grown[key])] == pytest.approx(grown[key], abs=1e-6), "not a response drawn anew"
