"""Places at upstreams, and who waits for one: first come, first served, but nobody behind one that waits for another upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from cllm_backend_upstream.pool import Pool, Upstream


@attrs.define(eq=False)
class _Waiting:
    tried: Sequence[Upstream]
    settled: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)  # of its wait until one has rested
    upstream: Upstream | None = None  # at which it has a place


class Places:
    """As many at each upstream as the pool says."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: list[_Waiting] = []  # in the order in which they came

    @property
    def n_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, tried: Sequence[Upstream]) -> AsyncIterator[Upstream | None]:
        """Wait for a place at an upstream that is not of those `tried`, and hold it; None where no other is to be asked at all."""
        waiting = _Waiting(tuple(tried))
        self._waiting.append(waiting)
        try:
            self.settle()
            while not waiting.settled.is_set():
                with trio.CancelScope(deadline=self._pool.next_rested(trio.current_time(), waiting.tried)) as waiting.scope:
                    await waiting.settled.wait()
                self.settle()
            yield waiting.upstream
        finally:
            if not waiting.settled.is_set():
                self._waiting.remove(waiting)
            if waiting.upstream is not None:
                waiting.upstream.n_live -= 1
                self.settle()

    def settle(self) -> None:
        """Give the places that are free to who has waited longest. To be called whenever an upstream has changed."""
        now = trio.current_time()
        for waiting in tuple(self._waiting):
            waiting.upstream = self._pool.choose(now, waiting.tried)
            if waiting.upstream is not None:
                waiting.upstream.n_live += 1
            elif self._pool.has_full(now, waiting.tried):
                waiting.scope.deadline = self._pool.next_rested(now, waiting.tried)  # one may rest since it began to wait
                continue
            self._waiting.remove(waiting)
            waiting.settled.set()
