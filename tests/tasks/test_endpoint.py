"""Asking a judge: retries, silence, rates, the cache and refusals, against a real HTTP server of the same protocol."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import PACKAGE
from judge_server import BEHAVIOURS, JudgeServer, judge_server
from processes import python_path

from grpo_lab.tasks import endpoint
from grpo_lab.tasks.endpoint import Endpoint
from grpo_lab.tasks.rubrics import SCORE, read_score

PLAIN = Endpoint(
    base_url="", model="judge", key_from="", settings={"temperature": 0.0, "max_tokens": 9}, structured=True,
    parallel=4, per_minute=0, seconds=5.0, retries=3, cache="",
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server(lambda prompt: f"said {prompt}") as opened:
        yield opened


@pytest.fixture(autouse=True)
def afresh() -> None:
    """As in a new process: nothing is held in memory."""
    endpoint._opened.clear()
    endpoint._warned.clear()


def at(server: JudgeServer, **changes: Any) -> Endpoint:
    return replace(PLAIN, base_url=server.url, **changes)


@pytest.mark.extended
def test_each_prompt_is_asked_once_and_answers_keep_their_order(server: JudgeServer) -> None:
    asked = at(server)
    asked.check()
    assert asked.ask(["b", "a", "b"], SCORE) == ["said b", "said a", "said b"]
    assert sorted(server.prompts) == ["a", "b"]
    assert asked.ask(["a", "c"], SCORE) == ["said a", "said c"] and len(server.asked) == 3, "a is held in memory"
    assert asked.ask([], SCORE) == []
    body = server.asked[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.0, 9)
    schema = {"name": "answer", "strict": True, "schema": SCORE}
    assert body["response_format"] == {"type": "json_schema", "json_schema": schema}, "as OpenAI's API has it"
    assert set(body) == {"model", "messages", "response_format", *PLAIN.settings}, "some servers refuse any other key"
    at(server, structured=False).ask(["a"], SCORE)
    assert "response_format" not in server.asked[-1]


def test_no_more_requests_are_on_their_way_than_parallel_says(server: JudgeServer) -> None:
    server.pause = 0.1
    at(server, parallel=3).ask(list("abcdefg"), SCORE)
    assert server.most_open == 3


def test_errors_that_pass_are_repeated_after_growing_pauses(server: JudgeServer) -> None:
    server.faults = [500, 429, 503]
    assert at(server).ask(["a"], SCORE) == ["said a"]
    assert server.prompts == ["a"] * 4
    gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:])]
    assert gaps[0] > 0.3 and gaps[2] > 1.4, "half a second, then one, then two, less a quarter by chance at most"


def test_the_server_may_say_how_long_to_wait(server: JudgeServer) -> None:
    server.faults, server.headers = [429], {"retry-after": "2"}
    assert at(server).ask(["a"], SCORE) == ["said a"]
    assert 1.9 < server.times[1] - server.times[0] < 4


def test_silence_is_no_answer_and_the_request_is_repeated(server: JudgeServer) -> None:
    server.faults = [2.0]
    assert at(server, seconds=0.5).ask(["a"], SCORE) == ["said a"]
    assert len(server.asked) == 2 and server.times[1] - server.times[0] < 1.9


def test_what_stays_unanswered_is_none_and_is_asked_again_the_next_time(server: JudgeServer) -> None:
    server.faults = [500, 500]
    asked = at(server, retries=0, parallel=1)
    assert asked.ask(["a", "b", "c"], SCORE) == [None, None, "said c"]
    assert asked.ask(["a", "b", "c"], SCORE) == ["said a", "said b", "said c"] and len(server.asked) == 5


def test_the_rate_counts_repeated_requests_too(server: JudgeServer) -> None:
    server.faults = [500]
    at(server, per_minute=120, parallel=8).ask(["a", "b", "c"], SCORE)  # one every half second
    gaps = [later - earlier for earlier, later in zip(server.times, server.times[1:])]
    assert len(gaps) == 3 and all(gap > 0.45 for gap in gaps)


@pytest.mark.extended
def test_answers_outlive_the_process_and_belong_to_model_prompt_and_settings(
    server: JudgeServer, tmp_path: Path
) -> None:
    kept = at(server, cache=str(tmp_path / "deep" / "answers.sqlite"))
    assert kept.ask(["a"], SCORE) == ["said a"]
    server.answer = lambda prompt: "something else"
    code = f"from grpo_lab.tasks.endpoint import Endpoint\nprint({kept!r}.ask(['a'], {SCORE!r}))"
    env = {**os.environ, "PYTHONPATH": python_path(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env)
    assert done.stdout.strip() == "['said a']", done.stderr
    assert len(server.asked) == 1
    with judge_server(lambda prompt: "from elsewhere") as moved:
        assert replace(kept, base_url=moved.url).ask(["a"], SCORE) == ["said a"], "the address is no part of the key"
    for changed in (replace(kept, model="other"), replace(kept, settings={"temperature": 1.0})):
        assert changed.ask(["a"], SCORE) == ["something else"]
    assert replace(kept, structured=False).ask(["a"], SCORE) == ["something else"]
    assert kept.ask(["a"], {"type": "number"}) == ["something else"]


def test_the_shared_cache_is_in_grpo_labs_own(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    at(server, cache="shared").ask(["a"], SCORE)
    assert (tmp_path / "judge" / "answers.sqlite").exists()


def test_text_that_is_no_unicode_is_asked_and_kept(server: JudgeServer) -> None:
    server.answer = lambda prompt: "half a sign: \ud83d"
    assert at(server).ask(["a"], SCORE) == ["half a sign: ?"]


def test_a_key_is_read_from_the_environment_and_a_wrong_one_is_refused(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"
    monkeypatch.setenv("JUDGE_KEY", "secret")
    at(server, key_from="JUDGE_KEY").check()
    assert at(server, key_from="JUDGE_KEY").ask(["a"], SCORE) == ["said a"]
    refused = rf"{server.url} refuses judge \(.*wrong key.*: correct base_url, model or "
    with pytest.raises(ValueError, match=refused + "key_from, which names no key"):
        at(server).ask(["a"], SCORE)
    with pytest.raises(ValueError, match="refuses judge"):
        at(server).check()
    monkeypatch.setenv("JUDGE_KEY", "")
    with pytest.raises(ValueError, match="the environment variable JUDGE_KEY is empty: put the key of http"):
        at(server, key_from="JUDGE_KEY", model="another").check()


def test_the_address_may_come_from_the_environment(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    assert PLAIN.ask(["a"], SCORE) == ["said a"]


def test_a_server_that_is_not_there_or_answers_nothing_is_an_error_with_a_remedy(
    server: JudgeServer, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"no server answers at http://127.0.0.1:9/v1 \(.*: start it \(vllm serve judge"
    ):
        replace(PLAIN, base_url="http://127.0.0.1:9/v1", retries=0).check()
    server.faults = [500, 500]
    with pytest.raises(ValueError, match=r"answered none of 2 requests \(the last: InternalServerError.*fault 500"):
        at(server, retries=0).ask(["a", "b"], SCORE)
    server.faults = [404]
    with pytest.raises(ValueError, match=r"refuses judge .*fault 404.*: correct base_url, model or"):
        at(server).ask(["a"], SCORE)
    (tmp_path / "text").write_text("no database, and longer than the header of one\n" * 9)
    with pytest.raises(ValueError, match=r"the answers of the judge cannot be kept in .*text .*: give another file"):
        at(server, cache=str(tmp_path / "text")).check()


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model": ""}, "model must be a text"),
        ({"parallel": 0}, "parallel must be at least 1"),
        ({"per_minute": -1}, "per_minute must"),
        ({"retries": -1}, "retries must"),
        ({"seconds": 0.0}, "seconds must"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


# --- a server that does not answer as it should ---------------------------------------------------------------

# Texts that the protocol allows, which a judge's score cannot be read from.
TEXTS = {"a score of 5,000 digits", "a deeply nested answer", "a fence that never ends", "a content that is null"}


# Each waits up to a second, and all but the texts end in the same refusal.
@pytest.mark.few(12)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_bad_answer_is_counted_while_others_are_good_and_refused_when_there_is_no_other(
    server: JudgeServer, behaviour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request whose turn it is gets the behaviour; the same judge gives the other two a score."""
    server.answer = lambda prompt: '{"score": 0.5}'
    asked, began = at(server, seconds=1.0, retries=0, parallel=1), time.monotonic()
    server.faults = [behaviour]
    with caplog.at_level(logging.WARNING, "grpo_lab.tasks"):
        answers = asked.ask(["a", "b", "c"], SCORE)
    scores = list(map(read_score, answers))
    assert math.isnan(scores[0]) and scores[1:] == [0.5, 0.5]
    assert (answers[0] is None) == (behaviour not in TEXTS)
    if behaviour in TEXTS:
        return
    assert "judge at http" in caplog.text and "no answer to 1 of 3 requests, which are not graded (" in caplog.text
    server.faults = [behaviour]
    with pytest.raises(ValueError, match=r"answered none of 1 requests \(the last: .*see that the server runs"):
        asked.ask(["d"], SCORE)
    assert time.monotonic() - began < 20, "two requests of a second each, on a machine that does much else"


@pytest.mark.few(8)
@pytest.mark.parametrize("behaviour", sorted(BEHAVIOURS.keys() - TEXTS))
def test_a_server_that_lists_no_models_as_the_protocol_says_is_refused_with_a_remedy(
    server: JudgeServer, behaviour: str
) -> None:
    server.listing = behaviour
    try:
        at(server, seconds=0.5, retries=0).check()
    except ValueError as error:
        assert "orrect base_url" in str(error) and server.url in str(error)


def test_a_web_page_in_place_of_the_list_of_models_is_named(server: JudgeServer) -> None:
    server.listing = "a web page"
    with pytest.raises(ValueError, match=r"/v1/models is no list of models \(.*web page or a proxy. Correct base_url"):
        at(server).check()


def test_a_kind_of_reason_is_shown_once(server: JudgeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.answer = lambda prompt: '{"score": 0.5}'
    for prompts in (["a", "b"], ["c", "d"]):
        server.faults = ["bad JSON"]
        at(server, parallel=1).ask(prompts, SCORE)
    assert len(caplog.records) == 1
