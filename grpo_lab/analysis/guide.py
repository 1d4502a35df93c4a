"""What to open after the figures of a sweep were built: the main figure, the report, MLflow."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.analysis.sources import RUNS

if TYPE_CHECKING:
    from grpo_lab.analysis.build import Built

DATA = Path("analysis/data")


def what_to_open(
    built: Built, name: str, runs: str, data: Path | None = DATA, to: Path | None = None, program: str = "grpo-lab"
) -> list[str]:
    """Three lines, and one that says where the list of all files is.

    `runs` is what the figures were asked of, `data` where saved numbers were looked for (None: nowhere), `to` the
    folder that was asked for, `program` how this command is called here.
    """
    pictures = [path for path in built.paths if path.suffix == ".png"]
    figure = str(pictures[0]) if pictures else "none could be drawn"
    more = f"{len(built.paths)} files in all" + (
        f", {len(built.missing)} figure{'s' * (len(built.missing) > 1)} not drawn" if built.missing else ""
    )
    return [
        f"figure  {figure}",
        f"report  {_report(name, runs, data, to, program)}",
        f"MLflow  {_mlflow(runs)}",
        f"{more}: {built.listing}",
    ]


def _report(name: str, runs: str, data: Path | None, to: Path | None, program: str) -> str:
    """The command that writes the report from the same numbers."""
    if data == DATA and to is None:
        return " ".join(["make report", f"EXP={shlex.quote(name)}", *_chosen(runs)])
    words = [program, "report", name, "--runs", runs]
    words += ["--only-runs"] if data is None else ["--data", str(data)] if data != DATA else []
    return shlex.join([*words, *(["--to", str(to)] if to else [])])


def _chosen(runs: str) -> list[str]:
    return [] if runs == RUNS else [f"RUNS={shlex.quote(runs)}"]


def _mlflow(runs: str) -> str:
    if runs.startswith("http"):
        return runs
    store = Path(runs.removeprefix("sqlite:///")) if "://" in runs else Path(runs) / "mlflow.db"
    if not store.exists():
        return f"nothing to open: there is no {store}"
    if store.name != "mlflow.db":
        return shlex.join(["mlflow", "ui", "--backend-store-uri", runs])
    return " ".join(["make ui", *_chosen(str(store.parent))])
