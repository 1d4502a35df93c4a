# pyright: reportMissingImports=false
# vLLM is an installation of its own, and not there where types are checked.
"""Shared by both vLLM engines: fields and arguments, one growing response, and error messages."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from grpo_lab.checks import require_field
from grpo_lab.engines.base import Engine, EngineFailure
from grpo_lab.seeding import request_seed
from grpo_lab.tricks.precision import LmHead, Precision
from grpo_lab.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

# Environment variables for the engine's process, if it has its own.
TRAINER = "GRPO_LAB_TRAINER"  # pid of the process that opened the engine
FOLDER = "GRPO_LAB_VLLM_FOLDER"  # folder that both processes share, for weights in transfer and the engine's log
SHOWN = "GRPO_LAB_VLLM_SHOWN"  # set if the user wants to see vLLM's output
LOG = "engine.log"

_GIB = 2**30
_OWN_ARGUMENTS = frozenset(
    {"model", "tokenizer", "dtype", "seed", "max_num_seqs", "max_model_len", "enforce_eager", "enable_prefix_caching",
     "gpu_memory_utilization", "kv_cache_memory_bytes", "enable_sleep_mode", "logprobs_mode",
     "hf_overrides", "disable_log_stats", "use_tqdm_on_load", "logging_config", "worker_extension_cls", "device_ids",
     "weight_transfer_config", "tensor_parallel_size"}
)  # fmt: skip


@dataclass(frozen=True)
class VllmEngine(Engine):
    """vLLM, in this process or in its own.

    Each request has its own seed, a hash of its noise key, so its text does not depend on other requests or on their
    order. The random numbers are vLLM's and not the native engine's, so arms on different engines share no noise.
    Log-probs are those of the softmax at the request's temperature. With `prefix_caching`, a prompt that responses
    share is prefilled once if it fills a block of the cache.
    """

    context: int | None  # prompt and response, tokens; None takes the model's own
    cache_gib: float  # memory of the paged cache; 0 on a GPU: what `memory_share` leaves
    memory_share: float  # of a GPU, weights and cache together
    eager: bool  # no CUDA graphs and no torch.compile
    prefix_caching: bool
    tensor_parallel: int  # GPUs that hold one model together
    arguments: dict[str, Any] = field(hash=False)  # other engine arguments, by vLLM's names

    forks: ClassVar[bool] = False  # vLLM starts processes of its own, which import the program that started them
    option: ClassVar[str]  # its name on the command line

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(
            self.top_p == 1, self, "top_p", "1: vLLM gives log-probs of what top-p left, and not of the softmax"
        )
        require_field(self.context is None or self.context > 1, self, "context", "at least 2, or null")
        require_field(self.cache_gib >= 0, self, "cache_gib", "0 or more")
        require_field(0 < self.memory_share <= 1, self, "memory_share", "in (0, 1]")
        require_field(self.tensor_parallel >= 1, self, "tensor_parallel", "at least 1")
        own = sorted(_OWN_ARGUMENTS & self.arguments.keys())
        require_field(not own, self, "arguments", f"without {own}, which the run sets itself by other options")

    @property
    def longest(self) -> int | None:
        return self.context

    def missing(self) -> str | None:
        if importlib.util.find_spec("vllm") is not None:
            return None
        return (
            f"engine={self.option} needs vLLM, which is not installed: `make setup-vllm` installs its CPU build, "
            "`pip install 'grpo-lab[vllm]'` the one for GPUs; engine=native needs neither"
        )

    def engine_arguments(self, folder: Path, precision: Precision, device: torch.device) -> dict[str, Any]:
        """vLLM's arguments for the model of `folder`; the user's own come last."""
        overrides = {"head_dtype": "float32"} if precision.lm_head is LmHead.fp32 else {}
        return {
            "model": str(folder),
            "dtype": precision.dtype_name,
            "seed": 0,
            "max_num_seqs": self.max_rows,
            "max_model_len": self.context,
            "enforce_eager": self.eager,
            "enable_prefix_caching": self.prefix_caching,
            "tensor_parallel_size": self.tensor_parallel,
            "kv_cache_memory_bytes": round(self.cache_gib * _GIB) or None,
            "logprobs_mode": "processed_logprobs",
            "hf_overrides": overrides,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            # On the CPU vLLM 0.32 crashes in chunked prefill of a request with a seed: it reads the generator's
            # offset, which only a GPU's generator has.
            **(
                {"gpu_memory_utilization": self.memory_share}
                if device.type == "cuda"
                else {"enable_chunked_prefill": False}
            ),
            **self.arguments,
        }


@contextmanager
def process_kept() -> Iterator[None]:
    """Undo vLLM's changes to the process that opens it.

    vLLM permanently binds and fixes torch's threads, also for the learner, and seeds the global generators.
    """
    threads, set_threads, random = torch.get_num_threads(), torch.set_num_threads, torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's warnings about its own code
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)


def set_defaults_of_vllm() -> None:
    """Set vLLM's environment variables that the user has not set: no thread binding, few logs, no usage statistics."""
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)


# Remedies by words in vLLM's message; the first match counts.
_REMEDIES = (
    (
        ("not supported for now", "no model architectures", "not supported by vllm"),
        "choose engine=native, which samples nearly every causal LM of transformers and refuses the others by name",
    ),
    (
        ("max_model_len", "max seq len", "maximum model length"),
        "lower engine.context, or raise engine.cache_gib (GPU: engine.memory_share)",
    ),
    (("address already in use", "eaddrinuse"), "another process holds the port: set VLLM_PORT to a free one"),
    (
        ("memory", "kv cache", "oom", "signal 9"),
        "lower engine.max_rows, engine.context or engine.cache_gib (GPU: engine.memory_share)",
    ),
    (("unexpected keyword", "unrecognized"), "engine.arguments takes the names of vllm.EngineArgs"),
    (("torchvision", "torchaudio", "torchcodec"), "run `make setup-vllm`, which removes what does not fit torch"),
)


def remedy(error: str) -> str:
    error = error.lower()
    for words, what in _REMEDIES:
        if any(word in error for word in words):
            return f"Remedy: {what}"
    return "Remedy: look at what vLLM says with VLLM_LOGGING_LEVEL=INFO, or choose engine=native"


def failure(error: str) -> EngineFailure:
    """The error that ends a run whose engine died; `said` is the known cause."""
    return EngineFailure(
        f"vLLM ended in the middle of its work: {error}. {remedy(error)}. "
        "Re-run the same command to resume from the last checkpoint"
    )


_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)$")


def last_error(shared: Path) -> str | None:
    """The last exception in the engine's log, None if there is none; this process learns only that the engine died."""
    if not (log := shared / LOG).exists():
        return None
    found = [match[1] for line in log.read_text(errors="replace").splitlines() if (match := _ERROR.search(line))]
    return found[-1] if found else None


def vllm_params(request: Request, stop_ids: Collection[int], by_token: bool) -> SamplingParams:
    """A request's settings as vLLM's SamplingParams; `by_token` returns each token when sampled, which costs time."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = request.params
    return SamplingParams(
        max_tokens=params.max_tokens - len(request.prefix),
        temperature=params.temperature,
        top_p=params.top_p,
        seed=request_seed(request.noise, len(request.prefix)),
        stop_token_ids=sorted(stop_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if by_token else RequestOutputKind.FINAL_ONLY,
    )


class Growing:
    """One response so far."""

    def __init__(self, request: Request, stop_ids: Collection[int]) -> None:
        self.request, self.stop_ids = request, stop_ids
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.sure_for = 0

    def grow(self, output: RequestOutput, version: int) -> StopReason | None:
        """Append an output sampled by weights of `version`. Returns why the response has ended, or None."""
        (grown,) = output.outputs
        tokens = list(grown.token_ids)
        logprobs = list(grown.logprobs.logprobs[: len(tokens)]) if tokens else []
        reason = None
        if (limit := self.request.params.stop_when_sure) is not None:
            for place, logprob in enumerate(logprobs):
                self.sure_for = self.sure_for + 1 if logprob > math.log(limit.probability) else 0
                if self.sure_for >= limit.tokens and tokens[place] not in self.stop_ids:
                    tokens, logprobs = tokens[: place + 1], logprobs[: place + 1]
                    reason = StopReason.REPETITION
                    break
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        if reason is None and output.finished:
            reason = {"stop": StopReason.EOS, "length": StopReason.LENGTH}.get(grown.finish_reason, StopReason.ABORTED)
        return reason

    def completion(self, reason: StopReason) -> Completion:
        return Completion.of(self.tokens, self.logprobs, self.versions, reason)
