"""Evaluation: what each probe asks under which protocol, which noise it draws, and how sure its accuracy is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from grpo_lab.run.evaluate import evaluate, make_suites
from grpo_lab.run.state import open_state

# The evaluation protocol is that of training, but for its name.
SAME = (
    "evaluation.temperature=1", "evaluation.top_p=1", "evaluation.samples=3", "evaluation.pass_at=[1]",
    "evaluation.probe_problems=4", "evaluation.heldout_problems=12", "evaluation.downstream_problems=4",
    "evaluation.initial_kl=false",
)  # fmt: skip


def test_each_probe_has_its_own_budget_and_verifier(make_run) -> None:
    run = make_run("verifier=exact_answer", "reward=lenient")
    plan, protocol = run.evaluation, run.engine.params
    assert [suite.split for suite in make_suites(run)] == ["probe", "heldout", "heldout", "downstream"]
    budgets = [suite.params.max_tokens for suite in make_suites(run)]
    assert budgets == [24, 24, plan.max_tokens, plan.downstream_max_tokens] == [24, 24, 24, 48]
    assert [suite.params == protocol for suite in make_suites(run)] == [True, True, False, False]
    assert [suite.verifier for suite in make_suites(run)] == [run.reward, run.reward, run.verifier, run.verifier]


def test_both_held_out_probes_draw_the_same_numbers_and_errors_are_of_questions(make_run, tiny_base: Path) -> None:
    run = make_run(*SAME)
    state = open_state(run, torch.device("cpu"), None)
    metrics, table = evaluate(state.suites, state.session, state.tokenizer, run.template, run.evaluation, run.seed)
    state.session.close()
    trained, independent = (table[table["suite"] == name] for name in ("heldout_training", "heldout"))
    assert trained["text"].tolist() == independent["text"].tolist() and trained["text"].nunique() > 12
    rates = [independent["outcome"][independent["problem_id"] == one].mean() for one in set(independent["problem_id"])]
    mean = sum(rates) / 12
    spread = sum((rate - mean) ** 2 for rate in rates) / 11
    assert len(rates) == 12 and metrics["eval/heldout/accuracy"] == pytest.approx(mean)
    assert metrics["eval/heldout/accuracy_se"] == pytest.approx(math.sqrt(spread / 12)) and spread > 0
