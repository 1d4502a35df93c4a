"""What commands say when they run nothing, and what they may import to say it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from jaxtyping import TypeCheckError
from omegaconf import OmegaConf

from grpo_lab import cli
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.help import answer, help_text
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import AXES, CONFIG_GROUPS
from grpo_lab.tricks.base import tied
from grpo_lab.types import to_groups

ROOT = Path(__file__).parents[2]
# Where the whole of each package is loaded, and not its name alone.
LARGE = {
    "torch": "torch._C",
    "transformers": "transformers.utils",
    "pandas": "pandas.core",
    "datasets": "datasets",
    "mlflow": "mlflow",
    "scipy": "scipy",
    "matplotlib": "matplotlib",
}
LOADED = f"[name for name, part in {LARGE!r}.items() if part in sys.modules]"
RUN = (
    "import atexit, os, runpy, sys;"
    f"atexit.register(lambda: open(os.environ['SAYS'], 'w').write(' '.join({LOADED})));"
    "sys.argv = sys.argv[1:];"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def ran(tmp_path: Path, *words: str, code: int = 0) -> tuple[str, str, set[str]]:
    """Output, errors and the large packages that a command loaded."""
    says = tmp_path / "loaded"
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=200, cwd=ROOT,
        env={**os.environ, "SAYS": str(says)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr, set(says.read_text().split())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words,expected",
    [
        (("grpo_lab.train", "--help"), "group_mean, asymmetric"),
        (("grpo_lab.train", "recipe=dapo", "--cfg", "job"), "surrogate:  # dual_clip_dapo"),
        (("grpo_lab.cli", "tricks"), "leave_one_out"),
        (("grpo_lab.cli", "metrics"), "reward/mean"),
    ],
    ids=["help", "cfg", "tricks", "metrics"],
)
def test_a_command_that_only_speaks_loads_nothing_large(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    said, _, loaded = ran(tmp_path, *words)
    assert expected in said
    assert loaded == set()


@pytest.mark.extended
def test_explain_loads_what_writes_the_first_prompt_and_no_more(tmp_path: Path) -> None:
    said, _, loaded = ran(tmp_path, "grpo_lab.cli", "explain", "recipe=dapo")
    assert "this is recipe dapo" in said and "first prompt, of" in said
    assert loaded.isdisjoint({"pandas", "datasets", "mlflow", "matplotlib"})


@pytest.mark.extended
def test_figures_and_bad_input_load_no_model_library(tmp_path: Path) -> None:
    _, said, loaded = ran(tmp_path, "grpo_lab.cli", "figures", "no_such_sweep", code=1)
    assert "no_such_sweep" in said
    assert loaded.isdisjoint({"torch", "transformers", "datasets", "mlflow"})
    _, said, loaded = ran(tmp_path, "grpo_lab.train", "updates=one", "problems_per_step=0", code=1)
    assert "problems_per_step" in said
    assert loaded == set()


@pytest.mark.extended
def test_a_plan_of_power_loads_no_model_library(tmp_path: Path) -> None:
    said, _, loaded = ran(tmp_path, "grpo_lab.cli", "power", "dapo_worlds", "--trials", "0", "--runs", "runs")
    assert "base models needed" in said and "8 predictions" in said
    assert loaded.isdisjoint({"torch", "transformers", "datasets", "mlflow"})


def test_help_names_every_axis_every_room_and_their_options() -> None:
    lines = {line.split()[0] for line in help_text().splitlines() if line[:1].isalpha()}
    assert {*AXES, *CONFIG_GROUPS, "recipe", "world"} <= lines
    assert help_text() == answer(["--help"]) == answer(["recipe=dapo", "-h"])


def test_the_shown_configuration_is_the_composed_one_with_its_options() -> None:
    said = answer(["recipe=dapo", "--cfg", "job"])
    assert yaml.safe_load(said) == yaml.safe_load(yaml.safe_dump(_plain(compose_config(["recipe=dapo"]))))
    assert said.splitlines()[:2] == ["# recipe: dapo", "# world: sums"]
    assert "scale:  # group_std" in said and "old_policy: {}  # recomputed" in said
    assert "max_tokens: ${engine.max_tokens}" in said
    assert "max_tokens: ${" not in answer(["recipe=dapo", "-c", "job", "--resolve"])


def _plain(config: object) -> object:
    return OmegaConf.to_container(config, resolve=False, enum_to_str=True)


def test_hydra_looks_for_options_in_conf_alone() -> None:
    """Once the repository's root was a place to look: --help then walked every folder of .venv, for minutes."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        searched = GlobalHydra.instance().config_loader().get_search_path().get_path()
        folders = [
            entry.path.removeprefix("file://") for entry in searched if "//" not in entry.path.removeprefix("file://")
        ]
        assert folders == [str(conf_folder())]
        assert "overlong" in GlobalHydra.instance().config_loader().get_group_options("experiments")


def test_what_asks_for_a_run_or_for_hydra_is_not_answered() -> None:
    for words in (["recipe=dapo"], ["--cfg", "hydra"], ["--cfg", "job", "-m", "seed=0,1"], ["--hydra-help"]):
        assert answer(words) is None


@pytest.mark.extended
def test_a_deferred_package_is_the_package(tmp_path: Path) -> None:
    code = (
        "import sys, grpo_lab, torch, pandas, transformers\n"
        "from grpo_lab.types import Tensor\n"
        "assert 'torch._C' not in sys.modules and 'pandas.core' not in sys.modules\n"
        "import torch.nn.functional as F\n"
        "from transformers import LlamaConfig\n"
        "assert torch is sys.modules['torch'] and F.relu(torch.tensor([-1.0])).item() == 0\n"
        "assert transformers.LlamaConfig is LlamaConfig and pandas.Series([1]).sum() == 1\n"
        "try: isinstance(torch.tensor(1), Tensor)\n"
        "except TypeError: pass\n"
        "else: raise AssertionError('a name for annotations answered for torch')\n"
        "import pickle\n"
        "assert pickle.loads(pickle.dumps(torch.tensor([2.0]))).item() == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_what_is_deferred_is_loaded_before_another_thread_can_import_it(tmp_path: Path) -> None:
    """The thread once met half of pandas, mlflow could not be imported, and MLflow got nothing of the run."""
    (tmp_path / "run.json").write_text('{"tracking": null}')
    code = (
        "import sys, pathlib, grpo_lab\n"
        "from grpo_lab import deferred\n"
        "from grpo_lab.tracking.mlflow_exporter import Exporter\n"
        "deferred.defer('not_installed_anywhere')\n"
        "assert 'torch._C' not in sys.modules and 'pandas.core' not in sys.modules\n"
        "mirror = Exporter(pathlib.Path(sys.argv[1]), 60, 1)\n"
        "mirror.start()\n"
        "assert 'torch._C' in sys.modules and 'pandas.core.frame' in sys.modules\n"
        "assert not isinstance(sys.modules['transformers'], deferred._Deferred)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_shapes_are_checked_in_tests() -> None:
    """The names in annotations are jaxtyping's and torch's here, and not the ones that check nothing."""
    assert bool(tied(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)).all())
    with pytest.raises(TypeCheckError):
        tied(torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        to_groups([1.0], 1)


def test_every_command_is_in_one_group_of_the_help(capsys: pytest.CaptureFixture) -> None:
    for words in (["--help"], ["dev", "base", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(words)
    said = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z-]+)  +\S", said, flags=re.M)
    assert len(listed) == len(set(listed)) and {"train", "sweep", "figures", "docs"} <= set(listed)
    assert "usage: grpo-lab base [-h]" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "world=tiny"], ["world=tiny"]),
        (["train"], []),
        (["sweep"], ["--help"]),
        (["sweep", "kl_penalty", "seed=1"], ["-m", "+experiments=kl_penalty", "seed=1"]),
        (["sweep", "my-exp/a"], ["-m", "+experiments=my-exp/a"]),
        (["sweep", "recipe=plain", "add=[kl=k3_loss]"], ["-m", "recipe=plain", "add=[kl=k3_loss]"]),
    ],
)
def test_train_and_sweep_are_the_module_that_trains(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[str]
) -> None:
    started: list[list[str]] = []

    def execv(program: str, argv: list[str]) -> None:
        started.append(argv)
        sys.exit()

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main(words)
    assert started[0] == [sys.executable, "-m", "grpo_lab.train", *expected]


@pytest.mark.extended
def test_a_sweep_by_its_name_is_the_declared_one(tmp_path: Path) -> None:
    words = ["hydra.sweeper.dry_run=true", f"runs_dir={tmp_path}"]
    by_name = subprocess.run(
        [sys.executable, "-m", "grpo_lab.cli", "sweep", "overlong_worlds", *words], capture_output=True, text=True
    )
    declared = subprocess.run(
        [sys.executable, "-m", "grpo_lab.train", "+experiments=overlong_worlds", *words], capture_output=True, text=True
    )
    assert by_name.returncode == declared.returncode == 0
    assert by_name.stderr == declared.stderr and "80 runs" in by_name.stderr


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"grpo-lab {version('grpo-lab')}\n"
