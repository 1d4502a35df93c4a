"""Where the time goes on a GPU: torch's profiler over one optimiser update and over 16 decode steps.

    python tests/gpu/profiled.py --device cuda

The work is that of speed.py: a model of SmolLM2-135M's size in bf16, an update of 16 problems x 8 responses of 256
tokens, and 64 x 8 responses of 16 tokens with their prompts.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from findings import Findings, run_part
from lab_side import timed_run
from speed import Work, free, prepared
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from grpo_lab import loop
from grpo_lab.run.recorder import Clock

TOP = 20  # kernels that are listed
DECODED = 16  # tokens of a response in the profile of decoding
_SHOWN = 160  # characters of a kernel's name, which may have a thousand
STEP = 2  # the step that is profiled; the one before it warms up
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")  # what their names begin with


@dataclass(frozen=True)
class Span:
    """A kernel on the GPU, or on a CPU an operator's own time, in microseconds."""

    name: str
    start: float
    end: float


def clock_with(stage: str, profiles: list[profile], on_gpu: bool) -> type[Clock]:
    """A clock of the loop's stages that profiles this one in STEP."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    class Profiling(Clock):
        @contextlib.contextmanager
        def __call__(self, name: str) -> Iterator[None]:
            with super().__call__(name), contextlib.ExitStack() as stack:
                if (name, self.step) == (stage, STEP):
                    profiles.append(stack.enter_context(profile(activities=activities)))
                    if on_gpu:  # before the profiler ends
                        stack.callback(torch.cuda.synchronize)
                yield

    return Profiling


def spans_of(events: Iterable[FunctionEvent], on_gpu: bool) -> list[Span]:
    """The kernels and copies on the GPU; on a CPU the operators that no other one called."""
    if on_gpu:
        kept = [one for one in events if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    else:
        kept = [one for one in events if one.name.startswith("aten::") and one.cpu_parent is None]
    return [Span(one.name, one.time_range.start, one.time_range.end) for one in kept]


def busy(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def report(found: Findings, name: str, seen: profile, on_gpu: bool) -> None:
    """The top kernels by their time, launches, and how long the GPU had nothing to do."""
    events = list(seen.events() or [])
    spans, kind = spans_of(events, on_gpu), "kernels" if on_gpu else "operators"
    wall = max(one.time_range.end for one in events) - min(one.time_range.start for one in events)
    found.add(f"{name}: {kind}", len(spans), kind, at_least=1)
    found.add(f"{name}: wall time under the profiler", wall / 1e6, "s")
    if on_gpu:
        launches = sum(one.name.startswith(_LAUNCHES) for one in events)
        found.add(f"{name}: launches", launches, "launches")
        found.add(f"{name}: the GPU is idle", 1 - busy(spans) / wall, "of it")
    else:
        found.leave_out(f"{name}: launches, idle share", "a CPU launches nothing")
    times, numbers = Counter[str](), Counter(span.name for span in spans)
    for span in spans:
        times[span.name] += span.end - span.start
    for kernel, microseconds in times.most_common(TOP):
        share = microseconds / sum(times.values())
        found.detail(f"{name}: {kernel[:_SHOWN]}", microseconds / 1e3, "ms", f"{numbers[kernel]} times, {share:.1%}")


def profile_stage(work: Work, name: str, stage: str, *overrides: str) -> None:
    """Run the training loop and report the profile of one stage of one step."""
    free()
    profiles: list[profile] = []
    on_gpu = work.found.device == "cuda"
    with mock.patch.object(loop, "Clock", clock_with(stage, profiles, on_gpu)):
        timed_run(1, STEP - 1, work.overrides(*overrides))
    report(work.found, name, profiles[0], on_gpu)


def measure(found: Findings) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = prepared(found, Path(name))
        graphs = ["engine.cuda_graphs=true"] if found.device == "cuda" else []
        update = replace(work, problems=work.problems // 4)
        with found.guarded("one update"):
            profile_stage(update, "one update", "train", "updates=one", *graphs)
        with found.guarded("decoding"):
            short = replace(work, budget=min(work.budget, DECODED))
            profile_stage(short, f"{short.budget} decode steps", "generate", "updates=one", *graphs)


if __name__ == "__main__":
    run_part(measure)
