"""`cllm serve`: one process, the engine outside, HTTP inside, so that streams end before the engine does."""

from __future__ import annotations

import math
import os
import signal
import threading
from functools import partial
from typing import Final, NoReturn

import structlog
import trio

import cllm
from cllm.api.app import create_app
from cllm.config import Settings, warnings
from cllm.descriptors import allow_descriptors
from cllm.errors import BackendUnavailable, LoadAborted, LoadFailed, OperatorError
from cllm.serve.garbage import spare_what_stays
from cllm.serve.house import State
from cllm.serve.housekeeping import Housekeeper
from cllm.serve.http import HttpConfig, Traffic, serve_http
from cllm.serve.http.requests import leaves
from cllm.serve.lifecycle import CLOSE_S, STEP_S
from cllm.serve.logs import configure_logging
from cllm.serve.progress import make_progress
from cllm.serve.stdio import complain, give_up_stderr, tell
from cllm.serve.worker.process import kill_running

BODY_GRACE_S: Final = 1.0  # the application's clock for a body runs out first: it answers in each surface's own shape

log = structlog.get_logger("cllm.server")

EXIT_DRAINED, EXIT_NOT_STARTED, EXIT_USAGE, EXIT_DIED = 0, 1, 2, 70
FLUSH_S = 0.5  # for connections to carry out the last events of streams that were ended


def run(settings: Settings) -> int:
    """Serve until told to stop; return the process's exit code."""
    configure_logging(settings)
    for line in warnings(settings):
        log.warning(line)
    allow_descriptors()
    try:
        return trio.run(Server(settings).run)
    finally:
        give_up_stderr()


class Server:
    """The tasks of one serving process and how they end together."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keeper = Housekeeper(settings, make_progress, self._note_death)
        self._shutdown = trio.Event()  # HTTP accepts nothing more
        self._abort = trio.Event()  # and cuts what it has
        self._http_scope = trio.CancelScope()
        self._code = EXIT_DRAINED
        self._url = ""
        self._listening = trio.Event()

    async def run(self) -> int:
        """Run all tasks; return the exit code."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._heed_signals, nursery)
            nursery.start_soon(self._run_engine)
            nursery.start_soon(self._announce)
            try:
                await self._run_http()
            except* OperatorError as group:  # the port is taken, the certificate unreadable
                self._complain(leaves(group)[0])
            self._keeper.drain()
            if self._code == EXIT_DRAINED:
                await self._keeper.wait_ended()
            self._keeper.stop_progress()  # before whatever may end the process
            self._exit_in(STEP_S)
            nursery.cancel_scope.cancel()
        self._keeper.stop_progress()
        return self._code

    async def _run_http(self) -> None:
        settings = self._settings
        config = HttpConfig(
            host=settings.host,
            port=settings.port,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            grace_s=math.inf,  # until `_abort`: a clock of its own could be over before streams have got their last events
            write_timeout_s=settings.write_timeout_s,
            header_timeout_s=settings.header_timeout_s,
            body_timeout_s=settings.body_timeout_s + BODY_GRACE_S,
            keep_alive_s=settings.keep_alive_s,
        )
        app = create_app(self._keeper.house, self._keeper.settings)
        traffic = Traffic()
        self._keeper.house.registry.register(traffic)
        with self._http_scope:
            async with trio.open_nursery() as nursery:
                serve = partial(serve_http, app, config=config, shutdown=self._shutdown, abort=self._abort, traffic=traffic)
                (self._url, *_) = await nursery.start(serve)
                log.info("listen", url=self._url)
                self._listening.set()

    async def _run_engine(self) -> None:
        try:
            await self._keeper.run()
        except LoadAborted:  # told to stop while loading
            pass
        except (BackendUnavailable, LoadFailed) as error:
            self._complain(error)
            self._end_http_soon()
        except Exception as error:
            self._note_death(error)
            self._end_http_soon()
        finally:
            self._shutdown.set()

    def _note_death(self, error: Exception) -> None:
        """Nothing is answered any more: the process ends, even if its model does not close."""
        if self._code == EXIT_DIED:
            return
        self._code = EXIT_DIED
        log.critical("engine.died", why=f"{type(error).__name__}: {error}")
        log.debug("engine.died", exc_info=error)
        self._exit_in(CLOSE_S + STEP_S)

    def _end_http_soon(self) -> None:
        """Streams have their terminal events by now: a moment to carry them out. After a drain it is what is left of the grace."""
        self._http_scope.deadline = trio.current_time() + FLUSH_S

    async def _announce(self) -> None:
        await self._keeper.ready.wait()
        await self._listening.wait()
        spare_what_stays()
        house = self._keeper.house
        first = house.first  # which may have been unloaded while others were loaded
        if self._settings.log_format == "json":  # for who reads nothing else
            log.info("serve", version=cllm.__version__, models=[tenant.name for tenant in house.tenants], url=self._url)
            return
        example = _curl(self._url, self._settings, generates=first.state is not State.LOADED or first.engine.model.generates)
        names = ", ".join([tenant.name for tenant in house.tenants])
        tell(f"cLLM {cllm.__version__} serves {names} at {self._url}\n\nTry:  {example}\n")

    async def _heed_signals(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        heeded = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it: a terminal that closes is to change nothing
            heeded.append(signal.SIGHUP)
        with trio.open_signal_receiver(*heeded) as signals:
            task_status.started()
            async for number in signals:
                if self._shutdown.is_set() and number == signal.SIGHUP:  # a terminal that closes sends it more than once: shell and kernel
                    continue
                if self._shutdown.is_set():
                    log.warning("stop.now", signal=signal.Signals(number).name)
                    self._code = 128 + number
                    self._keeper.stop_progress()
                    self._exit_in(STEP_S)
                    nursery.cancel_scope.cancel()
                    return
                log.info(
                    "drain",
                    signal=signal.Signals(number).name,
                    n_sequences=len(self._keeper.house.sequences()),
                    n_embedding_requests=self._keeper.n_embedding_requests,
                    grace_s=self._settings.grace_s,
                )
                self._shutdown.set()
                nursery.start_soon(self._finish)

    async def _finish(self) -> None:
        """Drain; what is left after the grace is told so, and HTTP has a moment after that, however late it was."""
        grace_over_at = trio.current_time() + self._settings.grace_s
        await self._keeper.finish(self._settings.grace_s)
        await trio.sleep_until(max(grace_over_at, trio.current_time()) + FLUSH_S)
        self._abort.set()

    def _complain(self, error: BaseException) -> None:
        self._code = EXIT_NOT_STARTED
        self._keeper.stop_progress()
        if self._settings.log_format == "json":
            log.critical("start.failed", why=str(error))
        else:
            complain(error)

    def _exit_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, exit_now, [self._code])
        timer.daemon = True
        timer.start()


def exit_now(code: int) -> NoReturn:
    """End the process, whatever its threads are at, and its models' own."""
    kill_running()
    os._exit(code)


def _curl(url: str, settings: Settings, *, generates: bool) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is cLLM?"}]}'
    if not generates:
        path, body = "embeddings", '{"input": "What is cLLM?"}'
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"
