"""Reads server-sent events from whatever pieces they come in, and never keeps more than a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cllm_backend_upstream.failures import Garbled

N_LINE_MAX: Final = 1 << 20  # bytes; a chunk of an answer has some hundred
N_STREAM_MAX: Final = 1 << 28


class EventLines:
    """The data of one stream's events, which have a line each in OpenAI's API."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._n_bytes = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Give the data of the events that `piece` completes. Raises: Garbled for what is no such stream."""
        self._n_bytes += len(piece)
        if self._n_bytes > N_STREAM_MAX:
            raise Garbled("a stream without end")
        self._rest += piece
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end]).rstrip(b"\r")
            del self._rest[: end + 1]
            yield from self._data(line)
        if len(self._rest) > N_LINE_MAX:
            raise Garbled("a line without end")

    def _data(self, line: bytes) -> Iterator[bytes]:
        name, colon, value = line.partition(b":")
        if name == b"data" and colon:
            if value := value.removeprefix(b" "):  # an event without data is none
                yield value
        elif line and name not in (b"", b"event", b"id", b"retry"):  # a line that begins with a colon is a comment
            raise Garbled("a line that is no event")
