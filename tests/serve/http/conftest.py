"""A small Quart-Trio app on a real loopback port, and a client that writes raw bytes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trustme
from quart import request
from quart_trio import QuartTrio

from cllm.serve.http import HttpConfig, serve_http, wrap_asgi

BOUND_S = 30.0  # of every wait in these tests, however busy the machine: what comes within it did not wait for LONG_S
LONG_S = 120.0  # of every time limit that a test is not about


class AppLog:
    """What the app's handlers went through."""

    def __init__(self) -> None:
        self.n_started = 0
        self.n_cancelled = 0
        self.n_finished = 0
        self.go_on = trio.Event()

    @contextlib.contextmanager
    def handler(self):
        self.n_started += 1
        try:
            yield
        except (trio.Cancelled, GeneratorExit):
            self.n_cancelled += 1
            raise
        self.n_finished += 1


def make_app(log: AppLog) -> QuartTrio:
    app = QuartTrio(__name__)
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None, MAX_CONTENT_LENGTH=1024 * 1024)

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.post("/echo")
    async def echo():
        return await request.get_data(), {"content-type": "application/octet-stream"}

    @app.route("/wait", methods=["GET", "POST"])
    async def wait():
        with log.handler():
            await log.go_on.wait()
        return {"waited": True}

    @app.get("/stream")
    async def stream():
        """Chunks of `size` bytes: `n` of them, or until told to go on."""
        n, size, pause_ms = (request.args.get(name, default, type=int) for name, default in (("n", None), ("size", 8), ("pause_ms", 1)))
        send, chunks = trio.open_memory_channel[bytes](0)
        app.nursery.start_soon(produce, send, n, size, pause_ms)

        async def body():
            log.n_started += 1
            try:
                async for chunk in chunks:
                    yield chunk
                log.n_finished += 1
            except (trio.Cancelled, GeneratorExit):
                log.n_cancelled += 1
                raise
            finally:
                chunks.close()

        return body(), {"content-type": "text/event-stream"}

    async def produce(send: trio.MemorySendChannel[bytes], n: int | None, size: int, pause_ms: int) -> None:
        with send, contextlib.suppress(trio.BrokenResourceError):
            i = 0
            while (i < n) if n is not None else not log.go_on.is_set():
                await send.send(b"%d:" % i + b"x" * size)
                await trio.sleep(pause_ms / 1000)
                i += 1

    @app.get("/broken")
    async def broken():
        async def body():
            yield b"first"
            raise RuntimeError("broken on purpose")

        return body()

    return app


class Client:
    """One connection, byte by byte."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.received = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def read_until(self, mark: bytes) -> bytes:
        """Return what came up to and with `mark`; keep the rest."""
        with trio.fail_after(BOUND_S):
            while mark not in self.received:
                data = await self.stream.receive_some(65536)
                assert data, f"the server closed after {self.received!r}"
                self.received += data
        head, _, self.received = self.received.partition(mark)
        return head + mark

    async def read_to_end(self) -> bytes:
        """Return all that comes until the server closes, however it does."""
        with trio.fail_after(BOUND_S), contextlib.suppress(trio.BrokenResourceError):
            while data := await self.stream.receive_some(65536):
                self.received += data
        return self.received

    async def get(self, path: str, method: str = "GET", extra: str = "", body: bytes = b"") -> None:
        await self.send(f"{method} {path} HTTP/1.1\r\nHost: test\r\n{extra}\r\n".encode() + body)

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of one response with a Content-Length."""
        head = await self.read_until(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        with trio.fail_after(BOUND_S):
            while len(self.received) < length:
                data = await self.stream.receive_some(65536)
                assert data, f"the server closed after {head + self.received!r}"
                self.received += data
        body, self.received = self.received[:length], self.received[length:]
        return int(head.split()[1]), body

    async def close(self) -> None:
        await self.stream.aclose()

    async def reset(self) -> None:
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()


class Serving:
    """A running server."""

    url: str

    def __init__(self, log: AppLog, shutdown: trio.Event, abort: trio.Event) -> None:
        self.log = log
        self.shutdown = shutdown
        self.abort = abort
        self.ended = trio.Event()
        self.clients: list[Client] = []

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def run(self, serve: Callable[..., Any], **how_to_start: Any) -> None:
        await serve(**how_to_start)
        self.ended.set()

    async def connect(self, *, receive_buffer: int | None = None, tls: ssl.SSLContext | None = None) -> Client:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            with trio.fail_after(BOUND_S):
                await sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        stream = trio.SocketStream(sock)
        client = Client(stream if tls is None else trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True))
        self.clients.append(client)
        return client

    async def ask(self, request: bytes) -> bytes:
        """Return all that the server says to these bytes until it closes."""
        client = await self.connect()
        await client.send(request)
        answer = await client.read_to_end()
        await client.close()
        return answer

    async def wait_until_refused(self) -> None:
        """Wait for it."""
        with trio.fail_after(BOUND_S), contextlib.suppress(ConnectionError):
            while True:
                await (await self.connect()).close()

    async def is_healthy(self) -> bool:
        return (await self.ask(b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


async def _until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, which must be before any time limit of the server's is over that is not the test's own."""
    with trio.fail_after(BOUND_S):
        while not condition():  # noqa: ASYNC110 the conditions are of counters, sockets and processes alike
            await trio.sleep(0.002)


@pytest.fixture
def until():
    return _until


@pytest.fixture
def tls_files(tmp_path):
    """A file with a key and its certificate, and a client's context that trusts it."""
    authority, trust = trustme.CA(), ssl.create_default_context()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    authority.configure_trust(trust)
    return str(tmp_path / "both.pem"), trust


@pytest.fixture
def serving():
    """An async context manager that serves the test app, or the one given, with time limits that nothing but the test's own reaches."""

    @contextlib.asynccontextmanager
    async def serve(*, app: Any = None, **changes: Any) -> AsyncIterator[Serving]:
        log = AppLog()
        limits = dict.fromkeys(("grace_s", "header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s"), LONG_S)
        config = HttpConfig(**{"port": 0} | limits | changes)
        shutdown, abort = trio.Event(), trio.Event()
        if app is None:
            app = wrap_asgi(make_app(log))
        async with trio.open_nursery() as nursery:
            running = Serving(log, shutdown, abort)
            (running.url,) = await nursery.start(running.run, partial(serve_http, app, config=config, shutdown=shutdown, abort=abort))
            try:
                yield running
            finally:
                for client in running.clients:
                    await trio.aclose_forcefully(client.stream)
                nursery.cancel_scope.deadline = trio.current_time() + BOUND_S
                shutdown.set()
                abort.set()
        assert not nursery.cancel_scope.cancelled_caught, "the server did not end"

    return serve
