"""The fused decoding step of each family against transformers' own layers, and weights that reach both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_lab.engines.native_fused import FUSED, fused
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.policy.models import Fp32Head
from grpo_lab.types import NoiseKey, Request, SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 150, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
# What differs from SIZES, by model type.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one head of keys, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, scaled positions": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0,
                             "original_max_position_embeddings": 32}},
    ),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen3": ("qwen3", {}),
}  # fmt: skip


def small(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights, norms and biases too."""
    name, chosen = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **chosen})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            parameter.data = parameter.data.to(dtype)
    return model


def responses(session: NativeSession) -> tuple[list[tuple[int, ...]], list[float]]:
    params = SamplingParams(40, 1.0, 1.0)
    requests = [Request(tuple(range(2, 4 + row % 5)), NoiseKey(0, "fused", 0, row, 0), params) for row in range(16)]
    completions = session.generate(requests)
    return [one.ids for one in completions], [value for one in completions for value in one.logprobs.tolist()]


def test_every_fused_family_is_compared() -> None:
    assert {type(small(kind, torch.float32)).__name__ for kind in KINDS} == FUSED


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_draw_what_transformers_layers_draw(kind: str) -> None:
    """In float64, before and after new weights; names and values of the parameters stay."""
    plain, fixed = (
        NativeSession(small(kind, torch.float64), frozenset({1}), 64, fixed_shapes=shapes) for shapes in (False, True)
    )
    assert fixed.fused is not None
    for version in range(2):
        own = plain.model.state_dict()
        assert own.keys() == fixed.model.state_dict().keys()
        assert all(torch.equal(tensor, own[name]) for name, tensor in fixed.model.state_dict().items())
        (tokens, logprobs), (expected, wanted) = responses(fixed), responses(plain)
        assert tokens == expected and len({len(one) for one in tokens}) > 1
        assert_close(logprobs, wanted, 1e-5, "transformers' RMSNorm rounds to fp32 inside, the rest is float64")
        generator = torch.Generator().manual_seed(version)
        new = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in own.items()
        }
        if plain.model.config.tie_word_embeddings:
            new["lm_head.weight"] = new["model.embed_tokens.weight"]
        plain.update_weights(new.items(), version + 1)
        fixed.update_weights(new.items(), version + 1)


def test_half_precision_rounds_no_more_than_transformers_layers_do() -> None:
    """Mean error of log-probs against fp32, of the same tokens; with an output head in fp32."""
    single = small("llama", torch.float32)
    errors = {}
    for shapes in (False, True):
        model = small("llama", torch.bfloat16)
        model.lm_head.weight = torch.nn.Parameter(single.lm_head.weight.detach().clone())
        model.lm_head.__class__ = Fp32Head
        session = NativeSession(model, frozenset({1}), 64, fixed_shapes=shapes)
        tokens, logprobs = responses(session)
        exact = []
        for row, response in enumerate(tokens):
            prompt = tuple(range(2, 4 + row % 5))
            with torch.no_grad():
                logits = single(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            exact += logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist()
        errors[shapes] = float((torch.tensor(logprobs) - torch.tensor(exact)).abs().mean())
    assert 1e-4 < errors[True] < 1.3 * errors[False]


def test_other_models_keep_their_own_layers() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", **sizes)).eval()
    assert fused(model) is None
    plain, fixed = (NativeSession(model.double(), frozenset({1}), 64, fixed_shapes=shapes) for shapes in (False, True))
    assert responses(fixed)[0] == responses(plain)[0]
