"""Where configuration and experiments lie; figures and pages ask too, so this module loads nothing large."""

from __future__ import annotations

from pathlib import Path

DESIGN = "design.yaml"  # what an experiment's folder declares
DATA = "data"  # the saved numbers within it
EXTERNAL = "external"  # the folder of checked submissions, which no experiment of this repository may read as its own
_SUPERSEDED = "superseded"  # the folder of experiments that another one replaced


def conf_folder() -> Path:
    """The configuration folder: the repository's, or the copy inside an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    beside = package.parent / "conf"
    return beside if (beside / "config.yaml").exists() else package / "conf"


def experiments_folder() -> Path:
    """The folder of declared experiments, beside the configuration."""
    return conf_folder().parent / "experiments"


def declared(experiments: Path) -> dict[str, Path]:
    """Name -> folder of all experiments that a folder declares, superseded ones too, in the order of their names."""
    found = [*experiments.glob(f"*/{DESIGN}"), *experiments.glob(f"{_SUPERSEDED}/*/{DESIGN}")]
    return {path.parent.name: path.parent for path in sorted(found, key=lambda path: path.parent.name)}


def folder_of(name: str, experiments: Path = Path("experiments")) -> Path:
    """Where a sweep's data and figures are kept: the folder below `experiments` that declares it, or would.

    A sweep with overrides of its own is called as its experiment, with these after a comma.
    """
    return declared(experiments).get(name.partition(",")[0], experiments / name)


def data_of(name: str, experiments: Path = Path("experiments")) -> Path:
    """Where a sweep's numbers are saved unless a folder is given."""
    return folder_of(name, experiments) / DATA
