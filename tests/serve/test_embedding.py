"""Vectors beside answers: the two take turns, and a drain waits for both."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from cllm.backend import Batch, Embedder, ModelSpec, OnProgress, StepModel
from cllm.config import Settings
from cllm.errors import GenerationFailed, LoadFailed, ModelDied, NotSupported, Unavailable
from cllm.serve.lifecycle import EngineLife
from cllm.testing.engine import running_engine
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.testing.fake_embedder import FakeEmbedder
from cllm.testing.mortal import Panic
from tests.serve.conftest import TEST_S, make_spec, read_all, text_alone, until
from tests.serve.test_lifecycle import Told

LONG = [97] * 400


class Ordered:
    """A backend whose model and embedder note what happens to them, in order."""

    def __init__(self, embedder: FakeEmbedder | None, before_step: Callable[[Batch], None] | None = None) -> None:
        self.noted: list[str] = []
        self.before_step = before_step
        self.embedder = embedder

    def backend(self) -> FakeBackend:
        ordered = self

        class Model(FakeModel):
            def make_embedder(self, spec: ModelSpec) -> Embedder:
                if ordered.embedder is None:
                    raise LoadFailed("no memory")
                ordered.embedder.close = lambda: ordered.noted.append("embedder closed")  # type: ignore[method-assign]
                return ordered.embedder

            def close(self) -> None:
                ordered.noted.append("model closed")

        class Backend(FakeBackend):
            def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
                return Model(before_step=ordered.before_step)

        return Backend()


async def live(monkeypatch: pytest.MonkeyPatch, ordered: Ordered, body: Any, **settings: Any) -> list[BaseException | None]:
    """Run a life with embeddings on, and `body` in it; return how it ended."""
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", ordered.backend()))
    life = EngineLife(Settings("fake", embeddings=True, **settings), Told())
    ends: list[BaseException | None] = []

    async def run() -> None:
        try:
            await life.run()
        except Exception as error:
            ends.append(error)
        else:
            ends.append(None)

    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await life.ready.wait()
            await body(life, nursery)
    return ends


async def test_an_embedder_is_closed_before_the_model_that_it_stands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = Ordered(FakeEmbedder())

    async def body(life: EngineLife, nursery: trio.Nursery) -> None:
        assert (await life.engine.embeddings.loop.vectors([[1, 2]])).shape == (1, 8)
        life.drain()

    assert await live(monkeypatch, ordered, body) == [None]
    assert ordered.noted == ["embedder closed", "model closed"]


async def test_a_drain_lets_vectors_under_way_be_finished_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = FakeEmbedder(step_s=lambda _: 0.005)
    found: list[Any] = []

    async def body(life: EngineLife, nursery: trio.Nursery) -> None:
        loop = life.engine.embeddings.loop

        async def ask() -> None:
            found.append(await loop.vectors([LONG] * 3))

        nursery.start_soon(ask)
        await until(lambda: embedder.n_steps > 0)
        await life.finish(grace_s=TEST_S)
        with pytest.raises(Unavailable):
            await loop.vectors([[1]])

    assert await live(monkeypatch, Ordered(embedder), body, embedding_slice_ms=1) == [None]
    assert found[0].shape == (3, 8)


async def test_when_the_grace_is_over_vectors_under_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = FakeEmbedder(step_s=lambda _: 0.01)
    errors: list[BaseException] = []

    async def body(life: EngineLife, nursery: trio.Nursery) -> None:
        async def ask() -> None:
            try:
                await life.engine.embeddings.loop.vectors([LONG] * 100)
            except Unavailable as error:
                errors.append(error)

        nursery.start_soon(ask)
        await until(lambda: embedder.n_steps > 0)
        with capture_logs() as logged:
            await life.finish(grace_s=0)
        (cut,) = [line for line in logged if line["event"] == "drain.cut"]
        assert (cut["n_sequences"], cut["n_embedding_requests"]) == (0, 1)

    assert await live(monkeypatch, Ordered(embedder), body, embedding_slice_ms=1) == [None]
    assert len(errors) == 1


async def test_a_dead_embedder_is_the_engines_death_and_who_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Batch) -> None:
        raise ModelDied("gone")

    async def body(life: EngineLife, nursery: trio.Nursery) -> None:
        with pytest.raises(Unavailable):
            await life.engine.embeddings.loop.vectors([[1]])

    (end,) = await live(monkeypatch, Ordered(FakeEmbedder(before_step=die)), body)
    assert isinstance(end, ModelDied)


async def test_a_panic_over_an_input_costs_that_request_alone() -> None:
    def panic(batch: Batch) -> None:
        if 13 in batch.tokens[: batch.n_rows]:
            raise Panic("called unwrap on nothing")

    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), embedder=FakeEmbedder(before_step=panic)) as running:
            loop = running.engine.embeddings.loop
            with pytest.raises(GenerationFailed):
                await loop.vectors([[13]])
            assert (await loop.vectors([[1]])).shape[0] == 1


async def test_without_memory_for_it_the_model_is_served_and_vectors_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(life: EngineLife, nursery: trio.Nursery) -> None:
        (answer,) = await read_all(life.engine.open([make_spec()]))
        assert answer.text == text_alone("once upon a time", 8)
        with pytest.raises(NotSupported, match="no memory"):
            _ = life.engine.embeddings
        life.drain()

    assert await live(monkeypatch, Ordered(None), body) == [None]


async def test_steps_take_turns_while_both_have_work() -> None:
    order: list[str] = []
    model = FakeModel(before_step=lambda _: order.append("text"), step_s=lambda _: 0.002)
    embedder = FakeEmbedder(before_step=lambda _: order.append("vectors"), step_s=lambda _: 0.002)
    with trio.fail_after(TEST_S):
        async with running_engine(model, Settings(embedding_slice_ms=1), embedder=embedder) as running, trio.open_nursery() as nursery:
            nursery.start_soon(read_all, running.engine.open([make_spec(n_tokens=30)]))
            nursery.start_soon(running.engine.embeddings.loop.vectors, [LONG] * 4)
    together = order[order.index("vectors") : len(order) - order[::-1].index("text")]
    assert len(together) > 20
    # Seldom one of them has two turns in a row: where its step ends before the other's loop has come to ask for the next.
    assert max(len(list(run)) for _, run in itertools.groupby(together)) <= len(together) // 4


def _wait_for(event: threading.Event) -> None:
    assert event.wait(TEST_S)


async def test_health_sees_an_embedders_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    embedder = FakeEmbedder(before_step=lambda _: _wait_for(go_on))
    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), watchdog_s=0.05, embedder=embedder) as running:
            assert running.engine.health().ok
            async with trio.open_nursery() as nursery:
                nursery.start_soon(running.engine.embeddings.loop.vectors, [[1]])
                await until(lambda: not running.engine.health().ok)
                go_on.set()
            assert running.engine.health().ok


async def test_a_full_queue_refuses_and_says_by_the_rate_of_late_when_it_will_be_served() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before_step(_: Batch) -> None:
        begun.set()
        _wait_for(go_on)

    embedder = FakeEmbedder(before_step=before_step)
    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), Settings(queue_size=2), embedder=embedder) as running:
            loop = running.engine.embeddings.loop
            loop._service.step(600, 0, 30.0)
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(loop.vectors, [LONG])
                await until(begun.is_set)
                with pytest.raises(Unavailable) as caught:
                    await loop.vectors([[1]])
                go_on.set()
    assert caught.value.code == "queue_full"
    assert caught.value.retry_after_s == pytest.approx(2 * len(LONG) / 20)


async def test_a_key_does_not_shut_another_out_of_the_queue() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before_step(_: Batch) -> None:
        begun.set()
        _wait_for(go_on)

    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), Settings(queue_size=4), embedder=FakeEmbedder(before_step=before_step)) as running:
            loop = running.engine.embeddings.loop
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(loop.vectors, [LONG], "one")
                await until(begun.is_set)
                with pytest.raises(Unavailable):
                    loop.check_room("one")
                for _ in range(2):
                    loop.check_room("one", "other")  # one of them at least
                    loop.check_room("other")
                    nursery.start_soon(loop.vectors, [LONG], "other")
                    await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(Unavailable):
                    loop.check_room("other")  # it has its half
                with pytest.raises(Unavailable):
                    loop.check_room("one", "other")
                go_on.set()
            assert loop.n_waiting == 0
