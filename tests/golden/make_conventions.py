"""Makes conventions.json: what the code of five frameworks computes where their conventions differ.

The functions and statements of each framework are taken from a clone of it at the commit below and run on fixed inputs;
nothing of them is kept here, and nothing of grpo_lab is imported. The file is made once, for
tests/tricks/test_conventions_recorded.py:

    for repo in verl-project/verl NVIDIA-NeMo/RL huggingface/trl OpenRLHF/OpenRLHF allenai/open-instruct; do
        git clone --bare https://github.com/$repo /tmp/frameworks/$(basename $repo); done
    python tests/golden/make_conventions.py /tmp/frameworks

A later release whose numbers are the same is added to "same in", from the folder with its package:

    python tests/golden/make_conventions.py SITE_PACKAGES trl 1.16.0
"""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

COMMITS = {
    "verl": "1dda039b9c6311889a9c9a26040677e1254814f9",
    "RL": "7ea279abfbeb698b092856d0dab61e7cf39bc909",
    "trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "OpenRLHF": "3c3be6234e0cb353e76bb8019947db9dfe99fca7",
    "open-instruct": "e6c3044aa6201c8bfa4573c1b03142af599e730d",
}
INPUTS = {
    "logprob": -4.0,
    "ref - logprob": [-45.0, -25.0, -12.0, -3.5, -1.0, 0.0, 0.5, 2.0, 2.25, 2.5, 3.5, 12.0, 25.0, 45.0],
    "log ratios": [-25.0, -3.0, -0.3, 0.0, 0.15, 0.25, 0.5, 2.0, 12.0, 25.0],
    "clip": {"low": 0.2, "high": 0.28, "dual": 3.0},
    "rewards": [[1, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0], [0, 2e-6] * 4],
    "tied rewards in fp32": [[0.7] * 12, [0.9] * 12],
    "losses of 1 and of 3 tokens": [[1.0, 0.0, 0.0], [2.0, 2.0, 2.0]],
    "k1 of tokens": [[0.1, -0.2, 0.4], [0.3, 0.0, 0.0]],
}
LOGP = torch.full((len(INPUTS["ref - logprob"]),), INPUTS["logprob"], dtype=torch.float64)
GAPS = torch.tensor(INPUTS["ref - logprob"], dtype=torch.float64)
RATIOS = torch.tensor([INPUTS["log ratios"]] * 2, dtype=torch.float64)
FAR = torch.full_like(RATIOS, 12.0)
SIGNS = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(RATIOS.shape)  # advantages of the two rows
ALL = torch.ones_like(RATIOS)
LOSSES = torch.tensor(INPUTS["losses of 1 and of 3 tokens"], dtype=torch.float64)
MASK = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)


class Source:
    """One file of a framework."""

    def __init__(self, home: Path, repo: str, path: str) -> None:
        if (home / path).exists():  # a package
            self.tree = ast.parse((home / path).read_text())
            return
        show = ["git", "-C", str(home / repo), "show", f"{COMMITS[repo]}:{path}"]
        self.tree = ast.parse(subprocess.run(show, check=True, capture_output=True, text=True).stdout)

    def node(self, name: str) -> Any:
        """A function or class, or `Class.method`."""
        found = self.tree
        for part in name.split("."):
            found = next(one for one in ast.walk(found) if getattr(one, "name", None) == part)
        return found

    def take(self, space: dict[str, Any], *names: str) -> dict[str, Any]:
        """The functions and classes of these names in a namespace, without their decorators."""
        for name in names:
            node = self.node(name)
            node.decorator_list = []
            run([node], space)
        return space

    def statement(self, within: str, begins: str, number: int = 0) -> ast.stmt:
        """The n-th statement of a function whose text begins so."""
        nodes = [one for one in ast.walk(self.node(within)) if isinstance(one, ast.stmt)]
        return [one for one in nodes if ast.unparse(one).startswith(begins)][number]


def run(statements: Sequence[ast.stmt], space: dict[str, Any]) -> dict[str, Any]:
    """Execute statements of a framework in a namespace."""
    body = ast.parse("from __future__ import annotations").body + list(statements)
    exec(compile(ast.fix_missing_locations(ast.Module(body, [])), "framework", "exec"), space)
    return space


def space_of(**more: Any) -> dict[str, Any]:
    return {"torch": torch, "np": np, "math": math, "nn": torch.nn, "defaultdict": defaultdict, **more}


def numbers(values: torch.Tensor | np.ndarray) -> list:
    return torch.as_tensor(values).double().tolist()


def with_gradient(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> dict[str, list]:
    """The values of a function of log-probs, and the gradient of their sum."""
    leaf = at.clone().requires_grad_()
    values = function(leaf)
    values.sum().backward()
    return {"value": numbers(values.detach()), "gradient": numbers(leaf.grad)}


def kls(estimate: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor], *names: str) -> dict[str, Any]:
    return {name: with_gradient(lambda logp, name=name: estimate(logp, LOGP + GAPS, name), LOGP) for name in names}


def losses(loss: Callable[[torch.Tensor], torch.Tensor], log_ratios: torch.Tensor = RATIOS) -> list:
    """The gradient of each token's loss, for a function of log-probs [2, K] whose old log-probs are -1."""
    leaf = (log_ratios - 1).clone().requires_grad_()
    loss(leaf).sum().backward()
    return numbers(leaf.grad)


def verl(home: Path) -> dict[str, Any]:
    core = Source(home, "verl", "verl/trainer/ppo/core_algos.py")
    means = Source(home, "verl", "verl/utils/torch_functional.py").take(space_of(), "masked_sum", "masked_mean")
    space = core.take(
        space_of(verl_F=SimpleNamespace(**means), ActorConfig=SimpleNamespace, AlgoConfig=dict),
        "kl_penalty_forward", "agg_loss", "compute_policy_loss_vanilla", "compute_policy_loss_cispo",
        "compute_policy_loss_gspo", "compute_policy_loss_geo_mean", "compute_policy_loss_clip_cov",
        "compute_grpo_outcome_advantage",
    )  # fmt: skip
    clip = INPUTS["clip"]
    config = SimpleNamespace(
        clip_ratio=clip["low"], clip_ratio_low=clip["low"], clip_ratio_high=clip["high"], global_batch_info={},
        get=lambda name, other: {"clip_ratio_c": clip["dual"]}.get(name, other),
        policy_loss=SimpleNamespace(clip_cov_ratio=0.1, clip_cov_lb=0.0, clip_cov_ub=1e9),
    )  # fmt: skip

    def policy(name: str, rows: slice = slice(None), scale: float = ALL.numel()) -> Callable:
        function = space[f"compute_policy_loss_{name}"]
        return lambda logp: scale * function(
            -ALL[rows], logp[rows], SIGNS[rows], ALL[rows], loss_agg_mode="token-mean", config=config
        )[0]  # fmt: skip

    def advantages(rewards: torch.Tensor) -> list:
        index = np.arange(rewards.numel()) // rewards.shape[1]
        return numbers(
            space["compute_grpo_outcome_advantage"](
                rewards.reshape(-1, 1), torch.ones(rewards.numel(), 1, dtype=rewards.dtype), index
            )[0].reshape(rewards.shape)
        )

    def clip_cov(seed: int) -> list:
        torch.manual_seed(seed)
        return losses(policy("clip_cov"))

    return {
        "kl": kls(space["kl_penalty_forward"], "k1", "k2", "k3"),
        "dual_clip": losses(policy("vanilla")),
        "cispo": losses(policy("cispo")),
        "gspo at 12 nats": losses(policy("gspo", scale=1.0), FAR),
        "gmpo": losses(policy("geo_mean", scale=1.0)),
        "gmpo by rows": losses(
            lambda logp: sum(policy("geo_mean", slice(row, row + 1), 1.0)(logp) for row in range(2))
        ),
        "clip_cov by seed": [clip_cov(0), clip_cov(1)],
        "sequence_mean": float(space["agg_loss"](LOSSES, MASK, "seq-mean-token-mean")),
        **both_advantages(advantages),
    }


def both_advantages(advantages: Callable[[torch.Tensor], list]) -> dict[str, Any]:
    """Those of ordinary groups in float64, and of groups of equal rewards in fp32."""
    return {
        "advantages": advantages(torch.tensor(INPUTS["rewards"], dtype=torch.float64)),
        "advantages of ties": advantages(torch.tensor(INPUTS["tied rewards in fp32"])),
    }


def nemo_rl(home: Path) -> dict[str, Any]:
    utils = Source(home, "RL", "nemo_rl/algorithms/utils.py").take(
        space_of(), "calculate_kl", "calculate_baseline_and_std_per_prompt", "masked_mean"
    )
    loss = Source(home, "RL", "nemo_rl/algorithms/loss/loss_functions.py")
    estimator = Source(home, "RL", "nemo_rl/algorithms/advantage_estimator.py").take(utils, "GRPOAdvantageEstimator")
    where = "ClippedPGLossFn.__call__"
    weights = loss.statement(where, "if self.use_on_policy_kl_approximation:")
    parts = [
        loss.statement(where, "if self.force_on_policy_ratio:", 1),
        loss.statement(where, "if self.use_cispo:"),
        loss.statement(where, "if self.ratio_clip_c is not None:"),
    ]

    def weighted(logp: torch.Tensor, ref: torch.Tensor, name: str) -> torch.Tensor:
        known = run(
            [weights],
            space_of(self=SimpleNamespace(use_on_policy_kl_approximation=False), curr_logprobs_unfiltered=logp),
        )
        return utils["calculate_kl"](logp, ref, name, importance_sampling_weights=known["kl_importance_weights"])

    def clipped(cispo: bool, dual: float | None) -> list:
        me = SimpleNamespace(
            force_on_policy_ratio=False, disable_ppo_ratio=False, sequence_level_importance_ratios=False,
            ratio_clip_min=INPUTS["clip"]["low"], ratio_clip_max=INPUTS["clip"]["high"], ratio_clip_c=dual,
            use_cispo=cispo,
        )  # fmt: skip
        return losses(
            lambda logp: run(parts, space_of(self=me, curr_logprobs=logp, prev_logprobs=-ALL, advantages=SIGNS))[
                "clip_loss"
            ]
        )

    def advantages(leave_one_out: bool) -> Callable[[torch.Tensor], list]:
        config = SimpleNamespace(use_leave_one_out_baseline=leave_one_out, normalize_rewards=True)

        def of(rewards: torch.Tensor) -> list:
            prompts = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])[:, None]
            flat = rewards.flatten()
            # Its masks are fp32, so float64 rewards meet them only as fp32.
            found = estimator["GRPOAdvantageEstimator"](config, None).compute_advantage(
                prompts, flat.float(), torch.ones(len(flat), 1)
            )
            return numbers(found.reshape(rewards.shape))

        return of

    return {
        "kl": kls(utils["calculate_kl"], "k1", "k2", "k3"),
        "kl with its score function": kls(weighted, "k2", "k3"),
        "dual_clip": clipped(False, INPUTS["clip"]["dual"]),
        "ppo": clipped(False, None),
        "cispo": clipped(True, None),
        "sequence_mean": float(
            utils["masked_mean"](utils["masked_mean"](LOSSES, MASK, dim=-1), torch.ones(2, dtype=torch.float64))
        ),
        **both_advantages(advantages(True)),
        "advantages with its group mean": advantages(False)(torch.tensor(INPUTS["rewards"])),
    }


def trl(home: Path) -> dict[str, Any]:
    trainer = Source(home, "trl", "trl/trainer/grpo_trainer.py")
    utils = Source(home, "trl", "trl/trainer/utils.py").take(space_of(), "nanstd")
    where = "GRPOTrainer._compute_loss"
    estimate = trainer.statement(where, "per_token_kl = torch.exp")
    token, ratio = trainer.statement(where, "log_importance_weights = log_ratio"), trainer.statement(where, "coef_1 =")
    kind = trainer.statement(where, "if self.loss_type == 'cispo'")
    mean = trainer.statement(where, "if self.loss_type in ['grpo', 'sapo']")
    scaled = "GRPOTrainer._generate_and_score_completions"
    grouped = [
        trainer.statement(scaled, "mean_grouped_rewards = torch.nanmean"),
        trainer.statement(scaled, "mean_grouped_rewards = mean_grouped_rewards.repeat"),
        trainer.statement(scaled, "if self.scale_rewards in ['group', 'none']"),
        trainer.statement(scaled, "advantages = rewards - mean_grouped_rewards"),
        trainer.statement(scaled, "if self.scale_rewards != 'none'"),
    ]

    def of_kind(name: str, high: float, delta: float | None = None) -> list:
        me = SimpleNamespace(
            loss_type=name, epsilon_low=INPUTS["clip"]["low"], epsilon_high=high, args=SimpleNamespace(delta=delta)
        )
        return losses(
            lambda logp: run(
                [token, ratio, kind],
                space_of(self=me, log_ratio=logp + 1, per_token_logps=logp, advantages=SIGNS),
            )["per_token_loss"]
        )

    def k3(logp: torch.Tensor, ref: torch.Tensor, name: str) -> torch.Tensor:
        return run([estimate], space_of(ref_per_token_logps=ref, per_token_logps=logp))["per_token_kl"]

    def advantages(rewards: torch.Tensor) -> list:
        known = dict(utils, self=SimpleNamespace(scale_rewards="group"), num_generations=rewards.shape[1])
        return numbers(run(grouped, known | {"rewards": rewards.flatten()})["advantages"].reshape(rewards.shape))

    me = SimpleNamespace(loss_type="grpo", current_gradient_accumulation_steps=1)
    return {
        "kl": kls(k3, "k3"),
        "ppo": of_kind("grpo", INPUTS["clip"]["high"]),
        "dual_clip": of_kind("grpo", INPUTS["clip"]["high"], INPUTS["clip"]["dual"]),
        "cispo": of_kind("cispo", 1 + INPUTS["clip"]["high"]),
        "sequence_mean": float(run([mean], space_of(self=me, per_token_loss=LOSSES, mask=MASK, mode="train"))["loss"]),
        **both_advantages(advantages),
    }


def openrlhf(home: Path) -> dict[str, Any]:
    utils = Source(home, "OpenRLHF", "openrlhf/models/utils.py").take(
        space_of(), "compute_approx_kl", "masked_mean", "compute_reward"
    )
    Source(home, "OpenRLHF", "openrlhf/models/loss.py").take(utils, "aggregate_loss", "PolicyLoss")
    maker = Source(home, "OpenRLHF", "openrlhf/trainer/ppo_utils/experience_maker.py")
    maker.take(utils, "get_cumulative_returns")
    clip = INPUTS["clip"]

    def policy(dual: float | None) -> list:
        loss = utils["PolicyLoss"](clip["low"], clip["high"], dual)
        return losses(lambda logp: ALL.numel() * loss(logp, -ALL, SIGNS, ALL)[0])

    def shaped(estimator: str) -> Callable[[torch.Tensor], list]:
        where = "compute_advantages_and_returns"
        step = maker.statement(where, "if args.algo.advantage.estimator == 'rloo'")

        def of(rewards: torch.Tensor) -> list:
            args = SimpleNamespace(
                algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator)),
                rollout=SimpleNamespace(n_samples_per_prompt=rewards.shape[1]),
            )
            return numbers(run([step], space_of(args=args, rewards=rewards))["rewards"])

        return of

    charges, ones = torch.tensor(INPUTS["k1 of tokens"], dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    reward = utils["compute_reward"](torch.tensor([1.0, -1.0], dtype=torch.float64), 0.5, charges, ones)
    returns = utils["get_cumulative_returns"](None, reward, ones, 1.0)
    return {
        "kl": kls(utils["compute_approx_kl"], "k1", "k2", "k3"),
        "ppo": policy(None),
        "dual_clip": policy(clip["dual"]),
        "sequence_mean": float(utils["aggregate_loss"](LOSSES, MASK, token_level_loss=False)),
        **both_advantages(shaped("group_norm")),
        "returns with k1 at 0.5 of rewards 1 and -1": numbers(returns),
    }


def open_instruct(home: Path) -> dict[str, Any]:
    models = Source(home, "open-instruct", "open_instruct/model_utils.py").take(space_of(), "estimate_kl")
    kinds = SimpleNamespace(dapo="dapo", cispo="cispo")
    space = Source(home, "open-instruct", "open_instruct/grpo_utils.py").take(
        space_of(model_utils=SimpleNamespace(**models), GRPOLossType=kinds), "compute_grpo_loss"
    )
    loader = Source(home, "open-instruct", "open_instruct/data_loader.py")
    begins = (
        "mean_grouped_rewards = scores_per_prompt.mean", "mean_grouped_rewards = np.repeat",
        "std_grouped_rewards = scores_per_prompt.std", "std_grouped_rewards = np.repeat",
        "if self.config.advantage_normalization_type == 'standard'",
    )  # fmt: skip
    owner = next(
        f"{node.name}.{inner.name}"
        for node in ast.walk(loader.tree)
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and "std_grouped_rewards = scores_per_prompt.std" in ast.unparse(inner)
    )
    steps = [loader.statement(owner, text) for text in begins]

    def kl(logp: torch.Tensor, ref: torch.Tensor, name: str) -> torch.Tensor:
        config = SimpleNamespace(loss_fn="dapo", clip_lower=0.2, clip_higher=0.2, kl_estimator=int(name[1]) - 1)
        one = torch.ones_like(logp)
        return space["compute_grpo_loss"](logp, one, one, ref, config, one)[2]

    def policy(kind: str) -> list:
        config = SimpleNamespace(
            loss_fn=kind, clip_lower=INPUTS["clip"]["low"], clip_higher=INPUTS["clip"]["high"], kl_estimator=2
        )
        return losses(
            lambda logp: space["compute_grpo_loss"](logp, (logp + 1).exp(), SIGNS, None, config, ALL.clone())[0]
        )

    def advantages(rewards: torch.Tensor) -> list:
        scores, width = rewards.numpy().astype(np.float64), rewards.shape[1]
        config = SimpleNamespace(num_samples_per_prompt_rollout=width, advantage_normalization_type="standard")
        known = space_of(self=SimpleNamespace(config=config), scores=scores.flatten(), scores_per_prompt=scores)
        return numbers(run(steps, known)["advantages"].reshape(scores.shape))

    return {
        "kl": kls(kl, "k1", "k2", "k3"),
        "ppo": policy("dapo"),
        "cispo": policy("cispo"),
        **both_advantages(advantages),
    }


if __name__ == "__main__":
    home, *release = sys.argv[1:]
    file, clones = Path(__file__).with_name("conventions.json"), Path(home)
    if release:
        framework, version = release
        made = json.loads(file.read_text())
        assert json.loads(json.dumps(globals()[framework](clones))) == made[framework], "other numbers"
        made.setdefault("same in", {})[framework] = version
    else:
        made = {
            "commits": COMMITS,
            "inputs": INPUTS,
            "verl": verl(clones),
            "nemo_rl": nemo_rl(clones),
            "trl": trl(clones),
            "openrlhf": openrlhf(clones),
            "open_instruct": open_instruct(clones),
        }
    file.write_text(json.dumps(made, separators=(",", ":")) + "\n")
