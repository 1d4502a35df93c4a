"""Run every option that has no saved result, and save what each did in results.json.

    PYTHONPATH=analysis python -m every_option [OPTION ...] --runs FOLDER

OPTION is `axis=name`, or an axis for all of its options; these are run again only where their run is not finished. An
option that learns nothing with the first seed is run with the second one too.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import grpo_lab.loop  # noqa: F401  # imported once, before each run is forked
from every_option.results import RESULTS, learns, read_results
from every_option.runs import TRAINED, axis_of, is_default, options, outcome, settings, train, words_of
from grpo_lab import api
from grpo_lab.config.hydra_setup import bootstrap
from grpo_lab.deferred import load
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.provenance import commit

SEEDS = (0, 1)


class Runs:
    """Runs in forked processes, one after another."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self.pool = multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1)
        self.known: dict[tuple[Any, ...], tuple[str, str]] = {}

    def __call__(self, words: Sequence[str], seed: int) -> api.Run:
        """The finished run. Raises RuntimeError where it failed."""
        if any(TRAINED in word for word in words):
            trained = self(settings().base, SEEDS[0]).folder / "checkpoints"
            words = [word.replace(TRAINED, f"'{max(trained.glob('step=*'))}'") for word in words]
        key = (*words, seed)
        if key not in self.known:
            self.known[key] = self.pool.apply(train, (list(words), seed, self.runs_dir))
        folder, failure = self.known[key]
        if failure:
            raise RuntimeError(failure)
        return api.Run(Path(folder))


def measure(option: str, run: Runs) -> list[dict[str, Any]]:
    """What an option did in each of its settings, with a second seed where the first learnt nothing."""
    found = []
    for setting in settings().places(option):
        for seed in SEEDS:
            default = next(one for one in options() if axis_of(one) == axis_of(option) and is_default(one))
            made = run(words_of(option, setting), seed), run(words_of(default, setting), seed)
            found.append(asdict(outcome(option, setting, seed, *made)))
            if learns(found[-1:]):
                break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="every_option", description=__doc__)
    parser.add_argument("options", nargs="*", help="axis=name, or an axis (default: options without a result)")
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--to", type=Path, default=RESULTS, help="the file of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bootstrap()
    load()
    run = Runs(arguments.runs.absolute())
    saved = read_results(arguments.to)
    named = [one for one in options() if one in arguments.options or axis_of(one) in arguments.options]
    for option in named or [one for one in options() if one not in saved]:
        if option in settings().left_out:
            continue
        try:
            saved[option] = {"version": version("grpo-lab"), "commit": commit(), "runs": measure(option, run)}
        except RuntimeError as error:
            print(f"{option} FAILED: {error}", flush=True)
            continue
        last = saved[option]["runs"][-1]
        print(option, {key: last[key] for key in last if key not in ("setting", "counted")}, flush=True)
        known = {one: saved[one] for one in options() if one in saved}
        write_json(arguments.to, known, sort=False)


if __name__ == "__main__":
    main()
