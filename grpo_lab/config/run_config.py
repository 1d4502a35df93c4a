"""RunConfig: the slots of a run. The class in a slot is its own configuration.

`register()` adds every concrete class of every slot to Hydra's ConfigStore as `schema/<slot>/<name>`. The
YAML files include these schemas and add the numbers. `to_run()` turns the composed config into a RunConfig
whose slots hold live objects, and raises ValueError if a value is out of range.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from grpo_lab.budget.compute_account import Budget
from grpo_lab.budget.cost_model import CostModel
from grpo_lab.checks import require_field, require_not_negative
from grpo_lab.config.evaluation import Evaluation
from grpo_lab.config.stages import (
    CreditTricks,
    LearnerSettings,
    LengthLimits,
    LogprobTricks,
    LossTricks,
    QuestionSettings,
    QueueSettings,
    RecordSettings,
    SamplingSettings,
    SyncSettings,
    TrainingPasses,
    UpdateSettings,
)
from grpo_lab.engines.base import Engine
from grpo_lab.policy.optim import Optimizer
from grpo_lab.tasks.base import Grader, Model, Task, Template
from grpo_lab.tracking.metrics import SUITES, is_known
from grpo_lab.tracking.mlflow_exporter import Tracking
from grpo_lab.tricks import baseline_group as baseline_group  # more options of baseline
from grpo_lab.tricks import baseline_stateful as baseline_stateful  # and those that remember
from grpo_lab.tricks import surrogate_off_policy as surrogate_off_policy  # more options of surrogate
from grpo_lab.tricks.aggregation import Aggregation
from grpo_lab.tricks.base import Trick, formula_fault
from grpo_lab.tricks.baseline import Baseline
from grpo_lab.tricks.convention import Convention, Scope
from grpo_lab.tricks.correction import Correction
from grpo_lab.tricks.critic import Critic
from grpo_lab.tricks.curriculum import Curriculum
from grpo_lab.tricks.denominator import Denominator
from grpo_lab.tricks.entropy import Entropy
from grpo_lab.tricks.group_filter import GroupFilter
from grpo_lab.tricks.importance import Importance
from grpo_lab.tricks.kl import Kl
from grpo_lab.tricks.old_policy import OldPolicy
from grpo_lab.tricks.pass_rate import PassRate
from grpo_lab.tricks.precision import Precision
from grpo_lab.tricks.question_filter import QuestionFilter
from grpo_lab.tricks.reference import Reference
from grpo_lab.tricks.rejection import Rejection
from grpo_lab.tricks.reward_shaping import RewardShaping
from grpo_lab.tricks.scale import Scale
from grpo_lab.tricks.schedule import Schedule
from grpo_lab.tricks.sft import Sft
from grpo_lab.tricks.surrogate import Surrogate
from grpo_lab.tricks.teacher import Teacher
from grpo_lab.tricks.token_credit import TokenCredit
from grpo_lab.tricks.truncation import Truncation
from grpo_lab.tricks.twin import Twin
from grpo_lab.tricks.update_mask import UpdateMask
from grpo_lab.tricks.updates import Updates
from grpo_lab.types import Microbatching

AXES = (
    "sft", "curriculum", "schedule", "truncation", "reward_shaping", "group_filter", "old_policy", "correction",
    "rejection", "updates", "baseline", "scale", "token_credit", "importance", "surrogate", "update_mask",
    "aggregation",
    "denominator", "kl", "reference", "entropy", "learner_precision", "sampler_precision",
)  # fmt: skip
# What lists of tricks show: filters of training problems, the axes, the critic, which some baselines read, and more.
TRICK_SLOTS = ("question_filter", "pass_rate", *AXES, "critic", "teacher", "twin")
CONFIG_GROUPS = (
    "task", "question_filter", "pass_rate", "template", "reward", "model", "engine", "optimizer", "critic", "teacher",
    "twin", "evaluation", "verifier", "budget", "cost_model", "tracking", "convention",
)  # fmt: skip

Part = TypeVar("Part")
_RISES = r"eval/\w+/(accuracy|pass_at_\d+)"  # metrics of an evaluation of which more is better


@dataclass(frozen=True)
class RunLabel:
    """Which sweep a run belongs to, with its arm and level there; empty for a run on its own."""

    sweep: str
    arm: str
    level: str


@dataclass(frozen=True)
class Checkpoint:
    """Which weights are kept beside those of the last checkpoints."""

    best: str | None  # of the evaluation in which this metric was highest; None for none

    def __post_init__(self) -> None:
        rises = self.best is None or (is_known(self.best) and re.fullmatch(_RISES, self.best) is not None)
        require_field(rises, self, "best", "eval/SUITE/accuracy or eval/SUITE/pass_at_K, or null")


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run: one object per trick axis, one per other slot, and run-level numbers."""

    sft: Sft
    curriculum: Curriculum
    schedule: Schedule
    truncation: Truncation
    reward_shaping: RewardShaping
    group_filter: GroupFilter
    old_policy: OldPolicy
    correction: Correction
    rejection: Rejection
    updates: Updates
    baseline: Baseline
    scale: Scale
    token_credit: TokenCredit
    importance: Importance
    surrogate: Surrogate
    update_mask: UpdateMask
    aggregation: Aggregation
    denominator: Denominator
    kl: Kl
    reference: Reference
    entropy: Entropy
    learner_precision: Precision
    sampler_precision: Precision

    task: Task
    question_filter: QuestionFilter
    pass_rate: PassRate
    template: Template
    reward: Grader
    model: Model
    engine: Engine
    optimizer: Optimizer
    critic: Critic
    teacher: Teacher
    twin: Twin
    evaluation: Evaluation
    verifier: Grader
    budget: Budget
    cost_model: CostModel
    tracking: Tracking
    convention: Convention

    seed: int
    problems_per_step: int
    group_size: int
    microbatch_tokens: int
    padding_tolerance_tokens: int
    packing: bool
    logits_per_chunk: int
    gradient_checkpointing: bool
    skip_rows_without_signal: bool
    device: str
    threads: int
    checkpoint_every: int
    checkpoint_minutes: float | None
    keep_checkpoints: int
    checkpoint: Checkpoint
    rollouts_every: int | None
    no_signal_steps: int
    runs_dir: str
    resume_with_changed_code: bool
    plugins: list[str]
    objective: str
    label: RunLabel
    design: Any  # an experiment's declaration; only a sweep reads it

    def __post_init__(self) -> None:
        require_not_negative(self, "seed", "padding_tolerance_tokens", "no_signal_steps")
        require_field(self.seed < 2**63, self, "seed", "below 2**63, as random generators take it")
        require_field(self.threads <= 4096, self, "threads", "at most 4096, of which torch makes each")
        named = bool(self.runs_dir.strip()) and self.runs_dir.isprintable()
        require_field(named, self, "runs_dir", "the path of a folder, such as runs (is GRPO_LAB_RUNS empty?)")
        for field in (
            "problems_per_step", "group_size", "microbatch_tokens", "logits_per_chunk", "threads", "checkpoint_every",
            "keep_checkpoints",
        ):  # fmt: skip
            require_field(getattr(self, field) >= 1, self, field, "at least 1")
        minutes = self.checkpoint_minutes
        require_field(minutes is None or minutes > 0, self, "checkpoint_minutes", "above 0, or null for no such limit")
        every = self.rollouts_every
        require_field(every is None or every >= 1, self, "rollouts_every", "at least 1, or null for ten times a run")
        require_field(is_known(self.objective), self, "objective", "a metric that `grpo-lab metrics` lists")
        self._require_evaluated(self.checkpoint.best)

    def _require_evaluated(self, metric: str | None) -> None:
        """Raise ValueError if no evaluation of this run has the metric by which the best weights are chosen."""
        if metric is None:
            return
        suites = [*SUITES, *self.evaluation.suites, *self.evaluation.tables]
        names = ["accuracy", *(f"pass_at_{k}" for k in self.evaluation.pass_at)]
        _, suite, name = metric.split("/")
        if suite not in suites or name not in names:
            raise ValueError(
                f"checkpoint.best={metric}: no evaluation of this run has it; choose a suite of {', '.join(suites)} "
                f"and one of {', '.join(names)}, or null to keep no best weights"
            )

    @property
    def microbatching(self) -> Microbatching:
        return Microbatching(self.microbatch_tokens, self.padding_tolerance_tokens, self.logits_per_chunk, self.packing)

    @property
    def source_files(self) -> tuple[Path, ...]:
        """Files of the user's that the run executes: those of reward functions."""
        return tuple(dict.fromkeys((*self.reward.files, *self.verifier.files)))

    @property
    def needs_logprobs(self) -> bool:
        """True if anything needs the learner's log-probs of the rollouts from before the updates.

        With one on-policy update they equal the learner's own and every ratio is 1, so they are not computed unless
        something else reads them.
        """
        below_the_ratio = self.old_policy.recomputes and (self.updates.number > 1 or self.kl.shapes_reward)
        corrects_before = self.correction.needs_old_logprobs and not self.old_policy.interpolates
        of_the_sampler = corrects_before or self.rejection.needs_old_logprobs
        for_the_teacher = self.teacher.needs_model and self.old_policy.recomputes
        by_token = self.reads_entropy or self.needs_collision or not self.token_credit.is_no_op
        return below_the_ratio or of_the_sampler or for_the_teacher or by_token

    @property
    def reads_entropy(self) -> bool:
        """True if an option reads the entropy of each token from before the updates."""
        return self.entropy.selects_tokens or self.token_credit.reads_entropy

    @property
    def needs_collision(self) -> bool:
        """True if the baseline reads the sums over the vocabulary of the learner's squared probabilities."""
        return self.baseline.needs_collision

    @property
    def sampler_is_learner(self) -> bool:
        """True if sampler and learner have the same weights and arithmetic, so that they differ only by rounding."""
        current = self.schedule.keeps_sampler_current and not self.group_filter.carries_over
        return current and not (self.learner_precision.rounds or self.sampler_precision.rounds)

    @property
    def on_policy(self) -> bool:
        """True if every ratio is 1: one update, on rollouts of the old policy itself."""
        return self.updates.number == 1 and (self.old_policy.recomputes or self.sampler_is_learner)

    @property
    def reads_microbatches(self) -> bool:
        """True if the loss depends on how rows are divided into microbatches."""
        return not self.aggregation.invariant or self.surrogate.mark_scope is Scope.microbatch

    @property
    def skips_rows(self) -> bool:
        """True if rows whose advantages are all exactly 0 are left out of the training passes.

        Such a row changes neither loss nor gradient unless one of the tricks named here reads it. Logged means over
        tokens (entropy, ratio, active fractions) do change: they cover only the tokens in the passes, and
        `train/scored_share` is the share of these. No update decision changes, and no budget counter except `flops`.
        """
        # A coefficient that adapts reads the KL of all tokens in the loss.
        in_the_loss = self.kl.needs_reference and (self.kl.adapts or not self.kl.shapes_reward)
        reads_them = in_the_loss or self.entropy.needs_gradient or self.surrogate.pulls_without_advantage
        of_the_step = self.surrogate.mark_scope is not None or not self.aggregation.invariant
        return self.skip_rows_without_signal and not (reads_them or of_the_step)

    @property
    def agreement(self) -> float:
        """How far sampler and learner with the same weights may differ, in nats per token."""
        return max(self.learner_precision.agreement, self.sampler_precision.agreement)

    def _part(self, record: Callable[..., Part], **others: Any) -> Part:
        """The record of the run's fields and properties that have the names of its fields, but for `others`."""
        names = inspect.signature(record).parameters.keys() - others
        return record(**{name: getattr(self, name) for name in names}, **others)

    @property
    def question_settings(self) -> QuestionSettings:
        return self._part(QuestionSettings)

    @property
    def lengths(self) -> LengthLimits:
        engine, evaluation = self.engine, self.evaluation
        responses = {
            "engine.max_tokens": engine.max_tokens,
            "evaluation.max_tokens": evaluation.max_tokens,
            "evaluation.downstream_max_tokens": evaluation.downstream_max_tokens,
        }
        return LengthLimits(responses, engine.longest, self.task.longest_prompt, self.reward_shaping.asks_for)

    @property
    def sampling(self) -> SamplingSettings:
        return self._part(SamplingSettings, precision=self.sampler_precision)

    @property
    def learner_settings(self) -> LearnerSettings:
        return self._part(LearnerSettings, loading=self.model.loading(), precision=self.learner_precision)

    @property
    def training_passes(self) -> TrainingPasses:
        forward = self.needs_logprobs + self.kl.needs_reference + self.teacher.needs_model + self.baseline.scores_past
        forward += self.needs_collision and self.reads_entropy  # entropies take a pass of their own
        return TrainingPasses(forward, self.updates, self.critic.minibatches if self.baseline.needs_critic else None)

    @property
    def queue_settings(self) -> QueueSettings:
        engine = self.engine
        return self._part(
            QueueSettings, passes=self.training_passes, max_rows=engine.max_rows, overlaps=engine.overlaps
        )

    @property
    def logprob_tricks(self) -> LogprobTricks:
        return self._part(LogprobTricks)

    @property
    def credit_tricks(self) -> CreditTricks:
        return self._part(CreditTricks)

    @property
    def loss_tricks(self) -> LossTricks:
        return self._part(LossTricks)

    @property
    def update_settings(self) -> UpdateSettings:
        return self._part(UpdateSettings, loss=self.loss_tricks)

    @property
    def sync_settings(self) -> SyncSettings:
        keeps = self.evaluation.sampler_weights and not self.schedule.keeps_sampler_current
        kept = self.schedule.ahead + 2 if keeps else 0
        return self._part(SyncSettings, params=self.engine.params, kept_versions=kept)

    @property
    def record_settings(self) -> RecordSettings:
        return self._part(
            RecordSettings,
            max_tokens=self.engine.max_tokens,
            reference_changes=self.reference.changes,
            best_metric=self.checkpoint.best,
        )


# Keys, or their first parts, that say where and how a run is stored or computed, not what it computes: they are no part
# of its name and may change when it resumes.
VOLATILE = frozenset(
    {
        "runs_dir",
        "tracking",
        "checkpoint_minutes",
        "keep_checkpoints",
        "no_signal_steps",
        "checkpoint",
        "rollouts_every",
        "device",
        "objective",
        "label",
        "design",
        "resume_with_changed_code",
        "model.file",  # where a copy lies; its digest says which file it is
    }
)


def is_volatile(key: str) -> bool:
    """True if a dotted key, such as `tracking.uri`, is no part of a run's name and identity."""
    return not VOLATILE.isdisjoint((key, key.split(".")[0]))


def snake_case(name: str) -> str:
    """LeaveOneOut -> leave_one_out; K3Loss -> k3_loss."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def slot_types() -> dict[str, type]:
    """Slot name -> abstract base class, for axes and all other slots, in the order of RunConfig."""
    hints = typing.get_type_hints(RunConfig)
    return {name: hints[name] for name in AXES + CONFIG_GROUPS}


def options(base: type) -> dict[str, type]:
    """Schema name -> concrete class, for every class that may fill a slot of type `base`.

    Raises ValueError for two classes of one name.
    """
    found: dict[str, type] = {}
    waiting = [base]
    while waiting:
        cls = waiting.pop()
        children = cls.__subclasses__()
        if not inspect.isabstract(cls) and (cls is not base or not children):
            other = found.setdefault(snake_case(cls.__name__), cls)
            if other.__module__ != cls.__module__:  # of one module the later class has replaced the earlier
                raise ValueError(
                    f"{_place(other)} and {_place(cls)} would both be the option {snake_case(cls.__name__)}: give your "
                    "class another name"
                )
            found[snake_case(cls.__name__)] = cls
        waiting += reversed(children)
    return found


def register() -> None:
    """Store the schemas of RunConfig and of every option. Call it again after importing user modules.

    Raises ValueError for a class that cannot be an option, with its file, its line and a remedy.
    """
    store = ConfigStore.instance()
    for slot, base in slot_types().items():
        for name, cls in options(base).items():
            if _stored.get((slot, name)) is cls:
                continue
            try:
                node = writable(cls)
            except OmegaConfBaseException as error:
                raise ValueError(
                    f"{_place(cls)} cannot be an option ({str(error).splitlines()[0]}): a field of an "
                    "option is a number, a string, an Enum, a dataclass, or a list or dict of these"
                ) from error
            if issubclass(cls, Trick) and (fault := formula_fault(cls)):
                raise ValueError(f"{_place(cls)} {fault}")
            store.store(group=f"schema/{slot}", name=name, node=node)
            _stored[slot, name] = cls
    if not _stored.get(("", "run")):
        store.store(group="schema", name="run", node=writable(RunConfig))
        _stored["", "run"] = RunConfig


_stored: dict[tuple[str, str], type] = {}  # slot and option -> the class whose schema Hydra has


def _place(cls: type) -> str:
    return f"{cls.__name__} at {inspect.getsourcefile(cls)} line {inspect.getsourcelines(cls)[1]}"


@cache
def writable(cls: type) -> DictConfig:
    """The structured config of a frozen class, with the read-only flag cleared because Hydra merges into it."""
    node = OmegaConf.structured(cls)

    def clear(part: Any) -> None:
        if OmegaConf.is_config(part):
            OmegaConf.set_readonly(part, None)
        if isinstance(part, DictConfig) and not part._is_missing() and not part._is_none():
            for key in part:
                clear(part._get_node(key))

    clear(node)
    return node


def to_run(config: DictConfig) -> RunConfig:
    """Build live objects from a composed config. Raises ValueError that names the wrong key."""
    config = config.copy()
    OmegaConf.set_struct(config, False)
    config.pop("hydra", None)
    if unknown := [str(key) for key in config if key not in RunConfig.__dataclass_fields__]:
        raise ValueError(f"there is no key {unknown[0]!r}: --help lists the options, --cfg job every key")
    try:
        run = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} has no value: give it one, {error.full_key}=...") from error
    except InterpolationResolutionError as error:
        raise ValueError(unresolved(config, error)) from error
    except OmegaConfBaseException as error:
        # OmegaConf wraps errors of __post_init__; the first line has the message and the key.
        raise ValueError(str(error.__cause__ or error).splitlines()[0]) from error
    assert isinstance(run, RunConfig)
    return run


def unresolved(config: DictConfig, error: InterpolationResolutionError) -> str:
    """An error message for a key of `config` that refers to a missing key, or in a circle to itself."""
    key = error.full_key or ""
    chain: list[str] = []
    while key and key not in chain:
        chain.append(key)
        node: Any = OmegaConf.to_container(config, resolve=False)
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        referred = re.search(r"\$\{([\w.]+)\}", str(node))
        key = referred.group(1) if referred else ""
    text = str(error).splitlines()[0]
    if "Recursive" not in text:
        return f"{chain[0] if chain else 'a key'} has no value: {text}; correct the reference, or give a value itself"
    circle = " -> ".join([*chain, key] if key else chain)
    return f"{chain[0] if chain else 'a key'} refers to itself ({circle}): give one of these keys a value"


def flat(config: DictConfig | dict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a config, for MLflow's parameters and for run identity."""
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True) if OmegaConf.is_config(config) else config
    assert isinstance(plain, dict), "a mapping stays one"
    result: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
