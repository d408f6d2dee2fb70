"""Runs native code that recurses as deep as its input is long, on a thread with a stack for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

_T = TypeVar("_T")

_start_lock: Final = threading.Lock()
_MIB: Final = 1 << 20
_N_BYTES_LEAST: Final = 16 * _MIB  # no less than other threads expect: the size is process-wide while a thread starts


class NoStack(Exception):
    """The system gives no thread a stack of this size."""


def call_with_stack(function: Callable[[], _T], n_bytes: int) -> _T:
    """Return ``function()``, computed on a thread with `n_bytes` of stack.

    The thread ends with the call: pages that a deep recursion has touched would otherwise stay taken. Starting it costs 0.1 ms.
    Raises: NoStack.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="cllm big stack", daemon=True)
    _start(thread, max(n_bytes, _N_BYTES_LEAST))
    thread.join()
    return future.result()


def _start(thread: threading.Thread, n_bytes: int) -> None:
    """Start `thread` with that stack; memory is only reserved, and taken page by page as the stack grows."""
    with _start_lock:
        try:
            before = threading.stack_size(-(-n_bytes // _MIB) * _MIB)
        except ValueError as error:  # not a size that this system can give
            raise NoStack from error
        try:
            thread.start()
        except RuntimeError as error:  # no address space for it
            raise NoStack from error
        finally:
            threading.stack_size(before)
