"""OpenRLHF: `PolicyLoss`, with the counts of the whole step as its actor passes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import package

_READS = (
    "logprobs", "old_logprobs", "sampler_logprobs", "token_advantages", "mask", "num_tokens", "num_live_rows",
)  # fmt: skip


def framework(path: Path | None) -> Framework:
    version, (module,) = package(path, "openrlhf", "openrlhf", "openrlhf.models.loss")

    def case(name: str, **settings: Any) -> Case:
        made = module.PolicyLoss(**settings)

        def loss(
            logprobs: Any, old_logprobs: Any, token_advantages: Any, mask: Any, num_tokens: int, num_live_rows: int,
            sampler_logprobs: Any = None,
        ) -> Any:  # fmt: skip
            # DeepSpeed divides by the accumulation steps, by which the trainer has divided both counts before.
            return made(
                logprobs, old_logprobs, token_advantages, action_mask=mask.to(logprobs.dtype),
                rollout_log_probs=sampler_logprobs, batch_num_tokens=num_tokens, global_batch_size=num_live_rows,
            )[0]  # fmt: skip

        reads = _READS if "is_correction_level" in settings else tuple(n for n in _READS if n != "sampler_logprobs")
        return Case(name, loss, reads, expected={"old_policy": "recomputed"})

    gspo = {"policy_loss_type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
    band = {"is_correction_level": "token", "is_correction_mode": "mask", "is_correction_threshold": (0.5, 5.0)}
    clip = band | {"is_correction_mode": "clip"}
    rows = band | {"is_correction_level": "seq", "is_correction_threshold": (0.9, 1.1)}
    cases = [
        case("ppo"), case("ppo token_level_loss=False", token_level_loss=False), case("ppo dual_clip=3", dual_clip=3.0),
        case("gspo", **gspo), case("ppo correction token mask 0.5 to 5", **band),
        case("ppo correction token clip 0.5 to 5", **clip), case("gspo correction seq mask 0.9 to 1.1", **rows, **gspo),
    ]  # fmt: skip
    return Framework(version, cases)
