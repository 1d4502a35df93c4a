"""Which steps keep their rollouts: the first, the last, and evenly between, whatever the budget counts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.run.recorder import table_is_due


def tables(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step=")) for path in (run / "rollouts").glob("step=*.parquet"))


@given(steps=st.integers(1, 400), every=st.none() | st.integers(1, 50))
def test_first_last_and_evenly_between(steps: int, every: int | None) -> None:
    kept = [step for step in range(1, steps + 1) if table_is_due(every, step, (step - 1) / steps, step / steps)]
    assert kept[0] == 1 and kept[-1] == steps
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    if every is None:
        assert len(kept) == steps if steps <= 10 else 10 <= len(kept) <= 11
        assert all(gap <= steps / 10 + 1 for gap in gaps)
    else:
        assert all(gap == every for gap in gaps[:-1]) and all(gap <= every for gap in gaps[-1:])


@pytest.mark.extended
def test_a_short_run_keeps_every_step_and_a_budget_of_tokens_its_last_one(tmp_path: Path) -> None:
    short = run_in_process(tmp_path / "short", *SMALL, "budget.amount=3")
    assert tables(short) == [1, 2, 3]
    tokens = run_in_process(tmp_path / "tokens", *SMALL, "budget=sampled_tokens", "budget.amount=12000", "group_size=2")
    last = metrics_of(tokens)[-1]["step"]
    kept = tables(tokens)
    assert last > 12 and kept[0] == 1 and kept[-1] == last and 10 <= len(kept) <= 12
    assert max(later - earlier for earlier, later in pairwise(kept)) <= last / 10 + 2
    later = pd.read_parquet(short / "rollouts" / "step=000003.parquet")
    assert any(clipped.any() for clipped in later["token_clipped"]), "what the surrogate changed is known at any step"


@pytest.mark.extended
def test_as_often_as_is_asked(tmp_path: Path) -> None:
    assert tables(run_in_process(tmp_path, *SMALL, "budget.amount=4", "rollouts_every=2")) == [1, 3, 4]
