"""Checks that the files of a run are still what was written: digests, sealed JSON objects, finished folders.

Files are checked before they are used. A missing file is reported and done without, if the rest does not need it.
A changed file is refused, because it could pass for a true result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.tracking.files import follow_umask, make_once, write_json

MANIFEST = "manifest.json"  # of a checkpoint, and of a folder in the cache
CHECKSUM = "sha256"  # the key of a JSON object that holds the digest of all its other keys
AFRESH = "restore it from a copy, or move the run's folder away and start it afresh"
AGAIN = (
    "restore it from a copy, or remove DONE and start the same command again: the run then goes on from its newest "
    "whole checkpoint"
)
# Files that are not part of the result: damage is reported but is no reason to refuse.
_BESIDES = ("explanation.txt", "first_prompt.txt", "environment.json", "source.diff", "timing.jsonl", "rollouts/")
_ALONE = ("metrics.jsonl", "run.json", "config.yaml", "base.json")


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage_of(path: Path, digest: str) -> str | None:
    """A message if the file is missing, unreadable or without this digest, else None."""
    try:
        return None if digest_of(path) == digest else f"{path} is damaged: it is not what was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError with the file and the remedy if it holds none."""
    content, where = path.read_bytes(), ""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        value, where = None, f" ({fault_in_json(content, error)})"
    if not isinstance(value, dict):
        what = "is empty" if not content.strip() else f"holds no JSON object{where}"
        raise ValueError(f"{path} {what}: it was edited, or the disk fails; {remedy}")
    return value


def fault_in_json(content: bytes, error: Exception) -> str:
    """Where JSON cannot be read and why, such as `line 3: Expecting value`."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"line {content[: error.start].count(10) + 1}: a byte that is no UTF-8"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_yaml(path: Path, remedy: str) -> DictConfig:
    """The YAML mapping in a file that grpo_lab wrote. Raises ValueError with file, line and remedy if it is none."""
    try:
        value = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        text = getattr(error, "problem", None) or str(error).splitlines()[0]
        if isinstance(error, UnicodeDecodeError):
            text = fault_in_json(path.read_bytes(), error)
        raise ValueError(f"{path}{line} is not YAML ({text}): {remedy}") from error
    if not isinstance(value, DictConfig):
        raise ValueError(f"{path} holds no mapping: {remedy}")
    return value


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """The object as JSON stores it, with the digest of its content under CHECKSUM."""
    plain = json.loads(json.dumps({key: part for key, part in value.items() if key != CHECKSUM}))
    return {**plain, CHECKSUM: hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def read_checksummed(path: Path, remedy: str) -> dict[str, Any]:
    """Read a sealed object from `path`. Raises ValueError if its digest does not match, FileNotFoundError."""
    value = read_json(path, remedy)
    if CHECKSUM not in value:
        raise ValueError(f"{path} has no digest: it was edited, or an earlier version of grpo_lab wrote it; {remedy}")
    if with_checksum(value)[CHECKSUM] != value[CHECKSUM]:
        raise ValueError(f"{path} is damaged: it is not what was written; {remedy}")
    return value


def make_checksummed(folder: Path, make: Callable[[Path], None]) -> Path:
    """`make_once` of a folder in the cache with a digest of each file, and all of them compared at every use.

    A folder without digests is made again. Raises ValueError if a file was changed, or is another folder's.
    """

    def made(partial: Path) -> None:
        make(partial)
        follow_umask(partial)
        files = {path.relative_to(partial).as_posix(): digest_of(path) for path in sorted(partial.rglob("*"))}
        write_json(partial / MANIFEST, with_checksum({"folder": folder.name, "files": files}))

    make_once(folder, made, lambda place: (place / MANIFEST).is_file())
    remedy = f"remove {folder}, and the next start makes it again"
    manifest = read_checksummed(folder / MANIFEST, remedy)
    found = [_damage_of_unchanged(folder / name, digest) for name, digest in manifest["files"].items()]
    if manifest["folder"] != folder.name:
        found.append(f"{folder} holds the files of {manifest['folder']}")
    if problems := [problem for problem in found if problem]:
        raise ValueError(f"{', '.join(problems)}; {remedy}")
    return folder


def _damage_of_unchanged(path: Path, digest: str) -> str | None:
    """`damage_of`, which reads a file once as long as its size and its times are the same."""
    try:
        state = path.stat()
    except OSError:
        return damage_of(path, digest)
    return _known_damage(path, digest, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@lru_cache(maxsize=256)
def _known_damage(path: Path, digest: str, *state: int) -> str | None:
    return damage_of(path, digest)


def check_manifest(folder: Path, run_key: str) -> dict[str, Any]:
    """The manifest of a checkpoint folder, after checking all its files.

    Raises ValueError that names every damaged file, or says that the checkpoint is of another run or step.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"{path} is missing: it was deleted, or an earlier version of grpo_lab wrote this checkpoint")
    manifest = read_checksummed(path, AFRESH)
    if manifest["run_key"] != run_key or f"step={manifest['step']:06d}" != folder.name:
        raise ValueError(f"{path} is of step {manifest['step']} of the run {manifest['run_key']}, not of this one")
    found = [damage_of(folder / name, digest) for name, digest in manifest["files"].items()]
    if problems := [problem for problem in found if problem]:
        raise ValueError(", ".join(problems))
    return manifest


def files_of(folder: Path, logged: Mapping[str, str]) -> dict[str, str]:
    """Name -> digest of every file of a finished run; `logged` holds the digests of logged files, as written."""
    names = [*_ALONE, *_BESIDES[:-1]]
    models = sorted(folder.glob(f"*/step=*/{MANIFEST}"))  # checkpoints, and the weights of the best evaluation
    names += [str(path.relative_to(folder)) for path in models]
    there = [name for name in names if name not in logged and (folder / name).exists()]
    return {**{name: digest_of(folder / name) for name in there}, **logged}


def check_finished(folder: Path, described: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The content of DONE of a finished run, and messages about its folder; `described` is its run.json.

    Raises ValueError, naming the file, if a file that is part of the result was changed. A missing file, or a changed
    file that is not part of the result, gives a message.
    """
    path = folder / "DONE"
    remedy = "restore it from a copy, or remove it and start the same command again"
    done = read_json(path, remedy)
    if CHECKSUM not in done and CHECKSUM not in described and {"steps", "first", "last"} <= done.keys():
        return done, ["an earlier version of grpo_lab finished this run: nothing says whether its files are whole"]
    done = read_checksummed(path, remedy)
    if done["run_key"] != described["run_key"]:
        raise ValueError(f"{path} and {folder / 'run.json'} are of two runs; {remedy}")
    notes = []
    for name, digest in done["files"].items():
        problem = damage_of(folder / name, digest)
        if problem is None and name.endswith(f"/{MANIFEST}"):
            try:
                check_manifest((folder / name).parent, described["run_key"])
            except ValueError as error:
                problem = str(error)
        elif problem is not None and (name.startswith(_BESIDES) or not (folder / name).exists()):
            notes.append(problem)
            continue
        if problem is not None:
            raise ValueError(f"this run is finished, but {problem}; {AGAIN}")
    return done, notes


def check_logged(folder: Path) -> None:
    """Raise ValueError if a finished run's metrics or evaluations differ from the digests in DONE.

    A missing evaluation is no error: the run's other numbers are valid without it.
    """
    path = folder / "DONE"
    if not path.exists() or CHECKSUM not in read_json(path, AGAIN):
        return
    for name, digest in read_checksummed(path, AGAIN)["files"].items():
        if name == "metrics.jsonl" or (name.startswith("eval/") and (folder / name).exists()):
            problem = damage_of(folder / name, digest)
            if problem is not None:
                raise ValueError(f"{problem}; {AGAIN}")
