"""KL: the tie to the reference policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lab.tricks.base import Trick, require_positive


@dataclass(frozen=True)
class Kl(Trick, ABC):
    """A penalty per token, added to the token's loss and aggregated with it."""

    needs_reference: ClassVar[bool]

    @abstractmethod
    def __call__(
        self, logprobs: Float[Tensor, "M T"], ref_logprobs: Float[Tensor, "M T"] | None
    ) -> Float[Tensor, "M T"]:
        """Coefficient times estimate, with gradient through `logprobs`."""


@dataclass(frozen=True)
class NoKl(Kl):
    """No tie to the reference, which is then never loaded."""

    touches_nothing: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False

    def __call__(
        self, logprobs: Float[Tensor, "M T"], ref_logprobs: Float[Tensor, "M T"] | None
    ) -> Float[Tensor, "M T"]:
        return torch.zeros_like(logprobs)


@dataclass(frozen=True)
class K3Loss(Kl):
    """Schulman's k3 estimate as a loss term (GRPO, arXiv:2402.03300, eq. 4).

    x = ref / pi;  penalty = kl_coef * (x - log x - 1)

    Never negative and, as a value under the learner's own samples, unbiased for KL(pi || ref). As a loss
    its expected gradient is that of the forward KL(ref || pi), not of the reverse one.
    Differs: the log-ratio is limited to +-log_ratio_limit, since exp() of it overflows in fp32 beyond 88.
    """

    kl_coef: float
    log_ratio_limit: float  # nats

    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "kl_coef", "log_ratio_limit")

    def __call__(
        self, logprobs: Float[Tensor, "M T"], ref_logprobs: Float[Tensor, "M T"] | None
    ) -> Float[Tensor, "M T"]:
        assert ref_logprobs is not None, "needs_reference makes the loop compute them"
        log_x = (ref_logprobs - logprobs).clamp(-self.log_ratio_limit, self.log_ratio_limit)
        return self.kl_coef * (log_x.exp() - log_x - 1)
