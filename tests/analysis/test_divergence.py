"""Reward against downstream accuracy: hand numbers, planted truths, and chance level where there is nothing to find."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from grpo_lab.analysis.divergence.measures import (
    NOT_DETECTED,
    TOO_FEW,
    coverage,
    crossover,
    decomposition,
    drop_after_peak,
    gap,
    gap_of_sampler,
    kl_frontier,
    kl_peak,
    onset,
    onsets,
    pass_chances,
    sustained,
    transfer_slope,
    transfer_slopes,
)
from grpo_lab.analysis.divergence.rank_agreement import arm_agreement, kendall_tau
from grpo_lab.analysis.divergence.selection import post_peak_drop, question_halves, selection_optimism, selection_regret
from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import t_interval
from grpo_lab.analysis.tracks import Answers, Track, answers_of, by_condition, mean_of_tracks, on_grid, shared, tracks
from grpo_lab.tracking.sweep_record import SweepRecord

EXACT = 1e-12
SUITES = ("probe", "heldout_training", "heldout", "downstream")
AXIS = "budget/sampled_tokens"


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sweep(
    runs: Mapping[tuple[str, int], Sequence[Mapping[str, float]]],
    answers: Sequence[pd.DataFrame] = (),
    collapsed: Sequence[tuple[str, int]] = (),
) -> SweepData:
    """One level; `runs` maps (arm, seed) to what each step logged, the first being step 0."""
    record = SweepRecord("planted", "key", None, [], [], None, None, [])
    table = [
        {"level": "", "arm": arm, "seed": seed, "status": "failed" if (arm, seed) in collapsed else "done"}
        | {"collapsed": (arm, seed) in collapsed}
        for arm, seed in runs
    ]
    points = [
        {"level": "", "arm": arm, "seed": seed, "step": step, **row}
        for (arm, seed), rows in runs.items()
        for step, row in enumerate(rows)
    ]
    columns = ["level", "arm", "seed", "step", "suite", "question", "difficulty", "n", "correct"]
    kept = pd.concat(answers, ignore_index=True) if answers else pd.DataFrame(columns=columns)
    return SweepData(record, None, pd.DataFrame(table), pd.DataFrame(points), kept, "memory")


def steps_of(
    rewards: Sequence[float], scores: Mapping[int, Mapping[str, float]], tokens: int = 1000
) -> list[dict[str, float]]:
    """Step i costs `tokens` and has the i-th reward; `scores` maps a step to accuracies by suite."""
    rows = [{AXIS: float(tokens * step)} for step in range(len(rewards) + 1)]
    for row, reward in zip(rows[1:], rewards):
        row |= {"reward/outcome": reward, "reward/mean": 2 * reward, "reward/in_loss_mean": reward + 0.1}
    for step, accuracies in scores.items():
        rows[step] |= {f"eval/{suite}/accuracy": value for suite, value in accuracies.items()}
    return rows


def answered(arm: str, seed: int, step: int, correct: Sequence[int], n: int = 1, suite: str = "downstream"):
    labels = {"level": "", "arm": arm, "seed": seed, "step": step, "suite": suite}
    return pd.DataFrame({"question": np.arange(len(correct)), "difficulty": 1, "n": n, "correct": correct}).assign(
        **labels
    )


def track(x: Sequence[float], reward: Sequence[float], downstream: Sequence[float], **others: Sequence[float]) -> Track:
    """One run at given evaluations, every other array NaN."""
    arrays = {"reward": reward, "downstream": downstream, **others}
    names = ("shaped", "probe", "heldout_training", "heldout", "kl")
    names += ("sampled", "entropy", "truncated", "ess")
    empty = {name: np.full(len(x), math.nan) for name in names}
    given = {name: np.array(values, dtype=float) for name, values in arrays.items()}
    step = np.arange(len(x))
    return Track("", "a", 0, -1, step, np.array(x, dtype=float), around=(0, 0), lean=0.0, **(empty | given))


# --- tracks -------------------------------------------------------------------------------------------------

RISING = [step / 100 for step in range(1, 41)]


def two_runs() -> SweepData:
    """Run 0 ends at X = 40,000; run 1 takes larger steps and is evaluated at 0, 22,000 and 44,000."""
    first = steps_of(RISING, {0: {"downstream": 0.2}, 20: {"downstream": 0.4}, 40: {"downstream": 0.6}})
    second = steps_of(RISING, {0: {"downstream": 0.1}, 20: {"downstream": 0.3}, 40: {"downstream": 0.7}}, tokens=1100)
    return sweep({("a", 0): first, ("a", 1): second})


def test_training_reward_is_the_mean_over_the_last_twentieth_of_the_budget() -> None:
    data = two_runs()
    first = tracks(data, final_values(data))[0]
    # 5% of X = 40,000 are two steps: (0.19 + 0.20) / 2 at step 20; at step 0 the first step's value.
    np.testing.assert_allclose(first.reward, [0.01, 0.195, 0.395], atol=EXACT)
    np.testing.assert_allclose(first.shaped, [0.02, 0.390, 0.790], atol=EXACT)
    assert first.x.tolist() == [0.0, 20_000.0, 40_000.0] and first.step.tolist() == [0, 20, 40]
    assert np.isnan(first.kl).all() and np.isnan(first.probe).all()
    assert (first.around, first.lean) == ((40, 40), 0.0)


def test_a_run_is_cut_at_the_budget_on_the_line_between_its_evaluations() -> None:
    data = two_runs()
    finals = final_values(data)
    second = tracks(data, finals)[1]
    # 40,000 lies 18/22 of the way from 22,000 to 44,000; 36 steps fit, of which 35 and 36 lie after 38,000.
    assert second.x.tolist() == [0.0, 22_000.0, 40_000.0] and second.step.tolist() == [0, 20, 36]
    assert second.downstream[-1] == pytest.approx(0.3 + 0.4 * 18 / 22, abs=EXACT)
    assert second.reward[-1] == pytest.approx(0.355, abs=EXACT)
    assert second.around == (20, 40) and second.lean == pytest.approx(18 / 22, abs=EXACT)
    assert second.downstream[-1] == pytest.approx(finals.of("", "a", "eval/downstream/accuracy")[1], abs=EXACT)


def test_a_run_that_ended_before_the_budget_is_no_track() -> None:
    runs = {("a", seed): steps_of(RISING[:length], {0: {"downstream": 0.2}}) for seed, length in ((0, 40), (1, 10))}
    data = sweep(runs, collapsed=[("a", 1)])
    finals = final_values(data)
    assert finals.collapsed("", "a") == 1
    assert [one.seed for one in tracks(data, finals)] == [0]
    table = divergence_table(data, finals, generator()).set_index("metric")
    assert table.loc["divergence/gap_change", "note"] == "1 collapsed before the common budget, left out"


def test_seeds_are_averaged_where_all_were_evaluated() -> None:
    one = track([0, 10, 20, 31], [0] * 4, [0.0, 0.1, 0.2, 0.31])
    other = replace(track([0, 14, 31], [0] * 3, [0.0, 0.28, 0.62]), step=np.array([0, 1, 5]))
    assert [where.tolist() for where in shared([one, other])] == [[0, 1, 3], [0, 1, 2]]
    grid, values = on_grid([one, other], [one.downstream, other.downstream])
    assert grid.tolist() == [0.0, 12.0, 31.0]  # (10 + 14) / 2
    np.testing.assert_allclose(values, [[0.0, 0.12, 0.31], [0.0, 0.24, 0.62]], atol=EXACT)


def test_answers_agree_with_the_accuracies_that_were_logged() -> None:
    """Run 1 was evaluated after X: its last answers are those around X, weighted as its accuracy is."""
    given = {0: {0: [0, 0, 1], 20: [1, 0, 1], 40: [1, 1, 1]}, 1: {0: [0, 1, 0], 20: [0, 1, 1], 40: [1, 1, 0]}}
    runs, kept = {}, []
    for seed, tokens in ((0, 1000), (1, 1100)):
        scores = {step: {"downstream": float(np.mean(right))} for step, right in given[seed].items()}
        runs["a", seed] = steps_of(RISING, scores, tokens)
        kept += [answered("a", seed, step, right) for step, right in given[seed].items()]
    data = sweep(runs, kept)
    found = tracks(data, final_values(data))
    answers = answers_of(data, found, "downstream")
    assert answers is not None and answers.accuracy.shape == (2, 3, 3)
    np.testing.assert_allclose(answers.accuracy.mean(axis=-1), [one.downstream for one in found], atol=EXACT)
    # Question 0 of run 1 goes from wrong to right between 22,000 and 44,000; X is 18/22 of the way.
    assert answers.accuracy[1, -1].tolist() == pytest.approx([18 / 22, 1.0, 4 / 22], abs=EXACT)
    assert answers.step.tolist() == [[0, 20, 40], [0, 20, 36]]
    assert answers_of(data, found, "heldout") is None
    assert answers_of(replace(data, answers=data.answers[data.answers["step"] < 40]), found, "downstream") is None
    moved = data.answers.assign(question=data.answers["question"] + data.answers["seed"])
    with pytest.raises(ValueError, match="different questions"):
        answers_of(replace(data, answers=moved), found, "downstream")


def ended(arm: str, seed: int, tokens: int) -> tuple[list[dict], list[pd.DataFrame]]:
    """A run of 41 steps that asks four questions once at steps 20 and 40, and six of them twice at its ends."""
    rising = [step / 100 for step in range(1, 42)]
    scores, kept = {}, []
    for step, number, samples in ((0, 6, 2), (20, 4, 1), (40, 4, 1), (41, 6, 2)):
        correct = [samples * (question % 2) for question in range(number)]
        scores[step] = {"downstream": sum(correct) / samples / number + step / 1000, "probe": 0.25}
        kept.append(answered(arm, seed, step, correct, n=samples))
    rows = steps_of(rising, scores, tokens)
    for step, number, samples in ((0, 6, 2), (20, 4, 1), (40, 4, 1), (41, 6, 2)):
        rows[step] |= {"eval/downstream/responses": number * samples, "eval/probe/accuracy_se": 0.03}
    rows[20]["eval/sampler_downstream/accuracy"] = 0.4
    rows[41]["eval/sampler_downstream/accuracy"] = 0.3
    return rows, kept


def test_the_end_of_a_run_that_passes_the_budget_in_its_last_step_counts_whole() -> None:
    """X = 41,000; run 1 is at 40,400 after 40 steps and at 41,410 after 41."""
    runs = {seed: ended("a", seed, tokens) for seed, tokens in ((0, 1000), (1, 1010))}
    data = sweep(
        {("a", seed): rows for seed, (rows, _) in runs.items()}, [t for _, kept in runs.values() for t in kept]
    )
    finals = final_values(data)
    found = tracks(data, finals)
    assert finals.of("", "a", DOWNSTREAM).tolist() == pytest.approx([0.541, 0.541])
    for one in found:
        assert (one.around, one.lean) == ((41, 41), 0.0) and one.downstream[-1] == pytest.approx(0.541)
    everywhere, ends = (answers_of(data, found, "downstream", ends=at) for at in (False, True))
    assert everywhere is not None and everywhere.accuracy.shape[1:] == (4, 4)
    assert ends is not None and ends.accuracy.shape == (2, 2, 6) and ends.samples.min() == 2
    # Without the number of responses, as earlier versions logged it, X lies on the line between both evaluations.
    older = replace(data, points=data.points.drop(columns="eval/downstream/responses"))
    line = 0.54 + 0.001 * (41_000 - 40_400) / 1010
    assert final_values(older).of("", "a", DOWNSTREAM)[1] == pytest.approx(line, abs=EXACT)


def test_at_step_0_the_probe_is_the_reward_and_what_samples_is_what_learns() -> None:
    rows, kept = ended("a", 0, 1000)
    data = sweep({("a", 0): rows}, kept)
    (one,) = tracks(data, final_values(data))
    assert one.reward[0] == 0.25
    np.testing.assert_allclose(one.sampled, [one.downstream[0], 0.4, math.nan, 0.3])
    np.testing.assert_allclose(gap(one)[-1], (0.40 - 0.25) - (0.541 - 0.5), atol=EXACT)
    np.testing.assert_allclose(gap_of_sampler(one)[-1], (0.40 - 0.25) - (0.3 - 0.5), atol=EXACT)


@pytest.mark.parametrize(("answers", "start"), [(127, 0.01), (128, 0.25)])
def test_a_probe_smaller_than_a_batch_is_no_better_start(answers: int, start: float) -> None:
    rows, kept = ended("a", 0, 1000)
    rows = [{**row, "budget/completions": 128 * number} for number, row in enumerate(rows)]
    rows[0]["eval/probe/responses"] = answers
    data = sweep({("a", 0): rows}, kept)
    (one,) = tracks(data, final_values(data))
    assert one.reward[0] == start


# --- gap, slope, onset --------------------------------------------------------------------------------------


def test_the_gap_is_what_reward_gained_over_accuracy() -> None:
    first = track([0, 1, 2], [0.3, 0.5, 0.7], [0.2, 0.3, 0.25])
    np.testing.assert_allclose(gap(first), [0.0, 0.1, 0.35], atol=EXACT)  # (0.7 - 0.3) - (0.25 - 0.2)


def test_the_transfer_slope_is_the_median_of_all_pairs() -> None:
    # Slopes: 0.5 (0-1), 1.0 (1-2), 0.75 (0-2).
    assert transfer_slope(np.array([0.0, 1.0, 2.0]), np.array([0.0, 0.5, 1.5])) == pytest.approx(0.75)
    assert math.isnan(transfer_slope(np.array([0.3, 0.3, 0.3, 0.4]), np.array([0.1, 0.2, 0.3, 0.4])))


def test_halves_of_the_slope_are_halves_of_the_budget() -> None:
    slopes = transfer_slopes(track([0, 10, 20, 30, 40], [0, 1, 2, 3, 4], [0, 1, 2, 1.5, 1]))
    assert (slopes["_early"], slopes["_late"]) == pytest.approx((1.0, -0.5))
    assert math.isnan(transfer_slopes(track([0, 30, 40], [0, 1, 2], [0, 1, 2]))["_early"])  # one of three


def planted_gap(seeds: int, evaluations: int, start: int, rng: np.random.Generator) -> np.ndarray:
    """[S, K]: 0 up to evaluation `start`, then rising by 5 pp an evaluation, with noise of 1 pp."""
    rise = 0.05 * np.maximum(np.arange(evaluations) - start, 0)
    return rise + 0.01 * rng.standard_normal((seeds, evaluations))


def test_a_planted_onset_is_found_within_one_evaluation() -> None:
    x = np.arange(13) * 100.0
    found = [onset(x, planted_gap(5, 13, 6, generator(seed))) for seed in range(40)]
    near = [abs(one.x - 700.0) <= 100.0 for one in found]  # evaluation 7 is the first above 0
    assert np.mean(near) >= 0.9
    assert all(one.low <= one.x <= one.high and one.n == 5 for one in found)


def test_an_onset_needs_three_evaluations_in_a_row() -> None:
    one, up = np.array([0.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0]), 1e-3 * np.arange(3)[:, None]
    assert sustained(one + up) == -1 and sustained(one + up, run=2) == 3 and sustained(one + up, run=1) == 1
    assert onset(np.arange(7.0), one + up).note == NOT_DETECTED
    late = onset(np.arange(5.0), np.array([0.0, -1.0, 1.0, 1.0, 1.0]) + up)
    assert late.x == 2.0 and math.isnan(late.low)  # of three seeds none can be left out


def test_too_little_data_gives_words_and_no_onset() -> None:
    assert onset(np.arange(3.0), np.ones((5, 3))).note == TOO_FEW
    assert onset(np.arange(9.0), np.ones((2, 9))).note == "too few seeds"


def autocorrelated(shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """[experiments, S, K] noise with variance 1 and autocorrelation 0.5."""
    noise = rng.standard_normal(shape)
    for k in range(1, shape[-1]):
        noise[..., k] = 0.5 * noise[..., k - 1] + math.sqrt(0.75) * noise[..., k]
    return noise


def test_false_onsets_are_as_rare_as_the_docstring_says() -> None:
    for evaluations, least, most in ((5, 0.0, 0.015), (40, 0.04, 0.08)):  # 0.5% and 5.8%
        noise = autocorrelated((3000, 5, evaluations + 1), generator(evaluations))
        noise[..., 0] = 0.0
        assert least <= np.mean(sustained(noise) >= 0) <= most


def test_the_peak_is_picked_on_other_seeds() -> None:
    downstream = np.array([[0.0, 0.5, 0.1, 0.2], [0.0, 0.1, 0.4, 0.2]])
    drops = drop_after_peak(downstream)
    # Seed 0 at k = 3: seed 1 was best at k = 2, where seed 0 had 0.1; at k = 2, best at k = 1, where it had 0.5.
    np.testing.assert_allclose(drops[0], [0.0, -0.5, 0.4, -0.1], atol=EXACT)
    np.testing.assert_allclose(drops[1], [0.0, -0.1, -0.3, -0.1], atol=EXACT)
    assert np.isnan(drop_after_peak(downstream[:1])).all()


def test_flat_curves_seldom_show_a_drop_after_their_peak() -> None:
    """A peak picked on the seed's own values would find one in most of them."""
    noise = autocorrelated((300, 5, 11), generator(3))
    found = np.mean([sustained(drop_after_peak(one)) >= 0 for one in noise])
    own = np.maximum.accumulate(noise, axis=-1) - noise
    assert found <= 0.1 and np.mean(sustained(own) >= 0) >= 0.5


# --- checkpoints and arms -----------------------------------------------------------------------------------


def test_halves_are_disjoint_and_of_one_size() -> None:
    halves = question_halves(7, generator(), number=50)
    assert halves.shape == (50, 7) and (halves.sum(axis=1) == 3).all()
    assert len(np.unique(halves, axis=0)) > 20
    with pytest.raises(ValueError, match="cannot be halved"):
        question_halves(1, generator())


def alike(*levels: float, questions: int = 8) -> np.ndarray:
    """[K, Q]: every question answered alike."""
    return np.repeat(np.array(levels)[:, None], questions, axis=1)


def test_the_drop_after_the_peak_counts_where_reward_went_on() -> None:
    halves = question_halves(8, generator(), number=10)
    rose = post_peak_drop(alike(0.2, 0.6, 0.4), np.array([0.1, 0.2, 0.3]), halves)
    assert (rose.value, rose.held) == pytest.approx((0.2, 1.0))
    np.testing.assert_allclose(rose.contributions, 0.2, atol=EXACT)
    fell = post_peak_drop(alike(0.2, 0.6, 0.4), np.array([0.1, 0.4, 0.3]), halves)
    assert math.isnan(fell.value) and fell.held == 0.0
    still_rising = post_peak_drop(alike(0.2, 0.4, 0.6), np.array([0.1, 0.2, 0.3]), halves)
    assert (still_rising.value, still_rising.held) == (0.0, 1.0)


def test_regret_is_what_the_rule_gave_away() -> None:
    halves = question_halves(8, generator(), number=10)
    regrets = [selection_regret(alike(0.2, 0.6, 0.4), chosen, halves).value for chosen in range(3)]
    assert regrets == pytest.approx([0.4, 0.0, 0.2])
    assert selection_optimism(alike(0.2, 0.6, 0.4), halves) == pytest.approx(0.0, abs=EXACT)


def test_contributions_average_to_the_value() -> None:
    accuracy = generator(1).random((6, 31))
    one = selection_regret(accuracy, 5, question_halves(31, generator(2)))
    assert one.contributions.mean() == pytest.approx(one.value, abs=EXACT)


def test_where_all_checkpoints_are_equal_nothing_is_lost_and_the_best_one_flatters() -> None:
    """10 checkpoints of 100 questions: their best is 1.54 standard errors of sampling too high."""
    rng = generator(4)
    chance, experiments = rng.uniform(0.1, 0.9, 100), 300
    error = math.sqrt(np.mean(chance * (1 - chance)) / 100)
    halves = question_halves(100, rng, number=20)
    regrets, drops, naive, optimism = [], [], [], []
    for _ in range(experiments):
        accuracy = (rng.random((10, 100)) < chance).astype(float)
        regrets.append(selection_regret(accuracy, 9, halves).value)
        drops.append(post_peak_drop(accuracy, np.arange(10.0), halves).value)
        naive.append(accuracy.mean(axis=1).max() - chance.mean())
        optimism.append(selection_optimism(accuracy, halves))
    noise = 4 * np.std(regrets) / math.sqrt(experiments)
    assert abs(np.mean(regrets)) < noise < 0.4 * error
    assert np.mean(drops) == pytest.approx(np.mean(regrets), abs=EXACT)  # reward rose throughout: every split counts
    assert np.mean(naive) / error == pytest.approx(1.54, abs=0.15)
    assert np.mean(optimism) / (math.sqrt(2) * error) == pytest.approx(1.54, abs=0.15)


def test_kendall_is_scipys_with_and_without_ties() -> None:
    assert kendall_tau(np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4])) == pytest.approx((5 - 1) / 6)
    one, other = np.array([1, 1, 2, 3, 3, 5]), np.array([2, 1, 2, 2, 4, 3])
    assert kendall_tau(one, other) == pytest.approx(scipy_stats.kendalltau(one, other).statistic)
    assert math.isnan(kendall_tau(np.ones(4), np.arange(4)))
    assert kendall_tau(np.array([0.1 + 0.2, 0.3, 1.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / math.sqrt(6))


def test_regret_of_the_arm_with_the_highest_reward() -> None:
    reward = np.array([[0.9, 0.5, 0.1], [0.8, 0.6, 0.2], [0.9, 0.4, 0.1]])
    downstream = np.array([[0.3, 0.5, 0.1], [0.3, 0.6, 0.1], [0.2, 0.6, 0.1]])
    found = arm_agreement(reward, downstream)
    # Arm 1 is best, arm 0 has the reward: 0.2, 0.3, 0.4. Of three pairs of arms, one disagrees: tau 1/3.
    assert (found.regret.mean, found.regret.n) == (pytest.approx(0.3), 3)
    assert found.regret.low < 0.2 < 0.4 < found.regret.high
    assert found.tau == pytest.approx(1 / 3)
    same = arm_agreement(downstream, downstream)
    assert same.regret.mean == 0.0 and math.isnan(same.regret.low) and same.tau == 1.0
    with pytest.raises(ValueError, match="at least two"):
        arm_agreement(reward[:, :1], downstream[:, :1])


def test_equal_arms_cost_no_regret_once_they_are_chosen_on_other_seeds() -> None:
    rng = generator(5)
    left_out, naive = [], []
    for _ in range(300):
        reward, downstream = 0.02 * rng.standard_normal((2, 5, 8))
        left_out.append(arm_agreement(reward, downstream).regret.mean)
        naive.append(downstream.mean(axis=0).max() - downstream.mean(axis=0)[reward.mean(axis=0).argmax()])
    assert abs(np.mean(left_out)) < 4 * np.std(left_out) / math.sqrt(300) < 0.005
    assert np.mean(naive) == pytest.approx(0.0127, abs=0.002)  # 1.42 standard errors of 2 pp / sqrt(5)


# --- KL, parts, coverage ------------------------------------------------------------------------------------


def test_the_kl_frontier_returns_what_was_planted() -> None:
    kl = np.array([0.0, 0.5, 1.0, 3.0, 8.0, 15.0])
    d = np.sqrt(kl)
    gain = np.array([0.0, *(d[1:] * (0.08 - 0.05 * np.log(d[1:])))])
    assert kl_frontier(kl, gain) == pytest.approx((0.08, 0.05), abs=1e-10)
    assert kl_frontier(np.array([-0.01, *kl[1:]]), gain) == pytest.approx((0.08, 0.05), abs=1e-10)
    assert all(map(math.isnan, kl_frontier(kl[:3], gain[:3])))
    assert all(map(math.isnan, kl_frontier(np.full(6, math.nan), gain)))


def test_the_top_of_the_frontier_is_where_the_curve_is_highest() -> None:
    top, height = kl_peak(0.08, 0.05, 3.0)
    d = np.linspace(0.01, 3, 30_000)
    curve = d * (0.08 - 0.05 * np.log(d))
    assert (top, height) == pytest.approx((d[curve.argmax()], curve.max()), abs=1e-3)
    assert math.isnan(kl_peak(0.08, 0.05, 1.5)[0])  # exp(0.6) = 1.82 was never reached
    assert math.isnan(kl_peak(0.08, -0.05, 3.0)[0]) and math.isnan(kl_peak(0.08, 1e-9, 3.0)[0])


def test_the_decomposition_adds_up_to_the_gap() -> None:
    rng = generator(6)
    names = ("probe", "heldout_training", "heldout")
    one = track(range(9), rng.random(9), rng.random(9), **{name: rng.random(9) for name in names})
    parts = decomposition(one)
    np.testing.assert_allclose(sum(parts.values()), gap(one), atol=EXACT)
    flat = {name: [0.4, 0.4] for name in names}
    moved = decomposition(track([0, 1], [0.3, 0.5], [0.2, 0.2], **(flat | {"probe": [0.4, 0.45]})))
    # Reward rose by 0.2, the training questions by 0.05 of it, nothing else moved.
    assert [float(part[-1]) for part in moved.values()] == pytest.approx([0.15, 0.05, 0.0, 0.0])


def test_pass_at_k_by_hand() -> None:
    samples, correct = np.full(4, 4), np.array([0, 1, 2, 4])
    # 1 - C(4 - c, 2) / C(4, 2) = 1 - 6/6, 1 - 3/6, 1 - 1/6, 1.
    np.testing.assert_allclose(pass_chances(samples, correct, 2), [0, 1 / 2, 5 / 6, 1], atol=EXACT)
    np.testing.assert_allclose(pass_chances(samples, correct, 1), correct / 4, atol=EXACT)


def test_coverage_is_lost_where_answers_narrow() -> None:
    """The base gets one of two samples right on both questions; the run both on one and none on the other."""
    correct = np.array([[[1, 1], [2, 0], [2, 0]]])
    answers = Answers(np.array([[0, 9]]), np.arange(2), np.full(correct.shape, 2), correct, np.zeros(1))
    changes = coverage(answers).mean(axis=-1)
    np.testing.assert_allclose(changes, [[0.0, -0.5]], atol=EXACT)
    assert crossover(np.array([[0.2, 0.1, -0.1], [0.2, 0.0, -0.1]])) == 3  # (0.1 + 0.0) / 2 is still above 0
    assert crossover(changes) == 1 and crossover(np.array([[0.2, 0.1]])) is None


# --- the table ----------------------------------------------------------------------------------------------

EVALUATIONS = tuple(range(0, 61, 10))
QUESTIONS = 60


def planted_run(arm: str, seed: int, samples: int) -> tuple[list[dict[str, float]], list[pd.DataFrame]]:
    """Reward rises by 0.4, downstream accuracy with it; in `bad` the second half of the run takes 0.3 of that away."""
    rng = generator(100 * seed + len(arm))
    progress = np.arange(1, 61) / 60
    reward = 0.3 + 0.4 * progress + 0.02 * rng.standard_normal(60)
    scores, kept = {}, []
    for step in EVALUATIONS:
        gained = 0.4 * step / 60
        lost = 0.3 * max(0.0, step - 30) / 30 if arm == "bad" else 0.0
        correct = rng.binomial(samples, np.clip(0.3 + gained - lost, 0, 1), QUESTIONS)
        kept.append(answered(arm, seed, step, correct.tolist(), samples))
        scores[step] = dict.fromkeys(SUITES, 0.3 + gained) | {"downstream": correct.mean() / samples}
    rows = steps_of(reward.tolist(), scores)
    for step in EVALUATIONS:
        rows[step]["eval/heldout_training/kl_initial"] = step / 10
    return rows, kept


def planted_sweep(samples: int = 4, arms: Sequence[str] = ("good", "bad"), seeds: int = 5) -> SweepData:
    runs = {(arm, seed): planted_run(arm, seed, samples) for arm in arms for seed in range(seeds)}
    return sweep(
        {labels: rows for labels, (rows, _) in runs.items()}, [part for _, kept in runs.values() for part in kept]
    )


@pytest.fixture(scope="module")
def planted() -> tuple[SweepData, FinalValues, pd.DataFrame]:
    data = planted_sweep()
    finals = final_values(data)
    return data, finals, divergence_table(data, finals, generator()).set_index(["arm", "metric"])


def test_the_table_finds_what_was_planted(planted: tuple[SweepData, FinalValues, pd.DataFrame]) -> None:
    table = planted[2].rename(index=lambda name: name.removeprefix("divergence/"), level="metric")
    bad, good = table.loc["bad"], table.loc["good"]
    assert bad.loc["gap_change", "low"] < 30.0 < bad.loc["gap_change", "high"] and bad.loc["gap_change", "low"] > 20
    assert good.loc["gap_change", "low"] < 0.0 < good.loc["gap_change", "high"]
    assert good.loc["onset", "note"] == NOT_DETECTED and good.loc["onset_after_peak", "note"] == NOT_DETECTED
    assert abs(bad.loc["onset", "value"] - 40_000) <= 10_000  # the first evaluation after step 30
    assert bad.loc["transfer_slope_early", "low"] < 1.0 < bad.loc["transfer_slope_early", "high"]
    assert bad.loc["transfer_slope_late", "high"] < 0.25 < good.loc["transfer_slope_late", "low"]
    # From 0.5 at step 30 to 0.4 at the end; half of the questions sometimes pick a neighbour of the peak.
    assert 5.0 < bad.loc["post_peak_drop", "value"] < 12.0
    assert bad.loc["post_peak_drop", "crossed_low"] < bad.loc["post_peak_drop", "value"]
    assert bad.loc["selection_regret_last", "value"] == pytest.approx(bad.loc["post_peak_drop", "value"], abs=3)
    assert bad.loc["kl_b", "low"] > good.loc["kl_b", "high"] and good.loc["kl_b", "note"] == "no over-optimisation seen"
    assert bad.loc["waterfall_shift", "low"] < 30 < bad.loc["waterfall_shift", "high"]
    assert bad.loc["waterfall_protocol", "value"] == pytest.approx(0.0, abs=1e-9)
    assert good.loc["coverage_at_4", "value"] > bad.loc["coverage_at_4", "value"]
    assert table.loc[("", "arm_regret"), "n"] == 5 and table.loc[("", "arm_tau"), "note"] == "2 arms"


def test_the_table_is_the_same_every_time_and_has_one_row_per_measure(
    planted: tuple[SweepData, FinalValues, pd.DataFrame],
) -> None:
    data, finals, table = planted
    again = divergence_table(data, finals, generator()).set_index(["arm", "metric"])
    pd.testing.assert_frame_equal(again, table)
    assert not table.index.has_duplicates
    assert set(table.loc["good"].index) == set(table.loc["bad"].index)
    assert (table["note"][table["value"].isna()] != "").all()


def test_what_was_not_logged_or_kept_is_said_in_words() -> None:
    data = planted_sweep(samples=1, arms=("good",), seeds=3)
    lacking = [f"eval/{suite}" for suite in ("probe", "heldout/", "heldout_training/kl")] + ["reward/mean"]
    left = data.points.drop(columns=[name for name in data.points if name.startswith(tuple(lacking))])
    bare = replace(data, points=left, answers=data.answers.iloc[:0])
    table = divergence_table(bare, final_values(bare), generator()).set_index("metric")
    notes = table["note"].rename(lambda name: name.removeprefix("divergence/"))
    assert notes["post_peak_drop"] == notes["selection_regret_heldout"] == "answers were not saved"
    assert notes["kl_a"] == notes["kl_peak"] == "KL was not logged"
    assert notes["waterfall_prompt_mix"] == "eval/probe/accuracy was not logged"
    assert notes["coverage_crossover"] == "answers were not saved" and "divergence/arm_regret" not in table.index
    full = divergence_table(data, final_values(data), generator()).set_index("metric")
    assert full.loc["divergence/coverage_at_1", "note"] == "coverage needs at least two samples per question"
    without = replace(data, points=data.points.drop(columns="eval/heldout/accuracy"))
    rows = divergence_table(without, final_values(without), generator()).set_index("metric")
    assert rows.loc["divergence/selection_regret_heldout", "note"] == "eval/heldout/accuracy was not logged"


def frontier_sweep(slopes: Sequence[float]) -> SweepData:
    """A run for every b, along d (0.08 - b ln d) up to d = 3, without noise; answers were not saved."""
    runs = {}
    for seed, b in enumerate(slopes):
        scores = {0: {"downstream": 0.2}}
        for step in range(10, 61, 10):
            d = step / 20
            scores[step] = {"downstream": 0.2 + d * (0.08 - b * math.log(d))}
        runs["a", seed] = steps_of([0.5] * 60, scores)
        for step in scores:
            runs["a", seed][step]["eval/heldout_training/kl_initial"] = (step / 20) ** 2
    return sweep(runs)


def test_the_top_of_the_frontier_is_given_where_every_run_has_passed_it() -> None:
    passed = frontier_sweep([0.05, 0.05])
    table = divergence_table(passed, final_values(passed), generator()).set_index("metric")
    assert table.loc["divergence/kl_b", "value"] == pytest.approx(5.0)  # pp
    assert table.loc["divergence/kl_peak", "value"] == pytest.approx(math.exp(0.08 / 0.05 - 1))
    assert table.loc["divergence/kl_peak_gain", "value"] == pytest.approx(5.0 * math.exp(0.08 / 0.05 - 1))
    one_has_not = frontier_sweep([0.05, 0.02])  # exp(0.08 / 0.02 - 1) = 20 > 3
    table = divergence_table(one_has_not, final_values(one_has_not), generator()).set_index("metric")
    assert math.isnan(table.loc["divergence/kl_peak", "value"])
    assert table.loc["divergence/kl_peak", "note"] == "the peak lies outside the evaluated range in 1 of 2 runs"


def test_one_seed_has_numbers_without_intervals() -> None:
    data = planted_sweep(arms=("bad",), seeds=1)
    table = divergence_table(data, final_values(data), generator()).set_index("metric")
    assert table.loc["divergence/gap_change", "n"] == 1 and table["low"].isna().all()
    assert table.loc["divergence/onset", "note"] == "too few seeds"
    assert by_condition(tracks(data, final_values(data))).keys() == {("", "bad")}


def test_a_base_counts_once_in_every_measure_over_runs() -> None:
    """Eight runs of four base models: measures equal those of four runs with their means."""
    x = [0, 1, 2, 3, 4]
    rng = np.random.default_rng(0)
    downstream = 0.5 - np.cumsum(rng.uniform(0.04, 0.06, (4, 5)), axis=1)
    shifted = [downstream + shift for shift in (0.01, -0.01)]  # two seeds of every base model, about its mean
    runs = [
        replace(track(x, [0.5] * 5, seeds[base].tolist()), base=base, seed=4 * number + base)
        for number, seeds in enumerate(shifted)
        for base in range(4)
    ]
    means = [track(x, [0.5] * 5, downstream[base].tolist()) for base in range(4)]
    of_runs, of_means = onsets(runs)["onset"], onsets(means)["onset"]
    assert (of_runs.x, of_runs.low, of_runs.high) == (of_means.x, of_means.low, of_means.high) and of_runs.x > 0
    ends = mean_of_tracks(runs, [run.downstream[-1] for run in runs])
    four = t_interval(downstream[:, -1].tolist())
    assert (ends.low, ends.high) == (pytest.approx(four.low), pytest.approx(four.high))
    assert (ends.n, ends.bases) == (8, 4)
    reward = np.array([[0.5, 0.6]] * 8)
    final = np.column_stack([[run.downstream[-1] for run in runs], [run.downstream[0] for run in runs]])
    regret = arm_agreement(reward, final, [run.base for run in runs]).regret
    assert regret.bases == 4 and regret.n == 8
