"""What some models say within tags of its own is said without these, whatever the pieces."""

from __future__ import annotations

import pytest

from cllm.text.answers import AnswerFormat
from cllm.text.call_formats import HERMES
from cllm.text.framing import FRAMES, frame_in
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import TAGS
from cllm.text.stops import StopStrings
from cllm.text.tools import Tool

ANSWER, RESPONSE = FRAMES
THINK = TAGS[0]
FORM = AnswerFormat(tags=THINK, frame=ANSWER)


def said(form: AnswerFormat, text: str, size: int, stop: tuple[str, ...] = ()) -> list[Part]:
    reader, parts = form.reader(StopStrings(stop) if stop else None), list[Part]()
    for start in range(0, len(text), size):
        more, match = reader.push(text[start : start + size], can_stop=True)
        parts += more
        if match is not None:
            return together(parts)
    return together(parts + reader.finish()[0])


def together(parts: list[Part]) -> list[Part]:
    told: list[Part] = []
    for part in parts:
        if told and isinstance(part, Content | Reasoning) and type(told[-1]) is type(part):
            told[-1] = type(part)(told[-1].text + part.text)  # type: ignore[union-attr]
        else:
            told.append(part)
    return told


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>\nIt is 4.\n\nReally.\n</answer>", "It is 4.\n\nReally."),
        ("\n<answer>It is 4.</answer>\n", "It is 4."),
        ("<answer>\nIt is", "It is"),  # cut
        ("<answer>\nIt is </ans", "It is </ans"),
        ("It is <answer>4</answer>.", "It is <answer>4</answer>."),
        ("<answers> are many", "<answers> are many"),
        ("<ans", "<ans"),
        ("<answer></answer>", ""),
        ("<answer>4</answer> as I said", "4 as I said"),
    ],
)
def test_the_tags_around_all_that_is_said_are_left_out(text: str, content: str, size: int) -> None:
    expected = [Content(content)] if content else []
    assert said(FORM, f"<think>hm</think>\n\n{text}", size) == [Reasoning("hm"), *expected]
    assert said(FORM, text, size) == expected


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_calls_may_come_within_and_behind(size: int) -> None:
    form = AnswerFormat(tags=THINK, frame=RESPONSE, calls=HERMES, tools=(Tool("add", "", {"type": "object"}),))
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    called = [CallBegun(0, "add"), Arguments(0, "{}")]
    assert said(form, f"<think>hm</think>\n<response>\nI add.\n</response>\n{call}", size) == [Reasoning("hm"), Content("I add."), *called]
    assert said(form, f"<response>{call}</response>", size) == called
    assert said(form, call, size) == called


def test_stop_strings_count_in_what_is_said() -> None:
    assert said(FORM, "<answer>one two</answer>", 1, stop=("<answer>", " two")) == [Content("one")]


def test_a_frame_is_known_by_what_a_template_speaks_of() -> None:
    assert frame_in("{% if '</response>' in content %}") == RESPONSE
    assert frame_in("{# <answer> #}{{ messages }}") is None
