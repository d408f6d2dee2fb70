"""Streams of events: in order, bounded, and never in the engine's way."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from cllm.engine.events import Delta, Event, Failed, Finished, FinishReason, TokenLogprob, Usage
from cllm.errors import GenerationFailed
from cllm.serve.streams import N_BYTES_DELTA, EventStream

USAGE = Usage(n_prompt=1, n_cached=0, n_generated=1, queue_s=0.0, prefill_s=0.0, decode_s=0.0)


def delta(seq_id: int, text: str = "x") -> Delta:
    return Delta(seq_id, text, [1])


def finished(seq_id: int) -> Finished:
    return Finished(seq_id, FinishReason.STOP, None, USAGE)


class Made:
    """A stream of sequences 7, 8, ... and what it cancelled."""

    def __init__(self, n_sequences: int = 1, n_bytes_max: int = 1000) -> None:
        self.cancelled: list[int] = []
        self.stream = EventStream([7 + i for i in range(n_sequences)], self.cancelled.append, n_bytes_max=n_bytes_max)

    def put(self, *events: Event) -> None:
        for event in events:
            self.stream.put(event)

    async def rest(self) -> list[tuple[int, Event]]:
        return [pair async for events in self.stream for pair in events]


# --- order and end ----------------------------------------------------------------------------------------------------


async def test_events_come_in_the_engines_order_with_the_place_of_their_sequence() -> None:
    made = Made(2)
    events = [delta(8, "a"), delta(7, "b"), finished(8), delta(7, "c"), finished(7)]
    made.put(*events)
    assert await made.rest() == [(1, events[0]), (0, events[1]), (1, events[2]), (0, events[3]), (0, events[4])]


async def test_all_that_came_since_the_last_reading_comes_at_once() -> None:
    made = Made()
    made.put(delta(7, "a"), delta(7, "b"))
    assert len(await anext(made.stream)) == 2
    made.put(delta(7, "c"), finished(7))
    assert len(await anext(made.stream)) == 2


async def test_a_stream_ends_after_the_last_sequences_terminal_event_and_stays_ended() -> None:
    made = Made(2)
    made.put(finished(7))
    assert made.stream.n_open == 1
    made.put(finished(8))
    assert made.stream.n_open == 0
    assert len(await made.rest()) == 2
    assert await made.rest() == []


async def test_a_reader_that_waits_is_woken_once_for_all_that_a_step_brings() -> None:
    made = Made()
    heard: list[int] = []

    async def listen() -> None:
        async for events in made.stream:
            heard.append(len(events))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        made.put(delta(7), delta(7), delta(7))
        await trio.testing.wait_all_tasks_blocked()
        made.put(finished(7))
    assert heard == [3, 1]


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_leaving_a_stream_cancels_what_has_not_ended_and_nothing_else() -> None:
    made = Made(3)
    with made.stream:
        made.put(finished(8))
    assert made.cancelled == [7, 9]


def test_leaving_it_by_an_error_cancels_too() -> None:
    made = Made()

    def fail() -> None:
        with made.stream:
            raise KeyError("the reader's own")

    with pytest.raises(KeyError):
        fail()
    assert made.cancelled == [7]


async def test_a_reader_that_is_cancelled_while_it_waits_may_come_back_and_has_missed_nothing() -> None:
    made = Made()
    with trio.move_on_after(0) as scope:
        await anext(made.stream)
    assert scope.cancelled_caught
    event = delta(7)
    made.put(event)
    assert await anext(made.stream) == [(0, event)]


async def test_an_event_and_a_cancel_that_come_together_lose_nothing() -> None:
    made = Made()
    heard: list[object] = []
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                heard.append(await anext(made.stream))

            nursery.start_soon(listen)
            await trio.testing.wait_all_tasks_blocked()
            made.put(delta(7))
            scope.cancel()
    made.put(finished(7))
    assert len(heard) + len(await made.rest()) == 2


# --- sinks ------------------------------------------------------------------------------------------------------------


class Diverted(Made):
    """A stream whose reader waits and has left a sink."""

    def __init__(self, *, takes: bool = True, error: Exception | None = None, n_bytes_max: int = 1000) -> None:
        super().__init__(2, n_bytes_max)
        self.sunk: list[tuple[int, Delta]] = []
        self.heard: list[tuple[int, Event]] = []
        self.n_wakings = 0
        self.stream.sink = self._sink
        self._takes, self._error = takes, error

    def _sink(self, index: int, event: Delta) -> bool:
        self.sunk.append((index, event))
        if self._error is not None:
            raise self._error
        return self._takes

    async def read(self) -> None:
        async for events in self.stream:
            self.n_wakings += 1
            self.heard += events

    async def while_waiting(self, *events: Event) -> None:
        """Put events while the reader waits, then end both sequences."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read)
            await trio.testing.wait_all_tasks_blocked()
            self.put(*events)
            await trio.testing.wait_all_tasks_blocked()
            self.put(finished(7), finished(8))


async def test_while_its_reader_waits_deltas_go_to_the_sink_and_wake_nobody() -> None:
    made, one, other = Diverted(), delta(7), delta(8)
    await made.while_waiting(one, other)
    assert made.sunk == [(0, one), (1, other)]
    assert [type(event) for _, event in made.heard] == [Finished, Finished]
    assert made.n_wakings == 1


async def test_what_the_sink_does_not_take_wakes_the_reader_and_the_sink_sees_nothing_that_comes_after_it() -> None:
    made, first, second = Diverted(takes=False), delta(7), delta(7)
    await made.while_waiting(first, second)
    assert made.sunk == [(0, first)], "the reader has the first still before it, so the second may not overtake it"
    assert made.heard[:2] == [(0, first), (0, second)]


async def test_a_sink_gets_nothing_while_its_reader_is_busy() -> None:
    made, event = Diverted(), delta(7)
    made.put(event)
    assert made.sunk == []
    assert await anext(made.stream) == [(0, event)]


async def test_a_sink_that_raises_ends_its_own_sequence_and_nothing_else() -> None:
    error = RuntimeError("the connection is closed")
    made = Diverted(error=error)
    await made.while_waiting(delta(7))
    assert made.cancelled == [7]
    (_, failed), (index, end) = made.heard
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.__cause__) == ("stream_broken", error)
    assert (index, type(end)) == (1, Finished)


# --- bounds -----------------------------------------------------------------------------------------------------------


async def test_a_reader_too_far_behind_gets_what_there_was_and_an_error_and_its_sequence_is_cancelled() -> None:
    made = Made(n_bytes_max=3 * (N_BYTES_DELTA + 4))
    made.put(*[delta(7) for _ in range(10)])
    events = await made.rest()
    assert [type(event) for _, event in events] == [Delta, Delta, Delta, Failed]
    error = events[-1][1].error  # type: ignore[union-attr]
    assert isinstance(error, GenerationFailed)
    assert error.code == "stream_overflow"
    assert made.cancelled == [7]


async def test_after_an_overflow_the_engines_last_words_are_not_a_second_end() -> None:
    made = Made(n_bytes_max=1)
    made.put(delta(7), delta(7), Finished(7, FinishReason.CANCELLED, None, USAGE))
    events = await made.rest()
    assert [type(event) for _, event in events] == [Failed]
    made.stream.cancel()
    assert made.cancelled == [7], "once is enough"


async def test_a_reader_that_keeps_up_may_read_any_amount() -> None:
    made = Made(n_bytes_max=2 * N_BYTES_DELTA)
    for _ in range(100):
        made.put(delta(7))
        await anext(made.stream)
    made.put(finished(7))
    assert len(await made.rest()) == 1
    assert made.cancelled == []


async def test_long_text_weighs_more_than_short() -> None:
    made = Made(n_bytes_max=10 * N_BYTES_DELTA)
    made.put(delta(7, "x" * 10 * N_BYTES_DELTA))
    assert [type(event) for _, event in await made.rest()] == [Failed]


async def test_likely_tokens_weigh_too() -> None:
    logprob = TokenLogprob(1, -1.0, [(i, -2.0) for i in range(20)])
    made = Made(n_bytes_max=3 * N_BYTES_DELTA)
    made.put(Delta(7, "x", [1], [logprob]))
    assert [type(event) for _, event in await made.rest()] == [Failed]


async def test_a_terminal_event_always_finds_room() -> None:
    made = Made(n_bytes_max=N_BYTES_DELTA + 4)
    made.put(delta(7), finished(7))
    assert [type(event) for _, event in await made.rest()] == [Delta, Finished]


async def test_a_stream_has_one_reader() -> None:
    made = Made()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.rest)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(AssertionError, match="one reader"):
            await anext(made.stream)
        made.put(finished(7))
