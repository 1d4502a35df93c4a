"""Numbers and tables of the report: how to write an interval with its unit, how to escape text."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

from grpo_lab.analysis.outcome import AVERAGE
from grpo_lab.analysis.stats import Interval
from grpo_lab.tracking.metrics import DERIVED, find

_DERIVED = {metric.name: metric.unit for metric in DERIVED}
_ONE_LINE = 48  # characters
_PLAIN = ("1", "loss", "advantage")  # units that say nothing beside a number


class Html(str):
    """Text that is HTML already, and is not escaped again."""


def escaped(text: object) -> str:
    """Text as HTML; `Html` stays what it is."""
    return text if isinstance(text, Html) else html.escape(str(text))


def unit(metric: str) -> str:
    """The unit of a metric, also of one that analysis derives."""
    metric = metric.removeprefix(AVERAGE)
    return _DERIVED[metric] if metric in _DERIVED else find(metric).unit


def level_text(interval: Interval, metric: str) -> str:
    """A value with its interval, such as `0.693 [0.681, 0.705]` or `23.4 [22.9, 23.9] tokens`."""
    if unit(metric) in ("share", "reward"):
        return interval.text()
    return _written(interval, "", unit(metric))


def change_text(interval: Interval, metric: str) -> str:
    """A difference with its interval; shares in percentage points, such as `-3.4 pp [-5.2, -1.6]`."""
    if unit(metric) != "share":
        return _written(interval, "+", unit(metric))
    points = Interval(100 * interval.mean, 100 * interval.low, 100 * interval.high, interval.n)
    return _written(points, "+", "pp", decimals=1)


def _written(interval: Interval, sign: str, name: str, decimals: int | None = None) -> str:
    if interval.n == 0 or math.isnan(interval.mean):
        return "-"
    numbers = [interval.mean, interval.low, interval.high]
    if decimals is None:
        decimals = _decimals(max(abs(number) for number in numbers if not math.isnan(number)))
    mean, low, high = (number_text(number, decimals, sign) for number in numbers)
    name = "" if name in _PLAIN else f" {name}"
    return f"{mean}{name}" if math.isnan(interval.low) else f"{mean}{name} [{low}, {high}]"


def _decimals(largest: float) -> int:
    """So that the largest of some numbers shows three digits; -1 where that takes a power of ten."""
    if largest == 0:
        return 0
    places = 2 - math.floor(math.log10(largest))
    return max(places, 0) if -5 < places < 7 else -1


def number_text(number: float | int, decimals: int, sign: str = "") -> str:
    """A number with so many decimals, thousands separated; with a power of ten for -1."""
    return f"{number:{sign}.2e}" if decimals < 0 else f"{number:{sign},.{decimals}f}"


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str) -> Html:
    """A table that scrolls sideways, its first column standing still; cells are escaped."""
    heads = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    body = "".join(f'<tr><th scope="row">{escaped(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>\n' for row in rows)
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table>'
        f"<caption><span>{html.escape(caption)}</span></caption><thead><tr>{heads}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(content: object) -> str:
    """A number with its interval stays on one line; words may be broken."""
    whole = bool(re.match(r"[-+]?\d", str(content))) and len(str(content)) < _ONE_LINE
    return f"<td{' class=number' if whole else ''}>{escaped(content)}</td>"


def paragraph(text: str, kind: str = "") -> Html:
    """One paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return Html(f"<p{attribute}>{escaped(text)}</p>")


def items(lines: Iterable[object]) -> Html:
    """A list; lines that begin with two spaces are a list of their own, under the line before them."""
    parts: list[tuple[object, list[str]]] = []
    for line in lines:
        if parts and not isinstance(line, Html) and str(line).startswith("  "):
            parts[-1][1].append(f"<li>{escaped(str(line).strip())}</li>")
        else:
            parts.append((line, []))
    under = [f"<ul>{''.join(deeper)}</ul>" if deeper else "" for _, deeper in parts]
    return Html(f"<ul>{''.join(f'<li>{escaped(line)}{more}</li>' for (line, _), more in zip(parts, under))}</ul>")


def folded(summary: str, content: str) -> Html:
    """Content that opens on a click."""
    return Html(f"<details><summary>{html.escape(summary)}</summary>{content}</details>")
