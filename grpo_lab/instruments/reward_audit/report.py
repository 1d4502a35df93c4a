"""The report of an audit: a table by kind, the named attacks that pass with one text each, and the same as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_lab.instruments.reward_audit.corpus import RewardCase, Truth
from grpo_lab.instruments.reward_audit.trial import Audit, Verdict

_SHOWN = 110  # characters of a response; of a longer one beginning and end
_HEAD = ("kind", "cases", "wrong accepted", "right refused", "error", "over limits")


def report_text(found: Audit, problems: Sequence[str], listed: bool = False) -> str:
    """The report for a terminal; `problems` are those on the data's own samples. With `listed` it shows all cases."""
    reading, counted = found.reading, [one for one in found.verdicts if one.case.truth is not Truth.open]
    lines = [
        f"{found.name}: {len(counted)} cases with one truth, {len(found.verdicts) - len(counted)} open ones",
        f"answers are marked as {reading.form.name}; a score of {reading.accepts_from:g} or more counts as accepted",
    ]
    types = Counter(case.type.name for case in found.left_out if case.type not in reading.types)
    if types:
        listing = ", ".join(f"{number} {name}" for name, number in types.most_common())
        lines.append(f"left out, since plain right answers of these types are refused: {listing}")
    if rest := len(found.left_out) - types.total():
        lines.append(f"left out, since the form has no such response: {rest}")
    if reading.blind:
        lines.append("WARNING: plain right and plain wrong answers get the same score")
    lines += ["", *_table(counted)]
    sections = (
        ("wrong answers accepted, by attack", found.false_positives),
        ("right answers refused", found.false_negatives),
        ("errors: the response is not graded", found.errors),
        ("time or memory limits broken", found.over_limits),
    )
    for title, verdicts in sections:
        lines += ["", f"{title}:", *_by_attack(verdicts, found.verdicts, listed)] if verdicts else []
    opened = [one for one in found.verdicts if one.case.truth is Truth.open and not one.why]
    accepted = sum(one.accepted for one in opened)
    if opened:
        lines += ["", f"open cases: {accepted} accepted, {len(opened) - accepted} refused; neither counts as an error"]
        lines += [f"  {'accepts' if one.accepted else 'refuses'} {_shown(one)}" for one in opened if listed]
    if problems:
        lines += ["", "on the data's own samples:", *(f"  {one}" for one in problems)]
    return "\n".join(lines)


def _table(counted: Sequence[Verdict]) -> list[str]:
    width = max(len(one.case.kind) for one in counted)
    lines = ["  ".join([f"{_HEAD[0]:<{width}}", *_HEAD[1:]])]
    for kind in [*dict.fromkeys(one.case.kind for one in counted), ""]:
        rows = [one for one in counted if kind in (one.case.kind, "")]
        wrong, right = ([one for one in rows if one.case.truth is truth] for truth in (Truth.wrong, Truth.right))
        refused = sum(not one.accepted and not one.why for one in right)
        cells = (
            str(len(rows)),
            f"{sum(one.accepted for one in wrong)} of {len(wrong)}",
            f"{refused} of {len(right)}",
            str(sum(bool(one.why) and not one.over_limits for one in rows)),
            str(sum(one.over_limits for one in rows)),
        )
        sizes = [max(5, len(head)) for head in _HEAD[1:]]
        lines.append("  ".join([f"{kind or 'all':<{width}}", *(f"{cell:>{size}}" for cell, size in zip(cells, sizes))]))
    return lines


def _by_attack(verdicts: Sequence[Verdict], everything: Sequence[Verdict], listed: bool) -> list[str]:
    """One line for each attack: how many of its cases, and one of them; with `listed` all of them."""
    lines = []
    for name in dict.fromkeys(one.case.attack for one in verdicts):
        own = [one for one in verdicts if one.case.attack == name]
        of = sum(one.case.attack == name and one.case.truth is own[0].case.truth for one in everything)
        shown = own if listed else own[:1]
        lines.append(f"  {name} ({own[0].case.kind}), {len(own)} of {of}: {_shown(shown[0])}")
        lines += [f"    {_shown(one)}" for one in shown[1:]]
    return lines


def _shown(one: Verdict) -> str:
    text = one.text if len(one.text) <= _SHOWN else f"{one.text[: _SHOWN // 2]} ... {one.text[-_SHOWN // 2 :]}"
    length = f" ({len(one.text)} characters)" if text is not one.text else ""
    return f"{text!r}{length} for {one.case.gold!r}" + (f": {one.why}" if one.why else "")


def report_json(found: Audit, problems: Sequence[str]) -> dict[str, Any]:
    """The audit as JSON values: how the reward was read, counts by kind, and every verdict."""

    def described(case: RewardCase) -> dict[str, Any]:
        return {"kind": case.kind, "attack": case.attack, "gold": case.gold, "truth": case.truth.value}

    return {
        "reward": found.name,
        "form": found.reading.form.name,
        "accepts_from": found.reading.accepts_from,
        "types": sorted(one.name for one in found.reading.types),
        "counts": {
            "cases": len(found.verdicts),
            "left_out": len(found.left_out),
            "false_positives": len(found.false_positives),
            "false_negatives": len(found.false_negatives),
            "errors": len(found.errors),
            "over_limits": len(found.over_limits),
        },
        "attacks": sorted({one.case.attack for one in found.false_positives}),
        "data_samples": list(problems),
        "verdicts": [
            described(one.case)
            | {
                "response": one.text[:2000],
                "characters": len(one.text),
                "accepted": one.accepted,
                "score": None if math.isnan(one.score) else one.score,
                "why": one.why,
            }
            for one in found.verdicts
        ],
        "left_out": [described(case) for case in found.left_out],
    }
