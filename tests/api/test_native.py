"""The first cLLM's own API."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio

from cllm.api.app import OPERATIONS
from cllm.api.native import _wants_page
from cllm.testing.fake import FakeModel
from tests.lines import n_lines


async def test_generate_answers_in_the_first_cllms_shape(serve: Any) -> None:
    async with serve() as api:
        answer = await api.post("/generate", {"prompt": "once", "max_tokens": 5, "seed": 1})
    assert answer.status == 200
    assert answer.json["success"] is True
    data = answer.json["data"]
    assert re.fullmatch("[0-9a-f]{32}", data["id"])
    assert len(data["text"]) == 5
    assert (data["generated_tokens"], data["max_tokens"], data["finish_reason"], data["prompt_tokens"]) == (5, 5, "length", 5)
    assert data["tokens_per_second"] == pytest.approx(5 / data["response_time"], rel=0.01)


async def test_generate_has_the_documented_defaults_whatever_the_profile(serve: Any) -> None:
    defaults = {"max_tokens": 100, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1}
    async with serve(sampling_defaults="llama") as api:
        plain = await api.post("/generate", {"prompt": "once", "seed": 1})
        spelled = await api.post("/generate", {"prompt": "once", "seed": 1, **defaults})
        other = await api.post("/generate", {"prompt": "once", "seed": 1, "repetition_penalty": 1.0, "temperature": 1.0})
    assert plain.json["data"]["generated_tokens"] == 100
    assert plain.json["data"]["text"] == spelled.json["data"]["text"] != other.json["data"]["text"]


async def test_generate_stream_gives_tokens_then_done_and_equals_generate(serve: Any) -> None:
    body = {"prompt": "once", "max_tokens": 20, "seed": 2, "logit_bias": {"195": 50, "169": 50}}
    async with serve() as api:
        whole = (await api.post("/generate", body)).json["data"]
        stream = await api.post("/generate_stream", body)
        same = await api.post("/generate", {**body, "stream": True})
    *tokens, last = stream.chunks
    assert "[DONE]" not in stream.lines
    assert all(set(token) == {"id", "token", "done"} and token["done"] is False for token in tokens)
    assert "".join(token["token"] for token in tokens) == whole["text"]
    assert last == {"id": last["id"], "token": "", "done": True, "generated_tokens": 20, "finish_reason": "length"}
    assert {chunk["id"] for chunk in stream.chunks} == {last["id"]}
    assert [chunk["token"] for chunk in same.chunks] == [chunk["token"] for chunk in stream.chunks]


async def test_encode_and_decode_are_each_others_inverse(serve: Any) -> None:
    async with serve() as api:
        encoded = (await api.post("/encode", {"text": "héllo"})).json
        decoded = (await api.post("/decode", {"tokens": encoded["data"]["tokens"]})).json
        empty = (await api.post("/encode", {"text": ""})).json
    assert encoded == {"success": True, "data": {"tokens": list("héllo".encode()), "length": 6}}
    assert decoded == {"success": True, "data": {"text": "héllo"}}
    assert empty["data"] == {"tokens": [], "length": 0}


async def test_model_info_tells_of_the_model(serve: Any) -> None:
    async with serve() as api:
        data = (await api.get("/model/info")).json["data"]
    assert (data["name"], data["architecture"], data["n_ctx"], data["n_vocab"]) == ("fake", "fake", 4096, 259)


async def test_the_root_lists_the_endpoints_and_shows_a_browser_a_page_without_external_assets(serve: Any) -> None:
    async with serve() as api:
        listing = await api.get("/")
        page = await api.get("/", Accept="text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")
        listed = {(one["method"], one["path"]) for one in listing.json["data"]["endpoints"]}
    assert ("POST", "/v1/chat/completions") in listed
    assert listed == {(one.method, one.public_path) for one in OPERATIONS if one.alias_of is None and one.path != "/"}
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)\s*=", page.body.decode())


def test_no_more_of_what_a_browser_takes_is_read_than_browsers_send() -> None:
    browsers = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    assert _wants_page(browsers)
    assert n_lines(lambda: _wants_page("a/b;q=0.1," * 6000)) < 100 * n_lines(lambda: _wants_page(browsers))


@pytest.mark.parametrize("path", ["/decode", "/detokenize"])
async def test_more_tokens_than_any_context_has_are_400(serve: Any, path: str) -> None:
    async with serve() as api:
        answer = await api.post(path, {"tokens": [97] * ((1 << 20) + 1)})
    assert answer.status == 400
    assert b"tokens: Expected array of length <= 1048576" in answer.body


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {}, 400),
        ("/generate", {"prompt": 5}, 400),
        ("/generate", {"prompt": "x", "max_tokens": 0}, 400),
        ("/generate", {"prompt": "x", "max_tokens": -1}, 400),
        ("/generate", {"prompt": "x", "n": 2}, 400),
        ("/generate", b"{", 400),
        ("/generate_stream", {"prompt": "x", "temperature": -1}, 400),
        ("/encode", {"text": 1}, 400),
        ("/decode", {"tokens": [259]}, 400),
        ("/decode", {"tokens": "x"}, 400),
        ("/generate/", {"prompt": 5}, 400),
        ("/model/info/", {}, 405),
        ("/benchmark", {}, 403),
    ],
)
async def test_errors_have_the_first_cllms_shape_with_the_true_status(serve: Any, path: str, body: Any, status: int) -> None:
    async with serve() as api:
        answer = await api.post(path, body)
    assert answer.status == status
    assert answer.json["success"] is False
    assert set(answer.json) == {"success", "error"}
    assert isinstance(answer.json["error"], str)


async def test_a_method_that_is_not_taken_has_the_first_cllms_shape(serve: Any) -> None:
    async with serve() as api:
        answer = await api.get("/generate")
    assert answer.status == 405
    assert "POST" in answer.headers["Allow"]
    assert answer.json["success"] is False


async def test_while_loading_every_answer_says_when_to_come_again(loading: Any) -> None:
    for path in ("/generate", "/generate_stream"):
        answer = await loading.post(path, {"prompt": "x"})
        assert answer.status == 503
        assert answer.json["success"] is False
        assert answer.json["retry_after"] == int(answer.headers["Retry-After"]) >= 1


async def test_the_benchmark_runs_through_the_scheduler_and_measures(serve: Any) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.002), enable_benchmark=True) as api:
        answer = await api.post("/benchmark", {"requests": 6, "concurrency": 3, "max_tokens": 5, "prompt": "once"})
        assert api.scheduler.totals.n_submitted == 6
        assert api.scheduler.totals.n_generated == 30
    data = answer.json["data"]
    assert (data["requests"], data["completed"], data["generated_tokens"], data["prompt_tokens"]) == (6, 6, 30, 5)
    for spread in (data["response_time"], data["time_to_first_token"]):
        assert 0 < spread["min"] <= spread["p50"] <= spread["p99"] <= spread["max"]
        assert spread["min"] <= spread["mean"] <= spread["max"]
    assert data["tokens_per_second"] == pytest.approx(30 / data["total_time"], rel=0.01)


async def test_a_benchmark_of_which_nothing_is_answered_is_refused_as_its_requests_are(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=64), enable_benchmark=True) as api:
        answer = await api.post("/benchmark", {"prompt": "x" * 100})
    assert (answer.status, answer.json["success"]) == (400, False)


async def test_a_key_that_may_not_have_so_many_under_way_is_told_and_nothing_goes_on(serve: Any) -> None:
    keys = {"api_key": ("one cap=2", "late priority=5")}
    async with serve(FakeModel(step_s=lambda batch: 0.002), enable_benchmark=True, **keys) as api:
        refused = await api.post("/benchmark", {"requests": 9, "concurrency": 3, "max_tokens": 50}, X_Api_Key="one")
        await api.idle()
        taken = await api.post("/benchmark", {"requests": 4, "concurrency": 2, "max_tokens": 5}, X_Api_Key="one")
        seen: list[int] = []

        async def look() -> None:
            while True:
                seen.extend(view.priority for view in api.scheduler.views())
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await api.post("/benchmark", {"requests": 2, "max_tokens": 20}, X_Api_Key="late")
            nursery.cancel_scope.cancel()
    assert (refused.status, refused.json["retry_after"] >= 1) == (429, True)
    assert taken.json["data"]["completed"] == 4
    assert set(seen) == {5}


@pytest.mark.parametrize("body", [{"requests": 0}, {"requests": 10**9}, {"concurrency": 1000}, {"max_tokens": -1}, {"prompt": 1}])
async def test_a_benchmark_without_bounds_is_refused(serve: Any, body: Any) -> None:
    async with serve(enable_benchmark=True) as api:
        assert (await api.post("/benchmark", body)).status == 400
