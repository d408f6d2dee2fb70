"""What it costs to move cells to the host and back, to carry them, and to compute them anew: what eviction weighs against each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from cllm.engine.memory.demand import Demand

SAVE_CELL_S = 2e-6  # until the first save has been measured: a hopeful guess, or there might never be one
RESTORE_CELL_S = 3e-6
PREFILL_ROW_S = 3.5e-3  # measured on two cores with a model of 0.6 billion parameters, for who has no cost model
MOVE_S = 5e-5  # for the calls of one move, however few its cells
PATIENCE = 0.2  # of what a move costs, that carrying may cost before; at 1, mixed prompts of 8 to 240 tokens took a seventh longer
WEIGHT = 0.2  # of the newest move in what is known of the moves
FADE = 0.98  # of a price that has just kept a move from being made: one that is never paid is never corrected
N_CELLS_TO_LEARN = 16  # of a smaller move the calls are the larger part
CELL_S_LEAST = 1e-12  # a clock may have seen no time at all


class Costs(Protocol):
    """What a cost model knows of it; seconds, None where it was not measured."""

    def prefill_s(self, n_rows: int, n_cells: int = 0) -> float: ...

    def carry_s(self, n_cells: int, n_rows: int) -> float: ...

    def save_s(self, n_cells: int) -> float | None: ...

    def restore_s(self, n_cells: int) -> float | None: ...


@attrs.define
class _Price:
    """Seconds of a move: a part that every state has, however short, and one for each cell; corrected by what moves really took."""

    fixed_s: float
    cell_s: float
    is_known: bool  # or a guess

    @classmethod
    def of(cls, measured: Callable[[int], float | None] | None, guess_cell_s: float) -> _Price:
        """What was `measured` for so many cells, or the guess where nothing was."""
        fixed_s, one_s = (measured(0), measured(1)) if measured else (None, None)
        return cls(0.0, guess_cell_s, False) if fixed_s is None or not one_s else cls(fixed_s, one_s - fixed_s, True)

    def seconds(self, n_cells: int) -> float:
        return MOVE_S + self.fixed_s + n_cells * self.cell_s

    def learn(self, n_cells: int, seconds: float) -> None:
        """Take the newest move into account, by which both parts grow or shrink alike: what one state took does not tell them apart."""
        if n_cells < N_CELLS_TO_LEARN:
            return
        if self.is_known:
            self.scale(1 + WEIGHT * (seconds / (self.fixed_s + n_cells * self.cell_s) - 1))
        else:
            self.cell_s, self.is_known = max(seconds / n_cells, CELL_S_LEAST), True

    def scale(self, factor: float) -> None:
        self.fixed_s *= factor
        self.cell_s *= factor


class Prices:
    """The cost model's numbers where it has them, corrected by what moves really took."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.demand = Demand()
        self._costs = costs
        self._save = _Price.of(costs.save_s if costs else None, SAVE_CELL_S)
        self._restore = _Price.of(costs.restore_s if costs else None, RESTORE_CELL_S)

    def succeed(self, other: Prices) -> None:
        """Take over what `other` has learned, of the same machine."""
        self.demand = other.demand
        self._save, self._restore = other._save, other._restore

    def save_s(self, n_cells: int) -> float:
        """Seconds to save a state of so many cells."""
        return self._save.seconds(n_cells)

    def restore_s(self, n_cells: int) -> float:
        """Seconds to restore a state of so many cells."""
        return self._restore.seconds(n_cells)

    def prefill_s(self, n_rows: int) -> float:
        """Seconds to compute so many cells."""
        return n_rows * PREFILL_ROW_S if self._costs is None else self._costs.prefill_s(n_rows)

    def carry_cell_s(self, n_rows: int) -> float:
        """Seconds that one cell which nobody reads adds to a step of `n_rows` rows; 0 when that is not known."""
        return 0.0 if self._costs is None else self._costs.carry_s(1, n_rows)

    def is_worth_saving(self, n_cells: int, *, is_awaited: bool = False) -> bool:
        """Say whether cells that must go are to be saved: unless somebody waits for them, they may never be asked for again.

        Where it would not even be for those, it costs a little less each time, or to restore does, so that a price which was measured on a
        disturbed machine does not stand for ever.
        """
        share = 1.0 if is_awaited else self.demand.share
        save_s, restore_s = self.save_s(n_cells), self.restore_s(n_cells)
        gain_s = self.prefill_s(n_cells) - restore_s
        if save_s >= gain_s:
            dearer = self._restore if restore_s > save_s else self._save  # which is the likelier to be wrong
            if dearer.is_known:
                dearer.scale(FADE)
        return save_s < share * gain_s

    def is_tail_worth_saving(self, n_cells: int, n_tail: int) -> bool:
        """Say whether `n_cells` are to be saved, as no less can be, of which `n_tail` go that somebody waits for."""
        return self.save_s(n_cells) < self.prefill_s(n_tail) - self.restore_s(n_cells)

    def is_worth_restoring(self, n_cells: int, n_gained: int) -> bool:
        """Say whether to restore `n_cells` cells, of which `n_gained` would have to be computed otherwise."""
        return self.restore_s(n_cells) < self.prefill_s(n_gained)

    def is_worth_a_loss(self, n_cells: int, carried_cell_s: float) -> bool:
        """Say whether `n_cells` cells, each of which cost `carried_cell_s` to carry, should go for good, where there is no host.

        Whoever lets go once carrying has cost what computing anew is likely to pays at most twice what would have been best.
        """
        return n_cells * carried_cell_s > self.demand.share * self.prefill_s(n_cells)

    def is_worth_a_move(self, n_cells: int, carried_cell_s: float, *, is_awaited: bool = False) -> bool:
        """Say whether `n_cells` cells, each of which cost `carried_cell_s` to carry, should go: to the host, or for good.

        Who changes over as soon as carrying has cost as much as a move pays at most twice what would have been best, whatever comes. It
        is done earlier: what comes back soon mostly comes back at once, and a cell costs more than its own part, since attention walks
        up to the highest cell in use and one that stays keeps those below it, which are free, in its way. What somebody waits for surely
        comes back, and is carried until that has cost the whole of a move.
        """
        share, patience = (1.0, 1.0) if is_awaited else (self.demand.share, PATIENCE)
        without_s = min(self.save_s(n_cells) + self.restore_s(n_cells), share * self.prefill_s(n_cells))
        return n_cells * carried_cell_s > patience * without_s

    def saved(self, n_cells: int, seconds: float) -> None:
        """Learn what a save took."""
        self._save.learn(n_cells, seconds)

    def restored(self, n_cells: int, seconds: float) -> None:
        """Learn what a restore took."""
        self._restore.learn(n_cells, seconds)
