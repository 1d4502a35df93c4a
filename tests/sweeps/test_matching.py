"""Matched update norms: what is declared and refused, and arms at the rate at which they move as far as the control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from short_runs import metrics_of
from sweep_processes import WORLD, finished, multirun

from grpo_lab.analysis.effects.verdict import verdict_text
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.matched_norms import MatchedNorm, matched_lines, matched_norms, norms_table
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.config.design import Design, Kind, Match, read_design
from grpo_lab.tracking.sweep_record import read_sweep, sweep_folder

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
    folders = {entry.arm: runs / entry.folder for entry in record.cells}
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
