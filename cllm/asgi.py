"""The ASGI application for a server that somebody else starts: `hypercorn -k trio "cllm.asgi:create_app()"`.

The model and the settings come from `CLLM_*` variables and a TOML file (`CLLM_CONFIG`); the listening address is the server's own business.
The application's lifespan owns the engine. Where Hypercorn is not started by `cllm serve`, its write deadline and its containment of
broken connections are Hypercorn's own. Hypercorn's command ends when the application's process does, but with a code of its own.
"""

from __future__ import annotations

import sys
from typing import Final

import structlog
import trio
from hypercorn.typing import ASGIFramework

from cllm.api.app import create_app as create_api
from cllm.config import Settings, strange_variables, variable
from cllm.descriptors import allow_descriptors
from cllm.errors import CllmError, LoadAborted, SettingsError
from cllm.serve.housekeeping import Housekeeper
from cllm.serve.http.asgi import wrap_asgi
from cllm.serve.lifecycle import KEEP_S
from cllm.serve.logs import configure_logging
from cllm.serve.progress import make_progress
from cllm.serve.server import EXIT_DIED, EXIT_NOT_STARTED, EXIT_USAGE, FLUSH_S, exit_now
from cllm.sources import load_settings

log = structlog.get_logger("cllm.asgi")

# Settings of what listens, which is not ours here; how long answers may take at its end is its own, too: it tells the app afterwards.
_SERVERS_OWN: Final = ("host", "port", "ssl_certfile", "ssl_keyfile", "header_timeout_s", "write_timeout_s", "keep_alive_s", "grace_s")


def create_app(settings: Settings | None = None) -> ASGIFramework:
    """Return the application. A mistake in the settings found in the environment ends the process with one line and code 2."""
    chosen = _settings_of_the_environment() if settings is None else settings
    configure_logging(chosen)
    allow_descriptors()
    if settings is None:
        for line in strange_variables():
            log.warning(line)
    if unused := [variable(name) for name in _SERVERS_OWN if getattr(chosen, name) != getattr(Settings(), name)]:
        log.warning("setting.unused", names=", ".join(unused), why="connections are those of the server that was started")
    keeper = Housekeeper(chosen, make_progress)
    app = create_api(keeper.house, keeper.settings)
    app.config["BACKGROUND_TASK_SHUTDOWN_TIMEOUT"] = chosen.grace_s + KEEP_S + FLUSH_S  # five seconds, unasked, for all that ends it
    ended = trio.Event()

    @app.before_serving
    async def start() -> None:
        app.nursery.start_soon(_run, keeper, ended)

    @app.after_serving
    async def stop() -> None:
        await keeper.finish(chosen.grace_s)
        await ended.wait()

    return wrap_asgi(app)


def _settings_of_the_environment() -> Settings:
    try:
        return load_settings()
    except SettingsError as error:
        print(f"cllm: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None


async def _run(keeper: Housekeeper, ended: trio.Event) -> None:
    """Run the engine. Its end leaves no server behind that answers and cannot work: the process exits with a code."""
    try:
        await keeper.run()
    except LoadAborted:
        pass
    except Exception as error:
        log.critical("engine.died" if keeper.ready.is_set() else "load.failed", why=f"{error}")
        await trio.sleep(FLUSH_S)  # the streams have ended; let them be carried out
        keeper.stop_progress()
        exit_now(EXIT_NOT_STARTED if isinstance(error, CllmError) and not keeper.ready.is_set() else EXIT_DIED)
    finally:
        ended.set()
