"""Runs the app's ASGI lifespan round the server; an app that dies in between ends the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from cllm.errors import AppFailed
from cllm.serve.http.asgi import AsgiApp

SHUTDOWN_S = 0.5  # of the second that a shutdown may take beyond its grace


class Lifespan:
    """The server's side of one lifespan."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.started = trio.Event()
        self.stopping = trio.Event()
        self.is_supported = True
        self.failure: str | None = None
        self._n_received = 0

    async def run(self, app: AsgiApp) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if self._n_received or self.started.is_set():
                raise
            self.is_supported = False  # how an app says so (ASGI, lifespan protocol)
        finally:
            self.started.set()
        if self.is_supported and not self.stopping.is_set() and self._n_received and self.failure is None:
            raise AppFailed("the app's lifespan has ended before the server")

    async def _receive(self) -> dict[str, str]:
        self._n_received += 1
        if self._n_received == 1:
            return {"type": "lifespan.startup"}
        await self.stopping.wait()
        if self._n_received > 2:
            await trio.sleep_forever()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "lifespan.startup.failed":
            self.failure = message.get("message", "")
        self.started.set()


@asynccontextmanager
async def lifespan_of(app: AsgiApp) -> AsyncIterator[dict[str, Any]]:
    """Give the state that the app has left for its requests. Raises AppFailed when it does not start."""
    lifespan = Lifespan()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifespan.run, app)
        await lifespan.started.wait()
        if lifespan.failure is not None:
            raise AppFailed(f"the app did not start: {lifespan.failure}")
        yield lifespan.state
        lifespan.stopping.set()
        nursery.cancel_scope.deadline = trio.current_time() + SHUTDOWN_S
