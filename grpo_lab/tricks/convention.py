"""Convention: numerical choices that are nobody's trick, one record so that every option agrees on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from grpo_lab.tricks.base import require_field, require_not_negative


class Singleton(Enum):
    """The advantage of a group's only counted row: nothing to compare it with, or its raw reward (verl)."""

    zero = "zero"
    raw = "raw"


class AlphaForm(Enum):
    """GPG's alpha: groups over groups with signal, or rows over rows whose reward is not 0 (verl)."""

    informative_groups = "informative_groups"
    nonzero_rewards = "nonzero_rewards"


class CapForm(Enum):
    """What CISPO's `cap` bounds: the weight itself (TRL), or the weight minus 1 (MiniMax-M1's text, verl)."""

    absolute = "absolute"
    one_plus = "one_plus"


class BoundForm(Enum):
    """What a k1 rejection's bounds are on: the ratio old / sampler, or by verl's sign its inverse."""

    ratio = "ratio"
    inverse = "inverse"


class Width(Enum):
    """Dr. GRPO's constant: the generation budget, or the padded width of the microbatch (verl's fallback)."""

    budget = "budget"
    padded = "padded"


class Floor(Enum):
    """What keeps a deviation over the batch from 0: an eps added to it or to its variance, or a least variance."""

    added = "added"
    in_variance = "in_variance"
    least_variance = "least_variance"


class Scope(Enum):
    """Over which tokens a statistic is taken: those of the optimiser step, or of each microbatch (verl)."""

    step = "step"
    microbatch = "microbatch"


@dataclass(frozen=True)
class Convention:
    """How the laboratory counts where frameworks differ; options read it through interpolation.

    The presets beside `house` are for matching a past run of another framework and are never a default. One
    thing no preset changes: a group whose counted rewards are equal has advantages of exactly 0, where the
    frameworks let rounding and eps decide.

    `std_ddof`: 0 divides a group's squared deviations by n, 1 by n - 1 (Bessel; TRL and verl).
    `std_eps`: added to a group's standard deviation before dividing by it, in reward units.
    `std_leave_one_out`: the deviation of a row is that of the other rows of its group (NeMo-RL).
    `batch_ddof`, `batch_eps`: the same two for deviations over the batch.
    `batch_floor`: whether that eps is added to the deviation, to the variance (verl's whitening) or is the least
    variance (OpenRLHF's).
    `sequence_mean_eps`: added to a response's token count in sequence_mean, in tokens (verl).
    `token_mean_scope`: microbatch makes token_mean depend on how the step is cut (TRL's "bnpo").
    """

    std_ddof: int
    std_eps: float
    std_leave_one_out: bool
    batch_ddof: int
    batch_eps: float
    batch_floor: Floor
    singleton: Singleton
    gpg_alpha: AlphaForm
    cispo_cap: CapForm
    k1_bounds: BoundForm
    sequence_mean_eps: float
    constant_width: Width
    token_mean_scope: Scope
    covariance_scope: Scope

    def __post_init__(self) -> None:
        require_field(self.std_ddof in (0, 1), self, "std_ddof", "0 or 1")
        require_field(self.batch_ddof in (0, 1), self, "batch_ddof", "0 or 1")
        require_not_negative(self, "std_eps", "batch_eps", "sequence_mean_eps")
