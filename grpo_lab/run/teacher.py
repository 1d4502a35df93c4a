"""Teachers of a run: another model in memory, or the policy itself behind prompts that say more than the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.checks import require
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.policy.loading import Loading
from grpo_lab.policy.model_folder import check_tokens, context_length, fingerprint
from grpo_lab.policy.models import load_model
from grpo_lab.policy.parts import in_parts
from grpo_lab.rollout.grading import decode, encode_prompts
from grpo_lab.tasks.base import Template
from grpo_lab.tasks.hub import find_model
from grpo_lab.tricks.precision import LmHead, Precision
from grpo_lab.tricks.teacher import OnPolicyDistillation, SelfDistillation, Teacher
from grpo_lab.types import Float, Microbatching, Problem, Rollouts, Tensor


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
    known, expected = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab(), tokenizer.get_vocab()
    other = sorted(token for token, number in expected.items() if known.get(token) != number)
    rule = f"a model with the policy's tokens, and {len(other)} of {len(expected)} differ"
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


@dataclass(frozen=True)
class PrivilegedPrompts:
    """The prompts behind which the policy scores its own responses; neither sampler nor learner ever sees them.

    `context` is the longest prompt and response together, in tokens, None for no limit.
    """

    plan: SelfDistillation
    template: Template
    tokenizer: PreTrainedTokenizerBase
    context: int | None

    def encode(self, problems: Sequence[Problem], hints: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of the prompts that show each problem's hint. Raises ValueError for text without tokens."""
        hinted = [replace(one, question=self.plan.question(one, hint)) for one, hint in zip(problems, hints)]
        try:
            return encode_prompts(self.tokenizer, self.template, hinted)
        except ValueError as error:
            raise ValueError(
                f"teacher.prompt={self.plan.prompt!r} cannot be written: {error}, and set teacher.prompt to a text "
                "that the model's tokenizer can encode"
            ) from error

    def behind(self, rollouts: Rollouts, correctness: Float[Tensor, "P G"]) -> tuple[list[int], Rollouts]:
        """The rows that the teacher scores, and these responses behind its prompts, as groups of one.

        Rows without a hint, and rows too long for the context behind the longer prompt, are left out.
        """
        size, right = rollouts.group_size, (correctness == 1).flatten().tolist()
        texts = decode(self.tokenizer, rollouts) if self.plan.group_relative else [""] * rollouts.num_rows
        problems = [problem for problem in rollouts.problems for _ in range(size)]
        hints: dict[int, str] = {}
        for row, problem in enumerate(problems):
            first = row - row % size
            others = [texts[other] for other in range(first, first + size) if right[other] and other != row]
            if (hint := self.plan.hint(problem, others)) is not None:
                hints[row] = hint
        prompts = dict(zip(hints, self.encode([problems[row] for row in hints], list(hints.values()))))
        lengths, context = rollouts.lengths.tolist(), self.context
        rows = [row for row, prompt in prompts.items() if context is None or len(prompt) + lengths[row] <= context]
        by_row = replace(
            rollouts,
            problems=tuple(problems),
            prompts=tuple(prompts.get(row, ()) for row in range(rollouts.num_rows)),
            group_size=1,
        )
        return rows, by_row.choose(rows)


def privileged_prompts(
    plan: Teacher, template: Template, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> PrivilegedPrompts | None:
    """The prompts of a policy that teaches itself, None for another teacher. `folder` is the model's."""
    if not isinstance(plan, SelfDistillation):
        return None
    return PrivilegedPrompts(plan, template, tokenizer, context_length(folder))


def check_privileged(prompts: PrivilegedPrompts, folder: Path, problems: Sequence[Problem], max_tokens: int) -> None:
    """Raise ValueError if the teacher's prompts cannot be written, or do not fit the model's context.

    `problems` are those that are trained on, and `max_tokens` limits a response, also one that the teacher is shown.
    """
    plan, context = prompts.plan, prompts.context
    encoded = prompts.encode(problems, [plan.hint(problem, [""]) or "" for problem in problems])
    check_tokens(folder, prompts.tokenizer, encoded, "the teacher's prompt")
    longest, shown = max(map(len, encoded)), max_tokens * plan.group_relative
    if context is not None and longest + shown + max_tokens > context:
        held = f" with a response of engine.max_tokens={max_tokens} in it" if plan.group_relative else ""
        raise ValueError(
            f"teacher.prompt makes prompts of up to {longest + shown} tokens{held}, which with another "
            f"{max_tokens} tokens of response exceed the model's context of {context} tokens: lower engine.max_tokens, "
            "shorten teacher.prompt, or set task.max_prompt_tokens to leave out long questions"
        )
