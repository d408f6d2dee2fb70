"""Every kind of error on every surface, in the surface's own shape, with a true status, before anything is queued."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import msgspec
import pytest
import trio

from cllm import errors
from cllm.api.errors import openai_shape, response_of
from cllm.serve.engine import N_CHARS_INLINE
from cllm.testing.fake import FakeModel, FakeVocabulary
from cllm.testing.fake_embedder import FakeEmbedder
from cllm.text.template import ChatTemplate
from tests.api.conftest import TEST_S


def openai_words(answer: Any) -> tuple[str, str]:
    """An error's type and message, where the shape is OpenAI's."""
    assert set(answer.json) == {"error"}
    assert {"message", "type", "param", "code"} <= set(answer.error)
    return answer.error["type"], answer.error["message"]


def anthropic_words(answer: Any) -> tuple[str, str]:
    """The same, where it is Anthropic's."""
    assert set(answer.json) == {"type", "error", "request_id"}
    assert answer.json["type"] == "error"
    assert set(answer.error) == {"type", "message"}
    return answer.error["type"], answer.error["message"]


def ollama_words(answer: Any) -> tuple[str, str]:
    """The same, where it is Ollama's, which has no types."""
    assert set(answer.json) == {"error"}
    return "", answer.error


def native_words(answer: Any) -> tuple[str, str]:
    """The same, where it is the first cLLM's, which has none either."""
    assert answer.json["success"] is False
    assert set(answer.json) <= {"success", "error", "retry_after"}
    return "", answer.json["error"]


@attrs.frozen
class Surface:
    """How to ask a surface for an answer to a text, and how it words an error."""

    path: str
    body: Callable[[str], dict[str, Any]]
    words: Callable[[Any], tuple[str, str]] = openai_words
    timeout: Callable[[float], dict[str, Any]] = lambda seconds: {"timeout_s": seconds}
    names_models: bool = True


def messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def in_options(seconds: float) -> dict[str, Any]:
    return {"options": {"timeout_s": seconds}}


GENERATING = [
    Surface("/v1/chat/completions", messages),
    Surface("/v1/completions", lambda text: {"prompt": text}),
    Surface("/v1/responses", lambda text: {"input": text}),
    Surface("/v1/messages", lambda text: {"max_tokens": 20, **messages(text)}, anthropic_words),
    Surface("/api/chat", lambda text: {"stream": False, **messages(text)}, ollama_words, in_options),
    Surface("/api/generate", lambda text: {"stream": False, "prompt": text}, ollama_words, in_options),
    Surface("/generate", lambda text: {"prompt": text}, native_words, names_models=False),
]
OTHERS = [
    Surface("/v1/embeddings", lambda text: {"input": text}),
    Surface("/v1/rerank", lambda text: {"query": text, "documents": ["x"]}),
    Surface("/v1/messages/count_tokens", messages, anthropic_words),
    Surface("/api/embed", lambda text: {"input": text, "truncate": False}, ollama_words),
    Surface("/tokenize", lambda text: {"content": text}, names_models=False),
]
of_every_surface = pytest.mark.parametrize("surface", [*GENERATING, *OTHERS], ids=lambda surface: surface.path)
of_generating_surfaces = pytest.mark.parametrize("surface", GENERATING, ids=lambda surface: surface.path)

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "quota_exceeded_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}


def check(surface: Surface, answer: Any, status: int, says: str = "", kind: str = "") -> None:
    """Hold an answer to the surface's shape and words."""
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    told, message = surface.words(answer)
    expected = {openai_words: kind or OPENAI_TYPES[status], anthropic_words: ANTHROPIC_TYPES[status]}.get(surface.words, "")
    assert told == expected
    assert says in message
    assert message
    assert "Traceback" not in message


@of_every_surface
@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b'{"model": "\xff"}', b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"a": NaN}']
)
async def test_400_of_what_is_no_json_of_ours(serve: Any, surface: Surface, body: bytes) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        check(surface, await api.post(surface.path, body), 400)
        assert api.scheduler.totals.n_submitted == 0


@of_every_surface
async def test_400_of_a_body_that_is_compressed_says_so(serve: Any, surface: Surface) -> None:
    async with serve(FakeModel(n_cells=64), embedder=FakeEmbedder()) as api:  # so that answers without a limit are short
        packed = gzip.compress(json.dumps(surface.body("x")).encode())
        check(surface, await api.post(surface.path, packed, Content_Encoding="gzip"), 400, "Content-Encoding")
        for plain in ("identity", "UTF-8", ""):
            assert (await api.post(surface.path, surface.body("x"), Content_Encoding=plain)).status == 200


@of_every_surface
async def test_400_of_a_field_names_it(serve: Any, surface: Surface) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        body = surface.body("x")
        name = next(name for name in ("messages", "prompt", "input", "query", "content") if name in body)
        answer = await api.post(surface.path, {**body, name: 5})
        check(surface, answer, 400, name)
        assert api.scheduler.totals.n_submitted == 0


@of_every_surface
async def test_400_of_what_does_not_fit_the_context(serve: Any, surface: Surface) -> None:
    if surface.path in ("/tokenize", "/v1/messages/count_tokens"):
        pytest.skip("it only counts")
    async with serve(FakeModel(n_ctx_train=64), FakeEmbedder(n_tokens_max=64)) as api:
        answer = await api.post(surface.path, surface.body("x" * 200))
        check(surface, answer, 400, "64", kind="exceed_context_size_error")
        if surface.words is openai_words:
            assert answer.error["n_ctx"] == 64
            assert answer.error["n_prompt_tokens"] > 64
            assert answer.error["code"] == "context_length_exceeded"
        if surface.path not in ("/v1/embeddings", "/v1/rerank", "/api/embed"):
            # Agents that shorten a conversation and try again look for one of these.
            assert all(words in answer.body for words in (b"prompt is too long: ", b" tokens > 6", b"exceeds the available context size"))


CONVERSING = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/tokenize",
    "/apply-template",
)


def conversation(path: str, *texts: str) -> dict[str, Any]:
    """A body in which users and the assistant say these by turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"max_tokens": 1, "input" if path == "/v1/responses" else "messages": turns, "truncate": False}  # the last one of Ollama's


@pytest.mark.parametrize("path", CONVERSING)
async def test_400_of_a_conversation_that_cannot_fit_by_its_turns_or_texts_alone_comes_before_it_is_rendered(
    serve: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: 1 / 0)
        many = await api.post(path, conversation(path, *(["x"] * 65)))
        long = await api.post(path, conversation(path, "x" * 8192, "x" * 8192, "x"))
    for answer in (many, long):
        assert (answer.status, b"prompt is too long: at least 65 tokens" in answer.body) == (400, True), answer.body


@of_every_surface
async def test_401_without_a_key(serve: Any, surface: Surface) -> None:
    async with serve(FakeModel(n_ctx_train=64), embedder=FakeEmbedder(), api_key=("k",)) as api:
        answer = await api.post(surface.path, surface.body("x"))
        check(surface, answer, 401, "key")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        for key in ({"Authorization": "Bearer k"}, {"X_Api_Key": "k"}):
            assert (await api.post(surface.path, surface.body("x"), **key)).status == 200


@of_every_surface
async def test_404_of_a_model_that_is_not_there(serve: Any, surface: Surface) -> None:
    if not surface.names_models:
        pytest.skip("it names no model")
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post(surface.path, {**surface.body("x"), "model": "another"})
        check(surface, answer, 404, "another")
        assert "fake" in answer.body.decode()  # it names what there is


async def test_403_of_what_the_operator_has_not_enabled(serve: Any) -> None:
    surface = Surface("/benchmark", lambda text: {}, native_words)
    async with serve() as api:
        check(surface, await api.post(surface.path, {}), 403, "--enable-benchmark")


@pytest.mark.parametrize("surface", [s for s in GENERATING if s.path != "/generate"], ids=lambda surface: surface.path)
async def test_404_of_a_path_below_a_surface_is_in_its_shape(serve: Any, surface: Surface) -> None:
    below = {anthropic_words: "/v1/messages/batches", ollama_words: "/api/pull"}.get(surface.words, "/v1/files")
    async with serve() as api:
        check(surface, await api.post(below, {}), 404, below)


@of_every_surface
async def test_405_says_which_methods_are_taken(serve: Any, surface: Surface) -> None:
    async with serve() as api:
        answer = await api.ask("PUT", surface.path, {})
        check(surface, answer, 405)
        assert "POST" in answer.headers["Allow"]


@of_every_surface
async def test_408_of_a_body_that_does_not_come(serve: Any, surface: Surface) -> None:
    async with (
        serve(embedder=FakeEmbedder(), body_timeout_s=0.02) as api,
        api.asking(surface.path, b'{"model": ', complete=False) as exchange,
    ):
        check(surface, await exchange.answer(), 408)


@of_every_surface
async def test_413_of_a_body_over_the_limit(serve: Any, surface: Surface) -> None:
    async with serve(embedder=FakeEmbedder(), max_body_mb=0.001) as api:
        check(surface, await api.post(surface.path, surface.body("x" * 2000)), 413)


@of_generating_surfaces
async def test_429_of_a_key_that_has_as_much_under_way_as_it_may(serve: Any, surface: Surface) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.005), api_key=("k",), key_cap=1) as api:
        body = b'{"prompt": "x", "max_tokens": 4000, "stream": true}'
        async with api.asking("/v1/completions", body, X_Api_Key="k") as exchange:
            await exchange.receive()
            answer = await api.post(surface.path, surface.body("x"), X_Api_Key="k")
            exchange.leave()
        check(surface, answer, 429)
        assert int(answer.headers["Retry-After"]) >= 1


@of_generating_surfaces
async def test_500_of_a_model_that_fails_on_it_tells_nothing_of_the_inside(serve: Any, surface: Surface) -> None:
    def fail(batch: Any) -> None:
        raise RuntimeError("broken on purpose")

    async with serve(FakeModel(before_step=fail)) as api:
        answer = await api.post(surface.path, surface.body("x"))
    check(surface, answer, 500)
    assert b"purpose" not in answer.body


@of_every_surface
async def test_500_of_a_mistake_of_ours_tells_nothing_of_the_inside(serve: Any, surface: Surface) -> None:
    model, embedder = FakeModel(), FakeEmbedder()
    async with serve(model, embedder) as api:
        for one in (model.vocabulary, embedder.vocabulary):
            one.tokenize = lambda *a, **k: 1 / 0  # type: ignore[method-assign,assignment]
        answer = await api.post(surface.path, surface.body("x"))
    check(surface, answer, 500)
    assert b"division" not in answer.body


@pytest.mark.parametrize("surface", [s for s in OTHERS if "emb" in s.path or "rerank" in s.path], ids=lambda surface: surface.path)
async def test_501_of_what_is_not_served(serve: Any, surface: Surface) -> None:
    async with serve() as api:
        check(surface, await api.post(surface.path, surface.body("x")), 501, "--embedding")


@of_every_surface
async def test_503_while_the_model_is_being_loaded(loading: Any, surface: Surface) -> None:
    answer = await loading.post(surface.path, surface.body("x"))
    check(surface, answer, 503, "loaded")
    assert int(answer.headers["Retry-After"]) >= 1


@of_generating_surfaces
async def test_503_while_draining_and_when_the_queue_is_full(serve: Any, surface: Surface) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.005), queue_size=1, parallel=1) as api:
        body = b'{"prompt": "x", "max_tokens": 4000, "stream": true}'
        async with api.asking("/v1/completions", body) as running:
            await running.receive()
            async with api.asking("/v1/completions", body) as waiting:
                await api.until(lambda: api.scheduler.n_waiting == 1)
                full = await api.post(surface.path, surface.body("x"))
                waiting.leave()
            running.leave()
        check(surface, full, 503, "queue")
        assert int(full.headers["Retry-After"]) >= 1
        assert "x-should-retry" not in full.headers
        api.running.engine.drain()
        draining = await api.post(surface.path, surface.body("x"))
        check(surface, draining, 503, "draining")
        assert int(draining.headers["Retry-After"]) >= 1


@of_generating_surfaces
async def test_429_and_503_of_the_queue_come_before_a_prompt_is_rendered_or_tokenised(
    serve: Any, surface: Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []
    tokenize, render = FakeVocabulary.tokenize, ChatTemplate.render
    monkeypatch.setattr(FakeVocabulary, "tokenize", lambda *a, **k: touched.append("tokenised") or tokenize(*a, **k))
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: touched.append("rendered") or render(*a, **k))
    go_on = threading.Event()
    model = FakeModel(n_ctx_train=100, before_step=lambda batch: go_on.wait(TEST_S) and None)
    async with serve(model, api_key=("one cap=2", "other"), queue_size=1, parallel=1) as api, trio.open_nursery() as nursery:
        ask = partial(api.post, "/v1/completions", {"prompt": [120], "max_tokens": 1}, X_Api_Key="one")
        nursery.start_soon(ask)
        await api.until(lambda: api.scheduler.n_running == 1)
        nursery.start_soon(ask)
        await api.until(lambda: api.scheduler.n_waiting == 1)
        touched.clear()
        capped = await api.post(surface.path, surface.body("x"), X_Api_Key="one")
        full = await api.post(surface.path, surface.body("x"), X_Api_Key="other")
        refused, touched[:] = list(touched), []
        go_on.set()
        await api.idle()
        taken = await api.post(surface.path, surface.body("x"), X_Api_Key="other")
    check(surface, capped, 429, "under way")
    check(surface, full, 503, "queue")
    assert refused == []
    assert taken.status == 200
    assert "tokenised" in touched


class SlowReader:
    """Long texts are read as soon as it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_read = 0
        self.may_go_on = threading.Event()
        self._tokenize = FakeVocabulary.tokenize
        monkeypatch.setattr(FakeVocabulary, "tokenize", self._read)

    def _read(self, text: str, **options: Any) -> list[int]:
        self.n_read += 1
        self.may_go_on.wait(TEST_S)
        return self._tokenize(FakeVocabulary(), text[:10], **options)


async def test_who_was_let_in_has_room_in_the_queue_before_the_prompt_is_read(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(queue_size=1) as api, trio.open_nursery() as nursery:
        reader, answers = SlowReader(monkeypatch), []
        body = {"prompt": "x" * (N_CHARS_INLINE + 1), "max_tokens": 1}

        async def ask() -> None:
            answers.append(await api.post("/v1/completions", body))

        nursery.start_soon(ask)
        await api.until(lambda: reader.n_read == 1)
        refused = await api.post("/v1/completions", body)
        reader.may_go_on.set()
        await api.until(lambda: bool(answers))
        again = await api.post("/v1/completions", body)
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert [answer.status for answer in (*answers, again)] == [200, 200]
    assert reader.n_read == 2, "the refused one cost nothing"


async def test_who_leaves_while_the_prompt_is_read_leaves_the_room_to_others(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(queue_size=1) as api:
        reader = SlowReader(monkeypatch)
        body = msgspec.json.encode({"prompt": "x" * (N_CHARS_INLINE + 1), "max_tokens": 1})
        async with api.asking("/v1/completions", body) as reading:
            await api.until(lambda: reader.n_read == 1)
            reading.leave()
        reader.may_go_on.set()
        assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1})).status == 200


async def test_reading_the_prompt_counts_in_the_time_that_a_request_gives_itself(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as api, trio.open_nursery() as nursery:
        reader, answers = SlowReader(monkeypatch), []

        async def ask() -> None:
            body = {"prompt": "x" * (N_CHARS_INLINE + 1), "max_tokens": 1, "timeout_s": 0.05}
            answers.append(await api.post("/v1/completions", body))

        nursery.start_soon(ask)
        await api.until(lambda: reader.n_read == 1)
        await trio.sleep(0.1)
        reader.may_go_on.set()
        await api.until(lambda: bool(answers))
    assert (answers[0].status, answers[0].error["param"]) == (504, "timeout_s")


@of_generating_surfaces
async def test_504_when_its_time_is_over_before_the_first_token(serve: Any, surface: Surface) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.05)) as api:
        check(surface, await api.post(surface.path, {**surface.body("x"), **surface.timeout(0.01)}), 504)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (errors.TemplateSlow("the template takes too long"), True),
        (errors.NotSupported("the model cannot"), True),
        (errors.GenerationFailed("the model failed on this request", code="step_failed"), True),
        (errors.GenerationFailed("the model failed on this request", code="stream_failed"), False),
        (errors.GenerationFailed("the server behind this one failed", code="upstream_failed"), False),
        (errors.Unavailable("the queue is full", retry_after_s=1.0), False),
        (errors.InvalidRequest("n: expected a number"), False),
    ],
)
def test_what_would_fail_again_says_so_to_packages_that_ask_again(error: errors.RequestError, is_final: bool) -> None:
    assert (response_of(error, openai_shape).headers.get("x-should-retry") == "false") is is_final
