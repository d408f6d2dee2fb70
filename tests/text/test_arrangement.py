"""Turns in any order become turns that a template takes, and nothing of them is lost."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.arrangement import Message, arranged, in_order_of_calls
from tests.lines import n_lines

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


@attrs.frozen
class Takes:
    """See `cllm.text.arrangement.Takes`."""

    supports_system: bool = True
    takes_system_before_results: bool = True
    takes_system_anywhere: bool = True
    takes_system_alone: bool = True
    takes_answers_first: bool = True
    takes_no_user: bool = True
    wants_parts: bool = False
    takes_neighbours: bool = True
    takes_text_after_results: bool = True
    takes_several_calls: bool = True
    takes_empty_turns: bool = True
    takes_text_beside_calls: bool = True
    speaker: str = "assistant"
    wants_results_with_calls: bool = False
    empty_content: str | None = None


def turns(letters: str) -> list[Message]:
    """A turn for each letter, which says its place."""
    return [{"role": ROLES[letter], "content": f"{letter}{i}"} for i, letter in enumerate(letters)]


def told(letters: str, **takes: bool) -> str:
    return " ".join(f"{turn['role'][0]}:{turn['content']}".replace("\n\n", "+") for turn in arranged(turns(letters), Takes(**takes)))


def test_what_a_template_takes_stays_as_it_is() -> None:
    assert arranged(turns("ssusatuu"), Takes()) == turns("ssusatuu")


def test_late_system_messages_are_the_users_before_the_model_says_more() -> None:
    assert told("ssusa", takes_system_anywhere=False) == "s:s0+s1 u:u2+s3 a:a4"
    assert told("uasau", takes_system_anywhere=False) == "u:u0 a:a1 u:s2 a:a3 u:u4"
    assert told("uasu", takes_system_anywhere=False) == "u:u0 a:a1 u:s2+u3"
    assert told("suau", supports_system=False) == "u:s0+u1 a:a2 u:u3"


def test_nothing_comes_between_a_call_and_its_results() -> None:
    assert told("uasttas", takes_system_anywhere=False) == "u:u0 a:a1 t:t3 t:t4 u:s2 a:a5 u:s6"
    assert told("uatst", takes_system_anywhere=False) == "u:u0 a:a1 t:t2 t:t4 u:s3"


def test_all_results_of_a_turn_are_told_with_it_and_the_clients_messages_stay_as_they_are() -> None:
    call = {"function": {"name": "f"}}
    given = [{"role": "assistant", "content": None, "tool_calls": [call, call]}, *turns("ttu"), {"role": "assistant", "tool_calls": [call]}]
    given += turns("t")
    before = json.dumps(given)
    first, user, second = arranged(given, Takes(wants_results_with_calls=True))
    assert [one["response"] for one in first["tool_responses"]] == ["t0", "t1"]
    assert user["content"] == "u2"
    assert [one["response"] for one in second["tool_responses"]] == ["t0"]
    assert json.dumps(given) == before


def test_results_have_a_text_behind_them_in_them_only_where_it_must_be() -> None:
    assert told("uats", takes_system_anywhere=False) == "u:u0 a:a1 t:t2 u:s3"
    assert told("uats", takes_system_anywhere=False, takes_text_after_results=False) == "u:u0 a:a1 t:t2+s3"


def test_calls_and_reasoning_of_neighbours_are_one_turns() -> None:
    first = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [1]}
    second = {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [2]}
    (turn,) = arranged([first, second], Takes(takes_neighbours=False))
    assert turn == {"role": "assistant", "content": "a", "reasoning_content": "hm\n\nso", "tool_calls": [1, 2]}


@pytest.mark.parametrize(
    ("role", "takes"),
    [
        ("user", Takes(takes_neighbours=False)),
        ("system", Takes(takes_system_anywhere=False)),
        ("user", Takes(takes_text_after_results=False)),
    ],
)
def test_a_long_row_of_turns_is_put_together_once(role: str, takes: Takes) -> None:
    def work(n: int) -> int:
        said = {"content": [{"type": "text", "text": "x"}]}
        first = "user" if takes.takes_text_after_results else "tool"
        return n_lines(lambda: arranged([{"role": first, **said}, *([{"role": role, **said}] * n)], takes))

    assert work(800) < 5 * work(200)


def calling(*ids: str, **more: Any) -> Message:
    return {"role": "assistant", "content": None, **more, "tool_calls": [{"id": name, "function": {"name": f"f{name}"}} for name in ids]}


def result(name: str | None, content: str = "") -> Message:
    return {"role": "tool", "content": content or name} | ({} if name is None else {"tool_call_id": name})


def test_results_stand_in_the_order_of_their_calls() -> None:
    chat = [calling("a", "b", "c"), result("c"), result("a"), result("b"), *turns("u")]
    assert [turn["content"] for turn in arranged(chat, Takes())[1:4]] == ["a", "b", "c"]
    apart = [calling("a"), calling("b"), result("b"), result("a")]
    assert [turn["content"] for turn in arranged(apart, Takes())[2:]] == ["a", "b"]
    assert [turn["content"] for turn in arranged(apart, Takes(takes_neighbours=False))[1:]] == ["a", "b"]


def test_a_result_of_no_known_call_stays_where_it_is() -> None:
    chat = [calling("a", "b"), result("b"), result(None, "x"), result("z"), result("a")]
    assert [turn["content"] for turn in arranged(chat, Takes())[1:]] == ["a", "x", "z", "b"]


def test_text_that_goes_with_the_last_result_stays_behind_all_of_them() -> None:
    chat = [calling("a", "b"), result("b"), result("a"), {"role": "user", "content": "so"}]
    assert [turn["content"] for turn in arranged(chat, Takes(takes_text_after_results=False))[1:]] == ["a", "b\n\nso"]


def test_where_a_turn_takes_one_call_each_has_a_turn_of_its_own_with_its_results() -> None:
    chat = [
        calling("a", "b", content="let me see", reasoning_content="hm"),
        result("b"),
        result("a"),
        *turns("u"),
        calling("c"),
        result("c"),
    ]
    told = arranged(chat, Takes(takes_several_calls=False, empty_content=""))
    assert told[:4] == [
        calling("a", content="let me see", reasoning_content="hm"),
        result("a"),
        calling("b", content=""),
        result("b"),
    ]
    assert told[4:] == chat[3:]
    without_ids = [calling("", ""), result(None, "1"), result(None, "2"), result(None, "3")]
    assert [turn["content"] for turn in arranged(without_ids, Takes(takes_several_calls=False))] == [None, "1", None, "2", "3"]


ORDERS = (
    "supports_system", "takes_system_before_results", "takes_system_anywhere", "takes_system_alone", "takes_answers_first",
    "takes_no_user", "takes_neighbours", "takes_text_after_results",
)  # fmt: skip


def test_where_a_user_is_to_begin_he_says_nothing_and_the_systems_word_is_his_if_nothing_follows() -> None:
    first = {"takes_answers_first": False}
    assert told("au", **first) == "u: a:a0 u:u1"
    assert told("sau", **first) == "s:s0 u: a:a1 u:u2"
    assert arranged([*turns("s"), calling("a"), result("a")], Takes(**first)) == [*turns("s"), calling("a"), result("a")]
    assert told("a", takes_no_user=False) == "u: a:a0"
    assert told("sa", takes_no_user=False) == "s:s0 u: a:a1"
    assert told("au", takes_no_user=False) == "a:a0 u:u1"
    assert told("sua", **first) == "s:s0 u:u1 a:a2"
    assert told("s", takes_system_alone=False) == "u:s0"
    assert told("s", takes_system_alone=False, takes_system_anywhere=False) == "u:s0"
    assert told("ss", takes_system_alone=False) == "s:s0 u:s1"
    assert told("su", takes_system_alone=False) == "s:s0 u:u1"
    assert arranged(turns("a"), Takes(takes_answers_first=False, wants_parts=True))[0]["content"] == [{"type": "text", "text": ""}]
    assert arranged([], Takes(takes_answers_first=False, takes_system_alone=False)) == []


ANY_TAKES = st.builds(Takes, **{name: st.booleans() for name in ORDERS})


@given(st.text("suat", max_size=8), st.text("suat", max_size=4), ANY_TAKES)
def test_any_order_becomes_one_that_is_taken(before: str, after: str, takes: Any) -> None:
    whole = arranged(turns(before + after), takes)
    roles = [turn["role"] for turn in whole]
    said = [text for turn in whole for text in turn["content"].split("\n\n") if text]
    assert sorted(said) == sorted(turn["content"] for turn in turns(before + after))
    if not takes.supports_system:
        assert "system" not in roles
    elif not takes.takes_system_anywhere:
        assert "system" not in roles[1:]
    if not takes.takes_answers_first:
        assert [role for role in roles if role != "system"][:1] != ["assistant"]
    if not takes.takes_system_alone:
        assert not roles or set(roles) != {"system"}
    if not takes.takes_neighbours:
        assert all(one != other or one in ("tool", "system") for one, other in itertools.pairwise(roles))
    if not takes.takes_text_after_results:
        assert ("tool", "user") not in itertools.pairwise(roles)
    if (before + after).endswith("a"):
        assert roles[-1] == "assistant"  # it may be gone on from
    if not takes.takes_no_user:
        assert (
            "user" in roles or set(roles) == {"system"} or not roles or "tool" in roles
        )  # what is said behind a result may be a part of it
    elif takes.takes_system_before_results:  # else the template itself has the system message in another turn of each request
        # The next request's turns begin as these did, so that what is cached of them stays of use.
        assert arranged(turns(before), takes)[:-1] == whole[: max(len(arranged(turns(before), takes)) - 1, 0)]


def test_many_results_of_many_calls_are_ordered_in_one_pass_over_them() -> None:
    """A user's turn between results leaves the calls open, whose places need not be found anew."""
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": {}}} for i in range(16_000)]
    results = [turn for i in range(5_000) for turn in (result(f"c{2 * i + 1}"), result(f"c{2 * i}"), {"role": "user", "content": "and?"})]
    started_s = time.process_time()
    ordered = in_order_of_calls([{"role": "assistant", "content": None, "tool_calls": calls}, *results])
    assert time.process_time() - started_s < 5, "12 s"
    assert [turn["tool_call_id"] for turn in ordered[1:6] if turn["role"] == "tool"] == ["c0", "c1", "c2", "c3"]
