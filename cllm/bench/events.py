"""Reads server-sent events from whatever pieces they come in (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# A lone \r at the end of what has come may be half of \r\n: it waits for the next byte.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?=[^\n])")


class EventReader:
    """Feed it bytes; it gives the data of each event that is complete. Comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Give the data of the events that `piece` completes."""
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
