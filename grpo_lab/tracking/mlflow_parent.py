"""The MLflow run of a sweep, parent of the runs of its arms. Like them it copies a folder.

It carries what the sweep asks and found, and at each step the mean of every arm. What was sent stands in mirror.json of
the sweep's folder, so nothing is sent twice. MLflow takes back neither a point nor a parameter: where one that was sent
no longer holds, as after the sweep has grown by further seeds, a new run takes the place of the old one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.tracking.arm_means import MEASURES, Point, arm_means
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.files import locked, write_json
from grpo_lab.tracking.mlflow_params import parameters, shortened
from grpo_lab.tracking.mlflow_store import first_line, load_mlflow, prepare_store
from grpo_lab.tracking.mlflow_view import MOST_NAMED, VIEW_TAG, membership, saved_view, view_path
from grpo_lab.tracking.passwords import masked, without_mask
from grpo_lab.tracking.sweep_record import FILE, RunEntry, SweepRecord, read_sweep, sweep_status

_PATIENCE_SECONDS = 60.0  # wait for another process that sends the same sweep
_CURSOR = "mirror.json"
TAG_LENGTH = 5000  # characters
POINTS_PER_BATCH = 1000  # MLflow's limit for one log_batch, and the cheapest size per point
ENTRIES_PER_BATCH = 100  # params or tags, likewise
_RUNS_PER_SEARCH = 1000
_PRIMARY = "mlflow.experiment.primaryMetric.name"  # a tag of the experiment that MLflow's pages read
_DESCRIBED = ("question", "prediction", "primary", "control")

logger = logging.getLogger("grpo_lab.tracking")


@dataclass(frozen=True)
class SweepResults:
    """The analysis of a sweep: a table of its arms and the verdict, as text, and files by their names."""

    table: str
    verdict: str
    files: Mapping[str, bytes]


Analyse = Callable[[Path], SweepResults | None]  # of a sweep's folder; None where no run is finished


@dataclass
class _Cursor:
    """The content of a sweep's mirror.json: which MLflow run copies it, and what was sent."""

    uri: str
    experiment_id: str
    key: str
    mlflow_run_id: str = ""
    numbers: str = ""  # hash of the means and parameters
    artifacts: dict[str, str] = field(default_factory=dict)  # name -> hash of the content
    members: dict[str, str] = field(default_factory=dict)  # folder of a run -> its MLflow run and its arm here


@dataclass(frozen=True)
class SweepInMlflow:
    """Where a sweep is in MLflow."""

    uri: str
    experiment_id: str
    run_id: str
    has_view: bool  # else an earlier version sent it


def announce_sweep(folder: Path, running: bool, uri: str | None = None, analyse: Analyse | None = None) -> None:
    """Send the sweep's current state to MLflow; a store that does not answer is a warning, never an error.

    `uri` is where, with its password; without it what the sweep's record says.
    """
    record = read_sweep(folder)
    if record.tracking is None:
        return
    place, experiment = uri or record.tracking["uri"], record.tracking["experiment"]
    try:
        sync_sweep(folder, place, experiment, "RUNNING" if running else None, analyse)
    except Exception as error:
        # No error here may stop the runs: their folders have everything.
        logger.warning(
            "MLflow does not take the sweep (%s); it goes on, and `grpo-lab sync %s` sends what is missing",
            first_line(error),
            shlex.quote(str(folder.parent.parent)),
        )


def sync_sweep(
    folder: Path, uri: str, experiment: str, status: str | None = None, analyse: Analyse | None = None
) -> str:
    """Create or update the MLflow run of the sweep in `folder` and return its id.

    `status` None: the status follows from the runs' folders, and the arms' means and parameters are sent too. What
    `analyse` makes of the sweep is sent with them.
    """
    uri = without_mask(uri)
    experiment_id = prepare_store(uri, experiment)  # before the first client: `prepare_store` says why
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    results = _analysed(folder, analyse)
    with locked(folder / ".mirror.lock", _PATIENCE_SECONDS):
        record = read_sweep(folder)
        sent = _attached(folder, record, client, uri, experiment_id)
        if status is None:
            _send_numbers(folder, record, client, sent)
        elsewhere = _mark_members(folder, record, client, sent)
        _send_view(record, client, sent)
        for name, value in _tags(folder, record, sent, elsewhere, results).items():
            client.set_tag(sent.mlflow_run_id, name, value[:TAG_LENGTH])
        files = {FILE: (folder / FILE).read_bytes(), **(results.files if results else {})}
        _send_files(folder, client, sent, files)
        status = status or sweep_status(folder, record)
        if status == "RUNNING":
            client.update_run(sent.mlflow_run_id, status=status)
        else:
            client.set_terminated(sent.mlflow_run_id, status)
    return sent.mlflow_run_id


def send_figures(folder: Path, paths: Sequence[Path]) -> bool:
    """Copy files to the sweep's run in MLflow, below `figures/`; return whether all are there.

    Raises whatever MLflow does where the store does not answer.
    """
    place = exported_to(folder)
    if place is None:
        return False
    uri = without_mask(place.uri)
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    with locked(folder / ".mirror.lock", _PATIENCE_SECONDS):
        sent = _attached(folder, read_sweep(folder), client, uri, place.experiment_id)
        return _send_files(folder, client, sent, {f"figures/{path.name}": path.read_bytes() for path in paths})


def exported_to(folder: Path) -> SweepInMlflow | None:
    """Where the sweep in `folder` was sent; None for nowhere. Reads only the folder."""
    path = folder / _CURSOR
    if not path.exists():
        return None
    stored = read_json(path, "remove it, and sync again")
    return SweepInMlflow(stored["uri"], stored["experiment_id"], stored["mlflow_run_id"], "members" in stored)


def parent_of(folder: Path, client: Any, uri: str, experiment_id: str) -> str:
    """The id of the sweep's MLflow run, created if missing; concurrent processes get the same id."""
    with locked(folder / ".mirror.lock", _PATIENCE_SECONDS):
        return _attached(folder, read_sweep(folder), client, uri, experiment_id).mlflow_run_id


def _attached(folder: Path, record: SweepRecord, client: Any, uri: str, experiment_id: str) -> _Cursor:
    """The record of what was sent to the sweep's MLflow run, created if missing. Hold the sweep's lock."""
    fresh = _Cursor(masked(uri), experiment_id, record.key)
    path = folder / _CURSOR
    stored = read_json(path, "remove it, and sync again") if path.exists() else {}
    same = all(stored.get(name) == getattr(fresh, name) for name in ("uri", "experiment_id", "key"))
    if same and _is_there(client, stored["mlflow_run_id"]):
        return _Cursor(**stored)
    found = client.search_runs([experiment_id], f"tags.run_key = '{record.key}'", max_results=1)
    fresh.mlflow_run_id = found[0].info.run_id if found else _created(client, record, experiment_id)
    # Without what was sent: it is sent again, which adds nothing.
    write_json(path, {name: getattr(fresh, name) for name in ("uri", "experiment_id", "key", "mlflow_run_id")})
    return fresh


def _created(client: Any, record: SweepRecord, experiment_id: str, started: int | None = None) -> str:
    tags = {"run_key": record.key, "kind": "sweep"}
    return client.create_run(experiment_id, start_time=started, run_name=record.name, tags=tags).info.run_id


def _save(folder: Path, sent: _Cursor) -> None:
    write_json(folder / _CURSOR, asdict(sent))


def _is_there(client: Any, run_id: str) -> bool:
    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except load_mlflow().MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # which means that the store is a new one
            raise
        return False


def _analysed(folder: Path, analyse: Analyse | None) -> SweepResults | None:
    try:
        return analyse(folder) if analyse else None
    except Exception as error:
        logger.warning("MLflow gets no verdict of the sweep %s (%s)", folder.name, first_line(error))
        return None


def _send_numbers(folder: Path, record: SweepRecord, client: Any, sent: _Cursor) -> None:
    """Send the arms' means and what all runs have in common, to a new run where the old one has others.

    The old one stays until every run of the sweep has begun.
    """
    means, params = arm_means(record, folder.parent.parent), _parameters(folder, record)
    digest = _digest(json.dumps([means, params]).encode())
    if sent.numbers == digest:
        return
    there = client.get_run(sent.mlflow_run_id)
    known = {name: _history(client, sent, name) for name in there.data.metrics if name.partition("/")[0] in MEASURES}
    wrong = any(not points <= set(means.get(name, ())) for name, points in known.items())
    if wrong or any(params.get(name) != value for name, value in there.data.params.items()):
        if not params:
            return
        _replace(folder, record, client, sent, there.info.start_time)
        known, there = {}, None
    entities = load_mlflow().entities
    lacking = [
        entities.Metric(name, point.value, point.wall, point.step)
        for name, points in means.items()
        for point in points
        if point not in known.get(name, ())
    ]
    for chunk in chunks(lacking, POINTS_PER_BATCH):
        client.log_batch(sent.mlflow_run_id, metrics=chunk, synchronous=True)
    new = [entities.Param(*one) for one in params.items() if there is None or one[0] not in there.data.params]
    for chunk in chunks(new, ENTRIES_PER_BATCH):
        client.log_batch(sent.mlflow_run_id, params=chunk, synchronous=True)
    _show_first(client, sent, list(means))
    sent.numbers = digest
    _save(folder, sent)


def _show_first(client: Any, sent: _Cursor, names: Sequence[str]) -> None:
    """Make a mean the metric that the experiment's page begins with; else MLflow shows a section without a chart."""
    before = client.get_experiment(sent.experiment_id).tags.get(_PRIMARY, "")
    if names and before not in names and before.partition("/")[0] in ("", *MEASURES):
        client.set_experiment_tag(sent.experiment_id, _PRIMARY, names[0])


def _history(client: Any, sent: _Cursor, name: str) -> set[Point]:
    return {Point(one.step, one.timestamp, one.value) for one in client.get_metric_history(sent.mlflow_run_id, name)}


def _replace(folder: Path, record: SweepRecord, client: Any, sent: _Cursor, started: int) -> None:
    """Put a new MLflow run in the place of the sweep's, with the same runs below it; the old one is deleted there."""
    earlier = list(_found(client, sent.experiment_id, f"tags.run_key = '{record.key}'"))
    sent.mlflow_run_id = _created(client, record, sent.experiment_id, started)
    sent.numbers, sent.artifacts = "", {}
    _save(folder, sent)
    for old in (run.info.run_id for run in earlier):  # more than one after a kill within this function
        for run in _found(client, sent.experiment_id, f"tags.`mlflow.parentRunId` = '{old}'"):
            client.set_tag(run.info.run_id, "mlflow.parentRunId", sent.mlflow_run_id)
        client.delete_run(old)


def _found(client: Any, experiment_id: str, filter_string: str) -> Iterator[Any]:
    token, pages = None, []
    while token or not pages:
        pages.append(client.search_runs([experiment_id], filter_string, max_results=_RUNS_PER_SEARCH, page_token=token))
        token = pages[-1].token
    return (run for page in pages for run in page)


def _parameters(folder: Path, record: SweepRecord) -> dict[str, str]:
    """The arms of the sweep, and the parameters in which all of its runs agree, once all have begun."""
    described = [_described(folder, entry) for entry in record.runs]
    if not described or None in described:
        return {}
    of_runs = [parameters(run) for run in described if run is not None]
    common = {key: value for key, value in of_runs[0].items() if all(run.get(key) == value for run in of_runs)}
    lists = {"arms": [entry.arm for entry in record.runs], "levels": [entry.level for entry in record.runs]}
    lists["seeds"] = [str(entry.seed) for entry in record.runs]
    named = {name: shortened(", ".join(dict.fromkeys(filter(None, values)))) for name, values in lists.items()}
    return {name: text for name, text in named.items() if text} | common  # the UI lists them in this order


def _described(folder: Path, entry: RunEntry) -> dict[str, Any] | None:
    """The run.json of a run; None before it has begun."""
    path = folder.parent.parent / entry.folder / "run.json"
    return read_json(path, AFRESH) if path.exists() else None


def _mark_members(folder: Path, record: SweepRecord, client: Any, sent: _Cursor) -> list[str]:
    """Give every run of the sweep the tag by which its view finds it; return a line on each that is of another sweep.

    A run has one parent in MLflow, the sweep that it ran under first.
    """
    elsewhere = []
    for place, entry in {entry.folder: entry for entry in record.runs}.items():
        run = _described(folder, entry)
        if run is None:
            continue
        ((tag, arm),) = membership(record, place).items()
        run_id = _run_of(folder, place, run, client, sent)
        if run_id and sent.members.get(place) != (member := f"{run_id} {arm}"):
            client.set_tag(run_id, tag, arm[:TAG_LENGTH])
            sent.members[place] = member
        other = run["tags"].get("sweep", "")
        if other != record.name:
            title = f"{arm} seed {entry.seed}, {f'of the sweep {other}' if other else 'a run on its own'}"
            link = f"[{title}](#/experiments/{sent.experiment_id}/runs/{run_id})"
            elsewhere.append(f"- {link if run_id else f'{title}: not in this experiment'}")
    _save(folder, sent)
    return elsewhere


def _run_of(folder: Path, place: str, run: Mapping[str, Any], client: Any, sent: _Cursor) -> str | None:
    """The id of a run in the sweep's experiment; None where it was not sent there."""
    path = folder.parent.parent / place / _CURSOR
    known = read_json(path, "remove it, and sync again").get("mlflow_run_id") if path.exists() else None
    if known and sent.members.get(place, "").partition(" ")[0] == known:
        return known
    found = client.search_runs([sent.experiment_id], f"tags.run_key = '{run['run_key']}'", max_results=1)
    return found[0].info.run_id if found else None


def _send_view(record: SweepRecord, client: Any, sent: _Cursor) -> None:
    """Keep the sweep's view among the tags of its experiment."""
    tags = client.get_experiment(sent.experiment_id).tags
    name = f"{VIEW_TAG}{record.key}"
    others = sum(key.startswith(VIEW_TAG) and key != name and value.startswith("{") for key, value in tags.items())
    created = client.get_run(sent.mlflow_run_id).info.start_time
    view = saved_view(record, created, named=others < MOST_NAMED)
    if tags.get(name) != view:
        client.set_experiment_tag(sent.experiment_id, name, view)


def _send_files(folder: Path, client: Any, sent: _Cursor, files: Mapping[str, bytes]) -> bool:
    """Copy files that changed since they were sent; return whether the store has all, since it may refuse files."""
    for name, content in files.items():
        if sent.artifacts.get(name) == (digest := _digest(content)):
            continue
        place = Path(name)
        try:
            with tempfile.TemporaryDirectory() as made:
                (Path(made) / place.name).write_bytes(content)
                client.log_artifact(sent.mlflow_run_id, str(Path(made) / place.name), str(place.parent).strip("."))
        except Exception as error:
            logger.info("%s of the sweep %s was not copied to MLflow: %s", name, folder.name, first_line(error))
            return False
        sent.artifacts[name] = digest
        _save(folder, sent)
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """The items in parts of `size`, as a store takes them."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _tags(
    folder: Path, record: SweepRecord, sent: _Cursor, elsewhere: Sequence[str], results: SweepResults | None
) -> dict[str, str]:
    design = dict(record.design or {})
    if "tricks" in design:  # the control follows from the kind, unless it has a name of its own
        design.setdefault("control", "full" if design["kind"] == "leave_one_out" else "base")
    tags = {name: " ".join(str(design[name]).split()) for name in ("question", "control", "primary") if name in design}
    return (
        tags
        | {
            "sweep": record.name,
            "folder": str(folder.resolve()),
            "declared": json.dumps(record.declared[-1]),
            "mlflow.runName": record.name,
            "mlflow.source.name": "grpo_lab",
            "mlflow.source.type": "LOCAL",
            "mlflow.note.content": _note(folder, record, design, sent, elsewhere, results),
        }
        | ({"commit": record.commit, "mlflow.source.git.commit": record.commit} if record.commit else {})
    )


def _note(
    folder: Path,
    record: SweepRecord,
    design: Mapping[str, Any],
    sent: _Cursor,
    elsewhere: Sequence[str],
    results: SweepResults | None,
) -> str:
    """The sweep's description in MLflow. Of a verdict that is too long for it, the beginning."""
    arms = list(dict.fromkeys(entry.arm for entry in record.runs))
    # First: what stands further down cannot be clicked before *Show more*.
    notes = [f"**[Curves of its runs, grouped by arm]({view_path(sent.experiment_id, record.key)[1:]})**"]
    notes += [
        f"**{name.capitalize()}.** {' '.join(str(design[name]).split())}" for name in _DESCRIBED if name in design
    ]
    notes += [f"**Arms.** {', '.join(f'`{arm}`' for arm in arms)}; {len(record.runs)} runs."]
    last = ["\n".join(["**Runs of it that ran under another sweep**", *elsewhere])] if elsewhere else []
    last += [f"**Command.** `{shlex.join(record.command)}`", f"Recorded in `{folder.resolve()}`."]
    if results is not None:
        notes.append(f"```\n{results.table}\n```")
        room = TAG_LENGTH - len("\n\n".join([*notes, *last])) - 100
        whole = len(results.verdict) <= room
        rest = "" if whole else "\n... the rest is in verdict.txt, under Artifacts"
        last = [f"```\n{results.verdict if whole else results.verdict[: max(room, 0)]}{rest}\n```", *last]
    return "\n\n".join([*notes, *last])
