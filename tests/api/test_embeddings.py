"""POST /v1/embeddings and /v1/rerank, beside generation."""

from __future__ import annotations

import base64
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from cllm.api import vectors as api_vectors
from cllm.backend import Batch, Pooling, Vectors
from cllm.errors import StepFailed
from cllm.serve import embedding
from cllm.serve.embedders import EmbeddingsOnly
from cllm.testing.fake import FakeModel, FakeVocabulary
from cllm.testing.fake_embedder import N_EMBD, FakeEmbedder
from tests.api.conftest import TEST_S


async def embed(api: Any, given: Any, **fields: Any) -> Any:
    return await api.post("/v1/embeddings", {"input": given, **fields})


def vectors(answer: Any) -> Any:
    assert answer.status == 200, answer.body
    assert [one["index"] for one in answer.json["data"]] == list(range(len(answer.json["data"])))
    return np.array([one["embedding"] for one in answer.json["data"]])


async def test_an_answer_has_the_shape_that_clients_expect(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await embed(api, "once")
    (one,) = answer.json.pop("data")
    assert answer.json == {
        "object": "list",
        "data": [one],
        "model": "fake-embedder",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert one["object"] == "embedding"
    assert len(one["embedding"]) == N_EMBD
    assert np.linalg.norm(one["embedding"]) == pytest.approx(1)


async def test_an_input_has_the_same_vector_alone_and_in_a_list_as_text_and_as_ids(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        alone = [vectors(await embed(api, text))[0] for text in ("once", "upon a time")]
        together = await embed(api, ["once", "upon a time"])
        ids = await embed(api, [256, *b"once"])
        mixed = await embed(api, [[256, *b"once"], "upon a time"])
    assert vectors(together) == pytest.approx(np.array(alone))
    assert vectors(ids)[0] == pytest.approx(alone[0])
    assert vectors(mixed) == pytest.approx(np.array(alone))
    assert together.json["usage"]["prompt_tokens"] == 5 + 12


async def test_each_keys_inputs_count_as_its_own(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder(), api_key=("one", "other weight=3")) as api:
        scheduler, keys = api.running.engine.embeddings.loop.scheduler, []
        submit = scheduler.submit
        scheduler.submit = lambda inputs, key: keys.append(key) or submit(inputs, key)
        for key in ("one", "other", "one"):
            assert (await api.post("/v1/embeddings", {"input": "once"}, X_Api_Key=key)).status == 200
    assert keys[0] == keys[2] != keys[1]


async def test_base64_carries_the_same_numbers(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        numbers = vectors(await embed(api, ["once", "upon"]))
        coded = await embed(api, ["once", "upon"], encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded.json["data"]]
    assert np.array(decoded).tolist() == numbers.astype(np.float32).tolist() == numbers.tolist()


async def test_fewer_dimensions_are_the_first_ones_at_length_one(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        (whole,) = vectors(await embed(api, "once"))
        (cut,) = vectors(await embed(api, "once", dimensions=3))
        refused = await embed(api, "once", dimensions=N_EMBD + 1)
    assert cut == pytest.approx(whole[:3] / np.linalg.norm(whole[:3]))
    assert (refused.status, refused.error["param"]) == (400, "dimensions")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([], "input"),
        ([[]], "input"),
        ([1, "a"], "input"),
        ([1, [2]], "input"),
        ([259], "input"),
        ([-1], "input"),
        ([True], "input[0]"),
        ({"text": "x"}, "input"),
        (["x"] * 2049, "input"),
    ],
)
async def test_what_is_no_input_is_refused_by_name(serve: Any, given: Any, param: str) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await embed(api, given)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("given", "param"),
    [([97] * 65, "input"), (["a", "b" * 64], "input[1]"), ("x" * 1_000_000, "input"), ([[97], [98], [97] * 65], "input[2]")],
)
async def test_an_input_that_is_too_long_is_refused_with_the_numbers_and_its_place(serve: Any, given: Any, param: str) -> None:
    async with serve(embedder=FakeEmbedder(n_tokens_max=64)) as api:
        answer = await embed(api, given)
        assert vectors(await embed(api, [97] * 64)).shape == (1, N_EMBD)
    assert (answer.status, answer.error["type"], answer.error["n_ctx"]) == (400, "exceed_context_size_error", 64)
    assert answer.error["n_prompt_tokens"] >= 65
    assert answer.error["param"] == param
    assert answer.error["message"].startswith(f"{param}: an input has ")


async def test_a_long_input_is_cut_into_steps_of_a_bounded_size(serve: Any) -> None:
    embedder = FakeEmbedder(step_s=lambda batch: 0.001 * batch.n_rows)
    async with serve(embedder=embedder, embedding_slice_ms=10) as api:
        await embed(api, [97] * 500)
    assert embedder.n_steps > 5
    assert embedder.n_rows_most < 100


async def test_without_an_embedder_it_is_501_and_says_what_to_start_with(serve: Any) -> None:
    async with serve() as api:
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/rerank", {"query": "x", "documents": ["y"]})):
            answer = await api.post(path, body)
            assert (answer.status, answer.error["type"]) == (501, "not_supported_error")
            assert "--embeddings" in answer.error["message"]


async def test_the_model_is_chosen_by_name_and_listed(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder(), embedding_alias=("vectors", "v")) as api:
        assert (await embed(api, "x", model="v")).json["model"] == "vectors"
        unknown = await embed(api, "x", model="fake")
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert "vectors, v" in unknown.error["message"]
        listed = (await api.get("/v1/models")).json["data"]
        assert sorted(one["id"] for one in listed) == ["fake", "v", "vectors"]
        assert (await api.get("/v1/models/v")).json["meta"]["n_embd"] == N_EMBD
        assert (await api.get("/props")).json["embeddings"] == {"model": "vectors", "pooling": "mean", "n_embd": N_EMBD, "n_ctx": 512}


async def test_a_stream_goes_on_while_vectors_are_computed(serve: Any) -> None:
    order: list[str] = []
    model = FakeModel(before_step=lambda _: order.append("text"), step_s=lambda _: 0.002)
    embedder = FakeEmbedder(before_step=lambda _: order.append("vectors"), step_s=lambda _: 0.002)
    async with serve(model, embedder, embedding_slice_ms=1) as api:
        body = b'{"prompt": "once", "max_tokens": 4000, "stream": true, "temperature": 0}'
        async with api.asking("/v1/completions", body) as exchange:
            await exchange.receive()
            answer = await embed(api, [[97] * 400] * 4)
            exchange.leave()
    assert answer.status == 200
    meanwhile = order[order.index("vectors") : len(order) - order[::-1].index("vectors")]
    assert "text" in meanwhile, "neither waited for the other's end"


async def test_who_leaves_stops_the_work(serve: Any) -> None:
    embedder = FakeEmbedder(step_s=lambda _: 0.005)
    async with serve(embedder=embedder, embedding_slice_ms=1) as api:
        async with api.asking("/v1/embeddings", b'{"input": ["%s"]}' % b'", "'.join([b"x" * 400] * 50)) as exchange:
            await api.until(lambda: embedder.n_steps > 2)
            exchange.leave()
        n_steps = embedder.n_steps
        await embed(api, "x")
    assert embedder.n_steps <= n_steps + 4


async def test_a_full_queue_refuses_before_anything_is_read_and_the_refusal_is_counted(serve: Any) -> None:
    embedder = FakeEmbedder(step_s=lambda _: 0.005)
    async with serve(embedder=embedder, embedding_slice_ms=1, queue_size=1) as api:
        async with api.asking("/v1/embeddings", b'{"input": ["%s"]}' % b'", "'.join([b"x" * 400] * 50)) as exchange:
            await api.until(lambda: embedder.n_steps > 2)
            refused = await embed(api, [[-1]])  # no token of the model's
            exchange.leave()
        metrics = (await api.get("/metrics")).body.decode()
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert 'cllm_refusals_total{why="queue_full"} 1.0' in metrics


async def test_an_input_that_the_model_fails_on_is_500_and_others_are_served(serve: Any) -> None:
    def fail(batch: Batch) -> None:
        if 0 in batch.tokens[: batch.n_rows]:
            raise StepFailed("a zero")

    async with serve(embedder=FakeEmbedder(before_step=fail)) as api:
        async with trio.open_nursery() as nursery:
            answers: list[Any] = []

            async def ask(given: Any) -> None:
                answers.append(await embed(api, given))

            for given in ([1, 2], [0], [3]):
                nursery.start_soon(ask, given)
        again = await embed(api, [1, 2])
    assert sorted(answer.status for answer in answers) == [200, 200, 500]
    assert again.status == 200


async def test_a_request_has_the_servers_time_and_no_more(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder(step_s=lambda _: 0.02), timeout_s=0.05, embedding_slice_ms=1) as api:
        answer = await embed(api, [[97] * 400] * 50)
    assert (answer.status, answer.error["type"]) == (504, "timeout_error")


async def test_the_servers_time_begins_when_the_request_comes(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize = FakeVocabulary.tokenize

    def take_long(*given: Any, **named: Any) -> list[int]:
        time.sleep(0.3)
        return tokenize(*given, **named)

    monkeypatch.setattr(FakeVocabulary, "tokenize", take_long)
    async with serve(embedder=FakeEmbedder(), timeout_s=0.3) as api:
        answer = await embed(api, "a text")
    assert (answer.status, answer.error["type"]) == (504, "timeout_error")


async def test_a_model_that_only_gives_vectors_serves_those_and_says_so_otherwise(serve: Any) -> None:
    embedder = FakeEmbedder()
    async with serve(EmbeddingsOnly(embedder), embedder) as api:
        assert (await api.get("/ready")).status == 200
        assert vectors(await embed(api, "x")).shape == (1, N_EMBD)
        assert (await api.post("/tokenize", {"content": "x"})).json == {"tokens": [120]}
        for answer in (await api.complete("x"), await api.chat("x"), await api.chat("x", stream=True)):
            assert (answer.status, answer.error["type"]) == (501, "not_supported_error")


# --- rerank ------------------------------------------------------------------------------------------------------------


async def test_documents_come_in_the_order_of_their_relevance(serve: Any) -> None:
    documents = ["alpha", "beta", {"text": "gamma"}, "delta"]
    async with serve(embedder=FakeEmbedder(pooling=Pooling.RANK)) as api:
        answer = await api.post("/v1/rerank", {"query": "which", "documents": documents, "return_documents": False})
        best = await api.post("/rerank", {"query": "which", "documents": documents, "top_n": 2})
        alone = [(await api.post("/rerank", {"query": "which", "documents": [d]})).json["results"][0] for d in documents]
    scores = [one["relevance_score"] for one in alone]
    assert (answer.json["method"], answer.json["model"]) == ("rank", "fake-embedder")
    assert [one["index"] for one in answer.json["results"]] == sorted(range(4), key=lambda i: -scores[i])
    assert [one["relevance_score"] for one in answer.json["results"]] == pytest.approx(sorted(scores, reverse=True))
    assert all(0 <= score <= 1 for score in scores)
    texts = ["alpha", "beta", "gamma", "delta"]
    assert [one["document"]["text"] for one in best.json["results"]] == [texts[one["index"]] for one in answer.json["results"][:2]]
    assert all("document" not in one for one in answer.json["results"])
    assert answer.json["usage"]["total_tokens"] == 4 * len("which") + 4 + sum(map(len, texts))


async def test_a_model_of_vectors_ranks_by_their_cosine_and_a_ranking_one_gives_no_vectors(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post("/v1/rerank", {"query": "a", "documents": ["b", "a"]})
        first, second = vectors(await embed(api, ["a", "b"]))
    assert (answer.json["method"], answer.json["results"][0]["index"]) == ("cosine", 1)
    assert [one["relevance_score"] for one in answer.json["results"]] == pytest.approx([1.0, float(first @ second)], abs=1e-6)
    async with serve(embedder=FakeEmbedder(pooling=Pooling.RANK)) as api:
        refused = await embed(api, "x")
    assert (refused.status, refused.error["type"]) == (501, "not_supported_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"query": ""}, "query"), ({"documents": []}, "documents"), ({"documents": ["x"] * 2049}, "documents"), ({"top_n": 0}, "top_n")],
)
async def test_what_cannot_be_ranked_is_refused_by_name(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post("/v1/rerank", {"query": "x", "documents": ["y"], **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.RANK])
@pytest.mark.parametrize("long", ["b" * 80, "b" * 1_000_000])  # found by its tokens, and by its length alone
async def test_a_document_that_is_too_long_is_named_by_its_place(serve: Any, pooling: Pooling, long: str) -> None:
    async with serve(embedder=FakeEmbedder(n_tokens_max=64, pooling=pooling)) as api:
        answer = await api.post("/v1/rerank", {"query": "x", "documents": ["y", long]})
        query = await api.post("/v1/rerank", {"query": long, "documents": ["y"]})
    assert (answer.status, answer.error["param"]) == (400, "documents[1]")
    assert (query.status, query.error["param"]) == (400, "documents" if pooling is Pooling.RANK else "query")


class Bare(FakeVocabulary):
    """Adds nothing to a text."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return super().tokenize(text, add_special=False, parse_special=parse_special)


async def test_a_text_without_tokens_is_told_by_its_place(serve: Any) -> None:
    embedder = FakeEmbedder()
    embedder.vocabulary = Bare()
    async with serve(embedder=embedder) as api:
        refused = [
            await api.post("/v1/rerank", {"query": "x", "documents": ["y", ""]}),
            await api.post("/v1/rerank", {"query": "", "documents": ["y"]}),
            await api.post("/v1/embeddings", {"input": ["y", "", "z"]}),
            await api.post("/v1/embeddings", {"input": ""}),
        ]
    assert [(one.status, one.error["param"]) for one in refused] == [
        (400, "documents[1]"), (400, "query"), (400, "input[1]"), (400, "input")
    ]  # fmt: skip
    assert refused[0].error["message"] == "documents[1]: a text without tokens has no vector"


async def test_as_many_documents_as_are_allowed_are_judged_by_any_model(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post("/v1/rerank", {"query": "a", "documents": ["b"] * 2048})
        more = await api.post("/v1/rerank", {"query": "a", "documents": ["b"] * 2049})
    assert (answer.status, len(answer.json["results"])) == (200, 2048)
    assert (more.status, more.error["param"]) == (400, "documents")


async def test_the_query_does_not_count_among_the_documents_that_a_models_size_allows(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = FakeEmbedder()
    monkeypatch.setattr("cllm.api.vectors.N_NUMBERS_MAX", 4 * embedder.info.n_embd)
    async with serve(embedder=embedder) as api:
        statuses = [(await api.post("/v1/rerank", {"query": "a", "documents": ["b"] * n})).status for n in (4, 5)]
    assert statuses == [200, 400]


# --- what a request may cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
async def test_more_numbers_than_memory_is_kept_for_are_refused_before_anything_is_computed(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(api_vectors, "N_NUMBERS_MAX", 2 * N_EMBD)
    embedder = FakeEmbedder()
    async with serve(embedder=embedder) as api:
        monkeypatch.setattr(FakeVocabulary, "tokenize", lambda *a, **k: 1 / 0)
        answer = await api.post(path, {"input": ["x"] * 3})
    assert answer.status == 400
    assert b"input: expected 2 at most" in answer.body
    assert embedder.n_steps == 0


async def test_a_query_counts_with_each_document_and_no_more_are_read_than_may_be(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_vectors, "N_TOKENS_MAX", 100)
    embedder, n_read = FakeEmbedder(pooling=Pooling.RANK), 0
    pair = embedder.pair

    def counted(query: str, document: str) -> list[int]:
        nonlocal n_read
        n_read += 1
        return pair(query, document)

    embedder.pair = counted  # type: ignore[method-assign]
    async with serve(embedder=embedder) as api:
        answer = await api.post("/v1/rerank", {"query": "x" * 40, "documents": ["y"] * 1000})
        assert (answer.status, answer.error["param"], "100 tokens" in answer.error["message"]) == (400, "documents", True)
        assert (n_read, embedder.n_steps) == (3, 0)
        assert (await api.post("/v1/rerank", {"query": "x" * 40, "documents": ["y"] * 2})).status == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/api/embed", {"input": ["x"] * 2100}), ("/v1/rerank", {"query": "x", "documents": ["x"] * 2048})]
)
async def test_many_vectors_are_brought_to_length_one_where_that_holds_nobody_up(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    normalised, threads = api_vectors.normalised, []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return normalised(*args)

    monkeypatch.setattr(api_vectors, "normalised", noted)
    async with serve(embedder=FakeEmbedder()) as api:
        assert (await api.post(path, body)).status == 200
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("path", "pooling", "texts"),
    [
        ("/v1/embeddings", Pooling.MEAN, ["a"] + [""] * 2000),
        ("/api/embed", Pooling.MEAN, ["a"] + [""] * 2000),
        ("/v1/rerank", Pooling.MEAN, ["a"] + [""] * 2000),
        ("/v1/rerank", Pooling.RANK, ["a"] + [""] * 2000),
        ("/v1/rerank", Pooling.RANK, ["a"] + [""] * 7),  # a template is around each
    ],
)
async def test_many_texts_become_tokens_where_that_holds_nobody_up_however_short_they_are(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, pooling: Pooling, texts: list[str]
) -> None:
    embedder, threads = FakeEmbedder(pooling=pooling), []

    def noting(call: Any) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            threads.append(threading.current_thread())
            return call(*args, **named)

        return noted

    embedder.pair = noting(embedder.pair)  # type: ignore[method-assign]
    async with serve(embedder=embedder) as api:
        monkeypatch.setattr(FakeVocabulary, "tokenize", noting(FakeVocabulary.tokenize))
        body = {"query": "q", "documents": texts} if path == "/v1/rerank" else {"input": texts}
        assert (await api.post(path, body)).status == 200
    assert len(threads) >= len(texts)
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("path", "fields", "name", "others"),
    [
        ("/v1/embeddings", {}, "data", ["object", "model", "usage"]),
        ("/v1/embeddings", {"encoding_format": "base64"}, "data", ["object", "model", "usage"]),
        ("/v1/embeddings", {"dimensions": 5}, "data", ["object", "model", "usage"]),
        ("/api/embed", {}, "embeddings", ["model", "total_duration", "load_duration", "prompt_eval_count"]),
    ],
)
async def test_vectors_are_written_one_by_one_into_the_body_that_they_would_be_in_at_once(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], name: str, others: list[str]
) -> None:
    encode, sizes = msgspec.json.encode, []

    def noted(value: Any) -> bytes:
        encoded = encode(value)
        sizes.append(len(encoded))
        return encoded

    async with serve(embedder=FakeEmbedder()) as api:
        monkeypatch.setattr(msgspec.json, "encode", noted)
        answers = [await api.post(path, {"input": texts, **fields}) for texts in (["text"], [f"text {i}" for i in range(50)])]
        monkeypatch.undo()
    for answer, n in zip(answers, (1, 50), strict=True):
        assert answer.headers["content-type"] == "application/json"
        assert answer.body == encode(answer.json)
        assert list(answer.json) == [others[0], name, *others[1:]]
        assert len(answer.json[name]) == n
    assert max(sizes) < 2 * min(len(encode(one)) for one in answers[1].json[name])


def test_vectors_are_brought_to_length_one_piece_by_piece_as_they_would_be_at_once() -> None:
    given = np.random.default_rng(1).normal(size=(2500, 6)).astype(np.float32)
    given[7] = 0
    cut = given[:, :4].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    assert (api_vectors.normalised(given, 4) == (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)).all()
    assert (api_vectors.normalised(given)[7] == 0).all()


async def test_waiting_inputs_have_so_many_tokens_together_but_no_key_shuts_another_out(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "N_BYTES_MAX", 2 * (256 + 4 * N_EMBD) + 4 * 30)
    go_on = threading.Event()
    a, b = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
    embedder = FakeEmbedder(before_step=lambda _batch: go_on.wait(TEST_S) and None)
    async with serve(embedder=embedder, api_key=("a name=anna", "b name=ben")) as api, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def ask(texts: list[str], headers: dict[str, str]) -> None:
            answers.append((await api.post("/v1/embeddings", {"input": texts}, **headers)).status)

        try:
            nursery.start_soon(ask, ["x" * 20, "y" * 20], a)
            await api.until(lambda: api.running.engine.embeddings.loop.n_waiting == 1)
            refused = await api.post("/v1/embeddings", {"input": "z"}, **a)
            nursery.start_soon(ask, ["z"], b)
            await api.until(lambda: api.running.engine.embeddings.loop.n_waiting == 2)
        finally:
            go_on.set()
        await api.until(lambda: len(answers) == 2)
        again = await api.post("/v1/embeddings", {"input": "z"}, **a)
        metrics = (await api.get("/metrics", **a)).body.decode()
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert answers == [200, 200]
    assert again.status == 200
    assert 'cllm_refusals_total{why="queue_full"} 1.0' in metrics
    n_tokens = {key: _value(metrics, f'cllm_key_tokens_total{{key="{key}",kind="embedded"}}') for key in ("anna", "ben")}
    assert 40 < n_tokens["anna"] < 50
    assert 1 <= n_tokens["ben"] < 5


class Wide(FakeEmbedder):
    """Gives vectors that take far more than what they are of; none before `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd = 1024
        self.go_on = threading.Event()

    def step(self, batch: Batch) -> Vectors:
        assert self.go_on.wait(TEST_S)
        return np.ones((batch.n_rows, self.n_embd), np.float32)


async def test_the_vectors_of_requests_under_way_have_so_much_memory_together_but_no_key_shuts_another_out(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = Wide()
    monkeypatch.setattr(embedding, "N_BYTES_MAX", 2 * 4 * embedder.n_embd)
    a, b = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
    async with serve(embedder=embedder, api_key=("a", "b")) as api, trio.open_nursery() as nursery:
        loop, statuses = api.running.engine.embeddings.loop, []

        async def ask(headers: dict[str, str]) -> None:
            statuses.append((await api.post("/v1/embeddings", {"input": "z"}, **headers)).status)

        try:
            for n, headers in enumerate((a, a, b), 1):
                if headers is b:
                    refused = await api.post("/v1/embeddings", {"input": "z"}, **a)
                nursery.start_soon(ask, headers)
                await api.until(lambda n=n: loop.n_waiting == n)
        finally:
            embedder.go_on.set()
        await api.until(lambda: len(statuses) == 3)
        again = await api.post("/v1/embeddings", {"input": "z"}, **a)
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert statuses == [200, 200, 200]
    assert again.status == 200


def _value(metrics: str, name: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))
