"""The check as files, for losses that Python cannot call: inputs and published numbers out, answers in. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.instruments.loss_check.inputs import IDENTIFIED_BY, SPLITS, calls, plain
from grpo_lab.instruments.loss_check.match import LossAnswer, shipped
from grpo_lab.instruments.loss_check.published import TokenLoss, Weights
from grpo_lab.instruments.loss_check.report import Report, judge


def write_files(folder: Path) -> list[str]:
    """Write inputs.json and published.jsonl into a folder, and return a line on each."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs, published = folder / "inputs.json", folder / "published.jsonl"
    found = {name: _plain_json(one.arguments()) for name, one in calls().items()}
    inputs.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    count = 0
    with published.open("w") as file:
        for line in _combinations():
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            count += 1
    return [
        f"{inputs}: {len(found)} calls; a microbatch is BATCH/ROWS:PLACE",
        f"{published}: loss and gradient of {count} published losses, whole and in microbatches",
    ]


def _combinations() -> Iterator[dict[str, Any]]:
    """Every published combination: loss and gradient of the step, and each microbatch's share of both."""
    tables = shipped()
    for surrogate in tables.surrogates:
        if surrogate.fault or not set(IDENTIFIED_BY) <= set(surrogate.values):
            continue
        for correction in tables.corrections:
            if correction.fault or (
                surrogate.options.get("old_policy") == "sampler" and correction.options["correction"] != "none"
            ):
                continue
            for aggregation in tables.aggregations:
                if not aggregation.fault:
                    yield _line(surrogate, correction, aggregation)


def _line(surrogate: TokenLoss, correction: Weights, aggregation: Weights) -> dict[str, Any]:
    batches = {}
    for name in surrogate.values:
        weights = aggregation.values[name] * correction.values[name]
        rows = (weights * surrogate.values[name]).sum(axis=1)
        gradient = surrogate.gradient(name, weights[None])[0]
        batches[name] = {
            "loss": _short(rows.sum()),
            "gradient": _short(gradient),
            "microbatches": {
                "-".join(map(str, sizes)): [
                    {"loss": _short(part.sum()), "gradient": _short(slope)}
                    for part, slope in zip(
                        np.split(rows, np.cumsum(sizes)[:-1]), np.split(gradient, np.cumsum(sizes)[:-1])
                    )
                ]
                for sizes in SPLITS.get(name, ())
            },
        }
    return {"options": {**surrogate.options, **correction.options, **aggregation.options}, "batches": batches}


def _short(values: Any) -> Any:
    return json.loads(json.dumps(np.asarray(values).tolist()), parse_float=lambda text: float(f"{float(text):.7g}"))


def _plain_json(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def judge_file(path: Path) -> Report:
    """The report on a file of answers. Raises ValueError for one that lacks its keys.

    The file holds `reads`, the arguments that the loss reads; `answers`, by call a `loss` and its `gradient` [N][T];
    and perhaps `function`, its name, and `accumulate`, sum or mean.
    """
    try:
        given = json.loads(path.read_text())
        reads, found = given["reads"], given["answers"]
        answers = {
            name: LossAnswer(
                float(one["loss"]), None if one.get("gradient") is None else np.array(one["gradient"], float)
            )
            for name, one in found.items()
        }
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f'{path}: {type(error).__name__} {error}: write {{"reads": ["logprobs", "mask", ...], "answers": '
            f'{{"plain": {{"loss": 0.1, "gradient": [[...]]}}, "cut": ...}}}}'
        ) from error
    known = plain().arguments()
    if unknown := [name for name in reads if name not in known]:
        raise ValueError(f"{path}: reads has {unknown[0]}, which is no argument: {', '.join(known)}")
    every = calls()
    for name, one in answers.items():
        shape = every[name].mask.shape if name in every else None
        if shape is None or (one.gradient is not None and one.gradient.shape != shape):
            raise ValueError(
                f"{path}: answers has {name}, " + ("no call" if shape is None else f"gradient not {shape}")
            )
    return judge(given.get("function", str(path)), answers, {}, reads, given.get("accumulate", ""))
