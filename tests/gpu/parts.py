"""A large file in parts that travel one at a time, such as a model's for a machine without a network.

    python tests/gpu/parts.py split FILE FOLDER     writes FOLDER/FILE.000 and so on, of 16 MiB each, and FILE.json
    python tests/gpu/parts.py join FOLDER/FILE.json writes FOLDER/FILE once all parts are there, and checks it

Every part and the whole have their sha256 in FILE.json. Nothing beyond the standard library is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

PART_BYTES = 16 * 2**20


def split(file: Path, folder: Path, size: int = PART_BYTES) -> Path:
    """Write the parts of a file into a folder; returns the list of them, with their digests."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, digests = hashlib.sha256(), []
    with file.open("rb") as source:
        while content := source.read(size):
            whole.update(content)
            _part(folder, file.name, len(digests)).write_bytes(content)
            digests.append(hashlib.sha256(content).hexdigest())
    index = folder / f"{file.name}.json"
    index.write_text(json.dumps({"sha256": whole.hexdigest(), "parts": digests}, indent=1) + "\n")
    return index


def join(index: Path) -> Path:
    """Write the whole file beside its parts. Raises ValueError that names the parts that are missing or damaged."""
    known, name, folder = json.loads(index.read_text()), index.name.removesuffix(".json"), index.parent
    parts = [_part(folder, name, number) for number in range(len(known["parts"]))]
    wrong = [part.name for part, digest in zip(parts, known["parts"]) if _digest(part) != digest]
    if wrong:
        listed = ", ".join(wrong)
        raise ValueError(f"of {len(parts)} parts of {name} these are missing or damaged, copy them again: {listed}")
    partial, whole = folder / f".{name}.partial", hashlib.sha256()
    with partial.open("wb") as target:
        for part in parts:
            content = part.read_bytes()
            whole.update(content)
            target.write(content)
    if whole.hexdigest() != known["sha256"]:
        raise ValueError(f"{index} is not of these parts: split the file again, and copy all of it")
    os.replace(partial, folder / name)
    return folder / name


def _part(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}.{number:03d}"


def _digest(part: Path) -> str | None:
    return hashlib.sha256(part.read_bytes()).hexdigest() if part.exists() else None


def main(words: Sequence[str]) -> None:
    match words:
        case ["split", file, folder]:
            print(split(Path(file), Path(folder)))
        case ["join", index]:
            print(join(Path(index)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
