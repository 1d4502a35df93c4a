"""Logs of other trainers are read in every form that they are left in.

Lines are written here as the trainers' code prints them at the commits that `external_logs.py` names.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from grpo_lab.tracking.external_logs import NEAREST, VERL, our_name, read_log
from grpo_lab.tracking.metrics import PEERS, find

GOLDEN = Path(__file__).parents[1] / "golden/trl/trainer_state.json"


def read(folder: Path, name: str, text: str) -> tuple[str, dict[int, dict[str, float]], list[str]]:
    path = folder / name
    path.write_text(text)
    _, form, log = read_log(path)
    return form, log.steps, log.notes


def test_every_name_of_ours_is_registered_and_every_one_of_verl_stands_beside_it() -> None:
    for theirs, ours in VERL.items():
        assert theirs in PEERS[ours], f"{ours} is said to be {PEERS[ours]}"
    for ours in NEAREST.values():
        find(ours)


def test_a_real_trainer_state_of_trl_with_its_evaluations() -> None:
    path, form, log = read_log(GOLDEN)
    history = json.loads(GOLDEN.read_text())["log_history"]
    assert path == GOLDEN and form == "trainer_state.json" and sorted(log.steps) == [0, 1, 2, 3, 4, 5, 6]
    first = next(entry for entry in history if entry["step"] == 1 and "reward" in entry)
    assert log.steps[1]["rollout/frac_zero_std"] == first["frac_reward_zero_std"]
    assert log.steps[1]["rollout/truncated"] == first["completions/clipped_ratio"]
    evaluated = {entry["step"]: entry["eval_reward"] for entry in history if "eval_reward" in entry}
    found = {step: numbers.get("eval/evaluation/accuracy") for step, numbers in log.steps.items()}
    assert {step: value for step, value in found.items() if value is not None} == evaluated
    assert read_log(GOLDEN.parent)[0] == GOLDEN, "a folder with one"


def test_console_output_of_verl_with_colours_progress_bars_and_numpy(tmp_path: Path) -> None:
    text = (
        "\x1b[36m(TaskRunner pid=7)\x1b[0m Training Progress:  0%|    | 0/2 [00:00<?, ?it/s]\r"
        "\x1b[36m(TaskRunner pid=7)\x1b[0m step:1 - actor/entropy:0.5 - actor/lr:1e-06 - actor/ppo_kl:-8.2e-06 "
        "- critic/score/mean:np.float64(0.25) - response_length/clip_ratio:0.125 - timing_s/gen:27.4\n"
        "step:2 - val-core/openai/gsm8k/acc/mean@1:0.5 - actor/entropy:nan\n"
    )
    form, steps, notes = read(tmp_path, "run.log", text)
    assert form == "console output" and not notes
    assert steps[1] == {
        "train/entropy": 0.5, "train/learning_rate": 1e-6, "train/approx_kl": -8.2e-6, "reward/mean": 0.25,
        "rollout/truncated": 0.125,
    }  # fmt: skip
    assert steps[2]["eval/openai.gsm8k/accuracy"] == 0.5 and math.isnan(steps[2]["train/entropy"])


def test_jsonl_of_verl_of_prime_rl_and_of_wandb(tmp_path: Path) -> None:
    verl = '{"step": 3, "data": {"actor/pg_clipfrac": 0.01, "response_length/mean": 9}}\n{"step": 4, "da'
    assert read(tmp_path, "verl.jsonl", verl)[1] == {3: {"train/clip_fraction": 0.01, "rollout/length": 9.0}}
    prime = (
        '{"step": 0, "train/agg/all/math/reward/mean": 0.5, "train/agg/all/math/is_truncated/mean": 0.1}\n'
        '{"step": 0, "mismatch_kl/all/mean": 0.002, "entropy/all/mean": 0.3, "eval/aime/effective/math/avg@4": 0.2}\n'
    )
    assert read(tmp_path, "metrics.jsonl", prime)[1] == {
        0: {
            "reward/mean": 0.5, "rollout/truncated": 0.1, "mismatch/k3": 0.002, "train/entropy": 0.3,
            "eval/aime/accuracy": 0.2,
        }
    }  # fmt: skip
    wandb = '{"_step": 9, "train/global_step": 2, "train/reward": 0.5, "train/kl": 0.01, "_runtime": 3}\n'
    assert read(tmp_path, "history.jsonl", wandb)[1] == {2: {"reward/mean": 0.5, "train/k3_ref": 0.01}}
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        read(tmp_path, "broken.jsonl", '{"step": \n{"step": 1}\n')


def test_console_output_of_trl_openrlhf_and_prime_rl(tmp_path: Path) -> None:
    trl = (
        "  1%| | 1/200 [00:35<1:56:58, 35.27s/it]{'loss': -0.0, 'grad_norm': nan, 'reward': 0.5, "
        "'completion_length': 12.0, 'completions/mean_length': 11.0, 'epoch': 0.1}\n"
        "{'loss': '0.2', 'reward': '0.75'}\n{'eval_reward': 0.25, 'eval_runtime': 3.1}\n"
    )
    _, steps, notes = read(tmp_path, "trl.log", trl)
    assert steps[1]["rollout/length"] == 11.0, "today's name counts" and math.isnan(steps[1]["train/gradient_norm"])
    assert steps[2] == {"train/loss": 0.2, "reward/mean": 0.75, "eval/evaluation/accuracy": 0.25}
    assert "no step numbers" in notes[0]
    swift = "{'loss': 0.1, 'response_clip_ratio': 0.5, 'global_step/max_steps': '5/8724'}\n"
    assert read(tmp_path, "swift.log", swift)[1] == {5: {"train/loss": 0.1, "rollout/truncated": 0.5}}
    openrlhf = (
        "✨ Global step 4: {'policy_loss': 0.1, 'ppo_clip_ratio': 0.0, 'kl': 0.01, 'actor_lr': 5e-07, 'reward': 0.5, "
        "'rollout/truncated_rate': 0.25, 'eval_math_pass1': 0.5}\n"
    )
    assert read(tmp_path, "openrlhf.log", openrlhf)[1] == {
        4: {
            "train/loss": 0.1, "train/clip_fraction": 0.0, "train/k3_ref": 0.01, "train/learning_rate": 5e-7,
            "reward/mean": 0.5, "rollout/truncated": 0.25, "eval/math/accuracy": 0.5,
        }
    }  # fmt: skip
    prime = (
        "02:33:26 SUCCESS Step 28 | Time: 73.77s | Reward: 0.3887 | Throughput: 2408.9 tokens/s | "
        "Seq. Length: 345.6 tokens/sample | Async Level: 1\n"
        "02:33:40 SUCCESS Step 28 |   13s | Loss 0.0123 | Entropy 0.4321 | Mismatch KL 0.0010 | Grad. Norm 0.2000\n"
    )
    assert read(tmp_path, "prime.log", prime)[1] == {
        28: {
            "reward/mean": 0.3887, "rollout/length": 345.6, "train/loss": 0.0123, "train/entropy": 0.4321,
            "mismatch/k3": 0.001, "train/gradient_norm": 0.2,
        }
    }  # fmt: skip


def test_csv_of_wandb_and_of_tensorboard(tmp_path: Path) -> None:
    wandb = (
        '"Step","a run - train/reward","a run - train/reward__MIN","a run - _step"\n1,0.5,0.4,1\n2,,,2\n3,0.75,0.7,3\n'
    )
    assert read(tmp_path, "wandb.csv", wandb)[1] == {1: {"reward/mean": 0.5}, 3: {"reward/mean": 0.75}}
    board = "Wall time,Step,Value\n1700000000.0,1,0.5\n1700000001.0,2,0.25\n"
    found = read(tmp_path, "run-theirs-tag-train_entropy.csv", board)[1]
    assert found == {1: {"train/entropy": 0.5}, 2: {"train/entropy": 0.25}}


def test_event_files_where_tensorboard_is_installed_and_how_to_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    events = writer.EventFileWriter(str(tmp_path))
    for step, value in ((1, 0.5), (2, 0.25)):
        summary = Summary(value=[Summary.Value(tag="train/entropy", simple_value=value)])
        events.add_event(Event(step=step, summary=summary))
    events.close()
    assert read_log(tmp_path)[2].steps == {1: {"train/entropy": 0.5}, 2: {"train/entropy": 0.25}}
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ValueError, match=r"pip install 'grpo-lab\[tensorboard\]'"):
        read_log(tmp_path)


def test_what_is_no_log_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no metric of a known trainer: give"):
        read(tmp_path, "notes.txt", "nothing here\n")
    with pytest.raises(ValueError, match="there is no"):
        read_log(tmp_path / "away.log")
    with pytest.raises(ValueError, match="has no log that is known"):
        read_log(tmp_path)


def test_names_with_and_without_what_trackers_put_before_them() -> None:
    assert our_name("train/reward") == our_name("reward") == "reward/mean"
    assert our_name("touched/surrogate") == "train/clip_fraction", "an earlier name of ours"
    assert our_name("timing_s/gen") is None and our_name("external/eval_reward") is None
