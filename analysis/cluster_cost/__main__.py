"""Write the tables of the page and its figures anew from `numbers.yaml`; print what they say."""

from __future__ import annotations

from pathlib import Path

from cluster_cost.drawings import draw_all
from cluster_cost.page import answers, written
from cluster_cost.study import Study
from grpo_lab.analysis.figures.style import save

FOLDER = Path(__file__).parent

study, page = Study.load(FOLDER / "numbers.yaml"), FOLDER / "README.md"
print(answers(study))
page.write_text(written(page.read_text(), study))
for drawn in draw_all(study):
    print(*save(drawn, FOLDER / "figures", {"numbers": "numbers.yaml", "command": "make cluster-cost"}), sep="\n")
