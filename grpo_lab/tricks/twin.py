"""Twin: a random control for tricks that mask, clip, reject or drop.

A trick decides which tokens, rows, groups or questions it acts on. Its random twin acts on as many of them, drawn at
random. The difference between the two is the effect of the selection; the rest is the effect of acting on that many.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from grpo_lab.tricks.base import Trick
from grpo_lab.tricks.selects import Selects
from grpo_lab.types import Bool, Float, Graded, Tensor


@dataclass(frozen=True)
class Twin(Trick, ABC):
    """Decides whether the selection of an axis is replaced by a random one."""

    def of_axis(self, axis: Selects) -> bool:
        """True if the run's option on `axis` gives way to its random twin."""
        return False

    def can_draw(self, selecting: Set[Selects]) -> bool:
        """False if a selection is to be replaced and there is none; `selecting` has the axes whose options select."""
        return True

    def redraw(
        self,
        axis: Selects,
        values: Tensor,
        eligible: Bool[Tensor, "*n"],
        noise: Callable[[str], Float[Tensor, "*n"]],
    ) -> Tensor:
        """`values` [*n], each saying what the option on `axis` does to an element, dealt out again at random.

        The eligible elements exchange their values, so that as many as before have each value; the others keep theirs.
        `noise` gives one uniform number per element for the name of a stream.
        """
        if not self.of_axis(axis):
            return values
        dealt = values.clone()
        dealt[eligible] = values[eligible][noise(axis.stream).to(values.device)[eligible].argsort(stable=True)]
        return dealt


@dataclass(frozen=True)
class NoTwin(Twin):
    """Each option makes its own selection."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "each option selects by its own rule"


@dataclass(frozen=True)
class RandomTwin(Twin):
    """Draw at random as many tokens, rows, groups or questions as the option would select, and treat them as it would.

    `of` lists the axes; without any, each axis of the run that selects. The number is the option's own on the same
    batch and the same weights, and the draw depends on the run's seed, so it is the same for any microbatches and
    ranks. An option that weights instead of masking (cispo, tis_token, sapo) has its factors dealt out again: the
    weight that it gives divided by the one without it.
    """

    of: list[Selects]

    @property
    def formula(self) -> str:
        named = ", ".join(axis.value for axis in self.of) or "each axis that selects"
        return f"of {named}: as many, drawn at random"

    def of_axis(self, axis: Selects) -> bool:
        return not self.of or axis in self.of

    def can_draw(self, selecting: Set[Selects]) -> bool:
        return bool(selecting) and selecting >= set(self.of)


def redrawn_masks(
    twin: Twin,
    axis: Selects,
    before: Graded,
    after: Graded,
    whole_groups: bool,
    noise: Callable[[str], Float[Tensor, "P #G"]],
) -> Graded:
    """The record `after` an option removed rows from loss and statistics, with the removals dealt out again.

    The rows (or groups, if `whole_groups`) with a row in the loss of `before` exchange theirs. `noise` is per row or
    per group.
    """
    if not twin.of_axis(axis):
        return after
    lost, out, eligible = before.in_loss & ~after.in_loss, before.in_statistics & ~after.in_statistics, before.in_loss
    if whole_groups:
        lost, out, eligible = (rows.any(dim=1, keepdim=True) for rows in (lost, out, eligible))
    removed = twin.redraw(axis, lost.int() + 2 * out.int(), eligible, noise)
    in_loss, in_statistics = before.in_loss & (removed % 2 == 0), before.in_statistics & (removed < 2)
    return replace(after, in_loss=in_loss, in_statistics=in_statistics)
