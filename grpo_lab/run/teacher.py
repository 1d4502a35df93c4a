"""A live teacher: its model, and the log-probs that it gives to the tokens of a rollout batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.checks import require
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.policy.loading import Loading
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.policy.models import load_model
from grpo_lab.policy.parts import in_parts
from grpo_lab.tasks.hub import find_model
from grpo_lab.tricks.precision import LmHead, Precision
from grpo_lab.tricks.teacher import OnPolicyDistillation, Teacher
from grpo_lab.types import Float, Microbatching, Rollouts, Tensor


@dataclass(frozen=True)
class LiveTeacher:
    """The model in memory; `fingerprint` is of its weights."""

    model: PreTrainedModel
    model_flops: ModelFlops
    fingerprint: str

    def logprobs(
        self,
        rollouts: Rollouts,
        temperature: float,
        precision: Precision,
        microbatching: Microbatching,
        device: torch.device,
        account: ComputeAccount,
    ) -> Float[Tensor, "N T"]:
        """Its log-probs of the sampled tokens at the sampling temperature, 0 elsewhere; charged to `account`."""
        prompts = [len(rollouts.prompt_of_row(row)) for row in range(rollouts.num_rows)]
        account.forwarded(self.model_flops, prompts, rollouts.lengths.tolist())
        found, _ = rollout_logprobs(self.model, rollouts, temperature, precision, microbatching, device, False)
        return found


def find_teacher(plan: Teacher, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """The folder of a run's teacher, None for a run without one.

    Raises ValueError for a model that cannot be used, and for one whose tokenizer writes the policy's tokens otherwise.
    """
    if not isinstance(plan, OnPolicyDistillation):
        return None
    folder = find_model(plan.path, plan.revision, "teacher.path")
    known, wanted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab(), tokenizer.get_vocab()
    other = sorted(token for token, number in wanted.items() if known.get(token) != number)
    rule = f"a model with the policy's tokens, and {len(other)} of {len(wanted)} differ"
    remedy = "distillation on sampled tokens needs one tokenizer, so choose a teacher of the policy's family"
    shown = f"{plan.path} (such as {other[0]!r})" if other else ""
    require(not other, "teacher.path", shown, rule, remedy)
    return folder


def open_teacher(
    plan: Teacher, tokenizer: PreTrainedTokenizerBase, lm_head: LmHead, context: int
) -> LiveTeacher | None:
    """The teacher of a run, on the CPU; None for one without.

    `lm_head` is the learner's, and `context` the longest prompt and response together, in tokens. Raises ValueError for
    a model that cannot be used.
    """
    folder = find_teacher(plan, tokenizer)
    if folder is None:
        return None
    assert isinstance(plan, OnPolicyDistillation), "it has a folder"
    with in_parts():
        model = load_model(folder, lm_head, Loading(frozen=plan.weights))
    longest = getattr(model.config, "max_position_embeddings", None) or context
    rule, remedy = f"a model with a context of {context} tokens or more", "lower engine.max_tokens"
    require(longest >= context, "teacher.path", f"{plan.path}, which has {longest}", rule, remedy)
    model.requires_grad_(False)
    return LiveTeacher(model, ModelFlops.of(model), fingerprint(folder))
