"""Which published losses, or faults planted in them, have the gradient that a function gave. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from grpo_lab.instruments.loss_check.faults import EMPTY_ROWS, faulty_aggregations
from grpo_lab.instruments.loss_check.inputs import GROUP, IDENTIFIED_BY, MAX_TOKENS
from grpo_lab.instruments.loss_check.published import UNLIMITED, PublishedTables, TokenLoss, Weights, read_tables

# Arguments without which a function cannot compute what an option does.
_READS = {"sampler": "sampler_logprobs", "recomputed": "old_logprobs"}


@dataclass(frozen=True)
class LossAnswer:
    """A loss, and its gradient [N, T] by log-prob, None where only the loss is known."""

    loss: float
    gradient: np.ndarray | None


@dataclass(frozen=True)
class LossMatch:
    """A candidate with the gradient of the function.

    The function is `factor` times the published loss, plus `kl_coef` times a KL penalty where its options have one.
    `distance` is the norm of the rest over that of the function's gradient. `value_differs`: the loss itself is not
    the candidate's. `notes` hold for it and are no faults.
    """

    options: Mapping[str, str]
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    factor: float
    kl_coef: float
    distance: float
    value_differs: bool
    surrogate: TokenLoss
    weights: Weights  # of the surrogate
    penalty: TokenLoss | None
    plain_weights: Weights  # of the penalty: without correction

    @property
    def label(self) -> str:
        return " ".join(f"{axis}={option}" for axis, option in self.options.items())


@cache
def shipped() -> PublishedTables:
    """The shipped tables with the faulty aggregations."""
    tables = read_tables()
    return PublishedTables(
        tables.surrogates, tables.penalties, tables.corrections, [*tables.aggregations, *faulty_aggregations()]
    )


def matches(
    answers: Mapping[str, LossAnswer], reads: Sequence[str], tolerance: float, tables: PublishedTables | None = None
) -> tuple[list[LossMatch], LossMatch]:
    """The candidates that agree, those with fewest faults first, and the nearest candidate of all.

    `reads` are the arguments of the function, which decide the candidates. `tables` are further surrogates. Without
    gradients the losses of single batches are compared. A batch whose answer is not finite is left out.
    """
    known = shipped()
    surrogates = [*(tables.surrogates if tables else ()), *known.surrogates]
    surrogates = [one for one in surrogates if _possible(one.options, reads) and set(IDENTIFIED_BY) <= set(one.values)]
    corrections = [
        one for one in known.corrections if one.options["correction"] == "none" or "sampler_logprobs" in reads
    ]
    references = {"sampler": "sampler_logprobs"}
    penalties: list[TokenLoss | None] = [
        None, *(p for p in known.penalties if references.get(p.options.get("reference", ""), "ref_logprobs") in reads)
    ]  # fmt: skip
    target = _Target(answers)
    found: list[LossMatch] = []
    for surrogate in surrogates:
        allowed = corrections if surrogate.options.get("old_policy") != "sampler" else corrections[:0]
        allowed = allowed or [one for one in corrections if one.options["correction"] == "none"]
        for penalty in penalties:
            found += target.fitted(surrogate, allowed, known.aggregations, penalty, tolerance)
        found = [*[one for one in found if one.distance <= tolerance], *sorted(found, key=_distance)[:1]]
    nearest = min(found, key=_distance)
    agree = [one for one in found if one.distance <= tolerance]
    fewest = min((_rank(one) for one in agree), default=None)
    return sorted([one for one in agree if _rank(one) == fewest], key=lambda one: len(one.options)), nearest


def finite(answer: LossAnswer) -> bool:
    return np.isfinite(answer.loss) and (answer.gradient is None or bool(np.isfinite(answer.gradient).all()))


def _distance(one: LossMatch) -> float:
    return one.distance


def _rank(one: LossMatch) -> tuple[int, bool, bool, int]:
    """Candidates of the least rank are reported; a loss whose value is another is no better than one with a fault."""
    return len(one.faults) + one.value_differs, abs(one.factor - 1) > 1e-3, one.value_differs, len(one.notes)


def _possible(options: Mapping[str, str], reads: Sequence[str]) -> bool:
    policy = options.get("old_policy")
    return policy is None or _READS[policy] in reads


class _Target:
    """The function's gradients on the batches that identify it, or its losses."""

    def __init__(self, answers: Mapping[str, LossAnswer]) -> None:
        usable = [name for name in IDENTIFIED_BY if finite(answers[name])]
        gradients = [answers[name].gradient for name in usable]
        self.by_value = any(one is None for one in gradients)
        self.batches = [*usable, "extreme"] if self.by_value else usable
        self.losses = np.array([answers[name].loss for name in self.batches])
        flat = [self.losses] if self.by_value else [one.ravel() for one in gradients if one is not None]
        self.vector = np.concatenate(flat)
        self.norm = float(np.linalg.norm(self.vector))

    def fitted(
        self,
        surrogate: TokenLoss,
        corrections: Sequence[Weights],
        aggregations: Sequence[Weights],
        penalty: TokenLoss | None,
        tolerance: float,
    ) -> list[LossMatch]:
        """Matches within the tolerance, and the nearest of those beyond it."""
        pairs = [(correction, aggregation) for correction in corrections for aggregation in aggregations]
        columns, values = [], []
        for part, corrected in ((surrogate, True), (penalty, False)):
            if part is None:
                continue
            gradients, losses = [], []
            for batch in self.batches:
                weights = np.stack([_weights(one, batch, corrected) for one in pairs])
                losses.append((weights * part.values[batch]).sum(axis=(1, 2)))
                if not self.by_value:
                    gradients.append(part.gradient(batch, weights).reshape(len(pairs), -1))
            values.append(np.stack(losses, axis=1))
            columns.append(values[-1] if self.by_value else np.concatenate(gradients, axis=1))
        factors = _least_squares(columns, self.vector)
        rest = self.vector - sum(f[:, None] * column for f, column in zip(factors, columns))
        distances = np.linalg.norm(rest, axis=1) / max(self.norm, 1e-300)
        losses = np.sum([f[:, None] * value for f, value in zip(factors, values)], axis=0)
        kept = set(np.flatnonzero(distances <= tolerance)) | {int(np.argmin(distances))}
        found = []
        for place in kept:
            correction, aggregation = pairs[place]
            factor = float(factors[0][place])
            kl_coef = float(factors[1][place]) if penalty else 0.0
            if penalty and (abs(kl_coef) <= 1e-6 * abs(factor) or factor == 0):
                continue
            parts = [surrogate, correction, aggregation, *([penalty] if penalty else [])]
            faults = [one.fault for one in parts if one.fault]
            if kl_coef * factor < 0:
                faults.append("the KL penalty has the wrong sign: it drives the policy from the reference")
            off = np.abs(losses[place] - self.losses).max() > 100 * tolerance * max(np.abs(self.losses).max(), 1e-12)
            options = {axis: option for one in parts for axis, option in one.options.items()}
            both = [
                Weights({}, "", {name: _weights(pairs[place], name, corrected) for name in aggregation.values})
                for corrected in (True, False)
            ]
            found.append(
                LossMatch(
                    options, tuple(one for one in faults if one != EMPTY_ROWS),
                    (EMPTY_ROWS,) * faults.count(EMPTY_ROWS), factor, kl_coef, float(distances[place]), bool(off),
                    surrogate, both[0], penalty, both[1],
                )
            )  # fmt: skip
        return found


def _weights(pair: tuple[Weights, Weights], batch: str, corrected: bool) -> np.ndarray:
    correction, aggregation = pair
    return aggregation.values[batch] * (correction.values[batch] if corrected else 1.0)


def _least_squares(columns: Sequence[np.ndarray], target: np.ndarray) -> list[np.ndarray]:
    """For each candidate the factors [K] of one or two columns [K, D] that bring them nearest to the target [D]."""
    inner = [[np.einsum("kd,kd->k", a, b) for b in columns] for a in columns]
    onto = [column @ target for column in columns]
    if len(columns) == 1:
        return [onto[0] / np.maximum(inner[0][0], 1e-300)]
    determinant = inner[0][0] * inner[1][1] - inner[0][1] ** 2
    determinant = np.where(determinant > 1e-12 * inner[0][0] * inner[1][1], determinant, np.inf)
    return [
        (onto[0] * inner[1][1] - onto[1] * inner[0][1]) / determinant,
        (onto[1] * inner[0][0] - onto[0] * inner[0][1]) / determinant,
    ]


def beyond_limits(match: LossMatch) -> dict[str, np.ndarray]:
    """The gradient on the extreme batch, by how the log-ratio is limited."""
    weights, surrogate = match.weights.values["extreme"][None], match.surrogate
    found = {"limited to 20 nats": surrogate.gradient("extreme", weights)[0]}
    own = dict(surrogate.options)
    if own.get("importance") == "token" and not surrogate.fault:
        own["importance"] = UNLIMITED
        for other in shipped().surrogates:
            if other.options == own:
                found["not limited"] = other.gradient("extreme", weights)[0]
    kl = 0.0
    if match.penalty is not None:
        kl = match.kl_coef * match.penalty.gradient("extreme", match.plain_weights.values["extreme"][None])[0]
    return {name: match.factor * gradient + kl for name, gradient in found.items()}


def factor_text(factor: float, rows: int) -> str:
    """A constant factor, and the number that it probably is."""
    names = {
        -1: "sign flipped: the optimiser would make the objective smaller", GROUP: "the group size: divided by groups, "
        "not by rows", 1 / GROUP: "1 / the group size", MAX_TOKENS: "max_tokens", 1 / MAX_TOKENS: "1 / max_tokens",
        0.5: "one half", 2: "twice", _STD: "the standard deviation of the group's rewards: they are not divided by it",
        np.sqrt((GROUP - 1) / GROUP): "standard deviations with n - 1 in the denominator",
        _STD * GROUP / (GROUP - 1): "leave-one-out baseline, not divided by a standard deviation",
    }  # fmt: skip
    for number, name in names.items():
        for sign, prefix in ((1, ""), (-1, "sign flipped, and ")):
            if abs(factor - sign * number) < 2e-4 * abs(number):
                return f"{factor:.6g} ({prefix}{name})" if number != -1 or sign == 1 else f"{factor:.6g}"
    return f"{factor:.6g}" + (" (sign flipped)" if factor < 0 else "")


_STD = float(np.std([1.0, 0.0, 0.7, -0.1]))
