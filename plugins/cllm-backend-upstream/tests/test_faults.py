"""Upstreams that do wrong: what their clients are told, who is asked instead, and that nothing is ever taken for an answer."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from cllm_backend_upstream import pool

WAIT_S = 120.0  # ends a test that hangs


def status(code: int, body: Any = None, *headers: str) -> Callable[[Any], None]:
    return lambda asked: asked.answer(code, {} if body is None else body, *headers)


def hang_up(asked: Any) -> None:
    """Close without a word."""


def garbage(asked: Any) -> None:
    asked.send(b"\x00\xff\xfe this is no HTTP\r\n\r\n" * 10)


def no_stream(asked: Any) -> None:
    asked.answer(200, b"<html>Welcome!</html>", "Content-Type: text/html")


def no_json(asked: Any) -> None:
    asked.begin()
    asked.event("{it is not JSON")


def wrong_shape(asked: Any) -> None:
    asked.begin()
    asked.event({"choices": [{"delta": {"content": 5}}]})


def no_events(asked: Any) -> None:
    asked.begin()
    asked.send("once upon a time\n" * 100)


def endless_line(asked: Any) -> None:
    asked.begin()
    while True:
        asked.send(b"data: " + b"x" * 65_536)


def endless_headers(asked: Any) -> None:
    asked.send("HTTP/1.1 200 OK\r\n")
    while True:
        asked.send("X-More: of this\r\n" * 1000)


def never_ends(asked: Any) -> None:
    """The body is over before the answer is."""
    asked.begin()


def after(n_tokens: int, then: Callable[[Any], None]) -> Callable[[Any], None]:
    """Begin well, and then do something else."""

    def behave(asked: Any) -> None:
        asked.begin()
        for i in range(n_tokens):
            asked.token(f"w{i} ")
        then(asked)

    return behave


def cut(asked: Any) -> None:
    asked.connection.shutdown(socket.SHUT_RDWR)


def done_without_an_end(asked: Any) -> None:
    asked.event("[DONE]")


def error_event(asked: Any) -> None:
    asked.event({"error": {"message": "a secret of the upstream's", "code": 500}})


def gives_up(asked: Any) -> None:
    asked.token("", "abort")


BEFORE = {
    "500": (status(500), 500),
    "424": (status(424, {"error": "Request failed during generation: CUDA error", "error_type": "generation"}), 500),
    "502": (status(502, b"<html>Bad Gateway</html>"), 500),
    "redirect": (status(302, None, "Location: http://127.0.0.1:1/"), 500),
    "401": (status(401), 500),
    "402": (status(402), 500),
    "407": (status(407), 500),
    "hang up": (hang_up, 500),
    "garbage": (garbage, 500),
    "no stream": (no_stream, 500),
    "no JSON": (no_json, 500),
    "wrong shape": (wrong_shape, 500),
    "no events": (no_events, 500),
    "endless line": (endless_line, 500),
    "endless headers": (endless_headers, 500),
    "empty": (never_ends, 500),
    "429": (status(429, None, "Retry-After: 30"), 429),
    "503": (status(503, None, "Retry-After: 30"), 503),
    "503 now": (status(503, None, "Retry-After: 0"), 503),
}
DURING = {
    "cut": cut,
    "hang up": hang_up,
    "no JSON": no_json,
    "wrong shape": wrong_shape,
    "no events": no_events,
    "endless line": endless_line,
    "done without an end": done_without_an_end,
    "error": error_event,
    "gives up": gives_up,
}


@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_first_token_is_an_honest_error(faulty: Any, make_front: Any, fault: str) -> None:
    faulty.behave, expected = BEFORE[fault]
    front = make_front(faulty.url, health_s="60")
    reply = front.chat(stream=True)
    assert reply.status == expected
    assert reply.error["message"]


@pytest.mark.parametrize("fault", BEFORE)
def test_another_upstream_is_asked_as_long_as_nothing_was_told(make_faulty: Any, make_front: Any, fault: str) -> None:
    bad, good = make_faulty(), make_faulty()
    bad.behave, _ = BEFORE[fault]
    front = make_front(bad.url, good.url, health_s="60")
    for _ in range(3):
        assert front.chat().content == "w0 w1 w2 w3 w4 "
    assert len(good.asked) == 3
    assert 1 <= len(bad.asked) <= (3 if fault == "503 now" else 2)


def test_who_does_not_serve_it_is_not_asked_in_the_place_of_one_who_does(make_faulty: Any, make_front: Any, caplog: Any) -> None:
    wrong, right = make_faulty(), make_faulty()
    wrong.behave = status(404, {"error": {"message": "The model m does not exist"}})
    front = make_front(wrong.url, right.url, health_s="60")
    assert {front.chat().status for _ in range(6)} == {200}
    assert len(wrong.asked) == 1, "it is suspect then"
    assert f"{wrong.url} failed: " in caplog.text
    assert "The model m does not exist" in caplog.text


def test_what_none_of_them_serves_is_not_supported_and_no_trouble(make_faulty: Any, make_front: Any, caplog: Any) -> None:
    both = [make_faulty(), make_faulty()]
    for one in both:
        one.behave = status(404)
    front = make_front(*(one.url for one in both), health_s="60")
    assert [front.chat().status for _ in range(2)] == [501, 501]
    assert [len(one.asked) for one in both] == [2, 2]
    assert " failed: " not in caplog.text


def error_at_once(event: dict[str, Any]) -> Callable[[Any], None]:
    def tell(asked: Any) -> None:
        asked.begin()
        asked.event(event)

    return tell


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"error": {"message": "out of memory", "code": 400}}, 400),
        ({"error": {"message": "out of memory", "code": "400"}}, 400),
        ({"error": {"message": "out of memory", "code": 429}}, 429),
        ({"error": {"message": "out of memory", "code": 500}}, 500),
        ({"error": {"message": "out of memory", "code": "no_memory"}}, 500),
        ({"error": {"message": "out of memory", "http_status_code": 422}}, 400),
        ({"error": {"message": "out of memory", "http_status_code": 424}}, 500),
        ({"error": {"message": "out of memory", "http_status_code": 429}}, 429),
        ({"error": "out of memory", "error_type": "validation"}, 400),
        ({"error": "out of memory", "error_type": "template_error"}, 400),
        ({"error": "out of memory", "error_type": "missing_template_variable"}, 400),
        ({"error": "out of memory", "error_type": "tool_error"}, 400),
        ({"error": "out of memory", "error_type": "overloaded"}, 429),
        ({"error": "out of memory", "error_type": "generation"}, 500),
    ],
    ids=str,
)
def test_an_error_in_a_stream_that_has_told_nothing_is_what_its_code_says(
    faulty: Any, make_front: Any, caplog: Any, event: dict[str, Any], expected: int
) -> None:
    faulty.behave = error_at_once(event)
    reply = make_front(faulty.url).chat()
    assert reply.status == expected
    assert ("out of memory" in reply.error["message"]) == (expected == 400)
    assert ("out of memory" in caplog.text) == (expected == 500)


@pytest.mark.parametrize(
    "event", [{"error": "too long", "error_type": "validation"}, {"error": {"message": "too long", "http_status_code": 422}}], ids=str
)
def test_what_one_refuses_in_a_stream_no_other_is_asked_for(make_faulty: Any, make_front: Any, event: dict[str, Any]) -> None:
    servers = [make_faulty(), make_faulty()]
    for server in servers:
        server.behave = error_at_once(event)
    front = make_front(*(server.url for server in servers), health_s="60")
    reply = front.chat()
    assert (reply.status, reply.error["message"], sum(len(server.asked) for server in servers)) == (400, "too long", 1)
    assert [upstream.n_failures for upstream in front.model.pool.upstreams] == [0, 0]


@pytest.mark.parametrize("fault", DURING)
def test_a_stream_that_breaks_ends_with_an_error_and_is_tried_nowhere_else(make_faulty: Any, make_front: Any, fault: str) -> None:
    first, second = make_faulty(), make_faulty()
    first.behave = second.behave = after(3, DURING[fault])
    front = make_front(first.url, second.url, health_s="60")
    reply = front.chat(stream=True)
    assert (reply.status, reply.streamed) == (200, "w0 w1 w2 ")
    assert reply.chunks[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text
    assert "secret" not in reply.text
    assert len(first.asked) + len(second.asked) == 1
    assert front.chat().status == 500


@pytest.mark.parametrize("n_told", [0, 2])
def test_one_that_falls_silent_is_given_up(faulty: Any, make_front: Any, n_told: int) -> None:
    faulty.behave = after(n_told, faulty.wait_left)
    # A pause of the machine's own between two tokens must not be taken for silence.
    front = make_front(faulty.url, first_token_s="60" if n_told else "1", token_s="3")
    reply = front.chat(stream=True)
    if n_told:
        assert (reply.status, reply.streamed) == (200, "w0 w1 ")
        assert "error" in reply.chunks[-1]
    else:
        assert (reply.status, reply.error["type"]) == (504, "timeout_error")
    assert faulty.left.wait(WAIT_S)


def test_a_call_that_is_told_whole_has_as_long_as_the_first_token(faulty: Any, make_front: Any) -> None:
    def behave(asked: Any) -> None:
        asked.begin()
        asked.token("I look. ")
        time.sleep(2.0)
        asked.finish(9)

    faulty.behave = behave
    front = make_front(faulty.url, first_token_s="60", token_s="0.5")
    tool = {"type": "function", "function": {"name": "look"}}
    assert front.chat(tools=[tool]).content == "I look. "
    assert front.chat().status == 500, "where none may be, it is as ever"


def test_one_that_tells_nothing_but_that_it_lives_is_given_up(faulty: Any, make_front: Any) -> None:
    def behave(asked: Any) -> None:
        asked.begin()
        while True:
            asked.send(": ping\n\n")
            time.sleep(0.01)

    faulty.behave = behave
    assert make_front(faulty.url, first_token_s="1").chat().status == 504
    assert faulty.left.wait(WAIT_S)


def test_the_usage_is_not_waited_for_for_long(faulty: Any, make_front: Any) -> None:
    def behave(asked: Any) -> None:
        asked.begin()
        asked.token("all", "stop")
        faulty.wait_left(asked)

    faulty.behave = behave
    reply = make_front(faulty.url).chat()
    assert (reply.content, reply.json["usage"]["completion_tokens"]) == ("all", 1)


def test_an_answer_that_is_cut_after_its_end_is_whole(faulty: Any, make_front: Any) -> None:
    def behave(asked: Any) -> None:
        asked.has_begun = True
        asked.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n")
        asked.token("all", "stop")

    faulty.behave = behave
    reply = make_front(faulty.url).chat(stream=True)
    assert (reply.status, reply.streamed, reply.text.endswith("data: [DONE]\n\n")) == (200, "all", True)


@pytest.mark.parametrize(
    ("body", "param", "kind"),
    [
        ({"error": {"message": "top_p: too little", "param": "top_p"}}, "top_p", "invalid_request_error"),
        ({"error": "top_p: too little"}, None, "invalid_request_error"),
        ({"object": "error", "message": "top_p: too little"}, None, "invalid_request_error"),
        ({"error": {"message": "top_p: too little", "type": "not_supported_error", "param": "top_p"}}, "top_p", "not_supported_error"),
    ],
)
def test_what_the_client_did_wrong_stays_its_mistake(make_faulty: Any, make_front: Any, body: Any, param: str | None, kind: str) -> None:
    first, second = make_faulty(), make_faulty()
    first.behave = second.behave = status(400, body)
    reply = make_front(first.url, second.url).chat()
    assert (reply.status, reply.error["message"], reply.error["param"], reply.error["type"]) == (400, "top_p: too little", param, kind)
    assert len(first.asked) + len(second.asked) == 1


def test_a_complaint_without_end_is_not_read_to_its_end(faulty: Any, make_front: Any) -> None:
    def behave(asked: Any) -> None:
        asked.send("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        while True:
            asked.send(b"x" * 65_536)

    faulty.behave = behave
    reply = make_front(faulty.url).chat()
    assert reply.status == 400
    assert len(reply.text) < 1000
    assert faulty.left.wait(WAIT_S)


def test_a_complaint_is_told_in_one_line_without_control_characters(faulty: Any, make_front: Any) -> None:
    faulty.behave = status(400, {"error": {"message": "a\nb\x1b[31m" + "c" * 10_000, "param": ["no"]}})
    message = make_front(faulty.url).chat().error["message"]
    assert message.startswith("a b [31mc")
    assert len(message) <= 500


@pytest.mark.parametrize(("code", "kind"), [(429, "rate_limit_error"), (503, "unavailable_error")])
def test_an_upstream_is_left_alone_as_long_as_it_asks(faulty: Any, make_front: Any, code: int, kind: str) -> None:
    faulty.behave = status(code, None, "Retry-After: 30")
    front = make_front(faulty.url)
    for _ in range(3):
        reply = front.chat()
        assert (reply.status, reply.error["type"]) == (code, kind)
        assert 10 <= int(reply.headers["Retry-After"]) <= 30
    assert len(faulty.asked) == 1


def test_after_that_it_is_asked_again(faulty: Any, make_front: Any) -> None:
    well, faulty.behave = faulty.behave, status(429, None, "Retry-After: 30")
    front = make_front(faulty.url)
    assert front.chat().status == 429
    (upstream,) = front.model.pool.upstreams
    faulty.behave = well
    upstream.rests_until -= 30
    assert front.chat().status == 200


def test_a_client_that_leaves_closes_the_upstreams_connection_at_once(faulty: Any, make_front: Any) -> None:
    faulty.behave = after(2, faulty.wait_left)
    front = make_front(faulty.url)
    host, port = front.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        received = b""
        while b"w1" not in received:
            received += client.recv(65_536)
        assert not faulty.left.is_set()
    assert faulty.left.wait(WAIT_S)


def test_a_stop_string_closes_it_too(faulty: Any, make_front: Any) -> None:
    faulty.behave = after(5, faulty.wait_left)
    reply = make_front(faulty.url).chat(stop=["w3"])
    assert (reply.content, reply.json["choices"][0]["stop_reason"]) == ("w0 w1 w2 ", "w3")
    assert faulty.left.wait(WAIT_S)


def test_requests_go_to_the_least_loaded(make_faulty: Any, make_front: Any) -> None:
    servers = [make_faulty(), make_faulty(), make_faulty()]
    gate = threading.Barrier(6, timeout=WAIT_S)
    for server in servers:
        good = server.behave

        def behave(asked: Any, good: Any = good) -> None:
            gate.wait()  # until six are under way
            good(asked)

        server.behave = behave
    front = make_front(*[server.url for server in servers])
    threads = [threading.Thread(target=front.chat) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [len(server.asked) for server in servers] == [2, 2, 2]


def test_one_that_goes_away_and_comes_back_is_used_again_and_the_log_says_so(faulty: Any, make_front: Any, caplog: Any) -> None:
    front = make_front(faulty.url, health_s="0.02")
    assert front.chat().status == 200
    faulty.stop()
    reply = front.chat()
    assert (reply.status, reply.error["code"]) == (503, "upstream_unreachable")
    assert reply.headers["Retry-After"]
    faulty.start()
    deadline = time.monotonic() + WAIT_S
    while front.chat().status != 200:
        assert time.monotonic() < deadline
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"upstream {faulty.url} is down: ") for line in told)
    assert f"upstream {faulty.url} is up again" in told


def test_one_that_says_that_it_is_not_well_is_not_asked(make_faulty: Any, make_front: Any) -> None:
    ill, good = make_faulty(), make_faulty()
    ill.health = 503
    front = make_front(ill.url, good.url, health_s="0.02", kind="vllm")
    deadline = time.monotonic() + WAIT_S
    while front.model.pool.upstreams[0].is_well:
        assert time.monotonic() < deadline
    for _ in range(4):
        assert front.chat().status == 200
    assert (len(ill.asked), len(good.asked)) == (0, 4)


def test_the_metrics_tell_of_each_upstream(make_faulty: Any, make_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SUSPECT_S", pool.SUSPECT_S_MAX)  # it is not asked again however long the three requests take
    good, bad, busy = make_faulty(), make_faulty(), make_faulty()
    bad.behave, busy.behave = status(500), status(429, None, "Retry-After: 30")
    front = make_front(good.url, bad.url, busy.url, health_s="60")
    for _ in range(3):
        assert front.chat().status == 200
    with urllib.request.urlopen(front.url + "/metrics", timeout=WAIT_S) as response:
        lines = set(response.read().decode().splitlines())
    assert f'cllm_upstream_failures_total{{upstream="{bad.url}"}} 1.0' in lines
    assert f'cllm_upstream_rests_total{{upstream="{busy.url}"}} 1.0' in lines
    assert f'cllm_upstream_up{{upstream="{good.url}"}} 1.0' in lines
    assert f'cllm_upstream_requests_total{{upstream="{good.url}"}} 3.0' in lines


def test_a_key_that_is_refused_is_told_to_the_operator_and_not_to_the_client(faulty: Any, make_front: Any, caplog: Any) -> None:
    faulty.behave = status(401, {"error": {"message": "wrong key: s3cret"}})
    reply = make_front(faulty.url).chat()
    assert reply.status == 500
    assert "key" not in reply.text
    assert any("it wants another key" in record.getMessage() for record in caplog.records)
