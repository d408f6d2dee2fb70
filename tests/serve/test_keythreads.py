"""Threads at which keys take turns."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from cllm.serve.keythreads import KeyThreads


class Work:
    """What is asked for, which goes on until it may end; in the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end: dict[str, threading.Event] = {}
        self.ended: list[str] = []

    async def ask(self, threads: KeyThreads, name: str) -> None:
        """By the key that is the name's first letter."""
        self.may_end[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            self.may_end[name].wait(60)
            return name

        self.ended.append(await threads.run(work, name[0]))

    async def until_begun(self, *names: str) -> None:
        while self.begun != [*names]:  # noqa: ASYNC110 - it happens in threads
            await trio.sleep(0.001)

    async def until_n_begun(self, n: int) -> None:
        while len(self.begun) < n:  # noqa: ASYNC110 - as above
            await trio.sleep(0.001)


@asynccontextmanager
async def asked(threads: KeyThreads, *names: str) -> AsyncIterator[tuple[Work, trio.Nursery]]:
    work = Work()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(work.ask, threads, name)
                while name not in work.may_end:
                    await trio.testing.wait_all_tasks_blocked()
            yield work, nursery
            for may_end in work.may_end.values():
                may_end.set()


async def test_a_key_with_little_waits_for_one_of_each_other_key_and_not_for_all_that_one_has() -> None:
    async with asked(KeyThreads(1), "a1", "a2", "a3", "a4", "b1", "c1") as (work, _):
        order = ["a1", "a2", "b1", "c1", "a3", "a4"]
        for i, name in enumerate(order):
            await work.until_begun(*order[: i + 1])
            work.may_end[name].set()
    assert work.ended == order


async def test_no_more_than_may_work_at_a_time_and_whoever_is_alone_has_all_of_them() -> None:
    async with asked(KeyThreads(2), "a1", "a2", "a3") as (work, _):
        await work.until_n_begun(2)
        await trio.testing.wait_all_tasks_blocked()
        assert set(work.begun) == {"a1", "a2"}
        work.may_end["a2"].set()
        await work.until_n_begun(3)


async def test_who_leaves_while_he_waits_is_passed_over_and_what_fails_frees_its_thread() -> None:
    threads, scopes = KeyThreads(1), []

    async def leave(work: Work, name: str) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await work.ask(threads, name)

    async with asked(threads, "a1") as (work, nursery):
        await work.until_begun("a1")
        nursery.start_soon(leave, work, "a2")
        nursery.start_soon(leave, work, "b1")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(work.ask, threads, "c1")
        await trio.testing.wait_all_tasks_blocked()
        for scope in scopes:
            scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        work.may_end["a1"].set()
        await work.until_begun("a1", "c1")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 5) == 5


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_a_turn_that_comes_to_who_leaves_at_that_moment_goes_on_to_the_next(leaves_first: bool) -> None:
    threads = KeyThreads(1)

    async def leave(work: Work, scope: trio.CancelScope) -> None:
        with scope:
            await work.ask(threads, "b1")

    async with asked(threads, "a1") as (work, nursery):
        await work.until_begun("a1")
        scope = trio.CancelScope()
        nursery.start_soon(leave, work, scope)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(work.ask, threads, "c1")
        await trio.testing.wait_all_tasks_blocked()
        for act in (scope.cancel, threads._pass_on) if leaves_first else (threads._pass_on, scope.cancel):
            act()  # the latter as the end of "a1" does
        await trio.testing.wait_all_tasks_blocked()
        work.may_end["a1"].set()
        await work.until_begun("a1", "c1")


async def test_work_that_nobody_waits_for_any_more_takes_its_thread_until_it_ends() -> None:
    threads, scope = KeyThreads(1), trio.CancelScope()

    async def leave(work: Work) -> None:
        with scope:
            await work.ask(threads, "a1")

    async with asked(threads) as (work, nursery):
        nursery.start_soon(leave, work)
        await work.until_begun("a1")
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(work.ask, threads, "b1")
        await trio.testing.wait_all_tasks_blocked()
        assert work.begun == ["a1"]
        work.may_end["a1"].set()
        await work.until_begun("a1", "b1")
