"""A sweep in MLflow: its own run with the curves of its arms, and the page that shows its runs grouped by arm.

Each test sends to a real store; numbers are worked out by hand.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import free_port, mlflow_server
from mirrored_runs import write_run_json
from mlflow import MlflowClient
from planted_sweeps import Planted, describe_runs, write_synthetic
from processes import wait_until

from grpo_lab.analysis.sources.mlflow_runs import load_mlflow
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.sweeps.results import sweep_results
from grpo_lab.tracking.arm_means import arm_means
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.mlflow_exporter import sync_all
from grpo_lab.tracking.mlflow_params import parameters
from grpo_lab.tracking.mlflow_parent import SweepResults, announce_sweep, exported_to, sync_sweep
from grpo_lab.tracking.mlflow_ui import _pages
from grpo_lab.tracking.mlflow_view import VIEW_LENGTH, VIEW_TAG, runs_path, saved_view, sweep_tag, view_path, view_state
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import RunEntry, SweepRecord, read_sweep, record_sweep

GROUPED = "reward/outcome", "eval/heldout/accuracy", "eval/downstream/accuracy"


def write_run(runs: Path, sweep: str, arm: str, seed: int, rewards: Sequence[float], **changes: Any) -> RunEntry:
    """A finished run that logged these rewards from step 1 on, and evaluations at steps 0 and 2."""
    folder = runs / arm / f"seed={seed}"
    folder.mkdir(parents=True)
    where = os.path.relpath(runs / "sweeps" / sweep, folder)
    described: dict[str, Any] = {
        "name": f"s{seed} {arm}",
        "run_key": f"{arm}-{seed}",
        "seed": seed,
        "choices": {"baseline": "group_mean", "critic": "separate_model", "scale": arm, "tracking": "mlflow"},
        "config": {
            "seed": seed,
            "group_size": 8,
            "critic.learning_rate": 0.5,
            "critical": "kept",
            "optimizer.learning_rate": 0.1,
            "convention.std_eps": 1e-6,
            "runs_dir": str(runs),
            "tracking.uri": "x",
            "label.arm": arm,
        },
        "unread": ["critic", "optimizer.decay_share"],
        "sweep_folder": where,
        "tags": {"sweep": sweep, "arm": arm},
    }
    write_run_json(folder, None, **(described | changes))
    with RunLog(folder) as log:
        for step, reward in enumerate([None, *rewards]):
            metrics = {} if reward is None else {"reward/outcome": reward}
            if step in (0, 2):
                metrics |= {"eval/heldout/accuracy": (reward or 0.0) / 2, "eval/downstream/accuracy": 0.25}
            log.write_step(step, {"budget/steps": step, "budget/sampled_tokens": 9 * step, **metrics}, {})
        log.mark_done({"no_ops": []})
    return RunEntry(arm, "", seed, f"{arm}/seed={seed}")


def record(runs: Path, name: str, entries: Sequence[RunEntry], uri: str | None = None) -> Path:
    tracking = {"uri": uri, "experiment": "grpo_lab"} if uri else None
    return record_sweep(runs, name, entries, None, None, "f", ["train", "-m"], "0" * 40, tracking)


def parent(client: MlflowClient, folder: Path) -> Any:
    place = exported_to(folder)
    assert place is not None
    return client.get_run(place.run_id)


def curves(client: MlflowClient, run: Any) -> dict[str, list[tuple[int, float]]]:
    """Every point of every metric, in order, also two at one step."""
    return {
        name: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }


def files(client: MlflowClient, run_id: str, path: str = "") -> set[str]:
    found: set[str] = set()
    for one in client.list_artifacts(run_id, path):
        found |= files(client, run_id, one.path) if one.is_dir else {one.path}
    return found


def experiment(client: MlflowClient) -> Any:
    return client.get_experiment_by_name("grpo_lab")


@pytest.fixture
def uri(store: Path) -> str:
    return f"sqlite:///{store}"


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return MlflowClient(uri)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of plain, one of +more, which stopped a step earlier, under the sweep `two`."""
    runs = tmp_path / "runs"
    entries = [
        write_run(runs, "two", "plain", 0, [0.25, 0.5, 0.75]),
        write_run(runs, "two", "plain", 1, [0.75, 0.5, 0.25]),
        write_run(runs, "two", "+more", 0, [0.5, 1.0]),
        write_run(runs, "two", "+more", 1, [0.0, 0.5, 1.0]),
    ]
    record(runs, "two", entries)
    return runs


# ---- the sweep's own run


@pytest.mark.extended
def test_the_sweep_has_the_mean_of_every_arm_where_all_of_its_runs_are(
    runs: Path, client: MlflowClient, uri: str
) -> None:
    assert all(report.error is None for report in sync_all(runs, uri))
    found = parent(client, runs / "sweeps/two")
    assert curves(client, found) == {
        "training reward/plain": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "training reward/plus more": [(1, 0.25), (2, 0.75)],  # one of its runs ended at step 2
        "held-out accuracy/plain": [(0, 0.0), (2, 0.25)],
        "held-out accuracy/plus more": [(0, 0.0), (2, 0.375)],
        "downstream accuracy/plain": [(0, 0.25), (2, 0.25)],
        "downstream accuracy/plus more": [(0, 0.25), (2, 0.25)],
    }
    assert found.info.status == "FINISHED" and found.data.tags["kind"] == "sweep"
    assert experiment(client).tags["mlflow.experiment.primaryMetric.name"] in found.data.metrics


@pytest.mark.extended
def test_an_arm_with_a_run_that_has_not_begun_has_no_curve_and_no_parameters(
    runs: Path, client: MlflowClient, uri: str
) -> None:
    record(runs, "two", [RunEntry("plain", "", 2, "plain/seed=2")])
    sync_all(runs, uri)
    found = parent(client, runs / "sweeps/two")
    assert {name.partition("/")[2] for name in found.data.metrics} == {"plus more"} and not found.data.params


def test_values_that_are_not_finite_are_no_part_of_a_mean(tmp_path: Path) -> None:
    entries = [write_run(tmp_path, "s", "a", seed, [0.5, value]) for seed, value in ((0, 1.0), (1, float("nan")))]
    record(tmp_path, "s", entries)
    means = arm_means(read_sweep(tmp_path / "sweeps/s"), tmp_path)
    assert [(point.step, point.value) for point in means["training reward/a"]] == [(1, 0.5)]


@pytest.mark.parametrize(
    ("arms", "names"),
    [
        (["recipe=plain", "recipe=dr_grpo"], ["plain", "dr_grpo"]),
        (["kl=none,recipe=a", "kl=k3_loss,recipe=a"], ["kl:none recipe:a", "kl:k3_loss recipe:a"]),
        (["recipe=a"], ["recipe:a"]),
        (["base", "+soft", "base+a +b", "-mask"], ["base", "plus soft", "base plus a plus b", "-mask"]),
        (["a,b", "a b"], ["a b-1eb7c54d", "a b"]),
    ],
)
def test_an_arm_is_named_in_metrics_as_mlflow_takes_it(
    arms: list[str], names: list[str], tmp_path: Path, uri: str, client: MlflowClient
) -> None:
    entries = [
        write_run(tmp_path / str(at), "s", "x", 0, [0.5], run_key=str(at)) and RunEntry(arm, "", 0, f"{at}/x/seed=0")
        for at, arm in enumerate(arms)
    ]
    folder = record(tmp_path, "s", entries)
    sync_sweep(folder, uri, "grpo_lab")
    assert set(parent(client, folder).data.metrics) == {
        f"{measure}/{name}"
        for name in names
        for measure in ("training reward", "held-out accuracy", "downstream accuracy")
    }


@pytest.mark.extended
def test_sent_again_nothing_is_doubled(runs: Path, client: MlflowClient, uri: str) -> None:
    def everything() -> dict[str, Any]:
        found = parent(client, runs / "sweeps/two")
        children = client.search_runs([found.info.experiment_id], f"tags.`mlflow.parentRunId` = '{found.info.run_id}'")
        return {
            "id": found.info.run_id,
            "curves": curves(client, found),
            "params": found.data.params,
            "tags": found.data.tags,
            "files": files(client, found.info.run_id),
            "children": {run.info.run_id: (run.data.tags, run.data.params) for run in children},
            "experiment": experiment(client).tags,
        }

    sync_all(runs, uri, sweep_results)
    first = everything()
    assert len(first["children"]) == 4 and len(first["curves"]["training reward/plain"]) == 3
    assert "verdict.txt" in first["files"] and "plain is the control" in first["tags"]["mlflow.note.content"]
    sync_all(runs, uri, sweep_results)
    assert everything() == first
    for cursor in runs.rglob("mirror.json"):  # what was sent is forgotten
        cursor.unlink()
    sync_all(runs, uri, sweep_results)
    assert everything() == first


@pytest.mark.extended
def test_a_sweep_that_grew_has_one_point_a_step_and_the_same_runs_below_it(
    runs: Path, client: MlflowClient, uri: str
) -> None:
    sync_all(runs, uri)
    before = parent(client, runs / "sweeps/two")
    record(runs, "two", [write_run(runs, "two", "plain", 2, [1.0, 1.0, 1.0])])
    sync_all(runs, uri)
    after = parent(client, runs / "sweeps/two")
    assert after.info.run_id != before.info.run_id
    assert curves(client, after)["training reward/plain"] == [(1, 2 / 3), (2, 2 / 3), (3, 2 / 3)]
    assert after.data.params["seeds"] == "0, 1, 2" and after.info.start_time == before.info.start_time
    assert client.get_run(before.info.run_id).info.lifecycle_stage == "deleted"
    everything = client.search_runs([after.info.experiment_id])
    parents = {run.data.tags.get("mlflow.parentRunId") for run in everything if run.info.run_id != after.info.run_id}
    assert len(everything) == 6 and parents == {after.info.run_id}


@pytest.mark.extended
def test_a_sweep_that_grows_keeps_its_curves_until_every_new_run_has_begun(
    runs: Path, client: MlflowClient, uri: str
) -> None:
    sync_all(runs, uri)
    before = parent(client, runs / "sweeps/two")
    record(runs, "two", [RunEntry("plain", "", 2, "plain/seed=2")])
    sync_all(runs, uri)
    after = parent(client, runs / "sweeps/two")
    assert after.info.run_id == before.info.run_id and curves(client, after) == curves(client, before)


@pytest.mark.extended
def test_a_parameter_that_runs_share_no_more_is_none_of_the_sweep(runs: Path, client: MlflowClient, uri: str) -> None:
    sync_all(runs, uri)
    path = runs / "plain/seed=1/run.json"
    described = json.loads(path.read_text())
    write_json(path, described | {"config": described["config"] | {"group_size": 4}})
    sync_all(runs, uri)
    assert "group_size" not in parent(client, runs / "sweeps/two").data.params


@pytest.mark.extended
def test_further_steps_of_a_run_that_goes_on_are_added(runs: Path, client: MlflowClient, uri: str) -> None:
    sync_all(runs, uri)
    before = parent(client, runs / "sweeps/two")
    with RunLog(runs / "+more/seed=0") as log:
        log.write_step(3, {"budget/steps": 3, "budget/sampled_tokens": 27, "reward/outcome": 0.0}, {})
    sync_all(runs, uri)
    after = parent(client, runs / "sweeps/two")
    assert after.info.run_id == before.info.run_id
    assert curves(client, after)["training reward/plus more"] == [(1, 0.25), (2, 0.75), (3, 0.5)]


def test_the_sweep_has_the_parameters_that_its_runs_share(runs: Path, client: MlflowClient, uri: str) -> None:
    sync_all(runs, uri)
    assert parent(client, runs / "sweeps/two").data.params == {
        "arms": "plain, +more",
        "seeds": "0, 1",
        "baseline": "group_mean",
        "group_size": "8",
        "critical": "kept",
        "optimizer.learning_rate": "0.1",
    }


def test_a_run_is_shown_without_what_it_does_not_read_and_where_it_is_kept(runs: Path) -> None:
    described = json.loads((runs / "plain/seed=0/run.json").read_text())
    assert parameters(described).keys() == {
        "baseline", "scale", "seed", "group_size", "critical", "optimizer.learning_rate",
    }  # fmt: skip
    long = parameters({"choices": {}, "config": {"note": "x" * 900, "of,a": 1}})  # run.json of an earlier version
    assert {key: len(value) for key, value in long.items()} == {"note": 500, "of_a-f42ce572": 1}


# ---- its verdict, table and figures

SMALL = Planted(
    tricks=("helps",), kind="two_sided", seeds=(0, 1), downstream={"helps": 0.1}, steps=12, every=6, questions=6,
    name="small",
)  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("planted")
    write_synthetic(SMALL, runs)
    describe_runs(runs, "small")
    return runs


@pytest.fixture
def small(planted: Path, tmp_path: Path) -> Path:
    """The runs of a small declared sweep, to be changed."""
    return shutil.copytree(planted, tmp_path / "small_runs")


def test_the_sweep_carries_question_table_verdict_and_figures(small: Path, client: MlflowClient, uri: str) -> None:
    sync_all(small, uri, sweep_results)
    found = parent(client, small / "sweeps/small")
    note = found.data.tags["mlflow.note.content"]
    assert "SYNTHETIC: are the planted effects found" in found.data.tags["question"]
    for part in ("**Question.** SYNTHETIC", "+helps  ", "Predictions and verdicts", "**Command.**"):
        assert part in note
    place = f"#/experiments/{found.info.experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    link = f"**[Curves of its runs, grouped by arm]({place}&viewStateShareKey={found.data.tags['run_key']})**"
    assert note.startswith(link)
    kept = files(client, found.info.run_id)
    texts = {"sweep.json", "verdict.txt", "arms.txt", "arms.md", "arms.csv"}
    assert kept == texts | {"figures/small.png"}
    folder = Path(client.download_artifacts(found.info.run_id, ""))
    assert "not significant: +helps is above base" in (folder / "verdict.txt").read_text()
    assert (folder / "figures/small.png").read_bytes().startswith(b"\x89PNG")


def test_a_verdict_longer_than_a_description_is_whole_among_the_files(
    runs: Path, client: MlflowClient, uri: str
) -> None:
    said = "\n".join(f"line {number}" for number in range(2000))
    folder = runs / "sweeps/two"
    sync_sweep(folder, uri, "grpo_lab", None, lambda _: SweepResults("table", said, {"verdict.txt": said.encode()}))
    note = parent(client, folder).data.tags["mlflow.note.content"]
    assert len(note) <= 5000 and "line 400\n" in note and "the rest is in verdict.txt" in note
    assert note.endswith(f"Recorded in `{folder.resolve()}`.")
    place = client.download_artifacts(parent(client, folder).info.run_id, "verdict.txt")
    assert Path(place).read_text() == said


def test_an_analysis_that_fails_costs_the_verdict_alone(
    runs: Path, client: MlflowClient, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(folder: Path) -> SweepResults:
        raise ZeroDivisionError("no runs")

    folder = record(runs, "two", [], uri)
    with caplog.at_level(logging.WARNING):
        announce_sweep(folder, False, analyse=fails)
    assert "MLflow gets no verdict of the sweep two (ZeroDivisionError: no runs)" in caplog.text
    assert parent(client, folder).data.metrics["training reward/plain"] == 0.5


def command(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "grpo_lab.cli", *words)
    return subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=folder)


@pytest.mark.extended
def test_the_command_figures_sends_them_and_a_store_that_is_away_is_a_warning(
    small: Path, client: MlflowClient, uri: str, tmp_path: Path
) -> None:
    drawn = ("figures", "small", "--runs", str(small), "--only-runs", "--to", str(tmp_path / "drawn"))
    untracked = command(*drawn)
    assert untracked.returncode == 0 and "also in MLflow" not in untracked.stdout, untracked.stderr
    sync_all(small, uri)
    done = command(*drawn)
    assert done.returncode == 0 and "figures and tables are also in MLflow" in done.stdout, done.stderr
    kept = files(client, parent(client, small / "sweeps/small").info.run_id)
    here = {f"figures/{path.name}" for path in (tmp_path / "drawn").iterdir()}
    assert {name for name in here if name.endswith(".png")} <= kept and "figures/small_verdict.txt" in kept
    assert len([name for name in kept if name.endswith(".png")]) > 3
    cursor = small / "sweeps/small/mirror.json"
    write_json(cursor, json.loads(cursor.read_text()) | {"uri": f"http://127.0.0.1:{free_port()}"})
    away = command(*drawn)
    assert away.returncode == 0 and "WARNING: MLflow upload of the figures failed" in away.stderr, away.stderr


# ---- runs of two sweeps


@pytest.mark.extended
def test_a_run_that_another_sweep_made_is_on_this_sweeps_page(runs: Path, client: MlflowClient, uri: str) -> None:
    shared = RunEntry("control", "", 0, "plain/seed=0")
    alone = write_run(runs, "reuses", "new", 0, [0.5, 0.5, 0.5])
    twice = [RunEntry("same", "", 0, alone.folder), RunEntry("new", "", 0, alone.folder, same_as="same seed=0")]
    record(runs, "reuses", [shared, *twice])
    sync_all(runs, uri)
    mine = parent(client, runs / "sweeps/reuses")
    state = view_state(read_sweep(runs / "sweeps/reuses"))
    tag = sweep_tag("reuses", mine.data.tags["run_key"])
    shown = client.search_runs([mine.info.experiment_id], state["searchFilter"], order_by=["tags.`mlflow.runName` ASC"])
    assert [(run.info.run_name, run.data.tags[tag]) for run in shown] == [
        ("s0 new", "same = new"),
        ("s0 plain", "control"),
    ]
    lent = shown[1]
    theirs = parent(client, runs / "sweeps/two")
    assert lent.data.tags["mlflow.parentRunId"] == theirs.info.run_id
    assert lent.data.tags[sweep_tag("two", theirs.data.tags["run_key"])] == "plain"
    link = f"- [control seed 0, of the sweep two](#/experiments/{mine.info.experiment_id}/runs/{lent.info.run_id})"
    assert link in mine.data.tags["mlflow.note.content"]
    assert curves(client, mine)["training reward/control"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    sync_all(runs, uri)  # the lent run's own sweep is sent again, too
    assert [client.get_run(run.info.run_id).data.tags[tag] for run in shown] == ["same = new", "control"]


@pytest.mark.extended
def test_analysis_reads_runs_of_another_sweep_from_the_store(small: Path, uri: str) -> None:
    """The second sweep has the first one's runs alone, so that none has it as its parent."""
    first = read_sweep(small / "sweeps/small")
    record_sweep(small, "again", first.runs, None, first.design, "f", ["x"], None, None)
    sync_all(small, uri)
    found, expected = load_mlflow(uri, "again"), load_sweep(small, "again")
    assert found.runs["status"].tolist() == expected.runs["status"].tolist() == ["done"] * 4
    columns = ["arm", "seed", "step", "reward/outcome", "eval/downstream/accuracy"]
    pd.testing.assert_frame_equal(found.points[columns], expected.points[columns], check_exact=True)


def test_a_run_that_was_sent_nowhere_is_named_as_such(runs: Path, client: MlflowClient, uri: str) -> None:
    folder = record(runs, "reuses", [RunEntry("control", "", 0, "plain/seed=0")])
    sync_sweep(folder, uri, "grpo_lab")
    assert (
        "- control seed 0, of the sweep two: not in this experiment"
        in parent(client, folder).data.tags["mlflow.note.content"]
    )


# ---- the page


def saved(client: MlflowClient, key: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The envelope of a saved view as MLflow's page reads it, and what it holds."""
    envelope = json.loads(experiment(client).tags[f"{VIEW_TAG}{key}"])
    kind, _, packed = envelope["state"].partition(";")
    assert kind == "deflate"
    return envelope, json.loads(zlib.decompress(base64.b64decode(packed)))


def test_the_page_is_a_saved_view_of_the_experiment(runs: Path, client: MlflowClient, uri: str) -> None:
    sync_all(runs, uri)
    key = read_sweep(runs / "sweeps/two").key
    envelope, state = saved(client, key)
    assert envelope["name"] == "two" and isinstance(envelope["createdAt"], int)
    assert {name: envelope[name] for name in state} == state  # where earlier versions of MLflow's pages look for it
    assert len(experiment(client).tags[f"{VIEW_TAG}{key}"]) < VIEW_LENGTH
    tag = f"sweep.two.{key[:8]}"
    assert state["searchFilter"] == f"tags.`{tag}` != ''"
    assert state["groupBy"] == {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag}]}
    charts = state["compareRunCharts"]
    assert [chart["metricKey"] for chart in charts if chart["type"] == "LINE"] == list(GROUPED)
    assert [(chart["xaxis"]["key"], chart["yaxis"]["key"]) for chart in charts if chart["type"] == "SCATTER"] == [
        ("at_budget/reward/outcome", "at_budget/eval/heldout/accuracy"),
        ("at_budget/reward/outcome", "at_budget/eval/downstream/accuracy"),
    ]
    (section,) = state["compareRunSections"]
    assert {chart["metricSectionId"] for chart in charts} == {section["uuid"]}
    assert len({chart["uuid"] for chart in charts}) == len(charts)


def test_a_page_too_large_for_an_earlier_version_is_one_for_the_newest_alone() -> None:
    record = SweepRecord("x" * 400, "0" * 32, {"primary": "rollout/truncated"}, [], [], None, None, [])
    long = saved_view(record, 0, named=True)
    assert len(long) < VIEW_LENGTH and json.loads(long).keys() == {"name", "createdAt", "updatedAt", "state"}


def test_the_metric_that_decides_has_a_chart(tmp_path: Path) -> None:
    design = {"primary": "average/rollout/truncated"}
    drawn = view_state(SweepRecord("s", "0" * 32, design, [], [], None, None, []))["compareRunCharts"]
    assert [chart["metricKey"] for chart in drawn if chart["type"] == "LINE"] == [*GROUPED, "rollout/truncated"]


@pytest.mark.extended
def test_the_menu_of_views_keeps_room_for_a_users_own(runs: Path, client: MlflowClient, uri: str) -> None:
    sync_all(runs, uri)
    before = experiment(client)
    for number in range(30):
        client.set_experiment_tag(before.experiment_id, f"{VIEW_TAG}{number}", '{"name": "mine"}')
    folder = record(runs, "one", [RunEntry("plain", "", 0, "plain/seed=0")])
    sync_sweep(folder, uri, "grpo_lab")
    assert experiment(client).tags[f"{VIEW_TAG}{read_sweep(folder).key}"].startswith("deflate;")


def test_a_name_that_no_tag_can_have_is_one_tag_for_all_runs(tmp_path: Path, client: MlflowClient, uri: str) -> None:
    name = "recipe=plain,dr_grpo," + "x" * 120
    record(tmp_path, name, [write_run(tmp_path, name, "plain", 0, [0.5])])
    sync_all(tmp_path, uri)
    state = view_state(read_sweep(tmp_path / "sweeps" / name))
    (found,) = client.search_runs([experiment(client).experiment_id], state["searchFilter"])
    assert found.data.tags[state["groupBy"]["groupByKeys"][0]["groupByData"]] == "plain"


@pytest.mark.extended
def test_the_command_ui_prints_every_sweeps_page_and_serves_it(runs: Path, client: MlflowClient, uri: str) -> None:
    own = f"sqlite:///{runs}/mlflow.db"
    sync_all(runs, own)
    cursor = runs / "sweeps/two/mirror.json"
    earlier = {name: value for name, value in json.loads(cursor.read_text()).items() if name != "members"}
    write_json(cursor, earlier)  # as an earlier version left it
    MlflowClient(own).delete_experiment_tag("1", f"{VIEW_TAG}{earlier['key']}")
    port = free_port()
    words = [sys.executable, "-m", "grpo_lab.cli", "ui", "--runs", str(runs), "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        said = [server.stdout.readline().rstrip() for _ in range(5)]
        here = f"http://127.0.0.1:{port}"
        assert said[0] == f"starting MLflow at {here} (takes a few seconds; Ctrl-C stops it)"
        assert said[1:3] == ["  two", f"    {here}{view_path('1', earlier['key'])}"]
        assert said[3:] == ["  all runs", f"    {here}{runs_path('1')}"]

        def answers() -> bool:
            try:
                return urllib.request.urlopen(f"{here}/health", timeout=1).read() == b"OK"
            except OSError:
                return False

        wait_until(answers, server)
        taken = command("ui", "--runs", str(runs), "--port", str(port))
        assert taken.returncode == 1 and f"choose another port with --port {port + 1}" in taken.stderr
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(60)
        server.stdout.close()
    assert f"{VIEW_TAG}{earlier['key']}" in MlflowClient(own).get_experiment("1").tags


@pytest.mark.extended
def test_the_command_ui_says_what_to_type_where_nothing_is_in_mlflow(runs: Path) -> None:
    done = command("ui", "--runs", str(runs))
    assert done.returncode == 1 and done.stderr.startswith("error: no sweep in") and "make demo" in done.stderr
    sent = command("sync", str(runs), f"tracking.uri=sqlite:///{runs}/mlflow.db")
    assert f"tracking.uri=sqlite:///{runs}/mlflow.db" in done.stderr and sent.returncode == 0, sent.stderr
    assert (runs / "mlflow.db").exists()


def test_sweeps_of_a_server_have_their_pages_there(runs: Path) -> None:
    folder = runs / "sweeps/two"
    found = {"uri": "http://server:5000", "experiment_id": "7", "mlflow_run_id": "a", "members": {}}
    write_json(folder / "mirror.json", found)
    done = command("ui", "--runs", str(runs))
    assert done.returncode == 0, done.stderr
    assert f"http://server:5000{view_path('7', read_sweep(folder).key)}" in done.stdout


def test_links_to_a_folder_of_runs_lead_to_the_same_pages_and_another_place_is_named(
    runs: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(runs)
    said: list[str] = []
    here = {"experiment_id": "7", "mlflow_run_id": "a", "members": {}}
    for uri in (f"sqlite:///{link}/mlflow.db", f"sqlite:///{runs}/mlflow.db"):
        write_json(runs / "sweeps/two/mirror.json", {"uri": uri} | here)
        pages = list(_pages(runs, runs.resolve() / "mlflow.db", "http://x", lambda folder: None, said.append))
        assert len(pages) == 1 and pages[0].startswith("  two\n    http://x/#/experiments/7/") and not said
    write_json(runs / "sweeps/two/mirror.json", {"uri": f"sqlite:///{tmp_path}/gone.db"} | here)
    assert not list(_pages(runs, runs / "mlflow.db", "http://x", lambda folder: None, said.append))
    again = f"grpo-lab sync {runs} tracking.uri=sqlite:///{runs}/mlflow.db"
    assert said == [f"two was sent to sqlite:///{tmp_path}/gone.db: `{again}` sends it here too"]


LINES = ".js-plotly-plot path.js-line"


@pytest.mark.needs("chromium", "playwright")
def test_the_pages_draw_curves_in_a_browser(small: Path, store: Path, tmp_path: Path) -> None:
    """The page of a sweep draws a curve for each arm, and the experiment's page those of the sweep's own run."""
    sync_all(small, f"sqlite:///{store}", sweep_results)
    port, key = free_port(), read_sweep(small / "sweeps/small").key
    place = exported_to(small / "sweeps/small")
    assert place is not None
    from playwright.sync_api import Page, expect, sync_playwright

    def curves(page: Page, metric: str) -> list[str]:
        """The shapes of the lines in the first chart of a metric."""
        chart = page.get_by_test_id("experiment-view-compare-runs-card").filter(has_text=metric).first
        expect(chart.locator(LINES).first).to_be_visible(timeout=90_000)
        return [line.get_attribute("d") or "" for line in chart.locator(LINES).all()]

    with mlflow_server(store, tmp_path, port), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 3000})
        page.goto(f"http://127.0.0.1:{port}{view_path(place.experiment_id, key)}", timeout=90_000)
        expect(page.get_by_text("4 matching runs")).to_be_visible(timeout=90_000)
        for arm in ("base", "+helps"):
            expect(page.get_by_text(f"Group: {arm}")).to_be_visible(timeout=90_000)
        for metric in GROUPED:
            shapes = set(curves(page, metric))
            assert len(shapes) >= 2 and all("L" in shape for shape in shapes), (metric, shapes)
        page.close()
        page = browser.new_page(viewport={"width": 1600, "height": 3000})  # which remembers nothing of the first
        page.goto(f"http://127.0.0.1:{port}/#/experiments/{place.experiment_id}/runs?compareRunsMode=CHART")
        for arm in ("base", "plus helps"):
            assert curves(page, f"held-out accuracy/{arm}")
        browser.close()
