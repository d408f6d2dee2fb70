"""TLS, whose certificate is renewed on disk while the server runs: one lasts for weeks, and a server for longer."""

from __future__ import annotations

import os
import ssl
from typing import Final, TypeAlias

import structlog
import trio

from cllm.errors import CannotListen
from cllm.serve.http.config import HttpConfig
from cllm.serve.http.listeners import reason

log = structlog.get_logger(__name__)

LOOK_EVERY_S: Final = 60.0

_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]  # of each file, what changes when it is written or replaced


class Certificate:
    """The context for new connections, made anew when a file of it has changed. Raises CannotListen when there is none to begin with."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._seen = self._told = self._stamp()
        self.context: ssl.SSLContext | None = make_tls(config)  # None: clear text

    async def keep_renewed(self) -> None:
        """Look for files that have changed, for ever. What cannot be used is told once, and tried again; the old one stays."""
        while self.context is not None:
            await trio.sleep(LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        try:
            stamp = await trio.to_thread.run_sync(self._stamp, abandon_on_cancel=True)
        except Exception as error:  # no thread left: the next look may have one
            log.warning("tls.not_looked_at", why=str(error))
            return
        if stamp == self._seen:
            return
        try:
            self.context = await trio.to_thread.run_sync(make_tls, self._config, abandon_on_cancel=True)
        except Exception as error:  # the other file may not be there yet, or who may read it is settled in a moment
            if stamp != self._told:
                log.warning("tls.not_renewed", why=str(error))
            self._told = stamp
        else:
            self._seen = self._told = stamp
            log.info("tls.renewed", file=self._config.ssl_certfile)

    def _stamp(self) -> _Stamp:
        """What the files are now; empty while one is not there."""
        try:
            stats = [os.stat(path) for path in (self._config.ssl_certfile, self._config.ssl_keyfile) if path is not None]
        except OSError:
            return ()
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def make_tls(config: HttpConfig) -> ssl.SSLContext | None:
    """Return the TLS context that the configuration names, None without one. Raises CannotListen."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        raise CannotListen(
            f"cannot use {config.ssl_certfile} and {config.ssl_keyfile or 'its own key'} for TLS: {reason(error)}"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")  # OpenSSL would ask the terminal
