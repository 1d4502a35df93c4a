"""Tests the training loop on a GPU: one command, six parts, one file of results.

    make gpu                                        the parts in order, for nine minutes; again: those that are left
    make gpu PARTS="equal speed"                    these parts, finished or not; what is recorded of others stays
    python tests/gpu/run.py --device cpu --small    the same code at the size of a test
    python tests/gpu/run.py --table FILE            a results file as markdown

It runs from the checkout with the Python it is started with, needs torch, transformers, pandas, pyarrow, scipy and
hydra-core there, and never a network. Every part is a process with a time limit of its own; the file is written after
each. A part that has ended is not run again while the sources, the versions and the size are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
from findings import HERE, ROOT, last_lines, line_of, markdown, read_rows, result_of, words_of

RESULTS = HERE.parent / "benchmarks" / "results"


@dataclass(frozen=True)
class Part:
    """One script of this folder, killed after `seconds`."""

    name: str
    seconds: float
    file: Path


_SAME = ("versions", "small", "source")  # what a part that has ended must share with this call
SLICE = 540.0  # seconds of one call, at most
# By priority. Files are named after their parts, but for `profile`, which is a module of Python's own.
PARTS = {
    name: Part(name, seconds, HERE / f"{'profiled' if name == 'profile' else name}.py")
    for name, seconds in {"profile": 100, "equal": 110, "learn": 155, "speed": 210, "variants": 200, "many": 88}.items()
}
_SOURCES = ("grpo_lab/**/*.py", "conf/**/*.yaml", "tests/gpu/*.py", "tests/benchmarks/*.py", "tests/shared/*.py")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a part and everything it started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def limit_of(part: Part, options: argparse.Namespace) -> float:
    """Seconds after which a part is killed: no part is longer than a call."""
    return min(part.seconds * options.patience, options.slice)


def run_part(part: Part, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one part to its end or its limit, its rows shown as they come; returns what it found."""
    rows, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    limit = limit_of(part, options)
    command = [sys.executable, part.file, "--device", options.device, "--to", rows, "--seconds", limit]
    command += ["--small"] if options.small else []
    started, printed = time.monotonic(), 0
    with log.open("w") as sink:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        state = None
        try:
            while state is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=0.2)
                    state = "ended" if code == 0 else f"ended with exit code {code}"
                if state is None and time.monotonic() - started > limit:
                    state = f"killed after {limit:.0f} s"
                found = read_rows(rows)
                for row in found[printed:]:
                    print(line_of(part.name, row), flush=True)
                printed = len(found)
        finally:
            stop(process)
    seconds = time.monotonic() - started
    result = {"state": state, "seconds": round(seconds, 1), "rows": read_rows(rows)}
    if state == "ended" and not result["rows"]:
        result["state"] = state = "found nothing"
    if state != "ended":
        result["log"] = last_lines(log.read_text(errors="replace"))
        print(f"{part.name:<7} FAILED: {state}; the end of what it said:", flush=True)
        print("\n".join(f"        {line}" for line in result["log"]), flush=True)
    print(f"{part.name:<7} {'took':<52} {seconds:>11.0f}  s (at most {limit:g})", flush=True)
    return result


def failed(results: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What failed in these parts, one line each."""
    lines = []
    for name in names:
        found = results["parts"][name]
        lines += [] if found["state"] == "ended" else [f"{name}: {found['state']}"]
        lines += [f"{name}: {row['check']}" for row in found["rows"] if result_of(row) == "FAILED"]
    return lines


def write(results: dict[str, Any], target: Path) -> None:
    """Write the file whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(json.dumps(results, indent=0) + "\n")
    os.replace(partial, target)


def commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ; None without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def digest_of_sources() -> str:
    """A digest of the code whose results these are: of files, since a machine may have a copy without git."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def has_ended(found: dict[str, Any] | None, about: dict[str, Any]) -> bool:
    """Whether a part ran to its end with this code, these versions and this size; its checks may have failed."""
    return found is not None and found["state"] == "ended" and all(found.get(key) == about[key] for key in _SAME)


def file_name(device: str) -> str:
    """gpu_nvidia_h200.json"""
    return "gpu_" + re.sub("[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """Say what is here and what will be left out; ends with one sentence where the proof cannot run."""
    if words := machine.complaint():
        sys.exit(f"error: {words}")
    try:
        gpu = machine.ask_torch()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(f"error: {error}: install torch so that `{sys.executable} -c 'import torch'` works")
    if options.device == "cuda" and not gpu["cards"]:
        sys.exit(
            f"error: torch {machine.version_of('torch')} (CUDA {gpu['cuda']}) sees no GPU: install a CUDA build of "
            "torch and its driver, or try the code with --device cpu --small"
        )
    versions = machine.versions()
    device = gpu["name"] if options.device == "cuda" else machine.processor()
    memory = f", {gpu['memory_bytes'] / 2**30:.0f} GiB" if options.device == "cuda" else ""
    print(f"device   {device}{memory}, {os.cpu_count()} CPU cores")
    print(f"software {words_of(versions)}, CUDA {gpu['cuda']}")
    left_out = machine.absent()
    for name, lost in left_out.items():
        print(f"without  {name}: left out is {lost}" if "nothing" not in lost else f"without  {name}: {lost}")
    return {
        "machine": {"device": device, "cores": os.cpu_count(), "platform": sys.platform, **gpu},
        "versions": versions,
        "left_out": left_out,
        "small": options.small,
        "parts": {},
    }


def run_parts(
    parts: Sequence[Part], options: argparse.Namespace, results: dict[str, Any], target: Path, again: bool = True
) -> list[str]:
    """Run parts one after another into `results`, and write the file after each; returns those left for another call.

    Parts that have ended with this code run only `again`. A part is begun only if its limit ends within `options.slice`
    seconds.
    """
    about = {"versions": results["versions"], "small": results["small"], "source": digest_of_sources()}
    about |= {"commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    todo = [part for part in parts if again or not has_ended(results["parts"].get(part.name), about)]
    for part in parts:
        if part not in todo:
            print(f"{part.name:<7} has ended with this code: name it to run it again")
    ends = time.monotonic() + options.slice
    with tempfile.TemporaryDirectory(prefix="grpo_lab_gpu_") as folder:
        for number, part in enumerate(todo):
            if number and time.monotonic() + limit_of(part, options) > ends:
                return [one.name for one in todo[number:]]
            results["parts"][part.name] = {**about, **run_part(part, options, Path(folder))}
            write(results, target)
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: what has not ended)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a size that a CPU computes in seconds")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every time limit (1)")
    parser.add_argument("--slice", type=float, default=SLICE, help="seconds after which no part is begun (540)")
    parser.add_argument("--to", type=Path, help="the results file, kept and extended (default: named after the GPU)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a results file as markdown, measure nothing")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the driver ends the part that runs
    if options.table:
        print(markdown(json.loads(options.table.read_text())))
        return
    names = options.parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if options.patience <= 0 or options.slice <= 0:
        parser.error("--patience and --slice must be above 0")
    results = begin(options)
    print(f"\n{'part':<7} {'check':<52} {'value':>11}  {'unit (bound)':<28}  result")
    target = options.to
    if target is None and (options.small or options.device == "cpu"):
        target = Path(tempfile.mkdtemp(prefix="grpo_lab_gpu_")) / file_name(results["machine"]["device"])
    elif target is None:
        target = RESULTS / file_name(results["machine"]["device"])
    if target.exists():  # what is recorded of the other parts stays, each with its own commit and versions
        results["parts"] = json.loads(target.read_text())["parts"]
    left = run_parts([PARTS[name] for name in names], options, results, target, bool(options.parts))
    print(f"all numbers: {target}")
    if left:
        print(f"left for another call: {', '.join(left)}")
    if problems := failed(results, [name for name in names if name not in left]):
        sys.exit("failed:\n" + "\n".join(f"  {line}" for line in problems))
    print("every check passed" if not left else "every check so far passed: re-run the same command to resume")


if __name__ == "__main__":
    main()
