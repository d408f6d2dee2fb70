"""Models that answer in channels: reasoning, content and calls behind headers, whatever a request asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.testing.scripted import ScriptedModel

TEMPLATE = (
    "{% if tools %}<turn>developer\n{{ tools | tojson }}<end>{% endif %}"
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{{ '<|start|>assistant<|channel|>final<|message|>' if message.role == 'assistant' }}{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n<|start|>assistant{% endif %}"
)
START = "<|start|>assistant"  # in the prompt, and so in every script
NEXT = f"<|end|>{START}"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
THOUGHT = f"{START}{ANALYSIS}hm, so{NEXT}{FINAL}It is 5."
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": CLOCK}}]
CALL = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "utc"}'
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOCK}}


def says(script: str) -> ScriptedModel:
    return ScriptedModel(script, template=TEMPLATE)


def told(answer: Any) -> tuple[str, str, list[Any]]:
    """Reasoning, content and the calls' functions of the first choice."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        message = answer.json["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls") or []]
        return message.get("reasoning_content", ""), message["content"] or "", functions
    deltas = [choice["delta"] for chunk in answer.chunks for choice in chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    functions = [{"name": calls[0]["name"], "arguments": "".join([call["arguments"] for call in calls])}] if calls else []
    return "".join([delta.get("reasoning_content", "") for delta in deltas]), answer.text(), functions


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_content_are_told_apart(serve: Any, stream: bool) -> None:
    async with serve(says(THOUGHT)) as api:
        answer = await api.chat(stream=stream, max_tokens=300)
    assert told(answer) == ("hm, so", "It is 5.", [])
    assert answer.finish() == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
async def test_a_call_is_told_as_one(serve: Any, stream: bool, strict: bool) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": strict}}]
    async with serve(says(f"{START}{ANALYSIS}what time?{NEXT}{CALL}")) as api:
        answer = await api.chat(stream=stream, max_tokens=300, tools=tools)
    assert told(answer) == ("what time?", "", [{"name": "clock", "arguments": '{"zone": "utc"}'}])
    assert answer.finish() == ("tool_calls", None)


async def test_a_strict_function_is_held_to_its_schema(serve: Any) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    async with serve(says(START + CALL.replace('"utc"', "5"))) as api:
        _, content, ((function),) = told(await api.chat(max_tokens=300, tools=tools, seed=1))
    assert not content
    assert json.loads(function["arguments"])["zone"] in ("utc", "local")


async def test_a_call_that_is_required_may_be_reasoned_about_first(serve: Any) -> None:
    async with serve(says(THOUGHT)) as api:
        reasoning, content, ((function),) = told(await api.chat(max_tokens=400, tools=TOOLS, tool_choice="required", seed=1))
    assert (reasoning, content, function["name"]) == ("hm, so", "", "clock")
    assert json.loads(function["arguments"])["zone"] in ("utc", "local")


@pytest.mark.parametrize("effort", [None, "high"])
async def test_a_schema_holds_the_content_behind_its_header(serve: Any, effort: str | None) -> None:
    async with serve(says(f'{START}{ANALYSIS}hm{NEXT}{FINAL}{{"zone": "utc"}}')) as api:
        answer = await api.chat(max_tokens=400, response_format=FORM, **({"reasoning_effort": effort} if effort else {}))
    assert told(answer) == ("hm", '{"zone": "utc"}', [])
    assert answer.finish() == ("stop", None)


async def test_beside_a_schema_tools_may_be_called(serve: Any) -> None:
    async with serve(says(f"{START}{ANALYSIS}hm{NEXT}{CALL}")) as api:
        answer = await api.chat(max_tokens=400, response_format=FORM, tools=TOOLS)
    assert told(answer) == ("hm", "", [{"name": "clock", "arguments": '{"zone": "utc"}'}])


@pytest.mark.parametrize("fields", [{}, {"reasoning_effort": "high"}])
async def test_a_form_that_knows_no_headers_begins_behind_one(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(says(f"{START}{FINAL}aaa")) as api:
        answer = await api.chat(max_tokens=300, structured_outputs={"regex": "a{3}"}, **fields)
    assert told(answer) == ("", "aaa", [])


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"reasoning_budget": 0}])
async def test_without_reasoning_the_prompt_ends_behind_the_header_of_content(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(says(f"{START}{FINAL}It is 5.")) as api:
        answer = await api.chat(max_tokens=300, **fields)
    assert told(answer) == ("", "It is 5.", [])
    assert answer.json["usage"]["completion_tokens"] == len("It is 5.") + 1


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_a_budget_ends_reasoning_and_another_header_follows(serve: Any, tools: Any) -> None:
    """What is crossed out here the closing tokens take the place of."""
    once = f"{ANALYSIS}hhhh{'x' * len(NEXT)}"
    script = f"{START}{once}{ANALYSIS}{'x' * len(NEXT)}{FINAL}It is 5."
    async with serve(says(script)) as api:
        answer = await api.chat(max_tokens=400, reasoning_budget=4, tools=tools)
    assert told(answer) == ("hhhh", "It is 5.", [])


async def test_an_answer_goes_on_within_the_final_message(serve: Any) -> None:
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "It is"}]
    async with serve(says(f"{START}{FINAL}It is 5.")) as api:
        answer = await api.chat(messages=messages, continue_final_message=True, add_generation_prompt=False, max_tokens=300)
    assert told(answer) == ("", " 5.", [])


@pytest.mark.parametrize("form", [None, FORM])
async def test_an_answer_goes_on_within_the_reasoning_of_the_final_message(serve: Any, form: Any) -> None:
    said = '{"zone": "utc"}' if form else "It is 5."
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": f"{ANALYSIS}hm,"}]
    async with serve(says(f"{START}{FINAL}{ANALYSIS}hm, so{NEXT}{FINAL}{said}")) as api:
        fields = {"response_format": form} if form else {}
        answer = await api.chat(messages=messages, continue_final_message=True, add_generation_prompt=False, max_tokens=300, **fields)
    assert told(answer) == (" so", said, [])


async def test_stop_strings_count_in_content_only(serve: Any) -> None:
    async with serve(says(f"{START}{ANALYSIS}so, stop{NEXT}{FINAL}go, stop it")) as api:
        answer = await api.chat(max_tokens=300, stop=["stop"])
    assert told(answer) == ("so, stop", "go, ", [])
    assert answer.finish() == ("stop", "stop")
