"""AReaL: `ppo_actor_loss_fn` and `sapo_loss_fn`, weighed by the tokens of a microbatch as its engines do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import package

_READS = ("logprobs", "old_logprobs", "sampler_logprobs", "token_advantages", "mask", "num_tokens")


def framework(path: Path | None) -> Framework:
    names = ("areal.utils.functional.functional", "areal.trainer.ppo.actor", "areal.api.cli_args")
    version, (functional, actor, arguments) = package(path, "areal", "areal", *names)

    def weighed(loss: Any, mask: Any, num_tokens: int) -> Any:
        """The engine's part: a microbatch without a token is skipped, and the others weigh by their tokens."""
        return loss * (mask.count_nonzero() / max(num_tokens, 1))

    def case(name: str, m2: float | None = None, **settings: Any) -> Case:
        def loss(
            logprobs: Any, old_logprobs: Any, sampler_logprobs: Any, token_advantages: Any, mask: Any, num_tokens: int
        ) -> Any:
            kept = mask if m2 is None else actor._apply_m2po_masking(sampler_logprobs, old_logprobs, mask, m2)
            found = functional.ppo_actor_loss_fn(
                logprobs=logprobs, proximal_logprobs=old_logprobs, old_logprobs=sampler_logprobs,
                advantages=token_advantages, loss_mask=kept, **({"eps_clip": 0.2, "eps_clip_higher": None} | settings),
            )[0]  # fmt: skip
            return weighed(found, mask, num_tokens)

        return Case(name, loss, _READS)

    def sapo(logprobs: Any, old_logprobs: Any, token_advantages: Any, mask: Any, num_tokens: int) -> Any:
        found = functional.sapo_loss_fn(logprobs, old_logprobs, token_advantages, 1.0, 1.05, mask, "token")[0]
        return weighed(found, mask, num_tokens)

    def band(action: str) -> Any:
        return arguments.RejectionSamplingConfig(
            level="token", action=action, metric="ratio", agg="mean", upper=5.0, lower=0.5
        )

    narrow = {"importance_sampling_level": "sequence", "eps_clip": 3e-4, "eps_clip_higher": 4e-4}
    cases = [
        case("ppo"), case("ppo c_clip=3", c_clip=3.0), case("ppo importance_sampling_level=sequence", **narrow),
        case("ppo rejection token mask 0.5 to 5", rejection_sampling=band("mask")),
        case("ppo rejection token clamp 0.5 to 5", rejection_sampling=band("clamp")),
        case("ppo m2_threshold=0.04", m2=0.04),
        Case("sapo", sapo, tuple(name for name in _READS if name != "sampler_logprobs")),
    ]  # fmt: skip
    return Framework(version, cases)
