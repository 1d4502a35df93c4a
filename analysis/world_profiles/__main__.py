"""Run the two sweeps of a world's profile where they are not finished; save the profile and print it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy

from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import named_design
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.sweeps.planned_runs import sweep_name
from grpo_lab.tasks.warm_start import ArithmeticBase
from grpo_lab.tracking.files import write_json
from world_profiles.profile import SAVED, Fit, measure_profile, profile_text

OF_THE_TESTS = "tiny"  # seconds a run, and too small for a profile


def worlds() -> list[str]:
    """The options of world= whose base models come with grpo_lab, without that of the tests."""
    names = (path.stem for path in sorted((conf_folder() / "world").glob("*.yaml")))
    return [name for name in names if name != OF_THE_TESTS and isinstance(_run(name).model, ArithmeticBase)]


def _run(world: str) -> RunConfig:
    return to_run(compose_config([f"world={world}"]))


def measure(world: str, overrides: Sequence[str], runs_dir: Path, to: Path) -> str:
    """Run the sweeps of one world, save its profile in the folder `to`, and return it as text."""
    run = _run(world)
    needed = run.task.needed_tokens("train")
    if needed is None:
        raise ValueError(f"world={world}: its task does not know how many tokens an answer needs")
    sweeps: list[SweepData] = []
    for name in ("card", "card_updates"):
        design = replace(named_design(name), name=f"{name}_{world}")
        words = [f"+experiments={name}", f"design.name={design.name}", f"world={world}", "tracking=none"]
        words += [f"runs_dir='{runs_dir}'", *overrides]
        if subprocess.run([sys.executable, "-m", "grpo_lab.train", *words]).returncode != 0:
            sys.exit(1)
        sweeps.append(load_sweep(runs_dir, sweep_name(design, words)))
    budget = run.engine.max_tokens
    fit = Fit(budget, sum(tokens <= budget for tokens in needed) / len(needed), float(numpy.quantile(needed, 0.95)))
    runs, updates = sweeps
    profile = measure_profile(world, runs, updates, fit)
    write_json(to / f"{world}.json", profile, sort=False)
    return profile_text(profile)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="world_profiles", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="worlds (default: all of tiny models), and overrides, such as hydra.launcher.workers=2"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs (default: runs)")
    parser.add_argument("--to", type=Path, default=SAVED, help="where the profiles are saved")
    arguments = parser.parse_args()
    own = [word for word in arguments.words if "=" in word]
    for world in [word for word in arguments.words if "=" not in word] or worlds():
        print(measure(world, own, arguments.runs, arguments.to), flush=True)
