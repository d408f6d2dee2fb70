"""One request to one upstream and its answer, bounded in time and in bytes.

Each has a connection of its own: it is closed with the exchange, which every server takes for a client that has left.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final, NoReturn
from urllib.parse import urlsplit

import attrs
import h11
import trio

from cllm_backend_upstream.failures import Broken, Failure, Garbled, Silent, Unreachable
from cllm_backend_upstream.options import Options
from cllm_backend_upstream.statuses import N_BODY_MAX, what_it_means

N_HEAD_MAX: Final = 65_536  # bytes of an answer's head
N_LIST_MAX: Final = 4 << 20  # of what is fetched whole
N_TOLD_MAX: Final = 16  # bytes that are told of each that was posted: the number of a token has some seven
N_PIECE_MAX: Final = 65_536
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@attrs.define(eq=False)
class Answered:
    """An answer whose head has come."""

    status: int
    headers: dict[str, str]  # names in small letters
    _stream: trio.abc.Stream
    _http: h11.Connection

    async def piece(self) -> bytes:
        """Wait for more of the body; nothing is its end. Raises: Failure."""
        event = await _next(self._http, self._stream)
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def body(self, n_max: int) -> bytes:
        """Wait for the body's end, or for `n_max` bytes of it and a few more. Raises: Failure."""
        body = bytearray()
        while len(body) <= n_max and (piece := await self.piece()):
            body += piece
        return bytes(body)


class Exchange:
    """How upstreams are asked."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tls: ssl.SSLContext | None = None  # made when it is needed: it takes some 20 ms
        self._headers = [("Accept", "*/*"), ("User-Agent", "cllm-backend-upstream"), ("Connection", "close")]
        if options.key:
            self._headers.append(("Authorization", f"Bearer {options.key}"))

    async def get(self, url: str) -> bytes:
        """Return what is there. Raises: Failure · RequestError."""
        with trio.move_on_after(self._options.connect_s + self._options.health_s):
            return await self._whole("GET", url, b"", N_LIST_MAX)
        raise Silent("it did not answer in time")

    async def post(self, url: str, body: bytes) -> bytes:
        """Return what is answered, which takes as long as it takes. Raises: Failure · RequestError."""
        return await self._whole("POST", url, body, N_LIST_MAX + N_TOLD_MAX * len(body))

    async def _whole(self, method: str, url: str, body: bytes, n_max: int) -> bytes:
        async with self._answered(method, url, body) as answered:
            told = await answered.body(n_max)
            if len(told) > n_max:
                raise Garbled("a body without end")
            return told

    @asynccontextmanager
    async def posted(self, url: str, body: bytes) -> AsyncIterator[Answered]:
        """Post a request whose answer is a stream of events. Raises: Failure · RequestError."""
        async with self._answered("POST", url, body) as answered:
            if not answered.headers.get("content-type", "").lower().startswith("text/event-stream"):
                raise Garbled("it does not answer with a stream")
            yield answered

    @asynccontextmanager
    async def _answered(self, method: str, url: str, body: bytes) -> AsyncIterator[Answered]:
        stream = await self._connect(url)
        try:
            answered = await self._asked(stream, method, url, body)
            if answered.status != 200:
                raise what_it_means(answered.status, answered.headers.get("retry-after"), await _complaint(answered))
            yield answered
        finally:
            await trio.aclose_forcefully(stream)

    async def _connect(self, url: str) -> trio.abc.Stream:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
        try:
            with trio.fail_after(self._options.connect_s):
                if parts.scheme == "http":
                    return await trio.open_tcp_stream(host, port)
                self._tls = self._tls or ssl.create_default_context()
                secured = await trio.open_ssl_over_tcp_stream(host, port, ssl_context=self._tls, https_compatible=True)
                try:
                    await secured.do_handshake()
                except BaseException:  # it refers to itself, so that its socket would be open until garbage is looked for
                    await trio.aclose_forcefully(secured)
                    raise
                return secured
        except trio.TooSlowError as error:
            raise Unreachable("no connection in time") from error
        except trio.BrokenResourceError as error:
            raise Unreachable(_told(error.__cause__ or error)) from error
        except OSError as error:
            raise Unreachable(_told(error)) from error

    async def _asked(self, stream: trio.abc.Stream, method: str, url: str, body: bytes) -> Answered:
        """Send a request and wait for the answer's head. Raises: Failure."""
        parts = urlsplit(url)
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=N_HEAD_MAX)
        headers = [("Host", parts.netloc), *self._headers, ("Content-Length", str(len(body)))]
        if body:
            headers.append(("Content-Type", "application/json"))
        data = http.send(h11.Request(method=method, target=parts.path, headers=headers)) or b""
        data += (http.send(h11.Data(data=body)) or b"") if body else b""
        data += http.send(h11.EndOfMessage()) or b""
        with suppress(trio.BrokenResourceError):  # it may have answered before it closed the connection
            await stream.send_all(data)
        head = await _next(http, stream)
        while isinstance(head, h11.InformationalResponse):
            head = await _next(http, stream)
        if not isinstance(head, h11.Response):
            raise Broken("it hung up")
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        return Answered(head.status_code, named, stream, http)


async def _next(http: h11.Connection, stream: trio.abc.Stream) -> object:
    """Wait for what comes next. Raises: Broken · Garbled."""
    try:
        while (event := http.next_event()) is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some(N_PIECE_MAX)))
    except h11.RemoteProtocolError as error:
        _complain(http, error)
    except trio.BrokenResourceError as error:
        raise Broken("the connection broke") from error
    return event


def _complain(http: h11.Connection, error: h11.RemoteProtocolError) -> NoReturn:
    if http.trailing_data[1]:  # the connection's end is what was wrong
        raise Broken("the connection was cut") from error
    raise Garbled(_told(error)) from error


async def _complaint(answered: Answered) -> bytes:
    """What is said with a status that is no success, as far as it comes."""
    try:
        return (await answered.body(N_BODY_MAX))[:N_BODY_MAX]
    except Failure:
        return b""


def _told(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
