"""Synthetic sweeps with known truths, to hold the analysis against: no model, no training, only planted numbers.

A trick adds a planted amount to the final training accuracy and to the final downstream accuracy, a pair of tricks a
planted interaction, an arm may turn over downstream at a planted share of the budget, a run may collapse. Noise is of
the kinds real runs have: of the seed (shared by its arms, and each arm's own), of the drawn responses of every
step, and of the answers to every question. Every table, record and question of such a sweep says SYNTHETIC.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.sources.answers import COLUMNS
from grpo_lab.analysis.sources.sweep_data import RunData, SweepData, assemble
from grpo_lab.config.design import Design, read_design
from grpo_lab.tracking.files import atomic_write, write_json
from grpo_lab.tracking.sweep_record import RunEntry, SweepRecord, read_sweep, record_sweep

SUITES = {"probe": 0.01, "heldout_training": 0.0, "heldout": 0.06}  # offset of each to the training accuracy
DOWNSTREAM = "downstream"
COMMAND = ["SYNTHETIC", "tests/planted_sweeps.py"]


@dataclass(frozen=True)
class Planted:
    """The truths of a synthetic sweep; accuracies are shares, `onset` and `collapse` shares of the budget.

    `training` and `downstream` map a trick to what it adds to the final value, a pair of tricks to what both together
    add beyond that. `falls` maps an arm to the downstream accuracy it loses from `onset` to the end. `collapse` maps
    (arm, seed) to where that run stops on a loss that is not finite. With `bases`, seed i starts from base i % bases:
    bases deviate by `base_sd`, and the effect of every arm but the control's by `base_effect_sd` between them.
    """

    tricks: tuple[str, ...] = ("helps", "hurts", "null")
    kind: str = "two_sided"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    training: Mapping[str | tuple[str, str], float] = field(default_factory=dict)
    downstream: Mapping[str | tuple[str, str], float] = field(default_factory=dict)
    falls: Mapping[str, float] = field(default_factory=dict)
    onset: float = 0.5
    collapse: Mapping[tuple[str, int], float] = field(default_factory=dict)
    start: float = 0.3
    end: float = 0.6
    downstream_start: float = 0.3
    downstream_end: float = 0.45
    steps: int = 100
    every: int = 10
    tokens_per_step: int = 4000
    rows: int = 128
    questions: int = 128
    samples: int = 2
    midpoint: float = 0.25  # share of the budget
    steepness: float = 1.5
    seed_sd: float = 0.02
    own_sd: float = 0.01
    bases: int = 0
    base_sd: float = 0.0
    base_effect_sd: float = 0.0
    name: str = "synthetic"

    def base_of(self, seed: int) -> int:
        """The base of a run's seed; -1 for a sweep of one base."""
        return self.seeds.index(seed) % self.bases if self.bases else -1

    @cached_property
    def design(self) -> Design:
        """The declaration of the sweep."""
        return read_design(self.node())

    def node(self) -> dict[str, Any]:
        """The declaration as an experiment's file would hold it."""
        return {
            "name": self.name,
            "question": "SYNTHETIC: are the planted effects found, and is nothing found where nothing was planted?",
            "prediction": "They are.",
            "kind": self.kind,
            "tricks": {trick: [f"synthetic.{trick}=1"] for trick in self.tricks},
            "primary": "eval/downstream/accuracy",
            "axis": "sampled_tokens",
            "seeds": list(self.seeds),
            "predictions": [
                {
                    "arm": f"+{trick}",
                    "metric": "eval/downstream/accuracy",
                    "direction": "above" if size > 0 else "below",
                }
                for trick, size in self.downstream.items()
                if isinstance(trick, str) and f"+{trick}" in self.arms_of_kind()
            ],
        }

    def arms_of_kind(self) -> list[str]:
        """The arms, the control first."""
        bare = {"kind": self.kind, "tricks": {trick: [f"synthetic.{trick}=1"] for trick in self.tricks}}
        fixed = {"name": "x", "question": "x", "prediction": "x", "primary": "x", "axis": "x", "seeds": [0]}
        return list(read_design(bare | fixed).arms)

    def added(self, effects: Mapping[str | tuple[str, str], float], arm: str) -> float:
        """What an arm's tricks add to a final value, interactions included."""
        on = self.design.contents(arm)
        return float(sum(size for who, size in effects.items() if ({who} if isinstance(who, str) else set(who)) <= on))

    def rise(self, share: np.ndarray) -> np.ndarray:
        """The share of the way from start to end at shares of the budget: a sigmoid in its logarithm, 1 at the end."""
        with np.errstate(divide="ignore"):
            curve = 1 / (1 + (self.midpoint / share) ** self.steepness)
        return curve * (1 + self.midpoint**self.steepness)

    def training_truth(self, arm: str, share: np.ndarray) -> np.ndarray:
        """Expected training accuracy at shares of the budget."""
        return self.start + (self.end + self.added(self.training, arm) - self.start) * self.rise(share)

    def downstream_truth(self, arm: str, share: np.ndarray) -> np.ndarray:
        """Expected downstream accuracy at shares of the budget."""
        end = self.downstream_end + self.added(self.downstream, arm)
        fallen = self.falls.get(arm, 0.0) * np.clip((share - self.onset) / (1 - self.onset), 0.0, 1.0)
        return self.downstream_start + (end - self.downstream_start) * self.rise(share) - fallen


def synthetic_sweep(planted: Planted, seed: int = 0) -> SweepData:
    """The sweep in memory; `seed` draws other noise for the same truths."""
    entries = [_run_data(planted, arm, run_seed, seed) for run_seed in planted.seeds for arm in planted.design.arms]
    records = [RunEntry(entry.row["arm"], "", entry.row["seed"], entry.row["folder"]) for entry in entries]
    declared = [{"fingerprint": planted.design.fingerprint(), "at": "SYNTHETIC", "runs_started_before": 0}]
    record = SweepRecord(planted.name, "synthetic", planted.node(), declared, COMMAND, None, None, records)
    return assemble(record, entries, "SYNTHETIC numbers")


def write_synthetic(planted: Planted, runs_dir: Path, seed: int = 0) -> None:
    """The same sweep as run folders and a record, for whatever reads those."""
    data = synthetic_sweep(planted, seed)
    fingerprint = planted.design.fingerprint()
    record_sweep(
        runs_dir, planted.name, data.record.runs, None, planted.node(), fingerprint, COMMAND, None, None
    )  # fmt: skip
    points = dict(list(data.points.groupby(["arm", "seed"])))
    answers = dict(list(data.answers.groupby(["arm", "seed"])))
    for row in data.runs.itertuples():
        folder = Path(runs_dir) / row.folder
        described = {"run_key": row.run_key, "commit": None, "dirty": None, "seed": row.seed, "synthetic": True}
        described |= {"tags": {"base": row.base}} if row.base >= 0 else {}
        write_json(folder / "run.json", described)
        _write_steps(folder, points[row.arm, row.seed])
        _write_answers(folder, answers[row.arm, row.seed])
        if row.status == "done":
            own = points[row.arm, row.seed]
            last = own.loc[own["step"].idxmax(), [name for name in own if name.startswith("eval/")]].dropna().to_dict()
            write_json(folder / "DONE", {"no_ops": row.no_ops, "steps": int(own["step"].max()), "last": last})
        else:
            atomic_write(folder / "error.txt", f"{row.problem}\n")


def describe_runs(runs: Path, name: str) -> None:
    """Complete run.json of a synthetic sweep's runs, as the loop writes it and a mirror needs it."""
    for entry in read_sweep(runs / "sweeps" / name).runs:
        path = runs / entry.folder / "run.json"
        added = {
            "name": f"s{entry.seed} {entry.arm}",
            "recipe": "plain",
            "choices": {"truncation": "score"},
            "config": {"task.name": "arithmetic", "optimizer.lr": 1e-3},
            "tracking": None,
            "commit": "0" * 40,
            "dirty": False,
            "sweep_folder": os.path.relpath(runs / "sweeps" / name, path.parent),
            "tags": {"sweep": name, "arm": entry.arm},
        }
        write_json(path, json.loads(path.read_text()) | added)


def _write_steps(folder: Path, points: pd.DataFrame) -> None:
    metrics = [name for name in points.columns if name not in ("level", "arm", "seed", "step")]
    lines, times = [], []
    for row in points.to_dict("records"):
        logged = {name: row[name] for name in metrics if not math.isnan(row[name])}
        seconds = logged.pop("budget/device_seconds")
        lines.append(json.dumps({"step": row["step"], "metrics": logged}))
        times.append(json.dumps({"step": row["step"], "wall": 0, "timing": {"budget/device_seconds": seconds}}))
    atomic_write(folder / "metrics.jsonl", "\n".join(lines) + "\n")
    atomic_write(folder / "timing.jsonl", "\n".join(times) + "\n")


def _write_answers(folder: Path, answers: pd.DataFrame) -> None:
    (folder / "eval").mkdir(exist_ok=True)
    for step, table in answers.groupby("step"):
        rows = table.loc[table.index.repeat(table["n"])].rename(columns={"question": "problem_id"})
        sample = rows.groupby(["suite", "problem_id"]).cumcount()
        rows = rows.assign(sample=sample, outcome=(sample < rows["correct"]).astype(float), text="SYNTHETIC")
        rows.drop(columns=["n", "correct"]).to_parquet(folder / "eval" / f"step={step:06d}.parquet", index=False)


def _run_data(planted: Planted, arm: str, run_seed: int, seed: int) -> RunData:
    stops = planted.collapse.get((arm, run_seed), 1.0)
    steps = np.arange(0, max(1, round(stops * planted.steps)) + 1)
    share = steps / planted.steps
    shared = np.random.default_rng([seed, run_seed, 1])
    own = np.random.default_rng([seed, run_seed, 2, *arm.encode()])
    shift = planted.seed_sd * shared.standard_normal() + planted.own_sd * own.standard_normal()
    shift_downstream = planted.seed_sd * shared.standard_normal() + planted.own_sd * own.standard_normal()
    if planted.bases:
        base = planted.base_of(run_seed)
        level = planted.base_sd * np.random.default_rng([seed, base, 4]).standard_normal()
        other = np.random.default_rng([seed, base, 5, *arm.encode()]).standard_normal()
        level += 0.0 if arm == planted.design.control else planted.base_effect_sd * other
        shift, shift_downstream = shift + level, shift_downstream + level
    rise = planted.rise(share)
    training = np.clip(planted.training_truth(arm, share) + shift * rise, 0.01, 0.99)
    downstream = np.clip(planted.downstream_truth(arm, share) + shift_downstream * rise, 0.01, 0.99)
    points = _metrics(planted, steps, share, training, shared)
    evaluated = steps[(steps % planted.every == 0) | (steps == planted.steps)]
    scores: dict[str, np.ndarray] = {}
    tables = []
    for suite in (*SUITES, DOWNSTREAM):
        level = downstream if suite == DOWNSTREAM else np.clip(training + SUITES[suite], 0.01, 0.99)
        luck = np.random.default_rng([seed, run_seed, 3, *suite.encode()])
        tables.append(_answered(planted, suite, evaluated, level[evaluated], luck, scores))
    columns = {name: np.full(len(steps), np.nan) for name in scores}
    for name, values in scores.items():
        columns[name][evaluated] = values
    points = pd.concat([points, pd.DataFrame(columns)], axis=1)
    row = {"level": "", "arm": arm, "seed": run_seed, "folder": f"{planted.name}/{arm}/seed={run_seed}", "problem": ""}
    row |= {"status": "done", "collapsed": False, "run_key": f"SYNTHETIC {arm} {run_seed}", "mlflow_run_id": None}
    row |= {"commit": None, "dirty": None, "no_ops": [], "protocol": None, "base": planted.base_of(run_seed)}
    if stops < 1:
        row |= {"status": "failed", "collapsed": True, "problem": "FloatingPointError: SYNTHETIC collapse"}
    return RunData(row, points, pd.concat(tables, ignore_index=True)[COLUMNS])


def _metrics(
    planted: Planted, steps: np.ndarray, share: np.ndarray, training: np.ndarray, shared: np.random.Generator
) -> pd.DataFrame:
    """One row per step; the rollouts of a step are drawn by the weights of the step before."""
    count = len(steps)
    outcome = np.full(count, np.nan)
    # A seed's arms share the step's noise, as common random numbers make them.
    luck = shared.standard_normal(planted.steps + 1)[1:count]
    drawn = training[:-1]
    outcome[1:] = np.clip(drawn + luck * np.sqrt(drawn * (1 - drawn) / planted.rows), 0, 1)
    truncated = 0.3 - 0.15 * share + 0.01 * shared.standard_normal(planted.steps + 1)[:count]
    table = {
        "step": steps,
        "reward/outcome": outcome,
        "reward/mean": outcome.copy(),
        "reward/in_loss_mean": outcome.copy(),
        "reward/in_loss_outcome": outcome.copy(),
        "rollout/truncated": truncated,
        "rollout/length": 30 - 4 * share,
        "rollout/frac_zero_std": 0.3 + 0.2 * share,
        "train/entropy": 0.1 * np.exp(-2 * share) + 0.02,
        "train/approx_kl": np.full(count, 0.001),
        "mismatch/k3": np.full(count, 1e-9),
        "train/clip_fraction": np.full(count, 0.002),
        "active_fraction/truncation": np.zeros(count),
    }
    for values in table.values():
        if values is not steps:
            values[0] = np.nan  # step 0 trains on nothing
    spent = {
        "steps": 1,
        "prompts": planted.rows // 8,
        "completions": planted.rows,
        "sampled_tokens": planted.tokens_per_step,
        "trained_tokens": 0.9 * planted.tokens_per_step,
        "flops": 1e7 * planted.tokens_per_step,
        "device_seconds": 0.4,
    }
    return pd.DataFrame(table | {f"budget/{axis}": steps * float(amount) for axis, amount in spent.items()})


def _answered(
    planted: Planted,
    suite: str,
    steps: np.ndarray,
    level: np.ndarray,
    luck: np.random.Generator,
    scores: dict[str, np.ndarray],
) -> pd.DataFrame:
    """Answers to every question, with the suite's metrics put into `scores`.

    A question keeps its difficulty and its luck over steps and arms; chances average to the level exactly.
    """
    spread = np.linspace(-0.9, 0.9, planted.questions)
    chance = level[:, None] + spread * np.minimum(level, 1 - level)[:, None]
    uniform = luck.random((planted.questions, planted.samples))
    correct = (uniform[None] < chance[:, :, None]).sum(axis=2)
    means = correct / planted.samples
    scores[f"eval/{suite}/accuracy"] = means.mean(axis=1)
    if planted.questions > 1:
        scores[f"eval/{suite}/accuracy_se"] = means.std(axis=1, ddof=1) / math.sqrt(planted.questions)
    scores[f"eval/{suite}/truncated"] = np.full(len(steps), 0.2)
    if suite == "heldout_training":
        scores[f"eval/{suite}/kl_initial"] = 2.0 * steps / planted.steps
    number = len(steps)
    return pd.DataFrame(
        {
            "step": np.repeat(steps, planted.questions),
            "suite": suite,
            "question": np.tile(np.arange(planted.questions), number),
            "difficulty": 1,
            "n": planted.samples,
            "correct": correct.ravel(),
            "wanted": 0,
            "tokens": 0,
        }
    )
