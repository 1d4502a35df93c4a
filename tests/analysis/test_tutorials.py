"""Committed tutorials are small and complete, hold no path of a machine, and every cell runs from its source."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "analysis" / "tutorials"
NAMES = ("first_ablation", "your_model_and_reward", "reward_and_truth", "write_a_trick")
MOST_CELLS = 16
MOST_OF_A_PICTURE, MOST_OF_ALL = 60_000, 500_000  # bytes
# A path, a speed, a time that is left, a colour of a terminal, an address in memory.
OF_A_MACHINE = re.compile(
    r"(?<![\w.])/(?:tmp|root|home|work|usr|opt|Users)/|\btok/s|\b\d+m\d\ds\b|\x1b\[|0x[0-9a-f]{6}"
)


@cache
def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def cells(name: str, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == kind]


def outputs(name: str) -> list[dict[str, Any]]:
    return [output for cell in cells(name, "code") for output in cell["outputs"]]


def texts(output: dict[str, Any]) -> list[str]:
    """What an output says, without its pictures."""
    parts = [output.get("text", ""), *(text for kind, text in output.get("data", {}).items() if "image" not in kind)]
    return ["".join(part) for part in parts]


def pictures(name: str) -> list[bytes]:
    found = [output["data"]["image/png"] for output in outputs(name) if "image/png" in output.get("data", {})]
    return [base64.b64decode("".join(picture)) for picture in found]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_these_are_the_tutorials() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.suffix) == sorted(f"{name}.ipynb" for name in NAMES)
    assert sum(path.stat().st_size for path in FOLDER.glob("*.ipynb")) < MOST_OF_ALL


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_is_short_and_runs_in_a_folder_that_is_deleted(name: str) -> None:
    own = read(name)
    assert own["metadata"]["kernelspec"]["name"] == "python3" and len(own["cells"]) <= MOST_CELLS
    assert "".join(own["cells"][0]["source"]).startswith("# ") and "## Next" in "".join(own["cells"][-1]["source"])
    setup = "".join(cells(name, "code")[0]["source"])
    assert "tempfile.TemporaryDirectory()" in setup and "os.chdir(folder.name)" in setup


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_of_one_run_without_errors_and_without_this_machine(name: str) -> None:
    code = cells(name, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [cell["id"] for cell in code if "execution" in cell["metadata"]], "times of execution"
    assert outputs(name) and not [output for output in outputs(name) if output["output_type"] == "error"]
    warned = [cell["id"] for cell in code for output in cell["outputs"] if output.get("name") == "stderr"]
    assert not [cell["id"] for cell in code if cell["id"] in warned and cell["source"][0] != "%%bash\n"]
    said = [text for output in outputs(name) for text in texts(output)]
    assert not [hit.group() for text in said if (hit := OF_A_MACHINE.search(text))]
    assert pictures(name) and max(map(len, pictures(name))) < MOST_OF_A_PICTURE


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_tutorial_lead_somewhere(name: str) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(name, "markdown"))
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text)
    assert len(links) >= 4
    for target, anchor in links:
        assert "://" in target or (FOLDER / target).exists(), target
        assert not anchor or anchor in anchors(FOLDER / target), f"{target}#{anchor}"


def test_make_executes_every_tutorial_in_place() -> None:
    planned = subprocess.run(["make", "-n", "tutorials"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--execute --inplace" in planned
    assert set(re.findall(r"analysis/tutorials/(\w+)\.ipynb", planned)) == set(NAMES)


@pytest.mark.extended
@pytest.mark.needs("nbclient", "ipykernel")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs_from_its_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat
    from pretrained import smollm2_folder

    if name == "your_model_and_reward":
        smollm2_folder()  # skips this test where there is no model and no index
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=1000, startup_timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises where a cell does
    assert not list(tmp_path.iterdir()), "runs go into a folder that is deleted"
    for before, now in zip(cells(name, "code"), (cell for cell in notebook.cells if cell.cell_type == "code")):
        kinds = [{output["output_type"] for output in cell["outputs"]} for cell in (before, now)]
        assert kinds[0] == kinds[1], f"{now.id}: other outputs than those that are committed"
