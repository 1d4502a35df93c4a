"""What a dry run says that the rest of a sweep costs, and that it says it soon."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import composed
from slurm_node import SETTINGS

from grpo_lab.config.run_config import to_run
from grpo_lab.sweeps.estimate import NOT_MEASURED, estimate_lines, estimates, measured, wall_seconds
from grpo_lab.sweeps.launching import LocalRunLauncher
from grpo_lab.sweeps.planned_runs import Plan, PlannedRun
from grpo_lab.sweeps.slurm import SlurmRunLauncher
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_log import RunLog

BASE = to_run(composed("world=tiny", "tracking=none", "device=cpu", "budget=steps", "budget.amount=10")[0])
CHOICES = {"model": "tiny_base", "engine": "native"}
IDENTITY = {"device": "cpu"}


def planned(runs: Path, arm: str, seed: int, level: str = "", amount: float = 10.0, axis: str = "steps") -> PlannedRun:
    budget = replace(BASE.budget, axis=type(BASE.budget.axis)(axis), amount=amount)
    run = replace(BASE, budget=budget, seed=seed, runs_dir=str(runs))
    return PlannedRun(Plan(arm, level, seed, ()), run, runs / f"{arm}{level}" / f"seed={seed}", CHOICES)


def run_of(one: PlannedRun, seconds: float, steps: int = 10, done: bool = True, **config: object) -> PlannedRun:
    """Its run, of steps that take so long and sample 100 tokens each; the last step may be the end."""
    one.folder.mkdir(parents=True)
    budget = {"budget.axis": one.run.budget.axis.value, "budget.amount": one.run.budget.amount}
    batch = {"problems_per_step": BASE.problems_per_step, "group_size": BASE.group_size}
    write_json(
        one.folder / "run.json", {"config": {**budget, **batch, **config}, "choices": CHOICES, "identity": IDENTITY}
    )
    log = RunLog(one.folder)
    for step in range(steps + 1):
        spent = {"budget/steps": step, "budget/sampled_tokens": 100 * step, "budget/flops": 1e6 * step}
        timing = {"time/train": seconds, "time/tokens_per_second": 1e9} if step else {"time/evaluate": 0.0}
        log.write_step(step, spent, timing)
    if done:
        log.mark_done({})
    log.close()
    return one


def expected(planned_runs: list[PlannedRun], runs: Path, *pilots: PlannedRun) -> dict[str, tuple[float, str]]:
    found = estimates(planned_runs, pilots, "probe", runs)
    return {one.planned.plan.title: (one.seconds, one.source) for one in found}


def test_the_best_source_is_taken_and_named(tmp_path: Path) -> None:
    runs = [planned(tmp_path, arm, seed) for seed in (0, 1) for arm in ("plain", "mask")]
    said = estimate_lines(estimates(runs, (), "probe", tmp_path), 2)
    assert said == [f"left to run: 4 runs; {NOT_MEASURED}"]

    run_of(planned(tmp_path, "old", 5, amount=20.0), 1.0, steps=20)
    found = expected(runs, tmp_path)
    assert found["plain seed=0"][0] == pytest.approx(10.0), "twenty steps took twenty seconds, and ten are left"
    assert "of the same model, engine and device" in found["plain seed=0"][1]

    pilot = run_of(planned(tmp_path / "pilots", "mask", 9, amount=5.0), 3.0, steps=5)
    found = expected(runs, tmp_path, pilot)
    assert found["mask seed=0"] == (pytest.approx(30.0), "pilots of the same arm")
    assert found["plain seed=0"] == (pytest.approx(30.0), "pilots")

    run_of(runs[0], 2.0)
    found = expected(runs, tmp_path, pilot)
    assert found["plain seed=1"] == (pytest.approx(20.0), "finished runs of the same arm")
    assert found["mask seed=1"] == (pytest.approx(20.0), "finished runs of other arms")
    assert "plain seed=0" not in found


def test_another_budget_scales_and_one_of_tokens_says_its_tokens_itself(tmp_path: Path) -> None:
    done = run_of(planned(tmp_path, "plain", 0), 2.0)
    more = planned(tmp_path, "plain", 1, amount=30.0)
    tokens = planned(tmp_path, "plain", 2, level="tokens", amount=500.0, axis="sampled_tokens")
    found = {one.planned.plan.seed: one for one in estimates([done, more, tokens], (), "probe", tmp_path)}
    assert (found[1].seconds, found[1].tokens, found[1].flops) == pytest.approx((60.0, 3000.0, 3e7))
    assert (found[2].seconds, found[2].tokens) == pytest.approx((10.0, 500.0)), "half of the thousand tokens"
    assert found[2].source == "finished runs of other arms and levels"
    alone = estimates([tokens], (), "probe", tmp_path / "empty")[0]
    assert math.isnan(alone.seconds) and alone.source == ""
    assert alone.tokens == pytest.approx(500.0), "the budget says it"


def test_runs_of_another_model_device_or_batch_do_not_count(tmp_path: Path) -> None:
    wanted = [planned(tmp_path, "plain", 0)]
    other = run_of(planned(tmp_path, "old", 1), 1.0, group_size=99)
    assert expected(wanted, tmp_path)["plain seed=0"][1] == ""
    by_tokens = [planned(tmp_path, "plain", 0, amount=100.0, axis="sampled_tokens")]
    assert expected(by_tokens, tmp_path)["plain seed=0"][0] == pytest.approx(1.0), "a token costs what it costs"
    for field, value in (("choices", {**CHOICES, "model": "sums_base"}), ("identity", {"device": "cuda"})):
        described = json.loads((other.folder / "run.json").read_text())
        write_json(other.folder / "run.json", {**described, field: value})
        assert expected(by_tokens, tmp_path)["plain seed=0"][1] == ""
        write_json(other.folder / "run.json", described)


def test_what_a_run_has_done_is_not_counted_again(tmp_path: Path) -> None:
    run_of(planned(tmp_path, "plain", 0), 2.0)
    runs = [planned(tmp_path, "plain", 0), run_of(planned(tmp_path, "plain", 1), 2.0, steps=4, done=False)]
    assert expected(runs, tmp_path)["plain seed=1"][0] == pytest.approx(20.0), "without a checkpoint it begins again"
    for step, left in ((2, 16.0), (4, 12.0)):
        (runs[1].folder / "checkpoints" / f"step={step:06d}").mkdir(parents=True)
        assert expected(runs, tmp_path)["plain seed=1"][0] == pytest.approx(left), "from there it goes on"


def test_a_damaged_log_is_no_measurement(tmp_path: Path) -> None:
    one = run_of(planned(tmp_path, "plain", 0), 2.0)
    found = measured(one.folder)
    assert found is not None and found.seconds == pytest.approx(20.0) and found.spent["sampled_tokens"] == 1000
    (one.folder / "metrics.jsonl").write_text("{}\n")
    assert measured(one.folder) is None
    assert measured(tmp_path) is None


def test_runs_side_by_side_take_as_long_as_the_last_of_them(tmp_path: Path) -> None:
    assert wall_seconds([10.0, 10.0, 10.0], 2) == 20.0
    assert wall_seconds([30.0, 10.0, 10.0], 2) == 30.0
    assert wall_seconds([5.0], 8) == 5.0
    run_of(planned(tmp_path, "plain", 0), 6.0)
    runs = [planned(tmp_path, "plain", seed) for seed in (1, 2, 3)]
    (left, spent, source) = estimate_lines(estimates(runs, (), "probe", tmp_path), 2)
    assert left.startswith("left to run: 3 runs take about 2m00s with 2 at once (3m00s one after another)")
    assert spent == "  they spend about 3e+03 sampled tokens and 3e+07 floating point operations"
    assert source == "  3 estimated from finished runs in " + str(tmp_path) + " of the same model, engine and device"


def test_launchers_say_how_many_run_at_once(tmp_path: Path) -> None:
    runs = [planned(tmp_path, "plain", seed) for seed in range(5)]
    assert (
        LocalRunLauncher(3, 30.0, None).workers_for(runs) == 3
        and LocalRunLauncher(None, 30.0, None).workers_for(runs) >= 1
    )
    found = [SlurmRunLauncher(at_once, 60.0, None, **SETTINGS).workers_for(runs) for at_once in (None, 2)]
    assert found == [5, 2], "all of them, or as many as are asked for"


def test_two_hundred_runs_are_estimated_within_a_second(tmp_path: Path) -> None:
    arms, seeds = [f"arm{number}" for number in range(20)], range(10)
    runs = [planned(tmp_path, arm, seed) for seed in seeds for arm in arms]
    for one in runs[:60]:
        run_of(one, 0.5)
    began = time.process_time()
    found = estimates(runs, (), "probe", tmp_path)
    assert time.process_time() - began < 1.0
    assert len(found) == 140 and all(one.source for one in found)


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    [
        ("+experiments=dapo_worlds", "seed=0,1,2,3,4,5,6,7,8,9"),
        ("world=tiny", "truncation=score,mask_after", "kl=none,k3_loss", "seed=range(0,50)"),
    ],
    ids=["a design", "lists"],
)
def test_two_hundred_runs_are_composed_and_checked_within_20_seconds_of_cpu(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """The whole command, imports included; CPU time, since other processes may share the cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            sys.executable, "-m", "grpo_lab.train", *([] if words[0].startswith("+") else ["-m"]), *words,
            "tracking=none", f"runs_dir={tmp_path}", "hydra.sweeper.dry_run=true",
        ],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and ": 200 runs" in done.stderr, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20
