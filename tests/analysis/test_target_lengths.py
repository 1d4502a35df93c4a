"""Response length against the target length: hand numbers, data of earlier versions, and how the figure looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from declared_experiments import FOLDERS, SAVED, saved_data
from planted_sweeps import Planted, synthetic_sweep, write_synthetic
from short_runs import run_in_process
from test_figures import AXIS, overlapping, sweep, ten_steps, words

from grpo_lab.analysis.build import draw_all
from grpo_lab.analysis.figures import target_lengths
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.answers import COLUMNS, read_answers
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.tables.target_lengths import slope_of


def asked(
    arm: str, seed: int, step: int, wanted: Sequence[int], lengths: Sequence[float], correct: Sequence[int], n: int = 2
) -> pd.DataFrame:
    """Answers to one question for each target length; `lengths` are means over its n samples."""
    fixed = {"level": "", "arm": arm, "seed": seed, "step": step, "suite": "heldout_training", "difficulty": 1, "n": n}
    table = {"question": np.arange(len(wanted)), "wanted": wanted, "correct": correct}
    return pd.DataFrame(table | {"tokens": (n * np.array(lengths)).astype(int)}).assign(**fixed)


def two_arms(seeds: Sequence[int] = (0, 1)) -> SweepData:
    """Arm `a` asks for 10, 20, 20 and 30 tokens and learns to listen, arm `plain` asks for nothing.

    At the start 16 tokens whatever is asked; at the end seed 0 writes 12, 18, 22, 28 and seed 1 writes 10, 20, 20, 30.
    """
    runs = {
        (arm, seed): ten_steps((0.3, 0.6), {"heldout_training": (0.3, 0.5)}) for arm in ("plain", "a") for seed in seeds
    }
    wants, answers = (10, 20, 20, 30), []
    for seed in seeds:
        answers.append(asked("a", seed, 0, wants, [16] * 4, [0, 0, 0, 0]))
        lengths = [(12, 18, 22, 28), (10, 20, 20, 30), (9, 21, 19, 31)][seed]
        answers.append(asked("a", seed, 10, wants, lengths, [0, 1, 2, 2] if seed == 0 else [0, 2, 2, 2]))
        answers += [asked("plain", seed, step, (0,) * 4, [16] * 4, [1] * 4) for step in (0, 10)]
    return sweep(runs, answers)


def draw(data: SweepData) -> Drawn | str:
    """The figure, or why there is none."""
    return target_lengths.draw_target_lengths(data, final_values(data))


def test_target_lengths_by_hand() -> None:
    drawn = draw(two_arms())
    numbers = drawn.numbers.set_index(["arm", "when", "series", "part"]).sort_index()
    assert set(drawn.numbers["arm"]) == {"a"} and set(drawn.numbers["when"]) == {"start", "end"}
    length = numbers.loc[("a", "end", "length")]
    assert length.loc["mean", "x"].tolist() == [10, 20, 30]
    # Seed 0: 12, (18 + 22) / 2, 28; seed 1: 10, 20, 30
    assert length.loc["seed"].groupby("seed")["value"].agg(list).to_dict() == {0: [12, 20, 28], 1: [10, 20, 30]}
    assert length.loc["mean", "value"].tolist() == [11, 20, 29] and (length.loc["mean", "n"] == 2).all()
    assert length.loc["mean"][["low", "high"]].isna().all().all(), "two seeds"
    assert numbers.loc[("a", "start", "length", "mean"), "value"].tolist() == [16, 16, 16]
    # Of two samples: 0, (1 + 2) / 4 and 2 / 2; then 0, 4 / 4 and 2 / 2
    shares = numbers.loc[("a", "end", "accuracy", "seed")].groupby("seed")["value"].agg(list).to_dict()
    assert shares == {0: [0, 75, 100], 1: [0, 100, 100]}
    # Target lengths less their mean: -10, 0, 0, 10. Seed 0: (-10 * 12 + 10 * 28) / 200; seed 1: (-100 + 300) / 200
    slopes = numbers.loc[("a", "end", "slope")]
    assert slopes.loc[["seed"], "value"].tolist() == [0.8, 1.0] and slopes.loc[["mean"], "value"].tolist() == [0.9]
    assert numbers.loc[("a", "start", "slope", "mean"), "value"] == 0
    said = words(drawn.figure)
    assert "a: slope 0.00 at step 0, 0.90 at the end; n = 2, no interval" in said
    assert "too few for an interval" in drawn.bands


def test_three_seeds_have_bars() -> None:
    drawn = draw(two_arms(seeds=(0, 1, 2)))
    first = drawn.numbers[(drawn.numbers["part"] == "mean") & (drawn.numbers["when"] == "end")].iloc[0]
    # 12, 10 and 9: their deviation is 1.5275, and t(.975, 2) = 4.302653
    assert first["high"] - first["value"] == pytest.approx(4.302653 * 1.527525 / 3**0.5, abs=1e-5)
    assert "its 95% t interval" in drawn.bands


def test_the_lines_drawn_are_the_numbers_and_the_diagonal_is_there() -> None:
    drawn = draw(two_arms())
    length, accuracy = drawn.figure.axes
    named = {line.get_label(): line for line in length.lines}
    assert named["a"].get_ydata().tolist() == [11, 20, 29] and named["step 0"].get_ydata().tolist() == [16, 16, 16]
    assert named["as asked"].get_xydata().tolist() == [[10, 10], [30, 30]]
    assert "as asked" not in {line.get_label() for line in accuracy.lines}
    low, high = length.get_xlim()
    assert low < 10 and high > 30 and length.get_ylim()[1] >= 30


def test_one_seed_has_no_interval() -> None:
    drawn = draw(two_arms(seeds=(0,)))
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    assert means["low"].isna().all() and (means["n"] == 1).all() and "t interval" not in drawn.bands
    assert "a: slope 0.00 at step 0, 0.80 at the end; n = 1, no interval" in words(drawn.figure)
    drawn.figure.canvas.draw()


def test_many_lengths_are_put_into_six_bins_that_hold_all_of_them() -> None:
    data = sweep({("a", 0): ten_steps((0.3, 0.6), {"heldout_training": (0.3, 0.5)})})
    wants = list(range(8, 33))  # 25 lengths: six bins of 25 / 6 from 8 to 33
    tables = [asked("a", 0, step, wants, wants, [1] * 25) for step in (0, 10)]
    own = draw(replace(data, answers=pd.concat(tables))).numbers
    length = own[(own["series"] == "length") & (own["part"] == "mean") & (own["when"] == "end")]
    # 8-12, 13-16, 17-20, 21-24, 25-28 and 29-32: their middles, and as many tokens were written as asked for
    assert length["x"].tolist() == length["value"].tolist() == [10, 14.5, 18.5, 22.5, 26.5, 30.5]
    slope = own[(own["series"] == "slope") & (own["part"] == "mean")]
    assert slope["value"].tolist() == [1, 1]


def test_a_single_length_for_all_has_no_slope() -> None:
    table = pd.DataFrame({"wanted": [12.0, 12.0], "length": [3.0, 9.0], "accuracy": [0.0, 0.0]})
    assert math.isnan(slope_of(table))


def test_the_last_evaluation_is_the_one_at_or_before_the_common_budget() -> None:
    data = two_arms()
    shorter = data.points[(data.points["seed"] == 0) | (data.points["step"] <= 8)]
    answers = data.answers.copy()
    answers.loc[(answers["seed"] == 1) & (answers["step"] == 10), "step"] = 8
    points = shorter.copy()
    points.loc[(points["seed"] == 1) & (points["step"] == 8), "eval/heldout_training/accuracy"] = 0.5
    moved = replace(data, points=points, answers=answers)
    assert final_values(moved).budget == 8000 and AXIS in points
    # Seed 0 was evaluated at 0 and 10 alone, and X is 8: it has no evaluation after its start by then.
    numbers = draw(moved).numbers
    assert set(numbers["seed"].dropna()) == {1}


@pytest.mark.extended
def test_a_sweep_without_target_lengths_says_why_there_is_no_figure() -> None:
    data = two_arms()
    plain = replace(data, answers=data.answers[data.answers["wanted"] == 0])
    assert draw(plain) == "no arm asks for a length in its prompts"
    bare = replace(data, answers=data.answers.iloc[:0])
    reason = "the answers to the held-out questions of the training protocol were not saved"
    assert draw(bare) == reason
    untrained = replace(data, answers=data.answers[data.answers["step"] == 0])
    reason = "no run that asks for a length was evaluated after its start"
    assert draw(untrained) == reason
    never = sweep({("a", 0): ten_steps((0.3, 0.6), {})})
    never = replace(never, answers=data.answers)
    assert draw(never) == "no finished run was evaluated up to the common budget"
    planted = synthetic_sweep(Planted(tricks=("helps",), seeds=(0, 1), steps=8, every=4, questions=8))
    _, missing = draw_all(planted, final_values(planted), ["target_lengths"])
    assert missing["synthetic_target_lengths"] == "no arm asks for a length in its prompts"


def test_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    data = two_arms(seeds=(0, 1, 2))
    assert overlapping(draw(data).figure, monkeypatch) == []
    longer = "reward_shaping=l1_exact,reward_shaping.shortest=10,reward_shaping.longest=30,truncation=mask_after"

    def doubled(table: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([table, table[table["arm"] == "a"].assign(arm=longer)], ignore_index=True)

    both = replace(data, runs=doubled(data.runs), points=doubled(data.points), answers=doubled(data.answers))
    drawn = draw(both)
    assert set(drawn.numbers["arm"]) == {"a", longer} and overlapping(drawn.figure, monkeypatch) == []
    assert drawn.figure.get_size_inches()[0] == 8


def test_the_same_data_give_the_same_figure() -> None:
    once, again = draw(two_arms()), draw(two_arms())
    pd.testing.assert_frame_equal(once.numbers, again.numbers)
    assert words(once.figure) == words(again.figure)


# --- where the numbers come from ----------------------------------------------------------------------------


@pytest.mark.extended
def test_the_answers_of_a_run_say_what_was_asked_for_and_how_long_they_were(tmp_path: Path) -> None:
    settings = ["budget.amount=1", "evaluation=brief", "evaluation.samples=2", "rollouts_every=9"]
    settings += ["reward_shaping=l1_exact", "reward_shaping.shortest=6", "reward_shaping.longest=20"]
    folder = run_in_process(tmp_path, *settings)
    answers = read_answers(folder)
    assert answers.columns.tolist() == COLUMNS and answers["wanted"].between(6, 20).all() and (answers["n"] == 2).all()
    for path in sorted((folder / "eval").iterdir()):
        table = pd.read_parquet(path)
        own = answers[(answers["step"] == table["step"].iloc[0]) & (answers["suite"] == "heldout")]
        heldout = table[table["suite"] == "heldout"].groupby("problem_id", sort=False)
        assert own["tokens"].tolist() == heldout["length"].sum().tolist()
        assert own["wanted"].tolist() == heldout["wanted"].first().tolist()


def test_evaluations_of_earlier_versions_are_read_as_before(tmp_path: Path) -> None:
    """Without a column `wanted`, and even without lengths, everything else is what it was."""
    write_synthetic(Planted(seeds=(0,), steps=4, every=2, questions=6), tmp_path)
    folder = min(path.parent for path in tmp_path.rglob("metrics.jsonl"))
    whole = read_answers(folder)
    for path in (folder / "eval").iterdir():
        table = pd.read_parquet(path)
        table.drop(columns=["wanted", "tokens"]).assign(length=5).to_parquet(path, index=False)
    old = read_answers(folder)
    names = COLUMNS[:-2]
    pd.testing.assert_frame_equal(old[names], whole[names])
    assert (old["wanted"] == 0).all() and (old["tokens"] == 5 * old["n"]).all() and old["n"].max() == 2
    one = sorted((folder / "eval").iterdir())[0]
    pd.read_parquet(one).assign(wanted=9).to_parquet(one, index=False)  # continued by a version that asks
    mixed = read_answers(folder)
    assert set(mixed.loc[mixed["step"] == 0, "wanted"]) == {9} and (mixed.loc[mixed["step"] > 0, "wanted"] == 0).all()


AT_EVERY_CHANGE = ("dapo", "demo_real")  # one with answers to single questions, and one that kept none


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [name if name in AT_EVERY_CHANGE else pytest.param(name, marks=pytest.mark.extended) for name in SAVED],
)
def test_saved_answers_are_those_of_their_file_and_are_saved_alike(name: str, tmp_path: Path) -> None:
    data = saved_data(name)
    kept = pd.read_parquet(FOLDERS[name] / "data" / f"{name}.answers.parquet")
    pd.testing.assert_frame_equal(data.answers[kept.columns.tolist()], kept)
    save_data(data, tmp_path)
    again = load_data(tmp_path, name)
    pd.testing.assert_frame_equal(again.answers, data.answers)
