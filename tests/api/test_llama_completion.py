"""POST /completion."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.testing.fake import FakeModel


async def complete(api: Any, prompt: Any, **fields: Any) -> Any:
    return await api.post("/completion", {"prompt": prompt, "temperature": 0, "n_predict": 8, **fields})


async def test_a_text_is_continued_as_by_completions_and_said_in_llama_servers_words(serve: Any) -> None:
    async with serve() as api:
        answer = (await complete(api, "ab")).json
        known = await api.complete("ab", temperature=0, max_tokens=8)
    assert answer["content"] == known.text()
    assert answer["tokens_evaluated"] == known.json["usage"]["prompt_tokens"]
    assert {name: answer[name] for name in ("index", "stop", "stop_type", "tokens_predicted", "truncated")} == {
        "index": 0,
        "stop": True,
        "stop_type": "limit",
        "tokens_predicted": 8,
        "truncated": False,
    }
    assert answer["timings"]["predicted_n"] == 8


async def test_a_stream_is_the_answer_in_pieces(serve: Any) -> None:
    async with serve() as api:
        whole = (await complete(api, "ab")).json
        *pieces, end = (await complete(api, "ab", stream=True)).chunks
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert not any(piece["stop"] for piece in pieces)
    assert {name: end[name] for name in ("stop", "stop_type", "tokens_predicted", "content")} == {
        "stop": True,
        "stop_type": "limit",
        "tokens_predicted": 8,
        "content": "",
    }


async def test_texts_and_token_ids_may_follow_each_other_and_what_a_model_wants_before_a_prompt_comes_once(serve: Any) -> None:
    async with serve() as api:
        whole = (await complete(api, "abc")).json
        (first, *_) = (await api.post("/tokenize", {"content": "a", "add_special": True})).json["tokens"]
        for prompt in ([["a", "bc"]], ["a", *b"bc"], [first, *b"a", "bc"]):
            answer = (await complete(api, prompt)).json
            assert (answer["content"], answer["tokens_evaluated"]) == (whole["content"], whole["tokens_evaluated"])


async def test_several_prompts_are_answered_in_their_order_with_or_without_a_stream(serve: Any) -> None:
    async with serve() as api:
        alone = [(await complete(api, prompt)).json["content"] for prompt in ("ab", "x", "q")]
        together = (await complete(api, ["ab", list(b"x"), "q"])).json
        strings = (await complete(api, ["ab", "x", "q"])).json
        told = (await complete(api, ["ab", "x", "q"], stream=True)).chunks
    assert [answer["index"] for answer in together] == [0, 1, 2]
    assert [answer["content"] for answer in strings] == alone
    assert (together[0]["content"], together[2]["content"]) == (alone[0], alone[2])
    assert ["".join([one["content"] for one in told if one["index"] == i]) for i in range(3)] == alone
    assert sorted(one["index"] for one in told if one["stop"]) == [0, 1, 2]


async def test_probabilities_are_those_of_completions_with_ids(serve: Any) -> None:
    async with serve() as api:
        answer = (await complete(api, "ab", n_probs=3)).json["completion_probabilities"]
        told = (await complete(api, "ab", n_probs=3, stream=True)).chunks
        known = (await api.complete("ab", temperature=0, max_tokens=8, logprobs=3)).json["choices"][0]["logprobs"]
        without = (await complete(api, "ab")).json
    assert [one["logprob"] for one in answer] == pytest.approx(known["token_logprobs"])
    assert all(len(one["top_logprobs"]) == 3 and one["id"] == one["top_logprobs"][0]["id"] for one in answer)
    assert [entry for piece in told for entry in piece.get("completion_probabilities", [])] == answer
    assert "completion_probabilities" not in without


async def test_nothing_asked_for_only_computes_the_prompt_and_no_limit_is_the_default(serve: Any) -> None:
    async with serve(FakeModel(n_tokens=262, n_ctx_train=64)) as api:
        nothing = (await complete(api, "ab", n_predict=0)).json
        endless = (await complete(api, "ab", n_predict=-1, ignore_eos=True)).json
        silent = (await complete(api, "ab", n_predict=None, ignore_eos=True)).json
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    for answer in (endless, silent):
        assert answer["tokens_predicted"] + answer["tokens_evaluated"] == 64


async def test_a_stop_string_is_told_whatever_it_is(serve: Any) -> None:
    async with serve() as api:
        for word in ("two", "timeout"):
            answer = (await complete(api, "ab", n_predict=64, grammar='root ::= "one timeout two"', stop=[word])).json
            assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)


async def test_an_answer_may_be_held_to_a_form(serve: Any) -> None:
    async with serve() as api:
        by_grammar = (await complete(api, "ab", grammar='root ::= "yes"')).json
        by_schema = (await complete(api, "ab", json_schema={"const": 7})).json
    assert (by_grammar["content"], by_grammar["stop_type"]) == ("yes", "eos")
    assert by_schema["content"] == "7"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 999]}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_probs": 1, "post_sampling_probs": True}, "post_sampling_probs"),
        ({"n": 2}, "n"),
        ({"grammar": "root = "}, "grammar"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve() as api:
        answer = await complete(api, **{"prompt": "ab", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_what_does_not_fit_is_refused_whatever_it_is_made_of(serve: Any) -> None:
    async with serve(FakeModel(n_tokens=262, n_ctx_train=64)) as api:
        by_far = await complete(api, [1, "x" * 100_000])
        assert "at least" in by_far.error["message"], "it is not tokenised for that"
        for prompt in ("x" * 65, [120] * 65, ["x" * 40, *[120] * 40], ["ab", [120] * 65]):
            answer = await complete(api, prompt)
            assert (answer.status, answer.error["type"]) == (400, "exceed_context_size_error")
