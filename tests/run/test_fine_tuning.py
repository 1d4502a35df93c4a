"""Fine-tuning before RL in the real loop: its loss by other code, its cost, its folder, and what refuses it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from short_runs import metrics_of, run_in_process, same_ending, train_command
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import fine_tuning
from grpo_lab.run.state import open_state
from grpo_lab.seeding import uniform
from grpo_lab.types import Graded, NoiseKey, StopReason

CPU = torch.device("cpu")
FIT = ["sft.problems=24", "sft.epochs=2", "sft.batch_size=8", "sft.learning_rate=1e-3", "sft.warmup_updates=0"]
SHORT = ["budget.amount=2", "evaluation=brief", "evaluation.every=1"]
DEMONSTRATIONS, SAMPLED = ["sft=demonstrations", *FIT], ["sft=rejection_sampling", *FIT]


def test_the_loss_and_the_weights_are_those_of_plain_code(tmp_path: Path, make_run, tiny_base: Path) -> None:
    """One update at a time through transformers' own forward, padded, with torch's AdamW: the same weights."""
    run = make_run(*DEMONSTRATIONS, "optimizer.max_grad_norm=0.5")
    state = open_state(run, CPU, own=tmp_path)
    state.session.close()
    problems, solutions = run.task.problems("train"), run.task.solutions("train")
    by_chance = sorted(range(len(problems)), key=lambda at: uniform(NoiseKey(0, "sft/problems", 0, problems[at].id, 0)))
    chosen = [at for at in by_chance[:24] if len(solutions[at]) + 1 <= run.engine.max_tokens]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_base), AutoTokenizer.from_pretrained(tiny_base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses: list[float] = []
    for epoch in range(2):
        order = sorted(range(len(chosen)), key=lambda at: uniform(NoiseKey(0, "sft/order", epoch, at, 0)))
        total = tokens = 0
        for start in range(0, len(order), 8):
            loss, count = 0.0, 0
            for at in (chosen[place] for place in order[start : start + 8]):
                prompt = tokenizer(problems[at].question)["input_ids"]
                answer = [*tokenizer(solutions[at])["input_ids"], tokenizer.eos_token_id]
                logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
                count += len(answer)
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            total, tokens = total + float(loss), tokens + count
        losses.append(total / tokens)
    metrics, account = state.start.metrics, state.account
    assert metrics["sft/loss"] == pytest.approx(losses[-1], abs=1e-5) and losses[-1] < losses[0]
    assert metrics["sft/answers"] == len(chosen) and metrics["active_fraction/sft"] == len(chosen) / 24
    assert account.trained_tokens == 2 * tokens and account.sampled_tokens == 0 and account.flops > 0
    ours, theirs = state.learner.state_dict(), model.state_dict()
    before = load_file(tiny_base / "model.safetensors")
    for name, weights in theirs.items():
        # the two ways of adding up differ by rounding, which Adam's first steps, of 1e-3 each, can blow up
        assert (ours[name] - weights).abs().max() < 2e-4, name
    assert any((ours[name] - weights).abs().max() > 2e-3 for name, weights in before.items())


@pytest.mark.extended
def test_microbatches_do_not_change_what_is_learnt(tmp_path: Path, make_run) -> None:
    weights = []
    for name, tokens in (("whole", 100_000), ("parts", 64)):
        state = open_state(make_run(*DEMONSTRATIONS, f"microbatch_tokens={tokens}"), CPU, own=tmp_path / name)
        state.session.close()
        weights.append(state.learner.state_dict())
    assert all((weights[0][name] - weights[1][name]).abs().max() < 2e-4 for name in weights[0])


@pytest.mark.extended
def test_rejection_sampling_learns_right_answers_and_pays_for_all(tmp_path: Path) -> None:
    folder = run_in_process(tmp_path, *SAMPLED, *SHORT, "sft.samples=4", "sft.keep=4", "kl=k3_loss")
    rows = [row["metrics"] for row in metrics_of(folder)]
    start, end = rows[0], rows[-1]
    assert 0 < start["sft/right"] < 1 and start["sft/answers"] == round(start["sft/right"] * 24 * 4)
    assert start["budget/completions"] == 24 * 4 and start["budget/prompts"] == 24
    learnt = start["sft/answers"] * start["sft/length"]
    assert start["budget/trained_tokens"] == pytest.approx(2 * learnt)
    prompts = start["budget/sampled_tokens"] - start["budget/discarded_tokens"] - learnt
    assert 24 * 3 < prompts < 24 * 20, "what was sampled was learnt or discarded, but for the prompts"
    assert start["budget/simulated_seconds"] > 0 and end["budget/sampled_tokens"] > start["budget/sampled_tokens"]
    assert all(row["active_fraction/sft"] == start["active_fraction/sft"] > 0 for row in rows), (
        "an arm can require that it acts"
    )
    assert start["eval/heldout_training/kl_initial"] == pytest.approx(0, abs=1e-5), "RL begins with the tuned model"
    assert rows[1]["train/k3_ref"] == pytest.approx(0, abs=1e-3), "so does the reference"
    assert "sft" not in json.loads((folder / "DONE").read_text())["no_ops"]


@pytest.mark.extended
def test_a_truncated_answer_is_never_learnt_though_the_reward_calls_it_right(
    tmp_path: Path, make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[Graded] = []
    learnt: list[fine_tuning.Demonstration] = []
    grade, train = fine_tuning.grade, fine_tuning._train

    def graded_here(*given: Any) -> Graded:
        graded.append(grade(*given))
        return graded[-1]

    def trained_here(*given: Any) -> dict[str, float]:
        learnt.extend(given[4])
        return train(*given)

    monkeypatch.setattr(fine_tuning, "grade", graded_here)
    monkeypatch.setattr(fine_tuning, "_train", trained_here)
    run = make_run(*SAMPLED, "reward=lenient", "sft.samples=4", "sft.keep=4", "engine.max_tokens=10")
    state = open_state(run, CPU, own=tmp_path)
    state.session.close()
    (one,) = graded
    right, whole = one.correctness == 1, ~one.truncated
    assert (right & ~whole).any() and (right & whole).any(), "the reward calls some of either kind right"
    assert {answer.completion.stop for answer in learnt} == {StopReason.EOS} and len(learnt) == (right & whole).sum()
    assert state.start.metrics["sft/right"] == pytest.approx(float((right & whole).double().mean()))


@pytest.mark.extended
def test_fine_tuning_is_done_once_and_a_killed_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    overrides = [*SAMPLED, "budget.amount=6", "checkpoint_every=2", "evaluation=brief", "kl=k3_loss"]
    whole = run_in_process(tmp_path / "whole", *overrides, name="x")
    command = train_command(tmp_path / "killed", *overrides)
    for waits_for in ("sft.partial", "sft", "checkpoints/step=000002"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        began = time.monotonic()
        while not list((tmp_path / "killed").glob(f"*/seed=0/{waits_for}")) and process.poll() is None:
            time.sleep(0.002)
            assert time.monotonic() - began < 200
        process.send_signal(signal.SIGKILL)
        process.wait()
    (made,) = (tmp_path / "killed").glob("*/seed=0/sft/model.safetensors")
    written = made.stat().st_mtime_ns
    subprocess.run(command, check=True, timeout=200, stderr=subprocess.DEVNULL)
    assert made.stat().st_mtime_ns == written
    same_ending(whole, made.parent.parent)


@pytest.mark.extended
def test_a_damaged_model_is_not_begun_with(tmp_path: Path, make_run, tiny_base: Path) -> None:
    run = make_run(*DEMONSTRATIONS)
    open_state(run, CPU, own=tmp_path).session.close()
    shutil.copy(tiny_base / "model.safetensors", tmp_path / "sft" / "model.safetensors")
    with pytest.raises(ValueError, match=r"sft/model.safetensors is damaged.*start it afresh"):
        open_state(run, CPU, own=tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*DEMONSTRATIONS, "engine.max_tokens=3"], "no answer to learn from 24 problems: raise engine.max_tokens"),
        ([*SAMPLED, "engine.max_tokens=1"], "no answer to learn from 24 problems: raise sft.samples or sft.problems"),
        (["sft=demonstrations", "sft.problems=1000000"], r"sft.problems=1000000, but the training split has \d+"),
        ([*DEMONSTRATIONS, "sft.learning_rate=1e30"], "sft diverged .*lower sft.learning_rate"),
    ],
)
def test_what_cannot_be_learnt_is_refused_with_a_remedy(
    tmp_path: Path, make_run, overrides: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        open_state(make_run(*overrides), CPU, own=tmp_path)
    assert not (tmp_path / "sft").exists()


def test_a_task_without_solutions_is_refused(tmp_path: Path, make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(*DEMONSTRATIONS)
    monkeypatch.setattr(type(run.task), "solutions", lambda task, split: None)
    with pytest.raises(ValueError, match="ArithmeticWorld writes none: set sft=rejection_sampling or sft=none"):
        open_state(run, CPU, own=tmp_path)
