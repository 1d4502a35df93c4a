"""Matched update norms: what is declared and refused, and arms at the rate at which they move as far as the control."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import open_dict
from short_runs import metrics_of
from sweep_processes import WORLD, finished, multirun

from grpo_lab.analysis.effects.verdict import verdict_text
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.matched_norms import MatchedNorm, matched_lines, matched_norms, norms_table
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.config.design import Design, Kind, Match, read_design
from grpo_lab.distributed.device import device_kind
from grpo_lab.run.identity import run_identity
from grpo_lab.sweeps.matching import plan_matching, record_matching, run_matching
from grpo_lab.sweeps.planned_runs import PlannedRun, plan_runs
from grpo_lab.tracking.checksums import with_checksum
from grpo_lab.tracking.sweep_record import read_sweep, sweep_folder
from grpo_lab.tracking.terminal import Terminal

NODE = {
    "name": "stepping",
    "question": "Does it?",
    "prediction": "It does.",
    "control": "plain",
    "primary": "reward/mean",
    "axis": "steps",
    "base": [*WORLD, "problems_per_step=4", "group_size=4", "budget.amount=4", "optimizer=sgd"],
    "arms": {"plain": [], "smaller": ["optimizer.learning_rate=0.02"]},
    "seeds": [0],
    "predictions": [{"arm": "smaller_matched_norm", "metric": "reward/mean", "direction": "above"}],
    "match": "update_norm",
}


def declare(**changes: Any) -> Design:
    """NODE with some entries replaced; None leaves one out."""
    return read_design({**NODE, **changes})


def test_every_arm_but_the_control_has_a_matched_arm_beside_it() -> None:
    design = declare()
    assert design.match is Match.update_norm and list(design.arms) == ["plain", "smaller", "smaller_matched_norm"]
    assert design.arms["smaller_matched_norm"] == design.arms["smaller"]
    assert [design.plain_of(arm) for arm in design.arms] == ["plain", "smaller", "smaller"]
    assert design.contents("smaller_matched_norm") == {"optimizer.learning_rate=0.02", "matched_norm"}
    plain = declare(match=None, predictions=None)
    assert plain.match is Match.none and list(plain.arms) == ["plain", "smaller"]
    assert plain.plain_of("x_matched_norm") == "x_matched_norm"
    assert plain.fingerprint() != declare(predictions=None).fingerprint()
    assert plain.fingerprint() == declare(match="none", predictions=None).fingerprint()


def test_tricks_of_a_kind_have_matched_arms_too() -> None:
    changes = {"kind": "add_one", "tricks": {"a": ["aggregation=constant"], "b": ["kl=k3_loss"]}}
    design = declare(**changes, arms=None, control=None, predictions=None)
    assert design.kind is Kind.add_one
    assert list(design.arms) == ["base", "+a", "+b", "+a_matched_norm", "+b_matched_norm"]
    assert design.contents("+a_matched_norm") == {"a", "matched_norm"} and design.contents("+a") == {"a"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"match": "gradient"}, "design.match: there is no 'gradient'; choose from none, update_norm"),
        ({"match": "update_norm", "tuning": {"trials": 2}}, "remove one of the two"),
        ({"arms": {"plain": [], "x_matched_norm": ["kl=k3_loss"]}}, "design.arms.x_matched_norm: rename it"),
    ],
)
def test_what_cannot_be_matched_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        declare(**changes)
    assert said in str(refused.value)


def one(**changes: Any) -> MatchedNorm:
    return MatchedNorm(
        **{
            "level": "", "arm": "x_matched_norm", "of": "x", "factor": 2.5, "learning_rate": 2.5e-4, "control": 0.05,
            "before": 0.02, "after": 0.0502, "seed": 3, "key": "k", **changes,
        }
    )  # fmt: skip


def test_the_table_has_the_norms_and_an_arm_that_is_off_is_named() -> None:
    table = norms_table([one(), one(level="high", after=0.06)])
    assert table[1].split() == ["x_matched_norm", "2.500", "0.00025", "0.05", "0.02", "0.0502"]
    assert matched_lines([]) == [] and len(matched_lines([one()])) == 1
    said = matched_lines([one(level="high", after=0.06)])[1]
    assert "Not matched within 2%" in said and "x_matched_norm high is 20% above the control's" in said


def write_pilot(planned: PlannedRun, compose: Callable, norms: Sequence[float]) -> None:
    """Write the folder of a run that ended with a non-finite loss: a pilot counts with the steps it logged."""
    config = compose([word for word in planned.plan.overrides if not word.startswith("seed=")])
    with open_dict(config):
        del config["hydra"]
        config.seed = planned.plan.seed
    planned.folder.mkdir(parents=True)
    described = {"identity": run_identity(config, device_kind(planned.run.device)), "run_key": "planted"}
    (planned.folder / "run.json").write_text(json.dumps(with_checksum(described)))
    lines = [{"step": step, "metrics": {"train/update_norm": norm}} for step, norm in enumerate(norms)]
    (planned.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (planned.folder / "error.txt").write_text("FloatingPointError: planted")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("power", "factors", "off"),
    [
        (1.0, [5.0], 0.0),  # norms in proportion to the rate: the first trial is right
        (0.5, [5.0, 5**1.5, 5**1.75], 5**-0.125 - 1),  # each trial goes half of the way that is left
        (2.0, [5.0], -0.8),  # scaling oversteps, then comes back to the plain arm's rate, which is the nearest
    ],
)
def test_a_trial_is_scaled_from_the_last_and_the_nearest_is_taken(
    power: float, factors: list[float], off: float, compose: Callable, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Pilots whose update norm is a power of their learning rate; the control's is five times the arm's."""
    design, runs = declare(), tmp_path / "runs"
    matching = plan_matching(design, [f"runs_dir={runs}"], "stepping", compose, runs, 0.5)
    launched: list[list[str]] = []

    def launch(title: str, todo: Sequence[PlannedRun], finished: int) -> list[Any]:
        launched.append([planned.plan.title for planned in todo])
        for planned in todo:
            rate = planned.run.optimizer.learning_rate
            norm = 0.5 if planned.plan.arm == "plain" else 0.1 * (rate / 0.02) ** power
            write_pilot(planned, compose, [norm * (step + 0.5) for step in (0, 1)])
        return []

    (found,) = run_matching(Terminal(), matching, launch)
    pilot = "seed=1"
    assert launched == [[f"plain {pilot}", f"smaller {pilot}"], *[[f"smaller_matched_norm {pilot}"]] * len(factors)]
    best = min([1.0, *factors], key=lambda factor: abs(factor**power / 5 - 1))
    assert found.factor == pytest.approx(best, rel=1e-3) and found.learning_rate == pytest.approx(0.02 * best, rel=1e-3)
    assert (found.control, found.before) == pytest.approx((0.5, 0.1)) and found.off == pytest.approx(off, abs=2e-3)
    assert f"{found.factor:.3f}" in capsys.readouterr().err

    record_matching(matching, [found], NODE)
    assert matching.found() == {("", "smaller_matched_norm"): found}
    plans = [matching.settled()(plan) for plan in plan_runs(design, [])]
    rates = {
        plan.arm: [word for word in plan.overrides if word.startswith("optimizer.learning_rate=")] for plan in plans
    }
    assert rates == {
        "plain": [], "smaller": ["optimizer.learning_rate=0.02"],
        "smaller_matched_norm": [f"optimizer.learning_rate={found.learning_rate!r}"],
    }  # fmt: skip
    other = plan_matching(design, [f"runs_dir={runs}"], "stepping", compose, runs, 0.25)
    assert other.found() == {}, "pilots of another length measure anew"


def test_a_pilot_that_makes_no_update_or_does_not_end_starts_no_run(compose: Callable, tmp_path: Path) -> None:
    matching = plan_matching(declare(), [f"runs_dir={tmp_path}"], "stepping", compose, tmp_path, 0.5)
    with pytest.raises(ValueError, match=r"the pilot plain seed=1 failed \(see .*\); the same command tries again"):
        run_matching(Terminal(), matching, lambda *words: [])

    def still(title: str, todo: Sequence[PlannedRun], finished: int) -> list[Any]:
        for planned in todo:
            write_pilot(planned, compose, [])
        return []

    with pytest.raises(ValueError, match=r"plain seed=1 made no update.*raise hydra\.sweeper\.pilot_share"):
        run_matching(Terminal(), matching, still)


def run(folder: Path, *words: str, **changes: Any) -> Any:
    """The sweep of NODE in this process; its runs are short."""
    experiment = folder / "conf" / "experiments" / "stepping.yaml"
    experiment.parent.mkdir(parents=True, exist_ok=True)
    declared = {name: value for name, value in {**NODE, **changes}.items() if value is not None}
    experiment.write_text("# @package _global_\n" + yaml.safe_dump({"design": declared}))
    return multirun("+experiments=stepping", f"runs_dir={folder / 'runs'}", "hydra.sweeper.pilot_share=0.5", *words)


def mean_norm(folder: Path) -> float:
    norms = [row["metrics"]["train/update_norm"] for row in metrics_of(folder) if "train/update_norm" in row["metrics"]]
    return sum(norms) / len(norms)


@pytest.mark.extended
def test_a_sweep_with_matched_arms(tmp_path: Path, tiny_base: Path, monkeypatch, capsys) -> None:
    """A fifth of the rate, steps of a fifth. The matched arm moves as far as the control in its pilot."""
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path / "conf"))
    run(tmp_path, "hydra.sweeper.dry_run=true")
    assert "up to 3 for each of 1 arms with a matched update norm" in capsys.readouterr().err
    run(tmp_path)
    said = capsys.readouterr().err
    runs = tmp_path / "runs"
    record = read_sweep(sweep_folder(runs, "stepping"))
    (found,) = matched_norms(record)
    assert (found.arm, found.of, found.level, found.seed) == ("smaller_matched_norm", "smaller", "", 1)
    assert found.before == pytest.approx(found.control / 5, rel=0.2) and found.factor == pytest.approx(5, rel=0.2)
    assert abs(found.off) <= 0.05 and found.learning_rate == pytest.approx(0.02 * found.factor, rel=1e-3)
    assert "Matched update norms, in the pilot" in said and f"{found.factor:.3f}" in said
    folders = {entry.arm: runs / entry.folder for entry in record.runs}
    assert len(folders) == 3 and f"learning_rate={found.learning_rate!r}" in str(folders["smaller_matched_norm"])
    rates = {arm: metrics_of(folder)[-1]["metrics"]["train/learning_rate"] for arm, folder in folders.items()}
    assert rates["smaller_matched_norm"] / rates["smaller"] == pytest.approx(found.factor, rel=1e-3)
    norms = {arm: mean_norm(folder) for arm, folder in folders.items()}
    assert abs(norms["smaller_matched_norm"] - norms["plain"]) < abs(norms["smaller"] - norms["plain"])
    data = load_sweep(runs, "stepping")
    text = verdict_text(data, final_values(data))
    assert "Matched update norms, in the pilot" in text and "scaled to the control's norm" in text
    save_data(data, tmp_path / "saved")
    assert matched_norms(load_data(tmp_path / "saved", "stepping").record) == [found]
    # The same command again measures nothing, and what is known holds if other code would measure otherwise.
    monkeypatch.setattr("grpo_lab.sweeps.pilot._code", lambda: "other")
    run(tmp_path)
    assert "all 3 runs are finished" in capsys.readouterr().err
    assert not (runs / "pilots" / "other").exists() and finished(runs) == 3
