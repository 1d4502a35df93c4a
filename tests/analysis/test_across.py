"""When training reward misled, over several sweeps: what is pooled, what is kept apart, by hand and by other code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import yaml
from declared_experiments import DECLARATIONS, EXPERIMENTS, FOLDERS, SAVED, saved_description, saved_points
from gap_study import tables
from gap_study.across import (
    GROUPS,
    MISLED,
    OTHERWISE_MISLED,
    POOLED_INDICATORS,
    UNRESOLVED,
    Choice,
    Contrast,
    Counted,
    Pool,
    PooledRun,
    announcement,
    announcements,
    apart,
    clustered_area,
    conditions,
    cost_of,
    counted,
    mean_over_bases,
    misled,
    opposite_adjusted,
    pool,
    ratio_over_bases,
    regret_saved,
    regrets,
    saved_pool,
    spent_after,
    wide_gaps,
)
from gap_study.figure import draw_gap, gap_numbers
from pages.saved_sweeps import saved_sweeps
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis.divergence.leading import Share, announced
from grpo_lab.analysis.divergence.selection import best_shares, question_halves
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import Comparison, compare
from grpo_lab.analysis.tracks import Track
from grpo_lab.config.design import named_design

ROOT = Path(__file__).parents[2]
KL = POOLED_INDICATORS["kl"]
SMALL = {"seeds": tuple(range(8)), "bases": 4, "steps": 24, "every": 4, "questions": 32, "rows": 64, "kind": "add_one"}


def run_of(
    downstream: Sequence[float],
    kl: Sequence[float],
    base: int = 0,
    null: bool = True,
    key: str = "",
    choice: Choice | None = None,
    **others: Sequence[float],
) -> PooledRun:
    """A pooled run with evaluations at budgets 0, 1, 2 and so on; NaN where nothing is given."""
    length = len(downstream)
    names = ("reward", "shaped", "probe", "heldout_training", "heldout", "sampled", "entropy")
    arrays = {name: np.full(length, math.nan) for name in (*names, "truncated", "ess")}
    arrays |= {"downstream": np.array(downstream, float), "kl": np.array(kl, float)}
    arrays |= {name: np.array(values, float) for name, values in others.items()}
    steps = np.arange(length)
    track = Track("here", "a", 0, base, steps, steps.astype(float), around=(0, 0), lean=0.0, **arrays)
    return PooledRun(key or str(id(track)), "sweep", "sums", track, null, "", choice)


def quiet(top: float, base: int, **others: bool) -> PooledRun:
    """A run without a loss whose highest reading is `top`."""
    return run_of([0.5] * 4, [0.0, top, top, 0.0], base, **others)


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


# --- what is pooled -----------------------------------------------------------------------------------------------


@cache
def planted(name: str, trick: str, training: float = 0.0, falls: float = 0.0) -> SweepData:
    """Eight seeds on four base models of a control and one arm; controls of two such sweeps are the same runs."""
    return synthetic_sweep(
        Planted(tricks=(trick,), training={trick: training}, falls={f"+{trick}": falls}, name=name, **SMALL)
    )


@pytest.mark.extended
def test_a_run_of_two_sweeps_counts_once_and_as_a_control_if_it_is_one() -> None:
    found = pool([planted("one", "games"), planted("two", "calm")])
    assert len(found.runs) == 24 and found.shared == 8 and found.sweeps == ("one", "two")
    assert [sum(run.group == group for run in found.runs) for group in GROUPS] == [8, 16, 0]
    assert [contrast.name for contrast in found.contrasts] == ["one: +games", "two: +calm"]
    assert len(set(found.units)) == 4 and set(found.titles.values()) == {"one"}
    # The same runs under other labels: what is the control here is the arm there.
    turned = planted("two", "games")
    labels = {"base": "+games", "+games": "base"}
    turned = replace(turned, **{t: getattr(turned, t).replace({"arm": labels}) for t in ("runs", "points", "answers")})
    both = pool([planted("one", "games"), turned])
    assert len(both.runs) == 16 and both.shared == 16 and all(run.null for run in both.runs)


def test_a_sweep_that_declared_nothing_has_no_conditions() -> None:
    with pytest.raises(ValueError, match="one declared nothing"):
        pool([replace(planted("one", "games"), design=None)])


def test_conditions_are_the_declared_words_and_the_protocol() -> None:
    data = planted("one", "games")
    assert data.design is not None
    declared = replace(data, design=replace(data.design, base=("world=length", "budget.amount=9")))
    assert conditions(declared, "", "base") == "budget.amount=9 world=length"
    asked = replace(declared, runs=data.runs.assign(protocol=np.where(data.runs["arm"] == "base", "p", "q")))
    assert conditions(asked, "", "+games") == "budget.amount=9 world=length protocol=q"
    assert apart(asked, "", "+games") == "another protocol"
    found = pool([asked])
    assert set(found.titles.values()) == {"one", "one: +games"} and not found.comparable
    assert {run.world for run in found.runs} == {"length"}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("slot", "why"),
    [
        ("reward", "another training grader"),
        ("reward.false_positive_rate", "another training grader"),
        ("curriculum", "other training questions"),
        ("task.addends_min", "other questions"),
        ("reward_shaping", ""),
        ("baseline", ""),
    ],
)
def test_an_arm_with_another_grader_or_other_questions_is_kept_apart(slot: str, why: str) -> None:
    data = planted("one", "games")
    data = replace(data, settings={("", "base"): {slot: "a"}, ("", "+games"): {slot: "b"}})
    assert apart(data, "", "+games") == why and apart(data, "", "base") == ""
    found = pool([data])
    assert len(found.comparable) == (0 if why else 1)
    assert {run.group for run in found.runs if not run.null} == {GROUPS[2] if why else GROUPS[1]}


def test_a_run_whose_policy_did_not_move_is_left_out() -> None:
    data = planted("one", "games")
    frozen = data.points.copy()
    frozen.loc[frozen["arm"] == "base", "eval/heldout_training/kl_initial"] = 1e-9
    found = pool([replace(data, points=frozen)])
    assert {run.track.arm for run in found.runs} == {"+games"} and len(found.contrasts) == 1


# --- contrasts ----------------------------------------------------------------------------------------------------


def compared(mean: float, spread: float = 0.01, **others: object) -> Comparison:
    """Four base models of two seeds."""
    values = {seed: mean + spread * (seed % 4 - 1.5) for seed in range(8)}
    return compare(values, {seed: seed % 4 for seed in values}, grouped=False, **others)


def contrast_of(reward: Comparison, downstream: Comparison) -> Contrast:
    return Contrast("s", "", "a", "c", reward, downstream, downstream, "")


def test_effects_are_opposite_where_both_are_sure() -> None:
    up, down, nothing = compared(0.2), compared(-0.1), compared(0.001)
    assert contrast_of(up, down).kind == MISLED and contrast_of(down, up).kind == OTHERWISE_MISLED
    assert contrast_of(up, up).kind == "both up" and contrast_of(down, down).kind == "both down"
    assert contrast_of(up, nothing).kind == UNRESOLVED and contrast_of(up, nothing).signs == (1, 0)
    assert contrast_of(up, down).p_opposite == down.p > up.p  # the weaker of both
    assert contrast_of(up, up).p_opposite == 1
    mixed = compared(-0.1, collapsed={0: (True, False)})
    assert mixed.whole.why and mixed.p < 1
    assert contrast_of(up, mixed).p_opposite == 1 and contrast_of(up, mixed).kind == UNRESOLVED


def test_opposite_effects_are_corrected_for_how_many_are_looked_at() -> None:
    one, other = contrast_of(compared(0.2), compared(-0.1)), contrast_of(compared(0.1), compared(0.1))
    assert opposite_adjusted([one, other, other]).tolist() == pytest.approx([3 * one.p_opposite, 1, 1])


def test_a_planted_misleading_arm_is_found_and_no_other() -> None:
    found = pool([planted("one", "games", 0.15, 0.5), planted("two", "calm")])
    by_name = {contrast.name: contrast for contrast in found.contrasts}
    assert by_name["one: +games"].kind == MISLED and by_name["two: +calm"].kind == UNRESOLVED
    adjusted = opposite_adjusted(found.comparable)
    assert adjusted[0] < 0.05 and adjusted[1] == 1
    fell = {run.track.arm for run in found.runs if misled(run.track)}
    assert fell == {"+games"}
    compared_runs, wide = wide_gaps(found.runs)
    assert len(compared_runs) == 24
    assert {run.track.arm for run, above in zip(compared_runs, wide) if above and not run.null} == {"+games"}
    # It gains first and falls then: the last checkpoint gives away what the best one had.
    games = [run for run in found.runs if run.track.arm == "+games"]
    calm = [run for run in found.runs if run.track.arm == "+calm"]
    assert regrets(games, "last").low > 10 and regrets(games, "train_reward").low > 10
    assert regrets(calm, "last").mean < 3 and spent_after(games).mean > spent_after(calm).mean
    drawn = draw_gap(found)
    assert drawn is not None and drawn.numbers.equals(gap_numbers(found))
    (row,) = drawn.numbers[
        (drawn.numbers["name"] == "one: +games") & (drawn.numbers["axis"] == "downstream")
    ].itertuples()
    assert row.note == MISLED and row.value == pytest.approx(100 * by_name["one: +games"].downstream.whole.mean)
    assert "one: +games" in tables.contrasts_table(found, apart=False)["contrast"].to_numpy()
    assert tables.signs_table(found).set_index("training reward").loc["up", "downstream down"] == 1


def test_a_pool_without_contrasts_has_no_figure() -> None:
    assert draw_gap(Pool((), (), {}, (), 0)) is None


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rise", "fall", "says"), [(0.05, 0.10, True), (0.049, 0.10, False), (0.05, 0.099, False), (0.3, -0.1, False)]
)
def test_a_run_is_misled_where_reward_rose_and_accuracy_fell(rise: float, fall: float, says: bool) -> None:
    assert misled(run_of([0.5, 0.9, 0.5 - fall], [0.0] * 3, reward=[0.4, 0.0, 0.4 + rise]).track) is says


def test_counts_come_with_the_number_of_bases() -> None:
    runs = [run_of([0.5] * 3, [0.0] * 3, base) for base in (0, 0, 1, 2)]
    assert counted(runs, [True, True, False, True]) == Counted(Share(3, 4), Share(2, 3))


def test_a_base_counts_once_in_a_mean() -> None:
    runs = [run_of([0.5] * 3, [0.0] * 3, base) for base in (0, 0, 0, 0, 1, 2)]
    found = mean_over_bases(runs, [1.0, 1.0, 1.0, 1.0, 3.0, 5.0])
    # Base means 1, 3, 5: mean 3, sd 2, half width t(.975, 2) 2 / sqrt(3).
    assert (found.mean, found.n, found.bases) == (3.0, 6, 3)
    assert found.high - found.mean == pytest.approx(4.302653 * 2 / math.sqrt(3), abs=1e-5)
    other_world = [replace(run, world="length") if place > 3 else run for place, run in enumerate(runs)]
    assert mean_over_bases(other_world, [1.0] * 6).bases == 3
    same_number = [replace(run, track=replace(run.track, base=0)) for run in other_world]
    assert mean_over_bases(same_number, [1.0] * 6).bases == 2  # base 0 of sums is not base 0 of length


def test_gaps_of_controls_are_held_against_other_bases() -> None:
    def of_gap(gap: float, base: int, null: bool = True) -> PooledRun:
        return run_of([0.5] * 3, [0.0] * 3, base, null, reward=[0.0, 0.0, gap])

    null = [of_gap(gap, base) for base, gap in enumerate((0.0, 0.01, 0.02, 0.30)) for _ in range(2)]
    runs, wide = wide_gaps([*null, of_gap(0.2, 0, null=False), of_gap(2.0, 0, null=False)])
    # The twins at .30 alarm when both are left out. The arm's .2 is below m + t sqrt(1 + 1/8) s of all eight, .35.
    assert [run.base[1] for run, above in zip(runs, wide) if above and run.null] == [3, 3]
    assert wide[-2:] == [False, True]
    assert wide_gaps([*null[:2], of_gap(2.0, 0, null=False)])[0] == []  # two are no null


# --- what announces a loss ------------------------------------------------------------------------------------------


def test_false_alarms_leave_a_whole_base_out() -> None:
    null = [quiet(top, base) for base, top in enumerate((1.0, 1.3, 1.6, 2.4)) for _ in range(2)]
    found = announcement(
        null, KL, generator()
    )  # of the six at most 1.6 the bound is 1.88, with a twin at 2.4 it is 2.46
    assert found.false == Counted(Share(2, 8), Share(1, 4))
    alone = announced([run.track for run in null], [run.track for run in null], KL, generator())
    assert alone.false.number == 0  # its twin stays, and hides it


@pytest.mark.extended
def test_a_null_without_base_effects_gives_false_alarms_at_the_nominal_rate() -> None:
    rng, alarms, gaps, number = np.random.default_rng(1), 0, 0, 0
    for _ in range(150):
        tops = rng.normal(size=(8, 2))
        null = [
            run_of([0.5] * 4, [0.0, top, top, 0.0], place % 4, reward=[0.0, 0.0, 0.0, gap])
            for place, (top, gap) in enumerate(tops)
        ]
        false = announcement(null, KL, rng).false.runs
        alarms, gaps, number = alarms + false.number, gaps + sum(wide_gaps(null)[1]), number + false.n
    assert number == 1200 and 0.03 < alarms / number < 0.07 and 0.03 < gaps / number < 0.07


def test_alarms_need_a_null_of_the_same_conditions() -> None:
    loses = run_of([0.5, 0.5, 0.5, 0.2], [0.0, 9.0, 9.0, 9.0], null=False)
    elsewhere = replace(loses, track=replace(loses.track, level="elsewhere"))
    at_once = run_of([0.5, 0.2, 0.2, 0.2], [0.0, 9.0, 9.0, 9.0], null=False)
    null = [quiet(top, base) for base, top in enumerate((1.0, 1.1, 1.2))]
    found = announcement([loses, elsewhere, at_once, *null], KL, generator())
    assert found.caught.runs == Share(1, 1) and found.losses == 2 and found.at_once == 1
    assert found.lead == pytest.approx(2 / 3)  # of the alarm at 1 and the loss at 3, of 3
    assert found.auc.mean == 1.0 and math.isnan(found.auc.low)  # one loss is too few


def test_disagreement_is_how_much_higher_training_rates_the_same_questions() -> None:
    run = run_of([0.5] * 3, [0.0] * 3, heldout_training=[0.5, 0.7, 0.9], heldout=[0.6, 0.6, 0.5])
    np.testing.assert_allclose(run.track.disagreement, [-0.1, 0.1, 0.4])
    assert POOLED_INDICATORS["disagreement"].sign == 1


def many(rng: np.random.Generator, copies: int) -> list[PooledRun]:
    """Six base models of eight runs, of which two or six lose, each so many times."""
    runs = []
    for base in range(6):
        level = float(rng.normal())
        for place in range(8):
            loses = place < (6 if base % 2 else 2)
            top = float(rng.normal(loses + level))
            end = 0.2 if loses else 0.5
            runs += [run_of([0.5, 0.5, 0.5, end], [0.0, top, top, 0.0], base)] * copies
    return runs


def test_copies_of_runs_say_nothing_more_of_another_base() -> None:
    once, said = clustered_area(many(np.random.default_rng(3), 1), KL, generator())
    thrice, _ = clustered_area(many(np.random.default_rng(3), 3), KL, generator())
    assert "24 runs with a later loss, 24 without, 6 base models" in said
    assert (once.mean, once.low, once.high) == pytest.approx((thrice.mean, thrice.low, thrice.high))
    assert once.n == 48 and thrice.n == 144 and once.bases == thrice.bases == 6
    tracks = [run.track for run in many(np.random.default_rng(3), 3)]
    of_runs = announced(tracks, [], KL, generator()).auc
    assert of_runs.mean == pytest.approx(thrice.mean) and of_runs.high - of_runs.low < thrice.high - thrice.low


def test_within_a_base_the_bases_are_not_told_apart() -> None:
    """On each base model no run reads higher than another, and one base model alone loses."""
    runs = [run_of([0.5, 0.5, 0.5, 0.2], [0.0, 2.0, 2.0, 2.0], 0) for _ in range(12)]
    runs += [quiet(2.0, 0) for _ in range(4)] + [quiet(1.0, base) for base in (1, 2) for _ in range(6)]
    # 12 losing runs against 4 equal ones, by half, and 12 lower ones.
    assert clustered_area(runs, KL, generator())[0].mean == pytest.approx((12 * 4 / 2 + 12 * 12) / (12 * 16))
    assert clustered_area(runs, KL, generator(), within=True)[0].mean == 0.5


# --- what a checkpoint costs ----------------------------------------------------------------------------------------


def test_the_best_checkpoint_by_hand() -> None:
    accuracy = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]], dtype=float)
    assert best_shares(accuracy, question_halves(4, generator())).tolist() == [0, 1, 0]
    # Each checkpoint answers one half: the best on a half is seldom best on the other.
    halves = np.array([[True, True, False, False]])
    assert best_shares(np.array([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=float), halves).tolist() == [0.5, 0.5]


def test_regrets_and_the_budget_after_the_best_by_hand() -> None:
    def run(base: int, last: float, heldout: float) -> PooledRun:
        choice = Choice({"last": last, "train_reward": 0.0, "heldout": heldout}, 1.5, 0.1)
        return run_of([0.5, 0.6, 0.6, 0.55], [0.0] * 4, base, choice=choice)

    runs = [run(0, 0.02, 0.0), run(0, 0.04, 0.02), run(1, 0.05, 0.01), run(2, 0.07, 0.03)]
    assert regrets(runs, "last").mean == pytest.approx((3 + 5 + 7) / 3)  # points; base 0 has 3 in the mean
    assert regret_saved(runs, "heldout", "last").mean == pytest.approx((2 + 4 + 4) / 3)
    assert spent_after(runs).mean == pytest.approx(0.5)  # 1.5 of a budget of 3
    found = cost_of(runs, "here", "controls")
    assert found.gain.mean == pytest.approx(5) and found.cost.mean == pytest.approx(3 / 5)
    assert found.best_gain.mean == pytest.approx(10) and found.best_cost.mean == pytest.approx(0.15)


def test_a_cost_has_fiellers_interval_and_none_where_nothing_is_gained() -> None:
    runs = [run_of([0.5] * 3, [0.0] * 3, base) for base in range(4)]
    above, below = np.array([10.0, 12.0, 9.0, 11.0]), np.array([5.0, 4.0, 6.0, 5.5])
    found = ratio_over_bases(runs, above.tolist(), below.tolist())
    assert found.mean == pytest.approx(above.mean() / below.mean()) and found.low < found.mean < found.high
    for bound in (found.low, found.high):  # where the paired t test is just at its critical value
        assert scipy.stats.ttest_1samp(above - bound * below, 0).pvalue == pytest.approx(0.05)
    nothing = ratio_over_bases(runs, above.tolist(), [1.0, -1.0, 2.0, 0.0])
    assert math.isnan(nothing.mean) and nothing.n == 4
    assert math.isnan(ratio_over_bases(runs[:2], [1.0, 1.1], [1.0, 1.0]).mean)  # two base models


# --- the saved sweeps, by other code --------------------------------------------------------------------------------


@cache
def frames() -> dict[str, tuple[dict, pd.DataFrame]]:
    """Name -> the declaration, and every logged point with the run_key, base and protocol of its run."""
    found = {}
    for path in DECLARATIONS:
        design = yaml.safe_load(path.read_text()).get("design", {})
        if not design.get("claims") or design["name"] not in SAVED:
            continue
        name = design["name"]
        described = saved_description(name)
        points = saved_points(name)
        for _, column, twin in described["twins"]:
            points[column] = points[twin]
        runs = pd.DataFrame(described["runs"])[["level", "arm", "seed", "run_key", "base", "protocol"]]
        found[name] = (described["sweep"]["design"], points.merge(runs, on=["level", "arm", "seed"]))
    return found


def at_x(run: pd.DataFrame, x: float) -> dict[str, float]:
    """Training reward over the last fifth of X, and downstream accuracy at step 0 and at the end."""
    run = run.sort_values("step")
    budget = run["budget/sampled_tokens"]
    late = run["reward/outcome"][(budget > 0.8 * x) & (budget <= x)]
    late = late if late.notna().any() else run["reward/outcome"][budget <= x].tail(1)
    downstream = run["eval/downstream/accuracy"].dropna()
    assert budget.iloc[-2] < x <= budget.iloc[-1], "a run's last step is the one that crosses the budget"
    return {"reward": late.mean(), "start": downstream.iloc[0], "downstream": downstream.iloc[-1]}


@pytest.mark.extended
def test_the_contrasts_of_the_saved_sweeps_by_other_code() -> None:
    """With pandas and scipy alone: means over base models of paired differences and their t intervals."""
    found = saved_pool(saved_sweeps(EXPERIMENTS))
    by_name = {(contrast.sweep, contrast.level, contrast.arm): contrast for contrast in found.contrasts}
    checked = 0
    for name, (_, points) in frames().items():
        groups = points.groupby(["level", "arm", "seed"])
        x = groups["budget/sampled_tokens"].max().min()
        finals = pd.DataFrame({labels: at_x(run, x) for labels, run in groups}).T
        base = groups["base"].first()
        for level, arm in {(level, arm) for level, arm, _ in finals.index}:
            if (contrast := by_name.get((name, level, arm))) is None:
                continue
            pairs = finals.loc[level, arm] - finals.loc[level, contrast.control]
            means = pairs.groupby(base.loc[level, arm]).mean()
            for column, own in (("reward", contrast.reward), ("downstream", contrast.downstream)):
                assert own.whole.mean == pytest.approx(means[column].mean(), abs=2e-6)
                if not math.isnan(own.whole.low) and means[column].std() > 0:
                    test = scipy.stats.ttest_1samp(means[column], 0)
                    low, high = test.confidence_interval(0.95)
                    assert (own.whole.low, own.whole.high) == pytest.approx((low, high), abs=2e-6)
                    sign = contrast.signs[0 if column == "reward" else 1]
                    assert sign == (0 if test.pvalue > 0.05 else np.sign(test.statistic))
                checked += 1
    assert checked == 2 * len(found.contrasts) > 100


def words_of(design: dict, level: str) -> str:
    declared = [*design["base"], *(design.get("levels") or {}).get(level, ())]
    return " ".join(sorted({word.partition("=")[0]: word for word in declared}.values()))


@cache
def evaluated() -> dict[str, dict]:
    """run_key -> what each run has at its evaluations, its conditions and whether it is a control somewhere."""
    runs: dict[str, dict] = {}
    for name, (design, points) in frames().items():
        declared_control = named_design(name).control
        x = points.groupby(["level", "arm", "seed"])["budget/sampled_tokens"].max().min()
        for (level, arm, _), run in points.groupby(["level", "arm", "seed"]):
            run = run.sort_values("step")
            key, control = run["run_key"].iloc[0], arm == declared_control
            if key in runs:
                runs[key]["control"] |= control
                continue
            here = run[run["eval/downstream/accuracy"].notna()]
            kl = here["eval/heldout_training/kl_initial"].to_numpy()
            if np.nanmax(kl) <= 1e-6:
                continue
            budget = run["budget/sampled_tokens"]
            near = (budget > 0.95 * x) & (budget <= x)
            reward = run["reward/outcome"][near].mean() if near.any() else run["reward/outcome"][budget <= x].iloc[-1]
            runs[key] = {
                "sweep": name,
                "where": f"{words_of(design, level)} {run['protocol'].iloc[0]}",
                "control": control,
                "base": (words_of(design, level).partition("world=")[2].split(" ")[0], run["base"].iloc[0]),
                "step": here["step"].to_numpy(),
                "downstream": here["eval/downstream/accuracy"].to_numpy(),
                "kl": kl,
                "rise": reward - here["eval/probe/accuracy"].iloc[0],
            }
    return runs


@pytest.mark.extended
def test_runs_and_the_area_of_kl_by_other_code() -> None:
    """Pairs counted one by one: a run that loses later and one that never does, at one step, under one condition."""
    pooled, runs = saved_pool(saved_sweeps(EXPERIMENTS)), evaluated()
    assert {run.key for run in pooled.runs} == set(runs)
    assert {run.key for run in pooled.runs if run.null} == {key for key, run in runs.items() if run["control"]}
    assert len({run["base"] for run in runs.values()}) == len(set(pooled.units))
    own = {
        key for key, run in runs.items() if run["rise"] >= 0.05 and run["downstream"][-1] - run["downstream"][0] <= -0.1
    }
    theirs = {run.key for run in pooled.runs if misled(run.track)}
    assert len(own ^ theirs) <= 1 and len(own) > 40  # a rise on the very edge, by how its window begins
    above = pairs = 0.0
    losing: dict[str, list[tuple[int, float]]] = {}
    staying: dict[str, list[tuple[int, float]]] = {}
    for run in runs.values():
        if len(run["step"]) < 3 or run["downstream"][0] < 0.1:
            continue
        lost = np.flatnonzero(run["downstream"][1:] <= run["downstream"][0] - 0.1 + 1e-9)
        last = lost[0] + 1 if len(lost) else len(run["step"]) - 1
        place = losing if len(lost) else staying
        place.setdefault(run["where"], []).extend(zip(run["step"][1:last], run["kl"][1:last] - run["kl"][0]))
    for where, readings in losing.items():
        for step, reading in readings:
            for other_step, other in staying.get(where, ()):
                if step == other_step:
                    pairs += 1
                    above += (reading > other) + 0.5 * (reading == other)
    assert announcements(pooled)["kl"].auc.mean == pytest.approx(above / pairs, abs=0.005)


@pytest.mark.extended
def test_what_the_last_checkpoint_gives_away_by_other_code() -> None:
    """Other halves of the questions, drawn one at a time, from the saved answers."""
    rng, pooled = np.random.default_rng(5), saved_pool(saved_sweeps(EXPERIMENTS))
    by_base: dict[tuple[str, int], list[float]] = {}
    for name, (design, points) in frames().items():
        answers = pd.read_parquet(FOLDERS[name] / "data" / f"{name}.answers.parquet")
        answers = answers[answers["suite"] == "downstream"]
        keys = points.groupby(["level", "arm", "seed"])[["run_key", "base"]].first()
        mine = {run.key for run in pooled.runs if run.sweep == name}
        for (level, arm), condition in answers.groupby(["level", "arm"]):
            tables = {
                seed: own.assign(share=own["correct"] / own["n"]).pivot(
                    index="step", columns="question", values="share"
                )
                for seed, own in condition.groupby("seed")
            }
            inner = set.intersection(*(set(table.index[:-1]) for table in tables.values()))
            questions = set.intersection(
                *(set(t.columns[t.loc[[*inner, t.index[-1]]].notna().all()]) for t in tables.values())
            )
            for seed, table in tables.items():
                key, base = keys.loc[(level, arm, seed)]
                if key not in mine:
                    continue
                chosen = table.loc[[*sorted(inner), table.index[-1]], sorted(questions)].to_numpy()
                regret = []
                for _ in range(60):
                    half = rng.permutation(chosen.shape[1]) < chosen.shape[1] // 2
                    for side in (half, ~half):
                        best = int(np.argmax(np.round(chosen[:, side].mean(axis=1), 12)))
                        regret.append(chosen[best, ~side].mean() - chosen[-1, ~side].mean())
                world = words_of(design, level).partition("world=")[2].split(" ")[0]
                by_base.setdefault((world, base), []).append(100 * float(np.mean(regret)))
    means = [float(np.mean(values)) for values in by_base.values()]
    assert sum(map(len, by_base.values())) == len(pooled.runs) and len(means) == len(set(pooled.units))
    assert regrets(pooled.runs, "last").mean == pytest.approx(np.mean(means), abs=0.1)
