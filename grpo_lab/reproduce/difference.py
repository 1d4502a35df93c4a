"""`grpo-lab diff`: what differs between two runs in configuration, code, data and machine, and from which step on."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lab.analysis.table_rows import aligned
from grpo_lab.reproduce.compare import Compared, Difference, compare_runs, last_step
from grpo_lab.tracking.checksums import read_json
from grpo_lab.tracking.provenance import changed_files
from grpo_lab.tracking.renames import with_config_keys
from grpo_lab.tracking.run_reader import read_steps

_COPY = "restore it from a copy"
_OF_THE_PLACE = ("runs_dir", "label.", "tracking.")  # where a run lies and is shown
_MACHINE = frozenset({"processor", "threads", "processes", "device", "GPU", "platform"})
_PROMPTS = ("training", "evaluation")
_SHOWN = 12  # differences of a table, unless all are asked for
# Shown first among the metrics that part at one step.
_FIRST = ("reward/", "eval/heldout/", "train/", "eval/", "rollout/")
Row = tuple[str, str, str]


def differences(one: Path, other: Path, everything: bool = False) -> list[str]:
    """The report in lines; `everything` lists all differences of a table instead of the first ones.

    The logs are compared up to the last step of the shorter one, and the last weights of two runs of one length.
    Raises ValueError for a folder that is no run of grpo_lab, or a file that cannot be read.
    """
    described = [_described(folder) for folder in (one, other)]
    for folder in (one, other):
        if next(iter(read_steps(folder)), None) is None:
            raise ValueError(f"{folder} has logged no step yet: compare it when it has")
    ends = [last_step(folder) for folder in (one, other)]
    compared = compare_runs(one, other, None if ends[0] == ends[1] else min(ends))
    machine = [row for row in compared.elsewhere if row[0] in _MACHINE]
    code = [row for row in compared.elsewhere if row[0] not in _MACHINE]
    lines = [f"A  {one}: {ends[0]} steps", f"B  {other}: {ends[1]} steps"]
    lines += _table("configuration", list(_configuration(*described)), everything)
    lines += _table("code", code, everything) + _files(*described)
    lines += _table("data and model", list(_inputs((one, other), described)), everything)
    lines += _table("machine", machine, everything)
    return [*lines, "", *_numbers(compared, everything)]


def _described(folder: Path) -> dict[str, Any]:
    """run.json. Raises ValueError unless a run of this package wrote it."""
    if not (folder / "run.json").is_file():
        raise ValueError(f"{folder} holds no run: give a run's folder, such as runs/plain/seed=0")
    described = read_json(folder / "run.json", _COPY)
    if not {"identity", "stretches", "choices", "config"} <= described.keys():
        raise ValueError(
            f"{folder} is an imported run, or one of an early version, whose record does not name its code"
        )
    return described


def _table(title: str, rows: Sequence[Row], everything: bool) -> list[str]:
    """A titled table of what A and B have, or one line that there is no difference."""
    if not rows:
        return ["", f"{title}: the same"]
    return ["", f"{title}:", *_listed(("", "A", "B"), rows, everything)]


def _listed(head: Row, rows: Sequence[Row], everything: bool) -> list[str]:
    """The rows below their head, the first ones unless `everything` is asked for."""
    shown = rows if everything else rows[:_SHOWN]
    more = [f"  and {len(rows) - len(shown)} more: --all lists them"] if len(shown) < len(rows) else []
    return [*aligned([head, *shown], "  "), *more]


def _rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Row]:
    """The keys whose values differ, with both values; `-` where one has no such key."""
    for key in dict.fromkeys([*one, *other]):
        if one.get(key) != other.get(key):
            texts = [
                json.dumps(values[key], default=str).strip('"') if key in values else "-" for values in (one, other)
            ]
            yield key, texts[0], texts[1]


def _configuration(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Row]:
    """Options that differ, then numbers."""
    yield from _rows(one["choices"], other["choices"])
    for key, *values in _rows(*(with_config_keys(described["config"]) for described in (one, other))):
        if not key.startswith(_OF_THE_PLACE):
            yield key, values[0], values[1]


def _files(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Which files of code differ between the commits of the two, where this repository has both."""
    commits = [described["stretches"][-1].get("commit") for described in (one, other)]
    if None in commits or commits[0] == commits[1]:
        return []
    try:
        changed = changed_files(commits[0], commits[1])
    except (OSError, subprocess.SubprocessError):
        return ["  changed files unknown: this repository lacks one of the two commits"]
    named = f": {', '.join(changed[:_SHOWN])}" if changed else ""
    return [f"  {len(changed)} files that a run reads differ between the commits{named}"]


def _inputs(folders: Sequence[Path], described: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Digests of the data, of the training problems, of the prompts, and of the weights that each began with."""
    found: list[dict[str, Any]] = []
    for folder, record in zip(folders, described):
        digests = {f"data {split}": digest for split, digest in (record.get("data") or {}).items()}
        base = folder / "base.json"
        weights = read_json(base, _COPY) if base.exists() else {}
        digests |= {f"training: {name}": value for name, value in (record.get("training") or {}).items()}
        hashes = {name: value for name, value in (record.get("prompts") or {}).items() if name in _PROMPTS}
        digests |= {f"prompts of {name}": value for name, value in hashes.items()}
        found.append(digests | {f"weights: {name}": value for name, value in weights.items()})
    yield from _rows(*found)


def _numbers(compared: Compared, everything: bool) -> list[str]:
    """From which step on the logs differ, and the metrics and columns that differ first."""
    found = sorted(compared.differences, key=_order)
    if not found:
        return [f"numbers: bit-identical, steps 0 to {compared.steps}", *compared.notes]
    counts = [f"{len(list(group))} from step {step} on" for step, group in groupby(found, lambda one: one.step)]
    more = f", and {len(counts) - 3} later steps with more" if len(counts) > 3 else ""
    steps = f"{', '.join(counts[:3])}{more}"
    lines = [f"numbers: bit-identical before step {found[0].step}. Metrics and columns that differ: {steps}"]
    rows = [(one.what, str(one.step), _size(one)) for one in found]
    return [*lines, *_listed(("", "first at step", "largest difference"), rows, everything), *compared.notes]


def _order(one: Difference) -> tuple[int, int, str]:
    place = next((number for number, prefix in enumerate(_FIRST) if one.what.startswith(prefix)), len(_FIRST))
    return one.step, place, one.what


def _size(one: Difference) -> str:
    return one.note if math.isnan(one.largest) else f"{one.largest:.3g}"
