"""ASGI wrappers that mend, under any server, what an ASGI app can mend; `hypercorn -k trio` needs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from cllm.serve.http.http1 import error_body

# The events are dictionaries whose types each server and framework spells in its own way.
AsgiReceive = Callable[[], Awaitable[Any]]
AsgiSend = Callable[[Any], Awaitable[None]]
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

LAST_SEND_S = 30.0
_CLOSE_NORMALLY = 1000


def wrap_asgi(app: AsgiApp) -> AsgiApp:
    """Return `app` with its last send shielded from its own cancellation, and given only what it can answer.

    Quart-Trio cancels a request's tasks as soon as it sees the disconnect that ends every response, and that is while the server still
    closes the connection inside the last `send`: with `Connection: close`, HTTP/1.0 or an expired keep-alive the client then waits
    for ever. Over HTTP/2 a response's end closes nothing, and its last `send` may take as long as its client reads.
    """

    async def mended(scope: Any, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _CLOSE_NORMALLY})  # before it is accepted: servers make a 403 of it
        elif scope["type"] == "http" and not scope["path"]:  # as of `GET ?x`, of which a router takes the first letter
            await _refuse(send)
        elif scope["type"] == "http" and scope["http_version"].startswith("1"):
            await app(scope, receive, _shield_last(send))
        else:
            await app(scope, receive, send)

    return mended


async def _refuse(send: AsgiSend) -> None:
    body = error_body(400, "the target of the request is not a path")
    await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


def _shield_last(send: AsgiSend) -> AsgiSend:
    async def send_last(message: Any) -> None:
        with trio.move_on_after(LAST_SEND_S, shield=True):
            await send(message)

    # Not a coroutine function itself: the chunks of a stream, sent thousands of times a second, pay for no extra frame.
    def send_or_shield(message: Any) -> Awaitable[None]:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            return send_last(message)
        return send(message)

    return send_or_shield
