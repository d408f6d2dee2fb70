"""When the server is told to stop, it lets requests finish, and it stops."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from cllm.serve.http import HttpConfig, connection, serve_http, wrap_asgi
from tests.serve.http.conftest import LONG_S, AppLog, Serving, make_app


async def test_requests_under_way_finish_and_then_the_server_ends(serving, until):
    async with serving() as server:
        clients = [await server.connect() for _ in range(8)]
        for i, client in enumerate(clients):
            await client.get("/stream" if i % 2 else "/wait")
        await until(lambda: server.log.n_started == 8)
        server.shutdown.set()
        await server.wait_until_refused()
        assert not server.ended.is_set()
        server.log.go_on.set()
        for i, client in enumerate(clients):
            answer = await client.read_to_end()
            assert answer.endswith(b"\r\n0\r\n\r\n" if i % 2 else b'{"waited":true}\n')
        await until(server.ended.is_set)
        assert server.log.n_cancelled == 0


async def test_new_connections_are_refused_at_once(serving, until):
    async with serving() as server:
        client = await server.connect()
        await client.get("/wait")
        await until(lambda: server.log.n_started)
        server.shutdown.set()
        await server.wait_until_refused()
        assert not server.ended.is_set()


async def test_idle_connections_do_not_hold_it_up(serving, until):
    async with serving() as server:
        for _ in range(3):
            await server.connect()
            client = await server.connect()
            await client.get("/health")
            await client.answer()
        server.shutdown.set()
        await until(server.ended.is_set)


async def test_what_has_come_before_the_word_is_answered(serving, until):
    async with serving() as server:
        clients = [await server.connect() for _ in range(8)]
        for client in clients:
            await client.get("/health")
            await client.answer()
        for client in clients:
            await client.get("/health")  # which the server has not read when it looks at who is idle, or has only just
        server.shutdown.set()
        for client in clients:
            assert (await client.answer())[0] == 200
        await until(server.ended.is_set)


async def test_half_a_request_has_a_moment_for_the_rest(serving, until, monkeypatch):
    monkeypatch.setattr(connection, "LAST_HEAD_S", LONG_S)
    async with serving() as server:
        client = await server.connect()
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        server.shutdown.set()
        await server.wait_until_refused()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not server.ended.is_set()
        await client.send(b"\r\n")
        assert b" 200 " in (await client.read_to_end()).split(b"\r\n")[0]
        await until(server.ended.is_set)


async def test_half_a_request_that_does_not_go_on_does_not_hold_it_up(serving, until):
    async with serving() as server:
        client = await server.connect()
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        other = await server.connect()
        await other.send(b"\r\n")
        server.shutdown.set()
        await until(server.ended.is_set)


async def test_a_response_begun_later_says_that_the_connection_closes(serving, until):
    async with serving() as server:
        client = await server.connect()
        await client.get("/wait")
        await until(lambda: server.log.n_started)
        server.shutdown.set()
        await server.wait_until_refused()
        server.log.go_on.set()
        assert b"connection: close" in await client.read_to_end()


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_a_client_that_never_reads_does_not_outlast_the_grace(serving, until, grace_s):
    async with serving(grace_s=grace_s) as server:
        client = await server.connect(receive_buffer=4096)
        await client.get("/stream?size=1000000")
        other = await server.connect()
        await other.get("/wait")
        await until(lambda: server.log.n_started == 2)
        start = trio.current_time()
        server.shutdown.set()
        await until(server.ended.is_set)
        assert trio.current_time() - start >= grace_s
        assert server.log.n_cancelled == 2


async def test_a_second_word_ends_it_at_once(serving, until):
    async with serving() as server:
        client = await server.connect(receive_buffer=4096)
        await client.get("/stream?size=1000000")
        await until(lambda: server.log.n_started)
        server.shutdown.set()
        await server.wait_until_refused()
        assert not server.ended.is_set()
        server.abort.set()
        await until(server.ended.is_set)


async def test_cancelling_it_is_as_good(until):
    shutdown = trio.Event()
    server = Serving(AppLog(), shutdown, trio.Event())
    app = wrap_asgi(make_app(server.log))
    config = HttpConfig(port=0, grace_s=LONG_S, write_timeout_s=LONG_S)
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            (server.url,) = await nursery.start(partial(serve_http, app, config=config, shutdown=shutdown))
            client = await server.connect(receive_buffer=4096)
            async with client.stream:
                await client.get("/stream?size=1000000")
                await until(lambda: server.log.n_started)
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):  # the client stays, and reads nothing
                    await until(lambda: len(nursery.child_tasks) == 0)


@pytest.mark.parametrize("draining", [False, True])
async def test_cancelling_it_ends_a_write_to_a_client_that_never_reads(until, draining):
    begun = trio.Event()

    async def app(scope, receive, send):
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        with trio.CancelScope(shield=True):
            await send({"type": "http.response.body", "body": b"x" * 20_000_000, "more_body": False})

    shutdown = trio.Event()
    config = HttpConfig(port=0, grace_s=LONG_S, write_timeout_s=LONG_S)
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(partial(serve_http, app, config=config, shutdown=shutdown))
            client = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
            async with client:
                await client.send_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
                await begun.wait()
                await trio.testing.wait_all_tasks_blocked(0.01)
                if draining:
                    shutdown.set()
                    await trio.testing.wait_all_tasks_blocked(0.01)
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):  # the client stays, and reads nothing
                    await until(lambda: len(nursery.child_tasks) == 0)
