"""Caveats of a sweep's numbers: missing runs and values, and runs that are not comparable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import EVALUATED, FinalValues, is_rated
from grpo_lab.analysis.sources.chosen_numbers import chosen_numbers, tuned_lines
from grpo_lab.analysis.sources.matched_norms import matched_lines, matched_norms
from grpo_lab.analysis.sources.settings import SAME, STEPS, Condition, differences
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData, bases_of
from grpo_lab.analysis.stats.comparison import FEWEST_BASES, compare, two_groups
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, seed_differences
from grpo_lab.analysis.table_rows import groups_of, rows_of
from grpo_lab.config.design import Collapsed
from grpo_lab.tracking.external import EXTERNAL
from grpo_lab.tracking.metrics import CLIP_FRACTION, UNLIKE_PPO, axis_of_fraction, is_active_fraction

_EXPLORATORY = "Exploratory: nothing was declared before the runs, so nothing is judged."
_FEW = 3  # runs, named where something is wrong with no more than these
_CLOCKS = ("budget/device_seconds",)  # of the numbers that are logged, those that no two runs share
_UNEQUAL = 1.1  # a run that spent this many times X has a tail that no comparison sees


def caveats(data: SweepData, finals: FinalValues) -> list[str]:
    """Every caveat of a sweep, one sentence each, the declaration first; lines of detail are indented."""
    parts = (
        _declaration(data),
        tuned_lines(chosen_numbers(data.record)),
        matched_lines(matched_norms(data.record)),
        finished_runs(data),
        _bases(finals),
        _collapsed(data, finals),
        _exhausted(data, finals),
        _two_groups(data, finals),
        _lengths(data, finals),
        _not_finite(data),
    )
    lines = [*(line for part in parts for line in part), *_lacking(data), *_untimed(data), *_no_ops(data)]
    return [
        *lines,
        *indistinguishable(data),
        *_code(data),
        *_lost(data),
        *_protocols(data),
        *_harnesses(data),
        *undeclared_steps(data),
        *_changed(data),
    ]


def notes(data: SweepData, finals: FinalValues) -> list[str]:
    """The caveats that stand under every figure: runs that are missing, collapsed or not alike."""
    planned = sum(data.seeds_planned(level, arm) for level in data.levels for arm in data.arms)
    done = len(data.finished)
    lines = [_EXPLORATORY] if data.design and data.declaration is None else []
    lines += [f"{done} of {planned} planned runs are finished."] if done < planned else []
    infinite = [line for line in _not_finite(data) if line.startswith("Infinite") or "at their end" in line]
    lines += [
        *tuned_lines(chosen_numbers(data.record)),
        *matched_lines(matched_norms(data.record)),
        *(line for line in _collapsed(data, finals) if not line.startswith(" ")),
        *(line for line in _exhausted(data, finals) if not line.startswith(" ")),
        *_two_groups(data, finals),
        *_lengths(data, finals),
        *infinite,
        *_lacking(data),
        *_code(data),
        *_external(data),
    ]
    return [*lines, *_lost(data), *_protocols(data), *_harnesses(data), *_changed(data)]


def _external(data: SweepData) -> list[str]:
    """Note that runs of other frameworks were not evaluated here."""
    arms = [arm for arm in data.arms if arm.startswith(EXTERNAL)]
    if not arms:
        return []
    return [
        f"External runs, logged by another framework under its own protocol and not evaluated here: {', '.join(arms)}. "
        "No verdict counts them."
    ]


def place(data: SweepData, level: str, arm: str) -> str:
    """The name of an arm, with its level where a sweep has levels."""
    return f"{arm} at {data.design.factor}={level}" if data.design and data.design.factor else arm


def _declaration(data: SweepData) -> list[str]:
    if data.declaration is None:
        return [] if data.design is None else [_EXPLORATORY]
    last = data.record.declared[-1]
    started = last["runs_started_before"]
    when = "before the first run" if started == 0 else f"after {started} of its runs had been started"
    number = len(data.record.declared)
    changed = "" if number == 1 else f"; it is declaration {number} of this sweep"
    return [f"Declared {when} ({last['at']}, fingerprint {last['fingerprint']}){changed}."]


def finished_runs(data: SweepData) -> list[str]:
    """How many runs are finished, and, indented, each that is not and why."""
    places = [(level, arm) for level in data.levels for arm in data.arms]
    planned = sum(data.seeds_planned(level, arm) for level, arm in places)
    lines = [f"Finished runs: {len(data.finished)} of {planned} planned."]
    runs = data.runs.assign(status=data.runs["status"].mask(data.exhausted, "exhausted"))
    words = {"failed": "failed", "exhausted": "ended", "partial": "unfinished", "unreadable": "unreadable"}
    for status, word in words.items():
        for row in rows_of(runs[runs["status"] == status]):
            reason = f": {row.problem}" if row.problem else ""
            lines.append(f"  {word}: {place(data, row.level, row.arm)} seed {row.seed}{reason}")
    started = data.runs[data.runs["status"] != "new"].groupby(["level", "arm"]).size()
    for level in data.levels:
        missing = {arm: data.seeds_planned(level, arm) - int(started.get((level, arm), 0)) for arm in data.arms}
        if level not in started.index.get_level_values("level"):
            lines.append(f"  not started: all {sum(missing.values())} of {place(data, level, 'every arm')}")
        elif any(missing.values()):
            counts = _listed(f"{number} of {arm}" for arm, number in missing.items() if number)
            lines.append(f"  not started: {place(data, level, counts)}")
    return lines


def _no_ops(data: SweepData) -> list[str]:
    """Axes whose option changed nothing in a whole run, whether somebody chose it or not, and in which arms."""
    lines = []
    done = data.finished.explode("no_ops").dropna(subset="no_ops")
    for axis, runs in done.groupby("no_ops"):
        if len(runs) == len(data.finished):
            where = "every finished run"
        else:
            counts = runs.groupby(["level", "arm"], sort=False).size()
            where = "; ".join(
                part for level in data.levels for part in _no_op_at(data, level, counts) if level in counts.index
            )
        lines.append(f"No-op: {axis} changed nothing of the loss in {where}.")
    return lines


def _no_op_at(data: SweepData, level: str, counts: pd.Series) -> list[str]:
    """Where at a level an option was a no-op: every arm in one word, otherwise arm by arm."""
    here = {arm: int(counts.get((level, arm), 0)) for arm in data.arms}
    finished = {arm: data.seeds_finished(level, arm) for arm in data.arms}
    if here == finished:
        return [place(data, level, "all runs of every arm")]
    whole = [arm for arm in data.arms if here[arm] and here[arm] == finished[arm]]
    named = [f"all runs of {_listed(whole)}"] if whole else []
    named += [f"{here[arm]} of {finished[arm]} runs of {arm}" for arm in data.arms if 0 < here[arm] < finished[arm]]
    return [place(data, level, _listed(named))]


def indistinguishable(data: SweepData) -> list[str]:
    """Where a trick did nothing that its control did not do, and which runs are one run, or might as well be."""
    return [*_shared(data), *_identical(data), *_active_alike(data)]


def _shared(data: SweepData) -> list[str]:
    """Runs that are another arm's run by construction."""
    named: dict[str, list[str]] = {}
    for row in rows_of(data.runs[data.runs["same_as"] != ""]):
        named.setdefault(row.same_as, []).append(f"{place(data, row.level, row.arm)} seed {row.seed}")
    text = "; ".join(f"{maker} is also {_listed(titles)}" for maker, titles in named.items())
    return [f"Runs shared by several labels, whose results cannot differ: {text}."] if text else []


def _identical(data: SweepData) -> list[str]:
    """Arms whose runs logged what those of another arm did at the same seeds, their control first."""
    places = [(level, arm) for level in data.levels for arm in data.arms]
    exact, shown = _prints(data, lambda name: name not in _CLOCKS), _prints(data, _shows)
    found: dict[str, list[str]] = {"the same numbers": [], "the same rollouts, rewards and accuracies": []}
    for number, own in enumerate(places):
        others = dict.fromkeys([(own[0], data.control), *places[:number]])
        others.pop(own, None)
        alike = {other: _alike(shown, own, other) for other in others}
        other = max(alike, key=lambda place: len(alike[place]), default=None)
        if other is None or not alike[other]:
            continue
        seeds = alike[other]
        whole, apart = found.values()
        of = len({seed for level, arm, seed in shown if (level, arm) == own})
        pairs = whole if seeds <= _alike(exact, own, other) else apart
        pairs.append(f"{name_of(own)} as {name_of(other)} ({len(seeds)} of {of} runs)")
    return [
        f"Identical: {words} at every step in {'; '.join(pairs)}; differences between them are not a trick's effect."
        for words, pairs in found.items()
        if pairs
    ]


def _prints(data: SweepData, chosen: Callable[[str], bool]) -> dict[tuple[str, str, int], bytes]:
    """A digest of what each finished run logged of the chosen metrics; labels that share a run are left out."""
    apart = data.runs[(data.runs["status"] == "done") & (data.runs["same_as"] == "")]
    points = data.points.merge(apart[LABELS], on=LABELS).sort_values([*LABELS, "step"])
    metrics = [name for name in points.columns.difference([*LABELS, "step"]) if chosen(name)]
    return {
        labels: hashlib.sha256(own[metrics].to_numpy(dtype=float).tobytes()).digest()
        for labels, own in groups_of(points, LABELS, sort=False)
    }


def _alike(prints: Mapping[tuple[str, str, int], bytes], own: Condition, other: Condition) -> set[int]:
    """The seeds at which two arms have the same digest."""
    return {
        seed
        for (level, arm, seed), mark in prints.items()
        if (level, arm) == own and prints.get((*other, seed)) == mark
    }


def _shows(name: str) -> bool:
    return name.startswith(("reward/", "rollout/")) or (name.startswith("eval/") and name.endswith("/accuracy"))


def _active_alike(data: SweepData) -> list[str]:
    """Arms whose active fraction equals that of the control, by means over steps paired by seed."""
    fractions = [name for name in data.points.columns if is_active_fraction(name)]
    trained = data.counted_points[data.counted_points["step"] > 0]
    if not fractions or trained.empty:
        return []
    shares = [*fractions, *({UNLIKE_PPO} & set(data.points.columns))]
    table = trained.groupby(LABELS, sort=False)[shares].mean().reset_index("seed")
    means = {labels: own.set_index("seed") for labels, own in groups_of(table, ["level", "arm"], sort=False)}
    lines, bases = [], bases_of(data)
    for level, arm in (labels for labels in data.run_arms if labels in means and (labels[0], data.control) in means):
        axes = _axes_apart(data, level, arm)
        for name in (name for name in fractions if axis_of_fraction(name) in axes):
            # Counted on the same tokens; the clipped share also depends on where the two runs went.
            share = UNLIKE_PPO if name == CLIP_FRACTION and UNLIKE_PPO in shares else name
            here, there = means[level, arm][share], means[level, data.control][share]
            apart = compare(seed_differences(here, there), bases, grouped=False).whole
            if apart.n >= FOR_INTERVAL and here.mean() > 0 and there.mean() > 0 and apart.contains(0.0):
                lines.append(
                    f"  {axis_of_fraction(name)}: {here.mean():.3%} in {place(data, level, arm)}, {there.mean():.3%} "
                    f"in {data.control}, difference {apart.written('{:+.3%}'.format)}, n = {apart.n}"
                )
    return ["Active fraction not distinguishable from the control's:", *lines] if lines else []


def _axes_apart(data: SweepData, level: str, arm: str) -> set[str]:
    """The slots in which an arm differs from its control, by the runs' settings and by what was declared."""
    own, control = data.settings.get((level, arm), {}), data.settings.get((level, data.control), {})
    arms = data.design.arms if data.design else {}
    declared = set(arms.get(arm, ())) ^ set(arms.get(data.control, ()))
    words = [*differences(own, control), *(word.partition("=")[0] for word in declared)]
    return {word.partition(".")[0] for word in words} if arm != data.control else set()


def _code(data: SweepData) -> list[str]:
    commits = sorted({str(commit)[:10] for commit in data.finished["commit"]})
    lines = [] if len(commits) == 1 else [f"The finished runs are of {len(commits)} commits: {_listed(commits)}."]
    changed = int(data.finished["dirty"].eq(True).sum())
    if changed:
        lines.append(f"{changed} finished runs used uncommitted changes, saved as source.diff in each run folder.")
    resumed = data.counted[data.counted["changed_code"] != ""]
    if len(resumed):
        named = _listed(
            f"{place(data, row.level, row.arm)} seed {row.seed} (after step {row.changed_code})"
            for row in rows_of(resumed)
        )
        lines.append(f"{len(resumed)} runs were resumed with changed code, so they mix two versions or more: {named}.")
    return lines


def _changed(data: SweepData) -> list[str]:
    """Arms that compute something else by now, so that these numbers are of what they were before."""
    named = [arm for arm in data.arms if arm in data.changed]
    if not named:
        return []
    arms_by_change: dict[str, list[str]] = {}
    for arm in named:
        arms_by_change.setdefault(data.changed[arm], []).append(arm)
    text = "; ".join(f"{_listed(arms)} ({what})" for what, arms in arms_by_change.items())
    return [f"Changed since these runs, and not run again (marked \u2020 in tables): {text}."]


def _lost(data: SweepData) -> list[str]:
    """Evaluations whose answers are gone, though their means were logged."""
    lost = data.counted[data.counted["lost"] != ""]
    named = _listed(f"{place(data, row.level, row.arm)} seed {row.seed} (step {row.lost})" for row in rows_of(lost))
    if not named:
        return []
    return [f"{len(lost)} runs have lost evaluation tables: {named}; per-question results exclude them."]


def _collapsed(data: SweepData, finals: FinalValues) -> list[str]:
    """Runs that collapsed: those that stopped on a loss that was not finite, and those that lost what they could."""
    values = finals.values
    stopped, fell = values[values["stopped"]], values[values["collapsed"] & ~values["stopped"]]
    as_what = "accuracy and reward 0 from there on" if finals.collapsed_as is Collapsed.zero else "their last values"
    lines = [f"Collapsed before the common budget: {len(stopped)} of {len(values)} runs, counted with {as_what}."]
    lines = lines if len(stopped) else []
    if len(fell):
        lines.append(
            f"Collapsed: {len(fell)} of {len(values)} runs ended below half of the held-out accuracy they began with."
        )
    for (level, arm), runs in groups_of(values[values["collapsed"]], ["level", "arm"], sort=False):
        seeds = _listed(str(seed) for seed in runs["seed"])
        lines.append(f"  {place(data, level, arm)}: {finals.collapses(level, arm).text}, seed {seeds}")
    return lines


def _exhausted(data: SweepData, finals: FinalValues) -> list[str]:
    """Runs that ended before X since nothing was left to train on."""
    dry = finals.values[finals.values["exhausted"]]
    if dry.empty:
        return []
    lines = [
        f"Nothing left to train on before the common budget: {len(dry)} of {len(finals.values)} runs, counted with "
        "their last values; curves and measures up to that budget leave them out."
    ]
    for (level, arm), runs in groups_of(dry, ["level", "arm"], sort=False):
        lines.append(f"  {place(data, level, arm)}: seed {_listed(str(seed) for seed in runs['seed'])}")
    return lines


def _bases(finals: FinalValues) -> list[str]:
    """How many initial policies the intervals are about."""
    bases = len(set(finals.bases.values()))
    if bases < 2:
        return ["One base model: every run starts from it, and intervals are over its seeds only."]
    if bases < FEWEST_BASES:
        return [f"{bases} base models are too few for an interval about a new one: {FEWEST_BASES} or more are needed."]
    return [f"{bases} base models: intervals generalise to a new one; each counts once, however many seeds it has."]


def _two_groups(data: SweepData, finals: FinalValues) -> list[str]:
    """Arms whose runs fall into two groups of accuracies, though none collapsed."""
    primary = [data.design.primary] if data.design else []
    found = []
    for level, arm in data.run_arms:
        for metric in dict.fromkeys([*(name for name in primary if is_rated(name)), *EVALUATED]):
            values = {int(seed): float(value) for seed, value in dict(finals.of(level, arm, metric)).items()}
            why = two_groups(values, finals.bases)
            if why and not finals.collapsed(level, arm):
                how = why.removeprefix("two groups of ")
                found.append(f"{place(data, level, arm)} ({metric}: {how})")
    return [f"Two groups, so no interval of the mean: {_listed(found)}."] if found else []


def _lengths(data: SweepData, finals: FinalValues) -> list[str]:
    """Runs that went on well beyond the budget up to which all are compared."""
    ends = data.finished_points.groupby(LABELS, sort=False)[f"budget/{finals.axis}"].max()
    longer = ends[ends > _UNEQUAL * finals.budget]
    if longer.empty:
        return []
    return [
        f"Unequal lengths: {len(longer)} of {len(ends)} finished runs went beyond {finals.at}, the longest to "
        f"{float(longer.max() / finals.budget):.2f} times that; final values ignore the excess."
    ]


def _not_finite(data: SweepData) -> list[str]:
    """Infinities and logged NaN among the numbers that are averaged."""
    points = data.counted_points
    metrics = points.columns.difference([*LABELS, "step"])
    infinite = np.isinf(points[metrics]).sum()
    counts = infinite[infinite > 0]
    holes = _holes(points, metrics) | _unended(data, metrics)
    lines = []
    if len(counts):
        named = _listed(f"{name} ({number})" for name, number in counts.items())
        lines.append(f"Infinite values: {named}; a mean over them is infinite, and no interval is given.")
    if holes:
        named = _listed(
            f"{name} ({number} {'runs, at their end' if name.startswith('eval/') else 'steps'}"
            + (f": {_runs(data, runs)})" if len(runs) <= _FEW else ")")
            for name, (number, runs) in holes.items()
        )
        lines.append(f"Missing or NaN at some steps of a run, and left out of means there: {named}.")
    return lines


def _holes(points: pd.DataFrame, metrics: Iterable[str]) -> dict[str, tuple[int, pd.Index]]:
    """Metrics of every step -> how many steps after the first lack them, and which runs, that have them at most."""
    trained = points[points["step"] > 0]
    stepwise = [name for name in metrics if not name.startswith(("eval/", "rollout/length_"))]
    present = trained[stepwise].notna().groupby([trained[name] for name in LABELS], sort=False)
    shares, sizes = present.mean(), present.size()
    holes = {}
    for name in stepwise:
        partly = shares[name][(shares[name] > 0.5) & (shares[name] < 1)]
        if len(partly):
            holes[name] = int(((1 - partly) * sizes[partly.index]).round().sum()), partly.index
    return holes


def _unended(data: SweepData, metrics: Iterable[str]) -> dict[str, tuple[int, pd.Index]]:
    """Accuracies -> how many, and which, finished runs lack them at their last evaluation: they have no final value."""
    points = data.finished_points
    accuracies = [name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy")]
    if not accuracies:
        return {}
    evaluated = points[points[accuracies].notna().any(axis=1)]
    last = evaluated.loc[evaluated.groupby(LABELS, sort=False)["step"].idxmax()].set_index(LABELS)[accuracies]
    logged = points[accuracies].notna().groupby([points[name] for name in LABELS], sort=False).any()
    without = logged & ~last.notna().reindex(logged.index, fill_value=False)
    return {name: (int(without[name].sum()), logged.index[without[name]]) for name in accuracies if without[name].any()}


def _lacking(data: SweepData) -> list[str]:
    """Evaluations and rewards that some arms logged and others did not: those cannot be compared on them."""
    points = data.finished_points
    compared = [name for name in points.columns if name.startswith(("eval/", "reward/")) and "/component/" not in name]
    compared = [name for name in compared if "/in_loss_component/" not in name]
    has = points[compared].notna().groupby([points["level"], points["arm"]], sort=False).any()
    lacking: dict[str, list[str]] = {}
    for name in compared:
        without = has.index[~has[name]]
        if len(without) and has[name].any():
            lacking.setdefault(_listed(place(data, level, arm) for level, arm in without), []).append(name)
    return [
        f"No {_listed(_by_suite(names, compared))}: {arms}; left out of these comparisons."
        for arms, names in lacking.items()
    ]


def _by_suite(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """The names, with a whole suite of those in `every` as one name (`eval/downstream/*`)."""
    suites = {name: name.rpartition("/")[0] for name in every if name.startswith("eval/")}
    whole = set(suites.values()) - {suite for name, suite in suites.items() if name not in names}
    return list(dict.fromkeys(f"{suites[name]}/*" if suites.get(name) in whole else name for name in names))


def _untimed(data: SweepData) -> list[str]:
    """Runs without an entry of the budget that others have: seconds are in a file of their own, which can be lost."""
    points = data.counted_points
    lines = []
    for name in (name for name in points.columns if name.startswith("budget/")):
        has = points[name].notna().groupby([points[label] for label in LABELS], sort=False).any()
        if has.any() and not has.all():
            lines.append(f"No {name}: {_runs(data, has.index[~has])}; left out of comparisons on it.")
    return lines


def _runs(data: SweepData, labels: Iterable[tuple[str, str, int]]) -> str:
    return _listed(f"{place(data, level, arm)} seed {seed}" for level, arm, seed in labels)


def levels_alike(data: SweepData) -> bool:
    """True if the levels of a sweep were evaluated by one protocol, so that their values may share an axis."""
    if "protocol" not in data.counted:
        return True
    known = data.counted.dropna(subset="protocol")
    return len({runs["protocol"].mode()[0] for _, runs in known.groupby("level")}) < 2


def _protocols(data: SweepData) -> list[str]:
    """Runs that were asked or graded differently."""
    known = data.counted.dropna(subset="protocol")
    counts = known["protocol"].value_counts()
    unknown = len(data.counted) - len(known)
    if 0 < unknown < len(data.counted):
        return [f"Evaluation protocol unknown for {unknown} of {len(data.counted)} runs: they may not be comparable."]
    if len(counts) < 2:
        return []
    by_level = known.groupby("level", sort=False)["protocol"].nunique()
    if (by_level == 1).all():
        return [
            f"Not evaluated alike: the levels of {data.design.factor if data.design else 'the sweep'}, in task, "
            "template, evaluation, verifier, target lengths or (training protocol) how responses end. Differences "
            "between levels mix training and evaluation; arms within a level are comparable."
        ]
    controls = known[known["arm"] == data.control]
    # A level without finished runs of the control is compared with its most frequent protocol.
    usual = {level: runs["protocol"].mode()[0] for table in (known, controls) for level, runs in table.groupby("level")}
    others = known[known["protocol"] != known["level"].map(usual)]
    seeds_of = others.groupby(["level", "arm"], sort=False)["seed"].agg(list).reset_index()
    named = []
    for row in rows_of(seeds_of):
        every = ((known["level"] == row.level) & (known["arm"] == row.arm)).sum()
        seeds = "" if len(row.seed) == every else f" seed {_listed(map(str, row.seed))}"
        named.append(f"{place(data, row.level, row.arm)}{seeds}")
    levels = " Levels differ, too." if len(set(usual.values())) > 1 else ""
    return [
        f"Not evaluated alike: task, template, evaluation, verifier, target lengths or (training protocol) how "
        f"responses end differ for {len(others)} of {len(known)} runs from the control of their level "
        f"({'; '.join(named)}); their differences mix the arm with the evaluation.{levels}"
    ]


def _harnesses(data: SweepData) -> list[str]:
    """Suites that a harness did not ask every run alike: other questions, settings or versions of task or harness."""
    ways: dict[str, dict[str, list[str]]] = {}
    for row in rows_of(data.counted[data.counted["harness"] != ""]):
        for suite, _, way in (word.partition("=") for word in row.harness.split(" ")):
            ways.setdefault(suite, {}).setdefault(way, []).append(place(data, row.level, row.arm))
    return [
        f"Not evaluated alike: {suite} was evaluated in {len(by_way)} ways: other questions, settings or versions "
        f"({'; '.join(_listed(dict.fromkeys(arms)) for arms in by_way.values())}); its differences mix the arm "
        "with the evaluation. Remedy: evaluate all runs in one command, with --again."
        for suite, by_way in ways.items()
        if len(by_way) > 1 or any("+" in way for way in by_way)
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def comparison(data: SweepData) -> list[str]:
    """The settings in which arms differ, with each arm's value, and a warning where arms differ in more than one.

    For sweeps that declared nothing, since a design says what its arms change. Empty where runs recorded no settings.
    """
    if not data.settings or len(data.settings) < 2:
        return []
    control = next((place for place in data.settings if place[1] == data.control), next(iter(data.settings)))
    apart = {place: differences(settings, data.settings[control]) for place, settings in data.settings.items()}
    keys = list(dict.fromkeys(key for own in apart.values() for key in own))
    lines = [f"Settings in which the arms differ: {len(keys)}."]
    for key in keys:
        holders: dict[str, list[str]] = {}
        for place, settings in data.settings.items():
            holders.setdefault(str(settings.get(key.split(SAME)[0], "not there")), []).append(name_of(place))
        lines.append(f"  {key}: {'; '.join(f'{value} in {_listed(names)}' for value, names in holders.items())}")
    mixed = [f"{name_of(place)} in {len(own)} ({_listed(own)})" for place, own in apart.items() if len(own) > 1]
    if mixed:
        lines.append(
            f"WARNING: some arms differ from {name_of(control)} in more than one setting, so no difference "
            f"can be attributed to one of them: {'; '.join(mixed)}."
        )
    return lines + _steps_apart({name_of(place): settings.get(STEPS) for place, settings in data.settings.items()})


def undeclared_steps(data: SweepData) -> list[str]:
    """Arms of a design that take another number of optimiser steps than their control, and did not declare it."""
    if data.design is None:
        return []
    lines = []
    for (level, arm), settings in data.settings.items():
        control = data.settings.get((level, data.control), {})
        declared = any(word.startswith("updates") for word in data.design.arms.get(arm, ()))
        steps, others = settings.get(STEPS), control.get(STEPS)
        if not declared and None not in (steps, others) and steps != others:
            lines += _steps_apart({name_of((level, arm)): steps, data.control: others})
    return lines


def _steps_apart(steps: Mapping[str, int | None]) -> list[str]:
    known = {name: number for name, number in steps.items() if number is not None}
    if len(set(known.values())) < 2:
        return []
    by_number: dict[int, list[str]] = {}
    for name, number in known.items():
        by_number.setdefault(number, []).append(name)
    text = "; ".join(f"{number} in {_listed(names)}" for number, names in by_number.items())
    return [
        f"WARNING: optimiser steps on a batch differ: {text}. More steps can make such a difference by themselves; "
        "set updates to the same option in every arm to take that away."
    ]


def name_of(place: Condition) -> str:
    """An arm, with its level where it has one."""
    level, arm = place
    return f"{arm} at {level}" if level else arm
