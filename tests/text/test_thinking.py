"""What is wanted of reasoning, in the words of templates and in tokens."""

from __future__ import annotations

import pytest

from cllm.text.thinking import EFFORTS, Thinking

QWEN, GPT = {"enable_thinking", "messages"}, {"reasoning_effort"}


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        (Thinking(), None),
        (Thinking(enabled=True), True),
        (Thinking(enabled=False, effort="high"), False),
        (Thinking(effort="none"), False),
        (Thinking(effort="low"), True),
        (Thinking(n_tokens_max=0), False),
        (Thinking(n_tokens_max=5), None),
    ],
)
def test_what_is_said_of_it_switches_it(thinking: Thinking, wanted: bool | None) -> None:
    assert thinking.wanted is wanted
    assert thinking.variables(QWEN, {}) == ({} if wanted is None else {"enable_thinking": wanted})


def test_what_the_request_sets_itself_prevails() -> None:
    assert Thinking(effort="high").variables(QWEN, {"enable_thinking": False, "x": 1}) == {"enable_thinking": False, "x": 1}


def test_an_effort_of_none_with_reasoning_all_the_same_is_no_effort_at_all() -> None:
    thinking = Thinking(enabled=True, effort="none")
    assert thinking.variables(QWEN | GPT, {}) == {"enable_thinking": True}
    assert thinking.budget(QWEN) is None


def test_an_effort_goes_to_a_template_that_knows_it_and_is_a_budget_elsewhere() -> None:
    assert Thinking(effort="low").variables(GPT, {}) == {"reasoning_effort": "low"}
    assert Thinking(effort="low").budget(GPT) is None
    assert Thinking(effort="low").variables(QWEN, {}) == {"enable_thinking": True}
    assert Thinking(effort="low").budget(QWEN) == EFFORTS["low"]


@pytest.mark.parametrize(
    ("effort", "efforts", "told"),
    [
        ("high", ("low", "medium", "xhigh"), "xhigh"),
        ("minimal", ("low", "medium", "xhigh"), "low"),
        ("max", ("low", "medium", "high"), "high"),
        ("xhigh", ("xhigh", "max"), "xhigh"),
        ("medium", ("minimal",), "minimal"),
        ("medium", (), "medium"),
    ],
)
def test_an_effort_that_a_template_does_not_know_is_the_nearest_that_it_does(effort: str, efforts: tuple[str, ...], told: str) -> None:
    assert Thinking(effort=effort).variables(GPT, {}, efforts) == {"reasoning_effort": told}


def test_a_budget_prevails_over_an_effort() -> None:
    assert Thinking(effort="low", n_tokens_max=7).budget(QWEN) == 7
    assert Thinking(effort="none", n_tokens_max=7).budget(QWEN) == 0
    assert Thinking().budget(QWEN) is None


NONE_OR_HIGH = ("none", "high")


@pytest.mark.parametrize(
    ("thinking", "efforts", "told"),
    [
        (Thinking(enabled=True), NONE_OR_HIGH, "high"),
        (Thinking(enabled=False), NONE_OR_HIGH, "none"),
        (Thinking(effort="none"), NONE_OR_HIGH, "none"),
        (Thinking(effort="low"), NONE_OR_HIGH, "high"),
        (Thinking(n_tokens_max=0), NONE_OR_HIGH, "none"),
        (Thinking(enabled=True), ("none", "low", "medium", "high"), "medium"),
        (Thinking(), NONE_OR_HIGH, None),
        (Thinking(enabled=True), ("low", "medium", "high"), None),
    ],
)
def test_where_an_effort_is_the_only_switch_it_is_switched_by_that(thinking: Thinking, efforts: tuple[str, ...], told: str | None) -> None:
    assert thinking.variables(GPT, {}, efforts) == ({} if told is None else {"reasoning_effort": told})
    assert "reasoning_effort" not in Thinking(enabled=True).variables(GPT | QWEN, {}, efforts), "which has another switch"
