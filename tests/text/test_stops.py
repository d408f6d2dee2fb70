"""Stop strings against a plain search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cllm.text.stops import StopStrings
from tests.lines import n_lines


def searched(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The rule, said plainly: the first end of any stop string, and there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pushed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    released, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        released += text
    return released + matcher.flush(), matched


letters = st.sampled_from("ab") | st.sampled_from("abc\xe9\n")
some_stops = st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)


@given(some_stops, st.lists(st.text(letters, max_size=6), max_size=8))
@example(("bc", "abcd"), ["abcd"])
@example(("aab", "b"), ["aa", "aab"])
def test_any_split_gives_what_a_search_of_the_whole_text_gives(stops: tuple[str, ...], pieces: list[str]) -> None:
    assert pushed(stops, pieces) == searched(stops, "".join(pieces))


@given(some_stops, st.lists(st.text(letters, max_size=6), max_size=6), st.lists(st.text(letters, max_size=6), max_size=6))
@example(("\nUser:",), ["hi\nU"], ["ser:", " again"])
@example(("##",), ["abc#"], ["###"])
@example(("##",), ["##"], ["a"])
def test_what_is_complete_before_it_counts_is_text_and_what_only_begins_there_ends_it(
    stops: tuple[str, ...], early: list[str], late: list[str]
) -> None:
    matcher = StopStrings(stops)
    released, matched = "", None
    for piece in early:
        text, none = matcher.push(piece, counts=False)
        assert none is None
        released += text
    for piece in late:
        text, matched = matcher.push(piece)
        released += text
    released += matcher.flush()
    before, whole = len("".join(early)), "".join(early + late)
    ends = [end for end in range(before + 1, len(whole) + 1) if whole[:end].endswith(stops)]
    stop = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len) if ends else None
    assert (released, matched) == (whole if stop is None else whole[: ends[0] - len(stop)], stop)


@given(some_stops, st.lists(st.text(letters, max_size=6), max_size=8))
def test_held_back_is_only_what_might_begin_a_stop_string(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    seen = released = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched:
            return
        seen, released = seen + piece, released + text
        held = seen[len(released) :]
        longest = max((stop[:n] for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), key=len)
        assert held == longest


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("\n\n",), ["a\n", "b\n", "\nc"], [("a", None), ("\nb", None), ("", "\n\n")]),
        (("</s>",), ["x<", "/s", ">y"], [("x", None), ("", None), ("", "</s>")]),
        (("</s>",), ["x<", "/b"], [("x", None), ("</b", None)]),
        (("User:", "r:"), ["User:"], [("", "User:")]),
        (("User", "User:"), ["User:"], [("", "User")]),
        (("bc", "abcd"), ["abcd"], [("a", "bc")]),
    ],
)
def test_each_piece_gives_what_is_sure_and_the_stop_that_ended_it(
    stops: tuple[str, ...], pieces: list[str], expected: list[tuple[str, str | None]]
) -> None:
    matcher = StopStrings(stops)
    assert [matcher.push(piece) for piece in pieces] == expected


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(("stop",))
    assert matcher.push("a stop b") == ("a ", "stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.flush() == ""
    assert matcher.push("more") == ("", "stop")


def test_the_longest_allowed_stops_cost_no_more_for_each_character() -> None:
    # Every character of the text keeps the automaton near its deepest state, where a restart of the search would be quadratic.
    deep = StopStrings(tuple("a" * 255 + letter for letter in "bcdefghijklmnopq"))
    shallow = StopStrings(("ab",))
    for matcher in (deep, shallow):
        matcher.push("a" * 1000)
    assert n_lines(lambda: [deep.push("a") for _ in range(1000)]) < 2 * n_lines(lambda: [shallow.push("a") for _ in range(1000)])
    assert deep.flush() == "a" * 255
