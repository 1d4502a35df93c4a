"""The figures of the report: embedded as data URIs, each with how to read it and where its numbers are."""

from __future__ import annotations

import base64
import html
import io
import shlex
from collections.abc import Mapping, Sequence

from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.report.page_words import Html, escaped, items, paragraph

LARGEST_SVG = 400_000  # bytes; a larger figure is embedded as PNG where that is smaller
PNG_DPI = 130
# What comes after `<sweep>` in a figure's name -> its title and how to read it.
HOW_TO_READ = {
    "": (
        "Training reward against evaluations",
        "One panel per arm, over the budget. Lines that run apart after the mark of the onset are divergence; a "
        "downstream line that falls beside a rising reward is harm.",
    ),
    "effects": (
        "Difference of every arm to the control",
        "One row per arm, one column per metric; right of the line the arm has more of it. An interval that crosses "
        "the line leaves the sign open.",
    ),
    "phase": (
        "Reward against downstream accuracy",
        "One path per arm, from the base model on; along the diagonal both gain alike, a path that bends down or to "
        "the right gains reward that downstream accuracy does not show.",
    ),
    "forest": (
        "Effect of every trick",
        "One row per trick and context, percentage points, paired by seed. Inside the shaded band an effect is smaller "
        "than so many seeds can find; rows where reward and downstream accuracy disagree in sign are marked.",
    ),
    "ranks": (
        "Do reward and downstream accuracy rank arms alike?",
        "Arms by their final training reward against their final downstream accuracy. Crossing lines are arms that the "
        "reward would have chosen wrongly.",
    ),
    "waterfall": (
        "What the gap consists of",
        "One bar per arm, percentage points: which training prompts were drawn, memorisation, protocol, and the shift "
        "to harder questions add up to the gap change.",
    ),
    "frontier": (
        "Gain over the distance from the initial policy",
        "x is the square root of the KL divergence (nats per response), y the gain in percentage points. Beyond the "
        "top of the fitted curve, going further costs.",
    ),
    "ceiling": (
        "Ceiling and efficiency",
        "Held-out accuracy (evaluation protocol) over the budget, logarithmic, with a fitted sigmoid: solid where it "
        "was observed, dotted where it is extrapolated. An open interval says that the asymptote is not identified.",
    ),
    "budgets": (
        "The same comparison at other equal budgets",
        "Each contrast at equal steps, tokens, operations and seconds. Where intervals lie on both sides of the line, "
        "the answer depends on what is held equal.",
    ),
    "signs": (
        "Vital signs",
        "Entropy, KL, length, truncation and the like over the budget, a panel for each: why an arm did what it did.",
    ),
    "doses": (
        "What comes of a number",
        "Training outcome, held-out accuracy (training protocol) and downstream accuracy over the number in which the "
        "arms differ, a line for each level. Where the first stays up and the others fall, the run does not see what "
        "happens to it.",
    ),
    "wishes": (
        "Lengths as asked for",
        "Mean response length and share of right answers over the length that the prompt asked for, before and after "
        "training. On the diagonal a response is as long as it was asked to be.",
    ),
    "coverage": (
        "pass@k against the base model",
        "Chance that one of k samples is right, in percent, before and after training. Above the base model at k = 1 "
        "and below it at large k is a policy that became sure of what the base could do already.",
    ),
}


def figures_section(figures: Sequence[Drawn], missing: Mapping[str, str], name: str) -> Html:
    """Every figure with how to read it and where its numbers are; then the figures that could not be drawn."""
    shown = [_figure(drawn, name) for drawn in figures]
    again = f"make figures EXP={shlex.quote(name)}"
    where = f"The files named under a figure hold its numbers and their sources; {again} writes them."
    parts = [paragraph(where, "small"), *shown]
    if missing:
        parts.append("<h3>Not drawn</h3>")
        parts.append(items(f"{_read(key, name)[0]} ({key}): {reason}" for key, reason in missing.items()))
    return Html("\n".join(parts))


def _read(key: str, name: str) -> tuple[str, str]:
    suffix = key.removeprefix(name).removeprefix("_")
    return HOW_TO_READ.get(suffix, (suffix.replace("_", " ") or key, ""))


def _figure(drawn: Drawn, name: str) -> str:
    heading, reading = _read(drawn.name, name)
    bands = f"{drawn.bands[:1].upper()}{drawn.bands[1:]}."
    width, height = (round(96 * inches) for inches in drawn.size)
    files = ", ".join(f"<code>{html.escape(drawn.name)}.{kind}</code>" for kind in ("csv", "json"))
    return (
        f'<figure class="figure" id="figure-{html.escape(drawn.name)}">\n<h3>{escaped(heading)}</h3>\n'
        f"<figcaption>{paragraph(f'{reading} {bands}'.strip())}</figcaption>\n"
        f'<div class="paper" tabindex="0" role="region" aria-label="{html.escape(heading)}, figure">'
        f'<img alt="{html.escape(f"{heading}. {bands}")}" width="{width}" height="{height}" '
        f'src="{image_uri(drawn)}"></div>\n'
        f'<p class="small">Numbers and sources: {files}</p>\n</figure>'
    )


def image_uri(drawn: Drawn) -> str:
    """The figure as a data URI: SVG, or PNG where the SVG is large and the PNG is not."""
    svg = _saved(drawn, "svg")
    if len(svg) > LARGEST_SVG:
        png = _saved(drawn, "png")
        if len(png) < len(svg):
            return f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _saved(drawn: Drawn, kind: str) -> bytes:
    buffer = io.BytesIO()
    drawn.write(buffer, kind, PNG_DPI)
    return buffer.getvalue()
