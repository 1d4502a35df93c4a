"""How fast the loop is with a Llama of SmolLM2-135M's size in bf16: its stages, tokens per second, share of the peak.

    python tests/gpu/speed.py --device cuda

64 problems x 8 responses of exactly 256 tokens, four updates a step, through the real training loop; beside TRL, 128
tokens and one update, decoded eagerly on both sides. The weights are random, and no response ends before the limit.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from findings import HERE, Findings, last_lines, run_part
from lab_side import matmul_peak, timed_run
from llama import like_smollm2
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_lab.budget.compute_account import ModelFlops
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.distributed.device import prepare_torch
from grpo_lab.rollout.grading import encode_prompts, group_requests

STAGES = ("generate", "logprobs", "train", "sync")
WARMUP = 1  # steps of each run that are not counted
UPDATES = 4  # of a step, recipe=plain's
SHORT = 128  # tokens of a response where both sides decode eagerly, at most
# A training pass keeps about a megabyte a token of this model (bf16 products, fp32 residuals, 30 layers); scores are
# made 2^28 at a time.
BYTES_PER_TOKEN = 1.05e6
MEMORY_SHARE = 0.45
OTHERS_NEED = 60.0  # seconds that TRL or vLLM take at least; with less left they are not begun
LAUNCHES = 2000  # small kernels, timed together


@dataclass(frozen=True)
class Work:
    """What a step is of, and the model's cost of it."""

    found: Findings
    folder: Path
    problems: int
    group: int
    budget: int
    model_flops: ModelFlops
    peak: float

    def overrides(self, *more: str) -> list[str]:
        return [
            "recipe=plain", "world=arithmetic", "model=hf", f"model.path={self.folder}", "evaluation.max_tokens=2",
            "evaluation.downstream_max_tokens=2", f"engine.max_tokens={self.budget}", "evaluation.initial_kl=false",
            f"problems_per_step={self.problems}", f"group_size={self.group}", f"device={self.found.device}",
            "learner_precision=bf16", "sampler_precision=bf16", "optimizer.learning_rate=1e-6",
            f"engine.max_rows={self.problems * self.group}", f"microbatch_tokens={self.microbatch}",
            "padding_tolerance_tokens=4096", "logits_per_chunk=268435456", *more,
        ]  # fmt: skip

    @property
    def microbatch(self) -> int:
        """Tokens of a training pass that fit the GPU beside everything else, a power of two."""
        if self.found.device == "cpu":
            return 4096
        total = torch.cuda.get_device_properties(0).total_memory
        return 2 ** int(MEMORY_SHARE * total / BYTES_PER_TOKEN).bit_length() // 2

    def sampling(self, prompts: list[int]) -> int:
        """Model FLOPs of generating a step: each prompt read once, each token of a response fed once."""
        drawn = sum(self.group * self.model_flops.span(length, length + self.budget) for length in prompts)
        return drawn + sum(self.model_flops.span(0, length) for length in prompts)

    def forward(self, prompts: list[int]) -> int:
        """Model FLOPs of one forward pass over whole rows."""
        return sum(self.group * self.model_flops.forward(length, self.budget) for length in prompts)


def free() -> None:
    """Give back what the run before held, and count peak memory anew."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def stages(
    work: Work, name: str, steps: int, *overrides: str, updates: int = UPDATES, full: bool = True
) -> dict[str, Any]:
    """Run the loop, count that many steps and report their stages; returns what the run was.

    With one update a step the log-probs of before are those of the update, and no pass computes them. Without `full`
    responses have many lengths, and no share of the peak is reported.
    """
    free()
    result = timed_run(steps, WARMUP, work.overrides(*overrides))
    add, rows = work.found.add, result["rows"]
    wanted = work.problems * work.group * work.budget
    tokens = median(row["tokens"] for row in rows)
    bounds = {"at_least": wanted} if full else {}
    add(f"{name}: tokens of a step", tokens, "tokens", at_most=wanted, **bounds)
    prompts = [len(ids) for ids in result["setting"]["prompt_ids"][: work.problems]]
    sampled, forward = work.sampling(prompts), work.forward(prompts)

    def seconds(stage: str) -> float:
        return median(row["stages"].get(stage, 0.0) for row in rows)

    for stage in STAGES:
        add(f"{name}: {stage}", seconds(stage), "s")
    step = median(row["wall"] for row in rows)
    add(f"{name}: the whole step", step, "s")
    add(f"{name}: generated", tokens / seconds("generate"), "tokens/s")
    add(f"{name}: trained", tokens / seconds("train"), "tokens/s")
    if not full:
        return result
    add(f"{name}: sampler, of the peak", sampled / seconds("generate") / work.peak, "of it")
    add(f"{name}: learner, training, of the peak", 3 * forward / seconds("train") / work.peak, "of it")
    if updates > 1:
        add(f"{name}: learner, log-probs, of the peak", forward / seconds("logprobs") / work.peak, "of it")
    passes = 3 + (updates > 1)
    add(f"{name}: whole step, of the peak", (sampled + passes * forward) / step / work.peak, "of it")
    if "gpu_bytes" in result:
        add(f"{name}: peak memory", result["gpu_bytes"] / 2**30, "GiB")
    return result


def launch_seconds(device: str) -> float:
    """Seconds from one small kernel to the next when a program does nothing but start them."""
    tensor = torch.zeros(8, device=device)
    for _ in range(2):  # the first round loads the kernel
        if device != "cpu":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            tensor.add_(1)
        if device != "cpu":
            torch.cuda.synchronize()
    return (time.perf_counter() - started) / LAUNCHES


def beside_trl(work: Work, folder: Path, with_one: dict[str, Any]) -> None:
    """TRL's GRPOTrainer on the same problems as a run of ours."""
    source, target, log = folder / "setting.json", folder / "trl.json", folder / "trl.log"
    source.write_text(json.dumps(with_one["setting"]))
    free()
    command = [sys.executable, HERE.parent / "benchmarks" / "trl_side.py", target, source, str(WARMUP)]
    with log.open("w") as sink:
        done = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"TRL's side ended with {done.returncode}: {' / '.join(last_lines(log.read_text(), 2))}")
    rows = json.loads(target.read_text())["rows"]
    ours, theirs = (median(row["wall"] for row in some) for some in (with_one["rows"], rows))
    work.found.add("TRL: the whole step", theirs, "s")
    work.found.add("TRL: generate", median(row["stages"]["generate"] for row in rows), "s")
    work.found.add("TRL's step by the lab's", theirs / ours, "times")


def by_vllm(work: Work) -> None:
    """vLLM's generation of one step, after one that warms it up; without graphs, which take it a minute to build."""
    room = ["engine.cache_gib=0"] if work.found.device == "cuda" else []
    run = to_run(compose_config(work.overrides("engine=vllm", "tracking=none", *room)))
    problems = list(run.task.problems("train")[: work.problems])
    prompts = encode_prompts(AutoTokenizer.from_pretrained(work.folder), run.template, problems)
    session = run.engine.open(work.folder, run.sampler_precision, prepare_torch(run.device, run.threads))
    for number in range(2):
        requests = group_requests(problems, prompts, work.group, run.engine.params, 0, "gpu", number)
        started = time.perf_counter()
        tokens = sum(len(completion.tokens) for completion in session.generate(requests))
        seconds = time.perf_counter() - started
    session.close()
    work.found.add("vLLM: generated", tokens / seconds, "tokens/s")
    work.found.add("vLLM: sampler, of the peak", work.sampling(list(map(len, prompts))) / seconds / work.peak, "of it")


def beside_others(work: Work, short: Work, folder: Path) -> None:
    """Eager decoding with one update a step, and TRL and vLLM where they are installed and time is left."""
    with_one = stages(short, f"eager, {short.budget} tokens, one update", 1, "updates=one", updates=1)
    others: dict[str, tuple[str, Callable[[], None]]] = {
        "trl": ("TRL's GRPOTrainer", lambda: beside_trl(short, folder, with_one)),
        "vllm": ("vLLM's generation", lambda: by_vllm(work)),
    }
    for module, (name, run) in others.items():
        if importlib.util.find_spec(module) is None:
            work.found.leave_out(name, f"{module} is not installed")
        elif work.found.seconds_left < OTHERS_NEED:
            work.found.leave_out(name, f"{work.found.seconds_left:.0f} s were left: give --patience 3")
        else:
            free()
            with work.found.guarded(name):
                run()


def prepared(found: Findings, folder: Path) -> Work:
    """Sizes of the model in `folder` and of a step, and the matmul peak of this device."""
    ready = like_smollm2(folder / "model", found.small)
    with torch.device("meta"):
        cost = ModelFlops.of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ready)))
    found.add("weights in matrix products", cost.weights, "weights")
    peak = matmul_peak(found.device, torch.bfloat16)
    found.add("bf16 matmul peak", peak / 1e12, "TFLOP/s")
    problems, group, budget = (4, 4, 12) if found.small else (64, 8, 256)
    return Work(found, ready, problems, group, budget, cost, peak)


def measure(found: Findings) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = prepared(found, folder)
        found.add("tokens of a training pass, at most", work.microbatch, "tokens")
        found.add("from one small kernel to the next", 1e6 * launch_seconds(found.device), "us")
        if found.device == "cpu":
            found.leave_out("decoding by CUDA graphs", "a CPU records none")
            with found.guarded("eager decoding"):
                stages(work, "eager", 1)
        else:
            with found.guarded("CUDA graphs"):
                stages(work, "graphs", 2, "engine.cuda_graphs=true")
        with found.guarded("eager decoding, one update"):
            beside_others(work, replace(work, budget=min(work.budget, SHORT)), folder)


if __name__ == "__main__":
    run_part(measure)
