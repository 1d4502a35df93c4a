"""A saved sweep: two tables and a description that hold enough for every figure."""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData, sweep_data
from grpo_lab.tracking.checksums import fault_in_json
from grpo_lab.tracking.files import write_atomically
from grpo_lab.tracking.metrics import is_active_fraction
from grpo_lab.tracking.renames import with_config_keys
from grpo_lab.tracking.sweep_record import SweepRecord

_WHOLE = ("budget/", "mismatch/ess", "mismatch/pearson")  # cumulative, or so near 1 that the last digits count
_BITS = 20  # of a rounded number: six digits
_SAVE_AGAIN = "restore it from a copy, or save the data again with `grpo-lab data`"


def save_data(data: SweepData, folder: Path, compact: bool = False) -> list[Path]:
    """Write `<name>.parquet` (every logged number), `<name>.answers.parquet` (every evaluated question) and
    `<name>.json.xz` (record and runs): enough for every figure. With `compact` logged numbers are `rounded`.

    All are replaced whole; the same data give the same bytes. Raises ValueError where that would lose finished
    runs, RunFolderError where it cannot write.
    """
    table, answers, described = _data_files(folder, data.record.name)
    if data.record.name in saved_names(folder):
        saved = len(load_data(folder, data.record.name).finished)
        if saved > len(data.finished):
            raise ValueError(
                f"{table} holds {saved} finished runs, these runs {len(data.finished)}: finish the sweep, or save "
                "to another folder with --to"
            )
    points, twins = _without_twins(rounded(data.points) if compact else data.points)
    write_atomically(table, lambda path: _to_parquet(points, path))
    write_atomically(answers, lambda path: _to_parquet(data.answers, path))
    runs = data.runs.astype(object).where(data.runs.notna(), None)
    # Where this machine keeps its MLflow store means nothing on another.
    record = asdict(replace(data.record, tracking=None))
    settings = [{"level": level, "arm": arm, "settings": own} for (level, arm), own in data.settings.items()]
    content = {"sweep": record, "runs": runs.to_dict("records"), "settings": settings, "twins": twins}
    content["sha256"] = {path.name: _digest(path) for path in (table, answers)}
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    earlier, described = described, folder / f"{data.record.name}.json.xz"
    write_atomically(described, lambda path: path.write_bytes(lzma.compress(text.encode(), preset=9)))
    if earlier != described:
        earlier.unlink()
    return [table, answers, described]


def with_saved(data: SweepData, folder: Path) -> SweepData:
    """The sweep with those finished runs that only the data saved in `folder` hold, if the same was declared.

    So a sweep may be run in parts, at different times or on several machines, and saved after each. A run that is
    finished in both is the one in `data`. Raises ValueError where the saved data cannot be read.
    """
    if data.design is None or data.record.name not in saved_names(folder):
        return data
    saved = load_data(folder, data.record.name)
    if saved.design is None or saved.design.fingerprint() != data.design.fingerprint():
        return data
    here, there = (set(table[LABELS].itertuples(index=False, name=None)) for table in (data.finished, saved.finished))
    only = pd.DataFrame(sorted(there - here), columns=LABELS)
    if only.empty:
        return data

    def joined(own: pd.DataFrame, kept: pd.DataFrame) -> pd.DataFrame:
        mine = own.merge(only, on=LABELS, how="left", indicator=True)["_merge"].eq("left_only").to_numpy()
        parts = [table for table in (own[mine], kept.merge(only, on=LABELS)) if len(table)]
        return pd.concat(parts, ignore_index=True) if parts else own

    runs = joined(data.runs, saved.runs)
    order = {level: number for number, level in enumerate(data.design.levels)}
    runs = runs.sort_values("seed", kind="stable").sort_values(
        "level", key=lambda level: level.map(order), kind="stable"
    )
    entries = {(entry.level, entry.arm, entry.seed): entry for entry in (*saved.record.runs, *data.record.runs)}
    pilots = {(one["level"], one["arm"], one["metric"]): one for one in (*saved.record.pilot, *data.record.pilot)}
    tuning = {(one["level"], one["arm"]): one for one in (*saved.record.tuning, *data.record.tuning)}
    matching = {(one["level"], one["arm"]): one for one in (*saved.record.matching, *data.record.matching)}
    record = replace(
        data.record,
        runs=list(entries.values()),
        declared=_without_repeats([*saved.record.declared, *data.record.declared]),
        pilot=list(pilots.values()),
        tuning=list(tuning.values()),
        matching=list(matching.values()),
    )
    return replace(
        data,
        record=record,
        runs=runs.reset_index(drop=True),
        points=joined(data.points, saved.points),
        answers=joined(data.answers, saved.answers),
        settings={**saved.settings, **data.settings},
    )


def _without_repeats(declared: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Declarations by time; one with the fingerprint of the one before is the same, made on another machine."""
    ordered = sorted(declared, key=lambda entry: entry["at"])
    return [next(same) for _, same in itertools.groupby(ordered, key=lambda entry: entry["fingerprint"])]


def evaluations_alone(data: SweepData) -> SweepData:
    """The sweep with only its evaluations and budgets, for one of many runs of which only the ends matter.

    Figures of steps, answers to single questions and the settings of arms go.
    """
    names = [str(name) for name in data.points.columns]
    evaluations = [name for name in names if name.startswith("eval/")]
    kept = [name for name in names if name in (*LABELS, "step", *evaluations) or name.startswith("budget/")]
    points = data.points.loc[data.points[evaluations].notna().any(axis=1), kept].reset_index(drop=True)
    return replace(data, points=points, answers=data.answers.head(0), settings={})


# Of what every step logs, what tables and verdicts read.
_JUDGED = frozenset(
    [
        "reward/mean",
        "reward/outcome",
        "reward/in_loss_mean",
        "reward/in_loss_outcome",
        "rollout/length",
        "rollout/truncated",
        "rollout/interrupted",
        "rollout/stopped",
        "rollout/frac_zero_std",
        "train/entropy",
        "mismatch/ess_responses",
    ]
)


def lean(data: SweepData) -> SweepData:
    """The sweep without what no table or verdict reads: most numbers of steps, and answers to single questions.

    Metrics of evaluations stay whole, and so do those that the design names, the budget on which arms are compared and
    the number of completions. Other budgets stay where something was evaluated.
    """
    named = data.design.all_metrics if data.design else ()

    def is_read(name: str) -> bool:
        if name in (*LABELS, "step") or name in _JUDGED or is_active_fraction(name):
            return True
        # A derived metric ends in the one that it is of, such as average/train/entropy.
        return name.startswith(("eval/", "start/", "budget/")) or any(f"/{one}".endswith(f"/{name}") for one in named)

    kept = [name for name in map(str, data.points.columns) if is_read(name)]
    points = data.points[kept].copy()
    evaluated = points[[name for name in kept if name.startswith("eval/")]].notna().any(axis=1)
    for name in kept:
        if name.startswith("budget/") and name not in ("budget/completions", f"budget/{data.axis}"):
            points[name] = points[name].where(evaluated)
    return replace(data, points=points, answers=data.answers.head(0))


def rounded(points: pd.DataFrame) -> pd.DataFrame:
    """The logged numbers with six digits, which take less room; counts, budgets and what lies next to 1 stay exact."""
    numbers = points.select_dtypes("float")
    kept = numbers.columns.str.startswith(_WHOLE) | (numbers.isna() | (numbers == numbers.round())).all()
    mantissa, exponent = np.frexp(numbers.loc[:, ~kept].to_numpy())
    values = np.ldexp(np.round(mantissa * 2**_BITS) / 2**_BITS, exponent)
    return points.assign(**dict(zip(map(str, numbers.columns[~kept]), values.T)))


def _without_twins(points: pd.DataFrame) -> tuple[pd.DataFrame, list[tuple[int, str, str]]]:
    """The table without columns that repeat an earlier one bit by bit, and of each its place, name and twin.

    A trick that is off logs the same numbers before and after it.
    """
    first: dict[bytes, str] = {}
    numbers, twins = set(points.select_dtypes("float").columns), []
    for place, name in enumerate(map(str, points.columns)):
        if name in numbers:
            twin = first.setdefault(points[name].to_numpy().tobytes(), name)
            twins += [] if twin == name else [(place, name, twin)]
    return points.drop(columns=[name for _, name, _ in twins]), twins


def _with_twins(points: pd.DataFrame, twins: Sequence[tuple[int, str, str]]) -> pd.DataFrame:
    """The input of `_without_twins`."""
    names = [str(name) for name in points.columns]
    for place, name, _ in twins:
        names.insert(place, name)
    return points.assign(**{name: points[twin] for _, name, twin in twins})[names]


def _to_parquet(table: pd.DataFrame, path: Path) -> None:
    """As small as it gets without losing a bit: the bytes of numbers apart by their place, everything else once.

    Statistics of columns and pandas' own description of them would be a tenth of a file; nothing here reads them.
    """
    numbers = [str(name) for name in table.select_dtypes("number").columns if name not in LABELS]
    others = [str(name) for name in table.columns if name not in numbers]
    parquet.write_table(
        pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None),
        path,
        compression="brotli",
        compression_level=11,
        column_encoding=dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
        use_dictionary=others,  # pyright: ignore[reportArgumentType] or a list, as documented; untyped
        write_statistics=False,
        store_schema=False,
    )


def load_data(folder: Path, name: str) -> SweepData:
    """Read what `save_data` wrote. Raises ValueError where there is none of this name, listing those there are."""
    table, answers, described = _data_files(folder, name)
    if not (table.exists() and described.exists()):
        known = saved_names(folder)
        there = f"there are: {', '.join(known)}" if known else "no data was saved there yet"
        raise ValueError(f"no data of {name!r} in {folder}; {there}")
    raw = _read_json(described)
    for path in (table, answers):
        written = raw.get("sha256", {}).get(path.name)  # earlier versions saved none
        if written is not None and not (path.exists() and _digest(path) == written):
            what = "is not what was saved" if path.exists() else "is missing"
            raise ValueError(f"{path} {what}: {_SAVE_AGAIN}")
    try:
        record = SweepRecord.of(raw["sweep"])
        answered = pd.read_parquet(answers) if answers.exists() else None
        settings = {
            (entry["level"], entry["arm"]): with_config_keys(entry["settings"]) for entry in raw.get("settings", ())
        }
        twins = [(place, name, twin) for place, name, twin in raw.get("twins", ())]  # earlier versions saved none
        points = _with_twins(pd.read_parquet(table), twins)
        return sweep_data(record, raw["runs"], points, answered, "saved data", settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{described} and the tables beside it cannot be read ({error!r}): {_SAVE_AGAIN}") from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def saved_names(folder: Path) -> list[str]:
    """The sweeps whose data `save_data` wrote into a folder."""
    described = (".json.xz", ".json")
    tables = folder.glob("*.parquet")
    return sorted(path.stem for path in tables if any(path.with_suffix(ending).exists() for ending in described))


def _data_files(folder: Path, name: str) -> tuple[Path, Path, Path]:
    # A name may hold dots (budget.amount=10), which with_suffix would take for the suffix.
    described, earlier = folder / f"{name}.json.xz", folder / f"{name}.json"  # earlier versions did not compress it
    described = earlier if earlier.exists() and not described.exists() else described
    return folder / f"{name}.parquet", folder / f"{name}.answers.parquet", described


def _read_json(path: Path) -> dict[str, Any]:
    content, where = path.read_bytes(), ""
    try:
        value = json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)
    except (ValueError, RecursionError, EOFError, lzma.LZMAError) as error:  # cut, edited, or no such file at all
        value, where = None, f" ({fault_in_json(content, error)})"
    if not isinstance(value, dict):
        what = "is empty" if not content else f"holds no JSON object{where}"
        raise ValueError(f"{path} {what}: it was edited, or the disk fails; restore it from a copy")
    return value
