"""The tables and sentences of analysis/cluster_cost.md, made from the study.

What the study computes or is given is never typed here. Which of its rows a sentence quotes is, and so is what a source
says beside the reports that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster_cost.roofline import ON_HOST, STATES
from cluster_cost.study import GPUS, IN_FLIGHT, MODEL, SCHEDULES, SYNC, TOLERATED, Study
from grpo_lab.analysis.stats.power import POWER
from grpo_lab.analysis.table_rows import records_of, rows_of

_END = "<!-- end -->"


def written(page: str, study: Study) -> str:
    """The page with every block between `<!-- begin NAME -->` and `<!-- end -->` made anew.

    Raises ValueError where the page lacks one.
    """
    for name, make in _BLOCKS.items():
        before, begin, rest = page.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(_END)
        if not end:
            raise ValueError(f"the page has no block {name}: write <!-- begin {name} --> and {_END} into it")
        page = f"{before}{begin}{make(study)}\n{end}{after}"
    return page


def answers(study: Study) -> str:
    """What the study says, in the order in which it was asked."""
    few, some, many = study.given["gpu_counts"]
    models = list(study.shapes)
    rows = {model: study.row(model, some, IN_FLIGHT) for model in models}
    more = [study.row(model, some, SYNC).gpu_hours / rows[model].gpu_hours for model in models]
    low, high = slower(study)
    lab = study.given["lab"]
    lab_price = lab["minutes"] / 60 * lab["cores"] * lab["core_price"]
    smallest, apart = study.row(models[0], few, IN_FLIGHT), study.row(MODEL, few, IN_FLIGHT)
    costs = (f"{_rounded(one.gpu_hours)} GPU-hours ({_dollars(one.dollars)}) at {model}" for model, one in rows.items())
    return "\n".join(
        [
            f"- **What one question costs.** On {some} H100 with in-flight updates {_listed(costs)}. Synchronous "
            f"training there takes {_listed(f'{one:.1f}' for one in more)} times as much.",
            f"- **Take that as the least.** Reported whole runs took {low:.1f} to {high:.1f} times what this model "
            f"predicts, if AReaL counts updates as steps ([below](#against-reports)). At that rate the {MODEL} "
            f"question costs {_dollars(low * rows[MODEL].dollars)} to {_dollars(high * rows[MODEL].dollars)}.",
            f"- **From which tail synchronous training wastes over half.** {half_wasted(study)}",
            f"- **Where adding GPUs stops helping.** {many} GPUs for {some} make a synchronous step "
            f"{_faster(study, SYNC, some, many)} times as fast, {some} for {few} {_faster(study, SYNC, few, some)} "
            f"times (at {_listed(models)}). In flight it is {_faster(study, IN_FLIGHT, some, many)}, and "
            f"{_faster(study, IN_FLIGHT, few, some)}.",
            f"- **Use them side by side.** The {study.runs} runs of a question are independent. At {MODEL} in flight, "
            f"{few} GPUs a run and all runs at once on {few * study.runs} take {apart.days / study.runs:.2f} days "
            f"and {_rounded(apart.gpu_hours)} GPU-hours. One run after another on {some} takes "
            f"{rows[MODEL].days:.2f} days and {_rounded(rows[MODEL].gpu_hours)}.",
            "- **How many GPUs weight sync tolerates.** By a pipelined broadcast, sending weights stays below "
            f"{TOLERATED:.0%} of an in-flight step up to {_tolerated(study, 'broadcast')}. If one sender serves "
            f"engine after engine, up to {_tolerated(study, 'one by one')}.",
            f"- **When the tiny-model lab is worth it.** A sweep of {lab['runs']} runs takes {lab['minutes']} minutes "
            f"on {lab['cores']} cores: {_dollars(lab_price)} at {_dollars(lab['core_price'])} a core-hour. The "
            f"cheapest question here ({models[0]}, {few} GPUs, in flight) costs {_dollars(smallest.dollars)}, "
            f"{_rounded(smallest.dollars / lab_price)} times as much. By price the lab pays if it spares one such "
            "question in as many sweeps. Whether its answers hold at these sizes was not tested. So it can choose "
            "what to ask, and cannot replace the asking.",
        ]
    )


def question(study: Study) -> str:
    """What is asked, in numbers of the file."""
    given, work = study.given["question"], study.work()
    lengths = work.lengths
    return "\n".join(
        [
            f"- {given['arms']} arms, {study.runs // given['arms']} seeds each: what finds an effect of "
            f"{given['effect']:g} points with {POWER:.0%} power by a paired t test, if seeds deviate by "
            f"{given['sd']:g} point and arms correlate by {given['correlation']:g}. So {study.runs} runs of "
            f"{given['steps']} steps.",
            f"- A step: {work.problems} problems with {work.group_size} responses, {work.updates} updates, "
            f"{work.reads} forward pass for old log-probs, no reference. A checkpoint every {work.checkpoint_every} "
            "steps.",
            f"- Lengths: lognormal with mean {lengths.mean:,.0f} and sigma {lengths.sigma:.2f}, so that "
            f"{study.given['work']['truncated']:.0%} reach the cap of {lengths.cap:,} tokens. An assumption. Two "
            "reports bound the share: below 5% at 27K tokens ([AReaL "
            "v0.2](https://github.com/inclusionAI/AReaL/blob/main/blog/AReaL_v0_2.md)), below 5% for most of the run "
            "at 14K (arXiv:2510.13786).",
            f"- {_dollars(study.given['price'])} for an H100-hour, a parameter.",
        ]
    )


def grid_table(study: Study) -> str:
    """A row per model and number of GPUs; the three schedules beside each other."""
    rows = []
    for model in study.shapes:
        for gpus in study.given["gpu_counts"]:
            cells = [study.row(model, gpus, name) for name in SCHEDULES]
            waits = cells[0]
            rows.append(
                [f"{model}{', offloaded' if waits.fits == 'offloaded' else ''}", str(gpus)]
                + [f"{one.step:,.0f}" for one in cells]
                + [f"{one.gpu_hours:,.0f} ({_dollars(one.dollars)})" for one in cells]
                + [f"{waits.days:.1f}, {cells[-1].days:.1f}", f"{waits.stragglers + waits.waiting:.0%}"]
            )
    short = ["s a step: sync", "one off", "in flight", "GPU-hours: sync", "one off", "in flight"]
    return _table(["model", "H100", *short, "days: sync, in flight", "sync: idle"], rows)


def cap_table(study: Study) -> str:
    """GPU-hours by cap on responses."""
    rows = [
        [f"{row['cap']:,}", f"{row['mean']:,.0f}", f"{row[SYNC]:,.0f}", f"{row[IN_FLIGHT]:,.0f}"]
        for row in study.by_cap.to_dict("records")
    ]
    return _table(["cap, tokens", "mean", "GPU-hours: sync", "in flight"], rows)


def memory_table(study: Study) -> str:
    rows = [
        [row.model, row.gpu, f"{row.weights:.2f}", f"{row.kv:.0f}", str(row.engine), f"{row.cache:.2f}"]
        + [f"{row.one:.1f}", f"{row.many:.0f}", f"{row.trains} ({row.offloaded})"]
        for row in rows_of(study.memory)
    ]
    heads = ["model", "GPU", "weights, 10^9", "KV cache, kB a token", "GPUs of an engine", "tokens it holds, 10^6"]
    return _table([*heads, "ms a step: 1 response", "256 at 4,096 tokens", "fewest GPUs to train (offloaded)"], rows)


def reports_table(study: Study) -> str:
    setups = study.given["setups"]
    rows = [
        [setups[row["from"]]["source"], setups[row["from"]]["gpu"], row["what"], f"{row.reported:,g} {row.unit}"]
        + [_figures(row.predicted), f"{row.ratio:.2f}"]
        for _, row in study.compared.iterrows()
    ]
    return _table(["source", "GPU", "what", "reported", "predicted", "ratio"], rows)


def transfers_table(study: Study) -> str:
    rows = [
        [row.what, f"{row.plain:g} s", f"{row.engine:g} s", f"{row.predicted:.2g} s"]
        for row in rows_of(study.transfers)
    ]
    return _table(["weights sent", "verl reports", "with checkpoint-engine", "predicted"], rows)


def lag_table(study: Study) -> str:
    """GPU-hours by the bound on staleness."""
    rows = [[str(row.lag), f"{row.hours:,.0f}"] for row in rows_of(study.by_lag)]
    return _table(["steps behind, at most", "GPU-hours"], rows)


def misses(study: Study) -> str:
    """Where predicted and reported part, with the numbers."""
    table = study.compared.set_index("what")
    low, high = slower(study)
    streaming = [row.ratio for row in rows_of(study.compared) if row.kind == "speedup"]
    runs, setups = study.given["scalerl"], study.given["setups"]
    anchored, anchor = setups["verl"], setups["verl"]["anchor"]
    whole = [row for row in records_of(study.compared) if _whole(row["what"])]
    # AReaL's steps are read as updates. Were they batches, a run would have so many times as many of these.
    of_batch = [setups[row["from"]]["updates"] if row["kind"] == "hours" else 1 for row in whole]
    counted = sorted(1 / row["ratio"] / updates for row, updates in zip(whole, of_batch))
    steps = {f"{row['steps'] * updates:.0f}" for row, updates in zip(whole, of_batch) if row["kind"] == "hours"}
    step = study.row(MODEL, GPUS, IN_FLIGHT)
    generated = [table.loc[f"generation, {gpus} GPUs"] for gpus in (32, 64, 128)]
    updates = [table.loc[f"updates, {gpus} GPUs"] for gpus in (64, 128)]
    gains = [updates[0][column] / updates[1][column] for column in ("reported", "predicted")]
    return "\n".join(
        [
            f"- *Holds*: the tail. verl generates for {generated[1].reported:.0f} s on 64 GPUs and "
            f"{generated[2].reported:.0f} s on 128, so that twice the GPUs save nothing. The model says "
            f"{generated[1].predicted:.0f} s and {generated[2].predicted:.0f} s: a response at the cap decides. Its "
            f"mean length, {study.anchored_mean('verl'):,.0f} tokens, is fitted to verl's updates on {anchor['gpus']} "
            "GPUs.",
            f"- *Misses*: on 32 GPUs verl generates for {generated[0].reported:.0f} s, the model for "
            f"{generated[0].predicted:.0f} s. From 64 to 128 GPUs verl's updates get {gains[0]:.2f} times as fast, "
            f"the model's {gains[1]:.2f} times.",
            f"- *Misses*: whole runs take {low:.1f} to {high:.1f} times as long as predicted. Evaluation, restarts, "
            "longer responses and slow software are not in the model, and a small model does not reach its MFU "
            f"(prime-rl). If AReaL's {_listed(sorted(steps))} steps are batches, the factors are {counted[0]:.1f} to "
            f"{counted[-1]:.1f}.",
            f"- *Misses*: streaming gains {min(streaming):.2f} to {max(streaming):.2f} of what is reported. verl's "
            f"streaming run updates in {anchored['streaming_updates_take']:.0f} s on {anchor['gpus']} GPUs, its "
            f"synchronous run in {anchor['updates_take']:.0f} s. So they differ in more than their schedule.",
            "- *Not tested by any report*: the gains in the grid, which are larger. They need a small batch on many "
            f"GPUs, and up to {study.given['max_lag'] + 1} batches that decode together. PipelineRL reports about "
            "twice the speed of learning on 128 H100 (arXiv:2509.19128).",
            f"- *Not predicted*: ScaleRL's run of an 8B model (arXiv:2510.13786) took {runs['gpu_hours']:,} "
            f"GPU-hours for {runs['steps']:,} steps, {runs['gpu_hours'] / runs['steps']:.1f} a step. Its abstract "
            f"gives neither batch nor lengths. A step of {MODEL} here takes {step.step * step.gpus / 3600:.2f} "
            "GPU-hours.",
        ]
    )


def assumptions(study: Study) -> str:
    use = study.efficiency
    return "\n".join(
        [
            f"- Of its peak a GPU reaches {use.train:.0%} in training and reading, {use.decode:.0%} in decoding "
            f"where operations bound it; of its memory's bandwidth {use.bandwidth:.0%}. A decoding step takes "
            f"{1e3 * use.step:g} ms besides, and {1e6 * use.reduce:g} us for an all-reduce in a tensor-parallel group.",
            f"- Links reach {use.link:.0%} of their data sheet when weights are sent, chosen after verl's times "
            f"above. A checkpoint is written at {use.disk / 1e9:g} GB/s.",
            f"- A training GPU keeps {use.reserve / 1e9:g} GB for activations. States take {STATES} bytes a weight, "
            f"all of them sharded. Where they do not fit, {ON_HOST} of the {STATES} wait in the host's memory "
            f"(*offloaded*). A generating GPU fills {use.used:.0%} of its memory.",
        ]
    )


def slower(study: Study) -> tuple[float, float]:
    """How many times as long reported whole runs took as predicted: least and most."""
    ratios = [1 / row.ratio for row in rows_of(study.compared) if _whole(row.what)]
    return min(ratios), max(ratios)


def _whole(what: str) -> bool:
    return what.startswith("whole run")


def half_wasted(study: Study) -> str:
    """From which longest response over the mean half is wasted, on many GPUs and on few."""
    few, *more = study.given["gpu_counts"]
    own = {f"{model} on {gpus}": study.half_wasted(model, gpus) for model in study.shapes for gpus in more}
    known = [ratio for ratio in own.values() if not math.isnan(ratio)]
    from_to = [f"from a longest response of {min(known):.1f} to {max(known):.1f} times the mean"] if known else []
    on_few = {model: study.half_wasted(model, few) for model in study.shapes}
    each = [f"from {ratio:.0f} times at {model}" for model, ratio in on_few.items() if not math.isnan(ratio)]
    return (
        f"On {_listed(map(str, more))} GPUs {_listed([*from_to, *_never(study, own)])}. "
        f"On {few} GPUs {_listed([*each, *_never(study, on_few)])}."
    )


def _never(study: Study, halves: Mapping[str, float]) -> list[str]:
    """Of the named ratios at which half is wasted, that some are beyond all that were tried."""
    names = [name for name, ratio in halves.items() if math.isnan(ratio)]
    return [f"not up to {max(study.given['caps_over_mean'])} times at {_listed(names)}"] if names else []


def _faster(study: Study, schedule: str, few: int, many: int) -> str:
    steps = [(study.row(model, few, schedule).step, study.row(model, many, schedule).step) for model in study.shapes]
    return _listed(f"{before / after:.1f}" for before, after in steps)


def _tolerated(study: Study, how: str) -> str:
    """`4,096 GPUs (the most tried) at 1.5B and 7B and 256 GPUs at 32B`."""
    most: dict[int, list[str]] = {}
    for model in study.shapes:
        most.setdefault(study.tolerated(model, how), []).append(model)
    tried = max(study.given["synced_gpu_counts"])
    return _listed(
        f"{gpus:,} GPUs{' (the most tried)' if gpus == tried else ''} at {_listed(models)}"
        for gpus, models in most.items()
    )


def _dollars(amount: float) -> str:
    return f"${_rounded(amount)}" if amount >= 10 else f"${amount:.2f}"


def _figures(number: float) -> str:
    """Three digits and no exponent."""
    return f"{float(f'{number:.3g}'):,g}"


def _rounded(number: float) -> str:
    """Two digits."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _listed(parts: Iterable[str]) -> str:
    words = list(parts)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_BLOCKS: dict[str, Callable[[Study], str]] = {
    "answers": answers,
    "question": question,
    "grid": grid_table,
    "caps": cap_table,
    "lags": lag_table,
    "memory": memory_table,
    "reports": reports_table,
    "misses": misses,
    "transfers": transfers_table,
    "assumptions": assumptions,
}
