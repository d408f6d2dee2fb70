"""A model's tokens: tokenising, the bytes of tokens, and the facts about special tokens."""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import nullcontext
from typing import Any, Final

import attrs

from cllm.backend import InfillTokens
from cllm.bigstack import NoStack, call_with_stack
from cllm.errors import LoadFailed, ModelDied, TokenizeFailed
from cllm_llamacpp.names import N_BYTES_PIECE, Names, names_of

# Most of llama.cpp's pre-tokenisers are std::regex, which recurses for each character of a run: 321 bytes of stack for each byte of
# text with GCC's library, measured over 34 pre-tokenisers and runs of 21 kinds (tests/llamacpp/test_tokenizer_limits.py tries the
# worst). Twice that leaves room for other compilers.
_STACK_PER_BYTE: Final = 640
_STACK_BASE: Final = 1 << 20
_N_BYTES_INLINE: Final = 1024  # 640 KiB of stack; CPython's threads have 1 MiB or more on every platform
_N_BYTES_DEEP: Final = 1 << 16  # texts beyond this are tokenised one at a time: together their stacks could take all memory
_N_BYTES_MAX: Final = 1 << 22  # 2.5 GiB of stack

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")

_TOO_SLOW: Final = {"superbpe": re.compile(rb"[0-9]{40,}")}
"""Runs that take a pre-tokeniser time that grows with the square of their length: 20,000 digits take superbpe 20 s. All that there is room
for of shorter ones take seconds.
"""
_N_SQUARE_MAX: Final = 20_000_000  # of all runs together, which take a second


_NONE: Final = 0  # LLAMA_VOCAB_TYPE_NONE
_SENTENCEPIECE: Final = 1  # LLAMA_VOCAB_TYPE_SPM
_BPE: Final = 2  # LLAMA_VOCAB_TYPE_BPE
_BLANK: Final = "\u2581"  # as SentencePiece writes it
_N_TOKENS_FIRST: Final = 1024  # among which the bytes' tokens usually are


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
        self._adds_eos = bool(lib.llama_vocab_get_add_eos(self._vocab))
        self._can_add_special = _can_add_special(lib, self._vocab)
        self._names: dict[bool, Names | None] = {}  # of long texts, by whether control tokens are parsed
        self._may_cut = lib.llama_vocab_type(self._vocab) in (_SENTENCEPIECE, _BPE)  # which keep nothing from one part to the next
        self._lacking = _lacking(lib, self._vocab, self.n_tokens)
        self.end_tokens = frozenset(t for t in range(self.n_tokens) if lib.llama_vocab_is_eog(self._vocab, t))
        self.infill = _infill(lib, self._vocab)
        self.suppressed = _suppressed(lib, self._vocab)  # that the model may never say, by its file
        self.chat_template = _text(lib.llama_model_chat_template(model, None))
        self.tool_template = _text(lib.llama_model_chat_template(model, b"tool_use"))
        self._bytes: dict[bool, list[bytes | None]] = {special: [None] * self.n_tokens for special in (False, True)}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = _utf8(text)
        self._check(data)
        if self._lacking is not None:
            self._lacking.check(data)
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
        pieces = self._pieces(data, parse_special)

        def tokenize() -> list[int]:
            if len(pieces) == 1:
                return self._tokenize(data, add_special, parse_special)
            tokens = [token for piece in pieces for token in self._tokenize(piece, False, parse_special)]
            return [*self._before(add_special), *tokens, *self._behind(add_special)]

        with self._deep_lock if len(data) > _N_BYTES_DEEP else nullcontext():
            try:
                return call_with_stack(tokenize, _STACK_BASE + max(map(len, pieces)) * _STACK_PER_BYTE)
            except NoStack:
                raise TokenizeFailed(f"no stack is to be had for a text of {len(data)} bytes") from None

    def _pieces(self, data: bytes, parse_special: bool) -> list[bytes]:
        """A long text in pieces that have the tokens of the whole."""
        if len(data) <= 2 * N_BYTES_PIECE:
            return [data]
        if parse_special not in self._names:  # found twice at worst, as pieces of tokens
            self._names[parse_special] = names_of(self._lib, self._vocab, self.n_tokens, parse_special=parse_special)
        names = self._names[parse_special]
        return [data] if names is None else list(names.pieces(data, may_cut=self._may_cut))

    def _before(self, add_special: bool) -> list[int]:
        return [self.bos] if add_special and self._can_add_special and self.adds_bos and self.bos is not None else []

    def _behind(self, add_special: bool) -> list[int]:
        return [self.eos] if add_special and self._can_add_special and self._adds_eos and self.eos is not None else []

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
        runs = () if self._too_slow is None else self._too_slow.finditer(data)
        if sum((run.end() - run.start()) ** 2 for run in runs) > _N_SQUARE_MAX:
            raise TokenizeFailed("the text has runs of digits that this model's tokeniser would take too long for")


@attrs.frozen
class _Lacking:
    """What a vocabulary has instead of a token for every byte: llama.cpp ends the process where a text needs a byte's that is not there
    (`byte_to_token` in llama-vocab.cpp).
    """

    characters: frozenset[bytes]  # that have tokens, in UTF-8
    bytes_: frozenset[int]  # that have none

    def check(self, data: bytes) -> None:
        """Raises: TokenizeFailed for a character that would need one. One that has no token but within longer ones is refused as well."""
        for character in {_BLANK, *data.decode("utf-8").replace(" ", _BLANK)}:
            encoded = character.encode("utf-8")
            if encoded not in self.characters and not self.bytes_.isdisjoint(encoded):
                raise TokenizeFailed(f"this model's vocabulary has no token for {character!r}, and none for its bytes")


def _lacking(lib: Any, vocab: Any, n_tokens: int) -> _Lacking | None:
    """What a vocabulary lacks; None where no text can need it."""
    if lib.llama_vocab_type(vocab) != _SENTENCEPIECE:
        return None
    texts: set[bytes] = set()
    for first in range(0, n_tokens, _N_TOKENS_FIRST):
        texts.update(lib.llama_vocab_get_text(vocab, token) for token in range(first, min(first + _N_TOKENS_FIRST, n_tokens)))
        if not first and not _missing(texts):
            return None
    missing = _missing(texts)
    return _Lacking(frozenset(text for text in texts if len(text.decode("utf-8", "replace")) == 1), missing) if missing else None


def _missing(texts: set[bytes]) -> frozenset[int]:
    return frozenset(byte for byte in range(256) if b"<0x%02X>" % byte not in texts and bytes([byte]) not in texts)


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


def _suppressed(lib: Any, vocab: Any) -> list[int]:
    """Return the tokens that llama.cpp's own programs never draw: some model's images and sounds, which have no text."""
    n = ctypes.c_int32(0)
    tokens = lib.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(n))
    return [int(token) for token in tokens[: n.value]] if tokens else []


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub("\ufffd", text).encode()


def _token(token: int) -> int | None:
    return None if token < 0 else token  # LLAMA_TOKEN_NULL is -1


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
