"""One batch of a real run of TRL's GRPOTrainer in the microscope's exchange format, with the gradient TRL computed.

    python make_trl_rollouts.py MODEL FILE.jsonl

`MODEL` is a model folder, such as the one that `grpo-lab base world=tiny` prints. It runs in TRL's environment,
`tests/benchmarks/trl_constraints.txt`, and knows nothing of grpo_lab. The batch is that of the fourth optimiser step:
the second one on its rollouts, so old and current policy differ. `trl_gradient` is the derivative of TRL's loss in each
token's log-prob. The file is tests/golden/trl/rollouts.jsonl.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

STEP = 3  # optimiser steps before it


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where a completion ends with the answer."""
    return [float(text.rstrip().endswith(f"#{wanted}")) for text, wanted in zip(completions, answer)]


class Recorded(GRPOTrainer):
    """Keeps the inputs of each loss, the log-probs that it reads, and their gradient."""

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **named)
        if found[0].requires_grad:
            found[0].retain_grad()
            self.read = found[0]
        return found

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(model, inputs, *arguments, **named)
        if self.state.global_step == STEP:
            self.gradient = self.read.grad.clone()
        return loss

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self.state.global_step == STEP:
            self.held = dict(inputs)
        return loss


def listed(values: torch.Tensor) -> list[float]:
    return values.detach().double().tolist()


def main() -> None:
    model, target = sys.argv[1], Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    rows = Dataset.from_dict({"prompt": [f"{a}+{b}?" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})
    with tempfile.TemporaryDirectory() as folder:
        trainer = Recorded(
            model=model,
            reward_funcs=right,
            args=GRPOConfig(
                output_dir=folder, seed=3, max_steps=STEP + 1, per_device_train_batch_size=32, num_generations=8,
                num_iterations=2, max_completion_length=24, learning_rate=3e-3, lr_scheduler_type="constant", beta=0.0,
                loss_type="grpo", scale_rewards="group", epsilon=0.2, save_strategy="no", logging_strategy="no",
                use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
                dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=rows,
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
    held, lines = trainer.held, []
    answers = dict(zip(rows["prompt"], rows["answer"]))
    for row in range(len(held["completion_ids"])):
        mask, asked = held["completion_mask"][row].bool(), held["prompt_mask"][row].bool()
        ids, prompt = held["completion_ids"][row][mask].tolist(), held["prompt_ids"][row][asked].tolist()
        question = tokenizer.decode(prompt)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        place = (row, mask)
        sampled = listed(held["old_per_token_logps"][place])
        lines.append({
            "step": STEP + 1, "problem_id": question, "question": question, "answer": answers[question],
            "prompt_ids": prompt, "token_ids": ids, "tokens": [tokenizer.decode([one]) for one in ids],
            "reward": right([text], [answers[question]])[0], "truncated": ids[-1] != tokenizer.eos_token_id,
            "token_logprob": sampled, "token_old_logprob": sampled,
            "token_current_logprob": listed(trainer.read[place]), "trl_advantage": float(held["advantages"][row]),
            "trl_gradient": listed(trainer.gradient[place]),
        })  # fmt: skip
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
