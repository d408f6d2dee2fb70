"""From the text of a prompt to its tokens: one way for all who answer prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cllm.backend import InfillTokens, Vocabulary

N_CHARS_SHORT: Final = 4096  # such texts have threads and, in a process of its own, a tokeniser that never wait for longer ones


def prompt_tokens(vocabulary: Vocabulary, text: str, *, is_conversation: bool) -> list[int]:
    """The token ids of `text`, with bos where the model wants it and special tokens read as such, in what users wrote too.

    So does llama-server. A conversation's template may write bos itself; it does not get a second one.

    Raises: TokenizeFailed.
    """
    tokens = [*leading(vocabulary), *vocabulary.tokenize(text, add_special=False, parse_special=True)]
    if is_conversation and vocabulary.adds_bos and tokens[:2] == [vocabulary.bos, vocabulary.bos]:
        return tokens[1:]
    return tokens


def leading(vocabulary: Vocabulary) -> list[int]:
    """What stands before a prompt. Nothing stands behind one that is to be gone on from, though some files ask for eos behind texts."""
    return [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos is not None else []


def without_bos(vocabulary: Vocabulary, text: str) -> str:
    """A rendered conversation as a text for others to send, who are given a bos then: without the one that the template wrote."""
    if not vocabulary.adds_bos or vocabulary.bos is None:
        return text
    return text.removeprefix(vocabulary.token_bytes(vocabulary.bos, special=True).decode("utf-8", "replace"))


def infill_tokens(vocabulary: Vocabulary, infill: InfillTokens, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """The token ids that ask for what stands between `prefix` and `suffix`: the prefix first, as most models were trained."""
    return [*leading(vocabulary), infill.prefix, *prefix, infill.suffix, *suffix, infill.middle]
