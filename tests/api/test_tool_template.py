"""Models that bring a second chat template, for conversations in which tools are offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.config import Settings
from cllm.errors import LoadFailed
from cllm.serve.loading import _template
from cllm.testing.fake import TEMPLATE, FakeModel
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": WEATHER}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "And there?"}
CALLED = [
    QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
# Tells of tools, and has calls written as nobody else does.
UNREAD = (
    TOOL_TEMPLATE.replace("<tool_call>", "[[").replace("</tool_call>", "]]").replace('{"name": "', "=> ").replace('", "arguments":', " <=")
)


def says(answer: str = "yes", *, usual: str = TEMPLATE, for_tools: str | None = TOOL_TEMPLATE) -> ScriptedModel:
    model = ScriptedModel(answer, template=usual)
    model.vocabulary.tool_template = for_tools
    return model


async def shown(api: Any, messages: list[Any], **more: Any) -> str:
    prompt: str = (await api.post("/apply-template", {"messages": messages, **more})).json["prompt"]
    return prompt


async def test_where_tools_are_offered_it_writes_the_conversation_and_its_calls_are_read(serve: Any) -> None:
    async with serve(says(CALL)) as api, serve(says(for_tools=None)) as plain, serve(says(usual=TOOL_TEMPLATE, for_tools=None)) as alone:
        assert await shown(api, [QUESTION]) == await shown(plain, [QUESTION])
        for messages in ([QUESTION], CALLED):
            prompt = await shown(api, messages, tools=TOOLS)
            assert prompt == await shown(alone, messages, tools=TOOLS)
            assert "Tools, each call in <tool_call>" in prompt
        for stream in (False, True):
            answer = await api.post("/v1/chat/completions", {"messages": [QUESTION], "tools": TOOLS, "stream": stream})
            assert answer.status == 200
            assert b'"weather"' in answer.body
            assert b'"tool_calls"' in answer.body
        (call,) = (await api.post("/v1/chat/completions", {"messages": [QUESTION], "tools": TOOLS})).json["choices"][0]["message"][
            "tool_calls"
        ]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_where_none_is_offered_any_more_earlier_calls_stay_in_the_usual_one(serve: Any, more: dict[str, Any]) -> None:
    async with serve(says()) as api, serve(says(for_tools=None)) as plain:
        answer = await api.post("/v1/chat/completions", {"messages": CALLED, "max_tokens": 5, **more})
        prompt = await shown(api, CALLED)
        assert answer.status == 200
        assert prompt == await shown(plain, CALLED)
    assert "weather" in prompt
    assert "Ulm" in prompt
    assert "sunny" in prompt


@pytest.mark.parametrize(("for_tools", "why"), [(UNREAD, "no form that is known"), ("{% if %}", "Expected an expression")])
async def test_one_whose_calls_cannot_be_read_or_that_is_none_is_not_taken(serve: Any, logged: list[Any], for_tools: str, why: str) -> None:
    async with serve(says(CALL, for_tools=for_tools)) as api, serve(says(for_tools=None)) as plain:
        assert await shown(api, [QUESTION], tools=TOOLS) == await shown(plain, [QUESTION], tools=TOOLS)
        answer = await api.post("/v1/chat/completions", {"messages": [QUESTION], "tools": TOOLS})
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
        assert "chat_template_tool_use" not in (await api.get("/props")).json
    (entry,) = [entry for entry in logged if entry["event"] == "chat_template.tools_unread"]
    assert why in entry["why"]


async def test_a_form_that_is_named_holds_for_it_too(serve: Any, logged: list[Any]) -> None:
    async with serve(says(), tool_format="generic") as api, serve(says(for_tools=None)) as plain:
        assert await shown(api, [QUESTION], tools=TOOLS) == await shown(plain, [QUESTION], tools=TOOLS)
    assert not [entry for entry in logged if entry["event"] == "chat_template.tools_unread"]


async def test_a_template_of_the_operators_is_taken_in_place_of_both(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}!<end>{% endfor %}<turn>assistant\n")
    async with serve(says(), chat_template_file=str(file)) as api:
        props = (await api.get("/props")).json
        assert "hello!<end>" in await shown(api, [{"role": "user", "content": "hello"}])
    assert props["chat_template"] == file.read_text()
    assert "chat_template_tool_use" not in props


def test_a_template_that_cannot_be_read_is_told_by_its_flag(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_bytes(b"\xff")
    with pytest.raises(LoadFailed, match="--chat-template-file: cannot read"):
        _template(FakeModel(), Settings(chat_template_file=str(file)))


async def test_props_show_both(serve: Any) -> None:
    async with serve(says()) as api:
        props = (await api.get("/props")).json
    assert (props["chat_template"], props["chat_template_tool_use"]) == (TEMPLATE, TOOL_TEMPLATE)
