"""Hostile values in well-formed JSON: an answer or a 4xx, never a 500, and nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.api.anthropic import messages
from cllm.api.anthropic import requests as anthropic
from cllm.api.openai.chat import ChatRequest
from cllm.api.openai.completions import CompletionRequest
from cllm.api.openai.responses import requests as responses
from cllm.testing.fake import FakeModel
from cllm.text import generic_tools

NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [0, -1, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 1e308, -1e308, 5e-324, 1e-45, 0.1, 127, 128, 129]
    ),
)
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=3),
)
FIELDS = [*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__]
BIASES = st.dictionaries(st.one_of(st.text(max_size=3), st.integers(-5, 300).map(str)), NUMBERS, max_size=4)
unhurried = settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))


@unhurried
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
async def test_no_number_or_type_anywhere_is_a_500(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/generate", {"prompt": "x"}),
        ):
            answer = await api.post(path, {**body, **fields})
            assert answer.status in (200, 400, 404, 501, 504), (path, answer.body)
        await api.idle()


@unhurried
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 100),
            "top_p": st.floats(0, 1),
            "top_k": st.integers(-1, 2**31 - 1),
            "min_p": st.floats(0, 1),
            "typical_p": st.floats(0, 1),
            "top_n_sigma": st.floats(-1, 100),
            "repeat_penalty": st.floats(1e-3, 100),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "dry_multiplier": st.floats(0, 100),
            "dry_base": st.floats(0, 100),
            "xtc_probability": st.floats(0, 1),
            "xtc_threshold": st.floats(0, 1),
            "mirostat": st.integers(0, 2),
            "mirostat_tau": st.floats(0, 100),
            "mirostat_eta": st.floats(0, 100),
            "dynatemp_range": st.floats(0, 100),
            "dynatemp_exponent": st.floats(0, 100),
            "seed": st.integers(-(2**63), 2**64 - 1),
            "n": st.integers(1, 3),
        },
    )
)
async def test_every_sampling_value_in_range_gives_an_answer(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        answer = await api.complete("hello", max_tokens=6, ignore_eos=True, **fields)  # which a flat distribution draws now and then
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["completion_tokens"] == 6 * fields.get("n", 1)
        await api.idle()


@unhurried
@given(BIASES)
async def test_no_logit_bias_is_a_500(serve: Any, bias: dict[str, Any]) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        answer = await api.complete("x", max_tokens=3, logit_bias=bias)
        assert answer.status in (200, 400), answer.body


async def test_long_prompts_of_one_class_of_characters_are_400_or_served(serve: Any) -> None:
    async with serve() as api:
        for piece in ("a", "!", " ", "\n", "\U0001f600", "\u200d"):
            answer = await api.complete(piece * (20_000 // len(piece.encode())))
            assert (answer.status, answer.error["type"]) == (400, "exceed_context_size_error")
        await api.idle()


TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/messages": ({"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, {"name": "a"}),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": "x"}]}, {"name": "a"}),
    "/v1/responses": ({"input": "x"}, {"type": "function", "name": "a"}),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "x"}]}, {"type": "function", "function": {"name": "a"}}),
    "/api/chat": ({"messages": [{"role": "user", "content": "x"}]}, {"type": "function", "function": {"name": "a"}}),
}


@pytest.mark.parametrize("path", TOOLS)
async def test_more_tools_than_anybody_has_are_refused_before_anything_is_made_of_them(serve: Any, path: str) -> None:
    fields, tool = TOOLS[path]
    async with serve() as api:
        answer = await api.post(path, {**fields, "tools": [tool] * 513})
        assert (answer.status, b"tools" in answer.body, b"512" in answer.body) == (400, True, True)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_more_results_in_a_turn_than_there_can_be_tokens_are_refused_before_anything_is_made_of_them(
    serve: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_asked(_: Any) -> NoReturn:
        raise AssertionError("a conversation was made of them")

    monkeypatch.setattr(messages, "conversation_of", not_asked)
    results = [{"type": "tool_result", "tool_use_id": ""}] * 5000
    async with serve() as api:
        answer = await api.post(path, {"max_tokens": 1, "messages": [{"role": "user", "content": results}]})
        assert (answer.status, b"5001" in answer.body) == (400, True)


LONG = "x" * 2000
N_NEIGHBOURS = 20_000
NEIGHBOURS: dict[str, Callable[[], Any]] = {
    "messages": lambda: anthropic._joined([anthropic.Message(role="user", content=LONG)] * N_NEIGHBOURS),
    "thoughts": lambda: anthropic._joined([anthropic.Message(role="assistant", content=[anthropic.Thought(thinking=LONG)] * N_NEIGHBOURS)]),
    "items": lambda: responses.messages_of([responses.Item(role="assistant", content=LONG)] * N_NEIGHBOURS),
    "results": lambda: generic_tools.told([{"role": "tool", "content": LONG}] * N_NEIGHBOURS, ()),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_many_that_become_one_turn_are_joined_once(name: str) -> None:
    """Joined one by one they copy 400 GB: a minute at least, whatever the machine."""
    started_s = time.process_time()
    (turn,) = NEIGHBOURS[name]()
    assert len(turn.get("reasoning_content") or turn["content"]) >= len(LONG) * N_NEIGHBOURS
    assert time.process_time() - started_s < 5
