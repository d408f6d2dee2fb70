"""Equal beginnings of prompts are computed once, and usage tells what was not computed."""

from __future__ import annotations

from typing import Any

import pytest

CONVERSATION = [{"role": "user", "content": "Tell me of the sea, at some length, if you please."}]


def cached(answer: Any) -> int:
    """Tokens of the prompt that were not computed."""
    n: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.headers["x-cllm-cached-tokens"] == str(n)
    return n


async def chat(api: Any, messages: list[dict[str, str]], **fields: Any) -> Any:
    return await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0, **fields})


async def test_the_next_turn_of_a_conversation_computes_only_what_is_new(serve: Any) -> None:
    async with serve() as api:
        first = await chat(api, CONVERSATION)
        n_first = first.json["usage"]["prompt_tokens"]
        turn = [*CONVERSATION, {"role": "assistant", "content": first.text()}, {"role": "user", "content": "More."}]
        second = await chat(api, turn)
        n_rows = api.scheduler.totals.n_prefill_rows
    assert cached(first) == 0
    assert cached(second) == n_first + 8 - 1  # the last token that is drawn has no cell yet
    assert n_rows == n_first + second.json["usage"]["prompt_tokens"] - cached(second)


async def test_a_repeated_prompt_computes_its_last_token_and_gives_the_same_text(serve: Any) -> None:
    async with serve() as api:
        first, second = await chat(api, CONVERSATION), await chat(api, CONVERSATION)
    assert first.text() == second.text()
    assert cached(second) == second.json["usage"]["prompt_tokens"] - 1


async def test_several_answers_cost_one_prefill(serve: Any) -> None:
    async with serve() as api:
        answer = await chat(api, CONVERSATION, n=4, temperature=1, seed=1)
        alone = [await chat(api, CONVERSATION, temperature=1, seed=1, cache_prompt=False)]
        n_rows = api.scheduler.totals.n_prefill_rows
    n_prompt = answer.json["usage"]["prompt_tokens"]
    assert n_rows == (n_prompt + 3) + n_prompt  # the last token for each, and the one that shares nothing
    assert answer.text(0) == alone[0].text()
    assert len({answer.text(i) for i in range(4)}) == 4


@pytest.mark.parametrize("fields", [{"n": 4}, {"n": 2, "best_of": 4}])
async def test_several_completions_of_a_text_cost_one_prefill_with_those_that_were_not_the_best(serve: Any, fields: dict[str, int]) -> None:
    async with serve() as api:
        answer = await api.complete("Once, when the sea was young,", max_tokens=8, temperature=1, seed=1, **fields)
        n_rows = api.scheduler.totals.n_prefill_rows
    usage = answer.json["usage"]
    assert (len(answer.json["choices"]), usage["completion_tokens"]) == (fields["n"], 4 * 8)
    assert n_rows == usage["prompt_tokens"] + 3


async def test_tenants_with_salts_of_their_own_share_nothing(serve: Any) -> None:
    async with serve() as api:
        await chat(api, CONVERSATION, cache_salt="one")
        other = await chat(api, CONVERSATION, cache_salt="another")
        same = await chat(api, CONVERSATION, cache_salt="one")
    assert cached(other) == 0
    assert cached(same) > 0


async def test_who_asks_not_to_be_cached_takes_nothing_and_leaves_nothing(serve: Any) -> None:
    async with serve() as api:
        await chat(api, CONVERSATION, cache_prompt=False)
        second = await chat(api, CONVERSATION)
        third = await chat(api, CONVERSATION, cache_prompt=False)
    assert (cached(second), cached(third)) == (0, 0)


async def test_without_the_cache_nothing_is_kept(serve: Any) -> None:
    async with serve(prefix_cache=False) as api:
        await chat(api, CONVERSATION)
        assert cached(await chat(api, CONVERSATION)) == 0
        await api.idle()
        assert api.scheduler.cells.n_cached == 0


async def test_metrics_tell_what_the_cache_saves(serve: Any) -> None:
    async with serve() as api:
        await chat(api, CONVERSATION)
        n = cached(await chat(api, CONVERSATION))
        text = (await api.get("/metrics")).body.decode()
    assert "cllm_prefix_hits_total 1.0" in text
    assert f"cllm_prefix_tokens_total {float(n)}" in text
    assert f"cllm_prompt_tokens_cached_total {float(n)}" in text
