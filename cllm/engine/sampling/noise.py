"""Noise hashed from (seed, index of the token in the sequence, token): repeatable draws without a generator's state.

A token is drawn by the Gumbel-max trick in the form of an exponential race: every token gets a time ~ Exp(1), and the token with the
highest ``logit / temperature - log(time)`` wins, which is a draw from the softmax, or from the softmax over any subset if only that
subset runs.

The vocabulary is laid out as a grid, so that the best time of many tokens is known from one hash::

    column    0     1     2         n_columns - 1
              0     1     2    ...  C - 1             token ids; C = n_columns = max(1, n_vocab // 64)
              C    C+1   C+2   ...  2C - 1
              ...
              kC  kC+1                                the last row may be short

The first of m independent Exp(1) times is Exp(1) / m and comes to any of the m tokens equally likely; the others follow it by times
that are Exp(1) again, since exponentials have no memory. So a column's first time, who has it, and the delays of the others are
three independent hashes, and together they give every token an independent Exp(1) time.

The hash is SplitMix64's (Steele, Lea, Flood, OOPSLA 2014; the constants are Stafford's mix13): ``mix(key + (n + 1) * GOLDEN)`` for
counter n, where ``key = mix(mix(seed + GOLDEN) + index * GOLDEN)``. The streams number their counters apart: token ids from 0,
columns from 2**32, the columns' first tokens from 2 * 2**32, coins from 3 * 2**32. The upper 52 bits make a uniform number, never
0 or 1.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits

Keys: TypeAlias = npt.NDArray[np.uint64]
Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

GOLDEN: Final = 0x9E3779B97F4A7C15
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK: Final = (1 << 64) - 1
_FIRST_TIMES: Final = 1 << 32
_FIRST_TOKENS: Final = 2 << 32
_COINS: Final = 3 << 32
_ONE_BITS: Final = np.uint64(0x3FF0000000000000)  # of the float 1.0
_FEW_KEYS: Final = 16  # below it, arrays take longer
_COLUMN_HEIGHT: Final = 64  # measured at 152k: 32 and 128 cost as much or more in the column maxima, and this bounds the tokens best


def mix(h: int) -> int:
    """Return SplitMix64's output for the state `h`."""
    h &= _MASK
    h = ((h ^ (h >> 30)) * _MULTIPLIERS[0]) & _MASK
    h = ((h ^ (h >> 27)) * _MULTIPLIERS[1]) & _MASK
    return h ^ (h >> 31)


def sequence_key(seed: int) -> int:
    """Return what the keys of a sequence's tokens are made of; only the seed's low 64 bits count."""
    return mix(seed + GOLDEN)


def row_key(seed: int, index: int) -> int:
    """Return the key of the token at `index` of the sequence with `seed`."""
    return mix(sequence_key(seed) + index * GOLDEN)


def row_keys(keys: Seq[int], indexes: Seq[int]) -> Keys:
    """The same for several sequences, whose `sequence_key` is known."""
    if len(keys) < _FEW_KEYS:
        return np.array([mix(key + index * GOLDEN) for key, index in zip(keys, indexes, strict=True)], np.uint64)
    states = np.array(indexes, np.uint64)
    states *= np.uint64(GOLDEN)
    states += np.array(keys, np.uint64)
    return _mix_array(states)


def coin(key: int) -> float:
    """Return a uniform number that is independent of the tokens' times."""
    return ((mix(key + (_COINS + 1) * GOLDEN) >> 12) + 0.5) * 2.0**-52


def _exponentials(hashes: Keys) -> Floats:
    """Turn hashes into Exp(1) numbers, all above 0, in place."""
    hashes >>= np.uint64(12)
    hashes |= _ONE_BITS
    u: Floats = hashes.view(np.float64)  # 1 + n / 2**52 for the upper 52 bits n
    u -= 1 - 2.0**-53
    np.log(u, out=u)
    return np.negative(u, out=u)


def _mix_array(h: Keys, scratch: Keys | None = None) -> Keys:
    """Apply `mix` in place; `scratch` is of the same shape."""
    for shift, multiplier in ((30, _MULTIPLIERS[0]), (27, _MULTIPLIERS[1])):
        h ^= np.right_shift(h, np.uint64(shift), out=scratch)
        h *= np.uint64(multiplier)
    h ^= np.right_shift(h, np.uint64(31), out=scratch)
    return h


def _hashes(keys: Keys | np.uint64, *counters: Ids) -> Keys:
    """Return the hashes of the counters, which broadcast with the keys, one below the other: small arrays cost by the call."""
    shape = np.broadcast(keys, *counters).shape
    states = np.empty((len(counters), *shape), np.uint64)
    for state, counter in zip(states, counters, strict=True):
        state[...] = counter
    return _mix_array(keys + _scaled(states))


def _scaled(counters: Keys) -> Keys:
    """Turn counters in place into what is added to a key."""
    counters += np.uint64(1)
    counters *= np.uint64(GOLDEN)
    return counters


@attrs.frozen(eq=False)
class Grid:
    """The layout of one vocabulary size, and its noise."""

    n_vocab: int
    n_columns: int
    n_full: int  # rows of the grid that have all columns
    n_square: int  # tokens in those
    n_rest: int  # columns that have one token more
    heights: Floats  # tokens of each column
    steps: Ids  # what to add to a column's number for the ids of its tokens, the highest column's
    _whole_heights: Keys
    _column_states: Keys  # for the columns' first times, what is added to a key
    _lead_bases: Logits  # float32: what `leads_at_most` adds to its logarithms

    def column_hashes(self, keys: Keys | np.uint64, out: Keys, scratch: Keys) -> Keys:
        """Return what the columns' first times are made of, for the keys of shape (n, 1): (n, n_columns); for one key, (n_columns,)."""
        np.add(keys, self._column_states, out=out)
        return _mix_array(out, scratch)

    def first_times(self, hashes: Keys, columns: Ids) -> Floats:
        """Return the first times of these columns; `hashes` are theirs, and overwritten."""
        times = _exponentials(hashes)
        times /= self.heights[columns]
        return times

    def leads_at_most(self, hashes: Keys, out: Logits, scratch: Keys) -> Logits:
        """Return float32 that ``-log(first time)`` of each column exceeds by rounding at most; `hashes` are of all columns, (n, n_columns).

        The time is ``-log(u) / height``, and ``-log(u) >= 1 - u``, which is near it where it counts, and saves a logarithm and 29 bits.
        """
        np.invert(hashes, out=scratch)
        np.right_shift(scratch, np.uint64(12), out=scratch)
        out[...] = scratch
        out += np.float32(0.5)  # now (1 - u) * 2**52
        np.log(out, out=out)
        return np.subtract(self._lead_bases, out, out=out)

    def times(self, keys: Keys, ids: Ids) -> Floats:
        """Return the tokens' times; `keys` and `ids` broadcast."""
        columns = ids % self.n_columns
        hashes = _hashes(keys, columns + _FIRST_TIMES, ids, columns + _FIRST_TOKENS)
        firsts: Floats
        firsts, delays = _exponentials(hashes[:2])
        firsts /= self.heights[columns]
        delays *= ids != self._first_ids(columns, hashes[2])
        firsts += delays
        return firsts

    def delays(self, keys: Keys | np.uint64, ids: Ids, columns: Ids) -> Floats:
        """Return by how much the tokens come later than the first of their column: 0 for that one."""
        hashes = _hashes(keys, ids, columns + _FIRST_TOKENS)
        delays = _exponentials(hashes[0])
        delays *= ids != self._first_ids(columns, hashes[1])
        return delays

    def first_ids(self, keys: Keys, columns: Ids) -> Ids:
        """Return which token of each column comes first."""
        return self._first_ids(columns, _hashes(keys, columns + _FIRST_TOKENS)[0])

    def _first_ids(self, columns: Ids, hashes: Keys) -> Ids:
        steps = ((hashes >> np.uint64(32)) * self._whole_heights[columns]) >> np.uint64(32)
        return columns + steps.astype(np.int64) * self.n_columns


@lru_cache(maxsize=8)
def grid_of(n_vocab: int) -> Grid:
    """Return the grid for a vocabulary's size."""
    n_columns = max(1, n_vocab // _COLUMN_HEIGHT)
    n_full, n_rest = divmod(n_vocab, n_columns)
    columns = np.arange(n_columns)
    heights = n_full + (columns < n_rest)
    return Grid(
        n_vocab=n_vocab,
        n_columns=n_columns,
        n_full=n_full,
        n_square=n_full * n_columns,
        n_rest=n_rest,
        heights=heights.astype(np.float64),
        steps=np.arange(0, n_vocab, n_columns),
        whole_heights=heights.astype(np.uint64),
        column_states=_scaled((columns + _FIRST_TIMES).astype(np.uint64)),
        lead_bases=(np.log(heights) + 52 * np.log(2)).astype(np.float32),
    )
