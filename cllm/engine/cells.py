"""Who holds how many cells and which slot: counters, kept and never recounted."""

from __future__ import annotations

import heapq

import attrs


@attrs.define(eq=False)
class Cells:
    """The cells and slots of a model, as the scheduler deals them out.

    Always: n_free + n_held + n_cached == n_total, and every slot is free or held.
    """

    n_total: int
    n_slots: int
    n_held: int = 0  # by live sequences, reserved ones included
    n_cached: int = 0  # by finished sequences whose prefixes are kept
    _free_slots: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._free_slots = list(range(self.n_slots))  # a heap

    @property
    def n_free(self) -> int:
        """Cells that anyone may take."""
        return self.n_total - self.n_held - self.n_cached

    @property
    def n_free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._free_slots)

    def hold(self, n_cells: int) -> None:
        """Take cells; the caller has checked that they are free."""
        self.n_held += n_cells
        assert self.n_free >= 0, "more cells held than there are"

    def release(self, n_cells: int) -> None:
        """Give cells back."""
        self.n_held -= n_cells
        assert self.n_held >= 0, "more cells given back than were held"

    def take_slot(self) -> int:
        """Take the lowest free slot, so that those in use lie together; the caller has checked that there is one."""
        return heapq.heappop(self._free_slots)

    def give_slot(self, slot: int) -> None:
        """Give a slot back. Its cells must be dropped by a move that is planned before anyone else's rows go there."""
        assert slot not in self._free_slots, f"slot {slot} given back twice"
        heapq.heappush(self._free_slots, slot)
