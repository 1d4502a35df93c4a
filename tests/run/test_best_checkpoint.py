"""The weights of the best evaluation are kept beside the last, and the end of a run says how far apart the two are."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compositions import run_of
from safetensors.torch import load_file
from short_runs import metrics_of, run_in_process, same_ending, train_command
from transformers import AutoModelForCausalLM

from grpo_lab import loop
from grpo_lab.harness.command import weights_of
from grpo_lab.run.checkpoint import BEST, complete
from grpo_lab.run.recorder import _fallen, verdict
from grpo_lab.tracking.metrics import SUITES

METRIC = "eval/heldout/accuracy"
# A rate at which the tiny model first learns and then falls apart, and an evaluation after every step.
FALLS = (
    "optimizer.learning_rate=1e-3", "optimizer.warmup_updates=1", "budget.amount=12", "evaluation=brief",
    "evaluation.every=1", "evaluation.initial_kl=false", "evaluation.probe_problems=8",
    "evaluation.downstream_problems=8", "checkpoint_every=1", "keep_checkpoints=99",
)  # fmt: skip


def rated(run: Path, metric: str = METRIC) -> dict[int, float]:
    """Step -> the metric, as logged."""
    return {line["step"]: line["metrics"][metric] for line in metrics_of(run)}


def done_of(run: Path) -> dict:
    return json.loads((run / "DONE").read_text())


@pytest.fixture(scope="module")
def fallen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best evaluation is neither its first nor its last."""
    return run_in_process(tmp_path_factory.mktemp("fallen"), *FALLS)


@pytest.mark.extended
def test_the_best_weights_are_those_after_the_best_evaluation(fallen: Path) -> None:
    values = rated(fallen)
    step = max(values, key=lambda one: (values[one], -one))
    assert 0 < step < 12, "else this run shows nothing"
    (kept,) = complete(fallen / BEST)
    assert kept.name == f"step={step:06d}"
    ours, saved = (
        load_file(place / kept.name / "model.safetensors") for place in (fallen / BEST, fallen / "checkpoints")
    )
    assert ours.keys() == saved.keys() and all(torch.equal(ours[name], saved[name]) for name in ours)
    model = AutoModelForCausalLM.from_pretrained(kept)
    assert torch.equal(model.state_dict()["model.norm.weight"], ours["model.norm.weight"]), "any program loads it"
    assert not (kept / "state.pt").exists(), "weights alone: no run resumes there"
    last = values[12]
    assert done_of(fallen)["best"] == {
        "metric": METRIC, "step": step, "value": values[step], "last": last, "evaluations": 13,
    }  # fmt: skip
    said = verdict(fallen, done_of(fallen))
    assert f"best {METRIC}: {values[step]:.3f} at step {step} (weights in best/step={step:06d})" in said
    assert f"is {values[step] - last:.3f} lower" in said and "selection bias over 13 evaluations" in said
    assert [one.step for one in weights_of(fallen, ["best"], base=False)] == [step]


def test_a_suite_has_fallen_that_ends_a_tenth_below_its_best(tmp_path: Path) -> None:
    rates = {0: (0.25, 0.25), 1: (0.75, 0.75), 2: (0.5, 0.7)}
    lines = [
        {"step": step, "metrics": {METRIC: one, "eval/downstream/accuracy": other}}
        for step, (one, other) in rates.items()
    ]
    fell = _fallen(lines)
    assert fell == {"heldout": {"metric": METRIC, "step": 1, "value": 0.75, "last": 0.5, "evaluations": 3}}
    done = {"steps": 2, "first": lines[0]["metrics"], "last": lines[2]["metrics"], "fell": fell}
    (warning,) = (line for line in verdict(tmp_path, done).splitlines() if line.startswith("warning"))
    assert warning == f"warning: accuracy fell: {SUITES['heldout']}, 0.750 at step 1, 0.500 at the end"


@pytest.mark.extended
def test_a_suite_that_ends_far_below_its_best_is_warned_of(fallen: Path) -> None:
    said, fell = verdict(fallen, done_of(fallen)), []
    for suite, name in SUITES.items():
        values = rated(fallen, f"eval/{suite}/accuracy")
        step = max(values, key=lambda one: (values[one], -one))
        warning = f"warning: accuracy fell: {name}, {values[step]:.3f} at step {step}, {values[12]:.3f} at the end"
        assert (warning in said) == (values[step] - values[12] >= 0.1)
        fell.append(warning in said)
    assert any(fell) and not all(fell), "else this run shows nothing"


@pytest.mark.extended
def test_a_run_killed_and_resumed_keeps_the_same_best_weights(fallen: Path, tmp_path: Path) -> None:
    """Resumed from before the best step and from after it; what an attempt kept meanwhile does not stay."""
    command = train_command(tmp_path, *FALLS)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("*/seed=0/checkpoints/step=000002")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = tmp_path.glob("*/seed=0")
    newest = complete(folder / "checkpoints")[-1]
    shutil.copytree(newest, folder / BEST / "step=000011")  # as if a later attempt had found that the best
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    same_ending(fallen, folder)
    assert [place.name for place in complete(folder / BEST)] == [place.name for place in complete(fallen / BEST)]
    assert done_of(folder)["best"] == done_of(fallen)["best"]


@pytest.mark.extended
def test_weights_that_nothing_surpassed_are_the_initial_ones(tmp_path: Path) -> None:
    """A rate that breaks the model at once: the base is the best there is, and nothing is copied."""
    run = run_in_process(tmp_path, *FALLS, "optimizer.learning_rate=0.3", "budget.amount=2")
    values = rated(run)
    assert values[0] > max(values[1], values[2])
    assert not complete(run / BEST) and done_of(run)["best"]["step"] == 0
    assert "(the initial model's)" in verdict(run, done_of(run))
    with pytest.raises(ValueError, match="kept no best weights: none of its evaluations was above the initial model"):
        weights_of(run, ["best"], base=False)


@pytest.mark.extended
def test_another_metric_or_none(tmp_path: Path) -> None:
    one = run_in_process(tmp_path / "one", *FALLS, "checkpoint.best=eval/probe/accuracy", "budget.amount=3")
    values = rated(one, "eval/probe/accuracy")
    assert done_of(one)["best"]["value"] == max(values.values())
    none = run_in_process(tmp_path / "none", *FALLS, "checkpoint.best=null", "budget.amount=1")
    assert not (none / BEST).exists() and done_of(none)["best"] == {}
    assert "selection bias" not in verdict(none, done_of(none))


@pytest.mark.extended
def test_a_run_that_goes_on_with_another_metric_compares_like_with_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one metric the values of the other are no measure; weights that were never kept are not promised."""
    other, calls, real = "eval/probe/accuracy", list[int](), loop.train_on

    def fails(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise RuntimeError("in its seventh step")
        return real(*given, **named)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="seventh"):
        patched.setattr(loop, "train_on", fails)
        run_in_process(tmp_path, *FALLS)
    run = run_in_process(tmp_path, *FALLS, f"checkpoint.best={other}")
    values = rated(run, other)
    later = {step: value for step, value in values.items() if step > 6}
    step = max(later, key=lambda one: (later[one], -one))
    (kept,) = complete(run / BEST)
    assert kept.name == f"step={step:06d}", "the best since the metric is watched"
    best = done_of(run)["best"] | {"step": step % 12 + 1}
    assert "(weights not kept)" in verdict(run, done_of(run) | {"best": best | {"last": best["value"] - 0.1}})


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ("eval/heldout/length", "eval/SUITE/accuracy or eval/SUITE/pass_at_K"),
        ("reward/mean", "eval/SUITE/accuracy or eval/SUITE/pass_at_K"),
        ("eval/heldout/acuracy", "eval/SUITE/accuracy or eval/SUITE/pass_at_K"),
        (
            "eval/math500/accuracy",
            "no evaluation of this run has it; choose a suite of probe, heldout_training, heldout",
        ),
        ("eval/heldout/pass_at_64", "no evaluation of this run has it"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_a_model_loads(best: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_of("world=tiny", f"checkpoint.best={best}")
