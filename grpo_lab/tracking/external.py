"""Runs of other frameworks, read from what they logged and kept as run folders, so that figures draw them beside ours.

    TRL       log_history of trainer_state.json, which transformers' Trainer saves with every checkpoint
    prime-rl  metrics.jsonl of its file monitor, to which orchestrator and trainer write (commit 559b44772 read)

An external run lies in `<runs_dir>/external/<name>/`, and is a run of a sweep of its own without a declaration: no
verdict counts it. Its arm is called `external:<label>`. Numbers are theirs, under our names where the quantity is the
same (`metrics.PEERS`), else as `external/<their name>`, dots for slashes. Whether a suite asked what ours asks, nobody
knows.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.tracking.checksums import AFRESH, read_json, with_checksum
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.names import MOST_CHARACTERS, marked
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import FILE, RunEntry, read_sweep, record_sweep, sweep_folder

EXTERNAL = ("external:", "foreign:")  # before the label of an external run's arm: today's, and the one before
FOLDER = "external"  # of the folder of runs
_FOLDERS = (FOLDER, "foreign")
HELDOUT, DOWNSTREAM = "eval/heldout_training", "eval/downstream"
TOKENS = "budget/sampled_tokens"

TRL = {
    "reward": "reward/mean",
    "completions/mean_length": "rollout/length",
    "completions/max_length": "rollout/longest",
    "completions/clipped_ratio": "rollout/truncated",
    "loss": "train/loss",
    "grad_norm": "train/gradient_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "train/entropy",
    "clip_ratio/region_mean": "train/clip_fraction",
    "kl": "train/k3_ref",
    "sampling/sampling_logp_difference/mean": "mismatch/absolute",
    "sampling/sampling_logp_difference/max": "mismatch/max",
    "num_tokens": TOKENS,
}
TRL_SUITE = {"completions/mean_length": "length", "completions/clipped_ratio": "truncated"}
PRIME_RL = {
    "loss/mean": "train/loss",
    "optim/grad_norm": "train/gradient_norm",
    "optim/lr": "train/learning_rate",
    "entropy/all/mean": "train/entropy",
    "mismatch_kl/all/mean": "mismatch/k3",
}
# Of one agent, below train/agg/; `effective` are the responses that were trained on, `all` those that failed too.
PRIME_RL_AGENT = {
    "all/reward/mean": "reward/mean",
    "all/num_output_tokens/mean": "rollout/length",
    "all/num_output_tokens/max": "rollout/longest",
    "all/is_truncated/mean": "rollout/truncated",
    "effective/reward/mean": "reward/in_loss_mean",
}
PRIME_RL_SUITE = {"num_output_tokens/mean": "length", "is_truncated/mean": "truncated"}


@dataclass(frozen=True)
class Chosen:
    """Facts of an external log that only the user knows; "" leaves it to what there is one of."""

    accuracy: str = ""  # the reward function that says whether an answer is right
    heldout: str = ""  # the evaluation set of held-out questions
    downstream: str = ""  # the evaluation set of harder questions


@dataclass
class ExternalLog:
    """A log under our names: step -> numbers; `read_as` maps theirs to ours, `notes` say what was not understood."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    read_as: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, step: int, theirs: str, ours: str | None, value: Any) -> None:
        """Note one number; what is none, such as a missing value, is left out."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            name = ours or _kept(theirs)
            self.steps.setdefault(step, {})[name] = float(value)
            self.read_as[theirs] = name

    def values(self, name: str) -> list[float]:
        """Every value of one of our names."""
        return [numbers[name] for numbers in self.steps.values() if name in numbers]


def _kept(theirs: str) -> str:
    """The name of a number that has no counterpart here, as a run folder takes it: dots for slashes."""
    written = re.sub(r"[^A-Za-z0-9_/-]", ".", theirs).strip("./")[:200]
    return f"external/{marked(theirs, written).replace('/', '.')}"


def read_trl(place: Path, chosen: Chosen) -> tuple[Path, ExternalLog]:
    """The log of a TRL run: `place` is trainer_state.json, a checkpoint, or an output folder, whose newest one counts.

    With `logging_steps` above 1 a value is the mean over as many steps. A step is one of the optimiser, as TRL counts
    it. Raises ValueError.
    """
    path = newest(place, "trainer_state.json", lambda found: read_json(found, AFRESH).get("global_step", 0))
    history = read_json(path, "restore it from a copy").get("log_history")
    if not isinstance(history, list) or not any("reward" in entry for entry in history):
        raise ValueError(f"{path} has no log of a GRPO run: TRL logs `reward` where logging_steps is on")
    log = ExternalLog()
    functions = sorted({m[1] for entry in history for key in entry if (m := re.fullmatch(r"rewards/(.+)/mean", key))})
    scores = [re.fullmatch(r"eval_(?:(.+)_)?reward", key) for entry in history for key in entry]
    sets = {match[1] or "" for match in scores if match}
    suites = _suites(chosen, sets, path)
    score = _score(chosen, functions, path)
    for entry in history:
        step = int(entry["step"])
        for key, value in entry.items():
            if key in ("step", "epoch"):
                continue
            of = next((one for one in sorted(sets, key=len, reverse=True) if key.startswith(_eval_prefix(one))), None)
            if of is None:
                log.add(step, key, TRL.get(key), value)
            else:
                part = TRL_SUITE.get(key.removeprefix(_eval_prefix(of)))
                log.add(step, key, f"{suites[of]}/{part}" if of in suites and part else None, value)
        if score is not None:
            name = f"rewards/{score}/mean" if score else "reward"
            log.add(step, f"{name} as outcome", "reward/outcome", entry.get(name))
            for of, suite in suites.items():
                theirs = f"{_eval_prefix(of)}{name}"
                log.add(step, f"{theirs} as accuracy", f"{suite}/accuracy", entry.get(theirs))
    return path, _accuracies_checked(log, score)


def _eval_prefix(of: str) -> str:
    return f"eval_{of}_" if of else "eval_"


def read_prime_rl(place: Path, chosen: Chosen) -> tuple[Path, ExternalLog]:
    """The log of a prime-rl run: `place` is metrics.jsonl, or an output folder that holds one.

    An evaluation counts at the step whose weights it asked, its `policy_version`. Errored responses are left out of
    accuracy, as answers that our graders fail on are. Raises ValueError.
    """
    path = newest(place, "metrics.jsonl", lambda found: found.stat().st_mtime)
    lines = path.read_bytes().splitlines()
    rows = [_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    names = {key for row in rows for key in row}
    agents = sorted({m[1] for key in names if (m := re.fullmatch(r"train/agg/effective/([^/]+)/reward/mean", key))})
    if len(agents) != 1:
        raise ValueError(f"{path} has {len(agents)} agents with a reward ({', '.join(agents) or 'none'}): one is read")
    (agent,) = agents
    sets = {m[1] for key in names if (m := re.fullmatch(rf"eval/([^/]+)/effective/{re.escape(agent)}/avg@\d+", key))}
    functions = sorted(
        {m[1] for key in names if (m := re.fullmatch(rf"train/agg/all/{re.escape(agent)}/rewards/(.+)/mean", key))}
    )
    suites, score, log = _suites(chosen, sets, path), _score(chosen, functions, path), ExternalLog()
    ours = dict(PRIME_RL)
    for theirs, name in PRIME_RL_AGENT.items():
        subset, rest = theirs.split("/", 1)
        ours[f"train/agg/{subset}/{agent}/{rest}"] = name
    for row in rows:
        for key, value in row.items():
            of = next((one for one in sets if key.startswith(f"eval/{one}/")), None)
            step = int(row["step"] if of is None else row.get(f"eval/{of}/policy_version", row["step"]))
            if key in ("step", "time"):
                continue
            part = of and PRIME_RL_SUITE.get(key.removeprefix(f"eval/{of}/effective/{agent}/"))
            log.add(step, key, f"{suites[of]}/{part}" if of in suites and part else ours.get(key), value)
            if score is None:
                continue
            if key == f"train/agg/all/{agent}/" + (f"rewards/{score}/mean" if score else "reward/mean"):
                log.add(step, f"{key} as outcome", "reward/outcome", value)
            pattern = rf"rewards/{re.escape(score)}/mean" if score else r"avg@\d+"
            if of in suites and re.fullmatch(rf"eval/{re.escape(of)}/effective/{re.escape(agent)}/{pattern}", key):
                log.add(step, f"{key} as accuracy", f"{suites[of]}/accuracy", value)
        if "progress/total_tokens" in row and "progress/tokens" in row:  # before the step, and of it
            tokens = row["progress/total_tokens"] + row["progress/tokens"]
            log.add(int(row["step"]), "progress/total_tokens + progress/tokens", TOKENS, tokens)
    return path, _accuracies_checked(log, score)


def is_external(described: Mapping[str, Any]) -> bool:
    """True for the run.json of an external run."""
    return any(name in described for name in _FOLDERS)


READERS: Mapping[str, Callable[[Path, Chosen], tuple[Path, ExternalLog]]] = {"trl": read_trl, "prime-rl": read_prime_rl}


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), (int, float)):
        raise ValueError(f"{place} is none that prime-rl writes, {line[:60]!r}: give its metrics.jsonl")
    return row


def newest(place: Path, name: str, age: Callable[[Path], float]) -> Path:
    """The file of this name at a place or below it, the last by `age`."""
    found = [place] if place.is_file() else sorted(place.rglob(name))
    if not found:
        raise ValueError(f"there is no {name} in {place}: give the folder that the framework wrote, or the file")
    return max(found, key=age)


def _suites(chosen: Chosen, sets: set[str], path: Path) -> dict[str, str]:
    """Their evaluation set -> our suite; one alone is the held-out one unless the user says otherwise."""
    for name in filter(None, (chosen.heldout, chosen.downstream)):
        if name not in sets:
            raise ValueError(f"{path} has no evaluation set {name!r}: it has {', '.join(sorted(sets)) or 'none'}")
    suites = {name: suite for name, suite in ((chosen.heldout, HELDOUT), (chosen.downstream, DOWNSTREAM)) if name}
    rest = sets - set(suites)
    if not chosen.heldout and len(rest) == 1:
        suites[rest.pop()] = HELDOUT
    return suites


def _score(chosen: Chosen, functions: Sequence[str], path: Path) -> str | None:
    """The reward function that is an accuracy: "" stands for the whole reward, None says that none is."""
    if chosen.accuracy:
        if chosen.accuracy not in functions:
            raise ValueError(f"{path} has no reward {chosen.accuracy!r}: it has {', '.join(functions) or 'none'}")
        return chosen.accuracy
    return "" if len(functions) <= 1 else None


def _accuracies_checked(log: ExternalLog, score: str | None) -> ExternalLog:
    """The log without accuracies where they can be none, and its budget in steps."""
    named = ("reward/outcome", f"{HELDOUT}/accuracy", f"{DOWNSTREAM}/accuracy")
    outside = [name for name in named if any(not 0 <= value <= 1 for value in log.values(name))]
    if score is None or outside:
        why = "several reward functions" if score is None else "a reward outside of 0 and 1"
        log.notes.append(f"no accuracy: the log has {why}; --accuracy names the function that says what is right")
        for numbers in log.steps.values():
            for name in named:
                numbers.pop(name, None)
        log.read_as = {theirs: ours for theirs, ours in log.read_as.items() if ours not in named}
    if not log.values(f"{HELDOUT}/accuracy") and score is not None and not outside:
        log.notes.append("no held-out accuracy: the log has no evaluation, or several sets; --heldout names one")
    if not log.values(TOKENS):
        log.notes.append("no tokens: the framework did not count them, and figures over tokens leave the run out")
    spent = 0.0
    for step in sorted(log.steps):
        # Evaluations of a step carry no count of training tokens: theirs is what was spent by then.
        spent = log.steps[step].get(TOKENS, spent)
        log.steps[step] |= {"budget/steps": step} | ({TOKENS: spent} if log.values(TOKENS) else {})
    return log


@dataclass(frozen=True)
class Imported:
    """An external run as it was kept: its folder, its source, its number of steps, and what was not understood."""

    folder: Path
    source: Path
    log: ExternalLog


def import_run(
    framework: str,
    place: Path,
    runs_dir: Path,
    name: str,
    label: str,
    seed: int,
    chosen: Chosen,
    command: Sequence[str],
) -> Imported:
    """Keep an external run as arm `external:<label>`, `seed` of the sweep `name`; one that is there is replaced.

    Raises ValueError for a log that cannot be read, and for a sweep of this name that is not external.
    """
    for word in (name, label):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", word) or len(word) > MOST_CHARACTERS:
            raise ValueError(
                f"{word!r}: a name has letters, digits, dots, dashes and underscores, begins with none of . and -, and "
                f"has at most {MOST_CHARACTERS} characters"
            )
    home = sweep_folder(runs_dir, name)
    if (home / FILE).exists() and any(not entry.arm.startswith(EXTERNAL) for entry in read_sweep(home).runs):
        raise ValueError(f"{home} is a sweep of grpo_lab: give external runs another name with --as")
    source, log = READERS[framework](Path(place), chosen)
    inside = f"{FOLDER}/{name}/{label}/seed={seed}"
    folder = Path(runs_dir) / inside
    if (folder / "run.json").exists() and not is_external(read_json(folder / "run.json", AFRESH)):
        raise ValueError(f"{folder} holds a run of grpo_lab: give external runs another name with --as")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    with RunLog(folder) as written:
        (folder / "DONE").unlink(missing_ok=True)
        described = {
            "name": f"{framework} {name} {label} seed={seed}",
            "run_key": hashlib.sha256(f"{digest} {inside}".encode()).hexdigest()[:32],
            "recipe": FOLDER,
            "seed": seed,
            "choices": {},
            "config": {},
            "tracking": None,
            "commit": None,
            "dirty": None,
            "stretches": [],
            "sweep_folder": f"../../../../sweeps/{name}",
            "warnings": log.notes,
            "data": None,
            "tags": {"sweep": name, "arm": f"{EXTERNAL[0]}{label}", FOLDER: framework},
            FOLDER: {
                "framework": framework,
                "source": str(source.resolve()),
                "sha256": digest,
                "read_as": log.read_as,
            },
        }
        write_json(folder / "run.json", with_checksum(described))
        written.rewind(0)
        for step in sorted(log.steps):
            finite = {name: value for name, value in log.steps[step].items() if math.isfinite(value)}
            written.write_step(step, finite, {})
        written.mark_done({"no_ops": [], "steps": max(log.steps), "run_key": described["run_key"]})
    entry = RunEntry(f"{EXTERNAL[0]}{label}", "", seed, inside)
    record_sweep(runs_dir, name, [entry], None, None, FOLDER, command, None, None)
    return Imported(folder, source, log)
