"""Reads HTTP/1.1 responses from whatever pieces they come in; knows no socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

N_HEAD_MAX: Final = 65_536


class BrokenResponse(Exception):
    """The server ended, or went on with, a response against the rules."""


class ResponseReader:
    """One response. Feed it what arrives; what it gives back is the body, without any framing."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in small letters; of a repeated one the last
        self.is_done = False
        self._buffer = bytearray()
        self._n_left = 0  # bytes of the body, or of the current chunk, that are still to come
        self._read = self._read_head

    @property
    def has_begun(self) -> bool:
        """Whether anything came at all."""
        return bool(self.status or self._buffer)

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection may be used again."""
        return self.is_done and self._framing != "end" and self.headers.get("connection", "").lower() != "close" and not self._buffer

    def feed(self, data: bytes) -> bytes:
        """Take what arrived; return what of the body is in it. Raises: BrokenResponse."""
        self._buffer += data
        return b"".join(self._pieces())

    def end(self) -> None:
        """The server closed the connection. Raises: BrokenResponse, where more should have come."""
        if self.status and self._framing == "end":
            self.is_done = True
        if not self.is_done:
            raise BrokenResponse("the server closed the connection in the middle of an answer")

    # Each of the readers takes what it can from the buffer and returns a piece of the body, or None when it needs more bytes.

    def _pieces(self) -> Iterator[bytes]:
        while not self.is_done and (piece := self._read()) is not None:
            yield piece

    def _read_head(self) -> bytes | None:
        head, blank, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not blank:
            if len(head) > N_HEAD_MAX:
                raise BrokenResponse("the response has no end of its headers")
            return None
        self._buffer = bytearray(rest)
        status = _status(head)
        if status >= 200:  # others are interim: the real one follows
            self.status = status
            self.headers = _headers(head)
            self._choose_framing()
        return b""

    def _choose_framing(self) -> None:
        if self.status in (204, 304):
            self._framing, self.is_done = "none", True
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._framing, self._read = "chunked", self._read_chunk_size
        elif "content-length" in self.headers:
            self._framing, self._read = "length", self._read_rest
            self._n_left = _number(self.headers["content-length"], 10)
            self.is_done = self._n_left == 0
        else:
            self._framing, self._read = "end", self._read_all

    _framing = "none"

    def _read_all(self) -> bytes | None:
        return self._take(len(self._buffer)) or None

    def _read_rest(self) -> bytes | None:
        piece = self._take(self._n_left)
        self._n_left -= len(piece)
        self.is_done = self._n_left == 0
        return piece or None

    def _read_chunk_size(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        self._n_left = _number(line.partition(b";")[0].decode("latin-1"), 16)
        self._read = self._read_chunk if self._n_left else self._read_trailer
        return b""

    def _read_chunk(self) -> bytes | None:
        piece = self._take(self._n_left)
        self._n_left -= len(piece)
        if self._n_left == 0:
            self._read = self._read_chunk_end
        return piece or None

    def _read_chunk_end(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        if line:
            raise BrokenResponse("a chunk is longer than it says")
        self._read = self._read_chunk_size
        return b""

    def _read_trailer(self) -> bytes | None:
        line = self._take_line()
        if line is None:
            return None
        self.is_done = line == b""
        return b""

    def _take(self, n: int) -> bytes:
        piece = bytes(self._buffer[:n])
        del self._buffer[:n]
        return piece

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return None
        line = self._take(end)
        self._take(2)
        return line


def _status(head: bytes) -> int:
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
        raise BrokenResponse("this is not HTTP")
    return int(words[1])


def _headers(head: bytes) -> dict[str, str]:
    lines = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _number(text: str, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError as error:
        raise BrokenResponse(f"not a length: {text[:20]!r}") from error
    if number < 0:
        raise BrokenResponse("a length below zero")
    return number
