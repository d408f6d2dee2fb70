"""Before a second cLLM: every surface answers as that one does, with the same text, the same ends and the same counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cllm.testing.fake import FakeModel
from cllm.testing.live import live_server

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0}


@pytest.fixture
def behind() -> Iterator[str]:
    with live_server(FakeModel(n_cells=2048, n_slots=8, n_ctx_train=512)) as url:
        yield url


@pytest.fixture
def front(behind: str, make_front: Any) -> Any:
    return make_front(behind)


@pytest.fixture
def direct(behind: str, front: Any) -> Any:
    return type(front)(behind, front.model)


def test_it_finds_out_what_is_behind(front: Any) -> None:
    assert (front.model.info.name, front.model.info.architecture, front.model.n_ctx) == ("fake", "upstream (cllm)", 512)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.9, "seed": 7, "top_p": 0.8, "top_k": 5, "min_p": 0.01, "presence_penalty": 1, "repeat_penalty": 1.2},
        {"n": 2, "temperature": 1.3, "seed": 3},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"max_tokens": 1},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_a_conversation_is_answered_as_there(front: Any, direct: Any, fields: dict[str, Any]) -> None:
    body = {**HELLO, **fields}
    here, there = (one.post("/v1/chat/completions", body) for one in (front, direct))
    assert here.status == there.status == 200, here.text
    if fields.get("n", 1) == 1:  # a second choice's seed is made of the first's, and cut
        assert here.json["choices"] == there.json["choices"]
    assert here.json["usage"]["prompt_tokens"] == there.json["usage"]["prompt_tokens"]
    if "n" not in fields:
        assert here.json["usage"]["completion_tokens"] == there.json["usage"]["completion_tokens"]


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 3}, {"top_logprobs": 20, "temperature": 0.8, "seed": 4}], ids=str)
def test_logprobs_are_those_that_are_told_there(front: Any, direct: Any, fields: dict[str, Any]) -> None:
    body = {**HELLO, "logprobs": True, **fields}
    here, there = (one.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"] for one in (front, direct))
    assert here == there
    stream = front.post("/v1/chat/completions", {**body, "stream": True})
    assert [one for chunk in stream.chunks for one in (chunk["choices"][0]["logprobs"] or {}).get("content", [])] == there


@pytest.mark.parametrize("n", [0, 4])
def test_logprobs_of_a_completion_are_those_that_are_told_there(front: Any, direct: Any, n: int) -> None:
    body = {"prompt": "once upon a time", "temperature": 0, "max_tokens": 9, "logprobs": n}
    here, there = (one.post("/v1/completions", body).json["choices"] for one in (front, direct))
    assert here == there


def test_the_best_of_several_is_chosen_here(front: Any) -> None:
    reply = front.complete(best_of=3, temperature=1.0, max_tokens=5)
    assert (reply.status, len(reply.json["choices"]), reply.json["choices"][0]["logprobs"]) == (200, 1, None)


def test_a_stream_says_the_same(front: Any) -> None:
    whole, stream = front.chat(max_tokens=20, temperature=0), front.chat(max_tokens=20, temperature=0, stream=True)
    assert stream.streamed == whole.content
    assert stream.text.endswith("data: [DONE]\n\n")


def test_a_stop_string_ends_it_at_the_same_place_for_the_same_reason(front: Any, direct: Any) -> None:
    text = direct.post("/v1/chat/completions", HELLO).content
    for stop in ([text[8:11]], ["never", text[4:6]], ["1!", "2!", "3!", "4!", "5!", text[9:12]]):
        here, there = (one.post("/v1/chat/completions", {**HELLO, "stop": stop}) for one in (front, direct))
        assert here.json["choices"] == there.json["choices"]


@pytest.mark.parametrize("prompt", ["once upon a time", [111, 110, 99, 101], ["one", "two"]], ids=str)
def test_a_prompt_is_completed_as_there(front: Any, direct: Any, prompt: Any) -> None:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 9}
    here, there = (one.post("/v1/completions", body) for one in (front, direct))
    assert here.json["choices"] == there.json["choices"]
    assert here.json["usage"]["total_tokens"] == there.json["usage"]["total_tokens"]


def test_a_prompt_that_is_too_long_there_is_too_long_here(front: Any) -> None:
    reply = front.complete("x" * 3000)
    assert (reply.status, reply.error["type"], reply.error["n_ctx"]) == (400, "exceed_context_size_error", 512)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "max_tokens": 5, "min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_by_name(front: Any, fields: dict[str, Any], param: str) -> None:
    reply = front.chat(**fields)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "not_supported_error", param)


def test_a_tool_is_called_here_as_there(front: Any, direct: Any) -> None:
    parameters = {"type": "object", "properties": {"at": {"enum": ["it"]}}, "required": ["at"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body = {**HELLO, "tools": tools, "tool_choice": "required", "max_tokens": 200}
    here, there = (one.post("/v1/chat/completions", body).json["choices"][0] for one in (front, direct))
    assert here["finish_reason"] == there["finish_reason"]
    calls, expected = here["message"].get("tool_calls", []), there["message"].get("tool_calls", [])
    assert expected
    assert [call["function"] for call in calls] == [call["function"] for call in expected]
    stream = front.post("/v1/chat/completions", {**body, "stream": True})
    pieces = [call["function"] for chunk in stream.chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece.get("arguments", "") for piece in pieces) == "".join(call["function"]["arguments"] for call in expected)


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/completion", {"prompt": "once upon a time", "temperature": 0}, "tokens_predicted"),
        ("/completion", {"prompt": "once upon a time", "temperature": 0, "n_predict": -1}, "tokens_predicted"),
        ("/api/generate", {"prompt": "once", "raw": True, "stream": False, "options": {"temperature": 0}}, "eval_count"),
    ],
    ids=str,
)
def test_a_prompt_without_a_limit_is_completed_as_far_as_there(front: Any, direct: Any, path: str, body: Any, count: str) -> None:
    here, there = (one.post(path, {**body, "ignore_eos": True}).json[count] for one in (front, direct))
    assert here == there > 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**HELLO}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 9}),
        ("/api/chat", {"messages": HELLO["messages"], "stream": False}),
        ("/api/generate", {"prompt": "hello", "stream": False}),
        ("/generate", {"prompt": "hello"}),
    ],
)
def test_the_other_surfaces_answer_too(front: Any, path: str, body: dict[str, Any]) -> None:
    reply = front.post(path, body)
    assert reply.status == 200, reply.text
