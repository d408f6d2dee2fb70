"""Decides which cells go to the host pool when they must leave the model's memory, and which come back for a new sequence."""

from __future__ import annotations

import attrs

from cllm.engine.batch.plan import Move, Plan, Restore, Save
from cllm.engine.memory.hostpool import HostPool, Piece
from cllm.engine.memory.pieces import Chain
from cllm.engine.memory.prefix import Key
from cllm.engine.memory.prices import Prices
from cllm.engine.memory.statesize import StateSize

# Of saving within one step, for which all who generate wait; one branch may take longer, others then go without a copy. Where nobody does,
# those who come would wait longer for computing it again: of 32 conversations in 8 slots, eight ended and eight came at once, of whom two
# were saved, so that the others computed a turn more the next time, 228 rows for 114.
SAVE_S_MAX, SAVE_ALONE_S_MAX = 0.1, 2.0


@attrs.define(eq=False)
class _Saving:
    """A save that is planned, and not settled yet."""

    start: int
    end: int


class Offload:
    """The host pool's side of a model's memory: what is worth a copy, and what came of the copies. It changes no cell."""

    def __init__(self, pool: HostPool, prices: Prices, *, can_save_part: bool, n_cells_slot: int, cell_n_bytes: float = 1.0) -> None:
        self.pool = pool
        self.prices = prices
        self.can_save_part = pool.takes_parts = can_save_part
        self._n_cells_slot = n_cells_slot
        self._saving: dict[int, _Saving] = {}  # by slot
        self._saving_s = 0.0
        self.is_generating = True  # whether somebody generates, who waits for what is saved; told by the scheduler
        self._size = StateSize(cell_n_bytes)

    @property
    def n_cells_max(self) -> int:
        """Cells that the pool takes, about."""
        return self._size.n_cells(self.pool.n_bytes_max)

    # --- cells that go ------------------------------------------------------------------------------------------------

    def save_of(
        self, slot: int, key: Key, tokens: list[int], n_alone: int, *, is_awaited: bool = False, whole: bool = False, is_spare: bool = False
    ) -> Save | None:
        """Return the move that saves the last `n_alone` cells of a slot that holds `tokens`; None if that is not worth it or not needed.

        `is_awaited` says that somebody waits who will go on from them; a `whole` slot is to be there in one piece; of one that `is_spare`
        the cells stay.
        """
        end = len(tokens)
        start = end - n_alone if self.can_save_part else 0
        saving = self._saving.get(slot)
        if saving is not None and saving.start <= start and end <= saving.end and self.pool.can_cut:
            return None
        seconds = self.prices.save_s(end - start)
        most_s = SAVE_S_MAX if self.is_generating else SAVE_ALONE_S_MAX
        if not self._is_worth(end - start, is_awaited=is_awaited) or (self._saving_s and self._saving_s + seconds > most_s):
            return None
        if self.pool.covers(key, tokens, start, in_one=whole):
            return None
        self._saving_s += seconds
        self._saving[slot] = _Saving(start, end)
        return Save(slot, start, key, tokens, is_spare)

    def _is_worth(self, n_cells: int, *, is_awaited: bool) -> bool:
        has_room = 0 < n_cells <= self.n_cells_max
        return has_room and self.prices.is_worth_saving(n_cells, is_awaited=is_awaited)

    def within_bound(self, moves: list[Move]) -> list[Move]:
        """The moves of one step without the saves that the pool has no room for beside those after them: all are in memory when the first
        of them comes to the pool, which would drop them at once. What was of use last, and a branch before what goes on from it, is last.

        Until one was saved nobody knows what a state has beside its cells, where that may be much: then one is saved.
        """
        saves = [move for move in moves if isinstance(move, Save)]
        if len(saves) < 2:
            return moves
        n_left: float = self.pool.n_bytes_at_once
        left_out: set[int] = set()
        for i, save in enumerate(reversed(saves)):
            n_left -= self._size.n_bytes(len(save.tokens) - save.start)
            if n_left < 0 or (i and not (self._size.is_known or self.can_save_part)):
                left_out = {id(one) for one in saves[: len(saves) - i]}
                break
        for save in saves:
            if id(save) in left_out:
                self._saving.pop(save.slot, None)
        return [move for move in moves if id(move) not in left_out] if left_out else moves

    def dropped(self, slot: int) -> None:
        """The slot is another's from now on."""
        self._saving.pop(slot, None)

    # --- cells that come ----------------------------------------------------------------------------------------------

    def chain_for(self, key: Key, tokens: list[int], n_have: int) -> Chain[Piece] | None:
        """Return the pieces to restore for a sequence that has `n_have` cells without them; None if computing the rest is as good."""
        chain = self.pool.find(key, tokens, n_have)
        if chain is None or max(len(piece.tokens) for piece in chain.pieces) > self._n_cells_slot:
            return None
        n_moved = sum(piece.n_cells for piece in chain.pieces)
        return chain if self.prices.is_worth_restoring(n_moved, chain.end - n_have) else None

    def succeeds(self, other: Offload, *, carries_states: bool) -> None:
        """Take over what `other` has counted and learned of the work, and its states if they fit still."""
        if carries_states:
            self.pool = other.pool
            self.pool.takes_parts = self.can_save_part
            if not self.can_save_part:
                self.pool.give_up_parts()
        else:
            self.pool.totals = other.pool.totals
        self.prices.succeed(other.prices)
        self._size = other._size

    def lost(self, plan: Plan | None = None) -> None:
        """What was to be saved is gone.

        If the model died in the step of `plan`, what that was to restore may be why, and goes: it would be restored again at once, and no
        sequence is to blame for it. From the disk it goes where the step had no rows, of which it could have died as well.
        """
        if plan is not None:
            came = [outcome.move for outcome in plan.restored]
            for move in plan.moves:
                if isinstance(move, Restore) and move not in came:
                    self.pool.totals.n_failures += 1
                    for piece in move.chain.pieces:
                        (self.pool.discard if plan.n_rows else self.pool.refuse)(piece)
        self._saving.clear()
        self._saving_s = 0.0

    # --- what came of it ----------------------------------------------------------------------------------------------

    def settle(self, plan: Plan) -> None:
        """Take what was saved, and note what could not be restored. Goes for a step that raised as well."""
        totals = self.pool.totals
        pieces: list[tuple[Piece, bool]] = []
        for save, state, seconds in plan.saved:
            if state is None:
                totals.n_failures += 1
                continue
            n_cells = len(save.tokens) - save.start
            totals.n_saves += 1
            totals.n_cells_saved += n_cells
            self.prices.saved(n_cells, seconds)
            self._size.saw(n_cells, len(state))
            pieces.append((Piece(save.key, save.tokens, save.start, state), save.is_spare))
        if pieces:
            self.pool.put_all(pieces)
        for outcome in plan.restored:
            if outcome.n_tokens > outcome.move.chain.start:
                totals.n_restores += 1
                totals.n_cells_restored += outcome.n_tokens - outcome.move.chain.start
                self.prices.restored(outcome.n_moved, outcome.seconds)
            if outcome.unfit is not None:
                totals.n_failures += 1
                self.pool.refuse(outcome.unfit)
        self._saving.clear()
        self._saving_s = 0.0
