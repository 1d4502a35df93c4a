"""When training reward misled, over the sweeps that test claims: contrasts, runs, what announces a loss, and its cost.

Runs are compared under the same conditions alone: the same declared settings of base and level (world, regime, budget,
evaluation), asked and graded alike (`protocol`). Sweeps may share conditions and runs; a run that several have counts
once. What a run is measured by it is measured by up to the budget X of the first sweep that has it.

Runs of one base model are alike. So intervals over several conditions take the base models of worlds as the independent
units: the runs of a base model of a world are averaged first, or resampled together. Clopper-Pearson intervals of
counts take runs as independent, so beside each count stands on how many base models it happened.

An arm whose training grader, questions or protocol are not its control's is kept apart: its training reward is of
another thing, and a difference says nothing. A run whose policy did not move (`frozen` of negative_controls) says
nothing of a gap, and is left out of all that is said of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from pages.saved_sweeps import SavedSweeps

from grpo_lab.analysis.divergence.leading import (
    FEWEST,
    FEWEST_NULL,
    INDICATORS,
    RESAMPLES,
    Indicator,
    Share,
    announced,
    can_lose,
    lost_at,
    pair_counts,
    prediction_bound,
    readings,
)
from grpo_lab.analysis.divergence.measures import change, gap
from grpo_lab.analysis.divergence.selection import best_shares, question_halves, selection_regret
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues, final_values
from grpo_lab.analysis.sources.settings import differences
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.comparison import FEWEST_BASES, Comparison, mean_of_runs
from grpo_lab.analysis.stats.intervals import Interval, critical_t
from grpo_lab.analysis.stats.multiplicity import holm
from grpo_lab.analysis.stats.resampling import SEED, percentile_interval
from grpo_lab.analysis.table_rows import groups_of, rows_of
from grpo_lab.analysis.tracks import (
    ANNOUNCING,
    EVALUATED,
    KL,
    SAMPLED,
    TRAINING,
    Track,
    answers_of,
    by_condition,
    shared,
    tracks,
)
from grpo_lab.config.design import Design

REWARD, HELDOUT = "reward/outcome", "eval/heldout/accuracy"
RISE, FALL = 0.05, 0.10  # of training reward and of downstream accuracy since step 0, which together mislead
MOVED = 1e-6  # nats of KL from the initial policy: a policy that never goes further does not train
DEFAULT_WORLD, SUITE = "sums", "downstream"
# Slots that say what training asks and how it grades, and what differs in words.
_APART = {
    "reward": "another training grader",
    "verifier": "another grader",
    "curriculum": "other training questions",
    "task": "other questions",
    "template": "another template",
}
_PROTOCOL = "another protocol"
RULES = ("last", "train_reward", "heldout")
GROUPS = ("controls", "other arms", "other grader, questions or protocol")
# Beside what a sweep's own table reads. It says the most where training's grader is not the evaluation's.
POOLED_INDICATORS = INDICATORS | {
    "disagreement": Indicator(
        "disagreement", 1, "training's grader and protocol rate held-out answers above evaluation's"
    )
}

MISLED, OTHERWISE_MISLED = "reward up, downstream down", "reward down, downstream up"
UNRESOLVED = "not significant"
KINDS = ("both up", "both down", MISLED, OTHERWISE_MISLED, UNRESOLVED)
_KIND_OF = {(1, 1): KINDS[0], (-1, -1): KINDS[1], (1, -1): MISLED, (-1, 1): OTHERWISE_MISLED}


@dataclass(frozen=True)
class Contrast:
    """An arm less its control at one level of a sweep, on three metrics, shares, paired by seed.

    `apart` says why the two are not compared on training reward; empty where they are.
    """

    sweep: str
    level: str
    arm: str
    control: str
    reward: Comparison
    heldout: Comparison
    downstream: Comparison
    apart: str

    @property
    def name(self) -> str:
        """Sweep, level and arm, such as `overlong_worlds length: mask_before`."""
        return f"{' '.join(filter(None, (self.sweep, self.level)))}: {self.arm}"

    @property
    def signs(self) -> tuple[int, int]:
        """Of the effects on training reward and downstream accuracy; 0 where the interval holds 0 or is withheld."""
        return _sure(self.reward), _sure(self.downstream)

    @property
    def kind(self) -> str:
        """One of KINDS; not significant where either interval holds 0."""
        return _KIND_OF.get(self.signs, UNRESOLVED)

    @property
    def p_opposite(self) -> float:
        """Of no two effects of opposite sign: the larger p of both; 1 where estimates agree in sign or are withheld.

        An intersection-union test (Berger 1982): below .05 only where both 95% intervals exclude 0 on opposite sides.
        """
        withheld = math.isnan(self.reward.whole.low) or math.isnan(self.downstream.whole.low)
        if withheld or not self.reward.sign * self.downstream.sign < 0:
            return 1.0
        return max(self.reward.p, self.downstream.p)


def _sure(found: Comparison) -> int:
    if math.isnan(found.whole.low) or found.whole.contains(0.0):
        return 0
    return int(np.sign(found.whole.mean))


@dataclass(frozen=True)
class Choice:
    """What stopping elsewhere than at the best checkpoint of a run costs, by its answers downstream.

    `regret` maps RULES to accuracy given away, share. `best_budget` is where the checkpoint lies that is best on half
    of the questions, in tokens and in the mean over halves; `best_gain` is what it gained since step 0 on the others.
    """

    regret: Mapping[str, float]
    best_budget: float
    best_gain: float


@dataclass(frozen=True)
class PooledRun:
    """One run of the pool. The level of its track is its conditions, so that runs of one level are comparable.

    `null` is true for a control of some sweep. `apart` is that of `Contrast`. `choice` is None where the answers of a
    needed evaluation were not saved.
    """

    key: str
    sweep: str
    world: str
    track: Track
    null: bool
    apart: str
    choice: Choice | None

    @property
    def base(self) -> tuple[str, int]:
        """The base model: the world and the number of the base in it."""
        return self.world, self.track.base

    @property
    def group(self) -> str:
        """One of GROUPS."""
        return GROUPS[0] if self.null else GROUPS[2] if self.apart else GROUPS[1]


@dataclass(frozen=True, eq=False)
class Pool:
    """The contrasts of all sweeps, and their runs, each once; `shared` counts the entries of runs that were there.

    `titles` maps conditions to a short name: the first sweep that has them, with its level, and with its arm where that
    is asked or graded otherwise than the control.
    """

    contrasts: tuple[Contrast, ...]
    runs: tuple[PooledRun, ...]
    titles: Mapping[str, str]
    sweeps: tuple[str, ...]
    shared: int

    @property
    def comparable(self) -> list[Contrast]:
        """The contrasts on which training reward can be compared."""
        return [contrast for contrast in self.contrasts if not contrast.apart]

    @property
    def units(self) -> list[int]:
        """[R]: the number of each run's base model."""
        return units_of(self.runs)


# --- pooling ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def saved_pool(saved: SavedSweeps) -> Pool:
    """The pool of the saved sweeps that ended and whose experiments declare claims, in the order of their names."""
    loaded = [saved.load(design) for design in saved.designs if design.claims and not saved.underway(design)]
    finals = {data.record.name: values for data, values in loaded}
    return pool((data for data, _ in loaded), lambda data: finals[data.record.name])


def pool(sweeps: Iterable[SweepData], finals_of: Callable[[SweepData], FinalValues] = final_values) -> Pool:
    """Pool declared sweeps; of runs with the same run_key the first one counts, as a control if it is one anywhere.

    Raises ValueError for a sweep that declared nothing, whose conditions are not known.
    """
    contrasts: list[Contrast] = []
    runs: dict[str, PooledRun] = {}
    titles: dict[str, str] = {}
    names: list[str] = []
    seen = 0
    for data in sweeps:
        if data.design is None:
            raise ValueError(f"{data.record.name} declared nothing, so its conditions are not known: leave it out")
        finals, data = finals_of(data), _needed(data)
        names.append(data.record.name)
        contrasts += contrasts_of(data, finals)
        for run in runs_of(data, finals):
            earlier = runs.get(run.key)
            seen += earlier is not None
            if earlier is None or (run.null and not earlier.null):
                runs[run.key] = run if earlier is None else replace(earlier, null=True, apart="")
        for level, arm in data.run_arms:
            where, usual = conditions(data, level, arm), conditions(data, level, data.control)
            title = " ".join(filter(None, (data.record.name, level)))
            titles.setdefault(where, title if where == usual else f"{title}: {arm}")
    return Pool(tuple(contrasts), tuple(runs.values()), titles, tuple(names), seen)


def _needed(data: SweepData) -> SweepData:
    """The sweep with the metrics and answers that are read here alone, a tenth of them: the rest takes a minute."""
    read = {*LABELS, "step", "budget/completions", f"budget/{data.axis}", "eval/probe/accuracy_se", KL, SAMPLED}
    read |= {*TRAINING.values(), *ANNOUNCING.values(), *EVALUATED.values()}
    kept = [name for name in data.points.columns.tolist() if name in read or name.endswith("/responses")]
    answers = data.answers[data.answers["suite"] == SUITE]
    return replace(data, points=data.points[kept], answers=answers)


def conditions(data: SweepData, level: str, arm: str) -> str:
    """What runs share that are compared: the declared words of base and level, and how the arm is asked and graded."""
    assert data.design is not None, "only a declared sweep has conditions"
    protocols = _protocols(data).get((level, arm), ())
    return " ".join([*_words(data.design, level), *(f"protocol={one}" for one in protocols)])


@lru_cache(maxsize=4)
def _protocols(data: SweepData) -> dict[tuple[str, str], list[str]]:
    """(level, arm) -> the protocols of its runs; most have one."""
    known = data.counted.dropna(subset="protocol")
    return {place: sorted(set(own["protocol"])) for place, own in groups_of(known, ["level", "arm"])}


def _words(design: Design, level: str) -> list[str]:
    """The overrides of base and level, one a key, where that of the level wins."""
    chosen = {word.partition("=")[0]: word for word in (*design.base, *design.levels.get(level, ()))}
    return sorted({"world": f"world={DEFAULT_WORLD}", **chosen}.values())


def apart(data: SweepData, level: str, arm: str) -> str:
    """Why the training reward of an arm is of another thing than its control's, in words; empty where it is not."""
    design, control = data.design, data.control
    assert design is not None, "only a declared sweep has a control"
    if arm == control:
        return ""
    own, other = data.settings.get((level, arm), {}), data.settings.get((level, control), {})
    declared = set(design.arms.get(arm, ())) ^ set(design.arms.get(control, ()))
    keys = [*differences(own, other), *(word.partition("=")[0] for word in declared)]
    slots = {key.partition(".")[0] for key in keys}
    found = [words for slot, words in _APART.items() if slot in slots]
    if not found and conditions(data, level, arm) != conditions(data, level, control):
        found = [_PROTOCOL]
    return ", ".join(found)


def contrasts_of(data: SweepData, finals: FinalValues) -> list[Contrast]:
    """Every arm less its control at the same level, where both have runs."""
    found = []
    for level, arm in data.run_arms:
        if arm == data.control or (level, data.control) not in data.run_arms:
            continue
        here, control = (level, arm), (level, data.control)
        reward, heldout, downstream = (finals.comparison(here, control, of) for of in (REWARD, HELDOUT, DOWNSTREAM))
        why = apart(data, level, arm)
        found.append(Contrast(data.record.name, level, arm, data.control, reward, heldout, downstream, why))
    return found


def runs_of(data: SweepData, finals: FinalValues) -> list[PooledRun]:
    """The runs of a sweep that reached X and whose policy moved, under their conditions."""
    keys = {(row.level, row.arm, row.seed): str(row.run_key) for row in rows_of(data.runs[[*LABELS, "run_key"]])}
    assert data.design is not None, "only a declared sweep has conditions"
    found = []
    for (level, arm), runs in by_condition(tracks(data, finals)).items():
        where, why = conditions(data, level, arm), apart(data, level, arm)
        (world,) = (word.partition("=")[2] for word in _words(data.design, level) if word.startswith("world="))
        for track, choice in zip(runs, choices(data, runs)):
            if trained(track):
                key, own = keys[level, arm, track.seed], replace(track, level=where)
                found.append(PooledRun(key, data.record.name, world, own, arm == data.control, why, choice))
    return found


def trained(track: Track) -> bool:
    """Whether the policy moved from where it began; true where its distance was not logged."""
    return not np.isfinite(track.kl).any() or bool(np.nanmax(track.kl) > MOVED)


def choices(data: SweepData, runs: Sequence[Track]) -> list[Choice | None]:
    """The `Choice` of every run of a condition; the halves are the same for all suites with as many questions."""
    answers = answers_of(data, runs, SUITE)
    if answers is None or len(answers.question) < 2:
        return [None] * len(runs)
    halves = question_halves(len(answers.question), np.random.default_rng(SEED))
    found: list[Choice | None] = []
    for track, accuracy, where in zip(runs, answers.accuracy, shared(runs)):
        reward, heldout = track.reward[where], track.heldout[where]
        picks = {"last": len(where) - 1, "train_reward": _highest(reward), "heldout": _highest(heldout)}
        regret = {
            rule: math.nan if pick is None else selection_regret(accuracy, pick, halves).value
            for rule, pick in picks.items()
        }
        gain = selection_regret(accuracy, 0, halves).value
        found.append(Choice(regret, float(best_shares(accuracy, halves) @ track.x[where]), gain))
    return found


def _highest(values: np.ndarray) -> int | None:
    return int(np.argmax(values)) if np.isfinite(values).all() else None


def units_of(runs: Sequence[PooledRun]) -> list[int]:
    """[R]: the number of each run's base model among those of these runs."""
    known = {base: number for number, base in enumerate(dict.fromkeys(run.base for run in runs))}
    return [known[run.base] for run in runs]


def mean_over_bases(runs: Sequence[PooledRun], values: Sequence[float]) -> Interval:
    """The mean of one number per run, a base model of a world counting once; its t interval is for another one."""
    return mean_of_runs(values, units_of(runs))


# --- contrasts ----------------------------------------------------------------------------------------------------


def opposite_adjusted(contrasts: Sequence[Contrast]) -> np.ndarray:
    """p of opposite effects, adjusted by Holm over these contrasts; one that has no p counts with 1."""
    return holm([1.0 if math.isnan(one.p_opposite) else one.p_opposite for one in contrasts])


# --- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """In how many runs something happened, and on how many of their base models at least once."""

    runs: Share
    bases: Share


def counted(runs: Sequence[PooledRun], happened: Sequence[bool]) -> Counted:
    """Count what happened in each of these runs."""
    bases = {run.base for run, did in zip(runs, happened) if did}
    return Counted(Share(sum(map(bool, happened)), len(runs)), Share(len(bases), len({run.base for run in runs})))


def misled(track: Track) -> bool:
    """Whether reward rose by 5 points or more since step 0 while downstream accuracy fell by 10 or more, at X."""
    rise, fall = float(change(track.reward)[-1]), float(change(track.downstream)[-1])
    return rise >= RISE - 1e-9 and fall <= -FALL + 1e-9


def with_gap(runs: Iterable[PooledRun]) -> list[PooledRun]:
    """Those that have a gap at X."""
    return [run for run in runs if math.isfinite(gap(run.track)[-1])]


def wide_gaps(runs: Sequence[PooledRun]) -> tuple[list[PooledRun], list[bool]]:
    """Runs whose conditions have a null, and whether the gap of each at X lies above the bound of that null.

    The bound is the 95% prediction bound of `leading.prediction_bound` of the control's gaps; for a control of its
    runs on other bases. It takes three of them.
    """
    runs = with_gap(runs)
    compared, wide = [], []
    for run in runs:
        null = [one for one in runs if one.null and one.track.level == run.track.level and one.key != run.key]
        if run.null:
            null = [one for one in null if one.base != run.base]
        if len(null) >= FEWEST_NULL:
            compared.append(run)
            bound = prediction_bound(np.array([gap(one.track)[-1] for one in null]))
            wide.append(bool(gap(run.track)[-1] > bound))
    return compared, wide


# --- what announces a loss ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Announcement:
    """How an indicator announces losses in the pool.

    `auc` is over pairs of runs under the same conditions, read at the same step; its interval resamples base models.
    `within` is over those pairs of one base model: it tells arms and seeds apart, `auc` base models too.
    `caught` counts losses with an alarm before them, where their conditions have a threshold, `lead` is the median of
    the budget between the two, share of X. `false` counts null runs that alarm when the null runs of other bases set
    the threshold. `losses` counts the losses that come after a first reading, `at_once` those that came before one.
    """

    auc: Interval
    within: Interval
    caught: Counted
    lead: float
    false: Counted
    losses: int
    at_once: int
    sweeps: tuple[str, ...]
    note: str


def announcement(runs: Sequence[PooledRun], indicator: Indicator, rng: np.random.Generator) -> Announcement:
    """How an indicator announces a loss of 10 points of downstream accuracy in these runs: see `leading.announced`.

    Every condition has a threshold of its own, of its null runs without a loss, three at least. Null runs of a base are
    alike, so false alarms are counted with a whole base left out.
    """
    read = [
        run
        for run in runs
        if len(run.track.x) > 2 and can_lose(run.track) and np.isfinite(readings(run.track, indicator)[1:]).all()
    ]
    losing = [run for run in read if (lost_at(run.track) or 0) > 1]
    quiet = [run for run in read if run.null and lost_at(run.track) is None]
    number: dict[str, int] = {}
    for run in quiet:
        number[run.track.level] = number.get(run.track.level, 0) + 1
    held = [run for run in read if number.get(run.track.level, 0) >= FEWEST_NULL]
    null = [run for run in quiet if number[run.track.level] >= FEWEST_NULL]
    alarmed = [run for run in losing if number.get(run.track.level, 0) >= FEWEST_NULL]
    found = announced([run.track for run in held], [run.track for run in null], indicator, rng)
    thresholds = {
        level: prediction_bound(np.array([_top(run, indicator) for run in null if run.track.level == level]))
        for level in {run.track.level for run in null}
    }
    caught = counted(alarmed, [_alarms(run, indicator, thresholds[run.track.level]) for run in alarmed])
    assert (caught.runs.number, caught.runs.n) == (found.caught.number, found.caught.n), "both count the same alarms"
    tested, false = [], []
    for run in null:
        others = [one for one in null if one.track.level == run.track.level and one.base != run.base]
        if len(others) >= FEWEST_NULL:
            tested.append(run)
            false.append(_top(run, indicator) > prediction_bound(np.array([_top(one, indicator) for one in others])))
    lead = float(np.median(found.lead)) if found.lead else math.nan
    sweeps = tuple(dict.fromkeys(run.sweep for run in read))
    auc, note = clustered_area(read, indicator, rng)
    within, _ = clustered_area(read, indicator, rng, within=True)
    at_once = sum(lost_at(run.track) == 1 for run in read)
    return Announcement(auc, within, caught, lead, counted(tested, false), len(losing), at_once, sweeps, note)


@lru_cache(maxsize=1)
def announcements(pooled: Pool) -> dict[str, Announcement]:
    """The `Announcement` of each of POOLED_INDICATORS, by its name."""
    rng = np.random.default_rng(SEED)
    return {name: announcement(pooled.runs, indicator, rng) for name, indicator in POOLED_INDICATORS.items()}


def _top(run: PooledRun, indicator: Indicator) -> float:
    return float(readings(run.track, indicator)[1:-1].max())


def _alarms(run: PooledRun, indicator: Indicator, threshold: float) -> bool:
    return bool((readings(run.track, indicator)[1 : lost_at(run.track)] > threshold).any())


def clustered_area(
    runs: Sequence[PooledRun], indicator: Indicator, rng: np.random.Generator, within: bool = False
) -> tuple[Interval, str]:
    """The area under the curve over comparable pairs of runs, and in words what it rests on.

    Its interval resamples base models with all of their runs, and is withheld below 10 runs with a later loss or 10
    without, as in `leading`, and where they are of fewer than 3 base models. `within` counts pairs of one base model.

    Simulated with 24 base models of 30 runs, an indicator that says nothing, losses in 7% and 30% of runs that cluster
    on few base models, and none or half of the indicator's variance between base models, the nominal 95% covers 87% to
    91% of areas, and 87% to 93% within base models.
    """
    above, pairs = pair_counts([run.track for run in runs], indicator)
    known = [lost_at(run.track) for run in runs]
    losing, staying = sum(lost is not None and lost > 1 for lost in known), known.count(None)
    units = np.array(units_of(runs), dtype=int)
    number = len(set(units.tolist()))
    text = f"{losing} runs with a later loss, {staying} without, {number} base models"
    of = (units[:, None] == np.arange(number)).astype(float)  # [R, units]
    above, pairs = of.T @ above @ of, of.T @ pairs @ of
    if within:
        above, pairs = np.diag(above), np.diag(pairs)
    if not pairs.any():
        return Interval(math.nan, math.nan, math.nan, len(runs), number), f"no two runs to compare: {text}"
    estimate = float(above.sum() / pairs.sum())
    if min(losing, staying) < FEWEST or number < FEWEST_BASES:
        return Interval(estimate, math.nan, math.nan, len(runs), number), f"{text}: too few for an interval"
    drawn = rng.multinomial(number, np.full(number, 1 / number), size=RESAMPLES).astype(float)
    of_above, of_pairs = (_resampled(drawn, counts) for counts in (above, pairs))
    replicates = of_above[of_pairs > 0] / of_pairs[of_pairs > 0]
    return replace(percentile_interval(estimate, replicates, len(runs)), bases=number), text


def _resampled(drawn: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[B]: the sum of counts, of units [U] or of their pairs [U, U], where each unit was drawn so often [B, U]."""
    return drawn @ counts if counts.ndim == 1 else np.einsum("ri,ij,rj->r", drawn, counts, drawn, optimize=True)


# --- what a checkpoint costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Sampled tokens per point of downstream accuracy gained, of the runs of a group under the same conditions.

    `gain` and `best_gain` are in points, up to X and up to the best checkpoint. `cost` and `best_cost` are the tokens
    for each of them; NaN, without a bound, where the gain is not surely above 0. `after` is the share of X spent after
    the best checkpoint. Intervals are over base models, those of costs by Fieller's theorem.
    """

    title: str
    group: str
    gain: Interval
    best_gain: Interval
    cost: Interval
    best_cost: Interval
    after: Interval


def regrets(runs: Sequence[PooledRun], rule: str) -> Interval:
    """The regret of a rule in points over these runs, a base model counting once."""
    known = [run for run in runs if run.choice is not None]
    return mean_over_bases(known, [100 * run.choice.regret[rule] for run in known if run.choice is not None])


def regret_saved(runs: Sequence[PooledRun], rule: str, instead_of: str) -> Interval:
    """How many points a rule saves instead of another one, in the same runs, a base model counting once."""
    known = [(run, run.choice.regret) for run in runs if run.choice is not None]
    return mean_over_bases([run for run, _ in known], [100 * (own[instead_of] - own[rule]) for _, own in known])


def spent_after(runs: Sequence[PooledRun]) -> Interval:
    """The share of X that these runs spent after their best checkpoint."""
    known = [(run, run.choice) for run in runs if run.choice is not None]
    return mean_over_bases(
        [run for run, _ in known], [1 - choice.best_budget / float(run.track.x[-1]) for run, choice in known]
    )


def cost_of(runs: Sequence[PooledRun], title: str, group: str) -> Cost:
    """What a point costs in these runs, which must be of the same conditions."""
    known = [(run, run.choice) for run in runs if run.choice is not None]
    own = [run for run, _ in known]
    gains = [100 * float(change(run.track.downstream)[-1]) for run in own]
    best_gains = [100 * choice.best_gain for _, choice in known]
    tokens, to_best = [float(run.track.x[-1]) for run in own], [choice.best_budget for _, choice in known]
    return Cost(
        title,
        group,
        mean_over_bases(own, gains),
        mean_over_bases(own, best_gains),
        ratio_over_bases(own, tokens, gains),
        ratio_over_bases(own, to_best, best_gains),
        spent_after(own),
    )


def costs(pooled: Pool) -> list[Cost]:
    """A row for every condition and group of runs, in the order of the sweeps."""
    found = []
    for where, title in pooled.titles.items():
        for group in GROUPS:
            own = [run for run in pooled.runs if run.track.level == where and run.group == group and run.choice]
            if own:
                found.append(cost_of(own, title, group))
    return found


def ratio_over_bases(runs: Sequence[PooledRun], above: Sequence[float], below: Sequence[float]) -> Interval:
    """The mean of `above` by the mean of `below`, over base models; NaN where that of `below` is not surely above 0.

    Fieller's interval: the ratios r for which the 95% t interval of the mean of above - r below holds 0.
    """
    units = units_of(runs)
    number = len(set(units))
    nothing = Interval(math.nan, math.nan, math.nan, len(runs), number)
    if number < FEWEST_BASES or not mean_of_runs(below, units).low > 0:
        return nothing
    of = np.array(units)
    x, y = (np.array([np.mean(np.array(values)[of == unit]) for unit in range(number)]) for values in (above, below))
    (vx, vxy), (_, vy) = np.cov(x, y) / number
    t = critical_t(number - 1)
    a, b, c = y.mean() ** 2 - t**2 * vy, x.mean() * y.mean() - t**2 * vxy, x.mean() ** 2 - t**2 * vx
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return Interval(float(x.mean() / y.mean()), float((b - root) / a), float((b + root) / a), len(runs), number)
