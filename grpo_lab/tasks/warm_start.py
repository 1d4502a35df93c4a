"""Base models: the arithmetic one, built from a recipe and cached, or the user's own folder.

The arithmetic base is a small Llama trained by supervision on generated answers in three modes (guess, careful,
rambling). RL then finds out which mode pays off.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
import transformers
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_lab.checks import require
from grpo_lab.tasks.arithmetic import (
    CHECK_AGAIN,
    FINAL,
    Chain,
    Family,
    Kinds,
    answer_mode,
    build_tokenizer,
    careful_steps,
    draw_chain,
    require_ranges,
    require_remainders,
    symbols_of,
)
from grpo_lab.tasks.base import Model
from grpo_lab.tasks.cache import cache_root
from grpo_lab.tasks.shipped import find_shipped
from grpo_lab.tasks.verifiers import Strict
from grpo_lab.tracking.checksums import make_checksummed
from grpo_lab.tracking.terminal import Terminal
from grpo_lab.types import Problem, Tensor

# Part of the cache key: raise it when this module's code changes what a recipe produces.
CODE_VERSION = 1
_IGNORED = -100  # the label of a token that carries no loss


@dataclass(frozen=True)
class Example:
    """A generated answer. If not `finished`, its text was truncated, and no end-of-text token is trained on."""

    question: str
    response: str
    answer: str
    finished: bool


@dataclass(frozen=True)
class ArithmeticBase(Model):
    """A small Llama, warm-started on generated answers to training problems.

    Everything that affects the weights is a field, and a hash of the fields names the folder. The weights are
    bitwise reproducible with the same `threads`, machine and libraries.
    """

    place: ClassVar[str] = "cpu"  # the device it is built on

    base: int  # bases of one recipe differ only in their random numbers
    threads: int  # CPU threads while building; the process may use another number otherwise
    # architecture
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float
    init_std: float
    # problems to train on, with a share of harder ones so that it has seen more addends
    addends_min: int
    addends_max: int
    number_min: int
    number_max: int
    families: list[Family]
    modulus: int
    modulus_share: float
    withheld_numbers: list[int]  # never shown, so that a task can ask for them
    hard_share: float
    hard_addends_min: int
    hard_addends_max: int
    hard_number_min: int
    hard_number_max: int
    hard_modulus: int
    hard_modulus_share: float
    # shares of answer modes; the rest is rambling
    guess_share: float
    careful_share: float
    guess_spread: int  # a guess is off by at most this
    slip_rate: float  # probability that one step's sum is wrong
    slip_spread: int  # a slip is off by at most this
    check_again: float  # probability of one more "check again", each time
    ramble_max_tokens: int  # rambling text is truncated at this length
    # optimisation
    careful_first: float  # share of the steps, at the start, that train on careful answers only
    steps: int
    batch_size: int
    slices: int  # parts of equal size, sorted by length, into which a batch is split
    learning_rate: float
    warmup: float  # share of the steps
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    # what report.json measures
    report_problems: int
    report_max_tokens: int

    def __post_init__(self) -> None:
        require_ranges(self, "")
        require_ranges(self, "hard_")
        require_remainders(self, "")
        require_remainders(self, "hard_")
        require(len(self.families) > 0, "families", "[]", "at least one family", "write families: [sums]")
        for name in ("hard_share", "guess_share", "careful_share", "slip_rate", "careful_first", "warmup"):
            share = getattr(self, name)
            require(0 <= share <= 1, name, share, "between 0 and 1", "it is a share")
        for field in fields(self):
            # A base may be any number; ranges of numbers and moduli have been checked.
            if field.type == "int" and field.name != "base" and not re.search("number_|modulus", field.name):
                value = getattr(self, field.name)
                require(value >= 1, field.name, value, "at least 1", "nothing can be built without it")
        modes = self.guess_share + self.careful_share
        remedy = "the rest is the share of rambling, so lower one of the two"
        require(modes <= 1, "guess_share + careful_share", modes, "at most 1", remedy)
        remedy = "at 1 no rambling answer would ever end"
        require(0 <= self.check_again < 1, "check_again", self.check_again, "in [0, 1)", remedy)
        rule = f"a divisor of batch_size ({self.batch_size})"
        require(self.batch_size % self.slices == 0, "slices", self.slices, rule, "slices have equal size")
        remedy = "rotary embeddings turn pairs of numbers"
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even", remedy)
        remedy = "AdamW needs a step to take"
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0", remedy)

    def known_context(self) -> int:
        return self.max_positions

    def at_hand(self) -> Path | None:
        return self.resolve() if find_shipped(self.key()) or self._folder.is_dir() else None

    @property
    def _folder(self) -> Path:
        return cache_root() / "bases" / self.key()

    def resolve(self) -> Path:
        """The cached folder of this recipe: weights, tokenizer, recipe.json and report.json.

        Unpacked or built on first use: unpacked if the base came with grpo_lab, built otherwise. Other processes that
        need it wait for the one that builds. An interrupted build leaves nothing that could be taken for a model.
        Raises ValueError if the files are not those that were written.
        """
        return make_checksummed(self._folder, self._make)

    def _make(self, folder: Path) -> None:
        came = find_shipped(self.key())
        if came is None:
            build(self, folder)
        else:
            write_report(folder, unpack(self, came.weights, folder), came.report)

    def kinds(self, prefix: str = "") -> Kinds:
        """The questions to train on; `prefix` "hard_" gives the harder ones."""
        names = ("addends_min", "addends_max", "number_min", "number_max", "modulus", "modulus_share")
        numbers = {name: getattr(self, prefix + name) for name in names}
        return Kinds(**numbers, families=tuple(self.families), withheld=frozenset(self.withheld_numbers))

    def tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        """One token per character of this recipe's questions and answers."""
        return build_tokenizer(self.max_positions, symbols_of(self.families, max(self.modulus, self.hard_modulus)))

    def written(self) -> dict[str, Any]:
        """The recipe and its code version as plain values."""
        families = [family.value for family in self.families]
        return {"code_version": CODE_VERSION, **asdict(self), "families": families}

    @classmethod
    def from_written(cls, written: Mapping[str, Any]) -> ArithmeticBase:
        """The recipe that `written` gave."""
        given: dict[str, Any] = {name: value for name, value in written.items() if name != "code_version"}
        given["families"] = [Family(name) for name in given["families"]]
        return cls(**given)

    def key(self) -> str:
        """Cache key of the recipe and its code version, 16 hexadecimal digits."""
        recipe = json.dumps(self.written(), sort_keys=True)
        return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def draw_example(recipe: ArithmeticBase, rng: Random, careful_only: bool) -> Example:
    """One problem from the training buckets and one answer to it."""
    hard = "hard_" if rng.random() < recipe.hard_share else ""
    chain = draw_chain(rng, "train", recipe.kinds(hard))
    question, answer = chain.question, str(chain.answer)
    mode = rng.random()
    if not careful_only and mode < recipe.guess_share:
        guess = draw_guess(rng, chain, recipe.guess_spread)
        return Example(question, f"{FINAL}{guess}", answer, finished=True)
    steps, total = careful_steps(rng, chain, recipe.slip_rate, recipe.slip_spread)
    final = f"{FINAL}{total}"
    if careful_only or mode < recipe.guess_share + recipe.careful_share:
        return Example(question, steps + final, answer, finished=True)
    rambling = steps + CHECK_AGAIN + steps
    while rng.random() < recipe.check_again and len(rambling) < recipe.ramble_max_tokens:
        rambling += CHECK_AGAIN + steps
    rambling += final
    finished = len(rambling) <= recipe.ramble_max_tokens
    return Example(question, rambling[: recipe.ramble_max_tokens], answer, finished)


def draw_guess(rng: Random, chain: Chain, spread: int) -> int:
    """A number at most `spread` from the answer and not below zero; of a remainder, any that it can be."""
    if chain.modulus:
        return rng.randrange(chain.modulus)
    return rng.randint(max(0, chain.answer - spread), chain.answer + spread)


def encode_slice(tokenizer: transformers.PreTrainedTokenizerFast, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Token ids and next-token labels, both int64 [examples, longest], padded on the right.

    Causal attention never looks right, so padding there needs no mask. Only the response and its end of text have
    labels.
    """
    end, padding = ending_ids(tokenizer)
    prompts = tokenizer([example.question for example in examples])["input_ids"]
    responses = tokenizer([example.response for example in examples])["input_ids"]
    rows = [
        prompt + response + [end] * example.finished
        for prompt, response, example in zip(prompts, responses, examples, strict=True)
    ]
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), padding)
    labels = torch.full((len(rows), longest), _IGNORED)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        # The label of a position is the token after it.
        labels[index, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
    return tokens, labels


def ending_ids(tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[int, int]:
    """The ids of the end of text and of padding."""
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(end, int) and isinstance(padding, int), "build_tokenizer gives it both"
    return end, padding


def learning_rate_at(recipe: ArithmeticBase, step: int) -> float:
    """Learning rate at `step`: linear warm-up, then half a cosine down to zero."""
    warmup_steps = max(1, round(recipe.warmup * recipe.steps))
    rising = (step + 1) / warmup_steps
    falling = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return recipe.learning_rate * min(rising, falling)


def architecture(recipe: ArithmeticBase, tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.LlamaConfig:
    """The recipe's architecture as a `transformers` configuration."""
    end, padding = ending_ids(tokenizer)
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        initializer_range=recipe.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )


def train(recipe: ArithmeticBase, tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.LlamaForCausalLM:
    """Supervised training from random weights. The caller handles the random state and the number of threads."""
    torch.manual_seed(recipe.base)
    rng = Random(recipe.base)
    model = transformers.LlamaForCausalLM(architecture(recipe, tokenizer))
    model.to(recipe.place)  # pyright: ignore[reportArgumentType] transformers wraps `to` in a way that hides its self
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
    )
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Terminal()) as progress:
        bar = progress.add_task("building the base model", total=recipe.steps, loss=math.nan)
        for step in range(recipe.steps):
            careful_only = step < recipe.careful_first * recipe.steps
            examples = [draw_example(recipe, rng, careful_only) for _ in range(recipe.batch_size)]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(recipe, step)
            loss = _step(recipe, model, optimizer, tokenizer, examples)
            progress.update(bar, advance=1, loss=loss)
    return model.eval()


def _step(
    recipe: ArithmeticBase,
    model: transformers.LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokenizer: transformers.PreTrainedTokenizerFast,
    examples: Sequence[Example],
) -> float:
    """One optimiser step over the whole batch, computed in slices of similar length.

    Every slice divides by the batch's number of labels, so slicing saves padding and does not change the gradient.
    """
    by_length = sorted(examples, key=lambda example: len(example.question) + len(example.response))
    size = recipe.batch_size // recipe.slices
    slices = [encode_slice(tokenizer, by_length[start : start + size]) for start in range(0, recipe.batch_size, size)]
    num_labels = sum(int((labels != _IGNORED).sum()) for _, labels in slices)
    total = 0.0
    for tokens, labels in slices:
        tokens, labels = tokens.to(model.device), labels.to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum"
        )
        (loss / num_labels).backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total / num_labels


def measure(
    recipe: ArithmeticBase, model: transformers.LlamaForCausalLM, tokenizer: transformers.PreTrainedTokenizerFast
) -> dict[str, float]:
    """The starting point of RL: accuracy, truncated share and mode shares, from one sampled answer per problem.

    Temperature 1, `report_problems` problems drawn anew from the training buckets, at most `report_max_tokens` tokens
    each. Shares are of all answers. `mean_tokens` counts the end of text. A truncated answer is wrong.
    """
    rng = Random(f"{recipe.base}/report")
    problems = [draw_chain(rng, "train", recipe.kinds()) for _ in range(recipe.report_problems)]
    prompts = tokenizer([chain.question for chain in problems], padding=True, return_tensors="pt").to(model.device)
    generated = model.generate(  # pyright: ignore[reportAttributeAccessIssue] it asks more of self than Llama declares
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=recipe.report_max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )[:, prompts["input_ids"].shape[1] :]
    verifier = Strict(correct=1.0, wrong=0.0)
    counts: Counter[str] = Counter()
    for chain, row in zip(problems, generated.tolist(), strict=True):
        finished = tokenizer.eos_token_id in row
        response = row[: row.index(tokenizer.eos_token_id)] if finished else row
        text = tokenizer.decode(response)
        assert isinstance(text, str), "a list of lists would give a list"
        counts["tokens"] += len(response) + finished
        counts["correct"] += int(
            verifier(Problem(0, chain.question, str(chain.answer), len(chain.numbers)), text, finished)
        )
        counts["truncated"] += not finished
        counts[answer_mode(text)] += 1
    total = len(problems)
    return {
        "accuracy": counts["correct"] / total,
        "truncated_share": counts["truncated"] / total,
        **{f"{mode}_share": counts[mode] / total for mode in ("guess", "careful", "ramble")},
        "mean_tokens": counts["tokens"] / total,
    }


def build(recipe: ArithmeticBase, folder: Path) -> None:
    """Train and measure the model and write it into `folder`. Restores the caller's random state and threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with torch.random.fork_rng(devices=[] if recipe.place == "cpu" else [recipe.place]):
            model = train(recipe, recipe.tokenizer())
            report = measure(recipe, model, recipe.tokenizer())
    finally:
        torch.set_num_threads(threads)
    _write(recipe, model, folder)
    write_report(folder, model, report)


def unpack(recipe: ArithmeticBase, weights: Path, folder: Path) -> transformers.LlamaForCausalLM:
    """Write the model of `recipe` with these weights, in fp32, into `folder`, and return it."""
    from safetensors.torch import load_file  # it loads torch, which a command that only speaks does without

    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(architecture(recipe, recipe.tokenizer()))
    missing, unknown = model.load_state_dict(load_file(weights), strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, "the head is the embedding"
    _write(recipe, model, folder)
    return model


def _write(recipe: ArithmeticBase, model: transformers.LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    recipe.tokenizer().save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(recipe.written(), indent=2) + "\n")


def write_report(folder: Path, model: transformers.LlamaForCausalLM, report: Mapping[str, float | int]) -> None:
    """The size of the model of `folder` and what it answers, as its report.json."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    (folder / "report.json").write_text(json.dumps({"parameters": parameters, **report}, indent=2) + "\n")
