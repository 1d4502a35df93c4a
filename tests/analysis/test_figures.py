"""Figures of ranks and of the gap's parts: hand numbers, planted truths, nothing overlaps."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from declared_experiments import saved_data
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis import figures
from grpo_lab.analysis.figures import all_pairs, decomposition, ranks, registry, step_metrics, style
from grpo_lab.analysis.figures.effects import draw_effects
from grpo_lab.analysis.figures.registry import FIGURES, default_figures, draw_all
from grpo_lab.analysis.figures.style import DPI, Drawn, FigureKind, house_style, save
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.tracking.sweep_record import SweepRecord

AXIS = "budget/sampled_tokens"
SUITES = ("probe", "heldout_training", "heldout", "downstream")
KL = "eval/heldout_training/kl_initial"
COLUMNS = ["level", "arm", "seed", "step", "suite", "question", "difficulty", "n", "correct"]


def draw(kind: str, data: SweepData) -> Drawn | str:
    """One of the figures, or why there is none."""
    drawing = {"ranks": ranks.draw_ranks, "decomposition": decomposition.draw_decomposition}[kind]
    return drawing(data, final_values(data))


def words(figure: Figure) -> str:
    return " ".join(text.get_text().replace("\n", " ") for text in figure.findobj(Text))


def said(drawn: Drawn) -> str:
    """All words of a figure and of its caption."""
    return f"{words(drawn.figure)} {drawn.caption}"


def ten_steps(
    rewards: tuple[float, float], suites: Mapping[str, tuple[float, float]], kl: float | None = None
) -> list[dict[str, float]]:
    """Ten steps of 1000 tokens: reward and every suite at the start (step 1, step 0) and at the end."""
    rows = [{AXIS: 1000.0 * step} for step in range(11)]
    for step, row in enumerate(rows[1:], start=1):
        row["reward/outcome"] = rewards[0] if step == 1 else rewards[1]
    for step, at in ((0, 0), (10, 1)):
        rows[step] |= {f"eval/{suite}/accuracy": values[at] for suite, values in suites.items()}
        if kl is not None:
            rows[step][KL] = kl * at
    return rows


def sweep(
    runs: Mapping[tuple[str, int], Sequence[Mapping[str, float]]], answers: Sequence[pd.DataFrame] = ()
) -> SweepData:
    """One level of finished runs; `runs` maps (arm, seed) to what each step logged."""
    table = [{"level": "", "arm": arm, "seed": seed, "status": "done", "collapsed": False} for arm, seed in runs]
    points = [
        {"level": "", "arm": arm, "seed": seed, "step": step, **row}
        for (arm, seed), rows in runs.items()
        for step, row in enumerate(rows)
    ]
    record = SweepRecord("hand", "key", None, [], [], None, None, [])
    kept = pd.concat(answers, ignore_index=True) if answers else pd.DataFrame(columns=COLUMNS)
    return SweepData(record, None, pd.DataFrame(table), pd.DataFrame(points), kept, "memory")


def answered(arm: str, seed: int, step: int, correct: Sequence[int], n: int) -> pd.DataFrame:
    fixed = {"level": "", "arm": arm, "seed": seed, "step": step, "suite": "downstream", "difficulty": 1, "n": n}
    return pd.DataFrame({"question": np.arange(len(correct)), "correct": correct}).assign(**fixed)


PLANTED = Planted(
    tricks=("helps", "hurts"),
    seeds=(0, 1, 2),
    training={"helps": 0.08, "hurts": 0.05},
    downstream={"helps": 0.05, "hurts": -0.03},
    falls={"+hurts": 0.2},
    collapse={("+helps", 1): 0.4},
    questions=48,
    steps=40,
    every=5,
    samples=4,
)


@pytest.fixture(scope="module")
def planted() -> SweepData:
    return synthetic_sweep(PLANTED)


@pytest.fixture(scope="module")
def crowded() -> SweepData:
    """Eighteen arms of which most are about as good, with long names, one run each of three seeds."""
    place = np.random.default_rng(3)
    names = [f"reinforce_pp_baseline_{index}"[: 6 + index] for index in range(18)]
    runs = {
        (name, seed): ten_steps((0.3, reward + 0.02 * seed), dict.fromkeys(SUITES, (0.3, end)), kl=1.0)
        for name, (reward, end) in zip(names, place.normal([0.64, 0.36], [0.005, 0.02], (18, 2)))
        for seed in range(3)
    }
    return sweep(runs)


# --- ranks --------------------------------------------------------------------------------------------------


def three_arms() -> SweepData:
    """Final reward and accuracy, seed by seed: a (.5 .5, .4 .4), b (.7 .7, .2 .2), c (.6 .6, .4 .4)."""
    ends = {"a": (0.5, 0.4), "b": (0.7, 0.2), "c": (0.6, 0.4)}
    return sweep(
        {
            (arm, seed): ten_steps((0.3, reward), {"downstream": (0.1, accuracy)})
            for arm, (reward, accuracy) in ends.items()
            for seed in (0, 1)
        }
    )


def test_ranks_regret_and_tau_by_hand() -> None:
    numbers = draw("ranks", three_arms()).numbers
    means = numbers[numbers["part"] == "mean"].set_index("arm")
    assert means["reward_rank"].to_dict() == {"a": 3, "b": 1, "c": 2}
    assert means["downstream_rank"].to_dict() == {"a": 1, "b": 3, "c": 1}  # a and c are equal
    assert means.loc["b", ["reward", "downstream"]].tolist() == pytest.approx([70, 20])
    whole = numbers[numbers["arm"] == ""].set_index("part")
    # b is best by reward, a by accuracy, in either half: .4 - .2 = 20 pp, twice the same.
    assert whole.loc["regret", "value"] == pytest.approx(20) and np.isnan(whole.loc["regret", "low"])
    # Pairs: ab falls, ac is tied in accuracy, bc falls: (0 - 2) / sqrt(3 * 2).
    assert whole.loc["tau", "value"] == pytest.approx(-2 / math.sqrt(6), abs=1e-6)
    assert np.isnan(whole.loc["tau", "low"])  # no interval of it holds


def test_the_drawn_ranks_are_those_of_the_csv() -> None:
    drawn = draw("ranks", three_arms())
    means = drawn.numbers[drawn.numbers["part"] == "mean"].set_index("arm")
    scatter, slopes = drawn.figure.axes
    marks = {
        line.get_label(): line.get_xydata()[0].tolist() for line in scatter.lines if line.get_label() in means.index
    }
    assert marks == {arm: means.loc[arm, ["reward", "downstream"]].tolist() for arm in means.index}
    # Equals stand one below the other in the order of the arms, and say that they are equal.
    heights = {line.get_label(): list(line.get_ydata()) for line in slopes.lines}
    assert heights == {"a": [2, 0], "b": [0, 2], "c": [1, 1]}
    assert sum("1=" in text.get_text() for text in slopes.child_axes[0].get_yticklabels()) == 2
    shown = words(drawn.figure)
    assert "top-1 regret +20.0 pp" in shown and "one arm is best by both" not in shown and "tau_b -0.82" in shown
    assert "n = 2 seeds" in shown


def test_a_collapsed_run_is_ranked_by_the_declared_rule(planted: SweepData) -> None:
    numbers = draw("ranks", planted).numbers
    assert set(numbers["seed"].dropna()) == {0, 1, 2}
    own = numbers[(numbers["arm"] == "+helps") & (numbers["seed"] == 1)].iloc[0]
    assert (own["reward"], own["downstream"]) == (0.0, 0.0)


def test_only_seeds_that_every_arm_has_are_ranked(planted: SweepData) -> None:
    lacking = (planted.points["arm"] == "+helps") & (planted.points["seed"] == 2)
    changed = replace(planted, points=planted.points.assign(**{DOWNSTREAM: planted.points[DOWNSTREAM].mask(lacking)}))
    numbers = draw("ranks", changed).numbers
    assert set(numbers["seed"].dropna()) == {0, 1}
    assert "Only seeds that every arm has: 2 of 3, without 2." in said(draw("ranks", changed))


def test_one_seed_has_ranks_but_no_regret() -> None:
    runs = {("a", 0): ten_steps((0.3, 0.5), {"downstream": (0.1, 0.4)})}
    runs["b", 0] = ten_steps((0.3, 0.6), {"downstream": (0.1, 0.3)})
    shown = words(draw("ranks", sweep(runs)).figure)
    assert "top-1 regret: needs two seeds" in shown and "n = 1 seed, Kendall's tau_b -1.00" in shown


def test_one_arm_that_is_best_by_both_has_no_regret() -> None:
    data = sweep(
        {
            (arm, seed): ten_steps((0.3, end), {"downstream": (0.1, end / 2)})
            for arm, end in (("a", 0.5), ("b", 0.7))
            for seed in (0, 1)
        }
    )
    assert "top-1 regret +0.0 pp, one arm is best by both" in words(draw("ranks", data).figure)


# --- the gap's parts ----------------------------------------------------------------------------------------


def test_the_parts_by_hand_add_up_to_the_gap() -> None:
    # Changes: reward .4, probe .3, training protocol .25, evaluation protocol .15, downstream -.05.
    ends = {"probe": (0.3, 0.6), "heldout_training": (0.3, 0.55), "heldout": (0.2, 0.35), "downstream": (0.2, 0.15)}
    drawn = draw("decomposition", sweep({("a", seed): ten_steps((0.3, 0.7), ends) for seed in (0, 1)}))
    numbers = drawn.numbers.set_index("part")
    expected = {"prompt_mix": 10, "memorisation": 5, "protocol": 10, "shift": 20, "total": 45}
    assert numbers["value"].to_dict() == pytest.approx(expected)
    assert numbers["start"].to_dict() == pytest.approx(
        {"prompt_mix": 0, "memorisation": 10, "protocol": 15, "shift": 25, "total": 0}
    )
    axes = drawn.figure.axes[0]
    bars = np.array([(bar.get_x(), bar.get_width()) for bar in axes.patches])
    np.testing.assert_allclose(bars, [(0, 10), (10, 5), (15, 10), (25, 20)], atol=1e-6)
    assert [line.get_xdata()[0] for line in axes.lines if line.get_label() == "total"] == pytest.approx([45])
    assert "n = 2" in words(drawn.figure) and "(pp)" in words(drawn.figure)


def test_a_negative_part_goes_back_and_intervals_have_lanes_of_their_own(planted: SweepData) -> None:
    ends = {"probe": (0.3, 0.8), "heldout_training": (0.3, 0.55), "heldout": (0.2, 0.35), "downstream": (0.2, 0.15)}
    numbers = draw("decomposition", sweep({("a", 0): ten_steps((0.3, 0.7), ends)})).numbers.set_index("part")
    # .4 - .5 = -10 pp, then .5 - .25 = +25 pp from there.
    assert numbers.loc["prompt_mix", "value"] == pytest.approx(-10)
    assert numbers.loc["memorisation", ["start", "value"]].tolist() == pytest.approx([-10, 25])
    assert math.isnan(numbers.loc["shift", "low"]) and numbers.loc["shift", "n"] == 1
    drawn = draw("decomposition", planted)
    own = drawn.numbers[drawn.numbers["low"].notna()]  # of `+helps` two runs are left
    assert {"base", "full"} <= set(own["arm"]) and "+helps" not in set(own["arm"])
    intervals = set(zip((own["start"] + own["low"]).round(6), (own["start"] + own["high"]).round(6)))
    segments = [segment for bars in drawn.figure.axes[0].collections for segment in bars.get_segments()]
    lines = [segment for segment in segments if len(segment) and tuple(np.round(segment[:, 0], 6)) in intervals]
    assert len(lines) == len(own) and len({segment[0, 1] for segment in lines}) == len(own)


@pytest.mark.extended
def test_intervals_that_would_hide_the_bars_are_cut_and_said_to_be() -> None:
    def runs(spread: float) -> SweepData:
        ends = dict.fromkeys(SUITES, (0.3, 0.4))
        signs = {0: -1, 1: 0, 2: 1}
        return sweep({("a", seed): ten_steps((0.3, 0.6 + spread * sign), ends) for seed, sign in signs.items()})

    narrow, wide = (draw("decomposition", runs(spread)).figure for spread in (0.001, 0.15))
    assert "cut at the edge" not in words(narrow) and "cut at the edge" in words(wide)
    low, high = wide.axes[0].get_xlim()
    assert 20 / (high - low) > 0.4  # of the width, what the bars take


# --- which arms are distinguishable -------------------------------------------------------------------------


def four_bases(ends: Mapping[str, float], scatter: float = 0.02) -> SweepData:
    """Arms with these final accuracies, two runs on each of four base models, which deviate by 10 points."""
    place = np.random.default_rng(5)
    level = 0.1 * place.standard_normal(4)
    runs = {}
    for arm, end in ends.items():
        for seed in range(8):
            value = float(end + level[seed % 4] + scatter * place.standard_normal())
            runs[arm, seed] = ten_steps((0.3, value), dict.fromkeys(SUITES, (0.3, value)))
    data = sweep(runs)
    return replace(data, runs=data.runs.assign(base=data.runs["seed"] % 4))


def test_arms_are_distinguishable_where_their_bars_do_not_overlap() -> None:
    data = four_bases({"first": 0.5, "second": 0.51, "last": 0.3, "best": 0.7})
    drawn = all_pairs.draw_all_pairs(data, final_values(data))
    means = drawn.numbers[drawn.numbers["part"] == "mean"].set_index("arm")
    assert means.index.tolist()[0] == "best" and means.index.tolist()[-1] == "last"
    assert means.loc["best", ["rank", "best", "worst"]].tolist() == [1, 1, 1]
    assert means.loc["last", ["rank", "best", "worst"]].tolist() == [4, 4, 4]
    assert set(means.loc["first", ["best", "worst"]]) == {2, 3}
    pairs = drawn.numbers[drawn.numbers["part"] == "pair"]
    for row in pairs.itertuples():
        meet = means.loc[row.arm, "low"] <= means.loc[row.other, "high"]
        assert row.distinguishable != meet and (row.p < 0.05) == row.distinguishable, (row.arm, row.other)
    assert "5 of 6 pairs distinguishable" in words(drawn.figure) and "not reported" not in words(drawn.figure)


def test_an_arm_that_scatters_or_collapses_in_some_runs_is_hollow_and_not_reported() -> None:
    data = four_bases({"first": 0.5, "second": 0.51, "split": 0.6, "best": 0.7})
    points = data.points.copy()
    low = (points["arm"] == "split") & points["seed"].isin([1, 3, 4]) & (points["step"] == 10)
    suites = [f"eval/{suite}/accuracy" for suite in SUITES]
    points.loc[low, suites] -= 0.3
    points.loc[(points["arm"] == "second") & (points["seed"] == 6) & (points["step"] == 10), suites] = 0.1
    changed = replace(data, points=points)
    drawn = all_pairs.draw_all_pairs(changed, final_values(changed))
    means = drawn.numbers[drawn.numbers["part"] == "mean"].set_index("arm")
    assert means.loc["split", ["best", "worst"]].tolist() == [1, 4] and math.isnan(means.loc["split", "low"])
    reason = "Not reported: second: collapsed runs in 1 of 8; split: scatters more than the others between seeds."
    assert reason in drawn.caption and "2 arms not reported" in words(drawn.figure)
    mark = next(line for line in drawn.figure.axes[0].lines if line.get_label() == "split")
    assert mark.get_markerfacecolor() == "white"


def test_an_arm_that_is_not_reported_does_not_stretch_the_axis() -> None:
    data = four_bases({"first": 0.5, "second": 0.51, "third": 0.52, "far": 0.3})
    points, suites = data.points.copy(), [f"eval/{suite}/accuracy" for suite in SUITES]
    points.loc[(points["arm"] == "far") & points["seed"].isin([1, 3, 4]) & (points["step"] == 10), suites] -= 0.2
    changed = replace(data, points=points)
    drawn = all_pairs.draw_all_pairs(changed, final_values(changed))
    means = drawn.numbers[drawn.numbers["part"] == "mean"].set_index("arm")
    assert means.loc["far", "not_reported"] and means.loc["far", "side"] == ""
    axes = drawn.figure.axes[0]
    low, high = axes.get_xlim()
    assert 100 * means.loc["far", "value"] < low < 100 * means["low"].min() and high > 100 * means["high"].max()
    mark = next(line for line in axes.lines if line.get_label() == "far")
    assert mark.get_marker() == "<" and low < mark.get_xdata()[0] < high
    assert [text.get_text() for text in axes.texts] == [f"{100 * means.loc['far', 'value']:.3g}"]
    assert "Arrow: such an arm's mean lies beyond the axis" in drawn.caption


@pytest.mark.extended
def test_thirty_one_arms_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"reinforce_pp_baseline_{index}"[: 5 + index % 19] + f"{index}" for index in range(31)]
    data = four_bases(dict(zip(names, np.linspace(0.3, 0.6, 31))))
    drawn = all_pairs.draw_all_pairs(data, final_values(data))
    assert overlapping(drawn.figure, monkeypatch) == []
    assert drawn.figure.get_size_inches()[0] == 8 and drawn.size[1] < 9
    pairs = drawn.numbers[drawn.numbers["part"] == "pair"]
    assert len(pairs) == 465 and f"{pairs['distinguishable'].sum()} of 465 pairs distinguishable" in words(drawn.figure)


def test_why_all_pairs_cannot_be_compared() -> None:
    two = four_bases({"first": 0.5, "second": 0.51})
    data = four_bases({"first": 0.5, "second": 0.51, "third": 0.3})
    alone = replace(data, runs=data.runs.assign(base=0))
    for case, reason in (
        (two, "no level has three arms on two base models"),
        (alone, "all runs are of one base model"),
    ):
        assert all_pairs.draw_all_pairs(case, final_values(case)).startswith(reason)


def test_names_are_placed_by_steps_and_not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """adjustText stops after a second unless it is given a number of steps, and figures would differ by machine."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(style, "adjust_text", lambda texts, **settings: given.update(settings))
    style.place_names(Figure().subplots(), [(0.0, 0.0, "arm", "black")], pd.DataFrame({"x": [0.0], "y": [0.0]}))
    assert given["iter_lim"] > 0 and given.get("time_lim") is None


# --- every figure -------------------------------------------------------------------------------------------


def test_figures_have_names_and_words_of_their_own_in_a_fixed_order() -> None:
    assert len({kind.suffix for kind in FIGURES}) == len(FIGURES)
    assert [kind.order for kind in FIGURES] == list(range(1, len(FIGURES) + 1))
    assert all(kind.title and kind.how_to_read.endswith(".") for kind in FIGURES)


def test_a_new_module_with_a_figure_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(ranks.__file__).read_text().replace('"ranks",', '"rank_copy",').replace("order=6", "order=100")
    (tmp_path / "rank_copy.py").write_text(source)
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    assert [kind.suffix for kind in registry.discovered()] == [*(kind.suffix for kind in FIGURES), "rank_copy"]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.suffix or "first")
def test_a_figure_is_drawn_or_says_why_not(kind: FigureKind) -> None:
    """On a planted sweep, and on the same one with nothing logged but a reward."""
    truths = Planted(tricks=("helps", "hurts"), seeds=(0, 1, 2), bases=3, steps=20, every=4, questions=8)
    planted = synthetic_sweep(truths)
    logged = ["level", "arm", "seed", "step", AXIS, "reward/outcome"]
    bare = replace(planted, points=planted.points[logged], answers=planted.answers.iloc[:0])
    found = 0
    for data in (planted, bare):
        finals = final_values(data)
        drawn = kind.draw(data, finals)
        if isinstance(drawn, str):
            assert drawn and not drawn.endswith(".")
        else:
            found += 1
            assert drawn.name == kind.name(data.record.name) and len(drawn.numbers) and drawn.bands
            assert drawn.numbers.equals(kind.draw(data, finals).numbers), "the same data give the same numbers"
    own_tests = ("dose_response", "proxy", "sharpness")  # these ask for another design
    assert found or kind.suffix in own_tests


def test_five_figures_are_drawn_with_those_of_the_page_or_those_that_are_named() -> None:
    data = synthetic_sweep(Planted(tricks=("helps",), seeds=(0, 1), steps=12, every=4, questions=8))
    finals = final_values(data)
    shown = ("synthetic_decomposition", "other_dose_response", "synthetic_effects")
    page = " ".join(f"![a](figures/{name}.png)" for name in shown)
    five = ["curves", "effects", "forest", "ranks", "step_metrics"]
    assert default_figures(data) == five
    assert default_figures(data, page) == [*five, "decomposition"], "other_dose_response is of another sweep"
    drawn, missing = draw_all(data, finals, ["decomposition", "dose_response"])
    assert [figure.name for figure in drawn] == ["synthetic_decomposition"]
    assert list(missing) == ["synthetic_dose_response"]
    with pytest.raises(ValueError, match="no figure is called frontier: choose from proxy, curves, "):
        draw_all(data, finals, ["frontier"])


def test_the_figure_of_the_documentation_is_one(tmp_path: Path) -> None:
    """The block under "Draw one more figure", as a module of its own."""
    readme = (Path(figures.__file__).parents[3] / "analysis" / "README.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", readme, flags=re.S) if "FIGURE" in block)
    made: dict[str, Any] = {}
    exec(block, made)
    kind: FigureKind = made["FIGURE"]
    planted = synthetic_sweep(Planted(tricks=("helps",), seeds=(0, 1), steps=12, every=4, questions=8))
    finals = final_values(planted)
    drawn = kind.draw(planted, finals)
    assert drawn.name == kind.name("synthetic") == "synthetic_lengths" and set(drawn.numbers["arm"]) == set(
        planted.arms
    )
    assert [path.suffix for path in save(drawn, tmp_path, {})] == [".svg", ".png", ".csv", ".json"]
    bare = replace(planted, points=planted.points.drop(columns="rollout/length"))
    assert kind.draw(bare, final_values(bare)) == "rollout/length not logged"


# --- what cannot be drawn -----------------------------------------------------------------------------------


def test_what_is_missing_is_said_in_one_sentence() -> None:
    everything = dict.fromkeys(SUITES, (0.3, 0.5))
    alone = sweep({("a", 0): ten_steps((0.3, 0.6), everything)})
    apart = sweep({(arm, seed): ten_steps((0.3, 0.6), everything) for arm, seed in (("a", 0), ("b", 1))})
    no_probe = sweep({("a", 0): ten_steps((0.3, 0.6), {"downstream": (0.3, 0.5)})})
    cases: list[tuple[str, SweepData, str]] = [
        ("ranks", alone, "fewer than two arms have a final training reward and downstream accuracy"),
        ("ranks", apart, "no seed has both of every arm"),
    ]
    for kind, data, reason in cases:
        assert draw(kind, data) == reason
    absent = [f"eval/{suite}/accuracy" for suite in SUITES[:3]]
    assert draw("decomposition", no_probe) == f"{' and '.join(absent)} were not logged"


def test_a_sweep_without_evaluations_has_none_of_the_figures() -> None:
    data = sweep({(arm, 0): ten_steps((0.3, 0.6), {}) for arm in "ab"})
    reasons = {draw(kind, data) for kind in ("ranks", "decomposition")}
    assert reasons == {"no finished run was evaluated up to the common budget", f"{DOWNSTREAM} was not logged"}


# --- how they look ------------------------------------------------------------------------------------------


def overlapping(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Pairs of texts that are really drawn and cover each other, and texts that leave the figure."""
    shown: list[Text] = []
    plain: Callable[..., None] = Text.draw

    def draw_and_note(text: Text, renderer: object, *others: object, **named: object) -> None:
        if text.get_visible() and text.get_text().strip():
            shown.append(text)
        plain(text, renderer, *others, **named)

    with house_style("test"), monkeypatch.context() as patch:
        patch.setattr(Text, "draw", draw_and_note)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    extents = [(text.get_text(), Text.get_window_extent(text, canvas.get_renderer())) for text in shown]
    found = [(name, "the edge") for name, box in extents if not _within(box, figure)]
    for (name, one), (other, two) in itertools.combinations(extents, 2):
        # A pixel of the space around letters may be shared.
        deep = min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0)
        if min(deep) > 1.5:
            found.append((name, other))
    return found


def _within(box: object, figure: Figure) -> bool:
    width, height = figure.bbox.size
    return bool(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["ranks", "decomposition"])
def test_nothing_overlaps(kind: str, planted: SweepData, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(kind, planted)
    assert overlapping(drawn.figure, monkeypatch) == []
    assert drawn.figure.get_size_inches()[0] == 8


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ranks", "decomposition"])
def test_eighteen_arms_are_readable_in_a_small_file(
    kind: str, crowded: SweepData, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw(kind, crowded)
    assert overlapping(drawn.figure, monkeypatch) == []
    with house_style(drawn.name), io.BytesIO() as buffer:
        drawn.figure.savefig(buffer, format="svg", metadata={"Date": None})
        assert len(buffer.getvalue()) < 300_000


@pytest.mark.extended
def test_the_same_data_give_the_same_figure(planted: SweepData) -> None:
    for kind in ("ranks", "decomposition"):
        once, again = draw(kind, planted), draw(kind, planted)
        pd.testing.assert_frame_equal(once.numbers, again.numbers)
        assert words(once.figure) == words(again.figure)


def test_long_names_of_arms_are_broken_into_lines() -> None:
    data = three_arms()
    long = {arm: f"{arm},truncation=mask_after,reward_shaping=soft_overlong,updates=sixteen" for arm in "abc"}
    runs, points = (table.assign(arm=table["arm"].map(long)) for table in (data.runs, data.points))
    scatter, slopes = draw("ranks", replace(data, runs=runs, points=points)).figure.axes
    assert "b,truncation=mask_\nafter,reward_\n" in " ".join(text.get_text() for text in scatter.texts)
    assert "b,truncation=mask_after,\nreward_shaping=soft_\noverlong," in " ".join(
        text.get_text() for text in slopes.get_yticklabels()
    )


def test_outcomes_at_another_budget_are_drawn_there(planted: SweepData) -> None:
    finals: FinalValues = final_values(planted, "steps")
    assert "from step 0 to 40 steps" in decomposition.draw_decomposition(planted, finals).caption


@pytest.mark.extended
def test_the_colours_of_a_picture_are_those_of_its_drawing(tmp_path: Path) -> None:
    """In a figure whose green and blue marks are few, beside much grey text."""
    data = saved_data("two_families")
    drawn = draw_effects(data, final_values(data))
    assert drawn is not None
    whole = io.BytesIO()
    drawn.write(whole, "png", DPI)
    save(drawn, tmp_path, {})
    with Image.open(whole) as asked, Image.open(tmp_path / f"{drawn.name}.png") as written:
        apart = np.abs(np.asarray(asked.convert("RGB"), dtype=int) - np.asarray(written.convert("RGB"), dtype=int))
    assert apart.max() <= 8


def test_step_metrics_of_many_levels_are_not_drawn_and_the_reason_says_so() -> None:
    """Eight levels left arms' names no room, and drawing failed."""
    data = synthetic_sweep(Planted(seeds=(0, 1), steps=8, every=4))
    finals = final_values(data)
    assert isinstance(step_metrics.draw_step_metrics(data, finals), Drawn)
    many = replace(finals, values=pd.concat([finals.values.assign(level=f"l{number}") for number in range(8)]))
    assert step_metrics.draw_step_metrics(data, many) == "8 levels do not fit side by side, 6 do"
