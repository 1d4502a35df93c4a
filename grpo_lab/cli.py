"""`grpo-lab`: train, sweep, and all that reads, compares and explains runs."""

# ruff: noqa: E402  an interrupt is one line from the first import on
from __future__ import annotations

from grpo_lab.tracking.interrupt import quietly

quietly()

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from grpo_lab.config.folders import data_of, declared, experiments_folder
from grpo_lab.tracking.provenance import typed
from grpo_lab.tracking.terminal import Terminal, printable, say

if TYPE_CHECKING:
    from grpo_lab.config.run_config import RunConfig
    from grpo_lab.tasks.base import Model
    from grpo_lab.tracking.mlflow_exporter import ExportReport

RUNS = "runs"  # default folder of runs
SHIPPED_GRADERS = ("reward=math", "verifier=math", "reward=math_lenient", "reward=boxed_only")
GYM_GRADER = "reward=gym_last_number"  # needs the extra gym


def build_base(arguments: argparse.Namespace) -> None:
    """Print where the base model of the overrides is, built if necessary."""
    from grpo_lab.config.hydra_setup import compose_config
    from grpo_lab.tracking.checksums import read_json

    config = compose_config(arguments.overrides)
    from grpo_lab.config.run_config import to_run

    folder = to_run(config).model.resolve()
    say(f"base model: {folder}")
    report = folder / "report.json"
    if report.exists():
        for name, value in read_json(report, "remove its folder, and it is built again").items():
            say(f"  {name:<16} {value:g}")


def sync_runs(arguments: argparse.Namespace) -> None:
    """Replay run folders into MLflow or another tracker; nothing is sent twice."""
    from grpo_lab.sweeps.results import sweep_results
    from grpo_lab.tracking.mlflow_exporter import sync_all

    if arguments.to == "mlflow" and not arguments.overrides:
        reports = sync_all(arguments.folder, analyse=sweep_results)
    else:
        reports = _replay(arguments.folder, arguments.to, arguments.overrides)
    if not reports:
        raise ValueError(f"{arguments.folder} holds no run that {arguments.to} can be sent: give a folder of runs")
    for report in reports:
        say(f"{report.folder}: {report.error or f'{report.points} points sent, {report.status}'}")
    if any(report.error for report in reports):
        sys.exit(1)


def open_ui(arguments: argparse.Namespace) -> None:
    """Serve MLflow's pages over a folder of runs until Ctrl-C, and print the address of every sweep's charts."""
    _require_runs(arguments.runs)
    from grpo_lab.sweeps.results import sweep_results
    from grpo_lab.tracking.mlflow_ui import open_ui

    open_ui(arguments.runs, arguments.port, sweep_results, lambda line: say(line, flush=True))


def _replay(folder: Path, to: str, overrides: Sequence[str]) -> list[ExportReport]:
    """Send the runs below a folder to the tracker that `tracking=<to>` and the overrides configure."""
    from omegaconf import OmegaConf

    from grpo_lab.config.hydra_setup import compose_config
    from grpo_lab.sweeps.results import sweep_results
    from grpo_lab.tracking.mlflow_exporter import Mlflow, sync_all
    from grpo_lab.tracking.trackers import replay

    if wrong := [word for word in overrides if not word.startswith("tracking.")]:
        raise ValueError(f"{wrong[0]}: --to takes only overrides of the tracker, such as tracking.folder=/there")
    config = compose_config([f"tracking={to}", f"runs_dir='{_runs_dir_of(folder.absolute())}'", *overrides])
    tracking = OmegaConf.to_object(config.tracking)
    return sync_all(folder, tracking.uri, sweep_results) if isinstance(tracking, Mlflow) else replay(folder, tracking)  # pyright: ignore


def _runs_dir_of(folder: Path) -> Path:
    """The folder of runs that this one is, or lies in: a run, or the runs of one name."""
    from grpo_lab.tracking.checksums import AFRESH, read_json
    from grpo_lab.tracking.external import is_external

    run = next((path.parent for path in sorted(folder.rglob("run.json"))), None)
    if run is None:
        return folder
    runs = run.parents[3 if is_external(read_json(run / "run.json", AFRESH)) else 1]
    return folder if folder == runs or folder in runs.parents else runs


def measure_cost_model(arguments: argparse.Namespace) -> None:
    """Print the cost model fitted to runs, as overrides, and the error of its six numbers."""
    from grpo_lab.budget.cost_model import measure

    found = measure(arguments.folders)
    say(" ".join(f"cost_model.{name}={value:.3g}" for name, value in vars(found.cost_model).items()))
    say(
        f"from {found.steps} steps; a step's time is off by {found.generate_error:.0%} (generation) and "
        f"{found.train_error:.0%} (training) in the mean"
    )


def list_metrics(_: argparse.Namespace) -> None:
    """Print the metric registry with the names in TRL and verl, and the metrics that analysis derives."""
    from grpo_lab.tracking.metrics import DERIVED, DIVERGENCE, PEERS, REGISTRY, SENT

    for metric in REGISTRY + SENT + DERIVED + DIVERGENCE:
        known_as = f"; {PEERS[metric.name]}" if metric.name in PEERS else ""
        say(f"{metric.name:<28} [{metric.unit}] {metric.reduction}: {metric.meaning}{known_as}")


def list_tricks(arguments: argparse.Namespace) -> None:
    """Print axes and options, one line each, or the tables of conf/README.md, conf/recipes.md and conf/left_out.md."""
    from grpo_lab.config.hydra_setup import bootstrap

    bootstrap()
    from grpo_lab.config.catalogue import (
        ingredients_table,
        left_out_table,
        papers_table,
        recipes_table,
        tricks_list,
        tricks_table,
    )

    tables = (tricks_table, papers_table, recipes_table, ingredients_table, left_out_table)
    say("\n\n".join(table() for table in tables) if arguments.markdown else tricks_list())


def list_design_keys(_: argparse.Namespace) -> None:
    """Print every key of an experiment's declaration: what it is, its allowed values and its default."""
    from grpo_lab.config.hydra_setup import bootstrap

    bootstrap()
    from grpo_lab.config.design_reference import reference_text

    say(reference_text())


def write_docs(_: argparse.Namespace) -> None:
    """Update the tables of options, recipes and keys in the documentation, and print which pages changed."""
    from grpo_lab.config.hydra_setup import bootstrap

    bootstrap()
    from grpo_lab.config.catalogue import documented, write_pages
    from grpo_lab.config.design_reference import documented_keys

    say(*write_pages((documented, documented_keys)), sep="\n")


def choose_settings(arguments: argparse.Namespace) -> None:
    """Print which setting every arm gets: by its trials, or from levels that are settings, and the arms as YAML."""
    from grpo_lab.analysis.effects.tuned import numbers_text, trials_text, tuned_text
    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.chosen_numbers import chosen_numbers
    from grpo_lab.analysis.sources.read import read_source

    _require_folder(arguments.runs)
    data = read_source(arguments.runs, arguments.name, _saved(arguments))
    if found := chosen_numbers(data.record):
        say(*filter(None, [data.notice]), numbers_text(found), "", trials_text(found), sep="\n")
    else:
        say(*filter(None, [data.notice]), tuned_text(data, final_values(data)), sep="\n")


def explain_run(arguments: argparse.Namespace) -> None:
    """Print the loss of these overrides, the differences from the nearest recipe, broken rules and papers."""
    from grpo_lab.config.hydra_setup import compose_with_choices

    config, choices = compose_with_choices(arguments.overrides)
    from grpo_lab.config.explain import explain
    from grpo_lab.config.run_config import to_run

    run = to_run(config)
    say(explain(run, config, choices), "", *run.model.notes(run.optimizer.learning_rate), *_first_prompt(run), sep="\n")
    if arguments.memory_gib is not None or arguments.gpus != 1 or _on_gpu(run.device):
        say("", _memory_and_time(run, arguments.memory_gib, arguments.gpus), sep="\n")
    if not run.question_filter.is_no_op:
        from grpo_lab.run.training_problems import read_questions

        say("", *read_questions(run.question_settings).notes(), sep="\n")


def _on_gpu(device: str) -> bool:
    """True if a run's device is a GPU, as far as this machine shows."""
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _memory_and_time(run: RunConfig, memory_gib: float | None, gpus: int) -> str:
    """The estimate of a run's memory and time, where its model's config.json is here; otherwise why not.

    `memory_gib` is what a GPU has; None for what is free on this machine's, if it has one.
    """
    import torch
    from transformers import AutoTokenizer

    from grpo_lab.distributed.device import choose_device
    from grpo_lab.rollout.grading import encode_prompts
    from grpo_lab.run.device_estimate import GIB, estimate, estimate_text, free_memory, size_of, step_flops
    from grpo_lab.run.training_problems import read_questions

    if gpus < 1 or (memory_gib is not None and memory_gib <= 0):
        raise ValueError("--memory-gib and --gpus must be above 0: give what one GPU has, such as --memory-gib 80")
    folder = _config_folder(run.model)
    if folder is None:
        return "memory: the model's config.json is not on this machine; give its folder as model.path"
    memory = None if memory_gib is None else memory_gib * GIB
    if memory is None and torch.cuda.is_available():
        memory = free_memory(choose_device(run.device))
    longest = run.task.longest_prompt
    if longest is None and run.task.at_hand and (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        longest = len(encode_prompts(tokenizer, run.template, read_questions(run.question_settings).problems[:1])[0])
    prompt = longest or 0
    try:
        size = size_of(folder, run.model.loading().lora)
        found, flops = estimate(run, size, prompt, gpus), step_flops(run, size, prompt)
        return estimate_text(found, flops, prompt, run.engine.max_tokens, memory, gpus)
    except ValueError as error:
        return f"memory: {error}"


def _config_folder(model: Model) -> Path | None:
    """The folder of the model's config.json, which may hold nothing else; None where it is not on this machine."""
    named = Path(getattr(model, "path", "")).expanduser()
    if (named / "config.json").is_file() and named != Path():
        return named
    return model.at_hand()


def _first_prompt(run: RunConfig) -> list[str]:
    """Notes on the questions of a run and its first prompt, where model and questions are here; otherwise why not."""
    from transformers import AutoTokenizer

    from grpo_lab.run.lengths import TRAINING, at_their_longest, fitting
    from grpo_lab.run.prompts import prompts_text, read_prompts
    from grpo_lab.run.training_problems import read_questions

    if not run.task.at_hand:
        return ["first prompt: the questions are not on this machine, and nothing is downloaded to explain a run"]
    try:
        notes, folder = run.task.notes(), run.model.at_hand()
        if folder is None:
            reason = "the model is not on this machine, and nothing is built or downloaded to explain a run"
            return [*notes, f"first prompt: {reason}"]
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        short = fitting(
            run.lengths, run.template, folder, tokenizer, read_questions(run.question_settings).problems, TRAINING
        )
        problems = at_their_longest(run.lengths, run.template, tokenizer, short.problems[:1])
        return [*notes, *short.notes, prompts_text(read_prompts(tokenizer, run.template, problems, problems))]
    except ValueError as error:  # a run would be refused with it
        return [f"first prompt: {error}"]


def grade_pairs(arguments: argparse.Namespace) -> None:
    """Print how often graders are wrong on the pairs of grpo_lab: those of the overrides, or the shipped ones."""
    from grpo_lab.config.hydra_setup import compose_with_choices
    from grpo_lab.config.run_config import to_run
    from grpo_lab.tasks.grader_errors import correctness_of, errors_text, pairs

    chosen = {word.split("=")[0].split(".")[0].lstrip("+") for word in arguments.overrides} & {"reward", "verifier"}
    if not arguments.overrides:
        shipped = (*SHIPPED_GRADERS, *([GYM_GRADER] if find_spec("reasoning_gym") else []))
        graders = [(name.split("=")[0], [name]) for name in shipped]
    elif chosen:
        graders = [(slot, arguments.overrides) for slot in sorted(chosen)]
    else:
        raise ValueError("no grader is named: write reward=NAME or verifier=NAME, or nothing for the shipped ones")
    judged, verdicts = pairs(), {}
    for slot, words in graders:
        config, choices = compose_with_choices(words)
        verdicts[f"{slot}={choices[slot]}"] = correctness_of(getattr(to_run(config), slot), judged)
    say(errors_text(judged, verdicts, arguments.pairs))


def audit_reward(arguments: argparse.Namespace) -> None:
    """Print which adversarial responses a reward judges wrongly; exit with 1 where one costs training."""
    from grpo_lab.instruments.reward_audit.command import audit_reward

    audit_reward(arguments)


def measure_pass_rates(arguments: argparse.Namespace) -> None:
    """Measure how often the base model of the overrides answers training problems right, and print what it shows."""
    from grpo_lab.config.hydra_setup import compose_config

    overrides = arguments.overrides
    if not any(word.startswith("pass_rate=") for word in overrides):
        overrides = [*overrides, "pass_rate=difficulty"]
    config = compose_config([*overrides, *([f"pass_rate.samples={arguments.samples}"] if arguments.samples else [])])
    from grpo_lab.config.rules import check_compatible
    from grpo_lab.config.run_config import to_run
    from grpo_lab.distributed.device import prepare_torch
    from grpo_lab.run.memory import remedied
    from grpo_lab.run.training_problems import pass_rates_text, training_problems

    run = to_run(config)
    if run.pass_rate.is_no_op:
        raise ValueError("pass_rate=none measures nothing: choose another option, or leave it out")
    check_compatible(run)
    with remedied("pass_rate"):
        found = training_problems(run, prepare_torch(run.device, run.threads), say=lambda line: say(line, flush=True))
    say(pass_rates_text(found))


_SAVED = "saved data, used if it has more (default: experiments/NAME/data)"


def _saved(arguments: argparse.Namespace) -> Path | None:
    """The folder of saved data that a command looks at; None with --only-runs."""
    return None if arguments.only_runs else arguments.data or data_of(arguments.name)


def draw_figures(arguments: argparse.Namespace) -> None:
    """Rebuild the figures, tables and verdict of an experiment; print its arms, and in five lines what to open."""
    from grpo_lab.analysis.build import build, what_to_open
    from grpo_lab.analysis.figures.registry import ALL

    _require_folder(arguments.runs)
    saved = _saved(arguments)
    command = typed("grpo-lab")
    figures = ALL if arguments.all else arguments.figure
    built = build(arguments.name, arguments.runs, saved, arguments.to, command, arguments.external, figures)
    whole = arguments.verdict and not built.headline  # the verdict of what was not declared begins with the table
    text = "" if arguments.brief or whole else f"{arguments.name}, from {built.source}\n\n{built.table}\n"
    say(*filter(None, [built.notice, text, built.verdict if arguments.verdict else ""]), sep="\n")
    program = "grpo-lab" if shutil.which("grpo-lab") else os.path.relpath(sys.argv[0])
    say(*what_to_open(built, arguments.name, arguments.runs, saved, arguments.to, program), sep="\n")
    if not built.notice and "://" not in arguments.runs:
        _send_figures(Path(arguments.runs), arguments.name, built.paths)


def _send_figures(runs: Path, name: str, paths: Sequence[Path]) -> None:
    """Copy pictures and tables to the sweep's run in MLflow, if it is there; what goes wrong is a warning."""
    from grpo_lab.tracking.mlflow_parent import send_figures
    from grpo_lab.tracking.mlflow_store import first_line
    from grpo_lab.tracking.sweep_record import sweep_folder

    shown = [path for path in paths if path.suffix not in (".svg", ".json")]
    try:
        if send_figures(sweep_folder(runs, name), shown):
            say("figures and tables are also in MLflow, under Artifacts of the sweep's run")
    except Exception as error:
        say(f"WARNING: MLflow upload of the figures failed ({first_line(error)}); the files are complete", error=True)


def _require_folder(runs: str | Path) -> None:
    """Raise ValueError if `runs` is a missing folder; the default may be missing, since saved data replaces it."""
    if "://" not in str(runs) and Path(runs) != Path(RUNS) and not Path(runs).is_dir():
        raise ValueError(f"there is no folder {runs}: name the folder that holds the runs, or leave --runs out")


def _require_runs(runs: Path) -> None:
    """Raise ValueError if this folder does not exist."""
    if not runs.is_dir():
        raise ValueError(f"there is no folder {runs}: make some with make demo, or name another with --runs")


def write_report(arguments: argparse.Namespace) -> None:
    """Write the report of an experiment, one page that works offline, and print where it is."""
    from grpo_lab.analysis.build import build_report

    _require_folder(arguments.runs)
    path, notice = build_report(arguments.name, arguments.runs, _saved(arguments), arguments.to, typed("grpo-lab"))
    say(*filter(None, [notice]), path, sep="\n")


def export_data(arguments: argparse.Namespace) -> None:
    """Save the logged numbers of an experiment, from which its figures can be rebuilt; runs saved before stay."""
    from grpo_lab.analysis.caveats import finished_runs
    from grpo_lab.analysis.sources.run_folders import load_sweep
    from grpo_lab.analysis.sources.saved_data import evaluations_alone, lean, save_data, with_saved

    _require_runs(arguments.runs)
    data = load_sweep(arguments.runs, arguments.name)
    if arguments.evaluations:
        data = evaluations_alone(data)
    elif arguments.lean:
        data = lean(data)
    folder = arguments.to or data_of(arguments.name)
    for path in save_data(with_saved(data, folder), folder, arguments.compact):
        say(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    say(*finished_runs(data), sep="\n")


def import_external(arguments: argparse.Namespace) -> None:
    """Keep a run of another framework as a run folder, and print what was understood of its log."""
    from grpo_lab.tracking.external import Chosen, import_run

    if arguments.name in declared(experiments_folder()):
        raise ValueError(f"{arguments.name} is a declared experiment: give external runs another name with --as")
    chosen = Chosen(arguments.accuracy, arguments.heldout, arguments.downstream)
    found = import_run(
        arguments.framework, arguments.folder, arguments.runs, arguments.name, arguments.label or arguments.framework,
        arguments.seed, chosen, typed("grpo-lab"),
    )  # fmt: skip
    known = {theirs: ours for theirs, ours in found.log.read_as.items() if not ours.startswith("external/")}
    say(f"{found.source}: {len(found.log.steps)} steps, into {found.folder}")
    say(*(f"  {theirs} -> {ours}" for theirs, ours in sorted(known.items())), sep="\n")
    say(f"  {len(found.log.read_as) - len(known)} others are kept as external/*")
    say(*found.log.notes, f"draw them: grpo-lab figures {arguments.name} --runs {arguments.runs}", sep="\n")


def read_rollouts(arguments: argparse.Namespace) -> None:
    """Show training responses of a run, or of two side by side, token by token."""
    from grpo_lab.analysis.report.reader import Filter, find_run, seed_of
    from grpo_lab.analysis.report.reader_terminal import show_pair, show_run

    if arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: print at least one response")
    if not Path(arguments.run_name).is_dir():
        _require_runs(arguments.runs)
    chosen = Filter(arguments.correct, arguments.truncated, arguments.in_loss, arguments.problem)
    folder = find_run(arguments.run_name, arguments.runs, arguments.arm, arguments.level, arguments.seed)
    if arguments.against is None:
        show_run(Terminal(stderr=False), folder, arguments.step, chosen, arguments.limit)
        return
    if Path(arguments.against).is_dir():
        other = find_run(arguments.against, arguments.runs, None, None, None)
    else:  # an arm of the same sweep, with the same seed
        seed = seed_of(folder) if arguments.seed is None else arguments.seed
        other = find_run(arguments.run_name, arguments.runs, arguments.against, arguments.level, seed)
    show_pair(Terminal(stderr=False), folder, other, arguments.step, chosen, arguments.limit)


def show_status(arguments: argparse.Namespace) -> None:
    """Print what sweeps and single runs are doing: a line for each, or a line for each run of one."""
    from grpo_lab.sweeps.status import status_lines

    _require_runs(arguments.runs)
    say(*status_lines(arguments.runs, arguments.name), sep="\n")


def stop_run(arguments: argparse.Namespace) -> None:
    """Interrupt a run and wait until it has finished its step and saved; a sweep goes on with its other runs."""
    from grpo_lab.sweeps.status import find_run
    from grpo_lab.sweeps.stop import stop_run
    from grpo_lab.tracking.run_reader import activity_of, interruption_message, was_stopped

    folder = find_run(arguments.name, arguments.runs, arguments.sweep, running=True)
    say(f"stopping the run in {folder}", flush=True)
    if not stop_run(folder, arguments.wait):
        doing = f" ({activity})" if (activity := activity_of(folder)) else ""
        sys.exit(
            printable(
                f"still running after {arguments.wait:g} s{doing}; it stops once its step is saved. Wait longer with "
                "--wait, or run this command again to stop it at once"
            )
        )
    if not was_stopped(folder):
        say("it ended on its own")
    else:
        say(f"{interruption_message(folder) or 'it had not started'}; to resume, re-run the command that started it")


def plan_power(arguments: argparse.Namespace) -> None:
    """Print how many seeds and bases an experiment needs, from the deviations of a pilot."""
    from grpo_lab.analysis.effects.planning import power_text
    from grpo_lab.analysis.sources.read import read_source
    from grpo_lab.config.design import named_design

    design = named_design(arguments.name)
    runs, pilot = arguments.runs, arguments.pilot or design.name
    if "://" not in pilot and Path(pilot).is_dir():
        runs, pilot = pilot, design.name
    _require_folder(runs)
    saved = arguments.data or data_of(pilot)
    data = read_source(runs, pilot, saved if runs == arguments.runs else None)
    say(*power_text(design, data, arguments.effect, arguments.metric, arguments.trials), sep="\n")


def reproduce_run(arguments: argparse.Namespace) -> None:
    """Run a finished run again from its record, and print what differs; exit with 1 where more than rounding does."""
    from grpo_lab.reproduce.command import reproduce
    from grpo_lab.reproduce.compare import Outcome

    done = reproduce(arguments.run_folder, arguments.to, arguments.steps, lambda line: say(line, flush=True))
    say(*done.compared.lines(), sep="\n")
    if done.compared.outcome is Outcome.different:
        sys.exit(1)


def diff_runs(arguments: argparse.Namespace) -> None:
    """Print what differs between two runs, and from which step on."""
    from grpo_lab.reproduce.difference import differences
    from grpo_lab.sweeps.status import find_run

    one, other = (
        Path(run) if Path(run).is_dir() else find_run(run, arguments.runs, arguments.sweep)
        for run in (arguments.one, arguments.other)
    )
    say(*differences(one, other, arguments.all), sep="\n")


def evaluate_runs(arguments: argparse.Namespace) -> None:
    """Evaluate checkpoints with another harness; results join the runs' folders and MLflow."""
    from grpo_lab.harness.command import HarnessPlan, Settings, evaluate, export, suites_of

    plan = HarnessPlan(
        harness=arguments.harness,
        tasks=suites_of(arguments.harness, [task for task in arguments.tasks.split(",") if task], arguments.name),
        steps=arguments.steps,
        base=arguments.base,
        settings=Settings(
            arguments.metric, arguments.limit, arguments.num_fewshot, arguments.apply_chat_template, arguments.dtype
        ),
        include_path=arguments.include_path,
        batch_size=arguments.batch_size,
        device=arguments.device,
        python=arguments.python,
        again=arguments.again,
        command=typed("grpo-lab"),
    )
    runs: dict[Path, None] = {}
    try:
        for run, result, now in evaluate(arguments.run_folder, plan):
            runs[run] = None
            found = result.metrics[result.metric]
            error = "" if found["stderr"] is None else f" (standard error {found['stderr']:.3f})"
            there = "" if now else "; measured before, --again repeats it"
            say(f"{run} step {result.step}: {result.suite} {found['value']:.3f}{error}, {result.metric}, "
                  f"{result.samples} answers{there}", flush=True)  # fmt: skip
    finally:  # what was measured before an error stays
        for message in filter(None, map(export, runs)):
            say(message, error=True)


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    evaluated = commands.add_parser("evaluate", help="checkpoints under lm-evaluation-harness or Inspect")
    evaluated.add_argument("run_folder", metavar="RUN", type=Path, help="a run, or a folder or sweep of finished runs")
    evaluated.add_argument("--harness", required=True, choices=["lm_eval", "inspect"])
    evaluated.add_argument("--tasks", required=True, help="names of lm_eval, or FILE.py@TASK; separated by commas")
    evaluated.add_argument("--name", help="what to call the task here (default: as the harness does)")
    evaluated.add_argument(
        "--steps", nargs="+", default=["last"], help="all, last, best or numbers; 0 is before the first"
    )
    evaluated.add_argument("--base", action="store_true", help="step 0, too: the model that RL began with")
    evaluated.add_argument("--metric", help="metric used as accuracy (default: the task's first higher-is-better)")
    evaluated.add_argument("--limit", type=int, help="number of questions of each task")
    evaluated.add_argument("--num-fewshot", type=int, help="solved examples before each question (lm_eval)")
    evaluated.add_argument("--apply-chat-template", action="store_true", help="ask as the model's chats do")
    evaluated.add_argument("--include-path", help="a folder with tasks of your own (lm_eval)")
    evaluated.add_argument("--batch-size", default="16", help="a number, or auto (lm_eval); default: 16")
    evaluated.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU where there is one)")
    evaluated.add_argument("--dtype", default="float32", help="data type of the weights (default: float32)")
    evaluated.add_argument("--python", default=sys.executable, help="a Python that has the harness (default: this one)")
    evaluated.add_argument("--again", action="store_true", help="measure again what was measured")
    evaluated.set_defaults(run=evaluate_runs)


def _add_steering(commands: argparse._SubParsersAction) -> None:
    status = commands.add_parser(
        "status", help="what sweeps and single runs are doing, from any shell: steps, time left, errors"
    )
    status.add_argument("name", nargs="?", help="one sweep, run by run, or one run (default: a line for each)")
    status.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    status.set_defaults(run=show_status)
    stop = commands.add_parser("stop", help="stop a run once its step is finished and saved; its sweep continues")
    stop.add_argument("name", help="its folder, or its title as status shows it, such as 'base seed=0'")
    stop.add_argument("--sweep", help="the sweep it is of (default: the latest)")
    stop.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    stop.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait (default: 60)")
    stop.set_defaults(run=stop_run)


def _add_power(commands: argparse._SubParsersAction) -> None:
    power = commands.add_parser("power", help="how many seeds and bases an experiment needs, from a pilot's runs")
    power.add_argument("name", metavar="EXP", help="an experiment, as its folder in experiments/ is called")
    power.add_argument("--pilot", help="a sweep, or a folder of runs that has this one (default: the experiment's own)")
    power.add_argument(
        "--effect", type=float, nargs="+", default=(), help="effects to detect, in the metric's unit (default: margins)"
    )
    power.add_argument("--metric", default="", help="only of this metric (default: all of the predictions)")
    power.add_argument("--trials", type=int, default=400, help="simulated sweeps; 0 for none (default: 400)")
    power.add_argument("--runs", default=RUNS, help="the folder of runs, or an MLflow URI (default: runs)")
    power.add_argument("--data", type=Path, help=_SAVED)
    power.set_defaults(run=plan_power)


def look_closely(arguments: argparse.Namespace) -> None:
    """Put a stored step through sets of options: gradients, affected tokens, bias and variance; print and write."""
    from grpo_lab.instruments.microscope.command import LookRequest, look

    seen = look(
        LookRequest(
            arguments.source, arguments.step, arguments.sets, arguments.weights, arguments.temperature, arguments.exact,
            arguments.samples, arguments.prompts, arguments.write, arguments.to,
        ),
        lambda line: say(line, flush=True),
    )  # fmt: skip
    say(*seen.lines, *seen.files, sep="\n")


def _add_microscope(commands: argparse._SubParsersAction) -> None:
    scope = commands.add_parser("microscope", help="one stored step through sets of options, token by token")
    scope.add_argument("source", metavar="RUN", type=Path, help="a run's folder, or a .parquet or .jsonl of rollouts")
    scope.add_argument("--step", type=int, metavar="K", help="the step whose rollouts (default: the last kept)")
    scope.add_argument(
        "--with", dest="sets", action="append", default=[], metavar="OPTIONS",
        help="plain options but for these, such as surrogate=cispo,aggregation=token_mean; repeatable",
    )  # fmt: skip
    scope.add_argument(
        "--weights",
        metavar="STEP",
        help="of a run: weights after this step (default: K - 1); of a file: a model folder",
    )
    scope.add_argument("--temperature", type=float, default=1.0, help="of a file's log-probs (default: 1)")
    scope.add_argument(
        "--exact", type=int, nargs="?", const=0, metavar="TOKENS",
        help="bias and variance against the exact gradient, all responses up to this length (default: the longest "
        "possible)",
    )  # fmt: skip
    scope.add_argument("--samples", type=int, default=512, help="steps sampled for it (default: 512)")
    scope.add_argument("--prompts", type=int, default=1, help="prompts of such a step (default: 1)")
    scope.add_argument("--write", type=Path, metavar="FILE", help="write the rollouts, .parquet or .jsonl")
    scope.add_argument("--to", type=Path, metavar="FOLDER", help="of page and JSON (default: RUN/microscope)")
    scope.set_defaults(run=look_closely)


def _add_reproduce(commands: argparse._SubParsersAction) -> None:
    again = commands.add_parser("reproduce", help="a finished run again, from its own record, and what differs")
    again.add_argument("run_folder", metavar="RUN", type=Path, help="the folder of a run")
    again.add_argument("--to", type=Path, default=Path("reproduced"), help="the folder of runs for it")
    again.add_argument("--steps", type=int, metavar="N", help="run and compare only the first N steps")
    again.set_defaults(run=reproduce_run)


def _add_diff(commands: argparse._SubParsersAction) -> None:
    diff = commands.add_parser("diff", help="compare two runs: configuration, code, data, first step that differs")
    diff.add_argument("one", metavar="RUN", help="run A: its folder, or its title as status shows it")
    diff.add_argument("other", metavar="RUN", help="run B")
    diff.add_argument("--sweep", help="the sweep they are of (default: the latest)")
    diff.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    diff.add_argument("--all", action="store_true", help="list all differences (default: the first 12 of each kind)")
    diff.set_defaults(run=diff_runs)


def check_loss(arguments: argparse.Namespace) -> None:
    """Print which published loss a trainer's function computes, and where it departs from it."""
    from grpo_lab.instruments.loss_check.command import check_loss

    check_loss(arguments)


def _add_check_loss(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "check-loss", help="which published loss a trainer's function computes, and its defects"
    )
    check.add_argument(
        "target", nargs="?", metavar="FUNCTION", help="a function that returns a loss: FILE.py:NAME or module:NAME"
    )
    check.add_argument("overrides", nargs="*", help="one more surrogate, such as surrogate=ppo surrogate.clip_high=0.3")
    check.add_argument(
        "--accumulate", choices=["sum", "mean"], default="", help="how the trainer joins the losses of microbatches"
    )
    check.add_argument(
        "--expect", nargs="+", default=[], metavar="AXIS=OPTION", help="fail if it computes another published loss"
    )
    check.add_argument("--answers", type=Path, metavar="FILE", help="losses and gradients on the calls of --write")
    check.add_argument("--write", type=Path, metavar="FOLDER", help="write the calls and all published numbers as JSON")
    check.add_argument("--framework", metavar="NAME", help="check a framework's own functions, such as trl")
    check.add_argument("--path", type=Path, help="where it is: a folder of packages, or a clone")
    check.add_argument("--case", action="append", metavar="NAME", help="only this function of the framework")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the reports as JSON too")
    check.set_defaults(run=check_loss)


def _add_import(commands: argparse._SubParsersAction) -> None:
    external = commands.add_parser("import", help="a run of TRL or prime-rl, as one that figures can draw beside ours")
    external.add_argument("framework", choices=["trl", "prime-rl"])
    external.add_argument(
        "folder", type=Path, help="what it wrote: an output folder, trainer_state.json, metrics.jsonl"
    )
    external.add_argument("--as", dest="name", required=True, help="the sweep that it is kept in")
    external.add_argument("--label", default="", help="name its arm external:LABEL (default: the framework)")
    external.add_argument("--seed", type=int, default=0, help="seed of the run, if a label has several (default: 0)")
    external.add_argument("--accuracy", default="", help="of several rewards: the one that measures correctness")
    external.add_argument("--heldout", default="", help="of several evaluation sets: the one of held-out questions")
    external.add_argument("--downstream", default="", help="the evaluation set of harder questions")
    external.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    external.set_defaults(run=import_external)


def _add_instruments(commands: argparse._SubParsersAction) -> None:
    from grpo_lab.instruments.doctor.command import add_doctor

    add_doctor(commands)


def _add_rollouts(commands: argparse._SubParsersAction) -> None:
    rollouts = commands.add_parser("rollouts", help="training responses, token by token; two arms side by side")
    rollouts.add_argument("run_name", metavar="RUN", help="a run folder, or the name of a sweep")
    rollouts.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    rollouts.add_argument("--arm", help="of a sweep: its arm (default: the first); of a name with a dash, --arm=-name")
    rollouts.add_argument("--level", help="of a sweep: its level")
    rollouts.add_argument("--seed", type=int, help="of a sweep: the seed (default: the first)")
    rollouts.add_argument(
        "--against", metavar="ARM", help="arm (same seed) or run folder to show beside it; pairs where either passes"
    )
    rollouts.add_argument("--step", type=int, help="the step whose responses to show (default: the last kept)")
    for name, words in (("correct", "right"), ("truncated", "truncated by the budget"), ("in-loss", "in the loss")):
        rollouts.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, help=f"only responses that are, or are not, {words}"
        )
    rollouts.add_argument("--problem", type=int, help="only this problem")
    rollouts.add_argument("--limit", type=int, default=8, help="how many to print (default: 8)")
    rollouts.set_defaults(run=read_rollouts)


def _add_training(commands: argparse._SubParsersAction) -> None:
    """`train` and `sweep`: `_start_training` passes their words on, so these arguments serve help and completion."""
    helps = {
        "train": "one run of Hydra overrides, such as recipe=dr_grpo seed=1",
        "sweep": "an experiment by name, or overrides with add=[...] or lists of values",
    }
    for name, words in helps.items():
        command = commands.add_parser(name, help=words)
        command.add_argument("overrides", nargs="*")
        command.add_argument("--cfg", choices=["job", "hydra", "all"], help="print the configuration and run nothing")
        command.add_argument("--resolve", action="store_true", help="with --cfg: fill in what refers to other keys")
        command.add_argument("--multirun", "-m", action="store_true", help="a sweep over lists of values")
        command.add_argument("--hydra-help", action="store_true", help="Hydra's own flags")


def print_completion(arguments: argparse.Namespace) -> None:
    """Print the code by which a shell completes this command."""
    from grpo_lab.config.completion import script

    say(script(arguments.shell))


def _add_completion(commands: argparse._SubParsersAction) -> None:
    completion = commands.add_parser(
        "completion", help='completion with Tab: put eval "$(grpo-lab completion bash)" into ~/.bashrc; also zsh, fish'
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(run=print_completion)


def _add_audit(commands: argparse._SubParsersAction) -> None:
    audit = commands.add_parser("audit-reward", help="a reward against adversarial responses: which attacks pass")
    audit.add_argument(
        "reward", nargs="+", help="FILE.py:FUNCTION, module:function or reward=NAME; task=... also tries its own data"
    )
    audit.add_argument("--form", help="how the reward reads answers, such as '<final>{}</final>' (default: found)")
    audit.add_argument("--correct-at", type=float, help="the score from which a response is accepted (default: found)")
    audit.add_argument("--notations", action="store_true", help="also the notations that grpo-lab graders tries")
    audit.add_argument("--cases", action="store_true", help="list all cases that are judged wrongly, and open ones")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write every verdict to this file")
    audit.add_argument("--seconds", type=float, default=5.0, help="of CPU time per response (default: 5)")
    audit.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    audit.set_defaults(run=audit_reward)


def submit_claims(arguments: argparse.Namespace) -> None:
    """Pack a declared sweep as a submission, or check one and add it as external evidence."""
    from grpo_lab.instruments.submission import claims

    claims(arguments)


def _add_claims(commands: argparse._SubParsersAction) -> None:
    claims = commands.add_parser("claims", help="external evidence: pack a declared sweep, or check one and add it")
    claims.add_argument("--pack", metavar="NAME", help="write the submission of this sweep, from its run folders")
    claims.add_argument(
        "--add", type=Path, metavar="FOLDER", help="check a submission, copy it to experiments/external"
    )
    claims.add_argument("--check", action="store_true", help="with --add: only check it")
    claims.add_argument("--runs", type=Path, default=Path(RUNS), help="with --pack: the folder of runs (default: runs)")
    claims.add_argument(
        "--design", type=Path, metavar="FILE", help="with --pack: the declaration (default: by its name)"
    )
    claims.add_argument("--to", type=Path, help="with --pack: the folder to write (default: NAME_submission)")
    claims.add_argument("--example", action="store_true", help="with --pack: marked as an example, no evidence")
    claims.add_argument("--experiments", type=Path, help="with --add: the experiments of a checkout (default: these)")
    claims.set_defaults(run=submit_claims)


class _Version(argparse.Action):
    """`--version`: prints the version that is installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        say(f"grpo-lab {version('grpo-lab')}")
        parser.exit()


# The commands by what a user wants; `dev` stands before those of a maintainer.
_GROUPS = {
    "Train": ("train", "sweep", "status", "stop"),
    "Results": ("figures", "report", "rollouts", "ui", "data", "tuned"),
    "Evaluate and compare": ("evaluate", "diff", "reproduce", "import", "sync", "claims"),
    "Instruments": ("check-loss", "doctor", "microscope", "audit-reward"),
    "Plan": ("tricks", "explain", "design", "power", "metrics", "pass-rates", "cost-model"),
    "Shell": ("completion",),
    "dev": ("base", "graders", "docs"),
}


def _grouped(commands: argparse._SubParsersAction) -> str:
    """Every command with its help, by group. Raises KeyError for a command of no group."""
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    lines = []
    for title, names in _GROUPS.items():
        lines += ["", f"{title}:" if title != "dev" else "For maintainers, after dev, as in grpo-lab dev docs:"]
        lines += [f"  {name:<12} {helps.pop(name)}" for name in names]
    if helps:
        raise KeyError(f"{', '.join(helps)}: in no group of commands")
    return "\n".join(lines)


def _start_training(words: Sequence[str]) -> NoReturn:
    """Become `python -m grpo_lab.train` with these words; a sweep's first may be an experiment's name."""
    command, rest = words[0], list(words[1:])
    if command == "sweep":
        named = rest and "=" not in rest[0] and rest[0][0] not in "-+~"
        rest = ["-m", *([f"+experiments={rest[0]}", *rest[1:]] if named else rest)] if rest else ["--help"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "grpo_lab.train", *rest])


def main(words: Sequence[str] | None = None) -> None:
    """Entry of the `grpo-lab` command; `words` instead of those of the command line."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] == ["dev"]:
        words = words[1:] or ["--help"]
    if words[:1] in (["train"], ["sweep"]):
        _start_training(words)
    parser, commands = command_line()
    if "_ARGCOMPLETE" in os.environ:
        from grpo_lab.config.completion import complete

        complete(parser, commands)
    arguments = parser.parse_args(words)
    try:
        arguments.run(arguments)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(printable(f"error: {error}"))


def command_line() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `grpo-lab`, and that of each command by its name."""
    parser = argparse.ArgumentParser(
        prog="grpo-lab", usage="grpo-lab COMMAND ...", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command", help=argparse.SUPPRESS, prog="grpo-lab")
    _add_training(commands)
    base = commands.add_parser("base", help="find or build a base model")
    base.add_argument("overrides", nargs="*", help="Hydra overrides, for example world=sums model.base=1")
    base.set_defaults(run=build_base)
    sync = commands.add_parser("sync", help="replay run folders into MLflow or another tracker")
    sync.add_argument("folder", type=Path, nargs="?", default=Path(RUNS), help="a run, or a folder of runs")
    sync.add_argument(
        "--to", choices=["mlflow", "tensorboard", "wandb", "trackio"], default="mlflow", help="default: mlflow"
    )
    sync.add_argument("overrides", nargs="*", help="of the tracker, for example tracking.project=mine")
    sync.set_defaults(run=sync_runs)
    pages = commands.add_parser("ui", help="start the MLflow UI for a folder of runs and print a link to each sweep")
    pages.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    pages.add_argument("--port", type=int, default=5000, help="port of the UI (default: 5000)")
    pages.set_defaults(run=open_ui)
    measured = commands.add_parser("cost-model", help="seconds of simulated time, measured on runs, as overrides")
    measured.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's folder, of schedule=sync")
    measured.set_defaults(run=measure_cost_model)
    commands.add_parser("metrics", help="list every metric: unit, meaning, its name in TRL and verl").set_defaults(
        run=list_metrics
    )
    tricks = commands.add_parser("tricks", help="the axes and their options, one line each")
    tricks.add_argument("--markdown", action="store_true", help="axes and recipes as the tables of the documentation")
    tricks.set_defaults(run=list_tricks)
    commands.add_parser(
        "design", help="the keys of an experiment's declaration, their values and defaults"
    ).set_defaults(run=list_design_keys)
    docs = commands.add_parser("docs", help="write the tables of tricks and recipes into the pages of a checkout")
    docs.set_defaults(run=write_docs)
    explained = commands.add_parser("explain", help="the loss that overrides choose, as a formula; rules, papers")
    explained.add_argument("overrides", nargs="*", help="Hydra overrides, for example recipe=dr_grpo kl=k3_loss")
    explained.add_argument(
        "--memory-gib", type=float, metavar="GIB", help="a GPU's memory: estimates whether the run fits, without one"
    )
    explained.add_argument("--gpus", type=int, default=1, metavar="N", help="as torchrun starts it, on N GPUs")
    explained.set_defaults(run=explain_run)
    graders = commands.add_parser("graders", help="false positives and false negatives of graders, by kind of answer")
    graders.add_argument("overrides", nargs="*", help="reward=NAME or verifier=NAME, and plugins=MODULE; all without")
    graders.add_argument("--pairs", action="store_true", help="list the pairs that each grader is wrong about")
    graders.set_defaults(run=grade_pairs)
    rates = commands.add_parser(
        "pass-rates", help="how often the base model solves the training problems; kept on disk"
    )
    rates.add_argument("overrides", nargs="*", help="Hydra overrides, for example world=tiny pass_rate=skywork_or1")
    rates.add_argument("--samples", type=int, metavar="K", help="answers to each problem (default: as the option says)")
    rates.set_defaults(run=measure_pass_rates)
    figures = commands.add_parser("figures", help="figures, tables and verdict of an experiment")
    figures.add_argument(
        "--external",
        "--foreign",
        action="append",
        default=[],
        metavar="NAME",
        help="imported runs to draw beside it, in one figure",
    )
    figures.add_argument(
        "--figure", action="append", default=[], metavar="FIGURE", help="draw this one, such as forest, not the five"
    )
    figures.add_argument("--all", action="store_true", help="draw every figure that the sweep can have")
    figures.add_argument("--brief", action="store_true", help="print which files to open, without the table of arms")
    figures.add_argument("--verdict", action="store_true", help="print all of the verdict's file too")
    figures.set_defaults(run=draw_figures)
    report = commands.add_parser("report", help="the same on one page, with switches and responses; works offline")
    report.set_defaults(run=write_report)
    for command, place in ((figures, "experiments/NAME/figures, or RUNS/figures"), (report, "analysis/reports")):
        command.add_argument("name", help="the sweep, as its folder under RUNS/sweeps is called")
        command.add_argument("--runs", default=RUNS, help="the folder of runs, or an MLflow URI (default: runs)")
        command.add_argument("--data", type=Path, help=_SAVED)
        command.add_argument("--only-runs", action="store_true", help="do not look at saved data")
        command.add_argument("--to", type=Path, help=f"where the files go (default: {place})")
    chosen = commands.add_parser("tuned", help="which setting, such as a rate, each arm of a tuning sweep gets")
    chosen.add_argument("name", help="the sweep; its levels are labelled <where>_<setting>")
    chosen.add_argument("--runs", default=RUNS, help="the folder of runs, or an MLflow URI (default: runs)")
    chosen.add_argument("--data", type=Path, help=_SAVED)
    chosen.add_argument("--only-runs", action="store_true", help="do not look at saved data")
    chosen.set_defaults(run=choose_settings)
    data = commands.add_parser("data", help="save an experiment's numbers, so that figures need no runs")
    data.add_argument("name", help="the sweep, as its folder under RUNS/sweeps is called")
    data.add_argument("--runs", type=Path, default=Path(RUNS), help="the folder of runs (default: runs)")
    data.add_argument("--to", type=Path, help="where the three files go (default: experiments/NAME/data)")
    data.add_argument("--evaluations", action="store_true", help="only evaluations and budgets, as tuning sweeps need")
    data.add_argument(
        "--lean", action="store_true", help="only what tables and verdicts read: few metrics of steps, no answers"
    )
    data.add_argument("--compact", action="store_true", help="six digits for all but counts: two thirds of the size")
    data.set_defaults(run=export_data)
    _add_steering(commands)
    _add_rollouts(commands)
    _add_microscope(commands)
    _add_reproduce(commands)
    _add_diff(commands)
    _add_power(commands)
    _add_evaluate(commands)
    _add_import(commands)
    _add_audit(commands)
    _add_claims(commands)
    _add_instruments(commands)
    _add_check_loss(commands)
    _add_completion(commands)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the installed version")
    parser.description = f"{__doc__}\n{_grouped(commands)}"
    return parser, commands.choices


if __name__ == "__main__":
    main()
