"""Simulated FP8: rounding by hand, the rounded weights, syncs, and the mismatch in the log."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compositions import run_of
from helpers import F64
from sampling import CPU
from short_runs import metrics_of, run_in_process

from grpo_lab.config.rules import IncompatibleRun, check_compatible
from grpo_lab.engines.native_fp8 import rounded
from grpo_lab.engines.native_session import NativeSession, open_session
from grpo_lab.policy.adapters import whole_weights
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import Bf16, Fp8Simulated, LmHead

FP8 = Fp8Simulated(LmHead.same, 0.5, activations=True)


def e4m3() -> torch.Tensor:
    """All numbers of the type, from sign, four bits of exponent with bias 7 and three of mantissa; 0x7f is NaN."""
    found = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        found.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor([*(-one for one in found[::-1]), *found[1:]], dtype=F64)


def test_rounding_is_to_the_nearest_number_of_the_type_times_the_rows_scale() -> None:
    numbers = e4m3()
    assert numbers.max() == 448
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6)[:, None]
    for row, mine in zip(rows.double(), rounded(rows).double()):
        scale = row.abs().max() / 448
        nearest = numbers[(row[:, None] / scale - numbers).abs().argmin(dim=1)] * scale
        torch.testing.assert_close(mine, nearest, rtol=1e-6, atol=0)
        assert mine.abs().max() == pytest.approx(float(row.abs().max()), rel=1e-6), "the largest stays"
        large = row.abs() > scale * 2.0**-6
        assert ((mine - row).abs() <= row.abs() / 16 * 1.00001)[large].all(), "three bits of mantissa"
    assert torch.equal(rounded(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert not torch.equal(rounded(rows[0]), rows[0])
    assert rounded(rows.bfloat16()).dtype is torch.bfloat16


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded(rows)[2:3], rounded(rows[2:3]))


def test_linear_layers_are_rounded_at_every_sync_and_nothing_else_is(tiny_base: Path) -> None:
    session = open_session(tiny_base, FP8, CPU, 4, False)
    assert isinstance(session, NativeSession)
    plain = open_session(tiny_base, Bf16(LmHead.same, 0.1), CPU, 4, False)
    learner = load_model(tiny_base, LmHead.same)
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for one in learner.parameters():
                    one.mul_(1.37)
            session.update_weights(whole_weights(learner), version)
            plain.update_weights(whole_weights(learner), version)
        reference = plain.model.state_dict()
        assert len(session.fp8) == 7 * len(session.model.model.layers)
        for name, own in session.model.state_dict().items():
            expected = rounded(reference[name]) if name in session.fp8 else reference[name]
            assert torch.equal(own, expected), name
            assert (name in session.fp8) == ("proj" in name)
            assert name not in session.fp8 or not torch.equal(own, reference[name])
    layer, rows = session.model.model.layers[0].mlp.up_proj, torch.randn(3, 5, 1).bfloat16()
    rows = rows * torch.randn(layer.in_features).bfloat16()
    assert torch.equal(layer(rows), torch.nn.functional.linear(rounded(rows), layer.weight))
    assert torch.equal(session.model.lm_head(rows[..., : session.model.lm_head.in_features]),
                       plain.model.lm_head(rows[..., : plain.model.lm_head.in_features]))  # fmt: skip
    session.close()
    plain.close()


@pytest.mark.extended
def test_the_log_shows_how_far_fp8_takes_the_sampler_from_the_learner(tmp_path: Path, tiny_base: Path) -> None:
    """More with rounded inputs than without, and more than in bfloat16; the same command again gives the same run."""
    seen = {}
    for precision in ("bf16", "fp8_simulated_weights", "fp8_simulated"):
        folder = run_in_process(
            tmp_path / precision, f"sampler_precision={precision}", "correction=tis_token", "budget.amount=2"
        )
        rows = [row["metrics"] for row in metrics_of(folder)[1:]]
        seen[precision] = rows[-1]["mismatch/absolute"]
        assert all(row["train/updates"] > 0 for row in rows)
    assert 2 * seen["bf16"] < seen["fp8_simulated_weights"] < seen["fp8_simulated"] < 0.25
    again = run_in_process(
        tmp_path / "again", "sampler_precision=fp8_simulated", "correction=tis_token", "budget.amount=2"
    )
    assert metrics_of(again)[-1]["metrics"]["mismatch/absolute"] == seen["fp8_simulated"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=vllm"], "only the native engine simulates FP8.*engine=native"),
        (["engine=vllm_process"], "only the native engine simulates FP8.*engine=native"),
        (["engine.cuda_graphs=true"], "do not round their inputs.*cuda_graphs=false"),
    ],
)
def test_what_cannot_round_is_refused_before_a_model_loads(overrides: list[str], message: str) -> None:
    with pytest.raises(IncompatibleRun, match=message):
        check_compatible(run_of("sampler_precision=fp8_simulated", *overrides))


def test_a_learner_is_not_quantized() -> None:
    from dataclasses import replace

    with pytest.raises(IncompatibleRun, match=r"a sampler's.*learner_precision=bf16"):
        check_compatible(replace(run_of("sampler_precision=fp8_simulated"), learner_precision=FP8))
