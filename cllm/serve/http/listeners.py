"""Binds the listening sockets, and accepts from them whatever happens."""

from __future__ import annotations

import errno
import socket
from typing import Any

import trio

from cllm.errors import CannotListen
from cllm.serve.http.config import HttpConfig

NO_SUCH_FAMILY = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
LISTENER_IS_GONE = {errno.EBADF, errno.ENOTSOCK, errno.EINVAL}


async def open_listeners(config: HttpConfig) -> list[socket.socket]:
    """Listen on every address of the host, all with one port. Raises CannotListen."""
    where = f"{config.host}:{config.port}"
    host = config.host.removeprefix("[").removesuffix("]")  # an IPv6 address, as it stands in a URL
    try:
        found = await trio.socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"cannot listen on {where}: the host name cannot be resolved ({reason(error)})") from error
    listeners: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):  # a name may have one twice
            port = listeners[0].getsockname()[1] if listeners else config.port
            listeners += bind(family, (address[0], port, *address[2:]), config.backlog)
    except (OSError, OverflowError) as error:
        close_all(listeners)
        raise CannotListen(f"cannot listen on {where}: {reason(error)}") from error
    if not listeners:
        raise CannotListen(f"cannot listen on {where}: this machine has no such address")
    return listeners


def bind(family: int, address: tuple[Any, ...], backlog: int) -> list[socket.socket]:
    """Return the listener, or none where this machine lacks the address ("localhost" may name an IPv6 address it has not).

    The address is as `getaddrinfo` tells it: IPv6 has a scope behind the port, without which nobody can listen on a link's own one. All
    addresses of IPv6 are all of both kinds, or nobody could have these.
    """
    is_for_both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=is_for_both)
    except OSError as error:
        if error.errno in NO_SUCH_FAMILY:
            return []
        raise
    listener.setblocking(False)
    return [listener]


def close_all(listeners: list[socket.socket]) -> None:
    """Refuse new connections from now on."""
    for listener in listeners:
        listener.close()


def addresses_of(listeners: list[socket.socket], config: HttpConfig) -> list[str]:
    """Return the URLs where the listeners can be reached."""
    scheme = "https" if config.ssl_certfile else "http"
    return [f"{scheme}://{_host_of(*listener.getsockname())}:{listener.getsockname()[1]}" for listener in listeners]


def _host_of(host: str, _port: int, _flow: int = 0, scope: int = 0) -> str:
    if ":" not in host:
        return host
    return f"[{host}%{scope}]" if scope and "%" not in host else f"[{host}]"


def reason(error: Exception) -> str:
    """Return an error's text without its number, nor what Python adds to it."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.partition(" (while")[0] or type(error).__name__


async def accept(listener: socket.socket) -> socket.socket:
    """Return the next client's socket. Raises OSError for want of descriptors or the like; a client that hung up is passed over."""
    while True:
        try:
            return listener.accept()[0]
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener)
        except ConnectionError:
            await trio.lowlevel.checkpoint()


def is_passing(error: OSError) -> bool:
    """Say whether a failed accept may succeed later: all are but those of a listener that is none."""
    return error.errno not in LISTENER_IS_GONE
