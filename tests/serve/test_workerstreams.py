"""A model that schedules itself, in a process of its own: nobody sees that it is elsewhere, and its death costs nobody his answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from cllm.backend import ModelSpec, StreamEnd, StreamEvent, StreamRequest, StreamText, StreamToken
from cllm.errors import (
    ContextExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    LoadFailed,
    NoRoom,
    RateLimited,
    RequestError,
    Unavailable,
)
from cllm.serve.stepless import StreamsOnly
from cllm.serve.worker import frames
from cllm.serve.worker import streams as workerstreams
from cllm.serve.worker.crossing import WrongEvent, encoded_event, error_of, event_of, failed
from cllm.serve.worker.frames import Ended
from cllm.serve.worker.main import Worker, _Telling
from cllm.serve.worker.model import WorkerBackend
from cllm.serve.worker.streams import WorkerStreams
from cllm.testing import fake_streams
from tests.serve.conftest import (
    HANG_S,
    TEST_S,
    Answer,
    answers,
    kill,
    kill_again_and_again,
    make_spec,
    serving,
    text_alone,
    until,
    until_replaced,
)

PROMPTS = ("once upon a time", "the sea", "a", "seven long winters and seven short summers")


def load(path: str = "", *, hang_s: float = TEST_S, **options: str) -> WorkerStreams:
    backend = WorkerBackend(fake_streams.make_backend(), "cllm.testing.fake_streams:make_backend", hang_s)
    model = backend.load(ModelSpec(path=path, options={"n_live_max": "8", **options}), lambda share: True)
    assert isinstance(model, WorkerStreams)
    return model


@pytest.fixture
def model() -> Iterator[WorkerStreams]:
    loaded = load()
    yield loaded
    loaded.close()


async def test_requests_get_what_they_get_of_a_model_in_this_process(model: WorkerStreams) -> None:
    async with serving(StreamsOnly(model)) as running:
        given = await answers(running, *(make_spec(prompt, 10 + i) for i, prompt in enumerate(PROMPTS)))
    assert [one.text for one in given] == [text_alone(prompt, 10 + i) for i, prompt in enumerate(PROMPTS)]


async def test_one_that_cannot_be_begun_gets_an_error_and_the_others_go_on(model: WorkerStreams) -> None:
    async with serving(StreamsOnly(model)) as running:
        good, bad = await answers(running, make_spec("the sea", 8), make_spec(fake_streams.UNWANTED, 8))
    assert good.text == text_alone("the sea", 8)
    assert isinstance(bad.error, GenerationFailed)


async def test_a_clients_mistake_is_told_to_the_client_and_not_to_the_operator(model: WorkerStreams, logged: list[Any]) -> None:
    async with serving(StreamsOnly(model)) as running:
        (bad,) = await answers(running, make_spec(fake_streams.MISTAKEN, 8))
    assert isinstance(bad.error, InvalidRequest)
    assert bad.error.param == "prompt"
    assert "stream.failed" not in [entry["event"] for entry in logged]


def test_one_that_cannot_be_opened_is_a_load_that_failed() -> None:
    with pytest.raises(LoadFailed, match=r"^RuntimeError: no thread left$"):
        load("closed")


async def test_streams_go_on_where_they_were_when_the_worker_is_killed_again_and_again(model: WorkerStreams) -> None:
    async with serving(StreamsOnly(model)) as running, trio.open_nursery() as nursery:
        nursery.start_soon(kill_again_and_again, running, model, 5, 60, 150)
        given = await answers(running, *(make_spec(prompt, 60) for prompt in PROMPTS))
        nursery.cancel_scope.cancel()  # they may have ended before the last death
    assert [one.text for one in given] == [text_alone(prompt, 60) for prompt in PROMPTS]


async def test_a_death_while_nothing_is_asked_is_mended_before_anybody_asks(model: WorkerStreams) -> None:
    async with serving(StreamsOnly(model)) as running:
        await until_replaced(model, kill(model))
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


async def test_the_next_life_has_as_many_cells_as_the_first_one_found_room_for() -> None:
    model = load("roomy")
    try:
        async with serving(StreamsOnly(model)) as running:
            kill(model)
            (answer,) = await answers(running, make_spec("the sea", 8))
        assert answer.text == text_alone("the sea", 8)
    finally:
        model.close()


async def test_a_request_that_kills_the_worker_every_time_gets_an_error(model: WorkerStreams) -> None:
    async with serving(StreamsOnly(model)) as running:
        (deadly,) = await answers(running, make_spec(fake_streams.DEADLY, 8))
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert isinstance(deadly.error, GenerationFailed)
    assert answer.text == text_alone("the sea", 8)


async def test_one_that_tells_nothing_for_too_long_is_replaced_and_that_is_told(logged: list[Any]) -> None:
    model = load(hang_s=HANG_S)
    try:
        async with serving(StreamsOnly(model)) as running:
            kill(model, signal.SIGSTOP)
            (answer,) = await answers(running, make_spec("the sea", 8))
        assert answer.text == text_alone("the sea", 8)
        ended = f"it was silent for {HANG_S:g} s, and was ended; killed by SIGKILL"
        assert {entry["ended"] for entry in logged if entry["event"] == "worker.replaced"} == {ended}  # a busy machine may silence the next
    finally:
        model.close()


async def test_one_that_may_be_silent_as_long_as_it_likes_answers() -> None:
    model = load(hang_s=1e300)
    try:
        async with serving(StreamsOnly(model)) as running:
            (answer,) = await answers(running, make_spec("the sea", 8))
        assert answer.text == text_alone("the sea", 8)
    finally:
        model.close()


def test_who_begins_after_a_long_silence_has_all_the_time_from_then_on(model: WorkerStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nobody waits for anything, silence says nothing."""
    now, waited = 1000.0, []
    begun = StreamRequest(prompt=(1,), n_tokens_max=1)

    class Idle:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            waited.append(seconds)
            now += seconds
            if len(waited) == 2:  # at the end of another one
                model.start(1, begun)
            return False

    monkeypatch.setattr(workerstreams, "time", SimpleNamespace(monotonic=lambda: now))
    process: Any = SimpleNamespace(channel=Idle())
    with pytest.raises(Ended, match="silent"):
        model._wait(process)
    assert waited == [TEST_S] * 3


def test_silence_counts_on_from_who_gives_up_to_who_comes_next(model: WorkerStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who hangs is found out, though nobody waits for him as long as that."""
    now = 1000.0
    monkeypatch.setattr(workerstreams, "time", SimpleNamespace(monotonic=lambda: now))
    for number in range(1, 4):
        model.start(number, StreamRequest(prompt=(1,), n_tokens_max=1))
        now += 0.3 * TEST_S
        model.cancel(number)
        now += 10 * TEST_S  # nobody waits
        assert model._patience_s() == TEST_S
    model.start(4, StreamRequest(prompt=(1,), n_tokens_max=1))
    assert model._patience_s() == pytest.approx(0.1 * TEST_S)
    model._take(StreamToken(4, 7))
    assert model._patience_s() == TEST_S


async def test_what_cannot_be_said_to_it_is_that_requests_misfortune_alone(model: WorkerStreams) -> None:
    with pytest.raises(OverflowError):
        model.start(1, StreamRequest(prompt=(10**30,), n_tokens_max=1))
    async with serving(StreamsOnly(model)) as running:
        unsayable = make_spec("the sea", 8)
        unsayable = attrs.evolve(unsayable, seed=10**30)
        failed, answer = await answers(running, unsayable, make_spec("the sea", 8))
    assert isinstance(failed.error, GenerationFailed)
    assert answer.text == text_alone("the sea", 8)


async def test_one_that_is_heard_no_more_is_replaced_as_one_that_died(model: WorkerStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    n_heard, hear = 0, workerstreams.event_of

    def forgetful(told: Any) -> StreamEvent | WrongEvent:
        nonlocal n_heard
        n_heard += 1
        if n_heard == 3:
            raise MemoryError
        return hear(told)

    monkeypatch.setattr(workerstreams, "event_of", forgetful)
    async with serving(StreamsOnly(model)) as running:
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


def test_progress_that_a_thread_of_the_backends_tells_after_the_load_goes_nowhere() -> None:
    pairs = [socket.socketpair() for _ in range(4)]
    worker = Worker([theirs for _, theirs in pairs])
    load = frames.Load(factory="", spec=ModelSpec(path=""), log_level=0)
    assert worker._loaded(lambda _load: 5, load) == 5
    assert worker._on_progress(1.0)
    pairs[0][0].setblocking(False)
    with pytest.raises(BlockingIOError):
        pairs[0][0].recv(1)
    for ends in pairs:
        for end in ends:
            end.close()


async def test_who_asks_much_of_one_that_does_not_listen_holds_nobody_up() -> None:
    model = load(n_live_max="1", n_ctx="600000")
    try:
        async with serving(StreamsOnly(model)) as running:
            kill(model, signal.SIGSTOP)
            began_at = time.monotonic()
            stream = running.engine.open([make_spec("x" * 500_000, 4)])  # more than a socket takes
            await trio.testing.wait_all_tasks_blocked()
            assert time.monotonic() - began_at < TEST_S / 3
            stream.cancel()
            kill(model)
            (answer,) = await answers(running, make_spec("the sea", 8))
        assert answer.text == text_alone("the sea", 8)
    finally:
        model.close()


async def test_one_whose_own_child_keeps_its_output_open_is_replaced_all_the_same(tmp_path: Path) -> None:
    children = tmp_path / "children"
    model = load(f"{fake_streams.BEARS}{children}")
    try:
        async with serving(StreamsOnly(model)) as running, trio.open_nursery() as nursery:
            given: list[Answer] = []

            async def ask() -> None:
                given.extend(await answers(running, make_spec("the sea", 60)))

            nursery.start_soon(ask)
            await until(lambda: running.scheduler.totals.n_generated >= 5)
            kill(model, signal.SIGSTOP)
            await trio.testing.wait_all_tasks_blocked(0.1)  # nothing is told any more that would wake anybody
            with trio.fail_after(TEST_S / 2):
                await until_replaced(model, kill(model))
        assert given[0].text == text_alone("the sea", 60)
    finally:
        model.close()
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


async def test_while_another_one_is_loaded_time_runs_and_who_was_running_may_leave(model: WorkerStreams) -> None:
    revive, may_go_on = model.life.revive, threading.Event()

    def revive_slowly() -> None:
        assert may_go_on.wait(TEST_S)
        revive()

    async with serving(StreamsOnly(model)) as running, trio.open_nursery() as nursery:
        given: list[Answer] = []

        async def ask() -> None:
            given.extend(await answers(running, make_spec("c", 8, timeout_s=0.5)))

        model.life.revive = revive_slowly  # type: ignore[method-assign]
        kill(model, signal.SIGSTOP)  # so that it tells nothing
        with running.engine.open([make_spec("b", 8)]):
            nursery.start_soon(ask)
            await until(lambda: running.scheduler.n_running == 2)
            kill(model)
            await until(lambda: running.loop._is_replacing)
        await until(lambda: bool(given))
        assert isinstance(given[0].error, DeadlineExceeded)
        assert running.loop._is_replacing, "it was told when its time was over"
        assert running.scheduler.n_running == 0, "who has left counts for nobody's key"
        may_go_on.set()
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


async def test_a_life_for_which_there_is_no_thread_is_no_end(model: WorkerStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = threading.Thread.start, []

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if thread.name == "worker streams" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    async with serving(StreamsOnly(model)) as running:
        await answers(running, make_spec("a", 1))
        monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
        kill(model)
        (answer,) = await answers(running, make_spec("the sea", 8))
        assert len(failed) == 1
        await until(lambda: [thread.name for thread in threading.enumerate()].count("worker requests") == 1)
    assert answer.text == text_alone("the sea", 8)


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("top_p: no", param="top_p"),
        RateLimited("asked too often", retry_after_s=7.0),
        Unavailable("busy", retry_after_s=3.0, code="upstream_busy"),
        ContextExceeded(9, 4),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_refusal_is_the_same_on_this_side(refusal: RequestError) -> None:
    sent = encoded_event(StreamEnd(3, refusal=refusal, stop_reason="x"))
    end = event_of(msgspec.msgpack.decode(sent, type=frames.EndTold))
    assert isinstance(end, StreamEnd)
    assert type(end.refusal) is type(refusal)
    assert vars(end.refusal) == vars(refusal)
    assert end.stop_reason == "x"


class OutOfPages(NoRoom):
    """A plugin's own."""


class BadImage(InvalidRequest):
    """A plugin's own."""


def test_what_a_plugin_derives_from_the_contracts_errors_is_these_on_this_side() -> None:
    assert type(error_of(failed(OutOfPages("no page")))) is NoRoom
    end = event_of(msgspec.msgpack.decode(encoded_event(StreamEnd(3, refusal=BadImage("no image", param="image"))), type=frames.EndTold))
    assert isinstance(end, StreamEnd)
    assert type(end.refusal) is InvalidRequest
    assert (end.refusal.status, end.refusal.param) == (400, "image")


@pytest.mark.parametrize("seq_id", [None, "3", 1 << 70, -1])
def test_an_event_of_no_sequence_is_told_as_of_none(seq_id: Any) -> None:
    wrong = event_of(msgspec.msgpack.decode(encoded_event(StreamToken(seq_id, np.int64(5))), type=frames.WrongTold))  # type: ignore[arg-type]
    assert isinstance(wrong, WrongEvent)
    assert wrong.seq_id is None


@pytest.mark.parametrize(
    "event",
    [
        StreamToken(3, np.int64(5)),  # type: ignore[arg-type]
        StreamToken(np.int64(3), 5),  # type: ignore[arg-type]
        StreamToken(3, 5, np.float32(-1.0)),  # type: ignore[arg-type]
        StreamText(3, "\ud83d"),
        StreamText(3, content=None),  # type: ignore[arg-type]
        StreamEnd(3, refusal=InvalidRequest("no", of=[1])),
        SimpleNamespace(seq_id=3),
    ],
    ids=["an array's token", "an array's sequence", "an array's logprob", "half a character", "no text", "a list in a refusal", "no event"],
)
def test_an_event_that_cannot_cross_is_told_as_one(event: StreamEvent) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        telling = _Telling(frames.Channel(theirs, frames.ToWorker))
        telling.begin()
        telling(event)
        telling(StreamToken(4, 7))
        channel: frames.Channel[frames.FromWorker] = frames.Channel(ours, frames.FromWorker)
        wrong = event_of(channel.receive())
        assert isinstance(wrong, WrongEvent)
        assert (wrong.seq_id, wrong.kind) == (3, type(event).__name__)
        assert event_of(channel.receive()) == StreamToken(4, 7)
