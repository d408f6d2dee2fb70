"""What cached branches have cost since they rest: attention walks by their cells in every step, whoever computes."""

from __future__ import annotations


class Carrying:
    """Seconds by slot, for one cell of its branch."""

    def __init__(self) -> None:
        self._cell_s = 0.0  # what a cell that was cached from the start on has cost
        self._cell_s_at: dict[int, float] = {}  # when each slot's branch began to rest

    def rests(self, slot: int) -> None:
        """The slot's branch is cached from now on, or has been of use just now."""
        self._cell_s_at[slot] = self._cell_s

    def ends(self, slot: int) -> None:
        """The slot is another's from now on."""
        self._cell_s_at.pop(slot, None)

    def forget(self) -> None:
        """Nothing is carried."""
        self._cell_s_at.clear()

    def stepped(self, cell_s: float) -> None:
        """Each cell that is cached has cost so much more."""
        self._cell_s += cell_s

    def cell_s(self, slot: int) -> float:
        """What each cell of the slot's branch has cost."""
        return self._cell_s - self._cell_s_at.get(slot, self._cell_s)
