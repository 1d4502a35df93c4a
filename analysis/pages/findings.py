"""The findings table of README.md: six results, each computed from the saved data when the page is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_lab.analysis.divergence.quantities import judge_quantities
from grpo_lab.analysis.divergence.reward_ranks import ranked_levels
from grpo_lab.analysis.effects.speed import token_ratio
from grpo_lab.analysis.effects.verdict import Judgement, counted, judge
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.config.design import SHARE, Direction
from pages.saved_sweeps import SavedSweeps

FINDINGS_HEAD = "| finding | bears on | effect [95% CI] | environment | verdict on our prediction | runs |"
HELDOUT = "eval/heldout/accuracy"


@dataclass(frozen=True)
class Measured:
    """What the data of a sweep say: the effect in words, and the verdict."""

    effect: str
    verdict: str


@dataclass(frozen=True)
class Finding:
    """A row of the table; `measure` reads its numbers off the saved data of `sweep`."""

    text: str
    source: str
    where: str
    sweep: str
    measure: Callable[[SweepData, FinalValues], Measured]


def _n(interval: Interval) -> str:
    """The number of runs behind an interval, and of base models where these are fewer."""
    fewer = 1 < interval.bases < interval.n
    return f"; n = {interval.n}{f' on {interval.bases} base models' if fewer else ''}"


def _word(judgement: Judgement) -> str:
    if judgement.prediction.direction is Direction.within and judgement.verdict == "not significant":
        return "equivalence not shown"
    return judgement.verdict


def _same_reward(data: SweepData, finals: FinalValues) -> Measured:
    judged = {(one.prediction.arm, one.prediction.metric): one for one in judge(data, finals)}
    truth = judged["soft_overlong", f"log_odds/{HELDOUT}"]
    reward = judged["soft_overlong", "reward/outcome"]
    assert data.design is not None, "a declared sweep"
    fell, kept = (counted(finals, one) for one in data.design.counts)
    planned = len(data.design.bases)
    so_far = "" if fell.of == planned else f" (so far {fell.of} of {planned} base models)"
    ends = [finals.interval("", arm, HELDOUT).mean for arm in ("plain", "soft_overlong")]
    effect = (
        "accuracy ends at {:.2f} without and {:.2f} with the penalty".format(*ends)
        + f" ({truth.difference.text('+')} log-odds); it fell on {fell.number} and {kept.number} of {fell.of} base "
        f"models; training reward {reward.difference.text('+')}"
    )
    return Measured(effect, f"{_word(truth)}{so_far}; equal reward: {reward.verdict}")


def _sharpness(data: SweepData, finals: FinalValues) -> Measured:
    judged = judge_quantities(data, finals)
    shares = {one.prediction.level: one.measured for one in judged if one.prediction.quantity == SHARE}
    sentences = []
    for level, ranked in ranked_levels(data, finals).items():
        entropy, accuracy = (ranked.correlations[of].within(-1.0, 1.0).text("+") for of in ("train/entropy", HELDOUT))
        words = ("rank correlation with entropy ", "with accuracy ", "temperature gives ", " of the gain")
        first, second, gives, gain = ("", "", "", "") if sentences else words
        sentences.append(f"`{level}`: {first}{entropy}, {second}{accuracy}; {gives}{shares[level].text()}{gain}")
    supported = sum(one.verdict == "supported" for one in judged)
    return Measured(". ".join(sentences), f"{supported} of {len(judged)} predictions supported")


def _tight_penalty(data: SweepData, finals: FinalValues) -> Measured:
    lost, seen = (finals.difference("tight", "soft_overlong", "score", one).text("+") for one in (DOWNSTREAM, HELDOUT))
    judged = judge(data, finals)[0]
    return Measured(f"downstream {lost}, held-out {seen}{_n(judged.difference)}", _word(judged))


def _masked_before(data: SweepData, finals: FinalValues) -> Measured:
    judged = judge(data, finals)[1]
    return Measured(f"truncated share {judged.difference.text('+')}{_n(judged.difference)}", _word(judged))


def _dynamic_sampling(data: SweepData, finals: FinalValues) -> Measured:
    judged = {one.prediction.metric: one for one in judge(data, finals) if one.prediction.arm == "resample"}
    slower, lower = judged[f"tokens_to_half/{HELDOUT}"], judged[HELDOUT]
    ratio = [2**value for value in (slower.difference.mean, slower.difference.low, slower.difference.high)]
    effect = "{:.2f} [{:.2f}, {:.2f}] times the tokens to half of the control's gain".format(*ratio)
    why = token_ratio(data, finals, ("", "resample"), ("", data.control), HELDOUT, 0.5).why
    effect += f" ({why}: a lower bound)" if why else ""
    words = sorted({_word(one) for one in (slower, lower)})
    return Measured(f"{effect}; held-out {lower.difference.text('+')}{_n(lower.difference)}", " and ".join(words))


def _fine_tuning(data: SweepData, finals: FinalValues) -> Measured:
    judged = next(one for one in judge(data, finals) if one.prediction.arm == "rejection_sampling"
                  and one.prediction.metric == DOWNSTREAM and one.prediction.level == "length")  # fmt: skip
    effect = f"downstream {judged.difference.text('+')}{_n(judged.difference)}"
    return Measured(effect, _word(judged))


FINDINGS = (
    Finding(
        "When the training grader can be gamed, strict accuracy falls to near zero; a soft length penalty prevents "
        "most of it, while training reward differs little",
        "[2503.14476](https://arxiv.org/abs/2503.14476)",
        "`guessable`, lenient grader",
        "same_reward",
        _same_reward,
    ),
    Finding(
        "Training reward ranks recipes by low entropy, and by held-out accuracy in `search` only. In `sums`, lowering "
        "the base model's temperature gives most of the reward gain",
        "-",
        "`sums`, `search`",
        "sharpness",
        _sharpness,
    ),
    Finding(
        "When half of the questions need more tokens than the limit, a soft length penalty ruins downstream accuracy "
        "and held-out accuracy does not show it",
        "[2503.14476](https://arxiv.org/abs/2503.14476)",
        "`length`, 28 tokens",
        "interruption_budgets",
        _tight_penalty,
    ),
    Finding(
        "Masking truncated responses before the group statistics raises truncation",
        "[2505.22312](https://arxiv.org/abs/2505.22312)",
        "`length`",
        "overlong_worlds",
        _masked_before,
    ),
    Finding(
        "At equal sampled tokens, dynamic sampling learns half as fast and ends lower",
        "[2503.14476](https://arxiv.org/abs/2503.14476)",
        "`search`",
        "filter_speed",
        _dynamic_sampling,
    ),
    Finding(
        "RL after fine-tuning on the base model's own right answers ends within 0.05 of RL without it",
        "[2501.12948](https://arxiv.org/abs/2501.12948)",
        "`length`",
        "warm_start",
        _fine_tuning,
    ),
)


def findings_table(saved: SavedSweeps) -> str:
    """The table as markdown; a finding without saved data has no row."""
    lines = [FINDINGS_HEAD, "|---" * 6 + "|"]
    names = {design.name for design in saved.designs}
    for one in (one for one in FINDINGS if one.sweep in names):
        found = one.measure(*saved.named(one.sweep))
        link = f"[{one.sweep}](experiments/{one.sweep}/README.md)"
        lines.append(f"| {one.text} | {one.source} | {found.effect} | {one.where} | {found.verdict} | {link} |")
    return "\n".join(lines)
