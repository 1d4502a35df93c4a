"""What `figures`, `report`, `data` and `rollouts` say of damaged input: a table of damage and words.

Each damage is done to one run of a planted sweep, base seed 0, or to the sweep's own files. A command then works and
names that run, or ends with exit status 1 and one line that names the file and a remedy.
"""

from __future__ import annotations

import html
import json
import lzma
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from planted_sweeps import Planted, write_synthetic

from grpo_lab import cli
from grpo_lab.analysis import build
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data, saved_names
from grpo_lab.tracking.terminal import printable

PLANTED = Planted(
    tricks=("helps",),
    kind="add_one",
    seeds=(0, 1, 2),
    downstream={"helps": 0.1},
    steps=12,
    every=6,
    questions=6,
    name="small",
)
RUN = "small/base/seed=0"
HERE = "unreadable: base seed 0: "
COPY = "restore it from a copy"


def lines_of(runs: Path) -> list[dict]:
    return [json.loads(line) for line in (runs / RUN / "metrics.jsonl").read_text().splitlines()]


def write_lines(runs: Path, lines: Sequence[object]) -> None:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (runs / RUN / "metrics.jsonl").write_text(text + "\n")


def lose_numbers(runs: Path) -> None:
    lines = lines_of(runs)
    for line in lines[5:8]:
        line["nonfinite"] = {"reward/mean": "nan"}
        del line["metrics"]["reward/mean"]
    write_lines(runs, lines)


def change_line(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda runs: write_lines(runs, [*lines_of(runs)[:4], change(lines_of(runs)[4]), *lines_of(runs)[5:]])


def exchange(runs: Path) -> None:
    one, other = runs / RUN / "metrics.jsonl", runs / "small/+helps/seed=0/metrics.jsonl"
    kept = one.read_bytes()
    shutil.copy(other, one)
    other.write_bytes(kept)


def lose_column(kind: str, column: str) -> Callable[[Path], None]:
    def damage(runs: Path) -> None:
        for path in (runs / RUN / kind).glob("step=*.parquet"):
            pd.read_parquet(path).drop(columns=column).to_parquet(path)

    return damage


def truncate(name: str, size: int = 0) -> Callable[[Path], None]:
    def damage(runs: Path) -> None:
        path = runs / name
        path.write_bytes(path.read_bytes()[:size])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda runs: (runs / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda runs: (runs / name).write_bytes(content)


def redeclare(runs: Path) -> None:
    path = runs / "sweeps/small/sweep.json"
    path.write_text(path.read_text().replace('"add_one"', '"add_two"'))


@dataclass(frozen=True)
class Row:
    """A damage, and what is said of it: by figures, report (in the page) and data; and by rollouts ("" where its
    responses are whole and it shows them). `ends`: those three end with it."""

    damage: Callable[[Path], None]
    said: tuple[str, ...]
    rollouts: str = ""
    ends: bool = False


SWEEP = "sweeps/small/sweep.json"
LOG = f"{RUN}/metrics.jsonl"
TABLE = {
    "nothing": Row(lambda runs: None, ("Finished runs: 6 of 6 planned.",)),
    "NaN": Row(lose_numbers, ("left out there: reward/mean (3 steps: base seed 0)",)),
    "garbage in config.yaml": Row(write(f"{RUN}/config.yaml", b"\xff\0{{"), ("Finished runs: 6 of 6 planned.",)),
    "a log cut at a line": Row(
        lambda runs: write_lines(runs, lines_of(runs)[:7]),
        (HERE, f"{LOG} ends at step 6, and the run has finished after 12; {COPY}"),
    ),
    "a log cut within": Row(
        change_line(lambda line: json.dumps(line)[:30]),
        (HERE, f"{LOG} has a line that is not JSON", "remove that line"),
    ),
    "an empty log": Row(truncate(LOG), (HERE, f"{LOG} has no step, and the run has finished after 12; {COPY}")),
    "no log": Row(remove(LOG), (HERE, f"{LOG} has no step, and the run has finished after 12; {COPY}")),
    "lines lost": Row(
        lambda runs: write_lines(runs, [*lines_of(runs)[:3], *lines_of(runs)[9:]]),
        (HERE, f"{LOG}: step 9 follows step 2, so lines were lost or doubled; {COPY}"),
    ),
    "a line twice": Row(
        lambda runs: write_lines(runs, [*lines_of(runs)[:4], *lines_of(runs)[3:]]),
        (HERE, f"{LOG}: step 3 follows step 3, so lines were lost or doubled; {COPY}"),
    ),
    "a line without metrics": Row(
        change_line(lambda line: {"step": 4}), (HERE, f"{LOG} has a line of step 4 that no run writes", COPY)
    ),
    "a word for a number": Row(
        change_line(lambda line: {**line, "metrics": {**line["metrics"], "reward/mean": "high"}}),
        (HERE, f"{LOG} has a value that is no number", "'high'", COPY),
    ),
    "logs exchanged": Row(
        exchange, (HERE, f"{LOG} does not end with the eval/", "unreadable: +helps seed 0: ", f"that DONE says; {COPY}")
    ),
    "no times": Row(
        remove(f"{RUN}/timing.jsonl"), ("No budget/device_seconds: base seed 0; left out of comparisons on it",)
    ),
    "no answers in a table": Row(
        lose_column("eval", "outcome"),
        (HERE, f"{RUN}/eval/step=000000.parquet is no table of answers", '"outcome"', COPY),
    ),
    "an evaluation cut": Row(
        truncate(f"{RUN}/eval/step=000012.parquet", 200), (HERE, f"{RUN}/eval/step=000012.parquet is no table of", COPY)
    ),
    "an unfinished run": Row(remove(f"{RUN}/DONE"), ("Finished runs: 5 of 6 planned.", "unfinished: base seed 0")),
    "an empty DONE": Row(truncate(f"{RUN}/DONE"), (HERE, f"{RUN}/DONE ")),
    "a list in DONE": Row(write(f"{RUN}/DONE", b"[]"), (HERE, RUN)),
    "no run.json": Row(remove(f"{RUN}/run.json"), (HERE, f"{RUN}/run.json", COPY)),
    "an empty run.json": Row(truncate(f"{RUN}/run.json"), (HERE, f"{RUN}/run.json ")),
    "a list in run.json": Row(write(f"{RUN}/run.json", b"[]"), (HERE, RUN)),
    "garbage in error.txt": Row(
        lambda runs: [remove(f"{RUN}/DONE")(runs), write(f"{RUN}/error.txt", b"\xff\0")(runs)],
        ("Finished runs: 5 of 6 planned.", "failed: base seed 0"),
    ),
    "garbage in what was kept": Row(
        lambda runs: [(runs / "sweeps/small/cache").mkdir(), write("sweeps/small/cache/tables", b"\xff\n" * 9)(runs)],
        ("Finished runs: 6 of 6 planned.",),
    ),
    "an empty sweep.json": Row(truncate(SWEEP), (SWEEP, COPY), f"{SWEEP} ", ends=True),
    "a sweep without runs": Row(write(SWEEP, b"{}"), (SWEEP, "runs", COPY), f"{SWEEP} ", ends=True),
    "a design of no kind": Row(redeclare, (f"{SWEEP}: design.kind: there is no 'add_two'; choose from",), ends=True),
}
# What the commands beside `rollouts` do not read, the report excepted.
ROLLOUTS = {
    "responses cut": (truncate(f"{RUN}/rollouts/step=000012.parquet", 200), "step=000012.parquet cannot be read"),
    "no column truncated": (lose_column("rollouts", "truncated"), ".parquet has no column truncated: it was edited"),
    "no column text": (lose_column("rollouts", "text"), ".parquet has no column text: it was edited"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("written")
    write_synthetic(PLANTED, home)
    responses = {
        "problem_id": [0, 0, 1, 1],
        "response": [0, 1, 0, 1],
        "question": "1+1",
        "answer": "2",
        "text": "SYNTHETIC",
    }
    responses |= {"outcome": [1.0, 0.0] * 2, "reward": [1.0, 0.0] * 2, "advantage": [0.5, -0.5] * 2, "length": 3}
    responses |= {"truncated": False, "in_loss": True, "in_statistics": True}
    for arm in ("base", "+helps"):
        (home / f"small/{arm}/seed=0/rollouts").mkdir()
        for step in (6, 12):
            pd.DataFrame(responses).to_parquet(home / f"small/{arm}/seed=0/rollouts/step={step:06d}.parquet")
    return home


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "my runs")


@dataclass(frozen=True)
class Said:
    code: object  # of the exit: 0, or the one line
    printed: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Said]:
    """`grpo-lab` in this process; whatever is no exit is raised, as a traceback would be shown."""

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["grpo-lab", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
        except SystemExit as ended:
            return Said(ended.code, capsys.readouterr().out)
        return Said(0, capsys.readouterr().out)

    return run


def require(said: Said, text: str, expected: Sequence[str], ends: bool) -> None:
    """The words are in `text`, or, where the command ends with them, in its one line."""
    if ends:
        assert isinstance(said.code, str) and said.code.startswith("error: ") and len(said.code.splitlines()) == 1
    else:
        assert said.code == 0
    for words in expected:
        assert words in (said.code if ends else text)


@pytest.mark.few(3)
@pytest.mark.parametrize("damage", TABLE)
def test_data_and_rollouts(damage: str, runs: Path, tmp_path: Path, command: Callable[..., Said]) -> None:
    row = TABLE[damage]
    row.damage(runs)
    said = command("data", "small", "--runs", runs, "--to", tmp_path / "data")
    if row.ends:
        require(said, "", row.said, ends=True)
        assert not (tmp_path / "data").exists()
    else:
        counts = [words for words in row.said if not words.startswith(("left out", "No budget"))]
        require(said, said.printed, counts, ends=False)
        # What is saved says the same: a run that cannot be read is in it with its reason and no numbers.
        saved = load_data(tmp_path / "data", "small")
        assert f"Finished runs: {len(saved.finished)} of 6 planned." in said.printed
        lost = saved.points.merge(saved.runs[saved.runs["status"] == "unreadable"], on=["level", "arm", "seed"])
        assert lost.empty and set(saved.points["arm"]) == {"base", "+helps"}
    shown = command("rollouts", "small", "--runs", runs)
    require(shown, shown.printed, [row.rollouts or "problem 0, response 0"], ends=bool(row.rollouts))


def figures_and_report(runs: Path, to: Path, command: Callable[..., Said], row: Row) -> None:
    said = command("figures", "small", "--runs", runs, "--only-runs", "--to", to, "--verdict")
    assert row.ends or printable((to / "small_verdict.txt").read_text()) in said.printed
    said = command("report", "small", "--runs", runs, "--only-runs", "--to", to)
    page = "" if row.ends else (to / "small.html").read_text()
    require(said, html.unescape(page), row.said, row.ends)


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["a log cut at a line", "no times", "an empty sweep.json"])
def test_figures_and_report(
    damage: str, runs: Path, tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the table, without the pictures; the next test takes all of it, with them."""
    monkeypatch.setattr(build, "draw_all", lambda *asked: ([], {}))
    TABLE[damage].damage(runs)
    figures_and_report(runs, tmp_path / "out", command, TABLE[damage])


@pytest.mark.extended
@pytest.mark.parametrize("damage", TABLE)
def test_figures_and_report_with_every_picture(
    damage: str, runs: Path, tmp_path: Path, command: Callable[..., Said]
) -> None:
    TABLE[damage].damage(runs)
    figures_and_report(runs, tmp_path / "out", command, TABLE[damage])


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", ROLLOUTS)
def test_damaged_responses(
    damage: str, runs: Path, tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "draw_all", lambda *asked: ([], {}))
    change, words = ROLLOUTS[damage]
    change(runs)
    for typed in (["rollouts", "small", "--runs", runs], ["rollouts", runs / RUN], ["report", "small", "--runs", runs]):
        said = command(*typed, *(["--only-runs", "--to", tmp_path / "out"] if typed[0] == "report" else []))
        require(said, "", [f"{RUN}/rollouts/step=", words, f"{COPY}, or move it away"], ends=True)
    assert command("data", "small", "--runs", runs, "--to", tmp_path / "data").code == 0


def test_a_run_folder_without_its_record(runs: Path, command: Callable[..., Said]) -> None:
    (runs / RUN / "run.json").unlink()
    said = command("rollouts", runs / RUN)
    require(said, "", [f"{runs / RUN} has responses and no run.json", "restore that file from a copy"], ends=True)


# ---- saved data


SAVED = {
    "a table cut": (truncate("small.parquet", 500), ["small.parquet is not what was saved", COPY]),
    "a table of something else": (
        lambda data: pd.DataFrame({"x": [1]}).to_parquet(data / "small.parquet"),
        ["small.parquet is not what was saved", "save the data again with `grpo-lab data`"],
    ),
    "answers empty": (truncate("small.answers.parquet"), ["small.answers.parquet is not what was saved", COPY]),
    "answers gone": (remove("small.answers.parquet"), ["small.answers.parquet is missing", COPY]),
    "nothing in the record": (truncate("small.json.xz"), ["small.json.xz", COPY]),
    "a record without runs": (
        write("small.json.xz", lzma.compress(b'{"sweep": {}}')),
        ["small.json.xz and the tables beside it", COPY],
    ),
    "a list for a record": (write("small.json.xz", lzma.compress(b"[]")), ["small.json.xz", COPY]),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("damage", SAVED)
def test_damaged_saved_data(damage: str, runs: Path, tmp_path: Path, command: Callable[..., Said]) -> None:
    save_data(load_sweep(runs, "small"), tmp_path / "data")
    change, words = SAVED[damage]
    change(tmp_path / "data")
    for name in ("figures", "report"):
        said = command(name, "small", "--runs", tmp_path, "--data", tmp_path / "data", "--to", tmp_path / "out")
        require(said, "", [f"{tmp_path}/data/small", *words], ends=True)
    assert not (tmp_path / "out").exists()


def test_one_changed_byte_of_saved_data_is_seen_and_data_of_earlier_versions_are_read(
    runs: Path, tmp_path: Path
) -> None:
    whole = load_sweep(runs, "small")
    table, _, described = save_data(whole, tmp_path / "data")
    content = table.read_bytes()
    for place in (100, len(content) // 2, len(content) - 5):
        table.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"small\.parquet is not what was saved"):
            load_data(tmp_path / "data", "small")
    table.write_bytes(content)
    earlier = json.loads(lzma.decompress(described.read_bytes()))
    del earlier["sha256"]
    described.unlink()
    described.with_suffix("").write_text(json.dumps(earlier))
    assert saved_names(tmp_path / "data") == ["small"]
    pd.testing.assert_frame_equal(load_data(tmp_path / "data", "small").points, whole.points)
    save_data(whole, tmp_path / "data")
    assert described.exists() and not described.with_suffix("").exists(), "there is one description"
