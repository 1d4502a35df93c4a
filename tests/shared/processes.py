"""Other processes as tests see them: state, command, parents and children, read from Linux's /proc."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """State, parent and what follows of a process; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def command_of(pid: int) -> str:
    """The command line of a process, words apart by blanks; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def name_of(pid: int) -> str:
    """The name a process has given itself, at most 15 characters of it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    return stat_of(pid)[:1] not in ([], ["Z"])


def children_of(parent: int) -> set[int]:
    """The processes that a process has started itself and that still run."""
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    return {pid for pid in pids if stat_of(pid)[1:2] == [str(parent)] and alive(pid)}


def descendants_of(parent: int) -> set[int]:
    """The children of a process, their children, and so on."""
    children = children_of(parent)
    return children.union(*(descendants_of(child) for child in children))
