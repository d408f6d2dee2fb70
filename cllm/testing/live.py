"""A server on a real port, on a fake model, in a thread: for tests with clients that know no Trio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import attrs
import trio

from cllm.api.app import create_app
from cllm.backend import Embedder, StepModel, StreamModel
from cllm.config import Settings
from cllm.serve.http import HttpConfig, serve_http
from cllm.serve.stepless import StreamsOnly
from cllm.testing.engine import running_engine

START_S, END_S = 120.0, 120.0  # end a test that hangs


@attrs.frozen
class _Started:
    url: str
    stop: trio.Event
    token: trio.lowlevel.TrioToken


@contextmanager
def live_server(model: StepModel | StreamModel, *, embedder: Embedder | None = None, **settings: Any) -> Iterator[str]:
    """Serve `model` over HTTP on loopback; give the server's URL. Settings by name."""
    started: SimpleQueue[_Started] = SimpleQueue()
    chosen = Settings(**settings)
    served = StreamsOnly(model, keeps_prefixes=chosen.prefix_cache) if isinstance(model, StreamModel) else model
    thread = threading.Thread(target=trio.run, args=(partial(_serve, served, embedder, chosen, started),), daemon=True)
    thread.start()
    server = started.get(timeout=START_S)
    try:
        yield server.url
    finally:
        server.token.run_sync_soon(server.stop.set)
        thread.join(END_S)
        assert not thread.is_alive(), "the server did not end"


async def _serve(model: StepModel, embedder: Embedder | None, settings: Settings, started: SimpleQueue[_Started]) -> None:
    stop = trio.Event()
    config = HttpConfig(port=0, grace_s=1.0)
    async with running_engine(model, settings, embedder=embedder) as running, trio.open_nursery() as nursery:
        app = create_app(running.engine, settings)
        (url, *_) = await nursery.start(partial(serve_http, app, config=config, shutdown=stop))
        started.put(_Started(url, stop, trio.lowlevel.current_trio_token()))
