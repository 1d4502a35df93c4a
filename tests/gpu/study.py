"""The study of a pretrained model on one GPU, in slices: re-run the same command until every run has ended.

    make gpu-real                       nine minutes of it; again: what is left
    make gpu-real SLICE=1700            half an hour of it
    python tests/gpu/study.py --runs runs --slice 540 device=cuda model.file=FILE

Its sweeps are EXPERIMENTS, one after the other. How many runs share the GPU follows from the memory that the first one
takes. At the end of a slice the runs finish their step and save.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ("gpu_real", "gpu_entropy")
SLICE = 540.0  # seconds of one call, at most
SAVING = 60.0  # of these, for runs to finish their step and save, and for the data of what has ended
_INTERRUPTED = 130  # the exit status of a sweep that was ended by Ctrl-C
_SETTINGS = ("tracking=none", "hydra.sweeper.pilot=false", f"hydra.launcher.grace_seconds={SAVING * 2 / 3:g}")


def run_until(command: Sequence[str], ends: float) -> int:
    """Run a command; at `ends`, on the monotonic clock, it is interrupted as by Ctrl-C. Returns its exit status."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(max(0.0, ends - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
        return process.wait()


def save_data(name: str, runs: Path, to: Path | None) -> None:
    """Save the numbers of the experiment's newest sweep, whose name also has the overrides it was given."""
    sweeps = [path for path in (runs / "sweeps").iterdir() if path.name.partition(",")[0] == name]
    newest = max(sweeps, key=lambda path: (path / "sweep.json").stat().st_mtime).name
    words = ["data", newest, "--runs", str(runs), "--lean", "--compact"]
    words += ["--to", str(to)] if to else []
    subprocess.run([sys.executable, "-m", "grpo_lab.cli", *words], cwd=ROOT, check=True)
    print(f"draw it where seaborn is installed: make figures EXP='{newest}'", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs (runs)")
    parser.add_argument("--slice", type=float, default=SLICE, help="seconds of this call (540)")
    parser.add_argument("--to", type=Path, help="where the numbers go (default: beside each declaration)")
    parser.add_argument("--only", choices=EXPERIMENTS, help="one of its sweeps (default: all)")
    options, overrides = parser.parse_known_args()
    if options.slice <= SAVING:
        parser.error(f"--slice must be above {SAVING:g} seconds, which saving may take")
    runs, ends = options.runs.absolute(), time.monotonic() + options.slice - SAVING
    for name in [options.only] if options.only else EXPERIMENTS:
        words = [f"+experiments={name}", *_SETTINGS, f"runs_dir='{runs}'", *overrides]
        code = run_until([sys.executable, "-m", "grpo_lab.train", *words], ends)
        if code == _INTERRUPTED:
            print(f"the slice is over in {name}: re-run the same command to resume")
            return
        if code:
            sys.exit(code)
        save_data(name, runs, options.to and options.to.absolute())
    print("the study is finished")


if __name__ == "__main__":
    main()
