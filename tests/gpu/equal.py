"""Whether a GPU computes what a CPU computes: losses, gradients, log-probs, drawn tokens, whole runs.

python tests/gpu/equal.py --device cuda
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from findings import Findings, run_part
from helpers import Scene, inputs_of, make_run, marked, random_scene, share_of
from llama import talkative
from repeat import Repeats
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.distributed.device import on_device, prepare_torch
from grpo_lab.engines.native_attention import filled_keys_difference, takes_filled_keys
from grpo_lab.policy.batching import StepInputs, make_minibatch, rollout_logprobs
from grpo_lab.policy.fused_head import fused_logprobs
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.models import load_model
from grpo_lab.policy.packing import prepare, uses_varlen
from grpo_lab.rollout.grading import encode_prompts, group_requests, to_rollouts
from grpo_lab.types import Batch, Completion, Microbatching, Request, Rollouts

GROUP = 4
EXACT = 1e-9  # float64, as a share of the number or of 1
SINGLE = 1e-5  # float32 against float64
LOGPROB = 1e-4  # nats, any token, fp32
WEIGHTS = 1e-4  # gradient of all weights, fp32, as a share of its length
ROUNDED_WEIGHTS = 0.1  # the same in bf16


# --- losses and gradients -----------------------------------------------------------------------------------


def composed(*overrides: str) -> RunConfig:
    return to_run(compose_config(["world=tiny", "tracking=none", *overrides]))


def options_of(axis: str) -> dict[str, object]:
    """Every option of an axis with the numbers of its YAML."""
    names = sorted(path.stem for path in (conf_folder() / axis).glob("*.yaml"))
    return {name: getattr(composed(f"{axis}={name}"), axis) for name in names}


def loss_and_gradient(
    run: RunConfig, inputs: StepInputs, scene: Scene, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss of a step in several microbatches, and its gradient [N, T] with respect to the log-probs, in float64."""

    def cast(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    leaf = scene.logprobs.detach().clone().to(device, dtype).requires_grad_()
    problems = range(inputs.rollouts.num_rows // inputs.rollouts.group_size)
    batches = [
        on_device(Batch(**{name: cast(value) for name, value in vars(batch).items()}), device)
        for batch in make_minibatch(inputs, problems, run.denominator, Microbatching(128, 192))
    ]
    loss = sum(share_of(run, batch, leaf) for batch in marked(run, batches, leaf.detach(), inputs.rollouts))
    loss.backward()
    return loss.detach().double().cpu(), leaf.grad.double().cpu()


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest number of the other; of 1 where that is a loss near 0."""
    largest = other.abs().max()
    return float((one - other).abs().max() / (largest if other.ndim else largest.clamp(min=1)))


def losses(found: Findings) -> None:
    """Every surrogate with every aggregation, with weights, a KL term and masked rows in the background."""
    device, scene = torch.device(found.device), random_scene(1, problems=6, group_size=4, longest=24, padding=3)
    others = composed("kl=k3_loss", "correction=tis_token", "truncation=mask_after", "denominator=survivors")
    background = {axis: getattr(others, axis) for axis in ("kl", "correction", "truncation", "denominator")}
    pairs = list(product(options_of("surrogate").items(), options_of("aggregation").items()))
    widest: dict[tuple[str, torch.dtype], tuple[float, str]] = {}
    for (surrogate, rule), (aggregation, adding) in pairs:
        run = make_run(surrogate=rule, aggregation=adding, **background)
        inputs = inputs_of(run, scene)
        expected = loss_and_gradient(run, inputs, scene, torch.device("cpu"), torch.float64)
        for dtype in (torch.float64, torch.float32):
            computed = loss_and_gradient(run, inputs, scene, device, dtype)
            for quantity, have, want in zip(("loss", "gradient"), computed, expected):
                gap, key = apart(have, want), (quantity, dtype)
                if key not in widest or not gap <= widest[key][0]:
                    widest[key] = (gap, f"surrogate={surrogate} aggregation={aggregation}")
    found.add("surrogates x aggregations compared", len(pairs), "pairs", at_least=1)
    for (quantity, dtype), (gap, where) in widest.items():
        name, bound = ("float64", EXACT) if dtype is torch.float64 else ("float32", SINGLE)
        found.add(f"{quantity}, {name} against float64 on the CPU", gap, "of it", at_most=bound, about=where)


# --- log-probs and drawn tokens -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A random model in its folder and what is asked of it."""

    folder: Path
    device: torch.device
    small: bool

    def run(self, *overrides: str) -> RunConfig:
        budget = 24 if self.small else 96
        return composed("model=hf", f"model.path={self.folder}", f"engine.max_tokens={budget}", *overrides)

    def requests(self, run: RunConfig) -> tuple[list, tuple[tuple[int, ...], ...], list[Request]]:
        """Prompts of different lengths, several responses to each."""
        problems = list(run.task.problems("train")[: 4 if self.small else 16])
        prompts = encode_prompts(AutoTokenizer.from_pretrained(self.folder), run.template, problems)
        return problems, prompts, group_requests(problems, prompts, GROUP, run.engine.params, 0, "gpu", 0)

    def draw(self, run: RunConfig) -> list[Completion]:
        """The native engine's responses."""
        session = run.engine.open(self.folder, run.sampler_precision, self.device)
        completions = session.generate(self.requests(run)[2])
        session.close()
        return completions

    def rollouts(self, run: RunConfig) -> Rollouts:
        problems, prompts, _ = self.requests(run)
        return to_rollouts(problems, prompts, GROUP, self.draw(run))

    @torch.no_grad()
    def by_transformers(self, rollouts: Rollouts, dtype: torch.dtype) -> Tensor:
        """Log-probs [N, T] by a plain forward pass over each row alone."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).to(self.device).eval()
        logprobs = torch.zeros_like(rollouts.sampler_logprobs)
        for row, length in enumerate(rollouts.lengths.tolist()):
            prompt = torch.tensor(rollouts.prompt_of_row(row))
            response = rollouts.tokens[row, :length]
            ids = torch.cat([prompt, response])[None].to(self.device)
            scores = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            picked = scores.log_softmax(-1).gather(1, response[:, None].to(self.device))
            logprobs[row, :length] = picked.squeeze(1).cpu()
        return logprobs

    def by_learner(self, run: RunConfig, rollouts: Rollouts, packs: bool, fuses: bool = False) -> Tensor:
        """Log-probs [N, T] by the learner, rows packed or padded, head fused or not, several forward passes of each."""
        model = load_model(self.folder, run.learner_precision.lm_head).to(self.device)
        if packs and not prepare(model):
            raise ValueError("the model cannot be packed")
        cut = Microbatching(1024, 64, logits_per_chunk=4096, packs=packs, fuses_head=fuses)
        return rollout_logprobs(model, rollouts, 1.0, run.learner_precision, cut, self.device, with_entropy=False)[0]

    def gradient(self, run: RunConfig, rollouts: Rollouts, packs: bool, fuses: bool = False) -> Tensor:
        """Gradient of the mean log-prob with respect to all weights, as one vector."""
        model = load_model(self.folder, run.learner_precision.lm_head).to(self.device)
        if packs:
            prepare(model)
        rows = range(rollouts.num_rows)
        tokens, mask = rollouts.tokens.to(self.device), rollouts.sampled_mask.to(self.device)
        prompts = [rollouts.prompt_of_row(row) for row in rows]
        cut = Microbatching(10**6, 64, 4096, packs, fuses_head=fuses)
        logprobs, _ = token_logprobs(
            model, prompts, tokens, mask, 1.0, run.learner_precision, with_entropy=False, microbatching=cut
        )
        logprobs[mask].mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double().cpu()


def compare_logprobs(found: Findings, bench: Bench) -> None:
    """Four ways to the log-probs of the same tokens, against plain transformers in fp32."""
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        run = bench.run(f"learner_precision={precision}", f"sampler_precision={precision}")
        rollouts = bench.rollouts(run)
        mask, expected = rollouts.sampled_mask, bench.by_transformers(rollouts, torch.float32)
        found.add(f"{precision}: tokens compared", int(mask.sum()), "tokens", at_least=50)
        ways: dict[str, Callable[[], Tensor]] = {
            "sampler": lambda r=rollouts: r.sampler_logprobs,
            "learner, packed": lambda r=rollouts, c=run: bench.by_learner(c, r, True),
            "learner, padded": lambda r=rollouts, c=run: bench.by_learner(c, r, False),
            "learner, fused head": lambda r=rollouts, c=run: bench.by_learner(c, r, True, True),
        }
        if precision == "bf16":
            ways["transformers in bf16"] = lambda r=rollouts: bench.by_transformers(r, torch.bfloat16)
        for name, way in ways.items():
            with found.guarded(f"{precision}: {name}"):
                gap = (way() - expected)[mask].abs().double()
                words = f"mean {gap.mean():.2e}, max {gap.max():.2e}"
                if dtype is torch.float32:
                    found.add(f"{precision}: {name}, max", float(gap.max()), "nats", at_most=LOGPROB, about=words)
                else:
                    allowed = run.sampler_precision.agreement
                    found.add(f"{precision}: {name}, mean", float(gap.mean()), "nats", at_most=allowed, about=words)
                    found.add(f"{precision}: {name}, max", float(gap.max()), "nats")
        with found.guarded("gradient of the weights"):
            bound = WEIGHTS if precision == "fp32" else ROUNDED_WEIGHTS
            plain = bench.gradient(run, rollouts, True)
            for name, other in (("packed against padded", (False,)), ("plain head against fused", (True, True))):
                gap = float((bench.gradient(run, rollouts, *other) - plain).norm() / plain.norm())
                found.add(f"{precision}: gradient of the weights, {name}", gap, "of it", at_most=bound)


def compare_head(found: Findings, device: torch.device) -> None:
    """The fused head in float64, fp32 and bf16 against float64 on the CPU: log-probs, entropies and both gradients."""
    width, vocabulary, temperature, cpu = 64, 3000, 0.7, torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(vocabulary + 200, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (200,), generator=generator)

    def fused(place: torch.device, dtype: torch.dtype) -> list[Tensor]:
        head = nn.Linear(width, vocabulary, bias=False, device=place, dtype=dtype)
        head.weight.data.copy_(drawn[:vocabulary] / 8)
        hidden = drawn[vocabulary:].to(place, dtype).requires_grad_()
        picked, entropy = fused_logprobs(head, hidden, targets.to(place), temperature, True, 64)
        (picked.sum() + entropy.sum()).backward()
        return [one.detach().double().cpu() for one in (picked, entropy, hidden.grad, head.weight.grad)]

    expected = fused(cpu, torch.float64)
    for dtype, bound in ((torch.float64, EXACT), (torch.float32, SINGLE), (torch.bfloat16, ROUNDED_WEIGHTS)):
        gaps = [apart(one, other) for one, other in zip(fused(device, dtype), expected)]
        about = "log-probs, entropies, gradients of states and weights: " + ", ".join(f"{gap:.1e}" for gap in gaps)
        name = str(dtype).removeprefix("torch.")
        found.add(f"fused head, {name} against float64 on the CPU", max(gaps), "of it", at_most=bound, about=about)


def find_kernels(found: Findings, bench: Bench) -> None:
    """Whether the learner and the sampler took torch's kernel for sequences of every length, and not a slower way."""
    if bench.device.type != "cuda":
        found.leave_out("kernels for sequences of every length", "a CPU has none")
        return
    run = bench.run("learner_precision=bf16", "sampler_precision=bf16")
    model = load_model(bench.folder, run.learner_precision.lm_head).to(bench.device)
    learner = prepare(model) and uses_varlen(model, run.learner_precision)
    found.verdict("bf16: the learner attends by it", learner, str(learner))
    config = model.config
    like = torch.empty(config.hidden_size // config.num_attention_heads, dtype=torch.bfloat16, device=bench.device)
    sampler = takes_filled_keys(config.num_attention_heads, config.num_key_value_heads, like)
    found.verdict("bf16: decoding attends by it", sampler, str(sampler))


def compare_graphs(found: Findings, bench: Bench) -> None:
    """The recorded decoding step draws what the plain one draws; rows end at many lengths, so it is recorded anew."""
    if bench.device.type != "cuda":
        found.leave_out("CUDA graphs against eager decoding", "a CPU records none")
        return
    with found.guarded("bf16: decoding without padding"):
        gap = filled_keys_difference(9, 3, torch.empty(64, dtype=torch.bfloat16, device=bench.device))
        found.add("bf16: attention to filled keys against a mask", gap, "of numbers around 1", at_most=0.05)
    for precision in ("fp32", "bf16"):
        run = bench.run(f"sampler_precision={precision}")
        plain = bench.draw(run)
        replayed = bench.draw(replace(run, engine=replace(run.engine, cuda_graphs=True)))
        same = sum(one.ids == other.ids for one, other in zip(plain, replayed)) / len(plain)
        lengths = sorted({len(one.tokens) for one in plain})
        about = f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]}"
        # In bf16 two kernels round apart, and a uniform number near a boundary draws another token.
        bound = {"at_least": 1.0} if precision == "fp32" else {}
        name = f"{precision}: CUDA graphs draw the same responses as eager"
        found.add(name, same, "of them", **bound, about=about)


def parts(found: Findings, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """What runs here while the whole runs are on their way."""
    device = prepare_torch(found.device, 1)
    yield "losses and gradients", lambda: losses(found)
    bench = Bench(talkative(folder / "talkative", found.small), device, found.small)
    yield "log-probs", lambda: compare_logprobs(found, bench)
    yield "fused head", lambda: compare_head(found, device)
    yield "kernels", lambda: find_kernels(found, bench)
    yield "CUDA graphs", lambda: compare_graphs(found, bench)


def measure(found: Findings) -> None:
    with tempfile.TemporaryDirectory() as name, Repeats(Path(name), found.device, found.small) as repeats:
        for check, run in parts(found, Path(name)):
            with found.guarded(check):
                run()
        with found.guarded("same seed twice"):
            repeats.compare(found)


if __name__ == "__main__":
    run_part(measure)
