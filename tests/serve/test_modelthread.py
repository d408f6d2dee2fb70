"""The thread in which models compute."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest
import trio
import trio.testing

from cllm.errors import StepFailed
from cllm.serve import modelthread
from cllm.serve.modelthread import NoThread, Waiting, open_model_thread, run_apart
from cllm.testing.mortal import Panic


async def test_all_calls_run_in_one_thread_that_is_not_trios() -> None:
    async with open_model_thread() as thread:
        threads = {await thread.run(threading.get_ident) for _ in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_what_a_call_gives_or_raises_is_its_callers() -> None:
    async with open_model_thread() as thread:
        assert await thread.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await thread.run(divmod, 7, 0)
        assert await thread.run(int) == 0


def panic() -> None:
    raise Panic("called unwrap on nothing")


async def test_what_is_raised_and_is_no_exception_is_a_failed_step_wherever_the_call_is_made() -> None:
    """As such it would pass whatever stands between a request and the server's end."""
    async with open_model_thread() as thread:
        ways: list[Callable[..., Awaitable[object]]] = [thread.run, Waiting(thread).run, run_apart]
        with thread.shared(), thread.shared():
            for run in ways:
                with pytest.raises(StepFailed, match=r"^Panic: called unwrap on nothing$"):
                    await run(panic)
        assert await thread.run(int) == 0


async def test_where_the_system_has_no_thread_left_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    start, n_short = threading.Thread.start, 0

    def start_late(thread: threading.Thread) -> None:
        nonlocal n_short
        if thread.name == "load" and n_short < 2:
            n_short += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(modelthread, "PAUSE_THREAD_S", 0.0)
    monkeypatch.setattr(threading.Thread, "start", start_late)
    assert await run_apart(divmod, 7, 2) == (3, 1)
    assert n_short == 2
    n_short = -1000
    with pytest.raises(NoThread):
        await run_apart(divmod, 7, 2)
    async with open_model_thread() as thread:
        with thread.shared():
            assert await thread.run_last(int) == 0, "it is not left undone for that"


async def test_what_ends_a_model_is_done_apart_where_others_compute_and_else_in_their_thread() -> None:
    async with open_model_thread() as thread:
        own = await thread.run(threading.get_ident)
        assert await thread.run_last(threading.get_ident) == own
        with thread.shared():
            assert await thread.run_last(threading.get_ident) != own


async def test_calls_are_done_one_at_a_time_in_the_order_they_come() -> None:
    done: list[int] = []
    async with open_model_thread() as thread, trio.open_nursery() as nursery:
        blocked = threading.Event()
        nursery.start_soon(thread.run, blocked.wait)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            nursery.start_soon(thread.run, done.append, number)
            await trio.testing.wait_all_tasks_blocked()
        assert done == []
        blocked.set()
    assert done == [0, 1, 2]


async def test_a_cancelled_caller_waits_for_its_call_and_gets_its_result() -> None:
    release = threading.Event()
    results = []

    async def call() -> None:
        results.append(await thread.run(release.wait))

    async with open_model_thread() as thread:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            await trio.lowlevel.cancel_shielded_checkpoint()
            assert results == []
            release.set()
        assert results == [True]


async def test_leaving_by_a_cancellation_does_the_calls_that_came_before() -> None:
    done: list[int] = []
    with trio.CancelScope() as scope:
        async with open_model_thread() as thread, trio.open_nursery() as nursery:
            nursery.start_soon(thread.run, done.append, 1)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert done == [1]


async def test_a_model_elsewhere_takes_its_turns_as_the_others_do() -> None:
    done: list[int] = []
    blocked = threading.Event()
    async with open_model_thread() as thread, trio.open_nursery() as nursery:
        with thread.shared(), thread.shared():
            nursery.start_soon(Waiting(thread, patience_s=60.0).run, blocked.wait)
            await trio.testing.wait_all_tasks_blocked()
            assert thread.is_busy
            nursery.start_soon(thread.run, done.append, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert done == []
            blocked.set()
    assert done == [1]
    assert not thread.is_busy


async def test_a_model_elsewhere_that_hangs_holds_up_the_others_for_a_while_only() -> None:
    hanging = threading.Event()
    async with open_model_thread() as thread, trio.open_nursery() as nursery:
        with thread.shared(), thread.shared():
            nursery.start_soon(Waiting(thread, patience_s=0.0).run, hanging.wait)
            await trio.testing.wait_all_tasks_blocked()
            assert await thread.run(int) == 0
            hanging.set()


async def test_what_is_waited_for_elsewhere_gives_or_raises_the_same() -> None:
    async with open_model_thread() as thread:
        waiting = Waiting(thread)
        for n_more in (0, 1):  # alone it waits in the models' thread
            with thread.shared(), thread.shared() if n_more else nullcontext():
                assert await waiting.run(divmod, 7, 2) == (3, 1)
                assert (await waiting.run(threading.get_ident) == await thread.run(threading.get_ident)) is (n_more == 0)
                with pytest.raises(ZeroDivisionError):
                    await waiting.run(divmod, 7, 0)


async def test_where_the_system_has_no_thread_left_to_wait_in_the_call_is_made_in_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("can't start new thread")

    async with open_model_thread() as thread:
        with thread.shared(), thread.shared():
            waiting = Waiting(thread)
            n_calls = 0

            def fail() -> None:
                nonlocal n_calls
                n_calls += 1
                raise RuntimeError("the work's own")

            with pytest.raises(RuntimeError, match="the work's own"):
                await waiting.run(fail)
            assert n_calls == 1
            with monkeypatch.context() as patched:
                patched.setattr(trio.to_thread, "run_sync", none_left)
                assert await waiting.run(divmod, 7, 2) == (3, 1)
            assert not thread.is_busy


async def test_what_was_begun_is_done_in_its_turn_and_its_result_waits() -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)
    context = contextvars.copy_context()
    context.run(number.set, 7)
    async with open_model_thread() as thread:
        first, second = thread.begin(number.get, context), thread.begin(lambda: divmod(7, 0), context)
        assert thread.is_busy
        assert await thread.run(number.get) == 0
        assert not thread.is_busy
        assert await first.result() == 7
        with pytest.raises(ZeroDivisionError):
            await second.result()
        assert thread.n_taken == 3
