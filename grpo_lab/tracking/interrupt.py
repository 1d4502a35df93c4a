"""Ctrl-C ends a command in one line wherever it comes, during imports too. A command imports this before all else."""

import sys
from types import TracebackType


def _said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


def quietly() -> None:
    """From here on an interrupt that nothing else handles is one line instead of a traceback."""
    sys.excepthook = _said
