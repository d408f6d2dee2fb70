"""One HTTP exchange under Quart-Trio: what it opened is closed however it ends, and streams are written without detours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, cast

import structlog
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Request, Response
from quart.typing import ResponseTypes
from quart.utils import encode_headers
from quart.wrappers.response import DataBody
from quart_trio.asgi import TrioASGIHTTPConnection

from cllm.api.context import CLEANUP_KEY, KEY_NAME, Context
from cllm.api.sse import SseBody
from cllm.serve.http.http1 import SEND_NOW
from cllm.serve.http.requests import REQUEST_ID

log = structlog.get_logger("cllm.api")

METHODS_WITH_BODY: Final = ("POST", "PUT", "PATCH")
N_LOOKS: Final = 4  # in the time of silence after which a stream gives a sign of life: it comes a quarter of that early, and never late


class Connection(TrioASGIHTTPConnection):
    """Quart-Trio's, with a place for clean-up and with fewer messages for a response.

    A response's own generator is not the place for it: one that was never begun, because the client left first, never ends either.
    """

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Carry out the exchange."""
        context: Context = self.app.extensions["cllm"]
        self._is_answered = False
        with ExitStack() as stack, context.metrics.in_progress.track_inprogress():
            cast(dict[str, Any], self.scope)[CLEANUP_KEY] = stack
            try:
                await super().__call__(receive, send)
            finally:
                if not self._is_answered:
                    scope = cast(dict[str, Any], self.scope)
                    request_id, key = scope.get(REQUEST_ID), scope.get(KEY_NAME) or None
                    log.debug("left", method=scope["method"], path=scope["path"], request_id=request_id, key=key)

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        """Take in what comes. A body whose method gives it no meaning is not kept: nobody reads it, or counts what it takes."""
        keeps = request.method in METHODS_WITH_BODY
        await super().handle_messages(nursery, request, receive if keeps else partial(_without_body, receive))

    async def _send_response(self, send: ASGISendCallable, response: ResponseTypes) -> None:
        self._is_answered = True
        await send({"type": "http.response.start", "status": response.status_code, "headers": encode_headers(response.headers)})
        assert isinstance(response, Response), "handlers give Quart's responses"
        context: Context = self.app.extensions["cllm"]
        send_now = cast(dict[str, Any], self.scope.get("extensions") or {}).get(SEND_NOW)
        writer = _Writer(send, send_now, context.settings.sse_ping_s)
        try:
            if isinstance(response.response, SseBody):
                response.response.request_id = response.headers.get("x-request-id")
                await writer.stream(response.response)
            elif isinstance(response.response, DataBody):
                # All of it is there: who reads it slowly keeps neither his model from being unloaded nor the room of his own body.
                cast(ExitStack, cast(dict[str, Any], self.scope)[CLEANUP_KEY]).close()
                await writer.write(response.response.data, more=False)
            else:
                await writer.iterate(response)
        finally:
            context.metrics.bytes_out.inc(writer.n_bytes)
            log.debug(
                "answered",
                method=self.scope["method"],
                path=self.scope["path"],
                status=response.status_code,
                n_bytes=writer.n_bytes,
                request_id=response.headers.get("x-request-id"),
                key=cast(dict[str, Any], self.scope).get(KEY_NAME) or None,
            )


async def _without_body(receive: ASGIReceiveCallable) -> Any:
    message = await receive()
    return {**message, "body": b""} if message["type"] == "http.request" else message


class _Writer:
    """The body's bytes to the server, and a sign of life now and then when a stream has nothing to say."""

    def __init__(self, send: ASGISendCallable, send_now: Callable[[bytes], bool] | None, ping_s: float) -> None:
        self.n_bytes = 0
        self._send = send
        self._send_now = send_now  # where the server has it: the chunk's way without a task of its own
        self._ping_s = ping_s
        self._n_writes = 0
        self._writing = False
        self._pinging: trio.Event | None = None

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self._writing = True
        if self._pinging is not None:
            await self._pinging.wait()
        self._n_writes += 1
        self.n_bytes += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing = False

    async def iterate(self, response: Response) -> None:
        async with response.response as body:
            async for data in body:
                await self.write(data.encode() if isinstance(data, str) else data)
        await self.write(b"", more=False)

    async def stream(self, body: SseBody) -> None:
        # A timeout around each wait for a token would cost 5 us or more of each; a task that looks in now and then costs nothing.
        async with trio.open_nursery() as nursery:
            if self._ping_s > 0 and body.wire.ping is not None:
                nursery.start_soon(self._keep_alive, body.wire.ping)
            if self._send_now is not None:
                body.divert(partial(self._write_now, self._send_now))
            async for chunk in body:
                await self.write(chunk)
            nursery.cancel_scope.cancel()
        await self.write(b"", more=False)

    def _write_now(self, send_now: Callable[[bytes], bool], data: bytes) -> bool:
        if not send_now(data):
            return False
        self._n_writes += 1
        self.n_bytes += len(data)
        return True

    async def _keep_alive(self, ping: Callable[[], bytes]) -> None:
        n_writes, n_still = self._n_writes, -1
        while True:
            await trio.sleep(self._ping_s / N_LOOKS)
            if n_writes != self._n_writes or self._writing:
                n_writes, n_still = self._n_writes, 0  # it may have spoken just after the last look
                continue
            n_still += 1
            if n_still == N_LOOKS - 1:
                await self._send_ping(ping)
                n_still = -1

    async def _send_ping(self, ping: Callable[[], bytes]) -> None:
        self._pinging = trio.Event()
        try:
            sign = ping()
            await self._send({"type": "http.response.body", "body": sign, "more_body": True})
            self.n_bytes += len(sign)
        finally:
            self._pinging.set()
            self._pinging = None
