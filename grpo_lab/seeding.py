"""Counter-based noise: every random number is a function of its key, never of numbers drawn before it.

The uniform number of a token depends only on (seed, stream, step, problem, response, position). So batch
composition and order, compaction, microbatching and resuming do not change it, and runs with the same seed share it
(common random numbers). The generator is NumPy's counter-based Philox.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from grpo_lab.types import Float, NoiseKey, Rollouts, Tensor

_DOUBLES_PER_BLOCK = 4  # one Philox counter value yields four 64-bit words, one double each


def stream_id(stream: str) -> int:
    """A stable 64-bit number for a stream's name."""
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")


def token_uniforms(key: NoiseKey, start: int, stop: int) -> np.ndarray:
    """Uniform numbers in [0, 1) of positions start..stop-1 of one response, float64 [stop - start]."""
    first_block = start // _DOUBLES_PER_BLOCK
    # uint64, because NumPy would convert a plain list to float64, which drops the low bits of a stream's number.
    philox = np.random.Philox(
        key=np.array([key.seed, stream_id(key.stream)], dtype=np.uint64),
        counter=np.array([first_block, key.response, key.problem, key.step], dtype=np.uint64),
    )
    skip = start - first_block * _DOUBLES_PER_BLOCK
    return np.random.Generator(philox).random(skip + stop - start)[skip:]


def uniform(key: NoiseKey) -> float:
    """The first uniform number of a key."""
    return float(token_uniforms(key, 0, 1)[0])


def request_seed(key: NoiseKey, start: int) -> int:
    """A 63-bit seed for an engine that samples a response with its own generator, from position `start` on."""
    named = f"{key.seed}/{key.stream}/{key.step}/{key.problem}/{key.response}/{start}"
    return stream_id(named) >> 1


def rollout_uniforms(rollouts: Rollouts, seed: int, stream: str, step: int) -> Float[Tensor, "N T"]:
    """One uniform number in [0, 1) for each token of a rollout batch, float64."""
    width, size = rollouts.tokens.shape[1], rollouts.group_size
    rows = [
        token_uniforms(NoiseKey(seed, stream, step, rollouts.problems[row // size].id, row % size), 0, width)
        for row in range(rollouts.num_rows)
    ]
    return torch.from_numpy(np.stack(rows))
