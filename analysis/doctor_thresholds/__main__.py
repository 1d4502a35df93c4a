"""`python -m doctor_thresholds`, from analysis/: writes thresholds.json anew, prints the table of doctor.md."""

from pathlib import Path

from doctor_thresholds.derive import rules_table, runs_of, text_of, thresholds_of
from grpo_lab.instruments.doctor.rules import THRESHOLDS

if __name__ == "__main__":
    found = thresholds_of(runs_of(Path(__file__).parents[2] / "experiments"))
    THRESHOLDS.write_text(text_of(found))
    print(rules_table(found))
