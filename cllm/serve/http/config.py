"""What the operator can say about the HTTP server."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class HttpConfig:
    """Every wait of the HTTP layer and every size it may reach has its bound here."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None  # None: the key is in the certificate's file
    grace_s: float = 30.0  # after `shutdown`, how long the requests under way may go on
    header_timeout_s: float = 5.0  # from the connection, or the first byte of a later request, to the end of its headers
    body_timeout_s: float = 60.0  # from the headers to the end of the body; then 408
    write_timeout_s: float = 30.0  # how long a client may take no byte of what waits for it
    keep_alive_s: float = 60.0  # between two requests
    n_header_bytes_max: int = 64 * 1024
    backlog: int = 1024
    n_connections_max: int = 10_000  # or what the limit on open files leaves room for, if that is less
    debug: bool = False  # log tracebacks
