"""A submission: a declared sweep of somebody else's, with its data and a page, in one folder that can be checked.

    FOLDER/design.yaml       the declaration
    FOLDER/data/             the three files of `grpo-lab data`, without answers to single questions
    FOLDER/README.md         a page: what was run where, and what came out
    FOLDER/submission.json   digests of these files, and of each run its key, code, packages and time

`pack` writes it where the run folders are. `add` checks it and copies it into experiments/external, from where
`make claims` shows it as external evidence. External evidence enters no other table, figure or pooled effect.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lab.analysis.effects.manipulation_checks import failed_checks
from grpo_lab.analysis.effects.verdict import judge
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import lean, load_data, save_data, saved_names
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import Design, load_design
from grpo_lab.config.folders import DATA, DESIGN, EXTERNAL, declared, experiments_folder
from grpo_lab.tracking.checksums import digest_of, read_checksummed, read_json, with_checksum
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.terminal import say

FILE, PAGE, FORMAT = "submission.json", "README.md", 1
_MACHINE = ("host", "platform", "cpu")  # what tells machines apart: several may have one name
_REMEDY = "ask for the folder again, or pack it again with grpo-lab claims --pack"
_LARGEST_MB = 20
_PAGE = """# {name}

{question}

## How it was run

<!-- Machine, dates, and the command. What was seen before the declaration. Whatever departs from it. -->

## What came out

<!-- The verdicts in words, negative ones too. -->
"""


def pack(name: str, runs: Path, declaration: Path, to: Path, example: bool) -> Path:
    """Write the folder of a finished sweep from its run folders; an existing README.md stays. Raises ValueError."""
    design = load_design(declaration)
    data = load_sweep(runs, name)
    to.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(declaration, to / DESIGN)
    save_data(lean(data), to / DATA, compact=True)
    if not (to / PAGE).exists():
        (to / PAGE).write_text(_PAGE.format(name=design.name, question=design.question))
    described = [_described(runs, row) for row in data.runs.to_dict("records") if row["run_key"]]
    write_json(
        to / FILE,
        with_checksum(
            {
                "format": FORMAT,
                "name": design.name,
                "example": example,
                "fingerprint": design.fingerprint(),
                "runs": described,
                "files": {path.relative_to(to).as_posix(): digest_of(path) for path in _files(to) if path.name != FILE},
            }
        ),
    )
    return to


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _described(runs: Path, row: Mapping[Any, Any]) -> dict[str, Any]:
    """A run as submission.json holds it. No host or user name is in it."""
    folder = runs / row["folder"]
    run = read_json(folder / "run.json", _REMEDY)
    environment = read_json(folder / "environment.json", _REMEDY) if (folder / "environment.json").exists() else {}
    walls = [json.loads(line)["wall"] for line in (folder / "timing.jsonl").read_text().splitlines() if line]
    return {
        **{key: row[key] for key in ("level", "arm", "seed", "run_key", "commit", "dirty")},
        "segments": [{key: one[key] for key in ("from_step", "sources", "packages")} for one in run["stretches"]],
        "version": environment.get("packages", {}).get("grpo-lab", ""),
        **{key: environment.get(key, "") for key in ("host", "platform")},
        "cpu": environment.get("cpu", {}).get("model", ""),
        "gpus": [one["name"] for one in environment.get("gpus", ())],
        "first_step": _utc(walls[0]) if walls else "",
        "last_step": _utc(walls[-1]) if walls else "",
    }


def _utc(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(milliseconds / 1000))


def check(folder: Path, experiments: Path) -> tuple[Design, SweepData, dict[str, Any]]:
    """The declaration, data and description of a submission. Raises ValueError that lists everything wrong with it.

    `experiments` are those of this repository: neither their names nor their runs may come again.
    """
    for name in (FILE, DESIGN, PAGE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: grpo-lab claims --pack writes such a folder")
    described = read_checksummed(folder / FILE, _REMEDY)
    if described["format"] != FORMAT:
        raise ValueError(f"{folder / FILE} has format {described['format']}, this version reads {FORMAT}")
    if faults := _faults_of_files(folder, described):  # nothing else is worth reading
        raise ValueError(_refused(folder, faults))
    design = load_design(folder / DESIGN)
    if saved_names(folder / DATA) != [design.name]:
        raise ValueError(_refused(folder, [f"{DATA} does not hold the saved data of {design.name}"]))
    data = load_data(folder / DATA, design.name)
    faults = [
        *_faults_of_declaration(design, data, described),
        *_faults_of_runs(design, data, described),
        *_faults_of_code(described),
        *_repeated(design, described, experiments),
    ]
    if faults:
        raise ValueError(_refused(folder, faults))
    return design, data, described


def _refused(folder: Path, faults: list[str]) -> str:
    return "\n  - ".join([f"{folder} is not accepted:", *faults])


def _faults_of_files(folder: Path, described: Mapping[str, Any]) -> list[str]:
    """Digests, and files that are missing or do not belong there."""
    there = {path.relative_to(folder).as_posix(): path for path in _files(folder) if path.name != FILE}
    faults = [f"{name} is missing" for name in described["files"] if name not in there]
    for name, path in there.items():
        if name not in described["files"]:
            faults.append(f"{name} is not listed in {FILE}")
        elif digest_of(path) != described["files"][name]:
            faults.append(f"{name} is not what was packed: its digest differs")
        elif path.is_symlink() or (name not in (DESIGN, PAGE) and path.parent != folder / DATA):
            faults.append(f"{name} is no part of a submission")
    if "<!--" in (folder / PAGE).read_text() or (folder / PAGE).stat().st_size < 200:
        faults.append(f"{PAGE} is not written: say what was run where, and what came out")
    size = sum(path.stat().st_size for path in there.values()) / 1e6
    return faults + ([f"{size:.0f} MB are more than {_LARGEST_MB}"] if size > _LARGEST_MB else [])


def _faults_of_declaration(design: Design, data: SweepData, described: Mapping[str, Any]) -> list[str]:
    """Whether it predicts something, whether the data are of it, and whether it came before the first run."""
    faults = []
    if design.exploratory or not design.predictions:
        faults.append("nothing was predicted, so nothing can be judged")
    prints = {design.fingerprint(), described["fingerprint"], data.record.declared[-1]["fingerprint"]}
    if data.design is None or prints != {data.design.fingerprint()}:
        faults.append(f"the data are of another declaration than {DESIGN}")
    last = data.record.declared[-1]
    if last["runs_started_before"]:
        faults.append(f"{last['runs_started_before']} runs had started before the declaration of {last['at']}")
    early = [one for one in described["runs"] if not one["first_step"] or one["first_step"] < last["at"]]
    if early:
        first = min(one["first_step"] for one in early) or "at an unknown time"
        faults.append(f"{len(early)} runs made their first step ({first}) before the declaration of {last['at']}")
    return faults


def _faults_of_runs(design: Design, data: SweepData, described: Mapping[str, Any]) -> list[str]:
    """Seeds: every declared run is there once and has ended, on its base model, and no other is."""
    no_ops = failed_checks(data)
    declared = {(level, arm, seed) for level in design.levels for arm in design.arms for seed in design.seeds}
    ended = data.runs[(data.runs["status"] == "done") | data.runs["collapsed"].astype(bool) | data.exhausted]
    found = Counter(ended[["level", "arm", "seed"]].itertuples(index=False, name=None))
    missing = sorted(one for one in declared - set(found) if one[:2] not in no_ops)
    faults = [f"{len(missing)} declared runs have not ended, such as {_title(missing[0])}"] if missing else []
    if further := sorted(set(found) - declared):
        faults.append(f"{len(further)} runs were not declared, such as {_title(further[0])}")
    rows = data.runs[data.runs["run_key"].notna()]
    keys = {(one["level"], one["arm"], one["seed"]): one["run_key"] for one in described["runs"]}
    if keys != {(row["level"], row["arm"], row["seed"]): row["run_key"] for row in rows.to_dict("records")}:
        faults.append(f"the runs in {FILE} are not those of the data")
    own = [row["run_key"] for row in rows.to_dict("records") if not row["same_as"]]
    if len(set(own)) < len(own):
        faults.append("a run is there under two labels")
    wrong = [one for one in ended.to_dict("records") if design.bases and one["base"] != design.base_of(one["seed"])]
    if wrong:
        faults.append(f"seed {wrong[0]['seed']} ran on base model {wrong[0]['base']}, another one was declared")
    return faults


def _title(labels: tuple[str, str, int]) -> str:
    level, arm, seed = labels
    return " ".join(filter(None, (level, arm, f"seed {seed}")))


def _faults_of_code(described: Mapping[str, Any]) -> list[str]:
    """Versions: one commit and one set of packages for all runs, and no local changes of the code."""
    faults, runs = [], described["runs"]
    if changed := [one for one in runs if one["dirty"] or one["dirty"] is None]:
        faults.append(f"{len(changed)} runs had changes of the code that no commit holds, or no commit at all")
    if len({one["commit"] for one in runs}) > 1:
        faults.append("the runs are of several commits")
    code = {json.dumps([part["sources"], part["packages"]]) for one in runs for part in one["segments"]}
    if len(code) > 1:
        faults.append("code or versions of packages changed between the runs, or within one")
    return faults


def _repeated(design: Design, described: Mapping[str, Any], experiments: Path) -> list[str]:
    """Names and runs that this repository has already."""
    own = declared(experiments).get(design.name)
    if own is None:
        return []
    if load_design(own / DESIGN).fingerprint() != design.fingerprint():
        return [f"{design.name} is another experiment here: give yours another name"]
    if design.name in saved_names(own / DATA):
        keys = set(load_data(own / DATA, design.name).runs["run_key"])
        if keys & {one["run_key"] for one in described["runs"]}:
            return [f"these runs are those of {own}"]
    return []


def add(folder: Path, experiments: Path) -> Path:
    """Check a submission and copy it to `experiments`/external; a checked one of that name is not replaced."""
    design, _, _ = check(folder, experiments)
    place = experiments / EXTERNAL / design.name
    if place.exists() and place.resolve() != folder.resolve():
        raise ValueError(f"{place} exists: remove it first if this submission replaces it")
    if not place.exists():
        shutil.copytree(folder, place)
    return place


def summary(data: SweepData, described: Mapping[str, Any]) -> list[str]:
    """Lines that summarise a submission: its runs, versions and verdicts."""
    runs = described["runs"]
    packages = ", ".join(f"{name} {version}" for name, version in sorted(runs[0]["segments"][0]["packages"].items()))
    hosts = len({tuple(one.get(key) for key in _MACHINE) for one in runs})
    lines = [
        f"{len(runs)} runs on {hosts} machine{'s' * (hosts > 1)}, {min(one['first_step'] for one in runs)} to "
        f"{max(one['last_step'] for one in runs)}; declared {data.record.declared[-1]['at']}",
        f"commit {runs[0]['commit'][:12]}, {packages}",
    ]
    for one in judge(data, final_values(data)):
        prediction = one.prediction
        what = f"{prediction.arm} {prediction.direction.value} {'/'.join(filter(None, one.reference))}"
        lines.append(f"{one.verdict}: {what}, {metric_text(prediction.metric)} {one.difference.text('+')}")
    return lines


def _declaration_of(name: str) -> Path:
    """The declaration of this name, here or in a folder of GRPO_LAB_CONFIG_PATH. Raises ValueError."""
    folders = filter(None, os.environ.get("GRPO_LAB_CONFIG_PATH", "").split(os.pathsep))
    found = [Path(folder) / "experiments" / f"{name}.yaml" for folder in folders]
    if name in (own := declared(experiments_folder())):
        found.append(own[name] / DESIGN)
    for path in found:
        if path.is_file():
            return path
    raise ValueError(f"there is no declaration of {name}: name its file with --design")


def claims(arguments: argparse.Namespace) -> None:
    """Pack a submission, or check one and add it."""
    experiments = arguments.experiments or experiments_folder()
    if (arguments.pack is None) == (arguments.add is None):
        raise ValueError("give --pack NAME, which writes a submission, or --add FOLDER, which checks one and adds it")
    if arguments.pack is not None:
        to = arguments.to or Path(f"{arguments.pack}_submission")
        declaration = arguments.design or _declaration_of(arguments.pack)
        say(pack(arguments.pack, arguments.runs, declaration, to, arguments.example))
        say(f"write {to / PAGE}, then seal it: the same command again; grpo-lab claims --add {to} checks it")
        return
    place = arguments.add if arguments.check else add(arguments.add, experiments)
    _, data, described = check(place, experiments)
    say(*summary(data, described), sep="\n")
    say("checked" if arguments.check else f"{place}; make claims writes it into experiments/README.md")
