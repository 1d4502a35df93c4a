"""`grpo-lab evaluate`: checkpoints under other harnesses, against our own greedy evaluation of the same questions.

Each harness is really run where it is installed. What is refused before it starts is tried without one.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from compositions import run_of
from short_runs import metrics_of, run_in_process
from tokenizers import processors
from transformers import AutoTokenizer

from grpo_lab import cli
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.config.run_config import RunConfig
from grpo_lab.harness import worker
from grpo_lab.harness.command import HarnessPlan, Settings, evaluate, runs_of, suites_of, weights_of
from grpo_lab.rollout.grading import encode_prompts
from grpo_lab.tracking.checksums import check_finished, read_json
from grpo_lab.tracking.harness_results import HarnessResult
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep
from grpo_lab.types import Problem

LM_EVAL_TASK = r"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: [], max_gen_toks: 40, do_sample: false}}
filter_list:
  - name: final
    filter: [{{function: regex, regex_pattern: "#([0-9]+)$", fallback: none}}, {{function: take_first}}]
metric_list: {metrics}
metadata: {{version: 3}}
"""
INSPECT_TASK = r"""
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate


@task
def sums():
    questions = json_dataset("questions.jsonl", FieldSpec(input="question", target="answer"))
    greedy = GenerateConfig(max_tokens=40)
    return Task(dataset=questions, solver=generate(), scorer=pattern(r"#([0-9]+)$"), config=greedy, version=3)
"""
SETTINGS = Settings(metric=None, limit=None, num_fewshot=None, apply_chat_template=False, dtype="float32")


@dataclass(frozen=True)
class Place:
    """A finished run of four steps whose own held-out evaluation is greedy, and its questions as tasks."""

    run: Path
    tasks: Path
    own: dict[int, pd.DataFrame]  # step -> our answers

    def plan(self, harness: str, task: str, **changes: Any) -> HarnessPlan:
        plan = HarnessPlan(
            harness=harness,
            tasks=suites_of(harness, [task], None),
            steps=["last"],
            base=False,
            settings=SETTINGS,
            include_path=str(self.tasks) if harness == "lm_eval" else None,
            batch_size="16",
            device="cpu",
            python=sys.executable,
            again=False,
            command=["test"],
        )
        return replace(plan, **changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("harness")
    run = run_in_process(
        folder / "runs", "evaluation=brief", "evaluation.temperature=0", "evaluation.every=2", "budget.amount=4",
        "evaluation.probe_problems=16", "evaluation.downstream_problems=16", "evaluation.heldout_problems=64",
        "evaluation.initial_kl=false", "checkpoint_every=2", "optimizer.learning_rate=1e-3",
    )  # fmt: skip
    record_sweep(folder / "runs", "one", [RunEntry("run", "", 0, "run/seed=0")], None, None, "x", ["test"], None, None)
    own = {}
    for step in (0, 2, 4):
        table = pd.read_parquet(run / "eval" / f"step={step:06d}.parquet")
        own[step] = table[table["suite"] == "heldout"].reset_index(drop=True)
    tasks = folder / "tasks"
    tasks.mkdir()
    questions = tasks / "questions.jsonl"
    own[0][["question", "answer"]].to_json(questions, orient="records", lines=True)
    share = "[{metric: exact_match, aggregation: mean, higher_is_better: true}]"
    (tasks / "sums.yaml").write_text(LM_EVAL_TASK.format(name="own_sums", questions=questions, metrics=share))
    (tasks / "sums.py").write_text(INSPECT_TASK)
    return Place(run, tasks, own)


def copied(place: Place, to: Path) -> Path:
    """The run again, without results."""
    return Path(shutil.copytree(place.run, to / "seed=0", ignore=shutil.ignore_patterns("harness")))


def measured(place: Place, plan: HarnessPlan) -> dict[int, HarnessResult]:
    """Step -> result; each was measured now."""
    found = list(evaluate(place.run, plan))
    assert all(run == place.run and now for run, _, now in found)
    return {result.step: result for _, result, _ in found}


def same_answers(place: Place, suite: str, results: dict[int, HarnessResult]) -> None:
    """Response by response the harness read what we read, and its accuracy is ours."""
    for step, result in results.items():
        ours = metrics_of(place.run)[step]["metrics"]
        assert result.logged()[f"eval/{suite}/accuracy"] == ours["eval/heldout/accuracy"]
        assert result.logged()[f"eval/{suite}/accuracy_se"] == pytest.approx(ours["eval/heldout/accuracy_se"])
        assert (result.samples, result.task_version, result.harness_version) == (64, 3, result.harness_version)
        answers = pd.read_parquet(place.run / "harness" / suite / f"step={step:06d}.parquet")
        theirs = answers.set_index("question").loc[place.own[step]["question"]].reset_index()
        assert theirs["answer"].tolist() == place.own[step]["text"].tolist()
        assert theirs["target"].tolist() == place.own[step]["answer"].tolist()
        assert theirs["score"].tolist() == place.own[step]["outcome"].tolist()
    assert len({result.questions for result in results.values()}) == 1
    assert len({result.weights for result in results.values()}) == len(results)


@pytest.mark.extended
def test_lm_eval_measures_what_we_measure_and_all_readers_see_it(place: Place) -> None:
    plan = place.plan("lm_eval", "own_sums", steps=["all"], base=True)
    before = (place.run / "metrics.jsonl").read_bytes()
    results = measured(place, plan)
    assert set(results) == {0, 2, 4} and results[4].metric == "exact_match,final"
    assert len({result.logged()["eval/lm_eval_own_sums/accuracy"] for result in results.values()}) > 1
    same_answers(place, "lm_eval_own_sums", results)
    # Nothing of the run itself has changed.
    assert (place.run / "metrics.jsonl").read_bytes() == before
    _, said = check_finished(place.run, read_json(place.run / "run.json", ""))
    assert said == []
    # What is there is not measured again: no worker starts.
    again = list(evaluate(place.run, replace(plan, python="/no/such/python")))
    assert [(result.step, now) for _, result, now in again] == [(0, False), (2, False), (4, False)]
    with pytest.raises(ValueError, match=r"/no/such/python cannot be started"):
        list(evaluate(place.run, replace(plan, python="/no/such/python", again=True)))
    # Other settings would not be comparable.
    fewer = replace(plan, settings=replace(SETTINGS, limit=8))
    with pytest.raises(ValueError, match=r"other settings \(limit: None there, 8 now\): choose another --name"):
        list(evaluate(place.run, fewer))
    data = load_sweep(place.run.parents[1], "one")
    points = data.points.set_index("step")["eval/lm_eval_own_sums/accuracy"].dropna()
    own = data.points.set_index("step")["eval/heldout/accuracy"].dropna()
    pd.testing.assert_series_equal(points, own, check_names=False)
    finals = final_values(data).values
    assert finals["eval/lm_eval_own_sums/accuracy"].item() == own[4]


@pytest.mark.extended
def test_inspect_measures_what_we_measure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plan = place.plan("inspect", f"{place.tasks / 'sums.py'}@sums", base=True)
    results = measured(place, plan)
    assert set(results) == {0, 4} and results[4].metric == "pattern/accuracy"
    same_answers(place, "inspect_sums", results)


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("begins", ["", "{{ bos_token }}"])
def test_inspect_reads_bos_once_as_we_do(tiny_base: Path, tmp_path: Path, begins: str) -> None:
    from inspect_ai.model import GenerateConfig, get_model

    folder = tmp_path / "model"
    shutil.copytree(tiny_base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = tokenizer.pad_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.pad_token_id)]
    )
    tokenizer.chat_template = f"{begins}{{{{ messages[0]['content'] }}}}"
    tokenizer.save_pretrained(folder)
    model = get_model("hf/checkpoint", memoize=False, model_path=str(folder), device="cpu")
    worker._one_bos(model.api)
    template = run_of("template=chat_plain").template
    (ours,) = encode_prompts(tokenizer, template, [Problem(0, "1+2?", "3", 1)])
    answer = asyncio.run(model.generate("1+2?", config=GenerateConfig(max_tokens=2)))
    assert answer.usage is not None and answer.usage.input_tokens == len(ours) == 1 + 4


@pytest.mark.extended
@pytest.mark.parametrize(
    "spec,message",
    [("sums.py@product", "has no task 'product'; it has sums"), ("none.py@sums", "there is no file .*none.py")],
)
def test_a_task_that_inspect_does_not_have_is_refused(place: Place, spec: str, message: str) -> None:
    plan = replace(place.plan("inspect", str(place.tasks / spec)), tasks={"inspect_other": str(place.tasks / spec)})
    with pytest.raises(ValueError, match=message):
        list(evaluate(place.run, plan))


@pytest.mark.extended
def test_a_task_or_metric_that_lm_eval_does_not_have_is_refused_before_a_model_loads(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"lm_eval knows no task 'own_sum'; did you mean own_sums.*--include-path"):
        list(evaluate(place.run, place.plan("lm_eval", "own_sum")))
    mistaken = place.plan("lm_eval", "own_sums", again=True, settings=replace(SETTINGS, metric="f1"))
    with pytest.raises(ValueError, match=r"own_sums has no metric 'f1': choose --metric of exact_match,final"):
        list(evaluate(place.run, replace(mistaken, tasks={"lm_eval_other": "own_sums"})))
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.extended
def test_a_few_questions_with_a_metric_by_name_and_the_same_weights_once(place: Place, tmp_path: Path) -> None:
    """Two runs of one base: it is asked once, and both get the result."""
    runs = [copied(place, tmp_path / name) for name in "ab"]
    settings = replace(SETTINGS, limit=8, metric="exact_match")
    plan = place.plan("lm_eval", "own_sums", steps=["0"], settings=settings, tasks={"lm_eval_few": "own_sums"})
    found = list(evaluate(tmp_path, plan))
    assert [run for run, _, _ in found] == runs and all(now for _, _, now in found)
    (one, other) = (result for _, result, _ in found)
    assert one.metrics == other.metrics and one.samples == 8 and one.metric == "exact_match,final"
    share = place.own[0]["outcome"].head(8).mean()
    assert one.logged()["eval/lm_eval_few/accuracy"] == share


@pytest.mark.extended
def test_a_task_without_its_data_or_with_a_metric_that_is_no_share_is_refused(place: Place) -> None:
    text = (place.tasks / "sums.yaml").read_text()
    (place.tasks / "lost.yaml").write_text(text.replace("own_sums", "lost").replace("questions.jsonl", "lost.jsonl"))
    with pytest.raises(
        ValueError, match=r"lm_eval cannot load the task 'lost' \(.*without a network, its data have to"
    ):
        list(evaluate(place.run, place.plan("lm_eval", "lost")))
    bleu = text.replace("own_sums", "scored").replace(
        "metric: exact_match, aggregation: mean", "metric: bleu, aggregation: bleu"
    )
    (place.tasks / "scored.yaml").write_text(bleu)
    with pytest.raises(ValueError, match=r"bleu,final of scored is [0-9.]+, no share of answers: choose --metric"):
        list(evaluate(place.run, place.plan("lm_eval", "scored")))
    assert not (place.run / "harness" / "lm_eval_scored").exists()


@pytest.mark.extended
@pytest.mark.parametrize("harness,package", [("lm_eval", "lm-eval"), ("inspect", "inspect-ai")])
def test_a_python_without_the_harness_is_refused_with_what_to_install(
    place: Place, tmp_path: Path, harness: str, package: str
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    task = "gsm8k" if harness == "lm_eval" else f"{place.tasks / 'sums.py'}@other"
    extra = package.removesuffix("-ai")
    with pytest.raises(
        ValueError, match=rf"has no {package}: pip install -c constraints.txt -e '.\[{extra}\]', or name"
    ):
        list(evaluate(place.run, place.plan(harness, task, python=str(bare))))


def test_the_weights_of_a_run_are_those_it_saved(place: Place, tmp_path: Path) -> None:
    run = copied(place, tmp_path)
    every = weights_of(run, ["all"], base=True)
    assert [(one.step, one.folder.name) for one in every[1:]] == [(2, "step=000002"), (4, "step=000004")]
    assert every[0].step == 0 and every[0].fingerprint == json.loads((run / "base.json").read_text())["fingerprint"]
    assert [one.step for one in weights_of(run, ["4", "0", "last"], base=False)] == [0, 4]
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3; it has 2, 4: choose one"):
        weights_of(run, ["3"], base=False)
    weights = run / "checkpoints" / "step=000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert [one.step for one in weights_of(run, ["last"], base=False)] == [2]  # the newest whole one
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        weights_of(run, ["4"], base=False)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(
        ValueError, match=r"has no whole checkpoint \(it saved none\): evaluate its base with --steps 0"
    ):
        weights_of(run, ["last"], base=False)
    (run / "base.json").write_text('{"fingerprint": "0123456789abcdef"}')
    with pytest.raises(ValueError, match=r"began with the weights 0123456789abcdef.*give back what it had"):
        weights_of(run, ["0"], base=False)


def test_a_folder_stands_for_its_finished_runs(place: Place, tmp_path: Path) -> None:
    run = copied(place, tmp_path / "a")
    assert runs_of(tmp_path) == runs_of(run) == [run]
    assert runs_of(place.run.parents[1] / "sweeps" / "one") == [place.run]
    (run / "DONE").unlink()
    assert runs_of(run) == [run]  # by its own name a run counts as it is
    with pytest.raises(ValueError, match=r"holds no finished run, of 1 runs"):
        runs_of(tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder .*none: give a run's folder"):
        runs_of(tmp_path / "none")


def test_a_run_names_no_table_as_a_harness_names_its_suites(make_run: Callable[..., RunConfig]) -> None:
    with pytest.raises(ValueError, match=r"tables must be named without the prefix lm_eval_ or inspect_"):
        make_run("+evaluation.tables={lm_eval_a: {path: x.jsonl}}")


def test_names_that_cannot_be_told_apart_are_refused() -> None:
    assert suites_of("inspect", ["a/b.py@sums", "pkg/gsm8k"], None) == {
        "inspect_sums": "a/b.py@sums", "inspect_gsm8k": "pkg/gsm8k",
    }  # fmt: skip
    assert suites_of("lm_eval", ["gsm8k"], "five-shot") == {"lm_eval_five_shot": "gsm8k"}
    for tasks, name, message in (
        (["a.py@sums", "b.py@sums"], None, "would both be called inspect_sums"),
        (["a.py@sums", "b.py@diff"], "x", "--name x names one task, and --tasks has 2"),
        (["a.py"], None, "say which of its tasks, a.py@NAME"),
        ([], None, "--tasks names no task"),
    ):
        with pytest.raises(ValueError, match=message):
            suites_of("inspect", tasks, name)


@pytest.mark.parametrize(
    "words,message",
    [
        (["--steps", "first"], "--steps first: say all, last, best, or numbers of steps"),
        (["--limit", "0"], "--limit 0: ask at least one question"),
        (["--include-path", "/no/such"], "there is no folder /no/such of lm_eval tasks"),
        (["--harness", "inspect", "--num-fewshot", "2"], "--num-fewshot is an option of lm_eval only"),
        (["--harness", "inspect", "--batch-size", "auto"], "--batch-size auto: give Inspect a number"),
        (["--apply-chat-template"], "has no chat template: leave --apply-chat-template out"),
    ],
)
def test_what_cannot_be_asked_is_refused_on_the_command_line(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    command = ["grpo-lab", "evaluate", str(place.run), "--harness", "lm_eval", "--tasks", "gsm8k", *words]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=message):
        cli.main()
