"""A server with OpenAI's API that does what a test tells it to do wrong, and whoever stands before it."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import attrs
import pytest

from cllm.backend import ModelSpec
from cllm.testing.live import live_server
from cllm.testing.loopback import pass_by_proxies
from cllm.testing.ports import free_port
from cllm_backend_upstream import UpstreamBackend
from cllm_backend_upstream.model import UpstreamModel

WAIT_S = 120.0  # ends a test that hangs

pass_by_proxies()


@attrs.define(eq=False)
class Asked:
    """A request that came, and the connection on which to answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: socket.socket
    has_begun: bool = False

    def send(self, data: bytes | str) -> None:
        self.connection.sendall(data.encode() if isinstance(data, str) else data)

    def answer(self, status: int, body: Any, *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(data)}", "Connection: close", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode() + data)

    def begin(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        self.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    def event(self, value: Any) -> None:
        self.send(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n")

    def token(self, text: str, finish: str | None = None) -> None:
        chat = {"delta": {"content": text}} if "chat" in self.path else {"text": text}
        self.event({"choices": [{"index": 0, "finish_reason": finish, **chat}], "usage": None})

    def finish(self, n_tokens: int, reason: str = "stop") -> None:
        self.token("", reason)
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n_tokens}})
        self.event("[DONE]")


Behaviour = Callable[[Asked], None]


def well(asked: Asked) -> None:
    """As many tokens as are asked for, or five."""
    limit = asked.body.get("max_tokens")
    asked.begin()
    for i in range(limit or 5):
        asked.token(f"w{i} ")
        time.sleep(0.001)
    asked.finish(limit or 5, "length" if limit else "stop")


class Faulty:
    """The server. `behave` answers a POST; connections have a thread each."""

    def __init__(self) -> None:
        self.behave: Behaviour = well
        self.models: Any = {"data": [{"id": "faulty-1", "owned_by": "nobody"}]}
        self.pages: dict[str, Any] = {}  # what else is there
        self.health = 200
        self.asked: list[Asked] = []  # POSTs
        self.n_checks = 0
        self.left = threading.Event()  # a client closed its connection while it was being answered
        self.port = free_port()  # none that the system gives to others while this one is away
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Go away: connections are refused from now on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)

    def start(self) -> None:
        """Come back."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        listener = self._listener
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(WAIT_S)
            asked = _read(connection)
            if asked is None:
                return
            if asked.method == "POST":
                self.asked.append(asked)
                self._behave(asked)
            elif asked.path == "/v1/models":
                asked.answer(200, self.models)
            elif asked.path == "/health":
                self.n_checks += 1
                asked.answer(self.health, {})
            else:
                asked.answer(200 if asked.path in self.pages else 404, self.pages.get(asked.path, {}))

    def _behave(self, asked: Asked) -> None:
        try:
            self.behave(asked)
        except OSError:
            self.left.set()

    def wait_left(self, asked: Asked) -> None:
        """Say nothing more until the client leaves."""
        with suppress(OSError):
            while asked.connection.recv(1024):
                pass
        self.left.set()


def _read(connection: socket.socket) -> Asked | None:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    method, path, _ = first.split()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        piece = connection.recv(65536)
        if not piece:
            return None
        body += piece
    return Asked(method, path, headers, json.loads(body) if body else None, connection)


@pytest.fixture
def make_faulty() -> Iterator[Callable[[], Faulty]]:
    """Start as many as a test wants."""
    with ExitStack() as stack:

        def make() -> Faulty:
            server = Faulty()
            stack.callback(lambda: server.stop() if server._thread.is_alive() else None)
            return server

        yield make


@pytest.fixture
def faulty(make_faulty: Callable[[], Faulty]) -> Faulty:
    """One of them."""
    return make_faulty()


@attrs.define(eq=False)
class Reply:
    """What a client got."""

    status: int
    text: str
    headers: Any

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(line.removeprefix("data: ")) for line in self.text.splitlines() if line.startswith("data: {")]

    @property
    def content(self) -> str:
        return self.json["choices"][0]["message"]["content"] or ""

    @property
    def streamed(self) -> str:
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in self.chunks if chunk.get("choices"))


@attrs.define(eq=False)
class Front:
    """A cLLM before upstreams."""

    url: str
    model: UpstreamModel

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return Reply(response.status, response.read().decode(), response.headers)
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read().decode(), error.headers)

    def chat(self, content: str = "hello", **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, **fields})


def load(*urls: str, **options: str) -> UpstreamModel:
    model = UpstreamBackend().load(ModelSpec(path=",".join(urls), options=options), lambda _share: True)
    assert isinstance(model, UpstreamModel)
    return model


@contextmanager
def _front(*urls: str, **options: str) -> Iterator[Front]:
    model = load(*urls, **options)
    try:
        with live_server(model) as url:
            yield Front(url, model)
    finally:
        model.close()


@pytest.fixture
def make_front() -> Iterator[Callable[..., Front]]:
    """Serve upstreams, by their URLs and the backend's options."""
    with ExitStack() as stack:
        yield lambda *urls, **options: stack.enter_context(_front(*urls, **options))


@pytest.fixture
def make_model() -> Iterator[Callable[..., UpstreamModel]]:
    """Load upstreams, without a server before them."""
    with ExitStack() as stack:

        def make(*urls: str, **options: str) -> UpstreamModel:
            model = load(*urls, **options)
            stack.callback(model.close)
            return model

        yield make
