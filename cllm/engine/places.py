"""How many sequences may run at once: as many as leave the time between tokens bearable, by the cost model."""

from __future__ import annotations

from typing import Final

from cllm.engine.cost import CostModel

SHARE_OF_PROMPTS: Final = 2.0  # a step beside waiting prompts takes about so many times one without: the pace of `RowBudget`
N_LEAST: Final = 16  # rows that fill a CPU's kernels: with fewer places, all are served later and hardly anybody faster
N_CALLS_TO_REFRESH: Final = 32


class Places:
    """A number that follows the machine. With `itl_max_s` None it is always `n_max`."""

    def __init__(self, cost: CostModel, *, n_max: int, itl_max_s: float | None) -> None:
        self._cost = cost
        self._n_max = n_max
        self._itl_max_s = itl_max_s
        self._n_calls = 0
        self._n = n_max

    def n(self, n_cells: int) -> int:
        """Return how many sequences may run while `n_cells` cells are in use."""
        if self._itl_max_s is None:
            return self._n_max
        if self._n_calls % N_CALLS_TO_REFRESH == 0:
            self._n = self._bearable(self._itl_max_s / SHARE_OF_PROMPTS, n_cells)
        self._n_calls += 1
        return self._n

    def _bearable(self, step_s: float, n_cells: int) -> int:
        if not self._cost.is_grounded:
            return self._n_max
        n = self._n_max
        while n > N_LEAST and self._cost.step_s(n, n, n_cells) > step_s:
            n -= 1
        return n
