"""A model that schedules itself, over HTTP: the same API, and a refusal by name for what it cannot do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from cllm.serve.stepless import StreamsOnly
from cllm.testing.fake_streams import FakeStreamModel
from cllm.testing.live import live_server

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = FakeStreamModel()
    with live_server(StreamsOnly(model)) as url:
        yield url
    model.close()


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
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


def test_the_pages_of_the_server_know_it(url: str) -> None:
    for path in ("/health", "/ready", "/metrics", "/slots", "/props", "/v1/models"):
        with urllib.request.urlopen(url + path, timeout=30) as response:
            assert response.status == 200
            response.read()
