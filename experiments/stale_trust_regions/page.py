"""The picture of this experiment: `python experiments/stale_trust_regions/page.py` draws it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from grpo_lab.analysis.build import describe_sources
from grpo_lab.analysis.figures.palette import BLUE, FAINT, GREY, VERMILLION, Look
from grpo_lab.analysis.figures.style import Drawn, drawing, save
from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.sweep_data import SweepData

HERE = Path(__file__).parent
ACCURACY = "eval/heldout/accuracy"
FRESH = "sync"  # the arm without lag
LEVELS = {"lag_64": "at most 63 updates old", "lag_256": "at most 255 updates old"}
HEADING = "Held-out accuracy with stale samples, by trust region"


def ends_table(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """One row per run and one per mean: level, arm, twin (a random selection), part, seed, mean, low, high."""
    rows = []
    for level in LEVELS:
        for name in data.arms:
            arm, twin = name.removesuffix("_twin"), name.endswith("_twin")
            whole = finals.interval(level, name, ACCURACY)
            rows.append((level, arm, twin, "mean", -1, whole.mean, whole.low, whole.high))
            if not twin:
                rows += [
                    (level, arm, twin, "run", seed, value, float("nan"), float("nan"))
                    for seed, value in finals.of(level, name, ACCURACY).items()
                ]
    return pd.DataFrame(rows, columns=["level", "arm", "twin", "part", "seed", "mean", "low", "high"]).round(6)


def draw(data: SweepData, finals: FinalValues, heading: str = HEADING) -> Drawn:
    """Arms from the best at the longer lag to the worst: runs, means with intervals, random twins, fresh samples."""
    rows = ends_table(data, finals)
    means = rows[rows["part"] == "mean"]
    last = means[(means["level"] == "lag_256") & ~means["twin"] & (means["arm"] != FRESH)]
    arms = list(last.sort_values("mean")["arm"])
    heights = {arm: height for height, arm in enumerate(arms)}
    own, twin = Look(BLUE, marker="o"), Look(VERMILLION, marker="D")
    entries = [
        own.entry("mean of the arm, 95% CI"),
        twin.entry("its random twin: as many tokens or rows, drawn at random"),
        Look(FAINT, marker="o").entry("single runs"),
        Look(GREY, "--").entry("fresh samples for every update (sync)"),
    ]
    number = rows[rows["part"] == "run"]["seed"].nunique()
    bands = f"n = {number} base models, one run on each; learning rates chosen at the shorter lag on another one"
    with drawing("stale_trust_regions_picture", heading, 1.9 + 0.27 * len(arms), bands, entries) as figure:
        for axes, (level, title) in zip(figure.subplots(1, 2, sharex=True, sharey=True), LEVELS.items()):
            here = rows[(rows["level"] == level) & rows["arm"].isin(arms)]
            runs = here[here["part"] == "run"]
            axes.plot(runs["mean"], runs["arm"].map(heights), "o", color=FAINT, markersize=3)
            for look, chosen, offset in ((twin, here["twin"], -0.22), (own, ~here["twin"], 0.0)):
                shown = here[chosen & (here["part"] == "mean")].dropna(subset=["mean"])
                at = shown["arm"].map(heights) + offset
                axes.hlines(at, shown["low"], shown["high"], color=look.colour, linewidth=1.6)
                axes.plot(shown["mean"], at, look.marker, color=look.colour, markersize=4.5)
            fresh = means[(means["level"] == level) & (means["arm"] == FRESH)]["mean"].item()
            axes.axvline(fresh, color=GREY, linestyle="--", linewidth=1)
            axes.set(title=title, xlabel="held-out accuracy at the end", xlim=(-0.02, 1.02))
            axes.set_yticks(range(len(arms)), arms)
    return Drawn("stale_trust_regions_picture", figure, rows, bands)


def main() -> None:
    """Draw the picture."""
    data = load_data(HERE / "data", "stale_trust_regions")
    finals = final_values(data)
    drawn = draw(data, finals)
    save(drawn, HERE / "figures", describe_sources(data, finals, ["python", "experiments/stale_trust_regions/page.py"]))


if __name__ == "__main__":
    main()
