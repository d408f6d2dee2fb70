"""When connections or descriptors run out, the server bears it and comes back."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trio

from cllm.serve.http import server as server_module
from cllm.serve.http.connection import Connection
from tests.serve.http.conftest import BOUND_S

SERVER = """
    import resource
    from functools import partial
    import trio
    from quart_trio import QuartTrio
    from cllm.serve.http import HttpConfig, serve_http, server, wrap_asgi

    resource.setrlimit(resource.RLIMIT_NOFILE, ({n_descriptors}, {n_descriptors}))
    {change}
    app = QuartTrio("app")

    @app.get("/health")
    async def health():
        return {{"status": "ok"}}

    async def main():
        async with trio.open_nursery() as nursery:
            config = HttpConfig(port=0, header_timeout_s=60, keep_alive_s=60)
            serve = partial(serve_http, wrap_asgi(app), config=config, shutdown=trio.sleep_forever)
            (url,) = await nursery.start(serve)
            print(url, flush=True)

    trio.run(main)
"""


KIB_A_CONNECTION_MAX = 20  # idle, in the server's memory; the kernel's own is not in it


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=BOUND_S)


@contextlib.contextmanager
def served(*, n_descriptors: int, change: str = ""):
    """A server in a process of its own, and its port."""
    code = textwrap.dedent(SERVER).format(change=change, n_descriptors=n_descriptors)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def health(port: int) -> bytes:
    with connect(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        return client.recv(1000)


@pytest.mark.parametrize("change", ["", "server.n_connections_max = lambda config: 1000"], ids=["below the limit", "at the limit"])
def test_a_flood_of_idle_connections_beyond_the_descriptors_is_outlived(change):
    with served(change=change, n_descriptors=64) as (process, port):
        flood = [connect(port) for _ in range(150)]
        assert health(port).startswith(b"HTTP/1.1 200 ")
        for client in flood:
            client.close()
        assert health(port).startswith(b"HTTP/1.1 200 ")
        assert process.poll() is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads another process's memory from /proc, which Linux has")
def test_an_idle_connection_takes_little_memory():
    with served(n_descriptors=800) as (process, port), contextlib.ExitStack() as clients:
        taken = []
        for n_more in (100, 500):  # the first ones also bring what is there once
            for _ in range(n_more):
                clients.enter_context(connect(port))
            assert health(port).startswith(b"HTTP/1.1 200 "), "all before it are taken by now"
            taken.append(resident_kib(process.pid))
        assert (taken[1] - taken[0]) / 500 <= KIB_A_CONNECTION_MAX


async def test_who_has_sent_nothing_but_an_empty_line_ahead_gives_way_too(serving, until):
    async with serving(n_connections_max=1) as server:
        client = await server.connect()
        await client.get("/wait")
        await until(lambda: server.log.n_started == 1)
        await client.send(b"\r\n")
        other = await server.connect()
        await other.get("/health")
        await trio.sleep(0.05)
        server.log.go_on.set()
        assert (await client.answer())[0] == 200
        assert (await other.answer())[0] == 200
        await other.close()


async def test_beyond_the_most_connections_the_longest_idle_gives_way(serving):
    async with serving(n_connections_max=4) as server:
        for _ in range(8):
            idle = await server.connect()
            await idle.get("/health")
            assert (await idle.answer())[0] == 200
        assert await server.clients[0].read_to_end() == b""
        await idle.get("/health")
        assert (await idle.answer())[0] == 200


async def test_of_many_idle_connections_some_give_way_at_once_so_that_not_each_newcomer_has_all_looked_at(serving, monkeypatch):
    monkeypatch.setattr(server_module, "SHARE_CLOSED", 4)
    n_looks = 0
    is_idle = Connection.is_idle.fget

    def look(connection):
        nonlocal n_looks
        n_looks += 1
        return is_idle(connection)

    monkeypatch.setattr(Connection, "is_idle", property(look))
    async with serving(n_connections_max=40) as server:
        for i in range(80):
            if i == 40:
                n_looks = 0
            client = await server.connect()
            await client.get("/health")
            assert (await client.answer())[0] == 200
    assert n_looks < 40 * 40 / 4


async def test_a_connection_with_a_request_under_way_never_gives_way(serving, until):
    async with serving(n_connections_max=2) as server:
        for _ in range(2):
            await (await server.connect()).get("/wait")
        await until(lambda: server.log.n_started == 2)
        third = await server.connect()
        await third.get("/health")
        with trio.move_on_after(0.1) as waited:
            await third.stream.receive_some()
        assert waited.cancelled_caught
        server.log.go_on.set()
        assert (await third.answer())[0] == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM, errno.EPROTO])
async def test_an_accept_that_fails_is_tried_again(serving, monkeypatch, number):
    accept, n_failures = server_module.accept, 0

    async def failing_accept(listener):
        nonlocal n_failures
        if n_failures < 2:
            n_failures += 1
            raise OSError(number, "on purpose")
        return await accept(listener)

    monkeypatch.setattr(server_module, "accept", failing_accept)
    monkeypatch.setattr(server_module, "PAUSE_S", 0.01)
    async with serving() as server:
        assert await server.is_healthy()
        assert n_failures == 2


async def test_a_client_that_left_before_it_was_accepted_costs_no_other_one_its_connection_and_no_time(monkeypatch):
    class Listener:
        n_tries = 0

        def accept(self):
            self.n_tries += 1
            if self.n_tries == 1:
                raise ConnectionAbortedError(errno.ECONNABORTED, "on purpose")
            return "connection", None

    listener = Listener()
    with trio.fail_after(BOUND_S):
        accepted = await server_module.accept(listener)
    assert (accepted, listener.n_tries) == ("connection", 2)


async def test_five_hundred_idle_connections_disturb_nobody(serving):
    async with serving() as server:
        for _ in range(500 if server_module.n_connections_max(server_module.HttpConfig()) > 1000 else 200):
            await server.connect()
        assert await server.is_healthy()
