"""The answers of a run by question: as the evaluation wrote them, of earlier versions, and saved again."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from declared_experiments import FOLDERS, SAVED, saved_data
from planted_sweeps import Planted, write_synthetic
from short_runs import run_in_process

from grpo_lab.analysis.sources.answers import COLUMNS, read_answers
from grpo_lab.analysis.sources.saved_data import load_data, save_data


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
    """A missing column `wanted`, or missing lengths, changes nothing else."""
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
