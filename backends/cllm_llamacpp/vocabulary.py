"""A model's tokens: tokenising, the bytes of tokens, and the facts about special tokens."""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import nullcontext
from typing import Any, Final

from cllm.backend import InfillTokens
from cllm.bigstack import NoStack, call_with_stack
from cllm.errors import LoadFailed, ModelDied, TokenizeFailed

# Most of llama.cpp's pre-tokenisers are std::regex, which recurses for each character of a run: 321 bytes of stack for each byte of
# text with GCC's library, measured over 34 pre-tokenisers and runs of 21 kinds (tests/llamacpp/test_tokenizer_limits.py tries the
# worst). Twice that leaves room for other compilers.
_STACK_PER_BYTE: Final = 640
_STACK_BASE: Final = 1 << 20
_N_BYTES_INLINE: Final = 1024  # 640 KiB of stack; CPython's threads have 1 MiB or more on every platform
_N_BYTES_DEEP: Final = 1 << 16  # texts beyond this are tokenised one at a time: together their stacks could take all memory
_N_BYTES_MAX: Final = 1 << 22  # 2.5 GiB of stack

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_TOO_SLOW: Final = {"superbpe": re.compile(rb"[0-9]{1000}")}
"""What takes a pre-tokeniser time that grows with the square of its length: 20,000 digits take superbpe 20 s."""


_NONE: Final = 0  # LLAMA_VOCAB_TYPE_NONE


def check_vocabulary(lib: Any, model: Any, path: str) -> None:
    """Refuse a file that has no tokens: the first text that it gets would end the process. Raises: LoadFailed."""
    if lib.llama_vocab_type(lib.llama_model_get_vocab(model)) == _NONE:
        raise LoadFailed(f"{path}: it has no vocabulary, so there is no text that it could read or write")


class LlamaVocabulary:
    """See `cllm.backend.Vocabulary`. Calls after `close` raise ModelDied; `close` waits for those under way."""

    def __init__(self, lib: Any, model: Any, pre: str = "") -> None:
        """`pre` is the pre-tokeniser's name in the metadata."""
        self._lib = lib
        self._vocab = lib.llama_model_get_vocab(model)
        self._too_slow = _TOO_SLOW.get(pre)
        self._users = _Users()
        self._deep_lock = threading.Lock()
        self.n_tokens: int = lib.llama_vocab_n_tokens(self._vocab)
        self.bos = _token(lib.llama_vocab_bos(self._vocab))
        self.eos = _token(lib.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self._vocab)) and self.bos is not None
        self._can_add_special = _can_add_special(lib, self._vocab)
        self.end_tokens = frozenset(t for t in range(self.n_tokens) if lib.llama_vocab_is_eog(self._vocab, t))
        self.infill = _infill(lib, self._vocab)
        self.chat_template = _text(lib.llama_model_chat_template(model, None))
        self._bytes: dict[bool, list[bytes | None]] = {special: [None] * self.n_tokens for special in (False, True)}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = _utf8(text)
        self._check(data)
        with self._users:
            if len(data) <= _N_BYTES_INLINE:
                return self._tokenize(data, add_special, parse_special)
            return self._tokenize_deep(data, add_special, parse_special)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        if token < 0:
            raise IndexError(f"token {token} of {self.n_tokens}")
        cache = self._bytes[special]
        piece = cache[token]
        if piece is None:  # computed twice at worst, when two threads ask at once
            with self._users:
                piece = cache[token] = self._piece(token, special)
        return piece

    def close(self) -> None:
        self._users.close()

    def _tokenize_deep(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        with self._deep_lock if len(data) > _N_BYTES_DEEP else nullcontext():
            try:
                return call_with_stack(lambda: self._tokenize(data, add_special, parse_special), _STACK_BASE + len(data) * _STACK_PER_BYTE)
            except NoStack:
                raise TokenizeFailed(f"no stack is to be had for a text of {len(data)} bytes") from None

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        add_special = add_special and self._can_add_special
        n = len(data) + 8  # seldom more tokens than bytes; the second call is for then
        while True:
            buffer = (ctypes.c_int32 * n)()
            found = self._lib.llama_tokenize(self._vocab, data, len(data), buffer, n, add_special, parse_special)
            if found >= 0:
                return buffer[:found]
            n = -found

    def _piece(self, token: int, special: bool) -> bytes:
        n = 64
        while True:
            buffer = ctypes.create_string_buffer(n)
            length = self._lib.llama_token_to_piece(self._vocab, token, buffer, n, 0, special)
            if length >= 0:
                return buffer.raw[:length]
            n = -length

    def _check(self, data: bytes) -> None:
        if len(data) > _N_BYTES_MAX:
            raise TokenizeFailed(f"the text has {len(data)} bytes; the tokeniser takes {_N_BYTES_MAX} at most")
        if self._too_slow is not None and self._too_slow.search(data):
            raise TokenizeFailed("the text has a run of digits that this model's tokeniser would take too long for")


class _Users:
    """Counts the calls under way, so that the native vocabulary is not freed under one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._n = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._condition:
            if self._closed:
                raise ModelDied("the model is closed")
            self._n += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._n -= 1
            self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: self._n == 0)


def _can_add_special(lib: Any, vocab: Any) -> bool:
    """Return whether special tokens may be asked for: a file that wants bos or eos without naming it ends at an assertion."""
    no_bos = lib.llama_vocab_get_add_bos(vocab) and lib.llama_vocab_bos(vocab) < 0
    no_eos = lib.llama_vocab_get_add_eos(vocab) and lib.llama_vocab_eos(vocab) < 0
    return not no_bos and not no_eos


def _infill(lib: Any, vocab: Any) -> InfillTokens | None:
    tokens = [_token(find(vocab)) for find in (lib.llama_vocab_fim_pre, lib.llama_vocab_fim_suf, lib.llama_vocab_fim_mid)]
    prefix, suffix, middle = tokens
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(prefix, suffix, middle)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text).encode()


def _token(token: int) -> int | None:
    return None if token < 0 else token  # LLAMA_TOKEN_NULL is -1


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
