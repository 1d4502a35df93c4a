"""What the saved sweeps say of claims in the literature: one row for each claim that an experiment declares."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import urlsplit

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.effects.manipulation_checks import failed_checks
from grpo_lab.analysis.effects.speed import has_speed, no_headroom, speed_text
from grpo_lab.analysis.effects.verdict import (
    VERDICTS,
    Judgement,
    claim,
    count_limit,
    count_verdict,
    counted,
    judge,
    places_of,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import FEWEST_BASES
from grpo_lab.analysis.stats.multiplicity import ALPHA, p_text
from grpo_lab.config.design import Claim, Design, Direction
from pages.contrasts import (
    comparable,
    contrast_of,
    effects_of,
    same_contrasts,
    settings,
    shared_settings,
)
from pages.pooled import pool
from pages.saved_sweeps import SavedSweeps

EQUIVALENT = "equivalent within the margin"
_OPPOSITE = {"supported": "contradicted", "contradicted": "supported"}
HEAD = "| trick | claim | source | conditions | measured | effect | pooled | margin | speed | verdict | runs |"
_DEFAULT_WORLD = "world=sums"


@dataclass(frozen=True)
class Answer:
    """A claim, and what its experiment says of it; `judgement` is of the prediction that tests it.

    `judgement` is None where no run is saved, or not yet every run. `verdict` is one of VERDICTS: the judgement's, from
    the source's view.
    """

    claim: Claim
    design: Design
    judgement: Judgement | None
    speed: str = ""  # tokens to a share of the control's gain, over the control's, post hoc
    headroom: str = ""  # why the claim could not win
    pooled: str = ""  # the same contrast over all sweeps that measured it, post hoc

    @property
    def verdict(self) -> str:
        return claim_verdict(self.claim.direction, self.judgement) if self.judgement else "not run"

    @property
    def where(self) -> tuple[str, ...]:
        """All that both arms of the contrast set beside the defaults of their world, as overrides; the world first."""
        shared = {"world": _DEFAULT_WORLD} | shared_settings(self.design, *self.places)
        return tuple(sorted(shared.values(), key=lambda word: not word.startswith("world=")))

    @property
    def trick(self) -> str:
        """The first option group or number in which the arms of the contrast differ."""
        one, other = (settings(self.design, place) for place in self.places)
        keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
        return min(keys, key=lambda key: "." in key, default="").partition(".")[0]

    @property
    def places(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """The level and arm that the claim is about, and those it is compared with."""
        return places_of(self.design, self.design.predictions[self.claim.prediction])


def claim_verdict(expected: Direction, judgement: Judgement) -> str:
    """The verdict on a claim that expects this direction; `judge` says what verdicts rest on.

    An effect that is significantly smaller than the margin is equivalent within the margin, whatever its sign. A claim
    of a direction where the prediction is equivalence is supported or contradicted only by an effect significantly
    larger than the margin.
    """
    predicted, verdict = judgement.prediction.direction, judgement.verdict
    if verdict in _OPPOSITE and expected is not Direction.within and judgement.equivalent < ALPHA:
        return EQUIVALENT
    if expected is predicted or verdict not in _OPPOSITE:
        return verdict
    if predicted is Direction.within:  # contradicted, since one that is supported is equivalent
        above = judgement.comparison.sign > 0
        return "supported" if above == (expected is Direction.above) else "contradicted"
    return _OPPOSITE[verdict]


@lru_cache(maxsize=1)
def answers(saved: SavedSweeps) -> tuple[Answer, ...]:
    """Every declared claim with its answer: by trick, then by verdict in the order of VERDICTS."""
    found = []
    for design in (design for design in saved.declared if design.claims):
        if design in saved.designs and not saved.underway(design):
            data, finals = saved.load(design)
            judgements = judge(data, finals)
            found += [
                _with_outcomes(Answer(one, design, judgements[one.prediction]), data, finals, saved)
                for one in design.claims
            ]
        else:
            found += [Answer(one, design, None) for one in design.claims]
    return tuple(sorted(found, key=lambda answer: (answer.trick, VERDICTS.index(answer.verdict))))


@lru_cache(maxsize=64)
def _inert(saved: SavedSweeps, name: str) -> dict[tuple[str, str], str]:
    return failed_checks(saved.named(name)[0])


def _pooled(answer: Answer, metric: str, saved: SavedSweeps) -> str:
    """The contrast of a claim over all sweeps of comparable length where the trick acts; "" if no other has it."""
    contrast = contrast_of(answer.design, *answer.places)
    effects, sweeps = [], set[str]()
    for design in saved.designs:
        if len(design.bases) < FEWEST_BASES or design.superseded or not comparable(answer.design, design):
            continue
        if pairs := same_contrasts(design, contrast):
            _, finals = saved.load(design)
            inert = _inert(saved, design.name)
            own = effects_of(design, finals, [pair for pair in pairs if not inert.keys() & set(pair)], metric)
            effects += own
            sweeps |= {design.name} if own else set()
    if len(effects) < 2:
        return ""
    found = pool(effects)
    numbers = ((len(effects), "contrast"), (len(sweeps), "sweep"), (found.n, "environment"))
    of = ", ".join(f"{number} {what}{'s' * (number > 1)}" for number, what in numbers)
    return f"{found.text('+')} ({of}, {found.bases} base models)"


def _with_outcomes(answer: Answer, data: SweepData, finals: FinalValues, saved: SavedSweeps) -> Answer:
    """The answer with the speed of its arm, the pooled effect, and the reason where a gain was impossible."""
    prediction = answer.design.predictions[answer.claim.prediction]
    (condition, control), metric = places_of(answer.design, prediction), prediction.metric
    world = answer.where[0].partition("=")[2]
    margin = answer.design.margin_of(prediction)
    room = no_headroom(finals, control, metric, answer.claim.direction, margin, world)
    speed = speed_text(data, finals, condition, control, metric) if has_speed(metric) else ""
    return replace(answer, speed=speed, headroom=room, pooled=_pooled(answer, metric, saved))


def claims_table(found: Sequence[Answer], figures: Collection[str] = (), ceilings: Sequence[str] = ()) -> str:
    """One row per claim, as a markdown table; the verdict links to the experiment.

    The runs link to the figure of their effects, for the experiments in `figures`. `ceilings` holds for each answer the
    difference of the fitted asymptotes, "" where these are not identified.
    """
    lines = [HEAD, "|---" * 11 + "|"]
    for answer, ceiling in zip(found, ceilings or [""] * len(found), strict=True):
        design = answer.design
        prediction = design.predictions[answer.claim.prediction]
        margin = design.margin_of(prediction)
        effect, runs = "", ""
        if answer.judgement and answer.verdict not in ("not run", "manipulation check failed"):
            effect, runs = answer.judgement.difference.text("+"), answer.judgement.difference.runs()
        verdict = f"[{answer.verdict}]({design.name}/README.md)" + (f"; {answer.headroom}" if answer.headroom else "")
        shown = answer.verdict not in ("not run", "manipulation check failed")
        figure = (
            f" [figure]({design.name}/figures/{design.name}_effects.png)" if shown and design.name in figures else ""
        )
        cells = (
            f"`{answer.trick}`",
            answer.claim.says,
            linked(answer.claim.source),
            " ".join(f"`{word}`" for word in answer.where),
            metric_text(prediction.metric),
            effect,
            answer.pooled if shown else "",
            "-" if margin is None else f"{margin:g}",
            "; ".join(filter(None, (answer.speed, ceiling))) if shown else "",
            verdict,
            f"{runs}{figure}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def linked(source: str) -> str:
    """A source as a link: a paper by its arXiv id, an address by its host; others are names."""
    if source.startswith("arXiv:"):
        return f"[{source.removeprefix('arXiv:')}](https://arxiv.org/abs/{source.removeprefix('arXiv:')})"
    return f"[{urlsplit(source).hostname}]({source})" if source.startswith("https://") else source


def predictions_head(name: str) -> str:
    """How the table of an experiment's predictions begins, on a page that has one."""
    return f"| predictions of {name} |"


def predictions_table(data: SweepData, finals: FinalValues) -> str:
    """One row per prediction, as a markdown table: the difference, also by base model, p, and the verdict.

    Predictions of a number of base models follow, with that number and its exact interval as a share.

    p is after Holm's correction, of what the verdict rests on: of an effect as large as the margin for predictions
    within one and for effects within one, of no effect for all others.
    """
    assert data.design is not None, "only a declared sweep has predictions"
    lines = [
        f"{predictions_head(data.design.name)} measured | difference | by base model | p | verdict |",
        "|---" * 6 + "|",
    ]
    for judgement in judge(data, finals):
        prediction, difference = judgement.prediction, judgement.difference
        within = prediction.direction is Direction.within and judgement.verdict != "contradicted"
        within |= judgement.verdict == "equivalent within the margin"
        p = judgement.equivalent if within else judgement.holm
        judged = judgement.verdict not in ("not run", "manipulation check failed")
        shown = p_text(p).removeprefix("p ").removeprefix("= ") + (" (equivalence)" if within else "")
        cells = (
            claim(data, judgement),
            metric_text(prediction.metric),
            difference.text("+") if judged else "",
            ", ".join(f"{value:+.3f}" for value in judgement.comparison.observed) if judged else "",
            shown if judged and not math.isnan(p) else "",
            judgement.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    for count in data.design.counts:
        found, unit = counted(finals, count), "base models" if finals.bases else "runs"
        what = f"{place(data, count.level, count.arm)} in {count_limit(count)} {unit}"
        measured = f"{metric_text(count.metric)} above {count.above:g}"
        verdict = count_verdict(data, finals, count)
        lines.append(f"| {what} | {measured} | {found.text if found.of else ''} |  |  | {verdict} |")
    return "\n".join(lines)


def claims_text(found: Sequence[Answer]) -> str:
    """The answers for a terminal: verdict, claim and source, and below them effect and world."""
    lines = []
    for answer in found:
        prediction = answer.design.predictions[answer.claim.prediction]
        lines.append(f"{answer.verdict}: {answer.claim.says} ({answer.claim.source})")
        if answer.judgement and answer.verdict not in ("not run", "manipulation check failed"):
            effect = f"{answer.judgement.difference.text('+')}, {answer.judgement.difference.runs()}"
            lines.append(f"  {metric_text(prediction.metric)} {effect}, {' '.join(answer.where)}, {answer.design.name}")
    return "\n".join(lines)
