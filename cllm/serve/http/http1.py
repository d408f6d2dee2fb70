"""Hypercorn's HTTP/1.1, hardened: what is refused, what waits, and how the chunks of a stream are written."""

from __future__ import annotations

import itertools
import json
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11
import trio

from cllm.serve.http import hypercorn_private as hypercorn
from cllm.serve.http.h11_private import N_HEADERS_MAX, size_of_head
from cllm.serve.http.writer import Writer

SEND_NOW = "cllm.send_now"
N_EVENTS_PER_TURN = 256  # some milliseconds; one read full of one-byte chunks is 11,000 events, and the others must have their turns
N_TURNS_BEFORE_100 = 16  # of the loop, in which an app looks at a request's headers
PHRASES = {int(status): status.phrase.encode() for status in HTTPStatus}


class RequestStream(hypercorn.HTTPStream):
    """One request and its response, as ASGI events."""

    writer: Writer
    # True once h11 has framed a chunk of this response as we would have: from then on nothing of h11's state changes until the end of
    # the body, and its share of a chunk's cost can be saved.
    frames_itself = False

    async def app_send(self, message: Any) -> None:
        if message is not None and message["type"] == "http.response.body" and message.get("more_body", False):
            await self._send_more(message)
        elif message is not None and self.closed:
            await trio.lowlevel.checkpoint()
        else:
            await super().app_send(message)

    async def _send_more(self, message: Any) -> None:
        if self.closed:  # the client is gone: ASGI wants this to be no error, and an app that loops must not hold the event loop
            await trio.lowlevel.checkpoint()
        elif not self.frames_itself:
            await super().app_send(message)
        elif body := message.get("body", b""):
            await self.writer.send(frame(body))

    def send_now(self, data: bytes) -> bool:
        """ASGI extension "cllm.send_now": write the next chunk of the body without waiting, from any task of this thread.

        True: done. False: nothing was written, because the response has not begun, is not chunked, or has ended, or because the client
        does not keep up: send it as usual.
        """
        return self.frames_itself and not self.closed and bool(data) and self.writer.send_now(frame(data))


def frame(data: bytes) -> bytes:
    """Return `data` as one chunk (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Http1(hypercorn.H11Protocol):
    """One connection's requests, one after the other. HTTP/2 over clear text and WebSocket are off: an `Upgrade` is ignored."""

    stream: RequestStream | None
    connection: h11.Connection
    writer: Writer  # set by the connection, before the first byte
    _method = b""  # of the last request
    _head = b""  # of the response; goes out with the first bytes of its body, as ASGI wants

    # --- the request --------------------------------------------------------------------------------------------------

    async def feed(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self.connection.their_state is h11.IDLE:
            ahead = self.connection.trailing_data[0]
            if not ahead:
                data = data.lstrip(b"\r\n")  # before a request line they mean nothing (RFC 9112, 2.2)
            if reason := self._reason_to_refuse_head(ahead + data):
                self.connection.receive_data(data)  # so that it is known to have been sent
                await self.refuse(431, reason)
                return
        if data and self.connection.their_state is h11.MUST_CLOSE:  # behind the last request: nothing is to be read of it
            self.connection.receive_data(data)
        elif data:
            await self.handle(hypercorn.RawData(data))

    def _reason_to_refuse_head(self, data: bytes) -> str | None:
        n_lines, n_bytes = size_of_head(data)
        if n_lines > 1 + N_HEADERS_MAX:
            return f"more than {N_HEADERS_MAX} header fields"
        n_most: int = self.config.h11_max_incomplete_size  # h11 heeds it only where a head has no end yet
        return f"more than {n_most} bytes of headers" if n_bytes > n_most else None

    async def resume(self, data: bytes) -> None:
        """Go on, after a response has ended, with what the client has sent ahead, and with `data` behind it."""
        ahead = self.connection.trailing_data[0]
        self.connection = h11.Connection(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
        await self.feed(ahead + data)

    @property
    def n_buffered(self) -> int:
        """Bytes that the client has sent behind what was read of its request."""
        return len(self.connection.trailing_data[0])

    @property
    def has_buffered(self) -> bool:
        return self.n_buffered > 0

    async def _handle_events(self) -> None:
        body = bytearray()  # what came of it at once is passed on at once, in however small chunks it was sent
        for n_events in itertools.count(1):
            if n_events % N_EVENTS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            try:
                if await self._waits_for_100():
                    await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self.refuse(error.error_status_hint, str(error).partition(":")[0])
                return
            if isinstance(event, h11.Request):
                if not await self._begin(event):
                    return
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                # NEED_DATA, PAUSED: the connection reads on, so that a disconnect is seen behind whatever was sent ahead. EndOfMessage: the
                # response may end from now on, and what comes behind is then for resume().
                await self._pass_on(bytes(body), ends=isinstance(event, h11.EndOfMessage))
                return

    async def _waits_for_100(self) -> bool:
        """Whether the client waits to be told to send its body. The app comes first: what it refuses by the headers is not to be sent."""
        for _ in range(N_TURNS_BEFORE_100):
            if not self.connection.they_are_waiting_for_100_continue:
                return False
            await trio.lowlevel.checkpoint()
        return bool(self.connection.they_are_waiting_for_100_continue)

    async def _pass_on(self, body: bytes, *, ends: bool) -> None:
        stream = self.stream  # the app may end the response, and with it the stream, while it is waited for
        if stream is None:
            return
        if body:
            await stream.handle(hypercorn.Body(stream_id=hypercorn.STREAM_ID, data=body))
        if ends:
            await stream.handle(hypercorn.EndBody(stream_id=hypercorn.STREAM_ID))

    async def _begin(self, request: h11.Request) -> bool:
        """Start the app on a request; False: it was refused."""
        self._method = request.method
        if reason := reason_to_refuse(request):
            await self.refuse(400, reason)
            return False
        self.stream = RequestStream(
            self.app, self.config, self.context, self.task_group, self.ssl, self.client, self.server, self.stream_send, hypercorn.STREAM_ID
        )
        self.stream.writer = self.writer
        await self.stream.handle(
            hypercorn.Request(
                stream_id=hypercorn.STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=origin_form(request.target),
                state=self.connection_state,
            )
        )
        if self.writer.can_send_now:
            extensions: dict[str, Any] = self.stream.scope["extensions"]
            extensions[SEND_NOW] = self.stream.send_now
        self.keep_alive_requests += 1
        return True

    async def refuse(self, status: int, reason: str) -> None:
        """Answer with an error if no response has begun, and close."""
        await self._close_stream()  # first, so that the app cannot begin one while this is written
        if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._answer(status, reason)
        await self.send(hypercorn.Closed())

    async def _send_error_response(self, status_code: int) -> None:
        await self._answer(status_code, HTTPStatus(status_code).phrase)

    async def _answer(self, status: int, message: str) -> None:
        body = error_body(status, message)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        headers += self.config.response_headers("h11")
        answers_head = self._method == b"HEAD" and self.connection.our_state is h11.SEND_RESPONSE  # not IDLE: a request that is none
        data = () if answers_head else (h11.Data(data=body),)
        events = (h11.Response(status_code=status, headers=headers, reason=PHRASES[status]), *data, h11.EndOfMessage())
        await self.writer.send(b"".join(self.connection.send(event) or b"" for event in events))

    # --- the response -------------------------------------------------------------------------------------------------

    async def stream_send(self, event: hypercorn.StreamEvent) -> None:
        if isinstance(event, hypercorn.Response) and event.status_code >= 200:
            status = event.status_code
            self._head = self._encode(
                h11.Response(status_code=status, headers=self._response_headers(event), reason=PHRASES.get(status, b""))
            )
        elif isinstance(event, hypercorn.Body):
            await self._send_body(event.data)
        elif isinstance(event, hypercorn.EndBody):
            await self._send_with_head(self._encode(h11.EndOfMessage()))
        else:
            await super().stream_send(event)

    def _response_headers(self, event: hypercorn.Response) -> list[tuple[bytes, bytes]]:
        headers = [*event.headers, *self.config.response_headers("h11")]
        if self.context.terminated.is_set() or self.connection.their_state is h11.SEND_BODY:  # the rest of the body is not waited for
            headers.append((b"connection", b"close"))
        return headers

    async def _send_body(self, data: bytes) -> None:
        encoded = self._encode(h11.Data(data=data))
        if self.stream is not None:
            self.stream.frames_itself = encoded == frame(data)
        await self._send_with_head(encoded)

    async def _send_with_head(self, data: bytes) -> None:
        data, self._head = self._head + data, b""
        if data:
            await self.writer.send(data)

    def _encode(self, event: h11.Response | h11.Data | h11.EndOfMessage) -> bytes:
        try:
            return self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise  # the app's mistake: a body that is not as long as it said
            return b""  # the client's, and it has had its answer


def reason_to_refuse(request: h11.Request) -> str | None:
    """Say what h11 lets pass and a server behind a proxy must not (RFC 9112, 6.1 and 6.3), nor an app be given."""
    names = {name for name, _ in request.headers}
    if request.method != request.method.upper():  # Hypercorn would take "head" for HEAD, and h11 would not
        return "methods are written in capitals"
    if request.http_version not in (b"1.1", b"1.0"):
        return "only HTTP/1.1 and HTTP/1.0 are spoken here"
    if b"transfer-encoding" in names and b"content-length" in names:
        return "Transfer-Encoding and Content-Length exclude each other"
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        return "HTTP/1.0 has no Transfer-Encoding"
    if not origin_form(request.target):
        return "the target of the request is not a path"
    return None


def origin_form(target: bytes) -> bytes:
    """Return the path and query of a request's target, empty if it has none."""
    if target.startswith(b"/"):
        return target
    try:
        url = urlsplit(target.decode("ascii"))
    except ValueError:
        return b""
    if url.scheme not in ("http", "https") or not url.netloc:
        return b""
    return ((url.path or "/") + ("?" + url.query if url.query else "")).encode("ascii")


def error_body(status: int, message: str) -> bytes:
    """Return the error object of OpenAI's surface: whose it would have been is not known yet."""
    type_ = {408: "timeout_error", 501: "not_supported_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json.dumps({"error": {"message": message, "type": type_, "param": None, "code": status}}).encode()
