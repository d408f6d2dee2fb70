"""What tokens say: text, parts, and the ends that lie in them."""

from __future__ import annotations

import attrs
import pytest

from cllm.testing.fake import END_OF_TURN, FakeVocabulary
from cllm.text.answers import AnswerFormat
from cllm.text.call_formats import HERMES, LLAMA
from cllm.text.detokenizer import TokenTexts
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import TAGS
from cllm.text.tools import Tool
from cllm.text.transcript import Transcript

FORM = AnswerFormat(tags=TAGS[0], calls=HERMES, tools=(Tool("add"),))


def transcript(form: AnswerFormat | None = None, *stop: str, shown: frozenset[int] = frozenset()) -> Transcript:
    return Transcript(TokenTexts(FakeVocabulary(), shown=shown), stop=stop, form=form)


def say(made: Transcript, text: str) -> tuple[str, list[Part], str | None]:
    """All that it tells of a text that comes byte by byte."""
    told, parts = "", list[Part]()
    for token in text.encode():
        piece, more, match = made.push(token, can_stop=True)
        told += piece
        parts += more or []
        if match is not None:
            return told, parts, match
    return told, parts, None


def test_plain_text_comes_as_text_and_what_a_stop_string_might_begin_with_at_the_end() -> None:
    made = transcript(None, "stop")
    assert say(made, "hé st") == ("hé ", [], None)
    assert made.finish() == ("st", None, None)


def test_nothing_comes_after_a_stop_string() -> None:
    for form in (None, AnswerFormat(tags=TAGS[0]), FORM):
        made = transcript(form, "st")
        assert say(made, "a stop")[::2] == ("a ", "st")
        assert made.finish() == ("", None, None)


def test_a_stop_string_that_begins_before_the_answer_may_end_and_is_complete_after_ends_it() -> None:
    for form in (None, AnswerFormat(tags=TAGS[0]), FORM):
        made = transcript(form, "User:")
        early = [made.push(token, can_stop=False) for token in b"hi User: U"]
        told, _, match = say(made, "ser: again")
        assert ("".join([text for text, _, _ in early]) + told, match) == ("hi User: ", "User:")


TOOLS_ALONE = AnswerFormat(calls=HERMES, tools=(Tool("add"),))
BARE = AnswerFormat(calls=LLAMA, tools=(Tool("add"),))


@pytest.mark.parametrize("form", [None, TOOLS_ALONE, FORM])
def test_a_stop_string_of_blanks_is_seen_as_soon_as_it_is_there(form: AnswerFormat | None) -> None:
    made = transcript(form, "\n\n")
    assert say(made, "Hello." + 8 * "\n") == ("Hello.", [], "\n\n")
    assert made.finish() == ("", None, None)


def test_blanks_that_a_bare_call_may_follow_are_seen_too() -> None:
    assert say(transcript(BARE, "\n\n"), "\n\n\n") == ("", [], "\n\n")
    told = [Content("\n"), CallBegun(0, "add"), Arguments(0, "{}")]  # the first of them once it is no stop string's beginning
    assert say(transcript(BARE, "\n\n"), '\n{"name": "add"}') == ("", told, None)


@pytest.mark.parametrize(
    ("form", "stop", "text", "told"),
    [
        (BARE, "STOP", '{"a": "xSTOPx", "b', '{"a": "x'),
        (TOOLS_ALONE, "STOP", 'so <tool_call>{"STOP": 1', 'so <tool_call>{"'),
        (TOOLS_ALONE, "_call", "so <tool_call", "so <tool"),
        (AnswerFormat(tags=TAGS[0]), "\n\n", "\n\n\n", ""),
    ],
)
def test_a_stop_string_that_is_found_at_the_end_is_told(form: AnswerFormat, stop: str, text: str, told: str) -> None:
    made = transcript(form, stop)
    before, _, match = say(made, text)
    rest, _, found = made.finish()
    assert (before + rest, match, found) == (told, None, stop)


def test_content_of_an_answer_that_is_read_comes_as_text() -> None:
    made = transcript(FORM)
    told, parts, _ = say(made, "hello <tool")
    assert (told, parts) == ("hello", [])
    assert made.finish() == (" <tool", None, None)


def test_reasoning_and_calls_come_as_parts_and_are_counted() -> None:
    made = transcript(FORM)
    told, parts, _ = say(made, '<think>hm</think>so<tool_call>{"name": "add"}</tool_call>')
    assert told == "so"
    assert [part for part in parts if not isinstance(part, Reasoning)] == [CallBegun(0, "add"), Arguments(0, "{}")]
    assert made.n_calls == 1
    assert made.n_reasoning == len("hm</think>")


def test_a_call_that_shows_only_behind_a_stop_string_is_none() -> None:
    made = transcript(FORM, "END")
    written = '<tool_call>{"name": "add", "arguments": {"a": 1 END <tool_call>{"name": "add", "arguments": {}}</tool_call>]'
    _, parts, match = say(made, written)
    assert match == "END"
    assert not [part for part in parts if isinstance(part, CallBegun)]
    assert made.n_calls == 0


def test_a_call_that_is_told_before_a_stop_string_counts_though_both_come_at_once() -> None:
    made = transcript(FORM, "END")
    written = '<tool_call>{"name": "add", "arguments": {"a": 1 <tool_call>{"name": "add", "arguments": {}}</tool_call> END ]'
    _, parts, match = say(made, written)
    assert match == "END"
    assert [part for part in parts if isinstance(part, CallBegun)] == [CallBegun(0, "add")]
    assert made.n_calls == 1


def test_of_parts_that_others_have_read_those_behind_a_stop_string_do_not_count() -> None:
    made = transcript(None, "END")
    parts, match = made.push_parts([Content("so END"), CallBegun(0, "add")], 1)
    assert (parts, match, made.n_calls) == ([Content("so ")], "END", 0)
    made = transcript(None, "END")
    made.push_parts([CallBegun(0, "add"), Arguments(0, "{}")], 1)
    assert made.n_calls == 1


def test_a_byte_of_a_character_at_the_end_is_not_lost() -> None:
    made = transcript(FORM)
    made.push(0xC3, can_stop=True)
    assert made.finish() == ("\ufffd", None, None)
    made = transcript(AnswerFormat(tags=TAGS[0], opened=True))
    made.push(0xC3, can_stop=True)
    assert made.finish() == ("", [Reasoning("\ufffd")], None)


def test_a_budget_counts_the_tokens_of_reasoning_that_goes_on() -> None:
    form = AnswerFormat(tags=TAGS[0], n_reasoning_max=3, closing=(1, 2))
    made = transcript(form)
    say(made, "<think>ab")
    assert made.due() == ()
    say(made, "c")
    assert made.due() == (1, 2)
    assert made.due() == ()
    made = transcript(form)
    say(made, "<think>ab</think>xyz")
    assert made.due() == ()


def test_a_call_within_reasoning_ends_it_where_a_grammar_is_to_hold_what_follows() -> None:
    call = 'so <tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assured = AnswerFormat(tags=TAGS[0], opened=True, calls=HERMES, tools=(Tool("add"),), closing=(1, 2), assured=True)
    made = transcript(assured)
    say(made, call[:-1])
    assert made.due() == (), "it is not over"
    say(made, call[-1])
    assert made.due() == (1, 2), "it would end here, and the grammar lets no answer end before it has begun"
    assert made.due() == ()
    made = transcript(attrs.evolve(assured, assured=False))
    say(made, call)
    assert made.due() == ()
    assert made.finish()[1] == [CallBegun(0, "add"), Arguments(0, "{}")]
    assert made.n_calls == 1


def test_control_tokens_are_shown_where_asked_for() -> None:
    assert transcript(FORM, shown=frozenset({END_OF_TURN})).push(END_OF_TURN, can_stop=True) == ("<end>", None, None)
    assert transcript(FORM).push(END_OF_TURN, can_stop=True) == ("", None, None)
