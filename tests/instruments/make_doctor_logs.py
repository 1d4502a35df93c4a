"""Makes the logs in doctor_logs/: short runs of the loop with a planted fault each, and healthy ones.

    python tests/instruments/make_doctor_logs.py [NAME ...]

`RUNS` says the command of a run made here. `RECORDED` names runs in experiments/*/data: those of `superseded` set no
threshold, and harmed runs never do. A log keeps the metrics that the doctor reads, with three digits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.instruments.doctor.rules import RULES
from grpo_lab.tracking.run_reader import read_steps

ROOT = Path(__file__).parents[2]
LOGS = Path(__file__).parent / "doctor_logs"
# A run made here, and its overrides.
RUNS = {
    "healthy_tiny": [
        "world=tiny", "budget=steps", "budget.amount=20", "updates=four", "evaluation.every=10", "tracking=none",
    ]
}  # fmt: skip
# Experiment folder, level, arm and seed of a recorded run. The faults are those of the designs: a sampler 8 steps
# behind at a large learning rate, a reward that any long answer gets, no clip, a random reward, a cost on length, a
# verifier that takes wrong answers. The healthy ones are the first healthy run of each superseded experiment.
RECORDED = {
    "zero_variance": ("staleness_rates", "rate_4e-4", "lag_8", 945),
    "truncation": ("same_reward_pretrained", "", "plain", 9600),
    "kl_blow_up": ("clipping", "", "unbounded", 14),
    "mismatch": ("kept_cache", "rate_4e-4", "kept", 963),
    "entropy_collapse": ("clip_bounds", "random", "low_only", 9404),
    "entropy_rise": ("negative_controls", "", "random", 880),
    "length_drift": ("interruption_budgets", "tight", "soft_overlong", 921),
    "reward_up_evaluation_down": ("same_reward", "", "plain", 9000),
    "clip_no_op": ("batching", "", "one_update", 880),
    "sharpening": ("sharpness", "sums", "grpo", 9200),
    "healthy_dapo": ("superseded/dapo", "", "+clip_higher", 30),
    "healthy_interruption": ("superseded/interruption", "", "interrupt", 60),
    "healthy_iterations": ("superseded/iterations", "two", "score", 40),
    "healthy_overlong": ("superseded/overlong", "constant", "mask_after", 10),
    "healthy_phantom": ("superseded/phantom", "", "cost_drop_outcome", 50),
    "healthy_recipes": ("superseded/recipes", "", "cispo", 22),
    "healthy_refill": ("superseded/refill", "", "active", 80),
    "healthy_solved_prompts": ("superseded/solved_prompts", "", "history", 70),
    "healthy_staleness": ("superseded/staleness", "bypass", "lag_0", 81),
}
MOST_BYTES = 29_000  # of a log; of a longer run every second, third ... step and all evaluations
KEPT = {
    "reward/mean", "train/clip_fraction", "train/loss", "train/gradient_norm",
    *(signal.metric for rule in RULES for signal in rule.signals),
}  # fmt: skip


def kept(name: str) -> bool:
    """True for a metric that the doctor reads."""
    if name.startswith("eval/sharpened") or name == "eval/heldout_training/entropy":
        return name.endswith(("/accuracy", "/entropy"))
    return name in KEPT or name in (
        "eval/downstream/accuracy",
        "eval/heldout/accuracy",
        "eval/heldout_training/accuracy",
    )


def write(name: str, steps: list[tuple[int, dict[str, float]]]) -> None:
    """Write the numbers of a run as JSONL."""
    for every in range(1, len(steps)):
        text = text_of(steps, every)
        if len(text) < MOST_BYTES:
            (LOGS / f"{name}.jsonl").write_text(text)
            return


def text_of(steps: list[tuple[int, dict[str, float]]], every: int) -> str:
    """The lines of every n-th step and of all evaluations."""
    lines = []
    for place, (step, numbers) in enumerate(steps):
        evaluated = any(metric.startswith("eval/") and value == value for metric, value in numbers.items())
        if place % every and not evaluated:
            continue
        own = {metric: float(f"{value:.3g}") for metric, value in numbers.items() if kept(metric) and value == value}
        lines.append(json.dumps({"step": step, **own}, separators=(",", ":")))
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    """Make the logs of these names, all without."""
    for name, overrides in RUNS.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "grpo_lab.train", *overrides, f"runs_dir={folder}"]
            subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL)
            (run,) = (path.parent for path in Path(folder).rglob("metrics.jsonl"))
            write(name, [(record.step, dict(record.metrics)) for record in read_steps(run)])
    for name, (experiment, level, arm, seed) in RECORDED.items():
        if names and name not in names:
            continue
        folder = ROOT / "experiments" / experiment / "data"
        points = load_data(folder, Path(experiment).name).points
        own = points[(points["level"] == level) & (points["arm"] == arm) & (points["seed"] == seed)]
        rows = own.drop(columns=["level", "arm"]).to_dict("records")
        write(name, [(int(row["step"]), {str(metric): value for metric, value in row.items()}) for row in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
