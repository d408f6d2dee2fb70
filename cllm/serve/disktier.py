"""The disk tier: what the host pool gives up, and what is cached while nobody asks, is written to files.

These are read again before a request that begins with them is queued.

Nothing here runs in a step: files are read and written in threads, one of each at a time.
"""

from __future__ import annotations

import errno
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path

import attrs
import structlog
import trio

from cllm.engine.memory.dealing import Memory
from cllm.engine.memory.hostpool import HostPool, Piece
from cllm.engine.memory.pieces import Chain, PieceTree
from cllm.engine.memory.prefix import Key
from cllm.serve.beside import beside
from cllm.serve.statefiles import StateFiles, StoredPiece, Unfit, touch

log = structlog.get_logger("cllm.disk")

N_CELLS_LEAST = 64  # of a gain: for fewer, opening a file costs as much as computing them on a fast machine
N_BYTES_OWED_MAX = 256 << 20  # in memory beside the pool while the disk is slow; more is let go
TICK_NS = 1_000  # between files whose order counts: some file systems tell no finer times apart
N_FAILURES_KEEPING = 3  # as the server goes down, after which the disk is taken to have no room for the rest
REST_S = 30.0  # after a failed write, in which what the host pool gives up is let go: a disk that is full takes nothing for long
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@attrs.define(eq=False)
class DiskTotals:
    """Counts since the start."""

    n_hits: int = 0  # requests for which something was read
    n_reads: int = 0
    n_writes: int = 0
    n_failures: int = 0  # files that could not be read or written
    n_slow: int = 0  # requests that did not wait for the end of reading, since computing was as fast
    n_lost: int = 0  # pieces that came faster than they could be written, or while nothing could be


class DiskTier:
    """The files of one model, bounded in bytes. All methods belong to the Trio thread."""

    def __init__(self, files: StateFiles, n_bytes_max: int) -> None:
        self.n_bytes_max = n_bytes_max
        self.n_bytes = 0  # of this model's files
        self.totals = DiskTotals()
        self._files = files
        self._stored: OrderedDict[Path, StoredPiece] = OrderedDict()  # the longest unused first
        self._tree: PieceTree[StoredPiece] = PieceTree()
        self._owed: deque[Piece] = deque()
        self._n_bytes_owed = 0
        self._spare: deque[tuple[Piece, int]] = deque()  # to be written while nothing else is to do, and when it was of use last, ns
        self._work = trio.Event()
        self._writing = trio.CapacityLimiter(1)
        self._reading = trio.CapacityLimiter(1)
        self._recalling = trio.Lock()
        self._rests_until = -math.inf
        self._refused: list[Path] = []  # files to be removed

    @classmethod
    def open(cls, folder: str, fingerprint: str, n_bytes_max: int) -> DiskTier:
        """Read the index; blocks. Files of this model that are damaged are removed, and any that are too much. Raises: OSError."""
        files = StateFiles.open(Path(folder), fingerprint)
        files.remove_partial()
        _remove_oldest(_sizes(files), n_bytes_max, [])  # the bound may have been a larger one
        tier = cls(files, n_bytes_max)
        for path in files.ours():
            try:
                tier._note(files.read_head(path))
            except Unfit as error:
                log.warning("disk.removed", why=str(error))
                _unlink(path)
            except OSError as error:
                log.warning("disk.unread", why=str(error))
        log.info("disk.found", n_pieces=len(tier._stored), n_mb=tier.n_bytes >> 20, folder=str(files.folder))
        return tier

    def __len__(self) -> int:
        return len(self._stored)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def recall(self, memory: Memory, key: Key, tokens: list[int]) -> None:
        """Bring what leads further into `tokens` than `memory` and its host pool do into the pool. Returns at once if nothing does.

        That is given up, others' reading included, when it has taken as long as to compute what is to be read.
        """
        offload = memory.offload
        usable = tokens[:-1]  # the last one is computed in any case, and what ends with it cannot be cut back everywhere
        if offload is None or self._tree.n_leading(self._files.hidden(key), usable) < N_CELLS_LEAST:
            return  # no file is about this text, be it with a beginning that is in another place
        n_kept = memory.n_kept(key, tokens)
        chain = self._leads(key, usable, n_kept, offload.pool)
        if chain is None:  # nor is anybody else's reading waited for
            return
        try:
            with trio.move_on_after(offload.prices.prefill_s(chain.end - n_kept)) as patience:
                async with self._recalling:  # who comes with the same tokens finds them in the pool
                    await self._bring(key, usable, memory.n_kept(key, tokens), offload.pool)
            self.totals.n_slow += patience.cancelled_caught
        finally:  # also for a client that has gone: they count for nobody's bound until they are offered
            self.offer(offload.pool.take_evicted())

    async def _bring(self, key: Key, tokens: list[int], n_have: int, pool: HostPool) -> None:
        """Fetch into the pool. What comes later may not take the place of what came first: nobody waits for it there as yet."""
        pool.recalled = key, tokens

        def take(piece: Piece) -> bool:
            pool.put(piece)
            return pool.covers(key, piece.tokens, piece.start)

        try:
            await self.fetch(key, tokens, n_have, pool, take=take)
        finally:
            pool.recalled = None
            if (chain := pool.find(key, tokens, n_have)) is not None:
                pool.touch(chain)

    def _leads(self, key: Key, tokens: list[int], n_have: int, pool: HostPool) -> Chain[StoredPiece] | None:
        chain = self._chain(key, tokens, n_have, pool)
        return None if chain is None or chain.end - n_have < N_CELLS_LEAST else chain

    def _chain(self, key: Key, tokens: list[int], n_have: int, pool: HostPool) -> Chain[StoredPiece] | None:
        if not self._stored:
            return None
        chain = self._tree.find(self._files.hidden(key), tokens, n_have if pool.takes_parts else 0, can_cut=pool.can_cut)
        return chain if chain is None or pool.takes_parts else chain.first()

    def n_stored(self, key: Key, tokens: list[int], pool: HostPool) -> int:
        """How many of `tokens` the files begin with, which are such as `pool` takes."""
        chain = self._chain(key, tokens, 0, pool)
        return 0 if chain is None else chain.end

    async def fetch(
        self, key: Key, tokens: list[int], n_have: int, pool: HostPool, *, take: Callable[[Piece], bool] = lambda piece: True
    ) -> list[Piece]:
        """Return the pieces that lead further into `tokens` than the `n_have` cells that are known; none if that is not worth a file.

        They are such as `pool` takes, and come to its size at most, and behind one that `take` has no room for none is read: later ones
        would take the place of the first, without which they are of no use.
        """
        chain = self._leads(key, tokens, n_have, pool)
        if chain is None:
            return []
        found: list[Piece] = []
        now = time.time_ns()
        for stored, n_bytes in zip(chain.pieces, accumulate(stored.n_bytes_in_pool for stored in chain.pieces), strict=True):
            if n_bytes > pool.n_bytes_max:
                break
            piece = await self._read(
                stored, key, now - len(found) * TICK_NS
            )  # the first, without which the others are of no use, stays last
            if piece is None:
                break
            found.append(piece)
            self.totals.n_hits += len(found) == 1
            if not take(piece):  # at once: what follows may not be waited for
                break
        return found

    async def _read(self, stored: StoredPiece, key: Key, used_ns: int) -> Piece | None:
        read = partial(_read_and_touch, self._files, stored, key, used_ns)
        try:
            piece = await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._reading)
        except FileNotFoundError:  # another process needed the room, or another model of this one
            self._forget_this(stored)
            return None
        except Unfit as error:
            log.warning("disk.removed", why=str(error))
            self.totals.n_failures += 1
            self._forget_this(stored)
            try:
                await trio.to_thread.run_sync(_unlink, stored.path)
            except Exception:  # the system has no thread left: later
                self._refused.append(stored.path)
                self._work.set()
            return None
        except Exception as error:  # the machine's fault, not the file's: it may have no memory left, or no thread
            log.warning("disk.unread", why=str(error))
            self.totals.n_failures += 1
            return None
        if stored.path in self._stored:
            self._stored.move_to_end(stored.path)
        self.totals.n_reads += 1
        return piece

    # --- writing ------------------------------------------------------------------------------------------------------

    def offer(self, pieces: Iterable[Piece]) -> None:
        """Have `pieces` written, soon. What comes faster than the disk can take it is let go, oldest first, but none for what is there."""
        for piece in pieces:
            if self._n_bytes_owed + piece.n_bytes > N_BYTES_OWED_MAX and self._stored_of(piece) is not None:
                continue
            self._owed.append(piece)
            self._n_bytes_owed += piece.n_bytes
        if not self._owed:
            return
        while self._n_bytes_owed > N_BYTES_OWED_MAX and len(self._owed) > 1:
            oldest = self._owed.popleft()
            self._n_bytes_owed -= oldest.n_bytes
            self.totals.n_lost += self._stored_of(oldest) is None
        self._work.set()

    def refuse(self, pieces: Iterable[Piece]) -> None:
        """The model did not take these back, or died of it: they would be read again and again, and keep better ones from being written."""
        for piece in pieces:
            stored = self._stored_of(piece)
            if stored is not None:
                log.warning("disk.removed", why=f"{stored.path.name} could not be restored")
                self._forget(stored.path)
                self._refused.append(stored.path)
                self._work.set()

    @property
    def rests(self) -> bool:
        """Whether nothing is written for a while, since the disk took nothing."""
        return trio.current_time() < self._rests_until

    @property
    def keeps_up(self) -> bool:
        """Whether more can be offered, and is not to be let go soon."""
        return not self.rests and self._n_bytes_owed <= N_BYTES_OWED_MAX // 2

    def back_up(self, pieces: list[Piece]) -> None:
        """Have those of `pieces` written that are not on disk, the last ones first, which were of use last; until `back_up_no_more`."""
        self._spare = deque(self._newest(pieces))
        if self._spare:
            self._work.set()

    def _newest(self, pieces: list[Piece]) -> Iterator[tuple[Piece, int]]:
        """As many of the last `pieces`, the last ones first, as there is room for, and when each was of use, ns."""
        n_bytes, now = 0, time.time_ns()
        for age, piece in enumerate(reversed(pieces)):
            if piece.n_bytes > self.n_bytes_max:  # which is not written in any case
                continue
            n_bytes += piece.n_bytes
            if n_bytes > self.n_bytes_max:
                break
            yield piece, now - age * TICK_NS

    def back_up_no_more(self) -> None:
        """There is something else to do; the piece that is being written is written."""
        self._spare.clear()

    async def beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Write what is offered while `work` runs. Raises: what `work` raises."""
        await beside(work, self._write_on)

    async def _write_on(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await self.write_owed()
            if self.rests:
                self._spare.clear()
            while self._spare and not self._owed:
                piece, used_ns = self._spare.popleft()
                if self._stored_of(piece) is None:
                    await self.write(piece, used_ns)
                else:
                    await trio.lowlevel.checkpoint()  # there may be thousands

    async def write_owed(self) -> None:
        """Remove what was refused, and write all that is owed."""
        await self._remove_refused()
        while self._owed:
            piece = self._owed[0]
            if self.rests:
                self.totals.n_lost += self._stored_of(piece) is None
            else:
                await self.write(piece)  # if that is cancelled it is owed still
            if self._owed and self._owed[0] is piece:
                self._owed.popleft()
                self._n_bytes_owed -= piece.n_bytes

    async def _remove_refused(self) -> None:
        while self._refused:
            try:
                await trio.to_thread.run_sync(_unlink, self._refused[0], limiter=self._writing)
            except Exception as error:  # as below; it is tried again with the next
                log.warning("disk.unremoved", why=str(error))
                break
            self._refused.pop(0)  # if that is cancelled it is to be removed still

    async def keep(self, pieces: list[Piece]) -> None:
        """Write `pieces`, the longest unused of which come first, as the server goes down: the last ones first, for time may be short.

        What the pool had to give up before, and is owed still, comes after them. Files of the same are as new as their pieces are then.
        """
        await self._remove_refused()
        newest = list(self._newest([*self._owed, *pieces]))
        self._owed.clear()
        self._n_bytes_owed = 0
        n_failures_max = self.totals.n_failures + N_FAILURES_KEEPING
        for piece, used_ns in newest:
            if self.totals.n_failures < n_failures_max:
                await self.write(piece, used_ns)

    async def write(self, piece: Piece, used_ns: int | None = None) -> None:
        """Write one piece, unless its cells are on disk already or it is too large; the longest unused files make room.

        It was of use last at `used_ns`, or just now.
        """
        if piece.n_bytes > self.n_bytes_max:
            return
        outcome = _Written(list(self._stored))
        try:
            if (stored := self._stored_of(piece)) is not None:
                if await trio.to_thread.run_sync(_is_there, stored.path, used_ns, limiter=self._writing):
                    return
                self._forget(stored.path)
            write = partial(_write_within, self._files, piece, self.n_bytes_max, outcome, used_ns)
            stored = await trio.to_thread.run_sync(write, limiter=self._writing)
        except Exception as error:  # the machine's fault: its disk is full, or it has no thread left
            log.warning("disk.unwritten", why=str(error), rests_s=REST_S)
            self.totals.n_failures += 1
            self.back_up_no_more()
            self._rests_until = trio.current_time() + REST_S
        else:
            self.totals.n_writes += 1
            self._note(stored)
            self._rests_until = -math.inf
        for path in outcome.gone:  # it would be looked for in vain, and never be written again
            self._forget(path)

    def _stored_of(self, piece: Piece) -> StoredPiece | None:
        """The file that ends with `piece`, if its cells are on disk: in one file where it begins with the text, as in the host pool."""
        chain = self._tree.find(self._files.hidden(piece.key), piece.tokens, piece.start, can_cut=False)
        if chain is None or chain.end < len(piece.tokens) or (not piece.start and len(chain.pieces) > 1):
            return None
        return chain.pieces[-1]

    def _note(self, stored: StoredPiece) -> None:
        self._forget(stored.path)
        self._stored[stored.path] = stored
        self._tree.add(stored)
        self.n_bytes += stored.n_bytes

    def _forget_this(self, stored: StoredPiece) -> None:
        """Unless it was written anew meanwhile."""
        if self._stored.get(stored.path) is stored:
            self._forget(stored.path)

    def _forget(self, path: Path) -> None:
        stored = self._stored.pop(path, None)
        if stored is not None:
            self._tree.remove(stored)
            self.n_bytes -= stored.n_bytes


def _unlink(path: Path) -> None:
    with suppress(OSError):  # it is forgotten in any case
        path.unlink(missing_ok=True)


def _touch(path: Path, used_ns: int) -> None:
    with suppress(OSError):  # removed in between, or on a disk that can only be read
        touch(path, used_ns)


def _is_there(path: Path, used_ns: int | None) -> bool:
    """Whether a file has not been removed; note that it was of use at `used_ns`."""
    if used_ns is not None:
        _touch(path, used_ns)
    return path.exists()


@attrs.define(eq=False)
class _Written:
    """What was seen while a file was written, also if that failed."""

    known: list[Path]  # files that are believed to be there
    gone: list[Path] = attrs.field(factory=list)  # of these, what was removed here or by others, who have the folder, too


def _read_and_touch(files: StateFiles, stored: StoredPiece, key: Key, used_ns: int) -> Piece:
    piece = files.read(stored, key)
    _touch(stored.path, used_ns)
    return piece


def _write_within(files: StateFiles, piece: Piece, n_bytes_max: int, outcome: _Written, used_ns: int | None) -> StoredPiece:
    """Write `piece`, and remove the files that were unused for longest, whichever model's, until the folder is within its bound.

    On a full disk as many bytes of these make room first. What is seen goes into `outcome`. Raises: OSError.
    """
    files.remove_partial()  # the process that wrote it may have died so lately that it was not known when this one began
    try:
        stored = files.write(piece, used_ns)
    except OSError as error:
        if error.errno not in FULL:
            raise
        sizes = _sizes(files)
        if sum(sizes.values()) < files.n_bytes_of(piece):  # all of them would go, and perhaps for nothing
            raise
        _remove_oldest(sizes, sum(sizes.values()) - files.n_bytes_of(piece), outcome.gone)
        stored = files.write(piece, used_ns)
    sizes = _sizes(files)
    outcome.gone += [path for path in outcome.known if path not in sizes and not path.exists()]  # it may have been listed in part
    n_own = sizes.pop(stored.path, 0)
    _remove_oldest(sizes, n_bytes_max - n_own, outcome.gone)
    return stored


def _sizes(files: StateFiles) -> dict[Path, int]:
    """The files of all models, the longest unused first, with their bytes."""
    sizes = {}
    for path in files.all():
        with suppress(FileNotFoundError):  # another process was faster
            sizes[path] = path.stat().st_size
    return sizes


def _remove_oldest(sizes: dict[Path, int], n_bytes_max: int, removed: list[Path]) -> None:
    """Remove the first of these files, until those that are left come to `n_bytes_max` at most."""
    n_bytes = sum(sizes.values())
    for path, size in sizes.items():
        if n_bytes <= n_bytes_max:
            break
        with suppress(OSError):  # one that cannot be removed keeps nobody from the others
            path.unlink(missing_ok=True)
            removed.append(path)
            n_bytes -= size
