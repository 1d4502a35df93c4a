"""Files that people bring or that a disk has damaged: whoever reads one names the file, the line and what to do."""

from __future__ import annotations

import ast
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from grpo_lab.analysis.report.reader import read_rollouts
from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.config.design import load_design
from grpo_lab.config.user_files import check_yaml
from grpo_lab.tracking.checksums import read_checksummed, read_json, read_yaml
from grpo_lab.tracking.external import Chosen, read_prime_rl, read_trl
from grpo_lab.tracking.external_logs import read_log
from grpo_lab.tracking.harness_results import read_result
from grpo_lab.tracking.run_reader import read_steps
from grpo_lab.tracking.sweep_record import read_sweep

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_lab"
REMEDY = r": .*(restore|mend|give|correct|remove|move|measure|write|begin with|keep|build)"
JSON = {
    "cut": b'{\n"a": 1,\n',
    "bytes": b'{"a": 1,\n"b": "\xff"}',
    "list": b"[1, 2]",
    "empty": b"",
    "deep": b"[" * 100_000,
}
YAML = {
    "cut": b"a: 1\nb: [1\n",
    "bytes": b"a: 1\nb: \xe4\n",
    "indent": b"a: 1\n b: 2\n",
    "list": b"- 1\n",
    "tab": b"a:\n\tb: 1\n",
}
LINES = {"bytes": b'{"step": 1}\n\xff\n'}
TABLE = {"bytes": b"PAR1 and so on", "empty": b"", "text": b"a,b\n1,2\n"}
# What reads a file of people's or of a run, by the function that parses it: the file's name and how to read it.
READERS: dict[str, tuple[str, dict[str, bytes], Callable[[Path], object]]] = {
    "tracking/checksums.py read_json": ("any.json", JSON, lambda path: read_json(path, "restore it")),
    "tracking/checksums.py read_checksummed": ("any.json", JSON, lambda path: read_checksummed(path, "restore it")),
    "tracking/checksums.py read_yaml": ("config.yaml", YAML, lambda path: read_yaml(path, "restore it")),
    "config/user_files.py check_yaml": ("any.yaml", {name: YAML[name] for name in YAML if name != "list"}, check_yaml),
    "config/design.py load_design": ("mine.yaml", YAML, load_design),
    "tracking/sweep_record.py read_sweep": ("sweep.json", JSON, lambda path: read_sweep(path.parent)),
    "tracking/harness_results.py read_result": ("step=000001.json", JSON, read_result),
    "tracking/run_reader.py parse_line": ("metrics.jsonl", LINES, lambda path: list(read_steps(path.parent))),
    "tracking/external.py read_trl": ("trainer_state.json", JSON, lambda path: read_trl(path, Chosen())),
    "tracking/external.py _row": (
        "metrics.jsonl", {"line": LINES["bytes"]}, lambda path: read_prime_rl(path, Chosen())
    ),
    "tracking/external_logs.py _of_jsonl": (
        "log.jsonl", {"line": LINES["bytes"] + b'{"step": 2}\n'}, read_log
    ),
    "analysis/report/reader.py read_rollouts": (
        "rollouts/step=000001.parquet", TABLE, lambda path: read_rollouts(path.parents[1])
    ),
}  # fmt: skip
# Where a file is parsed that comes with the lab or that it has just written, or whose reader is tested elsewhere.
OTHERS = {
    "config/catalogue.py": "the options of conf/, which come with grpo_lab",
    "config/explain.py": "the options of conf/, which come with grpo_lab",
    "config/overrides.py _keys": "the options of conf/, and a user's after check_yaml",
    "config/completion.py _read": "after check_yaml; a file that is no YAML completes nothing",
    "config/user_files.py _read": "after check_yaml",
    "reproduce/compare.py": "two runs that were checked by their digests",
    "harness/command.py": "what its worker says",
    "harness/worker.py": "what its command says, and what a harness holds",
    "sweeps/estimate.py": "runs that cannot be read are left out of an estimate",
    "sweeps/status.py": "a damaged log is shown as the reason of its run",
    "tracking/system_metrics.py": "a damaged line is left out: it is no part of the result",
    "tracking/run_log.py": "its own lines",
    "analysis/sources/cache.py": "a damaged cache is made again",
    "analysis/sources/mlflow_runs.py": "tags of MLflow",
    "analysis/sources/saved_data.py": "see below",
    "run/identity.py": "not a file",
    "rollout/pass_rates.py": "its own cache",
    "reproduce/record.py": "not a file",
    "tracking/checksums.py with_checksum": "not a file",
}


@pytest.mark.parametrize("reader,kind", [(name, kind) for name, entry in READERS.items() for kind in entry[1]])
def test_garbage_is_refused_with_file_line_and_remedy(reader: str, kind: str, tmp_path: Path) -> None:
    name, contents, read = READERS[reader]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(contents[kind])
    with pytest.raises(ValueError) as refused:
        read(path)
    said = str(refused.value)
    assert str(path) in said and re.search(REMEDY, said) and len(said.splitlines()) == 1, said
    if kind in ("cut", "bytes", "indent", "tab", "line") and path.suffix != ".parquet":
        assert re.search(r"line [23]|b'\\xff", said), said


def test_saved_data_that_are_damaged_are_named(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1.0]}).to_parquet(tmp_path / "probe.parquet")
    for content in (b"", b"no xz", lzma.compress(b'{\n"a": ')):
        (tmp_path / "probe.json.xz").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"probe\.json\.xz (is empty|holds no JSON object).*: .*restore it from a copy"
        ):
            load_data(tmp_path, "probe")


def test_everything_that_parses_a_file_is_known_here() -> None:
    """Rooms whose files have tests of their own (tasks, policy, engines) are left out."""
    rooms = ("tracking", "config", "analysis", "sweeps", "harness", "reproduce", "run", "rollout", "budget")
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")] + [PACKAGE / "cli.py"]
    calls = {
        "json.loads",
        "json.load",
        "OmegaConf.load",
        "yaml.load",
        "yaml.safe_load",
        "pd.read_parquet",
        "pd.read_csv",
    }
    known, found = {*READERS, *OTHERS}, set()
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        for outer in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(outer, ast.FunctionDef):
                inner = (node for node in ast.walk(outer) if isinstance(node, ast.Call))
                found |= {f"{name} {outer.name}" for node in inner if ast.unparse(node.func) in calls}
    unknown = [place for place in sorted(found) if place not in known and place.split()[0] not in known]
    assert not unknown, "enter them in READERS, or in OTHERS with a reason"
    assert len(found) > 15
