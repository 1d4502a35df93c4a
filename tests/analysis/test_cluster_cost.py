"""What one question costs on a cluster: the page says what the code computes, and the study what its numbers imply."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest

from grpo_lab.analysis.figures.cluster import draw_all
from grpo_lab.analysis.scaling.cluster_page import memory_table, question, transfers_table, written
from grpo_lab.analysis.scaling.cluster_study import IN_FLIGHT, PARTS, SYNC, Study

FOLDER = Path(__file__).parents[2] / "analysis"
PAGE = (FOLDER / "cluster_cost.md").read_text()


@cache
def study() -> Study:
    return Study.load(FOLDER / "cluster_cost.yaml")


@cache
def small() -> Study:
    """Fewer points of everything, for what needs no certain number."""
    given = dict(study().given)
    given |= {"cards_asked": [8, 16, 32], "caps_over_mean": [1, 4], "cards_synced": [16, 64]}
    given |= {"models": {"7B": given["models"]["7B"]}, "work": {**given["work"], "problems": 16, "mean": 512}}
    return Study(given)


@pytest.mark.parametrize("block", [question, memory_table, transfers_table])
def test_the_page_states_what_the_numbers_imply(block) -> None:
    assert block(study()) in PAGE


def test_a_row_of_the_grid_is_computed_anew() -> None:
    """The cells of 7B on 64 cards, in seconds a step, card-hours and dollars; `extended` compares all of the page."""
    (line,) = re.findall(r"^\| 7B \| 64 \| (.*) \|$", PAGE, flags=re.M)
    stated = line.split(" | ")
    for place, name in ((0, SYNC), (2, IN_FLIGHT)):
        cell = study().cell("7B", 64, name)
        hours = study().card_hours(cell)
        assert hours == pytest.approx(10 * 300 * cell.step.seconds * 64 / 3600)
        assert stated[place] == f"{cell.step.seconds:,.0f}"
        assert stated[3 + place].split(" ")[0] == f"{hours:,.0f}"


@pytest.mark.extended
def test_the_whole_page_is_what_the_command_writes() -> None:
    assert written(PAGE, study()) == PAGE, "run `grpo-lab cluster-cost`"


def test_a_page_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="has no block answers: write <!-- begin answers -->"):
        written("# empty\n", study())


def test_a_question_takes_the_seeds_that_its_effect_needs() -> None:
    """Two arms; sd 1, correlation .5: differences deviate by 1, and 2 points need 5 seeds, 1 point 10."""
    assert study().runs == 10
    harder = Study({**study().given, "question": {**study().given["question"], "effect": 1.0}})
    assert harder.runs == 20


def test_parts_of_the_grid_add_up_and_streaming_costs_least() -> None:
    table = small().grid
    assert table[list(PARTS)].sum(axis=1).to_numpy() == pytest.approx(1)
    for cards in (8, 16, 32):
        hours = [small().row("7B", cards, name).card_hours for name in (SYNC, IN_FLIGHT)]
        assert hours[0] > hours[1]
    assert (table[table.schedule == SYNC].generating == 0).all()
    assert (table[table.schedule != SYNC].generating > 0).all()


def test_nothing_is_wasted_by_equal_lengths_and_much_by_a_tail() -> None:
    table = small().tails
    own = table[table.schedule == SYNC].set_index(["cards", "ratio"]).unused
    for cards in (8, 16, 32):
        assert own[cards, 1] == pytest.approx(0, abs=0.02) and own[cards, 4] > 0.4
        assert 1 < small().half_wasted("7B", cards) < 4 or math.isnan(small().half_wasted("7B", cards))


def test_engines_served_one_by_one_wait_in_proportion() -> None:
    table = small().syncs.set_index("cards")
    assert (table["one by one"] >= table["broadcast"]).all()
    odds = table["one by one"] / (1 - table["one by one"]) / (table["broadcast"] / (1 - table["broadcast"]))
    assert odds.to_numpy() == pytest.approx(table.engines.to_numpy(), rel=1e-9)
    assert small().tolerated("7B", "one by one") <= small().tolerated("7B", "broadcast")


def test_a_model_that_fits_no_split_is_refused() -> None:
    with pytest.raises(ValueError, match="32B does not fit 4 H100 under in flight: take more cards"):
        study().cell("32B", 4, IN_FLIGHT)


def test_the_longest_response_decides_generation_on_many_cards() -> None:
    """As verl reports it: 64 and 128 cards generate for as long. Within a factor of 1.3 of its seconds."""
    table = study().compared_to("generation")
    assert table.predicted.iloc[1] / table.predicted.iloc[2] < 1.1
    assert (table.ratio.iloc[1:] - 1).abs().max() < 0.3


def test_every_report_has_a_source_and_every_figure_a_reader() -> None:
    for report in study().given["reports"]:
        source = study().given["setups"][report["from"]]["source"]
        assert "https://" in source or "arXiv" in source or source == "the same"
    for drawn in draw_all(small()):
        assert drawn.name in PAGE and len(drawn.numbers)
        assert "Computed, not measured" in " ".join(text.get_text() for text in drawn.figure.texts)


def test_faster_memory_shortens_generation_alone() -> None:
    hundred, two_hundred = (study().cell("7B", 8, SYNC, card).step for card in ("H100", "H200"))
    assert two_hundred.generation < hundred.generation
    assert two_hundred.training == pytest.approx(hundred.training, rel=0.02)
