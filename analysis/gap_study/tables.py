"""The tables of this study: when training reward misled, over all sweeps that test claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from gap_study.across import (
    GROUPS,
    POOLED_INDICATORS,
    RULES,
    Contrast,
    Counted,
    Pool,
    announcements,
    costs,
    counted,
    misled,
    opposite_adjusted,
    regret_saved,
    regrets,
    spent_after,
    wide_gaps,
    with_gap,
)
from grpo_lab.analysis.metric_names import change_text
from grpo_lab.analysis.stats.intervals import Interval, bounds

_SIGN = {1: "up", 0: "not significant", -1: "down"}


def signs_table(pooled: Pool) -> pd.DataFrame:
    """How many comparable contrasts have which sure sign on training reward (rows) and on downstream accuracy."""
    signs = [contrast.signs for contrast in pooled.comparable]
    rows = []
    for reward, meaning in _SIGN.items():
        counts = {f"downstream {word}": signs.count((reward, downstream)) for downstream, word in _SIGN.items()}
        rows.append({"training reward": meaning, **counts})
    return pd.DataFrame(rows)


def contrasts_table(pooled: Pool, apart: bool) -> pd.DataFrame:
    """The contrasts that are kept apart, or those that are not and in which something is resolved; in points."""
    chosen = [contrast for contrast in pooled.contrasts if bool(contrast.apart) == apart]
    rows = []
    for contrast, p in zip(chosen, opposite_adjusted(chosen)):
        if apart or any(contrast.signs):
            rows.append(_effects(contrast) | {"p opposite, Holm": p} | ({"apart for": contrast.apart} if apart else {}))
    return pd.DataFrame(rows)


def _effects(contrast: Contrast) -> dict[str, object]:
    found = {"training reward": contrast.reward, "held-out": contrast.heldout, "downstream": contrast.downstream}
    changes = {name: change_text(one.whole, "reward/outcome") for name, one in found.items()}
    return {"contrast": contrast.name, **changes, "both": contrast.kind}


def runs_table(pooled: Pool) -> pd.DataFrame:
    """By group of runs: reward up by 5 points while downstream falls by 10, and gaps above the bound of the null."""
    rows = []
    compared, wide = wide_gaps(pooled.runs)
    for group in GROUPS:
        own = with_gap(run for run in pooled.runs if run.group == group)
        fell = counted(own, [misled(run.track) for run in own])
        places = [place for place, run in enumerate(compared) if run.group == group]
        above = counted([compared[place] for place in places], [wide[place] for place in places])
        rows.append(
            {"runs": group, "reward up, downstream down": _counted(fell), "gap above the null": _counted(above)}
        )
    return pd.DataFrame(rows)


def misled_where(pooled: Pool) -> pd.DataFrame:
    """In which conditions runs were misled: how many of the controls, and of all others."""
    rows = []
    for where, title in pooled.titles.items():
        here = with_gap(run for run in pooled.runs if run.track.level == where)
        parts = {"controls": [run for run in here if run.null], "others": [run for run in here if not run.null]}
        counts = {name: sum(misled(run.track) for run in own) for name, own in parts.items()}
        if any(counts.values()):
            rows.append({"conditions": title, **{name: f"{counts[name]} of {len(own)}" for name, own in parts.items()}})
    return pd.DataFrame(rows)


def indicators_table(pooled: Pool) -> pd.DataFrame:
    """Area, alarms, lead and false alarms of every indicator."""
    rows = []
    for name, found in announcements(pooled).items():
        rows.append(
            {
                "indicator": POOLED_INDICATORS[name].description,
                "area": found.auc.text(),
                "within a base": found.within.text(),
                "losses with an alarm": _counted(found.caught),
                "median lead, share of X": found.lead,
                "false alarms": _counted(found.false),
                "sweeps": len(found.sweeps),
            }
        )
    return pd.DataFrame(rows)


def regrets_table(pooled: Pool) -> pd.DataFrame:
    """Points given away by every rule, over all runs, by group, and by conditions."""
    parts = {"all runs": list(pooled.runs)}
    parts |= {group: [run for run in pooled.runs if run.group == group] for group in GROUPS}
    parts |= {title: [run for run in pooled.runs if run.track.level == at] for at, title in pooled.titles.items()}
    rows = []
    for name, own in parts.items():
        if own:
            by_rule = {rule.replace("_", " "): _text(regrets(own, rule)) for rule in RULES}
            saved = _text(regret_saved(own, "heldout", "last"))
            rows.append({"runs": name, "n": len(own), **by_rule, "held-out instead of last saves": saved})
    return pd.DataFrame(rows)


def costs_table(pooled: Pool) -> pd.DataFrame:
    """Tokens per point, in thousands, of every condition and group of runs."""
    rows = []
    for one in costs(pooled):
        rows.append(
            {
                "conditions": one.title,
                "runs": one.group,
                "n": one.gain.n,
                "gain, points": _text(one.gain),
                "thousand tokens a point": _cost(one.cost),
                "to the best checkpoint": _cost(one.best_cost),
                "share of budget after it": _text(one.after.within(0.0, 1.0), 2),
            }
        )
    return pd.DataFrame(rows)


def stated(pooled: Pool) -> Mapping[str, Interval | float]:
    """The numbers of this study that pages state, by name.

    `signs 1,-1` counts comparable contrasts by their signs on reward and downstream accuracy, `withheld` those of 0,0
    with an interval that is not reported; `holm sweep arm` is p of opposite effects. The number of a group is its place
    in GROUPS: `of 0` counts its runs, `misled 0` and `misled 0 sweep` those with reward up and downstream down. Of an
    indicator there are the area, the losses, those caught, the null runs, false alarms, and losses at_once, before any
    reading. Regrets are in points, `after` is the share of the budget after the best checkpoint, `cost least` and
    `cost most` are in thousands of tokens for a point.
    """
    comparable = pooled.comparable
    numbers: dict[str, Interval | float] = {"sweeps": len(pooled.sweeps), "runs": len(pooled.runs)}
    numbers |= {"bases": len(set(pooled.units)), "contrasts": len(comparable)}
    numbers["apart"] = len(pooled.contrasts) - len(comparable)
    signs = [one.signs for one in comparable]
    numbers |= {f"signs {one},{other}": signs.count((one, other)) for one, other in itertools.product(_SIGN, repeat=2)}
    open_ones = [one for one in comparable if not any(one.signs)]
    numbers["withheld"] = sum(bool(one.reward.whole.why or one.downstream.whole.why) for one in open_ones)
    adjusted = zip(comparable, opposite_adjusted(comparable))
    numbers |= {f"holm {one.sweep} {one.arm}": float(p) for one, p in adjusted}
    for place, group in enumerate(GROUPS):
        own = with_gap(run for run in pooled.runs if run.group == group)
        lost = [run.sweep for run in own if misled(run.track)]
        numbers |= {f"of {place}": len(own), f"misled {place}": len(lost)}
        numbers |= {f"misled {place} {sweep}": lost.count(sweep) for sweep in pooled.sweeps}
    for name, one in announcements(pooled).items():
        found = {"area": one.auc, "losses": one.caught.runs.n, "caught": one.caught.runs.number}
        found |= {"null": one.false.runs.n, "false": one.false.runs.number, "at_once": one.at_once}
        numbers |= {f"{what} {name}": value for what, value in found.items()}
    numbers |= {f"regret {rule}": regrets(pooled.runs, rule) for rule in RULES}
    numbers["after"] = spent_after(pooled.runs)
    numbers["saved"] = regret_saved(pooled.runs, "heldout", "last")
    numbers["saved 0"] = regret_saved([run for run in pooled.runs if run.group == GROUPS[0]], "heldout", "last")
    prices = [one.cost.mean / 1000 for one in costs(pooled) if one.group == GROUPS[0]]
    known = [price for price in prices if not math.isnan(price)]
    return numbers | {"costs": len(prices), "priced": len(known), "cost least": min(known), "cost most": max(known)}


def _counted(found: Counted) -> str:
    share = found.runs.interval
    both = bounds(share.low, share.high, ".1%")
    return f"{found.runs.number} of {found.runs.n}{both}, on {found.bases.number} of {found.bases.n} bases"


def _cost(found: Interval) -> str:
    if math.isnan(found.mean):
        return "gain not surely above 0"
    return _text(found.scaled(1e-3))


def _text(found: Interval, decimals: int = 1) -> str:
    if math.isnan(found.mean):
        return ""
    return replace(found, why="").written(f"{{:.{decimals}f}}".format)
