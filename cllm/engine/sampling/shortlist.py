"""The k likeliest tokens of several rows at once, and draws from them: top_k as long as k is small.

The k-th largest column maximum is a lower bound of the k-th largest logit, so few columns need to be looked into, and few tokens sorted.
"""

from __future__ import annotations

import attrs
import numpy as np

from cllm.backend import Logits
from cllm.engine.sampling.noise import Floats, Grid, Ids, Keys
from cllm.engine.sampling.rows import Bools, Rows, pairs_of

K_MAX = 256  # beyond it the columns bound too little
_GROUP = 8  # columns: partitioning is the dearest part of a short list, and with these it costs an eighth
_LAST_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)


def fits(k: int, n_columns: int) -> bool:
    """Tell whether a list of `k` tokens can be had from so many columns."""
    return 0 < k <= min(K_MAX, n_columns)


@attrs.frozen(eq=False)
class Shortlist:
    """The `k` likeliest tokens of some rows, in order: (n, k). Where a row has fewer above -inf, the rest is at -inf."""

    ids: Ids
    logits: Floats

    @classmethod
    def of(cls, rows: Rows, members: Ids, k: int) -> Shortlist:
        """Return the lists of the rows in `members`; `k` must fit."""
        alone = cls._of_one(rows, int(members[0]), k) if len(members) == 1 else None
        if alone is not None:
            return alone
        maxima = rows.maxima_of(members)
        limits = _limits(maxima, k)
        picked = maxima >= limits[:, None]
        crowded = picked.sum(axis=1) > 4 * k  # ties, or too few tokens above -inf
        picked &= ~crowded[:, None]
        keys = _sorted_keys(rows, members, picked, limits, k)
        for i in crowded.nonzero()[0].tolist():
            keys[i] = first_keys(rows.logits[members[i]], limits[i], k)
        ids = ids_of_keys(keys)
        missing = keys == _LAST_KEY
        ids[missing] = 0
        logits = rows.logits[members[:, None], ids].astype(np.float64)
        logits[missing] = -np.inf
        return cls(ids, logits)

    @classmethod
    def _of_one(cls, rows: Rows, member: int, k: int) -> Shortlist | None:
        """The list of one row, in a third of the calls; None where it is crowded."""
        maxima = rows.maxima[member]
        limit = _limits(maxima[None], k)[0]
        columns = np.flatnonzero(maxima >= limit)
        if len(columns) > 4 * k:
            return None
        block = rows.block(member, columns)
        steps, places = pairs_of(block >= limit)
        own, found = block[steps, places], columns[places] + steps * rows.grid.n_columns
        order = np.lexsort((found, -own))[:k]
        ids, logits = np.zeros((1, k), np.int64), np.full((1, k), -np.inf)
        ids[0, : len(order)], logits[0, : len(order)] = found[order], own[order]
        return cls(ids, logits)

    def draw(self, grid: Grid, keys: Keys, keep: Bools, temperatures: Floats) -> Ids:
        """Draw one of the tokens to `keep` from each list; the first are to be kept."""
        n = int(np.flatnonzero(keep.any(axis=0))[-1]) + 1  # of a trained model it is often one, or a few
        ids, logits = self.ids[:, :n], self.logits[:, :n]
        if n == 1:
            return ids[:, 0]
        scores = (logits - logits[:, :1]) / temperatures - np.log(grid.times(keys[:, None], ids))
        scores[~keep[:, :n]] = -np.inf
        drawn: Ids = ids[np.arange(len(keys)), scores.argmax(axis=1)]
        return drawn


def kept(logits: Floats, temperatures: Floats, top_p: Floats, log_min_p: Floats) -> Bools:
    """Tell which tokens of the lists top_p and min_p leave; parameters are (n, 1)."""
    heated = (logits - logits[:, :1]) / temperatures
    weights = np.exp(heated)
    mass = np.cumsum(weights, axis=1)
    keep: Bools = (mass - weights < top_p * mass[:, -1:]) & (heated >= log_min_p) & (weights > 0)
    keep[:, 0] = True
    return keep


def _limits(maxima: Logits, k: int) -> Logits:
    """Return for each row a limit that at least `k` columns reach, and seldom many more: the k-th largest of groups of columns."""
    n_groups = maxima.shape[1] // _GROUP
    if n_groups >= 4 * k:
        maxima = maxima[:, : _GROUP * n_groups].reshape(len(maxima), _GROUP, n_groups).max(axis=1)
    limits: Logits = np.partition(maxima, maxima.shape[1] - k, axis=1)[:, -k]
    return limits


def _sorted_keys(rows: Rows, members: Ids, picked: Bools, limits: Logits, k: int) -> Keys:
    """Return the order keys of the first k tokens that reach the rows' limits in the picked columns."""
    places, columns = pairs_of(picked)
    logits = rows.logits_at(members[places], columns)
    pairs, steps = pairs_of(logits >= limits[places, None])
    places, ids = places[pairs], columns[pairs] + steps * rows.grid.n_columns
    counts = np.bincount(places, minlength=len(members))
    starts = np.cumsum(counts) - counts
    keys = np.full((len(members), max(k, int(counts.max()))), _LAST_KEY)
    keys[places, np.arange(len(places)) - starts[places]] = order_keys(logits[pairs, steps], ids)
    keys.sort(axis=1)
    return keys[:, :k]


def first_keys(logits: Logits, limit: float, k: int) -> Keys:
    """Return the order keys of the first `k` tokens of one row, of which at least `k` reach `limit` or all that do are wanted."""
    above = np.flatnonzero(logits > limit)
    tied = np.flatnonzero(logits == limit)[:k] if limit > -np.inf else above[:0]
    ids = np.concatenate([above, tied])
    keys = np.full(max(k, len(ids)), _LAST_KEY)
    keys[: len(ids)] = order_keys(logits[ids], ids)
    keys.sort()
    return keys[:k]


def order_keys(logits: Logits, ids: Ids) -> Keys:
    """Return keys whose ascending order is the order of the tokens: a higher logit first, of equals the lower id."""
    bits = (logits + np.float32(0)).view(np.uint32)  # adding 0 makes -0 into 0: they are equal logits
    falling = np.where(bits >> np.uint32(31), bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = falling.astype(np.uint64) << np.uint64(32)
    keys |= ids.astype(np.uint64)
    return keys


def ids_of_keys(keys: Keys) -> Ids:
    """Return the token ids that `order_keys` put into the keys."""
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
