"""The numbers of published losses, from the options' own classes: token losses, weights, and their products.

A published loss is sum over tokens of (aggregation weight * correction weight * token loss). Aggregations are linear in
the token losses, so all combinations follow from one table for each axis. The tables are shipped, and
`python -m grpo_lab.instruments.loss_check.published` makes them again from conf/.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_lab.instruments.loss_check.inputs import GROUP, LossInputs, tabled

if TYPE_CHECKING:
    import torch

TABLES = Path(__file__).with_name("published.json.gz")
# clip_cov draws tokens at random; the numbers of the others are those of another option below.
_LEFT_OUT = ("clip_cov",)
UNLIMITED = "token, log-ratio not limited"  # differs from token on the extreme batch, and is kept for it only
_FAMILIES = ("ppo", "ppo_higher", "dual_clip", "dual_clip_dapo")  # on which faults are planted


@dataclass(frozen=True)
class TokenLoss:
    """Token losses [N, T] of one choice of surrogate, importance ratio and old policy on each batch.

    `slopes` are their derivatives by log-prob: [N, T] of each token by its own, or [N, T, T] with the token of the loss
    before that of the log-prob. `fault` is how it departs from the published option, "" where it does not.
    """

    options: Mapping[str, str]
    fault: str
    values: Mapping[str, np.ndarray]
    slopes: Mapping[str, np.ndarray]

    def gradient(self, batch: str, weights: np.ndarray) -> np.ndarray:
        """Gradient [K, N, T] of sum(weights * token loss), with weights [K, N, T]."""
        slopes = self.slopes[batch]
        return weights * slopes if slopes.ndim == 2 else np.einsum("knt,nts->kns", weights, slopes)


@dataclass(frozen=True)
class Weights:
    """Weights [N, T] of tokens on each batch, of one choice of options."""

    options: Mapping[str, str]
    fault: str
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PublishedTables:
    """Published numbers by axis."""

    surrogates: Sequence[TokenLoss]
    penalties: Sequence[TokenLoss]  # KL to the reference, with coefficient 1
    corrections: Sequence[Weights]
    aggregations: Sequence[Weights]


# --- with torch: numbers of options ---------------------------------------------------------------------------


def options_of(axis: str) -> dict[str, Any]:
    """Every option of an axis with the values of its YAML file."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf, open_dict

    from grpo_lab.config.folders import conf_folder

    config, found = _composed(), {}
    for path in sorted((conf_folder() / axis).glob("*.yaml")):
        given = OmegaConf.load(path)
        schema = given.pop("defaults")[0].split("@")[0].strip("/")  # pyright: ignore
        node = ConfigStore.instance().load(f"{schema}.yaml").node
        with open_dict(config):
            config[axis] = OmegaConf.merge(node, given)
        found[path.stem] = OmegaConf.to_object(config[axis])
    return found


@cache
def _composed() -> Any:
    from grpo_lab.config.hydra_setup import bootstrap, compose_config

    bootstrap()
    return compose_config()


def make_tables(surrogates: Mapping[str, Any] | None = None) -> PublishedTables:
    """All tables, or only those of these surrogates."""
    batches = tabled()
    chosen = options_of("surrogate") if surrogates is None else surrogates
    return PublishedTables(
        [*_surrogates(batches, chosen)],
        [*_penalties(batches)],
        [*_corrections(batches)],
        [*_aggregations(batches)],
    )


def _tensors(batch: LossInputs) -> dict[str, torch.Tensor]:
    import torch

    found = {name: torch.tensor(value) for name, value in batch.arrays.items()}
    found["advantages"] = found["advantages"][:, None].expand(batch.mask.shape)
    return found


def _slopes(loss: Callable[[Any], Any], logprobs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values [N, T] of a token loss and its slopes; no row reads another's log-probs."""
    import torch

    leaf = logprobs.clone().requires_grad_()
    values = loss(leaf)
    columns = [torch.autograd.grad(values[:, t].sum(), leaf, retain_graph=True)[0] for t in range(values.shape[1])]
    full = torch.stack(columns, dim=1).numpy()
    own = full.diagonal(axis1=1, axis2=2)
    alone = np.abs(full).sum() == np.abs(own).sum()
    return values.detach().numpy(), own.copy() if alone else full


def _token_loss(
    batches: Mapping[str, LossInputs], options: dict[str, str], fault: str, loss: Callable[..., Any]
) -> Any:
    tensors = {name: _tensors(batch) for name, batch in batches.items()}
    found = {name: _slopes(lambda leaf, t=t: loss(leaf, t), t["logprobs"]) for name, t in tensors.items()}
    return TokenLoss(
        options, fault, {name: one[0] for name, one in found.items()}, {name: one[1] for name, one in found.items()}
    )


def _surrogates(batches: Mapping[str, LossInputs], chosen: Mapping[str, Any]) -> Iterator[TokenLoss]:
    import torch

    from grpo_lab.tricks.importance import Token
    from grpo_lab.tricks.surrogate import Cispo, DualClip, Ppo, Sapo, StepTokens, SurrogateInputs
    from grpo_lab.tricks.surrogate_off_policy import Vespo

    importances = options_of("importance")
    importances[UNLIMITED] = Token(700.0)
    for name, surrogate in chosen.items():
        if name in _LEFT_OUT:
            continue
        soft = isinstance(surrogate, (Cispo, Vespo))
        of_rows = soft or isinstance(surrogate, (Ppo, DualClip, Sapo))
        for ratio, importance in importances.items() if surrogate.uses_ratio else [("token", importances["token"])]:
            if not (importance.per_token or of_rows) or (ratio == "sequence_product" and not soft):
                continue
            for policy, anchor in (("recomputed", "old_logprobs"), ("sampler", "sampler_logprobs")):
                if policy == "sampler" and not surrogate.uses_ratio:
                    continue

                def loss(leaf: Any, t: Any, surrogate=surrogate, importance=importance, anchor=anchor) -> Any:
                    log_ratio, mask = importance(leaf, t[anchor], t["mask"]), t["mask"]
                    marked = None
                    if surrogate.mark_scope is not None:
                        lp, lr, a = (one.detach()[mask] for one in (leaf, log_ratio, t["advantages"]))
                        marked = torch.zeros_like(mask)
                        marked[mask] = surrogate.mark(StepTokens(lp, lr, a, torch.full_like(a, 0.5)))
                    return surrogate(SurrogateInputs(leaf, log_ratio, t["advantages"], mask, marked)).token_loss

                options = {"surrogate": name}
                if surrogate.uses_ratio:
                    options |= {"importance": ratio, "old_policy": policy}
                own_batches = batches if ratio != UNLIMITED else {"extreme": batches["extreme"]}
                yield _token_loss(own_batches, options, "", loss)
                planted = name in (*_FAMILIES, "sapo") and ratio == "token"
                if planted and isinstance(surrogate, (Ppo, DualClip, Sapo)):
                    for fault, wrong in _planted(surrogate).items():

                        def faulty(leaf: Any, t: Any, wrong=wrong, anchor=anchor) -> Any:
                            return wrong(leaf, leaf - t[anchor], t["advantages"], t["mask"])

                        yield _token_loss(batches, options, fault, faulty)


def _planted(surrogate: Any) -> dict[str, Callable[[Any, Any, Any, Any], Any]]:
    """Ways to get a clipped surrogate wrong, each a function of log-probs, log-ratio, advantages and mask."""
    import torch

    from grpo_lab.tricks.surrogate import DualClip, Sapo, SurrogateInputs

    if isinstance(surrogate, Sapo):

        def gate(lr: Any, a: Any) -> Any:
            tau = torch.where(a > 0, surrogate.tau_positive, surrogate.tau_negative)
            return 4 / tau * torch.sigmoid(tau * (lr.exp() - 1))

        return {
            "the gate is a detached weight of the log-prob: tokens that moved far weigh more": lambda lp, lr, a, m: (
                -gate(lr, a).detach() * a * lp
            )
        }
    low, high = surrogate.clip_low, surrogate.clip_high

    def of(log_ratio: Any, a: Any, mask: Any, option: Any = surrogate) -> Any:
        return option(SurrogateInputs(log_ratio, log_ratio, a, mask)).token_loss

    def clipped(lr: Any) -> Any:
        return lr.exp().clamp(1 - low, 1 + high)

    found: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
        "the ratio is old / new: the difference of log-probs is the wrong way round": lambda lp, lr, a, m: of(
            -lr, a, m
        ),
        "the sign of the advantage is lost": lambda lp, lr, a, m: of(lr, a.abs(), m),
    }
    if low != high and high < 1:
        found["clip_low and clip_high are exchanged"] = lambda lp, lr, a, m: of(
            lr, a, m, replace(surrogate, clip_low=high, clip_high=low)
        )
    if isinstance(surrogate, DualClip):  # the others are the same as of Ppo
        return found
    found |= {
        "the log-ratio stands where the ratio belongs: exp is missing": lambda lp, lr, a, m: (
            -torch.minimum(lr * a, lr.clamp(1 - low, 1 + high) * a)
        ),
        "max and min are exchanged: the looser of the two objectives is taken": lambda lp, lr, a, m: (
            -torch.maximum(lr.exp() * a, clipped(lr) * a)
        ),
        "only the clipped ratio is used: the min with the unclipped one is missing": lambda lp, lr, a, m: (
            -clipped(lr) * a
        ),
        "the clip is on the log-ratio, not on the ratio": lambda lp, lr, a, m: (
            -torch.minimum(lr.exp() * a, lr.clamp(-low, high).exp() * a)
        ),
        "the weight of log-prob is not detached: the gradient flows through it too": lambda lp, lr, a, m: (
            -clipped(lr) * a * lp
        ),
    }
    if low == high:
        found |= {
            "the ratio is not clipped": lambda lp, lr, a, m: -lr.exp() * a,
            "the ratio is 1: the old log-probs are the current ones": lambda lp, lr, a, m: (
                -(lp - lp.detach()).exp() * a
            ),
            "probabilities stand where log-probs belong": lambda lp, lr, a, m: -lp.exp() * a,
        }
    return found


def _penalties(batches: Mapping[str, LossInputs]) -> Iterator[TokenLoss]:
    options = options_of("kl")
    for name in ("k2_loss", "k3_loss", "k3_unbiased"):
        penalty = replace(options[name], kl_coef=1.0)

        def loss(leaf: Any, t: Any, penalty=penalty) -> Any:
            return penalty(leaf, t["old_logprobs"], t["ref_logprobs"])

        yield _token_loss(batches, {"kl": name}, "", loss)
    k2 = replace(options["k2_loss"], kl_coef=1.0)
    yield _token_loss(
        batches, {"kl": "k2_loss", "reference": "sampler"}, "",
        lambda leaf, t: k2(leaf, t["old_logprobs"], t["sampler_logprobs"]),
    )  # fmt: skip
    wrong: dict[str, Callable[[Any, Any], Any]] = {
        "the KL penalty is k1, log(pi / ref): its expected gradient is 0": lambda lp, ref: lp - ref,
        "the KL penalty is k3 of pi / ref: the difference of log-probs is the wrong way round": lambda lp, ref: (
            (lp - ref).exp() - (lp - ref) - 1
        ),
        "the KL penalty is |log(pi / ref)|": lambda lp, ref: (lp - ref).abs(),
    }
    for fault, function in wrong.items():
        yield _token_loss(
            batches, {"kl": "k3_loss"}, fault, lambda leaf, t, function=function: function(leaf, t["ref_logprobs"])
        )


def _corrections(batches: Mapping[str, LossInputs]) -> Iterator[Weights]:
    import torch

    tensors = {name: _tensors(batch) for name, batch in batches.items()}
    for name, option in options_of("correction").items():
        values = {
            batch: option(t["old_logprobs"], t["sampler_logprobs"], t["mask"]).numpy() for batch, t in tensors.items()
        }
        yield Weights({"correction": name}, "", values)
        if not name.startswith("tis_token"):
            continue
        for fault, ratio in {
            "the weight is sampler / old: the difference of log-probs is the wrong way round": ("sampler", "old"),
            "the weight is current / sampler, not old / sampler: it counts the update too": ("", "sampler"),
        }.items():
            first, second = (f"{one}_logprobs" if one else "logprobs" for one in ratio)
            wrong = {
                batch: torch.where(t["mask"], option(t[first], t[second], t["mask"]), 1.0).numpy()
                for batch, t in tensors.items()
            }
            yield Weights({"correction": name}, fault, wrong)


def _aggregations(batches: Mapping[str, LossInputs]) -> Iterator[Weights]:
    import torch

    from grpo_lab.instruments.loss_check.inputs import MAX_TOKENS
    from grpo_lab.policy.batching import totals_of
    from grpo_lab.tricks.aggregation import Constant
    from grpo_lab.tricks.convention import Width

    aggregations = options_of("aggregation") | {"constant": Constant(MAX_TOKENS, Width.budget)}
    for name, aggregation in aggregations.items():
        for denominator, option in options_of("denominator").items():
            values = {}
            for batch, inputs in batches.items():
                t = _tensors(inputs)
                counted = option.counted_tokens(t["response_mask"], t["mask"])
                advantages = torch.where(t["mask"], t["advantages"], 0.0)
                totals = totals_of(counted, GROUP, range(len(counted)), advantages)
                leaf = torch.zeros_like(t["logprobs"]).requires_grad_()
                values[batch] = torch.autograd.grad(aggregation(leaf, t["mask"], totals), leaf)[0].numpy()
            yield Weights({"aggregation": name, "denominator": denominator}, "", values)


# --- files ----------------------------------------------------------------------------------------------------


def _numbers(values: np.ndarray) -> Any:
    return json.loads(json.dumps(values.tolist()), parse_float=lambda text: float(f"{float(text):.6g}"))


def written(tables: PublishedTables) -> bytes:
    """The tables as compressed JSON, the same bytes for the same numbers."""
    made = {}
    for kind, entries in vars(tables).items():
        made[kind] = [
            {"options": dict(one.options), "fault": one.fault}
            | {
                part: {batch: _numbers(values) for batch, values in getattr(one, part).items()}
                for part in ("values", "slopes")
                if hasattr(one, part)
            }
            for one in entries
        ]
    return gzip.compress(json.dumps(made, separators=(",", ":")).encode(), mtime=0)


def read_tables(path: Path = TABLES) -> PublishedTables:
    """The shipped tables; needs no torch."""
    made = json.loads(gzip.decompress(path.read_bytes()))

    def arrays(entry: dict[str, Any], part: str) -> dict[str, np.ndarray]:
        return {batch: np.array(values, dtype=float) for batch, values in entry[part].items()}

    def losses(kind: str) -> list[TokenLoss]:
        return [TokenLoss(e["options"], e["fault"], arrays(e, "values"), arrays(e, "slopes")) for e in made[kind]]

    def weights(kind: str) -> list[Weights]:
        return [Weights(e["options"], e["fault"], arrays(e, "values")) for e in made[kind]]

    return PublishedTables(losses("surrogates"), losses("penalties"), weights("corrections"), weights("aggregations"))


if __name__ == "__main__":
    TABLES.write_bytes(written(make_tables()))
