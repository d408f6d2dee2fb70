"""Turns a sequence's tokens into text one at a time, without ever splitting a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Set
from contextlib import suppress
from functools import partial

from cllm.backend import Vocabulary
from cllm.errors import call_foreign


class TokenTexts:
    """What each token of a vocabulary adds to a text, looked up once and then shared by all sequences.

    Control tokens add nothing, except those in `shown`, which add their name (``<|tool_call|>``): the parsers of tool calls and of
    reasoning may need to see some. Sequences that show different tokens need different tables.
    """

    __slots__ = ("_all_bytes", "_shown", "_vocabulary", "whole")

    def __init__(self, vocabulary: Vocabulary, *, shown: Set[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._all_bytes: dict[int, bytes] = {}
        self.whole: dict[int, str] = {}  # of the tokens seen so far, those that are whole characters by themselves

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text. Raises: IndexError for a token that the vocabulary does not have."""
        known = self._all_bytes.get(token)
        if known is not None:
            return known
        data = call_foreign(partial(self._vocabulary.token_bytes, token, special=token in self._shown))
        self._all_bytes[token] = data
        # What a part of a character says depends on its neighbours.
        with suppress(UnicodeDecodeError):
            self.whole[token] = data.decode("utf-8")
        return data


class Detokenizer:
    """The text of one sequence.

    All that `push` returns, and then `flush`, is together exactly ``b"".join(token bytes).decode("utf-8", "replace")``, wherever
    the characters are split between tokens.

    A leading space is kept: vocabularies of SentencePiece spell a word's beginning as a space, and what was generated goes on from
    a prompt, so the space is the model's answer and not an ornament of the tokeniser. (llama.cpp's server does the same.)
    """

    __slots__ = ("_pending", "_texts", "_whole")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._whole = texts.whole
        self._pending = b""  # an incomplete character: at most three bytes

    def push(self, token: int) -> str:
        """Return the text that `token` completes; "" while its last character is undecided.

        Raises: IndexError for a token that the vocabulary does not have; the text is as it was.
        """
        # An incomplete character ends at the next token or grows, so whole tokens after it are not whole: "\xed" + "a".
        if not self._pending:
            text = self._whole.get(token)
            if text is not None:
                return text
        data = self._pending + self._texts.bytes_of(token)
        text, n_used = utf_8_decode(data, "replace", False)
        self._pending = data[n_used:]
        return text

    def flush(self) -> str:
        """Return what is left, an incomplete character as U+FFFD, and begin anew."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text
