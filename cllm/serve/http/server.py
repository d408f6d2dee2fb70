"""Serves an ASGI app over HTTP/1.1 until told to stop; nothing that one client does ends it."""

from __future__ import annotations

import contextlib
import heapq
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import structlog
import trio

from cllm.errors import OperatorError
from cllm.serve.http import hypercorn_private as hypercorn
from cllm.serve.http.asgi import AsgiApp
from cllm.serve.http.certificate import Certificate
from cllm.serve.http.config import HttpConfig
from cllm.serve.http.connection import Connection
from cllm.serve.http.held import Held
from cllm.serve.http.lifespan import lifespan_of
from cllm.serve.http.listeners import accept, addresses_of, close_all, is_passing, open_listeners, reason
from cllm.serve.http.requests import leaves, log_contained
from cllm.serve.http.traffic import Traffic

__all__ = ["HttpConfig", "serve_http"]

log = structlog.get_logger(__name__)

PAUSE_S = 0.1  # after a failed accept: what it lacked comes back when other connections end
LOG_EVERY_S = 10.0
SHARE_CLOSED = 100  # one in so many of those that are idle makes room, where there is none for a newcomer
RESERVED_DESCRIPTORS = 64  # for model files, workers and logs

Trigger = trio.Event | Callable[[], Awaitable[object]]


async def serve_http(
    app: AsgiApp,
    *,
    config: HttpConfig,
    shutdown: Trigger,
    abort: Trigger | None = None,
    traffic: Traffic | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` until `shutdown`, then let requests under way finish for `config.grace_s` at most, or until `abort`.

    `task_status.started` gets the URLs when connections are accepted. Cancelling it is like `abort`. What goes over the connections is
    added to `traffic`.

    Raises: CannotListen before it has started; AppFailed when the app's lifespan fails, at the start or later.
    """
    certificate = Certificate(config)
    listeners = await open_listeners(config)
    try:
        async with lifespan_of(app) as state:
            server = Server(app, config, certificate, state, traffic or Traffic())
            urls = addresses_of(listeners, config)
            await server.run(listeners, shutdown, abort, lambda: task_status.started(urls))
    except BaseExceptionGroup as group:
        named = [error for error in leaves(group) if isinstance(error, OperatorError)]
        if named:
            raise named[0] from group
        raise
    finally:
        close_all(listeners)


class Server:
    """All connections of one server."""

    def __init__(self, app: AsgiApp, config: HttpConfig, certificate: Certificate, state: dict[str, Any], traffic: Traffic) -> None:
        self._app = app
        self._config = config
        self._certificate = certificate
        self._traffic = traffic
        self._held = Held()
        self._context = hypercorn.WorkerContext(None)
        self._shared = (hypercorn_config(config), self._context, hypercorn.ConnectionState(state))
        self._connections: set[Connection] = set()
        self._changed = trio.Event()
        self._n_max = n_connections_max(config)
        self._logged_at = -math.inf

    async def run(self, listeners: list[socket.socket], shutdown: Trigger, abort: Trigger | None, started: Callable[[], None]) -> None:
        async with trio.open_nursery() as nursery:
            try:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept_from, listener, nursery)
                    accepting.start_soon(self._certificate.keep_renewed)
                    started()
                    await wait_for(shutdown)
                    accepting.cancel_scope.cancel()
                close_all(listeners)
                await self._context.terminated.set()
                await trio.lowlevel.checkpoint()  # who has read something begins with it
                self._close_idle()
                if abort is not None:
                    nursery.start_soon(self._abort_at, abort, nursery.cancel_scope)
                await self._wait_until_empty()
                nursery.cancel_scope.cancel()
            finally:
                self._abort_all()  # here, not round the nursery, which waits for writes that no cancellation reaches

    async def _wait_until_empty(self) -> None:
        with trio.move_on_after(self._config.grace_s):
            while self._connections:
                await self._wait_for_change()

    async def _abort_at(self, abort: Trigger, scope: trio.CancelScope) -> None:
        await wait_for(abort)
        self._abort_all()
        scope.cancel()

    def _abort_all(self) -> None:
        for connection in self._connections:
            connection.abort()  # also wakes a write, which no cancellation reaches

    def _close_idle(self) -> None:
        for connection in self._connections:
            if connection.is_idle:
                connection.close_unread()

    # --- accepting ----------------------------------------------------------------------------------------------------

    async def _accept_from(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            try:
                raw = await accept(listener)
            except OSError as error:
                if not is_passing(error):
                    raise
                await self._bear(error)
                continue
            with raw_closed_on_error(raw):
                await self._wait_for_room()
                self._start(raw, nursery)
            await trio.lowlevel.checkpoint()

    async def _wait_for_room(self) -> None:
        while len(self._connections) >= self._n_max:
            self._close_longest_idle()
            await self._wait_for_change()

    async def _bear(self, error: OSError) -> None:
        """After a failed accept, wait until the next may succeed."""
        if trio.current_time() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = trio.current_time()
            log.warning("cannot accept connections at the moment", error=reason(error))
        if self._close_longest_idle():
            with trio.move_on_after(PAUSE_S):
                await self._wait_for_change()
        else:
            await trio.sleep(PAUSE_S)

    def _close_longest_idle(self) -> bool:
        """Close those that have been idle for longest: of many a few at once, since to look at all of them for each newcomer would keep
        everybody waiting.
        """
        idle = [connection for connection in self._connections if connection.is_idle]
        for connection in heapq.nsmallest(-(-len(idle) // SHARE_CLOSED), idle, key=lambda connection: connection.since):
            connection.close()
        return bool(idle)

    async def _wait_for_change(self) -> None:
        """Wait until a connection ends or has nothing to do."""
        if self._changed.is_set():
            self._changed = trio.Event()
        await self._changed.wait()

    def _start(self, raw: socket.socket, nursery: trio.Nursery) -> None:
        tls = self._certificate.context
        connection = Connection(
            raw, tls, self._app, self._config, self._shared, traffic=self._traffic, held=self._held, on_idle=self._note_change
        )
        self._connections.add(connection)
        nursery.start_soon(self._serve_one, connection)

    def _note_change(self) -> None:
        self._changed.set()

    async def _serve_one(self, connection: Connection) -> None:
        try:
            await connection.run()
        except* Exception as group:
            log_contained("a connection ended with an error", group, debug=self._config.debug)
        finally:
            self._connections.discard(connection)
            self._note_change()


@contextlib.contextmanager
def raw_closed_on_error(raw: socket.socket) -> Iterator[None]:
    """Close an accepted socket that has found no connection yet."""
    try:
        yield
    except BaseException:
        raw.close()
        raise


async def wait_for(trigger: Trigger) -> None:
    """Wait for an event, or for what an async callable waits for."""
    await (trigger.wait() if isinstance(trigger, trio.Event) else trigger())


def hypercorn_config(config: HttpConfig) -> hypercorn.Config:
    """Return what Hypercorn's protocol reads of its configuration."""
    theirs = hypercorn.Config()
    theirs.accesslog = theirs.errorlog = None
    theirs.h11_max_incomplete_size = config.n_header_bytes_max
    theirs.include_server_header = False
    return theirs


def n_connections_max(config: HttpConfig) -> int:
    """Return how many connections leave descriptors for the rest of the process."""
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return min(config.n_connections_max, max(soft // 2, soft - RESERVED_DESCRIPTORS))
    return config.n_connections_max
