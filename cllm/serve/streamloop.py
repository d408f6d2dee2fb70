"""The loop of a model that batches by itself: tells it who begins and who has left, and hands on what it tells."""

from __future__ import annotations

import contextlib
import math
from collections import deque

import trio

from cllm.backend import StreamEvent, StreamModel, StreamToken
from cllm.engine.events import Event
from cllm.engine.streaming import StreamScheduler, Turn, request_of
from cllm.errors import ModelDied
from cllm.serve.loop import StepLoop, log
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread
from cllm.serve.stepless import StreamsOnly


class StreamLoop(StepLoop):
    """A `StepLoop` without steps. What the model tells is heard from any thread; all else belongs to the Trio thread."""

    def __init__(self, model: StreamsOnly, scheduler: StreamScheduler, metrics: Metrics, thread: ModelThread) -> None:
        super().__init__(model, scheduler, metrics, thread)
        self._streaming = scheduler
        self._model_of_streams: StreamModel = model.stream_model
        self._heard: deque[StreamEvent] = deque()
        self._token: trio.lowlevel.TrioToken | None = None

    async def run(self) -> None:
        """See `StepLoop.run`."""
        self._token = trio.lowlevel.current_trio_token()
        self._model_of_streams.open(self._hear)
        try:
            await super().run()
        finally:
            self._token = None

    async def _turn(self) -> None:
        self._work = trio.Event()  # whatever is said from here on is a reason for another turn
        self._take_heard()
        turn = self._streaming.turn(trio.current_time())
        self._owed += turn.events
        self._tell(turn)
        self._deliver_owed()
        deadline = self._streaming.next_deadline
        with trio.move_on_at(math.inf if deadline is None else deadline):
            await self._work.wait()

    def _hear(self, event: StreamEvent) -> None:
        """From any thread."""
        self._heard.append(event)
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._work_set, idempotent=True)

    def _work_set(self) -> None:
        self._work.set()

    def _take_heard(self) -> None:
        now = trio.current_time()
        for _ in range(len(self._heard)):
            self._owed += self._settle(self._heard.popleft(), now)
            self._progress_at = now

    def _settle(self, event: StreamEvent, now: float) -> list[Event]:
        if isinstance(event, StreamToken):
            return self._streaming.take(event.seq_id, event.token, now)
        if event.error:
            log.error("stream.failed", why=event.error)
        return self._streaming.take_end(event.seq_id, event.error, now)

    def _tell(self, turn: Turn) -> None:
        for seq_id in turn.stopped:
            self._model_of_streams.cancel(seq_id)
        for sequence in turn.started:
            try:
                self._model_of_streams.start(sequence.seq_id, request_of(sequence))
            except ModelDied:
                raise
            except Exception as error:
                self._metrics.step_failed(error)
                log.error("stream.failed", why=f"{type(error).__name__}: {error}")
                self._owed += self._streaming.take_end(sequence.seq_id, str(error) or type(error).__name__, trio.current_time())
                self._work.set()  # its place is free again
