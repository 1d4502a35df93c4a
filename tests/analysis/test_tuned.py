"""The rule that chooses a setting for every arm: by hand, and the YAML that it prints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from declared_experiments import saved_data
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis.effects.manipulation_checks import failed_checks, manipulation_checks
from grpo_lab.analysis.effects.tuned import tuned, tuned_text
from grpo_lab.analysis.effects.verdict import verdict_text
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.saved_data import evaluations_alone, lean, load_data, save_data
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.config.design import named_design, read_design
from grpo_lab.tracking.sweep_record import SweepRecord

ROOT = Path(__file__).parents[2]
METRIC = "eval/heldout/accuracy"
NODE: dict[str, Any] = {
    "name": "rates", "question": "which?", "prediction": "one.", "control": "plain", "primary": METRIC,
    "axis": "sampled_tokens", "arms": {"plain": [], "dapo": ["recipe=dapo"]}, "factor": "world and rate",
    "levels": {
        "hard_sums_low": ["world=sums", "optimizer.learning_rate=5.0e-5"],
        "hard_sums_middle": ["world=sums", "optimizer.learning_rate=1.5e-4"],
        "hard_sums_high": ["world=sums", "optimizer.learning_rate=4.5e-4"],
    },
    "bases": [4, 5], "seeds": [940, 941],
}  # fmt: skip
# arm -> accuracies of both seeds at each rate
ENDS = {"plain": ((0.2, 0.4), (0.5, 0.7), (0.6, 0.4)), "dapo": ((0.5, 0.3), (0.3, 0.5), (0.1, 0.1))}


def sweep(ends: dict[str, tuple[tuple[float, float], ...]], **ended: str) -> SweepData:
    """Two runs of every arm at every rate; `ended` maps arm_level_seed to the first line of its error.txt."""
    runs, points = [], []
    for arm, values in ends.items():
        for level, own in zip(NODE["levels"], values):
            for seed, value in zip(NODE["seeds"], own):
                problem = ended.get(f"{arm}_{level}_{seed}", "")
                labels = {"level": level, "arm": arm, "seed": seed}
                run = labels | {"status": "failed" if problem else "done", "problem": problem, "base": seed - 936}
                runs.append(run | {"collapsed": problem.startswith("FloatingPointError")})
                last = 5 if problem else 10
                for step in range(last + 1):
                    row = labels | {"step": step, "budget/sampled_tokens": 1000.0 * step}
                    points.append(row | {METRIC: value if step in (0, last) else math.nan})
    record = SweepRecord("rates", "key", NODE, [], [], None, None, [])
    return SweepData(record, read_design(NODE), pd.DataFrame(runs), pd.DataFrame(points), pd.DataFrame(), "memory")


def chosen(data: SweepData) -> dict[str, str]:
    return {choice.arm: choice.chosen for choice in tuned(data, final_values(data))}


def test_the_highest_mean_is_chosen_and_the_first_of_two_that_are_equal() -> None:
    data = sweep(ENDS)
    plain, dapo = tuned(data, final_values(data))
    assert [one.mean for one in plain.settings.values()] == pytest.approx([0.3, 0.6, 0.5])
    assert (plain.where, plain.chosen, plain.end) == ("hard_sums", "middle", "")
    assert (dapo.chosen, dapo.end) == ("low", "first")  # .4 and .4


@pytest.mark.parametrize("problem", ["FloatingPointError: the loss is nan", "Exhausted: 100 steps in a row"])
def test_a_run_that_stopped_counts_as_zero_whatever_it_had(problem: str) -> None:
    data = sweep(ENDS, plain_hard_sums_middle_940=problem)
    plain, _ = tuned(data, final_values(data))
    assert [one.mean for one in plain.settings.values()] == pytest.approx([0.3, 0.35, 0.5])
    assert (plain.chosen, plain.end, plain.settings["middle"].stopped) == ("high", "last", 1)
    assert "0.350!" in tuned_text(data, final_values(data))


def test_nothing_is_chosen_while_runs_lack() -> None:
    data = sweep(ENDS, dapo_hard_sums_high_941="OSError: the disk is full")
    assert chosen(data) == {"plain": "middle", "dapo": ""}
    assert "open: 5 of 6 runs have ended" in tuned_text(data, final_values(data))


def test_a_verdict_has_the_table_of_chosen_numbers_and_says_once_what_to_know_of_it() -> None:
    rate = "optimizer.learning_rate"
    entry = {
        "level": "", "arm": "dapo", "metric": METRIC, "seeds": [100], "trial": 1,
        "ranges": {rate: {"low": 1e-5, "high": 1e-2, "log": True}},
        "trials": [{"numbers": {rate: at}, "value": value} for at, value in ((1e-4, 0.1), (9e-3, 0.5))],
    }  # fmt: skip
    data = synthetic_sweep(Planted(seeds=(0, 1), steps=8, every=4))
    data = replace(data, record=replace(data.record, tuning=[entry]))
    lines = verdict_text(data, final_values(data)).splitlines()
    table = lines.index("Tuned values; ! marks a number near an end of its range")
    assert lines[table + 1].split()[:2] == ["arm", rate]
    assert " ".join(lines[table + 2].split()) == "dapo 0.009! 0.500 2 of 2"
    known = lines[lines.index("Caveats") :]
    for said in ("Tuned: 2 trials each, on seed 100", f"Tuned near an end of its range: {rate}=0.009 of dapo"):
        assert [said in line for line in lines].count(True) == [said in line for line in known].count(True) == 1


def test_the_arms_can_be_pasted_into_an_experiment() -> None:
    data = sweep(ENDS)
    text = tuned_text(data, final_values(data))
    assert "low, an end of the range: the optimum may lie outside" in text
    assert "at an end of the range: 1 of 2" in text
    table, _, arms = text.partition("arms of hard_sums:\n")
    assert yaml.safe_load(arms) == {
        "plain": ["optimizer.learning_rate=1.5e-4"],
        "dapo": ["recipe=dapo", "optimizer.learning_rate=5.0e-5"],
    }
    assert "0.600*" in table


def test_levels_that_are_no_settings_are_refused() -> None:
    data = sweep(ENDS)
    with pytest.raises(ValueError, match="only one setting"):
        levels = {"sums": ("world=sums",), "length_x": ("world=length",)}
        bad = replace(data, design=replace(data.design, levels=levels))
        tuned(bad, final_values(data))
    with pytest.raises(ValueError, match="declared no levels"):
        tuned(replace(data, design=None), final_values(data))


@pytest.mark.few(1)
@pytest.mark.parametrize(("where", "rates"), [("sums", 4), ("trust_region", 3)])
def test_recipes_have_the_rates_that_the_rule_gives(where: str, rates: int) -> None:
    """What `recipes_sums` and `recipes_trust_region` declare is what the saved runs of `recipe_rates` choose."""
    data = saved_data("recipe_rates")
    declared = named_design(f"recipes_{where}").arms
    chosen = {
        one.arm: one.settings[one.chosen].overrides for one in tuned(data, final_values(data)) if one.where == where
    }
    recipes = {arm: () if arm == "plain" else (f"recipe={arm}",) for arm in chosen}
    # six recipes brought this reward themselves when they ran, and the world of sums has it anyway
    said = "reward=strict_plus_minus"
    declared = {arm: tuple(word for word in words if word != said) for arm, words in declared.items()}
    assert declared == {arm: recipes[arm] + tuple(overrides) for arm, overrides in chosen.items()}
    assert len(declared) == 31 and len(set(chosen.values())) == rates


def test_evaluations_alone_give_the_same_choice(tmp_path: Path) -> None:
    data = synthetic_sweep(Planted(seeds=(0, 1), steps=8, every=4))
    few = evaluations_alone(data)
    assert {name.partition("/")[0] for name in few.points.columns} == {*LABELS, "step", "eval", "budget"}
    assert set(few.points["step"]) == {0, 4, 8} and few.answers.empty and not few.settings
    whole, alone = (final_values(one).values.set_index(LABELS) for one in (data, few))
    assert alone[METRIC].equals(whole[METRIC]) and alone["budget/sampled_tokens"].notna().all()
    paths = save_data(few, tmp_path)
    assert paths[0].stat().st_size < save_data(data, tmp_path / "whole")[0].stat().st_size
    assert load_data(tmp_path, "synthetic").points[METRIC].equals(few.points[METRIC])


@pytest.mark.extended
@pytest.mark.parametrize("name", ["overlong_worlds", "staleness", "clipping"])
def test_a_lean_sweep_has_the_same_verdict(name: str) -> None:
    data = saved_data(name)
    small = lean(data)
    assert len(small.points.columns) < 0.8 * len(data.points.columns) and len(small.points) == len(data.points)
    assert small.answers.empty and small.settings is data.settings
    whole, said = (verdict_text(one, final_values(one)).splitlines() for one in (data, small))
    assert len(said) > 20 and failed_checks(small) == failed_checks(data)
    assert [repr(one) for one in manipulation_checks(small)] == [repr(one) for one in manipulation_checks(data)]
    # The lines on numbers that one run lacks at some step speak of all that was logged.
    assert [line for line in whole if "Missing or NaN" not in line] == [
        line for line in said if "Missing or NaN" not in line
    ]
