"""Ports for servers that are started in a process of their own and must be told theirs."""

from __future__ import annotations

import random
import socket
from typing import Final

PORTS: Final = range(20_000, 32_000)  # below those that systems give by themselves, so that nobody gets it before the server has it
N_TRIES: Final = 100


def free_port() -> int:
    """Return a port of this machine at which nobody listens just now. Raises: OSError when none of many was free."""
    for port in random.SystemRandom().sample(PORTS, N_TRIES):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"of {N_TRIES} ports none was free")
