"""How many rows a step of the embedder may have, from how long rows have taken: others wait for its end."""

from __future__ import annotations

N_ROWS_FIRST = 32  # before anything was measured
N_ROWS_LEAST = 8  # fewer are hardly quicker: a step reads the whole model for one row as for eight
WEIGHT = 0.2  # of the newest step; the mean of about the last ten


class Pace:
    """Keeps the time of a row, and gives the rows that fit a span."""

    def __init__(self) -> None:
        self._row_s: float | None = None

    def n_rows(self, aim_s: float) -> int:
        """Return the rows of a step that should take about `aim_s`."""
        if self._row_s is None:
            return N_ROWS_FIRST
        return max(int(aim_s / max(self._row_s, 1e-9)), N_ROWS_LEAST)

    def took(self, n_rows: int, seconds: float) -> None:
        """Take note of a step."""
        row_s = seconds / n_rows
        self._row_s = row_s if self._row_s is None else self._row_s + WEIGHT * (row_s - self._row_s)
