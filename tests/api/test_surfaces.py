"""One answer that thinks, talks and calls two tools, as each surface tells it, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cllm.api.anthropic.answers import message as anthropic_message
from cllm.api.conversation import Answer, ToolCall
from cllm.api.ollama.answers import Arrival, LineStream, chat_body, whole
from cllm.engine.events import Finished, FinishReason, Usage
from cllm.testing.fake import TURN
from cllm.testing.scripted import HEADER, TOOL_TEMPLATE, ScriptedModel

ANSWER = (
    "<think>Two cities.</think>I will look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BAD_SCHEMA = {"type": "object", "properties": {"city": {"type": "citystring"}}}
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
CALLS = [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
NOW = Arrival(at=0.0)


def model() -> ScriptedModel:
    return ScriptedModel(ANSWER, template=TOOL_TEMPLATE)


def data_of(answer: Any) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.body.decode().splitlines() if line.startswith("data: ")]


async def test_anthropics_blocks(serve: Any) -> None:
    body = {"max_tokens": 400, "messages": MESSAGES, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    async with serve(model()) as api:
        whole = (await api.post("/v1/messages", body)).json
        told = data_of(await api.post("/v1/messages", {**body, "stream": True}))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0]["thinking"].strip() == "Two cities."
    assert [(block["name"], block["input"]) for block in whole["content"][2:]] == CALLS
    assert whole["stop_reason"] == "tool_use"

    begun = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert [kind for kind in begun if kind != "text"] == ["thinking", "tool_use", "tool_use"]
    ended = [event["index"] for event in told if event["type"] == "content_block_stop"]
    assert ended == list(range(len(begun)))
    pieces: dict[int, str] = {}
    for event in told:
        if event.get("delta", {}).get("type") == "input_json_delta":
            pieces[event["index"]] = pieces.get(event["index"], "") + event["delta"]["partial_json"]
    assert [json.loads(text) for text in pieces.values()] == [arguments for _, arguments in CALLS]
    assert next(event for event in told if event["type"] == "message_delta")["delta"]["stop_reason"] == "tool_use"


async def test_the_items_of_a_response(serve: Any) -> None:
    body = {"input": "How is the weather?", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    async with serve(model()) as api:
        whole = (await api.post("/v1/responses", body)).json
        told = data_of(await api.post("/v1/responses", {**body, "stream": True}))
    for response in (whole, told[-1]["response"]):
        kinds = [item["type"] for item in response["output"]]
        assert [kind for kind in kinds if kind != "message"] == ["reasoning", "function_call", "function_call"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
        assert len({call["call_id"] for call in calls}) == 2
        assert response["output"][0]["content"][0]["text"].strip() == "Two cities."
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    done = [event for event in told if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], json.loads(event["arguments"])) for event in done] == CALLS
    deltas = [event["delta"] for event in told if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join([event["arguments"] for event in done])
    assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == told[-1]["response"]["output"]


async def test_ollamas_lines(serve: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    async with serve(model()) as api:
        whole = (await api.post("/api/chat", {"messages": MESSAGES, "tools": [tool], "stream": False})).json["message"]
        answer = await api.post("/api/chat", {"messages": MESSAGES, "tools": [tool]})
    parts = [json.loads(line)["message"] for line in answer.body.decode().splitlines()]
    assert whole["thinking"].strip() == "".join([part.get("thinking", "") for part in parts]).strip() == "Two cities."
    assert whole["content"].strip() == "".join([part["content"] for part in parts]).strip() == "I will look."
    streamed = [call for part in parts for call in part.get("tool_calls", [])]
    for calls in (whole["tool_calls"], streamed):
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == CALLS
        assert [call["function"]["index"] for call in calls] == [0, 1], "those with one number are one call to Open WebUI"


def test_a_call_is_over_for_ollamas_clients_when_something_else_is_said() -> None:
    stream = LineStream("m", chat_body, NOW)
    pieces = [
        stream.call_begun(0, 0, "c0", "look"),
        stream.arguments(0, 0, '{"a"'),
        stream.content(0, "amid"),
        stream.arguments(0, 0, ": 1}"),
        stream.content(0, "then"),
        stream.content(0, "this"),
    ]
    said = [json.loads(line)["message"] for line in b"".join(pieces).splitlines()]
    assert [one["content"] for one in said] == ["amid", "", "then", "this"]
    assert [call["function"]["arguments"] for one in said for call in one.get("tool_calls", [])] == [{"a": 1}]


@pytest.mark.parametrize(
    ("arguments", "reason", "told"),
    [
        ('{"door": "fro', FinishReason.LENGTH, []),
        ("", FinishReason.LENGTH, []),
        ('{"door": "fro', FinishReason.STOP, []),
        ("[1]", FinishReason.TOOL_CALLS, []),
        ("", FinishReason.TOOL_CALLS, [{}]),
        ("null", FinishReason.TOOL_CALLS, [{}]),
        ("{}", FinishReason.LENGTH, [{}]),
        ('{"door": "front"}', FinishReason.LENGTH, [{"door": "front"}]),
    ],
)
def test_a_call_that_was_cut_is_none_for_ollamas_clients_since_they_would_run_it(
    arguments: str, reason: FinishReason, told: list[Any]
) -> None:
    finished, before = Finished(0, reason, None, Usage(1, 0, 1, 0.0, 0.0, 0.0)), '{"door": "back"}'
    calls = [ToolCall("c0", "lock", before), ToolCall("c1", "unlock", arguments)]
    message = whole(Answer("", "", calls, None, finished, is_content_last=False), "m", chat_body, NOW)["message"]
    stream = LineStream("m", chat_body, NOW)
    pieces = [stream.call_begun(0, 0, "c0", "lock"), stream.arguments(0, 0, before), stream.call_begun(0, 1, "c1", "unlock")]
    pieces += [stream.arguments(0, 1, arguments)] if arguments else []
    said = [json.loads(line)["message"] for line in b"".join([*pieces, stream.ended(0, finished)]).splitlines()]
    for given in (message["tool_calls"], [call for one in said for call in one.get("tool_calls", [])]):
        assert [call["function"]["arguments"] for call in given] == [{"door": "back"}, *told]


@pytest.mark.parametrize(
    ("arguments", "told"), [('{"a": "x\ny"}', {"a": "x\ny"}), ('{"a": "x', {}), ("[1]", {}), ("", {}), ('{"a": [1.5]}', {"a": [1.5]})]
)
def test_line_ends_in_a_calls_arguments_are_read_as_they_are_meant_for_anthropics_clients_too(arguments: str, told: dict[str, Any]) -> None:
    finished = Finished(0, FinishReason.TOOL_CALLS, None, Usage(1, 0, 1, 0.0, 0.0, 0.0))
    answer = Answer("", "", [ToolCall("c", "write", arguments)], None, finished, is_content_last=False)
    (block,) = anthropic_message(answer, "m", n_ctx=9.0)["content"]
    assert (block["type"], block["input"]) == ("tool_use", told)


def test_an_answer_whose_only_call_was_cut_tells_of_none() -> None:
    finished = Finished(0, FinishReason.LENGTH, None, Usage(1, 0, 1, 0.0, 0.0, 0.0))
    answer = whole(Answer("", "", [ToolCall("c", "unlock", "{")], None, finished, is_content_last=False), "m", chat_body, NOW)
    assert (answer["message"], answer["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": [TURN, *HEADER], "max_tokens": 99}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/completion", {"prompt": [TURN, *HEADER], "n_predict": 99}),
    ],
)
async def test_a_stream_has_no_line_ends_but_its_own(serve: Any, path: str, body: dict[str, Any]) -> None:
    """Clients that cut it by all that Unicode has, as httpx's `iter_lines` does, would cut an answer's JSON in two."""
    async with serve(ScriptedModel("one\u2028two\u2029three\x85four", template=TOOL_TEMPLATE)) as api:
        answer = await api.post(path, {**body, "stream": True})
    text = answer.body.decode()
    assert text.splitlines() == text.removesuffix("\n").split("\n")
    assert set(re.findall(r"\\u(2028|2029|0085)", text)) == {"2028", "2029", "0085"}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": MESSAGES, "tools": [{"name": "f", "input_schema": BAD_SCHEMA}]}, "input_schema"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": BAD_SCHEMA}]}, "tools[0].parameters"),
        (
            "/api/chat",
            {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a b", "parameters": {}}}]},
            "tools[0].function.name",
        ),
    ],
)
async def test_a_tool_that_cannot_be_called_is_refused_by_its_field(serve: Any, path: str, body: dict[str, Any], place: str) -> None:
    choice = {"/v1/messages": {"tool_choice": {"type": "any"}}, "/v1/responses": {"tool_choice": "required"}}.get(path, {})
    async with serve(model()) as api:
        answer = await api.post(path, {**body, **choice})
        assert api.scheduler.totals.n_submitted == 0
    assert answer.status == 400
    assert place in answer.body.decode()
