"""The command that trains: `python -m grpo_lab.train recipe=... seed=...`; the loop is in loop.py."""

from __future__ import annotations

from grpo_lab.tracking.interrupt import quietly

if __name__ == "__main__":
    quietly()

import contextlib
import os
import sys

import hydra
from hydra._internal import utils
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from grpo_lab.config.additions import as_settings, is_ablation
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.help import answer
from grpo_lab.config.hydra_setup import REFUSALS, bootstrap
from grpo_lab.config.overrides import in_one_line, misnamed
from grpo_lab.config.rules import check_compatible
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.config.run_name import chosen_options, run_name
from grpo_lab.config.user_files import declares_a_sweep
from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import choose_device
from grpo_lab.sweeps.child import errors_reported, follow_parent, hear_signals
from grpo_lab.tracking.terminal import printable, say


def _run_hydra(config: DictConfig) -> float | None:
    """Run it; a launcher that runs jobs in its own process gets the final value of `objective`."""
    hydra_config = HydraConfig.get()
    axes = chosen_options(hydra_config.runtime.choices)
    launched = not OmegaConf.is_missing(hydra_config.job, "num")  # by a launcher, which numbers its jobs
    raised = os.environ.get("HYDRA_FULL_ERROR") == "1" or launched  # a launcher handles errors itself
    with errors_reported(raised), ranks.opened(lambda: choose_device(config.device)):
        run = to_run(config)
        if run.design is not None and not run.label.sweep:
            raise ValueError("a declared experiment is a sweep, and this would be one run of no arm: add -m")
        check_compatible(run, axes)  # refuse before any large import
        name = run_name(axes.get("recipe", "plain"), hydra_config.overrides.task)
        from grpo_lab.loop import start

        folder = start(config, name, axes, sys.argv)
        if not launched:
            return None
        from grpo_lab.sweeps.objective import objective

        return objective(folder, run.objective, run.budget.axis.value)


def main() -> None:
    """Entry of `python -m grpo_lab.train`: Hydra's command line over conf/."""
    follow_parent()
    hear_signals()
    try:
        sys.argv[1:] = as_settings(sys.argv[1:])
        bootstrap(sys.argv[1:])
        if wrong := misnamed(sys.argv[1:]):
            raise ValueError(wrong)
        many = bool({"-m", "--multirun"} & set(sys.argv[1:]))
        if ranks.launched() > 1 and (many or is_ablation(sys.argv[1:])):
            raise ValueError(
                "torchrun starts the processes of one run, and -m starts many runs: leave torchrun out, and set "
                f"hydra.launcher.processes={ranks.launched()}"
            )
        answered = answer(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(printable(f"error: {error}"))
    if answered is not None:
        with contextlib.suppress(BrokenPipeError):  # the reader, such as head, has seen enough
            say(answered, flush=True)
        return
    if not many and (is_ablation(sys.argv[1:]) or declares_a_sweep(sys.argv[1:])):
        sys.argv.append("-m")
    utils.run_and_report = lambda job: job()  # Hydra would print an error in many lines, or a traceback
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(_run_hydra)()
    except (ValueError, OSError, *REFUSALS) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        refused = isinstance(error, REFUSALS)
        sys.exit(printable(f"error: {in_one_line(error, RunConfig.__dataclass_fields__) if refused else error}"))


if __name__ == "__main__":
    main()
