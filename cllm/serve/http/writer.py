"""Writes to one client: without waiting where the socket takes it, within a bound where it does not."""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio

from cllm.serve.http.held import Held
from cllm.serve.http.traffic import Traffic

# Progress is looked for piece by piece, so that a large answer to a slow client is not taken for a client that has stopped.
PIECE_BYTES = 64 * 1024
# A stream whose client keeps up never waits; after so many bytes it lets the others run.
BYTES_PER_TURN = 64 * 1024


class Writer:
    """Everything sent on one connection goes through here, in order.

    `raw` is the socket under `stream` for clear text, None for TLS, whose records only `stream` can make. `spawn` starts a task that
    lives as long as the connection. `on_broken` is called when the client does not take bytes any more.
    """

    def __init__(
        self,
        stream: trio.abc.SendStream,
        raw: socket.socket | None,
        *,
        timeout_s: float,
        spawn: Callable[..., None],
        on_broken: Callable[[], None],
        traffic: Traffic,
        held: Held,
    ) -> None:
        self._stream = stream
        self._raw = raw
        self._timeout_s = timeout_s
        self._spawn = spawn
        self._on_broken = on_broken
        self._traffic = traffic
        self._held = held
        self._lock = trio.Lock()  # held while a task waits for the socket
        self._rest = b""  # accepted, and not yet in the hands of the socket or of the task that holds the lock
        self._n_in_turn = 0
        self.broken = False

    @property
    def can_send_now(self) -> bool:
        return self._raw is not None

    def send_now(self, data: bytes) -> bool:
        """Accept `data` if the socket takes a part of it at once, without waiting. False: nothing of it was written."""
        if self._rest or self.broken or self._lock.locked():
            return False
        n_sent = self._try_to_send(data)
        if n_sent == 0:
            return False
        if n_sent < len(data):
            self._hold(data[n_sent:])
            self._spawn(self._flush)
        return True

    async def send(self, data: bytes) -> None:
        """Send all of `data`. When the client is gone, or takes nothing for `timeout_s`, it goes nowhere."""
        if self.broken:
            await trio.lowlevel.checkpoint()  # an app that loops on this must not hold the event loop
            return
        n_sent = 0 if self._rest or self._lock.locked() else self._try_to_send(data)
        if n_sent < len(data):
            self._hold(data[n_sent:])
            await self._flush()
        else:
            await self._give_way(n_sent)

    async def _give_way(self, n_sent: int) -> None:
        self._n_in_turn += n_sent
        if self._n_in_turn >= BYTES_PER_TURN:
            self._n_in_turn = 0
            await trio.lowlevel.checkpoint()

    def _hold(self, data: bytes) -> None:
        """Keep what the socket does not take for `_flush`."""
        if self.broken:
            return
        self._rest += data
        self._held.add(self, len(data))

    def cut_off(self) -> None:
        """See `cllm.serve.http.held.Holder`."""
        self._break()

    def _try_to_send(self, data: bytes) -> int:
        if self._raw is None:
            return 0
        try:
            n_sent = self._raw.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._break()
            return 0
        self._traffic.n_bytes_out += n_sent
        return n_sent

    async def _flush(self) -> None:
        # Shielded, because a half-written chunk spoils all that follows it; bounded by each piece's timeout.
        with trio.CancelScope(shield=True):
            async with self._lock:
                data, self._rest = memoryview(self._rest), b""
                try:
                    for start in range(0, len(data), PIECE_BYTES):
                        await self._send_piece(data[start : start + PIECE_BYTES])
                finally:
                    self._held.take(self, len(data))

    async def _send_piece(self, piece: memoryview) -> None:
        if self.broken:
            return
        with trio.move_on_after(self._timeout_s) as scope:
            try:
                await self._stream.send_all(piece)
                self._traffic.n_bytes_out += len(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._break()
        if scope.cancelled_caught:
            self._break()

    def _break(self) -> None:
        if not self.broken:
            self.broken = True
            self._held.drop(self)
            self._on_broken()
