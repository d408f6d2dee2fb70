"""The way of a request's events from the engine to whoever waits for them: a buffer that never makes the engine wait."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

import trio

from cllm.engine.events import Delta, Event, Failed, Finished, TokenLogprob
from cllm.errors import GenerationFailed
from cllm.text.parts import written

# What a delta weighs in the buffer, in bytes, about: beside its text, and for each likely token that is reported with it.
N_BYTES_DELTA = 64
N_BYTES_LIKELY_TOKEN = 100

Sink: TypeAlias = Callable[[int, Delta], bool]


class EventStream:
    """The events of one request's sequences, in the order the engine made them.

    Used as a context manager: leaving it cancels what has not ended. Iterating gives lists, each with all (index, event) that came since
    the last one: index is the sequence's place in the request. It ends after every sequence's terminal event.

    A reader that falls more than `n_bytes_max` behind is ended with an error event; the engine and the other streams never wait for it.

    A reader may leave a `sink`: while it waits, deltas go there first, as (index, delta), and it is woken only for those that the sink
    does not take. Waking a task costs more than most of what is done with a token. The sink is called on the engine's behalf: it must
    not wait, and if it raises, its own sequence ends.
    """

    def __init__(self, seq_ids: list[int], cancel: Callable[[int], None], *, n_bytes_max: int) -> None:
        self.seq_ids = tuple(seq_ids)
        self._index = {seq_id: i for i, seq_id in enumerate(seq_ids)}
        self._cancel = cancel
        self._events: list[tuple[int, Event]] = []
        self._n_bytes = 0
        self._n_bytes_max = n_bytes_max
        self._reader: trio.lowlevel.Task | None = None  # set while it waits, which means that it has dealt with all that came before
        self.sink: Sink | None = None

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Mark every sequence that has not ended; the engine frees what they hold before its next step."""
        for seq_id in self._index:
            self._cancel(seq_id)

    @property
    def n_open(self) -> int:
        """Sequences whose terminal event has not been put yet."""
        return len(self._index)

    def put(self, event: Event) -> None:
        """Take an event from the engine. Never blocks."""
        seq_id = event.seq_id
        index = self._index.get(seq_id)
        if index is None:  # ended for being too far behind, and the engine learns of it only at its next step
            return
        if type(event) is Delta:
            try:
                if self.sink is not None and self._reader is not None and self.sink(index, event):
                    return
            except Exception as error:  # a reader's mistake, which may not become the engine's
                event = self._end(seq_id, GenerationFailed("the stream could not be written", code="stream_broken"), error)
            else:
                self._n_bytes += _weight(event)
                if self._n_bytes > self._n_bytes_max:
                    event = self._end(seq_id, GenerationFailed("the stream was not read fast enough", code="stream_overflow"))
        else:
            assert isinstance(event, Finished | Failed)
            del self._index[seq_id]
        self._events.append((index, event))
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    def _end(self, seq_id: int, error: GenerationFailed, cause: Exception | None = None) -> Failed:
        """End a sequence from this side; what the engine still says of it is not heard."""
        self._cancel(seq_id)
        del self._index[seq_id]
        error.__cause__ = cause
        return Failed(seq_id, error)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> list[tuple[int, Event]]:
        if not self._events:
            if not self._index:
                raise StopAsyncIteration
            await self._wait()
        events, self._events, self._n_bytes = self._events, [], 0
        return events

    async def _wait(self) -> None:
        assert self._reader is None, "a stream has one reader"
        self._reader = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


def _weight(delta: Delta) -> int:
    n_bytes = N_BYTES_DELTA + 4 * len(delta.text)  # a character of Python's takes up to four
    if delta.parts is not None:
        n_bytes += N_BYTES_DELTA * len(delta.parts) + 4 * len(written(delta.parts))
    if delta.logprobs is not None:
        n_bytes += _weight_of(delta.logprobs)
    if delta.prompt_logprobs is not None:
        n_bytes += _weight_of(delta.prompt_logprobs)
    return n_bytes


def _weight_of(logprobs: list[TokenLogprob]) -> int:
    return N_BYTES_LIKELY_TOKEN * sum(1 + len(logprob.top) for logprob in logprobs)
