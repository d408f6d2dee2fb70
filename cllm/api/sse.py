"""Streams, of server-sent events mostly: how a completion's events become bytes, cheaply.

The chunk of a token is all constant but its text: head and tail are encoded once for a stream, and what comes between them by msgspec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import msgspec
import structlog
from quart import Response
from quart.wrappers.response import ResponseBody

from cllm.api.errors import ErrorShape, InternalError
from cllm.api.generation import Generation
from cllm.engine.events import Delta, Event, Failed, Finished
from cllm.errors import RequestError

log = structlog.get_logger("cllm.api")

PING = b": keep-alive\n\n"  # with a text: there are readers to whom a bare colon is no line
DONE = b"data: [DONE]\n\n"

# There are clients that cut a stream by all that Unicode calls the end of a line (`str.splitlines`, httpx's `iter_lines`), ollama-python
# among them. Within JSON these may be written otherwise, and of others none is there.
LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_json = msgspec.json.Encoder().encode


def _encode(value: Any) -> bytes:
    text = _json(value)
    if not text.isascii():
        for raw, escaped in LINE_ENDS:
            text = text.replace(raw, escaped)
    return text


def data(value: Any) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: " + _encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """One event that has a name beside its data."""
    return b"event: " + event.encode() + b"\n" + data(value)


def line(value: Any) -> bytes:
    """`value` as a line of JSON."""
    return _encode(value) + b"\n"


@attrs.frozen
class Wire:
    """What a stream has beside its shape's events: how it says that it failed, what breaks a silence, its media type."""

    failed: Callable[[dict[str, Any]], bytes] = data  # given the error in the surface's own shape
    ping: Callable[[], bytes] | None = lambda: PING  # None: silence is not broken
    content_type: str = "text/event-stream; charset=utf-8"


PLAIN = Wire()


N_EVENTS_AT_ONCE = 1000  # encoded in one go: a reader that comes back after a long silence finds ten times as many, which take 30 ms


class TextFrame:
    """Events that differ in one text only: `template` with `mark` in its place, encoded once."""

    __slots__ = ("_head", "_tail")

    MARK = "\x00text\x00"

    def __init__(self, template: Any, event: str | None = None) -> None:
        whole = data(template) if event is None else named(event, template)
        self._head, self._tail = whole.split(_encode(self.MARK))

    def __call__(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


class Shape(Protocol):
    """A surface's chunks. Each method gives whole events, or nothing."""

    def first(self) -> bytes:
        """What comes before any text."""

    def delta(self, index: int, event: Delta) -> bytes:
        """A completion's new text; `index` is its place in the request."""

    def finished(self, index: int, event: Finished) -> bytes:
        """A completion's end."""

    def last(self) -> bytes:
        """What comes after every completion's end."""


class SseBody(ResponseBody):
    """A response's body: iterating gives bytes to write, each with all that the engine has told since the last."""

    def __init__(
        self, generation: Generation, first: Sequence[tuple[int, Event]], shape: Shape, error_shape: ErrorShape, wire: Wire = PLAIN
    ) -> None:
        self.wire = wire
        self.request_id: str | None = None  # by which it is found in the log, once its headers are sent
        self._generation = generation
        self._first = first
        self._waiting: Sequence[tuple[int, Event]] = ()  # told, and too much to be encoded at once with what came before
        self._shape = shape
        self._error_shape = error_shape
        self._ended = False
        self._encoded: bytes | None = None  # the event that comes next, where a sink has encoded it and could not send it

    def divert(self, send_now: Callable[[bytes], bool]) -> None:
        """Send deltas with `send_now` while iterating waits for news. What it does not take comes by iterating, as everything else does."""

        def take(index: int, delta: Delta) -> bool:
            try:
                chunk = self._shape.delta(index, delta)
            except Exception:  # it is met again, and told, in the stream's own task
                return False
            if not chunk or send_now(chunk):
                return True
            self._encoded = chunk  # not twice: a shape may count what it encodes
            return False

        self._generation.divert(take)

    async def __aenter__(self) -> SseBody:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._generation.close()

    def __aiter__(self) -> SseBody:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            try:
                chunk = await self._chunk()
            except Exception as error:  # the status has been sent: the stream itself must say it
                log.error("stream.failed", request_id=self.request_id, exc_info=error)
                chunk = self._error(InternalError("internal error"))
            if chunk:
                return chunk
        self._generation.close()
        raise StopAsyncIteration

    async def _chunk(self) -> bytes:
        if self._first:
            events, self._first = self._first, ()
            return self._shape.first() + self._encode(events)
        events = self._waiting or await self._generation.next_events()
        events, self._waiting = events[:N_EVENTS_AT_ONCE], events[N_EVENTS_AT_ONCE:]
        if events:
            return self._encode(events)
        self._ended = True
        return self._shape.last()

    def _encode(self, events: Sequence[tuple[int, Event]]) -> bytes:
        parts = []
        if self._encoded is not None:
            parts.append(self._encoded)
            self._encoded = None
            if type(events[0][1]) is Delta:  # else it was one too many, and the stream's end came in its place
                events = events[1:]
        for index, event in events:
            if type(event) is Delta:
                parts.append(self._shape.delta(index, event))
            elif type(event) is Finished:
                parts.append(self._shape.finished(index, event))
            else:
                assert isinstance(event, Failed)
                parts.append(self._error(event.error))
                break
        return b"".join(parts)

    def _error(self, error: RequestError) -> bytes:
        self._ended = True
        return self.wire.failed(self._error_shape(error))


def sse_response(body: SseBody) -> Response:
    """The response that carries `body`."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy that buffers would hold the tokens back
    response = Response(b"", 200, headers, content_type=body.wire.content_type)
    del response.headers["Content-Length"]
    response.response = body
    return response
