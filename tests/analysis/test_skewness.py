"""The differences that the saved sweeps found have no long tail on one side, where intervals would hold too rarely."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from declared_experiments import EXPERIMENTS, FOLDERS
from interval_coverage.skewness import METRICS, observed_skewness, skewness_text


@pytest.mark.extended
def test_no_metric_is_as_lopsided_as_lognormal_samples() -> None:
    found = observed_skewness(EXPERIMENTS)
    assert [one.metric for one in found] and {one.metric for one in found} == set(METRICS)
    for one in found:
        assert one.contrasts >= 100
        assert one.interval.contains(0.0), one
        assert -one.lognormal < one.interval.low and one.interval.high < one.lognormal, one


@pytest.mark.extended
def test_samples_of_a_law_are_as_many_and_as_large_as_those_observed(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS["budget_fit"], tmp_path / "budget_fit")
    (downstream, *_) = observed_skewness(tmp_path)
    assert downstream.interval.n == 1
    assert abs(downstream.normal) < 0.1 < 0.4 < downstream.lognormal < 0.8
    assert f"{downstream.contrasts} contrasts" in skewness_text([downstream])
