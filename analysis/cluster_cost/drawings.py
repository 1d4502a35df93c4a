"""What one question costs on a cluster: what GPUs do, what long responses waste, what weight sync takes."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cluster_cost.study import IN_FLIGHT, MODEL, PARTS, SCHEDULES, SYNC, TOLERATED, Study
from grpo_lab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, VERMILLION
from grpo_lab.analysis.figures.style import BODY, SMALL, Drawn, house_style, new_figure, write_footer, write_legend

NAME = "cluster_cost"
_PAPER = "Computed, not measured: no run behind it."
_COLOURS = {"generation": BLUE, "training": GREEN, "stragglers": VERMILLION, "moving": BLACK, "waiting": "#C9C9C9"}
_WORDS = {
    "generation": "generation",
    "training": "log-probs and updates",
    "stragglers": "waiting for the last responses",
    "moving": "weights and checkpoints",
    "waiting": "other idle time",
}
_LINES = (BLUE, GREEN, VERMILLION)
_MARKS = ("o", "s", "^")


def draw_shares(study: Study) -> Drawn:
    """`cluster_cost_shares`: a bar per model, GPU count and schedule, split by GPU activity."""
    table, models, sizes = study.grid, list(study.shapes), study.given["gpu_counts"]
    most = table[table.gpus == max(sizes)]
    lost, left = most[most.schedule == SYNC].stragglers, most[most.schedule == IN_FLIGHT]
    idle = left.stragglers + left.waiting
    heading = (
        f"On {max(sizes)} GPUs synchronous training spends {lost.min():.0%} to {lost.max():.0%} of the time waiting "
        f"for the last responses; with in-flight updates GPUs idle for {idle.min():.0%} to {idle.max():.0%}"
    )
    footer = (
        f"{_PAPER} Right of each bar: GPU-hours of one question, {study.runs} runs of "
        f"{study.given['question']['steps']} steps with {study.work().responses:,} responses. {_setting(study)}"
    )
    with house_style(_name("shares")):
        figure = new_figure(heading, 5.2, 10.0)
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for place, (model, axes) in enumerate(zip(models, panels)):
            y, ticks, labels = 0.0, [], []
            for gpus in sizes:
                for name in SCHEDULES:
                    row = study.row(model, gpus, name)
                    left = 0.0
                    for part in PARTS:
                        axes.barh(y, row[part], left=left, height=0.8, color=_COLOURS[part], linewidth=0)
                        left += row[part]
                    axes.text(1.02, y, f"{row.gpu_hours:,.0f}", va="center", fontsize=SMALL)
                    ticks.append(y)
                    labels.append(f"{gpus} GPUs, {name}" if name == SYNC else name)
                    y += 1
                y += 0.6
            axes.set_yticks(ticks, labels if place == 0 else [""] * len(ticks))
            axes.set_xlim(0, 1)
            axes.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
            _bare(axes, f"{model}: share of the GPUs' time")
        write_legend(figure, [(Patch(color=_COLOURS[part], linewidth=0), _WORDS[part]) for part in PARTS], 5)
        write_footer(figure, footer.rstrip("."), 4)
    return Drawn(_name("shares"), figure, table.round(4), "bars: what all GPUs do in a mean step")


def draw_tails(study: Study) -> Drawn:
    """`cluster_cost_tails`: unused GPU time of MODEL against the longest response over the mean."""
    sizes = study.given["gpu_counts"]
    table = study.tails[study.tails.model == MODEL]
    halves = {gpus: half for gpus in sizes[1:] if not math.isnan(half := study.half_wasted(MODEL, gpus))}
    heading = (
        f"Synchronous training of {MODEL} wastes half of {' or '.join(map(str, halves))} GPUs once the longest "
        f"response is {min(halves.values()):.1f} to {max(halves.values()):.1f} times the mean"
        if halves
        else f"Synchronous training of {MODEL} wastes less than half of {' or '.join(map(str, sizes[1:]))} GPUs up to "
        f"a longest response of {max(table.ratio):g} times the mean"
    )
    footer = f"{_PAPER} Unused: slots that wait for the last responses, GPUs that wait for others. {_setting(study)}"
    with house_style(_name("tails")):
        figure = new_figure(heading, 4.0, 8.0)
        axes = figure.subplots()
        for gpus, colour, mark in zip(sizes, _LINES, _MARKS):
            for name, dash in ((SYNC, "-"), (IN_FLIGHT, ":")):
                own = table[(table.gpus == gpus) & (table.schedule == name)]
                axes.plot(
                    own.ratio, own.unused, dash, color=colour, marker=mark, markersize=4, linewidth=1.4,
                    markerfacecolor=colour if name == SYNC else "white", label=f"{gpus} GPUs, {name}",
                )  # fmt: skip
        axes.axhline(0.5, color=GREY, linewidth=0.8)
        _bare(axes, "unused share of the GPUs' time (grey: a half)")
        axes.set_xscale("log")
        axes.set_xticks(study.given["caps_over_mean"], [f"{ratio:g}" for ratio in study.given["caps_over_mean"]])
        axes.minorticks_off()
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
        axes.set_xlabel("longest response over mean")
        _finish(figure, footer, 3)
    return Drawn(_name("tails"), figure, table.round(4), "lines: a simulated run each")


def draw_sync(study: Study) -> Drawn:
    """`cluster_cost_sync`: the share of an in-flight step in which weights are sent, against the number of GPUs."""
    table, models = study.syncs, list(study.shapes)
    line = max(study.tolerated(model, "one by one") for model in models)
    heading = (
        f"Weights sent to engines one by one take over a tenth of a step beyond {line} GPUs; a broadcast takes at "
        f"most {table.broadcast.max():.0%} even on {max(table.gpus):,}"
    )
    footer = (
        f"{_PAPER} Half of the GPUs generate; their engines wait while weights arrive. Links at "
        f"{study.efficiency.link:.0%} of {study.gpus['H100'].network / 1e9:g} GB/s. {_setting(study)}"
    )
    with house_style(_name("sync")):
        figure = new_figure(heading, 3.8, 8.0)
        axes = figure.subplots()
        for model, colour, mark in zip(models, _LINES, _MARKS):
            own = table[table.model == model]
            for name, dash in (("one by one", ":"), ("broadcast", "-")):
                axes.plot(
                    own.gpus, own[name], dash, color=colour, marker=mark, markersize=4, linewidth=1.4,
                    markerfacecolor=colour if name == "broadcast" else "white", label=f"{model}, {name}",
                )  # fmt: skip
        axes.axhline(TOLERATED, color=GREY, linewidth=0.8)
        _bare(axes, "share of an in-flight step in which weights are sent (grey: a tenth)")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(study.given["synced_gpu_counts"], [f"{gpus:,}" for gpus in study.given["synced_gpu_counts"]])
        axes.minorticks_off()
        axes.set_yticks([0.01, 0.1, 1], ["1%", "10%", "100%"])
        axes.set_xlabel("GPUs")
        _finish(figure, footer, 3)
    return Drawn(_name("sync"), figure, table.round(4), "lines: a simulated run each")


def draw_all(study: Study) -> list[Drawn]:
    """The figures of the page."""
    return [draw_shares(study), draw_tails(study), draw_sync(study)]


def _name(which: str) -> str:
    return f"{NAME}_{which}"


def _setting(study: Study) -> str:
    work = study.work()
    return (
        f"H100, {work.responses:,} responses a step, mean {work.lengths.mean:,.0f} tokens; {IN_FLIGHT}: at most "
        f"{study.given['max_lag']} steps behind."
    )


def _bare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=BODY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _finish(figure: Figure, footer: str, columns: int) -> None:
    """The legend of the labelled lines, and the footer."""
    handles, words = figure.axes[0].get_legend_handles_labels()
    write_legend(figure, list(zip(handles, words)), columns)
    write_footer(figure, footer.rstrip("."), 4)
