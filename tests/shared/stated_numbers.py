"""The vocabulary of `tests/docs/stated_numbers.yaml`: how a number that a page states follows from the saved data.

A sentence is written as it stands on the page, with a recipe in braces behind each number:

    Downstream 0.365{no_cost} without the cost and 0.048 [0.015, 0.082]{cost} with it

A recipe is a few words, in any order but that of the arms:

    score                      the mean of this arm's final values over its seeds; brackets are its 95% t interval (over
                               bases, if the seeds have several)
    constant/score             the same at a level of the sweep; otherwise the level is that of the block
    mask_after - score         a difference paired by seed; further arms go on with + and -
    a,b,c - plain              the same for each of a, b and c, with least or most
    *, */*                     every arm that the recipe does not name, at one level or at all
    control                    the control, at the level of the arm before it
    @downstream                the metric, by its short name or in full; otherwise that of the block
    average                    over the whole run instead of its end
    step=33, steps=1-5         at one step or in the mean over some, instead of final values; step=end is the last
    since=0                    less the value at this step
    seed=70, seed=70,71        of these seeds
    axis=steps                 final values at equal steps instead of on the declared axis
    less=@heldout              less another metric of the same runs
    over=plain, over=@length   divided by another arm or metric; over=least by the smallest of the same
    per=@downstream            divided by the mean of the same contrast on another metric
    least, most, middle        of several arms, or of the seeds of one
    each                       of every run instead of every arm, with least or most
    low, high, half, size      a bound of the interval; half of its width; the number without its sign
    p, holm, adjusted, mde     of the paired t test: plain; over the predictions; over the contrasts of one kind; the
                               smallest effect that so many seeds would find
    x100, x-1                  times 100 (per cent, points), times -1
    <=, >=                     the number is a bound: the value is at most, at least as much

Instead of arms, one of these may stand first:

    set key=value              an override that the sweep declares
    conf file key              of a YAML in conf
    judged word, predictions   how many predictions have this word; how many there are
    margin word arm @metric    the margin of the arm's prediction to lie within it, which must have this word
    csv file column=value ... column    a table in analysis/data; `_` for a blank, a comma between values
    divergence arm measure     of the divergence table; `_` for what ranks all arms
    tau share                  training reward against downstream accuracy, over the last share of the budget
    told what                  how many pairs of arms there are, are told apart; how many arms are unjudged
    told without=a,b           how many pairs are told apart among the other arms
    tuned a,b key              the number that these arms chose alike for a key of the configuration
    tuned a lowest             of the values of an arm's trials; or highest
    rank arm                   the place of an arm by its mean, 1 the largest
    hours sweep sweep          of one core in the steps of these sweeps, or of the block's, without evaluations
    kl_distance quantile       of sqrt(nat) from the initial policy, over all evaluations after the start
    target_slope arm           tokens for each token asked for
    gap quantity name          over all sweeps that test claims: `_gap` lists the quantities
    bench budget median        TRL's step by ours
    pressure aggregation truncation    thousandths, of tests/tricks/test_golden.py

What cannot be recomputed says so: `given why` is for a number that is no result of this project, `unkept` for one of
runs that are not kept, as the sentence itself has to say.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import yaml

from grpo_lab.analysis.divergence.across import (
    GROUPS,
    announcements,
    costs,
    counted,
    misled,
    opposite_adjusted,
    regret_saved,
    regrets,
    saved_pool,
    spent_after,
    with_gap,
)
from grpo_lab.analysis.divergence.rank_agreement import kendall_tau
from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.effects.contrasts import TrickEffect, trick_effects
from grpo_lab.analysis.effects.told_apart import told_apart
from grpo_lab.analysis.effects.verdict import Judgement, judge
from grpo_lab.analysis.figures.target_lengths import asked_lengths, slope_of
from grpo_lab.analysis.final_values import AVERAGE, FinalValues, final_values
from grpo_lab.analysis.saved_sweeps import saved_sweeps
from grpo_lab.analysis.sources.chosen_numbers import chosen_numbers
from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData, bases_of
from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.analysis.stats.multiplicity import paired_t_pvalue
from grpo_lab.analysis.tracks import KL
from grpo_lab.config.design import Direction
from grpo_lab.tricks.aggregation import Constant, SequenceMean, Width
from grpo_lab.tricks.denominator import Original
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score

ROOT = Path(__file__).parents[2]
DATA = ROOT / "analysis" / "data"
ENTRIES = ROOT / "tests" / "docs" / "stated_numbers.yaml"

NOT_KEPT = re.compile(r"\((?:runs?|rollouts|measurements) not kept\)")
WORDS = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = r"(?:(?<![\d}])[-+])?(?:\d[\d,]*)?(?:\.\d+|\d)(?:e-?\d+)?"
STATED = re.compile(
    rf"(?:\+-)?(?P<mean>{NUMBER}|\b(?:{'|'.join(WORDS)})\b)?%?(?: ?\[(?P<low>{NUMBER}), (?P<high>{NUMBER})\])?"
    r"\{(?P<how>[^{}]*)\}",
    flags=re.I,
)


@dataclass(frozen=True)
class Entry:
    """A sentence of a page; `written` holds the recipes, `text` is what stands on the page."""

    page: str
    sweep: str
    level: str
    metric: str
    written: str

    @property
    def text(self) -> str:
        """The sentence without its recipes."""
        return re.sub(r"\{[^{}]*\}", "", self.written)

    def numbers(self) -> Iterator[tuple[re.Match[str], int, int]]:
        """Each stated number with its recipe, and where in `text` it begins and ends."""
        gone = 0
        for found in STATED.finditer(self.written):
            end = found.start("how") - 1
            yield found, found.start() - gone, end - gone
            gone += found.end() - end


@cache
def entries() -> list[Entry]:
    """Every sentence of the YAML. What a block does not say of a sentence (level, metric) is empty."""
    blocks = yaml.safe_load(ENTRIES.read_text())["sentences"]
    return [
        Entry(
            block["page"], block.get("sweep", ""), str(block.get("level", "")), block.get("metric", ""), plain(sentence)
        )
        for block in blocks
        for sentence in block["text"]
    ]


def plain(text: str) -> str:
    """Text on one line, without what quotes it."""
    return " ".join(text.split())


@cache
def short_names() -> Mapping[str, str]:
    """Short name -> metric."""
    return yaml.safe_load(ENTRIES.read_text())["metrics"]


def metric_called(name: str) -> str:
    """A metric by its short name, or by its own."""
    return short_names().get(name, name)


Place = tuple[str, str]  # level, arm


# --- the saved data ---------------------------------------------------------------------------------------------


@lru_cache(4)  # each takes up to a gigabyte; what follows from one is kept
def saved(name: str) -> SweepData:
    """A saved sweep; `earlier/name` lies in a folder of its own."""
    return load_data((DATA / name).parent, Path(name).name)


@cache
def needed(name: str) -> frozenset[str]:
    """The logged metrics that some recipe or prediction names, and what derived ones are made of."""
    named = set(re.findall(r"@([\w/]+)", ENTRIES.read_text())) | set(short_names())
    named |= {entry.metric for entry in entries()}
    design = saved(name).design
    named |= {prediction.metric for prediction in design.predictions} if design else set()
    parts = {"reward/in_loss_mean", "reward/in_loss_outcome", "touched/truncation", "touched/group_filter"}
    parts |= {"rollout/interrupted", "rollout/stopped", "reward/mean"}
    return frozenset({metric_called(name).removeprefix(AVERAGE) for name in named} | parts)


@cache
def finals_of(name: str, axis: str | None) -> FinalValues:
    """Final values of a saved sweep, of the metrics that are needed."""
    data = saved(name)
    kept = [column for column in data.points if column in (*LABELS, "step") or column in needed(name)]
    # Where final values lie is told by the budgets, and by whether the size of evaluations was logged.
    kept += [name for name in data.points if name.startswith("budget/") or name.endswith("/responses")]
    kept = list(dict.fromkeys(kept))
    return final_values(replace(data, points=data.points[kept]), axis)


@cache
def final_of(name: str, axis: str | None, place: Place, metric: str) -> pd.Series:
    """The final values of an arm by seed."""
    return finals_of(name, axis).of(*place, metric)


@cache
def places_of(name: str) -> frozenset[Place]:
    """(level, arm) of all runs of a saved sweep."""
    return frozenset(saved(name).run_arms)


@cache
def judgements_of(name: str) -> list[Judgement]:
    """The predictions of a saved sweep, judged."""
    return judge(saved(name), finals_of(name, None))


@cache
def divergence_of(name: str) -> pd.DataFrame:
    """The divergence table of a saved sweep."""
    table = divergence_table(saved(name), finals_of(name, None), np.random.default_rng(0))
    return table.set_index(["level", "arm", "metric"])


@cache
def effects_of(name: str, metric: str) -> dict[tuple[str, frozenset[tuple[str, float]]], TrickEffect]:
    """(level, weights of the arms) -> the effect on a metric."""
    effects = trick_effects(saved(name), finals_of(name, None), [metric])
    return {(e.contrast.level, frozenset(e.contrast.weights.items())): e for e in effects}


# --- recipes ----------------------------------------------------------------------------------------------------

Contrast = tuple[tuple[int, Place], ...]  # with its sign


@dataclass(frozen=True)
class Recipe:
    """A recipe, word by word. `contrasts` has one entry for each arm of a list."""

    contrasts: tuple[Contrast, ...]
    metric: str
    options: Mapping[str, str]
    words: frozenset[str]


CHOICES = ("least", "most", "middle")
STATISTICS = (*CHOICES, "each", "average", "low", "high", "half", "size", "p", "holm", "adjusted", "mde", "<=", ">=")


def read_recipe(entry: Entry, how: str) -> Recipe:
    """The words of a recipe. Raises ValueError for an arm or level that the sweep does not have."""
    terms: list[tuple[int, list[str]]] = []
    options: dict[str, str] = {}
    words: set[str] = set()
    metric, sign = entry.metric, 1
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
    named = {arm for _, group in terms for arm in group} | set(options.get("without", "").split(","))
    groups = [(sign, [place for arm in group for place in _places(entry, arm, named)]) for sign, group in terms]
    contrasts = []
    for number in range(max(len(group) for _, group in groups)):
        contrast = [(sign, group[number % len(group)]) for sign, group in groups]
        level = contrast[0][1][0]
        contrasts.append(tuple((sign, _known(entry, place, level)) for sign, place in contrast))
    return Recipe(tuple(contrasts), metric, options, frozenset(words))


def _places(entry: Entry, word: str, named: set[str]) -> list[Place]:
    data = saved(entry.sweep)
    levels = data.levels if word == "*/*" else [entry.level]
    if word in ("*", "*/*"):
        left = named | ({data.control} if "control" in named else set())
        return [(level, arm) for level in levels for arm in data.arms if arm not in left]
    level, _, arm = word.rpartition("/")
    return [(level or entry.level, arm)]


def _known(entry: Entry, place: Place, level: str) -> Place:
    place = (level, saved(entry.sweep).control) if place[1] == "control" else place
    if place not in places_of(entry.sweep):
        raise ValueError(f"{entry.sweep} has no arm {place}; it has {sorted(places_of(entry.sweep))}")
    return place


def by_seed(entry: Entry, recipe: Recipe, contrast: Contrast) -> pd.Series:
    """The contrast of each seed that has all of its arms."""
    parts = [sign * _values(entry, recipe, place) for sign, place in contrast]
    return sum(parts[1:], parts[0]).dropna().sort_index()


def _values(entry: Entry, recipe: Recipe, place: Place) -> pd.Series:
    options = recipe.options
    metric = recipe.metric
    if "step" in options or "steps" in options:
        values = _at(entry, place, metric, options.get("steps") or options["step"])
        values = values - _at(entry, place, metric, options["since"]) if "since" in options else values
    else:
        values = final_of(entry.sweep, options.get("axis"), place, metric)
    if values.empty:
        raise ValueError(f"{entry.sweep} has no {metric} of {place}")
    for key, other in options.items():
        if key in ("less", "over") and other.startswith("@"):
            same = replace(recipe, metric=metric_called(other[1:]), options={**options, key: ""})
            values = values - _values(entry, same, place) if key == "less" else values / _values(entry, same, place)
    return values.loc[[int(seed) for seed in options["seed"].split(",")]] if "seed" in options else values


def _at(entry: Entry, place: Place, metric: str, steps: str) -> pd.Series:
    points = saved(entry.sweep).points
    here = points[(points["level"] == place[0]) & (points["arm"] == place[1])].dropna(subset=[metric])
    if steps == "end":
        return here.groupby("seed")[metric].last()
    first, _, last = steps.partition("-")
    return here[here["step"].between(int(first), int(last or first))].groupby("seed")[metric].mean()


def measured(entry: Entry, how: str) -> Interval:
    """What the saved data say, as a number with its interval where it has one."""
    scales = [float(word[1:]) for word in how.split() if re.fullmatch(r"x-?[\d.]+", word)]
    words = [word for word in how.split() if not re.fullmatch(r"x-?[\d.]+", word)]
    special = SPECIAL.get(words[0])
    one = special(entry, words[1:]) if special else _of_arms(entry, read_recipe(entry, " ".join(words)))
    for scale in scales:
        one = _scaled(one, scale)
    return one


def _of_arms(entry: Entry, recipe: Recipe) -> Interval:
    words, over = recipe.words, recipe.options.get("over", "@")
    series = [by_seed(entry, recipe, contrast) for contrast in recipe.contrasts]
    if "each" in words or (len(series) == 1 and words & set(CHOICES)):
        series = [values.loc[[seed]] for values in series for seed in values.index]
    if words & {"p", "holm", "adjusted", "mde"}:
        tests = zip(recipe.contrasts, series, strict=True)
        found = [_number(_of_test(entry, recipe, contrast, values)) for contrast, values in tests]
    else:
        bases = bases_of(saved(entry.sweep))
        found = [compare(values, bases, grouped=False).whole for values in series]
    if "size" in words:
        found = [replace(one, mean=abs(one.mean)) for one in found]
    for bound in words & {"low", "high"}:
        found = [replace(one, mean=getattr(one, bound)) for one in found]
    if "half" in words:
        found = [replace(one, mean=(one.high - one.low) / 2) for one in found]
    one = _chosen(words, found)
    if "per" in recipe.options:
        other = replace(recipe, metric=metric_called(recipe.options["per"][1:]))
        return _scaled(one, 1 / by_seed(entry, other, other.contrasts[0]).mean())
    if over == "least":
        return _scaled(one, 1 / min(found, key=_mean).mean)
    if not over.startswith("@"):
        (other,) = _places(entry, over, set())
        return _scaled(one, 1 / by_seed(entry, recipe, ((1, _known(entry, other, entry.level)),)).mean())
    return one


def _mean(interval: Interval) -> float:
    return interval.mean


def _chosen(words: Collection[str], found: Sequence[Interval]) -> Interval:
    """The least, the most or the median of several, or the only one. Raises ValueError for several without a choice."""
    if "least" in words or "most" in words:
        return (min if "least" in words else max)(found, key=_mean)
    if "middle" in words:
        return _number(statistics.median(one.mean for one in found))
    if len(found) != 1:
        raise ValueError(f"{len(found)} values: say least, most or middle")
    return found[0]


def _of_test(entry: Entry, recipe: Recipe, contrast: Contrast, differences: pd.Series) -> float:
    if "p" in recipe.words:
        return paired_t_pvalue(differences.to_numpy())
    if "holm" not in recipe.words:
        weights = frozenset((arm, float(sign)) for sign, (_, arm) in contrast)
        effect = effects_of(entry.sweep, recipe.metric)[contrast[0][1][0], weights]
        return effect.mde if "mde" in recipe.words else effect.p_adjusted
    (_, asked), (_, reference) = contrast
    (found,) = (
        one.holm
        for one in judgements_of(entry.sweep)
        if ((one.prediction.level, one.prediction.arm), one.prediction.metric) == (asked, recipe.metric)
        and one.reference == reference
    )
    return found


def _scaled(one: Interval, by: float) -> Interval:
    low, high = sorted((by * one.low, by * one.high)) if not math.isnan(one.low) else (one.low, one.high)
    return Interval(by * one.mean, low, high, one.n)


# --- what is no contrast of arms --------------------------------------------------------------------------------


def _number(value: float) -> Interval:
    return Interval(float(value), math.nan, math.nan, 1)


def _set(entry: Entry, rest: list[str]) -> Interval:
    """An override that the sweep declares, in its base, a level, an arm or a trick."""
    (override,) = rest
    design = saved(entry.sweep).record.design or {}
    declared: list[str] = list(design["base"])
    for part in ("levels", "arms", "tricks"):
        declared += [one for overrides in (design.get(part) or {}).values() for one in overrides]
    if override not in declared:
        raise ValueError(f"{entry.sweep} does not declare {override}: {declared}")
    return _number(float(override.partition("=")[2]))


def _conf(entry: Entry, rest: list[str]) -> Interval:
    name, key = rest
    value = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())
    for part in key.split("."):
        value = value[part]
    return _number(value)


def _judged(entry: Entry, rest: list[str]) -> Interval:
    return _number([one.word for one in judgements_of(entry.sweep)].count(" ".join(rest)))


def _predictions(entry: Entry, rest: list[str]) -> Interval:
    return _number(len(judgements_of(entry.sweep)))


def _margin(entry: Entry, rest: list[str]) -> Interval:
    """`margin supported mask_after @downstream`. Raises ValueError where the prediction has another word."""
    word, arm, *metric = rest
    ((place,),) = (_places(entry, arm, set()),)
    wanted = metric_called(metric[0][1:] if metric else entry.metric)
    (found,) = (
        one
        for one in judgements_of(entry.sweep)
        if ((one.prediction.level, one.prediction.arm), one.prediction.metric) == (place, wanted)
        and (one.prediction.direction is Direction.within or word == "within_the_margin")
    )
    if found.word != word.replace("_", " ") or found.margin is None:
        raise ValueError(f"the prediction on {arm} is {found.word}, not {word}")
    return _number(found.margin)


def _csv(entry: Entry, rest: list[str]) -> Interval:
    """`_` stands for a blank in a value, a comma between values of which one may hold; least or most of the rows."""
    name, *conditions = (word for word in rest if word not in STATISTICS)
    column = conditions.pop()
    table = pd.read_csv(DATA / f"{name}.csv", dtype={"steps": str, "addends": str})
    for condition in conditions:
        key, _, values = condition.partition("=")
        one = values.replace("_", " ")
        table = table[table[key].isin([one] if one in table[key].to_numpy() else values.split(","))]
    return _chosen(rest, [_number(value) for value in table[column]])


def _divergence(entry: Entry, rest: list[str]) -> Interval:
    """`_` is what ranks all arms, a comma stands between arms, `*/*` is every arm of every level."""
    arms, measure = (word for word in rest if word not in STATISTICS)
    table = divergence_of(entry.sweep)
    places = [place for arm in arms.split(",") for place in _places(entry, arm.strip("_"), set())]
    rows = [table.loc[(*place, f"divergence/{measure}")] for place in places]
    return _chosen(rest, [Interval(row["value"], row["low"], row["high"], int(row["n"])) for row in rows])


def _tau(entry: Entry, rest: list[str]) -> Interval:
    """How alike arms rank by training reward over the last share of the budget and by final downstream accuracy."""
    finals, points = finals_of(entry.sweep, None), saved(entry.sweep).finished_points
    late = points[points[f"budget/{finals.axis}"].between((1 - float(rest[0])) * finals.budget, finals.budget)]
    reward = late.groupby(["arm", "seed"])["reward/outcome"].mean().groupby("arm").mean()
    downstream = finals.values.groupby("arm")["eval/downstream/accuracy"].mean()
    return _number(kendall_tau(reward.to_numpy(), downstream.loc[reward.index].to_numpy()))


def _told(entry: Entry, rest: list[str]) -> Interval:
    """What the figure of arms told apart says of the block's level and metric."""
    name = entry.metric if len(rest) == 1 else rest[1].removeprefix("@")
    found = told_apart(saved(entry.sweep), finals_of(entry.sweep, None), entry.level, metric_called(name))
    assert found is not None, "three arms on two bases"
    if rest[0].startswith("without="):
        others = [index for index, arm in enumerate(found.arms) if arm not in rest[0].partition("=")[2].split(",")]
        assert len(others) + rest[0].count(",") + 1 == len(found.arms), "every arm that is left out exists"
        return _number(int((found.apart[np.ix_(others, others)] > 0).sum()))
    return _number({"pairs": found.pairs, "apart": found.found, "unjudged": len(found.withheld)}[rest[0]])


def _tuned(entry: Entry, rest: list[str]) -> Interval:
    """What the tuning of a sweep of one level chose. Raises ValueError where the arms chose otherwise."""
    arms, what = rest
    found = {one.arm: one for one in chosen_numbers(saved(entry.sweep).record)}
    if what in ("lowest", "highest"):
        return _number((min if what == "lowest" else max)(trial.value for trial in found[arms].trials))
    numbers = {found[arm].chosen.numbers[what] for arm in arms.split(",")}
    if len(numbers) > 1:
        raise ValueError(f"{arms} chose {numbers}")
    return _number(numbers.pop())


def _rank(entry: Entry, rest: list[str]) -> Interval:
    finals, name = finals_of(entry.sweep, None), metric_called(rest[1].removeprefix("@") if rest[1:] else entry.metric)
    means = {arm: finals.of(entry.level, arm, name).mean() for arm in saved(entry.sweep).arms}
    return _number(1 + sum(mean > means[rest[0]] for mean in means.values()))


def _hours(entry: Entry, rest: list[str]) -> Interval:
    return _number(sum(_seconds_of_runs(rest or [entry.sweep]).values()) / 3600)


def _kl_distance(entry: Entry, rest: list[str]) -> Interval:
    """A quantile of the distance from the initial policy, sqrt(nat), over all evaluations after the start."""
    points = saved(entry.sweep).finished_points
    kl = points.loc[points["step"] > 0, KL].dropna()
    return _number(float(np.quantile(np.sqrt(kl), float(rest[0]))))


def _target_slope(entry: Entry, rest: list[str]) -> Interval:
    """Tokens of response for each token asked for, at the last evaluation."""
    runs = asked_lengths(saved(entry.sweep), finals_of(entry.sweep, None))[entry.level, rest[0]]
    return t_interval([slope_of(run.answers["end"]) for run in runs])


def _gap(entry: Entry, rest: list[str]) -> Interval:
    """What `grpo_lab.analysis.divergence.across` says of all sweeps that test claims:

    sweeps, runs, bases, contrasts, apart   how many there are; contrasts that are comparable, and that are not
    signs 1,-1, withheld                    comparable contrasts with these signs on reward and downstream; those of
                                            0,0 with an interval that is withheld
    holm sweep arm                          p of opposite effects, over the comparable contrasts
    misled group, misled group sweep        runs with reward up and downstream down; group is 0, 1 or 2 of GROUPS
    of group                                runs of the group
    area, within, lead, caught, false name  of an indicator; caught and false are counts, with `share` shares
    losses, null, at_once                   with an indicator's threshold; null runs that could alarm; before a reading
    regret rule, saved rule rule            points, over all runs or (last word: a number) over those of a group
    after                                   share of the budget after the best checkpoint
    hours                                   of one core in steps, without evaluations; a shared run counts once
    costs, priced                           conditions of controls; those where a point has a cost
    cost least, cost most                   thousands of tokens for a point; `cost title` of one
    """
    sweeps = saved_sweeps(ROOT / "experiments", DATA)
    pooled = saved_pool(sweeps)
    sweeps.loaded.clear()  # gigabytes, of which the pool has taken what it needs
    what, *names = rest
    if what in ("sweeps", "runs", "bases", "contrasts", "apart"):
        comparable = len(pooled.comparable)
        sizes = {"sweeps": len(pooled.sweeps), "runs": len(pooled.runs), "bases": len(set(pooled.units))}
        return _number((sizes | {"contrasts": comparable, "apart": len(pooled.contrasts) - comparable})[what])
    if what == "signs":
        wanted = tuple(map(int, names[0].split(",")))
        return _number(sum(contrast.signs == wanted for contrast in pooled.comparable))
    if what == "withheld":
        effects = [(one.reward.whole, one.downstream.whole) for one in pooled.comparable if not any(one.signs)]
        return _number(sum(any(effect.why for effect in pair) for pair in effects))
    if what == "holm":
        adjusted = zip(pooled.comparable, opposite_adjusted(pooled.comparable))
        (found,) = (p for contrast, p in adjusted if [contrast.sweep, contrast.arm] == names)
        return _number(found)
    if what in ("misled", "of"):
        own = with_gap(run for run in pooled.runs if run.group == GROUPS[int(names[0])])
        own = [run for run in own if run.sweep in names[1:] or not names[1:]]
        return _number(counted(own, [misled(run.track) for run in own]).runs.number if what == "misled" else len(own))
    if what in ("area", "within", "lead", "caught", "false", "losses", "null", "at_once"):
        found = announcements(pooled)[names[0]]
        if names[1:] == ["share"]:
            return getattr(found, what).runs.interval
        numbers = {"caught": found.caught.runs.number, "losses": found.caught.runs.n, "lead": found.lead}
        numbers |= {"false": found.false.runs.number, "null": found.false.runs.n, "at_once": found.at_once}
        return {"area": found.auc, "within": found.within}[what] if what not in numbers else _number(numbers[what])
    if what in ("regret", "saved"):
        group = GROUPS[int(names.pop())] if names[-1].isdigit() else ""
        own = [run for run in pooled.runs if group in ("", run.group)]
        return regrets(own, *names) if what == "regret" else regret_saved(own, *names)
    if what == "after":
        return spent_after(pooled.runs)
    if what == "hours":
        return _number(sum(_seconds_of_runs(pooled.sweeps).values()) / 3600)
    priced = {one.title: one.cost for one in costs(pooled) if one.group == GROUPS[0]}
    known = {title: _scaled(cost, 0.001) for title, cost in priced.items() if not math.isnan(cost.mean)}
    if what in ("costs", "priced"):
        return _number(len(priced if what == "costs" else known))
    if what != "cost":
        raise ValueError(f"no quantity {what!r} of the gap")
    return _chosen(names, list(known.values())) if names[0] in CHOICES else known[" ".join(names)]


def _seconds_of_runs(sweeps: Sequence[str]) -> dict[str, float]:
    """Run key -> seconds of one core that its steps took."""
    return {key: seconds for name in sweeps for key, seconds in _seconds_of_sweep(name).items()}


@cache
def _seconds_of_sweep(name: str) -> dict[str, float]:
    data = saved(name)
    took = data.points.groupby(LABELS)["budget/device_seconds"].max()
    return {run.run_key: float(took[run.level, run.arm, run.seed]) for run in data.runs.itertuples()}


def _bench(entry: Entry, rest: list[str]) -> Interval:
    budget, which = rest
    (path,) = (ROOT / "tests" / "benchmarks" / "results").glob("*_cores.json")
    (found,) = (one for one in json.loads(path.read_text())["budgets"] if one["budget"] == int(budget))
    return _number(found["summary"]["step"][which])


@cache
def _golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_golden", ROOT / "tests" / "tricks" / "test_golden.py")
    assert spec is not None and spec.loader is not None
    golden = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(golden, "truncation_pressure"):
        spec.loader.exec_module(golden)
    return golden


def _pressure(entry: Entry, rest: list[str]) -> Interval:
    """In thousandths, of step 1 of `overlong`, whose rounded means the log names."""
    aggregation = {"constant": Constant(40, Width.budget), "sequence_mean": SequenceMean(0.0)}[rest[0]]
    truncation = {"score": Score(), "mask_after": MaskAfter(), "mask_before": MaskBefore()}[rest[1]]
    lengths = {"right": 29, "wrong": 12, "cut": 40}
    coefficient = _golden().truncation_pressure
    return _number(1000 * coefficient(truncation, 0.31, 0.56, 0.0, aggregation, Original(), lengths))


def _given(entry: Entry, rest: list[str]) -> Interval:
    if not rest:
        raise ValueError("say where the number is from: `given its source`")
    return Interval(math.nan, math.nan, math.nan, 0)


def _unkept(entry: Entry, rest: list[str]) -> Interval:
    if not NOT_KEPT.search(entry.text):
        raise ValueError("the sentence does not say that its runs are not kept")
    return Interval(math.nan, math.nan, math.nan, 0)


SPECIAL: Mapping[str, Callable[[Entry, list[str]], Interval]] = {
    "set": _set,
    "conf": _conf,
    "judged": _judged,
    "predictions": _predictions,
    "margin": _margin,
    "csv": _csv,
    "divergence": _divergence,
    "tau": _tau,
    "told": _told,
    "tuned": _tuned,
    "rank": _rank,
    "hours": _hours,
    "kl_distance": _kl_distance,
    "target_slope": _target_slope,
    "gap": _gap,
    "bench": _bench,
    "pressure": _pressure,
    "given": _given,
    "unkept": _unkept,
}


# --- stated against measured ------------------------------------------------------------------------------------


def disagreements(entry: Entry) -> list[str]:
    """Each number of a sentence that is not what the saved data say at the precision in which it is printed."""
    wrong = []
    for found, _, _ in entry.numbers():
        how = found["how"]
        try:
            value = measured(entry, how)
        except (ValueError, KeyError) as error:
            wrong.append(f"{found[0]}: {error}")
            continue
        if how.startswith("given ") or how == "unkept":
            continue
        wrong += [
            f"{found[0]}: the data say {getattr(value, part):.6g}"
            for part in ("mean", "low", "high")
            if found[part] is not None and not _agrees(found[part], getattr(value, part), how.split())
        ]
    return wrong


def _agrees(stated: str, value: float, how: Sequence[str]) -> bool:
    if stated.lower() in WORDS:
        return WORDS.index(stated.lower()) == value
    digits, _, power = stated.replace(",", "").partition("e")
    half = 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    half *= 1000 if stated.endswith(",000") else 1
    number = float(stated.replace(",", ""))
    if "<=" in how:
        return value <= number + 1e-9
    if ">=" in how:
        return value >= number - 1e-9
    return abs(value - number) <= half * (1 + 1e-6) + 1e-12
