"""A worker process as its parent has it: started, spoken to, its lines logged, its end noticed."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from cllm.errors import in_one_line
from cllm.serve.worker import frames
from cllm.serve.worker.frames import Channel, Ended, Garbled
from cllm.serve.worker.start import OWN_PATH

N_LINE_MAX: Final = 1 << 16  # bytes of what it writes that are one line at most
N_LINES_KEPT: Final = 4  # of what it said last, to explain its death
END_S: Final = 5.0  # for a process that was killed to be gone
LAST_WORDS_S: Final = 1.0  # for what it said before to be read; a process that it began may keep its output open for ever
OnEnd = Callable[[], None]

_running: set[subprocess.Popen[bytes]] = set()  # which this process is not to leave behind


def kill_running() -> None:
    """Before the process ends without its farewell: a worker whose library has Python's lock would not notice, and compute on."""
    for popen in list(_running):
        popen.kill()


class Line(msgspec.Struct):
    """What a worker logs: one line of JSON on its standard error. Whatever else stands there is native code's."""

    logger: str
    level: int
    text: str


class WorkerProcess:
    """One life of a worker. `channel` is the engine's, `short` and `long` are its tokenisers for texts of either kind.

    A thread reads what the process writes, and calls `on_end` when it has ended.
    """

    def __init__(self, on_end: OnEnd) -> None:
        ours, theirs = _pairs(4)
        engine, control, short, long = ours
        numbers = [end.fileno() for end in theirs]
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "cllm.serve.worker.start", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=numbers,
                process_group=0,  # what a terminal sends to its group comes before it can be deaf to it
                # Of what ggml says as it aborts the last line is told, which is to be why, and no debugger is to hold the dying process.
                env={
                    **os.environ,
                    "GGML_NO_BACKTRACE": "1",
                    OWN_PATH: os.environ.get("PYTHONPATH", ""),
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
        except BaseException:
            _close(ours)
            raise
        finally:
            _close(theirs)
        _running.add(self._popen)
        self._ends = ours
        control.setblocking(False)
        self.channel: Channel[frames.FromWorker] = Channel(engine, frames.FromWorker)
        self.short: Channel[frames.FromTokenizer] = Channel(short, frames.FromTokenizer)
        self.long: Channel[frames.FromTokenizer] = Channel(long, frames.FromTokenizer)
        self._control: Channel[None] = Channel(control, None)
        self._last_lines: deque[str] = deque(maxlen=N_LINES_KEPT)
        self._is_heard = threading.Event()  # all that it said
        self._on_end = on_end
        self._n_aborted = 0  # the last step that was to end
        self.is_lost = False  # it has ended, or is about to
        self._silence_s = 0.0  # that is taken for the end
        self._why = ""  # it was ended here, where that is not to be taken for another's doing, as the kernel's for want of memory
        self.texts_under_way = {"short": False, "long": False}  # or were, when it ended
        try:
            listen = partial(contextvars.copy_context().run, self._listen)  # its lines say of which model they are
            threading.Thread(target=listen, name="worker log", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._popen.kill()
            self._popen.wait()
            _running.discard(self._popen)
            self._popen.stdout.close()  # type: ignore[union-attr]  # it is a pipe
            _close(ours)
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def abort(self, number: int) -> None:
        """Ask for the end of a step; never waits."""
        if number == self._n_aborted:  # one message is enough, and many would fill the socket
            return
        self._n_aborted = number
        with contextlib.suppress(Ended):  # or it has stopped reading, and has other troubles
            self._control.send(frames.Abort(number))

    def limit(self, seconds: float) -> None:
        """Take so long a silence, in the middle of a call, for the end."""
        self._silence_s = seconds
        engine, _, short, long = self._ends
        for end in (engine, short, long):
            end.settimeout(seconds)

    def slay(self, after: Exception | None = None) -> None:
        """Let it end now, because of `after` if it lives; those who wait for it learn of it.

        The loop does at once: a process that it began may keep its output open.
        """
        self._end(after)
        self._on_end()

    def _end(self, after: Exception | None) -> None:
        why = self._why_after(after)
        if why and not self._why and self._popen.poll() is None:
            self._why = f"{why}, and was ended; "
        self.is_lost = True
        self._popen.kill()

    def _why_after(self, after: Exception | None) -> str:
        if after is None:
            return ""
        if isinstance(after.__cause__, TimeoutError):
            return f"it was silent for {self._silence_s:g} s"
        if isinstance(after, Ended) and not isinstance(after, Garbled):
            return ""  # by itself, then
        return f"it could not be understood: {in_one_line(after)}"

    def kill(self, *, asks_why: bool = True, after: Exception | None = None) -> str:
        """End the process if it has not ended; close everything; return in words how it ended, with its last ones if one `asks_why`.

        `after` as for `slay`.
        """
        self._end(after)
        for end in self._ends:  # who waits at one is woken, should the process take long to go
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for channel in (self.channel, self._control, self.short, self.long):
            channel.close()
        try:
            code = self._popen.wait(END_S)
        except subprocess.TimeoutExpired:  # much memory is given back, or a driver hangs: `_listen` waits for it
            return f"{self._why}killed, and not gone after {END_S:g} s"
        if asks_why:
            self._is_heard.wait(LAST_WORDS_S)
        last = f": {self._last_lines[-1]}" if self._last_lines else ""
        return self._why + _how(code) + last

    def _listen(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            while line := lines.readline(N_LINE_MAX):  # a progress bar may draw itself anew for hours before one ends
                self._log(line)
        self._is_heard.set()
        self._popen.wait()
        _running.discard(self._popen)
        self.is_lost = True
        self._on_end()

    def _log(self, data: bytes) -> None:
        try:
            line = msgspec.json.decode(data, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            text = data.decode("utf-8", "replace").strip()
            if text:
                self._last_lines.append(text)
                logging.getLogger("cllm.worker").warning("%s", text)
            return
        logging.getLogger(line.logger).log(line.level, "%s", line.text)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _pairs(n: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Connected sockets, our ends and theirs; all or none."""
    ours: list[socket.socket] = []
    theirs: list[socket.socket] = []
    try:
        for _ in range(n):
            one, other = socket.socketpair()
            ours.append(one)
            theirs.append(other)
    except OSError:
        _close([*ours, *theirs])
        raise
    return ours, theirs


def _close(ends: list[socket.socket]) -> None:
    for end in ends:
        end.close()
