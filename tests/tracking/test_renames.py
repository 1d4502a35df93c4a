"""Older runs and declarations are read under today's names, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from declared_experiments import saved_data

from grpo_lab.analysis.report.reader import COLUMNS, TOKEN_COLUMNS, read_rollouts
from grpo_lab.analysis.sources.sweep_data import LABELS, _under_todays_names
from grpo_lab.config.run_config import RunConfig
from grpo_lab.run.identity import recorded_identity
from grpo_lab.tracking.metrics import REGISTRY, find
from grpo_lab.tracking.renames import (
    KEYS,
    METRICS,
    ROLLOUT_COLUMNS,
    config_key,
    first_metric_name,
    metric_name,
    with_done_fields,
)
from grpo_lab.tracking.run_reader import read_steps

FAMILY = ("reward/kept_component/k1", "reward/in_loss_component/k1")


def test_every_new_name_is_registered_and_no_old_one_is() -> None:
    named = {metric.name for metric in REGISTRY}
    for old, new in (*METRICS.items(), FAMILY):
        assert find(new) and old not in named
        assert metric_name(old) == new == metric_name(new)
        assert metric_name(f"average/{old}") == f"average/{new}"


def test_the_first_name_of_a_metric_undoes_its_rename() -> None:
    for old, new in (*METRICS.items(), FAMILY):
        assert first_metric_name(new) == old and first_metric_name(f"average/{new}") == f"average/{old}"
    assert first_metric_name("reward/mean") == "reward/mean"


def test_keys_of_a_configuration_are_those_of_today() -> None:
    assert set(KEYS.values()) <= set(RunConfig.__dataclass_fields__) and not set(KEYS) & set(
        RunConfig.__dataclass_fields__
    )
    assert config_key("pace.sync") == "cost_model.sync" and config_key("pace") == "cost_model"
    assert config_key("template.wish") == "template.target_length" and config_key("seed") == "seed"
    assert config_key("model.seed") == "model.base"


def test_a_log_of_before_is_read_under_todays_names(tmp_path: Path) -> None:
    line = {"step": 0, "metrics": {"rollout/zero_signal": 0.25}, "nonfinite": {"train/k3_old": "nan"}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    times = {"step": 0, "wall": 5, "timing": {"time/score": 2.0}}
    (tmp_path / "timing.jsonl").write_text(json.dumps(times) + "\n")
    (record,) = read_steps(tmp_path)
    assert record.metrics["rollout/frac_zero_std"] == 0.25 and record.metrics["train/approx_kl"] != 0
    assert set(record.metrics) == {"rollout/frac_zero_std", "train/approx_kl"}
    assert record.timing == {"time/logprobs": 2.0}


def test_a_store_with_both_names_of_a_metric_gives_one_column() -> None:
    old, new = "touched/surrogate", "train/clip_fraction"
    points = pd.DataFrame({"step": [0, 1, 2], old: [0.1, 0.2, None], new: [None, 0.2, 0.3], "reward/mean": [1.0, 1, 1]})
    read = _under_todays_names(points)
    assert list(read.columns) == ["step", new, "reward/mean"] and read[new].tolist() == [0.1, 0.2, 0.3]
    assert old in points, "what was handed over stays as it was"


@pytest.mark.parametrize("name", ["solved_prompts", "recipes"])
def test_saved_data_have_todays_names_alone(name: str) -> None:
    data = saved_data(name)
    metrics = set(data.points.columns) - {*LABELS, "step"}
    assert "rollout/frac_zero_std" in metrics and not metrics & set(METRICS)
    assert not [metric for metric in metrics if metric.startswith("reward/kept_")]


def test_records_of_a_finished_run_and_its_responses_are_read_under_todays_names(tmp_path: Path) -> None:
    assert with_done_fields({"inert": ["kl"], "steps": 4}) == {"no_ops": ["kl"], "steps": 4}
    (tmp_path / "rollouts").mkdir()
    old = {name: ["x"] for name in (*COLUMNS, *TOKEN_COLUMNS, "tokens") if name not in ROLLOUT_COLUMNS.values()}
    pd.DataFrame(old | {"trained": [True], "counted": [False]}).to_parquet(tmp_path / "rollouts/step=000003.parquet")
    table = read_rollouts(tmp_path)
    assert table["in_loss"].tolist() == [True] and table["in_statistics"].tolist() == [False]


def test_active_fractions_of_before_are_read_and_declared_by_their_first_name() -> None:
    assert metric_name("average/touched/scale") == "average/active_fraction/scale"
    assert first_metric_name("average/active_fraction/scale") == "average/touched/scale"
    assert metric_name("touched/surrogate") == "train/clip_fraction"


def test_a_run_of_before_has_the_identity_of_the_same_run_today() -> None:
    there = {"identity": {"model.class": "CardBase", "pace.class": "CostModel", "template.wish": 1, "device": "cpu"}}
    today = {"model.class": "GpuBase", "cost_model.class": "CostModel", "template.target_length": 1, "device": "cpu"}
    assert recorded_identity(there) == today
