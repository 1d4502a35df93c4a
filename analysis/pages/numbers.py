"""The numbers of pages: each is followed by a comment that says how the saved data give it, and is filled from them.

    Downstream 0.365<!--no_cost--> without the cost and 0.048 [0.015, 0.082]<!--cost--> with it

A page of an experiment reads the data beside it. A comment holds a few words, in any order but that of the arms:

    score                      the mean of this arm's final values over its seeds; brackets are its 95% t interval (over
                               bases, if the seeds have several)
    constant/score             the same at a level of the sweep; otherwise the level is that of the page
    mask_after - score         a difference paired by seed; further arms go on with + and -
    a,b,c - plain              the same for each of a, b and c, with least or most
    @downstream                the metric, by a short name of METRICS or in full; otherwise that of the page
    of=sweep, at=level         another sweep, another level
    average                    over the whole run instead of its end
    step=33, step=1-5          at one step or in the mean over some, instead of final values
    seed=70, seed=70,71        of these seeds
    least, most                of several arms, or of the seeds of one
    each                       of every run instead of every arm, with least or most
    holm, adjusted             p of the paired t test, after Holm: over the predictions; over the contrasts of one kind
    x100                       times 100 (per cent, points)

Instead of arms, one of these may stand first:

    set key=value              an override that the sweep declares
    judged word, predictions   how many predictions have this word; how many there are
    margin                     the margin of equivalence that the sweep declares
    tau, rank arm              Kendall's tau of training reward with downstream accuracy; an arm's place by the latter
    all_pairs what             the number of pairs of arms, of distinguishable ones, of arms not_reported
    tuned a,b key              the number that these arms chose alike for a key of the configuration; lowest and highest
                               are the ends of an arm's trials
    hours sweep sweep          of one core in the steps of these sweeps, or of all that test claims, without evaluations
    gap quantity               over all sweeps that test claims, by its name in `gap_study.tables.stated`
    bench budget median        TRL's step by ours

`<!-- numbers: at=length @downstream -->` says once what the comments of a page leave out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
from gap_study.across import saved_pool
from gap_study.tables import stated

from grpo_lab.analysis.divergence.rank_agreement import RankedArms, arm_agreement, rankable
from grpo_lab.analysis.effects.all_pairs import all_pairs
from grpo_lab.analysis.effects.contrasts import TrickEffect, trick_effects
from grpo_lab.analysis.effects.verdict import Judgement, judge
from grpo_lab.analysis.final_values import AVERAGE, FinalValues, final_values
from grpo_lab.analysis.sources.chosen_numbers import chosen_numbers
from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData, bases_of
from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.analysis.stats.intervals import Interval
from pages.saved_sweeps import SavedSweeps, saved_sweeps

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"

METRICS = {
    "downstream": "eval/downstream/accuracy",
    "heldout": "eval/heldout_training/accuracy",
    "heldout_truncated": "eval/heldout_training/truncated",
    "truncated": "rollout/truncated",
    "outcome": "reward/outcome",
    "entropy": "train/entropy",
    "length": "rollout/length",
    "logprob_gap": "mismatch/absolute",
    "ess": "mismatch/ess_responses",
}
WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = r"(?:(?<![\d}])[-+])?(?:\d[\d,]*)?(?:\.\d+|\d)(?:e-?\d+)?"
FILLED = re.compile(
    rf"(?P<about>\+-)?(?P<mean>{NUMBER}|\b(?:{'|'.join(WORDS)})\b)(?P<unit>%?)"
    rf"(?: ?\[(?P<low>{NUMBER}), (?P<high>{NUMBER})\])?"
    r"<!--(?P<how>(?! ).*?)-->",
    flags=re.I,
)
_DEFAULTS = re.compile(r"<!-- numbers: (.*?) -->")


@dataclass(frozen=True)
class Context:
    """Defaults of a comment: the sweep, its level and the metric."""

    sweep: str = ""
    level: str = ""
    metric: str = ""

    def of(self, how: str) -> tuple[Context, str]:
        """The context that the words of a comment choose, and its other words."""
        chosen, rest = self, []
        for word in how.split():
            key, _, value = word.partition("=")
            if word.startswith(("of=", "at=")):
                chosen = replace(chosen, **{{"of": "sweep", "at": "level"}[key]: value})
            else:
                rest.append(word)
        return chosen, " ".join(rest)


def metric_called(name: str) -> str:
    """A metric by its short name, or by its own."""
    return METRICS.get(name, name)


# --- the saved data ---------------------------------------------------------------------------------------------


def saved(name: str) -> SweepData:
    """A saved sweep, by the name of its experiment. Raises KeyError without such."""
    return data_of(name)[0]


@cache
def data_of(name: str) -> tuple[SweepData, FinalValues]:
    """A saved sweep with its final values, by the name of its experiment. Raises KeyError without such."""
    try:
        return _sweeps().named(name)
    except ValueError:  # its declaration was worded anew since; the page is about the one that ran
        data = load_data(_sweeps().folders[name] / "data", name)
        return data, final_values(data)


def _sweeps() -> SavedSweeps:
    return saved_sweeps(EXPERIMENTS)


def finals_of(name: str) -> FinalValues:
    """Final values of a saved sweep."""
    return data_of(name)[1]


@cache
def places_of(name: str) -> frozenset[Condition]:
    """(level, arm) of all runs of a saved sweep."""
    return frozenset(saved(name).run_arms)


@cache
def judgements_of(name: str) -> list[Judgement]:
    """The predictions of a saved sweep, judged."""
    return judge(saved(name), finals_of(name))


@cache
def effects_of(name: str, metric: str) -> dict[tuple[str, frozenset[tuple[str, float]]], TrickEffect]:
    """(level, weights of the arms) -> the effect on a metric."""
    effects = trick_effects(saved(name), finals_of(name), [metric])
    return {(e.contrast.level, frozenset(e.contrast.weights.items())): e for e in effects}


# --- recipes ----------------------------------------------------------------------------------------------------

Contrast = tuple[tuple[int, Condition], ...]  # with its sign


@dataclass(frozen=True)
class Recipe:
    """A recipe, word by word. `contrasts` has one context for each arm of a list."""

    contrasts: tuple[Contrast, ...]
    metric: str
    options: Mapping[str, str]
    words: frozenset[str]


CHOICES = ("least", "most")
STATISTICS = (*CHOICES, "each", "average", "holm", "adjusted")


def read_recipe(context: Context, how: str) -> Recipe:
    """The words of a recipe. Raises ValueError for an arm or level that the sweep does not have."""
    terms: list[tuple[int, list[str]]] = []
    options: dict[str, str] = {}
    words: set[str] = set()
    metric, sign = context.metric, 1
    for word in how.split():
        if word in ("-", "+"):
            sign = 1 if word == "+" else -1
        elif word.startswith("@"):
            metric = word[1:]
        elif word in STATISTICS:
            words.add(word)
        elif "=" in word:
            key, _, value = word.partition("=")
            options[key] = value
        else:
            terms.append((sign, word.split(",")))
    metric = metric_called(metric)
    metric = AVERAGE + metric if "average" in words and not metric.startswith(AVERAGE) else metric
    groups = [(sign, [_place(context, arm) for arm in group]) for sign, group in terms]
    longest = max(len(group) for _, group in groups)
    contrasts = tuple(tuple((sign, group[at % len(group)]) for sign, group in groups) for at in range(longest))
    return Recipe(contrasts, metric, options, frozenset(words))


def _place(context: Context, word: str) -> Condition:
    level, _, arm = word.rpartition("/")
    place = (level or context.level, arm)
    if place not in places_of(context.sweep):
        raise ValueError(f"{context.sweep} has no arm {place}; it has {sorted(places_of(context.sweep))}")
    return place


def by_seed(context: Context, recipe: Recipe, contrast: Contrast) -> pd.Series:
    """The contrast of each seed that has all of its arms."""
    total, *others = (sign * _values(context, recipe, place) for sign, place in contrast)
    for part in others:
        total = total + part
    return total.dropna().sort_index()


def _values(context: Context, recipe: Recipe, place: Condition) -> pd.Series:
    options, metric = recipe.options, recipe.metric
    if "step" in options:
        values = _at(context, place, metric, options["step"])
    else:
        values = finals_of(context.sweep).of(*place, metric)
    if values.empty:
        raise ValueError(f"{context.sweep} has no {metric} of {place}")
    return values.loc[[int(seed) for seed in options["seed"].split(",")]] if "seed" in options else values


def _at(context: Context, place: Condition, metric: str, steps: str) -> pd.Series:
    points = saved(context.sweep).points
    here = points[(points["level"] == place[0]) & (points["arm"] == place[1])].dropna(subset=[metric])
    first, _, last = steps.partition("-")
    return here[here["step"].between(int(first), int(last or first))].groupby("seed")[metric].mean()


def measured(context: Context, how: str) -> Interval:
    """What the saved data say, as a number with its interval where it has one."""
    words = how.split()
    scales = [float(word[1:]) for word in words if re.fullmatch(r"x\d+", word)]
    words = [word for word in words if not re.fullmatch(r"x\d+", word)]
    special = SPECIAL.get(words[0])
    one = special(context, words[1:]) if special else _of_arms(context, read_recipe(context, " ".join(words)))
    return one.scaled(math.prod(scales))


def _of_arms(context: Context, recipe: Recipe) -> Interval:
    words = recipe.words
    series = [by_seed(context, recipe, contrast) for contrast in recipe.contrasts]
    if "each" in words or (len(series) == 1 and words & set(CHOICES)):
        series = [values.loc[[seed]] for values in series for seed in values.index]
    if words & {"holm", "adjusted"}:
        found = [_number(_of_test(context, recipe, contrast)) for contrast in recipe.contrasts]
    else:
        bases = bases_of(saved(context.sweep))
        found = [compare(values, bases, grouped=False).whole for values in series]
    if words & set(CHOICES):
        return (min if "least" in words else max)(found, key=lambda one: one.mean)
    if len(found) != 1:
        raise ValueError(f"{len(found)} values: say least or most")
    return found[0]


def _of_test(context: Context, recipe: Recipe, contrast: Contrast) -> float:
    if "holm" not in recipe.words:
        weights = frozenset((arm, float(sign)) for sign, (_, arm) in contrast)
        effect = effects_of(context.sweep, recipe.metric)[contrast[0][1][0], weights]
        return effect.p_adjusted
    (_, asked), (_, reference) = contrast
    (found,) = (
        one.holm
        for one in judgements_of(context.sweep)
        if ((one.prediction.level, one.prediction.arm), one.prediction.metric) == (asked, recipe.metric)
        and one.reference == reference
    )
    return found


# --- what is no contrast of arms --------------------------------------------------------------------------------


def _number(value: float) -> Interval:
    return Interval(float(value), math.nan, math.nan, 1)


def _set(context: Context, rest: list[str]) -> Interval:
    """An override that the sweep declares, in its base, a level, an arm or a trick."""
    (override,) = rest
    design = saved(context.sweep).record.design or {}
    declared: list[str] = list(design["base"])
    for part in ("levels", "arms", "tricks"):
        declared += [one for overrides in (design.get(part) or {}).values() for one in overrides]
    if override not in declared:
        raise ValueError(f"{context.sweep} does not declare {override}: {declared}")
    return _number(float(override.partition("=")[2]))


def _judged(context: Context, rest: list[str]) -> Interval:
    return _number([one.verdict for one in judgements_of(context.sweep)].count(" ".join(rest)))


def _predictions(context: Context, rest: list[str]) -> Interval:
    return _number(len(judgements_of(context.sweep)))


def _margin(context: Context, rest: list[str]) -> Interval:
    design = saved(context.sweep).design
    if design is None or design.margin is None:
        raise ValueError(f"{context.sweep} declares no margin")
    return _number(design.margin)


def _ranked(context: Context) -> RankedArms:
    return rankable(*data_of(context.sweep))[0][context.level]


def _tau(context: Context, rest: list[str]) -> Interval:
    here = _ranked(context)
    return _number(arm_agreement(here.reward, here.downstream).tau)


def _rank(context: Context, rest: list[str]) -> Interval:
    here = _ranked(context)
    return _number(here.ranks("downstream")[here.arms.index(rest[0])])


def _all_pairs(context: Context, rest: list[str]) -> Interval:
    """Numbers from the comparison of all pairs of arms, for the block's level and metric."""
    name = context.metric if len(rest) == 1 else rest[1].removeprefix("@")
    found = all_pairs(saved(context.sweep), finals_of(context.sweep), context.level, metric_called(name))
    assert found is not None, "three arms on two bases"
    counts = {"number": found.pairs, "distinguishable": found.number_distinguishable}
    return _number((counts | {"not_reported": len(found.not_reported)})[rest[0]])


def _tuned(context: Context, rest: list[str]) -> Interval:
    """What the tuning of a sweep of one level chose. Raises ValueError where the arms chose otherwise."""
    arms, what = rest
    found = {one.arm: one for one in chosen_numbers(saved(context.sweep).record)}
    if what in ("lowest", "highest"):
        return _number((min if what == "lowest" else max)(trial.value for trial in found[arms].trials))
    numbers = {found[arm].chosen.numbers[what] for arm in arms.split(",")}
    if len(numbers) > 1:
        raise ValueError(f"{arms} chose {numbers}")
    return _number(numbers.pop())


def _hours(context: Context, rest: list[str]) -> Interval:
    """Of one core; a run that several sweeps have counts once, one that has not begun takes no time."""
    seconds: dict[str, float] = {}
    for name in rest or saved_pool(_sweeps()).sweeps:
        data = saved(name)
        took = data.points.groupby(LABELS, as_index=False)["budget/device_seconds"].max()
        began = data.runs[[*LABELS, "run_key"]].merge(took, on=LABELS)
        seconds |= dict(zip(began["run_key"].astype(str), began["budget/device_seconds"].astype(float)))
    return _number(sum(seconds.values()) / 3600)


@cache
def _gap_numbers() -> Mapping[str, Interval | float]:
    return stated(saved_pool(_sweeps()))


def _gap(context: Context, rest: list[str]) -> Interval:
    found = _gap_numbers()[" ".join(rest)]
    return found if isinstance(found, Interval) else _number(found)


def _bench(context: Context, rest: list[str]) -> Interval:
    budget, which = rest
    (path,) = (ROOT / "tests" / "benchmarks" / "results").glob("*_cores.json")
    (found,) = (one for one in json.loads(path.read_text())["budgets"] if one["budget"] == int(budget))
    return _number(found["summary"]["step"][which])


SPECIAL: Mapping[str, Callable[[Context, list[str]], Interval]] = {
    "set": _set,
    "judged": _judged,
    "predictions": _predictions,
    "margin": _margin,
    "tau": _tau,
    "all_pairs": _all_pairs,
    "tuned": _tuned,
    "rank": _rank,
    "hours": _hours,
    "gap": _gap,
    "bench": _bench,
}


# --- filling a page ---------------------------------------------------------------------------------------------


def filled(text: str, sweep: str = "") -> str:
    """The text with every number that a comment follows as the saved data give it, at the precision it was written in.

    `sweep` is that of the page. A number that is right at its precision stays as it is. Raises ValueError, with the
    number, where a comment cannot be read.
    """
    found = _DEFAULTS.search(text)
    words = found[1].split() if found else []
    page, _ = Context(sweep).of(" ".join(words))
    page = replace(page, metric=next((word[1:] for word in words if word.startswith("@")), ""))
    return FILLED.sub(lambda one: _filled(one, page), text)


def _filled(found: re.Match[str], page: Context) -> str:
    context, how = page.of(found["how"])
    try:
        value = measured(context, how)
        mean = _written(found["mean"], value.mean)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{found[0]}: {error}") from error
    interval = ""
    if found["low"] is not None:
        low, high = (_written(found[part], getattr(value, part)) for part in ("low", "high"))
        interval = f" [{low}, {high}]"
    return f"{found['about'] or ''}{mean}{found['unit']}{interval}<!--{found['how']}-->"


def _written(before: str, value: float) -> str:
    """A number in the manner of the one before it, which stays where it is right."""
    if before.lower() in WORDS:
        word = WORDS[round(value)]
        return word.capitalize() if before[0].isupper() else word
    number = float(before.replace(",", ""))
    digits, _, power = before.replace(",", "").partition("e")
    places = len(digits.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - places) * (1000 if before.endswith(",000") else 1)
    if abs(value - number) <= 0.5 * unit * (1 + 1e-6) + 1e-12:
        return before
    sign = "+" if before.startswith("+") else ""
    if power:
        return f"{value:{sign}.{places}e}"
    return f"{round(value / unit) * unit:{sign}{',' if ',' in before else ''}.{places}f}"
