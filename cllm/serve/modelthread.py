"""The one thread in which models compute, all of a process's models one call after the other.

Any thread would do for correctness, and Trio hands out any. But llama.cpp's OpenMP runtime keeps a team of threads for each thread that
ever computed, and once the teams together have more threads than the machine has cores, they sleep at every barrier instead of spinning:
a step of 8 rows took 67-75 ms instead of 54-57 when a second thread had computed before (0.6B shape, 2 cores). Two models that compute
at once on few cores are slower still. So all of it happens here. A thread of our own also costs less for each call than a new hop.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import attrs
import outcome
import trio

from cllm.errors import call_foreign

T = TypeVar("T")

N_TRIES_THREAD, PAUSE_THREAD_S = 60, 1.0  # to start a thread, where the system has none left just now
PATIENCE_S = 5.0  # with a model in another process whose turn it is: longer than most steps


class NoThread(RuntimeError):
    """None could be started."""


@attrs.define(eq=False)
class Call(Generic[T]):
    """What the thread was asked for, and what comes of it. Made by `ModelThread.begin`."""

    _work: Callable[[], T] | None  # until it is done
    context: contextvars.Context  # by which a log line says of which model it is
    _on_end: Callable[[], None]
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)
    _caller: trio.lowlevel.Task | None = None  # who waits for it
    _result: outcome.Value[T] | outcome.Error | None = None
    is_over: bool = False  # whether it was done, as far as Trio's thread knows

    def do(self) -> None:
        """In the thread."""
        work, self._work = self._work, None
        assert work is not None
        self._token.run_sync_soon(self._end, self.context.run(outcome.capture, call_foreign, work))

    def _end(self, result: outcome.Value[T] | outcome.Error) -> None:
        self.is_over = True
        self._on_end()
        if self._caller is None:
            self._result = result
        else:
            trio.lowlevel.reschedule(self._caller, result)

    async def result(self) -> T:
        """Wait for what it returns or raises, as `call_foreign` does; that cannot be cancelled. For one caller, once."""
        if self._result is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return self._result.unwrap()
        self._caller = trio.lowlevel.current_task()
        return cast(T, await trio.lowlevel.wait_task_rescheduled(_cannot_be_aborted))


@attrs.frozen(eq=False)
class _Turn:
    do: Callable[[], object]


class ModelThread:
    """Takes calls from tasks, in the order they come. Made by `open_model_thread`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call[Any] | _Turn | None] = SimpleQueue()
        self._ended = trio.Event()
        self._n_calls = 0  # not done yet
        self.n_taken = 0  # calls since the start
        self.n_sharing = 0  # loops that compute here

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work` in the thread; return or raise what it does, as `call_foreign`.

        A call cannot be cancelled: a cancelled caller gets its result, and learns of it at its next checkpoint.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self.begin(partial(work, *arguments), contextvars.copy_context()).result()

    def begin(self, work: Callable[[], T], context: contextvars.Context) -> Call[T]:
        """Let `work` be called in `context` when its turn comes."""
        call = Call(work, context, self._ended_one)
        self._n_calls += 1
        self.n_taken += 1
        self._calls.put(call)
        return call

    def _ended_one(self) -> None:
        self._n_calls -= 1

    async def run_last(self, work: Callable[..., T]) -> T:
        """Call what ends a model whose loop has ended: apart while others compute here, since it may wait for a process or a thread."""
        if self.n_sharing:
            try:
                return await run_apart(work)
            except NoThread:
                pass
        return await self.run(work)

    @contextmanager
    def turn(self, hold: Callable[[], object]) -> Iterator[None]:
        """Have `hold` called when its turn comes, for what is done elsewhere meanwhile. It may not raise."""
        self.n_taken += 1
        self._n_calls += 1
        self._calls.put(_Turn(hold))
        try:
            yield
        finally:
            self._n_calls -= 1

    @contextmanager
    def shared(self) -> Iterator[None]:
        """While a loop runs that computes here."""
        self.n_sharing += 1
        try:
            yield
        finally:
            self.n_sharing -= 1

    @property
    def n_under_way(self) -> int:
        """Calls that are not over."""
        return self._n_calls

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
            del call  # whose model may end before the next one comes

    async def _end(self) -> None:
        self._calls.put(None)
        with trio.CancelScope(shield=True):
            await self._ended.wait()


class Waiting:
    """The thread's turns for a model that computes in a process of its own.

    Turns come in the same order, so that models do not compete for the cores. But a thread beside this one waits for the answer: a process
    that hangs, and is only ended after `--watchdog-s`, takes `patience_s` of the others' time for each of its turns.
    """

    def __init__(self, thread: ModelThread, patience_s: float = PATIENCE_S) -> None:
        self._thread = thread
        self._patience_s = patience_s
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """See `ModelThread.run`."""
        if self._thread.n_sharing <= 1:  # there is nobody whom it could hold up
            return await self._thread.run(work, *arguments)
        begun, done, entered = threading.Event(), threading.Event(), threading.Event()
        with self._thread.turn(partial(self._hold, begun, done)):
            try:
                return await trio.to_thread.run_sync(_in_turn, entered, begun, partial(work, *arguments), limiter=self._limiter)
            except RuntimeError:
                if entered.is_set():
                    raise
            finally:
                done.set()
        return await self._thread.run(work, *arguments)  # the system has no thread left for it, which is no fault of the model's

    def _hold(self, begun: threading.Event, done: threading.Event) -> None:
        begun.set()
        done.wait(self._patience_s)


def _in_turn(entered: threading.Event, begun: threading.Event, work: Callable[[], T]) -> T:
    entered.set()
    begun.wait()
    return call_foreign(work)


async def run_apart(work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` in a thread that ends with it, and with it the team that OpenMP made for it; for loading beside models that compute.

    As with `ModelThread.run`, a call cannot be cancelled, and what it raises is an Exception. Where the system has no thread left, it waits
    for one. Raises: NoThread when none has come for long.
    """
    results: list[outcome.Value[T] | outcome.Error] = []
    await trio.lowlevel.checkpoint_if_cancelled()
    with trio.CancelScope(shield=True):
        context = contextvars.copy_context()
        thread = await _started(lambda: results.append(context.run(outcome.capture, call_foreign, work, *arguments)))
        try:
            await trio.to_thread.run_sync(thread.join)
        except RuntimeError:  # the system has none left for this
            while thread.is_alive():  # noqa: ASYNC110 - nobody else could tell
                await trio.sleep(PAUSE_THREAD_S)
    return results[0].unwrap()


async def _started(work: Callable[[], object]) -> threading.Thread:
    n_left = N_TRIES_THREAD
    while True:
        thread = threading.Thread(target=work, name="load")
        try:
            thread.start()
        except RuntimeError:
            n_left -= 1
            if not n_left:
                raise NoThread("the system has no thread left") from None
        else:
            return thread
        await trio.sleep(PAUSE_THREAD_S)


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
