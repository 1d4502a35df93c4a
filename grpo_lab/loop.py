"""The training loop.

`train` reads top to bottom: twelve numbered stages, each one call of what stands in a slot; the first six, which may
run ahead of the rest, are in supply.py. No option is named here; one that is switched off is a class that does
nothing.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from grpo_lab.config.explain import explain, inert_lines
from grpo_lab.config.rules import check_compatible
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.learner import step_metrics as step_metrics
from grpo_lab.learner.mismatch import bound_metrics, mismatch_metrics, prove_sync
from grpo_lab.learner.response_metrics import response_metrics
from grpo_lab.learner.update import mark_noise, marked, needs_logprobs, scaled, score, skips_rows, update
from grpo_lab.policy.batching import StepInputs, expand, make_minibatch, on_device, tokens_in_loss
from grpo_lab.policy.device import prepare_torch
from grpo_lab.rollout.continuations import Ends
from grpo_lab.rollout.grading import token_texts
from grpo_lab.run import checkpoint
from grpo_lab.run.identity import check_folder, describe_run, run_identity
from grpo_lab.run.recorder import Clock, Recorder, failures_recorded, mirrored, summarise, verdict
from grpo_lab.run.resume import find_beginning
from grpo_lab.run.state import RunState, open_state
from grpo_lab.tracking import provenance
from grpo_lab.tracking.files import atomic_write, write_json
from grpo_lab.tracking.progress import RunProgress
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import sweep_of
from grpo_lab.tracking.whole import check_finished, sealed
from grpo_lab.tricks.baseline import Credit, rewards_by_token
from grpo_lab.types import Exhausted


def train(run: RunConfig, bench: RunState, recorder: Recorder) -> None:
    """Train until the budget is spent.

    Raises FloatingPointError on NaN or Inf, before the update that would have spread it, and Exhausted where nothing
    is left to train on.
    """
    ledger, supply = bench.ledger, bench.open_queue(run)
    if bench.log_position == 0:
        recorder.record(bench, {}, Clock())
    while ledger.spent(run.budget) < 1:
        step, clock = ledger.steps, Clock()
        with clock("generate"):
            # 1 draw problems, 2 generate, 3 grade, 4 shape, 5 truncation, 6 filter or refill: supply.py, as far ahead
            # as the schedule says
            delivery = supply.take()
            made, batch = delivery.made, delivery.batch
            filtered, rollouts = run.group_filter(batch.masked), batch.rollouts
        with clock("logprobs"):
            # 7 log-probs of the old and the reference policy; correction, rejection, kl in the reward
            recomputed = entropy = ref_logprobs = weights = values = None
            if needs_logprobs(run):
                recomputed, entropy = score(run, bench, bench.learner, rollouts, run.entropy.selects_tokens)
            old_logprobs = run.old_policy(recomputed, rollouts.sampler_logprobs)
            if bench.reference is not None:
                ref_logprobs, _ = score(run, bench, bench.reference, rollouts, with_entropy=False)
            kept, stays = filtered, rollouts.sampled_mask
            if recomputed is not None:
                weights = run.correction(recomputed, rollouts.sampler_logprobs, rollouts.sampled_mask)
                stays = run.rejection(recomputed, rollouts.sampler_logprobs, rollouts.sampled_mask)
                kept = run.rejection.settle(filtered, stays)
            charges = run.kl.charges(old_logprobs, ref_logprobs, rollouts.sampled_mask)
            charged = run.kl.shape(kept, charges)
            allowed = rollouts.sampled_mask & stays & charged.trained.flatten()[:, None] & bench.policy_learns(step)
            loss_mask = allowed if entropy is None else allowed & run.entropy.keeps(entropy, rollouts.sampled_mask)
            if bench.critic is not None:
                values = bench.critic.values(rollouts, ledger)
        with clock("credit"):
            # 8 advantages
            earned = rewards_by_token(charged.reward, charges, rollouts.sampled_mask)
            credit = Credit(rollouts, earned, values, Ends(run, bench, rollouts))
            centred = run.baseline.centre(charged, credit)
            advantages = scaled(run, centred, charged, rollouts.sampled_mask & stays)
        with clock("train"):
            # 9 batch
            inputs = StepInputs(
                rollouts, loss_mask, expand(advantages, loss_mask), old_logprobs, ref_logprobs, weights,
                bench.entropy_coef,
            )  # fmt: skip
            # 10 minibatches: loss, backward, step
            tally, entropy_coef = step_metrics.UpdateTally(), bench.entropy_coef
            tally.logprobs, tally.read = torch.zeros_like(rollouts.sampler_logprobs), torch.zeros_like(loss_mask)
            if step % run.rollouts_every == 0:
                tally.touched = torch.zeros_like(loss_mask)
            run.updates.begin(bench.optimizer)
            for number, part in enumerate(run.updates.split(run.problems_per_step)):
                minibatch = make_minibatch(inputs, part, run.denominator, bench.microbatching, skips_rows(run))
                batches, tokens = [on_device(b, bench.device) for b in minibatch], tokens_in_loss(inputs, part)
                noise = mark_noise(run, rollouts, step, number)
                update(run, bench, marked(run, bench, batches, noise), tokens, tally)
            if bench.critic is not None:
                learnt = rollouts.sampled_mask & charged.counted.flatten()[:, None]
                tally.critic = bench.critic.learn(rollouts, learnt, values, centred + values, ledger)
        if recomputed is not None:
            tally.logprobs, tally.read = recomputed, rollouts.sampled_mask
        prove_sync(run, bench, tally, rollouts)
        ledger.discarded_tokens += int((rollouts.sampled_mask & ~loss_mask).sum())
        ledger.steps += 1
        staleness = (bench.updates - len(tally.reports) - rollouts.weight_version)[rollouts.sampled_mask]
        if tally.reports:
            bench.entropy_coef = run.entropy.next_coef(bench.entropy_coef, tally.mean("entropy"))
        with clock("sync"):
            # 11 sync weights
            supply.sync()
            bench.refresh_reference(run.reference.mixes(step))
        # 12 log, evaluate, save
        stages = step_metrics.Stages(
            made, batch, filtered, kept, charged, centred, advantages, loss_mask, delivery.started
        )
        metrics = step_metrics.reward_metrics(made, charged) | step_metrics.advantage_metrics(stages) | tally.metrics()
        metrics |= step_metrics.touched_rows(stages) | response_metrics(made, run.task.check_again, bench.memory.best)
        metrics |= step_metrics.touched_tokens(rollouts.sampled_mask, weights, stays, allowed, loss_mask)
        metrics |= mismatch_metrics(tally.logprobs, rollouts.sampler_logprobs, tally.read)
        if recomputed is not None:
            metrics |= bound_metrics(run, recomputed, rollouts.sampler_logprobs, rollouts.sampled_mask, stays)
        metrics["touched/curriculum"] = delivery.passed_over
        metrics["train/entropy_coef"] = entropy_coef
        if run.learner_precision.scales_loss:
            metrics["train/loss_scale"] = bench.loss_scale.get_scale()
        metrics |= step_metrics.staleness_metrics(staleness) | supply.metrics()
        if step % run.rollouts_every == 0:
            pieces = token_texts(bench.tokenizer, rollouts)
            table = step_metrics.rollout_table(
                rollouts, batch.texts, pieces, charged, advantages, inputs.advantages, loss_mask, tally.touched
            )
            recorder.keep_rollouts(step + 1, table)
        recorder.record(bench, metrics, clock)


def start(config: DictConfig, name: str, choices: Mapping[str, str], command: list[str]) -> Path:
    """Run or resume what `config` says and return the run's folder. Raises ValueError for bad input."""
    run = to_run(config)
    warnings = check_compatible(run, choices)
    device = prepare_torch(run)
    folder = Path(run.runs_dir).expanduser().absolute() / name / f"seed={run.seed}"
    with RunLog(folder) as log, RunProgress(f"{name} seed {run.seed}") as progress:
        say = partial(progress.console.print, highlight=False, soft_wrap=True)
        identity = run_identity(config, device.type)
        before = check_folder(folder, identity)
        if log.status() == "done":
            done, troubles = check_finished(folder, before)
            for trouble in troubles:
                say(f"[yellow]warning[/yellow] {trouble}")
            say(f"this run is finished; to run it again, move its folder away\n{verdict(folder, done)}")
            return folder
        beginning = find_beginning(folder, before, log, run.resume_with_changed_code)
        log.begin()
        with failures_recorded(log):
            environment = provenance.write(folder, command)
            tracking = run.tracking.record()
            sweep = sweep_of(folder, run.runs_dir, run.cell.sweep)
            described = describe_run(
                before.get("run_key") or uuid.uuid4().hex, name, config, identity, tracking, choices, warnings,
                environment, sweep, beginning.all_stretches(environment),
            )  # fmt: skip
            write_json(folder / "run.json", sealed(described))
            atomic_write(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
            atomic_write(folder / "explanation.txt", explain(run, config, choices) + "\n")
        for warning in (*warnings, *beginning.said):
            say(f"[yellow]warning[/yellow] {warning}")
        newest = beginning.checkpoint
        with mirrored(run.tracking, folder), failures_recorded(log), contextlib.ExitStack() as opened:
            bench = open_state(run, device, newest)
            opened.callback(bench.close)
            log.rewind(bench.log_position, beginning.tables)
            recorder = Recorder(run, log, progress, described["run_key"])
            if newest is not None:
                recorder.resume(checkpoint.load_state(newest))
                say(f"resuming after step {bench.ledger.steps} from {newest}")
            try:
                train(run, bench, recorder)
            except Exhausted as error:
                saved = recorder.save(bench, folder / "checkpoints")
                raise Exhausted(f"{error}. The run ends after step {bench.ledger.steps}, saved in {saved}") from error
            except FloatingPointError as error:
                saved = recorder.save(bench, folder / "failure")
                raise FloatingPointError(
                    f"{error}: the run stopped before that update, within step {bench.ledger.steps + 1}; its state, "
                    f"with the step's earlier updates, is in {saved}. "
                    "Lower optimizer.learning_rate (critic.learning_rate, if it was the critic's) or look at the last "
                    "rows of metrics.jsonl"
                ) from error
            inert = step_metrics.inert_axes(run, recorder.touched)
            done = summarise(log, bench.ledger, inert, described)
            log.mark_done(done)
        for line in inert_lines(inert, choices):
            say(f"[yellow]inert[/yellow] {line}")
        say(verdict(folder, done))
    return folder
