"""The plugins Hydra discovers. No `from __future__ import annotations` in this module, ever: beside a
dataclass it breaks every Hydra app of the environment."""

import os

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class GrpoLabSearchPath(SearchPathPlugin):
    """Adds the folder that holds `experiments/`, and the user's own folder of YAML files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from grpo_lab.config import conf_folder

        search_path.append("grpo_lab", f"file://{conf_folder().parent}")
        for folder in filter(None, os.environ.get("GRPO_LAB_CONFIG_PATH", "").split(os.pathsep)):
            search_path.append("grpo_lab_user", f"file://{os.path.abspath(folder)}")
