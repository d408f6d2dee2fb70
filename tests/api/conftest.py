"""The HTTP application on a fake model, without sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import attrs
import pytest
import trio
from quart_trio import QuartTrio

from cllm.api.app import create_app
from cllm.config import Settings
from cllm.serve.engine import Engine
from cllm.serve.metrics import Metrics
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake import FakeModel

TEST_S = 20.0  # real time: steps run in threads


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


@attrs.frozen
class Api:
    """A client, and what stands behind the server."""

    app: QuartTrio
    running: RunningEngine | None

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, None, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Post JSON, or bytes as they are. Underscores of header names stand for hyphens."""
        return await self.ask("POST", path, body, **headers)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await self.app.test_client().open(path, method=method, data=data, headers=named)
        return Answer(response.status_code, response.headers, await response.get_data())

    async def chat(self, content: str = "hello", **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields})

    async def complete(self, prompt: Any = "once", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    @property
    def scheduler(self) -> Any:
        assert self.running is not None
        return self.running.scheduler

    async def idle(self) -> None:
        """Wait until nothing is under way and everything is given back."""
        assert self.running is not None
        await self.running.loop.wait_idle()
        assert self.scheduler.cells.n_held == 0
        self.scheduler.check()


Serve: TypeAlias = Callable[..., AbstractAsyncContextManager[Api]]


@asynccontextmanager
async def serving(model: FakeModel | None = None, **settings: Any) -> AsyncIterator[Api]:
    chosen = Settings(**settings)
    with trio.fail_after(TEST_S):
        async with running_engine(model or FakeModel(), chosen) as running:
            yield Api(create_app(running.engine, chosen), running)


@pytest.fixture
def serve() -> Serve:
    """Serve a fake model, with settings by name."""
    return serving


@pytest.fixture
def loading() -> Api:
    """A server whose model is still being loaded."""
    engine = Engine(metrics=Metrics(), stream_n_bytes_max=1 << 20, watchdog_s=60.0)
    engine.progress = 0.25
    return Api(create_app(engine, Settings()), None)
