"""Reading answers: whatever the pieces, the same parts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.text import backlog, call_expressions
from cllm.text.answers import AnswerFormat
from cllm.text.backlog import N_PIECE_MAX
from cllm.text.call_formats import (
    APRIEL,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_JSON,
    DSML,
    FORMATS,
    FUNCTIONARY,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    PHI,
    QWEN_CODER,
    SEED,
    CallFormat,
)
from cllm.text.call_signs import format_of
from cllm.text.markers import N_BLANKS_MAX
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import TAGS, ReasoningTags, mentions_reasoning, tags_in
from cllm.text.stops import StopStrings
from cllm.text.tools import Tool
from tests.lines import n_lines

THINK = TAGS[0]
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}
TOOLS = (Tool("add", "adds", NUMBERS), Tool("look_up", "looks up", NUMBERS))


def test_names_in_expressions_may_have_what_names_may_have() -> None:
    form = AnswerFormat(calls=LFM, tools=(Tool("mcp:a.b/c-d", "", NUMBERS),))
    called = [CallBegun(0, "mcp:a.b/c-d"), Arguments(0, '{"a": 1}')]
    assert read(form, "<|tool_call_start|>[mcp:a.b/c-d(a=1)]<|tool_call_end|>") == called


def read(form: AnswerFormat, *pieces: str, stop: tuple[str, ...] = ()) -> list[Part]:
    """The parts of an answer that comes in pieces, neighbours of one kind joined."""
    reader = form.reader(StopStrings(stop) if stop else None)
    parts: list[Part] = []
    for piece in pieces:
        more, match = reader.push(piece, can_stop=True)
        parts += more
        if match is not None or reader.is_done:
            return joined(parts)
    return joined(parts + reader.finish()[0])


def joined(parts: list[Part]) -> list[Part]:
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments) and part.call == last.call:
            result[-1] = Arguments(part.call, last.fragment + part.fragment)
        else:
            result.append(part)
    return result


def of(calls: CallFormat, *, assured: bool = False, single: bool = False, thinks: bool = False) -> AnswerFormat:
    return AnswerFormat(calls=calls, tools=TOOLS, assured=assured, single=single, tags=THINK if thinks else None)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("end", ["</tool_ca", "<tool", "", ", ", "</tool_call>\n<tool_c"])
def test_a_marker_that_the_end_of_the_answer_has_cut_behind_a_call_is_no_content(end: str) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    called = [CallBegun(0, "add"), Arguments(0, '{"a": 1}')]
    assert read(of(HERMES), text + end) == called
    assert read(of(HERMES), text + "</tool or") == [*called, Content("</tool or")]


def test_a_cut_marker_that_another_call_may_begin_with_is_no_content_either() -> None:
    assert read(of(QWEN_CODER), "<tool_call>\n<function=add>\n</function>\n<fun")[-1] == Arguments(0, "{}")


def test_a_call_in_reasoning_after_which_another_was_begun_was_but_thought_of() -> None:
    form = attrs.evolve(of(HERMES, thinks=True), opened=True)
    text = 'hm <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_c'
    assert read(form, text) == [Reasoning(text)]


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags.opening)
def test_reasoning_is_told_from_content_without_the_blanks_around_it(tags: object) -> None:
    form = AnswerFormat(tags=tags)  # type: ignore[arg-type]
    text = f"\n{form.tags.opening}\nhm, so\n\nyes\n{form.tags.closing}\n\nIt is 5.\n"  # type: ignore[union-attr]
    assert read(form, text) == [Reasoning("hm, so\n\nyes"), Content("It is 5.\n")]


def test_reasoning_that_the_prompt_has_opened_needs_no_tag() -> None:
    assert read(AnswerFormat(tags=THINK, opened=True), "hm</think>5") == [Reasoning("hm"), Content("5")]


def test_reasoning_that_never_closes_is_reasoning_to_the_end() -> None:
    assert read(AnswerFormat(tags=THINK), "<think>hm </thin") == [Reasoning("hm </thin")]


def test_what_came_in_one_token_with_the_tag_is_left_out_where_the_grammar_begins_after_it() -> None:
    held = AnswerFormat(tags=THINK, opened=True, held=True)
    assert read(held, "so\n</think", '>{"', '{"a": 5}') == [Reasoning("so"), Content('{"a": 5}')]
    assert read(held, "so\n</think", ">\n", '\n{"a": 5}') == [Reasoning("so"), Content('{"a": 5}')]
    assert read(attrs.evolve(held, opened=False), '{"a"', ": 5}") == [Content('{"a": 5}')]
    assert read(attrs.evolve(held, held=False), "so\n</think", ">It ", "is.") == [Reasoning("so"), Content("It is.")]


def test_an_empty_reasoning_is_none() -> None:
    assert read(AnswerFormat(tags=THINK), "<think>\n\n</think>\n\nhello") == [Content("hello")]


def test_reasoning_may_come_in_pieces_where_only_a_control_token_begins_one() -> None:
    thought = "<|channel>thought\n%s<channel|>"
    text = f"{thought % 'a'}{thought % ''}\n{thought % 'b'}It is 5. {thought % 'c'}"
    for pieces in ([text], text):
        assert read(AnswerFormat(tags=TAGS[4]), *pieces) == [Reasoning("a\n\nb"), Content("It is 5. "), Reasoning("\n\nc")]
    assert read(AnswerFormat(tags=TAGS[4]), f"{thought % 'a'}<|chan") == [Reasoning("a"), Content("<|chan")]
    assert read(AnswerFormat(tags=THINK), "<think>a</think><think> is a tag") == [Reasoning("a"), Content("<think> is a tag")]


@pytest.mark.parametrize("by_letter", [False, True])
def test_a_thought_behind_what_is_said_is_none_of_it_unless_something_is_said_behind_it(by_letter: bool) -> None:
    def told(text: str, form: AnswerFormat) -> list[object]:
        return read(form, *(text if by_letter else [text]))

    gemma, thought = AnswerFormat(tags=TAGS[4]), "<|channel>thought\n%s<channel|>"
    assert told(f"{thought % ''}Hello{thought % ''}", gemma) == [Content("Hello")]
    assert told(f"Hello{thought % ''}\n{thought % 'so'}<channel|>\n", gemma) == [Content("Hello"), Reasoning("so")]
    assert told("Hello<channel|>", gemma) == [Content("Hello")]
    for text in (f"It writes {thought % 'so'} then", "It writes <|channel>thought and", "<channel|> ends it", f"a{thought % ''} <|chan"):
        assert told(text, gemma) == [Content(text)]
    spoken = "It writes <|channel>thought and" + " then" * 2000
    assert told(spoken, gemma) == [Content(spoken)]
    ends = f"{thought % 'a'}Hi" + "<channel|>" * 1000
    assert "".join(part.text for part in told(ends, gemma) if isinstance(part, Content)).startswith("Hi" + "<channel|>" * 400)
    calling = AnswerFormat(tags=TAGS[4], calls=GEMMA, tools=(Tool("add", "", {}),))
    parts = told(f"Let me look.{thought % 'I call'}<|tool_call>call:add{{}}<tool_call|>", calling)
    assert parts[:2] == [Content("Let me look."), Reasoning("I call")]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["add"]


def test_an_answer_without_reasoning_is_content_with_all_its_blanks() -> None:
    assert read(AnswerFormat(tags=THINK), "\n hello") == [Content("\n hello")]
    assert read(AnswerFormat(tags=THINK), " <th") == [Content(" <th")]
    assert read(AnswerFormat(tags=THINK), "  ") == [Content("  ")]


def test_a_tag_in_the_middle_of_content_is_content() -> None:
    assert read(AnswerFormat(tags=THINK), "write <think> and </think>") == [Content("write <think> and </think>")]


def test_templates_tell_their_tags() -> None:
    assert tags_in("{{ '<think>' }}") == THINK
    assert tags_in("{{ content.split('</think>')[-1] }}") == THINK
    assert tags_in("{{ '[THINK]' }}") == TAGS[1]
    assert tags_in("{{ content }}") is None
    for word in (":opensource", ":6124c78e", ""):
        made = "{%- set HYTK = '" + word + "' %}{%- set begin = '<think{}>'.format(HYTK) %}{{ begin }}"
        assert tags_in(made) == ReasoningTags(f"<think{word}>", f"</think{word}>")
    assert tags_in("{{ '<think{}>'.format(given) }}") is None
    assert tags_in("{# <thinking> is what {# others write #}{{ content }}") is None
    assert tags_in("{# not closed <think>") == THINK
    apriel = tags_in("{{ 'between <thinking> and </thinking>, then [BEGIN FINAL RESPONSE]' }}")
    assert (apriel and apriel.opening) == "Here are my reasoning steps:"
    assert mentions_reasoning("{{ message.reasoning_content }}{# #}{{ '<|think|>' }}")
    assert not mentions_reasoning("{# thinking is told by others #}{{ content }}")


# --- tool calls, family by family -------------------------------------------------------------------------------------

ADD = [CallBegun(0, "add"), Arguments(0, '{"a": 1}')]
BOTH = [*ADD, CallBegun(1, "look_up"), Arguments(1, '{"text": "x } ] \\" {"}')]
LOOK = '{"text": "x } ] \\" {"}'
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

WRITTEN = [
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ADD),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ADD),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ADD),
    (
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "look_up", "arguments": '
        + LOOK
        + "}\n</tool_call>",
        BOTH,
    ),
    (HERMES, '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": ' + LOOK + "}]</tool_call>", BOTH),
    (HERMES, '<tool_call>{"id": 7, "type": "function", "name": "add", "arguments": {"a": 1}}', ADD),
    (QWEN_CODER, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ADD),
    (QWEN_CODER, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ADD),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ADD),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "look_up", "parameters": ' + LOOK + "}", BOTH),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": ' + LOOK + "}]", BOTH),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look_up[CALL_ID]abcdefgh1[ARGS]' + LOOK, BOTH),
    (MISTRAL, '[TOOL_CALLS]add{"a": 1}', ADD),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>" + LOOK + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ADD,
    ),
    (PHI, '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', ADD),
    (GRANITE, '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": ' + LOOK + "}]", BOTH),
    (COHERE, '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>', ADD),
    (QWEN_CODER, "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ADD),  # the opening left out, as it happens
    (GLM, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", ADD),
    (
        GLM,
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        '<tool_call>look_up<arg_key>text</arg_key><arg_value>x } ] " {</arg_value></tool_call>',
        BOTH,
    ),
    (GLM, "<tool_call>add</tool_call>", [CallBegun(0, "add"), Arguments(0, "{}")]),
    (SEED, "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>", ADD),
    (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n<invoke name="look_up">\n'
        '<parameter name="text">x } ] " {</parameter>\n</invoke>\n</minimax:tool_call>',
        BOTH,
    ),
    (
        DSML,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="text" string="true">x } ] " {</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        BOTH,
    ),
    (
        DSML,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        ADD,
    ),
    (
        KIMI,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>" + LOOK + "<|tool_call_end|><|tool_calls_section_end|>",
        BOTH,
    ),
    (LFM, "<|tool_call_start|>[add(a=1)]<|tool_call_end|>", ADD),
    (LFM, "<|tool_call_start|>[add(a=1), look_up(text='x } ] \" {')]<|tool_call_end|>", BOTH),
    (
        LFM,
        "<|tool_call_start|>[add(from='a', x-y = 2, text='(in=5, ', class=[{'if': 1}])]",
        [
            CallBegun(0, "add"),
            Arguments(0, '{"from": "a", "x-y": 2, "text": "(in=5, ", "class": [{"if": 1}]}'),
        ],
    ),
    (LFM, '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}]<|tool_call_end|>', ADD),
    (LFM, '<|tool_call_start|>[add(text="C:\\\\dir\\\\")]', [CallBegun(0, "add"), Arguments(0, '{"text": "C:\\\\dir\\\\"}')]),
    (GEMMA, "<|tool_call>call:add{a:1}<tool_call|>", ADD),
    (GEMMA, '<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:look_up{text:<|"|>x } ] " {<|"|>}<tool_call|>', BOTH),
    (NEMOTRON, '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": ' + LOOK + "}]</TOOLCALL>", BOTH),
    (APRIEL, '<tool_calls>[{"name": "add", "arguments": {"a": 1}, "id": "x"}]</tool_calls>', ADD),
    (APRIEL, '<tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "look_up", "arguments": ' + LOOK + "}\n</tool_calls>", BOTH),
    (FUNCTIONARY, '<function=add>{"a": 1}</function><function=look_up>' + LOOK + "</function>", BOTH),
    (HARMONY, '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', ADD),
    (HARMONY, ' to=functions.add<|channel|>commentary json<|message|>\n{"a": 1}\n', ADD),
    (HARMONY, '<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|end|>', ADD),
    (
        HARMONY,
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>" + LOOK,
        BOTH,
    ),
]
NO_CALLS = [
    (HERMES, "<tool_call>nothing</tool_call>"),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1]}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call> so'),
    (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1'),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{"}'),
    (HERMES, '  <tool_call>{"name": "add", "arguments": ' + '{"a":' * 200),
    (HERMES, "if a <tool"),
    (QWEN_CODER, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    (QWEN_CODER, "<tool_call>\n<function=add>\nrubbish\n</function>\n</tool_call>"),
    (LLAMA, '{"name": "Bob", "age": 3}'),
    (LLAMA, "  {so} it goes"),
    (LLAMA, '<|python_tag|>print("x")'),
    (MISTRAL, "[TOOL_CALLS] none of them"),
    (MISTRAL, "[TOOL_CALLS]add " + "x" * 600),
    (DEEPSEEK, "<｜tool▁call▁begin｜>rubbish{}<｜tool▁call▁end｜>"),
    (QWEN_CODER, "<function=unknown>\n</function>"),
    (QWEN_CODER, "so <function=add>\nrubbish"),
    (QWEN_CODER, "a <func"),
    (GLM, "<tool_call>unknown\n<arg_key>a</arg_key>"),
    (GLM, "<tool_call>add<arg_key>a</arg_key> and so"),
    (SEED, "<seed:tool_call>nothing</seed:tool_call>"),
    (MINIMAX, '<minimax:tool_call><invoke name="unknown">\n</invoke></minimax:tool_call>'),
    (DSML, '<｜DSML｜invoke name="add"> and'),
    (KIMI, "<|tool_call_begin|>rubbish{}<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(a=b)]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(a==1)]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(a=f(b=1))]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(**{'a': 1})]<|tool_call_end|>"),
    (LFM, "<|tool_call_start|>[add(a=1"),
    (LFM, "<|tool_call_start|>[no call at all"),
    (LFM, "<|tool_call_start|>[add(a=" + "[" * 200 + "1" + "]" * 200 + ")]"),
    (GEMMA, "<|tool_call>call:unknown{a:1}<tool_call|>"),
    (GEMMA, "<|tool_call>call:add{a:<tool_call|>"),
    (GEMMA, "<|tool_call>calls:add{a:1}<tool_call|>"),
    (FUNCTIONARY, "<function=add>rubbish"),
    (HARMONY, "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}"),
    (HARMONY, "<|channel|>analysis to=python code<|message|>print(1)"),
    (HARMONY, '<|channel|>commentary to=functions.add<|message|>{"a": 1]}'),
    (HARMONY, "<|channel|>commentary to=functions.add<|message|>[1]"),
    (HARMONY, "<|channel|>commentary to=functions.add<|message|>rubbish"),
    (HARMONY, '<|channel|>commentary to=functions.add<|message|>{"a": NaN}'),
    (HARMONY, '<|channel|>commentary to=functions.add<|message|> {"a": 1'),
    (HARMONY, "no header, and 1 < 2"),
    (HARMONY, "<|channel|>" + "x" * 600),
]


@pytest.mark.parametrize("assured", [False, True])
@pytest.mark.parametrize(("form", "text", "parts"), WRITTEN)
def test_a_call_is_read_as_its_family_writes_it(form: CallFormat, text: str, parts: list[Part], assured: bool) -> None:
    assert read(of(form, assured=assured), text) == parts


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content_and_nothing_of_it_is_lost(form: CallFormat, text: str) -> None:
    assert read(of(form), text) == [Content(text)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "one\n\ttwo"}}</tool_call>'),
        (HARMONY, '<|channel|>commentary to=functions.add<|message|>{"a": "one\n\ttwo"}<|call|>'),
    ],
)
def test_line_ends_and_tabs_that_were_written_as_they_are_are_escaped(form: CallFormat, text: str) -> None:
    assert read(of(form), text) == [CallBegun(0, "add"), Arguments(0, '{"a": "one\\n\\ttwo"}')]


def test_a_call_whose_functions_end_is_missing_takes_nothing_of_the_next_one() -> None:
    first = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>\n"
    second = "<tool_call>\n<function=write>\n<parameter=path>\nb\n</parameter>\n</function>\n</tool_call>"
    form = AnswerFormat(calls=QWEN_CODER, tools=(WRITE,))
    for pieces in ([first + second], list(first + second)):
        parts = read(form, *pieces)
        assert parts[-2:] == [CallBegun(0, "write"), Arguments(0, '{"path": "b"}')]


WRITE = Tool("write", "", {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}})
QUOTED = "<tool_call>\n<function=list>\n</function>\n</tool_call>"
HEAD, TAIL = "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n", "</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (HEAD + "<parameter=content>\nhello\n</parameter>\n" + TAIL, "hello"),
        (HEAD + "</parameter>\n<parameter=content>\nhello\n" + TAIL, "hello"),
        (HEAD + "<parameter=content>\nhello\n" + TAIL, "hello"),
        (HEAD + "</parameter>\n<parameter=content>\ngrep '</parameter>' x\n</parameter>\n" + TAIL, "grep '</parameter>' x"),
        (HEAD + "</parameter>\n<parameter=content>\na\n<parameter=path>\nb\n</parameter>\n" + TAIL, "a\n<parameter=path>\nb"),
        (HEAD + "</parameter>\n<parameter=content>\n" + QUOTED + "\nmore\n</parameter>\n" + TAIL, QUOTED + "\nmore"),
        (HEAD + "</parameter>" + 62 * " " + "<parameter=content>\nhello\n</parameter>\n" + TAIL, "hello"),
    ],
    ids=[
        "the first has no end",
        "the last has none",
        "neither has one",
        "one has it within",
        "a given name is text",
        "a call is quoted",
        "blanks",
    ],
)
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_values_on_lines_may_lack_the_tag_at_their_end_and_have_it_within(text: str, content: str, n: int) -> None:
    form = AnswerFormat(calls=QWEN_CODER, tools=(WRITE,))
    begun, arguments = read(form, *[text[start : start + n] for start in range(0, len(text), n)])
    assert isinstance(arguments, Arguments)
    assert (begun, json.loads(arguments.fragment)) == (CallBegun(0, "write"), {"path": "a.txt", "content": content})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{connections:{Basic LLM Chain:{main:1}}}", {"connections": {"Basic LLM Chain": {"main": 1}}}),
        ('{days:None,late:True,note:<|"|>None<|"|>}', {"days": None, "late": True, "note": "None"}),
        ('{"text": "Ann, subject: hi } \\" ]", b:[False]}', {"text": 'Ann, subject: hi } " ]', "b": [False]}),
        ('{path:<|"|>C:\\dir\\<|"|>}', {"path": "C:\\dir\\"}),
    ],
)
@pytest.mark.parametrize("n", [1, 5, 1000])
def test_objects_are_read_as_gemma_writes_them_and_as_json(written: str, value: Any, n: int) -> None:
    text = f"<|tool_call>call:add{written}<tool_call|>"
    _, arguments = read(of(GEMMA), *[text[start : start + n] for start in range(0, len(text), n)])
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == value


def test_a_call_after_a_malformed_one_is_still_read() -> None:
    text = 'so: <tool_call>{"name" <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(of(HERMES), text) == [Content('so: <tool_call>{"name"'), *ADD]


VAIN = [  # calls within calls, of which only the end tells that none is one
    (HERMES, '<tool_call>{"arguments":{"\\"', lambda _: '"]'),
    (GEMMA, "<|tool_call>call:add{a:", lambda n: n * "}"),
    (QWEN_CODER, "<tool_call><function=add><parameter=a>", lambda _: "</parameter>x</function>"),
    (HARMONY, '<|channel|>commentary to=functions.add<|message|>{"\\"', lambda _: '"]'),
]


@pytest.mark.parametrize(("form", "begun", "end"), VAIN)
def test_calls_within_malformed_ones_are_looked_for_within_bounds(
    monkeypatch: pytest.MonkeyPatch, form: CallFormat, begun: str, end: Callable[[int], str]
) -> None:
    monkeypatch.setattr(backlog, "N_AGAIN_MAX", 1000)

    def work(n: int) -> int:
        text = begun * n + end(n)
        assert read(of(form), text) == [Content(text)]
        return n_lines(lambda: read(of(form), *pieces_of(text, list(range(0, len(text), 16)))))

    assert work(800) < 2.5 * work(400)


def test_what_follows_what_is_not_read_again_is_read_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "N_AGAIN_MAX", 100)
    vain = 10 * '<tool_call>{"arguments":{"\\"' + '"]'
    text = vain + '\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(of(HERMES), *text) == [Content(vain), *ADD]


def test_a_long_malformed_call_is_read_again_in_pieces() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for n in range(N_PIECE_MAX - 2 * len(call), N_PIECE_MAX):
        text = '<tool_call>{"arguments": "' + "x" * n + call
        assert read(of(HERMES), text) == [Content(text[: -len(call)]), *ADD]


def test_content_before_and_after_calls_is_told_without_the_blanks_between() -> None:
    text = 'I add.\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n, done\n'
    assert read(of(HERMES), text) == [Content("I add."), *ADD, Content(", done\n")]


def test_what_follows_a_list_of_calls_is_told_without_its_bracket() -> None:
    assert read(of(MISTRAL), '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}] done') == [*ADD, Content("done")]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for text in ('<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add", "arguments": null}</tool_call>'):
        assert read(of(HERMES), text) == [CallBegun(0, "add"), Arguments(0, "{}")]
    text = "<tool_call><function=add></function></tool_call>"
    assert read(of(QWEN_CODER), text) == [CallBegun(0, "add"), Arguments(0, "{}")]


def test_values_in_tags_have_the_type_that_the_schema_says() -> None:
    text = "<tool_call><function=add><parameter=a>5</parameter><parameter=text>5</parameter><parameter=new>[1]</parameter></function>"
    (_, arguments) = read(of(QWEN_CODER), text)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"a": 5, "text": "5", "new": [1]}


@pytest.mark.parametrize(
    ("parameters", "text", "value"),
    [
        ({"additionalProperties": {"type": "string"}}, "1e5", "1e5"),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, "1e5", "1e5"),
        ({"properties": {"x": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, "5", 5),
        ({"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, "5", 5),
        ({"additionalProperties": False}, "5", 5),
        ({"allOf": [{"properties": {"x": {"type": "string"}}}]}, "5", "5"),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"x": {"type": "string"}}}}}, "5", "5"),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"allOf": [{"$ref": "#/$defs/all"}]}}}, "5", 5),
        ({"$ref": "elsewhere"}, "5", 5),
    ],
)
def test_what_a_schema_says_of_members_that_it_does_not_name_itself_counts_in_tags(parameters: Any, text: str, value: Any) -> None:
    form = AnswerFormat(calls=QWEN_CODER, tools=(Tool("set", "", {"type": "object", **parameters}),))
    (_, arguments) = read(form, f"<tool_call><function=set><parameter=x>{text}</parameter></function>")
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "1.10", "1.10"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"quoted"', '"quoted"'),
        ({"oneOf": [{"type": "number"}, {"type": "string"}]}, "0.5", 0.5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": "boolean"}, "perhaps", "perhaps"),
        ({"$ref": "#/$defs/x"}, "5", 5),
        ({}, "True", "True"),
        ({"type": "integer"}, "many", "many"),
        ({"$ref": "#/$defs/year"}, "2024", "2024"),
        ({"anyOf": [{"$ref": "#/$defs/year"}, {"type": "null"}]}, "2024", "2024"),
        ({"anyOf": [{"$ref": "#/$defs/year"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/year"}], "description": "when"}, "2024", "2024"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["number", "null"]}]}, "True", "True"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "5", "5"),
        ({"$ref": "#/$defs/a~1b"}, "0.5", 0.5),
        ({"$ref": "#/$defs/endless"}, "5", 5),
        ({"$ref": "#/$defs/wide/anyOf/" + "9" * 5000}, "5", 5),
        ({"$ref": "#/$defs/wide"}, "5", "5"),
        ({"$ref": "elsewhere"}, "5", 5),
        ({"type": "integer"}, "1,000", "1,000"),
        ({"type": "number"}, "1,5", "1,5"),
        ({"type": "number"}, "1_000", 1000),
        ({"type": "array"}, "1, 'a'", [1, "a"]),
        ({"type": ["object", "null"]}, "{'b': None}", {"b": None}),
        ({"type": "object"}, "('b', 1)", "('b', 1)"),
    ],
)
def test_values_in_tags_have_one_of_the_types_that_the_schema_names(schema: Any, text: str, value: Any) -> None:
    shared = {
        "year": {"type": "string", "enum": ["2023", "2024"]},
        "a/b": {"type": "number"},
        "endless": {"anyOf": [{"$ref": "#/$defs/endless"}, {"$ref": "#/$defs/endless"}]},
        "wide": {"anyOf": [{"$ref": "#/$defs/wide1"}] * 100},
        **{f"wide{i}": {"anyOf": [{"$ref": f"#/$defs/wide{i + 1}"}] * 100} for i in range(1, 9)},
        "wide9": {"type": "string"},
    }
    tools = (Tool("add", "adds", {"type": "object", "properties": {"a": schema}, "$defs": shared}),)
    written = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
    (_, arguments) = read(AnswerFormat(calls=QWEN_CODER, tools=tools), written)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"a": value}


VALUE_WRITTEN = [
    (GLM, "<tool_call>add<arg_key>text</arg_key><arg_value>{}</arg_value></tool_call>"),
    (SEED, "<seed:tool_call><function=add><parameter=text>{}</parameter></function></seed:tool_call>"),
    (MINIMAX, '<minimax:tool_call><invoke name="add"><parameter name="text">{}</parameter></invoke></minimax:tool_call>'),
    (DSML, '<｜DSML｜invoke name="add"><｜DSML｜parameter name="text" string="true">{}</｜DSML｜parameter></｜DSML｜invoke>'),
    (QWEN_CODER, "<tool_call><function=add><parameter=text>\n{}\n</parameter></function></tool_call>"),
]


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
@pytest.mark.parametrize("value", ["a = 1\n", "\n\nx", " x ", "caf\u00e9 \\ud83d"])
def test_a_text_keeps_the_line_ends_that_are_its_own(form: CallFormat, written: str, value: str) -> None:
    (_, arguments) = read(of(form), written.replace("{}", value))
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"text": value}


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
def test_a_value_may_have_the_tag_within_that_ends_it(form: CallFormat, written: str) -> None:
    assert form.tags is not None
    value = f"<plugin>1{form.tags.after_value}\n</plugin>"
    (_, arguments) = read(of(form), written.replace("{}", value))
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"text": value}


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
@pytest.mark.parametrize("between", ["", "\n", "{mark}", "\n{mark}\n"])
def test_a_call_whose_own_end_was_left_out_does_not_take_the_next_one_for_its_value(form: CallFormat, written: str, between: str) -> None:
    assert form.tags is not None
    whole = written.replace("{}", "x")
    value_end = form.tags.after_value
    cut = whole[: whole.index(value_end) + len(value_end)]
    for mark in (*form.tags.calls_ends, ""):
        parts = read(of(form), cut + between.replace("{mark}", mark) + whole)
        found = [part for part in parts if isinstance(part, Arguments)]
        assert [json.loads(part.fragment) for part in found] in ([], [{"text": "x"}])


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
@pytest.mark.parametrize("behind", ["", "\n", " "])
@pytest.mark.parametrize("name", ["nothing of ours", "add_all"])
def test_a_value_may_quote_what_begins_a_call_of_a_function_that_there_is_not(
    form: CallFormat, written: str, behind: str, name: str
) -> None:
    assert form.tags is not None
    for begin in form.tags.calls_begins:
        value = f"see {form.tags.after_value}{behind}{begin}{name}> and on"
        (_, arguments) = read(of(form), written.replace("{}", value))
        assert isinstance(arguments, Arguments)
        assert json.loads(arguments.fragment) == {"text": value}


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
def test_of_a_call_and_a_whole_one_behind_it_that_has_no_end_nothing_is_made_up(form: CallFormat, written: str) -> None:
    assert form.tags is not None
    whole = written.replace("{}", "x")
    parts = read(of(form), whole + whole.replace(form.tags.closing, "", 1))
    found = [part for part in parts if isinstance(part, Arguments)]
    assert [json.loads(part.fragment) for part in found] in ([], [{"text": "x"}])


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
@pytest.mark.parametrize(
    ("type_", "value", "told"),
    [
        ("array", '[{"k": "a\nb", "ok": true}]', [{"k": "a\nb", "ok": True}]),
        ("object", '{"k": "a\tb", "none": null}', {"k": "a\tb", "none": None}),
        ("array", '{"k": "a\nb"}', '{"k": "a\nb"}'),
    ],
)
def test_strings_in_a_list_or_an_object_may_have_line_ends_of_their_own(
    form: CallFormat, written: str, type_: str, value: str, told: object
) -> None:
    tools = (Tool("add", "adds", {"type": "object", "properties": {"text": {"type": type_}}}),)
    (_, arguments) = read(AnswerFormat(calls=form, tools=tools), written.replace(' string="true"', "").replace("{}", value))
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"text": told}


@pytest.mark.parametrize(("form", "written"), VALUE_WRITTEN)
@pytest.mark.parametrize("value", ["1e999", "-1e999", "[1e400]", "{'a': 1e999}", "1" + "0" * 400 + ".0", "9" * 5000, "[" * 200, "NaN"])
def test_numbers_that_no_json_has_are_texts_and_nothing_fails(form: CallFormat, written: str, value: str) -> None:
    for types in ({}, {"type": "number"}, {"type": "array"}):
        tools = (Tool("add", "adds", {"type": "object", "properties": {"text": types}}),)
        (_, arguments) = read(AnswerFormat(calls=form, tools=tools), written.replace("{}", value))
        assert isinstance(arguments, Arguments)
        json.loads(arguments.fragment, parse_constant=pytest.fail)
    for text in (f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>',):
        assert read(of(HERMES), text)


def test_lists_that_are_written_as_python_does_are_lists() -> None:
    tools = (Tool("add", "adds", {"type": "object", "properties": {"a": {"type": "array"}}}),)
    written = "<seed:tool_call><function=add><parameter=a>['p', 'q, \"r\"', True]</parameter></function></seed:tool_call>"
    (_, arguments) = read(AnswerFormat(calls=SEED, tools=tools), written)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"a": ["p", 'q, "r"', True]}


@pytest.mark.parametrize(
    ("form", "written", "value"),
    [
        (LFM, '<|tool_call_start|>[add(text="\\ud83d\\ude00")]<|tool_call_end|>', "\U0001f600"),
        (GLM, '<tool_call>add<arg_key>b</arg_key><arg_value>["\\ud83d\\ude00"]</arg_value></tool_call>', ["\U0001f600"]),
        (LFM, '<|tool_call_start|>[add(text="\\ud83d")]<|tool_call_end|>', "\ufffd"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"text": "a \\ud83d b", "x": 1}}</tool_call>', "a \ufffd b"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"text": "\\ud83d"}}</tool_call>', "\ufffd"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"text": "a \\ud83d\\ude00 b"}}</tool_call>', "a \U0001f600 b"),
    ],
)
def test_halves_of_characters_are_replaced_since_no_text_can_have_them(form: CallFormat, written: str, value: Any) -> None:
    (_, arguments) = read(of(form), written)
    assert isinstance(arguments, Arguments)
    assert next(iter(msgspec.json.decode(arguments.fragment).values())) == value


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (LFM, "<|tool_call_start|>[resolve-library-id(a=1)]<|tool_call_end|>"),
        (GEMMA, "<|tool_call>call:resolve-library-id{a:1}<tool_call|>"),
        (GLM, "<tool_call>resolve-library-id<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        (KIMI, '<|tool_call_begin|>functions.resolve-library-id:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'),
        (FUNCTIONARY, '<function=resolve-library-id>{"a": 1}</function>'),
        (HARMONY, '<|channel|>commentary to=functions.resolve-library-id<|message|>{"a": 1}'),
    ],
)
def test_names_may_have_hyphens_in_whatever_pieces_they_come(form: CallFormat, written: str) -> None:
    chosen = AnswerFormat(calls=form, tools=(Tool("resolve-library-id"),))
    told = [CallBegun(0, "resolve-library-id"), Arguments(0, '{"a": 1}')]
    assert read(chosen, written) == read(chosen, *written) == told


def test_a_long_argument_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        n_looked = 0

        def search(self, text: str, pos: int) -> Any:
            Counting.n_looked += len(text) - pos
            return pattern.search(text, pos)

    pattern = call_expressions._IN_PYTHON
    monkeypatch.setattr(call_expressions, "_IN_PYTHON", Counting())
    written = '<|tool_call_start|>[add(text="' + "x" * 20_000 + '")]<|tool_call_end|>'
    assert len(read(of(LFM), *[written[i : i + 4] for i in range(0, len(written), 4)])) == 2
    assert Counting.n_looked < 2 * len(written)


def test_escaped_quotes_between_the_values_of_a_call_open_no_string() -> None:
    """A search from each of them to the end would hold up everybody's step for half a minute."""
    written = "<|tool_call_start|>[add(" + '\\"' * 30_000 + ")]<|tool_call_end|>"
    begin = time.thread_time()
    assert read(of(LFM), written) == [Content(written)]
    assert time.thread_time() - begin < 5


def test_escaped_quotes_between_marked_strings_open_no_string() -> None:
    written = "<|tool_call>call:add{a:" + '\\"' * 30_000 + "}<tool_call|>"
    begin = time.thread_time()
    assert read(of(GEMMA), written) == [Content(written)]
    assert time.thread_time() - begin < 5


TOO_LARGE = f"1{'0' * 400}+1j"


@pytest.mark.parametrize("text", ["{{}}", '{{"city": "Ulm"}}', "{[1]: 2}", TOO_LARGE])
def test_what_python_could_not_even_hold_is_the_text_that_it_is(text: str) -> None:
    form = AnswerFormat(calls=QWEN_CODER, tools=(Tool("set", "", {"type": "object", "properties": {"x": {"type": "object"}}}),))
    (_, arguments) = read(form, f"<tool_call><function=set><parameter=x>{text}</parameter></function>")
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.fragment) == {"x": text}
    written = f"<|tool_call_start|>[add(a={text})]<|tool_call_end|>"
    assert read(of(LFM), written) == [Content(written)]


@pytest.mark.parametrize(
    ("form", "before"),
    [
        (HERMES, "so"),
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>{"name": "add"}'),
        (HERMES, '<tool_call>{"name": "add"},'),
        (QWEN_CODER, "<tool_call>"),
        (QWEN_CODER, "<tool_call>\n<function=add>"),
        (SEED, "<seed:tool_call><function=add><parameter=a>1</parameter>"),
        (GEMMA, "<|tool_call>call:"),
        (MISTRAL, '[TOOL_CALLS][{"name": "add"}]'),
        (LLAMA, ""),
        (HERMES, "<think>"),
        (HERMES, "<think>hm"),
        (HERMES, "<think>hm</think>"),
        (HARMONY, ""),
        (HARMONY, "<|channel|>commentary to=functions.add<|message|>"),
        (HARMONY, '<|channel|>commentary to=functions.add<|message|>{"a": 1}'),
    ],
)
def test_however_many_blanks_come_few_are_held(form: CallFormat, before: str) -> None:
    reader = of(form, thinks=True).reader(None)
    reader.push(before, can_stop=True)
    for _ in range(10_000):
        reader.push(128 * " ", can_stop=True)
    readers = [each for each in (reader._reasoning, reader._calls) if each]
    readers += [body for each in readers if (body := getattr(each, "_body", None))]
    assert sum(len(value) for each in readers for value in vars(each).values() if isinstance(value, str)) < 4096


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        (HERMES, "so", '<tool_call>{"name": "add", "arguments": {"a": 1}}'),
        (HERMES, "<tool_call>", '{"name": "add", "arguments": {"a": 1}}'),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>', "so"),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>, ', "so"),
        (MISTRAL, '[TOOL_CALLS][{"name": "add"}]', "so"),
        (LLAMA, "", '{"name": "add", "parameters": {"a": 1}}'),
        (HERMES, "", "<think>hm</think>so"),
        (HERMES, "<think>hm", "</think>so"),
        (HERMES, "<think>hm</think>", "so"),
        (HARMONY, "<|channel|>commentary to=functions.add<|message|>", '{"a": 1}'),
    ],
)
def test_many_blanks_are_told_alike_in_whatever_pieces_they_come(form: CallFormat, before: str, after: str) -> None:
    for n_blanks in (N_BLANKS_MAX - 2, N_BLANKS_MAX, N_BLANKS_MAX + 1, 3 * N_BLANKS_MAX):
        text = before + n_blanks * " " + after
        chosen = of(form, thinks=True)
        whole = read(chosen, text)
        assert whole == read(chosen, *text) == read(chosen, *pieces_of(text, list(range(0, len(text), 100))))


def test_a_single_call_ends_the_answer() -> None:
    reader = of(HERMES, single=True).reader(None)
    parts, _ = reader.push('<tool_call>{"name": "add", "arguments": {"a": 1}} and more', can_stop=True)
    assert parts == ADD
    assert reader.is_done
    assert reader.finish() == ([], None)


def test_assured_calls_are_told_as_they_come_and_others_when_they_are_complete() -> None:
    pieces = ['<tool_call>{"name": "add", "arg', 'uments": {"a"', ": 1}}"]
    told = {}
    for assured in (True, False):
        reader = of(HERMES, assured=assured).reader(None)
        told[assured] = [reader.push(piece, can_stop=True)[0] for piece in pieces]
    assert told[True] == [[CallBegun(0, "add")], [Arguments(0, '{"a"')], [Arguments(0, ": 1}")]]
    assert told[False] == [[], [], ADD]


def test_calls_come_after_reasoning_which_may_speak_of_them() -> None:
    text = '<think><tool_call>?</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(of(HERMES, thinks=True), text) == [Reasoning("<tool_call>?"), *ADD]


@pytest.mark.parametrize("closing", ["", "\n", "</think>", "\n</think>\n\n"])
@pytest.mark.parametrize(("form", "text", "parts"), [one for one in WRITTEN if not one[0].channels and not one[1].startswith("{")])
def test_calls_that_reasoning_ends_with_count_though_it_was_not_closed_before_them(
    form: CallFormat, text: str, parts: list[Part], closing: str
) -> None:
    whole = f"<think>\nNeed to look.\n{text}{closing}"
    for pieces in ([whole], whole):
        assert read(of(form, thinks=True), *pieces) == [Reasoning("Need to look."), *parts]


@pytest.mark.parametrize(
    ("follows", "told"),
    [
        (" or not", [Reasoning(f"maybe\n{CALL} or not")]),
        (f" or {CALL} then", [Reasoning(f"maybe\n{CALL} or {CALL} then")]),
        ("</think>5", [Reasoning(f"maybe\n{CALL}"), Content("5")]),
        (f"</think>\n\n{CALL}", [Reasoning(f"maybe\n{CALL}"), *ADD]),
        ('\n<tool_call>\n{"name": "add", "arg', [Reasoning(f'maybe\n{CALL}\n<tool_call>\n{{"name": "add", "arg')]),
    ],
)
def test_a_call_within_reasoning_that_anything_else_follows_was_but_thought_of(follows: str, told: list[Part]) -> None:
    whole = f"<think>maybe\n{CALL}{follows}"
    for pieces in ([whole], whole):
        assert read(of(HERMES, thinks=True), *pieces) == told


def test_a_call_that_follows_the_thought_of_one_counts_alone() -> None:
    assert read(of(HERMES, thinks=True), *f"<think>{CALL} maybe {CALL}") == [Reasoning(f"{CALL} maybe"), *ADD]


@pytest.mark.parametrize(("form", "text"), [one[:2] for one in WRITTEN if not one[0].channels and not one[1].startswith("{")])
def test_of_every_form_it_is_seen_when_reasoning_ends_with_a_call(form: CallFormat, text: str) -> None:
    lacks_end = form.begin in text and not text.rstrip().endswith((*form.ends, *form.ignored))
    for pieces in ([text], text):
        reader = of(form, assured=True, thinks=True).reader(None)
        for piece in ("<think>so ", *pieces):
            reader.push(piece, can_stop=True)
        assert reader.has_called_within_reasoning is not (lacks_end and bool(form.ends))


def test_of_calls_that_reasoning_ends_with_one_counts_where_there_may_be_one() -> None:
    assert read(of(HERMES, single=True, thinks=True), *f"<think>{CALL}\n{CALL}") == ADD


def test_where_a_grammar_makes_sure_of_calls_those_within_reasoning_count_if_nothing_comes_of_it() -> None:
    assured = of(HERMES, assured=True, thinks=True)
    assert read(assured, *f"<think>so {CALL}") == [Reasoning(f"so {CALL}")], "it was cut"
    assert read(assured, *f"<think>so {CALL}\n</think>\n\n") == [Reasoning(f"so {CALL}"), *ADD]
    assert read(assured, *f"<think>so {CALL}\n</think>\n\n{CALL}") == [Reasoning(f"so {CALL}"), *ADD]
    assert read(assured, *f"<think>so {CALL}\n</think>\n\nNo.") == [Reasoning(f"so {CALL}"), Content("No.")]


def test_many_markers_within_reasoning_are_looked_for_within_bounds() -> None:
    text = "<think>" + 20_000 * '<tool_call>{"name": "add", '
    begin = time.thread_time()
    assert read(of(HERMES, thinks=True), text) == [Reasoning(text.removeprefix("<think>"))]
    assert time.thread_time() - begin < 5


def test_stop_strings_count_in_content_only() -> None:
    text = '<think>stop</think>go <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>now stop here'
    assert read(of(HERMES, thinks=True), text, stop=("stop",)) == [Reasoning("stop"), Content("go"), *ADD, Content("now ")]
    assert read(of(HERMES), 'x {"a": 1}', stop=('"a',)) == [Content("x {")]


LOOK_UP = '{"name": "look_up", "arguments": {"a": 1}}'


def test_templates_tell_their_family() -> None:
    assert format_of("'<|start|>assistant<|channel|>final<|message|>'") is HARMONY
    assert format_of("'[TOOL_CALLS]'") is MISTRAL
    assert format_of("'[TOOL_CALLS]' '[ARGS]'") is MISTRAL_ARGS
    assert format_of("'<tool_call>'") is HERMES
    assert format_of("'<tool_call><function='") is QWEN_CODER
    assert format_of("'<|python_tag|>'") is LLAMA
    assert format_of('\'{"name": "", "parameters": \'') is LLAMA
    assert format_of("'<｜tool▁call▁begin｜>'") is DEEPSEEK
    assert format_of("'<｜tool▁call▁begin｜>' '```json'") is DEEPSEEK_JSON
    assert format_of("'<|tool|>'") is format_of("'<|tool_call|>'") is PHI
    assert format_of("'<|start_of_role|>' '<|tool_call|>'") is GRANITE
    assert format_of("'<|START_ACTION|>'") is COHERE
    assert format_of("'<tool_call>' '<arg_key>'") is GLM
    assert format_of("'<seed:tool_call>'") is SEED
    assert format_of("'<minimax:tool_call>'") is MINIMAX
    assert format_of("set dsml = '｜DSML｜'") is DSML
    assert format_of("'<|tool_call_begin|>'") is KIMI
    assert format_of("'<|tool_list_start|>'") is format_of("'<|tool_call_start|>'") is LFM
    assert format_of("'List of tools: ['") is LFM
    assert format_of("'<|tool_call>call:'") is GEMMA
    assert format_of("'<TOOLCALL>['") is NEMOTRON
    assert format_of("'<tool_calls>['") is APRIEL
    assert format_of("within <tool_call></tool_call>' '<tool_calls>['", f"<tool_calls>[{LOOK_UP}]</tool_calls>") is APRIEL
    assert format_of("'<tool_call>'", f"[<tool_call>{LOOK_UP}") is HERMES
    assert format_of("'<tool_call>'", f"<call>{LOOK_UP}") is None
    assert format_of('\'{"name": "", "parameters": \'', '{"name": "look_up", "parameters": {}}') is LLAMA
    assert format_of('\'{"name": "", "parameters": \'', '{"tool_name": "look_up"}') is None
    assert format_of('\'{"name": "", "parameters": \'', '{"name": "look_up", "parameters": look') is None
    assert format_of("'<function='") is FUNCTIONARY
    assert format_of("") is None


def test_a_form_whose_reader_reads_no_call_in_what_the_template_writes_is_not_its_own() -> None:
    assert format_of("'<tool_call>'", 'X<tool_call>X<invoke name="look_up">X<a>1X</a>X</invoke>X</tool_call>') is None
    assert format_of("'<tool_call>' '<function='", f"<tool_call>{LOOK_UP}</tool_call>") is QWEN_CODER
    assert format_of("'<tool_call>' '<arg_key>'", "<tool_call>look_up\n<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>") is GLM


@pytest.mark.parametrize(
    "pieces",
    [
        ["<|tool_call_start|>", "[", "add(a=1", "),", " look_up(text='x } ] \" {')]", "<|tool_call_end|>"],
        ["<|tool_call_start|>[add(a=1), ", "look_up(text='x } ] \" {')", "]<|tool_call_end|>"],
    ],
)
def test_expressions_end_at_their_bracket_whatever_comes_in_the_same_piece(pieces: list[str]) -> None:
    assert read(of(LFM), *pieces) == BOTH


@pytest.mark.parametrize(
    ("form", "written", "arguments"),
    [
        (LFM, "<|tool_call_start|>[add(a=-1, b=true, c=None, d=[1, 'x'], e={'f': 'g'}, h=\"it's\")]<|tool_call_end|>", None),
        (
            GEMMA,
            '<|tool_call>call:add{a:-1,b:true,c:null,d:[1,<|"|>x<|"|>],e:{f:<|"|>g<|"|>},h:<|"|>it\'s<|"|>}<tool_call|>',
            None,
        ),
        (GEMMA, '<|tool_call>call:add{"a": 1, "b": "x"}<tool_call|>', {"a": 1, "b": "x"}),
        (LFM, "<|tool_call_start|>[add()]<|tool_call_end|>", {}),
        (LFM, "<|tool_call_start|>[add(a='x\r\ny',\n b=1)]<|tool_call_end|>", {"a": "x\r\ny", "b": 1}),
        (LFM, "<|tool_call_start|>[add(a='x \\\n y', b='\\\\\nz')]<|tool_call_end|>", {"a": "x  y", "b": "\\\nz"}),
    ],
)
def test_values_that_are_not_written_as_json_become_it(form: CallFormat, written: str, arguments: Any) -> None:
    (_, told) = read(of(form), written)
    assert isinstance(told, Arguments)
    expected = {"a": -1, "b": True, "c": None, "d": [1, "x"], "e": {"f": "g"}, "h": "it's"} if arguments is None else arguments
    assert json.loads(told.fragment) == expected


# --- pieces -----------------------------------------------------------------------------------------------------------

TEXTS = [(form, text) for form, text, _ in WRITTEN] + NO_CALLS
FRAGMENTS = ["<think>", "</think>", "\n", " ", "{", "}", '"', "[", "]", ",", ";", "a", "name", ":", "\\", "{}", "<", "add"]


@pytest.mark.parametrize(
    ("form", "text", "assured"), [(*each, False) for each in TEXTS] + [(form, text, True) for form, text, _ in WRITTEN]
)
def test_letter_by_letter_gives_the_same_parts(form: CallFormat, text: str, assured: bool) -> None:
    chosen = of(form, assured=assured, thinks=True)
    whole = f"<think> hm\n</think>\n so\n{text}\n end"
    assert read(chosen, *whole) == read(chosen, whole)
    assert read(chosen, *text) == read(chosen, text)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(TEXTS),
    st.text(alphabet="<tool_call>/think{} \n", max_size=12),
    st.text(alphabet="</tool_call>[]{},; \n", max_size=12),
    st.lists(st.integers(0, 500), max_size=12),
    st.booleans(),
    st.sampled_from([(), ("done",), ("\n\n",), ("<t",), ("o", "add")]),
)
def test_any_split_gives_the_same_parts(
    case: tuple[CallFormat, str], before: str, after: str, cuts: list[int], single: bool, stop: tuple[str, ...]
) -> None:
    form = of(case[0], single=single, thinks=True)
    text = before + case[1] + after
    assert read(form, *pieces_of(text, cuts), stop=stop) == read(form, text, stop=stop)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.data(), st.lists(st.integers(0, 500), max_size=12))
def test_any_split_of_rubbish_gives_the_same_parts(name: str, data: st.DataObject, cuts: list[int]) -> None:
    form = of(FORMATS[name], thinks=True)
    text = "".join(data.draw(st.lists(st.sampled_from([*FRAGMENTS, *FORMATS[name].markers]), max_size=30)))
    assert read(form, *pieces_of(text, cuts)) == read(form, text)
