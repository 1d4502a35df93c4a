"""The environment of a GPU machine that has torch, transformers and little else, and a rehearsal of its commands.

    python tests/gpu/bare_environment.py FOLDER                                       torch as it is installed here
    python tests/gpu/bare_environment.py FOLDER torch==2.11.0 transformers==5.17.0    with these versions

Makes a virtual environment in FOLDER with PACKAGES and STUDY, and nothing else of what grpo_lab can use. There it runs
on the CPU, at the size of a test, what such a machine is for: a sweep, its data, the study of a pretrained model, and
every part of `make gpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("torch", "transformers", "pandas", "pyarrow", "scipy", "hydra-core")
STUDY = ("reasoning-gym", "gguf")  # what `make gpu-real` needs beyond them
TINY = "budget.amount=2,evaluation=brief,world=tiny"  # overrides, and the name of their sweep
# The study at the size of a test; a random model, asked by chat, stands in for SmolLM2.
SMALL_STUDY = (
    "model=hf", "device=cpu", "engine=native", "seed=0", "budget.amount=2", "evaluation.every=2",
    "hydra.launcher.workers=2", "problems_per_step=16", "group_size=2", "microbatch_tokens=1024",
    "task.response_tokens=320", "task.downstream_response_tokens=16", "task.train_size=160", "task.probe_size=4",
    "task.heldout_size=8", "task.downstream_size=4", "evaluation.probe_problems=4", "evaluation.heldout_problems=4",
    "evaluation.ends_heldout_problems=8", "evaluation.downstream_problems=4",
)  # fmt: skip
MODEL = "import findings, llama, pathlib, sys; llama.asked_by_chat(pathlib.Path(sys.argv[1]))"


def sweep_commands(python: str, folder: Path) -> Iterator[list[str]]:
    """A sweep of two runs, and its data."""
    train = [python, "-m", "grpo_lab.train", "-m", *TINY.split(","), "device=cpu", "tracking=none", "seed=0,1"]
    yield [*train, "hydra.launcher.workers=2", f"runs_dir={folder / 'runs'}"]
    yield [python, "-m", "grpo_lab.cli", "data", TINY, "--runs", f"{folder / 'runs'}", "--to", f"{folder / 'data'}"]


def study_commands(python: str, folder: Path, *only: str) -> Iterator[list[str]]:
    """The study of `make gpu-real`: its two sweeps, and their data; `--only` and a name for one of them."""
    yield [python, "-c", MODEL, f"{folder / 'model'}"]
    study = [python, str(HERE / "study.py"), "--runs", f"{folder / 'study'}", "--slice", "3000"]
    yield [*study, *only, "--to", f"{folder / 'data'}", *SMALL_STUDY, f"model.path={folder / 'model'}"]


def part_commands(python: str, folder: Path, parts: Sequence[str] = ()) -> Iterator[list[str]]:
    """Parts of `make gpu`, all where none is named."""
    size = ["--device", "cpu", "--small", "--patience", "8", "--slice", "6000"]
    yield [python, str(HERE / "run.py"), *parts, *size, "--to", f"{folder / 'results.json'}"]


def rehearse(commands: Iterator[list[str]], environment: Mapping[str, str]) -> None:
    """Run the commands one after another, as on a machine without a GPU. Raises RuntimeError for one that fails."""
    paths = [str(ROOT), str(HERE), *filter(None, [environment.get("PYTHONPATH")])]
    bare = {**environment, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout + done.stderr)[-4000:]
            raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{said}")


def make(folder: Path, versions: Sequence[str] = ()) -> str:
    """Make the environment in an empty folder and return its Python. `versions` are pip's words, `torch==2.11.0`."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    given = {word.partition("==")[0] for word in versions}
    wanted = [*versions, *(name for name in (*PACKAGES, *STUDY) if name not in given)]
    # The build of torch for the CPU that is here, where pip finds it; others bring CUDA with them.
    wanted = [f"torch=={metadata.version('torch')}" if word == "torch" else word for word in wanted]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
    return python


def main() -> None:
    folder, *versions = sys.argv[1:] or sys.exit(__doc__)
    python = make(Path(folder).absolute(), versions)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as name:
        for kind in (sweep_commands, study_commands, part_commands):
            rehearse(kind(python, Path(name)), outside)
            print(f"{kind.__name__.replace('_', ' ')}: all ended well", flush=True)


if __name__ == "__main__":
    main()
