"""The top of the report: what was predicted and what came out, divergence by arm, tricks alone and inside the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from grpo_lab.analysis.caveats import caveats, comparison, place
from grpo_lab.analysis.effects.contrast_plan import order_warning
from grpo_lab.analysis.effects.contrasts import (
    AtBudget,
    Disagreement,
    TrickEffect,
    disagreements,
    harm_text,
    sign_flips,
    trick_effects,
)
from grpo_lab.analysis.effects.verdict import Judgement, beside, claim, judge, meaning
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.metric_names import CORRECTNESS, change_text, title
from grpo_lab.analysis.report.page_words import Html, escaped, folded, items, paragraph, table
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, WITHHELD_MEANS, bounds
from grpo_lab.analysis.stats.multiplicity import ALPHA, p_text
from grpo_lab.analysis.table_rows import groups_of, row_at

WORDS = ("supported", "contradicted", "within the margin", "not resolved", "could not act", "not run")
# The columns of the divergence headline: measure -> what to call it. The first three are always there.
HEADLINE = {
    "gap_change": "gap change, pp",
    "onset": "gap open by",
    "post_peak_drop": "drop after the peak, pp",
    "onset_after_peak": "downstream below its best by",
    "transfer_slope_early": "slope, first half",
    "transfer_slope_late": "slope, second half",
}


def verdict_section(
    data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues], divergence: pd.DataFrame | None
) -> Html:
    """Question, predictions, divergence, effects of tricks and caveats; `divergence` is `divergence_table`'s."""
    judgements = judge(data, finals)
    parts = [
        _summary(data, finals, judgements),
        _predictions(data, finals, others, judgements),
        _divergence(data, finals, divergence),
        _tricks(data, finals, others),
        Html("<h3>Caveats</h3>"),
        items(caveats(data, finals)),
    ]
    return Html("\n".join(parts))


def _summary(data: SweepData, finals: FinalValues, judgements: Sequence[Judgement]) -> Html:
    if data.declaration is None:
        said = f"Nothing was declared, so nothing is judged; {data.control} is the control."
        apart = items(comparison(data) if data.design is None else [])
        return Html(f"{paragraph(said, 'lead')}{apart}{paragraph(f'{finals.rule}.', 'small')}")
    counts = {word: sum(judgement.word == word for judgement in judgements) for word in WORDS}
    tally = ", ".join(f"{number} {word}" for word, number in counts.items() if number) or "no prediction was declared"
    of = (
        f"Of {len(judgements)} prediction{'s' * (len(judgements) > 1)}: {tally}."
        if judgements
        else "No single prediction was declared."
    )
    started = data.record.declared[-1]["cells_started_before"]
    when = (
        "Declared before the first run" if started == 0 else f"DECLARED AFTER {started} of its cells had been started"
    )
    rule = (
        f"{meaning(judgements)} "
        f"{when}, {len(data.record.declared)} declaration{'s' * (len(data.record.declared) > 1)} in all. "
        f"{finals.rule}. Brackets: {finals.brackets}, of differences paired by seed. "
        f"{WITHHELD_MEANS if any(one.difference.withheld for one in judgements) else ''} The decisive budget axis is "
        f"{finals.axis.replace('_', ' ')}; differences of shares are in percentage points (pp)."
    )
    parts = [paragraph(of, "lead"), paragraph(rule, "small")]
    return Html("".join([*parts, folded("What was expected, in words", paragraph(data.declaration.prediction))]))


# --- predictions --------------------------------------------------------------------------------------------


def _predictions(
    data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues], judgements: Sequence[Judgement]
) -> Html:
    cards = [_card(data, finals, others, one) for one in judgements]
    return Html(f'<ul class="cards">{"".join(cards)}</ul>' if cards else "")


def _card(data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues], judgement: Judgement) -> str:
    prediction = judgement.prediction
    assert data.design is not None  # a judgement is of a declared prediction
    main = " (the metric that decides)" if prediction.metric == data.design.primary else ""
    named = escaped(f"{title(prediction.metric)}{main}")
    effect = change_text(judgement.difference, prediction.metric) if judgement.difference.n else "no pair of seeds yet"
    lines = _evidence(data, finals, judgement)
    lines += _on_other_axes(finals, others, judgement) + _untouched(data, judgement)
    word = judgement.word
    return (
        f'<li class="card {word.replace(" ", "-")}"><p class="said"><span class="word">{word}</span> '
        f'<b>{escaped(claim(data, judgement))}</b> on <span title="{escaped(prediction.metric)}">{named}</span></p>'
        f'<p class="effect">{escaped(effect)}</p>{"".join(paragraph(line, "small") for line in lines)}</li>'
    )


def _evidence(data: SweepData, finals: FinalValues, judgement: Judgement) -> list[str]:
    """Seeds, collapsed runs, and p before and after counting how many predictions there were."""
    prediction = judgement.prediction
    seeds = list(map(str, judgement.seeds))
    planned = data.seeds_planned(prediction.level, prediction.arm)
    few = "; no interval, so not judged" if 0 < len(seeds) < FOR_INTERVAL else ""
    lines = [judgement.reason] if judgement.reason else []
    lines.append(f"{len(seeds)} of {planned} pairs of seeds ({', '.join(seeds) or 'none'}){few}.")
    if not any(finals.collapsed(*cell) for cell in ((prediction.level, prediction.arm), judgement.reference)):
        lines.append("Collapsed: none.")
    lines += [f"{line[0].upper()}{line[1:]}." for line in beside(data, finals, judgement)]
    if not math.isnan(judgement.p):
        lost = judgement.p < ALPHA <= judgement.holm
        after = f"; Holm-adjusted over {judgement.family} predictions {p_text(judgement.holm)}"
        after += ", so not resolved once their number counts" if lost else ""
        lines.append(f"{p_text(judgement.p)}{after if judgement.family > 1 else ''}.")
    return lines


def _on_other_axes(finals: FinalValues, others: Mapping[str, FinalValues], judgement: Judgement) -> list[str]:
    """Whether the sign survives when arms are compared at another equal budget."""
    prediction, same, flipped = judgement.prediction, [], []
    if judgement.difference.n == 0 or judgement.difference.mean == 0:
        return []
    for axis, result in others.items():
        place = (prediction.level, prediction.arm)
        there = result.comparison(place, judgement.reference, prediction.metric).whole
        words = axis.replace("_", " ")
        if there.n and there.mean * judgement.difference.mean < 0:
            flipped.append(f"{words} ({change_text(there, prediction.metric)})")
        elif there.n:
            same.append(words)
    lines = [f"Sign flips at equal {' and '.join(flipped)}."] if flipped else []
    return lines + ([f"Same sign at equal {', '.join(same)}."] if same else [])


def _untouched(data: SweepData, judgement: Judgement) -> list[str]:
    """Axes that the predicted arm sets and that touched nothing in its runs."""
    prediction = judgement.prediction
    assert data.design is not None  # a judgement is of a declared prediction
    words = [*data.design.arms[prediction.arm], *data.design.levels[prediction.level]]
    keys = {word.partition("=")[0] for word in words}
    done = data.finished[(data.finished["level"] == prediction.level) & (data.finished["arm"] == prediction.arm)]
    inert = done.explode("inert")["inert"].value_counts()
    found = [f"{axis} in {number} of {len(done)} runs" for axis, number in inert.items() if axis in keys]
    return [f"Inert: {', '.join(found)} changed nothing of the loss."] if found else []


# --- divergence ---------------------------------------------------------------------------------------------


def _divergence(data: SweepData, finals: FinalValues, divergence: pd.DataFrame | None) -> Html:
    head = "<h3>Does the training reward part from downstream accuracy?</h3>"
    if divergence is None or divergence.empty:
        return Html(f"{head}{paragraph('No run of this sweep was evaluated, so this cannot be said.')}")
    rows = divergence.assign(metric=divergence["metric"].str.rpartition("/")[2])
    here = rows[rows["arm"] != ""]
    known = set(here.loc[here["value"].notna(), "metric"]) | set(list(HEADLINE)[:3])
    shown = {name: words for name, words in HEADLINE.items() if name in known}
    by_arm = {cell: arm.set_index("metric") for cell, arm in groups_of(here, ["level", "arm"], sort=False)}
    lines = [
        [place(data, *cell), _seeds(finals, cell, arm), *(_measure(row_at(arm, name)) for name in shown)]
        for cell, arm in by_arm.items()
    ]
    said = [_opened(data, by_arm), *_ranked(data, rows[rows["arm"] == ""])]
    explained = (
        "Gap: the gain of training correctness (all responses; at an evaluation the mean over the 5% of the budget "
        "before it, where final values take the last fifth) less the gain of downstream accuracy, since step 0. "
        "A gap alone is no harm: harder questions gain less from the same learning. Harm is a drop after the peak, "
        "measured on questions that did not choose the peak, while the reward did not fall. Slope: downstream points "
        "per point of reward. Onsets are budgets: the evaluation by which it was so; in brackets "
        "what leaving out each seed gives, no interval."
    )
    grid = table(
        ["arm", "n seeds", *shown.values()],
        lines,
        f"Divergence by arm; brackets: {finals.brackets}, of onsets the range with a seed left out",
    )
    return Html(f"{head}{''.join(paragraph(line) for line in said)}{grid}{paragraph(explained, 'small')}")


def _seeds(finals: FinalValues, cell: tuple[str, str], arm: pd.DataFrame) -> str:
    collapsed = finals.stopped(*cell)
    return f"{arm['n'].max()}{f', {collapsed} collapsed left out' if collapsed else ''}"


def _measure(row: pd.Series) -> str:
    """One number of the divergence table with its interval, or the reason why there is none."""
    if math.isnan(row["value"]):
        return str(row["note"]) or "-"
    decimals = 0 if abs(row["value"]) >= 1000 else 2
    return f"{row['value']:,.{decimals}f}{bounds(row['low'], row['high'], f',.{decimals}f')}"


def _opened(data: SweepData, by_arm: Mapping[tuple[str, str], pd.DataFrame]) -> str:
    """Which arms' gaps, and drops after the peak, are surely above zero."""
    parts = []
    for name, words in (("gap_change", "the gap grew"), ("post_peak_drop", "downstream accuracy fell after its peak")):
        found = {cell: row_at(arm, name) for cell, arm in by_arm.items() if name in arm.index}
        measured = {cell: row for cell, row in found.items() if row["n"] >= FOR_INTERVAL}
        sure = [place(data, *cell) for cell, row in measured.items() if row["low"] > 0]
        if not measured:
            parts.append(f"whether {words} cannot be said of any arm")
            continue
        which = f" ({', '.join(sure)})" if 0 < len(sure) < len(measured) else ""
        many = f"all {len(sure)}" if len(sure) == len(measured) else f"{len(sure)} of {len(measured)}"
        parts.append(f"{words} in {many} arms{which}, by intervals above 0")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _ranked(data: SweepData, rows: pd.DataFrame) -> list[str]:
    """What choosing an arm by its training reward would have cost."""
    lines = []
    for level, here in rows.groupby("level", sort=False):
        named = here.set_index("metric")
        if "arm_regret" not in named.index or math.isnan(row_at(named, "arm_regret")["value"]):
            continue
        where = f" at {data.design.factor}={level}" if data.design and data.design.factor else ""
        regret, tau = row_at(named, "arm_regret"), row_at(named, "arm_tau")
        note = f" ({regret['note']})" if regret["note"] else ""
        sure = "Not resolved: " if regret["low"] < 0 < regret["high"] else ""
        lines.append(
            f"{sure}Choosing the arm{where} by training reward instead of downstream accuracy costs "
            f"{_measure(regret)} pp{note}; rank agreement of arms, Kendall's tau {_measure(tau)}."
        )
    return lines


# --- tricks -------------------------------------------------------------------------------------------------


def _tricks(data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues]) -> Html:
    """Every contrast of the design on downstream accuracy and training reward, and where the two disagree."""
    primary = [data.design.primary] if data.design else []
    metrics = [name for name in dict.fromkeys([*primary, DOWNSTREAM, CORRECTNESS]) if name in finals.values]
    effects = trick_effects(data, finals, metrics)
    head = "<h3>What does each trick do, alone and in company?</h3>"
    if not effects:
        return Html(f"{head}{paragraph('No two arms that ran differ by one trick alone.')}")
    rows: dict[tuple[str, str], dict[str, TrickEffect]] = {}
    for effect in effects:
        rows.setdefault((effect.contrast.level, effect.contrast.name), {})[effect.metric] = effect
    lines = [
        [*_named(data, by_metric), *(_effect(by_metric.get(name)) for name in metrics)] for by_metric in rows.values()
    ]
    columns = ["trick", "where", "pairs", "collapsed with / without", "P(harm > 2 points)", *map(title, metrics)]
    grid = table(columns, lines, f"Effects of tricks at {finals.at}, paired by seed")
    apart = disagreements(effects)
    sure = [_disagreement(data, one) for one in apart if one.resolved]
    sure = sure or ["No trick surely moved training reward and downstream accuracy in opposite directions."]
    rest = [_disagreement(data, one) for one in apart if not one.resolved]
    on_axes = {axis: AtBudget(result, trick_effects(data, result, metrics)) for axis, result in others.items()}
    on_axes[finals.axis] = AtBudget(finals, effects)
    flips = [f"Depends on the budget axis, {title(flip.metric)}: {flip.text}." for flip in sign_flips(on_axes)]
    explained = (
        f"Brackets: {finals.brackets}, each on its own. P(harm): the chance to measure a loss of more than 2 points of "
        "the first metric on another base (with one base: another seed), with as many seeds. p is adjusted within all "
        "effects of one kind on one metric, by Holm on the declared primary metric and by Benjamini-Hochberg, a "
        "screening, on the others. An effect is what having the trick adds: added to base, that arm less base; inside "
        "full, full less the arm without it."
    )
    if any(effect.contrast.kind == "interaction" for effect in effects):
        explained += " Interaction: above 0, having it is worth more in company than alone; below 0, less."

    more = folded(f"Signs that depend on the budget axis ({len(flips)})", items(flips)) if flips else ""
    order = paragraph(order_warning(data)) if order_warning(data) else ""
    more += folded(f"Opposite signs of reward and downstream within noise ({len(rest)})", items(rest)) if rest else ""
    return Html(f"{head}{items(sure)}{order}{grid}{paragraph(explained, 'small')}{more}")


def _named(data: SweepData, by_metric: Mapping[str, TrickEffect]) -> list[str]:
    effect = next(iter(by_metric.values()))
    contrast = effect.contrast
    where = (
        contrast.context if contrast.kind in ("added", "left_out", "given") else f"{contrast.kind}: {contrast.context}"
    )
    pairs = dict.fromkeys(str(one.n_pairs) for one in by_metric.values())
    collapsed = f"{effect.collapsed_with} / {effect.collapsed_without}"
    harm = next((harm_text(one) for one in by_metric.values() if not math.isnan(one.harm)), "-")
    return [place(data, contrast.level, contrast.trick), where, ", ".join(pairs), collapsed, harm]


def _effect(effect: TrickEffect | None) -> str:
    if effect is None:
        return "-"
    p = "" if math.isnan(effect.p_adjusted) else f", {p_text(effect.p_adjusted)}"
    return f"{change_text(effect.interval, effect.metric)}{p}"


def _disagreement(data: SweepData, found: Disagreement) -> Html:
    """Opposite signs in one sentence; bold where both are sure."""
    up, down = ("raises", "lowers") if found.reward.interval.mean > 0 else ("lowers", "raises")
    contrast = found.reward.contrast
    adjusted = f"adjusted {p_text(found.reward.p_adjusted)} and {p_text(found.downstream.p_adjusted)}"
    sure = adjusted if found.resolved else "within noise"
    text = escaped(
        f"{place(data, contrast.level, contrast.name)} {up} training reward "
        f"({change_text(found.reward.interval, found.reward.metric)}) and {down} downstream accuracy "
        f"({change_text(found.downstream.interval, found.downstream.metric)}): {sure}."
    )
    return Html(f"<b>{text}</b>" if found.resolved else text)
