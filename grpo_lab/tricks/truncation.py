"""Truncation: how a response cut off at the length limit counts."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.base import Trick
from grpo_lab.types import (
    Completion,
    Graded,
    OnFinish,
    Request,
    Sampler,
    StopReason,
    SureRun,
    Tools,
)


@dataclass(frozen=True)
class Truncation(Trick, ABC):
    """Sets the masks `in_statistics` and `in_loss` of truncated rows, and may change how a response ends.

    `intervenes`: how a response continues depends on more than its text so far. `generates_twice`: calls the sampler a
    second time to continue responses.
    """

    removes_rows: ClassVar[bool] = False
    intervenes: ClassVar[bool] = False
    generates_twice: ClassVar[bool] = False

    def check(self, tools: Tools) -> None:
        """Raise ValueError where the run's tokenizer cannot do what this option needs."""

    def begins(self, request: Request, tools: Tools) -> Request:
        """The first request to the sampler for the response to `request`."""
        return request

    def puts_in(self, request: Request, so_far: Completion, tools: Tools) -> Completion | None:
        """The tokens to inject, after which the response continues; None if the response is over."""
        return None

    def generate(
        self, sampler: Sampler, requests: Sequence[Request], tools: Tools, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """One completion per request, ended in this option's way.

        `on_finish` is as in `Sampler.generate`; options that generate twice refuse it.
        """
        return generate_each([self] * len(requests), sampler, requests, tools, on_finish)

    def __call__(self, graded: Graded) -> Graded:
        """The record with its row masks set; rewards are unchanged."""
        return graded


def generate_each(
    ways: Sequence[Truncation],
    sampler: Sampler,
    requests: Sequence[Request],
    tools: Tools,
    on_finish: OnFinish | None = None,
) -> list[Completion]:
    """One completion per request, ended in its own way of `ways`; one call of the sampler, and one for what goes on."""
    twice = any(way.generates_twice for way in ways)
    assert on_finish is None or not twice, "a rule refuses a race beside an interruption"
    found = sampler.generate([way.begins(request, tools) for way, request in zip(ways, requests)], on_finish)
    put_in = {
        place: further
        for place, (way, request, so_far) in enumerate(zip(ways, requests, found))
        if (further := way.puts_in(request, so_far, tools)) is not None
    }
    if put_in:
        found = [so_far.continued(put_in[p]) if p in put_in else so_far for p, so_far in enumerate(found)]
        onward = [replace(requests[p], prefix=requests[p].prefix + found[p].ids) for p in put_in]
        for place, further in zip(put_in, sampler.generate(onward)):
            found[place] = found[place].continued(further)
    return found


@dataclass(frozen=True)
class Score(Truncation):
    """A truncated response is a wrong response, in the statistics and the loss like any other.

    Let q be the truncated share, a the accuracy of finished responses and r_T the reward of truncated ones. On-policy
    and mean-centred, the pressure on q is (a - r_T)(G - 1)/G under a length-free denominator.
    """

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: in the loss and in the statistics, as any other"


@dataclass(frozen=True)
class MaskAfter(Truncation):
    """Leave truncated rows in the group statistics but out of the loss (DAPO code, arXiv:2503.14476).

    in_loss = in_loss & ~truncated

    Differs from Score: the pressure against truncation is weaker by the factor q, because truncated rows only act on
    the advantages of other rows of the group. The rows in the loss have a positive mean advantage.
    """

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: m = 0, but in the statistics"

    def __call__(self, graded: Graded) -> Graded:
        return replace(graded, in_loss=graded.in_loss & ~graded.truncated)


@dataclass(frozen=True)
class MaskBefore(Truncation):
    """Remove truncated rows from the group statistics and from the loss (Skywork-OR1, arXiv:2505.22312).

    in_statistics = in_statistics & ~truncated;  in_loss = in_loss & ~truncated

    Differs from MaskAfter: truncated rows do not affect the other rows, so under a length-free denominator there is
    no pressure on truncation at all. A group with one row left gets advantage 0.
    """

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: m = 0, and not in the statistics"

    def __call__(self, graded: Graded) -> Graded:
        ended = ~graded.truncated
        return replace(graded, in_statistics=graded.in_statistics & ended, in_loss=graded.in_loss & ended)


@dataclass(frozen=True)
class Interrupt(Truncation):
    """Force an answer before the budget is used up (interruptions of ScaleRL, arXiv:2510.13786).

    cut ~ U{earliest * max_tokens .. latest * max_tokens};  unfinished after `cut` tokens, it goes on behind `phrase`

    Differs from Score: nearly every response reaches an answer, so few rows are truncated. Injected tokens are context
    and never in the loss; the row counts as interrupted. A response that still reaches the budget is truncated. Is
    Score if the budget has no room for the phrase and one more token.
    """

    earliest: float  # earliest interruption, as a share of the budget
    latest: float  # latest interruption, as a share of the budget
    phrase: str  # the injected text
    max_tokens: int  # the run's generation budget, response tokens

    intervenes: ClassVar[bool] = True
    generates_twice: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "unfinished after U({earliest}, {latest}) of {max_tokens} tokens: '{phrase}' is put in, with m = 0"
    )

    def __post_init__(self) -> None:
        require_positive(self, "earliest", "max_tokens")
        require_field(
            self.earliest <= self.latest < 1, self, "latest", f"at least `earliest` ({self.earliest}) and below 1"
        )
        require_field(bool(self.phrase), self, "phrase", "a text that is put into the response")

    def check(self, tools: Tools) -> None:
        tokens, last = len(tools.encode(self.phrase)), round(self.latest * self.max_tokens)
        if not tokens or last + tokens >= self.max_tokens:
            raise ValueError(
                f"the interruption {self.phrase!r} has {tokens} tokens, put in after up to {last} of {self.max_tokens}"
                ": it needs one token at least and must leave room for one more; change template.interruption, "
                "truncation.latest or engine.max_tokens"
            )

    def begins(self, request: Request, tools: Tools) -> Request:
        return replace(request, params=replace(request.params, max_tokens=self._cut(request, tools)))

    def puts_in(self, request: Request, so_far: Completion, tools: Tools) -> Completion | None:
        if so_far.stop is not StopReason.LENGTH or self._cut(request, tools) == request.params.max_tokens:
            return None
        version = int(so_far.weight_versions[-1])
        return Completion.unsampled(tools.encode(self.phrase), so_far.stop, version, injected=True)

    def _cut(self, request: Request, tools: Tools) -> int:
        """After how many tokens to interrupt, by the noise key; the whole budget if phrase and token do not fit."""
        drawn = tools.uniform(replace(request.noise, stream=f"{request.noise.stream}/interrupt"))
        first, last = round(self.earliest * self.max_tokens), round(self.latest * self.max_tokens)
        after, phrase = max(1, first + int(drawn * (last - first + 1))), len(tools.encode(self.phrase))
        return after if after + phrase < request.params.max_tokens else request.params.max_tokens


@dataclass(frozen=True)
class RepetitionStop(Truncation):
    """Stop a response after too many high-probability tokens in a row (MiniMax-M1, arXiv:2506.13585).

    stop after  share * max_tokens  consecutive tokens that were each drawn with probability > `probability`

    In a loop every token is near certain, so this saves generating the rest of it. The row counts as truncated, so as
    wrong. Differs from Score only in when such a row ends. Once entropy is low it also stops long right answers: watch
    `rollout/stopped`.
    """

    share: float  # of the budget
    probability: float
    max_tokens: int  # the run's generation budget, response tokens

    intervenes: ClassVar[bool] = True
    formula: ClassVar[str] = "cut after {share} of {max_tokens} tokens in a row of probability above {probability}"

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")
        require_field(0 < self.share < 1, self, "share", "in (0, 1)")
        require_field(0 < self.probability < 1, self, "probability", "in (0, 1)")

    def begins(self, request: Request, tools: Tools) -> Request:
        sure = SureRun(max(1, round(self.share * self.max_tokens)), self.probability)
        return replace(request, params=replace(request.params, stop_when_sure=sure))
