"""How far one model's distributions of the next token are from another's: Kullback-Leibler divergence, row by row."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits

Float64s = npt.NDArray[np.float64]


@attrs.frozen(kw_only=True)
class Divergence:
    """Of many rows; in nats."""

    n_rows: int
    mean: float
    p50: float
    p99: float
    max: float
    top1_agreement: float  # the share of rows in which both hold the same token likeliest


@attrs.frozen
class Rows:
    """What was found of some rows."""

    divergences: Float64s
    agree: npt.NDArray[np.bool_]


def compare_rows(reference: Logits, other: Logits) -> Rows:
    """Compare logits of shape (rows, n_vocab): D(reference || other) of each row, over the whole vocabulary."""
    log_p, log_q = _log_softmax(reference), _log_softmax(other)
    p = np.exp(log_p)
    # What never comes tells nothing, whatever the other one holds of it: 0 * log 0 is 0 here. What is no number stays none.
    divergences = (p * np.subtract(log_p, log_q, out=np.zeros_like(p), where=p != 0)).sum(axis=1)
    # It is never below 0, but its sum may round there.
    return Rows(np.maximum(divergences, 0.0), reference.argmax(axis=1) == other.argmax(axis=1))


def summary(parts: Seq[Rows]) -> Divergence:
    """Sum up what was found of at least one row."""
    divergences = np.concatenate([part.divergences for part in parts])
    agree = np.concatenate([part.agree for part in parts])
    return Divergence(
        n_rows=len(divergences),
        mean=float(divergences.mean()),
        p50=float(np.percentile(divergences, 50)),
        p99=float(np.percentile(divergences, 99)),
        max=float(divergences.max()),
        top1_agreement=float(agree.mean()),
    )


def _log_softmax(logits: Logits) -> Float64s:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Float64s = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
