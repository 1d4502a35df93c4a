"""What warns of a gamed grader, and the picture of this experiment: `python experiments/same_reward/page.py` draws it.

Definitions are in `design.yaml`, declared before the first run: thresholds come from base models 0 to 7 and are tested
once on 8 to 15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from grpo_lab.analysis.build import describe_sources
from grpo_lab.analysis.figures.proxy import draw_proxy
from grpo_lab.analysis.figures.style import save
from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.sweep_data import SweepData, bases_of

HERE = Path(__file__).parent
HEAD = "| indicator | AUC, base models 0-7 | AUC, 8-15 | warned before the fall | median lead, steps | false alarms |"
TRUTH = "eval/heldout/accuracy"
FALL, RUN, STEPS = 0.10, 3, 5  # of accuracy; evaluations in a mean; steps in a reading
FALSE_ALARMS = 0.10  # of the runs without an event, which a threshold may cross on base models 0 to 7
FIRST_HALF = range(8)  # base models that thresholds come from
# Indicator -> (metric, +1 where a rise warns and -1 where a fall does).
INDICATORS = {
    "share of accepted responses that are truncated": ("rollout/truncated_correct", 1),
    "KL from the initial policy": ("eval/heldout_training/kl_initial", 1),
    "effective sample size": ("mismatch/ess_responses", -1),
    "policy entropy": ("train/entropy", -1),
    "agreement of the two graders": ("eval/heldout/agreement", -1),
    "response length": ("rollout/length", 1),
    "gradient norm": ("train/gradient_norm", 1),
}


@dataclass(frozen=True)
class Run:
    """One run: its evaluations' steps, the place of its event among them (None: none), and readings by indicator."""

    base: int
    steps: np.ndarray
    event: int | None
    readings: dict[str, np.ndarray]  # [K], larger warns more; NaN before step 5


def event_of(accuracy: np.ndarray) -> int | None:
    """The first evaluation at which the mean of three is FALL below the best such mean before."""
    means = np.convolve(accuracy, np.full(RUN, 1 / RUN), mode="valid")
    fallen = means <= np.maximum.accumulate(means) - FALL
    return int(fallen.argmax()) + RUN - 1 if fallen.any() else None


def readings_of(run: pd.DataFrame, steps: np.ndarray, metric: str, sign: int) -> np.ndarray:
    """Readings at the evaluations: the mean of the last five steps, or the evaluation, less that at step 5."""
    at = run.set_index("step")[metric] if metric in run else pd.Series(dtype=float)
    if metric.startswith("eval/"):
        values = at.reindex(steps).to_numpy(float)
    else:
        values = np.array([at[(at.index > step - STEPS) & (at.index <= step)].mean() for step in steps])
    return sign * (values - values[1])


def runs_of(points: pd.DataFrame, bases: dict[int, int]) -> list[Run]:
    """Every run of the arms with the lenient grader."""
    found = []
    for (_, seed), run in points[points["arm"] != "strict"].sort_values("step").groupby(["arm", "seed"], sort=False):
        evaluated = run[run[TRUTH].notna()]
        steps = evaluated["step"].to_numpy()
        readings = {name: readings_of(run, steps, *indicator) for name, indicator in INDICATORS.items()}
        found.append(Run(bases[int(seed)], steps, event_of(evaluated[TRUTH].to_numpy()), readings))
    return found


def area(runs: list[Run], name: str) -> float:
    """The chance that a run before its event reads higher than a run without one at the same evaluation."""
    wins = pairs = 0.0
    for one in (run for run in runs if run.event is not None):
        for other in (run for run in runs if run.event is None):
            for k in range(2, min(one.event, len(other.steps))):
                mine, theirs = one.readings[name][k], other.readings[name][k]
                if math.isfinite(mine) and math.isfinite(theirs):
                    wins, pairs = wins + (mine > theirs) + 0.5 * (mine == theirs), pairs + 1
    return wins / pairs if pairs else math.nan


def crossing(run: Run, name: str, threshold: float) -> int | None:
    """The first evaluation after step 5, before the event, that reads above the threshold."""
    end = len(run.steps) if run.event is None else run.event
    above = np.flatnonzero(run.readings[name][2:end] > threshold)
    return int(above[0]) + 2 if len(above) else None


def threshold_of(runs: list[Run], name: str) -> float:
    """The threshold that most runs with an event cross before it, and at most a tenth of the others ever."""
    quiet, lost = ([run for run in runs if (run.event is None) is none] for none in (True, False))
    candidates = np.unique(np.concatenate([run.readings[name][2:] for run in runs]))
    candidates = candidates[np.isfinite(candidates)]
    allowed = [
        one for one in candidates
        if sum(crossing(run, name, one) is not None for run in quiet) <= FALSE_ALARMS * len(quiet)
    ]  # fmt: skip
    caught = [sum(crossing(run, name, one) is not None for run in lost) for one in allowed]
    return float(allowed[int(np.argmax(caught))]) if allowed else math.nan


def warnings_table(runs: list[Run]) -> str:
    """A markdown table: one row per indicator, on the base models that no threshold was chosen on."""
    first = [run for run in runs if run.base in FIRST_HALF]
    second = [run for run in runs if run.base not in FIRST_HALF]
    lost, quiet = ([run for run in second if (run.event is None) is none] for none in (False, True))
    lines = [HEAD, "|---|--:|--:|--:|--:|--:|"]
    for name in INDICATORS:
        threshold = threshold_of(first, name)
        at = [(run, crossing(run, name, threshold)) for run in lost]
        leads = [run.steps[run.event] - run.steps[k] for run, k in at if k is not None and run.event is not None]
        false = sum(crossing(run, name, threshold) is not None for run in quiet)
        lead = f"{np.median(leads):.0f}" if leads else "-"
        lines.append(
            f"| {name} | {area(first, name):.2f} | {area(second, name):.2f} | {len(leads)} of {len(lost)} | {lead} | "
            f"{false} of {len(quiet)} |"
        )
    return "\n".join(lines)


def tables(data: SweepData, finals: FinalValues) -> dict[str, Callable[[], str]]:
    """The page's own table, by how it begins."""
    return {HEAD: lambda: warnings_table(runs_of(data.counted_points, bases_of(data)))}


def main() -> None:
    """Draw the picture."""
    data = load_data(HERE / "data", "same_reward")
    finals = final_values(data)
    ends = [finals.interval("", arm, TRUTH).mean for arm in ("plain", "soft_overlong")]
    drawn = draw_proxy(
        data, finals, ["plain", "soft_overlong"],
        "Similar training reward, different accuracy: with a grader that can be gamed, strict accuracy ends at "
        f"{ends[0]:.2f} on average without and at {ends[1]:.2f} with a soft length penalty",
        "same_reward_picture",
        {"plain": "no guard (plain)", "soft_overlong": "soft length penalty (soft_overlong)"},
    )  # fmt: skip
    assert not isinstance(drawn, str), drawn
    save(drawn, HERE / "figures", describe_sources(data, finals, ["python", "experiments/same_reward/page.py"]))


if __name__ == "__main__":
    main()
