"""`grpo-lab doctor LOG`: the diagnosis as text, JSON or an HTML page, and an exit code for CI."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lab.tracking.files import write_atomically
from grpo_lab.tracking.terminal import printable, say

CLEAN, FOUND, UNREADABLE = 0, 1, 2
LEVELS = ("note", "warning", "error", "never")
_WIDTH, _HEIGHT = 640, 120  # of a chart, in px


def add_doctor(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `grpo-lab`."""
    doctor = commands.add_parser("doctor", help="what went wrong in a log of TRL, verl, OpenRLHF, prime-rl or ours")
    doctor.add_argument("log", type=Path, help="a log file, a run folder or the folder that a trainer wrote")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the diagnosis as JSON; - prints it")
    doctor.add_argument("--html", type=Path, metavar="FILE", help="write it as a page with charts; works offline")
    doctor.add_argument(
        "--fail-on", choices=LEVELS, default="warning", help="exit with 1 from this severity on (default: warning)"
    )
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> None:
    """Print the diagnosis; exit with 1 if something was found, 2 if the log cannot be read."""
    from grpo_lab.instruments.doctor.diagnosis import diagnose

    try:
        diagnosis = diagnose(arguments.log)
    except (ValueError, OSError) as error:
        say(f"error: {error}", error=True)
        sys.exit(UNREADABLE)
    content = as_json(diagnosis)
    if arguments.json is not None and str(arguments.json) != "-":
        write_atomically(arguments.json, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
    if arguments.html is not None:
        write_atomically(arguments.html, lambda path: path.write_text(as_html(diagnosis)))
    say(json.dumps(content, indent=1) if str(arguments.json) == "-" else as_text(diagnosis))
    if exit_code(diagnosis.worst(), arguments.fail_on):
        sys.exit(FOUND)


def exit_code(worst: str | None, fail_on: str) -> int:
    """1 where the worst finding is at least as severe as `fail_on`, else 0."""
    return FOUND if worst is not None and LEVELS.index(worst) >= LEVELS.index(fail_on) else CLEAN


def as_json(diagnosis: Any) -> dict[str, Any]:
    """The diagnosis as JSON values."""
    from grpo_lab.instruments.doctor.diagnosis import harm
    from grpo_lab.instruments.doctor.rules import thresholds

    known = thresholds()
    return {
        "log": str(diagnosis.source),
        "format": diagnosis.format,
        "steps": list(diagnosis.steps),
        "metrics": list(diagnosis.metrics),
        "findings": [
            {
                "rule": one.rule.name,
                "title": one.rule.title,
                "severity": one.severity,
                "evidence": one.evidence,
                "onset": {"step": one.onset.step, "low": one.onset.low, "high": one.onset.high},
                "value": one.value,
                "threshold": one.threshold,
                "harm_points": harm(one.rule.name) if known["rules"].get(one.rule.name, {}).get("fired") else None,
                "recorded_runs": known["rules"].get(one.rule.name),
                "cannot_say": one.rule.cannot_say,
                "try": {"grpo_lab": list(one.rule.ours), "trl": one.rule.trl, "verl": one.rule.verl},
            }
            for one in diagnosis.findings
        ],
        "unchecked": dict(diagnosis.unchecked),
        "notes": list(diagnosis.notes),
    }


def as_text(diagnosis: Any) -> str:
    """The diagnosis as lines for a terminal."""
    from grpo_lab.instruments.doctor.diagnosis import sorted_unchecked

    first, last = diagnosis.steps
    lines = [f"{diagnosis.source}: {diagnosis.format}, steps {first} to {last}, {len(diagnosis.metrics)} known metrics"]
    lines += diagnosis.notes
    for number, one in enumerate(diagnosis.findings, start=1):
        lines += [
            "",
            f"{number}. {one.rule.title} [{one.severity}], {onset_text(one.onset)}",
            f"   {one.evidence}",
            f"   recorded runs: {rates_text(one.rule.name)}",
            f"   the numbers cannot say: {one.rule.cannot_say}",
            f"   try: {' '.join(one.rule.ours)}",
            f"     TRL: {one.rule.trl}",
            f"     verl: {one.rule.verl}",
        ]
    if not diagnosis.findings:
        lines += ["", f"nothing found; {together_text()}"]
    if diagnosis.unchecked:
        lines += ["", "not checked:"]
        lines += [f"   {title}: {why}" for title, why in sorted_unchecked(diagnosis.unchecked)]
    return "\n".join(lines)


def onset_text(onset: Any) -> str:
    """The step since when, with its interval where it has one."""
    if onset.low == onset.high:
        return f"from step {onset.step} on"
    return f"since step {onset.step} [{onset.low}, {onset.high}]"


def rates_text(rule: str) -> str:
    """How often the rule was wrong and right on recorded runs."""
    from grpo_lab.instruments.doctor.rules import thresholds

    counts = thresholds()["rules"].get(rule)
    if counts is None:
        return "no rate, the rule is a fact and has no threshold from runs"
    text = f"false alarms on {_share(counts['false_alarms'], counts['healthy'])} healthy runs"
    if "found" in counts:
        text += f", found in {_share(counts['found'], counts['harmed'])} harmed runs"
        points = counts["harm_points"]
        text += f"; runs with it end {abs(points):.0f} points {'lower' if points > 0 else 'higher'} downstream"
    return text


def together_text() -> str:
    """How often an error or a warning of any rule is wrong, and how many harmed runs have none."""
    from grpo_lab.instruments.doctor.rules import thresholds

    counts = thresholds()["together"]
    return (
        f"of harmed recorded runs {_share(counts['harmed'] - counts['found'], counts['harmed'])} have no error or "
        f"warning, of healthy ones {_share(counts['false_alarms'], counts['healthy'])} have one"
    )


def _share(number: int, n: int) -> str:
    return f"{number} of {n} ({number / n:.1%})" if n else f"{number} of 0"


def as_html(diagnosis: Any) -> str:
    """The diagnosis as one page without references to other files."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from grpo_lab.instruments.doctor.diagnosis import sorted_unchecked

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    findings = [
        {
            "one": one,
            "onset": onset_text(one.onset),
            "rates": rates_text(one.rule.name),
            "chart": chart(one),
        }
        for one in diagnosis.findings
    ]
    return environment.get_template("page.html").render(
        diagnosis=diagnosis,
        source=printable(str(diagnosis.source)),
        findings=findings,
        unchecked=sorted_unchecked(diagnosis.unchecked),
        together=together_text(),
        width=_WIDTH,
        height=_HEIGHT,
    )


def chart(finding: Any) -> Mapping[str, Any]:
    """Points of a line, the height of the threshold and the place of the onset, in px of the chart."""
    import numpy as np

    series = finding.series[np.isfinite(finding.series)]
    low = float(min(series.min(), finding.threshold))
    high = float(max(series.max(), finding.threshold))
    first, last = float(series.index[0]), float(series.index[-1])

    def x(step: float) -> float:
        return round(_WIDTH * (step - first) / max(last - first, 1), 1)

    def y(value: float) -> float:
        return round(_HEIGHT * (1 - (value - low) / max(high - low, 1e-12)), 1)

    return {
        "points": " ".join(f"{x(float(step))},{y(float(value))}" for step, value in series.items()),
        "threshold": y(finding.threshold),
        "onset": (x(finding.onset.low), x(finding.onset.step), x(finding.onset.high)),
        "low": f"{low:.3g}",
        "high": f"{high:.3g}",
    }
