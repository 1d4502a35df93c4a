"""One timed training run of grpo_lab, and what it saw: step times, tokens, FLOPs, problems.

    python lab_side.py result.json steps warmup override...      train and write result.json
    python lab_side.py result.json --peak device type            measure a device's matmul peak

`bench.py` starts this in a process of its own, with the number of threads set.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.distributed.device import prepare_torch
from grpo_lab.loop import open_run, train
from grpo_lab.rollout.grading import encode_prompts
from grpo_lab.rollout.groups import ProblemSource
from grpo_lab.run.recorder import Recorder
from grpo_lab.run.state import RunState
from grpo_lab.tracking.progress import RunProgress
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tricks.curriculum import Memory

PEAK_SIZES = (512, 1024, 2048)
GPU_PEAK_SIZES = (4096, 8192)
PEAK_SECONDS = 1.0  # for each size
# Nothing but training steps: no mirror, no saving, and the smallest evaluations a run accepts, at step 0 and the end.
QUIET = (
    "tracking=none", "checkpoint_every=1000000", "evaluation.every=1000000", "evaluation.probe_problems=2",
    "evaluation.heldout_problems=2", "evaluation.downstream_problems=2",
)  # fmt: skip


@dataclass
class Stamped(Recorder):
    """A recorder that also notes wall and CPU time at the end of every step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def record(self, *step: Any) -> None:
        super().record(*step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def matmul_peak(device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """The best FLOPs per second of square matrix products, on a CPU at torch's number of threads."""
    best = 0.0
    for size in PEAK_SIZES if device == "cpu" else GPU_PEAK_SIZES:
        left, right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty(size, size, device=device, dtype=dtype)
        ends = time.perf_counter() + PEAK_SECONDS
        while time.perf_counter() < ends:
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def read(path: Path, section: str) -> dict[int, dict[str, float]]:
    """One section of a run's log, by step."""
    return {line["step"]: line[section] for line in map(json.loads, path.read_text().splitlines())}


def timed_run(steps: int, warmup: int, overrides: list[str]) -> dict[str, Any]:
    """Train `warmup + steps` steps and one more, whose record holds the last evaluation and is dropped."""
    total = warmup + steps
    run = to_run(compose_config([*overrides, *QUIET, "budget=steps", f"budget.amount={total + 1}"]))
    device = prepare_torch(run.device, run.threads)
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder)) as log, RunProgress("bench") as progress:
        progress.show = lambda *_: None  # the driver shows the progress
        recorder = Stamped(run.record_settings, log, progress, "benchmark")
        with open_run(run, device) as (state, queue, _):
            train(run, state, queue, recorder)
        logged = {name: read(log.folder / f"{name}.jsonl", name) for name in ("metrics", "timing")}
    rows = []
    for step in range(warmup + 1, total + 1):
        metrics, timing = logged["metrics"][step], logged["timing"][step]
        stages = {name.removeprefix("time/"): value for name, value in timing.items() if name.startswith("time/")}
        stages.pop("tokens_per_second")
        wall = recorder.wall[step] - recorder.wall[step - 1]
        rows.append(
            {
                "wall": wall,
                "cpu": recorder.cpu[step] - recorder.cpu[step - 1],
                "stages": stages | {"log": wall - sum(stages.values())},
                "tokens": round(metrics["rollout/length"] * run.problems_per_step * run.group_size),
                "reward": metrics["reward/outcome"],
                "flops": metrics["budget/flops"] - logged["metrics"][step - 1]["budget/flops"],
            }
        )
    result = {"rows": rows, "setting": setting(run, state, total), "threads": torch.get_num_threads()}
    return result | ({"gpu_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {})


def setting(run: RunConfig, state: RunState, total: int) -> dict[str, Any]:
    """What the other side needs to do the same work: model, problems in order, and the numbers."""
    memory, number = Memory.of(len(state.problems)), run.problems_per_step
    source = ProblemSource.of(run.curriculum, run.task.mixture, state.problems, number, run.seed)
    drawn = [
        state.problems[index]
        for step in range(total)
        for index in source.draw(number, memory, step / total, frozenset())
    ]
    optimizer = run.optimizer
    return {
        "device": state.device.type,
        "bf16": run.learner_precision.dtype is torch.bfloat16,
        "model": str(run.model.resolve()),
        "prompts": [run.template.render(problem.question, state.tokenizer) for problem in drawn],
        "prompt_ids": [list(ids) for ids in encode_prompts(state.tokenizer, run.template, drawn)],
        "answers": [problem.answer for problem in drawn],
        "correct": run.reward.correct,
        "wrong": run.reward.wrong,
        "problems_per_step": run.problems_per_step,
        "group_size": run.group_size,
        "max_tokens": run.engine.max_tokens,
        "temperature": run.engine.temperature,
        "top_p": run.engine.top_p,
        "seed": run.seed,
        "learning_rate": optimizer.learning_rate,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "clip_low": run.surrogate.clip_low,
        "clip_high": run.surrogate.clip_high,
    }


def main() -> None:
    target, first, *rest = sys.argv[1:]
    if first == "--peak":
        device, dtype = rest
        result: dict[str, Any] = {"peak": matmul_peak(device, getattr(torch, dtype))}
    else:
        result = timed_run(int(first), int(rest[0]), rest[1:])
    Path(target).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
