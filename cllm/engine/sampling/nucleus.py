"""Tells whether a token lies inside the nucleus of top_p, without sorting and mostly without looking at the whole row.

A token is inside if the tokens before it in the order of likelihood have less than the share `top_p` of all mass, so the likeliest
always is. (Holtzman et al. 2020, arXiv:1904.09751; llama.cpp's llama_sampler_top_p_apply.)
"""

from __future__ import annotations

import attrs
import numpy as np

from cllm.engine.sampling.noise import Floats, Ids
from cllm.engine.sampling.rows import Bools, Rows, pairs_of, total, weigh
from cllm.engine.sampling.shortlist import order_keys

_FEW_COLUMNS = 8  # one in so many: beyond that reading the whole row is cheaper than picking columns
_N_SORTED = 4096  # sorting so many is cheaper than drawing again
_MARGIN = 1e-5  # relative; what float32 sums may differ by


@attrs.define(eq=False)
class Nucleus:
    """The nuclei of some rows; `members` are their places in `rows`, and everything else goes by the place among the members."""

    rows: Rows
    members: Ids
    top_p: Floats
    temperatures: Floats
    _totals: dict[int, float] = attrs.field(factory=dict)  # the whole row's mass, where it had to be summed

    def holds(self, places: Ids, tokens: Ids) -> Bools:
        """Tell for each of `places` whether its token is inside."""
        inside = self.top_p[places] >= 1
        for test in (self._surely_hold, self._hold):
            undecided = np.flatnonzero(~inside)
            if len(undecided):
                inside[undecided] = test(places[undecided], tokens[undecided])
        return inside

    def _surely_hold(self, places: Ids, tokens: Ids) -> Bools:
        """Tell where the columns that hold the likelier tokens already prove it: the others weigh at least their maximum."""
        members, n = self.members[places], len(places)
        tops, temperatures = self.rows.tops[members, None], self.temperatures[places, None].astype(np.float32)
        maxima, own = self.rows.maxima_of(members), self.rows.logits[members, tokens]
        r, c = pairs_of(maxima >= own[:, None])
        few = np.bincount(r, minlength=n) * _FEW_COLUMNS <= maxima.shape[1]
        if not few.all():
            r, c = r[few[r]], c[few[r]]
        unseen = np.subtract(maxima, tops, out=self.rows.work.room("unseen", np.float32, *maxima.shape))
        unseen /= temperatures
        np.exp(unseen, out=unseen)
        unseen[r, c] = 0
        ids, logits = c[:, None] + self.rows.grid.steps, self.rows.logits_at(members[r], c)
        weights = np.exp((logits - tops[r]) / temperatures[r])
        before = (logits > own[r, None]) | ((logits == own[r, None]) & (ids < tokens[r, None]))
        seen = np.bincount(r, weights.sum(axis=1), n)
        likelier = np.bincount(r, (weights * before).sum(axis=1), n)
        enough = likelier < self.top_p[places] * (seen + unseen.sum(axis=1)) * (1 - _MARGIN)
        proven: Bools = few & ((likelier == 0) | enough)
        return proven

    def _hold(self, places: Ids, tokens: Ids) -> Bools:
        return np.array([self._holds(*pair) for pair in zip(places.tolist(), tokens.tolist(), strict=True)])

    def _holds(self, place: int, token: int) -> bool:
        """Tell it by the masses of the whole row and of the likelier tokens."""
        rows, member, temperature = self.rows, int(self.members[place]), float(self.temperatures[place])
        logits, top = rows.logits[member], float(rows.tops[member])
        weights = weigh(logits, top, temperature, rows.work)
        if place not in self._totals:  # later the tokens outside are gone from the row
            self._totals[place] = total(weights, rows.grid)
        own = logits[token]
        weights *= np.greater(logits, own, out=rows.work.bools(len(logits)))
        n_tied = np.count_nonzero(logits[:token] == own)
        likelier = total(weights, rows.grid) + n_tied * float(np.exp((own - top) / temperature))
        return likelier == 0 or bool(likelier < self.top_p[place] * self._totals[place])

    def listed(self, place: int, outsider: int) -> Ids | None:
        """Return all tokens inside, if few enough to sort come before `outsider`, a token that `holds` has found outside."""
        rows, member, temperature = self.rows, int(self.members[place]), float(self.temperatures[place])
        logits, own = rows.logits[member], rows.logits[member, outsider]
        likelier, tied = logits > own, logits[:outsider] == own
        if np.count_nonzero(likelier) + np.count_nonzero(tied) > _N_SORTED:
            return None
        ids = np.concatenate([likelier.nonzero()[0], tied.nonzero()[0]])
        ids = ids[np.argsort(order_keys(logits[ids], ids))]
        weights = np.exp((logits[ids].astype(np.float64) - float(rows.tops[member])) / temperature)
        before = np.cumsum(weights) - weights
        return ids[: max(1, int(np.count_nonzero(before < self.top_p[place] * self._totals[place])))]
