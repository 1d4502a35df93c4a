"""Distillation from a teacher: advantages worked out by hand, and runs that learn from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import F64
from short_runs import SMALL, metrics_of, run_in_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import LmHead
from grpo_lab.tricks.teacher import NoTeacher, OnPolicyDistillation
from grpo_lab.types import WeightType

MASK = torch.tensor([[True, True, True, False], [True, False, True, True]])
TEACHER = torch.tensor([[-1.0, -2.0, -0.5, 0.0], [-1.0, -9.0, -3.0, -0.25]], dtype=F64)
OLD = torch.tensor([[-2.0, -1.0, -0.5, 0.0], [-1.5, -1.0, -1.0, -0.5]], dtype=F64)
REWARDED = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-1.0, 0.0, -1.0, -1.0]], dtype=F64)


def distillation(coefficient: float = 1.0, discount: float = 0.0, reward_weight: float = 0.0) -> OnPolicyDistillation:
    return OnPolicyDistillation("there", "", WeightType.fp32, coefficient, discount, reward_weight)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # teacher - old of sampled tokens: 1, -1, 0 and 0.5, (injected), -2, 0.25
        (distillation(), [[1, -1, 0, 0], [0.5, 0, -2, 0.25]]),
        (distillation(coefficient=2.0), [[2, -2, 0, 0], [1, 0, -4, 0.5]]),
        # each with all that follow: 1 - 1 + 0, -1 + 0, 0 and 0.5 - 2 + 0.25, ..., -2 + 0.25, 0.25
        (distillation(discount=1.0), [[0, -1, 0, 0], [-1.25, 0, -1.75, 0.25]]),
        # half of what follows: 1 - 0.5, ..., and 0.25; -2 + 0.125 = -1.875; an injected step halves too: 0.5 - 1.875/4
        (distillation(discount=0.5), [[0.5, -1, 0, 0], [0.03125, 0, -1.875, 0.25]]),
        (distillation(reward_weight=1.0), [[2, 0, 1, 0], [-0.5, 0, -3, -0.75]]),
    ],
)
def test_advantages_by_hand(plan: OnPolicyDistillation, expected: list[list[float]]) -> None:
    assert plan(REWARDED, TEACHER, OLD, MASK).tolist() == expected
    assert plan.replaces_reward is (plan.reward_weight == 0)


def test_without_a_teacher_nothing_changes_and_wrong_numbers_are_refused() -> None:
    assert NoTeacher()(REWARDED, None, None, MASK) is REWARDED
    for numbers, said in (
        ({"coefficient": 0.0}, r"OnPolicyDistillation\.coefficient must be greater than 0"),
        ({"discount": 1.5}, r"OnPolicyDistillation\.discount must be in \[0, 1\]"),
        ({"reward_weight": -1.0}, r"OnPolicyDistillation\.reward_weight must be at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            distillation(**numbers)


def test_a_teacher_equal_to_the_policy_teaches_nothing() -> None:
    assert distillation(discount=0.9)(REWARDED, OLD, OLD, MASK).abs().max() == 0


PURE = ["scale=none", "surrogate=reinforce", "aggregation=token_mean", "updates=one", "optimizer.learning_rate=1e-3"]


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    return run_in_process(folder, *SMALL, "budget.amount=30", name="teacher")


def taught(folder: Path, teacher: Path, *overrides: str, name: str = "student") -> Path:
    path = f'teacher.path="{teacher}"'
    return run_in_process(folder, *SMALL, *PURE, "teacher=on_policy", path, *overrides, name=name)


@pytest.mark.extended
def test_a_policy_comes_closer_to_its_teacher_and_answers_like_it(teacher_run: Path, tmp_path: Path) -> None:
    lines = metrics_of(taught(tmp_path, teacher_run, "budget.amount=12"))
    distance = [line["metrics"]["teacher/reverse_kl"] for line in lines[1:]]
    assert distance[-1] < distance[0] / 2 and all(value > 0 for value in distance)
    accuracy = [line["metrics"]["reward/outcome"] for line in lines[1:]]
    assert sum(accuracy[-3:]) > sum(accuracy[:3]) + 0.3, "the verifier's word was never learnt from"
    assert all(line["metrics"]["active_fraction/teacher"] > 0.9 for line in lines[1:])


@pytest.mark.extended
def test_tokens_are_learnt_by_what_a_plain_forward_pass_of_the_teacher_says(teacher_run: Path, tmp_path: Path) -> None:
    """At the temperature that the tokens were sampled at, as the policy's own log-probs are."""
    words = ["budget.amount=1", "rollouts_every=1", "keep_checkpoints=9", "engine.temperature=0.7"]
    student = taught(tmp_path, teacher_run, *words)
    saved = sorted((teacher_run / "checkpoints").glob("step=*"))[-1]
    tokenizer, teacher = AutoTokenizer.from_pretrained(saved), AutoModelForCausalLM.from_pretrained(saved)
    number = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    config, _ = compose_with_choices(["world=tiny"])
    template = to_run(config).template
    rows = pd.read_parquet(next((student / "rollouts").glob("*.parquet"))).head(24)
    differences = []
    for row in rows.itertuples():
        prompt = tokenizer(template.render(row.question, tokenizer), add_special_tokens=False)["input_ids"]
        response = [number[piece] for piece in row.tokens]
        with torch.no_grad():
            scores = teacher(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        teacher_logprobs = (scores / 0.7).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
        said = teacher_logprobs - torch.tensor(row.token_logprob)
        differences.append((said - torch.tensor(row.token_advantage)).abs().max())
    assert max(differences) < 1e-4


def test_a_model_with_other_tokens_is_no_teacher(tiny_base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(tiny_base, copy)
    described = json.loads((copy / "tokenizer.json").read_text())
    words = described["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    (copy / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        ValueError, match=r"teacher\.path must be a model with the policy's tokens, and 2 of \d+ differ"
    ):
        taught(tmp_path, copy)
    with pytest.raises(ValueError, match=r"teacher\.path must be an existing folder, got /no/where"):
        taught(tmp_path, Path("/no/where"), name="nowhere")


@pytest.mark.extended
def test_a_run_does_not_go_on_under_another_teacher(teacher_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    saved = sorted((teacher_run / "checkpoints").glob("step=*"))[-1]
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    folder = taught(tmp_path, copy, "budget.amount=2", "checkpoint_every=1")
    (folder / "DONE").unlink()
    model = load_model(copy, LmHead.same)
    with torch.no_grad():
        next(model.parameters()).add_(0.5)
    model.save_pretrained(copy)
    with pytest.raises(ValueError, match="began with its teacher's weights"):
        taught(tmp_path, copy, "budget.amount=2", "checkpoint_every=1")
