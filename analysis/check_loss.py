"""Update what analysis/check_loss.md says of other frameworks, from `grpo-lab check-loss --framework NAME --json FILE`.

python analysis/check_loss.py FILE ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grpo_lab.instruments.loss_check.report import table

FOLDER = Path(__file__).parent
DATA, PAGE = FOLDER / "data" / "check_loss.json", FOLDER / "check_loss.md"
BEGIN, END = "<!-- frameworks: begin -->\n", "<!-- frameworks: end -->\n"


def with_table(page: str, rows: list[dict]) -> str:
    """The page with the table of these rows between its two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(rows) + "\n" + END + rest.split(END)[1]


def main(files: list[str]) -> None:
    """Replace the rows of the frameworks that the files hold, and the table of the page."""
    new = [row for file in files for row in json.loads(Path(file).read_text())]
    kept = ("function", "ok", "equals", "faults", "notes", "nearest", "checks")
    rows = json.loads(DATA.read_text()) if DATA.exists() else []
    replaced = {row["function"].split(" ")[0] for row in new}
    rows = [row for row in rows if row["function"].split(" ")[0] not in replaced]
    for row in new:
        short = {name: row[name] for name in kept}
        short["checks"] = [one for one in row["checks"] if one["status"] == "departs"]
        rows.append(short)
    rows.sort(key=lambda row: row["function"].split(" ")[0])
    DATA.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), rows))


if __name__ == "__main__":
    main(sys.argv[1:])
