"""The notebooks run as scripts, on planted sweeps and on the saved numbers, and say what is true there."""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import math
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from declared_experiments import FOLDERS, declaration, saved_description
from notebook_tables import noise, one_trick, show
from planted_sweeps import Planted, synthetic_sweep, write_synthetic
from processes import python_path

from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues, final_values

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("sweep_overview", "reward_against_eval", "one_trick", "scaling", "noise_floor")
OVER_ALL = "gap_study"  # takes no sweep
SMALL = {"seeds": (0, 1, 2, 3), "steps": 48, "every": 4, "questions": 64, "rows": 64}
HELPS = Planted(tricks=("helps", "null"), training={"helps": 0.12}, downstream={"helps": 0.12}, **SMALL)
# Reward is gamed: training accuracy rises by .15, downstream accuracy turns over. The sigmoid is far from its end.
GAMES = Planted(
    tricks=("games", "null"),
    kind="add_one",
    training={"games": 0.15},
    falls={"+games": 0.25},
    midpoint=2.0,
    name="gamed",
    **SMALL,
)
BRACKETS = r"([+-]?[\d.]+)(?: pp)? \[([+-]?[\d.]+), ([+-]?[\d.]+)\]"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """printed("scaling", EXP="gamed") -> what the notebook prints as a script; each is run once."""
    runs, elsewhere = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cwd")
    for planted in (HELPS, GAMES):
        write_synthetic(planted, runs / planted.name)

    @cache
    def run(name: str, **environment: str) -> str:
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.chdir(elsewhere)
            chosen = {"EXP": "synthetic", "TRICK": ""} | environment
            for key, value in ({"RUNS": str(runs / chosen["EXP"])} | chosen).items():
                patch.setenv(key, value)
            runpy.run_path(str(script_of(name)), run_name="__main__")
        assert not list(elsewhere.iterdir()), "a notebook saves nothing"
        return said.getvalue()

    return run


def script_of(name: str) -> Path:
    """A notebook, or the script of a study that has a folder."""
    folder = ROOT / "analysis" / name
    return folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")


def line(text: str, start: str, *words: str) -> str:
    """The one line of a text that begins like this, blanks left aside, and has all these words."""
    lines = [line for line in text.splitlines() if line.strip().startswith(start)]
    (found,) = [line for line in lines if all(word in line for word in words)]
    return found


def interval(text: str) -> tuple[float, float, float]:
    """The first `mean [low, high]` of a line."""
    mean, low, high = re.search(BRACKETS, text).groups()
    return float(mean), float(low), float(high)


# --- on planted sweeps --------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_says_which_sweep_it_is_about(printed: Callable[..., str], name: str) -> None:
    said = printed(name)
    assert said.startswith("synthetic, from run folders, 16 finished runs.\nSYNTHETIC: are the planted effects found")
    assert "compared with base at 192,000 sampled tokens" in said  # 48 steps of 4,000
    assert "answers to single questions are here, samples of each: 2." in said


def test_the_overview_finds_the_planted_effect_and_no_other(printed: Callable[..., str]) -> None:
    said = printed("sweep_overview")
    assert "supported: +helps is above base on downstream accuracy (the metric that decides)" in said
    for context in ("added to base", "inside full"):
        _, low, high = interval(line(said, f"| helps | {context} |"))
        assert 0 < low < 0.12 < high
        _, low, high = interval(line(said, f"| null | {context} |"))
        assert low < 0 < high
    assert re.search(r"\+null +4 +4 +0", said)  # planned, finished, collapsed
    assert "Figure synthetic: " in said and "Figure synthetic_effects: " in said


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("trick,found", [("helps", True), ("null", False)])
def test_one_trick_alone_and_inside_the_whole(printed: Callable[..., str], trick: str, found: bool) -> None:
    effects, rest = printed("one_trick", TRICK=trick).split("Figure synthetic_forest")
    assert f"The trick: {trick}, one of helps, null." in effects
    assert "interaction: helps with null, beyond both added to base" in effects
    own = line(effects, "downstream accuracy")
    by_seed = rest.split("at equal steps")[0]
    # The first two columns; the mean of the four differences is the effect, but for the rounding of each to 0.1.
    for context, words in zip(("added to base", "inside full"), own.split(", p ")):
        mean, low, high = interval(words)
        assert (low > 0) is found and low < (12 if found else 0) < high
        singles = [float(value) for value in re.findall(r"([+-][\d.]+) pp", line(by_seed, context, "downstream"))]
        assert len(singles) == 4 and sum(singles) / 4 == pytest.approx(mean, abs=0.1)
    assert (" p < 0.001" in own or " p 0.0" in own) is found and own.split()[-1] == "4"  # pairs


@pytest.mark.extended
def test_one_trick_at_every_equal_budget_what_it_touched_and_what_seeds_would_find(printed: Callable[..., str]) -> None:
    said = printed("one_trick", TRICK="helps")
    effect = interval(line(said.split("Figure")[0], "downstream accuracy"))
    # All axes are spent alike in a synthetic sweep, so the effect is the same on all five.
    on_axes = line(said.split("at equal steps")[1].split("The sign")[0], "added to base")
    assert [tuple(map(float, found)) for found in re.findall(BRACKETS, on_axes)] == [effect] * 5
    assert "No metric counts what helps touches." in said and "Figure synthetic_step_metrics: " in said
    lengths = line(said, "response length, tokens")  # nothing was planted in them, and equal runs show no interval
    assert "+0 tokens, p 1.000" in lengths and "[" not in lengths
    found = line(said.split("finds now")[1], "added to base")
    now, *more = [float(value) for value in re.findall(r" ([\d.]+) pp", found.split("]")[1])]
    assert more == sorted(more, reverse=True) and more[0] > now > more[1]  # 3, 4, 5, 10, 20 and 40 seeds


@pytest.mark.extended
def test_reward_and_evaluation_part_where_that_was_planted(printed: Callable[..., str]) -> None:
    said = printed("reward_against_eval", EXP="gamed")
    gaps = {arm: interval(line(said.split("Figure")[0], f"{arm} ")) for arm in ("+games", "+null")}
    # Training gains .15 more than the control's, downstream accuracy falls by .25: the gap is .40 wider.
    assert 30 < gaps["+games"][0] - gaps["+null"][0] < 50
    part = said.split("onset after peak")[1]
    assert "not detected" in line(part.split("Figure")[0], "+null ")
    assert re.search(r"found in \d of 4 with a seed left out +\d", line(part.split("Figure")[0], "+games "))
    late = line(said.split("transfer slope late")[1].split("waterfall")[0], "+games ")
    assert re.findall(BRACKETS, late)[2][2].startswith("-")  # even the upper end: reward that costs accuracy
    shift = said.split("waterfall shift")[1].split("Figure")[0]
    assert float(re.findall(BRACKETS, line(shift, "+games "))[3][1]) > 20  # where it was planted
    assert interval(line(said.split("arm regret")[1], "all arms"))[0] > 5  # picking the arm by reward picks +games


def test_asymptotes_are_read_off_where_they_can_be(printed: Callable[..., str]) -> None:
    said = printed("scaling")
    # Held-out accuracy goes from .36 to .66 along a sigmoid with C_mid = X / 4 and B = 1.5, which is 1 at X: its
    # asymptote is .36 + .30 (1 + .25^1.5) = .6975, with the trick .36 + .42 * 1.125 = .8325.
    for arm, truth in (("base", 0.6975), ("+helps", 0.8325)):
        _, low, high = interval(line(said, f"{arm}: A = "))
        assert low < truth < high
    assert "A of +helps less that of base: " in said and "they differ; B is not compared" in said
    assert interval(line(said, "A of +null less that of base"))[1] < 0 < interval(line(said, "A of +null less"))[2]


def test_asymptotes_are_not_read_off_where_they_cannot_be(printed: Callable[..., str]) -> None:
    said = printed("scaling", EXP="gamed")
    assert re.search(r"^base: (asymptote not identified|no fit): ", said, flags=re.M)
    assert "cannot be compared: " in said and "they differ" not in said


def test_the_noise_floor_of_a_planted_sweep(printed: Callable[..., str]) -> None:
    said = printed("noise_floor")
    own, _, _ = interval(printed("sweep_overview").split("supported: +helps")[1])
    three = line(said.split("t over seeds")[1], "+helps ")
    seeds, crossed, bootstrap = [tuple(map(float, found)) for found in re.findall(BRACKETS, three)]
    assert seeds[0] == crossed[0] == bootstrap[0] == pytest.approx(100 * own, abs=0.05)
    assert crossed[1] < 12 < crossed[2]
    questions = line(said.split("questions for 1 pp")[1].split("t over seeds")[0], "+helps ").split()
    assert questions[1:3] == ["64", "2"]
    one, two, three = (int(number.replace(",", "")) for number in questions[-3:])
    assert one / 4 == pytest.approx(two, abs=1) and one / 9 == pytest.approx(three, abs=1)  # as 1 / effect^2


def test_a_trick_that_is_not_there_is_named(printed: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="has no trick 'helsp': set TRICK to one of helps, null"):
        printed("one_trick", TRICK="helsp")


# --- on saved numbers ---------------------------------------------------------------------------------------


@pytest.mark.extended
def test_saved_numbers_without_runs_and_without_answers(
    printed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "experiments" / "recipes" / "data"
    folder.mkdir(parents=True)
    shutil.copy(declaration("recipes"), folder.parent)
    shutil.copy(FOLDERS["recipes"] / "data" / "recipes.parquet", folder)
    # Earlier versions saved neither answers nor digests.
    described = saved_description("recipes")
    del described["sha256"]
    (folder / "recipes.json.xz").write_bytes(lzma.compress(json.dumps(described).encode()))
    monkeypatch.setattr(show, "REPOSITORY", tmp_path)
    runs = pd.read_parquet(folder / "recipes.parquet").groupby(["arm", "level", "seed"]).ngroups
    said = printed("noise_floor", EXP="recipes", RUNS="nowhere")
    assert said.startswith(f"recipes, from saved data, {runs} finished runs.")
    assert show.NO_ANSWERS in said and "t over seeds" not in said
    assert "Answers to single downstream questions were not saved" in said
    assert re.search(r"downstream accuracy +[\d.]+ \[", said)


@pytest.mark.extended
def test_the_saved_sweeps_say_nothing_of_asymptotes_they_do_not_show(printed: Callable[..., str]) -> None:
    said = printed("scaling", EXP="overlong", RUNS="nowhere")
    assert said.startswith("overlong, from saved data, 50 finished runs.")
    assert len(re.findall(r"^\w+ [\w+]+: (?:asymptote not identified|no fit|A = )", said, flags=re.M)) == 10
    assert "asymptote not identified" in said or "no fit" in said


@pytest.mark.extended
def test_when_reward_misled_over_all_saved_sweeps(printed: Callable[..., str]) -> None:
    said = printed(OVER_ALL)
    assert re.match(r"\d+ sweeps: batch_size, batching, .*\.\n\d+ runs on \d+ base models, \d+ further entries", said)
    assert "Figure gap: " in said
    assert "reward down, downstream up" in line(said, "batching: one_update")  # comparable, one update a batch
    assert "another training grader" in line(said, "negative_controls: inverted", "reward up, downstream down")
    for group in ("controls", "other arms"):
        assert re.search(r"\d+ of \d+ \[[\d.]+%, [\d.]+%\], on \d+ of \d+ bases", line(said, group, " bases"))
    assert interval(line(said, "KL from the start rises"))[1] > 0.5 > interval(line(said, "entropy falls"))[2]
    assert "gain not surely above 0" in line(said, "kept_cache rate_4e-4", "controls")
    assert re.search(r"Share of the budget after the best checkpoint, over base models: 0\.\d+ \[", said)


# --- the numbers of the noise floor, by hand ----------------------------------------------------------------


def outcome_of(values: dict[str, list[float]]) -> FinalValues:
    rows = [
        {"level": "", "arm": arm, "seed": seed, "collapsed": False, "stopped": False, DOWNSTREAM: value}
        for arm, own in values.items()
        for seed, value in enumerate(own)
    ]
    return FinalValues("sampled_tokens", 1000.0, pd.DataFrame(rows))


def test_seed_noise_by_hand() -> None:
    data = synthetic_sweep(Planted(tricks=("t",), kind="add_one", steps=4, every=2, questions=2))
    (found,) = noise.seed_noise(data, outcome_of({"base": [0.50, 0.52, 0.54], "+t": [0.51, 0.55, 0.53]}), [DOWNSTREAM])
    # In points: 50 52 54 and 51 55 53, both of variance 4; differences 1 3 -1 of variance 4, sd 2; so the arms'
    # correlation is 1 - 4 / (2 * 4) = .5. The deviation of a difference has (3 - 1)(2 - 1) = 2 degrees of freedom.
    assert (found.control.mean, found.pooled.mean, found.paired.mean) == pytest.approx((2, 2, 2))
    assert found.correlation == pytest.approx(0.5) and (found.arms, found.seeds, found.paired.n) == (2, 3, 3)
    # 80% power with 3 pairs: 3.26 times sd 2; the effect that 3 seeds find needs 3 seeds.
    (three,) = noise.detectable([found], [3])["paired"]
    assert three == pytest.approx(6.52, abs=0.02)
    assert noise.seeds_for([found], [three])["paired"].tolist() == [3]


def test_seeds_that_are_missing_or_do_not_differ_plan_nothing() -> None:
    data = synthetic_sweep(Planted(tricks=("t",), kind="add_one", steps=4, every=2, questions=2))
    for values in ({"base": [0.5], "+t": [0.6]}, {"base": [0.5, 0.6]}, {"base": [0.5, 0.5], "+t": [0.5, 0.5]}):
        (found,) = noise.seed_noise(data, outcome_of(values), [DOWNSTREAM])
        assert not found.known and noise.detectable([found]).empty and noise.seeds_for([found]).empty


def asked(rows: list[list[float]], samples: int = 2, luck: float = 0.125) -> noise.Asked:
    table = pd.DataFrame(rows, dtype=float)
    return noise.Asked(table, table, samples, luck)


def test_question_noise_by_hand() -> None:
    data = synthetic_sweep(Planted(tricks=("t",), kind="add_one", steps=4, every=2, questions=4))
    found = {("", "base"): asked([[1, 0, 1, 0]]), ("", "+t"): asked([[1, 1, 1, 0]])}
    base, trick = noise.question_noise(data, found, [10]).to_dict("records")
    # 1 0 1 0: squares about the mean sum to 1, SE = sqrt(1 / (4 * 3)). Luck: sqrt(.125 / 2 samples / 4 questions).
    assert base["run"] == pytest.approx(100 / math.sqrt(12)) and base["sampling"] == pytest.approx(12.5)
    # Differences 0 1 0 0: squares sum to .75, SE = sqrt(.75 / 12) = .25, variance .25: 7.849 * .25 / .1^2 = 196.2.
    assert trick["difference"] == pytest.approx(25) and trick["questions for 10 pp"] == 197
    assert pd.isna(base["questions for 10 pp"])


def test_three_intervals_by_hand() -> None:
    data = synthetic_sweep(Planted(tricks=("t",), kind="add_one", steps=4, every=2, questions=4))
    found = {("", "base"): asked([[0, 0]] * 3), ("", "+t"): asked([[1, 0]] * 3)}
    (row,) = noise.three_intervals(data, found, np.random.default_rng(0)).to_dict("records")
    # All seeds gain half a share: no scatter over seeds at all, and the whole of it over the two questions.
    assert row["t over seeds"] == "+50.00", "no interval without width"
    assert row["crossed bootstrap"] == "+50.00 [+0.00, +100.00]"
    assert interval(row["crossed t"])[1] < 0 and math.isnan(row["width"])
    one = {("", "base"): asked([[0, 0]]), ("", "+t"): asked([[1, 0]])}
    assert noise.three_intervals(data, one, np.random.default_rng(0)).empty


def test_the_luck_of_drawing_answers_is_counted_from_the_answers() -> None:
    planted = Planted(tricks=("t",), kind="add_one", seeds=(0, 1), steps=8, every=4, questions=32)
    data = synthetic_sweep(planted)
    found = noise.asked(data, final_values(data), "downstream")
    rows = data.answers.query("arm == '+t' and suite == 'downstream' and step == 8")
    # With 2 samples, c (2 - c) / (2 * 1) is 1/2 where one of both is right, and 0 elsewhere.
    assert found["", "+t"].answer_variance == pytest.approx((rows["correct"] == 1).mean() / 2)
    assert found["", "+t"].last.to_numpy().mean() == pytest.approx(rows["correct"].sum() / rows["n"].sum())


# --- showing ------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_notebook_shows_figures_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    fake = SimpleNamespace(
        display=shown.append,
        Image=lambda data, width, alt: ("image", data, width, alt),
        HTML=lambda text: ("html", text),
        Markdown=lambda text: ("markdown", text),
    )
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: "a kernel", display=fake, version_info=(9, 0))
    )
    data = synthetic_sweep(HELPS)
    finals = final_values(data)
    show.show_table(show.finished_table(data, finals))
    show.show_text("*so*")
    show.show_figure(one_trick.step_metrics_of(data, finals, "helps"))
    (_, table), markdown, (kind, image, width, words) = shown
    assert "<td>+helps</td>" in table and "<th>level</th>" not in table  # the sweep has one level
    assert markdown == ("markdown", "*so*")
    assert (
        kind == "image"
        and image.startswith(b"\x89PNG")
        and width > 500
        and words.startswith("synthetic_step_metrics: ")
    )


def test_a_script_says_why_there_is_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    show.show_figure("KL was not logged")
    assert capsys.readouterr().out == "No figure: KL was not logged.\n\n"


def test_collapsed_and_unfinished_runs_are_counted() -> None:
    data = synthetic_sweep(
        Planted(tricks=("t",), kind="add_one", seeds=(0, 1), steps=8, every=4, collapse={("+t", 1): 0.5})
    )
    table = show.finished_table(data, final_values(data))
    assert table["finished"].tolist() == [2, 1] and table["collapsed"].tolist() == [0, 1]
    assert table["others"].tolist() == ["", ""]  # a collapsed run is told of once


# --- the files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*NOTEBOOKS, OVER_ALL))
def test_notebooks_are_prose_and_calls(name: str) -> None:
    text = script_of(name).read_text()
    assert text.startswith("# %% [markdown]\n# # ") and text.count("# %%\n") >= 4
    assert len(text.splitlines()) <= 112
    assert not re.search(r"matplotlib|seaborn|savefig|to_csv|def ", text)


def test_make_executes_every_notebook() -> None:
    planned = subprocess.run(["make", "-n", "notebooks"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (named,) = re.findall(r"for name in (.*); do", planned)
    assert sorted(named.split()) == sorted(NOTEBOOKS)


@pytest.mark.extended
@pytest.mark.needs("jupytext", "nbclient", "ipykernel")
def test_jupyter_executes_a_notebook(
    printed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make test-all` does, which installs the extra `notebooks`: the same text as from the script, and figures."""
    import jupytext
    import nbclient

    write_synthetic(HELPS, tmp_path)
    monkeypatch.setenv("EXP", "synthetic")
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT / "analysis"))
    notebook = jupytext.read(ROOT / "analysis" / "sweep_overview.py", fmt="py:percent")
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    effect = "supported: +helps is above base on downstream accuracy"
    assert line(said, effect) == line(printed("sweep_overview"), effect)
    assert [output for output in outputs if "image/png" in output.get("data", {})]
