"""Logs of any trainer, in whatever file it left, under our metric names.

    TRL         trainer_state.json, console output, JSONL; of ms-swift and Unsloth too, which print the same dicts
    verl        JSONL of its file logger, console output
    OpenRLHF    console output
    prime-rl    metrics.jsonl, console output
    exports     CSV and JSONL of wandb, CSV of TensorBoard, event files of TensorBoard (with the extra `tensorboard`)
    grpo_lab    a run folder or its metrics.jsonl

Names were read in TRL f2cd57710, verl b178a3cd5, OpenRLHF 3c3be623, prime-rl 559b44772. `external.py` keeps runs of two
of these as run folders; there a name is ours only where the quantity is the same. Here the nearest quantity is enough:
`NEAREST` says how it differs.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.external import PRIME_RL, PRIME_RL_AGENT, TRL, ExternalLog, newest
from grpo_lab.tracking.metrics import find
from grpo_lab.tracking.renames import metric_name
from grpo_lab.tracking.run_reader import read_steps

VERL = {
    "critic/score/mean": "reward/mean",
    "response_length/mean": "rollout/length",
    "response_length/max": "rollout/longest",
    "response_length/clip_ratio": "rollout/truncated",
    "actor/pg_loss": "train/loss",
    "actor/grad_norm": "train/gradient_norm",
    "actor/lr": "train/learning_rate",
    "actor/entropy": "train/entropy",
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/ppo_kl": "train/approx_kl",
    "actor/kl_loss": "train/k3_ref",
    "rollout_corr/kl": "mismatch/k1",
    "rollout_corr/k3_kl": "mismatch/k3",
    "rollout_corr/rollout_is_eff_sample_size": "mismatch/ess",
    "training/rollout_probs_diff_mean": "mismatch/absolute",
    "training/rollout_probs_diff_max": "mismatch/max",
}
# Names of earlier versions, names of quantities that differ from ours in a detail, and those of OpenRLHF.
NEAREST = {
    "frac_reward_zero_std": "rollout/frac_zero_std",  # of rewards, not of correctness
    "completion_length": "rollout/length",  # TRL before 0.17
    "response_clip_ratio": "rollout/truncated",  # ms-swift, OpenRLHF
    "clip_ratio": "train/clip_fraction",  # TRL before 0.17
    "actor/entropy_loss": "train/entropy",  # verl before 0.4: the entropy, with its own sign
    "actor/kl_penalty": "train/k3_ref",
    "policy_loss": "train/loss",
    "response_length": "rollout/length",
    "actor_grad_norm": "train/gradient_norm",
    "actor_lr": "train/learning_rate",
    "ppo_clip_ratio": "train/clip_fraction",
    "ppo_kl": "train/approx_kl",  # k1, not k3
    "vllm_kl": "mismatch/k1",
    "rollout/reward_mean": "reward/mean",
    "rollout/response_length_mean": "rollout/length",
    "rollout/truncated_rate": "rollout/truncated",
    "Loss": "train/loss",  # prime-rl's console
    "Reward": "reward/mean",
    "Entropy": "train/entropy",
    "Mismatch KL": "mismatch/k3",
    "Grad. Norm": "train/gradient_norm",
    "Seq. Length": "rollout/length",
}
_AGENTS = {
    re.compile(rf"train/agg/{name.split('/', 1)[0]}/[^/]+/{re.escape(name.split('/', 1)[1])}"): ours
    for name, ours in PRIME_RL_AGENT.items()
}
_EVALUATIONS = (
    re.compile(r"eval[_/](?:(?P<set>.+)_)?reward"),  # TRL
    re.compile(r"val-core/(?P<set>.+)/(?:acc|reward)/mean@\d+"),  # verl
    re.compile(r"val/test_score/(?P<set>.+)"),
    re.compile(r"eval_(?P<set>.+)_pass1"),  # OpenRLHF
    re.compile(r"eval/(?P<set>[^/]+)/(?:effective/[^/]+/)?avg@\d+"),  # prime-rl
)
_STEPS = ("train/global_step", "training/global_step", "global_step", "step", "Step", "_step")
_NUMBER = r"[-+]?(?:nan|inf|NaN|Infinity|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_IN_DICT = re.compile(rf"""['"]([^'"]+)['"]: ['"]?(?:np\.\w+\()?({_NUMBER})\)?['"]?(?=[,}}])""")
_PAIR = re.compile(rf"([\w./@ ()-]+?):(?:np\.\w+\()?({_NUMBER})\)?$")
_LABELLED = re.compile(rf"([A-Z][A-Za-z. ]*?):? +({_NUMBER})(?: |$)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

Row = tuple[int | None, Mapping[str, Any]]  # the step, None where the log has none, and numbers under their names


def our_name(theirs: str) -> str | None:
    """Our name of a logged number, None where we have none; `train/` before a name, as trackers have it, is no part."""
    for name in (theirs, theirs.removeprefix("train/")):
        for table in (TRL, VERL, PRIME_RL, NEAREST):
            if name in table:
                return table[name]
    for pattern, ours in _AGENTS.items():
        if pattern.fullmatch(theirs):
            return ours
    for pattern in _EVALUATIONS:
        if match := pattern.fullmatch(theirs):
            return f"eval/{re.sub(r'[^A-Za-z0-9_.-]+', '.', match['set'] or 'evaluation')}/accuracy"
    today = metric_name(theirs)
    try:
        find(today)
    except KeyError:
        return None
    return None if today.startswith(("external/", "time/")) else today


def read_log(place: Path) -> tuple[Path, str, ExternalLog]:
    """The file that was read, its format in words, and its numbers under our names.

    `place` is a file or a folder that a trainer wrote. Of two names for one of our metrics the one of today counts.
    Raises ValueError where nothing in it is a number that we know.
    """
    place = Path(place)
    if not place.exists():
        raise ValueError(f"there is no {place}: give a log file, or the folder that the trainer wrote")
    path, form, rows = _rows(place)
    log, last, unnumbered = ExternalLog(), 0, 0
    order = {name: rank for rank, name in enumerate((*TRL, *VERL, *PRIME_RL))}
    for step, numbers in rows:
        names = sorted(numbers, key=lambda name: order.get(name.removeprefix("train/"), len(order)))
        known = [(name, ours) for name in names if (ours := our_name(name)) is not None]
        if not known:
            continue
        if step is None:
            of_evaluation = all(ours.startswith("eval/") for _, ours in known)
            step = last if of_evaluation else last + 1
            unnumbered += not of_evaluation
        last = step
        for theirs, ours in reversed(known):  # the first, which is today's name, is written last
            log.add(step, theirs, ours, numbers[theirs])
    if not log.steps:
        raise ValueError(
            f"{path} has no metric of a known trainer: give trainer_state.json of TRL, the console output or JSONL of "
            "verl, the console output of OpenRLHF, metrics.jsonl of prime-rl, or a CSV export of wandb or TensorBoard"
        )
    if unnumbered:
        log.notes.append(f"the log has no step numbers: steps are its {unnumbered} entries in order")
    return path, form, log


def _rows(place: Path) -> tuple[Path, str, list[Row]]:
    if place.is_dir():
        if (place / "metrics.jsonl").exists() and (place / "run.json").exists():
            rows: list[Row] = [(record.step, record.metrics) for record in read_steps(place)]
            return place / "metrics.jsonl", "grpo_lab run folder", rows
        if any(place.glob("events.out.tfevents.*")):
            return place, "TensorBoard events", _events(place)
        if any(place.rglob("trainer_state.json")):
            return _rows(
                newest(place, "trainer_state.json", lambda path: read_json(path, AFRESH).get("global_step", 0))
            )
        if any(place.rglob("metrics.jsonl")):
            return _rows(newest(place, "metrics.jsonl", lambda path: path.stat().st_mtime))
        raise ValueError(f"{place} has no log that is known: name the file")
    if "tfevents" in place.name:
        return place, "TensorBoard events", _events(place)
    if place.suffix == ".json":
        history = read_json(place, AFRESH).get("log_history")
        if not isinstance(history, list):
            raise ValueError(f"{place} has no log_history, as trainer_state.json has: give another file")
        return place, "trainer_state.json", [_numbered(entry) for entry in history]
    text = place.read_text(encoding="utf-8", errors="replace")
    if place.suffix == ".csv":
        return place, "CSV", _of_csv(place, text)
    lines = [line for line in re.split(r"[\r\n]+", _ANSI.sub("", text)) if line.strip()]
    if place.suffix in (".jsonl", ".ndjson") or (lines and lines[0].lstrip().startswith('{"')):
        return place, "JSONL", list(_of_jsonl(place, lines))
    return place, "console output", list(_of_console(lines))


def _numbered(row: Mapping[str, Any]) -> Row:
    """A row with its step: verl's file logger nests the numbers in `data`."""
    numbers = {**row, **row["data"]} if isinstance(row.get("data"), dict) else row
    step = next((numbers[name] for name in _STEPS if isinstance(numbers.get(name), (int, float))), None)
    return None if step is None else int(step), {name: value for name, value in numbers.items() if name not in _STEPS}


def _of_jsonl(path: Path, lines: list[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # a trainer that was killed leaves half a line
                return
            raise ValueError(f"{path} line {number} is no JSON ({line[:60]!r}): remove it, or give the log") from error
        if isinstance(row, dict):
            yield _numbered(row)


def _of_csv(path: Path, text: str) -> list[Row]:
    """A column of wandb is `run - metric`. TensorBoard exports one scalar, whose name is that of the file."""
    rows = list(csv.DictReader(text.splitlines()))
    head = list(rows[0]) if rows else []
    if head == ["Wall time", "Step", "Value"]:
        metric = re.sub(r"^(?:run-)?.*?-tag-", "", path.stem)
        names = {"Value": next((n for n in (metric, metric.replace("_", "/", 1)) if our_name(n)), metric)}
    else:
        names = {name: name.rpartition(" - ")[2] for name in head if name and not name.endswith(("__MIN", "__MAX"))}
    found = []
    for row in rows:
        numbers = {
            names.get(name, name): _float(value) for name, value in row.items() if name in names or name == "Step"
        }
        found.append(_numbered({name: value for name, value in numbers.items() if value is not None}))
    return found


def _float(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _of_console(lines: list[str]) -> Iterator[Row]:
    for line in lines:
        if match := re.search(r"\bGlobal step (\d+): (\{.*)", line):  # OpenRLHF
            yield int(match[1]), {name: float(value) for name, value in _IN_DICT.findall(match[2])}
        elif match := re.search(r"\bstep:(\d+) - (.+)", line):  # verl
            pairs = [_PAIR.fullmatch(part.strip()) for part in match[2].split(" - ")]
            yield int(match[1]), {pair[1]: float(pair[2]) for pair in pairs if pair}
        elif match := re.search(r"\bStep (\d+) \| (.+)", line):  # prime-rl
            pairs = [_LABELLED.match(part.strip()) for part in match[2].split("|")]
            yield int(match[1]), {pair[1]: float(pair[2]) for pair in pairs if pair}
        elif "{'" in line or '{"' in line:  # TRL, ms-swift, Unsloth
            at = re.search(r"global_step/max_steps['\"]: ['\"](\d+)/", line)
            numbers = {name: float(value) for name, value in _IN_DICT.findall(line[line.index("{") :])}
            if numbers:
                yield int(at[1]) if at else None, numbers


def _events(place: Path) -> list[Row]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(
            f"{place} is of TensorBoard, which is not installed: pip install 'grpo-lab[tensorboard]', or export its "
            "scalars as CSV"
        ) from error
    events = EventAccumulator(str(place), size_guidance={"scalars": 0})
    events.Reload()
    by_step: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            by_step.setdefault(int(event.step), {})[tag] = float(event.value)
    return sorted(by_step.items())
