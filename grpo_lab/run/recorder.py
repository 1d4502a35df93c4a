"""Stage 12 of the loop: log a finished step, and evaluate and save when due."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from grpo_lab.budget.compute_account import ComputeAccount
from grpo_lab.config.stages import RecordSettings
from grpo_lab.distributed import ranks
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.run import checkpoint
from grpo_lab.run.evaluate import InitialLogprobs, evaluate, of_the_sampler, sharpened
from grpo_lab.run.memory import remedied
from grpo_lab.run.no_signal import has_signal, no_signal_text
from grpo_lab.run.state import RunState
from grpo_lab.tracking import interrupt
from grpo_lab.tracking.activity import current, doing
from grpo_lab.tracking.checksums import files_of, with_checksum
from grpo_lab.tracking.metrics import FURTHER_SUITES, GPU_PEAK, SUITES, check, is_active_fraction
from grpo_lab.tracking.mlflow_exporter import Tracking
from grpo_lab.tracking.progress import RunProgress, Unshown, describe_stages
from grpo_lab.tracking.renames import with_metric_names
from grpo_lab.tracking.run_log import RunLog, UnwrittenLog
from grpo_lab.tracking.run_reader import STOP, STOPPED, parse_line, saved_step
from grpo_lab.types import Exhausted, Float, Rollouts, Tensor

_MAX_IDLE_STEPS = 100
_STAGES = {
    "generate": "generating", "logprobs": "log-probs", "credit": "advantages", "train": "training",
    "sync": "sending weights to the sampler", "evaluate": "evaluating",
}  # fmt: skip


@dataclass
class Clock:
    """Wall time of the stages of one step; it goes only to timing.jsonl and the account.

    A stage that runs out of memory raises OutOfMemory.
    """

    step: int
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        with remedied(stage), doing(f"step {self.step}: {_STAGES[stage]}"):
            yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else the next stage that waits for the GPU is charged for this work
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


@dataclass
class Recorder:
    """Stage 12: logs and shows a finished step, and evaluates and saves when due."""

    settings: RecordSettings
    log: RunLog | UnwrittenLog
    progress: RunProgress | Unshown
    run_key: str
    active: dict[str, float] = field(default_factory=dict)
    seconds_logging: float = 0.0  # of the previous step: a line cannot hold the time of its own writing
    steps_without_update: int = 0
    steps_without_signal: int = 0
    warnings: list[str] = field(default_factory=list)  # what training showed
    unfinished: dict[str, Any] | None = None  # a trained step whose evaluation a signal ended, for `catch_up`
    saved_at: float = field(default_factory=time.monotonic)  # in s; at first when the run began, or went on
    spent: float = 0.0  # share of the budget after the latest step
    best: dict[str, Any] = field(default_factory=dict)  # metric, step and value of the best evaluation so far

    def record(
        self,
        state: RunState,
        queue: RolloutQueue,
        clock: Clock,
        metrics: Mapping[str, float | int],
        rollouts: Callable[[], pd.DataFrame] | None = None,
        sampled_by: int | None = None,
    ) -> None:
        """Log the step that the account counts as the latest.

        `rollouts` makes its table, and `sampled_by` is the version of the weights that sampled its batch.
        """
        settings, account, step = self.settings, state.account, state.account.steps
        # All ranks go by one clock, since a budget may end by it.
        account.device_seconds += ranks.from_first(sum(clock.seconds.values())) * ranks.number()
        before, self.spent = self.spent, account.spent(settings.budget)
        if rollouts is not None and table_is_due(settings.rollouts_every, step, before, self.spent):
            self.log.write_table("rollouts", step, rollouts())
        numbers, speed = {**metrics, **state.start.active, **state.training.active}, {}
        if "generate" in clock.seconds:
            generated = numbers["rollout/length"] * numbers["rollout/groups"] * settings.group_size
            speed["time/tokens_per_second"] = generated / sum(clock.seconds.values())
        self._finish(state, queue, clock, numbers, speed, sampled_by)

    def catch_up(self, state: RunState, queue: RolloutQueue) -> None:
        """Evaluate and log the step that a checkpoint holds without its evaluation, if it does."""
        if self.unfinished is not None:
            left, self.unfinished = self.unfinished, None
            clock = Clock(state.account.steps, left["seconds"])
            self._finish(state, queue, clock, left["numbers"], left["speed"], left["sampled_by"])
            # The checkpoint that there is has the digest of a log without this step.
            self.save(state, queue, self.log.folder / "checkpoints")

    def _finish(
        self,
        state: RunState,
        queue: RolloutQueue,
        clock: Clock,
        numbers: dict[str, float | int],
        speed: dict[str, float],
        sampled_by: int | None,
    ) -> None:
        """Evaluate, log, save and show the latest step. Raises KeyboardInterrupt once a signal has asked for it."""
        settings, account, step = self.settings, state.account, state.account.steps
        share, checkpoints = account.spent(settings.budget), self.log.folder / "checkpoints"
        if step % settings.evaluation.every == 0 or share >= 1:
            try:
                with clock("evaluate"), _left_by_a_signal():
                    accuracies, answers = self._evaluate(state, step == 0 or share >= 1, sampled_by)
                    accuracies |= {"eval/probe/best_gap": state.probe_gap(answers)}
                    self.log.write_table("eval", step, answers.assign(step=step))
            except KeyboardInterrupt as error:
                # Several ranks do not leave an evaluation together, and a checkpoint needs all of them.
                if step == 0 or ranks.number() > 1 or not interrupt.requested():
                    raise
                self.unfinished = {"numbers": numbers, "seconds": clock.seconds, "speed": speed}
                self.unfinished["sampled_by"] = sampled_by
                saved = self.save(state, queue, checkpoints)
                error.args = (f"step {step} is saved in {saved}; its evaluation was interrupted and will be repeated",)
                raise
            numbers = numbers | accuracies
        for name, value in numbers.items():
            if is_active_fraction(name):
                self.active[name] = max(self.active.get(name, 0.0), value)
        no_update = numbers.get("train/skipped_updates", 0) > 0 and numbers["train/updates"] == 0
        self.steps_without_update = self.steps_without_update + 1 if no_update else 0
        if step:
            self._warn_without_signal(step, numbers)
        numbers |= account.metrics()
        timing = {f"time/{stage}": seconds for stage, seconds in clock.seconds.items()}
        timing |= speed | {"time/log": self.seconds_logging}
        started = time.perf_counter()
        timing["budget/device_seconds"] = account.device_seconds
        if state.device.type == "cuda":
            timing[GPU_PEAK] = torch.cuda.max_memory_reserved(state.device) / 2**30
        self.log.write_step(step, check(numbers), check(timing))
        self._keep_best(state, numbers)
        from_ranks = ranks.gathered(
            (time.monotonic() - self.saved_at, interrupt.requested())
        )  # so that all save together
        late = settings.checkpoint_minutes is not None and from_ranks[0][0] >= 60 * settings.checkpoint_minutes
        ends = share < 1 and any(interrupted for _, interrupted in from_ranks)
        saved = None
        if ends or (step and (step % settings.checkpoint_every == 0 or late or share >= 1)):
            saved = self.save(state, queue, checkpoints)
        self.seconds_logging = time.perf_counter() - started
        self.progress.show(step, share, numbers, timing)
        if ends:
            raise KeyboardInterrupt(f"step {step} is finished and saved in {saved}")
        if share < 1:
            self._refuse_to_idle()

    def _keep_best(self, state: RunState, numbers: Mapping[str, float]) -> None:
        """Save the weights if `checkpoint.best` is higher than in all evaluations before; not those it began with."""
        metric, step = self.settings.best_metric, state.account.steps
        if metric is None or metric not in numbers:
            return
        value = ranks.from_first(numbers[metric])
        if self.best.get("metric", metric) != metric:  # the run was resumed with another one
            self.best = {}
        if math.isnan(value) or value <= self.best.get("value", -math.inf):
            return
        self.best = {"metric": metric, "step": step, "value": value}
        if step:
            root = self.log.folder / checkpoint.BEST
            stamp = self.log.stamp()
            checkpoint.save(root, step, state.learner, state.tokenizer, None, self.run_key, stamp, {})

    def _evaluate(self, state: RunState, ends: bool, sampled_by: int | None) -> tuple[dict[str, float], pd.DataFrame]:
        """Evaluate the learner's weights, and those that sampled the batch if they are older and kept."""
        settings = self.settings
        suites = state.suites if ends else state.suites_between
        if state.account.steps == 0:
            suites = [*suites, *sharpened(suites, settings.evaluation.sharpened)]
        ask = partial(
            evaluate, session=state.session, tokenizer=state.tokenizer, template=settings.template,
            plan=settings.evaluation, seed=settings.seed, reward=settings.reward, verifier=settings.verifier,
        )  # fmt: skip
        metrics, answers = ask(suites, initial=self._initial_logprobs(state))
        if sampled_by is None or not state.kept or sampled_by == state.updates:
            return metrics, answers
        with state.sampling_as(sampled_by):
            older, their_answers = ask(of_the_sampler(suites))
        return metrics | older, pd.concat([answers, their_answers], ignore_index=True)

    def _warn_without_signal(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Warn once that no group has had signal for long, and again once signal came back and went."""
        self.steps_without_signal = 0 if has_signal(metrics) else self.steps_without_signal + 1
        if 0 < self.settings.no_signal_steps == self.steps_without_signal:
            text = no_signal_text(self.steps_without_signal, metrics, self.settings.max_tokens)
            self.warnings.append(f"step {step}: {text}")
            self.progress.say(text, "warning")

    def _refuse_to_idle(self) -> None:
        """Raise Exhausted after too many steps in a row without an update."""
        if self.steps_without_update >= _MAX_IDLE_STEPS:
            raise Exhausted(
                f"{_MAX_IDLE_STEPS} steps in a row left no token to train on: every group was filtered or every "
                "response masked. The policy may have solved or lost the task; loosen group_filter or truncation"
            )

    def _initial_logprobs(self, state: RunState) -> InitialLogprobs | None:
        if not self.settings.evaluation.initial_kl:
            return None

        def logprobs(rollouts: Rollouts) -> Float[Tensor, "N T"]:
            with state.as_initial() as model:
                return rollout_logprobs(
                    model, rollouts, state.temperature, state.precision, state.microbatching, state.device, False
                )[0]

        return logprobs

    def announce(self, signal_name: str) -> None:
        """Say what the first signal leads to, and what a second one would."""
        who = "Ctrl-C" if signal_name == "SIGINT" else signal_name
        stages = current()
        doing_now = f" ({describe_stages(stages, time.monotonic())})" if stages else ""
        limit = ""
        if (self.log.folder / STOP).exists():  # `grpo-lab stop` signals only this process
            interrupt.take_time()
        elif ranks.number() > 1:
            limit = "; torchrun kills it after 30 s"
        saved = saved_step(self.log.folder)
        start = "restarts from step 0" if saved is None else f"resumes from step {saved}"
        self.progress.say(
            f"{who}: finishing this step{doing_now}, then saving and stopping{limit}. A second signal stops at once; "
            f"the run then {start}"
        )

    def from_state(self, saved: Mapping[str, Any]) -> None:
        """Restore what `save` put into a checkpoint."""
        self.active |= with_metric_names(saved.get("active") or saved.get("touched", {}))
        self.steps_without_update = saved["steps_without_update"]
        self.unfinished = saved.get("unfinished")
        self.steps_without_signal, self.warnings = saved.get("without_signal", 0), saved.get("warnings", [])
        self.spent, self.best = saved.get("spent", 0.0), saved.get("best", {})

    def save(self, state: RunState, queue: RolloutQueue, root: Path) -> Path:
        """Write a checkpoint of the run after its latest step, and delete old ones."""
        stamp = self.log.stamp()
        shards = state.shards()
        if not self.settings.reference_changes:
            shards.pop("reference", None)
        saved = state.to_state(stamp["bytes"], self.settings.reference_changes, shards) | {"queue": queue.to_state()}
        saved |= {"active": dict(self.active), "steps_without_update": self.steps_without_update}
        saved |= {"unfinished": self.unfinished, "without_signal": self.steps_without_signal}
        saved |= {"warnings": list(self.warnings), "spent": self.spent, "best": dict(self.best)}
        step = state.account.steps
        with doing(f"saving the checkpoint of step {step}"):
            folder = checkpoint.save(root, step, state.learner, state.tokenizer, saved, self.run_key, stamp, shards)
            if ranks.is_first():
                checkpoint.prune(root, self.settings.keep_checkpoints)
                # Only now: a run that resumes from an earlier checkpoint may need the best weights of that time.
                best = self.log.folder / checkpoint.BEST
                checkpoint.keep_only(best, [best / checkpoint.named(int(self.best["step"]))] if self.best else [])
        self.saved_at = time.monotonic()
        return folder


def _left_by_a_signal() -> contextlib.AbstractContextManager[None]:
    """A part of a step that a signal ends at once; several ranks go through it to its end, or one would wait."""
    return interrupt.at_once() if ranks.number() == 1 else contextlib.nullcontext()


_TABLES = 10  # of rollouts, evenly over the budget


def table_is_due(every: int | None, step: int, before: float, after: float) -> bool:
    """True if this step's rollouts are kept, where it took the spent share of the budget from `before` to `after`.

    The first step's and the last step's always are; between them each `every`-th from the first on, or without
    `every` those of the steps that spend another tenth of the budget.
    """
    if step == 1 or after >= 1:
        return True
    return int(before * _TABLES) < int(after * _TABLES) if every is None else (step - 1) % every == 0


@contextlib.contextmanager
def exported(tracking: Tracking, folder: Path) -> Iterator[None]:
    """Export the folder during the run. Enter it first: it must end after DONE or error.txt has been written."""
    exporter = tracking.exporter(folder)
    exporter.start()
    try:
        yield
    finally:
        with doing("sending the rest to the tracker"):
            exporter.stop()


@contextlib.contextmanager
def failures_recorded(log: RunLog) -> Iterator[None]:
    """Write error.txt into the run's folder for any exception, Ctrl-C included, and re-raise it.

    An interrupt then says who asked for it, what is saved and what is lost.
    """
    try:
        yield
    except BaseException as error:
        with _signals_unheard(), contextlib.suppress(OSError):  # a full disk must not hide the first error
            cause = ranks.cause_of(error)
            if isinstance(error, KeyboardInterrupt) and isinstance(cause, KeyboardInterrupt):
                who = STOPPED if (log.folder / STOP).exists() else "interrupted"
                error.args, cause = (f"{who}: {str(error) or what_is_lost(log)}",), error
            log.mark_error(cause)
        raise


def what_is_lost(log: RunLog | UnwrittenLog, within_a_step: bool = False) -> str:
    """The last saved step of a run that ends now, and the steps that it will compute again."""
    saved, logged = saved_step(log.folder), log.last_step
    kept = saved or 0
    steps = f"steps {kept + 1} to {logged}" if logged > kept + 1 else f"step {logged}" if logged > kept else ""
    begun = f"the unfinished step {logged + 1}" if within_a_step and logged >= 0 else ""
    again = " and ".join(filter(None, (steps, begun)))
    if saved is None:
        known = f"no checkpoint yet: it recomputes {again}" if again else "no step was trained yet"
        return f"{known}, starting from step 0" if again else f"{known}: nothing is lost"
    return f"it resumes from step {saved}" + (f" and recomputes {again}" if again else ": nothing is lost")


@contextlib.contextmanager
def _signals_unheard() -> Iterator[None]:
    """Within, a run that ends already hears no second Ctrl-C, and no signal of torchrun's to a rank that has failed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in interrupt.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def summarise(
    log: RunLog,
    account: ComputeAccount,
    no_ops: Sequence[str],
    described: Mapping[str, Any],
    warnings: Sequence[str],
    best: str | None,
) -> dict[str, Any]:
    """The content of DONE: first, best and last evaluation, cost, axes that were no-ops, and tables that are lost.

    `described` is the run's run.json, `warnings` are those of its training, and `best` is the metric by which the best
    evaluation is chosen. `files` holds a digest of every file of the folder; the object is sealed with a digest of
    itself.
    """
    path = log.folder / "metrics.jsonl"
    lines = [parse_line(line, path) for line in path.read_bytes().splitlines()]
    evaluations = [{k: v for k, v in line["metrics"].items() if k.startswith("eval/")} for line in lines]
    evaluations = [row for row in evaluations if row]
    rated = [(line["step"], line["metrics"][best]) for line in lines if best is not None and best in line["metrics"]]
    stamp = log.stamp()
    summary = {
        "run_key": described["run_key"],
        "steps": account.steps,
        "first": evaluations[0],
        "last": evaluations[-1],
        "best": _best(best, rated) if best is not None and rated else {},
        "ungraded": max(_shares_ungraded(lines), default=0.0),
        "fell": _fallen(lines),
        "budget": account.metrics(),
        "no_ops": list(no_ops),
        "warnings": [*described["warnings"], *warnings],
        "stretches": described["stretches"],
        "lost": log.lost_tables(),
        "files": files_of(log.folder, {"metrics.jsonl": stamp["sha256"], **stamp["tables"]}),
    }
    return with_checksum(summary)


def _best(metric: str, rated: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Where the metric was highest, for the first time, how high it is at the end, and of how many evaluations."""
    step, value = max(rated, key=lambda one: one[1])  # the first of equal ones
    return {"metric": metric, "step": step, "value": value, "last": rated[-1][1], "evaluations": len(rated)}


def _shares_ungraded(lines: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """The share of responses that the grader failed on, of every step and evaluation that says it."""
    for line in lines:
        yield from (value for name, value in line["metrics"].items() if name.endswith("/ungraded"))


_FALL = 0.1  # of accuracy, far more than evaluations of one policy differ by


def _fallen(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Suite -> the evaluation that was best, for suites that end `_FALL` or more below their best accuracy."""
    found = {}
    for suite in SUITES:
        metric = f"eval/{suite}/accuracy"
        rated = [(line["step"], line["metrics"][metric]) for line in lines if metric in line["metrics"]]
        if rated and (best := _best(metric, rated))["value"] - best["last"] >= _FALL:
            found[suite] = best
    return found


def _best_line(folder: Path, best: Mapping[str, Any]) -> str:
    """How far the last weights are below the best ones, in words."""
    if best["last"] == best["value"]:
        return f"no evaluation was above the last one in {best['metric']}"
    kept = f"{checkpoint.BEST}/{checkpoint.named(best['step'])}"
    if best["step"] == 0:
        where = "the initial model's"
    elif (folder / kept).exists():
        where = f"weights in {kept}"
    else:  # an attempt without checkpoint.best made them, or an earlier version
        where = "weights not kept"
    return (
        f"best {best['metric']}: {best['value']:.3f} at step {best['step']} ({where}); the last evaluation is "
        f"{best['value'] - best['last']:.3f} lower, in part selection bias over {best['evaluations']} evaluations"
    )


def verdict(folder: Path, done: Mapping[str, Any]) -> str:
    """The summary of a finished run in words; `done` is its DONE."""
    lines = [f"finished after {done['steps']} steps; accuracy before -> after:"]
    accuracies = {
        suite: name for suite, name in (SUITES | FURTHER_SUITES).items() if f"eval/{suite}/accuracy" in done["last"]
    }
    width = max(map(len, accuracies.values()))
    for suite, name in accuracies.items():
        before, after = (done[when][f"eval/{suite}/accuracy"] for when in ("first", "last"))
        lines.append(f"  {name:<{width}}  {before:.3f} -> {after:.3f}  ({after - before:+.3f})")
    if ungraded := done.get("ungraded"):
        lines.append(
            f"warning: the grader failed on up to {ungraded:.0%} of the responses of a step or evaluation. Rewards and "
            "accuracies are over the graded ones, so they are too high if it fails on wrong ones: mend the grader"
        )
    for suite, fell in done.get("fell", {}).items():
        lines.append(
            f"warning: accuracy fell: {SUITES[suite]}, {fell['value']:.3f} at step {fell['step']}, "
            f"{fell['last']:.3f} at the end"
        )
    if best := done.get("best"):
        lines.append(_best_line(folder, best))
    for change in done.get("stretches", ())[1:]:
        lines.append(f"mixed code versions: resumed with changed code after step {change['from_step']}")
    if lost := done.get("lost"):
        lines.append(f"lost while it ran: {', '.join(lost)}")
    return "\n".join([*lines, f"run folder: {folder}"])
