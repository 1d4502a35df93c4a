"""What one question costs on a cluster: the grid of models and GPUs, tails, weight sync, and others' reports.

All numbers start from numbers.yaml. Nothing was run on these GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from notebook_tables.noise_statistics import seeds_needed
from scipy.optimize import brentq

from cluster_cost.roofline import Efficiency, Gpu, Learner, send
from cluster_cost.schedules import Cluster, Lengths, StepTime, Workload, simulate
from grpo_lab.analysis.stats.power import difference_sd
from grpo_lab.budget.model_shape import ModelShape
from grpo_lab.tricks.schedule import InFlight, OneStepOff, Schedule, Sync

SYNC, ONE_STEP, IN_FLIGHT = SCHEDULES = ("synchronous", "one step off", "in flight")
PARTS = ("generation", "training", "stragglers", "moving", "waiting")
TOLERATED = 0.1  # of a step, for sending weights
MODEL, GPUS = "7B", 64  # of which a sentence, a table or a figure speaks that shows one row
_SPLITS = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the GPUs that generate
_HOUR = 3600


@dataclass(frozen=True)
class Scenario:
    """A model on GPUs under a schedule: the split of the GPUs with the shortest step, and that step."""

    model: str
    schedule: str
    cluster: Cluster
    step: StepTime


@dataclass(frozen=True)
class Study:
    """The numbers of the YAML file, and what follows from them. Every property is computed once."""

    given: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> Study:
        given = yaml.safe_load(path.read_text())
        assert isinstance(given, dict)
        return cls({str(key): value for key, value in given.items()})

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        return {name: ModelShape(**shape) for name, shape in self.given["models"].items()}

    @cached_property
    def gpus(self) -> dict[str, Gpu]:
        given: dict[str, Any] = self.given["gpus"]
        sheets: dict[str, dict[str, Any]] = {
            name: {key: float(one) for key, one in gpu.items()} for name, gpu in given.items()
        }
        return {name: Gpu(**sheet) for name, sheet in sheets.items()}

    @cached_property
    def efficiency(self) -> Efficiency:
        return Efficiency(**{name: float(value) for name, value in self.given["efficiency"].items()})

    @cached_property
    def runs(self) -> int:
        """Runs that a question takes: its arms, by the seeds that find its effect with 80% power."""
        question = self.given["question"]
        return question["arms"] * seeds_needed(
            question["effect"], difference_sd(question["sd"], question["correlation"])
        )

    def schedule(self, name: str) -> Schedule:
        if name == SYNC:
            return Sync()
        return OneStepOff(lag=self.given["lag"]) if name == ONE_STEP else InFlight(max_lag=self.given["max_lag"])

    def work(self, **other: Any) -> Workload:
        """The workload of a step; `other` replaces numbers of `work` in the file. `cap` sets the mean, too."""
        given = {**self.given["work"], **other}
        cap = given.get("cap") or round(given["mean"] * given["cap_over_mean"])
        mean = given["mean"] if "cap" not in other or "mean" in other else cap / given["cap_over_mean"]
        names = ("problems", "group_size", "prompt", "updates", "reads", "checkpoint_every")
        lengths = Lengths.truncated(float(mean), cap, given["truncated"])
        return Workload(**{name: given[name] for name in names}, lengths=lengths)

    def scenario(self, model: str, gpus: int, name: str, gpu: str = "H100", work: Workload | None = None) -> Scenario:
        """The fastest split. Raises ValueError where the model fits no split."""
        work = work or self.work()
        found = [
            Scenario(model, name, cluster, simulate(cluster, self.schedule(name), work, steps=8, skip=6))
            for cluster in self._splits(model, gpus, name, gpu)
        ]
        if not found:
            raise ValueError(f"{model} does not fit {gpus} {gpu} under {name}: take more GPUs")
        return min(found, key=lambda scenario: scenario.step.seconds)

    def _splits(self, model: str, gpus: int, name: str, gpu: str) -> list[Cluster]:
        whole = Cluster(self.shapes[model], self.gpus[gpu], self.efficiency, gpus)
        size = whole.engine.gpus
        splits = {0} if name == SYNC else {size * round(share * gpus / size) for share in _SPLITS} - {0, gpus}
        clusters = [replace(whole, generating=generating) for generating in sorted(splits)]
        return [cluster for cluster in clusters if cluster.learner.fits != "no"]

    def gpu_hours(self, scenario: Scenario) -> float:
        """GPU-hours of a whole question."""
        return self.runs * self.given["question"]["steps"] * scenario.step.seconds * scenario.cluster.gpus / _HOUR

    @cached_property
    def grid(self) -> pd.DataFrame:
        """A row per model, number of H100 and schedule: step, GPU-hours, dollars, days, and what GPUs do."""
        rows = []
        for model in self.shapes:
            for gpus in self.given["gpu_counts"]:
                for name in SCHEDULES:
                    scenario = self.scenario(model, gpus, name)
                    hours = self.gpu_hours(scenario)
                    rows.append(
                        {"model": model, "gpus": gpus, "schedule": name, "generating": scenario.cluster.generating}
                        | {"fits": scenario.cluster.learner.fits, "step": scenario.step.seconds, "gpu_hours": hours}
                        | {"dollars": hours * self.given["price"], "days": hours / gpus / 24, **scenario.step.shares()}
                    )
        return pd.DataFrame(rows)

    def row(self, model: str, gpus: int, schedule: str) -> pd.Series:
        """One row of the grid."""
        table = self.grid
        return table[(table.model == model) & (table.gpus == gpus) & (table.schedule == schedule)].iloc[0]

    @cached_property
    def memory(self) -> pd.DataFrame:
        """A row per model and kind of GPU: bytes, seconds of a decoding step, the fewest GPUs that train it."""
        rows = []
        for model, shape in self.shapes.items():
            for name in ("H100", "H200"):
                whole = Cluster(shape, self.gpus[name], self.efficiency, 8)
                fewest = {
                    word: next(n for n in range(1, 65) if Learner(shape, whole.gpu, self.efficiency, n).fits in words)
                    for word, words in (("trains", ("yes",)), ("offloaded", ("yes", "offloaded")))
                }
                rows.append(
                    {"model": model, "gpu": name, "weights": shape.weights / 1e9, "kv": shape.kv_bytes / 1e3}
                    | {"engine": whole.engine.gpus, "cache": whole.engine.cache_tokens / 1e6}
                    | {"one": 1e3 * whole.engine.step(1, 0), "many": 1e3 * whole.engine.step(256, 256 * 4096), **fewest}
                )
        return pd.DataFrame(rows)

    @cached_property
    def tails(self) -> pd.DataFrame:
        """A row per model, GPUs, schedule and longest response over mean: the share of the GPUs' time not used.

        Split GPUs stay split as the grid splits them.
        """
        rows = []
        for model in self.shapes:
            for gpus in self.given["gpu_counts"]:
                for name in (SYNC, IN_FLIGHT):
                    generating = int(self.row(model, gpus, name).generating)
                    cluster = Cluster(self.shapes[model], self.gpus["H100"], self.efficiency, gpus, generating)
                    for ratio in self.given["caps_over_mean"]:
                        work = self.work(cap_over_mean=ratio)
                        step = simulate(cluster, self.schedule(name), work, steps=6, skip=6)
                        unused = step.shares()["stragglers"] + step.shares()["waiting"]
                        where = {"model": model, "gpus": gpus, "schedule": name}
                        rows.append({**where, "ratio": ratio, "unused": unused})
        return pd.DataFrame(rows)

    def half_wasted(self, model: str, gpus: int) -> float:
        """From which longest response over mean synchronous training wastes half; between points, linear.

        The smallest one where that wastes half already, NaN where none does.
        """
        table = self.tails
        own = table[(table.model == model) & (table.gpus == gpus) & (table.schedule == SYNC)]
        points = list(zip(own.ratio, own.unused))
        if points[0][1] >= 0.5:
            return float(points[0][0])
        for (left, low), (right, high) in pairwise(points):
            if low < 0.5 <= high:
                return left + (right - left) * (0.5 - low) / (high - low)
        return math.nan

    @cached_property
    def by_cap(self) -> pd.DataFrame:
        """A row per cap on responses, whose mean is in the same proportion: GPU-hours of MODEL on GPUS."""
        rows = []
        for cap in self.given["caps"]:
            work = self.work(cap=cap)
            hours = {name: self.gpu_hours(self.scenario(MODEL, GPUS, name, work=work)) for name in (SYNC, IN_FLIGHT)}
            rows.append({"cap": cap, "mean": work.lengths.mean, **hours})
        return pd.DataFrame(rows)

    @cached_property
    def by_lag(self) -> pd.DataFrame:
        """A row per bound on staleness: GPU-hours of MODEL on GPUS in flight, half of which generate."""
        rows = []
        cluster = Cluster(self.shapes[MODEL], self.gpus["H100"], self.efficiency, GPUS, GPUS // 2)
        for lag in self.given["max_lags"]:
            step = simulate(cluster, InFlight(max_lag=lag), self.work(), steps=8, skip=lag + 2)
            rows.append({"lag": lag, "hours": self.gpu_hours(Scenario(MODEL, IN_FLIGHT, cluster, step))})
        return pd.DataFrame(rows)

    @cached_property
    def syncs(self) -> pd.DataFrame:
        """A row per model and GPUs: share of an in-flight step in which weights are sent, half of the GPUs generate.

        The step's own work shrinks with the GPUs until the longest response or the updates bound it.
        """
        rows = []
        for model in self.shapes:
            for gpus in self.given["synced_gpu_counts"]:
                cluster = Cluster(self.shapes[model], self.gpus["H100"], self.efficiency, gpus, gpus // 2)
                step = simulate(cluster, self.schedule(IN_FLIGHT), self.work(), steps=4, skip=6)
                tree, line = cluster.sync(), cluster.sync(tree=False)
                rest = step.seconds - tree
                shares = {"broadcast": tree / (rest + tree), "one by one": line / (rest + line)}
                rows.append({"model": model, "gpus": gpus, "engines": cluster.engines, **shares})
        return pd.DataFrame(rows)

    def tolerated(self, model: str, how: str) -> int:
        """The most of the GPUs asked for at which sending weights takes at most a tenth of a step; 0 for none."""
        own = self.syncs[self.syncs.model == model]
        most = 0
        for gpus, share in zip(own.gpus, own[how]):
            if share > TOLERATED:
                break
            most = gpus
        return int(most)

    @cached_property
    def compared(self) -> pd.DataFrame:
        """A row per report: what was reported, what this predicts, and predicted over reported."""
        return self.compared_to()

    def compared_to(self, kind: str = "") -> pd.DataFrame:
        """The reports of one kind, or all."""
        rows = []
        for report in self.given["reports"]:
            if kind not in ("", report["kind"]):
                continue
            predicted = self._predict(report, self.given["setups"][report["from"]])
            rows.append({**report, "predicted": predicted, "ratio": predicted / report["reported"]})
        return pd.DataFrame(rows)

    def _predict(self, report: Mapping[str, Any], setup: Mapping[str, Any]) -> float:
        shapes = {**self.shapes, **{name: ModelShape(**one) for name, one in self.given["other_models"].items()}}
        whole = Cluster(shapes[setup["model"]], self.gpus[setup["gpu"]], self.efficiency, report.get("gpus", 8))
        kind = report["kind"]
        if kind == "tokens":
            return setup["row"] / Learner(whole.shape, whole.gpu, self.efficiency, 1).train([setup["row"]], 1)
        if kind == "gpu_hours":
            total = 0.0
            for stage in setup["stages"]:
                cluster = replace(whole, gpus=stage["gpus"])
                total += (
                    stage["steps"] * stage["gpus"] * simulate(cluster, Sync(), self._workload(setup, stage)).seconds
                )
            return total / _HOUR
        work = self._workload(setup, {})
        if kind in ("generation", "read", "train"):
            return self._stage(kind, whole, work)
        in_turn = simulate(whole, Sync(), work, steps=3, skip=1).seconds
        if kind == "hours":
            return report["steps"] * in_turn / _HOUR
        streaming = setup["streaming"]
        lag, split = streaming["max_lag"], replace(whole, generating=report["generating"])
        work = replace(work, reads=streaming.get("reads", work.reads))
        return in_turn / simulate(split, InFlight(max_lag=lag), work, steps=3, skip=lag + 2).seconds

    def _stage(self, kind: str, cluster: Cluster, work: Workload) -> float:
        lengths = work.lengths.draw(np.random.default_rng(0), work.responses)
        rows = [work.prompt + length for length in lengths]
        if kind == "generation":
            return cluster.generation(lengths, work)
        return cluster.learner.read(rows) if kind == "read" else cluster.learner.train(rows, work.updates)

    def _workload(self, setup: Mapping[str, Any], stage: Mapping[str, Any]) -> Workload:
        names = ("cap", "problems", "group_size", "updates", "reads", "truncated", "mean")
        settings = {name: both[name] for both in (setup, stage) for name in names if name in both}
        if anchor := setup.get("anchor"):
            settings["mean"] = self._anchored(setup, settings, anchor)
        return self.work(**settings)

    def _anchored(self, setup: Mapping[str, Any], settings: dict[str, Any], anchor: Mapping[str, Any]) -> float:
        """The mean length at which the updates of the anchor's GPUs take as long as reported."""
        cluster = Cluster(self.shapes[setup["model"]], self.gpus[setup["gpu"]], self.efficiency, anchor["gpus"])

        def beyond(mean: float) -> float:
            return self._stage("train", cluster, self.work(**settings, mean=mean)) - anchor["updates_take"]

        found = brentq(beyond, settings["cap"] / 100, settings["cap"] / 4, xtol=1.0)
        assert isinstance(found, float)
        return found

    def anchored_mean(self, name: str) -> float:
        """The mean length that a set-up with an anchor was given."""
        setup = self.given["setups"][name]
        return self._workload(setup, {}).lengths.mean

    @cached_property
    def transfers(self) -> pd.DataFrame:
        """A row per measured weight transfer: what a broadcast of so many bytes is predicted to take."""
        rows = []
        shape, gpu = self.shapes["7B"], self.gpus["H20"]
        for one in self.given["transfers"]:
            seven = send(shape, gpu, self.efficiency, 1, one["across"])
            rows.append({**one, "predicted": seven * float(one["bytes"]) / (2 * shape.weights)})
        return pd.DataFrame(rows)
