"""Models with recurrent states and other caches: sampled and learnt as a plain forward computes them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import assert_close
from sampling import learner_logprobs
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_lab.engines import native_cache
from grpo_lab.engines.native import Native
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.policy import packing
from grpo_lab.policy.model_folder import context_length
from grpo_lab.types import NoiseKey, Request, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
LINEAR: dict[str, Any] = HYBRID | {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 24}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# What differs from SMALL, for each family that native_cache.RECURRENT names.
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {**SSM, "attn_layer_indices": [1]},
    "falcon_h1": {**SSM, "mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8},
    "granitemoehybrid": {**SSM, **LOCAL, **HYBRID, "shared_intermediate_size": 24},
    "inkling_text": {
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 16, "sliding_window_size": 6,
        "d_rel": 4, "rel_extent": 16, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "unpadded_vocab_size": 61, "layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"],
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {
        "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "kimi_linear": {
        **LOCAL, **HYBRID, "num_key_value_heads": 2, "moe_intermediate_size": 24, "kv_lora_rank": 16, "v_head_dim": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "linear_head_dim": 16, "linear_num_heads": 2,
    },
    "lfm2": CONV,
    "lfm2_moe": {**MOE, **CONV, "num_dense_layers": 1},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "olmo_hybrid": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **MOE, **SHARED},
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **MOE, **SHARED},
    "zaya": {"moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 16},
}  # fmt: skip
# Prompts of five lengths, one of them twice and one a single token: none may see the padding of another.
PROMPTS = [tuple(3 + (7 * row + place * place) % 50 for place in range(n)) for row, n in enumerate((3, 9, 5, 9, 1))]


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(type(config)(**config.to_dict())).eval()


@pytest.mark.few(6)
@pytest.mark.parametrize("family", [name for name in sorted(native_cache.RECURRENT) if name in CONFIG_MAPPING])
def test_a_recurrent_model_is_sampled_and_learnt_as_a_plain_forward_computes_it(family: str) -> None:
    """Rows leave at different steps, prompts are shared, and the learner's rows have different lengths."""
    config = CONFIG_MAPPING[family](**(SMALL | FAMILIES[family]))
    plain = model_of(config)
    session = NativeSession(model_of(config), frozenset(range(12)), 64)
    requests = [
        Request(prompt, NoiseKey(0, "test", 0, row, sample), SamplingParams(12, 1.0, 1.0))
        for row, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]
    completions = session.generate(requests)
    assert len({len(completion.tokens) for completion in completions}) > 1
    learner = model_of(config)
    assert not packing.prepare(learner), "a packed row would carry one sequence's state into the next"
    learnt, sampled = learner_logprobs(learner, requests, completions)
    for row, (request, completion) in enumerate(zip(requests, completions)):
        tokens = completion.tokens
        with torch.no_grad():
            logits = plain(torch.tensor([[*request.prompt, *completion.ids]]), use_cache=False).logits[0].float()
        wanted = logits.log_softmax(-1)[len(request.prompt) - 1 : -1].gather(1, tokens[:, None]).squeeze(1)
        assert_close(sampled[row, : len(tokens)], wanted, 1e-4, f"sampler, row {row}")
        assert_close(learnt[row, : len(tokens)].detach(), wanted, 1e-4, f"learner, row {row}")


def strange(family: str) -> bool:
    """Whether a family of transformers has other layers than attention with keys and values."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    try:
        layers = DynamicCache(config=CONFIG_MAPPING[family]()).layers
    except (AttributeError, KeyError, TypeError):
        return True
    return kind._is_stateful or any("Dynamic" not in type(layer).__name__ for layer in layers)


def test_every_family_that_is_not_attention_alone_is_known_or_refused_by_name(tmp_path: Path) -> None:
    """Over all families of the transformers that is installed: a new one is refused until it is compared above."""
    engine, seen = Native(8, 1.0, 1.0, 4), set()
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family.startswith("musicgen") or not strange(family):
            continue
        config = CONFIG_MAPPING[family]()
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        said = engine.refusal(tmp_path, streams=False)
        if config.get_text_config(decoder=True).model_type in native_cache.RECURRENT:
            assert said is None, family
            assert "under a schedule that changes weights" in (engine.refusal(tmp_path, streams=True) or "")
        else:
            assert said is not None and f"({MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]})" in said, family
            assert "Choose engine=vllm" in said
            seen.add(family)
    assert {"rwkv", "xlstm", "recurrent_gemma", "minimax", "nemotron_h", "zamba", "zamba2"} <= seen


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changed", "context"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, 16),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}, 16),
    ],
)
def test_where_rotary_frequencies_depend_on_the_length_the_context_ends_before_they_change(
    tmp_path: Path, family: str, changed: dict[str, Any], context: int
) -> None:
    """Up to it, sampler and learner agree with a plain forward; one token beyond, an earlier token's logits change."""
    config = CONFIG_MAPPING[family](**(SMALL | changed))
    config.save_pretrained(tmp_path)
    assert context_length(tmp_path) == context
    plain = model_of(config)
    requests = [
        Request(p, NoiseKey(0, "t", 0, r, 0), SamplingParams(context - len(p), 1.0, 1.0)) for r, p in enumerate(PROMPTS)
    ]
    completions = NativeSession(model_of(config), frozenset({1}), 64).generate(requests)
    _, sampled = learner_logprobs(plain, requests, completions)
    learnt, _ = learner_logprobs(model_of(config), requests, completions)
    assert_close(learnt.detach(), sampled, 1e-4, "learner and sampler")
    ids = torch.arange(3, 4 + context)[None]
    with torch.no_grad():
        short, long = (
            model_of(config)(ids[:, :width], use_cache=False).logits[0, 5] for width in (context, context + 1)
        )
    assert (short - long).abs().max() > 0.01
