"""The machine of a newcomer: here a test sees no program, package or GPU beyond it, unless it declares what it needs.

    @pytest.mark.needs("mount", "trackio")    # sees everything that is installed; skipped where one of these is not

conftest.py calls `enter` before anything else is imported, and registers the two hooks below. `enter` sets environment
variables, so processes that tests start and the workers of pytest-xdist see the same.
"""

from __future__ import annotations

import csv
import json
import os
import runpy
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from glob import glob
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What every test may start beside its own Python: git, make, sh, and of a bare system what they and the tests use.
PROGRAMS = ("git", "make", "sh", "awk", "grep", "sleep", "wc")
# What a test may declare, and how to install it.
PACKAGES = {
    "vllm": "make setup-vllm",
    **dict.fromkeys(("jupytext", "nbclient", "ipykernel"), "make notebooks"),
    **dict.fromkeys(("zensical", "latex2mathml", "nbformat"), "make site"),
    "trackio": "pip install 'grpo-lab[trackio]'",
    **dict.fromkeys(("mutmut", "coverage"), "pip install 'grpo-lab[mutants]'"),
    "playwright": "pip install playwright",
}
INSTALL = PACKAGES | {
    **dict.fromkeys(("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo"), "apt-get install slurm-wlm"),
    **dict.fromkeys(("slurmctld", "slurmd"), "apt-get install slurm-wlm"),
    "munged": "apt-get install munge",
    **dict.fromkeys(("initdb", "postgres"), "apt-get install postgresql"),
    **dict.fromkeys(("mount", "umount"), "apt-get install mount"),
    "unshare": "apt-get install util-linux",
    "bash": "apt-get install bash",
    "hostname": "apt-get install hostname",
    "chromium": "apt-get install chromium",
    "g++": "apt-get install g++",
    "pgrep": "apt-get install procps",
    "root": "run the tests as root",
}
# transformers imports it for a metric of assisted generation, which nothing here uses: a second of every process.
UNUSED = {"sklearn"}
_LINKS = Path(__file__).parents[2] / ".pytest_cache" / "programs"
_HIDE = Path(__file__).parent / "hide_packages"
WHOLE = "WHOLE_MACHINE"  # the variable that keeps what the others were before
_FURTHER = ("/usr/sbin", "/sbin", "/usr/lib/postgresql/*/bin")  # Debian's folders that are not on everybody's PATH


def enter() -> None:
    """Hide from this process, and from those it will start, what a bare machine lacks.

    A shell that puts the tests in the background has them ignore Ctrl-C, which some send: they hear it again.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if WHOLE not in os.environ:  # else this process is a test's own, or a worker's
        further = [folder for pattern in _FURTHER for folder in sorted(glob(pattern))]
        whole = {
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *further]),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "HIDDEN_PACKAGES": None,
        }
        os.environ |= {
            WHOLE: json.dumps(whole),
            "PATH": _linked(whole["PATH"]),
            "CUDA_VISIBLE_DEVICES": "",
            "HIDDEN_PACKAGES": " ".join(sorted(beyond_dev() | UNUSED)),
        }
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(_HIDE) not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_HIDE), *filter(None, inherited)])
    runpy.run_path(str(_HIDE / "sitecustomize.py"))  # this process has started without it


def _linked(path: str) -> str:
    """A folder with a link to each of PROGRAMS, and nothing else."""
    _LINKS.mkdir(parents=True, exist_ok=True)
    for name in {link.name for link in _LINKS.iterdir()} | set(PROGRAMS):
        place, link = shutil.which(name, path=path), _LINKS / name
        if name not in PROGRAMS or place is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or os.readlink(link) != place:
            made = _LINKS / f"{name}.{os.getpid()}"
            made.symlink_to(place)
            made.replace(link)  # at once: other tests may run in this checkout
    return str(_LINKS)


def beyond_dev() -> set[str]:
    """The names of installed packages that neither the extra `dev` brings nor Python itself, as they are imported."""
    return beyond("grpo-lab[dev]", "pip")


def beyond(*requirements: str) -> set[str]:
    """The names of installed packages that none of these brings, as they are imported."""
    installed = {canonicalize_name(one.metadata["Name"]): one for one in metadata.distributions()}
    brought: set[tuple[str, str]] = set()
    named = map(Requirement, requirements)
    waiting = [(canonicalize_name(one.name), extra) for one in named for extra in ("", *one.extras)]
    while waiting:
        name, extra = one = waiting.pop()
        if one in brought or name not in installed:
            continue
        brought.add(one)
        for wanted in map(Requirement, installed[name].requires or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(wanted.name), more) for more in ("", *wanted.extras)]
    kept = {name for name, _ in brought}
    if installed.keys() == kept:
        return set()
    names = {name: _imported_as(one) for name, one in installed.items()}
    return set().union(*(names[name] for name in installed.keys() - kept)).difference(*(names[name] for name in kept))


def _imported_as(distribution: metadata.Distribution) -> set[str]:
    """From the lines of its RECORD, since an object for each of 180,000 files takes seconds."""
    record = distribution.read_text("RECORD")
    files = map(str, distribution.files or []) if record is None else csv_column(record)
    return {file.partition("/")[0].partition(".")[0] for file in files if file.endswith((".py", ".so"))} - {""}


def csv_column(table: str) -> list[str]:
    """The first column of a table in CSV."""
    return [line[0] for line in csv.reader(table.splitlines()) if line]


@contextmanager
def whole_machine() -> Iterator[None]:
    """Within, everything that this machine has can be seen."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in json.loads(os.environ[WHOLE]).items():
            patched.delenv(name, raising=False) if value is None else patched.setenv(name, value)
        yield


def needs_of(item: pytest.Item) -> list[str]:
    """What a test declares."""
    declared = [name for mark in item.iter_markers("needs") for name in mark.args]
    return [*declared, *(["vllm"] if item.get_closest_marker("vllm") else [])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose needs are not installed; `make test-vllm` and `make test-all` install them first."""
    declared = {item: needs for item in items if (needs := needs_of(item))}
    for item, needs in declared.items():
        if unknown := [name for name in needs if name not in INSTALL]:
            raise pytest.UsageError(
                f"{item.nodeid} needs {unknown}: say in tests/shared/bare_machine.py how to install it"
            )
    with whole_machine():
        for item, needs in declared.items():
            if missing := [name for name in needs if not _installed(name)]:
                remedies = ", ".join(dict.fromkeys(INSTALL[name] for name in missing))
                item.add_marker(pytest.mark.skip(reason=f"no {', '.join(missing)}: {remedies}"))


def _installed(name: str) -> bool:
    if name == "root":
        return os.geteuid() == 0
    return (find_spec(name) if name in PACKAGES else shutil.which(name)) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Show a test that declares its needs the whole machine, and so the fixtures that are made for it."""
    if not needs_of(item):
        return (yield)
    with whole_machine():
        return (yield)
