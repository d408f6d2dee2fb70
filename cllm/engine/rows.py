"""The rows of logits that are sampled together, and the column maxima by which most of their tokens are never looked at."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits
from cllm.engine.noise import Grid, Ids, grid_of

Bools: TypeAlias = npt.NDArray[np.bool_]


class Workspace:
    """Scratch memory for sampling, owned by whoever calls it: one caller at a time."""

    def __init__(self) -> None:
        self._floats = np.empty(0, np.float32)
        self._bools = np.empty(0, np.bool_)

    def floats(self, n: int) -> Logits:
        """Return room for `n` numbers, valid until the next call."""
        if len(self._floats) < n:
            self._floats = np.empty(n, np.float32)
        return self._floats[:n]

    def bools(self, n: int) -> Bools:
        """Return room for `n` truth values, valid until the next call."""
        if len(self._bools) < n:
            self._bools = np.empty(n, np.bool_)
        return self._bools[:n]


@attrs.define(eq=False)
class Rows:
    """Some rows of logits, laid out as the noise's grid (see `cllm.engine.noise`). Places in it are (row, column) pairs."""

    logits: Logits  # (n_rows, n_vocab), C-contiguous
    grid: Grid
    work: Workspace
    maxima: Logits  # (n_rows, n_columns); a NaN in a column makes its maximum NaN
    tops: Logits  # (n_rows,): the highest logit

    @classmethod
    def of(cls, logits: Logits, work: Workspace) -> Rows:
        """Read all rows of `logits` once."""
        grid = grid_of(logits.shape[1])
        maxima = column_maxima(logits, grid)
        return cls(logits, grid, work, maxima, maxima.max(axis=1))

    def reread(self, row: int) -> None:
        """Take note that the logits of `row` were changed."""
        self.maxima[row] = column_maxima(self.logits[row : row + 1], self.grid)[0]
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


def column_maxima(logits: Logits, grid: Grid) -> Logits:
    """Return the maximum of each column of the grid, for each row."""
    maxima: Logits = logits[:, : grid.n_square].reshape(len(logits), grid.n_full, grid.n_columns).max(axis=1)
    if grid.n_rest:
        rest = maxima[:, : grid.n_rest]
        np.maximum(rest, logits[:, grid.n_square :], out=rest)
    return maxima


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
