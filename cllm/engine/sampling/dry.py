"""DRY ("don't repeat yourself"): penalises the tokens that would go on with a repetition of what was said before.

For every earlier place the state holds how many tokens before it agree with the end of the sequence. Appending a token changes this
only at the earlier places of that same token: there the agreement is one more than it was one place before. So a step costs one
vectorised operation over the token's earlier places, and nothing is searched.

Source of the definition: llama_sampler_dry_apply (llama.cpp, after p-e-w, oobabooga/text-generation-webui#5677). Breakers are single
tokens here: no repetition reaches across one.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits, Vocabulary
from cllm.engine.sampling.noise import Ids
from cllm.engine.sampling.penalties import Int64s, grown

_N_SEARCHES_KEPT = 128  # of a vocabulary; the letters of a text are some fifty
_one_at_a_time = threading.Lock()  # rows that want the same, sampled in several threads, would all make it
_MOST: float = float(np.finfo(np.float32).max)
_MAX_LOG: float = math.log(_MOST)  # beyond it base ** n is no float32 any more


@attrs.frozen(eq=False)
class TokenSet(AbstractSet[int]):
    """A set of token ids as one bit for each of the vocabulary's: what a request may make many of, and what crosses to another process."""

    bits: bytes  # of eight tokens each, the lowest first

    @classmethod
    def of(cls, is_in: npt.NDArray[np.bool_]) -> TokenSet:
        return cls(np.packbits(is_in, bitorder="little").tobytes())

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and 0 <= token < 8 * len(self.bits) and bool(self.bits[token >> 3] >> (token & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(np.unpackbits(np.frombuffer(self.bits, np.uint8), bitorder="little")).tolist())

    def __len__(self) -> int:
        return int.from_bytes(self.bits, "little").bit_count()

    def __eq__(self, other: object) -> bool:
        return self.bits == other.bits if isinstance(other, TokenSet) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.bits)


def dry_breaker_tokens(vocabulary: Vocabulary, breakers: tuple[str, ...]) -> TokenSet:
    """Return the tokens whose text contains one of `breakers`; remembered by the vocabulary object and the breakers.

    A breaker that only several tokens spell together breaks nothing; the usual ones are single characters, which cannot be split so.
    The first call for a vocabulary reads all of its tokens, 0.7 s of 152,000, and 64 new breakers take 0.02 s each time: a server has it
    done before a request is queued.
    """
    with _one_at_a_time:
        return _breaker_tokens(_Identity(vocabulary), breakers)


@attrs.frozen(eq=False)
class _Identity:
    """A vocabulary as a key: vocabularies need not be hashable."""

    vocabulary: Vocabulary

    def __hash__(self) -> int:
        return id(self.vocabulary)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.vocabulary is other.vocabulary


@lru_cache(maxsize=8)  # a client may come with new ones each time
def _breaker_tokens(key: _Identity, breakers: tuple[str, ...]) -> TokenSet:
    words, found = _words_of(key), np.zeros(key.vocabulary.n_tokens, np.bool_)
    for breaker in breakers:
        if breaker:
            found[words.having(breaker)] = True
    return TokenSet.of(found)


def forget_vocabularies() -> None:
    """Let go of those whose words were looked up: one of them is given back with its model, and all that hangs on it."""
    _breaker_tokens.cache_clear()
    _words_of.cache_clear()


@attrs.define(eq=False)
class _Words:
    """The words of a vocabulary in one text, and where each begins: searching it takes a hundredth of searching them one by one.

    They are held apart by a byte that is in no UTF-8, and so in no breaker.
    """

    text: bytes
    starts: Int64s
    n_searches: int = 0
    _having: dict[str, npt.NDArray[np.int32]] = attrs.field(factory=dict)

    def having(self, breaker: str) -> npt.NDArray[np.int32]:
        """Return the words that have it. Each is searched by itself: in another order, or with one more, the same are no new search."""
        found = self._having.get(breaker)
        if found is None:
            self.n_searches += 1
            pattern = re.escape(breaker.encode("utf-8", "surrogatepass")) + rb"[^\xff]*"  # with the rest of its token: once is enough
            places = [match.start() for match in re.finditer(pattern, self.text)]
            found = (np.searchsorted(self.starts, places, "right") - 1).astype(np.int32)
            if len(self._having) >= _N_SEARCHES_KEPT:
                del self._having[next(iter(self._having))]
            self._having[breaker] = found
        return found


@lru_cache(maxsize=2)
def _words_of(key: _Identity) -> _Words:
    words = [key.vocabulary.token_bytes(token, special=True) for token in range(key.vocabulary.n_tokens)]
    return _Words(b"\xff".join(words), np.cumsum([0, *(len(word) + 1 for word in words[:-1])], dtype=np.int64))


@attrs.define(eq=False)
class _Places:
    """Where one token occurs, ascending; appending is O(1)."""

    n: int = 0
    _array: Int64s = attrs.field(factory=lambda: np.zeros(4, np.int64))

    def append(self, place: int) -> None:
        self._array = grown(self._array, self.n + 1)
        self._array[self.n] = place
        self.n += 1

    def since(self, start: int) -> Int64s:
        """Return the places from `start` on."""
        places = self._array[: self.n]
        return places[np.searchsorted(places, start) :] if start > 0 else places


@attrs.define(eq=False)
class Dry:
    """Which repetitions the next token could go on with, over the last `last_n` tokens (None: over all)."""

    breakers: AbstractSet[int]
    last_n: int | None = None
    n: int = 0  # tokens seen
    _tokens: Int64s = attrs.field(factory=lambda: np.zeros(64, np.int64))
    _agreement: npt.NDArray[np.int32] = attrs.field(factory=lambda: np.zeros(64, np.int32))  # tokens up to a place = as many at the end
    _first_places: Mapping[int, Int64s] = attrs.field(factory=dict)  # where tokens occur in what was taken in at once
    _places: dict[int, _Places] = attrs.field(factory=dict)  # of those that were met since
    _active: Int64s = attrs.field(factory=lambda: np.zeros(0, np.int64))  # where `_agreement` is not 0

    @classmethod
    def of(cls, tokens: list[int], breakers: AbstractSet[int], last_n: int | None) -> Dry:
        """Return the state after `tokens`: what observing them one by one gives, in linear time."""
        if not tokens:
            return cls(breakers, last_n)
        history = np.array(tokens, np.int64)
        agreement, first_places = _read(history.tobytes(), breakers)
        dry = cls(breakers, last_n, n=len(tokens), tokens=history, agreement=agreement.copy(), first_places=first_places)
        earlier = dry._places_of(tokens[-1]).since(dry._window_start())
        dry._active = earlier[earlier < len(tokens) - 1]
        dry._agreement[np.setdiff1d(np.flatnonzero(dry._agreement), dry._active)] = 0
        return dry

    def _window_start(self) -> int:
        return 0 if self.last_n is None else self.n - self.last_n

    def observe(self, token: int) -> None:
        """Take in the sequence's next token."""
        here = self.n
        self.n += 1
        self._tokens = grown(self._tokens, self.n)
        self._agreement = grown(self._agreement, self.n)
        self._tokens[here] = token
        self._extend(token)
        self._places_of(token).append(here)

    def _places_of(self, token: int) -> _Places:
        places = self._places.get(token)
        if places is None:
            first = self._first_places.get(token)
            places = self._places[token] = _Places() if first is None else _Places(len(first), first)  # it is full: no append changes it
        return places

    def _extend(self, token: int) -> None:
        places = self._places_of(token).since(self._window_start())
        if token in self.breakers:
            places = places[:0]
        agreement = self._agreement[places - 1] + 1
        if len(places) and places[0] == 0:  # nothing stands before the first token
            agreement[0] = 1
        self._agreement[self._active] = 0
        self._agreement[places] = agreement
        self._active = places.copy()

    def penalise(self, logits: Logits, multiplier: float, base: float, allowed_length: int) -> None:
        """Subtract ``multiplier * base ** (n - allowed_length)`` from each token that would make a repetition of n tokens longer."""
        ids, lengths = self._continuations(max(allowed_length, 1))
        if not len(ids):
            return
        exponents = (lengths - allowed_length).astype(np.float64)
        if base > 1.000001:
            exponents = np.minimum(exponents, int(_MAX_LOG / math.log(base)))
        penalties = np.minimum(multiplier * base**exponents, _MOST)  # what is all that may come must stay likelier than nothing
        logits[ids] -= penalties.astype(np.float32)

    def _continuations(self, length_min: int) -> tuple[Ids, npt.NDArray[np.int32]]:
        """Return the tokens, breakers apart, that follow a repetition of at least `length_min` tokens, with the longest length for each."""
        places = self._active
        lengths = self._agreement[places]
        if self.last_n is not None:  # what reaches back beyond the window does not count
            lengths = np.minimum(lengths, places - self._window_start() + 1).astype(np.int32)
        long = lengths >= length_min
        ids = self._tokens[places[long] + 1]
        unique, where = np.unique(ids, return_inverse=True)
        longest = np.zeros(len(unique), np.int32)
        np.maximum.at(longest, where, lengths[long])
        may_come = np.array([token in self.breakers for token in unique.tolist()], np.bool_)  # whatever came before
        return unique[~may_come], longest[~may_come]


@lru_cache(maxsize=2)  # the choices of a request begin with one prompt, and all of them in one step
def _read(tokens: bytes, breakers: AbstractSet[int]) -> tuple[npt.NDArray[np.int32], Mapping[int, Int64s]]:
    """Return `_agreement` of tokens that come as int64s, and the places of each; nobody changes either."""
    history = np.frombuffer(tokens, np.int64)
    order = np.argsort(history, kind="stable")
    starts = np.flatnonzero(np.diff(history[order], prepend=-1))
    places = {int(history[each[0]]): each for each in np.split(order, starts[1:])}
    return _agreement(history.tolist(), breakers), places


def _agreement(tokens: list[int], breakers: AbstractSet[int]) -> npt.NDArray[np.int32]:
    """Return for each place how many tokens up to it agree with the end, back to the last breaker: the Z algorithm, from behind."""
    back, n = tokens[::-1], len(tokens)
    n_free = next((i for i, token in enumerate(back) if token in breakers), n)  # tokens since the last breaker
    z = [0] * n
    left = right = 0  # back[left:right] is known to equal back[: right - left]
    for i in range(1, n if n_free else 0):
        length = min(z[i - left], right - i) if i < right else 0
        while i + length < n and back[length] == back[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return np.minimum(np.array(z[::-1], np.int32), n_free).astype(np.int32)
