"""Where a run resumes: the newest undamaged checkpoint, if the code is still the one that started the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.run import checkpoint
from grpo_lab.tracking import provenance
from grpo_lab.tracking.checksums import AFRESH, check_manifest, damage_of
from grpo_lab.tracking.run_log import RunLog


@dataclass(frozen=True)
class Beginning:
    """Where a run starts or resumes.

    `checkpoint` is the folder to load, None for the base model. `tables` are the digests of the tables that stay.
    `segments` record which code computed the steps that stay. `code` is today's code if it differs from theirs or is
    the run's first, else None. `messages` are lines for the user.
    """

    checkpoint: Path | None
    step: int
    tables: Mapping[str, str]
    segments: Sequence[Mapping[str, Any]]
    code: Mapping[str, Any] | None
    messages: Sequence[str]

    def all_segments(self, environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """For run.json: after which steps the code changed, and to what; the first entry is for step 0.

        `environment` is what provenance recorded for this attempt.
        """
        if self.code is None:
            return list(self.segments)
        git = {name: (environment["git"] or {}).get(name) for name in ("commit", "dirty", "diff_sha256")}
        return [*self.segments, {"from_step": self.step, **self.code, **git}]


def segments_of_ranks(described: Mapping[str, Any], step: int, number: int) -> list[Mapping[str, int]]:
    """For run.json: after which steps the number of processes changed, and to what; `step` is where it goes on.

    Sums are then rounded otherwise, so the bits of a run are those of its numbers of processes.
    """
    before = [one for one in described.get("ranks", [{"from_step": 0, "number": 1}]) if one["from_step"] < step]
    same = bool(before) and before[-1]["number"] == number
    return before if same else [*before, {"from_step": step, "number": number}]


def find_beginning(
    folder: Path, described: Mapping[str, Any], log: RunLog, changed_code: bool, sources: Sequence[Path] = ()
) -> Beginning:
    """Where the run in `folder` starts or resumes; `described` is its run.json, {} for a new run.

    `sources` are files of the user's that it runs beside this package and plugins.

    Raises ValueError, naming the files, if there are checkpoints but none is usable, or if an evaluation that stays
    is damaged. Also raises it if the code differs from the one that computed the steps that stay, unless
    `changed_code` allows that.
    """
    passed, manifest = [], None
    for place in reversed(checkpoint.complete(folder / "checkpoints")):
        try:
            manifest = check_manifest(place, described.get("run_key", ""))
            if problem := log.differs(manifest["log"]):
                raise ValueError(problem)
            break
        except ValueError as error:
            passed.append(str(error))
            manifest = None
    if manifest is None:
        if passed:
            raise ValueError(f"no checkpoint of this run can be used: {'; '.join(passed)}; {AFRESH}")
        messages = [] if log.empty else [f"{folder} has no checkpoint: the run begins again, at step 0"]
        return Beginning(None, 0, {}, [], provenance.code(sources), messages)
    messages = [f"{problem}: an older checkpoint, {place.name}, is used" for problem in passed]
    for name, digest in manifest["log"]["tables"].items():
        problem = damage_of(folder / name, digest)
        if problem is not None and name.startswith("eval/") and (folder / name).exists():
            raise ValueError(f"{problem}; restore it from a copy, or delete it; DONE and the figures will report it")
        messages += [f"{problem}: DONE and the figures will report the loss"] if problem else []
    # A step that was saved before its evaluation is computed in part by this code.
    step = min(manifest["step"], manifest["log"].get("step", manifest["step"]))
    # With a checkpoint of step 0, the evaluation before the first step stays.
    kept = [segment for segment in described["stretches"] if segment["from_step"] < max(step, 1)]
    code = provenance.code(sources)
    if changes := _changes(kept[-1], code):
        if not changed_code:
            raise ValueError(
                f"{folder} was trained with different code; resuming would mix two versions from step {step} on "
                f"({changes}): go back to {_called(kept[-1])} and the source.diff in that folder, or allow it with "
                "resume_with_changed_code=true; run.json, DONE and the figures will record it"
            )
        messages.append(f"the code is not the one this run was made with up to step {step}: {changes}")
        return Beginning(place, step, manifest["log"]["tables"], kept, code, messages)
    return Beginning(place, step, manifest["log"]["tables"], kept, None, messages)


def _changes(segment: Mapping[str, Any], code: Mapping[str, Any]) -> str:
    """How the code of a segment differs from today's, by package and source; "" if it is the same."""
    there, now = segment["packages"], code["packages"]
    names = sorted(name for name in there.keys() | now.keys() if there.get(name) != now.get(name))
    words = [f"{name}: {there.get(name)} there, {now.get(name)} now" for name in names]
    if segment["sources"] != code["sources"]:
        words.append("sources of grpo_lab or of plugins or reward functions differ")
    return ", ".join(words)


def _called(segment: Mapping[str, Any]) -> str:
    if segment["commit"] is None:
        return "the version of grpo_lab that began it"
    return f"commit {segment['commit'][:12]}" + (" (with changes)" if segment["dirty"] else "")
