"""Earlier calls for templates that tell of tools and show no calls."""

from __future__ import annotations

import json

import pytest

from cllm.text.answers import AnswerFormat
from cllm.text.call_formats import FORMATS, HARMONY, LFM, CallFormat
from cllm.text.earlier_calls import told
from cllm.text.parts import Arguments, CallBegun, Part
from cllm.text.template import ChatTemplate
from cllm.text.tools import Tool

TOOLS = (Tool("add", "", {"type": "object"}), Tool("look_up", "", {"type": "object"}))
ARGUMENTS = {"add": '{"a": 1, "exact": true, "of": null}', "look_up": '{"text": "it\'s \\n \\"x\\" } ] ü"}'}
DEEP, LONG = "[" * 4000, '{"a": "' + 5000 * "b" + '"}'
SHOWN = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}{{ tools }}"


def call(name: str, arguments: object) -> dict[str, object]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form is not HARMONY], ids=lambda form: form.name)
def test_what_is_shown_is_what_the_model_would_have_been_read_to_say(form: CallFormat) -> None:
    calls = [call(name, text) for name, text in ARGUMENTS.items()]
    (turn,) = told([{"role": "assistant", "content": None, "tool_calls": calls}], form)
    assert turn.keys() == {"role", "content"}
    reader = AnswerFormat(calls=form, tools=TOOLS).reader(None)
    parts: list[Part] = [*reader.push(turn["content"], can_stop=True)[0], *reader.finish()[0]]
    assert [part.name for part in parts if isinstance(part, CallBegun)] == list(ARGUMENTS)
    read = ["".join([part.fragment for part in parts if isinstance(part, Arguments) and part.call == i]) for i in range(2)]
    assert [json.loads(text) for text in read] == [json.loads(text) for text in ARGUMENTS.values()]


def test_a_family_that_writes_as_python_does_is_shown_that() -> None:
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call("look_up", '{"city": "Ulm", "days": 3}'), call("add", "")]}
    said = "I look.<|tool_call_start|>[look_up(city='Ulm', days=3), add()]<|tool_call_end|>"
    assert told([turn], LFM) == [{"role": "assistant", "content": said}]
    assert told([{"role": "user", "content": "hi"}], LFM) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("arguments", "shown"), [({"a": 1}, "a=1"), ("[1]", "[1]"), ("no JSON", "no JSON"), (DEEP, DEEP), (LONG, LONG)], ids=range(5)
)
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: object, shown: str) -> None:
    (turn,) = told([{"role": "assistant", "content": "", "tool_calls": [call("add", arguments)]}], LFM)
    assert turn["content"] == f"<|tool_call_start|>[add({shown})]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("source", "shows"),
    [
        (SHOWN, True),
        (SHOWN.replace("c.function.name", "c.id"), True),
        ("{% if tools %}" + SHOWN + "{% else %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}", True),
        (SHOWN.replace("{{ c.function.name }}", ""), False),
    ],
)
def test_a_template_tells_whether_it_shows_them(source: str, shows: bool) -> None:
    assert ChatTemplate(source, bos_token="", eos_token="").features.shows_calls is shows
