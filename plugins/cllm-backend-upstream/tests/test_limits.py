"""Prompts without a limit: each kind is asked so that it goes on to the end of its context, or the client is to say one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def counts(answer: Callable[[Any], None]) -> Callable[[Any], None]:
    """Answer /tokenize so, and all else with a word."""

    def behave(asked: Any) -> None:
        if asked.path == "/tokenize":
            answer(asked)
            return
        asked.begin()
        asked.token("so ")
        asked.finish(1)

    return behave


def seven(asked: Any) -> None:
    asked.answer(200, {"count": 7, "max_model_len": 100, "tokens": [1, 2, 3, 4, 5, 6, 7]})


def bodies(faulty: Any) -> list[tuple[str, int | None]]:
    return [(asked.path, asked.body.get("max_tokens")) for asked in faulty.asked]


@pytest.fixture
def vllm(faulty: Any, make_front: Any) -> Any:
    faulty.models = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 120}]}
    return make_front(faulty.url)


def test_vllm_is_asked_how_long_a_prompt_is_since_it_refuses_more_than_is_left(faulty: Any, vllm: Any) -> None:
    faulty.behave = counts(seven)
    assert vllm.post("/completion", {"prompt": "hello"}).json["content"] == "so "
    assert bodies(faulty) == [("/tokenize", None), ("/v1/completions", 93)]
    assert faulty.asked[0].body == {"model": "m", "prompt": "hello"}


def test_it_is_not_asked_where_that_is_known_or_of_no_use(faulty: Any, vllm: Any) -> None:
    faulty.behave = counts(seven)
    assert vllm.post("/completion", {"prompt": [5, 6, 7]}).status == 200
    assert vllm.complete("hello", max_tokens=9).status == 200
    assert vllm.chat().status == 200
    assert bodies(faulty) == [("/v1/completions", 117), ("/v1/completions", 9), ("/v1/chat/completions", None)]


def test_more_than_is_left_is_clipped_and_counted_only_where_it_may_be_more(faulty: Any, vllm: Any) -> None:
    faulty.behave = counts(seven)
    assert vllm.complete("hello", max_tokens=100).status == 200
    assert vllm.complete([5, 6, 7], max_tokens=200).status == 200
    assert vllm.complete("hello", max_tokens=90).status == 200
    assert vllm.chat(max_tokens=95).status == 200
    assert bodies(faulty) == [
        ("/tokenize", None), ("/v1/completions", 93), ("/v1/completions", 117), ("/v1/completions", 90),
        ("/tokenize", None), ("/v1/chat/completions", 93),
    ]  # fmt: skip
    assert faulty.asked[4].body.keys() == {"model", "messages"}


@pytest.mark.parametrize("status", [401, 403, 404, 500, 502])
def test_what_cannot_be_counted_is_sent_as_it_was_asked_for(faulty: Any, vllm: Any, status: int) -> None:
    faulty.behave = counts(lambda asked: asked.answer(status, {}))
    assert vllm.chat(max_tokens=119).status == 200
    assert bodies(faulty) == [("/tokenize", None), ("/v1/chat/completions", 119)]


def test_a_prompt_that_fills_the_context_is_too_long(faulty: Any, vllm: Any) -> None:
    faulty.behave = counts(lambda asked: asked.answer(200, {"count": 100, "max_model_len": 100}))
    reply = vllm.post("/completion", {"prompt": "hello"})
    assert (reply.status, reply.error["type"], reply.error["n_ctx"]) == (400, "exceed_context_size_error", 100)


def test_what_does_not_count_is_an_upstream_that_fails(faulty: Any, vllm: Any) -> None:
    faulty.behave = counts(lambda asked: asked.answer(200, {"count": "many"}))
    assert vllm.post("/completion", {"prompt": "hello"}).status == 500


@pytest.mark.parametrize("kind", ["vllm", "openai", "tgi", "other"])
def test_where_it_cannot_be_said_the_client_is_to_set_a_limit(faulty: Any, make_front: Any, kind: str) -> None:
    faulty.behave = counts(lambda asked: asked.answer(404, {}))
    front = make_front(faulty.url, kind=kind)
    reply = front.post("/completion", {"prompt": "hello"})
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "not_supported_error", "max_tokens")
    assert front.post("/completion", {"prompt": "hello", "n_predict": 3}).status == 200
    assert bodies(faulty)[-1] == ("/v1/completions", 3)


@pytest.mark.parametrize("kind", ["llamacpp", "ollama"])
def test_who_goes_on_by_itself_is_sent_none(faulty: Any, make_front: Any, kind: str) -> None:
    faulty.behave = counts(seven)
    assert make_front(faulty.url, kind=kind).post("/completion", {"prompt": "hello"}).status == 200
    assert bodies(faulty) == [("/v1/completions", None)]
