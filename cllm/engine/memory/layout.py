"""Chooses how the model's cells lie while it serves: in one pool, where sequences share them, or apart, where attention is faster.

By the order of ggml's loops, attention in a pool goes through a head's rows one after the other, so that a sequence's cells have left the
CPU's cache when the next head that reads them has its turn. Eight sequences of 128 cells generate in 67 ms a step, apart in 59; sixteen of
130 in 125, apart in 91: 1.1 us for each row and cell of another sequence; on a slower day, of 120 in 184, apart in 170. But eight that have
1,000 cells in common read these once in a pool: 43 tokens/s, apart 25 to 31.

So cells lie apart while nothing is shared, unless of many sequences prompts gain more in a pool: beside answers their rows take less than
by themselves, and apart each prompt is a pass of its own. Of few, that is made up for by larger pieces, as long as gaps between slots are
closed (`cllm.engine.batch.fillers`): 8 at once with mixed prompts had 1.07 times the tokens/s apart, a median gap 0.74 times as long, and
at p99 1.06 times; 16 had more tokens/s apart, too, and so had 8 conversations of up to 700 tokens: 28 in place of 22, with first texts
after 2.3 s in place of 5.9.

Shared is what sequences have at the same time. Who goes on from what an ended one left finds it apart, too: in its slot, or on the host.

To lay them out anew, all cells must be carried to the host and back, or computed again, and those that are cached, too, if they are asked
for: it is done when staying has cost as much as that, so that never more than twice the least is paid.

A server that is started again goes on with the layout that it had, while nobody holds anything. If what comes now shares its beginnings
after all, the first few that do are enough to have the pool back, before much was computed: who waits for another's prompt counts too.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import attrs

N_FEW: Final = 8  # sequences at once, for whom it does not count what prompts gain in a pool
N_CELLS_SHORT: Final = 256  # each; where they have more, the rows of their prompts count that walk by them
N_REMEMBERED: Final = 64  # sequences whose lengths count
N_SEEN_LEAST: Final = 8  # sequences that tell whether anything is shared
MEMORY: Final = 0.95  # of the share that is reused, for each sequence
N_AT_FIRST: Final = 4  # sequences that what is not known yet counts for: that nothing is shared
REUSE_LOW, REUSE_HIGH = 0.1, 0.25  # of tokens: with less the cells may lie apart, with more they go back into a pool
SPARE: Final = 1.25  # the next sequence may be so many times as long as the longest one was, unless it says how long it will be


@attrs.frozen(kw_only=True)
class Apart:
    """What cells that lie apart would come to."""

    n_slots: int
    n_cells_slot: int
    gain_cell_s: float  # seconds that a generating row gains for each cell of the others, which it walks in a pool
    change_s: float  # to lay out cells that nobody holds, until it was measured


class LayoutChoice:
    """Takes note of who comes and of what steps cost, and says when the layout should change.

    The cells lie in a pool at first; with `begins_apart` that is to change before anything is computed.
    """

    def __init__(self, apart: Apart, *, begins_apart: bool = False) -> None:
        self.apart = apart
        self.is_apart = False
        self._begins_apart = begins_apart  # until it was done, or somebody came in between
        self.is_outgrown = False  # somebody needs more cells than a slot has apart
        self._lengths: deque[int] = deque(maxlen=N_REMEMBERED)
        self._crowds: deque[int] = deque(maxlen=N_REMEMBERED)
        self._reuse = 0.0
        self._n_came = N_AT_FIRST
        self._n_seen = 0  # since the layout changed
        self._lost_s = 0.0
        self._change_s = apart.change_s

    @property
    def may_be_due(self) -> bool:
        """Whether it is worth asking if a change is due; cheap."""
        return self._begins_apart or self.is_outgrown or self._lost_s >= self._change_s or (self.is_apart and self._should_go_back())

    def came(self, n_prompt: int, n_shared: int, n_live: int) -> None:
        """A sequence came, of whose prompt somebody who runs has, or computes, `n_shared` tokens; with it, `n_live` would like to run."""
        self._n_came += 1
        self._reuse += max(1 - MEMORY, 1 / self._n_came) * (n_shared / n_prompt - self._reuse)
        self._n_seen += 1
        self._crowds.append(n_live)

    def waits(self, n_live: int) -> None:
        """Somebody came and waits; with all who wait, `n_live` would like to run, maybe more than there are parts for."""
        if self.is_apart and n_live > self.apart.n_slots:  # the others are counted when they are let in
            self._crowds.append(n_live)

    def ended(self, n_tokens: int, n_max: int) -> None:
        """A sequence has ended with so many tokens; it would have ended with `n_max` in any case."""
        self._lengths.append(likely_length(n_tokens, n_max))

    @property
    def n_cells_most(self) -> float:
        """Cells that a sequence can have as they lie now, where that is less than it was promised."""
        return self.apart.n_cells_slot if self.is_apart else math.inf

    def grew(self, n_tokens: int) -> None:
        """A sequence has so many tokens, each of which is to have its cell."""
        if n_tokens > self.apart.n_cells_slot:
            self._lengths.append(n_tokens)
            self.is_outgrown = self.is_apart

    def stepped(self, n_rows: int, n_decoding: int, n_live: int, n_cells: int, spared_s: float = 0.0) -> None:
        """A step of `n_rows` was made, in which `n_decoding` of `n_live` sequences generated, who have `n_cells` cells; shared ones count
        once.

        Apart, the rows of prompts would have taken `spared_s` longer, since they would not have been computed together with answers.
        """
        if not n_live:  # they ended while it was made
            return
        if self.is_apart:
            return
        are_few = n_live <= N_FEW
        are_short = n_cells <= n_live * N_CELLS_SHORT
        walked_s = self.apart.gain_cell_s * n_cells * (1 - 1 / n_live)  # by each row
        lost_s = (n_decoding if are_short else n_rows) * walked_s if are_few else n_decoding * walked_s - spared_s
        self._lost_s = max(self._lost_s + lost_s, 0.0)

    def is_due(self, again_s: float, n_longest: int) -> bool:
        """Say whether to change now. It takes `again_s` until what is there would be there again, and the longest who is here has,
        or will have, `n_longest` tokens.
        """
        if self.is_apart:
            return self.is_outgrown or self._should_go_back()
        if self._begins_apart:
            self._begins_apart = False
            return again_s == 0 and self._has_room(n_longest)
        if not self._is_unshared() or not self._has_room(n_longest):
            self._lost_s = 0.0
            return False
        return self._lost_s >= self._change_s + again_s

    def changed(self, seconds: float) -> None:
        """The other layout is in force since now; to lay out the cells took `seconds`."""
        self.is_apart = not self.is_apart
        self._begins_apart = self.is_outgrown = False
        self._lost_s = 0.0
        self._n_seen = 0
        self._change_s = seconds

    def _should_go_back(self) -> bool:
        return self._reuse > REUSE_HIGH or max(self._crowds, default=0) > self.apart.n_slots

    def _is_unshared(self) -> bool:
        return self._n_seen >= N_SEEN_LEAST and self._reuse < REUSE_LOW

    def _has_room(self, n_longest: int) -> bool:
        longest = max([n_longest, *self._lengths])  # nobody may have ended yet
        return longest <= self.apart.n_cells_slot and max(self._crowds, default=0) <= self.apart.n_slots


def likely_length(n_tokens: int, n_max: int) -> int:
    """Tokens that a sequence with so many now may come to have, or one like it, if it has no more than `n_max` in any case."""
    return min(int(SPARE * n_tokens), n_max)
