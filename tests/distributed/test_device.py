"""The torch settings that a run's results depend on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_lab.distributed.device import prepare_torch


@pytest.fixture
def as_torch_starts() -> Iterator[None]:
    """The settings of a new process, and afterwards those of before."""
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    only_warns, threads = torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_num_threads()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before[0])
    torch.use_deterministic_algorithms(before[1], warn_only=only_warns)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("as_torch_starts")
def test_kernels_are_deterministic_and_attention_is_not_cudnns() -> None:
    """cuDNN's attention builds a plan for every length that a decoding step brings."""
    assert prepare_torch("cpu", 1) == torch.device("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
