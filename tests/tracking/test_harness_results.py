"""What other harnesses measured: how it is kept in a run's folder, and how it reaches MLflow."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from planted_harness import SUITE, plant_result

from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.harness_results import current_results, outdated, protocols, result_path, suite_of
from grpo_lab.tracking.metrics import find, harness_of
from grpo_lab.tracking.mlflow_exporter import sync
from grpo_lab.tracking.run_log import RunLog


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps."""
    folder = tmp_path / "runs" / "a"
    described = {"name": "a", "recipe": "plain", "seed": 0, "choices": {}, "config": {}, "tags": {}, "run_key": "key"}
    described |= {"commit": None, "dirty": None, "sweep_folder": None}
    with RunLog(folder) as log:
        write_json(
            folder / "run.json", described | {"tracking": {"uri": f"sqlite:///{tmp_path / 'm.db'}", "experiment": "e"}}
        )
        for step in range(4):
            log.write_step(step, {"reward/mean": step / 4}, {})
        log.mark_done({})
    return folder


def points(run: Path) -> list[tuple]:
    """What MLflow holds of the suite: name, value, time and step."""
    with closing(sqlite3.connect(run.parent.parent / "m.db")) as store:
        query = (
            f"select key, value, timestamp, step from metrics where key like 'eval/{SUITE}/%' order by timestamp, key"
        )
        return store.execute(query).fetchall()


def test_a_result_names_the_metrics_of_its_suite() -> None:
    assert suite_of("lm_eval", "gsm8k-cot (5)") == "lm_eval_gsm8k_cot__5_"
    assert harness_of("eval/lm_eval_gsm8k/accuracy") == harness_of("start/eval/lm_eval_a/responses") == "lm_eval"
    assert harness_of("eval/inspect_sums/accuracy") == "inspect"
    assert harness_of("eval/heldout/accuracy") is harness_of("reward/mean") is None


def test_what_is_kept_is_what_is_read(run: Path) -> None:
    written = [plant_result(run, 3, 0.75), plant_result(run, 0, 0.25)]
    assert current_results(run) == written[::-1]
    logged = written[0].logged()
    assert logged == {f"eval/{SUITE}/accuracy": 0.75, f"eval/{SUITE}/accuracy_se": 0.05, f"eval/{SUITE}/responses": 80}
    assert all(find(name) for name in logged)
    unsure = replace(written[0], metric="f1,none").logged()
    assert unsure == {f"eval/{SUITE}/accuracy": 0.5, f"eval/{SUITE}/responses": 80}


def test_a_result_that_was_edited_is_refused(run: Path) -> None:
    plant_result(run, 3, 0.75)
    path = result_path(run, SUITE, 3)
    path.write_text(path.read_text().replace("0.75", "0.95"))
    with pytest.raises(ValueError, match=r"step=000003.json is damaged.*evaluate again with .*--again"):
        current_results(run)


def test_a_result_of_weights_that_the_run_lost_is_refused(run: Path) -> None:
    """As where a run was resumed from an older checkpoint, and wrote other lines than before."""
    early, late = plant_result(run, 1, 0.5), plant_result(run, 3, 0.75)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    changed = [*lines[:2], lines[2].replace("0.5", "0.4"), lines[3]]
    for now in (changed, lines[:2]):
        (run / "metrics.jsonl").write_text("".join(now))
        assert outdated(run, early) is None and "does not have" in str(outdated(run, late))
        with pytest.raises(ValueError, match=r"step=000003.json is of weights that this run does not have"):
            current_results(run)
    (run / "metrics.jsonl").write_text("".join(lines))
    assert len(current_results(run)) == 2
    write_json(run / "run.json", json.loads((run / "run.json").read_text()) | {"run_key": "another"})
    assert "does not have" in str(outdated(run, early))


def test_a_protocol_is_of_what_was_asked_and_not_of_what_came_out(run: Path) -> None:
    one = plant_result(run, 3, 0.75)
    alike = plant_result(run, 1, 0.1, weights="v" * 16, command=["x"], at=5)
    assert protocols(run) == f"{SUITE}={one.protocol}" and one.protocol == alike.protocol
    others = [
        {"questions": "r" * 16}, {"settings": {"limit": 8}}, {"harness_version": "0.4.12"}, {"task_version": 2},
        {"metric": "f1,none"}, {"configuration": {"num_fewshot": 5}},
    ]  # fmt: skip
    assert len({one.protocol, *(replace(one, **change).protocol for change in others)}) == 1 + len(others)
    other = plant_result(run, 2, 0.1, questions="r" * 16)
    assert protocols(run) == f"{SUITE}={'+'.join(sorted([one.protocol, other.protocol]))}"


@pytest.mark.extended
def test_mlflow_gets_each_result_once_whenever_it_was_measured(run: Path) -> None:
    assert sync(run).points == 4
    plant_result(run, 3, 0.75)
    assert [sync(run).points for _ in range(2)] == [3, 0]
    first = [(f"eval/{SUITE}/accuracy", 0.75, 1000, 3), (f"eval/{SUITE}/accuracy_se", 0.05, 1000, 3)]
    assert points(run) == [*first, (f"eval/{SUITE}/responses", 80.0, 1000, 3)]
    (run / "mirror.json").unlink()  # then all is sent again, and adds nothing
    assert sync(run).points == 7 and len(points(run)) == 3
    plant_result(run, 3, 0.5, at=2_000)  # measured again: the newest counts
    plant_result(run, 0, 0.25)
    assert sync(run).points == 6
    assert points(run)[-3][:3] == (f"eval/{SUITE}/accuracy", 0.5, 2000)
    assert (f"eval/{SUITE}/accuracy", 0.25, 1000, 0) in points(run)


@pytest.mark.extended
def test_mlflow_gets_no_result_of_weights_that_the_run_lost(run: Path) -> None:
    plant_result(run, 3, 0.75)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    assert sync(run).points == 3 and points(run) == []
