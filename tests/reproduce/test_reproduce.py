"""A run again from its own record: the same bits, what is refused, and how a difference is told."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import composed
from omegaconf import OmegaConf
from processes import python_path, wait_until
from safetensors.torch import load_file, save_file
from short_runs import SMALL, WORLD, metrics_of, run_in_process, same_ending
from sweep_processes import lines_in

from grpo_lab.cli import main
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import AXES, RunConfig, slot_types, to_run
from grpo_lab.reproduce.command import reproduce
from grpo_lab.reproduce.compare import Outcome, compare_runs
from grpo_lab.reproduce.record import _typed, check_inputs, check_repeatable, read_record
from grpo_lab.run.identity import run_identity
from grpo_lab.tracking.checksums import CHECKSUM, with_checksum

RUN = (*SMALL, "budget.amount=3", "problems_per_step=4", "rollouts_every=2")
PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from grpo_lab.tricks.baseline import Baseline, Credit

@dataclass(frozen=True)
class HalfMark(Baseline):
    mark: float
    formula: ClassVar[str] = "R - {mark}"
    group_relative: ClassVar[bool] = False
    def __call__(self, graded):
        return graded.reward - self.mark
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps."""
    return run_in_process(tmp_path_factory.mktemp("first"), *RUN, checked=0)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.parent.name / finished.name))


def again(run: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "grpo_lab.cli", "reproduce", str(run), *words],
        capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})},
    )  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """Every file of a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON object; a sealed one gets the seal of its new content."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(with_checksum(value) if CHECKSUM in value else value))


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the lines of a log; a line that stays the same keeps its bytes."""
    lines = []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        change(line)
        lines.append(text if line == json.loads(text) else json.dumps(line))
    path.write_text("".join(f"{line}\n" for line in lines))


def nudge(by: float) -> Callable[[dict[str, Any]], None]:
    def change(line: dict[str, Any]) -> None:
        if line["step"] >= 2:
            line["metrics"]["train/loss"] += by

    return change


# ---- the same run


@pytest.mark.extended
def test_a_record_of_an_earlier_version_is_read(copy: Path) -> None:
    """What was part of a run's identity then, and what its configuration did not have."""
    changed(copy / "run.json", lambda run: run["identity"].update({"rollouts_every": 10, "keep_checkpoints": 2}))
    config = OmegaConf.load(copy / "config.yaml")
    for key in ("checkpoint", "no_signal_steps", "checkpoint_minutes"):
        del config[key]
    OmegaConf.save(config, copy / "config.yaml")
    record = read_record(copy)
    assert record.run.checkpoint.best is None and record.run.no_signal_steps == 0


@pytest.mark.extended
def test_a_finished_run_comes_out_bit_by_bit_and_its_folder_stays_as_it_was(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(finished)
    monkeypatch.setattr(sys, "argv", ["grpo-lab", "reproduce", str(finished), "--to", str(tmp_path)])
    main()
    assert "\nequal: steps 0 to 3 compared" in capsys.readouterr().out
    second = tmp_path / finished.parent.name / finished.name
    same_ending(finished, second)
    assert digests(finished) == before
    rewritten(second / "metrics.jsonl", nudge(0.1))
    with pytest.raises(SystemExit, match=r"^1$"):
        main()
    said = capsys.readouterr().out
    assert "to run it again, move that folder away" in said and "different: steps 0 to 3 compared" in said


@pytest.mark.extended
def test_a_run_of_a_sweep_with_a_plugin_comes_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_marks.py").write_text(PLUGIN)
    (tmp_path / "conf" / "baseline").mkdir(parents=True)
    option = "# Half of the marks, an option for this test.\ndefaults: [/schema/baseline/half_mark@_here_]\nmark: 0.5\n"
    (tmp_path / "conf" / "baseline" / "half_mark.yaml").write_text(option)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path / "conf"))
    subprocess.run(
        [
            sys.executable, "-m", "grpo_lab.train", "-m", *WORLD, *RUN, f"runs_dir={tmp_path / 'runs'}",
            "plugins=[half_marks]", "baseline=half_mark", "seed=1",
        ],
        check=True, capture_output=True, timeout=280,
    )  # fmt: skip
    monkeypatch.delenv("GRPO_LAB_CONFIG_PATH")  # the record needs no YAML
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/*/DONE"))
    assert json.loads((folder / "run.json").read_text())["sweep_folder"] is not None
    done = again(folder, "--to", str(tmp_path / "again"))
    assert done.returncode == 0 and "equal: steps 0 to 3 compared" in done.stdout, done.stderr
    same_ending(folder, tmp_path / "again" / folder.parent.name / folder.name)


@pytest.mark.extended
def test_a_run_that_was_killed_and_resumed_comes_out_the_same(tmp_path: Path) -> None:
    words = [*WORLD, *RUN, "budget.amount=20", "checkpoint_every=1", f"runs_dir={tmp_path / 'runs'}"]
    command = [sys.executable, "-m", "grpo_lab.train", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    logs = "runs/*/*/metrics.jsonl"
    try:
        wait_until(lambda: any(lines_in(path) >= 5 for path in tmp_path.glob(logs)), process)
    finally:
        process.kill()
        process.wait()
    (folder,) = (path.parent for path in tmp_path.glob(logs))
    with pytest.raises(ValueError, match=r"has not finished, .* or compare its first steps with --steps N"):
        reproduce(folder, tmp_path / "again", None, print)
    first = reproduce(folder, tmp_path / "again", 3, print)
    assert first.compared.outcome is Outcome.equal and first.compared.steps == 3
    assert len(metrics_of(first.folder)) < 21, "it was stopped, not run to its end"
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    whole = reproduce(folder, tmp_path / "again", None, print)  # goes on from where the first steps ended
    assert whole.compared.outcome is Outcome.equal and whole.compared.steps == 20
    same_ending(folder, whole.folder)


# ---- the record


def trip(config: Any) -> tuple[RunConfig, RunConfig]:
    """The run of a configuration, and that of what its folder would record."""
    identity = json.loads(json.dumps(run_identity(config, "cpu")))
    plain = OmegaConf.create(OmegaConf.to_yaml(config, resolve=True))
    return to_run(config), to_run(_typed(plain, identity))


def assert_same(config: Any) -> None:
    was, now = trip(config)
    for name in RunConfig.__dataclass_fields__:
        if name != "tracking":
            assert getattr(was, name) == getattr(now, name), name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ("reward=strict_and_format",),
        ("reward=rubric_evolving", "reward.proposer.model=a", "reward.judge.model=b"),
        ("recipe=dapo", "convention=verl", "kl=k3_loss"),
        ("world=families",),
    ],
    ids=lambda words: words[0],
)
def test_a_record_holds_the_configuration_that_ran(words: tuple[str, ...]) -> None:
    assert_same(composed(*words)[0])


def rows_of(slots: str) -> list[list[str]]:
    """Overrides that choose every option of the axes, as many at a time as there are axes, or of one other slot."""
    choices = {slot: sorted(path.stem for path in (conf_folder() / slot).glob("*.yaml")) for slot in slot_types()}
    if slots != "axes":
        return [[f"{slots}={option}"] for option in choices[slots]]
    most = max(len(choices[axis]) for axis in AXES)
    return [[f"{axis}={choices[axis][number % len(choices[axis])]}" for axis in AXES] for number in range(most)]


JUDGE = "judge.model=a"
# What options ask for, which have no value of their own for it.
ASKED = {
    "task=gym": ["task.family=leg_counting"],
    "task=jsonl": ["task.path=questions.jsonl"],
    "task=mixture": [f"+task.sources.{name}={{path: {name}.jsonl, weight: 1}}" for name in ("a", "b")],
    "reward=rubric": [f"reward.{JUDGE}"],
    "reward=rubric_evolving": [f"reward.{JUDGE}", "reward.proposer.model=b"],
    "model=hf": ["model.path=a"],
    "teacher=on_policy": ["teacher.path=a"],
    "teacher=with_reward": ["teacher.path=a"],
    "verifier=rubric": [f"verifier.{JUDGE}"],
}


@pytest.mark.extended
@pytest.mark.parametrize("slots", ["axes", *(slot for slot in slot_types() if slot not in AXES)])
def test_a_record_holds_every_option(slots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lab.tracking.trackers.find_spec", lambda name: object())  # dev lacks trackio
    for row in rows_of(slots):
        assert_same(composed(*row, *ASKED.get(row[0], []))[0])


# ---- refused


def refusal(folder: Path, steps: int | None = None) -> str:
    """What the checks before the second run say."""
    with pytest.raises(ValueError) as raised:
        record = read_record(folder)
        check_repeatable(record, steps)
        check_inputs(record)
    return str(raised.value)


def test_what_is_no_record_of_a_run_is_refused_with_a_remedy(copy: Path) -> None:
    assert "holds no run: give a run's folder" in refusal(copy.parent)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("clip_high: 0.2", "clip_high: 0.3"))
    assert "surrogate.clip_high: 0.2 in run.json, 0.3 here" in refusal(copy)
    (copy / "config.yaml").write_text(text.replace("clip_high: 0.2", "clip_higher: 0.2"))
    assert "is not a configuration of this code" in refusal(copy) and "go back to commit" in refusal(copy)
    (copy / "config.yaml").unlink()
    assert "config.yaml is missing" in refusal(copy)
    (copy / "run.json").write_text((copy / "run.json").read_text().replace('"seed": 0', '"seed": 1', 1))
    assert "run.json is damaged" in refusal(copy)


def test_a_class_that_is_not_here_points_to_plugins(copy: Path) -> None:
    changed(copy / "run.json", lambda run: run["identity"].update({"baseline.class": "HalfMark"}))
    assert "there is no HalfMark for baseline: if a plugin has it, name that in GRPO_LAB_PLUGINS" in refusal(copy)


@pytest.mark.extended
def test_a_run_that_cannot_be_repeated_is_refused_with_the_reason(copy: Path) -> None:
    stretch = json.loads((copy / "run.json").read_text())["stretches"][0]
    changed(copy / "run.json", lambda run: run["stretches"].append({**stretch, "from_step": 2, "sources": "other"}))
    assert "resumed with changed code after step 2" in refusal(copy) and "--steps 2 compares" in refusal(copy)
    assert read_record(copy).code_of(2) == stretch
    (copy / "DONE").unlink()
    assert "has not finished, so its end cannot be compared. Remedy:" in refusal(copy)
    assert "--steps 0: compare at least one step" in refusal(copy, 0)
    changed(copy / "run.json", lambda run: run["identity"].update(device="cuda"))
    assert "ran on cuda" in refusal(copy, 2)


@pytest.mark.extended
def test_a_judge_on_a_server_is_told(copy: Path) -> None:
    config = composed("reward=rubric", "reward.judge.model=judge", "reward.judge.base_url=http://127.0.0.1:1/v1")[0]
    identity = run_identity(config, "cpu")
    (copy / "config.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    changed(copy / "run.json", lambda run: run.update(identity=identity))
    assert "cannot be repeated: reward.judge asks a model on a server" in refusal(copy)


def test_other_data_and_another_model_are_refused_before_anything_runs(copy: Path) -> None:
    changed(copy / "base.json", lambda base: base.update(fingerprint="0123456789abcdef"))
    assert "this run is finished, but" in refusal(copy, 2), "DONE has its digest"
    (copy / "DONE").unlink()
    assert "began with a model of fingerprint 0123456789abcdef" in refusal(copy, 2)
    (copy / "base.json").unlink()
    assert "base.json is missing" in refusal(copy, 2)
    changed(copy / "run.json", lambda run: run.update(data={"train": "another"}))
    assert "the questions of train have changed since this run began" in refusal(copy, 2)


def test_another_folder_must_be_named_and_no_more_steps_than_there_are(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is where the run itself lies: choose another folder"):
        reproduce(finished, finished.parents[1], None, print)
    with pytest.raises(ValueError, match=r"--steps 9: .* has logged 3 steps; give at most as many"):
        reproduce(finished, tmp_path, 9, print)


# ---- differences


def compared(one: Path, other: Path, steps: int | None = None) -> tuple[Outcome, str]:
    found = compare_runs(one, other, steps)
    return found.outcome, "\n".join(found.lines())


def test_rounding_counts_as_equal_only_where_the_records_explain_it(finished: Path, copy: Path) -> None:
    assert compared(finished, copy)[0] is Outcome.equal
    assert "train/loss" in metrics_of(copy)[2]["metrics"]
    rewritten(copy / "metrics.jsonl", nudge(1e-7))
    outcome, text = compared(finished, copy)
    assert outcome is Outcome.different and "train/loss  2              1e-07" in text
    assert compared(finished, copy, steps=1)[0] is Outcome.equal, "the first step is the same"
    changed(copy / "environment.json", lambda found: found["cpu"].update(model="another"))
    outcome, text = compared(finished, copy)
    assert outcome is Outcome.rounding and "processor" in text and "another" in text
    rewritten(copy / "metrics.jsonl", nudge(0.1))
    assert compared(finished, copy)[0] is Outcome.different, "too much for rounding"


def test_rounding_under_other_sources_is_not_explained(finished: Path, copy: Path) -> None:
    rewritten(copy / "metrics.jsonl", nudge(1e-7))
    changed(copy / "environment.json", lambda found: found["packages"].update(torch="3.0"))
    assert compared(finished, copy)[0] is Outcome.rounding
    changed(copy / "run.json", lambda run: run["stretches"][0].update(sources="other"))
    outcome, text = compared(finished, copy)
    assert outcome is Outcome.different and "sources" in text and "3.0" in text


def test_another_answer_is_a_difference_wherever_it_was_computed(finished: Path, copy: Path) -> None:
    changed(copy / "environment.json", lambda found: found["cpu"].update(model="another"))
    table = copy / "eval" / "step=000003.parquet"
    answers = pd.read_parquet(table)
    answers.assign(text=["other", *answers["text"][1:]]).to_parquet(table)
    outcome, text = compared(finished, copy)
    assert outcome is Outcome.different and f"eval text  3              1 of {len(answers)} rows" in text
    answers.to_parquet(table, compression="gzip")
    assert compared(finished, copy)[0] is Outcome.equal, "the same values in other bytes"
    table.unlink()
    assert "eval tables  3              only there" in compared(finished, copy)[1]


def test_other_weights_are_a_difference(finished: Path, copy: Path) -> None:
    newest = max((copy / "checkpoints").iterdir())
    weights = load_file(newest / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 0.25
    save_file(weights, newest / "model.safetensors")
    digest = hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
    changed(newest / "manifest.json", lambda manifest: manifest["files"].update({"model.safetensors": digest}))
    outcome, text = compared(finished, copy)
    assert outcome is Outcome.different and "the last weights  3              0.25" in text
    shutil.rmtree(newest)
    assert "the last weights" in compared(finished, copy)[1] and "none here" in compared(finished, copy)[1]
    assert "kept no checkpoint" in compared(copy, finished)[1]


def test_metrics_and_steps_of_one_run_alone_are_named(finished: Path, copy: Path) -> None:
    rewritten(copy / "metrics.jsonl", lambda line: line["metrics"].pop("train/loss", None))
    assert "train/loss  1              logged by only one" in compared(finished, copy)[1]
    lines = (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    assert "steps  3              1 only there" in compared(finished, copy)[1]
