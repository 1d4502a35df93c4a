"""The roofline by hand: shapes of Qwen2.5, a GPU's data sheet at full efficiency, and what must grow with what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_cost.roofline import Efficiency, Engine, Learner, ModelShape, send
from clusters import H100, SEVEN, USUAL

from grpo_lab.budget.compute_account import ModelFlops

SMALL = ModelShape(28, 1536, 12, 2, 128, 8960, 151936, tied=True)
LARGE = ModelShape(64, 5120, 40, 8, 128, 27648, 152064, tied=False)
PEAK = Efficiency(1.0, 1.0, 1.0, 1.0, step=0.0, reduce=0.0, reserve=0.0, used=1.0, disk=1e9)


def test_shapes_have_the_weights_that_their_model_cards_state() -> None:
    """1.54, 7.61 and 32.5 B, says Qwen; the last is 32.76 by its own config.json."""
    assert [round(shape.weights / 1e9, 2) for shape in (SMALL, SEVEN, LARGE)] == [1.54, 7.62, 32.76]
    assert SEVEN.flops.weights == SEVEN.weights - 152064 * 3584 and SMALL.flops.weights == SMALL.weights
    assert (SMALL.kv_bytes, SEVEN.kv_bytes, LARGE.kv_bytes) == (28672, 57344, 262144)
    assert SEVEN.flops == ModelFlops(SEVEN.flops.weights, 4 * 28 * 28 * 128)


def test_one_response_is_decoded_at_the_speed_of_memory() -> None:
    """7B: 15.2 GB of weights, less 1.1 GB of a table that is looked up, at 3.35 TB/s: 4.2 ms."""
    assert 2 * SEVEN.weights / 3.35e12 == pytest.approx(4.55e-3, rel=2e-3)
    assert Engine(SEVEN, H100, PEAK).step(1, 0) == pytest.approx(4.22e-3, rel=2e-3)
    # 100 responses of 4,000 tokens add 400,000 * 57,344 B = 22.9 GB
    assert Engine(SEVEN, H100, PEAK).step(100, 400_000) == pytest.approx(4.22e-3 + 6.85e-3, rel=2e-3)
    assert Engine(SEVEN, H100, PEAK, gpus=2).step(1, 0) == pytest.approx(2.11e-3, rel=2e-3)


def test_many_short_responses_are_decoded_at_the_speed_of_arithmetic() -> None:
    # 2 * 7.07e9 * 1000 operations at 989e12 a second
    assert Engine(SEVEN, H100, PEAK).step(1000, 0) == pytest.approx(14.3e-3, rel=2e-3)
    # both bounds meet at 989e12 / 3.35e12 = 295 responses
    assert Engine(SEVEN, H100, PEAK).step(295, 0) == pytest.approx(Engine(SEVEN, H100, PEAK).step(1, 0), rel=2e-3)


def test_efficiency_and_latency_lengthen_a_step() -> None:
    assert Engine(SEVEN, H100, USUAL).step(1, 0) == pytest.approx(4.22e-3 / 0.7 + 1e-3, rel=2e-3)
    two = Engine(SEVEN, H100, USUAL, gpus=2).step(1, 0)
    assert two == pytest.approx(2.11e-3 / 0.7 + 1e-3 + 56 * 1e-5, rel=2e-3)


def test_an_engine_takes_as_many_gpus_as_half_full_weights_need() -> None:
    assert [Engine.of(shape, H100, USUAL).gpus for shape in (SMALL, SEVEN, LARGE)] == [1, 1, 2]
    assert Engine(SEVEN, H100, USUAL).cache_tokens == int((72e9 - 2 * SEVEN.weights) // 57344)
    with pytest.raises(ValueError, match="one node: shard more"):
        Engine.of(LARGE, replace(H100, memory=10e9), USUAL)


def test_prefill_counts_operations() -> None:
    assert Engine(SEVEN, H100, PEAK).prefill([256, 256]) == 2 * SEVEN.flops.span(0, 256) / 989e12


def test_training_takes_three_forwards_and_the_longest_row_bounds_it() -> None:
    one, sixteen = Learner(SEVEN, H100, PEAK, 8), Learner(SEVEN, H100, PEAK, 16)
    row = 3 * SEVEN.flops.span(0, 4096) / (8 * 989e12)
    assert one.train([4096] * 4, 1) - one.update == pytest.approx(4 * row)
    assert sixteen.train([4096] * 4, 1) - sixteen.update == pytest.approx(2 * row)
    assert sixteen.train([4096], 1) - sixteen.update == pytest.approx(row)  # the second node idles
    assert one.read([4096]) == pytest.approx(row / 3)
    # 6 N D, without attention and embedding
    assert 3 * SEVEN.flops.span(0, 1) == pytest.approx(6 * SEVEN.flops.weights, rel=1e-4)


def test_an_update_reads_and_writes_states_and_reduces_gradients() -> None:
    moved = 2 * 12 * SEVEN.weights / 8 / 3.35e12
    assert Learner(SEVEN, H100, PEAK, 8).update == pytest.approx(moved)
    # two nodes: each sends half of the fp32 gradient twice over 8 ports
    across = 4 * SEVEN.weights / (8 * 50e9)
    assert Learner(SEVEN, H100, PEAK, 16).update == pytest.approx(moved / 2 + across)


def test_what_fits() -> None:
    """16 bytes a weight: 122 GB at 7B, 524 GB at 32B; 65 GB of each GPU are free."""
    assert [Learner(SEVEN, H100, USUAL, gpus).fits for gpus in (1, 2)] == ["offloaded", "yes"]
    assert [Learner(LARGE, H100, USUAL, gpus).fits for gpus in (2, 8, 9)] == ["no", "offloaded", "yes"]
    assert Learner(LARGE, H100, USUAL, 8).update > Learner(LARGE, replace(H100, memory=141e9), USUAL, 8).update


def test_weights_are_sent_over_the_link_between() -> None:
    assert send(SEVEN, H100, PEAK, 4, across=True) == pytest.approx(2 * SEVEN.weights / 50e9)
    assert send(SEVEN, H100, PEAK, 4, across=False) == pytest.approx(2 * SEVEN.weights / 450e9)
    assert send(SEVEN, H100, PEAK, 4, across=True, tree=False) == 4 * send(SEVEN, H100, PEAK, 1, across=True)


def test_checkpoints_and_swaps_move_states() -> None:
    assert Learner(SEVEN, H100, PEAK, 8).checkpoint() == pytest.approx(14 * SEVEN.weights / 1e9)
    assert Learner(SEVEN, H100, PEAK, 8).swap() == pytest.approx(2 * 12 * SEVEN.weights / 8 / 64e9)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"train": 1.5}, "at most 1"), ({"bandwidth": 0.0}, "greater than 0"), ({"step": -1.0}, "at least 0")],
)
def test_an_impossible_efficiency_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(USUAL, **change)


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of kv_heads"):
        replace(SEVEN, kv_heads=5)
