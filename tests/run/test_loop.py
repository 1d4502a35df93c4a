"""The whole loop on the tiny world: it learns, it repeats to the bit, and a killed run ends as if it had lived."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from statistics import mean

import pandas as pd
import pytest
import torch
import transformers
from compositions import RECIPES
from processes import forked_command
from short_runs import (
    SMALL,
    metrics_of,
    run_in_process,
    same_ending,
    train_command,
)

from grpo_lab.run.recorder import _fallen

# The shortest way through the loop; test_reference_loop.py sees every update of the longer ones.
AT_EVERY_CHANGE = ("plain",)


@pytest.mark.parametrize(
    "recipe",
    [name if name in AT_EVERY_CHANGE else pytest.param(name, marks=pytest.mark.extended) for name in RECIPES],
)
def test_every_recipe_learns(tmp_path: Path, tiny_base: Path, recipe: str) -> None:
    """Held-out accuracy over 256 answers: chance alone moves it by about 0.03, learning by far more."""
    steps = 20 if recipe in AT_EVERY_CHANGE else 40
    folder = run_in_process(
        tmp_path, f"recipe={recipe}", f"budget.amount={steps}", "optimizer.learning_rate=3e-4", "evaluation.samples=4"
    )
    first, last = metrics_of(folder)[0]["metrics"], metrics_of(folder)[-1]["metrics"]
    assert last["eval/heldout/accuracy"] - first["eval/heldout/accuracy"] > 0.15
    # Means of some steps: a stream's very first batch is of the problems that end first, which are the easy ones.
    outcomes = [row["metrics"]["reward/outcome"] for row in metrics_of(folder)[1:]]
    assert mean(outcomes[-10:]) > mean(outcomes[:5]) + 0.1


BRIEF = SMALL[:-1]  # few questions, at the start and at the end


def brief_run(folder: Path, *overrides: str, **how: str) -> Path:
    return run_in_process(folder, *BRIEF, *overrides, **how)


BF16 = ["sampler_precision=bf16", "learner_precision=bf16"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "overrides",
    [
        ["truncation=mask_after", "reward_shaping=soft_overlong", "aggregation=prompt_mean"],
        ["truncation=mask_before", "group_filter=drop", "denominator=survivors", "aggregation=token_mean"],
        ["baseline=leave_one_out", "scale=none", "surrogate=ppo_higher", "updates=two", "aggregation=sequence_sum"],
        ["baseline=none", "scale=none", "surrogate=reinforce", "updates=one", "aggregation=constant"],
        ["correction=tis_token", *BF16, "kl=k3_loss"],
        ["rejection=token_k3", "rejection.bound=1e-6", "correction=icepop", *BF16, "denominator=survivors"],
        ["old_policy=sampler", *BF16, "surrogate=dppo", "surrogate.delta=0.001", "kl=k3_unbiased"],
        ["kl=k1_reward", "updates=one", "entropy=bonus", "reward_shaping=kimi_length"],
        ["entropy=high_entropy_tokens", "importance=sequence", "surrogate=ppo_gspo", "kl=k2_loss"],
        ["surrogate=clip_cov", "surrogate.cov_low=0.001", "baseline=batch_mean", "scale=batch_std_tokens"],
        ["surrogate=kl_cov", "surrogate.share=0.1", "reward_shaping=l1_max", "entropy=adaptive", "entropy.target=9"],
        ["surrogate=kimi", "aggregation=sequence_sum", "scale=group_mean", "baseline=length_weighted"],
        ["baseline=pass_at_k", "scale=none", "surrogate=gmpo", "surrogate.clip_low=0.001", "updates=sixteen"],
        ["group_filter=resample", "curriculum=easy_to_hard", "baseline=gae", "scale=batch_std_tokens", "kl=k1_reward"],
        ["group_filter=active", "truncation=interrupt", "baseline=greedy", "scale=none", "surrogate=cispo"],
        [
            "group_filter=oversample_abort_partial",
            "correction=tis_token",
            "correction.cap=1.0001",
            "old_policy=recomputed",
            "curriculum=kimi",
        ],
        [
            "group_filter=oversample_abort",
            "truncation=repetition_stop",
            "truncation.share=0.3",
            "truncation.probability=0.8",
            "reward_shaping=l1_exact",
            "updates=two_passes",
        ],
        [
            "baseline=monte_carlo",
            "baseline.continuations=2",
            "scale=none",
            "reward_shaping=soft_overlong",
            "group_filter=resample",
            "kl=k3_loss",
            "reference=reset",
            "reference.every=2",
        ],
        [
            "baseline=gae_orz",
            "scale=none",
            "critic=value_head",
            "critic.pretrain_steps=1",
            "updates=four_fresh",
            "truncation=mask_before",
            "kl=k2_loss",
            "reference=ema",
            "reward_shaping=l1_max",
        ],
    ],
    ids=lambda overrides: overrides[0],
)
def test_every_axis_runs_in_the_loop_and_says_what_it_touched(tmp_path: Path, overrides: list[str]) -> None:
    folder = brief_run(tmp_path, *overrides, "budget.amount=3")
    done = json.loads((folder / "DONE").read_text())
    rows = [row["metrics"] for row in metrics_of(folder)[1:]]
    touched = {name for row in rows for name, value in row.items() if name.startswith("active_fraction/") and value > 0}
    for axis in (
        "curriculum", "truncation", "group_filter", "reward_shaping", "correction", "kl", "rejection", "entropy",
    ):  # fmt: skip
        switched_on = any(override.startswith(f"{axis}=") for override in overrides)
        assert switched_on == (f"active_fraction/{axis}" in touched), axis
        assert axis not in done["no_ops"]
    waits = sum(
        int(override.removeprefix("critic.pretrain_steps=")) for override in overrides if "pretrain" in override
    )
    for row in rows[:waits]:
        assert row["train/updates"] == 0 and row["critic/gradient_norm"] > 0, "the critic learns alone"
    for row in rows[waits:]:
        assert row["train/gradient_norm"] > 0 and row["train/update_norm"] > 0
        assert row["rollout/trained"] <= 1 and row["budget/trained_tokens"] <= row["budget/sampled_tokens"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides,factors",
    [
        # a token mean over everything weighs every token 1/n in sum 1; the scale is 1 / deviation of what was centred
        (["aggregation=token_mean", "scale=none"], {"aggregation": 1, "denominator": 1, "scale": 1, "surrogate": 1}),
        (["surrogate=cispo", "surrogate.cap=0.2", "scale=none"], {"surrogate": 0.2}),
        (["recipe=dr_grpo"], {"scale": 1, "surrogate": 1, "denominator": 1}),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_the_factors_a_trick_puts_on_the_loss_are_logged(tmp_path: Path, overrides: list[str], factors) -> None:
    folder = brief_run(tmp_path, *overrides, "updates=one", "budget.amount=1")
    row = metrics_of(folder)[1]["metrics"]
    for name, value in factors.items():
        assert row[f"factor/{name}"] == pytest.approx(value, abs=1e-5), name


@pytest.mark.extended
def test_the_constant_the_survivors_and_gpg_put_a_factor_on_the_loss_that_the_log_shows(tmp_path: Path) -> None:
    constant = metrics_of(brief_run(tmp_path / "a", "recipe=dr_grpo", "budget.amount=1"))[1]["metrics"]
    assert constant["factor/aggregation"] == pytest.approx(constant["rollout/length"] / 24, abs=1e-5)
    masked = ["truncation=mask_after", "aggregation=sequence_sum", "updates=one", "budget.amount=1"]
    lost, kept = (
        metrics_of(brief_run(tmp_path / name, *masked, f"denominator={name}"))[1]["metrics"]
        for name in ("original", "survivors")
    )
    share = lost["rollout/trained"]
    assert share < 0.95 and kept["factor/denominator"] == pytest.approx(1 / share, abs=1e-5)
    assert kept["train/gradient_norm"] == pytest.approx(lost["train/gradient_norm"] / share, rel=1e-3)
    fast = ["budget.amount=12", "optimizer.learning_rate=1e-3", "evaluation=brief", "group_size=4"]
    gpg = [row["metrics"] for row in metrics_of(brief_run(tmp_path / "gpg", "recipe=gpg", *fast))[1:]]
    assert max(row["rollout/frac_zero_std"] for row in gpg) > 0.2
    for row in gpg:
        assert row["factor/scale"] == pytest.approx(1 / (1 - row["rollout/frac_zero_std"]), abs=1e-9)


def test_a_controllers_state_survives_the_checkpoint(tmp_path: Path) -> None:
    """The adaptive coefficient after four steps is that of four steps, wherever the run was cut."""
    overrides = ["entropy=adaptive", "entropy.target=9", "budget.amount=4", "checkpoint_every=2"]
    folder = brief_run(tmp_path, *overrides)
    states = {
        path.name: torch.load(path / "state.pt", weights_only=False) for path in (folder / "checkpoints").iterdir()
    }
    assert states["step=000002"]["entropy_coef"] == pytest.approx(2 * 0.005)
    assert states["step=000004"]["entropy_coef"] == pytest.approx(4 * 0.005)
    (folder / "DONE").unlink()
    shutil.rmtree(folder / "checkpoints" / "step=000004")
    brief_run(tmp_path, *overrides)
    resumed = torch.load(folder / "checkpoints" / "step=000004" / "state.pt", weights_only=False)
    assert resumed["entropy_coef"] == pytest.approx(4 * 0.005), "it went on from that of step 2"


@pytest.mark.extended  # the test before this one goes on from the checkpoint of another controller
@pytest.mark.parametrize("option", ["k3_loss_adaptive", "k1_reward_adaptive"])
def test_a_kl_coefficient_that_follows_a_target_goes_on_after_a_kill(tmp_path: Path, option: str) -> None:
    """The lines of the log after the cut are those of the run that was not cut, and the coefficients that of the KL."""
    overrides = [f"kl={option}", "kl.kl_coef=0.1", "kl.target=0.1", "kl.horizon=128", "budget.amount=4"]
    overrides += ["checkpoint_every=2", "optimizer.learning_rate=1e-3", "optimizer.warmup_updates=0"]
    folder = brief_run(tmp_path, *overrides)
    rows = [row["metrics"] for row in metrics_of(folder)[1:]]
    run_rows, coef, moves = rows[0]["rollout/groups"] * 8, 0.1, []
    for row in rows:
        assert row["train/kl_coef"] == pytest.approx(coef, rel=1e-9)
        moves.append(min(max(row["train/k3_ref"] / 0.1 - 1, -0.2), 0.2) * min(run_rows / 128, 1))
        coef *= 1 + moves[-1]
    assert len({round(move, 6) for move in moves}) > 1, "it moved by the KL of each step"
    (folder / "DONE").unlink()
    shutil.rmtree(folder / "checkpoints" / "step=000004")
    brief_run(tmp_path, *overrides)
    assert [row["metrics"]["train/kl_coef"] for row in metrics_of(folder)[1:]] == [row["train/kl_coef"] for row in rows]
    resumed = torch.load(folder / "checkpoints" / "step=000004" / "state.pt", weights_only=False)
    assert resumed["kl_coef"] == pytest.approx(coef, rel=1e-9)


@pytest.mark.parametrize(
    "family", ["GPT2", *(pytest.param(name, marks=pytest.mark.extended) for name in ("Qwen3", "Mistral", "GPTNeoX"))]
)
def test_any_causal_lm_of_transformers_trains(tmp_path: Path, tiny_base: Path, family: str) -> None:
    """Other attention, other position embeddings, an untied or a sliding-window model: all from a user's folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_base)
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 96, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    sizes |= {
        "Qwen3": {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False},
        "GPT2": {},
        "Mistral": {"intermediate_size": 48, "num_key_value_heads": 1, "sliding_window": 8},
        "GPTNeoX": {"intermediate_size": 48},
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    folder = brief_run(
        tmp_path, "model=hf", f"model.path={tmp_path / 'model'}", "budget.amount=2", "kl=k3_loss",
        "evaluation.downstream_max_tokens=30", "reward=lenient",
    )  # fmt: skip
    rows = [row["metrics"] for row in metrics_of(folder)[1:]]
    assert all(row["mismatch/max"] < 1e-4 for row in rows), "the cached sampler and the learner agree"
    assert rows[-1]["train/update_norm"] > 0 and (folder / "checkpoints" / "step=000002" / "model.safetensors").exists()


@pytest.mark.extended
def test_an_inert_trick_is_named_in_the_summary(tmp_path: Path) -> None:
    folder = brief_run(tmp_path, "updates=one", "budget.amount=2")
    done = json.loads((folder / "DONE").read_text())
    assert done["no_ops"] == ["surrogate"] and "no clip, gate or penalty on drift can act" in done["warnings"][0]


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    one = brief_run(tmp_path / "a", "budget.amount=2")
    two = brief_run(tmp_path / "b", "budget.amount=2")
    other = brief_run(tmp_path / "c", "budget.amount=2", "seed=1")
    same_ending(one, two)
    assert (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes()


def test_microbatches_change_no_metric_beyond_rounding(tmp_path: Path) -> None:
    one = metrics_of(brief_run(tmp_path / "a", "budget.amount=1"))[1]["metrics"]
    two = metrics_of(brief_run(tmp_path / "b", "budget.amount=1", "microbatch_tokens=200"))[1]["metrics"]
    for name in ("train/loss", "train/gradient_norm", "train/entropy", "train/update_norm", "reward/mean"):
        assert one[name] == pytest.approx(two[name], rel=0, abs=2e-4), name


@pytest.mark.extended
def test_arms_of_one_seed_see_the_same_problems_and_noise(tmp_path: Path) -> None:
    """Common random numbers: before the first update, arms cannot differ in a single character."""
    tables = [
        pd.read_parquet(brief_run(tmp_path / name, arm, "budget.amount=1") / "rollouts" / "step=000001.parquet")
        for name, arm in {"a": "scale=none", "b": "truncation=mask_before", "c": "microbatch_tokens=300"}.items()
    ]
    for other in tables[1:]:
        pd.testing.assert_series_equal(tables[0]["text"], other["text"])


OVERRIDES = [*BRIEF, "checkpoint_every=5", "evaluation.every=8", "rollouts_every=4", "kl=k3_loss"]


def kill_when(command: list[str], reached: Path, lines: int, pause: float) -> bool:
    """Start the command and SIGKILL it once `reached` has that many lines; False if it ended before."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if reached.exists() and reached.read_bytes().count(b"\n") >= lines:
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.005)
    return False


MOMENTS = ((1, 0.0), (4, 0.07), (6, 0.0), (9, 0.02), (11, 0.15), (17, 0.04))  # lines of the log, and seconds


@pytest.mark.timeout(900)  # on a busy machine each of its processes takes a minute to start
@pytest.mark.parametrize(
    ("moments", "steps", "fresh"),
    [(MOMENTS[2:3], 8, False), pytest.param(MOMENTS, 24, True, marks=pytest.mark.extended)],
    ids=["one", "six"],
)
def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(
    tmp_path: Path, moments: tuple[tuple[int, float], ...], steps: int, fresh: bool
) -> None:
    """Kills at different points: right after a line, within a step, around checkpoints and evaluations.

    `fresh`: killed are interpreters of their own, else a copy of this process.
    """
    overrides = [*OVERRIDES, f"budget.amount={steps}"]
    whole = run_in_process(tmp_path / "whole", *overrides, name="x")
    command = train_command(tmp_path / "killed", *overrides)
    killed = 0
    for lines, pause in moments:
        found = list((tmp_path / "killed").glob("*/seed=0"))
        log = (found[0] if found else tmp_path / "killed" / "not yet") / "metrics.jsonl"
        if not found:  # the folder's name is the loop's business: wait for it
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, **quiet) if fresh else forked_command(command[2:])
            while not (found := list((tmp_path / "killed").glob("*/seed=0/metrics.jsonl"))):
                time.sleep(0.01)
            while found[0].read_bytes().count(b"\n") < lines:
                time.sleep(0.005)
            time.sleep(pause)
            process.kill()
            process.wait() if isinstance(process, subprocess.Popen) else process.join()
            killed += 1
            continue
        killed += kill_when(command, log, lines, pause)
    assert killed >= max(1, len(moments) - 1)
    (folder,) = (tmp_path / "killed").glob("*/seed=0")
    assert run_in_process(tmp_path / "killed", *overrides, name=folder.parent.name) == folder
    same_ending(whole, folder)
    timing = [json.loads(line)["step"] for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert len(timing) > steps + 1, "attempts that were killed stay in timing.jsonl"
    assert (folder / "environment.1.json").exists(), "so does what is known of the machine they ran on"


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["sync", "in_flight"])
def test_a_checkpoint_is_due_by_time_too_and_changes_no_result(tmp_path: Path, schedule: str) -> None:
    words = (f"schedule={schedule}", "budget.amount=4", "keep_checkpoints=9")
    by_steps = brief_run(tmp_path / "steps", *words, name="x")
    by_time = brief_run(tmp_path / "time", *words, "checkpoint_minutes=1e-6", name="x")
    saved = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (by_steps, by_time)]
    assert saved == [["step=000004"], [f"step={step:06d}" for step in range(1, 5)]]
    same_ending(by_steps, by_time)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one step, below its folder of runs."""
    return brief_run(tmp_path_factory.mktemp("finished"), "budget.amount=1")


@pytest.fixture
def again(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(finished, tmp_path / finished.relative_to(finished.parents[1])))


def test_a_finished_run_is_not_run_again(tmp_path: Path, again: Path) -> None:
    def written() -> dict[Path, int]:
        """Every file but the lock, which each look at the folder takes."""
        files = [path for path in again.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in files}

    before = written()
    assert brief_run(tmp_path, "budget.amount=1") == again
    assert written() == before


def test_a_folder_of_another_configuration_is_refused_by_name(tmp_path: Path, again: Path) -> None:
    (again / "DONE").unlink()
    with pytest.raises(ValueError, match=r"scale\.ddof: 0 there, 1 now"):
        brief_run(tmp_path, "budget.amount=1", "convention.std_ddof=1")


def test_a_diverged_run_stops_before_the_update_with_its_state_saved(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"within step 1; its state, .* is in"):
        brief_run(tmp_path, "budget.amount=30", "optimizer.learning_rate=1e30", "optimizer.warmup_updates=1")
    folder = tmp_path / "run" / "seed=0"
    assert "FloatingPointError" in (folder / "error.txt").read_text() and not (folder / "DONE").exists()
    (saved,) = (folder / "failure").glob("step=*")
    assert {"model.safetensors", "state.pt", "tokenizer.json"} <= {path.name for path in saved.iterdir()}


@pytest.mark.extended
def test_the_budget_may_be_counted_in_tokens(tmp_path: Path) -> None:
    folder = brief_run(tmp_path, "budget=sampled_tokens", "budget.amount=5000")
    spent = [row["metrics"]["budget/sampled_tokens"] for row in metrics_of(folder)]
    assert spent[-1] >= 5000 > spent[-2] and "eval/heldout/accuracy" in metrics_of(folder)[-1]["metrics"]


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    folder = brief_run(tmp_path, "budget.amount=2", "group_filter=drop")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {
        "config.yaml", "run.json", "environment.json", "source.diff", "metrics.jsonl", "timing.jsonl", "DONE",
        "eval/step=000000.parquet", "eval/step=000002.parquet", "rollouts/step=000001.parquet",
        "checkpoints/step=000002/model.safetensors", "checkpoints/step=000002/state.pt",
    } <= names  # fmt: skip
    answers = pd.read_parquet(folder / "eval" / "step=000002.parquet")
    assert set(answers["suite"]) == {"probe", "heldout_training", "heldout", "downstream"}
    scores = metrics_of(folder)[-1]["metrics"]
    summary = json.loads((folder / "DONE").read_text())
    assert summary["fell"] == _fallen(metrics_of(folder)) and summary["ungraded"] == 0
    by_suite = answers.groupby("suite")["outcome"].mean()
    assert all(by_suite[suite] == pytest.approx(scores[f"eval/{suite}/accuracy"]) for suite in by_suite.index)
    rollouts = pd.read_parquet(folder / "rollouts" / "step=000001.parquet")
    assert len(rollouts) == 128 and set(rollouts.loc[~rollouts["in_loss"], "advantage"]) <= {0.0}
    assert "time" not in "".join(scores) and "device_seconds" not in "".join(scores), "no clock in metrics.jsonl"
    timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert timing[-1]["timing"]["budget/device_seconds"] > 0


def test_budgets_are_the_tables_counts(tmp_path: Path) -> None:
    """Sampled tokens = each prompt once plus every response; discarded = tokens of rows that left the loss."""
    folder = brief_run(tmp_path, "budget.amount=1", "truncation=mask_after", "updates=one")
    table = pd.read_parquet(folder / "rollouts" / "step=000001.parquet")
    prompts = table.drop_duplicates("problem_id")["question"].str.len().sum()  # one token a character
    row = metrics_of(folder)[-1]["metrics"]
    assert row["budget/sampled_tokens"] == prompts + table["length"].sum()
    assert row["budget/trained_tokens"] == table.loc[table["in_loss"], "length"].sum()
    assert row["budget/discarded_tokens"] == table.loc[~table["in_loss"], "length"].sum() > 0
    assert row["budget/completions"] == len(table) and row["budget/prompts"] == 16


def test_the_loop_hands_the_loss_the_old_and_the_reference_policy_it_says(tmp_path: Path) -> None:
    """What no unit test of the loss can see: a learner passed off as the old policy or as the reference."""
    rows = [r["metrics"] for r in metrics_of(brief_run(tmp_path / "a", "budget.amount=3", "kl=k3_loss"))]
    assert rows[2]["train/approx_kl"] > 1e-7, "later minibatches are measured against the learner before the first"
    assert rows[3]["train/k3_ref"] > rows[1]["train/k3_ref"] > 0, "and against a reference that stays"
    once = ["updates=one", "kl=k3_loss"]
    rows = [r["metrics"] for r in metrics_of(brief_run(tmp_path / "b", "budget.amount=3", *once))]
    assert [row["train/ratio"] for row in rows[1:]] == [1.0, 1.0, 1.0]
    assert rows[1]["train/k3_ref"] < 1e-8 < rows[2]["train/k3_ref"], "at step 1 the learner is the reference"
    plain = ["surrogate=reinforce", "optimizer.learning_rate=1e-3", "optimizer.warmup_updates=1"]
    rows = [r["metrics"] for r in metrics_of(brief_run(tmp_path / "c", "budget.amount=1", *plain))]
    assert rows[1]["train/approx_kl"] > 1e-6 and rows[1]["mismatch/absolute"] < 1e-5, "drift is not mismatch"


def test_a_changed_number_in_a_yaml_is_noticed_even_when_the_run_is_done(tmp_path: Path, again: Path) -> None:
    """Names come from overrides, so an edited file leads to the same folder."""
    assert (again / "DONE").exists()
    with pytest.raises(ValueError, match=r"surrogate\.clip_low: 0\.2 there, 0\.3 now"):
        brief_run(tmp_path, "budget.amount=1", "surrogate.clip_low=0.3")


def test_a_run_that_can_never_train_again_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of one token are all wrong, so every group is tied and the filter leaves nothing."""
    monkeypatch.setattr("grpo_lab.run.recorder._MAX_IDLE_STEPS", 3)
    with pytest.raises(ValueError, match="left no token to train on"):
        brief_run(tmp_path, "engine.max_tokens=1", "group_filter=drop", "budget=sampled_tokens", "budget.amount=1e9")


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["recipe=dapo", "updates=two", "group_size=3"], id="resampled"),
        pytest.param(["recipe=areal", "group_filter=active"], id="streamed", marks=pytest.mark.extended),
    ],
)
def test_the_command_trains_as_a_process_that_loaded_torch_first(
    overrides: list[str], tmp_path: Path, tiny_base: Path
) -> None:
    """A command loads torch late. Once every choice among groups then kept all of them, and all tests passed."""
    overrides = [*overrides, "budget.amount=3", "problems_per_step=4", "checkpoint_every=3", "evaluation.every=3"]
    here = run_in_process(tmp_path / "here", *overrides)
    subprocess.run(train_command(tmp_path / "there", *overrides), check=True, stdout=subprocess.DEVNULL, timeout=200)
    (there,) = (tmp_path / "there").glob("*/seed=0")
    same_ending(here, there)
