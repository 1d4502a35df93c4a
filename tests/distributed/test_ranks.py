"""What each of several processes computes, without starting them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.config.rules import ERRORS_OF_SEVERAL_RANKS, IncompatibleRun, check_compatible
from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import choose_device
from grpo_lab.policy import batching
from grpo_lab.run.resume import segments_of_ranks

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.fixture
def two_launched(monkeypatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


def as_rank(monkeypatch: pytest.MonkeyPatch, mine: int, number: int) -> None:
    monkeypatch.setattr(ranks, "number", lambda: number)
    monkeypatch.setattr(ranks, "rank", lambda: mine)


@quick
@given(st.integers(1, 5), st.integers(0, 17))
def test_every_pass_counts_once_and_all_ranks_make_equally_many(number: int, items: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own = []
        for mine in range(number):
            as_rank(patch, mine, number)
            own.append(ranks.dealt(items))
        # what a pass gives is here its place; all ranks send those that count
        patch.setattr(ranks, "gathered", lambda _: [[place for place, counts in one if counts] for one in own])
        assert ranks.in_order(items, [place for place, _ in own[-1]]) == list(range(items))
    assert sorted(place for one in own for place, counts in one if counts) == list(range(items))
    assert len({len(one) for one in own}) == 1
    assert all(0 <= place < items for one in own for place, _ in one)


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 200))
def test_microbatches_are_divided_until_all_ranks_have_equally_many(lengths, number, budget) -> None:
    whole = batching.microbatch_rows(lengths, batching.Microbatching(budget, 10**6))
    with pytest.MonkeyPatch.context() as patch:
        as_rank(patch, 0, number)
        groups = batching.spread(whole, lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert len(groups) % number == 0 or all(len(group) == 1 for group in groups)
    assert all(any(set(group) <= set(held) for held in whole) for group in groups), "none grew"
    sizes = [sum(lengths[row] for row in group) for group in groups]
    assert number == 1 or sizes == sorted(sizes, reverse=True)


def test_one_process_is_one_rank_that_does_nothing() -> None:
    assert (ranks.launched(), ranks.number(), ranks.rank(), ranks.is_first()) == (1, 1, 0, True)
    value = [object()]
    assert ranks.gathered(value) == [value] and ranks.from_first(value) is value
    assert ranks.in_order(2, [1, 2]) == [1, 2] and ranks.on_first(lambda: 3) == 3
    error = ValueError("own")
    assert ranks.cause_of(error) is error


def test_a_group_of_others_variables_is_no_launch_of_torchrun(monkeypatch) -> None:
    """Clusters set WORLD_SIZE and RANK for their own purposes."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert ranks.launched() == 1


REFUSED = {
    "streams_have_one_rank": ("schedule=in_flight correction=tis_token", "schedule=one_step_off correction=tis_token"),
    "races_have_one_rank": ("group_filter=oversample_abort", "group_filter=resample"),
    "compiled_models_have_one_rank": ("model=hf model.path=nowhere model.compiled=true", "model=hf model.path=nowhere"),
    "one_rank_asks_the_base": ("engine=vllm sft=rejection_sampling", "engine=vllm_process sft=rejection_sampling"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [rule.name for rule in ERRORS_OF_SEVERAL_RANKS])
def test_what_several_processes_cannot_do_is_refused_with_a_remedy(name: str, make_run, two_launched) -> None:
    broken, mended = REFUSED[name]
    (rule,) = (rule for rule in ERRORS_OF_SEVERAL_RANKS if rule.name == name)
    with pytest.raises(IncompatibleRun) as refusal:
        check_compatible(make_run(*broken.split()))
    assert rule.reason in str(refusal.value) and rule.remedy in str(refusal.value)
    check_compatible(make_run(*mended.split()))


@pytest.mark.parametrize("name", REFUSED)
def test_one_process_may_do_all_of_it(name: str, make_run) -> None:
    check_compatible(make_run(*REFUSED[name][0].split()))


def test_a_model_of_two_gpus_needs_that_many_processes(make_run, monkeypatch) -> None:
    engine = make_run("engine=vllm", "engine.tensor_parallel=2").engine
    assert "1 processes share this run" in (engine.missing() or "")
    monkeypatch.setattr(ranks, "launched", lambda: 4)
    assert "share this run" not in (engine.missing() or "") and engine.ranks_a_model == 2
    assert make_run("engine=vllm_process", "engine.tensor_parallel=2").engine.ranks_a_model == 1


def test_a_sweep_checks_its_runs_for_the_processes_that_it_is_going_to_start(make_run) -> None:
    streams = make_run("schedule=in_flight", "correction=tis_token")
    with ranks.planned(2):
        assert (ranks.launched(), ranks.local_number(), ranks.number()) == (2, 2, 1)
        with pytest.raises(IncompatibleRun):
            check_compatible(streams)
        assert "share this run" not in (make_run("engine=vllm", "engine.tensor_parallel=2").engine.missing() or "")
    check_compatible(streams)


def test_an_engine_takes_no_gpu_of_another_learner(make_run, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    engine = make_run("engine=vllm_process").engine
    assert engine.missing() is None, "one learner, on cuda:0"
    with ranks.planned(2):
        assert "on CUDA device 1, the learner's of another process: set it to 2" in engine.missing()
        assert replace(engine, device_index=0).missing() is None, "each on its own learner's GPU"
        assert replace(engine, device_index=2).missing() is None


def test_ranks_that_differ_are_told_in_what(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "number", lambda: 2)
    monkeypatch.setattr(ranks, "gathered", lambda value: [{"task": "a", "seed": 1}, value])
    ranks.agree("configuration", lambda: {"seed": 1, "task": "a"})
    with pytest.raises(
        ValueError, match="rank 1 has configuration task=b, and rank 0 has task=a: start the same command"
    ):
        ranks.agree("configuration", lambda: {"seed": 1, "task": "b"})
    with pytest.raises(ValueError, match="rank 1 has configuration seed=None, and rank 0 has seed=1"):
        ranks.agree("configuration", lambda: {"task": "a"})


def test_one_device_is_not_enough_for_several_processes(two_launched) -> None:
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match="use cuda"):
        choose_device("cuda:0")


def test_a_run_says_how_many_processes_computed_which_steps() -> None:
    first = segments_of_ranks({}, 0, 2)
    assert first == [{"from_step": 0, "number": 2}]
    assert segments_of_ranks({"ranks": first}, 50, 2) == first
    changed = segments_of_ranks({"ranks": first}, 50, 1)
    assert changed == [*first, {"from_step": 50, "number": 1}]
    assert segments_of_ranks({"ranks": changed}, 20, 4) == [*first, {"from_step": 20, "number": 4}]
    assert segments_of_ranks({"run_key": "of before"}, 30, 1) == [{"from_step": 0, "number": 1}]
