"""Evaluation: four suites and further ones; two have the training protocol, all others their own. Answers are saved.

    probe              training problems, training protocol (has it learned what it trains on?)
    heldout_training   held-out problems, training protocol and training verifier
    heldout            the same held-out problems, evaluation protocol and independent verifier
    downstream         harder problems and a larger budget, evaluation protocol

Neighbours in this list differ in one thing each: the questions; the protocol and verifier; the difficulty and
budget. So training reward minus downstream accuracy can be split into its causes. Further suites differ from one of
the four in one thing, and are asked at the ends of a run:

    downstream_short   the downstream problems, training budget
    other_wording      held-out problems, worded otherwise
    heldout_rule       problems held out by a rule and not at random
    other_numbers      numbers outside the training range, and the long budget, since they take more tokens to write
    other_family       problems of the family not trained on, long budget
    heldout_greedy     held-out problems, greedy

and one more for each table of `evaluation.tables`, with the long budget.

Where the sampler lags behind the learner, `sampler_heldout` and `sampler_downstream` ask the weights that sampled the
step's batch: training reward is theirs, and not that of the weights that the other suites ask.

`evaluation.sharpened` adds, at step 0, suites that differ from `heldout_training` in their temperature: `sharpened_60`
at 0.6 of training's. Their accuracy against their entropy is what a policy gains by sharpening only.

A question's noise does not depend on the step, the arm or the protocol. The same question uses the same random
numbers at every checkpoint and in every suite of its split, which removes most sampling noise from differences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np
import pandas as pd
import torch
import transformers

from grpo_lab.config.evaluation import SPLITS, Evaluation
from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.base import EngineSession
from grpo_lab.rollout.grading import (
    decode,
    encode_prompts,
    grade,
    group_requests,
    to_rollouts,
    tools_for,
    with_target_length,
)
from grpo_lab.tasks.base import Grader, Task, Template
from grpo_lab.tracking.activity import doing
from grpo_lab.tracking.metrics import SAMPLER_SUITES, SHARPENED, pass_at_k
from grpo_lab.tricks.reward_shaping import RewardShaping
from grpo_lab.tricks.truncation import Score, Truncation, generate_each
from grpo_lab.types import Float, NoiseKey, Problem, Request, Rollouts, SamplingParams, Tensor


@dataclass(frozen=True)
class Suite:
    """One set of evaluation questions, with how answers are sampled and who grades them."""

    name: str
    split: str
    problems: tuple[Problem, ...]
    samples: int
    params: SamplingParams
    verifier: Grader
    truncation: Truncation = field(default_factory=Score)  # the run's, under the training protocol
    measures_kl: bool = False  # whether it samples from the policy itself, with the training protocol


def make_suites(run: RunConfig, ends: bool = True) -> list[Suite]:
    """The suites of a run: those of its ends, which are the larger ones, or those between.

    Raises ValueError if the task lacks a split or a split has fewer problems than evaluation needs. Probe and held-out
    questions keep the training split's mix of difficulties. With another mix, training reward and accuracy would
    differ for a reason that is not the policy's.
    """
    plan = run.evaluation
    samples = plan.ends_samples if ends else plan.samples
    mix = _mix(run.task.problems("train"))
    pose = partial(_posed, run.task, run.template, run.reward_shaping, run.seed)
    probe, heldout, downstream = (
        _main_split(plan, split, pose(split), ends, mix, run.task.exact_sizes)
        for split in ("probe", "heldout", "downstream")
    )
    training = run.engine.params
    protocol = SamplingParams(plan.max_tokens, plan.temperature, plan.top_p)
    long = replace(protocol, max_tokens=plan.downstream_max_tokens)
    suites = [
        Suite("probe", "probe", probe, samples, training, run.reward, run.truncation),
        Suite("heldout_training", "heldout", heldout, samples, training, run.reward, run.truncation, measures_kl=True),
        Suite("heldout", "heldout", heldout, samples, protocol, run.verifier),
        Suite("downstream", "downstream", downstream, samples, long, run.verifier),
    ]
    for name in plan.suites if ends else ():
        split = SPLITS.get(name, name)
        own = None if split in ("downstream", "other_family") else mix
        problems = _some(
            split, pose(split), plan.suite_problems, own, run.task.exact_sizes, "evaluation.suite_problems"
        )
        if name == "other_wording":
            problems = tuple(replace(one, question=plan.in_other_words(one.question)) for one in problems)
        params = long if name in ("other_numbers", "other_family") else protocol
        params = replace(params, temperature=0.0) if name == "heldout_greedy" else params
        suites.append(Suite(name, split, problems, samples, params, run.verifier))
    for name, problems in plan.table_problems.items() if ends else ():
        suites.append(Suite(name, name, problems, samples, long, run.verifier))
    return suites


def sharpened(suites: Sequence[Suite], shares: Sequence[float]) -> list[Suite]:
    """The suite `heldout_training` among `suites` at each of these shares of its temperature."""
    return [
        replace(
            suite, name=f"{SHARPENED}{round(100 * share)}", measures_kl=False,
            params=replace(suite.params, temperature=share * suite.params.temperature),
        )
        for suite in suites if suite.name == "heldout_training" for share in shares
    ]  # fmt: skip


def of_the_sampler(suites: Sequence[Suite]) -> list[Suite]:
    """The suites among `suites` that are asked the weights that sampled a batch, under the names they have then."""
    named = [replace(suite, name=f"sampler_{suite.name}") for suite in suites]
    return [suite for suite in named if suite.name in SAMPLER_SUITES]


def _main_split(
    plan: Evaluation, split: str, problems: Sequence[Problem], ends: bool, mix: Counter[int], exact: bool
) -> tuple[Problem, ...]:
    """The problems of one of the three main splits; those between the ends are some of those there."""
    own = None if split == "downstream" or len(mix) == 1 else mix
    key = f"ends_{split}_problems"
    chosen = _some(split, problems, getattr(plan, key), own, exact, f"evaluation.{key}")
    between = min(len(chosen), getattr(plan, f"{split}_problems"))
    return chosen if ends else with_mix(chosen, between, own or _mix(chosen))


def _mix(problems: Sequence[Problem]) -> Counter[int]:
    return Counter(problem.difficulty for problem in problems)


def _posed(task: Task, template: Template, shaping: RewardShaping, seed: int, split: str) -> list[Problem]:
    """The problems of a split, each with its target length if the reward shaping draws one."""
    return [
        with_target_length(shaping, template, problem, NoiseKey(seed, f"eval/{split}", 0, problem.id, 0))
        for problem in task.problems(split)
    ]


def _some(
    split: str, problems: Sequence[Problem], number: int, mix: Counter[int] | None, exact: bool, key: str
) -> tuple[Problem, ...]:
    """`number` of the problems, or all if there are fewer and `exact` is False. `key` is the setting of the number."""
    if not exact:
        number = min(number, len(problems))
    if len(problems) < number:
        raise ValueError(
            f"evaluation asks for {number} problems of split {split!r}, which has {len(problems)}: "
            f"lower {key} or enlarge the task"
        )
    return with_mix(problems, number, mix or _mix(problems))


def with_mix(problems: Sequence[Problem], number: int, mix: Counter[int]) -> tuple[Problem, ...]:
    """Choose `number` problems with difficulties in the proportions of `mix`, keeping the given order.

    Counts are rounded by largest remainder, so each difficulty is off by less than one problem. If a difficulty
    has too few problems, the first unused problems fill the gap.
    """
    exact = {level: number * count / mix.total() for level, count in sorted(mix.items())}
    counts = Counter({level: math.floor(share) for level, share in exact.items()})
    by_remainder = sorted(exact, key=lambda level: counts[level] - exact[level])
    counts.update(by_remainder[: number - counts.total()])
    chosen = set()
    for index, problem in enumerate(problems):
        if counts[problem.difficulty] > 0:
            counts[problem.difficulty] -= 1
            chosen.add(index)
    left = (index for index in range(len(problems)) if index not in chosen)
    chosen.update(islice(left, number - len(chosen)))
    return tuple(problems[index] for index in sorted(chosen))


# Log-probs of the sampled tokens [N, T] under the initial policy.
InitialLogprobs = Callable[[Rollouts], Float[Tensor, "N T"]]


def evaluate(
    suites: Sequence[Suite],
    session: EngineSession,
    tokenizer: transformers.PreTrainedTokenizerBase,
    template: Template,
    plan: Evaluation,
    seed: int,
    initial: InitialLogprobs | None = None,
    reward: Grader | None = None,
    verifier: Grader | None = None,
) -> tuple[dict[str, float], pd.DataFrame]:
    """Metrics of every suite, and one table row per suite, question and sample.

    `reward` is the training verifier: it judges the answers of other verifiers' suites too, for the log only. So does
    `verifier`, the one of evaluation, with held-out answers under the training protocol.
    """
    tables, metrics = [], {}
    for suite, rollouts, keys in _answers(suites, session, tokenizer, template, seed):
        with doing(suite.name):
            table = _graded(suite, rollouts, keys, tokenizer)
        if table["outcome"].isna().all():
            raise ValueError(
                f"the grader failed on all {len(table)} answers of the suite {suite.name}: see that it can read right "
                f"answers such as {suite.problems[0].answer[:60]!r}, or choose another verifier, or another reward"
            )
        metrics.update(_summary(suite.name, table, plan.pass_at))
        if suite.verifier.may_fail:
            metrics[f"eval/{suite.name}/ungraded"] = float(table["outcome"].isna().mean())
        if reward is not None and suite.verifier is not reward:
            with doing(f"{suite.name}, by the training reward"):
                agreement = _agreement(rollouts, keys, table, reward)
            metrics |= {} if math.isnan(agreement) else {f"eval/{suite.name}/agreement": agreement}
        if (suite.measures_kl or suite.name.startswith(SHARPENED)) and suite.params.top_p == 1:
            metrics[f"eval/{suite.name}/entropy"] = entropy_of_responses(rollouts)
        if suite.measures_kl and verifier is not None and suite.verifier is not verifier:
            with doing(f"{suite.name}, by the verifier of evaluation"):
                verified = _accuracy(_judged(rollouts, keys, table, verifier), table["problem_id"])
            metrics |= {} if math.isnan(verified) else {f"eval/{suite.name}/verified_accuracy": verified}
        if suite.measures_kl and initial is not None:
            with doing(f"{suite.name}, KL from the initial policy"):
                metrics[f"eval/{suite.name}/kl_initial"] = kl_of_responses(rollouts, initial(rollouts))
        tables.append(table)
    return metrics, pd.concat(tables, ignore_index=True)


def _answers(
    suites: Sequence[Suite],
    session: EngineSession,
    tokenizer: transformers.PreTrainedTokenizerBase,
    template: Template,
    seed: int,
) -> Iterator[tuple[Suite, Rollouts, list[NoiseKey]]]:
    """Sample all suites in one call; yield each suite with its rollouts and the noise key of each response."""
    prompts = [encode_prompts(tokenizer, template, suite.problems) for suite in suites]
    requests: list[Request] = []
    for suite, each in zip(suites, prompts):
        stream = f"eval/{suite.split}"
        requests += group_requests(suite.problems, each, suite.samples, suite.params, seed, stream, 0)
    ways = [suite.truncation for suite in suites for _ in range(suite.samples * len(suite.problems))]
    parts = [(one.name, problem.id) for one in suites for problem in one.problems for _ in range(one.samples)]
    with doing("", parts=parts):
        completions = generate_each(ways, session, requests, tools_for(tokenizer))
    left = iter(zip(requests, completions))
    for suite, each in zip(suites, prompts):
        part = list(islice(left, suite.samples * len(suite.problems)))
        own = [completion for _, completion in part]
        yield suite, to_rollouts(suite.problems, each, suite.samples, own), [one.noise for one, _ in part]


def _graded(
    suite: Suite, rollouts: Rollouts, keys: Sequence[NoiseKey], tokenizer: transformers.PreTrainedTokenizerBase
) -> pd.DataFrame:
    """One row per question and sample: the graded answer."""
    samples, texts = suite.samples, decode(tokenizer, rollouts)
    graded = grade(rollouts, texts, suite.verifier, keys)
    problems = [problem for problem in suite.problems for _ in range(samples)]
    table = pd.DataFrame(
        {
            "suite": suite.name,
            "problem_id": [problem.id for problem in problems],
            "difficulty": [problem.difficulty for problem in problems],
            "sample": list(range(samples)) * len(suite.problems),
            "outcome": graded.verdict.flatten().numpy(),
            "length": graded.lengths.flatten().numpy(),
            "truncated": graded.truncated.flatten().numpy(),
            "wanted": [problem.target_length or 0 for problem in problems],
            "question": [problem.question for problem in problems],
            "answer": [problem.answer for problem in problems],
            "text": texts,
        }
    )
    if any(problem.source for problem in suite.problems):
        table["source"] = [problem.source for problem in problems]
    return table


def _judged(rollouts: Rollouts, keys: Sequence[NoiseKey], table: pd.DataFrame, grader: Grader) -> np.ndarray:
    """Another grader's result for each answer of the table: 0, 1 or NaN."""
    return grade(rollouts, table["text"].tolist(), grader, keys).verdict.flatten().numpy()


def _accuracy(correctness: np.ndarray | pd.Series, questions: pd.Series) -> float:
    """The mean over questions of the mean of their graded answers; NaN without any."""
    return float(pd.Series(np.asarray(correctness)).groupby(questions.to_numpy(), sort=False).mean().mean())


def _agreement(rollouts: Rollouts, keys: Sequence[NoiseKey], table: pd.DataFrame, reward: Grader) -> float:
    """The share of answers that `reward` judges as the table does, of those that both judge; NaN without any."""
    other = _judged(rollouts, keys, table, reward)
    both = ~np.isnan(other) & table["outcome"].notna().to_numpy()
    return float((other == table["outcome"])[both].mean()) if both.any() else math.nan


def kl_of_responses(rollouts: Rollouts, initial_logprobs: Float[Tensor, "N T"]) -> float:
    """KL(policy || initial policy) in nats per response: the mean over responses of log pi - log pi_0.

    Unbiased for responses sampled from the full softmax (top_p 1). The estimate may be slightly negative while the
    two policies are close. For a truncated response it is the divergence up to the truncation.
    """
    each = torch.where(rollouts.sampled_mask, rollouts.sampler_logprobs - initial_logprobs, 0.0)
    return float(each.double().sum(dim=1).mean())


def entropy_of_responses(rollouts: Rollouts) -> float:
    """The entropy of the policy in nats per token: the mean of -log pi over its own tokens, sampled without top-p."""
    return float(-rollouts.sampler_logprobs[rollouts.sampled_mask].double().mean())


def _summary(suite: str, table: pd.DataFrame, ks: Sequence[int]) -> Mapping[str, float]:
    by_question = table.groupby("problem_id", sort=False)["outcome"]
    means, right, drawn = by_question.mean(), by_question.sum(), by_question.count()  # of graded answers
    metrics = {
        f"eval/{suite}/accuracy": float(means.mean()),
        f"eval/{suite}/responses": len(table),
        f"eval/{suite}/length": float(table["length"].mean()),
        f"eval/{suite}/truncated": float(table["truncated"].mean()),
    }
    if len(means) > 1:
        metrics[f"eval/{suite}/accuracy_se"] = float(means.std(ddof=1) / math.sqrt(len(means)))
    levels = table.groupby("difficulty")["outcome"].mean()  # in the order of the labels
    if len(levels) > 1:
        metrics[f"eval/{suite}/accuracy_easiest"] = float(levels.iloc[0])
        metrics[f"eval/{suite}/accuracy_hardest"] = float(levels.iloc[-1])
    if "source" in table:
        for source, rows in table.groupby("source"):
            metrics[f"eval/{suite}/source/{source}"] = float(rows.groupby("problem_id")["outcome"].mean().mean())
    for k in (k for k in ks if k <= drawn.max()):
        chances = [pass_at_k(int(n), int(c), k) for n, c in zip(drawn, right) if k <= n]
        metrics[f"eval/{suite}/pass_at_{k}"] = sum(chances) / len(chances)
    return metrics
