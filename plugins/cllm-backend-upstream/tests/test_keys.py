"""Keys before upstreams: one that floods is held to its cap and its part of the queue, and nobody who asks for less waits behind it."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from cllm.testing.live import live_server

WAIT_S = 120.0  # ends a test that hangs
N_CLIENTS = 32


class House:
    """A server before an upstream that answers one request each time it is told to, and clients with keys."""

    def __init__(self, url: str, faulty: Any, clients: ThreadPoolExecutor) -> None:
        self._url = url
        self._clients = clients
        self._turns = threading.Semaphore(0)
        self.faulty = faulty
        faulty.behave = self._answer

    def _answer(self, asked: Any) -> None:
        assert self._turns.acquire(timeout=WAIT_S)
        asked.begin()
        asked.token("so ")
        asked.finish(1)

    def answer(self, n: int = 1) -> None:
        """Let the upstream answer so many."""
        self._turns.release(n)

    def ask(self, key: str) -> Future[tuple[int, Any]]:
        """Ask with a key; what comes is the status and the headers. The upstream sees whose request it is."""
        return self._clients.submit(self._ask, key)

    def _ask(self, key: str) -> tuple[int, Any]:
        body = msgspec.json.encode({"messages": [{"role": "user", "content": key}]})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{self._url}/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                response.read()
                return response.status, response.headers
        except urllib.error.HTTPError as error:
            return error.code, error.headers

    @property
    def came(self) -> list[str]:
        """Whose requests came to the upstream, in order."""
        return [asked.body["messages"][0]["content"] for asked in self.faulty.asked]

    def until(self, n_came: int, n_waiting: int) -> None:
        """Wait until so many have come to the upstream, and so many wait before it."""
        deadline = time.monotonic() + WAIT_S
        while (len(self.faulty.asked), self._n_waiting()) != (n_came, n_waiting):
            assert time.monotonic() < deadline, (self.came, self._n_waiting())
            time.sleep(0.01)

    def _n_waiting(self) -> int:
        request = urllib.request.Request(f"{self._url}/metrics", headers={"Authorization": "Bearer quiet"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            found = re.search(r'^cllm_sequences\{state="waiting"\} (\d+)', response.read().decode(), re.MULTILINE)
        assert found is not None
        return int(found[1])


@pytest.fixture
def open_house(faulty: Any, make_model: Callable[..., Any]) -> Iterator[Callable[..., House]]:
    """Open it with these keys, so many places at the upstream, and other settings by name."""
    opened = []
    with ThreadPoolExecutor(N_CLIENTS) as clients:

        def open_it(*keys: str, parallel: int, **settings: Any) -> House:
            # How long a wait would be is for a server that is measured, and this one is told when to answer.
            server = live_server(make_model(faulty.url, parallel=str(parallel)), api_key=keys, queue_wait_s=1e6, **settings)
            opened.append((server, House(server.__enter__(), faulty, clients)))
            return opened[-1][1]

        yield open_it
        for server, house in opened:
            house.answer(N_CLIENTS)  # or a test that failed would wait for who still asks
            server.__exit__(None, None, None)


def test_a_key_that_floods_fills_its_queue_and_another_is_let_in_and_goes_next(open_house: Callable[..., House]) -> None:
    house = open_house("flood", "quiet", parallel=1, queue_size=4)
    flood = [house.ask("flood")]
    house.until(1, 0)
    flood += [house.ask("flood") for _ in range(4)]
    house.until(1, 4)
    status, headers = house.ask("flood").result(WAIT_S)
    assert (status, "Retry-After" in headers) == (503, True)
    quiet = house.ask("quiet")
    house.until(1, 5)
    house.answer()
    house.until(2, 4)
    assert house.came == ["flood", "quiet"]
    house.answer(5)
    assert [one.result(WAIT_S)[0] for one in (quiet, *flood)] == [200] * 6


def test_a_key_at_its_cap_is_refused_and_leaves_places_to_the_others(open_house: Callable[..., House]) -> None:
    house = open_house("flood cap=2", "quiet", parallel=3)
    flood = [house.ask("flood") for _ in range(2)]
    house.until(2, 0)
    status, headers = house.ask("flood").result(WAIT_S)
    assert (status, "Retry-After" in headers) == (429, True)
    quiet = house.ask("quiet")
    house.until(3, 0)
    assert house.came == ["flood", "flood", "quiet"]
    house.answer(3)
    assert [one.result(WAIT_S)[0] for one in (quiet, *flood)] == [200] * 3


def test_a_key_that_counts_three_times_as_much_has_three_turns_for_the_others_one(open_house: Callable[..., House]) -> None:
    house = open_house("quiet", "small", "great weight=3", parallel=1)
    asked = [house.ask("quiet")]
    house.until(1, 0)
    for n, key in enumerate(["small"] * 8 + ["great"] * 8, 1):
        asked.append(house.ask(key))
        house.until(1, n)
    for n in range(8):
        house.answer()
        house.until(n + 2, 15 - n)
    assert (house.came[1:].count("great"), house.came[1:].count("small")) == (6, 2)
    house.answer(9)
    assert {one.result(WAIT_S)[0] for one in asked} == {200}
