"""Logprobs as the old completions API has them: parallel arrays over a text, the prompt's part too where it is echoed."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from cllm.api.openai.shapes import TokenNames, finite
from cllm.engine.events import TokenLogprob


class LegacyLogprobs:
    """The arrays over one choice's text from its beginning to where it has got. An offset counts the characters before a token."""

    def __init__(self, names: TokenNames, n_top: int | None = None) -> None:
        """`n_top`: of the likeliest in a token's place so many; None: all that there are."""
        self._names = names
        self._n_top = n_top
        self._n_chars = 0
        self._decoder = _decoder()

    def prompt(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The arrays of an echoed prompt in one piece: `text` as it is echoed, and the logprobs of its tokens from the second on."""
        arrays = self.begin(n_before(self._names, text, tokens), tokens[0])
        _extend(arrays, self.go_on(logprobs))
        self.end_prompt(text)
        return arrays

    def begin(self, n_chars_before: int, first: int) -> dict[str, Any]:
        """The arrays of a prompt's first token, which has no logprob, behind so many characters of its own."""
        self._n_chars = -n_chars_before
        raw = self._names.raw(first)
        self._n_chars += len(self._decoder.decode(raw))
        return {**_arrays(), "tokens": [shown(raw)], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}

    def go_on(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The arrays of a prompt's next tokens."""
        arrays = _arrays()
        for one in logprobs:
            self._add(arrays, one, self._names.raw(one.token))
        return arrays

    def end_prompt(self, text: str) -> None:
        """The prompt is over: what comes stands after `text`."""
        self._n_chars = len(text)
        self._decoder = _decoder()

    def __call__(self, logprobs: Iterable[TokenLogprob], *, with_end: bool = False) -> dict[str, Any]:
        """The arrays of the next generated tokens; `with_end` also of the one that ends the text, and is no part of it."""
        arrays = _arrays()
        for one in logprobs if with_end else self._names.shown(logprobs):
            self._add(arrays, one, self._names.said(one.token))
        return arrays

    def _add(self, arrays: dict[str, Any], one: TokenLogprob, in_text: bytes) -> None:
        arrays["tokens"].append(shown(self._names.raw(one.token)))
        arrays["token_logprobs"].append(finite(one.logprob))
        arrays["top_logprobs"].append(self._top(one))
        arrays["text_offset"].append(max(self._n_chars, 0))
        self._n_chars += len(self._decoder.decode(in_text))

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*one.top[: self._n_top], (one.token, one.logprob)):  # the drawn one too, as OpenAI's
            top.setdefault(shown(self._names.raw(token)), finite(logprob))
        return top


def n_before(names: TokenNames, text: str, tokens: Sequence[int]) -> int:
    """Characters of a prompt's tokens before its text (bos, a blank that the tokeniser adds), which take no room in it."""
    return max(_text_of(names, tokens).rfind(text), 0)  # the last: bos, by its name, may have it too


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """Arrays that follow each other as one."""
    arrays = _arrays()
    for part in parts:
        _extend(arrays, part)
    return arrays


def prompt_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob], n_top: int) -> list[dict[str, Any] | None]:
    """For each of a prompt's tokens the likeliest in its place and itself, by id, as vLLM's `prompt_logprobs`; the first has none."""
    shape: list[dict[str, Any] | None] = [None]
    for one in logprobs:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top[:n_top], 1)}
        candidates = {**ranked, one.token: ranked.get(one.token, (one.logprob, one.rank))}
        shape.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": shown(names.raw(token))}
                for token, (logprob, rank) in candidates.items()
            }
        )
    return shape


def shown(raw: bytes) -> str:
    """A token's text; where it is a part of a character, OpenAI's way of writing bytes, so that different ones stay apart."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])


def _arrays() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _extend(arrays: dict[str, Any], more: dict[str, Any]) -> None:
    for name, values in more.items():
        arrays[name] += values


def _text_of(names: TokenNames, tokens: Sequence[int]) -> str:
    return b"".join([names.raw(token) for token in tokens]).decode("utf-8", "replace")


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
