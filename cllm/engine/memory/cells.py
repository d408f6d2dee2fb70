"""Who holds how many cells and which slot: counters, kept and never recounted."""

from __future__ import annotations

import heapq

import attrs


@attrs.define(eq=False)
class Cells:
    """The cells and slots of a model, as they are dealt out.

    Always: n_free + n_held + n_cached == n_total. A cell that several sequences share counts once.
    """

    n_total: int
    n_slots: int
    n_held: int = 0  # by live sequences, reserved ones included
    n_cached: int = 0  # by finished sequences alone, kept for whoever begins with the same tokens
    _free_slots: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._free_slots = list(range(self.n_slots))  # a heap

    @property
    def n_free(self) -> int:
        """Cells that anyone may take."""
        return self.n_total - self.n_held - self.n_cached

    @property
    def n_in_use(self) -> int:
        """Cells that somebody has, live or ended: attention in a pool walks them."""
        return self.n_held + self.n_cached

    @property
    def n_free_slots(self) -> int:
        """Slots that nobody has, live or finished."""
        return len(self._free_slots)

    def hold(self, n_cells: int) -> None:
        """Take free cells; the caller has checked that there are so many."""
        self.n_held += n_cells
        assert self.n_free >= 0, "more cells held than there are"

    def release(self, n_cells: int) -> None:
        """Give held cells back."""
        self.n_held -= n_cells
        assert self.n_held >= 0, "more cells given back than were held"

    def cache(self, n_cells: int) -> None:
        """Keep held cells that no live sequence has any more."""
        self.n_held -= n_cells
        self.n_cached += n_cells
        assert self.n_held >= 0, "more cells cached than were held"

    def revive(self, n_cells: int) -> None:
        """Hold cached cells again: a live sequence shares them."""
        self.n_held += n_cells
        self.n_cached -= n_cells
        assert self.n_cached >= 0, "more cells revived than were cached"

    def evict(self, n_cells: int) -> None:
        """Free cached cells."""
        self.n_cached -= n_cells
        assert self.n_cached >= 0, "more cells evicted than were cached"

    def take_slot(self) -> int:
        """Take the lowest free slot, so that those in use lie together; the caller has checked that there is one."""
        return heapq.heappop(self._free_slots)

    def give_slot(self, slot: int) -> None:
        """Give a slot back. Its cells must be dropped by a move that is planned before anyone else's rows go there."""
        assert slot not in self._free_slots, f"slot {slot} given back twice"
        heapq.heappush(self._free_slots, slot)
