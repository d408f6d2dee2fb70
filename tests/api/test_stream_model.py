"""A model that schedules itself, over HTTP: the same API, and a refusal by name for what it cannot do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from cllm.backend import StreamForm
from cllm.serve.stepless import StreamsOnly
from cllm.testing.fake_streams import FakeStreamModel
from cllm.testing.live import live_server
from cllm.testing.scripted import TOOL_TEMPLATE

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = FakeStreamModel()
    with live_server(StreamsOnly(model)) as url:
        yield url
    model.close()


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_conversation_is_answered_and_the_stream_says_the_same(url: str) -> None:
    status, body = post(url + CHAT, ASKED)
    answer = json.loads(body)
    assert (status, answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (200, 12, "length")
    status, stream = post(url + CHAT, {**ASKED, "stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2, "min_tokens": 3}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_model_cannot_do_is_refused_by_the_fields_name(url: str, fields: dict[str, Any], param: str, is_stream: bool) -> None:
    status, body = post(url + CHAT, {**ASKED, **fields, "stream": is_stream})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"]) == (400, "not_supported_error", param)


def test_the_best_of_several_is_refused_by_its_own_name_where_there_are_no_logprobs(url: str) -> None:
    status, body = post(url + "/v1/completions", {"prompt": "once", "best_of": 3, "max_tokens": 4})
    assert (status, json.loads(body)["error"]["param"]) == (400, "best_of")


RECOMMENDED = {"temp": "0.0", "top_k": "7", "penalty_last_n": "64", "penalty_repeat": "1.3", "xtc_probability": "0.5"}


@pytest.fixture(scope="module")
def recommended() -> Iterator[tuple[FakeStreamModel, str]]:
    """One whose file recommends more than it can do; of a window of repeats it says that it heeds it, and means some alone."""
    model = FakeStreamModel()
    model.info = attrs.evolve(model.info, metadata={f"general.sampling.{name}": value for name, value in RECOMMENDED.items()})
    model.heeds |= {"repeat_penalty", "repeat_last_n"}
    with live_server(StreamsOnly(model), sampling_defaults="model") as url:
        yield model, url
    model.close()


def test_what_a_file_recommends_and_its_model_cannot_do_refuses_no_request(recommended: tuple[FakeStreamModel, str]) -> None:
    model, url = recommended
    model.started.clear()
    plain = {"messages": ASKED["messages"], "max_tokens": 3}
    assert post(url + CHAT, plain)[0] == 200
    assert post(url + CHAT, {**plain, "repeat_penalty": 1.5, "repeat_last_n": 64})[0] == 200
    asked = [(one.temperature, one.top_k, one.repeat_penalty, one.repeat_last_n) for one in model.started]
    assert asked == [(0.0, 0, 1.3, None), (0.0, 0, 1.5, 64)]


@pytest.mark.parametrize(("field", "value"), [("top_k", 7), ("xtc_probability", 0.5)])
def test_a_client_that_asks_for_the_same_is_refused(recommended: tuple[FakeStreamModel, str], field: str, value: float) -> None:
    status, body = post(recommended[1] + CHAT, {**ASKED, field: value})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"]) == (400, "not_supported_error", field)


@pytest.fixture(scope="module")
def sharer() -> Iterator[str]:
    """The address of one that finds every prompt again, whoever asks."""
    model = FakeStreamModel()
    model.heeds -= {"cache_salt", "cache_prompt"}
    with live_server(StreamsOnly(model)) as url:
        yield url
    model.close()


@pytest.mark.parametrize(("fields", "param"), [({"cache_salt": "mine"}, "cache_salt"), ({"cache_prompt": False}, "cache_prompt")])
def test_prompts_are_kept_apart_or_the_wish_is_refused(url: str, sharer: str, fields: dict[str, Any], param: str) -> None:
    assert post(url + CHAT, {**ASKED, **fields})[0] == 200
    status, body = post(sharer + CHAT, {**ASKED, **fields})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"]) == (400, "not_supported_error", param)


def test_who_has_no_wish_to_share_nothing_is_answered(sharer: str) -> None:
    assert post(sharer + CHAT, {**ASKED, "cache_salt": "", "cache_prompt": True})[0] == 200


@pytest.fixture(scope="module")
def holder() -> Iterator[tuple[FakeStreamModel, str]]:
    """One that says of itself that it holds its answers to schemas and regular expressions."""
    model = FakeStreamModel()
    model.heeds |= {"json_schema", "regex"}
    assert model.vocabulary is not None
    model.vocabulary.chat_template = TOOL_TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
    with live_server(StreamsOnly(model)) as url:
        yield model, url
    model.close()


def test_a_form_goes_to_the_model_that_holds_its_answers_to_it(holder: tuple[FakeStreamModel, str]) -> None:
    model, url = holder
    for path, fields, form in (
        (CHAT, JSON_OBJECT, StreamForm("json_schema", '{"type":"object"}', "response_format")),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, StreamForm("regex", "a+", "structured_outputs.regex")),
        ("/v1/completions", {"prompt": "a", "messages": [], "json_schema": {}}, StreamForm("json_schema", "{}", "json_schema")),
    ):
        model.started.clear()
        assert post(url + path, {**ASKED, **fields})[0] == 200
        assert [request.form for request in model.started] == [form]


def test_reasoning_comes_before_the_form(holder: tuple[FakeStreamModel, str]) -> None:
    model, url = holder
    model.started.clear()
    assert post(url + CHAT, {**ASKED, **JSON_OBJECT, "chat_template_kwargs": {"enable_thinking": True}})[0] == 200
    assert post(url + CHAT, {**ASKED, "chat_template_kwargs": {"chat_template": "{{ x }}"}})[0] == 400, "it would be rendered elsewhere"
    (request,) = model.started
    assert request.form is not None
    assert request.form.after == "</think>"


@pytest.mark.parametrize(
    ("fields", "type_", "param"),
    [
        ({"grammar": 'root ::= "a"'}, "not_supported_error", "grammar"),
        ({"structured_outputs": {"choice": ["a"]}}, "not_supported_error", "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "(a"}}, "invalid_request_error", "structured_outputs.regex"),
        ({"json_schema": {"not": {}}}, "invalid_request_error", "json_schema"),
        ({**JSON_OBJECT, "tools": [TOOL]}, "not_supported_error", "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "not_supported_error", "tool_choice"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "not_supported_error", "tools"),  # type: ignore[dict-item]
    ],
)
def test_a_form_that_it_cannot_hold_is_refused_before_it_hears_of_it(
    holder: tuple[FakeStreamModel, str], fields: dict[str, Any], type_: str, param: str
) -> None:
    model, url = holder
    model.started.clear()
    status, body = post(url + CHAT, {**ASKED, **fields})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"], model.started) == (400, type_, param, [])


def test_the_pages_of_the_server_know_it(url: str) -> None:
    for path in ("/health", "/ready", "/metrics", "/slots", "/props", "/v1/models"):
        with urllib.request.urlopen(url + path, timeout=120) as response:
            assert response.status == 200
            response.read()


def test_defaults_of_a_surface_that_the_model_does_not_heed_refuse_nobody(url: str) -> None:
    assert post(url + "/generate", {"prompt": "once", "max_tokens": 5})[0] == 200
    assert post(url + "/generate", {"prompt": "once", "max_tokens": 5, "top_p": 0.5})[0] == 400


@pytest.fixture(scope="module")
def thinking() -> Iterator[str]:
    """One that is written for by its template, and reasons."""
    model = FakeStreamModel()
    model.vocabulary.chat_template = TOOL_TEMPLATE + "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}"
    with live_server(StreamsOnly(model)) as url:
        yield url
    model.close()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"reasoning_effort": "low"}),
        (CHAT, {"reasoning_budget": 0}),
        ("/api/chat", {"think": False, "stream": False}),
        ("/v1/messages", {"thinking": {"type": "disabled"}}),
    ],
)
def test_reasoning_is_switched_by_the_template_where_nobody_can_end_it(thinking: str, path: str, fields: dict[str, Any]) -> None:
    with urllib.request.urlopen(thinking + "/v1/models", timeout=120) as response:
        name = json.load(response)["data"][0]["id"]
    status, body = post(thinking + path, {"model": name, "messages": ASKED["messages"], "max_tokens": 5, **fields})
    assert status == 200, body


def test_a_number_of_tokens_for_reasoning_is_refused_by_its_name(thinking: str) -> None:
    status, body = post(thinking + CHAT, {**ASKED, "reasoning_budget": 5})
    assert (status, json.loads(body)["error"]["param"]) == (400, "reasoning_budget")
