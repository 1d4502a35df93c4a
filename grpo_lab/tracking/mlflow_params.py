"""The parameters that MLflow shows of a run; run.json and config.yaml hold the whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_lab.tracking.mlflow_view import plain_name

PARAM_LENGTH = 500  # characters
# Where a run is kept and shown, its labels in a sweep, which are tags, and the numbers of a convention, which stand
# again where they are used.
_LEFT_OUT = (
    "label", "tracking", "runs_dir", "objective", "resume_with_changed_code", "checkpoint_every", "checkpoint_minutes",
    "keep_checkpoints", "checkpoint", "rollouts_every", "no_signal_steps", "convention.*",
)  # fmt: skip


def parameters(run: Mapping[str, Any]) -> dict[str, str]:
    """Parameter -> value of the run whose run.json is `run`: options and numbers, without those it never reads."""
    left_out = (*_LEFT_OUT, *run.get("unread", ()))
    return {
        plain_name(key): shortened(str(value))
        for key, value in (run["choices"] | run["config"]).items()
        if not any(_within(key, place) for place in left_out)
    }


def shortened(text: str) -> str:
    """A value as MLflow takes it."""
    return text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - 3] + "..."


def _within(key: str, place: str) -> bool:
    """True if a dotted key is `place` or below it; only below it for `place.*`."""
    return key.startswith(f"{place.removesuffix('.*')}.") or key == place
