"""Sampler and learner hold the same weights after every sync, or the run stops; and what half precision needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sampling import CPU
from short_runs import final_weights, metrics_of, run_in_process, same_ending

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.engines.base import EngineFailure
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.learner.mismatch import check_agreement
from grpo_lab.learner.update import _overflows
from grpo_lab.run import checkpoint
from grpo_lab.run.state import open_state
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead

FP16 = ["sampler_precision=fp16", "learner_precision=fp16"]


def keeps(monkeypatch: pytest.MonkeyPatch, from_version: int, *kept: str) -> None:
    """From this version on the sampler takes every weight but these."""
    takes = NativeSession.update_weights

    def update(session: NativeSession, weights, version: int) -> None:
        own = session.model.state_dict()
        given = dict(weights)
        if version >= from_version:
            given |= {name: own[name].clone() for name in kept}
        takes(session, given.items(), version)

    monkeypatch.setattr(NativeSession, "update_weights", update)


@pytest.mark.extended
@pytest.mark.parametrize("updates", ["four", "one"])
def test_a_sampler_that_keeps_old_weights_stops_the_run(tmp_path: Path, tiny_base: Path, monkeypatch, updates) -> None:
    """With one update nothing recomputes log-probs; what the update itself reads is compared then."""
    quick = [f"updates={updates}", "budget.amount=3", "checkpoint_every=1", "optimizer.learning_rate=3e-3"]
    unharmed = run_in_process(tmp_path / "unharmed", *quick)
    with monkeypatch.context() as patched:
        first = 4 if updates == "four" else 1
        keeps(patched, first, "model.layers.0.mlp.down_proj.weight")
        with pytest.raises(EngineFailure, match=rf"weights of version {first} and differ by .* nats a token") as caught:
            run_in_process(tmp_path / "harmed", *quick)
    assert "engine=native" in str(caught.value)
    (harmed,) = (tmp_path / "harmed").glob("run/seed=*")
    assert "differ by" in (harmed / "error.txt").read_text() and len(metrics_of(harmed)) == 2, (
        "the step is not recorded"
    )
    run_in_process(tmp_path / "harmed", *quick)
    same_ending(harmed, unharmed)


def test_what_is_allowed_is_of_the_coarser_side() -> None:
    learner, mask = torch.zeros(1, 2), torch.tensor([[True, False]])
    fine, coarse = Fp32(LmHead.same, 1e-3), Bf16(LmHead.same, 0.1)
    sampler = torch.tensor([[0.05, 9.0]])
    run = to_run(compose_with_choices(["world=tiny", "tracking=none"])[0])
    for sides in ((fine, coarse), (coarse, fine)):
        mixed = replace(run, learner_precision=sides[0], sampler_precision=sides[1])
        check_agreement(learner, sampler, mask, 3, mixed.agreement)
    with pytest.raises(EngineFailure, match=r"version 3 and differ by 0\.05"):
        check_agreement(learner, sampler, mask, 3, run.agreement)
    with pytest.raises(EngineFailure, match="nan"):
        check_agreement(learner, sampler * torch.nan, mask, 3, run.agreement)


def test_half_precision_trains_under_a_loss_scale_that_resumes(tmp_path: Path, tiny_base: Path) -> None:
    quick = [*FP16, "correction=tis_token", "checkpoint_every=2", "optimizer.learning_rate=3e-4"]
    whole = run_in_process(tmp_path / "whole", *quick, "budget.amount=4")
    rows = [row["metrics"] for row in metrics_of(whole)[1:]]
    assert all(row["train/loss_scale"] > 1 and row["train/updates"] == 4 for row in rows)
    # 11 bits: relative steps of 1/2048, where bfloat16 has 1/256 and fp32 1/16,777,216
    assert all(1e-5 < row["mismatch/absolute"] < 3e-3 and row["mismatch/pearson"] > 0.9999 for row in rows)
    before = checkpoint.load_state(max((whole / "checkpoints").iterdir()))
    assert before["loss_scale"]["_growth_tracker"] == 16, "updates since the scale was last changed"


def test_a_gradient_that_overflows_leaves_the_weights_and_halves_the_scale(tmp_path: Path, tiny_base: Path) -> None:
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", *FP16])[0])
    state = open_state(run, CPU, None)
    weight = next(iter(state.learner.parameters()))
    for gradient, overflows in ((1.0, False), (torch.inf, True), (torch.nan, True)):
        state.loss_scale.scale(torch.zeros(()))  # the scale exists from its first use on
        weight.grad = torch.full_like(weight, gradient) * state.loss_scale.get_scale()
        before = state.loss_scale.get_scale()
        assert _overflows(state) == overflows
        assert state.loss_scale.get_scale() == (before / 2 if overflows else before)
        assert (weight.grad is None) == overflows
        if not overflows:
            assert torch.equal(weight.grad, torch.ones_like(weight)), "the scale is taken out"
    state.loss_scale.update(1e-4)
    weight.grad = torch.full_like(weight, torch.inf)
    with pytest.raises(FloatingPointError, match="whatever the loss scale"):
        _overflows(state)
    state.session.close()


@pytest.mark.extended
def test_the_log_says_how_far_sampler_and_learner_are_apart(tmp_path: Path, tiny_base: Path) -> None:
    """The same run with and without log-probs of its own: all sampled tokens, and those of the first update."""
    seen = {}
    for updates in ("one", "four"):
        folder = run_in_process(tmp_path / updates, "sampler_precision=bf16", f"updates={updates}", "budget.amount=1")
        seen[updates] = metrics_of(folder)[1]["metrics"]
    names = {"absolute", "max", "k1", "k3", "pearson", "ess", "ess_responses"}
    for metrics in seen.values():
        assert names <= {name.removeprefix("mismatch/") for name in metrics if name.startswith("mismatch/")}
        assert 1e-5 < metrics["mismatch/absolute"] < 0.02 and metrics["mismatch/ess"] > 0.99
    assert seen["four"]["mismatch/absolute"] == pytest.approx(seen["one"]["mismatch/absolute"], rel=0.3)
    assert "mismatch/bounded" in seen["four"] and "mismatch/bounded" not in seen["one"]


@pytest.mark.extended
def test_bounds_that_act_are_counted(tmp_path: Path, tiny_base: Path) -> None:
    acts = ["sampler_precision=bf16", "budget.amount=1"]
    for option, name in (
        (["correction=tis_token", "correction.cap=1"], "mismatch/bounded"),
        (["rejection=sequence_mean_k2", "rejection.bound=1e-9"], "mismatch/rejected_responses"),
    ):
        folder = run_in_process(tmp_path / name.replace("/", "_"), *acts, *option)
        assert 0.2 < metrics_of(folder)[1]["metrics"][name] <= 1, name
    assert final_weights(folder)
