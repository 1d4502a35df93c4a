"""The top of the report: predictions and verdicts, divergence by arm, tricks added to base and left out of full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

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
from grpo_lab.analysis.effects.verdict import VERDICTS, Judgement, beside, claim, judge, meaning
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.metric_names import CORRECTNESS, change_text, title
from grpo_lab.analysis.report.templates import HtmlTable, nested, render
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, NOT_REPORTED_MEANS, bounds
from grpo_lab.analysis.stats.multiplicity import ALPHA, p_text
from grpo_lab.analysis.table_rows import groups_of, row_at

# The columns of the divergence headline: measure -> what to call it. The first three are always there.
HEADLINE = {
    "gap_change": "gap change, pp",
    "onset": "gap open by",
    "post_peak_drop": "drop after the peak, pp",
    "onset_after_peak": "downstream below its best by",
    "transfer_slope_early": "slope, first half",
    "transfer_slope_late": "slope, second half",
}
_OPENED = {"gap_change": "the gap grew", "post_peak_drop": "downstream accuracy fell after its peak"}


def verdict_section(
    data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues], divergence: pd.DataFrame | None
) -> Markup:
    """Question, predictions, divergence, effects of tricks and caveats; `divergence` is `divergence_table`'s."""
    return render(
        "verdict.html",
        summary=_summary(data, finals, judgements := judge(data, finals)),
        cards=[_card(data, finals, others, one) for one in judgements],
        divergence=None if divergence is None or divergence.empty else _divergence(data, finals, divergence),
        tricks=_tricks(data, finals, others),
        caveats=nested(caveats(data, finals)),
        finals=finals,
    )


def _summary(data: SweepData, finals: FinalValues, judgements: Sequence[Judgement]) -> dict[str, Any]:
    if data.declaration is None:
        apart = comparison(data) if data.design is None else []
        return {"declared": False, "control": data.control, "differences": nested(apart)}
    counts = {verdict: sum(judgement.verdict == verdict for judgement in judgements) for verdict in VERDICTS}
    return {
        "declared": True,
        "predictions": len(judgements),
        "counts": ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number),
        "meaning": meaning(judgements),
        "started": data.record.declared[-1]["runs_started_before"],
        "declarations": len(data.record.declared),
        "not_reported": NOT_REPORTED_MEANS if any(one.difference.not_reported for one in judgements) else "",
        "axis": finals.axis.replace("_", " "),
        "expected": data.declaration.prediction,
    }


# --- predictions --------------------------------------------------------------------------------------------


def _card(
    data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues], judgement: Judgement
) -> dict[str, Any]:
    prediction, metric = judgement.prediction, judgement.prediction.metric
    assert data.design is not None  # a judgement is of a declared prediction
    return {
        "judgement": judgement,
        "claim": claim(data, judgement),
        "metric": metric,
        "title": title(metric),
        "decides": metric == data.design.primary,
        "effect": change_text(judgement.difference, metric),
        "planned": data.seeds_planned(prediction.level, prediction.arm),
        "few": 0 < len(judgement.seeds) < FOR_INTERVAL,
        "collapsed": any(map(finals.collapsed, *zip((prediction.level, prediction.arm), judgement.reference))),
        "beside": [f"{line[0].upper()}{line[1:]}" for line in beside(data, finals, judgement)],
        "p": "" if math.isnan(judgement.p) else p_text(judgement.p),
        "holm": p_text(judgement.holm),
        "lost": judgement.p < ALPHA <= judgement.holm,
        **_on_other_axes(others, judgement),
        "no_ops": _no_ops(data, judgement),
    }


def _on_other_axes(others: Mapping[str, FinalValues], judgement: Judgement) -> dict[str, list[str]]:
    """The other budget axes on which the difference has the same sign, and those on which it flips."""
    prediction, here = judgement.prediction, judgement.difference
    same, flipped = [], []
    for axis, finals in others.items():
        own = (prediction.level, prediction.arm)
        there = finals.comparison(own, judgement.reference, prediction.metric).whole
        name = axis.replace("_", " ")
        if here.n == 0 or here.mean == 0 or there.n == 0:
            continue
        if there.mean * here.mean < 0:
            flipped.append(f"{name} ({change_text(there, prediction.metric)})")
        else:
            same.append(name)
    return {"same": same, "flipped": flipped}


def _no_ops(data: SweepData, judgement: Judgement) -> list[str]:
    """Option groups that the predicted arm sets and that changed nothing in its runs."""
    prediction = judgement.prediction
    assert data.design is not None  # a judgement is of a declared prediction
    words = [*data.design.arms[prediction.arm], *data.design.levels[prediction.level]]
    keys = {word.partition("=")[0] for word in words}
    done = data.finished[(data.finished["level"] == prediction.level) & (data.finished["arm"] == prediction.arm)]
    counts = done.explode("no_ops")["no_ops"].value_counts()
    return [f"{axis} in {number} of {len(done)} runs" for axis, number in counts.items() if axis in keys]


# --- divergence ---------------------------------------------------------------------------------------------


def _divergence(data: SweepData, finals: FinalValues, divergence: pd.DataFrame) -> dict[str, Any]:
    rows = divergence.assign(metric=divergence["metric"].str.rpartition("/")[2])
    here = rows[rows["arm"] != ""]
    known = {*here.loc[here["value"].notna(), "metric"], *list(HEADLINE)[:3]}
    shown = {name: words for name, words in HEADLINE.items() if name in known}
    by_arm = {condition: arm.set_index("metric") for condition, arm in groups_of(here, ["level", "arm"], sort=False)}
    lines = [
        [place(data, *condition), _seeds(finals, condition, arm), *(_measure(row_at(arm, name)) for name in shown)]
        for condition, arm in by_arm.items()
    ]
    caption = f"Divergence by arm; brackets: {finals.brackets}, of onsets the range with a seed left out"
    return {
        "statements": [_opened(data, by_arm), *_ranked(data, rows[rows["arm"] == ""])],
        "table": HtmlTable(caption, ["arm", "n seeds", *shown.values()], lines),
    }


def _seeds(finals: FinalValues, condition: tuple[str, str], arm: pd.DataFrame) -> str:
    collapsed = finals.stopped(*condition)
    return f"{arm['n'].max()}{f', {collapsed} collapsed left out' if collapsed else ''}"


def _measure(row: pd.Series) -> str:
    """One number of the divergence table with its interval, or the reason why there is none."""
    if math.isnan(row["value"]):
        return str(row["note"]) or "-"
    decimals = 0 if abs(row["value"]) >= 1000 else 2
    return f"{row['value']:,.{decimals}f}{bounds(row['low'], row['high'], f',.{decimals}f')}"


def _opened(data: SweepData, by_arm: Mapping[tuple[str, str], pd.DataFrame]) -> str:
    """The arms whose gap, or drop after the peak, is significantly above zero."""
    parts = []
    for name, words in _OPENED.items():
        found = {place(data, *condition): row_at(arm, name) for condition, arm in by_arm.items() if name in arm.index}
        lows = {arm: row["low"] for arm, row in found.items() if row["n"] >= FOR_INTERVAL}
        above = [arm for arm, low in lows.items() if low > 0]
        if not lows:
            parts.append(f"no arm has enough runs to test whether {words}")
        elif len(above) == len(lows):
            parts.append(f"{words} in all {len(above)} arms (95% interval above 0)")
        else:
            which = f" ({', '.join(above)})" if above else ""
            parts.append(f"{words} in {len(above)} of {len(lows)} arms{which} (95% interval above 0)")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _ranked(data: SweepData, rows: pd.DataFrame) -> list[str]:
    """The regret of choosing an arm by its training reward, a line for each level."""
    lines = []
    for level, here in rows.groupby("level", sort=False):
        named = here.set_index("metric")
        if "arm_regret" not in named.index or math.isnan(row_at(named, "arm_regret")["value"]):
            continue
        where = f" at {data.design.factor}={level}" if data.design and data.design.factor else ""
        regret, tau = row_at(named, "arm_regret"), row_at(named, "arm_tau")
        note = f" ({regret['note']})" if regret["note"] else ""
        doubt = "Not significant: " if regret["low"] < 0 < regret["high"] else ""
        lines.append(
            f"{doubt}Choosing the arm{where} by training reward instead of downstream accuracy costs "
            f"{_measure(regret)} pp{note}; rank agreement of arms, Kendall's tau {_measure(tau)}."
        )
    return lines


# --- tricks -------------------------------------------------------------------------------------------------


def _tricks(data: SweepData, finals: FinalValues, others: Mapping[str, FinalValues]) -> dict[str, Any] | None:
    """Every contrast of the design on downstream accuracy and training reward, and where the two disagree."""
    primary = [data.design.primary] if data.design else []
    metrics = [name for name in dict.fromkeys([*primary, DOWNSTREAM, CORRECTNESS]) if name in finals.values]
    effects = trick_effects(data, finals, metrics)
    if not effects:
        return None
    on_axes = {axis: AtBudget(result, trick_effects(data, result, metrics)) for axis, result in others.items()}
    on_axes[finals.axis] = AtBudget(finals, effects)
    apart = disagreements(effects)
    return {
        "table": _effects(data, finals, effects, metrics),
        "opposite": [_disagreement(data, one) for one in apart if one.significant],
        "within_noise": nested(_disagreement(data, one) for one in apart if not one.significant),
        "flips": nested(
            f"Depends on the budget axis, {title(flip.metric)}: {flip.text}." for flip in sign_flips(on_axes)
        ),
        "order": order_warning(data),
        "interaction": any(effect.contrast.kind == "interaction" for effect in effects),
    }


def _effects(data: SweepData, finals: FinalValues, effects: Sequence[TrickEffect], metrics: Sequence[str]) -> HtmlTable:
    rows: dict[tuple[str, str], dict[str, TrickEffect]] = {}
    for effect in effects:
        rows.setdefault((effect.contrast.level, effect.contrast.name), {})[effect.metric] = effect
    lines = [
        [*_named(data, by_metric), *(_effect(by_metric.get(name)) for name in metrics)] for by_metric in rows.values()
    ]
    head = ["trick", "where", "pairs", "collapsed with / without", "P(harm > 2 points)", *map(title, metrics)]
    return HtmlTable(f"Effects of tricks at {finals.at}, paired by seed", head, lines)


def _named(data: SweepData, by_metric: Mapping[str, TrickEffect]) -> list[str]:
    effect = next(iter(by_metric.values()))
    contrast = effect.contrast
    plain = contrast.kind in ("added", "left_out", "given")
    pairs = dict.fromkeys(str(one.n_pairs) for one in by_metric.values())
    harm = next((harm_text(one) for one in by_metric.values() if not math.isnan(one.harm)), "-")
    return [
        place(data, contrast.level, contrast.trick),
        contrast.context if plain else f"{contrast.kind}: {contrast.context}",
        ", ".join(pairs),
        f"{effect.collapsed_with} / {effect.collapsed_without}",
        harm,
    ]


def _effect(effect: TrickEffect | None) -> str:
    if effect is None:
        return "-"
    p = "" if math.isnan(effect.p_adjusted) else f", {p_text(effect.p_adjusted)}"
    return f"{change_text(effect.interval, effect.metric)}{p}"


def _disagreement(data: SweepData, found: Disagreement) -> str:
    """Opposite signs of training reward and downstream accuracy in one sentence."""
    reward, downstream, contrast = found.reward, found.downstream, found.reward.contrast
    up, down = ("raises", "lowers") if reward.interval.mean > 0 else ("lowers", "raises")
    adjusted = f"adjusted {p_text(reward.p_adjusted)} and {p_text(downstream.p_adjusted)}"
    return (
        f"{place(data, contrast.level, contrast.name)} {up} training reward "
        f"({change_text(reward.interval, reward.metric)}) and {down} downstream accuracy "
        f"({change_text(downstream.interval, downstream.metric)}): {adjusted if found.significant else 'within noise'}."
    )
