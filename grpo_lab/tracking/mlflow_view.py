"""A sweep's page in MLflow: a saved view of its experiment with the sweep's runs, grouped by arm, and their curves.

MLflow's pages keep a saved view as a tag of the experiment, `mlflow.sharedViewState.<key>`, and open it by its key in
the address. Pages of MLflow 3.17 read an envelope with a name, and list the view under *Views*; earlier ones, from 3.13
on, read its content at the top level.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from grpo_lab.tracking.metrics import AT_BUDGET, logged_name
from grpo_lab.tracking.names import marked
from grpo_lab.tracking.sweep_record import SweepRecord

VIEW_TAG = "mlflow.sharedViewState."  # before a view's key, among the tags of an experiment
REWARD, HELDOUT, DOWNSTREAM = "reward/outcome", "eval/heldout/accuracy", "eval/downstream/accuracy"
MOST_NAMED = 30  # of the 40 views that MLflow's pages list, after which they save none
NAME_LENGTH = 240  # characters, of 250
VIEW_LENGTH = 5000  # characters that a tag of an experiment may have before MLflow 3.17
_SECTION = "reward_against_evaluation"


def plain_name(text: str) -> str:
    """A text as a key or metric of MLflow; one that loses characters ends in a hash of itself."""
    return marked(text, _cleaned(text)[:NAME_LENGTH])


def _cleaned(text: str) -> str:
    return re.sub(r"[^/\w.\- :]", "_", text)


def sweep_tag(name: str, key: str) -> str:
    """The tag of every run of a sweep, also of those that ran under another one; its value is the run's arm there."""
    return f"sweep.{_cleaned(name)[: NAME_LENGTH - 20]}.{key[:8]}"


def arm_label(arm: str, level: str) -> str:
    """An arm at a level, as the sweep's own metrics and groups are called."""
    return " ".join(filter(None, (arm, level))) or "-"


def membership(record: SweepRecord, folder: str) -> dict[str, str]:
    """The tag of the run in `folder`, relative to the folder of runs; none where no run of the sweep is that run.

    Of a run that is two arms by construction its value names both.
    """
    arms = dict.fromkeys(arm_label(entry.arm, entry.level) for entry in record.runs if entry.folder == folder)
    return {sweep_tag(record.name, record.key): " = ".join(arms)} if arms else {}


def view_path(experiment_id: str, key: str) -> str:
    """Where a saved view is, behind the address of a server."""
    return f"{runs_path(experiment_id)}&viewStateShareKey={quote(key)}"


def runs_path(experiment_id: str) -> str:
    """Where the charts of all runs of an experiment are, behind the address of a server."""
    return f"/#/experiments/{experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def saved_view(record: SweepRecord, created: int, named: bool) -> str:
    """The value of the tag that keeps a sweep's view; `created` is a unix time in ms.

    Without `named` the address opens the view all the same, and no menu lists it.
    """
    state = view_state(record)
    text = json.dumps(state, separators=(",", ":"))
    packed = f"deflate;{base64.b64encode(zlib.compress(text.encode())).decode()}"
    if not named:
        return packed
    envelope = {"name": record.name, "createdAt": created, "updatedAt": created, "state": packed}
    whole = json.dumps(envelope | state, separators=(",", ":"))
    return whole if len(whole) <= VIEW_LENGTH else json.dumps(envelope)


def view_state(record: SweepRecord) -> dict[str, Any]:
    """The state of MLflow's page for a sweep: which runs, how they are grouped, which charts and columns."""
    tag = sweep_tag(record.name, record.key)
    finals = {name: f"{AT_BUDGET}{name}" for name in (REWARD, HELDOUT, DOWNSTREAM)}
    primary = logged_name((record.design or {}).get("primary", HELDOUT))
    charts = [_line(name) for name in dict.fromkeys((REWARD, HELDOUT, DOWNSTREAM, primary))]
    charts += [_scatter(finals[REWARD], finals[name]) for name in (HELDOUT, DOWNSTREAM)]
    return {
        "searchFilter": f"tags.`{tag}` != ''",
        # By date, MLflow would add the sweep's own run to those of its runs.
        "orderByKey": "tags.`mlflow.runName`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": tag}]},
        "useGroupedValuesInCharts": True,
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "compareRunCharts": charts,
        "compareRunSections": [
            {"uuid": _SECTION, "name": "Reward against evaluation", "display": True, "isReordered": True,
             "deleted": False, "isGenerated": False}
        ],
        "isAccordionReordered": True,  # else MLflow sorts the sections by name, its own ones among them
        "selectedColumns": [f"metrics.`{name}`" for name in finals.values()],
        # As they are anyway; earlier versions of the page do not open without them.
        "runsExpanded": {}, "runsPinned": [], "runsHidden": [], "runsVisibilityMap": {}, "groupsExpanded": {},
        "columnOrder": [], "columnWidths": {}, "viewMaximized": False, "runListHidden": False,
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }  # fmt: skip


def _line(metric: str) -> dict[str, Any]:
    """A chart of the mean of every group over steps, in a band from its lowest run to its highest."""
    return _chart("LINE", metric) | {
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
        "lineSmoothness": 0,
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def _scatter(x: str, y: str) -> dict[str, Any]:
    """A chart of one point for each group."""
    axes: Mapping[str, Any] = {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
    return _chart("SCATTER", f"{x} {y}") | axes | {"runsCountToCompare": 100}


def _chart(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "uuid": name, "metricSectionId": _SECTION, "isGenerated": False, "deleted": False}
