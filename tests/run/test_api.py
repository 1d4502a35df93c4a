"""The calls from Python: a run, its tables, a comparison, a sweep, a reward that is a function."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import shapes_unchecked
from hydra.core.override_parser.overrides_parser import OverridesParser
from processes import python_path
from short_runs import SMALL

import grpo_lab.api
from grpo_lab import api
from grpo_lab.api import Run
from grpo_lab.seeding import uniform
from grpo_lab.tasks import grader_pool

OUTSIDE = 2
WORDS = ["world=tiny", "tracking=none", "rollouts_every=1", "problems_per_step=4", *SMALL]


def brief(response: str) -> float:
    return float(len(response) < OUTSIDE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Run]]:
    """Two seeds of two arms, trained in this process."""
    settings = {"budget.amount": 2, "runs_dir": tmp_path_factory.mktemp("runs")}
    with shapes_unchecked():
        return {
            arm: [api.train(*WORDS, *words, seed=seed, **settings) for seed in (0, 1)]
            for arm, words in (("plain", []), ("masked", ["truncation=mask_after"]))
        }


def test_a_run_is_read_as_tables_and_plain_objects(runs: dict[str, list[Run]]) -> None:
    run = runs["masked"][1]
    assert run.status == "done" and run.config.seed == 1 and run.config.budget.amount == 2
    assert run.record["choices"]["truncation"] == "mask_after"
    assert run.metrics["step"].tolist() == [0, 1, 2] and run.metrics["reward/outcome"].between(0, 1).sum() == 2
    assert set(run.evaluations["step"]) == {0, 2} and (run.evaluations["correct"] <= run.evaluations["n"]).all()
    assert run.rollouts.groupby("step").size().nunique() == 1 and set(run.rollouts["step"]) == {1, 2}
    assert api.load(run.folder) == run


def test_a_finished_run_is_returned_and_not_trained_again(runs: dict[str, list[Run]]) -> None:
    run = runs["plain"][0]
    log = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    again = api.train(*WORDS, seed=0, **{"budget.amount": 2, "runs_dir": run.folder.parents[1]})
    assert again == run and (run.folder / "metrics.jsonl").stat().st_mtime_ns == log


def test_differences_are_paired_by_seed(runs: dict[str, list[Run]]) -> None:
    table = api.compare(runs, control="plain").set_index("metric")
    assert set(table["arm"]) == {"masked"} and set(table["n"]) == {2}
    name = "eval/heldout/accuracy"
    ends = [[run.metrics[name].iloc[-1] for run in runs[arm]] for arm in ("masked", "plain")]
    assert table.loc[name, "mean"] == pytest.approx(sum(ends[0]) / 2 - sum(ends[1]) / 2)
    by_name = api.compare([run for arm in runs.values() for run in arm], control=runs["plain"][0].name)
    assert by_name.set_index("metric")["mean"].to_dict() == table["mean"].to_dict()


@pytest.mark.extended
def test_a_sweep_prints_its_progress_and_gives_its_tables(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    tables = api.sweep(*WORDS, "budget.amount=2", add=["truncation=mask_after"], seed=[0, 1], runs_dir=tmp_path)
    assert "4 of 4 done" in capfd.readouterr().out
    assert len(tables.runs) == 4 and {"plain", "truncation=mask_after"} <= set(tables.runs["arm"])
    assert "eval/heldout/accuracy" in set(tables.effects["metric"])
    again = api.sweep(*WORDS, "budget.amount=2", add="truncation=mask_after", seed=[0, 1], runs_dir=tmp_path)
    assert again.effects.equals(tables.effects) and "all 4 runs are finished" in capfd.readouterr().out
    with pytest.raises(ValueError, match="there is no key 'nothing'"):
        api.sweep(*WORDS, add=["nothing=1"], runs_dir=tmp_path)
    with pytest.raises(ValueError, match="started no sweep, as a dry run does not"):
        api.sweep(*WORDS, "hydra.sweeper.dry_run=true", add=["kl=k3_loss"], runs_dir=tmp_path)


def test_a_function_of_a_module_is_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(response, answer):\n    return float(answer in response)\n")
    monkeypatch.syspath_prepend(tmp_path)
    score = importlib.import_module("my_rewards").score
    run = api.train(*WORDS, reward=score, verifier=score, runs_dir=tmp_path / "runs", **{"budget.amount": 1})
    assert run.config.reward.path == run.config.verifier.path == f"{tmp_path / 'my_rewards.py'}:score"
    workers = [worker for pool in grader_pool._pools for worker in pool._workers]
    assert run.status == "done" and not any(worker.lives() for worker in workers), "a notebook would wait for them"


def test_saved_data_of_the_repository_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = api.load_sweep("length_bias")
    assert len(tables.runs) == 24 and set(tables.verdict["arm"]) == {"constant", "token_mean"}


NOTEBOOK = """
from grpo_lab import api

def score(response, answer):
    return float(answer in response)

print(api.train(*{words}, reward=score, runs_dir="runs", **{{"budget.amount": 1}}).config.reward.path)
"""


@pytest.mark.extended
def test_the_source_of_a_function_of_a_script_or_notebook_is_kept(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NOTEBOOK.format(words=WORDS))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PATH": "", "PYTHONPATH": python_path(Path(grpo_lab.api.__file__).parents[1])},
    )  # fmt: skip
    path, _, name = done.stdout.strip().splitlines()[-1].rpartition(":")
    assert name == "score" and Path(path).parent == tmp_path / "runs" / "rewards"
    assert Path(path).read_text().startswith("def score(response, answer):\n    return")
    assert "Writing model" not in done.stderr, "bars of the libraries"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.train("add=[kl=k3_loss]"), "makes several runs: call api.sweep"),
        (lambda: api.train("++experiments=kl_penalty"), "makes several runs: call api.sweep"),
        (lambda: api.train("seed=0,1"), "seed=0,1 makes several runs: call api.sweep"),
        (lambda: api.sweep("world=tiny", seed=[]), "seed is an empty list"),
        (lambda: api.train(reward=lambda response: 1.0), "must be a function defined with def at the top level"),
        (lambda: api.train("world=tiny", reward="none_such"), "none_such"),
        (lambda: api.load("/no/where"), "is no run folder: it has no run.json"),
        (lambda: api.compare({}, control="plain"), "control must be one of the arms, got 'plain'"),
    ],
)
def test_what_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


IMPORTS_WITHIN = """
def score(response, answer):
    import re
    parts = re.split(" ", response)
    return float(any(one == answer for one in parts)) or score(parts[1:], answer)
"""


@pytest.mark.parametrize(
    ("source", "outside"),
    [
        (IMPORTS_WITHIN, {"score"}),
        ("def score(response):\n    return len(response) < LIMIT", {"LIMIT"}),
        ("def score(response, most=LIMIT):\n    return max(response.count(one) for one in SIGNS)", {"LIMIT", "SIGNS"}),
        ("@traced\ndef score(response: Text) -> float:\n    return 1.0", {"traced", "Text"}),
    ],
)
def test_names_that_a_saved_function_would_lack(source: str, outside: set[str]) -> None:
    assert grpo_lab.api._names_outside(source) == outside


def test_a_function_of_a_notebook_that_needs_what_is_outside_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brief, "__module__", "__main__")
    with pytest.raises(ValueError, match="brief uses OUTSIDE, defined outside of it: import or define that within"):
        api.train("world=tiny", reward=brief, runs_dir=tmp_path)


def test_a_function_that_its_module_has_under_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no brief that is this function"):
        api.train("world=tiny", reward=functools.wraps(brief)(lambda response: 1.0), runs_dir=tmp_path)


def test_a_function_of_a_package_is_found_by_its_module() -> None:
    assert grpo_lab.api._place_of("reward", uniform, []) == "grpo_lab.seeding:uniform"


def test_two_runs_of_an_arm_with_one_seed_are_refused(runs: dict[str, list[Run]]) -> None:
    with pytest.raises(ValueError, match="an arm has two runs with one seed"):
        api.compare({"plain": [runs["plain"][0]] * 2}, control="plain")


def test_arms_without_a_seed_in_common_are_refused(runs: dict[str, list[Run]]) -> None:
    with pytest.raises(ValueError, match="have no finished runs of one seed: masked has runs that are done"):
        api.compare({"plain": runs["plain"][:1], "masked": runs["masked"][1:]}, control="plain")


def test_runs_that_were_evaluated_differently_are_refused(runs: dict[str, list[Run]]) -> None:
    folder = runs["plain"][0].folder.parents[1]
    other = api.train(*WORDS, "template=mismatched", seed=0, **{"budget.amount": 1, "runs_dir": folder})
    with pytest.raises(ValueError, match="evaluated with other questions or graders than others"):
        api.compare({"plain": runs["plain"], "other": [other]}, control="plain")


@pytest.mark.parametrize(
    ("value", "read"),
    [(True, True), (None, None), (1e-4, 1e-4), ([1, "a b"], [1, "a b"]), ({"a": 1}, {"a": 1}), ("a b", "a b"),
     (Path("/x/y=1,z"), "/x/y=1,z"), ("/home/j\u00fcrgen", "/home/j\u00fcrgen"), ("dr_grpo", "dr_grpo"),
     ("null", "null"), ("{question}\nAnswer:", "{question}\nAnswer:"), ("[INST] it's", "[INST] it's"),
     ("1e3", "1e3"), ("0,1", "0,1")],
)  # fmt: skip
def test_hydra_reads_a_value_as_the_same_object(value: object, read: object) -> None:
    parsed = OverridesParser.create().parse_override(f"key={grpo_lab.api._value(value)}").value()
    assert parsed == read and type(parsed) is type(read)


def test_runs_go_where_the_last_word_or_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LAB_RUNS", str(tmp_path / "env"))
    assert grpo_lab.api._runs_dir(["world=tiny"]) == tmp_path / "env"
    assert grpo_lab.api._runs_dir(["runs_dir=one", f"runs_dir='{tmp_path}/a b'"]) == tmp_path / "a b"
