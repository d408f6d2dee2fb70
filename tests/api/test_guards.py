"""What holds for every request: keys, ids, web pages, limits, and errors that are never HTML."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cllm.api import guards
from cllm.api.openai.completions import CompletionStream
from cllm.testing.fake import FakeModel


@pytest.fixture
def key_file(tmp_path: Any) -> str:
    path = tmp_path / "keys"
    path.write_text("# comment\nfrom-file\n")
    return str(path)


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_without_keys_the_server_is_open(serve: Any) -> None:
    async with serve() as api:
        assert (await api.chat()).status == 200


async def test_any_of_the_keys_opens_it_as_bearer_or_as_x_api_key(serve: Any, key_file: str) -> None:
    async with serve(api_key=("one", "two"), api_key_file=key_file) as api:
        for key in ("one", "two", "from-file"):
            assert (await api.get("/v1/models", Authorization=f"Bearer {key}")).status == 200
            assert (await api.get("/v1/models", Authorization=f"bearer {key}")).status == 200
            assert (await api.get("/v1/models", X_Api_Key=key)).status == 200
            for both in ({"Authorization": f"Bearer {key}", "X_Api_Key": "wrong"}, {"Authorization": "Bearer wrong", "X_Api_Key": key}):
                assert (await api.get("/v1/models", **both)).status == 200


@pytest.mark.parametrize("sent", ["first", "second", "third", "none of them"])
async def test_a_key_is_compared_with_every_one_in_a_time_that_does_not_tell_how_alike_they_are(
    serve: Any, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    compared: list[bytes] = []
    same = guards.hmac.compare_digest

    def note(key: bytes, given: bytes) -> bool:
        compared.append(key)
        return same(key, given)

    async with serve(api_key=("first", "second", "third")) as api:
        monkeypatch.setattr(guards.hmac, "compare_digest", note)
        answer = await api.get("/v1/models", Authorization=f"Bearer {sent}")
    assert answer.status == (401 if sent == "none of them" else 200)
    assert len(set(compared)) == 3


async def test_of_two_keys_the_bearers_says_whose_request_it_is(serve: Any) -> None:
    async with serve(api_key=("one", "two")) as api:
        made = await api.post("/v1/responses", {"input": "x", "max_output_tokens": 1}, Authorization="Bearer one", X_Api_Key="two")
        path = f"/v1/responses/{made.json['id']}"
        assert (await api.get(path, X_Api_Key="one")).status == 200
        assert (await api.get(path, X_Api_Key="two")).status == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer on"},
        {"Authorization": "Bearer oneone"},
        {"Authorization": "Bearer "},
        {"Authorization": "one"},
        {"Authorization": "Basic one"},
        {"Authorization": "Bearer \xff\xfe"},
        {"X_Api_Key": "ONE"},
        {"Authorization": "Bearer wrong", "X_Api_Key": "wrong, too"},
    ],
)
async def test_no_key_or_another_is_401_in_each_surfaces_shape(serve: Any, headers: dict[str, str]) -> None:
    async with serve(api_key=("one",)) as api:
        answer = await api.get("/v1/models", **headers)
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        native = await api.post("/generate", {"prompt": "x"}, **headers)
        assert (native.status, native.json["success"]) == (401, False)
        for path in ("/metrics", "/slots", "/props", "/tokenize", "/nowhere"):
            assert (await api.get(path, **headers)).status == 401
        assert api.scheduler.totals.n_submitted == 0


async def test_health_and_the_index_need_no_key(serve: Any) -> None:
    async with serve(api_key=("one",)) as api:
        for path in ("/health", "/ready", "/"):
            assert (await api.get(path)).status == 200


# --- ids --------------------------------------------------------------------------------------------------------------


async def test_a_request_id_is_echoed_on_answers_streams_and_errors(serve: Any) -> None:
    async with serve() as api:
        body = {"prompt": "x"}
        for path, sent in (("/v1/completions", body), ("/v1/completions", {**body, "stream": True}), ("/nowhere", {}), ("/generate", {})):
            answer = await api.post(path, sent, X_Request_Id="trace:1/a.b-c_d")
            assert answer.headers["x-request-id"] == "trace:1/a.b-c_d"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "ü", "<script>", None])
async def test_one_that_is_missing_or_odd_is_replaced(serve: Any, given: str | None) -> None:
    headers = {} if given is None else {"X_Request_Id": given}
    async with serve() as api:
        made = [(await api.get("/health", **headers)).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(len(one) == 32 for one in made)


# --- pages of other origins -------------------------------------------------------------------------------------------


async def test_cors_is_off_by_default(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(max_tokens=1)
        preflight = await api.ask("OPTIONS", "/v1/chat/completions", Origin="https://a.example", Access_Control_Request_Method="POST")
    assert not [name for name, _ in [*answer.headers.items(), *preflight.headers.items()] if name.lower().startswith("access-control")]


async def test_options_have_no_content_and_say_so(serve: Any) -> None:
    async with serve() as api:
        for path, headers in (
            ("/v1/chat/completions", {}),
            ("/generate", {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}),
        ):
            answer = await api.ask("OPTIONS", path, **headers)
            assert answer.status in (200, 204)
            assert answer.body == b""
            assert "content-type" not in answer.headers
        nowhere = await api.ask("OPTIONS", "/nowhere")
    assert nowhere.headers["content-type"] == "application/json"


async def test_a_slash_at_the_end_changes_nothing(serve: Any) -> None:
    async with serve(api_key=("k",)) as api:
        assert (await api.get("/health/")).status == 200
        assert (await api.get("/v1/models/")).status == 401


async def test_an_origin_that_is_named_may_read_and_another_may_not(serve: Any) -> None:
    async with serve(cors_origin=("https://a.example",), api_key=("k",)) as api:
        preflight = await api.ask("OPTIONS", "/v1/chat/completions", Origin="https://a.example", Access_Control_Request_Method="POST")
        named = await api.get("/v1/models", Origin="https://a.example", X_Api_Key="k")
        refused = await api.get("/v1/models", Origin="https://a.example")
        other = await api.get("/v1/models", Origin="https://b.example", X_Api_Key="k")
    assert preflight.status == 204
    assert "Content-Length" not in preflight.headers
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert "authorization" in preflight.headers["Access-Control-Allow-Headers"]
    assert preflight.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
    assert named.headers["Access-Control-Allow-Origin"] == refused.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert refused.status == 401
    assert "Access-Control-Allow-Origin" not in other.headers
    assert named.headers["Vary"] == other.headers["Vary"] == "Origin"


@pytest.mark.parametrize("origins", [("*",), ("https://a.example",)])
async def test_a_page_may_send_whatever_headers_its_library_adds(serve: Any, origins: tuple[str, ...]) -> None:
    asked = "authorization,content-type,x-stainless-os,anthropic-version"
    sent = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": asked}
    async with serve(cors_origin=origins) as api:
        answer = await api.ask("OPTIONS", "/v1/chat/completions", Origin="https://a.example", **sent)
        odd = await api.ask(
            "OPTIONS", "/v1/chat/completions", Origin="https://a.example", **{**sent, "Access_Control_Request_Headers": "a: b"}
        )
        foreign = await api.ask("OPTIONS", "/v1/chat/completions", Origin="https://b.example", **sent)
    assert answer.headers["Access-Control-Allow-Headers"] == asked
    assert "Access-Control-Request-Headers" in answer.headers.getlist("Vary")
    assert odd.headers["Access-Control-Allow-Headers"].startswith("authorization")
    assert ("Access-Control-Allow-Headers" in foreign.headers) is (origins == ("*",))


async def test_a_star_opens_it_to_every_page(serve: Any) -> None:
    async with serve(cors_origin=("*",)) as api:
        answer = await api.chat(max_tokens=1, stream=True)
        assert "Access-Control-Allow-Origin" not in answer.headers  # it did not ask
        assert (await api.get("/health", Origin="https://b.example")).headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example", "Host": "127.0.0.1:8080"}, 403),
        ({"Origin": "https://evil.example:8443", "Host": "evil.example"}, 403),
        ({"Origin": "https://localhost.evil.example"}, 403),
        ({"Origin": "https://evil.example/#localhost"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 200),
        ({"Origin": "http://["}, 403),
        ({"Origin": "https://chat.example"}, 200),
        ({"Origin": "https://own.example", "Host": "own.example"}, 200),
        ({"Origin": "http://own.example", "Host": "OWN.example:80"}, 200),
        ({"Origin": "https://own.example", "Host": "own.example:443"}, 200),
        ({"Origin": "http://192.168.1.5:8080", "Host": "192.168.1.5:8080"}, 200),
        ({"Origin": "https://own.example", "Host": "127.0.0.1:8080", "Sec_Fetch_Site": "same-origin"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://127.0.0.1"}, 200),
        ({"Origin": "http://[::1]:5173"}, 200),
        ({"Origin": "http://app.localhost"}, 200),
        ({"Origin": "app://obsidian.md"}, 200),
        ({"Origin": "file://"}, 200),
        ({"Origin": "tauri://localhost"}, 200),
        ({"Origin": "vscode-webview://1a2b"}, 200),
        ({"Origin": "chrome-extension://abcdef"}, 200),
    ],
)
async def test_without_keys_a_page_of_another_site_can_make_the_server_do_nothing(serve: Any, headers: dict[str, str], status: int) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    async with serve(cors_origin=("https://chat.example",)) as api:
        answer = await api.post("/v1/completions", body, Content_Type="text/plain", **headers)
        assert answer.status == status, answer.body
        assert api.scheduler.totals.n_submitted == (status == 200)
        native = await api.post("/generate", body, **headers)
        assert (native.status, native.json["success"]) == (status, status == 200)
        assert (await api.get("/v1/models", **headers)).status == 200


@pytest.mark.parametrize(
    ("origin", "server", "status"),
    [
        ("http://evil.example:8080", ("127.0.0.1", 8080), 403),
        ("http://evil.example:8080", ("::1", 8080), 403),
        ("http://evil.example:8080", ("::ffff:127.0.0.1", 8080), 403),
        ("http://[::1]:8080", ("::1", 8080), 200),
        ("http://127.0.0.2:8080", ("127.0.0.2", 8080), 200),
        ("https://evil.example:8080", ("127.0.0.1", 8080), 200),  # whose certificate a browser has seen
        ("http://chat.example:8080", ("127.0.0.1", 8080), 200),
        ("http://server.lan:8080", ("192.168.1.5", 8080), 200),
        ("http://server.lan:8080", ("/run/cllm.sock", None), 200),
    ],
)
async def test_a_page_whose_name_is_made_to_point_to_this_machine_is_not_the_servers_own(
    serve: Any, origin: str, server: tuple[str, int], status: int
) -> None:
    async with serve(cors_origin=("http://chat.example:8080",)) as api:
        answer = await attrs.evolve(api, server=server).post(
            "/v1/completions", {"prompt": "x", "max_tokens": 1}, Origin=origin, Host=origin.partition("://")[2]
        )
        assert answer.status == status
        assert api.scheduler.totals.n_submitted == (status == 200)


@pytest.mark.parametrize("host", ["a..b", ".", "a" * 64, "x" * 64 + ".example", "[", "a b", "é", ""])
async def test_a_host_that_can_be_none_is_a_request_like_others(serve: Any, host: str) -> None:
    async with serve(api_key=("k",)) as api:
        assert (await api.get("/health", Host=host)).status == 200
        assert (await api.get("/nowhere", Host=host)).status == 401
        assert (await api.get("/v1/models", Host=host, Authorization="Bearer k")).status == 200


@pytest.mark.parametrize("settings", [{"cors_origin": ("*",)}, {"api_key": ("k",)}])
async def test_with_keys_or_where_all_pages_may_call_none_is_refused(serve: Any, settings: dict[str, Any]) -> None:
    async with serve(**settings) as api:
        for origin in ("https://a.example", "null"):
            body = {"prompt": "x", "max_tokens": 1}
            assert (await api.post("/v1/completions", body, Origin=origin, X_Api_Key="k")).status == 200


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_an_unknown_path_is_404_in_json(serve: Any) -> None:
    async with serve() as api:
        for path in ("/nowhere", "/v1", "/v1/nowhere", "/v1/chat/completions/x", "/%00", "/../etc/passwd"):
            answer = await api.get(path)
            assert (answer.status, answer.error["type"]) == (404, "not_found_error"), path


async def test_a_slash_at_the_end_is_no_other_path(serve: Any) -> None:
    async with serve() as api:
        assert (await api.get("/v1/models/")).status == 200


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("PUT", "/health"), ("POST", "/metrics")]
)
async def test_another_method_is_405_and_says_which_are_taken(serve: Any, method: str, path: str) -> None:
    async with serve() as api:
        answer = await api.ask(method, path)
    assert (answer.status, answer.error["type"]) == (405, "invalid_request_error")
    assert {"GET", "POST"} & set(answer.headers["Allow"].split(", "))


async def test_a_body_over_the_limit_is_413_whether_it_says_so_or_not(serve: Any) -> None:
    async with serve(max_body_mb=0.001) as api:
        answer = await api.complete("x" * 2000)
        assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
        native = await api.post("/generate", {"prompt": "x" * 2000})
        assert (native.status, native.json["success"]) == (413, False)
        assert (await api.complete("x" * 500)).status == 200
        async with api.asking("/v1/completions", *[b" " * 500] * 5) as exchange:  # without a Content-Length
            assert (await exchange.answer()).status == 413
        async with api.asking("/v1/completions", *[b" " * 500] * 5, complete=False) as exchange:  # and may never come to an end
            assert (await exchange.answer()).status == 413
        await api.idle()


async def test_a_body_that_does_not_come_is_408(serve: Any) -> None:
    async with serve(body_timeout_s=0.05) as api:
        for path in ("/v1/completions", "/generate"):
            async with api.asking(path, b'{"prompt": ', complete=False) as exchange:
                answer = await exchange.answer()
            assert answer.status == 408
            assert (answer.error["type"] == "timeout_error") if path.startswith("/v1") else (answer.json["success"] is False)


async def test_a_mistake_of_ours_is_500_in_json_without_its_details_and_logged_once(serve: Any, logged: list[Any]) -> None:
    model = FakeModel()
    async with serve(model) as api:
        model.vocabulary.tokenize = lambda *a, **k: 1 / 0  # type: ignore[method-assign,assignment]
        answer = await api.complete("x")
        native = await api.post("/generate", {"prompt": "x"})
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert native.json["success"] is False
    assert b"division" not in answer.body + native.body
    assert b"Traceback" not in answer.body
    assert [(entry["event"], entry["path"]) for entry in logged if entry["log_level"] == "error"] == [
        ("request.failed", "/v1/completions"),
        ("request.failed", "/generate"),
    ]
    assert next(entry for entry in logged if "request_id" in entry)["request_id"] == answer.headers["x-request-id"]


async def test_a_stream_that_fails_by_a_mistake_of_ours_is_found_in_the_log_by_its_id(
    serve: Any, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionStream, "delta", lambda *_: 1 / 0)
    async with serve() as api:
        answer = await api.complete("x", stream=True)
    assert answer.chunks[-1]["error"]["type"] == "server_error"
    (failed,) = [entry for entry in logged if entry["event"] == "stream.failed"]
    assert failed["request_id"] == answer.headers["x-request-id"]


async def test_prompts_and_answers_are_logged_only_when_asked_for_and_keys_never(serve: Any, logged: list[Any]) -> None:
    for log_prompts in (False, True):
        logged.clear()
        async with serve(log_prompts=log_prompts, api_key=("key-of-mine",)) as api:
            answer = await api.post("/v1/completions", {"prompt": "a secret"}, X_Api_Key="key-of-mine", X_Request_Id="r")
            stream = await api.post("/v1/completions", {"prompt": [115, 101], "stream": True}, X_Api_Key="key-of-mine")
        texts = [entry["text"] for entry in logged if "text" in entry]
        assert "key-of-mine" not in str(logged)
        assert ("secret" in str(logged)) is log_prompts
        assert texts == (["<bos>a secret", answer.text(), "se", stream.text()] if log_prompts else [])
    logged.clear()
    async with serve(log_prompts=True) as api:
        await api.complete(["one", "two"], n=3)
    assert [entry["text"] for entry in logged if entry["event"] == "prompt"] == ["<bos>one", "<bos>two"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"prompt": "x", "prompt": "y"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "other": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud83d"}',
        '{"prompt": "x"}'.encode("utf-16"),
    ],
)
async def test_malformed_json_is_400_everywhere(serve: Any, body: bytes) -> None:
    async with serve() as api:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/apply-template"):
            answer = await api.post(path, body)
            assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), path
        for path in ("/generate", "/generate_stream", "/encode", "/decode"):
            answer = await api.post(path, body)
            assert (answer.status, answer.json["success"]) == (400, False), path
        assert (await api.complete("x")).status == 200


# --- quotas and the queue ---------------------------------------------------------------------------------------------


async def test_a_key_with_as_many_completions_under_way_as_it_may_gets_429_and_another_key_is_served(serve: Any) -> None:
    slow, long = FakeModel(step_s=lambda batch: 0.005), b'{"prompt": "x", "max_tokens": 4000, "stream": true}'
    async with (
        serve(slow, api_key=("one cap=2", "other")) as api,
        api.asking("/v1/completions", long, X_Api_Key="one") as exchange,
    ):
        await exchange.receive()
        refused = await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 2}, X_Api_Key="one")
        assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "quota_exceeded_error", "quota_exceeded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 1}, X_Api_Key="one")).status == 200
        assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 3}, X_Api_Key="other")).status == 200
        exchange.leave()


async def test_more_completions_in_one_request_than_its_key_may_have_are_no_matter_of_waiting(serve: Any) -> None:
    async with serve(api_key=("one cap=2", "other")) as api:
        refused = await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 3}, X_Api_Key="one")
        assert (refused.status, refused.error["param"], "Retry-After" in refused.headers) == (400, "n", False)
        assert refused.error["message"] == "n: 3 completions in one request, and this key may have 2 under way"
        several = await api.post("/v1/completions", {"prompt": ["x", "y", "z"], "max_tokens": 1}, X_Api_Key="one")
        assert (several.status, several.error["param"]) == (400, "prompt")
        assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 2}, X_Api_Key="one")).status == 200


async def test_the_cap_of_all_keys_holds_only_where_there_are_keys(serve: Any) -> None:
    async with serve(api_key=("one",), key_cap=1) as api:
        assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 2}, X_Api_Key="one")).status == 400
    async with serve(key_cap=1) as api:
        assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 2})).status == 200


async def test_a_key_may_have_a_priority_that_its_requests_cannot_pass(serve: Any) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.005), api_key=("first", "urgent priority=-1", "other priority=5")) as api:
        for key, status in (("first", 400), ("urgent", 200)):  # or whoever names a lower one has all others wait
            assert (await api.post("/v1/completions", {"prompt": "x", "priority": -1}, X_Api_Key=key)).status == status
        refused = await api.post("/v1/completions", {"prompt": "x", "priority": 4}, X_Api_Key="other")
        assert (refused.status, refused.error["param"]) == (400, "priority")
        async with api.asking("/v1/completions", b'{"prompt": "x", "max_tokens": 4000, "stream": true}', X_Api_Key="other") as exchange:
            await exchange.receive()
            (running,) = (await api.get("/slots", X_Api_Key="other")).json
            exchange.leave()
    assert running["priority"] == 5


async def test_without_keys_any_priority_may_be_named(serve: Any) -> None:
    async with serve() as api:
        assert (await api.post("/v1/completions", {"prompt": "x", "priority": -9})).status == 200


async def test_refusals_are_counted_by_why(serve: Any) -> None:
    async with serve(FakeModel(step_s=lambda batch: 0.005), api_key=("one cap=1",)) as api:
        async with api.asking("/v1/completions", b'{"prompt": "x", "max_tokens": 4000, "stream": true}', X_Api_Key="one") as exchange:
            await exchange.receive()
            await api.post("/v1/completions", {"prompt": "x"}, X_Api_Key="one")
            exchange.leave()
        metrics = (await api.get("/metrics", X_Api_Key="one")).body.decode()
        assert 'cllm_refusals_total{why="quota_exceeded"} 1.0' in metrics
