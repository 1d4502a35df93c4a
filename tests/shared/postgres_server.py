"""A real PostgreSQL server for one test: its own data folder, a port of its own, an unprivileged user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import free_port


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The address of an empty database of a server that runs for the length of the block."""
    user = "postgres" if os.getuid() == 0 else None  # it does not run as root
    if user and user not in {entry.pw_name for entry in pwd.getpwall()}:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # pytest's own folders are closed to other users
    if user:
        shutil.chown(folder, user)
    data, port = folder / "data", free_port()
    try:
        subprocess.run(
            ["initdb", "-D", data, "-U", "lab", "--auth=trust", "--no-sync", "-E", "UTF8"],
            check=True, capture_output=True, user=user, cwd=folder,
        )  # fmt: skip
        server = subprocess.Popen(
            ["postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder, "-F"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd=folder,
        )  # fmt: skip
        try:
            _wait(server, port)
            yield f"postgresql+psycopg2://lab@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # its fast end: connections that are still open do not keep it
            server.wait()
    finally:
        shutil.rmtree(folder)


def _wait(server: subprocess.Popen, port: int) -> None:
    import psycopg2

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg2.connect(host="127.0.0.1", port=port, user="lab", dbname="postgres").close()
            return
        except psycopg2.OperationalError:
            assert server.poll() is None and time.monotonic() < deadline, "PostgreSQL did not start"
            time.sleep(0.1)
