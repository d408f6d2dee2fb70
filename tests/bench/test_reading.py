"""Responses, events and answers, read from pieces that are cut anywhere."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.bench.answers import Answer, Exchange, answer_of
from cllm.bench.events import EventReader
from cllm.bench.http import BrokenResponse, ResponseReader
from cllm.bench.workloads import Ask

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\nTrailer: t\r\n\r\n"
LENGTH = b"HTTP/1.1 404 Not Found\r\ncontent-length: 12\r\nX-A: 1\r\n\r\nhello, world"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello, world"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH
RESPONSES = {"chunked": CHUNKED, "length": LENGTH, "to the end": TO_THE_END, "interim": INTERIM}


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """The data in two, cut everywhere, and byte by byte."""
    for i in range(len(data) + 1):
        yield [data[:i], data[i:]]
    yield [data[i : i + 1] for i in range(len(data))]


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join(reader.feed(piece) for piece in pieces)


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_a_response_reads_the_same_wherever_it_is_cut(response: bytes) -> None:
    for pieces in cuts(response):
        reader, body = read(pieces)
        reader.end()
        assert body == b"hello, world"
        assert reader.is_done
        assert reader.status == (404 if b"404" in response else 200)


def test_a_response_that_says_where_it_ends_ends_there() -> None:
    assert read([CHUNKED])[0].is_done
    assert read([LENGTH])[0].is_done
    assert not read([TO_THE_END])[0].is_done


def test_a_connection_is_kept_unless_the_server_says_otherwise_or_ends_by_closing_it() -> None:
    assert read([CHUNKED])[0].keeps_connection
    assert not read([CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: Close\r\n\r\n", 1)])[0].keeps_connection
    ended = read([TO_THE_END])[0]
    ended.end()
    assert not ended.keeps_connection
    assert not read([CHUNKED[:-3]])[0].keeps_connection


@pytest.mark.parametrize("n", [0, 5, 20, 60, len(CHUNKED) - 1])
def test_a_response_that_is_cut_off_is_told(n: int) -> None:
    with pytest.raises(BrokenResponse):
        read([CHUNKED[:n]])[0].end()


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 what\r\n\r\n",
        b"HTTP/1.1 " + 5000 * b"2" + b" OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: some\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(response: bytes) -> None:
    with pytest.raises(BrokenResponse):
        read([response])


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_any_bytes_are_read_or_refused(pieces: list[bytes]) -> None:
    with contextlib.suppress(BrokenResponse):
        read([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *pieces])


EVENTS = b': ping\n\ndata: {"a": "\xc3\xa9"}\n\nevent: x\r\ndata: two\r\ndata:lines\r\n\r\nretry: 5\n\ndata: [DONE]\n\n'


def test_events_read_the_same_wherever_they_are_cut() -> None:
    for pieces in cuts(EVENTS):
        reader = EventReader()
        found = [data for piece in pieces for data in reader.feed(piece)]
        assert found == ['{"a": "é"}'.encode(), b"two\nlines", b"[DONE]"]


def test_an_event_without_its_blank_line_is_not_there_yet() -> None:
    assert list(EventReader().feed(b"data: x\n")) == []


# --- answers -----------------------------------------------------------------------------------------------------------


def text_chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def delta_chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}


def events(*chunks: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def answer(body: bytes, *, status: int = 200, is_stream: bool = True, pieces: list[bytes] | None = None) -> Answer:
    arrivals = [(1.0 + i, piece) for i, piece in enumerate(pieces or [body])]
    ask = Ask(prompt=(1, 2, 3, 4), n_generated=3)
    return answer_of(Exchange(ask=ask, sent_at=0.5, status=status, is_stream=is_stream, arrivals=arrivals, ended_at=9.0))


def test_a_stream_is_counted_by_the_servers_usage() -> None:
    got = answer(events(text_chunk("a"), text_chunk("bc"), text_chunk("", "length"), USAGE))
    assert (got.n_prompt, got.n_cached, got.n_generated, got.counted_by) == (4, 2, 3, "usage")
    assert got.is_exact
    assert got.finish_reason == "length"
    assert len(got.chunks_at) == 2


@pytest.mark.parametrize(("shown", "itl_s"), [({"content": "x"}, 1 / 2), ({"reasoning_content": "x"}, 1 / 49)], ids=["hidden", "shown"])
def test_tokens_of_reasoning_that_is_hidden_came_before_the_text(shown: dict[str, str], itl_s: float) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 50, "completion_tokens_details": {"reasoning_tokens": 47}}
    pieces = [events(delta_chunk(**shown), done=False), events(delta_chunk("length", content="y"), {"choices": [], "usage": usage})]
    assert answer(b"", pieces=pieces).itl_s == pytest.approx(itl_s)


def test_a_stream_without_usage_is_counted_by_its_chunks() -> None:
    got = answer(events(delta_chunk(role="assistant"), delta_chunk(content="a"), delta_chunk(reasoning_content="b"), delta_chunk("length")))
    assert (got.n_generated, got.counted_by, got.is_exact) == (2, "chunks", None), "a chunk may hold two tokens"


def test_more_chunks_than_tokens_were_asked_for_are_too_many_tokens() -> None:
    got = answer(events(*map(text_chunk, "abcd"), text_chunk("", "stop")))
    assert (got.n_generated, got.counted_by, got.is_exact) == (4, "chunks", False)


def test_a_server_that_counts_no_token_of_a_text_is_not_believed() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}
    got = answer(events(text_chunk("a"), text_chunk("b", "stop"), usage))
    assert (got.n_generated, got.counted_by, got.error) == (2, "chunks", "")


def test_a_chunk_counts_from_when_its_last_byte_came() -> None:
    body = events(text_chunk("a"), text_chunk("b"), text_chunk("c", "length"))
    for i in range(len(body) + 1):
        got = answer(body, pieces=[body[:i], body[i:]])
        n_whole = body[:i].count(b"\n\n")
        assert got.chunks_at == [1.0] * min(n_whole, 3) + [2.0] * (3 - min(n_whole, 3))
        assert got.ttft_s == got.chunks_at[0] - 0.5


def test_an_answer_without_a_stream_has_one_time() -> None:
    page = {"choices": [{"message": {"content": "abc"}, "finish_reason": "length"}], "usage": USAGE["usage"]}
    got = answer(json.dumps(page).encode(), is_stream=False)
    assert (got.n_generated, got.ttft_s, got.e2e_s, got.itl_s) == (3, 8.5, 8.5, 0.0)
    assert got.is_exact


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"error": {"message": "full", "type": "x"}}', 503, "503: full"),
        (b'{"error": "no such model"}', 404, "404: no such model"),
        (b'{"detail": "what?"}', 422, "422: what?"),
        (b"<html>\n gateway</html>", 502, "502: <html> gateway</html>"),
        (events(text_chunk("a"), {"error": {"message": "died"}}, done=False), 200, "died"),
        (events(text_chunk("a"), done=False), 200, "the stream ended before its answer"),
        (events(text_chunk("a"), text_chunk("b", "abort")), 200, "the server ended the answer with 'abort'"),
        (events(text_chunk("a"), {"object": "error", "message": "died"}), 200, "died"),
        (events(), 200, "an answer without any token"),
        (b'{"error": {"message": "overloaded"}}', 200, "overloaded"),
        (
            json.dumps({**text_chunk("a", "stop"), "usage": USAGE["usage"]}).encode(),
            200,
            "the server answers in one piece where a stream is asked for (--no-stream asks for none)",
        ),
        (b"", 200, "the stream ended before its answer"),
        (b"data: {\n\n", 200, "the stream is not what OpenAI's API has"),
        (events([1]), 200, "the stream is not what OpenAI's API has"),  # type: ignore[arg-type]
        (b"data: " + 100_000 * b"[" + b"\n\n", 200, "the stream is not what OpenAI's API has"),
    ],
)
def test_what_is_no_whole_answer_says_why(body: bytes, status: int, error: str) -> None:
    got = answer(body, status=status)
    assert got.error == error
    assert got.is_failed
    assert not got.is_exact


def test_a_page_that_is_no_answer_says_so() -> None:
    assert answer(b"[]", is_stream=False).error == "the answer is not what OpenAI's API has"
    assert answer(100_000 * b"[", is_stream=False).error == "the answer is not what OpenAI's API has"
    assert answer(b'{"choices": [{"text": "a"}]}', is_stream=False).error == "an answer without usage"
