"""How often the base model answers training problems right: measured once, kept on disk, and paid for by every run.

A folder of the cache holds one protocol: weights, tokenizer, sampling settings, truncation, verifier, seed and device.
Its tables hold a row for each problem. Problems are measured in parts, and what an interrupted command measured stays.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.budget.cost_model import CostModel
from grpo_lab.config.stages import SamplingSettings
from grpo_lab.engines.base import EngineSession
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.rollout.grading import decode, encode_prompts, group_requests, to_rollouts, token_ids, tools_for
from grpo_lab.tasks.base import Grader
from grpo_lab.tasks.cache import cache_root
from grpo_lab.tasks.weighted import Weighted
from grpo_lab.tracking.activity import doing
from grpo_lab.tracking.files import atomic_write, locked, write_json
from grpo_lab.tricks.pass_rate import Measured
from grpo_lab.types import Completion, Problem, SamplingParams

CODE_VERSION = 1  # part of a protocol: raise it when this module's code changes what is measured
_CALLS = 4  # times the engine's rows that one part samples, so that rows which end early make room for others
_COLUMNS = ("digest", "problem_id", "question", "right", "graded", "prompt_tokens", "lengths", "injected", "seconds")


@dataclass(frozen=True)
class Base:
    """The model that is asked: its folder, the fingerprint of its weights, its tokenizer, and where it computes."""

    folder: Path
    weights: str
    tokenizer: PreTrainedTokenizerBase
    device: torch.device

    @classmethod
    def of(cls, folder: Path, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Base:
        return cls(folder, fingerprint(folder), tokenizer, device)


@dataclass(frozen=True)
class ResponseKind:
    """What each problem is asked: whole answers as in training, or guesses, which begin with `phrase`.

    `params.max_tokens` counts the phrase too.
    """

    kind: str  # answers or guesses
    samples: int
    params: SamplingParams
    phrase: tuple[int, ...] = ()

    @classmethod
    def answers(cls, sampling: SamplingSettings, plan: Measured) -> ResponseKind:
        return cls("answers", plan.samples, sampling.engine.params)

    @classmethod
    def guesses(cls, sampling: SamplingSettings, plan: Measured, tokenizer: PreTrainedTokenizerBase) -> ResponseKind:
        (phrase,) = token_ids(tokenizer, [sampling.template.interruption])
        params = replace(sampling.engine.params, max_tokens=len(phrase) + plan.guess_tokens)
        return cls("guesses", plan.tries, params, phrase)


@dataclass(frozen=True)
class Rates:
    """One row for each problem asked, in their order; columns as in the cache. `folder` is its place there."""

    table: pd.DataFrame
    folder: Path

    @property
    def right(self) -> list[int]:
        """Right answers to each problem."""
        return self.table["right"].tolist()

    @property
    def graded(self) -> list[int]:
        """Answers to each problem that the grader judged."""
        return self.table["graded"].tolist()

    @property
    def seconds(self) -> float:
        """Wall time that measuring took, whenever that was."""
        return float(self.table["seconds"].sum())

    def charge(self, cost_model: CostModel, max_rows: int, cost: ModelFlops, account: ComputeAccount) -> None:
        """Count what was sampled, `max_rows` responses at once. None of it is ever trained on."""
        prompts, lengths = self.table["prompt_tokens"].tolist(), [list(map(int, row)) for row in self.table["lengths"]]
        injected = int(self.table["injected"].sum())
        account.generated(cost, prompts, lengths, [[0] * len(row) for row in lengths], injected)
        account.discarded_tokens += sum(map(sum, lengths)) - injected
        decoding = cost_model.decoding([length for row in lengths for length in row], max_rows)
        account.simulated_seconds += decoding + cost_model.reading(sum(prompts))


def measure(
    sampling: SamplingSettings,
    plan: Measured,
    responses: ResponseKind,
    base: Base,
    problems: Sequence[Problem],
    own: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Rates:
    """What the base model answers to these problems, from the cache where it is there.

    `own` is the run's folder. It keeps a copy of what was measured, which is read first: a run resumes without the
    cache. Raises ValueError if the grader failed on every answer.
    """
    protocol = _protocol(sampling, plan, responses, base)
    key = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root() / "pass_rates" / key
    copy = None if own is None else own / f"pass_rates-{responses.kind}-{key}.parquet"
    prompts = encode_prompts(base.tokenizer, sampling.template, problems)
    digests = [_digest(problem, prompt) for problem, prompt in zip(problems, prompts)]
    if copy is not None and copy.exists():
        known = pd.read_parquet(copy)
        if set(digests) <= set(known["digest"]):
            return Rates(_in_order(known, digests), folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", wait_seconds=math.inf):
        known = _read(folder)
        there = set(known["digest"])
        missing = [place for place, digest in enumerate(digests) if digest not in there]
        if missing:
            write_json(folder / "protocol.json", protocol)
            sampled = f"{responses.samples} {responses.kind} of the base model to each"
            say(f"measuring {len(missing)} of {len(problems)} problems, {sampled}; kept in {folder}")
            known = _extend(folder, known, sampling, plan, responses, base, problems, prompts, digests, missing, say)
    rates = Rates(_in_order(known, digests), folder)
    if sum(rates.graded) == 0:
        raise ValueError(
            f"the grader failed on all {responses.kind} sampled for pass_rate: see that it can read right answers such "
            f"as {problems[0].answer[:60]!r}, or choose another reward"
        )
    if copy is not None:
        atomic_write(copy, _parquet(rates.table))
    return rates


def _protocol(sampling: SamplingSettings, plan: Measured, responses: ResponseKind, base: Base) -> dict[str, object]:
    """Everything beside the problem that what is measured depends on, as JSON."""
    words = json.dumps(base.tokenizer.get_vocab(), sort_keys=True)
    return {
        "kind": responses.kind,
        "samples": responses.samples,
        "weights": base.weights,
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "sampling": asdict(responses.params),
        "phrase": list(responses.phrase),
        "truncation": repr(sampling.truncation) if responses.kind == "answers" else "",
        "verifier": repr(_decides_correctness(sampling.reward)),
        "arguments": repr(getattr(sampling.engine, "arguments", {})),
        "precision": repr(sampling.precision),
        "engine": type(sampling.engine).__name__,
        "device": base.device.type,
        "seed": plan.seed,
        "code": CODE_VERSION,
    }


def _decides_correctness(reward: Grader) -> Grader:
    """What decides the correctness of a response, whatever right and wrong ones earn."""
    return (
        _decides_correctness(reward.parts[reward.outcome_of])
        if isinstance(reward, Weighted)
        else replace(reward, correct=1.0, wrong=0.0)
    )


def _digest(problem: Problem, prompt: tuple[int, ...]) -> str:
    written = json.dumps([problem.id, prompt, problem.answer, problem.details])
    return hashlib.sha256(written.encode()).hexdigest()[:24]


def _read(folder: Path) -> pd.DataFrame:
    """All rows of a folder of the cache. Raises ValueError for a damaged file."""
    tables = [pd.DataFrame({name: [] for name in _COLUMNS})]
    for path in sorted(folder.glob("*.parquet")):
        try:
            tables.append(pd.read_parquet(path, columns=list(_COLUMNS)))
        except Exception as error:  # pyarrow's errors share no class
            raise ValueError(f"{path} cannot be read ({error}): delete it, and it will be measured again") from error
    whole = pd.concat(tables[1:] or tables, ignore_index=True)
    return whole.drop_duplicates("digest", ignore_index=True)


def _in_order(known: pd.DataFrame, digests: Sequence[str]) -> pd.DataFrame:
    return known.set_index("digest").loc[list(digests)].reset_index()[list(_COLUMNS)]


def _parquet(table: pd.DataFrame) -> bytes:
    written = io.BytesIO()
    table.to_parquet(written, index=False)
    return written.getvalue()


def _extend(
    folder: Path,
    known: pd.DataFrame,
    sampling: SamplingSettings,
    plan: Measured,
    responses: ResponseKind,
    base: Base,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    digests: Sequence[str],
    missing: Sequence[int],
    say: Callable[[str], None],
) -> pd.DataFrame:
    """Measure the problems at the places `missing` and add their rows, each part in a file until all are there."""
    at_once = max(1, _CALLS * sampling.engine.max_rows // responses.samples)
    parts, began = [known], time.perf_counter()
    with (
        closing(sampling.engine.open(base.folder, sampling.precision, base.device)) as session,
        doing("pass rates of the base model", len(missing), "problems") as shown,
    ):
        for start in range(0, len(missing), at_once):
            shown.done = start
            places = missing[start : start + at_once]
            part = _sampled(
                sampling, plan, responses, base, session, [problems[p] for p in places], [prompts[p] for p in places]
            )
            part["digest"] = [digests[place] for place in places]
            parts.append(part[list(_COLUMNS)])
            atomic_write(folder / f"part-{digests[places[0]]}.parquet", _parquet(parts[-1]))
            if (done := start + len(places)) < len(missing):
                say(f"  {done} of {len(missing)} problems after {time.perf_counter() - began:.0f} s")
    whole = pd.concat([part for part in parts if len(part)], ignore_index=True)
    atomic_write(folder / "rates.parquet", _parquet(whole))
    for path in folder.glob("part-*.parquet"):
        path.unlink()
    return whole


def _sampled(
    sampling: SamplingSettings,
    plan: Measured,
    responses: ResponseKind,
    base: Base,
    session: EngineSession,
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
) -> pd.DataFrame:
    """Sample and grade the answers to some problems: all columns but the digest."""
    began = time.perf_counter()
    requests = group_requests(
        problems, prompts, responses.samples, responses.params, plan.seed, f"pass_rate/{responses.kind}", 0
    )
    if responses.kind == "answers":
        completions = sampling.truncation.generate(session, requests, tools_for(base.tokenizer))
    else:
        ends = session.generate([replace(request, prefix=responses.phrase) for request in requests])
        completions = [Completion.unsampled(responses.phrase, end.stop, injected=True).continued(end) for end in ends]
    rollouts = to_rollouts(problems, prompts, responses.samples, completions)
    texts = decode(base.tokenizer, rollouts)
    # A guess is judged by what it says first; the few tokens it may take need not hold an end.
    finished = rollouts.finished.tolist() if responses.kind == "answers" else [True] * len(texts)
    each = [problem for problem in problems for _ in range(responses.samples)]
    judged = sampling.reward.checked_grades(each, texts, finished, [request.noise for request in requests]).correctness
    groups = [slice(place * responses.samples, (place + 1) * responses.samples) for place in range(len(problems))]
    lengths = rollouts.lengths.tolist()
    injected = (rollouts.response_mask & ~rollouts.sampled_mask).sum(dim=1).tolist()
    return pd.DataFrame(
        {
            "problem_id": [problem.id for problem in problems],
            "question": [problem.question for problem in problems],
            "right": [sum(correct > 0.5 for correct in judged[group]) for group in groups],
            "graded": [sum(not math.isnan(correct) for correct in judged[group]) for group in groups],
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "lengths": [lengths[group] for group in groups],
            "injected": [sum(injected[group]) for group in groups],
            "seconds": (time.perf_counter() - began) / len(problems),
        }
    )
