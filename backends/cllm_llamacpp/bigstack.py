"""One thread with a large stack, for native code that recurses as deep as its input is long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

_T = TypeVar("_T")

_start_lock: Final = threading.Lock()
_STACK_SIZES: Final = tuple(n << 20 for n in (1024, 512, 256, 64, 16))
"""Tried in this order. Memory is only reserved, and taken page by page as the stack grows."""


class BigStackThread:
    """Runs callables one after another on a thread of its own; the caller waits for the result."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.stack_bytes = 0  # what was to be had
        self._thread = self._start()

    def call(self, function: Callable[[], _T]) -> _T:
        future: Future[_T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future.result()

    def stop(self) -> None:
        """End the thread after the jobs that wait; nothing may be called after it."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _start(self) -> threading.Thread:
        for n_bytes in _STACK_SIZES:
            # A daemon, so that a forgotten `stop` cannot hold up the interpreter's end.
            thread = threading.Thread(target=self._run, name="llama.cpp tokeniser", daemon=True)
            if _start_with_stack(thread, n_bytes):
                self.stack_bytes = n_bytes
                return thread
        raise MemoryError("no thread with a large stack could be started")


def _start_with_stack(thread: threading.Thread, n_bytes: int) -> bool:
    """Start `thread` with a stack of `n_bytes`. The size is set process-wide, so it is put back at once, under a lock."""
    with _start_lock:
        try:
            before = threading.stack_size(n_bytes)
        except ValueError:  # not a size that this system can give
            return False
        try:
            thread.start()
        except RuntimeError:  # no address space for it
            return False
        finally:
            threading.stack_size(before)
    return True
