"""The plugins that Hydra discovers: thin subclasses, because Hydra accepts plugins only from this namespace.

Never write `from __future__ import annotations` here: together with a dataclass it breaks every Hydra app of the
environment. Nothing heavy is imported before a method is called.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence  # noqa: UP035

from hydra._internal.core_plugins import file_config_source
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class Experiments(file_config_source.FileConfigSource):
    """The config group `experiments`: of each folder that declares an experiment, its design.yaml by the folder's name.

    The sweep itself is composed with the world and the model that all its runs have, so that `model.file=FILE` or
    another key of theirs may be typed for it.
    """

    @staticmethod
    def scheme() -> str:
        return "experiments"

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "experiments")

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith("experiments/") and _within(config_path) in self._declared()

    def load_config(self, config_path: str) -> ConfigResult:
        found = super().load_config(self._declared().get(_within(config_path), config_path))
        shared = OmegaConf.select(found.config, "design.base", default=None) or []
        chosen = [str(word).partition("=") for word in shared if re.match("(world|model)=", str(word))]
        defaults = [*({f"override /{group}": option} for group, _, option in chosen), "_self_"]
        return replace(found, config=OmegaConf.merge({"defaults": defaults}, found.config))

    def list(self, config_path: str, results_filter: Optional[ObjectType]) -> List[str]:  # noqa: UP006, UP045
        if config_path == "":
            return ["experiments"] if results_filter is not ObjectType.CONFIG else []
        return list(self._declared()) if results_filter is not ObjectType.GROUP else []

    def _declared(self) -> Dict[str, str]:  # noqa: UP006
        """Name -> path of its file within the folder."""
        from grpo_lab.config.folders import DESIGN, declared

        root = Path(self.path)
        return {name: (folder / DESIGN).relative_to(root).as_posix() for name, folder in declared(root).items()}


def _within(config_path: str) -> str:
    return config_path.removeprefix("experiments/")


class GrpoLabSearchPath(SearchPathPlugin):
    """Adds the repository's experiments, whose folder is beside conf, and the user's own YAML folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from grpo_lab.config.folders import experiments_folder
        from grpo_lab.config.user_files import user_folders

        if experiments_folder().is_dir():
            search_path.append("grpo_lab_experiments", f"experiments://{experiments_folder()}")
        for folder in user_folders():
            search_path.append("grpo_lab_user", f"file://{folder.absolute()}")


@dataclass
class RunSweeperConf:
    """hydra/sweeper=runs. `dry_run` lists the runs and starts none.

    `pilot` runs what design.requires first, for `pilot_share` of the budget. `run_no_ops` runs arms whose manipulation
    check failed in the pilot too; `run_inert` is its name of before. `add` and `leave_one_out` are the additions of an
    ablation from the shell: overrides, and lists of overrides that one arm adds together.
    """

    _target_: str = "hydra_plugins.grpo_lab.RunSweeper"
    _convert_: str = "all"
    dry_run: bool = False
    pilot: bool = True
    pilot_share: float = 0.25
    run_no_ops: bool = False
    run_inert: Optional[bool] = None  # noqa: UP045
    add: List[Any] = field(default_factory=list)  # noqa: UP006
    leave_one_out: List[Any] = field(default_factory=list)  # noqa: UP006


@dataclass
class LocalLauncherConf:
    """hydra/launcher=local: one process per run, `workers` runs at a time (None: as many as fit the machine)."""

    _target_: str = "hydra_plugins.grpo_lab.LocalLauncher"
    workers: Optional[int] = None  # noqa: UP045
    grace_seconds: float = 120.0  # between Ctrl-C, after which runs finish their steps and save, and SIGKILL
    silent_minutes: Optional[float] = 360.0  # noqa: UP045  a run that writes nothing for so long hangs and is ended
    processes: int = 1  # that share one run, started by torchrun; each takes a GPU where there are some


@dataclass
class SlurmLauncherConf:
    """hydra/launcher=slurm: one job per run, `at_once` in the queue (None: all). Empty texts: as the cluster does."""

    _target_: str = "hydra_plugins.grpo_lab.SlurmLauncher"
    at_once: Optional[int] = None  # noqa: UP045
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    minutes: int = 240  # the limit of a job; a longer run goes back into the queue and on from its checkpoint
    warning_seconds: int = 90  # before that limit
    gpus: int = 0
    cpus: Optional[int] = None  # noqa: UP045  the run's threads
    memory_gb: Optional[float] = None  # noqa: UP045
    setup: List[str] = field(default_factory=list)  # noqa: UP006  shell lines, such as "module load cuda"
    further: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006  of sbatch: +...further.exclude=node7
    grace_seconds: float = 120.0  # between Ctrl-C and scancel, as of local
    silent_minutes: Optional[float] = 360.0  # noqa: UP045  as of local
    processes: int = 1  # as of local


@dataclass
class RayLauncherConf:
    """hydra/launcher=ray: one task per run, `at_once` in the cluster (None: all).

    Without `address` it is the cluster of RAY_ADDRESS, else that of this machine, else one that ends with the sweep.
    """

    _target_: str = "hydra_plugins.grpo_lab.RayLauncher"
    address: str = ""
    at_once: Optional[int] = None  # noqa: UP045
    cpus: Optional[float] = None  # noqa: UP045  the run's threads
    gpus: float = 0.0  # below 1, so many runs share a GPU
    memory_gb: Optional[float] = None  # noqa: UP045
    resources: Dict[str, float] = field(default_factory=dict)  # noqa: UP006  the cluster's own: +...resources.disk=1
    retries: int = 10  # of a run whose node or worker died
    grace_seconds: float = 120.0  # between Ctrl-C and the end of what has not ended, as of local
    silent_minutes: Optional[float] = 360.0  # noqa: UP045  as of local
    processes: int = 1  # as of local


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayLauncherConf, provider="grpo_lab")
ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmLauncherConf, provider="grpo_lab")
ConfigStore.instance().store(group="hydra/sweeper", name="runs", node=RunSweeperConf, provider="grpo_lab")
ConfigStore.instance().store(group="hydra/sweeper", name="cells", node=RunSweeperConf, provider="grpo_lab")  # of before
ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="grpo_lab")


class RunSweeper(Sweeper):
    """Expands designs and lists to runs, checks them all, and passes the unfinished ones to the launcher."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: List[str]) -> Any:  # noqa: UP006
        from contextlib import nullcontext

        from grpo_lab.sweeps.sweeper import SweepSettings, errors_as_messages, run_sweep

        context, config, launcher = self.hydra_context, self.config, self.launcher
        assert context is not None and config is not None and launcher is not None, "Hydra calls setup first"

        def compose(overrides: Sequence[str]) -> DictConfig:
            return context.config_loader.load_sweep_config(config, list(overrides))

        with errors_as_messages(), getattr(launcher, "planned", nullcontext)():
            return run_sweep(config, arguments, compose, launcher, SweepSettings(**self.settings))


class _RunLauncher(Launcher):
    """Passes jobs on to `launcher`, a RunLauncher of grpo_lab."""

    launcher: Any

    def expect(self, *what: Any) -> None:
        self.launcher.expect(*what)

    def at_once(self, runs: Sequence[Any]) -> int:
        return self.launcher.workers_for(runs)

    def planned(self) -> Any:
        return self.launcher.planned()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        def compose(overrides: Sequence[str]) -> DictConfig:
            return self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))

        return self.launcher.launch(job_overrides, compose, list(self.config.hydra.overrides.hydra))


class LocalLauncher(_RunLauncher):
    """Runs jobs as processes of this machine."""

    def __init__(self, **settings: Any) -> None:
        from grpo_lab.sweeps.launching import LocalRunLauncher

        self.launcher = LocalRunLauncher(**settings)


class SlurmLauncher(_RunLauncher):
    """Runs jobs through Slurm's queue."""

    def __init__(self, **settings: Any) -> None:
        from grpo_lab.sweeps.slurm import SlurmRunLauncher

        self.launcher = SlurmRunLauncher(**settings)


class RayLauncher(_RunLauncher):
    """Runs jobs as tasks of Ray."""

    def __init__(self, **settings: Any) -> None:
        from grpo_lab.sweeps.ray import RayRunLauncher

        self.launcher = RayRunLauncher(**settings)
