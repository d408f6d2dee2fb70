"""What is learnt of upstreams when the backend loads, and who is told of a key."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio

from cllm.errors import LoadFailed
from cllm_backend_upstream import model as upstream_model

WAIT_S = 120.0  # ends a test that hangs


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ({"data": []}, "serves no model"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, "choose one: --backend-option model=NAME, of a, b"),
        ({"models": []}, "no list of models"),
        ("garbage", "no list of models"),
    ],
)
def test_what_is_no_use_is_said_in_one_line(faulty: Any, make_model: Any, models: Any, complaint: str) -> None:
    faulty.models = models
    with pytest.raises(LoadFailed, match=complaint):
        make_model(faulty.url)


def test_one_of_several_models_is_chosen_by_its_name(faulty: Any, make_model: Any) -> None:
    faulty.models = {"data": [{"id": "a"}, {"id": "b", "owned_by": "vllm", "max_model_len": 4096}]}
    model = make_model(faulty.url, model="b")
    assert (model.info.name, model.info.architecture, model.n_ctx) == ("b", "upstream (vllm)", 4096)
    assert {"top_k", "regex", "continue_final_message"} <= model.heeds
    with pytest.raises(LoadFailed, match="serves no model c, but a, b"):
        make_model(faulty.url, model="c")


@pytest.mark.parametrize(
    ("owner", "pages", "kind"),
    [
        ("hf.co/bartowski", {"/api/version": {"version": "0.12.3"}}, "ollama"),
        ("koboldcpp", {"/api/version": {"version": "0.7.0"}}, "other"),
        ("library", {}, "ollama"),
        ("somebody", {"/api/version": {"version": "v170", "commit": "1f3", "build_date": "today"}}, "other"),
        ("somebody", {"/api/version": "<html>"}, "other"),
        ("somebody", {"/info": {"router": "text-generation-router"}}, "tgi"),
        ("somebody", {}, "other"),
        ("vllm", {"/api/version": {"version": "0.12.3"}}, "vllm"),
    ],
)
def test_who_is_not_known_by_its_models_owner_is_by_what_it_has(faulty: Any, make_model: Any, owner: str, pages: Any, kind: str) -> None:
    faulty.models, faulty.pages = {"data": [{"id": "m", "owned_by": owner}]}, pages
    assert make_model(faulty.url).info.architecture == f"upstream ({kind})"
    assert make_model(faulty.url, kind="llamacpp").info.architecture == "upstream (llamacpp)"


def test_a_model_that_ollama_has_from_elsewhere_is_asked_nothing_that_ollama_ignores(faulty: Any, make_front: Any) -> None:
    faulty.models, faulty.pages = {"data": [{"id": "m", "owned_by": "user"}]}, {"/api/version": {"version": "0.12.3"}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    front = make_front(faulty.url)
    refused = [front.chat(**fields) for fields in ({"tools": tools, "tool_choice": "required"}, {"logprobs": True})]
    assert [(reply.status, reply.error["param"]) for reply in refused] == [(400, "tool_choice"), (400, "logprobs")]
    assert faulty.asked == []


def test_a_server_that_nobody_answers_for_is_named(faulty: Any, make_model: Any) -> None:
    faulty.stop()
    with pytest.raises(LoadFailed, match=f"no server answers: {faulty.url}: "):
        make_model(faulty.url, connect_s="1")


def test_an_adapter_has_the_context_of_its_model(faulty: Any, make_model: Any) -> None:
    base = {"id": "base", "owned_by": "vllm", "max_model_len": 32_768}
    faulty.models = {"data": [base, {"id": "lora", "owned_by": "vllm", "parent": "base", "max_model_len": None}]}
    assert make_model(faulty.url, model="lora").n_ctx == 32_768


def test_of_several_the_least_context_holds_and_they_are_of_one_kind(make_faulty: Any, make_model: Any, caplog: Any) -> None:
    small, large, other = make_faulty(), make_faulty(), make_faulty()
    small.models = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]}
    large.models = {"data": [{"id": "n", "owned_by": "vllm", "max_model_len": 8192}]}
    other.models = {"data": [{"id": "m", "owned_by": "llamacpp"}]}
    assert make_model(large.url, small.url).n_ctx == 4096
    with pytest.raises(LoadFailed, match=f"{small.url} is of the kind vllm, and {other.url} of llamacpp"):
        make_model(small.url, other.url)
    assert make_model(small.url, other.url, kind="vllm").info.name == "m"
    assert make_model(small.url, large.url, model="m").info.name == "m"
    assert f"{large.url} serves no model m, but n" in caplog.text


def test_it_is_enough_that_one_answers(make_faulty: Any, make_front: Any) -> None:
    gone, here = make_faulty(), make_faulty()
    gone.stop()
    front = make_front(gone.url, here.url, health_s="60")
    assert {front.chat().status for _ in range(3)} == {200}


def test_the_key_is_sent_with_every_request(faulty: Any, make_front: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret")
    assert make_front(faulty.url, key_file=str(tmp_path / "key")).chat().status == 200
    assert faulty.asked[0].headers["authorization"] == "Bearer s3cret"


def test_unknown_servers_get_what_openais_reference_has_and_nothing_else(faulty: Any, make_front: Any) -> None:
    front = make_front(faulty.url)
    reply = front.chat(top_k=3)
    assert (reply.status, reply.error["param"], faulty.asked) == (400, "top_k", [])
    assert front.chat(temperature=0.5, top_p=0.9).status == 200
    assert {"model", "messages", "stream", "stream_options", "seed"} <= faulty.asked[0].body.keys()
    assert (faulty.asked[0].body["model"], faulty.asked[0].body["temperature"]) == ("faulty-1", 0.5)


def test_logprobs_that_it_does_not_tell_are_not_left_out_in_silence(faulty: Any, make_front: Any) -> None:
    def behave(asked: Any) -> None:
        asked.begin()
        asked.token("w0 ")
        faulty.wait_left(asked)

    faulty.behave = behave
    reply = make_front(faulty.url).chat(logprobs=True, stream=True)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "not_supported_error", "logprobs")
    assert faulty.left.wait(120)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("ollama", ("none", None)),
        ("openai", ("none", None)),
        ("other", ("none", None)),
        ("llamacpp", (None, {"enable_thinking": False})),
    ],
)
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"think": False}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 5}),
        ("/v1/chat/completions", {"reasoning_effort": "none"}),
    ],
    ids=["ollama's", "anthropic's", "openai's"],
)
def test_no_reasoning_is_asked_for_in_the_words_of_each_kind(
    faulty: Any, make_front: Any, kind: str, told: Any, path: str, fields: dict[str, Any]
) -> None:
    front = make_front(faulty.url, kind=kind)
    assert front.post(path, {"messages": [{"role": "user", "content": "hello"}], **fields}).status == 200
    assert tuple(faulty.asked[0].body.get(name) for name in ("reasoning_effort", "chat_template_kwargs")) == told


def test_the_operator_may_know_better(faulty: Any, make_front: Any) -> None:
    assert make_front(faulty.url, kind="llamacpp").chat(top_k=3).status == 200


def test_a_thread_that_cannot_begin_is_a_load_that_has_failed(faulty: Any, make_model: Any, monkeypatch: Any, caplog: Any) -> None:
    model = make_model(faulty.url)

    def fail(_main: Any) -> NoReturn:
        raise OSError("too many open files")

    monkeypatch.setattr(trio, "run", fail)
    with pytest.raises(LoadFailed, match="did not begin"):
        model.open(lambda _event: None)
    assert "too many open files" in caplog.text
    model.close()
    assert not model._thread.is_alive()


def test_one_that_begins_when_it_was_given_up_ends_at_once(faulty: Any, make_model: Any, monkeypatch: Any) -> None:
    model = make_model(faulty.url)
    run, join, is_its_turn = trio.run, model._thread.join, threading.Event()

    def run_late(main: Any) -> None:
        assert is_its_turn.wait(WAIT_S)
        run(main)

    def join_late() -> None:
        is_its_turn.set()
        join(WAIT_S)

    monkeypatch.setattr(trio, "run", run_late)
    monkeypatch.setattr(upstream_model, "START_S", 0.01)
    monkeypatch.setattr(model._thread, "join", join_late)
    with pytest.raises(LoadFailed, match="did not begin"):
        model.open(lambda _event: None)
    model.close()
    assert not model._thread.is_alive()
