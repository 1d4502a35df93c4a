"""Training responses, read one by one: the prompt, the response, and the advantage of every token in the loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.text import Text

from grpo_lab.analysis.figures.palette import BLUE, VERMILLION
from grpo_lab.analysis.table_rows import records_of
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.renames import ROLLOUT_COLUMNS
from grpo_lab.tracking.sweep_record import FILE, read_sweep, sweep_folder

TOKEN_COLUMNS = ("token_advantage", "token_in_loss", "token_clipped", "token_sampled")
COLUMNS = (
    "problem_id", "response", "question", "answer", "outcome", "reward", "advantage", "length", "truncated", "in_loss",
    "in_statistics",
)  # fmt: skip
_DAMAGED = "it was edited, or the disk fails; restore it from a copy, or move it away, and the rest can be shown"
_WHITE = (255, 255, 255)


@dataclass(frozen=True)
class ShownToken:
    """One token of a response: its text, its advantage in the loss, and three facts.

    Whether it was in the loss, whether the surrogate changed its gradient (clipped), and whether the policy sampled it;
    a token that was injected was not sampled.
    """

    text: str
    advantage: float
    in_loss: bool
    clipped: bool
    sampled: bool


@dataclass(frozen=True)
class Filter:
    """Which responses to show; None means all."""

    correct: bool | None = None
    truncated: bool | None = None
    in_loss: bool | None = None
    problem: int | None = None

    def __call__(self, table: pd.DataFrame) -> pd.DataFrame:
        """The rows of a table of responses that pass."""
        chosen = {"outcome": self.correct, "truncated": self.truncated, "in_loss": self.in_loss}
        for column, value in chosen.items():
            if value is not None:
                table = table[(table[column] == 1) == value]
        return table if self.problem is None else table[table["problem_id"] == self.problem]


def find_run(name: str, runs_dir: Path, arm: str | None, level: str | None, seed: int | None) -> Path:
    """The run folder that `name` means: a folder itself, or a sweep's first run of this arm, level and seed.

    Raises ValueError that lists the choices where there is no such run.
    """
    folder = Path(name)
    if (folder / "run.json").exists():
        if (arm, level, seed) != (None, None, None):
            raise ValueError(f"{name} is one run: --arm, --level and --seed choose among the runs of a sweep")
        return folder
    if rollout_steps(folder):
        raise ValueError(f"{folder} has responses and no run.json, so it was damaged: restore that file from a copy")
    if not (sweep_folder(runs_dir, name) / FILE).exists():
        known = sorted(path.parent.name for path in (Path(runs_dir) / "sweeps").glob(f"*/{FILE}"))
        there = f"sweeps in {runs_dir}: {', '.join(known)}" if known else f"{runs_dir} holds no sweep"
        raise ValueError(f"{name!r} is neither a run folder (with run.json) nor a sweep; {there}")
    entries = read_sweep(sweep_folder(runs_dir, name)).runs
    filters = {"arm": arm, "level": level, "seed": seed}
    for key, value in filters.items():
        known = list(dict.fromkeys(getattr(entry, key) for entry in entries))
        if value is not None and value not in known:
            raise ValueError(f"{name} has no {key} {value!r}: choose from {', '.join(map(repr, known))}")
    for entry in entries:
        fits = all(value is None or getattr(entry, key) == value for key, value in filters.items())
        if fits and rollout_steps(Path(runs_dir) / entry.folder):
            return Path(runs_dir) / entry.folder
    chosen = ", ".join(f"{key} {value!r}" for key, value in filters.items() if value is not None)
    raise ValueError(f"no run of {name} with {chosen or 'any arm'} has saved rollouts yet")


def rollout_steps(folder: Path) -> list[int]:
    """The steps whose responses a run saved."""
    names = (re.fullmatch(r"step=(\d+)", path.stem) for path in (folder / "rollouts").glob("step=*.parquet"))
    return sorted(int(name.group(1)) for name in names if name)


def read_rollouts(folder: Path, step: int | None = None) -> pd.DataFrame:
    """Every response of a saved step, by default the last; a column `step` is added.

    Raises ValueError, naming the steps there are, where the run saved none of that step.
    """
    steps = rollout_steps(folder)
    if not steps:
        raise ValueError(f"{folder} saved no responses: rollouts_every sets after how many steps a run does")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"{folder} saved no responses of step {step}: steps {', '.join(map(str, steps))} are there")
    path = folder / "rollouts" / f"step={step:06d}.parquet"
    try:
        table = pd.read_parquet(path).rename(columns=ROLLOUT_COLUMNS).assign(step=step)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {_DAMAGED}") from error
    needed = [*COLUMNS, *(TOKEN_COLUMNS if "tokens" in table else ["text"])]
    if lacking := [name for name in needed if name not in table]:
        raise ValueError(f"{path} has no column {', '.join(lacking)}: {_DAMAGED}")
    return table


def tokens_of(row: Mapping[str, Any]) -> list[ShownToken]:
    """A response token by token; of runs that saved no tokens, one piece with the response's own advantage."""
    if "tokens" not in row:
        in_loss = bool(row["in_loss"])
        return [ShownToken(str(row["text"]), float(row["advantage"]) if in_loss else 0.0, in_loss, False, True)]
    columns = [row["tokens"], *(row[name] for name in TOKEN_COLUMNS)]
    return [
        ShownToken(str(text), float(advantage), bool(in_loss), bool(clipped), bool(sampled))
        for text, advantage, in_loss, clipped, sampled in zip(*columns, strict=True)
    ]


def components(row: Mapping[str, Any]) -> dict[str, float]:
    """The named parts of a response's reward."""
    return {
        name.removeprefix("component_"): float(value)
        for name, value in row.items()
        if name.startswith("component_") and pd.notna(value)
    }


def paired(left: pd.DataFrame, right: pd.DataFrame) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Responses of two runs to the same prompt with the same noise: equal step, problem and number in the group.

    Raises ValueError where the two share no prompt at this step (other seeds, other curricula).
    """
    keys = ["problem_id", "response"]
    others = {tuple(row[key] for key in keys): row for row in records_of(right)}
    pairs = [(row, others[at]) for row in records_of(left) if (at := tuple(row[key] for key in keys)) in others]
    if not pairs and len(left) and len(right):
        raise ValueError(
            "the two runs drew no common prompt at this step: compare runs of the same seed and the same curriculum"
        )
    yield from pairs


def seed_of(folder: Path) -> int | None:
    """The seed of a run, from its record; None for a folder that has none."""
    path = folder / "run.json"
    return read_json(path, AFRESH).get("seed") if path.exists() else None


def scale_of(table: pd.DataFrame) -> float:
    """The largest absolute advantage among some responses, by which colours are scaled; 1 where all are 0."""
    largest = float(table["advantage"].abs().max()) if len(table) else 0.0
    return largest if largest > 0 else 1.0


def shade(advantage: float, scale: float) -> str:
    """A colour as #rrggbb: white for no advantage, blue for a positive and vermillion for a negative one."""
    strength = min(1.0, abs(advantage) / scale) ** 0.5 * 0.75
    end = tuple(int((BLUE if advantage > 0 else VERMILLION)[at : at + 2], 16) for at in (1, 3, 5))
    mixed = (round(a + (b - a) * strength) for a, b in zip(_WHITE, end))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def facts(row: Mapping[str, Any]) -> str:
    """One line: correctness, reward and its parts, advantage, length, whether truncated, whether in the loss."""
    parts = ", ".join(f"{name} {value + 0.0:+.3g}" for name, value in components(row).items())
    correctness = "not graded" if math.isnan(row["outcome"]) else "right" if row["outcome"] == 1 else "wrong"
    words = [correctness, f"reward {row['reward']:.3g} ({parts})"]
    words += [f"advantage {row['advantage']:+.3f}", f"{row['length']} tokens"]
    words += ["truncated"] if row["truncated"] else []
    words += [] if row["in_loss"] else ["not in the loss"]
    words += [] if row["in_statistics"] else ["not in the group's statistics"]
    if "tokens" in row:
        tokens = tokens_of(row)
        masked, clipped = sum(not token.in_loss for token in tokens), sum(token.clipped for token in tokens)
        words += [f"{masked} tokens masked"] if masked and row["in_loss"] else []
        words += [f"{clipped} clipped"] if clipped else []
    return "; ".join(words)


def response_text(row: Mapping[str, Any], scale: float) -> Text:
    """A response for a terminal: background by advantage, grey where masked, underlined where clipped, italic where
    injected."""
    text = Text()
    for token in tokens_of(row):
        style = f"#000000 on {shade(token.advantage, scale)}" if token.in_loss else "grey50"
        style += " underline bold" if token.clipped else ""
        style += "" if token.sampled else " italic"
        text.append(token.text, style)
    return text


LEGEND = (
    "background blue: positive advantage, orange: negative, stronger is larger; grey: not in the loss; underlined: the "
    "surrogate changed its gradient; italic: injected"
)
