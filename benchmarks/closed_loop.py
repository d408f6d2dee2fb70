"""A closed loop of requests over raw sockets in one thread without an event loop: the cheapest client that Python has.

It looks at nothing but where an answer ends, until the pass is over; so its own CPU time hardly grows with the number of chunks.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs

END_OF_CHUNKS: Final = b"0\r\n\r\n"
N_BYTES: Final = 262_144
SILENCE_S: Final = 1800.0  # after which a server is taken for stuck: answers in one piece of a large model take minutes


@attrs.frozen(kw_only=True)
class Loop:
    """What a pass over HTTP gave: the answers as they came, in the order of the requests."""

    wall_s: float
    client_cpu_s: float
    answers: list[bytes]
    n_reads: list[int]  # in how many pieces each of them came


@attrs.define(eq=False)
class _Connection:
    sock: socket.socket
    number: int = 0
    received: bytearray = attrs.field(factory=bytearray)
    n_reads: int = 0
    n_bytes: int | None = None  # of the whole answer, where it says so

    def is_complete(self) -> bool:
        data = self.received
        if self.n_bytes is not None:
            return len(data) >= self.n_bytes
        if data.endswith(END_OF_CHUNKS):
            return True
        head_end = data.find(b"\r\n\r\n", 0, 4096)
        if head_end >= 0:
            head = bytes(data[:head_end]).lower()
            _, found, rest = head.partition(b"content-length:")
            if found:
                self.n_bytes = head_end + 4 + int(rest.split(b"\r\n", 1)[0])
                return len(data) >= self.n_bytes
        return False


def post(path: str, body: bytes) -> bytes:
    """A request as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def run(port: int, requests: Sequence[bytes], concurrency: int) -> Loop:
    """Send the requests, `concurrency` at a time, each on a connection that is kept."""
    answers, n_reads = [b""] * len(requests), [0] * len(requests)
    numbers = iter(range(len(requests)))
    connections = [_Connection(socket.create_connection(("127.0.0.1", port))) for _ in range(min(concurrency, len(requests)))]
    with selectors.DefaultSelector() as selector:
        began, cpu_began = time.perf_counter(), time.process_time()
        for connection in connections:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(connection.sock, selectors.EVENT_READ, connection)
            _next(connection, requests, numbers)
        n_open = len(connections)
        while n_open:
            ready = selector.select(SILENCE_S)
            if not ready:
                raise RuntimeError(f"the server has said nothing for {SILENCE_S:.0f} s")
            for key, _ in ready:
                if _read(key.data, answers, n_reads) and not _next(key.data, requests, numbers):
                    n_open -= 1
                    selector.unregister(key.data.sock)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    for connection in connections:
        connection.sock.close()
    return Loop(wall_s=wall_s, client_cpu_s=cpu_s, answers=answers, n_reads=n_reads)


def _next(connection: _Connection, requests: Sequence[bytes], numbers: Iterator[int]) -> bool:
    number = next(numbers, None)
    if number is None:
        return False
    connection.number, connection.received, connection.n_reads, connection.n_bytes = number, bytearray(), 0, None
    connection.sock.sendall(requests[number])
    return True


def _read(connection: _Connection, answers: list[bytes], n_reads: list[int]) -> bool:
    """Take what has come; True at the end of an answer."""
    received = connection.sock.recv(N_BYTES)
    connection.received += received
    connection.n_reads += 1
    if not received:
        raise RuntimeError(f"the server closed the connection after {bytes(connection.received[:300])!r}")
    if not connection.is_complete():
        return False
    answers[connection.number], n_reads[connection.number] = bytes(connection.received), connection.n_reads
    return True


def usage_of(answer: bytes) -> dict[str, Any]:
    """The usage that an answer tells, streamed or not. Raises: RuntimeError for anything but a 200."""
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:500].decode("utf-8", "replace"))
    if b"data: " in answer:
        *_, last = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    else:
        last = answer.partition(b"\r\n\r\n")[2]
    usage: dict[str, Any] = json.loads(last)["usage"]
    return usage
