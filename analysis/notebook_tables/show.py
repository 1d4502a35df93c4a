"""What the notebooks share: which sweep they show, and how to show tables and figures in Jupyter and in a script.

A notebook of analysis/ is a Python script. Jupyter shows its tables and figures; as a script it prints its tables, and
of a figure its name and what its marks mean. It saves nothing in either case.
"""

from __future__ import annotations

import io
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.divergence.table import PREFIX
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.sources.read import read_source
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import bounds
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tracks import Track, tracks
from grpo_lab.config.folders import DATA, declared
from grpo_lab.tracking.terminal import say

REPOSITORY = Path(__file__).parents[2]
NO_ANSWERS = "answers to single questions were not saved with these numbers; what needs them says so below"
_DPI = 150
_CHARACTERS = 110  # that fit into a line of a notebook's page


def chosen_sweep() -> SweepData:
    """The sweep that the environment names: EXP (overlong, unless set), from RUNS or the repository's saved data.

    RUNS is a folder of runs or an MLflow store (sqlite:////path/mlflow.db, http://host:port); unset, the
    repository's runs. Saved data count where they hold more finished runs. Raises ValueError, with what there is,
    where neither has the sweep.
    """
    runs = os.environ.get("RUNS") or str(REPOSITORY / "runs")
    return _read(runs, os.environ.get("EXP") or "overlong")


def null_runs() -> tuple[Sequence[Track] | None, str]:
    """The runs of the sweep that NULL names in the environment, and their name in words; None for the control's own.

    They are read from where `chosen_sweep` reads. Raises ValueError as that does.
    """
    name = os.environ.get("NULL")
    if not name:
        return None, "those of the control without a loss"
    data = _read(os.environ.get("RUNS") or str(REPOSITORY / "runs"), name)
    return tracks(data, final_values(data)), f"those of the sweep {name} without a loss"


def _read(runs: str, name: str) -> SweepData:
    folder = declared(REPOSITORY / "experiments").get(name)
    return read_source(runs, name, folder and folder / DATA)


def introduction(data: SweepData, finals: FinalValues) -> str:
    """Which sweep this is, where its numbers come from, what is compared with what, and whether answers were saved."""
    question = f"\n{data.design.question}" if data.design else ""
    arms = f"{len(data.arms)} arms" + (f" at {len(data.levels)} levels" if len(data.levels) > 1 else "")
    answers = NO_ANSWERS
    if len(data.answers):
        least, most = data.answers["n"].min(), data.answers["n"].max()
        samples = f"{least}" if least == most else f"{least} to {most}"
        answers = f"answers to single questions are here, samples of each: {samples}"
    return (
        f"{data.record.name}, from {data.source}.{question}\n{arms}, compared with {data.control} at {finals.at}, "
        f"the smallest final budget of a finished run; {answers}."
    )


def finished_table(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """One row per level and arm: how many runs were planned, finished and collapsed, and what became of the others."""
    rows = []
    for level, arm in ((level, arm) for level in data.levels for arm in data.arms):
        here = data.runs[(data.runs["level"] == level) & (data.runs["arm"] == arm)]
        counts = {"planned": data.seeds_planned(level, arm), "finished": data.seeds_finished(level, arm)}
        counts["collapsed"] = finals.collapsed(level, arm)
        others = here.loc[(here["status"] != "done") & ~here["collapsed"], "status"].value_counts()
        text = ", ".join(f"{number} {status}" for status, number in others.items())
        rows.append({"level": level, "arm": arm, **counts, "others": text})
    return pd.DataFrame(rows)


def show_measures(divergence: pd.DataFrame, *names: str) -> None:
    """Some measures of the table of `divergence_table`: a row per level and arm, a column per measure.

    `value [low, high]`, then in braces what resampling questions too gives. A measure without any number has no
    column; below the table stands why not.
    """
    chosen = divergence[divergence["metric"].isin([f"{PREFIX}{name}" for name in names])]
    known = chosen.groupby("metric")["value"].transform("count") > 0
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows_of(chosen[known]):
        place = rows.setdefault((row.level, row.arm), {"level": row.level, "arm": row.arm or "all arms"})
        place[f"{_words(row.metric)}, {row.unit}"] = _measure(row)
        place["n"] = max(row.n, place.pop("n", 0))
    show_table(pd.DataFrame(rows.values()))
    why = chosen[~known].groupby("metric", sort=False)["note"].unique().map("; ".join)
    absent = why.groupby(why, sort=False).groups
    show_lines("\n".join(f"No {', '.join(map(_words, metrics))}: {note}." for note, metrics in absent.items()))


def _words(metric: str) -> str:
    return metric.removeprefix(PREFIX).replace("_", " ")


def _measure(row: Any) -> str:
    if math.isnan(row.value):
        return row.note or "-"
    decimals = 0 if abs(row.value) >= 1000 else 2
    both = bounds(row.low, row.high, f",.{decimals}f")
    crossed = "" if math.isnan(row.crossed_low) else f" {{{row.crossed_low:.2f}, {row.crossed_high:.2f}}}"
    return f"{row.value:,.{decimals}f}{both}{crossed}" + (f"; {row.note}" if row.note else "")


def show_lines(text: str) -> None:
    """Plain text: printed, and in a notebook broken between words, which its page would not do; nothing for none."""
    if not text:
        return
    if _display() is not None:
        text = "\n".join("\n".join(_broken(line)) for line in text.splitlines())
    say(text, end="\n\n")


def _broken(line: str) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, _CHARACTERS, initial_indent="", subsequent_indent=f"{indent}    ") or [""]


def show_text(text: str) -> None:
    """Markdown: rendered in a notebook, printed as it is from a script."""
    display = _display()
    if display is None:
        say(text)
    else:
        display.display(display.Markdown(text))


def show_table(table: pd.DataFrame, decimals: int = 2, otherwise: str = "") -> None:
    """A table without its index, fractions below 1000 with so many decimals; a single level has no column.

    `otherwise` is said of a table without rows.
    """
    if table.empty:
        show_lines(otherwise)
        return
    if "level" in table and not table["level"].any():
        table = table.drop(columns="level")

    def written(value: Any) -> str:
        if pd.isna(value):
            return ""
        if not isinstance(value, Real) or isinstance(value, bool):
            return str(value)
        return f"{value:,.{0 if isinstance(value, Integral) or abs(float(value)) >= 1000 else decimals}f}"

    words, display = table.map(written), _display()
    if display is None:
        say(words.to_string(index=False), end="\n\n")
    else:
        display.display(display.HTML(words.to_html(index=False, border=0)))


def show_figure(drawn: Drawn | str) -> None:
    """A figure; from a script only its name and what its marks mean. A text says why there is no figure."""
    if isinstance(drawn, str):
        show_lines(f"No figure: {drawn}.")
        return
    display = _display()
    if display is None:
        show_lines(f"Figure {drawn.name}: {drawn.bands}.")
        return
    image = io.BytesIO()
    drawn.write(image, "png", _DPI)
    width = round(96 * drawn.figure.get_size_inches()[0])
    display.display(display.Image(data=image.getvalue(), width=width, alt=f"{drawn.name}: {drawn.bands}"))


def _display() -> Any:
    """IPython's display module inside of a notebook; None in a script, which needs no IPython."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        return None
    return ipython.display
