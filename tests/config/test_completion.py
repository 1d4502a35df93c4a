"""Shell completion: its candidates, and the modules it may import to answer within a fraction of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from declared_experiments import FOLDERS

from grpo_lab.config.completion import overrides, script
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import AXES, CONFIG_GROUPS

BREAKS = " \t\n\"'><=;|&(:"  # bash's COMP_WORDBREAKS: it completes only what follows the last of them
# argcomplete leaves by os._exit, which runs nothing that is registered for the end of a process.
RUN = (
    "import os, runpy, sys;"
    "leave = os._exit;"
    "os._exit = lambda code: (open(os.environ['LOADED'], 'w').write(' '.join(sys.modules)), leave(code));"
    "runpy.run_module('grpo_lab.cli', run_name='__main__', alter_sys=True)"
)


def completed(line: str, folder: Path) -> tuple[set[str], set[str]]:
    """The candidates that bash gets for this command line, and the modules that the command has loaded."""
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_COMP_WORDBREAKS": BREAKS,
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "offered"),
        "LOADED": str(folder / "loaded"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN], env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set((folder / "offered").read_text().splitlines()), set((folder / "loaded").read_text().split())


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("grpo-lab fig", {"figures"}),
        ("grpo-lab train sur", {"surrogate="}),
        ("grpo-lab train seed=1 surrogate=ppo_h", {"ppo_higher", "ppo_higher_olmo"}),
        ("grpo-lab train surrogate.clip_l", {"surrogate.clip_low="}),
        ("grpo-lab train checkpoint.", {"checkpoint.best="}),
        ("grpo-lab train +", {"+experiments="}),
        ("grpo-lab train --cfg ", {"job", "hydra", "all"}),
        ("grpo-lab train +experiments=overlong_", {"overlong_worlds"}),
        ("grpo-lab sweep overlong_", {"overlong_worlds"}),
        ("grpo-lab sweep recipe=plain,dr_", {"plain,dr_grpo"}),
        ("grpo-lab sweep overlong_worlds hydra.sweeper.", {"hydra.sweeper.dry_run=true"}),
        ("grpo-lab explain recipe=dr_", {"dr_grpo"}),
        *((f"grpo-lab {name} overlong_", {"overlong_worlds"}) for name in ("figures", "report", "data", "power")),
        ("grpo-lab status overlong_", {"overlong_worlds", "overlong_mine"}),
        ("grpo-lab figures overlong_worlds --on", {"--only-runs"}),
        ("grpo-lab completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_a_word_is_completed_without_a_large_import(tmp_path: Path, line: str, offered: set[str]) -> None:
    if "status" in line:
        (tmp_path / "runs" / "sweeps" / "overlong_mine").mkdir(parents=True)
    found, loaded = completed(line, tmp_path)
    assert found == offered
    assert loaded.isdisjoint({"torch", "transformers", "pandas", "numpy", "mlflow", "hydra", "omegaconf"})


def test_every_group_experiment_and_option_is_offered() -> None:
    named = (*AXES, *CONFIG_GROUPS, "recipe", "world", "seed", "checkpoint.best")
    assert {f"{name}=" for name in named} <= {*overrides("")}
    assert {*overrides("+experiments=")} == {f"+experiments={name}" for name in FOLDERS}
    for group in AXES:
        assert {*overrides(f"{group}=")} == {f"{group}={path.stem}" for path in (conf_folder() / group).glob("*.yaml")}
    assert overrides("recipe=")["recipe=dr_grpo"].startswith("Dr. GRPO 2503.20783: ")


def test_a_users_own_options_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("baseline/mine.yaml", "experiments/my_question.yaml", "broken/wrong.yaml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("# My own\nspread: 1\nnested: {depth: 2}\n" if "wrong" not in name else "{")
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path))
    assert overrides("baseline=")["baseline=mine"] == "My own"
    assert "+experiments=my_question" in overrides("+experiments=")
    assert {"baseline.spread=", "baseline.nested.depth="} <= {*overrides("baseline.")}
    assert {"broken=", "broken=wrong"} <= {*overrides(""), *overrides("broken="), *overrides("broken.")}


def test_a_missing_folder_of_the_users_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", "/nowhere")
    assert "scale=none" in overrides("scale=")


@pytest.mark.needs("bash")
def test_bash_completes_by_what_the_command_prints(tmp_path: Path) -> None:
    command = tmp_path / "grpo-lab"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m grpo_lab.cli "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(script("bash"))
    typed = (
        '. "$0"; complete -p grpo-lab; COMP_WORDBREAKS="$BREAKS"; COMP_TYPE=9;'
        'COMP_LINE="grpo-lab train surrogate=sap"; COMP_POINT=${#COMP_LINE};'
        '_python_argcomplete grpo-lab sap =; printf "<%s>" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "BREAKS": BREAKS, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", typed, str(tmp_path / "script")], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "-F _python_argcomplete grpo-lab" in done.stdout, done.stderr
    assert done.stdout.endswith("<sapo >")
