"""Trains the byte-level BPE vocabulary, with qwen2's pre-tokeniser (digits one by one)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# llama.cpp's `LLAMA_VOCAB_PRE_TYPE_QWEN2`.
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPACE = "Ġ"  # how byte-level BPE writes a space


def _splits(*more: Any) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), "isolated"), *more, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _pieces(texts: list[str], n_pieces: int) -> dict[str, Any]:
    """BPE whose letters never merge with the space or quote before them.

    So a word has the same pieces after a space, after a quote and at the start of a line, and a model this small can copy
    it from one place to the other instead of spelling it anew.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = _splits(pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=n_pieces, initial_alphabet=alphabet, show_progress=False))
    return json.loads(raw.to_str())["model"]  # type: ignore[no-any-return]


def _common_words(texts: list[str], vocabulary: dict[str, int], n_words: int) -> list[str]:
    """The most frequent words that are one piece each: these may swallow the space before them."""
    counts: Counter[str] = Counter()
    splitter = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    for text in texts:
        counts.update(piece[1:] for piece, _ in splitter.pre_tokenize_str(text) if piece[0] == " " and piece[1:].isascii())
    return [word for word, _ in counts.most_common() if word.isalpha() and word in vocabulary][:n_words]


def assemble(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _splits()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL + USER_DEFINED))
    return tokenizer


def train(texts: Iterable[str], n_vocab: int, n_spaced: int) -> Tokenizer:
    """Return a tokenizer of exactly `n_vocab` tokens, of which `n_spaced` are a space and a word."""
    kept = list(texts)
    model = _pieces(kept, n_vocab - n_spaced - len(CONTROL) - len(USER_DEFINED))
    vocabulary: dict[str, int] = model["vocab"]
    merges = [tuple(merge) for merge in model["merges"]]
    # Last in the list, so they apply after all the others and leave the pieces of other words alone.
    for word in _common_words(kept, vocabulary, n_spaced):
        vocabulary[SPACE + word] = len(vocabulary)
        merges.append((SPACE, word))
    return assemble(vocabulary, merges)
