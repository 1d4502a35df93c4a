"""The formulas of baselines and scales written out a second time; see reference_formulas.py.

Where tokens are what counts once in a statistic, a token counts if it was sampled and no rejection threw it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import torch
from reference_formulas import F64, Response, Rows, groups_of
from torch import Tensor


def _counted(rows: Rows) -> list[Response]:
    return [row for row in rows if row.counted]


def _tokens(row: Response) -> int:
    """A token counts once if it was sampled and stays."""
    return int(row.stays.sum())


def _all_equal(rows: Rows) -> bool:
    return len({row.reward for row in rows}) <= 1


def _less(rows: Rows, weights: Sequence[float]) -> None:
    """Subtract the weighted mean of the rewards, unless they are all equal."""
    if _all_equal(rows) or sum(weights) == 0:
        return
    mean = sum(weight * row.reward for weight, row in zip(weights, rows)) / sum(weights)
    for row in rows:
        row.centred = row.reward - mean


def _of_groups(centre: Callable[[Any, list[Response]], None]) -> Callable[..., None]:
    def each(o: Any, rows: Rows, given: Any) -> None:
        assert getattr(o, "singleton", None) is None or o.singleton.value == "zero"
        for group in groups_of(rows):
            if counted := _counted(group):
                centre(o, counted)

    return each


def _of_batch(o: Any, rows: Rows, given: Any) -> None:
    counted = _counted(rows)
    _less(counted, [_tokens(row) if o.by.value == "tokens" else 1 for row in counted])


def _leave_one_out(o: Any, group: list[Response]) -> None:
    for row in group if not _all_equal(group) else ():
        row.centred = row.reward - fmean(other.reward for other in group if other is not row)


def _pass_at_k(o: Any, group: list[Response]) -> None:
    """The mean standardised best outcome of all subsets of k that hold the response."""
    if len(group) <= o.k:
        return
    subsets = list(combinations(range(len(group)), o.k))
    best = [float(any(group[place].right for place in subset)) for subset in subsets]
    mean = fmean(best)
    deviation = fmean((value - mean) ** 2 for value in best) ** 0.5
    for place, row in enumerate(group):
        if deviation > 0:
            own = [value for value, subset in zip(best, subsets) if place in subset]
            row.centred = (fmean(own) - mean) / deviation


def _kalman(o: Any, group: list[Response]) -> None:
    """Q is the drift, R the noise; what is subtracted has already seen the row's own reward."""
    x, p = o.mean, o.variance
    for row in group:
        p = p + o.drift
        k = p / (p + o.noise)
        x, p = x + k * (row.reward - x), (1 - k) * p
        row.centred = (row.reward - x) / (p**0.5 + o.eps)


def _asymmetric(o: Any, group: list[Response]) -> None:
    mean = fmean(row.reward for row in group)
    for row in group if len(group) > 1 else ():
        row.centred = row.reward - mean - o.shift


def _opmd(o: Any, group: list[Response]) -> None:
    soft = o.tau * math.log(fmean(math.exp(row.reward / o.tau) for row in group))
    for row in group if not _all_equal(group) else ():
        row.centred = (row.reward - soft) / (1 + o.tau)


def _ema(o: Any, rows: Rows, given: Any) -> None:
    average = 0.0
    for row in (row for _, earlier in given.earlier() for row in _counted(earlier)):
        average = o.decay * average + (1 - o.decay) * row.reward
    for row in _counted(rows):
        row.centred = row.reward - average
        average = o.decay * average + (1 - o.decay) * row.reward


def _value_tracker(o: Any, rows: Rows, given: Any) -> None:
    """Each problem's visits are gone through again from the first, with the learner as it was at each of them."""
    steps = [*given.earlier(), (given.step, rows)]
    for group in map(_counted, groups_of(rows)):
        a = b = 0.5
        before: list[Response] = []
        for step, every in steps:
            here = [row for row in every if group and row.problem == group[0].problem]
            if step is given.step:
                for row in group:
                    row.centred = row.reward - a / (a + b)
            if not here:
                continue
            gaps = [(given.read(step, row) - row.sampler)[row.sampled].abs() for row in before]
            drift = fmean(float(gap.mean()) for gap in gaps) if gaps and o.low < o.high else 0.0
            rho = min(max(0.5 ** (drift / o.half_life), o.low), o.high)
            a = rho * a + sum(row.reward for row in _counted(here))
            b = rho * b + sum(1 - row.reward for row in _counted(here))
            before = here


def _plain_reward(o: Any, rows: Rows, given: Any) -> None:
    for row in _counted(rows):
        row.centred = row.reward


def _greedy(o: Any, rows: Rows, given: Any) -> None:
    for row in _counted(rows):
        row.centred = row.reward - given.value_of(row, 0)


def _monte_carlo(o: Any, rows: Rows, given: Any) -> None:
    for row in rows:
        row.centred = torch.zeros(len(row.tokens), dtype=F64)
        if row.counted:
            starts = [0, *(t + 1 for t, token in enumerate(row.tokens[:-1]) if token in given.step_ends)]
            worth = [*(given.value_of(row, start) for start in starts), row.reward]
            for place, (start, stop) in enumerate(zip(starts, [*starts[1:], len(row.tokens)])):
                row.centred[start:stop] = worth[place + 1] - worth[place]


def _traces(o: Any, row: Response, lam: float) -> Tensor:
    """delta_t = r_t + gamma V_{t+1} - V_t over the sampled tokens; charges where they fall, the rest at the end."""
    found = torch.zeros(len(row.tokens), dtype=F64)
    places = row.sampled.nonzero().flatten().tolist() if row.counted else []
    rewards = row.charges.clone()
    if places:
        rewards[places[-1]] += row.reward - float(row.charges.sum())
    following = value = 0.0
    for t in reversed(places):
        delta = rewards[t] + o.gamma * value - row.values[t]
        following = delta + o.gamma * lam * following
        value = row.values[t]
        found[t] = following
    return found


def _gae(o: Any, rows: Rows, given: Any) -> None:
    for row in rows:
        row.centred = _traces(o, row, o.lam)


def _length_adaptive_gae(o: Any, rows: Rows, given: Any) -> None:
    for row in rows:
        row.centred = _traces(o, row, 1 - 1 / max(o.alpha * int(row.sampled.sum()), 1.0))
        row.target = _traces(o, row, o.lam_value) + row.values


def _optimal_token(o: Any, rows: Rows, given: Any) -> None:
    """Of each position the mean reward to go over the counted rows with a sampled token there, by their weights."""
    for row in rows:
        row.centred = torch.zeros(len(row.tokens), dtype=F64)
    for group in map(_counted, groups_of(rows)):
        for t in range(max((len(row.tokens) for row in group), default=0)):
            there = [row for row in group if t < len(row.tokens) and row.sampled[t]]
            to_go, weights = [], []
            for row in there:
                to_go.append(row.reward - float(row.charges[:t].sum()))
                norms = (1 - 2 * row.prox.exp() + row.collision) * row.weight**2
                weights.append(float(norms[: t + 1][row.sampled[: t + 1]].sum()))
            baseline = sum(w * g for w, g in zip(weights, to_go)) / (sum(weights) + o.eps)
            for row, own in zip(there, to_go):
                row.centred[t] = own if o.zero_tail and len(there) == 1 else own - baseline


def _forward_correction(o: Any, rows: Rows, given: Any) -> None:
    for row in _counted(rows):
        row.centred = row.reward - o.correct + o.false_negative_rate * (o.correct - o.wrong)


def _return_to_go(o: Any, rows: Rows, given: Any) -> None:
    """What is earned from each sampled token on: the reward, less what was charged before it."""
    for row in rows:
        charged = row.charges.cumsum(0) - row.charges
        row.centred = torch.where(row.sampled & row.counted, row.reward - charged, torch.zeros_like(charged))


# Sets `centred` of each response; `given` holds what was drawn for the estimate.
BASELINE: dict[str, Callable[[Any, Rows, Any], None]] = {
    "NoBaseline": _plain_reward,
    "GroupMean": _of_groups(lambda o, group: _less(group, [1] * len(group))),
    "LengthWeighted": _of_groups(lambda o, group: _less(group, [_tokens(row) for row in group])),
    "LeaveOneOut": _of_groups(_leave_one_out),
    "PassAtK": _of_groups(_pass_at_k),
    "BatchMean": _of_batch,
    "Kalman": _of_groups(_kalman),
    "Asymmetric": _of_groups(_asymmetric),
    "Opmd": _of_groups(_opmd),
    "Ema": _ema,
    "ValueTracker": _value_tracker,
    "Greedy": _greedy,
    "MonteCarlo": _monte_carlo,
    "Gae": _gae,
    "LengthAdaptiveGae": _length_adaptive_gae,
    "OptimalToken": _optimal_token,
    "ForwardCorrection": _forward_correction,
    "ReturnToGo": _return_to_go,
}


def _group_std(o: Any, rows: Rows) -> None:
    assert not o.leave_one_out and o.singleton.value == "zero"
    for group in map(_counted, groups_of(rows)):
        if len(group) > o.ddof:
            mean = fmean(row.reward for row in group)
            deviation = (sum((row.reward - mean) ** 2 for row in group) / (len(group) - o.ddof)) ** 0.5
            for row in group:
                row.advantages = 0.0 if _all_equal(group) else row.centred / (deviation + o.eps)


def _focal(o: Any, rows: Rows) -> None:
    _group_std(o, rows)
    for group in map(_counted, groups_of(rows)):
        for row in group:
            if row.advantages is not None:
                row.advantages = row.advantages * fmean(not other.right for other in group) ** o.gamma


def _batch_std(o: Any, rows: Rows) -> None:
    """Each response, or each token that was sampled and stays, is a value that counts once."""
    by_tokens, values, weights = o.by.value == "tokens", [], []
    for row in _counted(rows):
        if isinstance(row.centred, Tensor):
            own = row.centred[row.stays]
            each = 1.0 if by_tokens else 1 / max(len(own), 1)
        else:
            own, each = torch.tensor([row.centred], dtype=F64), float(_tokens(row)) if by_tokens else 1.0
        values.append(own if o.of.value == "centred" else torch.full_like(own, row.reward))
        weights.append(torch.full_like(own, each))
    if not values:
        return
    value, weight = torch.cat(values), torch.cat(weights)
    mean = (weight * value).sum() / weight.sum()
    variance = (weight * (value - mean) ** 2).sum() / (weight.sum() - o.ddof)
    assert o.floor.value == "added"
    for row in _counted(rows):
        shifted = row.centred - mean if o.recentre else row.centred
        row.advantages = 0.0 if len(value.unique()) == 1 else shifted / (variance.sqrt() + o.eps)


def _gdpo(o: Any, rows: Rows) -> None:
    added = {id(row): 0.0 for row in _counted(rows)}
    for group in map(_counted, groups_of(rows)):
        for name in group[0].parts if len(group) > 1 else ():
            mean, deviation = fmean(row.parts[name] for row in group), stdev(row.parts[name] for row in group)
            for row in group if len({row.parts[name] for row in group}) > 1 else ():
                added[id(row)] += (row.parts[name] - mean) / (deviation + o.eps)
    spread = stdev(added.values()) if len(added) > 1 else 0.0
    for row in _counted(rows):
        row.advantages = added[id(row)] / (spread + o.eps)


def _max_rl(o: Any, rows: Rows) -> None:
    for group in map(_counted, groups_of(rows)):
        mean = fmean(row.reward for row in group) if group else 0.0
        for row in group:
            lost = -1.0 if o.all_wrong.value == "minus_one" else 0.0
            row.advantages = row.centred / mean if mean > 0 else lost


def _informative_share(o: Any, rows: Rows) -> None:
    assert o.alpha.value == "informative_groups"
    groups = [group for group in map(_counted, groups_of(rows)) if group]
    informative = [group for group in groups if not _all_equal(group)]
    for row in _counted(rows):
        row.advantages = row.centred * (len(groups) / len(informative) if informative else 1)


def _by_sign(o: Any, rows: Rows) -> None:
    for row in _counted(rows):
        row.advantages = row.centred * (o.positive if row.centred > 0 else o.negative)


def _unscaled(o: Any, rows: Rows) -> None:
    for row in _counted(rows):
        row.advantages = row.centred


# Sets `advantages` of each counted response from `centred`.
SCALE: dict[str, Callable[[Any, Rows], None]] = {
    "NoScale": _unscaled,
    "GroupStd": _group_std,
    "Focal": _focal,
    "BatchStd": _batch_std,
    "Gdpo": _gdpo,
    "GroupMean": _max_rl,
    "InformativeShare": _informative_share,
    "SignWeighted": _by_sign,
}
