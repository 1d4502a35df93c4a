"""The table of external evidence: what checked submissions of others say, apart from the claims table."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.analysis.effects.verdict import judge
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.config.folders import DESIGN, EXTERNAL
from grpo_lab.instruments.submission import check
from pages.claims import Answer, linked

EXTERNAL_HEAD = "| external | claim or prediction | source | measured | effect | verdict | runs | commit |"
_NONE = "| none yet |  |  |  |  |  |  |  |"


def external_table(experiments: Path) -> str:
    """One row for each claim of every submission, or for each prediction where it names no claim.

    Every folder is checked again. Raises ValueError for one that is no longer what was packed.
    """
    lines = [EXTERNAL_HEAD, "|---" * 8 + "|"]
    folders = sorted(path.parent for path in (experiments / EXTERNAL).glob(f"*/{DESIGN}"))
    for folder in folders:
        design, data, described = check(folder, experiments)
        judgements = judge(data, final_values(data))
        claims = [
            (one.says, linked(one.source), Answer(one, design, judgements[one.prediction])) for one in design.claims
        ]
        rows = [(says, source, answer.judgement, answer.verdict) for says, source, answer in claims] or [
            (f"`{one.prediction.arm}` {one.prediction.direction.value} `{one.reference[1]}`", "", one, one.verdict)
            for one in judgements
        ]
        name = f"[{design.name}]({EXTERNAL}/{design.name}/README.md)" + " (example, no evidence)" * described["example"]
        for says, source, judgement, verdict in rows:
            assert judgement is not None, "a checked submission has data"
            cells = (
                name,
                says,
                source,
                metric_text(judgement.prediction.metric),
                judgement.difference.text("+"),
                verdict,
                judgement.difference.runs(),
                f"`{described['runs'][0]['commit'][:8]}`",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines if folders else [*lines, _NONE])
