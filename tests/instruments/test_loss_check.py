"""The loss check names every planted fault, and passes the loss without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import F64, make_rollouts, make_run
from torch import Tensor

from grpo_lab.instruments.loss_check import files
from grpo_lab.instruments.loss_check.ask import load
from grpo_lab.instruments.loss_check.command import check_function, report_on
from grpo_lab.instruments.loss_check.files import judge_file, write_files
from grpo_lab.instruments.loss_check.inputs import SPLITS, cut
from grpo_lab.instruments.loss_check.match import shipped
from grpo_lab.instruments.loss_check.published import TABLES, make_tables, options_of, written
from grpo_lab.instruments.loss_check.report import PULLING, Report
from grpo_lab.learner.loss import policy_loss
from grpo_lab.policy.batching import totals_of
from grpo_lab.types import Batch

ROOT = Path(__file__).parents[2]

LOW, HIGH, KL = 0.2, 0.28, 0.05


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-20, 20).exp()


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float = LOW, high: float = HIGH) -> Tensor:
    """[N, T]: the surrogate without a fault."""
    ratio, a = ratio_of(logprobs, old_logprobs), advantages[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def over_tokens(token_loss: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    return torch.where(mask, token_loss, 0.0).sum() / max(num_tokens, 1)


def over_rows(token_loss: Tensor, mask: Tensor, num_rows: int) -> Tensor:
    return (torch.where(mask, token_loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum() / num_rows


def token_mean(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, old_logprobs, advantages), mask, num_tokens)


def sequence_mean(logprobs, old_logprobs, advantages, mask, num_rows):
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, num_rows)


def gspo(logprobs, old_logprobs, advantages, mask, num_rows):
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    ratio = log_ratio.clamp(-20, 20).exp()[:, None].expand_as(logprobs)
    a = advantages[:, None]
    return over_rows(-torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a), mask, num_rows)


def reinforce_icepop(logprobs, old_logprobs, sampler_logprobs, advantages, mask, num_tokens):
    weight = (old_logprobs - sampler_logprobs).exp()
    weight = torch.where((weight >= 0.5) & (weight <= 5), weight, 0.0)
    return over_tokens(-weight * advantages[:, None] * logprobs, mask, num_tokens)


def of_sampler(logprobs, sampler_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, sampler_logprobs, advantages), mask, num_tokens)


def with_kl(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    above = ref_logprobs - logprobs
    return over_tokens(ppo(logprobs, old_logprobs, advantages) + KL * (above.exp() - above - 1), mask, num_tokens)


SOUND = {
    token_mean: "surrogate=ppo_higher importance=token old_policy=recomputed correction=none aggregation=token_mean",
    sequence_mean: "surrogate=ppo_higher importance=token old_policy=recomputed correction=none "
    "aggregation=sequence_mean",
    gspo: "surrogate=ppo_gspo importance=sequence old_policy=recomputed correction=none aggregation=sequence_mean",
    reinforce_icepop: "surrogate=reinforce correction=icepop aggregation=token_mean denominator=survivors",
    of_sampler: "surrogate=ppo_higher importance=token old_policy=sampler correction=none aggregation=token_mean",
    with_kl: "surrogate=ppo_higher importance=token old_policy=recomputed correction=none aggregation=token_mean "
    "denominator=survivors kl=k3_loss",
}  # fmt: skip


def checked(function: Callable[..., Any], **more: Any) -> Report:
    return report_on(function.__name__, function, **more)


@pytest.mark.parametrize("function", SOUND, ids=lambda one: one.__name__)
def test_a_loss_without_a_fault_passes(function: Callable[..., Any]) -> None:
    report = checked(function)
    assert report.ok, report.text()
    assert report.equals[0].startswith(SOUND[function]), report.text()
    assert report.factor == pytest.approx(1, abs=1e-5) or function is with_kl


# --- planted faults -------------------------------------------------------------------------------------------


def padded_mean(logprobs, old_logprobs, advantages, mask):
    return (ppo(logprobs, old_logprobs, advantages) * mask).mean()


def plain_sum(logprobs, old_logprobs, advantages, mask):
    return (ppo(logprobs, old_logprobs, advantages) * mask).sum()


def prompts_in_denominator(logprobs, old_logprobs, advantages, mask, attention_mask):
    return (ppo(logprobs, old_logprobs, advantages) * mask).sum() / attention_mask.sum()


def prompts_in_loss(logprobs, old_logprobs, advantages, attention_mask):
    return (ppo(logprobs, old_logprobs, advantages) * attention_mask).sum() / attention_mask.sum()


def mask_too_early(logprobs, old_logprobs, advantages, mask):
    early = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    return (ppo(logprobs, old_logprobs, advantages) * early).sum() / early.sum()


def mask_too_late(logprobs, old_logprobs, advantages, mask):
    late = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
    return (ppo(logprobs, old_logprobs, advantages) * late).sum() / late.sum()


def last_token_lost(logprobs, old_logprobs, advantages, mask):
    kept = mask & (mask.flip(1).cumsum(1).flip(1) > 1)
    return (ppo(logprobs, old_logprobs, advantages) * kept).sum() / kept.sum()


def no_mask(logprobs, old_logprobs, advantages):
    return ppo(logprobs, old_logprobs, advantages).mean()


def length_plus_one(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / (mask.sum(1) + 1)).mean()


def longest_length(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / mask.sum(1).max()).mean()


def rows_summed(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / mask.sum(1).clamp(min=1)).sum()


def sign_flipped(logprobs, old_logprobs, advantages, mask, num_tokens):
    return -token_mean(logprobs, old_logprobs, advantages, mask, num_tokens)


def inverted_ratio(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(old_logprobs, logprobs, advantages), mask, num_tokens)


def no_exp(logprobs, old_logprobs, advantages, mask, num_tokens):
    ratio, a = logprobs - old_logprobs, advantages[:, None]
    return over_tokens(-torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a), mask, num_tokens)


def max_for_min(logprobs, old_logprobs, advantages, mask, num_tokens):
    ratio, a = ratio_of(logprobs, old_logprobs), advantages[:, None]
    return over_tokens(-torch.maximum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a), mask, num_tokens)


def bounds_exchanged(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, old_logprobs, advantages, HIGH, LOW), mask, num_tokens)


def clip_only(logprobs, old_logprobs, advantages, mask, num_tokens):
    clipped = ratio_of(logprobs, old_logprobs).clamp(1 - LOW, 1 + HIGH)
    return over_tokens(-clipped * advantages[:, None], mask, num_tokens)


def log_clip(logprobs, old_logprobs, advantages, mask, num_tokens):
    log_ratio, a = logprobs - old_logprobs, advantages[:, None]
    return over_tokens(-torch.minimum(log_ratio.exp() * a, log_ratio.clamp(-LOW, HIGH).exp() * a), mask, num_tokens)


def old_is_current(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, logprobs.detach(), advantages), mask, num_tokens)


def weight_not_detached(logprobs, old_logprobs, advantages, mask, num_tokens):
    weight = ratio_of(logprobs, old_logprobs).clamp(1 - LOW, 1 + HIGH)
    return over_tokens(-weight * advantages[:, None] * logprobs, mask, num_tokens)


def all_detached(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs.detach(), old_logprobs, advantages), mask, num_tokens)


def correction_inverted(logprobs, old_logprobs, sampler_logprobs, advantages, mask, num_tokens):
    weight = (sampler_logprobs - old_logprobs).exp().clamp(max=2)
    return over_tokens(ppo(logprobs, old_logprobs, advantages) * weight, mask, num_tokens)


def correction_of_current(logprobs, old_logprobs, sampler_logprobs, advantages, mask, num_tokens):
    weight = (logprobs.detach() - sampler_logprobs).exp().clamp(max=2)
    return over_tokens(ppo(logprobs, old_logprobs, advantages) * weight, mask, num_tokens)


def kl_inverted(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    above = logprobs - ref_logprobs
    return over_tokens(ppo(logprobs, old_logprobs, advantages) + KL * (above.exp() - above - 1), mask, num_tokens)


def kl_of_k1(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, old_logprobs, advantages) + KL * (logprobs - ref_logprobs), mask, num_tokens)


def kl_subtracted(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    above = ref_logprobs - logprobs
    return over_tokens(ppo(logprobs, old_logprobs, advantages) - KL * (above.exp() - above - 1), mask, num_tokens)


def own_tokens(logprobs, old_logprobs, advantages, mask):
    return over_tokens(ppo(logprobs, old_logprobs, advantages), mask, int(mask.sum()))


def own_rows(logprobs, old_logprobs, advantages, mask):
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, len(mask))


def not_scaled(logprobs, old_logprobs, advantages, mask, num_tokens, num_microbatches):
    return token_mean(logprobs, old_logprobs, advantages, mask, num_tokens) * num_microbatches


def empty_mask_nan(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / mask.sum(1)).mean()


def tie_noise(logprobs, old_logprobs, rewards, group_ids, mask, num_rows):
    groups = rewards.view(-1, 4)
    centred = groups - groups.sum(1, keepdim=True).float().double() / 4  # a mean in single precision
    advantages = (centred / (groups.std(1, correction=0, keepdim=True) + 1e-12)).view(-1)
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, num_rows)


def single_nan(logprobs, old_logprobs, rewards, group_ids, mask, num_rows):
    advantages = torch.empty_like(rewards)
    for group in group_ids.unique():
        own = group_ids == group
        advantages[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-6)
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, num_rows)


FAULTS = {
    padded_mean: "the mean is over all rows x columns",
    plain_sum: "there is no denominator",
    prompts_in_denominator: "the denominator also counts prompt tokens",
    prompts_in_loss: "prompt tokens are in the loss",
    mask_too_early: "the mask is one token too early",
    mask_too_late: "the mask is one token too late",
    last_token_lost: "the last token of each response is left out",
    no_mask: "the mask is not applied",
    length_plus_one: "the length of a response is counted one too large",
    longest_length: "divided by the length of the longest",
    rows_summed: "summed over rows, not averaged",
    sign_flipped: "sign flipped",
    inverted_ratio: "the ratio is old / new",
    no_exp: "exp is missing",
    max_for_min: "max and min are exchanged",
    bounds_exchanged: "clip_low and clip_high are exchanged",
    clip_only: "only the clipped ratio is used",
    log_clip: "the clip is on the log-ratio",
    old_is_current: "the ratio is 1",
    weight_not_detached: "the weight of log-prob is not detached",
    all_detached: "the gradient is 0",
    correction_inverted: "the weight is sampler / old",
    correction_of_current: "the weight is current / sampler",
    kl_inverted: "k3 of pi / ref",
    kl_of_k1: "its expected gradient is 0",
    kl_subtracted: "the KL penalty has the wrong sign",
    own_tokens: "each is divided by its own tokens",
    own_rows: "each is divided by its own rows",
    not_scaled: "the losses are summed and not divided by their number",
    empty_mask_nan: "empty mask: the loss is nan",
    tie_noise: "rows with equal rewards",
    single_nan: "groups of one: the loss is nan",
}  # fmt: skip


@pytest.mark.few(16)
@pytest.mark.parametrize("function", FAULTS, ids=lambda one: one.__name__)
def test_a_planted_fault_is_named(function: Callable[..., Any]) -> None:
    report = checked(function)
    assert not report.ok
    assert any(FAULTS[function] in one for one in report.departures), report.text()


def test_there_are_more_than_twenty_faults() -> None:
    assert len(FAULTS) >= 20


def test_another_published_loss_than_the_expected_one_fails() -> None:
    report = checked(sequence_mean, expected={"aggregation": "token_mean"})
    assert report.departures == ["it is meant to be aggregation=token_mean, and is aggregation=sequence_mean"]


def test_a_surrogate_of_the_command_line_is_compared() -> None:
    def narrow(logprobs, old_logprobs, advantages, mask, num_tokens):
        return over_tokens(ppo(logprobs, old_logprobs, advantages, 0.15, 0.35), mask, num_tokens)

    assert not checked(narrow).equals
    report = checked(narrow, overrides=["surrogate=ppo", "surrogate.clip_low=0.15", "surrogate.clip_high=0.35"])
    assert report.ok and report.equals[0].startswith("surrogate=ppo surrogate.clip_low=0.15 surrogate.clip_high=0.35 ")


# --- numbers --------------------------------------------------------------------------------------------------


def test_shipped_numbers_are_those_of_the_options() -> None:
    assert TABLES.read_bytes() == written(make_tables()), "run python -m grpo_lab.instruments.loss_check.published"


def test_a_product_of_tables_is_the_loss_of_the_loop() -> None:
    """Surrogate, correction and aggregation of the tables against policy_loss, with a ratio per token and per row."""
    inputs = cut()
    ours = options_of("aggregation")
    rows = len(inputs.mask)
    mask, response = torch.tensor(inputs.mask), torch.tensor(inputs.response_mask)
    spread = torch.where(mask, torch.tensor(inputs.advantages)[:, None], 0.0)
    for surrogate, importance, correction, aggregation, denominator in (
        ("ppo_higher", "token", "tis_token", "token_mean", "survivors"),
        ("ppo_gspo", "sequence", "icepop", "sequence_mean", "original"),
        ("vespo", "sequence_product", "mis", "prompt_mean", "survivors"),
        ("gmpo", "token", "none", "balanced", "original"),
    ):
        chosen = {
            axis: options_of(axis)[name]
            for axis, name in (
                ("surrogate", surrogate), ("importance", importance), ("correction", correction),
                ("denominator", denominator),
            )
        }  # fmt: skip
        run = make_run(**chosen, aggregation=ours[aggregation])
        old, sampler = torch.tensor(inputs.old_logprobs), torch.tensor(inputs.sampler_logprobs)
        rollouts = make_rollouts([mask.shape[1]] * rows, 4, sampler=sampler)
        counted = run.denominator.counted_tokens(response, mask)
        totals = totals_of(counted, 4, range(rows), spread)
        batch = Batch(
            rows=torch.arange(rows), prompts=((1,),) * rows, tokens=rollouts.tokens, response_mask=response,
            loss_mask=mask, advantages=spread, sampler_logprobs=sampler, old_logprobs=old, ref_logprobs=None,
            correction_weights=run.correction(old, sampler, mask), entropy_coef=0.0, totals=totals,
            original_totals=totals,
        )  # fmt: skip
        leaf = torch.tensor(inputs.logprobs, dtype=F64).requires_grad_()
        loss = policy_loss(run.loss_tricks, batch, leaf, -leaf).loss
        loss.backward()
        tables = shipped()
        one = next(
            s for s in tables.surrogates
            if not s.fault and s.options["surrogate"] == surrogate and s.options["importance"] == importance
            and s.options["old_policy"] == "recomputed"
        )  # fmt: skip
        by_correction = next(c for c in tables.corrections if c.options == {"correction": correction} and not c.fault)
        by_aggregation = next(
            a for a in tables.aggregations
            if a.options == {"aggregation": aggregation, "denominator": denominator} and not a.fault
        )  # fmt: skip
        weights = by_correction.values["cut"] * by_aggregation.values["cut"]
        assert (weights * one.values["cut"]).sum() == pytest.approx(
            loss.item(), abs=1e-5 * np.abs(by_aggregation.values["cut"] * one.values["cut"]).sum()
        )
        found = one.gradient("cut", weights[None])[0]
        assert np.abs(found - leaf.grad.numpy()).max() <= 1e-5 * np.abs(found).max(), surrogate


def test_options_that_pull_without_advantage_are_known() -> None:
    pulling = {name for name, one in options_of("surrogate").items() if one.pulls_without_advantage}
    assert pulling == set(PULLING)


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_answers_of_a_file_are_judged_without_torch(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inputs.json only, as another program would: the gradient of REINFORCE's token mean needs no autograd.

    `whole`: all published losses are written, and not REINFORCE's only.
    """
    if not whole:
        few = [one for one in shipped().surrogates if one.options["surrogate"] == "reinforce"]
        monkeypatch.setattr(files, "shipped", lambda: replace(shipped(), surrogates=few))
    write_files(tmp_path)
    calls = json.loads((tmp_path / "inputs.json").read_text())
    reads = ["logprobs", "advantages", "mask", "num_tokens"]
    answers = {}
    for name, given in calls.items():
        weight = -np.array(given["advantages"])[:, None] * np.array(given["mask"]) / max(given["num_tokens"], 1)
        answers[name] = {"loss": (weight * np.array(given["logprobs"])).sum(), "gradient": weight.tolist()}
    (tmp_path / "mine.json").write_text(json.dumps({"function": "mine", "reads": reads, "answers": answers}))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from grpo_lab.cli import main; main(['check-loss', '--answers', sys.argv[1]])"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "mine.json")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "surrogate=reinforce correction=none aggregation=token_mean denominator=survivors" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "published.jsonl").open()]
    wanted = {"surrogate": "reinforce", "correction": "none", "aggregation": "token_mean", "denominator": "survivors"}
    line = next(one for one in lines if one["options"] == wanted)
    assert line["batches"]["plain"]["loss"] == pytest.approx(answers["plain"]["loss"], rel=1e-6)
    for sizes, parts in line["batches"]["plain"]["microbatches"].items():
        for index, part in enumerate(parts):
            mine = answers[f"plain/{sizes}:{index}"]
            assert part["loss"] == pytest.approx(mine["loss"], rel=1e-5, abs=1e-8)
            assert np.allclose(part["gradient"], mine["gradient"], rtol=1e-5, atol=1e-8)
    assert set(line["batches"]["plain"]["microbatches"]) == {"-".join(map(str, sizes)) for sizes in SPLITS["plain"]}
    losses = {name: {"loss": one["loss"]} for name, one in answers.items()}
    (tmp_path / "losses.json").write_text(json.dumps({"reads": reads, "answers": losses}))
    assert (
        wanted.items()
        <= dict(word.split("=") for word in judge_file(tmp_path / "losses.json").equals[0].split()).items()
    )


def test_a_file_without_its_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"answers": {}}')
    with pytest.raises(ValueError, match="reads"):
        judge_file(tmp_path / "mine.json")


def test_a_function_is_named_by_its_file_or_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file from any folder, with what stands beside it; the module from the current folder."""
    (tmp_path / "loss_of_a_file.py").write_text("from beside_a_loss import number\n\ndef loss():\n    return number\n")
    (tmp_path / "beside_a_loss.py").write_text("number = 7\n")
    assert load(f"{tmp_path}/loss_of_a_file.py:loss")() == 7
    monkeypatch.chdir(tmp_path)
    assert load("loss_of_a_file:loss")() == 7 and load("loss_of_a_file.py:loss")() == 7
    (tmp_path / "json.py").write_text("def loss():\n    return 8\n")
    assert load(f"{tmp_path}/json.py:loss")() == 8, "not the module of that name that Python has"


def test_a_function_with_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="`logits`"):
        checked(lambda logprobs, logits: logprobs.sum())


# --- the page -------------------------------------------------------------------------------------------------


def test_the_page_shows_the_data_and_the_examples_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("check_loss_page", ROOT / "analysis" / "check_loss.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text()
    rows = json.loads(script.DATA.read_text())
    assert page == script.with_table(page, rows)
    assert len({row["function"].split(" ")[0] for row in rows}) == 7
    source = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_losses.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    report = check_function("my_losses:policy_loss", expected={"aggregation": "token_mean"})
    assert report.text() == page.split("```text\n")[1].split("\n```")[0]
