"""Chat templates: equal to a plain reference environment, and fitted to the messages that clients send."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cllm.errors import InvalidRequest, LoadFailed, TemplateInvalid
from cllm.text.builtin_templates import CHATML, NAMED, source_of
from cllm.text.call_signs import format_of
from cllm.text.template import ChatTemplate

# Chat templates in the styles that models bring, written for these tests; none is any model's own.
STYLE = {path.stem: path.read_text("utf-8") for path in (Path(__file__).parent / "templates").glob("*.jinja")}
NOW = datetime(2025, 3, 9, 10, 11, 12)


class PlainGeneration(Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(lineno)

    def _said(self, caller: Any) -> Any:
        return caller()


def refuse(message: str) -> None:
    raise TemplateError(message)


def tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def plain_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[PlainGeneration, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = NOW.strftime
    return environment


def plainly(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    return plain_environment().from_string(source).render(messages=messages, **(variables | kwargs))


@cache  # a template is the same for every render
def made(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: NOW)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find <things> & words",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "kinds": {"type": "array", "items": {"enum": ["noun", "verb"]}},
                    "where": {"type": "object", "properties": {"page": {"type": "integer"}}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "\u00e9nough", "parameters": {"type": "object", "properties": {}}}},
]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefgh1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


PLAIN_CHAT = [said("user", "Hello <b>"), said("assistant", "<think>\nhm\n</think>\n\nHi & welcome "), said("user", "  And \u00fc?\n")]
SYSTEM_CHAT = [said("system", "Be brief."), *PLAIN_CHAT]
LOOKED_UP = [said("tool", "found"), said("assistant", "Yes")]
OBJECT_CALLS = [said("user", "Look"), said("assistant", None, tool_calls=[call({"word": "\u00fc"})]), *LOOKED_UP]
TEXT_CALLS = [said("user", "Look"), said("assistant", None, tool_calls=[call('{"word": "x"}')]), *LOOKED_UP]
PARTS_CHAT = [
    said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    said("assistant", [{"type": "text", "text": "c"}]),
]

STYLES = [
    *(
        (name, chat)
        for name in ("qwen", "llama3", "mistral", "gemma", "phi", "deepseek", "harmony")
        for chat in (PLAIN_CHAT, PLAIN_CHAT[:1])
    ),
    *((name, SYSTEM_CHAT) for name in ("qwen", "llama3", "mistral", "phi", "deepseek", "harmony")),
    *((name, OBJECT_CALLS) for name in ("qwen", "llama3", "mistral")),
    *((name, TEXT_CALLS) for name in ("qwen", "deepseek")),
    ("parts", PARTS_CHAT),
]


@pytest.mark.parametrize(("name", "chat"), STYLES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_the_reference_environment_does(name: str, chat: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> None:
    source = STYLE[name]
    more: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "enable_thinking": False}
    assert made(source).render(chat, tools=tools, **more) == plainly(source, chat, tools=tools, **more)


# What templates do in passing, one idea each.
PHRASES = [
    "{{ messages[0].content[1:-1:2] ~ 1 ~ none ~ true ~ 2.5 }}",
    "{% for a, b in {'x': 1, 'y': [2]}.items() %}{{ loop.index }}/{{ loop.length }} {{ a }}={{ b }}{{ ', ' if not loop.last }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}>{{ m.role }};{% endfor %}",
    "{% for m in messages %}{{ m.role }}>{{ loop.nextitem.role if loop.nextitem is defined }};{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}{% for x in nothing %}{% else %}empty{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop.depth }}{{ loop(x) if x is sequence else x }} {% endfor %}",
    "{% macro m(a, b='B') %}<{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, c=4) }}",
    "{% macro m() %}[{{ caller('x') }}]{% endmacro %}{% call(y) m() %}text {{ y }} text{% endcall %}",
    "{% set x | upper %}some {{ messages[0].role }}{% endset %}{{ x }}{% filter replace('a', 'b') %}banana{% endfilter %}",
    "{{ [3, 1, 2] | sort | reverse | list }}{{ (1, 2) + (3,) }}{{ [1] * 3 }}{{ 'ab' * 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 1 / 4 }}",
    "{{ '%s: %05.1f%%' % ('x', 2.5) }}{{ '{:>8}|{a[0]}'.format('r', a=[1]) }}{{ '%s-%s' | format('a', 'b') }}{{ 'x' | center(7) }}|",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'in', ['user']) | list | length }}",
    "{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | first }}{{ 'a b' | title }}{{ ' x ' | trim }}|",
    "{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}",
    "{{ 2.567 | round(1) }}{{ '12' | int + 1 }}{{ [1, 2] | sum }}",
    "{{ 'a\\nb\\n\\nc' | indent(2) }}{{ 'a\\nb' | indent('> ', true) }}{{ 'one two three' | truncate(7) }}{{ 'a b' | wordcount }}",
    "{{ {'b': 1, 'a': '<\u00fc>'} | tojson }}{{ {'b': 1, 'a': [1]} | tojson(indent=2, sort_keys=true) }}",
    "{{ ['\u00fc'] | tojson(ensure_ascii=true) }}",
    "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ {'k': none} | tojson(indent='\t') }}",
    "{{ 'a' | e }}{{ '<' | escape ~ '<' }}{{ '<' | safe + '<' }}",
    "{{ messages[0].x is defined }}{{ messages[9] }}{{ undefined_name | default('d') }}",
    "{{ messages[0].get('zz', 'g') }}{{ messages[0].keys() | list }}",
    "{{ 'a,b,,c'.split(',') | unique | list }}{{ '--'.join(['x', 'y']) }}",
    "{{ 'aXbX'.replace('X', '12') }}{{ 'abc'.ljust(5) }}|{{ 'a\tb'.expandtabs(4) }}",
    "{{ 1 < 2 < 3 }}{{ 'b' in 'abc' and 'z' not in 'abc' }}{{ 1 == 1.0 }}",
    "{{ (1, 2) == (1, 2) }}{{ not [] }}{{ 3 if 0 }}|{{ -3 | abs }}{{ +4 }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + [i] %}{% endfor %}{{ ns.a }}",
    "{{ dict(a=1) }}{{ cycler('a', 'b').next() }}",
    "{% if messages[0].content is string %}s{% endif %}{{ messages | last | length }}",
    "{{ {'update': 1}.update }}{{ {'pop': 1}['pop'] }}{{ 'x'.upper() }}",
    "{% for k, g in messages | groupby('role') %}{{ k }}{{ g | length }}{% endfor %}",
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}",
    "{{- strftime_now('%Y-%m-%d') -}}  \n  {%- if true %} x {% endif -%} \n y\n   {# note #}\n{% raw %}{{ raw }}{% endraw %}\n",
]


@pytest.mark.parametrize("source", PHRASES)
def test_phrases_render_as_the_reference_environment_does(source: str) -> None:
    assert made(source)._render(PLAIN_CHAT, add_generation_prompt=True) == plainly(source, PLAIN_CHAT)


def test_the_builtin_template_is_plain_chatml() -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert made(CHATML).render([said("system", "Be brief."), said("user", "Hi")]) == expected


# --- features, and messages that are made to fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("qwen", {"system", "tools", "thinking"}),
        ("llama3", {"system", "tools", "objects"}),
        ("mistral", {"system", "tools", "objects"}),
        ("gemma", set()),
        ("phi", {"system"}),
        ("deepseek", {"system"}),
        ("parts", {"system", "tools", "parts"}),
        ("harmony", {"system", "tools", "objects"}),
    ],
)
def test_features_are_found_by_rendering(name: str, features: set[str]) -> None:
    found = made(STYLE[name]).features
    flags = {
        "system": found.supports_system,
        "tools": found.supports_tools,
        "objects": found.wants_object_arguments,
        "parts": found.wants_parts,
        "thinking": "enable_thinking" in found.variables,
    }
    assert {name for name, is_there in flags.items() if is_there} == features
    assert "messages" in found.variables
    assert "range" not in found.variables


@pytest.mark.parametrize(("name", "several"), [("qwen", True), ("mistral", True), ("llama3", False), ("gemma", True), ("harmony", False)])
def test_a_template_that_refuses_several_calls_in_one_message_is_found_out(name: str, several: bool) -> None:
    assert made(STYLE[name]).features.takes_several_calls is several


@pytest.mark.parametrize("content", [None, "", "let me look", [{"type": "text", "text": "let me look"}]])
def test_reasoning_before_a_call_is_told_by_the_name_that_the_template_has_for_it(content: Any) -> None:
    calling = said("assistant", content, reasoning_content="hm", tool_calls=[call('{"word": "x"}')])
    text = made(STYLE["harmony"]).render([said("user", "Look"), calling, said("tool", "found")])
    thought = "hm\n\nlet me look" if content else "hm"
    assert f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.look_up<|channel|>commentary json" in text
    assert made(STYLE["qwen"]).features.reasoning_name == made(STYLE["mistral"]).features.reasoning_name == "reasoning_content"
    assert calling["reasoning_content"] == "hm"
    planned = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ m.tool_plan }}>{{ c.function.name }}{% endfor %}"
    assert made(planned + "{% endfor %}").render([said("user", "Look"), calling, said("tool", "found")]).count("<hm>look_up") == 1


def test_arguments_are_objects_where_a_template_writes_these_in_a_way_of_its_own() -> None:
    turns = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}[%s]{% endfor %}{% endfor %}"
    keyed = "{% if A is mapping %}{% for k, v in A | items %}{{ k }}={{ v }};{% endfor %}{% else %}{{ A }}{% endif %}"
    for written, wants in (
        (keyed, True),
        ("{{ A | tojson }}", True),
        ("{{ A }}", False),
        ("{{ A if A is string else A | tojson }}", False),
    ):
        template = made(turns.replace("%s", written.replace("A", "c.function.arguments")))
        assert template.features.wants_object_arguments is wants, written
    assert "[word=x;]" in made(turns.replace("%s", keyed.replace("A", "c.function.arguments"))).render(TEXT_CALLS)


def test_text_parts_are_joined_for_templates_that_want_a_string() -> None:
    joined = [said("user", "a\nb"), said("assistant", "c")]
    for name in ("qwen", "phi", "deepseek"):
        template = made(STYLE[name])
        assert template.render(PARTS_CHAT) == template.render(joined)


def test_a_string_becomes_a_part_for_templates_that_want_parts() -> None:
    assert made(STYLE["parts"]).render([said("user", "hi")]) == "[USER] hi\n"


def test_other_parts_than_text_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="text only"):
        made(CHATML).render([said("user", [{"type": "image_url", "image_url": {"url": "x"}}])])


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_arguments_in_json_text_become_objects_where_the_template_encodes_them(name: str) -> None:
    chat = [said("user", "Look"), said("assistant", None, tool_calls=[call('{"word": "\u00fc"}')]), said("tool", "found")]
    assert '{"word": "\u00fc"}' in made(STYLE[name]).render(chat)


def test_arguments_that_are_not_json_are_refused_where_they_must_be_objects() -> None:
    with pytest.raises(InvalidRequest, match="not JSON"):
        made(STYLE["llama3"]).render([said("user", "x"), said("assistant", None, tool_calls=[call("{")])])


@pytest.mark.parametrize("content", [None, "", "missing"])
def test_a_message_that_only_calls_has_the_empty_content_that_the_template_wants(content: str | None) -> None:
    message = said("assistant", content, tool_calls=[call('{"word": "x"}')])
    if content == "missing":
        del message["content"]
    assert "<|calls|>look_up" in made(STYLE["deepseek"]).render([said("user", "x"), message])


def test_an_empty_string_stands_for_no_content_where_none_is_printed() -> None:
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %};{% endfor %}"
    template = made(source)
    assert template.features.empty_content == ""
    assert template.render([said("user", "x"), said("assistant", None, tool_calls=[call("{}")])]) == "x;{};"


def test_a_call_is_probed_with_what_comes_after_it() -> None:
    source = "{% for m in messages %}{{ m.content if loop.last else m.content.strip() }}{{ m.tool_calls }};{% endfor %}"
    assert made(source).features.empty_content == ""


def test_json_text_can_be_decoded() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ (c.function.arguments | from_json).word }}{% endfor %}{% endfor %}"
    assert made(source)._render(TEXT_CALLS) == "x"


def test_a_system_message_goes_before_the_users_where_the_template_has_no_place_for_it() -> None:
    expected = "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\n"
    assert made(STYLE["gemma"]).render([said("system", "Be brief."), said("user", "Hello")]) == expected


ANY_ORDER = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
STRICT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning') }}"
    "{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}"
    "[system:{{ ns.system }}]{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
TURNS = [said("system", "a"), said("user", "b"), said("system", "c"), said("assistant", "d"), said("system", "e"), said("user", "f")]


@pytest.mark.parametrize("source", [STRICT_SYSTEM, LAST_SYSTEM])
def test_system_messages_that_a_template_refuses_or_loses_are_told_in_the_turns_beside_them(source: str) -> None:
    told = made(source).render(TURNS, add_generation_prompt=False)
    assert told == "[system:a][user:b\n\nc][assistant:d][user:e\n\nf]"
    assert told.startswith(made(source).render(TURNS[:3], add_generation_prompt=False))  # what is cached stays of use
    assert made(source).render([said("system", "a"), said("system", "b"), said("user", "c")]) == "[system:a\n\nb][user:c]"
    assert made(source).render([said("user", "a"), said("assistant", "b"), said("system", "c")]).endswith("[user:a][assistant:b][user:c]")


def test_a_template_that_takes_system_messages_anywhere_gets_them_where_they_are() -> None:
    assert made(ANY_ORDER).render(TURNS) == "[system:a][user:b][system:c][assistant:d][system:e][user:f]"


def calling(content: Any, *results: str) -> list[dict[str, Any]]:
    calls = [call('{"word": "x"}') | {"id": f"call_{i}"} for i, _ in enumerate(results)]
    told = [said("tool", one, tool_call_id=f"call_{i}") for i, one in enumerate(results)]
    return [said("user", "Look"), said("assistant", content, tool_calls=calls), *told]


SHOWN = "<{{ m.role }}>{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
BEHIND = (  # as Gemma 4's does
    "{% for m in messages %}{% if m.role != 'tool' %}" + SHOWN + "{% if m.tool_calls %}{% for r in messages[loop.index:] "
    "if r.role == 'tool' %}({{ r.content }}){% endfor %}{% endif %}{{ m.content or '' }}{% endif %}{% endfor %}"
)
IN_CALLS = (  # as that of its first release
    "{% for m in messages %}"
    + SHOWN
    + "{% for r in m.tool_responses or [] %}({{ r.name }}:{{ r.response }}){% endfor %}{{ m.content or '' }}{% endfor %}"
)


def test_what_is_said_beside_a_call_stands_before_its_result() -> None:
    assert made(BEHIND).render(calling("so", "ok")) == "<user>Look<assistant>so<assistant>[look_up](ok)"
    assert made(BEHIND).render(calling(None, "ok")) == "<user>Look<assistant>[look_up](ok)"
    assert made(STYLE["qwen"]).normalize(calling("so", "ok"))[1]["content"] == "so"


def test_a_call_behind_what_is_said_has_a_head_where_a_template_takes_it_for_more_of_the_turn_before() -> None:
    head = "{% if not (m.role == 'assistant' and loop.previtem and loop.previtem.role == 'assistant') %}<{{ m.role }}>{% endif %}"
    template = made(BEHIND.replace("<{{ m.role }}>", head))
    assert template.features.speaker == "model"
    assert template.render(calling("so", "ok")) == "<user>Look<model>so<assistant>[look_up](ok)"
    assert template.render(calling(None, "ok")) == "<user>Look<assistant>[look_up](ok)"
    refusing = "{% if m.role == 'model' %}{{ raise_exception('who?') }}{% endif %}"
    for source in (BEHIND, IN_CALLS, BEHIND.replace("<{{ m.role }}>", refusing + head)):
        assert made(source).features.speaker == "assistant"


IN_PARTS = (  # as Mistral's later ones do
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "text"), [("so", "so"), ([{"type": "text", "text": "s"}, {"type": "text", "text": "o"}], "s\no"), (None, ""), ("", "")]
)
def test_reasoning_is_a_part_of_the_content_where_a_template_looks_for_it_there(content: Any, text: str) -> None:
    template = made(IN_PARTS)
    turns = calling(content, "ok")
    turns[1]["reasoning_content"] = "hm"
    assert template.render(turns) == f"<user>Look<assistant>[THINK]hm[/THINK]{text}[look_up]<tool>ok"
    assert template.render(calling(content, "ok")) == f"<user>Look<assistant>{text}[look_up]<tool>ok"


def test_reasoning_in_a_part_can_be_gone_on_from() -> None:
    turns = [said("user", "Look"), said("assistant", "", reasoning_content="hm")]
    assert made(IN_PARTS).render(turns, continue_final_message=True) == "<user>Look<assistant>[THINK]hm"
    turns[1]["content"] = "so"
    assert made(IN_PARTS).render(turns, continue_final_message=True) == "<user>Look<assistant>[THINK]hm[/THINK]so"


@pytest.mark.parametrize("shown", ["m.content", "m.content | tojson", "m.content | string"])
def test_parts_that_a_template_does_not_look_into_are_none_for_it(shown: str) -> None:
    assert not made("{% for m in messages %}{{ %s }}{% endfor %}".replace("%s", shown)).features.wants_reasoning_in_parts


def test_results_are_told_with_the_calls_where_a_template_looks_for_them_there() -> None:
    template = made(IN_CALLS)
    assert template.render(calling(None, "ok", "no")) == "<user>Look<assistant>[look_up][look_up](look_up:ok)(look_up:no)"
    assert template.render(calling("so", "ok")) == "<user>Look<assistant>so<assistant>[look_up](look_up:ok)"
    assert template.render([said("user", "Look"), said("tool", "of nothing")]) == "<user>Look<tool>of nothing"


def test_a_turn_that_says_nothing_is_left_out_where_it_would_be_refused() -> None:
    refusing = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('empty') }}"
        "{% endif %}[{{ m.content or '' }}]{% endfor %}"
    )
    turns = [said("user", "a"), said("assistant", "", reasoning_content="hm"), said("user", "b"), said("assistant", "c"), said("user", "d")]
    assert made(refusing).render(turns) == "[a][b][c][d]"
    assert made(CHATML).normalize(turns)[1]["content"] == ""


def test_neighbours_are_one_turn_where_the_roles_must_alternate() -> None:
    template = made(STYLE["mistral"])
    assert template.render([said("user", "a"), said("user", "b")]) == "<s>[INST] a\n\nb[/INST]"
    results = [said("user", "Look"), said("assistant", None, tool_calls=[call('{"word": "x"}')]), said("tool", "found", name="look_up")]
    assert template.render([*results, said("user", "go on")]).endswith('[TOOL_RESULTS] {"content": found\n\ngo on}[/TOOL_RESULTS]')
    parted = [said("user", [{"type": "text", "text": "a"}]), said("user", "b")]
    assert template.render(parted) == "<s>[INST] a\n\nb[/INST]"
    assert made(STYLE["qwen"]).normalize([said("user", "a"), said("user", "b")]) == [said("user", "a"), said("user", "b")]


def test_the_efforts_that_a_template_takes_are_found_by_trying() -> None:
    refusing = "{% if reasoning_effort not in ['low', 'xhigh'] %}{{ raise_exception('unexpected') }}{% endif %}{{ messages[0].content }}"
    assert made(refusing).features.efforts == ("low", "xhigh")
    assert made(STYLE["harmony"]).features.efforts == ("low", "medium", "high")
    assert made("{{ messages[0].content }}{{ '!' if reasoning_effort == 'max' }}").features.efforts == ("low", "medium", "high", "max")
    assert made(STYLE["qwen"]).features.efforts == ()


def test_normalising_leaves_the_callers_messages_alone() -> None:
    messages = [said("system", "s"), said("user", [{"type": "text", "text": "a"}]), said("assistant", "", tool_calls=[call("{}")])]
    before = json.dumps(messages)
    for source in STYLE.values():
        made(source).normalize(messages)
    assert json.dumps(messages) == before


# --- going on from the final message ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "ending"),
    [
        ("qwen", "Once ", "<|im_start|>assistant\nOnce "),
        ("qwen", "", "<|im_start|>assistant\n"),
        ("llama3", "", "<|start_header_id|>assistant<|end_header_id|>\n\n"),  # this trims the message, and not its own header
        ("gemma", " ", "<start_of_turn>model\n"),
        ("mistral", "", "[/INST]"),
        ("mistral", "Once  ", "[/INST] Once"),  # this template trims, so the space would never have been seen
        ("gemma", "Hello", "<start_of_turn>model\nHello"),  # the user said the same
        ("phi", "Once\n", "<|assistant|>\nOnce\n"),
    ],
)
def test_the_prompt_ends_where_the_final_message_ends(name: str, content: str, ending: str) -> None:
    text = made(STYLE[name]).render([said("user", "Hello"), said("assistant", content)], continue_final_message=True)
    assert text.endswith(ending)


def test_a_part_can_be_gone_on_from() -> None:
    assert made(STYLE["parts"]).render(PARTS_CHAT, continue_final_message=True).endswith("[ASSISTANT] c")


@pytest.mark.parametrize("messages", [[], [said("user", "Hello")]])
def test_only_the_assistants_message_can_be_gone_on_from(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match="not the assistant's"):
        made(CHATML).render(messages, continue_final_message=True)


def test_a_template_that_hides_the_final_message_cannot_go_on() -> None:
    with pytest.raises(InvalidRequest, match="does not show"):
        made("{{ messages[0].content }}").render([said("user", "x"), said("assistant", "y")], continue_final_message=True)


FOLDED = (  # as Gemma 3's, which writes what the system says into the user's first turn
    "{% set sys = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if sys else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ sys if loop.first }}{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


DEFAULTED = FOLDED.replace(  # as Mistral Small 3's, which has a system message of its own where there is none
    "else '' %}", "else 'DEFAULT\n\n' %}"
).replace("(messages[1:] if sys else messages)", "(messages[1:] if messages[0].role == 'system' else messages)")
ASKED = (  # as Qwen3.5's, which looks for a question anywhere
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user query found') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_systems_word_stays_one_where_the_model_speaks_first() -> None:
    text = made(DEFAULTED).render([said("system", "You are Ann."), said("assistant", "Hi!"), said("user", "yo")])
    assert text == "<user>You are Ann.\n\n</s><assistant>Hi!</s><user>yo</s><assistant>"


NO_USER_FIRST = [("assistant", "user"), ("system", "assistant", "user"), ("system",), ("system", "system"), ("assistant",)]


@pytest.mark.parametrize("source", [STYLE["mistral"], STYLE["gemma"], FOLDED, ASKED], ids=["mistral", "gemma", "folded", "asked"])
@pytest.mark.parametrize("roles", NO_USER_FIRST)
def test_a_conversation_that_no_user_begins_is_shown_whole(source: str, roles: tuple[str, ...]) -> None:
    messages = [said(role, f"word{i}") for i, role in enumerate(roles)]
    text = made(source).render(messages)
    assert [i for i in range(len(roles)) if f"word{i}" not in text] == []


# --- refusals --------------------------------------------------------------------------------------------------------------------


def test_a_template_that_raises_refuses_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="refused: Only user and assistant roles") as refused:
        made(STYLE["mistral"]).render([said("user", "a"), said("function", "b")])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[7].role.x }}", "{{ messages[0].content + none }}", "{{ messages[0].content.nope() }}", "{{ 1 / 0 }}"]
)
def test_messages_that_a_template_stumbles_over_are_the_clients_affair(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        made(source).render(PLAIN_CHAT)


def test_a_long_refusal_is_cut() -> None:
    with pytest.raises(InvalidRequest) as refused:
        made("{{ raise_exception('x' * 100000) }}").render(PLAIN_CHAT)
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_request_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        made(CHATML).render(PLAIN_CHAT, **{name: "x"})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("\n{% for x in y %}\n{{ x }", 3),
        ("ok\n{{ x | no_such_filter }}", 2),
        ("{% if %}", 1),
        ("\n\n{% include 'other' %}", 3),
        ("{% autoescape 'a' * 10 ** 10 %}{% endautoescape %}", 1),
        ("{% block b %}{% endblock %}", 1),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", None),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, None),
        ("{% for x in y %}" * 30 + "{% endfor %}" * 30, None),
        ("{{ " + "9" * 10_000 + " }}", None),
        ("x" * 200_000, None),
    ],
)
def test_a_template_that_cannot_be_compiled_says_where(source: str, line: int | None) -> None:
    with pytest.raises(TemplateInvalid) as invalid:
        made(source)
    assert invalid.value.line == line
    assert isinstance(invalid.value, LoadFailed)


@pytest.mark.parametrize("given", ["1", "call_0123456789", "abcdefgh1"])
def test_ids_are_long_enough_for_a_template_that_wants_nine_characters_at_least(given: str) -> None:
    source = """{% for m in messages %}{{ m.content or "" }}{% for c in m.tool_calls or () %}
        {% if c.id|length < 9 %}{{ raise_exception("too short") }}{% endif %}{{ c.id[-9:] }}{{ c.function.arguments }}{% endfor %}
        {% if m.role == "tool" and m.tool_call_id|length < 9 %}{{ raise_exception("too short") }}{% endif %}{% endfor %}"""
    calling = said("assistant", None, tool_calls=[call('{"word": "x"}') | {"id": given}])
    text = made(source).render([said("user", "Look"), calling, said("tool", "found", tool_call_id=given)])
    assert "found" in text
    assert ("abcdefgh1" in text) is (given == "abcdefgh1")


def test_two_calls_of_a_turn_reach_templates_that_take_one() -> None:
    calls = [call({"word": word}) | {"id": f"abcdefgh{word}"} for word in "12"]
    results = [said("tool", f"found{word}", tool_call_id=f"abcdefgh{word}", name="look_up") for word in "21"]
    for name in ("llama3", "harmony"):
        text = made(STYLE[name]).render([said("user", "Look"), said("assistant", None, tool_calls=calls), *results, said("user", "So?")])
        places = [text.index(part) for part in ('"1"', "found1", '"2"', "found2")]
        assert places == sorted(places), name


KIMI = """{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == "tool" %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content or "" }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id
}}<|tool_call_argument_begin|>{{ c.function.arguments }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endfor %}"""


def test_where_ids_alone_are_shown_they_name_the_function() -> None:
    first = [call('{"word": "x"}') | {"id": "call_0"}, call('{"word": "y"}') | {"id": "call_1"}]
    results = [said("tool", f"of {i}", tool_call_id=f"call_{i}") for i in (1, 0)]
    chat = [said("user", "Look"), said("assistant", None, tool_calls=first), *results]
    later = [said("assistant", None, tool_calls=[call('{"word": "z"}') | {"id": "functions.look_up:2"}])]
    template = made(KIMI)
    text = template.render([*chat, *later])
    for i, word in enumerate("xyz"):
        assert f'<|tool_call_begin|>functions.look_up:{i}<|tool_call_argument_begin|>{{"word": "{word}"}}' in text
    assert text.index("## Return of functions.look_up:0\nof 0") < text.index("## Return of functions.look_up:1\nof 1")
    assert text.startswith(template.render(chat))
    form = format_of(KIMI, template.features.written_call)
    assert form is not None
    assert form.name == "kimi"


def test_where_a_template_makes_the_ids_of_calls_itself_their_results_have_the_same_which_each_turn_counts_anew() -> None:
    made_there = KIMI.replace("{{ c.id\n}}", "{{ 'functions.' + c.function.name + ':' + loop.index0 | string }}")
    calls = [call('{"word": "x"}') | {"id": f"call_{i}"} for i in range(3)]
    told = [said("tool", f"of {i}", tool_call_id=f"call_{i}") for i in range(3)]
    turns = [said("assistant", None, tool_calls=calls[:2]), told[1], told[0], said("assistant", None, tool_calls=calls[2:]), told[2]]
    template = made(made_there)
    text = template.render([said("user", "Look"), *turns])
    assert [part.partition("<")[0] for part in text.split("## Return of ")[1:]] == [
        "functions.look_up:0\nof 0",
        "functions.look_up:1\nof 1",
        "functions.look_up:0\nof 2",
    ]
    assert [part.partition("<")[0] for part in text.split("<|tool_call_begin|>")[1:]] == [f"functions.look_up:{i}" for i in (0, 1, 0)]
    form = format_of(made_there, template.features.written_call)
    assert form is not None
    assert form.name == "kimi"


def test_where_names_are_shown_ids_stay() -> None:
    shown = KIMI.replace("{{ c.id\n}}", "{{ c.function.name }}#{{ c.id }}")
    text = made(shown).render([said("user", "Look"), said("assistant", None, tool_calls=[call("{}") | {"id": "call_0"}])])
    assert "look_up#call_0<" in text


def test_ids_of_calls_are_shortened_for_a_template_that_wants_them_short() -> None:
    chat = [
        said("user", "Look"),
        said("assistant", None, tool_calls=[call({"word": "x"}) | {"id": "call_0123456789"}]),
        said("tool", "found", tool_call_id="call_0123456789"),
    ]
    (_, calls, result) = made(STYLE["mistral"]).normalize(chat)
    short = calls["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert result["tool_call_id"] == short
    assert short in made(STYLE["mistral"]).render(chat)
    assert made(STYLE["qwen"]).normalize(chat)[1]["tool_calls"][0]["id"] == "call_0123456789"


COLLECTS = """{%- set ns = namespace(all='') -%}
{%- for tool in tools -%}{%- set ns.all = ns.all + (tool.function | tojson) + '\n' -%}{%- endfor -%}
{{- ns.all -}}{%- for message in messages -%}{{- message.content -}}{%- endfor -%}"""


def described(n_tools: int, n_chars: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{n}", "description": "x" * n_chars}} for n in range(n_tools)]


def test_a_template_that_collects_all_tools_in_a_variable_takes_hundreds() -> None:
    tools = described(300, 450)
    prompt = made(COLLECTS).render([said("user", "hello")], tools=tools)
    assert prompt.count("x" * 450) == 300


def test_of_more_than_it_takes_the_request_is_told() -> None:
    with pytest.raises(InvalidRequest, match="too long to render"):
        made(COLLECTS).render([said("user", "hello")], tools=described(512, 1900))


# --- schemas that a template was not made for ---------------------------------------------------------------------------------


LETTERS = (  # as Hermes' does with a type that it has no word for
    "{% macro word(s) %}{% if s.type == 'string' %}str{% elif s.type is iterable %}[{% for t in s.type %}{{ word({'type': t}) }}"
    "{% endfor %}]{% endif %}{% endmacro %}{% for t in tools or [] %}{% for name, p in t.function.parameters.properties | items %}"
    "{{ name }}:{{ word(p) }} {% endfor %}{% endfor %}{{ messages[-1].content }}"
)
JOINED = (  # as gpt-oss's
    "{% for t in tools or [] %}{% for name, p in t.function.parameters.properties.items() %}{{ name }}"
    "{% if p.enum or p.oneOf %}{{ '=' + p.default }}{% endif %} {% endfor %}{% endfor %}{{ messages[-1].content }}"
)
AT_ROOT = (  # as Seed-OSS's
    "{% for t in tools or [] %}({% for name, p in t.function.parameters.properties.items() %}{{ name }}"
    "{{ '!' if name in t.function.parameters.required }}{% endfor %}){% endfor %}{{ messages[-1].content }}"
)


def taking(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def offered(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("source", "parameters", "shown"),
    [
        (LETTERS, taking(a={"type": ["string", "null"]}, b={"type": "null"}, c={"type": "any"}), "a:str b:[] c:[] hi"),
        (JOINED, taking(a={"enum": ["x", None], "default": None}, b={"oneOf": [{}], "default": [5]}), "a=null b=[5] hi"),
        (AT_ROOT, {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": taking()}}, "()hi"),
        (AT_ROOT, {"type": "object", "anyOf": [taking(), taking()]}, "()hi"),
        (AT_ROOT, {**taking(a={}), "required": None}, "(a)hi"),
        (AT_ROOT, {"type": "object", "properties": None}, "()hi"),
    ],
)
def test_a_template_that_stumbles_over_an_ordinary_schema_is_told_a_plainer_one(source: str, parameters: Any, shown: str) -> None:
    tools = offered(parameters)
    before = json.dumps(tools)
    assert made(source).render([said("user", "hi")], tools=tools) == shown
    assert made(source).render([said("user", "so"), said("assistant", "hi")], tools=tools, continue_final_message=True) == shown
    assert json.dumps(tools) == before


def test_a_schema_that_a_template_can_work_with_is_told_as_it_is() -> None:
    parameters = taking(a={"type": ["string", "null"], "enum": ["x", None], "default": None})
    text = made("{{ tools | tojson }}{{ messages[0].content }}").render([said("user", "hi")], tools=offered(parameters))
    assert text == json.dumps(offered(parameters)) + "hi"


NEVER = "{% for t in tools or [] %}{{ t.function.nothing.at_all }}{% endfor %}{{ messages[0].content }}"


def test_tools_that_cannot_be_told_at_all_are_named_where_the_messages_are_not_at_fault() -> None:
    with pytest.raises(InvalidRequest, match=r"cannot render these tools: .*nothing") as refused:
        made(NEVER).render([said("user", "hi")], tools=offered(taking()))
    assert refused.value.param == "tools"
    for source, why in (
        (NEVER + "{{ messages[0].content + none }}", r"cannot render these messages: .*nothing"),
        ("{% if tools %}{{ raise_exception('none here') }}{% endif %}{{ messages[0].content }}", "refused: none here"),
    ):
        with pytest.raises(InvalidRequest, match=why) as refused:
            made(source).render([said("user", "hi")], tools=offered(taking()))
        assert refused.value.param == "messages"


# --- names in the place of templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mistral-v1", " [INST] S\n\nU [/INST]  A </s> [INST] V [/INST]"),
        ("mistral-v3", "[INST] S\n\nU[/INST] A</s>[INST] V[/INST]"),
        ("mistral-v3-tekken", "[INST]S\n\nU[/INST] A </s>[INST]V[/INST]"),
        ("mistral-v7", "[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST]  A </s>[INST] V[/INST]"),
        ("mistral-v7-tekken", "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST] A </s>[INST]V[/INST]"),
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n A <|im_end|>\n"
            "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_template_that_is_known_by_name_is_written_as_its_model_has_learnt_it(name: str, shown: str) -> None:
    template = ChatTemplate(source_of(f" {name}\n") or "", bos_token="<s>", eos_token="</s>")
    turns = [("system", "S"), ("user", "U"), ("assistant", " A "), ("user", "V")]
    assert template.render([{"role": role, "content": content} for role, content in turns]) == shown


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v3", "mistral-v3-tekken"])
def test_what_would_stand_in_the_answers_place_is_a_part_of_the_turn_before(name: str) -> None:
    template = ChatTemplate(NAMED[name], bos_token="", eos_token="</s>")
    two = template.render([{"role": "user", "content": "A"}, {"role": "user", "content": "B"}])
    late = template.render([{"role": "user", "content": "A"}, {"role": "system", "content": "S"}])
    assert [text.rstrip().endswith("[/INST]") and text.count("[/INST]") for text in (two, late)] == [1, 1]
    assert two.index("A") < two.index("B")
    assert "S" in late


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v3", "mistral-v3-tekken"])
def test_what_a_system_message_has_begun_is_ended_before_an_answer(name: str) -> None:
    template = ChatTemplate(NAMED[name], bos_token="", eos_token="</s>")
    texts = [template.render([said(role, role) for role in roles]) for roles in (["system"], ["system", "assistant", "user"])]
    assert [(text.count("[INST]"), text.count("[/INST]")) for text in texts] == [(1, 1), (2, 2)]
    assert texts[1].index("system") < texts[1].index("[/INST]") < texts[1].index("assistant")


def test_what_is_no_name_is_a_template_and_an_unknown_name_is_none() -> None:
    assert source_of("{{ messages }}") == "{{ messages }}"
    assert [source_of(told) for told in (None, "", "rwkv-world")] == [None, None, None]
    assert all(source_of(name) == source for name, source in NAMED.items())


# --- what a template would lose ----------------------------------------------------------------------------------------

_SYSTEM_IN_LAST_TURN = """\
{%- if messages[0].role == 'system' %}{%- set system, messages = messages[0].content, messages[1:] %}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}{{- '[CALL]' + message.tool_calls[0].function.name }}
    {%- elif message.role == 'user' %}{{- '[USER]' + (system + '|' if loop.last and system else '') + message.content }}
    {%- else %}{{- '[' + message.role + ']' + message.content }}{%- endif %}
{%- endfor %}"""

_CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_a_system_message_that_is_shown_in_the_last_turn_alone_stays_there_when_a_tool_has_told() -> None:
    template = ChatTemplate(_SYSTEM_IN_LAST_TURN, bos_token="", eos_token="")
    said = (("system", "BE"), ("user", "hi"), ("assistant", "yes"), ("user", "find"))
    asked = [{"role": role, "content": text} for role, text in said]
    call, result = (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call12345", "content": "it"},
    )
    assert template.render(asked).endswith("[USER]BE|find")
    assert template.render([*asked, call, result]) == "[USER]hi[assistant]yes[USER]BE\n\nfind[CALL]look[tool]it"


def test_a_system_message_stays_in_the_last_turn_where_what_is_said_after_a_result_is_a_part_of_that() -> None:
    refusal = (
        "{%- if loop.index0 and messages[loop.index0 - 1].role == 'tool' and message.role == 'user' %}"
        "{{ raise_exception('no') }}{%- endif %}"
    )
    source = _SYSTEM_IN_LAST_TURN.replace("{%- for message in messages %}", "{%- for message in messages %}" + refusal)
    template = ChatTemplate(source, bos_token="", eos_token="")
    question = [{"role": "system", "content": "BE"}, {"role": "user", "content": "find"}]
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": "call12345", "content": "it"}
    for later in ([], [call, result]):
        shown = template.render([*question, call, result, {"role": "user", "content": "quick"}, *later])
        assert shown.startswith("[USER]BE\n\nfind[CALL]look[tool]it\n\nquick")


_TEXT_OR_CALL = """\
{%- for message in messages %}
    {%- if message.tool_calls %}{{- '[CALL]' + message.tool_calls[0].function.name }}
    {%- else %}REFUSED{{- '[' + message.role + ']' + message.content }}{%- endif %}
{%- endfor %}"""
_REFUSES_A_SECOND = """\
{%- if messages | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list | length > 1 %}
    {{- raise_exception('alternate') }}
{%- endif %}"""


@pytest.mark.parametrize("refusal", ["", _REFUSES_A_SECOND])
def test_text_that_would_be_lost_beside_a_call_is_a_turn_of_its_own_unless_such_turns_are_refused(refusal: str) -> None:
    template = ChatTemplate(_TEXT_OR_CALL.replace("REFUSED", refusal), bos_token="", eos_token="")
    call = {"role": "assistant", "content": "I look", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": "call12345", "content": "it"}
    shown = template.render([{"role": "user", "content": "find"}, call, result, call, result])
    assert shown.count("I look") == (0 if refusal else 2)
    assert shown.count("[CALL]look") == 2
