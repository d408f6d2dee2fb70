"""Finds what there is of a waiting sequence's tokens, in the model's memory and on the host, and how it would come by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeAlias

import attrs

from cllm.engine.batch.plan import Restore
from cllm.engine.limits import MemoryLimits
from cllm.engine.memory.cells import Cells
from cllm.engine.memory.hostpool import Piece
from cllm.engine.memory.offload import Offload
from cllm.engine.memory.pieces import Chain
from cllm.engine.memory.prefix import Match, PrefixTree
from cllm.engine.sequence import Sequence

N_TAIL_FORGONE = 16  # cells beyond a match that are not worth a slot of their own: less than a step's rows


class Way(Enum):
    """How a sequence comes by cells that are there already."""

    ADOPT = "adopt"  # it goes on in the slot of one that has ended
    SHARE = "share"  # its slot has the same cells as another
    COPY = "copy"  # its slot is filled from another


@attrs.frozen
class Reuse:
    """Cells that a waiting sequence can have without computing them."""

    way: Way
    slot: int  # that has them
    match: Match

    @property
    def n_tokens(self) -> int:
        """Tokens whose cells it will have."""
        return self.match.n_tokens


@attrs.frozen
class Known:
    """What there is of a waiting sequence's tokens: cells in the model's memory, and behind them pieces on the host."""

    reuse: Reuse | None = None
    chain: Chain[Piece] | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens that need not be computed."""
        if self.chain is not None:
            return self.chain.end
        return 0 if self.reuse is None else self.reuse.n_tokens


NOTHING = Known()
_Basis: TypeAlias = tuple[int, int, int, int]  # versions of tree and host pool, tokens, free slots


class Finder:
    """Looks in one memory and one host pool."""

    def __init__(
        self,
        limits: MemoryLimits,
        tree: PrefixTree,
        cells: Cells,
        offload: Offload | None,
        n_in: Callable[[int], int],
        restoring: Mapping[int, Restore],
    ) -> None:
        """`n_in` says how many cells the model has in a slot; `restoring` are those, by slot, whose cells are on their way."""
        self._limits = limits
        self._tree = tree
        self._cells = cells
        self._offload = offload
        self._n_in = n_in
        self._restoring = restoring
        self._found: tuple[Sequence, _Basis, Known] | None = None  # the last answer, and what it rests on

    def forget(self) -> None:
        """What was found last may be otherwise, though neither tree nor pool has changed."""
        self._found = None

    def find(self, sequence: Sequence) -> Known:
        """Return what there is of a waiting sequence's tokens.

        The answer is kept until the tree, the host pool or the free slots change: who waits is looked at before every step.
        """
        if not sequence.may_share:
            return NOTHING
        pool_version = 0 if self._offload is None else self._offload.pool.version
        basis = (self._tree.version, pool_version, len(sequence.tokens), self._cells.n_free_slots)
        if self._found is None or self._found[0] is not sequence or self._found[1] != basis:
            self._found = (sequence, basis, self._look_for(sequence))
        return self._found[2]

    def _look_for(self, sequence: Sequence) -> Known:
        """In the model's memory, then on the host, from where what follows can be restored."""
        reuse = self._look_in_tree(sequence, sequence.n_shareable)
        n_have = 0 if reuse is None else reuse.n_tokens
        tokens = sequence.tokens[: sequence.n_shareable]
        chain = None if self._offload is None else self._offload.chain_for(sequence.cache_key, tokens, n_have)
        if chain is None or chain.start == n_have:
            return Known(reuse, chain)
        before = self._look_in_tree(sequence, chain.start)
        if (0 if before is None else before.n_tokens) != chain.start:
            return Known(reuse)
        return Known(before, chain)

    def _look_in_tree(self, sequence: Sequence, n_max: int) -> Reuse | None:
        match = self._tree.match(sequence.cache_key, sequence.tokens, n_max, whole=not self._limits.can_trim, n_in=self._n_in)
        if match is None:
            return None
        slot = self._slot_of(match)
        way = self._way(sequence, match, slot)
        return None if way is None else Reuse(way, slot, match)

    def _slot_of(self, match: Match) -> int:
        """Some slot that has the cells of `match`; where slots cannot be cut, one that has no more, if there is one."""
        if not self._limits.can_trim:
            for slot in match.node.tips:
                if self._n_in(slot) == match.n_tokens:
                    return slot
        return self._tree.slot_through(match.node)

    def _way(self, sequence: Sequence, match: Match, slot: int) -> Way | None:
        """How to come by the cells of `match`, which `slot` has; None: not at all."""
        rests = match.node.tips == {slot} and self._tree.is_resting(slot)
        n_lost = match.node.end - match.n_tokens  # if a sequence goes on in the slot
        if rests and n_lost <= (N_TAIL_FORGONE if self._limits.can_trim else 0):
            return Way.ADOPT
        if not self._limits.can_trim and self._n_in(slot) != match.n_tokens:
            return None
        if self._limits.can_share:
            return self._way_of_sharing(sequence, slot, n_lost if rests else None)
        return self._way_apart(match.n_tokens, slot, may_adopt=rests and n_lost <= match.n_tokens)

    def _way_of_sharing(self, sequence: Sequence, slot: int, n_lost: int | None) -> Way | None:
        """Into an empty slot, else in place of the oldest branch, or on in the slot if that has less to lose that somebody waits for."""
        if self._cells.n_free_slots:
            return Way.SHARE
        oldest = self._tree.oldest(but=slot)
        if oldest is None:
            return Way.ADOPT if self._tree.is_resting(slot) else None
        if n_lost is None:
            return Way.SHARE
        tail = self._tree.is_awaited(slot, but=sequence.own_order), n_lost
        return Way.ADOPT if tail <= (self._tree.is_awaited(oldest), self._tree.n_alone(oldest)) else Way.SHARE

    def _way_apart(self, n_tokens: int, slot: int, *, may_adopt: bool) -> Way | None:
        """Where slots share no part of their cells: into an empty slot a copy, else on in the slot, else a copy in place of another."""
        # A slot is copied whole: from one that is being restored there would come more than is known of it.
        pays = self._limits.copies_slots and n_tokens >= self._limits.n_copied_least and slot not in self._restoring
        if pays and self._cells.n_free_slots:
            return Way.COPY
        if may_adopt:
            return Way.ADOPT
        return Way.COPY if pays and self._tree.oldest(but=slot) is not None else None
