"""An ablation in one line of a shell: its arms, what it refuses, what it leaves behind, and how it ends."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import PATIENCE
from sweep_processes import WORLD, finished, multirun

from grpo_lab.analysis.build import build, build_report
from grpo_lab.analysis.effects.arms import arms_table
from grpo_lab.analysis.effects.contrast_plan import planned_contrasts
from grpo_lab.analysis.figures.curves import curve_numbers
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.config.additions import as_settings, as_typed, is_ablation
from grpo_lab.config.design import Kind, read_design
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.rules import IncompatibleRun
from grpo_lab.sweeps.ablation import exploratory
from grpo_lab.sweeps.planned_runs import PlannedRun, compose_runs, plan_runs, refuse_no_op_arms, sweep_name
from grpo_lab.sweeps.status import runs_of_sweep
from grpo_lab.tracking.sweep_record import read_sweep

ADD = "add=[surrogate=ppo_higher,aggregation=token_mean]"
SHORT = [*WORLD, "budget.amount=3"]


def additions_of(word: str) -> tuple[str, list]:
    """add or leave_one_out, and its additions, as Hydra hands them to the sweeper."""
    (setting,) = as_settings([word])
    name = re.fullmatch(r"hydra\.sweeper\.(\w+)=.*", setting)[1]
    return name, compose_hydra(setting)[name]


def compose_hydra(setting: str) -> dict:
    """Hydra's own configuration of the sweeper with this override."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from grpo_lab.config.folders import conf_folder

    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", [setting], return_hydra_config=True)
    return OmegaConf.to_container(config.hydra.sweeper)


def declared(word: str, *typed: str) -> tuple[dict, list[str]]:
    """The entries of the design that a command line makes, and the words that are left."""
    return exploratory(*additions_of(word), typed, compose_config(["world=tiny"]))


@pytest.fixture
def runs_of(compose: Callable, tmp_path: Path) -> Callable[..., list[PlannedRun]]:
    """runs_of(word, ...) -> the checked runs of an ablation, with runs in tmp_path."""

    def make(word: str, *typed: str) -> list[PlannedRun]:
        entries, left = declared(word, *WORLD, *typed, f"runs_dir={tmp_path}")
        design = read_design(entries)
        runs = compose_runs(plan_runs(design, left), sweep_name(design, left), compose)
        refuse_no_op_arms(design, runs)
        return runs

    return make


# ---- what is typed


@pytest.mark.parametrize(
    "typed,quoted",
    [
        ("add=[a=1,b=2]", "['a=1','b=2']"),
        ("add=a=1,b=2", "['a=1','b=2']"),
        ("+add=[a=1]", "['a=1']"),
        ("add=[[a=1,b.c=2],d=3,all]", "[['a=1','b.c=2'],'d=3',all]"),
        ("add=[a=1,b=2],c=3", "[['a=1','b=2'],'c=3']"),
        ("add=[s=[x,y],t={u:1,v:2}]", "['s=[x,y]','t={u:1,v:2}']"),
        ("add=['a=1',\"b='x, y'\"]", r"['a=1','b=\'x, y\'']"),
        ("add=[ a=1 , b=2 ]", "['a=1','b=2']"),
    ],
)
def test_additions_are_quoted_for_hydra_and_shown_as_they_were_typed(typed: str, quoted: str) -> None:
    settings = as_settings(["recipe=plain", typed, "seed=0,1"])
    assert settings == ["recipe=plain", f"hydra.sweeper.add={quoted}", "seed=0,1"] and is_ablation(settings)
    again = as_typed(settings)
    assert as_settings(again) == settings and again[1].startswith("add=[") and not is_ablation(again)


def test_a_line_without_additions_stays_as_it_is() -> None:
    words = ["-m", "recipe=plain,dr_grpo", "+task.add=3", "address=x"]
    assert as_settings(words) == words == as_typed(words) and not is_ablation(words)


@pytest.mark.parametrize(
    "words,said",
    [
        (["add=[]"], r"add= names no additions: type add='\[surrogate=ppo_higher,truncation=mask_after\]'"),
        (["add="], "add= names no additions"),
        (["add=[surrogate]"], "add: 'surrogate' is no override: type key=value for each addition, such as add="),
        (["add=[surrogate=ppo_higher,ppo]"], "add: 'ppo' is no override"),
        (["add=[[],kl=k3_loss]"], r"add: \[\] adds no overrides: type them as \[key=value,key=value\]"),
        (["add=[[all,kl=k3_loss]]"], "adds no overrides"),
        (["add=[[kl=k3_loss]"], "unbalanced brackets or quotes"),
        (["add=['kl=k3_loss]"], "unbalanced brackets or quotes"),
        ([ADD, "leave_one_out=[kl=k3_loss]"], "are two ablations: give one of the two"),
        ([ADD, ADD], "are two ablations"),
        ([ADD, "+experiments=overlong"], r"\+experiments=overlong declares arms of its own, and add= gives others"),
        ([ADD, "hydra/sweeper=basic"], "hydra/sweeper=basic does not support arms, which add= needs"),
        ([ADD, "design.seeds=[1]"], r"design\.seeds=\[1\] declares arms of its own"),
    ],
)
def test_what_is_no_list_of_additions_is_refused_before_hydra_reads_it(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        as_settings(words)


# ---- the design it makes


def test_every_addition_is_an_arm_beside_the_control() -> None:
    entries, left = declared(ADD, "recipe=dr_grpo", *SHORT, "seed=0,1", "runs_dir=/x")
    design = read_design(entries)
    assert list(design.arms) == ["dr_grpo", "surrogate=ppo_higher", "aggregation=token_mean"]
    assert (design.control, design.seeds, design.kind) == ("dr_grpo", (0, 1), Kind.add_one) and design.exploratory
    assert left == ["tracking=none", "runs_dir=/x"] and not design.predictions
    assert design.base == ("recipe=dr_grpo", "world=tiny", "evaluation=brief", "budget.amount=3")
    assert [design.contents(arm) for arm in design.arms] == [
        set(),
        {"surrogate=ppo_higher"},
        {"aggregation=token_mean"},
    ]
    plans = plan_runs(design, left)
    assert [(plan.arm, plan.seed) for plan in plans] == [(arm, seed) for seed in (0, 1) for arm in design.arms]
    # An addition wins over what is typed beside it, unlike a declared arm.
    own, _ = declared("add=[surrogate=ppo_higher]", "surrogate=cispo")
    assert [plan.overrides[0] for plan in plan_runs(read_design(own), [])] == [
        "surrogate=cispo",
        "surrogate=ppo_higher",
    ]


def test_all_together_and_one_left_out() -> None:
    entries, _ = declared("add=[surrogate=ppo_higher,[kl=k3_loss,kl.kl_coef=0.02],all]")
    design = read_design(entries)
    assert list(design.arms) == ["plain", "surrogate=ppo_higher", "kl=k3_loss+kl.kl_coef=0.02", "all"]
    assert design.arms["all"] == ("surrogate=ppo_higher", "kl=k3_loss", "kl.kl_coef=0.02") and design.seeds == (0,)
    assert design.contents("all") == set(design.tricks) == {"surrogate=ppo_higher", "kl=k3_loss+kl.kl_coef=0.02"}
    out = read_design(declared("leave_one_out=[surrogate=ppo_higher,kl=k3_loss]", "recipe=dapo")[0])
    assert list(out.arms) == ["all", "-surrogate=ppo_higher", "-kl=k3_loss"] and out.control == "all"
    assert out.arms["-kl=k3_loss"] == ("surrogate=ppo_higher",) and out.contents("-kl=k3_loss") == {
        "surrogate=ppo_higher"
    }
    # Two values of one option are two arms, and cannot be together.
    two = read_design(declared("add=[surrogate=ppo_higher,surrogate=cispo]")[0])
    assert list(two.arms) == ["plain", "surrogate=ppo_higher", "surrogate=cispo"]
    assert two.contents("surrogate=cispo") == {"surrogate=cispo"}
    with pytest.raises(ValueError, match="surrogate=ppo_higher and surrogate=cispo both set surrogate"):
        read_design(declared("add=[surrogate=ppo_higher,surrogate=cispo,all]")[0])


def test_a_list_beside_the_additions_makes_levels_and_base_models_are_nested() -> None:
    entries, left = declared(ADD, "recipe=plain,dr_grpo", "updates=one,two", "kl=k3_loss")
    design = read_design(entries)
    assert design.factor == "recipe,updates" and design.control == "control" and left == []
    assert list(design.levels) == ["plain,one", "plain,two", "dr_grpo,one", "dr_grpo,two"]
    assert design.levels["dr_grpo,one"] == ("recipe=dr_grpo", "updates=one") and design.base == ("kl=k3_loss",)
    assert len(plan_runs(design, left)) == 3 * 4
    nested = read_design(declared(ADD, "model.base=0,3")[0])
    assert (nested.bases, nested.seeds) == ((0, 3), (0, 1))
    plans = plan_runs(read_design(declared(ADD, "model.base=0,3", "seed=4,5,6,7")[0]), [])
    bases = {plan.seed: next(word for word in plan.overrides if word.startswith("model.base=")) for plan in plans}
    assert bases == {4: "model.base=0", 5: "model.base=3", 6: "model.base=0", 7: "model.base=3"}


@pytest.mark.extended
def test_a_sweep_is_named_after_its_additions_whatever_their_order() -> None:
    def name(word: str, *typed: str) -> str:
        entries, left = declared(word, *typed)
        assert entries["name"] == sweep_name(read_design(entries), left)
        return entries["name"]

    one = name(ADD, "recipe=plain", "seed=0,1", "runs_dir=/x", "budget.amount=3")
    assert one == "add,aggregation=token_mean,surrogate=ppo_higher,recipe=plain,budget.amount=3"
    assert one == name("add=[aggregation=token_mean,surrogate=ppo_higher]", "budget.amount=3", "recipe=plain", "seed=7")
    together = name("add=[[surrogate=ppo_higher,aggregation=token_mean]]")
    names = {
        name(ADD),
        together,
        name(f"{ADD[:-1]},all]"),
        name(ADD.replace("add", "leave_one_out")),
        name(ADD, "recipe=plain,dr_grpo"),
    }
    assert together == "add,surrogate=ppo_higher+aggregation=token_mean" and len(names) == 5
    long = name(f"add=[{','.join(f'optimizer.learning_rate={rate}e-5' for rate in range(1, 30))}]")
    assert len(long) <= 120 and long != name("add=[optimizer.learning_rate=1e-5]")
    assert "/" not in name(ADD, "model=hf", "model.path=/models/qwen")


@pytest.mark.parametrize(
    "word,typed,said",
    [
        ("add=[kl=k3_loss,kl=k3_loss]", [], "add: duplicate addition in kl=k3_loss, kl=k3_loss: remove one"),
        ("add=[[updates=two,kl=k3_loss],[kl=k3_loss,updates=two]]", [], "add: duplicate addition"),
        ("add=[[kl=k3_loss,updates=two,kl=none]]", [], "sets kl twice: leave one of the two out"),
        ("add=[kl=k3_loss,all]", [], "add: `all` combines the other additions, so list at least two"),
        ("add=[all]", [], "add: `all` combines the other additions"),
        ("leave_one_out=[kl=k3_loss,all]", [], "leave_one_out: its control has all additions, so leave `all` out"),
        ("add=[seed=1]", [], "addition seed=1: seed applies to the whole sweep, not to one arm: move it"),
        ("add=[runs_dir=/x]", [], "runs_dir applies to the whole sweep"),
        ("add=['optimizer.learning_rate=choice(1,2)']", [], "an arm takes one value: list each separately"),
        ("add=['kl={']", [], "addition kl={: "),
        (
            "add=[kl=k3_loss]",
            ["model.base=0,1", "seed=0,1,2"],
            "3 seeds on 2 base models: seeds are assigned to base models",
        ),
        ("add=[kl=k3_loss]", ["model.base=0,x"], "model.base=x: a base model is a whole number"),
        ("add=[kl=k3_loss]", ["seed=0,x"], "seed=x: a seed is a whole number"),
    ],
)
def test_what_no_arm_can_add_is_refused(word: str, typed: list[str], said: str) -> None:
    if word == "add=['kl={']":
        entry: list = ["add", ["kl={"]]
    else:
        entry = list(additions_of(word))
    with pytest.raises(ValueError, match=re.escape(said)):
        exploratory(*entry, typed, compose_config(["world=tiny"]))


# ---- its runs


@pytest.mark.extended
def test_its_runs_are_those_of_the_same_words_by_hand(runs_of: Callable) -> None:
    runs = runs_of("add=[surrogate=ppo_higher,[kl=k3_loss,kl.kl_coef=0.02],all]", "seed=0,1", "recipe=lite_ppo")
    assert [planned.plan.title for planned in runs[:4]] == [
        "lite_ppo seed=0",
        "surrogate=ppo_higher seed=0",
        "kl=k3_loss+kl.kl_coef=0.02 seed=0",
        "all seed=0",
    ]
    assert [str(Path(planned.record().folder).parent) for planned in runs[4:]] == [
        "lite_ppo,evaluation=brief,world=tiny",
        "lite_ppo,surrogate=ppo_higher,evaluation=brief,world=tiny",
        "lite_ppo,kl.kl_coef=0.02,kl=k3_loss,evaluation=brief,world=tiny",
        "lite_ppo,kl.kl_coef=0.02,kl=k3_loss,surrogate=ppo_higher,evaluation=brief,world=tiny",
    ]
    assert type(runs[1].run.surrogate) is not type(runs[0].run.kl) and runs[3].run.kl.kl_coef == 0.02


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "word,said",
    [
        (
            "add=[surrogate=ppo_higher,surrogate=ppo]",
            "surrogate=ppo changes nothing: its runs equal those of plain",
        ),
        ("leave_one_out=[kl=k3_loss,updates=four]", "-updates=four changes nothing: its runs equal those of all"),
        ("add=[reference=ema]", "arm reference=ema cannot differ from plain"),
        ("add=[surrogate=ppo_highr]", "surrogate=ppo_highr seed=0: there is no 'surrogate/ppo_highr': did you mean"),
        ("add=[clip_high=0.3]", "clip_high=0.3 seed=0: there is no key 'clip_high': type surrogate=ppo_higher"),
        ("add=[surogate.clip_high=0.3]", "there is no key 'surogate.clip_high': did you mean 'surrogate'?"),
        ("add=[group_size=1]", "group_size=1 seed=0: this combination cannot run"),
    ],
)
def test_an_addition_that_does_nothing_or_cannot_run_is_refused(runs_of: Callable, word: str, said: str) -> None:
    with pytest.raises((ValueError, IncompatibleRun)) as refusal:
        runs_of(word)
    assert said.split(": type")[0] in str(refusal.value)


def test_a_dry_run_lists_the_arms_and_touches_nothing(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    words = as_settings([*SHORT, "leave_one_out=[surrogate=ppo_higher,aggregation=token_mean]", "updates=two,four"])
    multirun(*words, f"runs_dir={tmp_path / 'runs'}", "hydra.sweeper.dry_run=true")
    said = capfd.readouterr().err
    assert "6 runs; none is started" in said and not any(tmp_path.iterdir())
    titles = ("all two", "-surrogate=ppo_higher two", "-aggregation=token_mean four")
    assert all(f"  {title} seed=0 " in said for title in titles)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line as it stands in a README, typed into a shell."""
    line = line.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE, env=dict(os.environ))


@pytest.mark.extended
def test_a_refusal_ends_the_command_in_one_line_whether_it_says_m_or_not(tmp_path: Path) -> None:
    done = shell(f"python -m grpo_lab.train {' '.join(WORLD)} runs_dir={tmp_path} add='[surrogate=ppo,kl=k3_loss]'")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: surrogate=ppo changes nothing: its runs equal those of plain; remove it\n"
    done = shell("python -m grpo_lab.train -m add='[kl]'")
    assert done.returncode == 1 and done.stderr.startswith("error: add: 'kl' is no override: type key=value")


# ---- really run


@dataclass(frozen=True)
class Ran:
    """A finished ablation of two additions and two seeds."""

    runs: Path
    line: str
    said: str
    printed: str
    name: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Ran:
    runs = tmp_path_factory.mktemp("ablation") / "runs"
    words = f"world=tiny tracking=none budget.amount=3 runs_dir={runs}"
    line = f"python -m grpo_lab.train recipe=plain seed=0,1 add='{ADD.removeprefix('add=')}' {words}"
    done = shell(line)
    assert done.returncode == 0, done.stderr
    (folder,) = (runs / "sweeps").iterdir()
    return Ran(runs, line, done.stderr, done.stdout, folder.name)


@pytest.mark.extended
def test_one_line_runs_every_arm_and_records_what_was_typed(ran: Ran) -> None:
    assert finished(ran.runs) == 6
    assert ran.name == "add,aggregation=token_mean,surrogate=ppo_higher,recipe=plain,budget.amount=3,world=tiny"
    record = read_sweep(ran.runs / "sweeps" / ran.name)
    arms = ("plain", "surrogate=ppo_higher", "aggregation=token_mean")
    assert [(entry.arm, entry.seed) for entry in record.runs] == [(arm, seed) for seed in (0, 1) for arm in arms]
    assert record.command[3:] == [*shlex.split(ran.line)[3:], "-m"] and record.declared[0]["fingerprint"] == ""
    design = read_design(record.design)
    assert design.exploratory and list(design.arms) == list(arms) and design.predictions == ()
    assert [planned.title for planned in runs_of_sweep(ran.runs, ran.name)][1] == "surrogate=ppo_higher seed=0"
    assert re.search(r"6 of 6 done after", ran.said) and f"grpo-lab figures {ran.name} --runs {ran.runs}" in ran.said


@pytest.mark.extended
def test_it_ends_with_its_arms_by_what_was_added_and_says_that_it_is_exploratory(ran: Ran) -> None:
    data = load_sweep(ran.runs, ran.name)
    table = arms_table(data, final_values(data))
    assert ran.printed.splitlines() == ["", *table, ""]
    assert table[0] == (
        f"{ran.name}: 6 of 6 planned runs are finished; the control is plain; exploratory: nothing was declared, so "
        "nothing is judged"
    )
    start = next(number for number, line in enumerate(table) if line.startswith("  arm "))
    rows = table[start + 1 : start + 6]
    assert table[start].split() == ["arm", "n", "training", "reward", "held-out", "downstream", "divergence,", "pp"]
    assert [row.split("  ")[1] if row[2] != " " else row.strip().split("  ")[0] for row in rows] == [
        "plain",
        "surrogate=ppo_higher",
        "minus plain",
        "aggregation=token_mean",
        "minus plain",
    ]
    assert "n = 2: no interval" in " ".join(table) and "[" not in "".join(rows)
    assert re.search(r"plain +2 +0\.\d{3} \(0\.\d{3} and 0\.\d{3}\)", rows[0])


@pytest.mark.extended
def test_the_same_line_again_runs_nothing_and_ends_alike(ran: Ran) -> None:
    again = shell(ran.line)
    assert again.returncode == 0 and "all 6 runs are finished" in again.stderr and again.stdout == ran.printed
    assert finished(ran.runs) == 6


@pytest.mark.extended
def test_its_effects_are_those_of_its_additions_and_nothing_is_judged(ran: Ran) -> None:
    data = load_sweep(ran.runs, ran.name)
    assert data.control == "plain" and data.declaration is None and data.tricks == list(data.design.tricks)
    assert [(one.kind, one.name) for one in planned_contrasts(data)] == [
        ("added", "surrogate=ppo_higher (added to plain)"),
        ("added", "aggregation=token_mean (added to plain)"),
    ]


@pytest.mark.extended
def test_figures_and_report_of_two_seeds_have_points_and_no_bands(ran: Ran, tmp_path: Path) -> None:
    built = build(ran.name, str(ran.runs), None, None, ["test"])
    assert {path.parent for path in built.paths} == {ran.runs / "figures"}, "it is no declared experiment"
    assert built.table.startswith(f"{ran.name}: ") and built.table.count("exploratory: nothing was declared") == 1
    assert "Exploratory: nothing was declared before the runs, so nothing is judged." in built.verdict
    table = (ran.runs / "figures" / f"{ran.name}_table.md").read_text()
    assert "Exploratory" in table and not re.search(r"\d \[[-+\d]", table + built.verdict)
    data = load_sweep(ran.runs, ran.name)
    numbers = curve_numbers(data, final_values(data))
    assert numbers["low"].isna().all() and (numbers["part"] == "mean").any()
    page, _ = build_report(ran.name, str(ran.runs), None, tmp_path, ["test"])
    text = page.read_text()
    assert "Nothing was declared, so nothing is judged; plain is the control." in text
    assert set(re.findall(r'"low":\[([^\]]*)\]', text)) <= {",".join(["null"] * n) for n in range(500)}
    assert not re.search(r"(pp|\d) \[[-+\d]", text.split("<svg")[0])
