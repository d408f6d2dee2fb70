"""The wrapper alone, under Hypercorn as it is."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart_trio import QuartTrio

from cllm.serve.http import wrap_asgi
from cllm.serve.http.hypercorn_private import PARAMETERS, check_shape
from tests.serve.http.conftest import BOUND_S


def make_app() -> QuartTrio:
    app = QuartTrio(__name__)
    app.config["RESPONSE_TIMEOUT"] = None

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    return app


async def read_to_end(port: int, request: bytes) -> bytes:
    answer = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        with trio.fail_after(BOUND_S):
            async for data in stream:
                answer += data
    return answer


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n",  # ends by the expiry of the keep-alive
    ],
    ids=["close", "1.0", "expiry"],
)
async def test_under_stock_hypercorn_every_response_comes_to_an_end(request_):
    config = Config()
    config.bind, config.errorlog, config.keep_alive_timeout = ["127.0.0.1:0"], None, 1.0
    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(serve, wrap_asgi(make_app()), config, shutdown_trigger=trio.sleep_forever, mode="asgi"))
        answer = await read_to_end(int(url.rpartition(":")[2]), request_)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b'{"status":"ok"}\n')
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (
            b"GET /health HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            b"403",
        ),
        (b"GET ?x HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", b"400"),
    ],
    ids=["websocket", "no path"],
)
async def test_under_stock_hypercorn_what_no_app_can_answer_is_refused_without_a_traceback(request_, status, capfd):
    config = Config()
    config.bind, config.keep_alive_timeout = ["127.0.0.1:0"], 1.0
    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(serve, wrap_asgi(make_app()), config, shutdown_trigger=trio.sleep_forever, mode="asgi"))
        answer = await read_to_end(int(url.rpartition(":")[2]), request_)
        assert answer.startswith(b"HTTP/1.1 " + status)
        nursery.cancel_scope.cancel()
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_over_http_2_the_last_send_takes_as_long_as_its_client_reads(autojump_clock):
    sent = []

    async def app(_scope, _receive, send):
        await send({"type": "http.response.body", "body": b"all of it"})

    async def send(message):
        await trio.sleep(300)
        sent.append(message["body"])

    await wrap_asgi(app)({"type": "http", "http_version": "2", "path": "/"}, None, send)
    assert sent == [b"all of it"]


async def test_other_scopes_pass_through_untouched():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    await wrap_asgi(app)({"type": "lifespan"}, 1, 2)
    assert seen == [({"type": "lifespan"}, 1, 2)]


def test_a_changed_hypercorn_is_one_line_at_import():
    check_shape(PARAMETERS, {})
    with pytest.raises(ImportError, match=r"^hypercorn .* \(make_app changed\): install 'hypercorn>=0.18,<0.19'$"):
        check_shape({make_app: "self and other things"}, {})


def test_an_application_that_somebody_else_starts_mends_h11_too() -> None:
    code = "import cllm.asgi; from h11 import _readers; print(_readers.READERS[_readers.SEND_BODY]['chunked'].__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "cllm.serve.http.h11_private\n"
