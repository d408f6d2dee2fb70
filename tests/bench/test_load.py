"""The load generator against a server of a few lines: real sockets, no engine."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import trio

from cllm.bench import load, plot, process
from cllm.bench.command import make_order
from cllm.bench.dialect import find_dialect
from cllm.bench.load import N_PIECES_LATE, Progress, closed_loop, open_loop
from cllm.bench.metrics import Goal
from cllm.bench.outputs import check_output
from cllm.bench.target import BenchFailed, Client, Dialect, Target, parse_url
from cllm.bench.workloads import GREEDY, PLAIN, USUAL, Ask, Work, arrivals
from cllm.errors import SettingsError
from cllm.testing.ports import free_port
from cllm.threadtimes import n_cpus

TEST_S = 120.0
Handler: TypeAlias = Callable[[str, dict[str, Any], trio.SocketStream], Awaitable[bool]]  # True keeps the connection


@attrs.define
class Seen:
    """What the server was asked."""

    requests: list[tuple[str, dict[str, Any]]] = attrs.field(factory=list)
    n_connections: int = 0
    n_now: int = 0
    n_now_max: int = 0


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[Target, Seen]]:
    seen = Seen()

    async def connection(stream: trio.SocketStream) -> None:
        seen.n_connections += 1
        async with stream:
            while (request := await read_request(stream)) is not None:
                seen.requests.append(request)
                seen.n_now += 1
                seen.n_now_max = max(seen.n_now_max, seen.n_now)
                kept = await handler(*request, stream)
                seen.n_now -= 1
                if not kept:
                    return

    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, connection, 0, host="127.0.0.1"))
            yield Target(host="127.0.0.1", port=listener.socket.getsockname()[1]), seen
            nursery.cancel_scope.cancel()


async def read_request(stream: trio.SocketStream) -> tuple[str, dict[str, Any]] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        received = await stream.receive_some()
        if not received:
            return None
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    n_body = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
    while len(body) < n_body:
        body += await stream.receive_some()
    return head.split(b" ", 2)[1].decode(), json.loads(body or b"{}")


async def send_page(stream: trio.SocketStream, page: Any, status: str = "200 OK") -> bool:
    body = json.dumps(page).encode()
    await stream.send_all(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return True


async def send_chunk(stream: trio.SocketStream, chunk: Any) -> None:
    data = f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode()
    await stream.send_all(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def usage(body: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}


async def answer(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
    """As many tokens as asked, streamed or not."""
    if path == "/v1/models":
        return await send_page(stream, {"data": [{"id": "m", "meta": {"n_vocab": 999}}]})
    if not body.get("stream"):
        return await send_page(stream, {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage(body)})
    await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(body["max_tokens"]):
        await send_chunk(stream, {"choices": [{"text": "a"}]})
        await trio.lowlevel.checkpoint()
    await send_chunk(stream, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage(body)})
    await send_chunk(stream, "[DONE]")
    await stream.send_all(b"0\r\n\r\n")
    return True


def chains(n: int, n_generated: int = 3, n_turns: int = 1) -> Work:
    return Work(tuple(tuple(Ask(prompt=(i, turn), n_generated=n_generated) for turn in range(n_turns)) for i in range(n)))


async def test_a_closed_loop_sends_all_requests_and_never_more_at_a_time_than_it_may() -> None:
    async with served(answer) as (target, seen):
        progress = Progress()
        done = await closed_loop(Client(target=target, sampling=USUAL, seed=10), chains(12), 3, progress)
    assert sorted(body["prompt"][0] for _, body in seen.requests) == list(range(12))
    assert {body["seed"] for _, body in seen.requests} == set(range(10, 22))
    assert seen.n_now_max <= 3
    assert seen.n_connections <= 3
    assert all(one.is_exact for one in done.answers)
    assert (progress.n_requests, progress.n_ended, progress.n_failed) == (12, 12, 0)


async def test_a_chain_is_asked_in_order_and_answers_stand_at_their_requests_numbers() -> None:
    async with served(answer) as (target, seen):
        work = chains(2, n_turns=3)
        done = await closed_loop(Client(target=target, sampling=GREEDY), work, 2)
    for i in range(2):
        assert [body["prompt"][1] for _, body in seen.requests if body["prompt"][0] == i] == [0, 1, 2]
    assert [one.n_asked for one in done.answers] == [ask.n_generated for ask in work.asks]


async def test_the_late_request_is_sent_when_all_others_are_being_answered() -> None:
    async with served(answer) as (target, seen):
        work = Work(chains(3, n_generated=N_PIECES_LATE + 20).chains, Ask(prompt=(99, 0), n_generated=1))
        done = await closed_loop(Client(target=target, sampling=GREEDY), work, 3)
    assert [body["prompt"][0] for _, body in seen.requests][-1] == 99
    late = done.answers[-1]
    assert all(one.chunks_at[0] <= late.sent_at for one in done.answers[:-1])
    assert late.is_exact


async def test_the_late_request_is_sent_even_if_the_others_fail() -> None:
    async def refuse(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        return await send_page(stream, {"error": {"message": "full"}}, "503 Service Unavailable")

    async with served(refuse) as (target, _):
        done = await closed_loop(Client(target=target, sampling=GREEDY), Work(chains(2).chains, Ask(prompt=(1,), n_generated=1)), 2)
    assert [one.error for one in done.answers] == ["503: full"] * 3


async def test_the_late_request_does_not_wait_for_the_end_of_all_where_one_ends_early() -> None:
    async with served(answer) as (target, _):
        asks = [Ask(prompt=(i, 0), n_generated=n) for i, n in enumerate((3, N_PIECES_LATE + 200))]
        work = Work(tuple((ask,) for ask in asks), Ask(prompt=(9,), n_generated=1))
        done = await closed_loop(Client(target=target, sampling=GREEDY), work, 2)
    assert done.answers[-1].sent_at < done.answers[1].ended_at


async def test_what_came_of_an_answer_that_was_given_up_is_kept() -> None:
    scope, progress = trio.CancelScope(), Progress()

    async def begins_and_hangs(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n_before in range(3):
            await send_chunk(stream, {"choices": [{"text": "x"}]})
            while progress.n_pieces <= n_before:  # noqa: ASYNC110  # what is counted sets no event
                await trio.sleep(0.01)
        scope.cancel()
        await trio.sleep_forever()
        return False

    async with served(begins_and_hangs) as (target, _):
        done = await closed_loop(Client(target=target, sampling=GREEDY), chains(1), 1, progress, scope=scope)
    (given_up,) = done.answers
    assert (len(given_up.chunks_at), given_up.error, given_up.ended_at) == (3, "the pass was over before", 0.0)


async def test_what_is_trusted_is_read_once_for_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    trusted: list[object] = []

    async def refused(_: Target, trust: object) -> None:
        trusted.append(trust)
        raise ConnectionRefusedError

    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(object()) or made[-1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(load, "connect", refused)
    connections = load.Connections(Target(host="x", port=443, is_tls=True))
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            await connections.fetch(b"", lambda _: None)
    assert len(made) == 1
    assert trusted == made * 3


def test_an_error_of_trios_is_told_by_its_reason() -> None:
    error = trio.BrokenResourceError()
    error.__cause__ = ssl.SSLError(1, "certificate verify\nfailed")
    assert "certificate verify failed" in load.fault(error)
    assert load.fault(trio.BrokenResourceError()) == "BrokenResourceError"


async def test_a_connection_that_cannot_be_made_is_told_by_its_reason_once() -> None:
    with pytest.raises(OSError, match="all attempts") as caught:
        await trio.open_tcp_stream("127.0.0.1", free_port())
    assert load.fault(caught.value).endswith(": Connection refused")
    both = OSError("all attempts to connect failed")
    both.__cause__ = ExceptionGroup("", [OSError(24, "Too many open files")] * 2)
    assert load.fault(both) == "all attempts to connect failed: Too many open files"


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    everyone = trio.Event()
    n_here = 0

    async def all_together(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        nonlocal n_here
        n_here += 1
        if n_here == 6:
            everyone.set()
        await everyone.wait()
        return await answer(path, body, stream)

    async with served(all_together) as (target, seen):
        done = await open_loop(Client(target=target, sampling=GREEDY), chains(6), 1000.0, seed=1)
    assert seen.n_now_max == 6
    assert all(one.is_exact for one in done.answers)


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_pass_that_is_cut_keeps_what_has_ended_and_says_of_the_rest_that_it_has_not(is_open: bool) -> None:
    scope, progress = trio.CancelScope(), Progress()

    async def the_last_ones_hang(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if body["prompt"][0] < 3:
            return await answer(path, body, stream)
        while progress.n_ended < 3:  # noqa: ASYNC110  # what is counted sets no event
            await trio.sleep(0.01)
        scope.cancel()
        await trio.sleep_forever()
        return False

    async with served(the_last_ones_hang) as (target, _):
        client = Client(target=target, sampling=GREEDY)
        if is_open:
            done = await open_loop(client, chains(5), 1000.0, seed=1, progress=progress, scope=scope)
        else:
            done = await closed_loop(client, chains(5), 1, progress, scope=scope)
    assert [one.is_exact for one in done.answers] == [True, True, True, False, False]
    assert done.answers[3].error == "the pass was over before"
    assert [one.ended_at > 0 for one in done.answers] == [True, True, True, False, False]


async def test_a_connection_that_was_closed_while_idle_is_replaced_without_a_failure() -> None:
    async def close_after(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        await answer(path, body, stream)
        return False  # without having said so

    async with served(close_after) as (target, seen):
        done = await closed_loop(Client(target=target, sampling=GREEDY), chains(4), 1)
    assert seen.n_connections == 4
    assert all(one.is_exact for one in done.answers)


async def test_a_request_that_was_at_work_on_a_kept_connection_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RACE_S", 0.0)

    async def fall_over(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        return await answer(path, body, stream) if body["prompt"][0] == 0 else False

    async with served(fall_over) as (target, seen):
        done = await closed_loop(Client(target=target, sampling=GREEDY), chains(2), 1)
    assert [bool(one.error) for one in done.answers] == [False, True]
    assert len(seen.requests) == 2


async def test_that_a_request_was_sent_late_counts_as_waiting() -> None:
    late_s = 0.3
    work, rate = chains(2), 1000.0
    async with served(answer) as (target, _), trio.open_nursery() as nursery:

        async def hold_up() -> None:
            time.sleep(late_s)  # noqa: ASYNC251  # as a machine does whose cores others have

        nursery.start_soon(hold_up)
        done = await open_loop(Client(target=target, sampling=GREEDY), work, rate, seed=1)
    assert [one.sent_at for one in done.answers] == list(arrivals(2, rate, 1))
    assert all(one.chunks_at[0] - one.sent_at > late_s / 2 for one in done.answers)


async def test_an_answer_that_is_cut_off_is_a_failure_and_the_others_go_on() -> None:
    async def cut_one(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if body["prompt"][0] != 1:
            return await answer(path, body, stream)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await send_chunk(stream, {"choices": [{"text": "a"}]})
        return False

    async with served(cut_one) as (target, _):
        done = await closed_loop(Client(target=target, sampling=GREEDY), chains(4), 2)
    assert [bool(one.error) for one in done.answers] == [False, True, False, False]
    assert done.answers[1].error == "the server closed the connection in the middle of an answer"


async def test_of_a_refusal_that_is_cut_off_the_status_is_kept() -> None:
    async def cut(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        await stream.send_all(b"HTTP/1.1 503 Busy\r\nContent-Length: 99\r\n\r\nfull")
        return False

    async with served(cut) as (target, _):
        done = await closed_loop(Client(target=target, sampling=GREEDY), chains(1), 1)
    assert (done.answers[0].status, done.answers[0].error) == (503, "the server closed the connection in the middle of an answer")


# --- dialects ----------------------------------------------------------------------------------------------------------


async def test_a_server_that_takes_everything_is_asked_with_token_ids_by_its_models_name() -> None:
    async with served(answer) as (target, _):
        assert await find_dialect(target, endpoint="completions") == Dialect(model="m", n_vocab=999)
        assert (await find_dialect(target, endpoint="completions", model="x")).model == "x"


async def test_a_server_without_token_ids_is_asked_with_text() -> None:
    async def text_alone(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if isinstance(body.get("prompt"), list):
            return await send_page(stream, {"error": {"message": "prompt must be a string"}}, "400 Bad Request")
        return await answer(path, body, stream)

    async with served(text_alone) as (target, seen):
        dialect = await find_dialect(target, endpoint="completions")
        assert (dialect.takes_ids, dialect.takes_extras) == (False, True)
        done = await closed_loop(Client(target=target, dialect=dialect, sampling=GREEDY), chains(1), 1)
    assert isinstance(seen.requests[-1][1]["prompt"], str)
    assert done.answers[0].is_exact


async def test_a_server_that_makes_text_of_token_ids_and_other_tokens_of_that_is_asked_with_text() -> None:
    async def other_tokens(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            n_read = len(prompt) + len(prompt) // 5  # of one it makes one
            return await send_page(stream, {"choices": [{"text": "a"}], "usage": {"prompt_tokens": n_read, "completion_tokens": 1}})
        return await answer(path, body, stream)

    async with served(other_tokens) as (target, _):
        assert not (await find_dialect(target, endpoint="completions")).takes_ids


async def test_comments_of_a_server_are_no_beginning_of_an_answer() -> None:
    async def comments_first(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3 * N_PIECES_LATE):
            await stream.send_all(b"3\r\n:\n\n\r\n")
            await trio.sleep(0.001)
        n_requests.append(len(seen.requests))
        for _ in range(N_PIECES_LATE + 2):
            await send_chunk(stream, {"choices": [{"text": "a"}]})
            await trio.sleep(0.001)
        await stream.send_all(b"0\r\n\r\n")
        return True

    n_requests: list[int] = []
    work = Work(chains=((Ask(prompt=(1,), n_generated=10),),), late=Ask(prompt=(2,), n_generated=10))
    async with served(comments_first) as (target, seen):
        await closed_loop(Client(target=target, sampling=GREEDY), work, 1)
    assert n_requests == [1, 2], "the late one was not there while nothing was told"


async def test_a_server_that_knows_openais_fields_alone_gets_no_others() -> None:
    async def strict(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if unknown := set(body) & {"ignore_eos", "top_k", "min_p"}:
            return await send_page(stream, {"error": {"message": f"unknown: {unknown}"}}, "400 Bad Request")
        return await send_page(stream, {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})

    async with served(strict) as (target, seen):
        dialect = await find_dialect(target, endpoint="chat")
        client = Client(target=target, dialect=dialect, endpoint="chat", sampling=USUAL, is_stream=False)
        done = await closed_loop(client, chains(1, n_generated=1), 1)
    assert seen.requests[-1][0] == "/v1/chat/completions"
    assert seen.requests[-1][1]["top_p"] == 0.95
    assert done.answers[0].is_exact


@pytest.mark.parametrize("names", [*itertools.permutations(("max_tokens", "temperature", "top_p", "seed"))], ids="-".join)
async def test_a_model_that_reasons_is_asked_in_the_words_that_it_takes_in_whatever_order_it_names_others(names: tuple[str, ...]) -> None:
    async def reasoning(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        for name in ("ignore_eos", *names):
            if name in body:
                return await send_page(stream, {"error": {"message": f"Unsupported parameter: '{name}'"}}, "400 Bad Request")
        return await send_page(stream, {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})

    async with served(reasoning) as (target, seen):
        dialect = await find_dialect(target, endpoint="chat", sampling=USUAL)
        client = Client(target=target, dialect=dialect, endpoint="chat", sampling=USUAL, is_stream=False)
        done = await closed_loop(client, chains(1, n_generated=1), 1)
    assert (dialect.limit, {*dialect.refused}) == ("max_completion_tokens", {"temperature", "top_p"})
    assert not dialect.takes_seed
    assert seen.requests[-1][1]["max_completion_tokens"] == 1
    assert done.answers[0].is_exact


async def test_a_model_that_thinks_for_longer_than_one_token_was_understood() -> None:
    told = "Could not finish the message because max_tokens or model output limit was reached. Please try again with higher max_tokens."

    async def thinking(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if "ignore_eos" in body or "max_tokens" in body:
            name = "ignore_eos" if "ignore_eos" in body else "max_tokens"
            return await send_page(stream, {"error": {"message": f"Unsupported parameter: '{name}'"}}, "400 Bad Request")
        return await send_page(stream, {"error": {"message": told}}, "400 Bad Request")

    async with served(thinking) as (target, _):
        dialect = await find_dialect(target, endpoint="chat", sampling=USUAL)
    assert (dialect.limit, dialect.takes_extras, dialect.takes_usage) == ("max_completion_tokens", False, True)


@pytest.mark.parametrize("refused", ["top_k", "top_p", "min_p"])
async def test_a_sampling_field_that_is_refused_costs_that_one_alone_and_is_found_before_the_pass(refused: str) -> None:
    async def strict(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if refused in body:
            return await send_page(stream, {"error": {"message": f"{refused} must be something else"}}, "400 Bad Request")
        return await answer(path, body, stream)

    async with served(strict) as (target, seen):
        dialect = await find_dialect(target, endpoint="completions", sampling=PLAIN)
        client = Client(target=target, dialect=dialect, sampling=PLAIN)
        done = await closed_loop(client, chains(1), 1)
    assert (dialect.refused, dialect.takes_extras, client.sampling_left_out) == ((refused,), True, [refused])
    assert {"ignore_eos", "temperature"} <= set(seen.requests[-1][1])
    assert done.answers[0].is_exact


@pytest.mark.parametrize("taken", [0, -1])
async def test_servers_differ_in_the_top_k_that_cuts_nothing_off(taken: int) -> None:
    async def strict(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if body.get("top_k", taken) != taken:
            return await send_page(stream, {"error": {"message": f"top_k must be {taken} or more"}}, "400 Bad Request")
        return await answer(path, body, stream)

    async with served(strict) as (target, seen):
        dialect = await find_dialect(target, endpoint="completions", sampling=PLAIN)
        done = await closed_loop(Client(target=target, dialect=dialect, sampling=PLAIN), chains(1), 1)
    assert (dialect.refused, seen.requests[-1][1]["top_k"]) == ((), taken)
    assert done.answers[0].is_exact


@pytest.mark.parametrize("refused", ["seed", "stream_options"])
async def test_a_server_that_forbids_a_field_is_asked_without_it(refused: str) -> None:
    async def strict(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if refused in body:
            page = {"detail": [{"loc": ["body", refused], "msg": "extra inputs are not permitted"}]}
            return await send_page(stream, page, "422 Unprocessable Entity")
        return await answer(path, body, stream)

    async with served(strict) as (target, seen):
        dialect = await find_dialect(target, endpoint="completions", sampling=USUAL)
        done = await closed_loop(Client(target=target, dialect=dialect, sampling=USUAL), chains(1), 1)
    assert (dialect.takes_seed, dialect.takes_usage) == (refused != "seed", refused != "stream_options")
    assert refused not in seen.requests[-1][1]
    assert done.answers[0].is_exact


async def test_no_seed_is_sent_where_it_would_change_nothing() -> None:
    async with served(answer) as (target, seen):
        await closed_loop(Client(target=target, sampling=GREEDY), chains(1), 1)
    assert "seed" not in seen.requests[0][1]


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error"])
async def test_whatever_a_server_that_reads_text_alone_says_of_ids_it_is_asked_with_text(status: str) -> None:
    async def simple(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if isinstance(body.get("prompt"), list):
            return await send_page(stream, {"error": "'list' object has no attribute 'strip'"}, status)
        return await answer(path, body, stream)

    async with served(simple) as (target, _):
        assert not (await find_dialect(target, endpoint="completions")).takes_ids


async def test_an_endpoint_that_is_not_there_is_told() -> None:
    async def without(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        return await send_page(stream, {"error": "no such path"}, "404 Not Found")

    async with served(without) as (target, _):
        with pytest.raises(BenchFailed, match="answers completions with 404: no such path"):
            await find_dialect(target, endpoint="completions")


async def test_a_server_that_takes_ids_but_openais_fields_alone_is_asked_with_ids() -> None:
    async def strict(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if "ignore_eos" in body:
            return await send_page(stream, {"error": {"message": "unknown: ignore_eos"}}, "400 Bad Request")
        return await answer(path, body, stream)

    async with served(strict) as (target, _):
        dialect = await find_dialect(target, endpoint="completions")
    assert (dialect.takes_ids, dialect.takes_extras) == (True, False)


async def test_an_error_with_status_200_is_no_answer() -> None:
    async def polite(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if isinstance(body.get("prompt"), list):
            return await send_page(stream, {"error": {"message": "prompt must be a string"}})
        return await answer(path, body, stream)

    async with served(polite) as (target, _):
        assert not (await find_dialect(target, endpoint="completions")).takes_ids


async def test_a_path_may_stand_in_the_place_of_v1() -> None:
    async def elsewhere(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if not path.startswith("/api/v4/c"):
            return await send_page(stream, {"error": {"message": "no such path"}}, "404 Not Found")
        return await answer(path, body, stream)

    async with served(elsewhere) as (target, seen):
        target = attrs.evolve(target, path="/api/v4")
        dialect = await find_dialect(target, endpoint="completions")
        done = await closed_loop(Client(target=target, dialect=dialect, sampling=GREEDY), chains(1), 1)
    assert seen.requests[-1][0] == "/api/v4/completions"
    assert done.answers[0].is_exact


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found", "503 Service Unavailable"])
async def test_a_refusal_is_told_in_one_line(status: str) -> None:
    async def refuse(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        return await send_page(stream, {"error": {"message": "not\nso"}}, status)

    async with served(refuse) as (target, _):
        with pytest.raises(BenchFailed, match=f"{status[:3]}: not so$"):
            await find_dialect(target, endpoint="completions")


async def test_where_a_server_says_that_it_is_elsewhere_this_is_told() -> None:
    async def move(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        await stream.send_all(b"HTTP/1.1 301 Moved\r\nLocation: https://elsewhere/v1\r\nContent-Length: 0\r\n\r\n")
        return True

    async with served(move) as (target, _):
        with pytest.raises(BenchFailed, match=r"completions with 301: it is at https://elsewhere/v1$"):
            await find_dialect(target, endpoint="completions")


async def test_a_server_that_does_not_tell_its_vocabulary_and_has_a_small_one_is_asked_with_text() -> None:
    n_vocab = 20_000

    async def small(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if path == "/v1/models":
            return await send_page(stream, {"data": [{"id": "m"}]})
        if any(isinstance(token, int) and token >= n_vocab for token in body["prompt"]):
            return await send_page(stream, {"error": {"message": "no such token"}}, "400 Bad Request")
        return await answer(path, body, stream)

    async with served(small) as (target, _):
        assert not (await find_dialect(target, endpoint="completions")).takes_ids


async def test_a_key_that_may_not_list_models_is_good_for_a_model_that_is_named() -> None:
    async def only_answers(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if path.endswith("/models"):
            return await send_page(stream, {"error": {"message": "missing scopes"}}, "403 Forbidden")
        return await answer(path, body, stream)

    async with served(only_answers) as (target, _):
        assert (await find_dialect(target, endpoint="completions", model="named")).model == "named"
        with pytest.raises(BenchFailed, match="403: missing scopes"):
            await find_dialect(target, endpoint="completions")


# --- the command -------------------------------------------------------------------------------------------------------


async def bench(target: Target, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "cllm", "bench", target.url, *arguments]
    return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)


async def test_the_command_prints_a_table() -> None:
    async with served(answer) as (target, _):
        done = await bench(target, "-n", "3", "-c", "2")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [line.strip().rsplit("  ", 1) for line in done.stdout.decode().splitlines()[1:]]
    figures = {line[0].strip(): line[1].strip() for line in lines if len(line) == 2}  # below the table there may be a warning
    assert (figures["requests"], figures["failed"], figures["with exactly the asked tokens"]) == ("3", "0", "3")
    assert (figures["prompt tokens"], figures["generated tokens"]) == ("96", "150")
    assert figures["process of these two"] == process.name_of(os.getpid())  # the server is this one


async def test_the_command_prints_json_where_it_is_asked_to_and_the_table_elsewhere() -> None:
    async with served(answer) as (target, _):
        done = await bench(target, "-n", "2", "--json", "-", "--seed", "5", "--api-key", "k", "--no-stream")
    page = json.loads(done.stdout)
    assert b"generated tokens/s" in done.stderr
    assert (page["settings"]["seed"], page["settings"]["stream"]) == (5, False)
    (one,) = page["passes"]
    assert [request["n_generated"] for request in one["requests"]] == [50, 50]
    assert "k" not in page["settings"].values()
    assert page["settings"]["dialect"]["takes_ids"]
    assert (page["machine"]["n_cores"], page["machine"]["python"]) == (n_cpus(), platform.python_version())
    assert abs(datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(page["date"])) < datetime.timedelta(hours=1)


async def test_the_command_says_what_it_could_not_ask() -> None:
    async def strict(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if isinstance(body.get("prompt"), list) or "ignore_eos" in body:
            return await send_page(stream, {"error": {"message": "what?"}}, "400 Bad Request")
        return await answer(path, body, stream)

    async with served(strict) as (target, _):
        done = await bench(target, "-n", "1", "--json", "-", "--sampling", "usual")
    assert b"prompts are words" in done.stderr
    assert b"ignore_eos is not taken" in done.stderr
    assert b"not taken: top_k, min_p: tokens are drawn by the server's own values of these" in done.stderr
    assert json.loads(done.stdout)["settings"]["dialect"]["takes_extras"] is False


async def test_how_far_a_pass_is_can_be_seen_while_it_runs() -> None:
    seen, is_seen, screen = bytearray(), trio.Event(), os.openpty()

    async def look() -> None:
        while True:
            await trio.lowlevel.wait_readable(screen[0])
            seen.extend(os.read(screen[0], 65536))
            if b"0/2" in seen and b"seed-40x8" in seen:
                is_seen.set()

    async def when_seen(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        if body.get("max_tokens") == 50:
            await is_seen.wait()
        return await answer(path, body, stream)

    async with served(when_seen) as (target, _), trio.open_nursery() as nursery:
        nursery.start_soon(look)
        command = [sys.executable, "-m", "cllm", "bench", target.url, "-n", "2"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        done = await trio.run_process(command, capture_stdout=True, stderr=screen[1], env=environment)
        nursery.cancel_scope.cancel()
    for end in screen:
        os.close(end)
    assert b"generated tokens/s" in done.stdout


async def test_the_command_draws_how_long_requests_took(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    async with served(answer) as (target, _):
        done = await bench(target, "-n", "2", "--plot", str(tmp_path / "plot.svg"))
    assert done.returncode == 0
    drawn = (tmp_path / "plot.svg").read_text("utf-8")
    assert [name for name in ("to the first text, ms", "between texts, ms", "whole answer, ms", "seed-40x8") if name not in drawn] == []


@pytest.mark.parametrize(
    ("gaps_s", "left_ms"),
    [([0.0, 0.0002, 0.0003, 0.0004], 0.2), ([0.00001] * 2 + [0.02] * 30, 1.0), ([0.02, 0.03], 1.0), ([0.0001] * 4, 0.1)],
)
def test_gaps_are_drawn_from_a_millisecond_on_or_from_where_most_begin(
    monkeypatch: pytest.MonkeyPatch, gaps_s: list[float], left_ms: float
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    figures: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: figures.append(figure))
    plot.plot_latency({"one": {"ttft_s": [0.1, 0.2], "itl_s": gaps_s, "e2e_s": [0.3, 0.4]}}, "x.svg")
    left, right = figures[0].axes[1].get_xlim()
    assert left == pytest.approx(left_ms)
    assert left < right
    plot.pyplot().close(figures[0])


async def test_overload_is_a_pass_for_capacity_and_one_for_each_part_of_it() -> None:
    async with served(answer) as (target, _):
        done = await bench(target, "--workload", "overload", "-n", "4", "--json", "-")
    capacity, *passes = json.loads(done.stdout)["passes"]
    assert [one["name"] for one in (capacity, *passes)] == ["capacity", "0.5 x", "1 x", "2 x", "4 x"]
    assert capacity["rate"] is None
    assert [one["rate"] for one in passes] == [factor * capacity["requests_per_s"] for factor in (0.5, 1.0, 2.0, 4.0)]
    for one in passes:
        assert one["arrived_per_s"] == pytest.approx(4 / max(asked["sent_at"] for asked in one["requests"]))


async def test_a_server_that_answers_nobody_is_one_line_and_exit_code_1() -> None:
    n_asked = 0

    async def answers_once(path: str, body: dict[str, Any], stream: trio.SocketStream) -> bool:
        nonlocal n_asked
        n_asked += path != "/v1/models"
        return await (answer(path, body, stream) if n_asked < 2 else send_page(stream, {"error": {"message": "full"}}, "503 Busy"))

    async with served(answers_once) as (target, _):
        done = await bench(target, "-n", "2")
    assert done.returncode == 1
    assert done.stderr.decode() == "cllm: no request was answered: 503: full\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--json", "/tmp"), "--json: /tmp is a folder"),
        (("--plot", "/tmp"), "--plot: /tmp is a folder"),
        (("--json", "/nowhere/a.json"), "--json: cannot write into /nowhere"),
        (("--api-key", "ключ"), "--api-key: must be of printable ASCII characters"),
    ],
)
async def test_what_cannot_be_kept_or_sent_is_told_before_anything_is_measured(options: tuple[str, ...], told: str) -> None:
    done = await bench(Target(host="127.0.0.1", port=9), *options)
    assert done.returncode == 2
    assert told in done.stderr.decode()


async def test_a_plot_that_is_no_svg_is_told_of_before_anything_is_measured(tmp_path: Path) -> None:
    done = await bench(Target(host="127.0.0.1", port=9), "--plot", str(tmp_path / "x.png"))
    assert done.returncode == 1
    assert "plots are drawn as SVG, so name it .svg" in done.stderr.decode()


@pytest.mark.skipif(not process.PROC.exists(), reason="processes are read from /proc")
async def test_a_server_on_this_machine_is_found_by_its_port() -> None:
    async with served(answer) as (target, _):
        assert process.listening_pid(target.port) == os.getpid()
    assert process.listening_pid(target.port) is None
    assert process.tree(os.getpid())[0] == os.getpid()
    assert (process.cpu_s(os.getpid()) or 0) > 0
    assert (process.rss_peak_mb(os.getpid()) or 0) >= (process.anonymous_mb(os.getpid()) or 0) > 1


@pytest.mark.skipif(not process.PROC.exists(), reason="processes are read from /proc")
def test_a_process_whose_name_is_no_text_costs_nobody_the_measurement() -> None:
    rename = "import sys; open('/proc/self/comm', 'wb').write(b'x\\xd0'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process.tree(os.getpid())
        assert (process.rss_peak_mb(child.pid) or 0) > 0


def test_what_is_there_may_be_written_whatever_its_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.touch()
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) == there)
    check_output("json", str(there))
    with pytest.raises(SettingsError, match="--json: cannot write into"):
        check_output("json", str(gone))
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) == tmp_path)
    check_output("json", str(gone))
    with pytest.raises(SettingsError, match=r"--json: cannot write .*there$"):
        check_output("json", str(there))


def test_a_file_in_the_place_of_a_folder_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"--json: cannot write into .*a\.json"):
        check_output("json", str(tmp_path / "a.json" / "b.json"))


def test_a_folder_that_may_not_be_looked_into_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: object, **_: Any) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SettingsError, match="--json: cannot write into /closed"):
        make_order(
            "http://h",
            workload="seed-40x8",
            concurrency=None,
            n_requests=None,
            rate=None,
            endpoint="chat",
            api_key=None,
            model=None,
            seed=1,
            sampling="greedy",
            is_stream=True,
            goal=Goal(),
            json_path="/closed/a.json",
            plot_path=None,
        )


# --- what is sent ------------------------------------------------------------------------------------------------------


def test_cuts_are_named_where_tokens_are_drawn_by_chance_alone() -> None:
    target, ask = Target(host="h", port=1), Ask(prompt=(1,), n_generated=2)
    bodies = [json.loads(Client(target=target, sampling=one).request(ask, 0).partition(b"\r\n\r\n")[2]) for one in (GREEDY, USUAL)]
    assert "min_p" not in bodies[0]
    assert {name: bodies[1][name] for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.0,
    }


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("localhost", Target(host="localhost", port=80)),
        ("127.0.0.1:8080/v1/", Target(host="127.0.0.1", port=8080)),
        ("https://api.example.org/v1", Target(host="api.example.org", port=443, is_tls=True)),
        ("http://[::1]:9/llm/v1", Target(host="::1", port=9, path="/llm")),
    ],
)
def test_an_address_may_leave_out_what_is_usual(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize("url", ["http://api..example.org", f"http://{64 * 'a'}.org", "http://h:0", "http://h:99999", "ftp://h", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an address as in"):
        parse_url(url)


@pytest.mark.parametrize("url", ["http://h/v1?api-version=1", "http://someone:secret@h/v1", "http://h/v1#top"])
def test_what_would_not_be_sent_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="only a path may stand"):
        parse_url(url)


def test_a_key_goes_into_the_header_and_never_into_a_repr() -> None:
    target = parse_url("localhost:1", "secret")
    assert b"\r\nAuthorization: Bearer secret\r\n" in target.head("GET", "/v1/models")
    assert b"\r\nUser-Agent: cllm-bench/" in target.head("GET", "/v1/models")
    assert "secret" not in repr(target)
