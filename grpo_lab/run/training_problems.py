"""The problems that a run trains on: those of its training split that its filters leave, and what finding them cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.budget.cost_model import CostModel
from grpo_lab.config.evaluation import Evaluation
from grpo_lab.config.run_config import RunConfig
from grpo_lab.config.stages import LengthLimits, QuestionSettings, SamplingSettings
from grpo_lab.policy.model_folder import context_length, stop_token_ids
from grpo_lab.rollout.grading import encode_prompts, tools_for
from grpo_lab.rollout.pass_rates import Base, Rates, ResponseKind, measure
from grpo_lab.run.lengths import TRAINING, check_lengths, fitting
from grpo_lab.seeding import uniform
from grpo_lab.tasks.base import Task
from grpo_lab.tasks.tables import fingerprint
from grpo_lab.tricks.pass_rate import Measured, difficulty_of, reason_to_drop
from grpo_lab.tricks.selects import Selects
from grpo_lab.tricks.twin import Twin
from grpo_lab.types import Float, NoiseKey, Problem, Tensor


@dataclass(frozen=True)
class TrainingProblems:
    """The training problems and how they were chosen.

    `whole` is the number of problems of the training split. `dropped` counts those that left, by axis and reason, in
    the order in which the filters are applied. `rates` are what the base model was asked for it. `metrics` are logged
    at step 0, `active` at every step. `measured` are the base model's right and graded responses by problem id.
    """

    problems: tuple[Problem, ...]
    whole: int
    dropped: Mapping[str, Mapping[str, int]]
    rates: tuple[Rates, ...]
    metrics: dict[str, float]
    active: dict[str, float]
    measured: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def clock(self) -> dict[str, float]:
        """The wall time that measuring took, by stage, for the line of step 0."""
        seconds = sum(rates.seconds for rates in self.rates)
        return {"pass_rate": seconds} if self.rates else {}

    def charge(self, cost_model: CostModel, max_rows: int, cost: ModelFlops, account: ComputeAccount) -> None:
        """Count in `account` what was sampled to measure pass rates, whenever that was."""
        for rates in self.rates:
            rates.charge(cost_model, max_rows, cost, account)

    def record(self) -> dict[str, Any] | None:
        """For run.json: the number of problems trained on, a hash of them, what was dropped; None without filters."""
        if not self.dropped:
            return None
        counts = {axis: dict(reasons) for axis, reasons in self.dropped.items()}
        return {
            "fingerprint": fingerprint(self.problems, any(problem.details for problem in self.problems)),
            "problems": len(self.problems),
            "of": self.whole,
            "dropped": counts,
        }

    def notes(self) -> list[str]:
        """A sentence for each filter that is on: what it dropped."""
        return [
            f"{axis} dropped {sum(reasons.values())} of the {self.whole} training problems{_listed(reasons)}"
            for axis, reasons in self.dropped.items()
        ]


def _listed(reasons: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{reason} {number}' for reason, number in reasons.items())})" if reasons else ""


def read_questions(settings: QuestionSettings) -> TrainingProblems:
    """The training problems that `question_filter` leaves; no model is asked.

    Raises ValueError if they are fewer than a step needs.
    """
    task, question_filter, number = settings.task, settings.question_filter, settings.problems_per_step
    whole = task.problems("train")
    if question_filter.is_no_op:
        if task.mixture:
            _require_enough(number, task.mixture, "the task", whole, whole, {})
        return TrainingProblems(whole, len(whole), {}, (), {}, {})
    reasons = question_filter.reasons(whole, _evaluated(task, settings.evaluation))
    reasons = redrawn(settings.twin, Selects.question_filter, reasons, whole, settings.seed)
    kept = tuple(problem for problem, reason in zip(whole, reasons) if not reason)
    dropped = dict(Counter(filter(None, reasons)).most_common())
    _require_enough(number, task.mixture, "question_filter", kept, whole, dropped)
    active = {"active_fraction/question_filter": 1 - len(kept) / len(whole)}
    metrics = _counted("question_filter", dropped) | {"problems/trained": float(len(kept))}
    return TrainingProblems(kept, len(whole), {"question_filter": dropped}, (), metrics, active)


def training_problems(
    run: RunConfig, device: torch.device, own: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> TrainingProblems:
    """The training problems that `question_filter`, and then `pass_rate`, leave.

    `own` is the run's folder, which keeps what was measured. Raises ValueError if they are fewer than a step needs.
    """
    read = read_questions(run.question_settings)
    plan, sampling = run.pass_rate, run.sampling
    enough = partial(_require_enough, run.problems_per_step, run.task.mixture)
    if not isinstance(plan, Measured):
        return read
    if missing := run.engine.missing():
        raise ValueError(missing)
    run.reward.check(read.problems)
    folder = run.model.resolve()
    base = Base.of(folder, AutoTokenizer.from_pretrained(folder, trust_remote_code=False), device)
    kept = fitting(run.lengths, run.template, folder, base.tokenizer, read.problems, TRAINING).problems
    reasons, measured = Counter[str](), list[Rates]()
    reasons.update({"too_long": len(read.problems) - len(kept)} if len(kept) < len(read.problems) else {})
    _check(run.lengths, sampling, folder, base, kept)
    if plan.guesses:
        guesses = measure(sampling, plan, ResponseKind.guesses(sampling, plan, base.tokenizer), base, kept, own, say)
        measured.append(guesses)
        guessed = [right > 0 for right in guesses.right]
        reasons.update("guessed" for known in guessed if known)
        kept = tuple(problem for problem, known in zip(kept, guessed) if not known)
        enough("pass_rate", kept, read.problems, reasons)
    rates = measure(sampling, plan, ResponseKind.answers(sampling, plan), base, kept, own, say)
    measured.append(rates)
    found, changed = [], 0
    why = [reason_to_drop(plan, right, graded) for right, graded in zip(rates.right, rates.graded)]
    why = redrawn(run.twin, Selects.pass_rate, why, kept, run.seed)
    for problem, right, graded, reason in zip(kept, rates.right, rates.graded, why):
        if reason:
            reasons[reason] += 1
            continue
        ranked = replace(problem, difficulty=difficulty_of(plan, right, graded)) if plan.ranks else problem
        changed += ranked != problem
        found.append(ranked)
    dropped = dict(reasons.most_common())
    enough("pass_rate", found, read.problems, dropped)
    gone = len(read.problems) - len(found)
    shares = [right / graded for right, graded in zip(rates.right, rates.graded) if graded]
    metrics = read.metrics | _counted("pass_rate", dropped) | {"problems/trained": float(len(found))}
    metrics |= {
        "pass_rate/mean": sum(shares) / len(shares),
        "pass_rate/unsolved": sum(share == 0 for share in shares) / len(shares),
        "pass_rate/solved": sum(share == 1 for share in shares) / len(shares),
    }
    return TrainingProblems(
        tuple(found), read.whole, {**read.dropped, "pass_rate": dropped}, tuple(measured), metrics,
        read.active | {"active_fraction/pass_rate": (gone + changed) / len(read.problems)},
        {problem.id: (right, graded) for problem, right, graded in zip(kept, rates.right, rates.graded)},
    )  # fmt: skip


def redrawn(twin: Twin, axis: Selects, reasons: Sequence[str], problems: Sequence[Problem], seed: int) -> list[str]:
    """The reasons for dropping each of `problems`, or those reasons dealt out again by the axis's random twin."""
    if not twin.of_axis(axis):
        return list(reasons)
    places, everything = torch.arange(len(reasons)), torch.ones(len(reasons), dtype=torch.bool)

    def noise(stream: str) -> Float[Tensor, "S"]:
        return torch.tensor([uniform(NoiseKey(seed, stream, 0, one.id, 0)) for one in problems], dtype=torch.float64)

    return [reasons[int(place)] for place in twin.redraw(axis, places, everything, noise)]


def pass_rates_text(found: TrainingProblems) -> str:
    """The pass rates for a terminal: a line for each number of right answers, the cost and the file."""
    lines = []
    for rates in found.rates:
        right = Counter(rates.right)
        most = max(right.values())
        lines.append(f"problems by right answers ({sum(right.values())}), kept in {rates.folder}")
        lines += [f"  {n:>3}  {right[n]:>6}  {'#' * round(40 * right[n] / most)}" for n in range(max(right) + 1)]
        sampled = int(sum(sum(row) for row in rates.table["lengths"]) - rates.table["injected"].sum())
        lines.append(f"{sampled} sampled tokens in {rates.seconds:.0f} s")
    return "\n".join([*lines, *found.notes()])


def check_trained(before: Mapping[str, Any], trained: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a run whose run.json is `before` began with other training problems than `trained` says."""
    known = before.get("trained_on")
    if before and known is not None and (trained or {}).get("fingerprint") != known["fingerprint"]:
        raise ValueError(
            f"the filters leave other training problems ({(trained or {}).get('problems')}) than when this run began "
            f"({known['problems']}): restore the base model and package versions it began with, or choose another "
            "runs_dir"
        )


def _check(
    limits: LengthLimits, sampling: SamplingSettings, folder: Path, base: Base, problems: Sequence[Problem]
) -> None:
    """Raise ValueError for what would fail while the base model is asked, before it is loaded."""
    stop_token_ids(folder)
    prompts = encode_prompts(base.tokenizer, sampling.template, problems)
    longest = max(map(len, prompts))
    check_lengths(limits, context_length(folder), longest)
    check_lengths(limits, limits.context, longest, "engine.context")
    sampling.truncation.check(tools_for(base.tokenizer))


def _evaluated(task: Task, evaluation: Evaluation) -> list[str]:
    """The questions of every other split of the task, and of the tables that evaluation asks."""
    splits = [task.problems(split) for split in task.splits if split not in ("train", "probe")]
    return [problem.question for part in (*splits, *evaluation.table_problems.values()) for problem in part]


def _counted(axis: str, dropped: Mapping[str, int]) -> dict[str, float]:
    return {f"problems/dropped/{axis}/{reason}": float(number) for reason, number in dropped.items()}


def _require_enough(
    problems_per_step: int,
    mixture: Mapping[str, float],
    axis: str,
    kept: Sequence[Problem],
    of: Sequence[Problem],
    dropped: Mapping[str, int],
) -> None:
    if len(kept) < problems_per_step:
        raise ValueError(
            f"{axis} leaves {len(kept)} of {len(of)} training problems{_listed(dropped)}, and "
            f"problems_per_step={problems_per_step}: loosen {axis}, lower problems_per_step or enlarge the task"
        )
    sources = Counter(problem.source for problem in kept)
    for name, share in mixture.items():
        if sources[name] < (needed := math.ceil(share * problems_per_step)):
            raise ValueError(
                f"{axis} leaves {sources[name]} problems of the source {name}, and a step draws up to {needed} of it: "
                f"loosen {axis}, lower problems_per_step or task.sources.{name}.weight"
            )
