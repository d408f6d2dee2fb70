"""An engine's life: loading, serving, draining, dying. Each ends in its own way, and the model is closed in all of them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import attrs
import pytest
import trio
import trio.testing

from cllm.backend import Batch, ModelSpec, OnProgress, StepModel
from cllm.config import Settings
from cllm.errors import LoadAborted, LoadFailed, ModelDied, Unavailable
from cllm.serve import lifecycle
from cllm.serve.engine import EnginePhase, ServedModel
from cllm.serve.lifecycle import EngineLife
from cllm.testing.fake import FakeBackend, FakeModel
from tests.serve.conftest import TEST_S, Answer, Steps, make_spec, read_all, text_alone, until


@attrs.define
class Told:
    """A Progress that remembers what it was told."""

    shares: list[float] = attrs.field(factory=list)
    served: list[ServedModel] = attrs.field(factory=list)

    def update(self, share: float) -> None:
        self.shares.append(share)

    def done(self, model: ServedModel) -> None:
        self.served.append(model)

    def stop(self) -> None:
        pass


class Closable(FakeModel):
    """Knows whether it was closed."""

    def __init__(self, before_step: Callable[[Batch], None] | None = None) -> None:
        super().__init__(before_step=before_step)
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


class Backend(FakeBackend):
    """Loads one model; `during` is called half way."""

    def __init__(self, model: FakeModel, during: Callable[[], None]) -> None:
        self._model = model
        self._during = during

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        on_progress(0.5)
        self._during()
        if not on_progress(0.75):
            raise LoadAborted("the load was asked to stop")
        on_progress(1.0)
        return self._model


@attrs.frozen
class Lived:
    """A life under test."""

    life: EngineLife
    model: Closable
    told: Told
    ends: list[BaseException | None]  # how `run` ended: None is by itself


Live: TypeAlias = Callable[..., AbstractAsyncContextManager[Lived]]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    """Run a life on a fake model; on leaving it must end, within a bound."""

    @asynccontextmanager
    async def live(
        *, before_step: Callable[[Batch], None] | None = None, during_load: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Lived]:
        model, told = Closable(before_step), Told()
        monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Backend(model, during_load)))
        lived = Lived(EngineLife(Settings("fake", calibrate="off"), told), model, told, [])

        async def run() -> None:
            try:
                await lived.life.run()
            except Exception as error:
                lived.ends.append(error)
            else:
                lived.ends.append(None)

        with trio.fail_after(TEST_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                yield lived

    return live


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_a_model_is_loaded_served_and_closed(live: Live) -> None:
    async with live() as lived:
        assert lived.life.engine.phase is EnginePhase.LOADING
        await lived.life.ready.wait()
        engine = lived.life.engine
        assert (engine.phase, engine.progress, engine.model.name) == (EnginePhase.READY, 1.0, "fake")
        (answer,) = await read_all(engine.open([make_spec()]))
        assert answer.text == text_alone("once upon a time", 8)
        assert lived.model.n_closed == 0
        lived.life.drain()
    assert lived.ends == [None]
    assert lived.model.n_closed == 1
    assert lived.life.engine.phase is EnginePhase.STOPPED
    assert lived.told.shares == [0.5, 0.75, 1.0]
    assert lived.told.served == [engine.model]


async def test_a_load_that_fails_is_raised_and_requests_are_told(live: Live) -> None:
    def fail() -> None:
        raise LoadFailed("this is no model")

    async with live(during_load=fail) as lived:
        pass
    (end,) = lived.ends
    assert isinstance(end, LoadFailed)
    assert not lived.life.ready.is_set()
    assert not lived.life.engine.health().ok
    with pytest.raises(Unavailable, match="stopped"):
        lived.life.engine.open([make_spec()])


async def test_a_load_that_gives_up_unasked_has_failed(live: Live) -> None:
    def give_up() -> None:
        raise LoadAborted("tired")

    async with live(during_load=give_up) as lived:
        pass
    (end,) = lived.ends
    assert isinstance(end, LoadFailed)
    assert str(end) == "the backend gave the load up, and nobody had asked it to"


async def test_draining_while_loading_gives_the_load_up(live: Live) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(TEST_S)

    async with live(during_load=wait) as lived:
        await until(begun.is_set)
        await lived.life.finish(grace_s=1000)
        assert lived.life.engine.phase is EnginePhase.DRAINING
        go_on.set()
    assert [type(end) for end in lived.ends] == [LoadAborted]
    assert (lived.model.n_closed, lived.told.served) == (0, [])
    assert lived.life.engine.phase is EnginePhase.STOPPED


async def test_a_drain_that_comes_when_the_load_is_past_stopping_closes_the_model_and_serves_nobody(live: Live) -> None:
    async with live() as lived:
        # The load's last word was said before the drain: it cannot be aborted any more.
        lived.life._abort_load = threading.Event()
        lived.life._draining = True
        lived.life.engine.drain()
    assert lived.ends == [None]
    assert lived.model.n_closed == 1
    assert not lived.life.ready.is_set()
    assert lived.life.engine.phase is EnginePhase.STOPPED


# --- draining ---------------------------------------------------------------------------------------------------------


async def test_draining_finishes_running_and_waiting_sequences_and_refuses_new_ones(live: Live, steps: Steps) -> None:
    async with live() as lived:
        await lived.life.ready.wait()
        engine = lived.life.engine
        streams = [engine.open([make_spec(f"client {i}", 20)]) for i in range(100)]  # more than run at once
        lived.life.drain()
        with pytest.raises(Unavailable) as caught:
            engine.open([make_spec()])
        assert caught.value.code == "draining"
        for i, stream in enumerate(streams):
            (answer,) = await read_all(stream)
            assert len(answer.tokens) == 20
            if i % 20 == 0:
                assert answer.text == text_alone(f"client {i}", 20)
    assert lived.ends == [None]


async def test_draining_an_idle_engine_ends_it_at_once(live: Live, steps: Steps) -> None:
    async with live() as lived:
        await lived.life.ready.wait()
        await trio.testing.wait_all_tasks_blocked()
        await lived.life.finish(grace_s=1000)
    assert lived.ends == [None]


async def test_what_has_not_ended_when_the_grace_is_over_gets_an_error_event(
    live: Live, steps: Steps, autojump_clock: trio.testing.MockClock
) -> None:
    """A step takes a second, so that the quick one ends within the grace and the long one does not."""
    answers: dict[str, Answer] = {}
    steps.call_s = 1.0

    async def ask(lived: Lived, name: str, n_tokens: int) -> None:
        (answers[name],) = await read_all(lived.life.engine.open([make_spec(name, n_tokens)]))

    async with live() as lived:
        await lived.life.ready.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, lived, "quick", 3)
            nursery.start_soon(ask, lived, "long", 1000)
            await trio.testing.wait_all_tasks_blocked()
            await lived.life.finish(grace_s=10)
    assert answers["quick"].text == text_alone("quick", 3)
    assert isinstance(answers["long"].error, Unavailable)
    assert answers["long"].error.code == "draining"
    assert answers["long"].text == text_alone("long", 1000)[: len(answers["long"].text)]
    assert 7 <= len(answers["long"].tokens) <= 10  # a busy machine may let the first steps pass before it was asked
    assert lived.ends == [None]
    assert lived.model.n_closed == 1


async def test_a_grace_that_is_over_while_a_sequences_last_token_is_computed_is_no_death(live: Live, steps: Steps) -> None:
    async with live() as lived:
        await lived.life.ready.wait()
        steps.hold(computed=True)
        stream = lived.life.engine.open([make_spec("one token and out", 1), make_spec("x" * 600, 1)])
        await trio.testing.wait_all_tasks_blocked()
        await lived.life.finish(grace_s=0)
        assert [answer.error.code for answer in await read_all(stream)] == ["draining", "draining"]
        steps.go_on()
    assert lived.ends == [None]
    assert lived.model.n_closed == 1


async def test_without_grace_everything_ends_at_once(live: Live, steps: Steps) -> None:
    async with live() as lived:
        await lived.life.ready.wait()
        stream = lived.life.engine.open([make_spec("endless", None)])
        await anext(stream)
        await lived.life.finish(grace_s=0)
        (answer,) = await read_all(stream)
        assert answer.error.code == "draining"
    assert lived.ends == [None]


def hold_close(lived: Lived) -> tuple[threading.Event, threading.Event]:
    """Let the model's close set the first event, and wait for the second."""
    closing, may_end = threading.Event(), threading.Event()

    def close() -> None:
        closing.set()
        assert may_end.wait(TEST_S)
        lived.model.n_closed += 1

    lived.model.close = close  # type: ignore[method-assign]
    return closing, may_end


async def test_who_waits_for_its_end_waits_for_a_close_that_takes_longer_than_any_step_may(
    live: Live, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(lifecycle, "STEP_S", 0.0)
    monkeypatch.setattr(lifecycle, "CLOSE_S", TEST_S)
    n_closed: list[int] = []
    async with live() as lived:

        async def wait() -> None:
            await lived.life.wait_ended()
            n_closed.append(lived.model.n_closed)

        await lived.life.ready.wait()
        closing, may_end = hold_close(lived)
        lived.life.drain()
        await until(closing.is_set)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.01)
            may_end.set()
    assert n_closed == [1]
    assert "close.cut" not in [one["event"] for one in logged]


async def test_a_close_that_takes_longer_than_it_may_is_told_and_waited_for_no_more(
    live: Live, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(lifecycle, "CLOSE_S", 0.01)
    async with live() as lived:
        await lived.life.ready.wait()
        closing, may_end = hold_close(lived)
        lived.life.drain()
        await until(closing.is_set)
        await lived.life.wait_ended()
        assert lived.model.n_closed == 0
        may_end.set()
    assert [one["seconds"] for one in logged if one["event"] == "close.cut"] == [0.01]


async def test_for_a_step_that_nobody_waits_for_the_end_does_not_wait_long(
    live: Live, steps: Steps, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(lifecycle, "STEP_S", 0.01)
    monkeypatch.setattr(lifecycle, "CLOSE_S", 2 * TEST_S)
    async with live() as lived:
        await lived.life.ready.wait()
        steps.hold()
        stream = lived.life.engine.open([make_spec()])
        await trio.testing.wait_all_tasks_blocked()
        await lived.life.finish(grace_s=0)
        await read_all(stream)
        await lived.life.wait_ended()
        assert not lived.ends
        steps.go_on()
    assert lived.model.n_closed == 1
    assert "close.cut" not in [one["event"] for one in logged]


# --- dying ------------------------------------------------------------------------------------------------------------


async def test_a_model_that_dies_ends_every_stream_with_an_error_and_the_life_with_its_death(live: Live, steps: Steps) -> None:
    def die(batch: Batch) -> None:
        if batch.positions[0] > 20:
            raise ModelDied("the device is gone")

    async with live(before_step=die) as lived:
        await lived.life.ready.wait()
        for answer in await read_all(lived.life.engine.open([make_spec(), make_spec("another", 50)])):
            assert isinstance(answer.error, Unavailable)
            assert answer.error.code == "stopped"
    assert [type(end) for end in lived.ends] == [ModelDied]
    assert lived.model.n_closed == 1
    assert not lived.life.engine.health().ok
    with pytest.raises(Unavailable, match="stopped"):
        lived.life.engine.open([make_spec()])


async def test_while_a_model_that_died_closes_the_server_does_not_call_itself_healthy(live: Live) -> None:
    def die(batch: Batch) -> None:
        raise ModelDied("the device is gone")

    async with live(before_step=die) as lived:
        closing, may_close = hold_close(lived)
        await lived.life.ready.wait()
        await read_all(lived.life.engine.open([make_spec()]))
        try:
            await until(closing.is_set)
            assert not lived.ends
            assert lived.life.engine.health().reason == "the engine has stopped"
            with pytest.raises(Unavailable, match="stopped"):
                lived.life.engine.check_ready()
        finally:
            may_close.set()


async def test_who_comes_between_its_death_and_its_end_is_refused(live: Live, steps: Steps) -> None:
    def die(batch: Batch) -> None:
        raise ModelDied("the device is gone")

    async with live(before_step=die) as lived:
        await lived.life.ready.wait()
        engine = lived.life.engine
        stream, refused = engine.open([make_spec()]), []

        def close() -> None:  # which may take long
            assert engine.phase is EnginePhase.STOPPED
            with pytest.raises(Unavailable, match="stopped"):
                engine.open([make_spec()])
            refused.append(True)

        lived.model.close = close  # type: ignore[method-assign]
        await read_all(stream)
    assert refused == [True]


async def test_a_life_that_is_cancelled_closes_the_model_and_ends_the_streams(live: Live, steps: Steps) -> None:
    with trio.CancelScope() as scope:
        async with live() as lived:
            await lived.life.ready.wait()
            stream = lived.life.engine.open([make_spec("endless", None)])
            await anext(stream)
            scope.cancel()
    (answer,) = await read_all(stream)
    assert answer.error.code == "stopped"
    assert lived.model.n_closed == 1
    assert lived.life.engine.phase is EnginePhase.STOPPED
