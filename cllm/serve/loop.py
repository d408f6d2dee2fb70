"""What runs one model: takes sequences in, has it work on them, delivers what comes of that, and replaces what died."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial

import structlog
import trio

from cllm.backend import StepModel
from cllm.engine.events import Delta, Event, Failed
from cllm.engine.scheduler import Scheduler
from cllm.engine.sequence import SequenceSpec
from cllm.errors import ModelDied, RequestError, Unavailable
from cllm.serve.beside import beside
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread, run_apart
from cllm.serve.stepless import StreamsOnly
from cllm.serve.streams import EventStream
from cllm.serve.worker.life import WorkerLife
from cllm.serve.worker.model import WorkerModel
from cllm.serve.worker.streams import WorkerStreams

log = structlog.get_logger("cllm.loop")

LOOK_S = 0.25  # while no turn can be taken, after which it is looked again whether the time of somebody who waits is over


class Loop(ABC):
    """Runs one model for one scheduler; all methods belong to the Trio thread.

    A `StepLoop` has the model compute step after step, a `StreamLoop` has one that goes on by itself.
    """

    def __init__(self, model: StepModel, scheduler: Scheduler, metrics: Metrics, thread: ModelThread) -> None:
        self.scheduler = scheduler
        self.thread = thread
        self.on_layout: Callable[[StepModel], None] = lambda model: None  # called when its cells lie otherwise than before
        self._model = model
        self._life: WorkerLife | None = life_of(model)  # what may die and be replaced
        self._metrics = metrics
        self._streams: dict[int, EventStream] = {}
        self._owed: list[Event] = []  # to be delivered, in this order
        self._failure: Exception | None = None  # of a delivery
        self._work = trio.Event()  # set when an idle loop has something to look at
        self._idle_event = trio.Event()  # set when the last sequence ends, and replaced by who waits for the next such moment
        self._stopping = False
        self._has_ended = False
        self._progress_at = 0.0  # when the model last began something or told something
        self._timed = trio.Event()  # set while no turn can be taken, and somebody's time may be over before one can
        self._all_wait = False  # for something that may take many seconds, and is no step
        self._is_replacing = False  # a worker that died: loading the next one has a limit of its own

    # --- from the API's side ------------------------------------------------------------------------------------------

    def open(self, specs: Seq[SequenceSpec], *, n_bytes_max: int) -> EventStream:
        """Submit sequences, all or none; return the stream of their events. Raises: ContextExceeded · Unavailable after its end."""
        if self._has_ended:
            raise _stopped()
        for spec in specs:  # before any of them is queued, and counted
            self.scheduler.check_length(spec)
        now = trio.current_time()
        if not self.scheduler.n_sequences:
            self._progress_at = now
        seq_ids: list[int] = []
        try:
            for spec in specs:
                seq_ids.append(self.scheduler.submit(spec, now))
        except Exception:
            for seq_id in seq_ids:
                self.cancel(seq_id)
            raise
        stream = EventStream(seq_ids, self.cancel, n_bytes_max=n_bytes_max)
        self._streams.update(dict.fromkeys(seq_ids, stream))
        if self._is_held and self.scheduler.has_deadlines:
            self._timed.set()
        self._wake(now)
        return stream

    def cancel(self, seq_id: int) -> None:
        """Mark a sequence; an idle loop is woken to free it, and a step that nobody waits for any more is ended if that can be."""
        self.scheduler.cancel(seq_id)
        if self._is_held:
            self._sweep_waiting()
        self._wake(trio.current_time())

    def _sweep_waiting(self) -> None:
        """While no turn can be taken, which may be for many seconds, let those go who only wait: they count in the queue, and for their
        keys.
        """
        try:
            events = self._swept(trio.current_time())
        except Exception as error:  # ours, and none of a client's that leaves
            self._failure = error
            return
        if events:
            self._owed += events
            # Not at once: this may be called by a stream that is being told something, or that goes through its sequences.
            trio.lowlevel.current_trio_token().run_sync_soon(self._deliver_soon)

    def _swept(self, now: float) -> list[Event]:
        return self.scheduler.sweep_waiting(now)

    @property
    def _is_held(self) -> bool:
        """Whether no turn can be taken now."""
        return self._all_wait

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return False

    @property
    def is_replacing(self) -> bool:
        """Whether a worker died and the next one is being loaded."""
        return self._is_replacing

    def stalled_s(self, now: float) -> float:
        """Seconds without progress while there is work; 0 when there is none, or while a worker is replaced."""
        return now - self._progress_at if self.scheduler.n_sequences and not self._is_replacing else 0.0

    @abstractmethod
    async def recall(self, specs: Seq[SequenceSpec]) -> None:
        """Before sequences are submitted, bring what was kept of their beginnings into memory, if anything was."""

    # --- its life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop` and nothing is left. Raises: ModelDied, and whatever is our own mistake; every stream is ended first."""
        try:
            if self._life is not None:
                self._life.on_death = partial(self._notice_death, trio.lowlevel.current_trio_token())
            with self.thread.shared():
                await beside(self._work_on, self._watch_deadlines)
        finally:
            self._has_ended = True
            self.end_all(_stopped())

    async def _work_on(self) -> None:
        while not (self._stopping and not self.scheduler.n_sequences):
            if self._failure is not None:
                raise self._failure
            await self._turn()

    @abstractmethod
    async def _turn(self) -> None:
        """Do what is next, or wait until there is something."""

    async def _watch_deadlines(self) -> None:
        """While no turn can be taken; in each of them whose time is over is looked at in any case."""
        while True:
            await self._timed.wait()
            await trio.sleep(LOOK_S)
            if self._timed.is_set():
                self._sweep_waiting()

    @property
    @abstractmethod
    def keeps_for_later(self) -> bool:
        """Whether what is cached outlives the process."""

    @abstractmethod
    async def keep_prefixes(self) -> None:
        """After `run`, keep what is cached for the next start, if `keeps_for_later`."""

    @abstractmethod
    def forget_host(self) -> None:
        """Give back the memory of what was saved on the host: after all else, or when a worker died whose states the next may not take."""

    def stop(self) -> None:
        """Let `run` return once every sequence has ended."""
        self._stopping = True
        self._work.set()

    def end_all(self, error: RequestError) -> None:
        """End every sequence with `error`; an idle loop that has been told to stop is woken to do so."""
        self._owed += self.scheduler.end_all(error)
        self._deliver_owed()
        self._work.set()

    async def wait_idle(self) -> None:
        """Wait until no sequence is under way."""
        while self.scheduler.n_sequences:
            if self._idle_event.is_set():  # not replaced while another one waits for it
                self._idle_event = trio.Event()
            await self._idle_event.wait()

    # --- a worker that died -------------------------------------------------------------------------------------------

    async def _replace(self, life: WorkerLife, error: ModelDied, settle: Callable[[float], list[Event]]) -> None:
        """The worker died: another one goes on where it was, when `settle` has told the scheduler. Raises: ModelDied when none can."""
        died_at = trio.current_time()
        log.error("worker.died", why=str(error), n_sequences=self.scheduler.n_sequences)
        self._metrics.step_failed(error)
        events = settle(died_at)
        if any(isinstance(event, Failed) for event in events):
            life.was_blameless()
        self._owed += events
        self._deliver_owed()
        self._is_replacing = True
        try:
            with self._all_waiting():
                await run_apart(life.revive)  # other models compute meanwhile
        finally:
            self._is_replacing = False
        self._progress_at = trio.current_time()
        log.warning("worker.replaced", pid=life.pid, ended=life.last_end, seconds=round(self._progress_at - died_at, 2))

    def _notice_death(self, token: trio.lowlevel.TrioToken) -> None:
        """From a thread: an idle loop is woken to look."""
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(lambda: self._work.set())

    @contextmanager
    def _all_waiting(self) -> Iterator[None]:
        """No turn can be taken within: who leaves is let go all the same, and who waits hears when his time is over."""
        self._all_wait = True
        if self.scheduler.has_deadlines:
            self._timed.set()
        try:
            yield
        finally:
            self._all_wait = False
            self._look_no_more()

    def _look_no_more(self) -> None:
        """Nobody has to look whose time is over any more, unless turns cannot be taken for another reason, too."""
        if not self._is_held and self._timed.is_set():
            self._timed = trio.Event()

    # --- what is owed to clients --------------------------------------------------------------------------------------

    def _deliver_soon(self) -> None:
        try:
            self._deliver_owed()
        except Exception as error:  # from here it would end Trio itself; from `run` it ends the streams, then the engine
            self._failure = error

    def _deliver_owed(self) -> None:
        events, self._owed = self._owed, []
        streams = self._streams
        for event in events:
            stream = streams.get(event.seq_id)
            if stream is None:
                continue
            stream.put(event)
            if not isinstance(event, Delta):
                del streams[event.seq_id]
                self._metrics.end(event)
                if isinstance(event, Failed) and event.error.code == "answer_unread":
                    log.error("answer.unread", exc_info=event.error.__cause__)
        if not self.scheduler.n_sequences:
            self._idle_event.set()

    def _wake(self, now: float) -> None:
        self._work.set()


def life_of(model: StepModel) -> WorkerLife | None:
    """Return what may die apart from this process, if there is such a thing."""
    inner = model.stream_model if isinstance(model, StreamsOnly) else model
    return inner.life if isinstance(inner, WorkerModel | WorkerStreams) else None


def _stopped() -> Unavailable:
    return Unavailable("the engine has stopped", retry_after_s=5.0, code="stopped")
