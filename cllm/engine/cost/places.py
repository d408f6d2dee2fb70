"""How many sequences may run at once: as many as leave the time between tokens bearable, by the cost model."""

from __future__ import annotations

from typing import Final

from cllm.engine.cost.model import CostModel

SHARE_AIMED: Final = 0.8  # of the time between tokens that is bearable: steps vary
SHARE_OF_BEST: Final = 0.85  # of the tokens in a second that the best number of places gives: what is left when a model is too slow
N_USEFUL: Final = 16  # places that fill a CPU's kernels: where that takes too long, the best number is not looked for among more
N_LEAST: Final = 4  # places in any case: behind fewer answers, those who wait would wait for the whole of them
N_CALLS_TO_REFRESH: Final = 32


class Places:
    """A number that follows the machine and the work. With `itl_max_s` None it is always `n_max`."""

    def __init__(self, cost: CostModel, *, n_max: int, itl_max_s: float | None) -> None:
        self._cost = cost
        self._n_max = n_max
        self._itl_max_s = itl_max_s
        self._n_calls = 0
        self._n = n_max

    def n(self, n_cells: int, prompt_rows: float, n_own: float = 0.0) -> int:
        """Return how many sequences may run while `n_cells` cells are in use, and each generated token comes with so many prompts' rows.

        Each of them has `n_own` cells.
        """
        if self._itl_max_s is None:
            return self._n_max
        if self._n_calls % N_CALLS_TO_REFRESH == 0:
            n = self._bearable(SHARE_AIMED * self._itl_max_s, n_cells, prompt_rows, n_own)
            self._n = max(n, min(N_LEAST, self._n_max))
        self._n_calls += 1
        return self._n

    def _bearable(self, step_s: float, n_cells: int, prompt_rows: float, n_own: float) -> int:
        """A place for each is filled again as soon as it is free, so that a step has the rows of prompts that keep all places filled."""
        if not self._cost.is_grounded:
            return self._n_max

        def full_s(n: int) -> float:
            n_rows = min(round(n * (1.0 + prompt_rows)), self._cost.n_rows_max)
            return self._cost.usual_s(n_rows, n, n_cells, round(n * n_own))

        for n in range(self._n_max, N_USEFUL, -1):
            if full_s(n) <= step_s:
                return n
        rates = {n: n / full_s(n) for n in range(min(N_USEFUL, self._n_max), 0, -1)}
        least = SHARE_OF_BEST * max(rates.values())
        useful = [n for n, rate in rates.items() if rate >= least]
        return next((n for n in useful if full_s(n) <= step_s), useful[-1])
