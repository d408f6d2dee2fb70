"""How `cllm serve` ends its HTTP, and what it says on the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import structlog
import structlog.testing
import trio
import trio.testing

from cllm.backend import Batch
from cllm.config import Settings, warnings
from cllm.errors import ModelDied
from cllm.serve import server as server_module
from cllm.serve.engine import EnginePhase
from cllm.serve.http import HttpConfig
from cllm.serve.progress import BarProgress, make_progress
from cllm.testing.fake import FakeBackend, FakeModel
from tests.serve.conftest import make_spec, read_all
from tests.serve.http.conftest import LONG_S

BODY = b"x" * 8_000_000  # more than any kernel keeps for a client that does not read


class Backend(FakeBackend):
    """Loads one model."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def load(self, spec, on_progress):
        return self._model


class App:
    """Answers with more than a client takes at once."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.may_go_on = trio.Event()
        self.may_go_on.set()

    async def __call__(self, scope, receive, send):
        assert scope["type"] == "http"
        headers = [(b"content-length", str(len(BODY)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.begun.set()
        await self.may_go_on.wait()
        await send({"type": "http.response.body", "body": BODY, "more_body": False})


@pytest.fixture
def served(monkeypatch):
    """A server in the tests' own process, which it must not end."""
    app = App()
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Backend(FakeModel())))
    monkeypatch.setattr(server_module, "create_app", lambda engine, settings: app)
    monkeypatch.setattr(server_module.Server, "_exit_in", lambda self, seconds: None)
    monkeypatch.setattr(server_module, "FLUSH_S", 0.0)
    server = server_module.Server(Settings("fake", port=0, grace_s=LONG_S, write_timeout_s=LONG_S))
    return server, app


async def run(server: server_module.Server, codes: list[int]) -> None:
    codes.append(await server.run())


async def ask(server: server_module.Server, app: App) -> trio.SocketStream:
    """A client that has asked, and reads when it likes."""
    await server._keeper.ready.wait()
    await server._listening.wait()
    client = await trio.open_tcp_stream("127.0.0.1", int(server._url.rpartition(":")[2]))
    await client.send_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    await app.begun.wait()
    return client


class Noted(Exception):
    """The end of a server that was to be looked at only."""


async def test_what_is_set_of_connections_is_what_they_have(served, monkeypatch, tmp_path):
    server, _ = served
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.touch()
    key.touch()
    configs = []

    async def note(app, *, config, **others):
        configs.append(config)
        raise Noted

    monkeypatch.setattr(server_module, "serve_http", note)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    set_to = {"host": "127.0.0.7", "port": 8123, "header_timeout_s": 12.0, "keep_alive_s": 14.0, "write_timeout_s": 11.0, **files}
    server._settings = attrs.evolve(server._settings, body_timeout_s=13.0, **set_to)
    with pytest.RaisesGroup(Noted, flatten_subgroups=True):
        await server._run_http()
    grace_s = float("inf")  # the server's own clock ends them
    assert configs == [HttpConfig(body_timeout_s=13.0 + server_module.BODY_GRACE_S, grace_s=grace_s, **set_to)]


def test_what_is_risky_in_the_settings_is_told_at_the_start(monkeypatch):
    settings = Settings("fake", host="0.0.0.0")
    monkeypatch.setattr(server_module, "configure_logging", lambda settings: None)
    monkeypatch.setattr(server_module, "give_up_stderr", lambda: None)
    monkeypatch.setattr(server_module.trio, "run", lambda main: 0)
    with structlog.testing.capture_logs() as logged:
        assert server_module.run(settings) == 0
    assert [entry["event"] for entry in logged] == warnings(settings) != []


async def test_after_a_drain_a_client_that_reads_slowly_gets_all_of_its_answer(served, until):
    server, app = served
    codes = []

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, server, codes)
            client = await ask(server, app)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: server._keeper.house.first.engine.phase is EnginePhase.STOPPED)
            await trio.testing.wait_all_tasks_blocked(0.01)
            received = b"".join([data async for data in client])
            await client.aclose()
    assert received.endswith(b"\r\n\r\n" + BODY)
    assert codes == [0]


async def test_whoever_is_told_late_that_the_grace_is_over_has_a_moment_to_pass_it_on(served, monkeypatch, until):
    server, app = served
    server._settings = attrs.evolve(server._settings, grace_s=0.0)
    app.may_go_on = trio.Event()
    finish = server._keeper.finish
    codes, answers = [], []

    async def finish_late(grace_s: float) -> None:
        await finish(grace_s)
        await until(lambda: server._keeper.house.first.engine.phase is EnginePhase.STOPPED)
        await trio.testing.wait_all_tasks_blocked(0.01)  # by any clock that began with the signal, all is over
        monkeypatch.setattr(server_module, "FLUSH_S", LONG_S)
        app.may_go_on.set()

    monkeypatch.setattr(server._keeper, "finish", finish_late)

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, server, codes)
            client = await ask(server, app)
            os.kill(os.getpid(), signal.SIGTERM)
            answers = [data async for data in client]
            await client.aclose()
    assert b"".join(answers).endswith(b"\r\n\r\n" + BODY)
    assert codes == [0]


async def test_when_the_engine_dies_a_client_that_never_reads_does_not_hold_the_end_up(served, monkeypatch, until):
    server, app = served
    die = trio.Event()
    codes = []

    async def run_until_death() -> None:
        server._keeper.ready.set()
        await die.wait()
        raise ModelDied("the device is gone")

    async def announce() -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(server._keeper, "run", run_until_death)
    monkeypatch.setattr(server, "_announce", announce)
    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, server, codes)
            async with await ask(server, app):
                die.set()
                await until(lambda: codes)
    assert codes == [server_module.EXIT_DIED]


class Slow(FakeModel):
    """Takes as long to close as a test likes."""

    def __init__(self, before_step: Callable[[Batch], None] | None = None) -> None:
        super().__init__(before_step=before_step)
        self.closing, self.may_end = threading.Event(), threading.Event()
        self.is_closed = False

    def close(self) -> None:
        self.closing.set()
        assert self.may_end.wait(LONG_S)
        self.is_closed = True


@pytest.mark.parametrize("is_hurried", [False, True])
async def test_a_model_has_time_to_close_when_the_server_ends_unless_it_is_told_so_twice(served, monkeypatch, until, is_hurried):
    """What it has started may have to end before; nothing of it would know of a process that is over."""
    server, _ = served
    model, codes, ends = Slow(), [], []
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Backend(model)))
    monkeypatch.setattr(server_module.Server, "_exit_in", lambda self, seconds: ends.append(model.is_closed))

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, server, codes)
            await server._keeper.ready.wait()
            await server._listening.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await until(model.closing.is_set)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert not ends, "the process would be gone before that"
                if is_hurried:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await until(lambda: ends)
            finally:
                model.may_end.set()
    assert (codes, ends) == (([128 + signal.SIGTERM], [False]) if is_hurried else ([0], [True]))


async def test_a_model_that_died_and_does_not_close_does_not_keep_the_process(served, monkeypatch, until):
    server, _ = served

    def die(batch: Batch) -> None:
        raise ModelDied("the device is gone")

    model, codes, ends = Slow(die), [], []
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Backend(model)))
    monkeypatch.setattr(server_module.Server, "_exit_in", lambda self, seconds: ends.append((self._code, model.is_closed)))

    with trio.fail_after(LONG_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, server, codes)
            await server._keeper.ready.wait()
            await read_all(server._keeper.house.first.engine.open([make_spec()]))
            try:
                await until(model.closing.is_set)
                assert ends == [(server_module.EXIT_DIED, False)]
            finally:
                model.may_end.set()
    assert codes == [server_module.EXIT_DIED]


# --- the terminal -------------------------------------------------------------------------------------------------------


def test_a_standard_output_that_nobody_reads_ends_nothing():
    program = "from cllm.serve.stdio import tell; import sys; tell('x' * 100_000); tell('again'); sys.stderr.write('alive')"
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, timeout=300, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"alive")


CLOSED = """
import os, sys
from cllm.serve.stdio import prepare
prepare()
print("lost")
print("lost\\udcff", file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
assert os.open(os.devnull, os.O_RDONLY) > 2, "what prints to standard error would print there"
assert os.system("echo lost >&2 && echo lost && cat") == 0, "what it starts has none"
"""


def test_what_is_closed_of_the_standard_streams_leads_nowhere():
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED], timeout=300, check=False)
    assert done.returncode == 0


def test_what_an_encoding_lacks_is_escaped_and_ends_nothing():
    program = "from cllm.serve.stdio import prepare; prepare(); print('h\u00f6r \u2192')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=300, check=True)
    assert done.stdout == b"h\xf6r \\u2192\n"


class Terminal(io.StringIO):
    """A standard error that is a terminal, and what one would see on it."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        lines, row = [""], 0
        for piece in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", self.getvalue()):
            if piece == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif piece == "\x1b[1A":
                row -= 1
            elif piece == "\x1b[2K":
                lines[row] = ""
            elif not piece.startswith("\x1b") and piece != "\r":
                lines[row] += piece
        return [line for line in lines if line.strip()]


@contextlib.contextmanager
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Not a fixture: pytest sets standard error anew between those and the test."""
    terminal = Terminal()
    before = structlog.get_config()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        structlog.configure(
            processors=[structlog.processors.KeyValueRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),  # another test may have left a higher one
            logger_factory=structlog.PrintLoggerFactory(terminal),
        )
        yield terminal
    structlog.configure(**before)


def test_a_line_that_is_logged_while_the_bar_runs_stays_on_the_terminal_and_the_bar_does_not(monkeypatch):
    log: Any = structlog.get_logger("test")
    with on_a_terminal(monkeypatch) as terminal:
        progress = make_progress("a model")
        assert isinstance(progress, BarProgress)
        progress.update(0.25)
        log.info("listen", url="http://127.0.0.1:8080")
        progress.update(0.75)
        progress.stop()
        log.info("load.done")
        progress.stop()
    assert terminal.screen == ["url='http://127.0.0.1:8080' event='listen'", "event='load.done'"]
