"""The microscope: its gradient is the loop's, a file says the same as the run, and the exact gradient is exact."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import shapes_unchecked, tiny_model
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.analysis.build import build_report
from grpo_lab.analysis.report.reader import read_rollouts
from grpo_lab.cli import main
from grpo_lab.instruments.microscope.command import LookRequest, look
from grpo_lab.instruments.microscope.exact import (
    Enumerated,
    all_responses,
    biases,
    enumerate_responses,
    exact_gradient,
    longest_possible,
)
from grpo_lab.instruments.microscope.exchange import COLUMNS, StoredStep, read_file, to_step, with_logprobs
from grpo_lab.instruments.microscope.measure import Extras, Policy, measure, token_gradient, weight_gradients
from grpo_lab.instruments.microscope.option_sets import option_set, words_of
from grpo_lab.tasks.base import Grader
from grpo_lab.tasks.verifiers import Lenient, Strict
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.types import Microbatching, Problem, Rollouts

TRL = Path(__file__).parents[1] / "golden/trl/rollouts.jsonl"
RUN = (
    *SMALL, "budget.amount=3", "problems_per_step=4", "group_size=8", "rollouts_every=1", "checkpoint_every=1",
    "keep_checkpoints=9", "updates=two_passes",
)  # fmt: skip
TRICKS = (
    "recipe=dapo",
    "updates=one",
    "group_filter=keep",
    "entropy=bonus",
    "kl=k1_reward",
    "baseline=optimal_token",
    "scale=none",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in_process(tmp_path_factory.mktemp("plain"), *RUN)


def asked(source: Path, to: Path, *sets: str, **changed: object) -> dict:
    """The JSON of one look."""
    request = LookRequest(source, None, sets, None, 1.0, None, 64, 1, None, to)
    seen = look(replace(request, **changed), lambda _: None)
    return json.loads(next(path for path in seen.files if path.suffix == ".json").read_text())


def norms(found: dict) -> dict[str, float]:
    return {one["name"]: one["gradient_norm"] for one in found["sets"]}


@pytest.mark.few(2)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("tricks", [("updates=one",), TRICKS], ids=["plain", "tricks"])
def test_the_gradient_is_that_of_the_loop(tmp_path: Path, tricks: Sequence[str], step: int) -> None:
    """Of one update on the whole batch, whose gradient norm the loop logs before clipping."""
    run = run_in_process(tmp_path, *RUN, *tricks)
    (logged,) = [line for line in metrics_of(run) if line["step"] == step]
    found = asked(run, tmp_path / "seen", step=step)
    assert norms(found)["run"] == pytest.approx(logged["metrics"]["train/gradient_norm"], rel=2e-4)
    own = next(one for one in found["sets"] if one["name"] == "run")
    assert own["loss"] == pytest.approx(logged["metrics"]["train/loss"], abs=1e-5)


LORA, BF16 = ("model=hf", "model.lora.rank=4"), ("learner_precision=bf16", "sampler_precision=bf16")


@pytest.mark.extended
@pytest.mark.parametrize(("settings", "tolerance"), [(LORA, 2e-4), (BF16, 2e-2), (LORA + BF16, 2e-2)])
def test_the_gradient_of_adapters_and_in_half_precision(
    tmp_path: Path, tiny_base: Path, settings: Sequence[str], tolerance: float
) -> None:
    """Of adapters only, which differ from their start after a step."""
    path = [f"model.path={tiny_base}"] if settings[0] == "model=hf" else []
    run = run_in_process(tmp_path, *RUN, "updates=one", *settings, *path)
    (logged,) = [line for line in metrics_of(run) if line["step"] == 2]
    found = asked(run, tmp_path / "seen", step=2)
    assert norms(found)["run"] == pytest.approx(logged["metrics"]["train/gradient_norm"], rel=tolerance)


def test_a_file_says_what_its_run_says(plain: Path, tmp_path: Path) -> None:
    """As JSON and as parquet, with the model's folder: the same norms, weights and cosines."""
    sets = ("surrogate=cispo,aggregation=token_mean", "recipe=dr_grpo")
    base = json.loads((plain / "base.json").read_text())
    assert base["fingerprint"]
    for suffix in ("jsonl", "parquet"):
        file = tmp_path / f"rollouts.{suffix}"
        there = asked(plain, tmp_path / "run", *sets, step=3, write=file)
        weights = str(plain / "checkpoints/step=000002")
        here = asked(file, tmp_path / "file", *sets, weights=weights)
        for name, norm in norms(here).items():
            assert norm == pytest.approx(norms(there)[name], rel=1e-5), name
        theirs = {one["name"]: one["token_weights"] for one in there["sets"]}
        for one in here["sets"]:
            for mine, other in zip(one["token_weights"], theirs[one["name"]], strict=True):
                assert mine == pytest.approx(other, rel=1e-4, abs=1e-7)
        alone = asked(file, tmp_path / "alone", *sets)
        assert alone["gradient"].startswith("in the log-probs") and any("--weights" in note for note in alone["notes"])
        assert next(iter(alone["sets"]))["token_weights"] == next(iter(here["sets"]))["token_weights"]


def test_what_a_run_stores_is_the_format(plain: Path, tmp_path: Path) -> None:
    """Every column of a written file is described, and its ratio is that of its two policies."""
    file = tmp_path / "seen.parquet"
    asked(plain, tmp_path, step=2, weights="3", write=file)
    table, own = read_file(file), read_rollouts(plain, 2)
    assert {"prompt_ids", "token_ids", "token_old_logprob"} <= set(own)
    assert set(COLUMNS) - {"token_ref_logprob"} <= set(table)
    for row in table.to_dict("records"):
        ratio = np.exp(row["token_current_logprob"] - row["token_old_logprob"])
        assert np.allclose(ratio, row["token_ratio"], rtol=1e-5) and len(row["token_ids"]) == len(row["tokens"])
    moved = np.concatenate(table["token_ratio"].tolist())
    assert np.abs(moved - 1).max() > 0.02, "one step later the policy has moved"


@pytest.mark.extended
def test_the_report_of_a_sweep_shows_what_was_looked_at(plain: Path, tmp_path: Path) -> None:
    runs = plain.parents[1]
    entry = RunEntry("plain", "", 0, plain.relative_to(runs).as_posix())
    record_sweep(runs, "probe", [entry], None, None, "", [], None, None)
    before = build_report("probe", str(runs), None, tmp_path, ["test"])[0].read_text()
    look(LookRequest(plain, 3, ("scale=none",), None, 1.0, None, 64, 1, None, None), lambda _: None)
    after = build_report("probe", str(runs), None, tmp_path, ["test"])[0].read_text()
    assert "Microscope" not in before and "Microscope" in after
    assert "plain, seed 0" in after and "scale=none" in after and "gradient in the weights" in after


def test_the_page_documents_every_column() -> None:
    page = (Path(__file__).parents[2] / "analysis/microscope.md").read_text()
    for name, (dtype, default, meaning) in COLUMNS.items():
        assert f"| `{name}` | {dtype} | {default or 'needed'} | {meaning} |" in page


def test_the_gradient_of_the_weights_is_that_of_the_log_probs_times_their_slopes() -> None:
    """Against finite differences of the weighted log-probs and entropies in float64, in single weights."""
    policy, rollouts = small_policy(), small_rollouts()
    generator = torch.Generator().manual_seed(0)
    pair = tuple(
        torch.where(rollouts.sampled_mask, torch.randn(rollouts.tokens.shape, generator=generator).double(), 0.0)
        for _ in range(2)
    )
    (found,) = weight_gradients(policy, rollouts, [pair])

    def value() -> float:
        logprobs, entropy = policy.logprobs(rollouts)
        assert entropy is not None
        return float((pair[0] * logprobs + pair[1] * entropy).sum())

    check_slopes(policy, found.double(), value)


def small_policy() -> Policy:
    return Policy(tiny_model(vocabulary=5), "random", 1.0, Fp32(LmHead.same, 1e-3), Microbatching(10**6, 10**6),
                  torch.device("cpu"))  # fmt: skip


def small_rollouts() -> Rollouts:
    step = to_step(pd.DataFrame({
        "problem_id": [0, 0, 1, 1], "prompt_ids": [[1, 2]] * 2 + [[3]] * 2,
        "token_ids": [[1, 0], [2, 3, 0], [4], [1, 1, 1]],
        "token_logprob": [[-1.0] * 2, [-1.0] * 3, [-1.0], [-1.0] * 3], "reward": [1.0, 0, 0, 1],
    }), "here")  # fmt: skip
    return replace(step.rollouts, sampler_logprobs=step.rollouts.sampler_logprobs.double())


def check_slopes(policy: Policy, gradient: torch.Tensor, value: object, tolerance: float = 1e-5) -> None:
    """Twelve entries of a gradient against central differences of `value()`."""
    weights, start = [one for one in policy.model.parameters() if one.requires_grad], 0
    places = torch.randint(len(gradient), (12,), generator=torch.Generator().manual_seed(3)).tolist()
    for one in weights:
        for place in [place - start for place in places if start <= place < start + one.numel()]:
            flat, size = one.data.view(-1), 1e-4
            kept = float(flat[place])
            flat[place] = kept + size
            above = value()  # pyright: ignore
            flat[place] = kept - size
            below = value()  # pyright: ignore
            flat[place] = kept
            assert float(gradient[start + place]) == pytest.approx((above - below) / (2 * size), abs=tolerance)
        start += one.numel()


# --- the exact gradient -------------------------------------------------------------------------------------

STOPS = frozenset({0})


def texts_of(rollouts: Rollouts) -> list[str]:
    ends = (rollouts.lengths - rollouts.finished.long()).tolist()
    return ["".join("e#213"[token] for token in row[:end]) for row, end in zip(rollouts.tokens.tolist(), ends)]


def enumerated(policy: Policy, limit: int, reward: Grader) -> Enumerated:
    problems = [Problem(7, "a", "2", 1), Problem(9, "b", "2", 1)]
    return enumerate_responses(policy, problems, [(1, 2), (3,)], STOPS, limit, reward, texts_of, 0)


def strict() -> Grader:
    """Right: # and 2, after any token or none."""
    return Strict(1.0, 0.0)


def test_every_response_is_there_once_and_its_probability_is_the_models() -> None:
    responses, finished = all_responses(3, STOPS, 2)
    assert len(responses) == len(set(responses)) == 1 + 2 + 4 and sum(finished) == 3
    policy = small_policy()
    every = enumerated(policy, 3, strict())
    assert torch.allclose(every.logprobs.exp().sum(dim=1), torch.ones(2).double(), atol=1e-6)
    logprobs, _ = policy.logprobs(every.rollouts, False)
    assert torch.allclose(every.token_logprobs, logprobs.float(), atol=1e-5)
    assert longest_possible(18) == 4 and longest_possible(10**6) == 0


def test_the_exact_gradient_is_the_slope_of_the_expected_reward() -> None:
    policy = small_policy()
    gradient = exact_gradient(policy, enumerated(policy, 3, strict()))

    def value() -> float:
        every = enumerated(policy, 3, strict())
        # The table is in single precision: the log-probs of what is rewarded again, in double.
        logprobs, _ = policy.logprobs(every.rollouts, False)
        return float((logprobs.sum(dim=1).exp() * every.graded.reward.flatten()).sum() / 2)

    check_slopes(policy, gradient, value, 2e-5)


@pytest.mark.parametrize(
    "names", [("reinforce", "group_std"), pytest.param(("leave_one_out", "plain"), marks=pytest.mark.extended)]
)
def test_reinforce_has_no_bias_and_division_by_length_and_deviation_has(names: tuple[str, str]) -> None:
    """In expectation over all pairs of responses to one prompt, and within the errors of sampled steps."""
    policy = small_policy()
    every = enumerate_responses(policy, [Problem(7, "a", "2", 1)], [(1, 2)], STOPS, 2, Lenient(1.0, 0.0), texts_of, 0)
    texts = {
        "reinforce": "recipe=reinforce", "leave_one_out": "baseline=leave_one_out,scale=none,aggregation=sequence_sum",
        "plain": "scale=none", "group_std": "convention=trl,aggregation=sequence_sum",
    }  # fmt: skip
    sets = {name: option_set(texts[name], 2, 1, 0).step for name in names}
    exact, number = exact_gradient(policy, every), every.rollouts.group_size
    probability = every.logprobs.exp()[0]
    sums = {name: torch.zeros(number, 2, dtype=torch.float64) for name in sets}
    with shapes_unchecked():
        for pair in itertools.combinations_with_replacement(range(number), 2):
            step = chosen_rows(every, pair)
            often = probability[pair[0]] * probability[pair[1]] * (1 if pair[0] == pair[1] else 2)
            for name, run in sets.items():
                for row, weights in zip(pair, -token_gradient(run, step, Extras()).logprob):
                    sums[name][row] += often * weights
        pairs = [(weights.float(), torch.zeros_like(weights).float()) for weights in sums.values()]
        means = dict(zip(sets, weight_gradients(policy, every.rollouts, pairs).double()))
        found = biases(sets, policy, every, exact, 2, 96, 0)
    size = exact.norm()
    scales = {name: float(mean @ exact / size**2) for name, mean in means.items()}
    aside = {name: float((mean - scales[name] * exact).norm() / size / scales[name]) for name, mean in means.items()}
    for name in {"reinforce", "leave_one_out"} & set(names):
        assert scales[name] == pytest.approx(1, abs=1e-4) and aside[name] < 1e-4, name
    if "group_std" in names:  # of one right and one wrong response the advantages are +-.5 over 1 / sqrt(2)
        assert scales["group_std"] == pytest.approx(0.5**0.5, rel=1e-3) and aside["group_std"] < 1e-3
    if "plain" in names:
        assert aside["plain"] > 0.02, "a token of a long response weighs less"
    for name, one in found.items():
        assert abs(one.scale.value - scales[name]) < 4 * one.scale.error, name
        assert abs(one.squared_bias.value - aside[name] ** 2) < 4 * one.squared_bias.error, name


def chosen_rows(every: Enumerated, rows: Sequence[int]) -> StoredStep:
    """A step of one group of these responses."""
    table = pd.DataFrame([
        {"problem_id": 7, "prompt_ids": [1, 2], "token_ids": every.rollouts.tokens[row, :length].tolist(),
         "token_logprob": every.token_logprobs[row, :length].tolist(), "reward": float(every.graded.reward[0, row])}
        for row in rows for length in [int(every.rollouts.lengths[row])]
    ])  # fmt: skip
    step = to_step(table, "here")
    return with_logprobs(step, old=step.rollouts.sampler_logprobs, current=step.rollouts.sampler_logprobs)


# --- real rollouts of another framework ---------------------------------------------------------------------


def test_trls_own_gradient_is_found_from_its_rollouts() -> None:
    """A real off-policy batch of TRL 1.16.0: its advantages and the gradient of its loss in each token's log-prob."""
    table = read_file(TRL)
    step = to_step(table, TRL)
    size, problems = step.rollouts.group_size, len(step.rollouts.problems)
    run = option_set("convention=trl", size, problems, 0).step
    found = token_gradient(run, step, Extras())
    order = table.iloc[np.argsort(pd.factorize(table["problem_id"])[0], kind="stable")]
    lengths = [len(ids) for ids in order["token_ids"]]
    for row, (end, theirs, advantage) in enumerate(zip(lengths, order["trl_gradient"], order["trl_advantage"])):
        assert found.logprob[row, :end].tolist() == pytest.approx(theirs, rel=1e-3, abs=1e-7)
        assert found.advantages[row, 0] == pytest.approx(advantage, rel=1e-4, abs=1e-5)
    assert found.clipped.any() and not found.clipped.all(), "the batch is off-policy enough for the clip"
    (clipped, other) = measure(
        {"plain": run, "open": option_set("convention=trl,surrogate=cispo", size, problems, 0).step},
        step,
        Extras(),
        None,
    )
    assert clipped.shares["affected"] == 0 < other.shares["affected"] and other.shares["added"] > 0
    assert other.cosines["plain"] < 1


# --- words --------------------------------------------------------------------------------------------------


def test_options_are_divided_at_commas_outside_brackets() -> None:
    assert words_of("surrogate=cispo,aggregation=token_mean") == ["surrogate=cispo", "aggregation=token_mean"]
    assert words_of("a=[1,2],b='x,y'") == ["a=[1,2]", "b='x,y'"] and words_of("") == []


def test_what_does_not_fit_is_refused_with_a_remedy(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cases = {
        "group_filter does not act between": {"sets": ("group_filter=dapo",)},
        "baseline=Gae reads a critic's values": {"sets": ("baseline=gae,scale=none",)},
        "it has those after": {"step": 2, "weights": "9"},
        "choose 1 to 4 tokens": {"exact": 9},
        "has an entropy term": {"exact": 2, "sets": ("entropy=bonus",)},
        "saved no responses of step 9": {"step": 9},
        "end the name in .parquet or .jsonl": {"write": tmp_path / "a.csv"},
    }
    for message, changed in cases.items():
        with pytest.raises(ValueError, match=message):
            asked(plain, tmp_path, **changed)
    for folder in (plain / "checkpoints").iterdir():
        if folder.name != "step=000003":
            shutil.rmtree(folder)
    with pytest.raises(ValueError, match="keeps no weights after step 2"):
        asked(plain, tmp_path, step=3)
    with pytest.raises(SystemExit):
        main(["microscope", str(tmp_path / "none.jsonl")])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, "has no column reward"),
        ({"problem_id": [1, 1, 1, 2]}, "groups of 1 to 3 responses"),
        ({"token_logprob": [[0.0]] * 4}, "one value per token"),
        ({"token_logprob": [[float("nan"), 0.0]] * 4}, "not finite"),
        ({"token_ids": [[1, 2], [], [1, 2], [1, 2]]}, "no token"),
        ({"step": [1, 1, 2, 2]}, "rows of 2 steps"),
        ({"reward": [0.0, 1.0, float("inf"), 0.0]}, "no finite number"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(change: dict, message: str) -> None:
    table = {
        "problem_id": [1, 1, 2, 2],
        "token_ids": [[1, 2]] * 4,
        "token_logprob": [[-1.0, -1.0]] * 4,
        "reward": [0.0, 1, 0, 1],
    }
    rows = pd.DataFrame({name: values for name, values in (table | change).items() if values is not None})
    with pytest.raises(ValueError, match=message):
        to_step(rows, "table")


def test_rows_of_a_group_may_be_apart() -> None:
    table = pd.DataFrame({"problem_id": ["b", "a", "b", "a"], "token_ids": [[1], [2], [3], [4]],
                              "token_logprob": [[-1.0]] * 4, "reward": [1.0, 0, 0, 1]})  # fmt: skip
    step = to_step(table, "table")
    assert step.rollouts.tokens.flatten().tolist() == [1, 3, 2, 4] and step.graded.reward.tolist() == [[1, 0], [0, 1]]
    step = with_logprobs(step, old=step.rollouts.sampler_logprobs, current=step.rollouts.sampler_logprobs)
    weights = -token_gradient(option_set("scale=none", 2, 2, 0).step, step, Extras()).logprob
    assert weights.flatten().tolist() == pytest.approx([0.125, -0.125, -0.125, 0.125])
