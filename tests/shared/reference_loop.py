"""The training loop written a second time, as plainly as it can be, to compare a recording of the real one with.

`Reference` computes the gradient of each optimiser step from the responses and the weights alone: each response is read
by itself by transformers' own model in float64, neither packed nor padded nor shared, and the formulas are those of
reference_formulas.py and reference_advantages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import reference_formulas as formulas
import torch
from reference_advantages import BASELINE, SCALE
from reference_formulas import F64, Response, formula, groups_of, token_weights
from reference_recording import Recording, Step, Weights, gradient_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from grpo_lab.config.run_config import RunConfig
from grpo_lab.seeding import rollout_uniforms


@dataclass
class Given:
    """What baselines that generate were told by the policy, and which tokens end a step of the reasoning.

    For those that remember: the steps before this one with their judged responses, and the learner's log-probs of a
    response before the updates of a step.
    """

    estimates: dict[tuple[int, tuple[int, ...]], float]
    step_ends: set[int]
    step: Step
    earlier: Callable[[], list[tuple[Step, list[Response]]]]
    read: Callable[[Step, Response], Tensor]

    def value_of(self, row: Response, start: int) -> float:
        return self.estimates[row.group, tuple(row.tokens[:start])]


class Reference:
    """The updates of a recorded run, computed again. `run` may be another than the recorded one, to see it differ."""

    def __init__(self, recording: Recording, run: RunConfig | None = None) -> None:
        self.recording, self.run = recording, run or recording.run
        self.temperature = self.run.engine.temperature

    @cached_property
    def model(self) -> nn.Module:
        """transformers' model in float64, for whichever weights are looked at."""
        return AutoModelForCausalLM.from_pretrained(self.run.model.resolve(), dtype=F64).eval()

    def holding(self, weights: Weights) -> nn.Module:
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        return self.model

    def read(self, model: nn.Module, row: Response) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of each token of one response [T]."""
        scores = model(input_ids=torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1]
        logprobs = (scores / self.temperature).log_softmax(dim=-1)
        places = torch.arange(len(row.tokens))
        return logprobs[places, torch.tensor(row.tokens)], -(logprobs.exp() * logprobs).sum(dim=-1)

    def collision(self, model: nn.Module, row: Response) -> Tensor:
        """The squared probabilities of all tokens where each of the response was drawn, summed [T]."""
        scores = model(input_ids=torch.tensor([row.prompt + row.tokens])).logits[0, len(row.prompt) - 1 : -1]
        return (scores / self.temperature).softmax(dim=-1).square().sum(dim=-1)

    def values(self, model: nn.Module, weights: Weights, row: Response) -> Tensor:
        """A critic's value of the state before each token [T], `weights` its head's."""
        states = model.base_model(input_ids=torch.tensor([row.prompt + row.tokens])).last_hidden_state
        return states[0, len(row.prompt) - 1 : -1] @ weights["head.weight"][0] + weights["head.bias"]

    # --- the stages of a step ---

    def responses(self, step: Step) -> list[Response]:
        """The responses of the batch, one by one, with their rewards."""
        run, batch, rollouts = self.run, step.batch, step.batch.rollouts
        assert run.reward.correct in (0, 1) and type(run.reward).__name__ == "Strict"
        # Where a batch waits it was drawn earlier; no case beside such a schedule looks at the time.
        assert not getattr(run.reward_shaping, "begins_at", 0) or type(run.schedule).__name__ == "Sync"
        drawn_at = step.number / run.budget.amount
        rows = []
        for place, text in enumerate(batch.texts):
            length, problem = int(rollouts.response_mask[place].sum()), rollouts.problems[place // run.group_size]
            finished = bool(rollouts.finished[place])
            right = finished and "#" in text and text.rsplit("#", 1)[1] == problem.answer
            rows.append(
                Response(
                    group=place // run.group_size,
                    problem=problem.id,
                    prompt=list(rollouts.prompt_of_row(place)),
                    tokens=rollouts.tokens[place, :length].tolist(),
                    sampled=rollouts.sampled_mask[place, :length],
                    sampler=rollouts.sampler_logprobs[place, :length].double(),
                    stamps=rollouts.weight_version[place, :length].tolist(),
                    version=step.number * run.updates.number,  # of the learner, if no update was skipped
                    finished=finished,
                    right=right,
                    wanted=problem.target_length,
                    reward=run.reward.correct if right else run.reward.wrong,
                    progress=drawn_at,
                )
            )
            rows[-1].parts = {"outcome": rows[-1].reward}
        return rows

    def judge(self, rows: list[Response]) -> None:
        """Shaped rewards, and which responses are counted and trained."""
        run = self.run
        for group in groups_of(rows):
            added = formula(formulas.SHAPING, run.reward_shaping)(run.reward_shaping, group)
            for row, more in zip(group, added):
                row.reward += more
                row.parts["shaping"] = more
                if not row.finished:
                    row.counted, row.trained = formula(formulas.TRUNCATION, run.truncation)
            if not formula(formulas.FILTER, run.group_filter)(run.group_filter, group):
                for row in group:
                    row.counted = row.trained = False

    def reference_weights(self, step: Step) -> Weights:
        """The policy that the KL tie is tied to in this step."""
        before, axis = [one.learner for one in self.recording.steps[: step.number + 1]], self.run.reference
        name = type(axis).__name__
        if name == "Frozen":
            return before[0]
        if name == "Reset":
            return before[step.number // axis.every * axis.every]
        assert name == "Ema", f"the reference loop does not know how {name} moves"
        mixed = {key: value.double() for key, value in before[0].items()}
        for weights in before[1:]:
            mixed = {key: axis.decay * value + (1 - axis.decay) * weights[key] for key, value in mixed.items()}
        return mixed

    @torch.no_grad()
    def compare_policies(self, step: Step, rows: list[Response]) -> None:
        """Log-probs of learner, reference and critic before the updates; corrections, rejections, charges."""
        run = self.run
        model = self.holding(step.learner)
        for row in rows:
            row.prox, row.entropy = self.read(model, row)
            row.collision = self.collision(model, row)
        model = self.holding(self.reference_weights(step))
        for row in rows:
            row.ref = self.read(model, row)[0]
        if step.critic is not None:
            for row, values in zip(rows, self.old_values(step, rows)):
                row.values = values
        for row in rows:
            gap = (row.prox - row.sampler)[row.sampled]
            row.weight, row.stays = torch.ones_like(row.prox), row.sampled.clone()
            row.weight[row.sampled] = formula(formulas.CORRECTION, run.correction)(run.correction, gap)
            row.stays[row.sampled] = formulas.stays(run.rejection, gap, row.sampler[row.sampled])
            if not row.stays.any():
                row.trained = False
                row.counted &= run.rejection.rejected_in_statistics
            row.charges = torch.zeros_like(row.prox)
            if run.kl.shapes_reward:
                charges = formula(formulas.CHARGES, run.kl)(self.kl(step), self.old_of(row), row.ref)
                row.charges[row.sampled] = charges[row.sampled]
                row.parts["kl"] = float(row.charges.sum())
                row.reward += row.parts["kl"]

    def kl(self, step: Step) -> Any:
        """The KL option with the coefficient that it had in a step."""
        return replace(self.run.kl, kl_coef=step.kl_coef) if self.run.kl.adapts else self.run.kl

    def old_of(self, row: Response, now: Tensor | None = None) -> Tensor:
        """Log-probs below the ratio, in an update in which the learner's are `now`."""
        name = type(self.run.old_policy).__name__
        if name == "LogLinear":
            assert now is not None and row.version is not None, "it exists in updates only"
            ages = [(row.version - stamp) / self.run.updates.number for stamp in row.stamps]
            way = torch.tensor([(age - 1) / age if age > 1 else 0.0 for age in ages], dtype=F64)
            return (1 - way) * row.sampler + way * now.detach()
        return {"Recomputed": row.prox, "Sampler": row.sampler}[name]

    def choose_tokens(self, step: Step, rows: list[Response]) -> None:
        """The tokens of the loss."""
        learns = step.critic is None or step.number >= self.run.critic.pretrain_steps
        for row in rows:
            row.in_loss = row.stays & row.trained & learns
        if type(self.run.entropy).__name__ == "HighEntropyTokens":
            entropies = torch.cat([row.entropy[row.sampled] for row in rows]).sort(descending=True).values
            bound = entropies[max(1, round(self.run.entropy.share * len(entropies))) - 1]
            for row in rows:
                row.in_loss &= row.entropy >= bound

    def credit(self, step: Step, rows: list[Response]) -> None:
        """Advantages of each token."""
        run, state = self.run, self.recording.state
        ends = state.tokenizer(run.task.step_end, add_special_tokens=False)["input_ids"]
        given = Given(step.estimates, set(ends), step, lambda: self.earlier(step), self.learner_of)
        formula(BASELINE, run.baseline)(run.baseline, rows, given)
        formula(SCALE, run.scale)(run.scale, rows)
        for row in rows:
            each = 0.0 if row.advantages is None else row.advantages
            row.advantages = torch.ones_like(row.prox) * each
        for row, own in zip(rows, formula(formulas.TOKEN_CREDIT, run.token_credit)(run.token_credit, rows)):
            row.advantages = own

    def earlier(self, step: Step) -> list[tuple[Step, list[Response]]]:
        """The steps before, with their responses; what is charged for KL is not looked at."""
        assert not self.run.kl.shapes_reward
        found = [(before, self.responses(before)) for before in self.recording.steps[: step.number]]
        for _, rows in found:
            self.judge(rows)
        return found

    @torch.no_grad()
    def learner_of(self, step: Step, row: Response) -> Tensor:
        """The log-probs [T] of a response under the learner before the updates of a step."""
        return self.read(self.holding(step.learner), row)[0]

    def prepared(self, step: Step) -> list[Response]:
        """The responses of a step with all that the loss reads."""
        rows = self.responses(step)
        self.judge(rows)
        self.compare_policies(step, rows)
        self.choose_tokens(step, rows)
        self.credit(step, rows)
        return rows

    # --- the updates of a step ---

    def parts(self, rows: list[Response], minibatches: int, passes: int) -> list[list[Response]]:
        """The responses of each optimiser step: whole groups in their order, as often as there are passes."""
        size = self.run.problems_per_step // minibatches
        first = [range(start, start + size) for start in range(0, self.run.problems_per_step, size)]
        return [[row for row in rows if row.group in groups] for groups in first * passes]

    def gradients(self, step: Step) -> list[Weights | None]:
        """The gradient of each optimiser step; None for one without a token."""
        rows, updates = self.prepared(step), self.run.updates
        parts = self.parts(rows, updates.minibatches, updates.passes)
        assert len(parts) == len(step.updates), f"{len(step.updates)} updates, {len(parts)} expected"
        return [
            self.gradient(step, number, rows, part, update.weights)
            for number, (part, update) in enumerate(zip(parts, step.updates))
        ]

    def gradient(
        self, step: Step, number: int, rows: list[Response], part: list[Response], weights: Weights
    ) -> Weights | None:
        run, model = self.run, self.holding(weights)
        mask = {"Original": "sampled", "Survivors": "in_loss"}[type(run.denominator).__name__]
        each = token_weights(run.aggregation, part, [int(getattr(row, mask).sum()) for row in part])
        if not any(row.in_loss.any() for row in part):
            return None
        read = [self.read(model, row) for row in part]
        marked = self.marked(step, number, rows, part, [now.detach() for now, _ in read])
        loss = torch.zeros((), dtype=F64)
        for row, weight, (now, entropy), marks in zip(part, each, read, marked):
            if not row.in_loss.any():
                continue
            old, tokens = self.old_of(row, now), row.in_loss
            if run.old_policy.interpolates:
                gap = (old - row.sampler)[tokens]
                row.weight[tokens] = formula(formulas.CORRECTION, run.correction)(run.correction, gap)
            log_ratio = formula(formulas.IMPORTANCE, run.importance)(now, old, tokens)
            surrogate = formula(formulas.SURROGATE, run.surrogate)
            lost = surrogate(run.surrogate, now, log_ratio, row.advantages, tokens, marks) * row.weight
            keeps = torch.ones_like(tokens)
            inside = [values[tokens] for values in (now.detach(), row.sampler, row.advantages)]
            keeps[tokens] = formula(formulas.UPDATE_MASK, run.update_mask)(run.update_mask, *inside)
            lost = lost * keeps
            lost = lost + formula(formulas.KL, run.kl)(self.kl(step), now, old, row.ref)
            lost = lost + formula(formulas.ENTROPY, run.entropy)(entropy, step.entropy_coef)
            loss = loss + weight * lost[tokens].sum()
        if type(run.entropy).__name__ == "PositiveNll":
            right = [-now[row.in_loss] for row, (now, _) in zip(part, read) if row.right and row.in_loss.any()]
            loss = loss + (run.entropy.coef * torch.cat(right).mean() if right else 0.0)
        loss.backward()
        return gradient_of(model)

    def marked(
        self, step: Step, number: int, rows: list[Response], part: list[Response], now: list[Tensor]
    ) -> list[Tensor | None]:
        """The tokens of the optimiser step that the surrogate chose."""
        run = self.run
        if type(run.surrogate).__name__ not in formulas.MARKS:
            return [None] * len(part)
        again = number // run.updates.minibatches
        noise = rollout_uniforms(step.batch.rollouts, run.seed, f"mark/{again}" if again else "mark", step.number)
        place_of = {id(row): place for place, row in enumerate(rows)}
        ratio_of, parts = formula(formulas.IMPORTANCE, run.importance), []
        for row, values in zip(part, now):
            ratio = ratio_of(values, self.old_of(row, values), row.in_loss).exp()
            drawn = noise[place_of[id(row)], : len(values)]
            parts.append([each[row.in_loss] for each in (values, ratio, row.advantages, drawn)])
        found = formula(formulas.MARKS, run.surrogate)(run.surrogate, *map(torch.cat, zip(*parts)))
        chosen = torch.zeros(sum(len(values) for values, *_ in parts), dtype=torch.bool).index_fill(0, found, True)
        marks = []
        for row, own in zip(part, chosen.split([len(values) for values, *_ in parts])):
            marks.append(torch.zeros_like(row.in_loss))
            marks[-1][row.in_loss] = own
        return marks

    # --- the critic ---

    @cached_property
    def trunk(self) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.run.model.resolve(), dtype=F64).eval()

    def valuing(self, weights: Weights) -> tuple[nn.Module, Weights]:
        """A model whose hidden states, and a head whose values, are the critic's."""
        inner = {name: value for name, value in weights.items() if not name.startswith("head.")}
        self.trunk.base_model.load_state_dict(inner)
        self.trunk.zero_grad()
        head = {name: value.double().requires_grad_() for name, value in weights.items() if name.startswith("head.")}
        return self.trunk, head

    @torch.no_grad()
    def old_values(self, step: Step, rows: list[Response]) -> list[Tensor]:
        trunk, head = self.valuing(step.critic)
        return [self.values(trunk, head, row) for row in rows]

    def critic_gradients(self, step: Step) -> list[Weights]:
        """The gradient of each of the critic's optimiser steps; one without a counted response is not taken.

        loss = mean over tokens of max((v - target)^2, (clip(v, old - width, old + width) - target)^2) / 2
        """
        plan, rows, found = self.run.critic, self.prepared(step), []
        owns_trunk = type(plan).__name__ == "SeparateModel"
        for part in self.parts(rows, plan.minibatches, plan.passes):
            counted = [row for row in part if row.counted and row.sampled.any()]
            tokens = sum(int(row.sampled.sum()) for row in counted)
            if not tokens:
                continue
            trunk, head = self.valuing(step.critic_updates[len(found)].weights)
            loss = torch.zeros((), dtype=F64)
            for row in counted:
                values = self.values(trunk, head, row)
                target = row.centred + row.values if row.target is None else row.target
                lost = (values - target) ** 2
                if plan.value_clip:
                    held = torch.clamp(values, row.values - plan.value_clip, row.values + plan.value_clip)
                    lost = torch.maximum(lost, (held - target) ** 2)
                loss = loss + lost[row.sampled].sum() / 2 / tokens
            loss.backward()
            gradient = gradient_of(trunk.base_model)
            if not owns_trunk:
                gradient = {name: torch.zeros_like(value) for name, value in gradient.items()}
            found.append(gradient | {name: value.grad for name, value in head.items()})
        return found

    # --- the sampler ---

    @torch.no_grad()
    def sampled_again(self, step: Step, off_by: int = 0) -> list[Tensor]:
        """Log-probs of each response's sampled tokens under the weights that their stamps name.

        `off_by` reads each stamp as that of so many syncs later; the last there are, where there are none so late.
        """
        order = sorted(self.recording.versions)
        rows = self.responses(step)
        for row in rows:
            places = [min(max(order.index(stamp) + off_by, 0), len(order) - 1) for stamp in row.stamps]
            row.stamps = [order[place] for place in places]
        if type(self.run.schedule).__name__ == "InFlight":
            return [self.over_a_kept_cache(row)[row.sampled] for row in rows]
        found = [torch.zeros(len(row.tokens), dtype=F64) for row in rows]
        for stamp in sorted({stamp for row in rows for stamp in row.stamps}):
            model = self.holding(self.recording.versions[stamp])
            for row, values in zip(rows, found):
                own = torch.tensor([one == stamp for one in row.stamps])
                if own.any():
                    values[own] = self.read(model, row)[0][own]
        return [values[row.sampled] for row, values in zip(rows, found)]

    def over_a_kept_cache(self, row: Response) -> Tensor:
        """The same where what was read stays as the weights of that moment left it.

        What draws a token reads the one before it. A response into which text was put is read anew from its beginning.
        """
        text, found = row.prompt + row.tokens, torch.zeros(len(row.tokens), dtype=F64)
        cache, read, start = DynamicCache(config=self.model.config), 0, 0
        while start < len(row.tokens):
            if not row.sampled[start]:
                cache, read, start = DynamicCache(config=self.model.config), 0, start + 1
                continue
            stop = start + 1
            while stop < len(row.tokens) and row.sampled[stop] and row.stamps[stop] == row.stamps[start]:
                stop += 1
            model = self.holding(self.recording.versions[row.stamps[start]])
            until = len(row.prompt) + stop - 1
            scores = model(input_ids=torch.tensor([text[read:until]]), past_key_values=cache, use_cache=True).logits[0]
            logprobs = (scores[start - stop :] / self.temperature).log_softmax(dim=-1)
            found[start:stop] = logprobs[torch.arange(stop - start), torch.tensor(row.tokens[start:stop])]
            read, start = until, stop
        return found
