"""Tuning: what is declared and refused, the search itself, and trials before the first run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from processes import wait_until
from short_runs import metrics_of
from sweep_processes import WORLD, finished, multirun, started

from grpo_lab import train
from grpo_lab.analysis.caveats import notes
from grpo_lab.analysis.effects.tuned import numbers_text, trials_text
from grpo_lab.analysis.effects.verdict import verdict_text
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.chosen_numbers import ChosenNumbers, Trial, chosen_numbers, tuned_lines
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.config.design import Design, read_design, require_known_metrics
from grpo_lab.config.tuning import Range
from grpo_lab.sweeps.launching import LocalRunLauncher
from grpo_lab.sweeps.objective import has_settled, objective
from grpo_lab.sweeps.planned_runs import PlannedRun, plan_runs, sweep_name
from grpo_lab.sweeps.status import stages_of_sweep, summary
from grpo_lab.sweeps.studies import Studies
from grpo_lab.sweeps.sweeper import _tune
from grpo_lab.sweeps.tuning import Search, plan_tuning, run_tuning, show_tuning
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.run_reader import STOP
from grpo_lab.tracking.sweep_record import read_sweep, sweep_folder
from grpo_lab.tracking.terminal import Terminal
from grpo_lab.types import Exhausted

NAME = "tuned,evaluation=brief,world=tiny"  # the experiment with these words
RATE = "optimizer.learning_rate"
RATES = {"low": 1.0e-5, "high": 1.0e-2, "log": True}
HELDOUT = "eval/heldout/accuracy"
TUNING = {
    "trials": 3,
    "batch": 2,
    "seeds": [100, 101],
    "ranges": {RATE: RATES},
    "arms": {"higher": {"surrogate.clip_high": {"low": 0.2, "high": 0.6}}},
}
NODE = {
    "name": "tuned",
    "question": "Does it?",
    "prediction": "It does.",
    "control": "plain",
    "primary": HELDOUT,
    "axis": "steps",
    "base": [*WORLD, "problems_per_step=4", "budget.amount=2"],
    "arms": {"plain": [], "higher": ["surrogate=ppo_higher"]},
    "seeds": [0, 1],
    "predictions": [{"arm": "higher", "metric": HELDOUT, "direction": "above"}],
    "tuning": TUNING,
}


def declare(**changes: Any) -> Design:
    """NODE with some entries of its tuning replaced; None leaves one out."""
    tuning = {name: value for name, value in {**TUNING, **changes}.items() if value is not None}
    return read_design({**NODE, "tuning": tuning})


# ---- declared


def test_every_arm_has_the_shared_ranges_and_those_of_its_own() -> None:
    design = declare()
    assert design.tuning is not None and design.tuning.metric == HELDOUT, "the metric that decides, unless another"
    assert design.tuning.of("plain") == {RATE: Range(1e-5, 1e-2, True)}
    assert list(design.tuning.of("higher")) == [RATE, "surrogate.clip_high"]
    another = declare(arms={"higher": {RATE: {"low": 1, "high": 8, "integer": True}}}).tuning
    assert another is not None and another.of("higher") == {RATE: Range(1.0, 8.0, integer=True)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tries": 3}, "design.tuning.tries: unknown key; did you mean trials? valid keys: arms, batch"),
        ({"trials": 0}, "design.tuning.trials must be a whole number of at least 1"),
        ({"trials": None}, "design.tuning.trials must be a whole number"),
        ({"trials": True}, "design.tuning.trials must be a whole number"),
        ({"batch": 0}, "design.tuning.batch must be a whole number"),
        ({"seeds": None}, "design.tuning.seeds must be a list of different whole numbers"),
        ({"seeds": []}, "design.tuning.seeds must be a list"),
        ({"seeds": [100, 100]}, "design.tuning.seeds must be a list"),
        ({"seeds": [1, 100]}, "design.tuning.seeds: arms are judged on seed 1"),
        ({"metric": "eval/downstream/accuracy"}, "is of the downstream test, on which nothing may be chosen"),
        ({"ranges": None, "arms": None}, "design.tuning: arm plain has nothing to tune"),
        ({"ranges": [RATE]}, "design.tuning.ranges must map keys to ranges"),
        ({"arms": ["higher"]}, "design.tuning.arms must map arms to ranges"),
        ({"arms": {"lower": {RATE: RATES}}}, "design.tuning.arms: there is no 'lower'; choose from 'plain', 'higher'"),
        ({"ranges": {RATE: 0.1}}, f"design.tuning.ranges.{RATE} must give low and high"),
        ({"ranges": {RATE: {"low": 1}}}, "must give low and high"),
        ({"ranges": {RATE: {"low": 1, "high": 2, "steps": 3}}}, f"ranges.{RATE}.steps: unknown key"),
        ({"ranges": {RATE: {"low": 1, "high": 1}}}, "low must be below high, got 1 and 1"),
        ({"ranges": {RATE: {"low": 2, "high": 1}}}, "low must be below high, got 2 and 1"),
        ({"ranges": {RATE: {"low": 0, "high": 1, "log": True}}}, "low must be above 0 on a log scale, got 0"),
        ({"ranges": {RATE: {"low": -1, "high": 1, "log": True}}}, "low must be above 0 on a log scale"),
        ({"ranges": {RATE: {"low": "a", "high": 1}}}, "low and high are numbers, got 'a'"),
        ({"ranges": {RATE: {"low": math.nan, "high": 1}}}, "low and high are numbers"),
        ({"ranges": {RATE: {"low": 1, "high": 2, "log": "natural"}}}, "log and integer are true or false"),
        ({"ranges": {"group_size": {"low": 1.5, "high": 4, "integer": True}}}, "of an integer range are whole numbers"),
        ({"ranges": {"budget.amount": {"low": 1, "high": 2}}}, "is no number that tuning may choose"),
        ({"ranges": {"seed": {"low": 1, "high": 2}}}, "is no number that tuning may choose"),
        ({"ranges": {"problems_per_step": {"low": 1, "high": 2}}}, "and so does problems_per_step=4: remove one"),
        ({"arms": {"higher": {"surrogate": {"low": 1, "high": 2}}}}, "and so does surrogate=ppo_higher: remove one"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        declare(**changes)
    assert said in str(refused.value)


def test_the_ends_and_the_middle_of_a_range_are_numbers_of_its_kind() -> None:
    rate, size = Range(1e-5, 1e-3, log=True), Range(1.0, 8.0, integer=True)
    assert [rate.number(place) for place in (0.0, 0.5, 1.0)] == [1e-5, 1e-4, 1e-3]
    assert [repr(size.number(place)) for place in (0.0, 0.5, 1.0)] == ["1", "4", "8"]
    assert (rate.place(1e-4), size.place(8)) == (pytest.approx(0.5), 1)
    assert Range(0.0, 1 / 3).rounded(0.123456) == 0.1235 and rate.rounded(1e-3 + 1e-9) == 1e-3


def test_a_part_may_not_be_judged_on_a_tuning_seed_and_a_tuning_is_a_mapping() -> None:
    with pytest.raises(ValueError, match=r"arms are judged on seed 100"):
        read_design({**NODE, "parts": {"more": {"seeds": [5, 100]}}})
    with pytest.raises(ValueError, match=r"design\.tuning must hold entries \(trials, batch, seeds"):
        read_design({**NODE, "tuning": 5})


def test_a_tuning_metric_is_one_that_runs_log() -> None:
    require_known_metrics(declare())
    with pytest.raises(ValueError, match="no run has the metric 'eval/heldout/acuracy'"):
        require_known_metrics(declare(metric="eval/heldout/acuracy"))


def test_the_fingerprint_holds_a_tuning_and_is_that_of_old_without_one() -> None:
    plain = read_design({name: value for name, value in NODE.items() if name != "tuning"})
    assert plain.fingerprint() == read_design({**NODE, "tuning": None}).fingerprint()
    told = {design.fingerprint() for design in (plain, declare(), declare(trials=4), declare(seeds=[100]))}
    assert len(told) == 4


# ---- searched


def worth(numbers: Mapping[str, float | int]) -> float:
    """A cheap objective: a peak at a rate of 3e-4, and a slope in every other number."""
    return -((math.log10(numbers["rate"]) + 3.5) ** 2) + 0.01 * sum(numbers.values())


def searched(folder: Path, kills: Sequence[int] = ()) -> list[list[Any]]:
    """Twelve trials of two studies in batches of four; `kills` are batches after which all is opened again."""
    ranges = {"rate": Range(1e-5, 1e-2, log=True), "bound": Range(0.1, 0.5)}
    shapes = {"a": ranges, "b": {**ranges, "size": Range(1.0, 9.0, log=True, integer=True)}}
    for batch in range(3):
        studies = Studies(folder / "tuning.journal")
        for name, own in shapes.items():
            studies.ask(name, own, 4 * (batch + 1), startup=4, seed=100)
        if batch in kills:  # half of the batch was told, and a line was being written
            studies = Studies(folder / "tuning.journal")
            trials = studies.trials("a")
            studies.tell("a", {4 * batch + 1: worth(trials[4 * batch + 1].numbers)})
            with studies.journal.open("a") as journal:
                journal.write('{"op_code":6,"worker')
            assert studies.ask("a", shapes["a"], 4 * (batch + 1), startup=4, seed=100) == studies.trials("a")
        for name in shapes:
            trials = studies.trials(name)
            studies.tell(name, {at: worth(one.numbers) for at, one in enumerate(trials) if one.value is None})
    return [Studies(folder / "tuning.journal").trials(name) for name in shapes]


def test_a_search_that_was_killed_asks_for_what_it_would_have_asked_for(tmp_path: Path) -> None:
    whole = searched(tmp_path / "whole")
    assert searched(tmp_path / "killed", kills=[0, 1, 2]) == whole
    a, b = whole
    assert len(a) == len(b) == 12 and len({tuple(one.numbers.values()) for one in a}) == 12
    assert all(1e-5 <= one.numbers["rate"] <= 1e-2 and 0.1 <= one.numbers["bound"] <= 0.5 for one in (*a, *b))
    assert all(type(one.numbers["size"]) is int and 1 <= one.numbers["size"] <= 9 for one in b)
    assert all(float(f"{one.numbers['rate']:.4g}") == one.numbers["rate"] for one in a), "short in a run's name"
    # The first batch tries the same numbers in every arm, the later ones follow from what each arm saw.
    shared = [[{key: one.numbers[key] for key in ("rate", "bound")} for one in own] for own in whole]
    assert shared[0][:4] == shared[1][:4] and shared[0][4:] != shared[1][4:]


def test_a_value_that_was_told_stays(tmp_path: Path) -> None:
    studies = Studies(tmp_path / "tuning.journal")
    assert studies.trials("a") == [] and not studies.journal.exists()
    studies.ask("a", {"rate": Range(0.0, 1.0)}, 2, startup=2, seed=1)
    studies.tell("a", {0: 0.25})
    studies.tell("a", {0: 0.75, 1: 0.5})
    assert [one.value for one in studies.trials("a")] == [0.25, 0.5]


# ---- chosen


def numbers(values: Sequence[float], rates: Sequence[float], trial: int) -> ChosenNumbers:
    trials = [Trial({RATE: rate}, value) for rate, value in zip(rates, values)]
    return ChosenNumbers("", "plain", HELDOUT, [100, 101], {RATE: Range(1e-5, 1e-2, True)}, trials, trial)


def test_a_choice_near_an_end_of_its_range_is_said() -> None:
    inside, beyond = numbers([0.1, 0.4], [1e-4, 1e-3], 1), numbers([0.5, 0.4], [9e-3, 1e-3], 0)
    assert (inside.ends, beyond.ends) == ({}, {RATE: "high"})
    said = numbers_text([inside, replace(beyond, arm="higher")])
    assert "Tuned: 2 trials each, on seeds 100, 101, by eval/heldout/accuracy; judged on other seeds." in said
    assert f"Tuned near an end of its range: {RATE}=0.009 of higher is near the high end, 0.01" in said
    assert "0.009!" in said and "0.001 " in said and "2 of 2" in said
    assert "0.400*" in trials_text([inside]) and numbers_text([]) == "" and tuned_lines([]) == []


@pytest.fixture
def plan(compose: Callable, tmp_path: Path) -> Callable[..., Search]:
    """plan(design, "seed=3", ...) -> the checked tuning, with runs in tmp_path."""

    def make(design: Design, *words: str) -> Search:
        typed = [*words, f"runs_dir='{tmp_path / 'my runs'}'"]
        return plan_tuning(design, typed, sweep_name(design, words), compose, tmp_path / "my runs")

    return make


class Launcher:
    """Executes runs by writing what a run would have logged: a made-up accuracy that follows from its numbers."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.started: list[str] = []
        self.dies_after = dies_after

    def __call__(self, title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        for planned in todo:
            if len(self.started) == self.dies_after:
                raise KeyboardInterrupt
            self.started.append(f"{planned.folder.parent.name} {planned.plan.seed}")
            rate, bound = planned.run.optimizer.learning_rate, planned.run.surrogate.clip_high
            accuracy = 0.9 - 0.1 * (math.log10(rate) + 3.5) ** 2 + 0.05 * bound - 0.01 * (planned.plan.seed % 100)
            write_json(planned.folder / "run.json", {"identity": {}, "run_key": "x"})
            with RunLog(planned.folder) as log:
                for step in (0, 1, 2):
                    log.write_step(step, {"budget/steps": step, HELDOUT: accuracy if step else 0.3}, {})
                log.mark_done({"no_ops": [], "steps": 2})
        return [JobReturn(status=JobStatus.COMPLETED) for _ in todo]


@pytest.fixture
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of these tests writes runs that have none."""
    monkeypatch.setattr("grpo_lab.sweeps.planned_runs.check_folder", lambda *_: {})


@pytest.mark.extended
def test_every_arm_gets_as_many_trials_and_a_kill_changes_none(
    plan: Callable[..., Search], no_identity: None, tmp_path: Path, compose: Callable, capsys: pytest.CaptureFixture
) -> None:
    console = Terminal(stderr=False, width=200)
    design, runs = declare(), tmp_path / "my runs"
    show_tuning(console, plan(design))
    said = capsys.readouterr().out
    assert "3 trials of each of 2 arms on 2 seeds, which are 12 runs, 0 of them finished" in said
    assert "the runs below use mid-range for each value not chosen yet" in said and not runs.exists(), (
        "a dry run writes nothing"
    )

    ran: list[str] = []
    for dies_after in (3, 7, None):
        launcher = Launcher(dies_after)
        try:
            run_tuning(console, plan(design), launcher)
        except KeyboardInterrupt:
            assert plan(design).open() == [("", "plain"), ("", "higher")]
        ran += launcher.started
        said = capsys.readouterr().out
        show_tuning(console, plan(design))
        assert f"which are 12 runs, {len(ran)} of them finished" in capsys.readouterr().out
    assert len(ran) == len(set(ran)) == 12, "no run twice"
    assert "Tuned: 3 trials each" in said
    search = plan(design)
    chosen = search.chosen()
    assert search.open() == [] and [(one.arm, len(one.trials)) for one in chosen] == [("plain", 3), ("higher", 3)]
    for one in chosen:
        assert one.chosen.value == max(trial.value for trial in one.trials)
        assert set(one.ranges) == set(design.tuning.of(one.arm))
    elsewhere = plan_tuning(design, [], "tuned", compose, tmp_path / "elsewhere")
    run_tuning(console, elsewhere, Launcher())
    assert elsewhere.chosen() == chosen, "as a search that was never killed"

    # Judged runs have the numbers; another budget of trials goes on from these.
    settled = search.settled()
    words = [settled(one).overrides for one in plan_runs(design, [])]
    assert all(f"{RATE}={chosen[position % 2].chosen.numbers[RATE]!r}" in own for position, own in enumerate(words))
    capsys.readouterr()
    show_tuning(console, search)
    assert "12 of them finished" in (said := capsys.readouterr().out) and "Tuned: 3 trials" in said
    launcher = Launcher()
    run_tuning(console, plan(declare(trials=4)), launcher)
    assert len(launcher.started) == 4 and [one.trials[:3] for one in plan(declare(trials=4)).chosen()] == [
        one.trials for one in chosen
    ]
    show_tuning(console, plan(declare(seeds=[100])))
    assert "6 runs, 0 of them finished" in capsys.readouterr().out, "another tuning begins anew"

    # Its trials can be listed, as a sweep of their own, once what is declared was recorded.
    _tune(console, search, design, NODE, Launcher())
    record = read_sweep(sweep_folder(runs, "tuned"))
    assert record.design == NODE and [one["fingerprint"] for one in record.declared] == [design.fingerprint()]
    (title, trials, planned), (_, planned_runs, judged) = stages_of_sweep(runs, "tuned")
    assert summary(title, trials, planned) == "tuned, tuning: 16 of 16 done"
    assert (
        summary("tuned", planned_runs, judged) == "tuned: 0 of 4 done" and trials[0].title == "plain trial=1 seed=100"
    )
    with pytest.raises(ValueError, match="tuned has no runs yet: its arms are being tuned"):
        load_sweep(runs, "tuned")


@pytest.mark.extended
def test_trials_come_in_batches_that_end_at_multiples_of_the_batch(
    plan: Callable[..., Search], no_identity: None
) -> None:
    """Batches of two: 1 and 2, then 3. With five trials wanted later, 4 ends the batch that 3 began, and 5 is last."""
    begun: list[tuple[str, int]] = []
    launcher = Launcher()

    def launch(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        begun.append((title.partition("trials ")[2], len(todo)))
        return launcher(title, todo, finished)

    for trials in (3, 5):
        run_tuning(Terminal(stderr=False, width=200), plan(declare(trials=trials, seeds=[100])), launch)
    # both arms, one seed
    assert begun == [("1 to 2 of 3", 4), ("3 to 3 of 3", 2), ("4 to 4 of 5", 2), ("5 to 5 of 5", 2)]


@pytest.mark.extended
def test_the_first_of_equal_trials_is_chosen(plan: Callable[..., Search]) -> None:
    search = plan(declare(arms=None, trials=3))
    for place in search.plans:
        search.studies.ask(search.study(place), search.tuning.of(place[1]), 3, startup=2, seed=100)
        search.studies.tell(search.study(place), {0: 0.2, 1: 0.5, 2: 0.5})
    assert [one.trial for one in search.chosen()] == [1, 1]


@pytest.mark.extended
def test_a_failed_trial_stops_the_sweep_and_a_collapsed_one_counts_as_zero(
    plan: Callable[..., Search], no_identity: None, tmp_path: Path
) -> None:
    def fails(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        with RunLog(todo[0].folder) as log:
            log.mark_error(ValueError("no memory"))
        failed = JobReturn(status=JobStatus.FAILED)
        failed._return_value = RuntimeError("no memory")
        return [failed, *Launcher()(title, todo[1:], finished)]

    with pytest.raises(ValueError, match=r"trials failed; the same command tries again:\n  plain trial=1 seed=100: no"):
        run_tuning(Terminal(quiet=True), plan(declare()), fails)

    def stopped(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        for planned in todo:
            with RunLog(planned.folder) as log:
                log.mark_error(KeyboardInterrupt("stopped by grpo-lab stop"))
            (planned.folder / STOP).touch()
        return [JobReturn(status=JobStatus.FAILED) for _ in todo]

    with pytest.raises(ValueError, match="no run was started, because trials were stopped; the same command"):
        run_tuning(Terminal(quiet=True), plan(declare()), stopped)

    def collapses(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        for planned in todo:
            write_json(planned.folder / "run.json", {"identity": {}, "run_key": "x"})
            with RunLog(planned.folder) as log:
                log.begin()
                log.mark_error(FloatingPointError("the loss is nan"))
        return [JobReturn(status=JobStatus.FAILED) for _ in todo]

    search = plan(declare(trials=1))
    run_tuning(Terminal(quiet=True), search, collapses)
    plain, higher = search.chosen()
    assert plain.chosen.value > 0.1, "one of its two runs had ended before"
    assert higher.chosen.value > 0.3, "both had"
    other = plan(declare(trials=1, seeds=[200]))
    run_tuning(Terminal(quiet=True), other, collapses)
    assert [one.chosen.value for one in other.chosen()] == [0.0, 0.0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"ranges": {"optimizer.learning_rat": RATES}}, [], "optimizer.learning_rat"),
        ({"ranges": {"optimizer.beta1": {"low": 0.5, "high": 1.5}}}, [], "beta1"),
        ({"metric": "rollout/truncated"}, [], "rollout/truncated is no accuracy or reward"),
        ({}, ["seed=5,101"], "arms are judged on seed 101"),
        ({}, [f"{RATE}=1e-4"], f"design.tuning chooses {RATE}, and so does {RATE}=1e-4"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(
    plan: Callable[..., Search], tmp_path: Path, changes: dict[str, Any], words: list[str], said: str
) -> None:
    with pytest.raises(ValueError) as refused:
        plan(declare(**changes), *words)
    assert said in str(refused.value) and not (tmp_path / "my runs").exists()


@pytest.mark.extended
def test_arms_of_unequal_budgets_and_arms_that_cannot_differ_are_refused(plan: Callable[..., Search]) -> None:
    arms = {"plain": [], "higher": ["surrogate=ppo_higher", "budget.amount=3"]}
    with pytest.raises(ValueError, match="plain and higher have different budgets"):
        plan(read_design({**NODE, "arms": arms}))
    arms, tuning = {"plain": [], "higher": ["group_filter=keep"]}, {**TUNING, "arms": {}}
    with pytest.raises(ValueError, match="arm higher and plain are the same run"):
        plan(read_design({**NODE, "arms": arms, "tuning": tuning}))


def test_the_worth_of_a_run_is_its_final_value_and_zero_if_it_stopped(tmp_path: Path) -> None:
    def run(name: str, error: Exception | None = None) -> Path:
        with RunLog(tmp_path / name) as log:
            for step in range(11):
                log.write_step(step, {"budget/steps": step, "reward/mean": step, HELDOUT: step / 20}, {})
            if error is None:
                log.mark_done({})
            else:
                log.mark_error(error)
        return tmp_path / name

    done, dry, nan = run("done"), run("dry", Exhausted("x")), run("nan", FloatingPointError("x"))
    assert objective(done, HELDOUT, "steps") == 0.5
    assert objective(done, "reward/mean", "steps") == pytest.approx(9.5), "of the last fifth of its steps"
    assert math.isnan(objective(done, "eval/downstream/accuracy", "steps"))
    assert [objective(folder, HELDOUT, "steps") for folder in (dry, nan)] == [0, 0]
    assert math.isnan(objective(nan, "rollout/truncated", "steps"))
    assert not has_settled(run("broken", OSError("disk"))) and has_settled(nan)


# ---- run


def tuned_sweep(folder: Path, *words: str) -> None:
    """`python -m grpo_lab.train +experiments=tuned` in this process; its runs have processes of their own."""
    multirun("+experiments=tuned", *WORLD, f"runs_dir={folder}", *words)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a smaller NODE as an experiment: two trials of two arms on one seed, one of them at a time."""
    node = {**NODE, "seeds": [0], "tuning": {**TUNING, "trials": 2, "batch": 1, "seeds": [100]}}
    node["base"] = ["problems_per_step=4", "budget.amount=1"]
    path = tmp_path / "conf" / "experiments" / "tuned.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\n" + json.dumps({"design": node, "hydra": {"mode": "MULTIRUN"}}))
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path / "conf"))
    return tmp_path


@pytest.mark.extended
def test_a_dry_run_says_what_is_tuned_and_starts_nothing(experiment: Path, capfd: pytest.CaptureFixture) -> None:
    tuned_sweep(experiment / "runs", "hydra.sweeper.dry_run=true")
    said = capfd.readouterr().err
    assert "2 trials of each of 2 arms on 1 seed, which are 4 runs, 0 of them finished" in said
    assert f"{NAME}: 2 runs; none is started" in said and not (experiment / "runs").exists()
    with pytest.raises(SystemExit, match=f"error: design.tuning chooses {RATE}, and so does"):
        tuned_sweep(experiment / "runs", f"{RATE}=1e-3")


def _has_finished(runs: Path, number: int) -> bool:
    return finished(runs) >= number


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="follows processes in /proc")
def test_a_tuned_sweep_that_is_killed_ends_with_the_record_of_one_that_is_not(
    experiment: Path, tiny_base: Path, capfd: pytest.CaptureFixture
) -> None:
    whole, killed = experiment / "whole", experiment / "killed"
    tuned_sweep(whole)
    for ended in (1, 3):  # in the first batch, and in the second
        with started(killed, "+experiments=tuned") as (process, _):
            wait_until(partial(_has_finished, killed / "tuning", ended), process)
            process.kill()
    tuned_sweep(killed)
    records = [read_sweep(sweep_folder(runs, NAME)) for runs in (whole, killed)]
    assert records[0].tuning == records[1].tuning and len(records[0].tuning) == 2
    assert [entry.folder for entry in records[0].cells] == [entry.folder for entry in records[1].cells]
    assert finished(whole / "tuning") == finished(killed / "tuning") == 4 and finished(whole) == finished(killed) == 2
    for entry in records[0].cells:
        logs = [(runs / entry.folder / "metrics.jsonl").read_bytes() for runs in (whole, killed)]
        assert logs[0] == logs[1] and logs[0]
    chosen = {one.arm: one.chosen.numbers for one in chosen_numbers(records[1])}
    for entry in records[1].cells:
        config = json.loads((killed / entry.folder / "run.json").read_text())["config"]
        assert {key: config[key] for key in chosen[entry.arm]} == chosen[entry.arm]

    # What was chosen stands in the verdict and under figures; trials are no runs of the sweep.
    data = load_sweep(killed, NAME)
    assert len(data.runs) == 2 and set(data.runs["seed"]) == {0}
    finals = final_values(data)
    assert "Tuned: 2 trials each, on seed 100" in verdict_text(data, finals)
    assert any(line.startswith("Tuned: 2 trials each") for line in notes(data, finals))
    save_data(data, experiment / "data")
    assert load_data(experiment / "data", NAME).record.tuning == data.record.tuning

    capfd.readouterr()
    tuned_sweep(killed)
    said = capfd.readouterr().err
    assert f"{NAME}: all 2 runs are finished" in said and "tuning, trials" not in said, "nothing is run again"


OBJECTIVE = (*WORLD, "problems_per_step=4", "budget.amount=1", "objective=reward/mean")


@pytest.mark.extended
def test_another_sweeper_is_told_what_each_run_is_worth(compose: Callable, tmp_path: Path, tiny_base: Path) -> None:
    words = [*OBJECTIVE, f"runs_dir={tmp_path}", "seed=3"]
    launcher = LocalRunLauncher(1, 30.0, None)
    (done,) = launcher.launch([words], compose, [])
    (folder,) = tmp_path.glob("*/seed=3")
    assert done.return_value == objective(folder, "reward/mean", "steps") and 0 <= done.return_value <= 1
    with pytest.raises(ValueError, match=r"objective must be a metric that `grpo-lab metrics` lists"):
        launcher.launch([[*words, "objective=reward/men"]], compose, [])


@pytest.mark.extended
def test_a_launcher_of_hydra_s_own_is_told_so_too(tmp_path: Path, tiny_base: Path) -> None:
    words = (*OBJECTIVE, f"runs_dir={tmp_path}", "seed=3,4", "hydra/launcher=basic", "hydra/sweeper=basic")
    (done,) = multirun(*words, task=train._run_hydra)
    logs = [metrics_of(next(tmp_path.glob(f"*/seed={seed}"))) for seed in (3, 4)]
    assert [one.return_value for one in done] == [log[-1]["metrics"]["reward/mean"] for log in logs]
    assert len({one.return_value for one in done}) == 2, "each its own"
