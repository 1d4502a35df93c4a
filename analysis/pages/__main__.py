"""Write every page anew that is out of date; words are commands of grpo-lab to run first, on the same loaded sweeps."""

from __future__ import annotations

import sys

from grpo_lab.cli import main
from pages.tables import documented

for command in sys.argv[1:]:
    main([command])
for path, text in documented().items():
    changed = path.read_text() != text
    if changed:
        path.write_text(text)
    print(f"{path}: {'written' if changed else 'up to date'}")
