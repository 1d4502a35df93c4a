"""What one question costs on a cluster: the page says what the code computes, and the study what its numbers imply."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from cluster_cost.drawings import draw_all, draw_shares, draw_tails
from cluster_cost.page import (
    assumptions,
    half_wasted,
    memory_table,
    question,
    transfers_table,
    written,
)
from cluster_cost.study import IN_FLIGHT, PARTS, SYNC, Study

from grpo_lab.analysis.figures.style import Drawn

FOLDER = Path(__file__).parents[2] / "analysis" / "cluster_cost"
PAGE = (FOLDER / "README.md").read_text()


@cache
def study() -> Study:
    return Study.load(FOLDER / "numbers.yaml")


@cache
def small() -> Study:
    """Fewer points of everything, for what needs no certain number."""
    given = dict(study().given)
    given |= {"gpu_counts": [8, 16, 32], "caps_over_mean": [1, 4], "synced_gpu_counts": [16, 64]}
    given |= {"models": {"7B": given["models"]["7B"]}, "work": {**given["work"], "problems": 16, "mean": 512}}
    return Study(given)


@pytest.mark.parametrize("block", [question, memory_table, transfers_table, assumptions])
def test_the_page_states_what_the_numbers_imply(block) -> None:
    assert block(study()) in PAGE


@pytest.mark.extended
def test_a_row_of_the_grid_is_computed_anew() -> None:
    """The runs of 7B on 64 GPUs, in seconds a step, GPU-hours and dollars; `extended` compares all of the page."""
    (line,) = re.findall(r"^\| 7B \| 64 \| (.*) \|$", PAGE, flags=re.M)
    stated = line.split(" | ")
    for place, name in ((0, SYNC), (2, IN_FLIGHT)):
        scenario = study().scenario("7B", 64, name)
        hours = study().gpu_hours(scenario)
        assert hours == pytest.approx(10 * 300 * scenario.step.seconds * 64 / 3600)
        assert stated[place] == f"{scenario.step.seconds:,.0f}"
        assert stated[3 + place].split(" ")[0] == f"{hours:,.0f}"


@pytest.mark.extended
def test_the_whole_page_is_what_the_command_writes() -> None:
    assert written(PAGE, study()) == PAGE, "run `make cluster-cost`"


def test_a_page_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="has no block answers: write <!-- begin answers -->"):
        written("# empty\n", study())


def test_a_question_takes_the_seeds_that_its_effect_needs() -> None:
    """Two arms; sd 1, correlation .5: differences deviate by 1, and 2 points need 5 seeds, 1 point 10."""
    assert study().runs == 10
    harder = Study({**study().given, "question": {**study().given["question"], "effect": 1.0}})
    assert harder.runs == 20


@pytest.mark.extended
def test_parts_of_the_grid_add_up_and_streaming_costs_least() -> None:
    table = small().grid
    assert table[list(PARTS)].sum(axis=1).to_numpy() == pytest.approx(1)
    for gpus in (8, 16, 32):
        hours = [small().row("7B", gpus, name).gpu_hours for name in (SYNC, IN_FLIGHT)]
        assert hours[0] > hours[1]
    assert (table[table.schedule == SYNC].generating == 0).all()
    assert (table[table.schedule != SYNC].generating > 0).all()


@pytest.mark.extended
def test_nothing_is_wasted_by_equal_lengths_and_much_by_a_tail() -> None:
    table = small().tails
    own = table[table.schedule == SYNC].set_index(["gpus", "ratio"]).unused
    for gpus in (8, 16, 32):
        assert own[gpus, 1] == pytest.approx(0, abs=0.02) and own[gpus, 4] > 0.4


def wasting(*unused: float) -> Study:
    """7B wastes these shares by a longest response of 1, 2, 4 and 8 times the mean, on 8, 16 and 32 GPUs."""
    ratios = [1, 2, 4, 8]
    given = {**study().given, "caps_over_mean": ratios, "gpu_counts": [8, 16, 32]}
    made = Study(given | {"models": {"7B": study().given["models"]["7B"]}})
    rows = [("7B", gpus, SYNC, *point) for gpus in (8, 16, 32) for point in zip(ratios, unused)]
    vars(made)["tails"] = pd.DataFrame(rows, columns=["model", "gpus", "schedule", "ratio", "unused"])
    return made


@pytest.mark.parametrize(
    ("unused", "ratio"),
    [
        ((0.1, 0.2, 0.6, 0.7), 3.5),  # of the 0.4 between 2 and 4, 0.3 lie below a half
        ((0.1, 0.5, 0.6, 0.7), 2.0),
        ((0.5, 0.6, 0.7, 0.8), 1.0),
        ((0.9, 0.9, 0.9, 0.9), 1.0),
        ((0.1, 0.2, 0.3, 0.49), math.nan),
    ],
)
def test_half_is_wasted_from_where_the_line_between_two_points_crosses_it(
    unused: tuple[float, ...], ratio: float
) -> None:
    assert wasting(*unused).half_wasted("7B", 16) == pytest.approx(ratio, nan_ok=True)


def heading_of(drawn: Drawn) -> str:
    """The title of the legend, in one line."""
    (legend,) = drawn.figure.legends
    return " ".join(legend.get_title().get_text().split())


def test_what_is_wasted_at_once_and_what_never_is_are_said_apart() -> None:
    once, never = wasting(0.6, 0.7, 0.8, 0.9), wasting(0.1, 0.2, 0.3, 0.4)
    assert half_wasted(once) == (
        "On 16 and 32 GPUs from a longest response of 1.0 to 1.0 times the mean. On 8 GPUs from 1 times at 7B."
    )
    assert half_wasted(never) == (
        "On 16 and 32 GPUs not up to 8 times at 7B on 16 and 7B on 32. On 8 GPUs not up to 8 times at 7B."
    )
    heading = heading_of(draw_tails(never))
    assert "wastes less than half of 16 or 32 GPUs up to a longest response of 8 times" in heading


def test_a_tail_that_never_wastes_half_on_some_gpus_leaves_the_others_said() -> None:
    mixed = wasting(0.1, 0.2, 0.6, 0.7)
    mixed.tails.loc[mixed.tails.gpus == 32, "unused"] = 0.3
    assert half_wasted(mixed).startswith(
        "On 16 and 32 GPUs from a longest response of 3.5 to 3.5 times the mean and not up to 8 times at 7B on 32. "
    )
    heading = heading_of(draw_tails(mixed))
    assert "wastes half of 16 GPUs once the longest response is 3.5 to 3.5 times the mean" in heading


def test_engines_served_one_by_one_wait_in_proportion() -> None:
    table = small().syncs.set_index("gpus")
    assert (table["one by one"] >= table["broadcast"]).all()
    odds = table["one by one"] / (1 - table["one by one"]) / (table["broadcast"] / (1 - table["broadcast"]))
    assert odds.to_numpy() == pytest.approx(table.engines.to_numpy(), rel=1e-9)
    assert small().tolerated("7B", "one by one") <= small().tolerated("7B", "broadcast")


@pytest.mark.extended
def test_a_heading_says_what_in_flight_updates_leave_idle() -> None:
    row = small().row("7B", 32, IN_FLIGHT)
    heading = heading_of(draw_shares(small()))
    assert row.waiting > 0.01 and f"with in-flight updates GPUs idle for {row.waiting:.0%} to" in heading


def test_a_model_that_fits_no_split_is_refused() -> None:
    with pytest.raises(ValueError, match="32B does not fit 4 H100 under in flight: take more GPUs"):
        study().scenario("32B", 4, IN_FLIGHT)


@pytest.mark.extended
def test_the_longest_response_decides_generation_on_many_gpus() -> None:
    """As verl reports it: 64 and 128 GPUs generate for as long. Within a factor of 1.3 of its seconds."""
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
    hundred, two_hundred = (study().scenario("7B", 8, SYNC, gpu).step for gpu in ("H100", "H200"))
    assert two_hundred.generation < hundred.generation
    assert two_hundred.training == pytest.approx(hundred.training, rel=0.02)
