"""A model's tokens: tokenising, the bytes of tokens, and the facts about special tokens."""

from __future__ import annotations

import ctypes
import re
import threading
from typing import Any, Final

from cllm.errors import ModelDied, TokenizeFailed
from cllm_llamacpp.bigstack import BigStackThread

# Most of llama.cpp's pre-tokenisers are std::regex, which recurses once or more for each character of a run. The worst of them was
# seen to take _STACK_PER_BYTE of stack per byte of text (tests/llamacpp/test_tokenizer_limits.py tries them all).
_STACK_PER_BYTE: Final = 640
_N_BYTES_INLINE: Final = 1024  # needs 640 KiB; CPython's threads have 1 MiB or more on every platform
_N_BYTES_MAX: Final = 1 << 24

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class LlamaVocabulary:
    """See `cllm.backend.Vocabulary`. Calls after `close` raise ModelDied; `close` waits for those under way."""

    def __init__(self, lib: Any, model: Any) -> None:
        self._lib = lib
        self._vocab = lib.llama_model_get_vocab(model)
        self._users = _Users()
        self._big_stack: BigStackThread | None = None
        self._big_stack_lock = threading.Lock()
        self.n_tokens: int = lib.llama_vocab_n_tokens(self._vocab)
        self.bos = _token(lib.llama_vocab_bos(self._vocab))
        self.eos = _token(lib.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self._vocab)) and self.bos is not None
        self._adds_eos = bool(lib.llama_vocab_get_add_eos(self._vocab)) and self.eos is not None
        self.end_tokens = frozenset(t for t in range(self.n_tokens) if lib.llama_vocab_is_eog(self._vocab, t))
        self.chat_template = _text(lib.llama_model_chat_template(model, None))
        self._bytes: dict[bool, list[bytes | None]] = {special: [None] * self.n_tokens for special in (False, True)}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = _utf8(text)
        # A file that asks for bos without naming one would stop the process at an assertion of llama.cpp.
        add_special = add_special and (self.adds_bos or self._adds_eos)
        with self._users:
            if len(data) <= _N_BYTES_INLINE:
                return self._tokenize(data, add_special, parse_special)
            big_stack = self._start_big_stack()
            self._check_length(len(data), big_stack.stack_bytes)
            return big_stack.call(lambda: self._tokenize(data, add_special, parse_special))

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
        if self._big_stack is not None:
            self._big_stack.stop()
            self._big_stack = None

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
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

    def _check_length(self, n_bytes: int, stack_bytes: int) -> None:
        n_bytes_max = min(_N_BYTES_MAX, stack_bytes // _STACK_PER_BYTE)
        if n_bytes > n_bytes_max:
            raise TokenizeFailed(f"the text has {n_bytes} bytes; this model's tokeniser takes {n_bytes_max} at most")

    def _start_big_stack(self) -> BigStackThread:
        with self._big_stack_lock:
            if self._big_stack is None:
                self._big_stack = BigStackThread()
            return self._big_stack


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


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text).encode()


def _token(token: int) -> int | None:
    return None if token < 0 else token  # LLAMA_TOKEN_NULL is -1


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
