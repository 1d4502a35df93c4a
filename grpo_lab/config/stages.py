"""Inputs of each stage of the loop: the records that a RunConfig hands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_lab.budget.compute_account import Budget
from grpo_lab.budget.cost_model import CostModel
from grpo_lab.config.evaluation import Evaluation
from grpo_lab.engines.base import Engine
from grpo_lab.policy.loading import Loading
from grpo_lab.policy.optim import Optimizer
from grpo_lab.tasks.base import Grader, Task, Template
from grpo_lab.tricks.aggregation import Aggregation
from grpo_lab.tricks.correction import Correction
from grpo_lab.tricks.denominator import Denominator
from grpo_lab.tricks.entropy import Entropy
from grpo_lab.tricks.group_filter import GroupFilter
from grpo_lab.tricks.importance import Importance
from grpo_lab.tricks.kl import Kl
from grpo_lab.tricks.old_policy import OldPolicy
from grpo_lab.tricks.precision import Precision
from grpo_lab.tricks.question_filter import QuestionFilter
from grpo_lab.tricks.reference import Reference
from grpo_lab.tricks.rejection import Rejection
from grpo_lab.tricks.schedule import Schedule
from grpo_lab.tricks.surrogate import Surrogate
from grpo_lab.tricks.token_credit import TokenCredit
from grpo_lab.tricks.truncation import Truncation
from grpo_lab.tricks.twin import Twin
from grpo_lab.tricks.update_mask import UpdateMask
from grpo_lab.tricks.updates import Updates
from grpo_lab.types import Microbatching, SamplingParams


@dataclass(frozen=True)
class QuestionSettings:
    """Which of the task's questions are trained on: no evaluated one, and enough for a step."""

    task: Task
    question_filter: QuestionFilter
    evaluation: Evaluation
    twin: Twin
    problems_per_step: int
    seed: int


@dataclass(frozen=True)
class LengthLimits:
    """How long prompts and responses may be, in tokens.

    `responses` is the longest response by the setting that limits it. `context` is the engine's and `prompt` the
    task's limit, None for no limit. `targets` are the lengths that a prompt may ask for, empty if it asks for none.
    """

    responses: Mapping[str, int]
    context: int | None
    prompt: int | None
    targets: Sequence[int]


@dataclass(frozen=True)
class SamplingSettings:
    """How the base model is sampled and graded before training: for pass rates and for fine-tuning."""

    engine: Engine
    precision: Precision
    template: Template
    truncation: Truncation
    reward: Grader
    cost_model: CostModel


@dataclass(frozen=True)
class LearnerSettings:
    """How the learner is loaded and trained; `microbatching.packs` is whether it is to pack rows if it can."""

    loading: Loading
    precision: Precision
    optimizer: Optimizer
    microbatching: Microbatching
    gradient_checkpointing: bool
    seed: int


@dataclass(frozen=True)
class TrainingPasses:
    """The passes of a step through models, each taken to be as large as the policy, for simulated time.

    `forward` counts the passes before the updates. `critic_minibatches` is None without a critic.
    """

    forward: int
    updates: Updates
    critic_minibatches: int | None


@dataclass(frozen=True)
class QueueSettings:
    """Stages 1 to 6: when batches are generated, which groups they keep, and what that costs.

    `overlaps` is whether the engine generates in a process of its own, `max_rows` how many responses it decodes at
    once.
    """

    schedule: Schedule
    group_filter: GroupFilter
    twin: Twin
    budget: Budget
    cost_model: CostModel
    passes: TrainingPasses
    problems_per_step: int
    seed: int
    max_rows: int
    overlaps: bool


@dataclass(frozen=True)
class LogprobTricks:
    """Stage 7: the options that use log-probs from before the updates, and whether any needs the learner's.

    `needs_collision`: the baseline also reads the sums of its squared probabilities.
    """

    old_policy: OldPolicy
    correction: Correction
    rejection: Rejection
    kl: Kl
    entropy: Entropy
    updates: Updates
    token_credit: TokenCredit
    twin: Twin
    seed: int
    needs_logprobs: bool
    reads_entropy: bool
    needs_collision: bool


@dataclass(frozen=True)
class CreditTricks:
    """Stage 9: what divides a response's advantage among its tokens."""

    token_credit: TokenCredit
    twin: Twin
    seed: int


@dataclass(frozen=True)
class LossTricks:
    """The options of which a microbatch's loss is made."""

    importance: Importance
    correction: Correction  # read where the old policy is interpolated; otherwise its weights are in the batch
    surrogate: Surrogate
    update_mask: UpdateMask
    kl: Kl
    entropy: Entropy
    aggregation: Aggregation
    twin: Twin


@dataclass(frozen=True)
class UpdateSettings:
    """Stage 10: the loss, how a batch is split into optimiser steps, and the optimiser.

    `skips_rows` and `reads_microbatches` are as in RunConfig. `agreement` is how far sampler and learner may differ, in
    nats per token.
    """

    loss: LossTricks
    updates: Updates
    denominator: Denominator
    optimizer: Optimizer
    budget: Budget
    problems_per_step: int
    seed: int
    skips_rows: bool
    reads_microbatches: bool
    agreement: float


@dataclass(frozen=True)
class SyncSettings:
    """Stage 11: the reference's share of new weights, and how the sampler's new weights are compared.

    `kept_versions` is how many versions of the weights evaluation may still ask, 0 for none. `params` and `template`
    are training's, and `agreement` is as in UpdateSettings.
    """

    schedule: Schedule
    reference: Reference
    template: Template
    params: SamplingParams
    seed: int
    agreement: float
    kept_versions: int


@dataclass(frozen=True)
class RecordSettings:
    """Stage 12: the schedule of evaluations and checkpoints, and which records a step keeps."""

    budget: Budget
    evaluation: Evaluation
    template: Template
    reward: Grader
    verifier: Grader
    seed: int
    group_size: int
    max_tokens: int  # token limit of a response in training
    reference_changes: bool
    rollouts_every: int | None
    no_signal_steps: int
    checkpoint_every: int
    checkpoint_minutes: float | None
    keep_checkpoints: int
    best_metric: str | None  # by which the best weights are chosen
