"""Every command in a code block of a page exists: flags parse, overrides compose, targets of make are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from grpo_lab.cli import command_line
from grpo_lab.config.hydra_setup import bootstrap, compose_config

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in ROOT.glob("[a-z]*/**/*.md") if not {"figures", "data", "build", "runs"} & set(path.parts)),
]
BLOCK = re.compile(r"^ *```(?:bash|console|)\n(.*?)^ *```", flags=re.S | re.M)
# Words that stand for something of the reader's, and paths that are not here: these commands are parsed, not composed.
OF_THE_READER = re.compile(r"\b[A-Z]{3,}\b|\.jsonl|\.py:|<|/shared/|optuna|model=hf|\$")
OF_SWEEPS = re.compile(r"^(-m|--multirun|add=|leave_one_out=|\+experiments=|hydra)")


def commands() -> Iterator[tuple[str, str]]:
    """Page and command, each on one line, without comments."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = re.sub(r"(^| )#.*", "", line.strip().removeprefix("$ ")).strip()
                if words:
                    yield page.relative_to(ROOT).as_posix(), words


LINES = list(dict.fromkeys(commands()))
OF_GRPO_LAB = [(page, line) for page, line in LINES if line.startswith("grpo-lab ")]
OF_TRAIN = [(page, line) for page, line in LINES if "-m grpo_lab.train" in line]
OF_MAKE = [(page, line) for page, line in LINES if line.startswith("make ")]
known = cache(command_line)  # all of its parsers are made at each call


def test_there_are_many() -> None:
    assert len(OF_GRPO_LAB) >= 12 and len(OF_TRAIN) >= 10 and len(OF_MAKE) >= 6


@pytest.mark.parametrize(("page", "line"), OF_GRPO_LAB)
def test_a_command_has_these_flags(page: str, line: str) -> None:
    parser, commands = known()
    words = [word for word in shlex.split(line)[1:] if word != "dev"]
    assert words[0] in commands, page
    if words[0] not in ("train", "sweep"):
        parser.parse_args(words)


@pytest.mark.parametrize(("page", "line"), [(page, line) for page, line in OF_TRAIN if not OF_THE_READER.search(line)])
def test_its_overrides_compose(page: str, line: str) -> None:
    """Of a sweep over lists those of its first run, and of an ablation those of its control."""
    words = [word for word in shlex.split(line.partition("-m grpo_lab.train")[2]) if not OF_SWEEPS.search(word)]
    bootstrap()
    compose_config([re.sub(r"=([^\[{'\",]+),.*", r"=\1", word) for word in words])


@pytest.mark.parametrize(("page", "line"), OF_MAKE)
def test_a_target_is_there(page: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert shlex.split(line)[1] in targets, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_named_in_sentences_exist(page: Path) -> None:
    named = re.findall(r"`grpo-lab (?:dev )?([a-z][a-z-]*)", page.read_text())
    assert set(named) <= {*known()[1], "dev"}
