"""Questions that are too long for the model are left out, named and counted, in every split."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import pytest
from compositions import run_of
from helpers import byte_tokenizer
from short_runs import SMALL, run_in_process
from transformers import AutoTokenizer

from grpo_lab.cli import main
from grpo_lab.config.run_config import RunConfig
from grpo_lab.run.lengths import TRAINING, check_lengths, fitting

CONTEXT = 128  # of the tiny model, in tokens; one digit or sign is one
LONG = "+".join(["1"] * 80) + "?"  # 160 tokens
PLAIN = [
    "template=plain", "reward=strict", "verifier=exact_answer", "task.response_tokens=12",
    "task.downstream_response_tokens=12", "task.probe_rows=8", "evaluation.probe_problems=8",
    "evaluation.ends_probe_problems=8",
]  # fmt: skip


def jsonl(path: Path, questions: Sequence[str]) -> str:
    rows = [{"question": question, "answer": len(question)} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(first: int, number: int = 30) -> list[str]:
    return [f"{n % 9 + 1}+{n // 9}?" for n in range(first, first + number)]


@pytest.mark.extended
def test_a_run_leaves_out_what_does_not_fit_and_says_so(tmp_path: Path) -> None:
    """One question too long in each of three tables; the run goes on with the others."""
    paths = {
        split: jsonl(tmp_path / f"{split}.jsonl", [*sums(30 * place), LONG.replace("1", str(place + 1))])
        for place, split in enumerate(("train", "heldout", "downstream"))
    }
    words = [f"task.path={paths['train']}", *(f"task.{one}.path={paths[one]}" for one in ("heldout", "downstream"))]
    folder = run_in_process(
        tmp_path / "runs", "task=jsonl", *words, *SMALL, *PLAIN, "budget.amount=1", "rollouts_every=1",
        "evaluation.downstream_problems=31", "evaluation.heldout_problems=31",
    )  # fmt: skip
    said = [note for note in json.loads((folder / "run.json").read_text())["warnings"] if "have prompts of" in note]
    assert sum(" probe questions " in note for note in said) == 1, "its eight questions hold the long one by their hash"
    assert [note for note in said if " probe questions " not in note] == [
        f"1 of 31 {split} questions have prompts of more than 116 tokens (the model's context beside a response), such "
        f"as {LONG.replace('1', str(place + 1))[:60]!r} with 160; they are left out"
        for place, split in enumerate(("training", "heldout", "downstream"))
    ]
    answers = pd.concat(pd.read_parquet(path) for path in (folder / "eval").iterdir())
    numbers = answers.query("suite == 'heldout' or suite == 'downstream'").groupby("suite")["problem_id"].nunique()
    assert numbers.to_dict() == {"heldout": 30, "downstream": 30}
    assert set(answers["problem_id"] % 10_000_000) <= set(range(30)), "row 30 of each table is the long one"


def short(run: RunConfig, folder: Path, split: str) -> tuple[set[int], tuple[str, ...]]:
    """The lengths of the prompts that stay, and what is said."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = fitting(run.lengths, run.template, folder, tokenizer, run.task.problems(split), TRAINING)
    return {len(tokenizer(one.question)["input_ids"]) for one in found.problems}, found.notes


@pytest.mark.extended
def test_the_setting_holds_for_a_mixture_too(tmp_path: Path, tiny_base: Path) -> None:
    questions = [*sums(0, 20), *(f"{one}+10?" for one in sums(0, 20))]
    words = [
        f"+task.sources.{name}={{path: {jsonl(tmp_path / f'{name}.jsonl', part)}, weight: 1}}"
        for name, part in (("a", questions[:20]), ("b", questions[20:]))
    ]
    words = ["world=tiny", "task=mixture", *words, *PLAIN, "task.heldout_rows=4", "task.downstream_rows=4"]
    lengths, said = short(run_of(*words), tiny_base, "train")
    assert max(lengths) > 6 and said == ()
    lengths, (said,) = short(run_of(*words, "task.max_prompt_tokens=6"), tiny_base, "train")
    assert max(lengths) <= 6 and "prompts of more than 6 tokens (task.max_prompt_tokens=6)" in said
    with pytest.raises(
        ValueError, match=r"prompts of more than 2 tokens .* raise task\.max_prompt_tokens, or give short"
    ):
        short(run_of(*words, "task.max_prompt_tokens=2"), tiny_base, "train")
    with pytest.raises(ValueError, match=r"max_prompt_tokens must be at least 1, got 0: null leaves it to the context"):
        run_of(*words, "task.max_prompt_tokens=0")


@pytest.mark.extended
def test_questions_of_a_gym_may_be_too_long(tiny_base: Path) -> None:
    words = [
        "world=tiny", "task=gym", "task.family=chain_sum", "template=plain", "task.train_size=40", "task.probe_size=8",
        "task.heldout_size=8", "task.downstream_size=8", *PLAIN[3:5],
    ]  # fmt: skip
    run, tokenizer = run_of(*words, "task.max_prompt_tokens=70"), byte_tokenizer()
    problems = run.task.problems("heldout")
    kept = tuple(one for one in problems if len(one.question) <= 70)
    found = fitting(run.lengths, run.template, tiny_base, tokenizer, problems, "x")
    assert 0 < len(kept) < len(problems) and found.problems == kept


@pytest.mark.extended
def test_where_most_questions_do_not_fit_the_response_length_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    run = run_of("world=tiny", "task=jsonl", f"task.path={jsonl(tmp_path / 'q.jsonl', sums(0))}", *PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    problems = run.task.problems("train")
    short = run_of("world=tiny", "engine.max_tokens=126")
    assert fitting(short.lengths, short.template, tiny_base, tokenizer, problems, "x").problems == problems
    with pytest.raises(ValueError, match=r"engine\.max_tokens=12, .* lower engine\.max_tokens, .* to at most 8$"):
        check_lengths(run.lengths, CONTEXT, 120)
    with pytest.raises(
        ValueError, match=r"a prompt of 160 tokens exceed .* of 128 tokens: set task\.max_prompt_tokens to"
    ):
        check_lengths(run.lengths, CONTEXT, 160)


@pytest.mark.extended
def test_a_measured_pass_rate_asks_no_question_that_is_too_long(
    tmp_path: Path, tiny_base: Path, make_run: Callable[..., RunConfig]
) -> None:
    import torch

    from grpo_lab.run.training_problems import training_problems

    path = jsonl(tmp_path / "q.jsonl", [*sums(0, 80), *(LONG.replace("1", str(n)) for n in range(2, 5))])
    few = ["task.heldout_rows=1", "task.downstream_rows=1", "pass_rate=difficulty", "pass_rate.samples=2"]
    run = make_run("task=jsonl", f"task.path={path}", *PLAIN, *few, "problems_per_step=4")
    found = training_problems(run, torch.device("cpu"), tmp_path / "own")
    assert all(len(problem.question) < 20 for problem in found.problems)
    assert found.dropped["pass_rate"]["too_long"] == sum(len(one.question) > 20 for one in run.task.problems("train"))


@pytest.mark.extended
def test_explain_says_what_is_not_asked(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows without an answer and questions that are too long; and a table that a run would refuse."""
    path = jsonl(tmp_path / "q.jsonl", [*sums(0, 60), LONG])
    with open(path, "a") as file:
        file.write('{"question": "9+9?"}\n')

    def explained(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo-lab", "explain", "world=tiny", "task=jsonl", *PLAIN, *words])
        main()
        return capsys.readouterr().out

    held = [
        f"task.{split}.path={jsonl(tmp_path / f'{split}.jsonl', sums(first, 9))}"
        for split, first in (("heldout", 60), ("downstream", 70))
    ]
    text = explained(f"task.path={path}", *held)
    assert f"1 of 62 rows of {path} cannot be read and were left out: row 61 has nothing as its answer" in text
    assert "1 of 61 training questions have prompts of more than 116 tokens" in text and "first prompt, of" in text
    text = explained(f"task.path={path}", *held, "task.unreadable_share=0")
    assert f"1 of 62 rows of {path} cannot be used, more than task.unreadable_share=0 allows: row 61" in text
