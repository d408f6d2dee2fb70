"""POST /v1/completions."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cllm.api import prompts
from cllm.api.openai import completions, legacy_logprobs
from cllm.backend import Batch
from cllm.serve.engine import Engine
from cllm.testing.fake import END_OF_TURN, FakeModel, FakeVocabulary


async def test_an_answer_has_the_shape_that_clients_expect(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("once upon")
    body = answer.json
    assert (answer.status, body["object"], body["id"][:5]) == (200, "text_completion", "cmpl-")
    (choice,) = body["choices"]
    assert len(choice["text"]) == 16  # OpenAI's default
    assert (choice["index"], choice["logprobs"], choice["finish_reason"], choice["stop_reason"]) == (0, None, "length", None)
    assert body["usage"]["prompt_tokens"] == 1 + len("once upon")
    assert answer.headers["x-cllm-cached-tokens"] == "0"


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True}, {"logprobs": 2}, {"n": 2}, {"temperature": 0, "stop": "e"}, {"logit_bias": {"195": 100, "169": 99}}]
)
async def test_the_concatenated_stream_equals_the_answer(serve: Any, fields: dict[str, Any]) -> None:
    async with serve() as api:
        for seed in range(5):
            whole = await api.complete("once", seed=seed, max_tokens=30, **fields)
            stream = await api.complete("once", seed=seed, max_tokens=30, stream=True, **fields)
            assert stream.chunks[0]["object"] == "text_completion"
            assert stream.lines[-1] == "[DONE]"
            for index in range(fields.get("n", 1)):
                assert stream.text(index) == whole.text(index)
                assert stream.finish(index) == whole.finish(index)


async def test_a_stream_with_usage_has_it_before_done(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("once", stream=True, stream_options={"include_usage": True})
    assert answer.chunks[-1]["choices"] == []
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 16


async def test_a_prompt_may_be_token_ids(serve: Any) -> None:
    async with serve(prefix_cache=False) as api:
        text = await api.complete("ab", temperature=0)
        tokens = await api.complete([256, 97, 98], temperature=0)
    assert text.text() == tokens.text()
    assert text.json["usage"] == tokens.json["usage"]


async def test_several_prompts_give_their_choices_in_order_each_as_alone(serve: Any) -> None:
    async with serve() as api:
        alone = [(await api.complete(prompt, seed=4, n=2)).json["choices"] for prompt in ("a", [256, 98])]
        both = await api.complete(["a", [256, 98]], seed=4, n=2)
        stream = await api.complete(["a", [256, 98]], seed=4, n=2, stream=True)
    assert [choice["index"] for choice in both.json["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choices in alone for choice in choices]
    assert [both.text(i) for i in range(4)] == texts
    assert [stream.text(i) for i in range(4)] == texts
    assert both.json["usage"]["prompt_tokens"] == 4
    assert both.json["usage"]["completion_tokens"] == 64


async def test_echo_puts_the_prompt_before_the_text(serve: Any) -> None:
    async with serve() as api:
        plain = await api.complete("once", seed=1)
        echo = await api.complete("once", seed=1, echo=True)
        tokens = await api.complete([111, 110], seed=1, echo=True)
    assert echo.text() == "once" + plain.text()
    assert tokens.text().startswith("on")


async def test_logprobs_come_in_openais_legacy_arrays(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("once", logprobs=2, max_tokens=5, seed=1)
        stream = await api.complete("once", logprobs=2, max_tokens=5, seed=1, stream=True)
        none = await api.complete("once", logprobs=0, max_tokens=5, seed=1)
    logprobs = answer.json["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == answer.text()
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == logprob  # the drawn one is there though it be not among the likeliest
        assert 2 <= len(top) <= 3
    assert list(none.json["choices"][0]["logprobs"]["top_logprobs"][0]) == none.json["choices"][0]["logprobs"]["tokens"][:1]
    pieces = [choice["logprobs"] for chunk in stream.chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert {name: [one for piece in pieces for one in piece[name]] for name in logprobs} == logprobs


async def test_legacy_offsets_count_characters_and_parts_of_one_are_written_as_bytes(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("x", logprobs=0, max_tokens=8, seed=2, logit_bias={"195": 100, "169": 100})
    logprobs = answer.json["choices"][0]["logprobs"]
    assert set(logprobs["tokens"]) == {"bytes:\\xc3", "bytes:\\xa9"}
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] <= len(answer.text())


async def test_legacy_offsets_do_not_count_tokens_that_the_text_does_not_show(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("x", logprobs=0, max_tokens=3, logit_bias={"258": 100})
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("", [0, 0, 0])


# --- a prompt's own logprobs -------------------------------------------------------------------------------------------


def raw_logprobs(tokens: list[int], n_before: int) -> dict[int, float]:
    """What the fake model thinks of the token after the first `n_before` of `tokens`, computed by hand."""
    model, batch = FakeModel(), Batch(n_before)
    batch.n_rows, batch.n_outputs = n_before, 1
    batch.tokens[:] = tokens[:n_before]
    batch.positions[:] = range(n_before)
    batch.outputs[-1] = 1
    logits = model.step(batch)[0].astype(np.float64)
    return dict(enumerate((logits - np.log(np.exp(logits).sum())).tolist()))


async def test_echo_with_logprobs_tells_how_likely_the_prompt_was(serve: Any) -> None:
    tokens = [256, *b"once"]
    async with serve(prefix_cache=False) as api:
        answer = await api.complete("once", echo=True, logprobs=2, max_tokens=3, seed=1)
        alone = await api.complete("once", logprobs=2, max_tokens=3, seed=1)
    expected = [raw_logprobs(tokens, n) for n in range(1, len(tokens))]
    (choice,) = answer.json["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "once" + alone.text()
    assert logprobs["tokens"][:5] == ["<bos>", "o", "n", "c", "e"]
    assert "".join(logprobs["tokens"][1:]) == choice["text"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:5] == pytest.approx([e[t] for e, t in zip(expected, tokens[1:], strict=True)], abs=1e-4)
    for top, known in zip(logprobs["top_logprobs"][1:5], expected, strict=True):
        assert max(top.values()) == pytest.approx(max(known.values()), abs=1e-4)
    assert logprobs["token_logprobs"][5:] == alone.json["choices"][0]["logprobs"]["token_logprobs"]
    assert answer.json["usage"] == alone.json["usage"]


async def test_an_echo_shows_as_many_likely_tokens_as_its_own_field_says(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("once", echo=True, logprobs=1, prompt_logprobs=5, max_tokens=1, seed=1)
    (choice,) = answer.json["choices"]
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"] if top is not None)
    assert any(len(top) >= 5 for top in choice["prompt_logprobs"] if top is not None)


async def test_no_tokens_and_echo_only_score_the_prompt(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete(["once", "on"], echo=True, logprobs=0, max_tokens=0)
        assert api.scheduler.totals.n_generated == 0
        await api.idle()
    assert [answer.text(i) for i in range(2)] == ["once", "on"]
    assert answer.finish() == ("length", None)
    assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == 5
    assert answer.json["usage"]["completion_tokens"] == 0


async def test_no_tokens_without_an_echo_are_an_empty_answer_and_never_the_default(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("once", max_tokens=0)
    (choice,) = answer.json["choices"]
    assert (answer.status, choice["text"], choice["finish_reason"]) == (200, "", "length")
    assert answer.json["usage"]["completion_tokens"] == 0


async def test_the_prompts_logprobs_are_the_same_in_one_step_and_in_many(serve: Any) -> None:
    prompt = "It was the best of times, it was the worst of times, it was the age of wisdom"  # more than one step scores
    async with serve() as api:
        whole = await api.complete(prompt, echo=True, logprobs=1, max_tokens=1, seed=1)
    async with serve(row_budget=7) as api:
        pieces = await api.complete(prompt, echo=True, logprobs=1, max_tokens=1, seed=1)
    assert len(whole.json["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 2
    assert pieces.json["choices"] == whole.json["choices"]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_tells_the_prompts_logprobs_before_the_texts(serve: Any, n: int) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 4, "seed": 3, "n": n}
    async with serve() as api:
        whole = await api.complete("once upon a time there was a fake model", **fields)
        stream = await api.complete("once upon a time there was a fake model", stream=True, **fields)
    for index in range(n):
        pieces = [c["logprobs"] for chunk in stream.chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        expected = whole.json["choices"][index]["logprobs"]
        assert {name: [one for piece in pieces for one in piece[name]] for name in expected} == expected
        assert stream.text(index) == whole.text(index)


async def test_each_prompt_is_scored_once_however_many_completions_it_has(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete(["once", "twice"], echo=True, logprobs=0, max_tokens=2, n=3, seed=1)
    tokens = [choice["logprobs"]["tokens"] for choice in answer.json["choices"]]
    assert [len(one) for one in tokens] == [7, 7, 7, 8, 8, 8]
    assert len({tuple(choice["logprobs"]["token_logprobs"][1:5]) for choice in answer.json["choices"][:3]}) == 1


async def test_an_end_token_is_counted_where_the_prompt_is_echoed_with_its_logprobs(serve: Any) -> None:
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(END_OF_TURN): 100}}
    async with serve() as api:
        answer = await api.complete([256, *b"once"], **asked)
        stream = await api.complete([256, *b"once"], **asked, stream=True)
    (choice,) = answer.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<bos>once", "stop")
    assert [len(values) for values in choice["logprobs"].values()] == [answer.json["usage"]["prompt_tokens"] + 1] * 4
    pieces = [one["logprobs"] for chunk in stream.chunks for one in chunk["choices"] if one["logprobs"]]
    assert [token for piece in pieces for token in piece["tokens"]] == choice["logprobs"]["tokens"]


async def test_offsets_of_a_prompt_of_ids_count_what_is_echoed(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete([256, 195, 169, 97, 195], echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.json["choices"]
    assert choice["text"] == "<bos>\u00e9a\ufffd"
    assert choice["logprobs"]["tokens"] == ["<bos>", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
    assert choice["logprobs"]["text_offset"] == [0, 5, 5, 6, 7]


async def test_a_prompt_begins_behind_a_special_token_though_that_ones_name_has_its_text(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("os", echo=True, logprobs=0, max_tokens=0)
    assert answer.json["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]


async def test_every_token_of_a_prompt_is_told_its_rank(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("once", prompt_logprobs=0, max_tokens=0)
    expected = raw_logprobs([256, *b"once"], 1)
    rank = sum(logprob > expected[ord("o")] for logprob in expected.values()) + 1
    _, first, *rest = answer.json["choices"][0]["prompt_logprobs"]
    assert first["111"]["rank"] == rank
    assert all(told["rank"] >= 1 for one in rest for told in one.values())


async def test_prompt_logprobs_come_by_token_id_without_an_echo(serve: Any) -> None:
    async with serve() as api:
        answer = await api.complete("on", prompt_logprobs=1, max_tokens=1, seed=1)
    expected = raw_logprobs([256, *b"on"], 1)
    (choice,) = answer.json["choices"]
    assert (len(choice["text"]), choice["logprobs"]) == (1, None)
    first, second, third = choice["prompt_logprobs"]
    assert (first, len(third) in (1, 2)) == (None, True)
    likeliest = max(expected, key=expected.__getitem__)
    assert second[str(likeliest)]["rank"] == 1
    assert second["111"]["decoded_token"] == "o"
    assert second["111"]["logprob"] == pytest.approx(expected[111], abs=1e-4)


async def test_a_prompt_whose_logits_are_no_numbers_is_a_500_by_name(serve: Any) -> None:
    class Nan(FakeModel):
        def step(self, batch: Batch) -> Any:
            logits = super().step(batch)
            logits[0] = np.nan
            return logits

    async with serve(Nan()) as api:
        answer = await api.complete("once", echo=True, logprobs=0)
        assert (answer.status, answer.error["code"]) == (500, "invalid_logits")
        await api.idle()
        assert b"cllm_invalid_logits_total 1.0" in (await api.get("/metrics")).body


async def test_breakers_are_looked_for_before_the_request_is_queued_and_never_in_everybodys_step(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_step(vocabulary: Any, breakers: tuple[str, ...]) -> Any:
        raise MemoryError("a search in the step")

    monkeypatch.setattr("cllm.engine.sampling.sampler.dry_breaker_tokens", in_the_step)
    async with serve() as api:
        answer = await api.complete("once upon once upon", max_tokens=20, dry_multiplier=2.0, dry_sequence_breakers=["e", "n"])
    assert answer.status == 200


# --- several, and between ----------------------------------------------------------------------------------------------


async def test_best_of_answers_the_likeliest_by_the_mean_of_their_logprobs(serve: Any) -> None:
    def mean(choice: Any) -> float:
        logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    async with serve(prefix_cache=False) as api:
        every = await api.complete(["a", "b"], n=5, seed=7, max_tokens=6, logprobs=0)
        best = await api.complete(["a", "b"], n=2, best_of=5, seed=7, max_tokens=6, logprobs=0)
        bare = await api.complete(["a", "b"], n=2, best_of=5, seed=7, max_tokens=6)
    choices = every.json["choices"]
    expected = [one for group in (choices[:5], choices[5:]) for one in sorted(group, key=mean, reverse=True)[:2]]
    assert [best.text(i) for i in range(4)] == [one["text"] for one in expected]
    assert [choice["index"] for choice in best.json["choices"]] == [0, 1, 2, 3]
    assert [(bare.text(i), bare.json["choices"][i]["logprobs"]) for i in range(4)] == [(one["text"], None) for one in expected]
    assert best.json["usage"] == every.json["usage"]  # those that were not the best were generated too


async def test_a_suffix_asks_for_what_stands_between(serve: Any) -> None:
    model = FakeModel(n_tokens=262)
    model.vocabulary = FakeVocabulary(262, infills=True)
    async with serve(model, prefix_cache=False) as api:
        infilled = await api.complete("ab", suffix="c<end>", temperature=0)
        by_hand = await api.complete([256, 259, *b"ab", 260, *b"c<end>", 261], temperature=0)
        of_ids = await api.complete([97, 98], suffix="c<end>", temperature=0, echo=True)
        refused = await api.complete("ab", suffix="c", logprobs=0, echo=True)
    assert infilled.text() == by_hand.text()
    assert of_ids.text() == "ab" + infilled.text()
    assert infilled.json["usage"] == by_hand.json["usage"]
    assert (refused.status, refused.error["param"]) == (400, "suffix")


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [1, [2]]}, 400, "prompt"),
        ({"prompt": [259]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [1 << 40]}, 400, "prompt"),
        ({"prompt": [True]}, 400, "prompt[0]"),
        ({"prompt": {"text": "x"}}, 400, "prompt"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"logprobs": -1}, 400, "logprobs"),
        ({"best_of": 1, "n": 2}, 400, "best_of"),
        ({"best_of": 2, "stream": True}, 400, "best_of"),
        ({"best_of": 129}, 400, "best_of"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
        ({"max_tokens": 0, "min_tokens": 1}, 400, "min_tokens"),
        ({"grammar": "root"}, 400, "grammar"),
        ({"n": 0}, 400, "n"),
        ({"max_tokens": -5}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(serve: Any, fields: dict[str, Any], status: int, param: str) -> None:
    async with serve() as api:
        answer = await api.post("/v1/completions", {"prompt": "x", **fields})
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_an_empty_prompt_is_bos_where_the_model_has_one_and_else_400(serve: Any) -> None:
    model = FakeModel()
    async with serve(model) as api:
        assert (await api.complete("")).json["usage"]["prompt_tokens"] == 1
        model.vocabulary.adds_bos = False
        answer = await api.complete("")
    assert (answer.status, answer.error["param"]) == (400, "prompt")


async def test_a_prompt_that_fills_the_context_is_400_before_anything_is_queued(serve: Any) -> None:
    model = FakeModel(n_ctx_train=64)
    async with serve(model) as api:
        for n, status in ((62, 200), (63, 200), (64, 400), (65, 400), (5000, 400)):
            answer = await api.complete([97] * n)
            assert answer.status == status, n
            if status == 400:
                error = answer.error
                assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", n, 64)
        assert api.scheduler.totals.n_submitted == 2


@pytest.mark.parametrize(
    "prompt", [[97] * 65, [-1] * 65, [97, "x"] * 40, ["a", [97] * 65], "x" * 16_385, "\U0001f600" * 4097, ["a", "x" * 20_000]]
)
async def test_what_can_never_fit_is_refused_before_a_token_is_looked_at(serve: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any) -> None:
    async def touched(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(prompts, "text_prompts", touched)
    monkeypatch.setattr(prompts, "token_prompt", touched)
    async with serve(FakeModel(n_ctx_train=64)) as api:
        answer = await api.complete(prompt)
    assert (answer.status, answer.error["type"], answer.error["n_ctx"]) == (400, "exceed_context_size_error", 64)
    assert answer.error["n_prompt_tokens"] >= 65


async def test_who_brings_token_ids_does_not_wait_among_those_who_tokenise(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def touched(*_: Any, **__: Any) -> None:
        raise AssertionError

    async with serve() as api:
        monkeypatch.setattr(Engine, "tokenized", touched)
        assert (await api.complete([97, 98])).status == 200
        assert (await api.complete([[97, 98], [99]])).status == 200
        assert (await api.post("/completion", {"prompt": [97, 98], "n_predict": 1})).status == 200


async def test_a_prompt_whose_tokens_were_not_counted_says_that_it_has_at_least_so_many(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 16_385}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 16_385}]}),
        ):
            error = (await api.post(path, body)).error
            assert (error["type"], error["n_prompt_tokens"]) == ("exceed_context_size_error", 65)
            assert "at least 65 tokens" in error["message"]
        native = await api.post("/generate", {"prompt": "x" * 16_385})
        assert (native.status, native.json["success"]) == (400, False)
        assert "at least 65 tokens" in native.json["error"]
        counted = (await api.complete("x" * 16_384)).error
    assert (counted["type"], counted["n_prompt_tokens"]) == ("exceed_context_size_error", 16_385)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_n_choices_echo_of_a_prompt_with_its_logprobs_is_made_once_and_in_a_thread_where_it_is_much(
    serve: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made_by: list[str] = []
    text_of = legacy_logprobs._text_of

    def noted(*arguments: Any) -> str:
        made_by.append(threading.current_thread().name)
        return text_of(*arguments)

    monkeypatch.setattr(legacy_logprobs, "_text_of", noted)
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream, "seed": 1}
    async with serve() as api:
        one = await api.complete("once upon a time", n=1, **fields)
        monkeypatch.setattr(prompts, "N_TOKENS_INLINE", 40)  # the prompt has 17, and the choices 4 times as many
        made_by.clear()
        four = await api.complete(["once upon a time", "there was once a little girl who lived in a wood"], n=4, **fields)
    assert [four.text(i)[:16] for i in range(4)] == [one.text()[:16]] * 4
    assert len(made_by) == 2
    assert threading.main_thread().name not in made_by


async def test_a_long_list_of_token_ids_is_looked_through_and_served(serve: Any) -> None:
    n = prompts.N_TOKENS_INLINE + 1
    async with serve(FakeModel(n_cells=2 * n, n_ctx_train=2 * n)) as api:
        answer = await api.complete([97] * n, max_tokens=1)
        assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, n)
        wrong = await api.complete([97] * n + [259])
    assert (wrong.status, wrong.error["param"]) == (400, "prompt")
    assert "259" in wrong.error["message"]


async def test_one_prompt_that_is_too_long_refuses_the_request_and_leaves_nothing_behind(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        assert (await api.complete(["a", [97] * 64])).status == 400
        await api.idle()


async def test_more_completions_than_the_queue_takes_are_400_and_a_full_queue_is_503(serve: Any) -> None:
    async with serve(queue_size=4) as api:
        answer = await api.complete("x", n=5)
        assert (answer.status, answer.error["param"]) == (400, "n")
        answer = await api.complete(["x"] * 5)
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert (await api.complete("x", n=4)).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 8, "echo": True}, "n"),
        ({"echo": True, "prompt": ["x" * 100, "y" * 100]}, "echo"),
        ({"n": 2, "prompt_logprobs": 20}, "n"),
        ({"prompt_logprobs": 100}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 5, "prompt": "x" * 60}, "logprobs"),
    ],
)
async def test_prompts_are_not_told_more_often_than_can_be_written_down_in_time(
    serve: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    """Each choice has them, of one prompt that was computed once: gigabytes of a body of some kilobytes."""
    monkeypatch.setattr(completions, "N_CHARS_ECHOED_MAX", 150)
    monkeypatch.setattr(completions, "N_PROMPT_LOGPROBS_MAX", 300)
    async with serve() as api:
        n_before = api.scheduler.totals.n_submitted
        if fields.get("prompt_logprobs") == 100:
            monkeypatch.setattr(completions, "N_PROMPT_LOGPROBS_MAX", 30)
            fields = {"prompt_logprobs": 20}
        sent = {"prompt": "x" * 20, "max_tokens": 1, **fields}
        refused = await api.post("/v1/completions", sent)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert api.scheduler.totals.n_submitted == n_before
        assert (await api.post("/v1/completions", {"prompt": "x" * 20, "max_tokens": 1, "echo": True, "n": 2})).status == 200
