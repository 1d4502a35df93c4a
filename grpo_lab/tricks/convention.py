"""Convention: numerical choices that belong to no trick, in one record so that all options use the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from grpo_lab.checks import require_field, require_not_negative


class Singleton(Enum):
    """The advantage of a group's only row in the statistics: 0, or its raw reward (verl)."""

    zero = "zero"
    raw = "raw"


class AlphaForm(Enum):
    """GPG's alpha: groups / groups with signal, or rows / rows with a nonzero reward (verl)."""

    informative_groups = "informative_groups"
    nonzero_rewards = "nonzero_rewards"


class CapForm(Enum):
    """The quantity bounded by CISPO's `cap`: the weight (TRL), or the weight minus 1 (MiniMax-M1's text, verl)."""

    absolute = "absolute"
    one_plus = "one_plus"


class BoundForm(Enum):
    """The quantity that the bounds of a k1 rejection apply to: the ratio old / sampler, or its inverse (verl)."""

    ratio = "ratio"
    inverse = "inverse"


class Width(Enum):
    """Dr. GRPO's constant: the generation budget, or the padded width of the microbatch (verl's fallback)."""

    budget = "budget"
    padded = "padded"


class Floor(Enum):
    """The term that keeps a batch standard deviation above 0: eps added to it or its variance, or a least variance."""

    added = "added"
    in_variance = "in_variance"
    least_variance = "least_variance"


class Scope(Enum):
    """The tokens of a statistic: all of the optimiser step, or those of each microbatch (verl)."""

    step = "step"
    microbatch = "microbatch"


@dataclass(frozen=True)
class Convention:
    """Numerical choices on which frameworks differ; options read them through interpolation.

    Presets other than `house` are for matching a past run of another framework and are never a default. No preset
    changes this: a group whose rewards in the statistics are equal has advantages of exactly 0. In other frameworks
    rounding and eps decide there.

    `std_ddof`: 0 divides a group's squared deviations by n, 1 by n - 1 (Bessel; TRL and verl).
    `std_eps`: added to a group's standard deviation before dividing by it, in reward units.
    `std_leave_one_out`: a row is divided by the standard deviation of its group's other rows (NeMo-RL).
    `batch_ddof`, `batch_eps`: the same as the two `std_` fields, for standard deviations over the batch.
    `batch_floor`: whether `batch_eps` is added to the deviation, added to the variance (verl's whitening), or a floor
    on the variance (OpenRLHF).
    `k1_limit`, `k2_limit`, `k3_limit`: the largest value, in nats, of a token's estimate of the KL to the reference;
    beyond it the token has no gradient. 0 sets no limit (verl, NeMo-RL and OpenRLHF: 10).
    `sequence_mean_eps`: added to a response's token count in sequence_mean, in tokens (verl, NeMo-RL, OpenRLHF).
    `token_mean_scope`: `microbatch` makes token_mean depend on the microbatching (TRL's "bnpo").
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
    k1_limit: float
    k2_limit: float
    k3_limit: float
    sequence_mean_eps: float
    constant_width: Width
    token_mean_scope: Scope
    covariance_scope: Scope

    def __post_init__(self) -> None:
        require_field(self.std_ddof in (0, 1), self, "std_ddof", "0 or 1")
        require_field(self.batch_ddof in (0, 1), self, "batch_ddof", "0 or 1")
        require_not_negative(self, "std_eps", "batch_eps", "sequence_mean_eps", "k1_limit", "k2_limit", "k3_limit")
