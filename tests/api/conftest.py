"""The HTTP application on a fake model, without sockets."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import attrs
import pytest
import structlog
import trio
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers

from cllm.api.app import create_app
from cllm.config import Settings
from cllm.errors import StepFailed
from cllm.serve.engine import Engine
from cllm.serve.http.http1 import SEND_NOW
from cllm.serve.metrics import Metrics
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake import FakeModel
from cllm.testing.fake_embedder import FakeEmbedder

TEST_S = 120.0  # real time: steps run in threads, and the machine may be busy


@attrs.frozen
class Answer:
    """A response that has arrived in full."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def lines(self) -> list[str]:
        """The `data:` of every event of a stream."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        return [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event.startswith("data: ")]

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(line) for line in self.lines if line != "[DONE]"]

    def text(self, index: int = 0) -> str:
        """One choice's text, of a stream or not, chat or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            choice = self.json["choices"][index]
            return choice["message"]["content"] if "message" in choice else choice["text"]
        choices = [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]
        return "".join([choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices])

    def finish(self, index: int = 0) -> tuple[str, Any]:
        """One choice's finish_reason and stop_reason."""
        chunks = [self.json] if self.headers["content-type"] == "application/json" else self.chunks
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        (finish,) = [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"] is not None]
        return finish


class Exchange:
    """One request under way, as an ASGI server carries it; the client takes what comes as fast as it comes."""

    def __init__(self, direct: str, pieces: list[tuple[bytes, bool]]) -> None:
        self.n_direct = 0
        self._direct = itertools.cycle(direct)
        self.status: int | None = None
        self.headers = Headers()
        self._pieces = pieces
        self._gone = trio.Event()
        self._put, self._chunks = trio.open_memory_channel[bytes](math.inf)

    async def run(self, app: QuartTrio, scope: Any) -> None:
        async with self._put:
            await app(scope, self._receive, self._send)  # type: ignore[arg-type]

    async def receive(self) -> bytes:
        """The next piece of the response's body. Raises: trio.EndOfChannel."""
        return await self._chunks.receive()

    async def rest(self) -> bytes:
        """All that is still to come."""
        return b"".join([chunk async for chunk in self._chunks])

    async def answer(self) -> Answer:
        body = await self.rest()
        assert self.status is not None
        return Answer(self.status, self.headers, body)

    def leave(self) -> None:
        """Disconnect."""
        self._gone.set()

    def send_now(self, data: bytes) -> bool:
        """See `cllm.serve.http.http1.RequestStream`."""
        if self.status is None or next(self._direct) == "n":
            return False
        self.n_direct += 1
        self._put.send_nowait(data)
        return True

    async def _receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self._pieces:
            piece, more = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": more}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            assert self.status is None, "one response"
            self.status = message["status"]
            self.headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]])
        else:
            assert self.status is not None
            await self._put.send(message["body"])
            if not message.get("more_body", False):
                await self._put.aclose()


@attrs.frozen
class Api:
    """A client, and what stands behind the server."""

    app: QuartTrio
    running: RunningEngine | None
    server: tuple[str, int] | None = None  # the address that clients came to

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, None, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Post JSON, or bytes as they are. Underscores of header names stand for hyphens."""
        return await self.ask("POST", path, body, **headers)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        async with self.asking(path, data, method=method, **headers) as exchange:
            return await exchange.answer()

    @asynccontextmanager
    async def asking(
        self, path: str, *body: bytes, method: str = "POST", complete: bool = True, direct: str = "", **headers: str
    ) -> AsyncIterator[Exchange]:
        """Begin an exchange; `body` comes in pieces, with its length in the headers when it is one piece. Leaving waits for the app.

        `direct` says, a letter for each time, whether the server takes a chunk without waiting (y) or not (n), over and over.
        """
        named = [(name.lower().replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        if len(body) == 1 and complete:
            named.append((b"content-length", str(len(body[0])).encode()))
        exchange = Exchange(direct, [*[(piece, True) for piece in body], *([(b"", False)] if complete else [])])
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": named,
            "server": self.server,
            "extensions": {SEND_NOW: exchange.send_now} if direct else {},
        }
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.run, self.app, scope)
            yield exchange

    async def chat(self, content: str = "hello", **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields})

    async def complete(self, prompt: Any = "once", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    @property
    def scheduler(self) -> Any:
        assert self.running is not None
        return self.running.scheduler

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the engine does by itself."""
        while not condition():  # noqa: ASYNC110  # there is no event for it
            await trio.sleep(0.001)

    async def idle(self) -> None:
        """Wait until nothing is under way and everything is given back."""
        assert self.running is not None
        await self.running.loop.wait_idle()
        assert self.scheduler.cells.n_held == 0
        self.scheduler.check()


Serve: TypeAlias = Callable[..., AbstractAsyncContextManager[Api]]


@asynccontextmanager
async def serving(model: FakeModel | None = None, embedder: FakeEmbedder | None = None, **settings: Any) -> AsyncIterator[Api]:
    chosen = Settings(**{"grammar_timeout_s": TEST_S, **settings})  # a busy machine may take its time for one
    with trio.fail_after(TEST_S):
        async with running_engine(model or FakeModel(), chosen, embedder=embedder) as running:
            yield Api(create_app(running.engine, chosen), running)


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """What is logged, instead of its being written."""
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.fixture
def serve() -> Serve:
    """Serve a fake model, with settings by name."""
    return serving


def failing(n_good: int) -> FakeModel:
    """Steps after so many good ones fail."""
    model = FakeModel()

    def before(batch: Any) -> None:
        if model.n_steps >= n_good:
            raise StepFailed("the fan fell off")

    model.before_step = before
    return model


@pytest.fixture
def loading() -> Api:
    """A server whose model is still being loaded."""
    engine = Engine(metrics=Metrics(), stream_n_bytes_max=1 << 20, watchdog_s=60.0)
    engine.progress = 0.25
    return Api(create_app(engine, Settings()), None)
