"""The ids of calls and of their results, where clients send none."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.text.call_ids import with_ids
from tests.lines import n_lines


def test_results_without_an_id_have_that_of_their_call() -> None:
    def called(*names: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": f"call{i:05}", "function": {"name": name}} for i, name in enumerate(names)]}

    def result(**fields: str) -> dict[str, Any]:
        return {"role": "tool", "content": "x", **fields}

    turns = [called("a", "b", "a"), result(name="b"), result(name="a"), result(), result(name="c")]
    assert [turn.get("tool_call_id") for turn in with_ids(turns)] == [None, "call00001", "call00000", "call00002", None]
    turns = [called("a", "b"), result(tool_call_id="call00000"), result(), called("b"), result()]
    assert [turn.get("tool_call_id") for turn in with_ids(turns)] == [None, "call00000", "call00001", None, "call00000"]
    assert "tool_call_id" not in with_ids([result()])[0]
    turns = [called("a", "b"), result(), result(tool_call_id="call00000")]
    assert [turn.get("tool_call_id") for turn in with_ids(turns)] == [None, "call00001", "call00000"], "the first is another one's"


def test_calls_without_an_id_are_numbered_through_and_those_of_turns_that_follow_each_other_are_open_together() -> None:
    def called(name: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": name}}]}

    def result(name: str) -> dict[str, Any]:
        return {"role": "tool", "content": "x", "name": name}

    told = with_ids([called("a"), called("a"), called("b"), result("b"), result("a"), result("a"), called("a"), result("a")])
    ids = [turn["tool_calls"][0]["id"] if "tool_calls" in turn else turn["tool_call_id"] for turn in told]
    assert ids == ["call00000", "call00001", "call00002", "call00002", "call00000", "call00001", "call00003", "call00003"]
    named = called("a")
    named["tool_calls"][0]["id"] = "call00000"
    assert with_ids([named, called("a")])[1]["tool_calls"][0]["id"] == "call00001"


@pytest.mark.parametrize("fields", [{}, {"name": "look"}, {"tool_call_id": "call_1"}, {"name": "other"}])
def test_a_result_finds_its_call_without_looking_through_all_of_them(fields: dict[str, str]) -> None:
    def work(n: int) -> int:
        calls = [{"id": f"call_{i}", "function": {"name": "look"}} for i in range(n)]
        turns = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", "content": "x", **fields} for _ in range(n))]
        return n_lines(lambda: with_ids(turns))

    assert work(800) < 5 * work(200)
