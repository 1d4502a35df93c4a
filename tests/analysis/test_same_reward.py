"""The early-warning table of `same_reward`, by hand: events, readings, areas, thresholds and lead times."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from declared_experiments import FOLDERS
from pages.tables import own_code


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return own_code(FOLDERS["same_reward"] / "page.py")


def test_an_event_is_a_mean_of_three_a_tenth_below_the_best_before(study: ModuleType) -> None:
    assert study.event_of(np.array([0.8, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6])) == 5  # means .867 .9 .867 .8 .7
    assert study.event_of(np.array([0.8, 0.9, 0.9, 0.9, 0.85, 0.8, 0.8])) is None
    assert study.event_of(np.array([0.5, 0.6, 0.7])) is None


def test_readings_are_changes_since_step_5(study: ModuleType) -> None:
    steps = np.arange(16)
    run = pd.DataFrame({"step": steps, "train/entropy": [math.nan, *np.arange(15.0)]})
    run["eval/x"] = np.where(steps % 5 == 0, steps / 10, math.nan)
    at = np.array([0, 5, 10, 15])
    entropy = study.readings_of(run, at, "train/entropy", -1)  # means of steps 1-5, 6-10, 11-15: 2, 7, 12
    assert math.isnan(entropy[0]) and entropy[1:].tolist() == [0.0, -5.0, -10.0]
    assert study.readings_of(run, at, "eval/x", 1) == pytest.approx([-0.5, 0.0, 0.5, 1.0])
    assert np.isnan(study.readings_of(run, at, "not/logged", 1)).all()


def test_areas_thresholds_and_leads(study: ModuleType) -> None:
    def run(base: int, event: int | None, values: list[float]) -> object:
        readings = dict.fromkeys(study.INDICATORS, np.array([math.nan, 0.0, *values]))
        return study.Run(base, 5 * np.arange(len(values) + 2), event, readings)

    name = next(iter(study.INDICATORS))
    rises = [run(base, 5, [1.0, 2.0, 3.0, 4.0]) for base in (0, 1, 8, 9)]
    flat = [run(base, None, [0.5, 1.5, 0.5, 0.5]) for base in (2, 3, 10)]
    runs = [*rises, *flat]
    assert study.area(runs, name) == 1.0  # before evaluation 5: 1 > .5, 2 > 1.5, 3 > .5
    assert study.threshold_of(runs, name) == 1.5, "the least that no quiet run crosses"
    assert [study.crossing(one, name, 1.5) for one in (rises[0], flat[0])] == [3, None]
    assert study.crossing(rises[0], name, 3.5) is None, "what comes after the event warns of nothing"
    lines = study.warnings_table(runs).splitlines()
    assert lines[0] == study.HEAD and lines[2] == f"| {name} | 1.00 | 1.00 | 2 of 2 | 10 | 0 of 1 |"
