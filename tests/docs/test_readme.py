"""The README is true: its commands run, its example trick works, its files and targets exist."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from processes import forked_command, python_path

from grpo_lab.config.catalogue import (
    axes,
    documented,
    ingredients_table,
    papers_table,
    recipe_overrides,
    recipes_table,
    tricks_table,
)
from grpo_lab.config.folders import conf_folder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
CODE_PAGE = (ROOT / "grpo_lab" / "README.md").read_text()
WALK = (ROOT / "grpo_lab" / "loop.md").read_text()
# Every page written by hand, and those beside saved data.
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in ROOT.glob("[a-z]*/**/*.md") if not {"figures", "data", "build", "runs"} & set(path.parts)),
]


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)


def commands() -> list[str]:
    """README's commands, each on one line."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [line for line in (" ".join(line.split("#")[0].split()) for line in text.splitlines()) if line]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


TRAINING = [command for command in commands() if command.startswith("python")]
OWN_MODEL = next(command for command in TRAINING if "model=hf" in command)


# Each run starts a process: they are tried by make test-all.
@pytest.mark.extended
@pytest.mark.parametrize("command", [command for command in TRAINING if command != OWN_MODEL])
def test_every_training_command_runs(tmp_path: Path, command: str) -> None:
    """In the tiny world and for two steps, everything else as written."""
    words = [sys.executable, *shlex.split(command)[1:]]
    short = ["world=tiny", "budget.amount=2", "tracking=none", f"runs_dir={tmp_path / 'runs'}"]
    head = 4 if words[3] == "-m" else 3  # overrides stand together, or Hydra refuses them
    run([*words[:head], *short, *words[head:]])
    # A list has as many arms as values, and an ablation one more than additions.
    sizes = [len(word.split(",")) + word.startswith("add=") for word in words[3:]]
    runs = math.prod(sizes) if "-m" in words[3:] else 1
    assert len(list(tmp_path.glob("runs/*/seed=*/DONE"))) == runs


@pytest.mark.extended
def test_a_model_questions_and_a_reward_of_ones_own(tmp_path: Path, tiny_base: Path) -> None:
    """The command of README with a folder instead of the hub's id, on the CPU."""
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 13) for b in range(1, 13)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (ROOT / "conf" / "models.md").read_text()
    (reward,) = [code for code in blocks("python", page) if "def score" in code]
    (tmp_path / "my_rewards.py").write_text(reward)
    words = shlex.split(OWN_MODEL)[1:]
    own = [word.replace("Qwen/Qwen2.5-0.5B", str(tiny_base)).replace("=cuda", "=cpu") for word in words]
    short = [
        "template=plain", "engine=native", "budget.amount=2", "tracking=none", "evaluation=brief",
        "engine.max_tokens=24", "evaluation.max_tokens=24", "evaluation.downstream_max_tokens=48",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *[word for word in own if word != "engine=native_gpu"], *short],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": python_path()}, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/seed=*/DONE"))) == 1


@pytest.mark.extended
def test_the_calls_from_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(code.replace('"world=tiny"', '"world=tiny", "budget.amount=2", "tracking=none"'), {})
    assert len(list(tmp_path.glob("runs/*/seed=*/DONE"))) == 7


def test_a_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the numbers, which depend on the processor."""
    for pause in ("_PLAIN_SECONDS", "_SILENT_SECONDS"):  # a slow machine would print lines in between
        monkeypatch.setattr(f"grpo_lab.tracking.progress.{pause}", 1e6)
    (shown,) = blocks("console")
    command, *expected = shown.splitlines()
    words = shlex.split(command.removeprefix("$ "))
    assert words[:2] == ["python", "-m"]
    output = tmp_path / "output.txt"
    process = forked_command([*words[2:], f"runs_dir={tmp_path / 'runs'}", "tracking=none"], output)
    process.join(250)
    said = output.read_text()
    assert process.exitcode == 0, said

    def masked(line: str) -> str:
        line = re.sub(r"  \S+ left$", "", line)  # what a slow machine adds
        return re.sub(r"[-+]?[\d.,]*\d", "0", line).rstrip()

    assert list(map(masked, said.splitlines()))[: len(expected)] == list(map(masked, expected))


def test_every_make_target_named_exists_and_help_lists_all() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README + GUIDE))
    shown = run(["make", "help"]).stdout
    targets = set(re.findall(r"^  make ([a-z-]+)", shown, flags=re.M))
    assert named <= targets
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert targets == defined


@pytest.mark.extended
def test_the_example_trick_works_as_written(tmp_path: Path) -> None:
    (code, hand), (yaml,) = blocks("python", GUIDE), blocks("yaml", GUIDE)
    (tmp_path / "example_trick.py").write_text(code)
    (tmp_path / "conf" / "baseline").mkdir(parents=True)
    (tmp_path / "conf" / "baseline" / "group_median.yaml").write_text(yaml)
    run(
        [
            sys.executable, "-m", "grpo_lab.train", "plugins=[example_trick]", "baseline=group_median", "world=tiny",
            "budget.amount=2", "tracking=none", f"runs_dir={tmp_path / 'runs'}",
        ],
        PYTHONPATH=python_path(tmp_path),
        GRPO_LAB_CONFIG_PATH=str(tmp_path / "conf"),
    )  # fmt: skip
    (tmp_path / "test_example.py").write_text(hand.replace("grpo_lab.tricks.baseline", "example_trick"))
    path = python_path(tmp_path, ROOT / "tests" / "shared")
    run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path / "test_example.py")], PYTHONPATH=path)


def test_the_tables_and_numbers_of_tricks_are_what_make_docs_writes() -> None:
    assert [path for path, text in documented().items() if path.read_text() != text] == [], "run `make docs`"
    pages = "\n".join(documented().values())
    assert all(table() in pages for table in (tricks_table, papers_table, recipes_table, ingredients_table))
    counted = sum(len(axis.options) for axis in axes())
    counts = f"{counted} options on {len(axes())} axes, and {len(recipe_overrides())} recipes"
    assert counts in " ".join(pages.split())


def test_tables_are_written_in_their_places_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(conf_folder(), tmp_path / "conf")
    monkeypatch.setattr("grpo_lab.config.catalogue.conf_folder", lambda: tmp_path / "conf")
    readme, page = tmp_path / "README.md", tmp_path / "conf" / "README.md"
    whole = page.read_text()
    page.write_text(re.sub(r"^\| (curriculum|80/20) \|.*\n", "", whole, flags=re.M))
    readme.write_text("It has 1 options on 2\naxes, and 3 recipes, and 4 words.\n")
    written = documented()
    assert written[page] == whole != page.read_text()
    assert re.fullmatch(r"It has \d+ options on \d+\naxes, and \d+ recipes, and 4 words.\n", written[readme])
    page.write_text("no table\n")
    with pytest.raises(ValueError, match=r"has no table that begins with `\| axis \| what `: write this where"):
        documented()
    readme.write_text("no numbers\n")
    with pytest.raises(ValueError, match=r"does not count what there is: write `1 options on"):
        documented()
    page.unlink()
    with pytest.raises(ValueError, match=r"there is no .*conf/README.md: the pages are written in a checkout"):
        documented()


def test_a_new_option_shows_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(conf_folder(), tmp_path / "conf")
    text = "# Median of 2401.00001 (made up): one lucky response does not move it.\ndefaults: []\n"
    (tmp_path / "conf" / "baseline" / "group_median.yaml").write_text(text)
    monkeypatch.setattr("grpo_lab.config.catalogue.conf_folder", lambda: tmp_path / "conf")
    row = next(line for line in tricks_table().splitlines() if line.startswith("| baseline |"))
    assert ", group_median, kalman, " in row
    assert "| Median of | 2401.00001 | baseline=group_median |" in papers_table()


def test_the_map_names_what_exists_and_misses_no_module() -> None:
    """Of tricks and analysis the folder alone: one has a module per axis, the other a page of its own."""
    (tree,) = re.findall(r"```\n(types\.py .*?)```", CODE_PAGE, flags=re.S)
    named: set[str] = set()
    folder = ""
    for line in tree.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0] if line.split()[0].endswith("/") else ""
        named |= {folder + name for name in re.findall(r"\b\w+\.py\b", line)}
    package = ROOT / "grpo_lab"
    modules = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert named <= modules
    assert {name for name in modules - named if not name.startswith(("tricks/", "analysis/"))} == set()


def test_the_walk_names_functions_that_exist() -> None:
    """Each `file.py` of the two pages is there, and defines the `Class.function` that is named behind it."""
    places = re.findall(r"`([\w/]+\.py)`(?: `([\w.]+)`)?", CODE_PAGE + WALK)
    assert len([where for _, where in places if where]) > 20
    for name, where in places:
        text = (ROOT / "grpo_lab" / name).read_text()
        for part in filter(None, where.split(".")):
            assert re.search(rf"^\s*(?:def|class) {part}\b", text, flags=re.M), f"{name} has no {part}"


def test_a_busy_reader_finishes_it() -> None:
    shown = re.sub("<!--.*?-->", "", README)
    assert len([word for word in shown.split() if re.search(r"\w", word)]) <= 900
    assert len(shown.splitlines()) <= 160


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        place = path.parent / target if target else path
        assert "://" in target or place.exists(), target
        assert not anchor or "://" in target or anchor in anchors(place), f"{target}#{anchor}"


def test_the_speed_tables_say_what_was_measured() -> None:
    """What `bench.py --table` prints of the CPU's results file, and `gpu/run.py --table` of the GPU's."""
    text = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
    on_cpu, on_gpu = sorted(set(re.findall(r"\((results/\w+\.json)\)", text)))
    for command, results in (("benchmarks/bench.py", on_cpu), ("gpu/run.py", on_gpu)):
        table = run([sys.executable, f"tests/{command}", "--table", f"tests/benchmarks/{results}"])
        assert table.stdout.strip() in text


def test_the_verdict_that_is_explained_is_one_of_ours() -> None:
    (shown,) = blocks("text", (ROOT / "analysis" / "verdicts.md").read_text())
    folder = ROOT / "experiments" / "interruption_budgets" / "figures"
    assert shown in (folder / "interruption_budgets_verdict.txt").read_text()


def test_the_declaration_that_is_explained_is_one_of_ours() -> None:
    (shown,) = blocks("yaml", (ROOT / "experiments" / "declare.md").read_text())
    declared = yaml.safe_load((ROOT / "experiments" / "length_bias" / "design.yaml").read_text())["design"]
    for key, value in yaml.safe_load(shown)["design"].items():
        whole = declared[key]
        if isinstance(value, dict):
            assert value.items() <= whole.items(), key
        elif isinstance(value, list):
            assert all(entry in whole for entry in value), key
        else:
            assert value == whole, key


def test_version_and_licence_are_the_same_wherever_they_stand() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest == project["version"]


def tracked() -> list[Path]:
    """The files git keeps. Skips where this is no checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run(["git", "ls-files", "-z"]).stdout.split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).exists()]


def test_the_tree_is_light() -> None:
    """Who runs this elsewhere carries it: base models, and of the figures those that a page shows, no large ones."""
    files = tracked()
    bases = {path for path in files if path.parent == ROOT / "grpo_lab" / "bases"}
    assert sum(path.lstat().st_size for path in bases) < 22e6
    assert sum(path.lstat().st_size for path in {*files} - bases) < 29.5e6
    shown = {
        (page.parent / name).resolve() for page in PAGES for name in re.findall(r"\]\(([^)]+\.png)\)", page.read_text())
    }
    kept = {path.resolve() for path in files if path.suffix in (".png", ".svg")}
    assert kept == shown
    for path in kept:
        assert path.stat().st_size < 150_000, path
