"""Answers in channels: what is reasoning, what is content, and what a prompt has begun."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.answers import AnswerFormat, AnswerReader
from cllm.text.call_formats import HARMONY
from cllm.text.channels import is_in_content, is_in_reasoning
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.tools import Tool
from tests.text.test_answers import joined

NEXT = "<|end|><|start|>assistant"
ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
ADD = [CallBegun(0, "add"), Arguments(0, '{"a": 1}')]


def form(**facts: bool) -> AnswerFormat:
    return AnswerFormat(calls=HARMONY, tools=(Tool("add"),), **facts)


def read(text: str, **facts: bool) -> list[Part]:
    reader = form(**facts).reader(None)
    return joined(reader.push(text, can_stop=True)[0] + reader.finish()[0])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{ANALYSIS}hm, so{NEXT}{FINAL}It is 5.<|return|>", [Reasoning("hm, so"), Content("It is 5.")]),
        (f"{FINAL}It is 5.", [Content("It is 5.")]),
        (f"{ANALYSIS}hm{NEXT}{CALL}", [Reasoning("hm"), *ADD]),
        (f"{COMMENTARY}I add.{NEXT}{CALL}", [Content("I add."), *ADD]),
        (f"{COMMENTARY}I add.{NEXT}{FINAL}Done.", [Content("I add.\n\nDone.")]),
        (f"{ANALYSIS}hm{NEXT}{ANALYSIS}so{NEXT}{FINAL}5", [Reasoning("hm\n\nso"), Content("5")]),
        (f"{ANALYSIS}hm<|start|>assistant{FINAL}5", [Reasoning("hm"), Content("5")]),  # an end left out
        (f"{ANALYSIS}hm{FINAL}5", [Reasoning("hm"), Content("5")]),
        (f"{ANALYSIS}hm <|en", [Reasoning("hm <|en")]),
        (f"{ANALYSIS}hm{NEXT}<|channel|>fin", [Reasoning("hm")]),  # cut in a header, which says nothing
        (f"{CALL}\n", ADD),
        # Addressed to itself, and in two channels at once: the last one counts.
        (f"<|channel|>commentary to=assistant{ANALYSIS}hm{NEXT}{FINAL}5", [Reasoning("hm"), Content("5")]),
        (f"{ANALYSIS}hm{NEXT}<|channel|>commentary to=assistant{FINAL}5", [Reasoning("hm"), Content("5")]),
        ("It is 5.", [Content("It is 5.")]),
        ("  ", [Content("  ")]),
        ("", []),
    ],
)
def test_messages_are_told_by_their_headers(text: str, parts: list[Part]) -> None:
    assert read(text) == parts


def test_a_prompt_may_have_begun_reasoning_or_content() -> None:
    assert read(f"hm{NEXT}{FINAL}5", opened=True) == [Reasoning("hm"), Content("5")]
    assert read("5 < 6", begun=True) == [Content("5 < 6")]


def test_a_prompt_tells_whether_it_ends_within_content() -> None:
    turn = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert is_in_content(turn + FINAL)
    assert is_in_content(f"{turn}{FINAL}It is")
    assert is_in_content(turn + COMMENTARY)
    assert not is_in_content(turn)
    assert not is_in_content(turn + ANALYSIS)
    assert not is_in_content(f"{turn}{FINAL}5<|end|>")
    assert not is_in_content("<|start|>user<|message|>Hi")
    assert not is_in_content("")


def test_a_prompt_tells_whether_it_ends_within_reasoning() -> None:
    turn = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert is_in_reasoning(turn + ANALYSIS)
    assert is_in_reasoning(f"{turn}{ANALYSIS}hm")
    assert is_in_reasoning(f"{turn}{FINAL}{ANALYSIS}hm")
    assert not is_in_reasoning(f"{turn}{ANALYSIS}hm{NEXT}")
    assert not is_in_reasoning(f"{turn}{ANALYSIS}hm{NEXT}{FINAL}5")
    assert not is_in_reasoning(turn)
    assert not is_in_reasoning("<|start|>user<|message|>Hi")


def test_the_way_from_reasoning_to_the_next_header_is_reasoning_too() -> None:
    """There the tokens that close it have not all come yet, and a grammar begins behind them."""
    reader = form().reader(None)
    pieces = [ANALYSIS, "hm", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "5"]
    assert [_after(reader, piece) for piece in pieces] == [True, True, True, True, False, False, False, False, False]


def _after(reader: AnswerReader, piece: str) -> bool:
    reader.push(piece, can_stop=True)
    return reader.is_reasoning


def test_only_reasoning_itself_may_be_cut_not_the_way_from_it() -> None:
    reader = form().reader(None)
    may_be_cut = []
    for piece in (ANALYSIS, "hm", "<|end|>", "<|start|>", "assistant", FINAL, "5"):
        reader.push(piece, can_stop=True)
        may_be_cut.append(reader.may_be_cut)
    assert may_be_cut == [True, True, False, False, False, False, False]


def test_assured_calls_are_told_as_they_come() -> None:
    pieces = [f"{ANALYSIS}hm{NEXT}", "<|channel|>commentary to=functions.add<|message|>", '{"a"', ": 1}", "<|call|>"]
    told = {}
    for assured in (True, False):
        reader = form(assured=assured).reader(None)
        told[assured] = [reader.push(piece, can_stop=True)[0] for piece in pieces]
    begun, arguments = ADD
    assert told[True] == [[Reasoning("hm")], [begun], [Arguments(0, '{"a"')], [Arguments(0, ": 1}")], []]
    assert told[False] == [[Reasoning("hm")], [], [], [begun, arguments], []]


def test_a_single_call_ends_the_answer() -> None:
    reader = form(single=True).reader(None)
    assert reader.push(f"{CALL}<|start|>assistant{FINAL}more", can_stop=True)[0] == ADD
    assert reader.is_done
    assert reader.finish() == ([], None)


PIECES = [
    ANALYSIS,
    FINAL,
    COMMENTARY,
    CALL,
    NEXT,
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "to=functions.add",
    "{",
    '{"a": 1}',
    "hm",
    " ",
    "<",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
def test_any_split_gives_the_same_parts(messages: list[str], cuts: list[int], assured: bool, opened: bool) -> None:
    text = "".join(messages)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    reader = form(assured=assured, opened=opened).reader(None)
    parts = [part for start, end in pairwise(places) for part in reader.push(text[start:end], can_stop=True)[0]]
    assert joined(parts + reader.finish()[0]) == read(text, assured=assured, opened=opened)
