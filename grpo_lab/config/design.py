"""The declaration of an experiment: a question, arms, and predictions that its runs can contradict.

`experiments/<name>/design.yaml` holds one such declaration under `design:`. Nothing here composes a run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf

from grpo_lab.config.additions import ALL
from grpo_lab.config.design_keys import LISTED, METRIC, OVERRIDES, Key, require_keys
from grpo_lab.config.folders import DESIGN, declared, experiments_folder
from grpo_lab.config.tuning import Tuning, read_tuning
from grpo_lab.config.user_files import check_yaml
from grpo_lab.tracking.metrics import REGISTRY, SUITES, is_evaluated, is_known
from grpo_lab.tracking.renames import first_metric_name, metric_name
from grpo_lab.tricks.selects import Selects

FIRST_WORLD = "world=arithmetic"  # the default when the first experiments were declared

# What training reward is ranked against, and where a sweep has them, these too.
RANKED = ("train/entropy", "eval/heldout/accuracy", "eval/downstream/accuracy")
ALSO_RANKED = ("eval/heldout_training/accuracy", "eval/heldout_greedy/accuracy")
RANK, SHARE = "rank/", "sharpening_share"
TWIN = "_twin"  # the end of the name of an arm's random twin
MATCHED = "matched_norm"  # the learning rate of a matched arm as a trick; behind `_` the end of the arm's name
_AXES = ", ".join(metric.name.removeprefix("budget/") for metric in REGISTRY if metric.name.startswith("budget/"))


class Direction(Enum):
    """Whether an arm is predicted to end above or below its control, or no further from it than the margin."""

    above = "above"
    below = "below"
    within = "within"


class Kind(Enum):
    """Which combinations of its tricks a design runs; with `arms` each combination is written by hand."""

    arms = "arms"
    add_one = "add_one"
    add_one_and_all = "add_one_and_all"
    leave_one_out = "leave_one_out"
    two_sided = "two_sided"
    ladder = "ladder"
    factorial = "factorial"


class Collapsed(Enum):
    """The final value of a run that stopped because its loss was not finite: zero, or its last value."""

    zero = "zero"
    last = "last"


class Match(Enum):
    """The quantity that the matched arm of each arm shares with the control; `none`: there are no matched arms."""

    none = "none"
    update_norm = "update_norm"


@dataclass(frozen=True)
class Prediction:
    """`arm` will end above or below the control on `metric`, or `within` its margin, at `level` of the factor.

    With `reference`, the arm is compared with that other arm instead of the control. With `against`, it is compared
    with itself at that other level. `margin` is the equivalence margin, in the metric's unit;
    without one, the design's margin holds for predictions on the primary metric.
    """

    arm: Annotated[str, Key("the arm of which something is predicted", "an arm")]
    metric: Annotated[str, Key("on what", METRIC)]
    direction: Annotated[Direction, Key("where the arm ends: above or below the control, or within the margin of it")]
    level: Annotated[str, Key("at which level", "a level", "none: there is no factor")] = ""
    against: Annotated[str, Key("compares the arm with itself at this level", "another level", "none")] = ""
    reference: Annotated[str, Key("compares with this arm instead", "another arm", "the control")] = ""
    margin: Annotated[float | None, Key("the equivalence margin", "a number above 0", "`margin`, on `primary`")] = None


@dataclass(frozen=True)
class CountPrediction:
    """On how many base models (without `design.bases`: in how many runs) `arm` ends with `metric` above `above`.

    Several runs of a base model count with their mean. One of `at_least` and `at_most` is given.
    """

    arm: Annotated[str, Key("the arm whose runs are counted", "an arm")]
    metric: Annotated[str, Key("the metric that is counted", METRIC)]
    above: Annotated[float, Key("a base model counts if its final value is above this", "a number")]
    at_least: Annotated[
        int | None, Key("how many base models at least; give this or at_most", "a whole number", "none")
    ] = None
    at_most: Annotated[int | None, Key("how many at most", "a whole number", "none")] = None
    level: Annotated[str, Key("at which level", "a level", "none: there is no factor")] = ""

    def holds(self, number: int) -> bool:
        """True if the prediction came true for `number` base models."""
        return (self.at_least is None or number >= self.at_least) and (self.at_most is None or number <= self.at_most)

    def sure(self, number: int, waiting: int) -> bool:
        """True if `waiting` more base models cannot change what `number` of the others say."""
        return self.holds(number) == self.holds(number + waiting)


@dataclass(frozen=True)
class QuantityPrediction:
    """A quantity of the whole sweep is `above` or `below` a number at `level`; one of the two is given.

    `rank/<metric>`: Spearman's correlation over arms of training reward with the metric, within a base model.
    `sharpening_share`: the share of the reward gain of all arms that a lower temperature of the initial policy gives;
    `sharpening_share/<arm>`: that of one arm. Both are averaged over base models.
    """

    quantity: Annotated[
        str, Key("what is predicted", f"`{RANK}METRIC`, `{SHARE}`, `{SHARE}/ARM`; an error lists the metrics")
    ]
    level: Annotated[str, Key("at which level", "a level", "none: there is no factor")] = ""
    above: Annotated[float | None, Key("it exceeds this; give this or below", "a number", "none")] = None
    below: Annotated[float | None, Key("it stays below this", "a number", "none")] = None

    @property
    def bound(self) -> float:
        """The number that is predicted to be exceeded or not reached."""
        bound = self.above if self.below is None else self.below
        assert bound is not None, "read_design wants one of the two"
        return bound


@dataclass(frozen=True)
class Claim:
    """A claim of a source about the contrast of one prediction, in our words.

    `source` is an arXiv id or an address, `prediction` a position in the design's predictions, and `direction` what the
    source expects of that contrast; the prediction may expect something else. Only where the prediction has a margin
    can the effect be found to be no larger than that.
    """

    says: Annotated[str, Key("what the source says, in your words", "a sentence")]
    source: Annotated[str, Key("who says so", "an arXiv id or an address")]
    prediction: Annotated[int, Key("the prediction that tests it", "its position, from 0")]
    direction: Annotated[Direction, Key("what the source expects")]


@dataclass(frozen=True)
class Part:
    """A named part of a design, such as the part a demonstration runs; an empty field means all."""

    arms: Annotated[tuple[str, ...], Key("its arms", "a list of arms", "all")] = ()
    levels: Annotated[tuple[str, ...], Key("its levels", "a list of levels", "all")] = ()
    seeds: Annotated[tuple[int, ...], Key("its seeds", LISTED, "all")] = ()
    bases: Annotated[tuple[int, ...], Key("its base models", LISTED, "all")] = ()


@dataclass(frozen=True)
class Change:
    """From `since` on (UTC, such as 2026-11-22T22:30:00Z) these arms mean something else; `what` describes it.

    Runs declared earlier belong to the old meaning.
    """

    arms: Annotated[tuple[str, ...], Key("which arms mean something else", "a list of arms")]
    since: Annotated[str, Key("from when on, UTC", "such as 2026-11-22T22:30:00Z")]
    what: Annotated[str, Key("what changed", "text")]


@dataclass(frozen=True)
class Design:
    """A declared experiment: every arm at every level of the factor, for every seed.

    `base`, `arms` and `levels` hold Hydra overrides. An arm's overrides win over the level's, and the level's over the
    base's. Without a factor there is one level, named "". A design of a `kind` other than `arms` declares `tricks` with
    their overrides instead; its arms and control follow from the kind. With `bases` every seed has one base model,
    `base_of`, so that seeds are nested in bases. `requires` maps an arm to metrics, and each to how far the arm's mean
    over steps must be from its control's; an arm that is nearer fails its manipulation check. `collapsed` sets the
    final value of runs whose loss was not finite. `margin` is the largest difference on the primary metric that does
    not matter, in its unit. Each arm in `twin` also runs with its selection drawn at random, as an arm of its own in
    `twins`, and each of its predictions against the control is also judged against that arm. With `match` every arm but
    the control also runs at a learning rate that a pilot chooses, as an arm of its own. With `tuning` every arm first
    chooses numbers of its own, on other seeds. `columns` replaces the usual metrics of its table, `changes` lists arms
    whose meaning changed, and `claims` says what sources expect of predictions. `superseded` names an experiment that
    asked the same again. These four decide nothing, so the fingerprint leaves them out.
    """

    name: Annotated[str, Key("its name, that of its folder and of its sweep", "text")]
    question: Annotated[str, Key("what the experiment asks", "text")]
    prediction: Annotated[str, Key("what is expected, in words", "text")]
    control: Annotated[
        str, Key("the arm that others are compared with", "an arm", "required, unless a `kind` gives it")
    ]
    primary: Annotated[str, Key("the metric that decides", METRIC)]
    axis: Annotated[str, Key("the unit of the budget at which arms are compared; not a trick axis", _AXES)]
    arms: Annotated[
        Mapping[str, tuple[str, ...]], Key("the arms", f"NAME: {OVERRIDES}", "required, unless a `kind` gives them")
    ]
    seeds: Annotated[
        tuple[int, ...],
        Key("the seeds of every arm", f"{LISTED}; with `bases` also how many for each", "required; 1 with `bases`"),
    ]
    base: Annotated[tuple[str, ...], Key("what all runs share", OVERRIDES, "none")] = ()
    kind: Annotated[
        Kind,
        Key(
            "how arms are built: by hand (arms), or from `tricks`: each on its own (add_one), also all together "
            "(add_one_and_all), all but one (leave_one_out), all of these (two_sided), one after the other (ladder), "
            "every combination (factorial)"
        ),
    ] = Kind.arms
    tricks: Annotated[Mapping[str, tuple[str, ...]], Key("the tricks of a `kind`", f"NAME: {OVERRIDES}", "none")] = (
        field(default_factory=dict)
    )
    factor: Annotated[str, Key("what `levels` vary, in a word", "text", "none")] = ""
    levels: Annotated[
        Mapping[str, tuple[str, ...]], Key("the levels at which every arm runs", f"NAME: {OVERRIDES}", "one")
    ] = field(default_factory=lambda: {"": ()})
    bases: Annotated[
        tuple[int, ...],
        Key(
            "the base models, assigned to seeds in turn",
            f"how many, or {LISTED}: values of model.base",
            "the model's",
        ),
    ] = ()
    margin: Annotated[float | None, Key("the equivalence margin on `primary`", "a number above 0", "none")] = None
    predictions: Annotated[tuple[Prediction, ...], Key("what is judged", "a list of entries, below", "none")] = ()
    counts: Annotated[
        tuple[CountPrediction, ...],
        Key("on how many base models something happens", "a list of entries, below", "none"),
    ] = ()
    quantities: Annotated[
        tuple[QuantityPrediction, ...], Key("predicted quantities of a level", "a list of entries, below", "none")
    ] = ()
    requires: Annotated[
        Mapping[str, Mapping[str, float]],
        Key(
            "the minimum difference from the control in a metric for the trick to count as active",
            "ARM: {METRIC: a number above 0}",
            "nothing",
        ),
    ] = field(default_factory=dict)
    collapsed: Annotated[
        Collapsed, Key("the final value of a run whose loss was not finite: zero, or the last it had")
    ] = Collapsed.zero
    twin: Annotated[
        tuple[str, ...],
        Key(
            "the arms that also run with their selection drawn at random (twin=random), as NAME_twin; each prediction "
            "against the control is also judged against the twin",
            "true, for every arm that changes an axis that selects, or a list of arms",
            "none",
        ),
    ] = ()
    tuning: Annotated[
        Tuning | None, Key("numbers that every arm chooses for itself first", "entries, below", "none")
    ] = None
    match: Annotated[
        Match,
        Key(
            "beside each arm X an arm X_matched_norm, at the learning rate at which its mean train/update_norm in a "
            "pilot equals the control's"
        ),
    ] = Match.none
    parts: Annotated[Mapping[str, Part], Key("named parts of the whole", "NAME: entries, below", "none")] = field(
        default_factory=dict
    )
    part: Annotated[str | None, Key("the part to run now", "a name in `parts`", "all")] = None
    columns: Annotated[
        tuple[str, ...], Key("the metrics of its table", "a list of metrics: `grpo-lab metrics`", "the usual ones")
    ] = ()
    claims: Annotated[tuple[Claim, ...], Key("what sources expect", "a list of entries, below", "none")] = ()
    changes: Annotated[
        tuple[Change, ...], Key("arms whose meaning later code changed", "a list of entries, below", "none")
    ] = ()
    superseded: Annotated[str, Key("the experiment that replaces this one", "its name", "none")] = ""
    exploratory: Annotated[
        bool, Key("of an ablation from the shell, such as `add=[...]`: nothing is declared, so nothing is judged")
    ] = False

    @property
    def twins(self) -> dict[str, str]:
        """Each arm that has a random twin -> the twin's name."""
        return {arm: arm + TWIN for arm in self.twin}

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that its predictions are about, and its columns."""
        return (*(one.metric for one in (*self.predictions, *self.counts)), *self.columns)

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """`metrics`, the one that decides and those of the manipulation checks."""
        return (self.primary, *self.metrics, *(metric for least in self.requires.values() for metric in least))

    def margin_of(self, prediction: Prediction) -> float | None:
        """The prediction's own margin, else on the primary metric the design's."""
        if prediction.margin is not None:
            return prediction.margin
        return self.margin if prediction.metric == self.primary else None

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of a hash of everything declared; a part has the fingerprint of the whole.

        What a declaration did not use is left out, metrics stand under the names they first had, and the world that
        was once the default goes unnamed. So neither a new kind of entry, nor a rename, nor another default makes old
        declarations new.
        """
        left_out = ("part", "parts", "columns", "changes", "claims", "superseded")
        declared = {name: value for name, value in asdict(self).items() if name not in left_out}
        unused = {"kind": Kind.arms, "tricks": {}, "collapsed": Collapsed.zero, "margin": None}
        unused |= {"bases": (), "requires": {}, "tuning": None, "counts": (), "quantities": (), "exploratory": False}
        unused |= {"twin": (), "match": Match.none}
        declared = {name: value for name, value in declared.items() if name not in unused or value != unused[name]}
        declared["base"] = tuple(word for word in self.base if word != FIRST_WORLD)
        declared["primary"] = first_metric_name(self.primary)
        if self.requires:
            declared["requires"] = {
                arm: {first_metric_name(metric): least for metric, least in required.items()}
                for arm, required in self.requires.items()
            }
        if self.tuning:
            declared["tuning"] = declared["tuning"] | {"metric": first_metric_name(self.tuning.metric)}
        declared["predictions"] = [
            {name: value for name, value in prediction.items() if name not in ("reference", "margin") or value}
            | {"metric": first_metric_name(prediction["metric"])}
            for prediction in declared["predictions"]
        ]
        text = json.dumps(declared, sort_keys=True, default=lambda value: value.value)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def contents(self, arm: str) -> frozenset[str]:
        """The tricks an arm switches on: names of tricks for a design of a kind, overrides for arms written by hand.

        If every arm sets a key, the control's value of that key is not a trick.
        """
        if (plain := self.plain_of(arm)) != arm:
            return self.contents(plain) | {MATCHED}
        if arm in self.twins.values():
            return self.contents(arm.removesuffix(TWIN)) | {TWIN}
        if self.kind is not Kind.arms:
            return _combinations(self.kind, tuple(self.tricks), self.control if self.exploratory else "")[arm]
        every = set.intersection(*({word.partition("=")[0] for word in words} for words in self.arms.values()))
        chosen = {word for word in self.arms[self.control] if word.partition("=")[0] in every}
        return frozenset(self.arms[arm]) - chosen

    def plain_of(self, arm: str) -> str:
        """The arm that this one repeats at a matched update norm; itself for another."""
        return arm if self.match is Match.none else arm.removesuffix(f"_{MATCHED}")

    def chosen(self) -> Part:
        """The arms, levels and seeds to run now."""
        part = self.parts[self.part] if self.part else Part()
        seeds = tuple(seed for seed in part.seeds or self.seeds if not part.bases or self.base_of(seed) in part.bases)
        return Part(part.arms or tuple(self.arms), part.levels or tuple(self.levels), seeds, part.bases or self.bases)

    def base_of(self, seed: int) -> int | None:
        """The base model of a run seed: declared seeds go through the bases in turn; None without bases.

        Another seed has the base at its own number, modulo the number of bases.
        """
        if not self.bases:
            return None
        place = self.seeds.index(seed) if seed in self.seeds else seed
        return self.bases[place % len(self.bases)]


def read_design(node: Any) -> Design:
    """A Design from the `design` node of an experiment. Raises ValueError with the key and a remedy."""
    if not isinstance(node, Mapping):
        raise ValueError(f"design must hold entries (name, question, arms and others), got {node!r}: see experiments/")
    node = {name: value for name, value in node.items() if value is not None}
    require_keys("design", node, Design)
    _require_words(node)
    exploratory = node.get("exploratory", False)
    if not isinstance(exploratory, bool):
        raise ValueError(f"design.exploratory is true or false, got {exploratory!r}")
    kind = _choice("kind", Kind, node.get("kind", "arms"))
    if kind is not Kind.arms:
        node = node | _arms_of(kind, node)
    elif "tricks" in node:
        raise ValueError(f"design.tricks belong to a design of a kind: give design.kind, one of {_names(Kind)}")
    if node.get("bases"):
        node = {"seeds": 1} | node  # the default design: more base models, and one run of each
    for name in ("name", "question", "prediction", "control", "primary", "axis", "arms", "seeds"):
        if not node.get(name) and not (exploratory and name == "prediction"):
            raise ValueError(f"design.{name} is missing: an experiment states it before its first run")
    arms = _override_lists("arms", node["arms"])
    levels = _override_lists("levels", node.get("levels") or {"": []})
    if ("factor" in node) != ("levels" in node):
        raise ValueError("design.factor names what design.levels vary: give both or neither")
    twin, match = (
        _twinned(node.get("twin"), arms, str(node["control"])),
        _choice("match", Match, node.get("match", "none")),
    )
    matched = _matched(arms, str(node["control"]), "tuning" in node) if match is not Match.none else {}
    arms |= matched | {
        arm + TWIN: (*arms[arm], "twin=random", f"twin.of=[{','.join(_selecting(arms[arm]))}]") for arm in twin
    }
    predictions = tuple(_prediction(entry) for entry in node.get("predictions") or ())
    predictions += tuple(
        replace(one, reference=one.arm + TWIN)
        for one in predictions
        if one.arm in twin and not one.against and not one.reference
    )
    parts = {name: _with_twins(_part(name, part), twin) for name, part in (node.get("parts") or {}).items()}
    bases = _bases(node.get("bases"))
    base = _override_lists("base", {"": node.get("base") or []})[""]
    seeds = _nested(node["seeds"], bases) if bases else _seeds("seeds", node["seeds"])
    primary, tuning = metric_name(str(node["primary"])), None
    if "tuning" in node:
        judged = {*seeds, *(seed for part in parts.values() for seed in part.seeds)}
        others = [*base, *(word for words in levels.values() for word in words)]
        tuning = read_tuning(node["tuning"], primary, sorted(judged), arms, others)
    design = Design(
        name=str(node["name"]),
        question=_text(node["question"]),
        prediction=_text(node.get("prediction", "")),
        control=str(node["control"]),
        primary=primary,
        axis=str(node["axis"]),
        base=base,
        arms=arms,
        factor=str(node.get("factor", "")),
        levels=levels,
        seeds=seeds,
        predictions=predictions,
        parts=parts,
        part=node.get("part"),
        columns=tuple(metric_name(str(name)) for name in node.get("columns") or ()),
        changes=tuple(_change(entry) for entry in node.get("changes") or ()),
        claims=tuple(_claim(entry) for entry in node.get("claims") or ()),
        kind=kind,
        tricks=_override_lists("tricks", node.get("tricks") or {}),
        collapsed=_choice("collapsed", Collapsed, node.get("collapsed", "zero")),
        bases=bases,
        requires=_requires(node.get("requires") or {}),
        margin=_margin(node.get("margin")),
        twin=twin,
        tuning=tuning,
        match=match,
        counts=tuple(_count(entry) for entry in node.get("counts") or ()),
        superseded=str(node.get("superseded", "")),
        exploratory=exploratory,
        quantities=tuple(_quantity(entry) for entry in node.get("quantities") or ()),
    )
    _check_names(design)
    return design


def _selecting(words: Sequence[str]) -> list[str]:
    """The axes that select and that an arm's overrides set, in the order in which they act."""
    keys = {word.lstrip("+~").partition("=")[0].partition(".")[0] for word in words}
    return [axis.value for axis in Selects if axis.value in keys]


def _twinned(value: Any, arms: Mapping[str, tuple[str, ...]], control: str) -> tuple[str, ...]:
    """The arms that `design.twin` gives a random twin."""
    if value is None or value is False:
        return ()
    axes = ", ".join(axis.value for axis in Selects)
    if value is True:
        found = tuple(arm for arm, words in arms.items() if arm != control and _selecting(words))
        if not found:
            raise ValueError(
                f"design.twin: no arm sets an axis that selects ({axes}); name the arms in a list, or remove it"
            )
    elif isinstance(value, list | tuple) and all(isinstance(arm, str) for arm in value):
        found = tuple(value)
    else:
        raise ValueError(f"design.twin is true or a list of arms, got {value!r}")
    for arm in found:
        if arm not in arms or arm == control:
            raise ValueError(
                f"design.twin: {arm!r} is no arm beside the control; choose from "
                f"{', '.join(name for name in arms if name != control)}"
            )
        if not _selecting(arms[arm]) and not any(word.startswith("recipe=") for word in arms[arm]):
            raise ValueError(f"design.twin: {arm} sets no axis that selects ({axes}), so it has no random twin")
        if arm + TWIN in arms:
            raise ValueError(f"design.arms: {arm + TWIN} is the name of the random twin of {arm}: rename it")
    return found


def _with_twins(part: Part, twin: Sequence[str]) -> Part:
    """A part that runs an arm runs its random twin too."""
    return replace(
        part, arms=(*part.arms, *(arm + TWIN for arm in twin if arm in part.arms and arm + TWIN not in part.arms))
    )


def _matched(arms: Mapping[str, tuple[str, ...]], control: str, tuned: bool) -> dict[str, tuple[str, ...]]:
    """The matched arms of all arms but the control. Raises ValueError where arms choose their rates otherwise."""
    if tuned:
        raise ValueError(
            "design.match sets the learning rate by the control's update norm, and design.tuning tunes every arm: "
            "remove one of the two"
        )
    matched = {f"{arm}_{MATCHED}": words for arm, words in arms.items() if arm != control}
    if taken := [arm for arm in arms if arm.endswith(f"_{MATCHED}")]:
        raise ValueError(f"design.arms.{taken[0]}: rename it: design.match adds the arms that end in _{MATCHED}")
    return matched


def _names(choices: type[Enum]) -> str:
    return ", ".join(choice.value for choice in choices)


def _choice(name: str, choices: type[Enum], value: Any) -> Any:
    try:
        return choices(value)
    except ValueError as error:
        raise ValueError(f"design.{name}: there is no {value!r}; choose from {_names(choices)}") from error


def _arms_of(kind: Kind, node: Mapping[str, Any]) -> dict[str, Any]:
    """Arms and control of a kind, from its tricks. Raises ValueError if they are also written by hand.

    Arms of an ablation from the shell are called as what was typed, and `control` is the name of that without.
    """
    named = str(node.get("control") or "") if node.get("exploratory") else ""
    if given := [name for name in ("arms", "control") if name in node and not (name == "control" and named)]:
        raise ValueError(f"design.{given[0]} follows from design.kind={kind.value} and design.tricks: remove it")
    tricks = _override_lists("tricks", node.get("tricks") or {})
    if not tricks:
        raise ValueError(f"design.kind={kind.value} needs design.tricks, such as mask: [truncation=mask_after]")
    for name, words in tricks.items():
        if not words:
            raise ValueError(f"design.tricks.{name} changes nothing: give it overrides")
        if not named and (set(name) & set("+-,=") or name in ("base", "full")):
            raise ValueError(f"design.tricks.{name}: rename it: base, full and the signs + - , = are reserved")
    setters: dict[str, str] = {}
    for name, words in tricks.items() if not named or kind is not Kind.add_one else ():
        for key in (word.partition("=")[0] for word in words):
            if setters.setdefault(key, name) != name:
                raise ValueError(f"design.tricks: {setters[key]} and {name} both set {key}, so they cannot be combined")
    combinations = _combinations(kind, tuple(tricks), named)
    arms = {
        arm: [word for trick, words in tricks.items() if trick in on for word in words]
        for arm, on in combinations.items()
    }
    return {"arms": arms, "control": next(iter(arms))}


def _combinations(kind: Kind, tricks: tuple[str, ...], named: str = "") -> dict[str, frozenset[str]]:
    """The arms of a kind with the tricks that each switches on, the control first.

    `named` is what an ablation from the shell calls the arm without additions; one that adds is called as its addition.
    """
    whole = frozenset(tricks)
    added = {trick if named else f"+{trick}": frozenset({trick}) for trick in tricks}
    left_out = {f"-{trick}": whole - {trick} for trick in tricks}
    base, full = {named or "base": frozenset[str]()}, {ALL if named else "full": whole}
    if kind is Kind.add_one:
        return base | added
    if kind is Kind.leave_one_out:
        return full | left_out
    if kind in (Kind.two_sided, Kind.add_one_and_all):
        arms = base | added | full | (left_out if kind is Kind.two_sided else {})
        # With one or two tricks both sides share arms: keep the first of equal arms.
        return {arm: on for arm, on in arms.items() if on not in [arms[name] for name in arms][: list(arms).index(arm)]}
    if kind is Kind.ladder:
        rungs = [tricks[:number] for number in range(1, len(tricks) + 1)]
    else:
        rungs = [on for number in range(1, len(tricks) + 1) for on in itertools.combinations(tricks, number)]
    return base | {"+" + "+".join(on): frozenset(on) for on in rungs}


def _check_names(design: Design) -> None:
    def require_known(what: str, name: str, known: Sequence[str]) -> None:
        if name not in known:
            raise ValueError(f"design.{what}: there is no {name!r}; choose from {', '.join(map(repr, known))}")

    arms, levels = list(design.arms), list(design.levels)
    require_known("control", design.control, arms)
    if design.part is not None:
        require_known("part", design.part, list(design.parts))
    for name, part in design.parts.items():
        for arm in part.arms:
            require_known(f"parts.{name}.arms", arm, arms)
        for level in part.levels:
            require_known(f"parts.{name}.levels", level, levels)
        for base in part.bases:
            if base not in design.bases:
                raise ValueError(f"design.parts.{name}.bases: there is no {base}; choose from design.bases")
        if not replace(design, part=name).chosen().seeds:
            raise ValueError(f"design.parts.{name}: none of its seeds has one of its bases: change seeds or bases")
    for change in design.changes:
        for arm in change.arms:
            require_known("changes", arm, arms)
    for prediction in design.predictions:
        require_known("predictions", prediction.arm, [arm for arm in arms if arm != design.control])
        require_known("predictions", prediction.level, levels)
        if prediction.against:
            require_known("predictions", prediction.against, [name for name in levels if name != prediction.level])
        if prediction.reference:
            require_known("predictions", prediction.reference, [name for name in arms if name != prediction.arm])
        if prediction.direction is Direction.within and design.margin_of(prediction) is None:
            raise ValueError(
                f"design.predictions: {prediction.arm} is predicted within a margin on {prediction.metric}, but no "
                "margin is set: add margin to the prediction, or design.margin for the primary metric"
            )
    for count in design.counts:
        require_known("counts", count.arm, arms)
        require_known("counts", count.level, levels)
    for one in design.quantities:
        require_known("quantities", one.level, levels)
        if one.quantity.startswith(f"{SHARE}/"):
            require_known("quantities", one.quantity.removeprefix(f"{SHARE}/"), arms)
    for claim in design.claims:
        _check_claim(design, claim)
    for arm in design.requires:
        require_known("requires", arm, [name for name in arms if name != design.control])
    if design.bases:
        lists = (design.base, *design.arms.values(), *design.levels.values())
        if clash := [word for words in lists for word in words if word.lstrip("+").startswith("model.base=")]:
            raise ValueError(f"design.bases already chooses the base model: remove {clash[0]}")


def _check_claim(design: Design, claim: Claim) -> None:
    """Raise ValueError unless the claim is about a prediction by which its direction can be judged."""
    number = len(design.predictions)
    if not 0 <= claim.prediction < number:
        raise ValueError(
            f"design.claims: there is no prediction {claim.prediction}; their positions are 0 to {number - 1}"
        )
    prediction = design.predictions[claim.prediction]
    if claim.direction is Direction.within and prediction.direction is not Direction.within:
        raise ValueError(
            f"design.claims: a claim expects equivalence, but prediction {claim.prediction} is not within a margin: "
            "set the prediction's direction to within, or the claim's to above or below"
        )


def require_known_metrics(design: Design) -> None:
    """Raise ValueError, before the first run starts, for a metric or budget axis that no run logs."""
    required = [metric for least in design.requires.values() for metric in least]
    tuned = [design.tuning.metric] if design.tuning else []
    if not is_known(f"budget/{design.axis}"):
        raise ValueError(f"design.axis: there is no {design.axis!r}; choose from {_AXES}")
    for metric in (design.primary, *design.metrics, *required, *tuned):
        if not is_known(metric) or not is_evaluated(metric):
            near = get_close_matches(metric, [one.name.replace("*", suite) for one in REGISTRY for suite in SUITES], 1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"design: no run has the metric {metric!r}: {guess}`grpo-lab metrics` lists what there is")


def _margin(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"design.margin must be a number above 0 in the metric's unit, such as 0.02, got {value!r}")
    return float(value)


def _require_words(node: Mapping[str, Any]) -> None:
    """Refuse a text or a name that YAML read as true or false: no, yes, on and off without quotes."""
    texts = [(name, node.get(name)) for name in ("name", "question", "prediction", "control", "primary", "axis")]
    names = [(f"{name}, a name", key) for name in ("arms", "levels", "tricks", "parts") for key in node.get(name) or ()]
    for name, value in texts + names:
        if isinstance(value, bool):
            raise ValueError(f"design.{name}: YAML reads no, off, yes and on as {str(value).lower()}: quote it")


def _text(value: Any) -> str:
    return " ".join(str(value).split())


def _override_lists(name: str, value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping) or not all(isinstance(overrides, list | tuple) for overrides in value.values()):
        raise ValueError(f"design.{name} must map each name to a list of overrides, such as [truncation=mask_after]")
    return {str(key): tuple(map(str, overrides)) for key, overrides in value.items()}


def _seeds(name: str, value: Any) -> tuple[int, ...]:
    seeds = tuple(value) if isinstance(value, list | tuple) else ()
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"design.{name} must be a list of different whole numbers, got {value!r}")
    return seeds


def _bases(value: Any) -> tuple[int, ...]:
    """`4` means 0, 1, 2 and 3; a list names them."""
    if value is None:
        return ()
    if type(value) is int and value > 0:
        return tuple(range(value))
    try:
        return _seeds("bases", value)
    except ValueError as error:
        raise ValueError(f"design.bases must be how many, or a list of different numbers, got {value!r}") from error


def _nested(value: Any, bases: tuple[int, ...]) -> tuple[int, ...]:
    """Run seeds nested in bases: `1` (the default) means one for each; a list goes through the bases in turn."""
    if type(value) is int and value > 0:
        return tuple(range(value * len(bases)))
    try:
        seeds = _seeds("seeds", value)
    except ValueError as error:
        raise ValueError(
            f"design.seeds must be how many for each base, or a list of different whole numbers, got {value!r}"
        ) from error
    if len(seeds) % len(bases):
        raise ValueError(
            f"design.seeds has {len(seeds)} seeds for {len(bases)} bases: give each as many (seeds: 2 for two each)"
        )
    return seeds


def _requires(value: Any) -> dict[str, dict[str, float]]:
    """Arm -> metric, under today's name -> the least distance from the control."""
    message = (
        f"design.requires: {value!r} must map arms to metrics with numbers above 0, such as "
        "mask_after: {active_fraction/truncation: 0.05}"
    )
    if not isinstance(value, Mapping):
        raise ValueError(message)
    for required in value.values():
        if not isinstance(required, Mapping) or not required:
            raise ValueError(message)
        if not all(
            isinstance(least, int | float) and not isinstance(least, bool) and least > 0 for least in required.values()
        ):
            raise ValueError(message)
    return {
        str(arm): {metric_name(str(metric)): float(least) for metric, least in required.items()}
        for arm, required in value.items()
    }


def _part(name: str, value: Any) -> Part:
    if not isinstance(value, Mapping):
        raise ValueError(f"design.parts.{name}: a part chooses arms, levels, seeds and bases, each a list")
    require_keys(f"design.parts.{name}", value, Part)
    return Part(
        arms=tuple(map(str, value.get("arms", ()))),
        levels=tuple(map(str, value.get("levels", ()))),
        seeds=_seeds(f"parts.{name}.seeds", value["seeds"]) if "seeds" in value else (),
        bases=_seeds(f"parts.{name}.bases", value["bases"]) if "bases" in value else (),
    )


def _prediction(entry: Any) -> Prediction:
    require_keys("design.predictions", entry, Prediction)
    try:
        return Prediction(
            **{
                **entry,
                "direction": Direction(entry["direction"]),
                "metric": metric_name(entry["metric"]),
                "margin": _margin(entry.get("margin")),
            }
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"design.predictions: {entry} must give arm, metric, direction (above, below or within a margin of the "
            "control) and, where there is a factor, level (and against, another level); reference names another arm to "
            "compare with than the control, margin the equivalence margin"
        ) from error


def _count(entry: Any) -> CountPrediction:
    require_keys("design.counts", entry, CountPrediction)
    try:
        count = CountPrediction(**{**entry, "metric": metric_name(entry["metric"]), "above": float(entry["above"])})
        limits = [limit for limit in (count.at_least, count.at_most) if limit is not None]
        if len(limits) != 1 or type(limits[0]) is not int or limits[0] < 0:
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"design.counts: {entry} must give arm, metric, above (a number), one of at_least and at_most (how many "
            "base models) and, where there is a factor, level"
        ) from error
    return count


def _quantity(entry: Any) -> QuantityPrediction:
    require_keys("design.quantities", entry, QuantityPrediction)
    known = [SHARE, *(RANK + metric for metric in (*RANKED, *ALSO_RANKED))]
    try:
        bounds = {name: float(entry[name]) for name in ("above", "below") if name in entry}
        one = QuantityPrediction(**{**entry, **bounds})
        if (one.above is None) == (one.below is None) or not math.isfinite(one.bound):
            raise ValueError
        if one.quantity not in known and not one.quantity.startswith(f"{SHARE}/"):
            raise ValueError
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"design.quantities: {entry} must give quantity, one of above and below (a number) and, where there is a "
            f"factor, level; quantities are {', '.join(known)} and {SHARE}/ARM"
        ) from error
    return one


def _claim(entry: Any) -> Claim:
    require_keys("design.claims", entry, Claim)
    try:
        position = entry["prediction"]
        if set(entry) != {"says", "source", "prediction", "direction"} or type(position) is not int:
            raise ValueError
        return Claim(_text(entry["says"]), _text(entry["source"]), position, Direction(entry["direction"]))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"design.claims: {entry} must give says (a sentence), source (an arXiv id or an address), prediction (its "
            "position, from 0) and direction (above, below or within: what the source expects)"
        ) from error


def _change(entry: Any) -> Change:
    require_keys("design.changes", entry, Change)
    try:
        change = Change(tuple(map(str, entry["arms"])), str(entry["since"]), _text(entry["what"]))
        datetime.strptime(change.since, "%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"design.changes: {entry} must give arms, a list; since, such as '2026-11-22T22:30:00Z'; and what changed"
        ) from error
    return change


def named_design(name: str) -> Design:
    """The declaration of an experiment of this repository. Raises ValueError, with those there are."""
    known = declared(experiments_folder())
    if name not in known:
        raise ValueError(f"there is no experiment {name!r}: choose from {', '.join(known)}")
    return load_design(known[name] / DESIGN)


def load_design(path: Path) -> Design:
    """The declaration in an experiment's YAML file, read without Hydra. Raises ValueError."""
    check_yaml(path)
    declared = OmegaConf.load(path)
    if not isinstance(declared, DictConfig) or (design := declared.get("design")) is None:
        raise ValueError(f"{path} declares nothing: give it an entry `design`, as experiments/declare.md says")
    return read_design(OmegaConf.to_container(design, resolve=True))
