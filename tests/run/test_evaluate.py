"""Evaluation: what each probe asks under which protocol, which noise it draws, and how sure its accuracy is."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import torch
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.config.rules import check_compatible
from grpo_lab.run.evaluate import evaluate, make_suites
from grpo_lab.run.state import open_state
from grpo_lab.tasks.verifiers import Inverted, Strict

# The evaluation protocol is that of training, but for its name.
SAME = (
    "evaluation.temperature=1", "evaluation.top_p=1", "evaluation.samples=3", "evaluation.pass_at=[1]",
    "evaluation.probe_problems=4", "evaluation.heldout_problems=12", "evaluation.downstream_problems=4",
    "evaluation.initial_kl=false",
)  # fmt: skip


def test_each_probe_has_its_own_budget_and_verifier(make_run) -> None:
    run = make_run("verifier=exact_answer", "reward=lenient")
    plan, protocol = run.evaluation, run.engine.params
    assert [suite.name for suite in make_suites(run)] == ["probe", "heldout_training", "heldout", "downstream"]
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
    labels = sorted(set(independent["difficulty"]))
    assert len(labels) > 1
    for name, label in (("easiest", labels[0]), ("hardest", labels[-1])):
        asked = independent[independent["difficulty"] == label]["outcome"]
        assert metrics[f"eval/heldout/accuracy_{name}"] == pytest.approx(sum(asked) / len(asked))


def test_all_suites_are_sampled_in_one_call_and_held_out_answers_are_judged_twice(make_run, monkeypatch) -> None:
    """Under a grader that can be gamed, what it calls right under the training protocol is no accuracy."""
    run = make_run(*SAME, "reward=lenient")
    state, calls = open_state(run, torch.device("cpu"), None), list[int]()
    sample = state.session.generate
    monkeypatch.setattr(state.session, "generate", lambda asked, *_: calls.append(len(asked)) or sample(asked))
    metrics, table = evaluate(
        state.suites, state.session, state.tokenizer, run.template, run.evaluation, run.seed, reward=run.reward,
        verifier=run.verifier,
    )  # fmt: skip
    state.session.close()
    assert calls == [len(table)]
    trained, independent = (table[table["suite"] == name] for name in ("heldout_training", "heldout"))
    assert trained["text"].tolist() == independent["text"].tolist(), "the same protocol, but for the grader"
    verified = metrics["eval/heldout_training/verified_accuracy"]
    assert verified == metrics["eval/heldout/accuracy"] < metrics["eval/heldout_training/accuracy"]
    assert "eval/probe/verified_accuracy" not in metrics


@pytest.mark.extended
def test_the_initial_policy_is_asked_at_lower_temperatures_at_step_0_only(tmp_path: Path) -> None:
    """A sharper policy has a lower entropy; greedy answers are one per question."""
    words = ("evaluation.sharpened=[0.6,0.2]", "evaluation.suites=[heldout_greedy]", "evaluation.suite_problems=12")
    folder = run_in_process(tmp_path, *SMALL, *words, "budget.amount=2", "evaluation.every=1")
    first, second, last = (line["metrics"] for line in metrics_of(folder))
    suites = ("heldout_training", "sharpened_60", "sharpened_20")
    entropies = [first[f"eval/{suite}/entropy"] for suite in suites]
    assert entropies == sorted(entropies, reverse=True) and 0 < entropies[2] < entropies[0] / 3
    assert [first[f"eval/{suite}/responses"] for suite in suites] == [first["eval/heldout_training/responses"]] * 3
    assert not any("sharpened" in name for name in second | last)
    assert "eval/heldout_training/entropy" in second and "eval/heldout_greedy/accuracy" not in second
    answers = pd.read_parquet(folder / "eval" / "step=000002.parquet")
    greedy = answers[answers["suite"] == "heldout_greedy"]
    assert len(greedy) and (greedy.groupby("problem_id")["text"].nunique() == 1).all()


@pytest.mark.parametrize("wrong", ["[1.0]", "[0.0]", "[0.5,2]"])
def test_a_temperature_that_sharpens_nothing_is_refused(make_run, wrong: str) -> None:
    with pytest.raises(Exception, match=r"sharpened.*above 0 and below 1"):
        make_run(f"evaluation.sharpened={wrong}")


@pytest.mark.extended
def test_what_is_asked_between_the_ends_is_a_part_of_what_is_asked_there(make_run) -> None:
    more = ("evaluation.ends_heldout_problems=40", "evaluation.ends_samples=4", "evaluation.pass_at=[1,4]")
    run = make_run(*SAME, *more)
    ends, between = make_suites(run), make_suites(run, ends=False)
    assert [suite.name for suite in ends] == [suite.name for suite in between]
    assert [len(suite.problems) for suite in ends] == [4, 40, 40, 4]
    assert [len(suite.problems) for suite in between] == [4, 12, 12, 4]
    assert ({suite.samples for suite in ends}, {suite.samples for suite in between}) == ({4}, {3})
    for large, small in zip(ends, between):
        assert set(small.problems) <= set(large.problems)
    assert between[2].problems == make_suites(make_run(*SAME))[2].problems
    state = open_state(run, torch.device("cpu"), None)
    rest = (state.session, state.tokenizer, run.template, run.evaluation, run.seed)
    (first, at_end), (second, in_between) = evaluate(ends, *rest), evaluate(between, *rest)
    state.session.close()
    assert "eval/heldout/pass_at_4" in first and "eval/heldout/pass_at_1" in second
    assert "eval/heldout/pass_at_4" not in second
    # A question has the same answers, of which the ends have more.
    key = ["suite", "problem_id", "sample"]
    both = at_end.merge(in_between, on=key, suffixes=("", "_between"))
    assert len(both) == len(in_between) and (both["text"] == both["text_between"]).all()


@pytest.mark.extended
def test_each_further_suite_differs_in_one_thing(make_run) -> None:
    names = ["downstream_short", "other_numbers", "other_wording", "heldout_rule"]
    more = ("withheld_numbers=[7]", "other_number_min=10", "other_number_max=12", "other_size=4")
    task = (f"task.{line}" for line in more)
    run = make_run(*SAME, *task, "evaluation.suite_problems=4", f"evaluation.suites=[{','.join(names)}]")
    suites = {suite.name: suite for suite in make_suites(run)}
    assert [*suites][4:] == names and len(make_suites(run, ends=False)) == 4
    heldout, downstream = suites["heldout"], suites["downstream"]
    short, numbers, wording, rule = (suites[name] for name in names)
    assert short.problems == downstream.problems and short.params.max_tokens == heldout.params.max_tokens
    assert downstream.params.max_tokens == numbers.params.max_tokens > heldout.params.max_tokens
    assert wording.params == rule.params == heldout.params
    worded = {(one.id, f"{one.question};") for one in heldout.problems}
    assert {(one.id, one.question) for one in wording.problems} <= worded
    assert all("7" in one.question.strip("?").split("+") for one in rule.problems)
    assert not any("7" in one.question.strip("?").split("+") for one in run.task.problems("train"))
    assert {suite.verifier for suite in (short, numbers, wording, rule)} == {run.verifier}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("evaluation.suites=[harder]", "suites must be a list of downstream_short"),
        ("evaluation.suites=[other_wording,other_wording]", "suites must be a list without repetition"),
        ("evaluation.ends_samples=1", "ends_samples must be at least samples=3"),
        ("evaluation.ends_heldout_problems=1", "ends_heldout_problems must be at least heldout_problems=12"),
        ("evaluation.other_wording=none", "other_wording must be a text with {question}"),
    ],
)
def test_a_wrong_plan_is_refused(make_run, wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_run(*SAME, wrong)


def test_a_suite_without_its_split_is_refused_before_a_model_is_built(make_run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    run = make_run(*SAME, "evaluation.suites=[heldout_rule]")
    with pytest.raises(ValueError, match="leave it out of"):
        check_compatible(run)
    with pytest.raises(ValueError, match="split must be one of"):
        open_state(run, torch.device("cpu"), None)
    assert not [*tmp_path.iterdir()]


LAGGING = (
    "evaluation.every=2", "budget.amount=6", "evaluation.probe_problems=8", "evaluation.heldout_problems=8",
    "evaluation.downstream_problems=8", "evaluation.ends_samples=2", "problems_per_step=4", "group_size=4",
    "optimizer.learning_rate=1e-3", "optimizer.warmup_updates=1", "correction=tis_token", "checkpoint_every=3",
)  # fmt: skip


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["one_step_off schedule.lag=2", "off_policy_k schedule.k=3", "in_flight"])
def test_the_weights_that_sampled_are_evaluated_and_training_does_not_notice(tmp_path: Path, schedule: str) -> None:
    settings = (*LAGGING, *f"schedule={schedule}".split())
    asked = run_in_process(tmp_path / "a", *settings, "evaluation.sampler_weights=true")
    plain = run_in_process(tmp_path / "b", *settings)
    lines, others = metrics_of(asked), metrics_of(plain)
    asks = [name for line in lines for name in line["metrics"] if name.startswith("eval/sampler_")]
    assert "eval/sampler_heldout/accuracy" in asks and "eval/sampler_downstream/accuracy" in asks
    assert not any(name.startswith("eval/sampler_") for name in lines[0]["metrics"])
    for line, other in zip(lines, others, strict=True):
        kept = {name: value for name, value in line["metrics"].items() if not name.startswith("eval/sampler_")}
        assert kept == other["metrics"]


@pytest.mark.extended
def test_the_evaluated_weights_are_those_that_sampled(tmp_path: Path) -> None:
    """With lag 2, the batch of step 4 is of the weights after step 1, which were evaluated then."""
    settings = (*LAGGING, "schedule=one_step_off", "schedule.lag=2", "evaluation.every=1", "budget.amount=5")
    folder = run_in_process(tmp_path, *settings, "evaluation.sampler_weights=true")
    tables = {step: pd.read_parquet(folder / "eval" / f"step={step:06d}.parquet") for step in (1, 4)}
    then, now = (table[table["suite"] == name] for table, name in ((tables[1], "heldout"), (tables[4], "heldout")))
    theirs = tables[4][tables[4]["suite"] == "sampler_heldout"]
    assert theirs["text"].tolist() == then["text"].tolist() != now["text"].tolist()


@pytest.mark.extended
def test_a_resumed_run_evaluates_the_same_old_weights(tmp_path: Path) -> None:
    settings = (*LAGGING, "schedule=one_step_off", "schedule.lag=2", "evaluation.sampler_weights=true")
    whole = run_in_process(tmp_path / "a", *settings)
    folder = run_in_process(tmp_path / "b", *settings)
    shutil.rmtree(folder / "checkpoints" / "step=000006")
    (folder / "DONE").unlink()
    again = run_in_process(tmp_path / "b", *settings)
    assert (again / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@dataclass(frozen=True)
class FailsOnEvenRows(Strict):
    """Strict, with a grader that fails on every second response, or on all."""

    may_fail: ClassVar[bool] = True
    always: bool

    def correctness(self, problems, texts, finished, keys) -> list[float]:
        judged = super().correctness(problems, texts, finished, keys)
        return [math.nan if self.always or row % 2 == 0 else one for row, one in enumerate(judged)]


@pytest.mark.extended
def test_answers_that_the_grader_failed_on_are_counted_and_in_no_accuracy(make_run) -> None:
    run = make_run(*SAME, "evaluation.pass_at=[1,2,3]")
    state = open_state(run, torch.device("cpu"), None)
    (heldout,) = (suite for suite in state.suites if suite.name == "heldout")
    rest = (state.session, state.tokenizer, run.template, run.evaluation, run.seed)
    whole, answers = evaluate([heldout], *rest, reward=FailsOnEvenRows(1.0, 0.0, False))
    failing = replace(heldout, verifier=FailsOnEvenRows(1.0, 0.0, False))
    metrics, table = evaluate([failing], *rest, reward=run.reward)
    assert metrics["eval/heldout/ungraded"] == 0.5 and "eval/heldout/ungraded" not in whole
    odd = answers[answers.index % 2 == 1]
    assert table["outcome"].isna().tolist() == [row % 2 == 0 for row in range(len(table))]
    assert metrics["eval/heldout/accuracy"] == pytest.approx(odd.groupby("problem_id")["outcome"].mean().mean())
    assert metrics["eval/heldout/agreement"] == whole["eval/heldout/agreement"] == 1.0, "of those that both judge"
    halves = {problem.id: "ab"[place // 6] for place, problem in enumerate(heldout.problems)}
    asked = tuple(replace(problem, source=halves[problem.id]) for problem in heldout.problems)
    by_source, _ = evaluate([replace(failing, problems=asked)], *rest)
    for source in "ab":
        mine = odd[odd["problem_id"].map(halves) == source]
        by_question = mine.groupby("problem_id")["outcome"].mean()
        assert set(mine["problem_id"].value_counts()) == {1, 2}, "questions have one or two graded answers"
        assert by_question.mean() != pytest.approx(mine["outcome"].mean()), "questions weigh alike, not answers"
        assert by_source[f"eval/heldout/source/{source}"] == pytest.approx(by_question.mean())
    assert "eval/heldout/pass_at_2" in metrics and "eval/heldout/pass_at_3" not in metrics
    inverted, _ = evaluate([heldout], *rest, reward=Inverted(1.0, 0.0))
    assert inverted["eval/heldout/agreement"] == 0.0
    with pytest.raises(ValueError, match=r"the grader failed on all \d+ answers of the suite heldout: see that it can"):
        evaluate([replace(heldout, verifier=FailsOnEvenRows(1.0, 0.0, True))], *rest)
    state.session.close()
