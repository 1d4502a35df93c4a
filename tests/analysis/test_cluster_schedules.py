"""Simulated schedules on a cluster: by hand where lengths are equal, and what must grow with what elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cluster_cost.schedules import Cluster, Lengths, StepTime, Workload, simulate
from clusters import H100, SEVEN, USUAL

from grpo_lab.budget.cost_model import CostModel
from grpo_lab.tricks.schedule import InFlight, Interruptible, OffPolicyK, OneStepOff, Sync

TURNS = Cluster(SEVEN, H100, USUAL, 16)
SPLIT = replace(TURNS, generating=8)
EQUAL = Lengths(1000.0, 0.0, 4000)
LONG_TAIL = Lengths.truncated(1000.0, 4000, 0.01)


def work(lengths: Lengths) -> Workload:
    return Workload(16, 8, 100, lengths, updates=2, reads=1, checkpoint_every=50)


def total(step: StepTime) -> float:
    return step.generation + step.stragglers + step.training + step.moving + step.waiting


def test_lengths_are_cut_off_as_often_as_asked() -> None:
    drawn = np.array(LONG_TAIL.draw(np.random.default_rng(0), 200_000))
    assert (drawn == 4000).mean() == pytest.approx(0.01, rel=0.1)
    assert drawn.mean() == pytest.approx(1000, rel=0.02)  # the cut takes little
    assert Lengths.truncated(1000.0, 1000, 0.01).sigma == pytest.approx(0, abs=1e-12)
    assert EQUAL.draw(np.random.default_rng(0), 3) == [1000, 1000, 1000]
    with pytest.raises(ValueError, match="give a smaller share"):
        Lengths.truncated(1000.0, 100_000, 0.01)


def test_decoding_is_that_of_the_cost_model_where_memory_bounds_it() -> None:
    """On one engine: a step reads the weights, a token the cache before it."""
    one = replace(TURNS, gpus=1)
    lengths = LONG_TAIL.draw(np.random.default_rng(1), 40)
    read = USUAL.bandwidth * H100.bandwidth
    contexts = sum(100 * length + length * (length - 1) / 2 for length in lengths)
    cache = SEVEN.kv_bytes / read * contexts / sum(lengths)
    linear = CostModel(one.engine.step(0, 0), cache, read_token=0.0, train_token=1.0, update=0.0, sync=0.0)
    for slots in (7, 40):
        assert one.decoding(lengths, 100, slots) == pytest.approx(linear.decoding(lengths, slots), rel=1e-9)


def test_decoding_is_the_sum_of_its_steps() -> None:
    """Step by step: who runs, and how long their caches are. Slots are taken in order."""
    lengths, slots, prompt = [5, 2, 3, 4], 2, 10
    # step: rows and tokens in caches. The third follows the second, the fourth the first.
    rows = [2] * 5 + [1] * 4
    caches = [20, 22, 12 + 10, 13 + 11, 14 + 12, 10, 11, 12, 13]
    assert TURNS.decoding(lengths, prompt, slots) == pytest.approx(sum(map(TURNS.step, rows, caches)))


def test_with_equal_lengths_a_synchronous_step_is_generation_and_training_alone() -> None:
    step = simulate(TURNS, Sync(), work(EQUAL), steps=2, skip=1)
    lengths = [1000] * 128
    generation, training = TURNS.generation(lengths, work(EQUAL)), TURNS.training(lengths, work(EQUAL))
    saving = TURNS.learner.checkpoint() / 50
    assert step.seconds == pytest.approx(generation + training + TURNS.sync() + saving)
    assert step.stragglers == pytest.approx(0, abs=1e-3 * step.seconds)
    assert step.waiting == pytest.approx(0, abs=1e-9)


def test_the_parts_of_a_step_add_up() -> None:
    for cluster, schedule in ((TURNS, Sync()), (SPLIT, OneStepOff(1)), (SPLIT, InFlight(2)), (SPLIT, Interruptible(2))):
        step = simulate(cluster, schedule, work(LONG_TAIL), steps=4, skip=4)
        assert total(step) == pytest.approx(step.seconds), schedule
        assert sum(step.shares().values()) == pytest.approx(1), schedule
        assert min(step.shares().values()) >= 0, schedule


def test_one_step_off_hides_the_shorter_of_generation_and_training() -> None:
    lengths = [1000] * 128
    step = simulate(SPLIT, OneStepOff(1), work(EQUAL), steps=6, skip=3)
    generation, training = SPLIT.generation(lengths, work(EQUAL)), SPLIT.training(lengths, work(EQUAL))
    saving = SPLIT.learner.checkpoint() / 50
    assert step.seconds == pytest.approx(max(generation, training + SPLIT.sync()) + saving)
    assert step.waiting == pytest.approx(abs(generation - training - SPLIT.sync()) / 2)  # half of the GPUs


def test_on_split_gpus_sync_is_one_step_off_with_lag_0_and_off_policy_1() -> None:
    runs = [simulate(SPLIT, schedule, work(LONG_TAIL)) for schedule in (OneStepOff(0), Sync(), OffPolicyK(1))]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0].seconds > simulate(SPLIT, OneStepOff(1), work(LONG_TAIL)).seconds


def test_a_longer_tail_of_the_same_mean_costs_a_synchronous_run_more() -> None:
    caps = (1000, 2000, 4000, 8000)
    steps = [simulate(TURNS, Sync(), work(Lengths.truncated(1000.0, cap, 0.01)), steps=3, skip=0) for cap in caps]
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
    assert [step.shares()["stragglers"] for step in steps] == sorted(step.shares()["stragglers"] for step in steps)


def test_streaming_saves_more_the_further_it_may_run_ahead() -> None:
    steps = [simulate(SPLIT, InFlight(lag), work(LONG_TAIL), steps=6, skip=6).seconds for lag in (0, 1, 2, 4)]
    assert steps == sorted(steps, reverse=True) and steps[-1] < 0.6 * steps[0]
    # Without lag the batch is drawn by the latest weights: no faster than turns on the same GPUs.
    assert steps[0] >= 0.95 * simulate(SPLIT, Sync(), work(LONG_TAIL), steps=6, skip=6).seconds


def test_reading_caches_again_costs_time() -> None:
    kept, again = (
        simulate(SPLIT, schedule, work(LONG_TAIL), steps=6, skip=4).generation
        for schedule in (InFlight(2), Interruptible(2))
    )
    assert again > kept


@pytest.mark.extended
def test_a_streaming_step_generates_every_token_that_it_trains_on() -> None:
    """In the long run: where all slots stay full, generation of a step is that of one batch, and no more."""
    narrow = Cluster(SEVEN, replace(H100, memory=34e9), USUAL, 9, generating=1)
    asked = replace(work(EQUAL), problems=64, group_size=16)
    slots, lengths = narrow.slots(asked), [1000] * asked.responses
    assert slots < asked.responses / 2, "so that they stay full"
    step = simulate(narrow, InFlight(1), asked, steps=40, skip=6)
    batch = narrow.engine.prefill([asked.prompt] * asked.problems) + narrow.even(lengths, asked.prompt, slots)
    assert batch > narrow.training(lengths, asked), "so that generation bounds the step"
    assert step.generation == pytest.approx(batch / 9, rel=0.02)
    assert step.seconds == pytest.approx(batch + narrow.sync(), rel=0.1)


def test_more_gpus_never_make_a_step_longer_and_the_tail_bounds_it() -> None:
    steps = [simulate(replace(TURNS, gpus=gpus), Sync(), work(LONG_TAIL), steps=3, skip=0) for gpus in (8, 16, 64, 256)]
    assert [step.seconds for step in steps] == sorted((step.seconds for step in steps), reverse=True)
    assert steps[-1].seconds > 4000 * TURNS.engine.step(1, 0)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="split them with `generating`"):
        simulate(TURNS, OneStepOff(1), work(EQUAL))
    with pytest.raises(ValueError, match="below gpus"):
        replace(TURNS, generating=16)
    with pytest.raises(ValueError, match="not one response fits"):
        Cluster(SEVEN, replace(H100, memory=34e9), USUAL, 8).slots(work(Lengths(1e6, 0.0, 10**6)))
