"""The faults that `make mutants` plants fit the code and its tests, and the command says which of them were seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import plant
import pytest
import yaml

HERE = Path(__file__).parent
PACKAGE = plant.ROOT / "grpo_lab"

MIXES = {
    "name": "reset",
    "file": "tricks/reference.py",
    "old": "(step + 1) % self.every",
    "new": "step % self.every",
    "does": "resets a step late",
    "tests": ["test_interventions.py::test_shares_of_the_learner"],
}
UNSEEN = MIXES | {"name": "unseen", "old": "return 1 - self.decay", "new": "return 1 - 1 * self.decay"}


def test_every_fault_stands_once_in_the_code_and_every_test_that_should_see_it_exists() -> None:
    faults = plant.read()
    assert plant.mistakes(faults) == []
    assert len(faults) >= 42 and len({fault.file for fault in faults}) >= 25
    assert all("|" not in fault.name + fault.does + fault.equivalent for fault in faults), "they are runs of a table"


def test_every_change_runs_the_tests_that_should_see_a_fault(request: pytest.FixtureRequest) -> None:
    wanted = {test for fault in plant.read() for test in fault.tests}
    chosen = {f"{item.path.name}::{item.name}" for item in request.session.items}
    files = {test.partition("::")[0] for test in chosen}
    if request.config.option.keyword or any(test.partition("::")[0] not in files for test in wanted):
        pytest.skip("only some tests were chosen, by more than their marks")
    assert wanted - chosen - {test.partition("[")[0] for test in chosen} == set()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "step + 2"}, "reset: its old text occurs 0 times in tricks/reference.py: it must occur once"),
        ({"old": "self.decay"}, "reset: its old text occurs 2 times in tricks/reference.py: it must occur once"),
        ({"new": "(step + 1 % self.every"}, "reset: new is no Python there"),
        ({"new": "((step+1) % self.every)"}, "reset: old and new are the same code"),
        ({"tests": ["test_interventions.py::test_gone"]}, "reset: tests/tricks/test_interventions.py has no test_gone"),
        ({"tests": ["test_gone.py::test_gone[a]"]}, "reset: no folder of tests has a test_gone.py"),
        ({"tests": []}, "reset: no test is named that should see it"),
    ],
)
def test_a_list_that_no_longer_fits_is_refused_by_name(change: dict, said: str) -> None:
    assert plant.mistakes([plant.Fault(**MIXES | change)]) == [said]


def test_a_name_stands_for_one_fault() -> None:
    twice = [plant.Fault(**MIXES), plant.Fault(**MIXES)]
    assert plant.mistakes(twice) == ["reset: another fault has this name"] * 2


def command(folder: Path, faults: list[dict], *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "some.yaml").write_text(yaml.safe_dump(faults))
    return subprocess.run(
        [sys.executable, str(HERE / "plant.py"), "--lists", str(folder), *words],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def test_faults_that_do_not_fit_stop_the_command_before_a_test_runs(tmp_path: Path) -> None:
    done = command(tmp_path, [MIXES | {"old": "gone"}], "--table", str(tmp_path / "table.md"))
    assert done.returncode == 1 and "reset: its old text occurs 0 times" in done.stderr
    done = command(tmp_path, [MIXES], "--only", "nothing of this name", "--table", str(tmp_path / "table.md"))
    assert done.returncode == 1 and "is about 'nothing of this name'" in done.stderr
    assert not (tmp_path / "table.md").exists()


@pytest.mark.needs("mutmut", "coverage")
def test_faults_that_are_drawn_fit_the_code_and_name_the_tests_that_cover_their_lines(tmp_path: Path) -> None:
    from coverage import CoverageData

    covered, file = CoverageData(str(tmp_path / "covered")), PACKAGE / "rollout" / "rounds.py"
    covered.set_context("test_filters.test_groups_that_end_at_once_are_not_lost_and_cost_nothing_later")
    covered.add_lines({str(file): range(1, 200)})
    covered.write()
    lists = []
    for name in ("one", "again"):
        words = [
            "rollout/rounds.py",
            "--number",
            "5",
            "--covered",
            str(tmp_path / "covered"),
            "--to",
            str(tmp_path / name),
        ]
        done = subprocess.run([sys.executable, str(HERE / "draw.py"), *words], capture_output=True, text=True)
        assert done.stdout.startswith("5 faults in ") and done.returncode == 0, done.stderr
        lists.append(plant.read(tmp_path / name))
    assert lists[0] == lists[1] and len(lists[0]) == 5 and plant.mistakes(lists[0]) == []
    (test,) = {test for fault in lists[0] for test in fault.tests}
    assert test == "test_filters.py::test_groups_that_end_at_once_are_not_lost_and_cost_nothing_later"


def lives_in(place: Path, folder: Path) -> bool:
    """Whether a process of this machine works in the folder, by its entry in /proc."""
    try:
        return place.resolve() == folder
    except OSError:  # it has ended since, or is another user's
        return False


def test_a_hang_is_a_kill_and_leaves_no_process(tmp_path: Path) -> None:
    copy = plant.Copy(tmp_path)
    verdict = copy.judge(plant.Fault(**MIXES), 0.2)
    assert verdict.killed_by == "a hang: longer than 0.2 s" and verdict.as_it_should
    assert copy.process is None
    assert not any(lives_in(place, tmp_path) for place in Path("/proc").glob("[0-9]*/cwd"))
    assert (tmp_path / "grpo_lab" / MIXES["file"]).read_text() == (PACKAGE / MIXES["file"]).read_text()


@pytest.mark.extended
@pytest.mark.timeout(600)  # five processes that load torch
def test_killed_and_surviving_faults_are_told_apart(tmp_path: Path) -> None:
    """The package that is imported is the copy, the tree stays as it was, and a survivor fails the command."""
    source = (PACKAGE / MIXES["file"]).read_bytes()
    alike = UNSEEN | {"name": "alike", "new": "return 1 - self.decay / 1", "equivalent": "a division by 1"}
    words = ("--workers", "1", "--table", str(tmp_path / "table.md"))
    broken = MIXES | {"name": "broken", "old": "from __future__ import annotations", "new": "raise OSError"}
    done = command(tmp_path, [MIXES, UNSEEN, alike, broken], *words)
    assert done.stderr.strip() == "not as the list says: unseen" and done.returncode == 1
    *rows, _, total = (tmp_path / "table.md").read_text().splitlines()
    assert [row.split(" | ")[3].removesuffix(" |") for row in rows[2:]] == [
        "test_interventions.py::test_shares_of_the_learner",
        "**survived**",
        "equivalent: a division by 1",
        "its tests do not load",
    ]
    assert total == "4 planted, 2 killed, 2 survived, 1 of them said to be alike."
    assert (PACKAGE / MIXES["file"]).read_bytes() == source
    with pytest.raises(ValueError, match="without any fault every test must pass"):
        plant.Copy(tmp_path / "copy").check(["test_interventions.py::test_gone"])
