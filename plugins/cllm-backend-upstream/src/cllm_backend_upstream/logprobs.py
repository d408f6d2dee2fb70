"""Logprobs as upstreams tell them: a conversation's by token, and in the older shape as parallel arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cllm.backend import StreamLogprob
from cllm_backend_upstream.failures import Garbled

Byte = Annotated[int, Meta(ge=0, le=255)]
_BYTE: Final = re.compile(rb"\\x([0-9a-f]{2})")  # how OpenAI writes a part of a character


class _Likely(msgspec.Struct):
    token: str
    logprob: float
    numbers: list[Byte] | None = msgspec.field(default=None, name="bytes")

    @property
    def raw(self) -> bytes:
        return raw_of(self.token) if self.numbers is None else bytes(self.numbers)


class _Token(_Likely):
    top_logprobs: list[_Likely] | None = None


class Logprobs(msgspec.Struct):
    """Those of one chunk, in either shape."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None

    def told(self) -> tuple[StreamLogprob, ...]:
        """Return them one by one. Raises: Garbled."""
        if self.content is not None:
            return tuple(StreamLogprob(one.raw, one.logprob, _top(one)) for one in self.content)
        if not self.tokens:
            return ()
        n = len(self.tokens)
        logprobs, tops = self.token_logprobs or [], self.top_logprobs or [None] * n
        if len(logprobs) != n or len(tops) != n or None in logprobs:
            raise Garbled("logprobs that do not fit their tokens")
        return tuple(
            StreamLogprob(raw_of(token), logprob or 0.0, _ranked(top or {}))
            for token, logprob, top in zip(self.tokens, logprobs, tops, strict=True)
        )


def raw_of(token: str) -> bytes:
    """Return the bytes of a token that is told as text."""
    text = token.encode("utf-8", "replace")
    if not text.startswith(b"bytes:"):
        return text
    return bytes(int(digits, 16) for digits in _BYTE.findall(text)) or text


def _top(one: _Token) -> tuple[tuple[bytes, float], ...]:
    return _likeliest_first((likely.raw, likely.logprob) for likely in one.top_logprobs or ())


def _ranked(top: dict[str, float]) -> tuple[tuple[bytes, float], ...]:
    return _likeliest_first((raw_of(token), logprob) for token, logprob in top.items())


def _likeliest_first(pairs: Iterable[tuple[bytes, float]]) -> tuple[tuple[bytes, float], ...]:
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
