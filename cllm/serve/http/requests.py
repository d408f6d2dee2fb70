"""Starts the app on each request of a connection, and contains what it raises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import trio

from cllm.serve.http.asgi import LAST_SEND_S, AsgiApp, AsgiSend
from cllm.serve.http.inbox import Inbox

log = structlog.get_logger(__name__)

REQUEST_ID: Final = "cllm.request_id"  # in the ASGI scope, where the app has put it: what it calls the request in its answer and in the log


class Requests:
    """What Hypercorn calls a task group: it wants to start an app, and to put events to it."""

    def __init__(self, nursery: trio.Nursery, *, debug: bool) -> None:
        self._nursery = nursery
        self._debug = debug

    async def spawn_app(self, app: AsgiApp, config: Any, scope: Any, send: AsgiSend) -> Callable[[Any], Awaitable[None]]:
        inbox = Inbox()
        self._nursery.start_soon(self._call, app, scope, inbox, send)
        return inbox.put

    def spawn(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._nursery.start_soon(function, *args)

    async def _call(self, app: AsgiApp, scope: Any, inbox: Inbox, send: AsgiSend) -> None:
        try:
            await app(scope, inbox.receive, send)
        except* Exception as group:
            log_contained("a request's app failed", group, debug=self._debug, path=scope["path"], request_id=scope.get(REQUEST_ID))
        finally:
            with trio.move_on_after(LAST_SEND_S, shield=True):
                await send(None)  # Hypercorn's word for "the app has returned"


def log_contained(what: str, group: BaseExceptionGroup[Any], *, debug: bool, **context: Any) -> None:
    """Log in one line what one request or connection raised; it ends nothing else."""
    log.error(what, error="; ".join(repr(error) for error in leaves(group)), exc_info=group if debug else None, **context)


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions inside nested groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
