"""Grammars of calls: what they let a model write is what the reader reads."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from cllm.errors import GrammarInvalid
from cllm.testing.fake import END_OF_TURN
from cllm.text.answers import AnswerFormat
from cllm.text.call_formats import FORMATS, HARMONY, HERMES, LLAMA, QWEN_CODER, CallFormat
from cllm.text.call_grammar import call_grammar, content_grammar, is_held
from cllm.text.channels import TAGS
from cllm.text.grammar import Grammar
from cllm.text.parts import Arguments, CallBegun
from cllm.text.tools import Tool, Toolbox, ToolUse
from tests.text.conftest import allowed, compiled, takes

CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"], "additionalProperties": False}
POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/p"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"p": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = (Tool("look_up", "", CITY, True), Tool("mcp:add.point/x", "", POINT, True))
SCHEMAS = {"look_up": CITY, "mcp:add.point/x": POINT}


def toolbox(**more: Any) -> Toolbox:
    return Toolbox(tools=TOOLS, **more)


def written(grammar: Grammar, rng: random.Random) -> str:
    state, text = grammar.start(), bytearray()
    while not state.is_done:
        tokens = sorted(allowed(state.mask()))
        token = END_OF_TURN if END_OF_TURN in tokens and rng.random() < 0.5 else rng.choice([t for t in tokens if t != END_OF_TURN])
        if token == END_OF_TURN:
            break
        state.accept(token)
        text.append(token)
    return text.decode()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_whatever_is_written_is_read_as_calls_that_fit(form: CallFormat, parallel: bool) -> None:
    grammar = compiled(call_grammar(form, toolbox(use=ToolUse.REQUIRED, parallel=parallel), {}))
    for seed in range(8):
        reader = AnswerFormat(calls=form, tools=TOOLS, assured=True, single=not parallel).reader(None)
        parts, _ = reader.push(written(grammar, random.Random(seed)).strip(), can_stop=True)
        parts += reader.finish()[0]
        calls = [part for part in parts if isinstance(part, CallBegun)]
        assert len(calls) + len([part for part in parts if isinstance(part, Arguments)]) == len(parts)
        assert len(calls) == 1 or (parallel and calls)
        for call in calls:
            arguments = "".join([part.fragment for part in parts if isinstance(part, Arguments) and part.call == call.call])
            jsonschema.validate(json.loads(arguments), SCHEMAS[call.name])


def test_a_function_that_is_named_is_the_only_one() -> None:
    grammar = compiled(call_grammar(LLAMA, toolbox(use=ToolUse.REQUIRED, only="look_up"), {}))
    assert takes(grammar, '{"name": "look_up", "parameters": {"city": "Ulm"}}')
    assert not takes(grammar, '{"name": "mcp:add.point/x", "parameters": {"at": 1}}')


def test_free_text_may_call_and_must_call_well() -> None:
    grammar = compiled(call_grammar(HERMES, toolbox(), {}))
    call = '<tool_call>\\n{"name": "look_up", "arguments": {"city": "Ulm"}}\\n</tool_call>'.replace("\\n", "\n")
    for text in ("", "hello", "I < tool", call, f"so:\n{call}\n{call} done"):
        assert takes(grammar, text), text
    assert not takes(grammar, call.replace("Ulm", "Rome"))
    assert not takes(grammar, "<tool_call>hm</tool_call>")


def test_a_marker_that_is_a_control_token_is_that_token() -> None:
    source = call_grammar(HERMES, toolbox(use=ToolUse.REQUIRED), {"<tool_call>": 258})
    assert "<[258]>" in source.text
    assert allowed(compiled(source).start().mask()) == {*b"\t\n\r ", 258}


def test_a_tag_of_reasoning_may_come_first() -> None:
    for source in (
        call_grammar(HERMES, toolbox(use=ToolUse.REQUIRED), {}, opening="<think>"),
        content_grammar(json.dumps(CITY), {}, opening="<think>"),
    ):
        state = compiled(source).start()
        for byte in b"<think>":
            assert byte in allowed(state.mask())
            state.accept(byte)
        assert ord("\n") in allowed(state.mask())
    assert not takes(compiled(content_grammar(json.dumps(CITY), {}, opening="")), '<think>{"city": "Ulm"}')
    assert takes(compiled(content_grammar(json.dumps(CITY), {}, opening="")), '\n\n{"city": "Ulm"}')


def test_content_in_channels_has_its_header() -> None:
    content, header = json.dumps(CITY), HARMONY.frame.before_content
    call = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Ulm"}'
    alone = compiled(content_grammar(content, {}, opening=TAGS.opening, header=header))
    either = compiled(call_grammar(HARMONY, toolbox(), {}, opening=TAGS.opening, content=content))
    free = compiled(call_grammar(HARMONY, toolbox(), {}, opening=TAGS.opening))
    said = header + '{"city": "Ulm"}'
    assert [takes(grammar, said) for grammar in (alone, either, free)] == [True, True, True]
    assert [takes(grammar, call) for grammar in (alone, either, free)] == [False, True, True]
    assert [takes(grammar, f"{header}hello") for grammar in (alone, either, free)] == [False, False, True]
    assert [takes(grammar, TAGS.opening + said) for grammar in (alone, either, free)] == [True, True, True]
    assert not any(takes(grammar, text) for grammar in (alone, either, free) for text in ("hello", call.replace("Ulm", "Rome")))


BESIDE_CONTENT = [
    (HERMES, '<tool_call>\n{"name": "look_up", "arguments": {"city": "Ulm"}}\n</tool_call>', "\n"),
    (LLAMA, '{"name": "look_up", "parameters": {"city": "Ulm"}}', "; "),
]


@pytest.mark.parametrize(("form", "call", "between"), BESIDE_CONTENT, ids=lambda value: getattr(value, "name", ""))
def test_beside_content_calls_are_one_of_two_ways(form: CallFormat, call: str, between: str) -> None:
    content = {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}
    grammar = compiled(call_grammar(form, toolbox(), {}, content=json.dumps(content)))
    for text in ('{"x": null}', '{"x":null}', "{}", call, call + between + call):
        assert takes(grammar, text), text
    assert not any(takes(grammar, text) for text in ("hello", call.replace("Ulm", "Rome"), '{"name": "look_up"}'))


@pytest.mark.parametrize(("form", "call", "between"), BESIDE_CONTENT, ids=lambda value: getattr(value, "name", ""))
def test_content_may_begin_as_a_call_does(form: CallFormat, call: str, between: str) -> None:
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
    for content in (named, {"type": "object"}):
        grammar = compiled(call_grammar(form, toolbox(), {}, content=json.dumps(content)))
        for text in ('{"name": "look_up"}', '{"name": "Ulm"}', '{ "name":"look"}', call, call + between + call):
            assert takes(grammar, text), text


def test_a_schema_that_cannot_be_held_to_is_refused_with_its_tools_place() -> None:
    tools = (Tool("a"), Tool("b", "", {"type": "object", "not": {}}))
    with pytest.raises(GrammarInvalid) as caught:
        call_grammar(HERMES, Toolbox(tools=tools, use=ToolUse.REQUIRED), {})
    assert (caught.value.pointer, caught.value.keyword) == ("1#", "not")
    call_grammar(HERMES, Toolbox(tools=tools), {})


def test_calls_are_held_where_they_are_required_or_strict_and_can_be_told() -> None:
    loose = (Tool("a"),)
    assert is_held(HERMES, toolbox())
    assert not is_held(LLAMA, toolbox())
    assert not is_held(QWEN_CODER, toolbox())
    assert not is_held(HERMES, Toolbox(tools=loose))
    assert not is_held(HERMES, toolbox(use=ToolUse.NONE))
    assert all(is_held(form, Toolbox(tools=loose, use=ToolUse.REQUIRED)) for form in FORMATS.values())
