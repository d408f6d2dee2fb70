"""Stops llama.cpp in the middle of a step."""

from __future__ import annotations

import ctypes
from typing import Any


class AbortFlag:
    """A byte that llama.cpp looks at after every node of its graph, without entering Python.

    The callback is C's ``strlen`` on a string of one character or none: 0, which is false, as long as the first byte is 0. A
    callback in Python would wait for the interpreter's lock hundreds of times a step.
    """

    def __init__(self, lib: Any) -> None:
        self._flag = ctypes.create_string_buffer(2)
        self._libc = ctypes.CDLL(None)  # the process itself: libc is in it
        self.callback = ctypes.cast(self._libc.strlen, lib.ggml_abort_callback)
        self.address = ctypes.addressof(self._flag)

    def set(self) -> None:
        self._flag[0] = b"\1"

    def clear(self) -> None:
        self._flag[0] = b"\0"
