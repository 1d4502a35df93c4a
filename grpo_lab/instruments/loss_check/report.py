"""From a function's answers to a verdict: the published loss, and where the function departs from it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from grpo_lab.instruments.loss_check.inputs import GROUP, SPLITS, LossInputs, calls, split_name
from grpo_lab.instruments.loss_check.match import LossAnswer, LossMatch, beyond_limits, factor_text, finite, matches
from grpo_lab.instruments.loss_check.published import PublishedTables

TOLERANCE = 1e-5  # of gradients, relative to their norm; the shipped numbers have six digits
BF16 = 0.03  # bfloat16 has eight bits: a number is off by up to 0.4%
STEP_COUNTS = ("num_tokens", "num_rows", "num_live_rows", "num_microbatches")


@dataclass(frozen=True)
class Check:
    """One property: `ok`, `departs`, or `skipped` where the function cannot be asked."""

    name: str
    status: str
    text: str


@dataclass(frozen=True)
class Report:
    """Losses that a function agrees with: `equals` published ones by gradient, `faults` planted ones."""

    function: str
    equals: tuple[str, ...]
    factor: float
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    nearest: str
    checks: tuple[Check, ...]

    @property
    def departures(self) -> list[str]:
        return [*self.faults, *(f"{one.name}: {one.text}" for one in self.checks if one.status == "departs")]

    @property
    def ok(self) -> bool:
        return bool(self.equals) and not self.departures

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def text(self) -> str:
        """The report for a terminal."""
        lines = [self.function]
        if self.equals:
            lines.append(f"  computes   {self.equals[0]}")
            lines += [f"  the same as {one}" for one in self.equals[1:]]
        else:
            lines.append(f"  computes   no published loss; the nearest is {self.nearest}")
        lines += [f"  FAULT      {one}" for one in self.faults] + [f"  note       {one}" for one in self.notes]
        width = max(len(one.name) for one in self.checks)
        mark = {"ok": "ok        ", "departs": "DEPARTS   ", "skipped": "not asked "}
        lines += [f"  {mark[one.status]} {one.name:<{width}}  {one.text}" for one in self.checks]
        lines.append(f"  {'passes' if self.ok else f'{len(self.departures)} departures'}")
        return "\n".join(lines)


def judge(
    function: str,
    answers: Mapping[str, LossAnswer],
    errors: Mapping[str, str],
    reads: Sequence[str],
    accumulate: str = "",
    tables: PublishedTables | None = None,
    tolerance: float = TOLERANCE,
    expected: Mapping[str, str] | None = None,
) -> Report:
    """The report on these answers.

    `expected` are options that the loss is meant to have. `accumulate` is how the trainer joins the losses of
    microbatches: `sum`, or `mean`, which is the default for a function that gets no counts of the whole step.
    Raises ValueError if a batch by which losses are identified has no answer.
    """
    for name in ("plain", "cut"):
        if name not in answers:
            raise ValueError(f"{function}: no answer on the batch {name}: {errors.get(name, 'it is missing')}")
    how = accumulate or ("sum" if any(one in reads for one in STEP_COUNTS) else "mean")
    gradient = answers["plain"].gradient
    if not finite(answers["plain"]):
        raise ValueError(f"{function}: the loss or its gradient is not finite on the batch plain")
    if gradient is not None and not gradient.any():
        zero = ("the gradient is 0: every factor of the loss is detached from the log-probs",)
        return Report(function, (), 0.0, zero, (), "none", (Check("gradient", "departs", "0 on every token"),))
    found, nearest = matches(answers, reads, tolerance, tables)
    best = found[0] if found else None
    faults, notes = [], []
    if best is not None:
        faults += best.faults
        notes += best.notes
        for axis, option in (expected or {}).items():
            if all(one.options.get(axis) != option for one in found):
                faults.append(f"it is meant to be {axis}={option}, and is {axis}={best.options.get(axis, 'none')}")
        if best.value_differs:
            notes.append("the gradient is the published one, and the value of the loss is another")
        if best.kl_coef:
            notes.append(f"KL coefficient {best.kl_coef:.4g}")
        if abs(best.factor - 1) > 1e-3:
            text = f"constant factor {factor_text(best.factor, len(answers))}"
            (notes if best.factor > 0 and "rewards" in reads else faults).append(text)
    if any(answers[name].gradient is None for name in ("plain", "cut")):
        checks = [Check("gradient", "skipped", "no gradients are given: only losses are compared")]
    else:
        checks = [*_checks(answers, errors, reads, how, found, tolerance)]
    near = f"{nearest.label}{' with ' + '; '.join(nearest.faults) if nearest.faults else ''}"
    near += f", {nearest.distance:.1%} away"
    labels = tuple(dict.fromkeys(one.label for one in found if one.faults == (best.faults if best else ())))
    return Report(function, labels, best.factor if best else 0.0, tuple(faults), tuple(notes), near, tuple(checks))


def _checks(
    answers: Mapping[str, LossAnswer],
    errors: Mapping[str, str],
    reads: Sequence[str],
    how: str,
    found: Sequence[LossMatch],
    tolerance: float,
) -> Iterator[Check]:
    inputs = calls()
    plain, close = inputs["plain"], _Close(answers, errors, 10 * tolerance)
    whole = answers["plain"].gradient
    assert whole is not None, "the caller has looked"
    yield close.same("padding right", "padded right", whole, (0, 3), plain)
    yield close.same("padding left", "padded left", whole, (2, 0), plain)
    splits = [
        _microbatches(batch, sizes, answers, errors, inputs[batch], how, 10 * tolerance)
        for batch in SPLITS
        for sizes in SPLITS[batch]
        # a part of a group has another baseline
        if "rewards" not in reads or not any(size % GROUP for size in sizes)
    ]
    for status, cause in dict.fromkeys((one.status, one.cause) for one in splits):
        alike = [one for one in splits if (one.status, one.cause) == (status, cause)]
        effect = "" if status == "ok" else ": " + ", ".join(f"{one.effect} ({one.rows})" for one in alike)
        rows = f"of {', '.join(one.rows for one in alike)} rows: " if status == "ok" else ""
        yield Check("microbatches", status, f"{rows}{cause}{effect}")
    yield close.finite("empty mask") or _without_gradient("empty mask", answers["empty mask"])
    if "num_tokens" in reads:
        yield close.finite("empty step") or _without_gradient("empty step", answers["empty step"])
    yield _masked_row(close, plain)
    yield _tied(close, plain, found)
    if {"group_ids", "rewards"} & set(reads):
        yield close.finite("groups of one") or Check("groups of one", "ok", _singletons(answers["groups of one"]))
    yield _extreme(close, found)
    if (check := close.finite("bf16")) is not None:
        yield check
    else:
        rounded = answers["rounded"].gradient if "rounded" in answers else whole
        assert rounded is not None
        off = _distance(answers["bf16"].gradient, rounded)
        yield Check("bf16", "ok" if off <= BF16 else "departs", f"gradient {off:.2%} from that in float64")


@dataclass(frozen=True)
class _Close:
    """Comparisons of answers."""

    answers: Mapping[str, LossAnswer]
    errors: Mapping[str, str]
    tolerance: float

    def finite(self, name: str) -> Check | None:
        """A departure if there is no answer, or one that is not finite; None where it is finite."""
        if name not in self.answers:
            return Check(name, "departs" if name in self.errors else "skipped", self.errors.get(name, "no answer"))
        one = self.answers[name]
        if not np.isfinite(one.loss):
            return Check(name, "departs", f"the loss is {one.loss}")
        if one.gradient is not None and not np.isfinite(one.gradient).all():
            return Check(name, "departs", "the gradient is not finite")
        return None

    def same(self, title: str, name: str, whole: np.ndarray, sides: tuple[int, int], plain: LossInputs) -> Check:
        """The gradient with more columns against that without."""
        if (check := self.finite(name)) is not None:
            return Check(title, check.status, check.text)
        found = self.answers[name].gradient
        assert found is not None
        width = whole.shape[1]
        inner = found[:, sides[0] : sides[0] + width]
        outside = np.abs(found).sum() - np.abs(inner).sum()
        if outside > self.tolerance * np.abs(whole).sum():
            return Check(title, "departs", f"{outside / np.abs(found).sum():.0%} of the gradient is on padding")
        scale, rest = _fit(inner, whole)
        if rest > self.tolerance:
            return Check(title, "departs", f"gradient changes by {_distance(inner, whole):.1%}, and not by a factor")
        if abs(scale - 1) > self.tolerance:
            cause = ""
            if abs(scale - width / (width + sum(sides))) < 1e-3:
                cause = f" = {width} / {width + sum(sides)}: the denominator is the padded width"
            return Check(
                title, "departs", f"{sum(sides)} columns change the gradient by a factor of {scale:.4f}{cause}"
            )
        return Check(title, "ok", f"{sum(sides)} columns change nothing")


@dataclass(frozen=True)
class _Split:
    """A batch cut into microbatches of these `rows`: the factors on the gradient, and their cause."""

    rows: str
    status: str
    cause: str
    effect: str = ""


def _microbatches(
    batch: str,
    sizes: Sequence[int],
    answers: Mapping[str, LossAnswer],
    errors: Mapping[str, str],
    inputs: LossInputs,
    how: str,
    tolerance: float,
) -> _Split:
    """Gradients of microbatches, joined as the trainer does, against that of the whole batch."""
    title = "+".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{len(sizes)} x {sizes[0]}"
    names = [f"{split_name(batch, sizes)}:{index}" for index in range(len(sizes))]
    if missing := [name for name in names if name not in answers]:
        failed = errors.get(missing[0])
        return _Split(title, "departs" if failed else "skipped", failed or "no answer")
    whole, count, start, scales, rests, counts = answers[batch].gradient, len(sizes), 0, [], [], []
    for size, name in zip(sizes, names):
        rows, part = slice(start, start + size), answers[name].gradient
        start += size
        if part is None or whole is None or not np.isfinite(part).all() or not np.isfinite(whole).all():
            return _Split(title, "departs", "a gradient is not finite")
        if not whole[rows].any():
            continue
        joined = part / count if how == "mean" else part
        scale, rest = _fit(joined, whole[rows])
        scales.append(scale)
        rests.append(rest)
        mask = inputs.mask[rows]
        counts.append((size, mask.sum(), mask.any(axis=1).sum()))
    if max(rests) > max(tolerance, 1e-4):
        return _Split(title, "departs", "the gradient changes, and not by a factor", _share(max(rests)))
    low, high = min(scales), max(scales)
    if high - low <= 1e-4 * abs(high) and abs(high - 1) <= 1e-4:
        return _Split(title, "ok", f"the {how} of their losses has the gradient of the whole batch")
    size, tokens, rows = (np.array(one, dtype=float) for one in zip(*counts))
    causes = {
        "each is divided by its own tokens": inputs.mask.sum() / tokens,
        "each is divided by its own rows": len(inputs.mask) / size,
        "each is divided by its own rows with a token in the loss": inputs.mask.any(axis=1).sum() / rows,
    }
    many = {f"{name}, and the losses are summed": ratio for name, ratio in causes.items()}
    many |= {f"{name}, and the losses are averaged": ratio / count for name, ratio in causes.items()}
    many["the losses are summed and not divided by their number"] = np.full(len(size), count)
    many["the losses are divided by their number once too often"] = np.full(len(size), 1 / count)
    found = [name for name, want in many.items() if np.allclose(scales, want, rtol=1e-3)]
    by = f"x{high:.3g}" if high - low <= 1e-4 * abs(high) else f"x{low:.3g} to x{high:.3g}"
    return _Split(title, "departs", f"{found[0] if found else 'for no known reason'}; the gradient is multiplied", by)


def _masked_row(close: _Close, plain: LossInputs) -> Check:
    """A row without a token against the same batch without that row."""
    name = "masked row"
    if (check := close.finite(name) or close.finite("row removed")) is not None:
        return Check(name, check.status, check.text)
    found, without = close.answers[name].gradient, close.answers["row removed"].gradient
    assert found is not None and without is not None
    if found[1].any():
        return Check(name, "departs", "a row without a token in the loss has a gradient")
    scale, rest = _fit(np.delete(found, 1, axis=0), without)
    rows = len(plain.mask)
    if rest > max(close.tolerance, 1e-4):
        return Check(name, "departs", f"it changes the gradient of the others by {rest:.1%}")
    if abs(scale - 1) <= 1e-4:
        return Check(name, "ok", "it changes nothing")
    if abs(scale - (rows - 1) / rows) <= 1e-4:
        return Check(name, "ok", f"it counts as a row of the denominator: factor {scale:.4f} = {rows - 1} / {rows}")
    return Check(name, "departs", f"it changes the gradient of the others by a factor of {scale:.4f}")


def _tied(close: _Close, plain: LossInputs, candidates: Sequence[LossMatch]) -> Check:
    name = "tied group"
    if (check := close.finite(name)) is not None:
        return check
    found, whole = close.answers[name].gradient, close.answers["plain"].gradient
    assert found is not None and whole is not None
    size = np.abs(found[plain.group_ids == 1]).max() / np.abs(whole).max()
    if size <= 1e-9:
        return Check(name, "ok", "no gradient")
    pulls = any("kl" in one.options or one.options["surrogate"] in PULLING for one in candidates)
    if pulls:
        return Check(name, "ok", f"a gradient of {size:.2g} of the largest, as published: it pulls without advantage")
    return Check(name, "departs", f"a gradient of {size:.2g} of the largest on rows with equal rewards")


# Options that move tokens whose advantage is 0.
PULLING = ("dro", "ipo", "kimi", "kimi_token", "kl_cov")


def _without_gradient(name: str, one: LossAnswer) -> Check:
    nothing = one.gradient is None or not one.gradient.any()
    return Check(name, "ok" if nothing else "departs", "finite, " + ("no gradient" if nothing else "but a gradient"))


def _singletons(one: LossAnswer) -> str:
    nothing = one.gradient is not None and not one.gradient.any()
    return "finite" + (", no gradient" if nothing else "")


def _extreme(close: _Close, candidates: Sequence[LossMatch]) -> Check:
    title = "log-ratios up to 25 nats"
    if (check := close.finite("extreme")) is not None:
        return Check(title, check.status, check.text)
    found = close.answers["extreme"].gradient
    assert found is not None
    nearest = Check(title, "skipped", "finite; no published numbers to compare")
    for one in candidates:
        options = beyond_limits(one)
        off = {how: _distance(found, want) for how, want in options.items()}
        same = [how for how in off if off[how] <= max(close.tolerance, 1e-4)]
        if same:
            limit = f", the log-ratio {same[0]}" if len(same) < len(off) else ""
            also = "" if len(candidates) == 1 else f" in {one.options['surrogate']}"
            return Check(title, "ok", f"as published{also}{limit}")
        if off:
            nearest = Check(title, "departs", f"gradient {_share(min(off.values()))} from the published one")
    return nearest


def _share(distance: float) -> str:
    return f"{distance:.1%}" if distance < 10 else f"{distance:.2g} times its norm"


def _fit(found: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """The factor that brings `whole` nearest to `found`, and the rest relative to `found`."""
    size = float((whole * whole).sum())
    scale = float((found * whole).sum()) / size if size else 0.0
    return scale, _distance(scale * whole, found)


def _distance(found: np.ndarray | None, whole: np.ndarray) -> float:
    assert found is not None
    norm = float(np.linalg.norm(whole))
    return float(np.linalg.norm(found - whole)) / norm if norm else float(np.linalg.norm(found))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of reports as JSON: function, published loss, departures with their numbers."""
    lines = ["| framework | function and settings | computes | departs |", "|---|---|---|---|"]
    for row in rows:
        framework, _, case = row["function"].partition(": ")
        equal = row["equals"][0] if row["equals"] else f"no published loss; nearest: {row['nearest']}"
        texts = [*row["faults"], *(f"{one['name']}: {one['text']}" for one in row["checks"])]
        departs = "; ".join(texts) or "nowhere"
        notes = "".join(f"; {one}" for one in row["notes"])
        lines.append(f"| {framework} | `{case}` | `{equal}`{notes} | {departs} |")
    return "\n".join(lines)
