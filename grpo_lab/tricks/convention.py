"""Convention: numerical choices that are nobody's trick, one record so that every option agrees on them."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.tricks.base import require, require_not_negative


@dataclass(frozen=True)
class Convention:
    """How the laboratory counts where frameworks differ; options read it through interpolation.

    `std_ddof`: 0 divides a group's squared deviations by n, 1 by n - 1 (Bessel; TRL and verl).
    `std_eps`: added to a standard deviation before dividing by it, in reward units.
    """

    std_ddof: int
    std_eps: float

    def __post_init__(self) -> None:
        require(self.std_ddof in (0, 1), self, "std_ddof", "0 or 1")
        require_not_negative(self, "std_eps")
