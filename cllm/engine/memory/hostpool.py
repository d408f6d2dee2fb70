"""The host pool: saved cells of sequences, kept in the process's memory as long as they fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import attrs

from cllm.engine.memory.pieces import Chain, PieceTree
from cllm.engine.memory.prefix import Key

N_BYTES_TOKEN = 40  # what a token of a piece's own cells costs beside its state, about: a number, its place in lists and in the tree
N_BYTES_BEFORE = 8  # and one before these, whose number is everybody's (`cllm.engine.memory.tokens`)
Text = tuple[Key, list[int]]


@attrs.frozen(eq=False)
class Piece:
    """The saved state of the cells of ``tokens[start:]``, to be restored behind those of ``tokens[:start]``."""

    key: Key
    tokens: list[int]  # the whole path; nobody changes it
    start: int
    state: bytes = attrs.field(repr=False)

    @property
    def n_cells(self) -> int:
        """Cells that restoring takes."""
        return len(self.tokens) - self.start

    @property
    def n_bytes(self) -> int:
        """What it costs to keep."""
        return n_bytes_of(len(self.state), self.start, len(self.tokens))


def n_bytes_of(n_bytes_state: int, start: int, end: int) -> int:
    """What a piece costs with a state of so many bytes for its tokens from `start` to `end`."""
    return n_bytes_state + N_BYTES_BEFORE * start + N_BYTES_TOKEN * (end - start)


@attrs.define(eq=False)
class PoolTotals:
    """Counts since the start."""

    n_saves: int = 0
    n_cells_saved: int = 0
    n_restores: int = 0
    n_cells_restored: int = 0
    n_failures: int = 0  # states that could not be saved or restored
    n_evictions: int = 0


class HostPool:
    """Pieces by what was used last, bounded in bytes. One caller, as the scheduler's.

    What `texts_awaited` go on from, given by whose turn it is, is of use soon, and goes last; before it what is `recalled`, its end first.
    Where restored cells can be cut, a piece is good for any part of its beginning; otherwise only for a text that goes on from its end.
    """

    recalled: Text | None = None  # what is being brought in, for somebody who is not among those who wait yet

    def __init__(self, n_bytes_max: int, *, can_cut: bool) -> None:
        self.n_bytes_max = n_bytes_max
        self.n_bytes_at_once = n_bytes_max  # of what one step saves, all of which is there before any goes
        self.can_cut = can_cut
        self.texts_awaited: Callable[[], Iterable[Text]] = tuple
        self.takes_parts = True  # pieces that do not begin with the text
        self.n_bytes = 0
        self.n_cells = 0
        self.version = 0  # grows when more may be found than before, or less
        self.totals = PoolTotals()
        self._pieces: OrderedDict[Piece, None] = OrderedDict()  # the longest unused first
        self._tree: PieceTree[Piece] = PieceTree()
        self._evicted: list[Piece] | None = None  # None: nobody wants them
        self._refused: list[Piece] = []  # as far as somebody wants to know

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, piece: Piece) -> bool:
        return piece in self._pieces

    def put(self, piece: Piece, *, is_spare: bool = False) -> None:
        """Keep `piece`; what nobody waits for and was unused for longest makes room. One that is larger than the pool is not kept.

        Nothing makes room for one that `is_spare`: it is evicted at once.
        """
        self.put_all([(piece, is_spare)])

    def put_all(self, pieces: Iterable[tuple[Piece, bool]]) -> None:
        """Do so with several, of each of which is said whether it is spare; who waits is looked through once for all."""
        spare = []
        for piece, is_spare in pieces:
            if is_spare:
                spare.append(piece)
            else:
                self._add(piece)
        if self.n_bytes > self.n_bytes_max:
            self._make_room()
        for piece in spare:
            self._add(piece, is_spare=True)

    def _add(self, piece: Piece, *, is_spare: bool = False) -> None:
        if piece.start and not self.takes_parts:
            return
        if piece.n_bytes > self.n_bytes_max or self.covers(piece.key, piece.tokens, piece.start, in_one=not piece.start):
            return
        self.version += 1
        self._pieces[piece] = None
        self._tree.add(piece)
        self.n_bytes += piece.n_bytes
        self.n_cells += piece.n_cells
        covered = self._tree.within(piece) if self.can_cut else []
        if is_spare and self.n_bytes - sum(other.n_bytes for other in covered) > self.n_bytes_max:
            self._evict(piece)
            return
        for other in covered:
            self.discard(other)

    def _make_room(self) -> None:
        order = self._order_of_eviction()
        while self.n_bytes > self.n_bytes_max:
            self._evict(next(order))

    def _order_of_eviction(self) -> Iterator[Piece]:
        """What nobody waits for, the longest unused first; then what is awaited, by those whose turn comes last first."""
        awaited: dict[Piece, None] = {}
        for key, tokens in (*self.texts_awaited(), *([self.recalled] if self.recalled else [])):
            awaited.update(dict.fromkeys(reversed(self._tree.leading(key, tokens, can_cut=self.can_cut))))
        yield from [piece for piece in self._pieces if piece not in awaited]
        yield from reversed(awaited)

    def find(self, key: Key, tokens: list[int], n_have: int) -> Chain[Piece] | None:
        """Return the pieces that lead furthest into `tokens` for somebody who has `n_have` cells; None when none leads beyond."""
        return self._tree.find(key, tokens, n_have, can_cut=self.can_cut) if self._pieces else None

    def n_leading(self, key: Key, tokens: list[int]) -> int:
        """How many of `tokens` what is here begins with, whether or not it can be cut there."""
        return self._tree.n_leading(key, tokens)

    def covers(self, key: Key, tokens: list[int], start: int, *, in_one: bool = False) -> bool:
        """Say whether the cells of ``tokens[start:]`` are here already, or `in_one` piece; if so, they have been of use just now."""
        chain = self.find(key, tokens, start)
        if chain is None or chain.end < len(tokens) or (in_one and len(chain.pieces) > 1):
            return False
        self.touch(chain)
        return True

    def touch(self, chain: Chain[Piece]) -> None:
        """The pieces of `chain` are of use; the first ones most, for those behind are of none without them."""
        for piece in reversed(chain.pieces):
            if piece in self._pieces:
                self._pieces.move_to_end(piece)

    def discard(self, piece: Piece) -> None:
        """Forget a piece, if it is here."""
        if piece in self._pieces:
            self.version += 1
            del self._pieces[piece]
            self._tree.remove(piece)
            self.n_bytes -= piece.n_bytes
            self.n_cells -= piece.n_cells

    def clear(self) -> None:
        """Forget everything."""
        for piece in self.pieces():
            self.discard(piece)

    def keep_evicted(self, n_bytes_more: int = 0) -> None:
        """From now on somebody asks for what is evicted or refused, by `take_evicted` and `take_refused`, after every step, and has room
        for `n_bytes_more` of it.
        """
        self._evicted = []
        self.n_bytes_at_once = self.n_bytes_max + n_bytes_more

    def take_evicted(self) -> list[Piece]:
        """What had to go since the last call."""
        if not self._evicted:
            return []
        evicted, self._evicted = self._evicted, []
        return evicted

    def refuse(self, piece: Piece) -> None:
        """The model did not take it back: it is to be found nowhere any more."""
        self.discard(piece)
        if self._evicted is not None:
            self._refused.append(piece)

    def take_refused(self) -> list[Piece]:
        """What was refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def pieces(self) -> list[Piece]:
        """All that is here, the longest unused first."""
        return list(self._pieces)

    def give_up_parts(self) -> None:
        """Let the pieces go that do not begin with the text: what restores whole slots has no use for them."""
        for piece in self.pieces():
            if piece.start:
                self._evict(piece)

    def _evict(self, piece: Piece) -> None:
        self.discard(piece)
        self.totals.n_evictions += 1
        if self._evicted is not None:
            self._evicted.append(piece)

    def check(self) -> None:
        """Assert that the count of bytes is right; for tests."""
        assert self.n_bytes == sum(piece.n_bytes for piece in self._pieces) <= self.n_bytes_max
        assert self.n_cells == sum(piece.n_cells for piece in self._pieces)
