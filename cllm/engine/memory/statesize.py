"""How many bytes the saved state of so many cells has, learned from those that were saved."""

from __future__ import annotations

import attrs

SPREAD = 2  # times as many cells as the shortest state has, from which on a longer one tells what each of them takes


@attrs.define(eq=False)
class StateSize:
    """A part that every state has, however short, as recurrent models' states do, and one for each cell.

    A line through the shortest and the longest state so far. Until they are far enough apart, `cell_n_bytes` is believed, which the
    model's memory was given for each cell.
    """

    cell_n_bytes: float
    _shortest: tuple[int, int] | None = None  # (cells, bytes)
    _longest: tuple[int, int] | None = None

    def saw(self, n_cells: int, n_bytes: int) -> None:
        """A state of `n_cells` cells has `n_bytes` bytes."""
        if self._shortest is None or n_cells <= self._shortest[0]:
            self._shortest = n_cells, n_bytes
        if self._longest is None or n_cells >= self._longest[0]:
            self._longest = n_cells, n_bytes
        (n_short, least), (n_long, most) = self._shortest, self._longest
        if n_long >= SPREAD * n_short:
            self.cell_n_bytes = max((most - least) / (n_long - n_short), 1.0)

    @property
    def fixed_n_bytes(self) -> float:
        """Of a state, whatever its length."""
        if self._longest is None:
            return 0.0
        n_cells, n_bytes = self._longest
        return max(n_bytes - n_cells * self.cell_n_bytes, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether a state was seen already."""
        return self._longest is not None

    def n_bytes(self, n_cells: int) -> float:
        """Bytes of a state of so many cells."""
        return self.fixed_n_bytes + n_cells * self.cell_n_bytes

    def n_cells(self, n_bytes: int) -> int:
        """Cells of the longest state that fits into `n_bytes`; 0: none does."""
        return max(int((n_bytes - self.fixed_n_bytes) / self.cell_n_bytes), 0)
