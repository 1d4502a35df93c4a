"""Sampled continuations of partial responses, graded and shaped, for baselines that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers

from grpo_lab.budget.ledger import Ledger, ModelFlops
from grpo_lab.config.run_config import RunConfig
from grpo_lab.rollout.grading import decode, grade, to_rollouts, tools_for
from grpo_lab.tricks.baseline import State
from grpo_lab.types import Bool, Completion, Float, NoiseKey, Request, Rollouts, Sampler, Tensor


class Continuations:
    """Continues partial responses with the policy that generated the rollouts; implements `baseline.Estimator`.

    Continuations use the training run's sampling parameters. Those of one state share its prefilled context. Their
    noise is a function of the step, the problem, the continuation's number and the token position. So two states of
    one problem use the same random numbers at the same positions.
    """

    def __init__(
        self,
        run: RunConfig,
        sampler: Sampler,
        tokenizer: transformers.PreTrainedTokenizerBase,
        ledger: Ledger,
        model_flops: ModelFlops,
        rollouts: Rollouts,
    ) -> None:
        self.run, self.sampler, self.tokenizer = run, sampler, tokenizer
        self.ledger, self.model_flops = ledger, model_flops
        self.rollouts, self.step = rollouts, ledger.steps

    def rewards(self, states: Sequence[State], samples: int, greedy: bool = False) -> Float[Tensor, "K S"]:
        """Shaped rewards of `samples` continuations of each of the K states, float64.

        A truncated continuation counts with its reward, even where `truncation` masks truncated rows of the batch.
        """
        run, problems, prompts = self.run, self.rollouts.problems, self.rollouts.prompts
        params = replace(run.engine.params, temperature=0.0, top_p=1.0) if greedy else run.engine.params
        requests = [
            Request(
                prompts[state.place],
                NoiseKey(run.seed, "estimate", self.step, problems[state.place].id, end),
                params,
                state.prefix,
            )
            for state in states
            for end in range(samples)
        ]
        completions = run.truncation.generate(self.sampler, requests, tools_for(self.tokenizer))
        drawn = [len(completion.tokens) for completion in completions]
        contexts = [len(prompts[state.place]) + len(state.prefix) for state in states]
        ends = [drawn[place * samples : (place + 1) * samples] for place in range(len(states))]
        self.ledger.estimated(self.model_flops, contexts, ends)
        whole = [_after(request.prefix, completion) for request, completion in zip(requests, completions)]
        asked = [problems[state.place] for state in states]
        answers = to_rollouts(asked, [prompts[state.place] for state in states], samples, whole)
        keys = [request.noise for request in requests]
        graded = grade(answers, decode(self.tokenizer, answers), run.reward, keys)
        return run.reward_shaping(graded).reward

    def step_ends(self) -> Bool[Tensor, "N T"]:
        """True on response tokens whose text contains the task's `step_end`."""
        rollouts = self.rollouts
        used = set(rollouts.tokens[rollouts.response_mask].tolist())
        ending = [token for token in used if self.run.task.step_end in self.tokenizer.decode([token])]
        return torch.isin(rollouts.tokens, torch.tensor(ending, dtype=torch.long)) & rollouts.response_mask


def _after(prefix: tuple[int, ...], completion: Completion) -> Completion:
    """The whole response: `prefix` followed by the sampled continuation."""
    before = Completion(prefix, (0.0,) * len(prefix), (0,) * len(prefix), completion.stop)
    return before.continued(completion)
