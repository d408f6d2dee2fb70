"""What a well-behaved client sees."""

from __future__ import annotations

import socket
import ssl

import pytest
import trio
import trio.testing
import trustme

from cllm.errors import AppFailed, CannotListen
from cllm.serve.http import HttpConfig, certificate, serve_http
from cllm.serve.http.connection import N_AHEAD_BYTES_MAX, N_RECV_BYTES_MAX
from cllm.serve.http.http1 import Http1
from cllm.serve.http.listeners import close_all, open_listeners
from tests.serve.http.conftest import BOUND_S

CLOSE = "Connection: close\r\n"


async def test_a_connection_serves_one_request_after_another(serving):
    async with serving() as server:
        client = await server.connect()
        for _ in range(3):
            await client.get("/health")
            assert await client.answer() == (200, b'{"status":"ok"}\n')
            await client.get("/echo", "POST", "Content-Length: 3\r\n", b"abc")
            assert await client.answer() == (200, b"abc")
        await client.close()


async def test_clients_are_borne_as_long_as_the_operator_likes(serving):
    async with serving(write_timeout_s=1e300, header_timeout_s=1e300, body_timeout_s=1e300, keep_alive_s=1e300) as server:
        assert await server.is_healthy()


async def test_pipelined_requests_are_answered_in_order(serving):
    async with serving() as server:
        client = await server.connect()
        for body in (b"one", b"three", b"five!!"):
            await client.get("/echo", "POST", f"Content-Length: {len(body)}\r\n", body)
        assert [(await client.answer())[1] for _ in range(3)] == [b"one", b"three", b"five!!"]
        await client.close()


async def test_requests_that_are_sent_far_ahead_are_taken_in_as_they_are_answered(serving, monkeypatch):
    held, resume = [], Http1.resume

    async def noted(self, data):
        held.append(self.n_buffered + len(data))
        await resume(self, data)

    monkeypatch.setattr(Http1, "resume", noted)
    n, padding = 130, b"x" * 3_000  # 400 kB
    async with serving() as server, trio.open_nursery() as nursery:
        client = await server.connect()
        nursery.start_soon(client.send, b"GET /health HTTP/1.1\r\nHost: test\r\nX-Padding: %s\r\n\r\n" % padding * n)
        for _ in range(n):
            assert (await client.answer())[0] == 200
        await client.close()
    assert max(held) < N_AHEAD_BYTES_MAX + N_RECV_BYTES_MAX


async def test_who_is_answered_before_the_body_came_is_told_that_the_connection_closes(serving):
    async with serving() as server:
        client = await server.connect()
        await client.get("/health", "POST", "Content-Length: 1000\r\n", b"some")
        head = await client.read_to_end()
        assert b"connection: close" in head.lower()
        client = await server.connect()
        await client.get("/health", "POST", "Content-Length: 4\r\n", b"some")
        assert b"connection: close" not in (await client.read_until(b"\r\n\r\n")).lower()
        await client.close()


async def test_a_request_pipelined_behind_a_stream_is_answered_after_it(serving, until):
    async with serving() as server:
        client = await server.connect()
        await client.get("/stream")
        await client.read_until(b"0:xxxxxxxx")
        await client.get("/health", extra=CLOSE)
        server.log.go_on.set()
        assert (await client.read_until(b"\r\n0\r\n\r\n")).count(b"HTTP/1.1") == 0
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 OK")


async def test_a_large_body_sent_ahead_waits_for_its_turn(serving):
    body = bytes(range(256)) * 2048
    async with serving() as server, trio.open_nursery() as nursery:
        client = await server.connect()
        await client.get("/wait", "POST", "Content-Length: 0\r\n")
        nursery.start_soon(client.get, "/echo", "POST", f"Content-Length: {len(body)}\r\n", body)
        with trio.move_on_after(0.3):
            await trio.sleep_forever()  # the kernel's buffers and the server's allowance fill up
        server.log.go_on.set()
        assert (await client.answer())[0] == 200
        assert await client.answer() == (200, body)
        await client.close()


async def test_a_stray_line_end_after_a_body_is_not_taken_for_a_request(serving):
    async with serving() as server:
        client = await server.connect()
        await client.get("/echo", "POST", "Content-Length: 3\r\n", b"abc\r\n")
        assert await client.answer() == (200, b"abc")
        await client.send(b"\r\n")
        await client.get("/health", extra=CLOSE)
        assert b"200 OK" in await client.read_to_end()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("behind", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n", b"x" * 100_000])
async def test_what_comes_behind_the_last_request_is_thrown_away(serving, until, version, behind):
    async with serving() as server:
        client = await server.connect()
        await client.send(f"POST /wait HTTP/{version}\r\nHost: test\r\nContent-Length: 4\r\n{CLOSE}\r\nbody".encode())
        await until(lambda: server.log.n_started)
        await client.send(behind)
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.log.go_on.set()
        answer = await client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert (answer.count(b"HTTP/1.1"), server.log.n_cancelled) == (1, 0)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["/health", "/stream?n=3"])
async def test_a_client_that_wants_no_further_request_sees_the_end_at_once(serving, version, path):
    async with serving() as server:
        answer = await server.ask(f"GET {path} HTTP/{version}\r\nHost: test\r\n{CLOSE}\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_an_answer_goes_out_in_one_piece(serving):
    async with serving() as server:
        client = await server.connect()
        await client.get("/health")
        assert (await client.stream.receive_some(65536)).endswith(b'{"status":"ok"}\n')
        await client.close()


async def test_head_has_the_headers_without_the_body(serving):
    async with serving() as server:
        answer = await server.ask(f"HEAD /health HTTP/1.1\r\nHost: test\r\n{CLOSE}\r\n".encode())
        assert b"content-length: 16" in answer
        assert answer.endswith(b"\r\n\r\n")


async def test_a_chunked_body_arrives_whole(serving):
    async with serving() as server:
        client = await server.connect()
        chunks = b"".join(b"1\r\n%c\r\n" % (97 + i % 26) for i in range(5000))
        await client.get("/echo", "POST", "Transfer-Encoding: chunked\r\n", chunks + b"0\r\n\r\n")
        status, body = await client.answer()
        assert (status, len(body), body[:3]) == (200, 5000, b"abc")
        await client.close()


async def test_a_client_that_asks_before_it_sends_a_body_is_told_to_go_on(serving):
    async with serving() as server:
        client = await server.connect()
        await client.get("/echo", "POST", "Content-Length: 3\r\nExpect: 100-continue\r\n")
        assert b" 100 " in await client.read_until(b"\r\n\r\n")
        await client.send(b"abc")
        assert await client.answer() == (200, b"abc")
        await client.close()


async def test_a_client_that_asks_is_not_told_to_send_a_body_that_the_app_refuses_by_the_headers(serving):
    async def app(scope, receive, send):
        assert scope["type"] == "http"
        for _ in range(4):  # as a framework does
            await trio.lowlevel.checkpoint()
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app=app) as server:
        answer = await server.ask(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99000000\r\nExpect: 100-continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ")


async def test_a_proxys_absolute_target_is_understood(serving):
    async with serving() as server:
        assert b"200 OK" in await server.ask(f"GET http://test/health HTTP/1.1\r\nHost: test\r\n{CLOSE}\r\n".encode())


async def test_an_idle_connection_ends_when_its_time_is_up(serving):
    async with serving(keep_alive_s=0.2) as server:
        client = await server.connect()
        start = trio.current_time()
        await client.get("/health")
        await client.answer()
        assert await client.read_to_end() == b""
        assert trio.current_time() - start >= 0.2


async def test_a_response_may_last_longer_than_every_timeout(serving, until, slow_clock):
    async with serving(header_timeout_s=0.1, body_timeout_s=0.1, keep_alive_s=0.1) as server:
        client = await server.connect()
        await client.get("/wait")
        await until(lambda: server.log.n_started)
        slow_clock.jump(0.3)
        await trio.testing.wait_all_tasks_blocked()
        server.log.go_on.set()
        assert (await client.answer())[0] == 200


async def test_a_stream_that_breaks_is_cut_and_not_finished(serving):
    async with serving() as server:
        answer = await server.ask(b"GET /broken HTTP/1.1\r\nHost: test\r\n\r\n")
        assert answer.endswith(b"5\r\nfirst\r\n")
        assert await server.is_healthy()


async def test_tls_serves_what_clear_text_serves(serving, tls_files):
    pem, trust = tls_files
    async with serving(ssl_certfile=pem) as server:
        assert server.url.startswith("https://")
        client = await server.connect(tls=trust)
        await client.get("/health")
        assert (await client.answer())[0] == 200
        await client.get("/stream?n=20&size=50000", extra=CLOSE)
        answer = await client.read_to_end()
        assert answer.count(b":xxx") == 20
        assert answer.endswith(b"0\r\n\r\n")
        assert b"HTTP" not in await server.ask(b"GET /health HTTP/1.1\r\n\r\n")  # clear text to a TLS port
        gone = await server.connect(tls=trust)
        await gone.get("/stream")
        await gone.read_until(b"3:xxx")
        await gone.close()
        client = await server.connect(tls=trust)
        await client.get("/health", extra=CLOSE)
        assert (await client.answer())[0] == 200


async def test_over_tls_an_answer_that_ends_with_the_connection_is_told_to_have_ended(serving, tls_files):
    pem, trust = tls_files
    async with serving(ssl_certfile=pem) as server:
        sock = await trio.open_tcp_stream("127.0.0.1", server.port)
        stream = trio.SSLStream(sock, trust, server_hostname="localhost")  # for which an end without a word is an error
        await stream.send_all(b"GET /stream?n=3 HTTP/1.0\r\nHost: test\r\n\r\n")
        received = b""
        with trio.fail_after(BOUND_S):
            while data := await stream.receive_some(65536):
                received += data
        assert b"0:" in received
        assert b"2:" in received
        await stream.aclose()


async def test_a_renewed_certificate_is_taken_and_one_that_cannot_be_used_is_not(serving, until, tls_files, monkeypatch, logged):
    monkeypatch.setattr(certificate, "LOOK_EVERY_S", 0.01)
    path, old_trust = tls_files
    file, new_trust = trio.Path(path), ssl.create_default_context()
    old, renewed = await file.read_bytes(), trustme.CA()
    renewed.configure_trust(new_trust)

    def told() -> list[str]:
        return [one["event"] for one in logged if one["event"].startswith("tls.")]

    async with serving(ssl_certfile=path) as server:
        early = await server.connect(tls=old_trust)
        await early.get("/health")
        assert (await early.answer())[0] == 200
        half = file.with_suffix(".half")
        await half.write_bytes(old[:100])
        await half.rename(file)
        await until(told)
        await file.unlink()
        await until(lambda: len(told()) == 2)
        await trio.sleep(0.05)
        assert told() == ["tls.not_renewed"] * 2, "that it is no certificate, and that it is gone, once each"
        still = await server.connect(tls=old_trust)
        await still.get("/health", extra=CLOSE)
        assert (await still.answer())[0] == 200
        renewed.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(file))
        await until(lambda: told()[-1] == "tls.renewed")
        late = await server.connect(tls=new_trust)
        for client in (late, early):
            await client.get("/health", extra=CLOSE)
            assert (await client.answer())[0] == 200


async def test_a_certificate_that_can_be_read_a_moment_later_is_taken_then(serving, until, tls_files, monkeypatch, logged):
    monkeypatch.setattr(certificate, "LOOK_EVERY_S", 0.01)
    may_read, load = [], certificate.make_tls

    def refuse(config: HttpConfig) -> ssl.SSLContext | None:
        if not may_read:
            raise CannotListen("permission denied")
        return load(config)

    path, _ = tls_files
    async with serving(ssl_certfile=path):
        monkeypatch.setattr(certificate, "make_tls", refuse)
        await trio.Path(path).touch()
        await until(lambda: [one for one in logged if one["event"] == "tls.not_renewed"])
        may_read.append(True)  # of the same file
        await until(lambda: [one for one in logged if one["event"] == "tls.renewed"])
    assert len([one for one in logged if one["event"] == "tls.not_renewed"]) == 1


async def test_a_tls_client_that_does_not_shake_hands_is_closed_and_holds_up_no_shutdown(serving, until, tls_files):
    pem, _ = tls_files
    async with serving(ssl_certfile=pem, header_timeout_s=0.2) as server:
        assert await server.ask(b"") == b""
    async with serving(ssl_certfile=pem) as server:
        await server.connect()
        server.shutdown.set()
        await until(server.ended.is_set)


async def test_a_taken_port_is_one_line_for_the_operator(serving):
    async with serving() as server:
        with pytest.raises(CannotListen, match=rf"^cannot listen on 127.0.0.1:{server.port}: Address already in use$"):
            await serve_http(None, config=HttpConfig(port=server.port), shutdown=trio.Event())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "no.such.host.invalid"}, "cannot be resolved"),
        ({"host": "192.0.2.1"}, "no such address"),
        ({"ssl_certfile": "/no/such.pem"}, "No such file"),
        ({"ssl_certfile": __file__}, "cannot use"),
    ],
)
async def test_what_cannot_be_bound_or_read_is_one_line_for_the_operator(changes, message):
    with pytest.raises(CannotListen, match=message) as caught:
        await serve_http(None, config=HttpConfig(**{"port": 0} | changes), shutdown=trio.Event())
    assert "\n" not in str(caught.value)


async def test_a_name_that_has_one_address_twice_is_listened_on_once(monkeypatch):
    found = await trio.socket.getaddrinfo("127.0.0.1", 0, type=trio.socket.SOCK_STREAM)

    async def twice(*_arguments, **_options):
        return found * 2

    monkeypatch.setattr("trio.socket.getaddrinfo", twice)
    listeners = await open_listeners(HttpConfig(host="twice", port=0))
    close_all(listeners)
    assert len(listeners) == 1


async def test_all_addresses_of_ipv6_are_all_of_both_kinds():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no address of IPv6")
    listeners = await open_listeners(HttpConfig(host="::", port=0))
    try:
        (listener,) = listeners
        for host in ("127.0.0.1", "::1"):
            with trio.fail_after(BOUND_S):
                client = await trio.open_tcp_stream(host, listener.getsockname()[1])
            await client.aclose()
    finally:
        close_all(listeners)


async def test_an_ipv6_address_may_be_given_as_it_stands_in_a_url(monkeypatch):
    asked = []

    async def noted(host, *_arguments, **_options):
        asked.append(host)
        return []

    monkeypatch.setattr("trio.socket.getaddrinfo", noted)
    for host in ("[::1]", "::1", "localhost"):
        with pytest.raises(CannotListen):
            await open_listeners(HttpConfig(host=host, port=0))
    assert asked == ["::1", "::1", "localhost"]


async def test_an_app_that_does_not_start_is_one_line_for_the_operator():
    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    with pytest.raises(AppFailed, match=r"^the app did not start: no model$"):
        await serve_http(app, config=HttpConfig(port=0), shutdown=trio.Event())


async def test_an_app_whose_lifespan_dies_ends_the_server():
    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await trio.sleep(0.01)

    with trio.fail_after(BOUND_S), pytest.raises(AppFailed, match="ended before the server"):
        await serve_http(app, config=HttpConfig(port=0), shutdown=trio.Event())


async def test_an_app_without_a_lifespan_is_served(serving):
    async def app(scope, receive, send):
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with serving(app=app) as server:
        assert (await server.ask(b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
