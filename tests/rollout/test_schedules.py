"""Schedules: which weights draw which token, what waits in a checkpoint, and what simulated time says of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close, make_rollouts, maker_of, queue_of
from short_runs import metrics_of, run_in_process, same_ending
from transformers import AutoModelForCausalLM

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.budget.cost_model import CostModel, SimulatedClock, measure
from grpo_lab.config.rules import IncompatibleRun, check_compatible
from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.base import EngineFailure
from grpo_lab.learner.mismatch import probe_sync, sync_sampler
from grpo_lab.learner.step_metrics import staleness_metrics
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.rollout.groups import completions_of, group_to_state
from grpo_lab.rollout.queue import RolloutBatch, RolloutQueue, training_seconds
from grpo_lab.run.state import RunState, open_state
from grpo_lab.tricks.schedule import InFlight, Interruptible, OffPolicyK, OneStepOff, Sync
from grpo_lab.types import Completion, Exhausted, StopReason

CPU = torch.device("cpu")
SMALL = ("problems_per_step=4", "group_size=4", "updates=one", "evaluation.initial_kl=false")
# Each schedule under its numbers, and how many steps old the weights must be that drew batch 0, 1, 2, ...
QUEUES = {
    "sync": (("schedule=sync",), [0, 0, 0, 0, 0, 0, 0]),
    "one_step_off": (("schedule=one_step_off",), [0, 1, 1, 1, 1, 1, 1]),
    "three_steps_off": (("schedule=one_step_off", "schedule.lag=3"), [0, 1, 2, 3, 3, 3, 3]),
    "off_policy_3": (("schedule=off_policy_k", "schedule.k=3"), [0, 1, 2, 0, 1, 2, 0]),
}
STREAMS = {
    "interruptible": ("schedule=interruptible", "schedule.max_lag=2"),
    "in_flight": ("schedule=in_flight", "schedule.max_lag=2"),
}
# Times under which syncs fall into the middle of responses.
MIDWAY = ("cost_model.decode_step=0.01", "cost_model.decode_token=0", "cost_model.read_token=0",
          "cost_model.train_token=0.0002",
          "cost_model.update=0", "cost_model.sync=0")  # fmt: skip


@pytest.fixture
def opened(make_run: Callable[..., RunConfig], tiny_base: Path):
    """opened("schedule=...") -> a run, what it holds and its queue."""

    def build(*overrides: str):
        run = make_run(*SMALL, *overrides)
        state = open_state(run, CPU, None)
        queue = queue_of(run, state)
        probe_sync(run.sync_settings, state)
        return run, state, queue

    return build


def step(run: RunConfig, state: RunState, queue: RolloutQueue, change: float = 0.0) -> RolloutBatch:
    """Take a batch, change the learner as an update would, and sync."""
    batch = queue.take()
    generator = torch.Generator().manual_seed(state.updates)
    with torch.no_grad():
        for parameter in state.learner.parameters():
            parameter.add_(change * torch.randn(parameter.shape, generator=generator))
    state.updates += 1
    state.account.steps += 1
    sync_sampler(run.sync_settings, state, queue)
    return batch


def learner_reads(run: RunConfig, state: RunState, batch: RolloutBatch) -> torch.Tensor:
    rollouts = batch.rollouts
    return rollout_logprobs(state.learner, rollouts, 1.0, run.learner_precision, run.microbatching, CPU)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUEUES)
def test_a_batch_is_as_old_as_its_schedule_says(name: str, opened) -> None:
    overrides, ages = QUEUES[name]
    run, state, queue = opened(*overrides)
    history = []
    for number, age in enumerate(ages):
        history.append({key: value.clone() for key, value in state.learner.state_dict().items()})
        batch = step(run, state, queue, 1e-2)
        rollouts = batch.rollouts
        assert set(rollouts.weight_version[rollouts.sampled_mask].tolist()) == {number - age}
        # and those weights, not a version number alone, drew it
        now = {key: value.clone() for key, value in state.learner.state_dict().items()}
        state.learner.load_state_dict(history[number - age])
        read = learner_reads(run, state, batch)
        state.learner.load_state_dict(now)
        assert_close(read, rollouts.sampler_logprobs, 1e-4, "log-probs under the weights of that version")
    assert run.schedule.ahead == max(ages) and run.schedule.keeps_sampler_current is (max(ages) == 0)


def test_schedules_without_room_are_sync(opened) -> None:
    """Lag 0, k 1 and max_lag 0 train on the very tokens that Sync trains on."""
    plain = opened()
    expected = [step(*plain, 1e-2) for _ in range(4)]
    for overrides in (
        ("schedule=one_step_off", "schedule.lag=0"),
        ("schedule=off_policy_k", "schedule.k=1"),
        ("schedule=interruptible", "schedule.max_lag=0"),
        ("schedule=in_flight", "schedule.max_lag=0"),
    ):
        run, state, queue = opened(*overrides)
        for number in range(4):
            found = step(run, state, queue, 1e-2)
            # A stream takes groups as they end; which they are, and what they say, is the same.
            order = [found.groups.indices.index(index) for index in expected[number].groups.indices]
            same = found.groups.choose(order).rollouts
            theirs = expected[number].rollouts
            assert torch.equal(same.tokens[:, : theirs.tokens.shape[1]], theirs.tokens), overrides
            assert torch.equal(same.weight_version[same.sampled_mask], theirs.weight_version[theirs.sampled_mask])
            assert_close(same.sampler_logprobs, theirs.sampler_logprobs, 1e-5, str(overrides))
        assert state.account.sampled_tokens == plain[1].account.sampled_tokens


@pytest.mark.parametrize("name", STREAMS)
def test_weights_change_in_the_middle_of_responses(name: str, opened) -> None:
    run, state, queue = opened(*STREAMS[name], *MIDWAY)
    mixed, read_again = torch.zeros(0), 0
    for number in range(8):
        batch = step(run, state, queue, 1e-2)
        read_again += sum(batch.spent[0].read_again)
        rollouts = batch.rollouts
        versions, mask = rollouts.weight_version, rollouts.sampled_mask
        assert (versions[mask] <= number).all()
        rises = (versions[:, 1:] >= versions[:, :-1]) | ~mask[:, 1:]
        assert rises.all(), "a token is never of older weights than the one before it"
        first = versions[:, 0]
        last = torch.where(mask, versions, 0).amax(dim=1)
        mixed = torch.cat([mixed, (last > first).float()])
        begun = len(queue.growing) + len(queue.ready)
        assert begun == run.problems_per_step * run.schedule.max_lag, "the bound, less the batch that was trained on"
    assert 0.2 < float(mixed.mean()) <= 1, "some responses hold tokens of several versions"
    assert (read_again == 0) is run.schedule.keeps_cache, "only a cache that is computed anew costs something"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STREAMS)
def test_generation_runs_as_far_ahead_as_areal_allows_and_no_farther(
    name: str, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With B groups a batch, N of them begun, and i steps taken: floor((N - 1) / B) <= i + max_lag (2505.24298)."""
    run, state, queue = opened(*STREAMS[name], *MIDWAY)
    admit, begun = queue._admit, []

    def admitting() -> None:
        admit()
        begun.append((queue.tickets, state.account.steps))

    monkeypatch.setattr(queue, "_admit", admitting)
    for _ in range(5):
        step(run, state, queue, 1e-2)
    batch, lag = run.problems_per_step, run.schedule.max_lag
    assert {steps for _, steps in begun} == set(range(5)), "groups were admitted in every step"
    for groups, steps in begun:
        assert (groups - 1) // batch == steps + lag, f"{groups} groups begun after {steps} steps"
        assert groups // batch > steps + lag, "and no place was left free"


def pieces(state: RunState, run: RunConfig, keeps_cache: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps to the old and to the new weights, of the tokens that a response got after a swap in its middle."""
    old = AutoModelForCausalLM.from_pretrained(run.model.resolve()).eval()
    stream = state.session.open_stream()

    for key, request in enumerate(asked(run, state)):
        stream.add(key, request)
    for _ in range(6):
        stream.step()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in state.learner.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    state.updates = 1
    stream.update_weights(state.learner.state_dict().items(), 1, keeps_cache)
    found = {}
    while stream.busy:
        found |= dict(stream.take(wait=True))
    rows = [found[key] for key in sorted(found) if len(found[key].tokens) > 8]
    assert len(rows) >= 3
    gaps = {"old": [], "new": []}
    for key, completion in found.items():
        late = completion.weight_versions == 1
        assert late.tolist() == [place >= 6 for place in range(len(late))]
        prompt = asked(run, state)[key].prompt
        ids = torch.tensor([prompt + completion.ids])
        for name, model in (("old", old), ("new", state.learner)):
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            picked = scores.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            gaps[name].append((picked - completion.logprobs).abs()[late])
    return torch.cat(gaps["old"]), torch.cat(gaps["new"])


def asked(run: RunConfig, state: RunState):

    maker = maker_of(run, state)
    return [request for index in range(8) for request in maker.requests(maker.start(index, 0, 0.0))]


@pytest.mark.extended
def test_a_cache_computed_anew_makes_the_rest_of_a_response_the_new_policy_s_own(opened) -> None:
    run, state, _ = opened("schedule=interruptible")
    old, new = pieces(state, run, keeps_cache=False)
    assert float(new.max()) < 1e-4 and float(old.mean()) > 0.1


@pytest.mark.extended
def test_a_cache_that_is_kept_makes_it_nobody_s(opened) -> None:
    run, state, _ = opened("schedule=in_flight")
    old, new = pieces(state, run, keeps_cache=True)
    assert float(new.mean()) > 0.01 and float(old.mean()) > 0.1
    assert float(new.mean()) < float(old.mean()), "the weights of the moment decide most"


LONG = ("budget.amount=9", "checkpoint_every=3", "updates=two", "problems_per_step=4", "group_size=4",
        "evaluation.every=9", "rollouts_every=4")  # fmt: skip
RESUMED = {
    "one_step_off": ("schedule=one_step_off", "schedule.lag=2"),
    "off_policy_k": ("schedule=off_policy_k", "schedule.k=4"),
    "with_filter": ("schedule=one_step_off", "group_filter=active"),
    "interruptible": (*STREAMS["interruptible"], *MIDWAY, "truncation=interrupt"),
    "in_flight": (*STREAMS["in_flight"], *MIDWAY, "group_filter=active"),
    "late_reward": (*STREAMS["in_flight"], *MIDWAY, "reward_shaping=kimi_length_late"),
    "curriculum": (*STREAMS["in_flight"], *MIDWAY, "curriculum=prioritized", "truncation=repetition_stop"),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "one_step_off" else pytest.param(name, marks=pytest.mark.extended) for name in RESUMED],
)
def test_what_waits_and_grows_survives_an_interruption(name: str, tmp_path: Path, tiny_base: Path) -> None:
    """Stopped behind a checkpoint with batches waiting and responses half grown, it ends with the same bits."""
    overrides = (*LONG, *RESUMED[name])
    whole = run_in_process(tmp_path / "whole", *overrides)
    monkey = pytest.MonkeyPatch()
    taken = RolloutBatch.count

    def dies_in_step_five(self: RolloutBatch, account: ComputeAccount, model_flops: ModelFlops) -> None:
        if account.steps == 4:
            raise KeyboardInterrupt
        taken(self, account, model_flops)

    monkey.setattr(RolloutBatch, "count", dies_in_step_five)
    with pytest.raises(KeyboardInterrupt):
        run_in_process(tmp_path / "cut", *overrides)
    monkey.undo()
    cut = run_in_process(tmp_path / "cut", *overrides)
    same_ending(whole, cut)
    assert max(row["metrics"].get("rollout/staleness_max", 0) for row in metrics_of(whole)) > 1


@pytest.mark.extended
@pytest.mark.parametrize(
    "schedule", [QUEUES["three_steps_off"][0], (*STREAMS["in_flight"], *MIDWAY)], ids=["queue", "stream"]
)
def test_a_late_reward_goes_by_when_a_group_was_drawn(schedule: tuple[str, ...], opened) -> None:
    """However long it waits or grows, and also once a checkpoint has been read: all but its texts is made again."""
    late = ("reward_shaping=kimi_length_late", "reward_shaping.begins_at=0.1")
    run, state, queue = opened(*schedule, *late, "budget.amount=10")
    drawn, lags = [], []
    for now in range(5):
        made = step(run, state, queue).made
        drawn += made.graded.progress[:, 0].tolist()
        lags += [now / 10 - progress for progress in made.graded.progress[:, 0].tolist()]
        added = made.shaped.components["kimi_length"]
        lengths = made.graded.lengths
        acts = (made.graded.progress[:, 0] >= 0.1) & (lengths.amax(dim=1) > lengths.amin(dim=1))
        assert ((added != 0).any(dim=1) == acts).all()
    assert 0 in drawn and max(drawn) >= 0.1 and min(lags) >= 0 and max(lags) > 0.1, "some were drawn long before"
    before = list(queue.ready)
    again = queue_of(run, state)
    again.from_state(queue.to_state())
    assert len(again.ready) == len(before) > 0
    for one, other in zip(before, again.ready):
        assert torch.equal(one.made.graded.progress, other.made.graded.progress)
        assert torch.equal(one.made.shaped.reward, other.made.shaped.reward)
    if schedule[0] == "schedule=in_flight":
        assert [one.group.progress for one in queue.growing.values()] == [
            one.group.progress for one in again.growing.values()
        ]


def test_a_stream_goes_on_with_its_counts(opened) -> None:
    """What was drawn and passed over before a checkpoint, for groups without signal, is in the next step's share."""
    overrides = (*STREAMS["interruptible"], *MIDWAY, "group_filter=active", "curriculum=easy_to_hard",
                 "curriculum.start_share=0.1")  # fmt: skip
    run, state, queue = opened(*overrides)
    while queue.to_state()["counts"][1] == 0:
        step(run, state, queue)
        assert state.updates < 30
    _, _, resumed = opened(*overrides)
    resumed.from_state(queue.to_state())
    assert resumed.to_state()["counts"] == queue.to_state()["counts"]


def test_a_group_written_down_is_read_whole(opened) -> None:
    """Every field of a response, what was put into it and the versions of its tokens too."""
    _, _, queue = opened()
    whole = [
        Completion.of((5, 6, 7), (-0.5, 0.0, -0.25), (1, 1, 2), StopReason.ABORTED, (False, True, False)),
        Completion.of((8,), (-1.0,), (2,), StopReason.EOS),
    ]
    left = group_to_state(3, 7, 0.5, whole)
    group = queue.maker.from_state(left)
    assert list(group.done) == whole and (group.index, group.number, group.progress) == (3, 7, 0.5)
    rollouts = make_rollouts([3, 1], 2)
    put_in = rollouts.sampled_mask.clone()
    put_in[0, 1] = False
    first, second = completions_of(replace(rollouts, sampled_mask=put_in))
    assert (first.injected.tolist(), second.injected.tolist()) == ([False, True, False], [False])


@pytest.mark.extended
def test_a_waiting_batch_written_down_keeps_the_rubrics_it_was_graded_by(opened) -> None:
    run, _, queue = opened("schedule=one_step_off")
    batch = queue.take()
    rollouts = batch.made.rollouts
    rubrics = [((f"names {place}", 1.0),) for place, _ in enumerate(rollouts.problems)]
    judged = tuple(replace(problem, rubrics=own) for problem, own in zip(rollouts.problems, rubrics))
    batch = replace(batch, made=replace(batch.made, rollouts=replace(rollouts, problems=judged)))
    again = RolloutBatch.from_state(batch.to_state(), queue.maker, run.queue_settings)
    assert [problem.rubrics for problem in again.made.rollouts.problems] == rubrics


def test_a_waiting_batch_written_down_keeps_the_draw_of_its_random_twin(opened) -> None:
    twin = ("truncation=mask_before", "group_filter=drop", "twin=random", "problems_per_step=8", "seed=4")
    run, _, queue = opened("schedule=one_step_off", *twin)
    batch = queue.take()
    again = RolloutBatch.from_state(batch.to_state(), queue.maker, run.queue_settings)
    own = run.group_filter(batch.groups.masked)
    assert not torch.equal(batch.filtered.in_loss, own.in_loss), "the twin draws other groups"
    for one, other in ((again.groups.masked, batch.groups.masked), (again.filtered, batch.filtered)):
        assert torch.equal(one.in_loss, other.in_loss) and torch.equal(one.in_statistics, other.in_statistics)


@pytest.mark.parametrize(("schedule", "ages"), [("sync", [0, 0, 0]), ("one_step_off", [0, 2, 2])])
def test_the_age_of_a_token_is_in_updates_before_the_step(
    schedule: str, ages: list[int], tmp_path: Path, tiny_base: Path
) -> None:
    """Two updates a step: those that the step itself takes make none of its tokens older."""
    folder = run_in_process(tmp_path, *SMALL[:2], f"schedule={schedule}", "updates=two", "budget.amount=3")
    for name in ("rollout/staleness", "rollout/staleness_max"):
        assert [row["metrics"][name] for row in metrics_of(folder)[1:]] == ages, name


@pytest.mark.extended
def test_the_sampler_is_compared_with_the_learner_after_every_sync(opened) -> None:
    run, state, queue = opened("schedule=one_step_off")
    step(run, state, queue, 1e-2)
    assert not state.unproven
    with torch.no_grad():  # a sampler that did not take one of its tensors
        state.session.model.get_output_embeddings().weight.mul_(1.5)
    state.unproven = True
    with pytest.raises(EngineFailure, match="differ by"):
        probe_sync(run.sync_settings, state)


def test_simulated_time_by_hand() -> None:
    """Two batches of 8 s each on the sampler, steps of 5 s on the learner, syncs of 1 s."""
    cost_model = CostModel(decode_step=1.0, decode_token=0.1, read_token=0.01, train_token=0.5, update=2.0, sync=1.0)
    # two places: 3 and 5 begin at 0; 4 begins when the 3 ends and ends at 7; 7 steps, 12 tokens
    assert_close(cost_model.decoding([3, 5, 4], 2), 7 + 1.2, 1e-12, "a place is taken as soon as it is free")
    assert_close(cost_model.decoding([3, 5, 4], 8), 5 + 1.2, 1e-12, "places for all")
    assert cost_model.decoding([], 4) == 0 and cost_model.reading(50) == 0.5 and cost_model.training(10, 3) == 11
    clock = SimulatedClock()
    assert clock.metrics() == {}
    ready = [clock.generate(8.0), clock.generate(8.0)]
    assert ready == [8, 16]
    assert clock.train(5.0, ready[0]) == 13 and clock.train(5.0, ready[1]) == 21
    assert clock.metrics() == {"simulated/generating": 16 / 21, "simulated/training": 10 / 21}


@pytest.mark.extended
def test_what_overlaps_takes_the_longer_of_the_two(opened) -> None:
    """Generation of g and training of t seconds: a step takes g + t one after the other, max(g, t) side by side."""
    times = (
        "cost_model.decode_token=0",
        "cost_model.read_token=0",
        "cost_model.train_token=1e-9",
        "cost_model.sync=0",
        "cost_model.update=0.5",
    )
    rates = {}
    for name in ("sync", "one_step_off"):
        run, state, queue = opened(f"schedule={name}", *times, "cost_model.decode_step=0.01")
        begun, longest = [], []
        for _ in range(8):
            batch = step(run, state, queue)
            begun.append(state.account.simulated_seconds)
            longest.append(0.01 * int(batch.made.rollouts.lengths.max()))
        rates[name] = begun
        if name == "sync":
            expected = torch.tensor(longest).cumsum(0) + 0.5 * torch.arange(1, 9)
        else:  # the learner is the slower one, so it only waits for the first batch
            assert max(longest) < 0.5
            expected = longest[0] + 0.5 * torch.arange(1, 9)
        assert_close(torch.tensor(begun), expected, 1e-5, name)
        signs = queue.metrics()
        assert 0 < signs["simulated/generating"] < 1 and 0 < signs["simulated/training"] <= 1
    assert rates["one_step_off"][-1] < rates["sync"][-1]


@pytest.mark.parametrize("name", ["sync", "one_step_off"])
def test_a_batch_waits_for_the_weights_that_sample_it(opened, name: str) -> None:
    """Batch k of one step off is generated as soon as the sampler is free and has the weights of step k - 2."""
    update, sync = 0.5, 0.25
    times = (
        "cost_model.decode_step=0.001", "cost_model.decode_token=0", "cost_model.read_token=0",
        "cost_model.train_token=1e-9", f"cost_model.update={update}", f"cost_model.sync={sync}",
    )  # fmt: skip
    run, state, queue = opened(f"schedule={name}", *times)
    lag = 1 if name == "sync" else 2
    ready, ended = [], []
    for number in range(6):
        batch = step(run, state, queue)
        weights_at = ended[number - lag] + sync if number >= lag else 0.0
        begins = max(weights_at, ready[-1] if ready else 0.0)
        assert begins == weights_at or number < lag, "the learner is the slower one: every later batch waits for it"
        ready.append(begins + 0.001 * int(batch.made.rollouts.lengths.max()))
        assert_close(batch.ready_at, ready[-1], 1e-5, "begins when its weights have arrived")
        ended.append(max(ready[-1], ended[-1] + sync if ended else 0.0) + update)
        assert_close(state.account.simulated_seconds, ended[-1], 1e-5, "a sync holds up the learner too")
        assert_close(queue.to_state()["weights_at"], ended[-1] + sync, 1e-5, "a resumed run goes on with it")


def test_training_time_counts_what_is_forwarded(opened) -> None:
    run, _, queue = opened("kl=k3_loss", "updates=two_passes", "schedule=sync")
    batch = queue.take()
    tokens = sum(len(batch.rollouts.prompt_of_row(row)) for row in range(batch.rollouts.num_rows))
    tokens += int(batch.rollouts.lengths.sum())
    cost_model = run.cost_model
    # scored twice (old policy, reference), trained twice (two passes of one minibatch)
    by_hand = 2 * tokens * cost_model.read_token + 2 * tokens * cost_model.train_token + 2 * cost_model.update
    assert run.updates.number == 2
    assert_close(training_seconds(run.cost_model, run.training_passes, batch), by_hand, 1e-9, "scores, passes, updates")
    in_halves = replace(run, updates=replace(run.updates, minibatches=2))
    by_hand += 2 * cost_model.update
    assert_close(
        training_seconds(in_halves.cost_model, in_halves.training_passes, batch),
        by_hand,
        1e-9,
        "minibatches are updates, and read nothing twice",
    )


def test_the_histogram_of_ages() -> None:
    signs = staleness_metrics(torch.tensor([0, 0, 1, 2, 3, 4, 7, 12, 30, 30]))
    assert signs["rollout/staleness"] == 8.9 and signs["rollout/staleness_max"] == 30
    shares = {name.removeprefix("staleness/"): share for name, share in signs.items() if name.startswith("staleness/")}
    assert shares == {"0": 0.2, "1": 0.1, "2": 0.1, "3_4": 0.2, "5_8": 0.1, "9_16": 0.1, "17_up": 0.2}
    assert staleness_metrics(torch.zeros(4, dtype=torch.long))["staleness/0"] == 1


def test_batches_due() -> None:
    assert [Sync().batches_due(ready) for ready in (0, 1)] == [1, 0]
    assert [OneStepOff(2).batches_due(ready) for ready in (0, 1, 2)] == [3, 2, 1]
    assert [OffPolicyK(3).batches_due(ready) for ready in (0, 1, 2)] == [3, 0, 0]
    assert OffPolicyK(3).overlaps is False and OneStepOff(1).overlaps and InFlight(0).overlaps is False
    assert not Interruptible(1).keeps_sampler_current and not Interruptible(1).keeps_cache and InFlight(1).keeps_cache
    for build in (lambda: OneStepOff(-1), lambda: OffPolicyK(0), lambda: InFlight(-1)):
        with pytest.raises(ValueError, match="must be at least"):
            build()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("schedule=in_flight", "group_filter=oversample_abort"), "nothing to abort"),
        (("schedule=one_step_off", "baseline=greedy", "scale=none"), "sampled the response is gone"),
        (("schedule=in_flight", "engine=vllm"), "engine=native"),
    ],
)
def test_what_a_schedule_cannot_be_combined_with(overrides: tuple[str, ...], said: str, make_run) -> None:
    with pytest.raises(IncompatibleRun, match=said):
        check_compatible(make_run(*overrides))


def test_stale_tokens_that_nothing_corrects_are_said(make_run) -> None:
    said = "takes them for the learner's own"
    assert any(said in line for line in check_compatible(make_run("schedule=one_step_off", "updates=two")))
    assert not any(said in line for line in check_compatible(make_run("schedule=one_step_off", "correction=tis_token")))
    assert not any(said in line for line in check_compatible(make_run("updates=two")))


def test_more_on_the_way_than_there_are_problems(make_run, tiny_base: Path) -> None:
    run = make_run("schedule=in_flight", "schedule.max_lag=200")
    with pytest.raises(ValueError, match="lower schedule"):
        open_state(run, CPU, None)


def make_hopeless(queue: RolloutQueue) -> None:
    """Give every training problem an answer that no response has."""
    hopeless = tuple(replace(problem, answer="none of these") for problem in queue.maker.problems)
    queue.maker = replace(queue.maker, problems=hopeless)


@pytest.mark.extended
def test_a_stream_that_never_fills_ends_with_a_message(opened) -> None:
    _, _, queue = opened("schedule=in_flight", "group_filter=active", "group_filter.max_rounds=2")
    make_hopeless(queue)
    with pytest.raises(Exhausted, match="carry signal"):
        queue.take()


@pytest.mark.extended
def test_a_batch_that_waits_is_trained_on_before_the_run_ends(opened) -> None:
    run, state, queue = opened("schedule=one_step_off", "group_filter=resample", "group_filter.max_rounds=2")
    first = step(run, state, queue)
    make_hopeless(queue)
    second = step(run, state, queue)  # it was drawn before its problems became hopeless; the third cannot be drawn
    assert set(second.rollouts.weight_version[:, 0].tolist()) == {0} and first is not second
    with pytest.raises(Exhausted, match="carry signal"):
        queue.take()
    with pytest.raises(Exhausted, match="carry signal"):
        again = queue_of(run, state)
        make_hopeless(again)
        again.take()  # and so it does when it is tried again


def _of_another_size(folder: Path, target: Path, step: float, token: float) -> Path:
    """A copy of a run, of four times the groups, both with a tenth of noise on the time that they generated."""
    shutil.copytree(folder, target)
    rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "rollout/groups" in row["metrics"]:
            row["metrics"]["rollout/groups"] *= 4
    (target / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    noise = np.random.default_rng(0)
    for place in (folder, target):
        lines = [json.loads(line) for line in (place / "timing.jsonl").read_text().splitlines()]
        for line, row in zip(lines, metrics_of(place)):
            if "time/generate" in line["timing"]:
                numbers = row["metrics"]
                drawn = numbers["rollout/groups"] * 8 * numbers["rollout/length"]
                exact = numbers["rollout/longest"] * step + drawn * token
                line["timing"]["time/generate"] = exact * float(1 + 0.1 * noise.standard_normal())
        (place / "timing.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return target


@pytest.mark.extended
def test_a_cost_model_is_measured_on_a_run(tmp_path: Path, tiny_base: Path) -> None:
    """Times planted under known numbers are found again; those of a run that generated ahead are refused."""
    folder = run_in_process(tmp_path, "budget.amount=30", "updates=two", "evaluation.every=30")
    planted = CostModel(decode_step=0.02, decode_token=3e-4, read_token=1e-4, train_token=3e-4, update=0.0, sync=0.007)
    size, before, lines = 8, 0, []
    for line in (folder / "timing.jsonl").read_text().splitlines():
        timing, numbers = json.loads(line), metrics_of(folder)[len(lines)]["metrics"]
        sampled, before = numbers["budget/sampled_tokens"] - before, numbers["budget/sampled_tokens"]
        if "time/generate" in timing["timing"]:
            drawn = numbers["rollout/groups"] * size * numbers["rollout/length"]
            trained = drawn + (sampled - drawn) * size
            timing["timing"]["time/generate"] = numbers["rollout/longest"] * 0.02 + drawn * 3e-4
            timing["timing"]["time/train"] = trained * 3e-4
            timing["timing"]["time/sync"] = 0.007
        lines.append(json.dumps(timing))
    (folder / "timing.jsonl").write_text("\n".join(lines) + "\n")
    found = measure([folder])
    for name, value in vars(planted).items():
        assert_close(getattr(found.cost_model, name), value, 1e-6, name)
    assert found.steps == 28 and found.generate_error < 1e-6 and found.train_error < 1e-6
    both = [folder, _of_another_size(folder, tmp_path / "other", 0.02, 3e-4)]
    with_noise = measure(both).cost_model
    assert_close(with_noise.decode_step, 0.02, 3e-3, "told apart by two sizes, with noise of a tenth")
    assert_close(with_noise.decode_token, 3e-4, 5e-5, "and so is what a response costs")
    ahead = run_in_process(tmp_path, "budget.amount=12", "schedule=one_step_off", "evaluation.every=12", name="ahead")
    with pytest.raises(ValueError, match="generated ahead"):
        measure([ahead])
    short = run_in_process(tmp_path, "budget.amount=3", name="short")
    with pytest.raises(ValueError, match="train it for longer"):
        measure([short])
