"""Two folders of one run compared: what was logged, what was answered, the last weights, and where each was computed.

Three outcomes:

    equal       metrics.jsonl has the same bytes, tables have the same values, the last weights the same bits
    rounding    the two were computed on another processor, device or number of threads or processes, or with another
                version of a package that computes; the sources are the same; every table has the same answers, that
                is, the same texts, tokens, counts and marks; and every other number differs by no more than 1e-6 plus
                a thousandth of the largest size that this number has in the run; mismatch/*, which measures rounding
                itself, by 1e-5 plus that. Weights do not decide: an optimiser that divides a gradient by its size
                turns rounding into steps
    different   anything else

On a CPU, with the same code and packages, only `equal` is right.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.table_rows import aligned
from grpo_lab.run.checkpoint import complete
from grpo_lab.tracking.checksums import MANIFEST, read_json
from grpo_lab.tracking.provenance import COMPUTING
from grpo_lab.tracking.renames import ADDED_COLUMNS, ROLLOUT_COLUMNS
from grpo_lab.tracking.run_reader import has_ended, read_steps

ABSOLUTE, RELATIVE = 1e-6, 1e-3  # what rounding may make of a logged number
_OF_ROUNDING = 1e-5  # and of mismatch/*, which measures rounding: the largest of many differences, each good to 1e-6
_TABLES = ("eval", "rollouts")
_WEIGHTS = "the last weights"
_COPY = "restore it from a copy"


class Outcome(Enum):
    """See above."""

    equal = "equal"
    rounding = "equal up to rounding"
    different = "different"


@dataclass(frozen=True)
class Difference:
    """A difference: a metric or a column of a table, its first step, and its largest size.

    `largest` is NaN where there is no number to subtract; `note` then says what differs. `rounds` says whether it is no
    more than rounding makes of such a number.
    """

    what: str
    step: int
    largest: float
    rounds: bool
    note: str = ""


@dataclass(frozen=True)
class Compared:
    """The outcome, what differs, and where the two were computed otherwise: a fact, there and here.

    `steps` is the last step that was compared, `notes` what was not compared.
    """

    outcome: Outcome
    steps: int
    differences: Sequence[Difference]
    elsewhere: Sequence[tuple[str, str, str]]
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """The outcome and the two tables, in words."""
        lines = [f"{self.outcome.value}: steps 0 to {self.steps} compared"]
        if self.differences:
            rows = [("what", "first at step", "largest difference")]
            rows += [
                (one.what, str(one.step), one.note if math.isnan(one.largest) else f"{one.largest:.3g}")
                for one in self.differences
            ]
            lines += ["", *aligned(rows, "  ")]
        if self.elsewhere:
            lines += ["", *aligned([("computed with", "there", "here"), *self.elsewhere], "  ")]
        return [*lines, *self.notes]


def compare_runs(there: Path, here: Path, steps: int | None = None) -> Compared:
    """Compare the run in `here` with that in `there`: all of it, or the log and the tables up to step `steps`.

    Raises ValueError with the file for a log or a table that cannot be read.
    """
    whole, most = steps is None, sys.maxsize if steps is None else steps
    differences = list(_logs(there, here, most))
    answers = list(_tables(there, here, most))
    notes: list[str] = []
    weights: list[Difference] = []
    if whole:
        weights = list(_weights(there, here, notes))
        if has_ended(there) and not has_ended(here):
            weights.append(Difference("its end", last_step(here), math.nan, False, "the second run has not ended"))
    else:
        notes.append("Of these first steps the log and the tables are compared, not the weights.")
    elsewhere, computed = _elsewhere(there, here)
    found = [*differences, *answers, *weights]
    outcome = Outcome.equal
    if found:
        rounds = computed and all(one.rounds for one in found)
        outcome = Outcome.rounding if rounds else Outcome.different
    return Compared(outcome, min(last_step(there), last_step(here), most), found, elsewhere, notes)


def last_step(folder: Path) -> int:
    """The last step that a run has logged; 0 if none."""
    return max((record.step for record in read_steps(folder)), default=0)


def _logs(there: Path, here: Path, most: int) -> Iterator[Difference]:
    """The metrics in which two logs differ, the first to differ first."""
    one, other = (_lines(folder, most) for folder in (there, here))
    if one == other:
        return
    logs = [
        {record.step: record.metrics for record in read_steps(folder) if record.step <= most}
        for folder in (there, here)
    ]
    if alone := sorted(logs[0].keys() ^ logs[1].keys()):
        where = "only there" if alone[0] in logs[0] else "only here"
        yield Difference("steps", alone[0], math.nan, False, f"{len(alone)} {where}")
    both = sorted(logs[0].keys() & logs[1].keys())
    names = {name for log in logs for step in both for name in log[step]}
    found = []
    for name in names:
        pairs = [(step, *(log[step].get(name) for log in logs)) for step in both]
        lacks = [step for step, *values in pairs if (values[0] is None) != (values[1] is None)]
        if lacks:
            found.append(Difference(name, lacks[0], math.nan, False, "logged by only one"))
            continue
        known = [(step, a, b) for step, a, b in pairs if a is not None and b is not None]
        if (difference := _numbers(name, *map(np.array, zip(*known)))) is not None:
            found.append(difference)
    yield from sorted(found, key=lambda one: (one.step, one.what))
    if not found and not alone:
        yield Difference("metrics.jsonl", 0, math.nan, False, "the same numbers, written otherwise")


def _lines(folder: Path, most: int) -> list[bytes]:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    return [line for line in lines if json.loads(line)["step"] <= most]


def _numbers(what: str, steps: np.ndarray, one: np.ndarray, other: np.ndarray) -> Difference | None:
    """How two rows of numbers differ; NaN equals NaN."""
    one, other = one.astype(float), other.astype(float)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return None
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)[~same]
    sizes = np.abs(np.concatenate([one, other]))
    size = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    largest = float(apart.max()) if np.isfinite(apart).all() else math.inf
    absolute = _OF_ROUNDING if what.startswith("mismatch/") else ABSOLUTE
    return Difference(what, int(steps[~same][0]), largest, largest <= absolute + RELATIVE * size)


def _tables(there: Path, here: Path, most: int) -> Iterator[Difference]:
    """The columns in which tables of answers and of responses differ, each from its first table on.

    Of which steps a run keeps its responses is no part of what it computes: those of both are compared.
    """
    known: dict[str, Difference] = {}
    for kind in _TABLES:
        names = [_steps_of(folder / kind, most) for folder in (there, here)]
        for step in sorted(names[0].keys() | names[1].keys()):
            if step not in names[0] or step not in names[1]:
                if kind == "rollouts":
                    continue
                where = "only there" if step in names[0] else "only here"
                known.setdefault(kind, Difference(f"{kind} tables", step, math.nan, False, where))
                continue
            paths = [found[step] for found in names]
            if paths[0].read_bytes() == paths[1].read_bytes():
                continue
            for difference in _columns(kind, step, *map(_frame, paths)):
                first = known.setdefault(difference.what, difference)
                largest = max(first.largest, difference.largest)  # NaN, of texts, stays the first
                rounds = first.rounds and difference.rounds
                known[difference.what] = replace(first, largest=largest, rounds=rounds)
    yield from known.values()


def _steps_of(folder: Path, most: int) -> dict[int, Path]:
    found = {int(path.stem.removeprefix("step=")): path for path in folder.glob("step=*.parquet")}
    return {step: path for step, path in found.items() if step <= most}


def _frame(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path).rename(columns=ROLLOUT_COLUMNS)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): {_COPY}, or delete it, which counts as a difference"
        ) from error


def _columns(kind: str, step: int, one: pd.DataFrame, other: pd.DataFrame) -> Iterator[Difference]:
    if len(one) != len(other):
        yield Difference(f"{kind} rows", step, math.nan, False, f"{len(one)} there, {len(other)} here")
        return
    for name in one.columns.union(other.columns, sort=False):
        what = f"{kind} {name}"
        if (name not in one or name not in other) and kind == "rollouts" and name in ADDED_COLUMNS:
            continue
        if name not in one or name not in other:
            yield Difference(what, step, math.nan, False, "of only one")
            continue
        left, right = one[name], other[name]
        numbers, others = _floats(left), _floats(right)
        if numbers is None or others is None or len(numbers) != len(others):
            unlike = sum(not _alike(a, b) for a, b in zip(left, right))
            if unlike:
                yield Difference(what, step, math.nan, False, f"{unlike} of {len(left)} rows")
        elif (found := _numbers(what, np.full(len(numbers), step), numbers, others)) is not None:
            yield found


def _floats(column: pd.Series) -> np.ndarray | None:
    """The numbers of a column of real numbers, or of lists of them; None for texts, counts and marks."""
    if column.dtype.kind == "f":
        return column.to_numpy(float)
    rows = column.tolist()
    if column.dtype == object and rows and all(isinstance(row, np.ndarray) and row.dtype.kind == "f" for row in rows):
        return np.concatenate(rows).astype(float)
    return None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one == other or (pd.isna(one) and pd.isna(other))


def _weights(there: Path, here: Path, notes: list[str]) -> Iterator[Difference]:
    """How the weights of the last checkpoints differ; `notes` gets a line where they cannot be compared."""
    places = [complete(folder / "checkpoints") for folder in (there, here)]
    if not places[0]:
        notes.append("The first run kept no checkpoint, so no weights are compared.")
        return
    if not places[1] or places[1][-1].name != places[0][-1].name:
        names = [found[-1].name if found else "none" for found in places]
        yield Difference(_WEIGHTS, 0, math.nan, False, f"{names[0]} there, {names[1]} here")
        return
    ends = [found[-1] for found in places]
    step = int(ends[0].name.removeprefix("step="))
    digests = [_digests(end) for end in ends]
    if digests[0] == digests[1]:
        return
    from safetensors.torch import load_file

    tensors = [{f"{name}:{key}": value for name in own for key, value in load_file(end / name).items()}
               for own, end in zip(digests, ends)]  # fmt: skip
    shapes = [{name: (value.shape, value.dtype) for name, value in own.items()} for own in tensors]
    if shapes[0] != shapes[1]:
        yield Difference(_WEIGHTS, step, math.nan, False, "tensors of other names, shapes or types")
        return
    largest = max(float((tensors[0][name].double() - tensors[1][name].double()).abs().max()) for name in tensors[0])
    if largest != 0:
        yield Difference(_WEIGHTS, step, largest, math.isfinite(largest))


def _digests(checkpoint: Path) -> dict[str, str]:
    files: Mapping[str, str] = read_json(checkpoint / MANIFEST, _COPY)["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


def _elsewhere(there: Path, here: Path) -> tuple[list[tuple[str, str, str]], bool]:
    """Differences of machine and software between the two, and whether these explain rounding."""
    facts = [_facts(folder) for folder in (there, here)]
    names = list(dict.fromkeys([*facts[0], *facts[1]]))
    rows = [(name, facts[0].get(name, "-"), facts[1].get(name, "-")) for name in names]
    different = [row for row in rows if row[1] != row[2]]
    changed = {name for name, *_ in different}
    explaining = {"processor", "threads", "processes", "device", "GPU", *COMPUTING}
    return different, bool(changed & explaining) and "sources" not in changed


def _facts(folder: Path) -> dict[str, str]:
    """Where a run was computed, in words; of a run of several attempts, each different value."""
    described = read_json(folder / "run.json", _COPY)
    facts = {"device": [described["identity"]["device"]]}
    facts["processes"] = [str(one["number"]) for one in described.get("ranks", [{"number": 1}])]
    facts["sources"] = [one["sources"][:12] for one in described["stretches"]]
    facts["commit"] = [_commit(one) for one in described["stretches"]]
    for path in sorted(folder.glob("environment*.json")):
        found = read_json(path, _COPY)
        facts.setdefault("processor", []).append(found["cpu"]["model"])
        facts.setdefault("threads", []).append(str(found["threads"].get("torch.get_num_threads", "-")))
        facts.setdefault("GPU", []).append(", ".join(gpu["name"] for gpu in found["gpus"]) or "none")
        facts.setdefault("python", []).append(found["python"])
        facts.setdefault("platform", []).append(found["platform"])
        for name, version in found["packages"].items():
            facts.setdefault(name, []).append(version)
    return {name: " and ".join(sorted(set(values))) for name, values in facts.items()}


def _commit(segment: Mapping[str, Any]) -> str:
    dirty = f" with changes {(segment['diff_sha256'] or '')[:8]}".rstrip() if segment["dirty"] else ""
    return f"{(segment['commit'] or 'none')[:12]}{dirty}"
