"""`grpo-lab microscope`: a run's stored step, or a file of rollouts, through sets of options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from grpo_lab.analysis.report.reader import read_rollouts
from grpo_lab.analysis.table_rows import aligned
from grpo_lab.config.stages import LearnerSettings
from grpo_lab.distributed.device import choose_device
from grpo_lab.instruments.microscope.exact import (
    Bias,
    biases,
    enumerate_responses,
    exact_gradient,
    longest_possible,
    vocabulary_of,
)
from grpo_lab.instruments.microscope.exchange import (
    StoredStep,
    read_file,
    to_step,
    with_logprobs,
    with_policies,
    write_file,
)
from grpo_lab.instruments.microscope.measure import Extras, Measured, Policy, measure
from grpo_lab.instruments.microscope.option_sets import APPLIED, OWN, OptionSet, option_set
from grpo_lab.instruments.microscope.page import page
from grpo_lab.policy.adapters import add_adapter, load_adapter
from grpo_lab.policy.model_folder import stop_token_ids
from grpo_lab.policy.models import load_model
from grpo_lab.reproduce.record import RunRecord, read_record
from grpo_lab.rollout.grading import decode
from grpo_lab.run import checkpoint
from grpo_lab.tracking.checksums import check_manifest
from grpo_lab.tracking.files import write_json
from grpo_lab.types import Problem

FOLDER = "microscope"  # in a run's folder; the report reads its JSON files


@dataclass(frozen=True)
class LookRequest:
    """The arguments of the command; `source` is a run's folder or a file of the exchange format."""

    source: Path
    step: int | None
    sets: Sequence[str]
    weights: str | None
    temperature: float
    exact: int | None
    samples: int
    prompts: int
    write: Path | None
    to: Path | None


@dataclass(frozen=True)
class Loaded:
    """A step to look at, the policy that its gradient goes through (None without a model), and where that is from."""

    step: StoredStep
    table: pd.DataFrame
    extras: Extras
    policy: Policy | None
    record: RunRecord | None
    notes: list[str]


@dataclass(frozen=True)
class Seen:
    """The result: the lines for a terminal, and the files."""

    lines: list[str]
    files: list[Path]


def look(request: LookRequest, say: Callable[[str], object]) -> Seen:
    """Read, measure, print and write. Raises ValueError with a remedy for input that does not fit."""
    loaded = _of_run(request) if request.source.is_dir() else _of_file(request)
    step, policy = loaded.step, loaded.policy
    for note in loaded.notes:
        say(note)
    written = [] if request.write is None else [request.write]
    if request.write is not None:
        write_file(with_policies(loaded.table, step), request.write)
    sets, notes = _sets(request, loaded)
    measured = measure({name: one.step for name, one in sets.items()}, step, loaded.extras, policy)
    found: dict[str, Any] = {
        "source": str(request.source),
        "step": step.step,
        "policy": "the table's current log-probs, no model" if policy is None else policy.name,
        "gradient": "in the log-probs of tokens" if policy is None else "in the weights",
        "responses": step.rollouts.num_rows,
        "group_size": step.rollouts.group_size,
        "tokens": int(step.rollouts.sampled_mask.sum()),
        "notes": [*loaded.notes, *step.notes, *notes],
        "sets": [_as_json(one, sets[one.name], step) for one in measured],
        "exact": None,
    }
    lines = [*_table(measured, found), *(f"note: {note}" for note in [*step.notes, *notes])]
    if request.exact is not None:
        estimated, described = _exact(request, loaded, sets, say)
        found["exact"] = described | {"estimators": {name: asdict(one) for name, one in estimated.items()}}
        lines += ["", *exact_lines(estimated, described)]
    folder = request.to or (request.source / FOLDER if request.source.is_dir() else Path(FOLDER))
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"step={step.step:06d}" if request.source.is_dir() else request.source.stem
    paths = [folder / f"{stem}.{kind}" for kind in ("json", "html")]
    found["lines"] = lines
    write_json(paths[0], found, sort=False)
    paths[1].write_text(page(found, measured, step, lines), encoding="utf-8")
    return Seen(lines, [*written, *paths])


def _sets(request: LookRequest, loaded: Loaded) -> tuple[dict[str, OptionSet], list[str]]:
    """The plain options first, the run's own where it is a run, then those of --with; and notes."""
    step, record = loaded.step, loaded.record
    seed = 0 if record is None else record.run.seed
    make = partial(option_set, group_size=step.rollouts.group_size, problems=len(step.rollouts.problems), seed=seed)
    sets = [make("")]
    notes = []
    if record is not None:
        own = OptionSet(OWN, record.run)
        if own.refusal:
            notes.append(f"the run's own options are left out: {own.refusal}")
        else:
            sets.append(own)
    for text in request.sets:
        one = make(text)
        if one.refusal:
            raise ValueError(f"--with {text}: {one.refusal}")
        sets.append(one)
    return {one.name: one for one in sets}, notes + [f"{one.name}: {note}" for one in sets for note in one.notes]


def _of_file(request: LookRequest) -> Loaded:
    """A file of the exchange format, with a model if --weights names its folder."""
    if request.exact is not None:
        raise ValueError("--exact needs a run, whose grader judges every response: give a run's folder")
    table = read_file(request.source)
    if request.step is not None and "step" in table:
        table = table[table["step"] == request.step]
    step = to_step(table, request.source)
    policy, notes, extras = None, [], Extras()
    if request.weights is None:
        notes.append("a file without --weights: gradients are in the log-probs of tokens, not in the weights")
    else:
        if "prompt_ids" not in table:
            raise ValueError(f"{request.source} has no column prompt_ids, which a model reads: add it")
        run = option_set("", step.rollouts.group_size, len(step.rollouts.problems), 0).run
        weights = Path(request.weights)
        policy = _policy(weights, f"weights in {weights}", run.device, run.learner_settings, request.temperature)
    if "old" not in step.policies:
        notes.append("no token_old_logprob: the sampler's log-probs stand for the old policy's")
        step = with_logprobs(step, old=step.rollouts.sampler_logprobs)
    if policy is not None:
        step = _scored(step, policy)
    elif "current" not in step.policies:
        notes.append("no token_current_logprob: the old policy stands for the current one, so every ratio is 1")
        step = with_logprobs(step, current=step.policies["old"])
    return Loaded(step, table, extras, policy, None, notes)


def _of_run(request: LookRequest) -> Loaded:
    """A step that a run stored, with the weights of one of its checkpoints."""
    record = read_record(request.source)
    run, notes = record.run, []
    table = read_rollouts(record.folder, request.step)
    number = int(table["step"].iloc[0])
    step = to_step(table, record.folder / "rollouts" / f"step={number:06d}.parquet", dict(run.reward.part_weights))
    known = _weights_of(record)
    since = number - 1 if request.weights is None else request.weights
    named = {str(at): at for at in known}
    if str(since) not in named:
        there = ", ".join(map(str, known))
        raise ValueError(
            f"{record.folder} keeps no weights after step {since}, from which step {number} began; it has those after "
            f"steps {there}: --weights STEP looks from one of these (ratios then are to another policy), or run with "
            "checkpoint_every=1 and a larger keep_checkpoints"
        )
    at = named[str(since)]
    describe = "the weights that RL began with" if at == 0 else f"the checkpoint after step {at}"
    loaded = partial(
        _policy, device=run.device, learning=run.learner_settings, temperature=run.engine.temperature, record=record
    )
    policy = loaded(known[at], describe)
    before = policy if at == number - 1 else None
    if before is None and number - 1 in known:
        before = loaded(known[number - 1], f"weights before step {number}")
    step = _scored(step, policy)
    if "old" not in step.policies:
        if before is not None:
            step = with_logprobs(step, old=before.logprobs(step.rollouts, False)[0])
        else:
            step = with_logprobs(step, old=step.rollouts.sampler_logprobs)
            notes.append("the weights before this step are not kept: the sampler stands for the old policy")
    rollouts = step.rollouts
    extras = Extras(reference=lambda: _reference(record, known[0]).logprobs(rollouts, False)[0])
    if before is not None:
        extras.entropy = lambda: _second(before, rollouts, False)
        extras.collision = lambda: _second(before, rollouts, True)
    if number > 1 and number - 1 in known:
        saved = checkpoint.load_state(known[number - 1])
        extras.kl_coef, extras.entropy_coef = saved.get("kl_coef"), saved["entropy_coef"]
    notes.append(f"gradient at {policy.name}, over the rollouts of step {number}")
    return Loaded(step, table, extras, policy, record, notes)


def _second(policy: Policy, rollouts: Any, collision: bool) -> torch.Tensor:
    found = policy.logprobs(rollouts, not collision, collision)[1]
    assert found is not None, "it was asked for"
    return found


def _reference(record: RunRecord, start: Path) -> Policy:
    if record.run.reference.changes:
        raise ValueError("these options read the reference, which changes in this run and is not kept: leave them out")
    run = record.run
    return _policy(start, "the reference", run.device, run.learner_settings, run.engine.temperature, record)


def _weights_of(record: RunRecord) -> dict[int, Path]:
    """Step -> folder of the weights after it, for all that a run keeps; 0 is the model that RL began with."""
    own = record.folder / "sft"
    start = own if own.is_dir() else record.run.model.at_hand()
    found = {} if start is None else {0: start}
    for root in (record.folder / checkpoint.BEST, record.folder / "checkpoints"):
        found |= {checkpoint.step_of(folder): folder for folder in checkpoint.complete(root)}
    return dict(sorted(found.items()))


def _policy(
    folder: Path, name: str, device: str, learning: LearnerSettings, temperature: float, record: RunRecord | None = None
) -> Policy:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no model: give a folder that transformers loads, with config.json")
    if record is not None and folder.is_relative_to(record.folder) and folder.name.startswith("step="):
        check_manifest(folder, record.described["run_key"])
    logging.disable_progress_bar()
    model = load_model(folder, learning.precision.lm_head) if record is None else _learner(folder, record)
    at = choose_device(device)
    microbatching = replace(learning.microbatching, packs=False)
    return Policy(model.to(at), name, temperature, learning.precision, microbatching, at)  # pyright: ignore


def _learner(folder: Path, record: RunRecord) -> PreTrainedModel:
    """The run's learner with the weights of `folder`: with LoRA the start and its adapter, which is all that trains."""
    run, loading = record.run, replace(record.run.model.loading(), compiled=False)
    if loading.lora is None:
        return load_model(folder, run.learner_precision.lm_head, loading)
    start = _weights_of(record).get(0)
    if start is None:
        raise ValueError(f"the model that {record.folder} adds its adapter to is not on this machine: bring it back")
    model = load_model(start, run.learner_precision.lm_head, loading)
    add_adapter(model, loading.lora, run.seed)
    if folder != start:
        load_adapter(model, checkpoint.load_state(folder)["adapter"])
    return model


def _scored(step: StoredStep, policy: Policy) -> StoredStep:
    """The step with the log-probs and entropies of its tokens under a policy, as the current one's."""
    logprobs, entropy = policy.logprobs(step.rollouts)
    assert entropy is not None, "it was asked for"
    return with_logprobs(step, current=logprobs, entropy=entropy)


def _exact(
    request: LookRequest, loaded: Loaded, sets: Mapping[str, OptionSet], say: Callable[[str], object]
) -> tuple[dict[str, Bias], dict[str, Any]]:
    """The exact gradient of the first prompts, and every set's bias and variance."""
    policy, record, step = loaded.policy, loaded.record, loaded.step
    assert policy is not None and record is not None and request.exact is not None, "of a run"
    if request.prompts < 1 or request.samples < 32:
        raise ValueError("--exact: at least --prompts 1 and --samples 32, of which 16 blocks give standard errors")
    limit = request.exact or min(longest_possible(vocabulary_of(policy)), record.run.engine.max_tokens)
    training = record.run.task.problems("train")
    problems = {one.id: one for one in training} if record.run.task.at_hand else {}
    places = _most_short(step, limit)[: request.prompts]
    graded: list[Problem] = [problems.get(one.id, one) for one in (step.rollouts.problems[place] for place in places)]
    for name, one in sets.items():
        run = one.run
        if run.entropy.needs_gradient and not run.entropy.imitates:
            raise ValueError(f"--exact: {name} has an entropy term, which is no estimate of the gradient: leave it out")
        if run.kl.needs_reference:
            raise ValueError(f"--exact: {name} has a KL penalty, whose gradient J does not have: leave it out")
    folder = _weights_of(record)
    start = next(iter(folder.values()))
    tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=False)
    prompts = [step.rollouts.prompts[place] for place in places]
    every = enumerate_responses(
        policy, graded, prompts, stop_token_ids(start), limit, record.run.reward, partial(decode, tokenizer),
        record.run.seed,
    )  # fmt: skip
    exact = exact_gradient(policy, every)
    mass = every.logprobs.exp()
    described = {
        "limit": limit, "prompts": [one.question for one in graded], "responses": every.rollouts.group_size,
        "steps": request.samples,
        "group_size": step.rollouts.group_size, "total_probability": float(mass.sum(dim=1).mean()),
        "expected_reward": float((mass * every.graded.reward).sum(dim=1).mean()), "norm": float(exact.norm()),
    }  # fmt: skip
    if not described["norm"]:
        raise ValueError(
            f"--exact: no response of {limit} tokens has a reward other than 0, so the exact gradient is 0: raise the "
            "limit, or look at another step"
        )
    say(f"enumerated {described['responses']} responses to each prompt; sampling {request.samples} steps")
    sized = {name: one.sized(len(places), step.rollouts.group_size).step for name, one in sets.items()}
    found = biases(sized, policy, every, exact, step.rollouts.group_size, request.samples, record.run.seed)
    return found, described


def _most_short(step: StoredStep, limit: int) -> list[int]:
    """Positions of the prompts, those first with the most rewarded stored responses of at most `limit` tokens."""
    size = step.rollouts.group_size
    short = (step.rollouts.finished & (step.rollouts.lengths <= limit)).reshape(-1, size)
    return (-(short * step.graded.reward).sum(dim=1)).argsort(stable=True).tolist()


def _table(measured: Sequence[Measured], found: Mapping[str, Any]) -> list[str]:
    """The table of a terminal."""
    names = [one.name for one in measured]
    head = ["options", "norm", *(f"cos {index}" for index in range(len(names))), "affected", "removed", "reversed",
            "added", "clipped"]  # fmt: skip
    rows = [head]
    for index, one in enumerate(measured):
        shares = [f"{one.shares[name]:.1%}" for name in ("affected", "removed", "reversed", "added", "clipped")]
        rows.append([
            f"{index} {one.name}", f"{one.norm:.4g}", *(_number(one.cosines[other]) for other in names), *shares,
        ])  # fmt: skip
    return [
        f"step {found['step']}: {found['responses']} responses in groups of {found['group_size']}, {found['tokens']} "
        f"sampled tokens; gradient {found['gradient']}",
        *aligned(rows),
    ]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def exact_lines(found: Mapping[str, Bias], described: Mapping[str, Any]) -> list[str]:
    """The table of bias and variance, with the problem that it is about."""
    rows = [["options", "scale", "bias (share of gradient)", "variance of a step"]]
    for name, one in found.items():
        size = math.sqrt(max(one.squared_bias.value, 0.0))
        shown = f"{size:.3f}" if one.significant else f"not significant (below {one.bound:.3f})"
        rows.append([
            name, f"{one.scale.value:.4g} +- {one.scale.error:.1g}", shown,
            f"{one.variance.value:.3g} +- {one.variance.error:.1g}",
        ])  # fmt: skip
    prompts, undrawn = ", ".join(described["prompts"]), next(iter(found.values())).undrawn
    return [
        f"exact policy gradient, responses of at most {described['limit']} tokens to {prompts}: "
        f"{described['responses']} responses each, expected reward {described['expected_reward']:.4f}, norm "
        f"{described['norm']:.4g}; {described['steps']} sampled steps, groups of {described['group_size']}",
        *aligned(rows),
        f"sampled steps drew responses that make all but {undrawn:.2%} of the exact gradient's norm",
    ]


def _as_json(one: Measured, options: OptionSet, step: StoredStep) -> dict[str, Any]:
    """A set's numbers, and weight and affected mark of each token by response."""
    lengths = step.rollouts.lengths.tolist()
    return {
        "name": one.name,
        "options": {axis: type(getattr(options.run, axis)).__name__ for axis in APPLIED},
        "loss": one.loss,
        "gradient_norm": one.norm,
        "cosines": {name: None if math.isnan(value) else value for name, value in one.cosines.items()},
        "shares": dict(one.shares),
        "token_weights": [_rounded(row[:end]) for row, end in zip(one.weights, lengths)],
        "token_affected": [row[:end].int().tolist() for row, end in zip(one.changed, lengths)],
    }  # fmt: skip


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
