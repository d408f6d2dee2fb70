"""Draws from whole rows: finds the winner of the exponential race over the vocabulary without running most tokens.

A token's score is ``heated - log(time)`` with ``heated = (logit - top) / temperature``, and the highest score wins. A column's maximum
and its first time bound the scores in it, so only the few columns whose bound beats the best score so far are looked into; the
result is exactly the winner over all tokens.

top_p needs no sort: a token is drawn, and if it lies outside the nucleus, it and all tokens that are no likelier leave the race,
which is drawn again. The winner over a subset is a draw from the distribution over that subset, so what is accepted at last
is a draw from the nucleus.
"""

from __future__ import annotations

import attrs
import numpy as np

from cllm.backend import Logits
from cllm.engine.noise import Floats, Ids, Keys
from cllm.engine.rows import Rows

_MANY_COLUMNS = 8  # a row: from there on it pays to run the columns' first tokens before the others


@attrs.define(eq=False)
class Race:
    """The rows of one race; `members` are their places in `rows`, and everything else goes by the place among the members.

    A token takes part if its logit is above `floor`, or at it with an id below `below`.
    """

    rows: Rows
    members: Ids
    tops: Floats
    temperatures: Floats
    keys: Keys
    times: Floats  # (n, n_columns): the first time of each column
    leads: Floats  # (n, n_columns): what the first time adds to a score, -log(time)
    bounds: Floats  # (n, n_columns): no token of the column scores higher
    floor: Floats
    below: Ids
    has_floor: bool
    best: Floats
    winners: Ids

    @classmethod
    def of(cls, rows: Rows, members: Ids, keys: Keys, temperatures: Floats, floor: Floats) -> Race:
        """Set up a race among all tokens whose logits are not below the `floor`."""
        n, has_floor = len(members), bool(np.isfinite(floor).any())
        tops = rows.tops[members].astype(np.float64)
        maxima = rows.maxima[members]
        times = rows.grid.column_times(keys[:, None])
        leads = -np.log(times)
        bounds = maxima - tops[:, None]
        bounds /= temperatures[:, None]
        bounds += leads
        if has_floor:
            bounds[maxima < floor[:, None]] = -np.inf
        below, best, winners = np.full(n, rows.grid.n_vocab), np.full(n, -np.inf), np.zeros(n, np.int64)
        return cls(rows, members, tops, temperatures, keys, times, leads, bounds, floor, below, has_floor, best, winners)

    def run(self, again: Ids) -> None:
        """Find the winners among the members in `again`."""
        self.best[again] = -np.inf
        bounds = self.bounds if len(again) == len(self.bounds) else self.bounds[again]
        self._look_into(again, bounds.argmax(axis=1))
        places, columns = (bounds > self.best[again][:, None]).nonzero()
        places = again[places]
        if len(places) > _MANY_COLUMNS * len(again):
            self._run_firsts(places, columns)
            beatable = self.bounds[places, columns] > self.best[places]
            places, columns = places[beatable], columns[beatable]
        self._look_into(places, columns)

    def _look_into(self, places: Ids, columns: Ids) -> None:
        """Run the tokens of these columns, as far as they take part and could win at the column's first time."""
        logits = self.rows.logits_at(self.members[places], columns)
        heated = (logits - self.tops[places, None]) / self.temperatures[places, None]
        limits = self.best[places] - self.leads[places, columns]
        hopeful = heated > limits[:, None]
        if self.has_floor:
            hopeful &= logits >= self.floor[places, None]
        pairs, steps = hopeful.nonzero()
        places, columns = places[pairs], columns[pairs]
        ids = columns + steps * self.rows.grid.n_columns
        times = self.times[places, columns] + self.rows.grid.delays(self.keys[places], ids, columns)
        self._offer(places, ids, heated[pairs, steps] - np.log(times), logits[pairs, steps])

    def _run_firsts(self, places: Ids, columns: Ids) -> None:
        """Run only the first tokens of these columns: one each, and where noise decides a good one."""
        ids = self.rows.grid.first_ids(self.keys[places], columns)
        logits = self.rows.logits[self.members[places], ids]
        heated = (logits - self.tops[places]) / self.temperatures[places]
        self._offer(places, ids, heated + self.leads[places, columns], logits)

    def _offer(self, places: Ids, ids: Ids, scores: Floats, logits: Logits) -> None:
        if self.has_floor:
            floor = self.floor[places]
            takes_part = (logits > floor) | ((logits == floor) & (ids < self.below[places]))
            places, ids, scores = places[takes_part], ids[takes_part], scores[takes_part]
        np.maximum.at(self.best, places, scores)
        won = scores == self.best[places]
        self.winners[places[won]] = ids[won]

    def run_among(self, place: int, ids: Ids) -> None:
        """Find the winner of one member among a few tokens, of which at least one takes part."""
        self.best[place] = -np.inf
        logits = self.rows.logits[self.members[place], ids]
        heated = (logits - self.tops[place]) / self.temperatures[place]
        times = self.rows.grid.times(self.keys[place : place + 1], ids)
        self._offer(np.full(len(ids), place), ids, heated - np.log(times), logits)

    def exclude_from(self, place: int) -> None:
        """Let the present winner of one member, and all tokens that are no likelier, take no further part."""
        member, token = int(self.members[place]), int(self.winners[place])
        logit = self.rows.logits[member, token]
        self.has_floor = True
        self.floor[place], self.below[place] = logit, token
        self.rows.remove(member, token)
        self.bounds[place, self.rows.maxima[member] < logit] = -np.inf
