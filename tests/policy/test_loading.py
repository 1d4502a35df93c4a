"""How a model is loaded: compiled, and with an attention that is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import assert_close, shapes_unchecked
from short_runs import metrics_of, run_in_process

from grpo_lab.policy.loading import Attention, Loading
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import WeightType

_BOTH = ("true", "false")


def logits_and_gradients(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.log_softmax(-1)[..., 3].mean().backward()
    return logits.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.extended
@pytest.mark.needs("g++")
@pytest.mark.timeout(900)
def test_a_compiled_learner_computes_the_same_and_a_run_trains_with_it(tiny_base: Path, tmp_path: Path) -> None:
    plain = load_model(tiny_base, LmHead.same)
    compiled = load_model(tiny_base, LmHead.same, Loading(WeightType.fp32, Attention.auto, True, None))
    for shape in ((2, 8), (4, 15)):
        ids = (torch.arange(shape[0] * shape[1]) % 16).reshape(shape)
        (ours, own), (theirs, others) = logits_and_gradients(plain, ids), logits_and_gradients(compiled, ids)
        assert_close(theirs, ours, 1e-4, "logits")
        assert own.keys() == others.keys()
        for name, gradient in own.items():
            assert_close(others[name], gradient, 1e-5, name)
    words = [
        "world=tiny",
        "model=hf",
        f"model.path={tiny_base}",
        "budget.amount=2",
        "evaluation=brief",
        "tracking=none",
    ]
    with shapes_unchecked():  # the compiler would trace the check too
        runs = [
            run_in_process(tmp_path, *words, f"model.compiled={on}", name=f"compiled_{on}") for on in ("true", "false")
        ]
    norms = [[line["metrics"]["train/gradient_norm"] for line in metrics_of(run)[1:]] for run in runs]
    assert len(norms[0]) == 2 and norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_an_attention_that_is_not_installed_is_said(tiny_base: Path) -> None:
    loading = Loading(WeightType.fp32, Attention.flash_attention_2, False, None)
    with pytest.raises(ValueError, match=r"model.attention=flash_attention_2: .*(FlashAttention2|flash_attn)"):
        load_model(tiny_base, LmHead.same, loading)
