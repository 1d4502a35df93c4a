"""Supervised fine-tuning before the first step: it makes a model folder in the run's own, once for all attempts."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.budget.cost_model import CostModel
from grpo_lab.config.stages import LearnerSettings, SamplingSettings
from grpo_lab.distributed.device import on_cpu, on_device
from grpo_lab.policy import packing
from grpo_lab.policy.adapters import add_adapter, save_whole
from grpo_lab.policy.batching import StepInputs, make_minibatch
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.policy.models import load_model, moved, recompute_layers
from grpo_lab.rollout.grading import decode, encode_prompts, grade, group_requests, to_rollouts, token_ids, tools_for
from grpo_lab.seeding import uniform
from grpo_lab.tasks.base import Task
from grpo_lab.tracking.activity import Activity, doing
from grpo_lab.tracking.checksums import AFRESH, damage_of, digest_of, read_checksummed, with_checksum
from grpo_lab.tracking.files import follow_umask, write_json
from grpo_lab.tracking.metrics import is_active_fraction
from grpo_lab.tracking.renames import with_metric_names
from grpo_lab.tricks.denominator import Survivors
from grpo_lab.tricks.sft import FineTuning, Sft
from grpo_lab.types import Completion, NoiseKey, Problem, Rollouts, StopReason

FILE = "sft.json"  # in the folder of the fine-tuned model


@dataclass(frozen=True)
class Start:
    """The model that RL begins with.

    `account` is what fine-tuning spent and `metrics` what it logs at step 0. `seconds` is the wall time it took.
    """

    folder: Path
    account: ComputeAccount
    metrics: dict[str, float]
    seconds: float

    @property
    def active(self) -> dict[str, float]:
        """Metrics of every step: the share of the chosen problems that gave an answer to learn."""
        return {name: value for name, value in self.metrics.items() if is_active_fraction(name)}

    @property
    def clock(self) -> dict[str, float]:
        """The wall time by stage, for the line of step 0."""
        return {"sft": self.seconds} if self.seconds else {}


@dataclass(frozen=True)
class Demonstration:
    """An answer to learn, as the tokens of prompt and response."""

    problem: Problem
    prompt: tuple[int, ...]
    completion: Completion


def check_sft(sft: Sft, task: Task, problems: Sequence[Problem]) -> None:
    """Raise ValueError if the task cannot give what fine-tuning asks for."""
    if not isinstance(sft, FineTuning):
        return
    if sft.problems > len(problems):
        raise ValueError(
            f"sft.problems={sft.problems}, but the training split has {len(problems)} problems: lower it or enlarge "
            "the task"
        )
    if not sft.draws and task.solutions("train") is None:
        raise ValueError(
            f"sft learns solutions, and {type(task).__name__} writes none: set sft=rejection_sampling or sft=none"
        )


def fine_tuned(
    sft: Sft,
    learning: LearnerSettings,
    sampling: SamplingSettings,
    task: Task,
    base: Path,
    own: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    device: torch.device,
) -> Start:
    """The model that RL begins with: `base` itself, or the fine-tuned one in the folder `own`, made if it is not there.

    An interrupted attempt leaves nothing that could pass for it. Raises ValueError if `own` is damaged or was made from
    another base, if no answer is left to learn, or if training on the answers diverges.
    """
    if not isinstance(sft, FineTuning):
        return Start(base, ComputeAccount(), {}, 0.0)
    if own is None:
        raise ValueError("sft needs a folder to keep the fine-tuned model in: start the run with grpo_lab.train")
    weights = fingerprint(base)
    if not own.exists():
        began, partial = time.perf_counter(), own.with_name(f"{own.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
        loading = learning.loading
        learner = load_model(base, learning.precision.lm_head, loading)
        cost, account = ModelFlops.of(learner), ComputeAccount()
        if loading.lora is not None:
            add_adapter(learner, loading.lora, learning.seed)
        learner = moved(learner, device)
        with doing("answers to fine-tune on"):
            answers, metrics = _answers(
                sft, sampling, task, learning.seed, base, tokenizer, problems, device, cost, account
            )
        with doing("fine-tuning", sft.epochs * math.ceil(len(answers) / sft.batch_size), "updates") as shown:
            metrics |= _train(sft, learning, sampling.cost_model, learner, answers, device, cost, account, shown)
        save_whole(learner, partial)
        tokenizer.save_pretrained(partial)
        follow_umask(partial)
        files = {path.name: digest_of(path) for path in sorted(partial.iterdir())}
        made = {"base": weights, "ledger": asdict(account), "metrics": metrics, "files": files}
        write_json(partial / FILE, with_checksum(made | {"seconds": time.perf_counter() - began}))
        os.replace(partial, own)
    made = read_checksummed(own / FILE, AFRESH)
    if damage := [problem for name, digest in made["files"].items() if (problem := damage_of(own / name, digest))]:
        raise ValueError(f"{', '.join(damage)}; {AFRESH}")
    if made["base"] != weights:
        raise ValueError(
            f"{own} was fine-tuned from the weights {made['base']}, and the model has {weights} now: give back the "
            "model it had, or move the run's folder away"
        )
    return Start(own, ComputeAccount(**made["ledger"]), with_metric_names(made["metrics"]), made["seconds"])


def _answers(
    sft: FineTuning,
    sampling: SamplingSettings,
    task: Task,
    seed: int,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    device: torch.device,
    cost: ModelFlops,
    account: ComputeAccount,
) -> tuple[list[Demonstration], dict[str, float]]:
    """The answers to learn to random problems, and the metrics of how they were found."""
    drawn = sorted(range(len(problems)), key=lambda place: _chance(seed, "problems", 0, problems[place].id))
    places = drawn[: sft.problems]
    chosen = [problems[place] for place in places]
    prompts = encode_prompts(tokenizer, sampling.template, chosen)
    if sft.draws:
        found, metrics = _sampled(sft, sampling, seed, base, tokenizer, chosen, prompts, device, cost, account)
        short = "raise sft.samples or sft.problems, or begin with a model that is right more often"
    else:
        written = task.solutions("train")
        assert written is not None, "check_sft asks before"
        solutions = dict(zip((problem.id for problem in task.problems("train")), written))
        end = tokenizer.eos_token_id
        assert isinstance(end, int), "stop_token_ids asks before"
        ended = [(*ids, end) for ids in token_ids(tokenizer, [solutions[problem.id] for problem in chosen])]
        found = [
            Demonstration(problem, prompt, Completion.unsampled(ids, StopReason.EOS))
            for problem, prompt, ids in zip(chosen, prompts, ended)
            if len(ids) <= sampling.engine.max_tokens
        ]
        metrics, short = {}, "raise engine.max_tokens, which all solutions exceed"
    if not found:
        raise ValueError(f"sft has no answer to learn from {len(chosen)} problems: {short}")
    return found, metrics | {
        "sft/answers": float(len(found)),
        "sft/length": sum(len(answer.completion.tokens) for answer in found) / len(found),
        "active_fraction/sft": len({answer.problem.id for answer in found}) / len(chosen),
    }


def _sampled(
    sft: FineTuning,
    sampling: SamplingSettings,
    seed: int,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    device: torch.device,
    cost: ModelFlops,
    account: ComputeAccount,
) -> tuple[list[Demonstration], dict[str, float]]:
    """Those of the base model's own answers that `sft` picks; their sampling is counted in the account."""
    engine, cost_model = sampling.engine, sampling.cost_model
    requests = group_requests(problems, prompts, sft.draws, engine.params, seed, "sft", 0)
    with closing(engine.open(base, sampling.precision, device)) as session:
        completions = sampling.truncation.generate(session, requests, tools_for(tokenizer))
    rollouts = to_rollouts(problems, prompts, sft.draws, completions)
    graded = grade(rollouts, decode(tokenizer, rollouts), sampling.reward, [request.noise for request in requests])
    right = (graded.correctness > 0.5) & ~graded.truncated
    picked = sft.picks(right, graded.lengths)
    lengths, nothing = graded.lengths.tolist(), [[0] * sft.draws for _ in problems]
    injected = int((rollouts.response_mask & ~rollouts.sampled_mask).sum())
    account.generated(cost, [len(prompt) for prompt in prompts], lengths, nothing, injected)
    account.discarded_tokens += int(graded.sampled_lengths[~picked].sum())
    decoding = cost_model.decoding([length for group in lengths for length in group], engine.max_rows)
    account.simulated_seconds += decoding + cost_model.reading(sum(map(len, prompts)))
    rows = picked.flatten().nonzero().flatten().tolist()
    answers = [Demonstration(problems[row // sft.draws], prompts[row // sft.draws], completions[row]) for row in rows]
    return answers, {"sft/right": float(right.double().mean())}


def _train(
    sft: FineTuning,
    learning: LearnerSettings,
    cost_model: CostModel,
    learner: PreTrainedModel,
    answers: Sequence[Demonstration],
    device: torch.device,
    cost: ModelFlops,
    account: ComputeAccount,
    shown: Activity,
) -> dict[str, float]:
    """Train `learner` on the answers, counted in the account; returns the loss of the last epoch per token."""
    if learning.gradient_checkpointing:
        recompute_layers(learner)
    packs = learning.microbatching.packs and packing.prepare(learner)
    microbatching = learning.microbatching.on(device.type, packs)
    plan = replace(learning.optimizer, learning_rate=sft.learning_rate, warmup_updates=sft.warmup_updates)
    optimizer = plan.build((one for one in learner.parameters() if one.requires_grad), learner)
    updates, loss, tokens = 0, 0.0, 0
    for epoch in range(sft.epochs):
        loss, tokens = 0.0, 0
        for rollouts in shown.each(_batches(sft, learning.seed, answers, epoch)):
            weight = torch.ones_like(rollouts.sampler_logprobs)
            inputs = StepInputs(rollouts, rollouts.sampled_mask, weight, None, None, None)
            parts = []
            for batch in make_minibatch(inputs, range(len(rollouts.problems)), Survivors(), microbatching):
                batch = on_device(batch, device)
                logprobs, _ = token_logprobs(
                    learner, batch.prompts, batch.tokens, batch.loss_mask, 1.0, learning.precision,
                    with_entropy=False, microbatching=microbatching,
                )  # fmt: skip
                part = -(logprobs * batch.loss_mask).sum()
                (part / batch.totals.num_tokens).backward()
                parts.append(part.detach())
            for part in on_cpu(parts):  # one transfer for the update
                loss += float(part)
            lengths = rollouts.lengths.tolist()
            prompts = [len(prompt) for prompt in rollouts.prompts]
            in_loss = int(rollouts.sampled_mask.sum())
            tokens += in_loss
            account.trained(cost, prompts, lengths, in_loss)
            account.simulated_seconds += cost_model.training(sum(prompts) + sum(lengths), 1)
            try:
                plan.step(optimizer, updates)
            except FloatingPointError as error:
                raise ValueError(f"sft diverged ({error}): lower sft.learning_rate") from error
            updates += 1
    return {"sft/loss": loss / tokens, "sft/updates": float(updates)}


def _batches(sft: FineTuning, seed: int, answers: Sequence[Demonstration], epoch: int) -> Iterator[Rollouts]:
    """The answers of each update of an epoch, in an order of its own, as groups of one."""
    order = sorted(range(len(answers)), key=lambda place: _chance(seed, "order", epoch, place))
    for start in range(0, len(order), sft.batch_size):
        part = [answers[place] for place in order[start : start + sft.batch_size]]
        problems, prompts = [answer.problem for answer in part], [answer.prompt for answer in part]
        yield to_rollouts(problems, prompts, 1, [answer.completion for answer in part])


def _chance(seed: int, what: str, epoch: int, place: int) -> float:
    return uniform(NoiseKey(seed, f"sft/{what}", epoch, place, 0))
