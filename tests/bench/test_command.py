"""`cllm bench` as a whole: what it measures, and what is left of it when it is ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import trio
import trio.testing

from cllm.bench.answers import OVER
from cllm.bench.command import Interruption, Order, _measure, make_order
from cllm.bench.metrics import Goal
from cllm.bench.show import rows
from tests.bench.test_load import answer, send_chunk, served


def order(port: int, workload: str = "seed-40x8", **fields: Any) -> Order:
    usual: dict[str, Any] = {
        "concurrency": 2, "n_requests": 4, "rate": None, "endpoint": "completions", "api_key": None, "model": None, "seed": 1,
        "sampling": "greedy", "is_stream": True, "goal": Goal(), "json_path": None, "plot_path": None,
    }  # fmt: skip
    return make_order(f"http://127.0.0.1:{port}", workload=workload, **{**usual, **fields})


async def test_a_pass_that_is_not_ended_has_all_its_answers() -> None:
    async with served(answer) as (target, _):
        _, (measured,) = await _measure(order(target.port), Interruption())
    assert (measured.title, measured.summary.n_requests, measured.summary.n_failed) == ("seed-40x8", 4, 0)


@pytest.mark.parametrize(("n_answered", "titles"), [(0, []), (3, ["capacity, cut short"]), (6, ["capacity", "0.5 x, cut short"])])
async def test_what_was_answered_before_a_signal_is_kept(n_answered: int, titles: list[str]) -> None:
    async def answer_some(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        nonlocal n_begun, n_ended
        is_probe = body.get("max_tokens", 0) <= 1 or not body.get("stream")
        n_begun += not is_probe
        if n_begun > n_answered:
            if n_begun == n_answered + 1:
                while n_ended < n_answered:  # noqa: ASYNC110 - of others that may be under way
                    await trio.sleep(0.001)
                await trio.testing.wait_all_tasks_blocked(0.02)  # the client has noted their ends
                signal.raise_signal(signal.SIGTERM)
            await trio.sleep_forever()
        kept = await answer(path, body, stream)
        n_ended += not is_probe
        return kept

    n_begun, n_ended, interruption = 0, 0, Interruption()
    async with served(answer_some) as (target, _):
        _, measured = await _measure(order(target.port, "overload", concurrency=1), interruption)
    assert interruption.number == signal.SIGTERM
    assert [one.title for one in measured] == titles
    assert sum(one.summary.n_requests for one in measured) == n_answered
    assert not any(one.summary.n_failed for one in measured)


async def test_of_a_pass_that_is_cut_those_who_waited_in_vain_are_not_good_and_tokens_under_way_count() -> None:
    n_answered, n_silent, n_said, n_generated, goal = 2, 3, 2, 50, Goal(ttft_s=0.5)

    async def answer_some(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        nonlocal n_begun
        if body.get("max_tokens", 0) <= 1 or not body.get("stream"):
            return await answer(path, body, stream)
        n_begun += 1
        if n_begun <= n_answered:
            return await answer(path, body, stream)
        if n_begun == n_answered + 1:  # one is told something, and no end
            await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(n_said):
                await send_chunk(stream, {"choices": [{"text": "a"}]})
        if n_begun == n_answered + 1 + n_silent:
            await trio.sleep(2 * goal.ttft_s)
            signal.raise_signal(signal.SIGTERM)
        await trio.sleep_forever()
        return False

    n_begun = 0
    async with served(answer_some) as (target, _):
        asked = order(target.port, rate=100.0, concurrency=None, n_requests=n_answered + 1 + n_silent, goal=goal)
        _, (measured,) = await _measure(asked, Interruption())
    summary = measured.summary
    assert (summary.n_requests, summary.n_failed, summary.n_under_way) == (n_answered + n_silent, n_silent, 1)
    assert summary.failures == {OVER: n_silent}
    assert summary.goodput_share <= n_answered / (n_answered + n_silent)
    assert summary.n_generated == n_answered * n_generated + n_said
    assert summary.tokens_per_s * summary.wall_s == pytest.approx(summary.n_generated)
    assert rows(summary)["under way when it was cut"] == "1"


async def test_a_second_signal_does_not_wait() -> None:
    async def listen_on() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Interruption(number=signal.SIGINT).listen)
            await trio.testing.wait_all_tasks_blocked()
            signal.raise_signal(signal.SIGINT)

    with pytest.RaisesGroup(KeyboardInterrupt):
        await listen_on()
