"""What the model reads: BOS once, the same prompts on every way into it, a hash that a resume is held to."""

from __future__ import annotations

import ast
import datetime
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from compositions import option_names, run_of
from helpers import PACKAGE
from short_runs import run_in_process, same_ending
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.utils import chat_template_utils

from grpo_lab.cli import main
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.reproduce.record import check_inputs, read_record
from grpo_lab.rollout.grading import beginning, encode_prompts, tools_for
from grpo_lab.run.prompts import prompts_text, read_prompts
from grpo_lab.tasks.warm_start import ArithmeticBase
from grpo_lab.tracking.checksums import with_checksum
from grpo_lab.types import Completion, Problem, Request

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["</s>", "<s>", "<|im_start|>", "<|im_end|>"]
QUESTION = [Problem(0, "What is 1+2?", "3", 1)]


def tokenizer_of(form: str, chat_template: str = CHATML) -> transformers.PreTrainedTokenizerFast:
    """Bytes and a few marks; `form` is what the tokenizer makes of a text, such as `<s> $A </s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({one: place for place, one in enumerate([*MARKS, *alphabet])}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(MARKS)
    if form != "$A":
        ends = [(mark, words.token_to_id(mark)) for mark in MARKS[:2]]
        words.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def test_each_hash_is_of_its_own_prompts() -> None:
    tokenizer, template = tokenizer_of("<s> $A"), run_of("template=chat").template
    other = [Problem(0, "What is 1+3?", "4", 1)]
    read = [read_prompts(tokenizer, template, *of) for of in ((QUESTION, other), (other, QUESTION), (other, other))]
    assert read[0].training == read[1].evaluation != read[0].evaluation == read[1].training
    assert read[2].training == read[2].evaluation == read[0].evaluation
    assert read_prompts(tokenizer, template, [*other, *QUESTION], other).training not in (
        read[0].training, read[1].training,
    )  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("template", option_names("template"))
def test_a_prompt_begins_once_as_the_tokenizer_begins_a_text(template: str) -> None:
    held = run_of(f"template={template}").template
    for form in ("$A", "<s> $A", "<s> $A </s>"):
        for chat_template in (CHATML, "{{ bos_token }}" + CHATML):
            tokenizer = tokenizer_of(form, chat_template)
            (prompt,) = encode_prompts(tokenizer, held, QUESTION)
            text = held.render(QUESTION[0].question, tokenizer)
            written = text.startswith("<s>")
            assert prompt.count(1) == (form != "$A" or written) and prompt.count(0) == 0, "no EOS"
            assert tokenizer.decode(list(prompt)) == ("" if written or form == "$A" else "<s>") + text
            if form == "<s> $A" and not written:
                assert list(prompt) == tokenizer(text)["input_ids"]
            said = read_prompts(tokenizer, held, QUESTION, QUESTION)
            who = "the template writes" if written else "the tokenizer puts" if form != "$A" else "no BOS"
            assert who in said.begins_with and said.token_ids == prompt
            assert f"token ids {' '.join(map(str, prompt))}" in prompts_text(said)


def test_what_is_put_into_a_response_gets_no_bos() -> None:
    tokenizer = tokenizer_of("<s> $A")
    assert tools_for(tokenizer).encode("#") == tuple(tokenizer("#")["input_ids"][1:])


def test_all_prompts_come_through_one_door() -> None:
    """Whoever renders or encodes a prompt elsewhere could make another one of it."""
    allowed = {
        "template.render": {"rollout/grading.py", "run/prompts.py"},
        # That of lm_eval, and two looks at what a chat template makes of a message; no model reads either.
        "apply_chat_template": {"tasks/templates.py", "harness/worker.py", "policy/model_folder.py", "tasks/hub.py"},
        "add_special_tokens": {"rollout/grading.py", "tasks/smollm2.py"},  # the second: to a vocabulary
    }
    found: dict[str, set[str]] = {name: set() for name in allowed}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                written = ast.unparse(node.func)
                words = {str(word.arg) for word in node.keywords}
                for name in allowed:
                    if written.endswith(name) or name in words:
                        found[name].add(path.relative_to(PACKAGE).as_posix())
    assert found == allowed


def with_bos(tiny_base: Path, folder: Path) -> Path:
    """The tiny base, with a tokenizer that begins every text with its padding token."""
    shutil.copytree(tiny_base, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.pad_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.extended
def test_every_way_into_the_model_reads_the_same_prompts(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_bos(tiny_base, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    bos, seen = tokenizer.pad_token_id, []
    generate = NativeSession.generate

    def watched(session: NativeSession, requests: list[Request], *rest: Any) -> list[Completion]:
        seen.extend((request.noise.stream, request.prompt) for request in requests)
        return generate(session, requests, *rest)

    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(NativeSession, "generate", watched)
    run_in_process(
        tmp_path / "runs", "model=hf", f"model.path={folder}", "task.train_size=48", "task.probe_size=8",
        "evaluation=brief", "evaluation.probe_problems=4", "evaluation.heldout_problems=4",
        "evaluation.downstream_problems=4", "pass_rate=difficulty", "pass_rate.samples=2", "sft=rejection_sampling",
        "sft.problems=16", "sft.epochs=1", "reward=random", "baseline=greedy", "scale=none", "budget.amount=1",
        "problems_per_step=4", "checkpoint_every=1",
    )  # fmt: skip
    streams = {stream.partition("/")[0] for stream, _ in seen}
    assert {"train", "eval", "sft", "pass_rate"} <= streams, "each was asked"
    assert all(prompt[0] == bos and bos not in prompt[1:] for _, prompt in seen)


def dated(tiny_base: Path, folder: Path) -> Path:
    """The tiny base with a chat template that writes the day of the month before the question, as one more addend."""
    shutil.copytree(tiny_base, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ strftime_now('%d') }}+{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def on_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """on_day(2): what chat templates take for today is 2 January 2026."""

    def set_to(day: int) -> None:
        class Day(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
                return datetime.datetime(2026, 1, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Day)

    return set_to


@pytest.mark.extended
def test_a_resume_on_another_day_is_refused_until_the_prompts_are_what_they_were(
    tmp_path: Path, tiny_base: Path, on_day: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    model = dated(tiny_base, tmp_path / "model")
    words = [
        "model=hf", f"model.path={model}", "template=chat_plain", "template.interruption='#'", "evaluation=brief",
        "evaluation.heldout_problems=8", "evaluation.downstream_problems=8", "evaluation.probe_problems=8",
        "problems_per_step=4", "budget.amount=2", "checkpoint_every=1",
    ]  # fmt: skip
    on_day(11)
    whole = run_in_process(tmp_path / "whole", *words, checked=0)
    described = json.loads((whole / "run.json").read_text())
    text = described["prompts"]["text"]
    assert text.startswith("11+") and text in (whole / "first_prompt.txt").read_text()
    assert "prompts change at midnight" in described["warnings"][-1]
    began = tmp_path / "began" / "run" / "seed=0"
    shutil.copytree(whole, began)

    def unfinished() -> None:
        (began / "DONE").unlink(missing_ok=True)
        shutil.rmtree(began / "checkpoints" / "step=000002", ignore_errors=True)

    unfinished()
    on_day(12)
    capsys.readouterr()
    said = rf"prompts of training and evaluation have changed.*'{text[:5]}.* there, '12.* now.*replace it by the run's"
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        run_in_process(tmp_path / "began", *words, checked=0)
    with pytest.raises(ValueError, match="cannot be repeated from other inputs: the prompts of training and"):
        check_inputs(read_record(whole))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = tokenizer.chat_template.replace("strftime_now('%d')", "'11'")
    tokenizer.save_pretrained(model)
    check_inputs(read_record(whole))
    same_ending(whole, run_in_process(tmp_path / "began", *words, checked=0))
    # A run of before there was a hash goes on.
    unfinished()
    described.pop("prompts")
    (began / "run.json").write_text(json.dumps(with_checksum(described)))
    same_ending(whole, run_in_process(tmp_path / "began", *words, checked=0))
    assert "prompts" in json.loads((began / "run.json").read_text())


@pytest.mark.extended
def test_explain_shows_the_first_prompt_where_nothing_has_to_be_fetched(
    tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explained(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo-lab", "explain", "world=tiny", *words])
        main()
        return capsys.readouterr().out.partition("\nfirst prompt")[2]

    first = run_of("world=tiny").task.problems("train")[0].question
    assert first in explained() and "the tokenizer puts no BOS before it" in explained()
    folder = with_bos(tiny_base, tmp_path / "model")
    assert "begins with <pad>, which the tokenizer puts before every text" in explained(
        "model=hf", f"model.path={folder}"
    )
    assert "the model is not on this machine" in explained("model=hf", "model.path=nobody/nothing")
    assert "choose template=r1, boxed or none" in explained("template=chat", "model=hf", f"model.path={folder}")
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    assert "the model is not on this machine" in explained("model.hidden_size=8"), "to build it takes minutes"
    assert "the questions are not on this machine" in explained("task=gsm8k", "template=plain")


@pytest.mark.few(1)
@pytest.mark.parametrize("world", option_names("world"))
def test_prompts_of_the_worlds_that_come_with_it_are_the_bare_texts(world: str) -> None:
    """What was recorded was made without BOS."""
    model = run_of(f"world={world}").model
    if isinstance(model, ArithmeticBase):
        assert beginning(model.tokenizer(), "1+1?") == ()
