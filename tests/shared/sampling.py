"""Requests to an engine, and the log-probs that the learner gives to what came back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from grpo_lab.policy.loading import Attention, Lora
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.models import load_model
from grpo_lab.rollout.grading import to_rollouts
from grpo_lab.tasks.hub import HfModel
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.types import Completion, NoiseKey, Problem, Request, SamplingParams, WeightType

CPU = torch.device("cpu")
FP32 = Fp32(LmHead.same, 1e-3)


def asked(answer: str, question: str = "") -> Problem:
    """A problem of which a verifier needs to know the answer alone."""
    return Problem(0, question, answer, 1)


def hf_model(path: Path | str) -> HfModel:
    """A model of which all weights are trained."""
    return HfModel(str(path), "", WeightType.fp32, Attention.auto, False, Lora(0, 32.0, ["all-linear"]))


def requests_of(folder: Path, rows: int = 48, params: SamplingParams | None = None, step: int = 0) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = ["3+4?", "9+8+7?", "1+1+1?", "5+6?"]
    params = params or SamplingParams(max_tokens=24, temperature=1.0, top_p=1.0)
    return [
        Request(
            tuple(tokenizer(questions[row % 4], add_special_tokens=False)["input_ids"]),
            NoiseKey(0, "test", step, row % 4, row // 4),
            params,
        )
        for row in range(rows)
    ]


def learner_logprobs(
    learner: Path | torch.nn.Module,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Learner's and sampler's log-probs of the same tokens, [N, T] each."""
    model = load_model(learner, LmHead.same) if isinstance(learner, Path) else learner
    problems = tuple(Problem(i, "", "", 1) for i in range(len(requests)))
    rollouts = to_rollouts(problems, tuple(r.prompt + r.prefix for r in requests), 1, completions)
    scored, _ = token_logprobs(model, rollouts.prompts, rollouts.tokens, rollouts.sampled_mask, temperature, FP32)
    return scored, rollouts.sampler_logprobs
