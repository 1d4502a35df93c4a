"""The table of arms with which every sweep ends, and what of few or equal runs is shown: values, and no interval."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from notebook_tables.noise_statistics import crossed_t_interval
from planted_sweeps import Planted, synthetic_sweep, write_synthetic

from grpo_lab.analysis.build import build
from grpo_lab.analysis.divergence.rank_agreement import arm_agreement
from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.effects.arms import arms_table
from grpo_lab.analysis.effects.contrasts import effects_markdown, trick_effects
from grpo_lab.analysis.effects.table import effect_table, markdown
from grpo_lab.analysis.effects.verdict import judge, verdict_text
from grpo_lab.analysis.figures.curves import draw_curves
from grpo_lab.analysis.figures.effects import draw_effects
from grpo_lab.analysis.figures.forest import draw_forest
from grpo_lab.analysis.figures.step_metrics import draw_step_metrics
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.metric_names import CORRECTNESS, change_text
from grpo_lab.analysis.report.panel import step_curve
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.collapse import Count
from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.analysis.stats.intervals import Interval, bounds, t_interval
from grpo_lab.analysis.stats.mean_line import mean_line
from grpo_lab.analysis.stats.ratio import jackknife_ratio
from grpo_lab.analysis.stats.resampling import crossed_bootstrap
from grpo_lab.analysis.tables.headline import headline
from grpo_lab.sweeps.sweeper import _show_results
from grpo_lab.tracking.terminal import Terminal

HELDOUT, DOWNSTREAM = "eval/heldout/accuracy", "eval/downstream/accuracy"


def planted(seeds: int = 5, **changes: object) -> Planted:
    truths = {"tricks": ("helps", "hurts"), "kind": "add_one", "training": {"helps": 0.1}, "falls": {"+hurts": 0.15}}
    return Planted(**{**truths, "seeds": tuple(range(seeds)), **changes})


def sweep(seeds: int = 5, **changes: object) -> SweepData:
    return synthetic_sweep(planted(seeds, **changes))


def rows_of(table: list[str]) -> dict[str, list[str]]:
    """The runs of every row by its name, a difference under that of the arm above it."""
    start = next(number for number, line in enumerate(table) if line.startswith("  arm "))
    found, arm = {}, ""
    for line in table[start:]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) < 4:
            break
        arm = arm if cells[0].startswith("minus ") else cells[0]
        found[f"{arm}: {cells[0]}" if cells[0].startswith("minus ") else arm] = cells[1:]
    return found


# ---- the table


def test_every_arm_has_the_primary_metric_reward_accuracies_and_divergence_with_intervals() -> None:
    data = sweep()
    finals = final_values(data)
    table = arms_table(data, finals)
    rows = rows_of(table)
    assert table[0] == f"{data.record.name}: 15 of 15 planned runs are finished; the control is base"
    assert data.design.primary == DOWNSTREAM
    assert rows["arm"] == ["n", "downstream (primary)", "training reward", "held-out", "divergence, pp"]
    assert list(rows)[1:] == ["base", "+helps", "+helps: minus base", "+hurts", "+hurts: minus base"]
    divergence = divergence_table(data, finals, np.random.default_rng(0)).set_index(["arm", "metric"])
    for arm in data.arms:
        own = [finals.interval("", arm, metric).text() for metric in (DOWNSTREAM, CORRECTNESS, HELDOUT)]
        parted = divergence.loc[arm, "divergence/gap_change"]
        assert rows[arm] == ["5", *own, f"{parted.value:+.1f} [{parted.low:+.1f}, {parted.high:+.1f}]"]
    apart = [finals.difference("", "+helps", "base", metric).text("+") for metric in (DOWNSTREAM, CORRECTNESS, HELDOUT)]
    assert rows["+helps: minus base"][:-1] == ["5", *apart]
    # `+hurts` loses 15 points downstream that training reward does not lose.
    more = re.match(r"\+(\d+\.\d) \[\+", rows["+hurts: minus base"][-1])
    assert more and 10 < float(more[1]) < 20
    assert "Brackets: 95% t interval over seeds, n runs." in " ".join(table)
    fewer = replace(data, runs=data.runs.iloc[:-1])
    assert arms_table(fewer, final_values(fewer))[0].startswith("synthetic: 14 of 15 planned runs are finished")


def test_a_declared_sweep_ends_with_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_synthetic(planted(3), tmp_path)
    data = synthetic_sweep(planted(3))
    _show_results(Terminal(file=io.StringIO()), tmp_path, data.record.name)
    finals = final_values(data)
    expected = ["", *arms_table(data, finals), "", f"verdict: {headline(data, finals)}"]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.extended
def test_figures_print_the_same_table(tmp_path: Path) -> None:
    write_synthetic(planted(2), tmp_path / "runs")
    built = build(planted().name, str(tmp_path / "runs"), None, tmp_path, ["test"])
    data = synthetic_sweep(planted(2))
    table = "\n".join(arms_table(data, final_values(data)))
    verdict = (tmp_path / f"{planted().name}_verdict.txt").read_text()
    assert (built.table, built.verdict) == (table, verdict) and "divergence, pp" not in verdict


@pytest.mark.extended
def test_runs_without_a_value_or_with_a_collapse_leave_a_dash_or_no_bounds() -> None:
    data = sweep(5, collapse={("+hurts", 1): 0.4})
    rows = rows_of(arms_table(data, final_values(data)))
    assert rows["+hurts"][1].endswith("[not reported]") and rows["+hurts"][0] == "5"
    assert "Not reported: some runs collapsed" in " ".join(arms_table(data, final_values(data)))
    assert "Not reported" not in " ".join(arms_table(sweep(), final_values(sweep())))
    bare = replace(data, points=data.points.drop(columns=["eval/probe/accuracy", CORRECTNESS]))
    rows = rows_of(arms_table(bare, final_values(bare)))
    assert "training reward" not in rows["arm"] and rows["base"][-1] == "-"
    finals = final_values(data)
    none = replace(finals, values=finals.values.drop(columns=[name for name in finals.values if "/" in name]))
    assert any(line.split() == ["arm", "n", "divergence,", "pp"] for line in arms_table(data, none))


# ---- fewer than three runs, and equal ones


@pytest.mark.parametrize(
    "make",
    [
        t_interval,
        lambda values: compare(dict(enumerate(values))).whole,
        lambda values: compare(dict(enumerate(values)), {0: 0, 1: 1}).whole,
        lambda values: crossed_t_interval(np.array([[v - 0.1, v + 0.1] for v in values])),
        lambda values: crossed_bootstrap(np.array([[v, v] for v in values]), np.random.default_rng(0), 50),
        lambda values: jackknife_ratio(np.array([[v, 1.0] for v in values])),
        lambda values: mean_line([(np.arange(3.0), np.full(3, v)) for v in values], 2.0, True)[-1][1],
    ],
    ids=["t", "seeds", "bases", "crossed", "bootstrap", "jackknife", "line"],
)
def test_two_runs_have_a_mean_and_no_interval(make: Callable[[list[float]], Interval]) -> None:
    two = make([0.2, 0.4])
    assert two.mean == pytest.approx(0.3) and math.isnan(two.low) and math.isnan(two.high)
    assert "[" not in two.text() and two.runs().endswith(": no interval")


def test_three_runs_have_an_interval() -> None:
    three = t_interval([0.2, 0.3, 0.4])
    assert three.text() == "0.300 [0.052, 0.548]" and three.runs() == "n = 3"


def test_the_values_of_two_runs_stand_beside_their_mean_and_equal_ones_once() -> None:
    assert t_interval([0.2, 0.4]).text() == "0.300 (0.200 and 0.400)"
    assert t_interval([0.2, -0.4]).text("+") == "-0.100 (+0.200 and -0.400)"
    assert t_interval([0.5]).text() == "0.500" == t_interval([0.5, 0.5]).text() == t_interval([0.5] * 4).text()
    assert t_interval([0.1 + 0.2, 0.3]).text() == "0.300", "equal but for rounding"
    assert t_interval([1.0] * 8).text("+") == "+1.000" and t_interval([0.0] * 3).text("+") == "+0.000"
    assert change_text(t_interval([0.01, 0.03]), HELDOUT) == "+2.0 pp (+1.0 and +3.0)"
    assert change_text(t_interval([0.25] * 3), HELDOUT) == "+25.0 pp"
    assert bounds(0.1, 0.2, ".1f") == " [0.1, 0.2]" and bounds(0.2, 0.2, ".1f") == "" == bounds(math.nan, 1.0, ".1f")
    assert (Count(1, 2).text, Count(1, 3).text) == ("1 of 2", "1 of 3 (0.01 to 0.91)")


def test_nothing_is_decided_by_two_pairs_however_far_they_lie_from_0() -> None:
    two = compare({0: 0.3, 1: 0.3001})
    assert two.p == 1.0 == two.within(0.5) and math.isnan(two.harm())
    assert compare({0: 0.3, 1: 0.3001, 2: 0.2999}).p < 1e-5
    assert math.isnan(compare({0: 0.3}).p)
    data = sweep(2)
    assert {one.verdict for one in judge(data, final_values(data))} <= {"not significant"}
    assert all(not effect.significant and math.isnan(effect.mde) for effect in trick_effects(data, final_values(data)))


def test_no_text_of_two_seeds_has_an_interval() -> None:
    data = sweep(2)
    finals = final_values(data)
    said = " ".join(line.strip() for line in arms_table(data, finals))
    assert "n = 2: no interval; parentheses show the two values" in said
    values = finals.of("", "base", CORRECTNESS).tolist()
    assert f"({values[0]:.3f} and {values[1]:.3f})" in said
    for text in (said, markdown(data, finals), effects_markdown(data, finals), verdict_text(data, finals)):
        assert not re.search(r"\d \[[-+\d]", text)
    table = effect_table(data, finals)
    assert table[["low", "high", "difference_low", "difference_high"]].isna().all().all() and (table["n"] == 2).any()
    one = sweep(1)
    assert "n = 1: no interval." in "\n".join(arms_table(one, final_values(one)))


def covered(figure: object) -> int:
    """How many bands of a figure cover anything."""
    found = 0
    for axes in figure.axes:
        for artist in axes.collections:
            if isinstance(artist, PolyCollection):
                found += any(np.isfinite(path.vertices).all() and len(path.vertices) for path in artist.get_paths())
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("draw", [draw_curves, draw_step_metrics])
def test_curves_of_two_seeds_have_no_band_and_say_so(draw: Callable) -> None:
    few, many = sweep(2), sweep(3)
    drawn, whole = draw(few, final_values(few)), draw(many, final_values(many))
    assert covered(drawn.figure) == 0 and covered(whole.figure) > 0
    assert "band" not in drawn.bands and "band: its 95% t interval" in whole.bands
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    assert means["low"].isna().all() and means["value"].notna().any()
    seeds = drawn.numbers[drawn.numbers["part"] == "seed"]
    assert seeds["seed"].nunique() == 2, "the runs themselves are drawn"


@pytest.mark.parametrize("draw", [draw_effects, draw_forest])
def test_effects_of_two_pairs_are_marks_without_bars(draw: Callable) -> None:
    few = sweep(2)
    drawn = draw(few, final_values(few))
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    assert means["low"].isna().all() and (means["n"] == 2).all() and "no interval" in drawn.bands
    assert (drawn.numbers["part"] != "band").all(), "what two pairs could have found is nothing"
    assert "Final values" in drawn.caption and "not reported" not in drawn.caption


def test_the_report_has_no_band_below_three_runs() -> None:
    runs = {seed: (np.arange(10.0), np.full(10, 0.1 * seed)) for seed in range(3)}
    two = step_curve({seed: runs[seed] for seed in (0, 1)}, 9.0, 5)
    assert two["low"] == two["high"] == [None] * 5 and two["mean"] == [0.05] * 5 and two["n"] == 2
    assert None not in step_curve(runs, 9.0, 5)["low"]


def test_one_arm_is_said_to_be_best_by_both_only_where_it_is() -> None:
    reward, downstream = np.array([[0.1, 0.2], [0.3, 0.2]]), np.array([[0.2, 0.1], [0.1, 0.2]])
    assert not arm_agreement(reward, downstream).same
    assert arm_agreement(np.array([[0.1, 0.2]] * 2), np.array([[0.1, 0.2]] * 2)).same
