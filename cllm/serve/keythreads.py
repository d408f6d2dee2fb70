"""Work in threads, few at a time, at which keys take turns: it comes before the queue, whose fairness begins with tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

T = TypeVar("T")


class KeyThreads:
    """At most `n_max` threads. Of those who wait each key's first goes, one key after the other. For the Trio thread alone."""

    def __init__(self, n_max: int) -> None:
        self._n_free = n_max
        self._waiting: dict[str, deque[trio.Event]] = {}  # by key, in the order of their turns; none is empty
        self._limiter = trio.CapacityLimiter(n_max)  # which counts a thread until it ends, also one that nobody waits for any more

    async def run(self, work: Callable[[], T], key: str = "") -> T:
        """Return what `work` gives, or raise what it does. Who is cancelled leaves it to its end, which frees its thread."""
        async with self._turn(key):
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        if self._n_free:
            self._n_free -= 1
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, key: str) -> None:
        turn = trio.Event()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it came as this one left
                self._pass_on()
            else:
                self._waiting[key].remove(turn)
                if not self._waiting[key]:
                    del self._waiting[key]
            raise

    def _pass_on(self) -> None:
        key = next(iter(self._waiting), None)
        if key is None:
            self._n_free += 1
            return
        line = self._waiting.pop(key)
        line.popleft().set()
        if line:
            self._waiting[key] = line  # behind all others
