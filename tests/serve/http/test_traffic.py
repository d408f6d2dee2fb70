"""What goes over the connections is counted."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest

from cllm.serve.http import HttpConfig, Traffic, serve_http
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
