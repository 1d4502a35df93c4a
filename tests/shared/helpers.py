"""What the tests of the loss share: one tolerance check, and builders of float64 records from plain lists.

A `Scene` is one optimiser step before any trick has looked at it. Its token ids are addresses: the token in
row i, column t has the id i * T + t, so `values.flatten()[batch.tokens]` finds a microbatch's entries of any
[N, T] tensor however the rows were sorted and cut.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import RunConfig
from grpo_lab.learner.loss import mark_tokens, policy_loss
from grpo_lab.learner.update import scaled
from grpo_lab.policy.batching import StepInputs, make_minibatch, totals_of
from grpo_lab.rollout.continuations import PrefixRollouts
from grpo_lab.rollout.groups import GroupMaker
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.rollout.stream import open_queue
from grpo_lab.run.state import RunState
from grpo_lab.seeding import rollout_uniforms
from grpo_lab.tricks.aggregation import SequenceMean
from grpo_lab.tricks.baseline import Baseline, Credit, GroupMean, State, rewards_by_token
from grpo_lab.tricks.convention import Singleton
from grpo_lab.tricks.correction import NoCorrection
from grpo_lab.tricks.denominator import Original
from grpo_lab.tricks.entropy import NoEntropy
from grpo_lab.tricks.group_filter import Keep, has_signal
from grpo_lab.tricks.importance import Token
from grpo_lab.tricks.kl import NoKl
from grpo_lab.tricks.old_policy import Recomputed
from grpo_lab.tricks.rejection import NoRejection
from grpo_lab.tricks.reward_shaping import NoShaping
from grpo_lab.tricks.scale import GroupStd, NoScale, Scale
from grpo_lab.tricks.surrogate import Ppo
from grpo_lab.tricks.token_credit import NoTokenCredit
from grpo_lab.tricks.truncation import Score
from grpo_lab.tricks.twin import NoTwin
from grpo_lab.tricks.update_mask import NoUpdateMask
from grpo_lab.types import Batch, Graded, Microbatching, Problem, Rollouts, to_groups

PACKAGE = Path(__file__).parents[2] / "grpo_lab"
F64 = torch.float64
ONE_MICROBATCH = 10**9


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def mlflow_server(store: Path | str, folder: Path, port: int) -> Iterator[None]:
    """A real MLflow server over a SQLite file or a database's address, its artifacts in `folder`, once it answers."""
    uri = store if isinstance(store, str) else f"sqlite:///{store}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1",
        "--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}, cwd=folder,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.2)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended; its workers may outlive the first process
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def assert_close(actual: Any, expected: Any, tolerance: float, why: str) -> None:
    """Same shape, and no entry further than `tolerance` from what is expected, in the entries' own unit."""
    have, want = (torch.as_tensor(values, dtype=F64).detach() for values in (actual, expected))
    assert have.shape == want.shape, f"{why}: shape {tuple(have.shape)}, expected {tuple(want.shape)}"
    gap = (have - want).abs().max().item() if have.numel() else 0.0
    assert gap <= tolerance, f"{why}: off by {gap:.3e}, allowed {tolerance:.0e}\n{have}\nexpected\n{want}"


@cache
def composed(*overrides: str) -> tuple[DictConfig, dict[str, str]]:
    """`compose_with_choices` of these overrides, composed once in a process; not to be changed."""
    return compose_with_choices(overrides)


@contextlib.contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Within, no shape is checked: it takes half of the time of what only repeats calls that are checked elsewhere."""
    import jaxtyping  # make gpu uses this file where it is not installed

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


# --- rewards and advantages ---------------------------------------------------------------------------------


def make_graded(
    reward: Sequence[Sequence[float]],
    *,
    correctness: Sequence[Sequence[float]] | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    sampled_lengths: Sequence[Sequence[int]] | None = None,
    truncated: Sequence[Sequence[bool]] | None = None,
    in_statistics: Sequence[Sequence[bool]] | None = None,
    in_loss: Sequence[Sequence[bool]] | None = None,
    target_length: Sequence[Sequence[int]] | None = None,
    progress: Sequence[float] | None = None,
    logprob: Sequence[Sequence[float]] | None = None,
    dtype: torch.dtype = F64,
) -> Graded:
    """A record of P groups of G rewards; rows are finished, in the statistics and the loss, all their tokens sampled,
    and have no target length, unless given otherwise. `progress`: the share of the budget spent when each group was
    drawn."""
    values = torch.tensor(reward, dtype=dtype)

    def flags(given: Sequence[Sequence[bool]] | None, default: bool) -> Tensor:
        return torch.full(values.shape, default) if given is None else torch.tensor(given, dtype=torch.bool)

    right = values.clone() if correctness is None else torch.tensor(correctness, dtype=dtype)
    whole = torch.ones(values.shape, dtype=torch.long) if lengths is None else torch.tensor(lengths)
    return Graded(
        correctness=right,
        reward=values,
        components={"outcome": values},
        lengths=whole,
        sampled_lengths=whole if sampled_lengths is None else torch.tensor(sampled_lengths),
        truncated=flags(truncated, False),
        in_statistics=flags(in_statistics, True),
        in_loss=flags(in_loss, True),
        target_length=None if target_length is None else torch.tensor(target_length),
        progress=None if progress is None else torch.tensor(progress, dtype=F64)[:, None].expand(values.shape),
        logprob=None if logprob is None else torch.tensor(logprob, dtype=F64),
    )


def advantages_of(graded: Graded, baseline: Baseline | None = None, scale: Scale | None = None) -> Tensor:
    """[P, G]; the group mean is subtracted and nothing divided unless told otherwise."""
    return (scale or NoScale())((baseline or GroupMean(Singleton.zero))(graded), graded)


# --- one optimiser step -------------------------------------------------------------------------------------


def make_rollouts(
    lengths: Sequence[int],
    group_size: int,
    *,
    width: int | None = None,
    sampler: Tensor | None = None,
    prompts: Sequence[tuple[int, ...]] | None = None,
    tokens: Tensor | None = None,
) -> Rollouts:
    """Responses of these lengths, padded to `width`; token ids are addresses unless given."""
    rows, width = len(lengths), width or max(lengths)
    mask = torch.arange(width)[None, :] < torch.tensor(list(lengths))[:, None]
    groups = rows // group_size
    return Rollouts(
        problems=tuple(Problem(index, "", "", 1) for index in range(groups)),
        prompts=tuple(prompts) if prompts else ((1,),) * groups,
        group_size=group_size,
        tokens=torch.arange(rows * width).reshape(rows, width) if tokens is None else tokens,
        response_mask=mask,
        sampled_mask=mask,
        sampler_logprobs=torch.zeros(rows, width, dtype=F64) if sampler is None else sampler,
        weight_version=torch.zeros(rows, width, dtype=torch.long),
        finished=torch.ones(rows, dtype=torch.bool),
        looped=torch.zeros(rows, dtype=torch.bool),
    )


@dataclass(frozen=True)
class Scene:
    """One optimiser step before the tricks: what was generated, how it was graded, and all log-probs."""

    rollouts: Rollouts
    graded: Graded
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor


def random_scene(
    seed: int, problems: int, group_size: int, longest: int, *, padding: int = 0, junk: float = 0.0
) -> Scene:
    """Random lengths, rewards, truncations and log-probs, off-policy enough for clips to act.

    What is on the tokens does not depend on `padding` or `junk`: `padding` widens every tensor and `junk` is
    written where no token is.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, width = problems * group_size, longest + padding

    def uniform() -> Tensor:
        return torch.rand(rows, longest, dtype=F64, generator=generator)

    lengths = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
    reward = torch.tensor([0.0, 1.0, 0.7, -0.1], dtype=F64)[torch.randint(4, (rows,), generator=generator)]
    truncated = torch.rand(rows, generator=generator) < 0.3
    logprobs = -2 * uniform() - 0.01
    tensors = [logprobs]
    for spread in (0.5, 0.5, 1.0):  # old, sampler, reference
        tensors.append((logprobs + spread * (2 * uniform() - 1)).clamp(max=-1e-3))
    wide = [torch.full((rows, width), junk, dtype=F64) for _ in tensors]
    mask = make_rollouts(lengths, group_size, width=width).sampled_mask
    for target, values in zip(wide, tensors):
        target[:, :longest] = values
        target[~mask] = junk
    logprobs, old, sampler, ref = wide
    graded = make_graded(
        to_groups(reward, group_size).tolist(),
        correctness=to_groups((reward > 0.5).to(F64), group_size).tolist(),
        lengths=to_groups(torch.tensor(lengths), group_size).tolist(),
        truncated=to_groups(truncated, group_size).tolist(),
        target_length=[[longest // 2] * group_size] * problems,
        progress=[(place + 1) / (problems + 1) for place in range(problems)],
        logprob=to_groups(torch.where(mask, sampler, 0.0).sum(dim=1), group_size).tolist(),
    )
    return Scene(make_rollouts(lengths, group_size, width=width, sampler=sampler), graded, logprobs, old, ref)


def make_run(**options: Any) -> RunConfig:
    """A RunConfig with the slots of the loss alone, the plain option where none is given; no Hydra."""
    run = object.__new__(RunConfig)
    plain = {
        "reward_shaping": NoShaping(),
        "truncation": Score(),
        "group_filter": Keep(),
        "old_policy": Recomputed(),
        "correction": NoCorrection(),
        "rejection": NoRejection(),
        "baseline": GroupMean(Singleton.zero),
        "scale": GroupStd(0, 1e-6, False, Singleton.zero),
        "token_credit": NoTokenCredit(),
        "importance": Token(log_ratio_limit=20.0),
        "surrogate": Ppo(clip_low=0.2, clip_high=0.2),
        "update_mask": NoUpdateMask(),
        "aggregation": SequenceMean(0.0),
        "denominator": Original(),
        "kl": NoKl(),
        "entropy": NoEntropy(),
        "twin": NoTwin(),
    }
    assert options.keys() <= plain.keys(), f"no slots of the loss: {options.keys() - plain.keys()}"
    for slot, option in (plain | options).items():
        object.__setattr__(run, slot, option)  # RunConfig is frozen
    return run


class Endings:
    """The policy of a scene as a baseline may ask it; the same whatever the padding.

    Of `samples` ends of a state of problem p with n tokens, the first ((p + n) // 2 + 1) % (samples + 1) earn 1 and
    the others 0. Steps of the reasoning end with every second token.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    def rewards(self, states: Sequence[State], samples: int, greedy: bool = False) -> Tensor:
        problems = [self.rollouts.problems[state.place].id for state in states]
        right = [((id + len(state.prefix)) // 2 + 1) % (samples + 1) for id, state in zip(problems, states)]
        return (torch.arange(samples)[None, :] < torch.tensor(right)[:, None]).to(F64)

    def step_ends(self) -> Tensor:
        every_second = torch.arange(self.rollouts.tokens.shape[1]) % 2 == 1
        return self.rollouts.response_mask & every_second[None, :]


def critic_values(rollouts: Rollouts) -> Tensor:
    """What a critic says of each state of a scene: somewhere between 0 and 1, the same whatever the padding."""
    first = torch.tensor([problem.id for problem in rollouts.problems]).repeat_interleave(rollouts.group_size)
    member = torch.arange(rollouts.group_size).repeat(len(rollouts.problems))
    place = 5 * first[:, None] + 3 * member[:, None] + torch.arange(rollouts.tokens.shape[1])[None, :]
    return torch.where(rollouts.sampled_mask, 0.5 + 0.5 * torch.sin(0.9 * place.to(F64)), 0.0)


def collision_of(logprobs: Tensor) -> Tensor:
    """Sums of squared probabilities where these tokens were drawn: the rest of each softmax on three other tokens."""
    p = logprobs.exp()
    return p**2 + (1 - p) ** 2 / 3


def _refilled(run: RunConfig, scene: Scene) -> Scene:
    """The groups of a scene that a filter which refills would have filled the batch with; all, under any other."""
    if not run.group_filter.refills:
        return scene
    cut = run.truncation(run.reward_shaping(scene.graded))
    places = has_signal(cut, run.group_filter.signal)
    size = scene.rollouts.group_size
    rows = [place * size + member for place in places for member in range(size)]
    return Scene(
        scene.rollouts.choose(places),
        scene.graded.choose(places),
        scene.logprobs,  # looked up by address
        scene.old_logprobs[rows],
        scene.ref_logprobs[rows],
    )


def entropy_of(logprobs: Tensor) -> Tensor:
    """Entropies of the scale of one, on both sides of minus the log-prob."""
    return 0.3 - 0.5 * logprobs


def inputs_of(run: RunConfig, scene: Scene) -> StepInputs:
    """Shape, cut, filter, correct, reject, charge, centre, scale and credit, as the training loop does, in float64.

    A token's entropy is taken to be minus its old log-prob, which is on the scale of one; for token credit, which reads
    both, it is `entropy_of`.
    """
    scene = _refilled(run, scene)
    rollouts, mask = scene.rollouts, scene.rollouts.sampled_mask
    filtered = run.group_filter(run.truncation(run.reward_shaping(scene.graded)))
    mismatch = scene.old_logprobs, rollouts.sampler_logprobs, mask
    old_logprobs = run.old_policy(scene.old_logprobs, rollouts.sampler_logprobs)
    share = run.old_policy.learner_share(rollouts.weight_version, int(rollouts.weight_version.max()), 1)
    stays = run.rejection(*mismatch)
    kept = run.rejection.settle(filtered, stays & mask)
    charges = run.kl.token_penalties(old_logprobs, scene.ref_logprobs, mask)
    charged = run.kl.shape(kept, charges)
    loss_mask = mask & stays & charged.in_loss.flatten()[:, None] & run.entropy.keeps(-scene.old_logprobs, mask)
    earned = rewards_by_token(charged.reward, charges, mask)
    weights = run.correction(*mismatch)
    credit = Credit(
        rollouts, earned, critic_values(rollouts), Endings(rollouts), scene.old_logprobs,
        collision_of(scene.old_logprobs), weights, run.baseline.first_memory({}),
    )  # fmt: skip
    advantages = scaled(run.baseline, run.scale, run.baseline.centre(charged, credit), charged, mask & stays)
    if not run.baseline.per_token:
        advantages = advantages.reshape(-1, 1)
    each = torch.where(loss_mask, advantages, 0.0)
    credited = run.token_credit(each, scene.old_logprobs, entropy_of(scene.old_logprobs), loss_mask)
    return StepInputs(
        rollouts,
        loss_mask,
        torch.where(loss_mask, credited, 0.0),
        old_logprobs,
        scene.ref_logprobs,
        weights if share is None else None,
        run.entropy.start,
        scene.graded.correctness.flatten() > 0.5,
        share,
    )


def step_of(
    lengths: Sequence[int],
    advantages: Sequence[float],
    group_size: int,
    *,
    width: int | None = None,
    in_loss: Sequence[bool] | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    weights: Tensor | None = None,
) -> StepInputs:
    """Inputs of a step whose advantages are given per row, for arithmetic by hand."""
    rollouts = make_rollouts(lengths, group_size, width=width)
    kept = torch.ones(len(lengths), dtype=torch.bool) if in_loss is None else torch.tensor(in_loss)
    mask = rollouts.sampled_mask & kept[:, None]
    spread = torch.where(mask, torch.tensor(advantages, dtype=F64)[:, None], 0.0)
    return StepInputs(rollouts, mask, spread, old_logprobs, ref_logprobs, weights)


def share_of(run: RunConfig, batch: Batch, leaf: Tensor) -> Tensor:
    """The microbatch's share of the loss, its log-probs looked up in `leaf` [N, T] by address.

    A token's entropy is taken to be minus its log-prob, with gradient.
    """
    logprobs = leaf.flatten()[batch.tokens]
    return policy_loss(run.loss_tricks, batch, logprobs, -logprobs).loss


def noise_of(rollouts: Rollouts) -> Tensor:
    """One uniform number for each token of the rollouts, the same whatever the padding."""
    return rollout_uniforms(rollouts, 0, "mark", 0)


def marked(run: RunConfig, batches: Sequence[Batch], logprobs: Tensor, rollouts: Rollouts) -> list[Batch]:
    """The microbatches of a step with what the surrogate chooses over them, log-probs looked up by address."""
    each = [logprobs.flatten()[batch.tokens] for batch in batches]
    return mark_tokens(run.loss_tricks, batches, each, noise_of(rollouts))


def loss_and_gradient(
    run: RunConfig, inputs: StepInputs, logprobs: Tensor, microbatch_tokens: int = ONE_MICROBATCH
) -> tuple[Tensor, Tensor]:
    """Loss of the step and its gradient [N, T] with respect to `logprobs`, through `make_minibatch`."""
    leaf = logprobs.clone().requires_grad_()
    problems = range(inputs.rollouts.num_rows // inputs.rollouts.group_size)
    batches = make_minibatch(inputs, problems, run.denominator, Microbatching(microbatch_tokens, 192))
    if not batches:
        return torch.zeros((), dtype=F64), torch.zeros_like(logprobs)
    loss = sum(share_of(run, batch, leaf) for batch in marked(run, batches, logprobs, inputs.rollouts))
    loss.backward()
    return loss.detach(), leaf.grad


def run_scene(scene: Scene, microbatch_tokens: int = ONE_MICROBATCH, **options: Any) -> tuple[Tensor, Tensor]:
    """`loss_and_gradient` of a scene under these options."""
    run = make_run(**options)
    return loss_and_gradient(run, inputs_of(run, scene), scene.logprobs, microbatch_tokens)


def batch_of_rows(run: RunConfig, inputs: StepInputs, rows: Sequence[int]) -> Batch:
    """The given rows at the full padded width, untouched by `make_minibatch`: one rank's share of the step."""
    rollouts, index = inputs.rollouts, list(rows)

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[index]

    counted = run.denominator.counted_tokens(rollouts.sampled_mask, inputs.loss_mask)
    return Batch(
        rows=torch.tensor(index),
        prompts=tuple(rollouts.prompt_of_row(row) for row in index),
        tokens=rollouts.tokens[index],
        response_mask=rollouts.response_mask[index],
        loss_mask=inputs.loss_mask[index],
        advantages=inputs.advantages[index],
        sampler_logprobs=rollouts.sampler_logprobs[index],
        old_logprobs=pick(inputs.old_logprobs),
        ref_logprobs=pick(inputs.ref_logprobs),
        correction_weights=pick(inputs.correction_weights),
        entropy_coef=inputs.entropy_coef,
        totals=totals_of(counted, rollouts.group_size, index, inputs.advantages),
        original_totals=totals_of(rollouts.sampled_mask, rollouts.group_size, index, inputs.advantages),
        right=pick(inputs.right),
        right_tokens=0 if inputs.right is None else int(inputs.loss_mask[inputs.right].sum()),
        learner_share=pick(inputs.learner_share),
    )


# --- a model ------------------------------------------------------------------------------------------------


def tiny_model(dtype: torch.dtype = F64, vocabulary: int = 13, seed: int = 0) -> nn.Module:
    """A random two-layer Llama, in memory, in eval mode."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype).eval()
    # transformers' RMSNorm rounds to fp32 inside, which would drown differences of 1e-10 in a float64 model.
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, nn.RMSNorm(16, eps=config.rms_norm_eps, dtype=dtype))
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that can write any text: bytes alone."""
    alphabet = sorted(ByteLevel.alphabet())
    words = Tokenizer(BPE({one: place for place, one in enumerate(alphabet)}, []))
    words.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=alphabet[0])


def queue_of(run: RunConfig, state: RunState) -> RolloutQueue:
    """The queue that generates for a run that is open."""
    return open_queue(run, state.session, state.tokenizer, state.problems, state.account, state.model_flops)


def continuations_of(run: RunConfig, state: RunState, rollouts: Rollouts) -> PrefixRollouts:
    """What baselines that generate ask, in a run that is open."""
    maker = maker_of(run, state)
    return PrefixRollouts(maker, run.task.step_end, state.session, state.account, state.model_flops, rollouts)


def maker_of(run: RunConfig, state: RunState) -> GroupMaker:
    """What makes the groups of a run that is open."""
    return GroupMaker(
        state.problems, state.tokenizer, run.template, run.reward, run.reward_shaping, run.truncation,
        run.engine.params, run.group_size, run.seed,
    )  # fmt: skip
