"""A model that schedules itself, in a process of its own: nobody sees that it is elsewhere, and its death costs nobody his answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import msgspec
import pytest
import trio

from cllm.backend import ModelSpec, StreamEnd
from cllm.errors import ContextExceeded, GenerationFailed, InvalidRequest, RateLimited, RequestError, Unavailable
from cllm.serve import frames
from cllm.serve.crossing import event_of, told_of
from cllm.serve.stepless import StreamsOnly
from cllm.serve.worker import WorkerBackend
from cllm.serve.workerstreams import WorkerStreams
from cllm.testing import fake_streams
from tests.serve.conftest import HANG_S, TEST_S, answers, kill, kill_again_and_again, make_spec, serving, text_alone, until_replaced

PROMPTS = ("once upon a time", "the sea", "a", "seven long winters and seven short summers")


def load(*, hang_s: float = TEST_S, **options: str) -> WorkerStreams:
    backend = WorkerBackend(fake_streams.make_backend(), "cllm.testing.fake_streams:make_backend", hang_s)
    model = backend.load(ModelSpec(path="", options={"n_live_max": "8", **options}), lambda share: True)
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


async def test_a_request_that_kills_the_worker_every_time_gets_an_error(model: WorkerStreams) -> None:
    async with serving(StreamsOnly(model)) as running:
        (deadly,) = await answers(running, make_spec(fake_streams.DEADLY, 8))
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert isinstance(deadly.error, GenerationFailed)
    assert answer.text == text_alone("the sea", 8)


async def test_one_that_tells_nothing_for_too_long_is_replaced() -> None:
    model = load(hang_s=HANG_S)
    try:
        async with serving(StreamsOnly(model)) as running:
            kill(model, signal.SIGSTOP)
            (answer,) = await answers(running, make_spec("the sea", 8))
        assert answer.text == text_alone("the sea", 8)
    finally:
        model.close()


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
    sent = msgspec.msgpack.encode(told_of(StreamEnd(3, refusal=refusal, stop_reason="x")))
    end = event_of(msgspec.msgpack.decode(sent, type=frames.EndTold))
    assert isinstance(end, StreamEnd)
    assert type(end.refusal) is type(refusal)
    assert vars(end.refusal) == vars(refusal)
    assert end.stop_reason == "x"
