"""Standard output and error as a server needs them: what they do not take is lost, and ends nothing."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast
from weakref import WeakKeyDictionary

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by their numbers
_N_CHARS = 1000  # with a line's end no more than 4,096 bytes: a pipe that is not full has room for them
# Of all who write to a stream: lines of two would run into each other, and one could fill the pipe that another has just found room in. One
# for each stream: while a bar is shown, standard error is rich's, which has locks of its own and writes to what is below.
_WRITING: WeakKeyDictionary[TextIO, threading.RLock] = WeakKeyDictionary()
CANNOT_WRITE = (OSError, ValueError)  # the disk is full, or nobody reads any more; it is closed


def prepare() -> None:
    """Make the standard streams fit for use, before anything else is opened.

    One that is closed (`2>&-`) leads nowhere from now on: else the next file or socket would have its number, and what llama.cpp prints
    would go there. What the encoding of standard output lacks is escaped when it is printed, instead of ending the command.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Lossy:
    """A stream of text that loses what cannot be written just now, and tries again with what comes next.

    A reader that stands still (a stopped log collector, Ctrl-S) would have the whole server wait for it otherwise.
    """

    def __init__(self, stream: TextIO, notice: Callable[[int], str]) -> None:
        self._stream = stream
        self._writing = _WRITING.setdefault(stream, threading.RLock())
        self._notice = notice  # the line that tells how many were lost
        self._n_lost = 0  # writes, since the last one that was taken
        self._is_cut = False  # the last one that was taken, which has no line end

    def write(self, text: str) -> int:
        with self._writing, contextlib.suppress(*CANNOT_WRITE):
            if self._n_lost and _takes(self._stream):
                n_lost, self._n_lost = self._n_lost, 0
                ending, self._is_cut = "\n" * self._is_cut, False
                self._stream.write(f"{ending}{self._notice(n_lost)}\n")
            for start in range(0, len(text), _N_CHARS):
                if not _takes(self._stream):
                    self._n_lost += 1
                    self._is_cut |= start > 0
                    break
                self._stream.write(text[start : start + _N_CHARS])
                if len(text) > _N_CHARS:
                    self._stream.flush()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*CANNOT_WRITE):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _takes(stream: TextIO) -> bool:
    """Whether some text can be written without waiting for a reader; where nobody can tell, it is believed."""
    try:
        number = stream.fileno()
    except CANNOT_WRITE:  # it is no file
        return True
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(0))


def _told_plainly(n_lost: int) -> str:
    return f"[{n_lost} writes were lost: nobody read them]"


def lossy_stderr(notice: Callable[[int], str] = _told_plainly) -> TextIO:
    """Standard error as it is now; writing to it raises nothing. After writes that nobody took comes what `notice` says of so many."""
    return cast(TextIO, _Lossy(sys.stderr, notice))


def complain(error: BaseException) -> None:
    """Tell the operator in one line why nothing is served."""
    print(f"cllm: {error}", file=lossy_stderr(), flush=True)


def tell(text: str) -> None:
    """Print, for whom it may interest: a server needs no standard output. Characters that it has not are escaped."""
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there may be none at all
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except CANNOT_WRITE:  # nobody reads any more (`| head -1`), say; Python would try again, and complain, at its end
        let_go_of(sys.stdout)


def give_up_stderr() -> None:
    """At the end: Python would try again with what standard error has not taken, and end with a code of its own, or never."""
    try:
        if not _takes(sys.stderr):
            raise BlockingIOError
        sys.stderr.flush()
    except CANNOT_WRITE:
        let_go_of(sys.stderr)


def let_go_of(stream: TextIO) -> None:
    """Let it lead nowhere: Python complains of what it cannot flush at its end."""
    with contextlib.suppress(*CANNOT_WRITE):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
