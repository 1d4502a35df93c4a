"""A judge for real: `vllm serve` with SmolLM2 on this machine scores responses, proposes rubrics, and a run learns.

The model is small and judges badly. What is tested is that requests, forms and answers are those of a real server.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pretrained import smollm2_folder
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.run import checkpoint
from grpo_lab.tasks.endpoint import Endpoint
from grpo_lab.tasks.rubrics import SCORE, proposal_form, read_proposal, read_score

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STARTS = 400  # seconds that a server may take until it answers


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on a free port, in a process group of its own that ends with the tests."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2), "--port", str(port),
        "--served-model-name", "judge", "--host", "127.0.0.1", "--max-model-len", "2048", "--max-num-seqs", "8",
        "--enforce-eager", "--dtype", "float32",
    ]  # fmt: skip
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as said:
        server = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, **quiet}, start_new_session=True
        )
    try:
        until = time.monotonic() + STARTS
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def judge(url: str) -> Endpoint:
    return Endpoint(url, "judge", "", {"temperature": 0.0, "max_tokens": 64, "seed": 0}, True, 8, 0, 120.0, 1, "")


def test_a_served_model_keeps_to_the_form_of_an_answer(url: str) -> None:
    asked = judge(url)
    asked.check()
    questions = [f"How good is the answer {number} to 2+2? Answer with JSON: {{'score': s}}" for number in range(4)]
    assert all(0 <= read_score(answer) <= 1 for answer in asked.ask(questions, SCORE))
    longer = replace(asked, settings={**asked.settings, "max_tokens": 400})
    (proposed,) = longer.ask(["Which rubrics tell good essays from bad ones?"], proposal_form(2))
    assert proposed is not None and len(read_proposal(proposed, 9)) >= 2
    # A model left to itself speaks: what is not of that form is read as no score.
    (free,) = replace(asked, structured=False).ask(["Is 5 a good answer to 2+2?"], SCORE)
    assert free and read_score(free) != read_score(free)


def test_a_model_that_the_server_does_not_have_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"refuses gpt \(.*does not exist.*: correct base_url, model or"):
        replace(judge(url), model="gpt").ask(["a"], SCORE)


def test_a_run_learns_by_rubrics_that_evolve_and_runs_again_alike_from_what_was_kept(url: str, tmp_path: Path) -> None:
    kept = tmp_path / "answers.sqlite"
    part = "reward.parts.judge"
    words = [
        *SMALL, "reward=strict_and_format", f"+reward@{part}=rubric_evolving", "+reward.weights.judge=0.5",
        f"{part}.judge.base_url={url}", f"{part}.judge.model=judge", f"{part}.judge.cache={kept}",
        f"{part}.rubrics.helpful=null", f"{part}.rubrics.repetitive=null", f"{part}.judge.settings.max_tokens=16",
        f"{part}.proposer.settings.max_tokens=96", "budget.amount=2", "problems_per_step=4", "group_size=4",
        "evaluation.probe_problems=4", "evaluation.heldout_problems=4", "evaluation.downstream_problems=4",
        "evaluation.ends_probe_problems=4", "evaluation.ends_heldout_problems=4",
        "evaluation.ends_downstream_problems=4",
    ]  # fmt: skip
    folder = run_in_process(tmp_path / "a", *words)
    steps = [line["metrics"] for line in metrics_of(folder)][1:]
    assert len(steps) == 2 and all(step["rollout/ungraded"] < 1 for step in steps)
    for step in steps:
        parts = [step[f"reward/component/{name}"] for name in ("strict", "format", "judge")]
        assert step["reward/mean"] == pytest.approx(sum(parts))
        assert step["reward/evolving_rubrics"] > 0, "the served model proposed some"
    memory = checkpoint.load_state(max((folder / "checkpoints").iterdir()))["queue"]["memory"]
    assert len(memory["rubrics"]) == 8 and all(len(rubrics) <= 5 for rubrics in memory["rubrics"].values())
    answers = _number(kept)
    again = run_in_process(tmp_path / "b", *words)
    assert (again / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert _number(kept) == answers > 16, "nothing new was asked"


def _number(cache: Path) -> int:
    with closing(sqlite3.connect(cache)) as opened:
        return opened.execute("SELECT count(*) FROM answers").fetchone()[0]
