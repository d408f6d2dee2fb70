"""The processes of one model, one after the other: a worker is started, asked, buried, and replaced by another one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import attrs

from cllm.backend import ModelSpec, OnProgress
from cllm.errors import BackendError, LoadFailed, ModelDied, StepFailed, in_one_line
from cllm.serve.worker import frames
from cllm.serve.worker.crossing import error_of
from cllm.serve.worker.frames import Ended, Garbled
from cllm.serve.worker.process import WorkerProcess

N_LIVES_MAX: Final = 12  # in a row without success: what dies so often will not be better the next time
N_BESIDE_TEXTS_MAX: Final = 20  # deaths in a row that are put down to texts alone: each of four is tried five times
N_GIVEN_UP_MAX: Final = 12  # requests in a row of which it may have died
LOAD_SILENCE_S: Final = 600.0  # between two words of how far a load is
HANG_S_MAX: Final = 2_147_483.0  # 24 days: poll(2) takes no more milliseconds than an int has room for
PAUSE_S: Final = 0.1  # before the second life in a row, doubled before each further one
PAUSE_MAX_S: Final = 5.0


class WorkerLife:
    """What the parent knows of a model that lives in a worker. `start` begins its first life, `revive` the others.

    Loads what `spec` says with the backend of `factory`, an entry point's value; with `embeds`, what gives vectors of it. A worker that is
    silent for `hang_s` in the middle of a call counts as dead.
    """

    def __init__(self, factory: str, spec: ModelSpec, hang_s: float, *, embeds: bool = False) -> None:
        self.hang_s = min(hang_s, HANG_S_MAX)
        self.n_lives = 0  # since something went well or a request was given up, but for those that a text may have ended
        self._n_deaths = 0  # those, too
        self._n_given_up = 0  # requests of which it died, since something went well
        self._n_beside_texts = 0  # deaths in calls while texts were tokenised, since something went well
        self.on_death: Callable[[], None] = lambda: None  # called from a thread of the worker's, whenever one has ended
        self.on_start: Callable[[WorkerProcess], None] = lambda process: None  # called before anybody else may use a new one
        self.process: WorkerProcess | None = None  # None: there is none just now
        self.is_closed = False
        self.last_end = ""  # how the last one ended, in words
        self.may_be_a_texts = False  # the last death, in a call: a text was being tokenised, of which it may have come
        self._factory = factory
        self._spec = spec
        self._embeds = embeds
        self._loaded: frames.AnyLoaded | None = None
        self._alive = threading.Condition()

    @property
    def is_dead(self) -> bool:
        """Whether the worker has ended, so that the next call would fail."""
        process = self.process
        return not self.is_closed and (process is None or process.is_lost)

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self.process is None else self.process.pid

    def went_well(self) -> None:
        """To be told by whoever asks the worker: it did what it is there for."""
        self.n_lives = self._n_deaths = self._n_given_up = self._n_beside_texts = 0

    def was_blameless(self) -> None:
        """To be told by whoever asks the worker: it died of a request, which has been given up, and may well do without that.

        When it died of so many, one after the other, that is not believed any more.
        """
        self._n_given_up += 1
        if self._n_given_up <= N_GIVEN_UP_MAX:
            self.n_lives = 0

    def of_vectors(self, spec: ModelSpec) -> WorkerLife:
        """Return another one, not begun yet, that gives vectors of the same model; of `spec` only its sizes and pooling count."""
        return WorkerLife(self._factory, attrs.evolve(spec, path=self._spec.path, loras=self._spec.loras), self.hang_s, embeds=True)

    def start(self, on_progress: OnProgress) -> frames.AnyLoaded:
        """Start the first worker; blocks. Raises: what its load raises."""
        loaded = self._start(on_progress, wants_vocabulary=True)
        self._loaded = loaded
        # The next life has what this one found, as its memory was: llama.cpp takes fewer rows where a context is shorter than they are.
        n_cells = loaded.n_tokens_max if isinstance(loaded, frames.LoadedEmbedder) else loaded.n_cells  # what its spec means by these
        if n_cells is not None:
            self._spec = attrs.evolve(self._spec, n_cells=n_cells)
        if not isinstance(loaded, frames.LoadedStreams):
            self._spec = attrs.evolve(self._spec, n_rows_max=loaded.n_rows_max)
        if loaded.info.n_gpu_layers is not None:  # or it would have fewer where others, or what died, still hold the GPU's memory
            self._spec = attrs.evolve(self._spec, n_gpu_layers=loaded.info.n_gpu_layers)
        return loaded

    def revive(self) -> None:
        """Start another worker with the same model; blocks. Raises: ModelDied when it cannot be, or was too often without success.

        A life that a text may have ended, between two calls or in one, is no reason to give up: whoever asked to tokenise that does so by
        himself.
        """
        process = self.process
        is_a_texts = self.may_be_a_texts if process is None else any(process.texts_under_way.values())
        self.may_be_a_texts = False
        why = self.bury() or self.last_end
        while not self.is_closed:
            self._n_deaths += 1
            self.n_lives += not is_a_texts
            is_a_texts = False
            if self.n_lives > N_LIVES_MAX:
                break
            if self._n_deaths > 1:
                time.sleep(min(PAUSE_S * 2 ** min(self._n_deaths - 2, N_LIVES_MAX), PAUSE_MAX_S))
            try:
                loaded = self._start(lambda share: not self.is_closed, wants_vocabulary=False)
            except BackendError as error:
                why = str(error)
                continue
            if changed := _changed(_what_stays(self._loaded), _what_stays(loaded)):
                self.bury()
                why = "its file was changed while it was served, or it tells of that anew each time"
                raise ModelDied(f"the model is another one now, by its {changed}: {why}")
            return
        raise ModelDied(f"the worker died {self.n_lives} times in a row, the last time: {why}")

    def ask(self, message: frames.ToWorker, on_progress: OnProgress = lambda share: True) -> frames.FromWorker:
        """Say something and wait for the answer. Raises: ModelDied · what the worker raised."""
        process, self.may_be_a_texts = self.process, False
        if process is None:
            raise ModelDied("the model's process has ended")
        is_sent = False
        try:
            process.channel.send(message)
            is_sent = True
            answer = _answer(process, on_progress)
        except Ended as error:
            self._n_beside_texts += any(process.texts_under_way.values())
            self.may_be_a_texts = any(process.texts_under_way.values()) and self._n_beside_texts <= N_BESIDE_TEXTS_MAX
            raise ModelDied(f"the worker died: {self.bury(error)}") from None
        except Exception as error:
            if not is_sent:
                raise
            self.bury(error)  # what is left of its answer, for want of memory, say, would be taken for the next one
            raise ModelDied(f"the worker's answer could not be read: {in_one_line(error)}") from error
        if isinstance(answer, frames.Failed):
            raise error_of(answer)
        return answer

    def data_of(self, message: frames.Call | frames.Rows) -> bytes:
        """Ask for something whose answer is bytes. Raises: as `ask` · StepFailed."""
        answer = self.ask(message)
        if not isinstance(answer, frames.Answer):
            raise StepFailed(f"the worker answered {type(answer).__name__}")
        return answer.data

    def living(self, timeout_s: float) -> WorkerProcess:
        """The worker, or the next one. Raises: ModelDied."""
        with self._alive:
            if not self._alive.wait_for(lambda: self.is_closed or not self.is_dead, timeout_s) or self.is_closed:
                raise ModelDied("the model's process has ended")
            assert self.process is not None
            return self.process

    def bury(self, after: Exception | None = None) -> str:
        """Make sure that the worker is gone; return in words how it ended. `after` as for `WorkerProcess.slay`."""
        with self._alive:
            process, self.process = self.process, None
        if process is None:
            return ""
        self.last_end = process.kill(asks_why=not self.is_closed, after=after)
        return self.last_end

    def close(self) -> None:
        """End it for good."""
        self.is_closed = True
        self.bury()
        with self._alive:
            self._alive.notify_all()

    def _start(self, on_progress: OnProgress, *, wants_vocabulary: bool) -> frames.AnyLoaded:
        try:
            process = WorkerProcess(lambda: self.on_death())
        except (OSError, RuntimeError) as error:  # the system has no process, no socket or no thread left, which may pass
            raise LoadFailed(f"{self._spec.path}: no process could be started for it: {error}") from error
        process.limit(max(LOAD_SILENCE_S, self.hang_s))
        load = frames.Load(self._factory, self._spec, logging.getLogger().getEffectiveLevel(), wants_vocabulary, self._embeds)
        try:
            loaded = _load(process, load, on_progress)
            process.limit(self.hang_s)
            try:
                self.on_start(process)
            except RuntimeError as error:
                raise LoadFailed(f"{self._spec.path}: no thread could be started for its process: {error}") from error
        except BaseException:
            process.kill()
            raise
        with self._alive:
            self.process = process
            self._alive.notify_all()
        return loaded


def _what_stays(loaded: frames.AnyLoaded | None) -> dict[str, object]:
    """What two lives of one model have in common: not what the machine is like, such as how many cores or bytes a process may have now."""
    assert loaded is not None
    left_out = {"info", "vocabulary"}
    if isinstance(loaded, frames.LoadedStreams):  # who schedules himself may round
        left_out.add("n_cells")
    facts = {name: getattr(loaded, name) for name in loaded.__struct_fields__ if name not in left_out}
    info = attrs.evolve(loaded.info, build="", cells_bytes=0, fixed_bytes=0, mapped_bytes=0)
    return {**facts, **{f"info.{name}": getattr(info, name) for name in attrs.fields_dict(type(info))}}


def _changed(before: dict[str, object], now: dict[str, object]) -> str:
    """The names of what differs; empty where nothing does."""
    return ", ".join(name for name in {**before, **now} if before.get(name) != now.get(name))


def _load(process: WorkerProcess, load: frames.Load, on_progress: OnProgress) -> frames.AnyLoaded:
    try:
        process.channel.send(load)
        answer = _answer(process, on_progress)
    except Garbled as error:  # a plugin that tells of its model what is not of the contract's types
        raise LoadFailed(f"{load.spec.path}: {error}") from error
    except UnicodeEncodeError as error:
        text = os.fsencode(error.object).decode("utf-8", "backslashreplace")
        raise LoadFailed(f"{text}: what is not UTF-8 cannot be told to a process of its own") from error
    except Ended as error:
        raise LoadFailed(f"{load.spec.path}: the worker died while it loaded this: {process.kill(after=error)}") from None
    if isinstance(answer, frames.AnyLoaded):
        return answer
    raise error_of(answer) if isinstance(answer, frames.Failed) else LoadFailed("the worker did not load anything")


def _answer(process: WorkerProcess, on_progress: OnProgress) -> frames.FromWorker:
    """Wait for the answer; what is told of its progress before it goes to `on_progress`. Raises: Ended."""
    while isinstance(message := process.channel.receive(), frames.Progress):
        process.channel.send(frames.Proceed(on_progress(message.share)))
    return message
