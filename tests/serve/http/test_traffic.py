"""What goes over the connections is counted."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry, generate_latest

from cllm.serve.http import HttpConfig, Traffic, serve_http
from cllm.serve.http.writer import Writer
from tests.serve.http.conftest import BOUND_S

REQUEST = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"


async def app(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(3):
        await send({"type": "http.response.body", "body": b"chunk", "more_body": True})
    if send_now := scope["extensions"].get("cllm.send_now"):
        assert send_now(b"straight")
    await send({"type": "http.response.body", "body": b"x" * 3_000_000, "more_body": False})


class Unread(trio.abc.SendStream):
    """To a client that takes nothing before `goes_on`."""

    def __init__(self):
        self.goes_on = trio.Event()

    async def send_all(self, data):
        await self.goes_on.wait()

    async def wait_send_all_might_not_block(self):
        await self.goes_on.wait()

    async def aclose(self):
        pass


async def test_answers_that_nobody_reads_take_so_much_together_and_no_more(monkeypatch, autojump_clock):
    """Each client is given time for each piece, so that many could have one of the largest each for hours."""
    monkeypatch.setattr("cllm.serve.http.writer.UNSENT_BYTES_MAX", 5_000_000)
    traffic, cut_off = Traffic(), []
    async with trio.open_nursery() as nursery:
        streams = [Unread() for _ in range(5)]

        def writer(i):
            return Writer(streams[i], None, timeout_s=30, spawn=nursery.start_soon, on_broken=lambda: cut_off.append(i), traffic=traffic)

        for i, n_bytes in enumerate((3_000_000, 1000, 2_000_000, 100_000)):  # the second hardly counts
            nursery.start_soon(writer(i).send, b"x" * n_bytes)
            await trio.testing.wait_all_tasks_blocked()
        assert cut_off == [0], "it had one the longest"
        assert (traffic.n_bytes_unsent, len(traffic.holders)) == (2_101_000, 2)
        nursery.start_soon(writer(4).send, b"x" * 6_000_000)  # which alone is more than all may be
        await trio.testing.wait_all_tasks_blocked()
        assert cut_off == [0, 2, 3]
        for stream in streams:
            stream.goes_on.set()
    assert (traffic.n_bytes_unsent, len(traffic.holders)) == (0, 0)
    assert traffic.n_bytes_out >= 6_001_000


@pytest.mark.parametrize("n_requests", [1, 3])
async def test_all_that_comes_and_goes_is_counted_by_direction(n_requests):
    traffic, shutdown = Traffic(), trio.Event()
    registry = CollectorRegistry()
    registry.register(traffic)
    n_received = 0
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(partial(serve_http, app, config=HttpConfig(port=0), shutdown=shutdown, traffic=traffic))
            for _ in range(n_requests):
                client = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
                await client.send_all(REQUEST)
                async for data in client:
                    n_received += len(data)
                await client.aclose()
            shutdown.set()
    assert traffic.n_bytes_in == n_requests * len(REQUEST)
    assert traffic.n_bytes_out == n_received > n_requests * 3_000_000
    text = generate_latest(registry).decode()
    assert f'cllm_http_bytes_total{{direction="in"}} {float(traffic.n_bytes_in)}' in text
    assert 'cllm_http_bytes_total{direction="out"}' in text
