"""Parts of a step by themselves: generation beside others' generation, the learner's passes, and memory.

    python parts_side.py result.json generation BUDGET ROUNDS       the lab, transformers.generate, vLLM, taking turns
    python parts_side.py result.json learner ROUNDS                 FLOPs per second of a 3 M model's training passes
    python parts_side.py result.json memory ROWS VOCABULARY PLAIN   peak memory of one training pass

`bench.py` starts this in a process of its own, with the number of threads set.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lab_side import matmul_peak
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_lab.budget.compute_account import ModelFlops
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.distributed.device import prepare_torch
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.packing import Microbatching, prepare
from grpo_lab.rollout.grading import encode_prompts, group_requests
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.types import Completion, Request

PROBLEMS, GROUP = 16, 8
WIDTH, LAYERS, HEADS = 256, 4, 8  # of the 3 M model: 2.9 M weights with a vocabulary of 512
SHORTEST, LONGEST, PROMPT = 32, 160, 16  # tokens of its rows, evenly spread


def requests_of(run: RunConfig, number: int) -> list[Request]:
    """The requests of a step of the plain recipe."""
    tokenizer = AutoTokenizer.from_pretrained(run.model.resolve())
    problems = run.task.problems("train")[:PROBLEMS]
    prompts = encode_prompts(tokenizer, run.template, problems)
    return group_requests(problems, prompts, GROUP, run.engine.params, run.seed, "bench", number)


def by_transformers(run: RunConfig) -> Callable[[list[Request]], int]:
    """transformers.generate on the whole batch, padded on the left; returns how many tokens it drew."""
    folder = run.model.resolve()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id

    def generate(requests: list[Request]) -> int:
        width = max(len(request.prompt) for request in requests)
        ids = torch.full((len(requests), width), padding)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        drawn = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=run.engine.max_tokens, eos_token_id=end, pad_token_id=padding,
        )[:, width:]  # fmt: skip
        ended = (drawn == end).int()
        return int(((ended.cumsum(1) - ended) == 0).sum())

    return generate


def by_engine(run: RunConfig) -> Callable[[list[Request]], int]:
    """One of the lab's engines; returns how many tokens it drew."""
    session = run.engine.open(run.model.resolve(), run.sampler_precision, torch.device("cpu"))

    def generate(requests: list[Request]) -> int:
        completions: list[Completion] = session.generate(requests)
        return sum(len(completion.tokens) for completion in completions)

    return generate


def generation(budget: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each side in each round; they take turns, on the same prompts."""
    fixed = ["world=arithmetic", f"engine.max_tokens={budget}", "tracking=none", "device=cpu"]
    native = to_run(compose_config(fixed))
    prepare_torch(native.device, native.threads)
    sides = {"native": by_engine(native), "transformers": by_transformers(native)}
    if importlib.util.find_spec("vllm") is not None:
        sides["vllm"] = by_engine(to_run(compose_config([*fixed, "engine=vllm", "engine.max_rows=128"])))
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        requests = requests_of(native, number)
        for name, generate in sides.items():
            started = time.perf_counter()
            tokens = generate(requests)
            measured[name].append({"seconds": time.perf_counter() - started, "tokens": tokens})
    return {"budget": budget, "sides": {name: runs[1:] for name, runs in measured.items()}}  # the first warms up


def small_llama(vocabulary: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH + WIDTH // 2,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            max_position_embeddings=512, tie_word_embeddings=True,
        )
    )  # fmt: skip


def training_pass(model: torch.nn.Module, rows: int, vocabulary: int, cut: Microbatching) -> int:
    """One forward and backward pass over rows of different lengths; returns its FLOPs without padding."""
    lengths = torch.linspace(SHORTEST - PROMPT, LONGEST - PROMPT, rows).round().long()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, mask.shape, generator=generator)
    # Prompts of their own: a prompt that is shared would be read once, and the count below is of whole rows.
    prompts = [tuple(torch.randint(vocabulary, (PROMPT,), generator=generator).tolist()) for _ in range(rows)]
    logprobs, _ = token_logprobs(model, prompts, tokens, mask, 1.0, Fp32(LmHead.same, 1e-4), microbatching=cut)
    logprobs[mask].mean().backward()
    model.zero_grad(set_to_none=True)
    cost = ModelFlops.of(model)
    return 3 * sum(cost.forward(PROMPT, int(length)) for length in lengths)


def cut_of(plain: bool) -> Microbatching:
    run = to_run(compose_config(["world=tiny"]))
    return Microbatching(
        run.microbatch_tokens, run.padding_tolerance_tokens, None if plain else run.logits_per_chunk, not plain
    )


def learner(rounds: int) -> dict[str, Any]:
    """FLOPs per second of training passes on tokens that are no padding, beside the peak measured in the same turns."""
    model = small_llama(512)
    prepare(model)
    cut = cut_of(plain=False)
    rates, peaks = [], []
    for _ in range(rounds + 1):
        peaks.append(matmul_peak())
        started = time.perf_counter()
        flops = sum(training_pass(model, 40, 512, cut) for _ in range(4))
        rates.append(flops / (time.perf_counter() - started))
    return {"rates": rates[1:], "peaks": peaks[1:], "weights": sum(p.numel() for p in model.parameters())}


def memory(rows: int, vocabulary: int, plain: bool) -> dict[str, Any]:
    """How much one training pass adds to the process's peak memory, in bytes; `plain` makes all scores at once."""
    model = small_llama(vocabulary)
    cut = cut_of(plain)
    if not plain:
        prepare(model)
    training_pass(model, 1, vocabulary, cut)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    training_pass(model, rows, vocabulary, cut)
    return {"bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def main() -> None:
    target, part, *words = sys.argv[1:]
    parts = {"generation": generation, "learner": learner, "memory": memory}
    Path(target).write_text(json.dumps(parts[part](*map(int, words))))


if __name__ == "__main__":
    main()
