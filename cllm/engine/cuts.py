"""Truncations by a limit, made in the row itself: what is cut gets a logit of -inf, and whatever follows need not know."""

from __future__ import annotations

import math

import numpy as np

from cllm.backend import Logits
from cllm.engine.rows import Rows, total


def top_n_sigma(rows: Rows, row: int, n: float) -> None:
    """Keep what is at most `n` standard deviations below the likeliest (Tang et al. 2024, arXiv:2411.07641)."""
    logits = rows.logits[row]
    finite = logits if logits.min() > -np.inf else logits[logits > -np.inf]
    _cut_below(rows, row, float(rows.tops[row]) - n * _deviation(rows, finite))


def _deviation(rows: Rows, logits: Logits) -> float:
    if len(logits) < rows.grid.n_vocab:
        return float(logits.std(dtype=np.float64))
    mean = total(logits, rows.grid) / len(logits)
    squares = rows.work.floats(len(logits))
    np.subtract(logits, np.float32(mean), out=squares)
    np.multiply(squares, squares, out=squares)
    return math.sqrt(total(squares, rows.grid) / len(logits))


def top_k(rows: Rows, row: int, k: int) -> None:
    """Keep the `k` likeliest tokens, of equals the lower ids."""
    logits = rows.logits[row]
    limit = np.partition(logits, len(logits) - k)[len(logits) - k]
    tied = np.flatnonzero(logits == limit)
    n_above = np.count_nonzero(logits > limit)
    logits[tied[k - n_above :]] = -np.inf
    _cut_below(rows, row, float(limit))


def _cut_below(rows: Rows, row: int, limit: float) -> None:
    logits = rows.logits[row]
    logits[logits < limit] = -np.inf
    rows.reread(row)
