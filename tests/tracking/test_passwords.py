"""A password in the address of a store connects, and stands in nothing that is recorded or printed."""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sweep_processes import multirun

from grpo_lab.run.identity import check_folder
from grpo_lab.sweeps.planned_runs import STORE
from grpo_lab.tracking.checksums import with_checksum
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.mlflow_exporter import sync_all
from grpo_lab.tracking.mlflow_sender import Sender
from grpo_lab.tracking.passwords import has_password, masked, without_mask

SECRET = "hunter2"


@pytest.mark.parametrize(
    "text,shown",
    [
        (f"postgresql://me:{SECRET}@host/db", "postgresql://me:***@host/db"),
        (f"postgresql+psycopg2://me:{SECRET}/x@y@host:5432/db?sslmode=require", None),
        (f"'http://me:{SECRET}@host:5000/path' and (https://you:{SECRET}@host)", None),
        (f"postgresql://host/db?user=me&password={SECRET}&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        (f"http://host?token={SECRET}", "http://host?token=***"),
        (f"tracking.uri=mysql://me:{SECRET}@[::1]/db", "tracking.uri=mysql://me:***@[::1]/db"),
        ("http://127.0.0.1:5000/a@b", "http://127.0.0.1:5000/a@b"),
        ("sqlite:////runs/a:b@c/mlflow.db", "sqlite:////runs/a:b@c/mlflow.db"),
        ("postgresql://me@host/db, 10:30 and a@b.c", "postgresql://me@host/db, 10:30 and a@b.c"),
        ("http://" + "a" * 100_000, "http://" + "a" * 100_000),
    ],
)
def test_only_passwords_are_masked(text: str, shown: str | None) -> None:
    assert SECRET not in masked(text) and masked(text) == (shown or masked(text))
    assert masked(masked(text)) == masked(text)
    assert has_password(text) == (SECRET in text)
    assert masked({"a": [text, 1, None], "b": {"c": text}}) == {"a": [masked(text), 1, None], "b": {"c": masked(text)}}


def test_an_address_without_its_password_connects_with_that_of_the_environment(tmp_path: Path) -> None:
    assert without_mask("postgresql://me:***@host/db") == "postgresql://me@host/db"
    described = {"tracking": {"uri": "http://me:***@host", "experiment": "e"}, "run_key": "k"}
    write_json(tmp_path / "run.json", with_checksum(described))
    assert Sender(tmp_path).uri == "http://me@host" and Sender(tmp_path, f"http://me:{SECRET}@host").uri.count(SECRET)


def test_a_run_with_a_password_elsewhere_is_still_that_run(tmp_path: Path) -> None:
    identity = {"reward.url": f"http://judge:{SECRET}@host"}
    write_json(tmp_path / "run.json", with_checksum(masked({"identity": identity, "run_key": "k"})))
    assert SECRET not in (tmp_path / "run.json").read_text()
    assert check_folder(tmp_path, identity)["run_key"] == "k"
    with pytest.raises(ValueError, match="another configuration"):
        check_folder(tmp_path, {"reward.url": f"http://judge:{SECRET}@other"})


@contextmanager
def refusing_server() -> Iterator[tuple[int, list[str]]]:
    """A server that refuses every request, and what each gave as its password."""
    given: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given.append(self.headers.get("Authorization", ""))
            self.send_response(403)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], given
        server.shutdown()


@pytest.mark.extended
def test_a_sweep_connects_with_a_password_and_writes_it_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with refusing_server() as (port, given), caplog.at_level(logging.INFO):
        store = f"http://me:{SECRET}@127.0.0.1:{port}"
        words = ["world=tiny", "evaluation=brief", f"runs_dir={tmp_path}", "tracking=mlflow", f"tracking.uri={store}"]
        words += ["budget.amount=1", "seed=0", "tracking.flush_seconds=10", "tracking.system_metrics=0"]
        try:
            multirun(*words)
            before = len(given)
            multirun(*words)  # which finds its runs finished
            assert sync_all(tmp_path, store)[0].error is not None, "the server refuses"
        finally:
            os.environ.pop(STORE, None)
        expected = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
        assert before >= 2 and set(given) == {expected}, "the sweep and its run asked with the password"
    said = "".join(capfd.readouterr()) + caplog.text
    assert "all 1 runs are finished" in said and SECRET not in said
    assert len(list(tmp_path.glob("*/seed=0/DONE"))) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    holding = {path.name for path in files if b"me:***@127" in path.read_bytes()}
    assert {"run.json", "config.yaml", "sweep.json"} <= holding
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
