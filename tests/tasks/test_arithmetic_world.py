"""The arithmetic world: splits, grammar, tokenizer, verifiers, and the base models that are built for it."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from base_models import rebuild
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sampling import asked, hf_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.policy import models
from grpo_lab.tasks import shipped, warm_start
from grpo_lab.tasks.arithmetic import (
    SYMBOLS,
    ArithmeticWorld,
    Chain,
    answer_mode,
    build_tokenizer,
)
from grpo_lab.tasks.cache import cache_root
from grpo_lab.tasks.gpu_base import GpuBase
from grpo_lab.tasks.templates import Plain
from grpo_lab.tasks.verifiers import ExactAnswer, Lenient, Strict
from grpo_lab.tasks.warm_start import ArithmeticBase, draw_example, encode_slice

CONF = Path(__file__).parents[2] / "conf"
strict = Strict(correct=1.0, wrong=0.0)
lenient = Lenient(correct=1.0, wrong=0.0)
exact = ExactAnswer(correct=1.0, wrong=0.0)
FIRST_PROBLEMS = [
    (0, "1+13+3+18?"),
    (1, "1+19+16+14+15?"),
    (0, "1+13+3+18?"),
    (1, "1+19+16+14+15?"),
    (1000000, "5+16+8+13+13?"),
    (1000001, "8+6+19+18+19+8?"),
    (2000000, "19+23+22+20+17+20+16?"),
    (2000001, "24+6+20+21+15+8+22?"),
]


def from_yaml(kind: type, name: str):
    """The option `name` as Hydra would build it: the class as schema, the file's numbers over it."""
    numbers = OmegaConf.load(CONF / f"{name}.yaml")
    del numbers["defaults"]
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), numbers))


@pytest.fixture(scope="module")
def world() -> ArithmeticWorld:
    return from_yaml(ArithmeticWorld, "task/arithmetic")


@pytest.fixture(scope="module")
def base() -> ArithmeticBase:
    return from_yaml(ArithmeticBase, "model/arithmetic_base")


@pytest.fixture
def hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArithmeticBase:
    """The tiny recipe with so few steps that it takes a second or two, and a cache of its own."""
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    return replace(from_yaml(ArithmeticBase, "model/tiny_base"), steps=3, report_problems=4)


def addends_of(question: str) -> list[int]:
    return [int(number) for number in question.removesuffix("?").split("+")]


# Splits


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["task/arithmetic", "task/tiny"])
def test_splits_are_disjoint_even_with_the_addends_in_another_order(name: str) -> None:
    task = from_yaml(ArithmeticWorld, name)
    seen = {
        split: {tuple(sorted(addends_of(problem.question))) for problem in task.problems(split)}
        for split in ("train", "heldout", "downstream")
    }
    assert not seen["train"] & seen["heldout"]
    assert not seen["train"] & seen["downstream"]
    assert not seen["heldout"] & seen["downstream"]


@pytest.mark.extended
def test_splits_stay_disjoint_when_their_ranges_coincide(world: ArithmeticWorld) -> None:
    task = replace(
        world,
        downstream_addends_min=world.addends_min,
        downstream_addends_max=world.addends_max,
        downstream_number_min=world.number_min,
        downstream_number_max=world.number_max,
    )
    questions = [problem.question for split in ("train", "heldout", "downstream") for problem in task.problems(split)]
    assert len(questions) == len(set(questions)) == task.train_size + task.heldout_size + task.downstream_size


@pytest.mark.extended
def test_ids_are_unique_and_the_probe_is_the_beginning_of_train(world: ArithmeticWorld) -> None:
    train = world.problems("train")
    assert world.problems("probe") == train[: world.probe_size]
    others = world.problems("heldout") + world.problems("downstream")
    ids = [problem.id for problem in train + others]
    assert len(ids) == len(set(ids))


@pytest.mark.extended
def test_an_id_keeps_its_question_when_sizes_change(world: ArithmeticWorld) -> None:
    larger = replace(world, train_size=world.train_size + 100, heldout_size=world.heldout_size + 100)
    for split in world.splits:
        rows = world.problems(split)
        assert larger.problems(split)[: len(rows)] == rows
    assert replace(world, seed=world.seed + 1).problems("train") != world.problems("train")


@pytest.mark.extended
def test_the_first_problems_never_change(world: ArithmeticWorld) -> None:
    """Ids are worth nothing in a stored result if another version of Python draws other questions."""
    first = [(problem.id, problem.question) for split in world.splits for problem in world.problems(split)[:2]]
    assert first == FIRST_PROBLEMS


@pytest.mark.extended
def test_answers_and_difficulty_follow_from_the_question(world: ArithmeticWorld) -> None:
    for split in world.splits:
        harder = "downstream_" if split == "downstream" else ""
        low, high = getattr(world, f"{harder}number_min"), getattr(world, f"{harder}number_max")
        for problem in world.problems(split):
            addends = addends_of(problem.question)
            assert problem.answer == str(sum(addends))
            assert problem.difficulty == len(addends)
            assert low <= min(addends) and max(addends) <= high
        counts = {problem.difficulty for problem in world.problems(split)}
        fewest, most = getattr(world, f"{harder}addends_min"), getattr(world, f"{harder}addends_max")
        assert counts == set(range(fewest, most + 1))


@pytest.mark.extended
def test_careful_steps_fit_the_training_budget_on_most_problems_but_not_on_all(
    world: ArithmeticWorld, base: ArithmeticBase
) -> None:
    def tokens(question: str) -> int:
        steps, total = warm_start.careful_steps(Random(0), Chain(tuple(addends_of(question))), 0.0, 1)
        return len(f"{steps}#{total}") + 1

    lengths = [tokens(problem.question) for problem in world.problems("train")]
    cut = sum(length > base.report_max_tokens for length in lengths) / len(lengths)
    assert 0.05 < cut < 0.35
    assert all(tokens(problem.question) <= 96 for problem in world.problems("downstream"))


def test_mistaken_worlds_are_refused(world: ArithmeticWorld) -> None:
    for change, message in (
        ({"addends_min": 1}, "addends_min must be at least 2, got 1"),
        ({"addends_max": 2}, "addends_max must be at least addends_min"),
        ({"number_min": -3}, "number_min must be at least 0, got -3"),
        ({"downstream_number_max": 4}, "downstream_number_max must be at least downstream_number_min"),
        ({"heldout_size": 0}, "heldout_size must be between 1 and 1000000, got 0"),
        ({"probe_size": 5000}, "probe_size must be at most train_size"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(world, **change)
    with pytest.raises(ValueError, match="split must be one of"):
        world.load("test")


@pytest.mark.extended
def test_a_split_that_asks_for_more_questions_than_exist_is_refused() -> None:
    tiny = from_yaml(ArithmeticWorld, "task/tiny")
    with pytest.raises(ValueError, match="heldout_size must be at most about 118, got 119"):
        replace(tiny, heldout_size=119).load("heldout")
    one_question = replace(tiny, number_min=2, number_max=2, addends_max=2, downstream_number_min=9)
    with pytest.raises(ValueError, match="belongs to heldout: widen one of the ranges"):
        one_question.load("heldout")


# Templates and tokenizer


def test_templates_keep_the_question_and_need_a_place_for_it() -> None:
    assert from_yaml(Plain, "template/plain").render("7+15?", build_tokenizer(64)) == "7+15?"
    mismatched = from_yaml(Plain, "template/mismatched").render("7+15?", build_tokenizer(64))
    assert mismatched != "7+15?" and "7+15" in mismatched and set(mismatched) <= set(SYMBOLS)
    for pattern in ("no place", "{question}{question}"):
        with pytest.raises(ValueError, match=r"a text with \{question\} in it once"):
            Plain("#", "{question}{tokens}?", pattern)
    for question in ("{question}", "{tokens}{tokens}{question}"):
        with pytest.raises(ValueError, match=r"a text with \{tokens\} in it once"):
            Plain("#", question, "{question}")


@given(st.text(alphabet=SYMBOLS, max_size=80))
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = build_tokenizer(128)
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text


def test_the_tokenizer_survives_its_folder(tmp_path: Path) -> None:
    build_tokenizer(128).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "7+15+8?7+15=22;22+8=30;~#30"
    assert loaded.get_vocab() == build_tokenizer(128).get_vocab()
    assert loaded.encode(text) == build_tokenizer(128).encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.decode([*loaded.encode(text), loaded.eos_token_id], skip_special_tokens=True) == text
    assert loaded.eos_token_id is not None and loaded.pad_token_id not in (None, loaded.eos_token_id)


def test_a_character_outside_the_grammar_is_an_error_not_a_blank() -> None:
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer(128).encode("7+x")


# Warm-start text


def examples(recipe: ArithmeticBase, count: int = 400) -> list[warm_start.Example]:
    rng = Random(5)
    return [draw_example(recipe, rng, careful_only=False) for _ in range(count)]


STEP = r"(\d+)\+(\d+)=(\d+);"


def test_answers_without_slips_are_right_and_every_prefix_of_them_is_wrong(base: ArithmeticBase) -> None:
    careful = replace(base, guess_share=0.0, careful_share=1.0, slip_rate=0.0)
    for example in examples(careful, 100):
        assert re.fullmatch(f"(?:{STEP})+#\\d+", example.response)
        for left, right, total in re.findall(STEP, example.response):
            assert int(left) + int(right) == int(total)
        assert strict(asked(example.answer), example.response, True) == 1.0
        for cut in range(len(example.response)):
            assert strict(asked(example.answer), example.response[:cut], False) == 0.0
        assert answer_mode(example.response) == "careful"


def test_every_step_slips_when_the_rate_is_one(base: ArithmeticBase) -> None:
    for example in examples(replace(base, guess_share=0.0, careful_share=1.0, slip_rate=1.0), 100):
        for left, right, total in re.findall(STEP, example.response):
            assert 0 < abs(int(left) + int(right) - int(total)) <= base.slip_spread


@pytest.mark.extended
def test_the_three_modes_have_their_shares_and_only_rambling_is_ever_cut(base: ArithmeticBase) -> None:
    drawn = examples(base, 3000)
    shares = {
        mode: sum(answer_mode(example.response) == mode for example in drawn) / len(drawn)
        for mode in ("guess", "careful", "ramble")
    }
    assert shares["guess"] == pytest.approx(base.guess_share, abs=0.03)
    assert shares["careful"] == pytest.approx(base.careful_share, abs=0.03)
    cut = [example for example in drawn if not example.finished]
    assert 0 < len(cut) < 0.1 * len(drawn)
    assert {answer_mode(example.response) for example in cut} == {"ramble"}
    assert max(len(example.response) for example in drawn) == base.ramble_max_tokens


def test_guesses_stay_near_and_rambling_repeats_the_same_steps(base: ArithmeticBase) -> None:
    for example in examples(base):
        if answer_mode(example.response) == "guess":
            assert abs(int(example.response[1:]) - int(example.answer)) <= base.guess_spread
        if answer_mode(example.response) == "ramble" and example.finished:
            rounds = example.response[: example.response.index("#")].split("~")
            assert len(rounds) >= 2 and len(set(rounds)) == 1


@pytest.mark.extended
def test_warm_start_reads_no_held_out_and_no_downstream_problem(world: ArithmeticWorld, base: ArithmeticBase) -> None:
    read = {tuple(sorted(addends_of(example.question))) for example in examples(base, 2000)}
    for split in ("heldout", "downstream"):
        kept = {tuple(sorted(addends_of(problem.question))) for problem in world.problems(split)}
        assert not read & kept


def test_labels_cover_the_response_and_its_end_only(base: ArithmeticBase) -> None:
    tokenizer = build_tokenizer(base.max_positions)
    assert tokenizer.model_max_length == base.max_positions
    drawn = examples(base, 60)
    assert {example.finished for example in drawn} == {True, False}
    tokens, labels = encode_slice(tokenizer, drawn)
    for row, wanted, example in zip(tokens.tolist(), labels.tolist(), drawn, strict=True):
        taught = [label for label in wanted if label >= 0]
        end = [tokenizer.eos_token_id] if example.finished else []
        assert taught == tokenizer.encode(example.response) + end
        first = len(example.question) - 1
        assert wanted[:first] == [-100] * first
        # The label of a position is the next token of the row.
        assert all(label == -100 or label == row[at + 1] for at, label in enumerate(wanted))


# Verifiers

texts = st.text(alphabet="0123#;=~x", max_size=12)
answers = st.integers(0, 99).map(str)


@settings(max_examples=1000, deadline=None)
@given(answers, texts, st.booleans(), st.sampled_from(["", "#", "#{}", "#{};", "#0{}", "#{}\n", "#{}1"]))
def test_the_two_verifiers_agree_on_every_text(answer: str, text: str, finished: bool, ending: str) -> None:
    whole = text + ending.format(answer)
    assert strict(asked(answer), whole, finished) == exact(asked(answer), whole, finished)


@given(answers, texts)
def test_verdicts_that_no_text_before_the_final_clause_can_change(answer: str, text: str) -> None:
    for verifier in (strict, exact):
        assert verifier(asked(answer), f"{text}#{answer}", True) == 1.0
        assert verifier(asked(answer), f"{text}#{answer}", False) == 0.0
        assert verifier(asked(answer), f"{text}#{int(answer) + 1}", True) == 0.0
        assert verifier(asked(answer), f"{text}#{answer};", True) == 0.0
        assert verifier(asked(answer), f"{text}#0{answer}", True) == 0.0
    assert lenient(asked(answer), f"{text};{answer}", False) == 1.0


@given(answers, texts, st.booleans())
def test_whatever_strict_accepts_lenient_accepts(answer: str, text: str, finished: bool) -> None:
    for whole in (text, f"{text}#{answer}"):
        assert lenient(asked(answer), whole, finished) >= strict(asked(answer), whole, finished)


def test_lenient_can_be_gamed_but_not_by_part_of_a_number() -> None:
    assert lenient(asked("33"), "31;32;33;34;", False) == 1.0
    assert strict(asked("33"), "31;32;33;34;", True) == 0.0
    assert lenient(asked("33"), "133;330", True) == 0.0


def test_other_digits_are_no_digits() -> None:
    arabic = "#\N{ARABIC-INDIC DIGIT THREE}"
    assert strict(asked("\N{ARABIC-INDIC DIGIT THREE}"), arabic, True) == 0.0
    assert exact(asked("\N{ARABIC-INDIC DIGIT THREE}"), arabic, True) == 0.0


def test_reward_values_are_exact_and_leave_the_outcome_alone() -> None:
    plus_minus = from_yaml(Strict, "reward/strict_plus_minus")
    responses = ([asked("33")] * 2, ["#33", "#34"], [True] * 2, [])
    graded = plus_minus.grades(*responses)
    assert graded.correctness == [1.0, 0.0] and graded.components == {"outcome": [1.0, -1.0]}
    assert plus_minus.bounds(True) == (1.0, 1.0) and plus_minus.bounds(False) == (-1.0, -1.0)
    assert plus_minus(asked("33"), "#33", True) == 1.0 and plus_minus(asked("33"), "#34", True) == 0.0
    for name, kind in (("strict", Strict), ("lenient", Lenient)):
        assert from_yaml(kind, f"reward/{name}").grades(*responses).components == {"outcome": [1.0, 0.0]}
    with pytest.raises(ValueError, match=r"correct must be larger than wrong \(1.0\), got 1.0"):
        Strict(correct=1.0, wrong=1.0)


# Base models


def test_mistaken_recipes_are_refused(base: ArithmeticBase) -> None:
    for change, message in (
        ({"guess_share": 0.7}, r"guess_share \+ careful_share must be at most 1"),
        ({"slip_rate": 1.5}, "slip_rate must be between 0 and 1, got 1.5"),
        ({"check_again": 1.0}, r"check_again must be in \[0, 1\), got 1.0"),
        ({"slices": 5}, r"slices must be a divisor of batch_size \(32\), got 5"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"hard_addends_min": 1}, "hard_addends_min must be at least 2, got 1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(base, **change)


def test_the_two_bases_keep_their_size_limits() -> None:
    for name, limit in (("arithmetic_base", 400_000), ("tiny_base", 60_000)):
        recipe = from_yaml(ArithmeticBase, f"model/{name}")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                warm_start.architecture(recipe, build_tokenizer(recipe.max_positions))
            )
        assert 10_000 < sum(parameter.numel() for parameter in model.parameters()) < limit


def test_learning_rate_rises_then_falls_to_nothing(base: ArithmeticBase) -> None:
    rates = [warm_start.learning_rate_at(base, step) for step in range(base.steps)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[-1] < 1e-4 * base.learning_rate < rates[0]
    assert 0.9 * base.learning_rate < max(rates) <= base.learning_rate
    slow = replace(base, steps=1000, warmup=0.1)
    warm = [warm_start.learning_rate_at(slow, step) / base.learning_rate for step in (0, 49, 99)]
    assert warm[:2] == pytest.approx([0.01, 0.5]) and warm[2] == pytest.approx(0.5 + 0.5 * math.cos(0.099 * math.pi))


def test_slicing_a_batch_does_not_change_the_step(hurried: ArithmeticBase) -> None:
    tokenizer = build_tokenizer(hurried.max_positions)
    batch = examples(hurried, hurried.batch_size)
    gradients = []
    for slices in (1, 4):
        recipe = replace(hurried, slices=slices)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(warm_start.architecture(recipe, tokenizer)).double()
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        # One step of plain descent shows the (clipped) gradient itself.
        warm_start._step(recipe, model, torch.optim.SGD(model.parameters(), lr=1.0), tokenizer, batch)
        gradients.append(before - torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    # The loss is taken in float32, hence the size of the gap.
    assert gradients[0].norm() > 0.1
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6


def test_a_recipe_builds_to_the_same_bits_and_only_once(
    hurried: ArithmeticBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hurried.resolve()
    weights = (folder / "model.safetensors").read_bytes()
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    assert hurried.resolve() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed

    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "other"))
    torch.rand(7)  # the process's own random state has no part in it
    again = hurried.resolve()
    assert again != folder and (again / "model.safetensors").read_bytes() == weights
    other_base = replace(hurried, base=hurried.base + 1).resolve()
    assert (other_base / "model.safetensors").read_bytes() != weights


@pytest.mark.extended
def test_a_shipped_base_is_found_by_its_recipe(
    hurried: ArithmeticBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bases"
    folder.mkdir()
    monkeypatch.setattr(shipped, "FOLDER", folder)
    monkeypatch.setattr(shipped, "INDEX", folder / "index.json")
    monkeypatch.setattr(rebuild, "PROBLEMS", 4)
    rebuild.write_index([])
    base = rebuild.ship("tiny", hurried)
    assert base.file == f"tiny-{hurried.base}.safetensors" and base.weights.parent == folder
    assert shipped.find_shipped(hurried.key()) == base and shipped.shipped() == [base]
    warm_start.build(hurried, tmp_path / "built")
    ours, built = (load_file(place / "model.safetensors") for place in (hurried.resolve(), tmp_path / "built"))
    assert all(torch.equal(ours[name], built[name].half().float()) for name in built), "rounded to half precision"


def test_a_base_answers_as_its_report_says(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = from_yaml(ArithmeticBase, "model/tiny_base")
    came = shipped.find_shipped(recipe.key())
    assert came is not None and 0.2 < came.report["accuracy"] < 0.8
    monkeypatch.setattr(rebuild, "PROBLEMS", 256)
    four_errors = 4 * math.sqrt(0.25 / 256)
    assert rebuild.accuracy_of(recipe, tiny_base) == pytest.approx(came.report["accuracy"], abs=four_errors)


@pytest.mark.extended
def test_building_leaves_random_state_and_threads_alone(hurried: ArithmeticBase) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    replace(hurried, threads=threads + 1).resolve()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gpu_base_is_the_same_recipe_under_a_name_of_its_own(hurried: ArithmeticBase) -> None:
    there = GpuBase(**asdict(hurried), device="cpu")
    assert (there.place, hurried.place) == ("cpu", "cpu") and there.key() != hurried.key()
    assert there.key() != replace(there, device="cuda").key(), "each kind of device has bits of its own"
    ours, theirs = ((recipe.resolve() / "model.safetensors").read_bytes() for recipe in (hurried, there))
    assert ours == theirs
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:<number>, got tpu"):
        replace(there, device="tpu")
    assert from_yaml(GpuBase, "model/arithmetic_large").place == "cuda"


def test_the_folder_holds_a_model_its_recipe_and_its_report(hurried: ArithmeticBase) -> None:
    folder = hurried.resolve()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe == hurried.written() and hurried.from_written(recipe) == hurried
    report = json.loads((folder / "report.json").read_text())
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    modes = report["guess_share"] + report["careful_share"] + report["ramble_share"]
    assert modes == pytest.approx(1.0)
    assert hf_model(folder).resolve() == folder
    assert [path.name for path in folder.parent.iterdir() if "partial" in path.name] == []


def test_the_cache_stands_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LAB_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_root() == Path("/one")
    monkeypatch.delenv("GRPO_LAB_CACHE")
    assert cache_root() == Path("/two/grpo_lab")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "grpo_lab"


def test_what_a_killed_build_left_is_not_taken_for_a_model(
    hurried: ArithmeticBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(recipe: ArithmeticBase, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(warm_start, "build", killed)
        with pytest.raises(KeyboardInterrupt):
            hurried.resolve()
    assert (hurried.resolve() / "model.safetensors").exists()


def _resolve_and_count(recipe: ArithmeticBase, builds: str, start: multiprocessing.synchronize.Event) -> None:
    build = warm_start.build

    def counted(recipe: ArithmeticBase, folder: Path) -> None:
        with open(builds, "a") as file:
            file.write("built\n")
        build(recipe, folder)

    warm_start.build = counted
    start.wait()
    recipe.resolve()


@pytest.mark.extended
def test_two_processes_build_once(hurried: ArithmeticBase, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, builds = context.Event(), tmp_path / "builds"
    processes = [context.Process(target=_resolve_and_count, args=(hurried, str(builds), start)) for _ in range(2)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert builds.read_text() == "built\n"


@pytest.mark.extended
def test_the_tiny_base_starts_where_rl_has_room_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    folder = replace(from_yaml(ArithmeticBase, "model/tiny_base"), report_problems=512).resolve()
    report = json.loads((folder / "report.json").read_text())
    assert 0.25 < report["accuracy"] < 0.5
    assert 0.05 < report["truncated_share"] < 0.45
    for mode in ("guess", "careful", "ramble"):
        assert report[f"{mode}_share"] > 0.15


# A user's own folder


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))


def _without_end_of_text(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("config.json"), "path must be a folder with a config.json"),
        (_another_architecture, r"path must be a causal language model.*BertForMaskedLM"),
        (_without("tokenizer.json"), "path must be a model with a tokenizer"),
        (_without_end_of_text, "path must be a model whose tokenizer has an end-of-text token"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused_before_its_weights_are_read(
    damage: Callable[[Path], None], message: str, tmp_path: Path, base: ArithmeticBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(models, "read_model")  # the one place that reads weights
    tokenizer = build_tokenizer(64)
    config = warm_start.architecture(base, tokenizer)
    config.architectures = ["LlamaForCausalLM"]
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert hf_model(tmp_path).resolve() == tmp_path
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf_model(tmp_path).resolve()


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path must be an existing folder"):
        hf_model(tmp_path / "nowhere").resolve()
