"""The worlds beside the first: their questions, verifiers and the base models that come with them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from base_models.rebuild import Compared, accuracy_of, every_recipe, rebuilt, recipes_of, shipped_like
from sampling import asked, hf_model
from test_arithmetic_world import from_yaml

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.seeding import token_uniforms
from grpo_lab.tasks.arithmetic import ArithmeticWorld, Chain, Family, careful_steps
from grpo_lab.tasks.shipped import FOLDER, find_shipped, shipped
from grpo_lab.tasks.verifiers import FormatOnly, Inverted, Near, Noisy, RandomReward, Strict
from grpo_lab.tasks.warm_start import ArithmeticBase, draw_example
from grpo_lab.types import NoiseKey

WORLDS = ("sums", "length", "explore", "guessable", "families")
MORE = {
    "guessable_base": 16,
    "explore_base": 8,
    "sums_base": 8,
    "length_base": 8,
}  # base models; four of every other world
strict = Strict(correct=1.0, wrong=0.0)


@pytest.mark.parametrize(
    ("chain", "question", "steps", "answer"),
    [
        (Chain((7, 15, 8)), "7+15+8?", "7+15=22;22+8=30;", 30),
        (Chain((7, 15, 8), Family.differences), "30-15-8?", "30-15=15;15-8=7;", 7),
        (Chain((7, 15, 8), modulus=7), "7+15+8%7?", "7+15=22;22+8=30;30%7=2;", 2),
    ],
)
def test_a_question_its_steps_and_its_answer(chain: Chain, question: str, steps: str, answer: int) -> None:
    assert chain.question == question
    assert careful_steps(Random(0), chain, 0.0, 5) == (steps, answer)
    assert chain.answer == answer


@pytest.mark.few(1)
@pytest.mark.parametrize("world", WORLDS)
def test_no_two_splits_of_a_world_share_a_question(world: str) -> None:
    task = from_yaml(ArithmeticWorld, f"task/{world}")
    seen: dict[str, str] = {}
    ids: set[int] = set()
    for split in task.splits:
        if split == "probe":
            assert task.problems("probe") == task.problems("train")[: task.probe_size]
            continue
        for problem in task.problems(split):
            assert seen.setdefault(problem.question, split) == split
            ids.add(problem.id)
    assert len(ids) == len(seen)


@pytest.mark.few(1)
@pytest.mark.parametrize("world", WORLDS)
def test_withheld_numbers_stand_in_one_split_alone_and_no_base_has_read_them(world: str) -> None:
    task = from_yaml(ArithmeticWorld, f"task/{world}")
    recipe = from_yaml(ArithmeticBase, f"model/{world}_base")
    withheld = {str(number) for number in task.withheld_numbers}
    assert withheld and recipe.withheld_numbers == task.withheld_numbers

    def operands(question: str) -> set[str]:
        return set(re.findall(r"\d+", question.partition("%")[0]))

    for split in ("train", "heldout", "downstream"):
        assert not any(operands(problem.question) & withheld for problem in task.problems(split))
    assert all(operands(problem.question) & withheld for problem in task.problems("heldout_rule"))
    sums = replace(recipe, families=[Family.sums])  # a difference may start with any number
    rng = Random(1)
    read = [draw_example(sums, rng, careful_only=False).question for _ in range(500)]
    assert not any(operands(question) & withheld for question in read)


@pytest.mark.parametrize("world", WORLDS)
def test_other_numbers_are_beyond_those_of_training(world: str) -> None:
    task = from_yaml(ArithmeticWorld, f"task/{world}")
    numbers = [int(n) for p in task.problems("other_numbers") for n in re.findall(r"\d+", p.question.partition("%")[0])]
    assert min(numbers) > task.number_max and max(numbers) <= task.other_number_max


@pytest.mark.extended
def test_the_other_family_asks_differences_with_answers_that_fit_them() -> None:
    task = from_yaml(ArithmeticWorld, "task/families")
    for problem in task.problems("other_family"):
        first, *others = map(int, problem.question.removesuffix("?").split("-"))
        assert int(problem.answer) == first - sum(others) >= 0
    both = replace(task, families=[Family.sums, Family.differences])
    kinds = {"-" in problem.question for problem in both.problems("train")}
    assert kinds == {True, False}


def test_a_split_that_a_world_does_not_have_is_refused() -> None:
    first = from_yaml(ArithmeticWorld, "task/arithmetic")
    assert first.splits == ("train", "probe", "heldout", "downstream")
    with pytest.raises(ValueError, match="split must be one of"):
        first.problems("other_family")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"families": []}, "families must be at least one family"),
        ({"modulus": 1}, "modulus must be 0 or at least 2, got 1"),
        ({"modulus": 0, "modulus_share": 0.5}, "modulus_share must be between 0 and 1, and 0 without a modulus"),
        ({"other_number_max": 3}, "other_number_max must be 0 or at least other_number_min"),
    ],
)
def test_mistaken_kinds_of_questions_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(from_yaml(ArithmeticWorld, "task/guessable"), **change)


def test_half_of_the_guesses_of_a_remainder_are_right() -> None:
    recipe = replace(from_yaml(ArithmeticBase, "model/guessable_base"), guess_share=1.0, careful_share=0.0)
    recipe = replace(recipe, modulus_share=1.0, hard_share=0.0)
    rng = Random(0)
    drawn = [draw_example(recipe, rng, careful_only=False) for _ in range(2000)]
    right = sum(strict(asked(example.answer), example.response, True) for example in drawn) / len(drawn)
    assert right == pytest.approx(0.5, abs=0.04)


# Verifiers that err, and rewards in parts


@pytest.mark.extended
def test_a_noisy_verifier_errs_at_its_rates_and_always_alike() -> None:
    noisy = Noisy(correct=1.0, wrong=0.0, false_positive_rate=0.3, false_negative_rate=0.1, seed=0, per_response=False)
    wrong = [noisy(asked("5"), f"{n}=#6", True) for n in range(4000)]
    right = [noisy(asked("6"), f"{n}=#6", True) for n in range(4000)]
    assert sum(wrong) / 4000 == pytest.approx(0.3, abs=0.03)
    assert sum(right) / 4000 == pytest.approx(0.9, abs=0.03)
    assert wrong == [noisy(asked("5"), f"{n}=#6", True) for n in range(4000)]
    assert wrong != [replace(noisy, seed=1)(asked("5"), f"{n}=#6", True) for n in range(4000)]
    exact = replace(noisy, false_positive_rate=0.0, false_negative_rate=0.0)
    assert [exact(asked("6"), f"#{n}", True) for n in (5, 6, 7)] == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="false_positive_rate must be at least 0 and below 1, got 1"):
        replace(noisy, false_positive_rate=1.0)


@pytest.mark.extended
def test_mistakes_per_response_are_draws_of_their_own() -> None:
    noisy = Noisy(correct=1.0, wrong=0.0, false_positive_rate=0.3, false_negative_rate=0.1, seed=0, per_response=True)
    keys = [NoiseKey(0, "train", step, problem=7, response=row) for step in range(500) for row in range(8)]

    def judged(answer: str, keys: list[NoiseKey]) -> list[float]:
        return noisy.correctness([asked(answer)] * len(keys), ["#6"] * len(keys), [True] * len(keys), keys)

    wrong, right = judged("5", keys), judged("6", keys)
    assert sum(wrong) / 4000 == pytest.approx(0.3, abs=0.03) and sum(right) / 4000 == pytest.approx(0.9, abs=0.03)
    assert wrong == judged("5", keys) != judged("5", [replace(key, seed=1) for key in keys])
    with pytest.raises(TypeError, match="belongs to the response"):
        noisy(asked("6"), "#6", True)
    alike = replace(noisy, per_response=False).correctness([asked("5")] * 8, ["#6"] * 8, [True] * 8, keys[:8])
    assert len(set(alike)) == 1


@pytest.mark.extended
def test_a_random_reward_belongs_to_the_response_and_not_to_its_text() -> None:
    coin = RandomReward(correct=1.0, wrong=0.0, share=0.3)
    keys = [NoiseKey(0, "train", step, problem=7, response=row) for step in range(500) for row in range(8)]

    def tossed(keys: list[NoiseKey], answer: str = "6") -> list[float]:
        return coin.correctness([asked(answer)] * len(keys), ["#6"] * len(keys), [True] * len(keys), keys)

    drawn = tossed(keys)
    assert sum(drawn) / len(keys) == pytest.approx(0.3, abs=0.03)
    assert drawn == tossed(keys) == tossed(keys, answer="5"), "neither another time nor another answer matters"
    assert drawn != tossed([replace(key, seed=1) for key in keys])
    low = [key for key, outcome in zip(keys, drawn) if token_uniforms(key, 0, 1)[0] < 0.3]
    assert sum(tossed(low)) / len(low) == pytest.approx(0.3, abs=0.06), "the first token's number is another one"
    with pytest.raises(TypeError, match="belongs to a response"):
        coin(asked("6"), "#6", True)
    with pytest.raises(ValueError, match="share must be above 0 and below 1, got 1"):
        replace(coin, share=1.0)


def test_controls_pay_for_what_strict_does_not() -> None:
    inverted, form = Inverted(correct=1.0, wrong=0.0), FormatOnly(correct=1.0, wrong=0.0)
    texts = {"1+5=#6": True, "#7": True, "#6": False, "6": True}
    seen = [(asked("6"), text, finished) for text, finished in texts.items()]
    assert [strict(*one) for one in seen] == [1.0, 0.0, 0.0, 0.0]
    assert [inverted(*one) for one in seen] == [0.0, 1.0, 1.0, 1.0]
    assert [form(*one) for one in seen] == [1.0, 1.0, 0.0, 0.0]


def test_a_near_number_earns_a_part_and_is_no_right_answer() -> None:
    near = Near(correct=1.0, wrong=0.0, near=0.3, within=3)
    texts = {"#33": 0.0, "#36": 0.3, "#30": 0.3, "#37": 0.0, "33": 0.0}
    graded = near.grades([asked("33")] * 6, [*texts, "#34"], [True] * 5 + [False], [])  # the last one truncated
    assert graded.components["part"] == [*texts.values(), 0.0]
    assert graded.components["outcome"] == graded.correctness == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert near.bounds(right=True) == (1.0, 1.0) and near.bounds(right=False) == (0.0, 0.3)
    assert near(asked("33"), "#34", True) == 0.0 and near(asked("33"), "#33", True) == 1.0
    with pytest.raises(ValueError, match="near must be above 0 and below 1"):
        replace(near, near=1.0)


@pytest.mark.parametrize("answer", ["3/4", "", "2.5", "1 000", "1_000"])
def test_nothing_is_near_an_answer_that_is_no_whole_number(answer: str) -> None:
    near = Near(correct=1.0, wrong=0.0, near=0.3, within=3)
    near.check([asked("33"), asked("-2")])
    with pytest.raises(ValueError, match="which is no whole number: set reward=strict or reward=math in place of near"):
        near.check([asked("33"), asked(answer)])
    assert near.grades([asked(answer)], ["#5"], [True], []).components["part"] == [0.0]


def test_a_final_number_of_any_length_is_read() -> None:
    near = Near(correct=1.0, wrong=0.0, near=0.3, within=3)
    graded = near.grades([asked("99")] * 3, ["#" + "1" * 9999, "#" + "0" * 9999 + "98", "#102"], [True] * 3, [])
    assert graded.components["part"] == [0.0, 0.3, 0.3]


# Base models that come with grpo_lab


def test_the_fingerprint_is_of_the_numbers_and_not_of_the_files(tmp_path: Path, tiny_base: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_base / "model.safetensors")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:3]}, first / "a.safetensors", {"of": "part"})
    save_file({name: weights[name] for name in names[3:]}, first / "b.safetensors")
    assert fingerprint(first) == fingerprint(tiny_base)
    weights[names[0]] = weights[names[0]] + 1e-6
    save_file(weights, second / "model.safetensors")
    assert fingerprint(second) != fingerprint(tiny_base)


@pytest.mark.parametrize("model", [*(f"{world}_base" for world in WORLDS), "arithmetic_base", "tiny_base"])
def test_base_models_of_every_world_come_with_the_package(model: str) -> None:
    recipe, number = from_yaml(ArithmeticBase, f"model/{model}"), MORE.get(model, 4)
    found = [find_shipped(replace(recipe, base=base).key()) for base in range(number)]
    assert [base and base.file for base in found] == [f"{model}-{base}.safetensors" for base in range(number)]
    assert find_shipped(replace(recipe, base=number).key()) is None
    assert shipped_like(replace(recipe, base=2)) == recipes_of(recipe, number)


def fitting(world: str) -> float:
    """The share of a world's training problems whose steps fit into its budget."""
    run = to_run(compose_config([f"world={world}"]))
    needed = run.task.needed_tokens("train")
    assert needed is not None
    return sum(tokens <= run.engine.max_tokens for tokens in needed) / len(needed)


@pytest.mark.extended
def test_budgets_are_what_the_worlds_are_for() -> None:
    assert fitting("sums") == 1.0
    assert fitting("length") == pytest.approx(0.95, abs=0.01)
    assert fitting("arithmetic") == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(
    ("model", "share", "least", "most"),
    [
        ("length_base", "ramble_share", 0.4, 0.6),
        ("explore_base", "careful_share", 0.01, 0.05),
        ("guessable_base", "guess_share", 0.3, 0.4),
        ("sums_base", "truncated_share", 0.0, 0.06),
    ],
)
def test_bases_answer_as_their_worlds_need(model: str, share: str, least: float, most: float) -> None:
    """By the report that came with each base, of 1,024 problems."""
    found = [base.report[share] for base in shipped() if base.file.startswith(model)]
    assert len(found) == MORE.get(model, 4) and least <= min(found) and max(found) <= most


def test_the_index_holds_no_other_base_and_all_are_small() -> None:
    files = {base.file for base in shipped()}
    assert len(files) == len(shipped()) == sum(MORE.values()) + 4 * (len(WORLDS) + 2 - len(MORE))
    assert {path.name for path in FOLDER.glob("*.safetensors")} == files
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 22e6
    assert every_recipe()[0].key() == shipped()[0].key


def test_a_shipped_base_is_unpacked_to_the_same_weights_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    recipe = from_yaml(ArithmeticBase, "model/tiny_base")
    came = find_shipped(recipe.key())
    assert came is not None
    folders = []
    for name in ("one", "two"):
        monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / name))
        torch.manual_seed(len(folders))  # the caller's random state changes nothing
        folders.append(recipe.resolve())
    weights = load_file(came.weights)
    unpacked = load_file(folders[0] / "model.safetensors")
    assert unpacked.keys() == weights.keys()
    assert all(torch.equal(unpacked[name], weights[name].float()) for name in weights)
    assert fingerprint(folders[0]) == fingerprint(folders[1])
    assert hf_model(folders[0]).resolve() == folders[0]


def test_shipped_weights_that_are_gone_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lab.tasks.shipped.FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"lacks .*tiny_base-0\.safetensors.*restore the files"):
        shipped()


@pytest.mark.extended
def test_a_rebuilt_base_is_compared_with_the_one_that_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of training are no base: the comparison has to say so."""
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    hurried = replace(from_yaml(ArithmeticBase, "model/tiny_base"), steps=3)
    came = from_yaml(ArithmeticBase, "model/tiny_base")
    compared = Compared("tiny_base-0.safetensors", *(accuracy_of(came, one.resolve()) for one in (came, hurried)))
    assert compared.was > 0.3 and compared.now < 0.1 and not compared.agrees and "DIFFERS" in compared.text()
    assert Compared("same", 0.42, 0.45).agrees and not Compared("other", 0.42, 0.48).agrees
    # of 28 one in 560 differs by chance on either side: 3.1237 deviations of .021946
    assert Compared("of 28", 0.42, 0.48, 28).half_width == pytest.approx(0.06855, abs=1e-5)
    with pytest.raises(ValueError, match="did not come with grpo_lab"):
        next(rebuilt([hurried]))


@pytest.mark.extended
def test_a_shipped_base_built_again_agrees() -> None:
    (compared,) = rebuilt([from_yaml(ArithmeticBase, "model/tiny_base")])
    assert compared.agrees, compared.text()
