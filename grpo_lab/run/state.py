"""The run state: data, learner, sampler, reference, optimiser; opened in this order.

Cheap checks come before expensive loading: errors in the user's input are raised before any weights are
loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.config.run_config import AXES, RunConfig
from grpo_lab.config.stages import LengthLimits
from grpo_lab.distributed import ranks
from grpo_lab.distributed.tensors import like
from grpo_lab.engines.base import EngineSession
from grpo_lab.engines.divided import divided
from grpo_lab.fine_tuning import Start, check_sft, fine_tuned
from grpo_lab.policy import packing
from grpo_lab.policy.adapters import adapter_off, adapter_weights, add_adapter, load_adapter, whole_weights
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.policy.critic import LiveCritic, open_critic
from grpo_lab.policy.model_folder import check_tokens, context_length, fingerprint, fingerprint_of, stop_token_ids
from grpo_lab.policy.models import load_model, recompute_layers
from grpo_lab.policy.parts import in_parts, layer_by_layer, own_weights, placed
from grpo_lab.policy.sharding import Trained, load_optimizer, load_whole, shard
from grpo_lab.rollout.grading import encode_prompts, tools_for
from grpo_lab.run.checkpoint import load_shards
from grpo_lab.run.evaluate import Suite, make_suites
from grpo_lab.run.lengths import TRAINING, at_their_longest, check_lengths, fitting
from grpo_lab.run.prompts import Prompts, read_prompts
from grpo_lab.run.teacher import (
    LiveTeacher,
    PrivilegedPrompts,
    check_privileged,
    find_teacher,
    open_teacher,
    privileged_prompts,
)
from grpo_lab.run.training_problems import TrainingProblems, training_problems
from grpo_lab.tasks.base import ExternalTask, Template
from grpo_lab.tasks.data_samples import warn_of_samples
from grpo_lab.tricks.base import Trick
from grpo_lab.tricks.group_filter import GroupFilter
from grpo_lab.tricks.precision import Precision
from grpo_lab.tricks.schedule import Schedule
from grpo_lab.types import Float, Microbatching, Problem, Rollouts, Tensor


@dataclass
class RunState:
    """Everything a run holds while it trains, except the rollout queue.

    `microbatching` is the run's, without packing if the model does not support it. Log-probs are computed
    in `precision`, the learner's, and at the sampling `temperature`. `suites` are asked at the ends of
    the run, `suites_between` in between. `reference` and `initial` are None where they are not needed, and where they
    are the learner without its adapter. `kept` are the weights of the latest syncs by version, if evaluation asks the
    weights that sampled a batch and the schedule lets them lag behind the learner.
    `teacher` is another model, `privileged` the prompts of a policy that is its own teacher; None without either.
    `initial` is the policy before the first update, loaded if evaluation measures the KL from it. `updates` and
    `account` count the work so far. `entropy_coef` is the entropy trick's state and `kl_coef` the kl trick's.
    `memories` are what the options of the axes remember, by axis. `probe_best` is the best correctness of each
    probe question so far. `log_position` is the log's size in bytes at the checkpoint.
    """

    device: torch.device
    base: str  # fingerprint of the model's weights, before any fine-tuning
    start: Start  # the model that RL begins with
    training: TrainingProblems
    tokenizer: PreTrainedTokenizerBase
    suites: list[Suite]
    suites_between: list[Suite]
    learner: PreTrainedModel
    reference: PreTrainedModel | None
    initial: PreTrainedModel | None
    critic: LiveCritic | None
    teacher: LiveTeacher | None
    privileged: PrivilegedPrompts | None
    session: EngineSession
    optimizer: torch.optim.Optimizer
    model_flops: ModelFlops
    account: ComputeAccount
    entropy_coef: float
    kl_coef: float
    loss_scale: torch.amp.GradScaler
    precision: Precision
    temperature: float
    microbatching: Microbatching
    unproven: bool = True  # whether the sampler's newest weights were not yet compared with the learner
    probe_best: dict[int, float] = field(default_factory=dict)
    updates: int = 0
    log_position: int = 0
    kept: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems that are trained on."""
        return self.training.problems

    @property
    def clock_before(self) -> dict[str, float]:
        """The wall time by stage of what came before the first step."""
        return self.training.clock | self.start.clock

    @property
    def policy_learns(self) -> bool:
        """True if the current step trains the policy, and not only its critic."""
        return self.critic is None or not self.critic.plan.policy_waits(self.account.steps)

    @torch.no_grad()
    def refresh_reference(self, share: float) -> None:
        """Move the reference's weights towards the learner's by `share`, from 0 (none) to 1 (equal)."""
        if self.reference is None or share == 0:
            return
        references = dict(self.reference.named_parameters())
        for name, learnt in whole_weights(self.learner):
            if name in references:  # tied weights stand there once
                references[name].lerp_(like(learnt, references[name]), share)

    @contextmanager
    def as_reference(self) -> Iterator[PreTrainedModel]:
        """The reference policy: a model of its own, or the learner with its adapter off."""
        with nullcontext() if self.reference is not None else adapter_off(self.learner):
            yield self.reference or self.learner

    @contextmanager
    def as_initial(self) -> Iterator[PreTrainedModel]:
        """The policy before the first update: a model of its own, or the learner with its adapter off."""
        with nullcontext() if self.initial is not None else adapter_off(self.learner):
            yield self.initial or self.learner

    def batch_logprobs(
        self, model: torch.nn.Module, rollouts: Rollouts, with_entropy: bool, collision: bool = False
    ) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"] | None]:
        """`rollout_logprobs` of a model of the run in the learner's precision; the account counts the pass."""
        prompts = [len(rollouts.prompt_of_row(row)) for row in range(rollouts.num_rows)]
        self.account.forwarded(self.model_flops, prompts, rollouts.lengths.tolist())
        return rollout_logprobs(
            model, rollouts, self.temperature, self.precision, self.microbatching, self.device, with_entropy,
            collision,
        )  # fmt: skip

    def keep_weights(self, versions: int) -> None:
        """Keep a copy of the learner's weights, and of no more than the latest `versions`; 0 keeps none."""
        if not versions:
            return
        self.kept[self.updates] = {name: tensor.to("cpu", copy=True) for name, tensor in whole_weights(self.learner)}
        for version in sorted(self.kept)[:-versions]:
            del self.kept[version]

    @contextmanager
    def sampling_as(self, version: int) -> Iterator[None]:
        """Let the sampler hold kept weights: those of `version`, or the oldest kept if these are older still.

        Afterwards it holds the learner's again. No response may be on its way in another process.
        """
        held = min(kept for kept in self.kept if kept >= version)
        self.session.update_weights(self.kept[held].items(), held)
        yield
        self.session.update_weights(whole_weights(self.learner), self.updates)

    def probe_gap(self, answers: pd.DataFrame) -> float:
        """Mean over probe questions of the best correctness so far minus the accuracy now.

        Over the questions that every evaluation asks.
        """
        (probe,) = (suite for suite in self.suites_between if suite.name == "probe")
        answers = answers.dropna(subset=["outcome"])  # a grader may fail
        always = answers["problem_id"].isin([problem.id for problem in probe.problems])
        by_question = answers[always & (answers["suite"] == "probe")].groupby("problem_id")["outcome"]
        best, now = by_question.max(), by_question.mean()
        for question, correctness in zip(best.index.tolist(), best.tolist()):
            self.probe_best[question] = max(self.probe_best.get(question, 0.0), float(correctness))
        means = zip(now.index.tolist(), now.tolist())
        return float(sum(self.probe_best[question] - mean for question, mean in means) / len(now))

    def shards(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """The sharded part of a checkpoint of several ranks; {} with one rank. `names`: to load these, on any number.

        The optimisers, the critic, and the reference if it changes. The learner itself is saved whole, as a model.
        """
        if names is None and ranks.number() == 1:
            return {}
        trained, modules = {"optimizer": Trained(self.learner, self.optimizer)}, {}
        if self.critic is not None:
            trained["critic_optimizer"] = Trained(self.critic.trained, self.critic.optimizer)
            modules["critic"] = self.critic.trained
        if self.reference is not None:
            modules["reference"] = self.reference
        if names is None:
            names = {name for name, one in trained.items() if one.begun} | modules.keys()
        held = {name: one.to_state() for name, one in trained.items() if name in names}
        return held | {name: one.state_dict() for name, one in modules.items() if name in names}

    def from_shards(self, held: dict[str, Any]) -> None:
        """Restore what `shards` gave, after its tensors were loaded in place."""
        if "optimizer" in held:
            Trained(self.learner, self.optimizer).from_state(held["optimizer"])
        if self.critic is not None:
            if "critic_optimizer" in held:
                Trained(self.critic.trained, self.critic.optimizer).from_state(held["critic_optimizer"])
            if "critic" in held:
                self.critic.trained.load_state_dict(held["critic"])
        if self.reference is not None and "reference" in held:
            self.reference.load_state_dict(held["reference"])

    def to_state(self, log_position: int, with_reference: bool, shards: Collection[str] = ()) -> dict[str, Any]:
        """The content of a checkpoint beside the learner's weights; noise is counter-based and has no state.

        `shards` are the names of what is saved elsewhere, each rank its part.
        """
        reference = self.reference if with_reference and not shards else None
        return {
            "shards": sorted(shards),
            "ledger": dict(vars(self.account)),
            "updates": self.updates,
            "entropy_coef": self.entropy_coef,
            "kl_coef": self.kl_coef,
            "optimizer": None if "optimizer" in shards else self.optimizer.state_dict(),
            "log_position": log_position,
            "reference": None if reference is None else reference.state_dict(),
            "critic": self.critic and ({"updates": self.critic.updates} if shards else self.critic.to_state()),
            "probe_best": self.probe_best,
            "loss_scale": self.loss_scale.state_dict(),
            "kept": self.kept,
            "adapter": adapter_weights(self.learner),
            "memories": self.memories,
        }

    def from_state(self, state: dict[str, Any]) -> None:
        """Restore what `to_state` returned, but for what is in shards; the learner's weights must be loaded already."""
        self.account = ComputeAccount(**state["ledger"])
        self.updates = state["updates"]
        self.entropy_coef = state["entropy_coef"]
        self.kl_coef = state.get("kl_coef", self.kl_coef)  # older runs have no KL penalty that adapts
        self.log_position = state["log_position"]
        if state["optimizer"] is not None:
            load_optimizer(self.optimizer, self.learner, state["optimizer"])
        self.probe_best = state["probe_best"]
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.kept = state["kept"]
        self.memories = state.get("memories", self.memories)
        load_adapter(self.learner, state.get("adapter", {}))
        if self.critic is not None and state.get("shards"):
            self.critic.updates = state["critic"]["updates"]
        elif self.critic is not None:
            self.critic.from_state(state["critic"])
        if self.reference is not None and state["reference"] is not None:
            load_whole(self.reference, state["reference"])


def first_memories(options: Mapping[str, object], training: TrainingProblems) -> dict[str, dict[str, Any]]:
    """The initial memory of each option that has one, by axis."""
    held = {axis: one.first_memory(training.measured) for axis, one in options.items() if isinstance(one, Trick)}
    return {axis: memory for axis, memory in held.items() if memory}


def require_models(run: RunConfig) -> None:
    """Raise ValueError for a model or a teacher that cannot be used, before the run has a folder.

    A model that has to be built or downloaded is.
    """
    if missing := run.engine.missing():
        raise ValueError(missing)
    folder = run.model.resolve()
    if refused := run.engine.refusal(folder, run.schedule.streams):
        raise ValueError(refused)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    check_tokens(folder, tokenizer, encode_prompts(tokenizer, run.template, run.task.problems("train")[:1]))
    find_teacher(run.teacher, tokenizer)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run, read before any weights are loaded; `base` is the model folder before fine-tuning."""

    training: TrainingProblems
    suites: list[Suite]
    base: Path
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    left_out: list[str]  # what is said about questions whose prompts are too long


def read_inputs(run: RunConfig, training: TrainingProblems) -> Inputs:
    """Read all inputs of a run. Raises ValueError for inputs that cannot be trained on or evaluated."""
    limits, enough = run.lengths, partial(require_enough, run.problems_per_step, run.group_filter, run.schedule)
    enough(training.problems)
    check_sft(run.sft, run.task, training.problems)
    suites = make_suites(run)
    graded = [*training.problems, *(one for suite in suites if suite.verifier is run.reward for one in suite.problems)]
    run.reward.check(graded)
    run.verifier.check([one for suite in suites if suite.verifier is run.verifier for one in suite.problems])
    if isinstance(run.task, ExternalTask):
        warn_of_samples(run.reward, training.problems)
        if run.verifier != run.reward:
            warn_of_samples(run.verifier, training.problems)
    if missing := run.engine.missing():
        raise ValueError(missing)
    check_lengths(limits, run.model.known_context(), 1)
    base = run.model.resolve()
    stop_token_ids(base)
    if refused := run.engine.refusal(base, run.schedule.streams):
        raise ValueError(refused)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    short = fitting(limits, run.template, base, tokenizer, training.problems, TRAINING)
    problems = short.problems
    enough(problems)
    suites, left_out = short_suites(limits, run.template, base, tokenizer, suites)
    evaluated = [problem for suite in suites for problem in suite.problems]
    longest = at_their_longest(limits, run.template, tokenizer, problems)
    prompts = read_prompts(tokenizer, run.template, longest, evaluated)
    check_tokens(base, tokenizer, [sorted(prompts.tokens)])
    check_lengths(limits, context_length(base), prompts.longest)
    check_lengths(limits, limits.context, prompts.longest, "engine.context")
    run.truncation.check(tools_for(tokenizer))
    if privileged := privileged_prompts(run.teacher, run.template, tokenizer, base):
        check_privileged(privileged, base, longest, run.engine.max_tokens)
    return Inputs(replace(training, problems=problems), suites, base, tokenizer, prompts, [*short.notes, *left_out])


def short_suites(
    limits: LengthLimits,
    template: Template,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    suites: Sequence[Suite],
) -> tuple[list[Suite], list[str]]:
    """The suites without questions whose prompts are too long, and one note per split on those left out."""
    found = [fitting(limits, template, base, tokenizer, one.problems, f"{one.split} questions") for one in suites]
    short = [replace(suite, problems=one.problems) for suite, one in zip(suites, found)]
    return short, list(dict.fromkeys(note for one in found for note in one.notes))


def require_enough(
    problems_per_step: int, group_filter: GroupFilter, schedule: Schedule, problems: Sequence[Problem]
) -> None:
    """Raise ValueError if there are fewer training problems than one batch draws."""
    if len(problems) < problems_per_step:
        raise ValueError(
            f"problems_per_step={problems_per_step}, but the training split has {len(problems)} problems: "
            "lower it or enlarge the task"
        )
    if len(problems) < (drawn := group_filter.at_once(problems_per_step)):
        raise ValueError(
            f"this group_filter draws {drawn} problems at once, but the training split has {len(problems)}: lower "
            "group_filter.oversample or problems_per_step, or enlarge the task"
        )
    if len(problems) < (held := problems_per_step * (schedule.ahead + 1)) and schedule.streams:
        raise ValueError(
            f"this schedule has up to {held} different problems on their way at once, but the training split has "
            f"{len(problems)}: lower schedule.max_lag or problems_per_step, or enlarge the task"
        )


def open_state(
    run: RunConfig,
    device: torch.device,
    resume_from: Path | None = None,
    saved: dict[str, Any] | None = None,
    own: Path | None = None,
    inputs: Inputs | None = None,
) -> RunState:
    """Load the run state: from the base model, or from a checkpoint folder with `saved`, its loaded state.

    `own` is the run's folder, in which a fine-tuned model is kept. `inputs` are what the run reads, if that is known
    already.
    """
    inputs = inputs or read_inputs(run, training_problems(run, device, own))
    training, base, tokenizer = inputs.training, inputs.base, inputs.tokenizer
    problems = training.problems
    teacher = open_teacher(
        run.teacher, tokenizer, run.learner_precision.lm_head, inputs.prompts.longest + run.engine.max_tokens
    )

    weights = fingerprint(base)
    ranks.agree("the model's weights", lambda: weights)
    ranks.agree("prompts", inputs.prompts.record)
    tuning = run.sft, run.learner_settings, run.sampling, run.task
    start = ranks.on_first(lambda: fine_tuned(*tuning, base, own and own / "sft", tokenizer, problems, device))
    folder = start.folder
    loading, lm_head = run.model.loading(), run.learner_precision.lm_head
    # With an adapter the learner is the start and what a checkpoint says of the adapter.
    with in_parts():
        learner = load_model(folder if loading.lora or resume_from is None else resume_from, lm_head, loading)
    began = fingerprint_of(own_weights(learner)) if loading.lora or resume_from is None else None
    model_flops = ModelFlops.of(learner)
    if loading.lora is not None:
        add_adapter(learner, loading.lora, run.seed)
    learner = placed(learner, device)
    if run.gradient_checkpointing:
        recompute_layers(learner)

    def frozen_start() -> PreTrainedModel:
        """The start's weights in a model that is not trained; they are the learner's, unless it is resumed."""
        with in_parts():
            model = load_model(folder, lm_head, loading)
        if began is not None and (now := fingerprint_of(own_weights(model))) != began:
            raise ValueError(
                f"the weights in {folder} changed while loading (fingerprint {began} for the learner, {now} for its "
                "reference), or the disk fails; re-run the same command"
            )
        return placed(model, device).requires_grad_(False)

    def settled(model: PreTrainedModel, packs: bool) -> bool:
        """True if this model packs rows too. It is split over the ranks then, and was never whole on one of several."""
        with layer_by_layer(model):
            packs = packs and packing.prepare(model)
        shard(model, run.learner_precision)
        return packs

    packs = settled(learner, run.packing)
    reference = None
    if (run.kl.needs_reference or run.teacher.reads_reference) and (loading.lora is None or run.reference.changes):
        reference = frozen_start()
        packs = settled(reference, packs)
    initial = None
    if run.evaluation.initial_kl and loading.lora is None:
        initial = reference  # the same weights, as long as the reference does not change
        if reference is None or run.reference.changes:
            initial = frozen_start()
            packs = settled(initial, packs)
    if teacher is not None:
        packs = settled(placed(teacher.model, device), packs)
    critic = None
    if run.baseline.needs_critic:
        critic = open_critic(
            run.critic, folder, learner, run.optimizer, run.learner_precision, run.microbatching, device, run.seed
        )
        if run.gradient_checkpointing and critic.plan.owns_trunk:
            recompute_layers(critic.trunk)
    account = replace(start.account)
    training.charge(run.cost_model, run.engine.max_rows, model_flops, account)
    state = RunState(
        device=device,
        base=weights,
        start=start,
        training=training,
        tokenizer=tokenizer,
        suites=inputs.suites,
        suites_between=short_suites(run.lengths, run.template, base, tokenizer, make_suites(run, ends=False))[0],
        learner=learner,
        reference=reference,
        initial=initial,
        critic=critic,
        teacher=teacher,
        privileged=privileged_prompts(run.teacher, run.template, tokenizer, base),
        session=divided(run.engine.open(folder, run.sampler_precision, device), run.engine.ranks_a_model),
        optimizer=run.optimizer.build((one for one in learner.parameters() if one.requires_grad), learner),
        model_flops=model_flops,
        account=account,
        entropy_coef=run.entropy.start,
        kl_coef=run.kl.start,
        loss_scale=torch.amp.GradScaler(device.type, enabled=run.learner_precision.scales_loss),
        precision=run.learner_precision,
        temperature=run.engine.temperature,
        microbatching=run.microbatching.on(device.type, packs),
        memories=first_memories({axis: getattr(run, axis) for axis in AXES}, training),
    )
    if saved:
        state.from_state(saved)
        if saved.get("shards"):
            assert resume_from is not None, "what was saved has a folder"
            held = state.shards(saved["shards"])
            load_shards(resume_from, held)
            state.from_shards(held)
    state.session.update_weights(whole_weights(learner), state.updates)
    state.keep_weights(run.sync_settings.kept_versions)
    return state
