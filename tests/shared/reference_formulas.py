"""The formulas of the published methods written out a second time, for one response after another: rewards and losses.

Nothing here calls an option's own code: an option is known by the name of its class and gives its numbers alone. Values
of tokens are one-dimensional float64 tensors [T] of one response, whatever else the batch holds. An option that has no
formula here is a KeyError with its name: add one line to the table of its axis. See reference_advantages.py too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64


@dataclass
class Response:
    """One response, and what the stages of a step find out about it; `[T]` counts its own tokens, injected too."""

    group: int  # place of its problem in the batch
    problem: int
    prompt: list[int]
    tokens: list[int]
    sampled: Tensor  # [T], bool: False where text was put in
    sampler: Tensor  # [T]
    stamps: list[int]  # the weights that drew each token
    version: int  # the learner's before this step
    finished: bool
    right: bool
    wanted: int | None  # tokens the prompt asked for
    reward: float
    progress: float  # share of the budget that was spent when its problem was drawn
    parts: dict[str, float] = field(default_factory=dict)  # components of the reward, none of which holds a weight
    counted: bool = True  # in the statistics
    trained: bool = True  # in the loss
    prox: Tensor | None = None  # [T], the learner before the updates
    ref: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    weight: Tensor | None = None  # [T], the correction's
    stays: Tensor | None = None  # [T], bool: sampled, and not rejected
    charges: Tensor | None = None  # [T], what the reward is charged
    collision: Tensor | None = None  # [T], the squared probabilities of the learner before the updates, summed
    centred: float | Tensor = 0.0  # one number, or one a token
    target: Tensor | None = None  # [T], what the critic learns, where it is not centred + values
    advantages: Tensor | None = None
    in_loss: Tensor | None = None  # [T], bool


Rows = Sequence[Response]


def groups_of(rows: Rows) -> list[list[Response]]:
    """The responses of each problem."""
    found: dict[int, list[Response]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return list(found.values())


def formula(table: dict[str, Any], option: object) -> Any:
    """What stands under the option's name."""
    name = type(option).__name__
    if name not in table:
        raise KeyError(f"the reference loop has no formula for {name}: write it in tests/shared/reference_formulas.py")
    return table[name]


# --- rewards ------------------------------------------------------------------------------------------------


def _overlong(o: Any, row: Response) -> float:
    largest = o.factor * (o.correct - o.wrong) / 2
    return -largest * min(max((len(row.tokens) - (o.max_tokens - o.cache_tokens)) / o.cache_tokens, 0), 1)


def _backward(o: Any, row: Response) -> float:
    called = float(row.right)
    corrected = (called - o.false_positive_rate) / (1 - o.false_positive_rate - o.false_negative_rate)
    return (o.correct - o.wrong) * (corrected - called)


def _kimi_length(o: Any, group: Rows) -> list[float]:
    lengths = [len(row.tokens) for row in group]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest or group[0].progress < o.begins_at:
        return [0.0] * len(group)
    places = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [o.coef * (place if row.right else min(place, 0)) for place, row in zip(places, group)]


def _unlikeliness(o: Any, group: Rows) -> list[float]:
    """The likeliest of G loses beta (G - 1) / G of its reward, the least likely nothing."""
    chance = [float(row.sampler[row.sampled].sum()) for row in group]
    ranks = [1 + sum(other > own + 1e-4 for other in chance) for own in chance]
    size = len(group)
    return [-o.beta * (size - rank) / size * row.reward * row.right for rank, row in zip(ranks, group)]


# What is added to the rewards of a group.
SHAPING: dict[str, Callable[[Any, Rows], list[float]]] = {
    "NoShaping": lambda o, group: [0.0] * len(group),
    "SoftOverlong": lambda o, group: [_overlong(o, row) for row in group],
    "SoftOverlongCorrectOnly": lambda o, group: [_overlong(o, row) if row.right else 0.0 for row in group],
    "BackwardCorrection": lambda o, group: [_backward(o, row) for row in group],
    "KimiLength": _kimi_length,
    "Unlikeliness": _unlikeliness,
    "L1Exact": lambda o, group: [-o.alpha * abs(row.wanted - len(row.tokens)) for row in group],
    "L1Max": lambda o, group: [
        min(max(o.alpha * (row.wanted - len(row.tokens)) + o.delta, 0), 1) - 1 if row.right else 0.0 for row in group
    ],
}

# Whether a response that the budget cut is counted, and whether it is trained.
TRUNCATION = {
    "Score": (True, True),
    "Interrupt": (True, True),
    "RepetitionStop": (True, True),
    "MaskAfter": (True, False),
    "MaskBefore": (False, False),
}


def _drop(o: Any, group: Rows) -> bool:
    return len({row.right if o.signal.value == "outcome" else row.reward for row in group if row.counted}) > 1


# Whether a group stays in the batch; what refills has done so before the step.
FILTER: dict[str, Callable[[Any, Rows], bool]] = dict.fromkeys(
    ("Keep", "Resample", "Active", "OversampleAbort"), lambda o, group: True
) | {"Drop": _drop}


# --- sampler against learner: `gap` = log rho of the sampled tokens -------------------------------------------


def _k3(gap: Tensor) -> Tensor:
    return gap.exp() - 1 - gap


def _masked(o: Any, ratio: Tensor) -> Tensor:
    return torch.where((ratio >= o.low) & (ratio <= o.high), ratio, torch.zeros_like(ratio))


CORRECTION: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "NoCorrection": lambda o, gap: torch.ones_like(gap),
    "TisToken": lambda o, gap: gap.exp().clamp(o.floor, o.cap),
    "TisSequence": lambda o, gap: gap.sum().exp().clamp(max=o.cap).expand_as(gap),
    "TisGeometric": lambda o, gap: gap.mean().exp().clamp(max=o.cap).expand_as(gap),
    "Mis": lambda o, gap: _masked(o, gap.sum().exp()).expand_as(gap),
    "Icepop": lambda o, gap: _masked(o, gap.exp()),
}

_REDUCED = {
    "Token": lambda values: values,
    "SequenceSum": lambda values: values.sum().expand_as(values),
    "SequenceMean": lambda values: values.mean().expand_as(values),
    "SequenceMax": lambda values: values.max().expand_as(values),
}
_REJECTED_BY = {"K2": lambda gap: gap**2 / 2, "K3": _k3}


def _bernoulli_kl(mu: Tensor, pi: Tensor) -> Tensor:
    return torch.distributions.kl_divergence(torch.distributions.Bernoulli(mu), torch.distributions.Bernoulli(pi))


def _binary_kl(o: Any, mu: Tensor, pi: Tensor) -> Tensor:
    found = {"sampler_to_old": _bernoulli_kl(mu, pi), "old_to_sampler": _bernoulli_kl(pi, mu)}
    return torch.stack(list(found.values()) if o.direction.value == "either" else [found[o.direction.value]]).amax(0)


_BY_PROBABILITIES = {"Tv": lambda o, mu, pi: (mu - pi).abs(), "BinaryKl": _binary_kl}


def stays(option: Any, gap: Tensor, sampler: Tensor) -> Tensor:
    """Which of the sampled tokens a rejection leaves, by their log rho and the sampler's log-probs."""
    name = type(option).__name__
    if name == "NoRejection":
        return torch.ones_like(gap, dtype=torch.bool)
    if name == "AllOf":
        return torch.stack([stays(member, gap, sampler) for member in option.members.values()]).all(dim=0)
    if name == "SequenceOutlier":
        assert option.bounds.value == "ratio"
        ratio = gap.exp()
        return torch.full_like(gap, bool(ratio.min() >= option.low and ratio.max() <= option.high), dtype=torch.bool)
    for end, estimated in _BY_PROBABILITIES.items():
        if name.endswith(end):
            values = estimated(option, sampler.exp(), (sampler + gap).exp())
            return _REDUCED[name.removesuffix(end)](values) <= option.bound
    reduced, estimate = _REDUCED[name[:-2]], name[-2:]
    if estimate == "K1":
        assert option.bounds.value == "ratio", "verl's inverse bounds are tested in test_conventions.py"
        ratio = reduced(gap).exp()
        return (ratio >= option.low) & (ratio <= option.high)
    return reduced(_REJECTED_BY[estimate](gap)) <= option.bound


# --- credit of tokens -----------------------------------------------------------------------------------------


def _gtpo(o: Any, rows: Rows) -> list[Tensor]:
    found = []
    for row in rows:
        h = -row.prox if o.by.value == "surprisal" else row.entropy
        relative = h / h[row.in_loss].mean() if row.in_loss.any() else torch.ones_like(h)
        found.append(row.advantages * torch.relu(1 - o.beta + o.beta * relative))
    return found


def _clip_b(o: Any, rows: Rows) -> list[Tensor]:
    each = [row.prox.exp() * (row.entropy + row.prox) for row in rows]
    batch = torch.cat([values[row.in_loss] for values, row in zip(each, rows)])
    bound = batch.mean() - o.mu * batch.std(correction=0)
    return [
        torch.where((values < bound) & (row.advantages < 0), 0.0, row.advantages) for values, row in zip(each, rows)
    ]


# The advantages of the tokens of each response of a batch, from those that the scale gives.
TOKEN_CREDIT: dict[str, Callable[[Any, Rows], list[Tensor]]] = {
    "NoTokenCredit": lambda o, rows: [row.advantages for row in rows],
    "GtpoWeight": _gtpo,
    "ProbabilityWeight": lambda o, rows: [row.advantages * (1 - o.alpha * (1 - row.prox.exp())) for row in rows],
    "EntropyAdvantage": lambda o, rows: [
        row.advantages + torch.minimum(o.alpha * row.entropy, row.advantages.abs() / o.kappa) for row in rows
    ],
    "ClipB": _clip_b,
}


# --- loss -----------------------------------------------------------------------------------------------------


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return values[mask].mean().expand_as(values)


# The log-ratio of each token from log-probs now and before, and the tokens of the loss.
IMPORTANCE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Token": lambda now, old, mask: now - old,
    "Sequence": lambda now, old, mask: _mean(now - old, mask),
    "SequenceToken": lambda now, old, mask: _mean(now - old, mask).detach() + now - now.detach(),
    "SequenceProduct": lambda now, old, mask: (now - old)[mask].sum().detach() + now - now.detach(),
}


def _ppo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    ratio = log_r.exp()
    return -torch.minimum(ratio * a, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * a)


def _dual_clip(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    single = _ppo(o, now, log_r, a, mask, marked)
    return torch.where(a < 0, torch.minimum(single, -o.bound * a), single)


def _cispo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    cap = o.cap if o.cap_form.value == "absolute" else 1 + o.cap
    return -log_r.exp().clamp(1 - o.clip_low, cap).detach() * a * now


def _sapo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    tau = torch.where(a > 0, o.tau_positive, o.tau_negative)
    return -4 / tau * torch.sigmoid(tau * (log_r.exp() - 1)) * a


def _gmpo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    """The geometric mean over the response of ratios that PPO's minimum cuts in log space."""
    sign = a.sign()
    cut = sign * torch.minimum(sign * log_r, sign * log_r.clamp(-o.clip_low, o.clip_high))
    return -_mean(cut, mask).exp() * a


def _dppo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    p, before = now.detach().exp(), (now - log_r).detach().exp()
    if o.divergence.value == "tv":
        moved = (p - before).abs()
    else:
        moved = before * (before / p).log() + (1 - before) * ((1 - before) / (1 - p)).log()
    keep = ~((moved > o.delta) & (a * (p - before) > 0))
    return -(log_r.exp().clamp(max=o.cap) * keep).detach() * a * now


def _kimi(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    """tau / 2 times the square of the response's log-ratio, a share of it on each of its tokens."""
    return -a * now + o.tau / 2 * log_r[mask].sum() ** 2 / int(mask.sum())


def _topr(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    return -torch.where(a < 0, log_r.exp().clamp(max=1), torch.ones_like(a)).detach() * a * now


def _clip_cov(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor) -> Tensor:
    clipped = _ppo(o, now, log_r, a, mask, marked)
    return torch.where(marked, clipped.detach(), clipped)


def _kl_cov(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor) -> Tensor:
    return -log_r.exp() * a + torch.where(marked & (log_r.abs() > 1e-5), o.coef * log_r.abs(), torch.zeros_like(a))


def _ipo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    keep = ((now.exp() - (now - log_r).exp()).abs() <= o.eps).detach()
    return -(keep * log_r.exp()) * a + o.kl_tau * log_r.square()


def _ratio_mask(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    ratio = log_r.exp().detach()
    return -ratio * (ratio - 1 <= o.clip_high) * (1 - ratio <= o.clip_low) * a * now


def _kimi_token(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    kept = ((log_r >= math.log1p(-o.clip_low)) & (log_r <= math.log1p(o.clip_high))).detach()
    return torch.where(kept, -log_r.exp() * a, torch.zeros_like(a)) + o.kl_tau * log_r.square()


def _sppo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    inside = log_r.detach().abs() <= torch.tensor(1 + o.clip).double().log()
    return -a * log_r * inside


def _rec(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    """How far the advantage has pushed a token; its sign is lost where the advantage is 0, and so is the loss."""
    ratio = log_r.exp().detach()
    pushed = (ratio - 1) * a.sign()
    keep = pushed <= o.clip
    if hasattr(o, "far"):
        keep = ((ratio - 1).abs() <= o.clip) | (pushed <= -o.far)
    return -(ratio if o.weight.value == "ratio" else 1) * keep * a * now


def _vespo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    """The density of a gamma distribution at the ratio, divided by that at 1."""
    rises = a >= 0
    k, lam = torch.where(rises, o.k_positive, o.k_negative), torch.where(rises, o.lam_positive, o.lam_negative)
    ratio = log_r.detach().exp().clamp(1e-8)
    return -(ratio**k * (lam - lam * ratio).exp()) * a * now


def _fipo(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor | None) -> Tensor:
    places = torch.arange(len(now))
    apart = (places[None] - places[:, None]).double()  # how far ahead each column is of each row
    decay = torch.where(apart >= 0, 2 ** (-apart / o.half_life), 0.0) * mask[None]
    weight = (decay @ log_r.detach()).exp()
    wary = (a < 0) & (log_r.exp() > o.safe_ratio)
    weight = weight.clamp(1 - o.low, 1 + o.high)
    weight = torch.where(wary, weight.clamp(1 - o.safe_low, 1), weight)
    return weight * _ppo(o, now, log_r, a, mask, marked)


def _m2po(o: Any, now: Tensor, log_r: Tensor, a: Tensor, mask: Tensor, marked: Tensor) -> Tensor:
    loss = -log_r.exp() * a
    return torch.where(marked, loss.detach(), loss)


# The loss of each token from log-probs, log-ratio, advantages, tokens of the loss, and those the option marked.
SURROGATE: dict[str, Callable[..., Tensor]] = {
    "Reinforce": lambda o, now, log_r, a, mask, marked: -a * now,
    "Ppo": _ppo,
    "DualClip": _dual_clip,
    "Cispo": _cispo,
    "Sapo": _sapo,
    "Gmpo": _gmpo,
    "Dppo": _dppo,
    "Kimi": _kimi,
    "Topr": _topr,
    "Delight": lambda o, now, log_r, a, mask, marked: -(a / (1 + (a * now / o.eta).exp())).detach() * now,
    "ClipCov": _clip_cov,
    "KlCov": _kl_cov,
    "Ipo": _ipo,
    "RatioMask": _ratio_mask,
    "KimiToken": _kimi_token,
    "Sppo": _sppo,
    "RecOneSide": _rec,
    "RecRing": _rec,
    "Vespo": _vespo,
    "Dro": lambda o, now, log_r, a, mask, marked: -a * now + o.beta / 2 * log_r.square(),
    "Fipo": _fipo,
    "M2po": _m2po,
}


def _covariance(now: Tensor, a: Tensor) -> Tensor:
    return (now - now.mean()) * (a - a.mean())


def _marked_by_clip_cov(o: Any, now: Tensor, ratio: Tensor, a: Tensor, noise: Tensor) -> Tensor:
    value = _covariance(now, a)
    clipped = ((a > 0) & (ratio > 1 + o.clip_high)) | ((a < 0) & (ratio < 1 - o.clip_low))
    open_to_it = (~clipped & (value > o.cov_low) & (value < o.cov_high)).nonzero().flatten().tolist()
    number = max(1, int(o.share * len(value)))
    return torch.tensor(sorted(open_to_it, key=lambda place: noise[place])[:number], dtype=torch.long)


def _marked_by_kl_cov(o: Any, now: Tensor, ratio: Tensor, a: Tensor, noise: Tensor) -> Tensor:
    # Among equals, as where no token has an advantage, the first.
    return _covariance(now, a).sort(descending=True, stable=True).indices[: max(1, int(o.share * len(now)))]


def _marked_by_m2po(o: Any, now: Tensor, ratio: Tensor, a: Tensor, noise: Tensor) -> Tensor:
    moved = ratio.log() ** 2
    left = (((a > 0) & (ratio > 1)) | ((a < 0) & (ratio < 1))).nonzero().flatten().tolist()
    dropped = list[int]()
    while left and float(moved[left].mean()) > o.bound:
        dropped.append(max(left, key=lambda place: float(moved[place])))
        left.remove(dropped[-1])
    return torch.tensor(dropped, dtype=torch.long)


# Places of the tokens that a surrogate chooses among all tokens of an optimiser step's loss.
MARKS = {"ClipCov": _marked_by_clip_cov, "KlCov": _marked_by_kl_cov, "M2po": _marked_by_m2po}


def _opsm(o: Any, now: Tensor, sampler: Tensor, a: Tensor) -> Tensor:
    return (a >= 0) | ((sampler.sum() - now.sum()) / len(now) <= o.delta)


def _vaco(o: Any, now: Tensor, sampler: Tensor, a: Tensor) -> Tensor:
    rho = (now - sampler).exp()
    return torch.tensor([(rho - 1).abs().mean() <= o.delta or (r - 1) * own <= 0 for r, own in zip(rho, a)])


def _cppo(o: Any, now: Tensor, sampler: Tensor, a: Tensor) -> Tensor:
    """Algorithm 1 of the paper, one token after another."""
    apart, number, keep = (now.exp() - sampler.exp()).abs(), len(now), list[bool]()
    ranked = apart.sort().values
    lower = int(0.9 * (number - 1))
    high = ranked[min(lower + 1, number - 1)]
    quantile = ranked[lower] + (0.9 * (number - 1) - lower) * (high - ranked[lower])
    budget = min(max(float(quantile), o.budget), o.largest_budget)
    spent = weights = 0.0
    for place in range(number):
        weight = 1 - (1 - o.floor) * place / (number - 1) if number > 1 else 1.0
        own = weight * float(apart[place])
        returns = float(a[place] * (now[place] - sampler[place])) <= 0
        keep.append(returns or own <= min(o.delta, o.delta + budget * weights - spent))
        spent, weights = spent + own, weights + weight
    return torch.tensor(keep)


# Which tokens of a response's loss keep it in an update, by log-probs now and of the sampler, and by advantages.
UPDATE_MASK: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "NoUpdateMask": lambda o, now, sampler, a: torch.ones_like(now, dtype=torch.bool),
    "Opsm": _opsm,
    "Vaco": _vaco,
    "Cppo": _cppo,
}

# The penalty of each token from log-probs now, of the old policy and of the reference.
KL: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "K2Loss": lambda o, now, old, ref: o.kl_coef / 2 * (now - ref) ** 2,
    "K3Loss": lambda o, now, old, ref: o.kl_coef * ((ref - now).exp() - (ref - now) - 1),
    "K3Unbiased": lambda o, now, old, ref: o.kl_coef * (now - old).exp() * ((ref - now).exp() - (ref - now) - 1),
    "AdaptiveK3Loss": lambda o, now, old, ref: o.kl_coef * ((ref - now).exp() - (ref - now) - 1),
} | dict.fromkeys(("NoKl", "K1Reward", "AdaptiveK1Reward"), lambda o, now, old, ref: torch.zeros_like(now))

# What each token is charged in the reward, from log-probs of the old policy and of the reference.
CHARGES = dict.fromkeys(("K1Reward", "AdaptiveK1Reward"), lambda o, old, ref: -o.kl_coef * (old - ref))

# The term of each token from its entropy, with gradient, and the coefficient of the step.
ENTROPY: dict[str, Callable[[Tensor, float], Tensor]] = {
    "NoEntropy": lambda entropy, coef: torch.zeros_like(entropy),
    "HighEntropyTokens": lambda entropy, coef: torch.zeros_like(entropy),
    "PositiveNll": lambda entropy, coef: torch.zeros_like(entropy),  # it has a mean of its own
    "Bonus": lambda entropy, coef: -coef * entropy,
    "Adaptive": lambda entropy, coef: -max(coef, 0.0) * entropy,
}


def _sign(row: Response) -> float:
    """Of the one advantage that all tokens of a response have in the loss; 0 for a response outside the loss."""
    advantages = row.advantages[row.in_loss]
    return float(advantages[0].sign()) if len(advantages) else 0.0


def token_weights(option: Any, rows: Rows, counts: Sequence[int]) -> list[float]:
    """What each token of a response weighs in the loss of an optimiser step whose responses count so many tokens."""
    number = sum(count > 0 for count in counts)
    of_group: dict[int, int] = {}
    for row, count in zip(rows, counts):
        of_group[row.group] = of_group.get(row.group, 0) + count
    groups = sum(count > 0 for count in of_group.values())
    assert getattr(option, "scope", None) is None or option.scope.value == "step"

    def of_its_side(row: Response, count: int) -> float:
        """Share of the side in the group's responses, divided by the side's tokens and the groups."""
        group = [(other, own) for other, own in zip(rows, counts) if other.group == row.group and own]
        side = [own for other, own in group if _sign(other) == _sign(row)]
        return len(side) / len(group) / sum(side) / groups

    weights = {
        "Balanced": of_its_side,
        "SequenceMean": lambda row, count: 1 / (number * (count + option.eps)),
        "TokenMean": lambda row, count: 1 / sum(counts),
        "PromptMean": lambda row, count: 1 / (groups * of_group[row.group]),
        "Constant": lambda row, count: 1 / (number * option.max_tokens),
        "SequenceSum": lambda row, count: 1 / number,
    }
    weight = formula(weights, option)
    return [weight(row, count) if count else 0.0 for row, count in zip(rows, counts)]
