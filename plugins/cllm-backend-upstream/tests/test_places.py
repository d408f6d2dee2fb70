"""Places at upstreams: no more at once than there are, in the order in which they came, and nobody waits behind what is of no use to it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from cllm.backend import ModelSpec, StreamChat, StreamEnd, StreamEvent, StreamRequest
from cllm_backend_upstream.failures import Broken, Busy, Unreachable
from cllm_backend_upstream.options import options_of
from cllm_backend_upstream.places import Places
from cllm_backend_upstream.pool import Pool, Upstream

WAIT_S = 120.0  # ends a test that hangs


class House:
    """Two upstreams with a place each, and who has got one, or None, in order."""

    def __init__(self, nursery: trio.Nursery, urls: Sequence[str] = ("a", "b")) -> None:
        self.pool = Pool(urls, 1)
        self.places = Places(self.pool)
        self.got: list[tuple[str, str | None]] = []
        self._nursery = nursery
        self._scopes: dict[str, trio.CancelScope] = {}

    async def come(self, *names: str, tried: Sequence[Upstream] = ()) -> None:
        """Let them ask for places one after the other, and see who gets one."""
        for name in names:
            self._scopes[name] = trio.CancelScope()
            self._nursery.start_soon(self._hold, name, tried)
            await wait_all_tasks_blocked()

    def leave(self, name: str) -> None:
        self._scopes[name].cancel()

    async def _hold(self, name: str, tried: Sequence[Upstream]) -> None:
        with self._scopes[name]:
            async with self.places.place(tried) as upstream:
                self.got.append((name, upstream and upstream.url))
                if upstream is not None:
                    await trio.sleep_forever()

    def end(self) -> None:
        assert self.places.n_waiting == 0
        self._nursery.cancel_scope.cancel()


async def test_no_more_get_one_than_there_are_and_the_next_is_who_came_first() -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery)
        await house.come("1", "2", "3", "4")
        assert (house.got, house.places.n_waiting) == ([("1", "a"), ("2", "b")], 2)
        house.leave("2")
        await wait_all_tasks_blocked()
        house.leave("1")
        await wait_all_tasks_blocked()
        assert house.got[2:] == [("3", "b"), ("4", "a")]
        house.end()
    assert [one.n_live for one in house.pool.upstreams] == [0, 0]


async def test_who_waits_for_another_upstream_holds_up_nobody() -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery)
        await house.come("1", "2")
        await house.come("3", tried=house.pool.upstreams[:1])
        await house.come("4")
        house.leave("1")
        await wait_all_tasks_blocked()
        assert house.got[2:] == [("4", "a")]
        house.leave("2")
        await wait_all_tasks_blocked()
        assert house.got[3:] == [("3", "b")]
        house.end()


async def test_who_leaves_while_waiting_is_passed_over() -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery, ["a"])
        await house.come("1", "2", "3")
        house.leave("2")
        await wait_all_tasks_blocked()
        house.leave("1")
        await wait_all_tasks_blocked()
        assert house.got[1:] == [("3", "a")]
        house.end()


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_place_that_is_given_to_one_that_leaves_is_the_next_ones(leaves_first: bool) -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery, ["a"])
        (upstream,) = house.pool.upstreams
        upstream.n_live = 1
        await house.come("1", "2")
        if leaves_first:
            house.leave("1")  # it has not heard of it when the place is free
        upstream.n_live = 0
        house.places.settle()
        if not leaves_first:
            house.leave("1")  # nor of its place
        await wait_all_tasks_blocked()
        assert house.got[-1] == ("2", "a")
        assert upstream.n_live == 1
        house.end()


async def test_nobody_waits_for_one_that_is_not_to_be_asked_any_more() -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery, ["a"])
        await house.come("1", "2")
        house.pool.upstreams[0].failed(Unreachable("no"), trio.current_time())
        house.places.settle()
        await wait_all_tasks_blocked()
        assert house.got[1:] == [("2", None)]
        house.end()


async def test_one_that_begins_to_rest_while_somebody_waits_is_asked_when_it_has_rested(mock_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery)
        await house.come("1", "2", "3")
        house.pool.upstreams[1].failed(Busy(429, 2.0), trio.current_time())
        house.leave("2")
        await wait_all_tasks_blocked()
        assert (house.got[2:], house.places.n_waiting) == ([], 1)
        mock_clock.jump(2.5)
        await wait_all_tasks_blocked()
        assert house.got[2:] == [("3", "b")]
        house.end()


async def test_one_that_has_rested_is_asked_while_the_other_is_full(mock_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        house = House(nursery)
        house.pool.upstreams[1].failed(Busy(429, 30.0), trio.current_time())
        await house.come("1", "2")
        for got in ([("1", "a")], [("1", "a"), ("2", "b")]):
            mock_clock.jump(20.0)
            await wait_all_tasks_blocked()
            assert house.got == got
        house.end()


def test_one_that_failed_is_asked_rather_than_waited_for_the_other() -> None:
    pool = Pool(["a", "b"], 2)
    first, second = pool.upstreams
    first.failed(Broken("no"), now=0.0)
    second.n_live = 1
    assert pool.choose(0.5) is second
    second.n_live = 2
    assert pool.choose(0.5) is first


@pytest.mark.parametrize(
    ("n_live", "parallel", "n_places", "n_live_max"),
    [(None, None, 64, 128), (None, "3", 3, 6), (10, None, 64, 10), (501, None, 251, 501), (5, "3", 3, 5), (501, "3", 3, 6)],
)
def test_how_many_places_there_are(n_live: int | None, parallel: str | None, n_places: int, n_live_max: int) -> None:
    options = options_of(ModelSpec(path="http://a,http://b", n_live=n_live, options={"parallel": parallel} if parallel else {}))
    assert (options.n_places, options.n_live_max) == (n_places, n_live_max)


def test_with_one_upstream_down_the_other_has_no_more_than_its_own(make_faulty: Any, make_model: Any) -> None:
    gone, here = make_faulty(), make_faulty()
    turns = threading.Semaphore(0)

    def behave(asked: Any) -> None:
        assert turns.acquire(timeout=WAIT_S)
        asked.begin()
        asked.token("so ")
        asked.finish(1)

    here.behave = behave
    model = make_model(gone.url, here.url, parallel="1", health_s="60", connect_s="5")
    ends: queue.Queue[StreamEvent] = queue.Queue()
    model.open(lambda event: ends.put(event) if isinstance(event, StreamEnd) else None)
    gone.stop()
    request = StreamRequest(chat=StreamChat(messages=[{"role": "user", "content": "hello"}]))
    for seq_id in range(3):
        model.start(seq_id, request)
    deadline = time.monotonic() + WAIT_S
    while (model.places.n_waiting, len(here.asked)) != (2, 1):
        assert time.monotonic() < deadline, (model.places.n_waiting, here.asked)
        time.sleep(0.01)
    turns.release(3)
    assert {ends.get(timeout=WAIT_S).error for _ in range(3)} == {""}  # type: ignore[union-attr]
    assert len(here.asked) == 3
