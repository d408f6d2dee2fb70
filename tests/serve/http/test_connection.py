"""One connection whose reads are those of a script: what is in hand when something else happens in the same tick."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio

from cllm.serve.http import HttpConfig
from cllm.serve.http import hypercorn_private as hypercorn
from cllm.serve.http.connection import NOTSENT_BYTES, Connection
from cllm.serve.http.held import Held
from cllm.serve.http.server import hypercorn_config
from cllm.serve.http.traffic import Traffic
from tests.serve.http.conftest import BOUND_S, Client

Read = Callable[[], Awaitable[bytes]]


class Script(trio.abc.ReceiveStream):
    """Each read ends with what it has, cancelled or not, as one does whose bytes are in hand already."""

    def __init__(self, *reads: Read) -> None:
        self._reads = iter(reads)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        read = next(self._reads, None)
        with trio.CancelScope(shield=read is not None):
            return await (read or trio.sleep_forever)()

    async def aclose(self) -> None:
        pass


def gives(data: bytes) -> Read:
    async def read() -> bytes:
        return data

    return read


@contextlib.asynccontextmanager
async def connected(app: Any, *reads: Read) -> AsyncIterator[Client]:
    """A client of a connection that serves `app` what the script reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    for one in (ours, theirs):
        one.setblocking(False)
    config = HttpConfig()
    shared = (hypercorn_config(config), hypercorn.WorkerContext(None), hypercorn.ConnectionState({}))
    connection = Connection(theirs, None, app, config, shared, traffic=Traffic(), held=Held(), on_idle=lambda: None)
    connection._stream = trio.StapledStream(connection._stream, Script(*reads))
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery, trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
            nursery.start_soon(connection.run)
            yield Client(stream)


async def body_of(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    return body


async def answer(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def test_bytes_in_hand_when_a_response_ends_go_on_with_the_request_that_was_begun_ahead():
    may_end, ended = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/first":
            await may_end.wait()
            await answer(send, b"first")
            ended.set()
        else:
            await answer(send, await body_of(receive))

    async def while_the_response_ends() -> bytes:
        may_end.set()
        await ended.wait()
        return b"ond HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 8\r\n\r\nab"

    reads = (
        gives(b"GET /first HTTP/1.1\r\nHost: test\r\n\r\nPOST /sec"),
        while_the_response_ends,
        gives(b"cd\r\n\r\n"),  # taken for a request, it would be none
    )
    async with connected(app, *reads) as client:
        assert await client.answer() == (200, b"first")
        assert await client.answer() == (200, b"abcd\r\n\r\n")
        assert await client.read_to_end() == b""


async def test_the_others_have_their_turns_while_a_body_of_one_byte_chunks_is_taken_apart():
    n_chunks = 10_000
    n_turns = 0

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await answer(send, await body_of(receive))

    async def take_turns() -> None:
        nonlocal n_turns
        while True:
            await trio.lowlevel.checkpoint()
            n_turns += 1

    n_at_read: list[int] = []

    def counted(data: bytes) -> Read:
        async def read() -> bytes:
            n_at_read.append(n_turns)
            return data

        return read

    head = b"POST / HTTP/1.1\r\nHost: test\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        async with connected(app, gives(head), counted(b"1\r\na\r\n" * n_chunks), counted(b"0\r\n\r\n")) as client:
            assert await client.answer() == (200, b"a" * n_chunks)
            assert await client.read_to_end() == b""
        nursery.cancel_scope.cancel()
    before, after = n_at_read
    assert after - before >= 20


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have some of these bounds only; it runs on Linux")
def test_the_kernel_bounds_what_waits_in_it_and_finds_clients_that_vanished() -> None:
    levels = {"SO_KEEPALIVE": socket.SOL_SOCKET}
    wanted = {
        "TCP_NOTSENT_LOWAT": NOTSENT_BYTES,
        "TCP_NODELAY": 1,
        "SO_KEEPALIVE": 1,
        "TCP_KEEPIDLE": 15,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 7500,
    }

    async def make() -> dict[str, int]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs = listener.accept()[0]
        config = HttpConfig(write_timeout_s=7.5)
        shared = (hypercorn_config(config), hypercorn.WorkerContext(None), hypercorn.ConnectionState({}))
        connection = Connection(theirs, None, None, config, shared, traffic=Traffic(), held=Held(), on_idle=lambda: None)  # type: ignore[arg-type]
        with ours, theirs:
            return {name: connection._raw.getsockopt(levels.get(name, socket.IPPROTO_TCP), getattr(socket, name)) for name in wanted}

    assert trio.run(make) == wanted
