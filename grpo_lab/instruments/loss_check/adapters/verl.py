"""verl: its registered policy losses, with the counts of the whole batch as its actor passes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_lab.instruments.loss_check.adapters import Case, Framework
from grpo_lab.instruments.loss_check.adapters.source import package

_READS = ("logprobs", "old_logprobs", "token_advantages", "mask", "num_tokens", "num_rows")
_MODES = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip


def framework(path: Path | None) -> Framework:
    names = ("verl.trainer.ppo.core_algos", "verl.workers.config")
    version, (core, configs) = package(path, "verl", "verl", *names)

    def case(kind: str, mode: str, **settings: Any) -> Case:
        def loss(
            logprobs: Any, old_logprobs: Any, token_advantages: Any, mask: Any, num_tokens: int, num_rows: int
        ) -> Any:
            config = configs.ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, **settings)
            info = {"dp_size": 1, "batch_num_tokens": num_tokens, "global_batch_size": num_rows}
            object.__setattr__(config, "global_batch_info", info)  # its own setter checks a running trainer
            return core.get_policy_loss_fn(kind)(
                old_log_prob=old_logprobs, log_prob=logprobs, advantages=token_advantages,
                response_mask=mask.to(logprobs.dtype), loss_agg_mode=mode, config=config, rollout_is_weights=None,
            )[0]  # fmt: skip

        shown = "".join(f" {name}={value}" for name, value in settings.items())
        return Case(f"{kind} {mode}{shown}", loss, _READS, expected={"aggregation": _MODES[mode]})

    modes = list(_MODES)
    wide, narrow = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    cases = [case("vanilla", mode) for mode in modes]
    cases += [case("gspo", "seq-mean-token-mean", **narrow), case("gpg", "token-mean")]
    cases += [case("sapo", mode) for mode in modes[:2]]
    cases += [case("geo_mean", mode, **wide) for mode in modes[:2]]
    cases.append(case("cispo", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.28))
    return Framework(version, cases)
