"""The model's own log-probabilities, of drawn tokens and of a prompt's: of the unmodified logits, before any penalty or temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import attrs
import numpy as np

from cllm.backend import Logits
from cllm.engine.events import TokenLogprob
from cllm.engine.sampling.noise import Ids
from cllm.engine.sampling.rows import Rows, Workspace, total, weigh
from cllm.engine.sampling.shortlist import Shortlist, first_keys, fits, ids_of_keys


@attrs.define(eq=False)
class RawLogits:
    """What is kept of a row for its logprobs: the row itself, its normaliser and its likeliest tokens."""

    logits: Logits
    log_sum: float
    top: list[tuple[int, float]]

    def of_token(self, token: int, *, ranked: bool = False) -> TokenLogprob:
        """Return the logprob of `token`, with the likeliest ones beside it; its own rank needs a look at the whole row."""
        logit = self.logits[token]
        rank = 1 + int(np.count_nonzero(self.logits > logit)) if ranked else None
        return TokenLogprob(token, float(logit) - self.log_sum, self.top, rank)


def score(logits: Logits, targets: Seq[int], n_top: int) -> list[TokenLogprob] | None:
    """Return the logprob of each row's target, with the `n_top` likeliest tokens; None if a row holds NaN or +inf."""
    with np.errstate(all="ignore"):  # what is not a number is told by the maxima
        rows = Rows.of(np.ascontiguousarray(logits), Workspace())
        raws = read_raw(rows, dict.fromkeys(range(len(targets)), n_top), [False] * len(targets))
    if len(raws) < len(targets):
        return None
    return [raws[row].of_token(target, ranked=True) for row, target in enumerate(targets)]


def read_raw(rows: Rows, wanted: dict[int, int], changing: Seq[bool]) -> dict[int, RawLogits]:
    """Read the rows that are keys of `wanted`, with as many likeliest tokens as its values say; a row that will change is copied."""
    valid = {row: n for row, n in wanted.items() if np.isfinite(rows.tops[row])}
    tops = _top_tokens(rows, valid)
    raws = {}
    for row in valid:
        logits, highest = rows.logits[row], float(rows.tops[row])
        log_sum = highest + math.log(total(weigh(logits, highest, 1.0, rows.work), rows.grid))
        top = [(token, logit - log_sum) for token, logit in tops[row]]
        raws[row] = RawLogits(logits.copy() if changing[row] else logits, log_sum, top)
    return raws


def _top_tokens(rows: Rows, wanted: dict[int, int]) -> dict[int, list[tuple[int, float]]]:
    """Return the likeliest tokens above -inf of each row, with their logits."""
    tops: dict[int, list[tuple[int, float]]] = {}
    for n in set(wanted.values()):
        members = np.array([row for row, n_row in wanted.items() if n_row == n])
        for row, ids, logits in zip(members.tolist(), *_likeliest(rows, members, n), strict=True):
            tops[row] = [(token, logit) for token, logit in zip(ids, logits, strict=True) if logit > -math.inf]
    return tops


def _likeliest(rows: Rows, members: Ids, n: int) -> tuple[list[list[int]], list[list[float]]]:
    if n == 0:
        return [[] for _ in members], [[] for _ in members]
    if fits(n, rows.grid.n_columns):
        shortlist = Shortlist.of(rows, members, n)
        return shortlist.ids.tolist(), shortlist.logits.tolist()
    keys = [first_keys(rows.logits[member], -np.inf, n) for member in members]
    ids = [row_ids[row_ids < rows.grid.n_vocab] for row_ids in map(ids_of_keys, keys)]
    return [row_ids.tolist() for row_ids in ids], [rows.logits[m, row_ids].tolist() for m, row_ids in zip(members, ids, strict=True)]
