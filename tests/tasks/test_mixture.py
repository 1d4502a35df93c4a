"""Mixtures of tables: what each source gives, shares that hold, and numbers by source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from compositions import run_of
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.rollout.groups import ProblemSource
from grpo_lab.run.training_problems import TrainingProblems
from grpo_lab.tasks.mixture import MixtureTask
from grpo_lab.tasks.tables import fingerprint
from grpo_lab.tricks.curriculum import DecidingResponses, EasyToHard, Memory, NoPositiveResampling, Pool, Uniform
from grpo_lab.types import Exhausted, Problem

PLAIN = [
    "task=mixture", "template=plain", "reward=strict", "verifier=exact_answer", "task.response_tokens=24",
    "task.downstream_response_tokens=48",
]  # fmt: skip


def sums(path: Path, firsts: Sequence[int], other: int = 1) -> str:
    path.write_text("".join(json.dumps({"question": f"{n}+{other}?", "answer": n + other}) + "\n" for n in firsts))
    return str(path)


def two(folder: Path, weights: tuple[float, float] = (1, 3)) -> list[str]:
    """Overrides for 50 sums with 1 and 100 sums with 2."""
    small, large = sums(folder / "small.jsonl", range(1, 51)), sums(folder / "large.jsonl", range(1, 101), other=2)
    return [
        f"+task.sources.small={{path: {small}, weight: {weights[0]}}}",
        f"+task.sources.large={{path: {large}, weight: {weights[1]}}}",
    ]


def task_of(*overrides: str) -> MixtureTask:
    task = run_of("world=tiny", *PLAIN, *overrides).task
    assert isinstance(task, MixtureTask)
    return task


@pytest.mark.extended
def test_every_split_has_its_share_of_each_source(tmp_path: Path) -> None:
    task = task_of(*two(tmp_path), "task.heldout_rows=20", "task.downstream_rows=8", "task.probe_rows=12")
    assert task.mixture == {"small": 0.25, "large": 0.75}
    parts = {split: task.problems(split) for split in ("train", "heldout", "downstream", "probe")}
    assert {split: Counter(one.source for one in part) for split, part in parts.items()} == {
        "train": {"small": 50 - 5 - 2, "large": 100 - 15 - 6}, "heldout": {"small": 5, "large": 15},
        "downstream": {"small": 2, "large": 6}, "probe": {"small": 3, "large": 9},
    }  # fmt: skip
    ids = [one.id for split in ("train", "heldout", "downstream") for one in parts[split]]
    assert len(set(ids)) == 150 and {one.id for one in parts["probe"]} <= {one.id for one in parts["train"]}
    assert all(
        one.question.endswith("+1?" if one.source == "small" else "+2?") for part in parts.values() for one in part
    )
    for number in (4, 8, 12, 20):
        assert sum(one.source == "small" for one in parts["heldout"][:number]) == number // 4, "any beginning is mixed"
    assert task.notes() == [] and len(set(task.fingerprint().values())) == 4


def test_a_question_of_two_sources_is_asked_once_and_never_where_it_is_evaluated(tmp_path: Path) -> None:
    one, other = sums(tmp_path / "one.jsonl", range(1, 41)), sums(tmp_path / "other.jsonl", range(21, 81))
    task = task_of(
        f"+task.sources.one={{path: {one}, weight: 1}}", f"+task.sources.other={{path: {other}, weight: 1}}",
        "task.heldout_rows=10", "task.downstream_rows=10",
    )  # fmt: skip
    questions = [item.question for split in ("train", "heldout", "downstream") for item in task.problems(split)]
    assert len(questions) == len(set(questions)) <= 80
    assert len(questions) + sum(int(note.split()[0]) for note in task.notes()) == 100, (
        "each that is left out is counted"
    )
    assert {note.split(maxsplit=1)[1] for note in task.notes()} == {
        *(
            f"{split} questions of the source other are also asked elsewhere in evaluation and were left out"
            for split in ("heldout", "downstream")
        ),
        "training questions of the source other are also asked in evaluation and were left out",
        "rows of the sources together repeat a question and its answer, such as '22+1?'; each is asked once",
    }
    assert {item.source for item in task.problems("train") if int(item.question.split("+")[0]) >= 41} == {"other"}


def test_a_question_with_another_answer_in_another_source_is_in_neither(tmp_path: Path) -> None:
    one = sums(tmp_path / "one.jsonl", range(1, 41))
    rows = [{"question": f"{n}+1?", "answer": n + 2 if n == 7 else n + 1} for n in range(5, 60)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = task_of(
        f"+task.sources.one={{path: {one}, weight: 1}}", "task.heldout_rows=2", "task.downstream_rows=2",
        f"+task.sources.other={{path: {tmp_path / 'other.jsonl'}, weight: 1}}",
    )  # fmt: skip
    assert "7+1?" not in {
        item.question for split in ("train", "heldout", "downstream") for item in task.problems(split)
    }
    (contrary,) = [note for note in task.notes() if "contradict each other" in note]
    assert contrary.startswith("2 rows of the sources together") and "'7+1?' has the answers '8' and '9'" in contrary


def test_a_source_may_be_evaluated_on_a_table_of_its_own(tmp_path: Path) -> None:
    test = sums(tmp_path / "test.jsonl", range(1, 9), other=5)
    small, large = two(tmp_path)
    task = task_of(small, large[:-1] + f", heldout: {{path: {test}}}}}")
    heldout = [one for one in task.problems("heldout") if one.source == "large"]
    assert [one.question for one in heldout] == [f"{n}+5?" for n in range(1, 9)]
    assert len([one for one in task.problems("train") if one.source == "large"]) == 100 - 20


def test_a_question_of_two_sources_belongs_to_evaluation_and_to_held_out_questions_first(tmp_path: Path) -> None:
    """Whichever source comes first: 1 to 4 are trained on in one and held out in the other, 41 to 44 likewise."""
    plain, hard = sums(tmp_path / "train.jsonl", range(1, 41)), sums(tmp_path / "hard.jsonl", range(41, 49))
    own, both = (
        sums(tmp_path / "own.jsonl", range(61, 81)),
        sums(tmp_path / "both.jsonl", [*range(1, 5), *range(41, 45)]),
    )
    sources = [
        f"+task.sources.plain={{path: {plain}, weight: 1, downstream: {{path: {hard}}}}}",
        f"+task.sources.tested={{path: {own}, weight: 1, heldout: {{path: {both}}}}}",
    ]
    for order in (sources, sources[::-1]):
        task = task_of(*order, "task.heldout_rows=32", "task.downstream_rows=32")
        train, heldout, downstream = (
            {int(one.question.split("+")[0]) for one in task.problems(split)}
            for split in ("train", "heldout", "downstream")
        )
        assert {*range(1, 5), *range(41, 45)} <= heldout and not train & {*range(1, 5)}
        assert {*range(45, 49)} <= downstream and not downstream & {*range(41, 45)}


def test_questions_outside_the_bounds_of_a_source_are_said(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": n + 1, "rate": n / 50} for n in range(1, 51)]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, large = two(tmp_path)
    rated = f"path: {tmp_path / 'rated.jsonl'}, weight: 1, pass_rate: rate"
    bounds = "lowest_pass_rate: 0.2, highest_pass_rate: 0.8"
    task = task_of(f"+task.sources.rated={{{rated}, {bounds}}}", large)
    assert task.notes() == ["19 of 50 questions of rated have no rate in [0.2, 0.8]"]
    assert task_of(f"+task.sources.rated={{{rated}}}", large).notes() == []


@pytest.mark.extended
def test_a_mixture_with_other_rubrics_is_another_one(tmp_path: Path) -> None:
    def with_rubrics(name: str, end: str) -> MixtureTask:
        rows = [{"question": f"{n}+1?", "answer": n + 1, "rubrics": [f"names {n}{end}"]} for n in range(1, 51)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        small = f"+task.sources.small={{path: {tmp_path / name}, weight: 1, details: rubrics}}"
        return task_of(small, two(tmp_path)[1])

    one, other, plain = with_rubrics("one.jsonl", ""), with_rubrics("other.jsonl", "!"), task_of(*two(tmp_path, (1, 3)))
    mine, others = one.fingerprint(), other.fingerprint()
    assert all(mine[split] != others[split] for split in mine), "a run does not resume with other rubrics"
    assert with_rubrics("again.jsonl", "").fingerprint() == mine
    assert plain.fingerprint() == {split: fingerprint(plain.problems(split)) for split in mine}

    def recorded(problems: tuple[Problem, ...]) -> str:
        record = TrainingProblems(problems, len(problems), {"question_filter": {}}, (), {}, {}).record()
        assert record is not None
        return record["fingerprint"]

    assert recorded(one.problems("train")) != recorded(other.problems("train"))
    assert recorded(plain.problems("train")) == fingerprint(plain.problems("train"))


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({}, r"task\.sources must be two tables or more, got \[\]: \+task\.sources\.NAME="),
        ({"a": {"path": "x"}, "b": {"path": "y", "weight": 1}}, r"task\.sources\.a\.weight must be a number above 0"),
        ({"a": {"path": "x", "weight": 0}, "b": {"path": "y", "weight": 1}}, r"task\.sources\.a\.weight must be a num"),
        ({"a-b": {"path": "x", "weight": 1}, "b": {"path": "y", "weight": 1}}, "must be letters, digits and _"),
        (
            {"a": {"path": "x", "weight": 1, "heldout": "test.jsonl"}, "b": {"path": "y", "weight": 1}},
            r"task\.sources\.a\.heldout must be a mapping .*, got 'test\.jsonl': write heldout: {path: test\.jsonl}",
        ),
        (
            {"a": {"path": "x", "weight": 1}, "b": {"path": "y", "weight": 1, "downstream": None}},
            r"task\.sources\.b\.downstream must be a mapping .*, got None: write downstream: .*or leave it out",
        ),
    ],
)
def test_what_is_no_mixture_is_refused(sources: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MixtureTask(24, 48, None, sources, 0.05, 0, 8, 8, 8)


def test_a_wrong_column_is_named(tmp_path: Path) -> None:
    small, large = two(tmp_path)
    task = task_of(small, large[:-1] + ", colour: red}")
    with pytest.raises(ValueError, match=r"task\.sources\.large must be made of path, .*got \['colour'\]"):
        task.problems("train")


# --- shares ---------------------------------------------------------------------------------------------------


def pool_of(sizes: dict[str, int], weights: dict[str, float], batch: int = 16, memory: Memory | None = None) -> Pool:
    sources = torch.tensor([number for number, size in enumerate(sizes.values()) for _ in range(size)])
    levels, whole = torch.arange(len(sources)), sum(weights.values())
    shares = {name: weight / whole for name, weight in weights.items()}
    memory = memory or Memory.of(len(sources))
    return Pool(levels, torch.full_like(levels, 100), batch, 0, 0.0, memory, frozenset(), sources, shares)


@pytest.mark.parametrize(
    "weights", [{"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 0.7, "b": 0.3}, {"a": 5, "b": 2, "c": 1}, {"a": 97, "b": 3}]
)
def test_every_source_is_within_two_of_its_share_after_every_batch(weights: dict[str, float]) -> None:
    sizes = {name: 20 + 30 * number for number, name in enumerate(weights)}
    pool, drawn = pool_of(sizes, weights), Counter()
    for batch in range(1, 80):
        found = Uniform().draw(16, pool)
        assert len(set(found)) == 16
        drawn.update(pool.sources[found].tolist())
        for number, share in enumerate(pool.shares.values()):
            assert abs(drawn[number] - share * 16 * batch) < (1 if len(weights) == 2 else 2)
    assert pool.memory.drawn == [drawn[number] for number in range(len(weights))]
    assert pool.memory.looked >= 79 * 16 and pool.memory.passed == 0, "what is in the step already is not asked again"


def test_the_order_by_hand_and_each_source_once_a_pass() -> None:
    """Shares of 1 to 3, behind by 1/4 and 3/4: b, then a behind by 1/2 and b by 1/2, the first of equals; b, b."""
    pool = pool_of({"a": 4, "b": 6}, {"a": 1, "b": 3}, batch=4)
    found = Uniform().draw(4, pool)
    assert [int(pool.sources[index]) for index in found] == [1, 0, 1, 1]
    rest = [index for _ in range(3) for index in Uniform().draw(4, pool)]
    of_a, of_b = ([one for one in found + rest if (one < 4) is first] for first in (True, False))
    assert sorted(of_a) == [0, 1, 2, 3] and sorted(of_b[:6]) == sorted(of_b[6:]) == [4, 5, 6, 7, 8, 9]
    assert pool.memory.places == [12] and pool.memory.looked == 16


def test_shares_hold_where_the_curriculum_passes_over_problems() -> None:
    pool = pool_of({"a": 40, "b": 40}, {"a": 1, "b": 1})
    pool.memory.attempts += 8
    pool.memory.right[:30] = 8.0  # most of a is solved
    drops = NoPositiveResampling(0.9, DecidingResponses.history)
    found = [index for _ in range(4) for index in drops.draw(16, pool)]
    assert Counter(pool.sources[found].tolist()) == {0: 32, 1: 32} and pool.memory.passed > 50
    assert {index for index in found if index < 40} == set(range(30, 40))
    pool.memory.right[:36] = 8.0
    with pytest.raises(Exhausted, match="a draw needs 8 problems, and of the 40 of the source a 4 can be taken"):
        drops.draw(16, pool)
    with pytest.raises(Exhausted, match=r"of the 40 of the source b 0 can be taken: raise curriculum\.start_share"):
        EasyToHard(0.25, 0.5).draw(16, pool_of({"a": 40, "b": 40}, {"a": 1, "b": 1}))


def test_a_draw_goes_on_from_a_saved_memory() -> None:
    pool = pool_of({"a": 7, "b": 19}, {"a": 2, "b": 3}, batch=4)
    for _ in range(5):
        Uniform().draw(4, pool)
    saved = Memory(**pool.memory.copy().to_state())
    ahead = [Uniform().draw(4, pool) for _ in range(6)]
    resumed = pool_of({"a": 7, "b": 19}, {"a": 2, "b": 3}, batch=4, memory=saved)
    assert [Uniform().draw(4, resumed) for _ in range(6)] == ahead


def test_a_task_without_a_mixture_has_one_stream() -> None:
    run = run_of("world=tiny")
    source = ProblemSource.of(
        run.curriculum, run.task.mixture, run.task.problems("train"), run.problems_per_step, run.seed
    )
    assert source.shares == {"": 1.0} and not source.sources.any()


# --- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_run_draws_in_proportion_and_logs_each_source(tmp_path: Path) -> None:
    few = ["evaluation.probe_problems=8", "evaluation.ends_probe_problems=8", "rollouts_every=1", "budget.amount=3"]
    folder = run_in_process(tmp_path / "runs", *PLAIN, *two(tmp_path), *SMALL, *few)
    start, *steps = [line["metrics"] for line in metrics_of(folder)]
    for number, row in enumerate(steps, start=1):
        table = pd.read_parquet(folder / "rollouts" / f"step={number:06d}.parquet")
        small = table["question"].str.endswith("+1?")
        assert row["rollout/source/small"] == small.mean() == 0.25 and row["rollout/source/large"] == 0.75
        assert row["reward/source/small"] == pytest.approx(table["reward"][small].mean())
        assert row["reward/source/large"] == pytest.approx(table["reward"][~small].mean())
    answers = pd.read_parquet(min((folder / "eval").iterdir())).query("suite == 'heldout'")
    by_source = answers.groupby("source")["outcome"].mean()
    assert start["eval/heldout/source/small"] == pytest.approx(by_source["small"])
    assert start["eval/heldout/source/large"] == pytest.approx(by_source["large"])


@pytest.mark.extended
def test_a_filter_that_leaves_a_source_too_few_is_refused(tmp_path: Path) -> None:
    rows = [{"question": f"Prove that {n}=1", "answer": 1} for n in range(40)] + [{"question": "2?", "answer": 2}]
    (tmp_path / "proofs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small, _ = two(tmp_path)
    proofs = f"+task.sources.proofs={{path: {tmp_path / 'proofs.jsonl'}, weight: 1}}"
    few = ["evaluation.probe_problems=8", "evaluation.ends_probe_problems=8", "question_filter=open_reasoner_zero"]
    said = r"question_filter leaves [01] problems of the source proofs, and a step draws up to 8 of it: loosen"
    with pytest.raises(ValueError, match=said):
        run_in_process(tmp_path / "runs", *PLAIN, small, proofs, *SMALL, *few)
