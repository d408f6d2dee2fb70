"""How the server says how it is."""

from __future__ import annotations

import json
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from cllm.api.metric_aliases import WithAliases
from cllm.backend import Measure
from cllm.testing.fake import FakeModel
from cllm.text.builtin_templates import CHATML
from tests.api.conftest import TEST_S


async def test_a_server_at_rest_is_healthy_and_ready(serve: Any) -> None:
    async with serve() as api:
        health, ready = await api.get("/health"), await api.get("/ready")
    assert (health.status, health.json) == (200, {"status": "ok"})
    assert (ready.status, ready.json) == (200, {"status": "ready"})


async def test_while_loading_it_is_alive_not_ready_and_tells_how_far_it_is(loading: Any) -> None:
    health, ready = await loading.get("/health"), await loading.get("/ready")
    assert health.status == 200
    assert (ready.status, ready.json) == (503, {"status": "loading", "progress": 0.25})
    assert int(ready.headers["Retry-After"]) >= 1


async def test_while_loading_every_endpoint_that_needs_the_model_is_503_with_retry_after(loading: Any) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/completion": {"prompt": "x"},
        "/tokenize": {"content": "x"},
        "/detokenize": {"tokens": [1]},
        "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    }
    for path, body in bodies.items():
        answer = await loading.post(path, body)
        assert answer.status == 503, path
        assert answer.error["type"] == "unavailable_error"
        assert int(answer.headers["Retry-After"]) >= 1
    for path in ("/v1/models", "/props", "/slots", "/model/info"):
        assert (await loading.get(path)).status == 503
    assert (await loading.get("/metrics")).status == 200


async def test_while_draining_it_is_not_ready_and_refuses(serve: Any) -> None:
    async with serve() as api:
        api.running.engine.drain()
        ready, chat, health = await api.get("/ready"), await api.chat(), await api.get("/health")
    assert (ready.status, ready.json["status"]) == (503, "draining")
    assert (chat.status, chat.error["type"], chat.error["code"]) == (503, "unavailable_error", "draining")
    assert health.status == 200


async def test_a_dead_engine_is_not_healthy(loading: Any) -> None:
    loading.app.extensions["cllm"].house.first.engine.stopped()
    health, ready, chat = await loading.get("/health"), await loading.get("/ready"), await loading.chat()
    assert (health.status, health.json["status"]) == (503, "error")
    assert (ready.status, ready.json["status"]) == (503, "stopped")
    assert chat.status == 503


@pytest.mark.parametrize("keys", [(), ("k",), ("k priority=5",)])
async def test_a_full_queue_is_not_ready_and_503_with_retry_after(serve: Any, keys: tuple[str, ...]) -> None:
    go_on = threading.Event()
    model = FakeModel(before_step=lambda batch: go_on.wait(TEST_S) and None)

    async def ask() -> Any:
        return await api.post("/v1/completions", {"prompt": "x"}, x_api_key="k")

    async with serve(model, queue_size=2, parallel=1, api_key=keys) as api, trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await api.until(lambda: api.scheduler.n_running == 1)
        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await api.until(lambda: api.scheduler.n_waiting == 2)
        ready, chat = await api.get("/ready"), await ask()
        go_on.set()
    assert (ready.status, ready.json["status"]) == (503, "queue_full")
    assert (chat.status, chat.error["code"]) == (503, "queue_full")
    assert int(chat.headers["Retry-After"]) >= 1


async def test_it_is_ready_while_another_key_would_be_let_in_or_one_has_no_more_than_its_cap(serve: Any) -> None:
    go_on = threading.Event()
    model = FakeModel(before_step=lambda batch: go_on.wait(TEST_S) and None)
    for keys, n in ((("k", "other"), 3), (("k cap=2",), 2)):
        go_on.clear()
        async with serve(model, queue_size=2, parallel=1, api_key=keys) as api, trio.open_nursery() as nursery:
            ask = partial(api.post, "/v1/completions", {"prompt": "x"}, x_api_key="k")
            nursery.start_soon(ask)
            await api.until(lambda: api.scheduler.n_running == 1)
            for _ in range(n - 1):
                nursery.start_soon(ask)
            await api.until(lambda: api.scheduler.n_waiting == n - 1)  # noqa: B023
            ready, refused = await api.get("/ready"), await api.post("/v1/completions", {"prompt": "x"}, x_api_key="k")
            go_on.set()
        assert (ready.status, refused.status) == (200, 503 if n > 2 else 429)


async def test_prompts_beside_one_that_is_too_long_are_not_queued_or_counted(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=16)) as api:
        answer = await api.complete(["ok", [97] * 16])
        assert (answer.status, answer.error["type"]) == (400, "exceed_context_size_error")
        assert (api.scheduler.totals.n_submitted, api.scheduler.n_sequences) == (0, 0)


async def test_who_leaves_before_the_answer_is_logged_and_what_he_sent_is_counted(serve: Any, logged: list[Any]) -> None:
    go_on = threading.Event()
    body = json.dumps({"prompt": "x"}).encode()
    async with serve(FakeModel(before_step=lambda batch: go_on.wait(TEST_S) and None), api_key=("a-secret name=anna",)) as api:
        async with api.asking("/v1/completions", body, x_api_key="a-secret", x_request_id="r-7") as exchange:
            await api.until(lambda: api.scheduler.n_running == 1)
            exchange.leave()
        go_on.set()
        page = (await api.get("/metrics", x_api_key="a-secret")).body.decode()
    assert f"cllm_http_request_bytes_total {float(len(body))}" in page
    (left,) = [one for one in logged if one["event"] == "left"]
    assert (left["path"], left["request_id"], left["key"]) == ("/v1/completions", "r-7", "anna")
    assert [one["path"] for one in logged if one["event"] == "answered"] == ["/metrics"]


async def test_what_each_key_had_is_in_the_numbers_and_whose_a_request_was_in_the_log(serve: Any, logged: list[Any]) -> None:
    async with serve(api_key=("a-secret name=anna", "another")) as api:
        sent = {"prompt": "abcd", "max_tokens": 3, "ignore_eos": True}
        answer = await api.post("/v1/completions", sent, Authorization="Bearer a-secret")
        page = (await api.get("/metrics", Authorization="Bearer another")).body.decode()
    n_prompt = answer.json["usage"]["prompt_tokens"]
    for key, kind, n in (("anna", "prompt", n_prompt), ("anna", "generated", 3), ("key1", "prompt", 0), ("key1", "generated", 0)):
        assert f'cllm_key_tokens_total{{key="{key}",kind="{kind}"}} {float(n)}' in page
    (first, second) = [one for one in logged if one["event"] == "answered"]
    assert (first["key"], second["key"], first["request_id"]) == ("anna", "key1", answer.headers["x-request-id"])
    assert "a-secret" not in str(logged)


async def test_without_keys_no_number_is_of_one(serve: Any) -> None:
    async with serve() as api:
        await api.complete("abcd")
        assert "cllm_key_tokens" not in (await api.get("/metrics")).body.decode()


async def test_metrics_are_plain_for_who_asks_for_a_version_that_is_none(serve: Any) -> None:
    async with serve() as api:
        answer = await api.get("/metrics", Accept="text/plain; version=abc")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")


async def test_metrics_can_be_read_and_count_what_was_done(serve: Any) -> None:
    async with serve() as api:
        await api.chat(max_tokens=5)
        await api.chat(max_tokens=5, stream=True)
        await api.complete("x", n=2, max_tokens=5)
        await api.chat(max_tokens="many")
        await api.get("/nowhere")
        answer = await api.get("/metrics")
        modern = await api.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert modern.body.endswith(b"# EOF\n")
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert samples["cllm_http_requests_total", "/v1/chat/completions", "200", "POST"] == 2
    assert samples["cllm_http_requests_total", "/v1/chat/completions", "400", "POST"] == 1
    assert samples["cllm_http_requests_total", "404", "none", "none"] == 1
    assert samples["cllm_completions_total", "/v1/chat/completions", "length"] == 2
    assert samples["cllm_completions_total", "/v1/completions", "length"] == 2
    assert samples["cllm_time_to_first_token_seconds_count",] == 3
    assert samples["cllm_request_seconds_count",] == 3
    assert samples["cllm_inter_token_seconds_count",] >= 8
    assert samples["cllm_time_to_first_token_seconds_bucket", "+Inf"] == 3
    assert samples["cllm_http_response_bytes_total",] > 1000
    assert samples["cllm_http_request_bytes_total",] > 100
    assert samples["cllm_http_requests_in_progress",] == 1  # this one
    assert all(name.startswith("cllm_") for name, *_ in samples)


def samples_of(answer: Any, name: str) -> list[tuple[dict[str, str], float]]:
    families = text_string_to_metric_families(answer.body.decode())
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("n", "n_tokens"), [(1, 1), (1, 5), (3, 5)])
async def test_between_tokens_is_counted_for_each_completion_by_itself(serve: Any, stream: bool, n: int, n_tokens: int) -> None:
    async with serve() as api:
        await api.complete("once", max_tokens=n_tokens, n=n, ignore_eos=True, stream=stream)
        await api.idle()
        answer = await api.get("/metrics")
    ((_, n_between),) = samples_of(answer, "cllm_inter_token_seconds_count")
    ((_, n_first),) = samples_of(answer, "cllm_time_to_first_token_seconds_count")
    assert n_first == 1
    assert n_between <= n * (n_tokens - 1), "fewer, where a reader that was late took several at once"
    assert bool(n_between) == (n_tokens > 1)


async def test_boards_made_for_other_servers_find_numbers_by_their_names(serve: Any) -> None:
    async with serve(metrics_aliases="vllm,llamacpp") as api:
        await api.complete("once", max_tokens=5, ignore_eos=True)
        await api.idle()
        answer = await api.get("/metrics")
        modern = await api.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    ((_, n_steps),) = samples_of(answer, "cllm_step_sequences_count")
    of_fake = {"model_name": "fake"}
    for name, labels, value in (
        ("vllm:generation_tokens_total", of_fake, 5.0),
        ("vllm:prompt_tokens_total", of_fake, 5.0),
        ("vllm:num_requests_running", of_fake, 0.0),
        ("vllm:num_requests_waiting", of_fake, 0.0),
        ("vllm:kv_cache_usage_perc", of_fake, 0.0),
        ("vllm:request_success_total", {"finished_reason": "length", **of_fake}, 1.0),
        ("vllm:time_to_first_token_seconds_count", of_fake, 1.0),
        ("vllm:e2e_request_latency_seconds_count", of_fake, 1.0),
        ("llamacpp:tokens_predicted_total", {}, 5.0),
        ("llamacpp:requests_processing", {}, 0.0),
        ("llamacpp:n_decode_total", {}, n_steps),
        ("llamacpp:n_busy_slots_per_decode", {}, 1.0),
    ):
        assert (labels, value) in samples_of(answer, name), name
        assert all(one == (labels, value) or not one[1] for one in samples_of(answer, name)), name  # what is told from the start is 0
    assert samples_of(answer, "vllm:inter_token_latency_seconds_bucket") == [
        ({**labels, **of_fake}, value) for labels, value in samples_of(answer, "cllm_inter_token_seconds_bucket")
    ]
    assert b"vllm:generation_tokens_total" in modern.body


@attrs.frozen
class Telling:
    """A model that keeps numbers of itself."""

    name: str
    is_count: bool = True

    def measures(self) -> list[Measure]:
        return [Measure(name=self.name, help="", value=77, is_count=self.is_count, labels={"of": "plugin"})]


@pytest.mark.parametrize("aliases", [None, "vllm,llamacpp"])
@pytest.mark.parametrize(
    "model",
    [
        Telling("cells", is_count=False),
        Telling("sequences", is_count=False),
        Telling("prompt_tokens_total", is_count=False),
        Telling("prompt_tokens"),
        Telling("http_requests"),
        Telling("inter_token_seconds"),
    ],
)
async def test_a_name_of_the_servers_own_is_not_a_plugins(serve: Any, logged: list[Any], model: Telling, aliases: str | None) -> None:
    async with serve(metrics_aliases=aliases) as api:
        before = {line.partition(" ")[0] for line in (await api.get("/metrics")).body.decode().splitlines() if "created" not in line}
        api.running.engine.metrics.watch_model(model)
        api.running.engine.metrics.watch_model(Telling("doors"))
        answer = await api.get("/metrics")
    assert answer.status == 200
    assert b'cllm_doors_total{of="plugin"} 77.0' in answer.body
    assert answer.body.count(b'of="plugin"') == 1
    assert before <= {line.partition(" ")[0] for line in answer.body.decode().splitlines()}
    assert [one["why"] for one in logged if one["event"] == "metrics.failed"] == [
        f"a plugin tells cllm_{model.name}, which is the server's own"
    ]


def test_a_boards_share_of_the_cells_is_of_the_servers_own_states() -> None:
    cells = GaugeMetricFamily("cllm_cells", "", labels=["of"])
    cells.add_metric(["plugin"], 7.0)
    source = SimpleNamespace(collect=lambda: [cells])
    told = {metric.name: metric.samples for metric in WithAliases(source, ("vllm",), "fake").collect()}
    assert told["vllm:kv_cache_usage_perc"] == []


async def test_nothing_is_told_by_names_that_nobody_asked_for(serve: Any) -> None:
    async with serve() as api:
        plain = await api.get("/metrics")
    async with serve(metrics_aliases="vllm") as api:
        of_vllm = await api.get("/metrics")
    assert b"vllm:" not in plain.body
    assert b"vllm:" in of_vllm.body
    assert b"llamacpp:" not in of_vllm.body


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_steps_are_in_the_metrics_as_soon_as_they_are_done(serve: Any, accept: str) -> None:
    async with serve() as api:
        await api.complete("once", max_tokens=5)
        await api.idle()
        body = (await api.get("/metrics", Accept=accept)).body.decode()
        await api.complete("once", max_tokens=1)
        await api.idle()
        later = (await api.get("/metrics", Accept=accept)).body.decode()
    samples = dict(line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
    n_steps = float(samples["cllm_step_rows_count"])
    assert n_steps >= 5
    assert float(samples["cllm_step_rows_sum"]) == 5 + 4  # the prompt with bos, and all tokens but the last
    assert float(samples["cllm_step_outputs_sum"]) == 5
    assert float(samples["cllm_step_sequences_count"]) == n_steps
    for phase in ("model", "sample"):
        assert float(samples[f'cllm_step_seconds_count{{phase="{phase}"}}']) == n_steps
        assert float(samples[f'cllm_step_seconds_sum{{phase="{phase}"}}']) > 0
    assert f"cllm_step_outputs_sum {5 + 1.0}" in later


async def test_who_runs_and_who_waits_and_how_full_it_is_are_in_the_numbers(serve: Any) -> None:
    go_on = threading.Event()
    model = FakeModel(n_cells=64, before_step=lambda batch: go_on.wait(TEST_S) and None)
    async with serve(model, parallel=1, metrics_aliases="vllm") as api, trio.open_nursery() as nursery:
        nursery.start_soon(api.complete, "x" * 31)
        await api.until(lambda: api.scheduler.n_running == 1)
        for _ in range(2):
            nursery.start_soon(api.complete, "x")
        await api.until(lambda: api.scheduler.n_waiting == 2)
        answer = await api.get("/metrics")
        go_on.set()
    states = {labels["state"]: value for labels, value in samples_of(answer, "cllm_sequences")}
    assert (sum(states.values()), states["waiting"]) == (3, 2)
    of_fake = {"model_name": "fake"}
    assert (of_fake, 1.0) in samples_of(answer, "vllm:num_requests_running")
    assert (of_fake, 2.0) in samples_of(answer, "vllm:num_requests_waiting")
    ((_, usage),) = [one for one in samples_of(answer, "vllm:kv_cache_usage_perc") if one[0] == of_fake]
    assert usage == pytest.approx(32 / 64)


async def test_who_gave_cells_back_is_counted(serve: Any) -> None:
    async with serve(FakeModel(n_cells=64), parallel=2) as api, trio.open_nursery() as nursery:
        for text in ("once upon a time", "under a low sky"):
            nursery.start_soon(partial(api.complete, text, max_tokens=40, ignore_eos=True))
        await api.until(lambda: api.scheduler.totals.n_preempted)
        await api.idle()
        answer = await api.get("/metrics")
        assert samples_of(answer, "cllm_preemptions_total") == [({}, float(api.scheduler.totals.n_preempted))]


async def test_slots_show_the_sequences_under_way(serve: Any) -> None:
    go_on = threading.Event()
    async with serve(FakeModel(before_step=lambda batch: go_on.wait(TEST_S) and None)) as api, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: api.post("/v1/completions", {"prompt": "secret", "max_tokens": 3}, X_Request_Id="mine"))
        await api.until(lambda: api.scheduler.n_running == 1)
        answer = await api.get("/slots")
        go_on.set()
    (slot,) = answer.json
    assert (slot["request_id"], slot["is_processing"], slot["phase"], slot["n_prompt"]) == ("mine", True, "prefill", 7)
    assert b"secret" not in answer.body


async def test_props_are_what_llama_servers_clients_look_for(serve: Any) -> None:
    async with serve(sampling_defaults="llama", parallel=3) as api:
        props = (await api.get("/props")).json
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["total_slots"] == 3
    assert "{% for" in props["chat_template"]
    assert (props["bos_token"], props["eos_token"]) == ("<bos>", "<end>")


@pytest.mark.parametrize(
    ("told", "why"), [(None, "the model brings none"), ("rwkv-world", "the model names 'rwkv-world', and brings none")]
)
async def test_props_show_the_template_in_use_where_the_model_brings_none_and_a_line_was_logged(
    serve: Any, logged: list[Any], told: str | None, why: str
) -> None:
    model = FakeModel()
    model.vocabulary.chat_template = told
    async with serve(model) as api:
        props = (await api.get("/props")).json
    assert props["chat_template"] == CHATML
    fallbacks = [(entry["log_level"], entry["why"]) for entry in logged if entry["event"] == "chat_template.fallback"]
    assert fallbacks == [("warning", why)]


async def test_a_name_in_a_templates_place_is_the_template_that_it_names(serve: Any, logged: list[Any]) -> None:
    model = FakeModel()
    model.vocabulary.chat_template = "mistral-v7-tekken"
    async with serve(model) as api:
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        shown = (await api.post("/apply-template", {"messages": messages})).json["prompt"]
    assert shown == "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]"
    assert not [entry for entry in logged if entry["event"] == "chat_template.fallback"]


async def test_a_models_own_template_is_no_news(serve: Any, logged: list[Any]) -> None:
    async with serve():
        pass
    assert not [entry for entry in logged if entry["event"] in ("chat_template.fallback", "reasoning.unread")]


@pytest.mark.parametrize(("word", "n"), [("<open>think", 1), ("<think>", 0)])
async def test_reasoning_in_a_form_that_is_not_known_is_told_of_at_the_start(serve: Any, logged: list[Any], word: str, n: int) -> None:
    model = FakeModel()
    model.vocabulary.chat_template = f"{CHATML}{{{{ '{word}' if messages[0].reasoning_content }}}}"
    async with serve(model):
        pass
    assert [entry["log_level"] for entry in logged if entry["event"] == "reasoning.unread"] == ["warning"] * n


async def test_the_version_is_the_packages(serve: Any) -> None:
    import cllm

    async with serve() as api:
        assert (await api.get("/version")).json == {"version": cllm.__version__}


async def test_the_model_is_listed_under_all_its_names_and_found_by_each(serve: Any) -> None:
    async with serve(alias=("one", "org/two")) as api:
        listed = (await api.get("/v1/models")).json
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["one", "org/two"]
        assert listed["data"][0]["meta"]["n_ctx"] == 4096
        assert (await api.get("/v1/models/org/two")).json["id"] == "org/two"
        missing = await api.get("/v1/models/three")
        assert (missing.status, missing.error["type"]) == (404, "not_found_error")


async def test_a_request_may_name_the_model_or_not_but_no_other(serve: Any) -> None:
    async with serve(alias=("one", "two")) as api:
        for model in ("one", "two", "", None):
            answer = await api.chat(model=model, max_tokens=1)
            assert (answer.status, answer.json["model"]) == (200, "one")
        answer = await api.chat(model="gpt-4")
    assert (answer.status, answer.error["type"], answer.error["param"]) == (404, "not_found_error", "model")
    assert "one, two" in answer.error["message"]
