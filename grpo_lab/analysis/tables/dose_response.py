"""The one number in which the arms of a sweep differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_lab.analysis.sources.sweep_data import SweepData

FEWEST = 3  # values that make a curve


@dataclass(frozen=True)
class SweptSetting:
    """The override that arms differ in, and its value in each, rising."""

    key: str
    values: Mapping[str, float]


def swept_setting(data: SweepData) -> SweptSetting | None:
    """The one numeric override in which the arms differ; None unless it has `FEWEST` values or more."""
    arms = data.design.arms if data.design else {}
    pairs = {arm: [word.lstrip("+").partition("=") for word in words] for arm, words in arms.items()}
    settings = {arm: {key: value for key, _, value in own} for arm, own in pairs.items()}
    keys = {key for words in settings.values() for key in words}
    differing = [key for key in keys if len({words.get(key) for words in settings.values()}) > 1]
    if len(differing) != 1:
        return None
    (key,) = differing
    try:
        values = {arm: float(words[key]) for arm, words in settings.items()}
    except (KeyError, ValueError):
        return None
    if len(set(values.values())) < max(FEWEST, len(values)) or not all(map(math.isfinite, values.values())):
        return None
    return SweptSetting(key, dict(sorted(values.items(), key=lambda item: item[1])))
