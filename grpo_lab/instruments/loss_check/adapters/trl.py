"""TRL: `GRPOTrainer._compute_loss`, its model replaced by the given log-probs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import package

_READS = ("logprobs", "old_logprobs", "advantages", "mask", "num_tokens", "num_microbatches", "max_tokens")


class _Accelerator:
    """One process."""

    num_processes, sync_gradients = 1, True

    def gather(self, values: Any) -> Any:
        return values

    def reduce(self, values: Any, reduction: str = "sum") -> Any:
        return values

    gather_for_metrics = gather


def framework(path: Path | None) -> Framework:
    version, (module,) = package(path, "trl", "trl", "trl.trainer.grpo_trainer")
    trainer = module.GRPOTrainer

    def case(name: str, **settings: Any) -> Case:
        def loss(
            logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any, num_tokens: int, num_microbatches: int,
            max_tokens: int, ref_logprobs: Any = None,
        ) -> Any:  # fmt: skip
            import torch

            owner = _owner(trainer, settings, logprobs, num_microbatches, max_tokens)
            nothing = torch.zeros(len(logprobs), 1, dtype=torch.long)
            inputs = {
                "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros_like(mask).long(),
                "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old_logprobs,
                "ref_per_token_logps": ref_logprobs, "num_items_in_batch": torch.tensor(num_tokens),
            }  # fmt: skip
            return trainer._compute_loss(owner, None, inputs)

        return Case(name, loss, (*_READS, "ref_logprobs") if "beta" in settings else _READS)

    narrow = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    kinds = ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo", "luspo")
    cases = [case(f"loss_type={kind}", loss_type=kind) for kind in kinds]
    cases.append(case("loss_type=cispo epsilon_high=5", loss_type="cispo", epsilon_high=5.0))
    cases.append(case("loss_type=grpo importance_sampling_level=sequence", loss_type="grpo", **narrow))
    cases.append(case("loss_type=dapo beta=0.04", loss_type="dapo", beta=0.04))
    return Framework(version, cases)


def _owner(trainer: Any, settings: dict[str, Any], logprobs: Any, num_microbatches: int, max_tokens: int) -> Any:
    """Trainer attributes that the method reads, at TRL's defaults."""
    args = {
        "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "use_bias_correction_kl": False,
        "steps_per_generation": num_microbatches,
    }  # fmt: skip
    own = {
        "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "aux_loss_enabled": False,
        "vllm_importance_sampling_correction": True, "max_completion_length": max_tokens, "entropy_coef": 0.0,
        "current_gradient_accumulation_steps": num_microbatches, "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False, "model": SimpleNamespace(training=True), "accelerator": _Accelerator(),
        "_metrics": defaultdict(lambda: defaultdict(list)), "get_off_policy_mask": trainer.get_off_policy_mask,
        "get_gamma_weights": trainer.get_gamma_weights,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, -logprobs.detach(), None),
    }  # fmt: skip
    return SimpleNamespace(**(own | settings), args=SimpleNamespace(**args))
