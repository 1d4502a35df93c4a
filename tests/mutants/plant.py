"""Plants small faults in copies of the package, one at a time, and runs the tests that should see them.

    make mutants                              every fault of faults/, ten minutes on two idle cores
    make mutants ARGS="--only curriculum"     those whose name, file or tests hold the word
    make mutants ARGS="--workers 8"           so many at a time, each in a process of its own

A fault is killed when a test fails, or hangs, with it. One that survives shows what no test sees: it needs a test, or
a reason in the list why it changes nothing. The table goes to build/mutants.md; nothing else in the tree is written.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = ROOT / "build" / "mutants.md"
SECONDS = 200  # for the tests of one fault; a fault under which they take longer hangs

# Runs pytest where the copy is what `import grpo_lab` finds, and nowhere else.
RUN = """
import importlib.util, sys, pytest
found = importlib.util.find_spec("grpo_lab").origin
sys.exit(pytest.main(sys.argv[2:]) if found == sys.argv[1] else f"the tests would import {found}, not {sys.argv[1]}")
"""


@dataclass(frozen=True)
class Fault:
    """One change of the package, and the tests that should fail with it."""

    name: str
    file: str  # below grpo_lab
    old: str
    new: str
    does: str
    tests: tuple[str, ...]  # FILE::TEST, the file in any folder of the tests
    equivalent: str = ""  # why it changes nothing that anyone could see, where it does not

    def about(self, word: str) -> bool:
        """Whether the word stands in its name, its file or its tests."""
        return any(word in text for text in (self.name, self.file, *self.tests))


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: the test that saw it, "" where none did, and how long that took."""

    fault: Fault
    killed_by: str
    seconds: float

    @property
    def as_it_should(self) -> bool:
        """Killed, unless the list says that nobody could tell."""
        return bool(self.killed_by) is not bool(self.fault.equivalent)

    def line(self) -> str:
        """A row of the table."""
        fault = self.fault
        end = self.killed_by or (f"equivalent: {fault.equivalent}" if fault.equivalent else "**survived**")
        return f"| {fault.name} | {fault.file} | {fault.does} | {end} |"


def read(folder: Path = HERE / "faults") -> list[Fault]:
    """The faults of the lists in a folder."""
    listed = [fault for path in sorted(folder.glob("*.yaml")) for fault in yaml.safe_load(path.read_text())]
    return [Fault(**fault | {"tests": tuple(fault["tests"])}) for fault in listed]


def mistakes(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """What is wrong with a list, each with the fault's name: text that is not there once, tests that do not exist."""
    found = []
    names = [fault.name for fault in faults]
    for fault in faults:
        path, wrong = root / "grpo_lab" / fault.file, []
        text = path.read_text() if path.is_file() else ""
        if names.count(fault.name) > 1:
            wrong.append("another fault has this name")
        if (times := text.count(fault.old)) != 1:
            wrong.append(f"its old text occurs {times} times in {fault.file}: it must occur once")
        elif not is_python(planted := text.replace(fault.old, fault.new)):
            wrong.append("new is no Python there")
        elif ast.dump(ast.parse(text)) == ast.dump(ast.parse(planted)):
            wrong.append("old and new are the same code")
        if not fault.tests:
            wrong.append("no test is named that should see it")
        for test in fault.tests:
            file, _, function = test.partition("::")
            if (place := file_of(file, root)) is None:
                wrong.append(f"no folder of tests has a {file}")
            elif function.partition("[")[0] not in functions_of(place):
                wrong.append(f"{place.relative_to(root)} has no {function}")
        found += [f"{fault.name}: {what}" for what in wrong]
    return found


def is_python(text: str) -> bool:
    """Whether it can be parsed."""
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(text))
    return False


@cache
def file_of(name: str, root: Path = ROOT) -> Path | None:
    """The test file of this name, whichever folder of the tests it is in: no two have one name."""
    return next((root / "tests").rglob(name), None)


@cache
def functions_of(path: Path) -> set[str]:
    """Names of the functions of a module."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def argument(test: str) -> str:
    """A FILE::TEST of a list as pytest takes it."""
    file, _, function = test.partition("::")
    return f"{file_of(file) or file}::{function}"


class Copy:
    """The package in a folder of its own, where one file at a time may be another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.changes = folder, 0
        shutil.copytree(ROOT / "grpo_lab", folder / "grpo_lab", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conf", "experiments"):
            (folder / name).symlink_to(ROOT / name)
        self.process: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """The fault stands in the copy while this lasts."""
        path = self.folder / "grpo_lab" / fault.file
        text = path.read_text()
        self._write(path, text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Python takes compiled code for that of a source of the same size and second: each text gets its own second.
        self.changes += 1
        os.utime(path, (self.changes, self.changes))

    def run(self, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """pytest's exit status, None where it took longer, and what it said; it stops at the first test that fails."""
        package = str(self.folder / "grpo_lab" / "__init__.py")
        # Without the checks of shapes, which take half of the time and are no test of a number.
        words = ["-x", "-p", "no:cacheprovider", "-o", "addopts=-q --strict-markers", "--tb=line"]
        words.append(f"--basetemp={self.folder / 'tests'}")
        environment = os.environ | {
            "PYTHONPATH": str(self.folder), "PYTHONPYCACHEPREFIX": str(self.folder / "compiled"),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        process = self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, package, *words, *map(argument, tests)],
            cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            self.stop()

    def stop(self) -> None:
        """End the tests and whatever they have started: they are a process group of their own."""
        process, self.process = self.process, None  # once: its number may be another's later
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def judge(self, fault: Fault, seconds: float) -> Verdict:
        """Run the fault's tests with it. Raises ValueError where they cannot be run at all."""
        began = time.monotonic()
        with self.with_fault(fault):
            status, said = self.run(fault.tests, seconds)
        took = time.monotonic() - began
        if status is None:
            return Verdict(fault, f"a hang: longer than {seconds:g} s", took)
        # From 2 on pytest could not start or load the tests, which passed without the fault: that is a kill too.
        failed = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\w+)?)", said, flags=re.M)
        if status not in (0, 1, 2, 3, 4) or (status == 1 and failed is None):
            raise ValueError(f"{fault.name}: its tests do not run, so they see nothing (status {status})\n{said}")
        if status >= 2 and failed is None:
            return Verdict(fault, "its tests do not load", took)
        return Verdict(fault, failed[1] if failed else "", took)

    def check(self, tests: Sequence[str]) -> None:
        """Run tests without any fault. Raises ValueError unless all of them pass."""
        status, said = self.run(tests, 3600)
        if status != 0 or re.search(r"\d (skipped|xfailed)", said):
            raise ValueError(f"without any fault every test must pass (status {status}):\n{said}")


def judged(faults: Sequence[Fault], workers: int, seconds: float, folder: Path) -> Iterator[Verdict]:
    """Each fault's verdict, in the order of the list, after all their tests have passed without any."""
    copies = [Copy(folder / str(number)) for number in range(workers)]
    idle: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        idle.put(copy)
    tests = sorted({test for fault in faults for test in fault.tests})
    pool = ThreadPoolExecutor(workers)

    def judge(fault: Fault) -> Verdict:
        copy = idle.get()
        try:
            return copy.judge(fault, seconds)
        finally:
            idle.put(copy)

    try:
        # tests of one module beside each other: what they share is made once
        share = -(-len(tests) // workers)
        parts = [tests[first : first + share] for first in range(0, len(tests), share)]
        for checked in [pool.submit(copy.check, part) for copy, part in zip(copies, parts)]:
            checked.result()
        yield from pool.map(judge, faults)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for copy in copies:
            copy.stop()


def main() -> str | None:
    """What is wrong, for `sys.exit`; None where every fault was killed but those that change nothing."""
    parser = argparse.ArgumentParser(description="Plant faults and see which tests notice.")
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name, file or tests hold this")
    parser.add_argument("--lists", type=Path, default=HERE / "faults", help="another folder of lists")
    parser.add_argument("--table", type=Path, default=TABLE, help="where the table is written")
    parser.add_argument("--workers", type=int, default=2, help="faults at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a fault's tests hang")
    options = parser.parse_args()
    faults = [fault for fault in read(options.lists) if fault.about(options.only)]
    if wrong := mistakes(faults):
        return "the list does not fit the code:\n" + "\n".join(wrong)
    if not faults:
        return f"no fault of {options.lists} is about {options.only!r}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # as Ctrl-C: no test goes on, no copy stays
    began, lines = time.monotonic(), ["| fault | file | what it does | killed by |", "|---|---|---|---|"]
    print(f"{len(faults)} faults; their tests first run without any", flush=True)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            for verdict in judged(faults, options.workers, options.seconds, Path(folder).resolve()):
                verdicts.append(verdict)
                lines.append(verdict.line())
                print(f"{lines[-1]} {verdict.seconds:.0f} s", flush=True)
        except ValueError as error:
            return str(error)
    killed = sum(bool(verdict.killed_by) for verdict in verdicts)
    wrong = [verdict.fault.name for verdict in verdicts if not verdict.as_it_should]
    alike = sum(bool(fault.equivalent) for fault in faults)
    total = f"{len(faults)} planted, {killed} killed, {len(faults) - killed} survived, {alike} of them said to be alike"
    options.table.parent.mkdir(parents=True, exist_ok=True)
    options.table.write_text("\n".join([*lines, "", f"{total}."]) + "\n")
    print(f"{total}; {time.monotonic() - began:.0f} s; {options.table}")
    return f"not as the list says: {', '.join(wrong)}" if wrong else None


if __name__ == "__main__":
    sys.exit(main())
