"""Counter-based noise: a function of its key alone, uniform, and apart for whatever differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from helpers import make_rollouts
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.learner.update import step_noise
from grpo_lab.seeding import stream_id, token_uniforms
from grpo_lab.types import NoiseKey

KEY = NoiseKey(seed=3, stream="train", step=5, problem=7, response=2)
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@quick
@given(st.integers(0, 50), st.integers(0, 50))
def test_a_slice_of_the_noise_is_that_slice_of_the_whole(start, length) -> None:
    whole = token_uniforms(KEY, 0, 100)
    assert token_uniforms(KEY, start, start + length).tolist() == whole[start : start + length].tolist()


def test_noise_is_a_function_of_its_key_alone() -> None:
    first = token_uniforms(KEY, 0, 16)
    np.random.random(3)
    token_uniforms(replace(KEY, response=9), 0, 5)
    assert token_uniforms(replace(KEY), 0, 16).tolist() == first.tolist()


def test_every_field_of_the_key_changes_all_the_noise() -> None:
    others = [
        replace(KEY, seed=4),
        replace(KEY, stream="eval/heldout"),
        replace(KEY, step=6),
        replace(KEY, problem=8),
        replace(KEY, response=3),
        # the same numbers on other fields
        replace(KEY, step=7, problem=5),
        replace(KEY, problem=2, response=7),
    ]
    drawn = np.stack([token_uniforms(key, 0, 64) for key in [KEY, *others]])
    assert len(np.unique(drawn)) == drawn.size


def test_marks_have_noise_of_their_own_for_each_response_and_each_pass(make_run) -> None:
    """Three passes of two minibatches: updates 0 and 1 read one set of numbers, 2 and 3 and 4 and 5 others."""
    run = make_run("surrogate=clip_cov", "updates.minibatches=2", "updates.passes=3")
    rollouts = make_rollouts([5] * 6, 3)
    drawn = [step_noise(run.loss_tricks, run.updates, rollouts, run.seed, 0, number) for number in range(6)]
    noise = [one["mark"] for one in drawn]
    same = [[torch.equal(one, other) for other in noise] for one in noise]
    assert same == [[first // 2 == second // 2 for second in range(6)] for first in range(6)]
    assert torch.stack(noise[::2]).unique().numel() == 3 * 6 * 5, "no two responses share a number"
    assert step_noise(make_run("surrogate=ppo").loss_tricks, run.updates, rollouts, 0, 0, 0) == {}


def test_neighbouring_keys_do_not_share_noise_at_other_positions() -> None:
    # A counter that ran over into the next response would show the same number twice.
    drawn = [token_uniforms(replace(KEY, response=r, problem=p), 0, 200) for r in range(8) for p in range(8)]
    assert len(np.unique(np.stack(drawn))) == 64 * 200


def test_large_seeds_that_differ_by_one_draw_different_noise() -> None:
    # 2^53 and 2^53 + 1 are the same float64: a key that passed through one would forget the difference.
    drawn = [token_uniforms(replace(KEY, seed=seed), 0, 8).tolist() for seed in (2**53, 2**53 + 1)]
    assert drawn[0] != drawn[1]


def test_the_whole_stream_id_reaches_the_generator(monkeypatch) -> None:
    # Ids that agree in all but their lowest bit, as two names may.
    drawn = []
    for identity in (2**63, 2**63 + 1):
        monkeypatch.setattr("grpo_lab.seeding.stream_id", lambda stream, identity=identity: identity)
        drawn.append(token_uniforms(KEY, 0, 8).tolist())
    assert drawn[0] != drawn[1]


def test_stream_ids_are_the_same_on_every_machine() -> None:
    # blake2b-64 of "train", little endian; Python's own hash() differs from process to process
    assert stream_id("train") == 13394367940604039246
    assert len({stream_id(name) for name in ("train", "eval/probe", "eval/heldout", "eval/downstream")}) == 4


def test_noise_is_uniform_over_positions_and_over_keys() -> None:
    # chi-square with 19 degrees: above 43.8 in one of a thousand seeds, and these seeds are fixed
    along_positions = token_uniforms(KEY, 0, 20_000)
    first_of_each = np.array([token_uniforms(replace(KEY, problem=p), 0, 1)[0] for p in range(4000)])
    for draws in (along_positions, first_of_each):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, expected = np.histogram(draws, bins=20, range=(0, 1))[0], len(draws) / 20
        assert ((counts - expected) ** 2 / expected).sum() < 43.8
