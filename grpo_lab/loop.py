"""The training loop.

`train` reads top to bottom in twelve numbered stages. The queue carries out the first six, which may run ahead of
training. Each other stage is one call. No option is named here: an option that is switched off is a class that does
nothing.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from grpo_lab.config.explain import explain, no_op_lines
from grpo_lab.config.rules import broken_rules, check_compatible, unread_keys
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import prepare_torch
from grpo_lab.learner.mismatch import probe_sync, sync_sampler
from grpo_lab.learner.step_metrics import MEASURED_AXES, FinishedStep, no_op_axes, rollout_table, step_metrics
from grpo_lab.learner.update import compute_logprobs, credited, estimate_advantages, make_inputs, train_on
from grpo_lab.rollout.continuations import PrefixRollouts
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.rollout.stream import open_queue
from grpo_lab.run import checkpoint
from grpo_lab.run.device_estimate import check_memory
from grpo_lab.run.identity import (
    check_data,
    check_folder,
    check_models,
    data_fingerprint,
    describe_run,
    notes_on_data,
    run_identity,
)
from grpo_lab.run.memory import remedied
from grpo_lab.run.prompts import check_prompts, prompts_text
from grpo_lab.run.recorder import (
    Clock,
    Recorder,
    exported,
    failures_recorded,
    summarise,
    verdict,
    what_is_lost,
)
from grpo_lab.run.resume import find_beginning, segments_of_ranks
from grpo_lab.run.state import Inputs, RunState, open_state, read_inputs, require_models
from grpo_lab.run.training_problems import check_trained, training_problems
from grpo_lab.tracking import interrupt, provenance
from grpo_lab.tracking.activity import doing
from grpo_lab.tracking.checksums import check_finished, with_checksum
from grpo_lab.tracking.files import atomic_write, write_json
from grpo_lab.tracking.passwords import masked
from grpo_lab.tracking.progress import RunProgress, Unshown
from grpo_lab.tracking.run_log import RunLog, UnwrittenLog
from grpo_lab.tracking.sweep_record import sweep_of
from grpo_lab.types import Exhausted


def train(run: RunConfig, state: RunState, queue: RolloutQueue, recorder: Recorder) -> None:
    """Train until the budget is spent.

    Raises FloatingPointError on NaN or Inf, before the optimiser step that would use it, and Exhausted when nothing
    is left to train on.
    """
    if state.log_position == 0:
        recorder.record(state, queue, Clock(0, state.clock_before), state.training.metrics | state.start.metrics)
        if state.account.spent(run.budget) >= 1:
            raise ValueError(
                "the budget is spent before the first step, on what pass_rate or sft sampled and the first evaluation: "
                "raise budget.amount, or choose budget=steps"
            )
    recorder.catch_up(state, queue)
    while state.account.spent(run.budget) < 1:
        clock = Clock(state.account.steps + 1)
        with clock("generate"):
            # 1 draw problems, 2 generate, 3 grade, 4 shape, 5 truncation, 6 filter or refill: as far ahead of training
            # as the schedule allows
            batch = queue.take()
        with clock("logprobs"):
            # 7 log-probs of the old and the reference policy; correction, rejection, kl in the reward
            before = compute_logprobs(run.logprob_tricks, state, batch.filtered, batch.rollouts)
        with clock("credit"):
            # 8 advantages
            ends = PrefixRollouts(
                queue.maker, run.task.step_end, state.session, state.account, state.model_flops, batch.rollouts
            )
            advantages = estimate_advantages(run.baseline, run.scale, state, before, batch.rollouts, ends)
        with clock("train"):
            # 9 batch: token credit, then the teacher
            rewarded = credited(run.credit_tricks, batch.rollouts, before, advantages, state.account.steps)
            inputs = make_inputs(run.teacher, batch.rollouts, before, rewarded, state.entropy_coef)
            # 10 minibatches: loss, backward, step
            accumulator = train_on(run.update_settings, state, inputs, before, advantages)
        with clock("sync"):
            # 11 sync weights
            sync_sampler(run.sync_settings, state, queue)
        # 12 log, evaluate, save
        step = FinishedStep(batch, before, advantages, rewarded, inputs, accumulator)
        table = partial(rollout_table, state.tokenizer, step)
        metrics = step_metrics(queue, step, run.task, run.reward, run.aggregation, run.teacher)
        recorder.record(state, queue, clock, metrics, table, batch.version)


@contextlib.contextmanager
def open_run(
    run: RunConfig,
    device: torch.device,
    resume_from: Path | None = None,
    folder: Path | None = None,
    inputs: Inputs | None = None,
) -> Iterator[tuple[RunState, RolloutQueue, dict[str, Any]]]:
    """The run state, the rollout queue, and the contents of the checkpoint `resume_from` ({} without one).

    `folder` is the run's; fine-tuning keeps its model there. `inputs` are what the run reads, if that is known already.
    """
    saved = {} if resume_from is None else checkpoint.load_state(resume_from)
    with contextlib.ExitStack() as opened:
        state = open_state(run, device, resume_from, saved, folder, inputs)
        opened.callback(state.session.close)
        queue = open_queue(run, state.session, state.tokenizer, state.problems, state.account, state.model_flops)
        opened.callback(queue.close)
        if saved:
            queue.from_state(saved["queue"])
        probe_sync(run.sync_settings, state)
        yield state, queue, saved


@contextlib.contextmanager
def saved_if_stopped(state: RunState, queue: RolloutQueue, recorder: Recorder, folder: Path) -> Iterator[None]:
    """Within, `train`: a checkpoint is saved if it cannot go on, and the error says where that is."""
    try:
        with interrupt.finishing(recorder.announce):
            yield
    except KeyboardInterrupt as error:
        error.args = error.args or (what_is_lost(recorder.log, within_a_step=True),)
        raise
    except Exhausted as error:
        saved = recorder.save(state, queue, folder / "checkpoints")
        raise Exhausted(f"{error}. The run ends after step {state.account.steps}, saved in {saved}") from error
    except FloatingPointError as error:
        saved = recorder.save(state, queue, folder / "failure")
        raise FloatingPointError(
            f"{error}: the run stopped before that update, within step {state.account.steps + 1}; its state, "
            f"with the step's earlier updates, is in {saved}. "
            "Lower optimizer.learning_rate (critic.learning_rate, if it was the critic's) or look at the last "
            "rows of metrics.jsonl"
        ) from error


def follow(run: RunConfig, device: torch.device, folder: Path) -> None:
    """Do the same training as `start` on every rank but the first, without writing or printing."""
    sent: Any = ranks.from_first(None)
    if sent is None:  # the run is finished
        return
    newest, training, key = sent
    with contextlib.ExitStack() as opened:
        with remedied("open"):
            inputs = read_inputs(run, training)
            state, queue, saved = opened.enter_context(open_run(run, device, newest, folder, inputs))
        recorder = Recorder(run.record_settings, UnwrittenLog(folder), Unshown(), key)
        if saved:
            recorder.from_state(saved)
        with saved_if_stopped(state, queue, recorder, folder):
            train(run, state, queue, recorder)


def start(config: DictConfig, name: str, choices: Mapping[str, str], command: list[str]) -> Path:
    """Start or resume the run that `config` describes; returns its folder. Raises ValueError for bad input."""
    run = to_run(config)
    folder = Path(run.runs_dir).expanduser().absolute() / name / f"seed={run.seed}"
    shows = RunProgress if ranks.is_first() else Unshown
    with shows(title := f"{name} seed {run.seed}"), doing("looking for questions and model"):
        warnings = [*check_compatible(run, choices), *notes_on_data(run.task, run.evaluation)]
        warnings += run.model.notes(run.optimizer.learning_rate)
        data = data_fingerprint(run.task, run.evaluation)
        device = prepare_torch(run.device, run.threads)
        identity = run_identity(config, device.type)
        ranks.agree("code", lambda: provenance.code(run.source_files))
        ranks.agree("the run's folder", lambda: str(folder))
        ranks.agree("configuration", lambda: identity)
        ranks.agree("data", lambda: data)
        if not (folder / "run.json").exists():
            require_models(run)
    if not ranks.is_first():
        follow(run, device, folder)
        return folder
    with RunLog(folder) as log, RunProgress(title) as progress, progress.noting(folder):
        say = progress.say
        before = check_folder(folder, identity)
        check_data(before, data)
        if log.status() == "done":
            done, problems = check_finished(folder, before)
            for problem in problems:
                say(problem, "warning")
            say(f"this run is finished; to run it again, move its folder away\n{verdict(folder, done)}")
            ranks.from_first(None)
            return folder
        beginning = find_beginning(folder, before, log, run.resume_with_changed_code, run.source_files)
        log.begin()
        with failures_recorded(log):
            environment = provenance.write(folder, command, ranks.number())
            tracking = run.tracking.record()
            sweep = sweep_of(folder, run.runs_dir, run.label.sweep)
            with remedied("pass_rate"), doing("choosing the training questions"):
                training = ranks.alone(lambda: training_problems(run, device, folder, say))
            check_trained(before, training.record())
            with remedied("open"), doing("reading the questions"):
                inputs = read_inputs(run, training)
            check_prompts(before, inputs.prompts)
            warnings += check_memory(run, device, inputs.base, inputs.prompts.longest, ranks.number())
            warnings += [*training.notes(), *inputs.left_out, *inputs.prompts.notes()]
            described = describe_run(
                before.get("run_key") or uuid.uuid4().hex, name, config, identity, tracking, choices, warnings, data,
                training.record(), inputs.prompts.record(), environment, sweep, beginning.all_segments(environment),
                segments_of_ranks(before, beginning.step, ranks.number()), unread_keys(run),
            )  # fmt: skip
            write_json(folder / "run.json", with_checksum(masked(described)))
            atomic_write(folder / "config.yaml", masked(OmegaConf.to_yaml(config, resolve=True)))
            atomic_write(folder / "explanation.txt", explain(run, config, choices) + "\n")
            atomic_write(folder / "first_prompt.txt", prompts_text(inputs.prompts) + "\n")
        for warning in (*warnings, *beginning.messages):
            say(warning, "warning")
        newest = beginning.checkpoint
        with exported(run.tracking, folder), failures_recorded(log), contextlib.ExitStack() as opened:
            ranks.from_first((newest, training, described["run_key"]))  # `follow` waits for it
            with remedied("open"), doing("loading the model"):
                state, queue, saved = opened.enter_context(open_run(run, device, newest, folder, inputs))
            check_models(folder, state.base, state.teacher and state.teacher.fingerprint)
            log.rewind(state.log_position, beginning.tables)
            recorder = Recorder(run.record_settings, log, progress, described["run_key"])
            if saved:
                recorder.from_state(saved)
                say(f"resuming after step {state.account.steps} from {newest}")
            with saved_if_stopped(state, queue, recorder, folder):
                train(run, state, queue, recorder)
            options = {axis: getattr(run, axis) for axis in MEASURED_AXES}
            no_ops = no_op_axes(options, broken_rules(run).no_op_axes, recorder.active)
            done = summarise(log, state.account, no_ops, described, recorder.warnings, run.checkpoint.best)
            log.mark_done(done)
        for line in no_op_lines(no_ops, choices):
            say(line, "no_ops")
        say(verdict(folder, done))
    return folder
