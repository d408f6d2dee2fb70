"""The one thread in which models compute, all of a process's models one call after the other.

Any thread would do for correctness, and Trio hands out any. But llama.cpp's OpenMP runtime keeps a team of threads for each thread that
ever computed, and once the teams together have more threads than the machine has cores, they sleep at every barrier instead of spinning:
a step of 8 rows took 67-75 ms instead of 54-57 when a second thread had computed before (0.6B shape, 2 cores). Two models that compute
at once on few cores are slower still. So all of it happens here. A thread of our own also costs less for each call than a new hop.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import attrs
import outcome
import trio

T = TypeVar("T")


@attrs.frozen(eq=False)
class _Call:
    work: Callable[[], Any]
    caller: trio.lowlevel.Task
    token: trio.lowlevel.TrioToken

    def do(self) -> None:
        result = outcome.capture(self.work)
        self.token.run_sync_soon(trio.lowlevel.reschedule, self.caller, result)


class ModelThread:
    """Takes calls from tasks, in the order they come. Made by `open_model_thread`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._ended = trio.Event()
        self._n_calls = 0  # not done yet
        self.n_taken = 0  # calls since the start

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work` in the thread; return or raise what it does.

        A call cannot be cancelled: a cancelled caller gets its result, and learns of it at its next checkpoint.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        call = _Call(partial(work, *arguments), trio.lowlevel.current_task(), trio.lowlevel.current_trio_token())
        self._n_calls += 1
        self.n_taken += 1
        self._calls.put(call)
        try:
            return cast(T, await trio.lowlevel.wait_task_rescheduled(_cannot_be_aborted))
        finally:
            self._n_calls -= 1

    @property
    def is_busy(self) -> bool:
        """Whether a new call would have to wait."""
        return self._n_calls > 0

    async def _serve(self) -> None:
        await trio.to_thread.run_sync(self._work, limiter=trio.CapacityLimiter(1))
        self._ended.set()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.do()

    async def _end(self) -> None:
        self._calls.put(None)
        with trio.CancelScope(shield=True):
            await self._ended.wait()


async def run_apart(work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` in a thread that ends with it, and with it the team that OpenMP made for it; for loading beside models that compute.

    As with `ModelThread.run`, a call cannot be cancelled.
    """
    results: list[outcome.Value[T] | outcome.Error] = []
    thread = threading.Thread(target=lambda: results.append(outcome.capture(work, *arguments)), name="load")
    await trio.lowlevel.checkpoint_if_cancelled()
    thread.start()
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(thread.join)
    return results[0].unwrap()


def _cannot_be_aborted(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


@asynccontextmanager
async def open_model_thread() -> AsyncIterator[ModelThread]:
    """Start the thread; on leaving, it ends after the calls that it has."""
    thread = ModelThread()
    trio.lowlevel.spawn_system_task(thread._serve)  # a nursery here would wrap what its body raises in a group
    try:
        yield thread
    finally:
        await thread._end()  # noqa: ASYNC102 - it shields itself, and waits for native calls, which cannot be cancelled
