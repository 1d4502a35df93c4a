"""Trinity-RFT: its policy losses. Its loss gets no counts of the batch, and verl's engine adds microbatches up."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import package

_READS = ("logprobs", "old_logprobs", "token_advantages", "mask")


def framework(path: Path | None) -> Framework:
    version, _ = package(path, "trinity", "trinity-rft", "trinity.algorithm.policy_loss_fn")

    def case(name: str, module: str, kind: str, **settings: Any) -> Case:
        made = getattr(importlib.import_module(f"trinity.algorithm.policy_loss_fn.{module}"), kind)(**settings)

        def loss(logprobs: Any, old_logprobs: Any, token_advantages: Any, mask: Any) -> Any:
            return made(
                logprobs, old_log_probs=old_logprobs, old_logprob=old_logprobs, response_mask=mask, action_mask=mask,
                advantages=token_advantages,
            )[0]  # fmt: skip

        return Case(name, loss, _READS)

    ppo = ("ppo_policy_loss", "PPOPolicyLossFn")
    gspo = {"clip_range_low": 3e-4, "clip_range_high": 4e-4}
    cases = [case(f"ppo {mode}", *ppo, clip_range=0.2, loss_agg_mode=mode) for mode in (
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    )]  # fmt: skip
    cases += [
        case("gspo", "gspo_policy_loss", "GSPOLossFn", **gspo),
        case("cispo clip_range_high=0.2", "cispo_policy_loss", "CISPOPolicyLossFn", clip_range_high=0.2),
        case("sapo", "sapo_policy_loss", "SAPOPolicyLossFn"),
        case("topr", "topr_policy_loss", "TOPRPolicyLossFn"),
        case("sppo", "sppo_loss_fn", "sPPOPolicyLossFn"),
        case("rec one-side", "rec_policy_loss", "RECPolicyLossFn", clip_mode="one-side", weight="none"),
    ]
    return Framework(version, cases)
