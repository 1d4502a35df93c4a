"""`make gpu` without a GPU: refusals, results kept when a part fails, and each part at test size."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import attainable
import findings
import machine
import profiled
import pytest
import repeat
import run as driver

HERE = Path(__file__).parent
DRIVER = HERE / "run.py"

OPTIONS = Namespace(device="cpu", small=True, patience=1.0, slice=540.0)
# A part that finds one thing and then does what it is told.
PART = """
import argparse, json, os, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--device"); parser.add_argument("--small", action="store_true")
parser.add_argument("--to"); parser.add_argument("--seconds")
row = {{"check": "first", "value": 1.0, "unit": "", "bound": "at most 2", "ok": True, "about": ""}}
with open(parser.parse_args().to, "a") as sink:
    sink.write(json.dumps(row) + "\\n")
{then}
"""


def part(folder: Path, name: str, then: str, seconds: float = 60) -> driver.Part:
    file = folder / f"{name}.py"
    file.write_text(PART.format(then=then))
    return driver.Part(name, seconds, file)


def empty() -> dict:
    versions = {"torch": "2.11.0", "vllm": None}
    return {"machine": {"device": "a GPU"}, "versions": versions, "small": False, "parts": {}}


def call(*words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, str(DRIVER), *words], capture_output=True, text=True, timeout=200)


def test_what_is_missing_is_named_with_its_remedy() -> None:
    """Python without its packages: one sentence, and how to get them."""
    done = call(flags=("-S", "-E"))
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "-m pip install 'torch>=2.11' 'transformers>=5.17'" in line
    assert "hydra-core>=1.3 (missing)" in line


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.complaint() is None
    monkeypatch.setitem(machine.NEEDED, "torch", ("torch", "99.1"))
    assert f"lacks torch>=99.1 (this is {machine.version_of('torch')})" in machine.complaint()
    assert machine.numbers("2.11.0+cu130") == (2, 11, 0) and machine.numbers("2.9.1") < machine.numbers("2.11")


@pytest.mark.extended
def test_a_machine_without_a_gpu_is_told_what_to_do() -> None:
    done = call("equal")
    assert done.returncode == 1 and "sees no GPU" in done.stderr and "--device cpu --small" in done.stderr


def test_unknown_parts_are_refused() -> None:
    done = call("equla")
    assert done.returncode == 2 and "choose from profile, equal, learn, speed, variants, many" in done.stderr


def test_every_part_ends_within_a_call_and_two_calls_are_enough() -> None:
    assert all(part.file.exists() for part in driver.PARTS.values())
    limits = [part.seconds for part in driver.PARTS.values()]
    first = [one for one, ends in zip(limits, itertools.accumulate(limits)) if ends <= driver.SLICE]
    assert sum(limits) - sum(first) <= driver.SLICE <= 540


@pytest.mark.extended
def test_what_has_ended_is_skipped_and_what_does_not_fit_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By code, versions and size; a part that was killed runs again, and so does one that is named."""
    ran = tmp_path / "ran"
    parts = [part(tmp_path, name, f"open({str(ran)!r}, 'a').write({name + ' '!r})") for name in ("one", "two", "three")]
    results, target = empty(), tmp_path / "results.json"

    def call(*, slice: float = 540.0, again: bool = False) -> tuple[list[str], str]:
        ran.write_text("")
        options = Namespace(device="cpu", small=True, patience=1.0, slice=slice)
        return driver.run_parts(parts, options, results, target, again), ran.read_text()

    assert call(slice=60.0) == (["two", "three"], "one "), "the second may take 60 s, and fewer are left"
    assert call() == ([], "two three ") and call() == ([], "")
    results["parts"]["two"]["state"] = "killed after 60 s"
    assert call() == ([], "two ") and call(again=True) == ([], "one two three ")
    results["versions"] = {"torch": "2.12.0", "vllm": None}
    assert call() == ([], "one two three ")
    monkeypatch.setattr(driver, "digest_of_sources", lambda: "of other code")
    assert call() == ([], "one two three ")
    assert json.loads(target.read_text()) == json.loads(json.dumps(results))


def test_the_profile_counts_overlaps_once() -> None:
    """Kernels of two streams run beside each other; the gap is from 3 to 5."""
    spans = [profiled.Span("a", 5.0, 9.0), profiled.Span("b", 0.0, 3.0), profiled.Span("c", 6.0, 7.0)]
    assert profiled.busy([*spans, profiled.Span("d", 8.5, 10.0)]) == 8.0 and profiled.busy([]) == 0


def test_the_page_says_what_is_attainable_and_what_was_not_measured() -> None:
    rows = [{"check": "graphs: generate", "value": 0.93}, {"check": "graphs: train", "value": "RuntimeError: x"}]
    lines = attainable.attainable_table(rows)
    assert "| generate | 0.93 s | 0.5 to 0.8 s | 0.26 s | at most 1.3 s | yes |" in lines
    assert "| train, 4 updates | not measured | 0.4 to 0.7 s | 0.15 s | at most 0.7 s | not measured |" in lines
    assert attainable.attainable_table([rows[0] | {"value": 2.68}])[2].endswith("| at most 1.3 s | no |")


def test_what_is_attainable_names_checks_of_the_recorded_run() -> None:
    (file,) = driver.RESULTS.glob("gpu_*.json")
    checks = {row["check"] for row in json.loads(file.read_text())["parts"]["speed"]["rows"]}
    assert {one.check for one in attainable.ESTIMATES} <= checks


def test_a_part_that_hangs_or_crashes_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hanging part is killed with the process it started; the file is whole after every part."""
    child = tmp_path / "child"
    hang = f"p = subprocess.Popen(['sleep', '300']); open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(300)"
    parts = [
        part(tmp_path, "hangs", hang, seconds=3),
        part(tmp_path, "crashes", "raise RuntimeError('no luck')"),
        part(tmp_path, "works", ""),
    ]
    target, results, started = tmp_path / "to" / "results.json", empty(), time.monotonic()
    driver.run_parts(parts, OPTIONS, results, target)
    assert time.monotonic() - started < 60
    saved = json.loads(target.read_text())
    assert saved == json.loads(json.dumps(results)) and list(target.parent.iterdir()) == [target]
    states = {name: found["state"] for name, found in saved["parts"].items()}
    assert states == {"hangs": "killed after 3 s", "crashes": "ended with exit code 1", "works": "ended"}
    assert all([row["check"] for row in found["rows"]] == ["first"] for found in saved["parts"].values())
    assert "RuntimeError: no luck" in saved["parts"]["crashes"]["log"][-1]
    assert driver.failed(results, list(states)) == ["hangs: killed after 3 s", "crashes: ended with exit code 1"]
    assert "RuntimeError: no luck" in capsys.readouterr().out
    deadline = time.monotonic() + 10
    status = Path("/proc") / child.read_text() / "stat"
    while status.exists() and ") Z " not in status.read_text():  # a zombie waits for init to collect it
        assert time.monotonic() < deadline, "what the part started outlived it"
        time.sleep(0.05)


def test_a_part_that_finds_nothing_has_failed(tmp_path: Path) -> None:
    silent = driver.Part("silent", 60, tmp_path / "silent.py")
    silent.file.write_text("")
    results = empty()
    driver.run_parts([silent], OPTIONS, results, tmp_path / "results.json")
    assert driver.failed(results, ["silent"]) == ["silent: found nothing"]


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    driver.write(empty(), target)
    with pytest.raises(TypeError):
        driver.write({"parts": object()}, target)
    assert json.loads(target.read_text()) == empty() and list(tmp_path.iterdir()) == [target]


def test_what_is_recorded_of_other_parts_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the file is named after it; a failing check ends the command with its name."""
    parts = {name: part(tmp_path, name, "") for name in ("one", "other")}
    monkeypatch.setattr(driver, "PARTS", parts)
    monkeypatch.setattr(driver, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(driver, "begin", lambda options: empty())
    for name in parts:
        monkeypatch.setattr(sys, "argv", ["run.py", name])
        driver.main()
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == "gpu_a_gpu.json" and list(json.loads(file.read_text())["parts"]) == ["one", "other"]
    parts["one"].file.write_text(parts["one"].file.read_text().replace('"ok": True', '"ok": False'))
    monkeypatch.setattr(sys, "argv", ["run.py", "one"])
    with pytest.raises(SystemExit, match="one: first"):
        driver.main()
    parts["one"].file.write_text("")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    with pytest.raises(SystemExit, match="one: first"):  # it has ended, and its check stays failed
        driver.main()


def test_bounds_hold_and_nan_passes_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    found = findings.Findings("cpu", True, file, math.inf)
    found.add("within", 1.0, at_most=1.0)
    found.add("above", 1.1, at_most=1.0)
    found.add("below", 0.9, at_least=1.0)
    found.add("not more", 0.0, more_than=0.0)
    found.add("both", 1.0, at_least=1.0, at_most=1.0)
    found.add("nan", math.nan, at_most=1.0)
    found.add("only said", 3.0, "s")
    found.leave_out("vLLM", "vllm is not installed")
    with found.guarded("broken"):
        raise ValueError("a reason\nand more")
    with file.open("a") as sink:
        sink.write('{"check": "cut off by a ki')
    rows = findings.read_rows(file)
    results = [(row["check"], findings.result_of(row)) for row in rows]
    assert results == [
        ("within", "ok"), ("above", "FAILED"), ("below", "FAILED"), ("not more", "FAILED"), ("both", "ok"),
        ("nan", "FAILED"), ("only said", ""), ("vLLM", "left out"), ("broken", "FAILED"),
    ]  # fmt: skip
    assert rows[-1]["value"] == "ValueError: a reason"
    json.loads(json.dumps(rows), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_table_of_a_results_file(tmp_path: Path) -> None:
    row = {"check": "generated", "value": 12345.6, "unit": "tokens/s", "bound": "", "ok": None, "about": ""}
    results = empty()
    kernel = {**row, "check": "gemm", "detail": True}
    results["parts"] = {"speed": {"state": "killed after 3 s", "rows": [row, kernel]}}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    table = call("--table", str(file)).stdout
    assert table.startswith("a GPU; torch 2.11.0:\n")
    assert "| speed | generated | 12,346 | tokens/s |  |" in table
    assert "| speed | the whole part | killed after 3 s | | FAILED |" in table
    assert "gemm" not in table and "| generate | not measured |" in table


def test_where_two_runs_differ_is_found() -> None:
    def lines(loss: float) -> list[dict]:
        return [
            {"step": 0, "metrics": {"budget/steps": 0.0}},
            {"step": 1, "metrics": {"budget/steps": 1.0, "train/loss": loss}},
        ]

    assert repeat.difference(lines(0.5), lines(0.5)) == ("the same bits", 0.0)
    words, distance = repeat.difference(lines(0.5), lines(0.25))
    assert words == "differ from step 1 on: train/loss" and distance == 0.25
    assert repeat.difference(lines(0.5), lines(0.5)[:1]) == ("2 and 1 steps", math.inf)


_LEFT_OUT = {
    "equal": {"CUDA graphs against eager decoding"},
    "speed": {"decoding by CUDA graphs"},
    "profile": {f"{name}: launches, idle share" for name in ("one update", "12 decode steps")},
}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", driver.PARTS)
def test_every_part_runs_on_a_cpu(tmp_path: Path, name: str) -> None:
    """The code that a GPU runs, small; what only a GPU can do is left out and said."""
    target = tmp_path / "results.json"
    command = [sys.executable, str(DRIVER), name, "--device", "cpu", "--small", "--patience", "4", "--to", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(target.read_text())["parts"][name]
    results = [findings.result_of(row) for row in found["rows"]]
    assert "ok" in results and "FAILED" not in results
    left_out = {row["check"] for row in found["rows"] if row.get("left_out")}
    assert _LEFT_OUT.get(name, set()) <= left_out
