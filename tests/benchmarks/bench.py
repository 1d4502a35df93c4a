"""How fast a training step is: where its time goes, what share of the machine it uses, and TRL beside it.

    make bench                                              everything
    .venv/bin/python tests/benchmarks/bench.py --without-trl      the step and its parts, without TRL
    .venv/bin/python tests/benchmarks/bench.py --table FILE       a results file as the tables of README.md

All of it on the CPU; `make gpu` measures a GPU. Every measurement is a process of its own with the same number of
threads. The sides take turns, train the same model on the same problems in the same order, and the first steps of each
run are left out. TRL has an environment of its own in .bench/trl, made on first use; vLLM is measured where
`make setup-vllm` installed it. All numbers end in .bench/results/, in a file named after the processor; with --record
(make bench RECORD=1) in tests/benchmarks/results/, where README.md's tables come from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
BENCH = HERE.parents[1] / ".bench"
RESULTS = HERE / "results"
TRL = BENCH / "trl"
CONSTRAINTS = HERE / "trl_constraints.txt"
WARMUP = 3  # steps of each run that are not counted
# Rows, vocabulary, and whether all scores exist at once.
MEMORY = ((64, 1000, False), (64, 32000, False), (128, 32000, False), (64, 32000, True))
STAGES = ("generate", "logprobs", "train", "sync")  # the rest of a step is other; grading is in generate
# The work both sides do. The learning rate is small so that both policies stay where they began, and with them
# the lengths of what they write.
SETTING = (
    "recipe=plain", "world=arithmetic", "group_size=8", "engine.temperature=1.0",
    "engine.top_p=1.0", "optimizer.learning_rate=1e-6", "optimizer.warmup_updates=0",
)  # fmt: skip
# What is counted as a comparison of unequal work, or of a machine that was busy with something else.
LENGTH_TOLERANCE = 0.1
BUSY_TOLERANCE = 0.1

Run = dict[str, Any]
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def load_results(path: Path) -> dict[str, Any]:
    """A results file; earlier versions called the stage of log-probs `score`."""

    def renamed(found: dict[str, Any]) -> dict[str, Any]:
        return {"logprobs" if name == "score" else name: value for name, value in found.items()}

    return json.loads(path.read_text(), object_hook=renamed)


def call(command: Sequence[str | Path], threads: int, doing: str) -> None:
    """Run a child with `threads` threads and its output in .bench/last.log; ends the benchmark if it fails."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    limits |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    log = BENCH / "last.log"
    if not console.is_terminal:
        console.print(f"  {doing}")
    with console.status(doing), log.open("w") as sink:
        done = subprocess.run(list(map(str, command)), env=os.environ | limits, stdout=sink, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        console.print(tail, markup=False)
        sys.exit(f"error: '{doing}' ended with exit code {done.returncode}; its whole output is in {log}")


def make_trl_environment() -> Path:
    """TRL's own environment at the pinned versions, made or remade only when the pins changed; its Python."""
    python, stamp = TRL / "bin" / "python", TRL / ".installed"
    wanted = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    call([sys.executable, "-m", "venv", "--clear", TRL], 1, "making .bench/trl")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
    call([*pip, "torch"], 1, "installing torch into .bench/trl, a few minutes the first time")
    call([*pip, "trl", "transformers"], 1, "installing TRL into .bench/trl")
    stamp.write_text(wanted)
    return python


def run_lab(arguments: Sequence[Any], threads: int, doing: str) -> Run:
    """One run of lab_side.py."""
    target = BENCH / "lab.json"
    call([sys.executable, HERE / "lab_side.py", target, *map(str, arguments)], threads, doing)
    return json.loads(target.read_text())


def run_part(arguments: Sequence[Any], threads: int, doing: str) -> Run:
    """One run of parts_side.py."""
    target = BENCH / "part.json"
    call([sys.executable, HERE / "parts_side.py", target, *arguments], threads, doing)
    return json.loads(target.read_text())


def measure_parts(options: argparse.Namespace) -> Run:
    """On a CPU: generation beside others', the learner against the peak, and what a pass adds to peak memory."""
    threads, rounds = options.threads, options.rounds
    passes = [
        {"rows": rows, "vocabulary": vocabulary, "plain": plain}
        | run_part(["memory", rows, vocabulary, int(plain)], threads, f"memory: {rows} rows, vocabulary {vocabulary}")
        for rows, vocabulary, plain in MEMORY
    ]
    return {
        "generation": [
            run_part(["generation", budget, rounds], threads, f"budget {budget}: generation, side by side")
            for budget in options.budgets
        ],
        "learner": run_part(["learner", rounds], threads, "the learner's passes beside the matmul peak"),
        "memory": passes,
    }


def run_trl(python: Path, setting: Run, threads: int, doing: str) -> Run:
    """One run of trl_side.py on the setting of the lab's run before it, its rewards checked."""
    source, target = BENCH / "setting.json", BENCH / "trl.json"
    source.write_text(json.dumps(setting))
    call([python, HERE / "trl_side.py", target, source, WARMUP], threads, doing)
    result = json.loads(target.read_text())
    check_rewards(result.pop("last"), setting)
    return result


def check_rewards(rows: Sequence[Run], setting: Run) -> None:
    """Ends the benchmark unless the other side's verifier gave every response of a step what ours gives it."""
    from grpo_lab.tasks.verifiers import Strict
    from grpo_lab.types import Problem

    strict = Strict(correct=setting["correct"], wrong=setting["wrong"])
    judged = [strict(Problem(0, "", row["answer"], 1), row["text"], row["finished"]) for row in rows]
    wrong = [row for row, outcome in zip(rows, judged) if outcome != row["outcome"]]
    if wrong:
        sys.exit(f"error: the two verifiers disagree, for example on {wrong[0]}: mend trl_side.py")


def measure(options: argparse.Namespace) -> Run:
    """Every run of the benchmark, in order: the peak, then for each budget the plain recipe and the pairs."""
    from grpo_lab.tracking import provenance

    threads, cores = options.threads, os.cpu_count()
    python = None if options.without_trl else make_trl_environment()
    call([Path(sys.executable).with_name("grpo-lab"), "base", "world=arithmetic"], threads, "building the base model")
    about = provenance.collect([])
    results: Run = {
        "machine": {name: about[name] for name in ("cpu", "memory_bytes", "platform")} | {"cores": cores},
        "commit": None if about["git"] is None else {name: about["git"][name] for name in ("commit", "dirty")},
        "versions": {"python": about["python"], "lab": about["packages"]},
        "threads": threads,
        "warmup": WARMUP,
        "load_before": os.getloadavg()[0],
        "device": "cpu",
        "precision": "fp32",
        "peak_flops": run_lab(["--peak", "cpu", "float32"], threads, "measuring the matmul peak")["peak"],
        "budgets": [],
    }
    work = [f"problems_per_step={options.problems}", "device=cpu", f"threads={threads}"]
    for budget in options.budgets:
        fixed = [*SETTING, *work, *options.overrides, f"engine.max_tokens={budget}"]

        def lab(name: str, *overrides: str, budget: int = budget, fixed: list[str] = fixed) -> Run:
            doing = f"budget {budget}: {name}"
            return run_lab([options.steps, WARMUP, *fixed, *overrides], threads, doing)

        plain = lab("the plain recipe")
        pairs = []
        for pair in range(options.pairs):
            ours = lab(f"pair {pair + 1}, grpo_lab", "updates=one", f"seed={pair}")
            pairs.append({"lab": ours})
            if python is not None:
                theirs = run_trl(python, ours["setting"], threads, f"budget {budget}: pair {pair + 1}, TRL")
                results["versions"]["trl"] = theirs.pop("versions")
                pairs[-1]["trl"] = theirs
        for run in [plain, *(pair["lab"] for pair in pairs)]:
            for name in ("model", "prompts", "prompt_ids", "answers"):
                run["setting"].pop(name)
        results["budgets"].append({"budget": budget, "plain": plain, "pairs": pairs})
    return results


def middle(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """The median of a value over all counted steps of these runs."""
    return median(value(row) for run in runs for row in run["rows"])


def compare(pair: Run) -> dict[str, float]:
    """What one pair says: medians of each side, and ratios above 1 where the lab is the faster one."""
    numbers: dict[str, float] = {}
    for side in ("lab", "trl"):
        runs = [pair[side]]
        numbers |= {
            f"{side}_step": middle(runs, lambda row: row["wall"]),
            f"{side}_cpu": middle(runs, lambda row: row["cpu"]),
            f"{side}_generate": middle(runs, lambda row: row["stages"]["generate"]),
            f"{side}_tokens": sum(row["tokens"] for row in pair[side]["rows"]) / len(pair[side]["rows"]),
            f"{side}_per_1000": middle(runs, lambda row: 1000 * row["wall"] / row["tokens"]),
        }
    for name in ("step", "cpu", "generate", "per_1000"):
        numbers[f"ratio_{name}"] = numbers[f"trl_{name}"] / numbers[f"lab_{name}"]
    return numbers


def split_table(results: Run) -> Table:
    peak = results["peak_flops"]
    threads = "1 thread" if results["threads"] == 1 else f"{results['threads']} threads"
    table = Table(
        title=f"Median step, milliseconds; {threads}, {results['precision']} matmul peak {peak / 1e9:.1f} GFLOP/s",
        caption="tokens/s: generated tokens by the time of generation; GFLOP/s: the ledger's count by the whole step",
    )
    for name in ("updates", "budget"):
        table.add_column(name)
    for name in (*STAGES, "other", "step", "tokens", "tokens/s", "GFLOP/s", "of peak"):
        table.add_column(name, justify="right")
    for part in results["budgets"]:
        for name, runs in (("four (plain)", [part["plain"]]), ("one", [pair["lab"] for pair in part["pairs"]])):
            flops = middle(runs, lambda row: row["flops"] / row["wall"])
            table.add_row(
                name,
                str(part["budget"]),
                *(f"{1000 * middle(runs, lambda row, s=stage: row['stages'][s]):.1f}" for stage in STAGES),
                f"{1000 * middle(runs, lambda row: row['wall'] - sum(row['stages'][s] for s in STAGES)):.1f}",
                f"{1000 * middle(runs, lambda row: row['wall']):.1f}",
                f"{middle(runs, lambda row: row['tokens']):,.0f}",
                f"{middle(runs, lambda row: row['tokens'] / row['stages']['generate']):,.0f}",
                f"{flops / 1e9:.1f}",
                f"{flops / peak:.0%}",
            )
    return table


def trl_table(results: Run) -> Table:
    versions = results["versions"]["trl"]
    table = Table(
        title=f"grpo_lab and TRL {versions['trl']} on the same work, one update per step; lab / TRL, medians",
        caption="ratios are TRL's time by the lab's: above 1 the lab is faster; tokens are means per step",
    )
    for name in ("budget", "pair"):
        table.add_column(name)
    for name in (
        "step ms", "ratio", "CPU ms", "ratio", "generate ms", "ratio", "ms per 1000 tokens", "ratio", "tokens",
    ):  # fmt: skip
        table.add_column(name, justify="right", style="bold" if name == "ratio" else "")
    for part in results["budgets"]:
        for index, numbers in enumerate(part["compared"], start=1):
            cells = []
            for name in ("step", "cpu", "generate", "per_1000"):
                cells += [f"{1000 * numbers[f'lab_{name}']:.0f} / {1000 * numbers[f'trl_{name}']:.0f}"]
                cells += [f"{numbers[f'ratio_{name}']:.2f}"]
            tokens = f"{numbers['lab_tokens']:,.0f} / {numbers['trl_tokens']:,.0f}"
            table.add_row(str(part["budget"]), str(index), *cells, tokens)
        table.add_section()
    return table


def rate(runs: Sequence[Run]) -> float:
    """Median tokens per second."""
    return median(run["tokens"] / run["seconds"] for run in runs)


def side_by_side(part: Run, name: str) -> tuple[float, float, float]:
    """How many times as fast the native engine draws as another side: median, least and most over the rounds."""
    ratios = [
        (own["tokens"] / own["seconds"]) / (other["tokens"] / other["seconds"])
        for own, other in zip(part["sides"]["native"], part["sides"][name])
    ]
    return median(ratios), min(ratios), max(ratios)


def generation_table(results: Run) -> Table:
    table = Table(
        title="Generation, tokens per second: the native engine, transformers.generate and vLLM on the same prompts",
        caption="ratios: the native engine's speed by the other's, median of paired rounds (least to most)",
    )
    for name in ("budget", "native", "transformers", "ratio", "vLLM", "ratio"):
        table.add_column(name, justify="right")
    for part in results["parts"]["generation"]:
        cells = [str(part["budget"]), f"{rate(part['sides']['native']):,.0f}"]
        for name in ("transformers", "vllm"):
            if name in part["sides"]:
                ratio = "{:.2f} ({:.2f} to {:.2f})".format(*side_by_side(part, name))
                cells += [f"{rate(part['sides'][name]):,.0f}", ratio]
            else:
                cells += ["-", "-"]
        table.add_row(*cells)
    return table


def learner_lines(results: Run) -> list[str]:
    """The learner's speed against the peak, and the memory of its passes."""
    parts = results["parts"]
    learner = parts["learner"]
    shares = [rate / peak for rate, peak in zip(learner["rates"], learner["peaks"])]
    weights, speed = learner["weights"] / 1e6, median(learner["rates"]) / 1e9
    lines = [
        f"learner, {weights:.1f} M weights: {speed:.1f} GFLOP/s on tokens that are no padding, {median(shares):.0%} of "
        f"the matmul peak of the same turn ({min(shares):.0%} to {max(shares):.0%})"
    ]
    for one in parts["memory"]:
        how = "all scores at once" if one["plain"] else "scores in chunks"
        lines.append(
            f"memory of a training pass, {one['rows']} rows, vocabulary {one['vocabulary']:,}, {how}: "
            f"{one['bytes'] / 1e6:,.0f} MB"
        )
    return lines


def markdown(table: Table) -> str:
    """The same table for README.md."""
    names = [str(column.header) for column in table.columns]
    rows = list(zip(*(column.cells for column in table.columns)))
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([f"{table.title}:", "", *lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def for_readme(results: Run) -> str:
    """Everything a results file says, as markdown."""
    machine = results["machine"]
    tables = [split_table(results)]
    if "trl" in results["versions"]:
        tables += [trl_table(results)]
    listed = []
    if "parts" in results:
        tables += [generation_table(results)]
        listed = ["\n".join(f"- {line}" for line in learner_lines(results))]
    return "\n\n".join([f"{machine['cpu']['model']}, {results['threads']} thread:", *map(markdown, tables), *listed])


def verdicts(results: Run) -> list[str]:
    """One line per budget, and a warning where the comparison is not what it should be."""
    lines = []
    for part in results["budgets"]:
        budget, summary = part["budget"], part["summary"]
        step, length_free = summary["step"], summary["per_1000"]
        lines.append(
            f"budget {budget}: TRL takes [bold]{step['median']:.2f}[/bold] times the lab's step "
            f"({step['min']:.2f} to {step['max']:.2f} over {len(part['pairs'])} pairs), "
            f"{length_free['median']:.2f} times per generated token"
        )
        for index, numbers in enumerate(part["compared"], start=1):
            apart = numbers["trl_tokens"] / numbers["lab_tokens"] - 1
            if abs(apart) > LENGTH_TOLERANCE:
                lines.append(
                    f"[yellow]unequal work[/yellow] budget {budget}, pair {index}: TRL generated {apart:+.0%} tokens; "
                    "read the ratio per 1000 tokens, or take more --steps"
                )
    return lines


def busy(results: Run) -> str | None:
    """A warning where steps waited for the processor; only one thread tells waiting from working."""
    if results["threads"] != 1:
        return None
    runs = [
        run for part in results["budgets"] for run in (part["plain"], *(r for p in part["pairs"] for r in p.values()))
    ]
    worst = max(middle([run], lambda row: row["wall"] / row["cpu"]) for run in runs) - 1
    if worst <= BUSY_TOLERANCE:
        return None
    return (
        f"[yellow]busy machine[/yellow] in one run steps took {worst:.0%} longer than they computed: "
        "trust the CPU times, or repeat this when nothing else runs"
    )


def file_name(results: Run) -> str:
    """The processor and its cores."""
    machine = results["machine"]
    return re.sub("[^a-z0-9]+", "_", f"{machine['cpu']['model']} {machine['cores']} cores".lower()).strip("_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help=f"counted steps of each run, after {WARMUP} (12)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[40, 128], help="response tokens (40 128)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each side (1)")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each side for each budget (2)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each part of a step (8)")
    parser.add_argument("--without-trl", action="store_true", help="leave TRL out")
    parser.add_argument("--problems", type=int, default=16, help="of a step, with 8 responses each (16)")
    parser.add_argument("--record", action="store_true", help="replace the results that this repository keeps")
    parser.add_argument("overrides", nargs="*", help="further overrides of the lab's side, such as microbatch_tokens")
    parser.add_argument("--table", type=Path, help="print a results file as markdown and measure nothing")
    options = parser.parse_args()
    if options.table:
        print(for_readme(load_results(options.table)))
        return
    for name in ("steps", "threads", "pairs", "rounds", "problems"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.problems % 4:
        parser.error("--problems must be a multiple of 4, as the plain recipe takes four updates")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    BENCH.mkdir(exist_ok=True)
    try:
        results = measure(options)
        results["parts"] = measure_parts(options)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    if not options.without_trl:
        for part in results["budgets"]:
            part["compared"] = [compare(pair) for pair in part["pairs"]]
            part["summary"] = {
                name: {"median": median(values), "min": min(values), "max": max(values)}
                for name in ("step", "cpu", "generate", "per_1000")
                for values in [[numbers[f"ratio_{name}"] for numbers in part["compared"]]]
            }
    folder = RESULTS if options.record else BENCH / "results"
    folder.mkdir(exist_ok=True)
    target = folder / f"{file_name(results)}.json"
    target.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    console.print(split_table(results))
    if not options.without_trl:
        console.print(trl_table(results))
        for line in verdicts(results):
            console.print(line)
    if "parts" in results:
        console.print(generation_table(results))
        for line in learner_lines(results):
            console.print(line)
    if warning := busy(results):
        console.print(warning)
    console.print(f"all numbers: {target}")


if __name__ == "__main__":
    main()
