"""The one place that names h11's inner parts, and mends two of its patterns; when they have changed, importing it fails with one line.

Both go back over a run of blanks once for each of them where a line turns out to be wrong, with the interpreter's lock held: a head of
60 KB, which needs no key, stopped every stream for seventeen seconds. Mended they match the same, but for a carriage return within a
chunk's extension, and take time in proportion. h11 limits what it buffers, and not how many fields a trailer has: those are limited here.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import h11
from h11 import _readers as readers

N_HEADERS_MAX = 128  # fields; each costs the loop some microseconds in every layer, whatever its length, and a head is taken at once
END_OF_HEAD = re.compile(rb"\n\r?\n")

# Pattern -> what of it is replaced, and by what: blanks that were matched are not given back.
MENDED: dict[str, tuple[bytes, bytes]] = {
    "header_field_re": (rb":[ \t]*(?P<field_value>", rb":[ \t]*+(?P<field_value>"),
    "chunk_header_re": (rb"(?P<chunk_ext>;.*)?[ \t]*\r\n", rb"(?P<chunk_ext>;[^\r\n]*+)?[ \t]*+\r\n"),
}


class BoundedChunkedReader(readers.ChunkedReader):
    """A chunked body whose trailer has as many fields as a head may have."""

    def __call__(self, buf: Any) -> Any:
        """See h11. Raises: LocalProtocolError."""
        if self._reading_trailer:
            data = bytes(buf)
            if not data.startswith((b"\r\n", b"\n")) and size_of_head(data)[0] > N_HEADERS_MAX:
                raise h11.LocalProtocolError(f"more than {N_HEADERS_MAX} fields in a trailer", error_status_hint=431)
        return super().__call__(buf)


def size_of_head(data: bytes) -> tuple[int, int]:
    """Return lines and bytes of the head that `data` begins with, as far as it has come; a line may end without a carriage return."""
    end = END_OF_HEAD.search(data)
    return (data.count(b"\n", 0, end.start() + 1), end.end()) if end else (data.count(b"\n"), len(data))


def mend() -> None:
    """Put the mended parts in the place of h11's. Raises: ImportError unless these are what this was written for."""
    bodies: Any = readers.READERS.get(h11.SEND_BODY)
    patterns = {name: getattr(readers, name, None) for name in MENDED}
    is_known = all(pattern is not None and pattern.pattern.count(MENDED[name][0]) == 1 for name, pattern in patterns.items())
    if not is_known or not isinstance(bodies, dict) or bodies.get("chunked") is not readers.ChunkedReader:
        raise ImportError(f"h11 {version('h11')} is not the one cLLM was written for: install 'h11>=0.16,<0.17'")
    for name, pattern in patterns.items():
        assert pattern is not None
        setattr(readers, name, re.compile(pattern.pattern.replace(*MENDED[name])))
    bodies["chunked"] = BoundedChunkedReader


mend()
