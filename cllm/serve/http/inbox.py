"""What one request's app receives: the body, joined as it came, then the disconnect."""

from __future__ import annotations

from typing import Any

import trio

N_UNREAD_BYTES_MAX = 256 * 1024


class Inbox:
    """Bounded in bytes, and a disconnect never waits behind a body that the app does not read."""

    def __init__(self) -> None:
        self._body = bytearray()
        self._complete = False
        self._end_told = False
        self._disconnected = False
        self._changed = trio.lowlevel.ParkingLot()

    async def put(self, message: Any) -> None:
        """Take an ASGI event from the server; wait while the app leaves too much of the body unread."""
        if message["type"] == "http.disconnect":
            self._disconnected = True
        else:
            self._body += message["body"]
            self._complete = not message["more_body"]
        self._changed.unpark_all()
        while len(self._body) > N_UNREAD_BYTES_MAX and not self._disconnected:
            await self._changed.park()

    async def receive(self) -> dict[str, Any]:
        """The app's `receive`."""
        while not self._has_news():
            await self._changed.park()
        if self._disconnected:
            await trio.lowlevel.checkpoint()  # an app that loops on this must not hold the event loop
            return {"type": "http.disconnect"}
        body = bytes(self._body)
        self._body.clear()
        self._end_told = self._complete
        self._changed.unpark_all()
        return {"type": "http.request", "body": body, "more_body": not self._complete}

    def _has_news(self) -> bool:
        return self._disconnected or bool(self._body) or (self._complete and not self._end_told)
