"""Whatever bytes come, the client gets a 4xx or is closed, and the server goes on."""

from __future__ import annotations

import json
import random
import time

import pytest
import structlog.testing
import trio
import trio.lowlevel
import trio.testing

from cllm.serve.http.h11_private import N_HEADERS_MAX
from cllm.serve.http.requests import REQUEST_ID
from tests.serve.http.conftest import BOUND_S

HOST = b"Host: test\r\n"
REFUSED = {
    "no request": b"GARBAGE\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\n" + HOST + b"\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\n" + HOST + b"nonsense\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"a: \x00\r\n\r\n",
    "both lengths": b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "both lengths, the other way": b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "a negative length": b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: -5\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /echo HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk": b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    "a bad chunk after a good one": b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n",
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "another version": b"GET /health HTTP/1.9\r\n" + HOST + b"\r\n",
    "a TLS hello": bytes.fromhex("160301020001000001fc0303") + bytes(range(256)) * 2,
    "a target that is no path": b"GET ?q HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target that is no URL": b"GET http://[ HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tunnel": b"CONNECT other:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method in lower case": b"head /health HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=list(REFUSED))
async def test_a_malformed_request_is_400_and_the_connection_closed(serving, request_):
    async with serving() as server:
        answer = await server.ask(request_)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert await server.is_healthy()


HEAD_REFUSED = {
    "both lengths": HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a bad chunk": HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    "a body that does not come": HOST + b"Content-Length: 5\r\n\r\nsome",
}


@pytest.mark.parametrize("rest", HEAD_REFUSED.values(), ids=list(HEAD_REFUSED))
async def test_a_head_that_is_refused_has_the_headers_of_the_answer_and_no_body(serving, rest):
    async with serving(body_timeout_s=0.2) as server:
        with structlog.testing.capture_logs() as logged:
            answer = await server.ask(b"HEAD /wait HTTP/1.1\r\n" + rest)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 " if rest.endswith(b"some") else b"HTTP/1.1 400 ")
        assert b"content-length: 0" not in head
        assert b"content-length: " in head
        assert (body, logged) == (b"", [])


async def test_garbage_after_a_head_is_answered_with_a_body(serving):
    async with serving() as server:
        answer = await server.ask(b"HEAD /health HTTP/1.1\r\n" + HOST + b"\r\n" + b"GARBAGE\r\n\r\n")
        first, _, second = answer.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert json.loads(second.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


async def test_an_unknown_transfer_encoding_is_501(serving):
    async with serving() as server:
        answer = await server.ask(b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 501 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "not_supported_error"


CHUNKED = b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
BLANKS = b" " * 60_000
WITH_BLANKS = {
    "in a head": b"GET /health HTTP/1.1\r\n" + HOST + b"a:" + BLANKS + b"\x00\r\n\r\n",
    "in a trailer": CHUNKED + b"0\r\na:" + BLANKS + b"\x00\r\n\r\n",
    "behind a chunk's size": CHUNKED + b"5;" + BLANKS + b"\nx\r\nabcde\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("request_", WITH_BLANKS.values(), ids=list(WITH_BLANKS))
async def test_a_run_of_blanks_in_a_line_that_is_wrong_is_gone_over_once(serving, request_):
    """Once for each of them takes seventeen seconds, in which nothing else goes on."""
    async with serving() as server:
        begin = time.thread_time()
        answer = await server.ask(request_)
        assert time.thread_time() - begin < 2
        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_trailer_has_as_many_fields_as_a_head_at_most(serving):
    async with serving() as server:
        client = await server.connect()
        fits = b"1\r\na\r\n0\r\n" + b"a: b\r\n" * N_HEADERS_MAX + b"\r\n"
        await client.send(CHUNKED + fits)
        assert await client.answer() == (200, b"a")
        await client.send(CHUNKED + b"0\r\n\r\n" + b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * (N_HEADERS_MAX - 1) + b"\r\n")
        assert await client.answer() == (200, b"")
        assert (await client.answer())[0] == 200
        assert (await server.ask(CHUNKED + b"0\r\n" + b"a:\n" * 20_000 + b"\n")).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("n_pieces", [1, 40])
async def test_too_many_headers_are_431_before_anybody_looks_at_them(serving, n_pieces):
    head = b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 12_000 + b"\r\n"
    async with serving() as server:
        client = await server.connect()
        for i in range(n_pieces):
            await client.send(head[i * len(head) // n_pieces : (i + 1) * len(head) // n_pieces])
            await trio.lowlevel.checkpoint()
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 431 ")


async def test_as_many_headers_as_there_may_be_are_taken_whatever_follows_them(serving):
    head = "".join(f"X-{i}: {i}\r\n" for i in range(N_HEADERS_MAX - 3))
    async with serving() as server:
        client = await server.connect()
        for end in ("\r\n", "\n"):
            body = b"\n" * 5000
            lines = f"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{head}\r\n".replace("\r\n", end)
            await client.send(lines.encode() + body)
            assert await client.answer() == (200, body)
        await client.close()


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize("n_bytes", [66_000, 100_000, 200_000])
async def test_headers_over_the_limit_are_431(serving, end, n_bytes):
    async with serving() as server:
        answer = await server.ask(b"GET /health HTTP/1.1\r\n" + HOST + b"x: " + b"y" * n_bytes + end)
        assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "upgrade",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: !!!\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    ],
)
async def test_an_upgrade_is_ignored(serving, upgrade):
    async with serving() as server:
        client = await server.connect()
        for _ in range(2):
            await client.send(b"GET /health HTTP/1.1\r\n" + HOST + upgrade + b"\r\n")
            assert (await client.answer())[0] == 200


@pytest.mark.parametrize("over_tls", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_goes_on_sending_too_large_a_body_can_read_the_413(serving, slow_clock, tls_files, chunked, over_tls):
    async def send_all(client) -> None:
        for _ in range(160):
            await client.send(b"10000\r\n" + b"x" * 65536 + b"\r\n" if chunked else b"x" * 65536)

    pem, trust = tls_files
    async with serving(**({"ssl_certfile": pem} if over_tls else {})) as server:
        client = await server.connect(tls=trust if over_tls else None)
        await client.get("/echo", "POST", "Transfer-Encoding: chunked\r\n" if chunked else "Content-Length: 10485760\r\n")
        with trio.fail_after(BOUND_S):
            await send_all(client)
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_does_not_come_is_408(serving, until):
    async with serving(body_timeout_s=0.2) as server:
        for path in ("/echo", "/wait"):
            client = await server.connect()
            start = trio.current_time()
            await client.get(path, "POST", "Content-Length: 100\r\n", b"some")
            assert (await client.answer())[0] == 408
            assert await client.read_to_end() == b""
            assert trio.current_time() - start >= 0.2
        await until(lambda: server.log.n_cancelled == 1)


async def test_headers_that_come_a_byte_at_a_time_end_the_connection(serving, slow_clock):
    async with serving(header_timeout_s=0.3) as server:
        client = await server.connect()
        await client.get("/health")
        await client.answer()
        with trio.fail_after(BOUND_S), pytest.raises(trio.BrokenResourceError):  # noqa: PT012 the close shows at one of the sends
            for i in range(1000):
                await client.send(b"GET /health HTTP/1.1\r\nx: "[i : i + 1] or b"y")
                slow_clock.jump(0.01)
                await trio.testing.wait_all_tasks_blocked()


async def test_a_connection_that_says_nothing_ends_in_the_time_for_headers(serving):
    async with serving(header_timeout_s=0.2) as server:
        assert await server.ask(b"") == b""
        assert await server.ask(b"\r\n\r\n") == b""


async def test_random_bytes_and_mutated_requests_do_no_harm(serving):
    draw = random.Random(20)
    starts = [
        *REFUSED.values(),
        b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n",
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc",
    ]

    def mutated() -> bytes:
        data = bytearray(draw.choice(starts))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        return bytes(data) or b"x"

    async with serving(header_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=0.5) as server:
        with structlog.testing.capture_logs() as logged:
            async with trio.open_nursery() as nursery:
                for i in range(200):
                    nursery.start_soon(server.ask, mutated() if i % 2 else draw.randbytes(draw.randint(1, 300)))
        assert await server.is_healthy()
        assert logged == []


async def test_an_app_that_fails_is_one_line_in_the_log_and_500(serving):
    async def app(scope, receive, send):
        assert scope["type"] == "http"
        scope[REQUEST_ID] = "r-7"
        raise RuntimeError("on purpose")

    async with serving(app=app) as server:
        with structlog.testing.capture_logs() as logged:
            answer = await server.ask(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert [(entry["error"], entry["request_id"]) for entry in logged] == [("RuntimeError('on purpose')", "r-7")]
