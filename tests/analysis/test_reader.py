"""What a run keeps of its responses and of its distance from the start, and how both are read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import make_rollouts
from planted_sweeps import Planted, synthetic_sweep
from short_runs import metrics_of, run_in_process

from grpo_lab.analysis.report import reader_page
from grpo_lab.analysis.report.reader import (
    Filter,
    facts,
    find_run,
    paired,
    read_rollouts,
    response_text,
    rollout_steps,
    scale_of,
    shade,
    tokens_of,
)
from grpo_lab.analysis.report.reader_terminal import show_pair, show_run
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.run.evaluate import kl_of_responses
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep
from grpo_lab.tracking.terminal import Terminal

BRIEF = [
    "budget.amount=4", "rollouts_every=2", "evaluation.every=2", "task=tiny", "engine.max_tokens=10",
    "optimizer.learning_rate=0.0005", "optimizer.warmup_updates=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """Two arms of one seed, as a sweep: one clips and masks, the other is plain."""
    root = tmp_path_factory.mktemp("runs")
    clipped = ["surrogate=ppo", "surrogate.clip_low=0.01", "surrogate.clip_high=0.01", "truncation=mask_after"]
    run_in_process(root, *BRIEF, name="plain")
    run_in_process(root, *BRIEF, *clipped, name="clipped")
    entries = [RunEntry(arm, "", 0, f"{arm}/seed=0") for arm in ("plain", "clipped")]
    record_sweep(root, "two", entries, None, None, "", ["test"], None, None)
    return root


# ---- what a run keeps


def test_kl_of_responses_by_hand() -> None:
    rollouts = make_rollouts([2, 3], 2, sampler=torch.tensor([[-1.0, -2.0, 9.0], [-0.5, -0.25, -0.125]]))
    initial = torch.tensor([[-1.5, -2.0, -9.0], [-1.0, 0.0, -1.0]])
    # (0.5 + 0) and (0.5 - 0.25 + 0.875); the third column of the first response is padding
    assert kl_of_responses(rollouts, initial) == pytest.approx((0.5 + 1.125) / 2)


@pytest.mark.extended
def test_the_distance_from_the_start_is_zero_at_the_start_and_grows(runs: Path) -> None:
    lines = [line["metrics"].get("eval/heldout_training/kl_initial") for line in metrics_of(runs / "plain/seed=0")]
    assert [value is not None for value in lines] == [True, False, True, False, True]
    assert abs(lines[0]) < 1e-4 and 0.001 < lines[2] < 50 and 0.001 < lines[4] < 50


@pytest.mark.extended
def test_the_kept_tokens_agree_with_the_step_they_are_of(runs: Path) -> None:
    folder = runs / "clipped/seed=0"
    assert rollout_steps(folder) == [1, 3, 4]
    for step in (1, 3, 4):
        table = read_rollouts(folder, step)
        metrics = metrics_of(folder)[step]["metrics"]
        for name in ("tokens", "token_advantage", "token_in_loss", "token_clipped", "token_sampled", "token_logprob"):
            assert table[name].map(len).tolist() == table["length"].tolist(), name
        in_loss, clipped = (np.concatenate(table[name].tolist()) for name in ("token_in_loss", "token_clipped"))
        # Each token is in one update of the step, so the shares over tokens are the step's metrics.
        assert clipped.sum() / in_loss.sum() == pytest.approx(metrics["train/clip_fraction"], abs=1e-12)
        assert clipped.any() or step == 1
        assert not (clipped & ~in_loss).any()
        assert metrics["budget/trained_tokens"] - metrics_of(folder)[step - 1]["metrics"]["budget/trained_tokens"] == (
            in_loss.sum()
        )
        masked = table[~table["in_loss"]]
        assert (
            masked["truncated"].all() and len(masked) > 0 and not np.concatenate(masked["token_in_loss"].tolist()).any()
        )
        kept = table[table["in_loss"]]
        assert all(np.allclose(row.token_advantage, row.advantage, atol=1e-6) for row in kept.itertuples())
        assert table["token_logprob"].map(sum).to_numpy() == pytest.approx(table["sampler_logprob"], abs=1e-4)
        text = table["tokens"].map("".join)
        assert all(said.startswith(row.text) for said, row in zip(text, table.itertuples()))


# ---- reading


def row_of(**changes: object) -> dict[str, object]:
    row = {
        "problem_id": 7, "response": 1, "question": "1+1?", "answer": "2", "text": "1+1=2", "outcome": 1.0,
        "reward": 0.75, "advantage": 0.5, "length": 3, "truncated": False, "in_statistics": True, "in_loss": True,
        "component_outcome": 1.0, "component_soft_overlong": -0.25, "tokens": ["1+1", "=", "2"],
        "token_advantage": [0.5, -1.0, 0.0], "token_in_loss": [True, True, False],
        "token_clipped": [False, True, False], "token_sampled": [True, True, False],
    }  # fmt: skip
    return {**row, **changes}


def test_the_facts_of_a_response() -> None:
    said = facts(row_of())
    assert said == (
        "right; reward 0.75 (outcome +1, soft_overlong -0.25); advantage +0.500; 3 tokens; 1 tokens masked; 1 clipped"
    )
    cut = facts(row_of(outcome=0.0, truncated=True, in_loss=False, in_statistics=False))
    assert cut.startswith("wrong") and "truncated; not in the loss; not in the group's statistics" in cut


def test_colours_say_sign_and_size() -> None:
    assert shade(0.0, 1.0) == "#ffffff"
    blue, orange, faint = shade(1.0, 1.0), shade(-1.0, 1.0), shade(0.1, 1.0)
    red, green, bluish = (int(blue[at : at + 2], 16) for at in (1, 3, 5))
    assert bluish > green > red and int(orange[1:3], 16) > int(orange[5:7], 16)
    assert int(faint[1:3], 16) > int(blue[1:3], 16)  # paler
    text = response_text(row_of(), 1.0)
    assert text.plain == "1+1=2"
    styles = [str(span.style) for span in text.spans]
    assert shade(0.5, 1.0) in styles[0] and "underline" in styles[1]
    assert styles[2] == "grey50 italic"


def test_a_run_that_kept_no_tokens_is_read_whole() -> None:
    row = {name: value for name, value in row_of().items() if not name.startswith("token")}
    (token,) = tokens_of(row)
    assert (token.text, token.advantage, token.in_loss, token.clipped) == ("1+1=2", 0.5, True, False)


def test_filters(runs: Path) -> None:
    table = read_rollouts(runs / "clipped/seed=0")
    for name, column in (("correct", "outcome"), ("truncated", "truncated"), ("in_loss", "in_loss")):
        yes, no = Filter(**{name: True})(table), Filter(**{name: False})(table)
        assert len(yes) + len(no) == len(table) and len(yes) and len(no), name
        assert yes[column].astype(bool).all() and not no[column].astype(bool).any()
    problem = int(table["problem_id"].iloc[0])
    assert set(Filter(problem=problem)(table)["problem_id"]) == {problem}
    assert len(Filter()(table)) == len(table)


def test_two_arms_on_the_same_prompt_and_noise(runs: Path) -> None:
    left, right = (read_rollouts(runs / arm / "seed=0", 1) for arm in ("plain", "clipped"))
    pairs = list(paired(left, right))
    assert len(pairs) == len(left)
    for one, other in pairs:  # the first rollouts are of the same weights
        assert (one["question"], one["text"]) == (other["question"], other["text"])
    with pytest.raises(ValueError, match="no common prompt"):
        list(paired(left, right.assign(problem_id=-1)))


def console() -> Terminal:
    return Terminal(width=120, record=True, force_terminal=False, file=open("/dev/null", "w"))


def test_the_terminal_shows_a_run_and_a_pair(runs: Path) -> None:
    screen = console()
    passed = show_run(screen, runs / "clipped/seed=0", 1, Filter(truncated=True), 2)
    said = screen.export_text()
    assert passed > 2 and said.count("not in the loss") == 2 + 1  # twice of a response, once in the legend
    assert f"{passed} of " in said and f"more with --limit {passed}" in said and "saved: 1, 3, 4" in said
    screen = console()
    pairs = show_pair(screen, runs / "plain/seed=0", runs / "clipped/seed=0", None, Filter(), 1)
    said = screen.export_text()
    assert pairs > 0 and "left:" in said and "right:" in said and "seeds differ" not in said


def test_what_is_not_there_is_said(runs: Path, tmp_path: Path) -> None:
    assert find_run("two", runs, "clipped", None, None) == runs / "clipped/seed=0"
    assert find_run(str(runs / "plain/seed=0"), runs, None, None, None) == runs / "plain/seed=0"
    for name, arm, seed, message in (
        ("too", None, None, "neither a run folder (with run.json) nor a sweep; sweeps in .*: two"),
        ("two", "clip", None, "two has no arm 'clip': choose from 'plain', 'clipped'"),
        ("two", "plain", 4, "two has no seed 4: choose from 0"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
            find_run(name, runs, arm, None, seed)
    with pytest.raises(ValueError, match="saved no responses of step 2: steps 1, 3, 4 are there"):
        read_rollouts(runs / "plain/seed=0", 2)
    with pytest.raises(ValueError, match="is one run: --arm, --level and --seed choose among the runs of a sweep"):
        find_run(str(runs / "plain/seed=0"), runs, "plain", None, None)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="saved no responses: rollouts_every sets after how many steps"):
        read_rollouts(tmp_path / "bare")
    copy = tmp_path / "run"
    shutil.copytree(runs / "plain/seed=0/rollouts", copy / "rollouts")
    (copy / "rollouts/step=000004.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"step=000004.parquet cannot be read"):
        read_rollouts(copy)


# ---- the section of the report


@pytest.fixture
def two(runs: Path) -> SweepData:
    from grpo_lab.analysis.sources.run_folders import load_sweep

    return load_sweep(runs, "two", cache=False)


def embedded(section: str) -> list[dict]:
    found = re.search(r'id="rollout-data">(.*?)</script>', section, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_section_holds_what_the_runs_kept(two: SweepData, runs: Path) -> None:
    collected = reader_page.collect_responses(two, runs)
    responses = embedded(reader_page.rollouts_section(collected))
    assert responses == json.loads(json.dumps(collected))
    assert {row["arm"] for row in responses} == {"plain", "clipped"} and {row["step"] for row in responses} == {1, 3, 4}
    table = read_rollouts(runs / "clipped/seed=0", 3).set_index(["problem_id", "response"])
    for row in (row for row in responses if row["arm"] == "clipped" and row["step"] == 3):
        kept = table.loc[(int(row["problem"]), row["response"])]
        assert "".join(text for text, _, _ in row["pieces"]) == "".join(kept["tokens"])
        assert row["facts"] == facts(dict(kept))
        masked = [text for text, _, classes in row["pieces"] if "masked" in classes]
        assert len("".join(masked)) == sum(
            len(text) for text, held in zip(kept["tokens"], kept["token_in_loss"]) if not held
        )


def test_long_responses_are_shortened_and_say_so(two: SweepData, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_page, "TOKENS", 4)
    shortened = [row["pieces"] for row in reader_page.collect_responses(two, runs) if int(row["truncated"])]
    assert shortened
    for pieces in shortened:  # 10 tokens, of which the first 3 and the last 1 stay
        assert [text for text, _, _ in pieces if "left out" in text] == [" [6 tokens left out] "]


def test_without_run_folders_the_section_says_so(tmp_path: Path) -> None:
    data = synthetic_sweep(Planted(tricks=("a",), seeds=(0, 1), steps=10, every=5))
    for place in (None, tmp_path):
        section = reader_page.rollouts_section(reader_page.collect_responses(data, place))
        assert "No training responses are at hand" in section and "rollout-data" not in section


def test_scale_of_nothing_is_one() -> None:
    assert scale_of(pd.DataFrame({"advantage": [0.0, 0.0]})) == 1.0
    assert scale_of(pd.DataFrame({"advantage": [0.5, -2.0]})) == 2.0


def test_no_response_ends_or_opens_a_script_of_the_page() -> None:
    """`<!--<script` made a browser read the rest of the page as one script."""
    hostile = ["<!--<script>", "</script><script>alert(1)</script>", "<!--", "-->", "<", "\u2028"]
    responses = [{"arm": '"><script>', "pieces": hostile, "question": hostile[0]}]
    section = reader_page.rollouts_section(responses)
    assert embedded(section) == responses
    data = section.partition('id="rollout-data">')[2].partition("</script>")[0]
    assert "<" not in data and json.loads(data)[0]["pieces"] == hostile
    assert '<option value="&#34;&gt;&lt;script&gt;">' in section
