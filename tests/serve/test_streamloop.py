"""A model that schedules itself behind the same queue, fairness and streams as one that computes steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from cllm.backend import StreamEnd, StreamEvent, StreamRequest, StreamText, StreamToken
from cllm.config import Settings
from cllm.engine.events import Delta, FinishReason
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import Phase
from cllm.errors import DeadlineExceeded, GenerationFailed, LoadFailed, ModelDied, NotHeeded, NotSupported, Unavailable
from cllm.serve.loading import load
from cllm.serve.stepless import StreamsOnly
from cllm.serve.worker.crossing import WrongEvent
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake_streams import FakeStreamBackend, FakeStreamModel
from cllm.testing.mortal import Panic
from tests.serve.conftest import TEST_S, Answer, make_spec, read_all, text_alone

PROMPT = "once upon a time"


@asynccontextmanager
async def streaming(model: FakeStreamModel, settings: Settings | None = None) -> AsyncIterator[RunningEngine]:
    """Run an engine on a model that schedules itself, and end a test that hangs."""
    with trio.fail_after(TEST_S):
        try:
            async with running_engine(StreamsOnly(model), settings) as running:
                yield running
        finally:
            model.close()


async def settled() -> None:
    """Let what was told from this thread be heard and dealt with."""
    for _ in range(3):
        await trio.testing.wait_all_tasks_blocked()


async def test_a_request_is_answered_as_by_steps() -> None:
    async with streaming(FakeStreamModel()) as running:
        (answer,) = await read_all(running.engine.open([make_spec()]))
    assert answer.text == text_alone(PROMPT, 8)
    assert answer.finished.reason is FinishReason.LENGTH
    assert (answer.finished.usage.n_prompt, answer.finished.usage.n_generated) == (len(PROMPT), 8)


async def test_more_than_it_takes_at_once_wait_and_all_are_answered() -> None:
    model = FakeStreamModel(n_live_max=3)
    async with streaming(model) as running:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.extend(await read_all(running.engine.open([make_spec()])))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
    assert [answer.text for answer in answers] == [text_alone(PROMPT, 8)] * 20


async def test_who_waits_is_let_in_by_priority_when_a_place_is_free() -> None:
    model = FakeStreamModel(n_live_max=1, by_itself=False)
    async with streaming(model) as running, trio.open_nursery() as nursery:
        for priority in (0, 5, -5):
            nursery.start_soon(read_all, running.engine.open([make_spec(n_tokens=1, priority=priority, seed=priority + 10)]))
        await settled()
        assert [view.phase for view in running.engine.sequences()] == [Phase.PREFILL, Phase.WAITING, Phase.WAITING]
        for _ in range(3):
            model.go()
            await settled()
    assert [request.seed for request in model.started] == [5, 10, 15]


async def test_the_model_is_asked_for_what_the_request_asked_for() -> None:
    model = FakeStreamModel()
    async with streaming(model) as running:
        stopping = StopParams(max_tokens=4, stop_token_ids=frozenset({7}))
        await read_all(running.engine.open([make_spec(seed=3, stopping=stopping)]))
    assert model.started == [
        StreamRequest(prompt=tuple(PROMPT.encode()), n_tokens_max=4, end_tokens=model.vocabulary.end_tokens | {7}, seed=3, temperature=0.0)
    ]


async def test_a_server_that_keeps_no_prefixes_asks_the_model_to_share_nothing_whatever_the_request_says() -> None:
    model = FakeStreamModel()
    with trio.fail_after(TEST_S):
        async with running_engine(StreamsOnly(model, keeps_prefixes=False)) as running:
            await read_all(running.engine.open([make_spec()]))
    model.close()
    assert [request.cache_prompt for request in model.started] == [False]


async def test_a_stop_string_ends_the_sequence_here_and_there() -> None:
    model = FakeStreamModel(by_itself=False)
    whole = text_alone(PROMPT, 40)
    async with streaming(model) as running:
        stream = running.engine.open([make_spec(stopping=StopParams(max_tokens=40, stop=(whole[10:13],)))])
        await settled()
        while model.n_live:
            model.go()
            await settled()
        (answer,) = await read_all(stream)
    assert answer.text == whole[: whole.index(whole[10:13])]
    assert answer.finished.reason is FinishReason.STOP
    assert len(model.cancelled) == 1


@pytest.mark.parametrize("n_heard", [0, 1, 5])
async def test_a_client_that_leaves_at_any_moment_makes_room(n_heard: int) -> None:
    model = FakeStreamModel(n_live_max=1, by_itself=False)
    async with streaming(model) as running:
        with running.engine.open([make_spec()]):
            await settled()
            for _ in range(n_heard):
                model.go()
                await settled()
            assert model.n_live == 1
        await settled()
        assert model.n_live == 0
        assert running.scheduler.n_sequences == 0


async def test_a_client_that_leaves_while_it_waits_is_never_begun() -> None:
    model = FakeStreamModel(n_live_max=1, by_itself=False)
    async with streaming(model) as running:
        with running.engine.open([make_spec()]):
            with running.engine.open([make_spec()]):
                await settled()
            await settled()
        await settled()
    assert len(model.started) == 1


async def test_one_that_cannot_be_begun_fails_and_the_next_has_its_place() -> None:
    model = FakeStreamModel(n_live_max=1)
    model.fails = lambda request: "not this one" if request.seed == 1 else ""
    async with streaming(model) as running:
        bad, good = running.engine.open([make_spec(seed=1)]), running.engine.open([make_spec(seed=2)])
        ((failed,), (answer,)) = (await read_all(bad), await read_all(good))
    assert isinstance(failed.error, GenerationFailed)
    assert answer.text == text_alone(PROMPT, 8)


@pytest.mark.parametrize("error", [RuntimeError("no"), Panic("no")])
async def test_whatever_a_start_raises_is_that_requests_misfortune_alone(error: BaseException) -> None:
    class Picky(FakeStreamModel):
        def start(self, seq_id: int, request: StreamRequest) -> None:
            if request.seed == 1:
                raise error
            super().start(seq_id, request)

    async with streaming(Picky()) as running:
        bad, good = running.engine.open([make_spec(seed=1)]), running.engine.open([make_spec(seed=2)])
        ((failed,), (answer,)) = (await read_all(bad), await read_all(good))
    assert isinstance(failed.error, GenerationFailed)
    assert answer.text == text_alone(PROMPT, 8)


@pytest.mark.parametrize("error", [RuntimeError("no"), Panic("no")])
async def test_whatever_a_cancel_raises_the_others_go_on(error: BaseException, logged: list[MutableMapping[str, Any]]) -> None:
    class Stubborn(FakeStreamModel):
        def cancel(self, seq_id: int) -> None:
            super().cancel(seq_id)
            raise error

    model = Stubborn(by_itself=False)
    async with streaming(model) as running:
        stays = running.engine.open([make_spec()])
        with running.engine.open([make_spec()]):
            await settled()
        await settled()
        for _ in range(8):
            model.go()
            await settled()
        (answer,) = await read_all(stays)
    assert answer.text == text_alone(PROMPT, 8)
    assert [one["event"] for one in logged if one["log_level"] == "error"] == ["cancel.failed"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda seq_id: StreamText(seq_id, "a text"),
        lambda seq_id: SimpleNamespace(seq_id=seq_id),
        lambda seq_id: StreamToken(seq_id, None),  # type: ignore[arg-type]
        lambda seq_id: WrongEvent(seq_id, "StreamToken", "it could not cross"),
        lambda seq_id: StreamEnd(seq_id, refusal="too long"),  # type: ignore[arg-type]
        lambda seq_id: StreamEnd(seq_id, usage={"n_prompt": 3}),  # type: ignore[arg-type]
        lambda seq_id: StreamToken(np.int64(seq_id), None),  # type: ignore[arg-type]
    ],
    ids=["a text", "no event", "no token", "what could not cross", "no refusal", "no usage", "an array's number"],
)
async def test_an_event_of_another_kind_than_it_may_tell_costs_its_sequence_alone(wrong: Callable[[int], Any]) -> None:
    model = FakeStreamModel(by_itself=False)
    nothing: Any = None
    async with streaming(model) as running:
        bad, good = running.engine.open([make_spec()]), running.engine.open([make_spec()])
        await settled()
        model._tell(nothing)  # which is no sequence's
        model._tell(wrong(bad.seq_ids[0]))
        model._tell(wrong(bad.seq_ids[0]))
        await settled()
        assert model.cancelled == list(bad.seq_ids)
        for _ in range(8):
            model.go()
        ((failed,), (answer,)) = (await read_all(bad), await read_all(good))
    assert isinstance(failed.error, GenerationFailed)
    assert answer.text == text_alone(PROMPT, 8)


@pytest.mark.parametrize("error", [RuntimeError("no thread left"), Panic("no thread left")])
async def test_a_model_that_cannot_be_opened_is_a_load_that_failed(error: BaseException) -> None:
    class Closed(FakeStreamModel):
        def open(self, tell: Callable[[StreamEvent], None]) -> None:
            raise error

    with pytest.raises(LoadFailed, match=r"^the model fake could not be opened: .*: no thread left$"):
        async with streaming(Closed()):
            pass


async def test_one_that_fails_on_its_way_gets_an_error_and_the_others_go_on() -> None:
    model = FakeStreamModel(by_itself=False)
    async with streaming(model) as running:
        bad, good = running.engine.open([make_spec()]), running.engine.open([make_spec()])
        await settled()
        model.go()
        await settled()
        model.end(bad.seq_ids[0], "the wire is cut")
        for _ in range(8):
            model.go()
        ((failed,), (answer,)) = (await read_all(bad), await read_all(good))
    assert isinstance(failed.error, GenerationFailed)
    assert answer.text == text_alone(PROMPT, 8)


async def test_a_deadline_is_met_while_nothing_is_told(autojump_clock: trio.testing.MockClock) -> None:
    model = FakeStreamModel(by_itself=False)
    async with streaming(model) as running:
        (answer,) = await read_all(running.engine.open([make_spec(timeout_s=2.0)]))
        assert isinstance(answer.error, DeadlineExceeded)
        assert trio.current_time() >= 2.0
        await settled()
        assert model.n_live == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": SamplingParams(top_k=40)}, "top_k"),
        ({"sampling": SamplingParams(mirostat=2)}, "mirostat"),
        ({"sampling": SamplingParams(logit_bias=((1, 2.0),))}, "logit_bias"),
        ({"n_logprobs": 2}, "logprobs"),
        ({"stopping": StopParams(max_tokens=9, min_tokens=3)}, "min_tokens"),
    ],
)
async def test_what_the_model_does_not_heed_is_refused_by_name_before_it_is_queued(fields: dict[str, object], param: str) -> None:
    model = FakeStreamModel()
    async with streaming(model) as running:
        with pytest.raises(NotSupported) as caught:
            running.engine.open([make_spec(**fields)])
        assert caught.value.param == param
        assert running.scheduler.n_sequences == 0
    assert model.started == []


class Telling(FakeStreamModel):
    """Tells logprobs, of the drawn token and one other, and can be told when a sequence may end."""

    n_logprobs_max = 1

    def __init__(self) -> None:
        super().__init__()
        self.heeds |= {"n_logprobs", "n_tokens_min"}

    def _told(self, seq_id: int, token: int) -> StreamEvent:
        return StreamToken(seq_id, token, -0.5, ((token, -0.5),))


async def test_logprobs_are_handed_on_as_the_model_tells_them() -> None:
    async with streaming(Telling()) as running:
        with running.engine.open([make_spec(n_tokens=3, n_logprobs=1)]) as stream:
            told = [event async for events in stream for _, event in events]
    found = [one for event in told if isinstance(event, Delta) for one in event.logprobs or []]
    assert [(one.logprob, one.top) for one in found] == [(-0.5, [(one.token, -0.5)]) for one in found]
    assert len(found) == 3


async def test_more_likely_tokens_than_the_model_tells_are_refused() -> None:
    async with streaming(Telling()) as running:
        with pytest.raises(NotHeeded) as caught:
            running.engine.open([make_spec(n_logprobs=2)])
    assert caught.value.param == "top_logprobs"


async def test_the_model_is_told_which_end_tokens_count_and_from_when_on() -> None:
    model = Telling()
    end_tokens = model.vocabulary.end_tokens if model.vocabulary else frozenset()
    async with streaming(model) as running:
        await read_all(running.engine.open([make_spec(stopping=StopParams(max_tokens=9, min_tokens=3))]))
        await read_all(running.engine.open([make_spec(stopping=StopParams(max_tokens=9, ignore_eos=True))]))
    asked = [(request.n_tokens_min, request.end_tokens, request.barred_tokens) for request in model.started]
    assert asked == [(3, end_tokens, frozenset()), (0, frozenset(), end_tokens)]


async def test_a_model_that_dies_ends_every_stream_and_the_engine() -> None:
    class Dying(FakeStreamModel):
        def start(self, seq_id: int, request: StreamRequest) -> None:
            raise ModelDied("gone")

    with pytest.RaisesGroup(ModelDied):
        async with streaming(Dying()) as running:
            await read_all(running.engine.open([make_spec()]))
            await trio.sleep_forever()


async def test_told_to_stop_it_ends_after_its_last_answer() -> None:
    model = FakeStreamModel()
    async with streaming(model) as running:
        stream = running.engine.open([make_spec()])
        running.loop.stop()
        (answer,) = await read_all(stream)
        await running.loop.wait_idle()
        await running.ended.wait()
    assert answer.text == text_alone(PROMPT, 8)


async def test_it_ends_when_it_is_told_to_stop_in_the_moment_in_which_the_last_one_leaves() -> None:
    async with streaming(FakeStreamModel(by_itself=False)) as running:
        stream = running.engine.open([make_spec()])
        await settled()
        stream.cancel()
        running.loop.stop()
        await running.ended.wait()


async def test_it_ends_when_those_who_are_left_are_ended_though_the_model_is_silent() -> None:
    async with streaming(FakeStreamModel(by_itself=False)) as running:
        stream = running.engine.open([make_spec()])
        await settled()
        running.loop.stop()
        await settled()
        running.loop.end_all(Unavailable("the server drains", retry_after_s=1.0))
        await running.ended.wait()
        (answer,) = await read_all(stream)
    assert isinstance(answer.error, Unavailable)


def test_a_backend_may_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("streams", FakeStreamBackend()))
    loaded = load(Settings(backend_option=("n_live_max=100", "n_ctx=50")), lambda _share: True)
    loaded.step_model.close()
    assert isinstance(loaded.step_model, StreamsOnly)
    assert (loaded.limits.n_live_max, loaded.limits.n_ctx, loaded.served.generates) == (100, 50, True)


async def test_a_model_that_tells_nothing_any_more_is_not_well_though_others_come(mock_clock: trio.testing.MockClock) -> None:
    model = FakeStreamModel(by_itself=False)
    async with running_engine(StreamsOnly(model), watchdog_s=10.0) as running:
        streams = [running.engine.open([make_spec()])]
        for _ in range(3):
            await settled()
            mock_clock.jump(4.0)
            streams.append(running.engine.open([make_spec()]))
        assert not running.engine.health().ok
        for stream in streams:
            stream.cancel()
        await settled()
    model.close()
