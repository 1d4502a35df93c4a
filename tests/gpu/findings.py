"""What a part of the proof finds: one row for each check, written at once, so that a part that is killed loses none.

Imported first by every script of this folder: it puts the repository on sys.path, for child processes too, and
keeps transformers off the network. Needs nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attainable import attainable_table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACES = [str(place) for place in (ROOT, HERE.parent / "shared", HERE.parent / "benchmarks", HERE)]

Row = dict[str, Any]


def prepare_environment() -> None:
    """Make the repository importable here and in child processes, and forbid transformers the network."""
    sys.path[:0] = [place for place in PLACES if place not in sys.path]
    inherited = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in ("", *PLACES)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *inherited])
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products whose bits repeat
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many processes share the machine


prepare_environment()


@dataclass(frozen=True)
class Findings:
    """The rows of one part. `small` is a size that a CPU computes in seconds; `ends` is when the part is killed."""

    device: str
    small: bool
    file: Path | None
    ends: float

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def add(
        self,
        check: str,
        value: float | str,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        more_than: float | None = None,
        about: str = "",
    ) -> None:
        """A number in its unit. With a bound it is a check, which NaN never passes; `about` says what else is known."""
        bounds = {"at most": at_most, "at least": at_least, "more than": more_than}
        bound = ", ".join(f"{words} {limit:g}" for words, limit in bounds.items() if limit is not None)
        ok = None
        if bound:
            ok = (
                (at_most is None or value <= at_most)
                and (at_least is None or value >= at_least)
                and (more_than is None or value > more_than)
            )
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        self._write({"check": check, "value": value, "unit": unit, "bound": bound, "ok": ok, "about": about})

    def verdict(self, check: str, ok: bool, value: str, about: str = "") -> None:
        """A check without a number."""
        self._write({"check": check, "value": value, "unit": "", "bound": "", "ok": ok, "about": about})

    def detail(self, check: str, value: float, unit: str, about: str) -> None:
        """A number that the results file keeps and no page shows."""
        row = {"check": check, "value": value, "unit": unit, "bound": "", "ok": None, "about": about, "detail": True}
        self._write(row)

    def leave_out(self, check: str, reason: str) -> None:
        """Say what was not done, and why."""
        self._write({"check": check, "value": reason, "unit": "", "bound": "", "ok": None, "left_out": True})

    @contextlib.contextmanager
    def guarded(self, check: str) -> Iterator[None]:
        """A failure inside is one failed row, and what follows goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            said = (str(error).splitlines() or [""])[0]
            self.verdict(check, False, f"{type(error).__name__}: {said[:160]}")

    def _write(self, row: Row) -> None:
        if self.file is None:
            print(line_of("", row), flush=True)
            return
        with self.file.open("a") as sink:
            sink.write(json.dumps(row) + "\n")


def read_rows(file: Path) -> list[Row]:
    """The rows of a part; a last line that was cut off by a kill is left out."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run_part(measure: Callable[[Findings], None]) -> None:
    """The command line of a part: `python tests/gpu/equal.py --device cuda`."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a size that a CPU computes in seconds")
    parser.add_argument("--to", type=Path, help="write the rows there, one JSON object a line (default: print them)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when this part will be killed")
    options = parser.parse_args()
    measure(Findings(options.device, options.small, options.to, time.monotonic() + options.seconds))


def shown(value: float) -> str:
    """A number as a table shows it."""
    whole = value == int(value) and abs(value) < 1e15
    return f"{value:,.0f}" if whole or abs(value) >= 1000 else f"{value:.3g}"


def result_of(row: Row) -> str:
    """ok, FAILED, left out, or nothing for a number that is only reported."""
    if row.get("left_out"):
        return "left out"
    return "" if row["ok"] is None else "ok" if row["ok"] else "FAILED"


def cells(part: str, row: Row) -> tuple[str, ...]:
    """A row of the table: part, check, value, unit with bound (or what is said in words), result."""
    if isinstance(row["value"], str):
        return part, row["check"], "", row["value"], result_of(row)
    limit = " ".join(filter(None, [row["unit"], f"({row['bound']})" if row["bound"] else ""]))
    return part, row["check"], shown(row["value"]), limit, result_of(row)


def line_of(part: str, row: Row) -> str:
    """A row of the table that the driver prints while the parts run; a failure with all that is known of it."""
    part, check, value, limit, result = cells(part, row)
    known = f": {row['about']}" if result == "FAILED" and row["about"] else ""
    return f"{part:<7} {check:<52} {value:>11}  {limit:<28}  {result}{known}".rstrip()


def markdown(results: dict[str, Any]) -> str:
    """A results file as a table for README.md."""
    lines = [f"{results['machine']['device']}; {words_of(results['versions'])}:", ""]
    lines += [*attainable_table(results["parts"].get("speed", {"rows": []})["rows"]), ""]
    lines += ["| part | check | value | unit (bound) | result |", "|---|---|--:|---|---|"]
    for part, found in results["parts"].items():
        lines += [f"| {' | '.join(cells(part, row))} |" for row in found["rows"] if not row.get("detail")]
        if found["state"] != "ended":
            lines.append(f"| {part} | the whole part | {found['state']} | | FAILED |")
    return "\n".join(lines)


def words_of(versions: dict[str, str | None]) -> str:
    """`torch 2.11.0, transformers 5.17.0`."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def last_lines(text: str, number: int = 15) -> Sequence[str]:
    """The end of a log."""
    return text.splitlines()[-number:]
