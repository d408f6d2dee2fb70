"""What a template and a vocabulary say of how a model reasons and calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.testing.fake import END_OF_TURN, SPECIAL, TURN, FakeVocabulary
from cllm.text import channels
from cllm.text.answers import AnswerFormat
from cllm.text.builtin_templates import CHATML
from cllm.text.call_formats import FORMATS, CallFormat
from cllm.text.dialect import Dialect, dialect_of
from cllm.text.earlier_calls import framed
from cllm.text.generic_tools import told
from cllm.text.parts import CallBegun, Content
from cllm.text.reasoning import TAGS
from cllm.text.template import ChatTemplate
from cllm.text.tools import Tool

TEMPLATES = Path(__file__).parent / "templates"


def found(source: str, tool_format: str = "auto", vocabulary: FakeVocabulary | None = None) -> Dialect:
    return dialect_of(ChatTemplate(source, bos_token="<s>", eos_token="</s>"), vocabulary or FakeVocabulary(), tool_format)


@pytest.mark.parametrize(
    ("style", "calls", "knows_tools", "reasons"),
    [
        ("harmony", "harmony", True, False),
        ("qwen", "hermes", True, True),
        ("llama3", "llama", True, False),
        ("mistral", "mistral", True, False),
        ("gemma", "hermes", False, False),
        ("phi", "hermes", False, False),
        ("deepseek", "hermes", False, True),
    ],
)
def test_each_style_is_known_by_its_template(style: str, calls: str, knows_tools: bool, reasons: bool) -> None:
    dialect = found((TEMPLATES / f"{style}.jinja").read_text("utf-8"))
    assert (dialect.calls.name, dialect.knows_tools, dialect.tags == TAGS[0]) == (calls, knows_tools, reasons)


def test_a_form_that_is_named_prevails() -> None:
    qwen = (TEMPLATES / "qwen.jinja").read_text("utf-8")
    assert (found(qwen, "mistral").calls.name, found(qwen, "mistral").knows_tools) == ("mistral", True)
    assert (found(qwen, "generic").calls.name, found(qwen, "generic").knows_tools) == ("hermes", False)


def test_what_is_written_in_channels_is_read_in_these_alone() -> None:
    harmony = (TEMPLATES / "harmony.jinja").read_text("utf-8")
    for name in ("auto", "hermes", "generic"):
        dialect = found(harmony, name)
        assert (dialect.calls.name, dialect.knows_tools, dialect.tags) == ("harmony", True, channels.TAGS)
    assert bytes(dialect.closing) == b"<|end|><|start|>assistant"


def test_tools_whose_calls_have_an_unknown_form_are_told_as_where_the_template_knows_none() -> None:
    source = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert (found(source).calls.name, found(source).knows_tools) == ("hermes", False)
    assert (found(source, "kimi").calls.name, found(source, "kimi").knows_tools) == ("kimi", True)
    assert found("'<tool_call>'" + source).knows_tools
    told = source + "{% for m in messages %}{% for call in m.tool_calls %}CALL{% endfor %}{% endfor %}"
    as_hermes = told.replace("CALL", "<tool_call>{{ call.function | tojson }}</tool_call>")
    otherwise = told.replace("CALL", 'X<tool_call>X<invoke name="{{ call.function.name }}">X<a>1X</a>X</invoke>X</tool_call>')
    assert (found(as_hermes).calls.name, found(as_hermes).knows_tools) == ("hermes", True)
    assert (found(otherwise).calls.name, found(otherwise).knows_tools) == ("hermes", False)


def test_the_tokens_that_close_reasoning_are_ready() -> None:
    assert bytes(found("{{ '<think>' }}").closing) == b"\n</think>\n\n"
    assert found(CHATML).closing == ()


def test_markers_that_are_control_tokens_are_shown_and_those_that_end_a_turn_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECIAL, TURN, b"<tool_call>")
    monkeypatch.setitem(SPECIAL, END_OF_TURN, b"</tool_call>")
    dialect = found(CHATML)
    assert dialect.control == {"<tool_call>": TURN}
    assert dialect.shown == {TURN}


@pytest.mark.parametrize("tool_format", ["auto", "generic", "hermes"])
def test_a_control_token_within_a_tag_is_shown_whatever_form_calls_have(monkeypatch: pytest.MonkeyPatch, tool_format: str) -> None:
    monkeypatch.setitem(SPECIAL, TURN, b"<|channel>")
    dialect = found("{{ '<|channel>thought' }}{% for m in messages %}{{ m.content }}{% endfor %}", tool_format)
    assert dialect.tags is not None
    assert dialect.control == {"<|channel>": TURN}


def test_what_is_said_behind_results_is_one_message_with_them() -> None:
    result, said = {"role": "tool", "content": "5"}, {"role": "user", "content": "go on"}
    turns = told([{"role": "user", "content": "add"}, {"role": "assistant", "content": "so"}, result, result, said, said], ())
    shown = "<tool_response>\n5\n</tool_response>"
    assert [turn["content"] for turn in turns] == ["add", "so", f"{shown}\n{shown}\ngo on", "go on"]


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if not form.channels], ids=lambda form: form.name)
def test_a_model_that_is_told_of_tools_in_words_is_told_the_form_that_is_read(form: CallFormat) -> None:
    tools = (Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}}),)
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    offer, _, made = told([{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}], tools, form)
    assert (
        f"write\n{framed([{'function': {'name': '<its name>', 'arguments': '<an object that fits its parameters>'}}], form)}\n"
        in (offer["content"])
    )
    reader = AnswerFormat(calls=form, tools=tools).reader(None)
    parts = [*reader.push(made["content"], can_stop=False)[0], *reader.finish()[0]]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["add"]
    assert not [part for part in parts if isinstance(part, Content)]


def test_a_form_that_is_named_for_a_template_without_tools_is_what_the_model_is_told() -> None:
    dialect = found(CHATML, "deepseek")
    assert (dialect.calls.name, dialect.knows_tools) == ("deepseek", False)


def test_a_template_that_fails_with_every_earlier_call_is_told_of_tools_in_words() -> None:
    tells = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% set seen = namespace(ids=[]) %}"
    turns = "{% for m in messages %}{% for call in m.tool_calls or [] %}CALL{% endfor %}{{ m.content }}{% endfor %}"
    call = "<|tool_call_begin|>functions.{{ call.function.name }}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    dialect = found(tells + turns.replace("CALL", call))
    assert (dialect.calls.name, dialect.knows_tools) == ("kimi", True)
    dialect = found(tells + turns.replace("CALL", "{% set _ = seen.ids.append(call.id) %}" + call))
    assert (dialect.calls.name, dialect.knows_tools) == ("hermes", False)
