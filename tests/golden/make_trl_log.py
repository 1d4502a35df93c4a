"""A short real run of TRL's GRPOTrainer, and its trainer_state.json, which tests of `grpo-lab import trl` read.

    python make_trl_log.py MODEL FOLDER

`MODEL` is a model folder, such as the one that `grpo-lab base world=tiny` prints. It runs in TRL's environment,
`tests/benchmarks/trl_constraints.txt`, and knows nothing of grpo_lab. `FOLDER/checkpoint-6/trainer_state.json` is the
file of tests/golden/trl.
"""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where a completion ends with the answer."""
    return [float(text.rstrip().endswith(f"#{wanted}")) for text, wanted in zip(completions, answer)]


def main() -> None:
    model, folder = sys.argv[1:3]
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    rows = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=GRPOConfig(
            output_dir=folder, seed=3, max_steps=6, per_device_train_batch_size=32, per_device_eval_batch_size=16,
            num_generations=4, max_completion_length=24, learning_rate=1e-3, beta=0.01, logging_steps=1,
            eval_strategy="steps", eval_steps=3, eval_on_start=True, save_strategy="steps", save_steps=6,
            use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
            dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=rows.select(range(48)),
        eval_dataset=rows.select(range(48, 64)),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
