"""POST /infill."""

from __future__ import annotations

import string
from typing import Any

import pytest

from cllm.api.llama_server.infill import SNIPPET
from cllm.testing.fake import FakeModel, FakeVocabulary
from cllm.testing.scripted import ScriptedModel


def infilling(**fields: Any) -> FakeModel:
    model = FakeModel(n_tokens=262, **fields)
    model.vocabulary = FakeVocabulary(262, infills=True)
    return model


async def infill(api: Any, **fields: Any) -> Any:
    return await api.post("/infill", {"input_prefix": "ab", "input_suffix": "c<end>", "temperature": 0, "n_predict": 8, **fields})


async def test_the_text_between_is_that_of_the_tokens_that_ask_for_it(serve: Any) -> None:
    async with serve(infilling()) as api:
        answer = await infill(api)
        begun = await infill(api, prompt="x", input_extra=[{"text": "one"}, {"filename": "f", "text": "two"}])
        by_hand = await api.complete([256, 259, *b"ab", 260, *b"c<end>", 261], temperature=0, max_tokens=8)
        extra = [*SNIPPET.encode(), *b"one", *SNIPPET.encode(), *b"two"]
        begun_by_hand = await api.complete([256, *extra, 259, *b"ab", 260, *b"c<end>", 261, 120], temperature=0, max_tokens=8)
    assert answer.json["content"] == by_hand.text()
    assert begun.json["content"] == begun_by_hand.text()
    assert (answer.json["stop"], answer.json["stop_type"], answer.json["tokens_predicted"]) == (True, "limit", 8)
    assert answer.json["tokens_evaluated"] == by_hand.json["usage"]["prompt_tokens"]


async def test_a_stream_is_the_answer_in_pieces(serve: Any) -> None:
    async with serve(infilling()) as api:
        whole = (await infill(api)).json
        *pieces, end = (await infill(api, stream=True)).chunks
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert not any(piece["stop"] for piece in pieces)
    assert {name: end[name] for name in ("stop", "stop_type", "tokens_predicted")} == {
        name: whole[name] for name in ("stop", "stop_type", "tokens_predicted")
    }


async def test_nothing_asked_for_only_computes_the_prompt_and_minus_one_is_no_limit(serve: Any) -> None:
    async with serve(infilling(n_ctx_train=64)) as api:
        nothing = (await infill(api, n_predict=0)).json
        assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
        endless = (await infill(api, n_predict=-1)).json
    assert endless["tokens_predicted"] + endless["tokens_evaluated"] == 64


@pytest.mark.parametrize(("text", "is_cut"), [("a line\n" * 80, True), ("no line " * 70, False)])
async def test_an_answer_that_has_a_line_ends_when_it_has_had_its_time(serve: Any, text: str, is_cut: bool) -> None:
    def written(api: Any, **fields: Any) -> Any:
        return api.post("/completion", {"prompt": "<turn>user\nx<end><turn>assistant\n", "temperature": 0, "n_predict": 500, **fields})

    async with serve(ScriptedModel(text)) as api:
        assert (await written(api)).json["tokens_predicted"] == 500
        assert (await written(api, t_max_predict_ms=0)).json["tokens_predicted"] == 500
        limited = (await written(api, t_max_predict_ms=1)).json
    assert (limited["tokens_predicted"] < 500) is is_cut
    assert limited["stop_type"] == "limit"
    assert ("\n" in limited["content"]) is is_cut


async def test_a_stop_string_is_told(serve: Any) -> None:
    async with serve(infilling()) as api:
        text = (await infill(api)).json["content"]
        answer = (await infill(api, stop=[text[3]])).json
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", text[3])


async def test_other_files_give_way_to_what_is_asked(serve: Any) -> None:
    async with serve(infilling(n_ctx_train=64)) as api:
        answer = await infill(api, input_extra=[{"text": "z" * 100_000}])
    assert (answer.status, answer.json["tokens_predicted"]) == (200, 8)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 3}, "input_suffix"),
        ({"n_predict": -2}, "n_predict"),
        ({"n": 2}, "n"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve(infilling()) as api:
        answer = await infill(api, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_vocabulary_without_the_tokens_and_a_beginning_that_does_not_fit_are_400(serve: Any) -> None:
    async with serve() as api:
        answer = await infill(api)
        assert (answer.status, answer.error["param"]) == (400, "input_suffix")
    async with serve(infilling(n_ctx_train=64)) as api:
        answer = await infill(api, prompt="x" * 64)
        assert (answer.status, answer.error["type"]) == (400, "exceed_context_size_error")


@pytest.mark.parametrize(
    ("n_before", "n_after", "n_of_each"),
    [(30, 10, (30, 10)), (500, 10, (41, 10)), (500, 500, (39, 12)), (10, 500, (10, 41)), (100_000, 100_000, (39, 12))],
)
async def test_of_what_does_not_fit_the_nearest_to_the_gap_is_read(
    serve: Any, n_before: int, n_after: int, n_of_each: tuple[int, int]
) -> None:
    before, after = ("".join(string.ascii_lowercase[i % 26] for i in range(n)) for n in (n_before, n_after))
    async with serve(infilling(n_ctx_train=64)) as api:
        cut = (await infill(api, input_prefix=before, input_suffix=after)).json
        fitting = await infill(api, input_prefix=before[n_before - n_of_each[0] :], input_suffix=after[: n_of_each[1]])
        beside = (await infill(api, input_prefix=before, input_suffix=after, input_extra=[{"text": "z" * 100}])).json
    assert beside["tokens_predicted"] == 8
    assert (cut["content"], cut["tokens_evaluated"]) == (fitting.json["content"], fitting.json["tokens_evaluated"])
    assert cut["tokens_predicted"] == 8
