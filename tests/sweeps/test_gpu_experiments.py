"""Experiments for a GPU: the cost that each states follows from the measured step."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from declared_experiments import DECLARATIONS
from sweep_processes import multirun

from grpo_lab.config.design import load_design
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.tasks.hub import HfModel

ROOT = Path(__file__).parents[2]
REAL = [path for path in DECLARATIONS if path.parent.name.startswith("real_")]
MEASURED = ROOT / "tests" / "benchmarks" / "results" / "gpu_nvidia_h200.json"
# Weights in matrix products, with the output head; of SmolLM2 as measured, of the others as their papers say.
WEIGHTS = {"smollm2": 134_479_872, "qwen25_0_5b": 494e6, "qwen25_1_5b": 1_544e6}
EVALUATION = 1.2  # a fifth of a run's time on top


def hours_of(level: str, tokens: float) -> float:
    """Hours of one run: SmolLM2's step as measured, in proportion to tokens and weights."""
    rows = {row["check"]: row["value"] for row in json.loads(MEASURED.read_text())["parts"]["speed"]["rows"]}
    seconds = rows["graphs: the whole step"] / rows["graphs: tokens of a step"] * tokens * EVALUATION
    (weights,) = [number for name, number in WEIGHTS.items() if level.startswith(name)]
    return seconds / 3600 * weights / WEIGHTS["smollm2"]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.parent.name)
def test_the_hours_that_an_experiment_states(path: Path) -> None:
    design = load_design(path)
    (stated,) = re.findall(r"About (\d+) hours of one H200 for all models", path.read_text())
    (tokens,) = [float(word.partition("=")[2]) for word in design.base if word.startswith("budget.amount=")]
    runs = len(design.arms) * len(design.seeds)
    assert abs(int(stated) - runs * sum(hours_of(level, tokens) for level in design.levels)) < 1


def test_every_question_of_a_gpu_can_be_asked_without_a_hub() -> None:
    """By its part of the smallest model, but for templates, which a base model is asked with, and for a teacher."""
    for path in REAL:
        parts = load_design(path).parts
        assert ("smollm2" in parts) is (path.parent.name not in ("real_templates", "real_teacher")), path


@pytest.mark.extended
def test_presets_name_models_of_the_hub() -> None:
    found = {}
    for path in sorted((ROOT / "conf" / "model").glob("*.yaml")):
        if re.match(r"qwen|llama|smollm2_", path.stem):
            model = to_run(compose_config([f"model={path.stem}", "task=gsm8k"])).model
            assert isinstance(model, HfModel)
            found[path.stem] = model.path
    assert len(found) == len(set(found.values())) == 16
    assert all(re.fullmatch(r"(Qwen|meta-llama|HuggingFaceTB)/[\w.-]+", name) for name in found.values())


@pytest.mark.extended
@pytest.mark.parametrize("name", ["gpu_real", "gpu_entropy", "demo_real"])
def test_the_file_of_a_model_may_be_given_and_is_in_no_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder in another place tomorrow, the sweep goes on."""
    words = (f"+experiments={name}", "device=cpu", "engine=native", "tracking=none", "hydra.sweeper.dry_run=true")
    listed = []
    for given in ((), ("model.file=/mnt/of_the_machine.whl",)):
        multirun(*words, "hydra.sweeper.pilot=false", f"runs_dir={tmp_path}", *given)
        listed.append(capsys.readouterr().err)
    assert listed[0] == listed[1] and "seed=0" in listed[0]


def test_make_gpu_real_runs_the_study_on_the_gpu() -> None:
    made = subprocess.run(
        ["make", "-n", "gpu-real", "PYTHON=python", "ARGS=model.file=f"], cwd=ROOT, capture_output=True
    )
    assert b"python tests/gpu/study.py --runs 'runs' --slice 540 device=cuda model.file=f" in made.stdout
