"""How many seeds and base models a declared experiment needs, from how far the runs of a pilot differ.

A prediction is decided as `verdict` does: paired differences, a base's mean over its seeds as one observation, t with
one degree less than there are base models (or seeds, with one base model), Holm over all predictions. What is planned
for is the first step of Holm, p below alpha / m, which a prediction passes whatever comes of the other m - 1: with
effects in several of them Holm asks less. A prediction of `within` is found where the margin excludes an effect that is
0.

The deviations come from few runs and are rough, and so is every number made of them: intervals say how rough.
Collapsed runs are left out of them and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from grpo_lab.analysis.effects.verdict import decide, is_in_part, places_of
from grpo_lab.analysis.final_values import FinalValues, final_values, is_rated
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.analysis.stats.components import Scatter, pooled_scatter
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, seed_differences
from grpo_lab.analysis.stats.multiplicity import ALPHA
from grpo_lab.analysis.stats.power import POWER, fewest, minimum_detectable_effect, power_of_t, power_within
from grpo_lab.analysis.table_rows import aligned
from grpo_lab.config.design import Design, Direction, Prediction

SEEDS = (1, 2, 4, 8)  # on each base model, of the tables
BASES = (3, 4, 6, 8, 12, 16)
ALONE = (3, 4, 5, 6, 8, 12, 16, 24, 32)  # seeds, where there is one base model
TRIALS = 400  # simulated sweeps, which give a power to within 5 points


@dataclass(frozen=True)
class Pilot:
    """The scatter of one metric's paired differences.

    `contrasts` is how many were pooled, `pairs` how many pairs of runs stand behind them, `collapsed` how many more
    were left out. `how` says in words which differences these are, and what is assumed of them. `alone` are the
    smallest and the largest standard deviation of a single contrast.
    """

    scatter: Scatter
    alone: tuple[float, float]
    contrasts: int
    pairs: int
    collapsed: int
    bases: int
    how: str


def with_predictions(design: Design) -> Design:
    """The design with those predictions that its chosen part decides, which are the ones that Holm counts.

    Where it predicts nothing, there is one for every arm against its control, at each level. Raises ValueError where
    there is nothing to compare.
    """
    made = design.predictions or tuple(
        Prediction(arm, design.primary, Direction.above, level)
        for level in design.levels
        for arm in design.arms
        if arm != design.control
    )
    if not made:
        raise ValueError(f"{design.name} has one arm and compares nothing, so there is no power to plan")
    in_family = tuple(one for one in made if is_in_part(design, one))
    if not in_family:
        raise ValueError(
            f"part {design.part} of {design.name} runs no predicted arm together with its reference, so there is no "
            "power to plan: choose another design.part, or leave it out for the whole design"
        )
    return replace(design, predictions=in_family)


def bases_run(design: Design) -> set[int]:
    """The base models that the seeds of the chosen part start from; none where the design names none."""
    return {base for seed in design.chosen().seeds if (base := design.base_of(seed)) is not None}


# --- what a pilot shows -----------------------------------------------------------------------------------------


def measure_pilot(design: Design, data: SweepData, metric: str, finals: FinalValues | None = None) -> Pilot:
    """How far paired differences on a metric deviate, in these runs.

    The design's own contrasts where the pilot has their arms, else each of the pilot's arms less its control. Where it
    has only one arm, pairs are assumed to gain nothing, and effects to deviate between base models as the runs do.
    Raises ValueError where no contrast has two pairs.
    """
    finals = finals or final_values(data)
    own = [places_of(design, one) for one in design.predictions if one.metric == metric]
    found = _differences(finals, metric, own)
    how = "the design's own contrasts"
    if not found:
        found = _differences(finals, metric, [(place, (place[0], data.control)) for place in data.run_arms])
        how = f"each arm less {data.control}, as the pilot has not the design's arms"
    alone = not found
    if alone:
        found = {place: _without(finals, metric, place) for place in data.run_arms}
    columns = pd.DataFrame({str(place): series for place, (series, _) in found.items()})
    scatter = pooled_scatter(columns, finals.bases)
    if alone:
        how = "runs of only one arm: the SD of a paired difference is taken as sqrt(2) times "
        if math.isnan(scatter.within):
            how += "the SD of runs of several base models (conservative)"
        else:
            how += "that over seeds, and effects vary between base models as much as runs do (conservative)"
        scatter = _of_pairs(scatter)
    pairs = int(columns.notna().to_numpy().sum())
    collapsed = sum(number for _, number in found.values())
    bases = len({finals.bases.get(int(seed), -1) for seed in columns.index})
    single = columns.std() * (math.sqrt(2) if alone else 1)
    return Pilot(scatter, (float(single.min()), float(single.max())), len(found), pairs, collapsed, bases, how)


def _of_pairs(runs: Scatter) -> Scatter:
    """The scatter of differences between two independent runs of a base, whose effects differ as the base models do.

    With one run a base the two parts cannot be separated, and both count twice: no less than the difference has.
    """
    if math.isnan(runs.between):
        return replace(runs, within=2 * runs.within)
    if math.isnan(runs.within):
        return replace(runs, between=2 * runs.between)
    return replace(runs, between=max(0.0, runs.between - runs.within) + 2 * runs.within, within=2 * runs.within)


def _differences(
    finals: FinalValues, metric: str, contrasts: Sequence[tuple[Condition, Condition]]
) -> dict[tuple[Condition, Condition], tuple[pd.Series, int]]:
    """Differences by seed of the contrasts that have some, without collapsed pairs, and how many collapsed."""
    found = {}
    for place, reference in dict.fromkeys(contrasts):
        if place == reference:
            continue
        whole = seed_differences(finals.of(*place, metric), finals.of(*reference, metric))
        fallen = finals.fallen(place, reference)
        left = whole[[seed not in fallen for seed in whole.index]]
        if len(left) > 1:
            found[place, reference] = left, len(whole) - len(left)
    return found


def _without(finals: FinalValues, metric: str, place: Condition) -> tuple[pd.Series, int]:
    """The values of an arm without collapsed runs, and how many collapsed."""
    whole = finals.of(*place, metric)
    left = whole[[seed not in finals.fallen(place) for seed in whole.index]]
    return left, len(whole) - len(left)


# --- what it means for a design ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """The target of a test: an effect of this size, or, `within`, that a true 0 is within this margin.

    `family` is how many predictions Holm counts.
    """

    effect: float
    within: bool
    family: int

    @property
    def alpha(self) -> float:
        """The threshold of the smallest p of the family."""
        return ALPHA / self.family

    def power(self, sd: float, observations: int) -> float:
        """The power of a test on this number of base models (or seeds, with one base model) at this sd.

        0 below FOR_INTERVAL: `compare` then has no interval, without which nothing is decided.
        """
        if observations < FOR_INTERVAL:
            return 0.0
        power = power_within if self.within else power_of_t
        return power(self.effect, sd, observations, alpha=self.alpha)

    def needed(self, sd: float) -> int | None:
        """The fewest observations with the power; None beyond 100,000."""
        return fewest(lambda n: self.power(sd, n), POWER, FOR_INTERVAL)


@dataclass(frozen=True)
class Needed:
    """Number of base models with `seeds` each (or of seeds, with one) that find an effect.

    `low` and `high` take the ends of the interval of their deviation. None: over 100,000.
    """

    seeds: int
    sd: Interval
    number: int | None
    low: int | None
    high: int | None

    @property
    def runs(self) -> int | None:
        """Of each arm."""
        return None if self.number is None else self.number * self.seeds

    @property
    def text(self) -> str:
        """`13 [8, 45]`."""
        return f"{_number(self.number)} [{_number(self.low)}, {_number(self.high)}]"


def _number(value: int | None) -> str:
    return "over 100,000" if value is None else str(value)


def needed(question: Question, pilot: Pilot, of_bases: bool) -> list[Needed]:
    """For each number of seeds on a base, how many base models; with one base model, how many seeds."""
    rows = []
    for seeds in SEEDS if of_bases else (1,):
        sd = pilot.scatter.of_mean(seeds)
        middle, low, high = (question.needed(max(one, 1e-12)) for one in (sd.mean, sd.low, sd.high))
        rows.append(Needed(seeds, sd, middle, low, high))
    return rows


def cheapest(rows: Sequence[Needed]) -> Needed | None:
    """The row of the fewest runs; of equals that with more base models, whose interval rests on more."""
    known = [row for row in rows if row.runs is not None]
    return min(known, key=lambda row: (row.runs or 0, row.seeds), default=None)


def sizes(design: Design) -> tuple[int, int]:
    """The observations and the seeds of each: base models and their seeds, or seeds and 1 with one base model."""
    bases, seeds = len(bases_run(design)), len(design.chosen().seeds)
    return (bases, seeds // bases) if bases > 1 else (seeds, 1)


def simulated_power(
    design: Design, scatters: Mapping[str, Scatter], question: Question, at: int, trials: int = TRIALS
) -> float:
    """Simulated power of prediction `at`: the share of simulated sweeps of the design that support it.

    All predictions of the design count, so it is one that `with_predictions` gave. Arms are normal, so that paired
    differences deviate as `scatters` says for each metric; arms that share a control share its noise. The question's
    effect is planted in the prediction's arm, 0 where the question is `within`; all others are 0. Found is the word
    `supported`, by `compare` and Holm over the family.
    """
    rng = np.random.default_rng(0)
    prediction = design.predictions[at]
    if not question.within and prediction.direction is Direction.within:
        prediction = replace(prediction, direction=Direction.above)
        design = replace(design, predictions=(*design.predictions[:at], prediction, *design.predictions[at + 1 :]))
    shift = 0.0 if question.within else question.effect * (1 if prediction.direction is Direction.above else -1)
    moves = places_of(design, prediction)[0], prediction.metric
    seeds = design.chosen().seeds
    bases = {one: base for one in seeds if (base := design.base_of(one)) is not None}
    of = np.array([sorted(set(bases.values())).index(bases[one]) if bases else 0 for one in seeds])
    pairs = [(one, *places_of(design, one)) for one in design.predictions]
    measured = list(dict.fromkeys((place, one.metric) for one, *both in pairs for place in both))
    met = {metric: _met(scatter, len(bases_run(design)) > 1) for metric, scatter in scatters.items()}
    found = 0
    for _ in range(trials):
        values = {}
        for place, metric in measured:
            scatter = met[metric]
            between = 0.0 if math.isnan(scatter.between) else scatter.of_bases
            within = 0.0 if math.isnan(scatter.within) else scatter.of_seeds
            own = between * rng.standard_normal(len(set(bases.values())))[of] if bases else 0.0
            moved = shift if (place, metric) == moves else 0.0
            values[place, metric] = moved + (own + within * rng.standard_normal(len(seeds))) / math.sqrt(2)
        compared = []
        for one, place, reference in pairs:
            differences = values[place, one.metric] - values[reference, one.metric]
            by_seed = dict(zip(seeds, differences.tolist()))
            compared.append((reference, compare(by_seed, bases, grouped=is_rated(one.metric))))
        found += decide(design, compared, {})[at].verdict == "supported"
    return found / trials


# --- in words ---------------------------------------------------------------------------------------------------


def power_text(
    design: Design, data: SweepData, effects: Sequence[float] = (), metric: str = "", trials: int = TRIALS
) -> list[str]:
    """The plan of every metric of which something is predicted, the primary one first; of `metric` alone if named.

    `effects` are sizes on the primary metric (or on `metric`); without them the margins that are declared count. Raises
    ValueError for a pilot that shows no deviation, an effect that is not above 0, or a part without a prediction.
    """
    if wrong := [one for one in effects if not 0 < one < math.inf]:
        raise ValueError(f"--effect {wrong[0]:g}: give a size above 0, in the metric's unit, such as 0.05")
    design = with_predictions(design)
    family = len(design.predictions)
    metrics = list(dict.fromkeys([design.primary, *(one.metric for one in design.predictions)]))
    metrics = [name for name in metrics if any(one.metric == name for one in design.predictions)]
    if metric and metric not in metrics:
        raise ValueError(f"{design.name} predicts nothing of {metric}: choose from {', '.join(metrics)}")
    finals = final_values(data)
    pilots: dict[str, Pilot] = {}
    missing = {}
    for name in metrics:
        try:
            pilots[name] = measure_pilot(design, data, name, finals)
        except ValueError as error:
            missing[name] = str(error)
    first = metric or metrics[0]
    if first in missing:
        raise ValueError(f"{first} in {data.source}: {missing[first]}")
    lines = [
        f"{design.name}: {family} prediction{'s' * (family > 1)}; planned for {POWER:.0%} power at the strictest "
        f"Holm threshold, p < {ALPHA:g} / {family} = {ALPHA / family:.3g}",
        f"standard deviations from {data.source}; final values at {finals.at}",
    ]
    for name in [metric] if metric else metrics:
        lines += ["", metric_text(name) + (" (the metric that decides)" if name == design.primary else "")]
        if name in missing:
            lines.append(f"  {missing[name]}")
            continue
        sizes_of = effects if name == first else ()
        lines += [f"  {line}" for line in _metric_lines(design, name, pilots, sizes_of, family, trials)]
    return lines


def _metric_lines(
    design: Design, metric: str, pilots: Mapping[str, Pilot], effects: Sequence[float], family: int, trials: int
) -> list[str]:
    many = len(bases_run(design)) > 1
    lines = _scatter_lines(pilots[metric], many)
    pilot = replace(pilots[metric], scatter=_met(pilots[metric].scatter, many))
    if pilot.scatter.of_mean(1).mean == 0:
        return [*lines, "all differences are equal, so nothing can be planned: a pilot with more seeds may help"]
    observations, seeds = sizes(design)
    sd = pilot.scatter.of_mean(seeds)
    each = seeds if many else observations
    declared = f"{f'{observations} base models x ' if many else ''}{each} seed{'s' * (each > 1)}"
    alpha = ALPHA / family
    if observations < FOR_INTERVAL:
        what = "base models" if many else "seeds"
        lines.append(
            f"as declared, {declared}: no interval, so no effect can be found: {FOR_INTERVAL} {what} are needed"
        )
    else:
        found = [minimum_detectable_effect(one, observations, POWER, alpha) for one in (sd.mean, sd.low, sd.high)]
        lines.append(
            f"as declared, {declared}: the smallest effect found with {POWER:.0%} power is {_interval(found, '.3g')}"
        )
    lines += ["", *_detectable(pilot, many, alpha)]
    questions = _questions(design, metric, effects, family)
    for question, at in questions:
        lines += ["", *_question_lines(question, pilot, many, design, at, pilots, trials)]
    if not questions:
        lines.append("no margin is declared: --effect 0.05 says how many runs an effect of that size needs")
    return lines


def _scatter_lines(pilot: Pilot, many: bool) -> list[str]:
    scatter = pilot.scatter
    counted = ((pilot.pairs, "pair"), (pilot.contrasts, "contrast"), (pilot.bases, "base model"))
    pairs, contrasts, bases = (f"{number} {what}{'s' * (number != 1)}" for number, what in counted)
    lines = [f"{pairs} in {contrasts}, on {bases}: {pilot.how}"]
    if pilot.collapsed:
        lines.append(
            f"{pilot.collapsed} more pairs contain a collapsed run and are left out: if runs collapse, power is "
            "lower than reported here"
        )
    parts = []
    if not math.isnan(scatter.between):
        parts.append(f"between base models {scatter.of_bases:.3g} ({scatter.between_freedom:.1f} degrees of freedom)")
    if not math.isnan(scatter.within):
        parts.append(f"between seeds of a base {scatter.of_seeds:.3g} ({scatter.within_freedom:.1f})")
    lines.append(f"standard deviation of a difference: {', '.join(parts)}")
    if pilot.contrasts > 1:
        lines.append(
            "SD of single contrasts: {:.3g} to {:.3g}; the rest uses their root mean square, so a noisier contrast "
            "needs more runs".format(*pilot.alone)
        )
    if many and math.isnan(scatter.between):
        lines.append(
            "the pilot has one base model, so the SD of effects between base models is unknown and taken as 0: the "
            "required sizes below are lower bounds. Remedy: a pilot on two base models or more"
        )
    elif many and math.isnan(scatter.within):
        lines.append("the pilot has one seed per base model: whether more seeds per base model help is unknown")
    elif not many and math.isnan(scatter.within):
        lines.append(
            "the pilot has one seed per base model, so the SD between base models stands in for that between seeds "
            "(conservative)"
        )
    elif not many and not math.isnan(scatter.between):
        lines.append("the design has one base model, so only the SD between seeds of a base model is used")
    return lines


def _detectable(pilot: Pilot, many: bool, alpha: float) -> list[str]:
    """The smallest effects by size of the design."""
    if not many:
        sd = pilot.scatter.of_mean(1).mean
        cells = [f"{minimum_detectable_effect(sd, n, POWER, alpha):.3g}" for n in ALONE]
        return ["smallest effect, by seeds:", *aligned([["seeds", *map(str, ALONE)], ["effect", *cells]])]
    rows = [["base models", *(f"{seeds} seeds each" if seeds > 1 else "1 seed each" for seeds in SEEDS)]]
    for bases in BASES:
        found = [minimum_detectable_effect(pilot.scatter.of_mean(seeds).mean, bases, POWER, alpha) for seeds in SEEDS]
        rows.append([str(bases), *(f"{one:.3g}" for one in found)])
    return ["smallest effect, by base models and seeds:", *aligned(rows)]


def _met(scatter: Scatter, many: bool) -> Scatter:
    """The scatter that a design meets: one of a single base model that between seeds.

    Where the pilot has one seed a base, all that its base models differ by stands for it.
    """
    if many or math.isnan(scatter.between):
        return scatter
    if math.isnan(scatter.within):
        scatter = replace(scatter, within=scatter.between, within_freedom=scatter.between_freedom)
    return replace(scatter, between=math.nan, between_freedom=0.0)


def _questions(design: Design, metric: str, effects: Sequence[float], family: int) -> list[tuple[Question, int]]:
    """The targets on a metric, each with the position of the prediction that sets it."""
    found: dict[Question, int] = {}
    for at, one in enumerate(design.predictions):
        if one.metric != metric:
            continue
        margin = design.margin_of(one)
        within = one.direction is Direction.within
        for size in (margin,) if within or not effects else effects:
            if size is not None:
                found.setdefault(Question(size, within, family), at)
    if effects and all(question.within for question in found):  # nothing is predicted above or below
        at = next(at for at, one in enumerate(design.predictions) if one.metric == metric)
        found |= {Question(size, False, family): at for size in effects}
    return list(found.items())


def _question_lines(
    question: Question,
    pilot: Pilot,
    many: bool,
    design: Design,
    at: int,
    pilots: Mapping[str, Pilot],
    trials: int,
) -> list[str]:
    what = f"an effect of {question.effect:g}"
    if question.within:
        what = f"equivalence within {question.effect:g} if the true effect is 0"
    observations, seeds = sizes(design)
    sd = pilot.scatter.of_mean(seeds)
    powers = [question.power(max(one, 1e-12), observations) for one in (sd.mean, sd.high, sd.low)]
    lines = [f"to find {what}:", f"  as declared: power {_interval(powers, '.0%')}"]
    if trials and set(pilots) >= {one.metric for one in design.predictions}:
        scatters = {name: one.scatter for name, one in pilots.items()}
        alone = simulated_power(design, scatters, question, at, trials)
        lines.append(f"  {trials} simulated sweeps, judged like real ones, with no other effect: {alone:.0%}")
    rows = needed(question, pilot, many)
    if many:
        table = [["seeds a base", "sd of a base's mean", "base models needed", "runs of an arm"]]
        table += [[str(row.seeds), row.sd.text(), row.text, _number(row.runs)] for row in rows]
        lines += [f"  {line}" for line in aligned(table)]
        if (best := cheapest(rows)) is not None:
            arms = len(design.chosen().arms) * len(design.chosen().levels)
            each = "one seed" if best.seeds == 1 else f"{best.seeds} seeds"
            lines.append(
                f"  fewest runs: {best.number} base models with {each} each, {arms * (best.runs or 0)} runs for {arms} "
                "arms"
            )
    else:
        lines.append(f"  seeds needed: {rows[0].text}; sd {rows[0].sd.text()}")
    return lines


def _interval(values: Sequence[float], form: str) -> str:
    middle, low, high = (format(value, form) for value in values)
    return f"{middle} [{low}, {high}]"
