"""prime-rl: `compute_loss` with its two losses, taken from a clone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import file_text, functions

COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"  # 2026-08-21, where a bare repository is given
_NAMES = (
    "LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl", "compute_loss",
    "default_loss_fn", "ipo_loss_fn",
)  # fmt: skip


def framework(path: Path | None) -> Framework:
    import torch

    commit, text = file_text(path, COMMIT, "src/prime_rl/trainer/rl/loss.py")
    space = functions(text, {"torch": torch, "dataclass": dataclass, "field": field}, _NAMES, _NAMES[:2])

    def case(name: str, function: str, **settings: Any) -> Case:
        config = SimpleNamespace(adv_tau=1.0, **settings)

        def loss(logprobs: Any, sampler_logprobs: Any, token_advantages: Any, mask: Any, num_tokens: int) -> Any:
            return space["compute_loss"](
                list(logprobs), list(sampler_logprobs), None, list(token_advantages), list(mask), None, None, None,
                rl_loss_fn=lambda inputs: space[function](inputs, config), rl_scale=max(num_tokens, 1), ce_scale=1,
                ref_kl_scale=1,
            )[0]  # fmt: skip

        return Case(name, loss, ("logprobs", "sampler_logprobs", "token_advantages", "mask", "num_tokens"))

    bounds = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2}
    cases = [
        case("default", "default_loss_fn", kl_tau=1e-3, **bounds),
        case("default kl_tau=0", "default_loss_fn", kl_tau=0.0, **bounds),
        case("ipo", "ipo_loss_fn", ipo_threshold=0.1, kl_tau=1e-3),
    ]
    return Framework(commit, cases)
