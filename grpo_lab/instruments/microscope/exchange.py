"""The exchange format: one step's rollouts as a table, of a run of ours or of another framework.

One row per response. `COLUMNS` describes every column; analysis/microscope.md documents them for other frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from grpo_lab.types import Float, Graded, Problem, Rollouts, Tensor, to_groups


class Column(NamedTuple):
    """A column of the exchange format; `default` says what stands for it where it is missing, "" if it is needed."""

    dtype: str
    default: str
    meaning: str


COLUMNS = {
    "problem_id": Column("int or string", "", "group: responses to one prompt; every group has equally many"),
    "response": Column("int", "row order", "number of the response in its group, from 0"),
    "prompt_ids": Column("list of int", "none; needed for gradients in weights", "token ids of the prompt"),
    "token_ids": Column("list of int", "", "token ids of the response, with its stop token"),
    "tokens": Column("list of string", "the ids", "text of each token, for the heat map"),
    "reward": Column("float", "", "reward of the response, shaped, before KL penalties"),
    "outcome": Column("float", "1 where reward > 0.5", "1 right, 0 wrong, NaN where the grader failed"),
    "truncated": Column("bool", "false", "no end-of-text token within the length limit"),
    "in_statistics": Column("bool", "true", "counts in the group's and the batch's mean and deviation"),
    "in_loss": Column("bool", "true", "is in the loss"),
    "token_sampled": Column("list of bool", "true", "sampled by the policy, not injected"),
    "token_logprob": Column("list of float", "", "log-prob in nats under the policy that sampled it"),
    "token_old_logprob": Column("list of float", "token_logprob", "under the learner before this step's updates"),
    "token_current_logprob": Column("list of float", "token_old_logprob", "under the learner at the gradient"),
    "token_ref_logprob": Column("list of float", "none; needed by kl", "under the reference policy"),
    "token_entropy": Column("list of float", "none; needed by entropy", "entropy in nats, learner at the gradient"),
    "token_ratio": Column("list of float", "written, not read", "exp(token_current_logprob - token_old_logprob)"),
    "token_advantage": Column("list of float", "written, not read", "advantage in the loss of the run's own options"),
    "token_in_loss": Column("list of bool", "written, not read", "in the loss of the run's own options"),
}
NEEDED = [name for name, column in COLUMNS.items() if not column.default]
_POLICIES = {
    "old": "token_old_logprob",
    "current": "token_current_logprob",
    "reference": "token_ref_logprob",
    "entropy": "token_entropy",
}


@dataclass(frozen=True)
class StoredStep:
    """One step's rollouts with their rewards, as tensors.

    `graded` is the record before rejection and KL in the reward. `texts` are each row's tokens. `policies` has the
    log-probs [N, T] that the table holds: "old" (the learner before the updates), "current", "reference"; and "entropy"
    of the current policy.
    """

    step: int
    rollouts: Rollouts
    graded: Graded
    texts: list[list[str]]
    policies: dict[str, Float[Tensor, "N T"]]
    notes: tuple[str, ...] = ()


def read_file(path: Path) -> pd.DataFrame:
    """A table of the exchange format from a .parquet or .jsonl file. Raises ValueError with a remedy."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a run's folder, or a .parquet or .jsonl file of rollouts")
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        return pd.read_json(path, lines=True, precise_float=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as rollouts ({str(error).splitlines()[0]}): write .parquet, or .jsonl with one "
            "response a line"
        ) from error


def write_file(table: pd.DataFrame, path: Path) -> None:
    """Write a table of the exchange format; the suffix, .parquet or .jsonl, chooses the kind of file."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--write {path}: end the name in .parquet or .jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=True, double_precision=15)


def with_policies(table: pd.DataFrame, step: StoredStep) -> pd.DataFrame:
    """The table with the log-probs of old and current policy that a step holds, and their ratio, in float32."""
    old, current = (step.policies[name] for name in ("old", "current"))
    new = {_POLICIES[name]: values for name, values in step.policies.items()}
    new["token_ratio"] = (current - old).exp()
    lengths = step.rollouts.lengths.tolist()
    return table.assign(
        **{name: [row[:end] for row, end in zip(values.numpy(), lengths)] for name, values in new.items()}
    )


def to_step(table: pd.DataFrame, source: object, part_weights: dict[str, float] | None = None) -> StoredStep:
    """The table as tensors. Raises ValueError that names the column, the row and the remedy.

    `part_weights`: weights of the parts of the reward, which gdpo reads.
    """
    if lacking := [name for name in NEEDED if name not in table]:
        raise ValueError(
            f"{source} has no column {', '.join(lacking)}: analysis/microscope.md says what each holds. Rollouts that "
            "an earlier version saved have no token ids; run again, or grpo-lab reproduce RUN"
        )
    if "step" in table and table["step"].nunique() > 1:
        raise ValueError(f"{source} has rows of {table['step'].nunique()} steps: give one with --step")
    if not len(table):
        raise ValueError(f"{source} has no row: give a table with at least one group of responses")
    groups = pd.factorize(table["problem_id"])[0]
    table = table.iloc[np.argsort(groups, kind="stable")].reset_index(drop=True)
    sizes = table.groupby("problem_id", sort=False).size()
    if sizes.nunique() > 1:
        raise ValueError(
            f"{source} has groups of {sizes.min()} to {sizes.max()} responses: every problem_id needs equally many; "
            "leave smaller groups out, or set in_statistics and in_loss to false for rows that fill them up"
        )
    size, notes = int(sizes.iloc[0]), []
    lengths = [len(ids) for ids in table["token_ids"]]
    if 0 in lengths:
        raise ValueError(f"{source}: row {lengths.index(0)} has no token in token_ids: leave its group out")

    def ragged(name: str, dtype: torch.dtype) -> Tensor:
        padded = torch.zeros(len(table), max(lengths), dtype=dtype)
        for row, values in enumerate(table[name]):
            if np.ndim(values) != 1 or len(values) != lengths[row]:
                raise ValueError(
                    f"{source}: row {row} has {lengths[row]} token_ids and a {name} of another length: give one value "
                    "per token"
                )
            found = torch.from_numpy(np.array(values, dtype=float))
            if not torch.isfinite(found).all():
                raise ValueError(f"{source}: row {row} has a {name} that is not finite: recompute or leave it out")
            padded[row, : lengths[row]] = found.to(dtype)
        return padded

    def by_group(name: str, default: Any) -> Tensor:
        values = table[name] if name in table else pd.Series([default] * len(table))
        return to_groups(torch.from_numpy(np.array(values, dtype=type(default))), size)

    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    sampled = ragged("token_sampled", torch.bool) if "token_sampled" in table else mask
    truncated, reward = by_group("truncated", False), by_group("reward", 0.0)
    if not torch.isfinite(reward).all():
        raise ValueError(f"{source} has a reward that is no finite number: set it to 0, and in_statistics to false")
    if "outcome" not in table:
        notes.append("no column outcome: a reward above 0.5 counts as right")
    judged = by_group("outcome", 0.0) if "outcome" in table else (reward > 0.5).double()
    named = [name for name in map(str, table.columns) if name.startswith("component_")]
    parts = {name.removeprefix("component_"): by_group(name, 0.0) for name in named}
    penalty = parts.pop("k1", None)
    if penalty is not None:  # the reward before the KL penalty in it
        reward = torch.stack(list(parts.values())).sum(dim=0) if parts else reward - penalty
    sampler = ragged("token_logprob", torch.float32)
    kept = {name: f"kept_{name}" if f"kept_{name}" in table else name for name in ("in_statistics", "in_loss")}
    graded = Graded(
        correctness=judged.nan_to_num(0.0),
        reward=reward,
        components=parts or {"reward": reward},
        lengths=to_groups(torch.tensor(lengths), size),
        sampled_lengths=to_groups(sampled.sum(dim=1), size),
        truncated=truncated,
        in_statistics=by_group(kept["in_statistics"], True),
        in_loss=by_group(kept["in_loss"], True),
        failed=judged.isnan() if judged.isnan().any() else None,
        part_weights=part_weights or {},
        logprob=to_groups(torch.where(sampled, sampler.double(), 0.0).sum(dim=1), size),
    )
    firsts = table.iloc[::size]
    whole = pd.api.types.is_integer_dtype(table["problem_id"])
    ids = [int(one) for one in firsts["problem_id"]] if whole else list(range(len(firsts)))
    prompts = [tuple(map(int, ids)) for ids in firsts["prompt_ids"]] if "prompt_ids" in table else [()] * len(firsts)
    texts = table["tokens"] if "tokens" in table else [[f"{one} " for one in ids] for ids in table["token_ids"]]
    rollouts = Rollouts(
        problems=tuple(Problem(id, question, answer, 0) for id, question, answer in zip(
            ids, _texts(firsts, "question"), _texts(firsts, "answer"))),
        prompts=tuple(prompts),
        group_size=size,
        tokens=ragged("token_ids", torch.long),
        response_mask=mask,
        sampled_mask=sampled,
        sampler_logprobs=sampler,
        weight_version=torch.zeros_like(mask, dtype=torch.long),
        finished=~truncated.flatten(),
        looped=torch.zeros(len(table), dtype=torch.bool),
    )  # fmt: skip
    policies = {name: ragged(column, torch.float32) for name, column in _POLICIES.items() if column in table}
    step = int(table["step"].iloc[0]) if "step" in table else 1
    return StoredStep(step, rollouts, graded, [list(map(str, row)) for row in texts], policies, tuple(notes))


def _texts(table: pd.DataFrame, name: str) -> Sequence[str]:
    return [str(one) for one in table[name]] if name in table else [""] * len(table)


def with_logprobs(step: StoredStep, **found: Float[Tensor, "N T"]) -> StoredStep:
    """The step with further log-probs or entropies."""
    return replace(step, policies={**step.policies, **found})
