"""Sampled continuations of partial responses, graded and shaped, for baselines that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.rollout.grading import decode, grade, to_rollouts
from grpo_lab.rollout.groups import GroupMaker
from grpo_lab.tricks.baseline import State
from grpo_lab.types import Bool, Completion, Float, NoiseKey, Request, Rollouts, Sampler, Tensor


class PrefixRollouts:
    """Continues partial responses with the policy that generated the rollouts; implements `baseline.Estimator`.

    PrefixRollouts use the training run's sampling parameters. Those of one state share its prefilled context. Their
    noise is a function of the step, the problem, the continuation's number and the token position. So two states of
    one problem use the same random numbers at the same positions.
    """

    def __init__(
        self,
        maker: GroupMaker,
        step_end: str,
        sampler: Sampler,
        account: ComputeAccount,
        model_flops: ModelFlops,
        rollouts: Rollouts,
    ) -> None:
        self.maker, self.step_end, self.sampler = maker, step_end, sampler
        self.account, self.model_flops = account, model_flops
        self.rollouts, self.step = rollouts, account.steps

    def rewards(self, states: Sequence[State], samples: int, greedy: bool = False) -> Float[Tensor, "K S"]:
        """Shaped rewards of `samples` continuations of each of the K states, float64.

        A truncated continuation counts with its reward, even where `truncation` masks truncated rows of the batch.
        """
        maker, problems, prompts = self.maker, self.rollouts.problems, self.rollouts.prompts
        params = replace(maker.params, temperature=0.0, top_p=1.0) if greedy else maker.params
        requests = [
            Request(
                prompts[state.place],
                NoiseKey(maker.seed, "estimate", self.step, problems[state.place].id, end),
                params,
                state.prefix,
            )
            for state in states
            for end in range(samples)
        ]
        completions = maker.generate(self.sampler, requests)
        drawn = [len(completion.tokens) for completion in completions]
        contexts = [len(prompts[state.place]) + len(state.prefix) for state in states]
        ends = [drawn[place * samples : (place + 1) * samples] for place in range(len(states))]
        self.account.estimated(self.model_flops, contexts, ends)
        whole = [Completion.unsampled(r.prefix, end.stop).continued(end) for r, end in zip(requests, completions)]
        own_problems = [problems[state.place] for state in states]
        answers = to_rollouts(own_problems, [prompts[state.place] for state in states], samples, whole)
        keys = [request.noise for request in requests]
        graded = grade(answers, decode(maker.tokenizer, answers), maker.reward, keys)
        return maker.reward_shaping(graded).reward

    def step_ends(self) -> Bool[Tensor, "N T"]:
        """True on response tokens whose text contains `step_end`, the task's mark of an ended step."""
        rollouts = self.rollouts
        used = set(rollouts.tokens[rollouts.response_mask].tolist())
        ending = [token for token in used if self.step_end in self.maker.tokenizer.decode([token])]
        return torch.isin(rollouts.tokens, torch.tensor(ending, dtype=torch.long)) & rollouts.response_mask
