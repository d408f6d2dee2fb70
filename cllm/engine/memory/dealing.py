"""Deals out the model's memory: which slot and which cells a sequence has, what is kept of ended ones, and the moves that follow."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable

import attrs

from cllm.engine.batch.plan import Drop, Move, Plan, Restore, Restored, Save, Share, Trim
from cllm.engine.limits import N_COPY_LEAST, MemoryLimits
from cllm.engine.memory.carrying import Carrying
from cllm.engine.memory.cells import Cells
from cllm.engine.memory.hostpool import Piece, Text
from cllm.engine.memory.offload import Offload
from cllm.engine.memory.pieces import Chain
from cllm.engine.memory.prefix import Key, Leaving, PrefixTree
from cllm.engine.memory.prices import Prices
from cllm.engine.memory.reuse import N_TAIL_FORGONE, Finder, Known, Reuse, Way
from cllm.engine.sequence import Miss, Sequence

N_EVICT_LEAST = 64  # cells that a trim frees, if there are so many: a move for each token of a step would cost more than the tokens
N_EVICT_MOST = 256  # that one step moves to the host unasked, or saves for a few that it needs: all who generate wait for it
N_TOKENS_AWAITED_MOST = 1 << 17  # of these together: each is compared with what is there
N_AWAITED_MOST = 256  # who wait, whose pieces on the host are kept before others: they are looked for whenever one must go
N_BACKED_UP_LEAST = 64  # new cells of a cached branch for which a copy and a file of its own are worth it
SHARE_BACKED_UP_LEAST = 0.25  # of a branch that is new, where only the whole of it can be copied, into one more file as large


@attrs.define(eq=False)
class MemoryTotals:
    """Counts since the start."""

    n_hits: int = 0  # admissions that found a beginning of their tokens
    n_tokens_saved: int = 0  # tokens that were not computed for it
    n_prompt_tokens_saved: int = 0  # of these, prompts' at their first admission: who comes back has been counted
    n_evicted_cells: int = 0  # cached ones that made room
    n_evicted_slots: int = 0
    n_retired_slots: int = 0  # of these, such as went because carrying them cost more


class Memory:
    """The slots and cells of one model. It changes what a sequence holds and what was known of it, never its phase."""

    def __init__(self, limits: MemoryLimits, offload: Offload | None = None, prices: Prices | None = None) -> None:
        self.limits = limits
        self.cells = Cells(limits.n_cells, limits.n_slots)
        self.tree = PrefixTree(self.cells, can_trim=limits.can_trim)
        self.totals = MemoryTotals()
        self._live: dict[int, Sequence] = {}  # by slot
        self._wanted: dict[int, int] = {}  # slots that waiting sequences left, or found at their arrival, by sequence
        self._waiting: dict[int, Sequence] = {}  # all who wait and may have cells that are there, by sequence
        self._moves: list[Move] = []  # owed to the model before anyone's rows
        self.offload = offload
        self._prices = prices or Prices()
        self._carrying = Carrying()
        self._tell_who_waits()
        self._to_save: list[Sequence] = []  # as they are now, where slots cannot be cut back to it later
        self._restoring: dict[int, Restore] = {}  # by slot: planned, and not settled yet
        self._finder = self._new_finder()

    def _new_finder(self) -> Finder:
        return Finder(self.limits, self.tree, self.cells, self.offload, self._n_in, self._restoring)

    @property
    def prices(self) -> Prices:
        """What cells cost, with a host pool and without."""
        return self._prices if self.offload is None else self.offload.prices

    @property
    def n_cached_slots(self) -> int:
        """Slots that ended sequences have left something in."""
        return self.tree.n_resting

    # --- who comes ----------------------------------------------------------------------------------------------------

    def n_known(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence need not be computed if it comes now."""
        return self._finder.find(sequence).n_tokens

    def n_shared(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence somebody who runs has cells of, whether or not it can have them without computing.

        Where a copy would be needed, a few that are hardly worth its calls do not count.
        """
        if not sequence.may_share:
            return 0
        match = self.tree.match(sequence.cache_key, sequence.tokens, sequence.n_shareable, whole=not self.limits.can_trim)
        n_shared = 0 if match is None else match.n_tokens - match.n_cached
        return n_shared if self.limits.can_share or n_shared >= N_COPY_LEAST else 0

    @property
    def n_asked_for(self) -> float:
        """How many of the cells that nobody holds are asked for again if it goes on as it went: those here, and as many on the host as
        would fit here; what is older is hardly asked for.
        """
        if self.offload is None:
            return 0.0
        return self.offload.prices.demand.share * (self.cells.n_cached + min(self.offload.pool.n_cells, self.limits.n_cells))

    def carry_s(self, n_cells: int) -> float:
        """Seconds to take `n_cells` cells and what is asked for of the cached ones to the host and back; infinite without one.

        What finds no room there is computed again.
        """
        if self.offload is None:
            return math.inf
        n_cells += round(self.offload.prices.demand.share * self.cells.n_cached)
        n_carried = min(n_cells, self.offload.n_cells_max)
        prices = self.offload.prices
        carried_s = prices.save_s(n_carried) + prices.restore_s(n_carried) if n_carried else 0.0
        return carried_s + (prices.prefill_s(n_cells - n_carried) if n_cells > n_carried else 0.0)

    def n_kept(self, key: Key, tokens: list[int]) -> int:
        """How many of `tokens`, the last one apart, are in the model's memory or on the host."""
        match = self.tree.match(key, tokens, len(tokens) - 1, whole=not self.limits.can_trim, n_in=self._n_in)
        n_have = 0 if match is None else match.n_tokens
        chain = None if self.offload is None else self.offload.pool.find(key, tokens[:-1], n_have)
        return n_have if chain is None else chain.end

    def fits(self, sequence: Sequence, n_spare: int) -> bool:
        """Say whether a waiting sequence's tokens and `n_spare` cells for others find room now, cached branches making way."""
        return self.n_missing(sequence, n_spare) <= 0

    def n_missing(self, sequence: Sequence, n_spare: int) -> int:
        """How many cells are wanting for that; 0 or less: none."""
        n_wanted = len(sequence.tokens) + n_spare
        reuse = self._finder.find(sequence).reuse
        n_usable = self.cells.n_free + self.cells.n_cached
        if reuse is not None and reuse.way is not Way.COPY:
            n_wanted -= reuse.n_tokens
            n_usable -= reuse.match.n_cached
        return n_wanted - n_usable

    def freeing(self, newcomer: Sequence) -> Callable[[Sequence], int]:
        """Return what says of sequences that run, of one after the other, how many cells `newcomer` could have for it.

        What others have as well is free only when the last of them goes, and what the newcomer would share is not wanted of anybody.
        """
        reuse = self._finder.find(newcomer).reuse
        leaving = Leaving(self.tree, None if reuse is None or reuse.way is Way.COPY else reuse.match)

        def n_freed(sequence: Sequence) -> int:
            slot = sequence.slot
            return sequence.n_held if slot not in self.tree else sequence.n_held - self.tree.n_tokens(slot) + leaving.leave(slot)

        return n_freed

    def arrived(self, sequence: Sequence, *, is_another: bool = False) -> None:
        """Note that a new sequence's tokens are asked for; it may wait long before it comes, and the cells are kept for it.

        `is_another`: the sequence before had the same prompt, so that what it went on from has been asked for already.
        """
        if not sequence.may_keep:
            return
        self._waiting[sequence.seq_id] = sequence
        if not is_another:
            self.prices.demand.came(sequence.cache_key, sequence.tokens)
        reuse = self._finder.find(sequence).reuse
        if reuse is not None and self.tree.is_resting(reuse.slot) and 2 * reuse.n_tokens >= self.tree.n_tokens(reuse.slot):
            self._wait_for(sequence, reuse.slot)

    def take(self, sequence: Sequence) -> None:
        """Give a waiting sequence that fits a slot, the cells that others have computed for it, and room for the rest."""
        known = self._with_a_slot(sequence)
        self.ends_waiting(sequence)
        if sequence.admitted_at is not None and sequence.first_token_at is None:  # it was preempted, and may have lost what it was given
            sequence.n_cached = min(sequence.n_cached, known.n_tokens)
        reuse = known.reuse
        if reuse is None:
            sequence.slot = self.cells.take_slot()
            self._miss(sequence)
        else:
            self._reuse(sequence, reuse)
        if sequence.may_share and sequence.slot not in self.tree:
            self.tree.enter(sequence.slot, sequence.cache_key)
        n_known = self.tree.n_tokens(sequence.slot) if sequence.slot in self.tree else 0
        self._make_room(len(sequence.tokens) - n_known)
        self.cells.hold(len(sequence.tokens) - n_known)
        sequence.n_held = len(sequence.tokens)
        self._live[sequence.slot] = sequence
        if known.chain is not None:
            self._restore(sequence, known.chain)
        if not self.limits.can_trim and sequence.may_keep and self.offload is not None:
            sequence.stop_at = self._parts_at(sequence, known.n_tokens)

    def reserve(self, sequence: Sequence, n_steps: int = 1) -> bool:
        """Hold a cell for a decoding sequence's next row; False when there is none.

        If something has to make room for it, what nobody waits for does so for `n_steps` of all who run.
        """
        if sequence.n_held > sequence.n_computed:
            return True
        if not self.cells.n_free:
            if not self._make_room(1):
                return False
            n_wanted = min(n_steps * len(self._live), N_EVICT_MOST) if n_steps > 1 else 1
            while self.cells.n_free < n_wanted and self.tree.n_resting and not self.tree.are_all_awaited:
                self._make_room(self.cells.n_free + 1)
        sequence.n_held += 1
        self.cells.hold(1)
        return True

    def reserve_all(self, sequences: list[Sequence], n_ahead: int = 0) -> bool:
        """Do so for each of `sequences`, if there are free cells for all of them; else False, and nothing is held.

        `n_ahead`: for the row that many after the next, when the one before that has its cell.
        """
        wanting = [sequence for sequence in sequences if sequence.n_held <= sequence.n_computed + n_ahead]
        if len(wanting) > self.cells.n_free:
            return False
        self.cells.hold(len(wanting))
        for sequence in wanting:
            sequence.n_held += 1
        return True

    def overrun(self, sequences: Iterable[Sequence]) -> None:
        """A step that began before it was known that these want no more writes a cell too many to each one's slot: it is freed after it."""
        for sequence in sequences:
            slot = sequence.slot
            if self._live.get(slot) is sequence:
                self._moves.append(Trim(slot, sequence.n_computed))
            elif slot in self.tree:  # what is kept; else it is dropped after that step
                self._moves.append(Trim(slot, self.tree.n_tokens(slot)))

    # --- what a step brings -------------------------------------------------------------------------------------------

    def decoded(self, sequence: Sequence) -> None:
        """Note that a sequence's last token has its cell. It is for others to share when the sequence has ended."""
        if not self.limits.can_trim and sequence.slot in self.tree and sequence.n_computed == self.tree.n_tokens(sequence.slot):
            self.tree.version += 1  # what was found as a copy of all that the slot has is that no more
        sequence.n_computed += 1

    def prefilled(self, sequence: Sequence, n_rows: int) -> None:
        """Note that the sequence's next `n_rows` tokens have their cells, for others to share at once."""
        start = sequence.n_computed
        sequence.n_computed += n_rows
        if sequence.slot in self.tree:
            self.tree.extend(sequence.slot, sequence.tokens[start : sequence.n_computed])
            is_saved = self.offload is not None and sequence.may_keep and not self.limits.can_trim
            if is_saved and sequence.n_computed in (sequence.n_prompt, sequence.stop_at):
                self._to_save.append(sequence)

    def filler_position(self, slot: int) -> int | None:
        """Where a row that closes a gap may go in a slot that no live sequence has, since it is cut off again; None: nowhere."""
        if slot in self._live:
            return None
        n_cells = self.tree.n_tokens(slot) if slot in self.tree else 0
        return n_cells if n_cells < self.limits.n_cells_slot else None

    def spoilt(self, slots: Iterable[int]) -> None:
        """What `slots` hold, none of which a live sequence has, is not known any more."""
        for slot in slots:
            self._give_up(slot)

    # --- who goes -----------------------------------------------------------------------------------------------------

    def keep(self, sequence: Sequence, *, comes_back: bool) -> None:
        """Take back what a sequence holds, and keep its cells for whoever begins with the same tokens, until they are wanted.

        Those of a sequence that comes back are kept the longest.
        """
        slot, tree = sequence.slot, self.tree
        if slot not in tree or not sequence.may_keep:
            self.forget(sequence)
            return
        tree.extend(slot, sequence.tokens[tree.n_tokens(slot) : sequence.n_computed])
        self.cells.release(sequence.n_held - sequence.n_computed)
        self._let_go(sequence)
        if comes_back:
            self._waiting[sequence.seq_id] = sequence
        if not tree.rest(slot):
            self._drop(slot)
            return
        if comes_back:
            self._wait_for(sequence, slot)
        self._carrying.rests(slot)
        if not comes_back:
            self.prices.demand.left(sequence.cache_key, sequence.tokens)

    def ends_waiting(self, sequence: Sequence) -> None:
        """Note that a sequence does not wait any longer: what it would have gone on from is like everybody's."""
        self._waiting.pop(sequence.seq_id, None)
        slot = self._wanted.pop(sequence.seq_id, None)
        if slot is not None:
            self.tree.wait_no_more(slot, sequence.own_order)

    def _tell_who_waits(self) -> None:
        if self.offload is not None:
            self.offload.pool.texts_awaited = self._texts_awaited

    def _texts_awaited(self) -> list[Text]:
        """What is known of the tokens of those who wait, the first of whom come first."""
        first = heapq.nsmallest(N_AWAITED_MOST, self._waiting.values(), key=_own_order)
        n_before = itertools.accumulate((sequence.n_shareable for sequence in first), initial=0)
        near = [sequence for sequence, n in zip(first, n_before, strict=False) if n < N_TOKENS_AWAITED_MOST]
        return [(sequence.cache_key, sequence.tokens[: sequence.n_shareable]) for sequence in near]

    def _wait_for(self, sequence: Sequence, slot: int) -> None:
        self._wanted[sequence.seq_id] = slot
        self.tree.wait_for(slot, sequence.own_order)

    def forget(self, sequence: Sequence) -> None:
        """Take back what a sequence holds, of which nothing may be used again."""
        slot, tree = sequence.slot, self.tree
        n_shared = tree.n_tokens(slot) if slot in tree else 0
        self.cells.release(sequence.n_held - n_shared)
        if slot in tree:
            tree.leave(slot)
        self._let_go(sequence)
        self._drop(slot)

    def evict_all(self) -> bool:
        """Free every cached cell; False when there was none."""
        if not self.tree.n_resting:
            return False
        while (slot := self.tree.oldest()) is not None:
            self._evict_slot(slot, save=False)
        return True

    def forget_cached(self) -> None:
        """Free every cached cell, and forget what is on the host."""
        self.evict_all()
        if self.offload is not None:
            self.offload.pool.clear()

    def retire_idle(self) -> None:
        """Move a cached branch to the host, if carrying it in every step has cost more than that; a long one goes a part at a time.
        Without a host it is let go once carrying it has cost what computing it anew would, as far as it is asked for.

        First the one that was unused for longest of those that nobody waits for. One that somebody waits for stays for longer, since it
        surely comes back, but not for ever: in a long queue all are awaited, and every step walks by them until their turn comes.
        """
        slot = self._idle_slot()
        if slot is None:
            return
        if self.tree.n_alone(slot) <= N_EVICT_MOST or self.offload is None or not self.offload.can_save_part:
            self.totals.n_retired_slots += 1
            self._evict_slot(slot)
        else:
            n_last = self.tree.n_alone(slot) % N_EVICT_MOST
            self._evict_end(slot, n_last if n_last >= N_EVICT_LEAST else n_last + N_EVICT_MOST)

    @property
    def is_due(self) -> bool:
        """Whether moves are to be done before the next step, or `retire_idle` would have some."""
        return bool(self._moves or self._to_save or self._restoring) or self._idle_slot() is not None

    def _idle_slot(self) -> int | None:
        """The slot of the branch that is to go."""
        if not self.tree.n_resting:
            return None
        slot = None if self.tree.are_all_awaited else self.tree.oldest()
        if slot is None or not self._is_carried_too_long(slot):
            slot = self.tree.longest_resting()
            if self.offload is None or not (self.tree.is_awaited(slot) and self._is_awaited_too_long(self.offload, slot)):
                return None
        return slot

    def _is_carried_too_long(self, slot: int) -> bool:
        """Whether carrying what the branch alone has cells of has cost more than it is worth."""
        n_alone, carried_s = self.tree.n_alone(slot), self._carrying.cell_s(slot)
        if self.offload is None:
            return self._prices.is_worth_a_loss(n_alone, carried_s)
        return self.offload.prices.is_worth_a_move(n_alone, carried_s)

    def _is_awaited_too_long(self, offload: Offload, slot: int) -> bool:
        """Whether what somebody waits for should go, and the host can hold what all who wait go on from: else it is computed again."""
        if not offload.prices.is_worth_a_move(self.tree.n_alone(slot), self._carrying.cell_s(slot), is_awaited=True):
            return False
        return sum(len(sequence.tokens) for sequence in self._waiting.values()) <= offload.n_cells_max

    def retire_oldest(self) -> bool:
        """Move the branch that was unused for longest to the host; False when there is none."""
        slot = self.tree.oldest()
        if slot is not None:
            self._evict_slot(slot)
        return slot is not None

    def copy_newest(self, tried: set[int], n_stored: Callable[[Key, list[int]], int]) -> bool:
        """Have the newest branch copied that neither the host nor a store has, as far as these have it not; False when none is worth it.

        `n_stored` tells how many cells of a text the store has. Slots in `tried` are left out, and those that were looked at are added.
        """
        offload = self.offload
        if offload is None:
            return False
        for slot in reversed(self.tree.resting()):
            if slot in tried:
                continue
            tried.add(slot)
            key, tokens = self.tree.key_of(slot), self.tree.tokens_of(slot)
            chain = offload.pool.find(key, tokens, 0)
            n_new = len(tokens) - max(chain.end if chain is not None else 0, n_stored(key, tokens))
            if n_new < N_BACKED_UP_LEAST or (not offload.can_save_part and n_new < SHARE_BACKED_UP_LEAST * len(tokens)):
                continue
            move = offload.save_of(slot, key, tokens, n_new, is_awaited=True, is_spare=True)
            if move is not None:
                self._moves.append(move)
                return True
        return False

    def move_out(self) -> bool:
        """Have what is cached in one slot saved whole, since all cells are to be laid out anew; False when no more is worth it."""
        while self.offload is not None and (slot := self.tree.oldest()) is not None:
            n_moves = len(self._moves)
            self._save(slot, self.tree.n_tokens(slot), whole=True)
            is_saved = len(self._moves) > n_moves
            self._vacate(slot)  # which is no eviction: nobody else is to have the room
            if is_saved:
                return True
        return False

    # --- what the model is owed ---------------------------------------------------------------------------------------

    def take_moves(self) -> list[Move]:
        """Hand over the moves that must be done before the next step's rows."""
        if self._to_save:
            self._save_as_they_are()
        moves, self._moves = self._moves, []
        return moves if self.offload is None else self.offload.within_bound(moves)

    def owe_again(self, moves: list[Move], n_done: int, *, has_failed: bool = True) -> list[Sequence]:
        """The step raised after `n_done` of its moves: the rest is still owed, but for a share or trim that failed, and what builds on it.

        Return the live sequences that these were for; they must start over, and compute all of their tokens. If none `has_failed`, since
        the step was told to end before it, all of the rest is owed.
        """
        undone = moves[n_done:]
        if not has_failed or not undone or isinstance(undone[0], Drop | Save):
            self._moves = undone + self._moves
            return []
        spoilt = _filled_from(undone[0].slot, undone)
        self._moves = [move for move in undone if move.slot not in spoilt] + self._moves
        live = [self._give_up(slot) for slot in spoilt]
        return [sequence for sequence in live if sequence is not None]

    def _give_up(self, slot: int) -> Sequence | None:
        """Give up what a slot was to hold. A live sequence that has it shares no more, and is returned: it must start over."""
        sequence = self._live.get(slot)
        if sequence is not None:
            sequence.may_share = sequence.may_keep = False
            sequence.n_cached, sequence.miss = 0, Miss.OFF
            return sequence
        if slot in self.tree:
            self._evict_slot(slot, save=False)
        else:
            self._moves.append(Drop(slot))  # it was to be dropped after that
        return None

    def lost(self, plan: Plan | None = None) -> None:
        """Everything that the model held is gone, and nobody runs. What is on the host stays, and nothing is owed.

        If the model died in the step of `plan`, what that was to restore may be why, and goes, too.
        """
        assert not self._live
        self.evict_all()
        self._moves.clear()
        self._to_save.clear()
        self._wanted.clear()
        self._carrying.forget()
        if self.offload is not None:
            self.offload.lost(plan)

    def laid_out(self, limits: MemoryLimits, offload: Offload | None, prices: Prices, *, carries_states: bool) -> None:
        """The cells lie as `limits` say since now, after `lost`; what is on the host is of use if the model `carries_states`."""
        assert not self._live
        assert not self.tree.n_resting
        self.limits = limits
        self.cells = Cells(limits.n_cells, limits.n_slots)
        self.tree = PrefixTree(self.cells, can_trim=limits.can_trim)
        if offload is not None and self.offload is not None:
            offload.succeeds(self.offload, carries_states=carries_states)
        else:
            prices.succeed(self.prices)
        self.offload, self._prices = offload, prices
        self._finder = self._new_finder()
        self._tell_who_waits()

    @property
    def n_restoring(self) -> int:
        """Sequences whose cells are on their way from the host."""
        return len(self._restoring)

    @property
    def moving_s(self) -> float:
        """Seconds that the moves owed take which bring cells to slots: restores, and copies where cells cannot be shared."""
        if not self._moves or (not self._restoring and self.limits.can_share):
            return 0.0
        n_restored = [sum(piece.n_cells for piece in move.chain.pieces) for move in self._moves if isinstance(move, Restore)]
        n_copied = [] if self.limits.can_share else [move.n_tokens for move in self._moves if isinstance(move, Share)]
        return sum(map(self.prices.restore_s, n_restored)) + sum([self.prices.save_s(n) + self.prices.restore_s(n) for n in n_copied])

    def n_coming(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that are computed, or will be as soon as what is on its way from the host has come."""
        restore = self._restoring.get(sequence.slot)
        return sequence.n_computed if restore is None else max(sequence.n_computed, min(restore.chain.end, len(sequence.tokens) - 1))

    def settle(self, plan: Plan) -> list[Sequence]:
        """Take note of what the plan's step saved and restored, also when it raised; return those whose cells came, or will not come."""
        if plan.n_rows:
            self._carrying.stepped(self.prices.carry_cell_s(plan.n_rows))
        if self.offload is None:
            return []
        self.offload.settle(plan)
        outcomes = [outcome for outcome in plan.restored if self._restoring.get(outcome.move.slot) is outcome.move]
        for outcome in outcomes:
            self._restored(outcome)
        return [self._live[outcome.move.slot] for outcome in outcomes]

    def _restored(self, outcome: Restored) -> None:
        sequence = self._live[outcome.move.slot]
        del self._restoring[sequence.slot]
        self._finder.forget()  # the slot can be copied again
        sequence.is_restoring = False
        if sequence.first_token_at is None:
            sequence.n_cached = min(sequence.n_cached, max(outcome.n_tokens, sequence.n_computed))
        n_restored = outcome.n_tokens - sequence.n_computed
        if n_restored <= 0:
            return
        self.prefilled(sequence, n_restored)
        self.totals.n_hits += not outcome.move.chain.start  # what was shared before the chain has been counted
        self.totals.n_tokens_saved += n_restored
        sequence.n_shared = outcome.n_tokens
        if not sequence.n_preempted:
            self.totals.n_prompt_tokens_saved += n_restored
            self._hit(sequence, outcome.n_tokens)

    # --- how things stand ---------------------------------------------------------------------------------------------

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that what is counted is what `running`, all that hold a slot, and the cached branches have."""
        cells, tree, running = self.cells, self.tree, list(running)
        slots = {sequence.slot for sequence in running}
        n_live_cells, n_cached_cells = tree.check()
        n_private = sum(sequence.n_held - (tree.n_tokens(sequence.slot) if sequence.slot in tree else 0) for sequence in running)
        assert cells.n_free + cells.n_held + cells.n_cached == cells.n_total
        assert cells.n_free >= 0
        assert cells.n_held == n_private + n_live_cells
        assert cells.n_cached == n_cached_cells
        assert cells.n_free_slots + len(slots) + tree.n_resting == cells.n_slots
        assert len(slots) == len(running)
        assert all(self._live[sequence.slot] is sequence for sequence in running)
        assert len(self._live) == len(running)
        assert self._waiting.keys().isdisjoint(sequence.seq_id for sequence in running)
        for sequence in running:
            assert sequence.n_computed <= sequence.n_held
            if sequence.slot in tree:
                n_known = tree.n_tokens(sequence.slot)
                assert not tree.is_resting(sequence.slot)
                assert n_known <= sequence.n_computed
                assert tree.tokens_of(sequence.slot) == sequence.tokens[:n_known]

    # --- reusing what is there ----------------------------------------------------------------------------------------

    def _n_in(self, slot: int) -> int:
        """Cells that the model has in a slot."""
        sequence = self._live.get(slot)
        return self.tree.n_tokens(slot) if sequence is None else sequence.n_computed

    def _miss(self, sequence: Sequence) -> None:
        if sequence.admitted_at is not None:
            return
        if not sequence.may_keep:
            sequence.miss = Miss.OFF
            return
        match = self.tree.match(sequence.cache_key, sequence.tokens, sequence.n_shareable)
        sequence.miss = Miss.UNKNOWN if match is None or match.n_tokens < N_COPY_LEAST else Miss.OUT_OF_REACH

    def _with_a_slot(self, sequence: Sequence) -> Known:
        """Find what can be reused, once there is a slot for it."""
        known = self._finder.find(sequence)
        reuse = known.reuse
        if not self.cells.n_free_slots and (reuse is None or reuse.way is not Way.ADOPT):
            oldest = self.tree.oldest(but=None if reuse is None else reuse.slot)
            assert oldest is not None, "nobody fits without a slot"
            self._evict_slot(oldest)
            known = self._finder.find(sequence)
        return known

    def _reuse(self, sequence: Sequence, reuse: Reuse) -> None:
        n_tokens, source = reuse.n_tokens, reuse.slot
        if reuse.way is Way.ADOPT:
            self._adopt(sequence, source, n_tokens)
            sequence.slot = source
        else:
            slot = sequence.slot = self.cells.take_slot()
            if reuse.way is Way.SHARE:
                self.tree.share(slot, reuse.match)
                self._moves.append(Share(slot, source, n_tokens))
            else:
                self._copy(sequence, source, n_tokens)
        sequence.n_computed = sequence.n_shared = n_tokens
        self.totals.n_hits += 1
        self.totals.n_tokens_saved += n_tokens
        if sequence.admitted_at is None:
            self.totals.n_prompt_tokens_saved += n_tokens
            self._hit(sequence, n_tokens)

    def _hit(self, sequence: Sequence, n_tokens: int) -> None:
        sequence.n_cached = min(n_tokens, sequence.n_prompt)
        sequence.miss = Miss.NONE if n_tokens == sequence.n_prompt - 1 else Miss.DIFFERS

    def _restore(self, sequence: Sequence, chain: Chain[Piece]) -> None:
        """Have the chain restored in the next step; the sequence's rows wait for it, since it may fail."""
        assert self.offload is not None
        n_over = max(len(piece.tokens) for piece in chain.pieces) - len(sequence.tokens)  # restored, then cut again
        if sequence.n_computed != chain.start or not self._make_room(n_over):
            return
        restore = self._restoring[sequence.slot] = Restore(sequence.slot, chain)
        self._moves.append(restore)
        sequence.is_restoring = True
        self.offload.pool.touch(chain)

    def _adopt(self, sequence: Sequence, slot: int, n_keep: int) -> None:
        n_lost = self.tree.n_tokens(slot) - n_keep
        if n_lost > N_TAIL_FORGONE and self.offload is not None:
            if self.offload.can_save_part:
                self._save(slot, n_lost)
            # Else all of it would be copied for its end, which hardly anybody asks for: it is a question about what all have in common.
            elif self.tree.is_awaited(slot, but=sequence.own_order) and self.prices.is_tail_worth_saving(n_keep + n_lost, n_lost):
                self._save(slot)
        self.tree.wake(slot)
        if self.tree.n_tokens(slot) > n_keep:
            self.tree.trim(slot, n_keep)
            self._moves.append(Trim(slot, n_keep))

    def _copy(self, sequence: Sequence, source: int, n_tokens: int) -> None:
        """The copy has cells of its own. In a slot's own part of memory there is room; in one pool, what is cached makes way."""
        self._make_room(n_tokens)
        n_source = self._n_in(source)
        self._moves.append(Share(sequence.slot, source, n_source))
        if n_source > n_tokens:
            self._moves.append(Trim(sequence.slot, n_tokens))
        self.cells.hold(n_tokens)
        self.tree.enter(sequence.slot, sequence.cache_key)
        self.tree.extend(sequence.slot, sequence.tokens[:n_tokens])

    # --- making room --------------------------------------------------------------------------------------------------

    def _make_room(self, n_cells: int) -> bool:
        """Evict cached branches, the longest unused first and from their ends, until `n_cells` are free; False when that is not enough."""
        while self.cells.n_free < n_cells:
            slot = self.tree.oldest()
            if slot is None:
                return False
            self._evict_end(slot, n_cells - self.cells.n_free)
        return True

    def _evict_end(self, slot: int, n_wanted: int) -> None:
        n_cells = min(max(n_wanted, N_EVICT_LEAST), self.tree.n_alone(slot))
        n_keep = self.tree.n_tokens(slot) - n_cells
        if not self.limits.can_trim or not n_keep:
            self._evict_slot(slot)
            return
        n_left = self.tree.n_alone(slot) - n_cells
        self._save(slot, n_cells + n_left % N_EVICT_MOST)  # from where a part of the branch begins
        n_cached = self.cells.n_cached
        if self.tree.trim(slot, n_keep):
            self._moves.append(Trim(slot, n_keep))
        else:
            self._drop(slot)
            self.totals.n_evicted_slots += 1
        self.totals.n_evicted_cells += n_cached - self.cells.n_cached

    def _evict_slot(self, slot: int, *, save: bool = True) -> None:
        if save:
            self._save(slot)
        n_cached = self.cells.n_cached
        self._vacate(slot)
        self.totals.n_evicted_slots += 1
        self.totals.n_evicted_cells += n_cached - self.cells.n_cached

    def _vacate(self, slot: int) -> None:
        self.tree.leave(slot)
        self._drop(slot)

    def _save(self, slot: int, n_last: int | None = None, *, whole: bool = False) -> None:
        """Have the cells that a cached branch has to itself, or the last of them, saved before they go, if that is worth it."""
        if self.offload is None:
            return
        tree = self.tree
        n_alone = tree.n_alone(slot) if n_last is None else n_last
        tokens, is_awaited = tree.tokens_of(slot), tree.is_awaited(slot)
        move = self.offload.save_of(slot, tree.key_of(slot), tokens, n_alone, is_awaited=is_awaited, whole=whole)
        if move is not None:
            self._moves.append(move)

    def _save_as_they_are(self) -> None:
        """Save slots that cannot be cut at the end of the prompt, since another answer than this one may follow in the next turn, and where
        other prompts parted from theirs.
        """
        assert self.offload is not None
        texts: list[Text] = []  # several may have come to the end of the same prompt
        for sequence in self._to_save:
            slot, n_computed = sequence.slot, sequence.n_computed
            if self._live.get(slot) is not sequence or n_computed not in (sequence.n_prompt, sequence.stop_at) or sequence.is_restoring:
                continue
            key, tokens = text = sequence.cache_key, sequence.tokens[:n_computed]
            is_common = n_computed == sequence.stop_at  # two have wanted it already, which is as good as a third that waits
            move = None if text in texts else self.offload.save_of(slot, key, tokens, n_computed, is_awaited=is_common)
            if move is not None:
                texts.append(text)
                self._moves.append(move)
        self._to_save.clear()

    def _parts_at(self, sequence: Sequence, n_known: int) -> int:
        """Where a sequence that has just come parts from others that were here: the third will want what is common. 0: nowhere of use."""
        assert self.offload is not None
        n_max = sequence.n_shareable
        match = self.tree.match(sequence.cache_key, sequence.tokens, n_max)
        n_here = 0 if match is None else match.n_tokens
        n_common = max(n_here, min(self.offload.pool.n_leading(sequence.cache_key, sequence.tokens), n_max))
        return n_common if n_common >= n_known + N_COPY_LEAST else 0

    def _let_go(self, sequence: Sequence) -> None:
        restore = self._restoring.pop(sequence.slot, None)
        if restore is not None:
            self._finder.forget()
            sequence.is_restoring = False
            self._moves = [move for move in self._moves if move is not restore]
        del self._live[sequence.slot]
        sequence.n_held = sequence.n_computed = sequence.n_shared = 0

    def _drop(self, slot: int) -> None:
        drop = Drop(slot)
        owed = next((move for move in reversed(self._moves) if move.slot == slot), None)
        if owed != drop:
            self._moves.append(drop)
        self.cells.give_slot(slot)
        self._carrying.ends(slot)
        if self.offload is not None:
            self.offload.dropped(slot)


def _own_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.own_order


def _filled_from(slot: int, moves: list[Move]) -> dict[int, None]:
    """Return `slot` and those that `moves` fill from it, directly or by way of another."""
    slots = {slot: None}
    for move in moves:
        if isinstance(move, Share) and move.source in slots:
            slots[move.slot] = None
    return slots
