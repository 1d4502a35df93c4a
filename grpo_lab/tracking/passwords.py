"""Passwords in the addresses of stores: used to connect, and masked wherever something is recorded or printed."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]{0,40}://)(\S+)")
_FIELD = re.compile(r"([?&][^=&\s]{0,60}(?:password|passwd|pwd|token|secret)[^=&\s]{0,60}=)[^&\s'\"]+", re.IGNORECASE)


def masked(value: Any) -> Any:
    """The value with `***` for every password in an address, in texts within lists and mappings too."""
    if isinstance(value, str):
        return _ADDRESS.sub(lambda found: found[1] + _FIELD.sub(rf"\1{MASK}", _masked(*found.groups())), value)
    if isinstance(value, dict):
        return {key: masked(part) for key, part in value.items()}
    return [masked(part) for part in value] if isinstance(value, list | tuple) else value


def _masked(scheme: str, rest: str) -> str:
    # What reaches databases takes all up to the last @ for a password, slashes included.
    parts = re.match(r"[^/]*" if scheme.startswith("http") else r".*@|", rest)
    end = parts.end() if parts else 0
    user, at, host = rest[:end].rpartition("@")
    name, colon, password = user.partition(":")
    return f"{name}:{MASK}@{host}{rest[end:]}" if at and colon and password and "/" not in name else rest


def has_password(uri: str) -> bool:
    """True for an address that holds a password."""
    return masked(uri) != uri


def without_mask(uri: str) -> str:
    """A recorded address as it can connect, with a password that the environment holds, such as PGPASSWORD."""
    return uri.replace(f":{MASK}@", "@")
