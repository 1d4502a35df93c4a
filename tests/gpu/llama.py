"""Random Llamas as folders for model=hf, made on the spot: no hub and no download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lab.tasks.arithmetic import EOS, PAD, SYMBOLS, build_tokenizer

_CONSTANT, _BELOW = 8.0, 50.0  # of every token's embedding, and of that of an end of text that is never drawn


def talkative(folder: Path, small: bool, ends: bool = True) -> Path:
    """A model over the arithmetic world's symbols that ends its responses by chance, at many lengths, or never."""
    tokenizer = build_tokenizer(max_length=512)
    width, layers = (32, 2) if small else (256, 6)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        # Random tokens are told apart, and the end of text is no rare one.
        initializer_range=1.5 / width**0.5, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return _save(config, tokenizer, folder, ends)


def like_smollm2(folder: Path, small: bool) -> Path:
    """Random weights in the sizes of SmolLM2-135M (arXiv:2502.02737): 134.5 M, its output head the embedding's.

    It never ends a response, so every response has the token limit's length.
    """
    vocabulary, width, layers, heads, inner = (512, 64, 2, 4, 128) if small else (49152, 576, 30, 9, 1536)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=3 if heads == 9 else 2, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return _save(config, _words(vocabulary), folder, ends=False)


def asked_by_chat(folder: Path) -> Path:
    """A small random model whose tokens are bytes, with a chat template: it reads any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate([*alphabet, EOS, PAD])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD, padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return _save(config, tokenizer, folder)


def _save(config: LlamaConfig, tokenizer: PreTrainedTokenizerFast, folder: Path, ends: bool = True) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    if not ends:
        _never_ends(model.get_input_embeddings().weight, tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def _never_ends(embedding: torch.Tensor, end: int) -> None:
    """Give the end of text a logit over a hundred below all others, in a model whose output head is this embedding.

    The first number of every state is about that of the tokens' embeddings, since no layer adds much to it.
    """
    embedding[:, 0] = _CONSTANT
    embedding[end, 0] = -_BELOW


def _words(vocabulary: int) -> PreTrainedTokenizerFast:
    """The arithmetic world's symbols, a character each, and made-up words up to `vocabulary`."""
    known = [PAD, EOS, *SYMBOLS]
    words = known + [f"w{number} " for number in range(len(known), vocabulary)]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD, padding_side="left")
