"""Where each trick of five methods acts: the world, and the share it touches there beside its control."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.analysis.effects.manipulation_checks import run_means
from grpo_lab.analysis.effects.verdict import judge
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.config.catalogue import recipe_overrides, with_tables
from grpo_lab.config.design import Direction
from grpo_lab.config.folders import DATA, declared
from grpo_lab.tracking.metrics import UNLIKE_PPO, axis_of_fraction, is_active_fraction, logged_name

ROOT = Path(__file__).parents[2]
METHODS = ("dapo", "dr_grpo", "scalerl", "cispo", "gspo")
# Tricks of a paper that its recipe does not select: another form of one it does, or left out for its reason.
BEYOND = {
    "dapo": ("surrogate=ppo_higher", "group_filter=resample", "truncation=mask_after"),
    "scalerl": ("learner_precision=bf16_fp32_head",),
    "cispo": ("learner_precision=bf16_fp32_head",),
}
SETTINGS = ("reward", "optimizer", "updates")  # of a recipe: they set the scene and touch no share of anything
ALIKE = "the same on every base model"
SWEEPS = "acts_"  # what the experiments are named that count what tricks touch
# Metrics that count what the option of an axis does, beside clipped shares and active_fraction/<axis>.
_COUNTS = {UNLIKE_PPO: "surrogate", "rollout/staleness": "schedule", "mismatch/absolute": "learner_precision"}
_ROUNDING = 1e-9
_PLUMBING = ("budget", "budget.amount", "evaluation")  # words of a design that make no world or regime


@dataclass(frozen=True)
class Acting:
    """What one trick touched. `scene` are the overrides of its world and regime.

    `share` and `beside` are means of `metric` over the steps of a run, then over bases at equal weight; `beside` is the
    arm without the trick. `apart` is the difference over bases, paired by seed. `verdict` is that of the sweep's
    verdict, after Holm over its predictions, or that every base has the same difference, which no test by scatter can
    resolve.
    """

    trick: str
    scene: tuple[str, ...]
    metric: str
    share: float
    beside: float
    apart: Interval
    verdict: str

    @property
    def acts(self) -> bool:
        """Whether the verdict says that the trick touches something of its own, or every base says so alike."""
        return self.verdict in ("supported", ALIKE)


def tricks_of(method: str) -> list[str]:
    """The overrides of a method's tricks, as `axis=option`: what its recipe selects, and what it leaves out."""
    chosen = [
        f"{axis}={name}" for axis, name in recipe_overrides()[method].items() if axis.partition(".")[0] not in SETTINGS
    ]
    return [*chosen, *BEYOND.get(method, ())]


def measured(folder: Path) -> dict[str, Acting]:
    """Trick -> what it touched, from the saved data of all experiments that count this."""
    found: dict[str, Acting] = {}
    for name, home in declared(folder).items():
        if name.startswith(SWEEPS):
            for acting in _of_sweep(load_data(home / DATA, name)):
                known = found.get(acting.trick)
                if known is None or not known.acts:  # what did not act in one place may in another
                    found[acting.trick] = acting
    return found


def _of_sweep(data: SweepData) -> Iterator[Acting]:
    """What each prediction on a metric that counts for an axis says of the arm's option there."""
    assert data.design is not None  # these experiments declare arms and predictions
    for judgement in judge(data, final_values(data)):
        prediction = judgement.prediction
        metric = logged_name(prediction.metric)
        axis = axis_of_fraction(metric) if is_active_fraction(metric) else _COUNTS.get(metric)
        if axis is None:
            continue
        words = data.design.arms[prediction.arm]
        trick = next(word for word in words if word.partition("=")[0] == axis)
        means = run_means(data, [metric])
        here = means[prediction.level, prediction.arm]
        there = means[prediction.level, prediction.reference or data.control].loc[here.index]
        differences = (here[metric] - there[metric]).groupby(here["base"]).mean()
        apart = t_interval(differences.tolist())
        predicted = 1 if prediction.direction is Direction.above else -1
        alike = (predicted * differences).min() > 0 and differences.std() < _ROUNDING
        scene = [word for word in data.design.base if word.partition("=")[0] not in _PLUMBING]
        scene += [word for word in words if word != trick]
        yield Acting(
            trick,
            tuple(scene),
            metric,
            float(here.groupby("base")[metric].mean().mean()),
            float(there.groupby("base")[metric].mean().mean()),
            apart.within(-1.0, 1.0) if is_active_fraction(metric) else apart,
            ALIKE if alike else judgement.verdict,
        )


def acting_table(folder: Path) -> str:
    """One row per trick of METHODS, as a markdown table. Raises ValueError for a trick that no saved data measured."""
    found = measured(folder)
    methods: dict[str, list[str]] = {}
    for method in METHODS:
        for trick in tricks_of(method):
            methods.setdefault(trick, []).append(method)
    missing = [trick for trick in methods if trick not in found]
    if missing:
        raise ValueError(f"no saved data of {SWEEPS}* measured {', '.join(missing)}: add an arm with a prediction")
    head = "| trick that acts | of | where | counted | with it | without | apart, over 4 bases | verdict |"
    lines = [head, "|---" * 8 + "|"]
    for trick, names in methods.items():
        one = found[trick]
        cells = (
            f"`{trick}`",
            ", ".join(names),
            " ".join(f"`{word}`" for word in one.scene),
            one.metric,
            f"{one.share:.3g}",
            f"{one.beside:.3g}",
            one.apart.written("{:+.3g}".format),
            one.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def documented_acting() -> dict[Path, str]:
    """The index of experiments with its up-to-date table of where tricks act, from the saved data of the checkout."""
    page = ROOT / "experiments" / "README.md"
    return {page: with_tables(page, {"| trick that acts | ": lambda: acting_table(page.parent)})}
