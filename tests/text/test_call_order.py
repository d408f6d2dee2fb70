"""Calls that come piece by piece, and by turns."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cllm.text.call_order import CallOrder
from cllm.text.parts import Arguments, CallBegun, Content, Part

FIRST: list[Part] = [CallBegun(0, "a"), Arguments(0, " "), Arguments(0, '{"x": "}'), Arguments(0, '"}')]
SECOND: list[Part] = [CallBegun(1, "b"), Arguments(1, "{"), Arguments(1, "}")]


def ordered(parts: list[Part]) -> list[Part]:
    order = CallOrder()
    return [*(told for part in parts for told in order.push([part])), *order.finish()]


def test_what_comes_in_order_is_told_at_once() -> None:
    order = CallOrder()
    for part in [Content("so"), *FIRST, *SECOND, Content("then")]:
        assert order.push([part]) == [part]
    assert order.finish() == []


@given(st.lists(st.sampled_from([0, 1, 2]), min_size=9, max_size=9))
def test_however_they_alternate_each_call_is_whole(turns: list[int]) -> None:
    lines = [list(FIRST), list(SECOND), [Content("p"), Content("q")]]
    parts = [lines[turn].pop(0) for turn in turns if lines[turn]]
    parts += itertools.chain(*lines)
    told = ordered(parts)
    begins = [part.call for part in parts if isinstance(part, CallBegun)]
    assert [part.call for part in told if isinstance(part, CallBegun)] == begins
    assert [part for part in told if isinstance(part, Content)] == [Content("p"), Content("q")]
    for line in (FIRST, SECOND):
        at = told.index(line[0])
        assert told[at : at + len(line)] == line


def test_what_is_never_complete_is_told_at_the_end_call_by_call() -> None:
    parts: list[Part] = [CallBegun(0, "a"), CallBegun(1, "b"), Arguments(1, "{"), Arguments(0, "{"), Content("cut")]
    assert ordered(parts) == [CallBegun(0, "a"), Arguments(0, "{"), CallBegun(1, "b"), Arguments(1, "{"), Content("cut")]


def test_what_follows_a_call_without_arguments_waits_since_some_may_come() -> None:
    order = CallOrder()
    assert order.push([CallBegun(0, "a"), Content("so")]) == [CallBegun(0, "a")]
    assert order.finish() == [Content("so")]


def test_arguments_that_are_no_json_keep_nothing_back() -> None:
    order = CallOrder()
    assert order.push([CallBegun(0, "a"), Arguments(0, "]"), Content("so")]) == [CallBegun(0, "a"), Arguments(0, "]"), Content("so")]
