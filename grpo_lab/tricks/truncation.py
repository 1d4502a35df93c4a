"""Truncation: what a truncated response, one that the token budget ended, counts for."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from grpo_lab.tricks.base import Trick, require_field, require_positive
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
    """Sets the `counted` and `trained` bits of truncated rows, and may end a response in its own way.

    `intervenes`: how a response goes on depends on more than its text so far. `generates_twice`: asks the sampler again
    for what it has begun.
    """

    removes_rows: ClassVar[bool] = False
    intervenes: ClassVar[bool] = False
    generates_twice: ClassVar[bool] = False

    def check(self, tools: Tools) -> None:
        """Raise ValueError where the run's tokenizer cannot do what this option needs."""

    def begins(self, request: Request, tools: Tools) -> Request:
        """What the sampler is asked first for the response to `request`."""
        return request

    def puts_in(self, request: Request, so_far: Completion, tools: Tools) -> Completion | None:
        """Text behind which the response goes on instead of ending as it has; None where it has ended."""
        return None

    def generate(
        self, sampler: Sampler, requests: Sequence[Request], tools: Tools, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """What the sampler says to these requests, under this option's way of ending responses.

        `on_finish` as in `Sampler.generate`; refused beside options that generate twice.
        """
        assert on_finish is None or not self.generates_twice, "a rule refuses a race beside an interruption"
        found = sampler.generate([self.begins(request, tools) for request in requests], on_finish)
        put_in = {
            place: further
            for place, (request, so_far) in enumerate(zip(requests, found))
            if (further := self.puts_in(request, so_far, tools)) is not None
        }
        if put_in:
            found = [so_far.continued(put_in[p]) if p in put_in else so_far for p, so_far in enumerate(found)]
            onward = [replace(requests[p], prefix=requests[p].prefix + found[p].tokens) for p in put_in]
            for place, further in zip(put_in, sampler.generate(onward)):
                found[place] = found[place].continued(further)
        return found

    def __call__(self, graded: Graded) -> Graded:
        """The record with its row masks set; rewards stay as they are."""
        return graded


@dataclass(frozen=True)
class Score(Truncation):
    """A truncated response is a wrong response: it is counted and trained like any other.

    With q the truncated share, a the accuracy of finished responses and r_T the truncated reward, the
    on-policy, mean-centred pressure on q is (a - r_T)(G - 1)/G under a length-free denominator.
    """

    touches_nothing: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: in the loss and in the statistics, as any other"


@dataclass(frozen=True)
class MaskAfter(Truncation):
    """Leave truncated rows in the group statistics but out of the loss (DAPO code, arXiv:2503.14476).

    trained = trained & ~truncated

    Differs from Score: the pressure against truncation is weaker by the factor q, because only the
    siblings' advantages still feel the truncated rows. The rows in the loss then have a positive mean advantage.
    """

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: m = 0, but counted in the statistics"

    def __call__(self, graded: Graded) -> Graded:
        return replace(graded, trained=graded.trained & ~graded.truncated)


@dataclass(frozen=True)
class MaskBefore(Truncation):
    """Take truncated rows out of the group statistics and of the loss (Skywork-OR1, arXiv:2505.22312).

    counted = counted & ~truncated;  trained = trained & ~truncated

    Differs from MaskAfter: the siblings never see the truncated rows, so under a length-free denominator there
    is no pressure on truncation at all. A group with one row left gets advantage 0.
    """

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "truncated rows: m = 0, and not counted in the statistics"

    def __call__(self, graded: Graded) -> Graded:
        kept = ~graded.truncated
        return replace(graded, counted=graded.counted & kept, trained=graded.trained & kept)


@dataclass(frozen=True)
class Interrupt(Truncation):
    """Force an answer before the budget is used up (interruptions of ScaleRL, arXiv:2510.13786).

    cut ~ U{earliest * max_tokens .. latest * max_tokens};  unfinished after `cut` tokens, it goes on behind `phrase`

    Differs from Score: nearly every response comes to an answer, so few rows are truncated. The injected tokens are
    context and never trained; the row is tagged as interrupted. One that the budget ends all the same is truncated.
    Is Score where the budget has no room for the phrase and a token.
    """

    earliest: float  # share of the budget before an interruption, at least
    latest: float  # and at most
    phrase: str  # what is put in
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
        phrase, version = tools.encode(self.phrase), so_far.weight_versions[-1]
        zeros, everywhere = (0.0,) * len(phrase), (True,) * len(phrase)
        return Completion(phrase, zeros, (version,) * len(phrase), so_far.stop, everywhere)

    def _cut(self, request: Request, tools: Tools) -> int:
        """After how many tokens this response is interrupted: by a number of its own noise, shared by all arms.

        Its whole budget where that has no room for the phrase and one token of an answer.
        """
        drawn = tools.uniform(replace(request.noise, stream=f"{request.noise.stream}/interrupt"))
        first, last = round(self.earliest * self.max_tokens), round(self.latest * self.max_tokens)
        after, phrase = max(1, first + int(drawn * (last - first + 1))), len(tools.encode(self.phrase))
        return after if after + phrase < request.params.max_tokens else request.params.max_tokens


@dataclass(frozen=True)
class RepetitionStop(Truncation):
    """Stop a response that has been sure of itself for too long (MiniMax-M1, arXiv:2506.13585).

    stop after  share * max_tokens  consecutive tokens that were each drawn with probability > `probability`

    A loop is certain of every token, so this saves its generation. The row counts as truncated, that is as wrong.
    Differs from Score only in when such a row ends. A policy that is sure of long right answers loses them too, which
    happens once entropy is low: look at `rollout/stopped`.
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
