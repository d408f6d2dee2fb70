from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry

from cllm.bigstack import NoStack
from cllm.errors import GrammarInvalid, Unavailable
from cllm.serve.grammars import N_COMPILING_MAX, GrammarDesk, on_stack
from cllm.serve.metrics import Metrics
from cllm.testing.fake import FakeVocabulary
from cllm.text.grammar import ANY_OBJECT, Grammar, Grammars, GrammarSource, Kind, OnStack

BAD = GrammarSource(Kind.REGEX, "(")
MORE_THAN_ENOUGH_S = 60.0


class Slow:
    """Grammars that take until they are let go."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.n_ended = 0

    def known(self, source: GrammarSource) -> Grammar | None:
        return None

    def compile(self, source: GrammarSource, on_stack: OnStack) -> Grammar:
        self.began.release()
        self.may_go.wait(MORE_THAN_ENOUGH_S)
        self.n_ended += 1
        return cast(Grammar, object())


def counted(registry: CollectorRegistry) -> dict[str, float]:
    """How often which outcome was counted."""
    samples = [sample for metric in registry.collect() if metric.name == "cllm_grammars" for sample in metric.samples]
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


async def test_what_was_compiled_is_there_at_once(metrics: Metrics) -> None:
    desk, grammars = GrammarDesk(metrics), Grammars(FakeVocabulary())
    first = await desk.compiled(grammars, ANY_OBJECT, timeout_s=MORE_THAN_ENOUGH_S)
    assert await desk.compiled(grammars, ANY_OBJECT, timeout_s=1e-9) is first
    assert counted(metrics.registry) == {"compiled": 1, "cached": 1}


async def test_a_source_is_written_in_a_thread_and_what_was_compiled_of_an_equal_one_is_there(metrics: Metrics) -> None:
    desk, grammars, threads = GrammarDesk(metrics), Grammars(FakeVocabulary()), []

    def write() -> GrammarSource:
        threads.append(threading.current_thread())
        return ANY_OBJECT

    first = await desk.compiled(grammars, write, timeout_s=MORE_THAN_ENOUGH_S)
    assert await desk.compiled(grammars, write, timeout_s=MORE_THAN_ENOUGH_S) is first
    assert threading.main_thread() not in threads
    assert counted(metrics.registry) == {"compiled": 1, "cached": 1}


async def test_a_source_that_takes_too_long_to_write_is_refused_at_the_deadline(
    metrics: Metrics, slow_clock: trio.testing.MockClock
) -> None:
    begun, may_go = threading.Event(), threading.Event()

    def write() -> GrammarSource:
        begun.set()
        may_go.wait(MORE_THAN_ENOUGH_S)
        return ANY_OBJECT

    async def refused() -> None:
        with pytest.raises(GrammarInvalid, match="longer than 60 s"):
            await GrammarDesk(metrics).compiled(Grammars(FakeVocabulary()), write, timeout_s=MORE_THAN_ENOUGH_S)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            await trio.to_thread.run_sync(begun.wait)
            slow_clock.jump(MORE_THAN_ENOUGH_S)
    finally:
        may_go.set()


async def test_what_was_compiled_can_be_made_anew_later(metrics: Metrics) -> None:
    grammar = await GrammarDesk(metrics).compiled(Grammars(FakeVocabulary()), ANY_OBJECT, timeout_s=MORE_THAN_ENOUGH_S)
    assert grammar.remake(grammar.origin)


@pytest.mark.parametrize("error", [NoStack(), GrammarInvalid("it is more than the compiler can take")])
def test_where_there_is_no_memory_nothing_is_made_anew(error: Exception) -> None:
    def make() -> None:
        raise error

    assert on_stack(make) is None


async def test_what_does_not_compile_is_refused_and_counted(metrics: Metrics) -> None:
    with pytest.raises(GrammarInvalid):
        await GrammarDesk(metrics).compiled(Grammars(FakeVocabulary()), BAD, timeout_s=MORE_THAN_ENOUGH_S)
    assert counted(metrics.registry) == {"refused": 1}


async def test_what_was_compiled_in_time_is_given_though_trio_looks_too_late(metrics: Metrics, slow_clock: trio.testing.MockClock) -> None:
    desk, grammars, begun = GrammarDesk(metrics), Grammars(FakeVocabulary()), threading.Event()
    compile_ = grammars.compile

    def compile_and_tell(source: GrammarSource, on_stack: OnStack) -> Grammar:
        begun.set()
        return compile_(source, on_stack)

    grammars.compile = compile_and_tell  # type: ignore[method-assign]

    async def stand_still() -> None:
        await trio.to_thread.run_sync(begun.wait)
        while grammars.known(ANY_OBJECT) is None:
            time.sleep(0.001)  # noqa: ASYNC251 - that is the point
        slow_clock.jump(MORE_THAN_ENOUGH_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand_still)
        assert await desk.compiled(grammars, ANY_OBJECT, timeout_s=MORE_THAN_ENOUGH_S) is grammars.known(ANY_OBJECT)
    assert counted(metrics.registry) == {"compiled": 1}


async def test_what_takes_too_long_is_refused_at_the_deadline_while_everything_else_runs(
    metrics: Metrics, slow_clock: trio.testing.MockClock
) -> None:
    slow: Any = Slow()

    async def refused() -> None:
        with pytest.raises(GrammarInvalid, match="longer than"):
            await GrammarDesk(metrics).compiled(slow, ANY_OBJECT, timeout_s=MORE_THAN_ENOUGH_S)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            await trio.to_thread.run_sync(slow.began.acquire)
            slow_clock.jump(MORE_THAN_ENOUGH_S)
        assert slow.n_ended == 0, "the compiler goes on; nobody waits for it"
    finally:
        slow.may_go.set()


async def test_who_waits_behind_slow_ones_until_the_deadline_is_told_to_come_again(metrics: Metrics) -> None:
    slow: Any = Slow()
    desk = GrammarDesk(metrics)
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(N_COMPILING_MAX):
                nursery.start_soon(lambda: desk.compiled(slow, ANY_OBJECT, timeout_s=MORE_THAN_ENOUGH_S))
                await trio.to_thread.run_sync(slow.began.acquire)
            with pytest.raises(Unavailable) as caught:
                await desk.compiled(slow, ANY_OBJECT, timeout_s=0.01)
            assert caught.value.code == "grammars_busy"
            slow.may_go.set()
    finally:
        slow.may_go.set()
