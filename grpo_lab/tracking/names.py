"""Names of folders, runs and parameters, made from values: what a name cannot hold is in a short hash within it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

MOST_CHARACTERS = 120
# A folder's or file's name has at most 255 bytes; figures, saved data and temporary files put more behind a name.
MOST_BYTES = 180
_NOT_IN_NAMES = " '\"\\${}"
_FOLDERS = re.compile(r"[^,\[\]{}:=]*/(?=[^,\]}/])")  # of a path: all but its last part


def folder_name(parts: Sequence[str]) -> str:
    """`parts`, joined by commas, as the name of a folder, such as `plain,model.path=qwen-1f2e3d4c`.

    Of a path it has the last part. A part that loses characters ends in their hash, and a long name in its own, so
    that different parts give different names. Parts that lose nothing stay as they are.
    """
    name = ",".join(map(_written, parts))
    if len(name) > MOST_CHARACTERS or len(name.encode()) > MOST_BYTES:
        begin = name[: MOST_CHARACTERS - 9].encode()[: MOST_BYTES - 9].decode(errors="ignore")
        name = f"{begin}-{_digest(name)}"
    return name


def _written(part: str) -> str:
    key, equals, value = part.partition("=")
    written = key.replace("/", "_").lstrip(".") + equals + _FOLDERS.sub("", value).replace("/", "")
    return marked(part, "".join(one for one in written if one.isprintable() and one not in _NOT_IN_NAMES))


def marked(text: str, name: str) -> str:
    """The name made from `text`, with a hash of the text behind it if the two differ."""
    return name if name == text else f"{name}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
