"""The learning rates at which arms make updates as large as their control's, from the record of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.analysis.table_rows import aligned
from grpo_lab.tracking.sweep_record import SweepRecord

TOLERANCE = 0.02  # of the control's norm, within which a norm counts as matched


@dataclass(frozen=True)
class MatchedNorm:
    """The learning rate of an arm with a matched update norm, and the pilot that it follows from.

    `arm` repeats `of`, at `factor` times its learning rate. `control`, `before` and `after` are mean update
    norms of pilots on `seed`: of the control, of the plain arm and of the matched one. `key` says what they depend on.
    """

    level: str
    arm: str
    of: str
    factor: float
    learning_rate: float
    control: float
    before: float
    after: float
    seed: int
    key: str

    @property
    def off(self) -> float:
        """How far the matched norm is from the control's, as a share of it."""
        return self.after / self.control - 1


def matched_norms(record: SweepRecord) -> list[MatchedNorm]:
    """The matched arms of a sweep; [] for one without."""
    return [MatchedNorm(**entry) for entry in record.matching]


def norms_table(found: Sequence[MatchedNorm]) -> list[str]:
    """A row for each matched arm: factor, learning rate, and update norms before and after. Of one arm or more."""
    rows = [["arm", "factor", "learning rate", "control's update norm", "before", "after"]]
    for one in found:
        where = " at ".join(filter(None, (one.arm, one.level)))
        numbers = [f"{number:.4g}" for number in (one.learning_rate, one.control, one.before, one.after)]
        rows.append([where, f"{one.factor:.3f}", *numbers])
    return aligned(rows, "  ")


def matched_lines(found: Sequence[MatchedNorm]) -> list[str]:
    """One sentence on the matching, and one for each arm that is not matched; none without a matching."""
    if not found:
        return []
    lines = [f"Matched update norms: learning rates from pilots on seed {found[0].seed}, scaled to the control's norm."]
    return lines + [
        f"Not matched within {TOLERANCE:.0%}: the update norm of {' '.join(filter(None, (one.arm, one.level)))} is "
        f"{abs(one.off):.0%} {'above' if one.off > 0 else 'below'} the control's in the pilot."
        for one in found
        if abs(one.off) > TOLERANCE
    ]
