"""Print the coverage tables of the docstrings again, and the skewness of the differences in the saved sweeps.

`TRIALS` in the environment is the number of simulated sweeps behind each number (default 200); a thousand take minutes
on an idle core. Coverage is lowest for skewed effects, hence the skewness.
"""

from __future__ import annotations

import os
from pathlib import Path

from interval_coverage import all_pairs, differences, outcomes
from interval_coverage.skewness import observed_skewness, skewness_text

number = int(os.environ.get("TRIALS", "200"))
for table in (*differences.tables(number), *all_pairs.tables(number), *outcomes.tables(number)):
    print(table.text, end="\n\n")
print(skewness_text(observed_skewness(Path(__file__).parents[2] / "experiments")))
