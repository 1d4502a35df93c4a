"""Old names that plugins use: fields of records and facts of classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from helpers import F64, make_graded

from grpo_lab.tasks.base import Grades, Problem
from grpo_lab.tasks.verifiers import Strict
from grpo_lab.tricks.baseline import GroupMean, NoBaseline
from grpo_lab.tricks.kl import NoKl
from grpo_lab.types import Bool, Float, Graded, Tensor


def test_old_fields_of_a_record_are_read_and_set_with_a_warning() -> None:
    graded = make_graded([[1, 0]], in_loss=[[True, False]])
    with pytest.warns(DeprecationWarning, match="Graded.trained is now called in_loss"):
        assert graded.trained.equal(graded.in_loss)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(DeprecationWarning, match="write in_statistics"):
        changed = replace(graded, **{"counted": ~graded.in_loss})
    with pytest.warns(DeprecationWarning, match="Graded.outcome is now called correctness"):
        assert graded.outcome.equal(graded.correctness)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(DeprecationWarning, match="Grades.outcomes is now called correctness"):
        assert Grades(**{"outcomes": [1.0], "components": {}}).correctness == [1.0]
    assert changed.in_statistics.tolist() == [[False, True]] and changed.in_loss.equal(graded.in_loss)


def test_old_facts_of_a_plugin_have_todays_effect() -> None:
    with pytest.warns(DeprecationWarning, match="touches_nothing is now called is_no_op"):

        @dataclass(frozen=True)
        class Plain(NoBaseline):
            touches_nothing: ClassVar[bool] = True
            pays_to_go: ClassVar[bool] = True

    assert Plain.is_no_op and Plain.reward_to_go and not GroupMean.reward_to_go

    with pytest.warns(DeprecationWarning, match="charges is now called token_penalties"):

        class Ones(NoKl):
            def charges(
                self, old: Float[Tensor, "N T"], ref: Float[Tensor, "N T"], sampled: Bool[Tensor, "N T"]
            ) -> Float[Tensor, "N T"]:
                return torch.ones(sampled.shape, dtype=F64)

    with pytest.warns(DeprecationWarning, match="outcomes is now called correctness"):

        @dataclass(frozen=True)
        class NoNines(Strict):
            def outcomes(self, problems, texts, finished, keys) -> list[float]:
                judged = super().outcomes(problems, texts, finished, keys)
                return [0.0 if "9" in text else one for one, text in zip(judged, texts)]

    problems = [Problem(0, "4 + 5", "9", 1), Problem(1, "4 + 4", "8", 1)]
    assert NoNines(1.0, 0.0).grades(problems, ["#9", "#8"], [True, True], []).correctness == [0.0, 1.0]

    mask = torch.ones(1, 2, dtype=torch.bool)
    assert Ones().token_penalties(torch.zeros(1, 2), torch.zeros(1, 2), mask).sum() == 2


def test_todays_names_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    graded: Graded = make_graded([[1, 0]])
    assert replace(graded, in_loss=graded.in_loss).in_loss.all()
    assert not [one for one in recwarn if one.category is DeprecationWarning]
