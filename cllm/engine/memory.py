"""Deals out the model's memory: which slot and how many cells a sequence has, and which moves the model owes for it."""

from __future__ import annotations

from collections.abc import Iterable

from cllm.engine.cells import Cells
from cllm.engine.plan import Drop, Move
from cllm.engine.sequence import Sequence


class Memory:
    """The slots and cells of one model. It changes what a sequence holds (`slot`, `n_held`, `n_computed`), never its phase."""

    def __init__(self, n_cells: int, n_slots: int) -> None:
        self.cells = Cells(n_cells, n_slots)
        self._moves: list[Move] = []  # owed to the model before anyone's rows

    def fits(self, sequence: Sequence, n_spare: int) -> bool:
        """Say whether a waiting sequence's tokens and `n_spare` cells for others find room now."""
        return len(sequence.tokens) + n_spare <= self.cells.n_free

    def take(self, sequence: Sequence) -> None:
        """Give a waiting sequence that fits a slot, and cells for all its tokens."""
        sequence.slot = self.cells.take_slot()
        sequence.n_held = len(sequence.tokens)
        self.cells.hold(sequence.n_held)

    def reserve(self, sequence: Sequence) -> bool:
        """Hold a cell for a decoding sequence's next row; False when there is none."""
        if sequence.n_held > sequence.n_computed:
            return True
        if not self.cells.n_free:
            return False
        sequence.n_held += 1
        self.cells.hold(1)
        return True

    def computed(self, sequence: Sequence, n_rows: int) -> None:
        """Note that the sequence's next `n_rows` tokens have their cells."""
        sequence.n_computed += n_rows

    def free(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds."""
        drop = Drop(sequence.slot)
        if drop not in self._moves:
            self._moves.append(drop)
        self.cells.give_slot(sequence.slot)
        self.cells.release(sequence.n_held)
        sequence.n_held = sequence.n_computed = 0

    # --- what the model is owed ---------------------------------------------------------------------------------------

    def take_moves(self) -> list[Move]:
        """Hand over the moves that must be done before the next step's rows."""
        moves, self._moves = self._moves, []
        return moves

    def owe_again(self, moves: list[Move]) -> None:
        """The step raised, perhaps before its moves were done; dropping a slot twice is harmless."""
        self._moves = list(dict.fromkeys([*moves, *self._moves]))

    # --- how things stand ---------------------------------------------------------------------------------------------

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that what is counted is what `running`, all that hold a slot, have."""
        cells, running = self.cells, list(running)
        slots = {sequence.slot for sequence in running}
        assert cells.n_free + cells.n_held + cells.n_cached == cells.n_total
        assert cells.n_held == sum(sequence.n_held for sequence in running)
        assert cells.n_free_slots + len(slots) == cells.n_slots
        assert len(slots) == len(running)
        assert all(sequence.n_computed <= sequence.n_held for sequence in running)
