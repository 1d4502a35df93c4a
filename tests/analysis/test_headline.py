"""The verdicts of a sweep in one line, as figures are titled and commands end: recorded sweeps, read by hand."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from pages.numbers import data_of

from grpo_lab.analysis.caveats import levels_alike
from grpo_lab.analysis.effects.verdict import finding
from grpo_lab.analysis.figures.registry import draw_all
from grpo_lab.analysis.figures.style import with_notes
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.tables.headline import headline, supported_text
from grpo_lab.config.hydra_setup import bootstrap

DOWNSTREAM, HELDOUT = "downstream accuracy", "held-out accuracy, evaluation protocol"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("sweep", "counted", "found"),
    [
        (
            "filter_speed",
            "3 of 4 predictions supported; 1 not significant",
            f"1 of 2 predictions supported on {HELDOUT}: resample is below keep",
        ),
        ("sharpness", "3 of 6 predictions supported; 3 not significant", ""),
        ("same_reward", "7 of 9 predictions supported; 2 not significant", ""),
        (
            "curricula",
            "3 of 5 predictions supported; 2 manipulation check failed",
            f"2 of 3 predictions supported on {DOWNSTREAM}",
        ),
        (
            "coverage",
            "0 of 4 predictions supported; 4 not significant",
            "not significant, though predicted: pass_at_4 is within 0.1 of plain on downstream: pass at 16, "
            "+0.033 [-0.129, +0.195], n = 8 on 4 base models",
        ),
    ],
)
def test_recorded_sweeps(sweep: str, counted: str, found: str) -> None:
    """Predictions against another arm than the control, or of another metric, are no finding on the deciding one."""
    bootstrap()
    data, finals = data_of(sweep)
    assert (supported_text(data, finals), finding(data, finals)) == (counted, found)
    counts = "2 of 2 counts as predicted" if sweep == "same_reward" else ""
    assert headline(data, finals) == "; ".join(filter(None, [counted, counts, found]))


def test_too_few_runs_are_said_to_be_too_few() -> None:
    bootstrap()
    data, _ = data_of("same_reward")
    first = data.runs["seed"] == data.runs["seed"].min()
    one_seed = replace(data, runs=data.runs[first])
    assert headline(one_seed, final_values(one_seed)) == "too few finished runs to judge a prediction"


def test_the_line_under_a_figure_says_what_its_caveats_are_about() -> None:
    bootstrap()
    data, finals = data_of("interruption_budgets")
    (drawn,), _ = draw_all(data, finals, ["effects"])
    lines = [text.get_text() for text in drawn.figure.texts]
    assert "Caveats (in the verdict): two groups; not evaluated alike." in lines
    assert "Not evaluated alike: task, template" in drawn.caption
    plain = replace(drawn, caption="")
    assert with_notes(plain, []) is plain


def test_levels_that_were_evaluated_differently_share_no_axis() -> None:
    bootstrap()
    data, _ = data_of("length_bias")
    assert levels_alike(data)
    half = pd.Series(range(len(data.runs)), index=data.runs.index) % 2
    runs = data.runs.assign(level=half.map({0: "a", 1: "b"}), protocol=half.map({0: "p", 1: "q"}))
    assert not levels_alike(replace(data, runs=runs)) and levels_alike(replace(data, runs=runs.assign(protocol="p")))
