"""What some models wrap in tags of its own is said without these, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.answers import AnswerFormat
from cllm.text.call_formats import HERMES
from cllm.text.markers import N_BLANKS_MAX
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import TAGS
from cllm.text.stops import StopStrings
from cllm.text.tools import Tool
from cllm.text.wrapping import WRAPPINGS, wrapping_in

ANSWER, RESPONSE = WRAPPINGS
THINK = TAGS[0]
FORM = AnswerFormat(tags=THINK, wrapping=ANSWER)
CALLING = AnswerFormat(tags=THINK, wrapping=RESPONSE, calls=HERMES, tools=(Tool("add", "", {"type": "object"}),))


def read(form: AnswerFormat, text: str, size: int, stop: tuple[str, ...] = ()) -> list[Part]:
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
        last = told[-1] if told else None
        if isinstance(part, Content) and isinstance(last, Content):
            told[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            told[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments):
            told[-1] = Arguments(last.call, last.fragment + part.fragment)
        else:
            told.append(part)
    return told


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
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
        ("<answer>\nPut it in <answer>42</answer>, as told.\n</answer>", "Put it in <answer>42</answer>, as told."),
        ("<answer>4</answer>\n\n</answer>", "4</answer>"),
        ("\n" * (N_BLANKS_MAX + 9) + "<answer>4</answer>", "\n" * (N_BLANKS_MAX + 9) + "<answer>4</answer>"),
        ("<answer>4" + "\n" * (N_BLANKS_MAX + 9) + "</answer>", "4" + "\n" * 9),
        ("<answer>4</answer>" + "\n" * (N_BLANKS_MAX + 9) + "5", "4</answer>" + "\n" * (N_BLANKS_MAX + 9) + "5"),
    ],
)
def test_the_tags_around_all_that_is_said_are_left_out_and_no_others(text: str, content: str, size: int) -> None:
    expected = [Content(content)] if content else []
    assert read(FORM, text, size) == expected
    if not text.startswith("\n"):  # blanks behind reasoning are left out in any case
        assert read(FORM, f"<think>hm</think>\n\n{text}", size) == [Reasoning("hm"), *expected]


CALL = '<tool_call>\n{"name": "add", "arguments": {"x": "a </response> b"}}\n</tool_call>'
CALLED = [CallBegun(0, "add"), Arguments(0, '{"x": "a </response> b"}')]


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_calls_may_come_within_and_behind_and_speak_of_the_tags(size: int) -> None:
    assert read(CALLING, f"<think>hm</think>\n<response>\nI add.\n</response>\n{CALL}", size) == [
        Reasoning("hm"), Content("I add."), *CALLED,
    ]  # fmt: skip
    assert read(CALLING, f"<response>\n{CALL}\n</response>", size) == CALLED
    assert read(CALLING, CALL, size) == CALLED


PIECES = st.sampled_from(["<response>", "</response>", "\n", " ", "a", "<", "</", "resp", CALL, "<tool_call>", "<think>", "</think>"])


@given(st.lists(PIECES, max_size=9), st.integers(1, 9))
def test_whatever_the_pieces_the_parts_are_the_same(pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    assert read(CALLING, text, size) == read(CALLING, text, 10_000)


def test_stop_strings_count_in_what_is_said() -> None:
    assert read(FORM, "<answer>one two</answer>", 1, stop=("<answer>", " two")) == [Content("one")]


def test_the_tags_are_known_by_what_a_template_speaks_of() -> None:
    assert wrapping_in("{% if '</response>' in content %}") == RESPONSE
    assert wrapping_in("{# <answer> #}{{ messages }}") is None
    assert wrapping_in("{% set token = ']<]minimax[>[' %}<response>{{ result }}</response>") is None
