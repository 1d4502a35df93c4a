"""Experiments for a card: what each states about its cost is what the measured step says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab.config.design import load_design
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.tasks.hub import HfModel

ROOT = Path(__file__).parents[2]
REAL = sorted((ROOT / "experiments").glob("real_*.yaml"))
MEASURED = ROOT / "tests" / "benchmarks" / "results" / "gpu_nvidia_h100_80gb_hbm3.json"
# Weights in matrix products, with the output head; of SmolLM2 as measured, of the others as their papers say.
WEIGHTS = {"smollm2": 134_479_872, "qwen25_0_5b": 494e6, "qwen25_1_5b": 1_544e6}
EVALUATION = 1.2  # a fifth of a run's time on top


def hours_of(level: str, tokens: float) -> float:
    """Hours of one run: SmolLM2's step as measured, in proportion to tokens and weights."""
    rows = {row["check"]: row["value"] for row in json.loads(MEASURED.read_text())["parts"]["speed"]["rows"]}
    seconds = rows["graphs: the whole step"] / rows["graphs: tokens of a step"] * tokens * EVALUATION
    (weights,) = [number for name, number in WEIGHTS.items() if level.startswith(name)]
    return seconds / 3600 * weights / WEIGHTS["smollm2"]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_hours_that_an_experiment_states(path: Path) -> None:
    design = load_design(path)
    (stated,) = re.findall(r"About (\d+) hours of one H100 for all models", path.read_text())
    (tokens,) = [float(word.partition("=")[2]) for word in design.base if word.startswith("budget.amount=")]
    runs = len(design.arms) * len(design.seeds)
    assert abs(int(stated) - runs * sum(hours_of(level, tokens) for level in design.levels)) < 1
    table = (ROOT / "experiments" / "README.md").read_text()
    assert re.search(rf"\| \[{path.stem}\]\({path.name}\) \|.*\| {stated} \|", table)


def test_every_question_of_a_card_can_be_asked_without_a_hub() -> None:
    """By its part of the smallest model, but for templates, which a base model is asked with, and for a teacher."""
    for path in REAL:
        parts = load_design(path).parts
        assert ("smollm2" in parts) is (path.stem not in ("real_templates", "real_teacher")), path.stem


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
@pytest.mark.timeout(900)
def test_what_a_card_is_asked_at_the_size_of_a_test(tmp_path: Path) -> None:
    """The commands of `make gpu-real`, on a CPU: two arms, two steps of a few short responses, saved and drawn."""
    made = subprocess.run(["make", "-n", "gpu-real", "PYTHON=python"], cwd=ROOT, capture_output=True, text=True)
    said = made.stdout
    # a make that was called by another make says first where it is
    (command,) = [line for line in said.splitlines() if "grpo_lab.train" in line]
    train = command.replace("'runs_dir=runs'", "").split()[3:]
    assert train[0] == "+experiments=gpu_real" and "device=cuda" in train, said
    assert all(word in said for word in ("grpo_lab.cli data gpu_real", "grpo_lab.cli figures gpu_real"))
    small = (
        "device=cpu", "engine=native", "hydra.launcher.workers=2", "seed=0", "budget.amount=2",
        "problems_per_step=4", "group_size=2", "task.response_tokens=64", "task.downstream_response_tokens=12",
        "task.train_size=40", "task.probe_size=4", "task.heldout_size=8", "task.downstream_size=4",
        "evaluation.probe_problems=4", "evaluation.heldout_problems=4", "evaluation.ends_heldout_problems=8",
        "evaluation.downstream_problems=4",
    )  # fmt: skip
    words = [word for word in train if word.split("=")[0] not in {one.split("=")[0] for one in small}]
    run_here("grpo_lab.train", *words, *small, f"runs_dir={tmp_path}")
    (sweep,) = [path.name for path in (tmp_path / "sweeps").iterdir()]
    said = run_here(
        "grpo_lab.cli", "data", sweep, "--runs", str(tmp_path), "--to", str(tmp_path), "--lean", "--compact"
    )
    assert "Finished cells: 4 of 12 planned." in said
    run_here("grpo_lab.cli", "figures", sweep, "--runs", str(tmp_path), "--to", str(tmp_path / "figures"))
    assert len(list((tmp_path / "figures").glob("*_effects.png"))) == 1
    assert len(list((tmp_path / "figures").glob("*_verdict.txt"))) == 1


def run_here(module: str, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
