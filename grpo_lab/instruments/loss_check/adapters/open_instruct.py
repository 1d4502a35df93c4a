"""open-instruct: `compute_grpo_loss` and `masked_mean`, taken from a clone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import file_text, functions

COMMIT = "e6c3044aa6201c8bfa4573c1b03142af599e730d"  # 2026-08-20, where a bare repository is given
_NAMES = ("RhoCorrection", "_rho_drop_masks", "_sequence_level_mean", "compute_rho_correction", "compute_grpo_loss")
_READS = ("logprobs", "old_logprobs", "sampler_logprobs", "token_advantages", "mask", "num_tokens")


def framework(path: Path | None) -> Framework:
    import torch

    commit, text = file_text(path, COMMIT, "open_instruct/grpo_utils.py")
    _, helpers = file_text(path, COMMIT, "open_instruct/rl_utils.py")
    _, models = file_text(path, COMMIT, "open_instruct/model_utils.py")
    mean = functions(helpers, {"torch": torch}, ["masked_mean"])["masked_mean"]
    estimate = functions(models, {"torch": torch}, ["estimate_kl"])["estimate_kl"]
    space = functions(
        text,
        {"torch": torch, "dataclass": dataclass, "field": field,
         "GRPOLossType": SimpleNamespace(dapo="dapo", cispo="cispo"),
         "model_utils": SimpleNamespace(estimate_kl=estimate)},
        _NAMES, _NAMES[:1],
    )  # fmt: skip

    def case(name: str, corrected: bool = False, **settings: Any) -> Case:
        config = SimpleNamespace(
            **{"loss_fn": "dapo", "clip_lower": 0.2, "clip_higher": 0.272, "kl_estimator": 2,
               "use_rho_correction": corrected, "rho_mask_sequence_level": False, "rho_mask_tv_divergence": False,
               "rho_mask_lower_bound": 0.0, "rho_mask_upper_bound": 0.0, "rho_clamp_lower_bound": 0.0,
               "rho_clamp_upper_bound": 0.0, **settings}
        )  # fmt: skip

        def loss(
            logprobs: Any, old_logprobs: Any, token_advantages: Any, mask: Any, num_tokens: int,
            sampler_logprobs: Any = None,
        ) -> Any:  # fmt: skip
            sampler = old_logprobs if sampler_logprobs is None else sampler_logprobs
            weights = space["compute_rho_correction"](old_logprobs, sampler, mask, token_advantages, config).weights
            ratio = (logprobs - old_logprobs).exp()
            token_loss, _, _ = space["compute_grpo_loss"](logprobs, ratio, token_advantages, None, config, weights)
            return mean(token_loss, mask, None, num_tokens)

        return Case(name, loss, _READS if corrected else tuple(n for n in _READS if n != "sampler_logprobs"))

    cases = [
        case("dapo"), case("cispo", loss_fn="cispo", clip_higher=0.2),
        case("dapo rho_clamp_upper_bound=2", True, rho_clamp_upper_bound=2.0),
        case("dapo rho_mask 0.5 to 5", True, rho_mask_lower_bound=0.5, rho_mask_upper_bound=5.0),
    ]  # fmt: skip
    return Framework(commit, cases)
