"""What a client can ask for: each route with its words, the type of its body and the statuses that it may be answered with."""

from __future__ import annotations

import re
from typing import Any

import attrs

from cllm.api.errors import ErrorShape, openai_shape

JSON, SSE, NDJSON, TEXT, HTML = "application/json", "text/event-stream", "application/x-ndjson", "text/plain", "text/html"

OF_ALL = (500,)
OF_GUARDED = (401,)
OF_PAGES = (403,)  # where something is asked for or changed
OF_BODIES = (400, 408, 413)
OF_ENGINE = (404, 429, 501, 503, 504)  # where a model is asked for, and has to be there and ready
_CONVERTER = re.compile(r"<(?:\w+:)?(\w+)>")


@attrs.frozen(kw_only=True)
class Operation:
    """A route as clients are told of it. Every route has one: a test compares them."""

    method: str
    path: str  # as the route has it
    about: str  # a few words
    body: Any = None  # the type that the request's body is decoded as, None where there is none
    gives: tuple[str, ...] = (JSON,)  # media types of an answer
    generates: bool = False  # needs the engine
    public: bool = False  # wants no key
    also: tuple[int, ...] = ()  # further statuses that it may be answered with
    own_bodies: tuple[int, ...] = ()  # those of them whose body is no error of the surface's
    status: int = 200  # of an answer
    errors: ErrorShape = openai_shape
    alias_of: str | None = None  # the path by which the same is better known

    @property
    def public_path(self) -> str:
        """The path as OpenAPI writes it."""
        return _CONVERTER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """The names of what varies in the path."""
        return _CONVERTER.findall(self.path)

    @property
    def error_statuses(self) -> list[int]:
        """Every status of an error that it may be answered with."""
        of_body = OF_BODIES if self.body is not None else ()
        of_engine = OF_ENGINE if self.generates else ()
        of_pages = () if self.method == "GET" else OF_PAGES
        return sorted({*OF_ALL, *(() if self.public else OF_GUARDED), *of_body, *of_engine, *of_pages, *self.also})
