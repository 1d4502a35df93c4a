"""Expected cost of the rest of a sweep: seconds, tokens and operations, from runs that were measured.

A run's cost is the mean over up to eight measured runs of the best source that there is, each scaled to the run's
budget. Sources, the best first:

    the same arm            finished runs of the same arm and level of this sweep, of other seeds
    other arms              finished runs of this sweep, of the same level if there are some
    pilots                  finished pilots of this sweep, of the same arm if there are some; they evaluate briefly
    runs of the same model  finished runs in runs_dir with the same options of model and engine, on the same kind of
                            device; where the budget counts steps or prompts, with batches of the same size

Scaled is by the budget's amount where both have a budget of one kind, else by what the run spent of the run's kind.
Seconds are those of stages, evaluation included, at the number of runs that then shared the machine. The start of a
process is not in them.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.distributed.device import device_kind
from grpo_lab.sweeps.planned_runs import PlannedRun
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.progress import clock
from grpo_lab.tracking.run_reader import has_ended, read_steps, saved_spending, stage_seconds
from grpo_lab.tracking.sweep_record import FILE, read_sweep, sweep_folder

_MOST = 8  # runs behind one number
_LOOKED_AT = 100  # of the newest runs in a folder, for the last source
_PER_BATCH = ("steps", "prompts")  # budgets of which a unit costs what the batch's size makes of it
_BATCH = ("problems_per_step", "group_size")
_SPENT = "budget/"
NOT_MEASURED = "no run measured yet: start one run, or the pilot"


@dataclass(frozen=True)
class RunCost:
    """Cost of a finished run: seconds of its stages, and the amount of each budget by name."""

    seconds: float
    spent: Mapping[str, float]
    axis: str
    amount: float

    def scale_to(self, planned: PlannedRun) -> float:
        """By how much more a run's budget is; NaN where this run spent nothing of that kind."""
        budget = planned.run.budget
        if budget.axis.value == self.axis:
            return budget.amount / self.amount
        spent = self.spent.get(budget.axis.value, 0.0)
        return budget.amount / spent if spent > 0 else math.nan


@dataclass(frozen=True)
class Estimate:
    """The rest of one run: seconds, sampled tokens and operations, NaN where not known; `source` in words."""

    planned: PlannedRun
    seconds: float
    tokens: float
    flops: float
    source: str


def measured(folder: Path) -> RunCost | None:
    """The cost of a finished run, from its logs; None where these do not tell.

    Of steps that were computed twice, since the run was killed, the first counts.
    """
    try:
        config = read_json(folder / "run.json", AFRESH)["config"]
        seconds, last = 0.0, None
        for record in read_steps(folder):
            seconds += stage_seconds(record.timing)
            last = record
        if last is None or seconds <= 0:
            return None
        every = {**last.metrics, **last.timing}
        spent = {name.removeprefix(_SPENT): value for name, value in every.items() if name.startswith(_SPENT)}
        axis = str(config["budget.axis"]).rpartition(".")[2]
        return RunCost(seconds, spent, axis, float(config["budget.amount"]))
    except (OSError, ValueError, KeyError):  # a damaged log is no measurement; whoever reads that run says so
        return None


def estimates(runs: Sequence[PlannedRun], pilots: Sequence[PlannedRun], name: str, runs_dir: Path) -> list[Estimate]:
    """The rest of a sweep's runs, in their order. `pilots` are the sweep's, run or not."""
    sources = _Sources([planned for planned in runs if not planned.same_as], pilots, name, runs_dir)
    todo = [planned for planned in runs if not planned.same_as and not has_ended(planned.folder)]
    return [_estimate(planned, *sources.of(planned)) for planned in todo]


def _estimate(planned: PlannedRun, runs: Sequence[RunCost], source: str) -> Estimate:
    scaled = [(one, scale) for one in runs if not math.isnan(scale := one.scale_to(planned))]
    budget = planned.run.budget
    left = max(0.0, 1.0 - saved_spending(planned.folder, budget.axis.value) / budget.amount)

    def mean(values: Sequence[float]) -> float:
        return left * sum(values) / len(values) if values else math.nan

    tokens = [scale * one.spent.get("sampled_tokens", math.nan) for one, scale in scaled]
    flops = [scale * one.spent.get("flops", math.nan) for one, scale in scaled]
    known = {"sampled_tokens": tokens, "flops": flops}
    if budget.axis.value in known:  # the budget itself says it
        known[budget.axis.value] = [float(budget.amount)]
    seconds = mean([scale * one.seconds for one, scale in scaled])
    return Estimate(planned, seconds, mean(known["sampled_tokens"]), mean(known["flops"]), source if scaled else "")


class _Sources:
    """Measured runs to estimate from; every folder is read at most once."""

    def __init__(self, runs: Sequence[PlannedRun], pilots: Sequence[PlannedRun], name: str, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._read: dict[Path, RunCost | None] = {}
        self._found: dict[tuple[Any, ...], tuple[list[RunCost], str]] = {}
        places = {(planned.plan.level, planned.plan.arm, planned.folder) for planned in runs}
        if (sweep_folder(runs_dir, name) / FILE).exists():  # runs of other seeds than are asked for now
            recorded = read_sweep(sweep_folder(runs_dir, name)).runs
            places |= {(entry.level, entry.arm, runs_dir / entry.folder) for entry in recorded}
        self._finished = [place for place in sorted(places) if has_ended(place[2])]
        self._pilots = [
            (planned.plan.level, planned.plan.arm, planned.folder) for planned in pilots if has_ended(planned.folder)
        ]
        self._others: list[tuple[Path, dict[str, Any]]] | None = None

    def of(self, planned: PlannedRun) -> tuple[list[RunCost], str]:
        """The measured runs of the best source for a run, and its name."""
        key = (planned.plan.level, planned.plan.arm, planned.run.budget.axis)
        if key not in self._found:
            self._found[key] = next(self._candidates(planned), ([], ""))
        return self._found[key]

    def _candidates(self, planned: PlannedRun) -> Iterator[tuple[list[RunCost], str]]:
        level, arm = planned.plan.level, planned.plan.arm
        of_sweep = (
            (self._finished, lambda at: at[:2] == (level, arm), "finished runs of the same arm"),
            (self._finished, lambda at: at[0] == level, "finished runs of other arms"),
            (self._finished, lambda at: True, "finished runs of other arms and levels"),
            (self._pilots, lambda at: at[:2] == (level, arm), "pilots of the same arm"),
            (self._pilots, lambda at: True, "pilots"),
        )
        for places, fits, words in of_sweep:
            if runs := self._measure(place[2] for place in places if fits(place)):
                yield runs, words
        if runs := self._measure(self._alike(planned)):
            yield runs, f"finished runs in {self._runs_dir} of the same model, engine and device"

    def _measure(self, folders: Iterator[Path]) -> list[RunCost]:
        runs: list[RunCost] = []
        for folder in folders:
            if folder not in self._read:
                self._read[folder] = measured(folder)
            if (run := self._read[folder]) is not None:
                runs.append(run)
            if len(runs) == _MOST:
                break
        return runs

    def _alike(self, planned: PlannedRun) -> Iterator[Path]:
        """The newest finished runs with the run's model, engine and device."""
        if self._others is None:
            done = sorted(self._runs_dir.glob("*/seed=*/DONE"), key=lambda path: path.stat().st_mtime, reverse=True)
            self._others = []
            for path in done[:_LOOKED_AT]:
                try:
                    self._others.append((path.parent, json.loads((path.parent / "run.json").read_bytes())))
                except (OSError, ValueError):
                    continue
        expected = {slot: planned.choices.get(slot) for slot in ("model", "engine")}
        device = device_kind(planned.run.device)
        for folder, described in self._others:
            choices, config = described.get("choices", {}), described.get("config", {})
            same = all(choices.get(slot) == option for slot, option in expected.items())
            if planned.run.budget.axis.value in _PER_BATCH:
                same = same and all(config.get(name) == getattr(planned.run, name) for name in _BATCH)
            if same and device in (None, described.get("identity", {}).get("device")):
                yield folder


def wall_seconds(seconds: Sequence[float], workers: int) -> float:
    """How long runs take that start in this order, as many at once as there are workers."""
    ends = [0.0] * min(workers, max(1, len(seconds)))
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def estimate_lines(found: Sequence[Estimate], workers: int) -> list[str]:
    """Total of the rest, and the runs that it is estimated from."""
    if not found:
        return ["nothing is left to run"]
    known = [one for one in found if not math.isnan(one.seconds)]
    lines = []
    if known:
        seconds = [one.seconds for one in known]
        of = "" if len(known) == len(found) else f"{len(known)} of the "
        lines.append(
            f"left to run: {of}{len(found)} runs take about {clock(wall_seconds(seconds, workers))} with {workers} at "
            f"once ({clock(sum(seconds))} one after another), without the start of each process"
        )
    else:
        lines.append(f"left to run: {len(found)} runs; {NOT_MEASURED}")
    amounts = (
        (sum(one.tokens for one in found), "sampled tokens"),
        (sum(one.flops for one in found), "floating point operations"),
    )
    if spent := [f"{amount:.3g} {words}" for amount, words in amounts if not math.isnan(amount)]:
        lines.append(f"  they spend about {' and '.join(spent)}")
    sources = Counter(one.source for one in found)
    lines += [f"  {number} estimated from {source}" for source, number in sources.items() if source]
    if known and sources[""]:
        lines.append(f"  {sources['']} not estimated: {NOT_MEASURED}")
    return lines
