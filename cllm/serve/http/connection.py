"""One client's connection: what is read and how long is waited for it, and how it ends."""

from __future__ import annotations

import contextlib
import enum
import math
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from typing import Any

import h11
import trio

from cllm.serve.http import hypercorn_private as hypercorn
from cllm.serve.http.asgi import AsgiApp
from cllm.serve.http.config import HttpConfig
from cllm.serve.http.held import Held
from cllm.serve.http.http1 import Http1
from cllm.serve.http.requests import Requests
from cllm.serve.http.traffic import Traffic
from cllm.serve.http.writer import Writer

N_RECV_BYTES_MAX = 64 * 1024
# While a response is under way, what the client sends ahead is read only to see behind it whether the client is still there.
N_AHEAD_BYTES_MAX = 64 * 1024
LOOK_S = 0.25  # beyond that, how often the kernel is asked instead
# Closing while the client still sends makes its kernel drop the answer it has not read: read on for a while, and throw away.
LINGER_S = 1.0
LAST_HEAD_S = 1.0  # for the rest of a request's headers once the server is to end
SO_LINGER_RESET = struct.pack("ii", 1, 0)
# Beyond what the client's window takes, so much may wait in the kernel: enough for a fast line, small against a stream's buffer.
NOTSENT_BYTES = 128 * 1024
TCP_ESTABLISHED = 1  # tcp_states.h
USER_TIMEOUT_MS_MAX = 2**31 - 1  # 24 days: the kernel keeps it in an int


class Phase(enum.Enum):
    """What the server waits for on a connection."""

    IDLE = enum.auto()  # another request
    HEAD = enum.auto()  # the end of a request's headers
    BODY = enum.auto()  # the end of its body
    RESPONSE = enum.auto()  # the app


class Connection:
    """Serves one client until either side has had enough."""

    def __init__(
        self,
        raw: socket.socket,
        tls: ssl.SSLContext | None,
        app: AsgiApp,
        config: HttpConfig,
        shared: tuple[hypercorn.Config, hypercorn.WorkerContext, hypercorn.ConnectionState],
        *,
        traffic: Traffic,
        held: Held,
        on_idle: Callable[[], None],
    ) -> None:
        self._raw = raw
        self._socket = trio.socket.from_stdlib_socket(raw)
        self._transport = trio.SocketStream(self._socket)
        tune(raw, config)  # behind Trio, which has a bound of its own for what is not sent
        self._stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = self._transport
        if tls is not None:
            self._stream = trio.SSLStream(self._transport, tls, server_side=True)
        self._is_tls = tls is not None
        self._app = app
        self._config = config
        self._shared = shared
        self._traffic = traffic
        self._held = held
        self._on_idle = on_idle
        self._timeouts = {
            Phase.IDLE: config.keep_alive_s,
            Phase.HEAD: config.header_timeout_s,
            Phase.BODY: config.body_timeout_s,
            Phase.RESPONSE: math.inf,
        }
        self.phase = Phase.HEAD
        self.since = trio.current_time()
        self._deadline = math.inf  # of the phase
        self._serving = trio.CancelScope()  # round everything that the reading task waits for; cancelled by close()
        self._reading = trio.CancelScope()  # round one read; cancelled by _resume() and at the deadline
        self._n_ahead = 0
        self._has_to_resume = False
        self._lingers = False

    @property
    def is_idle(self) -> bool:
        return self.phase in (Phase.IDLE, Phase.HEAD) and not self._serving.cancel_called and not self._has_begun

    @property
    def _has_begun(self) -> bool:
        """Whether a request is under way, of which the phase may not tell as yet: others have their turns while it is read."""
        protocol: Http1 | None = getattr(self, "_protocol", None)
        return protocol is not None and (protocol.stream is not None or protocol.connection.their_state is not h11.IDLE)

    # --- how it ends: none of these waits -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection; a request under way sees a disconnect."""
        self._serving.cancel()
        self._reading.cancel()  # which may be the TLS handshake

    def close_unread(self) -> None:
        """End an idle connection, but for one on which something has come: that may be a request, and has a moment."""
        for phase in (Phase.IDLE, Phase.HEAD):
            self._timeouts[phase] = min(self._timeouts[phase], LAST_HEAD_S)
        if self._has_unread():
            self._enter(self.phase)
        else:
            self._reading.cancel()  # and no more: who has read something meanwhile goes on with it

    def _has_unread(self) -> bool:
        protocol: Http1 | None = getattr(self, "_protocol", None)
        if protocol is not None and protocol.has_buffered:
            return True
        try:
            return bool(self._raw.recv(1, socket.MSG_PEEK))
        except OSError:  # nothing there, or nobody
            return False

    def abort(self) -> None:
        """End the connection now, and throw away what the client has not read."""
        with contextlib.suppress(OSError):
            self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, SO_LINGER_RESET)
        self._socket.close()
        self.close()

    # --- how it lives -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        last: trio.abc.AsyncResource = self._transport
        try:
            if await self._shake_hands():
                last = self._stream  # over TLS it says goodbye: an answer may end with the connection
                await self._serve()
        finally:
            with trio.move_on_after(LINGER_S, shield=True), contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await last.aclose()
            self._socket.close()

    async def _shake_hands(self) -> bool:
        if isinstance(self._stream, trio.SSLStream):
            with trio.move_on_after(self._config.header_timeout_s) as self._reading:
                try:
                    await self._stream.do_handshake()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return False
            return not self._reading.cancelled_caught
        return True

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._protocol = self._make_protocol(nursery)
            with self._serving:
                await self._read()
            await self._protocol.handle(hypercorn.Closed())
            if self._lingers:
                await self._linger()

    def _make_protocol(self, nursery: trio.Nursery) -> Http1:
        config, context, state = self._shared
        requests: Any = Requests(nursery, debug=self._config.debug)
        client, server = address_of(self._raw.getpeername), address_of(self._raw.getsockname)
        app: Any = self._app
        protocol = Http1(app, config, context, requests, state, self._is_tls, client, server, self._obey)
        protocol.writer = Writer(
            self._stream,
            None if self._is_tls else self._raw,
            timeout_s=self._config.write_timeout_s,
            spawn=nursery.start_soon,
            on_broken=self.abort,
            traffic=self._traffic,
            held=self._held,
        )
        return protocol

    async def _obey(self, event: hypercorn.Event) -> None:
        """Do what the protocol says. It does not wait but for a write, so that a cancelled app leaves nothing half done."""
        if isinstance(event, hypercorn.RawData):
            await self._protocol.writer.send(event.data)
        elif isinstance(event, hypercorn.Closed):
            # Once the client has said all, there is nothing that could make its kernel drop the answer.
            self._lingers = self._protocol.has_buffered or self._protocol.connection.their_state in (h11.SEND_BODY, h11.ERROR)
            self.close()
        elif isinstance(event, hypercorn.Updated) and event.idle:
            self._resume()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        self._enter(Phase.HEAD)
        while True:
            data = await self._receive() if self._n_ahead < N_AHEAD_BYTES_MAX else await self._wait_for_response()
            if data == b"":
                return
            resumes = self._has_to_resume
            if data is not None:
                await self._take(data)
            elif self._has_to_resume:
                await self._take(b"")
            else:
                await self._time_out()
                return
            self._note_phase()
            if resumes and self.is_idle:  # what had been sent ahead was no request
                self._on_idle()

    async def _take(self, data: bytes) -> None:
        self._traffic.n_bytes_in += len(data)
        if self._has_to_resume:  # with data if it was in hand already when the response ended: such a read is not cancelled
            self._has_to_resume = False
            await self._protocol.resume(data)
            return
        if self.phase is Phase.RESPONSE:
            self._n_ahead += len(data)
        await self._protocol.feed(data)

    async def _receive(self) -> bytes | None:
        """Return what came, empty at the end; None: the phase's time is up, or the response has ended."""
        with trio.CancelScope(deadline=self._deadline) as self._reading:
            if self._has_to_resume:
                return None
            try:
                return bytes(await self._stream.receive_some(N_RECV_BYTES_MAX))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return b""
        return None

    async def _wait_for_response(self) -> bytes | None:
        """As `_receive`, for a client that sends too much ahead: read nothing, and ask the kernel whether it is still there."""
        while not self._has_to_resume:
            with trio.move_on_after(LOOK_S) as self._reading:
                await trio.sleep_forever()
            if has_gone(self._raw):
                return b""
        return None

    def _resume(self) -> None:
        self._enter(Phase.IDLE)
        if self._n_ahead or self._protocol.has_buffered:
            self._n_ahead = 0
            self._has_to_resume = True
            self._reading.cancel()
        else:
            self._on_idle()

    async def _time_out(self) -> None:
        if self.phase is Phase.BODY:
            await self._protocol.refuse(408, "the body did not arrive in time")

    def _note_phase(self) -> None:
        their_state = self._protocol.connection.their_state
        if their_state is h11.IDLE:
            phase = Phase.HEAD if self.phase is Phase.HEAD or self._protocol.has_buffered else Phase.IDLE
        else:
            phase = Phase.BODY if their_state is h11.SEND_BODY else Phase.RESPONSE
        if phase is not self.phase:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.since = trio.current_time()
        self._deadline = self.since + self._timeouts[phase]
        self._reading.deadline = self._deadline
        if phase is Phase.RESPONSE:  # what was sent ahead of the last one still counts, or each answer would let in as much again
            self._n_ahead = self._protocol.n_buffered

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _linger(self) -> None:
        with contextlib.suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            self._raw.shutdown(socket.SHUT_WR)
            with trio.move_on_after(LINGER_S):
                while await self._transport.receive_some(N_RECV_BYTES_MAX):  # below TLS: what it would say is thrown away as well
                    pass


def address_of(name: Callable[[], Any]) -> tuple[str, int] | None:
    """Return host and port, or None where the client is gone already."""
    try:
        host, port, *_ = name()
    except OSError:
        return None
    return host, port


def tune(raw: socket.socket, config: HttpConfig) -> None:
    """Set what the platform has: no delay, and bounds on what a vanished or never-reading client can hold."""
    user_timeout_ms = int(min(config.write_timeout_s * 1000, USER_TIMEOUT_MS_MAX))
    wanted: list[tuple[int, str, int]] = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", user_timeout_ms),
        (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", NOTSENT_BYTES),
    ]
    for level, name, value in wanted:
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                raw.setsockopt(level, getattr(socket, name), value)


def has_gone(raw: socket.socket) -> bool:
    """Say whether the client has closed its side, without reading; where the kernel does not tell, False."""
    if sys.platform != "linux":
        return False
    try:
        return raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_ESTABLISHED
    except OSError:
        return True
