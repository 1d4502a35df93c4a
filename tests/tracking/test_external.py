"""Runs of TRL and prime-rl as run folders: what becomes of their numbers, and that they are marked and never judged.

`tests/golden/trl` holds what TRL 1.16.0 wrote in a real run of six steps (`tests/golden/make_trl_log.py`). The lines of
prime-rl are written here as its file monitor and its orchestrator write them at commit 559b44772: no run of it is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from planted_sweeps import Planted, write_synthetic

from grpo_lab.analysis.build import build
from grpo_lab.analysis.figures.external import draw_external
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.tracking.external import READERS, TRL, Chosen, Imported, import_run, read_prime_rl, read_trl
from grpo_lab.tracking.metrics import PEERS, find
from grpo_lab.tracking.run_reader import read_steps

REAL = Path(__file__).parents[1] / "golden/trl"


def kept(framework: str, place: Path, runs: Path, **changes: Any) -> Imported:
    asked = {"name": "theirs", "label": framework, "seed": 0, "chosen": Chosen(), "command": ["test"], **changes}
    return import_run(framework, place, runs, **asked)


def test_the_numbers_of_a_real_run_of_trl_are_its_own_under_our_names(tmp_path: Path) -> None:
    found = kept("trl", REAL, tmp_path)
    history = json.loads((REAL / "trainer_state.json").read_text())["log_history"]
    trained = {entry["step"]: entry for entry in history if "reward" in entry}
    evaluated = {entry["step"]: entry for entry in history if "eval_reward" in entry}
    assert sorted(trained) == [1, 2, 3, 4, 5, 6] and sorted(evaluated) == [0, 3, 6]
    data = load_sweep(tmp_path, "theirs")
    points = data.points.set_index("step")
    for theirs, ours in TRL.items():
        if theirs in trained[1] and ours != "budget/sampled_tokens":
            assert points.loc[[*trained], ours].tolist() == [entry[theirs] for entry in trained.values()]
    assert points["budget/sampled_tokens"].tolist() == [0, *(entry["num_tokens"] for entry in trained.values())]
    accuracies = points["eval/heldout_training/accuracy"].dropna()
    assert dict(accuracies) == {step: entry["eval_reward"] for step, entry in evaluated.items()}
    assert points["reward/outcome"].dropna().tolist() == [entry["reward"] for entry in trained.values()]
    assert points.loc[2, "external/reward_std"] == trained[2]["reward_std"], "what has no name here is kept"
    assert data.runs[["arm", "status", "problem"]].values.tolist() == [["external:trl", "done", ""]]
    assert data.design is None and found.log.notes == []
    assert final_values(data).of("", "external:trl", "eval/heldout_training/accuracy").tolist() == [accuracies[6]]


def test_every_name_of_ours_is_in_the_registry_and_every_name_of_trl_beside_it() -> None:
    for theirs, ours in TRL.items():
        find(ours)
        assert theirs in PEERS[ours], f"{ours} is said to be {PEERS[ours]}"


def test_imported_again_a_log_that_grew_replaces_the_run_and_one_that_did_not_changes_nothing(tmp_path: Path) -> None:
    state = json.loads((REAL / "trainer_state.json").read_text())
    log = tmp_path / "out/checkpoint-3/trainer_state.json"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(state | {"log_history": [e for e in state["log_history"] if e["step"] <= 3]}))
    first = kept("trl", tmp_path / "out", tmp_path)
    assert [record.step for record in read_steps(first.folder)] == [0, 1, 2, 3]
    newer = tmp_path / "out/checkpoint-6/trainer_state.json"
    newer.parent.mkdir()
    newer.write_text(json.dumps(state | {"global_step": 6}))
    log.write_text(log.read_text().replace('"global_step": 6', '"global_step": 3'))
    for _ in range(2):
        again = kept("trl", tmp_path / "out", tmp_path)
        assert again.source == newer and again.folder == first.folder
        content = (again.folder / "metrics.jsonl").read_bytes()
        assert content == (kept("trl", newer, tmp_path, seed=1).folder / "metrics.jsonl").read_bytes()
    assert load_sweep(tmp_path, "theirs").runs["seed"].tolist() == [0, 1]


def trl_log(folder: Path, *entries: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": list(entries)}))
    return folder


def test_of_several_rewards_and_evaluation_sets_the_user_says_which_is_which(tmp_path: Path) -> None:
    train = {"step": 1, "reward": 1.4, "rewards/right/mean": 0.5, "rewards/short/mean": 0.9, "num_tokens": 10}
    scored = {"rewards/right/mean": 0.25, "rewards/short/mean": 0.7}
    evaluated = [
        {"step": 1, f"eval_{of}_reward": 0.95, **{f"eval_{of}_{name}": value / n for name, value in scored.items()}}
        for n, of in ((1, "easy"), (2, "hard"))
    ]
    place = trl_log(tmp_path / "trl", train, *evaluated)
    _, unsaid = read_trl(place, Chosen())
    assert "no accuracy: the log has several reward functions" in unsaid.notes[0]
    assert not {"reward/outcome", "eval/heldout_training/accuracy"} & set(unsaid.steps[1])
    _, said = read_trl(place, Chosen("right", "easy", "hard"))
    assert said.steps[1].items() >= {
        "reward/mean": 1.4, "reward/outcome": 0.5, "eval/heldout_training/accuracy": 0.25,
        "eval/downstream/accuracy": 0.125, "budget/sampled_tokens": 10, "budget/steps": 1,
    }.items()  # fmt: skip
    for chosen, words in (
        (Chosen("wrong"), "no reward 'wrong': it has right, short"),
        (Chosen(heldout="x"), "no eval"),
    ):
        with pytest.raises(ValueError, match=words):
            read_trl(place, chosen)


def test_a_reward_outside_of_0_and_1_is_no_accuracy(tmp_path: Path) -> None:
    place = trl_log(tmp_path / "trl", {"step": 1, "reward": -1.0}, {"step": 1, "eval_reward": -0.5})
    _, found = read_trl(place, Chosen())
    assert found.notes[0].startswith("no accuracy: the log has a reward outside of 0 and 1")
    assert found.steps[1].keys() == {"reward/mean", "external/eval_reward", "budget/steps"}
    assert found.notes[1].startswith("no tokens")


def prime_rl_log(folder: Path) -> Path:
    """Three steps: rows of the orchestrator and of the trainer, an evaluation of the base and one of step 2."""
    score, version = "eval/aime/effective/solver/avg@4", "eval/aime/policy_version"
    rows: list[dict[str, Any]] = [{score: 0.1, version: 0.0, "step": 1.0}]
    for step in (1, 2, 3):
        agent = {f"train/agg/{subset}/solver/reward/mean": 0.1 * step for subset in ("all", "effective")}
        agent |= {"train/agg/all/solver/num_output_tokens/mean": 30.0 + step}
        tokens = {"progress/tokens": 100 * step, "progress/total_tokens": 100 * sum(range(step))}
        rows += [agent | tokens | {"step": step}, {"loss/mean": 0.5, "mismatch_kl/all/mean": 1e-3, "step": step}]
    rows.append({score: 0.3, version: 2.0, "step": 3.0})
    folder.mkdir(parents=True, exist_ok=True)
    written = [json.dumps({"step": row["step"], "time": 1.7e9, **row}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(written) + "\n")
    return folder


def test_a_log_of_prime_rl_by_hand(tmp_path: Path) -> None:
    _, found = read_prime_rl(prime_rl_log(tmp_path / "out"), Chosen())
    assert [found.steps[step]["budget/sampled_tokens"] for step in (0, 1, 2, 3)] == [0, 100, 300, 600]
    assert found.steps[0]["eval/heldout_training/accuracy"] == 0.1
    assert found.steps[2]["eval/heldout_training/accuracy"] == 0.3, "at the step whose weights were asked"
    assert found.steps[3].items() >= {
        "reward/mean": pytest.approx(0.3), "reward/in_loss_mean": pytest.approx(0.3), "rollout/length": 33.0,
        "train/loss": 0.5, "mismatch/k3": 1e-3,
    }.items()  # fmt: skip
    for name in {name for numbers in found.steps.values() for name in numbers}:
        find(name)


@pytest.mark.parametrize("framework", READERS)
def test_what_is_no_log_is_refused_and_leaves_nothing(framework: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="give the folder that the framework wrote"):
        kept(framework, tmp_path / "out", tmp_path / "runs")
    for name in ("trainer_state.json", "metrics.jsonl"):
        (tmp_path / "out" / name).write_text('{"log_history": [], "x": 1}\n')
    with pytest.raises(ValueError, match=r"has no log of a GRPO run|line 1 is none that prime-rl writes"):
        kept(framework, tmp_path / "out", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# ---- beside our runs

PLANTED = Planted(tricks=("helps",), kind="add_one", seeds=(0, 1), steps=12, every=6, questions=6, name="small")


def test_external_runs_stand_marked_beside_ours(tmp_path: Path) -> None:
    write_synthetic(PLANTED, tmp_path)
    before = load_sweep(tmp_path, "small")
    kept("trl", REAL, tmp_path)
    data, theirs = load_sweep(tmp_path, "small"), load_sweep(tmp_path, "theirs")
    for table in ("runs", "points", "answers"):
        pd.testing.assert_frame_equal(getattr(data, table), getattr(before, table))
    drawn = draw_external(data, [theirs])
    own = drawn.numbers[drawn.numbers["external"]]
    assert set(own["name"]) == {"theirs external:trl"} and own["share"].iloc[[0, -1]].tolist() == [0.0, 1.0]
    assert own["heldout"].tolist() == theirs.points["eval/heldout_training/accuracy"].dropna().tolist()
    assert np.isfinite(own["reward"]).all()
    assert set(drawn.numbers.loc[~drawn.numbers["external"], "name"]) == {"base", "+helps"}
    for axes in drawn.figure.axes:
        marks = {line.get_label(): line.get_marker() for line in axes.lines}
        assert (marks["base"], marks["theirs external:trl"]) == ("o", "D")


@pytest.mark.extended
def test_external_runs_beside_a_sweep_change_no_verdict_and_no_table(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_synthetic(PLANTED, runs)
    kept("trl", REAL, runs)
    alone = build("small", str(runs), None, tmp_path / "alone", ["test"])
    beside = build("small", str(runs), None, tmp_path / "beside", ["test"], ["theirs"])
    assert (beside.table, beside.verdict) == (alone.table, alone.verdict)
    for path in (tmp_path / "alone").glob("*.csv"):
        assert path.read_bytes() == (tmp_path / "beside" / path.name).read_bytes()
    assert (tmp_path / "beside/small_external.png") in beside.paths


@pytest.mark.extended
def test_an_external_run_is_named_under_its_own_figures(tmp_path: Path) -> None:
    kept("trl", REAL, tmp_path)
    built = build("theirs", str(tmp_path), None, tmp_path / "figures", ["test"])
    assert (tmp_path / "figures/theirs.png").exists()
    assert "supported" not in built.verdict and "contradicted" not in built.verdict and not built.headline


def test_a_sweep_of_ours_is_neither_extended_nor_taken_for_external(tmp_path: Path) -> None:
    write_synthetic(PLANTED, tmp_path)
    with pytest.raises(ValueError, match="is a sweep of grpo_lab: give external runs another name"):
        kept("trl", REAL, tmp_path, name="small")
    data = load_sweep(tmp_path, "small")
    with pytest.raises(ValueError, match="small is no external sweep: --external takes names"):
        draw_external(data, [data])


@pytest.mark.extended
def test_the_command_says_what_it_understood_and_refuses_a_declared_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_lab.cli", "import", "trl", str(REAL), "--runs", str(tmp_path), "--as"]
    done = subprocess.run([*command, "theirs"], capture_output=True, text=True)
    assert done.stderr == "" and "  completions/mean_length -> rollout/length\n" in done.stdout
    refused = subprocess.run([*command, "dapo"], capture_output=True, text=True)
    assert refused.stderr.startswith("error: dapo is a declared experiment")
