"""Pilots: tricks that must act, before the first run starts and over the whole sweep, and designs with bases."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from declared_experiments import saved_data
from sweep_processes import multirun

from grpo_lab.analysis.caveats import indistinguishable
from grpo_lab.analysis.effects.manipulation_checks import ManipulationCheck, failed_checks, manipulation_checks
from grpo_lab.analysis.effects.speed import impossible_gains
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.config.design import Design, named_design, read_design, require_known_metrics
from grpo_lab.sweeps.pilot import pilot_runs, pilot_seed
from grpo_lab.sweeps.planned_runs import PlannedRun, compose_runs, plan_runs, sweep_name
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.sweep_record import RunEntry, read_sweep, record_sweep, sweep_folder

WORLD = ["world=tiny", "tracking=none"]
NODE = {
    "name": "acting",
    "question": "Does it?",
    "prediction": "It does.",
    "control": "plain",
    "primary": "eval/heldout/accuracy",
    "axis": "steps",
    "base": [*WORLD, "evaluation=dense", "problems_per_step=4", "budget.amount=4"],
    "arms": {"plain": [], "higher": ["surrogate=ppo_higher"], "mask": ["truncation=mask_after"]},
    "seeds": 2,
    "bases": 2,
    "requires": {"higher": {"touched/surrogate": 0.005}, "mask": {"active_fraction/truncation": 0.05}},
    "predictions": [{"arm": "mask", "metric": "rollout/truncated", "direction": "above"}],
    "claims": [{"says": "It does.", "source": "a paper", "prediction": 0, "direction": "above"}],
}


def declare(**changes: Any) -> Design:
    """NODE with some entries replaced; None leaves one out."""
    return read_design({**NODE, **changes})


# ---- declared


def test_seeds_are_nested_in_bases_and_cycle_through_them() -> None:
    design = declare(bases=4, seeds=2)
    assert (design.bases, design.seeds) == ((0, 1, 2, 3), tuple(range(8)))
    assert [design.base_of(seed) for seed in design.seeds] == [0, 1, 2, 3, 0, 1, 2, 3]
    named = declare(bases=[5, 2], seeds=[10, 11, 13, 12])
    assert [named.base_of(seed) for seed in named.seeds] == [5, 2, 5, 2]
    assert named.base_of(14) == 5 and named.base_of(15) == 2, "a seed that is not declared, by its own number"
    assert declare(bases=None, seeds=[0, 1]).base_of(0) is None


def test_every_run_of_a_seed_starts_from_its_base_and_bases_alternate() -> None:
    plans = plan_runs(declare(), [])
    assert [(plan.seed, plan.arm) for plan in plans[:4]] == [(0, "plain"), (0, "higher"), (0, "mask"), (1, "plain")]
    assert all(f"model.base={plan.seed % 2}" in plan.overrides for plan in plans) and len(plans) == 12
    assert not any(
        "model.base" in word for plan in plan_runs(declare(bases=None, seeds=[0]), []) for word in plan.overrides
    )
    (typed,) = {word for plan in plan_runs(declare(), ["model.base=7"]) for word in plan.overrides if "model" in word}
    assert typed == "model.base=7", "the command line wins"


def test_a_part_chooses_bases() -> None:
    design = declare(bases=4, parts={"one": {"bases": [2]}, "first": {"bases": [1], "seeds": [0, 1, 5]}})
    assert replace(design, part="one").chosen().seeds == (2, 6)
    assert replace(design, part="first").chosen().seeds == (1, 5)
    assert design.chosen().bases == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bases": 0}, "design.bases must be how many"),
        ({"bases": True}, "design.bases must be how many"),
        ({"bases": [0, 0]}, "design.bases must be how many"),
        ({"seeds": [0, 1, 2]}, "design.seeds has 3 seeds for 2 bases"),
        ({"seeds": 0}, "design.seeds is missing"),
        ({"seeds": -1}, "design.seeds must be how many for each base"),
        ({"bases": None}, "design.seeds must be a list of different whole numbers, got 2"),
        (
            {"arms": {"plain": [], "x": ["model.base=3"]}, "requires": None, "predictions": None, "claims": None},
            "design.bases already chooses",
        ),
        ({"parts": {"p": {"bases": [2]}}}, "design.parts.p.bases: there is no 2"),
        ({"parts": {"p": {"bases": [1], "seeds": [0]}}}, "design.parts.p: none of its seeds has one of its bases"),
        ({"requires": {"plain": {"active_fraction/kl": 0.1}}}, "design.requires: there is no 'plain'"),
        ({"requires": {"mask": 0.1}}, "must map arms to metrics with numbers above 0"),
        ({"requires": {"mask": {"active_fraction/kl": 0}}}, "must map arms to metrics with numbers above 0"),
        ({"requires": ["mask"]}, "must map arms to metrics with numbers above 0"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        declare(**changes)
    assert said in str(refused.value)


def test_a_requirement_names_a_metric_that_runs_log() -> None:
    require_known_metrics(declare())
    with pytest.raises(ValueError, match="no run has the metric 'active_fraction/surrogat/x'"):
        require_known_metrics(declare(requires={"mask": {"touched/surrogat/x": 0.1}}))


def test_the_fingerprint_holds_bases_and_requirements() -> None:
    told = declare().fingerprint()
    changes: list[dict[str, Any]] = [
        {"bases": [0, 2]},
        {"requires": None},
        {"requires": {"mask": {"active_fraction/truncation": 0.1}}},
    ]
    assert len({told, *(declare(**change).fingerprint() for change in changes)}) == 4
    renamed = {"higher": {"train/clip_fraction": 0.005}, "mask": {"active_fraction/truncation": 0.05}}
    assert declare(requires=renamed).fingerprint() == told, "the same metric under today's name"


# ---- composed


@pytest.mark.extended
def test_a_pilot_is_short_of_one_base_and_of_a_seed_that_the_design_does_not_use(
    compose: Callable, tmp_path: Path
) -> None:
    design = declare(seeds=[4, 5, 8, 7], parts={"mask": {"arms": ["mask"], "seeds": [5]}})
    assert pilot_seed(design) == 10 and design.base_of(10) == 0
    runs = tmp_path / "my runs"

    def pilots(design: Design, *words: str, share: float = 0.25) -> list[PlannedRun]:
        typed = [*words, f"runs_dir='{runs}'"]
        planned_runs = compose_runs(plan_runs(design, typed), sweep_name(design, typed), compose)
        assert pilot_runs(replace(design, requires={}), typed, "acting", planned_runs, compose, share) == []
        return pilot_runs(design, typed, "acting", planned_runs, compose, share)

    whole = pilots(design, "seed=4")
    assert [(planned.plan.arm, planned.plan.seed) for planned in whole] == [("plain", 10), ("higher", 10), ("mask", 10)]
    for planned in whole:
        run = planned.run
        assert (run.budget.amount, run.evaluation.every, run.model.base) == (1, 50, 0), "every is the tiny world's"
        assert run.evaluation.samples == 1 and planned.folder.is_relative_to(runs / "pilots"), "evaluated briefly"
    part = pilots(replace(design, part="mask"), share=0.5)
    assert [(planned.plan.arm, planned.run.budget.amount) for planned in part] == [("plain", 2), ("mask", 2)]
    with pytest.raises(ValueError, match=r"pilot_share must be above 0 and at most 1, got 1\.5"):
        pilot_runs(design, [], "acting", part, compose, 1.5)


# ---- run


def sweep(folder: Path, *words: str) -> None:
    """`python -m grpo_lab.train +experiments=acting` in this process; its runs have processes of their own."""
    multirun("+experiments=acting", f"runs_dir='{folder / 'my runs'}'", *words)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with NODE as an experiment, of one seed."""
    path = tmp_path / "conf" / "experiments" / "acting.yaml"
    path.parent.mkdir(parents=True)
    node = {
        **NODE,
        "bases": [0],
        "seeds": 1,
        "base": [*WORLD, "evaluation=brief", "problems_per_step=4", "budget.amount=2"],
    }
    write_json(path.with_suffix(".json"), {"design": node, "hydra": {"mode": "MULTIRUN"}}, sort=False)
    path.write_text("# @package _global_\n" + path.with_suffix(".json").read_text())
    path.with_suffix(".json").unlink()
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path / "conf"))
    return tmp_path


def finished(folder: Path) -> list[str]:
    return sorted(path.parents[1].name for path in folder.glob("*/seed=*/DONE"))


@pytest.mark.extended
def test_a_sweep_runs_the_arm_that_acts_and_not_the_one_that_could_not(
    experiment: Path, tiny_base: Path, capfd: pytest.CaptureFixture
) -> None:
    """At this small a rate ppo_higher clips nothing, as its control; a mask leaves out what is truncated."""
    runs = experiment / "my runs"
    sweep(experiment, "hydra.sweeper.pilot_share=0.5")
    said = capfd.readouterr().err
    assert (
        "manipulation check failed higher: train/clip_fraction 0 beside 0 in plain, difference +0; required 0.005"
        in said
    )
    assert (
        "passed                    mask: active_fraction/truncation" in said and "hydra.sweeper.run_no_ops=true" in said
    )
    assert "1 of 3 runs are left out" in said and "acting: 2 of 2 done" in said
    (pilots,) = (runs / "pilots").iterdir()
    assert f"acting: the pilot ran in {pilots}\n" in said
    assert (
        len(finished(pilots)) == 3 and len(finished(runs)) == 2 and not any("higher" in name for name in finished(runs))
    )
    record = read_sweep(sweep_folder(runs, "acting"))
    assert [(entry["arm"], ManipulationCheck(**entry).passed) for entry in record.pilot] == [
        ("higher", False),
        ("mask", True),
    ]
    assert {(entry.arm, entry.seed) for entry in record.runs} == {("plain", 0), ("mask", 0)}
    assert {entry.seed for entry in read_sweep(sweep_folder(pilots, "acting")).runs} == {1}

    # The verdict's reason: the pilot's numbers for the arm that was not run; the sweep's own for the other.
    data = load_sweep(runs, "acting")
    assert list(failed_checks(data)) == [("", "higher")] and failed_checks(data)["", "higher"].endswith("in the pilot")
    assert [check.arm for check in manipulation_checks(data)] == ["mask"] and set(data.runs["base"]) == {0}
    folder = runs / record.runs[0].folder
    described = json.loads((folder / "run.json").read_text())
    assert described["tags"] == {"sweep": "acting", "arm": "plain", "base": 0}
    assert (folder / described["sweep_folder"]).resolve() == sweep_folder(runs, "acting").resolve()
    save_data(data, experiment / "data")
    saved = load_data(experiment / "data", "acting")
    assert failed_checks(saved) == failed_checks(data) and set(saved.runs["base"]) == {0}

    # Again: the pilot is not repeated, and whoever wants the inert arm gets it, measured and still inert.
    before = {path: path.stat().st_mtime_ns for path in pilots.rglob("DONE")}
    sweep(experiment, "hydra.sweeper.pilot_share=0.5", "hydra.sweeper.run_no_ops=true")
    assert {path: path.stat().st_mtime_ns for path in pilots.rglob("DONE")} == before and len(finished(runs)) == 3
    said = capfd.readouterr().err
    assert (
        "manipulation check failed: higher: train/clip_fraction 0 beside 0 in plain" in said and "not run" not in said
    )
    data = load_sweep(runs, "acting")
    assert not failed_checks(data)["", "higher"].endswith("in the pilot")
    assert indistinguishable(data) == [
        "Identical: the same numbers at every step in higher as plain (1 of 1 runs); differences between them are "
        "not a trick's effect."
    ]


@pytest.mark.extended
def test_a_gain_for_which_the_control_leaves_no_headroom_is_refused_by_the_pilot(
    experiment: Path, tiny_base: Path, capfd: pytest.CaptureFixture
) -> None:
    """A margin of 0.99 above any control; the verdict of a recorded sweep keeps its word."""
    path = experiment / "conf" / "experiments" / "acting.yaml"
    impossible = {"arm": "mask", "metric": "eval/heldout/accuracy", "direction": "above", "margin": 0.99}
    node = yaml.safe_load(path.read_text())
    node["design"] |= {"predictions": [impossible], "claims": []}
    path.write_text("# @package _global_\n" + yaml.safe_dump(node))
    with pytest.raises(SystemExit) as ended:
        sweep(experiment, "hydra.sweeper.pilot_share=0.5")
    said = f"{ended.value} {capfd.readouterr().err}"
    assert "no headroom for a gain (mask above plain on eval/heldout/accuracy: no headroom: the control ends at" in said
    assert not finished(experiment / "my runs")
    design = declare(predictions=[impossible], claims=[])
    (pilots,) = (experiment / "my runs" / "pilots").iterdir()
    finals = final_values(load_sweep(pilots, "acting"))
    assert len(impossible_gains(design, finals)) == 1
    possible = declare(predictions=[{**impossible, "margin": 0.01}], claims=[])
    assert impossible_gains(possible, finals) == [] == impossible_gains(declare(), finals)


@pytest.mark.extended
def test_a_dry_run_lists_the_pilots_and_no_pilot_is_made_where_none_is_wanted(
    experiment: Path, capfd: pytest.CaptureFixture
) -> None:
    sweep(experiment, "hydra.sweeper.dry_run=true")
    said = capfd.readouterr().err
    assert "acting: 3 runs; none is started" in said and "pilots, before the first run, of 0.5 steps" in said
    assert said.count("seed=1 ") == 3 and not (experiment / "my runs").exists()
    sweep(experiment, "hydra.sweeper.dry_run=true", "hydra.sweeper.pilot=false")
    assert "pilots" not in capfd.readouterr().err


# ---- judged


def acting_sweep(root: Path, design: Design, touched: dict[tuple[str, int], Sequence[float] | None]) -> None:
    """A recorded sweep whose runs logged only what they touched; None logged nothing of it."""
    runs = []
    for (arm, seed), values in touched.items():
        folder = root / arm / f"seed={seed}"
        described = {"run_key": f"{arm}{seed}", "commit": None, "dirty": None, "tags": {"base": design.base_of(seed)}}
        write_json(folder / "run.json", described)
        # what is logged before the first step is no mean over training steps
        rows = [{"step": 0, "metrics": {} if values is None else {"active_fraction/truncation": 9.0}}]
        for step, value in enumerate(values or (0.0, 0.0), 1):
            rows.append(
                {
                    "step": step,
                    "metrics": {"reward/mean": seed + step}
                    | ({} if values is None else {"active_fraction/truncation": value}),
                }
            )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "timing.jsonl").write_text(
            "".join(json.dumps({"step": row["step"], "wall": 0, "timing": {}}) + "\n" for row in rows)
        )
        write_json(folder / "DONE", {"no_ops": [], "steps": len(rows) - 1})
        runs.append((arm, seed))
    records = [RunEntry(arm, "", seed, f"{arm}/seed={seed}") for arm, seed in runs]
    node = {
        **NODE,
        "bases": list(design.bases),
        "seeds": list(design.seeds),
        "requires": {arm: dict(asked) for arm, asked in design.requires.items()},
    }
    record_sweep(root, "acting", records, None, node, design.fingerprint(), ["train"], None, None)


def test_an_arm_acts_by_the_mean_over_bases_of_what_sets_it_apart(tmp_path: Path) -> None:
    design = declare(
        requires={"mask": {"active_fraction/truncation": 0.2}, "higher": {"active_fraction/truncation": 0.2}}
    )
    acting_sweep(
        tmp_path,
        design,
        {
            ("plain", 0): [0.1, 0.3], ("plain", 1): [0.2, 0.2], ("plain", 2): [0.2, 0.2],
            ("mask", 0): [0.4, 0.6], ("mask", 1): [0.2, 0.4], ("mask", 2): [0.5, 0.5],
            ("higher", 0): None, ("higher", 1): [0.15, 0.05],
        },
    )  # fmt: skip
    data = load_sweep(tmp_path, "acting", cache=False)
    mask, higher = sorted(manipulation_checks(data), key=lambda check: check.arm != "mask")
    # mask: base 0 has seeds 0 and 2 (apart by 0.3 each), base 1 seed 1 (by 0.1): by 0.2 over bases, not 0.233
    assert (mask.arm_mean, mask.control_mean, mask.runs) == (pytest.approx(0.4), pytest.approx(0.2), 3)
    assert mask.arm_mean - mask.control_mean == pytest.approx(0.2)
    # higher: seeds 0 (nothing logged: nothing touched) and 1 (0.1); less than its control counts as much as more
    assert (higher.arm_mean, higher.control_mean, higher.runs) == (pytest.approx(0.05), pytest.approx(0.2), 2)
    reasons = failed_checks(data)
    assert (
        reasons["", "higher"] == "active_fraction/truncation 0.05 beside 0.2 in plain, difference -0.15; required 0.2"
    )
    points = data.points.drop(columns="active_fraction/truncation")
    reasons = failed_checks(replace(data, points=points))
    assert reasons["", "higher"] == "active_fraction/truncation is not in the data; required 0.2 from plain"


def test_an_arm_that_touches_less_than_its_control_acts_and_one_that_touches_as_much_does_not() -> None:
    def check(arm: float, control: float) -> ManipulationCheck:
        return ManipulationCheck("", "a", "active_fraction/scale", "c", arm, control, 0.05, 1)

    assert check(0.1, 0.2).passed and check(0.2, 0.1).passed and check(0.05, 0.0).passed
    assert not check(0.2, 0.2).passed and not check(0.24, 0.2).passed and not check(float("nan"), 0.2).passed


def test_a_pilot_is_remembered_by_the_record_for_the_places_it_was_made_for(tmp_path: Path) -> None:
    def entry(arm: str, measured: float) -> dict[str, Any]:
        return asdict(ManipulationCheck("", arm, "active_fraction/scale", "plain", measured, 0.0, 0.1, 1))

    def record(*entries: dict[str, Any]) -> list[tuple[str, float]]:
        folder = record_sweep(tmp_path, "acting", [], None, NODE, "f", ["train"], None, None, pilot=entries)
        return [(one["arm"], one["arm_mean"]) for one in read_sweep(folder).pilot]

    assert record(entry("a", 0.1), entry("b", 0.2)) == [("a", 0.1), ("b", 0.2)]
    assert record() == [("a", 0.1), ("b", 0.2)]
    assert record(entry("a", 0.3)) == [("b", 0.2), ("a", 0.3)]


@pytest.mark.extended
def test_saved_sweeps_of_before_have_no_base_and_name_their_duplicates() -> None:
    """25 recorded runs of two sweeps are those of another arm; dapo's clip-higher clipped as much as its control."""
    dapo, staleness = saved_data("dapo"), saved_data("staleness")
    assert set(dapo.runs["base"]) == {-1} and set(dapo.runs["same_as"]) == {""}
    (head, first, *_) = indistinguishable(dapo)
    assert head == "Active fraction not distinguishable from the control's:"
    assert first.startswith("  surrogate: 0.111% in +clip_higher, 0.114% in base, difference -0.004%")
    (line,) = indistinguishable(staleness)
    assert line.count("lag_0 at none (5 of 5 runs)") == 3 and "rollouts, rewards and accuracies" in line
    (same, apart) = indistinguishable(saved_data("mismatch_correction"))
    assert "same numbers at every step in bf16_icepop as bf16_tis_token (5 of 5 runs)" in same
    assert "in fp16_narrow as fp16 (5 of 5 runs)" in apart
    assert named_design("dapo").bases == ()
