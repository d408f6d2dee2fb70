"""The loop of a model that batches by itself: tells it who begins and who has left, and hands on what it tells."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence as Seq

import attrs
import trio

from cllm.backend import StreamBeat, StreamEnd, StreamEvent, StreamModel, StreamRequest, StreamText, StreamToken
from cllm.engine.events import Event
from cllm.engine.sequence import Sequence, SequenceSpec
from cllm.engine.streaming import StreamScheduler, Turn, request_of
from cllm.engine.telling import TextScheduler, text_request_of
from cllm.errors import LoadFailed, ModelDied, RequestError, call_foreign, in_one_line
from cllm.serve.loop import Loop, log
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread
from cllm.serve.stepless import StreamsOnly
from cllm.serve.worker.crossing import WrongEvent, check_end, seq_id_of


class StreamLoop(Loop):
    """What the model tells is heard from any thread; all else belongs to the Trio thread."""

    scheduler: StreamScheduler

    def __init__(self, model: StreamsOnly, scheduler: StreamScheduler, metrics: Metrics, thread: ModelThread) -> None:
        """Opens the model, before anybody is told that it is there. Raises: LoadFailed when it cannot be."""
        super().__init__(model, scheduler, metrics, thread)
        metrics.watch_model(model.stream_model)
        self._model_of_streams: StreamModel = model.stream_model
        self._keeps_prefixes = model.keeps_prefixes
        self._heard: deque[StreamEvent | WrongEvent] = deque()
        self._token: trio.lowlevel.TrioToken | None = None
        try:
            call_foreign(self._model_of_streams.open, self._hear)
        except Exception as error:
            raise LoadFailed(f"the model {model.info.name} could not be opened: {in_one_line(error)}") from error

    async def run(self) -> None:
        """See `Loop.run`."""
        self._token = trio.lowlevel.current_trio_token()
        try:
            await super().run()
        finally:
            self._token = None

    async def recall(self, specs: Seq[SequenceSpec]) -> None:
        """See `Loop.recall`. What the model keeps is its own business."""

    @property
    def keeps_for_later(self) -> bool:
        """See `Loop.keeps_for_later`."""
        return False

    async def keep_prefixes(self) -> None:
        """See `Loop.keep_prefixes`. As above."""

    def forget_host(self) -> None:
        """See `Loop.forget_host`. As above."""

    async def _turn(self) -> None:
        self._work = trio.Event()  # whatever is said from here on is a reason for another turn
        self._take_heard()
        if self._life is not None and self._life.is_dead:
            await self._replace(self._life, ModelDied("the worker died"), self._settle_death)
            self._heard.clear()  # what came of it late: everybody begins anew
        turn = self.scheduler.turn(trio.current_time())
        self._owed += turn.events
        self._tell(turn)
        self._deliver_owed()
        if self._stopping and not self.scheduler.n_sequences:  # the last one left in this turn, and nobody will say anything more
            return
        deadline = self.scheduler.next_deadline
        with trio.move_on_at(math.inf if deadline is None else deadline):
            await self._work.wait()

    def _settle_death(self, now: float) -> list[Event]:
        self._take_heard()  # what it told before it died
        return self.scheduler.take_death(now)

    def _hear(self, event: StreamEvent | WrongEvent) -> None:
        """From any thread."""
        self._heard.append(event)
        token = self._token  # which the end of `run` takes away at any moment
        if token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._work_set, idempotent=True)

    def _work_set(self) -> None:
        self._work.set()

    def _take_heard(self) -> None:
        now = trio.current_time()
        for _ in range(len(self._heard)):
            event = self._heard.popleft()
            try:
                self._owed += self._settle(event, now)
            except ModelDied:
                raise
            except Exception as error:  # of a field that is none: of an event that is checked no further, since most are right
                self._owed += self._settle_wrong(event, now, f", of which {in_one_line(error)}")
            self._progress_at = now

    def _settle(self, event: StreamEvent | WrongEvent, now: float) -> list[Event]:
        if isinstance(event, StreamEnd):
            check_end(event)
            if event.error:
                log.error("stream.failed", why=event.error)
            return self.scheduler.take_end(event, now)
        if isinstance(event, StreamBeat):
            return []
        if isinstance(event, WrongEvent):
            return self._settle_wrong(event, now, f", of which {event.why}", kind=event.kind)
        if isinstance(self.scheduler, TextScheduler):
            if isinstance(event, StreamText):
                return self.scheduler.take_text(event, now)
        elif isinstance(event, StreamToken):
            return self.scheduler.take(event, now)
        return self._settle_wrong(event, now)

    def _settle_wrong(self, event: object, now: float, more: str = "", *, kind: str = "") -> list[Event]:
        """What a model of its kind does not tell costs the sequence that it tells it of, if there is one."""
        why = f"the model told a {kind or type(event).__name__}{more}"
        log.error("stream.failed", why=why)
        seq_id = event.seq_id if isinstance(event, WrongEvent) else seq_id_of(event)
        if seq_id is None:
            return []
        is_running = self.scheduler.has_started(seq_id)  # there, though here it may be over
        events = self.scheduler.take_end(StreamEnd(seq_id, why), now)
        if is_running:
            self._cancel(seq_id)
        return events

    def _tell(self, turn: Turn) -> None:
        for seq_id in turn.stopped:
            self._cancel(seq_id)
        for sequence in turn.started:
            try:
                call_foreign(self._model_of_streams.start, sequence.seq_id, self._request_of(sequence))
            except ModelDied:
                raise
            except Exception as error:
                self._refused(sequence.seq_id, error)
                self._work.set()  # its place is free again

    def _cancel(self, seq_id: int) -> None:
        try:
            call_foreign(self._model_of_streams.cancel, seq_id)
        except ModelDied:
            raise
        except Exception as error:  # nobody here waits for the sequence any more
            self._metrics.step_failed(error)
            log.error("cancel.failed", why=in_one_line(error))

    def _request_of(self, sequence: Sequence) -> StreamRequest:
        reads_text = isinstance(self.scheduler, TextScheduler)
        request = text_request_of(sequence) if reads_text else request_of(sequence, self._model.vocabulary)
        return request if self._keeps_prefixes else attrs.evolve(request, cache_prompt=False)

    def _refused(self, seq_id: int, error: Exception) -> None:
        """Settle a start that raised."""
        refusal = error if isinstance(error, RequestError) else None
        if refusal is None:
            self._metrics.step_failed(error)
            log.error("stream.failed", why=f"{type(error).__name__}: {error}")
        end = StreamEnd(seq_id, str(error) or type(error).__name__, refusal)
        self._owed += self.scheduler.take_end(end, trio.current_time())
