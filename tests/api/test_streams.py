"""Streams when things go wrong: clients that leave, models that fail, silence."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import trio
import trio.testing

from cllm.api.connection import N_LOOKS
from cllm.api.errors import openai_shape
from cllm.api.sse import N_EVENTS_AT_ONCE, SseBody
from cllm.engine.events import Delta, Failed
from cllm.engine.sequence import Phase
from cllm.errors import GenerationFailed
from cllm.testing.fake import FakeModel
from tests.api.conftest import TEST_S, failing

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2000}
COMPLETION = {"prompt": "hello", "max_tokens": 2000}
TIMEOUT_S = PING_S = 10.0  # of a slow clock
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/generate", COMPLETION)]


def held_until(event: threading.Event) -> None:
    assert event.wait(TEST_S)


def slow(batch: Any) -> float:
    return 0.002


def streaming(body: Any) -> bytes:
    return json.dumps({**body, "stream": True}).encode()


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_the_middle_ends_its_generation(serve: Any, path: str, body: Any, stream: bool) -> None:
    async with serve(FakeModel(step_s=slow)) as api:
        async with api.asking(path, json.dumps({**body, "stream": stream}).encode()) as exchange:
            if stream:
                await exchange.receive()
            await api.until(lambda: api.scheduler.totals.n_generated > 5)
            exchange.leave()
        await api.idle()
        assert api.scheduler.totals.n_generated < 1000
        assert api.scheduler.totals.n_cancelled == 1


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_is_never_computed(serve: Any, path: str, body: Any, stream: bool) -> None:
    async with serve(FakeModel(step_s=slow), parallel=1) as api:
        async with api.asking("/v1/completions", streaming(COMPLETION)) as first:
            await api.until(lambda: api.scheduler.n_running == 1)
            async with api.asking(path, json.dumps({**body, "stream": stream}).encode()) as exchange:
                await api.until(lambda: api.scheduler.n_waiting == 1)
                exchange.leave()
            await api.until(lambda: api.scheduler.n_waiting == 0)
            assert api.scheduler.n_running == 1
            first.leave()
        await api.idle()
        assert api.scheduler.totals.n_prompt_tokens == 6  # the first one's alone


async def test_a_client_that_leaves_before_its_stream_has_begun_leaves_nothing(serve: Any) -> None:
    """The response exists, its body was never asked for anything: no generator's `finally` would run."""
    async with serve(FakeModel(step_s=slow)) as api:

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            gone.set()  # at the response's very start
            await trio.sleep_forever()

        gone = trio.Event()
        messages = [{"type": "http.request", "body": json.dumps({**COMPLETION, "stream": True}).encode(), "more_body": False}]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": [], "http_version": "1.1",
            "scheme": "http", "root_path": "", "raw_path": b"/v1/completions", "asgi": {}, "extensions": {},
        }  # fmt: skip
        await api.app(scope, receive, send)
        await api.idle()
        assert api.scheduler.totals.n_cancelled == 1


async def test_all_choices_end_when_the_client_leaves(serve: Any) -> None:
    async with serve(FakeModel(step_s=slow)) as api:
        async with api.asking("/v1/chat/completions", streaming({**CHAT, "n": 5})) as exchange:
            await exchange.receive()
            exchange.leave()
        await api.idle()
        assert api.scheduler.totals.n_cancelled == 5


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_is_a_status(serve: Any, stream: bool) -> None:
    async with serve(failing(0)) as api:
        answer = await api.chat(stream=stream)
        assert (answer.status, answer.error["type"], answer.error["code"]) == (500, "server_error", "step_failed")
        assert answer.headers["x-should-retry"] == "false"
        native = await api.post("/generate_stream" if stream else "/generate", {"prompt": "x"})
        assert (native.status, native.json["success"]) == (500, False)
        assert b"fan" not in answer.body + native.body
        await api.idle()


async def test_a_failure_after_it_is_an_event_and_then_nothing(serve: Any) -> None:
    async with serve(failing(4)) as api:
        answer = await api.chat(stream=True)
        assert answer.status == 200
        assert "".join(choice["delta"].get("content", "") for chunk in answer.chunks[:-1] for choice in chunk["choices"])
        assert answer.chunks[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in answer.lines
        await api.idle()


async def test_it_is_in_the_first_cllms_shape_on_its_own_stream(serve: Any) -> None:
    async with serve(failing(4)) as api:
        answer = await api.post("/generate_stream", {"prompt": "x"})
    assert answer.chunks[-1] == {"success": False, "error": "the model failed on this request"}
    assert answer.chunks[0]["done"] is False


async def test_a_failure_in_a_whole_answer_is_a_status_however_late(serve: Any) -> None:
    async with serve(failing(4)) as api:
        assert (await api.chat()).status == 500
        await api.idle()


async def test_a_mistake_of_ours_in_a_stream_is_an_event_too(serve: Any, monkeypatch: Any) -> None:
    async with serve() as api:
        monkeypatch.setattr("cllm.api.openai.chat.ChatStream.delta", lambda *a: 1 / 0)
        answer = await api.chat(stream=True)
        assert answer.chunks[-1]["error"]["type"] == "server_error"
        assert b"division" not in answer.body
        await api.idle()


async def answer_when_its_time_is_over(api: Any, body: Any, slow_clock: trio.testing.MockClock) -> Any:
    """The answer to a chat request whose `TIMEOUT_S` pass after some tokens."""
    n_before = api.scheduler.totals.n_generated
    async with api.asking("/v1/chat/completions", json.dumps({**CHAT, **body}).encode()) as exchange:
        await api.until(lambda: api.scheduler.totals.n_generated > n_before + 3)
        slow_clock.jump(TIMEOUT_S)
        return await exchange.answer()


async def test_a_deadline_before_the_first_token_is_504_and_after_it_a_finish(serve: Any, slow_clock: trio.testing.MockClock) -> None:
    async with serve(FakeModel(step_s=slow), parallel=1) as api:
        async with api.asking("/v1/completions", streaming(COMPLETION)) as first:
            await first.receive()
            for stream in (True, False):
                late = await api.chat(timeout_s=0.02, stream=stream)
                assert (late.status, late.error["type"], late.error["param"]) == (504, "timeout_error", "timeout_s")
            first.leave()
        for stream in (True, False):
            answer = await answer_when_its_time_is_over(api, {"timeout_s": TIMEOUT_S, "stream": stream}, slow_clock)
            assert answer.finish() == ("length", "timeout")
        await api.idle()


async def test_the_settings_time_limit_holds_for_requests_that_name_none(serve: Any, slow_clock: trio.testing.MockClock) -> None:
    async with serve(FakeModel(step_s=slow), timeout_s=TIMEOUT_S) as api:
        assert (await answer_when_its_time_is_over(api, {}, slow_clock)).finish() == ("length", "timeout")


async def test_a_server_that_gives_up_says_so_in_the_stream(serve: Any) -> None:
    from cllm.errors import Unavailable

    async with serve(FakeModel(step_s=slow)) as api:
        async with api.asking("/v1/chat/completions", streaming(CHAT)) as exchange:
            await api.until(lambda: api.scheduler.totals.n_generated > 3)
            api.running.loop.end_all(Unavailable("the server is shutting down", retry_after_s=5.0))
            received = await exchange.rest()
        assert json.loads(received.strip().rpartition(b"data: ")[2])["error"]["type"] == "unavailable_error"


# --- silence ----------------------------------------------------------------------------------------------------------


async def test_the_status_is_held_back_until_the_first_token(serve: Any) -> None:
    go_on = threading.Event()
    async with (
        serve(FakeModel(before_step=lambda batch: held_until(go_on), step_s=slow)) as api,
        api.asking("/v1/chat/completions", streaming(CHAT)) as exchange,
    ):
        await api.until(lambda: api.scheduler.n_running == 1)
        await trio.testing.wait_all_tasks_blocked()
        assert exchange.status is None
        go_on.set()
        assert (await exchange.receive()).startswith(b"data: ")
        assert exchange.status == 200
        assert [view.phase for view in api.scheduler.views()] == [Phase.DECODE]
        exchange.leave()


async def test_a_silent_stream_carries_comments_and_only_then(serve: Any, slow_clock: trio.testing.MockClock) -> None:
    silent, go_on = threading.Event(), threading.Event()

    def before(batch: Any) -> None:
        if model.n_steps == 3:
            silent.set()
            held_until(go_on)

    model = FakeModel(before_step=before)
    async with serve(model, sse_ping_s=PING_S) as api:
        async with api.asking("/v1/chat/completions", streaming({**CHAT, "max_tokens": 6})) as exchange:
            await api.until(silent.is_set)
            for _ in range(4 * N_LOOKS):
                await trio.testing.wait_all_tasks_blocked()
                slow_clock.jump(PING_S / N_LOOKS)
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
            answer = await exchange.answer()
        events = answer.body.decode().split("\n\n")
        assert events.count(": keep-alive") == 4, "none comes later than after PING_S"
        assert answer.finish() == ("length", None)
        quick = await api.chat(stream=True, max_tokens=6)
        assert ": keep-alive" not in quick.body.decode().split("\n\n")


class FallenBehind:
    """A completion whose client does not read, with a delta that is one too many."""

    has_failed = False

    def divert(self, sink: Any) -> None:
        self._sink = sink

    async def next_events(self) -> list[Any]:
        if self.has_failed:
            return []
        self.has_failed = True
        assert not self._sink(0, Delta(7, "more", [1]))
        return [(0, Failed(7, GenerationFailed("not read fast enough", code="stream_overflow")))]

    def close(self) -> None:
        pass


class Texts:
    """A shape that writes texts alone."""

    def first(self) -> bytes:
        return b""

    def delta(self, _index: int, event: Delta) -> bytes:
        return event.text.encode()

    def last(self) -> bytes:
        return b""


async def test_a_stream_that_falls_behind_with_what_could_not_be_sent_at_once_ends_with_its_error() -> None:
    body = SseBody(FallenBehind(), [(0, Delta(7, "some", [1]))], Texts(), openai_shape)  # type: ignore[arg-type]
    body.divert(lambda _chunk: False)
    some, rest, *nothing = [chunk async for chunk in body]
    assert (some, rest[:4], nothing) == (b"some", b"more", [])
    assert json.loads(rest[4:].removeprefix(b"data: "))["error"]["code"] == "stream_overflow"


class ReadLate(FallenBehind):
    """A completion whose client comes back after all has been told."""

    async def next_events(self) -> list[Any]:
        if self.has_failed:
            return []
        self.has_failed = True
        return [(0, Delta(7, f"{i} ", [1])) for i in range(2 * N_EVENTS_AT_ONCE + 1)]


async def test_what_waited_long_is_written_in_pieces_between_which_others_have_theirs() -> None:
    body = SseBody(ReadLate(), [(0, Delta(7, "first ", [1]))], Texts(), openai_shape)  # type: ignore[arg-type]
    _, *pieces = [chunk.decode().split() for chunk in [chunk async for chunk in body]]
    assert [len(piece) for piece in pieces] == [N_EVENTS_AT_ONCE, N_EVENTS_AT_ONCE, 1]
    assert [int(text) for piece in pieces for text in piece] == list(range(2 * N_EVENTS_AT_ONCE + 1))


async def test_pings_can_be_switched_off(serve: Any) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.02), sse_ping_s=0) as api:
        answer = await api.chat(stream=True, max_tokens=4)
    assert ": keep-alive" not in answer.body.decode().split("\n\n")


@pytest.mark.parametrize("direct", ["y", "n", "yn", "ynn", "yyyyn"])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 1}, {"stop": "e"}, {"logit_bias": {"195": 99, "169": 99}}]
)
async def test_a_stream_is_the_same_however_often_the_server_takes_its_chunks_at_once(
    serve: Any, direct: str, fields: dict[str, Any]
) -> None:
    body = {**CHAT, **fields, "seed": 5, "max_tokens": 30}
    async with serve(FakeModel(step_s=lambda batch: 0.0005)) as api:
        whole = await api.post("/v1/chat/completions", body)
        async with api.asking("/v1/chat/completions", streaming(body), direct=direct) as exchange:
            answer = await exchange.answer()
        assert (exchange.n_direct > 0) is ("y" in direct)
        await api.idle()
    for index in range(fields.get("n", 1)):
        assert answer.text(index) == whole.text(index)
        assert answer.finish(index) == whole.finish(index)
    if "logprobs" in fields:
        streamed = [one for c in answer.chunks for choice in c["choices"] if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert streamed == whole.json["choices"][0]["logprobs"]["content"]
    assert answer.lines[-1] == "[DONE]"


async def test_a_client_that_leaves_a_stream_that_goes_out_at_once_ends_its_generation(serve: Any) -> None:
    async with serve(FakeModel(step_s=slow)) as api:
        async with api.asking("/v1/chat/completions", streaming(CHAT), direct="y") as exchange:
            await api.until(lambda: exchange.n_direct > 5)
            exchange.leave()
        await api.idle()
        assert api.scheduler.totals.n_cancelled == 1


async def test_a_failure_in_a_stream_that_goes_out_at_once_is_an_event(serve: Any) -> None:
    async with serve(failing(6)) as api:
        async with api.asking("/v1/chat/completions", streaming(CHAT), direct="y") as exchange:
            answer = await exchange.answer()
        await api.idle()
    assert answer.chunks[-1]["error"]["code"] == "step_failed"
    assert "[DONE]" not in answer.lines


async def test_many_streams_at_once_all_get_what_they_get_alone(serve: Any) -> None:
    texts: dict[int, str] = {}
    async with serve() as api:

        async def one(seed: int) -> None:
            texts[seed] = (await api.chat(f"hello {seed}", seed=seed, stream=True, max_tokens=5 + seed)).text()

        async with trio.open_nursery() as nursery:
            for seed in range(32):
                nursery.start_soon(one, seed)
        for seed in (0, 7, 31):
            assert (await api.chat(f"hello {seed}", seed=seed, max_tokens=5 + seed)).text() == texts[seed]
        await api.idle()
