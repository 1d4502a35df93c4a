"""The numbers of pages: each is followed by a comment that says how the saved data give it, and is filled from them.

    Downstream 0.365<!--no_cost--> without the cost and 0.048 [0.015, 0.082]<!--cost--> with it

A page of an experiment reads the data beside it. A comment holds a few words, in any order but that of the arms:

    score                      the mean of this arm's final values over its seeds; brackets are its 95% t interval (over
                               bases, if the seeds have several)
    constant/score             the same at a level of the sweep; otherwise the level is that of the page
    mask_after - score         a difference paired by seed; further arms go on with + and -
    a,b,c - plain              the same for each of a, b and c, with least or most
    *                          every arm that is not named
    @downstream                the metric, by a short name of METRICS or in full; otherwise that of the page
    of=sweep, at=level         another sweep, another level
    average                    over the whole run instead of its end
    step=33, steps=1-5         at one step or in the mean over some, instead of final values; step=end is the last
    since=0                    less the value at this step
    seed=70, seed=70,71        of these seeds
    per=@downstream            divided by the mean of the same contrast on another metric
    least, most                of several arms, or of the seeds of one
    each                       of every run instead of every arm, with least or most
    low, high, size            a bound of the interval; the number without its sign
    holm, adjusted             p of the paired t test, after Holm: over the predictions; over the contrasts of one kind
    x100, x-1                  times 100 (per cent, points), times -1
    <=, >=                     the number is a bound: the value is at most, at least as much

Instead of arms, one of these may stand first:

    set key=value              an override that the sweep declares
    conf file key              of a YAML in conf
    judged word, predictions   how many predictions have this word; how many there are
    margin word arm @metric    the margin of the arm's prediction to lie within it, which must have this word
    tau share                  training reward against downstream accuracy, over the last share of the budget
    all_pairs what             the number of pairs of arms, of distinguishable ones, of arms not_reported
    all_pairs without=a,b      the number of distinguishable pairs among the other arms
    tuned a,b key              the number that these arms chose alike for a key of the configuration
    rank arm                   the place of an arm by its mean, 1 the largest
    hours sweep sweep          of one core in the steps of these sweeps, or of the page's, without evaluations
    gap quantity name          over all sweeps that test claims: `_gap` lists the quantities
    bench budget median        TRL's step by ours
    given why                  no result of this project

`<!-- numbers: at=length @downstream -->` says once what the comments of a page leave out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from gap_study.across import (
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
from grpo_lab.config.design import Direction
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
STATISTICS = (*CHOICES, "each", "average", "low", "high", "size", "holm", "adjusted", "<=", ">=")


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
    named = {arm for _, group in terms for arm in group} | set(options.get("without", "").split(","))
    groups = [(sign, [place for arm in group for place in _places(context, arm, named)]) for sign, group in terms]
    contrasts = []
    for number in range(max(len(group) for _, group in groups)):
        contrast = [(sign, group[number % len(group)]) for sign, group in groups]
        contrasts.append(tuple((sign, _known(context, place)) for sign, place in contrast))
    return Recipe(tuple(contrasts), metric, options, frozenset(words))


def _places(context: Context, word: str, named: set[str]) -> list[Condition]:
    if word == "*":
        return [(context.level, arm) for arm in saved(context.sweep).arms if arm not in named]
    level, _, arm = word.rpartition("/")
    return [(level or context.level, arm)]


def _known(context: Context, place: Condition) -> Condition:
    if place not in places_of(context.sweep):
        raise ValueError(f"{context.sweep} has no arm {place}; it has {sorted(places_of(context.sweep))}")
    return place


def by_seed(context: Context, recipe: Recipe, contrast: Contrast) -> pd.Series:
    """The contrast of each seed that has all of its arms."""
    parts = [sign * _values(context, recipe, place) for sign, place in contrast]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.dropna().sort_index()


def _values(context: Context, recipe: Recipe, place: Condition) -> pd.Series:
    options = recipe.options
    metric = recipe.metric
    if "step" in options or "steps" in options:
        values = _at(context, place, metric, options.get("steps") or options["step"])
        values = values - _at(context, place, metric, options["since"]) if "since" in options else values
    else:
        values = finals_of(context.sweep).of(*place, metric)
    if values.empty:
        raise ValueError(f"{context.sweep} has no {metric} of {place}")
    return values.loc[[int(seed) for seed in options["seed"].split(",")]] if "seed" in options else values


def _at(context: Context, place: Condition, metric: str, steps: str) -> pd.Series:
    points = saved(context.sweep).points
    here = points[(points["level"] == place[0]) & (points["arm"] == place[1])].dropna(subset=[metric])
    if steps == "end":
        return here.groupby("seed")[metric].last()
    first, _, last = steps.partition("-")
    return here[here["step"].between(int(first), int(last or first))].groupby("seed")[metric].mean()


def measured(context: Context, how: str) -> Interval:
    """What the saved data say, as a number with its interval where it has one."""
    scales = [float(word[1:]) for word in how.split() if re.fullmatch(r"x-?[\d.]+", word)]
    words = [word for word in how.split() if not re.fullmatch(r"x-?[\d.]+", word)]
    special = SPECIAL.get(words[0])
    one = special(context, words[1:]) if special else _of_arms(context, read_recipe(context, " ".join(words)))
    for scale in scales:
        one = _scaled(one, scale)
    return one


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
    if "size" in words:
        found = [replace(one, mean=abs(one.mean)) for one in found]
    for bound in words & {"low", "high"}:
        found = [replace(one, mean=getattr(one, bound)) for one in found]
    one = _chosen(words, found)
    if "per" in recipe.options:
        other = replace(recipe, metric=metric_called(recipe.options["per"][1:]))
        return _scaled(one, 1 / by_seed(context, other, other.contrasts[0]).mean())
    return one


def _mean(interval: Interval) -> float:
    return interval.mean


def _chosen(words: Collection[str], found: Sequence[Interval]) -> Interval:
    """The least or the most of several, or the only one. Raises ValueError for several without a choice."""
    if "least" in words or "most" in words:
        return (min if "least" in words else max)(found, key=_mean)
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


def _scaled(one: Interval, by: float) -> Interval:
    low, high = sorted((by * one.low, by * one.high)) if not math.isnan(one.low) else (one.low, one.high)
    return Interval(by * one.mean, low, high, one.n)


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


def _conf(context: Context, rest: list[str]) -> Interval:
    name, key = rest
    value = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())
    for part in key.split("."):
        value = value[part]
    return _number(value)


def _judged(context: Context, rest: list[str]) -> Interval:
    return _number([one.verdict for one in judgements_of(context.sweep)].count(" ".join(rest)))


def _predictions(context: Context, rest: list[str]) -> Interval:
    return _number(len(judgements_of(context.sweep)))


def _margin(context: Context, rest: list[str]) -> Interval:
    """`margin supported mask_after @downstream`. Raises ValueError where the prediction has another word."""
    word, arm, *metric = rest
    ((place,),) = (_places(context, arm, set()),)
    wanted = metric_called(metric[0][1:] if metric else context.metric)
    (found,) = (
        one
        for one in judgements_of(context.sweep)
        if ((one.prediction.level, one.prediction.arm), one.prediction.metric) == (place, wanted)
        and (one.prediction.direction is Direction.within or word == "within_the_margin")
    )
    if found.verdict != word.replace("_", " ") or found.margin is None:
        raise ValueError(f"the prediction on {arm} is {found.verdict}, not {word}")
    return _number(found.margin)


def _tau(context: Context, rest: list[str]) -> Interval:
    """How alike arms rank by training reward over the last share of the budget and by final downstream accuracy."""
    finals, points = finals_of(context.sweep), saved(context.sweep).finished_points
    late = points[points[f"budget/{finals.axis}"].between((1 - float(rest[0])) * finals.budget, finals.budget)]
    reward = late.groupby(["arm", "seed"])["reward/outcome"].mean().groupby("arm").mean()
    downstream = finals.values.groupby("arm")["eval/downstream/accuracy"].mean()
    return _number(kendall_tau(reward.to_numpy(), downstream.loc[reward.index].to_numpy()))


def _all_pairs(context: Context, rest: list[str]) -> Interval:
    """Numbers from the comparison of all pairs of arms, for the block's level and metric."""
    name = context.metric if len(rest) == 1 else rest[1].removeprefix("@")
    found = all_pairs(saved(context.sweep), finals_of(context.sweep), context.level, metric_called(name))
    assert found is not None, "three arms on two bases"
    if rest[0].startswith("without="):
        others = [index for index, arm in enumerate(found.arms) if arm not in rest[0].partition("=")[2].split(",")]
        assert len(others) + rest[0].count(",") + 1 == len(found.arms), "every arm that is left out exists"
        return _number(int((found.distinguishable[np.ix_(others, others)] > 0).sum()))
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


def _rank(context: Context, rest: list[str]) -> Interval:
    finals, name = (
        finals_of(context.sweep),
        metric_called(rest[1].removeprefix("@") if rest[1:] else context.metric),
    )
    means = {arm: finals.of(context.level, arm, name).mean() for arm in saved(context.sweep).arms}
    return _number(1 + sum(mean > means[rest[0]] for mean in means.values()))


def _hours(context: Context, rest: list[str]) -> Interval:
    return _number(sum(_seconds_of_runs(rest or [context.sweep]).values()) / 3600)


def _gap(context: Context, rest: list[str]) -> Interval:
    """What `gap_study.across` says of all sweeps that test claims:

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
    pooled = saved_pool(_sweeps())
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
    seconds: dict[str, float] = {}
    for name in sweeps:
        data = saved(name)
        took = data.points.groupby(LABELS)["budget/device_seconds"].max().to_dict()
        runs = zip(map(tuple, data.runs[LABELS].to_numpy().tolist()), map(str, data.runs["run_key"]))
        seconds |= {key: float(took[labels]) for labels, key in runs}
    return seconds


def _bench(context: Context, rest: list[str]) -> Interval:
    budget, which = rest
    (path,) = (ROOT / "tests" / "benchmarks" / "results").glob("*_cores.json")
    (found,) = (one for one in json.loads(path.read_text())["budgets"] if one["budget"] == int(budget))
    return _number(found["summary"]["step"][which])


def _given(context: Context, rest: list[str]) -> Interval:
    if not rest:
        raise ValueError("say where the number is from: `given its source`")
    return Interval(math.nan, math.nan, math.nan, 0)


SPECIAL: Mapping[str, Callable[[Context, list[str]], Interval]] = {
    "set": _set,
    "conf": _conf,
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
    "given": _given,
}


# --- filling a page ---------------------------------------------------------------------------------------------


def filled(text: str, sweep: str = "") -> str:
    """The text with every number that a comment follows as the saved data give it, at the precision it was written in.

    `sweep` is that of the page. A number that is right at its precision stays as it is. Raises ValueError, with the
    number, where a comment cannot be read or a bound does not hold.
    """
    found = _DEFAULTS.search(text)
    words = found[1].split() if found else []
    page, _ = Context(sweep).of(" ".join(words))
    page = replace(page, metric=next((word[1:] for word in words if word.startswith("@")), ""))
    return FILLED.sub(lambda one: _filled(one, page), text)


def _filled(found: re.Match[str], page: Context) -> str:
    if found["how"].startswith("given "):
        return found[0]
    context, how = page.of(found["how"])
    try:
        value = measured(context, how)
        mean = _written(found["mean"], value.mean, how.split())
    except (ValueError, KeyError) as error:
        raise ValueError(f"{found[0]}: {error}") from error
    interval = ""
    if found["low"] is not None:
        low, high = (_written(found[part], getattr(value, part), ()) for part in ("low", "high"))
        interval = f" [{low}, {high}]"
    return f"{found['about'] or ''}{mean}{found['unit']}{interval}<!--{found['how']}-->"


def _written(before: str, value: float, how: Sequence[str]) -> str:
    """A number in the manner of the one before it, which stays where it is right."""
    if before.lower() in WORDS:
        word = WORDS[round(value)]
        return word.capitalize() if before[0].isupper() else word
    number = float(before.replace(",", ""))
    if bounds := {"<=", ">="} & set(how):
        if (value > number + 1e-9) if "<=" in bounds else (value < number - 1e-9):
            raise ValueError(f"the value is {value:.6g}")
        return before
    digits, _, power = before.replace(",", "").partition("e")
    places = len(digits.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - places) * (1000 if before.endswith(",000") else 1)
    if abs(value - number) <= 0.5 * unit * (1 + 1e-6) + 1e-12:
        return before
    sign = "+" if before.startswith("+") else ""
    if power:
        return f"{value:{sign}.{places}e}"
    return f"{round(value / unit) * unit:{sign}{',' if ',' in before else ''}.{places}f}"
