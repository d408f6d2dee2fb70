"""Several models behind one server: the request's `model` chooses, on every surface, and what is listed says how each stands."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from cllm.api.app import create_app
from cllm.backend import ModelSpec, OnProgress, StepModel
from cllm.config import Settings
from cllm.errors import LoadFailed
from cllm.serve.house import Hold, House, State, Tenant
from cllm.serve.housekeeping import Housekeeper
from cllm.serve.progress import LogProgress
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.testing.fake_embedder import FakeEmbedder
from tests.api.conftest import TEST_S, Api

MESSAGES = [{"role": "user", "content": "hello"}]
OPENAI = ("error", "code"), "model_not_found"
ASKING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/completion": {"prompt": "x", "n_predict": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "x", "stream": False, "options": {"num_predict": 2}},
    "/api/embed": {"input": "x"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [100]},
    "/apply-template": {"messages": MESSAGES},
}


WIZARD = {"messages": [{"role": "wizard", "content": "x"}]}
WRONG: list[tuple[str, dict[str, Any]]] = [  # by itself, whatever model is asked
    ("/v1/chat/completions", WIZARD),
    ("/v1/chat/completions", {"top_logprobs": 2}),
    ("/v1/chat/completions", {"max_tokens": 0}),
    ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}),
    ("/v1/chat/completions", {"grammar": "x", "json_schema": {}}),
    ("/v1/completions", {"best_of": 2, "stream": True}),
    ("/v1/completions", {"suffix": "x", "prompt_logprobs": 1}),
    ("/v1/completions", {"grammar": "x", "json_schema": {}}),
    ("/v1/responses", {"background": True}),
    ("/v1/responses", {"previous_response_id": "resp_x"}),
    ("/v1/responses", {"input": WIZARD["messages"]}),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}),
    ("/v1/messages", {"n": 2}),
    ("/v1/messages", {"tool_choice": {"type": "any"}}),
    ("/v1/messages/count_tokens", {"tool_choice": {"type": "any"}}),
    ("/v1/embeddings", {"input": ["x", 1]}),
    ("/v1/embeddings", {"input": ["x"] * 2049}),
    ("/v1/rerank", {"documents": ["x"] * 2049}),
    ("/api/chat", WIZARD),
    ("/api/chat", {"options": {"n": 2}}),
    ("/api/generate", {"context": [1]}),
    ("/api/generate", {"format": 5}),
    ("/api/generate", {"raw": True, "system": "x"}),
    ("/api/embed", {"input": ["x"] * 16_385}),
    ("/completion", {"grammar": "x", "json_schema": {}}),
    ("/completion", {"n_probs": 1, "post_sampling_probs": True}),
    ("/tokenize", {"prompt": "y"}),
    ("/tokenize", {"content": None, **WIZARD}),
    ("/apply-template", WIZARD),
]


class Model(FakeModel):
    """Takes 100 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.info = attrs.evolve(self.info, size_bytes=100 << 20)

    def make_embedder(self, spec: ModelSpec) -> FakeEmbedder:
        return FakeEmbedder()


class Backend(FakeBackend):
    """Gives them by any name."""

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        return Model()


@pytest.fixture
def serve_several(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve fake models by name, `a` first."""

    @asynccontextmanager
    async def serve_several(*names: str, **settings: Any) -> AsyncIterator[Api]:
        monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Backend()))
        monkeypatch.setattr("cllm.serve.housekeeping.check_beforehand", lambda _settings: None)
        monkeypatch.setattr("cllm.hub.size_of", lambda _model: 100 << 20)
        chosen = Settings(names[0], names[1:], calibrate="off", embeddings=True, **settings)
        keeper = Housekeeper(chosen, LogProgress)
        with trio.fail_after(TEST_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keeper.run)
                await keeper.ready.wait()
                yield Api(create_app(keeper.house, chosen), None)
                keeper.drain()

    return serve_several


async def test_the_model_of_a_request_chooses_on_every_surface_and_an_unknown_one_is_404_naming_the_known(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        for path, body in ASKING.items():
            for name in ("a", "b"):
                answer = await api.post(path, {"model": name, **body})
                assert answer.status == 200, (path, answer.body)
                assert answer.json.get("model", name) == name, path
            unknown = await api.post(path, {"model": "c", **body})
            assert unknown.status == 404, path
            error = unknown.error if isinstance(unknown.error, str) else unknown.error["message"]
            assert "only a, b" in error, path
            if isinstance(unknown.error, dict) and not path.startswith("/v1/messages"):
                assert unknown.error["type"] == "not_found_error"


async def test_without_a_name_the_first_answers(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        assert (await api.chat()).json["model"] == "a"
        assert (await api.chat(stream=True)).chunks[0]["model"] == "a"


async def test_the_list_says_how_each_stands_and_asking_loads(serve_several: Any) -> None:
    async with serve_several("a", "b", models_memory_mb=100, alias=("b=other",)) as api:
        before = (await api.get("/v1/models")).json["data"]
        assert [(one["id"], one["status"]["value"], "meta" in one) for one in before] == [
            ("a", "loaded", True),
            ("other", "unloaded", False),
        ]
        assert (await api.get("/v1/models/other")).json["status"]["value"] == "unloaded"
        assert [one["name"] for one in (await api.get("/api/tags")).json["models"]] == ["a:latest", "other:latest"]
        assert (await api.chat(model="other")).json["model"] == "other"
        after = (await api.get("/v1/models")).json["data"]
        assert [one["status"]["value"] for one in after] == ["unloaded", "loaded"]
        assert [one["name"] for one in (await api.get("/api/ps")).json["models"]] == ["other:latest"]
        health, ready = await api.get("/health"), await api.get("/ready")
    assert (health.status, ready.status) == (200, 200)


async def test_names_with_ollamas_tag_are_known_on_every_surface(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        for path, body in ASKING.items():
            assert (await api.post(path, {"model": "b:latest", **body})).status == 200, path
        assert (await api.get("/v1/models/b:latest")).json["id"] == "b"
        assert (await api.get("/v1/models/c:latest")).status == 404


async def test_asking_about_a_model_loads_none(serve_several: Any) -> None:
    async with serve_several("a", "b", models_memory_mb=100) as api:

        async def states() -> list[str]:
            return [one["status"]["value"] for one in (await api.get("/v1/models")).json["data"]]

        unknown = (await api.post("/api/show", {"model": "b"})).json
        for no_time in (0, "0", "0s", "0h0m0s"):  # the third is what Ollama's own `stop` sends
            unload = (await api.post("/api/generate", {"model": "b", "keep_alive": no_time})).json
            assert (unload["done_reason"], await states()) == ("unload", ["loaded", "unloaded"])
            assert unknown["model_info"] == {"general.architecture": ""}
            assert (await api.post("/api/embed", {"model": "b", "keep_alive": no_time})).json["embeddings"] == []
            assert (await api.post("/api/embeddings", {"model": "b", "keep_alive": no_time})).json == {"embedding": []}
            assert (await api.post("/api/embed", {"model": "c", "keep_alive": no_time})).status == 404
        assert await states() == ["loaded", "unloaded"]
        for path in ("props", "model/info"):  # which a page of another site may ask for, as a picture
            asked = await api.get(f"/{path}?model=b")
            assert asked.status == 503
            assert "b is not loaded" in asked.body.decode()
        assert await states() == ["loaded", "unloaded"]
        shown = (await api.post("/api/show", {"model": "a"})).json
        props = [(await api.get(f"/{path}?model=a")).json for path in ("props", "model/info")]
        assert (await api.chat(model="b")).status == 200
        assert await states() == ["unloaded", "loaded"]
        assert (await api.post("/api/show", {"model": "a"})).json == shown
        assert [(await api.get(f"/{path}?model=a")).json for path in ("props", "model/info")] == props
        assert await states() == ["unloaded", "loaded"]


async def test_a_request_that_is_wrong_by_itself_loads_no_model_and_unloads_no_other(serve_several: Any) -> None:
    async with serve_several("a", "b", models_memory_mb=100) as api:
        for path, fields in WRONG:
            answer = await api.post(path, {"model": "b", **ASKING[path], **fields})
            assert answer.status == 400, (path, fields, answer.body)
            states = [one["status"]["value"] for one in (await api.get("/v1/models")).json["data"]]
            assert states == ["loaded", "unloaded"], (path, fields)
        for path in ("/v1/chat/completions", "/api/chat"):
            assert (await api.post(path, {"model": "c", **WIZARD})).status == 404, "that is seen first"


async def test_the_names_for_vectors_of_a_model_that_was_unloaded_are_still_listed(serve_several: Any) -> None:
    async with serve_several("a", "b", enable_admin=True, embedding_alias=("vectors",)) as api:
        assert (await api.post("/v1/embeddings", {"model": "vectors", "input": "x"})).status == 200
        shown = (await api.post("/api/show", {"model": "vectors"})).json
        for name in ("a", "b"):
            assert (await api.post("/models/unload", {"model": name})).status == 200
        listed = {one["id"]: one["status"]["value"] for one in (await api.get("/v1/models")).json["data"]}
        assert listed == {"a": "unloaded", "b": "unloaded", "vectors": "unloaded"}
        assert (await api.get("/v1/models/vectors")).status == 200
        assert (await api.post("/api/show", {"model": "vectors"})).json == shown
        assert shown["capabilities"] == ["embedding"]
        assert (await api.post("/v1/embeddings", {"model": "vectors", "input": "x"})).status == 200


async def test_counters_name_the_model_as_long_as_there_may_be_others(serve_several: Any, tmp_path: Path) -> None:
    async with serve_several("a", enable_admin=True, lora_dir=str(tmp_path)) as api:
        text = (await api.get("/metrics")).body.decode()
    assert 'cllm_sequences_submitted_total{model="a"}' in text


async def test_counters_say_of_which_model_they_are(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        await api.chat(model="b")
        families = list(text_string_to_metric_families((await api.get("/metrics")).body.decode()))
    (ended,) = [family for family in families if family.name == "cllm_sequences_submitted"]
    assert {sample.labels["model"]: sample.value for sample in ended.samples} == {"a": 0.0, "b": 1.0}
    assert len({family.name for family in families}) == len(families)


async def test_a_request_is_found_whichever_model_it_asked(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        answer = await api.chat(model="b")
        found = await api.get("/v1/requests/" + answer.headers["x-request-id"])
    assert found.status == 200


async def test_models_are_loaded_and_unloaded_where_the_operator_allows_it(serve_several: Any) -> None:
    async with serve_several("a", "b", enable_admin=True) as api:
        unloaded = await api.post("/models/unload", {"model": "b"})
        assert (unloaded.status, unloaded.json) == (200, {"success": True, "model": "b", "status": {"value": "unloaded"}})
        loaded = await api.post("/models/load", {"model": "b"})
        assert (loaded.status, loaded.json["status"]) == (200, {"value": "loaded"})
        assert (await api.post("/models/load", {"model": "c"})).status == 404


async def test_who_has_mended_a_model_need_not_wait_until_it_would_be_tried_again(
    serve_several: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> StepModel:
        raise LoadFailed("a broken file")

    async with serve_several("a", "b", enable_admin=True) as api:
        assert (await api.post("/models/unload", {"model": "b"})).status == 200
        with monkeypatch.context() as broken:
            broken.setattr(Backend, "load", fail)
            for path in ("/models/load", "/v1/completions", "/models/load"):
                answer = await api.post(path, {"model": "b", "prompt": "x"})
                assert (answer.status, answer.error["code"]) == (503, "load_failed")
        assert (await api.post("/v1/completions", {"model": "b", "prompt": "x"})).status == 503
        assert (await api.post("/models/load", {"model": "b"})).status == 200


async def unload_and_load_late(api: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Unload b; what is loaded from now on waits for the event."""
    while (await api.post("/models/unload", {"model": "b"})).status != 200:  # noqa: ASYNC110 - as a client does
        await trio.sleep(0.001)
    go_on, load = threading.Event(), Backend.load

    def load_late(self: Backend, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        assert go_on.wait(TEST_S)
        return load(self, spec, on_progress)

    monkeypatch.setattr(Backend, "load", load_late)
    return go_on


async def test_who_cannot_wait_for_a_load_to_be_undone_is_told_that_it_will_be(serve_several: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_several("a", "b", enable_admin=True, load_wait_s=0.01) as api, trio.open_nursery() as nursery:
        go_on = await unload_and_load_late(api, monkeypatch)
        nursery.start_soon(api.post, "/models/load", {"model": "b"})
        while (await api.get("/v1/models/b")).json["status"]["value"] != "loading":  # noqa: ASYNC110
            await trio.sleep(0.001)
        answer = await api.post("/models/unload", {"model": "b"})
        assert (answer.status, answer.error["code"]) == (503, "loading")
        assert answer.error["message"] == "b is still being loaded, and unloaded then"
        go_on.set()
        while (await api.get("/v1/models/b")).json["status"]["value"] != "unloaded":  # noqa: ASYNC110
            await trio.sleep(0.001)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/api/embed"])
async def test_who_is_about_to_be_answered_does_not_wait_for_himself_when_his_model_has_to_make_room(
    serve_several: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    hold, n_holds = House.hold, 0

    async def hold_and_unload(house: House, tenant: Tenant, **limits: float) -> Hold:
        nonlocal n_holds
        held = await hold(house, tenant, **limits)
        n_holds += 1
        if n_holds == 1:
            nursery.start_soon(house.unload, tenant)
            await tenant.until(lambda: tenant.state is State.UNLOADING)
        return held

    monkeypatch.setattr(House, "hold", hold_and_unload)
    async with serve_several("a", "b", load_wait_s=TEST_S) as api, trio.open_nursery() as nursery:
        answer = await api.post(path, {"model": "b", **ASKING[path]})
        assert answer.status == 200


async def test_who_reads_his_answer_slowly_keeps_no_model_from_being_unloaded(serve_several: Any) -> None:
    asked = json.dumps({"model": "b", "input": "x"}).encode()
    async with serve_several("a", "b", enable_admin=True, load_wait_s=TEST_S) as api, api.asking("/v1/embeddings", asked) as slow:
        send, reads_on = slow._send, trio.Event()

        async def send_once_read(message: Any) -> None:
            if message["type"] == "http.response.body":
                await reads_on.wait()
            await send(message)

        slow._send = send_once_read
        await api.until(lambda: slow.status is not None)
        assert (await api.post("/models/unload", {"model": "b"})).status == 200
        reads_on.set()
        answer = await slow.answer()
    assert (answer.status, len(answer.json["data"])) == (200, 1)


async def test_who_waits_in_vain_for_a_load_is_counted_as_refused(serve_several: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_several("a", "b", enable_admin=True, load_wait_s=0.01) as api:
        go_on = await unload_and_load_late(api, monkeypatch)
        refused = await api.chat(model="b")
        go_on.set()
        assert (refused.status, refused.error["code"]) == (503, "loading")
        assert 'cllm_refusals_total{model="b",why="loading"} 1.0' in (await api.get("/metrics")).body.decode()


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed"])
async def test_ollamas_clients_are_told_how_long_their_model_was_loaded_for_them(
    serve_several: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with serve_several("a", "b", enable_admin=True, load_wait_s=TEST_S) as api, trio.open_nursery() as nursery:
        go_on = await unload_and_load_late(api, monkeypatch)

        async def load_soon() -> None:
            await trio.sleep(0.05)
            go_on.set()

        nursery.start_soon(load_soon)
        first, second = [(await api.post(path, {"model": "b", **ASKING[path]})).json for _ in range(2)]
    assert first["total_duration"] > first["load_duration"] > 0.04e9
    assert second["load_duration"] == 0 < second["total_duration"]


async def test_of_requests_with_one_id_to_several_models_the_last_is_told(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        for model, n in (("b", 3), ("a", 5), ("b", 2)):
            sent = {"model": model, "prompt": [97] * n, "max_tokens": 1}
            assert (await api.post("/v1/completions", sent, X_Request_Id="job-7")).status == 200
            (told,) = (await api.get("/v1/requests/job-7")).json["sequences"]
            assert told["events"][0]["n_prompt"] == n


async def test_an_unknown_name_for_vectors_is_404_also_while_nothing_that_gives_some_is_loaded(serve_several: Any) -> None:
    async with serve_several("a", enable_admin=True) as api:
        await api.post("/models/unload", {"model": "a"})
        answer = await api.post("/v1/embeddings", {"model": "typo", "input": "x"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        (listed,) = (await api.get("/v1/models")).json["data"]
        assert listed["status"]["value"] == "unloaded", "nothing is loaded to say so"
        assert (await api.post("/v1/embeddings", {"model": "a", "input": "x"})).status == 200


async def test_who_names_no_model_gets_the_firsts_vectors_whether_it_is_loaded_or_not(serve_several: Any) -> None:
    async with serve_several("a", "b", enable_admin=True) as api:
        for _ in range(2):
            answer = await api.post("/v1/embeddings", {"input": "x"})
            assert (answer.status, answer.json["model"]) == (200, "a")
            while (await api.post("/models/unload", {"model": "a"})).status != 200:  # noqa: ASYNC110 - as a client does
                await trio.sleep(0.001)


async def test_who_names_no_model_gets_the_next_ones_vectors_where_the_first_turned_out_to_give_none(
    serve_several: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedders: list[FakeEmbedder] = []

    def make_embedder(_model: Model, _spec: ModelSpec) -> FakeEmbedder:
        embedders.append(FakeEmbedder())
        if len(embedders) == 1:
            raise LoadFailed("no memory for it")
        return embedders[-1]

    monkeypatch.setattr(Model, "make_embedder", make_embedder)
    async with serve_several("a", "b", enable_admin=True) as api:
        for _ in range(2):
            answer = await api.post("/v1/embeddings", {"input": "x"})
            assert (answer.status, answer.json["model"]) == (200, "b")
            await api.post("/models/unload", {"model": "a"})


async def test_the_only_model_is_listed_while_it_is_unloaded(serve_several: Any) -> None:
    async with serve_several("a", enable_admin=True) as api:
        await api.post("/models/unload", {"model": "a"})
        listed = await api.get("/v1/models")
        assert (listed.status, listed.json["data"][0]["status"]["value"]) == (200, "unloaded")
        assert (await api.get("/v1/models/a")).json["status"]["value"] == "unloaded"
        assert (await api.get("/api/tags")).json["models"][0]["name"] == "a:latest"
        assert (await api.get("/api/ps")).json["models"] == []
        assert (await api.post("/api/show", {"model": "a"})).status == 200
        assert (await api.chat()).status == 200


async def test_who_asks_again_for_an_adapter_whose_load_took_too_long_waits_for_the_same(
    serve_several: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def load(self: Backend, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        assert not spec.loras or go_on.wait(TEST_S)
        return Model()

    monkeypatch.setattr(Backend, "load", load)
    (tmp_path / "style.gguf").touch()
    (tmp_path / "other.gguf").touch()
    body = {"lora_name": "style", "lora_path": "style.gguf"}
    async with serve_several("a", enable_admin=True, lora_dir=str(tmp_path), load_wait_s=0.01) as api:
        first = await api.post("/v1/load_lora_adapter", body)
        assert (first.status, first.error["code"]) == (503, "loading")
        other = await api.post("/v1/load_lora_adapter", {**body, "lora_path": "other.gguf"})
        assert other.status == 400  # the name is another file's
        assert (await api.post("/v1/load_lora_adapter", body)).status == 503
        go_on.set()
        while (again := await api.post("/v1/load_lora_adapter", body)).status == 503:  # noqa: ASYNC110 - as a client does
            await trio.sleep(0.001)
        assert (again.status, again.json["status"]) == (200, {"value": "loaded"})
        assert (await api.post("/v1/load_lora_adapter", body)).status == 400  # it is there


async def test_the_time_that_a_load_takes_is_a_requests_own(serve_several: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def load(self: Backend, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        assert spec.path == "a" or go_on.wait(TEST_S)
        return Model()

    monkeypatch.setattr(Backend, "load", load)
    async with serve_several("a", "b", models_memory_mb=1) as api:
        late = await api.post("/v1/completions", {"model": "b", "prompt": "x", "timeout_s": 0.01})
        assert (late.status, late.error["param"]) == (504, "timeout_s")
        asked = {"model": "b", "messages": [{"role": "user", "content": "x"}], "stream": False}
        assert (await api.post("/api/chat", {**asked, "options": {"timeout_s": 0.01}})).status == 504
        go_on.set()
        assert (await api.post("/api/chat", {**asked, "options": {"timeout_s": TEST_S}})).status == 200
        assert (await api.post("/v1/completions", {"model": "b", "prompt": "x", "timeout_s": TEST_S})).status == 200


async def test_nobody_unloads_a_model_otherwise(serve_several: Any) -> None:
    async with serve_several("a", "b") as api:
        refused = await api.post("/models/unload", {"model": "b"})
        assert (refused.status, refused.error["type"]) == (403, "permission_error")
    async with serve_several("a", "b", enable_admin=True, api_key=("secret",)) as api:
        assert (await api.post("/models/unload", {"model": "b"})).status == 401
