"""The one place that names Hypercorn's inner parts; when they have changed, importing it fails with one line.

Hypercorn documents its configuration and its `serve`, not the classes below. They are pinned in pyproject.toml, and what we
override or call is compared with what it was when this was written, because a changed one would fail in the middle of a response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

__all__ = [
    "STREAM_ID",
    "Body",
    "Closed",
    "Config",
    "ConnectionState",
    "EndBody",
    "Event",
    "H11Protocol",
    "HTTPStream",
    "RawData",
    "Request",
    "Response",
    "StreamClosed",
    "StreamEvent",
    "Updated",
    "WorkerContext",
    "check_shape",
]

# Callable -> its parameters, in order.
PARAMETERS: dict[Callable[..., Any], str] = {
    H11Protocol.__init__: "self app config context task_group connection_state ssl client server send",
    H11Protocol.handle: "self event",
    H11Protocol.stream_send: "self event",
    H11Protocol._handle_events: "self",
    H11Protocol._send_h11_event: "self event",
    H11Protocol._send_error_response: "self status_code",
    H11Protocol._maybe_recycle: "self",
    H11Protocol._close_stream: "self",
    HTTPStream.__init__: "self app config context task_group ssl client server send stream_id",
    HTTPStream.handle: "self event",
    HTTPStream.app_send: "self message",
    RawData: "data address",
    Updated: "idle",
    Body: "stream_id data",
    EndBody: "stream_id",
    Request: "stream_id headers http_version method raw_path state",
    Response: "stream_id headers status_code",
    WorkerContext: "max_requests",
    Config.response_headers: "self protocol",
}

# Callable -> attributes that its body reads or sets, and that we rely on.
ATTRIBUTES: dict[Callable[..., Any], str] = {
    H11Protocol.__init__: "app client config connection context keep_alive_requests send server ssl stream task_group connection_state",
    H11Protocol._maybe_recycle: "terminated our_state their_state start_next_cycle",
    H11Protocol._close_stream: "stream handle",
    HTTPStream.__init__: "closed",
    HTTPStream.handle: "scope spawn_app app_put app_send",
}


def check_shape(parameters: dict[Callable[..., Any], str], attributes: dict[Callable[..., Any], str]) -> None:
    """Raise ImportError, in one line, unless everything we touch looks as it did."""
    changed = [_name(what) for what, names in parameters.items() if list(inspect.signature(what).parameters) != names.split()]
    changed += [_name(what) for what, names in attributes.items() if not set(names.split()) <= set(what.__code__.co_names)]
    if changed:
        raise ImportError(
            f"hypercorn {version('hypercorn')} is not the one cLLM was written for ({', '.join(changed)} changed): "
            "install 'hypercorn>=0.18,<0.19'"
        )


def _name(what: Callable[..., Any]) -> str:
    return what.__qualname__


check_shape(PARAMETERS, ATTRIBUTES)
