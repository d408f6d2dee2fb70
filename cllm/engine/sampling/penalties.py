"""The penalties on logits by how often their tokens came before: counters that are kept, never recounted.

Source of the formulas: llama_sampler_penalties_apply (llama.cpp, src/llama-sampler.cpp), except that presence and frequency count
generated tokens only, as OpenAI's do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Array = TypeVar("Array", Int64s, Float32s, npt.NDArray[np.int32])


def grown(array: Array, n: int) -> Array:
    """Return an array that begins with `array` and has room for `n` entries, doubling so that appending stays O(1)."""
    if n <= len(array):
        return array
    larger = np.zeros_like(array, shape=max(n, 2 * len(array)))
    larger[: len(array)] = array
    return larger


@attrs.define(eq=False)
class TokenCounts:
    """How often each token occurs, as columns ready for indexing; adding and removing a token is O(1)."""

    n: int = 0  # distinct tokens
    _ids: Int64s = attrs.field(factory=lambda: np.zeros(16, np.int64))
    _counts: Float32s = attrs.field(factory=lambda: np.zeros(16, np.float32))
    _places: dict[int, int] = attrs.field(factory=dict)

    @classmethod
    def of(cls, tokens: Iterable[int]) -> TokenCounts:
        """Return the counts of `tokens`."""
        ids, counts = np.unique(np.fromiter(tokens, np.int64), return_counts=True)
        return cls(len(ids), ids, counts.astype(np.float32), {token: place for place, token in enumerate(ids.tolist())})

    @property
    def ids(self) -> Int64s:
        """The distinct tokens, in no particular order."""
        return self._ids[: self.n]

    @property
    def counts(self) -> Float32s:
        """How often each of `ids` occurs."""
        return self._counts[: self.n]

    def add(self, token: int) -> None:
        """Count one more of `token`."""
        place = self._places.setdefault(token, self.n)
        if place == self.n:
            self._ids = grown(self._ids, place + 1)
            self._counts = grown(self._counts, place + 1)
            self._ids[place] = token
            self._counts[place] = 0
            self.n += 1
        self._counts[place] += 1

    def remove(self, token: int) -> None:
        """Count one less of `token`, which must have been added."""
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place] > 0:
            return
        self.n -= 1
        last = int(self._ids[self.n])
        self._ids[place], self._counts[place] = last, self._counts[self.n]
        self._places[last] = place
        del self._places[token]


REPEAT_MIN = 1e-6  # a smaller factor is as good as this one, and would make infinities of logits


def repeat(logits: Logits, ids: Int64s, penalty: float) -> None:
    """Make `ids` less likely by a factor on their logits (Keskar et al. 2019, arXiv:1909.05858), whichever their sign."""
    factor = np.float32(max(penalty, REPEAT_MIN))
    values = logits[ids]
    logits[ids] = np.where(values <= 0, values * factor, values / factor)


def presence_and_frequency(logits: Logits, counts: TokenCounts, presence: float, frequency: float) -> None:
    """Subtract `presence` once and `frequency` for each occurrence."""
    logits[counts.ids] -= np.float32(presence) + np.float32(frequency) * counts.counts
