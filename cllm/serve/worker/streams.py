"""A model that schedules itself, in a process of its own: what is said to it and what it tells cross as they come."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import structlog

from cllm.backend import FileVocabulary, StreamEnd, StreamEvent, StreamRequest, Vocabulary
from cllm.errors import in_one_line
from cllm.serve.worker import frames
from cllm.serve.worker.crossing import WrongEvent, event_of
from cllm.serve.worker.frames import Ended
from cllm.serve.worker.life import WorkerLife
from cllm.serve.worker.process import WorkerProcess
from cllm.serve.worker.vocabulary import WorkerVocabulary

log = structlog.get_logger("cllm.serve")


class WorkerStreams:
    """See `cllm.backend.StreamModel`. After a death nothing more is told of what was under way: who hears it must start it again.

    Two threads for each life say what is asked of the worker and hear what it tells. While sequences are under way, a worker that tells
    nothing for too long is ended.
    """

    def __init__(self, life: WorkerLife, loaded: frames.LoadedStreams) -> None:
        self.life = life
        self._vocabulary = _vocabulary(loaded, life)
        self.info = loaded.info
        self.n_live_max = loaded.n_live_max
        self.n_ctx = loaded.n_ctx
        self.heeds = loaded.heeds
        self.n_logprobs_max = loaded.n_logprobs_max
        self._live: set[int] = set()
        self._silent_since = 0.0  # while sequences are under way: as if it had been in one piece
        self._silent_s = 0.0  # while none is: how long it has been before, with those that have left
        self._to_say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # messages to one life; None is its end
        self._hearing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._tell: Callable[[StreamEvent], None] = lambda _event: None

    @property
    def vocabulary(self) -> Vocabulary | FileVocabulary | None:
        """See `StreamModel.vocabulary`."""
        return self._vocabulary

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self.life.pid

    def open(self, tell: Callable[[StreamEvent], None]) -> None:
        """See `StreamModel.open`."""
        self._tell = tell
        self.life.on_start = self._listen
        if self.life.process is not None:
            self._listen(self.life.process)

    def start(self, seq_id: int, request: StreamRequest) -> None:
        """See `StreamModel.start`. What could not be begun is told as an end with an error."""
        message = frames.encoded(frames.Begin(seq_id, request))  # what cannot be written down is this request's fault alone
        with self._lock:
            if not self._live:
                self._silent_since = time.monotonic() - self._silent_s
            self._live.add(seq_id)
        self._say(message)

    def cancel(self, seq_id: int) -> None:
        """See `StreamModel.cancel`."""
        with self._lock:
            self._leave(seq_id)
        self._say(frames.encoded(frames.GiveUp(seq_id)))

    def close(self) -> None:
        """See `StreamModel.close`."""
        self._tell = lambda _event: None
        self.life.close()

    def _leave(self, seq_id: int) -> None:
        if seq_id in self._live:
            self._live.remove(seq_id)
            if not self._live:
                self._silent_s = time.monotonic() - self._silent_since

    def _say(self, message: bytes) -> None:
        """Never waits, as a socket would that is full while a worker computes."""
        self._to_say.put(message)

    def _speak(self, process: WorkerProcess, to_say: queue.SimpleQueue[bytes | None]) -> None:
        try:
            while (message := to_say.get()) is not None:
                process.channel.send_encoded(message)
        except Ended as error:  # or it stopped in the middle of a message
            process.slay(error)

    def _listen(self, process: WorkerProcess) -> None:
        if self._hearing is not None:
            self._hearing.join()  # it may be about to tell what came of the life before, of sequences that are begun again in this one
        with self._lock:
            self._live.clear()
            self._silent_s = 0.0
        to_say = self._to_say = queue.SimpleQueue()
        # Their lines say of which model they are; a context is entered by one thread at a time.
        speak, hear = (partial(contextvars.copy_context().run, work, process, to_say) for work in (self._speak, self._hear))
        threading.Thread(target=speak, name="worker requests", daemon=True).start()
        hearing = threading.Thread(target=hear, name="worker streams", daemon=True)
        try:
            hearing.start()
        except RuntimeError:  # the system has no thread left
            to_say.put(None)
            raise
        self._hearing = hearing

    def _hear(self, process: WorkerProcess, to_say: queue.SimpleQueue[bytes | None]) -> None:
        after: Exception | None = None
        try:
            while True:
                self._wait(process)
                told = process.channel.receive()
                self._take(event_of(told))
        except Ended as error:
            after = error
        except Exception as error:  # what is no event, or no memory for one: nobody would hear of the others, nor of a silence
            after = error
            log.error("worker.not_heard", why=in_one_line(error))
        finally:
            process.slay(after)
            to_say.put(None)

    def _wait(self, process: WorkerProcess) -> None:
        """Wait until something is told. Raises: Ended after too long a silence."""
        while not process.channel.wait(self._patience_s()):
            if not self._patience_s():
                raise Ended("it is silent") from TimeoutError()

    def _patience_s(self) -> float:
        with self._lock:
            silent_s = time.monotonic() - self._silent_since if self._live else 0.0
        return max(0.0, self.life.hang_s - silent_s)

    def _take(self, event: StreamEvent | WrongEvent) -> None:
        with self._lock:
            self._silent_since, self._silent_s = time.monotonic(), 0.0
            if isinstance(event, StreamEnd):
                self._leave(event.seq_id)
        if not isinstance(event, StreamEnd):
            self.life.went_well()
        self._tell(cast("StreamEvent", event))  # the loop takes one that went wrong, too


def _vocabulary(loaded: frames.LoadedStreams, life: WorkerLife) -> Vocabulary | FileVocabulary | None:
    if loaded.vocabulary is not None:
        return WorkerVocabulary(loaded.vocabulary, life.living)
    return None if loaded.vocabulary_path is None else FileVocabulary(loaded.vocabulary_path)
