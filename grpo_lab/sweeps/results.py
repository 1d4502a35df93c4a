"""The results that a sweep sends to its MLflow run when it ends; making them takes seconds."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from grpo_lab.tracking.mlflow_parent import SweepResults


def sweep_results(folder: Path) -> SweepResults | None:
    """The table of arms, verdict and first figures of the sweep recorded in `folder`; None without a finished run.

    `grpo-lab figures` sends all figures. Where packages that draw are missing there are none.
    """
    from grpo_lab.analysis.effects.arms import arms_table
    from grpo_lab.analysis.effects.table import effect_table, markdown
    from grpo_lab.analysis.effects.verdict import verdict_text
    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.run_folders import load_sweep

    data = load_sweep(folder.parent.parent, folder.name)
    if data.finished.empty:
        return None
    finals = final_values(data)
    table = "\n".join(arms_table(data, finals))
    verdict = verdict_text(data, finals)
    files = {
        "arms.txt": table.encode(),
        "arms.md": markdown(data, finals).encode(),
        "arms.csv": effect_table(data, finals).to_csv(index=False).encode(),
        "verdict.txt": verdict.encode(),
    }
    try:
        from grpo_lab.analysis.caveats import notes
        from grpo_lab.analysis.figures import curves, proxy
        from grpo_lab.analysis.figures.style import with_notes, write_png
    except ModuleNotFoundError:
        return SweepResults(table, verdict, files)
    for kind in (proxy.FIGURE, curves.FIGURE):
        drawn = kind.draw(data, finals)
        if not isinstance(drawn, str):
            content = BytesIO()
            write_png(with_notes(drawn, notes(data, finals)), content)
            files[f"figures/{drawn.name}.png"] = content.getvalue()
    return SweepResults(table, verdict, files)
