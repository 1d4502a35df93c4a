"""The same training run with TRL's GRPOTrainer; knows nothing of grpo_lab and runs in TRL's environment.

    python trl_side.py result.json setting.json warmup

`setting.json` is what `lab_side.py` wrote under "setting": model folder, problems in order, all numbers.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

PACKAGES = ("trl", "transformers", "torch", "accelerate", "tokenizers", "datasets")
FINAL_NUMBER = re.compile(r"#([0-9]+)\Z")


class StrictReward:
    """The strict verifier of the arithmetic world; counts tokens and remembers the last batch it saw."""

    __name__ = "strict"

    def __init__(self, eos: int, correct: float, wrong: float) -> None:
        self.eos, self.correct, self.wrong = eos, correct, wrong
        self.tokens: list[int] = []
        self.rewards: list[float] = []
        self.last: list[dict[str, Any]] = []

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        finished = [ids[-1] == self.eos for ids in completion_ids]
        outcomes = []
        for text, ended, right in zip(completions, finished, answer):
            found = FINAL_NUMBER.search(text)
            outcomes.append(float(ended and found is not None and found.group(1) == right))
        self.tokens.append(sum(map(len, completion_ids)))
        self.rewards.append(sum(outcomes) / len(outcomes))
        self.last = [
            {"text": text, "finished": ended, "answer": right, "outcome": outcome}
            for text, ended, right, outcome in zip(completions, finished, answer, outcomes)
        ]
        return [self.correct if outcome else self.wrong for outcome in outcomes]


class Stamps(TrainerCallback):
    """Wall and CPU time at the end of every step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer, with the time of each call of its generation."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.generate_seconds: list[float] = []

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate(*arguments, **named)
        self.generate_seconds.append(time.perf_counter() - started)
        return result


def config(setting: dict[str, Any], folder: str) -> GRPOConfig:
    """As fast as a fair user makes it: one batch, no checkpointing, no logging, no saving; fp32 master weights."""
    steps = len(setting["prompts"]) // setting["problems_per_step"]
    rows = setting["problems_per_step"] * setting["group_size"]
    # A large vocabulary makes the scores of all rows larger than a GPU; the arithmetic world's fit at once.
    most = rows if setting["device"] == "cpu" else 64
    passes = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= max(most, setting["group_size"]))
    return GRPOConfig(
        output_dir=folder,
        seed=setting["seed"],
        # the same work
        max_steps=steps,
        per_device_train_batch_size=rows // passes,
        gradient_accumulation_steps=passes,
        num_generations=setting["group_size"],
        max_completion_length=setting["max_tokens"],
        temperature=setting["temperature"],
        top_p=setting["top_p"],
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
        # the same algorithm
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        num_iterations=1,
        epsilon=setting["clip_low"],
        epsilon_high=setting["clip_high"],
        learning_rate=setting["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=setting["beta1"],
        adam_beta2=setting["beta2"],
        adam_epsilon=setting["eps"],
        weight_decay=setting["weight_decay"],
        max_grad_norm=setting["max_grad_norm"],
        # nothing that costs time beside it
        use_cpu=setting["device"] == "cpu",
        bf16=setting["bf16"],
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main() -> None:
    target, source, warmup = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    setting = json.loads(source.read_text())
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    assert tokenizer(text=setting["prompts"])["input_ids"] == setting["prompt_ids"], "the sides tokenise differently"
    reward = StrictReward(tokenizer.eos_token_id, setting["correct"], setting["wrong"])
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=setting["model"],
            reward_funcs=reward,
            args=config(setting, folder),
            train_dataset=Dataset.from_dict({"prompt": setting["prompts"], "answer": setting["answers"]}),
            processing_class=tokenizer,
            callbacks=[stamps],
        )
        trainer.train()
    dtype = next(trainer.model.parameters()).dtype
    assert dtype is torch.float32, f"TRL trained in {dtype}"
    rows = []
    for step in range(warmup, len(stamps.wall)):
        wall = stamps.wall[step] - stamps.wall[step - 1]
        generate = trainer.generate_seconds[step]
        rows.append(
            {
                "wall": wall,
                "cpu": stamps.cpu[step] - stamps.cpu[step - 1],
                "stages": {"generate": generate, "rest": wall - generate},
                "tokens": reward.tokens[step],
                "reward": reward.rewards[step],
            }
        )
    result = {
        "rows": rows,
        "last": reward.last,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
    }
    target.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
