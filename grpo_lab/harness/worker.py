"""Runs tasks of lm-evaluation-harness or of Inspect on model folders, in a process of its own.

`command.py` starts this file as a script, with the harness as its argument, and writes one request as JSON to standard
input. The worker imports nothing of this package, so that an environment that holds the harness is enough. It replies
in lines of JSON on standard output: one per model and task with what was measured, or one `error` for the user. What
the harness prints goes to standard error.

A request holds `jobs` (model folder -> tasks), all `tasks`, `include_path`, `batch_size`, `device` and the fields of
`command.Settings`.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# What a model without a chat template is asked by Inspect: the words of its messages and nothing else.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NO_METRIC = ("stderr", "std", "var", "bootstrap_stderr")  # metrics of Inspect that say how sure another one is
PLACES = ("dataset_path", "dataset_name", "dataset_kwargs", "metadata")  # of a task, not what it asks
Request = Mapping[str, Any]


class Refused(Exception):
    """The message to the user, remedy included."""


def measure_lm_eval(request: Request) -> Iterator[dict[str, Any]]:
    """One reply per model and task of lm-evaluation-harness. Raises Refused before a model loads, where it can."""
    version = _version("lm_eval", "lm-eval")
    lm_eval, tasks_of = _module("lm_eval"), _module("lm_eval.tasks")
    manager = tasks_of.TaskManager(include_path=request["include_path"])
    for name in request["tasks"]:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            meant = f"; did you mean {', '.join(near)}" if near else ""
            raise Refused(
                f"lm_eval knows no task {name!r}{meant}: name one of `lm_eval ls tasks`, or of --include-path"
            )
        with _refusing(f"lm_eval cannot load the task {name!r}", _OFFLINE):
            loaded = manager.load([name])
        if name not in loaded["tasks"] and not loaded.get("groups"):
            raise Refused(f"{name} is a tag of {', '.join(loaded['tasks'])}: name those of them that you want")
        group = loaded.get("groups", {}).get(name)
        if group is not None and not group.has_aggregation:
            raise Refused(f"{name} is a group without a metric of its own: name its tasks instead")
        if name in loaded["tasks"]:
            task = loaded["tasks"][name]
            filters = [one.name for one in getattr(task, "_filters", ())]
            known = [f"{metric},{one}" for one in filters for metric in task.aggregation()]
            if known and request["metric"]:
                chosen(request["metric"], known, name)
    for folder, tasks in request["jobs"].items():
        with _refusing(f"lm_eval cannot load {folder}", _LOADING):
            model = _module("lm_eval.models.huggingface").HFLM(
                pretrained=folder, dtype=request["dtype"], batch_size=request["batch_size"], device=_device(request)
            )
        for name in tasks:
            with _refusing(f"lm_eval cannot run {name}", "see that the task suits the model, or name another"):
                found = lm_eval.simple_evaluate(
                    model=model, tasks=[name], task_manager=manager, num_fewshot=request["num_fewshot"],
                    limit=request["limit"], apply_chat_template=request["apply_chat_template"],
                )  # fmt: skip
            assert found is not None, "None is of other ranks than the first"
            yield {"model": folder, "task": name, "harness_version": version, **_of_lm_eval(found, name, request)}
        del model


def _of_lm_eval(found: Mapping[str, Any], name: str, request: Request) -> dict[str, Any]:
    """The results of one task, or of one group of tasks, as a reply holds them."""
    own, up = found["results"][name], found["higher_is_better"].get(name, {})
    metrics = {}
    for key, value in own.items():
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr") and _number(value) is not None:
            metrics[key] = {"value": _number(value), "stderr": _number(own.get(f"{metric}_stderr,{filtered}"))}
    if not metrics:
        raise Refused(f"{name} has no metric that is a number: name another task")
    better = [key for key in metrics if up.get(key.partition(",")[0]) is not False]
    main = chosen(request["metric"], list(metrics), name) if request["metric"] else (better or list(metrics))[0]
    leaves = [task for task in found["samples"] if task == name or name in found["group_subtasks"]]
    every = [sample for task in leaves for sample in found["samples"][task]]
    metric, _, filtered = main.partition(",")
    once = [sample for sample in every if sample["filter"] == filtered] or every
    scores = [_number(sample.get(metric)) for sample in once]
    return {
        "task_version": found["versions"].get(name),
        "metrics": metrics,
        "metric": main,
        "is_share": all(score is not None and 0 <= score <= 1 for score in scores),
        "samples": sum(found["n-samples"][task]["effective"] for task in leaves),
        "questions": _digest([sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in once]),
        "configuration": {
            task: json.loads(
                json.dumps(
                    {key: value for key, value in found["configs"][task].items() if key not in PLACES}, default=str
                )
            )
            for task in leaves
        },
        "answers": [
            {
                "question": str(_first_argument(sample["arguments"])),
                "target": str(sample["target"]),
                "answer": str(sample["resps"][0][0] if len(sample["resps"]) == 1 else sample["filtered_resps"]),
                "score": score,
            }
            for sample, score in zip(once, scores)
        ],
    }


def _first_argument(arguments: Any) -> Any:
    """The prompt of a sample, whose arguments are a list of tuples, or a mapping of mappings in files."""
    first = next(iter(arguments.values())) if isinstance(arguments, Mapping) else arguments[0]
    return next(iter(first.values())) if isinstance(first, Mapping) else first[0]


def measure_inspect(request: Request) -> Iterator[dict[str, Any]]:
    """One reply per model and task of Inspect, greedy unless the task sets a temperature. Raises Refused."""
    version = _version("inspect_ai", "inspect-ai")
    inspect_ai, models = _module("inspect_ai"), _module("inspect_ai.model")
    for name in ("hf/checkpoint", "checkpoint"):  # else Inspect would ask the hub for a model of this name
        models.set_model_info(name, models.ModelInfo())
    for spec in request["tasks"]:
        file, _, name = spec.partition("@")
        if not file.endswith(".py"):
            continue  # a task of a package, which Inspect finds
        if not Path(file).is_file():
            raise Refused(f"there is no file {file} of Inspect tasks: give FILE.py@TASK")
        with _refusing(f"Inspect cannot read {file}", "it has to be a Python file with @task functions"):
            path = Path(file).resolve()
            known = [one.name for one in inspect_ai.list_tasks(path.name, root_dir=path.parent)]
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none: mark a function with @task"
            raise Refused(f"{file} has no task {name!r}; {there}")
    for folder, tasks in request["jobs"].items():
        template = {} if request["apply_chat_template"] else {"chat_template": PLAIN}
        with _refusing(f"Inspect cannot load {folder}", _LOADING):
            model = models.get_model(
                "hf/checkpoint", memoize=False, model_path=folder, dtype=request["dtype"], **template,
                device=_device(request),
            )  # fmt: skip
        _greedy(model.api)
        if request["apply_chat_template"]:
            _one_bos(model.api)
        for spec in tasks:
            with tempfile.TemporaryDirectory() as logs, _refusing(f"Inspect cannot run {spec}", _OFFLINE):
                (log,) = inspect_ai.eval(
                    spec, model=model, limit=request["limit"], max_connections=int(request["batch_size"]),
                    log_dir=logs, display="none", log_samples=True,
                )  # fmt: skip
                if log.status != "success":
                    raise ValueError(log.error.message if log.error else log.status)
                reply = _of_inspect(log, spec, request)
            yield {"model": folder, "task": spec, "harness_version": version, **reply}


def _greedy(api: Any) -> None:
    """Let the provider take the likeliest token wherever a task sets no temperature; by itself it samples."""
    plain = api.generate

    async def generate(input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
        api.do_sample = bool(config.temperature)
        return await plain(input, tools, tool_choice, config)

    api.generate = generate


def _one_bos(api: Any) -> None:
    """Let the tokenizer add nothing where the chat template writes BOS itself; by itself Inspect reads it twice."""
    messages = [{"role": "user", "content": "question"}]
    written = api.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if api.tokenizer.bos_token and written.startswith(api.tokenizer.bos_token):
        api.tokenizer_call_args = {**(api.tokenizer_call_args or {}), "add_special_tokens": False}


def _of_inspect(log: Any, spec: str, request: Request) -> dict[str, Any]:
    """The log of one task as a reply holds it."""
    metrics = {}
    for score in log.results.scores:
        own = {name: one.value for name, one in score.metrics.items()}
        for name in (name for name in own if name not in NO_METRIC and _number(own[name]) is not None):
            metrics[f"{score.name}/{name}"] = {"value": _number(own[name]), "stderr": _number(own.get("stderr"))}
    if not metrics:
        raise Refused(f"{spec} has no metric: give its task a scorer")
    main = chosen(request["metric"], list(metrics), spec) if request["metric"] else next(iter(metrics))
    scorer = main.rpartition("/")[0]
    scores = [_score(one.scores[scorer].value if scorer in (one.scores or {}) else None) for one in log.samples]
    samples = [[str(one.id), one.epoch, _text(one.input), _text(one.target)] for one in log.samples]
    return {
        "task_version": log.eval.task_version,
        "metrics": metrics,
        "metric": main,
        "is_share": all(score is None or 0 <= score <= 1 for score in scores),
        "samples": len(samples),
        "questions": _digest([json.dumps(one) for one in samples]),
        "configuration": {
            "task": log.eval.task,
            "arguments": json.loads(json.dumps(log.eval.task_args, default=str)),
            "plan": json.loads(log.plan.model_dump_json(exclude={"config": {"max_connections"}})),
            "scorers": [one.scorer for one in log.results.scores],
        },
        "answers": [
            {
                "question": _text(one.input),
                "target": _text(one.target),
                "answer": one.output.completion,
                "score": score,
            }
            for one, score in zip(log.samples, scores)
        ],
    }


def _score(value: Any) -> float | None:
    """A score as a number: Inspect writes right, wrong, in part and no answer as letters."""
    return {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}.get(value) if isinstance(value, str) else _number(value)


def _text(value: Any) -> str:
    """A question or target in words: a string, or messages, or several strings."""
    if isinstance(value, str):
        return value
    return "\n".join(one if isinstance(one, str) else f"{one.role}: {one.text}" for one in value)


def chosen(metric: str, known: Sequence[str], task: str) -> str:
    """The metric of a task that the user means, whole or without its filter or scorer. Raises Refused."""
    for name in known:
        if metric in (name, name.partition(",")[0], name.rpartition("/")[2]):
            return name
    raise Refused(f"{task} has no metric {metric!r}: choose --metric of {'; '.join(known)}")


def _device(request: Request) -> str:
    import torch

    return request["device"] or ("cuda" if torch.cuda.is_available() else "cpu")


_LOADING = "see that --dtype and --device suit this machine"
_OFFLINE = (
    "without a network, its data have to be on this machine: of an lm_eval task by `dataset_path: json` and "
    "`dataset_kwargs: {data_files: ...}`"
)


@contextlib.contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    """Turn any error of a harness about a task into one for the user."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # the harnesses, datasets and the hub share no class
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Refused(f"{what} ({type(error).__name__}: {text}): {remedy}") from error


def _version(module: str, package: str) -> str:
    """The version of an installed harness. Raises Refused where it is not installed."""
    if importlib.util.find_spec(module) is None:
        extra = package.removesuffix("-ai")
        raise Refused(
            f"{sys.executable} has no {package}: pip install -c constraints.txt -e '.[{extra}]', or name the Python "
            "that has it with --python"
        )
    return importlib.metadata.version(package)


def _module(name: str) -> Any:
    """A module of a harness, which need not be installed where this file is checked."""
    return importlib.import_module(name)


def _number(value: Any) -> float | None:
    """A finite number, or None: a harness writes words where there is none."""
    if isinstance(value, bool | int | float) or hasattr(value, "item"):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


HARNESSES: Mapping[str, Callable[[Request], Iterator[dict[str, Any]]]] = {
    "lm_eval": measure_lm_eval,
    "inspect": measure_inspect,
}


def main() -> None:
    """Read the request, and write a line per result."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a harness prints is not a reply
    request = json.load(sys.stdin)
    try:
        for reply in HARNESSES[sys.argv[1]](request):
            print(json.dumps(reply), file=replies, flush=True)
    except Refused as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
