"""One engine on each rank: every call of `generate` is divided among them, and every rank gets all completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_lab.distributed import ranks
from grpo_lab.engines.base import EngineSession
from grpo_lab.types import Completion, OnFinish, Request, Tensor


def divided(session: EngineSession, ranks_a_model: int) -> EngineSession:
    """The session itself with one rank; else one that answers for all of them.

    `ranks_a_model` neighbouring ranks hold one model together, and are asked the same.
    """
    return session if ranks.number() == 1 else DividedSession(session, ranks_a_model)


class DividedSession(EngineSession):
    """This rank's engine, which answers its part of each call. A response does not depend on who samples it."""

    def __init__(self, session: EngineSession, ranks_a_model: int) -> None:
        self.session, self.ranks_a_model = session, ranks_a_model
        self.version = session.version

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        assert on_finish is None, "the rules refuse what watches the end of single responses"
        team, teams = ranks.rank() // self.ranks_a_model, ranks.number() // self.ranks_a_model
        start, stop = (place * len(requests) // teams for place in (team, team + 1))
        found = ranks.gathered(self.session.generate(requests[start:stop]) if start < stop else [])
        return [one for part in found[:: self.ranks_a_model] for one in part]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.session.update_weights(weights, version)
        self.version = version

    def close(self) -> None:
        self.session.close()
