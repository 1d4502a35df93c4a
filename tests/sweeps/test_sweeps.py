"""Sweeps before a process starts: what is declared, expanded, refused, recorded and shown."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from declared_experiments import DECLARATIONS
from hydra.core.override_parser.types import Quote, QuotedString
from safetensors.torch import load_file
from sweep_processes import multirun
from torch.testing import assert_close

from grpo_lab.config.design import Design, load_design, named_design, read_design, require_known_metrics
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.rules import WARNINGS, IncompatibleRun
from grpo_lab.config.run_config import AXES, to_run
from grpo_lab.config.run_name import run_name
from grpo_lab.distributed.device import device_kind, planned_elsewhere
from grpo_lab.loop import start
from grpo_lab.run.identity import check_folder, run_identity
from grpo_lab.sweeps import planned_runs as planning
from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.launching import LocalRunLauncher
from grpo_lab.sweeps.local import LocalBackend, slots, usable_cores
from grpo_lab.sweeps.planned_runs import (
    PlannedRun,
    compose_runs,
    folders_of,
    is_own,
    overrides_for,
    plan_runs,
    refuse_no_op_arms,
    share_runs,
    sweep_name,
)
from grpo_lab.sweeps.progress_display import ProgressDisplay, WatchedRun
from grpo_lab.tracking.checksums import CHECKSUM, with_checksum
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.run_reader import ACTIVITY, STOP, has_ended, was_exhausted
from grpo_lab.tracking.sweep_record import (
    RunEntry,
    SweepRecord,
    read_sweep,
    record_sweep,
    run_states,
    sweep_folder,
    sweep_of,
    sweep_status,
)
from grpo_lab.tracking.terminal import Terminal
from grpo_lab.types import Exhausted

WORLD = ("world=tiny", "tracking=none")
DECLARED = {
    "name": "probe",
    "question": "Does  it\nhelp?",
    "prediction": "It does.",
    "control": "score",
    "primary": "rollout/truncated",
    "axis": "sampled_tokens",
    "base": ["updates=one", "group_size=4"],
    "arms": {"score": [], "mask": ["truncation=mask_after", "group_size=8"]},
    "factor": "aggregation",
    "levels": {"flat": [], "mean": ["aggregation=token_mean", "group_size=6", "updates=two"]},
    "seeds": [0, 1, 2],
    "predictions": [{"arm": "mask", "level": "mean", "metric": "reward/mean", "direction": "above"}],
    "parts": {"demo": {"arms": ["mask"], "seeds": [7]}},
}


def declare(**changes: object) -> Design:
    """DECLARED with some entries replaced; None leaves one out."""
    return read_design({**DECLARED, **changes})


def flat_design(*, base: Sequence[str] = (), seeds: Sequence[int] = (0,), **arms: list[str]) -> Design:
    """A design without a factor, whose control does nothing; `arms` are added to it."""
    changes = {"factor": None, "levels": None, "predictions": None, "parts": None, "control": "plain"}
    return declare(**changes, base=[*WORLD, *base], seeds=list(seeds), arms={"plain": [], **arms})


@pytest.fixture
def runs_of(compose: Callable, tmp_path: Path) -> Callable[..., list[PlannedRun]]:
    """runs_of(design, "seed=0,1", ...) -> the checked runs, with runs in tmp_path."""

    def make(design: Design | None, *words: str) -> list[PlannedRun]:
        words = (*words, f"runs_dir={tmp_path}")
        return compose_runs(plan_runs(design, words), sweep_name(design, words), compose)

    return make


# ---- declared


@pytest.mark.parametrize(
    "changes,said",
    [
        *(({name: None}, f"design.{name} is missing") for name in ("name", "question", "prediction", "control")),
        *(({name: None}, f"design.{name} is missing") for name in ("primary", "axis", "arms", "seeds")),
        ({"colour": "red"}, "design.colour: unknown key; valid keys: arms, axis"),
        ({"arms": ["score", "mask"]}, "design.arms must map each name to a list of overrides"),
        ({"arms": {"score": [], "mask": "truncation=mask_after"}}, "design.arms must map each name to a list"),
        ({"levels": {"flat": None}}, "design.levels must map each name to a list"),
        ({"factor": None}, "give both or neither"),
        ({"levels": None}, "give both or neither"),
        ({"base": "updates=one"}, "design.base"),
        ({"seeds": 3}, "design.seeds must be a list of different whole numbers, got 3"),
        ({"seeds": [0, 0]}, "design.seeds must be a list of different whole numbers"),
        ({"seeds": [-1]}, "design.seeds must be a list of different whole numbers"),
        ({"seeds": [True]}, "design.seeds must be a list of different whole numbers"),
        ({"parts": {"demo": {"seeds": []}}}, "design.parts.demo.seeds must be a list"),
        ({"parts": {"demo": {"budget": 3}}}, "design.parts.demo.budget: unknown key; valid keys: arms"),
        ({"parts": {"demo": None}}, "design.parts.demo"),
        ({"parts": {"demo": {"arms": ["maks"]}}}, "design.parts.demo.arms: there is no 'maks'; choose from 'score'"),
        ({"parts": {"demo": {"levels": ["fat"]}}}, "design.parts.demo.levels: there is no 'fat'"),
        ({"part": "dmo"}, "design.part: there is no 'dmo'; choose from 'demo'"),
        ({"control": "plain"}, "design.control: there is no 'plain'; choose from 'score', 'mask'"),
    ],
)  # fmt: skip
def test_a_declaration_that_is_off_is_refused_by_its_key(changes: dict, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        declare(**changes)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "entry,said",
    [
        ({"direction": "higher"}, "must give arm, metric, direction (above, below or within a margin of the control)"),
        ({"metric": None}, "must give arm, metric, direction"),
        ({"colour": "red"}, "design.predictions.colour: unknown key; valid keys: against, arm, direction"),
        ("mask", "design.predictions"),
        ({"arm": "score"}, "there is no 'score'; choose from 'mask'"),  # the control cannot differ from itself
        ({"level": "fat"}, "there is no 'fat'; choose from 'flat', 'mean'"),
        ({"level": None}, "there is no ''; choose from 'flat', 'mean'"),
        ({"against": "mean"}, "there is no 'mean'; choose from 'flat'"),
    ],
)
def test_a_prediction_that_cannot_be_judged_is_refused(entry: object, said: str) -> None:
    if isinstance(entry, dict):
        entry = {**DECLARED["predictions"][0], **entry}
        entry = {name: value for name, value in entry.items() if value is not None}
    with pytest.raises(ValueError) as refused:
        declare(predictions=[entry])
    assert said in str(refused.value) and "design.predictions" in str(refused.value)


def test_a_metric_that_no_run_logs_is_refused_before_the_first_run() -> None:
    require_known_metrics(declare())
    entry = {**DECLARED["predictions"][0], "metric": "reward/men"}
    for changes, name in (
        ({"primary": "rollout/truncatd"}, "rollout/truncatd"),
        ({"predictions": [entry]}, "reward/men"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"no run has the metric '{name}'"):
            require_known_metrics(declare(**changes))
    with pytest.raises(ValueError, match=r"design\.axis: there is no 'sampled_token'; choose from"):
        require_known_metrics(declare(axis="sampled_token"))


def test_a_part_chooses_and_what_it_leaves_out_means_all() -> None:
    whole, part = declare().chosen(), declare(part="demo").chosen()
    assert (whole.arms, whole.levels, whole.seeds) == (("score", "mask"), ("flat", "mean"), (0, 1, 2))
    assert (part.arms, part.levels, part.seeds) == (("mask",), ("flat", "mean"), (7,))


def test_the_fingerprint_is_of_what_was_declared() -> None:
    told = declare().fingerprint()
    assert declare(part="demo").fingerprint() == declare(parts=None).fingerprint() == told, "a part declares the same"
    below = [{**DECLARED["predictions"][0], "direction": "below"}]
    changes = {
        "question": "Why?", "prediction": "It does not.", "control": "mask", "primary": "reward/mean",
        "axis": "steps", "base": [], "arms": {**DECLARED["arms"], "score": ["kl=k3_loss"]}, "factor": "scale",
        "levels": {"flat": [], "mean": []}, "seeds": [0, 1], "predictions": below,
    }  # fmt: skip
    for name, value in changes.items():
        if name == "control":
            value, other = "mask", declare(control="mask", predictions=None).fingerprint()
            assert other != declare(predictions=None).fingerprint()
            continue
        assert declare(**{name: value}).fingerprint() != told, name


@pytest.mark.parametrize("path", DECLARATIONS, ids=lambda path: path.parent.name)
def test_every_experiment_is_a_declaration_named_after_its_folder(path: Path) -> None:
    design = load_design(path)
    require_known_metrics(design)
    assert design.name == path.parent.name


def test_an_experiment_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no experiment 'overlng': choose from .*overlong"):
        named_design("overlng")
    (tmp_path / "empty.yaml").write_text("seed: 0\n")
    with pytest.raises(ValueError, match="design"):
        load_design(tmp_path / "empty.yaml")


# ---- expanded


def test_a_design_is_expanded_seed_by_seed_so_that_a_sweep_cut_short_is_balanced() -> None:
    plans = plan_runs(declare(), [])
    first = [("score", "flat"), ("mask", "flat"), ("score", "mean"), ("mask", "mean")]
    assert [(plan.arm, plan.level) for plan in plans] == 3 * first
    assert [plan.seed for plan in plans] == 4 * [0] + 4 * [1] + 4 * [2]
    assert plans[1].title == "mask flat seed=0"
    part = plan_runs(declare(part="demo"), [])
    assert [plan.title for plan in part] == ["mask flat seed=7", "mask mean seed=7"]


def test_the_arm_wins_over_the_level_the_level_over_the_base_and_the_command_line_over_all() -> None:
    def options(plan_words: Sequence[str]) -> dict[str, str]:
        words = dict(word.split("=") for word in plan_words)
        assert len(words) == len(plan_words), "one override per key"
        return words

    plain, mask, plain_mean, mask_mean = (options(plan.overrides) for plan in plan_runs(declare(seeds=[5]), []))
    assert (plain["group_size"], mask["group_size"]) == ("4", "8")
    assert (plain_mean["group_size"], mask_mean["group_size"]) == ("6", "8")
    assert (plain["updates"], plain_mean["updates"], plain["seed"]) == ("one", "two", "5")
    typed = ["group_size=2", "truncation=score", "seed=9,8"]
    plans = [options(plan.overrides) for plan in plan_runs(declare(), typed)]
    assert {words["group_size"] for words in plans} == {"2"} and {words["truncation"] for words in plans} == {"score"}
    assert [words["seed"] for words in plans] == 4 * ["9"] + 4 * ["8"], "typed seeds replace the declared ones"


def test_lists_multiply_and_become_the_arms() -> None:
    plans = plan_runs(None, ["truncation=score,mask_after", "kl=none", "updates=one,two", "seed=0,1"])
    four = [f"truncation={t},updates={u}" for t in ("score", "mask_after") for u in ("one", "two")]
    assert [plan.arm for plan in plans] == 2 * four and {plan.level for plan in plans} == {""}
    assert plans[3].overrides == ("truncation=mask_after", "kl=none", "updates=two", "seed=0")
    (single,) = plan_runs(None, ["kl=none"])
    assert (single.arm, single.level, single.seed) == ("run", "", 0)


def test_a_list_beside_a_design_multiplies_its_levels_so_that_arms_keep_their_control() -> None:
    plans = plan_runs(declare(seeds=[0], factor=None, levels=None, predictions=None), ["group_size=4,8"])
    assert [(plan.arm, plan.level) for plan in plans] == [
        ("score", "group_size=4"), ("score", "group_size=8"), ("mask", "group_size=4"), ("mask", "group_size=8")
    ]  # fmt: skip
    assert plan_runs(declare(), ["group_size=4,8"])[-1].level == "mean,group_size=8"


def test_the_forms_of_a_list() -> None:
    assert [plan.seed for plan in plan_runs(None, ["seed=range(0,3)"])] == [0, 1, 2]
    assert [plan.arm for plan in plan_runs(None, ["group_size=choice(4,8)"])] == ["group_size=4", "group_size=8"]
    assert plan_runs(None, ["~kl"])[0].overrides == ("~kl", "seed=0")
    removed = plan_runs(flat_design(base=["kl=k3_loss"]), ["~kl"])[0].overrides
    assert "~kl" in removed and "kl=k3_loss" not in removed
    assert [plan.overrides[0] for plan in plan_runs(None, ["+new.key=1,2"])] == ["+new.key=1", "+new.key=2"]
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate=interval\(0,1\): a sweep needs a list of values"):
        plan_runs(None, ["optimizer.learning_rate=interval(0,1)"])
    with pytest.raises(ValueError, match="glob"):  # Hydra reads the folder only where it composes
        plan_runs(None, ["truncation=glob(*)"])
    with pytest.raises(ValueError, match="seed"):
        plan_runs(None, ["seed=0,x"])


def test_what_is_the_sweeps_own_is_handed_to_no_run() -> None:
    own = ["+experiments=overlong", "experiments=overlong", "design.part=demo", "design.seeds=[1]"]
    assert all(map(is_own, own))
    assert not any(map(is_own, ["+design_of=x", "truncation=score", "label.arm=design", "task=experiments"]))
    assert plan_runs(None, own)[0].overrides == ("seed=0",)


def test_a_sweep_is_named_after_what_it_varies() -> None:
    assert sweep_name(declare(), ["+experiments=probe", "design.part=demo", "seed=4,5", "device=cpu"]) == "probe"
    assert sweep_name(declare(), ["budget.amount=10"]) == "probe,budget.amount=10"
    words = ["truncation=score,mask_after", "runs_dir=/x", "tracking=none", "tracking.uri=y", "kl=none"]
    assert sweep_name(None, words) == sweep_name(None, words[::-1]) == "kl=none,truncation=score,mask_after"
    assert sweep_name(None, ["seed=0,1"]) == "seeds"
    long = sweep_name(None, [f"model.path=/{'x' * 300}"])
    assert len(long) == 120 and "/" not in long


# ---- composed, or refused


@pytest.mark.parametrize(
    "path",
    [one if one.parent.name == "dapo" else pytest.param(one, marks=pytest.mark.extended) for one in DECLARATIONS],
    ids=lambda path: path.parent.name,
)
def test_every_run_of_every_experiment_can_run(path: Path, runs_of: Callable) -> None:
    """Of one seed a base, as runs of two seeds are composed from the same words; all seeds and parts as plans."""
    design = load_design(path)
    seeds = design.seeds[: max(1, len(design.bases))]
    whole = runs_of(design, "tracking=none", f"seed={','.join(map(str, seeds))}")
    refuse_no_op_arms(design, whole)
    assert len(whole) == len(seeds) * len(design.arms) * len(design.levels)
    words = {(planned.folder, frozenset(planned.plan.overrides)) for planned in whole}
    assert len({planned.folder for planned in whole}) == len(words), "runs of one folder are one run"
    assert {str(Path(planned.record().folder).parent) for planned in whole} == folders_of(design, ["tracking=none"])
    expected = {(plan.arm, plan.level, plan.seed) for plan in plan_runs(design, [])}
    assert expected == {(planned.plan.arm, planned.plan.level, seed) for planned in whole for seed in design.seeds}
    for name in design.parts:
        part = plan_runs(replace(design, part=name), [])
        assert {(plan.arm, plan.level, plan.seed) for plan in part} <= expected, name


def test_all_refusals_are_said_at_once_each_once_and_by_the_arm(runs_of: Callable) -> None:
    wrong = {"typo": ["truncation=mask_aftr"], "alone": ["group_size=1"], "low": ["surrogate.clip_low=-1"]}
    wrong["rate"] = ["lr=1e-4"]
    design = flat_design(seeds=[0, 1, 2, 3, 4], **wrong, key=["no_such_key=1"], fine=["kl=k3_loss"])
    with pytest.raises(ValueError) as refused:
        runs_of(design)
    said = str(refused.value)
    assert said.startswith("no run was started")
    for arm, reason in {
        "typo": "truncation/mask_aftr", "alone": "the baseline has too few responses",
        "low": "clip_low must be greater than 0", "key": "there is no key 'no_such_key'",
        "rate": "there is no key 'lr': type optimizer.learning_rate=1e-4",
    }.items():  # fmt: skip
        assert said.count(reason) == 1 and said.index(f"  {arm} seed=0: ") < said.index(reason), arm
    assert "fine" not in said and "plain" not in said and "seed=1" not in said


@pytest.mark.extended
def test_two_runs_of_one_name_and_an_arm_that_is_its_control_are_refused(runs_of: Callable) -> None:
    design = flat_design(same=["truncation=score"])
    with pytest.raises(IncompatibleRun, match="arm same and plain are the same run: remove one of the two"):
        refuse_no_op_arms(design, runs_of(design))
    with pytest.raises(ValueError, match=r"two runs are called run seed=3: remove one"):
        share_runs(runs_of(None, *WORLD, "seed=3,4,3"))
    assert len(runs_of(None, *WORLD, "seed=3,4")) == 2


def lagging(axis: str = "steps") -> Design:
    """Two arms at two levels; without a lag there is nothing to correct."""
    levels = {"0": [], "1": ["schedule=one_step_off"]}
    arms = {"plain": [], "tis": ["correction=tis_token"], "again": ["correction=tis_token"], "kl": ["kl=k3_loss"]}
    changes = {"factor": "lag", "levels": levels, "arms": arms, "predictions": None, "parts": None}
    return declare(**changes, control="plain", base=[*WORLD, "updates=one"], seeds=[0, 1], axis=axis)


@pytest.mark.extended
def test_runs_that_are_one_run_by_construction_share_it(runs_of: Callable, tmp_path: Path) -> None:
    design = lagging()
    runs = share_runs(runs_of(design), design.axis)
    refuse_no_op_arms(design, runs)  # it can differ with a lag
    shared = {planned.plan.title: planned.same_as for planned in runs if planned.same_as}
    assert shared == {
        f"{arm} {lag} seed={seed}": f"{maker} {lag} seed={seed}"
        for seed in (0, 1)
        for arm, lag, maker in (("tis", 0, "plain"), ("again", 0, "plain"), ("again", 1, "tis"))
    }
    folders = {planned.plan.title: planned.folder for planned in runs}
    assert all(folders[planned] == folders[maker] for planned, maker in shared.items())
    assert len(set(folders.values())) == len(runs) - len(shared)
    assert [planned.record().same_as for planned in runs[:2]] == ["", "plain 0 seed=0"]

    # Log-probs for a correction cost something even where it cannot act.
    by_costs = share_runs(runs_of(lagging("flops")), "flops")
    assert {planned.plan.arm for planned in by_costs if planned.same_as} == {"again"}

    # A run that is there already is kept under its own name, and others share it rather than make it again.
    own = next(planned for planned in runs_of(design) if planned.plan.title == "tis 0 seed=0")
    log_to(own.folder, [0])
    write_json(own.folder / "run.json", {})
    now = {planned.plan.title: planned.same_as for planned in share_runs(runs(runs), design.axis)}
    assert now["tis 0 seed=0"] == "" and now["plain 0 seed=0"] == "tis 0 seed=0" and now["tis 0 seed=1"] != ""


def runs(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs before any was shared."""
    return [
        replace(planned, same_as="", folder=planned.folder.parents[1] / overridden(planned) / planned.folder.name)
        for planned in runs
    ]


def overridden(planned: PlannedRun) -> str:
    return run_name("plain", planned.plan.overrides)


@pytest.mark.extended
def test_a_folder_that_holds_another_run_is_refused_before_anything_starts(
    runs_of: Callable, tmp_path: Path, tiny_base: Path
) -> None:
    words = (*WORLD, "budget.amount=1", "evaluation=brief")
    (planned,) = runs_of(None, *words)
    config = compose_config([*words, f"runs_dir={tmp_path}", "convention.std_ddof=1"])
    assert start(config, planned.folder.parent.name, {}, ["test"]) == planned.folder
    with pytest.raises(ValueError, match=r"(?s)no run was started.*run seed=0: .*scale\.ddof: 1 there, 0 now"):
        runs_of(None, *words, "seed=0,1")


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_a_sweep_for_other_machines_needs_no_gpu_where_it_starts(
    tmp_path: Path, launcher: str, capfd: pytest.CaptureFixture
) -> None:
    words = (*WORLD, "device=cuda:99", f"runs_dir={tmp_path}", "hydra.sweeper.dry_run=true")
    multirun(*words, f"hydra/launcher={launcher}")
    assert "1 runs; none is started" in capfd.readouterr().err
    with pytest.raises(SystemExit, match=r"device=cuda:99, but torch sees \d+ CUDA devices"):
        multirun(*words)


@pytest.mark.extended
def test_a_run_that_found_a_gpu_on_its_node_goes_on_from_a_machine_without(
    runs_of: Callable, tmp_path: Path, tiny_base: Path
) -> None:
    words = (*WORLD, "budget.amount=1", "evaluation=brief")  # and device=auto
    (planned,) = runs_of(None, *words)
    start(compose_config([*words, f"runs_dir={tmp_path}"]), planned.folder.parent.name, {}, ["test"])
    described = json.loads((planned.folder / "run.json").read_text())
    described["identity"]["device"] = "cuda" if described["identity"]["device"] == "cpu" else "cpu"
    write_json(
        planned.folder / "run.json", with_checksum({key: described[key] for key in described if key != CHECKSUM})
    )
    with pytest.raises(ValueError, match=r"holds a run with another configuration by its run\.json \(device: "):
        runs_of(None, *words)
    with planned_elsewhere(True):
        assert runs_of(None, *words)[0].folder == planned.folder
        with pytest.raises(ValueError, match=r"scale\.ddof: 0 there, 1 now"):
            changed = compose_config([*words, f"runs_dir={tmp_path}", "convention.std_ddof=1"])
            check_folder(planned.folder, run_identity(changed, device_kind("auto")))


@pytest.mark.extended
def test_a_run_of_another_base_is_what_it_would_be_alone(runs_of: Callable) -> None:
    """Bases are composed once, as seeds are; each run must still have its own."""
    words = ("world=sums", "tracking=none", "truncation=score,mask_after")
    together = runs_of(None, *words, "model.base=0,2,1", "seed=3,4")
    assert len(together) == 12 and {planned.run.model.base for planned in together} == {0, 1, 2}
    for base in (0, 2):
        for alone in runs_of(None, *words, f"model.base={base}", "seed=4"):
            (same,) = (
                planned for planned in together
                if (planned.run.model.base, planned.run.seed, planned.run.truncation) == (base, 4, alone.run.truncation)
            )  # fmt: skip
            assert (same.folder, replace(same.run, label=alone.run.label)) == (alone.folder, alone.run)


def test_a_value_that_follows_the_seed_follows_each_run(runs_of: Callable) -> None:
    """Runs of one composition share its values, but for those that refer to what tells the runs apart."""
    runs = runs_of(None, "world=sums", "task.seed=${seed}", "seed=0,1,2")
    assert [planned.run.task.seed for planned in runs] == [0, 1, 2]


@pytest.mark.parametrize("sweeper", ["runs", "cells"], ids=["today", "the name before"])
def test_a_dry_run_lists_the_runs_and_touches_nothing(
    sweeper: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    runs = tmp_path / "runs"
    words = (*WORLD, f"hydra/sweeper={sweeper}", "truncation=score,mask_after", "seed=0,1", f"runs_dir={runs}")
    multirun(*words, "hydra.sweeper.dry_run=true")
    said = capfd.readouterr().err
    assert "4 runs; none is started" in said and said.count("new ") == 4 and "truncation=mask_after seed=1" in said
    assert not runs.exists()


@pytest.mark.extended
def test_a_run_that_was_started_by_hand_is_a_run_that_is_finished(
    tmp_path: Path, tiny_base: Path, capfd: pytest.CaptureFixture
) -> None:
    words = [*WORLD, "budget.amount=1", "evaluation=brief", f"runs_dir={tmp_path}"]
    folder = start(
        compose_config([*words, "correction=none"]), run_name("plain", [*words, "correction=none"]), {}, ["test"]
    )
    multirun(*WORLD, *words, "seed=0", "correction=none")
    said = capfd.readouterr().err
    assert "all 1 runs are finished" in said and "run seed=0 (a run on its own)" in said
    multirun(*WORLD, *words, "seed=0", "correction=none,tis_token")
    out, said = capfd.readouterr()
    assert "correction=tis_token seed=0 is the same run as correction=none seed=0: it runs once" in said
    assert "all 2 runs are finished" in said
    assert "minus correction=none  1  +0.000" in out and out.endswith("Settings in which the arms differ: 0.\n\n")
    assert not (folder / "output.log").exists(), "no process was started"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "base,arm",
    [
        (["updates=one"], ["surrogate=ppo_higher"]),
        ([], ["denominator=survivors"]),
        ([], ["correction=tis_token"]),
        ([], ["old_policy=sampler"]),
        (["baseline=batch_mean", "scale=batch_std_tokens"], ["baseline=none"]),
        (["updates=one"], ["surrogate=reinforce"]),  # the reason stands with the control
    ],
    ids=lambda words: words[0] if words else "plain",
)
def test_an_arm_that_cannot_differ_from_its_control_is_refused(runs_of: Callable, base: list, arm: list) -> None:
    design = flat_design(base=base, arm=arm)
    with pytest.raises(IncompatibleRun, match="arm arm cannot differ from plain") as refused:
        refuse_no_op_arms(design, runs_of(design))
    assert f"{arm[0].split('=')[0]}=" in str(refused.value) and "Remedy" in str(refused.value)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "base,arm",
    [
        (["updates=four"], ["surrogate=ppo_higher"]),
        (["updates=one"], ["surrogate=reinforce", "kl=k3_loss"]),
        ([], ["denominator=survivors", "truncation=mask_after"]),
        (["truncation=mask_after"], ["denominator=survivors"]),
        (["truncation=mask_after"], ["truncation=score"]),  # what the control does is what the arm lacks
        ([], ["correction=tis_token", "sampler_precision=bf16"]),
        ([], ["group_filter=drop", "denominator=survivors"]),
        ([], ["optimizer.learning_rate=2e-3"]),
        ([], ["updates=one"]),
    ],
    ids=lambda words: words[0] if words else "plain",
)
def test_an_arm_that_can_differ_is_accepted(runs_of: Callable, base: list, arm: list) -> None:
    design = flat_design(base=base, arm=arm)
    refuse_no_op_arms(design, runs_of(design))


IDLE = {
    "clip_cannot_act": (["updates=one"], "surrogate=ppo_higher"),
    "baseline_is_recentred": (["scale=batch_std_tokens", "baseline=none"], "baseline=batch_mean"),
    "importance_cannot_act": (["updates=one"], "importance=sequence"),
    "importance_is_ignored": (["updates=one", "surrogate=reinforce"], "importance=sequence"),
    "old_policy_is_ignored": (["updates=one", "surrogate=reinforce"], "old_policy=sampler"),
    "sampler_is_the_old_policy": ([], "old_policy=sampler"),
    "survivors_are_everyone": ([], "denominator=survivors"),
    "return_to_go_without_token_penalty": (["baseline=none", "scale=none"], "baseline=return_to_go"),
    "nothing_to_correct": ([], "correction=tis_token"),
    "nothing_to_reject": ([], "rejection=token_k3"),
    "share_is_one": (["group_filter=drop", "scale=none"], "scale=informative_share"),
    "shaping_is_not_read": (["baseline=pass_at_k", "scale=none"], "reward_shaping=kimi_length"),
    "kl_is_not_read": (["baseline=pass_at_k", "scale=none"], "kl=k1_reward"),
    "reference_is_not_read": ([], "reference=ema"),
    "rank_is_not_read": ([], "pass_rate=difficulty"),
}


# Every rule is tried on gradients in test_compat.py; these two also on what the loop does around the loss.
TRAINED = ("clip_cannot_act", "nothing_to_correct")


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=rule.name, marks=() if rule.name in TRAINED else pytest.mark.extended)
        for rule in WARNINGS
        if rule.no_op
    ],
)
def test_what_a_rule_calls_idle_is_its_first_axis_and_trains_the_same_weights(
    rule, tmp_path: Path, tiny_base: Path
) -> None:
    base, word = IDLE[rule.name]
    assert rule.axes[0] in (*AXES, "pass_rate") and word.startswith(f"{rule.axes[0]}=")
    fast = ["optimizer.learning_rate=1e-3", "optimizer.warmup_updates=1", "budget.amount=2", "evaluation=brief"]
    fast += ["optimizer.eps=1e-4"]  # below it Adam takes a whole step on gradients that are rounding
    weights = []
    for name, words in {"off": base, "on": [*base, word]}.items():
        config = compose_config([*WORLD, *words, *fast, f"runs_dir={tmp_path}"])
        assert rule.broken_when(to_run(config)) or name == "off"
        folder = start(config, name, {}, ["test"])
        weights.append(load_file(folder / "checkpoints" / "step=000002" / "model.safetensors"))
    untrained = load_file(tiny_base / "model.safetensors")
    assert max((weights[0][name] - untrained[name]).abs().max() for name in untrained) > 1e-3, "it trained"
    for name in untrained:
        assert_close(weights[1][name], weights[0][name], rtol=0, atol=2e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words,swept,values",
    [
        (["recipe=grpo", "kl.kl_coef=0.1", "tracking=none"], "truncation", ["score", "mask_after"]),
        (["recipe=dr_grpo", "device=cpu", "keep_checkpoints=1"], "seed", ["0"]),
        (["budget=sampled_tokens", "budget.amount=1e3"], "seed", ["0"]),
        (["budget=sampled_tokens"], "budget.amount", ["1e3", "2e3"]),
        (["model=hf", "model.path='MODEL'"], "budget.amount", ["1", "2"]),
        (["evaluation.max_tokens=${engine.max_tokens}"], "engine.max_tokens", ["20", "24"]),
    ],
    ids=["options", "volatile", "number", "numbers", "quoted", "interpolated"],
)
def test_a_run_is_the_run_that_its_words_give_by_hand(
    words: list[str], swept: str, values: list[str], runs_of: Callable, tiny_base: Path, tmp_path: Path
) -> None:
    """The run's own process composes what was checked, and finds what was run by hand in the same folder."""
    (tmp_path / "a model").symlink_to(tiny_base)
    words = [*WORLD, *(word.replace("MODEL", str(tmp_path / "a model")) for word in words)]
    typed = [*words, f"{swept}={','.join(values)}"]
    name = sweep_name(None, typed)
    for planned, value in zip(runs_of(None, *typed), values, strict=True):
        run = to_run(compose_config(overrides_for(planned, name)))
        assert run == planned.run and (run.label.sweep, run.label.arm) == (name, planned.plan.arm)
        by_hand = [*words, f"{swept}={value}"]
        recipe = next((word.partition("=")[2] for word in by_hand if word.startswith("recipe=")), "plain")
        assert planned.folder == tmp_path / run_name(recipe, by_hand) / "seed=0"


WORDING = ["Q: {question}", "Q:  {question}", "Q: {question} ", "'Q:' {question}", "Q:\n{question}"]


@pytest.mark.extended
def test_arms_that_differ_in_characters_no_folder_can_have_are_several_runs(runs_of: Callable) -> None:
    """They shared one folder, one of them never ran, and the report called them identical."""
    arms = {f"arm{at}": [f"evaluation.other_wording={_quoted(text)}"] for at, text in enumerate(WORDING)}
    found = share_runs(runs_of(flat_design(**arms), "tracking=none"))
    assert len({planned.folder for planned in found}) == len(WORDING) + 1 and not any(
        planned.same_as for planned in found
    )
    typed = ",".join(map(_quoted, WORDING))
    found = share_runs(runs_of(None, *WORLD, f"evaluation.other_wording={typed}"))
    assert [planned.run.evaluation.other_wording for planned in found] == WORDING
    assert len({planned.folder for planned in found}) == len(WORDING)


def test_two_runs_of_a_sweep_in_one_folder_are_refused(runs_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that differ make that impossible but for a hash that two values share: here one for all."""
    monkeypatch.setattr(planning, "folder_name", lambda plan: "plain")
    with pytest.raises(ValueError, match=r"=8 seed=0: group_size=4 seed=0 has the same folder, .*plain/seed=0"):
        runs_of(None, *WORLD, "group_size=4,8")
    assert len(runs_of(None, *WORLD, "device=cpu,auto", "keep_checkpoints=1,2")) == 4, "one run, by its identity"


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


# ---- recorded


def record(
    root: Path, names: Sequence[str], valid: Sequence[str] | None, fingerprint: str = "f", store: str | None = None
) -> Path:
    """The record of a sweep whose arms are called like their folders."""
    runs = [RunEntry(name, "", 0, f"{name}/seed=0") for name in names]
    reachable = None if valid is None else frozenset(valid)
    tracking = store and {"uri": store, "experiment": "e"}
    return record_sweep(root, "probe", runs, reachable, {"name": "probe"}, fingerprint, ["train"], None, tracking)


def test_the_record_unites_the_parts_of_a_design_and_keeps_its_key(tmp_path: Path) -> None:
    folder = record(tmp_path, ["a", "b"], ["a", "b", "c"], store="sqlite:////x.db")
    key = read_sweep(folder).key
    assert record(tmp_path, ["c", "b"], ["a", "b", "c"]) == folder == sweep_folder(tmp_path, "probe")
    both = read_sweep(folder)
    assert [entry.arm for entry in both.runs] == ["a", "b", "c"] and both.key == key
    assert [entry["fingerprint"] for entry in both.declared] == ["f"]
    assert both.tracking["uri"] == "sqlite:////x.db", "a command without MLflow does not forget where it is shown"
    lists = record(tmp_path, ["d"], None)
    assert [entry.arm for entry in read_sweep(lists).runs] == ["a", "b", "c", "d"], "lists on a command line add up"


def test_a_changed_declaration_is_added_and_drops_the_runs_it_cannot_reach(tmp_path: Path) -> None:
    folder = record(tmp_path, ["a", "b"], ["a", "b"])
    (tmp_path / "b" / "seed=0").mkdir(parents=True)
    (tmp_path / "b" / "seed=0" / "run.json").write_text("{}")
    record(tmp_path, ["b", "c"], ["b", "c"], "g")
    changed = read_sweep(folder)
    assert [entry.arm for entry in changed.runs] == ["b", "c"]
    told = [(entry["fingerprint"], entry["runs_started_before"]) for entry in changed.declared]
    assert told == [("f", 0), ("g", 1)], "one of its runs had been started when it was declared"
    assert all(entry["at"].endswith("Z") for entry in changed.declared)
    record(tmp_path, ["b"], ["b", "c"], "f")
    assert [entry["fingerprint"] for entry in read_sweep(folder).declared] == ["f", "g", "f"], "no history is rewritten"


def test_where_a_sweep_stands(tmp_path: Path) -> None:
    folder = record(tmp_path, ["a", "b"], None)
    one, other = (tmp_path / name / "seed=0" for name in "ab")
    assert sweep_status(folder, read_sweep(folder)) == "KILLED", "no run has been started"
    with RunLog(one) as log:
        assert sweep_status(folder, read_sweep(folder)) == "RUNNING"
        log.mark_done({})
    assert run_states(folder, read_sweep(folder)) == {"a/seed=0": "done", "b/seed=0": "new"}
    with RunLog(other) as log:
        log.mark_error(KeyboardInterrupt())
    assert sweep_status(folder, read_sweep(folder)) == "KILLED", "a run that was interrupted has not failed"
    (other / STOP).touch()
    assert sweep_status(folder, read_sweep(folder)) == "KILLED", "nor has one that was stopped"
    with RunLog(other) as log:
        log.mark_error(RuntimeError("x"))
    assert sweep_status(folder, read_sweep(folder)) == "FAILED"
    (other / "DONE").write_text("{}")
    assert sweep_status(folder, read_sweep(folder)) == "FINISHED"


def test_a_run_with_nothing_left_to_train_on_has_ended_and_is_not_started_again(tmp_path: Path) -> None:
    folder = record(tmp_path, ["a", "b"], None)
    one, other = (tmp_path / name / "seed=0" for name in "ab")
    for place, error in ((one, Exhausted("6 steps left no token")), (other, ValueError("Exhausted by something else"))):
        with RunLog(place) as log:
            log.mark_error(error)
    assert (has_ended(one), has_ended(other), was_exhausted(other)) == (True, False, False)
    assert sweep_status(folder, read_sweep(folder)) == "FAILED", "of the other one"
    with RunLog(other) as log:
        log.mark_done({})
    assert has_ended(other) and sweep_status(folder, read_sweep(folder)) == "FINISHED"
    display = ProgressDisplay("probe", 1, 0, Terminal(file=io.StringIO()))
    job = Job("dry", ("no_such_key=1",), one, "steps", 1.0, 1)
    assert run_jobs([job], LocalBackend(1, []), 30.0, display) == [None] and not (one / "output.log").exists()
    with RunLog(one) as log:
        log.begin()
    assert not has_ended(one), "an attempt that somebody started by hand goes on"


def test_a_run_knows_its_sweep_and_a_missing_sweep_is_said(tmp_path: Path) -> None:
    folder = record(tmp_path, ["a"], None)
    assert (tmp_path / "a" / "seed=0" / sweep_of(tmp_path / "a" / "seed=0", str(tmp_path), "probe")).resolve() == folder
    assert sweep_of(tmp_path / "a", str(tmp_path), "") is None
    with pytest.raises(ValueError, match=r"no sweep 'prob' in .*; there are: probe"):
        read_sweep(sweep_folder(tmp_path, "prob"))
    with pytest.raises(ValueError, match="none was run there yet"):
        read_sweep(sweep_folder(tmp_path / "elsewhere", "prob"))


# ---- shown, and shared out


def log_to(folder: Path, steps: Sequence[int]) -> None:
    """Steps as a run logs them: a budget of steps, a reward and a speed."""
    with RunLog(folder) as log:
        for step in steps:
            values = {"budget/steps": step, "reward/mean": 0.5, "rollout/truncated": 0.25}
            log.write_step(step, values, {"time/tokens_per_second": 1234.5})


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards that look whenever they are asked."""
    monkeypatch.setattr("grpo_lab.sweeps.progress_display._LOOK_SECONDS", 0.0)


def test_a_log_gets_a_line_for_the_sweep_now_and_then_and_one_for_each_run_that_ends(
    eager: None, tmp_path: Path
) -> None:
    written = io.StringIO()
    first, second = (WatchedRun(f"[arm] seed={seed}", tmp_path / str(seed), "steps", 4.0) for seed in (0, 1))
    with ProgressDisplay("probe", 5, 1, Terminal(file=written, width=40)) as display:
        display.start(first)
        display.start(second)
        log_to(tmp_path / "0", range(3))
        display.refresh()
        display.refresh()  # too soon for another line
        assert display.summary().startswith("1 of 5 done, 2 running, 2 waiting, ")
        log_to(tmp_path / "0", range(3, 5))
        display.end(first, None)
        display.end(second, "killed by SIGKILL (see output.log)")
    begun, summary, done, failed = written.getvalue().splitlines()
    assert begun == "probe: 5 runs, 1 finished before" and summary.startswith("1 of 5 done, 2 running")
    assert done.startswith("done   [arm] seed=0: step    4  reward 0.500") and done.endswith("(0m00s)")
    assert failed == "failed [arm] seed=1: killed by SIGKILL (see output.log)  (0m00s)"
    assert display.summary().startswith("2 of 5 done, 2 waiting, 1 failed, ")


def test_a_terminal_shows_running_runs_in_place_and_keeps_lines_of_those_that_ended(
    eager: None, tmp_path: Path
) -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=80, force_terminal=True, legacy_windows=False)
    planned = WatchedRun("mask_after constant seed=0", tmp_path, "steps", 4.0)
    with ProgressDisplay("probe", 2, 0, console) as display:
        display.start(planned)
        log_to(tmp_path, range(3))
        display.refresh()
        display.live.refresh()
        shown = written.getvalue()
        display.end(planned, None)
    assert "0 of 2 done, 1 running, 1 waiting, " in shown and "━" in shown
    assert "mask_after constant seed=0" in shown and "step    2  reward 0.500" in shown
    assert "done   mask_after constant seed=0: step    2" in written.getvalue()[len(shown) :]


def test_a_narrow_terminal_has_one_line_for_each_run(eager: None, tmp_path: Path) -> None:
    planned = WatchedRun("mask_after constant seed=0", tmp_path, "steps", 4.0)
    console = Terminal(file=io.StringIO(), width=30)
    display = ProgressDisplay("probe", 2, 0, console)
    display.start(planned)
    log_to(tmp_path, range(3))
    display.refresh()
    console.file = written = io.StringIO()
    console.print(display._picture())
    assert len(written.getvalue().splitlines()) == 2, "one for the sweep and one for the run"


def test_time_left_follows_the_share_of_all_budgets(eager: None, tmp_path: Path) -> None:
    display = ProgressDisplay("probe", 4, 1, Terminal(file=io.StringIO()))
    planned = WatchedRun("a", tmp_path, "steps", 4.0)
    display.start(planned)
    assert "left" not in display.summary(), "nothing to go by yet"
    log_to(tmp_path, range(3))
    display.refresh()
    display._began -= 60  # half a run took a minute, and two and a half are left
    assert display.summary().endswith("5m00s left")


@pytest.mark.parametrize("saved", [5, 3])
def test_what_a_resumed_run_had_done_before_is_no_speed_of_this_sweep(eager: None, tmp_path: Path, saved: int) -> None:
    """It goes on from its checkpoint, and steps behind that are computed again."""
    log_to(tmp_path, range(6))
    (tmp_path / "checkpoints" / f"step={saved:06d}").mkdir(parents=True)
    display = ProgressDisplay("probe", 1, 0, Terminal(file=io.StringIO()))
    display.start(WatchedRun("a", tmp_path, "steps", 10.0))
    display.refresh()
    with RunLog(tmp_path) as log:
        log.rewind(len(b"".join((tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[: saved + 1])))
    log_to(tmp_path, [saved + 1])
    display.refresh()
    display._began -= 60  # one step took a minute
    assert display.summary().endswith(f"{9 - saved}m00s left")


def test_runs_that_another_sweep_finished_or_a_user_stopped_are_no_work_of_this_one(
    eager: None, tmp_path: Path
) -> None:
    written = io.StringIO()
    display = ProgressDisplay("probe", 4, 0, Terminal(file=written))
    runs = [WatchedRun(name, tmp_path / name, "steps", 10.0) for name in "abcd"]
    log_to(tmp_path / "a", range(11))
    display.end(runs[0], None)  # it was never started here
    for planned in runs[1:]:
        display.start(planned)
    log_to(tmp_path / "b", range(6))
    display.refresh()
    display._began -= 60  # half a run took a minute, and two and a half are left
    assert display.summary() == "1 of 4 done, 3 running, 5m00s left"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / STOP).touch()
    display.end(runs[2], "stopped by grpo-lab stop: no step was trained yet")
    assert display.summary() == "1 of 4 done, 2 running, 1 stopped, 3m00s left" and display.failed == 0
    assert written.getvalue().splitlines()[-1].startswith("stopped c: stopped by grpo-lab stop: ")


def test_a_run_shows_what_takes_it_long(eager: None, tmp_path: Path) -> None:
    note, planned = (
        "step 0: evaluating, heldout: question 3 of 8, 9 of 24 in all, 0m20s left",
        WatchedRun("a", tmp_path, "steps", 10.0),
    )
    display = ProgressDisplay("probe", 1, 0, Terminal(file=io.StringIO()))
    display.start(planned)
    assert planned.line == "starting"
    (tmp_path / ACTIVITY).write_text(note)
    display.refresh()
    assert planned.line == note
    log_to(tmp_path, range(2))
    display.refresh()
    assert planned.line.startswith("step    1  reward 0.500") and planned.line.endswith(f"  {note}")
    display.end(planned, None)
    assert not planned.activity, "it has ended"


def test_a_damaged_log_of_one_run_does_not_end_the_sweep(eager: None, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    planned = WatchedRun("a", tmp_path, "steps", 10.0)
    display = ProgressDisplay("probe", 1, 0, Terminal(file=io.StringIO()))
    display.start(planned)
    display.refresh()
    display.end(planned, "metrics.jsonl has a line that is not JSON")
    assert display.failed == 1


def test_slots_follow_the_machine_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots(3, 1, False) == (3, [])
    assert slots(None, 10**6, False) == (1, []), "a run with more threads than cores still runs"
    monkeypatch.setattr("grpo_lab.sweeps.local.usable_cores", lambda: 8)
    assert slots(None, 3, False) == (2, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert slots(None, 1, True) == (2, ["3", "5"]) and slots(6, 1, True) == (6, ["3", "5"])
    with pytest.raises(ValueError, match=r"hydra\.launcher\.workers must be at least 1, got 0"):
        LocalRunLauncher(0, 30.0, None).backend("jobs", [], [])


def test_a_container_has_the_cores_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    quota = tmp_path / "cpu.max"
    for written, cores in (("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 64)):
        quota.write_text(written)
        assert usable_cores(quota) == cores
    assert usable_cores(tmp_path / "missing") == 64


def test_a_declaration_changed_after_the_runs_says_so_whatever_the_command_covers(tmp_path: Path) -> None:
    """Else a prediction could be rewritten after the fact and declared with one more seed."""

    def record(seed: int, fingerprint: str, starts: bool = True, commit: str = "a") -> SweepRecord:
        runs = [RunEntry("score", "", seed, f"score/seed={seed}")]
        folder = record_sweep(tmp_path, "probe", runs, None, None, fingerprint, [commit], commit, None, starts)
        return read_sweep(folder)

    record(0, "one")
    write_json(tmp_path / "score" / "seed=0" / "run.json", {})
    late = record(1, "two")
    assert [entry["runs_started_before"] for entry in late.declared] == [0, 1]
    same = record(1, "two", starts=False, commit="b")
    assert (same.commit, same.command) == ("a", ["a"]), "a command that starts nothing made nothing"
    renamed = record_sweep(
        tmp_path, "probe", [RunEntry("score", "", 1, "new/seed=1")], None, None, "two", ["c"], "c", None
    )
    assert [entry.folder for entry in read_sweep(renamed).runs] == ["score/seed=0", "new/seed=1"]
