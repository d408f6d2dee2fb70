"""A client that goes away, however it does, ends its request and nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio
import trio.testing

FILES = Path("/proc/self/fd")


async def close(client):
    await client.close()


async def reset(client):
    await client.reset()


async def half_close(client):
    """Taken for a close: a FIN does not say whether the client still reads, and a generation that nobody reads is dear."""
    client.stream.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("path", ["/stream", "/wait"])
async def test_a_client_that_leaves_ends_its_handler(serving, until, path, leave):
    async with serving() as server:
        client = await server.connect()
        await client.get(path)
        await (client.read_until(b"2:xxx") if path == "/stream" else until(lambda: server.log.n_started))
        await leave(client)
        await until(lambda: server.log.n_cancelled)
        assert await server.is_healthy()


@pytest.mark.parametrize("path", ["/stream", "/wait"])
async def test_that_a_client_has_left_is_seen_at_once(serving, until, slow_clock, path):
    slow_clock.rate = 0.01  # so that a busy machine has five seconds for what is allowed, and who looks once a second takes a hundred
    async with serving() as server:
        client = await server.connect()
        await client.get(path)
        await (client.read_until(b"0:xxx") if path == "/stream" else until(lambda: server.log.n_started))
        await client.close()
        left_at = trio.current_time()
        await until(lambda: server.log.n_cancelled)
        assert trio.current_time() - left_at < 0.05


@pytest.mark.parametrize("ahead", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n", b"x" * 1000])
@pytest.mark.parametrize("leave", [close, half_close])
async def test_bytes_after_the_body_do_not_hide_a_disconnect(serving, until, ahead, leave):
    async with serving() as server:
        client = await server.connect()
        await client.get("/wait", "POST", "Content-Length: 4\r\n", b"body" + ahead)
        await until(lambda: server.log.n_started)
        await client.send(ahead)
        await leave(client)
        await until(lambda: server.log.n_cancelled)


async def test_a_disconnect_is_seen_behind_more_than_is_read_ahead(serving, until):
    async with serving() as server:
        client = await server.connect()
        await client.get("/wait")
        await until(lambda: server.log.n_started)
        await client.send(b"x" * 100_000)  # the rest, and the FIN, stay in the kernel
        await client.close()
        await until(lambda: server.log.n_cancelled)


def n_open() -> int:
    return len(list(FILES.iterdir()))


@pytest.mark.skipif(not FILES.is_dir(), reason="the system does not tell what is open; it runs on Linux")
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_let_go(serving, until):
    async with serving() as server:
        assert await server.is_healthy()  # what is opened at the first request is open
        n_before = n_open()
        client = await server.connect()
        await client.get("/echo", "POST", "Content-Length: 100\r\n", b"some")
        await until(lambda: n_open() >= n_before + 2)  # this one's and the server's
        await client.close()
        await until(lambda: n_open() <= n_before)
        assert await server.is_healthy()


@pytest.mark.skipif(not FILES.is_dir(), reason="the system does not tell what is open; it runs on Linux")
async def test_nothing_is_left_of_clients_that_come_and_go(serving, until):
    async def come_and_go(number: int) -> None:
        client = await server.connect()
        await client.get("/wait" if number % 2 else "/stream")
        await (until(lambda: server.log.n_started > number) if number % 2 else client.read_until(b"0:xxx"))
        await (close, reset, half_close)[number % 3](client)
        await until(lambda: server.log.n_cancelled > number)
        await client.close()

    def n_tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    async with serving() as server:
        for number in range(6):  # what is begun at the first of each kind has begun
            await come_and_go(number)
        assert await server.is_healthy()
        await trio.testing.wait_all_tasks_blocked(0.05)
        before = n_tasks(), n_open()
        for number in range(6, 126):
            await come_and_go(number)
        assert await server.is_healthy()
        await until(lambda: n_tasks() <= before[0] and n_open() <= before[1])


async def test_two_hundred_streams_that_leave_together_all_end(serving, until):
    async with serving() as server:
        clients = [await server.connect() for _ in range(200)]
        for client in clients:
            await client.get("/stream?pause_ms=100")
        for client in clients:
            await client.read_until(b"0:xxx")
        for client in clients:
            await client.close()
        await until(lambda: server.log.n_cancelled == 200)
        assert await server.is_healthy()


async def test_a_client_that_stops_reading_is_ended_and_the_others_are_not(serving, until):
    async with serving(write_timeout_s=0.3) as server:
        stopped = await server.connect(receive_buffer=4096)
        await stopped.get("/stream?size=20000")
        other = await server.connect()
        await other.get("/stream?n=300")
        await until(lambda: server.log.n_cancelled == 1)
        assert b"299:xxx" in await other.read_until(b"\r\n0\r\n\r\n")


async def test_a_client_that_reads_slowly_gets_a_large_answer_whole(serving, slow_clock):
    body = b"x" * 1_000_000
    async with serving(write_timeout_s=0.5) as server, trio.open_nursery() as nursery:
        client = await server.connect(receive_buffer=65536)
        nursery.start_soon(client.get, "/echo", "POST", f"Content-Length: {len(body)}\r\nConnection: close\r\n", body)
        received = b""
        start = trio.current_time()
        while data := await client.stream.receive_some(25_000):
            received += data
            slow_clock.jump(0.02)
        assert received.endswith(b"\r\n\r\n" + body)
        assert trio.current_time() - start > 0.5  # longer than the time in which it has to take something
