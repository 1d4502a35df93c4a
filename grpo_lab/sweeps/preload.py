"""Imports of the server of fork_server.py before it forks runs.

Options are not registered here: plugins of users are code of their runs, which read their command lines afresh.
"""

from __future__ import annotations

import contextlib
import importlib

from grpo_lab.deferred import load
from grpo_lab.tracking.provenance import digest_of_sources

_MODULES = (
    "grpo_lab.loop",
    "grpo_lab.config.help",
    "hydra._internal.hydra",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "mlflow.genai",
    "mlflow.store.tracking.sqlalchemy_store",
)
SOURCES = digest_of_sources()  # of the code that is about to be loaded

for _name in _MODULES:
    with contextlib.suppress(Exception):  # a run that needs it says in its own output why it cannot be imported
        importlib.import_module(_name)
load()
