"""Step metrics with numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.learner.loss import policy_loss
from grpo_lab.learner.step_metrics import reweighted_tokens
from grpo_lab.tricks.aggregation import Aggregation, Balanced, Constant, PromptMean, SequenceMean, TokenMean
from grpo_lab.tricks.base import Trick
from grpo_lab.tricks.convention import CapForm, Scope, Width
from grpo_lab.tricks.importance import Sequence as SequenceRatio
from grpo_lab.tricks.surrogate import Cispo, Ppo, Reinforce
from tests.shared.helpers import batch_of_rows, make_run, step_of


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def reweighted(aggregation: Aggregation, mask: torch.Tensor, advantages: Sequence[float] = ()) -> float:
    """The share in groups of two; all advantages 1 unless given for each row."""
    rows = torch.tensor(advantages or [1.0] * len(mask), dtype=torch.float64)
    return reweighted_tokens(aggregation, mask, 2, rows[:, None] * mask)


def test_the_mean_over_sequences_reweights_nothing() -> None:
    assert reweighted(SequenceMean(eps=0.0), mask_of(1, 3, 2, 4)) == 0.0


@pytest.mark.parametrize("lengths", [(3, 3, 3, 3), (1, 1)])
def test_rows_of_one_length_weigh_the_same_in_every_aggregation(lengths: tuple[int, ...]) -> None:
    for aggregation in (TokenMean(Scope.step), Constant(8, Width.budget), PromptMean()):
        assert reweighted(aggregation, mask_of(*lengths)) == 0.0


def test_tokens_of_rows_of_another_length_are_counted() -> None:
    """Rows of 1, 3, 2 and 2 tokens. Over sequences a token of each weighs 1/1, 1/3, 1/2 and 1/2 of a quarter. Over
    tokens each weighs 1/8, which is what those of the two rows of 2 already weigh: 4 of 8 tokens are reweighted. Over
    prompts all tokens of both prompts weigh 1/4 of a half, the same."""
    mask = mask_of(1, 3, 2, 2)
    assert reweighted(TokenMean(Scope.step), mask) == pytest.approx(4 / 8)
    assert reweighted(PromptMean(), mask) == pytest.approx(4 / 8)
    assert reweighted(Constant(8, Width.budget), mask) == pytest.approx(4 / 8)
    assert reweighted(TokenMean(Scope.step), mask_of(1, 3, 5, 7)) == 1.0


def test_tokens_are_averaged_among_responses_of_one_sign() -> None:
    """Rows of 1, 3, 2 and 2 tokens. One response of each sign in a prompt: a token weighs as in the mean over
    sequences. The first two of one sign: their tokens weigh 1/4, not 1/2 and 1/6, so 4 of 8 are reweighted."""
    mask = mask_of(1, 3, 2, 2)
    assert reweighted(Balanced(), mask, [1.0, -1.0, 1.0, -1.0]) == 0.0
    assert reweighted(Balanced(), mask, [1.0, 1.0, 1.0, -1.0]) == pytest.approx(4 / 8)


def test_no_token_in_the_loss_is_no_share() -> None:
    assert reweighted(TokenMean(Scope.step), torch.zeros(2, 3, dtype=torch.bool)) == 0.0


@pytest.mark.parametrize(
    ("options", "unlike"),
    [
        ({}, 0),
        ({"surrogate": Ppo(clip_low=0.2, clip_high=0.28)}, 1),  # the 1.25 of the row that gains
        (
            {"surrogate": Cispo(cap=4.0, clip_low=1.0, cap_form=CapForm.absolute)},
            4,
        ),  # all that PPO clips: 1.25 and 1.9 above, 0.5 and 0.7 below
        ({"surrogate": Reinforce()}, 8),  # no token's ratio is 1
        ({"importance": SequenceRatio(log_ratio_limit=20.0)}, 8),  # no token's ratio is its row's
    ],
)
def test_tokens_with_another_gradient_than_ppos_are_counted_on_the_same_tokens(
    options: dict[str, Trick], unlike: int
) -> None:
    """Two rows of four tokens with advantages 1 and -1, and a row of advantage 0 that no surrogate moves."""
    ratios = torch.tensor([[0.5, 1.1, 1.25, 1.9], [0.5, 0.7, 1.1, 1.9], [0.5, 1.1, 1.25, 1.9]], dtype=torch.float64)
    old = torch.full_like(ratios, -3.0)
    inputs = step_of([4, 4, 4], [1.0, -1.0, 0.0], 1, old_logprobs=old)
    run = make_run(**{"surrogate": Ppo(clip_low=0.2, clip_high=0.2)} | options)
    logprobs = old + ratios.log()
    output = policy_loss(run.loss_tricks, batch_of_rows(run, inputs, [0, 1, 2]), logprobs, -logprobs)
    assert float(output.sums["unlike_ppo"]) == unlike


@pytest.mark.extended
def test_the_numbers_of_a_step_are_those_of_its_table(tmp_path: Path, tiny_base: Path) -> None:
    """Rewards, lengths and advantages as they follow from the responses that the run saved."""
    lenient = ("reward=lenient", "task.response_tokens=16")  # so that some right responses are truncated
    folder = run_in_process(tmp_path, *SMALL, "scale=group_std", "budget.amount=2", "rollouts_every=1", *lenient)
    for line in metrics_of(folder)[1:]:
        logged, rows = line["metrics"], pd.read_parquet(folder / "rollouts" / f"step={line['step']:06d}.parquet")
        assert rows["in_loss"].all() and rows["in_statistics"].all() and 0 < rows["outcome"].mean() < 1
        groups = rows.groupby("problem_id")["reward"]
        centred = rows["reward"] - groups.transform("mean")
        expected = {
            "reward/mean": rows["reward"].mean(),
            "reward/outcome": rows["outcome"].mean(),
            "reward/group_std": groups.std(ddof=0).mean(),
            "rollout/length": rows["length"].mean(),
            "rollout/longest": rows["length"].max(),
            "rollout/truncated": rows["truncated"].mean(),
            "rollout/length_correct": rows[rows["outcome"] == 1]["length"].mean(),
            "rollout/length_wrong": rows[rows["outcome"] == 0]["length"].mean(),
            "rollout/truncated_correct": rows[rows["outcome"] == 1]["truncated"].mean(),
            "rollout/frac_zero_std": (groups.std(ddof=0) == 0).mean(),
            "advantage/mean": rows["advantage"].mean(),
            "advantage/absolute": rows["advantage"].abs().mean(),
            "factor/scale": rows["advantage"].abs().sum() / centred.abs().sum(),
        }
        assert {name: logged[name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert 0 < logged["rollout/truncated_correct"] < 1
        assert logged["factor/scale"] > 1.5, "a deviation is at most a half"
