"""Closes the gaps between slots that have rows, where each slot has cells of its own, so that their rows are computed at once.

A pass reads all weights, whatever its rows. Thirteen rows of slots with three gaps between them are four passes, 155 ms measured on two
cores; with a row of each slot between them that nobody wants, a filler, they are one of sixteen, 90 ms. What a filler leaves is cut off
again after the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Final

from cllm.engine.batch.passes import consecutive

N_TILE: Final = 16  # rows that kernels take together
GAIN: Final = 0.97  # of the passes' time that fillers have to come down to: predictions are no better
N_STEPS_KEPT: Final = 64  # for which a choice stands while the same slots have rows; what is known of the prices changes slowly


class Fillers:
    """Chooses the slots whose rows close gaps. `pass_s` gives the seconds of a pass of so many rows, `read_s` what one row takes longer
    for so many cells before it, and `position` where a slot goes on, None if no filler may go there.
    """

    def __init__(
        self, n_slots: int, pass_s: Callable[[int], float], read_s: Callable[[int], float], position: Callable[[int], int | None]
    ) -> None:
        self._n_slots = n_slots
        self._pass_s = pass_s
        self._read_s = read_s
        self._position = position
        self._chosen: dict[tuple[int, ...], list[int]] = {}
        self._n_asked = 0

    def beside(self, slots: Seq[int]) -> list[tuple[int, int]]:
        """Return slots and positions of the rows to add to one row of each of `slots`, which ascend."""
        self._n_asked += 1
        if self._n_asked % N_STEPS_KEPT == 0:
            self._chosen.clear()
        key = tuple(slots)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._choose(key)
        found = []
        for slot in chosen:
            position = self._position(slot)
            if position is None:  # it was free, or had room, when this was chosen
                del self._chosen[key]
                return self.beside(slots)
            found.append((slot, position))
        return found

    def _choose(self, slots: Seq[int]) -> list[int]:
        runs = consecutive(slots)
        segments, seconds = self._joined(runs)
        if seconds > GAIN * sum(self._pass_s(end - start + 1) for start, end in runs):
            segments = runs
        given = set(slots)
        inside = [slot for start, end in segments for slot in range(start, end + 1) if slot not in given]
        return inside + self._rest_of_tile(*segments[0]) if len(segments) == 1 else inside

    def _rest_of_tile(self, start: int, end: int) -> list[int]:
        """Slots on either side that make whole tiles of all, if that takes less time: fifteen rows take longer than sixteen."""
        n = end - start + 1
        n_more = -n % N_TILE
        around = [*range(end + 1, self._n_slots), *range(start - 1, -1, -1)][:n_more]
        if len(around) < n_more or self._pass_s(n + n_more) + sum(map(self._filler_s, around)) > GAIN * self._pass_s(n):
            return []
        return around

    def _filler_s(self, slot: int) -> float:
        """Seconds that a filler there reads for; infinite where none may go."""
        position = self._position(slot)
        return math.inf if position is None else self._read_s(position)

    def _joined(self, runs: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], float]:
        """Join the runs to the segments whose passes take the least time in all."""
        between = [range(one[1] + 1, following[0]) for one, following in pairwise(runs)]
        gaps_s = [sum(map(self._filler_s, slots)) for slots in between]
        best: list[tuple[float, int]] = [(0.0, 0)]  # for each count of runs: seconds, and the first run of the last segment
        for last, (_, end) in enumerate(runs):
            found = (best[last][0] + self._pass_s(end - runs[last][0] + 1), last)
            fillers_s = 0.0
            for first in range(last - 1, -1, -1):
                fillers_s += gaps_s[first]
                if fillers_s == math.inf:
                    break
                found = min(found, (best[first][0] + self._pass_s(end - runs[first][0] + 1) + fillers_s, first))
            best.append(found)
        segments = []
        last = len(runs)
        while last:
            first = best[last][1]
            segments.append((runs[first][0], runs[last - 1][1]))
            last = first
        return segments[::-1], best[-1][0]
