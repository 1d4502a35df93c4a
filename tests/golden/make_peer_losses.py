"""Makes golden/peers: what the loss functions of eight peers compute on two random batches.

A function is imported from its package, or taken from its file, and run as it is, in float64; nothing of it is kept
here, and nothing of grpo_lab is imported. golden/peers/README.md names packages and commits, and how to install them:

    python tests/golden/make_peer_losses.py inputs
    ENVIRONMENT/bin/python tests/golden/make_peer_losses.py PEER [SOURCE]

`SOURCE` is a clone for prime_rl and open_instruct, and the site-packages folder for swift. A module that a peer imports
and that is not installed is replaced by an empty one; the file made says which, and no loss function reads them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).with_name("peers")
COMMITS = {
    "prime_rl": "559b44772e471d1538537b8805cc77f3824a5e64",
    "open_instruct": "e6c3044aa6201c8bfa4573c1b03142af599e730d",
}
PACKAGES = {  # what is imported, of which version
    "trl": "trl 1.16.0",
    "verl": "verl 0.9.1",
    "openrlhf": "openrlhf 0.11.2",
    "areal": "areal 1.0.4",
    "trinity": "trinity-rft 0.6.0",
    "swift": "ms-swift 4.6.0",
}
WIDEST = 16  # the generation budget, where a loss divides by it


# --- inputs -------------------------------------------------------------------------------------------------


def make_inputs() -> dict[str, Any]:
    """Two batches. Of the second, a few log-ratios are beyond every trust region, and some beyond limits of peers."""
    generator = torch.Generator().manual_seed(2026)

    def uniform(rows: int, width: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, width, dtype=torch.float64, generator=generator)

    batches = {}
    for name, lengths, width, advantages in (
        ("ordinary", [8, 5, 1, 3, 6, 8, 2, 4], 8, [1.2, -0.7, 0.4, -0.9, 0.8, -1.4, 0.0, 0.6]),
        ("extreme", [6, 1, 4, 3], 7, [0.9, -0.5, -1.1, 0.7]),
    ):
        rows = len(lengths)
        old = -uniform(rows, width, 0.02, 3.5)
        logprobs = old + uniform(rows, width, math.log(0.3), math.log(3.0)) * (uniform(rows, width, 0, 1) < 0.75)
        logprobs = torch.where(logprobs > -0.01, -0.02 - uniform(rows, width, 0, 0.1), logprobs)
        sampler = old + uniform(rows, width, -0.5, 0.5)
        sampler[0, 2] = old[0, 2] - 1.3
        sampler[3, 0] = old[3, 0] + 1.1
        sampler = sampler.clamp(max=-0.005)
        if name == "extreme":
            for place, gap in (((0, 1), 4.0), ((0, 4), -12.0), ((2, 0), 12.0), ((2, 3), -25.0), ((3, 1), 4.0)):
                logprobs[place] = -0.4 if gap > 0 else -0.2 + gap
                old[place] = logprobs[place] - gap
                sampler[place] = old[place] + 0.1
            sampler[3, 2] = old[3, 2] + 3.0
            sampler[0, 3] = old[0, 3] - 3.0
        rewards = {"ordinary": [1, 0, 1, 0, 0.7, 0, -0.1, 1], "extreme": [1, 0, 0, 0.7]}[name]
        second = {"ordinary": [0.2, 0.5, 0.5, 0.1, 0.9, 0.3, 0.3, 0.4], "extreme": [0.1, 0.6, 0.2, 0.8]}[name]
        batches[name] = {
            "lengths": lengths, "group_size": 4, "width": width, "advantages": advantages, "rewards": rewards,
            "second_rewards": second, "reward_of_the_greedy": [0.3] * rows,
            "logprobs": rounded(logprobs, 5), "old": rounded(old, 5), "sampler": rounded(sampler, 5),
            "ref": rounded((old + uniform(rows, width, -0.4, 0.4)).clamp(max=-0.005), 5),
            "entropies": rounded(uniform(rows, width, 0.1, 2.0), 5),
            # the token's own square, and a share of the most that the other tokens can add
            "sum_of_squares": rounded(old.exp() ** 2 + uniform(rows, width, 0.2, 0.9) * (1 - old.exp()) ** 2, 5),
        }  # fmt: skip
    return batches


def rounded(values: Tensor, digits: int) -> list:
    return [[round(value, digits) for value in row] for row in values.tolist()]


@dataclass
class Batch:
    """Tensors [N, T] of a batch; `mask` is boolean, and what is outside it is junk that no loss may read."""

    mask: Tensor
    group_size: int
    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    ref: Tensor
    entropies: Tensor
    sum_of_squares: Tensor
    advantages: Tensor
    rewards: Tensor
    second_rewards: Tensor
    reward_of_the_greedy: Tensor

    @classmethod
    def read(cls, given: dict[str, Any]) -> Batch:
        names = [name for name in cls.__dataclass_fields__ if name not in ("mask", "group_size")]
        mask = torch.arange(given["width"])[None, :] < torch.tensor(given["lengths"])[:, None]
        values = {name: torch.tensor(given[name], dtype=torch.float64) for name in names}
        return cls(mask, given["group_size"], **values)

    @property
    def ones(self) -> Tensor:
        """The mask in float64."""
        return self.mask.double()

    @property
    def spread(self) -> Tensor:
        """[N, T] advantages, 0 outside the mask."""
        return self.advantages[:, None] * self.ones

    @property
    def groups(self) -> np.ndarray:
        return np.arange(len(self.mask)) // self.group_size

    def at_the_end(self, rewards: Tensor) -> Tensor:
        """[N, T] with each row's reward on its last token."""
        found = torch.zeros_like(self.logprobs)
        found[torch.arange(len(found)), self.mask.sum(1) - 1] = rewards
        return found

    def rows(self, rows: slice) -> Batch:
        parts = {name: getattr(self, name)[rows] for name in self.__dataclass_fields__ if name != "group_size"}
        return Batch(group_size=self.group_size, **parts)

    def halves(self) -> Iterator[tuple[slice, Batch]]:
        """The rows as two microbatches."""
        middle = len(self.mask) // 2
        for rows in (slice(0, middle), slice(middle, None)):
            yield rows, self.rows(rows)


@dataclass
class Record:
    """The file of one peer as it grows."""

    peer: str
    batches: dict[str, Batch]
    made: dict[str, Any] = field(default_factory=lambda: defaultdict(dict))

    def loss(self, name: str, function: Callable[[Tensor, Batch], Tensor]) -> None:
        """Loss, and gradient of each token in the mask, of a function of log-probs [N, T] and a batch."""
        for key, batch in self.batches.items():
            leaf = batch.logprobs.clone().requires_grad_()
            loss = function(leaf, batch)
            loss.backward()
            outside = leaf.grad[~batch.mask]
            entry = {"loss": short(loss), "gradient": short(leaf.grad[batch.mask])}
            if not bool((outside == 0).all()):
                entry["gradient_of_padding"] = short(outside)
            self.made["losses"].setdefault(name, {})[key] = entry

    def halves(self, name: str, function: Callable[[Tensor, Batch, Batch], Tensor]) -> None:
        """As `loss`, of the sum over two microbatches; the function gets a microbatch and the whole batch."""
        self.loss(name, lambda leaf, whole: sum(function(leaf[rows], part, whole) for rows, part in whole.halves()))

    def values(self, kind: str, name: str, function: Callable[[Batch], Tensor]) -> None:
        """Values [N, T], [N, 1] or [N]: of the tokens in the mask where there are such."""
        for key, batch in self.batches.items():
            found = function(batch)
            if found.ndim == 2:
                found = found.expand_as(batch.mask)[batch.mask]
            self.made[kind].setdefault(name, {})[key] = short(found)

    def write(self, **more: Any) -> None:
        made = {"peer": self.peer, **more, **self.made}
        text = json.dumps(made, separators=(",", ":")).replace('],"', '],\n"')
        (FOLDER / f"{self.peer}.json").write_text(text + "\n")


def short(values: Tensor) -> Any:
    """Numbers with twelve digits; masks as a text of 0 and 1."""
    if values.dtype == torch.bool:
        return "".join(str(int(value)) for value in values)
    if values.ndim == 0:
        return float(f"{values.item():.12g}")
    return [float(f"{value:.12g}") if value else 0 for value in values.tolist()]


# --- code of peers ------------------------------------------------------------------------------------------


class Empty(types.ModuleType):
    """A module that is not installed: any name in it is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(name, (), {"__init__": lambda self, *_, **__: None})
        kind.__class_getitem__ = classmethod(lambda cls, _: cls)
        kind.__call__ = lambda self, *given, **_: given[0] if given else None  # a decorator keeps its function
        setattr(self, name, kind)
        return kind


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an empty module for an import of the peer's own files that is not installed."""

    def __init__(self, own: str) -> None:
        self.own, self.made = own, set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.split(".")[0]
        if top == self.own:
            return None
        if top not in self.made:
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame.f_globals.get("__name__", "").split(".")[0] != self.own:
                return None
            self.made.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Source:
    """One file of a peer."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)

    @classmethod
    def of_commit(cls, clone: str, peer: str, path: str) -> Source:
        show = ["git", "--git-dir", clone, "show", f"{COMMITS[peer]}:{path}"]
        return cls(subprocess.run(show, check=True, capture_output=True, text=True).stdout)

    def node(self, name: str) -> Any:
        """A function or class, or `Class.method`."""
        found = self.tree
        for part in name.split("."):
            found = next(one for one in ast.walk(found) if getattr(one, "name", None) == part)
        return found

    def take(self, space: dict[str, Any], *names: str, decorated: bool = False) -> dict[str, Any]:
        """These functions and classes in a namespace."""
        for name in names:
            node = self.node(name)
            if not decorated:
                node.decorator_list = []
            run([node], space)
        return space

    def statement(self, within: str, begins: str, holds: str = "") -> ast.stmt:
        """The first statement of a function whose text begins and holds so."""
        nodes = [one for one in ast.walk(self.node(within)) if isinstance(one, ast.stmt)]
        return next(one for one in nodes if (text := ast.unparse(one)).startswith(begins) and holds in text)


def run(statements: Sequence[ast.stmt], space: dict[str, Any]) -> dict[str, Any]:
    """Execute statements of a peer in a namespace."""
    body = ast.parse("from __future__ import annotations").body + list(statements)
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), "peer", "exec"), space)
    return space


def imported(own: str, *modules: str) -> tuple[list[Any], list[str]]:
    """Modules of a peer, and the names of those that were missing."""
    missing = Missing(own)
    sys.meta_path.append(missing)
    found = [importlib.import_module(name) for name in modules]
    return found, sorted(missing.made)


class Accelerator:
    """One process."""

    num_processes, sync_gradients = 1, True

    def gather(self, values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        return values


def metrics() -> dict:
    return defaultdict(lambda: defaultdict(list))


# --- TRL ----------------------------------------------------------------------------------------------------


def trl(record: Record) -> None:
    from trl.trainer import grpo_trainer, utils

    Trainer = grpo_trainer.GRPOTrainer
    source = Source(Path(grpo_trainer.__file__).read_text())

    def loss(leaf: Tensor, batch: Batch, whole: Batch | None = None, **given: Any) -> Tensor:
        """The whole of _compute_loss; the model is replaced by its log-probs. `whole` is the accumulation window."""
        steps = 1 if whole is None else 2
        args = {
            "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0,
            "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "use_bias_correction_kl": False,
            "steps_per_generation": steps,
        }  # fmt: skip
        me = {
            "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28,
            "beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
            "vllm_importance_sampling_correction": True, "max_completion_length": WIDEST, "aux_loss_enabled": False,
            "current_gradient_accumulation_steps": steps, "entropy_coef": 0.0, "use_adaptive_entropy": False,
            "_entropy_bonus_enabled": False, "model": SimpleNamespace(training=True), "accelerator": Accelerator(),
            "_metrics": metrics(), "get_off_policy_mask": Trainer.get_off_policy_mask,
            "get_gamma_weights": Trainer.get_gamma_weights,
        }  # fmt: skip
        mode = given.pop("mode", None)
        for name, value in given.items():
            (args if name in args else me)[name] = value
        entropies = -leaf if me["_entropy_bonus_enabled"] else batch.entropies
        me["_get_per_token_logps_and_entropies"] = lambda *_, **__: (leaf, entropies, None)
        owner = SimpleNamespace(**me, args=SimpleNamespace(**args))
        owner.get_high_entropy_mask = types.MethodType(Trainer.get_high_entropy_mask, owner)
        nothing = torch.zeros(len(leaf), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": torch.zeros_like(leaf, dtype=torch.long),
            "completion_mask": batch.mask.long(), "advantages": batch.advantages, "old_per_token_logps": batch.old,
            "ref_per_token_logps": batch.ref, "num_items_in_batch": (whole or batch).mask.sum(),
        }  # fmt: skip
        if me["off_policy_mask_threshold"] is not None:
            inputs["sampling_per_token_logps"] = batch.sampler
        if mode:
            owner.use_vllm, inputs["importance_sampling_ratio"] = True, ratio(batch, mode)
        return Trainer._compute_loss(owner, None, inputs)

    weighting = source.statement(
        "GRPOTrainer._generate_and_score_completions",
        "if self.use_vllm and self.vllm_importance_sampling_correction:", "torch.exp(logps_diff)",
    )  # fmt: skip

    def ratio(batch: Batch, mode: str) -> Tensor:
        """The weights of a mode with the default bound of 3, and 0.4 below except for sequence_truncate."""
        me = SimpleNamespace(
            use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=None if mode == "sequence_truncate" else 0.4,
            vllm_importance_sampling_clip_max=3.0,
        )  # fmt: skip
        space = {
            "self": me, "torch": torch, "math": math, "completion_mask": batch.mask.long(), "tool_mask": None,
            "old_per_token_logps": batch.old, "sampling_per_token_logps": batch.sampler,
        }  # fmt: skip
        return run([weighting], space)["vllm_importance_sampling_ratio"]

    def case(name: str, **given: Any) -> None:
        record.loss(name, lambda leaf, batch: loss(leaf, batch, **given))

    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        case(kind, loss_type=kind)
        case(f"{kind} sequence", loss_type=kind, importance_sampling_level="sequence")
    for kind in ("grpo", "bnpo", "dapo", "luspo"):
        record.halves(f"{kind} in halves", lambda leaf, part, whole, kind=kind: loss(leaf, part, whole, loss_type=kind))
    case("dapo delta 3", loss_type="dapo", delta=3.0)
    case("cispo 5", loss_type="cispo", epsilon_high=5.0)
    case("cispo 0.2, the default", loss_type="cispo", epsilon_high=0.2)
    case("sapo", loss_type="sapo")
    case("vespo", loss_type="vespo")
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        record.values("weights", mode, lambda batch, mode=mode: ratio(batch, mode))
        case(f"dapo {mode}", loss_type="dapo", mode=mode)
        if mode.startswith("token"):
            case(f"vespo {mode}", loss_type="vespo", mode=mode)
    case("dapo kl 0.1", loss_type="dapo", beta=0.1)
    case("dapo kl 0.1 bias-corrected", loss_type="dapo", beta=0.1, use_bias_correction_kl=True)
    case("grpo off-policy mask 0.1", off_policy_mask_threshold=0.1)
    case("bnpo off-policy mask 0.1", loss_type="bnpo", off_policy_mask_threshold=0.1)
    case("dapo off-policy mask 0.1", loss_type="dapo", off_policy_mask_threshold=0.1)
    case("dapo kl 0.1 off-policy mask 0.1", loss_type="dapo", beta=0.1, off_policy_mask_threshold=0.1)
    record.values(
        "weights", "off-policy mask 0.1",
        lambda batch: Trainer.get_off_policy_mask(
            batch.advantages[:, None], batch.logprobs, batch.sampler, batch.mask.long(), 0.1
        ).bool(),
    )  # fmt: skip
    for kind in ("grpo", "dapo"):
        case(f"{kind} entropy 0.05", loss_type=kind, _entropy_bonus_enabled=True, entropy_coef=0.05)

    scaling = source.statement(
        "GRPOTrainer._generate_and_score_completions", "if self.multi_objective_aggregation == 'sum_then_normalize'"
    )

    def advantages(batch: Batch, how: str, scale: str, rewards: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        table = torch.stack(list(rewards), dim=1)
        me = SimpleNamespace(
            multi_objective_aggregation=how, scale_rewards=scale, reward_funcs=[None] * len(weights),
            reward_weights=torch.tensor(weights, dtype=torch.float64),
        )  # fmt: skip
        space = {
            "self": me, "torch": torch, "nanstd": utils.nanstd, "rewards_per_func": table, "device": "cpu",
            "unscorable_mask": torch.isnan(table).all(dim=1), "num_generations": batch.group_size,
        }  # fmt: skip
        return run([scaling], space)["advantages"]

    for scale in ("group", "batch", "none"):
        record.values(
            "advantages", scale,
            lambda batch, scale=scale: advantages(batch, "sum_then_normalize", scale, [batch.rewards], [1.0]),
        )  # fmt: skip
    record.values(
        "advantages", "gdpo, weights 1 and 0.5",
        lambda batch: advantages(batch, "normalize_then_sum", "group", [batch.rewards, batch.second_rewards], [1, 0.5]),
    )  # fmt: skip
    record.write()


# --- verl ---------------------------------------------------------------------------------------------------


def verl(record: Record) -> None:
    names = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper", "verl.workers.config")
    (core, helper, configs), missing = imported("verl", *names)
    # The record that carries weights between its functions needs tensordict; a plain one carries them as well.
    helper.DataProto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))

    def config(batch: Batch | None = None, scale: int | None = None, correction: dict | None = None, **given: Any):
        """The actor's configuration; with a batch, the counts of the whole step that its trainer passes on."""
        policy = {
            "clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0,
            "dro_beta": 0.1,
        }  # fmt: skip
        policy_loss = configs.PolicyLossConfig(**policy)
        if correction is not None:
            object.__setattr__(policy_loss, "rollout_correction", correction)
        made = configs.ActorConfig(
            **{"strategy": "fsdp", "rollout_n": 4, "use_dynamic_bsz": True, "clip_ratio_low": 0.2,
               "clip_ratio_high": 0.28, "policy_loss": policy_loss, **given}
        )  # fmt: skip
        info: dict[str, Any] = {} if scale is None else {"loss_scale_factor": scale}
        if batch is not None:
            info |= {"dp_size": 1, "batch_num_tokens": int(batch.mask.sum()), "global_batch_size": len(batch.mask)}
        object.__setattr__(made, "global_batch_info", info)
        return made

    def loss(
        kind: str, leaf: Tensor, batch: Batch, mode: str = "token-mean", whole: Batch | None = None,
        weights: Tensor | None = None, bypass: dict | None = None, scale: int | None = None, **given: Any,
    ) -> Tensor:  # fmt: skip
        function = core.get_policy_loss_fn(kind)
        anchor = batch.sampler if bypass is not None else batch.old
        return function(
            old_log_prob=anchor, log_prob=leaf, advantages=batch.spread, response_mask=batch.ones, loss_agg_mode=mode,
            config=config(whole, scale, bypass, **given), rollout_is_weights=weights,
        )[0]  # fmt: skip

    def case(name: str, kind: str, mode: str = "token-mean", **given: Any) -> None:
        record.loss(f"{name} {mode}", lambda leaf, batch: loss(kind, leaf, batch, mode, **given))

    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        case("vanilla", "vanilla", mode)
    case("vanilla scale 16", "vanilla", "seq-mean-token-sum-norm", scale=WIDEST)
    case("vanilla no scale", "vanilla", "seq-mean-token-sum-norm")
    for mode in ("token-mean", "seq-mean-token-mean"):
        case("gspo", "gspo", mode, clip_ratio_low=0.03, clip_ratio_high=0.04)
        case("sapo", "sapo", mode)
        case("gpg", "gpg", mode)
        case("geo_mean", "geo_mean", mode, clip_ratio_low=0.4, clip_ratio_high=0.4)
        for kind in ("vanilla", "gspo", "geo_mean"):
            record.halves(
                f"{kind} {mode} in halves",
                lambda leaf, part, whole, kind=kind, mode=mode: loss(kind, leaf, part, mode, whole),
            )
    for kind in ("clip_cov", "kl_cov", "cispo", "dro"):
        case(kind, kind)
    for kind in ("clip_cov", "kl_cov"):
        record.halves(f"{kind} in halves", lambda leaf, part, whole, kind=kind: loss(kind, leaf, part, whole=whole))
    for kind, bound in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        case(kind, kind, clip_ratio_low=bound, clip_ratio_high=bound, clip_ratio_c=20.0)
    case("dppo_tv clip_ratio_c 3", "dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=3.0)
    for name, bypass in (
        ("ppo_clip", {"loss_type": "ppo_clip"}),
        ("ppo_clip seq_mean_k3", {"loss_type": "ppo_clip", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.2}),
        ("reinforce token", {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}),
        ("reinforce sequence", {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 2.0}),
        (
            "reinforce token token_k2",
            {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k2",
             "rollout_rs_threshold": 0.3},
        ),
    ):  # fmt: skip
        case(f"bypass {name}", "bypass_mode", bypass=bypass)
        record.loss(
            f"bypass {name} token-mean, counts of the trainer",
            lambda leaf, batch, bypass=bypass: loss("bypass_mode", leaf, batch, whole=batch, bypass=bypass),
        )

    def weights_of(batch: Batch, level: str, bound: float | str, normalise: bool = False) -> Tensor:
        return helper.compute_rollout_correction_weights(
            batch.old - batch.sampler, batch.ones, level, bound, normalise
        )[0]  # fmt: skip

    for name, given in {
        "token 2": ("token", 2.0), "sequence 2": ("sequence", 2.0), "token 0.5 to 2": ("token", "0.5_2"),
        "sequence 0.5 to 2": ("sequence", "0.5_2"), "token 2 normalised": ("token", 2.0, True),
    }.items():  # fmt: skip
        record.values("weights", name, lambda batch, given=given: weights_of(batch, *given))
    for kind in ("vanilla", "geo_mean"):
        record.loss(
            f"{kind} with weights token 2",
            lambda leaf, batch, kind=kind: loss(kind, leaf, batch, weights=weights_of(batch, "token", 2.0)),
        )
    for option, bound in {
        "token_k1": "0.6_1.4", "token_k2": 0.05, "token_k3": 0.05, "seq_sum_k1": "0.5_1.5", "seq_sum_k2": 0.2,
        "seq_sum_k3": 0.2, "seq_mean_k1": "0.8_1.1", "seq_mean_k2": 0.06, "seq_mean_k3": 0.06, "seq_max_k2": 0.2,
        "seq_max_k3": 0.2, "token_k2,seq_mean_k3": "0.1,0.06",
    }.items():  # fmt: skip
        record.values(
            "masks", f"{option} {bound}",
            lambda batch, option=option, bound=bound: helper.compute_rollout_rejection_mask(
                batch.old - batch.sampler, batch.ones, option, bound
            )[0].bool(),
        )  # fmt: skip

    def advantages(name: str, estimator: str, **given: Any) -> None:
        def found(batch: Batch) -> Tensor:
            extra = {key: value(batch) if callable(value) else value for key, value in given.items()}
            return core.get_adv_estimator_fn(estimator)(
                token_level_rewards=batch.at_the_end(batch.rewards), response_mask=batch.ones, **extra
            )[0]  # fmt: skip

        record.values("advantages", name, found)

    index = {"index": lambda batch: batch.groups}
    advantages("grpo", "grpo", **index)
    advantages("grpo without std", "grpo", norm_adv_by_std_in_grpo=False, **index)
    for estimator in ("rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline", "gpg"):
        advantages(estimator, estimator, **index)
    advantages("grpo_passk", "grpo_passk", config={"norm_adv_by_std_in_grpo": True}, **index)
    advantages("reinforce_plus_plus", "reinforce_plus_plus", config=SimpleNamespace(gamma=1.0))
    advantages("remax", "remax", reward_baselines=lambda batch: batch.reward_of_the_greedy)

    def two_rewards(batch: Batch) -> dict[str, Any]:
        return {"first": batch.rewards.tolist(), "second": batch.second_rewards.tolist()}

    advantages(
        "gdpo, weights 1 and 0.5", "gdpo", non_tensor_batch=two_rewards, **index,
        config={"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]},
        batch=lambda batch: {"prompts": torch.zeros(len(batch.mask), 1), "attention_mask": torch.cat(
            [torch.ones(len(batch.mask), 1), batch.ones], dim=1).long()},
    )  # fmt: skip
    token_baseline = {
        **index, "old_log_probs": lambda batch: batch.old, "sum_pi_squared": lambda batch: batch.sum_of_squares,
    }  # fmt: skip
    advantages("optimal_token_baseline", "optimal_token_baseline", **token_baseline)
    advantages(
        "optimal_token_baseline with weights token 2", "optimal_token_baseline", **token_baseline,
        rollout_is_weights=lambda batch: weights_of(batch, "token", 2.0),
    )  # fmt: skip
    record.write(empty_modules=missing)


# --- OpenRLHF -----------------------------------------------------------------------------------------------


def openrlhf(record: Record) -> None:
    (module,), missing = imported("openrlhf", "openrlhf.models.loss")

    def case(name: str, **given: Any) -> None:
        made = module.PolicyLoss(**{"clip_eps_low": 0.2, "clip_eps_high": 0.28, **given})
        record.loss(
            name,
            lambda leaf, batch: made(
                leaf, batch.old, batch.spread, action_mask=batch.ones, rollout_log_probs=batch.sampler
            )[0],
        )

    case("ppo")
    case("ppo sequences", token_level_loss=False)
    case("ppo dual clip 3", dual_clip=3.0)
    gspo = {"policy_loss_type": "gspo", "clip_eps_low": 0.03, "clip_eps_high": 0.04}
    case("gspo", **gspo)
    for level, mode, gating, bounds in (
        ("token", "mask", "ratio", (0.5, 2.0)), ("token", "clip", "ratio", (0.5, 2.0)),
        ("token", "mask", "binary_kl", (0.0, 0.02)), ("token", "mask", "tv", (0.0, 0.1)),
        ("seq", "mask", "ratio", (0.9, 1.1)), ("seq", "mask", "binary_kl", (0.0, 0.03)),
        ("seq", "mask", "tv", (0.0, 0.08)),
    ):  # fmt: skip
        given = {
            "is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating,
            "is_correction_threshold": bounds,
        }  # fmt: skip
        case(f"ppo {level} {mode} {gating}", **given)
        if level == "seq":
            case(f"gspo {level} {mode} {gating}", **given, **gspo)
    record.write(empty_modules=missing)


# --- AReaL --------------------------------------------------------------------------------------------------


def areal(record: Record) -> None:
    (functional, actor, arguments), missing = imported(
        "areal", "areal.utils.functional.functional", "areal.trainer.ppo.actor", "areal.api.cli_args"
    )

    def loss(leaf: Tensor, batch: Batch, mask: Tensor | None = None, **given: Any) -> Tensor:
        return functional.ppo_actor_loss_fn(
            logprobs=leaf, proximal_logprobs=batch.old, old_logprobs=batch.sampler, advantages=batch.spread,
            loss_mask=batch.mask if mask is None else mask, **{"eps_clip": 0.2, "eps_clip_higher": 0.28, **given},
        )[0]  # fmt: skip

    def case(name: str, **given: Any) -> None:
        record.loss(name, lambda leaf, batch: loss(leaf, batch, **given))

    case("ppo")
    case("ppo dual clip 3", c_clip=3.0)
    case("ppo sequence", importance_sampling_level="sequence", eps_clip=0.03, eps_clip_higher=0.04)
    bounds = {
        "ratio": (0.5, 2.0), "kl_k1": (-0.3, 0.3), "kl_k2": (None, 0.05), "kl_k3": (None, 0.05)
    }  # fmt: skip
    for metric, (lower, upper) in bounds.items():
        for level, action, agg in (
            ("token", "mask", "mean"), ("token", "clamp", "mean"), ("sequence", "mask", "mean"),
            ("sequence", "mask", "sum"), ("sequence", "mask", "max"), ("sequence", "clamp", "mean"),
        ):  # fmt: skip
            if action == "clamp" and metric != "ratio":
                continue
            with suppress(ValueError):  # its own checks refuse some
                chosen = arguments.RejectionSamplingConfig(
                    level=level, action=action, metric=metric, agg=agg, upper=upper, lower=lower
                )
                name = f"{metric} {level} {action}" + (f" {agg}" if level == "sequence" else "")
                if metric == "ratio":
                    case(name, rejection_sampling=chosen)
                record.values(
                    "masks", name,
                    lambda batch, chosen=chosen: functional.apply_rejection_sampling(
                        batch.old, batch.sampler, batch.mask, None, chosen
                    ).loss_mask.bool(),
                )  # fmt: skip
                record.values(
                    "weights", name,
                    lambda batch, chosen=chosen: functional.apply_rejection_sampling(
                        batch.old, batch.sampler, batch.mask, None, chosen
                    ).behave_imp_weight,
                )  # fmt: skip

    def sapo(leaf: Tensor, batch: Batch, level: str) -> Tensor:
        return functional.sapo_loss_fn(leaf, batch.old, batch.spread, 1.0, 1.05, batch.mask, level)[0]

    record.loss("sapo", lambda leaf, batch: sapo(leaf, batch, "token"))
    record.loss("sapo sequence", lambda leaf, batch: sapo(leaf, batch, "sequence"))

    def m2po(batch: Batch) -> Tensor:
        return actor._apply_m2po_masking(batch.sampler, batch.old, batch.mask, 0.04)

    record.values("masks", "m2po 0.04", m2po)
    record.loss("m2po 0.04", lambda leaf, batch: loss(leaf, batch, m2po(batch)))
    record.write(empty_modules=missing)


# --- Trinity-RFT --------------------------------------------------------------------------------------------


def trinity(record: Record) -> None:
    _, missing = imported("trinity", "trinity.algorithm.policy_loss_fn", "trinity.algorithm.advantage_fn")

    def case(name: str, module: str, kind: str, **given: Any) -> None:
        found = getattr(importlib.import_module(f"trinity.algorithm.policy_loss_fn.{module}"), kind)(**given)

        def loss(leaf: Tensor, batch: Batch) -> Tensor:
            return found(
                leaf, old_log_probs=batch.old, response_mask=batch.ones, advantages=batch.spread, old_logprob=batch.old,
                action_mask=batch.ones,
            )[0]  # fmt: skip

        record.loss(name, loss)

    band = {"epsilon_low_prime": 0.4, "epsilon_high_prime": 0.4}
    for clip in ("none", "one-side", "two-side", "ring"):
        for weight in ("none", "importance_sampling"):
            case(f"rec {clip} {weight}", "rec_policy_loss", "RECPolicyLossFn", clip_mode=clip, weight=weight, **band)
    case(
        "rec gspo-one-side", "rec_policy_loss", "RECPolicyLossFn", clip_mode="gspo-one-side",
        weight="gspo_importance_sampling", epsilon_low=0.03, epsilon_high=0.03,
    )  # fmt: skip
    case("rec none advantage", "rec_policy_loss", "RECPolicyLossFn", weight="advantage")
    case("rec none k2 0.05", "rec_policy_loss", "RECPolicyLossFn", regularizer="k2", regularizer_coef=0.05)
    case("sppo", "sppo_loss_fn", "sPPOPolicyLossFn")
    case("opmd", "opmd_policy_loss", "OPMDPolicyLossFn")
    case("topr", "topr_policy_loss", "TOPRPolicyLossFn")
    case("cispo", "cispo_policy_loss", "CISPOPolicyLossFn")
    case(
        "cispo with masks", "cispo_policy_loss", "CISPOPolicyLossFn", enable_mask_clip=True, mask_clip_range_low=0.5,
        mask_clip_range_high=0.5,
    )  # fmt: skip
    case("gspo", "gspo_policy_loss", "GSPOLossFn", clip_range_low=0.03, clip_range_high=0.04)
    case("sapo", "sapo_policy_loss", "SAPOPolicyLossFn")
    case("ppo", "ppo_policy_loss", "PPOPolicyLossFn", clip_range_low=0.2, clip_range_high=0.28)
    for delta in (0.1, 0.3):
        case(
            f"ppo sequence masking {delta}", "ppo_policy_loss", "PPOPolicyLossFn", clip_range_low=0.2,
            clip_range_high=0.28, enable_sequence_masking=True, delta_sequence_masking=delta,
        )  # fmt: skip
    case("importance sampling", "importance_sampling_policy_loss", "ImportanceSamplingLossFn")
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        case(f"sppo {mode}", "sppo_loss_fn", "sPPOPolicyLossFn", loss_agg_mode=mode)

    def grouped(name: str, module: str, kind: str, **given: Any) -> None:
        made = getattr(importlib.import_module(f"trinity.algorithm.advantage_fn.{module}"), kind)(**given)

        def found(batch: Batch) -> Tensor:
            rows = [
                SimpleNamespace(reward=float(reward), action_mask=torch.ones(1, dtype=torch.float64), info={})
                for reward in batch.rewards
            ]
            for start in range(0, len(rows), batch.group_size):
                made.calculate_group_advantage("group", rows[start : start + batch.group_size])
            return torch.stack([row.advantages[0] for row in rows]).double()

        record.values("advantages", name, found)

    grouped("opmd mean", "opmd_advantage", "OPMDGroupAdvantage")
    grouped("opmd logavgexp", "opmd_advantage", "OPMDGroupAdvantage", opmd_baseline="logavgexp")
    grouped("asymre", "asymre_advantage", "ASYMREGroupAdvantage")
    grouped("rec", "rec_advantage", "RECGroupedAdvantage")

    def clip(name: str, module: str, kind: str, **given: Any) -> None:
        made = getattr(importlib.import_module(f"trinity.algorithm.advantage_fn.{module}"), kind)(**given)

        def found(batch: Batch) -> Tensor:
            table = {
                "token_level_rewards": batch.at_the_end(batch.rewards), "response_mask": batch.ones,
                "rollout_log_probs": batch.sampler, "old_log_probs": batch.old, "entropys": batch.entropies,
                "necs": batch.sum_of_squares,
            }  # fmt: skip
            made(SimpleNamespace(batch=table, non_tensor_batch={"uid": batch.groups}))
            return table["response_mask"].bool()

        record.values("masks", name, found)

    clip("clip_b mu 0.5, of the sampler", "clipb_advantage", "ClipBAdvantageFn", mu=0.5)
    clip("clip_v mu 2, at most 0.1", "clipv_advantage", "ClipVAdvantageFn", mu=2.0, max_frac=0.1)
    record.write(empty_modules=missing)


# --- ms-swift -----------------------------------------------------------------------------------------------


def swift(record: Record, packages: str) -> None:
    source = Source((Path(packages) / "swift" / "rlhf_trainers" / "grpo_trainer.py").read_text())
    space: dict[str, Any] = {
        "torch": torch, "gather": lambda values: values, "gather_object": lambda values: values,
        "nanmax": torch.max, "nanmin": torch.min, "WINDOW_NORMALIZED_LOSS_TYPES": ["cispo", "dapo", "fipo"],
    }  # fmt: skip
    methods = (
        "_compute_loss_and_metrics", "_compute_fipo_influence", "_compute_sequence_level_ratios",
        "_apply_rollout_importance_sampling", "_compute_off_policy_sequence_mask", "_get_rollout_is_correction",
        "_undo_gradient_accumulation_scaling",
    )  # fmt: skip
    source.take(space, *(f"GRPOTrainer.{name}" for name in methods))
    Trainer = type("Trainer", (), {name: space[name] for name in methods})

    def loss(leaf: Tensor, batch: Batch, **given: Any) -> Tensor:
        """The whole of _compute_loss_and_metrics; the model is replaced by its log-probs."""
        me = Trainer()
        defaults = {
            "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28,
            "beta": 0.0, "kl_in_reward": False, "compute_entropy": False, "overlong_filter": False,
            "rollout_importance_sampling_mode": None, "rollout_importance_sampling_threshold": 2.0,
            "disable_rollout_importance_sampling": False, "log_rollout_offpolicy_metrics": False, "tau_pos": 1.0,
            "tau_neg": 1.05, "off_policy_sequence_mask_delta": None, "_has_teacher": False, "sdar_loss_coef": 0.0,
            "max_completion_length": WIDEST, "chord_sft_iterator": None, "fipo_gamma": 2 ** (-1 / 32.0),
            "fipo_clip_range": 0.2, "fipo_clip_high_only": True, "fipo_safety_threshold": 4.0,
            "num_generations": batch.group_size, "model_accepts_loss_kwargs": True, "compute_loss_func": None,
        }  # fmt: skip
        me.args = SimpleNamespace(delta=given.pop("delta", None), gradient_accumulation_steps=1)
        me.model, me.accelerator = SimpleNamespace(training=True), Accelerator()
        for name, value in (defaults | given).items():
            setattr(me, name, value)
        me._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, None)
        me._compute_rollout_offpolicy_metrics = lambda *_: {}
        me._compute_is_correction_metrics = lambda *_: {}
        rows = SimpleNamespace(
            completion_mask=batch.mask, truncated_mask=[False] * len(leaf), ref_per_token_logps=batch.ref,
            advantages=batch.advantages[:, None].expand_as(leaf), old_per_token_logps=batch.old,
            rollout_per_token_logps=batch.sampler, num_items_in_batch=batch.mask.sum(), teacher_per_token_logps=None,
        )  # fmt: skip
        return me._compute_loss_and_metrics(None, {}, rows)[0]

    def case(name: str, **given: Any) -> None:
        record.loss(name, lambda leaf, batch: loss(leaf, batch, **given))

    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "fipo"):
        case(kind, loss_type=kind)
    case("fipo two-sided, half-life 4, safe 1.5", loss_type="fipo", fipo_gamma=2 ** (-1 / 4),
         fipo_clip_high_only=False, fipo_safety_threshold=1.5)  # fmt: skip
    case("cispo 5", loss_type="cispo", epsilon_high=5.0)
    case("grpo sequence", importance_sampling_level="sequence")
    case("grpo sequence_token", importance_sampling_level="sequence_token")
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        bound = 2.0 if mode.startswith("token") else 1.1
        case(f"dapo {mode}", loss_type="dapo", rollout_importance_sampling_mode=mode,
             rollout_importance_sampling_threshold=bound)  # fmt: skip
    case("dapo kl 0.1", loss_type="dapo", beta=0.1)
    case("dapo token_truncate kl 0.1", loss_type="dapo", beta=0.1, rollout_importance_sampling_mode="token_truncate")
    case("grpo off-policy mask 0.1", off_policy_sequence_mask_delta=0.1)
    case("bnpo off-policy mask 0.1", loss_type="bnpo", off_policy_sequence_mask_delta=0.1)
    case("dapo off-policy mask 0.1", loss_type="dapo", off_policy_sequence_mask_delta=0.1)
    case("dapo kl 0.1 off-policy mask 0.1", loss_type="dapo", beta=0.1, off_policy_sequence_mask_delta=0.1)
    record.write(taken_from="swift/rlhf_trainers/grpo_trainer.py")


# --- prime-rl -----------------------------------------------------------------------------------------------


def prime_rl(record: Record, clone: str) -> None:
    path = "src/prime_rl/trainer/rl/loss.py"
    source = Source.of_commit(clone, "prime_rl", path)
    space: dict[str, Any] = {"torch": torch, "dataclass": dataclass, "field": field}
    source.take(space, "LossInputs", "LossOutputs", decorated=True)
    source.take(space, "_safe_mean", "compute_importance_ratio_and_mismatch_kl", "compute_loss")
    source.take(space, "default_loss_fn", "ipo_loss_fn")

    def case(name: str, function: str, **given: Any) -> None:
        settings = SimpleNamespace(adv_tau=1.0, **given)

        def loss(leaf: Tensor, batch: Batch) -> Tensor:
            return space["compute_loss"](
                list(leaf), list(batch.sampler), None, list(batch.spread), list(batch.mask), None, None, None,
                rl_loss_fn=lambda inputs: space[function](inputs, settings), rl_scale=int(batch.mask.sum()),
                ce_scale=1, ref_kl_scale=1,
            )[0]  # fmt: skip

        record.loss(name, loss)

    case("ipo 0.1, 0.001", "ipo_loss_fn", ipo_threshold=0.1, kl_tau=1e-3)
    case("ipo 0.3, 0", "ipo_loss_fn", ipo_threshold=0.3, kl_tau=0.0)
    case("dppo 0.2, 0.001", "default_loss_fn", dppo_mask_low=0.2, dppo_mask_high=0.2, kl_tau=1e-3)
    case("dppo 0.2, 0", "default_loss_fn", dppo_mask_low=0.2, dppo_mask_high=0.2, kl_tau=0.0)
    record.write(taken_from=path, commit=COMMITS["prime_rl"])


# --- open-instruct ------------------------------------------------------------------------------------------


def open_instruct(record: Record, clone: str) -> None:
    path = "open_instruct/grpo_utils.py"
    source = Source.of_commit(clone, "open_instruct", path)
    models = Source.of_commit(clone, "open_instruct", "open_instruct/model_utils.py").take(
        {"torch": torch}, "estimate_kl"
    )
    means = Source.of_commit(clone, "open_instruct", "open_instruct/rl_utils.py").take({"torch": torch}, "masked_mean")
    kinds = SimpleNamespace(dapo="dapo", cispo="cispo")
    space: dict[str, Any] = {
        "torch": torch, "dataclass": dataclass, "field": field, "GRPOLossType": kinds,
        "model_utils": SimpleNamespace(**models),
    }  # fmt: skip
    source.take(space, "RhoCorrection", decorated=True)
    source.take(space, "_rho_drop_masks", "_sequence_level_mean", "compute_rho_correction", "compute_grpo_loss")

    def settings(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **{"loss_fn": "dapo", "clip_lower": 0.2, "clip_higher": 0.28, "kl_estimator": 2, "use_rho_correction": True,
               "rho_mask_sequence_level": False, "rho_mask_tv_divergence": False, "rho_mask_lower_bound": 0.0,
               "rho_mask_upper_bound": 0.0, "rho_clamp_lower_bound": 0.0, "rho_clamp_upper_bound": 0.0, **given}
        )  # fmt: skip

    def rho(batch: Batch, config: SimpleNamespace) -> Tensor:
        return space["compute_rho_correction"](batch.old, batch.sampler, batch.mask, batch.spread, config).weights

    def case(name: str, corrected: bool = True, **given: Any) -> None:
        config = settings(use_rho_correction=corrected, **given)

        def loss(leaf: Tensor, batch: Batch) -> Tensor:
            found, _, _ = space["compute_grpo_loss"](
                leaf, (leaf - batch.old).exp(), batch.spread, None, config, rho(batch, config)
            )
            return means["masked_mean"](found, batch.mask, None, batch.mask.sum())

        record.loss(name, loss)
        if corrected:
            record.values("weights", name, lambda batch: rho(batch, config))

    case("dapo", corrected=False)
    case("cispo", corrected=False, loss_fn="cispo")
    case("dapo clamp to 2", rho_clamp_upper_bound=2.0)
    case("dapo mask 0.5 to 2", rho_mask_lower_bound=0.5, rho_mask_upper_bound=2.0)
    case("dapo sequences mask 0.9 to 1.1", rho_mask_sequence_level=True, rho_mask_lower_bound=0.9,
         rho_mask_upper_bound=1.1)  # fmt: skip
    # A bound that its check refuses, because it is not above 1; the function itself takes it.
    case("vaco 0.25", rho_mask_tv_divergence=True, rho_mask_upper_bound=0.25)
    case("vaco lower bound 0.25", rho_mask_tv_divergence=True, rho_mask_lower_bound=0.25)

    check = source.statement("GRPOExperimentConfig.__post_init__", "if self.use_rho_correction:")

    def refused(**given: Any) -> bool:
        try:
            run([check], {"self": settings(rho_mask_tv_divergence=True, **given)})
        except ValueError:
            return True
        return False

    bounds = (0.05, 0.25, 1.0, 1.5)
    record.made["vaco thresholds that are refused"] = [one for one in bounds if refused(rho_mask_upper_bound=one)]
    record.write(taken_from=path, commit=COMMITS["open_instruct"])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    wanted, *more = sys.argv[1:]
    if wanted == "inputs":
        text = json.dumps(make_inputs(), separators=(",", ":")).replace(']],"', ']],\n"')
        (FOLDER / "inputs.json").write_text(text + "\n")
    else:
        given = json.loads((FOLDER / "inputs.json").read_text())
        here = Record(PACKAGES.get(wanted, wanted), {name: Batch.read(one) for name, one in given.items()})
        here.peer = wanted
        globals()[wanted](here, *more)
