"""Whole runs by the command a user types: the same seed twice, in fp32 and in bf16, and one that is killed and resumed.

The bf16 runs have rows of over 128 tokens, for which attention takes more than one block.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

from findings import ROOT, Findings, last_lines
from llama import talkative

STEPS, EVERY, KILL_AFTER = 12, 4, 6  # steps of a run, between checkpoints, and before the kill
DRIFT = 10  # how many times as far apart as two equal runs a resumed one may be, where equal runs differ at all
Line = dict[str, Any]


LONG = 160  # tokens of each response of the bf16 runs
LONG_STEPS = 3


class Repeats:
    """Runs of one seed, started together: three in fp32, of which one is killed and started again, and two in bf16."""

    def __init__(self, folder: Path, device: str, small: bool) -> None:
        self.folder, self.device, self.small = folder, device, small
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.pool = ThreadPoolExecutor(1)
        self.leaves = Event()

    def __enter__(self) -> Repeats:
        self.model = talkative(self.folder / "model", self.small, ends=False)
        for name in ("first", "second", "killed", "bf16_first", "bf16_second"):
            self._start(name)
        self.killing = self.pool.submit(self._kill_on_the_way)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leaves.set()
        self.pool.shutdown()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str) -> None:
        command = [
            sys.executable, "-m", "grpo_lab.train", "world=tiny", "tracking=none", f"device={self.device}",
            f"runs_dir={self.folder / name}", "optimizer.warmup_updates=0",
            *(self._long() if name.startswith("bf16") else (f"budget.amount={STEPS}", f"checkpoint_every={EVERY}")),
        ]  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def _long(self) -> list[str]:
        problems = 4 if self.small else 16
        return [
            "model=hf", f"model.path={self.model}", "learner_precision=bf16", "sampler_precision=bf16",
            f"engine.max_tokens={LONG}", f"problems_per_step={problems}", "group_size=4", "evaluation=brief",
            "evaluation.initial_kl=false", f"budget.amount={LONG_STEPS}",
        ]  # fmt: skip

    def _lines(self, name: str) -> list[Line]:
        files = list((self.folder / name).glob("*/seed=0/metrics.jsonl"))
        text = files[0].read_text() if files else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _said(self, name: str) -> str:
        return " / ".join(last_lines((self.folder / f"{name}.log").read_text(errors="replace"), 3))

    def _end(self, name: str) -> None:
        if self.processes[name].wait() != 0:
            raise RuntimeError(f"the run '{name}' ended with {self.processes[name].returncode}: {self._said(name)}")

    def _kill_on_the_way(self) -> int:
        """SIGKILL once enough steps are in the log, and the same command again; returns how many there were."""
        process = self.processes["killed"]
        while len(lines := self._lines("killed")) <= KILL_AFTER:
            if process.poll() is not None or self.leaves.is_set():
                raise RuntimeError(f"the run ended before it was to be killed: {self._said('killed')}")
            time.sleep(0.01)
        process.kill()
        process.wait()
        if len(self._lines("killed")) > STEPS:
            raise RuntimeError("the run ended before it was killed")
        self._start("killed")
        return len(lines) - 1

    def compare(self, found: Findings) -> None:
        """Wait for the runs; on a CPU all bits are the same, on a GPU it is said where they are not."""
        killed_after = self.killing.result()
        first, distance = self._twice(found, "same seed twice, fp32", "first", "second")
        self._end("killed")
        resumed = self._lines("killed")
        words, gap = difference(first, resumed)
        check = f"killed after step {killed_after} and resumed"
        if distance == 0:
            found.verdict(check, gap == 0, words)
        else:
            about = f"{words}; equal runs are {distance:.3g} apart"
            found.add(check, gap, "apart", at_most=DRIFT * distance, about=about)
        lines, _ = self._twice(found, f"same seed twice, bf16, {LONG} tokens", "bf16_first", "bf16_second")
        lengths = [line["metrics"]["rollout/length"] for line in lines[1:]]
        found.add("tokens of a response in bf16", min(lengths), "tokens", at_least=LONG)

    def _twice(self, found: Findings, check: str, one: str, other: str) -> tuple[list[Line], float]:
        """Compare two runs that should be the same; returns the log of one and how far they are apart."""
        for name in (one, other):
            self._end(name)
        lines = self._lines(one)
        words, distance = difference(lines, self._lines(other))
        if self.device == "cpu":
            found.verdict(check, distance == 0, words)
        else:
            found.add(check, words, "", about=f"distance {distance:.3g}")
        return lines, distance


def difference(one: list[Line], other: list[Line]) -> tuple[str, float]:
    """In words where two logs first differ, and the largest difference of any number as a share of it or of 1."""
    if [line["step"] for line in one] != [line["step"] for line in other]:
        return f"{len(one)} and {len(other)} steps", float("inf")
    where, widest = "", 0.0
    for left, right in zip(one, other):
        numbers, others = left["metrics"], right["metrics"]
        names = sorted(name for name in numbers.keys() | others.keys() if numbers.get(name) != others.get(name))
        if names and not where:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            where = f"differ from step {left['step']} on: {shown}"
        for name in names:
            if name not in numbers or name not in others:
                return f"step {left['step']} has {name} in one log only", float("inf")
            widest = max(widest, abs(numbers[name] - others[name]) / max(1.0, abs(numbers[name])))
    return where or "the same bits", widest
