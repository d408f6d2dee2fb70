"""The rows of logits that are sampled together, and the column maxima by which most of their tokens are never looked at."""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits
from cllm.engine.sampling.noise import Grid, Ids, grid_of

Bools: TypeAlias = npt.NDArray[np.bool_]

Number = TypeVar("Number", bound=np.generic)

_LINE: Final = 16  # numbers in a cache line


class Workspace:
    """Scratch memory for sampling, owned by whoever calls it: one caller at a time.

    An array of more than 128 KiB that is allocated anew costs more than most of what is done with it: its pages have to be mapped again.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, npt.NDArray[Any]] = {}

    def floats(self, n: int) -> Logits:
        """Return room for `n` numbers, valid until the next call."""
        return self.room("floats", np.float32, n)

    def bools(self, n: int) -> Bools:
        """Return room for `n` truth values, valid until the next call."""
        return self.room("bools", np.bool_, n)

    def room(self, name: str, dtype: type[Number], *shape: int) -> npt.NDArray[Number]:
        """Return an array of this shape, valid until the next call for the same name."""
        n, room = math.prod(shape), self._rooms.get(name)
        if room is None or len(room) < n:
            room = self._rooms[name] = np.empty(n, dtype)
        return room[:n].reshape(shape)


@attrs.define(eq=False)
class Rows:
    """Some rows of logits, laid out as the noise's grid (see `cllm.engine.sampling.noise`). Places in it are (row, column) pairs."""

    logits: Logits  # (n_rows, n_vocab), C-contiguous
    grid: Grid
    work: Workspace
    maxima: Logits  # (n_rows, n_columns); a NaN in a column makes its maximum NaN
    tops: Logits  # (n_rows,): the highest logit

    @classmethod
    def of(cls, logits: Logits, work: Workspace, *, is_far: bool = False) -> Rows:
        """Read all rows of `logits` once. `is_far`: they are in memory and not in the cache, as far as one can know."""
        grid = grid_of(logits.shape[1])
        maxima = work.room("maxima", np.float32, len(logits), grid.n_columns)
        (_far_column_maxima if is_far else _column_maxima)(logits, grid, maxima)
        return cls(logits, grid, work, maxima, maxima.max(axis=1))

    def maxima_of(self, members: Ids) -> Logits:
        """Return the column maxima of these rows, which are different ones in their order, to be read only."""
        return self.maxima if len(members) == len(self.maxima) else self.maxima[members]

    def reread(self, row: int) -> None:
        """Take note that the logits of `row` were changed."""
        _column_maxima(self.logits[row : row + 1], self.grid, self.maxima[row : row + 1])
        self.tops[row] = self.maxima[row].max()

    def remove(self, row: int, token: int) -> None:
        """Exclude one token from whatever follows."""
        column = token % self.grid.n_columns
        self.logits[row, token] = -np.inf
        self.maxima[row, column] = self.logits[row, column :: self.grid.n_columns].max()

    def logits_at(self, rows: Ids, columns: Ids) -> Logits:
        """Return the logits in the pairs' columns, (n_pairs, height); -inf where a column is one token short."""
        grid = self.grid
        square = self.logits[:, : grid.n_square].reshape(-1, grid.n_full, grid.n_columns)
        logits: Logits = square[rows, :, columns]  # a slice in the middle is four times as fast as an index for each token
        if grid.n_rest == 0:
            return logits
        last = self.logits[rows, np.minimum(grid.n_square + columns, grid.n_vocab - 1)]
        last[columns >= grid.n_rest] = -np.inf
        return np.concatenate([logits, last[:, None]], axis=1)

    def block(self, row: int, columns: Ids) -> Logits:
        """Return the logits in these columns of one row, (height, n_columns): as `logits_at`, turned."""
        grid = self.grid
        logits: Logits = self.logits[row, : grid.n_square].reshape(grid.n_full, grid.n_columns).take(columns, axis=1)
        if grid.n_rest == 0:
            return logits
        last = self.logits[row, np.minimum(grid.n_square + columns, grid.n_vocab - 1)]
        last[columns >= grid.n_rest] = -np.inf
        return np.concatenate([logits, last[None]])


def _column_maxima(logits: Logits, grid: Grid, maxima: Logits) -> None:
    """Put the maximum of each column of the grid into `maxima`, for each row."""
    logits[:, : grid.n_square].reshape(len(logits), grid.n_full, grid.n_columns).max(axis=1, out=maxima)
    if grid.n_rest:
        rest = maxima[:, : grid.n_rest]
        np.maximum(rest, logits[:, grid.n_square :], out=rest)


def _far_column_maxima(logits: Logits, grid: Grid, maxima: Logits) -> None:
    """The same, having fetched each row first: one number of each cache line, straight on, which takes two fifths off the whole."""
    for i in range(len(logits)):
        logits[i, ::_LINE].max()
        _column_maxima(logits[i : i + 1], grid, maxima[i : i + 1])


def pairs_of(chosen: Bools) -> tuple[Ids, Ids]:
    """Return where the matrix is True, as ``nonzero`` does in seven times the time."""
    first, second = np.divmod(np.flatnonzero(chosen), chosen.shape[1])
    return first, second


def weigh(logits: Logits, top: float, temperature: float, work: Workspace) -> Logits:
    """Return ``exp((logits - top) / temperature)`` of one row, in ``work.floats``."""
    weights = work.floats(len(logits))
    np.subtract(logits, np.float32(top), out=weights)
    if temperature != 1:
        weights *= np.float32(1 / temperature)
    return np.exp(weights, out=weights)


def total(weights: Logits, grid: Grid) -> float:
    """Return the sum of one row: along the columns first, which is as exact as pairwise summation and twice as fast."""
    sums = weights[: grid.n_square].reshape(grid.n_full, grid.n_columns).sum(axis=0)
    return float(sums.sum(dtype=np.float64) + weights[grid.n_square :].sum(dtype=np.float64))
