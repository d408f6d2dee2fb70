"""The load generator: raw sockets on Trio, so that it costs the machine that it measures little."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import attrs
import trio

from cllm.bench.answers import OVER, Exchange, Pass, answer_of
from cllm.bench.http import BrokenResponse, ResponseReader
from cllm.bench.target import Client, Target
from cllm.bench.workloads import Ask, Work, arrivals

REQUEST_S: Final = 1800.0  # nothing waits for ever
CONNECT_S: Final = 30.0
RACE_S: Final = 1.0  # within which it shows that a connection which was kept is closed already
N_PIECES_LATE: Final = 8  # pieces that each of the others has when the late request is sent

Stream: TypeAlias = trio.SocketStream | trio.SSLStream[trio.SocketStream]
FAULTS: Final = (OSError, trio.BrokenResourceError, trio.TooSlowError, ssl.SSLError, BrokenResponse)


@attrs.define
class Progress:
    """What a pass has done so far, for those who watch."""

    n_requests: int = 0
    n_ended: int = 0
    n_failed: int = 0
    n_pieces: int = 0  # about the tokens of streams, as they come


async def connect(target: Target, trust: ssl.SSLContext | None) -> Stream:
    """Open a connection, over TLS where there is something to `trust`. Raises: OSError · trio.TooSlowError · ssl.SSLError."""
    with trio.fail_after(CONNECT_S):
        if trust is None:
            return await trio.open_tcp_stream(target.host, target.port)
        stream = await trio.open_ssl_over_tcp_stream(target.host, target.port, https_compatible=True, ssl_context=trust)
        try:
            await stream.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)  # it refers to itself, and would be open until garbage is collected
            raise
        return stream


def _trust(connections: Connections) -> ssl.SSLContext | None:
    """Made once: it takes some 50 ms, in which no arrival would be noted."""
    return ssl.create_default_context() if connections.target.is_tls else None


@attrs.define
class Connections:
    """Connections that are open and idle; the last one used goes first."""

    target: Target
    _idle: list[Stream] = attrs.field(factory=list)
    _trusted: ssl.SSLContext | None = attrs.field(default=attrs.Factory(_trust, takes_self=True))

    async def fetch(
        self, request: bytes, on_piece: Callable[[bytes], None], on_status: Callable[[int], None] = lambda status: None
    ) -> ResponseReader:
        """Send a request; hand on the status, and the body as it comes. Raises: one of FAULTS."""
        while self._idle:  # a connection that was kept may have been closed meanwhile: then nothing came, and another is tried
            stream, reader, began = self._idle.pop(), ResponseReader(), time.perf_counter()
            try:
                await self._fetch(stream, reader, request, on_piece, on_status)
            except FAULTS:
                if reader.has_begun or time.perf_counter() - began > RACE_S:  # later it was at work on it
                    raise
            else:
                return reader
        reader = ResponseReader()
        await self._fetch(await connect(self.target, self._trusted), reader, request, on_piece, on_status)
        return reader

    async def _fetch(
        self, stream: Stream, reader: ResponseReader, request: bytes, on_piece: Callable[[bytes], None], on_status: Callable[[int], None]
    ) -> None:
        is_told = False
        try:
            await stream.send_all(request)
            while not reader.is_done:
                data = await stream.receive_some(65536)
                if data:
                    piece = reader.feed(bytes(data))
                    if reader.status and not is_told:
                        on_status(reader.status)
                        is_told = True
                    on_piece(piece)
                else:
                    reader.end()
        finally:
            if reader.keeps_connection:
                self._idle.append(stream)
            else:
                await trio.aclose_forcefully(stream)

    async def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            await trio.aclose_forcefully(self._idle.pop())


class _Loop:
    """One pass."""

    def __init__(self, client: Client, asks: Sequence[Ask], progress: Progress) -> None:
        # Written before the clock starts: a long prompt takes its time to encode.
        self._requests = [client.request(ask, number) for number, ask in enumerate(asks)]
        self._connections = Connections(client.target)
        self.exchanges = [Exchange(ask=ask, is_stream=client.is_stream) for ask in asks]
        self.progress = progress
        progress.n_requests = len(asks)
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()

    def now(self) -> float:
        """Seconds since the pass began."""
        return time.perf_counter() - self._began

    async def exchange(self, number: int, on_started: Callable[[], None] | None = None, *, due_at: float | None = None) -> None:
        """Carry out one request, which counts from when it was due. What goes wrong is kept in its record, and the others go on."""
        record = self.exchanges[number]
        n_told = 0

        def take(piece: bytes) -> None:
            nonlocal n_told
            if not piece:
                return
            record.arrivals.append((self.now(), piece))
            self.progress.n_pieces += 1
            if b"data:" not in piece:  # a comment of a server that has nothing to tell yet
                return
            n_told += 1
            if on_started is not None and n_told == N_PIECES_LATE:
                on_started()

        def note(status: int) -> None:
            record.status = status

        record.sent_at = self.now() if due_at is None else due_at  # that the machine had no time to send it counts as waiting
        record.error = OVER  # stands if this is cancelled
        try:
            with trio.fail_after(REQUEST_S):
                await self._connections.fetch(self._requests[number], take, note)
            record.error = ""
        except FAULTS as error:
            record.error = fault(error)
        finally:
            if on_started is not None and n_told < N_PIECES_LATE:  # it will never have so many
                on_started()
        record.ended_at = self.now()
        self.progress.n_ended += 1
        self.progress.n_failed += bool(record.error) or record.status != 200

    async def finish(self) -> Pass:
        """End the pass; read what came."""
        wall_s, cpu_s = self.now(), time.process_time() - self._cpu_began
        await self._connections.close()
        return Pass(wall_s=wall_s, client_cpu_s=cpu_s, answers=[answer_of(one) for one in self.exchanges])


def fault(error: BaseException) -> str:
    """What went wrong, in one line; Trio's own errors have the reason behind them."""
    if isinstance(error, trio.TooSlowError):
        return "no answer in time"
    why = str(error) or str(error.__cause__ or "")
    if isinstance(error.__cause__, BaseExceptionGroup):  # one for each address that was tried
        reasons = [one.strerror or str(one) if isinstance(one, OSError) else str(one) for one in error.__cause__.exceptions]
        why = f"{why}: {', '.join(dict.fromkeys(reasons))}"
    return " ".join(why.split()) or type(error).__name__


async def closed_loop(
    client: Client,
    work: Work,
    concurrency: int,
    progress: Progress | None = None,
    *,
    scope: trio.CancelScope | None = None,
    think_s: float = 0.0,
) -> Pass:
    """Send the chains, `concurrency` at a time; the late request when all of them are being answered.

    Before each request a client thinks for a random time, `think_s` on average. When `scope` is cancelled, what has not ended is given up.
    """
    loop = _Loop(client, work.asks, progress or Progress())
    chains = iter(_numbers(work))
    dice = random.Random(f"thoughts {client.seed}")
    all_started = trio.Event()
    n_unstarted = len(work.chains)

    def on_started() -> None:
        nonlocal n_unstarted
        n_unstarted -= 1
        if not n_unstarted:
            all_started.set()

    async def one_after_another() -> None:
        for chain in chains:
            for number in chain:
                if think_s:
                    await trio.sleep(dice.expovariate(1 / think_s))
                await loop.exchange(number, on_started if work.late else None)

    async def late() -> None:
        await all_started.wait()
        await loop.exchange(len(loop.exchanges) - 1)

    with scope or trio.CancelScope():
        async with trio.open_nursery() as nursery:
            if work.late:
                nursery.start_soon(late)
            async with trio.open_nursery() as workers:
                for _ in range(min(concurrency, len(work.chains))):
                    workers.start_soon(one_after_another)
    return await loop.finish()


def _numbers(work: Work) -> list[range]:
    """The numbers of each chain's requests."""
    ranges, n = [], 0
    for chain in work.chains:
        ranges.append(range(n, n + len(chain)))
        n += len(chain)
    return ranges


async def open_loop(
    client: Client, work: Work, rate: float, *, seed: int, progress: Progress | None = None, scope: trio.CancelScope | None = None
) -> Pass:
    """Send each request when its time has come, whether or not others have been answered: `rate` a second, a Poisson process.

    When `scope` is cancelled, what has not ended is given up.
    """
    loop = _Loop(client, work.asks, progress or Progress())
    times = arrivals(len(loop.exchanges), rate, seed)

    async def in_time(number: int) -> None:
        await trio.sleep(max(0.0, times[number] - loop.now()))
        await loop.exchange(number, due_at=times[number])

    with scope or trio.CancelScope():
        async with trio.open_nursery() as nursery:
            for number in range(len(times)):
                nursery.start_soon(in_time, number)
    return await loop.finish()
