"""Truncation: what a response cut by the token budget counts for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from grpo_lab.tricks.base import Trick
from grpo_lab.types import Graded


@dataclass(frozen=True)
class Truncation(Trick, ABC):
    """Sets the `counted` and `trained` bits of truncated rows."""

    removes_rows: ClassVar[bool]

    @abstractmethod
    def __call__(self, graded: Graded) -> Graded:
        """The record with its row masks set; rewards stay as they are."""


@dataclass(frozen=True)
class Score(Truncation):
    """A cut response is a wrong response: it is counted and trained like any other.

    With q the truncated share, a the accuracy of finished responses and r_T the truncated reward, the
    on-policy, mean-centred pressure on q is (a - r_T)(G - 1)/G under a length-free denominator.
    """

    touches_nothing: ClassVar[bool] = True
    removes_rows: ClassVar[bool] = False

    def __call__(self, graded: Graded) -> Graded:
        return graded


@dataclass(frozen=True)
class MaskAfter(Truncation):
    """Leave truncated rows in the group statistics but out of the loss (DAPO code, arXiv:2503.14476).

    trained = trained & ~truncated

    Differs from Score: the pressure against truncation is weaker by the factor q, because only the
    siblings' advantages still feel the cut rows. Kept rows then have a positive mean advantage.
    """

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: m = 0, but counted in the statistics"

    def __call__(self, graded: Graded) -> Graded:
        return replace(graded, trained=graded.trained & ~graded.truncated)


@dataclass(frozen=True)
class MaskBefore(Truncation):
    """Take truncated rows out of the group statistics and of the loss (Skywork-OR1, arXiv:2505.22312).

    counted = counted & ~truncated;  trained = trained & ~truncated

    Differs from MaskAfter: the siblings never see the cut rows, so under a length-free denominator there
    is no pressure on truncation at all. A group with one row left gets advantage 0.
    """

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: m = 0, and not counted in the statistics"

    def __call__(self, graded: Graded) -> Graded:
        kept = ~graded.truncated
        return replace(graded, counted=graded.counted & kept, trained=graded.trained & kept)
