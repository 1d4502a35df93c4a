"""Baselines that remember the rewards of earlier steps, and so need no group.

Their memory is the run's: see `Trick.first_memory` in base.py. They use it before they change it, so a row's baseline
never contains its own reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.base import row_mean
from grpo_lab.tricks.baseline import Credit, CreditBaseline
from grpo_lab.types import Float, Graded, Rollouts, Tensor


@dataclass(frozen=True)
class Ema(CreditBaseline):
    """Subtract a moving average of all earlier rewards (RAE of SPIRAL, arXiv:2506.24119).

    for the rows of the batch in order:  centred = reward - b;  b <- decay * b + (1 - decay) * reward,  from b = 0

    Needs no group: with one agent it is REINFORCE with a moving average. As in prime-rl a row is centred on the average
    of the rows before it, those of its own batch too, and each source of a mixture has an average of its own, where
    SPIRAL has one for each game and role. Differs from prime-rl: the averages are in the checkpoint, so a resumed run
    does not start from 0 again. Rows out of the statistics get 0 and move no average.
    """

    decay: float

    formula: ClassVar[str] = "R - b of the question's source; then b = {decay} * b + (1 - {decay}) * R, row by row"

    def __post_init__(self) -> None:
        require_field(0 <= self.decay < 1, self, "decay", "in [0, 1)")

    def first_memory(self, measured: dict[int, tuple[int, int]]) -> dict[str, Any]:
        return {"average": {}}  # by source

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "P G"]:
        averages, centred = credit.memory["average"], torch.zeros_like(graded.reward)
        for place, problem in enumerate(credit.rollouts.problems):
            for row in graded.in_statistics[place].nonzero().flatten().tolist():
                average, reward = averages.get(problem.source, 0.0), float(graded.reward[place, row])
                centred[place, row] = reward - average
                averages[problem.source] = self.decay * average + (1 - self.decay) * reward
        return centred


@dataclass(frozen=True)
class ValueTracker(CreditBaseline):
    """Subtract a running estimate of each problem's reward, which forgets as the policy drifts (SPO, arXiv:2509.13232).

    centred = reward - v,  v = a / (a + b) of the problem;  then  a <- rho * a + reward;  b <- rho * b + 1 - reward
    rho = clip(2^(-D / half_life), low, high),  D = mean over tokens of |learner's log-prob now - sampler's then|

    Needs no group, and a group of equal rewards keeps its signal. D compares the learner before the step's updates with
    the policy that sampled the problem's last responses, on these: one more forward pass over them, none where low =
    high. It is 0 at the first visit, and a sampler of lower precision adds its rounding. v is a weighted mean of the
    problem's rewards, whatever their range; the start takes it to be from 0 to 1.

    It starts at a + b = 1 / (1 - low) and v = (right + 1/2) / (graded + 1) of the base model's responses where
    pass_rate measured them, and at a = b = 1/2 elsewhere, as verl's recipe does. That recipe compares the policies
    after the updates of the two visits instead, and has one response a visit; here a visit adds all rows of the group
    in the statistics and forgets once. The paper whitens advantages over the batch: scale=batch_std with
    scale.recentre=true. A problem that never comes back has only its start: choose a training split that the run passes
    over several times.
    """

    half_life: float  # nats per token
    low: float
    high: float

    formula: ClassVar[str] = (
        "R - a / (a + b) of the question; then a = rho * a + R, b = rho * b + 1 - R, "
        "rho = clip(2^(-D / {half_life}), {low}, {high}), D the drift of logp since its last visit"
    )

    def __post_init__(self) -> None:
        require_positive(self, "half_life")
        for name in ("low", "high"):
            require_field(0 <= getattr(self, name) < 1, self, name, "in [0, 1)")
        require_field(self.low <= self.high, self, "high", f"at least `low` ({self.low:g})")

    @property
    def scores_past(self) -> bool:
        return self.low < self.high

    def first_memory(self, measured: dict[int, tuple[int, int]]) -> dict[str, Any]:
        """By problem id: a and b as they are after its latest visit, and the responses of that visit."""
        memory: dict[str, Any] = {"a": {}, "b": {}, "visit": {}}
        for problem, (right, graded) in measured.items():
            if graded:
                memory["a"][problem] = (right + 0.5) / (graded + 1) / (1 - self.low)
                memory["b"][problem] = (graded - right + 0.5) / (graded + 1) / (1 - self.low)
        return memory

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "P G"]:
        memory, rollouts = credit.memory, credit.rollouts
        drift = _drift(credit) if self.scores_past else {}
        centred = torch.zeros_like(graded.reward)
        for place, problem in enumerate(rollouts.problems):
            rows = graded.in_statistics[place]
            if not rows.any():
                continue
            a, b = memory["a"].get(problem.id, 0.5), memory["b"].get(problem.id, 0.5)
            reward = graded.reward[place]
            centred[place] = torch.where(rows, reward - a / (a + b), 0.0)
            rho = min(max(2 ** (-drift.get(problem.id, 0.0) / self.half_life), self.low), self.high)
            memory["a"][problem.id] = rho * a + float(reward[rows].sum())
            memory["b"][problem.id] = rho * b + float((1 - reward[rows]).sum())
            if self.scores_past:
                memory["visit"][problem.id] = _kept(rollouts.choose([place]))
        return centred


def _drift(credit: Credit) -> dict[int, float]:
    """D of each problem of the batch that was visited before, by its id."""
    visits = credit.memory["visit"]
    known = [problem for problem in credit.rollouts.problems if problem.id in visits]
    if not known:
        return {}
    past = Rollouts.join([Rollouts(problems=(problem,), **visits[problem.id]) for problem in known])
    assert credit.learner_logprobs is not None, "the loop scores responses"
    now, then = (values.double() for values in (credit.learner_logprobs(past), past.sampler_logprobs))
    rows = row_mean((now - then).abs(), past.sampled_mask).reshape(len(known), -1)
    return {problem.id: drift for problem, drift in zip(known, rows.mean(dim=1).tolist())}


def _kept(group: Rollouts) -> dict[str, Any]:
    """One problem's responses as plain values and tensors of their own, from which `Rollouts` is made again."""
    width = max(1, int(group.lengths.max()))
    kept = {name: value for name, value in vars(group).items() if name != "problems"}
    return {
        name: value[:, :width].clone() if isinstance(value, torch.Tensor) and value.ndim == 2 else value
        for name, value in kept.items()
    }
