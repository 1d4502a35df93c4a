"""A signal ends a run: after its step, which is saved, or at once; what the run says of it is true in every phase."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from processes import alive, descendants_of, wait_until
from short_runs import SMALL, metrics_of, run_in_process, same_ending, train_command
from sweep_processes import lines_in

from grpo_lab import loop
from grpo_lab.harness.command import weights_of
from grpo_lab.run import recorder
from grpo_lab.tracking import interrupt

OVERRIDES = (*SMALL, "budget.amount=6", "evaluation.every=2", "checkpoint_every=100", "keep_checkpoints=9")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals are heard as in a run's own process."""
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    monkeypatch.setattr(interrupt, "_requested", False)  # as it is again afterwards
    for number in interrupt.SIGNALS:
        signal.signal(number, signal.default_int_handler)
    interrupt.hear(0.0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def at_call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """at_call(loop, "compute_logprobs", [2]): a signal comes as this function of a module is called the second time."""

    def plan(module: ModuleType, name: str, calls: Collection[int], number: int = signal.SIGINT) -> None:
        real, count = getattr(module, name), 0

        def called(*arguments: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count in calls:
                signal.raise_signal(number)
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, called)

    return plan


def ended(folder: Path, *overrides: str) -> str:
    """What the run said as it was interrupted."""
    with pytest.raises(KeyboardInterrupt) as raised:
        run_in_process(folder, *OVERRIDES, *overrides, name="x")
    said = str(raised.value)
    assert (folder / "x" / "seed=0" / "error.txt").read_text().startswith(f"KeyboardInterrupt: {said}\n")
    return said


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "x" / "seed=0").glob("checkpoints/step=*"))


def goes_on_as_if_nothing_had_happened(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> None:
    """Whatever is patched is undone first, and no signal has come."""
    monkeypatch.undo()
    assert not interrupt.requested()
    same_ending(whole / "x" / "seed=0", run_in_process(folder, *OVERRIDES, *overrides, name="x"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """The folder of a run that no signal ends."""
    folder = tmp_path_factory.mktemp("whole")
    run_in_process(folder, *OVERRIDES, name="x")
    return folder


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.extended) for n in interrupt.SIGNALS if n != signal.SIGTERM)],
)
def test_the_first_signal_lets_a_step_finish_and_saves_it(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], number: int,
) -> None:  # fmt: skip
    at_call(loop, "compute_logprobs", [3], number)
    saved = tmp_path / "x" / "seed=0" / "checkpoints" / "step=000003"
    assert ended(tmp_path) == f"interrupted: step 3 is finished and saved in {saved}"
    assert checkpoints(tmp_path) == ["step=000003"] and len(metrics_of(saved.parent.parent)) == 4
    who = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR2: "SIGUSR2"}[signal.Signals(number)]
    told = rf"^{who}: finishing this step \(step 3: .*\), then saving and stopping\. "
    told += r"A second signal stops at once; the run then restarts from step 0$"
    assert re.search(told, capsys.readouterr().err, re.MULTILINE)
    goes_on_as_if_nothing_had_happened(tmp_path, whole, monkeypatch)


@pytest.mark.extended
@pytest.mark.parametrize(
    "schedule",
    ["in_flight", *(pytest.param(name, marks=pytest.mark.extended) for name in ("one_step_off", "off_policy_k"))],
)
def test_a_step_that_is_saved_by_a_signal_goes_on_with_the_same_bits_under_other_schedules(
    heard: None, at_call: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    words = (f"schedule={schedule}", "evaluation.sampler_weights=true")
    run_in_process(tmp_path / "whole", *OVERRIDES, *words, name="x")
    at_call(loop, "sync_sampler", [3])
    at_call(recorder, "evaluate", [5])  # the run's second attempt is ended in the evaluation of step 4
    assert ended(tmp_path / "cut", *words).startswith("interrupted: step 3 is finished and saved in ")
    monkeypatch.setattr(interrupt, "_requested", False)
    said = ended(tmp_path / "cut", *words)
    assert "its evaluation was interrupted and will be repeated" in said, said
    goes_on_as_if_nothing_had_happened(tmp_path / "cut", tmp_path / "whole", monkeypatch, *words)


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("evaluation", [2, pytest.param(3, marks=pytest.mark.extended), 4])
def test_a_signal_leaves_an_evaluation_at_once_and_loses_no_step(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
) -> None:  # fmt: skip
    """Those after steps 2, 4 and 6; the last one ends the run."""
    at_call(recorder, "evaluate", [evaluation])
    step = 2 * (evaluation - 1)
    saved = tmp_path / "x" / "seed=0" / "checkpoints" / f"step={step:06d}"
    told = f"interrupted: step {step} is saved in {saved}; its evaluation was interrupted and will be repeated"
    assert ended(tmp_path) == told
    assert [line["step"] for line in metrics_of(saved.parent.parent)] == list(range(step)), "the step is not logged yet"
    goes_on_as_if_nothing_had_happened(tmp_path, whole, monkeypatch)
    found = weights_of(saved.parent.parent, [str(step)], base=False)
    assert [one.step for one in found] == [step], "the checkpoint is now of the log that has the step"


@pytest.mark.extended
def test_an_evaluation_that_is_cut_short_twice_is_made_once(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_call(recorder, "evaluate", [2, 3])
    first = ended(tmp_path)
    monkeypatch.setattr(interrupt, "_requested", False)
    assert ended(tmp_path) == first and checkpoints(tmp_path) == ["step=000002"]
    goes_on_as_if_nothing_had_happened(tmp_path, whole, monkeypatch)


@pytest.mark.extended
def test_a_signal_in_a_step_whose_evaluation_is_due_leaves_that_out(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_call(loop, "train_on", [2])
    asked: list[int] = []
    real = recorder.evaluate
    monkeypatch.setattr(recorder, "evaluate", lambda *given, **named: asked.append(1) or real(*given, **named))
    assert "step 2 is saved in" in ended(tmp_path) and len(asked) == 1, "only that before the first step"
    goes_on_as_if_nothing_had_happened(tmp_path, whole, monkeypatch)


@pytest.mark.parametrize(
    "module, name",
    [(loop, "read_inputs"), (loop, "open_state"), (recorder, "evaluate")],
    ids=["reading", "loading", "evaluating"],
)
@pytest.mark.extended
def test_before_the_first_step_nothing_is_lost_and_nothing_is_saved(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    module: ModuleType, name: str,
) -> None:  # fmt: skip
    at_call(module, name, [1])
    assert ended(tmp_path) == "interrupted: no step was trained yet: nothing is lost"
    assert checkpoints(tmp_path) == [] and metrics_of(tmp_path / "x" / "seed=0") == []
    goes_on_as_if_nothing_had_happened(tmp_path, whole, monkeypatch)


@pytest.mark.extended
def test_a_second_signal_ends_a_step_at_once_and_says_what_is_computed_again(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpoints, the last of step 2, in the middle of steps 4 and 3; and while a resumed run loads."""
    words = ("checkpoint_every=2",)
    at_call(loop, "compute_logprobs", [4, 5, 6])
    at_call(loop, "train_on", [4, 5])
    told = "interrupted: it resumes from step 2 and recomputes"
    assert ended(tmp_path, *words) == f"{told} step 3 and the unfinished step 4"
    assert checkpoints(tmp_path) == ["step=000002"]
    monkeypatch.setattr(interrupt, "_requested", False)
    assert ended(tmp_path, *words) == f"{told} the unfinished step 3"
    monkeypatch.setattr(interrupt, "_requested", False)
    with monkeypatch.context() as patched:
        real = loop.open_state
        patched.setattr(loop, "open_state", lambda *given: signal.raise_signal(signal.SIGINT) or real(*given))
        assert ended(tmp_path, *words) == "interrupted: it resumes from step 2: nothing is lost"
    monkeypatch.setattr(interrupt, "_requested", False)
    assert "step 3 is finished and saved" in ended(tmp_path, *words), "the sixth call, once"
    monkeypatch.undo()
    run_in_process(tmp_path / "whole", *OVERRIDES, *words, name="x")
    goes_on_as_if_nothing_had_happened(tmp_path, tmp_path / "whole", monkeypatch, *words)


@pytest.mark.extended
def test_a_second_signal_without_a_checkpoint_begins_again(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_call(loop, "compute_logprobs", [1, 2])
    at_call(loop, "train_on", [1])
    told = "interrupted: no checkpoint yet: it recomputes the unfinished step 1, starting from step 0"
    assert ended(tmp_path) == told
    goes_on_as_if_nothing_had_happened(tmp_path, whole, monkeypatch)


@pytest.mark.extended
def test_a_run_that_is_at_its_last_step_comes_to_its_end(
    heard: None, at_call: Callable[..., None], whole: Path, tmp_path: Path
) -> None:
    """The signal comes as step 6 is logged: its numbers and times are checked last, after those of six others."""
    at_call(recorder, "check", [14])
    same_ending(whole / "x" / "seed=0", run_in_process(tmp_path, *OVERRIDES, name="x"))
    assert interrupt.requested()


@pytest.mark.extended
def test_a_checkpoint_that_cannot_be_written_is_an_error_and_not_an_end(
    heard: None, at_call: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_call(loop, "compute_logprobs", [2])

    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo_lab.run.checkpoint.save_whole", full)
    with pytest.raises(OSError, match=r"the checkpoint of step 2 could not be written .* free space"):
        run_in_process(tmp_path, *OVERRIDES, name="x")


@pytest.mark.extended
def test_an_evaluation_by_changed_code_counts_its_step_to_that_code(
    heard: None, at_call: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 is trained by the one and evaluated by the other."""
    at_call(recorder, "evaluate", [3])
    assert "step 4 is saved" in ended(tmp_path)
    monkeypatch.undo()
    real = loop.provenance.code
    changed = {"sources": "of another day"}
    monkeypatch.setattr("grpo_lab.tracking.provenance.code", lambda *given: {**real(*given), **changed})
    folder = run_in_process(tmp_path, *OVERRIDES, "resume_with_changed_code=true", name="x")
    stretches = json.loads((folder / "run.json").read_text())["stretches"]
    assert [stretch["from_step"] for stretch in stretches] == [0, 3]


# ---- as processes


def interrupted(command: list[str], lines: int, logs: Path, number: int = signal.SIGINT) -> tuple[int, str]:
    """Start a command and signal it once its log has so many lines; its exit status, and what it said."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: any(lines_in(path) >= lines for path in logs.glob("*/seed=0/metrics.jsonl")), process)
        process.send_signal(number)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.extended
def test_ctrl_c_says_what_is_saved_and_the_command_it_prints_goes_on(tmp_path: Path, tiny_base: Path) -> None:
    words = (*SMALL, "budget.amount=40", "checkpoint_every=1000")
    code, said = interrupted(train_command(tmp_path, *words), 3, tmp_path)
    (folder,) = tmp_path.glob("*/seed=0")
    step = lines_in(folder / "metrics.jsonl") - 1
    saved = f"{folder}/checkpoints/step={step:06d}"
    (goes_on,) = re.findall(
        rf"^interrupted: step {step} is finished and saved in {re.escape(saved)}; resume with: python (.*)$", said, re.M
    )
    assert code == 1 and 2 <= step < 40 and "Ctrl-C: finishing this step" in said and "Traceback" not in said
    subprocess.run([sys.executable, *shlex.split(goes_on)], check=True, capture_output=True, timeout=200)
    same_ending(run_in_process(tmp_path / "whole", *words), folder)


SLOW = """
import time

from grpo_lab.policy.optim import Adamw


def step(self, *given):
    time.sleep(1000)


Adamw.step = step
"""


@pytest.mark.extended
def test_a_second_ctrl_c_ends_a_long_step_at_once(tmp_path: Path, tiny_base: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = train_command(tmp_path / "runs", *SMALL, "plugins=[slow]")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    try:
        logs = "runs/*/seed=0/metrics.jsonl"
        wait_until(lambda: any(lines_in(path) == 1 for path in tmp_path.glob(logs)), process)
        heard: list[str] = []
        process.send_signal(signal.SIGINT)
        while "Ctrl-C: finishing this step" not in "".join(heard):
            heard.append(process.stderr.readline())
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    told = "interrupted: no checkpoint yet: it recomputes the unfinished step 1, starting from step 0"
    assert process.returncode == 1 and f"\n{told}; resume with: python -m grpo_lab.train world=tiny" in f"\n{said}", (
        said
    )


@pytest.mark.extended
def test_two_processes_finish_the_same_step_and_save_it(tmp_path: Path) -> None:
    """Ctrl-C reaches torchrun, which passes it on to both."""
    words = ("budget.amount=30", "checkpoint_every=1000", "recipe=dr_grpo", "evaluation.every=1000", *SMALL[:2])
    typed = train_command(tmp_path, *words, "device=cpu")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *typed[2:]]
    process = subprocess.Popen(torchrun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: any(lines_in(path) > 2 for path in tmp_path.glob("*/seed=0/metrics.jsonl")), process)
        everything = descendants_of(process.pid)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=100)
        wait_until(lambda: not any(map(alive, everything)))
    finally:
        process.kill()
    (folder,) = tmp_path.glob("*/seed=0")
    step = lines_in(folder / "metrics.jsonl") - 1
    saved = f"{folder}/checkpoints/step={step:06d}"
    assert f"interrupted: step {step} is finished and saved in {saved}; re-run the same command to resume" in said
    subprocess.run(torchrun, check=True, capture_output=True, timeout=280)
    assert (folder / "DONE").exists() and [line["step"] for line in metrics_of(folder)] == list(range(31))
