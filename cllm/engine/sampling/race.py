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
from cllm.engine.sampling.noise import Floats, Ids, Keys
from cllm.engine.sampling.rows import Rows, pairs_of

_MANY_COLUMNS = 8  # a row: from there on it pays to run the columns' first tokens before the others
_MARGIN = 1e-3  # by which a bound in float32 may be too low: scores that can win are within 50 of 0
_NEAR = 2.0  # what is so near the highest bound of one row is looked into first: some seven columns
_HOTTEST = 1e30  # the temperature beyond which float32 would make infinities; nothing differs there


def win_alone(rows: Rows, member: int, key: np.uint64, temperature: float) -> int:
    """Return who wins the race of one row among all its tokens: whom `Race` finds, in half the calls, none of which tells rows apart.

    Beside a model that has just had the caches, a call of NumPy on a few numbers takes several microseconds.
    """
    grid, work = rows.grid, rows.work
    maxima, top, heat = rows.maxima[member], np.float64(rows.tops[member]), np.float64(temperature)
    hashes, scratch = work.room("hashes", np.uint64, grid.n_columns), work.room("scratch", np.uint64, grid.n_columns)
    leads, bounds = work.room("leads", np.float32, grid.n_columns), work.room("bounds", np.float32, grid.n_columns)
    grid.column_hashes(key, hashes, scratch)
    np.subtract(maxima, rows.tops[member], out=bounds)
    bounds /= np.float32(min(temperature, _HOTTEST))
    bounds += grid.leads_at_most(hashes, leads, scratch)
    near = bounds.max() - np.float32(_NEAR)
    columns = np.flatnonzero(bounds >= near)
    best, winner = _best_of(rows, member, key, columns, grid.first_times(hashes[columns], columns), top, heat, np.float64(-np.inf))
    least = np.float32(best - _MARGIN)
    if least < near:
        columns = np.flatnonzero((bounds > least) & (bounds < near))
        times = grid.first_times(hashes[columns], columns)
        may_win = (maxima[columns] - top) / heat - np.log(times) > best
        score, token = _best_of(rows, member, key, columns[may_win], times[may_win], top, heat, best)
        winner = token if score > best else winner
    return winner


def _best_of(
    rows: Rows, member: int, key: np.uint64, columns: Ids, times: Floats, top: np.float64, heat: np.float64, best: np.float64
) -> tuple[np.float64, int]:
    """Return the highest score in these columns of a row, whose first times are `times`, and whose it is, if it is more than `best`."""
    block = rows.block(member, columns)
    limits = (best + np.log(times) - _MARGIN) * heat + top
    steps, places = pairs_of(block > np.nextafter(limits.astype(np.float32), np.float32(-np.inf)))
    if not len(steps):
        return np.float64(-np.inf), 0
    columns, own = columns[places], block[steps, places]
    ids = columns + steps * rows.grid.n_columns
    scores = (own - top) / heat - np.log(times[places] + rows.grid.delays(key, ids, columns))
    i = scores.argmax()
    return scores[i], int(ids[i])


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
    hashes: Keys  # (n, n_columns): what the first time of each column is made of
    bounds: Logits  # (n, n_columns), float32: no token of the column scores higher by more than `_MARGIN`
    floor: Floats
    below: Ids
    has_floor: bool
    best: Floats
    winners: Ids

    @classmethod
    def of(cls, rows: Rows, members: Ids, keys: Keys, temperatures: Floats, floor: Floats) -> Race:
        """Set up a race among all tokens whose logits are not below the `floor`."""
        n, has_floor, grid = len(members), bool(np.isfinite(floor).any()), rows.grid
        maxima = rows.maxima_of(members)
        hashes, scratch = rows.work.room("hashes", np.uint64, n, grid.n_columns), rows.work.room("scratch", np.uint64, n, grid.n_columns)
        leads, bounds = rows.work.room("leads", np.float32, n, grid.n_columns), rows.work.room("bounds", np.float32, n, grid.n_columns)
        grid.column_hashes(keys[:, None], hashes, scratch)
        np.subtract(maxima, rows.tops[members, None], out=bounds)
        bounds /= np.minimum(temperatures, _HOTTEST).astype(np.float32)[:, None]
        bounds += grid.leads_at_most(hashes, leads, scratch)
        if has_floor:
            bounds[maxima < floor[:, None]] = -np.inf
        tops = rows.tops[members].astype(np.float64)
        below, best, winners = np.full(n, grid.n_vocab), np.full(n, -np.inf), np.zeros(n, np.int64)
        return cls(rows, members, tops, temperatures, keys, hashes, bounds, floor, below, has_floor, best, winners)

    def run(self, again: Ids) -> None:
        """Find the winners among the members in `again`."""
        self.best[again] = -np.inf
        bounds = self.bounds if len(again) == len(self.bounds) else self.bounds[again]
        first = bounds.argmax(axis=1)
        self._look_into(again, first, self._first_times(again, first))
        places, columns = pairs_of(bounds > (self.best[again] - _MARGIN).astype(np.float32)[:, None])
        places = again[places]
        places, columns, times = self._beatable(places, columns, self._first_times(places, columns))
        if len(places) > _MANY_COLUMNS * len(again):
            self._run_firsts(places, columns, times)
            places, columns, times = self._beatable(places, columns, times)
        self._look_into(places, columns, times)

    def _first_times(self, places: Ids, columns: Ids) -> Floats:
        return self.rows.grid.first_times(self.hashes[places, columns], columns)

    def _beatable(self, places: Ids, columns: Ids, times: Floats) -> tuple[Ids, Ids, Floats]:
        """Return those of the columns in which a token may score higher than the best so far."""
        heated = (self.rows.maxima[self.members[places], columns] - self.tops[places]) / self.temperatures[places]
        may_win = heated - np.log(times) > self.best[places]
        return places[may_win], columns[may_win], times[may_win]

    def _look_into(self, places: Ids, columns: Ids, times: Floats) -> None:
        """Run the tokens of these columns, as far as they take part and could win at the column's first time."""
        logits = self.rows.logits_at(self.members[places], columns)
        limits = (self.best[places] + np.log(times) - _MARGIN) * self.temperatures[places] + self.tops[places]
        pairs, steps = pairs_of(logits > np.nextafter(limits.astype(np.float32), np.float32(-np.inf))[:, None])
        places, columns = places[pairs], columns[pairs]
        ids = columns + steps * self.rows.grid.n_columns
        times = times[pairs] + self.rows.grid.delays(self.keys[places], ids, columns)
        own = logits[pairs, steps]
        self._offer(places, ids, (own - self.tops[places]) / self.temperatures[places] - np.log(times), own)

    def _run_firsts(self, places: Ids, columns: Ids, times: Floats) -> None:
        """Run only the first tokens of these columns: one each, and where noise decides a good one."""
        ids = self.rows.grid.first_ids(self.keys[places], columns)
        logits = self.rows.logits[self.members[places], ids]
        heated = (logits - self.tops[places]) / self.temperatures[places]
        self._offer(places, ids, heated - np.log(times), logits)

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
