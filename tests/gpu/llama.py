"""Random Llamas as folders for model=hf, made on the spot: no hub and no download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lab.tasks.arithmetic import EOS, PAD, SYMBOLS, build_tokenizer

NEVER = "<never>"  # an end of text beyond the model's vocabulary, which no softmax can draw
_TOKENIZER_FILES = ("token", "special_tokens", "added_tokens", "vocab", "merges", "generation_config")


def talkative(folder: Path, small: bool) -> Path:
    """A model over the arithmetic world's symbols that ends its responses by chance, at many lengths."""
    tokenizer = build_tokenizer(max_length=512)
    width, layers = (32, 2) if small else (256, 6)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        # Random tokens are told apart, and the end of text is no rare one.
        initializer_range=1.5 / width**0.5, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return _save(config, tokenizer, folder)


def like_smollm2(folder: Path, small: bool) -> Path:
    """Random weights in the sizes of SmolLM2-135M (arXiv:2502.02737): 134.5 M, its output head the embedding's."""
    vocabulary, width, layers, heads, inner = (512, 64, 2, 4, 128) if small else (49152, 576, 30, 9, 1536)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=3 if heads == 9 else 2, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return _save(config, _words(vocabulary), folder)


def _save(config: LlamaConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _words(vocabulary: int) -> PreTrainedTokenizerFast:
    """The arithmetic world's symbols, a character each, and made-up words up to `vocabulary`."""
    known = [PAD, EOS, *SYMBOLS]
    words = known + [f"w{number} " for number in range(len(known), vocabulary)]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD, padding_side="left")


def endless(folder: Path, target: Path) -> Path:
    """The same weights with an end of text that is never drawn, so that the budget alone fixes every length."""
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if not file.name.startswith(_TOKENIZER_FILES):
            (target / file.name).symlink_to(file.resolve())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.add_special_tokens({"eos_token": NEVER, "pad_token": padding})
    end = tokenizer.eos_token_id
    vocabulary = LlamaConfig.from_pretrained(folder).vocab_size
    if end < vocabulary:
        raise ValueError(f"{folder} has a row for token {end}: its tokenizer has fewer tokens than its embedding")
    tokenizer.save_pretrained(target)
    GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id).save_pretrained(target)
    return target
