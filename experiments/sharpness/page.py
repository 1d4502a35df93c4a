"""The picture of this experiment: `python experiments/sharpness/page.py` draws it."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.analysis.build import describe_sources
from grpo_lab.analysis.figures.sharpness import draw_sharpness
from grpo_lab.analysis.figures.style import save
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.saved_data import load_data

HERE = Path(__file__).parent


def main() -> None:
    """Draw the picture."""
    data = load_data(HERE / "data", "sharpness")
    finals = final_values(data)
    drawn = draw_sharpness(
        data, finals,
        "Training reward ranks published recipes by policy entropy in both environments, but by held-out accuracy "
        "detectably only in search",
        "sharpness_picture",
    )  # fmt: skip
    assert not isinstance(drawn, str), drawn
    save(drawn, HERE / "figures", describe_sources(data, finals, ["python", "experiments/sharpness/page.py"]))


if __name__ == "__main__":
    main()
