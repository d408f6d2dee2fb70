"""Takes llama.cpp's log lines to Python's logging, and keeps of them what nothing else tells: errors, and a context's memory."""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import attrs

logger = logging.getLogger("cllm.llamacpp")

_CONT: Final = 5  # GGML_LOG_LEVEL_CONT: goes on where the last text ended
_WARN: Final = 3
_ERROR: Final = 4

_N_ERRORS_KEPT: Final = 8
_N_CACHES_KEPT: Final = 64

_CACHE: Final = re.compile(r"size = +([0-9.]+) MiB \( *([0-9]+) cells")  # llama_kv_cache, llama_memory_recurrent

_EXPECTED: Final = (
    "possible training context overflow",  # the cells of a pool are those of many contexts
    "n_ctx is not divisible by n_seq_max",  # the model says how many cells there are
    "cannot use buft",  # of each tensor that an adapter changes and the processor has in a layout of its own
)


@attrs.frozen
class Cache:
    """A part of a context's memory: of the layers with plain attention, of those with a window, or of recurrent states."""

    n_bytes: int
    n_cells: int  # of each slot's part, if it has one of its own; of recurrent states as many as slots


class _Heard(threading.local):
    """What one thread's calls have said: while one model computes, another may be loaded, and what each says is its own."""

    def __init__(self) -> None:
        self.is_loading = False
        self.errors: deque[str] = deque(maxlen=_N_ERRORS_KEPT)
        self.caches: deque[Cache] = deque(maxlen=_N_CACHES_KEPT)
        self.text = ""
        self.level = 0


class LogSink:
    """Collects texts into lines; llama.cpp calls it from any thread, mostly from that which has called llama.cpp."""

    def __init__(self) -> None:
        self._heard = _Heard()
        self._callback: Any = None

    def install(self, lib: Any) -> None:
        """Become llama.cpp's log callback. It must stay referenced: llama.cpp keeps a bare pointer to it."""
        self._callback = lib.llama_log_callback(self._on_text)
        lib.llama_log_set(self._callback, None)
        # After the interpreter's end a call into Python is a crash; llama.cpp's own sink takes what still comes.
        atexit.register(lib.llama_log_set, lib.llama_log_callback(), None)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """For the time of a load: the errors kept are its own."""
        self.forget()
        self._heard.is_loading = True
        try:
            yield
        finally:
            self._heard.is_loading = False

    def forget(self) -> None:
        self._heard.errors.clear()
        self._heard.caches.clear()

    def last_errors(self) -> tuple[str, ...]:
        return tuple(self._heard.errors)

    def last_caches(self) -> tuple[Cache, ...]:
        return tuple(self._heard.caches)

    def _on_text(self, level: int, text: bytes, _user_data: object) -> None:
        with contextlib.suppress(Exception):  # nothing may be raised into C
            self.feed(level, text.decode("utf-8", "replace"))

    def feed(self, level: int, text: str) -> None:
        """Take a piece of text; whole lines go on, the rest waits for its end."""
        if level != _CONT:
            self._flush()
            self._heard.level = level
        self._heard.text += text
        if self._heard.text.endswith("\n"):
            self._flush()

    def _flush(self) -> None:
        lines, self._heard.text = self._heard.text, ""
        for line in lines.splitlines():
            if line.strip(". "):  # a load's progress is a line of dots
                self._emit(line.strip())

    def _emit(self, line: str) -> None:
        if self._heard.level == _ERROR:
            self._heard.errors.append(line)
        elif cache := _CACHE.search(line):
            self._heard.caches.append(Cache(n_bytes=round(float(cache[1]) * 2**20), n_cells=int(cache[2])))
        logger.log(self._importance(line), "%s", line)

    def _importance(self, line: str) -> int:
        """Warnings count while a model loads. Afterwards the routine of a busy server is among them: no room, an abort."""
        if self._heard.level not in (_WARN, _ERROR):
            return logging.DEBUG
        routine = not self._heard.is_loading or any(text in line for text in _EXPECTED)
        return logging.INFO if routine else logging.WARNING
