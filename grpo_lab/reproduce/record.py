"""A run's record as something that can be run: its configuration with types, and why it cannot be repeated, if so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.budget.compute_account import BudgetAxis
from grpo_lab.config.hydra_setup import bootstrap
from grpo_lab.config.run_config import RunConfig, options, slot_types, to_run, writable
from grpo_lab.distributed.device import choose_device
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.run.identity import CLASS, check_data, data_fingerprint, recorded_identity, run_identity
from grpo_lab.run.prompts import check_prompts
from grpo_lab.run.state import read_inputs
from grpo_lab.run.training_problems import read_questions
from grpo_lab.tracking import provenance
from grpo_lab.tracking.checksums import CHECKSUM, check_finished, read_checksummed, read_json, read_yaml
from grpo_lab.tracking.mlflow_exporter import NoTracking
from grpo_lab.tracking.run_reader import has_ended

_COPY = "restore it from a copy: without it the run cannot be repeated"
_ASKS_A_SERVER = "Endpoint"


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder records it.

    `config` is composed again from `config.yaml`, without Hydra, so that today's conf/ has no say in it.
    """

    folder: Path
    described: Mapping[str, Any]  # run.json
    config: DictConfig
    run: RunConfig

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.folder.parent.name

    @property
    def device(self) -> str:
        """The kind of device that it ran on: cpu or cuda."""
        return self.described["identity"]["device"]

    @property
    def finished(self) -> bool:
        """True if it has come to its own end."""
        return has_ended(self.folder)

    def processes(self, steps: int | None) -> int:
        """How many processes computed its first `steps`, or all. Raises ValueError if their number changed."""
        first, *later = self.described.get("ranks") or [{"from_step": 0, "number": 1}]
        if later and (steps is None or later[0]["from_step"] < steps):
            after = later[0]["from_step"]
            raise ValueError(
                f"{self.folder} cannot be repeated: the number of its processes changed from {first['number']} to "
                f"{later[0]['number']} after step {after}, and each rounds sums otherwise. Remedy: --steps {after} "
                "compares the first ones"
            )
        return first["number"]

    def code_of(self, steps: int | None) -> Mapping[str, Any]:
        """The code that computed its first `steps`, or all. Raises ValueError if it was of several kinds."""
        first, *later = self.described["stretches"]
        if later and (steps is None or later[0]["from_step"] < steps):
            after = later[0]["from_step"]
            raise ValueError(
                f"{self.folder} cannot be repeated: it was resumed with changed code after step {after}, and no one "
                f"code computes it. Remedy: --steps {after} compares what the first code computed"
            )
        return first


def read_record(folder: Path) -> RunRecord:
    """The record in a run's folder. Raises ValueError with a remedy where this code cannot read it."""
    folder = folder.expanduser().absolute()
    if not (folder / "run.json").is_file():
        raise ValueError(f"{folder} holds no run: give a run's folder, such as runs/plain/seed=0")
    described = read_json(folder / "run.json", _COPY)
    if CHECKSUM in described:
        described = read_checksummed(folder / "run.json", _COPY)
    if not {"identity", "stretches", "choices"} <= described.keys():
        raise ValueError(f"{folder} was run by an early version of grpo_lab, whose record does not name its code")
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder / 'config.yaml'} is missing: {_COPY}")
    plain = read_yaml(folder / "config.yaml", _COPY)
    bootstrap([f"plugins=[{','.join(plain.get('plugins') or ())}]"])
    identity = recorded_identity(described)
    try:
        config = _typed(plain, identity)
        run = to_run(config)
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(
            f"{folder / 'config.yaml'} is not a configuration of this code ({str(error).splitlines()[0]}): go back to "
            f"{code_name(described['stretches'][0])}"
        ) from error
    record = RunRecord(folder, described, config, run)
    now = json.loads(json.dumps(run_identity(config, record.device)))
    different = sorted(key for key in identity.keys() | now.keys() if identity.get(key) != now.get(key))
    if different:
        shown = ", ".join(f"{key}: {identity.get(key)!r} in run.json, {now.get(key)!r} here" for key in different[:4])
        raise ValueError(
            f"config.yaml and run.json in {folder} are not of one run ({shown}): one of them was edited, or the code "
            f"has other options now; restore them, or go back to {code_name(described['stretches'][0])}"
        )
    return record


def code_name(segment: Mapping[str, Any]) -> str:
    """The code of a segment in words: its commit."""
    if segment.get("commit") is None:
        return "the version of grpo_lab that ran it"
    return f"commit {segment['commit'][:12]}" + (" with the source.diff beside run.json" if segment["dirty"] else "")


def _typed(plain: DictConfig, identity: Mapping[str, Any]) -> DictConfig:
    """The values of config.yaml in nodes of the classes that run.json names; raises ValueError for an unknown one.

    Where the run is stored is not the record's to say: no exporter, no sweep.
    """
    if not any(key.endswith(f".{CLASS}") for key in identity):
        raise ValueError("run.json names no classes")
    config = OmegaConf.create(
        {key: value for key, value in plain.items() if key not in ("tracking", "design", "label", "cell")}
    )
    places = sorted(key.removesuffix(f".{CLASS}") for key in identity if key.endswith(f".{CLASS}"))
    for place in sorted(places, key=lambda place: place.count("."), reverse=True):  # the innermost first
        values = OmegaConf.select(config, place)
        known = {cls.__name__: cls for cls in options(slot_types()[place.split(".")[0]]).values()}
        cls = known.get(identity[f"{place}.{CLASS}"])
        if cls is None and "." in place:
            continue  # a part that its class declares itself
        if cls is None:
            raise ValueError(
                f"there is no {identity[f'{place}.{CLASS}']} for {place}: if a plugin has it, name that in "
                "GRPO_LAB_PLUGINS"
            )
        OmegaConf.update(config, place, OmegaConf.merge(writable(cls), values), merge=False)
    config.tracking, config.design = writable(NoTracking), None
    config.label = {"sweep": "", "arm": "", "level": ""}
    config.resume_with_changed_code = False
    # Keys that earlier versions lacked, with the values by which they ran.
    for key, value in {"checkpoint_minutes": None, "checkpoint": {"best": None}, "no_signal_steps": 0}.items():
        if key not in config:
            config[key] = value
    # A copy: what is stored for Hydra must not change.
    typed = OmegaConf.merge(writable(RunConfig), config)
    assert isinstance(typed, DictConfig)
    return typed


def check_repeatable(record: RunRecord, steps: int | None) -> list[str]:
    """Raise ValueError with the reason where a second run cannot be this one, before anything is loaded.

    `steps`: compare only that number of first steps, also of a run that has not finished. Returns what its own check of
    a finished run's files found that is no reason to refuse, such as a lost table.
    """
    folder, run = record.folder, record.run
    if steps is not None and steps < 1:
        raise ValueError(f"--steps {steps}: compare at least one step")
    if steps is None and not record.finished:
        raise ValueError(
            f"{folder} has not finished, so its end cannot be compared. Remedy: let it finish by the command that "
            "started it, or compare its first steps with --steps N"
        )
    record.code_of(steps)
    processes = record.processes(steps)
    if judge := _server(record):
        raise ValueError(
            f"{folder} cannot be repeated: {judge} asks a model on a server, whose answers are no part of the record "
            "and may be others today. Remedy: reward=strict, or another grader that computes, makes runs repeatable"
        )
    if steps is None and run.budget.axis is BudgetAxis.device_seconds:
        raise ValueError(
            f"{folder} cannot be repeated: its budget is device_seconds, so the clock ended it. Remedy: --steps N "
            "compares its first steps; another budget, such as steps, makes runs repeatable"
        )
    try:
        kind = choose_device(device_name(record)).type
    except ValueError as error:
        raise ValueError(f"{folder} ran on {record.device}, which is not here: repeat it on such a machine") from error
    if kind != record.device:
        raise ValueError(f"{folder} ran on {record.device}, and device={record.run.device} is {kind} here")
    if record.device == "cuda" and processes > (there := torch.cuda.device_count()):
        raise ValueError(f"{folder} ran on {processes} GPUs, and there are {there} here: repeat it on such a machine")
    return check_finished(folder, record.described)[1] if (folder / "DONE").exists() else []


def device_name(record: RunRecord) -> str:
    """The device to use: as recorded, and where that was a choice of its own, the kind that it chose."""
    return record.device if record.run.device == "auto" else record.run.device


def _server(record: RunRecord) -> str:
    """The place of a grader that asks a server; empty if none does."""
    asking = (key for key, name in record.described["identity"].items() if name == _ASKS_A_SERVER)
    return next((key.removesuffix(f".{CLASS}") for key in asking if key.endswith(f".{CLASS}")), "")


def check_inputs(record: RunRecord) -> None:
    """Raise ValueError with a remedy if the data or the model are not those that the run began with, or are missing."""
    check = "the run cannot be repeated from other inputs"
    try:
        check_data(record.described, data_fingerprint(record.run.task, record.run.evaluation))
    except (ValueError, OSError) as error:
        raise ValueError(f"{record.folder}: {check}: {error}") from error
    path = record.folder / "base.json"
    if not path.exists():  # it ended before it had loaded a model
        raise ValueError(f"{path} is missing, so nothing says which model the run began with: {_COPY}")
    began = read_json(path, _COPY)["fingerprint"]
    try:
        model = record.run.model.resolve()
    except (ValueError, OSError) as error:
        raise ValueError(f"{record.folder}: its model is not here: {error}") from error
    if (now := fingerprint(model)) != began:
        raise ValueError(
            f"{record.folder} began with a model of fingerprint {began}, and {model} has {now}: {check}. "
            "Remedy: give back the weights that this folder had"
        )
    # Of training prompts, those that pass rates leave are not known yet.
    parts = ["training", "evaluation"] if record.run.pass_rate.is_no_op else ["evaluation"]
    try:
        questions = read_questions(record.run.question_settings)
        check_prompts(record.described, read_inputs(record.run, questions).prompts, parts)
    except ValueError as error:
        raise ValueError(f"{record.folder}: {check}: {error}") from error


def changed_code(record: RunRecord, steps: int | None) -> list[str]:
    """How today's code differs from the one that computed the run; empty where a second run has the same."""
    there, now = record.code_of(steps), provenance.code(record.run.source_files)
    versions = there["packages"].keys() | now["packages"].keys()
    changes = [
        f"{name}: {there['packages'].get(name)} there, {now['packages'].get(name)} now"
        for name in sorted(versions)
        if there["packages"].get(name) != now["packages"].get(name)
    ]
    return changes + (
        ["the sources of grpo_lab or of plugins or reward functions differ"]
        if there["sources"] != now["sources"]
        else []
    )
