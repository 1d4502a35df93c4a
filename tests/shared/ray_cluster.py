"""A Ray cluster of several nodes on this machine, whose nodes can be killed one by one.

with ray_cluster(2) as cluster:
    python -m grpo_lab.train -m ... hydra/launcher=ray hydra.launcher.address=<cluster.address>
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False}


@contextmanager
def ray_cluster(nodes: int, **changed: Any) -> Iterator[Cluster]:
    """A cluster of so many nodes with one processor each, or what else NODE is to be; GPUs need not exist.

    The first is the head, which must not be killed. In its processes NODE_NUMBER says which node it is.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = [{**NODE, **changed, "env_vars": {"NODE_NUMBER": str(number)}} for number in range(nodes)]
    cluster = Cluster(initialize_head=True, head_node_args=made[0])
    try:
        for node in made[1:]:
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()
