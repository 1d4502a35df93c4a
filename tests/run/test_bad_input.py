"""Bad input and bad machines: one clear message with a remedy, early, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from short_runs import WORLD, command_line, same_ending
from transformers import AutoTokenizer, BertConfig

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.loop import start
from grpo_lab.run import checkpoint
from grpo_lab.tracking.run_log import RunLog


def start_with(folder: Path, *overrides: str) -> Path:
    config = compose_config([*WORLD, f"runs_dir={folder}", "budget.amount=2", *overrides])
    return start(config, "run", {}, ["test"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "override,said",
    [
        ("steps=10", "error: there is no key 'steps': type budget.amount=10 ("),
        ("surrogate=ppoo", "ppo_higher"),
        ("surrogate.clip_lo=0.1", "clip_lo"),
        ("surrogate.clip_low=-0.2", "error: Ppo.clip_low must be greater than 0, got -0.2"),
        ("group_size=1", "Remedy: set group_size to at least 2"),
        ("plugins=[no_such_module]", "error: plugin module 'no_such_module' cannot be imported"),
        ("tracking.uri=sqlite:///relative.db", "four slashes"),
    ],
)
def test_the_command_line_says_what_is_wrong_without_a_traceback(tmp_path: Path, override: str, said: str) -> None:
    done = command_line("world=tiny", f"runs_dir={tmp_path}", override)
    assert done.returncode != 0
    assert said in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was started"


@pytest.fixture
def unread(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose weights nobody may read: whoever does fails with another message."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("grpo_lab.policy.models.read_model", read)
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


def test_a_missing_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path must be an existing folder, got /no/such/folder"):
        start_with(tmp_path / "runs", "model=hf", "model.path=/no/such/folder")


def test_a_model_that_is_no_causal_lm(tmp_path: Path, unread: Path) -> None:
    (unread / "config.json").write_text(json.dumps({"architectures": ["BertModel"], **BertConfig().to_dict()}))
    with pytest.raises(ValueError, match="causal language model"):
        start_with(tmp_path / "runs", "model=hf", f"model.path={unread}")


def test_a_tokenizer_without_an_end_of_text(tmp_path: Path, unread: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(unread)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(unread)
    with pytest.raises(ValueError, match="end-of-text"):
        start_with(tmp_path / "runs", "model=hf", f"model.path={unread}")


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["engine.max_tokens=500", "evaluation.downstream_max_tokens=500"])
def test_a_budget_longer_than_the_context(tmp_path: Path, unread: Path, budget: str) -> None:
    with pytest.raises(ValueError, match="exceed the model's context of 128 tokens: lower"):
        start_with(tmp_path / "runs", "model=hf", f"model.path={unread}", budget)


@pytest.mark.extended
def test_more_problems_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training split has 384 problems"):
        start_with(tmp_path, "problems_per_step=512")
    with pytest.raises(ValueError, match=r"lower evaluation\.ends_heldout_problems"):
        start_with(tmp_path / "b", "evaluation.heldout_problems=100")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use cpu, cuda, cuda:<number> or auto"):
        start_with(tmp_path, "device=mps")


@pytest.mark.extended
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = command_line(*WORLD, f"runs_dir={tmp_path / 'file'}")
    assert done.returncode != 0 and "cannot be written" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(OSError, match="set runs_dir"):
        start_with(Path("/proc/grpo_lab"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no free page."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("owner", "writes", "named", "often"),
    [(RunLog, "write_step", r"(metrics|timing)\.jsonl", ()), (RunLog, "write_table", r"\.parquet", ()),
     (checkpoint, "save", "checkpoint of step 4", ("checkpoint_every=2",))],
    ids=["metrics", "table", "checkpoint"],
)  # fmt: skip
@pytest.mark.needs("mount", "umount")
def test_a_full_disk_loses_nothing_and_the_same_command_goes_on(
    owner: Any,
    writes: str,
    named: str,
    often: tuple[str, ...],
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before one of its writes another program takes the rest of a real disk."""
    numbers = ["budget.amount=6", "rollouts_every=2", *often]
    write, calls = getattr(owner, writes), 0

    def on_a_full_disk(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            fill(small_disk)
        return write(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=named) as met:
        patch.setattr(owner, writes, on_a_full_disk)
        start_with(small_disk, *numbers)
    assert "free space and start the same command again: it resumes from the last checkpoint" in str(met.value)
    (small_disk / "filler").unlink()
    folder = start_with(small_disk, *numbers)
    assert not list(small_disk.rglob("*.tmp")), "nothing half written stays"
    same_ending(start_with(tmp_path / "whole", *numbers), folder)
