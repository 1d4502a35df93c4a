"""The order of stages that the tests' helper `inputs_of` takes is that of the real loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import Scene, assert_close, inputs_of
from short_runs import run_in_process
from test_reference_loop import CUT, LAGGED, PUT_IN, SHORT
from torch import Tensor

from grpo_lab import loop
from grpo_lab.learner import update as learner
from grpo_lab.policy.batching import StepInputs
from grpo_lab.policy.critic import LiveCritic
from grpo_lab.rollout.queue import RolloutBatch
from grpo_lab.run import state

THROWN = "rejection=token_k1 rejection.low=0.9 rejection.high=1.1"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides",
    [
        f"{LAGGED} {CUT} {THROWN} group_filter=drop truncation=mask_before reward_shaping=soft_overlong "
        "correction=tis_token kl=k1_reward kl.kl_coef=0.3",
        f"{LAGGED} {PUT_IN} {THROWN} old_policy=sampler baseline=batch_mean_tokens scale=batch_std_tokens kl=k3_loss",
        f"{LAGGED} {CUT} {THROWN} truncation=mask_before baseline=gae scale=batch_std_tokens kl=k1_reward",
    ],
)
def test_the_helper_takes_the_stages_as_the_loop_does(
    overrides: str, tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loop cuts into updates is what the helper makes of the same rollouts, rewards and log-probs."""
    made, read, values = learner.make_minibatch, state.rollout_logprobs, LiveCritic.values
    count, train = RolloutBatch.count, loop.train
    steps: list[dict[str, Any]] = []
    runs = []

    def training(run: Any, *rest: Any) -> None:
        runs.append(run)
        train(run, *rest)

    def counting(batch: RolloutBatch, *account: Any) -> None:
        steps.append({"batch": batch.groups, "logprobs": []})
        count(batch, *account)

    def reading(*asked: Any, **named: Any) -> Any:
        found = read(*asked, **named)
        steps[-1]["logprobs"].append(found[0])
        return found

    def valuing(critic: LiveCritic, *asked: Any) -> Tensor:
        steps[-1]["values"] = values(critic, *asked)
        return steps[-1]["values"]

    def cutting(inputs: StepInputs, *rest: Any) -> Any:
        steps[-1]["inputs"] = inputs
        return made(inputs, *rest)

    for owner, name, wrapper in (
        (loop, "train", training), (RolloutBatch, "count", counting), (state, "rollout_logprobs", reading),
        (LiveCritic, "values", valuing), (learner, "make_minibatch", cutting),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, wrapper)
    run_in_process(tmp_path, *SHORT.split(), *overrides.split(), checked=0)
    (run,) = runs
    assert len(steps) == 3
    critics = {id(step["batch"].rollouts): step.get("values") for step in steps}
    monkeypatch.setattr(helpers, "critic_values", lambda rollouts: critics[id(rollouts)])
    thrown = 0
    for step in steps:
        rollouts, (recomputed, reference) = step["batch"].rollouts, step["logprobs"]
        scene = Scene(rollouts, step["batch"].graded, recomputed, recomputed, reference)
        ours, theirs = inputs_of(run, scene), step["inputs"]
        assert ours.loss_mask.equal(theirs.loss_mask)
        assert_close(ours.advantages, theirs.advantages, 1e-6, "advantages")
        assert_close(ours.old_logprobs, theirs.old_logprobs, 0.0, "old policy")
        assert_close(ours.correction_weights, theirs.correction_weights, 0.0, "correction")
        assert_close(ours.ref_logprobs, theirs.ref_logprobs, 0.0, "reference")
        thrown += int((rollouts.sampled_mask & ~theirs.loss_mask).sum())
    assert thrown > 0
