"""`PYTHONPATH=analysis python -m pages docs claims`: the commands of this package, in the order given."""

from __future__ import annotations

import sys

from pages.commands import main

main(sys.argv[1:])
