"""Two processes on the CPU, started by torchrun, are one run: gradients, metrics, checkpoints, files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import pytest
import torch
from processes import alive, children_of, descendants_of, python_path, wait_until, with_word
from several_ranks import TORCHRUN, WORLD, on_one, on_two, on_two_machines, two_machines
from short_runs import final_weights, metrics_of
from transformers import AutoModelForCausalLM

from grpo_lab.run import checkpoint
from grpo_lab.run.recorder import failures_recorded
from grpo_lab.tracking.run_log import RunLog

RECIPES = {
    "grpo": ["recipe=grpo", "budget.amount=2", "schedule=one_step_off"],
    "dr_grpo": [
        "recipe=dr_grpo",
        "budget.amount=2",
        "packing=false",
        "gradient_checkpointing=true",
        "evaluation.initial_kl=true",
    ],
    "dapo": ["recipe=dapo", "budget.amount=2", "updates=two", "microbatch_tokens=64"],
    "gspo": ["recipe=gspo", "budget.amount=2", "updates=two", "logits_per_chunk=512"],
    "ppo": ["recipe=ppo", "budget.amount=2", "updates=two", "critic.minibatches=2"],
    "remax": ["recipe=remax", "budget.amount=2"],
}
# Under this convention no microbatch is divided further, so in half precision the same products are rounded alike.
SAME_MICROBATCHES = ["budget.amount=1", "convention=trl_bnpo", "aggregation=token_mean", "microbatch_tokens=64"]
VARIANTS = {
    "bf16": [*SAME_MICROBATCHES, "learner_precision=bf16"],
    "bf16_again": [*SAME_MICROBATCHES, "learner_precision=bf16", "gradient_checkpointing=true"],
    "fp16": [*SAME_MICROBATCHES, "learner_precision=fp16"],
    "marks": ["budget.amount=2", "surrogate=clip_cov", "microbatch_tokens=64"],
    "remembered": [
        "budget.amount=3", "baseline=value_tracker", "scale=none", "task.train_size=16", "task.probe_size=16",
        "problems_per_step=16",
    ],
    "muon": ["budget.amount=2", "optimizer=muon"],
    "sgd": ["budget.amount=2", "optimizer=sgd", "optimizer.momentum=0.9"],
}  # fmt: skip


def of(folder: Path, name: str) -> Path:
    return folder / name / "seed=0"


def same_metrics(one: Path, two: Path, relative: float = 1e-4) -> None:
    """The same numbers under the same names, up to rounding; what measures rounding itself is only small in both."""
    for ours, theirs in zip(metrics_of(one), metrics_of(two), strict=True):
        assert ours["metrics"].keys() == theirs["metrics"].keys()
        for name, value in ours["metrics"].items():
            near = 1e-5 if name.startswith("mismatch/") else 1e-6
            if (
                name == "active_fraction/kl"
            ):  # of some 170 tokens some terms are so near to 0 that rounding makes them 0 or not
                near = 0.02
            assert theirs["metrics"][name] == pytest.approx(value, rel=relative, abs=near), (ours["step"], name)


def same_gradients(one: Path, two: Path, name: str) -> None:
    """Those of the first update that pulls within 1e-6; later ones begin from weights that differ by rounding.

    The largest of the first is a thousand times as large or more.
    """
    ours, theirs = (torch.load(folder / f"{name}.pt") for folder in (one, two))
    assert len(ours) == len(theirs) > 0
    pulls = [any(bool(gradient.any()) for gradient in update.values()) for update in ours]
    first = pulls.index(True)
    assert max(float(gradient.abs().max()) for gradient in ours[first].values()) > 1e-3
    for number, (here, there) in enumerate(zip(ours, theirs)):
        assert here.keys() == there.keys()
        for place in here:
            torch.testing.assert_close(there[place], here[place], rtol=0, atol=1e-6 if number <= first else 1e-5)


def same_weights(one: Path, two: Path) -> None:
    ours, theirs = final_weights(one), final_weights(two)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-5)


def same_tables(one: Path, two: Path) -> None:
    for table in sorted((one / "eval").iterdir()):
        pd.testing.assert_frame_equal(pd.read_parquet(table), pd.read_parquet(two / "eval" / table.name))


def cut_back(run: Path, into: Path, step: int) -> None:
    """A copy of a finished run as a kill after a checkpoint would have left it."""
    shutil.copytree(run, into)
    (into / "DONE").unlink()
    for place in checkpoint.complete(into / "checkpoints"):
        if place.name > f"step={step:06d}":
            shutil.rmtree(place)


FOUR_STEPS = ["recipe=grpo", "reference=ema", "budget.amount=4", "checkpoint_every=2", "keep_checkpoints=9"]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    """The same run by one process and by two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    on_one(one, {"whole": FOUR_STEPS})
    on_two(two, {"whole": FOUR_STEPS})
    return one, two


def test_two_processes_compute_what_one_does(both: tuple[Path, Path]) -> None:
    one, two = both
    same_gradients(one, two, "whole")
    same_metrics(of(one, "whole"), of(two, "whole"))
    same_tables(of(one, "whole"), of(two, "whole"))
    same_weights(of(one, "whole"), of(two, "whole"))


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_another_number_of_processes_goes_on(both: tuple[Path, Path], number: int) -> None:
    """One from the shards of two, two from the whole state of one: optimiser, reference and log go on as they were."""
    folder, other = both[number - 1], both[2 - number]
    cut_back(of(other, "whole"), of(folder, "continued"), 2)
    (on_one, on_two)[number - 1](folder, {"continued": FOUR_STEPS})
    whole, continued = of(folder, "whole"), of(folder, "continued")
    same_metrics(whole, continued)
    same_weights(whole, continued)
    assert json.loads((continued / "run.json").read_text())["ranks"] == [
        {"from_step": 0, "number": 3 - number},
        {"from_step": 2, "number": number},
    ]


@pytest.mark.extended
def test_two_machines_compute_what_one_with_two_processes_does(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Two torchruns that meet, as the command for several machines says; here both are on one."""
    on_two_machines(tmp_path, {"whole": FOUR_STEPS})
    here, there = of(both[1], "whole"), of(tmp_path, "whole")
    assert [line["metrics"] for line in metrics_of(there)] == [line["metrics"] for line in metrics_of(here)]
    ours, theirs = final_weights(here), final_weights(there)
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_the_first_process_alone_writes(both: tuple[Path, Path]) -> None:
    """The folder of two processes holds the files that one leaves, and the optimiser's state in a shard for each."""
    one, two = (of(folder, "whole") for folder in both)

    def names(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    shards = {name for name in names(two) if "/shards/" in name}
    assert names(two) - shards == names(one)
    newest = checkpoint.latest(two / "checkpoints")
    assert newest is not None
    assert sum(name.startswith(f"checkpoints/{newest.name}/") and name.endswith(".distcp") for name in shards) == 2
    assert checkpoint.load_state(newest)["optimizer"] is None
    assert len((two / "timing.jsonl").read_text().splitlines()) == 5
    assert json.loads((two / "environment.json").read_text())["ranks"] == 2


def test_a_checkpoint_of_two_processes_is_a_model_for_any_program(both: tuple[Path, Path]) -> None:
    newest = checkpoint.latest(of(both[1], "whole") / "checkpoints")
    model = AutoModelForCausalLM.from_pretrained(newest)
    assert model.config.architectures == ["LlamaForCausalLM"]
    ours = final_weights(of(both[0], "whole"))
    assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in ours.values())


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> tuple[Path, Path]:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    on_one(one, RECIPES)
    on_two(two, RECIPES)
    return one, two


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_same_on_two_processes(recipes: tuple[Path, Path], name: str) -> None:
    one, two = recipes
    same_gradients(one, two, name)
    same_metrics(of(one, name), of(two, name))
    same_tables(of(one, name), of(two, name))


@pytest.fixture(scope="module")
def variants(tmp_path_factory, tiny_base: Path) -> tuple[Path, Path]:
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    adapter = [
        "recipe=grpo", "reference=ema", "budget.amount=2", "model=hf", f"model.path={tiny_base}", "model.lora.rank=4",
        "optimizer.learning_rate=1e-3",
    ]  # fmt: skip
    teacher = ["teacher=with_reward", f"teacher.path={tiny_base}", "budget.amount=2", "updates=one"]
    hinted = ["scale=none", "budget.amount=2", "updates=one", "reference=ema"]
    runs = VARIANTS | {
        "adapter": adapter,
        "teacher": teacher,
        "opsd": [*hinted, "teacher=opsd", "teacher.prompt='{answer}#{question}'"],
        "sdpo": [*hinted, "teacher=sdpo", "teacher.prompt='{response}+{question}'", "teacher.policy=reference"],
        "filtered": [
            "pass_rate=solvable",
            "sft=rejection_sampling",
            "sft.problems=32",
            "budget.amount=1",
            "updates=two",
        ],
    }
    on_one(one, runs)
    on_two(two, runs)
    return one, two


@pytest.mark.extended
@pytest.mark.parametrize("name", [*VARIANTS, "adapter", "teacher", "opsd", "sdpo", "filtered"])
def test_precisions_adapters_and_marks_are_the_same_too(variants: tuple[Path, Path], name: str) -> None:
    one, two = variants
    same_gradients(one, two, name)
    same_metrics(of(one, name), of(two, name))


@pytest.mark.extended
def test_an_adapter_goes_on_where_it_was(tmp_path: Path, tiny_base: Path) -> None:
    """Two processes continue what two began and what one began, and one what two began: none loses the adapter."""
    steps = [
        "recipe=dr_grpo", "budget.amount=2", "checkpoint_every=1", "keep_checkpoints=9", "model=hf",
        f"model.path={tiny_base}", "model.lora.rank=4", "optimizer.learning_rate=1e-2",
    ]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    on_one(one, {"whole": steps})
    cut_back(of(one, "whole"), of(two, "of_one"), 1)
    on_two(two, {"whole": steps})
    cut_back(of(two, "whole"), of(two, "of_two"), 1)
    cut_back(of(two, "whole"), of(one, "of_two"), 1)
    on_two(two, {"of_one": steps, "of_two": steps})
    on_one(one, {"of_two": steps})
    for folder, name in ((two, "of_one"), (two, "of_two"), (one, "of_two")):
        same_metrics(of(folder, "whole"), of(folder, name))
        ours, theirs = (adapter_of(of(folder, run)) for run in ("whole", name))
        assert ours.keys() == theirs.keys() and any(bool(part.any()) for key, part in ours.items() if "lora_B" in key)
        for part in ours:
            torch.testing.assert_close(theirs[part], ours[part], rtol=0, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("optimizer", [["muon"], ["sgd"], ["sgd", "optimizer.momentum=0.9"]], ids="-".join)
def test_the_state_of_every_optimiser_goes_on_where_it_was(tmp_path: Path, optimizer: list[str]) -> None:
    """Two processes continue what one began, and one what two began and, bit for bit, what one began."""
    steps = ["recipe=grpo", "budget.amount=2", "checkpoint_every=1", "keep_checkpoints=9"]
    steps += [f"optimizer={optimizer[0]}", *optimizer[1:]]
    one, two = tmp_path / "one", tmp_path / "two"
    on_one(one, {"whole": steps})
    on_two(two, {"whole": steps})
    cut_back(of(one, "whole"), of(two, "of_one"), 1)
    cut_back(of(one, "whole"), of(one, "of_one"), 1)
    cut_back(of(two, "whole"), of(one, "of_two"), 1)
    on_two(two, {"of_one": steps})
    on_one(one, {"of_one": steps, "of_two": steps})
    for folder, name in ((one, "of_one"), (two, "of_one"), (one, "of_two")):
        same_metrics(of(folder, "whole"), of(folder, name))
        same_weights(of(folder, "whole"), of(folder, name))
    ours, theirs = (final_weights(of(one, name)) for name in ("whole", "of_one"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    return checkpoint.load_state(newest)["adapter"]


@contextmanager
def started(folder: Path, *overrides: str, by: Sequence[str] = TORCHRUN, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A run by two processes at work; what is left of it is killed at the end, also what torchrun has left."""
    process = subprocess.Popen(
        [*by, "-m", "grpo_lab.train", *WORLD, f"runs_dir={folder}", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    try:
        yield process
    finally:
        for pid in with_word(f"runs_dir={folder}"):
            with suppress(ProcessLookupError):  # it has ended with another
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def only_run(folder: Path) -> Path:
    (found,) = folder.glob("*/seed=0")
    return found


LONG = ["budget.amount=30", "checkpoint_every=2", "recipe=dr_grpo"]


@pytest.mark.extended
@pytest.mark.parametrize("how", ["a process dies", "torchrun is stopped"])
def test_a_run_whose_process_dies_ends_and_goes_on(tmp_path: Path, how: str) -> None:
    with started(tmp_path, *LONG) as process:
        wait_until(lambda: list(tmp_path.glob("*/seed=0/checkpoints/step=000002")), process)
        workers, everything = children_of(process.pid), descendants_of(process.pid)
        assert len(workers) == 2
        if how == "a process dies":
            (second,) = (pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
            os.kill(second, signal.SIGKILL)
        else:
            process.terminate()
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0, output
        wait_until(lambda: not any(map(alive, everything)))
    run = only_run(tmp_path)
    assert not (run / "DONE").exists() and (run / "error.txt").exists(), output
    with started(tmp_path, *LONG) as again:
        output, _ = again.communicate(timeout=250)
    assert again.returncode == 0 and "resuming after step" in output, output
    assert [line["step"] for line in metrics_of(run)] == list(range(31))


@pytest.mark.extended
def test_a_run_that_loses_a_machine_ends_and_goes_on(tmp_path: Path) -> None:
    here, there = two_machines()
    with started(tmp_path, *LONG, by=here) as first, started(tmp_path, *LONG, by=there) as second:
        wait_until(lambda: list(tmp_path.glob("*/seed=0/checkpoints/step=000002")), first)
        ours = descendants_of(first.pid)
        for pid in (second.pid, *descendants_of(second.pid)):
            os.kill(pid, signal.SIGKILL)
        output, _ = first.communicate(timeout=120)
        assert first.returncode != 0, output
        wait_until(lambda: not any(map(alive, ours)))
    run = only_run(tmp_path)
    assert not (run / "DONE").exists()
    here, there = two_machines()
    with started(tmp_path, *LONG, by=here) as first, started(tmp_path, *LONG, by=there) as second:
        for process in (first, second):
            output, _ = process.communicate(timeout=250)
            assert process.returncode == 0, output
    assert [line["step"] for line in metrics_of(run)] == list(range(31))


@pytest.mark.extended
def test_a_signal_that_comes_while_an_error_is_recorded_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun's, which comes just after what a rank says of another that has died."""
    record = RunLog.mark_error

    def meanwhile(log: RunLog, error: BaseException) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        record(log, error)

    monkeypatch.setattr(RunLog, "mark_error", meanwhile)
    with pytest.raises(BaseException) as raised, RunLog(tmp_path) as log, failures_recorded(log):
        raise ValueError("the other has died")
    assert raised.type is ValueError and "the other has died" in (tmp_path / "error.txt").read_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


FAILS_ON_THE_SECOND = """
import os

from grpo_lab.policy.optim import Adamw


def fail(self, optimizer, update, spent=0.0):
    raise ValueError("the second process cannot go on")


if os.environ.get("RANK") == "1":
    Adamw.step = fail
"""


@pytest.mark.extended
def test_the_error_of_another_process_is_the_run_s(tmp_path: Path) -> None:
    (tmp_path / "fails_on_the_second.py").write_text(FAILS_ON_THE_SECOND)
    plugin = {"GRPO_LAB_PLUGINS": "fails_on_the_second", "PYTHONPATH": python_path(tmp_path)}
    with started(tmp_path / "runs", *LONG, **plugin) as process:
        output, _ = process.communicate(timeout=250)
    said = "rank 1 of 2: ValueError: the second process cannot go on"
    assert process.returncode != 0 and "error: the second process cannot go on" in output, output
    assert said in (only_run(tmp_path / "runs") / "error.txt").read_text()


WAITS_FOR_THE_SECOND = """
import os
import signal
import sys
from datetime import timedelta

import torch

from grpo_lab.distributed import ranks, watchdog
from grpo_lab.tracking import interrupt

watchdog.GRACE_SECONDS = watchdog.STEP_SECONDS = 1.0
interrupt.hear(1.0)
with ranks.opened(lambda: torch.device("cpu")), interrupt.finishing(lambda name: None):
    store = ranks._open.store
    ranks.watch(lambda: store.clone().set("aborted", "now"))
    try:
        if ranks.rank() == 1 and "is killed" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks.rank() == 1:
            raise ValueError("the second process cannot go on")
        store.clone().wait(["aborted"], timedelta(hours=1))
    except BaseException as error:
        print("recorded", repr(ranks.cause_of(error)), flush=True)
        raise
"""


@pytest.mark.extended
@pytest.mark.parametrize("how", ["fails", "is killed"])
def test_a_wait_that_hears_no_signal_is_ended(tmp_path: Path, how: str) -> None:
    """As one in CUDA, for a kernel of NCCL; here it is for a key of the store, which `abort` sets."""
    (tmp_path / "waits.py").write_text(WAITS_FOR_THE_SECOND)
    ended = subprocess.run(
        [*TORCHRUN, str(tmp_path / "waits.py"), how],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    cause = "KeyboardInterrupt()"
    if how == "fails":
        cause = "OtherRankFailed('rank 1 of 2: ValueError: the second process cannot go on')"
    assert ended.returncode != 0 and f"recorded {cause}" in ended.stdout, ended.stdout + ended.stderr[-3000:]


@pytest.mark.extended
def test_what_both_processes_refuse_is_said_once(tmp_path: Path) -> None:
    with started(tmp_path, "schedule=in_flight") as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode != 0 and output.count("this combination cannot run") == 1, output
    assert not list(tmp_path.iterdir())
